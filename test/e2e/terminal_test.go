package e2e

import (
	"bytes"
	"errors"
	"fmt"
	"regexp"
	"strconv"
	"strings"
	"testing"
	"time"

	"golang.org/x/sync/errgroup"

	"github.com/sandsea/sandsea/api/errdefs"
	sandseav1 "github.com/sandsea/sandsea/api/sandsea/v1"
	"github.com/sandsea/sandsea/client"
	"github.com/sandsea/sandsea/internal/testkit/server"
	"github.com/sandsea/sandsea/internal/testkit/wait"
)

// console is a command on a terminal and whoever sits before it.
type console struct {
	t      testing.TB
	sb     *client.Sandbox
	number int64
	sent   int64
	read   int64
}

func newConsole(t testing.TB, sb *client.Sandbox, cmd *sandseav1.Command) *console {
	t.Helper()
	req := &sandseav1.StartRequest{Command: cmd, Detached: true, Terminal: client.Terminal(91, 17)}
	return &console{t: t, sb: sb, number: startRequest(t, sb, req)}
}

func (c *console) send(text string) {
	c.t.Helper()
	next, err := c.sb.SendInput(within(c.t, 30*time.Second), c.number, c.sent, []byte(text))
	if err != nil || next != c.sent+int64(len(text)) {
		c.t.Fatalf("send %q: %d, %v", text, next, err)
	}
	c.sent = next
}

func (c *console) resize(columns, rows uint32) {
	c.t.Helper()
	if err := c.sb.Resize(within(c.t, 30*time.Second), c.number, client.Terminal(columns, rows)); err != nil {
		c.t.Fatal(err)
	}
}

// expect reads on until the text comes, and gives what came before.
func (c *console) expect(text string) string {
	c.t.Helper()
	var got []byte
	at := -1
	wait.For(20*time.Second, func() bool {
		out, _ := attach(c.t, c.sb, &sandseav1.AttachRequest{Number: c.number, StdoutOffset: c.read, NoFollow: true})
		got = out[sandseav1.Stream_STREAM_STDOUT]
		at = bytes.Index(got, []byte(text))
		return at >= 0
	})
	if at < 0 {
		c.t.Fatalf("%q does not come, but %q", text, got)
	}
	c.read += int64(at + len(text))
	return string(got[:at])
}

// end reads on to the command's end.
func (c *console) end() (string, *sandseav1.Process) {
	c.t.Helper()
	out, p := attach(c.t, c.sb, &sandseav1.AttachRequest{Number: c.number, StdoutOffset: c.read})
	return string(out[sandseav1.Stream_STREAM_STDOUT]), p
}

func TestACommandOnATerminal(t *testing.T) {
	t.Parallel()
	sb := open(t)
	for _, user := range []struct{ name, owner string }{{"root", "0"}, {"alice", "1000"}} {
		cmd := client.Shell(`tty; stty size; echo $TERM; test -t 0 && test -t 1 && test -t 2 && echo all three
			stat -c %u:%g:%a $(tty); echo direct > /dev/tty; read line; echo "<$line>"; exit 7`)
		cmd.User = user.name
		c := newConsole(t, sb, cmd)
		first := c.expect("direct\r\n")
		want := fmt.Sprintf("17 91\r\nxterm-256color\r\nall three\r\n%s:5:620\r\n", user.owner)
		if name, rest, _ := strings.Cut(first, "\r\n"); !strings.HasPrefix(name, "/dev/pts/") || rest != want {
			t.Errorf("%s: %q, want a terminal and %q", user.name, first, want)
		}
		p := process(t, sb, c.number)
		if s := p.GetTerminal(); s.GetColumns() != 91 || s.GetRows() != 17 || !p.GetInputOpen() {
			t.Errorf("%s: %v", user.name, p)
		}
		c.send("typed\n")
		out, last := c.end()
		if want := "typed\r\n<typed>\r\n"; out != want {
			t.Errorf("%s: %q, want %q", user.name, out, want)
		}
		r := last.GetResult()
		if r.GetExitCode() != 7 || r.GetStdoutBytes() != c.read+int64(len(out)) || r.GetStderrBytes() != 0 ||
			last.GetTerminal().GetColumns() != 91 {
			t.Errorf("%s: %v", user.name, last)
		}
	}
}

func TestATerminalIsResized(t *testing.T) {
	t.Parallel()
	sb := open(t)
	c := newConsole(t, sb, client.Shell(`trap 'echo "now $(stty size)."' WINCH; echo up; while :; do sleep 0.05; done`))
	c.expect("up\r\n")
	for _, size := range [][2]uint32{{100, 30}, {40, 10}, {300, 50}} {
		c.resize(size[0], size[1])
		c.expect(fmt.Sprintf("now %d %d.\r\n", size[1], size[0]))
		if s := process(t, sb, c.number).GetTerminal(); s.GetColumns() != size[0] || s.GetRows() != size[1] {
			t.Errorf("shown as %v", s)
		}
	}
	c.send("\x03")
	if out, last := c.end(); last.GetResult().GetSignalName() != "SIGINT" {
		t.Errorf("%q, %v", out, last)
	}
	err := sb.Resize(within(t, 20*time.Second), c.number, client.Terminal(80, 24))
	if !errors.Is(err, errdefs.FailedPrecondition) {
		t.Errorf("resize after the end: %v", err)
	}
}

func TestWhatATerminalRefuses(t *testing.T) {
	t.Parallel()
	sb := open(t)
	ctx := within(t, 60*time.Second)
	for _, size := range []*sandseav1.TerminalSize{{}, {Columns: 80}, {Columns: 80, Rows: 65536}} {
		req := &sandseav1.StartRequest{Command: client.Argv("true"), Terminal: size}
		for _, err := range sb.Start(ctx, req) {
			if e := errdefs.From(err); e.Kind != errdefs.Invalid || !strings.HasPrefix(e.Field, "terminal.") {
				t.Errorf("start with %v: %v", size, err)
			}
		}
	}
	c := newConsole(t, sb, client.Argv("cat"))
	if err := sb.CloseInput(ctx, c.number); errdefs.From(err).Kind != errdefs.FailedPrecondition ||
		!strings.Contains(errdefs.From(err).Hint, "byte 4") {
		t.Errorf("close the input: %v", err)
	}
	if err := sb.Resize(ctx, c.number, client.Terminal(0, 1)); errdefs.From(err).Field != "size.columns" {
		t.Errorf("resize to nothing: %v", err)
	}
	c.send("\x04")
	if out, last := c.end(); last.GetResult().GetExitCode() != 0 || last.GetResult().GetSignal() != 0 {
		t.Errorf("after byte 4: %q, %v", out, last)
	}
	plain := start(t, sb, client.Argv("sleep", "60"))
	if err := sb.Resize(ctx, plain, client.Terminal(80, 24)); !errors.Is(err, errdefs.FailedPrecondition) {
		t.Errorf("resize without a terminal: %v", err)
	}
	key := &sandseav1.StartRequest{
		Command: client.Argv("sleep", "60"), Detached: true, Key: "k", Terminal: client.Terminal(80, 24),
	}
	first := startRequest(t, sb, key)
	if again := startRequest(t, sb, key); again != first {
		t.Errorf("one key, processes %d and %d", first, again)
	}
	key.Terminal = nil
	for _, err := range sb.Start(ctx, key) {
		if !errors.Is(err, errdefs.AlreadyExists) {
			t.Errorf("the key without its terminal: %v", err)
		}
	}
}

func TestAnInterruptReachesTheForegroundOnly(t *testing.T) {
	t.Parallel()
	sb := open(t)
	c := newConsole(t, sb, client.Shell(`set -m
		(trap 'echo background hit' INT; echo up; sleep 1; echo background done) &
		trap : INT
		sleep 100; echo after $?; wait; echo all`))
	c.expect("up\r\n")
	// The shell gives the terminal to its foreground job.
	wait.Until(t, 30*time.Second, func() bool { return running(t, sb, "sleep 100") })
	c.send("\x03")
	out, last := c.end()
	if !strings.Contains(out, "after 130\r\n") || !strings.Contains(out, "background done\r\n") ||
		strings.Contains(out, "hit") || last.GetResult().GetExitCode() != 0 {
		t.Errorf("%q, %v", out, last.GetResult())
	}
}

// running reports whether a process has exactly these arguments.
func running(t testing.TB, sb *client.Sandbox, args string) bool {
	t.Helper()
	for line := range strings.Lines(sh(t, sb, "ps -eo args")) {
		if strings.HasSuffix(strings.TrimSpace(line), args) && !strings.Contains(line, "-c") {
			return true
		}
	}
	return false
}

// jobs works an interactive shell as a user does.
func jobs(t *testing.T, sb *client.Sandbox, shell ...string) {
	t.Helper()
	c := newConsole(t, sb, &sandseav1.Command{Argv: shell, Env: map[string]string{"PS1": "ready> ", "ENV": ""}})
	c.expect("ready> ")
	c.send("sleep 1000\n")
	c.expect("sleep 1000\r\n")
	wait.Until(t, 30*time.Second, func() bool { return running(t, sb, "sleep 1000") })
	c.send("\x1a")
	c.expect("Stopped")
	c.expect("ready> ")
	c.send("bg; jobs\n")
	c.expect("Running")
	c.expect("ready> ")
	c.send("fg\n")
	c.expect("sleep 1000\r\n")
	// A shell says so before it gives the terminal away.
	wait.Until(t, 20*time.Second, func() bool {
		const front = `read -r _ _ _ _ group _ _ front _ </proc/$(pidof sleep)/stat && [ $group = $front ]`
		return run(t, sb, client.Shell(front)).GetResult().GetExitCode() == 0
	}, "it is in the foreground")
	c.send("\x03")
	c.expect("ready> ")
	c.send("echo status $?; exit 9\n")
	c.expect("status 130\r\n")
	if out, last := c.end(); last.GetResult().GetExitCode() != 9 {
		t.Errorf("%q, %v", out, last)
	}
}

func TestJobControlInASmallShell(t *testing.T) {
	t.Parallel()
	jobs(t, open(t), "sh", "-i")
}

func TestRealProgramsKnowTheirTerminal(t *testing.T) {
	sb := onDebian(t)
	t.Run("job control in bash", func(t *testing.T) { jobs(t, sb, "bash", "--norc", "--noprofile", "-i") })
	for _, c := range []struct {
		name, script, want string
	}{
		{"su", "su nobody -s /bin/sh -c 'tty && id -un'", `/dev/pts/\d+` + "\r\nnobody\r\n"},
		{"script", "script -qc 'tty; stty size' /dev/null", `/dev/pts/\d+` + "\r\n17 91\r\n"},
		{"sudo", "sudo -u nobody sh -c 'tty && id -un' 2>/dev/null", `/dev/pts/\d+` + "\r\nnobody\r\n"},
		{"python", `python3 -c 'import os; print(os.ttyname(0), tuple(os.get_terminal_size()))'`, `/dev/pts/\d+ \(91, 17\)` + "\r\n"},
		{"who owns it after all", "stat -c %U:%G $(tty)", "root:tty\r\n"},
	} {
		t.Run(c.name, func(t *testing.T) {
			out, last := newConsole(t, sb, client.Shell(c.script)).end()
			if !regexp.MustCompile("^"+c.want+"$").MatchString(out) || last.GetResult().GetExitCode() != 0 {
				t.Errorf("%q, want %q; %v", out, c.want, last.GetResult())
			}
		})
	}
}

func TestFullScreenBytesAreExactBothWays(t *testing.T) {
	t.Parallel()
	sb := open(t)
	var screen strings.Builder
	screen.WriteString("\x1b[?1049h\x1b[2J\x1b[H\x1b[31mé\xff\xfe\x00\x1b[0m")
	for i := range 256 {
		screen.WriteByte(byte(i))
	}
	text := strings.Repeat(screen.String(), 300)
	c := newConsole(t, sb, client.Shell(fmt.Sprintf("stty raw -echo; echo up; head -c %d; echo end", len(text))))
	c.expect("up\n")
	c.send(text)
	out, last := c.end()
	if out != text+"end\n" || last.GetResult().GetExitCode() != 0 {
		t.Errorf("%d bytes, want %d: %v", len(out), len(text)+4, last)
	}
}

// numbers is what `seq 1 2000000 | head -c size` writes.
func numbers(size int) []byte {
	b := make([]byte, 0, size+16)
	for i := int64(1); len(b) < size; i++ {
		b = append(strconv.AppendInt(b, i, 10), '\n')
	}
	return b[:size]
}

func TestMuchOutputThroughATerminalIsExactForEveryReader(t *testing.T) {
	t.Parallel()
	const size = 10 << 20
	sb := open(t)
	want := numbers(size)
	c := newConsole(t, sb, client.Shell(fmt.Sprintf("stty raw; seq 1 2000000 | head -c %d | cat; exit 3", size)))
	var readers errgroup.Group
	read := func(from int64) func() error {
		return func() error {
			at := from
			req := &sandseav1.AttachRequest{Number: c.number, StdoutOffset: from}
			for e, err := range sb.Attach(within(t, 60*time.Second), req) {
				if err != nil {
					return err
				}
				if d := e.GetData(); d != nil {
					if d.GetOffset() != at || !bytes.Equal(d.GetData(), want[at:at+int64(len(d.GetData()))]) {
						return fmt.Errorf("a piece at %d after %d is wrong", d.GetOffset(), at)
					}
					at += int64(len(d.GetData()))
				}
				if p := e.GetExited(); p != nil && (p.GetResult().GetExitCode() != 3 || p.GetResult().GetStdoutBytes() != size) {
					return fmt.Errorf("ended: %v", p)
				}
			}
			if at != size {
				return fmt.Errorf("reader from %d came to %d", from, at)
			}
			return nil
		}
	}
	readers.Go(read(0))
	readers.Go(read(0))
	// One leaves in the middle and comes back at its offset.
	var left int64
	for e, err := range sb.Attach(within(t, 60*time.Second), &sandseav1.AttachRequest{Number: c.number}) {
		if err != nil {
			t.Fatal(err)
		}
		if left += int64(len(e.GetData().GetData())); left > size/3 {
			break
		}
	}
	readers.Go(read(left))
	if err := readers.Wait(); err != nil {
		t.Error(err)
	}
	if err := read(size - 5)(); err != nil {
		t.Errorf("after the end: %v", err)
	}
}

func TestTheEndOfASessionHangsUp(t *testing.T) {
	t.Parallel()
	sb := open(t)
	c := newConsole(t, sb, client.Shell(`sleep 777 & (trap '' HUP; echo up; sleep 1; echo survived) & read go; exit 4`))
	c.expect("up\r\n")
	c.send("\n")
	_, last := c.end()
	if r := last.GetResult(); r.GetExitCode() != 4 {
		t.Errorf("ended: %v", r)
	}
	c.expect("survived\r\n")
	// It was in the foreground of a terminal that hung up.
	wait.Until(t, 30*time.Second, func() bool { return !running(t, sb, "sleep 777") })
}

func TestATerminalIsRecordedWhileItsFirstProcessRuns(t *testing.T) {
	t.Parallel()
	sb := open(t)
	c := newConsole(t, sb, client.Shell(`echo one; exec </dev/null >/dev/null 2>&1
		sleep 0.5; echo two > /dev/tty; exit 6`))
	out, last := c.end()
	if out != "one\r\ntwo\r\n" || last.GetResult().GetExitCode() != 6 {
		t.Errorf("%q, %v", out, last)
	}
}

func TestATimeLimitEndsATerminal(t *testing.T) {
	t.Parallel()
	sb := open(t)
	cmd := client.Shell("echo so far; trap '' INT TERM HUP; while :; do sleep 1; done")
	cmd.TimeoutMs = 3000
	out, last := newConsole(t, sb, cmd).end()
	if r := last.GetResult(); out != "so far\r\n" || !r.GetTimedOut() || r.GetExitCode() != 124 {
		t.Errorf("%q, %v", out, last)
	}
}

func TestTwentyTerminalsAtOnce(t *testing.T) {
	t.Parallel()
	sb := open(t)
	var consoles []*console
	names := map[string]bool{}
	for range 20 {
		consoles = append(consoles, newConsole(t, sb, client.Shell("tty; read a; read b; echo $a and $b; exit 5")))
	}
	for i, c := range consoles {
		names[c.expect("\r\n")] = true
		c.send(fmt.Sprintf("a%d\n", i))
		c.resize(uint32(20+i), 10)
	}
	if len(names) != len(consoles) {
		t.Errorf("%d terminals: %v", len(names), names)
	}
	for i, c := range consoles {
		c.send(fmt.Sprintf("b%d\n", i))
		out, last := c.end()
		if want := fmt.Sprintf("a%d\r\nb%d\r\na%d and b%d\r\n", i, i, i, i); out != want {
			t.Errorf("terminal %d: %q, want %q", i, out, want)
		}
		if last.GetResult().GetExitCode() != 5 || last.GetTerminal().GetColumns() != uint32(20+i) {
			t.Errorf("terminal %d: %v", i, last)
		}
	}
}

func TestATerminalOutlivesKeeperAndDaemon(t *testing.T) {
	s := server.Start(t, server.Config{})
	if err := s.ImportBusybox(t.Context()); err != nil {
		t.Fatal(err)
	}
	sb := openOn(t, s)
	const size = 8 << 20
	want := numbers(size)
	flood := newConsole(t, sb, client.Shell(fmt.Sprintf("stty raw; seq 1 2000000 | head -c %d | cat; exit 3", size)))
	typed := newConsole(t, sb, client.Shell("echo up; while read x; do echo got $x $(stty size); done; exit 8"))
	typed.expect("up\r\n")
	for round := range 3 {
		for _, part := range []string{"keeper", "up"} {
			if err := s.Kill(part); err != nil {
				t.Fatal(err)
			}
			if part == "up" {
				if err := s.Up(within(t, 60*time.Second)); err != nil {
					t.Fatal(err)
				}
				sb = s.Client.Sandbox(sb.ID)
				flood.sb, typed.sb = sb, sb
			}
			typed.resize(uint32(50+round), 20)
			typed.send(part + "\n")
			typed.expect(fmt.Sprintf("got %s 20 %d\r\n", part, 50+round))
		}
	}
	typed.send("\x04")
	if out, last := typed.end(); last.GetResult().GetExitCode() != 8 {
		t.Errorf("%q, %v", out, last)
	}
	out, last := flood.end()
	if out != string(want) || last.GetResult().GetExitCode() != 3 || last.GetResult().GetStdoutBytes() != size {
		t.Errorf("%d bytes of %d: %v", len(out), size, last)
	}
}
