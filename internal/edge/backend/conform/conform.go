// Package conform is the suite that every backend.Backend passes. It needs programs named true, echo, cat, sleep and
// exit-like behaviour in the plan's root file system, found in PATH.
package conform

import (
	"context"
	"crypto/rand"
	"errors"
	"fmt"
	"io"
	"os"
	"slices"
	"sync"
	"syscall"
	"testing"
	"time"

	"github.com/sandsea/sandsea/api/errdefs"
	"github.com/sandsea/sandsea/internal/chronus"
	"github.com/sandsea/sandsea/internal/edge/backend"
	"github.com/sandsea/sandsea/internal/layers/plan"
	"github.com/sandsea/sandsea/internal/linux/pipe"
	"github.com/sandsea/sandsea/internal/policy"
	"github.com/sandsea/sandsea/internal/sandbox"
	"github.com/sandsea/sandsea/internal/testkit/wait"
)

// Fixture is one machine with a backend under test.
type Fixture struct {
	// Plan that can run the programs above.
	Plan plan.Plan
	// Open makes a backend over the machine, as a new edge does; the one before is simply no longer used. The fixture
	// closes what needs closing when the test ends.
	Open func(t *testing.T) backend.Backend
	// Left lists every object of the backend that the machine still has, nil when there is none.
	Left func(t *testing.T) []string
	// Tree is a command that has at least two descendants and runs for a minute.
	Tree []string
	// KillInit ends PID 1 of a sandbox by SIGKILL from outside; nil: not possible here.
	KillInit func(t *testing.T, id sandbox.ID)
	// Gate is there: a plan may ask for a network.
	Gate bool
	// Limits of the sandboxes; zero takes small ones.
	Limits sandbox.Limits
}

const patience = 20 * time.Second

// Run runs the suite; make is called once for each test.
func Run(t *testing.T, make func(t *testing.T) Fixture) {
	for _, c := range []struct {
		name string
		run  func(t *testing.T, s *suite)
	}{
		{"a started sandbox runs commands and tells how they ended", testCommands},
		{"a command that cannot start is told by errno", testStartErrors},
		{"a start whose caller is gone leaves nothing", testCancelledStart},
		{"a link is handed out while its sandbox is made, and dies with it", testLinked},
		{"stop leaves nothing and may be repeated", testStop},
		{"stop gives commands the grace to end", testGrace},
		{"recover finds the sandbox, its commands and their ends", testRecover},
		{"recover of a sandbox that is gone is NotFound", testRecoverGone},
		{"sweep removes what is not to be kept and nothing else", testSweep},
		{"killing a command's group ends its tree and nothing else", testExecKill},
		{"the kill file works without the backend", testKillFile},
		{"what a command leaves behind outlives it until the stop", testBackground},
		{"starts at once do not disturb each other", testConcurrentStarts},
		{"the end of PID 1 is seen", testInitKilled},
		{"usage and limits can be read and set", testUsage},
		{"a command runs on a terminal, across edges", testTerminal},
	} {
		t.Run(c.name, func(t *testing.T) {
			f := make(t)
			s := &suite{Fixture: f, b: f.Open(t)}
			if s.Limits == (sandbox.Limits{}) {
				s.Limits = sandbox.Limits{
					Memory: 128 << 20, CPUMillis: 1000, Disk: 64 << 20, Pids: 256, OpenFiles: 1024, Output: 8 << 20,
				}
			}
			if _, err := s.b.Probe(t.Context()); err != nil {
				t.Fatalf("Probe: %v", err)
			}
			t.Cleanup(func() {
				ctx, stop := context.WithTimeoutCause(context.Background(), patience, errdefs.Deadline)
				defer stop()
				if err := s.b.Sweep(ctx, func(sandbox.ID) bool { return false }); err != nil {
					t.Errorf("Sweep at the end: %v", err)
				}
				if left := f.Left(t); len(left) > 0 {
					t.Errorf("left behind: %q", left)
				}
			})
			c.run(t, s)
		})
	}
}

type suite struct {
	Fixture
	b backend.Backend
}

func newID(t *testing.T) sandbox.ID {
	t.Helper()
	id, err := sandbox.Mint(1, rand.Reader)
	if err != nil {
		t.Fatal(err)
	}
	return id
}

func (s *suite) spec(id sandbox.ID) backend.Spec {
	return backend.Spec{ID: id, Plan: s.Plan, Limits: s.Limits, Hard: time.Now().Add(time.Hour)}
}

func (s *suite) start(t *testing.T) (sandbox.ID, backend.Instance) {
	t.Helper()
	id := newID(t)
	inst, err := s.b.Start(t.Context(), s.spec(id))
	if err != nil {
		t.Fatalf("Start: %v", err)
	}
	return id, inst
}

func stop(t *testing.T, inst backend.Instance) backend.Exit {
	t.Helper()
	ctx, cancel := context.WithTimeoutCause(context.Background(), patience, errdefs.Deadline)
	defer cancel()
	e, err := inst.Stop(ctx, 0)
	if err != nil {
		t.Fatalf("Stop: %v", err)
	}
	return e
}

// cmd is a command with its output end.
type cmd struct {
	exec backend.Exec
	out  *os.File
	in   *os.File
}

// spawn starts argv with one pipe for both outputs.
func spawn(t *testing.T, inst backend.Instance, number int64, argv ...string) (*cmd, error) {
	t.Helper()
	ex, err := inst.NewExec(t.Context(), number)
	if err != nil {
		t.Fatalf("NewExec: %v", err)
	}
	t.Cleanup(func() { _ = ex.Remove() })
	outR, outW, err := pipe.New()
	if err != nil {
		t.Fatal(err)
	}
	inR, inW, err := pipe.New()
	if err != nil {
		t.Fatal(err)
	}
	stdio := ex.Stdio()
	stdio.In, stdio.Out = inR, outW
	_, err = inst.Channel().Spawn(t.Context(), chronus.Spawn{
		Number: number, Argv: argv, Env: []string{"PATH=/usr/local/bin:/usr/bin:/bin"}, Cwd: "/", Umask: 0o22,
	}, stdio)
	_ = inR.Close()
	_ = outW.Close()
	t.Cleanup(func() { _ = outR.Close(); _ = inW.Close() })
	return &cmd{exec: ex, out: outR, in: inW}, err
}

func mustSpawn(t *testing.T, inst backend.Instance, number int64, argv ...string) *cmd {
	t.Helper()
	c, err := spawn(t, inst, number, argv...)
	if err != nil {
		t.Fatalf("Spawn %q: %v", argv, err)
	}
	return c
}

// exits collects ends from an instance's line until the test ends.
type exits struct {
	mu  sync.Mutex
	got map[int64]chronus.Exit // guarded by mu
}

func collect(inst backend.Instance) *exits {
	e := &exits{got: map[int64]chronus.Exit{}}
	go func() {
		for x, err := range inst.Channel().Exits() {
			e.mu.Lock()
			if err == nil {
				e.got[x.Number] = x
			}
			e.mu.Unlock()
		}
	}()
	return e
}

func (e *exits) wait(t *testing.T, number int64) chronus.Exit {
	t.Helper()
	var x chronus.Exit
	wait.Until(t, patience, func() bool {
		e.mu.Lock()
		defer e.mu.Unlock()
		var ok bool
		x, ok = e.got[number]
		return ok
	}, fmt.Sprintf("exit of %d", number))
	return x
}

func testCommands(t *testing.T, s *suite) {
	id, inst := s.start(t)
	ends := collect(inst)
	c := mustSpawn(t, inst, 1, "echo", "hello", "there")
	out, err := io.ReadAll(c.out)
	if err != nil || string(out) != "hello there\n" {
		t.Fatalf("output %q, %v", out, err)
	}
	if x := ends.wait(t, 1); !x.Status.Exited() || x.Status.ExitStatus() != 0 || x.Wall <= 0 {
		t.Fatalf("exit %+v", x)
	}
	if err := inst.Channel().Ack(1); err != nil {
		t.Fatalf("Ack: %v", err)
	}
	c = mustSpawn(t, inst, 2, "cat")
	if _, err := c.in.WriteString("through"); err != nil {
		t.Fatal(err)
	}
	_ = c.in.Close()
	if out, err := io.ReadAll(c.out); err != nil || string(out) != "through" {
		t.Fatalf("cat gave %q, %v", out, err)
	}
	mustSpawn(t, inst, 3, "sleep", "60")
	if err := inst.Channel().Signal(t.Context(), 3, syscall.SIGTERM); err != nil {
		t.Fatalf("Signal: %v", err)
	}
	if x := ends.wait(t, 3); !x.Status.Signaled() || x.Status.Signal() != syscall.SIGTERM {
		t.Fatalf("exit after SIGTERM: %+v", x)
	}
	if err := inst.Channel().Signal(t.Context(), 3, syscall.SIGTERM); !errors.Is(err, errdefs.NotFound) {
		t.Fatalf("Signal after the end: %v, want NotFound", err)
	}
	select {
	case <-inst.Done():
		t.Fatal("done while it runs")
	default:
	}
	if len(inst.Enforcement()) == 0 || len(inst.Handle()) == 0 {
		t.Fatalf("enforcement %v, handle %q of %s", inst.Enforcement(), inst.Handle(), id)
	}
	stop(t, inst)
}

func testStartErrors(t *testing.T, s *suite) {
	_, inst := s.start(t)
	for i, c := range []struct {
		argv  []string
		errno syscall.Errno
	}{
		{[]string{"no-such-program"}, syscall.ENOENT},
		{[]string{"/etc/passwd"}, syscall.EACCES},
		{[]string{"echo", string(slices.Repeat([]byte("x"), 131072))}, syscall.E2BIG},
	} {
		_, err := spawn(t, inst, int64(i+1), c.argv...)
		se, ok := errors.AsType[*chronus.StartError](err)
		if !ok || se.Step != chronus.StepExec || se.Errno != c.errno {
			t.Errorf("%.20q: %v, want exec and %v", c.argv[0], err, c.errno)
		}
	}
	stop(t, inst)
}

func testCancelledStart(t *testing.T, s *suite) {
	ctx, cancel := context.WithCancelCause(t.Context())
	cancel(errors.New("the caller is gone"))
	if inst, err := s.b.Start(ctx, s.spec(newID(t))); err == nil {
		stop(t, inst)
		t.Fatal("Start succeeded for a caller who is gone")
	}
	if left := s.Left(t); len(left) > 0 {
		t.Fatalf("left behind: %q", left)
	}
}

func testLinked(t *testing.T, s *suite) {
	told := make(chan backend.Link, 2)
	spec := s.spec(newID(t))
	spec.Linked = func(l backend.Link) { told <- l }
	start := func() backend.Instance {
		inst, err := s.b.Start(t.Context(), spec)
		if err != nil {
			t.Fatalf("Start: %v", err)
		}
		return inst
	}
	stop(t, start())
	if len(told) > 0 {
		t.Error("a sandbox without network has a link")
	}
	spec.ID, spec.Plan.Network = newID(t), true
	if !s.Gate {
		if inst, err := s.b.Start(t.Context(), spec); !errors.Is(err, errdefs.FailedPrecondition) {
			if err == nil {
				stop(t, inst)
			}
			t.Errorf("a network without a gate: %v", err)
		}
		return
	}
	inst := start()
	if len(told) != 1 {
		t.Fatalf("%d links when the sandbox is ready", len(told))
	}
	link := <-told
	if err := link.Set(policy.Walls{Names: true}); err != nil {
		t.Errorf("walls: %v", err)
	}
	if same, err := inst.Link(t.Context()); err != nil || same.Addr() != link.Addr() {
		t.Errorf("its link is %v, %v", same, err)
	}
	stop(t, inst)
	if err := link.Set(policy.Walls{}); !errors.Is(err, errdefs.NotFound) {
		t.Errorf("walls of a sandbox that is gone: %v", err)
	}
	if left := s.Left(t); len(left) > 0 {
		t.Fatalf("left behind: %q", left)
	}
}

func testStop(t *testing.T, s *suite) {
	_, inst := s.start(t)
	mustSpawn(t, inst, 1, s.Tree...)
	first := stop(t, inst)
	if left := s.Left(t); len(left) > 0 {
		t.Fatalf("left behind: %q", left)
	}
	if again := stop(t, inst); again != first {
		t.Fatalf("the second stop says %v, the first said %v", again, first)
	}
	select {
	case <-inst.Done():
	case <-time.After(patience):
		t.Fatal("not done after the stop")
	}
}

func testGrace(t *testing.T, s *suite) {
	_, inst := s.start(t)
	ends := collect(inst)
	mustSpawn(t, inst, 1, "sleep", "60")
	begin := time.Now()
	if _, err := inst.Stop(t.Context(), patience); err != nil {
		t.Fatalf("Stop: %v", err)
	}
	if d := time.Since(begin); d > patience/2 {
		t.Fatalf("the stop took %s although TERM ends the only command", d)
	}
	ends.mu.Lock()
	defer ends.mu.Unlock()
	if x, ok := ends.got[1]; ok && x.Status.Signal() != syscall.SIGTERM {
		t.Fatalf("ended by %v, want SIGTERM", x.Status.Signal())
	}
}

func testRecover(t *testing.T, s *suite) {
	id, inst := s.start(t)
	mustSpawn(t, inst, 1, "sleep", "60")
	c := mustSpawn(t, inst, 2, "cat")
	mustSpawn(t, inst, 3, "true")
	h := inst.Handle()

	s.b = s.Open(t)
	if _, err := s.b.Probe(t.Context()); err != nil {
		t.Fatal(err)
	}
	again, err := s.b.Recover(t.Context(), id, h)
	if err != nil {
		t.Fatalf("Recover: %v", err)
	}
	if err := s.b.Sweep(t.Context(), func(x sandbox.ID) bool { return x == id }); err != nil {
		t.Fatalf("Sweep: %v", err)
	}
	ends := collect(again)
	_, list, err := again.Channel().Hello(t.Context())
	if err != nil {
		t.Fatalf("Hello: %v", err)
	}
	known := map[int64]chronus.Process{}
	for _, p := range list {
		known[p.Number] = p
	}
	for _, n := range []int64{1, 2} {
		if p, ok := known[n]; !ok || p.Exited {
			t.Fatalf("command %d after the restart: %+v, listed %v", n, p, ok)
		}
	}
	if _, ok := known[3]; !ok {
		t.Fatal("an end that nobody acknowledged is forgotten")
	}
	if x := ends.wait(t, 3); x.Status != 0 {
		t.Fatalf("exit of 3 after the restart: %+v", x)
	}
	if err := again.Channel().Ack(3); err != nil {
		t.Fatal(err)
	}
	if _, err := c.in.WriteString("still"); err != nil {
		t.Fatal(err)
	}
	_ = c.in.Close()
	if out, err := io.ReadAll(c.out); err != nil || string(out) != "still" {
		t.Fatalf("cat after the restart gave %q, %v", out, err)
	}
	ends.wait(t, 2)
	ex, err := again.NewExec(t.Context(), 1)
	if err != nil {
		t.Fatalf("NewExec of a running command: %v", err)
	}
	if err := ex.Kill(); err != nil {
		t.Fatalf("Kill: %v", err)
	}
	if x := ends.wait(t, 1); x.Status.Signal() != syscall.SIGKILL {
		t.Fatalf("exit of 1: %+v", x)
	}
	_ = ex.Remove()
	stop(t, again)
	if left := s.Left(t); len(left) > 0 {
		t.Fatalf("left behind: %q", left)
	}
}

func testRecoverGone(t *testing.T, s *suite) {
	id, inst := s.start(t)
	h := inst.Handle()
	stop(t, inst)
	s.b = s.Open(t)
	if _, err := s.b.Recover(t.Context(), id, h); !errors.Is(err, errdefs.NotFound) {
		t.Fatalf("Recover: %v, want NotFound", err)
	}
	if left := s.Left(t); len(left) > 0 {
		t.Fatalf("Recover made %q", left)
	}
}

func testSweep(t *testing.T, s *suite) {
	kept, inst := s.start(t)
	_, _ = s.start(t)
	h := inst.Handle()
	s.b = s.Open(t)
	again, err := s.b.Recover(t.Context(), kept, h)
	if err != nil {
		t.Fatalf("Recover: %v", err)
	}
	for range 2 {
		if err := s.b.Sweep(t.Context(), func(x sandbox.ID) bool { return x == kept }); err != nil {
			t.Fatalf("Sweep: %v", err)
		}
	}
	if _, _, err := again.Channel().Hello(t.Context()); err != nil {
		t.Fatalf("the kept sandbox does not answer: %v", err)
	}
	c := mustSpawn(t, again, 1, "echo", "here")
	if out, err := io.ReadAll(c.out); err != nil || string(out) != "here\n" {
		t.Fatalf("the kept sandbox gave %q, %v", out, err)
	}
	stop(t, again)
	if left := s.Left(t); len(left) > 0 {
		t.Fatalf("left behind: %q", left)
	}
}

func testExecKill(t *testing.T, s *suite) {
	_, inst := s.start(t)
	ends := collect(inst)
	mustSpawn(t, inst, 1, "sleep", "60")
	c := mustSpawn(t, inst, 2, s.Tree...)
	wait.Until(t, patience, func() bool {
		pids, err := c.exec.Pids()
		return err == nil && len(pids) >= 3
	}, "three processes in the tree")
	if err := c.exec.Kill(); err != nil {
		t.Fatalf("Kill: %v", err)
	}
	ends.wait(t, 2)
	wait.Until(t, patience, func() bool {
		pids, err := c.exec.Pids()
		return err == nil && len(pids) == 0
	}, "an empty tree")
	if _, err := io.Copy(io.Discard, c.out); err != nil {
		t.Fatalf("the output of a killed tree does not end: %v", err)
	}
	if err := inst.Channel().Signal(t.Context(), 1, 0); err != nil {
		t.Fatalf("the other command is gone: %v", err)
	}
	if err := c.exec.Kill(); err != nil {
		t.Fatalf("Kill of an empty tree: %v", err)
	}
	if _, err := c.exec.CPU(); err != nil {
		t.Fatalf("CPU: %v", err)
	}
	stop(t, inst)
}

func testKillFile(t *testing.T, s *suite) {
	_, inst := s.start(t)
	ends := collect(inst)
	c := mustSpawn(t, inst, 1, s.Tree...)
	if _, err := c.exec.KillFile().WriteString("1"); err != nil {
		t.Fatalf("write to the kill file: %v", err)
	}
	if x := ends.wait(t, 1); x.Status.Signal() != syscall.SIGKILL {
		t.Fatalf("exit %+v", x)
	}
	stop(t, inst)
}

func testBackground(t *testing.T, s *suite) {
	_, inst := s.start(t)
	ends := collect(inst)
	c := mustSpawn(t, inst, 1, s.Tree...)
	wait.Until(t, patience, func() bool {
		pids, err := c.exec.Pids()
		return err == nil && len(pids) >= 3
	}, "three processes in the tree")
	if err := inst.Channel().Signal(t.Context(), 1, syscall.SIGKILL); err != nil {
		t.Fatal(err)
	}
	ends.wait(t, 1)
	if pids, err := c.exec.Pids(); err != nil || len(pids) < 2 {
		t.Fatalf("after the end of the first process its tree has %v, %v", pids, err)
	}
	if err := c.exec.Remove(); err != nil {
		t.Fatalf("Remove while descendants live: %v", err)
	}
	stop(t, inst)
	if left := s.Left(t); len(left) > 0 {
		t.Fatalf("left behind: %q", left)
	}
}

func testConcurrentStarts(t *testing.T, s *suite) {
	const n = 8
	var wg sync.WaitGroup
	errs := make([]error, n)
	for i := range n {
		id := newID(t)
		wg.Go(func() {
			inst, err := s.b.Start(t.Context(), s.spec(id))
			if err != nil {
				errs[i] = err
				return
			}
			for k := int64(1); k <= 3; k++ {
				ex, err := inst.NewExec(t.Context(), k)
				if err != nil {
					errs[i] = err
					break
				}
				_ = ex.Remove()
			}
			_, err = inst.Stop(t.Context(), 0)
			errs[i] = errors.Join(errs[i], err)
		})
	}
	wg.Wait()
	if err := errors.Join(errs...); err != nil {
		t.Fatal(err)
	}
	if left := s.Left(t); len(left) > 0 {
		t.Fatalf("left behind: %q", left)
	}
}

func testInitKilled(t *testing.T, s *suite) {
	if s.KillInit == nil {
		t.Skip("this fixture cannot kill PID 1")
	}
	id, inst := s.start(t)
	mustSpawn(t, inst, 1, s.Tree...)
	s.KillInit(t, id)
	select {
	case <-inst.Done():
	case <-time.After(patience):
		t.Fatal("the end of PID 1 is not seen")
	}
	if c := inst.Exit().Cause; c != sandbox.CauseInfraKilled && c != sandbox.CauseInfraUnknown {
		t.Fatalf("cause %q, want %s", c, sandbox.CauseInfraKilled)
	}
	stop(t, inst)
}

func testUsage(t *testing.T, s *suite) {
	_, inst := s.start(t)
	u, err := inst.Usage(t.Context())
	if err != nil || u.Pids < 1 {
		t.Fatalf("usage %+v, %v", u, err)
	}
	if n, err := inst.OOMKills(); err != nil || n != 0 {
		t.Fatalf("%d kills, %v", n, err)
	}
	l := s.Limits
	l.Memory *= 2
	l.Pids *= 2
	if err := inst.Update(t.Context(), l); err != nil {
		t.Fatalf("Update: %v", err)
	}
	stop(t, inst)
}
