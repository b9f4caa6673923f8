package runner

import (
	"testing"
	"testing/synctest"
	"time"
)

func TestTheIdleClock(t *testing.T) {
	const limit = 10 * time.Minute
	hour := func() { time.Sleep(time.Hour) }
	for name, c := range map[string]struct {
		limit time.Duration
		story func(*idleClock)
		want  time.Duration // after its begin; 0: never
	}{
		"comes after the limit":               {limit, func(c *idleClock) { c.start() }, limit},
		"never comes without a limit":         {0, func(c *idleClock) { c.start() }, 0},
		"does not run before the start":       {limit, func(*idleClock) {}, 0},
		"never comes once halted":             {limit, func(c *idleClock) { c.start(); c.halt(); c.use(1); c.use(-1) }, 0},
		"stands still during a call":          {limit, func(c *idleClock) { c.start(); c.use(1); hour() }, 0},
		"begins anew after a call":            {limit, func(c *idleClock) { c.start(); c.use(1); hour(); c.use(-1) }, time.Hour + limit},
		"waits for the last of several calls": {limit, func(c *idleClock) { c.start(); c.use(2); c.use(-1); hour(); c.use(-1) }, time.Hour + limit},
		"stands still while a command runs":   {limit, func(c *idleClock) { c.start(); c.commands(1); hour() }, 0},
		"waits for a command that outlives call": {limit, func(c *idleClock) {
			c.start()
			c.use(1)
			c.commands(1)
			c.use(-1)
			hour()
			c.commands(0)
		}, time.Hour + limit},
		"a call just before the end counts": {limit, func(c *idleClock) { c.start(); time.Sleep(limit - 1); c.use(1); c.use(-1) }, 2*limit - 1},
		"a call before the start counts":    {limit, func(c *idleClock) { c.use(1); c.start(); hour(); c.use(-1) }, time.Hour + limit},
	} {
		t.Run(name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				begin := time.Now()
				var came []time.Duration
				clock := newIdleClock(c.limit, time.Now, func() { came = append(came, time.Since(begin)) })
				c.story(clock)
				time.Sleep(100 * time.Hour)
				synctest.Wait()
				switch {
				case c.want == 0 && len(came) > 0:
					t.Errorf("came after %v", came)
				case c.want > 0 && (len(came) != 1 || came[0] != c.want):
					t.Errorf("came after %v, want %s", came, c.want)
				}
				clock.halt()
			})
		})
	}
}

func TestIdleFor(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		c := newIdleClock(0, time.Now, nil)
		c.start()
		time.Sleep(3 * time.Minute)
		if d := c.idleFor(time.Now()); d != 3*time.Minute {
			t.Errorf("%s", d)
		}
		c.use(1)
		time.Sleep(time.Minute)
		if d := c.idleFor(time.Now()); d != 0 {
			t.Errorf("in use, and idle for %s", d)
		}
	})
}
