package e2e

import (
	"bytes"
	"context"
	"crypto/sha256"
	"errors"
	"fmt"
	"io"
	"math/rand/v2"
	"strconv"
	"strings"
	"testing"
	"time"

	"connectrpc.com/connect"
	"golang.org/x/sync/errgroup"

	"github.com/sandsea/sandsea/api/errdefs"
	sandseav1 "github.com/sandsea/sandsea/api/sandsea/v1"
	"github.com/sandsea/sandsea/client"
	"github.com/sandsea/sandsea/internal/testkit/wait"
)

func TestArgumentsArriveAsTheyAre(t *testing.T) {
	t.Parallel()
	sb := open(t)
	piece := strings.Repeat("x\"'$(id)\\ é\n", 5462)[:64<<10]
	argv := []string{"printf", "%s"}
	for range 16 {
		argv = append(argv, piece)
	}
	res := run(t, sb, client.Argv(argv...))
	if want := strings.Repeat(piece, 16); string(res.GetStdout()) != want || res.GetResult().GetExitCode() != 0 {
		t.Errorf("1 MiB of arguments: %d bytes, %v", len(res.GetStdout()), res.GetResult())
	}
	// Linux takes 131,071 bytes in one argument (D1).
	res = run(t, sb, client.Argv("printf", "%s", strings.Repeat("y", 131071)))
	if len(res.GetStdout()) != 131071 {
		t.Errorf("131,071 bytes: %v", res.GetResult())
	}
	res = run(t, sb, client.Argv("printf", "%s", strings.Repeat("y", 131072)))
	if f := res.GetResult().GetStartFailure(); f.GetKind() != "argument_too_long" || f.GetErrno() != 7 {
		t.Errorf("131,072 bytes: %v", res.GetResult())
	}
	res = run(t, sb, client.Argv("printf", "[%s]", "", " ", "a b"))
	if got := string(res.GetStdout()); got != "[][ ][a b]" {
		t.Errorf("got %q", got)
	}
}

func TestAStartThatFailsSaysWhy(t *testing.T) {
	t.Parallel()
	sb := open(t)
	sh(t, sb, `printf '#!/no/such\n' >/tmp/badinterp; printf 'plain' >/tmp/plain; chmod 755 /tmp/badinterp;
		printf 'garbage' >/tmp/garbage; chmod 755 /tmp/garbage; mkdir /tmp/dir`)
	tests := map[string]struct {
		cmd  *sandseav1.Command
		kind string
		code int32
		text string
	}{
		"no such program":      {client.Argv("/no/such"), "not_found", 127, "/no/such"},
		"nowhere in PATH":      {client.Argv("nonesuch"), "not_found", 127, "nonesuch"},
		"a file without x":     {client.Argv("/etc/passwd"), "not_executable", 126, "/etc/passwd"},
		"a directory":          {client.Argv("/tmp/dir"), "not_executable", 126, "/tmp/dir"},
		"a missing script":     {client.Argv("/tmp/badinterp"), "bad_interpreter", 126, "/tmp/badinterp"},
		"no format":            {client.Argv("/tmp/garbage"), "bad_interpreter", 126, "/tmp/garbage"},
		"no such directory":    {&sandseav1.Command{Argv: []string{"true"}, Cwd: "/no/where"}, "cwd", 126, "/no/where"},
		"a file as directory":  {&sandseav1.Command{Argv: []string{"true"}, Cwd: "/etc/passwd"}, "cwd", 126, "/etc/passwd"},
		"no such user":         {&sandseav1.Command{Argv: []string{"true"}, User: "mallory"}, "user", 126, "mallory"},
		"no such group":        {&sandseav1.Command{Argv: []string{"true"}, User: "alice:wheel"}, "user", 126, "wheel"},
		"no right to the path": {&sandseav1.Command{Argv: []string{"true"}, User: "alice", Cwd: "/root"}, "cwd", 126, "/root"},
	}
	for name, tt := range tests {
		r := run(t, sb, tt.cmd).GetResult()
		f := r.GetStartFailure()
		if f.GetKind() != tt.kind || r.GetExitCode() != tt.code || !strings.Contains(f.GetMessage(), tt.text) {
			t.Errorf("%s: %v", name, r)
		}
		if r.GetInfraError() != "" || r.GetSignal() != 0 || r.GetTimedOut() {
			t.Errorf("%s: more than one end: %v", name, r)
		}
	}
	sh(t, sb, "true")
}

func TestRequestsThatCanNeverSucceedNameTheField(t *testing.T) {
	t.Parallel()
	sb := open(t)
	ctx := within(t, 30*time.Second)
	tests := map[string]struct {
		cmd   *sandseav1.Command
		field string
	}{
		"no argv":            {&sandseav1.Command{}, "argv"},
		"NUL in argv":        {client.Argv("echo", "a\x00b"), "argv"},
		"NUL in a variable":  {&sandseav1.Command{Argv: []string{"true"}, Env: map[string]string{"A": "\x00"}}, "env"},
		"= in a name":        {&sandseav1.Command{Argv: []string{"true"}, Env: map[string]string{"A=B": "x"}}, "env"},
		"NUL in cwd":         {&sandseav1.Command{Argv: []string{"true"}, Cwd: "/\x00"}, "cwd"},
		"a negative limit":   {&sandseav1.Command{Argv: []string{"true"}, TimeoutMs: -1}, "timeout_ms"},
		"a uid of 2^32-1":    {&sandseav1.Command{Argv: []string{"true"}, User: "4294967295"}, "user"},
		"a uid beyond 65535": {&sandseav1.Command{Argv: []string{"true"}, User: "65536"}, "user"},
		"4 MiB of argv":      {client.Argv(append([]string{"true"}, strings.Split(strings.Repeat(strings.Repeat("z", 1<<16)+" ", 40), " ")...)...), "argv"},
	}
	for name, tt := range tests {
		_, err := sb.Run(ctx, tt.cmd)
		e, ok := errors.AsType[*errdefs.Error](err)
		if !ok || e.Kind != errdefs.Invalid || !strings.HasSuffix(e.Field, tt.field) || e.Hint == "" {
			t.Errorf("%s: %v", name, err)
		}
	}
}

func TestATimeOutKillsEveryDescendantAndKeepsTheOutput(t *testing.T) {
	t.Parallel()
	sb := open(t)
	bystander := start(t, sb, client.Argv("sleep", "1000"))
	cmd := client.Shell(`
		trap '' TERM INT HUP
		(trap '' TERM; while :; do sleep 0.1; done) &
		setsid sh -c 'trap "" TERM HUP; sleep 1001' &
		(setsid sh -c '(sleep 1002 &) ; exit') 
		nohup sleep 1003 >/dev/null 2>&1 &
		echo so far; echo to stderr >&2
		sleep 1004`)
	cmd.TimeoutMs = 3000
	began := time.Now()
	res := run(t, sb, cmd)
	took := time.Since(began)
	r := res.GetResult()
	if !r.GetTimedOut() || r.GetExitCode() != 124 || string(res.GetStdout()) != "so far\n" || string(res.GetStderr()) != "to stderr\n" {
		t.Errorf("got %v, %q, %q", r, res.GetStdout(), res.GetStderr())
	}
	if took < 2900*time.Millisecond || took > 30*time.Second {
		t.Errorf("took %s", took)
	}
	got := sh(t, sb, "ps -o args | grep '[s]leep' | sort")
	if got != "sleep 1000\n" {
		t.Errorf("left: %q", got)
	}
	if err := sb.Signal(within(t, 10*time.Second), bystander, 9, false); err != nil {
		t.Error(err)
	}
}

func TestTimeOutsAreFractionalAndNoneMeansNone(t *testing.T) {
	t.Parallel()
	sb := open(t)
	for _, tt := range []struct {
		ms   int64
		line string
		hits bool
	}{{200, "sleep 5", true}, {1, "sleep 5", true}, {0, "sleep 0.4", false}, {24 * 3600 * 1000, "true", false}} {
		cmd := client.Shell(tt.line)
		cmd.TimeoutMs = tt.ms
		began := time.Now()
		r := run(t, sb, cmd).GetResult()
		if r.GetTimedOut() != tt.hits || time.Since(began) > 4*time.Second {
			t.Errorf("%d ms: %v after %s", tt.ms, r, time.Since(began))
		}
	}
}

func TestDeathBySignalIsAResultAndNoTimeOut(t *testing.T) {
	t.Parallel()
	sb := open(t)
	for sig, name := range map[int]string{1: "SIGHUP", 9: "SIGKILL", 11: "SIGSEGV", 15: "SIGTERM", 6: "SIGABRT"} {
		cmd := client.Shell(fmt.Sprintf("echo before; kill -%d $$; sleep 5", sig))
		cmd.TimeoutMs = 60_000
		res := run(t, sb, cmd)
		r := res.GetResult()
		if r.GetTimedOut() || r.GetOom() || r.GetSignal() != int32(sig) || r.GetSignalName() != name ||
			r.GetExitCode() != int32(128+sig) || string(res.GetStdout()) != "before\n" {
			t.Errorf("%s: %v %q", name, r, res.GetStdout())
		}
	}
	// A shell that reports a child's signal as its own exit code has not died by one.
	if r := run(t, sb, client.Shell("sh -c 'kill -9 $$'; exit 137")).GetResult(); r.GetSignal() != 0 || r.GetExitCode() != 137 {
		t.Errorf("exit 137: %v", r)
	}
}

func TestExitCodesComeAsTheyAre(t *testing.T) {
	t.Parallel()
	sb := open(t)
	for _, code := range []int32{0, 1, 3, 124, 125, 126, 127, 255} {
		r := run(t, sb, client.Shell(fmt.Sprint("exit ", code))).GetResult()
		if r.GetExitCode() != code || r.GetStartFailure() != nil || r.GetTimedOut() || r.GetInfraError() != "" {
			t.Errorf("exit %d: %v", code, r)
		}
	}
}

func TestACallerWhoLeavesTakesTheTreeAlongUnlessThereIsAKey(t *testing.T) {
	t.Parallel()
	sb := open(t)
	line := "(setsid sleep 4242 &); sleep 4242"
	leave := func(key string) {
		ctx, stop := context.WithCancelCause(within(t, 30*time.Second))
		var g errgroup.Group
		g.Go(func() error {
			_, err := sb.RunRequest(ctx, &sandseav1.RunRequest{Command: client.Shell(line), Key: key})
			return err
		})
		wait.Until(t, 30*time.Second, func() bool { return strings.Count(sh(t, sb, "ps -o args"), "sleep 4242\n") == 2 }, "it runs")
		stop(errors.New("the caller leaves"))
		if err := g.Wait(); !errors.Is(err, errdefs.Canceled) {
			t.Errorf("the caller gets %v", err)
		}
	}
	leave("")
	wait.Until(t, 20*time.Second, func() bool { return strings.Count(sh(t, sb, "ps -o args"), "sleep 4242") == 0 },
		"the tree is gone")
	leave("kept")
	if got := sh(t, sb, "sleep 0.5; ps -o args"); strings.Count(got, "sleep 4242\n") != 2 {
		t.Errorf("with a key: %q", got)
	}
	sh(t, sb, "kill -9 $(pidof sleep)")
	// The key still gives the result.
	res, err := sb.RunRequest(within(t, 30*time.Second), &sandseav1.RunRequest{Command: client.Shell(line), Key: "kept"})
	if err != nil || res.GetResult().GetExitCode() != 137 || !res.GetResult().GetReplayed() {
		t.Errorf("asked again: %v %v", res.GetResult(), err)
	}
}

func TestAKeyRunsACommandOnce(t *testing.T) {
	t.Parallel()
	sb := open(t)
	ctx := within(t, 60*time.Second)
	req := func() *sandseav1.RunRequest {
		return &sandseav1.RunRequest{Command: client.Shell("echo x >>/tmp/times; echo out; echo err >&2; exit 7"), Key: "once"}
	}
	results := make([]*sandseav1.RunResponse, 6)
	var g errgroup.Group
	for i := range results {
		g.Go(func() (err error) {
			results[i], err = sb.RunRequest(ctx, req())
			return err
		})
	}
	if err := g.Wait(); err != nil {
		t.Fatal(err)
	}
	replayed := 0
	for _, r := range results {
		if string(r.GetStdout()) != "out\n" || string(r.GetStderr()) != "err\n" || r.GetResult().GetExitCode() != 7 ||
			r.GetNumber() != results[0].GetNumber() {
			t.Errorf("got %v", r)
		}
		if r.GetResult().GetReplayed() {
			replayed++
		}
	}
	if replayed != 5 || sh(t, sb, "cat /tmp/times") != "x\n" {
		t.Errorf("%d of 6 replayed, ran %q", replayed, sh(t, sb, "cat /tmp/times"))
	}
	other := req()
	other.Command.Argv[2] = "echo another"
	if _, err := sb.RunRequest(ctx, other); !errors.Is(err, errdefs.AlreadyExists) {
		t.Errorf("another command under the key: %v", err)
	}
}

func TestInput(t *testing.T) {
	t.Parallel()
	sb := open(t)
	ctx := within(t, 90*time.Second)
	with := func(stdin []byte, argv ...string) *sandseav1.RunResponse {
		t.Helper()
		res, err := sb.RunRequest(ctx, &sandseav1.RunRequest{Command: client.Argv(argv...), Stdin: stdin})
		if err != nil {
			t.Fatal(err)
		}
		return res
	}
	if got := with(nil, "wc", "-c").GetStdout(); string(got) != "0\n" {
		t.Errorf("no input: %q", got)
	}
	if got := with([]byte{}, "wc", "-c").GetStdout(); string(got) != "0\n" {
		t.Errorf("empty input: %q", got)
	}
	if got := with([]byte("a\x00b\nc"), "cat").GetStdout(); string(got) != "a\x00b\nc" {
		t.Errorf("got %q", got)
	}
	// Nobody who reads is no error.
	if r := with(bytes.Repeat([]byte("z"), 3<<20), "true").GetResult(); r.GetExitCode() != 0 {
		t.Errorf("input that nobody reads: %v", r)
	}
	_, err := serve(t).Client.Processes.Run(ctx, connect.NewRequest(&sandseav1.RunRequest{
		Id: sb.ID, Command: client.Argv("cat"), Stdin: make([]byte, 5<<20),
	}))
	if !errors.Is(err, errdefs.Invalid) && !errors.Is(err, errdefs.Exhausted) {
		t.Errorf("more than one message holds: %v", err)
	}
}

func TestLargeInputIsSentInPieces(t *testing.T) {
	t.Parallel()
	sb := open(t)
	ctx := within(t, 90*time.Second)
	big := make([]byte, 50<<20)
	_, _ = rand.NewChaCha8([32]byte{1}).Read(big)
	for i := 0; i < len(big); i += 4096 {
		big[i] = 0
	}
	number := startRequest(t, sb, &sandseav1.StartRequest{Command: client.Argv("sha256sum"), Stdin: true, Detached: true})
	began := time.Now()
	for at := int64(0); at < int64(len(big)); {
		next, err := sb.SendInput(ctx, number, at, big[at:min(at+1<<20, int64(len(big)))])
		if err != nil {
			t.Fatal(err)
		}
		at = next
	}
	if err := sb.CloseInput(ctx, number); err != nil {
		t.Fatal(err)
	}
	out, last := attach(t, sb, &sandseav1.AttachRequest{Number: number})
	want := fmt.Sprintf("%x  -\n", sha256.Sum256(big))
	if got := string(out[sandseav1.Stream_STREAM_STDOUT]); got != want {
		t.Errorf("50 MiB: %q, want %q: %v", got, want, last)
	}
	t.Logf("50 MiB of input in %s", time.Since(began))
}

func TestALiveProcessTakesInputAndAnswers(t *testing.T) {
	t.Parallel()
	sb := open(t)
	ctx := within(t, 60*time.Second)
	number := startRequest(t, sb, &sandseav1.StartRequest{
		Command: client.Shell(`while read -r x; do echo "out $x"; echo "err $x" >&2; done; echo end; exit 5`),
		Stdin:   true, Detached: true,
	})
	if p := process(t, sb, number); !p.GetInputOpen() || p.GetState() != sandseav1.ProcessState_PROCESS_STATE_RUNNING || p.GetHostPid() == 0 {
		t.Errorf("running: %v", p)
	}
	var at int64
	for i := range 3 {
		next, err := sb.SendInput(ctx, number, at, fmt.Appendf(nil, "%d\n", i))
		if err != nil {
			t.Fatal(err)
		}
		// A repeat is dropped.
		if again, err := sb.SendInput(ctx, number, at, fmt.Appendf(nil, "%d\n", i)); err != nil || again != next {
			t.Errorf("a repeat gives %d, %v", again, err)
		}
		at = next
		awaitOutput(t, sb, number, strings.Join([]string{"out 0\n", "out 1\n", "out 2\n"}[:i+1], ""))
	}
	if _, err := sb.SendInput(ctx, number, at+10, []byte("x")); err == nil {
		t.Error("a hole in the input was taken")
	}
	if err := sb.CloseInput(ctx, number); err != nil {
		t.Fatal(err)
	}
	out, last := attach(t, sb, &sandseav1.AttachRequest{Number: number})
	if string(out[sandseav1.Stream_STREAM_STDOUT]) != "out 0\nout 1\nout 2\nend\n" ||
		string(out[sandseav1.Stream_STREAM_STDERR]) != "err 0\nerr 1\nerr 2\n" || last.GetResult().GetExitCode() != 5 {
		t.Errorf("%q, %v", out, last)
	}
	if _, err := sb.SendInput(ctx, number, at, []byte("late")); !errors.Is(err, errdefs.FailedPrecondition) {
		t.Errorf("input after the end: %v", err)
	}
}

func TestEnvironment(t *testing.T) {
	t.Parallel()
	sb := open(t, func(s *sandseav1.SandboxSpec) { s.Env = map[string]string{"FROM": "sandbox", "BOX": "1"} })
	env := func(cmd *sandseav1.Command) map[string]string {
		cmd.Argv = []string{"/bin/env"}
		out := map[string]string{}
		for line := range strings.Lines(string(run(t, sb, cmd).GetStdout())) {
			k, v, _ := strings.Cut(strings.TrimSuffix(line, "\n"), "=")
			out[k] = v
		}
		return out
	}
	got := env(&sandseav1.Command{Env: map[string]string{"FROM": "call", "CALL": "a=b c"}})
	if got["FROM"] != "call" || got["BOX"] != "1" || got["CALL"] != "a=b c" || got["HOME"] != "/root" || got["PATH"] == "" {
		t.Errorf("merged: %v", got)
	}
	got = env(&sandseav1.Command{Env: map[string]string{"ONLY": "this"}, EnvMode: sandseav1.EnvMode_ENV_MODE_REPLACE})
	if len(got) != 1 || got["ONLY"] != "this" {
		t.Errorf("replaced: %v", got)
	}
}

func TestUsers(t *testing.T) {
	t.Parallel()
	sb := open(t, func(s *sandseav1.SandboxSpec) { s.User = "alice" })
	const line = `echo "$(id -u):$(id -g) $(id -G | tr ' ' ,) $HOME $USER $LOGNAME"`
	for user, want := range map[string]string{
		"":          "1000:1000 1000,50 /home/alice alice alice\n",
		"alice":     "1000:1000 1000,50 /home/alice alice alice\n",
		"1000":      "1000:1000 1000,50 /home/alice alice alice\n",
		"root":      "0:0 0 /root root root\n",
		"0":         "0:0 0 /root root root\n",
		"bob":       "1001:1001 1001 /nowhere bob bob\n",
		"bob:staff": "1001:50 50 /nowhere bob bob\n",
		"4711:4712": "4711:4712 4712 /",
	} {
		cmd := client.Shell(line)
		cmd.User = user
		res := run(t, sb, cmd)
		if got := string(res.GetStdout()); !strings.HasPrefix(got, want) {
			t.Errorf("user %q: got %q %q, want %q", user, got, res.GetStderr(), want)
		}
	}
	if r := run(t, sb, client.Shell("echo x >/etc/forbidden")).GetResult(); r.GetExitCode() == 0 {
		t.Error("alice wrote to /etc")
	}
}

func TestWorkingDirectories(t *testing.T) {
	t.Parallel()
	sb := open(t, func(s *sandseav1.SandboxSpec) { s.Workdir = "/home" })
	for cwd, want := range map[string]string{"": "/home\n", "alice": "/home/alice\n", "/tmp": "/tmp\n", "../etc": "/etc\n"} {
		cmd := client.Argv("pwd")
		cmd.Cwd = cwd
		if got := string(run(t, sb, cmd).GetStdout()); got != want {
			t.Errorf("%q: got %q, want %q", cwd, got, want)
		}
	}
	// A link that leads out of the namespace of names leads nowhere (CVE-2024-21626).
	for fd := range 20 {
		cmd := client.Shell("cat /../../../../etc/hostname; ls ../../../../ | head -3; pwd")
		cmd.Cwd = fmt.Sprintf("/proc/self/fd/%d", fd)
		if r := run(t, sb, cmd).GetResult(); r.GetStartFailure().GetKind() != "cwd" {
			t.Errorf("%s is a working directory: %v", cmd.GetCwd(), r)
		}
	}
}

func TestMergedStreamsKeepTheirOrder(t *testing.T) {
	t.Parallel()
	sb := open(t)
	cmd := client.Shell("n=0; while [ $n -lt 200 ]; do echo a$n; echo b$n >&2; n=$((n+1)); done")
	cmd.MergeStderr = true
	res := run(t, sb, cmd)
	var want strings.Builder
	for n := range 200 {
		fmt.Fprintf(&want, "a%d\nb%d\n", n, n)
	}
	if string(res.GetStdout()) != want.String() || len(res.GetStderr()) != 0 {
		t.Errorf("got %q, %q", res.GetStdout(), res.GetStderr())
	}
}

func TestManyCommandsRunAtOnce(t *testing.T) {
	t.Parallel()
	sb := open(t)
	ctx := within(t, 60*time.Second)
	var g errgroup.Group
	for i := range 64 {
		g.Go(func() error {
			res, err := sb.Run(ctx, client.Shell(fmt.Sprintf("read -r x </proc/sys/kernel/random/uuid; sleep 0.3; echo %d; exit %d", i, i)))
			if err != nil {
				return err
			}
			if string(res.GetStdout()) != fmt.Sprintln(i) || res.GetResult().GetExitCode() != int32(i) {
				return fmt.Errorf("command %d: %q %v", i, res.GetStdout(), res.GetResult())
			}
			return nil
		})
	}
	began := time.Now()
	if err := g.Wait(); err != nil {
		t.Error(err)
	}
	t.Logf("64 commands of 0.3 s at once: %s", time.Since(began))
}

func TestThousandsOfShortCommandsOneAfterAnother(t *testing.T) {
	t.Parallel()
	sb := open(t)
	ctx := within(t, 60*time.Second)
	began := time.Now()
	const n = 500
	for i := range n {
		res, err := sb.Run(ctx, client.Argv("echo", strconv.Itoa(i)))
		if err != nil || string(res.GetStdout()) != fmt.Sprintln(i) {
			t.Fatalf("command %d: %q %v", i, res.GetStdout(), err)
		}
	}
	t.Logf("%s each", time.Since(began)/n)
	if u := info(t, sb).GetUsage(); u.GetPids() > 4 {
		t.Errorf("%d processes are left", u.GetPids())
	}
}

func TestABackgroundChildOutlivesItsCommandAndItsOutputIsKept(t *testing.T) {
	t.Parallel()
	sb := open(t)
	began := time.Now()
	res := run(t, sb, client.Shell("(sleep 0.2; while [ ! -e /tmp/go ]; do sleep 0.1; done; echo late; touch /tmp/done) & echo early"))
	if took := time.Since(began); took > 5*time.Second {
		t.Errorf("Run waited for the child, %s", took)
	}
	if got := string(res.GetStdout()); got != "early\n" {
		t.Errorf("got %q", got)
	}
	sh(t, sb, "touch /tmp/go; while [ ! -e /tmp/done ]; do sleep 0.05; done")
	awaitOutput(t, sb, res.GetNumber(), "early\nlate\n")
}

func TestSignalsReachTheFirstProcessOrTheTree(t *testing.T) {
	t.Parallel()
	sb := open(t)
	ctx := within(t, 30*time.Second)
	line := "trap 'echo usr; exit 4' USR1; sh -c 'trap \"echo child; exit\" USR1; echo ready; while :; do sleep 0.05; done' & while :; do sleep 0.05; done"
	one := start(t, sb, client.Shell(line))
	awaitOutput(t, sb, one, "ready\n")
	if err := sb.Signal(ctx, one, 10, false); err != nil {
		t.Fatal(err)
	}
	_, last := attach(t, sb, &sandseav1.AttachRequest{Number: one})
	if last.GetResult().GetExitCode() != 4 {
		t.Errorf("one: %v", last)
	}
	awaitOutput(t, sb, one, "ready\nusr\n")
	if err := sb.Signal(ctx, one, 9, true); err != nil && !errors.Is(err, errdefs.FailedPrecondition) {
		t.Error(err)
	}
	tree := start(t, sb, client.Shell("sleep 777 & setsid sleep 777 & echo ready; wait"))
	awaitOutput(t, sb, tree, "ready\n")
	if err := sb.Signal(ctx, tree, 9, true); err != nil {
		t.Fatal(err)
	}
	wait.Until(t, 20*time.Second, func() bool { return !strings.Contains(sh(t, sb, "ps -o args"), "sleep 777") }, "the tree is gone")
	for _, sig := range []int{0, -1, 65} {
		if err := sb.Signal(ctx, tree, sig, false); !errors.Is(err, errdefs.Invalid) {
			t.Errorf("signal %d: %v", sig, err)
		}
	}
	if err := sb.Signal(ctx, 99999, 9, false); !errors.Is(err, errdefs.NotFound) {
		t.Errorf("no such process: %v", err)
	}
}

func TestAttachFromOffsetsByManyReadersAfterADisconnect(t *testing.T) {
	t.Parallel()
	sb := open(t)
	const lines = 300
	number := start(t, sb, client.Shell(fmt.Sprintf(
		"n=0; while [ $n -lt %d ]; do printf 'line %%06d\\n' $n; [ $((n%%10)) = 0 ] && echo e$n >&2; usleep 3000; n=$((n+1)); done; exit 9", lines)))
	var want, wantErr strings.Builder
	for n := range lines {
		fmt.Fprintf(&want, "line %06d\n", n)
		if n%10 == 0 {
			fmt.Fprintf(&wantErr, "e%d\n", n)
		}
	}
	// A reader that breaks off in the middle and goes on where it was.
	var got []byte
	for e, err := range sb.Attach(within(t, 30*time.Second), &sandseav1.AttachRequest{Number: number}) {
		if err != nil {
			t.Fatal(err)
		}
		if d := e.GetData(); d.GetStream() == sandseav1.Stream_STREAM_STDOUT {
			got = append(got, d.GetData()...)
		}
		if len(got) > 600 {
			break
		}
	}
	rest, _ := attach(t, sb, &sandseav1.AttachRequest{Number: number, StdoutOffset: int64(len(got))})
	if string(got)+string(rest[sandseav1.Stream_STREAM_STDOUT]) != want.String() {
		t.Error("the two parts are not the whole")
	}
	var g errgroup.Group
	for i := range 8 {
		from := int64(i * 397)
		g.Go(func() error {
			out, last := attach(t, sb, &sandseav1.AttachRequest{Number: number, StdoutOffset: from, StderrOffset: 4})
			if string(out[sandseav1.Stream_STREAM_STDOUT]) != want.String()[from:] ||
				string(out[sandseav1.Stream_STREAM_STDERR]) != wantErr.String()[4:] || last.GetResult().GetExitCode() != 9 {
				return fmt.Errorf("from %d: %d and %d bytes, %v", from, len(out[1]), len(out[2]), last)
			}
			return nil
		})
	}
	if err := g.Wait(); err != nil {
		t.Error(err)
	}
	// Beyond the end there is nothing, and that is no error.
	out, last := attach(t, sb, &sandseav1.AttachRequest{Number: number, StdoutOffset: int64(want.Len())})
	if len(out[sandseav1.Stream_STREAM_STDOUT]) != 0 || last == nil {
		t.Errorf("at the end: %q %v", out, last)
	}
	for e, err := range sb.Attach(within(t, 10*time.Second), &sandseav1.AttachRequest{Number: 12345}) {
		if !errors.Is(err, errdefs.NotFound) {
			t.Errorf("no such process: %v %v", e, err)
		}
		break
	}
}

func TestAStreamedStartTellsTheWholeStory(t *testing.T) {
	t.Parallel()
	sb := open(t)
	var story []string
	for e, err := range sb.Start(within(t, 30*time.Second), &sandseav1.StartRequest{Command: client.Shell("echo a; exit 2")}) {
		if err != nil {
			t.Fatal(err)
		}
		switch {
		case e.GetStarted() != nil:
			story = append(story, "started")
		case e.GetData() != nil:
			story = append(story, string(e.GetData().GetData()))
		case e.GetExited() != nil:
			story = append(story, fmt.Sprint("exited ", e.GetExited().GetResult().GetExitCode()))
		}
	}
	if got := strings.Join(story, "|"); got != "started|a\n|exited 2" {
		t.Errorf("got %q", got)
	}
	// Leaving early ends the command.
	for e, err := range sb.Start(within(t, 30*time.Second), &sandseav1.StartRequest{Command: client.Argv("sleep", "555")}) {
		if err != nil || e.GetStarted() == nil {
			t.Fatal(e, err)
		}
		break
	}
	wait.Until(t, 20*time.Second, func() bool { return !strings.Contains(sh(t, sb, "ps -o args"), "sleep 555") }, "it is gone")
}

func TestLargeOutputComesWhole(t *testing.T) {
	t.Parallel()
	sb := open(t)
	h := sha256.New()
	var n int64
	number := start(t, sb, client.Shell("dd if=/dev/urandom bs=1M count=24 2>/dev/null | tee /tmp/copy"))
	for e, err := range sb.Attach(within(t, 60*time.Second), &sandseav1.AttachRequest{Number: number}) {
		if err != nil {
			t.Fatal(err)
		}
		if d := e.GetData(); d != nil {
			_, _ = io.Copy(h, bytes.NewReader(d.GetData()))
			n += int64(len(d.GetData()))
		}
	}
	if want := sh(t, sb, "sha256sum </tmp/copy"); n != 24<<20 || fmt.Sprintf("%x  -\n", h.Sum(nil)) != want {
		t.Errorf("%d bytes, not what was written", n)
	}
}

func TestAShellInsideCannotEndTheSandbox(t *testing.T) {
	t.Parallel()
	sb := open(t)
	res := run(t, sb, client.Shell("kill -9 1; kill -9 -1; echo survived"))
	_ = res
	if i := info(t, sb); i.GetState() != sandseav1.SandboxState_SANDBOX_STATE_RUNNING {
		t.Fatalf("ended: %v", i.GetEnd())
	}
	if got := sh(t, sb, "echo on"); got != "on\n" {
		t.Errorf("got %q", got)
	}
	// A sandbox whose files are gone says so on the command, as the workload's doing.
	run(t, sb, client.Shell("/bin/busybox rm -rf /bin /etc /home /root /srv /tmp /var 2>/dev/null; true"))
	r := run(t, sb, client.Argv("/bin/sh", "-c", "true")).GetResult()
	if r.GetStartFailure().GetKind() != "not_found" || r.GetInfraError() != "" {
		t.Errorf("without a shell: %v", r)
	}
	if i := info(t, sb); i.GetState() != sandseav1.SandboxState_SANDBOX_STATE_RUNNING {
		t.Errorf("ended: %v", i.GetEnd())
	}
}
