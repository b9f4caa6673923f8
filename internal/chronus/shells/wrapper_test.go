package shells

import (
	"bytes"
	"os"
	"os/exec"
	"strings"
	"syscall"
	"testing"

	"github.com/sandsea/sandsea/internal/linux/memfd"
	"github.com/sandsea/sandsea/internal/testkit/require"
)

const testToken = "0123456789abcdef"

// ended is how a command of a session ended, and what it left.
type ended struct {
	exit           int // 128 + signal
	stdout, stderr string
	dump           dump
	told           bool
}

// spawn runs a shell as sandsea-init does: with its program and the file for its state as descriptors.
func spawn(t testing.TB, argv, env []string, text []byte, before state) ended {
	t.Helper()
	in, err := memfd.Sealed("in", text)
	if err != nil {
		t.Fatal(err)
	}
	defer in.Close()
	out, err := memfd.Sized("out", 1<<20)
	if err != nil {
		t.Fatal(err)
	}
	defer out.Close()
	paths := make([]*os.File, 0, 2)
	for _, f := range []*os.File{in, out} {
		p, err := memfd.Path(f)
		if err != nil {
			t.Fatal(err)
		}
		defer p.Close()
		paths = append(paths, p)
	}
	const place = `exec 250<&3 251<&4 3<&- 4<&-;for n in 5 6 7 8 9 10 11 12;do eval "exec $n<&-";done;exec "$@"`
	cmd := exec.CommandContext(t.Context(), "bash", append([]string{"-c", place, "place"}, argv...)...)
	cmd.ExtraFiles, cmd.Env, cmd.Dir = paths, env, string(before.Cwd)
	var stdout, stderr bytes.Buffer
	cmd.Stdout, cmd.Stderr = &stdout, &stderr
	if err := cmd.Run(); cmd.ProcessState == nil {
		t.Fatal(err)
	}
	e := ended{exit: cmd.ProcessState.ExitCode(), stdout: stdout.String(), stderr: stderr.String()}
	if ws := cmd.ProcessState.Sys().(syscall.WaitStatus); ws.Signaled() {
		e.exit = 128 + int(ws.Signal())
	}
	raw := make([]byte, 1<<20)
	if _, err := out.ReadAt(raw, 0); err != nil {
		t.Fatal(err)
	}
	e.dump, e.told = parse(raw, testToken, before)
	return e
}

// interpreters are the shells of this machine.
var interpreters = map[string][]string{"bash": {"bash"}, "dash": {"dash"}, "busybox": {"busybox", "ash"}, "posix bash": {"bash", "--posix"}}

// session is a shell session without a sandbox.
type session struct {
	t    testing.TB
	argv []string
	kind string
	state
}

func openSession(t testing.TB, name string, env ...string) *session {
	t.Helper()
	argv := interpreters[name]
	require.Feature(t, "bin:"+argv[0])
	s := &session{t: t, argv: argv}
	env = append([]string{"PATH=" + os.Getenv("PATH"), "HOME=/", "PWD=/"}, env...)
	e := spawn(t, append(argv[:len(argv):len(argv)], "-c", ". "+stateIn, name), env, opening(argv[0], testToken), state{Cwd: []byte("/")})
	if !e.told {
		t.Fatalf("open %s: %+v", name, e)
	}
	s.kind, s.state = e.dump.kind, e.dump.state
	return s
}

// run runs a script in the session, and takes over the state that it left.
func (s *session) run(script string) ended {
	s.t.Helper()
	text := program(s.kind, s.state, script, testToken)
	e := spawn(s.t, append(s.argv[:len(s.argv):len(s.argv)], s.arguments("", "shell", script, testToken)[1:]...), []string{"PWD=" + string(s.Cwd)}, text, s.state)
	if e.told && !e.dump.syntax {
		s.state = e.dump.state
		s.Status = e.exit
	}
	return e
}

func eachShell(t *testing.T, names []string, f func(t *testing.T, s *session)) {
	t.Helper()
	for _, name := range names {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			f(t, openSession(t, name))
		})
	}
}

var (
	all  = []string{"bash", "posix bash", "dash", "busybox"}
	full = []string{"bash", "posix bash"}
)

// step is a command of a session and what it must give.
type step struct {
	script string
	exit   int
	stdout string
	stderr string // a part; "-" for anything
	lost   bool
	syntax bool
}

func walk(t *testing.T, s *session, steps []step) {
	t.Helper()
	for _, c := range steps {
		e := s.run(c.script)
		ok := e.exit == c.exit && e.stdout == c.stdout && e.told == !c.lost && e.dump.syntax == c.syntax
		switch c.stderr {
		case "-":
		case "":
			ok = ok && e.stderr == ""
		default:
			ok = ok && strings.Contains(e.stderr, c.stderr)
		}
		if !ok {
			t.Errorf("%q: got exit %d, stdout %q, stderr %q, told %v, syntax %v; want %+v",
				c.script, e.exit, e.stdout, e.stderr, e.told, e.dump.syntax, c)
		}
	}
}

// unsetExit is the status of a shell that ends since a variable is not set.
func unsetExit(s *session) int {
	if s.kind == kindBash {
		return 127
	}
	return 2
}

func TestASessionKeepsItsState(t *testing.T) {
	t.Parallel()
	eachShell(t, all, func(t *testing.T, s *session) {
		dir := t.TempDir()
		walk(t, s, []step{
			{script: "cd " + dir},
			{script: "pwd", stdout: dir + "\n"},
			{script: "cd /; cd - >/dev/null; pwd", stdout: dir + "\n"},
			{script: "a=1; b='it''s\n$HOME `x` \"q\" \\'; export c=3; readonly d=4"},
			{script: `echo "$a|$b|$c|$d"; sh -c 'echo "$a|$c"'`, stdout: "1|its\n$HOME `x` \"q\" \\|3|4\n|3\n"},
			{script: "unset a c; umask 027"},
			{script: "echo ${a-none} ${c-none}; umask", stdout: "none none\n0027\n"},
			{script: "set -f; set -u"},
			{script: "echo *", stdout: "*\n"},
			{script: "set +f; echo ${nosuch}; echo not", exit: unsetExit(s), stderr: "nosuch"},
		})
	})
}

func TestAFailureCostsACommandNeverTheSession(t *testing.T) {
	t.Parallel()
	eachShell(t, all, func(t *testing.T, s *session) {
		walk(t, s, []step{
			{script: "x=kept"},
			{script: "exit 3", exit: 3},
			{script: "echo $?", stdout: "3\n"},
			{script: "y=2; exit 4", exit: 4},
			{script: "echo $y", stdout: "2\n"},
			{script: ""},
			{script: "   \n\n"},
			{script: "# only words"},
			{script: "cat <<EOF\nhere $x\nEOF", stdout: "here kept\n"},
			{script: "cat <<EOF\nno end\n", stdout: "no end\n", stderr: "-"},
			{script: "z=lost; kill -9 $$", exit: 137, lost: true},
			{script: "z=lost; exec true", lost: true},
			{script: "echo ${z-none}", stdout: "none\n"},
			{script: "echo a; fi", exit: 2, stderr: "fi", syntax: true},
			{script: "echo a\necho b\nfi", exit: 2, stderr: "fi", syntax: true},
			{script: "fi\necho b", exit: 2, stderr: "fi", syntax: true},
			{script: "echo 'open", exit: 2, stderr: "-", syntax: true},
			{script: "if true; then", exit: 2, stderr: "-", syntax: true},
			{script: "exit 2", exit: 2},
			{script: "nosuchcommand", exit: 127, stderr: "nosuchcommand"},
			{script: "exec >/dev/null; echo gone"},
			{script: "exec 2>&- >&-; x=still"},
			{script: "set -e"},
			{script: "false; echo not", exit: 1},
			{script: "echo $x; case $- in *e*) echo on; esac; false; echo not", exit: 1, stdout: "still\non\n"},
			{script: "set +e"},
			{script: "false; echo $?", stdout: "1\n"},
			{script: "set -- a b c; echo $#", stdout: "3\n"},
			{script: "echo $#", stdout: "0\n"},
			{script: "trap 'echo bye' EXIT; w=1", stdout: "bye\n"},
			{script: "echo $w", stdout: "1\n"},
			{script: "true"},
			{script: "set -x"},
			{script: "echo traced", stdout: "traced\n", stderr: "+ echo traced\n"},
			{script: "set +x", stderr: "+ set +x\n"},
		})
	})
}

func TestErrorsNameTheLineOfTheScript(t *testing.T) {
	t.Parallel()
	eachShell(t, []string{"bash"}, func(t *testing.T, s *session) {
		walk(t, s, []step{
			{script: "f() { :; }\ng() {\n :\n}"},
			{script: "true\nnosuch", exit: 127, stderr: "shell: line 2: nosuch: command not found\n"},
			{script: "echo $LINENO\necho $LINENO", stdout: "1\n2\n"},
			{script: "true\ntrue\nfi", exit: 2, stderr: "shell: eval: line 3: syntax error", syntax: true},
			{script: "fi\ntrue", exit: 2, stderr: "shell: eval: line 1: syntax error", syntax: true},
		})
	})
}

// A shell quotes the whole line that it cannot parse; the session's state is none of it.
func TestASyntaxErrorDoesNotQuoteTheState(t *testing.T) {
	t.Parallel()
	eachShell(t, all, func(t *testing.T, s *session) {
		s.run("secret() { :; }; set -u; hidden=1; (exit 3)")
		for _, script := range []string{"if then fi", "echo )", "if then\nfi"} {
			e := s.run(script)
			if !e.dump.syntax || strings.Contains(e.stderr, "secret") || len(e.stderr) > 240 {
				t.Errorf("%q: syntax %v, stderr %q", script, e.dump.syntax, e.stderr)
			}
		}
	})
}

func TestBashKeepsAllThatItHas(t *testing.T) {
	t.Parallel()
	eachShell(t, full, func(t *testing.T, s *session) {
		walk(t, s, []step{
			{script: `arr=(1 "2 3" $'4\n5' '$(x)'); declare -A map=([k]=v ["a b"]="c)d" [q]='` + "`x`" + `'); declare -i n=3; declare -l low=ABC; declare -n ref=n`},
			{
				script: `echo "${#arr[@]} ${arr[1]} ${arr[3]} ${map["a b"]} ${map[q]}"; n=n+4; echo $n $ref; low=XY; echo $low`,
				stdout: "4 2 3 $(x) c)d `x`\n7 7\nxy\n",
			},
			{script: "f() { cat <<EOF\nin $1\n}\nEOF\n}\nexport -f f\ng() { local v=$1; [[ $v == @(a|b) ]] && echo yes; }"},
			{script: "f x; bash -c 'f y'; g a", stdout: "in x\n}\nin y\n}\nyes\n"},
			{script: "shopt -s extglob nullglob expand_aliases; alias hi='echo hello' ll='ls -l'"},
			{script: "hi", stdout: "hello\n"},
			{script: "case ab in @(ab|c)) echo matched; esac\nhi", stdout: "matched\nhello\n"},
			{script: "unalias hi; unset -f g; shopt -u extglob"},
			{script: "type hi g 2>/dev/null", exit: 1},
			{script: "shopt -s extglob\ncase ab in @(ab|c)) echo matched; esac\nshopt -u extglob", stdout: "matched\n"},
			{script: "case ab in @(ab|c)) echo matched; esac", exit: 2, stderr: "-", syntax: true},
			{script: "ls -l /proc/self/fd | wc -l", stdout: "5\n"},
			{script: "unset PATH"},
			{script: "echo ${PATH-none}", stdout: "none\n"},
		})
	})
}

func TestOptionsAndFunctionsThatMeddleWithTheWrapper(t *testing.T) {
	t.Parallel()
	eachShell(t, []string{"bash"}, func(t *testing.T, s *session) {
		walk(t, s, []step{
			{script: "set -Eeuo pipefail; set -f; IFS=,"},
			{script: "echo \"$IFS\"; x=1,2; set -- $x; echo $#", stdout: ",\n2\n"},
			{script: "set +Eeu +f; set +o pipefail; unset IFS"},
			{script: "shopt -s failglob nocasematch; set -o noclobber; set -o posix"},
			{script: "echo fine", stdout: "fine\n"},
			{script: "set +o posix; shopt -u failglob nocasematch; set +o noclobber"},
			{script: "for n in declare printf echo pwd umask set shopt alias shift trap return cd local unset exec; do eval \"$n() { :; }\"; done"},
			{script: "v=1"},
			{script: "builtin echo $v", stdout: "1\n"},
			{script: "builtin unset -f declare printf echo pwd umask set shopt alias shift trap return cd local unset exec"},
			{script: "eval() { echo no; }"},
			{script: "echo still; unset -f eval", stdout: "still\n"},
			{script: "shopt -s expand_aliases; alias builtin=false eval=false set=false trap=false .=false"},
			{script: "v=2"},
			{script: "echo $v; unalias -a", stdout: "2\n"},
			{script: "builtin() { echo no; }; (exit 5)", exit: 5, lost: true},
			{script: "trap 'echo f' ERR; false", exit: 1, stdout: "f\n"},
			{script: "type -t builtin", stdout: "builtin\n"},
			{script: "set -n", lost: true},
			{script: "set -t; echo $v", stdout: "2\n"},
			{script: "echo $v", stdout: "2\n"},
			{script: "readonly __sandsea=1 status=1 REPLY=1"},
			{script: "false", exit: 1},
			{script: "echo $?", stdout: "1\n"},
			{script: "exec 250<&- 251<&-", lost: true},
			{script: "exec 251>/dev/null"}, // bash keeps its own
			{script: "echo " + testToken + " end", stdout: testToken + " end\n"},
			{script: "f() { cat <<E\n" + testToken + " end\nE\n}", lost: true},
			{script: "big=$(head -c 1200000 /dev/zero | tr '\\0' x)", lost: true},
			{script: "echo $v ${#big}", stdout: "2 0\n"},
		})
	})
}

func TestVariablesOfFunctionsStayThere(t *testing.T) {
	t.Parallel()
	eachShell(t, full, func(t *testing.T, s *session) {
		walk(t, s, []step{
			{script: "x=global; f() { local x=inner IFS=,; g; }; g() { local y=2 z; new=1; exit 3; }"},
			{script: "f", exit: 3},
			{script: "echo $x ${y-none} $new; a=1,2; echo $a", stdout: "global none 1\n1,2\n"},
			{script: "h() { local IFS=,; kill -INT $$; sleep 1; }; h", exit: 130},
			{script: "a=1,2; set -- $a; echo $#", stdout: "1\n"},
		})
	})
}

func TestAnInterruptLeavesTheSession(t *testing.T) {
	t.Parallel()
	eachShell(t, all, func(t *testing.T, s *session) {
		s.run("x=1")
		if e := s.run("x=2; kill -INT $$; sleep 5; echo no"); e.exit != 130 || e.stdout != "" || e.told != (s.kind == kindBash) {
			t.Errorf("got %+v", e)
		}
		want := map[bool]string{true: "2\n", false: "1\n"}[s.kind == kindBash]
		walk(t, s, []step{{script: "echo $x", stdout: want}})
	})
}

// So nothing has to be remembered anew.
func TestACommandThatChangesNothingLeavesTheSameState(t *testing.T) {
	t.Parallel()
	eachShell(t, all, func(t *testing.T, s *session) {
		s.run("a=1; set -- x y; cd /tmp")
		before := s.state
		s.run("true; echo $RANDOM | cat; ls >/dev/null")
		if !before.equal(s.state) {
			t.Errorf("got %q\nwant %q", s.Variables, before.Variables)
		}
	})
}
