// Package farside is a small world behind a host, for tests of what leaves it: two network namespaces of the test's own,
// one that stands for the host and one for everything else, with a capture of every packet between them.
//
// The far side has every address there is: whatever is sent out of the host reaches it, is recorded, and can be answered
// by servers that listen there. So a test need not guess where a leak would go.
package farside

import (
	"context"
	"encoding/binary"
	"errors"
	"fmt"
	"net"
	"net/netip"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/sandsea/sandsea/internal/linux/netns"
	"github.com/sandsea/sandsea/internal/linux/rawlink"
)

// The ends of the line between the two.
var (
	Host  = netip.MustParseAddr("203.0.113.1")
	Far   = netip.MustParseAddr("203.0.113.2")
	Host6 = netip.MustParseAddr("2001:db8:ff::1")
	Far6  = netip.MustParseAddr("2001:db8:ff::2")
)

// World is the two namespaces.
type World struct {
	// HostNS is the file of the host's namespace.
	HostNS string

	far  *os.File
	mu   sync.Mutex
	seen []Packet // guarded by mu
}

// Packet is one that left the host.
type Packet struct {
	At       time.Time
	From, To netip.AddrPort // port 0 where the protocol has none, and in all pieces of a packet but the first
	Protocol uint8          // of IP: 1 ICMP, 6 TCP, 17 UDP, 58 ICMPv6
	Raw      []byte         // from the IP header on
	own      bool           // the link's own talk in IPv6: who is on it, and who listens to which group
}

// New makes a world that ends with the test.
func New(t testing.TB) *World {
	t.Helper()
	dir := t.TempDir()
	w := &World{HostNS: filepath.Join(dir, "host.netns")}
	host, err := netns.Create(w.HostNS)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		host.Close()
		if err := netns.Remove(w.HostNS); err != nil {
			t.Error(err)
		}
	})
	farPath := filepath.Join(dir, "far.netns")
	if w.far, err = netns.Create(farPath); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		w.far.Close()
		if err := netns.Remove(farPath); err != nil {
			t.Error(err)
		}
	})
	in := func(ns, script string) {
		t.Helper()
		for line := range strings.Lines(script) {
			argv := append([]string{"--net=" + ns}, strings.Fields(line)...)
			if len(argv) == 1 {
				continue
			}
			if out, err := exec.CommandContext(t.Context(), "nsenter", argv...).CombinedOutput(); err != nil {
				t.Fatalf("%s: %v\n%s", line, err, out)
			}
		}
	}
	in(w.HostNS, `
		ip link set lo up
		ip link add up0 type veth peer name far0 netns `+farPath+`
		ip addr add `+Host.String()+`/30 dev up0
		ip -6 addr add `+Host6.String()+`/64 dev up0 nodad
		ip link set up0 up
		ip route add default via `+Far.String()+`
	`)
	in(farPath, `
		ip link set lo up
		ip addr add `+Far.String()+`/30 dev far0
		ip -6 addr add `+Far6.String()+`/64 dev far0 nodad
		ip link set far0 up
		ip route add local 0.0.0.0/0 dev lo
		ip route add `+Host.String()+`/32 dev far0 table local
		sysctl -q -w net.ipv6.ip_nonlocal_bind=1
		ip -6 route add local ::/0 dev lo
		ip -6 route add `+Host6.String()+`/128 dev far0 table local
	`)
	in(w.HostNS, "ip -6 route add default via "+Far6.String()+" dev up0\n")
	w.capture(t)
	return w
}

// capture records until the test ends.
func (w *World) capture(t testing.TB) {
	t.Helper()
	link, err := rawlink.Open(w.far, "far0")
	if err != nil {
		t.Fatal(err)
	}
	var wg sync.WaitGroup
	wg.Go(func() {
		buf := make([]byte, 65536)
		for {
			n, err := link.Read(buf)
			if err != nil {
				if !errors.Is(err, os.ErrClosed) {
					t.Errorf("capture: %v", err)
				}
				return
			}
			if p, ok := parse(buf[:n]); ok {
				p.At = time.Now()
				w.mu.Lock()
				w.seen = append(w.seen, p)
				w.mu.Unlock()
			}
		}
	})
	t.Cleanup(func() {
		if err := link.Close(); err != nil {
			t.Error(err)
		}
		wg.Wait()
	})
}

// parse reads an IP packet.
func parse(b []byte) (p Packet, ok bool) {
	if len(b) < 20 {
		return p, false
	}
	var src, dst netip.Addr
	var rest []byte
	switch b[0] >> 4 {
	case 4:
		head := int(b[0]&15) * 4
		if len(b) < head {
			return p, false
		}
		src, dst = netip.AddrFrom4([4]byte(b[12:16])), netip.AddrFrom4([4]byte(b[16:20]))
		p.Protocol, rest = b[9], b[head:]
	case 6:
		if len(b) < 40 {
			return p, false
		}
		src, dst = netip.AddrFrom16([16]byte(b[8:24])), netip.AddrFrom16([16]byte(b[24:40]))
		p.Protocol, rest = b[6], b[40:]
		const hopByHop = 0 // before reports of multicast listeners, RFC 3810 section 5
		if p.Protocol == hopByHop && len(rest) >= 8 {
			size := min(8+int(rest[1])*8, len(rest))
			p.Protocol, rest = rest[0], rest[size:]
		}
		p.own = p.Protocol == 58 && len(rest) > 0 && rest[0] >= 130 && rest[0] <= 143
	default:
		return p, false
	}
	var sport, dport uint16
	const pieceOffset = 0x1fff
	first := b[0]>>4 != 4 || binary.BigEndian.Uint16(b[6:8])&pieceOffset == 0
	if first && (p.Protocol == 6 || p.Protocol == 17) && len(rest) >= 4 {
		sport, dport = binary.BigEndian.Uint16(rest), binary.BigEndian.Uint16(rest[2:])
	}
	p.From, p.To, p.Raw = netip.AddrPortFrom(src, sport), netip.AddrPortFrom(dst, dport), slices.Clone(b)
	return p, true
}

// Seen are the packets so far that left the host and of which match says so, but for the link's own talk.
func (w *World) Seen(match func(Packet) bool) []Packet {
	w.mu.Lock()
	defer w.mu.Unlock()
	var out []Packet
	for _, p := range w.seen {
		if from := p.From.Addr(); from != Far && from != Far6 && !p.own && match(p) {
			out = append(out, p)
		}
	}
	return out
}

// Listen gives a TCP listener of the far side at an address, which may be any at all, or the zero Addr for all.
func (w *World) Listen(t testing.TB, at netip.AddrPort) *net.TCPListener {
	t.Helper()
	var l *net.TCPListener
	err := netns.Do(w.far, func() error {
		var err error
		l, err = net.ListenTCP("tcp", net.TCPAddrFromAddrPort(at))
		return err
	})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = l.Close() })
	return l
}

// Packets gives a UDP socket of the far side.
func (w *World) Packets(t testing.TB, at netip.AddrPort) net.PacketConn {
	t.Helper()
	var c net.PacketConn
	err := netns.Do(w.far, func() error {
		var err error
		c, err = net.ListenUDP("udp", net.UDPAddrFromAddrPort(at))
		return err
	})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = c.Close() })
	return c
}

// Dial connects from the host's side, as a process of the host would.
func (w *World) Dial(ctx context.Context, network, addr string) (net.Conn, error) {
	ns, err := netns.Open(w.HostNS)
	if err != nil {
		return nil, fmt.Errorf("host's namespace: %w", err)
	}
	defer ns.Close()
	return netns.Dial(ctx, ns, network, addr)
}
