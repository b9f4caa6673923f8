package demands

import (
	"bytes"
	"context"
	"crypto/sha256"
	"errors"
	"fmt"
	"math/rand/v2"
	"slices"
	"strings"
	"testing"
	"time"

	"golang.org/x/sync/errgroup"

	"github.com/sandsea/sandsea/api/errdefs"
	sandseav1 "github.com/sandsea/sandsea/api/sandsea/v1"
	"github.com/sandsea/sandsea/client"
	"github.com/sandsea/sandsea/internal/testkit/wait"
)

func TestD01ArgvIsExecutedWithoutAShell(t *testing.T) {
	t.Parallel()
	sb := open(t)
	piece := strings.Repeat("x\"'$(id)\\ *\n", 5462)[:64<<10]
	argv := append([]string{"printf", "%s"}, slices.Repeat([]string{piece}, 16)...)
	if res := run(t, sb, client.Argv(argv...)); string(res.GetStdout()) != strings.Repeat(piece, 16) {
		t.Errorf("1 MiB of arguments: %d bytes, %v", len(res.GetStdout()), res.GetResult())
	}
	// Linux's limit of one argument.
	if res := run(t, sb, client.Argv("printf", "%s", strings.Repeat("y", 131_071))); len(res.GetStdout()) != 131_071 {
		t.Errorf("131,071 bytes: %v", res.GetResult())
	}
	f := run(t, sb, client.Argv("printf", "%s", strings.Repeat("y", 131_072))).GetResult().GetStartFailure()
	if f.GetKind() != "argument_too_long" {
		t.Errorf("131,072 bytes: %v", f)
	}
}

func TestD02TheShellIsTheCallersChoice(t *testing.T) {
	t.Parallel()
	sb := open(t)
	sh(t, sb, "echo 'export LOGIN=yes; PATH=/login:$PATH' >/etc/profile")
	const ask = `echo "$LOGIN $0"; case $PATH in /login*) echo reset;; esac`
	for _, tt := range []struct {
		argv []string
		want string
	}{
		{[]string{"sh", "-c", ask}, " sh\n"},
		{[]string{"sh", "-lc", ask}, "yes sh\nreset\n"},
		{[]string{"/bin/ash", "-c", ask, "name"}, " name\n"},
		{[]string{"echo", "$HOME"}, "$HOME\n"},
	} {
		if got := string(run(t, sb, client.Argv(tt.argv...)).GetStdout()); got != tt.want {
			t.Errorf("%q: %q, want %q", tt.argv, got, tt.want)
		}
	}
}

func TestD03StartFailuresAreTypedApartFromExitCodes(t *testing.T) {
	t.Parallel()
	sb := open(t)
	sh(t, sb, `printf '#!/no/such\n' >/tmp/script; chmod 755 /tmp/script; mkdir /tmp/dir`)
	cmd := func(user, cwd string, argv ...string) *sandseav1.Command {
		return &sandseav1.Command{Argv: argv, User: user, Cwd: cwd}
	}
	for name, tt := range map[string]struct {
		cmd   *sandseav1.Command
		kind  string
		text  string
		shell int32
	}{
		"not found":       {cmd("", "", "/no/such"), "not_found", "/no/such", 127},
		"not in PATH":     {cmd("", "", "nonesuch"), "not_found", "nonesuch", 127},
		"not executable":  {cmd("", "", "/etc/passwd"), "not_executable", "/etc/passwd", 126},
		"a directory":     {cmd("", "", "/tmp/dir"), "not_executable", "/tmp/dir", 126},
		"bad interpreter": {cmd("", "", "/tmp/script"), "bad_interpreter", "/tmp/script", 126},
		"missing cwd":     {cmd("", "/no/where", "true"), "cwd", "/no/where", 126},
		"unknown user":    {cmd("mallory", "", "true"), "user", "mallory", 126},
	} {
		r := run(t, sb, tt.cmd).GetResult()
		f := r.GetStartFailure()
		if f.GetKind() != tt.kind || !strings.Contains(f.GetMessage(), tt.text) || r.GetExitCode() != tt.shell ||
			r.GetInfraError() != "" || r.GetTimedOut() {
			t.Errorf("%s: %v", name, r)
		}
	}
	// The same codes from a program that ran are no start failures.
	for _, code := range []int32{126, 127} {
		r := run(t, sb, client.Shell(fmt.Sprint("exit ", code))).GetResult()
		if r.GetStartFailure() != nil || r.GetExitCode() != code {
			t.Errorf("exit %d: %v", code, r)
		}
	}
}

// TestD03ASandboxThatBrokeItselfIsTheAgentsDoing: whatever is done to the files that say who users are, and to the programs
// that are run, is a result of the command and never an error of the platform.
func TestD03ASandboxThatBrokeItselfIsTheAgentsDoing(t *testing.T) {
	t.Parallel()
	sb := open(t)
	hurt := func(line string) { sh(t, sb, line) }
	for _, tt := range []struct{ name, line, user string }{
		{"passwd is a directory", "rm /etc/passwd; mkdir /etc/passwd", "alice"},
		{"passwd is a pipe", "rm -r /etc/passwd; mkfifo /etc/passwd", "alice"},
		{"passwd is a loop", "rm -r /etc/passwd; ln -s passwd /etc/passwd", "alice"},
		{"passwd is a device", "rm -r /etc/passwd; ln -s /dev/zero /etc/passwd", "alice"},
		{"passwd points to nowhere", "rm -r /etc/passwd; ln -s $(printf '%0300d' 1) /etc/passwd", "alice"},
		{"passwd is too large", "rm -r /etc/passwd; head -c 2000000 /dev/zero >/etc/passwd", "alice"},
		{"passwd gives no possible uid", "rm -r /etc/passwd; echo 'alice:x:99999999:1::/:/bin/sh' >/etc/passwd", "alice"},
		{"passwd gives no number", "rm -r /etc/passwd; echo 'alice:x:one:1::/:/bin/sh' >/etc/passwd", "alice"},
		{"group gives no possible gid", "echo 'g:x:99999999:' >/etc/group; echo 'alice:x:1:1::/:/bin/sh' >/etc/passwd", "alice:g"},
		{"group is a directory", "rm /etc/group; mkdir /etc/group", "alice"},
		{"etc is gone", "rm -rf /etc", "alice"},
	} {
		hurt(tt.line)
		cmd := client.Argv("/bin/true")
		cmd.User = tt.user
		r := run(t, sb, cmd).GetResult()
		if k := r.GetStartFailure().GetKind(); k != "broken_sandbox" && k != "user" || r.GetInfraError() != "" {
			t.Errorf("%s: %v", tt.name, r)
		}
	}
	hurt("cp /bin/busybox /tmp/; /tmp/busybox rm -rf /bin")
	if r := run(t, sb, client.Shell("true")).GetResult(); r.GetStartFailure().GetKind() != "not_found" {
		t.Errorf("without programs: %v", r)
	}
	if i := info(t, sb); i.GetState() != sandseav1.SandboxState_SANDBOX_STATE_RUNNING {
		t.Errorf("the sandbox has ended: %v", i.GetEnd())
	}
}

func TestD04ATimeOutKillsTheTreeAndKeepsTheOutput(t *testing.T) {
	t.Parallel()
	sb := open(t)
	cmd := client.Shell(`trap '' TERM; setsid sh -c 'trap "" TERM; sleep 1001' & (sleep 1002 &); nohup sleep 1003 >/dev/null 2>&1 &
		echo so far; echo and here >&2; sleep 1004`)
	cmd.TimeoutMs = 3000
	began := time.Now()
	res := run(t, sb, cmd)
	r, took := res.GetResult(), time.Since(began)
	if !r.GetTimedOut() || r.GetExitCode() != 124 || r.GetWallUs() < 2_900_000 || took > 30*time.Second {
		t.Errorf("%v after %s", r, took)
	}
	if string(res.GetStdout()) != "so far\n" || string(res.GetStderr()) != "and here\n" {
		t.Errorf("the output so far: %q, %q", res.GetStdout(), res.GetStderr())
	}
	if left := sh(t, sb, "ps -o args | grep '[s]leep' || true"); left != "" {
		t.Errorf("left: %q", left)
	}
}

func TestD05DeathBySignalIsAResultAndNeverATimeOut(t *testing.T) {
	t.Parallel()
	sb := open(t)
	for sig, name := range map[int32]string{9: "SIGKILL", 11: "SIGSEGV", 15: "SIGTERM"} {
		cmd := client.Shell(fmt.Sprintf("kill -%d $$; sleep 60", sig))
		cmd.TimeoutMs = 60_000
		r := run(t, sb, cmd).GetResult()
		if r.GetTimedOut() || r.GetOom() || r.GetExitCode() != 128+sig || r.GetSignal() != sig || r.GetSignalName() != name {
			t.Errorf("%s: %v", name, r)
		}
	}
}

func TestD06TimeOutsAreFractionalAndMayBeNoneOrADay(t *testing.T) {
	t.Parallel()
	sb := open(t)
	for ms, hits := range map[int64]bool{200: true, 0: false, 24 * 3600 * 1000: false} {
		cmd := client.Shell("sleep 0.7")
		cmd.TimeoutMs = ms
		if r := run(t, sb, cmd).GetResult(); r.GetTimedOut() != hits {
			t.Errorf("%d ms: %v", ms, r)
		}
	}
}

func TestD07WhoCancelsEndsTheTreeUnlessItIsDetachedOrKeyed(t *testing.T) {
	t.Parallel()
	sb := open(t)
	tree := func(mark string) *sandseav1.Command {
		return client.Shell(fmt.Sprintf("(setsid sleep %s &); sleep %s", mark, mark))
	}
	count := func(mark string) int { return strings.Count(sh(t, sb, "ps -o args"), "sleep "+mark+"\n") }
	leave := func(mark, key string) {
		ctx, cancel := context.WithCancelCause(within(t, 60*time.Second))
		var g errgroup.Group
		g.Go(func() error {
			_, err := sb.RunRequest(ctx, &sandseav1.RunRequest{Command: tree(mark), Key: key})
			return err
		})
		wait.Until(t, 20*time.Second, func() bool { return count(mark) == 2 }, "the tree")
		cancel(errors.New("cancelled"))
		fault(t, "a cancelled run", g.Wait(), errdefs.Canceled)
	}
	leave("4001", "")
	gone(t, sb, "sleep 4001")
	leave("4002", "kept")
	start(t, sb, &sandseav1.StartRequest{Command: tree("4003")})
	wait.Until(t, 20*time.Second, func() bool { return count("4003") == 2 }, "the tree")
	for range sb.Start(within(t, 30*time.Second), &sandseav1.StartRequest{Command: tree("4004")}) {
		break
	}
	gone(t, sb, "sleep 4004")
	// A shell counts as well until it has become its last command.
	var k, d int
	if !wait.For(20*time.Second, func() bool { k, d = count("4002"), count("4003"); return k == 2 && d == 2 }) {
		t.Errorf("left of the keyed one %d, of the detached one %d", k, d)
	}
}

func TestD08InputIsNoneEmptyOrManyMegabytesWithNULs(t *testing.T) {
	t.Parallel()
	sb := open(t)
	for name, in := range map[string][]byte{"none": nil, "empty": {}} {
		res := runRequest(t, sb, &sandseav1.RunRequest{Command: client.Shell("wc -c; [ -p /dev/stdin ] && echo pipe"), Stdin: in})
		if got := string(res.GetStdout()); got != "0\npipe\n" {
			t.Errorf("%s: %q", name, got)
		}
	}
	for _, size := range []int{48 << 10, 3 << 20, 50 << 20} {
		in := make([]byte, size)
		_, _ = rand.NewChaCha8([32]byte{1}).Read(in)
		for i := 0; i < len(in); i += 1000 {
			in[i] = 0
		}
		res := runRequest(t, sb, &sandseav1.RunRequest{Command: client.Argv("sha256sum"), Stdin: in})
		if got, want := string(res.GetStdout()), fmt.Sprintf("%x  -\n", sha256.Sum256(in)); got != want {
			t.Errorf("%d bytes: %q, want %q: %v", size, got, want, res.GetResult())
		}
	}
	// Nobody who reads is no error.
	if r := runRequest(t, sb, &sandseav1.RunRequest{Command: client.Argv("true"), Stdin: make([]byte, 3<<20)}).GetResult(); r.GetExitCode() != 0 {
		t.Errorf("input that nobody reads: %v", r)
	}
}

func TestD09TheEnvironmentIsMergedOrReplaced(t *testing.T) {
	t.Parallel()
	sb := open(t, worker, func(s *sandseav1.SandboxSpec) { s.Env = map[string]string{"FROM": "create", "BOX": "create"} })
	env := func(mode sandseav1.EnvMode) map[string]string {
		res := run(t, sb, &sandseav1.Command{Argv: []string{"/bin/env"}, Env: map[string]string{"FROM": "call"}, EnvMode: mode})
		out := map[string]string{}
		for line := range strings.Lines(string(res.GetStdout())) {
			k, v, _ := strings.Cut(strings.TrimSuffix(line, "\n"), "=")
			out[k] = v
		}
		return out
	}
	got := env(sandseav1.EnvMode_ENV_MODE_MERGE)
	if got["FROM"] != "call" || got["BOX"] != "create" || got["LAYER"] != "image" || got["PATH"] == "" {
		t.Errorf("merged: %v", got)
	}
	if got := env(sandseav1.EnvMode_ENV_MODE_REPLACE); len(got) != 1 || got["FROM"] != "call" {
		t.Errorf("replaced: %v", got)
	}
}

func TestD10TheUserIsANameOrNumbersWithItsHomeAndGroups(t *testing.T) {
	t.Parallel()
	sb := open(t, worker)
	const who = `echo "$(id -u):$(id -g) $(id -G | tr ' ' ,) $HOME $USER $LOGNAME"`
	for user, want := range map[string]string{
		"":          "1000:1000 1000,50 /home/alice alice alice\n",
		"root":      "0:0 0 /root root root\n",
		"1000":      "1000:1000 1000,50 /home/alice alice alice\n",
		"bob:staff": "1001:50 50 /nowhere bob bob\n",
		"4711:4712": "4711:4712 4712 /  \n",
	} {
		if got := string(run(t, sb, as(user, who)).GetStdout()); got != want {
			t.Errorf("%q: %q, want %q", user, got, want)
		}
	}
}

func TestD11TheWorkingDirectoryBeginsAtTheImages(t *testing.T) {
	t.Parallel()
	sb := open(t, worker)
	if r := run(t, sb, as("root", "mkdir -p /srv/a/b")).GetResult(); r.GetExitCode() != 0 {
		t.Fatal(r)
	}
	for cwd, want := range map[string]string{"": "/srv\n", "a/b": "/srv/a/b\n", "/tmp": "/tmp\n", "../tmp": "/tmp\n"} {
		cmd := client.Argv("pwd")
		cmd.Cwd = cwd
		if got := string(run(t, sb, cmd).GetStdout()); got != want {
			t.Errorf("%q: %q, want %q", cwd, got, want)
		}
	}
}

func TestD12MergedErrorsComeInTheOrderOfTheirWriting(t *testing.T) {
	t.Parallel()
	cmd := client.Shell("for i in $(seq 200); do echo a; echo b >&2; echo c; done")
	cmd.MergeStderr = true
	res := run(t, open(t), cmd)
	if got, want := string(res.GetStdout()), strings.Repeat("a\nb\nc\n", 200); got != want || len(res.GetStderr()) > 0 ||
		res.GetResult().GetStderrBytes() != 0 {
		t.Errorf("out of order: %d and %d bytes", len(got), len(res.GetStderr()))
	}
}

func TestD13WhatOverflowsIsThePolicyOfTheCall(t *testing.T) {
	t.Parallel()
	sb := open(t)
	// Numbered lines of 8 bytes on one stream, a few on the other.
	const total, limit, line = 80_000, 8_000, 8
	cmd := client.Shell("seq 1000000 1009999; echo why >&2; echo done >/tmp/after")
	want := func(from, to int) (b []byte) {
		for n := from / line; n < to/line; n++ {
			b = fmt.Appendf(b, "%d\n", 1_000_000+n)
		}
		return b
	}
	for policy, keep := range map[sandseav1.Overflow][2]int{
		sandseav1.Overflow_OVERFLOW_UNSPECIFIED: {limit / 2, limit / 2},
		sandseav1.Overflow_OVERFLOW_HEAD_TAIL:   {limit / 2, limit / 2},
		sandseav1.Overflow_OVERFLOW_TAIL:        {0, limit},
		sandseav1.Overflow_OVERFLOW_HEAD:        {limit, 0},
		sandseav1.Overflow_OVERFLOW_FAIL:        {limit, 0},
	} {
		cmd.Overflow = policy
		sh(t, sb, "rm -f /tmp/after")
		res := runRequest(t, sb, &sandseav1.RunRequest{Command: cmd, MaxOutputBytes: limit})
		r := res.GetResult()
		if !bytes.Equal(res.GetStdout(), slices.Concat(want(0, keep[0]), want(total-keep[1], total))) ||
			res.GetStdoutGapBytes() != total-limit || res.GetStdoutGapAt() != int64(keep[0]) {
			t.Errorf("%s: %d bytes, %d missing at %d", policy, len(res.GetStdout()), res.GetStdoutGapBytes(), res.GetStdoutGapAt())
		}
		if string(res.GetStderr()) != "why\n" || res.GetStderrGapBytes() != 0 {
			t.Errorf("%s: the other stream is %q", policy, res.GetStderr())
		}
		if !r.GetTruncated() || r.GetStdoutBytes() != total || r.GetStderrBytes() != 4 || r.GetExitCode() != 0 ||
			r.GetOutputExceeded() != (policy == sandseav1.Overflow_OVERFLOW_FAIL) {
			t.Errorf("%s: %v", policy, r)
		}
		sh(t, sb, "test -e /tmp/after") // it ran on
	}
	r := runRequest(t, sb, &sandseav1.RunRequest{Command: cmd, MaxOutputBytes: total}).GetResult()
	if r.GetTruncated() || r.GetOutputExceeded() {
		t.Errorf("at the limit: %v", r)
	}
	_, err := sb.Run(within(t, 10*time.Second), &sandseav1.Command{Argv: []string{"true"}, Overflow: 99})
	fault(t, "a policy that nobody knows", err, errdefs.Invalid)
}

// TestD13TheRecordOfAStartIsCutByTheSamePolicy: beyond the sandbox's output limit.
// What earlier commands wrote makes room for what later ones write.
func TestD13OutputIsWholeHoweverMuchCameBefore(t *testing.T) {
	t.Parallel()
	sb := open(t, func(s *sandseav1.SandboxSpec) { s.Limits.OutputBytes = 16 << 20 })
	for i := range 24 {
		size := int64(4+i%2) << 20
		res := runRequest(t, sb, &sandseav1.RunRequest{Command: client.Shell(fmt.Sprintf("head -c %d /dev/zero", size))})
		if r := res.GetResult(); int64(len(res.GetStdout())) != size || r.GetTruncated() || r.GetStdoutBytes() != size {
			t.Errorf("command %d: %d bytes of %d, %v", i, len(res.GetStdout()), size, r)
		}
	}
}

func TestD13TheRecordOfAStartIsCutByTheSamePolicy(t *testing.T) {
	t.Parallel()
	const total, budget, slack = 32 << 20, 8 << 20, 6 << 20
	for policy, ends := range map[sandseav1.Overflow][2]bool{
		sandseav1.Overflow_OVERFLOW_HEAD_TAIL: {true, true},
		sandseav1.Overflow_OVERFLOW_TAIL:      {false, true},
		sandseav1.Overflow_OVERFLOW_HEAD:      {true, false},
		sandseav1.Overflow_OVERFLOW_FAIL:      {true, false},
	} {
		sb := open(t, func(s *sandseav1.SandboxSpec) { s.Limits.OutputBytes = budget })
		cmd := client.Shell("seq 100000000000000 100000002097151") // 32 MiB in lines of 16 bytes
		cmd.Overflow = policy
		n := start(t, sb, &sandseav1.StartRequest{Command: cmd})
		head := make([]byte, 0, 16)
		var last []byte
		var kept, missing, next int64
		var end *sandseav1.Process
		for e, err := range sb.Attach(within(t, 120*time.Second), &sandseav1.AttachRequest{Number: n}) {
			if err != nil {
				t.Fatal(err)
			}
			if d := e.GetData(); d != nil {
				if d.GetOffset() != next {
					t.Fatalf("%s: a piece at %d, want %d", policy, d.GetOffset(), next)
				}
				kept, next = kept+int64(len(d.GetData())), next+int64(len(d.GetData()))
				if d.GetOffset() == 0 {
					head = append(head, d.GetData()[:16]...)
				}
				last = append(last[:0], d.GetData()...)
			}
			missing += e.GetGap().GetBytes()
			next += e.GetGap().GetBytes()
			end = e.GetExited()
		}
		// A reader that keeps up sees everything; the record, read again, is what the policy leaves.
		if r := end.GetResult(); next != total || r.GetStdoutBytes() != total || !r.GetTruncated() ||
			r.GetOutputExceeded() != (policy == sandseav1.Overflow_OVERFLOW_FAIL) || r.GetExitCode() != 0 {
			t.Errorf("%s: %d bytes told of, %v", policy, next, r)
		}
		again := attach(t, sb, &sandseav1.AttachRequest{Number: n})
		data := again.data[stdout]
		if int64(len(data))+again.gaps[stdout] != total || len(data) > budget+slack {
			t.Errorf("%s: %d bytes kept and %d not", policy, len(data), again.gaps[stdout])
		}
		if first := bytes.HasPrefix(data, []byte("100000000000000\n")); first != ends[0] {
			t.Errorf("%s: its beginning is kept: %v", policy, first)
		}
		if tail := bytes.HasSuffix(data, []byte("100000002097151\n")); tail != ends[1] {
			t.Errorf("%s: its end is kept: %v", policy, tail)
		}
		stop(t, sb)
	}
}

func TestD14OutputIsBytes(t *testing.T) {
	t.Parallel()
	// Every byte value, and sequences that no text has.
	want := make([]byte, 0, 600)
	for i := range 256 {
		want = append(want, byte(i))
	}
	want = append(want, "\xff\xfe\xc3\x28\xe2\x82 \r\n\x00end"...)
	sb := open(t)
	res := runRequest(t, sb, &sandseav1.RunRequest{Command: client.Shell("tee /dev/stderr"), Stdin: want})
	if !bytes.Equal(res.GetStdout(), want) || !bytes.Equal(res.GetStderr(), want) {
		t.Errorf("%q and %q", res.GetStdout(), res.GetStderr())
	}
	if r := res.GetResult(); r.GetStdoutBytes() != int64(len(want)) || r.GetStderrBytes() != int64(len(want)) {
		t.Errorf("counted as %v", r)
	}
}

func TestD15ACommandOutlivesItsStream(t *testing.T) {
	t.Parallel()
	sb := open(t)
	req := &sandseav1.StartRequest{Command: client.Shell("for i in $(seq 40); do echo line $i; usleep 20000; done; exit 9"), Key: "k"}
	var number, seen int64
	for e, err := range sb.Start(within(t, 30*time.Second), req) {
		if err != nil {
			t.Fatal(err)
		}
		if p := e.GetStarted(); p != nil {
			number = p.GetNumber()
		}
		if seen += int64(len(e.GetData().GetData())); seen > 30 {
			break
		}
	}
	var want []byte
	for i := range 40 {
		want = fmt.Appendf(want, "line %d\n", i+1)
	}
	got := attach(t, sb, &sandseav1.AttachRequest{Number: number, StdoutOffset: seen})
	if !bytes.Equal(got.data[stdout], want[seen:]) || got.end.GetResult().GetExitCode() != 9 {
		t.Errorf("from %d on: %q, %v", seen, got.data[stdout], got.end)
	}
	for range 50 {
		sh(t, sb, "true")
	}
	if r := process(t, sb, number).GetResult(); r.GetExitCode() != 9 {
		t.Errorf("later: %v", r)
	}
	if got := attach(t, sb, &sandseav1.AttachRequest{Number: number}); !bytes.Equal(got.data[stdout], want) {
		t.Errorf("read again: %q", got.data[stdout])
	}
}

func TestD16ALiveProcessSpeaksOverItsStreams(t *testing.T) {
	t.Parallel()
	sb := open(t)
	ctx := within(t, 60*time.Second)
	n := start(t, sb, &sandseav1.StartRequest{
		Command: client.Shell(`while read -r x; do echo "out $x"; echo "err $x" >&2; done; echo end; exit 5`), Stdin: true,
	})
	var at int64
	for i := range 3 {
		next, err := sb.SendInput(ctx, n, at, fmt.Appendf(nil, "%d\n", i))
		if err != nil {
			t.Fatal(err)
		}
		// Polling does not wait.
		await(t, sb, n, "out 0\nout 1\nout 2\n"[:6*(i+1)])
		if p := process(t, sb, n); p.GetState() != sandseav1.ProcessState_PROCESS_STATE_RUNNING || !p.GetInputOpen() {
			t.Errorf("while it runs: %v", p)
		}
		at = next
	}
	if err := sb.CloseInput(ctx, n); err != nil {
		t.Fatal(err)
	}
	got := attach(t, sb, &sandseav1.AttachRequest{Number: n})
	if string(got.data[stdout]) != "out 0\nout 1\nout 2\nend\n" || string(got.data[stderr]) != "err 0\nerr 1\nerr 2\n" ||
		got.end.GetResult().GetExitCode() != 5 {
		t.Errorf("%q, %v", got.data, got.end)
	}
	for sig, want := range map[int]int32{15: 42, 9: 137} {
		n := start(t, sb, &sandseav1.StartRequest{Command: client.Shell("trap 'exit 42' TERM; echo ready; while :; do sleep 0.05; done")})
		await(t, sb, n, "ready\n")
		if err := sb.Signal(ctx, n, sig, false); err != nil {
			t.Fatal(err)
		}
		if end := attach(t, sb, &sandseav1.AttachRequest{Number: n}).end; end.GetResult().GetExitCode() != want {
			t.Errorf("signal %d: %v", sig, end)
		}
	}
}

func TestD17SixtyFourCommandsRunAtOnce(t *testing.T) {
	t.Parallel()
	sb := open(t)
	const many = 64
	// Each waits until all are there.
	var g errgroup.Group
	for i := range many {
		g.Go(func() error {
			cmd := client.Shell(fmt.Sprintf("touch /tmp/d17.%d; while [ $(ls /tmp/d17.* | wc -l) -lt %d ]; do sleep 0.2; done; echo %d", i, many, i))
			cmd.TimeoutMs = 100_000
			res, err := sb.Run(within(t, 110*time.Second), cmd)
			if err == nil && string(res.GetStdout()) != fmt.Sprintln(i) {
				err = fmt.Errorf("command %d: %q, %v", i, res.GetStdout(), res.GetResult())
			}
			return err
		})
	}
	if err := g.Wait(); err != nil {
		t.Error(err)
	}
}

func TestD19StatusAnswersAtOnce(t *testing.T) {
	sb := open(t)
	ctx := within(t, 60*time.Second)
	c := serve(t).Client
	for name, ask := range map[string]func() error{
		"is it alive":      func() error { _, err := sb.Info(ctx); return err },
		"what does it run": func() error { _, err := sb.Processes(ctx); return err },
		"what is there": func() error {
			for range c.List(ctx, &sandseav1.ListSandboxesRequest{}) {
				break
			}
			return nil
		},
	} {
		var took []time.Duration
		for range 41 {
			began := time.Now()
			if err := ask(); err != nil {
				t.Fatal(err)
			}
			took = append(took, time.Since(began))
		}
		slices.Sort(took)
		if middle := took[len(took)/2]; middle > 150*time.Millisecond {
			t.Errorf("%s: %s, the slowest %s", name, middle, took[len(took)-1])
		}
	}
}

func TestD20ANULIsRefusedByTheNameOfItsField(t *testing.T) {
	t.Parallel()
	sb := open(t)
	ctx := within(t, 30*time.Second)
	for name, tt := range map[string]struct {
		cmd   *sandseav1.Command
		field string
	}{
		"argv":     {client.Argv("echo", "a\x00b"), "command.argv"},
		"variable": {&sandseav1.Command{Argv: []string{"true"}, Env: map[string]string{"A": "\x00"}}, "command.env"},
		"its name": {&sandseav1.Command{Argv: []string{"true"}, Env: map[string]string{"A\x00": "x"}}, "command.env"},
		"cwd":      {&sandseav1.Command{Argv: []string{"true"}, Cwd: "/\x00"}, "command.cwd"},
		"user":     {&sandseav1.Command{Argv: []string{"true"}, User: "a\x00"}, "command.user"},
	} {
		_, err := sb.Run(ctx, tt.cmd)
		if e := fault(t, name, err, errdefs.Invalid); e.Field != tt.field || e.Hint == "" {
			t.Errorf("%s: field %q, %v", name, e.Field, e)
		}
	}
	_, err := sb.Stat(ctx, &sandseav1.StatFileRequest{Path: "/tmp/\x00"})
	if e := fault(t, "path", err, errdefs.Invalid); e.Field != "path" {
		t.Errorf("path: field %q", e.Field)
	}
	_, err = serve(t).Client.Create(ctx, spec(func(s *sandseav1.SandboxSpec) { s.Env = map[string]string{"A": "\x00"} }), "")
	if e := fault(t, "create", err, errdefs.Invalid); e.Field != "env" {
		t.Errorf("create: field %q", e.Field)
	}
}
