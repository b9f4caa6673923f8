package scm

import (
	"bytes"
	"context"
	"errors"
	"io"
	"os"
	"path/filepath"
	"strings"
	"sync"
	"testing"
	"time"

	"golang.org/x/sys/unix"
)

func pair(t *testing.T) (a, b *Conn) {
	t.Helper()
	fa, fb, err := Socketpair()
	if err != nil {
		t.Fatal(err)
	}
	conn := func(f *os.File) *Conn {
		c, err := New(f)
		if err != nil {
			t.Fatal(err)
		}
		t.Cleanup(func() { c.Close() })
		return c
	}
	return conn(fa), conn(fb)
}

func openFDs(t *testing.T) int {
	t.Helper()
	e, err := os.ReadDir("/proc/self/fd")
	if err != nil {
		t.Fatal(err)
	}
	return len(e)
}

func TestAMessageArrivesWholeWithItsFiles(t *testing.T) {
	a, b := pair(t)
	r, w, err := os.Pipe()
	if err != nil {
		t.Fatal(err)
	}
	defer r.Close()
	if err := a.Send(t.Context(), []byte("hello"), w, r); err != nil {
		t.Fatal(err)
	}
	w.Close()
	if err := a.Send(t.Context(), []byte("second")); err != nil {
		t.Fatal(err)
	}
	buf := make([]byte, 100)
	n, files, err := b.Recv(t.Context(), buf)
	if err != nil || string(buf[:n]) != "hello" || len(files) != 2 {
		t.Fatalf("got %q, %d files, %v", buf[:n], len(files), err)
	}
	defer CloseFiles(files)
	for _, f := range files {
		flags, err := unix.FcntlInt(f.Fd(), unix.F_GETFD, 0)
		if err != nil || flags&unix.FD_CLOEXEC == 0 {
			t.Errorf("received descriptor is not close-on-exec: %x %v", flags, err)
		}
	}
	if _, err := files[0].WriteString("through"); err != nil {
		t.Fatal(err)
	}
	got := make([]byte, 7)
	if _, err := io.ReadFull(r, got); err != nil || string(got) != "through" {
		t.Fatalf("got %q, %v", got, err)
	}
	if n, files, err = b.Recv(t.Context(), buf); err != nil || string(buf[:n]) != "second" || len(files) != 0 {
		t.Fatalf("got %q, %d files, %v", buf[:n], len(files), err)
	}
}

func TestACutMessageIsAnErrorAndLeaksNothing(t *testing.T) {
	a, b := pair(t)
	f, err := os.Open("/dev/null")
	if err != nil {
		t.Fatal(err)
	}
	defer f.Close()
	before := openFDs(t)
	for range 10 {
		if err := a.Send(t.Context(), bytes.Repeat([]byte("x"), 100), f, f, f); err != nil {
			t.Fatal(err)
		}
		if _, _, err := b.Recv(t.Context(), make([]byte, 10)); !errors.Is(err, ErrTruncated) {
			t.Fatalf("got %v, want ErrTruncated", err)
		}
		// Too little room for descriptors.
		if err := a.Send(t.Context(), []byte("x"), f, f, f); err != nil {
			t.Fatal(err)
		}
		rc, err := b.f.SyscallConn()
		if err != nil {
			t.Fatal(err)
		}
		var rerr error
		if err := rc.Read(func(fd uintptr) bool {
			_, _, rerr = Recvmsg(int(fd), make([]byte, 10), make([]byte, unix.CmsgSpace(8)))
			return true
		}); err != nil {
			t.Fatal(err)
		}
		if !errors.Is(rerr, ErrTruncated) {
			t.Fatalf("got %v, want ErrTruncated", rerr)
		}
	}
	if after := openFDs(t); after != before {
		t.Errorf("%d descriptors open, %d before", after, before)
	}
}

func TestTheLongestMessageCarriesAllItsFiles(t *testing.T) {
	a, b := pair(t)
	f, err := os.Open("/dev/null")
	if err != nil {
		t.Fatal(err)
	}
	defer f.Close()
	files := make([]*os.File, MaxFiles)
	for i := range files {
		files[i] = f
	}
	if err := a.Send(t.Context(), make([]byte, 64<<10), files...); err != nil {
		t.Fatal(err)
	}
	n, got, err := b.Recv(t.Context(), make([]byte, 64<<10))
	if err != nil || n != 64<<10 || len(got) != MaxFiles {
		t.Fatalf("got %d bytes, %d files, %v", n, len(got), err)
	}
	CloseFiles(got)
	if err := a.Send(t.Context(), []byte("x"), append(files, f)...); err == nil {
		t.Error("254 files were accepted")
	}
	if err := a.Send(t.Context(), nil); err == nil {
		t.Error("an empty message was accepted")
	}
}

func TestWaitingEndsWithTheContextAndTheConnStaysUsable(t *testing.T) {
	a, b := pair(t)
	ctx, cancel := context.WithTimeout(t.Context(), 10*time.Millisecond)
	defer cancel()
	if _, _, err := b.Recv(ctx, make([]byte, 10)); !errors.Is(err, context.DeadlineExceeded) {
		t.Fatalf("got %v, want DeadlineExceeded", err)
	}
	ctx2, cancel2 := context.WithTimeout(t.Context(), 50*time.Millisecond)
	defer cancel2()
	sent := 0
	var err error
	for {
		if err = a.Send(ctx2, make([]byte, 10)); err != nil {
			break
		}
		sent++
	}
	if !errors.Is(err, context.DeadlineExceeded) {
		t.Fatalf("got %v, want DeadlineExceeded", err)
	}
	for range sent {
		if _, _, err := b.Recv(t.Context(), make([]byte, 10)); err != nil {
			t.Fatal(err)
		}
	}
	if err := a.Send(t.Context(), []byte("again")); err != nil {
		t.Fatal(err)
	}
	if _, _, err := b.Recv(t.Context(), make([]byte, 10)); err != nil {
		t.Fatal(err)
	}
}

func TestTheEndIsEOFAndCloseWakesAReceiver(t *testing.T) {
	a, b := pair(t)
	if err := a.Send(t.Context(), []byte("last")); err != nil {
		t.Fatal(err)
	}
	a.Close()
	if n, _, err := b.Recv(t.Context(), make([]byte, 10)); err != nil || n != 4 {
		t.Fatalf("got %d, %v", n, err)
	}
	if _, _, err := b.Recv(t.Context(), make([]byte, 10)); !errors.Is(err, io.EOF) {
		t.Fatalf("got %v, want EOF", err)
	}
	if err := b.Send(t.Context(), []byte("x")); !errors.Is(err, unix.EPIPE) {
		t.Fatalf("got %v, want EPIPE", err)
	}
	c, _ := pair(t)
	var wg sync.WaitGroup
	wg.Go(func() {
		if _, _, err := c.Recv(context.Background(), make([]byte, 10)); !errors.Is(err, os.ErrClosed) {
			t.Errorf("got %v, want ErrClosed", err)
		}
	})
	c.Close()
	wg.Wait()
}

// TestWhatCameBeforeTheEndIsReceived: the kernel tells of the end at once, with messages in the queue, to a receiver that
// left messages unread at the other end, and by chance to one that asks at that moment.
func TestWhatCameBeforeTheEndIsReceived(t *testing.T) {
	buf := make([]byte, 100)
	receive := func(t *testing.T, c *Conn, want ...string) {
		t.Helper()
		for _, w := range want {
			if n, _, err := c.Recv(t.Context(), buf); err != nil || string(buf[:n]) != w {
				t.Fatalf("got %q, %v, want %q", buf[:n], err, w)
			}
		}
		if _, _, err := c.Recv(t.Context(), buf); !errors.Is(err, io.EOF) {
			t.Fatalf("after the last: %v", err)
		}
	}
	t.Run("unread at the other end", func(t *testing.T) {
		a, b := pair(t)
		for c, words := range map[*Conn][]string{a: {"one", "two"}, b: {"unread"}} {
			for _, w := range words {
				if err := c.Send(t.Context(), []byte(w)); err != nil {
					t.Fatal(err)
				}
			}
		}
		_ = a.Close()
		receive(t, b, "one", "two")
	})
	t.Run("at that moment", func(t *testing.T) {
		for range 5000 {
			a, b := pair(t)
			go func() {
				_ = a.Send(t.Context(), []byte("last")) // what else comes of it is what the receiver finds
				_ = a.Close()
			}()
			receive(t, b, "last")
			_ = b.Close()
		}
	})
}

func TestListenReplacesADeadSocketButNotALivingOne(t *testing.T) {
	for _, name := range []string{"s", strings.Repeat("long/", 30) + "s"} {
		path := filepath.Join(t.TempDir(), name)
		if err := os.MkdirAll(filepath.Dir(path), 0o700); err != nil {
			t.Fatal(err)
		}
		l, err := Listen(path)
		if err != nil {
			t.Fatal(err)
		}
		if fi, err := os.Stat(path); err != nil || fi.Mode().Perm() != 0o600 {
			t.Errorf("mode %v, %v", fi.Mode(), err)
		}
		if _, err := Listen(path); !errors.Is(err, unix.EADDRINUSE) {
			t.Fatalf("got %v, want EADDRINUSE", err)
		}
		// The attempt above left a connection that is closed already.
		if c, err := l.Accept(t.Context()); err != nil {
			t.Fatal(err)
		} else {
			c.Close()
		}
		l.c.f.Close() // as a kill would
		l, err = Listen(path)
		if err != nil {
			t.Fatal(err)
		}
		c, err := Dial(t.Context(), path)
		if err != nil {
			t.Fatal(err)
		}
		s, err := l.Accept(t.Context())
		if err != nil {
			t.Fatal(err)
		}
		for _, end := range []*Conn{c, s} {
			cred, err := end.Peer()
			if err != nil || cred.Pid != os.Getpid() || cred.UID != uint32(os.Geteuid()) {
				t.Errorf("peer %+v, %v", cred, err)
			}
			p, err := end.PeerPidfd()
			if err != nil {
				t.Error(err)
				continue
			}
			p.Close()
		}
		ctx, cancel := context.WithTimeout(t.Context(), 5*time.Millisecond)
		if _, err := l.Accept(ctx); !errors.Is(err, context.DeadlineExceeded) {
			t.Errorf("got %v, want DeadlineExceeded", err)
		}
		cancel()
		c.Close()
		s.Close()
		if err := l.Close(); err != nil {
			t.Fatal(err)
		}
		if _, err := Dial(t.Context(), path); !errors.Is(err, unix.ENOENT) {
			t.Errorf("got %v, want ENOENT", err)
		}
	}
}

func TestNewRefusesWhatIsNoSeqpacketSocket(t *testing.T) {
	f, err := os.Open("/dev/null")
	if err != nil {
		t.Fatal(err)
	}
	if _, err := New(f); err == nil {
		t.Error("/dev/null became a Conn")
	}
	if f.Close() == nil {
		t.Error("New did not take the file over")
	}
}
