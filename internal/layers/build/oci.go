package build

import (
	"archive/tar"
	"context"
	"crypto/sha256"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"os"
	"path"
	"slices"
	"strings"

	v1 "github.com/google/go-containerregistry/pkg/v1"

	"github.com/sandsea/sandsea/internal/image"
)

const (
	refName      = "org.opencontainers.image.ref.name"
	imageName    = "io.containerd.image.name"
	maxIndexes   = 8    // indexes inside indexes
	maxConfigEnv = 1000 // variables
)

// OCI imports one image of a tar of an OCI image layout directory, or of the older form that docker save writes. Each
// of its layers becomes one of ours. Every size and digest on the way is verified.
func (b *Builder) OCI(ctx context.Context, r io.Reader, opts ArchiveOptions) (Result, error) {
	return b.archive(ctx, "oci", r, opts)
}

func (b *Builder) archive(ctx context.Context, kind string, r io.Reader, opts ArchiveOptions) (Result, error) {
	key := opts.Key
	if key != "" {
		key += " " + opts.Reference
	}
	r, done := own(r, opts.Key)
	return b.join(ctx, kind, key, opts.Report, done, func(ctx context.Context, p *progress) (Result, error) {
		if err := roomFor(b.dir, opts.Size, b.limits.Reserve); err != nil {
			return Result{}, err
		}
		p.stage("resolve", "bytes", opts.Size)
		used, over, err := b.turn(ctx, p)
		if err != nil {
			return Result{}, err
		}
		defer over()
		a, done, err := b.openLayout(ctx, r, opts, used.grow, p)
		if err != nil {
			return Result{}, err
		}
		defer done()
		img, err := a.resolve(ctx, opts.Reference)
		if err != nil {
			return Result{}, err
		}
		img.source = kind
		return b.ociImage(ctx, img, a.image.object, a.open, used, p)
	})
}

// ociImage is what is known of one image before its layers are read.
type ociImage struct {
	name   string
	source string // of its layers
	config image.Config
	layers []ociLayer
}

type ociLayer struct {
	blob   ociBlob
	diffID string // of the uncompressed tar; empty if unknown
	have   *image.Layer
}

// ociBlob is a part of an image, and what it must be.
type ociBlob struct {
	name   string // in the archive
	digest string // "sha256:…"; empty when the archive does not say
	size   int64  // -1 when the archive does not say
}

// openBlob reads a layer's blob; check, once it has been read to its end, tells whether it was the right one.
type openBlob func(ociBlob) (r io.Reader, check func() error, err error)

// ociImage makes the layers of img that are not here yet.
func (b *Builder) ociImage(
	ctx context.Context, img ociImage, object string, open openBlob, used *usage, p *progress,
) (_ Result, err error) {
	var total int64
	top := -1 // the highest layer that is to be made
	for i, l := range img.layers {
		if l.have == nil {
			total += max(l.blob.size, 0)
			top = i
		}
	}
	if err := roomFor(b.dir, total, b.limits.Reserve); err != nil {
		return Result{}, err
	}
	p.stage("unpack", "bytes", total)
	var made, below []*layer
	defer func() {
		if err != nil {
			for _, l := range made {
				err = errors.Join(err, l.data.Abort())
			}
		}
	}()
	for i, l := range img.layers {
		if l.have != nil {
			used.entries, used.bytes = used.entries+l.have.Files, used.bytes+l.have.Bytes
			if i < top {
				if err := used.more(); err != nil {
					return Result{}, err
				}
				known, err := b.load(ctx, *l.have)
				if err != nil {
					return Result{}, err
				}
				below = append(below, known)
			}
			continue
		}
		p.detail(fmt.Sprintf("layer %d of %d", i+1, len(img.layers)))
		packed, check, err := open(l.blob)
		if err != nil {
			return Result{}, err
		}
		fresh, err := b.tarLayer(ctx, packed, tarReader{
			archive: fmt.Sprintf("%s layer %d", object, i+1), whiteouts: true, lower: below, used: used,
			diffID: l.diffID,
		}, p.add)
		if err != nil {
			return Result{}, err
		}
		made = append(made, fresh)
		if err := check(); err != nil {
			return Result{}, err
		}
		// Those above look names up in it as overlayfs would.
		fresh.root.overlay()
		below = append(below, fresh)
	}
	p.stage("write", "bytes", 0)
	fresh, err := b.commit(ctx, made, img.source)
	if err != nil {
		return Result{}, err
	}
	out := make([]image.Layer, 0, len(img.layers))
	for _, l := range img.layers {
		if l.have != nil {
			out = append(out, *l.have)
			continue
		}
		out, fresh = append(out, fresh[0]), fresh[1:]
	}
	b.remember(img.layers, out)
	return Result{
		Name: img.name, Layers: lastOfEach(out), Config: img.config, Notes: used.notes(), Existed: top < 0,
	}, nil
}

// lastOfEach drops a layer that lies higher once more: what it holds shows from there.
func lastOfEach(layers []image.Layer) []image.Layer {
	var out []image.Layer
	for i, l := range layers {
		if !slices.ContainsFunc(layers[i+1:], func(o image.Layer) bool { return o.Digest == l.Digest }) {
			out = append(out, l)
		}
	}
	return out
}

// layout is the archive, indexed.
type layout struct {
	image imageReader
	r     io.ReaderAt
	files map[string]extent // by cleaned name
	used  *usage            // for its names, which are apart from those of the image
}

type extent struct{ off, size int64 }

// openLayout finds where each file of the archive lies. An archive that cannot be read at any place, or that is
// compressed, is first copied to a temporary file.
func (b *Builder) openLayout(
	ctx context.Context, r io.Reader, opts ArchiveOptions, grow func(entries, metadata int64) error, p *progress,
) (_ *layout, done func(), err error) {
	a := &layout{files: map[string]extent{}, used: &usage{grow: grow}}
	a.image = imageReader{
		object: opts.archive(), limits: b.limits, want: here(), parts: a, again: "save the image again, for this platform",
	}
	done = func() {}
	src, seekable := r.(interface {
		io.ReaderAt
		io.Seeker
	})
	if seekable {
		if _, name, closer, derr := decompress(io.NewSectionReader(src, 0, 1<<20)); derr != nil || name != "" {
			seekable = false
			if derr == nil {
				closer()
			}
		}
	}
	var size int64
	if seekable {
		if size, err = src.Seek(0, io.SeekEnd); err != nil {
			return nil, nil, fmt.Errorf("%s: %w", a.image.object, err)
		}
		a.r = src
	} else {
		f, err := os.CreateTemp(b.tmp(), "oci-")
		if err != nil {
			return nil, nil, fmt.Errorf("%s: %w", a.image.object, err)
		}
		done = func() { _ = f.Close() }
		if err := os.Remove(f.Name()); err != nil {
			done()
			return nil, nil, fmt.Errorf("%s: %w", a.image.object, err)
		}
		if size, err = b.spool(ctx, f, r, a, p); err != nil {
			done()
			return nil, nil, err
		}
		a.r = f
	}
	if err := a.index(ctx, size); err != nil {
		done()
		return nil, nil, err
	}
	return a, done, nil
}

// spool copies the archive, decompressed, to f.
func (b *Builder) spool(ctx context.Context, f *os.File, r io.Reader, a *layout, p *progress) (int64, error) {
	packed := &meter{alive: aliveIn(ctx), r: r, on: p.add}
	t := tarReader{archive: a.image.object, limits: b.limits}
	plain, name, closer, err := decompress(packed)
	if err != nil {
		return 0, t.broken(err)
	}
	defer closer()
	next := int64(0)
	n, err := io.Copy(onlyWriter{f}, &unpacked{r: plain, check: func(total int64) error {
		if total > b.limits.Bytes {
			return t.over("unpacked", gib(b.limits.Bytes))
		}
		if name != "" && total > ratioFrom && total/max(packed.count(), 1) > b.limits.Ratio {
			return t.over("times its compressed size", fmt.Sprint(b.limits.Ratio))
		}
		if total >= next {
			next = total + 64<<20
			return roomFor(b.dir, 0, b.limits.Reserve/2)
		}
		return nil
	}})
	if err != nil {
		return 0, roomErr(b.dir, t.broken(err))
	}
	return n, nil
}

// onlyWriter keeps io.Copy from asking an *os.File to read for itself, which hides errors of the reader.
type onlyWriter struct{ io.Writer }

// index notes where each regular file lies.
func (a *layout) index(ctx context.Context, size int64) error {
	sec := io.NewSectionReader(a.r, 0, size)
	tr := tar.NewReader(sec)
	t := tarReader{archive: a.image.object, limits: a.image.limits, used: a.used}
	links := map[string]string{}
	for {
		if err := context.Cause(ctx); err != nil {
			return err
		}
		hdr, err := tr.Next()
		if errors.Is(err, io.EOF) {
			break
		}
		if err != nil {
			return t.broken(err)
		}
		t.entry++
		t.name = hdr.Name
		parts, err := t.split(hdr.Name, "its name")
		if err != nil {
			return err
		}
		if err := t.count(1, int64(len(hdr.Name)+len(hdr.Linkname))); err != nil {
			return err
		}
		name := path.Join(parts...)
		switch hdr.Typeflag {
		case tar.TypeReg:
			off, err := sec.Seek(0, io.SeekCurrent)
			if err != nil {
				return fmt.Errorf("%s: %w", a.image.object, err)
			}
			if hdr.Size > size-off {
				return t.broken(io.ErrUnexpectedEOF)
			}
			for k := range hdr.PAXRecords {
				if strings.HasPrefix(k, "GNU.sparse.") {
					return t.bad("is a sparse file, which an image layout has not")
				}
			}
			a.files[name] = extent{off, hdr.Size}
			delete(links, name)
		case tar.TypeSymlink, tar.TypeLink:
			// docker save links layers that are equal.
			to := hdr.Linkname
			if hdr.Typeflag == tar.TypeSymlink {
				to = path.Join(path.Dir(name), to)
			}
			links[name] = path.Clean(to)
		}
	}
	for name, to := range links {
		if e, ok := a.files[to]; ok {
			a.files[name] = e
		}
	}
	if len(a.files) == 0 {
		return a.image.bad("holds no files")
	}
	return nil
}

// open reads a blob; check, once it has been read to its end, tells whether it was the right one.
func (a *layout) open(b ociBlob) (r io.Reader, check func() error, err error) {
	e, ok := a.files[b.name]
	if !ok {
		return nil, nil, a.image.bad("has no %q, which the image needs", clip(b.name))
	}
	if b.size >= 0 && e.size != b.size {
		return nil, nil, a.image.bad("%q has %d bytes, its descriptor says %d", clip(b.name), e.size, b.size)
	}
	sec := io.NewSectionReader(a.r, e.off, e.size)
	if b.digest == "" {
		return sec, func() error { return nil }, nil
	}
	h := sha256.New()
	return io.TeeReader(sec, h), func() error {
		// A decompressor may leave what follows its stream.
		if _, err := io.Copy(h, sec); err != nil {
			return fmt.Errorf("%s: %w", a.image.object, err)
		}
		if got := image.FromHash(h); string(got) != b.digest {
			return a.image.bad("%q has digest %s, its descriptor says %s", clip(b.name), got, b.digest)
		}
		return nil
	}, nil
}

func (a *layout) document(_ context.Context, b ociBlob) ([]byte, error) {
	r, check, err := a.open(b)
	if err != nil {
		return nil, err
	}
	doc, err := a.image.readDocument(r, b.name)
	if err != nil {
		return nil, err
	}
	return doc, check()
}

func (a *layout) descriptor(d v1.Descriptor) (ociBlob, error) {
	digest, err := image.ParseDigest(d.Digest.String())
	if err != nil {
		return ociBlob{}, a.image.bad("names a blob %q, which is no sha256 digest", clip(d.Digest.String()))
	}
	if d.Size < 0 {
		return ociBlob{}, a.image.bad("names a blob of %d bytes", d.Size)
	}
	return ociBlob{"blobs/sha256/" + digest.Hex(), string(digest), d.Size}, nil
}

// resolve finds the image that is meant.
func (a *layout) resolve(ctx context.Context, reference string) (ociImage, error) {
	if _, ok := a.files["index.json"]; !ok {
		if _, ok := a.files["manifest.json"]; ok {
			return a.dockerSave(ctx, reference)
		}
		return ociImage{}, a.image.bad("is no image: it has no index.json and no manifest.json")
	}
	doc, err := a.document(ctx, ociBlob{name: "index.json", size: -1})
	if err != nil {
		return ociImage{}, err
	}
	var idx v1.IndexManifest
	if err := json.Unmarshal(doc, &idx); err != nil {
		return ociImage{}, a.image.bad("index.json: %v", err)
	}
	desc, name, err := a.pick(idx.Manifests, reference)
	if err != nil {
		return ociImage{}, err
	}
	blob, err := a.descriptor(desc)
	if err != nil {
		return ociImage{}, err
	}
	if doc, err = a.document(ctx, blob); err != nil {
		return ociImage{}, err
	}
	return a.image.find(ctx, doc, desc.MediaType, name)
}

// pick chooses by the reference name, or the only one.
func (a *layout) pick(all []v1.Descriptor, reference string) (v1.Descriptor, string, error) {
	var names, digests []string
	var found []v1.Descriptor
	for _, d := range all {
		short := d.Annotations[refName]
		long := d.Annotations[imageName]
		// docker save gives a name and its tag alone; the tag alone names nothing.
		if n := suggest(d, ""); n != "" && !slices.Contains(names, n) {
			names = append(names, n)
		}
		matches := reference == short || long != "" && sameReference(reference, long) || isID(reference, d.Digest.String())
		if reference == "" || matches {
			found = append(found, d)
			if !slices.Contains(digests, d.Digest.String()) {
				digests = append(digests, d.Digest.String())
			}
		}
	}
	switch {
	case len(all) == 0:
		return v1.Descriptor{}, "", a.image.bad("has no image in its index")
	case len(found) == 0:
		return v1.Descriptor{}, "", a.none(reference, names)
	case len(digests) > 1 && len(names) <= 1:
		// Several platforms of one image, listed side by side.
		d, err := a.image.platform(found)
		return d, suggest(d, reference), err
	case len(digests) > 1:
		return v1.Descriptor{}, "", a.several(len(digests), names)
	}
	return found[0], suggest(found[0], reference), nil
}

// suggest is what an image is called: by docker save's name as people write it, else as it was asked for.
func suggest(d v1.Descriptor, reference string) string {
	if long := d.Annotations[imageName]; long != "" {
		return shortName(long)
	}
	for _, n := range []string{reference, d.Annotations[refName]} {
		if n != "" && !strings.HasPrefix(n, "sha256:") {
			return n
		}
	}
	return ""
}
