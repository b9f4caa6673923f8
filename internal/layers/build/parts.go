package build

import (
	"bytes"
	"context"
	"encoding/json"
	"fmt"
	"io"
	"path"
	"runtime"
	"slices"
	"strings"

	v1 "github.com/google/go-containerregistry/pkg/v1"
	"github.com/google/go-containerregistry/pkg/v1/types"

	"github.com/sandsea/sandsea/api/errdefs"
	"github.com/sandsea/sandsea/internal/image"
)

// parts are what an image is made of, where they lie: an archive or a registry.
type parts interface {
	// descriptor gives the blob that a descriptor stands for.
	descriptor(d v1.Descriptor) (ociBlob, error)
	// document reads a blob of JSON and verifies it.
	document(ctx context.Context, b ociBlob) ([]byte, error)
}

// imageReader reads what an image says of itself, wherever its parts lie. Everything in it is somebody else's text.
type imageReader struct {
	object string // for messages
	limits Limits
	want   v1.Platform // what must run here
	again  string      // what may help with an image that is not as it should be
	parts  parts
}

func (r *imageReader) bad(format string, args ...any) error {
	return errdefs.New(errdefs.Invalid, r.object, format, args...).WithField("source", "").
		WithHint("Nothing imported; %s", r.again)
}

// foreign refuses what the image's maker keeps apart from it.
func (r *imageReader) foreign(what string) error {
	return errdefs.New(errdefs.FailedPrecondition, r.object, "has a layer that may not be distributed (%s): its content "+
		"is kept elsewhere, and is not fetched from there", clip(what)).
		WithHint("Push or save the image with all its layers in it")
}

// here is the platform of this machine.
func here() v1.Platform { return v1.Platform{OS: "linux", Architecture: runtime.GOARCH} }

// find follows a document, which may be an index of images inside indexes, to the one image that runs here. media is
// the document's type as its source says it; empty: not said.
func (r *imageReader) find(ctx context.Context, doc []byte, media types.MediaType, name string) (ociImage, error) {
	for range maxIndexes {
		if err := context.Cause(ctx); err != nil {
			return ociImage{}, err
		}
		var kind struct {
			SchemaVersion int             `json:"schemaVersion"`
			MediaType     types.MediaType `json:"mediaType"`
			Manifests     []v1.Descriptor `json:"manifests"`
			Layers        []v1.Descriptor `json:"layers"`
		}
		if err := json.Unmarshal(doc, &kind); err != nil {
			return ociImage{}, r.bad("its manifest: %v", err)
		}
		if kind.SchemaVersion == 1 || media == types.DockerManifestSchema1 || media == types.DockerManifestSchema1Signed {
			return ociImage{}, errdefs.New(errdefs.FailedPrecondition, r.object,
				"is of Docker's image schema 1, which was given up in 2017 and is not read").
				WithHint("Pull and push it once with a Docker of today, then import it")
		}
		if kind.Manifests == nil || kind.Layers != nil {
			return r.manifest(ctx, doc, name)
		}
		desc, err := r.platform(kind.Manifests)
		if err != nil {
			return ociImage{}, err
		}
		blob, err := r.parts.descriptor(desc)
		if err != nil {
			return ociImage{}, err
		}
		if doc, err = r.parts.document(ctx, blob); err != nil {
			return ociImage{}, err
		}
		media = desc.MediaType
	}
	return ociImage{}, r.bad("has more than %d indexes inside each other", maxIndexes)
}

// platform chooses what runs here.
func (r *imageReader) platform(all []v1.Descriptor) (v1.Descriptor, error) {
	var has []string
	for _, d := range all {
		if d.Platform == nil {
			if len(all) == 1 {
				return d, nil
			}
			continue
		}
		p := d.Platform
		if p.OS == r.want.OS && p.Architecture == r.want.Architecture &&
			(fitsVariant(p.Variant) || p.Variant == r.want.Variant) {
			return d, nil
		}
		if p.OS != "unknown" { // statements about how an image was built
			has = append(has, p.String())
		}
	}
	return v1.Descriptor{}, errdefs.New(errdefs.FailedPrecondition, r.object, "has no image for %s (it has: %s)",
		r.want.String(), joinNames(has, 10)).WithField("platform", "").WithHint("Nothing imported; %s", r.again)
}

// fitsVariant refuses variants that ask for newer processors than the plain architecture.
func fitsVariant(v string) bool { return v == "" || v == "v8" || v == "v1" }

// manifest reads an image manifest and its config.
func (r *imageReader) manifest(ctx context.Context, doc []byte, name string) (ociImage, error) {
	m, err := v1.ParseManifest(bytes.NewReader(doc))
	if err != nil {
		return ociImage{}, r.bad("manifest: %v", err)
	}
	if err := r.count(len(m.Layers)); err != nil {
		return ociImage{}, err
	}
	img := ociImage{name: name}
	for _, d := range m.Layers {
		if !d.MediaType.IsDistributable() || len(d.URLs) > 0 {
			return ociImage{}, r.foreign(string(d.MediaType))
		}
		if !isLayer(d.MediaType) {
			return ociImage{}, r.bad("has a layer of type %q, which is no file tree", clip(string(d.MediaType)))
		}
		blob, err := r.parts.descriptor(d)
		if err != nil {
			return ociImage{}, err
		}
		img.layers = append(img.layers, ociLayer{blob: blob})
	}
	blob, err := r.parts.descriptor(m.Config)
	if err != nil {
		return ociImage{}, err
	}
	if doc, err = r.parts.document(ctx, blob); err != nil {
		return ociImage{}, err
	}
	err = r.config(doc, &img)
	return img, err
}

// count refuses images of no layers and of too many.
func (r *imageReader) count(layers int) error {
	switch {
	case layers == 0:
		return r.bad("is an image without layers")
	case layers > r.limits.Layers:
		return errdefs.New(errdefs.Invalid, r.object, "%d layers", layers).
			WithField("archive", fmt.Sprintf("%d layers", r.limits.Layers)).
			WithHint("Nothing imported; squash it to at most %d", r.limits.Layers)
	}
	return nil
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

// config takes from an image's config what we honour.
func (r *imageReader) config(doc []byte, img *ociImage) error {
	cf, err := v1.ParseConfigFile(bytes.NewReader(doc))
	if err != nil {
		return r.bad("config: %v", err)
	}
	if cf.OS != "" && cf.OS != "linux" || cf.Architecture != "" && cf.Architecture != runtime.GOARCH {
		return errdefs.New(errdefs.FailedPrecondition, r.object, "is for %s/%s, this machine is linux/%s",
			clip(cf.OS), clip(cf.Architecture), runtime.GOARCH).WithField("platform", "").
			WithHint("Nothing imported; %s", r.again)
	}
	if n := len(cf.RootFS.DiffIDs); n != 0 && n != len(img.layers) {
		return r.bad("its config names %d layers, its manifest %d", n, len(img.layers))
	}
	for i, d := range cf.RootFS.DiffIDs {
		img.layers[i].diffID = d.String()
	}
	c := cf.Config
	if len(c.Env) > maxConfigEnv {
		return r.bad("its config has %d variables", len(c.Env))
	}
	for _, kv := range c.Env {
		if k, _, ok := strings.Cut(kv, "="); !ok || k == "" || strings.Contains(kv, "\x00") {
			return r.bad("its config has a variable %q", clip(kv))
		}
	}
	for _, s := range slices.Concat(c.Entrypoint, c.Cmd, []string{c.User, c.WorkingDir}) {
		if strings.Contains(s, "\x00") {
			return r.bad("its config has a NUL byte in %q", clip(s))
		}
	}
	if c.WorkingDir != "" && !path.IsAbs(c.WorkingDir) {
		return r.bad("its config has a working directory %q, which is not absolute", clip(c.WorkingDir))
	}
	img.config = image.Config{
		User: c.User, Workdir: c.WorkingDir, Env: c.Env, Entrypoint: c.Entrypoint, Cmd: c.Cmd,
	}
	if !slices.ContainsFunc(c.Env, func(kv string) bool { return strings.HasPrefix(kv, "PATH=") }) {
		img.config.Env = slices.Concat(defaultConfig().Env[:1], c.Env)
	}
	return nil
}

// readDocument reads JSON that has a limit.
func (r *imageReader) readDocument(from io.Reader, name string) ([]byte, error) {
	doc, err := io.ReadAll(io.LimitReader(from, r.limits.Document+1))
	if err != nil {
		return nil, fmt.Errorf("%s: %w", r.object, err)
	}
	if int64(len(doc)) > r.limits.Document {
		return nil, r.bad("%q has more than the %d bytes that a manifest may have", clip(name), r.limits.Document)
	}
	return doc, nil
}
