package files

import (
	"context"
	"errors"
	"fmt"
	"iter"
	"syscall"
	"time"

	"github.com/sandsea/sandsea/api/errdefs"
	"github.com/sandsea/sandsea/internal/linux/inotify"
)

// Change is what happened to a path.
type Change uint8

// The changes.
const (
	// Ready is the first: what happens from now on is told.
	Ready Change = iota + 1
	Created
	// Modified: it was written to. Told when the writer closes it, and at most once a second before.
	Modified
	// Attributes: mode, owner or times changed.
	Attributes
	Removed
	// Moved: from From to Path, both watched. A move in is Created, a move out is Removed.
	Moved
	// Gap: changes were lost. From now on they are told again; what is there must be listed anew. With a Path, it is
	// that directory alone, which the user may not read: nothing below it is told.
	Gap
)

// Event is one change below a watched path.
type Event struct {
	Change Change
	Path   string
	From   string
	Type   Type // 0: no directory, and not known what else
}

const (
	// maxWatches is how many watches one sandbox may have at a time.
	maxWatches = 32
	// maxWatchedDirs is how many directories all watches of one sandbox may hold.
	maxWatchedDirs = 65_536
	// maxQueued is how many of the kernel's events wait here, as many again as the kernel itself keeps.
	maxQueued = 32_768
	// maxTold is how many names are remembered because both a listing and an event may tell of them.
	maxTold = 100_000
	// maxWritten is how many files that are being written are told once a second and no more.
	maxWritten = 4096
	// writtenEvery is how often a file that stays open is told.
	writtenEvery = time.Second
	// maxClosed is how many directories that may not be read are told of at the beginning.
	maxClosed = 10_000
	// pairLimit is how long the second half of a move is waited for; the kernel queues it at once after the first.
	pairLimit = 10 * time.Millisecond
)

// Watch yields what changes below a directory, or to a file, first Ready. recursive takes everything below the
// directory's directories too: of one that is made or moved in, what is already in it is told as Created, so that
// nothing is missed in one that is made and filled at once. Symbolic links below are not followed; the file systems
// that the kernel makes up, as /proc, tell nothing. Of the type of what is no directory only a listing knows.
//
// It ends without an error after the path itself was removed or moved away, which is told as Removed. An error is the
// last that is yielded: the kernel's limits, and 32 watches or 65,536 watched directories of one sandbox, are
// errdefs.Exhausted with the limit's name. Who reads slowly gets Gap: the events wait in the kernel, which drops what
// is more than 16,384.
func (v *View) Watch(ctx context.Context, path string, recursive bool) iter.Seq2[Event, error] {
	return func(yield func(Event, error) bool) {
		if err := v.watch(ctx, path, recursive, func(e Event) bool { return yield(e, nil) }); err != nil {
			yield(Event{}, err)
		}
	}
}

// errLeft: the reader has left the loop.
var errLeft = errors.New("nobody reads on")

func (v *View) watch(ctx context.Context, path string, recursive bool, tell func(Event) bool) error {
	abs, err := v.abs(path)
	if err != nil {
		return err
	}
	if err := v.h.takeWatch(); err != nil {
		return err
	}
	defer v.h.giveWatch()
	rep, s, err := v.first(ctx, path, request{op: opWatch})
	if err != nil {
		return watchError(path, err)
	}
	defer s.release()
	defer v.undo(ctx, s, rep.handle)
	in, err := inotify.Adopt(rep.file)
	if err != nil {
		s.fail(fmt.Errorf("the file helper broke the rules: %w", err))
		return errdefs.New(errdefs.Unavailable, path, "%v", err).WithHint(hintRetry).Wrap(err)
	}
	defer func() { _ = in.Close() }()

	// What ends the call or the helper ends the wait for events.
	ctx, cancel := context.WithCancelCause(ctx)
	defer cancel(nil)
	over := make(chan struct{})
	go func() {
		defer close(over)
		select {
		case <-s.ended:
			cancel(errLost)
		case <-ctx.Done():
		}
		_ = in.SetDeadline(time.Unix(1, 0))
	}()
	defer func() { cancel(nil); <-over }()

	w := &watcher{
		v: v, s: s, in: in, handle: rep.handle, given: path, top: abs, recursive: recursive, tell: tell,
		byWD: map[int32]*place{}, claims: map[int32]placeName{}, written: map[placeName]*writing{},
	}
	defer func() {
		v.h.giveDirs(w.held)
		if w.base != 0 {
			v.undo(ctx, s, w.base)
		}
	}()
	err = w.run(ctx)
	switch {
	case errors.Is(err, errLeft):
		return nil
	case errors.Is(err, errLost):
		return errdefs.New(errdefs.Unavailable, path, "the watch ended: %v", errLost).WithHint(hintRetry).Wrap(errLost)
	default:
		return err
	}
}

// watchError names the limit that the kernel met.
func watchError(path string, err error) error {
	e, ok := errors.AsType[*errdefs.Error](err)
	if !ok {
		return err
	}
	switch syscall.Errno(e.Errno) {
	case syscall.EMFILE:
		return limitMet(e, "fs.inotify.max_user_instances", "the sandbox has no inotify instance left",
			"End other watches in the sandbox, or raise fs.inotify.max_user_instances on the node")
	case syscall.ENOSPC:
		return limitMet(e, "fs.inotify.max_user_watches", "the sandbox has no inotify watch left",
			"Watch a smaller tree, or raise fs.inotify.max_user_watches on the node")
	case syscall.EOPNOTSUPP, syscall.ENOSYS:
		e.Msg = "the sandbox is of a version of sandsea that cannot watch"
		e.Feature = "watch"
		return e.WithHint("Create it anew")
	}
	return e
}

func limitMet(e *errdefs.Error, limit, msg, hint string) *errdefs.Error {
	e.Kind, e.Msg, e.Limit = errdefs.Exhausted, fmt.Sprintf("%s (%s)", msg, limit), limit
	return e.WithHint("%s", hint)
}

func (h *Helpers) takeWatch() error {
	h.mu.Lock()
	defer h.mu.Unlock()
	if h.watches == maxWatches {
		e := errdefs.New(errdefs.Exhausted, "", "the sandbox has %d watches already", maxWatches).
			WithHint("End one of them, or watch a directory above")
		e.Limit = fmt.Sprintf("%d watches", maxWatches)
		return e
	}
	h.watches++
	return nil
}

func (h *Helpers) giveWatch() {
	h.mu.Lock()
	defer h.mu.Unlock()
	h.watches--
}

func (h *Helpers) takeDir(path string) error {
	h.mu.Lock()
	defer h.mu.Unlock()
	if h.watchedDirs == maxWatchedDirs {
		e := errdefs.New(errdefs.Exhausted, path, "the watches of the sandbox hold %d directories already", maxWatchedDirs).
			WithHint("Watch a smaller tree")
		e.Limit = fmt.Sprintf("%d watched directories", maxWatchedDirs)
		return e
	}
	h.watchedDirs++
	return nil
}

func (h *Helpers) giveDirs(n int) {
	h.mu.Lock()
	defer h.mu.Unlock()
	h.watchedDirs -= n
}
