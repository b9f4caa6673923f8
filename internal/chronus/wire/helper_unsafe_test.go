package wire_test

import (
	"syscall"
	"unsafe"
)

// prlimit tries to give a process one second of processor time to live.
func prlimit(pid int) syscall.Errno {
	limit := [2]uint64{1, 1}
	_, _, errno := syscall.RawSyscall6(syscall.SYS_PRLIMIT64, uintptr(pid), syscall.RLIMIT_CPU,
		uintptr(unsafe.Pointer(&limit)), 0, 0, 0)
	return errno
}

// vmRead tries to read a byte of a process's program.
func vmRead(pid int) syscall.Errno {
	var b [1]byte
	here := syscall.Iovec{Base: &b[0], Len: 1}
	there := [2]uint64{0x400000, 1}
	_, _, errno := syscall.RawSyscall6(sysVMReadv, uintptr(pid), uintptr(unsafe.Pointer(&here)), 1,
		uintptr(unsafe.Pointer(&there)), 1, 0)
	return errno
}
