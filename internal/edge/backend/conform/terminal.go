package conform

import (
	"errors"
	"io"
	"syscall"
	"testing"
	"time"

	"github.com/sandsea/sandsea/internal/chronus"
	"github.com/sandsea/sandsea/internal/linux/tty"
)

func testTerminal(t *testing.T, s *suite) {
	id, inst := s.start(t)
	ex, err := inst.NewExec(t.Context(), 1)
	if err != nil {
		t.Fatalf("NewExec: %v", err)
	}
	t.Cleanup(func() { _ = ex.Remove() })
	master, err := inst.Channel().OpenPTY(t.Context())
	if err != nil {
		t.Fatalf("OpenPTY: %v", err)
	}
	defer master.Close()
	if err := tty.SetSize(master, tty.Size{Columns: 80, Rows: 24}); err != nil {
		t.Fatal(err)
	}
	peer, err := tty.Peer(master)
	if err != nil {
		t.Fatal(err)
	}
	defer peer.Close()
	if err := peer.Chown(int(inst.UIDBase())+1000, -1); err != nil {
		t.Fatal(err)
	}
	stdio := ex.Stdio()
	stdio.In, stdio.Out, stdio.TTY = peer, peer, true
	_, err = inst.Channel().Spawn(t.Context(), chronus.Spawn{
		Number: 1, Argv: []string{"cat"}, Env: []string{"PATH=/usr/local/bin:/usr/bin:/bin"}, Cwd: "/", Umask: 0o22,
		IDs: chronus.IDs{UID: 1000, GID: 1000},
	}, stdio)
	peer.Close()
	if err != nil {
		t.Fatalf("Spawn: %v", err)
	}
	// It outlives the edge.
	handle := inst.Handle()
	s.b = s.Open(t)
	if _, err := s.b.Probe(t.Context()); err != nil {
		t.Fatal(err)
	}
	if inst, err = s.b.Recover(t.Context(), id, handle); err != nil {
		t.Fatalf("Recover: %v", err)
	}
	ends := collect(inst)
	facts, list, err := inst.Channel().Hello(t.Context())
	if err != nil || !facts.Terminals || len(list) != 1 {
		t.Fatalf("Hello: %+v, %+v, %v", facts, list, err)
	}
	if _, err := master.WriteString("hi\n\x04"); err != nil {
		t.Fatal(err)
	}
	if err := master.SetReadDeadline(time.Now().Add(patience)); err != nil {
		t.Fatal(err)
	}
	out, err := io.ReadAll(master)
	if !errors.Is(err, syscall.EIO) || string(out) != "hi\r\nhi\r\n" {
		t.Errorf("read %q, %v", out, err)
	}
	if x := ends.wait(t, 1); !x.Status.Exited() || x.Status.ExitStatus() != 0 {
		t.Errorf("exit %+v", x)
	}
	stop(t, inst)
}
