package runner

import (
	"cmp"
	"context"
	"encoding/json"
	"slices"
	"time"

	"github.com/sandsea/sandsea/api/errdefs"
	"github.com/sandsea/sandsea/internal/edge/journal"
	"github.com/sandsea/sandsea/internal/sandbox"
)

const (
	commitMost  = 128
	commitLimit = 10 * time.Second
	// markPause is how long the journal may not know of ends that the store has: told again after a crash, they change
	// nothing, so that one write for many will do.
	markPause = time.Second
)

// enqueue hands an ended sandbox to the committer.
func (r *Runner) enqueue(b *box) {
	r.mu.Lock()
	defer r.mu.Unlock()
	r.backlog = append(r.backlog, b)
	select {
	case r.commits <- struct{}{}:
	default:
	}
}

// commitLoop tells the store of ends, all that gathered while the last transaction was in flight in one, at most
// commitMost. What the store does not take waits and is told again.
func (r *Runner) commitLoop() {
	var told []*box // the store has their ends, the journal does not know
	var due <-chan time.Time
	mark := func() {
		if err := r.markStored(told); err != nil {
			r.cfg.Log.Warn("remember that the store has ends", "ends", len(told), "err", err)
			return // after a restart they are told again
		}
		told, due = nil, nil
	}
	defer mark()
	for wait := retryFirst; ; {
		if len(told) >= commitMost {
			mark()
		}
		r.mu.Lock()
		batch := slices.Clone(r.backlog[:min(len(r.backlog), commitMost)])
		r.mu.Unlock()
		if len(batch) == 0 {
			select {
			case <-r.commits:
				continue
			case <-due:
				due = nil
				mark()
				if len(told) > 0 {
					due = time.After(markPause)
				}
				continue
			case <-r.ctx.Done():
				return
			}
		}
		err := r.commitBatch(batch)
		if err == nil {
			told = append(told, batch...)
			if due == nil {
				due = time.After(markPause)
			}
		}
		for _, b := range batch {
			b.tellStored()
		}
		if r.ctx.Err() != nil {
			return
		}
		if err != nil {
			r.cfg.Log.Warn("tell the store of ends, they wait in the journal", "ends", len(batch), "err", err)
			if !r.storeAway(wait) {
				return
			}
			wait = min(2*wait, retryLast)
			continue
		}
		wait = retryFirst
		r.mu.Lock()
		r.backlog = slices.Clone(r.backlog[len(batch):])
		r.mu.Unlock()
	}
}

// storeAway waits before the next attempt. Who waits to hear of an end meanwhile is told at once that it must wait in
// the journal.
func (r *Runner) storeAway(d time.Duration) bool {
	timer := time.NewTimer(d)
	defer timer.Stop()
	for {
		select {
		case <-timer.C:
			return true
		case <-r.commits:
			r.mu.Lock()
			waiting := slices.Clone(r.backlog)
			r.mu.Unlock()
			for _, b := range waiting {
				b.tellStored()
			}
		case <-r.ctx.Done():
			return false
		}
	}
}

func (r *Runner) commitBatch(batch []*box) error {
	ctx, stop := context.WithTimeoutCause(r.ctx, commitLimit, errdefs.Deadline)
	defer stop()
	ended := make([]Snapshot, 0, len(batch))
	for _, b := range batch {
		ended = append(ended, b.snapshot(r.cfg.Now()))
	}
	return r.cfg.Record(ctx, ended)
}

// markStored remembers that the store has these ends: only then may they be forgotten.
func (r *Runner) markStored(told []*box) error {
	if len(told) == 0 {
		return nil
	}
	recs := make([]journal.Record, 0, len(told))
	for _, b := range told {
		b.mu.Lock()
		rec := b.rec
		b.mu.Unlock()
		rec.Stored = true
		data, err := json.Marshal(rec)
		if err != nil {
			return err
		}
		recs = append(recs, journal.Record{Key: journal.Key{Kind: kindSandbox, Name: string(b.id)}, Data: data})
	}
	if err := r.cfg.Journal.PutAll(recs...); err != nil {
		return err
	}
	for _, b := range told {
		b.mu.Lock()
		b.rec.Stored = true
		b.mu.Unlock()
	}
	return nil
}

// janitor forgets what ended long ago, and the oldest ends beyond the bound. An end that the store does not know stays.
func (r *Runner) janitor() {
	tick := time.NewTicker(janitorEvery)
	defer tick.Stop()
	for {
		select {
		case <-tick.C:
			r.Tidy()
		case <-r.ctx.Done():
			return
		}
	}
}

// Tidy is one round of the janitor.
func (r *Runner) Tidy() {
	type old struct {
		b     *box
		ended time.Time
	}
	var ended []old
	for _, b := range r.list() {
		b.mu.Lock()
		if b.rec.State == sandbox.Ended && b.rec.Stored {
			ended = append(ended, old{b, b.rec.Ended})
		}
		b.mu.Unlock()
	}
	slices.SortFunc(ended, func(a, b old) int { return cmp.Compare(b.ended.UnixNano(), a.ended.UnixNano()) })
	now := r.cfg.Now()
	for i, o := range ended {
		if i < r.cfg.MaxEnded && now.Sub(o.ended) < r.cfg.KeepEnded {
			continue
		}
		if err := r.forget(o.b); err != nil {
			r.cfg.Log.Warn("forget an ended sandbox", "sandbox", o.b.id, "err", err)
		}
	}
}
