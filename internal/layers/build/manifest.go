package build

import (
	"context"
	"crypto/sha256"
	"encoding/hex"
	"encoding/json"
	"errors"
	"fmt"
	"io"

	"github.com/sandsea/sandsea/api/errdefs"
	"github.com/sandsea/sandsea/internal/image"
	"github.com/sandsea/sandsea/internal/layers/blob"
)

const (
	// ManifestSchema is the schema of the manifests that this version writes and reads.
	ManifestSchema = "sandsea.layer/1"
	// ChunkSize is the piece of a data blob that has a digest of its own.
	ChunkSize = 256 << 10

	// MaxManifest bounds a manifest: enough for the chunks of 128 GiB.
	MaxManifest = 48 << 20
)

// Manifest says what a layer is made of. The digest of its JSON is the layer's.
type Manifest struct {
	Schema string `json:"schema"`
	// Meta is the EROFS metadata image, Data the file that its chunks point into.
	Meta image.Digest `json:"meta"`
	Data image.Digest `json:"data"`
	// MetaBytes and DataBytes are the sizes of the two blobs.
	MetaBytes int64 `json:"meta_bytes"`
	DataBytes int64 `json:"data_bytes"`
	// Bytes of file content, holes included, and the number of entries.
	Bytes int64 `json:"bytes"`
	Files int64 `json:"files"`
	// Chunks are the SHA-256 digests of the data blob's pieces, in hex; the last may be shorter than ChunkSize.
	ChunkSize int64    `json:"chunk_size"`
	Chunks    []string `json:"chunks"`
}

// encode gives the one spelling of a manifest and its digest.
func (m Manifest) encode() ([]byte, image.Digest, error) {
	b, err := json.Marshal(m)
	if err != nil {
		return nil, "", fmt.Errorf("encode manifest: %w", err)
	}
	h := sha256.New()
	h.Write(b)
	return b, image.FromHash(h), nil
}

// ParseManifest checks a manifest's JSON. Fields that it does not know are left to later versions.
func ParseManifest(b []byte) (Manifest, error) {
	var m Manifest
	bad := func(format string, args ...any) (Manifest, error) {
		return Manifest{}, errdefs.New(errdefs.DataLoss, "layer manifest", format, args...).
			WithHint("Import its image again")
	}
	if len(b) > MaxManifest {
		return bad("larger than %d bytes", MaxManifest)
	}
	if err := json.Unmarshal(b, &m); err != nil {
		return bad("no JSON: %v", err)
	}
	if m.Schema != ManifestSchema {
		return bad("schema %q, this version reads %q", clip(m.Schema), ManifestSchema)
	}
	for _, d := range []image.Digest{m.Meta, m.Data} {
		if _, err := image.ParseDigest(string(d)); err != nil {
			return bad("%q is no digest", clip(string(d)))
		}
	}
	if m.MetaBytes <= 0 || m.DataBytes < 0 || m.Bytes < 0 || m.Files < 0 {
		return bad("a size is negative")
	}
	if m.ChunkSize != ChunkSize {
		return bad("chunk size %d, this version reads %d", m.ChunkSize, ChunkSize)
	}
	if want := (m.DataBytes / ChunkSize) + min(m.DataBytes%ChunkSize, 1); int64(len(m.Chunks)) != want {
		return bad("%d chunks, not %d", len(m.Chunks), want)
	}
	for _, c := range m.Chunks {
		if len(c) != 2*sha256.Size {
			return bad("%q is no chunk digest", clip(c))
		}
		if _, err := hex.DecodeString(c); err != nil {
			return bad("%q is no chunk digest", clip(c))
		}
	}
	return m, nil
}

// ReadManifest reads and verifies the manifest of a layer.
func ReadManifest(ctx context.Context, s blob.Store, layer image.Digest) (Manifest, error) {
	size, err := s.Stat(ctx, layer)
	if err != nil {
		return Manifest{}, err
	}
	if size > MaxManifest {
		return Manifest{}, errdefs.New(errdefs.DataLoss, "layer "+string(layer), "its manifest has %d bytes", size).
			WithHint("Import its image again")
	}
	b := make([]byte, size)
	n, err := s.ReadAt(ctx, layer, b, 0)
	if err != nil && !errors.Is(err, io.EOF) {
		return Manifest{}, fmt.Errorf("read manifest of layer %s: %w", layer, err)
	}
	h := sha256.New()
	h.Write(b[:n])
	if got := image.FromHash(h); got != layer {
		return Manifest{}, errdefs.New(errdefs.DataLoss, "layer "+string(layer), "its manifest has digest %s", got).
			WithHint("Import its image again")
	}
	m, err := ParseManifest(b[:n])
	if err != nil {
		return Manifest{}, fmt.Errorf("layer %s: %w", layer, err)
	}
	return m, nil
}

// Files gives the paths of a layer's metadata image and data file, for package linux/erofs to mount. The store must
// keep them on this machine. Sizes are checked; digests were when the blobs were put.
func Files(ctx context.Context, s blob.Store, layer image.Digest) (meta, data string, err error) {
	local, ok := s.(blob.Local)
	if !ok {
		return "", "", errdefs.New(errdefs.FailedPrecondition, "layer "+string(layer), "its store keeps no local files")
	}
	m, err := ReadManifest(ctx, s, layer)
	if err != nil {
		return "", "", err
	}
	for _, b := range []struct {
		d    image.Digest
		size int64
		path *string
	}{{m.Meta, m.MetaBytes, &meta}, {m.Data, m.DataBytes, &data}} {
		size, err := s.Stat(ctx, b.d)
		if err != nil {
			return "", "", fmt.Errorf("layer %s: %w", layer, err)
		}
		if size != b.size {
			return "", "", errdefs.New(errdefs.DataLoss, "layer "+string(layer),
				"blob %s has %d bytes, not %d", b.d, size, b.size).
				WithHint("Import its image again")
		}
		if *b.path, err = local.Path(ctx, b.d); err != nil {
			return "", "", fmt.Errorf("layer %s: %w", layer, err)
		}
	}
	return meta, data, nil
}

func clip(s string) string {
	if len(s) > 120 {
		return s[:120] + "…"
	}
	return s
}
