package wire_test

import (
	"bufio"
	"errors"
	"io"
	"os"
	"strings"
	"syscall"
	"testing"

	"github.com/sandsea/sandsea/internal/chronus"
	"github.com/sandsea/sandsea/internal/linux/tty"
	"github.com/sandsea/sandsea/internal/testkit/rawbox"
)

// terminal starts a command on a terminal of the box and gives the master and the command's number.
func (h *harness) terminal(s chronus.Spawn) (*os.File, int64) {
	h.t.Helper()
	master, err := h.line.OpenPTY(ctx(h.t))
	if err != nil {
		h.t.Fatal(err)
	}
	h.t.Cleanup(func() { master.Close() })
	if err := tty.SetSize(master, tty.Size{Columns: 91, Rows: 17}); err != nil {
		h.t.Fatal(err)
	}
	peer, err := tty.Peer(master)
	if err != nil {
		h.t.Fatal(err)
	}
	defer peer.Close()
	s.Number = h.next()
	_, err = h.line.Spawn(ctx(h.t), s, chronus.Stdio{Cgroup: h.box.Exec(h.t), In: peer, Out: peer, TTY: true})
	if err != nil {
		h.t.Fatalf("spawn %q: %v", s.Argv, err)
	}
	return master, s.Number
}

func TestACommandOnATerminalOfItsOwn(t *testing.T) {
	h := start(t, rawbox.Options{})
	master, number := h.terminal(sh(`busybox tty; busybox stty size; busybox stty -onlcr
		test -t 0 && test -t 1 && test -t 2 && echo all; echo there > /dev/tty; exit 3`))
	out, err := io.ReadAll(master)
	if !errors.Is(err, syscall.EIO) {
		t.Errorf("the terminal ended with %v", err)
	}
	if want := "/dev/pts/0\r\n17 91\r\nall\nthere\n"; string(out) != want {
		t.Errorf("output %q, want %q", out, want)
	}
	if e := h.wait(number); !e.Status.Exited() || e.Status.ExitStatus() != 3 {
		t.Errorf("status %#x", e.Status)
	}
}

func TestATerminalInterruptsItsForegroundAndNothingElse(t *testing.T) {
	h := start(t, rawbox.Options{})
	other, survivor := h.terminal(sh("echo up; read line; echo $line; exit 5"))
	master, number := h.terminal(sh("busybox stty -echo; echo up; sleep 100"))
	for _, f := range []*os.File{other, master} {
		if line, err := bufio.NewReader(f).ReadString('\n'); err != nil || line != "up\r\n" {
			t.Fatalf("read %q, %v", line, err)
		}
	}
	if _, err := master.WriteString("\x03"); err != nil {
		t.Fatal(err)
	}
	if e := h.wait(number); !e.Status.Signaled() || e.Status.Signal() != syscall.SIGINT {
		t.Errorf("status %#x, want SIGINT", e.Status)
	}
	if _, err := other.WriteString("here\n"); err != nil {
		t.Fatal(err)
	}
	if out, err := io.ReadAll(other); !errors.Is(err, syscall.EIO) || strings.Count(string(out), "here") != 2 {
		t.Errorf("read %q, %v", out, err)
	}
	if e := h.wait(survivor); !e.Status.Exited() || e.Status.ExitStatus() != 5 {
		t.Errorf("status %#x", e.Status)
	}
}

func TestATerminalOfAnotherSessionIsRefused(t *testing.T) {
	h := start(t, rawbox.Options{})
	master, number := h.terminal(sh("echo up; sleep 100"))
	if _, err := bufio.NewReader(master).ReadString('\n'); err != nil {
		t.Fatal(err)
	}
	peer, err := tty.Peer(master)
	if err != nil {
		t.Fatal(err)
	}
	defer peer.Close()
	s := sh("true")
	s.Number = h.next()
	_, err = h.line.Spawn(ctx(t), s, chronus.Stdio{Cgroup: h.box.Exec(t), In: peer, Out: peer, TTY: true})
	if e := startError(t, err); e.Step != chronus.StepTerminal || e.Errno != syscall.EPERM {
		t.Errorf("got %v", e)
	}
	if err := h.line.Signal(ctx(t), number, syscall.SIGKILL); err != nil {
		t.Fatal(err)
	}
	h.wait(number)
}

func TestTerminalsOfABoxAreBounded(t *testing.T) {
	h := start(t, rawbox.Options{})
	var open []*os.File
	defer func() {
		for _, f := range open {
			f.Close()
		}
	}()
	for {
		f, err := h.line.OpenPTY(ctx(t))
		if err != nil {
			if e := startError(t, err); e.Step != chronus.StepTerminal || e.Errno != syscall.ENOSPC {
				t.Errorf("got %v", e)
			}
			break
		}
		if open = append(open, f); len(open) > 1000 {
			t.Fatal("no end of terminals")
		}
	}
	open[0].Close()
	if f, err := h.line.OpenPTY(ctx(t)); err != nil {
		t.Errorf("after one was given back: %v", err)
	} else {
		f.Close()
	}
}
