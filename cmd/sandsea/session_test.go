package main

import (
	"fmt"
	"os"
	"regexp"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/sandsea/sandsea/internal/testkit/testserver"
	"github.com/sandsea/sandsea/internal/testkit/wait"
)

// living makes a sandbox and gives its id.
func living(t *testing.T, s *testserver.Server, flags ...string) string {
	t.Helper()
	r := program{args: append([]string{"create"}, flags...), env: against(s)}.run(t)
	if r.code != 0 {
		t.Fatal(r)
	}
	return strings.TrimSpace(r.stdout)
}

func TestASessionIsATerminal(t *testing.T) {
	s := testserver.Start(t, testserver.Config{})
	id := living(t, s)
	x := onTerminal(t, 100, append(against(s), "TERM=xterm-kitty"), "exec", "-it", id, "--", "sh", "-c",
		`trap 'stty size' WINCH; trap 'echo interrupted; go=1' INT; tty >/dev/null && echo "TERM $TERM, $(stty size)"
		while [ -z "$go" ]; do sleep 0.05; done; read line; echo "<$line>"; exit 7`)
	x.untilShown("TERM xterm-kitty, 50 100")
	x.size(60)
	x.untilShown("50 60")
	x.types("\x03")
	x.untilShown("interrupted")
	x.types("typed\r")
	if code, text := x.exits(); code != 7 || !strings.Contains(text, "<typed>\n") {
		t.Errorf("exit %d, %q", code, text)
	}
	x.wasGivenBack()
	wait.Until(t, limit, func() bool { return s.Running() == 0 }, "nothing runs on")
}

func TestShellIsTheImagesShell(t *testing.T) {
	s := testserver.Start(t, testserver.Config{})
	id := living(t, s)
	x := onTerminal(t, 80, against(s), "shell", "-e", "PATH=/opt/tool/bin:/usr/bin:/bin", id)
	x.types("echo shell $BASH_VERSION $PATH; exit 5\r")
	if code, text := x.exits(); code != 5 || !regexp.MustCompile(`shell \d\S* /opt/tool/bin:/usr/bin:/bin`).MatchString(text) {
		t.Errorf("exit %d, %q", code, text)
	}
	x.wasGivenBack()
}

func TestDetachAndComeBack(t *testing.T) {
	s := testserver.Start(t, testserver.Config{})
	id := living(t, s)
	x := onTerminal(t, 80, against(s), "exec", "-t", id, "--", "sh", "-c",
		`printf '\033[?1049h\033[?25lon the other screen'; while read line; do [ "$line" = bye ] && exit 4; echo "got $line"; done`)
	x.untilShown("on the other screen")
	x.types("one\r")
	x.untilShown("got one")
	x.types("a~.b\r") // not at the beginning of a line
	x.untilShown("got a~.b")
	x.types("~~x\r")
	x.untilShown("got ~x")
	x.types("~?")
	x.untilShown("~.  detach; the command goes on\n~~  a tilde\n~?  this list\n")
	x.types("~.")
	code, text := x.exits()
	back := fmt.Sprintf("sandsea: detached; process 1 goes on in %s. Come back: sandsea exec --attach 1 %[1]s\n", id[:8])
	if code != 0 || !strings.HasSuffix(text, back) {
		t.Errorf("exit %d, %q", code, text)
	}
	x.wasGivenBack()
	if s.Running() != 1 {
		t.Fatal("the command did not go on")
	}

	again := onTerminal(t, 80, against(s), "exec", "--attach", "1", id)
	again.untilShown("got ~x")
	again.types("two\r")
	again.untilShown("got two")
	again.types("bye\r")
	if code, text := again.exits(); code != 4 || strings.Contains(text, "\x1b[?1049h") {
		t.Errorf("exit %d, %q", code, text)
	}
	again.wasGivenBack()
}

// Every way in which a session can end gives the terminal back, and says what goes on.
func TestTheTerminalIsGivenBack(t *testing.T) {
	const command = `printf '\033[?1049h\033[?25l\033[?2004h\033[1;31m'; echo ready; exec sleep 1000`
	for name, tt := range map[string]struct {
		end  func(s *testserver.Server, x *terminal, id string)
		code int
		text string
		runs int
	}{
		"detached":                 {func(_ *testserver.Server, x *terminal, _ string) { x.types("~.") }, 0, "Come back: sandsea exec --attach 1 ", 1},
		"terminated":               {signalled(syscall.SIGTERM), 130, "interrupted: process 1 goes on in ", 1},
		"hung up":                  {signalled(syscall.SIGHUP), 129, "the terminal hung up; process 1 goes on in ", 1},
		"interrupted":              {func(_ *testserver.Server, x *terminal, _ string) { x.types("\x03") }, 130, "", 0},
		"a signal for the command": {signalled(os.Interrupt), 130, "", 0},
		"quit":                     {signalled(syscall.SIGQUIT), 2, "SIGQUIT", 1},
		"the sandbox ends": {func(s *testserver.Server, x *terminal, id string) {
			if err := s.End(x.t.Context(), id, "idle"); err != nil {
				x.t.Fatal(err)
			}
		}, 137, "ended: idle. See: sandsea inspect ", 0},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			s := testserver.Start(t, testserver.Config{})
			id := living(t, s)
			x := onTerminal(t, 80, against(s), "exec", "-it", id, "--", "sh", "-c", command)
			x.untilShown("ready")
			tt.end(s, x, id)
			code, text := x.exits()
			if code != tt.code || !strings.Contains(text, tt.text) {
				t.Errorf("exit %d, %.500q", code, text)
			}
			x.wasGivenBack()
			if n := s.Running(); n != tt.runs {
				t.Errorf("%d commands run, want %d", n, tt.runs)
			}
		})
	}
}

func signalled(sig os.Signal) func(*testserver.Server, *terminal, string) {
	return func(_ *testserver.Server, x *terminal, _ string) {
		if err := x.cmd.Process.Signal(sig); err != nil {
			x.t.Fatal(err)
		}
	}
}

func TestASessionOutlivesItsLinkAndItsClient(t *testing.T) {
	s := testserver.Start(t, testserver.Config{})
	id := living(t, s)
	x := onTerminal(t, 80, against(s), "exec", "-it", id, "--", "sh", "-c", `echo ready; while read line; do echo "got $line"; done`)
	x.untilShown("ready")
	s.CutLinks()
	x.untilShown("sandsea: link lost, back in ")
	x.types("one\r")
	x.untilShown("got one")
	if n := strings.Count(x.text(), "ready"); n != 1 {
		t.Errorf("%d times ready: the output is not taken up where it broke", n)
	}
	if err := x.cmd.Process.Kill(); err != nil {
		t.Fatal(err)
	}
	x.exits()
	if s.Running() != 1 {
		t.Fatal("the command went with its client")
	}
	again := onTerminal(t, 80, against(s), "exec", "--attach", "1", id)
	again.untilShown("got one")
	again.types("two\r")
	again.untilShown("got two")
	again.types("\x04")
	if code, text := again.exits(); code != 0 {
		t.Errorf("exit %d, %q", code, text)
	}
	again.wasGivenBack()
}

// What is typed here arrives however much another client types in between, the same number of keys too.
func TestTwoClientsTypeOnOneTerminal(t *testing.T) {
	s := testserver.Start(t, testserver.Config{})
	id := living(t, s)
	x := onTerminal(t, 80, against(s), "exec", "-it", id, "--", "sh", "-c", `echo ready; while read line; do echo "got $line"; done`)
	x.untilShown("ready")
	y := onTerminal(t, 80, against(s), "exec", "--attach", "1", id)
	y.untilShown("ready")
	for i, who := range []*terminal{x, y, x, y, y, x} {
		time.Sleep(askAfter + askAfter/2) // a person who sees what the other has typed
		line := fmt.Sprint("line", i, strings.Repeat("+", i%3*10))
		who.types(line + "\r")
		x.untilShown("got " + line + "\n")
		y.untilShown("got " + line + "\n")
	}
	x.types("\x04")
	for _, who := range []*terminal{x, y} {
		if code, text := who.exits(); code != 0 {
			t.Errorf("exit %d, %q", code, text)
		}
		who.wasGivenBack()
	}
}

func TestOnlyBytesThatArrivedCountAsTaken(t *testing.T) {
	for _, tt := range []struct {
		name         string
		offset, next int64
		sent         int
		again        bool
		want         int64
	}{
		{"all", 10, 15, 5, false, 5},
		{"some", 10, 12, 5, false, 2},
		{"another client's stand there", 10, 40, 5, false, 0},
		{"sent again, and another client's after them perhaps", 10, 40, 5, true, 5},
		{"none", 10, 10, 5, true, 0},
		{"a question", 10, 40, 0, false, 0},
		{"a server that went back", 10, 3, 5, false, 0},
	} {
		if got := taken(tt.offset, tt.next, tt.sent, tt.again); got != tt.want {
			t.Errorf("%s: %d, want %d", tt.name, got, tt.want)
		}
	}
}

func TestComingBackWithoutATerminal(t *testing.T) {
	s := testserver.Start(t, testserver.Config{})
	id := living(t, s)
	exec := func(args ...string) ran {
		t.Helper()
		return program{args: append([]string{"exec"}, args...), env: against(s)}.run(t)
	}
	if r := exec("--detach", id, "--", "sh", "-c", "echo out; echo err >&2; exit 3"); r.code != 0 || r.stdout != "1\n" {
		t.Fatal(r)
	}
	if r := exec("--attach", "1", id); r.code != 3 || r.stdout != "out\n" || r.stderr != "err\n" {
		t.Error(r)
	}
	if r := exec("--attach", "9", id); r.code != 125 || !strings.Contains(r.stderr, "process 9: none in sandbox") {
		t.Error(r)
	}
	if r := exec("--attach", "1", id, "--", "true"); r.code != 125 || !strings.Contains(r.stderr, "sandsea: exec: ") {
		t.Error(r)
	}
}

func TestOurKeysAreFoundAtTheBeginningOfALine(t *testing.T) {
	for _, tt := range []struct {
		typed, sent string
		do          act
		rest        string
	}{
		{"ls\r", "ls\r", actNone, ""},
		{"~.", "", actDetach, ""},
		{"ls\r~.rest", "ls\r", actDetach, "rest"},
		{"ls~.\r", "ls~.\r", actNone, ""},
		{"~~.\r", "~.\r", actNone, ""},
		{"~x", "~x", actNone, ""},
		{"~?", "", actHelp, ""},
		{"\n~~", "\n~", actNone, ""},
		{"~\r~.", "~\r", actDetach, ""},
	} {
		for name, cut := range map[string]bool{"whole": false, "byte by byte": true} {
			var e escapes
			var sent, rest []byte
			do := actNone
			pieces := []string{tt.typed}
			if cut {
				pieces = strings.Split(tt.typed, "")
			}
			for i, p := range pieces {
				var send []byte
				send, do, rest = e.next([]byte(p))
				sent = append(sent, send...)
				if do != actNone {
					rest = append(rest, strings.Join(pieces[i+1:], "")...)
					break
				}
			}
			if string(sent) != tt.sent || do != tt.do || string(rest) != tt.rest {
				t.Errorf("%q %s: sent %q, act %d, rest %q", tt.typed, name, sent, do, rest)
			}
		}
	}
}
