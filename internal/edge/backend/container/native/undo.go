package native

import (
	"context"
	"errors"
	"slices"
	"time"
)

const (
	// undoLimit bounds the taking back of a start that went wrong.
	undoLimit = 20 * time.Second
	// startLimit bounds a start: a sandbox that is not ready by then never will be.
	startLimit = 30 * time.Second
	// keeperLimit is how long a start waits for the successor of a keeper that died.
	keeperLimit = 5 * time.Second
	// killLimit bounds the wait for processes that were killed.
	killLimit = 10 * time.Second
	// statusLimit is how long the exit status of a dead PID 1 is waited for: its parent may be gone and pid 1 of the
	// machine slow to reap.
	statusLimit = 3 * time.Second
)

var errUndo = errors.New("the taking back of a start ran out of time")

// undo is what takes back the steps done so far, run last in, first out.
type undo []func(context.Context) error

func (u *undo) push(f func(context.Context) error) { *u = append(*u, f) }

// run takes everything back, whatever became of the caller. Each step runs even if one before went wrong.
func (u undo) run(ctx context.Context) error {
	ctx, stop := context.WithTimeoutCause(context.WithoutCancel(ctx), undoLimit, errUndo)
	defer stop()
	var errs []error
	for _, f := range slices.Backward(u) {
		errs = append(errs, f(ctx))
	}
	return errors.Join(errs...)
}
