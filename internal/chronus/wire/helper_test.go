package wire_test

import (
	"debug/elf"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"slices"
	"syscall"
	"testing"

	"github.com/sandsea/sandsea/internal/chronus"
	"github.com/sandsea/sandsea/internal/testkit/leak"
)

// helperEnv makes this program, copied into a box, do one thing and tell its outcome.
const helperEnv = "SANDSEA_WIRE_HELPER"

func TestMain(m *testing.M) {
	if what := os.Getenv(helperEnv); what != "" {
		fmt.Println(outcome(what))
		return
	}
	os.Exit(leak.Main(m))
}

func helper(what string) chronus.Spawn {
	s := argv("/helper")
	s.Env = []string{helperEnv + "=" + what}
	return s
}

// withHelper puts this program into the root file system.
func withHelper(t testing.TB, mode fs.FileMode) func(root string) error {
	exe, err := os.Executable()
	if err != nil {
		t.Fatal(err)
	}
	f, err := elf.Open(exe)
	if err != nil {
		t.Fatal(err)
	}
	defer f.Close()
	if slices.ContainsFunc(f.Progs, func(p *elf.Prog) bool { return p.Type == elf.PT_INTERP }) {
		t.Skip("the test program is linked dynamically; test with CGO_ENABLED=0")
	}
	return func(root string) error {
		program, err := os.ReadFile(exe)
		if err != nil {
			return err
		}
		if err := os.WriteFile(root+"/helper", program, 0o755); err != nil {
			return err
		}
		return os.Chmod(root+"/helper", mode)
	}
}

// Numbers that package syscall does not have, for amd64.
const (
	sysKcmp        = 312
	sysVMReadv     = 310
	sysBPF         = 321
	sysUserfaultfd = 323
	sysUring       = 425
	sysPidfdOpen   = 434
	sysClone3      = 435
	sysPidfdGetfd  = 438
)

func outcome(what string) string {
	call := func(trap uintptr, args ...uintptr) syscall.Errno {
		args = append(args, make([]uintptr, 6-len(args))...)
		_, _, errno := syscall.RawSyscall6(trap, args[0], args[1], args[2], args[3], args[4], args[5])
		return errno
	}
	var errno syscall.Errno
	switch what {
	case "ids":
		return fmt.Sprint(os.Getuid(), os.Geteuid())
	case "getpid":
		errno = call(syscall.SYS_GETPID)
	case "ptrace-attach-1":
		errno = call(syscall.SYS_PTRACE, syscall.PTRACE_ATTACH, 1)
	case "ptrace-seize-1":
		errno = call(syscall.SYS_PTRACE, 0x4206, 1)
	case "process-vm-readv-1":
		errno = vmRead(1)
	case "pidfd-getfd-1":
		fd, _, e := syscall.RawSyscall(sysPidfdOpen, 1, 0, 0)
		if e != 0 {
			return "pidfd: " + e.Error()
		}
		errno = call(sysPidfdGetfd, fd, 3)
	case "prlimit-1":
		errno = prlimit(1)
	case "kcmp-1":
		errno = call(sysKcmp, uintptr(os.Getpid()), 1)
	case "io-uring-setup":
		errno = call(sysUring, 4)
	case "keyctl":
		errno = call(syscall.SYS_KEYCTL, 0, ^uintptr(2), 1)
	case "add-key":
		errno = call(syscall.SYS_ADD_KEY)
	case "bpf":
		errno = call(sysBPF)
	case "userfaultfd":
		errno = call(sysUserfaultfd)
	case "mount":
		errno, _ = errors.AsType[syscall.Errno](syscall.Mount("none", "/tmp", "tmpfs", 0, ""))
	case "unshare-user":
		errno = call(syscall.SYS_UNSHARE, syscall.CLONE_NEWUSER)
	case "clone-user":
		errno = call(syscall.SYS_CLONE, syscall.CLONE_NEWUSER|uintptr(syscall.SIGCHLD))
	case "clone3":
		errno = call(sysClone3)
	case "nf-socket":
		errno = call(syscall.SYS_SOCKET, syscall.AF_NETLINK, syscall.SOCK_RAW, 12)
	case "swapext":
		errno = call(syscall.SYS_IOCTL, 1, 0xC0C0586D)
	case "swapext-high":
		errno = call(syscall.SYS_IOCTL, 1, 1<<32|0xC0C0586D)
	case "tiocsti-high":
		errno = call(syscall.SYS_IOCTL, 1, 7<<32|syscall.TIOCSTI)
	case "plain-ioctl":
		errno = call(syscall.SYS_IOCTL, 1, syscall.TCGETS)
	case "future-call":
		errno = call(4000)
	case "x32-getpid":
		errno = call(0x40000000 | syscall.SYS_GETPID)
	default:
		return "unknown: " + what
	}
	if errno == 0 {
		return "none"
	}
	return errno.Error()
}
