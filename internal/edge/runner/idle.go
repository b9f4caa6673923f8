package runner

import (
	"sync"
	"time"
)

// idleClock runs while a sandbox is not in use. It starts stopped, and once halted it never runs again.
type idleClock struct {
	limit   time.Duration // 0: it never comes
	now     func() time.Time
	expired func() // called once, from a goroutine of its own

	mu      sync.Mutex
	on      bool        // guarded by mu
	halted  bool        // guarded by mu
	uses    int         // guarded by mu: waking calls under way
	running int         // guarded by mu: commands that run
	last    time.Time   // guarded by mu: the end of the last use
	timer   *time.Timer // guarded by mu
}

func newIdleClock(limit time.Duration, now func() time.Time, expired func()) *idleClock {
	return &idleClock{limit: limit, now: now, expired: expired, last: now()}
}

// start lets it run from now on.
func (c *idleClock) start() {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.on = true
	c.windLocked()
}

// halt stops it for good.
func (c *idleClock) halt() {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.halted = true
	c.windLocked()
}

// use notes the begin or the end of waking calls.
func (c *idleClock) use(n int) {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.uses += n
	c.windLocked()
}

// commands notes how many commands run.
func (c *idleClock) commands(n int) {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.running = n
	c.windLocked()
}

// idleFor is how long there has been no use.
func (c *idleClock) idleFor(now time.Time) time.Duration {
	c.mu.Lock()
	defer c.mu.Unlock()
	if c.uses > 0 || c.running > 0 {
		return 0
	}
	return max(now.Sub(c.last), 0)
}

// windLocked begins to count anew, or stands still while something is under way.
func (c *idleClock) windLocked() {
	c.last = c.now()
	if c.timer != nil {
		c.timer.Stop()
		c.timer = nil
	}
	if c.limit <= 0 || !c.on || c.halted || c.uses > 0 || c.running > 0 {
		return
	}
	var timer *time.Timer
	timer = time.AfterFunc(c.limit, func() {
		c.mu.Lock()
		due := c.timer == timer // else there was use just now
		if due {
			c.timer, c.halted = nil, true
		}
		c.mu.Unlock()
		if due {
			c.expired()
		}
	})
	c.timer = timer
}
