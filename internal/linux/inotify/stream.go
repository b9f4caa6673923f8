package inotify

import (
	"bytes"
	"encoding/binary"
	"errors"
	"fmt"
	"os"
	"time"

	"golang.org/x/sys/unix"
)

// What an Event says happened, and about what.
const (
	Modify     = unix.IN_MODIFY
	CloseWrite = unix.IN_CLOSE_WRITE
	Attrib     = unix.IN_ATTRIB
	Create     = unix.IN_CREATE
	Delete     = unix.IN_DELETE
	MovedFrom  = unix.IN_MOVED_FROM
	MovedTo    = unix.IN_MOVED_TO
	DeleteSelf = unix.IN_DELETE_SELF
	MoveSelf   = unix.IN_MOVE_SELF
	Unmount    = unix.IN_UNMOUNT
	Overflow   = unix.IN_Q_OVERFLOW
	Ignored    = unix.IN_IGNORED
	IsDir      = unix.IN_ISDIR
)

// Event is one of the kernel's.
type Event struct {
	WD     int32
	Mask   uint32
	Cookie uint32 // pairs MovedFrom and MovedTo
	Name   string // in the watched directory; empty for the watched thing itself
	Size   int    // bytes that it took in the queue
}

// ErrNotInotify says that a descriptor is something else.
var ErrNotInotify = errors.New("not an inotify instance")

// Stream reads an instance that another process made and puts watches into. Not for use by several goroutines, but for
// Interrupt and Close.
type Stream struct {
	f   *os.File
	buf []byte
}

// Adopt makes a Stream of an instance and takes f over, also when it fails. What f is the kernel says, not who gave it.
func Adopt(f *os.File) (*Stream, error) {
	defer f.Close()
	rc, err := f.SyscallConn()
	if err != nil {
		return nil, fmt.Errorf("adopt: %w", err)
	}
	fd := -1
	var ferr error
	err = rc.Control(func(old uintptr) {
		if ferr = check(int(old)); ferr != nil {
			return
		}
		fd, ferr = unix.FcntlInt(old, unix.F_DUPFD_CLOEXEC, 3)
	})
	if err := errors.Join(err, ferr); err != nil {
		return nil, fmt.Errorf("adopt: %w", err)
	}
	if err := unix.SetNonblock(fd, true); err != nil {
		_ = unix.Close(fd)
		return nil, fmt.Errorf("adopt: %w", err)
	}
	return &Stream{f: os.NewFile(uintptr(fd), "inotify"), buf: make([]byte, 64<<10)}, nil
}

// check asks the kernel what an open file is. Only what has no path at all is called so: the name of a file begins with
// a slash, that of a memfd too.
func check(fd int) error {
	link, err := os.Readlink(fmt.Sprintf("/proc/self/fd/%d", fd))
	if err != nil {
		return err
	}
	if link != "anon_inode:inotify" {
		return ErrNotInotify
	}
	return nil
}

// Pending is how many bytes of events wait to be read.
func (s *Stream) Pending() (int, error) {
	rc, err := s.f.SyscallConn()
	if err != nil {
		return 0, err
	}
	n := 0
	var ierr error
	err = rc.Control(func(fd uintptr) { n, ierr = unix.IoctlGetInt(int(fd), unix.TIOCINQ) })
	return n, errors.Join(err, ierr)
}

// SetDeadline bounds the reads from now on, also one that waits now; the zero time is no bound. A read that it ended
// fails with os.ErrDeadlineExceeded.
func (s *Stream) SetDeadline(t time.Time) error { return s.f.SetReadDeadline(t) }

// Read waits for events and appends some to list.
func (s *Stream) Read(list []Event) ([]Event, error) {
	n, err := s.f.Read(s.buf)
	if err != nil {
		return list, err
	}
	for b := s.buf[:n]; len(b) > 0; {
		if len(b) < unix.SizeofInotifyEvent {
			return list, errors.New("event is cut off")
		}
		size := uint64(binary.NativeEndian.Uint32(b[12:])) + unix.SizeofInotifyEvent
		if size > uint64(len(b)) {
			return list, errors.New("event is cut off")
		}
		name, _, _ := bytes.Cut(b[unix.SizeofInotifyEvent:size], []byte{0})
		list = append(list, Event{
			WD: int32(binary.NativeEndian.Uint32(b)), Mask: binary.NativeEndian.Uint32(b[4:]),
			Cookie: binary.NativeEndian.Uint32(b[8:]), Name: string(name), Size: int(size),
		})
		b = b[size:]
	}
	return list, nil
}

// Close lets go of the instance.
func (s *Stream) Close() error { return s.f.Close() }
