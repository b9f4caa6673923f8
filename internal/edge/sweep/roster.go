package sweep

import (
	"context"
	"fmt"
	"maps"
	"os"
	"slices"
	"sync"

	"github.com/sandsea/sandsea/internal/keeper"
	"github.com/sandsea/sandsea/internal/sandbox"
)

// Roster is what the keeper held when this edge started. Descriptors that nobody took are closed by Close.
type Roster struct {
	mu    sync.Mutex
	boxes map[sandbox.ID]*keeper.Held  // guarded by mu: not taken yet
	execs map[sandbox.ID][]keeper.Held // guarded by mu: not taken yet
	known map[sandbox.ID]bool          // all that are held
	fired map[sandbox.ID]bool
}

// Ask takes the keeper's roster.
func Ask(ctx context.Context, k keeper.Client) (*Roster, error) {
	held, err := k.Roster(ctx)
	if err != nil {
		return nil, fmt.Errorf("ask the keeper what it holds: %w", err)
	}
	r := &Roster{
		boxes: map[sandbox.ID]*keeper.Held{}, execs: map[sandbox.ID][]keeper.Held{}, known: map[sandbox.ID]bool{},
		fired: map[sandbox.ID]bool{},
	}
	for _, h := range held {
		switch {
		case h.Sandbox != nil:
			id := sandbox.ID(h.Sandbox.ID)
			r.boxes[id] = &h
			r.known[id] = true
			r.fired[id] = h.Fired
		case h.Exec != nil:
			id := sandbox.ID(h.Exec.Key.Sandbox)
			r.execs[id] = append(r.execs[id], h)
		}
	}
	return r, nil
}

// Sandbox gives a sandbox's control socket and pidfd, which become the caller's. Once; ok is false when it is not held.
func (r *Roster) Sandbox(id sandbox.ID) (control, pidfd *os.File, ok bool) {
	r.mu.Lock()
	defer r.mu.Unlock()
	h := r.boxes[id]
	if h == nil || h.Sandbox.Control == nil || h.Sandbox.Pidfd == nil {
		return nil, nil, false
	}
	delete(r.boxes, id)
	closeAll(h.Sandbox.Kill)
	return h.Sandbox.Control, h.Sandbox.Pidfd, true
}

// Execs implements runner.Held.
func (r *Roster) Execs(id sandbox.ID) []keeper.Held {
	r.mu.Lock()
	defer r.mu.Unlock()
	out := r.execs[id]
	delete(r.execs, id)
	return out
}

// Fired implements runner.Held.
func (r *Roster) Fired(id sandbox.ID) bool { return r.fired[id] }

// Knows implements runner.Held.
func (r *Roster) Knows(id sandbox.ID) bool { return r.known[id] }

// IDs lists every sandbox that is held.
func (r *Roster) IDs() []sandbox.ID { return slices.Sorted(maps.Keys(r.known)) }

// Close closes what nobody took. Idempotent.
func (r *Roster) Close() {
	r.mu.Lock()
	defer r.mu.Unlock()
	for id, h := range r.boxes {
		closeAll(h.Sandbox.Control, h.Sandbox.Pidfd, h.Sandbox.Kill)
		delete(r.boxes, id)
	}
	for id, list := range r.execs {
		for _, h := range list {
			closeAll(h.Exec.Stdin, h.Exec.Kill)
			for _, s := range h.Exec.Streams {
				closeAll(s.Pipe, s.File)
			}
		}
		delete(r.execs, id)
	}
}

func closeAll(files ...*os.File) {
	for _, f := range files {
		if f != nil {
			_ = f.Close()
		}
	}
}
