package robustness

import (
	"fmt"
	"os"
	"strings"
	"sync/atomic"
	"testing"
	"time"

	"golang.org/x/sync/errgroup"

	"github.com/sandsea/sandsea/client"
	"github.com/sandsea/sandsea/internal/testkit/server"
)

// use is what a part of the platform holds.
type use struct {
	rss  int64 // bytes
	fds  int
	name string
}

func (u use) String() string { return fmt.Sprintf("%s %d MiB, %d descriptors", u.name, u.rss>>20, u.fds) }

func uses(t testing.TB, s *server.Server) []use {
	t.Helper()
	var out []use
	for _, part := range []string{"up", "keeper", "spawner"} {
		pid := s.Pid(part)
		text, err := os.ReadFile(fmt.Sprintf("/proc/%d/status", pid))
		if err != nil {
			t.Fatal(err)
		}
		u := use{name: part}
		for line := range strings.Lines(string(text)) {
			if rest, ok := strings.CutPrefix(line, "VmRSS:"); ok {
				if _, err := fmt.Sscan(rest, &u.rss); err != nil {
					t.Fatal(err)
				}
				u.rss <<= 10
			}
		}
		fds, err := os.ReadDir(fmt.Sprintf("/proc/%d/fd", pid))
		if err != nil {
			t.Fatal(err)
		}
		u.fds = len(fds)
		out = append(out, u)
	}
	return out
}

func TestAThousandSandboxesComeAndGoAndLeaveNothing(t *testing.T) {
	s := begin(t)
	const (
		cycles = 1000
		limit  = 90 * time.Second
	)
	cycle := func(n int) {
		var failed atomic.Int64
		var g errgroup.Group
		g.SetLimit(4)
		for i := range n {
			g.Go(func() error {
				ctx := within(t, limit)
				sb, err := s.Client.Create(ctx, spec(), "")
				if err == nil && i%10 == 0 {
					_, err = sb.Run(ctx, client.Argv("true"))
				}
				if err == nil {
					err = sb.Stop(ctx)
				}
				if err != nil && failed.Add(1) <= 5 {
					t.Errorf("cycle %d: %v", i, err)
				}
				return nil
			})
		}
		_ = g.Wait()
	}
	cycle(50)
	before := uses(t, s)
	began := time.Now()
	cycle(cycles)
	took := time.Since(began)
	t.Logf("%d sandboxes made and stopped in %s, %.0f/s", cycles, took.Round(time.Millisecond), cycles/took.Seconds())
	if took > limit {
		t.Errorf("it took %s", took)
	}
	onlyGroups(t, s, 0)
	for i, after := range uses(t, s) {
		t.Logf("before %s; after %s", before[i], after)
		// What is remembered of ended sandboxes and of the last 65,536 events takes memory for a day, about 15 KiB a
		// sandbox and twice that until it is collected; descriptors must come back.
		if after.fds > before[i].fds+40 || after.rss > before[i].rss+64<<20 {
			t.Errorf("%s grew", after.name)
		}
	}
}
