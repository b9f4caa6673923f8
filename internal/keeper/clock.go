package keeper

import (
	"container/heap"
	"time"
)

// clock counts down active time. It owns no timer: due says when one should be set. The times given to it carry the
// monotonic reading.
type clock struct {
	armed bool
	left  time.Duration // as of since
	since time.Time     // zero while it stands still
}

// arm starts to count d anew; 0 disarms. It runs at once unless it is suspended.
func (c *clock) arm(d time.Duration, now time.Time, suspended bool) {
	*c = clock{armed: d > 0, left: d}
	if !suspended {
		c.since = now
	}
}

func (c *clock) suspend(now time.Time) {
	if !c.since.IsZero() {
		c.left = c.remaining(now)
		c.since = time.Time{}
	}
}

func (c *clock) resume(now time.Time) {
	if c.since.IsZero() {
		c.since = now
	}
}

// remaining is never negative.
func (c *clock) remaining(now time.Time) time.Duration {
	if !c.armed {
		return 0
	}
	if c.since.IsZero() {
		return c.left
	}
	return max(c.left-now.Sub(c.since), 0)
}

// due is when it comes to zero; ok is false while it does not run.
func (c *clock) due() (at time.Time, ok bool) {
	if !c.armed || c.since.IsZero() {
		return time.Time{}, false
	}
	return c.since.Add(c.left), true
}

// deadline is an entry of deadlines, about a key or a stream; index is -1 while it is in none.
type deadline struct {
	at     time.Time
	key    Key
	stream *stream
	index  int
}

// deadlines is a heap, the nearest first, for container/heap.
type deadlines []*deadline

func (d deadlines) Len() int           { return len(d) }
func (d deadlines) Less(i, j int) bool { return d[i].at.Before(d[j].at) }

func (d deadlines) Swap(i, j int) {
	d[i], d[j] = d[j], d[i]
	d[i].index, d[j].index = i, j
}

// Push is for container/heap.
func (d *deadlines) Push(x any) {
	e := x.(*deadline)
	e.index = len(*d)
	*d = append(*d, e)
}

// Pop is for container/heap.
func (d *deadlines) Pop() any {
	old := *d
	e := old[len(old)-1]
	e.index = -1
	old[len(old)-1] = nil
	*d = old[:len(old)-1]
	return e
}

// set puts e in at its time, or moves it.
func (d *deadlines) set(e *deadline, at time.Time) {
	e.at = at
	if e.index < 0 {
		heap.Push(d, e)
	} else {
		heap.Fix(d, e.index)
	}
}

// remove takes e out, if it is in.
func (d *deadlines) remove(e *deadline) {
	if e.index >= 0 {
		heap.Remove(d, e.index)
	}
}

// next is the nearest one that is due, nil if none is.
func (d deadlines) next(now time.Time) *deadline {
	if len(d) == 0 || d[0].at.After(now) {
		return nil
	}
	return d[0]
}
