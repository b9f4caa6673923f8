package watcher

import (
	"context"
	"crypto/rand"
	"encoding/hex"
	"iter"
	"strconv"
	"strings"
	"sync"

	"google.golang.org/protobuf/types/known/timestamppb"

	sandseav1 "github.com/sandsea/sandsea/api/sandsea/v1"
)

// Event is one transition of a sandbox, or a gap in the knowledge of them.
type Event struct {
	// Cursor resumes after this event.
	Cursor  string
	At      *timestamppb.Timestamp
	What    string
	Sandbox *sandseav1.Sandbox
	// Gap: events were lost; list again. The other fields but Cursor are empty.
	Gap bool
}

// ring keeps the last events. Readers hold a number, never a queue, so that a slow one costs nothing.
type ring struct {
	run string // names this run of the server in cursors

	mu    sync.Mutex
	slots []Event       // guarded by mu; event n is at n % len
	next  int64         // guarded by mu; number of the next event, from 1
	woken chan struct{} // guarded by mu; closed and replaced at every event
}

func newRing(size int) *ring {
	var b [6]byte
	_, _ = rand.Read(b[:])
	return &ring{run: hex.EncodeToString(b[:]), slots: make([]Event, size), next: 1, woken: make(chan struct{})}
}

func (r *ring) add(e Event) {
	r.mu.Lock()
	defer r.mu.Unlock()
	e.Cursor = r.cursor(r.next)
	r.slots[r.next%int64(len(r.slots))] = e
	r.next++
	close(r.woken)
	r.woken = make(chan struct{})
}

func (r *ring) cursor(n int64) string { return r.run + "-" + strconv.FormatInt(n, 10) }

// parse gives the number of a cursor of this run.
func (r *ring) parse(cursor string) (int64, bool) {
	run, num, ok := strings.Cut(cursor, "-")
	n, err := strconv.ParseInt(num, 10, 64)
	return n, ok && err == nil && run == r.run && n >= 0
}

func (r *ring) read(ctx context.Context, cursor string) iter.Seq2[Event, error] {
	r.mu.Lock()
	at, gap := r.next, false
	if cursor != "" {
		n, ok := r.parse(cursor)
		if ok && n < r.next {
			at = n + 1
		} else {
			gap = true
		}
	}
	r.mu.Unlock()
	return func(yield func(Event, error) bool) {
		batch := make([]Event, 0, 64)
		for {
			batch = batch[:0]
			r.mu.Lock()
			if oldest := max(1, r.next-int64(len(r.slots))); at < oldest {
				at, gap = oldest, true
			}
			if gap {
				batch = append(batch, Event{Cursor: r.cursor(at - 1), Gap: true})
				gap = false
			}
			for ; at < r.next && len(batch) < cap(batch); at++ {
				batch = append(batch, r.slots[at%int64(len(r.slots))])
			}
			woken := r.woken
			r.mu.Unlock()
			for _, e := range batch {
				if !yield(e, nil) {
					return
				}
			}
			if len(batch) > 0 {
				continue
			}
			select {
			case <-woken:
			case <-ctx.Done():
				yield(Event{}, context.Cause(ctx))
				return
			}
		}
	}
}
