package timerfd

import (
	"errors"
	"testing"
	"time"

	"golang.org/x/sys/unix"
)

func readable(t *testing.T, fd, ms int) bool {
	t.Helper()
	n, err := unix.Poll([]unix.PollFd{{Fd: int32(fd), Events: unix.POLLIN}}, ms)
	for errors.Is(err, unix.EINTR) {
		n, err = unix.Poll([]unix.PollFd{{Fd: int32(fd), Events: unix.POLLIN}}, ms)
	}
	if err != nil {
		t.Fatal(err)
	}
	return n == 1
}

func TestATimerIsReadableWhenItIsDue(t *testing.T) {
	mono, err := NewMonotonic()
	if err != nil {
		t.Fatal(err)
	}
	defer mono.Close()
	wall, err := NewWall()
	if err != nil {
		t.Fatal(err)
	}
	defer wall.Close()
	for _, c := range []struct {
		name string
		t    *Timer
		arm  func(d time.Duration) error
	}{
		{"monotonic", mono, mono.After},
		{"wall", wall, func(d time.Duration) error { return wall.At(time.Now().Add(d)) }},
	} {
		if readable(t, c.t.FD(), 0) {
			t.Errorf("%s: readable before it was armed", c.name)
		}
		for _, d := range []time.Duration{-time.Second, 0, 5 * time.Millisecond} {
			if err := c.arm(d); err != nil {
				t.Fatal(err)
			}
			if !readable(t, c.t.FD(), 20000) {
				t.Errorf("%s: not readable after %v", c.name, d)
			}
			if err := c.t.Clear(); err != nil {
				t.Fatal(err)
			}
			if readable(t, c.t.FD(), 0) {
				t.Errorf("%s: readable after Clear", c.name)
			}
		}
	}
}
