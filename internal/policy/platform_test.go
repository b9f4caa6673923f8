package policy

import (
	"net/netip"
	"testing"

	"pgregory.net/rapid"
)

func TestPlatform(t *testing.T) {
	for _, s := range []string{
		"0.0.0.0", "0.1.2.3", "10.0.0.1", "10.255.255.255", "100.64.0.1", "100.64.0.2", "100.100.100.200", "100.127.255.255",
		"127.0.0.1", "127.255.255.254", "168.63.129.16", "169.254.0.1", "169.254.169.254", "169.254.170.2", "172.16.0.1",
		"172.31.255.255", "192.0.0.1", "192.0.0.192", "192.88.99.1", "192.168.0.1", "198.18.0.1", "198.19.255.255",
		"224.0.0.1", "239.255.255.255", "240.0.0.1", "255.255.255.255",
		"::", "::1", "::2", "::7f00:1", "::ffff:10.0.0.1", "::ffff:169.254.169.254", "::ffff:0:10.0.0.1",
		"64:ff9b::10.0.0.1", "64:ff9b::169.254.169.254", "64:ff9b::0.0.0.1", "64:ff9b:1::1", "100::1",
		"2001::1", "2001:0:4136:e378:8000:63bf:3fff:fdd2", "2001:2::1", "2001:10::1", "2001:20::1", "2002::1", "2002:808:808::1",
		"4000::1", "fc00::1", "fd00:ec2::254", "fd20:ce::254", "fdff::1", "fe80::1", "fe80::1%eth0", "fec0::1", "ff02::1",
		"2001:db8::1%eth0", "5f00::1",
	} {
		if denied, why := Platform(netip.MustParseAddr(s)); !denied || why == "" {
			t.Errorf("%s passes", s)
		}
	}
	for _, s := range []string{
		"1.1.1.1", "8.8.8.8", "9.255.255.255", "11.0.0.0", "100.63.255.255", "100.128.0.0", "172.15.255.255", "172.32.0.0",
		"192.0.1.0", "192.0.2.1", "192.167.255.255", "192.169.0.0", "198.17.255.255", "198.20.0.0", "198.51.100.7",
		"203.0.113.7", "223.255.255.255", "::ffff:8.8.8.8", "64:ff9b::8.8.8.8", "2001:db8::1", "2001:4860::1", "2606:4700::1",
		"2000::", "3fff:ffff::1",
	} {
		if denied, why := Platform(netip.MustParseAddr(s)); denied {
			t.Errorf("%s is %s", s, why)
		}
	}
	if denied, _ := Platform(netip.Addr{}); !denied {
		t.Error("no address passes")
	}
	if _, why := Platform(netip.MustParseAddr("fd00:ec2::254")); why != "a metadata service of the cloud" {
		t.Errorf("the longest prefix does not name it: %s", why)
	}
}

func TestAMappedAddressAndOneBehindNAT64AreJudgedByTheIPv4AddressInside(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		v4 := drawAddr4(t)
		want, _ := Platform(v4)
		mapped := netip.AddrFrom16(v4.As16())
		raw := netip.MustParseAddr("64:ff9b::").As16()
		four := v4.As4()
		copy(raw[12:], four[:])
		for _, a := range []netip.Addr{mapped, netip.AddrFrom16(raw)} {
			if got, _ := Platform(a); got != want {
				t.Fatalf("%s: %v, but %s: %v", a, got, v4, want)
			}
		}
	})
}

func TestWhatIsClosedIsWhatThePlatformDenies(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		g := drawGrants(t)
		a := drawAddr(t)
		inside := false
		for _, p := range g.closed() {
			inside = inside || p.Contains(a)
		}
		if denied, why := g.denied(a); denied != inside {
			t.Fatalf("%s with %v: denied %v (%s), closed %v", a, g, denied, why, inside)
		}
	})
}

// drawAddr4 draws an address, often at the edge of a row of the platform's table or inside the documentation's ranges.
func drawAddr4(t *rapid.T) netip.Addr {
	for {
		if a := drawAddr(t); a.Is4() {
			return a
		}
	}
}

func drawAddr(t *rapid.T) netip.Addr {
	switch rapid.IntRange(0, 3).Draw(t, "kind") {
	case 0:
		var raw [4]byte
		copy(raw[:], rapid.SliceOfN(rapid.Byte(), 4, 4).Draw(t, "v4"))
		return netip.AddrFrom4(raw)
	case 1:
		p := rapid.SampledFrom(drawn()).Draw(t, "network")
		return edge(t, p)
	case 2:
		return edge(t, rapid.SampledFrom(rows()).Draw(t, "row").Prefix)
	}
	var raw [16]byte
	copy(raw[:], rapid.SliceOfN(rapid.Byte(), 16, 16).Draw(t, "v6"))
	a := netip.AddrFrom16(raw)
	return a.Unmap()
}

// edge draws the first or last address of a prefix, one beside it, or one inside.
func edge(t *rapid.T, p netip.Prefix) netip.Addr {
	last := p.Addr()
	for bit := p.Bits(); bit < p.Addr().BitLen(); bit++ {
		last = flip(last, bit)
	}
	a := rapid.SampledFrom([]netip.Addr{p.Addr(), last, p.Addr().Prev(), last.Next()}).Draw(t, "edge")
	if !a.IsValid() {
		a = p.Addr()
	}
	if rapid.Bool().Draw(t, "inside") && p.Bits() < p.Addr().BitLen() {
		a = flip(a, rapid.IntRange(p.Bits(), p.Addr().BitLen()-1).Draw(t, "bit"))
	}
	return a.Unmap()
}

// drawn are networks that meet each other and the platform's list.
func drawn() []netip.Prefix {
	var out []netip.Prefix
	for _, s := range []string{
		"0.0.0.0/0", "0.0.0.0/1", "203.0.113.0/24", "203.0.113.128/25", "203.0.113.7/32", "198.51.100.0/24", "10.0.0.0/8",
		"10.1.0.0/16", "192.168.1.1/32", "100.64.0.0/10", "127.0.0.1/32", "::/0", "2001:db8::/32", "2001:db8:1::/48",
		"2001:db8:1::7/128", "fd00::/8", "64:ff9b::/96", "64:ff9b::cb00:7100/120",
	} {
		out = append(out, netip.MustParsePrefix(s))
	}
	return out
}

func drawGrants(t *rapid.T) Grants {
	return rapid.SliceOfN(rapid.SampledFrom(drawn()), 0, 2).Draw(t, "grants")
}
