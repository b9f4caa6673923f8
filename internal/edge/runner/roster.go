package runner

import (
	"slices"
	"sync"
	"time"

	"github.com/sandsea/sandsea/api/errdefs"
	"github.com/sandsea/sandsea/internal/sandbox"
)

// ringSize is how many transitions a follower may be behind.
const ringSize = 8192

// The words of Transition.What beside the states.
const (
	WhatExtended = "ttl_extended"
	WhatNetwork  = "network_changed"
)

// Transition is one change of one sandbox.
type Transition struct {
	Seq     int64 // of the node, gapless within its incarnation
	At      time.Time
	What    string
	Sandbox Snapshot
}

// feed keeps the last transitions for followers.
type feed struct {
	mu   sync.Mutex
	seq  int64         // guarded by mu
	ring []Transition  // guarded by mu: the last ringSize, by seq modulo its size
	news chan struct{} // guarded by mu: closed at the next transition
}

func newFeed() *feed { return &feed{ring: make([]Transition, ringSize), news: make(chan struct{})} }

func (f *feed) publish(at time.Time, what string, s Snapshot) {
	f.mu.Lock()
	defer f.mu.Unlock()
	f.seq++
	f.ring[f.seq%ringSize] = Transition{Seq: f.seq, At: at, What: what, Sandbox: s}
	close(f.news)
	f.news = make(chan struct{})
}

// after gives at most 256 transitions behind seq, and a channel that is closed when there are more. The kind Invalid
// says that they are gone, or never were.
func (f *feed) after(seq int64) ([]Transition, <-chan struct{}, error) {
	f.mu.Lock()
	defer f.mu.Unlock()
	if seq > f.seq || seq < f.seq-ringSize+1 || seq < 0 {
		return nil, nil, errdefs.New(errdefs.Invalid, "node", "what came after %d is not kept, the last is %d", seq, f.seq).
			WithHint("Take the roster")
	}
	var out []Transition
	for n := seq + 1; n <= f.seq && len(out) < 256; n++ {
		out = append(out, f.ring[n%ringSize])
	}
	return out, f.news, nil
}

// Roster gives every sandbox that the node knows, and the number of the last transition that is in it.
func (r *Runner) Roster() (all []Snapshot, seq int64) {
	// The number first: a transition that comes between is in the snapshot and is told again, never missed.
	r.feed.mu.Lock()
	seq = r.feed.seq
	r.feed.mu.Unlock()
	for _, b := range r.list() {
		all = append(all, b.snapshot(r.cfg.Now()))
	}
	slices.SortFunc(all, func(a, b Snapshot) int {
		switch {
		case a.ID < b.ID:
			return -1
		case a.ID > b.ID:
			return 1
		}
		return 0
	})
	return all, seq
}

// After gives transitions behind seq, and a channel that is closed when there may be more.
func (r *Runner) After(seq int64) ([]Transition, <-chan struct{}, error) { return r.feed.after(seq) }

// Incarnation changes with every start of the edge; transitions of different ones have nothing to do with each other.
func (r *Runner) Incarnation() string { return r.incarnation }

// what is the word for a state in a Transition.
func what(s sandbox.State) string { return string(s) }
