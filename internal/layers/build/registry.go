package build

import (
	"context"
	"crypto/sha256"
	"encoding/hex"
	"fmt"
	"io"
	"os"
	"sync/atomic"

	"github.com/google/go-containerregistry/pkg/authn"
	"github.com/google/go-containerregistry/pkg/name"
	v1 "github.com/google/go-containerregistry/pkg/v1"
	"golang.org/x/sync/errgroup"

	"github.com/sandsea/sandsea/api/errdefs"
	"github.com/sandsea/sandsea/internal/image"
)

// downloads is how many layers of an image are fetched at a time.
const downloads = 3

// IdentityToken is the username with which an identity token is given as the password, as Docker's credential helpers
// write it.
const IdentityToken = "<token>"

// RegistryOptions say what to import.
type RegistryOptions struct {
	// Reference as Docker reads it: "python:3.11", "registry:5000/team/image@sha256:…".
	Reference string
	// Username and Password, or a bearer Token; all empty: nobody. They are used for this import and kept nowhere.
	Username, Password, Token string
	// Insecure allows plain HTTP and certificates that cannot be verified. Registries of this machine may speak plain
	// HTTP in any case.
	Insecure bool
	// Platform as "linux/amd64" or "linux/arm/v7"; empty: this machine's.
	Platform string
	Report   Report
}

// parse reads the reference and the platform.
func (o RegistryOptions) parse() (name.Reference, v1.Platform, error) {
	var opts []name.Option
	if o.Insecure {
		opts = append(opts, name.Insecure)
	}
	ref, err := name.ParseReference(o.Reference, opts...)
	if err != nil {
		return nil, v1.Platform{}, errdefs.New(errdefs.Invalid, "", "reference: %q is no image name", clip(o.Reference)).
			WithField("registry.reference", "").WithHint("Write it as python:3.11, registry.example/team/image:tag or NAME@sha256:DIGEST").
			Wrap(err)
	}
	want := here()
	if o.Platform == "" {
		return ref, want, nil
	}
	p, err := v1.ParsePlatform(o.Platform)
	if err != nil || p.OS == "" || p.Architecture == "" {
		return nil, v1.Platform{}, errdefs.New(errdefs.Invalid, "", "platform: %q is none", clip(o.Platform)).
			WithField("registry.platform", "").WithHint("Write it as %s", want.String())
	}
	if p.OS != want.OS || p.Architecture != want.Architecture {
		return nil, v1.Platform{}, errdefs.New(errdefs.FailedPrecondition, familiar(ref),
			"programs for %s do not run on this node, which is %s", clip(o.Platform), want.String()).
			WithField("registry.platform", "").WithHint("Leave the platform out, or import on a node of that kind")
	}
	return ref, *p, nil
}

func (o RegistryOptions) auth() credentials {
	switch {
	case o.Token != "":
		return credentials{Authenticator: authn.FromConfig(authn.AuthConfig{RegistryToken: o.Token})}
	case o.Username == IdentityToken:
		return credentials{Authenticator: authn.FromConfig(authn.AuthConfig{IdentityToken: o.Password})}
	case o.Username != "" || o.Password != "":
		return credentials{Authenticator: authn.FromConfig(authn.AuthConfig{Username: o.Username, Password: o.Password})}
	}
	return credentials{authn.Anonymous, true}
}

// key names equal imports. Who shows other credentials must be let in himself.
func (o RegistryOptions) key(ref name.Reference) string {
	h := sha256.New()
	for _, s := range []string{ref.Name(), o.Username, o.Password, o.Token, o.Platform, fmt.Sprint(o.Insecure)} {
		_, _ = fmt.Fprintf(h, "%d %s", len(s), s)
	}
	return hex.EncodeToString(h.Sum(nil))
}

// Registry imports an image of an OCI registry. Each of its layers becomes one of ours; those of which an earlier import
// has made one are not fetched. What is fetched is verified by its digest before it is read, and resumed where a
// connection breaks.
func (b *Builder) Registry(ctx context.Context, opts RegistryOptions) (Result, error) {
	ref, want, err := opts.parse()
	if err != nil {
		return Result{}, err
	}
	nothing := func() {}
	return b.join(ctx, "registry", opts.key(ref), opts.Report, nothing, func(ctx context.Context, p *progress) (
		Result, error,
	) {
		p.stage("resolve", "bytes", 0)
		r := b.newRemote(ref, opts)
		defer r.close()
		ctx, stop := context.WithTimeoutCause(ctx, b.limits.Time, errdefs.New(errdefs.Deadline, r.object,
			"not imported in %s", b.limits.Time).WithHint("Import it again; what is here already is kept"))
		defer stop()
		if err := r.connect(ctx); err != nil {
			return Result{}, err
		}
		reader := &imageReader{
			object: r.object, limits: b.limits, want: want, parts: remoteParts{r},
			again: "push it anew, for this platform",
		}
		r.reader = reader
		doc, media, err := r.manifest(ctx)
		if err != nil {
			return Result{}, err
		}
		img, err := reader.find(ctx, doc, media, r.object)
		if err != nil {
			return Result{}, err
		}
		img.source = r.object
		b.recall(ctx, img.layers, img.source)
		fetched, done, err := b.download(ctx, r, img, p)
		defer done()
		if err != nil {
			return Result{}, err
		}
		open := func(blob ociBlob) (io.Reader, func() error, error) {
			// It was verified when it came.
			return io.NewSectionReader(fetched[blob.digest], 0, blob.size), func() error { return nil }, nil
		}
		// Only now: what a registry gives may be slow to come.
		used, over, err := b.turn(ctx, p)
		if err != nil {
			return Result{}, err
		}
		defer over()
		return b.ociImage(ctx, img, r.object, open, used, p)
	})
}

// download fetches the layers that are not here into files without names, each once. done gives them up.
func (b *Builder) download(ctx context.Context, r *remote, img ociImage, p *progress) (
	_ map[string]*os.File, done func(), err error,
) {
	files := map[string]*os.File{}
	done = func() {
		for _, f := range files {
			_ = f.Close()
		}
	}
	var blobs []ociBlob
	var total int64
	for _, l := range img.layers {
		if l.have != nil || files[l.blob.digest] != nil {
			continue
		}
		f, err := b.scratch()
		if err != nil {
			return nil, done, err
		}
		files[l.blob.digest] = f
		blobs = append(blobs, l.blob)
		total += l.blob.size
		if total < 0 || total > b.limits.Bytes {
			return nil, done, errdefs.New(errdefs.Invalid, r.object, "its layers have more than %s", gib(b.limits.Bytes)).
				WithField("archive", gib(b.limits.Bytes)).WithHint("Nothing imported; make it smaller")
		}
	}
	if len(blobs) == 0 {
		return files, done, nil
	}
	if err := roomFor(b.dir, total, b.limits.Reserve); err != nil {
		return nil, done, err
	}
	p.stage("download", "bytes", total)
	var ready atomic.Int64
	group, gctx := errgroup.WithContext(ctx)
	group.SetLimit(downloads)
	for _, blob := range blobs {
		group.Go(func() error {
			if err := r.fetch(gctx, blob, files[blob.digest], p.add); err != nil {
				return roomErr(b.dir, err)
			}
			p.detail(fmt.Sprintf("%d of %d layers", ready.Add(1), len(blobs)))
			return nil
		})
	}
	return files, done, group.Wait()
}

// scratch makes a file that is gone with its descriptor.
func (b *Builder) scratch() (*os.File, error) {
	f, err := os.CreateTemp(b.tmp(), "oci-")
	if err != nil {
		return nil, fmt.Errorf("download: %w", err)
	}
	if err := os.Remove(f.Name()); err != nil {
		_ = f.Close()
		return nil, fmt.Errorf("download: %w", err)
	}
	return f, nil
}

// remoteParts are an image's parts in a registry.
type remoteParts struct{ r *remote }

func (p remoteParts) descriptor(d v1.Descriptor) (ociBlob, error) {
	digest, err := image.ParseDigest(d.Digest.String())
	if err != nil {
		return ociBlob{}, p.r.reader.bad("names a blob %q, which is no sha256 digest", clip(d.Digest.String()))
	}
	if d.Size < 0 {
		return ociBlob{}, p.r.reader.bad("names a blob of %d bytes", d.Size)
	}
	kind := "blobs"
	if d.MediaType.IsIndex() || d.MediaType.IsImage() || d.MediaType.IsSchema1() {
		kind = "manifests"
	}
	return ociBlob{kind, string(digest), d.Size}, nil
}

func (p remoteParts) document(ctx context.Context, b ociBlob) ([]byte, error) {
	if b.size > p.r.limits.Document {
		return nil, p.r.reader.bad("%s has %d bytes, more than the %d that a manifest may have", b.digest, b.size,
			p.r.limits.Document)
	}
	doc, _, err := p.r.get(ctx, b.name, b.digest)
	return doc, err
}
