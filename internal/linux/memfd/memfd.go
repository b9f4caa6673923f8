// Package memfd makes files that live in memory.
package memfd

import (
	"fmt"
	"os"

	"golang.org/x/sys/unix"
)

// Sealed makes a file that holds data and that nobody, its maker included, can change any more: what is handed to a
// peer that must be able to read it twice. It is not executable. Its position is 0.
func Sealed(name string, data []byte) (*os.File, error) {
	f, err := Create(name)
	if err != nil {
		return nil, err
	}
	if _, err := f.WriteAt(data, 0); err != nil {
		f.Close()
		return nil, fmt.Errorf("fill memfd %s: %w", name, err)
	}
	if err := Seal(f); err != nil {
		f.Close()
		return nil, err
	}
	return f, nil
}

// Create makes an empty file that can be sealed later.
func Create(name string) (*os.File, error) {
	flags := unix.MFD_CLOEXEC | unix.MFD_ALLOW_SEALING
	fd, err := unix.MemfdCreate(name, flags|unix.MFD_NOEXEC_SEAL)
	if err == unix.EINVAL {
		// Before Linux 6.3 there is no such flag.
		fd, err = unix.MemfdCreate(name, flags)
	}
	if err != nil {
		return nil, fmt.Errorf("memfd %s: %w", name, err)
	}
	return os.NewFile(uintptr(fd), name), nil
}

// Sized makes a file of zeros whose size nobody can change any more: what a peer may fill, up to there.
func Sized(name string, size int64) (*os.File, error) {
	f, err := Create(name)
	if err != nil {
		return nil, err
	}
	if err := f.Truncate(size); err != nil {
		f.Close()
		return nil, fmt.Errorf("size memfd %s: %w", name, err)
	}
	if err := seal(f, unix.F_SEAL_SHRINK|unix.F_SEAL_GROW|unix.F_SEAL_SEAL); err != nil {
		f.Close()
		return nil, err
	}
	return f, nil
}

// Path gives a descriptor that only names the file: it can neither read nor write, and who has it may open the file by
// /proc/self/fd only as far as the file's owner and mode let them.
func Path(f *os.File) (*os.File, error) {
	var path *os.File
	err := control(f, func(fd uintptr) error {
		n, err := unix.Open(fmt.Sprintf("/proc/self/fd/%d", fd), unix.O_PATH|unix.O_CLOEXEC, 0)
		if err != nil {
			return fmt.Errorf("name memfd %s: %w", f.Name(), err)
		}
		path = os.NewFile(uintptr(n), f.Name())
		return nil
	})
	return path, err
}

// Seal forbids every change of the file from now on.
func Seal(f *os.File) error {
	return seal(f, unix.F_SEAL_WRITE|unix.F_SEAL_SHRINK|unix.F_SEAL_GROW|unix.F_SEAL_SEAL)
}

func seal(f *os.File, what int) error {
	return control(f, func(fd uintptr) error {
		if _, err := unix.FcntlInt(fd, unix.F_ADD_SEALS, what); err != nil {
			return fmt.Errorf("seal memfd %s: %w", f.Name(), err)
		}
		return nil
	})
}

func control(f *os.File, fn func(fd uintptr) error) error {
	rc, err := f.SyscallConn()
	if err != nil {
		return fmt.Errorf("memfd %s: %w", f.Name(), err)
	}
	var ferr error
	if err := rc.Control(func(fd uintptr) { ferr = fn(fd) }); err != nil {
		return fmt.Errorf("memfd %s: %w", f.Name(), err)
	}
	return ferr
}
