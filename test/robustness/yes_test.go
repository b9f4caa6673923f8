package robustness

import (
	"os"
	"path/filepath"
	"slices"
	"syscall"
	"testing"
	"time"

	sandseav1 "github.com/sandsea/sandsea/api/sandsea/v1"
	"github.com/sandsea/sandsea/client"
)

// TestAMinuteOfYesIsBoundedAndDisturbsNobody: a command that writes without end for 60 s keeps within its sandbox's output
// limit on disk, is counted to the byte, leaves its neighbours' commands as quick as they were, and its own sandbox
// usable.
func TestAMinuteOfYesIsBoundedAndDisturbsNobody(t *testing.T) {
	s := begin(t)
	const budget, minute = 16 << 20, 60 * time.Second
	loud := open(t, s, func(sp *sandseav1.SandboxSpec) { sp.Limits.OutputBytes = budget })
	quiet := open(t, s)
	latency := func(n int) time.Duration {
		t.Helper()
		var took []time.Duration
		for range n {
			began := time.Now()
			res, err := quiet.Run(within(t, 30*time.Second), client.Argv("true"))
			if err != nil || res.GetResult().GetExitCode() != 0 {
				t.Fatal(res.GetResult(), err)
			}
			took = append(took, time.Since(began))
		}
		slices.Sort(took)
		return took[len(took)/2]
	}
	latency(5)
	before := latency(41)

	cmd := client.Argv("yes")
	cmd.TimeoutMs = minute.Milliseconds()
	n := start(t, loud, cmd)
	began := time.Now()
	var most int64
	var during []time.Duration
	for time.Since(began) < minute-5*time.Second {
		during = append(during, latency(11))
		most = max(most, onDisk(t, filepath.Join(s.Dir, "output", loud.ID)))
	}
	slices.Sort(during)
	middle := during[len(during)/2]

	// The record's last bytes, without waiting for the gigabytes before them to be told one by one.
	var end *sandseav1.Process
	var told int64
	for e, err := range loud.Attach(within(t, 2*time.Minute), &sandseav1.AttachRequest{Number: n}) {
		if err != nil {
			t.Fatal(err)
		}
		if d := e.GetData(); d != nil {
			told = d.GetOffset() + int64(len(d.GetData()))
			if i := slices.IndexFunc(d.GetData(), func(b byte) bool { return b != 'y' && b != '\n' }); i >= 0 {
				t.Fatalf("byte %d was never written", d.GetOffset()+int64(i))
			}
		}
		if g := e.GetGap(); g != nil {
			told = g.GetOffset() + g.GetBytes()
		}
		end = e.GetExited()
	}
	most = max(most, onDisk(t, filepath.Join(s.Dir, "output", loud.ID)))
	r := end.GetResult()
	t.Logf("%d MiB written, %d MiB on disk; a neighbour's command took %s before and %s meanwhile",
		r.GetStdoutBytes()>>20, most>>20, before, middle)
	if !r.GetTimedOut() || !r.GetTruncated() || r.GetStdoutBytes() != told || r.GetStdoutBytes() < 512<<20 {
		t.Errorf("%v; told of %d bytes", r, told)
	}
	// Holes are made a step at a time.
	if most > budget+budget/4 {
		t.Errorf("%d MiB on disk with a limit of %d", most>>20, budget>>20)
	}
	if limit := max(10*before, 500*time.Millisecond); middle > limit {
		t.Errorf("a neighbour's command takes %s, before it was %s", middle, before)
	}
	if got := sh(t, loud, "echo usable"); got != "usable\n" {
		t.Errorf("the sandbox itself: %q", got)
	}
	if u := usage(t, loud); u.GetOutputBytes() > budget+budget/4 {
		t.Errorf("it says that it keeps %d MiB", u.GetOutputBytes()>>20)
	}
}

func usage(t testing.TB, sb *client.Sandbox) *sandseav1.Usage {
	t.Helper()
	i, err := sb.Info(within(t, 20*time.Second))
	if err != nil {
		t.Fatal(err)
	}
	return i.GetUsage()
}

// onDisk is what the files of a directory occupy.
func onDisk(t testing.TB, dir string) (sum int64) {
	t.Helper()
	entries, err := os.ReadDir(dir)
	if err != nil {
		t.Fatal(err)
	}
	for _, e := range entries {
		fi, err := e.Info()
		if err != nil {
			continue // it was dropped just now
		}
		if st, ok := fi.Sys().(*syscall.Stat_t); ok {
			sum += st.Blocks * 512
		}
	}
	return sum
}
