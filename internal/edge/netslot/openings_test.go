package netslot

import (
	"errors"
	"net/netip"
	"strings"
	"testing"
	"time"

	"pgregory.net/rapid"

	"github.com/sandsea/sandsea/api/errdefs"
	"github.com/sandsea/sandsea/internal/aether/wire"
	"github.com/sandsea/sandsea/internal/linux/cgroupbpf"
	"github.com/sandsea/sandsea/internal/linux/nft"
	"github.com/sandsea/sandsea/internal/policy"
)

// drawPrefix draws prefixes that often lie in each other.
func drawPrefix(t *rapid.T) netip.Prefix {
	bits := rapid.SampledFrom([]int{0, 1, 7, 8, 9, 16, 24, 31, 32}).Draw(t, "bits")
	a := rapid.SampledFrom([]string{"0.0.0.0", "10.0.0.0", "10.1.2.3", "10.1.2.2", "10.255.255.255", "203.0.113.7", "255.255.255.255"}).Draw(t, "addr")
	p := netip.PrefixFrom(netip.MustParseAddr(a), bits)
	if rapid.IntRange(0, 5).Draw(t, "form") == 0 {
		return netip.PrefixFrom(netip.AddrFrom16(p.Addr().As16()), 96+bits)
	}
	return p
}

func drawOpening(t *rapid.T) policy.Opening {
	ports := rapid.SampledFrom([]uint16{0, 1, 79, 80, 81, 443, 65534, 65535})
	a, b := ports.Draw(t, "first"), ports.Draw(t, "last")
	return policy.Opening{
		Prefix: drawPrefix(t), Ports: policy.Ports{First: min(a, b), Last: max(a, b)},
		Protocol: rapid.SampledFrom([]policy.Protocol{policy.TCP, policy.UDP, ""}).Draw(t, "protocol"),
	}
}

func TestBothWallsLetTheSameThrough(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		openings := rapid.SliceOfN(rapid.Custom(drawOpening), 0, 12).Draw(t, "openings")
		prefixes, boxes, err := compile(openings)
		if err != nil {
			t.Fatal(err)
		}
		for i, a := range boxes {
			for _, b := range boxes[:i] {
				if a.Protocol == b.Protocol && !a.From.Less(b.From) && !b.To.Less(a.From) || a.Protocol == b.Protocol && !b.From.Less(a.From) && !a.To.Less(b.From) {
					if a.First <= b.Last && b.First <= a.Last {
						t.Fatalf("%+v and %+v overlap", a, b)
					}
				}
			}
		}
		for range 40 {
			// On the edges of what was drawn, and beside them.
			p := drawPrefix(t).Masked()
			p = netip.PrefixFrom(p.Addr().Unmap(), min(p.Bits(), 32))
			first, last := ends(p)
			v := rapid.SampledFrom([]uint32{first, first - 1, last, last + 1}).Draw(t, "value")
			addr := address(v)
			port := rapid.SampledFrom([]uint16{0, 1, 2, 78, 79, 80, 81, 82, 442, 443, 444, 65533, 65534, 65535}).Draw(t, "port")
			protocol := rapid.SampledFrom([]uint8{tcp, udp}).Draw(t, "protocol")
			want := false
			for _, o := range openings {
				prefix := o.Prefix
				if prefix.Addr().Is4In6() {
					prefix = netip.PrefixFrom(prefix.Addr().Unmap(), prefix.Bits()-96)
				}
				if prefix.Contains(addr) && o.Ports.First <= port && port <= o.Ports.Last &&
					(o.Protocol == "" || (o.Protocol == policy.TCP) == (protocol == tcp)) {
					want = true
				}
			}
			if got := byPrefix(prefixes, addr, port, protocol); got != want {
				t.Fatalf("programs: %s %d %d: %v\n%+v\n%+v", addr, port, protocol, got, openings, prefixes)
			}
			if got := byBox(boxes, addr, port, protocol); got != want {
				t.Fatalf("filter: %s %d %d: %v\n%+v\n%+v", addr, port, protocol, got, openings, boxes)
			}
		}
	})
}

func byPrefix(openings []cgroupbpf.Opening, addr netip.Addr, port uint16, protocol uint8) bool {
	var best *cgroupbpf.Opening
	for i, o := range openings {
		if o.Prefix.Contains(addr) && (best == nil || o.Prefix.Bits() > best.Prefix.Bits()) {
			best = &openings[i]
		}
	}
	if best == nil {
		return false
	}
	for _, r := range best.Ranges {
		if r.Protocol == protocol && r.First <= port && port <= r.Last {
			return true
		}
	}
	return false
}

func byBox(boxes []nft.Opening, addr netip.Addr, port uint16, protocol uint8) bool {
	for _, b := range boxes {
		if b.Protocol == protocol && !addr.Less(b.From) && !b.To.Less(addr) && b.First <= port && port <= b.Last {
			return true
		}
	}
	return false
}

func TestOpeningsThatMeanNothingAreRefused(t *testing.T) {
	all := policy.Ports{First: 1, Last: 65535}
	for what, o := range map[string]policy.Opening{
		"no prefix":          {Ports: all},
		"ports backwards":    {Prefix: netip.MustParsePrefix("10.0.0.0/8"), Ports: policy.Ports{First: 2, Last: 1}},
		"a foreign protocol": {Prefix: netip.MustParsePrefix("10.0.0.0/8"), Ports: all, Protocol: "sctp"},
	} {
		if p, b, err := compile([]policy.Opening{o}); !errors.Is(err, errdefs.Internal) {
			t.Errorf("%s: %v, %v, %v", what, p, b, err)
		}
	}
	p, b, err := compile([]policy.Opening{{Prefix: netip.MustParsePrefix("2001:db8::/32"), Ports: all}})
	if err != nil || len(p)+len(b) > 0 {
		t.Errorf("IPv6: %v, %v, %v", p, b, err)
	}
}

func TestDenialsAreBounded(t *testing.T) {
	f := folder{}
	me := netip.MustParseAddr("100.64.1.1")
	to := func(i int) netip.AddrPort { return netip.AddrPortFrom(address(uint32(i)), 80) }
	for i := range maxFolded + 500 {
		f.add(me, cgroupbpf.Event{To: to(i), Protocol: tcp})
		f.add(me, cgroupbpf.Event{To: to(0), Protocol: tcp, Untold: 2})
	}
	if len(f) > maxFolded+1 {
		t.Errorf("%d are kept", len(f))
	}
	// Who does not read for a while loses nothing of the sum.
	out := make(chan wire.Denial, 10)
	got := map[netip.AddrPort]int64{}
	total := int64(0)
	for done := false; !done; {
		done = f.hand(out)
		for len(out) > 0 {
			d := <-out
			if d.Addr != me || d.To.IsValid() != (d.Protocol == policy.TCP) {
				t.Fatalf("%+v", d)
			}
			got[d.To] += d.Count
			total += d.Count
		}
	}
	if n := int64(maxFolded + 500); got[to(0)] != n+1 || total != 2*n+2*n {
		t.Errorf("%d to the first, %d in all", got[to(0)], total)
	}
}

func TestAReaderThatIsSlowHoldsNobodyUp(t *testing.T) {
	f := folder{}
	f.add(netip.MustParseAddr("100.64.1.1"), cgroupbpf.Event{Protocol: 1})
	start := time.Now()
	if f.hand(make(chan wire.Denial)) || len(f) != 1 {
		t.Errorf("handed on to nobody, after %s", time.Since(start))
	}
	if got := protocol(132); got != "132" || !strings.EqualFold(string(protocol(udp)), "UDP") {
		t.Error(got)
	}
}
