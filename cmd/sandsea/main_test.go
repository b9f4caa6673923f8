package main

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"regexp"
	"strconv"
	"strings"
	"testing"
	"time"

	"github.com/rogpeppe/go-internal/testscript"

	"github.com/sandsea/sandsea/api/errdefs"
	"github.com/sandsea/sandsea/internal/testkit/testserver"
	"github.com/sandsea/sandsea/internal/testkit/wait"
)

// limit bounds every wait of a test.
const limit = 10 * time.Second

// TestMain lets the test binary be the program too: it is in PATH under the name sandsea.
func TestMain(m *testing.M) {
	testscript.Main(m, map[string]func(){"sandsea": main})
}

type serverKey struct{}

// TestStories runs the scripts of testdata/script, each with a server of its own. Beside the commands of testscript:
//
//	code N CMD…       CMD must exit with N
//	capture NAME      puts the last standard output into the variable NAME
//	running N         waits until N commands run
//	end ID CAUSE      ends a sandbox
//	fail CALL KIND    lets the node's CALL fail from now on
//	hold CALL         lets the node's CALL hang from now on
//	works             takes fail and hold back
//	cutlinks          breaks every stream
//	reboot            lets the node forget its sandboxes
func TestStories(t *testing.T) {
	testscript.Run(t, testscript.Params{
		Dir: "testdata/script", RequireExplicitExec: true, RequireUniqueNames: true,
		Setup: func(e *testscript.Env) error {
			s, err := testserver.New(testserver.Config{Images: []string{"py", "debian:bookworm"}})
			if err != nil {
				return err
			}
			e.Defer(s.Close)
			e.Values[serverKey{}] = s
			for k, v := range map[string]string{
				"SANDSEA_URL": s.URL, "SANDSEA_TOKEN": s.Token, "LC_ALL": "C.UTF-8", "TERM": "xterm", "HOME": e.WorkDir,
			} {
				e.Setenv(k, v)
			}
			return nil
		},
		Cmds: map[string]func(*testscript.TestScript, bool, []string){
			"code": withCode, "capture": capture, "running": running, "end": end, "fail": failCall, "hold": holdCall, "works": works,
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
	serverOf(ts).Edge.Before(func(ctx context.Context, call string) error {
		if call != args[0] {
			return nil
		}
		<-ctx.Done()
		return ctx.Err()
	})
}

func works(ts *testscript.TestScript, _ bool, _ []string) { serverOf(ts).Edge.Before(nil) }

// program is a run of sandsea as a process.
type program struct {
	args []string
	env  []string
	in   string
}

// ran is how it went.
type ran struct {
	stdout, stderr string
	code           int
}

func (p program) run(t *testing.T) ran {
	t.Helper()
	cmd := exec.Command("sandsea", p.args...)
	cmd.Env = append([]string{"PATH=" + os.Getenv("PATH"), "LC_ALL=C.UTF-8", "TERM=xterm", "HOME=" + t.TempDir()}, p.env...)
	cmd.Stdin = strings.NewReader(p.in)
	var out, errs bytes.Buffer
	cmd.Stdout, cmd.Stderr = &out, &errs
	err := cmd.Run()
	if _, ok := errors.AsType[*exec.ExitError](err); err != nil && !ok {
		t.Fatal(err)
	}
	return ran{out.String(), errs.String(), cmd.ProcessState.ExitCode()}
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
