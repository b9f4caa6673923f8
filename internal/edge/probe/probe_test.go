package probe

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"os"
	"os/exec"
	"slices"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	"github.com/sandsea/sandsea/api/errdefs"
	"github.com/sandsea/sandsea/internal/edge/cgroup"
	"github.com/sandsea/sandsea/internal/node"
	"github.com/sandsea/sandsea/internal/testkit/leak"
	"github.com/sandsea/sandsea/internal/testkit/require"
	"github.com/sandsea/sandsea/internal/testkit/wait"
)

// TestMain is also a probe that is killed, of the directory SANDSEA_TEST_PROBE.
func TestMain(m *testing.M) {
	if dir := os.Getenv("SANDSEA_TEST_PROBE"); dir != "" {
		_, _ = Machine(context.Background(), dir, slog.New(slog.DiscardHandler))
		return
	}
	os.Exit(leak.Main(m))
}

var features = []string{
	node.FeatureMemory, node.FeatureCPU, node.FeaturePids, node.FeatureDisk, node.FeatureOpenFiles, node.FeatureOutput,
	node.FeatureKill, node.FeatureUserNS, node.FeatureSeccomp, node.FeatureLayers, node.FeatureNetwork, node.FeatureEgress,
	node.FeatureDebian, node.FeatureExitFacts,
}

func TestMachineAnswersForEveryFeatureAndLeavesNothing(t *testing.T) {
	require.Root(t)
	dir := t.TempDir()
	leak.Check(t, dir)
	c, err := Machine(t.Context(), dir+"/not/there/yet", nil)
	if err != nil {
		t.Fatal(err)
	}
	if c.Kernel == "" || c.CPUs < 1 || c.Memory < 1<<20 || c.NoFile < 1 || c.PidMax < 1 || c.Cgroup == "" {
		t.Errorf("facts are missing: %+v", c)
	}
	if !slices.IsSortedFunc(c.Features, func(a, b node.Feature) int { return strings.Compare(a.Name, b.Name) }) {
		t.Error("features are not sorted")
	}
	for _, name := range features {
		f := c.Feature(name)
		t.Logf("%-8s %-18s %s (%s)", f.Status, f.Name, f.Mechanism, f.Fix)
		switch f.Status {
		case node.OK, node.Slower:
			if f.Mechanism == "" || f.Fix != "" {
				t.Errorf("%s: mechanism %q, fix %q", name, f.Mechanism, f.Fix)
			}
		default:
			if f.Mechanism == "" || f.Fix == "" {
				t.Errorf("%s is %s: reason %q, fix %q", name, f.Status, f.Mechanism, f.Fix)
			}
		}
		if strings.Contains(f.Mechanism+f.Fix, "\n") {
			t.Errorf("%s has more than a line", name)
		}
		if !c.Enforces(name) {
			// What this machine is said to have must be found.
			r := &quiet{TB: t}
			require.That(r, name, errors.New(f.Mechanism))
		}
	}
	if left, err := os.ReadDir(dir); err != nil || len(left) > 0 {
		t.Errorf("left %v, %v", left, err)
	}
}

// quiet lets a feature be absent, unless it is required.
type quiet struct{ testing.TB }

func (q *quiet) Skipf(string, ...any) {}

func TestWithoutControlGroupsTheReasonIsTold(t *testing.T) {
	require.Root(t)
	cause := errdefs.New(errdefs.FailedPrecondition, "kill", "no cgroup v2 tree is mounted").WithHint("Mount one")
	c := Run(t.Context(), Config{Dir: t.TempDir(), CgroupErr: cause, UpperErr: errors.New("disk says\nno")})
	if c.Cgroup != "v1" {
		t.Errorf("cgroup is %q", c.Cgroup)
	}
	for _, name := range []string{node.FeatureMemory, node.FeatureCPU, node.FeaturePids, node.FeatureKill, node.FeatureEgress} {
		if f := c.Feature(name); f.Status != node.Missing || f.Mechanism != "no cgroup v2 tree is mounted" ||
			f.Fix != "Mount one" {
			t.Errorf("%+v", f)
		}
	}
	if f := c.Feature(node.FeatureDisk); f.Status != node.Unsure || f.Mechanism != "disk says no" || f.Fix == "" {
		t.Errorf("%+v", f)
	}
	if line, good := Summary(c); good || !strings.HasPrefix(line, "container: ") {
		t.Errorf("%q, %v", line, good)
	}
}

func TestATrialThatHangsIsUnsure(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		release := make(chan struct{})
		start := time.Now()
		r := bounded(t.Context(), func(context.Context) result {
			<-release
			return ok("late")
		})
		if r.status != node.Unsure || time.Since(start) != limit || r.fix == "" {
			t.Errorf("%+v after %s", r, time.Since(start))
		}
		close(release)
	})
}

func TestSummary(t *testing.T) {
	f := func(s node.Status, optional bool) node.Feature { return node.Feature{Status: s, Optional: optional} }
	for _, c := range []struct {
		name     string
		features []node.Feature
		line     string
		good     bool
	}{
		{"all hold", []node.Feature{f(node.OK, false)}, "container: enforces all it promises", true},
		{
			"an optional one does not count",
			[]node.Feature{f(node.OK, false), f(node.Missing, true)},
			"container: enforces all it promises", true,
		},
		{
			"one is slower",
			[]node.Feature{f(node.OK, false), f(node.Slower, false)},
			"container: enforces all it promises, 1 by a slower way", true,
		},
		{
			"what could not be told is not enforced",
			[]node.Feature{f(node.OK, false), f(node.Unsure, false), f(node.Missing, false)},
			"container: 2 of 3 promises not enforced; creates that need it are refused", false,
		},
	} {
		t.Run(c.name, func(t *testing.T) {
			line, good := Summary(node.Capabilities{Features: c.features})
			if line != c.line || good != c.good {
				t.Errorf("%q, %v", line, good)
			}
		})
	}
}

func TestWhatAKilledProbeLeftGoesWithTheNext(t *testing.T) {
	require.Root(t)
	require.Feature(t, "cgroup2")
	dir := t.TempDir()
	left := func(pid int) (out []string) {
		t.Helper()
		tags, err := cgroup.Tags(fmt.Sprintf("%s%d", tagPrefix, pid))
		if err != nil {
			t.Fatal(err)
		}
		entries, err := os.ReadDir(dir)
		if err != nil {
			t.Fatal(err)
		}
		for _, e := range entries {
			out = append(out, e.Name())
		}
		return append(out, tags...)
	}
	pid := 0
	for range 10 { // one that ends before it is killed leaves nothing
		cmd := exec.Command("/proc/self/exe")
		cmd.Env = append(os.Environ(), "SANDSEA_TEST_PROBE="+dir)
		if err := cmd.Start(); err != nil {
			t.Fatal(err)
		}
		pid = cmd.Process.Pid
		ended := make(chan struct{})
		go func() {
			defer close(ended)
			_ = cmd.Wait()
		}()
		wait.For(limit, func() bool {
			select {
			case <-ended:
				return true
			default:
				return len(left(pid)) == 2
			}
		})
		_ = cmd.Process.Kill()
		<-ended
		if len(left(pid)) == 2 {
			break
		}
	}
	if got := left(pid); len(got) != 2 {
		t.Fatalf("it left %q", got)
	}
	if _, err := Machine(t.Context(), dir, slog.New(slog.DiscardHandler)); err != nil {
		t.Fatal(err)
	}
	if got := left(pid); len(got) > 0 {
		t.Errorf("left: %q", got)
	}
}
