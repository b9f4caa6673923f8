package conform

import (
	"bytes"
	"errors"
	"os"
	"syscall"
	"testing"

	"github.com/sandsea/sandsea/api/errdefs"
	"github.com/sandsea/sandsea/internal/keeper"
	"github.com/sandsea/sandsea/internal/linux/tty"
	"github.com/sandsea/sandsea/internal/record"
)

// terminal makes a stream of a raw terminal and the end to write to.
func (w *world) terminal(n int64) (keeper.Stream, *os.File) {
	w.t.Helper()
	s, feed := w.stream(n, record.Stdout)
	master, err := tty.Open()
	w.must(err)
	w.t.Cleanup(func() { master.Close() })
	peer, err := tty.Peer(master)
	w.must(err)
	w.t.Cleanup(func() { peer.Close() })
	w.must(tty.MakeRaw(peer))
	s.Terminal, s.Feed = master, feed
	return s, peer
}

func testTerminal(t *testing.T, w *world) {
	ctx := t.Context()
	out, peer := w.terminal(1)
	// What a keeper before took from the terminal comes first.
	w.write(out.Feed, []byte("from the pipe, "))
	w.write(peer, []byte("from the terminal, "))
	w.must(w.c.Record(ctx, keeper.Exec{Key: key(1), Streams: []keeper.Stream{out}, Caps: record.DefaultCaps}))
	for _, f := range []*os.File{out.Terminal, out.Pipe, out.Feed} {
		f.Close()
	}
	w.must(w.c.Close())
	sent := []byte("from the pipe, from the terminal, ")
	for i := range 200 {
		line := bytes.Repeat([]byte{byte(i)}, i*37)
		sent = append(sent, line...)
		w.write(peer, line)
	}
	w.connect()
	w.eventually("all to be recorded", func() bool {
		fi, err := out.File.Stat()
		return err == nil && fi.Size() == int64(len(sent))
	})
	if _, ok := w.find(keeper.Closed, key(1), record.Stdout); ok {
		t.Error("told to be closed while somebody has the terminal open")
	}
	w.write(peer, []byte("end"))
	peer.Close()
	if e := w.wait(keeper.Closed, key(1), record.Stdout); e.Size != int64(len(sent))+3 {
		t.Errorf("size %d, want %d", e.Size, len(sent)+3)
	}
	if got, err := os.ReadFile(out.File.Name()); err != nil || !bytes.Equal(got, append(sent, "end"...)) {
		t.Errorf("%d bytes recorded of %d, %v", len(got), len(sent)+3, err)
	}
}

func testTerminalEnded(t *testing.T, w *world) {
	out, peer := w.terminal(1)
	w.write(out.Feed, []byte("a"))
	w.write(peer, []byte("b"))
	peer.Close()
	w.must(w.c.Record(t.Context(), keeper.Exec{Key: key(1), Streams: []keeper.Stream{out}, Caps: record.DefaultCaps}))
	if e := w.wait(keeper.Closed, key(1), record.Stdout); e.Size != 2 {
		t.Errorf("size %d", e.Size)
	}
	if got, err := os.ReadFile(out.File.Name()); err != nil || string(got) != "ab" {
		t.Errorf("recorded %q, %v", got, err)
	}
}

func testTerminalRoster(t *testing.T, w *world) {
	ctx := t.Context()
	out, peer := w.terminal(1)
	in, err := tty.Duplicate(out.Terminal)
	w.must(err)
	defer in.Close()
	kill, _ := w.kill()
	w.must(w.c.Record(ctx, keeper.Exec{Key: key(1), Streams: []keeper.Stream{out}, Stdin: in, Kill: kill}))
	held, err := w.c.Roster(ctx)
	w.must(err)
	defer func() {
		for _, h := range held {
			for _, f := range h.Files() {
				f.Close()
			}
		}
	}()
	for _, h := range held {
		if h.Exec == nil {
			continue
		}
		e := h.Exec
		if len(e.Streams) != 1 || !same(t, e.Streams[0].Pipe, out.Pipe) || !same(t, e.Streams[0].Feed, out.Feed) ||
			!same(t, e.Stdin, in) || !same(t, e.Kill, kill) {
			t.Fatalf("command: %+v", e)
		}
		// All masters are of one file; which terminal it is shows at the other end.
		w.must(tty.SetSize(e.Streams[0].Terminal, tty.Size{Columns: 12, Rows: 34}))
	}
	if s, err := tty.GetSize(peer); err != nil || s != (tty.Size{Columns: 12, Rows: 34}) {
		t.Errorf("another terminal: %v, %v", s, err)
	}
	if len(held) != 2 {
		t.Errorf("%d entries", len(held))
	}
}

func testTerminalRelease(t *testing.T, w *world) {
	out, peer := w.terminal(1)
	w.must(w.c.Record(t.Context(), keeper.Exec{Key: key(1), Streams: []keeper.Stream{out}}))
	out.Terminal.Close()
	w.write(peer, []byte("x"))
	w.must(w.c.Release(t.Context(), key(1)))
	w.eventually("the terminal to hang up", func() bool {
		_, err := peer.Write([]byte("x"))
		return errors.Is(err, syscall.EIO)
	})
}

func testTerminalCaps(t *testing.T, w *world) {
	const total = 12 * mib
	caps := record.Caps{Head: mib, Tail: mib}
	out, peer := w.terminal(1)
	w.must(w.c.Record(t.Context(), keeper.Exec{Key: key(1), Streams: []keeper.Stream{out}, Caps: caps}))
	w.flood(peer, 0, total)
	peer.Close()
	if e := w.wait(keeper.Closed, key(1), record.Stdout); e.Size != total {
		t.Errorf("size %d", e.Size)
	}
	if !w.kept(out.File, 0) || !w.kept(out.File, total-mib) {
		t.Error("an end is gone")
	}
	if n := w.allocated(out.File); n > 5*mib {
		t.Errorf("%d bytes on disk", n)
	}
}

func testTerminalRefused(t *testing.T, w *world) {
	good, peer := w.terminal(1)
	blocking, err := os.OpenFile("/dev/ptmx", os.O_RDWR|syscall.O_NOCTTY, 0)
	w.must(err)
	defer blocking.Close()
	blocking.Fd() // waits from now on
	for name, change := range map[string]func(*keeper.Stream){
		"the other end":        func(s *keeper.Stream) { s.Terminal = peer },
		"a pipe":               func(s *keeper.Stream) { s.Terminal = s.Pipe },
		"one that waits":       func(s *keeper.Stream) { s.Terminal = blocking },
		"a feed that is none":  func(s *keeper.Stream) { s.Feed = s.File },
		"a pipe that is none":  func(s *keeper.Stream) { s.Pipe = s.File },
		"a record that is one": func(s *keeper.Stream) { s.File = s.Terminal },
	} {
		s := good
		change(&s)
		err := w.c.Record(t.Context(), keeper.Exec{Key: key(1), Streams: []keeper.Stream{s}})
		if !errors.Is(err, errdefs.Invalid) {
			t.Errorf("%s: %v", name, err)
		}
	}
}
