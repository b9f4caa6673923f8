package btrfs

import (
	"os"
	"unsafe"

	"golang.org/x/sys/unix"
)

// The numbers and structures of linux/btrfs.h, which x/sys/unix does not have.
const (
	iocSubvolCreate    = 0x5000940e
	iocSnapDestroy     = 0x5000940f
	iocInoLookup       = 0xd0009412
	iocFsInfo          = 0x8400941f
	iocQuotaCtl        = 0xc0109428
	iocQgroupCreate    = 0x4010942a
	iocQgroupLimit     = 0x8030942b
	iocQuotaRescanWait = 0x942e

	maxName            = 255
	firstFreeObjectid  = 256
	qgroupLimitMaxRfer = 1
)

func ioctl(f *os.File, request uintptr, arg unsafe.Pointer) error {
	rc, err := f.SyscallConn()
	if err != nil {
		return err
	}
	var errno unix.Errno
	if err := rc.Control(func(fd uintptr) {
		for {
			_, _, errno = unix.Syscall(unix.SYS_IOCTL, fd, request, uintptr(arg))
			if errno != unix.EINTR {
				return
			}
		}
	}); err != nil {
		return err
	}
	if errno != 0 {
		return errno
	}
	return nil
}

func volArgs(dir *os.File, request uintptr, name string) error {
	var args struct {
		fd   int64
		name [4088]byte
	}
	if len(name) == 0 || len(name) > maxName {
		return unix.ENAMETOOLONG
	}
	copy(args.name[:], name)
	return ioctl(dir, request, unsafe.Pointer(&args))
}

func quotaCtl(fs *os.File, cmd uint64) error {
	args := struct{ cmd, status uint64 }{cmd: cmd}
	return ioctl(fs, iocQuotaCtl, unsafe.Pointer(&args))
}

func quotaRescanWait(fs *os.File) error { return ioctl(fs, iocQuotaRescanWait, nil) }

func limit(f *os.File, bytes uint64) error {
	args := struct {
		qgroup uint64 // 0: that of the subvolume in which f lies
		flags  uint64
		maxRfer, maxExcl,
		rsvRfer, rsvExcl uint64
	}{flags: qgroupLimitMaxRfer, maxRfer: bytes}
	return ioctl(f, iocQgroupLimit, unsafe.Pointer(&args))
}

func qgroupDrop(fs *os.File, id uint64) error {
	args := struct{ create, qgroup uint64 }{0, id}
	return ioctl(fs, iocQgroupCreate, unsafe.Pointer(&args))
}

func treeID(f *os.File) (uint64, error) {
	args := struct {
		tree, object uint64
		name         [4080]byte
	}{object: firstFreeObjectid}
	err := ioctl(f, iocInoLookup, unsafe.Pointer(&args))
	return args.tree, err
}

func fsid(f *os.File) ([16]byte, error) {
	var args struct {
		maxID, devices uint64
		fsid           [16]byte
		_              [992]byte
	}
	err := ioctl(f, iocFsInfo, unsafe.Pointer(&args))
	return args.fsid, err
}
