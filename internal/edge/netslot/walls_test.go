package netslot

import (
	"encoding/binary"
	"errors"
	"fmt"
	"net/netip"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/google/nftables"
	"golang.org/x/sys/unix"

	"github.com/sandsea/sandsea/api/errdefs"
	"github.com/sandsea/sandsea/internal/aether/wire"
	"github.com/sandsea/sandsea/internal/linux/cgroupbpf"
	"github.com/sandsea/sandsea/internal/linux/netns"
	"github.com/sandsea/sandsea/internal/policy"
	"github.com/sandsea/sandsea/internal/testkit/leak"
)

// unseen is a box that no program sees, so that only the gate's rules judge it.
func (s *station) unseen(g *Gate) *box {
	s.t.Helper()
	dir := filepath.Join(filepath.Dir(s.cfg.Cgroup), "sandsea-"+leak.Tag())
	if err := os.Mkdir(dir, 0o755); err != nil {
		s.t.Fatal(err)
	}
	s.t.Cleanup(func() { s.rmdir(dir) })
	b := s.box(dir)
	var err error
	if b.slot, err = g.Attach(s.t.Context(), b.ns, b.name, b.id); err != nil {
		s.t.Fatal(err)
	}
	return b
}

func TestTheGateAloneRefusesTheSame(t *testing.T) {
	s := newStation(t)
	g := s.gate()
	p := newProxy(t, g)
	a, other := s.unseen(g), s.attached(g)
	const filtered = "EHOSTUNREACH" // ICMP: communication administratively prohibited
	tests := []struct {
		how, to string
		want    [3]string // closed, names, openings
	}{
		{"tcp", "100.64.0.1:80", [3]string{no, "tcp", no}},
		{"tcp", "100.64.0.1:22", [3]string{no, no, no}},
		{"tcp", "100.64.0.1:7001", [3]string{no, no, no}},
		{"connected udp", "100.64.0.1:53", [3]string{filtered, "udp", filtered}},
		{"connected udp", "100.64.0.1:7001", [3]string{filtered, filtered, filtered}},
		{"tcp", "198.18.0.1:443", [3]string{no, "tcp", no}},
		{"tcp", "198.20.0.1:443", [3]string{no, no, no}},
		{"connected udp", "198.18.0.1:443", [3]string{filtered, "udp", filtered}},
		{"tcp", "10.1.2.3:80", [3]string{no, no, "tcp"}},
		{"tcp", "10.1.2.3:443", [3]string{no, no, "tcp"}},
		{"tcp", "10.1.3.3:443", [3]string{no, no, no}},
		{"tcp", "10.1.2.3:91", [3]string{no, no, no}},
		{"tcp", "10.2.0.0:80", [3]string{no, no, no}},
		{"connected udp", "10.1.2.3:53", [3]string{filtered, filtered, "udp"}},
		{"connected udp", "10.1.2.3:80", [3]string{filtered, filtered, filtered}},
		{"tcp", "203.0.113.7:22", [3]string{no, no, "tcp"}},
		{"tcp", "203.0.113.8:22", [3]string{no, no, no}},
		{"tcp", other.slot.Addr().String() + ":80", [3]string{no, no, no}},
		{"connected udp", other.slot.Addr().String() + ":80", [3]string{filtered, filtered, filtered}},
		{"tcp", "8.8.8.8:53", [3]string{no, no, no}},
		{"connected udp", "8.8.8.8:53", [3]string{filtered, filtered, filtered}},
		{"tcp", "169.254.169.254:80", [3]string{no, no, no}},
		{"tcp", "[2001:db8::1]:80", [3]string{no6, no6, no6}},
		{"tcp", "[::ffff:8.8.8.8]:80", [3]string{no, no, no}},
	}
	for i, w := range []policy.Walls{closed, named, openings} {
		if err := a.slot.Set(w); err != nil {
			t.Fatal(err)
		}
		for _, c := range tests {
			t.Run(fmt.Sprintf("%s %s %d", c.how, c.to, i), func(t *testing.T) {
				to := netip.MustParseAddrPort(c.to)
				want := c.want[i]
				got, seen := a.do(request(t, c.how, to)), p.take()
				if want == "tcp" || want == "udp" {
					if got != want+" "+to.String() || len(seen) != 1 {
						t.Errorf("got %q, and the far side saw %q", got, seen)
					}
				} else if got != want || len(seen) > 0 {
					t.Errorf("got %q, want %q; the far side saw %q", got, want, seen)
				}
			})
		}
	}
}

func TestProgramsAloneRefuse(t *testing.T) {
	s := newStation(t)
	g := s.gate()
	p := newProxy(t, g)
	a := s.attached(g)
	_, boxes, err := compile(openings.Openings)
	if err != nil {
		t.Fatal(err)
	}
	// The gate is open, the programs are not.
	if err := g.table.Put(a.slot.Addr(), true, boxes); err != nil {
		t.Fatal(err)
	}
	for _, to := range []string{"198.18.0.1:443", "10.1.2.3:80", "100.64.0.1:53"} {
		if got := a.tcp(to); got != no {
			t.Errorf("TCP to %s: %q", to, got)
		}
		if got := a.udp(to); got != no {
			t.Errorf("UDP to %s: %q", to, got)
		}
	}
	if seen := p.take(); len(seen) > 0 {
		t.Errorf("the far side saw %q", seen)
	}
}

// packets that the kernel has received on a device of a namespace.
func received(t testing.TB, ns *os.File, device string) string {
	t.Helper()
	var line string
	err := netns.Do(ns, func() error {
		b, err := os.ReadFile("/proc/thread-self/net/dev")
		for l := range strings.Lines(string(b)) {
			if f := strings.Fields(l); len(f) > 2 && f[0] == device+":" {
				line = f[2]
			}
		}
		return err
	})
	if err != nil || line == "" {
		t.Fatalf("counters of %s: %q, %v", device, line, err)
	}
	return line
}

func TestForgedPacketsReachNobody(t *testing.T) {
	s := newStation(t)
	g := s.gate()
	p := newProxy(t, g)
	// Both may do all there is; a has every capability in its namespace and no program that looks.
	a, b := s.unseen(g), s.attached(g)
	all := policy.Walls{Names: true, Openings: openings.Openings}
	for _, x := range []*box{a, b} {
		if err := x.slot.Set(all); err != nil {
			t.Fatal(err)
		}
	}
	before := received(t, b.ns, "eth0")
	victim, self := b.slot.Addr(), a.slot.Addr()
	name := netip.MustParseAddr("198.18.0.1")
	elsewhere := netip.MustParseAddr("10.9.9.9")
	hardware := func(x netip.Addr) []byte { return append([]byte{0x02, 0x5f}, x.AsSlice()...) }
	gate := []byte{0x02, 0x5e, 0, 0, 0, 1}
	frames := map[string][]byte{
		"the victim's address":      packet(gate, victim, name, 17, 0),
		"an address of nobody":      packet(gate, elsewhere, name, 17, 0),
		"loopback":                  packet(gate, netip.MustParseAddr("127.0.0.1"), netip.MustParseAddr("127.0.0.1"), 17, 0),
		"the gateway's address":     packet(gate, wire.Gateway, name, 17, 0),
		"no address":                packet(gate, netip.IPv4Unspecified(), name, 17, 0),
		"for the victim":            packet(gate, self, victim, 17, 0),
		"for its hardware address":  packet(hardware(victim), self, victim, 17, 0),
		"for all":                   packet([]byte{255, 255, 255, 255, 255, 255}, self, netip.MustParseAddr("255.255.255.255"), 17, 0),
		"for a group":               packet([]byte{1, 0, 0x5e, 0, 0, 251}, self, netip.MustParseAddr("224.0.0.251"), 17, 0),
		"for the gate's loopback":   packet(gate, self, netip.MustParseAddr("127.0.0.1"), 17, 0),
		"a fragment":                packet(gate, self, name, 17, 185),
		"the first of fragments":    packet(gate, self, name, 17, 0x2000),
		"ICMP":                      packet(gate, self, name, 1, 0),
		"GRE":                       packet(gate, self, name, 47, 0),
		"IP in IP":                  packet(gate, self, name, 4, 0),
		"IPv6 in IP":                packet(gate, self, name, 41, 0),
		"SCTP":                      packet(gate, self, name, 132, 0),
		"ICMP for the gateway":      packet(gate, self, wire.Gateway, 1, 0),
		"ARP of the victim":         arp(self, victim),
		"ARP that tells a lie":      arp(victim, self),
		"IPv6":                      ether(gate, 0x86dd, append([]byte{0x60, 0, 0, 0, 0, 8, 17, 64}, make([]byte, 40)...)),
		"IPv6 neighbours":           ether([]byte{0x33, 0x33, 0, 0, 0, 1}, 0x86dd, append([]byte{0x60, 0, 0, 0, 0, 8, 58, 255}, make([]byte, 40)...)),
		"a VLAN":                    ether(gate, 0x8100, append([]byte{0, 1, 8, 0}, make([]byte, 40)...)),
		"MPLS":                      ether(gate, 0x8847, make([]byte, 40)),
		"a protocol of nobody":      ether(gate, 0x88b5, make([]byte, 40)),
		"a header that is too long": ether(gate, 0x0800, append([]byte{0x4f, 0, 0, 28}, make([]byte, 24)...)),
		"nothing":                   ether(gate, 0x0800, nil),
	}
	for what, f := range frames {
		if got := a.do(ask{Op: "frame", Frame: f}); got != "ok" {
			t.Fatalf("%s: %s", what, got)
		}
	}
	// A socket with a foreign source, as root of the namespace can have it.
	for _, from := range []netip.Addr{victim, elsewhere} {
		a.do(ask{Op: "send", Family: unix.AF_INET, Type: unix.SOCK_DGRAM, To: netip.AddrPortFrom(name, 53), From: from})
		a.do(ask{Op: "dial", Family: unix.AF_INET, Type: unix.SOCK_STREAM, To: netip.AddrPortFrom(name, 53), From: from})
	}
	// A link keeps the order: what comes through after them shows that they have been judged.
	if got := a.udp("198.18.0.1:99"); got != "udp 198.18.0.1:99" {
		t.Fatal(got)
	}
	if seen, want := p.take(), []string{fmt.Sprintf("udp %s > 198.18.0.1:99", self)}; !slices.Equal(seen, want) {
		t.Errorf("the far side saw %q, want %q", seen, want)
	}
	if after := received(t, b.ns, "eth0"); after != before {
		t.Errorf("the other sandbox received %s packets, before it were %s", after, before)
	}
}

func ether(to []byte, kind uint16, body []byte) []byte {
	f := append(slices.Clone(to), 0x02, 0x5f, 1, 2, 3, 4)
	return append(binary.BigEndian.AppendUint16(f, kind), body...)
}

// packet is an IPv4 packet with 8 bytes for port 53.
func packet(hardware []byte, from, to netip.Addr, protocol byte, fragment uint16) []byte {
	h := []byte{0x45, 0, 0, 28, 0x12, 0x34, byte(fragment >> 8), byte(fragment), 64, protocol, 0, 0}
	h = append(append(h, from.AsSlice()...), to.AsSlice()...)
	sum := uint32(0)
	for i := 0; i < len(h); i += 2 {
		sum += uint32(h[i])<<8 | uint32(h[i+1])
	}
	for sum > 0xffff {
		sum = sum>>16 + sum&0xffff
	}
	binary.BigEndian.PutUint16(h[10:], ^uint16(sum))
	return ether(hardware, 0x0800, append(h, 0x30, 0x39, 0, 53, 0, 8, 0, 0))
}

// arp asks for one address in the name of another.
func arp(from, to netip.Addr) []byte {
	b := []byte{0, 1, 8, 0, 6, 4, 0, 1, 0x02, 0x5f, 1, 2, 3, 4}
	b = append(append(b, from.AsSlice()...), 0, 0, 0, 0, 0, 0)
	return ether([]byte{255, 255, 255, 255, 255, 255}, 0x0806, append(b, to.AsSlice()...))
}

func TestWallsChangeUnderALiveFlow(t *testing.T) {
	s := newStation(t)
	g := s.gate()
	p := newProxy(t, g)
	a := s.attached(g)
	if err := a.slot.Set(named); err != nil {
		t.Fatal(err)
	}
	to := netip.MustParseAddrPort(fmt.Sprintf("198.18.0.1:%d", echoPort))
	hold := ask{Op: "hold", Family: unix.AF_INET, Type: unix.SOCK_STREAM, To: to}
	for _, then := range []policy.Walls{closed, openings} {
		if err := a.slot.Set(named); err != nil {
			t.Fatal(err)
		}
		if got := a.do(hold); got != "ok" {
			t.Fatal(got)
		}
		if got := a.do(ask{Op: "use"}); got != "x" {
			t.Fatalf("over an open wall came %q", got)
		}
		if err := a.slot.Set(then); err != nil {
			t.Fatal(err)
		}
		if got := a.tcp("198.18.0.1:443"); got != no {
			t.Errorf("a new connection after closing: %q", got)
		}
		// Bytes of the old one stay here; its end is heard at once, although nothing else comes in.
		p.cut(t)
		if got := a.do(ask{Op: "hear"}); got != "ECONNRESET" {
			t.Errorf("the old connection: %q", got)
		}
	}
	if err := a.slot.Set(named); err != nil {
		t.Fatal(err)
	}
	if got := a.tcp("198.18.0.1:443"); got != "tcp 198.18.0.1:443" {
		t.Errorf("after opening again: %q", got)
	}
}

func TestLargeDatagramsPass(t *testing.T) {
	s := newStation(t)
	g := s.gate()
	newProxy(t, g)
	a := s.attached(g)
	if err := a.slot.Set(named); err != nil {
		t.Fatal(err)
	}
	r := ask{Op: "large", Family: unix.AF_INET, Type: unix.SOCK_DGRAM, To: netip.MustParseAddrPort("198.18.0.1:443")}
	if got := a.do(r); got != "udp 198.18.0.1:443" {
		t.Error(got)
	}
}

func TestWithoutAProxyEverythingIsRefused(t *testing.T) {
	s := newStation(t)
	g := s.gate()
	a := s.attached(g)
	if err := a.slot.Set(policy.Walls{Names: true, Openings: openings.Openings}); err != nil {
		t.Fatal(err)
	}
	for _, to := range []string{"198.18.0.1:443", "10.1.2.3:80", "100.64.0.1:53"} {
		if got := a.tcp(to); got != no {
			t.Errorf("TCP to %s: %q", to, got)
		}
		r := request(t, "connected udp", netip.MustParseAddrPort(to))
		if got := a.do(r); got != no && got != "EHOSTUNREACH" {
			t.Errorf("UDP to %s: %q", to, got)
		}
	}
}

func TestAnUnknownGroupHasLoopbackOnlyAndAnExemptOneAll(t *testing.T) {
	s := newStation(t)
	g := s.gate()
	a := s.box("")
	port := a.do(ask{Op: "serve", To: netip.MustParseAddrPort("127.0.0.1:0")})
	if got := a.tcp("127.0.0.1:" + port); got != "inside" {
		t.Errorf("loopback: %q", got)
	}
	for _, how := range []string{"tcp", "udp", "connected udp"} {
		if got := a.do(request(t, how, netip.MustParseAddrPort("198.18.0.1:443"))); got != no {
			t.Errorf("%s: %q", how, got)
		}
	}
	if err := g.Exempt(filepath.Join(s.cfg.Cgroup, a.name)); err != nil {
		t.Fatal(err)
	}
	// There is nothing in its namespace, which the kernel itself says.
	if got := a.tcp("198.18.0.1:443"); got != no6 {
		t.Errorf("exempt: %q", got)
	}
	if got := a.do(ask{Op: "socket", Family: unix.AF_INET, Type: unix.SOCK_RAW, Kind: unix.IPPROTO_ICMP}); got != "ok" {
		t.Errorf("exempt: %q", got)
	}
	if err := g.Exempt(s.cfg.Dir); err == nil {
		t.Error("a directory that is no control group is exempt")
	}
}

func TestWallsChangeFromManySides(t *testing.T) {
	s := newStation(t)
	g := s.gate()
	newProxy(t, g)
	boxes := []*box{s.attached(g), s.attached(g), s.attached(g)}
	choice := []policy.Walls{closed, named, openings, {Names: true, Openings: openings.Openings[:1]}}
	var sets sync.WaitGroup
	for i := range 8 {
		sets.Go(func() {
			for j := range 40 {
				if err := boxes[(i+j)%3].slot.Set(choice[(i*j)%4]); err != nil {
					t.Error(err)
				}
			}
		})
	}
	sets.Wait()
	want := map[string][3]string{
		"198.18.0.1:443": {no, "tcp 198.18.0.1:443", no}, "10.1.2.3:80": {no, no, "tcp 10.1.2.3:80"},
	}
	for i, b := range boxes {
		if err := b.slot.Set(choice[i]); err != nil {
			t.Fatal(err)
		}
		for to, w := range want {
			if got := b.tcp(to); got != w[i] {
				t.Errorf("box %d to %s: %q, want %q", i, to, got, w[i])
			}
		}
	}
	if groups, open, err := g.wall.Size(); err != nil || groups != 3 || open != 3 {
		t.Errorf("%d groups with %d openings, %v", groups, open, err)
	}
}

func TestTooManyRangesAreRefusedAndNothingChanges(t *testing.T) {
	s := newStation(t)
	g := s.gate()
	newProxy(t, g)
	a := s.attached(g)
	if err := a.slot.Set(named); err != nil {
		t.Fatal(err)
	}
	w := policy.Walls{}
	for i := range cgroupbpf.MaxRanges + 1 {
		p := uint16(1 + 2*i)
		w.Openings = append(w.Openings, policy.Opening{
			Prefix: netip.MustParsePrefix("10.0.0.0/8"), Ports: policy.Ports{First: p, Last: p}, Protocol: policy.TCP,
		})
	}
	err := a.slot.Set(w)
	if e, ok := errors.AsType[*errdefs.Error](err); !ok || e.Kind != errdefs.Invalid || e.Field != "network" ||
		!strings.Contains(e.Msg, "33") || !strings.Contains(e.Msg, "10.0.0.0/8") {
		t.Errorf("%v", err)
	}
	if got := a.tcp("198.18.0.1:443"); got != "tcp 198.18.0.1:443" {
		t.Error(got)
	}
	w.Openings = w.Openings[:cgroupbpf.MaxRanges]
	if err := a.slot.Set(w); err != nil {
		t.Fatal(err)
	}
	last := fmt.Sprintf("10.0.0.1:%d", 1+2*(cgroupbpf.MaxRanges-1))
	if got := a.tcp(last); got != "tcp "+last {
		t.Error(got)
	}
}

func TestDenialsAreToldAndFolded(t *testing.T) {
	s := newStation(t)
	g := s.gate()
	a := s.attached(g)
	want := map[wire.Denial]bool{}
	tell := func(to string, p policy.Protocol) {
		at, _ := netip.ParseAddrPort(to)
		want[wire.Denial{Addr: a.slot.Addr(), To: at, Protocol: p}] = true
	}
	a.tcp("8.8.8.8:443")
	tell("8.8.8.8:443", policy.TCP)
	a.udp("8.8.4.4:53")
	tell("8.8.4.4:53", policy.UDP)
	a.tcp("[2001:db8::1]:80")
	tell("[2001:db8::1]:80", policy.TCP)
	a.tcp("[::ffff:9.9.9.9]:853")
	tell("9.9.9.9:853", policy.TCP)
	a.do(ask{Op: "socket", Family: unix.AF_INET, Type: unix.SOCK_RAW, Kind: unix.IPPROTO_ICMP})
	tell("", "1")
	limit := time.NewTimer(30 * time.Second)
	defer limit.Stop()
	for len(want) > 0 {
		select {
		case d := <-g.Denials():
			if d.Count < 1 {
				t.Errorf("%+v", d)
			}
			d.Count = 0
			if !want[d] {
				t.Errorf("told of %+v", d)
			}
			delete(want, d)
		case <-limit.C:
			t.Fatalf("never told of %v", want)
		}
	}
	// A flood is told as a number.
	for range 300 {
		a.tcp("1.2.3.4:5")
	}
	total := int64(0)
	for total < 32 {
		select {
		case d := <-g.Denials():
			total += d.Count
		case <-limit.C:
			t.Fatalf("told of %d", total)
		}
	}
	if err := g.Close(); err != nil {
		t.Fatal(err)
	}
	for d := range g.Denials() {
		total += d.Count
	}
	if total > 300 {
		t.Errorf("told of %d, 300 were", total)
	}
}

func TestAHostThatForwardsNothing(t *testing.T) {
	s := newStation(t)
	host, err := netns.New()
	if err != nil {
		t.Fatal(err)
	}
	defer host.Close()
	// As Docker and its like leave a host: nothing is let in, out or through that they do not know.
	c, err := nftables.New(nftables.WithNetNSFd(int(host.Fd())))
	if err != nil {
		t.Fatal(err)
	}
	drop := nftables.ChainPolicyDrop
	table := c.AddTable(&nftables.Table{Name: "filter", Family: nftables.TableFamilyIPv4})
	for name, hook := range map[string]*nftables.ChainHook{
		"FORWARD": nftables.ChainHookForward, "INPUT": nftables.ChainHookInput, "OUTPUT": nftables.ChainHookOutput,
	} {
		c.AddChain(&nftables.Chain{
			Name: name, Table: table, Type: nftables.ChainTypeFilter, Hooknum: hook, Priority: nftables.ChainPriorityFilter,
			Policy: &drop,
		})
	}
	if err := c.Flush(); err != nil {
		t.Fatal(err)
	}
	var g *Gate
	if err := netns.Do(host, func() error {
		if err := os.WriteFile("/proc/sys/net/ipv4/ip_forward", []byte("1"), 0); err != nil {
			return err
		}
		g = s.gate()
		return nil
	}); err != nil {
		t.Fatal(err)
	}
	newProxy(t, g)
	a, b := s.attached(g), s.attached(g)
	if err := a.slot.Set(named); err != nil {
		t.Fatal(err)
	}
	if got := a.tcp("198.18.0.1:443"); got != "tcp 198.18.0.1:443" {
		t.Error(got)
	}
	if got := a.tcp(b.slot.Addr().String() + ":80"); got != no {
		t.Error(got)
	}
	tables, err := c.ListTables()
	if err != nil || len(tables) != 1 {
		t.Errorf("the host has tables %v, %v", tables, err)
	}
	if err := netns.Do(host, func() error {
		b, err := os.ReadFile("/proc/thread-self/net/dev")
		if n := strings.Count(string(b), "\n"); err == nil && n != 3 && !strings.Contains(string(b), "0:") {
			t.Errorf("the host has devices\n%s", b)
		}
		return err
	}); err != nil {
		t.Fatal(err)
	}
}
