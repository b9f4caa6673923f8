package runner

import (
	"sync"
	"time"
)

// yieldLimit is how long the end of a sandbox gives way to starts of sandboxes and commands, for which somebody waits to
// go on with his work. The work is the same in any order, but done at once on few processors each waits for all: at 4
// callers on two processors the time to a first output fell by a third, and the rate rose.
const yieldLimit = 10 * time.Millisecond

// traffic counts the starts that are under way.
type traffic struct {
	mu   sync.Mutex
	n    int           // guarded by mu
	none chan struct{} // guarded by mu: closed when n falls to 0; nil: nobody waits
}

// begin counts one until the function that it gives is called.
func (t *traffic) begin() (end func()) {
	t.mu.Lock()
	t.n++
	t.mu.Unlock()
	return func() {
		t.mu.Lock()
		defer t.mu.Unlock()
		if t.n--; t.n == 0 && t.none != nil {
			close(t.none)
			t.none = nil
		}
	}
}

// yield waits until nothing is under way, at most for limit.
func (t *traffic) yield(limit time.Duration) {
	t.mu.Lock()
	if t.n == 0 {
		t.mu.Unlock()
		return
	}
	if t.none == nil {
		t.none = make(chan struct{})
	}
	none := t.none
	t.mu.Unlock()
	timer := time.NewTimer(limit)
	defer timer.Stop()
	select {
	case <-none:
	case <-timer.C:
	}
}
