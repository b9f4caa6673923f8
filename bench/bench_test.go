package bench

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"math/rand/v2"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"syscall"
	"testing"
	"testing/synctest"
	"time"

	"github.com/google/go-cmp/cmp"
	"github.com/moby/sys/mountinfo"

	"github.com/sandsea/sandsea/internal/linux/seccomp"
	"github.com/sandsea/sandsea/internal/testkit/golden"
	"github.com/sandsea/sandsea/internal/testkit/leak"
	"github.com/sandsea/sandsea/internal/testkit/require"
)

func TestMain(m *testing.M) { os.Exit(leak.Main(m)) }

func ms(values ...float64) []time.Duration {
	var out []time.Duration
	for _, v := range values {
		out = append(out, time.Duration(v*float64(time.Millisecond)))
	}
	return out
}

func TestPercentileIsNearestRank(t *testing.T) {
	five := ms(15, 20, 35, 40, 50) // the textbook's
	hundred := make([]time.Duration, 100)
	for i := range hundred {
		hundred[i] = time.Duration(i + 1)
	}
	for _, c := range []struct {
		samples []time.Duration
		p       float64
		want    time.Duration
	}{
		{five, 5, five[0]},
		{five, 30, five[1]},
		{five, 40, five[1]},
		{five, 50, five[2]},
		{five, 100, five[4]},
		{ms(7), 50, ms(7)[0]},
		{ms(7), 99, ms(7)[0]},
		{ms(1, 2), 50, ms(1)[0]},
		{hundred, 50, 50},
		{hundred, 90, 90},
		{hundred, 99, 99},
		{hundred, 99.1, 100},
	} {
		if got := Percentile(c.samples, c.p); got != c.want {
			t.Errorf("%v%% of %d samples is %d, want %d", c.p, len(c.samples), got, c.want)
		}
	}
}

func TestRatio(t *testing.T) {
	random := func() *rand.Rand { return rand.New(rand.NewPCG(1, 2)) }
	t.Run("of what never varies is exact", func(t *testing.T) {
		a, b := [][]time.Duration{ms(2, 2), ms(2, 2)}, [][]time.Duration{ms(20), ms(20)}
		v, low, high, ok := compare(a, b, faster, random())
		if !ok || v != 10 || low != 10 || high != 10 {
			t.Errorf("%v [%v, %v] %v", v, low, high, ok)
		}
	})
	t.Run("a round that disturbs both alike leaves the interval narrow", func(t *testing.T) {
		var a, b [][]time.Duration
		for i := range 20 {
			slow := float64(1 + i%2*4)
			a, b = append(a, ms(slow, slow, slow)), append(b, ms(10*slow, 10*slow, 10*slow))
		}
		v, low, high, ok := compare(a, b, faster, random())
		if !ok || v != 10 || low != 10 || high != 10 {
			t.Errorf("%v [%v, %v] %v", v, low, high, ok)
		}
	})
	t.Run("rounds that differ make it wide, around the value", func(t *testing.T) {
		var a, b [][]time.Duration
		r := random()
		for range 30 {
			a = append(a, ms(1+r.Float64(), 1+r.Float64()))
			b = append(b, ms(10+10*r.Float64(), 10+10*r.Float64()))
		}
		v, low, high, ok := compare(a, b, faster, random())
		if !ok || low >= v || high <= v || low < 5 || high > 20 {
			t.Errorf("%v [%v, %v] %v", v, low, high, ok)
		}
	})
	t.Run("without samples there is none", func(t *testing.T) {
		if _, _, _, ok := compare([][]time.Duration{nil}, [][]time.Duration{ms(1)}, faster, random()); ok {
			t.Error("a ratio of nothing")
		}
	})
}

// fake takes fixed times in turn and fails where the time is negative.
type fake struct {
	name    string
	times   []time.Duration
	calls   int
	log     *[]string
	closed  int
	prepare error
}

func (f *fake) Name() string                  { return f.name }
func (f *fake) Prepare(context.Context) error { return f.prepare }
func (f *fake) Close() error                  { f.closed++; return nil }
func (f *fake) Notes() []string               { return []string{f.name + " is a fake"} }
func (f *fake) Once(ctx context.Context) (time.Duration, error) {
	d := f.times[f.calls%len(f.times)]
	f.calls++
	if f.log != nil {
		*f.log = append(*f.log, f.name)
	}
	if d < 0 {
		return 0, errors.New("broken on purpose")
	}
	select {
	case <-time.After(2 * d): // as much again for the undo
	case <-ctx.Done():
		return 0, context.Cause(ctx)
	}
	return d, nil
}

var config = Config{
	Bench: "create", Metric: "create_ready", RateMetric: "create_rate", Version: "v0", Warmup: 2, Rounds: 3,
	PerRound: map[string]int{"a": 4, "b": 1},
	Title:    "create until ready: a and b in turn, same rootfs",
}

func TestRunTakesTurnsAndCounts(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		var log []string
		a := &fake{name: "a", times: ms(1, 3), log: &log}
		b := &fake{name: "b", times: ms(20), log: &log}
		d, err := Run(t.Context(), config, a, b)
		if err != nil {
			t.Fatal(err)
		}
		want := "a a b b" + " a a a a b" + " b a a a a" + " a a a a b"
		if got := strings.Join(log, " "); got != want {
			t.Errorf("turns %s, want %s", got, want)
		}
		if a.closed != 1 || b.closed != 1 {
			t.Error("not closed once")
		}
		var of []string
		for _, r := range d.Results {
			of = append(of, fmt.Sprint(r.Metric, " ", r.Of, " ", r.N))
		}
		if diff := cmp.Diff([]string{"create_ready a 12", "create_ready b 3", "create_ready_ratio a 3"}, of); diff != "" {
			t.Error(diff)
		}
		if a := d.Results[0]; *a.P50 != 1 || *a.P90 != 3 || *a.Max != 3 {
			t.Errorf("%v %v %v", *a.P50, *a.P90, *a.Max)
		}
		if *d.Results[2].Value != 20 || d.Results[2].Against != "b" {
			t.Errorf("ratio %+v", d.Results[2])
		}
		if d.Seconds != round3(2*(2*2+2*20+12*2+3*20)/1000.) || d.Failures != 0 || d.Schema != "sandsea.bench/1" {
			t.Errorf("%+v", d)
		}
		if d.Machine.CPUs == 0 || d.Machine.MemoryBytes == 0 || d.Machine.Kernel == "" || d.Machine.Cgroup == "" {
			t.Errorf("machine %+v", d.Machine)
		}
	})
}

func TestRunTellsWhatOneAdds(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		cfg := config
		cfg.Added = true
		d, err := Run(t.Context(), cfg, &fake{name: "a", times: ms(3)}, &fake{name: "b", times: ms(5)})
		if err != nil {
			t.Fatal(err)
		}
		r := d.Results[2]
		if r.Metric != "create_ready_added" || r.Of != "a" || r.Against != "b" || r.Unit != "ms" || *r.Value != -2 {
			t.Errorf("%+v, want 2 ms less", r)
		}
	})
}

func TestFewRoundsHaveNoInterval(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		for _, rounds := range []int{1, LeastRounds - 1, LeastRounds} {
			cfg := config
			cfg.Rounds = rounds
			d, err := Run(t.Context(), cfg, &fake{name: "a", times: ms(2, 3)}, &fake{name: "b", times: ms(20, 30)})
			if err != nil {
				t.Fatal(err)
			}
			at := slices.IndexFunc(d.Results, func(r Result) bool { return r.Against == "b" })
			r := d.Results[at]
			if want := rounds >= LeastRounds; (r.Low != nil) != want || (r.High != nil) != want {
				t.Errorf("%d rounds: low %v, high %v", rounds, r.Low, r.High)
			}
			var b bytes.Buffer
			if err := WriteTable(&b, d); err != nil {
				t.Fatal(err)
			}
			want := fmt.Sprintf("(%s: an interval needs 5)", count(rounds, "round"))
			if rounds >= LeastRounds {
				want = "(95 %: "
			}
			if !strings.Contains(b.String(), want) {
				t.Errorf("%d rounds: no %q in\n%s", rounds, want, &b)
			}
		}
	})
}

func TestValueIsTheMedian(t *testing.T) {
	for _, c := range []struct {
		rounds []float64
		want   float64
	}{{[]float64{3}, 3}, {[]float64{9, 1, 2}, 2}, {[]float64{4, 1, 2, 9}, 2}, {[]float64{1.23456}, 1.235}} {
		if r := Value("m", "a", "s", c.rounds...); *r.Value != c.want || r.N != len(c.rounds) || r.Metric != "m" || r.Of != "a" || r.Unit != "s" {
			t.Errorf("%v: %+v, want %v", c.rounds, r, c.want)
		}
	}
}

func TestDistributionLeavesItsSamplesAlone(t *testing.T) {
	samples := ms(3, 1, 2)
	if r := Distribution("m", "a", samples); *r.P50 != 2 || *r.Max != 3 || r.N != 3 {
		t.Errorf("%+v", r)
	}
	if diff := cmp.Diff(ms(3, 1, 2), samples); diff != "" {
		t.Error(diff)
	}
}

func TestJoin(t *testing.T) {
	a, b := document(), document()
	a.Seconds, a.Steal, a.Failures, a.Notes = 30, 0, 1, []string{"first"}
	b.Seconds, b.Steal, b.Failures, b.Notes, b.Errors = 10, 0.4, 2, []string{"second"}, []string{"it broke"}
	d := Join("net", "both", a, b)
	if d.Bench != "net" || d.Title != "both" || d.Seconds != 40 || d.Steal != 0.1 || d.Failures != 3 || d.Version != a.Version {
		t.Errorf("%+v", d)
	}
	if len(d.Results) != len(a.Results)+len(b.Results) || len(d.Notes) != 2 || len(d.Errors) != 1 {
		t.Errorf("%d results, notes %q, errors %q", len(d.Results), d.Notes, d.Errors)
	}
	if len(a.Results) != 5 || a.Failures != 1 {
		t.Error("a part was changed")
	}
}

func TestMeasureTellsWhatItWasMeasuredUnder(t *testing.T) {
	d, err := Measure(func() (Document, error) { return Document{Failures: 3}, nil })
	if err != nil {
		t.Fatal(err)
	}
	if d.Schema != Schema || d.Failures != 3 || d.Machine.CPUs == 0 || d.Started.IsZero() || d.Load < 0 {
		t.Errorf("%+v", d)
	}
	broken := errors.New("broken")
	if _, err := Measure(func() (Document, error) { return Document{}, broken }); !errors.Is(err, broken) {
		t.Errorf("got %v", err)
	}
}

func TestMemoryUsedIsThatOfThisMachine(t *testing.T) {
	used, err := MemoryUsed()
	if err != nil {
		t.Fatal(err)
	}
	m, err := ReadMachine()
	if err != nil {
		t.Fatal(err)
	}
	if used <= 0 || used >= m.MemoryBytes {
		t.Errorf("%d of %d bytes", used, m.MemoryBytes)
	}
}

func TestRunMeasuresTheRateWithTheUndo(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		cfg := config
		cfg.RateFor, cfg.Workers = time.Second, 1
		d, err := Run(t.Context(), cfg, &fake{name: "a", times: ms(5)})
		if err != nil {
			t.Fatal(err)
		}
		r := d.Results[1]
		if r.Metric != "create_rate" || r.N != 3 || *r.Value != 100 || r.Unit != "1/s" {
			t.Errorf("%+v, want 100 whole calls of 10 ms a second", r)
		}
	})
}

func TestFailuresAreCountedAndShown(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		d, err := Run(t.Context(), config, &fake{name: "a", times: ms(1, 1, 1, -1)})
		if err != nil {
			t.Fatal(err)
		}
		if d.Failures != 3 || d.Results[0].N != 12-3 || len(d.Errors) != 3 ||
			!strings.Contains(d.Errors[0], "a: broken on purpose") {
			t.Errorf("%d failures, %d samples, errors %q", d.Failures, d.Results[0].N, d.Errors)
		}
	})
}

func TestARunEndsEarly(t *testing.T) {
	for _, c := range []struct {
		name string
		peer *fake
		text string
	}{
		{"when a peer fails again and again", &fake{name: "a", times: ms(-1)}, "11 failures, the last of a"},
		{"when a peer cannot be prepared", &fake{name: "a", prepare: errors.New("no crun")}, "prepare a: no crun"},
	} {
		t.Run(c.name, func(t *testing.T) {
			b := &fake{name: "b", times: ms(1)}
			_, err := Run(t.Context(), config, b, c.peer)
			if err == nil || !strings.Contains(err.Error(), c.text) {
				t.Errorf("got %v", err)
			}
			if c.peer.closed != 1 || b.closed != 1 {
				t.Error("not closed once")
			}
		})
	}
	t.Run("when it is interrupted", func(t *testing.T) {
		synctest.Test(t, func(t *testing.T) {
			ctx, stop := context.WithTimeoutCause(t.Context(), 20*time.Millisecond, errors.New("Ctrl-C"))
			defer stop()
			if _, err := Run(ctx, config, &fake{name: "a", times: ms(5)}); err == nil ||
				!strings.Contains(err.Error(), "interrupted: Ctrl-C") {
				t.Errorf("got %v", err)
			}
		})
	})
}

func document() Document {
	p := func(v float64) *float64 { return &v }
	return Document{
		Schema: Schema, Bench: "create", Version: "v0.1.0", Started: time.Date(2026, 1, 1, 0, 0, 0, 0, time.UTC),
		Seconds: 61.2, Machine: Machine{CPUs: 2, MemoryBytes: 25_000_000_000, Kernel: "6.18.44-fc", Cgroup: "hybrid"},
		Results: []Result{
			{
				Metric: "create_ready", Of: "native", Unit: "ms", N: 5000,
				P50: p(1.8), P90: p(2.2), P99: p(4), Max: p(9.1),
			},
			{
				Metric: "create_ready", Of: "crun", Unit: "ms", N: 200,
				P50: p(19.8), P90: p(22), P99: p(31), Max: p(40.2),
			},
			{Metric: "create_rate", Of: "native", Unit: "1/s", N: 60, Value: p(812)},
			{Metric: "create_rate", Of: "crun", Unit: "1/s", N: 60, Value: p(49)},
			{
				Metric: "create_ready_ratio", Of: "native", Against: "crun", Unit: "x", N: 60,
				Value: p(11), Low: p(10.8), High: p(11.3),
			},
		},
		Title: "create until ready: native and crun in turn, same rootfs", Warmup: 100, Rounds: 60, Steal: 0.013,
	}
}

// several is of a bench that measures more than one thing.
func several() Document {
	p := func(v float64) *float64 { return &v }
	d := document()
	d.Bench, d.Title, d.Load, d.Warmup = "net", "network: a policy against none, Aether against a direct line, in turn", 4.25, 20
	d.Results = []Result{
		{Metric: "create_ready", Of: "policy", Unit: "ms", N: 500, P50: p(0.9), P90: p(1.1), P99: p(2), Max: p(3.5)},
		{Metric: "create_ready", Of: "none", Unit: "ms", N: 500, P50: p(0.7), P90: p(0.9), P99: p(1.5), Max: p(2.5)},
		{Metric: "create_ready_added", Of: "policy", Against: "none", Unit: "ms", N: 5, Value: p(0.201), Low: p(0.187), High: p(0.22)},
		{Metric: "connect", Of: "aether", Unit: "ms", N: 500, P50: p(0.2), P90: p(0.3), P99: p(0.9), Max: p(1)},
		{Metric: "connect", Of: "direct", Unit: "ms", N: 500, P50: p(0.04), P90: p(0.05), P99: p(0.1), Max: p(0.2)},
		{Metric: "connect_added", Of: "aether", Against: "direct", Unit: "ms", N: 5, Value: p(0.16), Low: p(0.15), High: p(0.17)},
		{Metric: "download_1", Of: "aether", Unit: "Gbit/s", N: 5, Value: p(11.4)},
		{Metric: "burst_rate", Of: "policy", Unit: "1/s", N: 1, Value: p(480)},
	}
	return d
}

func TestWriteTable(t *testing.T) {
	var b bytes.Buffer
	if err := WriteTable(&b, document()); err != nil {
		t.Fatal(err)
	}
	slow := document()
	slow.Steal, slow.Failures, slow.Machine.CPUs = 0.12, 1, 1
	slow.Notes, slow.Errors = []string{"crun has no limits here"}, []string{"crun: it broke"}
	slow.Results[1] = Result{Metric: "create_ready", Of: "crun", Unit: "ms"}
	*slow.Results[4].Value, *slow.Results[4].Low, *slow.Results[4].High = 0.5, 0.4, 0.8
	b.WriteString("\n")
	if err := WriteTable(&b, slow); err != nil {
		t.Fatal(err)
	}
	b.WriteString("\n")
	if err := WriteTable(&b, several()); err != nil {
		t.Fatal(err)
	}
	golden.Equal(t, "table.txt", b.Bytes())
}

func TestDocumentHasTheNamesOfTheSchema(t *testing.T) {
	got, err := json.MarshalIndent(document(), "", "  ")
	if err != nil {
		t.Fatal(err)
	}
	golden.Equal(t, "document.json", append(got, '\n'))
}

func TestSteal(t *testing.T) {
	before, err := parseCPU("100 0 50 800 10 0 5 35 0 0")
	if err != nil {
		t.Fatal(err)
	}
	after, err := parseCPU("150 0 60 820 10 0 5 55 0 0")
	if err != nil {
		t.Fatal(err)
	}
	if got := before.stealUntil(after); got != 0.2 {
		t.Errorf("steal %v, want 20 of 100", got)
	}
	if got := after.stealUntil(before); got != 0 {
		t.Errorf("a clock that went back gives %v", got)
	}
	for _, bad := range []string{"", "1 2 3", "a b c d e f g h"} {
		if _, err := parseCPU(bad); err == nil {
			t.Errorf("%q was taken", bad)
		}
	}
}

func TestLayout(t *testing.T) {
	v2 := &mountinfo.Info{FSType: "cgroup2"}
	v1 := &mountinfo.Info{FSType: "cgroup", VFSOptions: "rw,memory"}
	named := &mountinfo.Info{FSType: "cgroup", VFSOptions: "rw,name=systemd"}
	for want, table := range map[string][]*mountinfo.Info{
		"v2": {v2, named}, "hybrid": {v1, v2}, "v1": {v1}, "none": {},
	} {
		if got := layout(table); got != want {
			t.Errorf("%v: %s, want %s", table, got, want)
		}
	}
}

// rootfs is a directory with a static busybox as sleep.
func rootfs(t testing.TB) string {
	t.Helper()
	require.Root(t)
	require.Feature(t, "bin:busybox")
	path, err := exec.LookPath("busybox")
	if err != nil {
		t.Fatal(err)
	}
	dir := t.TempDir()
	for _, d := range []string{"bin", "proc", "sys", "dev", "etc"} {
		if err := os.Mkdir(filepath.Join(dir, d), 0o755); err != nil {
			t.Fatal(err)
		}
	}
	in, err := os.Open(path)
	if err != nil {
		t.Fatal(err)
	}
	defer in.Close()
	out, err := os.OpenFile(filepath.Join(dir, "bin", "busybox"), os.O_CREATE|os.O_WRONLY, 0o755)
	if err != nil {
		t.Fatal(err)
	}
	if _, err := io.Copy(out, in); err != nil {
		t.Fatal(err)
	}
	if err := out.Close(); err != nil {
		t.Fatal(err)
	}
	if err := os.Symlink("busybox", filepath.Join(dir, "bin", "sleep")); err != nil {
		t.Fatal(err)
	}
	return dir
}

func TestCrun(t *testing.T) {
	require.Feature(t, "bin:crun")
	root, dir := rootfs(t), t.TempDir()
	leak.Check(t, dir, root)
	filter, err := seccomp.Default()
	if err != nil {
		t.Fatal(err)
	}
	for _, overlay := range []bool{false, true} {
		t.Run(fmt.Sprintf("overlay %v", overlay), func(t *testing.T) {
			cfg := config
			cfg.PerRound, cfg.Warmup, cfg.Workers = map[string]int{"crun": 3, "crun-run": 1}, 1, 2
			cfg.RateFor = 100 * time.Millisecond
			peer := CrunConfig{
				Rootfs: root, Dir: dir, Overlay: overlay, Memory: 64 << 20, CPUMillis: 1000, Pids: 50, Filter: filter,
			}
			oneCall := peer
			oneCall.OneCall = true
			d, err := Run(t.Context(), cfg, NewCrun(peer), NewCrun(oneCall))
			if err != nil {
				t.Fatal(err)
			}
			if d.Failures != 0 {
				t.Errorf("%d failures: %q", d.Failures, d.Errors)
			}
			if r := d.Results[0]; r.N != 9 || *r.P50 <= 0.5 || *r.P50 > 5000 {
				t.Errorf("%d samples, p50 %v ms", r.N, *r.P50)
			}
			var b strings.Builder
			if err := WriteTable(&b, d); err != nil {
				t.Fatal(err)
			}
			t.Log("\n" + b.String())
			hybrid := d.Machine.Cgroup == "hybrid"
			if got := strings.Contains(b.String(), "no memory, cpu or pids limit"); got != hybrid {
				t.Errorf("says that limits are missing: %v, hybrid: %v", got, hybrid)
			}
		})
	}
	if left, err := os.ReadDir(dir); err != nil || len(left) > 0 {
		t.Errorf("left %v, %v", left, err)
	}
	if fi, err := os.Stat(os.DevNull); err != nil || fi.Sys().(*syscall.Stat_t).Uid == hostID {
		t.Errorf("the machine's %s was given to a container: %v", os.DevNull, err)
	}
}

// TestCrunIsolatesAsMuchAsItCan: else its figures would be those of something else.
func TestCrunIsolatesAsMuchAsItCan(t *testing.T) {
	require.Feature(t, "bin:crun")
	root, dir := rootfs(t), t.TempDir()
	leak.Check(t, dir, root)
	filter, err := seccomp.Default()
	if err != nil {
		t.Fatal(err)
	}
	seen := map[string]string{}
	c := NewCrun(CrunConfig{Rootfs: root, Dir: dir, Overlay: true, Filter: filter, Workers: 1})
	c.started = func(pid string) error {
		b, err := os.ReadFile("/proc/" + pid + "/status")
		for line := range strings.Lines(string(b)) {
			k, v, _ := strings.Cut(line, ":")
			seen[k] = strings.Join(strings.Fields(v), " ")
		}
		for _, ns := range []string{"user", "mnt", "pid", "ipc", "uts", "net", "cgroup"} {
			own, oerr := os.Readlink("/proc/self/ns/" + ns)
			theirs, terr := os.Readlink("/proc/" + pid + "/ns/" + ns)
			if own == theirs || oerr != nil || terr != nil {
				t.Errorf("namespace %s: %s, ours %s, %v, %v", ns, theirs, own, oerr, terr)
			}
		}
		mounts, merr := os.ReadFile("/proc/" + pid + "/mountinfo")
		if !strings.Contains(string(mounts), " /proc/keys ") {
			t.Errorf("/proc/keys is not masked:\n%s", mounts)
		}
		return errors.Join(err, merr)
	}
	if err := c.Prepare(t.Context()); err != nil {
		t.Fatal(err)
	}
	if _, err := c.Once(t.Context()); err != nil {
		t.Error(err)
	}
	if err := c.Close(); err != nil {
		t.Error(err)
	}
	for k, want := range map[string]string{
		"Seccomp": "2", "NoNewPrivs": "0", "CapBnd": "00000000a80425fb", "Uid": strings.TrimSpace(strings.Repeat("1593835520 ", 4)),
	} {
		if seen[k] != want {
			t.Errorf("%s: %q, want %q", k, seen[k], want)
		}
	}
}

func TestCrunTellsWhatIsWrong(t *testing.T) {
	require.Feature(t, "bin:crun")
	root, dir := rootfs(t), t.TempDir()
	leak.Check(t, dir, root)
	cfg := config
	cfg.MaxFailures = 1
	absent := CrunConfig{Rootfs: root, Dir: dir, Args: []string{"/bin/nothing"}, Workers: 1}
	_, err := Run(t.Context(), cfg, NewCrun(absent))
	if err == nil || !strings.Contains(err.Error(), "/bin/nothing") {
		t.Errorf("got %v", err)
	}
	if _, err := Run(t.Context(), cfg, NewCrun(CrunConfig{Rootfs: root + "/none", Dir: dir})); err == nil ||
		!strings.Contains(err.Error(), "not a directory") {
		t.Errorf("got %v", err)
	}
	if left, err := os.ReadDir(dir); err != nil || len(left) > 0 {
		t.Errorf("left %v, %v", left, err)
	}
}
