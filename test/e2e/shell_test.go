package e2e

import (
	"errors"
	"fmt"
	"strings"
	"sync"
	"testing"
	"time"

	"google.golang.org/protobuf/proto"

	"github.com/sandsea/sandsea/api/errdefs"
	sandseav1 "github.com/sandsea/sandsea/api/sandsea/v1"
	"github.com/sandsea/sandsea/client"
	"github.com/sandsea/sandsea/internal/testkit/server"
	"github.com/sandsea/sandsea/internal/testkit/wait"
)

func openShell(t testing.TB, sb *client.Sandbox, req *sandseav1.OpenShellRequest) *client.ShellSession {
	t.Helper()
	sh, err := sb.OpenShell(within(t, 60*time.Second), req)
	if err != nil {
		t.Fatalf("open a shell: %v", err)
	}
	return sh
}

func inShell(t testing.TB, sh *client.ShellSession, req *sandseav1.RunInShellRequest) *sandseav1.RunInShellResponse {
	t.Helper()
	res, err := sh.RunRequest(within(t, 60*time.Second), req)
	if err != nil {
		t.Fatalf("run %q in a shell: %v", req.GetScript(), err)
	}
	return res
}

// shellStep is a command of a session and what it must give.
type shellStep struct {
	script string
	exit   int32
	stdout string
	stderr string // a part of it; empty: none; "-": any
	syntax bool
	lost   bool
}

func walkShell(t testing.TB, sh *client.ShellSession, steps ...shellStep) {
	t.Helper()
	for _, want := range steps {
		res := inShell(t, sh, &sandseav1.RunInShellRequest{Script: want.script})
		got := shellStep{
			script: want.script, exit: res.GetRun().GetResult().GetExitCode(), stdout: string(res.GetRun().GetStdout()),
			stderr: string(res.GetRun().GetStderr()), syntax: res.GetSyntaxError(), lost: res.GetStateLost(),
		}
		if want.stderr == "-" || want.stderr != "" && strings.Contains(got.stderr, want.stderr) {
			want.stderr = got.stderr
		}
		if got != want {
			t.Errorf("got %+v\nwant %+v", got, want)
		}
	}
}

// shellKinds are sandboxes with each kind of interpreter.
var shellKinds = map[string]struct {
	interpreter string
	open        func(testing.TB, ...func(*sandseav1.SandboxSpec)) *client.Sandbox
}{
	"bash":    {"", func(t testing.TB, _ ...func(*sandseav1.SandboxSpec)) *client.Sandbox { return onDebian(t) }},
	"dash":    {"dash", func(t testing.TB, _ ...func(*sandseav1.SandboxSpec)) *client.Sandbox { return onDebian(t) }},
	"busybox": {"", open},
}

func eachShell(t *testing.T, f func(t *testing.T, sb *client.Sandbox, sh *client.ShellSession, bash bool)) {
	t.Helper()
	for name, kind := range shellKinds {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			sb := kind.open(t)
			f(t, sb, openShell(t, sb, &sandseav1.OpenShellRequest{Interpreter: kind.interpreter}), name == "bash")
		})
	}
}

func TestAShellSessionKeepsItsState(t *testing.T) {
	t.Parallel()
	eachShell(t, func(t *testing.T, _ *client.Sandbox, sh *client.ShellSession, bash bool) {
		if kept := len(sh.Opened.GetNotKept()) == 0; kept != bash || sh.Opened.GetCwd() != "/" ||
			!strings.HasPrefix(sh.Opened.GetInterpreter(), "/") || sh.Opened.GetUser() != "root" || sh.Name == "" {
			t.Errorf("opened: %v", sh.Opened)
		}
		walkShell(
			t, sh,
			shellStep{script: "cd /tmp; a='x y'; export b=2; umask 077"},
			shellStep{script: `echo "$PWD $a"; sh -c 'echo $a$b'; umask`, stdout: "/tmp x y\n2\n0077\n"},
			shellStep{script: "cat", stdout: ""},
			shellStep{script: "exit 3", exit: 3},
			shellStep{script: "echo $?$a", stdout: "3x y\n"},
			shellStep{script: "set -e; false; echo no", exit: 1},
			shellStep{script: "false; echo no", exit: 1},
			shellStep{script: "set +e; false; echo yes", stdout: "yes\n"},
			shellStep{script: "kill -9 $$", exit: 137, lost: true},
			shellStep{script: "exec sh -c 'exit 7'", exit: 7, lost: true},
			shellStep{script: "cat <<EOF\n$a\nEOF", stdout: "x y\n"},
			shellStep{script: "cat <<EOF\nopen $a\n", stdout: "open x y\n", stderr: map[bool]string{true: "warning"}[bash]},
			shellStep{script: ""},
			shellStep{script: "# nothing"},
			shellStep{script: "echo a; fi", exit: 2, stderr: "fi", syntax: true},
			shellStep{script: "echo a\nfi", exit: 2, stderr: "fi", syntax: true},
			shellStep{script: "exec >/dev/null; echo no"},
			shellStep{script: "nosuch", exit: 127, stderr: "nosuch"},
			shellStep{script: "readonly status=1 exit_status=1 rc=1"},
			shellStep{script: "exit 9", exit: 9},
			shellStep{script: "echo $a", stdout: "x y\n"},
			shellStep{script: "mkdir gone; cd gone; rmdir ../gone"},
		)
		res := inShell(t, sh, &sandseav1.RunInShellRequest{Script: "echo no"})
		if f := res.GetRun().GetResult().GetStartFailure(); f.GetKind() != "cwd" || !strings.Contains(f.GetMessage(), "goes on in /") {
			t.Errorf("in a directory that is gone: got %v", res)
		}
		walkShell(t, sh, shellStep{script: "pwd; echo $a", stdout: "/\nx y\n"})
		res = inShell(t, sh, &sandseav1.RunInShellRequest{
			Script: "cat; echo e >&2", Stdin: []byte("in\n"), MergeStderr: true, Note: []byte("n"),
		})
		if got := string(res.GetRun().GetStdout()); got != "in\ne\n" || res.GetShell().GetCwd() != "/" || res.GetShell().GetName() != sh.Name {
			t.Errorf("got %q, %v", got, res.GetShell())
		}
	})
}

func TestBashSessionsKeepFunctionsAliasesAndOptions(t *testing.T) {
	t.Parallel()
	sb := onDebian(t)
	walkShell(
		t, openShell(t, sb, &sandseav1.OpenShellRequest{}),
		shellStep{script: "f() { local v=1; cat <<E\n$1\nE\n}; arr=(a 'b c'); declare -A m=([k]=v); export -f f"},
		shellStep{script: `f x; bash -c 'f y'; echo "${arr[1]}${m[k]}"`, stdout: "x\ny\nb cv\n"},
		shellStep{script: "shopt -s extglob expand_aliases; alias hi='echo hello'"},
		shellStep{script: "hi\ncase ab in @(ab|c)) hi; esac", stdout: "hello\nhello\n"},
		shellStep{script: "trap 'echo bye' EXIT; x=1", stdout: "bye\n"},
		shellStep{script: "echo $x", stdout: "1\n"},
		shellStep{script: "set -x; :", stderr: "+ :\n"},
		shellStep{script: "echo t", stdout: "t\n", stderr: "+ echo t\n"},
		shellStep{script: "set +x", stderr: "+ set +x\n"},
		shellStep{script: "ls /proc/self/fd", stdout: "0\n1\n2\n3\n"},
		shellStep{script: "pgrep -f 'no process is calle[d] so'", exit: 1},
		shellStep{script: "big=$(head -c 1200000 /dev/zero | tr '\\0' x)", lost: true},
		shellStep{script: "echo $x${#big}", stdout: "10\n"},
	)
}

// What works against a marker in a shell's output, or against a variable of its wrapper, is of no use here.
func TestForgeriesOfASessionsStatus(t *testing.T) {
	t.Parallel()
	sb := onDebian(t)
	sh := openShell(t, sb, &sandseav1.OpenShellRequest{})
	other := openShell(t, sb, &sandseav1.OpenShellRequest{})
	walkShell(
		t, sh,
		shellStep{script: "builtin() { command echo 0; return 0; }; false", exit: 1, lost: true},
		shellStep{script: "for n in set return declare echo printf pwd exit trap; do eval \"$n() { :; }\"; done; command false", exit: 1},
		shellStep{script: "builtin unset -f set return declare echo printf pwd exit trap; kept=1; echo ok", stdout: "ok\n"},
		// A neighbour that finds the word that parts the sections, and writes them all itself.
		shellStep{script: `read -r -d '' -a args </proc/$$/cmdline; mapfile -d '' -t args </proc/$$/cmdline
python3 - "$$" "${args[-1]}" <<'E'
import sys
pid, word = sys.argv[1:]
with open(f"/proc/{pid}/fd/251", "r+b") as f:
    f.write(f"{word} syntax\n".encode())
E
exec false`, exit: 1, lost: true},
		shellStep{script: "echo $kept", stdout: "1\n"},
	)
	walkShell(t, other, shellStep{script: "echo ${kept-none}", stdout: "none\n"})
	// Who has become another user has the descriptors, in a shell that cannot close them, and can do nothing with them.
	walkShell(
		t, openShell(t, sb, &sandseav1.OpenShellRequest{Interpreter: "sh"}),
		shellStep{script: `ls /proc/self/fd >/dev/null; secret=1; setpriv --reuid=65534 --regid=65534 --clear-groups sh -c '
for n in 250 251; do (cat </proc/self/fd/$n) 2>/dev/null && echo read; (echo x >/proc/self/fd/$n) 2>/dev/null && echo written; done; true'`},
		shellStep{script: "echo $secret", stdout: "1\n"},
	)
}

// awaitRunning waits for a command of a session and gives its number.
func awaitRunning(t testing.TB, sb *client.Sandbox, name string) (number int64) {
	t.Helper()
	wait.Until(t, 20*time.Second, func() bool {
		all, err := sb.Processes(within(t, 20*time.Second))
		if err != nil {
			t.Fatal(err)
		}
		last := all[len(all)-1]
		number = last.GetNumber()
		return last.GetShell() == name && last.GetState() == sandseav1.ProcessState_PROCESS_STATE_RUNNING
	}, "the command shows in the list")
	return number
}

func TestASessionOutlivesTimeOutAndInterrupt(t *testing.T) {
	t.Parallel()
	eachShell(t, func(t *testing.T, sb *client.Sandbox, sh *client.ShellSession, bash bool) {
		walkShell(t, sh, shellStep{script: "x=before"})
		res := inShell(t, sh, &sandseav1.RunInShellRequest{Script: "x=late; sleep 60", TimeoutMs: 200})
		if r := res.GetRun().GetResult(); !r.GetTimedOut() || r.GetExitCode() != 124 || !res.GetStateLost() {
			t.Errorf("time-out: got %v", res)
		}
		walkShell(t, sh, shellStep{script: "echo $x", stdout: "before\n"})

		done := make(chan *sandseav1.RunInShellResponse, 1)
		go func() {
			res, err := sh.Run(within(t, 60*time.Second), "x=during; echo begun; sleep 60; echo no")
			if err != nil {
				t.Errorf("run: %v", err)
			}
			done <- res
		}()
		awaitOutput(t, sb, awaitRunning(t, sb, sh.Name), "begun\n")
		res = server.Interrupt(t, sh, done)
		if r := res.GetRun().GetResult(); r.GetExitCode() != 130 || r.GetSignal() != 2 || string(res.GetRun().GetStdout()) != "begun\n" {
			t.Errorf("interrupt: got %v", res)
		}
		// Only bash runs its EXIT trap then; and that may have been cut off by one interrupt more.
		want := map[bool]string{false: "during\n", true: "before\n"}[res.GetStateLost()]
		if !res.GetStateLost() && !bash {
			t.Error("interrupt: the state was told")
		}
		walkShell(t, sh, shellStep{script: "echo $x", stdout: want})
		if err := sh.Interrupt(within(t, 20*time.Second)); !errors.Is(err, errdefs.NotFound) {
			t.Errorf("an interrupt of nothing: %v", err)
		}
	})
}

func TestTenSessionsSideBySide(t *testing.T) {
	t.Parallel()
	sb := onDebian(t)
	var all sync.WaitGroup
	for i := range 10 {
		all.Go(func() {
			sh, err := sb.OpenShell(within(t, 60*time.Second), &sandseav1.OpenShellRequest{Name: fmt.Sprintf("s%d", i)})
			if err != nil {
				t.Errorf("open: %v", err)
				return
			}
			dir := fmt.Sprintf("/tmp/d%d", i)
			walkShell(t, sh, shellStep{script: fmt.Sprintf("mkdir %s; cd %s; n=0; f() { echo f%d; }", dir, dir, i)})
			for range 5 {
				walkShell(t, sh, shellStep{script: "n=$((n+1))"})
			}
			walkShell(t, sh, shellStep{script: "pwd; echo $n; f; set -f", stdout: fmt.Sprintf("%s\n5\nf%d\n", dir, i)})
		})
	}
	all.Wait()
}

func TestCallsForOneSessionTakeTurns(t *testing.T) {
	t.Parallel()
	sh := openShell(t, open(t), &sandseav1.OpenShellRequest{})
	walkShell(t, sh, shellStep{script: "n=0"})
	var all sync.WaitGroup
	for range 20 {
		all.Go(func() { walkShell(t, sh, shellStep{script: "n=$((n+1))"}) })
	}
	all.Wait()
	walkShell(t, sh, shellStep{script: "echo $n", stdout: "20\n"})
}

// Activation as conda, venv and nvm do it: a login file that defines functions, which change the environment and the
// prompt.
func TestActivationStays(t *testing.T) {
	t.Parallel()
	sb := onDebian(t)
	files := map[string]string{
		"/etc/profile.d/conda.sh": `export CONDA_EXE=/opt/conda/bin/conda CONDA_SHLVL=0
__conda_activate() { export PATH="/opt/conda/envs/$1/bin:$PATH" CONDA_DEFAULT_ENV=$1 CONDA_SHLVL=1; PS1="($1) ${PS1:-}"; hash -r; }
conda() { case "$1" in activate) __conda_activate "${2:-base}" ;; *) "$CONDA_EXE" "$@" ;; esac; }
conda activate
echo "a login file that talks"
`,
		"/opt/conda/envs/testbed/bin/tool": "#!/bin/sh\necho testbed tool\n",
		"/opt/venv/bin/tool":               "#!/bin/sh\necho venv tool\n",
		"/opt/venv/bin/activate": `deactivate () {
    if [ -n "${_OLD_VIRTUAL_PATH:-}" ] ; then PATH="${_OLD_VIRTUAL_PATH:-}"; export PATH; unset _OLD_VIRTUAL_PATH; fi
    hash -r 2> /dev/null
    unset VIRTUAL_ENV
    if [ ! "${1:-}" = "nondestructive" ] ; then unset -f deactivate; fi
}
deactivate nondestructive
VIRTUAL_ENV=/opt/venv; export VIRTUAL_ENV
_OLD_VIRTUAL_PATH="$PATH"; PATH="$VIRTUAL_ENV/bin:$PATH"; export PATH
`,
		"/root/.bash_profile": `nvm_has() { type "${1-}" > /dev/null 2>&1; }
nvm() { local VERSION; VERSION="${2-}"; case "$1" in use) NVM_BIN="/opt/nvm/$VERSION"; export NVM_BIN; nvm_has nvm && echo "Now using $VERSION" ;; esac; }
`,
	}
	for path, text := range files {
		sh(t, sb, "mkdir -p $(dirname "+path+")")
		res, err := sb.RunRequest(within(t, 20*time.Second), &sandseav1.RunRequest{
			Command: client.Shell("cat >" + path + "; chmod 755 " + path), Stdin: []byte(text),
		})
		if err != nil || res.GetResult().GetExitCode() != 0 {
			t.Fatalf("write %s: %v %v", path, res, err)
		}
	}
	walkShell(
		t, openShell(t, sb, &sandseav1.OpenShellRequest{Login: true}),
		shellStep{script: "echo $CONDA_DEFAULT_ENV", stdout: "base\n"},
		shellStep{script: "conda activate testbed"},
		shellStep{script: "tool; bash -c tool; echo $CONDA_DEFAULT_ENV", stdout: "testbed tool\ntestbed tool\ntestbed\n"},
		shellStep{script: "source /opt/venv/bin/activate"},
		shellStep{script: "tool; echo $VIRTUAL_ENV", stdout: "venv tool\n/opt/venv\n"},
		shellStep{script: "deactivate"},
		shellStep{script: "tool; echo ${VIRTUAL_ENV-none}; type deactivate >/dev/null 2>&1 || echo none", stdout: "testbed tool\nnone\nnone\n"},
		shellStep{script: "nvm use 22", stdout: "Now using 22\n"},
		shellStep{script: "echo $NVM_BIN", stdout: "/opt/nvm/22\n"},
	)
	walkShell(
		t, openShell(t, sb, &sandseav1.OpenShellRequest{Env: map[string]string{"A": "b"}, Cwd: "tmp"}),
		shellStep{script: "echo ${CONDA_EXE-none} $A; pwd", stdout: "none b\n/tmp\n"},
	)
}

func TestWhatCannotBeASession(t *testing.T) {
	t.Parallel()
	s := serve(t)
	files, err := server.Busybox(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	var bare []server.File
	for _, f := range files {
		if f.Link == "" || f.Name == "bin/sleep" {
			bare = append(bare, f)
		}
	}
	if _, err := s.Import(within(t, 60*time.Second), "shell-less", bare, nil); err != nil {
		t.Fatal(err)
	}
	none := open(t, of(&sandseav1.Environment{Image: "shell-less"}))
	sb := open(t)
	for name, c := range map[string]struct {
		sb    *client.Sandbox
		req   *sandseav1.OpenShellRequest
		kind  error
		says  string
		field string
	}{
		"an image without a shell": {none, &sandseav1.OpenShellRequest{}, errdefs.FailedPrecondition, "neither bash nor sh", "interpreter"},
		"a shell that is missing":  {sb, &sandseav1.OpenShellRequest{Interpreter: "zsh"}, errdefs.FailedPrecondition, `"zsh" is not there`, "interpreter"},
		"no shell at all":          {sb, &sandseav1.OpenShellRequest{Interpreter: "/bin/cat"}, errdefs.FailedPrecondition, "/bin/cat ended with", "interpreter"},
		"a directory that is not":  {sb, &sandseav1.OpenShellRequest{Cwd: "/none"}, errdefs.FailedPrecondition, "/none", "cwd"},
		"a user who is not":        {sb, &sandseav1.OpenShellRequest{User: "nobodyhere"}, errdefs.FailedPrecondition, "nobodyhere", "user"},
		"a long name":              {sb, &sandseav1.OpenShellRequest{Name: strings.Repeat("n", 65)}, errdefs.Invalid, "", "name"},
		"a name with a line end":   {sb, &sandseav1.OpenShellRequest{Name: "a\nb"}, errdefs.Invalid, "", "name"},
	} {
		_, err := c.sb.OpenShell(within(t, 60*time.Second), c.req)
		e, ok := errors.AsType[*errdefs.Error](err)
		if !ok || !errors.Is(err, c.kind) || !strings.Contains(e.Msg, c.says) || e.Field != c.field || e.Hint == "" {
			t.Errorf("%s: got %+v", name, err)
		}
	}
	if _, err := sb.ShellSession("none").Run(within(t, 20*time.Second), "true"); !errors.Is(err, errdefs.NotFound) {
		t.Errorf("a session that is not there: %v", err)
	}
	sh := openShell(t, sb, &sandseav1.OpenShellRequest{Name: "one"})
	if _, err := sb.OpenShell(within(t, 20*time.Second), &sandseav1.OpenShellRequest{Name: "one"}); !errors.Is(err, errdefs.AlreadyExists) {
		t.Errorf("a name in use: %v", err)
	}
	for _, req := range []*sandseav1.RunInShellRequest{{Script: "a\x00b"}, {Script: strings.Repeat("#", 1<<20+1)}} {
		if _, err := sh.RunRequest(within(t, 20*time.Second), req); !errors.Is(err, errdefs.Invalid) {
			t.Errorf("a script of %d bytes: %v", len(req.GetScript()), err)
		}
	}
	long := strings.Repeat("# comment\n", 90_000) + "echo end"
	walkShell(t, sh, shellStep{script: long, stdout: "end\n"})
	for i := range 63 {
		openShell(t, sb, &sandseav1.OpenShellRequest{Name: fmt.Sprint(i)})
	}
	if _, err := sb.OpenShell(within(t, 20*time.Second), &sandseav1.OpenShellRequest{}); !errors.Is(err, errdefs.Exhausted) {
		t.Errorf("one too many: %v", err)
	}
	if err := sh.Close(within(t, 20*time.Second)); err != nil {
		t.Error(err)
	}
	openShell(t, sb, &sandseav1.OpenShellRequest{})
}

func TestASessionOfAnotherUser(t *testing.T) {
	t.Parallel()
	sb := open(t)
	sh := openShell(t, sb, &sandseav1.OpenShellRequest{User: "alice"})
	if sh.Opened.GetUser() != "alice" {
		t.Errorf("opened: %v", sh.Opened)
	}
	walkShell(
		t, sh,
		shellStep{script: "x=1; cd; id -u", stdout: "1000\n"},
		shellStep{script: "echo $x $HOME; pwd; id -u", stdout: "1 /home/alice\n/home/alice\n1000\n"},
	)
}

func TestCloseKillsWhatRuns(t *testing.T) {
	t.Parallel()
	sb := open(t)
	sh := openShell(t, sb, &sandseav1.OpenShellRequest{Name: "s"})
	var calls sync.WaitGroup
	calls.Go(func() {
		res, err := sh.Run(within(t, 60*time.Second), "echo on; sleep 60")
		if err != nil || res.GetRun().GetResult().GetSignalName() != "SIGKILL" || !res.GetStateLost() {
			t.Errorf("what ran: %v %v", res, err)
		}
	})
	awaitOutput(t, sb, awaitRunning(t, sb, sh.Name), "on\n")
	calls.Go(func() {
		if _, err := sh.Run(within(t, 60*time.Second), "echo waits"); !errors.Is(err, errdefs.NotFound) {
			t.Errorf("what waited: %v", err)
		}
	})
	for range 2 {
		if err := sh.Close(within(t, 20*time.Second)); err != nil {
			t.Fatal(err)
		}
	}
	calls.Wait()
	again := openShell(t, sb, &sandseav1.OpenShellRequest{Name: "s"})
	walkShell(t, again, shellStep{script: "echo new", stdout: "new\n"})
}

func TestKeysOfSessions(t *testing.T) {
	t.Parallel()
	sb := open(t)
	ctx := within(t, 60*time.Second)
	req := func() *sandseav1.OpenShellRequest { return &sandseav1.OpenShellRequest{Key: "k", Cwd: "/tmp"} }
	one, two := openShell(t, sb, req()), openShell(t, sb, req())
	if !proto.Equal(one.Opened, two.Opened) {
		t.Errorf("got %v and %v", one.Opened, two.Opened)
	}
	other := req()
	other.Cwd = "/"
	if _, err := sb.OpenShell(ctx, other); !errors.Is(err, errdefs.AlreadyExists) {
		t.Errorf("another request with the key: %v", err)
	}
	if _, err := sb.RunRequest(ctx, &sandseav1.RunRequest{Command: client.Argv("true"), Key: "k"}); !errors.Is(err, errdefs.AlreadyExists) {
		t.Errorf("another call with the key: %v", err)
	}
	add := func() *sandseav1.RunInShellRequest {
		return &sandseav1.RunInShellRequest{Script: "n=$((n+1)); echo $n; cd /srv", Key: "add"}
	}
	first, second := inShell(t, one, add()), inShell(t, one, add())
	if !second.GetRun().GetResult().GetReplayed() || first.GetRun().GetResult().GetReplayed() ||
		string(second.GetRun().GetStdout()) != "1\n" || second.GetShell().GetCwd() != "/srv" {
		t.Errorf("got %v", second)
	}
	walkShell(t, one, shellStep{script: "echo $n; cd /", stdout: "1\n"})
	if third := inShell(t, one, add()); third.GetShell().GetCwd() != "/srv" {
		t.Errorf("got %v", third)
	}
	if err := one.Close(ctx); err != nil {
		t.Fatal(err)
	}
	if res := inShell(t, one, add()); !res.GetRun().GetResult().GetReplayed() {
		t.Errorf("after the session: %v", res)
	}
	if _, err := sb.OpenShell(ctx, req()); !errors.Is(err, errdefs.FailedPrecondition) {
		t.Errorf("the key of a closed session: %v", err)
	}
}

func TestSessionsOutliveAKilledEdge(t *testing.T) {
	t.Parallel()
	serve(t)
	s := server.Start(t, server.Config{})
	if err := s.ImportBusybox(t.Context()); err != nil {
		t.Fatal(err)
	}
	sb := openOn(t, s)
	at := openShell(t, sb, &sandseav1.OpenShellRequest{Name: "s"})
	closed := openShell(t, sb, &sandseav1.OpenShellRequest{Name: "c"})
	if err := closed.Close(within(t, 20*time.Second)); err != nil {
		t.Fatal(err)
	}
	walkShell(t, at, shellStep{script: "x=1; cd /tmp; mkfifo go away"})
	run := func(key, script string) chan *sandseav1.RunInShellResponse {
		out := make(chan *sandseav1.RunInShellResponse, 1)
		go func() {
			var res *sandseav1.RunInShellResponse
			wait.For(60*time.Second, func() bool {
				var err error
				res, err = sb.ShellSession("s").RunRequest(within(t, 60*time.Second), &sandseav1.RunInShellRequest{
					Script: script, Key: key,
				})
				return err == nil
			})
			out <- res
		}()
		return out
	}
	kill := func() {
		if err := s.Kill("up"); err != nil {
			t.Fatal(err)
		}
		if err := s.Up(t.Context()); err != nil {
			t.Fatal(err)
		}
		sb = s.Client.Sandbox(sb.ID)
	}
	begun := func(script string) bool {
		all, err := sb.Processes(within(t, 20*time.Second))
		if err != nil {
			return false
		}
		last := all[len(all)-1]
		return last.GetState() == sandseav1.ProcessState_PROCESS_STATE_RUNNING && strings.HasSuffix(last.GetCommand().GetArgv()[2], script)
	}
	// Ends after the next edge is there.
	const one, two = "read -r x <go; echo read $x", "read -r y <away; echo $x; (exit 5)"
	first := run("one", one)
	wait.Until(t, 20*time.Second, func() bool { return begun(one) }, "the first command runs")
	kill()
	if res, err := sb.Run(within(t, 20*time.Second), client.Shell("echo 2 >/tmp/go")); err != nil || res.GetResult().GetExitCode() != 0 {
		t.Fatalf("let it go on: %v %v", res, err)
	}
	if res := <-first; string(res.GetRun().GetStdout()) != "read 2\n" || res.GetStateLost() {
		t.Errorf("got %v", res)
	}
	// Ends while there is no edge.
	second := run("two", two)
	wait.Until(t, 20*time.Second, func() bool { return begun(two) }, "the second command runs")
	if res, err := sb.Run(within(t, 20*time.Second), client.Shell("(sleep 0.5; echo 3 >/tmp/away) >/dev/null 2>&1 &")); err != nil {
		t.Fatalf("let it go on: %v %v", res, err)
	}
	kill()
	if res := <-second; string(res.GetRun().GetStdout()) != "2\n" || res.GetStateLost() || res.GetRun().GetResult().GetExitCode() != 5 {
		t.Errorf("got %v", res)
	}
	walkShell(t, sb.ShellSession("s"), shellStep{script: "echo $?$x$y; pwd", stdout: "523\n/tmp\n"})
	if _, err := sb.ShellSession("c").Run(within(t, 20*time.Second), ""); !errors.Is(err, errdefs.NotFound) {
		t.Errorf("the closed one: %v", err)
	}
}

// What a session costs over a plain bash -c.
func BenchmarkShellSession(b *testing.B) {
	sb := onDebian(b)
	ctx := b.Context()
	b.Run("plain", func(b *testing.B) {
		for b.Loop() {
			if _, err := sb.Run(ctx, client.Argv("bash", "-c", "true")); err != nil {
				b.Fatal(err)
			}
		}
	})
	sh := openShell(b, sb, &sandseav1.OpenShellRequest{})
	for name, script := range map[string]string{"session": "true", "session_lines": "true\ntrue"} {
		b.Run(name, func(b *testing.B) {
			for b.Loop() {
				if _, err := sh.Run(ctx, script); err != nil {
					b.Fatal(err)
				}
			}
		})
	}
}
