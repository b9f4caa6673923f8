package keeper

import (
	"context"
	"errors"
	"fmt"
	"math/rand/v2"
	"os"
	"os/exec"
	"path/filepath"
	"testing"
	"time"

	"github.com/sandsea/sandsea/api/errdefs"
	"github.com/sandsea/sandsea/internal/linux/scm"
	"github.com/sandsea/sandsea/internal/linux/tty"
	"github.com/sandsea/sandsea/internal/record"
)

// newTerminal makes a stream of a raw terminal and the end to write to.
func newTerminal(t testing.TB, dir string, k Key) (Stream, *os.File) {
	t.Helper()
	st, feed := newRecord(t, dir, k, record.Stdout)
	master, err := tty.Open()
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { master.Close() })
	peer, err := tty.Peer(master)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { peer.Close() })
	if err := tty.MakeRaw(peer); err != nil {
		t.Fatal(err)
	}
	st.Terminal, st.Feed = master, feed
	return st, peer
}

// startTerminalWriter records a terminal and starts a writer on it.
func startTerminalWriter(t testing.TB, c Client, dir string, k Key, total int64) *child {
	t.Helper()
	st, peer := newTerminal(t, dir, k)
	ch := &child{exec: Exec{Key: k, Caps: wide, Streams: []Stream{st}}, path: st.File.Name(), seed: uint64(k.Number)}
	if err := c.Record(t.Context(), ch.exec); err != nil {
		t.Fatal(err)
	}
	ch.cmd = exec.Command("/proc/self/exe")
	ch.cmd.Env = append(os.Environ(), fmt.Sprintf("%s=writer %d %d 5000", roleEnv, ch.seed, total))
	ch.cmd.Stdout = peer
	ch.cmd.Stderr = &ch.stderr
	if err := ch.cmd.Start(); err != nil {
		t.Fatal(err)
	}
	peer.Close()
	t.Cleanup(func() {
		if ch.cmd.ProcessState == nil {
			_ = ch.cmd.Process.Kill()
			_ = ch.cmd.Wait()
		}
	})
	return ch
}

// TestAKilledKeeperLosesNoByteOfATerminal kills the keeper between the terminal and the record.
func TestAKilledKeeperLosesNoByteOfATerminal(t *testing.T) {
	const writers, total, kills = 3, 12 << 20, 25
	dir := t.TempDir()
	p := startKeeper(t, dir)
	c := p.dial(t)
	l := listen(c)
	if err := c.Hold(t.Context(), Sandbox{ID: "s1"}); err != nil {
		t.Fatal(err)
	}
	r := rand.New(rand.NewPCG(2, uint64(os.Getpid())))
	for number, deaths := int64(1), 0; deaths < kills; number += writers {
		var children []*child
		for i := range int64(writers) {
			children = append(children, startTerminalWriter(t, c, dir, Key{"s1", number + i}, total))
		}
		whileWriting(t, children, r, 40*time.Millisecond, func() {
			if deaths >= kills {
				return
			}
			p.kill(t)
			c.Close()
			p.start(t)
			c = p.dial(t)
			l = listen(c)
			if err := c.Hold(t.Context(), Sandbox{ID: "s1"}); err != nil {
				t.Fatal(err)
			}
			for _, ch := range children {
				if err := c.Record(t.Context(), ch.exec); err != nil {
					t.Fatal(err)
				}
			}
			deaths++
		})
		for _, ch := range children {
			if e := l.wait(t, of(Closed, ch.exec.Key)); e.Size != total {
				t.Errorf("stream of %d bytes, want %d", e.Size, total)
			}
			checkRecord(t, ch.path, ch.seed, total)
			if err := c.Release(t.Context(), ch.exec.Key); err != nil {
				t.Fatal(err)
			}
			os.Remove(ch.path)
		}
	}
}

func TestTerminalsGoAlongWithAnUpgrade(t *testing.T) {
	const total = 16 << 20
	dir := t.TempDir()
	p := startKeeper(t, dir)
	c := p.dial(t)
	if err := c.Hold(t.Context(), Sandbox{ID: "s1"}); err != nil {
		t.Fatal(err)
	}
	ch := startTerminalWriter(t, c, dir, Key{"s1", 1}, total)
	idle, peer := newTerminal(t, dir, Key{"s1", 2})
	if err := c.Record(t.Context(), Exec{Key: Key{"s1", 2}, Caps: wide, Streams: []Stream{idle}}); err != nil {
		t.Fatal(err)
	}
	idle.Terminal.Close()
	versions := []*os.File{version(t), version(t)}
	for n := range 6 {
		c = p.upgrade(t, versions[n%2])
	}
	l := listen(c)
	if _, err := peer.WriteString("still"); err != nil {
		t.Fatal(err)
	}
	peer.Close()
	if e := l.wait(t, of(Closed, Key{"s1", 2})); e.Size != 5 {
		t.Errorf("the idle terminal has %d bytes", e.Size)
	}
	if err := ch.cmd.Wait(); err != nil {
		t.Fatalf("writer: %v: %s", err, ch.stderr.String())
	}
	if e := l.wait(t, of(Closed, ch.exec.Key)); e.Size != total {
		t.Errorf("stream of %d bytes, want %d", e.Size, total)
	}
	checkRecord(t, ch.path, ch.seed, total)
}

func TestTerminalsWithoutOutputCostNothing(t *testing.T) {
	dir := t.TempDir()
	p := startKeeper(t, dir)
	c := p.dial(t)
	l := listen(c)
	if err := c.Hold(t.Context(), Sandbox{ID: "s1"}); err != nil {
		t.Fatal(err)
	}
	for n := int64(1); n <= 60; n++ {
		k := Key{"s1", n}
		st, peer := newTerminal(t, dir, k)
		if err := c.Record(t.Context(), Exec{Key: k, Caps: record.DefaultCaps, Streams: []Stream{st}}); err != nil {
			t.Fatal(err)
		}
		if _, err := peer.WriteString("x"); err != nil {
			t.Fatal(err)
		}
		// Some are idle, some have ended and are still held, some wait for a reader.
		switch n % 3 {
		case 1:
			peer.Close()
			l.wait(t, of(Closed, k))
		case 2:
			if err := c.Retain(t.Context(), k, record.Stdout, 0); err != nil {
				t.Fatal(err)
			}
		}
	}
	ticks := cpuTicks(t, p.cmd.Process.Pid)
	<-time.After(500 * time.Millisecond)
	if ticks = cpuTicks(t, p.cmd.Process.Pid) - ticks; ticks > 5 {
		t.Errorf("%d ms CPU in half a second", ticks*10)
	}
}

func TestALosslessReaderHoldsATerminalUpForAWhileOnly(t *testing.T) {
	const window, total = 1 << 20, 8 << 20
	dir := t.TempDir()
	c := startKeeper(t, dir, smallLimits(1<<30, window, 60_000, 1<<40, 0)...).dial(t)
	l := listen(c)
	if err := c.Hold(t.Context(), Sandbox{ID: "s1"}); err != nil {
		t.Fatal(err)
	}
	k := Key{"s1", 1}
	st, peer := newTerminal(t, dir, k)
	if err := c.Record(t.Context(), Exec{Key: k, Caps: wide, Streams: []Stream{st}}); err != nil {
		t.Fatal(err)
	}
	if err := c.Retain(t.Context(), k, record.Stdout, 0); err != nil {
		t.Fatal(err)
	}
	done := make(chan error, 1)
	go func() {
		buf := make([]byte, 5000)
		for off := int64(0); off < total; {
			n := min(int64(len(buf)), total-off)
			sequence(buf[:n], 1, off)
			if _, err := peer.Write(buf[:n]); err != nil {
				done <- err
				return
			}
			off += n
		}
		done <- peer.Close()
	}()
	size := func() int64 {
		fi, err := os.Stat(st.File.Name())
		if err != nil {
			t.Fatal(err)
		}
		return fi.Size()
	}
	if !eventually(10*time.Second, func() bool { return size() >= window }) {
		t.Fatal("the window does not fill")
	}
	select {
	case err := <-done:
		t.Fatalf("the writer was not held up: %v", err)
	case <-time.After(100 * time.Millisecond):
	}
	if n := size(); n > window+tty.InFlight {
		t.Errorf("%d bytes past a window of %d", n, window)
	}
	// The reader goes on to the end.
	if err := c.Retain(t.Context(), k, record.Stdout, total); err != nil {
		t.Fatal(err)
	}
	if err := <-done; err != nil {
		t.Fatal(err)
	}
	if e := l.wait(t, of(Closed, k)); e.Size != total {
		t.Errorf("size %d", e.Size)
	}
	checkRecord(t, st.File.Name(), 1, total)
}

// cutFeatures makes a greeting one of a version before there were features.
func cutFeatures(b []byte) []byte { return b[:len(b)-4] }

func TestAKeeperWithoutTerminalsIsNotGivenOne(t *testing.T) {
	dir := t.TempDir()
	socket := filepath.Join(dir, "keeper.sock")
	ln, err := scm.ListenFD(socket)
	if err != nil {
		t.Fatal(err)
	}
	defer closeFD(ln)
	asked := make(chan kind, 1)
	go func() {
		fd := -1
		eventually(10*time.Second, func() bool { fd, err = scm.AcceptFD(ln); return err == nil })
		conn, err := scm.New(os.NewFile(uintptr(fd), "peer"))
		if err != nil {
			t.Error(err)
			return
		}
		defer conn.Close()
		buf := make([]byte, maxMessage)
		if _, _, err := conn.Recv(context.Background(), buf); err != nil {
			t.Error(err)
		}
		welcome := cutFeatures(hello{version: wireVersion, dataID: "data"}.encode(kWelcome))
		if err := conn.Send(context.Background(), welcome); err != nil {
			t.Error(err)
		}
		n, files, err := conn.Recv(context.Background(), buf)
		if err != nil {
			t.Error(err)
			return
		}
		scm.CloseFiles(files)
		k, id, _ := open(buf[:n])
		asked <- k
		_ = conn.Send(context.Background(), reply{}.encode(id))
	}()
	c, err := Dial(t.Context(), socket, "data")
	if err != nil {
		t.Fatal(err)
	}
	defer c.Close()
	st, _ := newTerminal(t, dir, Key{"s1", 1})
	err = c.Record(t.Context(), Exec{Key: Key{"s1", 1}, Streams: []Stream{st}})
	if !errors.Is(err, errdefs.FailedPrecondition) {
		t.Errorf("got %v", err)
	}
	plain, _ := newRecord(t, dir, Key{"s1", 2}, record.Stdout)
	if err := c.Record(t.Context(), Exec{Key: Key{"s1", 2}, Streams: []Stream{plain}}); err != nil {
		t.Errorf("a pipe: %v", err)
	}
	if k := <-asked; k != kRecord {
		t.Errorf("asked for %d", k)
	}
}

func TestAnEdgeWithoutTerminalsGetsTheRest(t *testing.T) {
	dir := t.TempDir()
	p := startKeeper(t, dir)
	c := p.dial(t)
	if err := c.Hold(t.Context(), Sandbox{ID: "s1"}); err != nil {
		t.Fatal(err)
	}
	k := Key{"s1", 1}
	st, peer := newTerminal(t, dir, k)
	if err := c.Record(t.Context(), Exec{Key: k, Caps: wide, Streams: []Stream{st}, Stdin: st.Terminal}); err != nil {
		t.Fatal(err)
	}
	c.Close()
	old, err := scm.Dial(t.Context(), p.socket())
	if err != nil {
		t.Fatal(err)
	}
	defer old.Close()
	buf := make([]byte, maxMessage)
	greeting := cutFeatures(hello{version: wireVersion, dataID: "data"}.encode(kHello))
	for _, b := range [][]byte{greeting, begin(kRoster, 1).b} {
		if err := old.Send(t.Context(), b); err != nil {
			t.Fatal(err)
		}
	}
	for {
		n, files, err := old.Recv(t.Context(), buf)
		if err != nil {
			t.Fatal(err)
		}
		scm.CloseFiles(files)
		kind, _, r := open(buf[:n])
		if kind != kHeldExec {
			continue
		}
		// It reads what it knows of the message and counts the files of that.
		if m, err := decodeExec(r); err != nil || len(files) != 2*len(m.streams)+count(m.stdin, m.kill) {
			t.Errorf("%d files, %+v, %v", len(files), m, err)
		}
		break
	}
	old.Close()
	// The terminal is none the worse.
	c = p.dial(t)
	l := listen(c)
	if _, err := peer.WriteString("still"); err != nil {
		t.Fatal(err)
	}
	peer.Close()
	if e := l.wait(t, of(Closed, k)); e.Size != 5 {
		t.Errorf("size %d", e.Size)
	}
	held, err := c.Roster(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	defer CloseHeld(held)
	for _, h := range held {
		if h.Exec != nil && h.Exec.Streams[0].Terminal == nil {
			t.Error("the terminal is lost")
		}
	}
}

// BenchmarkTerminal records 64 MiB that a process writes to a terminal.
func BenchmarkTerminal(b *testing.B) {
	dir := b.TempDir()
	c := startKeeper(b, dir).dial(b)
	l := listen(c)
	if err := c.Hold(b.Context(), Sandbox{ID: "s1"}); err != nil {
		b.Fatal(err)
	}
	const total = 64 << 20
	b.SetBytes(total)
	for n := int64(1); b.Loop(); n++ {
		ch := startTerminalWriter(b, c, dir, Key{"s1", n}, total)
		l.wait(b, of(Closed, ch.exec.Key))
		if err := ch.cmd.Wait(); err != nil {
			b.Fatal(err)
		}
		if err := c.Release(b.Context(), ch.exec.Key); err != nil {
			b.Fatal(err)
		}
		os.Remove(ch.path)
	}
}
