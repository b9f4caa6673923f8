package clone

import (
	"fmt"

	"golang.org/x/sys/unix"
)

// asOwner performs f while the calling thread, which must be locked, has another effective user. Who makes a user
// namespace owns it, and is charged in its parent for everything in it that the kernel counts by user: inotify
// instances and watches, and namespaces. Were that one user for all, one namespace could take what all of them have.
//
// The thread keeps its capabilities; no other thread sees anything of it.
func asOwner(uid uint32, f func()) error {
	if uid == 0 {
		f()
		return nil
	}
	head := unix.CapUserHeader{Version: unix.LINUX_CAPABILITY_VERSION_3}
	var caps [2]unix.CapUserData
	if err := unix.Capget(&head, &caps[0]); err != nil {
		return fmt.Errorf("capabilities of the thread: %w", err)
	}
	effective := unix.Geteuid()
	// The wrappers of setresuid change every thread.
	become := func(uid uintptr) error {
		const leave = ^uintptr(0)
		if _, _, errno := unix.RawSyscall(unix.SYS_SETRESUID, leave, uid, leave); errno != 0 {
			return errno
		}
		return unix.Capset(&head, &caps[0]) // the change takes those in effect away
	}
	err := become(uintptr(uid))
	if err == nil {
		f()
	}
	if berr := become(uintptr(effective)); berr != nil {
		// Back to what the thread was, which its real user and its capabilities allow; it could serve nobody any more.
		panic(fmt.Sprintf("clone: the thread cannot become user %d again: %v", effective, berr))
	}
	if err != nil {
		return fmt.Errorf("become user %d: %w", uid, err)
	}
	return nil
}
