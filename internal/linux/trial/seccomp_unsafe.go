package trial

import (
	"fmt"
	"unsafe"

	"golang.org/x/sys/unix"
)

// refusal is what our filter answers; no kernel gives it for getppid.
const refusal = unix.EXFULL

// Seccomp loads a filter that refuses one call, looks whether it is refused, and then loads program on top, if there is
// one: a classic BPF program in the kernel's layout, 8 bytes per instruction.
func Seccomp(program []byte) error {
	return onThread(func() error {
		// Needed by who lacks CAP_SYS_ADMIN, harmless to this thread.
		if err := unix.Prctl(unix.PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0); err != nil {
			return fmt.Errorf("no_new_privs: %w", err)
		}
		own := []unix.SockFilter{
			{Code: unix.BPF_LD | unix.BPF_W | unix.BPF_ABS, K: 0}, // the call's number
			{Code: unix.BPF_JMP | unix.BPF_JEQ | unix.BPF_K, K: unix.SYS_GETPPID, Jt: 0, Jf: 1},
			{Code: unix.BPF_RET | unix.BPF_K, K: unix.SECCOMP_RET_ERRNO | uint32(refusal)},
			{Code: unix.BPF_RET | unix.BPF_K, K: unix.SECCOMP_RET_ALLOW},
		}
		if err := load(&own[0], len(own)); err != nil {
			return err
		}
		if _, _, errno := unix.RawSyscall(unix.SYS_GETPPID, 0, 0, 0); errno != refusal {
			return ErrNoEffect
		}
		if len(program) < 8 || len(program)%8 != 0 {
			if program == nil {
				return nil
			}
			return fmt.Errorf("a filter of %d bytes", len(program))
		}
		return load((*unix.SockFilter)(unsafe.Pointer(&program[0])), len(program)/8)
	})
}

func load(first *unix.SockFilter, n int) error {
	prog := unix.SockFprog{Len: uint16(n), Filter: first}
	_, _, errno := unix.RawSyscall(unix.SYS_SECCOMP, unix.SECCOMP_SET_MODE_FILTER, 0, uintptr(unsafe.Pointer(&prog)))
	if errno != 0 {
		return fmt.Errorf("load a filter of %d instructions: %w", n, errno)
	}
	return nil
}
