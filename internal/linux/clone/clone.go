// Package clone starts a program in new namespaces and a cgroup, at a cost that does not grow with the memory of the
// caller.
//
// The standard library forks when it is to make a user namespace: it copies the page tables, and both sides pay for
// every page that they touch afterwards. Here the child shares the caller's memory until exec, and the caller's thread
// is not held up meanwhile, so that it can write the maps of ids. The child runs no Go: it is a loop of a few
// instructions in assembly that performs a list of system calls, which the caller prepared, and touches neither a
// stack nor any memory but that list.
//
// Order of calls: Start; the maps of ids and whatever else needs the child before it is somebody; Release; Exec. All
// functions may be called at once for different children.
package clone

import (
	"errors"
	"fmt"
	"os"
	"runtime"
	"strconv"

	"golang.org/x/sys/unix"
)

// Spec is one child.
type Spec struct {
	// Flags are the CLONE_NEW flags of the namespaces.
	Flags uint64
	// Owner is the user that owns a new user namespace, and to whom the kernel charges what is counted by user in it; 0
	// is the caller's. Nobody should be this user who is not inside.
	Owner uint32
	// Cgroup is the v2 cgroup directory in which the child is born.
	Cgroup *os.File
	// Tasks are open tasks files of v1 cgroups, which the child enters by itself before it is released.
	Tasks []*os.File
	// Path is the program, Argv what it is called with; its environment is empty.
	Path string
	Argv []string
	// Files are the child's descriptors, by number; nil is none. It has no others.
	Files []*os.File
}

// Child is a process that was cloned and waits to be released.
type Child struct {
	Pid   int
	Pidfd *os.File

	list *program
	gate *os.File // write end; the child goes on when it reads a byte
	keep []*os.File
}

// Start clones the child. It is a root without a map of ids in its user namespace, if it has one of its own, and does
// nothing until Release.
func Start(s Spec) (_ *Child, err error) {
	var gate [2]int
	if err := unix.Pipe2(gate[:], unix.O_CLOEXEC); err != nil {
		return nil, fmt.Errorf("clone: %w", err)
	}
	c := &Child{gate: os.NewFile(uintptr(gate[1]), "gate")}
	wait := os.NewFile(uintptr(gate[0]), "gate")
	defer func() {
		wait.Close()
		if err != nil {
			c.gate.Close()
			closeAll(c.keep)
		}
	}()
	// A source among the targets, of which the gate's is the last, could be overwritten before it is used.
	above := func(fd int) (int, error) {
		if fd > len(s.Files) {
			return fd, nil
		}
		up, err := unix.FcntlInt(uintptr(fd), unix.F_DUPFD_CLOEXEC, len(s.Files)+1)
		if err != nil {
			return -1, fmt.Errorf("clone: %w", err)
		}
		c.keep = append(c.keep, os.NewFile(uintptr(up), "source"))
		return up, nil
	}
	files := make([]int, len(s.Files))
	for to, f := range s.Files {
		files[to] = -1
		if f == nil {
			continue
		}
		if files[to], err = above(int(f.Fd())); err != nil {
			return nil, err
		}
	}
	hold, err := above(gate[0])
	if err != nil {
		return nil, err
	}
	if c.list, err = newProgram(s, files, hold); err != nil {
		return nil, fmt.Errorf("clone: %w", err)
	}
	args := &cloneArgs{
		flags: s.Flags | unix.CLONE_VM | unix.CLONE_PIDFD | unix.CLONE_CHILD_CLEARTID, exitSignal: uint64(unix.SIGCHLD),
	}
	if s.Cgroup != nil {
		args.flags |= unix.CLONE_INTO_CGROUP
		args.cgroup = uint64(s.Cgroup.Fd())
	}
	pid, pidfd, err := c.list.start(args, s.Owner)
	runtime.KeepAlive(s)
	if err != nil {
		return nil, fmt.Errorf("clone: %w", err)
	}
	c.Pid, c.Pidfd = pid, os.NewFile(uintptr(pidfd), "pidfd")
	return c, nil
}

// Release lets the child go on: it becomes root of its user namespace, which must have its maps by now, and calls exec.
func (c *Child) Release() error {
	_, err := c.gate.Write([]byte{1})
	if err != nil {
		return fmt.Errorf("release child %d: %w", c.Pid, err)
	}
	return nil
}

// Exec waits until the child has called exec or is gone, and says what failed. It must be called once for every child,
// released or not: one that was not ends here. The Pidfd stays the caller's.
func (c *Child) Exec() error {
	c.gate.Close()
	c.list.wait()
	closeAll(c.keep)
	if step, errno := c.list.failure(); errno != 0 {
		if step == stepGate {
			return errors.New("clone: the child was not released")
		}
		return fmt.Errorf("clone: step %s of child %s: %w", step, strconv.Itoa(c.Pid), errno)
	}
	return nil
}

func closeAll(files []*os.File) {
	for _, f := range files {
		f.Close()
	}
}
