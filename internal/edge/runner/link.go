package runner

import (
	"context"
	"errors"
	"iter"
	"sync"
	"time"

	"github.com/sandsea/sandsea/api/errdefs"
	"github.com/sandsea/sandsea/internal/keeper"
	"github.com/sandsea/sandsea/internal/record"
)

// Link is a keeper.Client that outlives keepers: Set exchanges the one below. A call to one that died waits a little for
// the next one; without any, calls are Unavailable.
type Link struct {
	mu   sync.Mutex
	c    keeper.Client // guarded by mu
	from keeper.Client // guarded by mu: whose event was told last; Ack goes there
	news chan struct{} // guarded by mu: closed when c is exchanged or the Link is closed
	shut bool          // guarded by mu
}

var (
	_ keeper.Client = (*Link)(nil)
	_ keeper.Pinner = (*Link)(nil)
)

// NewLink makes one over c, which may be nil for now.
func NewLink(c keeper.Client) *Link { return &Link{c: c, news: make(chan struct{})} }

// Set exchanges the keeper below; the one before stays its owner's to close.
func (l *Link) Set(c keeper.Client) {
	l.mu.Lock()
	defer l.mu.Unlock()
	if l.shut {
		return
	}
	l.c = c
	close(l.news)
	l.news = make(chan struct{})
}

const (
	// successorLimit is how long a call waits for the keeper that follows one that died.
	successorLimit = 5 * time.Second
	// noticeLimit is how long after a call that failed the end of its connection may take to show.
	noticeLimit = time.Second
)

// do calls f with the keeper. A keeper that died has a successor within a moment, and a repeat is a no-op to it: the call
// waits and is made again.
func (l *Link) do(ctx context.Context, f func(keeper.Client) error) error {
	for {
		l.mu.Lock()
		c, news, shut := l.c, l.news, l.shut
		l.mu.Unlock()
		if c == nil || shut {
			return errdefs.New(errdefs.Unavailable, "keeper", "it is being started again")
		}
		err := f(c)
		if !errors.Is(err, errdefs.Unavailable) || !dead(ctx, c) {
			return err
		}
		timer := time.NewTimer(successorLimit)
		select {
		case <-news:
			timer.Stop()
		case <-timer.C:
			return err
		case <-ctx.Done():
			timer.Stop()
			return err
		}
	}
}

// dead reports whether the connection below has ended. A call that it broke under hears of that first.
func dead(ctx context.Context, c keeper.Client) bool {
	d, ok := c.(interface{ Done() <-chan struct{} })
	if !ok {
		return false
	}
	timer := time.NewTimer(noticeLimit)
	defer timer.Stop()
	select {
	case <-d.Done():
		return true
	case <-timer.C:
	case <-ctx.Done():
	}
	return false
}

// Hold implements keeper.Client, as all that follow.
func (l *Link) Hold(ctx context.Context, s keeper.Sandbox) error {
	return l.do(ctx, func(c keeper.Client) error { return c.Hold(ctx, s) })
}

func (l *Link) Record(ctx context.Context, e keeper.Exec) error {
	return l.do(ctx, func(c keeper.Client) error { return c.Record(ctx, e) })
}

func (l *Link) Rearm(ctx context.Context, k keeper.Key, hard time.Time, remaining time.Duration) error {
	return l.do(ctx, func(c keeper.Client) error { return c.Rearm(ctx, k, hard, remaining) })
}

func (l *Link) Suspend(ctx context.Context, sandbox string) error {
	return l.do(ctx, func(c keeper.Client) error { return c.Suspend(ctx, sandbox) })
}

func (l *Link) Continue(ctx context.Context, sandbox string) error {
	return l.do(ctx, func(c keeper.Client) error { return c.Continue(ctx, sandbox) })
}

func (l *Link) Retain(ctx context.Context, k keeper.Key, s record.Stream, from int64) error {
	return l.do(ctx, func(c keeper.Client) error { return c.Retain(ctx, k, s, from) })
}

// Pin implements keeper.Pinner; a keeper that cannot pin keeps nothing longer.
func (l *Link) Pin(ctx context.Context, k keeper.Key, s record.Stream, r record.Range) error {
	return l.do(ctx, func(c keeper.Client) error {
		p, ok := c.(keeper.Pinner)
		if !ok {
			return errors.ErrUnsupported
		}
		return p.Pin(ctx, k, s, r)
	})
}

func (l *Link) CloseInput(ctx context.Context, k keeper.Key) error {
	return l.do(ctx, func(c keeper.Client) error { return c.CloseInput(ctx, k) })
}

func (l *Link) Release(ctx context.Context, k keeper.Key) error {
	return l.do(ctx, func(c keeper.Client) error { return c.Release(ctx, k) })
}

func (l *Link) Roster(ctx context.Context) ([]keeper.Held, error) {
	var held []keeper.Held
	err := l.do(ctx, func(c keeper.Client) (err error) {
		held, err = c.Roster(ctx)
		return err
	})
	return held, err
}

// Events goes on with the next keeper when one ends; it ends with Close.
func (l *Link) Events() iter.Seq2[keeper.Event, error] {
	return func(yield func(keeper.Event, error) bool) {
		for {
			l.mu.Lock()
			c, news, shut := l.c, l.news, l.shut
			l.mu.Unlock()
			if shut {
				yield(keeper.Event{}, errdefs.New(errdefs.Unavailable, "keeper", "the edge is shutting down"))
				return
			}
			if c != nil {
				for e, err := range c.Events() {
					if err != nil {
						break
					}
					l.mu.Lock()
					l.from = c
					l.mu.Unlock()
					if !yield(e, nil) {
						return
					}
				}
			}
			<-news
		}
	}
}

// Ack goes to the keeper whose event was yielded last.
func (l *Link) Ack(seq uint64) error {
	l.mu.Lock()
	c := l.from
	l.mu.Unlock()
	if c == nil {
		return errdefs.New(errdefs.Unavailable, "keeper", "no event came")
	}
	return c.Ack(seq)
}

// Close ends the Link and the connection below. Idempotent.
func (l *Link) Close() error {
	l.mu.Lock()
	if l.shut {
		l.mu.Unlock()
		return nil
	}
	l.shut = true
	c := l.c
	close(l.news)
	l.mu.Unlock()
	if c == nil {
		return nil
	}
	return c.Close()
}
