// Package pipe makes pipes and moves what is in them without copying it through the process.
//
// Functions that move bytes take bare descriptors, since their callers are event loops. They never wait for bytes to
// come; they may wait for the disk. A byte leaves the pipe only once it is where it should be.
package pipe

import (
	"errors"
	"fmt"
	"os"

	"golang.org/x/sys/unix"
)

// MaxSize is what an unprivileged process may give a pipe, and the size that recorded pipes grow to.
const MaxSize = 1 << 20

// New makes a pipe. Both ends are blocking and close-on-exec, unlike those of os.Pipe: a write end is to become some
// program's standard output, and few programs expect EAGAIN there.
func New() (r, w *os.File, err error) {
	var p [2]int
	if err := unix.Pipe2(p[:], unix.O_CLOEXEC); err != nil {
		return nil, nil, fmt.Errorf("pipe: %w", err)
	}
	return os.NewFile(uintptr(p[0]), "|0"), os.NewFile(uintptr(p[1]), "|1"), nil
}

// Grow makes room for n bytes and answers how many fit then. A pipe past the user's soft limit stays as it is.
func Grow(fd, n int) (int, error) {
	got, err := unix.FcntlInt(uintptr(fd), unix.F_SETPIPE_SZ, n)
	if err != nil {
		return 0, fmt.Errorf("grow pipe to %d: %w", n, err)
	}
	return got, nil
}

// Buffered is how many bytes wait in the pipe.
func Buffered(fd int) (int, error) {
	// TIOCINQ is FIONREAD by its other name.
	n, err := unix.IoctlGetInt(fd, unix.TIOCINQ)
	if err != nil {
		return 0, fmt.Errorf("bytes in pipe: %w", err)
	}
	return n, nil
}

// ToFile moves at most n bytes from the pipe into the file at offset off. It answers 0 without an error at the end (no
// writer is left and the pipe is empty), and EAGAIN when there is nothing now.
func ToFile(pipe, file int, off int64, n int) (int, error) {
	for {
		o := off
		m, err := unix.Splice(pipe, nil, file, &o, n, unix.SPLICE_F_NONBLOCK|unix.SPLICE_F_MOVE)
		if errors.Is(err, unix.EINTR) {
			continue
		}
		return int(m), err
	}
}

// FromTerminal moves at most n bytes that the master of a terminal has into the pipe. Nothing of it is anywhere else
// meanwhile, so that a kill of this process loses none. It answers EAGAIN when there is nothing now or no room, and EIO
// at the end.
func FromTerminal(master, pipe, n int) (int, error) {
	for {
		m, err := unix.Splice(master, nil, pipe, nil, n, unix.SPLICE_F_NONBLOCK)
		if errors.Is(err, unix.EINTR) {
			continue
		}
		return int(m), err
	}
}

// Discard takes at most n bytes out of the pipe and drops them; null is /dev/null open for writing. Answers as ToFile.
func Discard(pipe, null, n int) (int, error) {
	for {
		m, err := unix.Splice(pipe, nil, null, nil, n, unix.SPLICE_F_NONBLOCK|unix.SPLICE_F_MOVE)
		if errors.Is(err, unix.EINTR) {
			continue
		}
		return int(m), err
	}
}

// IsPipe reports whether fd is a pipe.
func IsPipe(fd int) bool {
	var st unix.Stat_t
	return unix.Fstat(fd, &st) == nil && st.Mode&unix.S_IFMT == unix.S_IFIFO
}

// CanSpliceTo reports why ToFile could not write to the file, nil if it can: it must be open for writing, and not for
// appending, which knows no offset.
func CanSpliceTo(file int) error {
	flags, err := unix.FcntlInt(uintptr(file), unix.F_GETFL, 0)
	switch {
	case err != nil:
		return fmt.Errorf("flags of file: %w", err)
	case flags&unix.O_ACCMODE == unix.O_RDONLY:
		return errors.New("it is not open for writing")
	case flags&unix.O_APPEND != 0:
		return errors.New("it is open for appending")
	}
	return nil
}
