// Package tty works on pseudo terminals by their descriptors, never by a path of whoever they belong to.
//
// A master that is waited on must be non-blocking, for all its holders. Functions that take bare descriptors are for
// event loops.
package tty

import (
	"errors"
	"fmt"
	"os"

	"golang.org/x/sys/unix"
)

// Size is measured in characters.
type Size struct {
	Columns, Rows uint16
}

// Open makes a terminal in this process's own /dev/pts. The master is non-blocking and unlocked.
func Open() (master *os.File, err error) {
	fd, err := unix.Open("/dev/ptmx", unix.O_RDWR|unix.O_NOCTTY|unix.O_NONBLOCK|unix.O_CLOEXEC, 0)
	if err != nil {
		return nil, fmt.Errorf("open a terminal: %w", err)
	}
	if err := unix.IoctlSetPointerInt(fd, unix.TIOCSPTLCK, 0); err != nil {
		_ = unix.Close(fd)
		return nil, fmt.Errorf("unlock a terminal: %w", err)
	}
	return os.NewFile(uintptr(fd), "terminal"), nil
}

// Master makes a file that can be waited on of a master that somebody else opened, and takes f over, also when it
// fails. It refuses whatever is no master.
func Master(f *os.File) (*os.File, error) {
	defer f.Close()
	fd := -1
	err := control(f, func(old int) error {
		if err := CheckMaster(old); err != nil {
			return err
		}
		if err := unix.SetNonblock(old, true); err != nil {
			return fmt.Errorf("set a terminal non-blocking: %w", err)
		}
		var err error
		if fd, err = unix.FcntlInt(uintptr(old), unix.F_DUPFD_CLOEXEC, 3); err != nil {
			return fmt.Errorf("duplicate a terminal: %w", err)
		}
		return nil
	})
	if err != nil {
		return nil, err
	}
	return os.NewFile(uintptr(fd), "terminal"), nil
}

// Duplicate gives a descriptor of its own for the same terminal.
func Duplicate(master *os.File) (*os.File, error) {
	fd := -1
	err := control(master, func(old int) (err error) {
		fd, err = unix.FcntlInt(uintptr(old), unix.F_DUPFD_CLOEXEC, 3)
		return err
	})
	if err != nil {
		return nil, fmt.Errorf("duplicate a terminal: %w", err)
	}
	return os.NewFile(uintptr(fd), master.Name()), nil
}

// ptmx is the device number of every master. It has another major number than the other end, and a file system that
// somebody else provides cannot show it.
var ptmx = unix.Mkdev(5, 2)

// CheckMaster reports why fd is no master that can be read and written, nil if it is one.
func CheckMaster(fd int) error {
	var st unix.Stat_t
	if err := unix.Fstat(fd, &st); err != nil {
		return fmt.Errorf("stat a terminal: %w", err)
	}
	if st.Mode&unix.S_IFMT != unix.S_IFCHR || st.Rdev != ptmx {
		return errors.New("not the master of a terminal")
	}
	flags, err := unix.FcntlInt(uintptr(fd), unix.F_GETFL, 0)
	switch {
	case err != nil:
		return fmt.Errorf("flags of a terminal: %w", err)
	case flags&unix.O_ACCMODE != unix.O_RDWR:
		return errors.New("the terminal is not open for reading and writing")
	}
	return nil
}

// Waits reports whether reading and writing wait, for every holder of the same open terminal.
func Waits(fd int) (bool, error) {
	flags, err := unix.FcntlInt(uintptr(fd), unix.F_GETFL, 0)
	if err != nil {
		return false, fmt.Errorf("flags of a terminal: %w", err)
	}
	return flags&unix.O_NONBLOCK == 0, nil
}

// Peer opens the other end, which a command gets. It does not become this process's controlling terminal.
func Peer(master *os.File) (*os.File, error) {
	var peer uintptr
	err := control(master, func(fd int) error {
		var errno unix.Errno
		const flags = unix.O_RDWR | unix.O_NOCTTY | unix.O_CLOEXEC
		peer, _, errno = unix.Syscall(unix.SYS_IOCTL, uintptr(fd), unix.TIOCGPTPEER, flags)
		if errno != 0 {
			return fmt.Errorf("open the other end of a terminal: %w", errno)
		}
		return nil
	})
	if err != nil {
		return nil, err
	}
	return os.NewFile(peer, "terminal peer"), nil
}

// SetSize sets the size; the foreground group gets SIGWINCH if it is another one.
func SetSize(f *os.File, s Size) error {
	return control(f, func(fd int) error {
		if err := unix.IoctlSetWinsize(fd, unix.TIOCSWINSZ, &unix.Winsize{Col: s.Columns, Row: s.Rows}); err != nil {
			return fmt.Errorf("set the size of a terminal: %w", err)
		}
		return nil
	})
}

// GetSize gives the size that was set last, by whichever end.
func GetSize(f *os.File) (s Size, err error) {
	err = control(f, func(fd int) error {
		w, err := unix.IoctlGetWinsize(fd, unix.TIOCGWINSZ)
		if err != nil {
			return fmt.Errorf("get the size of a terminal: %w", err)
		}
		s = Size{Columns: w.Col, Rows: w.Row}
		return nil
	})
	return s, err
}

// MakeRaw has the terminal pass every byte as it is and show none of its input.
func MakeRaw(f *os.File) error {
	return control(f, func(fd int) error {
		t, err := unix.IoctlGetTermios(fd, unix.TCGETS)
		if err != nil {
			return fmt.Errorf("get the modes of a terminal: %w", err)
		}
		t.Iflag, t.Oflag = 0, 0
		t.Lflag &^= unix.ECHO | unix.ECHONL | unix.ICANON | unix.ISIG | unix.IEXTEN
		t.Cc[unix.VMIN], t.Cc[unix.VTIME] = 1, 0
		if err := unix.IoctlSetTermios(fd, unix.TCSETS, t); err != nil {
			return fmt.Errorf("set the modes of a terminal: %w", err)
		}
		return nil
	})
}

// InFlight bounds the bytes that a terminal itself holds between a writer and the reader of its master: the kernel's
// buffers are 8 and 4 KiB, and overshoot by one write.
const InFlight = 64 << 10

// Readable reports whether the master has output, or its end, to be read now.
func Readable(master *os.File) (ready bool, err error) {
	err = control(master, func(fd int) error {
		fds := []unix.PollFd{{Fd: int32(fd), Events: unix.POLLIN}}
		for {
			n, err := unix.Poll(fds, 0)
			if errors.Is(err, unix.EINTR) {
				continue
			}
			ready = n > 0
			return err
		}
	})
	return ready, err
}

func control(f *os.File, do func(fd int) error) error {
	conn, err := f.SyscallConn()
	if err != nil {
		return fmt.Errorf("terminal: %w", err)
	}
	cerr := conn.Control(func(fd uintptr) { err = do(int(fd)) })
	return errors.Join(err, cerr)
}
