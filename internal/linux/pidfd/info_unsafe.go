package pidfd

import (
	"os"
	"unsafe"

	"golang.org/x/sys/unix"
)

// getInfo is PIDFD_GET_INFO, for which x/sys has no function.
func getInfo(f *os.File, info *unix.PidfdInfo) error {
	_, _, errno := unix.Syscall(unix.SYS_IOCTL, f.Fd(), unix.PIDFD_GET_INFO, uintptr(unsafe.Pointer(info)))
	if errno != 0 {
		return errno
	}
	return nil
}
