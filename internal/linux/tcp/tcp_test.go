package tcp

import (
	"errors"
	"net"
	"os"
	"syscall"
	"testing"
	"time"

	"github.com/vishvananda/netlink"

	"github.com/sandsea/sandsea/internal/linux/netns"
	"github.com/sandsea/sandsea/internal/testkit/leak"
	"github.com/sandsea/sandsea/internal/testkit/require"
)

func TestMain(m *testing.M) { os.Exit(leak.Main(m)) }

// TestALineThatTakesNothingBreaks cuts a line without a word to either end.
func TestALineThatTakesNothingBreaks(t *testing.T) {
	require.Root(t)
	ns, err := netns.New()
	if err != nil {
		t.Fatal(err)
	}
	defer ns.Close()
	lo := func(set func(netlink.Link) error) error {
		link, err := netlink.LinkByName("lo")
		if err != nil {
			return err
		}
		return set(link)
	}
	var near, far net.Conn
	if err := netns.Do(ns, func() error {
		if err := lo(netlink.LinkSetUp); err != nil {
			return err
		}
		ln, err := net.Listen("tcp", "127.0.0.1:0")
		if err != nil {
			return err
		}
		defer ln.Close()
		d := net.Dialer{Control: func(_, _ string, c syscall.RawConn) error { return GiveUp(c, time.Second) }}
		if near, err = d.DialContext(t.Context(), "tcp", ln.Addr().String()); err != nil {
			return err
		}
		far, err = ln.Accept()
		return errors.Join(err, lo(netlink.LinkSetDown))
	}); err != nil {
		t.Fatal(err)
	}
	defer near.Close()
	defer far.Close()
	if _, err := near.Write([]byte("x")); err != nil {
		t.Fatal(err)
	}
	if err := near.SetReadDeadline(time.Now().Add(20 * time.Second)); err != nil {
		t.Fatal(err)
	}
	if _, err := near.Read(make([]byte, 1)); !errors.Is(err, syscall.ETIMEDOUT) {
		t.Errorf("%v, want %v", err, syscall.ETIMEDOUT)
	}
}
