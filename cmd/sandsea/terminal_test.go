package main

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"os/exec"
	"strings"
	"sync"
	"sync/atomic"
	"syscall"
	"testing"
	"time"

	"github.com/charmbracelet/x/vt"
	"github.com/google/go-cmp/cmp"
	"golang.org/x/sys/unix"

	"github.com/sandsea/sandsea/internal/linux/tty"
	"github.com/sandsea/sandsea/internal/testkit/testserver"
	"github.com/sandsea/sandsea/internal/testkit/wait"
)

// terminal is a program on a terminal of its own, with a screen that shows what a person would see.
type terminal struct {
	t    *testing.T
	pty  *os.File // the person's end
	tty  *os.File // the program's end, open as long as it runs
	cmd  *exec.Cmd
	mu   sync.Mutex
	seen bytes.Buffer // guarded by mu
	// screen answers what a terminal is asked, as real ones do.
	screen *vt.SafeEmulator
	// The terminal's modes before the program ran and after it.
	before, after unix.Termios
	done          chan struct{}
}

// onTerminal starts sandsea on a terminal of so many columns.
func onTerminal(t *testing.T, columns int, env []string, args ...string) *terminal {
	t.Helper()
	return programOnTerminal(t, columns, env, "sandsea", args...)
}

// programOnTerminal is onTerminal for any program.
func programOnTerminal(t *testing.T, columns int, env []string, name string, args ...string) *terminal {
	t.Helper()
	pty, err := tty.Open()
	if err != nil {
		t.Skipf("no terminals here: %v", err)
	}
	peer, err := tty.Peer(pty)
	if err != nil {
		t.Fatal(err)
	}
	x := &terminal{t: t, pty: pty, tty: peer, done: make(chan struct{}), screen: vt.NewSafeEmulator(columns, rows)}
	x.size(columns)
	x.before = x.modes()
	x.cmd = exec.Command(name, args...)
	x.cmd.Env = surroundings(t, env)
	x.cmd.Stdin, x.cmd.Stdout, x.cmd.Stderr = peer, peer, peer
	x.cmd.SysProcAttr = &syscall.SysProcAttr{Setsid: true, Setctty: true}
	if err := x.cmd.Start(); err != nil {
		t.Fatal(err)
	}
	go x.read()
	go func() { _, _ = io.Copy(pty, x.screen) }() // until the screen is closed
	t.Cleanup(func() {
		_ = x.cmd.Process.Kill()
		_ = x.cmd.Wait()
		peer.Close()
		<-x.done
		_ = x.screen.Close()
		pty.Close()
	})
	return x
}

// rows of every terminal here.
const rows = 50

// size makes the terminal so wide.
func (x *terminal) size(columns int) {
	x.t.Helper()
	if err := tty.SetSize(x.pty, tty.Size{Columns: uint16(columns), Rows: rows}); err != nil {
		x.t.Fatal(err)
	}
	x.screen.Resize(columns, rows)
}

// modes of the terminal: raw or not, echo, signals.
func (x *terminal) modes() unix.Termios {
	x.t.Helper()
	m, err := unix.IoctlGetTermios(int(x.tty.Fd()), unix.TCGETS)
	if err != nil {
		x.t.Fatal(err)
	}
	return *m
}

// wasGivenBack wants the terminal as it was before the program ran, with its own screen and a cursor.
func (x *terminal) wasGivenBack() {
	x.t.Helper()
	if diff := cmp.Diff(x.before, x.after); diff != "" {
		x.t.Errorf("the terminal is not as it was (-before +after):\n%s", diff)
	}
	if x.screen.IsAltScreen() || x.screen.CursorHidden() {
		x.t.Errorf("other screen %v, cursor hidden %v", x.screen.IsAltScreen(), x.screen.CursorHidden())
	}
}

func (x *terminal) read() {
	defer close(x.done)
	buf := make([]byte, 4096)
	for {
		n, err := x.pty.Read(buf)
		x.mu.Lock()
		x.seen.Write(buf[:n])
		x.mu.Unlock()
		_, _ = x.screen.Write(buf[:n])
		if err != nil {
			return
		}
	}
}

func (x *terminal) text() string {
	x.mu.Lock()
	defer x.mu.Unlock()
	return x.seen.String()
}

func (x *terminal) until(text string) {
	x.t.Helper()
	if !wait.For(limit, func() bool { return strings.Contains(x.text(), text) }) {
		x.t.Fatalf("never saw %q in %q", text, x.text())
	}
}

// untilShown waits for what the screen shows, as lines without the blanks at their ends.
func (x *terminal) untilShown(text string) {
	x.t.Helper()
	if !wait.For(limit, func() bool { return strings.Contains(x.shown(), text) }) {
		x.t.Fatalf("never shown: %q on\n%s", text, x.shown())
	}
}

// settles waits until the program sleeps: it has asked what it wanted and waits for the answer.
func (x *terminal) settles() {
	x.t.Helper()
	proc := fmt.Sprintf("/proc/%d", x.cmd.Process.Pid)
	fd := proc + "/fd"
	wait.Until(x.t, limit, func() bool {
		if name, _ := os.ReadFile(proc + "/comm"); string(name) != "sandsea\n" {
			return false // it is not yet itself
		}
		list, _ := os.ReadDir(fd)
		for _, e := range list {
			if to, _ := os.Readlink(fd + "/" + e.Name()); strings.HasPrefix(to, "socket:") {
				return true
			}
		}
		return false
	}, "it asks the server")
}

func (x *terminal) shown() string {
	var b strings.Builder
	for line := range strings.Lines(x.screen.String()) {
		b.WriteString(strings.TrimRight(line, " \n") + "\n")
	}
	return strings.TrimRight(b.String(), "\n") + "\n"
}

func (x *terminal) types(keys string) {
	x.t.Helper()
	if _, err := io.WriteString(x.pty, keys); err != nil {
		x.t.Fatal(err)
	}
}

// exits waits for the end and gives the exit code and all that was shown.
func (x *terminal) exits() (int, string) {
	x.t.Helper()
	ended := make(chan error, 1)
	go func() { ended <- x.cmd.Wait() }()
	select {
	case err := <-ended:
		if _, ok := errors.AsType[*exec.ExitError](err); err != nil && !ok {
			x.t.Fatal(err)
		}
	case <-time.After(limit):
		x.t.Fatalf("does not end; shown:\n%s", x.shown())
	}
	x.after = x.modes()
	x.tty.Close()
	<-x.done
	return x.cmd.ProcessState.ExitCode(), strings.ReplaceAll(x.text(), "\r\n", "\n")
}

func TestStopAllAsksOnATerminal(t *testing.T) {
	s := testserver.Start(t, testserver.Config{})
	for range 2 {
		if r := (program{args: []string{"create"}, env: against(s)}).run(t); r.code != 0 {
			t.Fatal(r)
		}
	}
	living := func() int {
		n, _ := s.Edge.Count()
		return n
	}
	for _, tt := range []struct {
		answer string
		left   int
		text   string
	}{
		{"n\n", 2, "[y/N]"},
		{"\n", 2, "[y/N]"},
		{"y\n", 0, "stopped 2 in "},
	} {
		x := onTerminal(t, 80, against(s), "stop", "--all")
		x.until("Stop all 2? Their files are lost, their logs stay. [y/N] ")
		x.types(tt.answer)
		code, text := x.exits()
		if code != 0 || living() != tt.left || !strings.Contains(text, tt.text) {
			t.Errorf("answer %q: exit %d, %d left, %q", tt.answer, code, living(), text)
		}
	}
}

func TestLogsOnATerminalAreEscaped(t *testing.T) {
	s := testserver.Start(t, testserver.Config{})
	id := strings.TrimSpace((program{args: []string{"create"}, env: against(s)}).run(t).stdout)
	(program{args: []string{"exec", id, "--", "printf", `\033[31mred\033[0m \033]0;title\007 \342\200\256\n`}, env: against(s)}).run(t)
	code, text := onTerminal(t, 80, against(s), "logs", id).exits()
	if code != 0 || !strings.Contains(text, "\x1b[31mred\x1b[0m \\x1b]0;title\\x07 \\u202e\n") || !strings.HasPrefix(text, "── [1] printf ") {
		t.Errorf("exit %d, %q", code, text)
	}
	if _, text = onTerminal(t, 80, against(s), "logs", "--raw", id).exits(); !strings.Contains(text, "\x1b]0;title\x07") {
		t.Errorf("raw: %q", text)
	}
	if _, text = onTerminal(t, 80, append(against(s), "LC_ALL=C"), "logs", id).exits(); !strings.HasPrefix(text, "-- [1] printf ") {
		t.Errorf("C locale: %q", text)
	}
}

func TestColours(t *testing.T) {
	s := testserver.Start(t, testserver.Config{})
	(program{args: []string{"create"}, env: against(s)}).run(t)
	for name, tt := range map[string]struct {
		env  []string
		args []string
		want bool
	}{
		"a terminal has them":     {nil, []string{"ls"}, true},
		"NO_COLOR":                {[]string{"NO_COLOR=1"}, []string{"ls"}, false},
		"a dumb terminal":         {[]string{"TERM=dumb"}, []string{"ls"}, false},
		"no kind of terminal":     {[]string{"TERM="}, []string{"ls"}, false},
		"--color never":           {nil, []string{"ls", "--color", "never"}, false},
		"--color beats NO_COLOR":  {[]string{"NO_COLOR=1"}, []string{"ls", "--color", "always"}, true},
		"NO_COLOR beats CLICOLOR": {[]string{"NO_COLOR=1", "CLICOLOR_FORCE=1"}, []string{"ls"}, false},
		"CLICOLOR_FORCE":          {[]string{"TERM=dumb", "CLICOLOR_FORCE=1"}, []string{"ls"}, true},
	} {
		t.Run(name, func(t *testing.T) {
			code, text := onTerminal(t, 80, append(against(s), tt.env...), tt.args...).exits()
			if code != 0 || strings.Contains(text, "\x1b") != tt.want || !strings.Contains(text, "running") {
				t.Errorf("exit %d, %q", code, text)
			}
		})
	}
	if r := (program{args: []string{"ls"}, env: against(s)}).run(t); strings.Contains(r.stdout+r.stderr, "\x1b") {
		t.Errorf("a pipe has colours: %q", r.stdout)
	}
}

func TestListsFitTheTerminal(t *testing.T) {
	s := testserver.Start(t, testserver.Config{Images: []string{"registry.example.org/team/project/image-with-a-long-name:2026-11-29"}})
	(program{args: []string{"create", "-l", "job=evaluation-of-the-third-run"}, env: against(s)}).run(t)
	for _, columns := range []int{40, 80, 120} {
		for _, args := range [][]string{{"ls"}, {"image", "ls"}, {"node", "ls"}} {
			code, text := onTerminal(t, columns, append(against(s), "NO_COLOR=1"), args...).exits()
			if code != 0 {
				t.Errorf("exit %d, %q", code, text)
			}
			for line := range strings.Lines(text) {
				if n := len([]rune(strings.TrimSuffix(line, "\n"))); n > columns {
					t.Errorf("%v at %d columns: a line of %d letters: %q", args, columns, n, line)
				}
			}
		}
	}
}

func TestCtrlCGoesToTheCommandAndTwiceLeaves(t *testing.T) {
	s := testserver.Start(t, testserver.Config{})
	x := onTerminal(t, 80, against(s), "run", "--", "sh", "-c", `trap "echo caught" INT; echo ready; while :; do sleep 0.05; done`)
	x.until("ready")
	x.types("\x03")
	x.until("caught")
	wait.Until(t, limit, func() bool { // two of them within two seconds
		x.types("\x03")
		return strings.Contains(x.text(), "is left to its idle limit")
	}, "it leaves")
	code, text := x.exits()
	if code != 130 || !strings.Contains(text, "is left to its idle limit. End it: sandsea stop s") {
		t.Errorf("exit %d, %q", code, text)
	}
	wait.Until(t, limit, func() bool { return s.Running() == 0 }, "the command ends with its client")
}

func TestTerminateGoesToTheCommand(t *testing.T) {
	s := testserver.Start(t, testserver.Config{})
	x := onTerminal(t, 80, against(s), "run", "--", "sh", "-c", `trap "exit 9" TERM; echo ready; while :; do sleep 0.05; done`)
	x.until("ready")
	if err := x.cmd.Process.Signal(syscall.SIGTERM); err != nil {
		t.Fatal(err)
	}
	if code, text := x.exits(); code != 9 {
		t.Errorf("exit %d, %q", code, text)
	}
	if n, _ := s.Edge.Count(); n != 0 {
		t.Errorf("%d sandboxes are left", n)
	}
}

func TestInputThatWaitsIsGivenUpOnCtrlC(t *testing.T) {
	s := testserver.Start(t, testserver.Config{})
	id := strings.TrimSpace((program{args: []string{"create"}, env: against(s)}).run(t).stdout)
	var asked atomic.Int32
	s.Edge.Before(func(_ context.Context, call string) error {
		if call == "get" {
			asked.Add(1)
		}
		return nil
	})
	x := onTerminal(t, 80, against(s), "cp", "-", id+":/x")
	// The second time is that of the upload, after the look at the destination.
	wait.Until(t, limit, func() bool { return asked.Load() == 2 }, "it uploads")
	x.types("\x03")
	code, text := x.exits()
	if code != 130 || !strings.Contains(text, "sandsea: interrupted: part of the tree may be in the sandbox") {
		t.Errorf("exit %d, %q", code, text)
	}
}

func TestProgressOnATerminalLeavesACleanScreen(t *testing.T) {
	s := testserver.Start(t, testserver.Config{})
	code, text := onTerminal(t, 40, against(s), "image", "import", "debian:bookworm", "--name", "live").exits()
	erase := strings.LastIndex(text, "\x1b[J")
	if code != 0 || erase < 0 || !strings.HasPrefix(text[erase+3:], "live  204 MiB") {
		t.Errorf("exit %d, %q", code, text)
	}
	if _, text = onTerminal(t, 40, append(against(s), "TERM=dumb"), "image", "import", "debian:bookworm", "--name", "dumb").exits(); strings.Contains(text, "\x1b") {
		t.Errorf("a dumb terminal is moved about: %q", text)
	}
}
