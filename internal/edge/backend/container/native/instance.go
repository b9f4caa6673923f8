package native

import (
	"context"
	"errors"
	"fmt"
	"iter"
	"os"
	"slices"
	"sync"
	"syscall"
	"time"

	"github.com/sandsea/sandsea/api/errdefs"
	"github.com/sandsea/sandsea/internal/chronus"
	"github.com/sandsea/sandsea/internal/chronus/wire"
	"github.com/sandsea/sandsea/internal/edge/backend"
	"github.com/sandsea/sandsea/internal/edge/cgroup"
	"github.com/sandsea/sandsea/internal/edge/netslot"
	"github.com/sandsea/sandsea/internal/edge/uidrange"
	"github.com/sandsea/sandsea/internal/keeper"
	"github.com/sandsea/sandsea/internal/linux/affinity"
	"github.com/sandsea/sandsea/internal/linux/pidfd"
	"github.com/sandsea/sandsea/internal/sandbox"
)

// Instance is one running sandbox. It implements backend.Instance.
type Instance struct {
	b        *Backend
	id       sandbox.ID
	hard     time.Time
	lease    *uidrange.Lease
	group    *cgroup.Group
	pid      int
	identity uint64
	pidfd    *os.File
	control  *os.File
	line     *line
	enforce  map[string]string

	broke    chan struct{} // has room for one: the line ended by itself
	unwatch  context.CancelCauseFunc
	watching sync.WaitGroup
	done     chan struct{}
	end      sync.Once // closes done

	stopping sync.Mutex // held during Stop and Update

	mu      sync.Mutex
	limits  sandbox.Limits // guarded by mu
	cpus    []int          // guarded by mu: affinity; nil: all
	handle  backend.Handle // guarded by mu
	exit    backend.Exit   // guarded by mu: set once done is closed
	intent  bool           // guarded by mu: Stop is on its way
	gone    bool           // guarded by mu: descriptors are closed
	left    bool           // guarded by mu: the Backend was closed
	stopped bool           // guarded by mu: everything is given back
	oom     int64          // guarded by mu: kills seen so far
	oomAt   time.Time      // guarded by mu: when that number was seen first
	slot    *netslot.Slot  // guarded by mu: its link; nil: none
}

var _ backend.Instance = (*Instance)(nil)

// line tells its instance when it ends.
type line struct {
	*wire.Channel
	ended func()
}

func newLine(control *os.File, ended func()) *line { return &line{wire.New(control), ended} }

// Exits implements chronus.Channel.
func (l *line) Exits() iter.Seq2[chronus.Exit, error] {
	return func(yield func(chronus.Exit, error) bool) {
		for e, err := range l.Channel.Exits() {
			if err != nil {
				l.ended()
			}
			if !yield(e, err) {
				return
			}
		}
	}
}

// Handle implements backend.Instance. It changes with Update.
func (i *Instance) Handle() backend.Handle {
	i.mu.Lock()
	defer i.mu.Unlock()
	return i.handle
}

// Channel implements backend.Instance.
func (i *Instance) Channel() chronus.Channel { return i.line }

// UIDBase implements backend.Instance.
func (i *Instance) UIDBase() uint32 { return i.lease.Base }

// Pid is that of PID 1 on the host.
func (i *Instance) Pid() int { return i.pid }

// Enforcement implements backend.Instance.
func (i *Instance) Enforcement() map[string]string { return i.enforce }

// held is what the keeper is given, with a kill file that the caller closes. ok is false once the sandbox is being
// given back.
func (i *Instance) held() (_ keeper.Sandbox, ok bool, err error) {
	i.mu.Lock()
	gone, budget := i.gone, i.limits.Output
	i.mu.Unlock()
	if gone {
		return keeper.Sandbox{}, false, nil
	}
	kill, err := i.group.KillFile()
	if err != nil {
		return keeper.Sandbox{}, false, err
	}
	return keeper.Sandbox{
		ID: string(i.id), Control: i.control, Pidfd: i.pidfd, Kill: kill, Hard: i.hard, Budget: budget,
	}, true, nil
}

// givenBack is true once the sandbox is at its end, and not only this edge.
func (i *Instance) givenBack() bool {
	i.mu.Lock()
	defer i.mu.Unlock()
	return i.gone && !i.left
}

// lineEnded is called when the line to the inside ended.
func (i *Instance) lineEnded() {
	select {
	case i.broke <- struct{}{}:
	default:
	}
}

// watch starts to look for the end. It is false when the Backend is closing.
func (b *Backend) watch(i *Instance) bool {
	ctx, stop := context.WithCancelCause(context.Background())
	i.unwatch = stop
	b.mu.Lock()
	defer b.mu.Unlock()
	if b.closed {
		stop(errLeft)
		return false
	}
	i.watching.Add(1)
	b.wg.Go(func() {
		defer i.watching.Done()
		i.waitForEnd(ctx)
	})
	return true
}

var (
	errLeft  = errors.New("the edge gave the sandbox up")
	errGrace = errors.New("the grace is over")
)

// reportLimit is how long the ends of commands whose processes are gone may take to be told and taken, before PID 1 is
// killed.
const reportLimit = time.Second

// lineGrace is how long after the end of the line PID 1 may take to be gone before it counts as broken by itself.
const lineGrace = time.Second

func (i *Instance) waitForEnd(ctx context.Context) {
	dead := make(chan error, 1)
	var wg sync.WaitGroup
	defer wg.Wait()
	ctx, stop := context.WithCancelCause(ctx)
	defer stop(errLeft)
	wg.Go(func() { dead <- pidfd.Wait(ctx, i.pidfd) })
	var err error
	select {
	case err = <-dead:
	case <-i.broke:
		select {
		case err = <-dead:
		case <-time.After(lineGrace):
			i.finish(backend.Exit{Cause: sandbox.CauseAgentDestroyed, Detail: "the line to its inside broke"})
			return
		}
	}
	if ctx.Err() != nil {
		return
	}
	if err != nil {
		i.b.log.Error("cannot watch a sandbox", "sandbox", i.id, "err", err)
		i.finish(backend.Exit{Cause: sandbox.CauseInfraUnknown, Detail: "it could not be watched"})
		return
	}
	e := i.evidence(ctx)
	if ctx.Err() == nil { // else the edge is closing, and its successor will look anew
		i.finish(e)
	}
}

// finish sets how it ended, the first time.
func (i *Instance) finish(e backend.Exit) {
	i.end.Do(func() {
		i.mu.Lock()
		if i.intent {
			e = backend.Exit{Cause: sandbox.CauseStopped}
		}
		i.exit = e
		i.mu.Unlock()
		close(i.done)
	})
}

// Done implements backend.Instance.
func (i *Instance) Done() <-chan struct{} { return i.done }

// Exit implements backend.Instance; it is empty before Done is closed.
func (i *Instance) Exit() backend.Exit {
	i.mu.Lock()
	defer i.mu.Unlock()
	return i.exit
}

// OOMKills implements backend.Instance.
func (i *Instance) OOMKills() (int64, error) {
	n, err := i.group.OOMKills()
	if err != nil {
		return 0, err
	}
	i.mu.Lock()
	defer i.mu.Unlock()
	if n > i.oom {
		i.oom, i.oomAt = n, time.Now()
	}
	return n, nil
}

// Usage implements backend.Instance.
func (i *Instance) Usage(ctx context.Context) (backend.Usage, error) {
	g, err := i.group.Usage()
	if err != nil {
		return backend.Usage{}, err
	}
	disk, err := i.b.cfg.Uppers.Usage(string(i.id))
	if err != nil {
		return backend.Usage{}, err
	}
	return backend.Usage{Memory: g.Memory, MemoryPeak: g.MemoryPeak, CPU: g.CPU, Pids: g.Pids, Disk: disk}, ctx.Err()
}

// Update implements backend.Instance. Open files and output are fixed at the start: a change of them is refused.
func (i *Instance) Update(ctx context.Context, l sandbox.Limits) error {
	i.stopping.Lock()
	defer i.stopping.Unlock()
	i.mu.Lock()
	old, cpus, stopped := i.limits, i.cpus, i.intent || i.gone
	i.mu.Unlock()
	switch {
	case stopped:
		return errdefs.New(errdefs.NotFound, object(i.id), "it is ending")
	case l.OpenFiles != old.OpenFiles:
		return errdefs.New(errdefs.FailedPrecondition, object(i.id), "its limit of open files is fixed at its start").
			WithField("limits.open_files", "")
	case l.Output != old.Output:
		return errdefs.New(errdefs.FailedPrecondition, object(i.id), "its limit of output is fixed at its start").
			WithField("limits.output_bytes", "")
	}
	if err := i.group.Update(l); err != nil {
		return err
	}
	if err := i.b.cfg.Uppers.Update(string(i.id), l.Disk, i.lease.Base); err != nil {
		return errors.Join(err, i.group.Update(old))
	}
	// More processors than it is pinned to: let it have them. Fewer: the quota alone holds.
	if cpus != nil && cpusFor(l.CPUMillis) > len(cpus) {
		cpus = i.b.pin(l.CPUMillis)
		if err := i.repin(cpus); err != nil {
			return errors.Join(err, i.group.Update(old), i.b.cfg.Uppers.Update(string(i.id), old.Disk, i.lease.Base))
		}
	}
	i.mu.Lock()
	defer i.mu.Unlock()
	i.limits, i.cpus = l, cpus
	var err error
	i.handle, err = i.encode()
	return err
}

// repin sets the affinity of all that runs, twice since what is forked meanwhile inherits the old one.
func (i *Instance) repin(cpus []int) error {
	if cpus == nil {
		cpus = i.b.cpus
	}
	for range 2 {
		pids, err := i.group.Pids()
		if err != nil {
			return err
		}
		for _, pid := range pids {
			if err := affinity.Set(pid, cpus); err != nil && !errors.Is(err, os.ErrNotExist) {
				return err
			}
		}
	}
	return nil
}

// Stop implements backend.Instance.
func (i *Instance) Stop(ctx context.Context, grace time.Duration) (backend.Exit, error) {
	i.stopping.Lock()
	defer i.stopping.Unlock()
	i.mu.Lock()
	stopped, left, exit := i.stopped, i.left, i.exit
	i.mu.Unlock()
	if stopped {
		return exit, nil
	}
	if left {
		return backend.Exit{}, errdefs.New(errdefs.Unavailable, object(i.id), "this edge has given it up")
	}
	if err := i.kill(ctx, grace); err != nil {
		return backend.Exit{}, fmt.Errorf("stop %s: %w", i.id, err)
	}
	<-i.done
	if err := i.release(ctx); err != nil {
		return backend.Exit{}, fmt.Errorf("stop %s: %w", i.id, err)
	}
	i.mu.Lock()
	defer i.mu.Unlock()
	i.stopped = true
	return i.exit, nil
}

// kill ends every process. Afterwards done is closed.
func (i *Instance) kill(ctx context.Context, grace time.Duration) error {
	i.mu.Lock()
	gone := i.gone
	i.mu.Unlock()
	if gone { // a Stop before this one came as far as that
		return i.group.Kill()
	}
	select {
	case <-i.done:
	default:
		dead, err := pidfd.Done(i.pidfd)
		if err != nil {
			return err
		}
		if dead {
			// It ended by itself; the watcher is about to say how.
			select {
			case <-i.done:
			case <-ctx.Done():
				return context.Cause(ctx)
			}
			break
		}
		if grace > 0 {
			// What cannot be asked to end is ended all the same.
			if err := i.terminate(ctx, grace); err != nil {
				i.b.log.Warn("processes of a sandbox could not be asked to end", "sandbox", i.id, "err", err)
			}
		}
		i.mu.Lock()
		i.intent = true
		i.mu.Unlock()
	}
	if err := i.group.Kill(); err != nil {
		return err
	}
	wait, stop := context.WithTimeoutCause(ctx, killLimit, errors.New("processes that were killed do not end"))
	defer stop()
	if err := pidfd.Wait(wait, i.pidfd); err != nil {
		return err
	}
	if err := i.group.WaitEmpty(wait); err != nil {
		return err
	}
	i.finish(backend.Exit{Cause: sandbox.CauseStopped})
	return nil
}

// terminate sends TERM to every process but PID 1, once each, until none is left or grace is over.
func (i *Instance) terminate(ctx context.Context, grace time.Duration) error {
	ctx, stop := context.WithTimeoutCause(ctx, grace, errGrace)
	defer stop()
	told := map[int]bool{i.pid: true}
	wait := time.Millisecond
	for {
		pids, err := i.group.Pids()
		if err != nil {
			return err
		}
		others := slices.DeleteFunc(slices.Clone(pids), func(p int) bool { return p == i.pid })
		if len(others) == 0 {
			i.reported(ctx)
			return nil
		}
		if err := i.signal(slices.DeleteFunc(others, func(p int) bool { return told[p] }), syscall.SIGTERM); err != nil {
			return err
		}
		for _, p := range pids {
			told[p] = true
		}
		select {
		case <-ctx.Done():
			return nil // the caller kills
		case <-time.After(wait):
			wait = min(2*wait, 50*time.Millisecond)
		}
	}
}

// reported returns when the end of every command whose processes are gone has been told and acknowledged: what PID 1 has
// seen and nobody has taken dies with it.
func (i *Instance) reported(ctx context.Context) {
	ctx, stop := context.WithTimeoutCause(ctx, reportLimit, errGrace)
	defer stop()
	wait := time.Millisecond
	for {
		_, list, err := i.line.Hello(ctx)
		if err == nil && len(list) == 0 || err != nil && !errors.Is(err, errdefs.FailedPrecondition) {
			return
		}
		select {
		case <-ctx.Done():
			return
		case <-i.done:
			return
		case <-time.After(wait):
			wait = min(2*wait, 20*time.Millisecond)
		}
	}
}

// signalBatch is how many processes are held by a descriptor at a time: how many there are is the sandbox's choice, and
// the descriptors are the whole node's.
const signalBatch = 64

// signal reaches processes that are certainly the sandbox's: a number may be another's by the time it is used, so each
// is named by a pidfd first and looked for in the group once more.
func (i *Instance) signal(pids []int, sig syscall.Signal) error {
	for batch := range slices.Chunk(pids, signalBatch) {
		if err := i.signalThese(batch, sig); err != nil {
			return err
		}
	}
	return nil
}

func (i *Instance) signalThese(pids []int, sig syscall.Signal) error {
	named := map[int]*os.File{}
	defer func() {
		for _, f := range named {
			f.Close()
		}
	}()
	for _, pid := range pids {
		f, err := pidfd.Open(pid)
		if errors.Is(err, os.ErrProcessDone) {
			continue
		}
		if err != nil {
			return err
		}
		named[pid] = f
	}
	if len(named) == 0 {
		return nil
	}
	still, err := i.group.Pids()
	if err != nil {
		return err
	}
	for _, pid := range still {
		if f := named[pid]; f != nil {
			if err := pidfd.Signal(f, sig); err != nil && !errors.Is(err, os.ErrProcessDone) {
				return err
			}
		}
	}
	return nil
}

// release gives everything back, in reverse. Each step may be repeated.
func (i *Instance) release(ctx context.Context) error {
	i.leave()
	k, _ := i.b.keeper()
	if err := releaseKept(ctx, k, i.id); err != nil {
		return err
	}
	if err := i.b.cfg.Uppers.Release(string(i.id)); err != nil {
		return err
	}
	if err := i.b.dev.remove(i.group.ID()); err != nil {
		return err
	}
	if err := i.unlink(); err != nil {
		return err
	}
	if err := i.group.Remove(ctx); err != nil {
		return err
	}
	i.b.disown(i.group.ID())
	i.lease.Give()
	i.b.forget(i.id)
	return nil
}

// abandon is leave for an edge that ends while the sandbox lives on.
func (i *Instance) abandon() {
	i.mu.Lock()
	i.left = true
	i.mu.Unlock()
	i.leave()
	_ = i.group.Close()
}

// leave closes what this edge holds. The group stays open until the end, since killing needs it.
func (i *Instance) leave() {
	i.mu.Lock()
	gone := i.gone
	i.gone = true
	i.mu.Unlock()
	if gone {
		return
	}
	if i.unwatch != nil {
		i.unwatch(errLeft)
	}
	i.watching.Wait()
	_ = i.line.Close()
	i.pidfd.Close()
	i.control.Close()
}

// releaseKept lets the keeper forget a sandbox; one that is away holds nothing.
func releaseKept(ctx context.Context, k keeper.Client, id sandbox.ID) error {
	err := k.Release(ctx, keeper.Key{Sandbox: string(id)})
	if errors.Is(err, errdefs.Unavailable) || errors.Is(err, errdefs.NotFound) {
		return nil
	}
	return err
}

// Exec is the control group of one command. It implements backend.Exec.
type Exec struct {
	i *Instance
	x *cgroup.Exec
}

var _ backend.Exec = (*Exec)(nil)

// NewExec implements backend.Instance.
func (i *Instance) NewExec(_ context.Context, number int64) (backend.Exec, error) {
	x, err := i.group.Exec(number, i.lease.Base)
	if err != nil {
		return nil, err
	}
	return &Exec{i, x}, nil
}

// Stdio implements backend.Exec.
func (e *Exec) Stdio() chronus.Stdio { return chronus.Stdio{Cgroup: e.x.Dir} }

// Kill implements backend.Exec.
func (e *Exec) Kill() error { return e.x.Kill() }

// KillFile implements backend.Exec.
func (e *Exec) KillFile() *os.File { return e.x.KillFile }

// Signal implements backend.Exec.
func (e *Exec) Signal(sig int) error { return e.x.Signal(sig) }

// CPU implements backend.Exec.
func (e *Exec) CPU() (time.Duration, error) { return e.x.CPU() }

// Pids implements backend.Exec.
func (e *Exec) Pids() ([]int, error) { return e.x.Pids() }

// Remove implements backend.Exec.
func (e *Exec) Remove() error {
	e.i.mu.Lock()
	stopped := e.i.stopped
	e.i.mu.Unlock()
	if stopped { // the group went with the sandbox
		return e.x.Close()
	}
	return e.x.Remove()
}
