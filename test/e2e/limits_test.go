package e2e

import (
	"fmt"
	"io/fs"
	"path/filepath"
	"strings"
	"syscall"
	"testing"
	"time"

	sandseav1 "github.com/sandsea/sandsea/api/sandsea/v1"
	"github.com/sandsea/sandsea/client"
	"github.com/sandsea/sandsea/internal/testkit/wait"
)

func TestTheMemoryLimitKillsTheCommandThatExceedsIt(t *testing.T) {
	t.Parallel()
	sb := open(t, func(s *sandseav1.SandboxSpec) { s.Limits.MemoryBytes = 64 << 20 })
	number := start(t, sb, client.Shell("echo up; sleep 300"))
	awaitOutput(t, sb, number, "up\n")
	// tail keeps what it reads while it waits for a line's end.
	res := run(t, sb, client.Argv("tail", "/dev/zero"))
	if r := res.GetResult(); !r.GetOom() || r.GetExitCode() != 137 || r.GetSignalName() != "SIGKILL" || r.GetTimedOut() {
		t.Errorf("got %v", r)
	}
	u := info(t, sb).GetUsage()
	if u.GetMemoryPeakBytes() < 50<<20 || u.GetMemoryPeakBytes() > 64<<20 {
		t.Errorf("peak %d bytes", u.GetMemoryPeakBytes())
	}
	if u.GetMemoryBytes() > 40<<20 {
		t.Errorf("%d bytes are in use after it", u.GetMemoryBytes())
	}
	// What kept to its share goes on.
	if p := process(t, sb, number); p.GetState() != sandseav1.ProcessState_PROCESS_STATE_RUNNING {
		t.Errorf("the small command: %v", p)
	}
	// A SIGKILL of another origin is no OOM, though one came before.
	res = run(t, sb, client.Shell("kill -9 $$"))
	if r := res.GetResult(); r.GetOom() || r.GetSignal() != 9 {
		t.Errorf("killed by itself: %v", r)
	}
}

func TestSharedMemoryCountsAndIsBounded(t *testing.T) {
	t.Parallel()
	sb := open(t, func(s *sandseav1.SandboxSpec) { s.Limits.MemoryBytes = 64 << 20 })
	res := run(t, sb, client.Shell("dd if=/dev/zero of=/dev/shm/x bs=1M count=200 2>&1"))
	if r := res.GetResult(); r.GetExitCode() == 0 {
		t.Errorf("200 MiB went into /dev/shm: %s", res.GetStdout())
	}
	sh(t, sb, "rm /dev/shm/x; echo ok")
}

func TestAForkBombStaysInItsSandbox(t *testing.T) {
	t.Parallel()
	sb := open(t, func(s *sandseav1.SandboxSpec) { s.Limits.Pids = 64 })
	other := open(t)
	cmd := client.Shell("bomb() { bomb | bomb & }; bomb; sleep 30")
	cmd.TimeoutMs = 1500
	began := time.Now()
	res := run(t, sb, cmd)
	// The shell itself may find no process for sleep.
	if r := res.GetResult(); !r.GetTimedOut() && !strings.Contains(string(res.GetStderr()), "can't fork") {
		t.Errorf("got %v %s", r, res.GetStderr())
	}
	if took := time.Since(began); took > 25*time.Second {
		t.Errorf("ended after %s", took)
	}
	sh(t, other, "true")
	// Usable again, with all of its processes; what a shell that gave up has left is the workload's to end.
	run(t, sb, client.Shell("kill -9 -1"))
	var u *sandseav1.Usage
	wait.Until(t, 20*time.Second, func() bool {
		u = info(t, sb).GetUsage()
		return u.GetPids() <= 2
	}, "the bomb's processes are gone")
	sh(t, sb, "true")
	got := sh(t, sb, "n=0; while [ $n -lt 50 ]; do sleep 1 & n=$((n+1)); done; wait; echo $n")
	if got != "50\n" {
		t.Errorf("got %q", got)
	}
}

func TestTheDiskLimitHoldsAndAFullDiskCanBeEmptied(t *testing.T) {
	t.Parallel()
	sb := open(t, func(s *sandseav1.SandboxSpec) { s.Limits.DiskBytes = 32 << 20 })
	res := run(t, sb, client.Shell("dd if=/dev/urandom of=/big bs=1M count=100"))
	text := string(res.GetStderr())
	if res.GetResult().GetExitCode() == 0 || !strings.Contains(text, "No space") && !strings.Contains(text, "quota") {
		t.Fatalf("100 MiB into 32: %v %s", res.GetResult(), text)
	}
	var kib int64
	if _, err := fmt.Sscan(sh(t, sb, "du -k /big | cut -f1"), &kib); err != nil || kib < 16<<10 || kib > 32<<10 {
		t.Errorf("%d KiB got in, %v", kib, err)
	}
	if used := info(t, sb).GetUsage().GetDiskBytes(); used < 16<<20 || used > 33<<20 {
		t.Errorf("usage says %d bytes", used)
	}
	sh(t, sb, "true") // runs with a full disk
	sh(t, sb, "rm /big && sync")
	sh(t, sb, "dd if=/dev/urandom of=/again bs=1M count=16 2>/dev/null")
}

func TestOpenFilesAreLimitedAndRootInsideCannotRaiseIt(t *testing.T) {
	t.Parallel()
	sb := open(t, func(s *sandseav1.SandboxSpec) { s.Limits.OpenFiles = 128 })
	if got := sh(t, sb, "ulimit -n; ulimit -Hn; ulimit -n 129 2>/dev/null || echo no"); got != "128\n128\nno\n" {
		t.Errorf("got %q", got)
	}
}

func TestTheCPUQuotaHoldsAndTheWorkloadSeesIt(t *testing.T) {
	t.Parallel()
	for _, tt := range []struct {
		millis int64
		sees   string
	}{{500, "1"}, {1000, "1"}, {2000, "2"}} {
		sb := open(t, func(s *sandseav1.SandboxSpec) { s.Limits.CpuMillis = tt.millis })
		if got := strings.TrimSpace(sh(t, sb, "nproc")); got != tt.sees && got != "1" {
			t.Errorf("%d thousandths of a CPU: nproc says %s", tt.millis, got)
		}
		if tt.millis != 500 {
			continue
		}
		// Two busy loops for two seconds get one second of CPU; a busy machine may give less, never more.
		cmd := client.Shell("(while :; do :; done) & while :; do :; done")
		cmd.TimeoutMs = 2000
		r := run(t, sb, cmd).GetResult()
		cpu, wall := time.Duration(r.GetCpuUs())*time.Microsecond, time.Duration(r.GetWallUs())*time.Microsecond
		if !r.GetTimedOut() || cpu > wall/2*12/10 || cpu < wall/10 {
			t.Errorf("%s of CPU in %s with half a CPU: %v", cpu, wall, r)
		}
		t.Logf("half a CPU: %s in %s", cpu, wall)
	}
}

func TestEndlessOutputIsBoundedOnDiskAndTheGapIsMarked(t *testing.T) {
	t.Parallel()
	s := serve(t)
	sb := open(t, func(s *sandseav1.SandboxSpec) { s.Limits.CpuMillis = 2000 })
	cmd := client.Argv("yes", "0123456789abcde")
	cmd.TimeoutMs = 4000
	res, err := sb.RunRequest(within(t, 60*time.Second), &sandseav1.RunRequest{Command: cmd, MaxOutputBytes: 1 << 20})
	if err != nil {
		t.Fatal(err)
	}
	r := res.GetResult()
	if !r.GetTimedOut() || !r.GetTruncated() || r.GetStdoutBytes() < 80<<20 {
		t.Fatalf("got %v", r)
	}
	t.Logf("%d MiB in %d ms", r.GetStdoutBytes()>>20, r.GetWallUs()/1000)
	// Head, gap and tail of the answer add up to what was written, each in its place.
	const line = "0123456789abcde\n"
	whole := func(b []byte, from int64) bool {
		for i, c := range b {
			if c != line[(from+int64(i))%int64(len(line))] {
				return false
			}
		}
		return true
	}
	out, gapAt, gap := res.GetStdout(), res.GetStdoutGapAt(), res.GetStdoutGapBytes()
	if int64(len(out))+gap != r.GetStdoutBytes() || len(out) > 1<<20 {
		t.Errorf("%d bytes and a gap of %d of %d", len(out), gap, r.GetStdoutBytes())
	}
	if !whole(out[:gapAt], 0) || !whole(out[gapAt:], gapAt+gap) {
		t.Error("the answer is not what was written")
	}
	// The record itself: bounded on disk, with one marked gap, each kept byte in its place.
	if disk := allocated(t, filepath.Join(s.Dir, "output", sb.ID)); disk > 80<<20 {
		t.Errorf("%d MiB on disk", disk>>20)
	}
	var at, gaps, kept int64
	for e, err := range sb.Attach(within(t, 60*time.Second), &sandseav1.AttachRequest{Number: res.GetNumber()}) {
		if err != nil {
			t.Fatal(err)
		}
		if d := e.GetData(); d != nil {
			if d.GetOffset() != at || !whole(d.GetData(), at) {
				t.Fatalf("at %d: a piece of %d at %d", at, len(d.GetData()), d.GetOffset())
			}
			at += int64(len(d.GetData()))
			kept += int64(len(d.GetData()))
		}
		if g := e.GetGap(); g != nil {
			if g.GetOffset() != at {
				t.Fatalf("at %d: a gap at %d", at, g.GetOffset())
			}
			at += g.GetBytes()
			gaps++
		}
	}
	if at != r.GetStdoutBytes() || gaps != 1 || kept < 16<<20 {
		t.Errorf("read to %d of %d, %d gaps, %d MiB kept", at, r.GetStdoutBytes(), gaps, kept>>20)
	}
	// An offset in the gap gives the rest of the gap.
	for e, err := range sb.Attach(within(t, 60*time.Second), &sandseav1.AttachRequest{Number: res.GetNumber(), StdoutOffset: r.GetStdoutBytes() / 2}) {
		if err != nil {
			t.Fatal(err)
		}
		if g := e.GetGap(); g.GetOffset() != r.GetStdoutBytes()/2 {
			t.Errorf("in the middle: %v", e)
		}
		break
	}
}

func TestTheOutputOfAllCommandsTogetherIsBounded(t *testing.T) {
	t.Parallel()
	s := serve(t)
	sb := open(t, func(s *sandseav1.SandboxSpec) { s.Limits.OutputBytes = 4 << 20 })
	for range 3 {
		cmd := client.Shell("dd if=/dev/zero bs=1M count=16 2>/dev/null")
		res := run(t, sb, cmd)
		if r := res.GetResult(); r.GetStdoutBytes() != 16<<20 || r.GetExitCode() != 0 || !r.GetTruncated() {
			t.Errorf("got %v", r)
		}
	}
	if disk := allocated(t, filepath.Join(s.Dir, "output", sb.ID)); disk > 12<<20 {
		t.Errorf("%d MiB on disk with a limit of 4", disk>>20)
	}
	sh(t, sb, "echo still")
}

// allocated is what the files below dir occupy.
func allocated(t testing.TB, dir string) int64 {
	t.Helper()
	var sum int64
	err := filepath.WalkDir(dir, func(_ string, e fs.DirEntry, err error) error {
		if err != nil || e.IsDir() {
			return err
		}
		fi, err := e.Info()
		if err != nil {
			return err
		}
		if st, ok := fi.Sys().(*syscall.Stat_t); ok {
			sum += st.Blocks * 512
		}
		return nil
	})
	if err != nil {
		t.Fatal(err)
	}
	return sum
}
