// Package epoll waits for many descriptors at once in an event loop of the caller's.
//
// It is for loops that must do what the runtime's poller does not: splice, thousands of idle descriptors without a
// goroutine each. One goroutine calls Wait; Add, Mod and Del may come from any.
package epoll

import (
	"errors"
	"fmt"
	"os"

	"golang.org/x/sys/unix"
)

// What can be waited for. Hup is always reported.
const (
	In  = uint32(unix.EPOLLIN)
	Out = uint32(unix.EPOLLOUT)
	Hup = uint32(unix.EPOLLHUP)
)

// Event is one ready descriptor, named by the token that it was added with.
type Event struct {
	Token uint64
	Ready uint32
}

// Poll is an epoll instance.
type Poll struct {
	fd  int
	raw []unix.EpollEvent // Wait's own
	out []Event           // Wait's own
}

// New makes an instance that reports at most batch events at once.
func New(batch int) (*Poll, error) {
	fd, err := unix.EpollCreate1(unix.EPOLL_CLOEXEC)
	if err != nil {
		return nil, os.NewSyscallError("epoll_create1", err)
	}
	return &Poll{fd: fd, raw: make([]unix.EpollEvent, batch), out: make([]Event, 0, batch)}, nil
}

// Add begins to wait for what, level-triggered. Remove a descriptor before it is closed: another holder of the same
// open file keeps it in the set.
func (p *Poll) Add(fd int, what uint32, token uint64) error {
	return p.ctl(unix.EPOLL_CTL_ADD, fd, what, token)
}

// Mod changes what is waited for.
func (p *Poll) Mod(fd int, what uint32, token uint64) error {
	return p.ctl(unix.EPOLL_CTL_MOD, fd, what, token)
}

// Del ends the waiting; it is no error if there was none.
func (p *Poll) Del(fd int) error {
	err := unix.EpollCtl(p.fd, unix.EPOLL_CTL_DEL, fd, nil)
	if err != nil && !errors.Is(err, unix.ENOENT) {
		return fmt.Errorf("epoll delete: %w", err)
	}
	return nil
}

func (p *Poll) ctl(op, fd int, what uint32, token uint64) error {
	ev := unix.EpollEvent{Events: what, Fd: int32(uint32(token)), Pad: int32(uint32(token >> 32))}
	if err := unix.EpollCtl(p.fd, op, fd, &ev); err != nil {
		return fmt.Errorf("epoll add: %w", err)
	}
	return nil
}

// Wait waits for events, at most ms milliseconds, for ever if ms is negative. The events are valid until the next
// Wait. An interrupted wait is an empty one.
func (p *Poll) Wait(ms int) ([]Event, error) {
	n, err := unix.EpollWait(p.fd, p.raw, ms)
	if err != nil && !errors.Is(err, unix.EINTR) {
		return nil, os.NewSyscallError("epoll_wait", err)
	}
	p.out = p.out[:0]
	for i := range max(n, 0) {
		e := &p.raw[i]
		p.out = append(p.out, Event{Token: uint64(uint32(e.Fd)) | uint64(uint32(e.Pad))<<32, Ready: e.Events})
	}
	return p.out, nil
}

// Close gives the instance back; no Wait may be going on.
func (p *Poll) Close() error { return unix.Close(p.fd) }
