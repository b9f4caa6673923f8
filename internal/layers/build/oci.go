package build

import (
	"archive/tar"
	"bytes"
	"context"
	"crypto/sha256"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"os"
	"path"
	"runtime"
	"slices"
	"strings"

	v1 "github.com/google/go-containerregistry/pkg/v1"
	"github.com/google/go-containerregistry/pkg/v1/types"

	"github.com/sandsea/sandsea/api/errdefs"
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
	key := opts.Key
	if key != "" {
		key += " " + opts.Reference
	}
	r, done := own(r, opts.Key)
	return b.join(ctx, "oci", key, opts.Report, done, func(ctx context.Context, p *progress) (Result, error) {
		if err := roomFor(b.dir, opts.Size, b.limits.Reserve); err != nil {
			return Result{}, err
		}
		p.stage("resolve", "bytes", opts.Size)
		a, done, err := b.openLayout(ctx, r, opts, p)
		if err != nil {
			return Result{}, err
		}
		defer done()
		img, err := a.resolve(ctx, opts.Reference)
		if err != nil {
			return Result{}, err
		}
		return b.ociImage(ctx, a, img, p)
	})
}

// ociImage is what a layout says of one image.
type ociImage struct {
	name   string
	config image.Config
	layers []ociLayer
}

type ociLayer struct {
	blob   ociBlob
	diffID string // of the uncompressed tar; empty if unknown
}

// ociBlob is a part of the archive, and what it must be.
type ociBlob struct {
	name   string // in the archive
	digest string // "sha256:…"; empty when the archive does not say
	size   int64  // -1 when the archive does not say
}

func (b *Builder) ociImage(ctx context.Context, a *layout, img ociImage, p *progress) (_ Result, err error) {
	var total int64
	for _, l := range img.layers {
		total += max(l.blob.size, 0)
	}
	if err := roomFor(b.dir, total, b.limits.Reserve); err != nil {
		return Result{}, err
	}
	p.stage("unpack", "bytes", total)
	used := &usage{}
	var layers []*layer
	defer func() {
		if err != nil {
			for _, l := range layers {
				err = errors.Join(err, l.data.Abort())
			}
		}
	}()
	for i, l := range img.layers {
		p.detail(fmt.Sprintf("layer %d of %d", i+1, len(img.layers)))
		packed, check, err := a.open(l.blob)
		if err != nil {
			return Result{}, err
		}
		made, err := b.tarLayer(ctx, packed, tarReader{
			archive: fmt.Sprintf("%s layer %d", a.archive, i+1), whiteouts: true, lower: layers, used: used,
			diffID: l.diffID,
		}, p.add)
		if err != nil {
			return Result{}, err
		}
		layers = append(layers, made)
		if err := check(); err != nil {
			return Result{}, err
		}
		// Those above look names up in it as overlayfs would.
		made.root.overlay()
	}
	p.stage("write", "bytes", 0)
	out, err := b.commit(ctx, layers, "oci")
	if err != nil {
		return Result{}, err
	}
	return Result{Name: img.name, Layers: lastOfEach(out), Config: img.config, Notes: used.notes()}, nil
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
	archive string
	limits  Limits
	r       io.ReaderAt
	files   map[string]extent // by cleaned name
}

type extent struct{ off, size int64 }

func (a *layout) bad(format string, args ...any) error {
	return errdefs.New(errdefs.Invalid, a.archive, format, args...).
		WithField("archive", "").WithHint("Nothing imported; save the image again, as an OCI layout")
}

// openLayout finds where each file of the archive lies. An archive that cannot be read at any place, or that is
// compressed, is first copied to a temporary file.
func (b *Builder) openLayout(
	ctx context.Context, r io.Reader, opts ArchiveOptions, p *progress,
) (_ *layout, done func(), err error) {
	a := &layout{archive: opts.archive(), limits: b.limits, files: map[string]extent{}}
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
			return nil, nil, fmt.Errorf("%s: %w", a.archive, err)
		}
		a.r = src
	} else {
		f, err := os.CreateTemp(b.tmp(), "oci-")
		if err != nil {
			return nil, nil, fmt.Errorf("%s: %w", a.archive, err)
		}
		done = func() { _ = f.Close() }
		if err := os.Remove(f.Name()); err != nil {
			done()
			return nil, nil, fmt.Errorf("%s: %w", a.archive, err)
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
	t := tarReader{archive: a.archive, limits: b.limits}
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
	t := tarReader{archive: a.archive, limits: a.limits, used: &usage{}}
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
				return fmt.Errorf("%s: %w", a.archive, err)
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
		return a.bad("holds no files")
	}
	return nil
}

// open reads a blob; check, once it has been read to its end, tells whether it was the right one.
func (a *layout) open(b ociBlob) (r io.Reader, check func() error, err error) {
	e, ok := a.files[b.name]
	if !ok {
		return nil, nil, a.bad("has no %q, which the image needs", clip(b.name))
	}
	if b.size >= 0 && e.size != b.size {
		return nil, nil, a.bad("%q has %d bytes, its descriptor says %d", clip(b.name), e.size, b.size)
	}
	sec := io.NewSectionReader(a.r, e.off, e.size)
	if b.digest == "" {
		return sec, func() error { return nil }, nil
	}
	h := sha256.New()
	return io.TeeReader(sec, h), func() error {
		// A decompressor may leave what follows its stream.
		if _, err := io.Copy(h, sec); err != nil {
			return fmt.Errorf("%s: %w", a.archive, err)
		}
		if got := image.FromHash(h); string(got) != b.digest {
			return a.bad("%q has digest %s, its descriptor says %s", clip(b.name), got, b.digest)
		}
		return nil
	}, nil
}

// document reads a blob of JSON.
func (a *layout) document(b ociBlob) ([]byte, error) {
	if e, ok := a.files[b.name]; ok && e.size > a.limits.Document {
		return nil, a.bad("%q has %d bytes, more than the %d that a manifest may have", clip(b.name), e.size,
			a.limits.Document)
	}
	r, check, err := a.open(b)
	if err != nil {
		return nil, err
	}
	doc, err := io.ReadAll(r)
	if err != nil {
		return nil, fmt.Errorf("%s: %w", a.archive, err)
	}
	return doc, check()
}

// descriptor gives the blob that a descriptor stands for.
func (a *layout) descriptor(d v1.Descriptor) (ociBlob, error) {
	digest, err := image.ParseDigest(d.Digest.String())
	if err != nil {
		return ociBlob{}, a.bad("names a blob %q, which is no sha256 digest", clip(d.Digest.String()))
	}
	if d.Size < 0 {
		return ociBlob{}, a.bad("names a blob of %d bytes", d.Size)
	}
	if len(d.URLs) > 0 {
		if _, ok := a.files["blobs/sha256/"+digest.Hex()]; !ok {
			return ociBlob{}, a.bad("keeps blob %s elsewhere", digest)
		}
	}
	return ociBlob{"blobs/sha256/" + digest.Hex(), string(digest), d.Size}, nil
}

// resolve finds the image that is meant.
func (a *layout) resolve(ctx context.Context, reference string) (ociImage, error) {
	if _, ok := a.files["index.json"]; !ok {
		if _, ok := a.files["manifest.json"]; ok {
			return a.dockerSave(reference)
		}
		return ociImage{}, a.bad("is no OCI image layout: it has no index.json")
	}
	doc, err := a.document(ociBlob{name: "index.json", size: -1})
	if err != nil {
		return ociImage{}, err
	}
	var idx v1.IndexManifest
	if err := json.Unmarshal(doc, &idx); err != nil {
		return ociImage{}, a.bad("index.json: %v", err)
	}
	desc, name, err := a.pick(idx.Manifests, reference)
	if err != nil {
		return ociImage{}, err
	}
	for range maxIndexes {
		if err := context.Cause(ctx); err != nil {
			return ociImage{}, err
		}
		blob, err := a.descriptor(desc)
		if err != nil {
			return ociImage{}, err
		}
		if doc, err = a.document(blob); err != nil {
			return ociImage{}, err
		}
		var kind struct {
			MediaType types.MediaType `json:"mediaType"`
			Manifests []v1.Descriptor `json:"manifests"`
			Layers    []v1.Descriptor `json:"layers"`
		}
		if err := json.Unmarshal(doc, &kind); err != nil {
			return ociImage{}, a.bad("%q: %v", blob.name, err)
		}
		if kind.Manifests == nil || kind.Layers != nil {
			return a.manifest(doc, name)
		}
		if desc, err = a.platform(kind.Manifests); err != nil {
			return ociImage{}, err
		}
	}
	return ociImage{}, a.bad("has more than %d indexes inside each other", maxIndexes)
}

// pick chooses by the reference name, or the only one.
func (a *layout) pick(all []v1.Descriptor, reference string) (v1.Descriptor, string, error) {
	var names []string
	var found []v1.Descriptor
	for _, d := range all {
		name := d.Annotations[refName]
		long := d.Annotations[imageName]
		for _, n := range []string{long, name} {
			if n != "" && !slices.Contains(names, n) {
				names = append(names, n)
			}
		}
		if reference != "" && (reference == name || reference == long || reference == d.Digest.String()) {
			found = append(found, d)
		}
	}
	if reference == "" {
		found = all
	}
	switch {
	case len(all) == 0:
		return v1.Descriptor{}, "", a.bad("has no image in its index")
	case len(found) == 0:
		e := errdefs.New(errdefs.NotFound, a.archive, "has no image %q", clip(reference)).WithField("reference", "")
		e.Near = names
		return v1.Descriptor{}, "", e.WithHint("It has: %s", joinNames(names, 10))
	case len(found) > 1 && len(names) <= 1:
		// Several platforms of one image, listed side by side.
		d, err := a.platform(found)
		return d, suggest(d, reference), err
	case len(found) > 1:
		return v1.Descriptor{}, "", errdefs.New(errdefs.Invalid, a.archive, "has %d images (%s)", len(found),
			joinNames(names, 10)).
			WithField("reference", "").WithHint("Name one of them")
	}
	return found[0], suggest(found[0], reference), nil
}

func suggest(d v1.Descriptor, reference string) string {
	for _, n := range []string{reference, d.Annotations[imageName], d.Annotations[refName]} {
		if n != "" && !strings.HasPrefix(n, "sha256:") {
			return n
		}
	}
	return ""
}

// platform chooses what runs here.
func (a *layout) platform(all []v1.Descriptor) (v1.Descriptor, error) {
	var has []string
	for _, d := range all {
		if d.Platform == nil {
			if len(all) == 1 {
				return d, nil
			}
			continue
		}
		if d.Platform.OS == "linux" && d.Platform.Architecture == runtime.GOARCH && fitsVariant(d.Platform.Variant) {
			return d, nil
		}
		has = append(has, d.Platform.String())
	}
	return v1.Descriptor{}, errdefs.New(errdefs.FailedPrecondition, a.archive, "has no image for linux/%s (it has: %s)",
		runtime.GOARCH, joinNames(has, 10)).WithHint("Save the image for this platform")
}

// fitsVariant refuses variants that ask for newer processors than the plain architecture.
func fitsVariant(v string) bool { return v == "" || v == "v8" || v == "v1" }

// manifest reads an image manifest and its config.
func (a *layout) manifest(doc []byte, name string) (ociImage, error) {
	m, err := v1.ParseManifest(bytes.NewReader(doc))
	if err != nil {
		return ociImage{}, a.bad("manifest: %v", err)
	}
	if len(m.Layers) > a.limits.Layers {
		return ociImage{}, errdefs.New(errdefs.Invalid, a.archive, "%d layers", len(m.Layers)).
			WithField("archive", fmt.Sprintf("%d layers", a.limits.Layers)).
			WithHint("Nothing imported; squash it to at most %d", a.limits.Layers)
	}
	img := ociImage{name: name}
	for _, d := range m.Layers {
		if !isLayer(d.MediaType) {
			return ociImage{}, a.bad("has a layer of type %q, which is no file tree", clip(string(d.MediaType)))
		}
		blob, err := a.descriptor(d)
		if err != nil {
			return ociImage{}, err
		}
		img.layers = append(img.layers, ociLayer{blob: blob})
	}
	blob, err := a.descriptor(m.Config)
	if err != nil {
		return ociImage{}, err
	}
	if doc, err = a.document(blob); err != nil {
		return ociImage{}, err
	}
	if len(img.layers) == 0 {
		return ociImage{}, a.bad("is an image without layers")
	}
	err = a.config(doc, &img)
	return img, err
}

// isLayer tells the media types of file trees. How they are compressed is seen from their bytes, whatever the type
// says.
func isLayer(t types.MediaType) bool {
	s := string(t)
	if strings.Contains(s, "encrypted") {
		return false
	}
	return strings.HasPrefix(s, "application/vnd.oci.image.layer.") ||
		strings.HasPrefix(s, "application/vnd.docker.image.rootfs.")
}

// config takes from an image's config what we honour. Everything in it is somebody else's text.
func (a *layout) config(doc []byte, img *ociImage) error {
	cf, err := v1.ParseConfigFile(bytes.NewReader(doc))
	if err != nil {
		return a.bad("config: %v", err)
	}
	if cf.OS != "" && cf.OS != "linux" || cf.Architecture != "" && cf.Architecture != runtime.GOARCH {
		return errdefs.New(errdefs.FailedPrecondition, a.archive, "is for %s/%s, this machine is linux/%s",
			clip(cf.OS), clip(cf.Architecture), runtime.GOARCH).WithHint("Save the image for this platform")
	}
	if n := len(cf.RootFS.DiffIDs); n != 0 && n != len(img.layers) {
		return a.bad("its config names %d layers, its manifest %d", n, len(img.layers))
	}
	for i, d := range cf.RootFS.DiffIDs {
		img.layers[i].diffID = d.String()
	}
	c := cf.Config
	if len(c.Env) > maxConfigEnv {
		return a.bad("its config has %d variables", len(c.Env))
	}
	for _, kv := range c.Env {
		if k, _, ok := strings.Cut(kv, "="); !ok || k == "" || strings.Contains(kv, "\x00") {
			return a.bad("its config has a variable %q", clip(kv))
		}
	}
	for _, s := range slices.Concat(c.Entrypoint, c.Cmd, []string{c.User, c.WorkingDir}) {
		if strings.Contains(s, "\x00") {
			return a.bad("its config has a NUL byte in %q", clip(s))
		}
	}
	if c.WorkingDir != "" && !path.IsAbs(c.WorkingDir) {
		return a.bad("its config has a working directory %q, which is not absolute", clip(c.WorkingDir))
	}
	img.config = image.Config{
		User: c.User, Workdir: c.WorkingDir, Env: c.Env, Entrypoint: c.Entrypoint, Cmd: c.Cmd,
	}
	if !slices.ContainsFunc(c.Env, func(kv string) bool { return strings.HasPrefix(kv, "PATH=") }) {
		img.config.Env = slices.Concat(defaultConfig().Env[:1], c.Env)
	}
	return nil
}

// dockerSave reads the archive form of docker save before it wrote OCI layouts.
func (a *layout) dockerSave(reference string) (ociImage, error) {
	doc, err := a.document(ociBlob{name: "manifest.json", size: -1})
	if err != nil {
		return ociImage{}, err
	}
	var all []struct {
		Config   string
		RepoTags []string
		Layers   []string
	}
	if err := json.Unmarshal(doc, &all); err != nil {
		return ociImage{}, a.bad("manifest.json: %v", err)
	}
	var names []string
	found := -1
	for i, m := range all {
		names = append(names, m.RepoTags...)
		if reference == "" && len(all) == 1 || reference != "" && slices.Contains(m.RepoTags, reference) {
			found = i
		}
	}
	switch {
	case len(all) == 0:
		return ociImage{}, a.bad("has no image in its manifest.json")
	case found < 0 && reference == "":
		return ociImage{}, errdefs.New(errdefs.Invalid, a.archive, "has %d images (%s)", len(all), joinNames(names, 10)).
			WithField("reference", "").WithHint("Name one of them")
	case found < 0:
		e := errdefs.New(errdefs.NotFound, a.archive, "has no image %q", clip(reference)).WithField("reference", "")
		e.Near = names
		return ociImage{}, e.WithHint("It has: %s", joinNames(names, 10))
	}
	m := all[found]
	if len(m.Layers) > a.limits.Layers {
		return ociImage{}, errdefs.New(errdefs.Invalid, a.archive, "%d layers", len(m.Layers)).
			WithField("archive", fmt.Sprintf("%d layers", a.limits.Layers)).
			WithHint("Nothing imported; squash it to at most %d", a.limits.Layers)
	}
	img := ociImage{name: reference}
	if img.name == "" && len(m.RepoTags) > 0 {
		img.name = m.RepoTags[0]
	}
	for _, l := range m.Layers {
		img.layers = append(img.layers, ociLayer{blob: ociBlob{name: path.Clean(l), size: a.sizeOf(path.Clean(l))}})
	}
	blob := ociBlob{name: path.Clean(m.Config), size: -1}
	// The config is named by its digest in both spellings.
	if d, err := image.ParseDigest("sha256:" + strings.TrimSuffix(path.Base(blob.name), ".json")); err == nil {
		blob.digest = string(d)
	}
	if doc, err = a.document(blob); err != nil {
		return ociImage{}, err
	}
	if len(img.layers) == 0 {
		return ociImage{}, a.bad("is an image without layers")
	}
	err = a.config(doc, &img)
	return img, err
}

func (a *layout) sizeOf(name string) int64 {
	if e, ok := a.files[name]; ok {
		return e.size
	}
	return -1
}
