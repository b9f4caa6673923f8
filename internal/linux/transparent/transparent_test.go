package transparent

import (
	"io"
	"net"
	"net/netip"
	"os"
	"testing"

	"github.com/vishvananda/netlink"
	"golang.org/x/sys/unix"

	"github.com/sandsea/sandsea/internal/linux/netns"
	"github.com/sandsea/sandsea/internal/testkit/leak"
	"github.com/sandsea/sandsea/internal/testkit/require"
)

func TestMain(m *testing.M) { os.Exit(leak.Main(m)) }

// space is a namespace in which every address is its own.
func space(t *testing.T) *os.File {
	t.Helper()
	require.Root(t)
	ns, err := netns.New()
	require.That(t, "netns", err)
	t.Cleanup(func() { ns.Close() })
	if err := netns.Do(ns, func() error {
		lo := &netlink.Device{LinkAttrs: netlink.LinkAttrs{Name: "lo", Index: 1}}
		if err := netlink.LinkSetUp(lo); err != nil {
			return err
		}
		_, all, _ := net.ParseCIDR("203.0.113.0/24")
		return netlink.RouteAdd(&netlink.Route{LinkIndex: 1, Dst: all, Type: unix.RTN_LOCAL, Table: unix.RT_TABLE_LOCAL, Scope: unix.RT_SCOPE_HOST})
	}); err != nil {
		t.Fatal(err)
	}
	return ns
}

func TestAForeignAddressCanBeListenedAt(t *testing.T) {
	ns := space(t)
	at := netip.MustParseAddrPort("203.0.113.9:443")
	l, err := Listen(ns, at)
	if err != nil {
		t.Fatal(err)
	}
	defer l.Close()
	c, err := netns.Dial(t.Context(), ns, "tcp", at.String())
	if err != nil {
		t.Fatal(err)
	}
	defer c.Close()
	s, err := l.Accept()
	if err != nil {
		t.Fatal(err)
	}
	if got := s.LocalAddr().String(); got != at.String() {
		t.Errorf("dialled %s, arrived as %s", at, got)
	}
	_, _ = io.WriteString(s, "hello")
	s.Close()
	if b, err := io.ReadAll(c); err != nil || string(b) != "hello" {
		t.Errorf("%q, %v", b, err)
	}
}

func TestADatagramComesWithItsDestination(t *testing.T) {
	ns := space(t)
	l, err := ListenPacket(ns, netip.MustParseAddrPort("0.0.0.0:53"))
	if err != nil {
		t.Fatal(err)
	}
	defer l.Close()
	for _, to := range []string{"203.0.113.1:53", "203.0.113.200:53"} {
		c, err := netns.Dial(t.Context(), ns, "udp", to)
		if err != nil {
			t.Fatal(err)
		}
		defer c.Close()
		if _, err := c.Write([]byte("question")); err != nil {
			t.Fatal(err)
		}
		buf := make([]byte, 100)
		n, from, at, err := ReadFrom(l, buf)
		if err != nil || string(buf[:n]) != "question" || from.String() != c.LocalAddr().String() || at.String() != to {
			t.Fatalf("%q from %s to %s, %v", buf[:n], from, at, err)
		}
	}
}

func TestAForeignAddressCanBeSentFromByMany(t *testing.T) {
	ns := space(t)
	for range 2 {
		f, err := Foreign(ns, netip.MustParseAddrPort("198.51.100.7:53"))
		if err != nil {
			t.Fatal(err)
		}
		defer f.Close()
	}
	if f, err := Foreign(ns, netip.MustParseAddrPort("[2001:db8::1]:53")); err == nil {
		f.Close()
		t.Error("an IPv6 address")
	}
}

func TestNothingWithoutTheDestination(t *testing.T) {
	if at, err := Destination(nil); err == nil {
		t.Errorf("got %s of nothing", at)
	}
}

// FuzzDestination: whatever the bytes are, it returns.
func FuzzDestination(f *testing.F) {
	f.Add([]byte{})
	f.Add([]byte{32, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 20, 0, 0, 0, 2, 0, 0, 53, 203, 0, 113, 9, 0, 0, 0, 0, 0, 0, 0, 0})
	f.Add([]byte{17, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 20, 0, 0, 0, 2})
	f.Fuzz(func(t *testing.T, b []byte) {
		if at, err := Destination(b); err == nil && !at.Addr().Is4() {
			t.Errorf("%x: %s", b, at)
		}
	})
}
