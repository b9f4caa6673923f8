// Package eventfd wakes an event loop from another goroutine.
package eventfd

import (
	"errors"
	"fmt"
	"os"

	"golang.org/x/sys/unix"
)

// Event is readable between Set and Clear. Any goroutine may call Set.
type Event struct{ fd int }

// New makes an Event that is not set.
func New() (*Event, error) {
	fd, err := unix.Eventfd(0, unix.EFD_CLOEXEC|unix.EFD_NONBLOCK)
	if err != nil {
		return nil, os.NewSyscallError("eventfd", err)
	}
	return &Event{fd: fd}, nil
}

// FD is the descriptor to wait for.
func (e *Event) FD() int { return e.fd }

// Set makes it readable.
func (e *Event) Set() error {
	one := [8]byte{1}
	_, err := unix.Write(e.fd, one[:])
	if err != nil && !errors.Is(err, unix.EAGAIN) {
		return fmt.Errorf("set event: %w", err)
	}
	return nil
}

// Clear makes it unreadable.
func (e *Event) Clear() error {
	var b [8]byte
	_, err := unix.Read(e.fd, b[:])
	if err != nil && !errors.Is(err, unix.EAGAIN) {
		return fmt.Errorf("clear event: %w", err)
	}
	return nil
}

// Close gives it back.
func (e *Event) Close() error { return unix.Close(e.fd) }
