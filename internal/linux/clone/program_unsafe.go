package clone

import (
	"math"
	"runtime"
	"sync/atomic"
	"syscall"
	"unsafe"

	"golang.org/x/sys/unix"
)

// cloneArgs is struct clone_args of clone3(2).
type cloneArgs struct {
	flags      uint64
	pidfd      uint64
	childTID   uint64
	_          uint64 // parentTID
	exitSignal uint64
	_          [5]uint64 // stack, its size, TLS, and two about chosen pids
	cgroup     uint64
}

// call is one system call of the child; the layout is known to the assembly. The child goes on when the result is at
// least min, else it stores the result there and ends.
type call struct {
	nr, a1, a2, a3, a4, a5 uintptr
	min                    int
	failed                 int // result of a call that failed
}

// stepName says what a call is for.
type stepName string

const (
	stepEnter   stepName = "enter a v1 cgroup"
	stepGate    stepName = "wait"
	stepSession stepName = "setsid"
	stepGroups  stepName = "setgroups"
	stepGID     stepName = "setresgid"
	stepUID     stepName = "setresuid"
	stepFile    stepName = "dup"
	stepExec    stepName = "exec"
)

// program is all the memory that the child looks at. It must stay where it is until the child has called exec or is
// gone: the heap does not move, and a reference is held until wait returns.
type program struct {
	calls []call
	names []stepName
	// inMemory is 1 until the kernel clears it, when the child leaves our memory by exec or by its end.
	inMemory atomic.Uint32
	pidfd    int32

	path *byte
	argv []*byte
	env  []*byte
	byte byte // what the gate gave
	self byte // "0", which means the thread that writes it
}

func newProgram(s Spec, files []int, gate int) (*program, error) {
	p := &program{env: []*byte{nil}, self: '0'}
	var err error
	if p.path, err = unix.BytePtrFromString(s.Path); err != nil {
		return nil, err
	}
	for _, a := range s.Argv {
		b, err := unix.BytePtrFromString(a)
		if err != nil {
			return nil, err
		}
		p.argv = append(p.argv, b)
	}
	p.argv = append(p.argv, nil)
	add := func(name stepName, least int, nr uintptr, args ...uintptr) {
		args = append(args, make([]uintptr, 5-len(args))...)
		p.calls = append(p.calls, call{nr: nr, a1: args[0], a2: args[1], a3: args[2], a4: args[3], a5: args[4], min: least})
		p.names = append(p.names, name)
	}
	for _, t := range s.Tasks {
		add(stepEnter, 1, unix.SYS_WRITE, t.Fd(), uintptr(unsafe.Pointer(&p.self)), 1)
	}
	// Before it waits, the child lets go of everything that is not its own: with copies of our descriptors it would keep
	// our sockets open after our death, and, of children that wait at the same time, each the other's gate.
	for to, from := range files {
		if from >= 0 {
			add(stepFile, 0, unix.SYS_DUP3, uintptr(from), uintptr(to))
		} else {
			add(stepFile, math.MinInt, unix.SYS_CLOSE, uintptr(to)) // most likely there is none
		}
	}
	last := uintptr(len(files))
	add(stepFile, 0, unix.SYS_DUP3, uintptr(gate), last, unix.O_CLOEXEC)
	add(stepFile, 0, unix.SYS_CLOSE_RANGE, last+1, math.MaxInt32)
	add(stepGate, 1, unix.SYS_READ, last, uintptr(unsafe.Pointer(&p.byte)), 1)
	add(stepSession, 0, unix.SYS_SETSID)
	add(stepGroups, 0, unix.SYS_SETGROUPS)
	add(stepGID, 0, unix.SYS_SETRESGID)
	add(stepUID, 0, unix.SYS_SETRESUID)
	add(stepExec, 0, unix.SYS_EXECVE, uintptr(unsafe.Pointer(p.path)), uintptr(unsafe.Pointer(&p.argv[0])),
		uintptr(unsafe.Pointer(&p.env[0])))
	return p, nil
}

// start clones. Every signal is blocked while it does, so that the child is born with all blocked: a handler would run
// Go in it. The program that it becomes sets its own mask.
func (p *program) start(args *cloneArgs, owner uint32) (pid, pidfd int, err error) {
	p.pidfd = -1
	p.inMemory.Store(1)
	args.pidfd = uint64(uintptr(unsafe.Pointer(&p.pidfd)))
	args.childTID = uint64(uintptr(unsafe.Pointer(&p.inMemory)))

	runtime.LockOSThread()
	defer runtime.UnlockOSThread()
	all, old := ^uint64(0), uint64(0)
	if _, _, errno := syscall.RawSyscall6(unix.SYS_RT_SIGPROCMASK, unix.SIG_SETMASK, uintptr(unsafe.Pointer(&all)),
		uintptr(unsafe.Pointer(&old)), 8, 0, 0); errno != 0 {
		return 0, 0, errno
	}
	var r int
	err = asOwner(owner, func() { r = clone3(args, unsafe.Sizeof(*args), &p.calls[0]) })
	// The old mask is valid, so this cannot go wrong.
	_, _, _ = syscall.RawSyscall6(unix.SYS_RT_SIGPROCMASK, unix.SIG_SETMASK, uintptr(unsafe.Pointer(&old)), 0, 8, 0, 0)
	runtime.KeepAlive(args)
	if err != nil {
		return 0, 0, err
	}
	if r < 0 {
		return 0, 0, syscall.Errno(-r)
	}
	return r, int(p.pidfd), nil
}

// wait returns when the child has left our memory.
func (p *program) wait() {
	const futexWait = 0 // not private: the kernel wakes so
	for p.inMemory.Load() != 0 {
		// Errors (EAGAIN, EINTR) mean: look again.
		_, _, _ = syscall.Syscall6(unix.SYS_FUTEX, uintptr(unsafe.Pointer(&p.inMemory)), futexWait, 1, 0, 0, 0)
	}
	runtime.KeepAlive(p)
}

// failure tells the call that failed, after wait.
func (p *program) failure() (stepName, syscall.Errno) {
	for i, c := range p.calls {
		if c.failed != 0 {
			if c.failed > 0 { // fewer bytes than wanted
				return p.names[i], syscall.EIO
			}
			return p.names[i], syscall.Errno(-c.failed)
		}
	}
	return "", 0
}

// clone3 is clone3(2) whose child performs calls. It returns in the caller only: a pid, or a negative error number.
//
//go:noescape
func clone3(args *cloneArgs, size uintptr, calls *call) int
