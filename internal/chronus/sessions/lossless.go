package sessions

import (
	"context"
	"errors"
	"time"

	"github.com/sandsea/sandsea/api/errdefs"
	"github.com/sandsea/sandsea/internal/record"
)

const (
	// The keeper hears of a lossless reader's progress after so many bytes, or once so much time has gone by: well within
	// what it lets a writer wait.
	retainBytes = 4 << 20
	retainEvery = 5 * time.Second
	// losslessPatience is how long a reader that makes no progress keeps the record of a command that has ended; the
	// keeper lets a command that runs wait as long.
	losslessPatience = time.Minute
)

// lossless is a reader of one stream from whose offset on nothing may be dropped: the keeper lets the command wait for
// it, within bounds of its own, and the record of one that has ended is spared.
type lossless struct {
	t      *Table
	p      *proc
	stream record.Stream
	told   int64     // what the keeper knows
	at     time.Time // since when

	from  int64     // guarded by the proc's mu
	moved time.Time // guarded by the proc's mu: when it came there
}

// retain registers a reader that stands at from.
func (t *Table) retain(ctx context.Context, p *proc, s record.Stream, from int64) *lossless {
	l := &lossless{t: t, p: p, stream: s, told: from, at: time.Now(), from: from, moved: t.cfg.Now()}
	p.mu.Lock()
	if p.lossless == nil {
		p.lossless = map[*lossless]struct{}{}
	}
	p.lossless[l] = struct{}{}
	p.mu.Unlock()
	t.tellRetained(ctx, p, s)
	return l
}

// passed says that everything before to has been taken.
func (l *lossless) passed(ctx context.Context, to int64) {
	l.p.mu.Lock()
	if to > l.from {
		l.from, l.moved = to, l.t.cfg.Now()
	}
	l.p.mu.Unlock()
	if now := time.Now(); to-l.told >= retainBytes || now.Sub(l.at) >= retainEvery {
		l.told, l.at = to, now
		l.t.tellRetained(ctx, l.p, l.stream)
	}
}

// leave ends the reader. Nobody waits for it any more.
func (l *lossless) leave() {
	l.p.mu.Lock()
	delete(l.p.lossless, l)
	l.p.mu.Unlock()
	ctx, stop := context.WithTimeoutCause(context.Background(), undoTime, errdefs.Deadline)
	defer stop()
	l.t.tellRetained(ctx, l.p, l.stream)
}

// tellRetained tells the keeper where the last of a stream's lossless readers stands, or that there is none.
func (t *Table) tellRetained(ctx context.Context, p *proc, s record.Stream) {
	select {
	case p.telling <- struct{}{}: // one at a time, so that the last word is the newest
		defer func() { <-p.telling }()
	case <-ctx.Done():
		return
	}
	least := int64(-1)
	p.mu.Lock()
	for l := range p.lossless {
		if l.stream == s && (least < 0 || l.from < least) {
			least = l.from
		}
	}
	over := p.final
	p.mu.Unlock()
	if over {
		return // the keeper drops nothing any more
	}
	err := t.cfg.Keeper.Retain(ctx, p.keeperKey(), s, least)
	if err != nil && !errors.Is(err, errdefs.NotFound) {
		t.cfg.Log.Debug("keep output for a reader", "sandbox", t.cfg.ID, "process", p.number, "err", err)
	}
}

// retainAgain tells a new keeper of the lossless readers.
func (t *Table) retainAgain(ctx context.Context, p *proc) {
	p.mu.Lock()
	has := map[record.Stream]bool{}
	for l := range p.lossless {
		has[l.stream] = true
	}
	p.mu.Unlock()
	for s := range has {
		t.tellRetained(ctx, p, s)
	}
}

// retained are the lossless readers of one caller; none if it is not lossless.
type retained map[record.Stream]*lossless

// register makes the caller's lossless readers.
func (t *Table) register(ctx context.Context, p *proc, at From) retained {
	if !at.Lossless {
		return nil
	}
	r := retained{}
	for s, from := range at.offsets() {
		r[s] = t.retain(ctx, p, s, from)
	}
	return r
}

// passed says that the caller has taken a piece.
func (r retained) passed(ctx context.Context, e Event) {
	if l := r[e.Stream]; l != nil {
		l.passed(ctx, e.Offset+int64(len(e.Data))+e.Gap)
	}
}

func (r retained) leave() {
	for _, l := range r {
		l.leave()
	}
}

func (at From) offsets() map[record.Stream]int64 {
	return map[record.Stream]int64{record.Stdout: at.Stdout, record.Stderr: at.Stderr}
}
