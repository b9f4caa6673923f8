package cache

import (
	"encoding/binary"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"os"
	"time"
)

// Meta is what is known of an object beside its bytes.
type Meta struct {
	Key          string `json:"key"`
	URL          string `json:"url"` // that answered, after redirects: what relative links are relative to
	ContentType  string `json:"content_type,omitempty"`
	ETag         string `json:"etag,omitempty"`
	LastModified string `json:"last_modified,omitempty"`
	// Size in bytes; -1 while it is unknown.
	Size int64 `json:"size"`
	// Digests by algorithm, in hexadecimal: sha256 and what was verified. Empty while the bytes are under way.
	Digests map[string]string `json:"digests,omitempty"`
	// Fetched is when upstream sent the object, or last confirmed it.
	Fetched time.Time `json:"-"`
}

// An object's file ends in its Meta as JSON, the length of that as 4 bytes, big-endian, and the magic.
const (
	magic       = "SSCACHE1"
	trailerTail = 4 + len(magic)
	maxMeta     = 64 << 10
)

// trailer is what follows an object's bytes in its file.
func (m Meta) trailer() ([]byte, error) {
	b, err := json.Marshal(m)
	if err != nil {
		return nil, err
	}
	if len(b) > maxMeta {
		return nil, fmt.Errorf("metadata of %d bytes, at most %d are kept", len(b), maxMeta)
	}
	n := len(b)
	b = binary.BigEndian.AppendUint32(b, uint32(n))
	return append(b, magic...), nil
}

var errBroken = errors.New("not a whole object")

// readMeta reads the metadata at the end of an object's file.
func readMeta(f *os.File) (Meta, error) {
	info, err := f.Stat()
	if err != nil {
		return Meta{}, err
	}
	return parseMeta(f, info.Size())
}

func parseMeta(r io.ReaderAt, size int64) (Meta, error) {
	var tail [trailerTail]byte
	if size < int64(trailerTail) {
		return Meta{}, errBroken
	}
	if _, err := r.ReadAt(tail[:], size-int64(trailerTail)); err != nil && !errors.Is(err, io.EOF) {
		return Meta{}, err
	}
	n := int64(binary.BigEndian.Uint32(tail[:4]))
	if string(tail[4:]) != magic || n > maxMeta || n > size-int64(trailerTail) {
		return Meta{}, errBroken
	}
	b := make([]byte, n)
	if _, err := r.ReadAt(b, size-int64(trailerTail)-n); err != nil {
		return Meta{}, err
	}
	var m Meta
	if err := json.Unmarshal(b, &m); err != nil {
		return Meta{}, errors.Join(errBroken, err)
	}
	if m.Size != size-int64(trailerTail)-n {
		return Meta{}, errBroken
	}
	return m, nil
}
