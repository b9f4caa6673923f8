package runner

import "github.com/sandsea/sandsea/internal/sandbox"

// Waiting is how many callers wait for a create.
func (r *Runner) Waiting(id sandbox.ID) int {
	b, err := r.find(id)
	if err != nil {
		return 0
	}
	b.mu.Lock()
	defer b.mu.Unlock()
	return b.waiting
}

// Stored reports whether the journal says that the store knows an end.
func (r *Runner) Stored(id sandbox.ID) bool {
	b, err := r.find(id)
	if err != nil {
		return false
	}
	b.mu.Lock()
	defer b.mu.Unlock()
	return b.rec.Stored
}
