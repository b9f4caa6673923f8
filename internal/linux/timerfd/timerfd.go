// Package timerfd makes a point in time readable by an event loop, so that an idle loop costs nothing.
package timerfd

import (
	"errors"
	"fmt"
	"os"
	"time"

	"golang.org/x/sys/unix"
)

// Timer is one timer. It is used by one goroutine.
type Timer struct {
	fd       int
	realtime bool
}

// NewMonotonic makes a timer on the monotonic clock: it does not follow changes of the wall clock, and it does not
// count the time that the machine sleeps.
func NewMonotonic() (*Timer, error) { return create(unix.CLOCK_MONOTONIC) }

// NewWall makes a timer on the wall clock. It is readable also when the clock was set, so that its owner looks again.
func NewWall() (*Timer, error) { return create(unix.CLOCK_REALTIME) }

func create(clock int) (*Timer, error) {
	fd, err := unix.TimerfdCreate(clock, unix.TFD_CLOEXEC|unix.TFD_NONBLOCK)
	if err != nil {
		return nil, os.NewSyscallError("timerfd_create", err)
	}
	return &Timer{fd: fd, realtime: clock == unix.CLOCK_REALTIME}, nil
}

// FD is the descriptor to wait for.
func (t *Timer) FD() int { return t.fd }

// After arms a monotonic timer; a time that has passed is due at once.
func (t *Timer) After(d time.Duration) error {
	return t.set(0, max(d, 1))
}

// At arms a wall timer.
func (t *Timer) At(at time.Time) error {
	flags := unix.TFD_TIMER_ABSTIME
	if t.realtime {
		flags |= unix.TFD_TIMER_CANCEL_ON_SET
	}
	return t.set(flags, max(time.Duration(at.UnixNano()), 1))
}

func (t *Timer) set(flags int, d time.Duration) error {
	spec := unix.ItimerSpec{Value: unix.NsecToTimespec(int64(d))}
	if err := unix.TimerfdSettime(t.fd, flags, &spec, nil); err != nil {
		return fmt.Errorf("arm timer: %w", err)
	}
	return nil
}

// Clear makes the timer unreadable until it is due again.
func (t *Timer) Clear() error {
	var b [8]byte
	_, err := unix.Read(t.fd, b[:])
	if err != nil && !errors.Is(err, unix.EAGAIN) && !errors.Is(err, unix.ECANCELED) && !errors.Is(err, unix.EINTR) {
		return fmt.Errorf("read timer: %w", err)
	}
	return nil
}

// Close gives the timer back.
func (t *Timer) Close() error { return unix.Close(t.fd) }
