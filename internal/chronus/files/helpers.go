package files

import (
	"context"
	"errors"
	"fmt"
	"os"
	"strings"
	"sync"
	"time"

	"github.com/sandsea/sandsea/api/errdefs"
	"github.com/sandsea/sandsea/internal/chronus"
)

const (
	// idleLimit is shorter than the helper's own 30 s, so that it is always this end that decides.
	idleLimit = 10 * time.Second
	// stallLimit is how long a helper may take for one step. All steps are short; a longer one means that it is
	// stopped.
	stallLimit = 30 * time.Second
	// maxHelpers is how many helpers are kept, for as many users; more exist only while they are used.
	maxHelpers = 16
	// undoLimit is for taking back what a call left, after its own time is over.
	undoLimit = 5 * time.Second
)

// Helpers are the file helpers of one sandbox.
type Helpers struct {
	serve func(context.Context, chronus.IDs) (*os.File, error)
	idle  time.Duration
	stall time.Duration

	mu     sync.Mutex
	lines  map[string]*line // guarded by mu; by user
	closed bool             // guarded by mu
	wg     sync.WaitGroup   // Add is guarded by mu

	watches     int // guarded by mu; that are open
	watchedDirs int // guarded by mu; in all of them
}

// line is the way to one user's helper, whichever it is at the time.
type line struct {
	ids  chronus.IDs
	dial chan struct{} // held while a helper is started; guards conn
	conn *conn

	users int         // guarded by Helpers.mu
	since time.Time   // guarded by Helpers.mu; of the last use
	timer *time.Timer // guarded by Helpers.mu
}

// New makes the helpers of one sandbox. serve starts one and returns the caller's end of its socket, as
// chronus.Channel.ServeFiles does.
func New(serve func(context.Context, chronus.IDs) (*os.File, error)) *Helpers {
	return &Helpers{serve: serve, idle: idleLimit, stall: stallLimit, lines: map[string]*line{}}
}

// Close ends every helper. Calls under way fail.
func (h *Helpers) Close() error {
	h.mu.Lock()
	h.closed = true
	lines := h.lines
	h.lines = map[string]*line{}
	for _, l := range lines {
		if l.timer != nil {
			l.timer.Stop()
		}
	}
	h.mu.Unlock()
	for _, l := range lines {
		l.end()
	}
	h.wg.Wait()
	return nil
}

// end closes the line's helper, if there is one.
func (l *line) end() {
	l.dial <- struct{}{}
	defer func() { <-l.dial }()
	if l.conn != nil {
		l.conn.close()
		l.conn = nil
	}
}

// lease is the right to use a helper that will not be closed as idle meanwhile.
type lease struct {
	*conn
	h *Helpers
	l *line
}

func keyOf(ids chronus.IDs) string { return fmt.Sprint(ids.UID, ids.GID, ids.Groups) }

// acquire gives the helper of a user, starting one if need be. The lease must be released.
func (h *Helpers) acquire(ctx context.Context, ids chronus.IDs) (lease, error) {
	if err := ctx.Err(); err != nil {
		return lease{}, context.Cause(ctx)
	}
	l, err := h.line(ids)
	if err != nil {
		return lease{}, err
	}
	select {
	case l.dial <- struct{}{}:
	case <-ctx.Done():
		h.release(l)
		return lease{}, context.Cause(ctx)
	}
	defer func() { <-l.dial }()
	if l.conn != nil && l.conn.dead() {
		l.conn.close()
		l.conn = nil
	}
	if l.conn == nil {
		if l.conn, err = h.start(ctx, ids); err != nil {
			h.release(l)
			return lease{}, err
		}
	}
	return lease{conn: l.conn, h: h, l: l}, nil
}

func (h *Helpers) start(ctx context.Context, ids chronus.IDs) (*conn, error) {
	f, err := h.serve(ctx, ids)
	if err != nil {
		return nil, fmt.Errorf("start a file helper as uid %d: %w", ids.UID, err)
	}
	c, err := newConn(f, h.stall)
	if err != nil {
		return nil, err
	}
	h.mu.Lock()
	closed := h.closed
	h.mu.Unlock()
	if closed {
		c.close()
		return nil, errClosed()
	}
	return c, nil
}

func errClosed() error {
	return errdefs.New(errdefs.Unavailable, "", "the sandbox is being let go of")
}

// line finds or makes the line of a user and counts one more use of it.
func (h *Helpers) line(ids chronus.IDs) (*line, error) {
	h.mu.Lock()
	defer h.mu.Unlock()
	if h.closed {
		return nil, errClosed()
	}
	key := keyOf(ids)
	l := h.lines[key]
	if l == nil {
		h.evictLocked()
		l = &line{ids: ids, dial: make(chan struct{}, 1)}
		h.lines[key] = l
	}
	l.users++
	if l.timer != nil {
		l.timer.Stop()
		l.timer = nil
	}
	return l, nil
}

// evictLocked makes room for one more line by ending the one that is unused for longest.
func (h *Helpers) evictLocked() {
	if len(h.lines) < maxHelpers {
		return
	}
	var oldest *line
	for _, l := range h.lines {
		if l.users == 0 && (oldest == nil || l.since.Before(oldest.since)) {
			oldest = l
		}
	}
	if oldest != nil {
		h.dropLocked(oldest)
	}
}

func (h *Helpers) dropLocked(l *line) {
	delete(h.lines, keyOf(l.ids))
	if l.timer != nil {
		l.timer.Stop()
	}
	h.wg.Go(l.end)
}

func (h *Helpers) release(l *line) {
	h.mu.Lock()
	defer h.mu.Unlock()
	if l.users--; l.users > 0 || h.closed {
		return
	}
	l.since = time.Now()
	l.timer = time.AfterFunc(h.idle, func() {
		h.mu.Lock()
		defer h.mu.Unlock()
		if l.users == 0 && !h.closed && h.lines[keyOf(l.ids)] == l {
			h.dropLocked(l)
		}
	})
}

func (s lease) release() { s.h.release(s.l) }

// View is the sandbox's files as one user sees them.
type View struct {
	h       *Helpers
	ids     chronus.IDs
	workdir string
	gives   *ownerIDs // who gets what is made; nil: the user
}

// As gives the view of a user. Relative paths begin at workdir, which is absolute or empty for "/".
func (h *Helpers) As(ids chronus.IDs, workdir string) *View {
	return &View{h: h, ids: ids, workdir: workdir}
}

// abs checks a path and makes it absolute. It does not tidy it: "a/../b" means what the sandbox's links make of it.
func (v *View) abs(path string) (string, error) {
	if err := checkPath(path); err != nil {
		return "", err
	}
	if path[0] == '/' {
		return path, nil
	}
	abs := strings.TrimRight(v.workdir, "/") + "/" + path
	if abs[0] != '/' {
		return "", invalidPath(path, "the working directory %q is not absolute", v.workdir)
	}
	return abs, checkPath(abs)
}

// first performs the first or only step of a call: it gets a helper, and another one when that had ended before it did
// anything. path is for messages. On success the lease is the caller's to release.
func (v *View) first(ctx context.Context, path string, r request) (reply, lease, error) {
	for try := 0; ; try++ {
		s, err := v.h.acquire(ctx, v.ids)
		if err != nil {
			return reply{}, lease{}, v.explain(ctx, path, request{}, false, err)
		}
		rep, sent, err := s.roundTrip(ctx, r)
		if err == nil {
			if err = ofAnswer(path, rep.answer); err == nil {
				return rep, s, nil
			}
			s.release()
			return rep, lease{}, err
		}
		s.release()
		again := errors.Is(err, errGone) || errors.Is(err, errLost) && !(sent && r.changes())
		if try > 0 || !again {
			return reply{}, lease{}, v.explain(ctx, path, r, sent, err)
		}
	}
}

// next performs a further step of a call with the same helper.
func (v *View) next(ctx context.Context, s lease, path string, r request) (reply, error) {
	rep, sent, err := s.roundTrip(ctx, r)
	if err != nil {
		return reply{}, v.explain(ctx, path, r, sent, err)
	}
	return rep, ofAnswer(path, rep.answer)
}

// one performs a call of one step.
func (v *View) one(ctx context.Context, path string, r request) (reply, error) {
	rep, s, err := v.first(ctx, path, r)
	if err == nil {
		s.release()
	}
	return rep, err
}

// errUndo is the cause when taking back takes too long.
var errUndo = errors.New("taking back took longer than 5 s")

// undoing gives a context for taking back what a call left, also when the call's own time is over.
func undoing(ctx context.Context) (context.Context, context.CancelFunc) {
	return context.WithTimeoutCause(context.WithoutCancel(ctx), undoLimit, errUndo)
}

// undo closes a handle after a call that failed, also when its time is over.
func (v *View) undo(ctx context.Context, s lease, handle uint32) {
	ctx, stop := undoing(ctx)
	defer stop()
	// When it cannot be told, the helper is gone, and with it what it had begun.
	_, _, _ = s.roundTrip(ctx, request{op: opClose, handle: handle})
}

// explain gives an error of the line its kind.
func (v *View) explain(ctx context.Context, path string, r request, sent bool, err error) error {
	changed := sent && r.changes()
	if e, ok := errors.AsType[*errdefs.Error](err); ok {
		return fmt.Errorf("%s: %w", path, e)
	}
	if ctx.Err() != nil {
		return ended(ctx, path, changed)
	}
	if changed {
		return errdefs.New(errdefs.Unknown, path, "%v; it may have happened", err).
			WithHint("Look at the path before you repeat it").Wrap(err)
	}
	return errdefs.New(errdefs.Unavailable, path, "%v", err).WithHint(hintRetry).Wrap(err)
}
