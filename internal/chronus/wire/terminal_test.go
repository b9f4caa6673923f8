package wire

import (
	"errors"
	"os"
	"sync"
	"syscall"
	"testing"
	"time"

	"github.com/sandsea/sandsea/api/errdefs"
	"github.com/sandsea/sandsea/internal/chronus"
	"github.com/sandsea/sandsea/internal/linux/tty"
	"github.com/sandsea/sandsea/internal/testkit/wait"
)

// terminalPair is a line whose inside knows terminals.
func terminalPair(t *testing.T) (*Channel, *peer) {
	t.Helper()
	c, p := pair(t)
	done := make(chan struct{})
	go func() {
		defer close(done)
		m := p.read()
		p.say(message{head: head{kind: kindRoster, seq: m.seq}, version: Version, flags: factPTY},
			message{head: head{kind: kindRosterEnd, seq: m.seq}})
	}()
	if f, _, err := c.Hello(within(t)); err != nil || !f.Terminals {
		t.Fatalf("%+v, %v", f, err)
	}
	<-done
	return c, p
}

func (p *peer) give(m message, files ...*os.File) {
	if err := p.conn.Send(within(p.t), m.encode(), files...); err != nil {
		p.t.Error(err)
	}
}

func master(t *testing.T) *os.File {
	t.Helper()
	m, err := tty.Open()
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { m.Close() })
	return m
}

func TestAnInsideOfAnOlderVersionIsNotAskedForATerminal(t *testing.T) {
	c, p := greetedPair(t, running(1))
	if _, err := c.OpenPTY(within(t)); !errors.Is(err, errdefs.FailedPrecondition) {
		t.Errorf("got %v", err)
	}
	io := stdio(t)
	io.TTY = true
	_, err := c.Spawn(within(t), chronus.Spawn{Number: 2, Argv: []string{"sh"}}, io)
	if !errors.Is(err, errdefs.FailedPrecondition) {
		t.Errorf("got %v", err)
	}
	// What it is asked next comes first.
	go func() {
		m := p.read()
		if m.kind != kindSignal {
			t.Errorf("asked for %d", m.kind)
		}
		p.say(message{head: head{kind: kindSignalled, seq: m.seq, cookie: m.cookie}})
	}()
	if err := c.Signal(within(t), 1, syscall.SIGTERM); err != nil {
		t.Error(err)
	}
}

func TestATerminalIsHandedOut(t *testing.T) {
	c, p := terminalPair(t)
	theirs := master(t)
	go func() {
		m := p.read()
		if m.kind != kindOpenPTY || m.cookie != 0 {
			t.Errorf("asked for %+v", m)
		}
		p.give(message{head: head{kind: kindPTY, seq: m.seq}}, theirs)
	}()
	ours, err := c.OpenPTY(within(t))
	if err != nil {
		t.Fatal(err)
	}
	defer ours.Close()
	if err := tty.SetSize(ours, tty.Size{Columns: 33, Rows: 44}); err != nil {
		t.Fatal(err)
	}
	if s, err := tty.GetSize(theirs); err != nil || s != (tty.Size{Columns: 33, Rows: 44}) {
		t.Errorf("another terminal: %v, %v", s, err)
	}
	go func() {
		m := p.read()
		p.say(message{head: head{kind: kindFailed, seq: m.seq}, step: 10, errno: int32(syscall.ENOSPC)})
	}()
	_, err = c.OpenPTY(within(t))
	se, ok := errors.AsType[*chronus.StartError](err)
	if !ok || se.Step != chronus.StepTerminal || se.Errno != syscall.ENOSPC {
		t.Errorf("got %v", err)
	}
}

func TestWhatIsNoTerminalEndsTheLine(t *testing.T) {
	null, err := os.Open(os.DevNull)
	if err != nil {
		t.Fatal(err)
	}
	defer null.Close()
	m := master(t)
	peer, err := tty.Peer(m)
	if err != nil {
		t.Fatal(err)
	}
	defer peer.Close()
	for _, c := range []struct {
		name  string
		files []*os.File
	}{
		{"nothing", nil},
		{"another device", []*os.File{null}},
		{"the other end", []*os.File{peer}},
		{"two", []*os.File{m, m}},
	} {
		t.Run(c.name, func(t *testing.T) {
			line, p := terminalPair(t)
			go func() {
				r := p.read()
				p.give(message{head: head{kind: kindPTY, seq: r.seq}}, c.files...)
			}()
			if _, err := line.OpenPTY(within(t)); !errors.Is(err, errdefs.Unavailable) || !errors.Is(err, errMessage) {
				t.Errorf("got %v", err)
			}
		})
	}
}

func TestATerminalThatNobodyWaitsForIsClosed(t *testing.T) {
	line, p := terminalPair(t)
	theirs := master(t)
	peer, err := tty.Peer(theirs)
	if err != nil {
		t.Fatal(err)
	}
	defer peer.Close()
	p.give(message{head: head{kind: kindPTY, seq: 1}}, theirs)
	theirs.Close()
	// The other end hangs up with the last master.
	ok := wait.For(10*time.Second, func() bool {
		_, err := peer.WriteString("x")
		return errors.Is(err, syscall.EIO)
	})
	if !ok {
		t.Error("the master is still open")
	}
	if err := line.reason(); err != nil {
		t.Errorf("the line ended: %v", err)
	}
}

// fill takes every descriptor that this process could still open, until the test ends or free is called.
func fill(t *testing.T) (free func()) {
	t.Helper()
	var old syscall.Rlimit
	if err := syscall.Getrlimit(syscall.RLIMIT_NOFILE, &old); err != nil {
		t.Fatal(err)
	}
	next, err := syscall.Open("/", syscall.O_RDONLY|syscall.O_CLOEXEC, 0)
	if err != nil {
		t.Fatal(err)
	}
	if err := errors.Join(syscall.Close(next),
		syscall.Setrlimit(syscall.RLIMIT_NOFILE, &syscall.Rlimit{Cur: uint64(next), Max: old.Max})); err != nil {
		t.Fatal(err)
	}
	free = sync.OnceFunc(func() {
		if err := syscall.Setrlimit(syscall.RLIMIT_NOFILE, &old); err != nil {
			t.Error(err)
		}
	})
	t.Cleanup(free)
	return free
}

func TestANodeWithoutDescriptorsKeepsTheLineAndGivesNoTerminal(t *testing.T) {
	c, p := terminalPair(t)
	theirs := master(t)
	free := fill(t)
	go func() {
		m := p.read()
		p.give(message{head: head{kind: kindPTY, seq: m.seq}}, theirs)
	}()
	_, err := c.OpenPTY(within(t))
	free()
	if !errors.Is(err, errdefs.Exhausted) {
		t.Errorf("got %v", err)
	}
	go func() {
		m := p.read()
		p.give(message{head: head{kind: kindPTY, seq: m.seq}}, theirs)
	}()
	ours, err := c.OpenPTY(within(t))
	if err != nil {
		t.Fatal(err)
	}
	ours.Close()
}
