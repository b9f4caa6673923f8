package native

import (
	"context"
	"crypto/rand"
	"errors"
	"fmt"
	"os"
	"slices"
	"strings"
	"sync"
	"time"

	"github.com/sandsea/sandsea/api/errdefs"
	"github.com/sandsea/sandsea/internal/edge/cgroup"
	"github.com/sandsea/sandsea/internal/edge/netslot"
	"github.com/sandsea/sandsea/internal/edge/uidrange"
	"github.com/sandsea/sandsea/internal/linux/mount"
	"github.com/sandsea/sandsea/internal/linux/pidfd"
	"github.com/sandsea/sandsea/internal/linux/scm"
	"github.com/sandsea/sandsea/internal/sandbox"
	"github.com/sandsea/sandsea/internal/spawner"
)

// shell is a sandbox without a root, limits or a name: PID 1 in its namespaces and groups, with everything mounted that
// does not depend on the sandbox. Nothing of a workload has run in it.
type shell struct {
	lease    *uidrange.Lease
	group    *cgroup.Group
	limits   sandbox.Limits // those in force on the group
	pid      int
	identity uint64
	pidfd    *os.File
	control  *os.File
	line     *line
	slot     *netslot.Slot // its link to the gate, walls closed; nil: none
	broke    chan struct{} // has room for one: the line ended

	prepared chan error // one answer: it is prepared, or why not
	wg       sync.WaitGroup
	taken    undo // what takes it back
}

// newShell makes a shell in which l is in force, with a link if asked to, for sandbox id if there is one already. It may
// still be preparing itself when it comes: ready waits for that. On an error nothing is left.
func (b *Backend) newShell(ctx context.Context, id sandbox.ID, l sandbox.Limits, network bool, stage func(string),
) (_ *shell, err error) {
	s := &shell{limits: l, broke: make(chan struct{}, 1), prepared: make(chan error, 1)}
	defer func() {
		if err != nil {
			err = b.explainOOM(id, s.group, l, err)
			b.discard(ctx, s)
		}
	}()
	if s.lease, err = b.cfg.Ranges.Take(); err != nil {
		return nil, err
	}
	s.taken.push(func(context.Context) error { s.lease.Give(); return nil })
	stage("range")
	name := b.nameGroup()
	b.own(name) // before there is one, for Sweep
	s.taken.push(func(context.Context) error { b.disown(name); return nil })
	if s.group, err = b.newGroup(name, s); err != nil {
		return nil, err
	}
	s.taken.push(func(ctx context.Context) error { return s.group.Remove(ctx) }) // whichever it is by then
	stage("cgroup")
	dev, err := b.dev.add(name)
	if err != nil {
		return nil, err
	}
	defer dev.Close()
	s.taken.push(func(context.Context) error { return b.dev.remove(name) })
	if err := mount.Idmap(dev, s.lease.UserNS(), mount.ReadOnly); err != nil {
		return nil, err
	}
	sys, err := mount.Clone(b.sys, false)
	if err != nil {
		return nil, err
	}
	defer sys.Close()
	stage("dev,sys")
	child, err := b.spawn(ctx, s, spawner.Spec{ID: name, Dev: dev, Sys: sys, UIDBase: s.lease.Base})
	if err != nil {
		return nil, err
	}
	stage("spawn")
	s.pid, s.pidfd, s.control = child.Pid, child.Pidfd, child.Control
	s.taken.push(func(ctx context.Context) error {
		err := s.kill(ctx)
		s.pidfd.Close()
		s.control.Close()
		return err
	})
	if s.identity, err = pidfd.Identity(s.pidfd); err != nil {
		return nil, err
	}
	s.line = newLine(s.control, s.ended)
	s.taken.push(func(context.Context) error {
		err := s.line.Close()
		s.wg.Wait()
		return err
	})
	s.wg.Go(func() { s.prepared <- s.line.Prepare(ctx) })
	if network {
		if err := b.connect(ctx, id, s); err != nil {
			return nil, err
		}
		stage("link")
	}
	return s, nil
}

// ended is called when the line ends.
func (s *shell) ended() {
	select {
	case s.broke <- struct{}{}:
	default:
	}
}

// ready returns once it is prepared.
func (s *shell) ready(ctx context.Context) error {
	select {
	case err := <-s.prepared:
		s.prepared <- err
		return err
	case <-ctx.Done():
		return context.Cause(ctx)
	}
}

// alive is false when it died while it waited.
func (s *shell) alive() bool {
	dead, err := pidfd.Done(s.pidfd)
	return err == nil && !dead
}

// kill ends everything in it.
func (s *shell) kill(ctx context.Context) error {
	return errors.Join(s.group.Kill(), pidfd.Wait(ctx, s.pidfd))
}

// discard takes a shell back. Sweep finds by name what is left.
func (b *Backend) discard(ctx context.Context, s *shell) {
	if err := s.taken.run(ctx); err != nil {
		b.log.Error("what a start had made could not be taken back whole", "err", err)
	}
}

// groupName makes the name of a control group. No sandbox id begins with a w.
func groupName() string { return "w" + strings.ToLower(rand.Text()) }

func (b *Backend) own(group string) {
	b.mu.Lock()
	defer b.mu.Unlock()
	b.groups[group] = true
}

func (b *Backend) disown(group string) {
	b.mu.Lock()
	defer b.mu.Unlock()
	delete(b.groups, group)
}

// newGroup makes the control groups of a shell, with all limits in force.
func (b *Backend) newGroup(name string, s *shell) (*cgroup.Group, error) {
	g, err := b.cfg.Cgroups.Create(name, s.limits)
	if err != nil {
		return nil, err
	}
	if err := g.Own(s.lease.Base); err != nil {
		return nil, errors.Join(fmt.Errorf("control group %s: %w", name, err), g.Remove(context.Background()))
	}
	return g, nil
}

// spawn forks PID 1. A spawner that dies meanwhile may or may not have forked: what is in the group is killed, and it
// is tried once more, in a new group. (The kernel, as of Linux 6.18, kills whatever is cloned into a group whose
// cgroup.kill was ever used, if it comes from a group where that was used less often.)
func (b *Backend) spawn(ctx context.Context, s *shell, spec spawner.Spec) (spawner.Child, error) {
	for try := 0; ; try++ {
		tasks, err := s.group.Tasks()
		if err != nil {
			return spawner.Child{}, err
		}
		spec.Cgroup, spec.Tasks = s.group.V2(), tasks
		ch, err := b.cfg.Spawner.Spawn(ctx, spec)
		scm.CloseFiles(tasks)
		if err == nil || try > 0 || ctx.Err() != nil || !errors.Is(err, errdefs.Unavailable) {
			return ch, err
		}
		b.log.Warn("spawner lost, trying again", "group", s.group.ID(), "err", err)
		if err := s.group.Remove(ctx); err != nil {
			return spawner.Child{}, err
		}
		g, err := b.newGroup(s.group.ID(), s)
		if err != nil {
			return spawner.Child{}, err
		}
		s.group = g
	}
}

const (
	// refillPause is how long the pool rests after a shell that could not be made.
	refillPause = time.Second
	// refillLimit bounds the making of one.
	refillLimit = 10 * time.Second
)

var (
	errRefill = errors.New("a sandbox could not be made ready ahead in time")
	errPool   = errors.New("the pool is closed")
)

// pool keeps shells ready. One goroutine makes them, one at a time, and only while no start is under way: on a busy node
// a shell made ahead costs a start that waits as much as it saves the next. A start that finds none ready takes the one in
// the making, if no other start has, else it makes its own. Those with a link and those without are apart: a sandbox
// without network has no link, one with network may get one late.
type pool struct {
	size int
	b    *Backend
	wake chan struct{} // has room for one: look again
	stop context.CancelCauseFunc
	wg   sync.WaitGroup

	mu      sync.Mutex
	running bool           // guarded by mu: the goroutine has been started
	closed  bool           // guarded by mu
	ready   []*shell       // guarded by mu: the oldest first
	making  bool           // guarded by mu
	waiter  chan *shell    // guarded by mu: gets the one in the making, or nil; nil: nobody
	starts  int            // guarded by mu: under way
	limits  sandbox.Limits // guarded by mu: of the last start, which the next is most likely to want
	network bool           // guarded by mu: likewise
	linked  bool           // guarded by mu: the one in the making has a link
}

// shellLimits are those of shells made ahead when no start has told better, and the least that a shell gets.
var shellLimits = sandbox.Limits{Memory: 64 << 20, CPUMillis: 1000, Pids: 64}

// open starts to fill the pool. Idempotent.
func (p *pool) open() {
	p.mu.Lock()
	defer p.mu.Unlock()
	if p.size <= 0 || p.running || p.closed {
		return
	}
	p.running = true
	ctx, stop := context.WithCancelCause(context.Background())
	p.stop = stop
	p.wg.Go(func() { p.fill(ctx) })
}

func (p *pool) poke() {
	select {
	case p.wake <- struct{}{}:
	default:
	}
}

// begin says that a start with these limits is under way until end is called, once.
func (p *pool) begin(l sandbox.Limits, network bool) (end func()) {
	p.mu.Lock()
	defer p.mu.Unlock()
	p.starts++
	p.network = network && p.b.cfg.Gate != nil
	if l.Memory >= shellLimits.Memory && l.CPUMillis >= shellLimits.CPUMillis && l.Pids >= shellLimits.Pids {
		p.limits = sandbox.Limits{Memory: l.Memory, CPUMillis: l.CPUMillis, Pids: l.Pids}
	}
	return func() {
		p.mu.Lock()
		p.starts--
		p.mu.Unlock()
		p.poke()
	}
}

// take gives a prepared shell, or nil if there is none to be had soon. Where a link is wanted, one without may come.
func (p *pool) take(ctx context.Context, network bool) *shell {
	for {
		p.mu.Lock()
		at := slices.IndexFunc(p.ready, func(s *shell) bool { return (s.slot != nil) == network })
		if at < 0 && network && len(p.ready) > 0 {
			at = 0
		}
		if at < 0 {
			return p.joinLocked(ctx, network)
		}
		s := p.ready[at]
		p.ready = slices.Delete(p.ready, at, at+1)
		p.mu.Unlock()
		if s.alive() {
			return s
		}
		p.b.log.Warn("a process that was made ready ahead has died", "group", s.group.ID())
		p.b.discard(ctx, s)
	}
}

// joinLocked waits for the one in the making. It unlocks.
func (p *pool) joinLocked(ctx context.Context, network bool) *shell {
	if !p.making || p.waiter != nil || p.linked && !network {
		p.mu.Unlock()
		return nil
	}
	ch := make(chan *shell, 1)
	p.waiter = ch
	p.mu.Unlock()
	select {
	case s := <-ch:
		return s
	case <-ctx.Done():
	}
	p.mu.Lock()
	if p.waiter == ch {
		p.waiter = nil
	}
	p.mu.Unlock()
	select {
	case s := <-ch:
		return s // the start fails and takes it back
	default:
		return nil
	}
}

// fill is the goroutine.
func (p *pool) fill(ctx context.Context) {
	for {
		p.mu.Lock()
		alike := 0
		for _, s := range p.ready {
			if (s.slot != nil) == p.network {
				alike++
			}
		}
		want := alike < p.size && p.starts == 0
		p.making, p.linked = want, p.network
		l, network := p.limits, p.network
		p.mu.Unlock()
		if !want {
			select {
			case <-p.wake:
				continue
			case <-ctx.Done():
				return
			}
		}
		s, err := p.make(ctx, l, network)
		p.mu.Lock()
		p.making = false
		waiter := p.waiter
		p.waiter = nil
		switch {
		case waiter != nil:
			waiter <- s // has room; nil after an error
		case err == nil && !p.closed:
			p.ready = append(p.ready, s)
			s = nil
		}
		p.mu.Unlock()
		if waiter == nil && s != nil { // closed meanwhile
			p.b.discard(ctx, s)
		}
		if ctx.Err() != nil {
			return
		}
		if err != nil {
			p.b.log.Warn("no sandbox can be made ready ahead", "err", err)
			select {
			case <-time.After(refillPause):
			case <-ctx.Done():
				return
			}
		}
	}
}

func (p *pool) make(ctx context.Context, l sandbox.Limits, network bool) (*shell, error) {
	ctx, stop := context.WithTimeoutCause(ctx, refillLimit, errRefill)
	defer stop()
	s, err := p.b.newShell(ctx, "", l, network, func(string) {})
	if err != nil {
		return nil, err
	}
	if err := s.ready(ctx); err != nil {
		p.b.discard(ctx, s)
		return nil, err
	}
	return s, nil
}

// Ready is how many sandboxes are made ready ahead now, those without a link and those with one.
func (b *Backend) Ready() (plain, linked int) {
	b.warm.mu.Lock()
	defer b.warm.mu.Unlock()
	for _, s := range b.warm.ready {
		if s.slot == nil {
			plain++
		} else {
			linked++
		}
	}
	return plain, linked
}

// names are the control groups of the shells that are ready.
func (p *pool) names() []string {
	p.mu.Lock()
	defer p.mu.Unlock()
	var out []string
	for _, s := range p.ready {
		out = append(out, s.group.ID())
	}
	return out
}

// close ends the filling and takes back what is ready. Idempotent.
func (p *pool) close() {
	p.mu.Lock()
	p.closed = true
	stop := p.stop
	p.mu.Unlock()
	if stop != nil {
		stop(errPool)
	}
	p.wg.Wait()
	p.mu.Lock()
	all := p.ready
	p.ready = nil
	p.mu.Unlock()
	for _, s := range all {
		p.b.discard(context.Background(), s)
	}
}
