package netns

import (
	"context"
	"errors"
	"io"
	"net"
	"net/netip"
	"os"
	"path/filepath"
	"sync"
	"syscall"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/sandsea/sandsea/internal/testkit/leak"
	"github.com/sandsea/sandsea/internal/testkit/require"
)

func TestMain(m *testing.M) { os.Exit(leak.Main(m)) }

// fresh is a namespace with loopback up.
func fresh(t *testing.T) *os.File {
	t.Helper()
	require.Root(t)
	ns, err := New()
	require.That(t, "netns", err)
	t.Cleanup(func() { ns.Close() })
	if err := Do(ns, func() error {
		fd, err := unix.Socket(unix.AF_INET, unix.SOCK_DGRAM|unix.SOCK_CLOEXEC, 0)
		if err != nil {
			return err
		}
		defer unix.Close(fd)
		r, err := unix.NewIfreq("lo")
		if err != nil {
			return err
		}
		r.SetUint16(unix.IFF_UP)
		return unix.IoctlIfreq(fd, unix.SIOCSIFFLAGS, r)
	}); err != nil {
		t.Fatal(err)
	}
	return ns
}

func here(t *testing.T) string {
	t.Helper()
	s, err := os.Readlink("/proc/thread-self/ns/net")
	if err != nil {
		t.Error(err)
	}
	return s
}

func TestDoComesBack(t *testing.T) {
	ns := fresh(t)
	home := here(t)
	failed := errors.New("failed")
	var all sync.WaitGroup
	for i := range 8 {
		all.Go(func() {
			for range 50 {
				want := error(nil)
				if i%2 == 1 {
					want = failed
				}
				if err := Do(ns, func() error {
					if here(t) == home {
						t.Error("not inside")
					}
					return want
				}); !errors.Is(err, want) {
					t.Error(err)
				}
				if got := here(t); got != home {
					t.Errorf("came back to %s, not %s", got, home)
				}
			}
		})
	}
	all.Wait()
}

func TestDoDoesNotRunOutside(t *testing.T) {
	require.Root(t)
	f, err := os.Open("/dev/null")
	if err != nil {
		t.Fatal(err)
	}
	defer f.Close()
	if err := Do(f, func() error { t.Error("ran"); return nil }); !errors.Is(err, unix.EINVAL) {
		t.Errorf("got %v", err)
	}
}

func TestANamespaceIsKeptByItsFile(t *testing.T) {
	require.Root(t)
	dir := t.TempDir()
	leak.Check(t, dir)
	path := filepath.Join(dir, "gate")
	made, err := Create(path)
	require.That(t, "netns", err)
	if _, err := Create(path); !errors.Is(err, os.ErrExist) {
		t.Errorf("made twice: %v", err)
	}
	if err := made.Close(); err != nil {
		t.Fatal(err)
	}
	made, err = Open(path)
	if err != nil {
		t.Fatal(err)
	}
	defer made.Close()
	again, err := Open(path)
	if err != nil {
		t.Fatal(err)
	}
	defer again.Close()
	if same, err := Same(made, again); err != nil || !same {
		t.Errorf("%v, %v", same, err)
	}
	own, err := OfProcess(os.Getpid())
	if err != nil {
		t.Fatal(err)
	}
	defer own.Close()
	if same, err := Same(made, own); err != nil || same {
		t.Errorf("%v, %v", same, err)
	}
	for range 2 {
		if err := Remove(path); err != nil {
			t.Fatal(err)
		}
		if _, err := Open(path); !errors.Is(err, os.ErrNotExist) {
			t.Errorf("removed: %v", err)
		}
	}
}

func TestOpenTellsWhatIsNoNamespace(t *testing.T) {
	require.Root(t)
	path := filepath.Join(t.TempDir(), "file")
	if err := os.WriteFile(path, nil, 0o600); err != nil {
		t.Fatal(err)
	}
	for _, p := range []string{path, "/proc/self/ns/mnt", "/proc/self/status", "/dev/null"} {
		if f, err := Open(p); !errors.Is(err, ErrNone) {
			t.Errorf("%s: %v, %v", p, f, err)
		}
	}
	if err := Remove(path); err != nil {
		t.Error(err)
	}
}

func TestDialIsInside(t *testing.T) {
	ns := fresh(t)
	var l *net.TCPListener
	f, err := Socket(ns, unix.AF_INET, unix.SOCK_STREAM, 0)
	if err != nil {
		t.Fatal(err)
	}
	if err := control(f, func(fd int) error {
		return errors.Join(unix.Bind(fd, &unix.SockaddrInet4{Addr: [4]byte{127, 0, 0, 1}}), unix.Listen(fd, 8))
	}); err != nil {
		t.Fatal(err)
	}
	x, err := net.FileListener(f)
	f.Close()
	if err != nil {
		t.Fatal(err)
	}
	l = x.(*net.TCPListener)
	defer l.Close()
	at := l.Addr().String()
	if c, err := net.Dial("tcp", at); err == nil {
		c.Close()
		t.Fatal("the port is outside too")
	}
	c, err := Dial(t.Context(), ns, "tcp", at)
	if err != nil {
		t.Fatal(err)
	}
	defer c.Close()
	s, err := l.Accept()
	if err != nil {
		t.Fatal(err)
	}
	_, _ = io.WriteString(s, "hello")
	s.Close()
	if b, err := io.ReadAll(c); err != nil || string(b) != "hello" {
		t.Errorf("%q, %v", b, err)
	}
	u, err := Dial(t.Context(), ns, "udp", at)
	if err != nil {
		t.Fatal(err)
	}
	u.Close()
}

func TestDialFails(t *testing.T) {
	ns := fresh(t)
	for _, c := range []struct {
		network, addr string
		want          error
	}{
		{"tcp", "127.0.0.1:9", syscall.ECONNREFUSED},
		{"tcp", "[::1]:9", syscall.ECONNREFUSED},
		{"tcp", "192.0.2.1:9", syscall.ENETUNREACH},
		{"tcp4", "127.0.0.1:9", net.UnknownNetworkError("tcp4")},
		{"tcp", "localhost:9", nil},
		{"tcp", "127.0.0.1", nil},
	} {
		conn, err := Dial(t.Context(), ns, c.network, c.addr)
		if err == nil {
			conn.Close()
			t.Errorf("%s %s: connected", c.network, c.addr)
			continue
		}
		if c.want != nil && !errors.Is(err, c.want) {
			t.Errorf("%s %s: %v, want %v", c.network, c.addr, err, c.want)
		}
		if _, ok := errors.AsType[*net.OpError](err); !ok {
			t.Errorf("%s %s: a %T", c.network, c.addr, err)
		}
	}
}

func TestDialWaitsNoLongerThanItMay(t *testing.T) {
	ns := fresh(t)
	// A listener that accepts nobody and has no place for more.
	f, err := Socket(ns, unix.AF_INET, unix.SOCK_STREAM, 0)
	if err != nil {
		t.Fatal(err)
	}
	defer f.Close()
	var at netip.AddrPort
	if err := control(f, func(fd int) error {
		if err := errors.Join(unix.Bind(fd, &unix.SockaddrInet4{Addr: [4]byte{127, 0, 0, 1}}), unix.Listen(fd, 0)); err != nil {
			return err
		}
		sa, err := unix.Getsockname(fd)
		if err == nil {
			v4 := sa.(*unix.SockaddrInet4)
			at = netip.AddrPortFrom(netip.AddrFrom4(v4.Addr), uint16(v4.Port))
		}
		return err
	}); err != nil {
		t.Fatal(err)
	}
	first, err := Dial(t.Context(), ns, "tcp", at.String())
	if err != nil {
		t.Fatal(err)
	}
	defer first.Close()
	cause := errors.New("waited enough")
	ctx, stop := context.WithTimeoutCause(t.Context(), 20*time.Millisecond, cause)
	defer stop()
	if c, err := Dial(ctx, ns, "tcp", at.String()); !errors.Is(err, cause) {
		t.Errorf("%v, %v", c, err)
	}
}
