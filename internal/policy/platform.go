package policy

import (
	"net/netip"
	"slices"
	"strings"
	"sync"
)

// span is a row of the platform's table: what an address of the prefix is, and whether it may be reached. The row with
// the longest prefix decides.
type span struct {
	prefix string
	is     string // "a private address"; empty: a public one
	lift   bool   // a grant of the operator's opens parts of it
}

// table holds every part of the address space that is not simply public. The ranges for documentation (192.0.2.0/24,
// 198.51.100.0/24, 203.0.113.0/24, 2001:db8::/32) lead nowhere and are not on it.
var table = []span{
	{"0.0.0.0/8", "an address of this network", false},
	{"10.0.0.0/8", "a private address", true},
	{"100.64.0.0/10", "an address of carrier-grade NAT or of a sandbox", true},
	{"100.64.0.1/32", "the address of Aether", false},
	{"100.100.100.200/32", "a metadata service of the cloud", false},
	{"127.0.0.0/8", "a loopback address", true},
	{"168.63.129.16/32", "a metadata service of the cloud", false},
	{"169.254.0.0/16", "a link-local address", false},
	{"169.254.169.254/32", "a metadata service of the cloud", false},
	{"169.254.170.2/32", "a metadata service of the cloud", false},
	{"172.16.0.0/12", "a private address", true},
	{"192.0.0.0/24", "an address of protocol assignments", true},
	{"192.0.0.192/32", "a metadata service of the cloud", false},
	{"192.88.99.0/24", "an address of 6to4 relays", false},
	{"192.168.0.0/16", "a private address", true},
	{"198.18.0.0/15", "an address that stands for a name", false},
	{"224.0.0.0/4", "a multicast address", false},
	{"240.0.0.0/4", "a reserved address", false},
	{"255.255.255.255/32", "the broadcast address", false},

	{"::/0", "no public address", false},
	{"2000::/3", "", false},
	{"::/128", "the unspecified address", false},
	{"::1/128", "a loopback address", true},
	{"64:ff9b::/96", "", false}, // NAT64: the IPv4 address in it decides, see spans
	{"64:ff9b:1::/48", "an address of local NAT64", false},
	{"2001::/32", "an address of Teredo", false},
	{"2001:2::/48", "an address of benchmarks", false},
	{"2001:10::/28", "an identifier, not an address", false},
	{"2001:20::/28", "an identifier, not an address", false},
	{"2002::/16", "an address of 6to4", false},
	{"fc00::/7", "a private address", true},
	{"fd00:ec2::254/128", "a metadata service of the cloud", false},
	{"fd20:ce::254/128", "a metadata service of the cloud", false},
	{"fe80::/10", "a link-local address", false},
	{"fec0::/10", "a site-local address", true},
	{"ff00::/8", "a multicast address", false},
}

// row is a span with its prefix read.
type row struct {
	netip.Prefix
	span
}

// rows is the table with the longest prefixes first, IPv4 a second time below NAT64's prefix, where grants do not reach.
var rows = sync.OnceValue(func() []row {
	var out []row
	for _, s := range table {
		p := netip.MustParsePrefix(s.prefix)
		out = append(out, row{p, s})
		if a := p.Addr(); a.Is4() {
			nat := netip.MustParseAddr("64:ff9b::").As16()
			v4 := a.As4()
			copy(nat[12:], v4[:])
			out = append(out, row{netip.PrefixFrom(netip.AddrFrom16(nat), 96+p.Bits()), span{"", s.is, false}})
		}
	}
	slices.SortStableFunc(out, func(a, b row) int { return b.Bits() - a.Bits() })
	return out
})

// closed are the parts of the address space that no public address lies in: each row of the table without the more
// special rows inside it.
var closed = sync.OnceValue(func() []row {
	var out []row
	all := rows()
	for i, r := range all {
		if r.is == "" {
			continue
		}
		parts := []netip.Prefix{r.Prefix}
		for _, inner := range all[:i] {
			parts = minusPrefix(parts, inner.Prefix)
		}
		for _, p := range parts {
			out = append(out, row{p, r.span})
		}
	}
	return out
})

// closedToAll is closed without what they are.
var closedToAll = sync.OnceValue(func() []netip.Prefix {
	var out []netip.Prefix
	for _, r := range closed() {
		out = append(out, r.Prefix)
	}
	return out
})

// lookup gives the row of an address; false: it is public.
func lookup(a netip.Addr) (row, bool) {
	a = a.Unmap().WithZone("")
	for _, r := range rows() {
		if r.Contains(a) {
			return r, r.is != ""
		}
	}
	return row{}, false
}

// Platform tells whether an address is on the platform's deny list and why, as "a private address". An IPv4-mapped
// address is the IPv4 one, and below NAT64's prefix the IPv4 address inside decides. An address with a zone, and none at
// all, is denied. The node's own public addresses and those of the control plane are not known here.
func Platform(a netip.Addr) (denied bool, why string) {
	if !a.IsValid() || a.Zone() != "" {
		return true, "no public address"
	}
	r, denied := lookup(a)
	if !denied {
		return false, ""
	}
	return true, r.is
}

// denied is Platform after the grants: they lift what the table lets them, never link-local addresses, metadata
// services, multicast or Aether's own ranges.
func (g Grants) denied(a netip.Addr) (bool, string) {
	denied, why := Platform(a)
	if !denied || !a.IsValid() || a.Zone() != "" {
		return denied, why
	}
	a = a.Unmap()
	if r, _ := lookup(a); r.lift && slices.ContainsFunc(g, func(p netip.Prefix) bool { return p.Contains(a) }) {
		return false, ""
	}
	return true, why
}

// closed gives the prefixes that stay on the deny list after the grants, not to be changed.
func (g Grants) closed() []netip.Prefix {
	if len(g) == 0 {
		return closedToAll()
	}
	var out []netip.Prefix
	for _, r := range closed() {
		if !r.lift {
			out = append(out, r.Prefix)
			continue
		}
		parts := []netip.Prefix{r.Prefix}
		for _, p := range g {
			parts = minusPrefix(parts, p.Masked())
		}
		out = append(out, parts...)
	}
	return out
}

// minusPrefix takes o out of each of the parts.
func minusPrefix(parts []netip.Prefix, o netip.Prefix) []netip.Prefix {
	var out []netip.Prefix
	for _, p := range parts {
		switch {
		case !o.IsValid() || !p.Overlaps(o):
			out = append(out, p)
		case o.Bits() <= p.Bits(): // o holds all of p
		default:
			out = append(out, around(p, o)...)
		}
	}
	return out
}

// around is p without o, which lies in p and is smaller: the other half at each step down from p to o.
func around(p, o netip.Prefix) []netip.Prefix {
	out := make([]netip.Prefix, 0, o.Bits()-p.Bits())
	for bits := p.Bits() + 1; bits <= o.Bits(); bits++ {
		out = append(out, netip.PrefixFrom(flip(o.Addr(), bits-1), bits).Masked())
	}
	return out
}

// flip turns one bit of an address, counted from the left.
func flip(a netip.Addr, bit int) netip.Addr {
	raw := a.AsSlice()
	raw[bit/8] ^= 0x80 >> (bit % 8)
	b, _ := netip.AddrFromSlice(raw)
	return b
}

// localName reports whether a canonical host name can only mean the machine that asks (RFC 6761): the platform denies
// it like the address that it stands for.
func localName(name string) bool { return name == "localhost" || strings.HasSuffix(name, ".localhost") }
