package runner

import (
	"context"
	"errors"
	"sync"
	"syscall"

	"github.com/sandsea/sandsea/api/errdefs"
	"github.com/sandsea/sandsea/internal/chronus"
	"github.com/sandsea/sandsea/internal/chronus/files"
)

// workdirs remembers which working directories are in which layers: there they are in every sandbox of them, before
// anything has run. It spares each further sandbox of an image a process inside.
type workdirs struct {
	mu    sync.Mutex
	known map[string]struct{} // guarded by mu
}

func (w *workdirs) has(key string) bool {
	w.mu.Lock()
	defer w.mu.Unlock()
	_, ok := w.known[key]
	return ok
}

func (w *workdirs) note(key string) {
	w.mu.Lock()
	defer w.mu.Unlock()
	if w.known == nil || len(w.known) >= usersMost {
		w.known = map[string]struct{}{}
	}
	w.known[key] = struct{}{}
}

// makeWorkdir makes the working directory of a sandbox that is being created, with its parents, if it is not there: as
// root and mode 0755, which is what Docker and runc do, whoever the default user is.
func (r *Runner) makeWorkdir(ctx context.Context, b *box) error {
	b.mu.Lock()
	rec, h := b.rec, b.files
	b.mu.Unlock()
	dir := workdir(rec)
	if dir == "/" || r.cfg.Lookup != nil {
		return nil
	}
	key := userKey(rec.Layers, dir)
	if r.workdirs.has(key) {
		return nil
	}
	root := h.As(chronus.IDs{Groups: []uint32{0}}, "/")
	info, err := root.Stat(ctx, dir, false)
	switch {
	case err == nil && info.Type == files.Directory:
		r.workdirs.note(key)
		return nil
	case err == nil:
		err = syscall.ENOTDIR
	case errors.Is(err, syscall.ENOENT):
		err = root.MakeDir(ctx, dir, 0o755, true)
	}
	if err == nil {
		return nil
	}
	if kind := errdefs.KindOf(err); kind == errdefs.Unavailable || kind == errdefs.Deadline || kind == errdefs.Canceled {
		return err
	}
	why := err.Error()
	if errno, ok := errors.AsType[syscall.Errno](err); ok {
		why = errno.Error()
	}
	return errdefs.New(errdefs.FailedPrecondition, b.object(), "its working directory %q cannot be made: %s", dir, why).
		WithField("workdir", "").WithHint("Choose another: --workdir, or correct the image's WORKDIR").Wrap(err)
}
