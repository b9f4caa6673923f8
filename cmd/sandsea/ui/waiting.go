package ui

import (
	"sync"
	"time"
)

// Waiting says what the program waits for and for how long at most, once that takes more than a second; again after ten
// seconds and then every thirty. The caller calls done when the wait is over. A limit of 0 is not named.
func (s *IO) Waiting(what string, limit time.Duration) (done func()) {
	stop := make(chan struct{})
	var wg sync.WaitGroup
	wg.Go(func() {
		at := ""
		if limit > 0 {
			at = ", limit " + Span(limit)
		}
		began, next := time.Now(), time.Second
		for pause(stop, next) {
			s.Note("sandsea: waiting for %s%s%s", what, so(time.Since(began)), at)
			if next == time.Second {
				next = 9 * time.Second
			} else {
				next = 30 * time.Second
			}
		}
	})
	return func() {
		close(stop)
		wg.Wait()
	}
}

// so is how long a wait has taken, left out at first.
func so(d time.Duration) string {
	if d < 2*time.Second {
		return ""
	}
	return ", " + Span(d.Truncate(time.Second)) + " so far"
}

func pause(stop <-chan struct{}, d time.Duration) bool {
	select {
	case <-stop:
		return false
	case <-time.After(d):
		return true
	}
}
