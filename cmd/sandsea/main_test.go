package main

import (
	"bytes"
	"cmp"
	"context"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"regexp"
	"slices"
	"strconv"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/rogpeppe/go-internal/testscript"

	"github.com/sandsea/sandsea/api/errdefs"
	"github.com/sandsea/sandsea/internal/testkit/output"
	"github.com/sandsea/sandsea/internal/testkit/testserver"
	"github.com/sandsea/sandsea/internal/testkit/wait"
)

// limit bounds every wait of a test.
const limit = 20 * time.Second

// TestMain lets the test binary be the program too: it is in PATH under the name sandsea, and as one with a mistake.
func TestMain(m *testing.M) {
	testscript.Main(m, map[string]func(){"sandsea": main, "sandsea-mistaken": mistaken})
}

type (
	serverKey struct{}
	holdKey   struct{}
)

// TestStories runs the scripts of testdata/script, each with a server of its own. Beside the commands of testscript:
//
//	code N CMD…       CMD must exit with N
//	capture NAME      puts the last standard output into the variable NAME
//	running N         waits until N commands run
//	end ID CAUSE      ends a sandbox
//	fail CALL KIND    lets the node's CALL fail from now on
//	hold CALL         lets the node's CALL hang from now on
//	held              waits until one hangs
//	works             takes fail and hold back
//	soon REGEXP CMD…  runs CMD, which tells only what it hears at once, until its standard output matches
//	says FILE REGEXP  waits until FILE, which a program in the background writes, matches
//	cutlinks          breaks every stream
//	reboot            lets the node forget its sandboxes
//	flow ID FILE      lets a file's events, JSON lines, happen in a sandbox's network
//	forget ID N       drops the oldest N events of a sandbox's flow log
func TestStories(t *testing.T) {
	testscript.Run(t, testscript.Params{
		Dir: "testdata/script", RequireExplicitExec: true, RequireUniqueNames: true,
		Setup: func(e *testscript.Env) error {
			s, err := testserver.New(testserver.Config{Images: []string{"py", "debian:bookworm"}})
			if err != nil {
				return err
			}
			e.Defer(s.Close)
			e.Values[serverKey{}], e.Values[holdKey{}] = s, new(hold)
			for k, v := range map[string]string{
				"SANDSEA_URL": s.URL, "SANDSEA_TOKEN": s.Token, "LC_ALL": "C.UTF-8", "TERM": "xterm", "HOME": e.WorkDir,
			} {
				e.Setenv(k, v)
			}
			return nil
		},
		Cmds: map[string]func(*testscript.TestScript, bool, []string){
			"code": withCode, "capture": capture, "running": running, "end": end, "fail": failCall, "hold": holdCall, "held": held,
			"works": works, "says": says, "soon": soon, "flow": flow,
			"forget": func(ts *testscript.TestScript, _ bool, args []string) {
				n, err := strconv.Atoi(args[1])
				ts.Check(err)
				serverOf(ts).ForgetFlows(args[0], n)
			},
			"cutlinks": func(ts *testscript.TestScript, _ bool, _ []string) { serverOf(ts).CutLinks() },
			"reboot": func(ts *testscript.TestScript, _ bool, _ []string) {
				serverOf(ts).Edge.Reboot()
				ts.Check(serverOf(ts).Edge.Register(context.Background()))
			},
		},
	})
}

func serverOf(ts *testscript.TestScript) *testserver.Server {
	return ts.Value(serverKey{}).(*testserver.Server)
}

func withCode(ts *testscript.TestScript, _ bool, args []string) {
	want, err := strconv.Atoi(args[0])
	ts.Check(err)
	got := 0
	if err := ts.Exec(args[1], args[2:]...); err != nil {
		exit, ok := errors.AsType[*exec.ExitError](err)
		if !ok {
			ts.Fatalf("%v", err)
		}
		got = exit.ExitCode()
	}
	if got != want {
		ts.Fatalf("exit %d, want %d", got, want)
	}
}

func capture(ts *testscript.TestScript, _ bool, args []string) {
	ts.Setenv(args[0], strings.TrimSpace(ts.ReadFile("stdout")))
}

func running(ts *testscript.TestScript, _ bool, args []string) {
	want, err := strconv.Atoi(args[0])
	ts.Check(err)
	if !wait.For(limit, func() bool { return serverOf(ts).Running() == want }) {
		ts.Fatalf("%d commands run, want %d", serverOf(ts).Running(), want)
	}
}

func end(ts *testscript.TestScript, _ bool, args []string) {
	ts.Check(serverOf(ts).End(context.Background(), args[0], args[1]))
}

func failCall(ts *testscript.TestScript, _ bool, args []string) {
	serverOf(ts).Edge.Before(func(_ context.Context, call string) error {
		if call != args[0] {
			return nil
		}
		return errdefs.New(errdefs.Kind(args[1]), "", "made to fail").WithHint("Take it back")
	})
}

func holdCall(ts *testscript.TestScript, _ bool, args []string) {
	*ts.Value(holdKey{}).(*hold) = testserverHolds(serverOf(ts), args[0])
}

func held(ts *testscript.TestScript, _ bool, _ []string) {
	select {
	case <-ts.Value(holdKey{}).(*hold).asked:
	case <-time.After(limit):
		ts.Fatalf("no such call in %s", limit)
	}
}

// hold is a call of the node that hangs.
type hold struct {
	asked chan struct{} // gets something when one hangs
	open  chan struct{} // closed to let all go on
}

// testserverHolds lets the node's call hang from now on.
func testserverHolds(s *testserver.Server, call string) hold {
	h := hold{make(chan struct{}, 1), make(chan struct{})}
	s.Edge.Before(func(ctx context.Context, c string) error {
		if c != call {
			return nil
		}
		select {
		case h.asked <- struct{}{}:
		default:
		}
		select {
		case <-h.open:
			return nil
		case <-ctx.Done():
			return ctx.Err()
		}
	})
	return h
}

func works(ts *testscript.TestScript, _ bool, _ []string) {
	serverOf(ts).Edge.Before(nil)
	if h := ts.Value(holdKey{}).(*hold); h.open != nil {
		close(h.open)
		*h = hold{}
	}
}

func soon(ts *testscript.TestScript, _ bool, args []string) {
	re, err := regexp.Compile("(?m)" + args[0])
	ts.Check(err)
	if !wait.For(limit, func() bool {
		ts.Check(ts.Exec(args[1], args[2:]...))
		return re.MatchString(ts.ReadFile("stdout"))
	}) {
		ts.Fatalf("%q", ts.ReadFile("stdout"))
	}
}

func says(ts *testscript.TestScript, _ bool, args []string) {
	re, err := regexp.Compile("(?m)" + args[1])
	ts.Check(err)
	var text []byte
	if !wait.For(limit, func() bool {
		text, _ = os.ReadFile(ts.MkAbs(args[0])) // it may not be there yet
		return re.Match(text)
	}) {
		ts.Fatalf("%s: %q", args[0], text)
	}
}

// program is a run of sandsea as a process.
type program struct {
	args []string
	env  []string
	in   string
	path string              // of the program; empty: this test's own
	dir  string              // to run in; empty: the test's
	as   *syscall.Credential // who runs it
	by   []string            // a program that runs it
}

// ran is how it went.
type ran struct {
	stdout, stderr string
	code           int
}

func (p program) command() *exec.Cmd {
	argv := append(append(slices.Clone(p.by), cmp.Or(p.path, "sandsea")), p.args...)
	cmd := exec.Command(argv[0], argv[1:]...)
	cmd.Dir = p.dir
	if p.as != nil {
		cmd.SysProcAttr = &syscall.SysProcAttr{Credential: p.as}
		cmd.Dir = "/" // the test's may be closed to them
	}
	return cmd
}

func (p program) run(t *testing.T) ran {
	t.Helper()
	cmd := p.command()
	cmd.Env = surroundings(t, p.env)
	cmd.Stdin = strings.NewReader(p.in)
	var out, errs bytes.Buffer
	cmd.Stdout, cmd.Stderr = &out, &errs
	err := cmd.Run()
	if _, ok := errors.AsType[*exec.ExitError](err); err != nil && !ok {
		t.Fatal(err)
	}
	return ran{out.String(), errs.String(), cmd.ProcessState.ExitCode()}
}

// follower is a program that runs on while the test does other things.
type follower struct {
	t    *testing.T
	cmd  *exec.Cmd
	out  *output.Buffer
	errs *output.Buffer
}

// following starts a program that follows something of the server.
func following(t *testing.T, p program) *follower {
	t.Helper()
	f := &follower{t: t, cmd: exec.Command("sandsea", p.args...), out: &output.Buffer{}, errs: &output.Buffer{}}
	f.cmd.Env = surroundings(t, p.env)
	f.cmd.Stdout, f.cmd.Stderr = f.out, f.errs
	if err := f.cmd.Start(); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		_ = f.cmd.Process.Kill()
		_ = f.cmd.Wait()
	})
	return f
}

// interrupted ends it and gives what it printed.
func (f *follower) interrupted(code int) string {
	f.t.Helper()
	if err := f.cmd.Process.Signal(os.Interrupt); err != nil {
		f.t.Fatal(err)
	}
	_ = f.cmd.Wait()
	if got := f.cmd.ProcessState.ExitCode(); got != code {
		f.t.Errorf("exit %d, want %d: %s", got, code, f.errs)
	}
	return f.out.String()
}

// surroundings are the variables that a program gets: nothing of ours, and these.
func surroundings(t *testing.T, more []string) []string {
	t.Helper()
	return append([]string{"PATH=" + os.Getenv("PATH"), "LC_ALL=C.UTF-8", "TERM=xterm", "HOME=" + t.TempDir()}, more...)
}

// against names a server in the environment.
func against(s *testserver.Server) []string {
	return []string{"SANDSEA_URL=" + s.URL, "SANDSEA_TOKEN=" + s.Token}
}

// steady takes out of a text what differs from run to run.
func steady(text string, s *testserver.Server) string {
	if s != nil {
		text = strings.ReplaceAll(text, s.URL, "http://URL")
	}
	for _, r := range []struct{ from, to string }{
		{`r-[a-z2-7]{8}`, "r-00000000"},
		{`\bs[0-9a-hjkmnp-tv-z]{26}\b`, "s0123456789abcdefghjkmnpqrs"},
		{`\b(sandbox|stop|inspect|logs|of|sandboxes \() s[0-9a-hjkmnp-tv-z]{7}\b`, "$1 s0123456"},
		{`\b(ended|expired) \d+s ago`, "$1 2s ago"},
		{`(?m)^\d\d:\d\d\.\d .*\n`, ""},
	} {
		text = regexp.MustCompile(r.from).ReplaceAllString(text, r.to)
	}
	return text
}

func TestTheProgramStartsQuickly(t *testing.T) {
	began := time.Now()
	const n = 5
	for range n {
		if r := (program{args: []string{"--help"}}).run(t); r.code != 0 {
			t.Fatal(r)
		}
	}
	t.Logf("%s for each --help", fmt.Sprint(time.Since(began)/n))
}
