package projquota

import (
	"os"
	"unsafe"

	"golang.org/x/sys/unix"
)

// The numbers and structures of linux/fs.h and linux/quota.h, which x/sys/unix does not have.
const (
	iocGetXattr = 0x801c581f
	iocSetXattr = 0x401c5820
	projInherit = 0x200

	qGetQuota = 0x800007
	qSetQuota = 0x800008
	prjQuota  = 2

	qifBlimits = 1
	qifIlimits = 4
)

type fsxattr struct {
	xflags, extsize, nextents, projid, cowextsize uint32
	_                                             [8]byte
}

type dqblk struct {
	bhardlimit, bsoftlimit, curspace uint64
	ihardlimit, isoftlimit, curinodes,
	btime, itime uint64
	valid uint32
	_     uint32
}

func getXattr(f *os.File) (fsxattr, error) {
	var x fsxattr
	_, _, errno := unix.Syscall(unix.SYS_IOCTL, f.Fd(), iocGetXattr, uintptr(unsafe.Pointer(&x)))
	if errno != 0 {
		return x, errno
	}
	return x, nil
}

func setXattr(f *os.File, x fsxattr) error {
	if _, _, errno := unix.Syscall(unix.SYS_IOCTL, f.Fd(), iocSetXattr, uintptr(unsafe.Pointer(&x))); errno != 0 {
		return errno
	}
	return nil
}

// quotactl acts on the file system of an open file: no device name, no mount table.
func quotactl(f *os.File, cmd uint32, id uint32, q *dqblk) error {
	_, _, errno := unix.Syscall6(unix.SYS_QUOTACTL_FD, f.Fd(), uintptr(cmd<<8|prjQuota), uintptr(id),
		uintptr(unsafe.Pointer(q)), 0, 0)
	if errno != 0 {
		return errno
	}
	return nil
}
