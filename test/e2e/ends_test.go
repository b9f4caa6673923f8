package e2e

import (
	"errors"
	"strings"
	"testing"
	"time"

	"github.com/sandsea/sandsea/api/errdefs"
	sandseav1 "github.com/sandsea/sandsea/api/sandsea/v1"
	"github.com/sandsea/sandsea/client"
	"github.com/sandsea/sandsea/internal/testkit/wait"
)

// hoard fills the sandbox's memory with what no process owns any more: killing frees nothing.
const hoard = `
import ctypes, sys
libc = ctypes.CDLL(None, use_errno=True)
libc.shmat.restype = ctypes.c_void_p
size = int(sys.argv[1])
while True:
    key = libc.shmget(0, ctypes.c_size_t(size), 0o1600)
    if key < 0:
        break
    ctypes.memset(libc.shmat(key, None, 0), 1, size)
`

func TestMemoryThatNobodyOwnsEndsInATypedAnswer(t *testing.T) {
	t.Parallel()
	sb := onDebian(t)
	if _, err := write(t, sb, &sandseav1.WriteFileHeader{Path: "/tmp/hoard.py"}, hoard); err != nil {
		t.Fatal(err)
	}
	// The command is killed, or the sandbox with it; whatever comes after is the workload's doing, never the platform's.
	ooms := 0
	for _, argv := range [][]string{
		{"python3", "/tmp/hoard.py", "16777216"}, {"python3", "/tmp/hoard.py", "2097152"}, {"true"}, {"sh", "-c", "sleep 0.1"}, {"true"},
	} {
		res, err := sb.Run(within(t, 60*time.Second), client.Argv(argv...))
		r := res.GetResult()
		e, _ := errors.AsType[*errdefs.Error](err)
		t.Logf("%v: %v, %v", argv, r, err)
		if r.GetOom() || e != nil && e.Cause == "oom" {
			ooms++
		}
		if err != nil && (e == nil || e.Kind != errdefs.FailedPrecondition || e.Cause != "oom") || r.GetInfraError() != "" {
			t.Errorf("%v: %v, %v", argv, r, err)
		}
	}
	if ooms == 0 {
		t.Error("nothing ran out of memory")
	}
	if i := info(t, sb); i.GetState() == sandseav1.SandboxState_SANDBOX_STATE_ENDED && i.GetEnd().GetCause() != "oom" {
		t.Errorf("ended %v", i.GetEnd())
	}
}

func TestAReaderSeesTheEndOfTheSandboxOnTheCommand(t *testing.T) {
	t.Parallel()
	sb := open(t)
	number := start(t, sb, client.Shell("echo begun; sleep 1000"))
	awaitOutput(t, sb, number, "begun\n")
	type outcome struct {
		out  string
		last *sandseav1.Process
		err  error
	}
	done := make(chan outcome, 1)
	go func() {
		var o outcome
		for e, err := range sb.Attach(within(t, 30*time.Second), &sandseav1.AttachRequest{Number: number}) {
			if err != nil {
				o.err = err
				break
			}
			o.out += string(e.GetData().GetData())
			if p := e.GetExited(); p != nil {
				o.last = p
			}
		}
		done <- o
	}()
	if err := sb.Stop(within(t, 30*time.Second)); err != nil {
		t.Fatal(err)
	}
	o := <-done
	e, gone := errors.AsType[*errdefs.Error](o.err)
	if o.out != "begun\n" || o.last.GetResult().GetSignal() != 9 && !(gone && e.Cause == "stopped") {
		t.Errorf("got %+v", o)
	}
	if p := process(t, sb, number); p.GetState() != sandseav1.ProcessState_PROCESS_STATE_EXITED || p.GetResult().GetExitCode() != 137 {
		t.Errorf("listed as %v", p)
	}
}

func TestACommandUnderWayWhenTheSandboxStopsIsAnErrorWithTheCause(t *testing.T) {
	t.Parallel()
	sb := open(t)
	done := make(chan error, 1)
	go func() {
		_, err := sb.Run(within(t, 30*time.Second), client.Argv("sleep", "8080"))
		done <- err
	}()
	wait.Until(t, 30*time.Second, func() bool { return strings.Contains(sh(t, sb, "ps -o args"), "sleep 8080") }, "it runs")
	if err := sb.Stop(within(t, 30*time.Second)); err != nil {
		t.Fatal(err)
	}
	if e, ok := errors.AsType[*errdefs.Error](<-done); !ok || e.Kind != errdefs.FailedPrecondition || e.Cause != "stopped" {
		t.Errorf("got %v", e)
	}
}

func TestRequiredFeaturesThatTheNodeHasAreFine(t *testing.T) {
	t.Parallel()
	sb := open(t, func(s *sandseav1.SandboxSpec) {
		s.Require = []string{"limit.memory", "seccomp", "userns"}
		s.Network = &sandseav1.NetworkPolicy{Services: map[string]bool{"pypi": false}}
	})
	sh(t, sb, "true")
}

func TestEveryProcessKilledFromInsideLeavesTheSandbox(t *testing.T) {
	t.Parallel()
	sb := open(t)
	others := []int64{start(t, sb, client.Argv("sleep", "1000")), start(t, sb, client.Argv("sleep", "1000"))}
	// Also the file helper, which is the inside's own process.
	if _, err := sb.Stat(within(t, 10*time.Second), &sandseav1.StatFileRequest{Path: "/"}); err != nil {
		t.Fatal(err)
	}
	run(t, sb, client.Shell("kill -9 -1"))
	for _, n := range others {
		_, last := attach(t, sb, &sandseav1.AttachRequest{Number: n})
		if r := last.GetResult(); r.GetSignal() != 9 || r.GetTimedOut() || r.GetOom() || r.GetInfraError() != "" {
			t.Errorf("process %d: %v", n, r)
		}
	}
	for range 3 {
		if _, err := sb.Stat(within(t, 10*time.Second), &sandseav1.StatFileRequest{Path: "/"}); err != nil {
			t.Errorf("files: %v", err)
		}
		sh(t, sb, "kill -9 -1; true")
	}
}

func TestAWorkloadThatFillsItsProcessesIsAnsweredWithAType(t *testing.T) {
	t.Parallel()
	sb := open(t, func(s *sandseav1.SandboxSpec) { s.Limits.Pids = 16 })
	number := start(t, sb, client.Shell("while :; do sleep 1000 & done 2>/dev/null; sleep 1000"))
	// The shell that cannot fork any more may end, and free one.
	wait.Until(t, 30*time.Second, func() bool { return info(t, sb).GetUsage().GetPids() >= 15 }, "all are used")
	res := run(t, sb, client.Argv("true"))
	if r := res.GetResult(); r.GetExitCode() != 0 && r.GetStartFailure().GetKind() != "resources" {
		t.Errorf("got %v", r)
	}
	_, err := sb.Stat(within(t, 10*time.Second), &sandseav1.StatFileRequest{Path: "/"})
	if err != nil && errdefs.KindOf(err) == errdefs.Internal {
		t.Errorf("files: %v", err)
	}
	if err := sb.Signal(within(t, 10*time.Second), number, 9, true); err != nil {
		t.Fatal(err)
	}
	wait.Until(t, 30*time.Second, func() bool { return info(t, sb).GetUsage().GetPids() < 8 }, "they are gone")
	sh(t, sb, "true")
}

func TestHelpersOfManyUsersGoAwayByThemselves(t *testing.T) {
	t.Parallel()
	sb := open(t, func(s *sandseav1.SandboxSpec) { s.Limits.Pids = 32 })
	for uid := range 60 {
		req := &sandseav1.StatFileRequest{Path: "/etc/passwd", User: strings.Repeat("1", 3) + string(rune('0'+uid/10)) + string(rune('0'+uid%10))}
		if _, err := sb.Stat(within(t, 20*time.Second), req); err != nil {
			t.Fatalf("user %s: %v", req.GetUser(), err)
		}
	}
	if u := info(t, sb).GetUsage().GetPids(); u > 24 {
		t.Errorf("%d processes", u)
	}
}
