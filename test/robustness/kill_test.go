package robustness

import (
	"bytes"
	"crypto/sha256"
	"errors"
	"fmt"
	"os"
	"strconv"
	"strings"
	"syscall"
	"testing"
	"time"

	"golang.org/x/sync/errgroup"

	"github.com/sandsea/sandsea/api/errdefs"
	sandseav1 "github.com/sandsea/sandsea/api/sandsea/v1"
	"github.com/sandsea/sandsea/client"
	"github.com/sandsea/sandsea/internal/testkit/server"
	"github.com/sandsea/sandsea/internal/testkit/wait"
)

const (
	live  = 20
	kills = 5
)

// steady writes numbered lines until /tmp/stop is there, then their count. It waits without a process of its own, so that
// many of them fit a small machine. Every fourth writer's lines are of 4 KiB.
const steady = `
pad=; [ $((%[1]d%%4)) = 0 ] && pad=$(printf '%%04000d' 0)
mkfifo /tmp/never; exec 3<>/tmp/never
n=0
while [ ! -e /tmp/stop ]; do echo "writer %[1]d line $n $pad"; n=$((n+1)); read -r -t 0.02 x <&3; done
echo "end $n"
exit %[2]d`

// expected is what a steady writer has written after n lines, without its end.
func expected(i, n int) []byte {
	pad := ""
	if i%4 == 0 {
		pad = fmt.Sprintf("%04000d", 0)
	}
	var b bytes.Buffer
	for line := range n {
		fmt.Fprintf(&b, "writer %d line %d %s\n", i, line, pad)
	}
	return b.Bytes()
}

// short writes lines and ends by itself after about a second, the way its number says: with a code, or by a signal.
const short = `
mkfifo /tmp/never%[2]d; exec 3<>/tmp/never%[2]d
n=0
while [ $n -lt %[3]d ]; do echo "round %[2]d of %[1]d: $n"; n=$((n+1)); read -r -t 0.05 x <&3; done
%[4]s`

// writer is one sandbox with its steady command.
type writer struct {
	i      int
	sb     *client.Sandbox
	number int64
	pid    int64 // on the host
	seen   int   // bytes of its record so far
}

// check compares the record so far with what must have been written, and that the process is the same and goes on.
func (w *writer) check(t *testing.T) error {
	ctx := within(t, 60*time.Second)
	all, err := w.sb.Processes(ctx)
	if err != nil {
		return err
	}
	for _, p := range all {
		if p.GetNumber() == w.number && (p.GetState() != sandseav1.ProcessState_PROCESS_STATE_RUNNING || p.GetHostPid() != w.pid) {
			return fmt.Errorf("writer %d was pid %d, and is %v", w.i, w.pid, p)
		}
	}
	var got []byte
	var gotErr error
	ok := wait.For(30*time.Second, func() bool {
		got, _, gotErr = recorded(ctx, w.sb, w.number, false)
		return gotErr != nil || len(got) > w.seen
	})
	if gotErr != nil {
		return gotErr
	}
	if !ok {
		return fmt.Errorf("writer %d: its record stays at %d bytes", w.i, w.seen)
	}
	w.seen = len(got)
	lines := bytes.Count(got, []byte("\n"))
	// The last line may be on its way.
	if want := expected(w.i, lines+1); !bytes.HasPrefix(want, got) {
		return fmt.Errorf("writer %d: its %d lines are not what was written", w.i, lines)
	}
	return nil
}

// finish ends the writer and compares the whole record.
func (w *writer) finish(t *testing.T) error {
	ctx := within(t, 60*time.Second)
	if _, err := w.sb.Run(ctx, client.Argv("touch", "/tmp/stop")); err != nil {
		return err
	}
	got, p, err := recorded(ctx, w.sb, w.number, true)
	if err != nil {
		return err
	}
	at := bytes.LastIndex(got, []byte("end "))
	if at < 0 {
		return fmt.Errorf("writer %d never wrote its end: %v", w.i, p)
	}
	n, err := strconv.Atoi(string(bytes.TrimSpace(got[at+4:])))
	if err != nil {
		return err
	}
	want := append(expected(w.i, n), fmt.Sprintf("end %d\n", n)...)
	if !bytes.Equal(got, want) {
		return fmt.Errorf("writer %d: %d bytes recorded, %d written, and they differ", w.i, len(got), len(want))
	}
	r := p.GetResult()
	if r.GetExitCode() != int32(w.i+1) || r.GetStdoutBytes() != int64(len(want)) || r.GetInfraError() != "" {
		return fmt.Errorf("writer %d: %v", w.i, r)
	}
	return nil
}

// each runs f for every writer at once.
func each(t *testing.T, writers []*writer, f func(*writer) error) {
	t.Helper()
	var g errgroup.Group
	g.SetLimit(8)
	for _, w := range writers {
		g.Go(func() error { return f(w) })
	}
	if err := g.Wait(); err != nil {
		t.Error(err)
	}
}

func TestKillOfOnePartLosesNoProcessNoByteAndNoExitStatus(t *testing.T) {
	s := begin(t)
	var writers []*writer
	for i := range live {
		sb := open(t, s)
		w := &writer{i: i, sb: sb, number: start(t, sb, client.Shell(fmt.Sprintf(steady, i, i+1)))}
		writers = append(writers, w)
	}
	for _, w := range writers {
		all, err := w.sb.Processes(within(t, 20*time.Second))
		if err != nil || len(all) != 1 || all[0].GetHostPid() == 0 {
			t.Fatalf("writer %d: %v, %v", w.i, all, err)
		}
		w.pid = all[0].GetHostPid()
	}
	round := 0
	for _, part := range []string{"up", "keeper", "spawner"} {
		for n := range kills {
			round++
			killOnce(t, s, writers, part, round, n)
			if t.Failed() {
				t.Fatalf("after kill %d of %s", n+1, part)
			}
		}
	}
	each(t, writers, func(w *writer) error { return w.finish(t) })
}

// ending is a short command and how it must end.
type ending struct {
	w      *writer
	number int64
	want   string
	code   int32
	signal int32
}

func killOnce(t *testing.T, s *server.Server, writers []*writer, part string, round, n int) {
	t.Helper()
	var endings []*ending
	for _, w := range writers {
		e := &ending{w: w, code: int32(1 + (w.i+round)%120)}
		last := fmt.Sprintf("exit %d", e.code)
		if w.i%5 == 0 {
			e.code, e.signal = 128+11, 11
			last = "kill -11 $$"
		}
		lines := 4 + w.i
		for l := range lines {
			e.want += fmt.Sprintf("round %d of %d: %d\n", round, w.i, l)
		}
		e.number = start(t, w.sb, client.Shell(fmt.Sprintf(short, w.i, round, lines, last)))
		endings = append(endings, e)
	}
	before := s.Pid(part)
	began := time.Now()
	if err := s.Kill(part); err != nil {
		t.Fatal(err)
	}
	killed := time.Now()
	if part == "up" {
		// Long enough that short commands end without an edge, another time at once.
		pause(t, time.Duration(n)*400*time.Millisecond)
		began = time.Now()
		if err := s.Up(t.Context()); err != nil {
			t.Fatal(err)
		}
		t.Logf("up: ready after %s, %s after the kill", since(began), since(killed))
	} else {
		wait.Until(t, 20*time.Second, func() bool { pid := s.Pid(part); return pid != 0 && pid != before }, part+" is back")
		t.Logf("%s: another process after %s", part, since(killed))
	}
	used, made := serving(t, s, writers[0].sb, began)
	t.Logf("%s: a command ran after %s, a sandbox was made after %s", part, used.Round(time.Millisecond), made.Round(time.Millisecond))
	each(t, writers, func(w *writer) error { return w.check(t) })
	for _, e := range endings {
		got, p, err := recorded(within(t, 60*time.Second), e.w.sb, e.number, true)
		r := p.GetResult()
		if err != nil || string(got) != e.want || r.GetExitCode() != e.code || r.GetSignal() != e.signal ||
			r.GetInfraError() != "" || r.GetTimedOut() || r.GetOom() || r.GetTruncated() {
			t.Errorf("%s, round %d, sandbox %d: %d of %d bytes, %v, want code %d; %v", part, round, e.w.i, len(got), len(e.want), r, e.code, err)
		}
	}
}

// pause lets time pass with a part away; time itself is the fault here.
func pause(t testing.TB, d time.Duration) {
	timer := time.NewTimer(d)
	defer timer.Stop()
	select {
	case <-timer.C:
	case <-t.Context().Done():
	}
}

func since(t time.Time) time.Duration { return time.Since(t).Round(time.Millisecond) }

func TestFastOutputIsWholeThoughItsRecorderDies(t *testing.T) {
	s := begin(t)
	const lines = 6_000_000 // 45 MiB, within what is kept whole of one stream
	want := sha256.New()
	for n := 1; n <= lines; n++ {
		fmt.Fprintln(want, n)
	}
	// Of what has ended half of the limit is kept once another command starts, as one does here after each kill.
	sb := open(t, s, func(s *sandseav1.SandboxSpec) { s.Limits.CpuMillis, s.Limits.OutputBytes = 2000, 128<<20 })
	number := start(t, sb, client.Argv("seq", "1", strconv.Itoa(lines)))
	got, offset := sha256.New(), int64(0)
	var p *sandseav1.Process
	broken := 0
	follow := func() error {
		req := &sandseav1.AttachRequest{Number: number, StdoutOffset: offset}
		for e, err := range sb.Attach(within(t, 60*time.Second), req) {
			if err != nil {
				return err
			}
			if g := e.GetGap(); g != nil {
				return fmt.Errorf("bytes are lost: %v", g)
			}
			if d := e.GetData(); d != nil {
				if d.GetOffset() != offset {
					return fmt.Errorf("a piece at %d after %d bytes", d.GetOffset(), offset)
				}
				got.Write(d.GetData())
				offset += int64(len(d.GetData()))
			}
			if e.GetExited() != nil {
				p = e.GetExited()
			}
		}
		return nil
	}
	var g errgroup.Group
	g.Go(func() error {
		for p == nil {
			if err := follow(); err != nil {
				if broken++; broken > 1000 || !errors.Is(err, errdefs.Unavailable) {
					return err
				}
				pause(t, 20*time.Millisecond)
			}
		}
		return nil
	})
	for _, part := range []string{"keeper", "up", "keeper", "keeper"} {
		pause(t, 100*time.Millisecond)
		before := s.Pid(part)
		if err := s.Kill(part); err != nil {
			t.Fatal(err)
		}
		if part == "up" {
			if err := s.Up(t.Context()); err != nil {
				t.Fatal(err)
			}
		}
		wait.Until(t, 30*time.Second, func() bool { pid := s.Pid(part); return pid != 0 && pid != before }, part+" is back")
		// A command runs once both hold the sandbox again. With both away at once it would end, as it should.
		wait.Until(t, 30*time.Second, func() bool {
			_, err := sb.Run(within(t, 10*time.Second), client.Argv("true"))
			return err == nil
		}, part+" holds the sandbox")
		t.Logf("%s killed and back", part)
	}
	if err := g.Wait(); err != nil {
		t.Fatal(err)
	}
	if r := p.GetResult(); r.GetExitCode() != 0 || r.GetStdoutBytes() != offset || r.GetTruncated() {
		t.Errorf("%v, %d bytes read", r, offset)
	}
	if !bytes.Equal(got.Sum(nil), want.Sum(nil)) {
		t.Errorf("%d bytes, and they are not what was written", offset)
	}
	t.Logf("%d MiB whole; the reader was cut off %d times", offset>>20, broken)
}

func TestAnAnswerHoldsAllOutputThoughTheRecorderIsSlow(t *testing.T) {
	s := begin(t)
	sb := open(t, s)
	var g errgroup.Group
	var res *sandseav1.RunResponse
	g.Go(func() (err error) {
		res, err = sb.Run(within(t, 30*time.Second), client.Shell("sleep 0.5; seq 1 2000; echo over >&2; exit 3"))
		return err
	})
	wait.Until(t, 30*time.Second, func() bool { return running("sleep\x000.5") }, "the command runs")
	pid := s.Pid("keeper")
	if err := syscall.Kill(pid, syscall.SIGSTOP); err != nil {
		t.Fatal(err)
	}
	pause(t, 1500*time.Millisecond)
	if err := syscall.Kill(pid, syscall.SIGCONT); err != nil {
		t.Fatal(err)
	}
	if err := g.Wait(); err != nil {
		t.Fatal(err)
	}
	if n := bytes.Count(res.GetStdout(), []byte("\n")); n != 2000 || string(res.GetStderr()) != "over\n" || res.GetResult().GetExitCode() != 3 {
		t.Errorf("%d of 2000 lines, %q, %v", n, res.GetStderr(), res.GetResult())
	}
}

func TestDeadlinesHoldWhileTheDaemonIsAway(t *testing.T) {
	s := begin(t)
	sb := open(t, s)
	cmd := client.Shell("echo begun; (setsid sleep 3333 &); sleep 3333")
	cmd.TimeoutMs = 1200
	number := start(t, sb, cmd)
	later := client.Shell("echo begun; sleep 3334")
	later.TimeoutMs = 12_000
	second := start(t, sb, later)
	doomed := open(t, s, func(s *sandseav1.SandboxSpec) { s.TtlMs = 3000 })
	start(t, doomed, client.Argv("sleep", "3335"))
	began := time.Now()
	if err := s.Kill("up"); err != nil {
		t.Fatal(err)
	}
	// The command dies on time without anybody to ask for it.
	wait.Until(t, 10*time.Second, func() bool { return !running("sleep\x003333") && !running("sleep\x003335") }, "the deadlines have passed")
	if !running("sleep\x003334") {
		t.Error("a command died before its time")
	}
	anew := time.Now().Add(12 * time.Second)
	if err := s.Up(t.Context()); err != nil {
		t.Fatal(err)
	}
	got, p, err := recorded(within(t, 20*time.Second), sb, number, true)
	r := p.GetResult()
	if err != nil || string(got) != "begun\n" || !r.GetTimedOut() || r.GetExitCode() != 124 {
		t.Errorf("%q, %v, %v", got, p, err)
	}
	if wall := time.Duration(r.GetWallUs()) * time.Microsecond; wall < time.Second || wall > 10*time.Second {
		t.Errorf("it ran %s", wall)
	}
	if end := ended(t, doomed, 30*time.Second); end.GetCause() != "ttl" {
		t.Errorf("ended %v", end)
	}
	_, p, err = recorded(within(t, 20*time.Second), sb, second, true)
	if r := p.GetResult(); err != nil || !r.GetTimedOut() {
		t.Errorf("the second command: %v, %v", p, err)
	}
	if !time.Now().Before(anew) {
		t.Errorf("its time was counted anew: %s", time.Since(began))
	}
}

// running reports whether a process of this machine has these arguments.
func running(argv string) bool {
	entries, err := os.ReadDir("/proc")
	if err != nil {
		return false
	}
	for _, e := range entries {
		if b, err := os.ReadFile("/proc/" + e.Name() + "/cmdline"); err == nil && bytes.Contains(b, []byte(argv)) {
			return true
		}
	}
	return false
}

func TestDeadlinesOutliveTheKeeper(t *testing.T) {
	s := begin(t)
	sb := open(t, s)
	cmd := client.Shell("echo begun; sleep 3336")
	cmd.TimeoutMs = 2500
	number := start(t, sb, cmd)
	doomed := open(t, s, func(s *sandseav1.SandboxSpec) { s.TtlMs = 3000 })
	began := time.Now()
	for range 2 {
		if err := s.Kill("keeper"); err != nil {
			t.Fatal(err)
		}
		wait.Until(t, 20*time.Second, func() bool { return s.Pid("keeper") != 0 }, "another keeper")
		serving(t, s, sb, began)
	}
	_, p, err := recorded(within(t, 20*time.Second), sb, number, true)
	if err != nil || !p.GetResult().GetTimedOut() {
		t.Errorf("%v, %v", p, err)
	}
	if wall := time.Duration(p.GetResult().GetWallUs()) * time.Microsecond; wall < 2*time.Second || wall > 5*time.Second {
		t.Errorf("it ran %s", wall)
	}
	if end := ended(t, doomed, 30*time.Second); end.GetCause() != "ttl" {
		t.Errorf("ended %v", end)
	}
}

func TestWithoutEdgeAndKeeperSandboxesEndAndNothingIsLeft(t *testing.T) {
	s := begin(t)
	var all []*client.Sandbox
	for range 5 {
		sb := open(t, s)
		start(t, sb, client.Argv("sleep", "4321"))
		all = append(all, sb)
	}
	for _, part := range []string{"up", "keeper"} {
		if err := s.Kill(part); err != nil {
			t.Fatal(err)
		}
	}
	wait.Until(t, 30*time.Second, func() bool { return !running("sleep\x004321") }, "all processes of the sandboxes are gone")
	if err := s.Up(t.Context()); err != nil {
		t.Fatal(err)
	}
	for _, sb := range all {
		if end := ended(t, sb, 20*time.Second); end.GetCause() != "infra_orphaned" {
			t.Errorf("ended %v", end)
		}
		_, err := sb.Run(within(t, 20*time.Second), client.Argv("true"))
		if e, ok := errors.AsType[*errdefs.Error](err); !ok || e.Cause != "infra_orphaned" {
			t.Errorf("a call says %v", err)
		}
	}
	onlyGroups(t, s, 0)
	serving(t, s, open(t, s), time.Now())
}

func TestSIGTERMLeavesSandboxesAndTheNextStartTakesThemBack(t *testing.T) {
	s := begin(t)
	sb := open(t, s)
	number := start(t, sb, client.Shell(fmt.Sprintf(steady, 1, 9)))
	w := &writer{i: 1, sb: sb, number: number}
	all, err := sb.Processes(within(t, 20*time.Second))
	if err != nil {
		t.Fatal(err)
	}
	w.pid = all[0].GetHostPid()
	gone := open(t, s)
	goneNumber := start(t, gone, client.Shell("echo last words; exit 3"))
	if _, _, err := recorded(within(t, 20*time.Second), gone, goneNumber, true); err != nil {
		t.Fatal(err)
	}
	if err := gone.Stop(within(t, 20*time.Second)); err != nil {
		t.Fatal(err)
	}
	// A call that waits is let go, and what it ran goes on (walks A8).
	var g errgroup.Group
	g.Go(func() error {
		_, err := sb.Run(within(t, 60*time.Second), client.Argv("sleep", "5432"))
		if err == nil {
			return errors.New("the call under way ended well")
		}
		return nil
	})
	wait.Until(t, 30*time.Second, func() bool { return running("sleep\x005432") }, "the command runs")
	began := time.Now()
	if err := s.Terminate(); err != nil {
		t.Fatal(err)
	}
	t.Logf("SIGTERM: ended after %s", since(began))
	if err := g.Wait(); err != nil {
		t.Error(err)
	}
	if !running("sleep\x005432") {
		t.Error("the command under way was killed")
	}
	began = time.Now()
	if err := s.Up(t.Context()); err != nil {
		t.Fatal(err)
	}
	used, made := serving(t, s, sb, began)
	t.Logf("second up: used after %s, made after %s", used, made)
	if err := w.check(t); err != nil {
		t.Error(err)
	}
	// What has ended is remembered, with its output; files work.
	if end := ended(t, gone, 30*time.Second); end.GetCause() != "stopped" {
		t.Errorf("ended before: %v", end)
	}
	got, p, err := recorded(within(t, 20*time.Second), gone, goneNumber, true)
	if err != nil || string(got) != "last words\n" || p.GetResult().GetExitCode() != 3 {
		t.Errorf("ended before: %q, %v, %v", got, p, err)
	}
	if _, err := sb.WriteFile(within(t, 20*time.Second), &sandseav1.WriteFileHeader{Path: "/tmp/f"}, strings.NewReader("x")); err != nil {
		t.Error(err)
	}
	if _, err := sb.Run(within(t, 20*time.Second), client.Argv("touch", "/tmp/stop")); err != nil {
		t.Fatal(err)
	}
	if _, p, err := recorded(within(t, 20*time.Second), sb, number, true); err != nil || p.GetResult().GetExitCode() != 9 {
		t.Errorf("%v, %v", p, err)
	}
}

func TestOneCommandUnderAKeyRunsOnceWhateverIsKilled(t *testing.T) {
	s := begin(t)
	sb := open(t, s)
	for n, part := range []string{"up", "keeper", "spawner", "up"} {
		key := fmt.Sprintf("key-%d", n)
		req := func() *sandseav1.RunRequest {
			return &sandseav1.RunRequest{
				Command: client.Shell(fmt.Sprintf("echo once >>/tmp/count-%[1]d; echo answer %[1]d; sleep 1; exit %[1]d", n+3)), Key: key,
			}
		}
		var g errgroup.Group
		g.Go(func() error { // whatever the call says: its command has begun
			_, _ = sb.RunRequest(within(t, 30*time.Second), req())
			return nil
		})
		wait.Until(t, 30*time.Second, func() bool { return running(fmt.Sprintf("answer %d", n+3)) }, "the command runs")
		if err := s.Kill(part); err != nil {
			t.Fatal(err)
		}
		if part == "up" {
			if err := s.Up(t.Context()); err != nil {
				t.Fatal(err)
			}
		}
		_ = g.Wait()
		res, err := sb.RunRequest(within(t, 30*time.Second), req())
		if err != nil || res.GetResult().GetExitCode() != int32(n+3) || string(res.GetStdout()) != fmt.Sprintf("answer %d\n", n+3) {
			t.Errorf("%s killed: %v, %v", part, res, err)
		}
		if got := sh(t, sb, fmt.Sprintf("cat /tmp/count-%d", n+3)); got != "once\n" {
			t.Errorf("%s killed: it ran %q", part, got)
		}
	}
}

func TestALiveProcessTakesInputAcrossARestart(t *testing.T) {
	s := begin(t)
	sb := open(t, s)
	ctx := within(t, 60*time.Second)
	var number int64
	req := &sandseav1.StartRequest{
		Command: client.Shell(`while read -r x; do echo "got $x"; done; echo end; exit 6`), Stdin: true, Detached: true,
	}
	for e, err := range sb.Start(ctx, req) {
		if err != nil {
			t.Fatal(err)
		}
		if p := e.GetStarted(); p != nil {
			number = p.GetNumber()
		}
	}
	at, want := int64(0), ""
	for n, part := range []string{"", "up", "keeper", "up"} {
		if part != "" {
			if err := s.Kill(part); err != nil {
				t.Fatal(err)
			}
			if part == "up" {
				if err := s.Up(t.Context()); err != nil {
					t.Fatal(err)
				}
			} else {
				wait.Until(t, 20*time.Second, func() bool { return s.Pid(part) != 0 }, "it is back")
				serving(t, s, sb, time.Now())
			}
		}
		line := fmt.Sprintf("line %d\n", n)
		next, err := sb.SendInput(ctx, number, at, []byte(line))
		if err != nil || next != at+int64(len(line)) {
			t.Fatalf("input after a kill of %q: %d, %v", part, next, err)
		}
		at, want = next, want+"got "+line
	}
	if err := sb.CloseInput(ctx, number); err != nil {
		t.Fatal(err)
	}
	got, p, err := recorded(ctx, sb, number, true)
	if err != nil || string(got) != want+"end\n" || p.GetResult().GetExitCode() != 6 {
		t.Errorf("%q, %v, %v", got, p, err)
	}
}
