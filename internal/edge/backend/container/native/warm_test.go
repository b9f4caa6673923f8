package native

import (
	"context"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"sync"
	"syscall"
	"testing"

	"github.com/moby/sys/mountinfo"

	"github.com/sandsea/sandsea/internal/chronus"
	"github.com/sandsea/sandsea/internal/edge/backend"
	"github.com/sandsea/sandsea/internal/edge/backend/conform"
	"github.com/sandsea/sandsea/internal/linux/pidfd"
	"github.com/sandsea/sandsea/internal/sandbox"
	"github.com/sandsea/sandsea/internal/testkit/leak"
	"github.com/sandsea/sandsea/internal/testkit/wait"
)

// full waits until the pool is.
func (e *edge) full(tb testing.TB) {
	tb.Helper()
	e.warm.open()
	wait.Until(tb, patience, func() bool { return len(e.warm.names()) == e.warm.size }, "a full pool")
}

// leftBeside lists what there is of any sandbox beside what this edge has made ready.
func (m *machine) leftBeside(tb testing.TB, e *edge) []string {
	tb.Helper()
	var left []string
	// What is in the making has a group for a moment.
	wait.For(patience, func() bool {
		warm := e.warm.names()
		left = slices.DeleteFunc(m.left(tb), func(n string) bool {
			name, ok := strings.CutPrefix(n, "control group ")
			return ok && slices.Contains(warm, name)
		})
		return len(left) == 0
	})
	return left
}

func TestConformWithSandboxesMadeReadyAhead(t *testing.T) {
	m := use(t)
	conform.Run(t, func(*testing.T) conform.Fixture {
		var current *edge
		return conform.Fixture{
			Plan: m.plan(),
			Open: func(t *testing.T) backend.Backend {
				if current != nil {
					current.close()
				}
				current = m.openWarm(t, 3)
				current.full(t)
				return current
			},
			Left: func(t *testing.T) []string { return m.leftBeside(t, current) },
			Tree: []string{"sh", "-c", "sleep 60 & sleep 60 & wait"},
			KillInit: func(t *testing.T, id sandbox.ID) {
				current.mu.Lock()
				i := current.instances[id]
				current.mu.Unlock()
				if err := pidfd.Signal(i.pidfd, syscall.SIGKILL); err != nil {
					t.Fatal(err)
				}
			},
			Limits: smallLimits,
		}
	})
}

func TestABurstBeyondThePoolIsServed(t *testing.T) {
	m := use(t)
	e := m.openWarm(t, 4)
	e.full(t)
	var mu sync.Mutex
	var all []backend.Instance
	var wg sync.WaitGroup
	for range 50 {
		wg.Go(func() {
			i, err := e.Start(t.Context(), m.spec(newID(t)))
			if err != nil {
				t.Error(err)
				return
			}
			mu.Lock()
			all = append(all, i)
			mu.Unlock()
		})
	}
	wg.Wait()
	groups := map[string]bool{}
	bases := map[uint32]bool{}
	for _, i := range all {
		groups[i.(*Instance).group.ID()] = true
		bases[i.UIDBase()] = true
	}
	if len(groups) != 50 || len(bases) != 50 {
		t.Errorf("%d groups and %d ranges of ids for 50 sandboxes", len(groups), len(bases))
	}
	for _, i := range all {
		if _, err := i.Stop(t.Context(), 0); err != nil {
			t.Error(err)
		}
	}
	e.full(t)
	if n := len(e.warm.names()); n > 4 {
		t.Errorf("%d are ready, at most 4 should be", n)
	}
	if left := m.leftBeside(t, e); len(left) > 0 {
		t.Errorf("left: %q", left)
	}
}

func TestOneThatDiedWhileItWaitedIsThrownAway(t *testing.T) {
	m := use(t)
	e := m.openWarm(t, 3)
	e.full(t)
	e.warm.mu.Lock()
	dead := slices.Clone(e.warm.ready[:2])
	e.warm.mu.Unlock()
	for _, s := range dead {
		if err := pidfd.Signal(s.pidfd, syscall.SIGKILL); err != nil {
			t.Fatal(err)
		}
		if err := pidfd.Wait(t.Context(), s.pidfd); err != nil {
			t.Fatal(err)
		}
	}
	b := e.start(t, m.plan(), smallLimits)
	if got := b.sh("echo alive"); got != "alive" {
		t.Errorf("got %q", got)
	}
	if slices.ContainsFunc(dead, func(s *shell) bool { return s.pid == b.pid }) {
		t.Error("it lives in a dead one")
	}
	names, err := m.groups.Names()
	if err != nil {
		t.Fatal(err)
	}
	for _, s := range dead {
		if slices.Contains(names, s.group.ID()) {
			t.Errorf("group %s is left", s.group.ID())
		}
	}
}

// TestAnEdgeThatDiesTakesWhatItMadeReadyAlong: the kernel closes the lines of a killed edge; what is left are names.
func TestAnEdgeThatDiesTakesWhatItMadeReadyAlong(t *testing.T) {
	m := use(t)
	first := m.openWarm(t, 5)
	first.full(t)
	kept := first.start(t, m.plan(), smallLimits)
	h := kept.Handle()
	first.full(t)
	first.warm.mu.Lock()
	var pids []*os.File
	for _, s := range first.warm.ready {
		f, err := pidfd.Open(s.pid)
		if err != nil {
			t.Error(err)
			continue
		}
		pids = append(pids, f)
		// As the kernel does at kill -9; nothing of discard runs.
		_ = s.line.Close()
		s.control.Close()
	}
	first.warm.ready = nil
	first.warm.closed = true
	first.warm.size = 0
	first.warm.mu.Unlock()
	for _, f := range pids {
		if err := pidfd.Wait(t.Context(), f); err != nil {
			t.Error(err)
		}
		f.Close()
	}
	if names, err := m.groups.Names(); err != nil || len(names) != 6 {
		t.Fatalf("groups before the sweep: %q, %v", names, err)
	}
	first.close()
	second := m.openWarm(t, 2)
	again, err := second.Recover(t.Context(), kept.id, h)
	if err != nil {
		t.Fatal(err)
	}
	if err := second.Sweep(t.Context(), func(id sandbox.ID) bool { return id == kept.id }); err != nil {
		t.Error(err)
	}
	second.full(t)
	want := append(second.warm.names(), again.(*Instance).group.ID())
	slices.Sort(want)
	if names, err := m.groups.Names(); err != nil || !slices.Equal(names, want) {
		t.Errorf("groups %q, %v, want %q", names, err, want)
	}
	if _, _, err := again.Channel().Hello(t.Context()); err != nil {
		t.Error(err)
	}
	if _, err := again.Stop(t.Context(), 0); err != nil {
		t.Error(err)
	}
}

func TestTheLimitsOfAStartHoldInOneMadeReadyAhead(t *testing.T) {
	m := use(t)
	e := m.openWarm(t, 2)
	for _, l := range []sandbox.Limits{
		{Memory: 96 << 20, CPUMillis: 600, Disk: 32 << 20, Pids: 17, OpenFiles: 77, Output: 1 << 20},
		{Memory: 128 << 20, CPUMillis: 2000, Disk: 64 << 20, Pids: 80, OpenFiles: 99, Output: 1 << 20},
		{Memory: 33 << 20, CPUMillis: 700, Disk: 32 << 20, Pids: 9, OpenFiles: 55, Output: 1 << 20},
	} {
		e.full(t)
		warm := e.warm.names()
		b := e.start(t, m.plan(), l)
		if !slices.Contains(warm, b.group.ID()) {
			t.Fatal("it was not one made ready ahead")
		}
		for file, want := range map[string]string{
			"memory.limit_in_bytes": strconv.FormatInt(l.Memory, 10), "memory.max": strconv.FormatInt(l.Memory, 10),
			"cpu.cfs_quota_us": strconv.FormatInt(l.CPUMillis*100, 10), "pids.max": strconv.FormatInt(l.Pids, 10),
			"cpu.max": strconv.FormatInt(l.CPUMillis*100, 10) + " 100000",
		} {
			for _, path := range groupFiles(t, m, b.group.ID(), file) {
				if got, err := os.ReadFile(path); err != nil || strings.TrimSpace(string(got)) != want {
					t.Errorf("%s: %q, %v, want %s", path, got, err, want)
				}
			}
		}
		shm := l.Memory / 2 &^ 4095
		if got := b.sh("ulimit -n; df -k /dev/shm | tail -1 | tr -s ' ' | cut -d' ' -f2; nproc"); got !=
			strconv.FormatInt(l.OpenFiles, 10)+"\n"+strconv.FormatInt((shm+65536)>>10, 10)+"\n"+
				strconv.Itoa(e.visible(l.CPUMillis)) {
			t.Errorf("inside: %q", got)
		}
		// They bite: a process too many is refused, and memory beyond the limit is not to be had.
		if out, _ := b.run(chronus.IDs{}, "for i in $(seq 200); do sleep 1 & done"); !strings.Contains(out, "fork") {
			t.Errorf("200 processes: %q", out)
		}
		if n, err := b.OOMKills(); n != 0 || err != nil {
			t.Errorf("%d kills, %v", n, err)
		}
		_, ws := b.run(chronus.IDs{}, "head -c "+strconv.FormatInt(l.Memory*2, 10)+" /dev/zero | tail -c "+
			strconv.FormatInt(l.Memory*2, 10)+" >/dev/null")
		if n, err := b.OOMKills(); n == 0 || err != nil {
			t.Errorf("twice the memory: status %v, %d kills, %v", ws, n, err)
		}
		b.stop(t)
	}
}

// groupFiles finds a file of a group in all trees of control groups.
func groupFiles(t *testing.T, m *machine, group, file string) []string {
	t.Helper()
	mounts, err := mountinfo.GetMounts(mountinfo.FSTypeFilter("cgroup", "cgroup2"))
	if err != nil {
		t.Fatal(err)
	}
	var out []string
	for _, mt := range mounts {
		path := filepath.Join(mt.Mountpoint, "sandsea-"+m.tag, group, file)
		if _, err := os.Stat(path); err == nil {
			out = append(out, path)
		}
	}
	return out
}

func TestManyCyclesThroughThePoolLeaveNothing(t *testing.T) {
	m := use(t)
	life := func(n int) {
		e := m.openWarm(t, DefaultWarm)
		var wg sync.WaitGroup
		for range 4 {
			wg.Go(func() {
				for range n / 4 {
					i, err := e.Start(t.Context(), m.spec(newID(t)))
					if err != nil {
						t.Error(err)
						return
					}
					if x, err := i.Stop(t.Context(), 0); err != nil || x.Cause != sandbox.CauseStopped {
						t.Errorf("Stop = %v, %v", x, err)
					}
				}
			})
		}
		wg.Wait()
		e.full(t)
		if left := m.leftBeside(t, e); len(left) > 0 {
			t.Errorf("left: %q", left)
		}
		if now := rangesTaken(e); now != DefaultWarm {
			t.Errorf("%d ranges taken, want %d", now, DefaultWarm)
		}
		e.close()
		if left := m.left(t); len(left) > 0 {
			t.Errorf("left after the edge's end: %q", left)
		}
		if now := rangesTaken(e); now != 0 {
			t.Errorf("%d ranges taken after the edge's end", now)
		}
	}
	life(16) // whatever is opened lazily
	mounts := countMounts(t)
	before, err := leak.Take(m.dir)
	if err != nil {
		t.Fatal(err)
	}
	life(200)
	if err := leak.Compare(before, m.dir); err != nil {
		t.Error(err)
	}
	// Others mount and unmount on the machine meanwhile.
	wait.Until(t, patience, func() bool { return countMounts(t) <= mounts }, fmt.Sprintf("no more mounts than the %d of before", mounts))
}

// TestASandboxOfAnOlderEdgeIsFound: before there was a pool, a sandbox's control group had its id for a name.
func TestASandboxOfAnOlderEdgeIsFound(t *testing.T) {
	m := use(t)
	first := m.open(t)
	id := newID(t)
	first.nameGroup = func() string { return string(id) }
	i, err := first.Start(t.Context(), m.spec(id))
	if err != nil {
		t.Fatal(err)
	}
	h := backend.Handle(strings.Replace(string(i.Handle()), `"group":"`+string(id)+`",`, "", 1))
	if strings.Contains(string(h), `"group":`) {
		t.Fatalf("handle %s", h)
	}
	first.close()
	second := m.openWarm(t, 1)
	again, err := second.Recover(t.Context(), id, h)
	if err != nil {
		t.Fatal(err)
	}
	if err := second.Sweep(t.Context(), func(x sandbox.ID) bool { return x == id }); err != nil {
		t.Fatal(err)
	}
	if _, _, err := again.Channel().Hello(t.Context()); err != nil {
		t.Error(err)
	}
	if _, err := again.Stop(context.Background(), 0); err != nil {
		t.Error(err)
	}
	if left := m.leftBeside(t, second); len(left) > 0 {
		t.Errorf("left: %q", left)
	}
}

func TestMessagesNameTheSandboxAndNotItsGroup(t *testing.T) {
	m := use(t)
	e := m.openWarm(t, 1)
	e.full(t)
	b := e.start(t, m.plan(), smallLimits)
	l := smallLimits
	l.Pids = 0
	err := b.Update(t.Context(), l)
	if err == nil || !strings.Contains(err.Error(), string(b.id)) || strings.Contains(err.Error(), b.group.ID()) {
		t.Errorf("got %v", err)
	}
}
