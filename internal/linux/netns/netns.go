// Package netns opens, keeps and enters network namespaces.
//
// Code runs in another namespace on a thread of its own goroutine, which is locked to it and goes back where it came
// from. A thread that cannot go back is never used again: it ends with the goroutine. All functions may be called
// concurrently.
package netns

import (
	"errors"
	"fmt"
	"io/fs"
	"os"
	"runtime"
	"strconv"

	"golang.org/x/sys/unix"
)

// Open opens the namespace that the file at path stands for. It is fs.ErrNotExist when there is no file, and ErrNone
// when the file stands for nothing.
func Open(path string) (*os.File, error) {
	f, err := os.Open(path)
	if err != nil {
		return nil, err
	}
	if err := check(f); err != nil {
		f.Close()
		return nil, fmt.Errorf("%s: %w", path, err)
	}
	return f, nil
}

// ErrNone says that a file is not a network namespace.
var ErrNone = errors.New("not a network namespace")

func check(f *os.File) error {
	var st unix.Statfs_t
	if err := control(f, func(fd int) error { return unix.Fstatfs(fd, &st) }); err != nil {
		return err
	}
	if st.Type != unix.NSFS_MAGIC {
		return ErrNone
	}
	return control(f, func(fd int) error {
		kind, err := unix.IoctlRetInt(fd, unix.NS_GET_NSTYPE)
		if err == nil && kind != unix.CLONE_NEWNET {
			err = ErrNone
		}
		return err
	})
}

// OfProcess opens the namespace of a process.
func OfProcess(pid int) (*os.File, error) { return Open("/proc/" + strconv.Itoa(pid) + "/ns/net") }

// Same reports whether both files are one namespace.
func Same(a, b *os.File) (bool, error) {
	x, err := a.Stat()
	if err != nil {
		return false, err
	}
	y, err := b.Stat()
	return err == nil && os.SameFile(x, y), err
}

// New makes an empty namespace, which lives as long as somebody holds it.
func New() (*os.File, error) {
	var made *os.File
	err := thread(func() error {
		if err := unix.Unshare(unix.CLONE_NEWNET); err != nil {
			return fmt.Errorf("make a network namespace: %w", err)
		}
		var err error
		made, err = current()
		return err
	})
	return made, err
}

// Create makes an empty namespace that is kept by a mount on a new file at path. It is fs.ErrExist when there is a file.
func Create(path string) (_ *os.File, err error) {
	f, err := os.OpenFile(path, os.O_CREATE|os.O_EXCL|os.O_RDONLY, 0o600)
	if err != nil {
		return nil, err
	}
	f.Close()
	defer func() {
		if err != nil {
			err = errors.Join(err, os.Remove(path))
		}
	}()
	ns, err := New()
	if err != nil {
		return nil, err
	}
	err = control(ns, func(fd int) error {
		return unix.Mount("/proc/self/fd/"+strconv.Itoa(fd), path, "", unix.MS_BIND, "")
	})
	if err != nil {
		ns.Close()
		return nil, fmt.Errorf("keep a network namespace at %s: %w", path, err)
	}
	return ns, nil
}

// Remove takes away what Create made, or what is left of it. The namespace goes when nobody holds it. Idempotent.
func Remove(path string) error {
	for {
		err := unix.Unmount(path, unix.MNT_DETACH|unix.UMOUNT_NOFOLLOW)
		if errors.Is(err, unix.EINVAL) || errors.Is(err, unix.ENOENT) { // nothing is mounted there any more
			break
		}
		if err != nil {
			return fmt.Errorf("unmount the network namespace at %s: %w", path, err)
		}
	}
	if err := os.Remove(path); err != nil && !errors.Is(err, fs.ErrNotExist) {
		return err
	}
	return nil
}

// Do runs f in the namespace, on a thread that does nothing else meanwhile. What f starts in goroutines of its own runs
// elsewhere.
func Do(ns *os.File, f func() error) error {
	return thread(func() error {
		if err := enter(ns); err != nil {
			return err
		}
		return f()
	})
}

// thread runs f, which may change the namespace of its thread.
func thread(f func() error) error {
	done := make(chan error, 1)
	go func() {
		runtime.LockOSThread()
		home, err := current()
		if err != nil {
			runtime.UnlockOSThread()
			done <- err
			return
		}
		defer home.Close()
		err = f()
		if back := enter(home); back != nil {
			// Not unlocked: the thread ends with this goroutine.
			err = errors.Join(err, back)
		} else {
			runtime.UnlockOSThread()
		}
		done <- err
	}()
	return <-done
}

func current() (*os.File, error) { return os.Open("/proc/thread-self/ns/net") }

func enter(ns *os.File) error {
	err := control(ns, func(fd int) error { return unix.Setns(fd, unix.CLONE_NEWNET) })
	if err != nil {
		return fmt.Errorf("enter network namespace %s: %w", ns.Name(), err)
	}
	return nil
}

// control runs f with the descriptor, which stays open meanwhile.
func control(f *os.File, do func(fd int) error) error {
	rc, err := f.SyscallConn()
	if err != nil {
		return err
	}
	var inner error
	if err := rc.Control(func(fd uintptr) { inner = do(int(fd)) }); err != nil {
		return err
	}
	return inner
}
