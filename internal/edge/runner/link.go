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

// Link is a keeper.Client that outlives keepers: Set exchanges the one below. Without one, calls are Unavailable.
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

func (l *Link) client() (keeper.Client, error) {
	l.mu.Lock()
	defer l.mu.Unlock()
	if l.c == nil || l.shut {
		return nil, errdefs.New(errdefs.Unavailable, "keeper", "it is being started again")
	}
	return l.c, nil
}

// Hold implements keeper.Client, as all that follow.
func (l *Link) Hold(ctx context.Context, s keeper.Sandbox) error {
	c, err := l.client()
	if err != nil {
		return err
	}
	return c.Hold(ctx, s)
}

func (l *Link) Record(ctx context.Context, e keeper.Exec) error {
	c, err := l.client()
	if err != nil {
		return err
	}
	return c.Record(ctx, e)
}

func (l *Link) Rearm(ctx context.Context, k keeper.Key, hard time.Time, remaining time.Duration) error {
	c, err := l.client()
	if err != nil {
		return err
	}
	return c.Rearm(ctx, k, hard, remaining)
}

func (l *Link) Suspend(ctx context.Context, sandbox string) error {
	c, err := l.client()
	if err != nil {
		return err
	}
	return c.Suspend(ctx, sandbox)
}

func (l *Link) Continue(ctx context.Context, sandbox string) error {
	c, err := l.client()
	if err != nil {
		return err
	}
	return c.Continue(ctx, sandbox)
}

func (l *Link) Retain(ctx context.Context, k keeper.Key, s record.Stream, from int64) error {
	c, err := l.client()
	if err != nil {
		return err
	}
	return c.Retain(ctx, k, s, from)
}

// Pin implements keeper.Pinner; a keeper that cannot pin keeps nothing longer.
func (l *Link) Pin(ctx context.Context, k keeper.Key, s record.Stream, r record.Range) error {
	c, err := l.client()
	if err != nil {
		return err
	}
	p, ok := c.(keeper.Pinner)
	if !ok {
		return errors.ErrUnsupported
	}
	return p.Pin(ctx, k, s, r)
}

func (l *Link) CloseInput(ctx context.Context, k keeper.Key) error {
	c, err := l.client()
	if err != nil {
		return err
	}
	return c.CloseInput(ctx, k)
}

func (l *Link) Release(ctx context.Context, k keeper.Key) error {
	c, err := l.client()
	if err != nil {
		return err
	}
	return c.Release(ctx, k)
}

func (l *Link) Roster(ctx context.Context) ([]keeper.Held, error) {
	c, err := l.client()
	if err != nil {
		return nil, err
	}
	return c.Roster(ctx)
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
