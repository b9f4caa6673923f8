// Package posix keeps blobs as plain files below one directory of a local or shared file system, as
// sha256/<first two digits>/<digest>.
//
// It promises what blob.Store and blob.Creator say. A blob appears by rename after its bytes are verified and synced,
// so a crash leaves at most temporary files, which carry a lock while their writer lives; Sweep removes those without.
// Any number of processes may use one directory at once, and within a process any number of goroutines one Store.
package posix

import (
	"context"
	"crypto/rand"
	"crypto/sha256"
	"errors"
	"fmt"
	"hash"
	"io"
	"io/fs"
	"iter"
	"os"
	"path/filepath"
	"strings"
	"sync"
	"syscall"

	"github.com/sandsea/sandsea/api/errdefs"
	"github.com/sandsea/sandsea/internal/image"
	"github.com/sandsea/sandsea/internal/layers/blob"
)

const (
	tmpPrefix = ".tmp-"
	copyBytes = 256 << 10
)

// Store is a directory of blobs.
type Store struct {
	dir string // …/sha256

	mu      sync.Mutex
	flights map[image.Digest]chan struct{} // guarded by mu; a Put of that digest runs until the channel is closed
}

var (
	_ blob.Creator = (*Store)(nil)
	_ blob.Local   = (*Store)(nil)
)

// Open makes dir if needed and returns the store in it.
func Open(dir string) (*Store, error) {
	d := filepath.Join(dir, "sha256")
	if err := os.MkdirAll(d, 0o700); err != nil {
		return nil, fmt.Errorf("open blob store %s: %w", dir, err)
	}
	return &Store{dir: d, flights: map[image.Digest]chan struct{}{}}, nil
}

// Put implements blob.Store.
func (s *Store) Put(ctx context.Context, d image.Digest, r io.Reader) error {
	if _, err := image.ParseDigest(string(d)); err != nil {
		return err
	}
	done, err := s.enter(ctx, d)
	if err != nil {
		return err
	}
	defer done()
	if _, err := s.Stat(ctx, d); err == nil {
		return nil
	} else if !errors.Is(err, errdefs.NotFound) {
		return err
	}
	w, err := s.create(ctx)
	if err != nil {
		return fmt.Errorf("put blob %s: %w", d, err)
	}
	defer func() { _ = w.Abort() }()
	if err := copyAll(ctx, w, r); err != nil {
		return fmt.Errorf("put blob %s: %w", d, err)
	}
	if got := w.Digest(); got != d {
		return errdefs.New(errdefs.DataLoss, "blob "+string(d), "the bytes given have digest %s", got).
			WithHint("Send it again from its source")
	}
	return w.commit(ctx, d)
}

// enter waits until no other Put of d runs in this process.
func (s *Store) enter(ctx context.Context, d image.Digest) (done func(), err error) {
	for {
		s.mu.Lock()
		running, ok := s.flights[d]
		if !ok {
			mine := make(chan struct{})
			s.flights[d] = mine
			s.mu.Unlock()
			return func() {
				s.mu.Lock()
				delete(s.flights, d)
				s.mu.Unlock()
				close(mine)
			}, nil
		}
		s.mu.Unlock()
		select {
		case <-running:
		case <-ctx.Done():
			return nil, fmt.Errorf("put blob %s: %w", d, context.Cause(ctx))
		}
	}
}

// ReadAt implements blob.Store.
func (s *Store) ReadAt(ctx context.Context, d image.Digest, p []byte, off int64) (int, error) {
	if err := context.Cause(ctx); err != nil {
		return 0, err
	}
	path, err := s.Path(ctx, d)
	if err != nil {
		return 0, err
	}
	f, err := os.Open(path)
	if err != nil {
		return 0, s.wrap("read", d, err)
	}
	defer func() { _ = f.Close() }()
	n, err := f.ReadAt(p, off)
	if err != nil && !errors.Is(err, io.EOF) {
		return n, s.wrap("read", d, err)
	}
	return n, err
}

// Stat implements blob.Store.
func (s *Store) Stat(ctx context.Context, d image.Digest) (int64, error) {
	if err := context.Cause(ctx); err != nil {
		return 0, err
	}
	if _, err := image.ParseDigest(string(d)); err != nil {
		return 0, err
	}
	st, err := os.Lstat(s.path(d))
	if err != nil {
		return 0, s.wrap("stat", d, err)
	}
	if !st.Mode().IsRegular() {
		return 0, errdefs.New(errdefs.DataLoss, "blob "+string(d), "%s is no regular file", s.path(d)).
			WithHint("Remove it and import again")
	}
	return st.Size(), nil
}

// Path implements blob.Local.
func (s *Store) Path(ctx context.Context, d image.Digest) (string, error) {
	if _, err := s.Stat(ctx, d); err != nil {
		return "", err
	}
	return s.path(d), nil
}

// Delete implements blob.Store.
func (s *Store) Delete(ctx context.Context, d image.Digest) error {
	if err := context.Cause(ctx); err != nil {
		return err
	}
	if _, err := image.ParseDigest(string(d)); err != nil {
		return err
	}
	if err := os.Remove(s.path(d)); err != nil && !errors.Is(err, fs.ErrNotExist) {
		return s.wrap("delete", d, err)
	}
	return nil
}

// All implements blob.Store.
func (s *Store) All(ctx context.Context) iter.Seq2[image.Digest, error] {
	return func(yield func(image.Digest, error) bool) {
		stop := errors.New("stop")
		err := s.walk(ctx, func(path, name string) error {
			d, perr := image.ParseDigest("sha256:" + name)
			// What is no blob is a temporary file, or not ours.
			if perr == nil && s.path(d) == path && !yield(d, nil) {
				return stop
			}
			return nil
		})
		if err != nil && !errors.Is(err, stop) {
			yield("", fmt.Errorf("list blobs: %w", err))
		}
	}
}

// Sweep removes the temporary files of writers that are gone and returns how many there were. It may run at any time.
func (s *Store) Sweep(ctx context.Context) (int, error) {
	n := 0
	err := s.walk(ctx, func(path, name string) error {
		if !strings.HasPrefix(name, tmpPrefix) {
			return nil
		}
		f, err := os.OpenFile(path, os.O_RDWR|syscall.O_NOFOLLOW|syscall.O_NONBLOCK, 0)
		if errors.Is(err, fs.ErrNotExist) {
			return nil
		}
		if err != nil {
			return err
		}
		defer func() { _ = f.Close() }()
		if err := flock(f, syscall.LOCK_EX|syscall.LOCK_NB); err != nil {
			if errors.Is(err, syscall.EWOULDBLOCK) {
				return nil // its writer lives
			}
			return err
		}
		if err := os.Remove(path); err != nil && !errors.Is(err, fs.ErrNotExist) {
			return err
		}
		n++
		return nil
	})
	if err != nil {
		return n, fmt.Errorf("sweep blob store: %w", err)
	}
	return n, nil
}

// walk calls do for every file in the store's directory and its sub-directories.
func (s *Store) walk(ctx context.Context, do func(path, name string) error) error {
	top, err := os.ReadDir(s.dir)
	if err != nil {
		return err
	}
	for _, t := range top {
		if err := context.Cause(ctx); err != nil {
			return err
		}
		path := filepath.Join(s.dir, t.Name())
		if !t.IsDir() {
			if err := do(path, t.Name()); err != nil {
				return err
			}
			continue
		}
		sub, err := os.ReadDir(path)
		if err != nil {
			return err
		}
		for _, e := range sub {
			if err := do(filepath.Join(path, e.Name()), e.Name()); err != nil {
				return err
			}
		}
	}
	return nil
}

// Create implements blob.Creator.
func (s *Store) Create(ctx context.Context) (blob.Writer, error) {
	w, err := s.create(ctx)
	if err != nil {
		return nil, fmt.Errorf("stage blob: %w", err)
	}
	return w, nil
}

func (s *Store) create(ctx context.Context) (*writer, error) {
	for {
		if err := context.Cause(ctx); err != nil {
			return nil, err
		}
		path := filepath.Join(s.dir, tmpPrefix+rand.Text())
		f, err := os.OpenFile(path, os.O_RDWR|os.O_CREATE|os.O_EXCL, 0o400)
		if err != nil {
			return nil, err
		}
		// The lock says that the writer lives. A sweep may have come between the two calls: then the file has no name.
		if err := flock(f, syscall.LOCK_EX); err != nil {
			return nil, errors.Join(err, f.Close(), os.Remove(path))
		}
		mine, err := f.Stat()
		if err != nil {
			return nil, errors.Join(err, f.Close())
		}
		if st, ok := mine.Sys().(*syscall.Stat_t); ok && st.Nlink == 0 {
			_ = f.Close()
			continue
		}
		return &writer{store: s, file: f, path: path, hash: sha256.New()}, nil
	}
}

func (s *Store) path(d image.Digest) string {
	h := d.Hex()
	return filepath.Join(s.dir, h[:2], h)
}

func (s *Store) wrap(doing string, d image.Digest, err error) error {
	if errors.Is(err, fs.ErrNotExist) {
		return errdefs.New(errdefs.NotFound, "blob "+string(d), "none in %s", filepath.Dir(s.dir)).Wrap(err).
			WithHint("Import its image again")
	}
	return fmt.Errorf("%s blob %s: %w", doing, d, err)
}

// writer is a temporary file that becomes a blob.
type writer struct {
	store *Store
	file  *os.File // nil once finished
	path  string
	hash  hash.Hash
}

func (w *writer) Write(p []byte) (int, error) {
	if w.file == nil {
		return 0, fs.ErrClosed
	}
	n, err := w.file.Write(p)
	w.hash.Write(p[:n])
	return n, err
}

func (w *writer) ReadAt(p []byte, off int64) (int, error) {
	if w.file == nil {
		return 0, fs.ErrClosed
	}
	return w.file.ReadAt(p, off)
}

func (w *writer) Digest() image.Digest { return image.FromHash(w.hash) }

func (w *writer) Commit(ctx context.Context) (image.Digest, error) {
	d := w.Digest()
	if w.file == nil {
		return "", fmt.Errorf("commit blob %s: %w", d, fs.ErrClosed)
	}
	done, err := w.store.enter(ctx, d)
	if err != nil {
		return "", errors.Join(err, w.Abort())
	}
	defer done()
	if _, err := w.store.Stat(ctx, d); err == nil {
		return d, w.Abort()
	}
	if err := w.commit(ctx, d); err != nil {
		return "", errors.Join(err, w.Abort())
	}
	return d, nil
}

func (w *writer) commit(ctx context.Context, d image.Digest) error {
	if err := context.Cause(ctx); err != nil {
		return fmt.Errorf("commit blob %s: %w", d, err)
	}
	if err := w.file.Sync(); err != nil {
		return fmt.Errorf("commit blob %s: %w", d, err)
	}
	final := w.store.path(d)
	switch err := os.Mkdir(filepath.Dir(final), 0o700); {
	case err == nil:
		if err := syncDir(w.store.dir); err != nil {
			return fmt.Errorf("commit blob %s: %w", d, err)
		}
	case !errors.Is(err, fs.ErrExist):
		return fmt.Errorf("commit blob %s: %w", d, err)
	}
	if err := os.Rename(w.path, final); err != nil {
		return fmt.Errorf("commit blob %s: %w", d, err)
	}
	f := w.file
	w.file = nil
	if err := errors.Join(f.Close(), syncDir(filepath.Dir(final))); err != nil {
		return fmt.Errorf("commit blob %s: %w", d, err)
	}
	return nil
}

func (w *writer) Abort() error {
	if w.file == nil {
		return nil
	}
	f := w.file
	w.file = nil
	return errors.Join(os.Remove(w.path), f.Close())
}

// copyAll copies r to w and gives up within one piece of a cancellation.
func copyAll(ctx context.Context, w io.Writer, r io.Reader) error {
	buf := make([]byte, copyBytes)
	for {
		if err := context.Cause(ctx); err != nil {
			return err
		}
		n, err := r.Read(buf)
		if n > 0 {
			if _, err := w.Write(buf[:n]); err != nil {
				return err
			}
		}
		if errors.Is(err, io.EOF) {
			return nil
		}
		if err != nil {
			return err
		}
	}
}

func syncDir(path string) error {
	d, err := os.Open(path)
	if err != nil {
		return err
	}
	return errors.Join(d.Sync(), d.Close())
}

func flock(f *os.File, how int) error {
	for {
		err := syscall.Flock(int(f.Fd()), how)
		if !errors.Is(err, syscall.EINTR) {
			return err
		}
	}
}
