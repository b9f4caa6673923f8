// Package unprivileged gives a process's rights up, for good.
package unprivileged

import (
	"errors"
	"fmt"
	"runtime"
	"syscall"

	"golang.org/x/sys/unix"
)

// Become makes every thread of the process that user and group, with no other groups and no capabilities, which no program
// that it executes can bring back; nobody but root can look into it or trace it. It needs root. With an error the process
// must end, since some of it may have happened.
func Become(id int) error {
	if id <= 0 {
		return fmt.Errorf("become uid %d: %w", id, unix.EINVAL)
	}
	for _, step := range []struct {
		what string
		do   func() error
	}{
		{"give up groups", func() error { return syscall.Setgroups(nil) }},
		{"change group", func() error { return syscall.Setresgid(id, id, id) }},
		{"change user", func() error { return syscall.Setresuid(id, id, id) }},
		{"gain no privileges", func() error { return everyThread(unix.PR_SET_NO_NEW_PRIVS, 1) }},
		{"hide from tracers", func() error { return unix.Prctl(unix.PR_SET_DUMPABLE, 0, 0, 0, 0) }}, // of the process
	} {
		if err := step.do(); err != nil {
			return fmt.Errorf("%s: %w", step.what, err)
		}
	}
	return check(id)
}

// everyThread makes one prctl call on each thread.
func everyThread(option, arg uintptr) error {
	if _, _, errno := syscall.AllThreadsSyscall6(unix.SYS_PRCTL, option, arg, 0, 0, 0, 0); errno != 0 {
		return errno
	}
	return nil
}

// check sees that nothing is left.
func check(id int) error {
	runtime.LockOSThread()
	defer runtime.UnlockOSThread()
	r, e, s := unix.Getresuid()
	gr, ge, gs := unix.Getresgid()
	if r != id || e != id || s != id || gr != id || ge != id || gs != id {
		return fmt.Errorf("user is %d %d %d and group %d %d %d, want %d", r, e, s, gr, ge, gs, id)
	}
	header := unix.CapUserHeader{Version: unix.LINUX_CAPABILITY_VERSION_3}
	var caps [2]unix.CapUserData
	if err := unix.Capget(&header, &caps[0]); err != nil {
		return fmt.Errorf("look at capabilities: %w", err)
	}
	for _, c := range caps {
		if c.Effective|c.Permitted|c.Inheritable != 0 {
			return errors.New("capabilities are left")
		}
	}
	return nil
}
