package cgroup

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"sync"
	"syscall"
	"time"

	"github.com/sandsea/sandsea/api/errdefs"
	"github.com/sandsea/sandsea/internal/linux/cgroupfs"
	"github.com/sandsea/sandsea/internal/sandbox"
)

// Group is the control groups of one sandbox, one in each tree, under one name. It holds one descriptor.
type Group struct {
	m       *Manager
	id      string   // its name
	sandbox string   // what messages call it, if not by its name
	dir     *os.File // v2

	mu   sync.Mutex
	left map[string]bool // guarded by mu: groups of commands that were given back with processes in them
}

// ID is its name in every tree.
func (g *Group) ID() string { return g.id }

// Serve says which sandbox lives in a group that was made before there was one, for messages. It is called before any
// other goroutine knows of the Group.
func (g *Group) Serve(sandbox string) { g.sandbox = sandbox }

// object is what messages call it.
func (g *Group) object() string {
	if g.sandbox != "" {
		return "sandbox " + g.sandbox
	}
	return "sandbox " + g.id
}

// V2 is the open v2 directory, into which a child can be cloned. It stays the Group's.
func (g *Group) V2() *os.File { return g.dir }

// Number is what the kernel's programs know the v2 group by.
func (g *Group) Number() (uint64, error) {
	fi, err := g.dir.Stat()
	if err != nil {
		return 0, fmt.Errorf("number of the group of %s: %w", g.object(), err)
	}
	st, ok := fi.Sys().(*syscall.Stat_t)
	if !ok {
		return 0, fmt.Errorf("number of the group of %s: %w", g.object(), errors.ErrUnsupported)
	}
	return st.Ino, nil // its file handle; the same number on machines of 64 bits
}

// KillFile opens cgroup.kill of the whole sandbox; a write of "1" ends everything in it. The caller closes it.
func (g *Group) KillFile() (*os.File, error) { return cgroupfs.OpenWrite(g.dir, "cgroup.kill") }

// Own lets root of the sandbox, host id uidBase, clone processes between the sandbox's group and those of its commands:
// the kernel asks for the right to write cgroup.procs of both and of their common parent, which is this one. Nothing of
// it can be reached from inside, where no cgroup tree is mounted, but by descriptors that the edge hands in.
func (g *Group) Own(uidBase uint32) error {
	return cgroupfs.Chown(g.dir, "cgroup.procs", uidBase, uidBase)
}

// Kill ends every process of the sandbox, at once. Success when it is gone.
func (g *Group) Kill() error { return kill(g.dir) }

// Populated reports whether any process is left in the sandbox.
func (g *Group) Populated() (bool, error) {
	n, _, err := cgroupfs.ReadKey(g.dir, "cgroup.events", "populated")
	if cgroupfs.Gone(err) {
		return false, nil
	}
	return n != 0, err
}

// WaitEmpty returns when no process is left, or with the cause of ctx.
func (g *Group) WaitEmpty(ctx context.Context) error {
	for wait := newBackoff(); ; {
		populated, err := g.Populated()
		if err != nil || !populated {
			return err
		}
		if err := wait.sleep(ctx); err != nil {
			return fmt.Errorf("wait for the processes of %s to end: %w", g.object(), err)
		}
	}
}

// Pids lists the processes of the sandbox on the host, those of its commands included.
func (g *Group) Pids() ([]int, error) {
	pids, err := cgroupfs.Procs(g.dir)
	if err != nil {
		return nil, ignoreGone(err)
	}
	names, err := cgroupfs.Groups(g.dir)
	if err != nil {
		return nil, ignoreGone(err)
	}
	for _, n := range names {
		dir, err := cgroupfs.OpenAt(g.dir, n)
		if cgroupfs.Gone(err) {
			continue
		}
		if err != nil {
			return nil, err
		}
		more, err := cgroupfs.Procs(dir)
		dir.Close()
		if err != nil && !cgroupfs.Gone(err) {
			return nil, err
		}
		pids = append(pids, more...)
	}
	return pids, nil
}

// OOMKills counts the processes that the out-of-memory killer ended in this sandbox.
func (g *Group) OOMKills() (int64, error) {
	dir, p, err := g.open("memory")
	if err != nil {
		return 0, err
	}
	defer dir.Close()
	file := "memory.oom_control"
	if p.v2 {
		file = "memory.events"
	}
	n, ok, err := cgroupfs.ReadKey(dir, file, "oom_kill")
	if err == nil && !ok {
		err = fmt.Errorf("%s of %s has no oom_kill", file, g.object())
	}
	return n, err
}

// Usage is what a sandbox uses. MemoryPeak is 0 where the kernel does not keep it.
type Usage struct {
	Memory     int64 // bytes, page cache included
	MemoryPeak int64
	CPU        time.Duration
	Pids       int64
}

// Usage reads the counters.
func (g *Group) Usage() (Usage, error) {
	var u Usage
	cpu, err := cpuTime(g.dir)
	if err != nil {
		return u, err
	}
	u.CPU = cpu
	err = g.each(func(controller string, p place, dir *os.File) error {
		var err error
		switch {
		case controller == "pids":
			u.Pids, err = cgroupfs.ReadInt(dir, "pids.current")
		case controller == "memory" && p.v2:
			if u.Memory, err = cgroupfs.ReadInt(dir, "memory.current"); err != nil {
				return err
			}
			if u.MemoryPeak, err = cgroupfs.ReadInt(dir, "memory.peak"); errors.Is(err, fs.ErrNotExist) {
				err = nil
			}
		case controller == "memory":
			if u.Memory, err = cgroupfs.ReadInt(dir, "memory.usage_in_bytes"); err != nil {
				return err
			}
			u.MemoryPeak, err = cgroupfs.ReadInt(dir, "memory.max_usage_in_bytes")
		}
		return err
	})
	return u, err
}

// Update changes the limits in place: all of them, or on an error none. Exhausted when the sandbox uses more memory
// than it would be allowed.
func (g *Group) Update(l sandbox.Limits) error {
	if err := g.m.ready(g.object(), l); err != nil {
		return err
	}
	type old struct {
		s setting
		p place
	}
	var done []old
	err := g.each(func(controller string, p place, dir *os.File) error {
		want := settings(controller, p.v2, l, g.m.swapAccounted)
		if controller == "memory" && !p.v2 {
			// Memory with swap may never be below memory alone, so the order depends on the direction.
			now, err := cgroupfs.ReadInt(dir, "memory.limit_in_bytes")
			if err != nil {
				return err
			}
			if l.Memory > now && len(want) == 2 {
				want[0], want[1] = want[1], want[0]
			}
		}
		for _, s := range want {
			was := s
			var err error
			if was.value, err = cgroupfs.Read(dir, s.file); err != nil {
				if s.optional && errors.Is(err, fs.ErrNotExist) {
					continue
				}
				return err
			}
			if err := g.set(dir, s); err != nil {
				return err
			}
			done = append(done, old{was, p})
		}
		return nil
	})
	if err == nil {
		return nil
	}
	for i := len(done) - 1; i >= 0; i-- {
		dir, openErr := cgroupfs.OpenAt(done[i].p.parent, g.id)
		if openErr != nil {
			return errors.Join(err, openErr)
		}
		undoErr := g.set(dir, done[i].s)
		dir.Close()
		if undoErr != nil {
			return errors.Join(err, fmt.Errorf("and the old limits could not be put back: %w", undoErr))
		}
	}
	return err
}

// Remove kills what is left, removes the groups from every tree and closes the Group. Idempotent.
func (g *Group) Remove(ctx context.Context) error {
	err := g.m.Remove(ctx, g.id)
	if err == nil {
		g.Close()
	}
	return err
}

// Close gives up the descriptor and leaves the groups as they are.
func (g *Group) Close() error {
	if g.dir == nil {
		return nil
	}
	err := g.dir.Close()
	if errors.Is(err, os.ErrClosed) {
		return nil
	}
	return err
}

// set writes one limit; an error names the field of the request and the file.
func (g *Group) set(dir *os.File, s setting) error {
	err := cgroupfs.Write(dir, s.file, s.value)
	if err == nil || s.optional && errors.Is(err, fs.ErrNotExist) {
		return nil
	}
	if cgroupfs.Gone(err) && !cgroupfs.Exists(dir, "cgroup.procs") {
		return errdefs.New(errdefs.NotFound, g.object(), "its control group is gone").Wrap(err)
	}
	if cgroupfs.Busy(err) {
		return errdefs.New(errdefs.Exhausted, g.object(), "%s: it uses more than %s already", s.field, s.value).
			WithField(s.field, s.value).Wrap(err)
	}
	e := missing(g.object(), s.feature, fmt.Sprintf("%s cannot be enforced: %v", s.field, err))
	return e.WithField(s.field, "").Wrap(err)
}

// open opens the group in the tree of a controller.
func (g *Group) open(controller string) (*os.File, place, error) {
	p, ok := g.m.at[controller]
	if !ok {
		return nil, p, cannot(g.object(), controller, g.m.lacks[controller])
	}
	dir, err := cgroupfs.OpenAt(p.parent, g.id)
	if errors.Is(err, fs.ErrNotExist) {
		err = errdefs.New(errdefs.NotFound, g.object(), "its control group is gone").Wrap(err)
	}
	return dir, p, err
}

// each runs do for every controller that there is, with its directory open.
func (g *Group) each(do func(controller string, p place, dir *os.File) error) error {
	for _, c := range controllers {
		if _, ok := g.m.at[c]; !ok {
			continue
		}
		dir, p, err := g.open(c)
		if err != nil {
			return err
		}
		err = do(c, p, dir)
		dir.Close()
		if err != nil {
			return err
		}
	}
	return nil
}

func cpuTime(dir *os.File) (time.Duration, error) {
	n, ok, err := cgroupfs.ReadKey(dir, "cpu.stat", "usage_usec")
	if err == nil && !ok {
		err = fmt.Errorf("cpu.stat of %s has no usage_usec", dir.Name())
	}
	return time.Duration(n) * time.Microsecond, err
}

func ignoreGone(err error) error {
	if cgroupfs.Gone(err) {
		return nil
	}
	return err
}

// Exec is the group of one command and of all that descends from it. What meets its end, so that the group goes while the
// call is under way, is no error.
type Exec struct {
	// Dir is the open v2 directory, KillFile its open cgroup.kill. Both stay the Exec's.
	Dir      *os.File
	KillFile *os.File

	g    *Group
	name string
}

// Exec makes the group of command number, which root of the sandbox, host id uidBase, may clone into, or finds it again
// after a restart. Exhausted when the kernel has no room.
func (g *Group) Exec(number int64, uidBase uint32) (_ *Exec, err error) {
	name := fmt.Sprintf("e%d", number)
	g.removeLeft(name)
	if err := cgroupfs.Mkdir(g.dir, name); err != nil && !errors.Is(err, fs.ErrExist) {
		if cgroupfs.Gone(err) {
			return nil, errdefs.New(errdefs.NotFound, g.object(), "its control group is gone").Wrap(err)
		}
		return nil, wrapMkdir(fmt.Sprintf("command %d of %s", number, g.object()), err)
	}
	e := &Exec{g: g, name: name}
	defer func() {
		if err != nil {
			e.Close()
		}
	}()
	if e.Dir, err = cgroupfs.OpenAt(g.dir, name); err != nil {
		return nil, err
	}
	if err := cgroupfs.Chown(e.Dir, "cgroup.procs", uidBase, uidBase); err != nil {
		return nil, err
	}
	e.KillFile, err = cgroupfs.OpenWrite(e.Dir, "cgroup.kill")
	return e, err
}

// Kill ends every process of the command, at once and surely.
func (e *Exec) Kill() error { return over(kill(e.Dir)) }

// Signal sends sig to every process of the command, those it forks meanwhile included. SIGKILL is Kill.
func (e *Exec) Signal(sig int) error {
	if syscall.Signal(sig) == syscall.SIGKILL {
		return e.Kill()
	}
	return over(cgroupfs.Signal(e.Dir, sig))
}

// CPU is the time that the command and its descendants used, those that ended included.
func (e *Exec) CPU() (time.Duration, error) { return cpuTime(e.Dir) }

// Pids lists the command's processes on the host.
func (e *Exec) Pids() ([]int, error) {
	pids, err := cgroupfs.Procs(e.Dir)
	return pids, over(err)
}

// Populated reports whether any process is left.
func (e *Exec) Populated() (bool, error) {
	n, _, err := cgroupfs.ReadKey(e.Dir, "cgroup.events", "populated")
	return n != 0, over(err)
}

func over(err error) error {
	if errors.Is(err, os.ErrClosed) {
		return nil
	}
	return ignoreGone(err)
}

// Remove gives the group back and closes the Exec. Processes that are left live on in it: it goes when a later command
// finds it empty, or with the sandbox, and there are never more such groups than the sandbox has processes. (The kernel
// moves processes by number, and that of one that has ended may be a stranger's by then.) Idempotent.
func (e *Exec) Remove() error {
	ctx, stop := context.WithTimeoutCause(context.Background(), removeLimit, errBusy)
	defer stop()
	for wait := newBackoff(); ; {
		err := cgroupfs.Rmdir(e.g.dir, e.name)
		if err == nil || cgroupfs.Gone(err) {
			return e.Close()
		}
		if !cgroupfs.Busy(err) {
			return fmt.Errorf("remove group of command %s of %s: %w", e.name, e.g.object(), err)
		}
		if e.g.leave(e) {
			return e.Close()
		}
		if stop := wait.sleep(ctx); stop != nil {
			return fmt.Errorf("remove group of command %s of %s: %w", e.name, e.g.object(), stop)
		}
	}
}

// leave notes the group of a command in which processes are left; false when there is none, or nobody can tell.
func (g *Group) leave(e *Exec) bool {
	g.mu.Lock()
	known := g.left[e.name]
	g.mu.Unlock()
	if known {
		return true
	}
	if populated, err := e.Populated(); err != nil || !populated {
		return false
	}
	g.mu.Lock()
	defer g.mu.Unlock()
	if g.left == nil {
		g.left = map[string]bool{}
	}
	g.left[e.name] = true
	return true
}

// leftAtOnce is how many groups that were left are looked at for each command that starts.
const leftAtOnce = 4

// removeLeft removes groups that are empty by now. The named one is in use again.
func (g *Group) removeLeft(used string) {
	g.mu.Lock()
	delete(g.left, used)
	var names []string
	for name := range g.left { // in no order, so that each has its turn
		if names = append(names, name); len(names) == leftAtOnce {
			break
		}
	}
	g.mu.Unlock()
	for _, name := range names {
		if err := cgroupfs.Rmdir(g.dir, name); err == nil || cgroupfs.Gone(err) {
			g.mu.Lock()
			delete(g.left, name)
			g.mu.Unlock()
		}
	}
}

// Close gives up the descriptors and leaves the group as it is.
func (e *Exec) Close() error {
	for _, f := range []*os.File{e.Dir, e.KillFile} {
		if f != nil {
			f.Close()
		}
	}
	return nil
}
