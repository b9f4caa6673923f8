// Package inotify tells when files were written, with one kernel instance for any number of files and waiters.
package inotify

import (
	"encoding/binary"
	"errors"
	"fmt"
	"os"
	"sync"

	"golang.org/x/sys/unix"
)

// Watcher is one inotify instance with a goroutine that reads it. Any goroutine may call Watch and Close.
type Watcher struct {
	f    *os.File
	gone chan struct{} // closed when the reader has ended

	mu     sync.Mutex
	byWD   map[int32]map[*Watch]struct{} // guarded by mu
	closed bool                          // guarded by mu
}

// Watch is one waiter's interest in one file.
type Watch struct {
	w  *Watcher
	wd int32
	c  chan struct{}
}

// New makes a Watcher. The number of instances per user is limited by the system (128 by default).
func New() (*Watcher, error) {
	fd, err := unix.InotifyInit1(unix.IN_CLOEXEC | unix.IN_NONBLOCK)
	if err != nil {
		return nil, os.NewSyscallError("inotify_init", err)
	}
	w := &Watcher{
		f:    os.NewFile(uintptr(fd), "inotify"),
		gone: make(chan struct{}),
		byWD: make(map[int32]map[*Watch]struct{}),
	}
	go w.run()
	return w, nil
}

// Watch begins to watch the open file f, whatever its name is now: its C is ready after each write to the file and each
// change of its size from now on. Several changes may be one.
func (w *Watcher) Watch(f *os.File) (*Watch, error) {
	rc, err := f.SyscallConn()
	if err != nil {
		return nil, fmt.Errorf("watch %s: %w", f.Name(), err)
	}
	// Held over the system call: otherwise another waiter's Close could remove the watch that this call just shared.
	w.mu.Lock()
	defer w.mu.Unlock()
	if w.closed {
		return nil, fmt.Errorf("watch %s: %w", f.Name(), os.ErrClosed)
	}
	var wd int
	var werr error
	err = rc.Control(func(fd uintptr) {
		wd, werr = unix.InotifyAddWatch(int(w.fd()), fmt.Sprintf("/proc/self/fd/%d", fd), unix.IN_MODIFY)
	})
	if err := errors.Join(err, werr); err != nil {
		return nil, fmt.Errorf("watch %s: %w", f.Name(), err)
	}
	x := &Watch{w: w, wd: int32(wd), c: make(chan struct{}, 1)}
	set := w.byWD[x.wd]
	if set == nil {
		set = make(map[*Watch]struct{}, 1)
		w.byWD[x.wd] = set
	}
	set[x] = struct{}{}
	return x, nil
}

// C is ready when the file may have changed since C was last received from.
func (x *Watch) C() <-chan struct{} { return x.c }

// Close ends the interest. Idempotent.
func (x *Watch) Close() {
	w := x.w
	w.mu.Lock()
	defer w.mu.Unlock()
	set, ok := w.byWD[x.wd]
	if !ok {
		return
	}
	delete(set, x)
	if len(set) > 0 {
		return
	}
	delete(w.byWD, x.wd)
	if !w.closed {
		// EINVAL: the file is gone, and the watch with it.
		_, _ = unix.InotifyRmWatch(int(w.fd()), uint32(x.wd))
	}
}

// Close gives the instance back and returns when its goroutine is gone. Waiters are woken no more.
func (w *Watcher) Close() error {
	w.mu.Lock()
	if w.closed {
		w.mu.Unlock()
		return nil
	}
	w.closed = true
	w.mu.Unlock()
	err := w.f.Close()
	<-w.gone
	return err
}

// fd is called with mu held and the file open, so that the number is ours.
func (w *Watcher) fd() (fd uintptr) {
	rc, err := w.f.SyscallConn()
	if err != nil {
		return ^uintptr(0)
	}
	fd = ^uintptr(0)
	_ = rc.Control(func(n uintptr) { fd = n })
	return fd
}

func (w *Watcher) run() {
	defer close(w.gone)
	buf := make([]byte, 64<<10)
	for {
		n, err := w.f.Read(buf)
		if err != nil {
			return
		}
		w.wake(buf[:n])
	}
}

func (w *Watcher) wake(buf []byte) {
	w.mu.Lock()
	defer w.mu.Unlock()
	for len(buf) >= unix.SizeofInotifyEvent {
		wd := int32(binary.NativeEndian.Uint32(buf))
		mask := binary.NativeEndian.Uint32(buf[4:])
		size := unix.SizeofInotifyEvent + int(binary.NativeEndian.Uint32(buf[12:]))
		if size > len(buf) {
			return
		}
		buf = buf[size:]
		if mask&unix.IN_Q_OVERFLOW != 0 {
			for _, set := range w.byWD {
				wakeAll(set)
			}
			continue
		}
		wakeAll(w.byWD[wd])
	}
}

func wakeAll(set map[*Watch]struct{}) {
	for x := range set {
		select {
		case x.c <- struct{}{}:
		default:
		}
	}
}
