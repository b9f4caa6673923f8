// Package wait lets a test wait for a condition with a limit, instead of sleeping and hoping.
package wait

import (
	"testing"
	"time"
)

// Until returns when cond holds and fails the test when it does not within limit. It asks often at first and every
// 20 ms later, so that quick conditions cost nothing.
func Until(t testing.TB, limit time.Duration, cond func() bool, what ...string) {
	t.Helper()
	if For(limit, cond) {
		return
	}
	msg := "condition"
	if len(what) > 0 {
		msg = what[0]
	}
	t.Fatalf("%s: not within %s", msg, limit)
}

// For reports whether cond holds before limit is over.
func For(limit time.Duration, cond func() bool) bool {
	end := time.Now().Add(limit)
	pause := 200 * time.Microsecond
	for !cond() {
		if time.Now().After(end) {
			return cond()
		}
		timer := time.NewTimer(pause)
		<-timer.C
		pause = min(2*pause, 20*time.Millisecond)
	}
	return true
}
