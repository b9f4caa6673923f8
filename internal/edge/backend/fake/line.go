package fake

import (
	"context"
	"errors"
	"iter"
	"os"
	"sync"
	"syscall"

	"github.com/sandsea/sandsea/api/errdefs"
	"github.com/sandsea/sandsea/internal/chronus"
	"github.com/sandsea/sandsea/internal/linux/tty"
)

// line is one edge's connection to a sandbox's inside.
type line struct {
	b      *box
	mu     sync.Mutex
	why    error         // guarded by mu: why it broke
	broken chan struct{} // closed with why set
	news   chan struct{} // capacity 1: exits may have come
	sent   map[int64]bool
}

var _ chronus.Channel = (*line)(nil)

func newLine(b *box) *line {
	l := &line{b: b, broken: make(chan struct{}), news: make(chan struct{}, 1), sent: map[int64]bool{}}
	b.mu.Lock()
	old := b.line
	b.line = l
	dead := b.dead
	b.mu.Unlock()
	if old != nil {
		old.breakOff(errors.New("another edge took the line over"))
	}
	if dead {
		l.breakOff(errors.New("end of file"))
	}
	l.wake()
	return l
}

func (l *line) breakOff(why error) {
	l.mu.Lock()
	defer l.mu.Unlock()
	if l.why == nil {
		l.why = why
		close(l.broken)
	}
}

func (l *line) err() error {
	l.mu.Lock()
	defer l.mu.Unlock()
	if l.why == nil {
		return nil
	}
	return errdefs.New(errdefs.Unavailable, "sandbox "+l.b.id.Short(), "the line to its inside is closed").Wrap(l.why)
}

func (l *line) wake() {
	select {
	case l.news <- struct{}{}:
	default:
	}
}

func (l *line) Hello(context.Context) (chronus.InForce, []chronus.Process, error) {
	if err := l.err(); err != nil {
		return chronus.InForce{}, nil, err
	}
	b := l.b
	b.mu.Lock()
	defer b.mu.Unlock()
	var out []chronus.Process
	for _, p := range b.begun {
		out = append(out, p)
	}
	for _, n := range b.order {
		out = append(out, chronus.Process{Number: n, Exited: true, Exit: b.exits[n]})
	}
	return chronus.InForce{
		Version: 1, Seccomp: true, UserNS: true, NoNewPrivs: b.plan.NoNewPrivs, OpenFiles: b.limits.OpenFiles,
		Terminals: true,
	}, out, nil
}

func (l *line) Spawn(ctx context.Context, s chronus.Spawn, io chronus.Stdio) (int, error) {
	if err := errors.Join(l.err(), ctx.Err()); err != nil {
		return 0, err
	}
	b := l.b
	b.mu.Lock()
	if p, ok := b.begun[s.Number]; ok {
		b.mu.Unlock()
		return p.Pid, nil
	}
	if _, ok := b.exits[s.Number]; ok {
		b.mu.Unlock()
		return 0, nil
	}
	if err := b.failed[s.Number]; err != nil {
		b.mu.Unlock()
		return 0, err
	}
	b.mu.Unlock()
	run, err := b.lookup(s)
	if err != nil {
		b.mu.Lock()
		b.failed[s.Number] = err
		b.mu.Unlock()
		return 0, err
	}
	files, err := openStdio(io)
	if err != nil {
		return 0, &chronus.StartError{Step: chronus.StepStdio, Errno: syscall.EBADF}
	}
	if err := b.startTask(s, true, run, files); err != nil {
		return 0, errdefs.New(errdefs.Unavailable, "sandbox "+b.id.Short(), "the line broke").Wrap(err)
	}
	b.mu.Lock()
	defer b.mu.Unlock()
	b.spawns[s.Number]++
	return b.pid + 100, nil
}

// OpenPTY makes a terminal of the machine's own, which is a real one.
func (l *line) OpenPTY(ctx context.Context) (*os.File, error) {
	if err := errors.Join(l.err(), ctx.Err()); err != nil {
		return nil, err
	}
	if err := l.b.w.step("terminal", l.b.id); err != nil {
		return nil, err
	}
	return tty.Open()
}

// ServeFiles is not there: a fake sandbox has no files.
func (l *line) ServeFiles(context.Context, chronus.IDs) (*os.File, error) {
	return nil, errdefs.New(errdefs.FailedPrecondition, "sandbox "+l.b.id.Short(), "a fake sandbox has no files")
}

func (l *line) Signal(_ context.Context, number int64, sig syscall.Signal) error {
	if err := l.err(); err != nil {
		return err
	}
	for _, t := range l.b.groupTasks(number) {
		if t.main {
			t.signal(sig)
			return nil
		}
	}
	return errdefs.New(errdefs.NotFound, "process", "%d has ended", number)
}

func (l *line) Exits() iter.Seq2[chronus.Exit, error] {
	return func(yield func(chronus.Exit, error) bool) {
		for {
			for {
				e, ok := l.nextExit()
				if !ok {
					break
				}
				if !yield(e, nil) {
					return
				}
			}
			select {
			case <-l.news:
			case <-l.broken:
				for e, ok := l.nextExit(); ok; e, ok = l.nextExit() {
					if !yield(e, nil) {
						return
					}
				}
				yield(chronus.Exit{}, l.err())
				return
			}
		}
	}
}

func (l *line) nextExit() (chronus.Exit, bool) {
	l.b.mu.Lock()
	defer l.b.mu.Unlock()
	for _, n := range l.b.order {
		if !l.sent[n] {
			l.sent[n] = true
			return l.b.exits[n], true
		}
	}
	return chronus.Exit{}, false
}

func (l *line) Ack(number int64) error {
	if err := l.err(); err != nil {
		return err
	}
	b := l.b
	b.mu.Lock()
	defer b.mu.Unlock()
	if _, ok := b.exits[number]; ok {
		delete(b.exits, number)
		for i, n := range b.order {
			if n == number {
				b.order = append(b.order[:i:i], b.order[i+1:]...)
				break
			}
		}
	}
	return nil
}

func (l *line) Close() error {
	l.breakOff(os.ErrClosed)
	return nil
}
