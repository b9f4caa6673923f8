package policy

import (
	"cmp"
	"net/netip"
	"slices"
	"strings"
)

// Compile gives the walls of a phase: every address and port that Evaluate allows by address, and nothing else. A phase
// that does not exist has closed walls. Openings are sorted.
func Compile(p Policy, phase string, g Grants) Walls {
	w, _ := compile(p, phase, g, -1)
	return w
}

// block is a part of the address space of one protocol.
type block struct {
	prefix netip.Prefix
	ports  Ports
}

// compile gives up, with false, when there would be more than most openings; -1: never.
func compile(p Policy, phase string, g Grants, most int) (Walls, bool) {
	ph, ok := p.Phase(phase)
	if !ok {
		return Walls{}, true
	}
	w := Walls{Names: names(p, ph)}
	if !slices.ContainsFunc(ph.Rules, func(r Rule) bool { return r.CIDR != "" && !r.Reject }) {
		return w, true // most policies
	}
	closed := g.closed()
	for _, proto := range []Protocol{TCP, UDP} {
		var decided []block
		for _, r := range ph.Rules {
			m, ok := r.matcher()
			if !ok || !slices.Contains(m.protocols, proto) {
				continue
			}
			for _, b := range m.blocks() {
				if r.Reject {
					decided = append(decided, b)
					continue
				}
				rest, ok := outside(b, closed, decided, most)
				if !ok {
					return Walls{}, false
				}
				decided = append(decided, b)
				for _, o := range rest {
					w.Openings = append(w.Openings, Opening{o.prefix, o.ports, proto})
				}
				if most >= 0 && len(w.Openings) > most {
					return Walls{}, false
				}
			}
		}
	}
	slices.SortFunc(w.Openings, func(a, b Opening) int {
		return cmp.Or(a.Prefix.Compare(b.Prefix), strings.Compare(string(a.Protocol), string(b.Protocol)), comparePorts(a.Ports, b.Ports))
	})
	w.Openings = join(w.Openings)
	return w, true
}

// names reports whether a phase allows anything by name.
func names(p Policy, ph Phase) bool {
	for _, allowed := range p.Services {
		if allowed {
			return true
		}
	}
	return slices.ContainsFunc(ph.Rules, func(r Rule) bool { return !r.Reject && (r.Domain != "" || r.Service != "") })
}

// blocks are what a rule says of addresses: nothing, if it is about names or services.
func (m matcher) blocks() []block {
	var of []netip.Prefix
	switch {
	case m.all:
		of = []netip.Prefix{netip.PrefixFrom(netip.IPv4Unspecified(), 0), netip.PrefixFrom(netip.IPv6Unspecified(), 0)}
	case m.prefix.IsValid():
		of = []netip.Prefix{m.prefix}
	}
	var out []block
	for _, p := range of {
		for _, ports := range m.ports {
			out = append(out, block{p, ports})
		}
	}
	return out
}

// outside is what of b is neither closed nor in a block that was decided before. The widest come first, so that what is
// decided as a whole is not cut into pieces before.
func outside(b block, closed []netip.Prefix, decided []block, most int) ([]block, bool) {
	var near []block
	for _, c := range closed {
		if c.Overlaps(b.prefix) {
			near = append(near, block{c, everyPort})
		}
	}
	for _, d := range decided {
		if d.prefix.Overlaps(b.prefix) && d.ports.overlaps(b.ports) {
			near = append(near, d)
		}
	}
	slices.SortStableFunc(near, func(a, b block) int { return a.prefix.Bits() - b.prefix.Bits() })
	rest := []block{b}
	for _, d := range near {
		next := make([]block, 0, len(rest)+1)
		for _, r := range rest {
			next = r.minus(next, d)
		}
		rest = next
		if most >= 0 && len(rest) > most {
			return nil, false
		}
	}
	return rest, true
}

// minus appends what of b lies outside o, in disjoint pieces.
func (b block) minus(to []block, o block) []block {
	if !b.prefix.Overlaps(o.prefix) || !b.ports.overlaps(o.ports) {
		return append(to, b)
	}
	inner := b.prefix
	if o.prefix.Bits() > b.prefix.Bits() {
		inner = o.prefix
		for _, p := range around(b.prefix, o.prefix) {
			to = append(to, block{p, b.ports})
		}
	}
	for _, ports := range b.ports.minus(o.ports) {
		to = append(to, block{inner, ports})
	}
	return to
}

// join makes one of openings of the same prefix and protocol whose ports follow each other. They come sorted.
func join(in []Opening) []Opening {
	var out []Opening
	for _, o := range in {
		if n := len(out) - 1; n >= 0 && out[n].Prefix == o.Prefix && out[n].Protocol == o.Protocol &&
			int(out[n].Ports.Last)+1 >= int(o.Ports.First) {
			out[n].Ports.Last = max(out[n].Ports.Last, o.Ports.Last)
			continue
		}
		out = append(out, o)
	}
	return out
}
