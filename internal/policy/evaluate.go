package policy

import (
	"fmt"
	"net/netip"
	"slices"
	"strings"
)

// What rules are about that do not say it; never changed.
var (
	everyPort = Ports{1, 65535}
	allPorts  = []Ports{everyPort}
	webPorts  = []Ports{{80, 80}, {443, 443}}
	tcpAlone  = []Protocol{TCP}
	udpAlone  = []Protocol{UDP}
	tcpAndUDP = []Protocol{TCP, UDP}
)

// Evaluate answers a question in the order that the package's comment gives. It is total: a phase that does not exist, a
// malformed name and a question about nothing are rejected. A name that is an address is judged as that address. Of a
// policy that Validate would refuse, a malformed rule matches nothing if it allows and everything if it rejects.
func Evaluate(p Policy, phase string, q Question, g Grants) Verdict {
	ask, v := read(q, g)
	if v != nil {
		return *v
	}
	ph, ok := p.Phase(phase)
	if !ok {
		return Verdict{Rule: RuleDefault, Reason: fmt.Sprintf("there is no phase %q", phase)}
	}
	if ask.service != "" {
		if allow, named := p.Services[ask.service]; named {
			return verdict(allow, "service "+ask.service, "", ask)
		}
	}
	first := -1 // reject that matched a part of the question
	for i, r := range ph.Rules {
		m, ok := r.matcher()
		if !ok || !ask.matches(m) {
			continue
		}
		if !r.Reject {
			if ask.meets(m) {
				return verdict(true, r.name(), r.Secret, ask)
			}
			continue
		}
		if ask.take(m) && first < 0 {
			first = i
		}
		if ask.empty() {
			break
		}
	}
	if first >= 0 {
		return verdict(false, ph.Rules[first].name(), "", ask)
	}
	return Verdict{Rule: RuleDefault, Reason: "no rule of phase " + phase + " allows " + ask.String()}
}

func verdict(allow bool, rule, secret string, ask *asked) Verdict {
	v := Verdict{Allow: allow, Rule: rule, Secret: secret}
	if allow {
		v.Reason = "rule " + rule + " allows " + ask.String()
	} else {
		v.Reason = "rule " + rule + " rejects " + ask.String()
	}
	return v
}

// asked is a question that has been read. left holds, per protocol, the ports of which no rule has decided yet.
type asked struct {
	name    string
	addr    netip.Addr
	service string
	repo    []string
	port    uint16
	left    map[Protocol][]Ports
}

// read turns a question into what the rules are asked, or decides it at once: what is malformed, and what the platform
// denies.
func read(q Question, g Grants) (*asked, *Verdict) {
	malformed := func(format string, args ...any) (*asked, *Verdict) {
		return nil, &Verdict{Rule: RuleDefault, Reason: fmt.Sprintf(format, args...)}
	}
	a := &asked{addr: q.Addr.Unmap(), port: q.Port, left: map[Protocol][]Ports{}}
	if !q.Addr.IsValid() {
		a.addr = netip.Addr{}
	}
	asks := everyPort
	if q.Port != 0 {
		asks = Ports{q.Port, q.Port}
	}
	switch q.Protocol {
	case TCP, UDP:
		a.left[q.Protocol] = []Ports{asks}
	case "":
		a.left[TCP] = []Ports{asks}
		if q.Port == 0 {
			a.left[UDP] = []Ports{asks}
		}
	default:
		return malformed("%q never leaves a sandbox, only tcp and udp do", clip(string(q.Protocol)))
	}
	if q.Name != "" {
		if literal, err := netip.ParseAddr(strings.TrimSuffix(strings.TrimPrefix(q.Name, "["), "]")); err == nil {
			literal = literal.Unmap()
			if a.addr.IsValid() && a.addr != literal {
				return malformed("%s is not the address %s", literal, a.addr)
			}
			a.addr = literal
		} else {
			name, ok := hostName(q.Name)
			if !ok {
				return malformed("%q is no host name", clip(q.Name))
			}
			a.name = name
		}
	}
	if a.addr.IsValid() {
		if denied, why := g.denied(a.addr); denied {
			return nil, &Verdict{Rule: RulePlatform, Reason: a.addr.String() + " is " + why}
		}
	}
	if localName(a.name) {
		return nil, &Verdict{Rule: RulePlatform, Reason: a.name + " is the machine itself"}
	}
	if q.Service != "" {
		if path, ok := strings.CutPrefix(q.Service, gitPrefix); ok {
			if a.repo, ok = repoPath(path); !ok {
				return malformed("%q is no repository", clip(q.Service))
			}
			a.service = gitPrefix + strings.Join(a.repo, "/")
		} else if slices.Contains(services, q.Service) {
			a.service = q.Service
		} else {
			return malformed("there is no package service %q", clip(q.Service))
		}
		// Ports and protocol are no matter of services.
		a.port, a.left = 0, map[Protocol][]Ports{TCP: {everyPort}}
	} else if a.name == "" && !a.addr.IsValid() {
		return malformed("nothing was asked")
	}
	return a, nil
}

// matches reports whether a rule covers the question, ports apart.
func (a *asked) matches(m matcher) bool {
	switch {
	case m.all:
		return true
	case a.service != "":
		return m.service == a.service || m.repo != nil && isBelow(a.repo, m.repo)
	case m.domain != "":
		return a.name != "" && matchDomain(m.domain, a.name)
	case m.prefix.IsValid():
		return a.addr.IsValid() && m.prefix.Contains(a.addr) && (a.name == "" || m.reject)
	}
	return false
}

// meets reports whether a port that is left is among the rule's.
func (a *asked) meets(m matcher) bool {
	return slices.ContainsFunc(m.protocols, func(proto Protocol) bool {
		return slices.ContainsFunc(a.left[proto], func(l Ports) bool { return slices.ContainsFunc(m.ports, l.overlaps) })
	})
}

// take takes the rule's ports out of what is left and reports whether there were any.
func (a *asked) take(m matcher) bool {
	if !a.meets(m) {
		return false
	}
	for _, proto := range m.protocols {
		for _, p := range m.ports {
			var rest []Ports
			for _, l := range a.left[proto] {
				rest = append(rest, l.minus(p)...)
			}
			a.left[proto] = rest
		}
	}
	return true
}

func (a *asked) empty() bool { return len(a.left[TCP]) == 0 && len(a.left[UDP]) == 0 }

// String is the question for people: "example.org, tcp port 443".
func (a *asked) String() string {
	if a.service != "" {
		return a.service
	}
	what := a.name
	if what == "" {
		what = a.addr.String()
	} else if a.addr.IsValid() {
		what += " at " + a.addr.String()
	}
	if a.port == 0 {
		return what
	}
	proto := TCP
	if _, udp := a.left[UDP]; udp {
		proto = UDP
	}
	return fmt.Sprintf("%s, %s port %d", what, proto, a.port)
}

// matcher is a rule that has been read: one of all, domain, prefix, service and repo is set.
type matcher struct {
	all       bool // a malformed reject
	domain    string
	prefix    netip.Prefix
	service   string
	repo      []string
	ports     []Ports
	protocols []Protocol
	reject    bool
}

// matcher reads the rule; false: it is malformed and allows, so it matches nothing.
func (r Rule) matcher() (matcher, bool) {
	m := matcher{ports: allPorts, protocols: tcpAlone, reject: r.Reject}
	if r.Reject {
		m.protocols = tcpAndUDP
	}
	targets, ok := 0, true
	if r.Domain != "" {
		targets++
		m.domain, ok = canonicalDomain(r.Domain)
		if !r.Reject {
			m.ports = webPorts
		}
	}
	if r.CIDR != "" {
		targets++
		m.prefix, ok = cidr(r.CIDR)
	}
	if r.Service != "" {
		targets++
		if path, git := strings.CutPrefix(r.Service, gitPrefix); git {
			m.repo, ok = repoPath(path)
			ok = ok && len(m.repo) > 1
		} else {
			m.service, ok = r.Service, slices.Contains(services, r.Service)
		}
	}
	if len(r.Ports) > 0 {
		m.ports = r.Ports
	}
	switch r.Protocol {
	case "":
	case TCP:
		m.protocols = tcpAlone
	case UDP:
		m.protocols = udpAlone
	default:
		ok = false
	}
	if targets != 1 || !ok || slices.ContainsFunc(m.ports, Ports.malformed) {
		return matcher{all: true, ports: allPorts, protocols: tcpAndUDP, reject: true}, r.Reject
	}
	return m, true
}

// cidr reads an address or a network without bits behind its mask. IPv4-mapped ones and zones are refused.
func cidr(s string) (netip.Prefix, bool) {
	if a, err := netip.ParseAddr(s); err == nil {
		return netip.PrefixFrom(a, a.BitLen()), !a.Is4In6() && a.Zone() == ""
	}
	p, err := netip.ParsePrefix(s)
	return p, err == nil && p == p.Masked() && !p.Addr().Is4In6()
}

// name is the rule's, or what it is about.
func (r Rule) name() string {
	if r.Name != "" {
		return r.Name
	}
	verb := ""
	if r.Reject {
		verb = "reject "
	}
	switch {
	case r.Domain != "":
		return verb + "domain " + r.Domain
	case r.CIDR != "":
		return verb + "cidr " + r.CIDR
	}
	return verb + "service " + r.Service
}

func clip(s string) string {
	if len(s) > 80 {
		return s[:80] + "..."
	}
	return s
}
