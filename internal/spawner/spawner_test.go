package spawner_test

import (
	"bufio"
	"context"
	"crypto/rand"
	"encoding/hex"
	"errors"
	"fmt"
	"io"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"

	"github.com/sandsea/sandsea/api/errdefs"
	"github.com/sandsea/sandsea/internal/edge/cgroup"
	"github.com/sandsea/sandsea/internal/linux/mount"
	"github.com/sandsea/sandsea/internal/linux/pidfd"
	"github.com/sandsea/sandsea/internal/linux/scm"
	"github.com/sandsea/sandsea/internal/sandbox"
	"github.com/sandsea/sandsea/internal/spawner"
	"github.com/sandsea/sandsea/internal/testkit/process"
)

const limit = 20 * time.Second

// node is a spawner process with the control groups that it needs.
type node struct {
	cmd    *exec.Cmd
	socket string
	groups *cgroup.Manager
	dev    *os.File
}

func start(tb testing.TB) *node {
	tb.Helper()
	if os.Getuid() != 0 {
		tb.Skip("needs root for namespaces and control groups")
	}
	var tag [4]byte
	_, _ = rand.Read(tag[:])
	groups, err := cgroup.Open(cgroup.Config{Tag: "test-" + hex.EncodeToString(tag[:])})
	if err != nil {
		tb.Fatal(err)
	}
	tb.Cleanup(func() {
		ctx, stop := context.WithTimeout(context.Background(), limit)
		defer stop()
		if err := groups.Destroy(ctx); err != nil {
			tb.Errorf("control groups left: %v", err)
		}
	})
	n := &node{socket: filepath.Join(tb.TempDir(), "s"), groups: groups}
	n.run(tb)
	if n.dev, err = mount.New("tmpfs", 0, mount.Value("size", "64k")); err != nil {
		tb.Fatal(err)
	}
	tb.Cleanup(func() { n.dev.Close() })
	return n
}

// run starts the process; it may be called again after its end.
func (n *node) run(tb testing.TB) {
	tb.Helper()
	n.cmd = exec.Command("/proc/self/exe")
	n.cmd.Env = append(os.Environ(), "SANDSEA_TEST_SPAWNER="+n.socket)
	n.cmd.SysProcAttr = spawner.Attr()
	n.cmd.SysProcAttr.Pdeathsig = syscall.SIGKILL
	n.cmd.Stderr = tb.Output()
	if err := n.cmd.Start(); err != nil {
		tb.Fatal(err)
	}
	cmd := n.cmd
	tb.Cleanup(func() {
		_ = cmd.Process.Kill()
		_ = cmd.Wait()
	})
}

func (n *node) dial(tb testing.TB) spawner.Client {
	tb.Helper()
	var c spawner.Client
	wait(tb, "the spawner answers", func() error {
		var err error
		c, err = spawner.Dial(tb.Context(), n.socket, dataID)
		return err
	})
	tb.Cleanup(func() { c.Close() })
	return c
}

// wait polls for a condition; with a test framework there is no event for "somebody else is ready".
func wait(tb testing.TB, what string, cond func() error) {
	tb.Helper()
	ctx, stop := context.WithTimeout(context.Background(), limit)
	defer stop()
	tick := time.NewTicker(2 * time.Millisecond)
	defer tick.Stop()
	for {
		err := cond()
		if err == nil {
			return
		}
		select {
		case <-tick.C:
		case <-ctx.Done():
			tb.Fatalf("%s: %v", what, err)
		}
	}
}

var limits = sandbox.Limits{Memory: 64 << 20, CPUMillis: 1000, Pids: 64}

// spec makes the group of a sandbox and all that Spawn needs.
func (n *node) spec(tb testing.TB, id string) (spawner.Spec, *cgroup.Group) {
	tb.Helper()
	g, err := n.groups.Create(id, limits)
	if err != nil {
		tb.Fatal(err)
	}
	tasks, err := g.Tasks()
	if err != nil {
		tb.Fatal(err)
	}
	tb.Cleanup(func() {
		scm.CloseFiles(tasks)
		if err := g.Remove(context.Background()); err != nil {
			tb.Errorf("remove %s: %v", id, err)
		}
	})
	root, err := mount.New("tmpfs", 0, mount.Value("size", "64k"))
	if err != nil {
		tb.Fatal(err)
	}
	tb.Cleanup(func() { root.Close() })
	return spawner.Spec{ID: id, Cgroup: g.V2(), Tasks: tasks, Root: root, Dev: n.dev, UIDBase: 0x70000000}, g
}

func closeChild(c spawner.Child) { scm.CloseFiles([]*os.File{c.Pidfd, c.Control}) }

func status(tb testing.TB, pid int, key string) string {
	tb.Helper()
	b, err := os.ReadFile(fmt.Sprintf("/proc/%d/status", pid))
	if err != nil {
		tb.Fatal(err)
	}
	for line := range strings.Lines(string(b)) {
		if v, ok := strings.CutPrefix(line, key+":"); ok {
			return strings.Join(strings.Fields(v), " ")
		}
	}
	tb.Fatalf("no %s in the status of %d", key, pid)
	return ""
}

func TestAChildIsBornInsideItsNamespacesAndGroups(t *testing.T) {
	n := start(t)
	c := n.dial(t)
	s, g := n.spec(t, "one")
	ch, err := c.Spawn(t.Context(), s)
	if err != nil {
		t.Fatal(err)
	}
	defer closeChild(ch)
	// It is born in its v2 group and namespaces; the rest it does by itself before it becomes sandsea-init.
	exe := func() error {
		comm, err := os.ReadFile(fmt.Sprintf("/proc/%d/comm", ch.Pid))
		if err == nil && !strings.Contains(string(comm), "init") {
			err = fmt.Errorf("it is %s", comm)
		}
		return err
	}
	wait(t, "exec", exe)

	for _, ns := range []string{"user", "mnt", "pid", "ipc", "uts", "net"} {
		own, err := os.Readlink("/proc/self/ns/" + ns)
		if err != nil {
			t.Fatal(err)
		}
		theirs, err := os.Readlink(fmt.Sprintf("/proc/%d/ns/%s", ch.Pid, ns))
		if err != nil {
			t.Fatal(err)
		}
		if own == theirs {
			t.Errorf("the child shares our %s namespace", ns)
		}
	}
	for _, id := range []string{"Uid", "Gid"} {
		if got, want := status(t, ch.Pid, id), strings.TrimSpace(strings.Repeat("1879048192 ", 4)); got != want {
			t.Errorf("%s = %q, want %q", id, got, want)
		}
	}
	if got := status(t, ch.Pid, "Groups"); got != "" {
		t.Errorf("groups = %q, want none", got)
	}
	if got := status(t, ch.Pid, "NSpid"); !strings.HasSuffix(got, " 1") {
		t.Errorf("NSpid = %q, want pid 1 inside", got)
	}
	pids, err := g.Pids()
	if err != nil || !slices.Contains(pids, ch.Pid) {
		t.Errorf("the v2 group holds %v, %v, want %d", pids, err, ch.Pid)
	}
	u, err := g.Usage()
	if err != nil || u.Pids != 1 {
		t.Errorf("pids controller counts %d, %v, want 1", u.Pids, err)
	}
	groups, err := os.ReadFile(fmt.Sprintf("/proc/%d/cgroup", ch.Pid))
	if err != nil {
		t.Fatal(err)
	}
	if got := strings.Count(string(groups), "/one\n"); got != 1+len(s.Tasks) {
		t.Errorf("in %d groups named one, want %d:\n%s", got, 1+len(s.Tasks), groups)
	}
	mounts, err := os.ReadFile(fmt.Sprintf("/proc/%d/mountinfo", ch.Pid))
	if err != nil {
		t.Fatal(err)
	}
	if got := strings.Count(string(mounts), "\n"); got != 2 {
		t.Errorf("%d mounts in the nursery, want 2:\n%s", got, mounts)
	}
	fds, err := os.ReadDir(fmt.Sprintf("/proc/%d/fd", ch.Pid))
	if err != nil {
		t.Fatal(err)
	}
	if len(fds) > 10 {
		t.Errorf("the child has %d descriptors", len(fds))
	}
	if done, err := pidfd.Done(ch.Pidfd); done || err != nil {
		t.Errorf("Done = %v, %v", done, err)
	}

	// The end is told to whoever holds the pidfd, though the spawner is the parent.
	if err := pidfd.Signal(ch.Pidfd, syscall.SIGKILL); err != nil {
		t.Fatal(err)
	}
	ctx, stop := context.WithTimeout(t.Context(), limit)
	defer stop()
	if err := pidfd.Wait(ctx, ch.Pidfd); err != nil {
		t.Fatal(err)
	}
	wait(t, "the spawner waits for its child", func() error {
		ws, ok, err := pidfd.ExitStatus(ch.Pidfd)
		if errors.Is(err, pidfd.ErrNoExitInfo) {
			t.Skip(err)
		}
		if err != nil || !ok {
			return fmt.Errorf("no status yet: %w", err)
		}
		if !ws.Signaled() || ws.Signal() != syscall.SIGKILL {
			t.Fatalf("status %v, want killed", ws)
		}
		return nil
	})
}

func TestALostLineEndsTheChild(t *testing.T) {
	n := start(t)
	c := n.dial(t)
	s, _ := n.spec(t, "one")
	ch, err := c.Spawn(t.Context(), s)
	if err != nil {
		t.Fatal(err)
	}
	defer closeChild(ch)
	ch.Control.Close() // the spawner kept no copy, or the child would never know
	ctx, stop := context.WithTimeout(t.Context(), limit)
	defer stop()
	if err := pidfd.Wait(ctx, ch.Pidfd); err != nil {
		t.Fatal(err)
	}
}

func TestManySpawnsAtOnceLeaveNoDescriptorBehind(t *testing.T) {
	n := start(t)
	c := n.dial(t)
	fds := func() int {
		e, err := os.ReadDir(fmt.Sprintf("/proc/%d/fd", n.cmd.Process.Pid))
		if err != nil {
			t.Fatal(err)
		}
		return len(e)
	}
	spawnAll := func(prefix string) {
		var wg sync.WaitGroup
		for i := range 8 {
			s, _ := n.spec(t, fmt.Sprintf("%s%d", prefix, i))
			wg.Go(func() {
				ch, err := c.Spawn(t.Context(), s)
				if err != nil {
					t.Error(err)
					return
				}
				defer closeChild(ch)
				if most := fds(); most >= 64 {
					t.Errorf("the spawner holds %d descriptors", most)
				}
				if err := pidfd.Signal(ch.Pidfd, syscall.SIGKILL); err != nil {
					t.Error(err)
				}
			})
		}
		wg.Wait()
	}
	spawnAll("a") // whatever the runtime opens lazily is open after this
	before := fds()
	spawnAll("b")
	wait(t, "descriptors are closed", func() error {
		if now := fds(); now > before {
			return fmt.Errorf("%d descriptors, before %d", now, before)
		}
		return nil
	})
	wait(t, "no child is left", func() error {
		b, err := os.ReadFile(fmt.Sprintf("/proc/%d/task/%d/children", n.cmd.Process.Pid, n.cmd.Process.Pid))
		if err != nil {
			t.Skip("the kernel does not list children")
		}
		if len(b) > 0 {
			return fmt.Errorf("children %s", b)
		}
		return nil
	})
}

func TestRefusals(t *testing.T) {
	n := start(t)
	c := n.dial(t)
	s, _ := n.spec(t, "one")

	t.Run("a descriptor that is no cgroup", func(t *testing.T) {
		bad := s
		bad.Cgroup = s.Root
		_, err := c.Spawn(t.Context(), bad)
		if err == nil || !strings.Contains(err.Error(), "one") {
			t.Errorf("err = %v", err)
		}
	})
	t.Run("a spec without a /dev", func(t *testing.T) {
		bad := s
		bad.Dev = nil
		if _, err := c.Spawn(t.Context(), bad); err == nil {
			t.Error("no error")
		}
	})
	t.Run("a context that has ended", func(t *testing.T) {
		ctx, cancel := context.WithCancel(t.Context())
		cancel()
		if _, err := c.Spawn(ctx, s); err == nil {
			t.Error("no error")
		}
	})
	t.Run("a client of another data directory", func(t *testing.T) {
		_, err := spawner.Dial(t.Context(), n.socket, "another")
		if !errors.Is(err, errdefs.FailedPrecondition) {
			t.Errorf("err = %v", err)
		}
	})
	t.Run("the first client still works", func(t *testing.T) {
		ch, err := c.Spawn(t.Context(), s)
		if err != nil {
			t.Fatal(err)
		}
		_ = pidfd.Signal(ch.Pidfd, syscall.SIGKILL)
		closeChild(ch)
	})
	t.Run("a peer that breaks the protocol loses its connection only", func(t *testing.T) {
		raw, err := scm.Dial(t.Context(), n.socket)
		if err != nil {
			t.Fatal(err)
		}
		defer raw.Close()
		if err := raw.Send(t.Context(), []byte("hello")); err != nil {
			t.Fatal(err)
		}
		if _, _, err := raw.Recv(t.Context(), make([]byte, 1024)); !errors.Is(err, io.EOF) {
			t.Errorf("err = %v, want EOF", err)
		}
		n.dial(t)
	})
}

// TestKill: kill -9 of the spawner at any point of a spawn leaves a child that can be killed by the name of its
// cgroup, or none; never one outside of it. A new spawner takes over.
func TestKill(t *testing.T) {
	n := start(t)
	for i := range 5 {
		c := n.dial(t)
		var wg sync.WaitGroup
		var groups []*cgroup.Group
		var mu sync.Mutex
		var children []spawner.Child
		for j := range 6 {
			s, g := n.spec(t, fmt.Sprintf("k%d-%d", i, j))
			groups = append(groups, g)
			wg.Go(func() {
				ch, err := c.Spawn(t.Context(), s)
				if err != nil {
					if !errors.Is(err, errdefs.Unavailable) {
						t.Errorf("Spawn = %v, want Unavailable", err)
					}
					return
				}
				mu.Lock()
				children = append(children, ch)
				if len(children) == 1+i%3 { // somewhere in the middle
					_ = n.cmd.Process.Kill()
				}
				mu.Unlock()
			})
		}
		wg.Wait()
		_ = n.cmd.Wait()
		for _, ch := range children {
			// The ones that were handed over live on without the spawner.
			if done, err := pidfd.Done(ch.Pidfd); done || err != nil {
				t.Errorf("child %d: done %v, %v", ch.Pid, done, err)
			}
		}
		for _, g := range groups {
			if err := g.Kill(); err != nil {
				t.Error(err)
			}
			if err := g.WaitEmpty(t.Context()); err != nil {
				t.Error(err)
			}
		}
		for _, ch := range children {
			closeChild(ch)
		}
		wait(t, "no sandsea-init is left", func() error { return noneLeft(fmt.Sprintf("k%d-", i)) })
		if _, err := c.Spawn(t.Context(), spawner.Spec{Cgroup: n.dev, Root: n.dev, Dev: n.dev}); !errors.Is(err,
			errdefs.Unavailable) {
			t.Errorf("Spawn over a broken connection = %v", err)
		}
		n.run(t)
	}
}

// noneLeft looks for processes in any group whose name begins so.
func noneLeft(prefix string) error {
	procs, err := filepath.Glob("/proc/[0-9]*/cgroup")
	if err != nil {
		return err
	}
	for _, p := range procs {
		f, err := os.Open(p)
		if err != nil {
			continue // it ended meanwhile
		}
		s := bufio.NewScanner(f)
		for s.Scan() {
			if strings.Contains(s.Text(), "/"+prefix) {
				f.Close()
				// Dead is enough: after the spawner the machine's pid 1 is the one to wait for it, in its own time.
				pid, err := strconv.Atoi(filepath.Base(filepath.Dir(p)))
				if err == nil && !process.Alive(pid) {
					break
				}
				return fmt.Errorf("%s: %s", p, s.Text())
			}
		}
		f.Close()
	}
	return nil
}

func TestRunRefusesTheNamespaceOfItsParent(t *testing.T) {
	cmd := exec.Command("/proc/self/exe")
	cmd.Env = append(os.Environ(), "SANDSEA_TEST_SPAWNER="+filepath.Join(t.TempDir(), "s"))
	out, err := cmd.CombinedOutput()
	if err == nil || !strings.Contains(string(out), "mount namespace of its own") {
		t.Errorf("err = %v, output %q", err, out)
	}
}

func BenchmarkSpawn(b *testing.B) {
	n := start(b)
	c := n.dial(b)
	root, err := mount.New("tmpfs", 0, mount.Value("size", "64k"))
	if err != nil {
		b.Fatal(err)
	}
	defer root.Close()
	i := 0
	for b.Loop() {
		b.StopTimer()
		i++
		g, err := n.groups.Create("b"+strconv.Itoa(i), limits)
		if err != nil {
			b.Fatal(err)
		}
		tasks, err := g.Tasks()
		if err != nil {
			b.Fatal(err)
		}
		if os.Getenv("SANDSEA_BENCH_NO_V1") != "" {
			scm.CloseFiles(tasks)
			tasks = nil
		}
		b.StartTimer()
		ch, err := c.Spawn(b.Context(), spawner.Spec{
			ID: "b", Cgroup: g.V2(), Tasks: tasks, Root: root, Dev: n.dev, UIDBase: 0x70000000,
		})
		b.StopTimer()
		if err != nil {
			b.Fatal(err)
		}
		scm.CloseFiles(tasks)
		closeChild(ch)
		if err := g.Remove(b.Context()); err != nil {
			b.Fatal(err)
		}
		b.StartTimer()
	}
}
