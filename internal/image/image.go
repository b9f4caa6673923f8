// Package image is the pure model of images: digests, layers, configs and compositions. It reads no files.
package image

import (
	"crypto/sha256"
	"encoding/binary"
	"encoding/hex"
	"hash"
	"slices"
	"strings"

	"github.com/sandsea/sandsea/api/errdefs"
)

// Digest names immutable bytes: "sha256:" and 64 lower-case hex digits.
type Digest string

// ParseDigest accepts exactly the canonical form.
func ParseDigest(s string) (Digest, error) {
	rest, ok := strings.CutPrefix(s, "sha256:")
	if !ok || len(rest) != 2*sha256.Size || strings.Trim(rest, "0123456789abcdef") != "" {
		return "", errdefs.New(errdefs.Invalid, "", "%q is no digest", clip(s)).WithHint("Write sha256: and 64 hex digits")
	}
	return Digest(s), nil
}

// Hex is the digest without its algorithm.
func (d Digest) Hex() string { return strings.TrimPrefix(string(d), "sha256:") }

// FromHash makes the digest of what was written into a SHA-256 hash.
func FromHash(h hash.Hash) Digest { return Digest("sha256:" + hex.EncodeToString(h.Sum(nil))) }

// Layer is one immutable tree: a split EROFS image of a metadata blob and a data blob. Its digest is that of the
// manifest (package layers/build), which names both blobs and the digest of every 256 KiB chunk.
type Layer struct {
	Digest Digest
	Bytes  int64 // of file content
	Files  int64
	Source string // where it came from, for people
}

// Config says how commands run by default in an image.
type Config struct {
	User       string
	Workdir    string
	Env        []string // "K=V", in order
	Entrypoint []string
	Cmd        []string
}

// Over returns c with every field of o that is set taking precedence; environment variables merge by name.
func (c Config) Over(o Config) Config {
	if o.User != "" {
		c.User = o.User
	}
	if o.Workdir != "" {
		c.Workdir = o.Workdir
	}
	c.Env = MergeEnv(c.Env, o.Env)
	if len(o.Entrypoint) > 0 {
		// As in OCI: a new entrypoint drops the command that was meant for the old one.
		c.Entrypoint, c.Cmd = o.Entrypoint, nil
	}
	if len(o.Cmd) > 0 {
		c.Cmd = o.Cmd
	}
	return c
}

// MergeEnv lays lists of "K=V" over each other; a later one wins and keeps the place of the first.
func MergeEnv(lists ...[]string) []string {
	var out []string
	at := map[string]int{} // a caller may send as many as fit into 2 MiB
	for _, list := range lists {
		for _, kv := range list {
			k, _, set := strings.Cut(kv, "=")
			i, ok := at[k]
			if !ok {
				i = len(out)
				out = append(out, kv)
			}
			out[i] = kv
			if at[k] = i; !set {
				delete(at, k)
			}
		}
	}
	return out
}

// DefaultEnv is what an import gives to an image whose source says nothing of these variables.
func DefaultEnv() []string {
	return []string{"PATH=/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin", "LANG=C.UTF-8"}
}

// withoutDefaults leaves out what an import has filled in where the images below have the variable.
func withoutDefaults(env, below []string) []string {
	return slices.DeleteFunc(slices.Clone(env), func(kv string) bool {
		k, _, _ := strings.Cut(kv, "=")
		return slices.Contains(DefaultEnv(), kv) &&
			slices.ContainsFunc(below, func(e string) bool { return strings.HasPrefix(e, k+"=") })
	})
}

// MaxLayers is the largest number of layers in one composition.
const MaxLayers = 64

// Image is a named composition: layers, lowest first, and a config.
type Image struct {
	Name   string
	Layers []Layer
	Config Config
}

// Digest is the image's identity: over the digests of its layers in order and its config, not its name.
func (i Image) Digest() Digest {
	h := sha256.New()
	field := func(parts ...string) {
		var n [8]byte
		binary.BigEndian.PutUint64(n[:], uint64(len(parts)))
		h.Write(n[:])
		for _, p := range parts {
			binary.BigEndian.PutUint64(n[:], uint64(len(p)))
			h.Write(n[:])
			h.Write([]byte(p))
		}
	}
	for _, l := range i.Layers {
		field(string(l.Digest))
	}
	field(i.Config.User, i.Config.Workdir)
	field(i.Config.Env...)
	field(i.Config.Entrypoint...)
	field(i.Config.Cmd...)
	return FromHash(h)
}

// Compose stacks images: base lowest, then workspace, then toolkits in order; a layer that is there already is not
// taken twice. Configs lay over each other in the same order, but a default of an image above does not hide what one
// below says.
func Compose(base Image, above ...Image) (Image, error) {
	out := Image{Layers: slices.Clone(base.Layers), Config: base.Config}
	for _, a := range above {
		for _, l := range a.Layers {
			if !slices.ContainsFunc(out.Layers, func(x Layer) bool { return x.Digest == l.Digest }) {
				out.Layers = append(out.Layers, l)
			}
		}
		a.Config.Env = withoutDefaults(a.Config.Env, out.Config.Env)
		out.Config = out.Config.Over(a.Config)
	}
	if len(out.Layers) > MaxLayers {
		return Image{}, errdefs.New(errdefs.Invalid, "composition", "%d layers", len(out.Layers)).
			WithField("environment", "64 layers").WithHint("Compose at most %d layers", MaxLayers)
	}
	return out, nil
}

func clip(s string) string {
	if len(s) > 80 {
		return s[:80] + "..."
	}
	return s
}
