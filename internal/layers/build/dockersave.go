package build

import (
	"context"
	"encoding/json"
	"io"
	"path"
	"slices"
	"strings"

	"github.com/google/go-containerregistry/pkg/name"

	"github.com/sandsea/sandsea/api/errdefs"
	"github.com/sandsea/sandsea/internal/image"
)

// Docker imports one image of what docker save writes: the form of today, an OCI image layout with names as Docker
// spells them, or the older one, which has a manifest.json alone. The reference may be short, as "busybox" for
// its full name, or the beginning of an image id. An archive whose image has no name gives none.
func (b *Builder) Docker(ctx context.Context, r io.Reader, opts ArchiveOptions) (Result, error) {
	return b.archive(ctx, "docker", r, opts)
}

// saved is an image as manifest.json lists it.
type saved struct {
	Config   string
	RepoTags []string
	Layers   []string
}

// id is the digest of the image's config, by which Docker calls the image; empty when its file is not named so.
func (s saved) id() string {
	d, err := image.ParseDigest("sha256:" + strings.TrimSuffix(path.Base(s.Config), ".json"))
	if err != nil {
		return ""
	}
	return string(d)
}

// dockerSave reads the archive form of docker save before it wrote OCI layouts.
func (a *layout) dockerSave(ctx context.Context, reference string) (ociImage, error) {
	doc, err := a.document(ctx, ociBlob{name: "manifest.json", size: -1})
	if err != nil {
		return ociImage{}, err
	}
	var all []saved
	if err := json.Unmarshal(doc, &all); err != nil {
		return ociImage{}, a.image.bad("manifest.json: %v", err)
	}
	if len(all) == 0 {
		return ociImage{}, a.image.bad("has no image in its manifest.json")
	}
	var names []string
	var found []saved
	for _, m := range all {
		names = append(names, m.RepoTags...)
		if reference == "" || slices.ContainsFunc(m.RepoTags, func(t string) bool { return sameReference(reference, t) }) ||
			isID(reference, m.id()) {
			found = append(found, m)
		}
	}
	switch {
	case len(found) == 0:
		return ociImage{}, a.none(reference, names)
	case len(found) > 1:
		return ociImage{}, a.several(len(found), names)
	}
	m := found[0]
	if err := a.image.count(len(m.Layers)); err != nil {
		return ociImage{}, err
	}
	img := ociImage{name: savedName(reference, m.RepoTags)}
	for _, l := range m.Layers {
		img.layers = append(img.layers, ociLayer{blob: ociBlob{name: path.Clean(l), size: a.sizeOf(path.Clean(l))}})
	}
	// The config is named by its digest in both spellings.
	if doc, err = a.document(ctx, ociBlob{name: path.Clean(m.Config), digest: m.id(), size: -1}); err != nil {
		return ociImage{}, err
	}
	err = a.image.config(doc, &img)
	return img, err
}

func (a *layout) sizeOf(name string) int64 {
	if e, ok := a.files[name]; ok {
		return e.size
	}
	return -1
}

// none says that the wanted image is not there.
func (a *layout) none(reference string, names []string) error {
	e := errdefs.New(errdefs.NotFound, a.image.object, "has no image %q", clip(reference)).WithField("reference", "")
	e.Near = names[:min(len(names), 10)]
	if len(names) == 0 {
		return e.WithHint("Its images have no names; leave the name out if it has one alone")
	}
	return e.WithHint("It has: %s", joinNames(names, 10))
}

// several asks which image is meant.
func (a *layout) several(n int, names []string) error {
	return errdefs.New(errdefs.Invalid, a.image.object, "has %d images (%s)", n, joinNames(names, 10)).
		WithField("reference", "").WithHint("Name one of them")
}

// savedName is what an image from an archive is called: as it was asked for, else by its first name.
func savedName(reference string, names []string) string {
	for _, n := range names {
		if reference == "" || sameReference(reference, n) {
			return shortName(n)
		}
	}
	return ""
}

// sameReference compares names as Docker reads them: "busybox" is the hub's "library/busybox:latest".
func sameReference(a, b string) bool {
	if a == b {
		return true
	}
	x, err := name.ParseReference(a)
	if err != nil {
		return false
	}
	y, err := name.ParseReference(b)
	return err == nil && x.Name() == y.Name()
}

// isID tells whether a reference is an image id, or its first digits, at least as many as Docker shows.
func isID(reference, id string) bool {
	hex := strings.TrimPrefix(reference, "sha256:")
	return id != "" && len(hex) >= 12 && strings.HasPrefix(strings.TrimPrefix(id, "sha256:"), hex)
}

// shortName spells a reference as people do: "python:3.11" for the hub's "library/python:3.11". What is no
// reference is left as it is.
func shortName(reference string) string {
	ref, err := name.ParseReference(reference)
	if err != nil {
		return reference
	}
	return familiar(ref)
}

func familiar(ref name.Reference) string {
	repo := ref.Context().RepositoryStr()
	if ref.Context().RegistryStr() == name.DefaultRegistry {
		repo = strings.TrimPrefix(repo, "library/")
	} else {
		repo = ref.Context().Name()
	}
	if d, ok := ref.(name.Digest); ok {
		return repo + "@" + d.DigestStr()
	}
	return repo + ":" + ref.Identifier()
}
