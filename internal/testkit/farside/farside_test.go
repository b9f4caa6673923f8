package farside_test

import (
	"context"
	"io"
	"net/netip"
	"testing"
	"time"

	"github.com/sandsea/sandsea/internal/testkit/farside"
	"github.com/sandsea/sandsea/internal/testkit/require"
	"github.com/sandsea/sandsea/internal/testkit/wait"
)

const limit = 20 * time.Second

func TestWhateverLeavesTheHostIsSeenAndAnswered(t *testing.T) {
	require.Root(t)
	w := farside.New(t)
	ctx, stop := context.WithTimeout(t.Context(), limit)
	defer stop()
	for _, to := range []string{"198.51.100.7:443", "169.254.169.254:80", "[2001:db8:1::5]:22"} {
		at := netip.MustParseAddrPort(to)
		l := w.Listen(t, at)
		go func() {
			c, err := l.Accept()
			if err == nil {
				_, _ = c.Write([]byte("hello"))
				_ = c.Close()
			}
		}()
		c, err := w.Dial(ctx, "tcp", to)
		if err != nil {
			t.Fatalf("%s: %v", to, err)
		}
		b, err := io.ReadAll(c)
		_ = c.Close()
		if string(b) != "hello" || err != nil {
			t.Errorf("%s answered %q, %v", to, b, err)
		}
		if !wait.For(limit, func() bool {
			return len(w.Seen(func(p farside.Packet) bool { return p.To == at && p.Protocol == 6 })) > 0
		}) {
			t.Errorf("no packet to %s was captured", to)
		}
	}
	at := netip.MustParseAddrPort("192.0.2.1:9999")
	if c, err := w.Dial(ctx, "udp", at.String()); err == nil {
		_, _ = c.Write([]byte("x"))
		_ = c.Close()
	}
	if !wait.For(limit, func() bool {
		return len(w.Seen(func(p farside.Packet) bool { return p.To == at && p.Protocol == 17 })) == 1
	}) {
		t.Error("a datagram to nobody was not captured")
	}
}
