package netslot

import (
	"cmp"
	"encoding/binary"
	"net/netip"
	"slices"

	"github.com/sandsea/sandsea/api/errdefs"
	"github.com/sandsea/sandsea/internal/linux/cgroupbpf"
	"github.com/sandsea/sandsea/internal/linux/nft"
	"github.com/sandsea/sandsea/internal/policy"
)

// Protocols by number.
const (
	tcp = 6
	udp = 17
)

// compile turns openings, which may overlap, into what each of the walls goes by: for programs, prefixes of which the
// longest that fits decides; for the packet filter, boxes that do not overlap. Both let the same through. Openings of
// IPv6 let nothing through, since there is none.
func compile(openings []policy.Opening) ([]cgroupbpf.Opening, []nft.Opening, error) {
	flat, err := flatten(openings)
	if err != nil {
		return nil, nil, err
	}
	var prefixes []netip.Prefix
	for _, o := range flat {
		prefixes = append(prefixes, o.Prefix)
	}
	slices.SortFunc(prefixes, func(a, b netip.Prefix) int {
		return cmp.Or(a.Addr().Compare(b.Addr()), cmp.Compare(a.Bits(), b.Bits()))
	})
	prefixes = slices.Compact(prefixes)
	var out []cgroupbpf.Opening
	for _, p := range prefixes {
		var ranges []cgroupbpf.Range
		for _, o := range flat {
			if o.Prefix.Bits() <= p.Bits() && o.Prefix.Contains(p.Addr()) {
				ranges = append(ranges, o.Ranges...)
			}
		}
		ranges = merge(ranges)
		if len(ranges) > cgroupbpf.MaxRanges {
			return nil, nil, errdefs.New(errdefs.Invalid, "network", "rules open %d separate ranges of ports at %s, at most %d can be",
				len(ranges), p, cgroupbpf.MaxRanges).WithField("network", "32 ranges of ports at one address").
				WithHint("Join ranges of ports, or open all ports of %s", p)
		}
		out = append(out, cgroupbpf.Opening{Prefix: p, Ranges: ranges})
	}
	return out, boxes(out), nil
}

// flatten gives every opening as a prefix of IPv4 with ranges by protocol.
func flatten(openings []policy.Opening) ([]cgroupbpf.Opening, error) {
	var out []cgroupbpf.Opening
	for _, o := range openings {
		p := o.Prefix
		if p.Addr().Is4In6() && p.Bits() >= 96 {
			p = netip.PrefixFrom(p.Addr().Unmap(), p.Bits()-96)
		}
		if !p.IsValid() || o.Ports.Last < o.Ports.First {
			return nil, errdefs.New(errdefs.Internal, "network", "an opening of %s, ports %d to %d", p, o.Ports.First, o.Ports.Last)
		}
		if !p.Addr().Is4() {
			continue
		}
		var protocols []uint8
		switch o.Protocol {
		case policy.TCP:
			protocols = []uint8{tcp}
		case policy.UDP:
			protocols = []uint8{udp}
		case "":
			protocols = []uint8{tcp, udp}
		default:
			return nil, errdefs.New(errdefs.Internal, "network", "an opening of protocol %q", o.Protocol)
		}
		f := cgroupbpf.Opening{Prefix: p.Masked()}
		for _, protocol := range protocols {
			f.Ranges = append(f.Ranges, cgroupbpf.Range{First: o.Ports.First, Last: o.Ports.Last, Protocol: protocol})
		}
		out = append(out, f)
	}
	return out, nil
}

// merge sorts ranges and joins those that touch.
func merge(ranges []cgroupbpf.Range) []cgroupbpf.Range {
	slices.SortFunc(ranges, func(a, b cgroupbpf.Range) int {
		return cmp.Or(cmp.Compare(a.Protocol, b.Protocol), cmp.Compare(a.First, b.First))
	})
	var out []cgroupbpf.Range
	for _, r := range ranges {
		if n := len(out); n > 0 && out[n-1].Protocol == r.Protocol && int(r.First) <= int(out[n-1].Last)+1 {
			out[n-1].Last = max(out[n-1].Last, r.Last)
			continue
		}
		out = append(out, r)
	}
	return out
}

// boxes cuts the address space where prefixes begin and end, and joins neighbours that have the same open.
func boxes(openings []cgroupbpf.Opening) []nft.Opening {
	type span struct {
		from, to uint32
		ranges   []cgroupbpf.Range
	}
	// Beyond the last address lies 1<<32.
	var cuts []uint64
	for _, o := range openings {
		first, last := ends(o.Prefix)
		cuts = append(cuts, uint64(first), uint64(last)+1)
	}
	slices.Sort(cuts)
	cuts = slices.Compact(cuts)
	var spans []span
	for i := range len(cuts) - 1 {
		from, to := uint32(cuts[i]), uint32(cuts[i+1]-1)
		var best *cgroupbpf.Opening
		for j, o := range openings {
			if o.Prefix.Contains(address(from)) && (best == nil || o.Prefix.Bits() > best.Prefix.Bits()) {
				best = &openings[j]
			}
		}
		if best == nil {
			continue
		}
		if n := len(spans); n > 0 && spans[n-1].to+1 == from && slices.Equal(spans[n-1].ranges, best.Ranges) {
			spans[n-1].to = to
			continue
		}
		spans = append(spans, span{from, to, best.Ranges})
	}
	var out []nft.Opening
	for _, s := range spans {
		for _, r := range s.ranges {
			out = append(out, nft.Opening{
				From: address(s.from), To: address(s.to), First: r.First, Last: r.Last, Protocol: r.Protocol,
			})
		}
	}
	return out
}

func ends(p netip.Prefix) (first, last uint32) {
	first = value(p.Addr())
	return first, first | uint32(uint64(1)<<(32-p.Bits())-1)
}

func value(a netip.Addr) uint32 {
	b := a.As4()
	return binary.BigEndian.Uint32(b[:])
}

func address(v uint32) netip.Addr {
	return netip.AddrFrom4([4]byte(binary.BigEndian.AppendUint32(nil, v)))
}
