package door_test

import (
	"errors"
	"io"
	"net"
	"net/netip"
	"syscall"
	"testing"
	"time"

	"github.com/sandsea/sandsea/internal/aether/config"
	"github.com/sandsea/sandsea/internal/aether/door"
	"github.com/sandsea/sandsea/internal/aether/flowlog"
	"github.com/sandsea/sandsea/internal/aether/roster"
	"github.com/sandsea/sandsea/internal/aether/wire"
	"github.com/sandsea/sandsea/internal/policy"
	"github.com/sandsea/sandsea/internal/testkit/wait"
)

type nowhere struct{}

func (nowhere) Add(string, flowlog.Event) {}

func TestADoorLetsSoManySandboxesIn(t *testing.T) {
	r := roster.New(roster.Config{
		Grants: func(string) policy.Grants { return nil }, Own: func(netip.Addr) bool { return false },
		Limits: config.DefaultLimits, Log: nowhere{},
	})
	ln, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	d := door.New(ln, r, 2)
	t.Cleanup(func() { d.Close() })
	in := make(chan *door.Conn, 10)
	go func() {
		for {
			c, err := d.Accept()
			if err != nil {
				return
			}
			_, _ = c.Write([]byte{1})
			in <- c.(*door.Conn)
		}
	}()
	// enters tells whether a connection from that address is let in.
	enters := func(from string) bool {
		t.Helper()
		local := &net.Dialer{LocalAddr: net.TCPAddrFromAddrPort(netip.MustParseAddrPort(from + ":0"))}
		c, err := local.Dial("tcp", ln.Addr().String())
		if err == nil {
			t.Cleanup(func() { c.Close() })
			_, err = io.ReadFull(c, make([]byte, 1))
		}
		if err != nil && !errors.Is(err, syscall.ECONNRESET) {
			t.Fatal(err)
		}
		return err == nil
	}
	if enters("127.0.0.2") {
		t.Error("who is no sandbox is let in")
	}
	for n, id := range map[byte]string{2: "two", 3: "three"} {
		if err := r.Put(wire.Sandbox{ID: id, Addr: netip.AddrFrom4([4]byte{127, 0, 0, n})}); err != nil {
			t.Fatal(err)
		}
	}
	for i, want := range []bool{true, true, false} {
		if enters("127.0.0.2") != want {
			t.Errorf("connection %d of one sandbox: not two and no more", i+1)
		}
	}
	if !enters("127.0.0.3") {
		t.Error("another sandbox is not let in")
	}
	first := <-in
	if first.Box.ID != "two" {
		t.Errorf("it is %s", first.Box.ID)
	}
	_, _ = first.Close(), first.Close()
	if !enters("127.0.0.2") || enters("127.0.0.2") {
		t.Error("one that goes makes room for one")
	}
	wait.Until(t, time.Second, func() bool { return len(in) == 3 })
}
