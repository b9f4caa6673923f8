// Package mem keeps blobs in memory, for tests. It promises what blob.Store and blob.Creator say, but for durability.
package mem

import (
	"bytes"
	"context"
	"crypto/sha256"
	"fmt"
	"io"
	"io/fs"
	"iter"
	"maps"
	"slices"
	"sync"

	"github.com/sandsea/sandsea/api/errdefs"
	"github.com/sandsea/sandsea/internal/image"
	"github.com/sandsea/sandsea/internal/layers/blob"
)

// Store is a map of blobs. Its zero value is ready. It may be used by any number of goroutines.
type Store struct {
	mu    sync.Mutex
	blobs map[image.Digest][]byte // guarded by mu; the slices are never changed
}

var _ blob.Creator = (*Store)(nil)

// Put implements blob.Store.
func (s *Store) Put(ctx context.Context, d image.Digest, r io.Reader) error {
	if _, err := s.Stat(ctx, d); err == nil {
		return nil
	}
	if _, err := image.ParseDigest(string(d)); err != nil {
		return err
	}
	var w writer
	buf := make([]byte, 32<<10)
	for {
		if err := context.Cause(ctx); err != nil {
			return fmt.Errorf("put blob %s: %w", d, err)
		}
		n, err := r.Read(buf)
		w.buf.Write(buf[:n])
		if err == io.EOF {
			break
		}
		if err != nil {
			return fmt.Errorf("put blob %s: %w", d, err)
		}
	}
	if got := w.Digest(); got != d {
		return errdefs.New(errdefs.DataLoss, "blob "+string(d), "the bytes given have digest %s", got).
			WithHint("Send it again from its source")
	}
	s.set(d, w.buf.Bytes())
	return nil
}

func (s *Store) set(d image.Digest, b []byte) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.blobs == nil {
		s.blobs = map[image.Digest][]byte{}
	}
	s.blobs[d] = b
}

func (s *Store) get(ctx context.Context, d image.Digest) ([]byte, error) {
	if err := context.Cause(ctx); err != nil {
		return nil, err
	}
	if _, err := image.ParseDigest(string(d)); err != nil {
		return nil, err
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	b, ok := s.blobs[d]
	if !ok {
		return nil, errdefs.New(errdefs.NotFound, "blob "+string(d), "none").WithHint("Import its image again")
	}
	return b, nil
}

// ReadAt implements blob.Store.
func (s *Store) ReadAt(ctx context.Context, d image.Digest, p []byte, off int64) (int, error) {
	b, err := s.get(ctx, d)
	if err != nil {
		return 0, err
	}
	return bytes.NewReader(b).ReadAt(p, off)
}

// Stat implements blob.Store.
func (s *Store) Stat(ctx context.Context, d image.Digest) (int64, error) {
	b, err := s.get(ctx, d)
	return int64(len(b)), err
}

// Delete implements blob.Store.
func (s *Store) Delete(ctx context.Context, d image.Digest) error {
	if err := context.Cause(ctx); err != nil {
		return err
	}
	if _, err := image.ParseDigest(string(d)); err != nil {
		return err
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	delete(s.blobs, d)
	return nil
}

// All implements blob.Store.
func (s *Store) All(ctx context.Context) iter.Seq2[image.Digest, error] {
	return func(yield func(image.Digest, error) bool) {
		s.mu.Lock()
		all := slices.Sorted(maps.Keys(s.blobs))
		s.mu.Unlock()
		for _, d := range all {
			if err := context.Cause(ctx); err != nil {
				yield("", fmt.Errorf("list blobs: %w", err))
				return
			}
			if !yield(d, nil) {
				return
			}
		}
	}
}

// Create implements blob.Creator.
func (s *Store) Create(ctx context.Context) (blob.Writer, error) {
	if err := context.Cause(ctx); err != nil {
		return nil, fmt.Errorf("stage blob: %w", err)
	}
	return &writer{store: s}, nil
}

type writer struct {
	store *Store
	buf   bytes.Buffer
	done  bool
}

func (w *writer) Write(p []byte) (int, error) {
	if w.done {
		return 0, fs.ErrClosed
	}
	return w.buf.Write(p)
}

func (w *writer) ReadAt(p []byte, off int64) (int, error) {
	if w.done {
		return 0, fs.ErrClosed
	}
	return bytes.NewReader(w.buf.Bytes()).ReadAt(p, off)
}

// Digest implements blob.Writer.
func (w *writer) Digest() image.Digest {
	h := sha256.New()
	h.Write(w.buf.Bytes())
	return image.FromHash(h)
}

func (w *writer) Commit(ctx context.Context) (image.Digest, error) {
	if w.done {
		return "", fmt.Errorf("commit blob: %w", fs.ErrClosed)
	}
	w.done = true
	if err := context.Cause(ctx); err != nil {
		return "", fmt.Errorf("commit blob: %w", err)
	}
	d := w.Digest()
	w.store.set(d, w.buf.Bytes())
	return d, nil
}

func (w *writer) Abort() error {
	w.done = true
	return nil
}
