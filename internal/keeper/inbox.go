package keeper

import (
	"sync"

	"github.com/sandsea/sandsea/internal/linux/eventfd"
)

// inbox is what other goroutines tell an event loop, which wakes by a descriptor that it polls. The loop owns the
// descriptor; tell may be called by anybody.
type inbox struct {
	wake *eventfd.Event

	mu   sync.Mutex
	todo []func() // guarded by mu
}

// tell has the loop run fn, after what was told before.
func (i *inbox) tell(fn func()) {
	i.mu.Lock()
	first := len(i.todo) == 0
	i.todo = append(i.todo, fn)
	i.mu.Unlock()
	if first {
		_ = i.wake.Set()
	}
}

// obey runs what was told, in the loop.
func (i *inbox) obey() {
	_ = i.wake.Clear()
	i.mu.Lock()
	todo := i.todo
	i.todo = nil
	i.mu.Unlock()
	for _, fn := range todo {
		fn()
	}
}
