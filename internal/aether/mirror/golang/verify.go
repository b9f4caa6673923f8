package golang

import (
	"archive/zip"
	"context"
	"errors"
	"fmt"
	"io"
	"strings"
	"sync"

	"golang.org/x/mod/module"
	"golang.org/x/mod/sumdb/dirhash"

	"github.com/sandsea/sandsea/api/errdefs"
	"github.com/sandsea/sandsea/internal/aether/cache"
)

const (
	maxVerified  = 100_000  // zips that are remembered as good
	maxDirectory = 16 << 20 // of one zip: in memory it takes some ten times that
	atOnce       = 2        // zips that are being hashed
)

// verified remembers which zips were found good, by module, version and SHA-256.
type verified struct {
	turn chan struct{} // one for each zip that is being hashed

	mu   sync.Mutex
	good map[[3]string]bool // guarded by mu
}

func newVerified() *verified {
	return &verified{turn: make(chan struct{}, atOnce), good: map[[3]string]bool{}}
}

// enter waits for a turn to hash a zip.
func (v *verified) enter(ctx context.Context) (leave func(), err error) {
	select {
	case v.turn <- struct{}{}:
		return func() { <-v.turn }, nil
	case <-ctx.Done():
		return nil, context.Cause(ctx)
	}
}

func (v *verified) has(k [3]string) bool {
	v.mu.Lock()
	defer v.mu.Unlock()
	return v.good[k]
}

func (v *verified) add(k [3]string) {
	v.mu.Lock()
	defer v.mu.Unlock()
	if len(v.good) >= maxVerified {
		clear(v.good)
	}
	v.good[k] = true
}

// verify waits for a zip and checks that it is the module's version: by its files' names, and by the hash that the
// checksum database has, where it is in use, answers and knows the module. A wrong zip is errdefs.DataLoss.
func (s *Service) verify(ctx context.Context, o *cache.Object, path, version string) error {
	meta, err := o.Wait(ctx)
	if err != nil {
		return err
	}
	key := [3]string{path, version, meta.Digests["sha256"]}
	if s.seen.has(key) {
		return nil
	}
	what := path + "@" + version
	leave, err := s.seen.enter(ctx)
	if err != nil {
		return err
	}
	if s.seen.has(key) { // by who had the turn before
		leave()
		return nil
	}
	got, err := func() (string, error) {
		defer leave()
		return hashZip(&readerAt{r: o.Reader(ctx)}, meta.Size, path, version)
	}()
	if err != nil {
		return wrong(what, "is no zip of that version: %v", err)
	}
	want, err := s.wantHash(ctx, path, version)
	switch {
	case err == nil && want != got:
		return wrong(what, "has zip hash %s, but the checksum database has %s", got, want)
	case errors.Is(err, errdefs.DataLoss):
		return err
	case err != nil && !errors.Is(err, errdefs.NotFound):
		return nil // clients ask the database themselves; the zip is checked again next time
	}
	s.seen.add(key)
	return nil
}

// wantHash asks the checksum database. errdefs.NotFound: it is not in use, or does not know the module.
func (s *Service) wantHash(ctx context.Context, path, version string) (string, error) {
	if s.sums.name == "" {
		return "", errdefs.New(errdefs.NotFound, "checksum database", "is not in use")
	}
	p, _ := module.EscapePath(path)
	v, _ := module.EscapeVersion(version)
	var h string
	_, _, err := s.read(ctx, s.sumBases(ctx), "/lookup/"+p+"@"+v, cache.Options{MaxBytes: maxText}, func(b []byte) (err error) {
		if h, err = parseLookup(b, path, version); err != nil {
			return wrong(path+"@"+version, "%v", err)
		}
		return nil
	})
	return h, err
}

// wrong is the error for what upstream sent and cannot be right.
func wrong(what, format string, args ...any) error {
	return errdefs.New(errdefs.DataLoss, what, format, args...).WithHint("Upstream sent something wrong, which is not served; try again later")
}

// hashZip checks that a zip can be that of a module's version, as golang.org/x/mod/zip does for files, and returns its
// hash ("h1:…").
func hashZip(r io.ReaderAt, size int64, path, version string) (string, error) {
	bounded := &boundedReaderAt{r: r, left: maxDirectory}
	z, err := zip.NewReader(bounded, size)
	if err != nil {
		return "", err
	}
	bounded.left = -1
	root := path + "@" + version + "/"
	files := map[string]*zip.File{}
	var names []string
	var total uint64
	for _, f := range z.File {
		rest, ok := strings.CutPrefix(f.Name, root)
		if !ok {
			return "", fmt.Errorf("file %.200q lies outside %s", f.Name, root)
		}
		if name := strings.TrimSuffix(rest, "/"); name != "" { // folders are allowed, and hashed like empty files
			if err := module.CheckFilePath(name); err != nil {
				return "", err
			}
		}
		if files[f.Name] != nil {
			return "", fmt.Errorf("file %.200q is there twice", f.Name)
		}
		if total += f.UncompressedSize64; total > maxZip || f.UncompressedSize64 > maxZip {
			return "", fmt.Errorf("it unpacks to more than %d bytes", maxZip)
		}
		files[f.Name] = f
		names = append(names, f.Name)
	}
	return dirhash.Hash1(names, func(name string) (io.ReadCloser, error) {
		return files[name].Open()
	})
}

// boundedReaderAt reads so many bytes, for one goroutine. The count of files in a zip's directory is not to be trusted,
// and there may be millions.
type boundedReaderAt struct {
	r    io.ReaderAt
	left int64 // -1: as many as there are
}

// ReadAt implements io.ReaderAt.
func (b *boundedReaderAt) ReadAt(p []byte, off int64) (int, error) {
	if b.left >= 0 {
		if b.left -= int64(len(p)); b.left < 0 {
			b.left = 0
			return 0, fmt.Errorf("its directory is longer than %d bytes", maxDirectory)
		}
	}
	return b.r.ReadAt(p, off)
}

// readerAt makes random access of an object's reader, for one goroutine at a time.
type readerAt struct {
	mu sync.Mutex
	r  io.ReadSeeker // guarded by mu
}

// ReadAt implements io.ReaderAt.
func (a *readerAt) ReadAt(p []byte, off int64) (int, error) {
	a.mu.Lock()
	defer a.mu.Unlock()
	if _, err := a.r.Seek(off, io.SeekStart); err != nil {
		return 0, err
	}
	n, err := io.ReadFull(a.r, p)
	if errors.Is(err, io.ErrUnexpectedEOF) {
		err = io.EOF
	}
	return n, err
}
