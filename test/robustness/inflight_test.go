package robustness

import (
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/moby/sys/mountinfo"
	"golang.org/x/sync/errgroup"

	sandseav1 "github.com/sandsea/sandsea/api/sandsea/v1"
	"github.com/sandsea/sandsea/client"
	"github.com/sandsea/sandsea/internal/testkit/server"
	"github.com/sandsea/sandsea/internal/testkit/wait"
)

// spare is how many sandboxes a node keeps made ahead (native.DefaultWarm).
const spare = 8

// groups are the names of the control groups of sandboxes in any tree, those made ahead among them.
func groups(t testing.TB, s *server.Server) []string {
	t.Helper()
	table, err := mountinfo.GetMounts(mountinfo.FSTypeFilter("cgroup", "cgroup2"))
	if err != nil {
		t.Fatal(err)
	}
	var names []string
	for _, m := range table {
		entries, err := os.ReadDir(filepath.Join(m.Mountpoint, "sandsea-"+s.Tag))
		if err != nil {
			continue // a controller that is not used
		}
		for _, e := range entries {
			if e.IsDir() && !strings.HasPrefix(e.Name(), "_") {
				names = append(names, e.Name())
			}
		}
	}
	slices.Sort(names)
	return slices.Compact(names)
}

// onlyGroups waits until there are groups for n sandboxes and no more than the spare ones beside them.
func onlyGroups(t testing.TB, s *server.Server, n int) {
	t.Helper()
	var got []string
	ok := wait.For(30*time.Second, func() bool {
		got = groups(t, s)
		return len(got) >= n && len(got) <= n+spare
	})
	if !ok {
		t.Errorf("%d sandboxes have %d control groups: %v", n, len(got), got)
	}
}

func TestCreatesInFlightAreUsableOrAbsentWhateverDies(t *testing.T) {
	s := begin(t)
	for n, part := range []string{"spawner", "keeper", "up", "spawner", "up", "keeper"} {
		var mu sync.Mutex
		var made []*client.Sandbox
		var refused []error
		key := func(i int) string { return fmt.Sprintf("%s-%d-%d", part, n, i) }
		const creates = 24
		var g errgroup.Group
		g.SetLimit(8)
		killed := make(chan error, 1)
		for i := range creates {
			if i == 6+n {
				go func() { killed <- s.Kill(part) }()
			}
			g.Go(func() error {
				sb, err := s.Client.Create(within(t, 30*time.Second), spec(), key(i))
				mu.Lock()
				defer mu.Unlock()
				if err != nil {
					refused = append(refused, err)
				} else {
					made = append(made, sb)
				}
				return nil
			})
		}
		_ = g.Wait()
		if err := <-killed; err != nil {
			t.Fatal(err)
		}
		if part == "up" {
			if err := s.Up(t.Context()); err != nil {
				t.Fatal(err)
			}
		}
		t.Logf("%s killed: %d made, %d refused: %v", part, len(made), len(refused), refused)
		if part != "up" && len(refused) > 0 {
			t.Errorf("%s killed: a create was refused though it could be tried again: %v", part, refused)
		}
		// Asked again under its key, each gives exactly one sandbox, and those that were given are the same.
		ids := map[string]bool{}
		for i := range creates {
			sb, err := s.Client.Create(within(t, 30*time.Second), spec(), key(i))
			if err != nil {
				t.Fatalf("%s killed: asked again: %v", part, err)
			}
			ids[sb.ID] = true
			sh(t, sb, "true")
		}
		for _, sb := range made {
			if !ids[sb.ID] {
				t.Errorf("%s killed: %s was given, and its key stands for another now", part, sb.ID)
			}
		}
		if len(ids) != creates {
			t.Errorf("%s killed: %d keys gave %d sandboxes", part, creates, len(ids))
		}
		var listed []string
		wait.Until(t, 20*time.Second, func() bool {
			listed = listed[:0]
			for sb, err := range s.Client.List(within(t, 10*time.Second), &sandseav1.ListSandboxesRequest{}) {
				if err != nil {
					return false
				}
				listed = append(listed, sb.GetId())
			}
			return len(listed) == creates
		}, fmt.Sprintf("%s killed: exactly the %d sandboxes are listed", part, creates))
		for _, id := range listed {
			if !ids[id] {
				t.Errorf("%s killed: nobody has %s", part, id)
			}
		}
		onlyGroups(t, s, creates)
		stopAll(t, s, ids)
	}
}

// stopAll stops sandboxes at once and waits until nothing of them is left.
func stopAll(t testing.TB, s *server.Server, ids map[string]bool) {
	t.Helper()
	var g errgroup.Group
	g.SetLimit(8)
	for id := range ids {
		g.Go(func() error { return s.Client.Sandbox(id).Stop(within(t, 30*time.Second)) })
	}
	if err := g.Wait(); err != nil {
		t.Error(err)
	}
	onlyGroups(t, s, 0)
}

func TestStopsInFlightAreFinishedWhateverDies(t *testing.T) {
	s := begin(t)
	for _, part := range []string{"up", "keeper", "spawner"} {
		ids := map[string]bool{}
		for range 16 {
			sb := open(t, s)
			start(t, sb, client.Shell("trap '' TERM; sleep 6543; sleep 6543"))
			ids[sb.ID] = true
		}
		var g errgroup.Group
		for id := range ids {
			g.Go(func() error {
				_ = s.Client.Sandbox(id).Stop(within(t, 30*time.Second))
				return nil
			})
		}
		if err := s.Kill(part); err != nil {
			t.Fatal(err)
		}
		_ = g.Wait()
		if part == "up" {
			if err := s.Up(t.Context()); err != nil {
				t.Fatal(err)
			}
		}
		stopAll(t, s, ids)
		for id := range ids {
			if end := ended(t, s.Client.Sandbox(id), 30*time.Second); end.GetCause() != "stopped" {
				t.Errorf("%s killed: %s ended %v", part, id, end)
			}
		}
		if running("sleep\x006543") {
			t.Errorf("%s killed: a process is left", part)
		}
	}
}

func TestAKilledServerIsCleanedUpByDown(t *testing.T) {
	s := begin(t)
	for range 4 {
		start(t, open(t, s), client.Argv("sleep", "7654"))
	}
	for _, part := range []string{"up", "keeper", "spawner"} {
		if err := s.Kill(part); err != nil {
			t.Fatal(err)
		}
	}
	// The clean-up of the test's server reports what is left.
	if err := s.Down(t.Context()); err != nil {
		t.Error(err)
	}
	if running("sleep\x007654") {
		t.Error("a process is left")
	}
}

func TestAStormOfKills(t *testing.T) {
	s := begin(t)
	sb := open(t, s)
	w := &writer{i: 4, sb: sb, number: start(t, sb, client.Shell(fmt.Sprintf(steady, 4, 5)))}
	all, err := sb.Processes(within(t, 20*time.Second))
	if err != nil {
		t.Fatal(err)
	}
	w.pid = all[0].GetHostPid()
	for n := range 6 {
		// The daemon dies while it starts, sooner or later; never together with the keeper.
		if err := s.Kill("up"); err != nil {
			t.Fatal(err)
		}
		if _, err := s.Begin(); err != nil {
			t.Fatal(err)
		}
		pause(t, time.Duration(n)*120*time.Millisecond)
	}
	if err := s.Kill("up"); err != nil {
		t.Fatal(err)
	}
	if err := s.Up(t.Context()); err != nil {
		t.Fatal(err)
	}
	if err := w.check(t); err != nil {
		t.Error(err)
	}
	for range 6 {
		if err := s.Kill("keeper"); err != nil {
			t.Fatal(err)
		}
		wait.Until(t, 20*time.Second, func() bool { return s.Pid("keeper") != 0 }, "the keeper is back")
	}
	serving(t, s, sb, time.Now())
	if err := w.check(t); err != nil {
		t.Error(err)
	}
	if err := w.finish(t); err != nil {
		t.Error(err)
	}
	var parts []int
	for _, part := range []string{"up", "keeper", "spawner"} {
		parts = append(parts, s.Pid(part))
	}
	if slices.Contains(parts, 0) {
		t.Errorf("not all parts run: %v", parts)
	}
}
