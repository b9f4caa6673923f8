// Package userns makes user namespaces that exist only as descriptors, to map the owners of mounts through.
//
// It owns no process beyond the call: a child is made in the new namespace, stopped before its first instruction, and
// killed once the namespace is open. A killed caller takes the child along. Calls may run at once.
package userns

import (
	"fmt"
	"os"
	"runtime"
	"strconv"
	"syscall"

	"golang.org/x/sys/unix"
)

// Size is the number of ids in every mapping: 0 to 65,535.
const Size = 65536

// Mapping is the kernel's text for ids 0 to Size-1 inside as base to base+Size-1 outside.
func Mapping(base uint32) string {
	return "0 " + strconv.FormatUint(uint64(base), 10) + " " + strconv.Itoa(Size) + "\n"
}

// New returns a user namespace in which ids 0 to Size-1 are base to base+Size-1 of this one.
func New(base uint32) (*os.File, error) {
	// The child is traced by the thread that made it.
	runtime.LockOSThread()
	defer runtime.UnlockOSThread()

	pid, err := syscall.ForkExec("/proc/self/exe", []string{"userns"}, &syscall.ProcAttr{
		Env: []string{},
		Sys: &syscall.SysProcAttr{
			// With vfork the cost does not grow with the memory of the caller. The maps are written below, since the
			// standard library would not use vfork if it had to write them.
			Cloneflags: unix.CLONE_NEWUSER | unix.CLONE_VFORK | unix.CLONE_VM,
			Ptrace:     true, // stops at exec: no instruction of the program runs
			Pdeathsig:  syscall.SIGKILL,
		},
	})
	if err != nil {
		return nil, fmt.Errorf("clone into a user namespace: %w", err)
	}
	defer func() {
		_ = syscall.Kill(pid, syscall.SIGKILL) // ours and not waited for: the number cannot have been given anew
		for {
			var ws syscall.WaitStatus
			if _, err := syscall.Wait4(pid, &ws, syscall.WALL, nil); err == syscall.EINTR || (err == nil && ws.Stopped()) {
				continue
			}
			break
		}
	}()
	if err := WriteMaps(pid, base); err != nil {
		return nil, err
	}
	f, err := os.Open("/proc/" + strconv.Itoa(pid) + "/ns/user")
	if err != nil {
		return nil, fmt.Errorf("open the user namespace: %w", err)
	}
	return f, nil
}

// WriteMaps gives the user namespace of a process its mapping, once.
func WriteMaps(pid int, base uint32) error {
	dir := "/proc/" + strconv.Itoa(pid)
	for _, name := range []string{"/uid_map", "/gid_map"} {
		// One write(2) each: the kernel takes a map whole or not at all.
		f, err := os.OpenFile(dir+name, os.O_WRONLY, 0)
		if err != nil {
			return fmt.Errorf("map ids: %w", err)
		}
		_, err = f.WriteString(Mapping(base))
		if cerr := f.Close(); err == nil {
			err = cerr
		}
		if err != nil {
			return fmt.Errorf("map ids: %w", err)
		}
	}
	return nil
}
