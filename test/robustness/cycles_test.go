package robustness

import (
	"bufio"
	"context"
	"fmt"
	"net"
	"net/http"
	"os"
	"path/filepath"
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
	name string
	rss  int64 // bytes
	heap int64 // bytes that live after a collection; of the daemon only
	fds  int
}

func (u use) String() string {
	return fmt.Sprintf("%s %d MiB resident, %d MiB live, %d descriptors", u.name, u.rss>>20, u.heap>>20, u.fds)
}

// heap collects the daemon's garbage and gives what is left.
func heap(t testing.TB, s *server.Server) int64 {
	t.Helper()
	dial := func(ctx context.Context, _, _ string) (net.Conn, error) {
		return (&net.Dialer{}).DialContext(ctx, "unix", filepath.Join(s.Dir, "run", "debug.sock"))
	}
	c := &http.Client{Transport: &http.Transport{DialContext: dial, DisableKeepAlives: true}}
	req, err := http.NewRequestWithContext(t.Context(), http.MethodGet, "http://daemon/debug/pprof/heap?gc=1&debug=1", nil)
	if err != nil {
		t.Fatal(err)
	}
	res, err := c.Do(req)
	if err != nil {
		t.Fatal(err)
	}
	defer res.Body.Close()
	lines := bufio.NewScanner(res.Body)
	lines.Buffer(nil, 1<<20)
	for lines.Scan() {
		var n int64
		if _, err := fmt.Sscanf(lines.Text(), "# HeapAlloc = %d", &n); err == nil {
			return n
		}
	}
	t.Fatal("the daemon does not tell its heap")
	return 0
}

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
		if part == "up" {
			u.heap = heap(t, s)
		}
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
		// An ended sandbox is remembered for a day, and so are the last 65,536 events: about 25 KiB a sandbox. What is
		// resident beyond the live heap is the collector's choice in the daemon.
		grown := after.rss - before[i].rss
		if after.name == "up" {
			grown = after.heap - before[i].heap
		}
		if after.fds > before[i].fds+40 || grown > cycles*40<<10 {
			t.Errorf("%s grew", after.name)
		}
	}
}
