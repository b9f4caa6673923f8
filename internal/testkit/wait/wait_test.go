package wait

import (
	"testing"
	"testing/synctest"
	"time"
)

func TestForWaits(t *testing.T) {
	t.Run("a condition that holds is seen at once", func(t *testing.T) {
		synctest.Test(t, func(t *testing.T) {
			start := time.Now()
			if !For(time.Minute, func() bool { return true }) || time.Since(start) != 0 {
				t.Error("waited for what was there")
			}
		})
	})
	t.Run("a condition that comes is waited for", func(t *testing.T) {
		synctest.Test(t, func(t *testing.T) {
			start := time.Now()
			if !For(time.Minute, func() bool { return time.Since(start) > time.Second }) {
				t.Error("gave up before the limit")
			}
		})
	})
	t.Run("a condition that never comes ends at the limit", func(t *testing.T) {
		synctest.Test(t, func(t *testing.T) {
			start := time.Now()
			if For(time.Second, func() bool { return false }) {
				t.Error("saw what never was")
			}
			if d := time.Since(start); d < time.Second || d > 1100*time.Millisecond {
				t.Errorf("gave up after %s, limit was 1s", d)
			}
		})
	})
}
