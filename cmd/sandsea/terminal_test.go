package main

import (
	"bytes"
	"errors"
	"io"
	"os"
	"os/exec"
	"strconv"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/sandsea/sandsea/internal/testkit/testserver"
	"github.com/sandsea/sandsea/internal/testkit/wait"
)

// terminal is a program on a terminal of its own.
type terminal struct {
	t    *testing.T
	pty  *os.File
	cmd  *exec.Cmd
	mu   sync.Mutex
	seen bytes.Buffer // guarded by mu
	done chan struct{}
}

// onTerminal starts sandsea on a terminal of so many columns.
func onTerminal(t *testing.T, columns int, env []string, args ...string) *terminal {
	t.Helper()
	pty, err := os.OpenFile("/dev/ptmx", os.O_RDWR, 0)
	if err != nil {
		t.Skipf("no terminals here: %v", err)
	}
	fd := int(pty.Fd())
	if err := unix.IoctlSetPointerInt(fd, unix.TIOCSPTLCK, 0); err != nil {
		t.Fatal(err)
	}
	n, err := unix.IoctlGetInt(fd, unix.TIOCGPTN)
	if err != nil {
		t.Fatal(err)
	}
	if err := unix.IoctlSetWinsize(fd, unix.TIOCSWINSZ, &unix.Winsize{Row: 24, Col: uint16(columns)}); err != nil {
		t.Fatal(err)
	}
	tty, err := os.OpenFile("/dev/pts/"+strconv.Itoa(n), os.O_RDWR|syscall.O_NOCTTY, 0)
	if err != nil {
		t.Fatal(err)
	}
	defer tty.Close()
	x := &terminal{t: t, pty: pty, done: make(chan struct{})}
	x.cmd = exec.Command("sandsea", args...)
	x.cmd.Env = append([]string{"PATH=" + os.Getenv("PATH"), "LC_ALL=C.UTF-8", "TERM=xterm", "HOME=" + t.TempDir()}, env...)
	x.cmd.Stdin, x.cmd.Stdout, x.cmd.Stderr = tty, tty, tty
	x.cmd.SysProcAttr = &syscall.SysProcAttr{Setsid: true, Setctty: true}
	if err := x.cmd.Start(); err != nil {
		t.Fatal(err)
	}
	go x.read()
	t.Cleanup(func() {
		_ = x.cmd.Process.Kill()
		_ = x.cmd.Wait()
		pty.Close()
		<-x.done
	})
	return x
}

func (x *terminal) read() {
	defer close(x.done)
	buf := make([]byte, 4096)
	for {
		n, err := x.pty.Read(buf)
		x.mu.Lock()
		x.seen.Write(buf[:n])
		x.mu.Unlock()
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

func (x *terminal) types(keys string) {
	x.t.Helper()
	if _, err := io.WriteString(x.pty, keys); err != nil {
		x.t.Fatal(err)
	}
}

// exits waits for the end and gives the exit code and all that was shown.
func (x *terminal) exits() (int, string) {
	x.t.Helper()
	err := x.cmd.Wait()
	if _, ok := errors.AsType[*exec.ExitError](err); err != nil && !ok {
		x.t.Fatal(err)
	}
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
	x.types("\x03")
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
	x := onTerminal(t, 80, against(s), "cp", "-", id+":/x")
	time.AfterFunc(300*time.Millisecond, func() { x.types("\x03") })
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
