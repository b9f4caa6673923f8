// Package edgetest puts a whole edge over a fake machine, for tests: Runner, journal, admission and sweep are the real
// ones; the backend, the keeper and the store are fakes in the test's process.
//
// Kill is kill -9 of the edge: from that moment nothing that the old edge still does reaches the journal, the machine
// or the keeper. Start then is the next edge over what is left. TripAt kills at the n-th step that reaches outside.
package edgetest

import (
	"context"
	"crypto/rand"
	"errors"
	"iter"
	"log/slog"
	"os"
	"path/filepath"
	"sync"
	"syscall"
	"testing"
	"time"

	"github.com/sandsea/sandsea/api/errdefs"
	"github.com/sandsea/sandsea/internal/chronus"
	"github.com/sandsea/sandsea/internal/chronus/sessions"
	"github.com/sandsea/sandsea/internal/edge/admission"
	"github.com/sandsea/sandsea/internal/edge/backend"
	"github.com/sandsea/sandsea/internal/edge/backend/fake"
	"github.com/sandsea/sandsea/internal/edge/journal"
	"github.com/sandsea/sandsea/internal/edge/runner"
	"github.com/sandsea/sandsea/internal/edge/sweep"
	"github.com/sandsea/sandsea/internal/image"
	"github.com/sandsea/sandsea/internal/keeper"
	"github.com/sandsea/sandsea/internal/node"
	"github.com/sandsea/sandsea/internal/sandbox"
	"github.com/sandsea/sandsea/internal/testkit/wait"
)

// Number is the node's number in tests.
const Number node.Number = 42

// Patience bounds every wait of a test.
const Patience = 20 * time.Second

// Edge is an edge that can be killed and started again.
type Edge struct {
	t      testing.TB
	Dir    string
	World  *fake.World
	Keeper *fake.Keeper
	Runner *runner.Runner
	Room   *admission.Admission
	Caps   node.Capabilities
	Link   *runner.Link
	// Change may alter the Runner's configuration at each start.
	Change func(*runner.Config)

	trip    *trip
	journal *journal.Bolt

	mu    sync.Mutex
	ends  map[sandbox.ID]runner.Snapshot // guarded by mu: what the store knows
	away  bool                           // guarded by mu: the store does not answer
	batch []int                          // guarded by mu: sizes of the transactions
}

// New starts the first edge over an empty machine.
func New(t testing.TB, change ...func(*runner.Config)) *Edge {
	t.Helper()
	e := &Edge{
		t: t, Dir: t.TempDir(), World: fake.NewWorld(), Keeper: fake.NewKeeper(), ends: map[sandbox.ID]runner.Snapshot{},
	}
	if len(change) > 0 {
		e.Change = change[0]
	}
	t.Cleanup(func() {
		e.Kill()
		e.World.Close()
		e.Keeper.Kill()
	})
	e.Start()
	return e
}

// Output is the directory of records.
func (e *Edge) Output() string { return filepath.Join(e.Dir, "output") }

// Start is a new edge over what is there.
func (e *Edge) Start() {
	e.t.Helper()
	if err := e.TryStart(0); err != nil {
		e.t.Fatalf("start the edge: %v", err)
	}
}

// TryStart is Start with a kill at the n-th step, 0 for none.
func (e *Edge) TryStart(n int) error {
	e.trip = &trip{at: n}
	var err error
	if e.journal, err = journal.Open(filepath.Join(e.Dir, "journal"), "boot"); err != nil {
		return err
	}
	e.Link = runner.NewLink(wired{e.Keeper.Connect(), e.trip})
	roster, err := sweep.Ask(context.Background(), e.Link)
	if err != nil {
		return err
	}
	b := machine{fake.New(e.World, e.Link), e.trip}
	if e.Caps, err = b.Probe(context.Background()); err != nil {
		return err
	}
	free := func() (int64, error) { return 1 << 40, nil }
	e.Room, err = admission.New(admission.Of(e.Caps, admission.Overcommit{}), free)
	if err != nil {
		return err
	}
	cfg := runner.Config{
		Journal: diary{e.journal, e.trip}, Backend: b, Keeper: e.Link, Room: e.Room, Capabilities: e.Caps, Output: e.Output(),
		Record: e.record, Lookup: lookup, Now: time.Now, Log: slog.New(slog.DiscardHandler),
	}
	if e.Change != nil {
		e.Change(&cfg)
	}
	if e.Runner, err = runner.New(cfg); err != nil {
		return err
	}
	return sweep.Run(context.Background(), sweep.Config{
		Runner: e.Runner, Backend: b, Keeper: e.Link, Roster: roster, Output: e.Output(), Log: cfg.Log,
	})
}

// Kill is kill -9 of the edge. Idempotent.
func (e *Edge) Kill() {
	if e.journal == nil {
		return
	}
	e.trip.kill()
	_ = e.Link.Close()
	if err := e.Runner.Close(); err != nil {
		e.t.Errorf("give the descriptors of a killed edge back: %v", err)
	}
	_ = e.journal.Close()
	e.journal = nil
}

// Restart is Kill and Start.
func (e *Edge) Restart() {
	e.t.Helper()
	e.Kill()
	e.Start()
}

// TripAt kills the edge at the n-th step from now; Steps counts from here.
func (e *Edge) TripAt(n int) { e.trip.arm(n) }

// Steps is how many steps reached outside since TripAt.
func (e *Edge) Steps() int { return e.trip.count() }

// Tripped reports whether the edge was killed at its step.
func (e *Edge) Tripped() bool { return e.trip.isDead() }

// StoreAway makes the store fail, or work again.
func (e *Edge) StoreAway(away bool) {
	e.mu.Lock()
	defer e.mu.Unlock()
	e.away = away
}

// Ended gives the end of a sandbox that the store knows.
func (e *Edge) Ended(id sandbox.ID) (runner.Snapshot, bool) {
	e.mu.Lock()
	defer e.mu.Unlock()
	s, ok := e.ends[id]
	return s, ok
}

// Batches are the sizes of the transactions of ends so far.
func (e *Edge) Batches() []int {
	e.mu.Lock()
	defer e.mu.Unlock()
	return append([]int(nil), e.batch...)
}

func (e *Edge) record(_ context.Context, ended []runner.Snapshot) error {
	if err := e.trip.before(); err != nil {
		return err
	}
	e.mu.Lock()
	defer e.mu.Unlock()
	if e.away {
		return errdefs.New(errdefs.Unavailable, "store", "away")
	}
	for _, s := range ended {
		e.ends[s.ID] = s
	}
	e.batch = append(e.batch, len(ended))
	return e.trip.after(nil)
}

func lookup(_ context.Context, _ sandbox.ID, user string) (sessions.User, error) {
	if user == "root" || user == "0" {
		return sessions.User{Name: "root", Home: "/root"}, nil
	}
	return sessions.User{}, errdefs.New(errdefs.NotFound, "user "+user, "is not there")
}

// ID mints an id of this node.
func (e *Edge) ID() sandbox.ID {
	e.t.Helper()
	id, err := sandbox.Mint(Number, rand.Reader)
	if err != nil {
		e.t.Fatal(err)
	}
	return id
}

// Request is a plain create; change may alter its spec.
func (e *Edge) Request(id sandbox.ID, change ...func(*sandbox.Spec)) runner.Request {
	e.t.Helper()
	spec := sandbox.Spec{Environment: sandbox.Environment{Image: "debian"}}
	for _, c := range change {
		c(&spec)
	}
	spec, err := spec.Validate()
	if err != nil {
		e.t.Fatal(err)
	}
	return runner.Request{
		ID: id, Project: "default", Spec: spec, By: "user:test", Digest: spec.Digest(),
		Layers: []image.Digest{"sha256:0000000000000000000000000000000000000000000000000000000000000000"},
		Config: image.Config{Entrypoint: []string{"echo"}, Cmd: []string{"from", "the", "image"}},
	}
}

// Create makes a sandbox or fails the test.
func (e *Edge) Create(change ...func(*sandbox.Spec)) sandbox.ID {
	e.t.Helper()
	id := e.ID()
	s, err := e.Runner.Create(context.Background(), e.Request(id, change...))
	if err != nil {
		e.t.Fatalf("create: %v", err)
	}
	if s.State != sandbox.Running {
		e.t.Fatalf("created, but %s", s.State)
	}
	return id
}

// Run runs a command or fails the test.
func (e *Edge) Run(id sandbox.ID, argv ...string) sessions.Answer {
	e.t.Helper()
	a, err := e.TryRun(id, "", argv...)
	if err != nil {
		e.t.Fatalf("run %q: %v", argv, err)
	}
	return a
}

// TryRun runs a command with a key.
func (e *Edge) TryRun(id sandbox.ID, key string, argv ...string) (sessions.Answer, error) {
	u, err := e.Runner.Open(id, true)
	if err != nil {
		return sessions.Answer{}, err
	}
	defer u.Done()
	ctx, stop := context.WithTimeoutCause(context.Background(), Patience, errdefs.Deadline)
	defer stop()
	return u.Commands.Run(ctx, sessions.Start{Command: sessions.Command{Argv: argv}, Key: key}, 0)
}

// WaitEnded waits until a sandbox has ended.
func (e *Edge) WaitEnded(id sandbox.ID) runner.Snapshot {
	e.t.Helper()
	var s runner.Snapshot
	wait.Until(e.t, Patience, func() bool {
		var err error
		s, err = e.Runner.Get(id)
		return err == nil && s.State == sandbox.Ended
	}, "the end of "+id.Short())
	return s
}

// Leftovers lists what the machine, the keeper and the records have of sandboxes that do not run.
func (e *Edge) Leftovers() []string {
	runs := func(id sandbox.ID) bool {
		s, err := e.Runner.Get(id)
		return err == nil && s.State == sandbox.Running
	}
	var out []string
	for _, id := range e.World.Boxes() {
		if !runs(id) {
			out = append(out, "box "+string(id))
		}
	}
	for _, k := range e.Keeper.Keys() {
		if !runs(sandbox.ID(k.Sandbox)) {
			out = append(out, "held "+k.Sandbox)
		}
	}
	entries, err := os.ReadDir(e.Output())
	if err == nil {
		for _, d := range entries {
			if !e.Runner.Remembers(sandbox.ID(d.Name())) {
				out = append(out, "record "+d.Name())
			}
		}
	}
	return out
}

// errKilled is what a killed edge gets from everything outside it.
var errKilled = errors.New("this edge was killed")

// trip counts steps that reach outside and kills at one of them: before it has its effect, or after.
type trip struct {
	mu   sync.Mutex
	n    int
	at   int
	dead bool
}

func (t *trip) arm(at int) {
	t.mu.Lock()
	defer t.mu.Unlock()
	t.n, t.at = 0, at
}

func (t *trip) kill() {
	t.mu.Lock()
	defer t.mu.Unlock()
	t.dead = true
}

func (t *trip) isDead() bool {
	t.mu.Lock()
	defer t.mu.Unlock()
	return t.dead
}

func (t *trip) count() int {
	t.mu.Lock()
	defer t.mu.Unlock()
	return t.n
}

func (t *trip) step() bool {
	t.mu.Lock()
	defer t.mu.Unlock()
	if t.dead {
		return true
	}
	t.n++
	t.dead = t.n == t.at
	return t.dead
}

func (t *trip) before() error {
	if t.step() {
		return errKilled
	}
	return nil
}

// after is called with what a step gave: the edge may die before it learns it.
func (t *trip) after(err error) error {
	if t.step() {
		return errKilled
	}
	return err
}

func (t *trip) alive() error {
	if t.isDead() {
		return errKilled
	}
	return nil
}

// do runs one step.
func (t *trip) do(f func() error) error {
	if err := t.before(); err != nil {
		return err
	}
	return t.after(f())
}

type diary struct {
	journal.Journal
	t *trip
}

func (d diary) Put(r journal.Record) error {
	return d.t.do(func() error { return d.Journal.Put(r) })
}

func (d diary) PutAll(rs ...journal.Record) error {
	return d.t.do(func() error { return d.Journal.PutAll(rs...) })
}

func (d diary) Delete(ks ...journal.Key) error {
	return d.t.do(func() error { return d.Journal.Delete(ks...) })
}

type wired struct {
	keeper.Client
	t *trip
}

func (w wired) Hold(ctx context.Context, s keeper.Sandbox) error {
	return w.t.do(func() error { return w.Client.Hold(ctx, s) })
}

func (w wired) Record(ctx context.Context, x keeper.Exec) error {
	return w.t.do(func() error { return w.Client.Record(ctx, x) })
}

func (w wired) Rearm(ctx context.Context, k keeper.Key, hard time.Time, left time.Duration) error {
	return w.t.do(func() error { return w.Client.Rearm(ctx, k, hard, left) })
}

func (w wired) CloseInput(ctx context.Context, k keeper.Key) error {
	return w.t.do(func() error { return w.Client.CloseInput(ctx, k) })
}

func (w wired) Release(ctx context.Context, k keeper.Key) error {
	return w.t.do(func() error { return w.Client.Release(ctx, k) })
}

func (w wired) Ack(seq uint64) error {
	if err := w.t.alive(); err != nil {
		return err
	}
	return w.Client.Ack(seq)
}

type machine struct {
	*fake.Backend
	t *trip
}

func (m machine) Start(ctx context.Context, s backend.Spec) (backend.Instance, error) {
	if err := m.t.before(); err != nil {
		return nil, err
	}
	i, err := m.Backend.Start(ctx, s)
	if err := m.t.after(err); err != nil {
		return nil, err
	}
	return instance{i, m.t}, nil
}

func (m machine) Recover(ctx context.Context, id sandbox.ID, h backend.Handle) (backend.Instance, error) {
	if err := m.t.before(); err != nil {
		return nil, err
	}
	i, err := m.Backend.Recover(ctx, id, h)
	if err := m.t.after(err); err != nil {
		return nil, err
	}
	return instance{i, m.t}, nil
}

func (m machine) Sweep(ctx context.Context, keep func(sandbox.ID) bool) error {
	return m.t.do(func() error { return m.Backend.Sweep(ctx, keep) })
}

type instance struct {
	backend.Instance
	t *trip
}

func (i instance) Stop(ctx context.Context, grace time.Duration) (x backend.Exit, err error) {
	err = i.t.do(func() error { x, err = i.Instance.Stop(ctx, grace); return err })
	return x, err
}

func (i instance) Channel() chronus.Channel { return channel{i.Instance.Channel(), i.t} }

func (i instance) NewExec(ctx context.Context, n int64) (backend.Exec, error) {
	if err := i.t.alive(); err != nil {
		return nil, err
	}
	x, err := i.Instance.NewExec(ctx, n)
	if err != nil {
		return nil, err
	}
	return group{x, i.t}, nil
}

type group struct {
	backend.Exec
	t *trip
}

func (g group) Kill() error {
	if err := g.t.alive(); err != nil {
		return err
	}
	return g.Exec.Kill()
}

func (g group) Signal(sig int) error {
	if err := g.t.alive(); err != nil {
		return err
	}
	return g.Exec.Signal(sig)
}

type channel struct {
	chronus.Channel
	t *trip
}

func (c channel) Spawn(ctx context.Context, s chronus.Spawn, io chronus.Stdio) (pid int, err error) {
	err = c.t.do(func() error { pid, err = c.Channel.Spawn(ctx, s, io); return err })
	return pid, err
}

func (c channel) Signal(ctx context.Context, n int64, sig syscall.Signal) error {
	if err := c.t.alive(); err != nil {
		return err
	}
	return c.Channel.Signal(ctx, n, sig)
}

// Exits of a killed edge are heard by nobody.
func (c channel) Exits() iter.Seq2[chronus.Exit, error] {
	return func(yield func(chronus.Exit, error) bool) {
		for e, err := range c.Channel.Exits() {
			if c.t.alive() != nil && err == nil {
				continue
			}
			if !yield(e, err) {
				return
			}
		}
	}
}

func (c channel) Ack(n int64) error { return c.t.do(func() error { return c.Channel.Ack(n) }) }
