// Package policy says what may leave a sandbox and what it sees of the world. It is pure: the kernel's walls (Compile)
// and Aether (Evaluate, World) ask it and have no rules of their own. Its values are plain data; everything may be
// called from any number of goroutines while nobody writes to them.
//
// One order of evaluation holds for names, addresses, server names and package services:
//
//  1. The platform's deny list (Platform): loopback, link-local, metadata, private and carrier-grade NAT ranges,
//     multicast and whatever else is no public address. Only a grant of the operator's lifts a part of it.
//  2. Policy.Services: a package service that is named there is allowed or rejected.
//  3. The rules of the phase, in order; the first that matches decides.
//  4. Reject.
//
// What a rule matches:
//
//	domain   a name, whatever it resolves to; never an address that was dialled as such
//	cidr     an address that was dialled as such; a reject also a name that resolves into it
//	service  a package service, or a repository and all below its path
//
//	ports     an allow without ports: 80 and 443 of a domain, every port of a cidr; a reject without ports: every port
//	protocol  an allow without protocol: TCP; a reject without protocol: both
//
// So a name that is allowed opens that name on the ports of its rule, wherever it resolves to outside the platform's
// deny list and the rejects before its rule, and no address. An address that is allowed opens no name.
package policy

import (
	"cmp"
	"net/netip"
	"slices"
	"strconv"
	"strings"
	"time"
)

// Policy of one sandbox. The zero Policy rejects everything.
type Policy struct {
	// Services are package services by name, allowed or rejected in every phase, before its rules.
	Services map[string]bool `json:"services,omitempty"`
	Phases   []Phase         `json:"phases,omitempty"`
	// Start is the phase in force at creation.
	Start string `json:"start,omitempty"`
	// AsOf is the world's date for package services; zero: today.
	AsOf time.Time `json:"as_of,omitzero"`
	// Deny names packages and repositories that do not exist, "<service>:<name>[@<version>]", "git:<host>/<path>".
	Deny []string `json:"deny,omitempty"`
	// Pin names versions that exist although their date is unknown, "<service>:<name>@<version>".
	Pin        []string `json:"pin,omitempty"`
	InspectTLS bool     `json:"inspect_tls,omitempty"`
	Limits     Limits   `json:"limits,omitzero"`
}

// Limits of one sandbox; 0 takes the node's.
type Limits struct {
	Bytes        int64 `json:"bytes,omitempty"`          // both ways, over the sandbox's life
	Flows        int   `json:"flows,omitempty"`          // open at once
	DNSPerSecond int   `json:"dns_per_second,omitempty"` // questions
}

// Phase is what holds at one stage of a task.
type Phase struct {
	Name          string    `json:"name"`
	Rules         []Rule    `json:"rules,omitempty"`
	AsOf          time.Time `json:"as_of,omitzero"` // instead of the policy's
	Deny          []string  `json:"deny,omitempty"` // beside the policy's
	Inbound       []Ports   `json:"inbound,omitempty"`
	InboundClosed bool      `json:"inbound_closed,omitempty"`
}

// Rule allows or rejects what it matches. Exactly one of Domain, CIDR and Service is set.
type Rule struct {
	Name     string   `json:"name,omitempty"`
	Reject   bool     `json:"reject,omitempty"`
	Domain   string   `json:"domain,omitempty"`  // "example.org", "*.example.org" (below it, not itself), "*"
	CIDR     string   `json:"cidr,omitempty"`    // address or network
	Service  string   `json:"service,omitempty"` // package service, or "git:<host>/<path>"
	Ports    []Ports  `json:"ports,omitempty"`   // none: see the package's comment
	Protocol Protocol `json:"protocol,omitempty"`
	Secret   string   `json:"secret,omitempty"` // that Aether injects
}

// Ports are First to Last, both included.
type Ports struct {
	First uint16 `json:"first"`
	Last  uint16 `json:"last"`
}

// Protocol of the transport.
type Protocol string

// The protocols that can be allowed. Everything else never leaves a sandbox.
const (
	TCP Protocol = "tcp"
	UDP Protocol = "udp"
)

// Names of the package services.
const (
	PyPI     = "pypi"
	NPM      = "npm"
	Golang   = "golang"
	Crates   = "crates"
	Debian   = "debian"
	Maven    = "maven"
	RubyGems = "rubygems"
)

// Names of rules that no policy holds, as verdicts and the flow log show them.
const (
	RulePlatform = "platform"       // the platform's deny list
	RuleDefault  = "default reject" // no rule matched
	RuleAsOf     = "as_of"          // published after the world's date; "as_of 2024-06-01" in verdicts
	RuleUndated  = "as_of undated"  // no date is known, and it is not pinned
	RuleDeny     = "deny"           // stands in a deny list; "deny <entry>" in verdicts
	RuleLimit    = "limit"          // "limit bytes", "limit flows", "limit dns_per_second"
	RuleInbound  = "inbound"        // the phase's inbound ports
)

// Question is what is asked of a policy: one of a name, an address and a service. All that is known is set: for a name
// that has been resolved the address too, once for each address.
type Question struct {
	// Name is a host name that the sandbox used: asked of the resolver, in CONNECT, in SNI or Host.
	Name string
	// Addr is where the packets would go: what the sandbox dialled, or what Name resolved to.
	Addr     netip.Addr
	Port     uint16   // 0: any port, as for a question to the resolver; nobody can connect to it
	Protocol Protocol // empty: TCP; any with port 0
	// Service is a package service, or "git:<host>/<path>".
	Service string
}

// Verdict answers a Question.
type Verdict struct {
	Allow bool
	// Rule that decided: its name, or one of the Rule constants.
	Rule string
	// Reason is a sentence for people.
	Reason string
	// Secret of the rule, if it has one.
	Secret string
}

// Grants are parts of the platform's deny list that the operator opened for a project.
type Grants []netip.Prefix

// Walls are what the kernel enforces of one phase: less than Evaluate, never more open in what it leaves to the kernel
// alone. Everything that they let pass is still judged by Aether.
type Walls struct {
	// Names: the sandbox may ask the resolver, the proxy and the mirrors, and connect to addresses that stand for names.
	Names bool
	// Openings are the addresses that rules allow directly, none of them on the platform's deny list.
	Openings []Opening
}

// Opening is a part of the address space that may be dialled. Rejects are resolved: openings never overlap a reject that
// comes before their rule, nor each other.
type Opening struct {
	Prefix   netip.Prefix
	Ports    Ports
	Protocol Protocol
}

// services in the order in which messages list them.
var services = []string{PyPI, NPM, Golang, Crates, Debian, Maven, RubyGems}

// DefaultPhase is the name of the phase of a policy that names none.
const DefaultPhase = "default"

// Phase finds a phase by its name.
func (p Policy) Phase(name string) (Phase, bool) {
	i := slices.IndexFunc(p.Phases, func(ph Phase) bool { return ph.Name == name })
	if i < 0 {
		return Phase{}, false
	}
	return p.Phases[i], true
}

// Open reports whether any phase allows anything: whether the sandbox needs a network at all.
func (p Policy) Open() bool {
	for _, allowed := range p.Services {
		if allowed {
			return true
		}
	}
	return slices.ContainsFunc(p.Phases, func(ph Phase) bool {
		return slices.ContainsFunc(ph.Rules, func(r Rule) bool { return !r.Reject })
	})
}

// AllowedServices lists the package services that a phase allows, sorted, repositories ("git:<host>/<path>") among them;
// what lies below a repository's path may still be rejected by a rule before it.
func (p Policy) AllowedServices(phase string) []string {
	var out []string
	for _, s := range services {
		if Evaluate(p, phase, Question{Service: s}, nil).Allow {
			out = append(out, s)
		}
	}
	ph, _ := p.Phase(phase)
	for _, r := range ph.Rules {
		if strings.HasPrefix(r.Service, gitPrefix) && Evaluate(p, phase, Question{Service: r.Service}, nil).Allow {
			out = append(out, r.Service)
		}
	}
	slices.Sort(out)
	return slices.Compact(out)
}

// Inbound answers whether an endpoint may reach a port inside.
func (p Policy) Inbound(phase string, port uint16) Verdict {
	ph, ok := p.Phase(phase)
	switch {
	case !ok:
		return Verdict{Rule: RuleInbound, Reason: "there is no phase " + strconv.Quote(phase)}
	case ph.InboundClosed:
		return Verdict{Rule: RuleInbound, Reason: "phase " + phase + " lets endpoints reach no port"}
	case port == 0:
		return Verdict{Rule: RuleInbound, Reason: "there is no port 0"}
	case len(ph.Inbound) == 0 || slices.ContainsFunc(ph.Inbound, func(r Ports) bool { return r.has(port) }):
		return Verdict{Allow: true, Rule: RuleInbound, Reason: "phase " + phase + " lets endpoints reach port " + strconv.Itoa(int(port))}
	}
	return Verdict{Rule: RuleInbound, Reason: "phase " + phase + " lets endpoints reach other ports, not " + strconv.Itoa(int(port))}
}

// World is what package services show in a phase. It keeps the policy's lists, which must not be changed after that.
func (p Policy) World(phase string) World {
	ph, _ := p.Phase(phase)
	w := World{AsOf: p.AsOf, Deny: slices.Concat(p.Deny, ph.Deny), Pin: p.Pin}
	if !ph.AsOf.IsZero() {
		w.AsOf = ph.AsOf
	}
	w.index = newIndex(w.Deny, w.Pin)
	return w
}

// malformed ranges name no port.
func (r Ports) malformed() bool { return r.First == 0 || r.Last < r.First }

func (r Ports) has(port uint16) bool { return r.First <= port && port <= r.Last }

// String is "443" or "8000-8100".
func (r Ports) String() string {
	if r.First == r.Last {
		return strconv.Itoa(int(r.First))
	}
	return strconv.Itoa(int(r.First)) + "-" + strconv.Itoa(int(r.Last))
}

// minus is what of r lies outside o, at most two ranges.
func (r Ports) minus(o Ports) []Ports {
	if o.Last < r.First || r.Last < o.First {
		return []Ports{r}
	}
	var out []Ports
	if r.First < o.First {
		out = append(out, Ports{r.First, o.First - 1})
	}
	if o.Last < r.Last {
		out = append(out, Ports{o.Last + 1, r.Last})
	}
	return out
}

func (r Ports) overlaps(o Ports) bool { return r.First <= o.Last && o.First <= r.Last }

func comparePorts(a, b Ports) int {
	return cmp.Or(cmp.Compare(a.First, b.First), cmp.Compare(a.Last, b.Last))
}
