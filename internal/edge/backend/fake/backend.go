package fake

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"os"
	"sync"
	"syscall"
	"time"

	"github.com/sandsea/sandsea/api/errdefs"
	"github.com/sandsea/sandsea/internal/chronus"
	"github.com/sandsea/sandsea/internal/edge/backend"
	"github.com/sandsea/sandsea/internal/keeper"
	"github.com/sandsea/sandsea/internal/linux/pidfd"
	"github.com/sandsea/sandsea/internal/node"
	"github.com/sandsea/sandsea/internal/sandbox"
)

const undoLimit = 5 * time.Second

// Backend is one edge's view of a World.
type Backend struct {
	w    *World
	keep keeper.Client // may be nil
}

var _ backend.Backend = (*Backend)(nil)

// New makes a Backend over w. A keeper, if given, is told of each sandbox as the native backend does: it holds the kill
// file and fires at the hard end.
func New(w *World, keep keeper.Client) *Backend { return &Backend{w: w, keep: keep} }

// Probe answers the World's capabilities.
func (f *Backend) Probe(context.Context) (node.Capabilities, error) {
	f.w.mu.Lock()
	defer f.w.mu.Unlock()
	return f.w.caps, nil
}

// Start makes a box in steps at which a test may fail it.
func (f *Backend) Start(ctx context.Context, s backend.Spec) (backend.Instance, error) {
	id := s.ID
	b := &box{
		w: f.w, id: id, plan: s.Plan, limits: s.Limits, hard: s.Hard, done: make(chan struct{}), groups: map[int64]*group{},
		spawns: map[int64]int{},
		failed: map[int64]error{}, exits: map[int64]chronus.Exit{}, begun: map[int64]chronus.Process{},
	}
	f.w.mu.Lock()
	if _, ok := f.w.boxes[id]; ok {
		f.w.mu.Unlock()
		return nil, errdefs.New(errdefs.Internal, "sandbox "+id.Short(), "objects of this name exist")
	}
	f.w.boxes[id] = b
	f.w.starts[id]++
	f.w.mu.Unlock()
	fail := func(err error) (backend.Instance, error) {
		f.undo(id)
		return nil, fmt.Errorf("start sandbox %s: %w", id.Short(), err)
	}
	if err := f.w.step("start/made", id); err != nil {
		return fail(err)
	}
	if s.Linked != nil && s.Plan.Network {
		s.Linked(link{f.w, b})
	}
	if err := f.hold(ctx, f.keep, b, s.Hard); err != nil {
		return fail(err)
	}
	if err := f.w.step("start/ready", id); err != nil {
		return fail(err)
	}
	if err := context.Cause(ctx); err != nil {
		return fail(err)
	}
	return f.instance(b), nil
}

func (f *Backend) hold(ctx context.Context, k keeper.Client, b *box, hard time.Time) error {
	if k == nil {
		return nil
	}
	kill, err := killFile(func() { b.die(backend.Exit{Cause: sandbox.CauseInfraKilled, Detail: "PID 1 got SIGKILL"}) })
	if err != nil {
		return err
	}
	defer kill.Close()
	// What a real keeper takes: a socket, and the pidfd of something that lives as long as the test.
	pair, err := syscall.Socketpair(syscall.AF_UNIX, syscall.SOCK_SEQPACKET|syscall.SOCK_CLOEXEC, 0)
	if err != nil {
		return fmt.Errorf("make a control socket: %w", err)
	}
	control, inside := os.NewFile(uintptr(pair[0]), "control"), os.NewFile(uintptr(pair[1]), "inside")
	defer control.Close()
	defer inside.Close()
	self, err := pidfd.Open(os.Getpid())
	if err != nil {
		return err
	}
	defer self.Close()
	return k.Hold(ctx, keeper.Sandbox{
		ID: string(b.id), Control: control, Pidfd: self, Kill: kill, Hard: hard, Budget: b.limits.Output,
	})
}

func (f *Backend) instance(b *box) *instance { return &instance{f: f, b: b, line: newLine(b)} }

type handle struct {
	V  int        `json:"v"`
	ID sandbox.ID `json:"id"`
}

// Recover finds a box again; the line of the edge before breaks.
func (f *Backend) Recover(_ context.Context, id sandbox.ID, h backend.Handle) (backend.Instance, error) {
	var got handle
	if err := json.Unmarshal(h, &got); err != nil || got.V != 1 || got.ID != id {
		return nil, errdefs.New(errdefs.Internal, "sandbox "+id.Short(), "its handle is not ours: %q", h)
	}
	b := f.w.box(id)
	if b == nil {
		return nil, errdefs.New(errdefs.NotFound, "sandbox "+id.Short(), "no such instance")
	}
	return f.instance(b), nil // one whose PID 1 died meanwhile is done, and tells how
}

// Sweep removes boxes.
func (f *Backend) Sweep(_ context.Context, keep func(sandbox.ID) bool) error {
	for _, id := range f.w.Boxes() {
		if !keep(id) {
			f.undo(id)
		}
	}
	return nil
}

func (f *Backend) undo(id sandbox.ID) {
	f.w.remove(id)
	if f.keep != nil {
		ctx, stop := context.WithTimeoutCause(context.Background(), undoLimit, errdefs.Deadline)
		defer stop()
		_ = f.keep.Release(ctx, keeper.Key{Sandbox: string(id)}) // a keeper that is away holds nothing of it
	}
}

// Keep replaces the keeper after its death: every sandbox is held again.
func (f *Backend) Keep(ctx context.Context, k keeper.Client) error {
	f.keep = k
	var errs []error
	for _, id := range f.w.Boxes() {
		if b := f.w.box(id); b != nil {
			errs = append(errs, f.hold(ctx, k, b, b.hard))
		}
	}
	return errors.Join(errs...)
}

// Close ends the edge's interest; sandboxes go on.
func (f *Backend) Close() error { return nil }

type instance struct {
	f    *Backend
	b    *box
	line *line
	stop sync.Mutex
}

func (i *instance) Handle() backend.Handle {
	h, err := json.Marshal(handle{V: 1, ID: i.b.id})
	if err != nil {
		panic(err) // two plain fields
	}
	return h
}

func (i *instance) Channel() chronus.Channel { return i.line }
func (i *instance) UIDBase() uint32          { return uint32(os.Getuid()) }
func (i *instance) Done() <-chan struct{}    { return i.b.done }

func (i *instance) Enforcement() map[string]string {
	return map[string]string{node.FeatureMemory: "fake", node.FeatureCPU: "fake", node.FeaturePids: "fake"}
}

func (i *instance) Exit() backend.Exit {
	i.b.mu.Lock()
	defer i.b.mu.Unlock()
	return i.b.exit
}

func (i *instance) OOMKills() (int64, error) {
	i.b.mu.Lock()
	defer i.b.mu.Unlock()
	return i.b.ooms, nil
}

func (i *instance) Usage(context.Context) (backend.Usage, error) {
	i.b.mu.Lock()
	defer i.b.mu.Unlock()
	u := backend.Usage{Memory: 1 << 20, MemoryPeak: 2 << 20, Pids: 1}
	for _, g := range i.b.groups {
		u.Pids += int64(len(g.tasks))
		u.CPU += g.cpu
	}
	return u, nil
}

func (i *instance) Update(_ context.Context, l sandbox.Limits) error {
	i.b.mu.Lock()
	defer i.b.mu.Unlock()
	i.b.limits = l
	return nil
}

func (i *instance) Stop(ctx context.Context, grace time.Duration) (backend.Exit, error) {
	i.stop.Lock()
	defer i.stop.Unlock()
	if grace > 0 {
		i.b.mu.Lock()
		tasks := i.b.tasksLocked()
		i.b.mu.Unlock()
		for _, t := range tasks {
			t.signal(syscall.SIGTERM)
		}
		timer := time.NewTimer(grace)
		defer timer.Stop()
	wait:
		for _, t := range tasks {
			select {
			case <-t.gone:
			case <-timer.C:
				break wait
			case <-ctx.Done():
				break wait
			}
		}
	}
	i.b.die(backend.Exit{Cause: sandbox.CauseInfraKilled, Detail: "killed by cgroup"})
	i.b.wg.Wait()
	_ = i.f.w.step("stop/killed", i.b.id)
	i.f.w.remove(i.b.id)
	if i.f.keep != nil {
		if err := i.f.keep.Release(ctx, keeper.Key{Sandbox: string(i.b.id)}); err != nil {
			return i.Exit(), fmt.Errorf("release sandbox %s: %w", i.b.id.Short(), err)
		}
	}
	return i.Exit(), nil
}

func (i *instance) NewExec(_ context.Context, number int64) (backend.Exec, error) {
	b := i.b
	b.mu.Lock()
	dead := b.dead
	if b.groups[number] == nil {
		b.groups[number] = &group{tasks: map[*task]struct{}{}}
	}
	b.mu.Unlock()
	if dead {
		return nil, errdefs.New(errdefs.NotFound, "sandbox "+b.id.Short(), "PID 1 is gone")
	}
	kill, err := killFile(func() { b.killGroup(number) })
	if err != nil {
		return nil, err
	}
	dir, err := os.Open("/")
	if err != nil {
		_ = kill.Close()
		return nil, err
	}
	return &execGroup{b: b, number: number, kill: kill, dir: dir}, nil
}

type execGroup struct {
	b      *box
	number int64
	kill   *os.File
	dir    *os.File
}

func (e *execGroup) Stdio() chronus.Stdio { return chronus.Stdio{Cgroup: e.dir} }
func (e *execGroup) KillFile() *os.File   { return e.kill }

func (e *execGroup) Kill() error {
	e.b.killGroup(e.number)
	return nil
}

func (e *execGroup) Signal(sig int) error {
	for _, t := range e.b.groupTasks(e.number) {
		t.signal(syscall.Signal(sig))
	}
	return nil
}

func (e *execGroup) CPU() (time.Duration, error) {
	e.b.mu.Lock()
	defer e.b.mu.Unlock()
	if g := e.b.groups[e.number]; g != nil {
		return g.cpu, nil
	}
	return 0, nil
}

func (e *execGroup) Pids() ([]int, error) {
	var out []int
	for range e.b.groupTasks(e.number) {
		out = append(out, os.Getpid())
	}
	return out, nil
}

func (e *execGroup) Remove() error {
	_ = e.kill.Close()
	return e.dir.Close()
}
