package main

import (
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"os/signal"
	"syscall"
	"time"
)

// errInterrupted is the cause of a context that Ctrl-C or SIGTERM ended.
var errInterrupted = errors.New("interrupted")

// interrupted gives a context that the first SIGINT or SIGTERM cancels, unless onInterrupt takes it; a second one within
// two seconds ends the program.
func (a *app) interrupted() (context.Context, func()) {
	ctx, cancel := context.WithCancelCause(context.Background())
	ch := make(chan os.Signal, 2)
	signal.Notify(ch, os.Interrupt, syscall.SIGTERM)
	go func() {
		var last time.Time
		for sig := range ch {
			if time.Since(last) < 2*time.Second {
				a.leave()
			}
			last = time.Now()
			if take := a.onInterrupt.Load(); take == nil || !(*take)(sig) {
				cancel(errInterrupted)
			}
		}
	}()
	return ctx, func() {
		signal.Stop(ch)
		close(ch)
		cancel(nil)
	}
}

// leave ends the program at once and says what is left.
func (a *app) leave() {
	if restore := a.atExit.Load(); restore != nil {
		(*restore)()
	}
	if left := a.left.Load(); left != nil {
		fmt.Fprintln(a.io.Err, "sandsea: "+*left)
	}
	os.Exit(130)
}

// leaves sets what leave says; the returned function takes it back.
func (a *app) leaves(format string, args ...any) (done func()) {
	text := fmt.Sprintf(format, args...)
	a.left.Store(&text)
	return func() { a.left.Store(nil) }
}

// pause waits, or gives the reason why ctx ended.
func pause(ctx context.Context, d time.Duration) error {
	select {
	case <-ctx.Done():
		return context.Cause(ctx)
	case <-time.After(d):
		return nil
	}
}

// input is standard input that gives up waiting when ctx ends.
func (a *app) input(ctx context.Context) io.Reader {
	return &interruptible{ctx: ctx, r: a.io.In, space: make([]byte, 256<<10)}
}

// interruptible reads in a goroutine, which it leaves behind when ctx ends first; nothing is read after that.
type interruptible struct {
	ctx   context.Context // a Reader has no other way to learn of its end
	r     io.Reader
	space []byte // for one read at a time
	buf   []byte // read and not yet taken
	err   error
}

func (i *interruptible) Read(b []byte) (int, error) {
	if len(i.buf) == 0 && i.err == nil {
		i.fill()
	}
	n := copy(b, i.buf)
	i.buf = i.buf[n:]
	if n == 0 {
		return 0, i.err
	}
	return n, nil
}

func (i *interruptible) fill() {
	type piece struct {
		n   int
		err error
	}
	got := make(chan piece, 1)
	go func() {
		n, err := i.r.Read(i.space)
		got <- piece{n, err}
	}()
	select {
	case p := <-got:
		i.buf, i.err = i.space[:p.n], p.err
	case <-i.ctx.Done():
		i.err = context.Cause(i.ctx)
	}
}
