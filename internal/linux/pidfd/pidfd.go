// Package pidfd works on processes through descriptors that name one process for ever, whoever its parent is.
//
// It owns nothing; the descriptors stay the caller's. All functions may be called at once on the same descriptor.
package pidfd

import (
	"context"
	"errors"
	"fmt"
	"os"
	"runtime"
	"syscall"
	"time"

	"golang.org/x/sys/unix"
)

// Open names a running process. It is os.ErrProcessDone when there is none.
func Open(pid int) (*os.File, error) {
	fd, err := unix.PidfdOpen(pid, 0)
	if errors.Is(err, unix.ESRCH) {
		return nil, fmt.Errorf("open pidfd of %d: %w", pid, os.ErrProcessDone)
	}
	if err != nil {
		return nil, fmt.Errorf("open pidfd of %d: %w", pid, err)
	}
	return os.NewFile(uintptr(fd), "pidfd"), nil
}

// Signal sends a signal. It is os.ErrProcessDone when the process is gone.
func Signal(f *os.File, sig syscall.Signal) error {
	err := unix.PidfdSendSignal(int(f.Fd()), sig, nil, 0)
	if errors.Is(err, unix.ESRCH) {
		return os.ErrProcessDone
	}
	if err != nil {
		return fmt.Errorf("signal through pidfd: %w", err)
	}
	return nil
}

// Done reports whether the process has ended.
func Done(f *os.File) (bool, error) {
	p := []unix.PollFd{{Fd: int32(f.Fd()), Events: unix.POLLIN}}
	for {
		n, err := unix.Poll(p, 0)
		if errors.Is(err, unix.EINTR) {
			continue
		}
		if err != nil {
			return false, fmt.Errorf("poll pidfd: %w", err)
		}
		return n > 0, nil
	}
}

// Wait returns when the process has ended, or the cause of ctx when that comes first. It takes no thread while it
// waits.
func Wait(ctx context.Context, f *os.File) error {
	// A descriptor of its own in non-blocking mode is what the runtime's poller takes.
	fd, err := unix.FcntlInt(f.Fd(), unix.F_DUPFD_CLOEXEC, 0)
	if err != nil {
		return fmt.Errorf("duplicate pidfd: %w", err)
	}
	if err := unix.SetNonblock(fd, true); err != nil {
		_ = unix.Close(fd)
		return fmt.Errorf("pidfd: %w", err)
	}
	d := os.NewFile(uintptr(fd), "pidfd")
	defer d.Close()
	raw, err := d.SyscallConn()
	if err != nil {
		return fmt.Errorf("wait on pidfd: %w", err)
	}
	stop := context.AfterFunc(ctx, func() { _ = d.SetReadDeadline(time.Unix(1, 0)) })
	defer stop()
	var perr error
	err = raw.Read(func(uintptr) bool {
		var done bool
		done, perr = Done(d)
		return done || perr != nil
	})
	if perr != nil {
		return perr
	}
	if err != nil {
		if ctx.Err() != nil {
			return context.Cause(ctx)
		}
		return fmt.Errorf("wait on pidfd: %w", err)
	}
	return nil
}

// ErrNoExitInfo: this kernel does not tell how a process ended that is not our child (it does from 6.15 on).
var ErrNoExitInfo = errors.New("the kernel does not tell exit statuses through pidfds")

// ExitStatus tells how a process ended that was waited for by anybody. ok is false while it still runs or nobody has
// waited for it.
func ExitStatus(f *os.File) (ws syscall.WaitStatus, ok bool, err error) {
	info := unix.PidfdInfo{Mask: unix.PIDFD_INFO_EXIT}
	err = getInfo(f, &info)
	switch {
	case errors.Is(err, unix.ESRCH): // alive, or dead and not waited for
		return 0, false, nil
	case errors.Is(err, unix.ENOTTY), errors.Is(err, unix.EINVAL):
		return 0, false, ErrNoExitInfo
	case err != nil:
		return 0, false, fmt.Errorf("ask pidfd: %w", err)
	}
	if info.Mask&unix.PIDFD_INFO_EXIT == 0 {
		if info.Mask&unix.PIDFD_INFO_PID != 0 {
			return 0, false, nil
		}
		return 0, false, ErrNoExitInfo
	}
	return syscall.WaitStatus(uint32(info.Exit_code)), true, nil
}

// Identity is a number that no other process of this boot has: the inode of the pidfd.
func Identity(f *os.File) (uint64, error) {
	var st unix.Stat_t
	if err := unix.Fstat(int(f.Fd()), &st); err != nil {
		return 0, fmt.Errorf("identify pidfd: %w", err)
	}
	return st.Ino, nil
}

// Probe tries whether the exit status of a process that somebody else waited for can be read: nil, or why not. It
// starts and ends a child.
func Probe() error {
	runtime.LockOSThread() // the child is traced by this thread
	defer runtime.UnlockOSThread()
	fd := -1
	pid, err := syscall.ForkExec("/proc/self/exe", []string{"pidfd"}, &syscall.ProcAttr{
		Env: []string{},
		// Traced, it stops at exec: no instruction of the program runs.
		Sys: &syscall.SysProcAttr{Ptrace: true, PidFD: &fd, Pdeathsig: syscall.SIGKILL},
	})
	if err != nil {
		return fmt.Errorf("start a process: %w", err)
	}
	if fd < 0 {
		return errors.New("the kernel gives no pidfd of a child")
	}
	f := os.NewFile(uintptr(fd), "pidfd")
	defer f.Close()
	_ = syscall.Kill(pid, syscall.SIGKILL)
	for {
		var ws syscall.WaitStatus
		_, err := syscall.Wait4(pid, &ws, syscall.WALL, nil)
		if err == nil && !ws.Stopped() || err != nil && !errors.Is(err, syscall.EINTR) {
			break
		}
	}
	ws, ok, err := ExitStatus(f)
	if err != nil {
		return err
	}
	if !ok || ws.Signal() != syscall.SIGKILL {
		return ErrNoExitInfo
	}
	return nil
}
