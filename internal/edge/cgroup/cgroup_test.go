package cgroup

import (
	"bufio"
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/sandsea/sandsea/api/errdefs"
	"github.com/sandsea/sandsea/internal/linux/cgroupfs"
	"github.com/sandsea/sandsea/internal/node"
	"github.com/sandsea/sandsea/internal/sandbox"
	"github.com/sandsea/sandsea/internal/testkit/leak"
	"github.com/sandsea/sandsea/internal/testkit/require"
	"github.com/sandsea/sandsea/internal/testkit/wait"
)

// patience bounds every wait of a test.
const patience = 20 * time.Second

var small = sandbox.Limits{Memory: 32 << 20, CPUMillis: 500, Pids: 20}

// open gives a manager of its own to a test.
func openManager(t testing.TB) *Manager {
	t.Helper()
	require.Root(t)
	require.Feature(t, "cgroup2")
	m, err := Open(Config{Tag: leak.Tag()})
	if errors.Is(err, errdefs.FailedPrecondition) {
		require.That(t, "kill", err)
	}
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if err := m.Destroy(context.Background()); err != nil {
			t.Error(err)
		}
	})
	for f, why := range m.Lacks() {
		require.That(t, f, errors.New(why))
	}
	return m
}

func create(t testing.TB, m *Manager, id string) *Group {
	t.Helper()
	g, err := m.Create(id, small)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if err := g.Remove(context.Background()); err != nil {
			t.Error(err)
		}
	})
	return g
}

// start runs a shell script in the group and waits for its first line of output.
func start(t testing.TB, g *Group, dir *os.File, script string) *exec.Cmd {
	t.Helper()
	cmd := exec.Command("sh", "-c", script)
	cmd.SysProcAttr = &syscall.SysProcAttr{UseCgroupFD: true, CgroupFD: int(dir.Fd())}
	// The script begins when it is in the v1 groups too.
	gate, hold, err := os.Pipe()
	if err != nil {
		t.Fatal(err)
	}
	cmd.Stdin = gate
	cmd.Args[2] = "read go; exec </dev/null; " + script
	out, err := cmd.StdoutPipe()
	if err != nil {
		t.Fatal(err)
	}
	cmd.Stderr = os.Stderr
	if err := cmd.Start(); err != nil {
		t.Fatal(err)
	}
	gate.Close()
	t.Cleanup(func() {
		_ = cmd.Process.Kill()
		_ = cmd.Wait()
	})
	tasks, err := g.Tasks()
	if err != nil {
		t.Fatal(err)
	}
	for _, f := range tasks {
		if _, err := fmt.Fprint(f, cmd.Process.Pid); err != nil {
			t.Fatal(err)
		}
		f.Close()
	}
	if _, err := io.WriteString(hold, "go\n"); err != nil {
		t.Fatal(err)
	}
	hold.Close()
	line, err := bufio.NewReader(out).ReadString('\n')
	if line != "ready\n" {
		t.Fatalf("script said %q (%v), want ready", line, err)
	}
	return cmd
}

func TestEveryLimitIsInForce(t *testing.T) {
	m := openManager(t)
	t.Run("memory: the workload is ended and the kill is counted", func(t *testing.T) {
		g := create(t, m, "smemory")
		cmd := start(t, g, g.V2(), `echo ready; head -c 200000000 /dev/zero | tail -c 199999999 >/dev/null; exit $?`)
		wait.Until(t, patience, func() bool {
			n, err := g.OOMKills()
			return err == nil && n > 0
		}, "an out-of-memory kill")
		_ = cmd.Wait()
		u, err := g.Usage()
		if err != nil {
			t.Fatal(err)
		}
		if u.MemoryPeak > small.Memory || u.MemoryPeak < small.Memory/2 {
			t.Errorf("memory peak %d, limit %d", u.MemoryPeak, small.Memory)
		}
	})
	t.Run("cpu: half a core is half a core", func(t *testing.T) {
		g := create(t, m, "scpu")
		start(t, g, g.V2(), `echo ready; while :; do :; done`)
		begin := time.Now()
		u, err := g.Usage()
		if err != nil {
			t.Fatal(err)
		}
		first := u.CPU
		wait.Until(t, patience, func() bool { return time.Since(begin) > 600*time.Millisecond })
		u, err = g.Usage()
		if err != nil {
			t.Fatal(err)
		}
		if used, most := u.CPU-first, time.Since(begin)*65/100; used > most || used == 0 {
			t.Errorf("used %s in %s", used, time.Since(begin))
		}
	})
}

func TestPidsLimitStopsAForkBomb(t *testing.T) {
	m := openManager(t)
	g := create(t, m, "sbomb")
	// dash ends with status 2 when it cannot fork; a helper keeps the children it had.
	start(t, g, g.V2(), `(i=0; while [ $i -lt 100 ]; do sleep 100 & i=$((i+1)); done) 2>/dev/null; echo ready; sleep 100`)
	u, err := g.Usage()
	if err != nil {
		t.Fatal(err)
	}
	if u.Pids < small.Pids-2 || u.Pids > small.Pids {
		t.Errorf("%d processes, limit %d", u.Pids, small.Pids)
	}
	// One that ends is listed a little longer than it is counted.
	wait.Until(t, patience, func() bool {
		u, err := g.Usage()
		pids, perr := g.Pids()
		return err == nil && perr == nil && int64(len(pids)) == u.Pids
	}, "as many in the list as the counter says")
	if err := g.Kill(); err != nil {
		t.Fatal(err)
	}
	ctx, stop := context.WithTimeout(t.Context(), patience)
	defer stop()
	if err := g.WaitEmpty(ctx); err != nil {
		t.Fatal(err)
	}
}

func TestCreateIsWholeOrNothing(t *testing.T) {
	m := openManager(t)
	t.Run("a second create of a name says that it exists", func(t *testing.T) {
		create(t, m, "stwice")
		if _, err := m.Create("stwice", small); !errors.Is(err, errdefs.AlreadyExists) {
			t.Errorf("got %v", err)
		}
		if _, err := m.Find("stwice"); err != nil {
			t.Errorf("the first is gone: %v", err)
		}
	})
	t.Run("a limit that the kernel refuses names its field and leaves nothing", func(t *testing.T) {
		l := small
		l.Pids = 1 << 40
		_, err := m.Create("srefused", l)
		e, ok := errors.AsType[*errdefs.Error](err)
		if !ok || e.Kind != errdefs.FailedPrecondition || e.Field != "limits.pids" || e.Feature != node.FeaturePids ||
			!strings.Contains(e.Msg, "pids.max") {
			t.Errorf("got %v", err)
		}
		names, err := m.Names()
		if err != nil || slices.Contains(names, "srefused") {
			t.Errorf("left %v, %v", names, err)
		}
	})
	t.Run("a limit that is not set is refused", func(t *testing.T) {
		_, err := m.Create("sunset", sandbox.Limits{Memory: 1 << 30, Pids: 10})
		if e, ok := errors.AsType[*errdefs.Error](err); !ok || e.Kind != errdefs.Invalid || e.Field != "limits.cpu_millis" {
			t.Errorf("got %v", err)
		}
	})
	t.Run("a name that is a path is refused", func(t *testing.T) {
		for _, id := range []string{"", "..", "a/b", "_keeper", "S", strings.Repeat("s", 200)} {
			if _, err := m.Create(id, small); !errors.Is(err, errdefs.Invalid) {
				t.Errorf("%q: got %v", id, err)
			}
			if err := m.Remove(t.Context(), id); !errors.Is(err, errdefs.Invalid) {
				t.Errorf("remove %q: got %v", id, err)
			}
		}
	})
	t.Run("a group that is gone is NotFound", func(t *testing.T) {
		if _, err := m.Find("snever"); !errors.Is(err, errdefs.NotFound) {
			t.Errorf("got %v", err)
		}
		g, err := m.Create("sgone", small)
		if err != nil {
			t.Fatal(err)
		}
		defer g.Close()
		if err := m.Remove(t.Context(), "sgone"); err != nil {
			t.Fatal(err)
		}
		if err := g.Update(small); !errors.Is(err, errdefs.NotFound) {
			t.Errorf("update: got %v", err)
		}
		if _, err := g.Exec(1, 0); !errors.Is(err, errdefs.NotFound) {
			t.Errorf("exec: got %v", err)
		}
		if err := g.Kill(); err != nil {
			t.Errorf("kill: %v", err)
		}
		if p, err := g.Populated(); p || err != nil {
			t.Errorf("populated: %v %v", p, err)
		}
		if err := g.Remove(t.Context()); err != nil {
			t.Errorf("remove again: %v", err)
		}
	})
}

func TestUpdateChangesAllLimitsOrNone(t *testing.T) {
	m := openManager(t)
	g := create(t, m, "supdate")
	read := func(controller, v1, v2 string) string {
		p := m.at[controller]
		file := v1
		if p.v2 {
			file = v2
		}
		b, err := os.ReadFile(filepath.Join(p.mount, m.name, "supdate", file))
		if err != nil {
			t.Fatal(err)
		}
		return strings.TrimSpace(string(b))
	}
	check := func(memory, quota, pids string) {
		t.Helper()
		if got := read("memory", "memory.limit_in_bytes", "memory.max"); got != memory {
			t.Errorf("memory is %s, want %s", got, memory)
		}
		if got := read("cpu", "cpu.cfs_quota_us", "cpu.max"); got != quota && got != quota+" 100000" {
			t.Errorf("quota is %s, want %s", got, quota)
		}
		if got := read("pids", "pids.max", "pids.max"); got != pids {
			t.Errorf("pids is %s, want %s", got, pids)
		}
	}
	check("33554432", "50000", "20")
	for _, l := range []sandbox.Limits{
		{Memory: 128 << 20, CPUMillis: 2000, Pids: 50},
		{Memory: 16 << 20, CPUMillis: 10, Pids: 8},
	} {
		if err := g.Update(l); err != nil {
			t.Fatal(err)
		}
		check(fmt.Sprint(l.Memory), fmt.Sprint(l.CPUMillis*100), fmt.Sprint(l.Pids))
	}
	bad := sandbox.Limits{Memory: 64 << 20, CPUMillis: 700, Pids: 1 << 40}
	if err := g.Update(bad); !errors.Is(err, errdefs.FailedPrecondition) {
		t.Errorf("got %v", err)
	}
	check("16777216", "1000", "8")
}

func TestACommandHasAGroupOfItsOwn(t *testing.T) {
	m := openManager(t)
	g := create(t, m, "sexec")
	const base = 1 << 20
	if err := g.Own(base); err != nil {
		t.Fatal(err)
	}
	newExec := func(n int64) *Exec {
		t.Helper()
		e, err := g.Exec(n, base)
		if err != nil {
			t.Fatal(err)
		}
		t.Cleanup(func() { e.Close() })
		return e
	}
	t.Run("it is found again after a restart, and belongs to the sandbox's root", func(t *testing.T) {
		e := newExec(1)
		again := newExec(1)
		for _, d := range []*os.File{g.V2(), e.Dir, again.Dir} {
			st, err := os.Stat(filepath.Join(d.Name(), "cgroup.procs"))
			if err != nil {
				t.Fatal(err)
			}
			if uid := st.Sys().(*syscall.Stat_t).Uid; uid != base {
				t.Errorf("%s belongs to %d", d.Name(), uid)
			}
		}
		if err := e.Remove(); err != nil {
			t.Fatal(err)
		}
		if err := again.Remove(); err != nil {
			t.Errorf("remove again: %v", err)
		}
	})
	t.Run("a signal reaches every process once, also those that left the session", func(t *testing.T) {
		e := newExec(2)
		cmd := start(t, g, e.Dir, `trap 'exit 7' TERM; setsid sleep 100 & setsid sleep 100 & echo ready; wait`)
		// A child that has not reached its program yet still has the shell's trap.
		wait.Until(t, patience, func() bool {
			pids, err := e.Pids()
			sleeps := 0
			for _, pid := range pids {
				if name, _ := os.ReadFile(fmt.Sprintf("/proc/%d/comm", pid)); string(name) == "sleep\n" {
					sleeps++
				}
			}
			return err == nil && sleeps == 2
		}, "two sleeps")
		if err := e.Signal(int(syscall.SIGTERM)); err != nil {
			t.Fatal(err)
		}
		if err, _ := errors.AsType[*exec.ExitError](cmd.Wait()); err == nil || err.ExitCode() != 7 {
			t.Errorf("shell ended with %v, want its own 7", err)
		}
		wait.Until(t, patience, func() bool { p, err := e.Populated(); return err == nil && !p }, "empty")
		if cpu, err := e.CPU(); err != nil || cpu <= 0 {
			t.Errorf("CPU %v, %v", cpu, err)
		}
		if err := e.Remove(); err != nil {
			t.Error(err)
		}
	})
	t.Run("a signal that meets the end is no error", func(t *testing.T) {
		e := newExec(7)
		if err := e.Remove(); err != nil {
			t.Fatal(err)
		}
		pids, err := e.Pids()
		if err := errors.Join(err, e.Signal(int(syscall.SIGINT)), e.Kill()); err != nil || len(pids) > 0 {
			t.Errorf("%v, %v", pids, err)
		}
	})
	t.Run("a kill through the kill file ends the tree and nothing beside it", func(t *testing.T) {
		e, other := newExec(3), newExec(4)
		cmd := start(t, g, e.Dir, `trap '' TERM HUP INT; setsid sleep 100 & echo ready; while :; do sleep 100; done`)
		start(t, g, other.Dir, `echo ready; sleep 100`)
		if _, err := io.WriteString(e.KillFile, "1"); err != nil {
			t.Fatal(err)
		}
		_ = cmd.Wait()
		wait.Until(t, patience, func() bool { p, err := e.Populated(); return err == nil && !p }, "empty")
		if p, err := other.Populated(); !p || err != nil {
			t.Errorf("the other command is gone: %v", err)
		}
	})
	t.Run("processes that are left live on in the sandbox", func(t *testing.T) {
		e := newExec(5)
		cmd := start(t, g, e.Dir, `echo ready; exec sleep 100`)
		if err := e.Remove(); err != nil {
			t.Fatal(err)
		}
		if err := e.Remove(); err != nil {
			t.Errorf("remove again: %v", err)
		}
		pids, err := g.Pids()
		if err != nil || !slices.Contains(pids, cmd.Process.Pid) {
			t.Errorf("pids %v, %v, want %d among them", pids, err, cmd.Process.Pid)
		}
		// Nobody was moved, since it goes by number; the group goes once it is empty.
		where, err := os.ReadFile(fmt.Sprintf("/proc/%d/cgroup", cmd.Process.Pid))
		if err != nil || !strings.Contains(string(where), "/sexec/e5\n") {
			t.Errorf("it is in %s (%v)", where, err)
		}
		_ = cmd.Process.Kill()
		_ = cmd.Wait()
		wait.Until(t, patience, func() bool {
			x := newExec(6)
			defer func() { _ = x.Remove() }()
			return !cgroupfs.Exists(g.V2(), "e5")
		}, "the end of the group")
	})
}

func TestAfterARestart(t *testing.T) {
	m := openManager(t)
	g := create(t, m, "slives")
	cmd := start(t, g, g.V2(), `echo ready; sleep 100`)
	left, err := m.Create("sleft", small)
	if err != nil {
		t.Fatal(err)
	}
	left.Close()
	// What a crash in the middle of a removal leaves: a name in one tree only.
	if err := os.Remove(left.V2().Name()); err != nil {
		t.Fatal(err)
	}

	again, err := Open(Config{Tag: strings.TrimPrefix(m.name, "sandsea-")})
	if err != nil {
		t.Fatal(err)
	}
	defer again.Close()
	names, err := again.Names()
	if err != nil {
		t.Fatal(err)
	}
	want := []string{"sleft", "slives"}
	if m.Mode() == "v2" {
		want = want[1:]
	}
	if !slices.Equal(names, want) {
		t.Errorf("names %v, want %v", names, want)
	}
	for range 2 {
		if err := again.Remove(t.Context(), "sleft"); err != nil {
			t.Fatal(err)
		}
	}
	found, err := again.Find("slives")
	if err != nil {
		t.Fatal(err)
	}
	defer found.Close()
	kill, err := found.KillFile()
	if err != nil {
		t.Fatal(err)
	}
	defer kill.Close()
	if _, err := io.WriteString(kill, "1"); err != nil {
		t.Fatal(err)
	}
	_ = cmd.Wait()
	if err := again.Remove(t.Context(), "slives"); err != nil {
		t.Fatal(err)
	}
	if names, err := again.Names(); err != nil || len(names) > 0 {
		t.Errorf("names %v, %v", names, err)
	}
}

func TestTwoEdgesDoNotSeeEachOther(t *testing.T) {
	a, b := openManager(t), openManager(t)
	create(t, a, "ssame")
	create(t, b, "ssame")
	if err := b.Destroy(t.Context()); err != nil {
		t.Fatal(err)
	}
	if names, err := a.Names(); err != nil || !slices.Equal(names, []string{"ssame"}) {
		t.Errorf("names %v, %v", names, err)
	}
}

func TestDestroyLeavesNothingOfRunningSandboxesAndDaemons(t *testing.T) {
	m := openManager(t)
	g := create(t, m, "sruns")
	start(t, g, g.V2(), `setsid sleep 100 & echo ready; sleep 100`)
	d, err := m.Daemon("keeper")
	if err != nil {
		t.Fatal(err)
	}
	defer d.Close()
	if names, err := m.Names(); err != nil || !slices.Equal(names, []string{"sruns"}) {
		t.Errorf("names %v, %v: a daemon is not a sandbox", names, err)
	}
	if err := m.Destroy(t.Context()); err != nil {
		t.Fatal(err)
	}
	for _, p := range m.places() {
		if _, err := os.Stat(filepath.Join(p.mount, m.name)); !errors.Is(err, os.ErrNotExist) {
			t.Errorf("%s/%s: %v", p.mount, m.name, err)
		}
	}
}

func TestADaemonThatOutgrowsItsMemoryEnds(t *testing.T) {
	m := openManager(t)
	dir, err := m.Daemon("grows")
	if err != nil {
		t.Fatal(err)
	}
	defer dir.Close()
	cmd := exec.Command("sh", "-c", `read x; head -c 200000000 /dev/zero | tail -c 199999999 >/dev/null`)
	cmd.SysProcAttr = &syscall.SysProcAttr{UseCgroupFD: true, CgroupFD: int(dir.Fd())}
	in, err := cmd.StdinPipe()
	if err != nil {
		t.Fatal(err)
	}
	if err := cmd.Start(); err != nil {
		t.Fatal(err)
	}
	for range 2 {
		if err := m.LimitDaemon("grows", 16<<20); err != nil {
			t.Error(err)
		}
	}
	if _, err := io.WriteString(in, "go\n"); err != nil {
		t.Error(err)
	}
	ended := make(chan error, 1)
	go func() { ended <- cmd.Wait() }()
	select {
	case err := <-ended:
		if killed := 128 + int(syscall.SIGKILL); cmd.ProcessState.ExitCode() != killed {
			t.Errorf("it ends with %v, want status %d", err, killed)
		}
	case <-time.After(patience):
		_ = cmd.Process.Kill()
		t.Errorf("it goes on: %v", <-ended)
	}
}

func TestWithoutV2NothingIsPromised(t *testing.T) {
	_, err := open(Config{Tag: "x"}, mounts{v1: map[string]string{"memory": "/sys/fs/cgroup/memory"}})
	if e, ok := errors.AsType[*errdefs.Error](err); !ok || e.Kind != errdefs.FailedPrecondition ||
		e.Feature != node.FeatureKill || e.Hint == "" {
		t.Errorf("got %v", err)
	}
}

func TestAControllerThatIsNowhereIsRefused(t *testing.T) {
	m := openManager(t)
	p, ok := m.at["pids"]
	if !ok || p.v2 {
		t.Skip("pids is on the v2 tree, where it cannot be left out")
	}
	one, err := open(Config{Tag: leak.Tag()}, mounts{v2: m.v2.mount, v1: map[string]string{
		"memory": m.at["memory"].mount, "cpu": m.at["cpu"].mount,
	}})
	if err != nil {
		t.Fatal(err)
	}
	defer func() {
		if err := one.Destroy(t.Context()); err != nil {
			t.Error(err)
		}
	}()
	if _, ok := one.Mechanisms()[node.FeaturePids]; ok {
		t.Error("pids has a mechanism")
	}
	_, err = one.Create("s1", small)
	if e, ok := errors.AsType[*errdefs.Error](err); !ok || e.Kind != errdefs.FailedPrecondition ||
		e.Field != "limits.pids" {
		t.Errorf("got %v", err)
	}
	if names, err := one.Names(); err != nil || len(names) > 0 {
		t.Errorf("left %v, %v", names, err)
	}
}

// BenchmarkCreate is directories and limits, and their removal apart.
func BenchmarkCreate(b *testing.B) {
	m := openManager(b)
	ctx := context.Background()
	var samples []time.Duration
	i := 0
	for b.Loop() {
		id := fmt.Sprintf("s%d", i)
		i++
		begin := time.Now()
		g, err := m.Create(id, small)
		samples = append(samples, time.Since(begin))
		if err != nil {
			b.Fatal(err)
		}
		if err := g.Remove(ctx); err != nil {
			b.Fatal(err)
		}
	}
	slices.Sort(samples)
	b.ReportMetric(float64(samples[len(samples)/2].Microseconds()), "create-p50-µs")
	b.ReportMetric(float64(samples[len(samples)*99/100].Microseconds()), "create-p99-µs")
}

// BenchmarkExec is making and removing the group of a command.
func BenchmarkExec(b *testing.B) {
	m := openManager(b)
	g := create(b, m, "sbench")
	n := int64(0)
	for b.Loop() {
		n++
		e, err := g.Exec(n, 1<<20)
		if err != nil {
			b.Fatal(err)
		}
		if err := e.Remove(); err != nil {
			b.Fatal(err)
		}
	}
}
