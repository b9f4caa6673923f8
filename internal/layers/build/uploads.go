package build

import (
	"context"
	"crypto/rand"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"os"
	"path/filepath"
	"regexp"
	"strings"
	"sync"
	"time"

	"github.com/sandsea/sandsea/api/errdefs"
)

const (
	uploadPrefix = "upload-"
	partSuffix   = ".part"
	uploadFor    = time.Hour
	maxUploads   = 64
)

var uploadID = regexp.MustCompile(`^[A-Z2-7]{26}$`)

// Uploads keeps archives that clients hand over until an import names them, for an hour. The files are its only state,
// so what an earlier process took is there after a restart. It may be used by any number of goroutines.
type Uploads struct {
	dir     string
	most    int64
	reserve int64
	now     func() time.Time

	mu      sync.Mutex
	running map[string]int64 // guarded by mu; bytes taken so far by uploads that run
}

// Uploads gives the builder's uploads.
func (b *Builder) Uploads() *Uploads { return b.uploads }

func newUploads(b *Builder) *Uploads {
	return &Uploads{
		dir: b.tmp(), most: b.limits.Bytes, reserve: b.limits.Reserve, now: b.now, running: map[string]int64{},
	}
}

// Upload keeps what r gives and returns the name by which Open finds it.
func (u *Uploads) Upload(ctx context.Context, r io.Reader) (id string, n int64, err error) {
	if err := u.Expire(); err != nil {
		return "", 0, err
	}
	name := rand.Text()
	u.mu.Lock()
	if len(u.running) >= maxUploads {
		u.mu.Unlock()
		return "", 0, errdefs.New(errdefs.Exhausted, "upload", "%d uploads run already", maxUploads).
			WithRetryAfter(10 * time.Second)
	}
	u.running[name] = 0
	u.mu.Unlock()
	defer func() {
		u.mu.Lock()
		delete(u.running, name)
		u.mu.Unlock()
	}()
	path := filepath.Join(u.dir, uploadPrefix+name)
	f, err := os.OpenFile(path+partSuffix, os.O_WRONLY|os.O_CREATE|os.O_EXCL, 0o600)
	if err != nil {
		return "", 0, fmt.Errorf("upload: %w", err)
	}
	defer func() {
		if err != nil {
			err = errors.Join(err, os.Remove(f.Name()))
		}
	}()
	kept, err := u.kept()
	if err != nil {
		return "", 0, errors.Join(err, f.Close())
	}
	next := int64(0)
	in := &meter{alive: aliveIn(ctx), r: r, check: func(total int64) error {
		u.mu.Lock()
		u.running[name] = total
		all := kept
		for _, n := range u.running {
			all += n
		}
		u.mu.Unlock()
		if all > u.most {
			return errdefs.New(errdefs.Exhausted, "upload", "all uploads together exceed %s", gib(u.most)).
				WithField("data", gib(u.most)).WithHint("Import or wait for those that are here, then try again")
		}
		if total >= next {
			next = total + 64<<20
			return roomFor(u.dir, 0, u.reserve)
		}
		return nil
	}}
	n, err = io.Copy(onlyWriter{f}, in)
	if err = errors.Join(err, f.Close()); err != nil {
		return "", 0, roomErr(u.dir, fmt.Errorf("upload: %w", err))
	}
	if err := os.Rename(f.Name(), path); err != nil {
		return "", 0, fmt.Errorf("upload: %w", err)
	}
	time.AfterFunc(uploadFor, func() { _ = u.Expire() })
	return name, n, nil
}

// kept sums up the uploads that are whole.
func (u *Uploads) kept() (int64, error) {
	var total int64
	err := u.each(func(_, name string, st fs.FileInfo) error {
		if !strings.HasSuffix(name, partSuffix) {
			total += st.Size()
		}
		return nil
	})
	return total, err
}

// Open opens an upload. The file stays readable though the upload may expire meanwhile.
func (u *Uploads) Open(id string) (*os.File, error) {
	none := errdefs.New(errdefs.NotFound, "upload "+clip(id), "none; uploads are kept for an hour").
		WithField("upload", "").WithHint("Upload it again")
	if !uploadID.MatchString(id) {
		return nil, none
	}
	f, err := os.Open(filepath.Join(u.dir, uploadPrefix+id))
	if errors.Is(err, fs.ErrNotExist) {
		return nil, none
	}
	if err != nil {
		return nil, fmt.Errorf("open upload: %w", err)
	}
	st, err := f.Stat()
	if err != nil {
		return nil, errors.Join(fmt.Errorf("open upload: %w", err), f.Close())
	}
	if u.now().Sub(st.ModTime()) >= uploadFor {
		return nil, errors.Join(none, f.Close())
	}
	return f, nil
}

// Remove forgets an upload; one that is not there is no error.
func (u *Uploads) Remove(id string) error {
	if !uploadID.MatchString(id) {
		return nil
	}
	if err := os.Remove(filepath.Join(u.dir, uploadPrefix+id)); err != nil && !errors.Is(err, fs.ErrNotExist) {
		return fmt.Errorf("remove upload: %w", err)
	}
	return nil
}

// Expire removes what is an hour old, and the parts of uploads whose process is gone.
func (u *Uploads) Expire() error {
	err := u.each(func(path, name string, st fs.FileInfo) error {
		id := strings.TrimSuffix(name, partSuffix)
		u.mu.Lock()
		_, running := u.running[id]
		u.mu.Unlock()
		dead := strings.HasSuffix(name, partSuffix) && !running
		if running || !dead && u.now().Sub(st.ModTime()) < uploadFor {
			return nil
		}
		if err := os.Remove(path); err != nil && !errors.Is(err, fs.ErrNotExist) {
			return err
		}
		return nil
	})
	if err != nil {
		return fmt.Errorf("expire uploads: %w", err)
	}
	return nil
}

func (u *Uploads) each(do func(path, name string, st fs.FileInfo) error) error {
	ents, err := os.ReadDir(u.dir)
	if err != nil {
		return err
	}
	for _, e := range ents {
		name, ok := strings.CutPrefix(e.Name(), uploadPrefix)
		if !ok {
			continue
		}
		st, err := e.Info()
		if errors.Is(err, fs.ErrNotExist) {
			continue
		}
		if err != nil {
			return err
		}
		if err := do(filepath.Join(u.dir, e.Name()), name, st); err != nil {
			return err
		}
	}
	return nil
}
