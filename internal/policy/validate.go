package policy

import (
	"encoding/json"
	"fmt"
	"maps"
	"net/netip"
	"slices"
	"strings"
	"time"

	"github.com/sandsea/sandsea/api/errdefs"
)

// Bounds of a policy.
const (
	MaxPhases   = 16
	MaxRules    = 256  // of a phase
	MaxRanges   = 64   // of ports, of one rule or one phase's inbound
	MaxDeny     = 256  // of a policy, and of each phase
	MaxPins     = 4096 // of a policy
	MaxOpenings = 4096 // that a phase compiles to, without any grant
	MaxBytes    = 512 << 10

	maxLimitBytes = 1 << 50
	maxLimitFlows = 1 << 20
	maxPhaseName  = 64
	maxRuleName   = 128
)

// Validate checks every field, fills the defaults and returns the complete Policy, in canonical spelling. An error is
// errdefs.Invalid and names the field in the words of the API ("network.phases[1].rules[0].domain"), the bound and the
// way out. A validated policy stays as it is when it is validated again. Whether addresses need a grant is not checked
// here, since grants are the node's: see Granted.
func (p Policy) Validate() (Policy, error) {
	if err := p.checkServices(); err != nil {
		return p, err
	}
	if len(p.Phases) > MaxPhases {
		return p, invalid("network.phases", "16 phases", "%d phases", len(p.Phases)).WithHint("Give at most %d", MaxPhases)
	}
	p.Phases = slices.Clone(p.Phases)
	if len(p.Phases) == 0 {
		p.Phases = []Phase{{Name: DefaultPhase}}
	}
	for i := range p.Phases {
		var err error
		if p.Phases[i], err = p.Phases[i].validate(fmt.Sprintf("network.phases[%d]", i), p.InspectTLS); err != nil {
			return p, err
		}
		for j := range i {
			if p.Phases[j].Name == p.Phases[i].Name {
				return p, invalid(fmt.Sprintf("network.phases[%d].name", i), "", "%q names phase %d already", p.Phases[i].Name, j).
					WithHint("Give every phase a name of its own")
			}
		}
	}
	if p.Start == "" {
		p.Start = p.Phases[0].Name
	}
	if _, ok := p.Phase(p.Start); !ok {
		return p, invalid("network.phase", "", "there is no phase %q", clip(p.Start)).WithHint("Name one of network.phases")
	}
	var err error
	if p.AsOf, err = checkAsOf("network.as_of", p.AsOf); err != nil {
		return p, err
	}
	if p.Deny, err = checkEntries("network.deny", p.Deny, MaxDeny, false); err != nil {
		return p, err
	}
	if p.Pin, err = checkEntries("network.pin", p.Pin, MaxPins, true); err != nil {
		return p, err
	}
	if err := p.Limits.check(); err != nil {
		return p, err
	}
	return p, p.checkSize()
}

func invalid(field, limit, format string, args ...any) *errdefs.Error {
	return errdefs.New(errdefs.Invalid, "", field+": "+format, args...).WithField(field, limit)
}

func (p Policy) checkServices() error {
	for _, name := range slices.Sorted(maps.Keys(p.Services)) {
		if strings.HasPrefix(name, gitPrefix) {
			return invalid("network.services", "", "%q is a repository", clip(name)).
				WithHint("Put it into a rule of a phase, as its service")
		}
		if !slices.Contains(services, name) {
			return invalid("network.services", "", "there is no package service %q", clip(name)).WithHint("%s", serviceHint())
		}
	}
	return nil
}

func serviceHint() string {
	last := len(services) - 1
	return "Use " + strings.Join(services[:last], ", ") + " or " + services[last]
}

func (ph Phase) validate(field string, inspect bool) (Phase, error) {
	if ph.Name == "" || len(ph.Name) > maxPhaseName || strings.ContainsFunc(ph.Name, notInName) {
		return ph, invalid(field+".name", "64 letters", "%q is no name of a phase", clip(ph.Name)).
			WithHint(`Use letters, digits, "-" and "_", at most 64`)
	}
	if len(ph.Rules) > MaxRules {
		return ph, invalid(field+".rules", "256 rules", "%d rules", len(ph.Rules)).
			WithHint("Give at most %d; a wildcard or a network stands for many", MaxRules)
	}
	ph.Rules = slices.Clone(ph.Rules)
	for i := range ph.Rules {
		var err error
		if ph.Rules[i], err = ph.Rules[i].validate(fmt.Sprintf("%s.rules[%d]", field, i), inspect); err != nil {
			return ph, err
		}
	}
	var err error
	if ph.AsOf, err = checkAsOf(field+".as_of", ph.AsOf); err != nil {
		return ph, err
	}
	if ph.Deny, err = checkEntries(field+".deny", ph.Deny, MaxDeny, false); err != nil {
		return ph, err
	}
	if ph.Inbound, err = checkPorts(field+".inbound", ph.Inbound); err != nil {
		return ph, err
	}
	if ph.InboundClosed && len(ph.Inbound) > 0 {
		return ph, invalid(field+".inbound_closed", "", "inbound names ports that it closes").
			WithHint("Leave out one of inbound and inbound_closed")
	}
	if _, ok := compile(Policy{Phases: []Phase{ph}}, ph.Name, nil, MaxOpenings); !ok {
		return ph, invalid(field+".rules", "4096 openings", "the networks cut each other into more than %d pieces", MaxOpenings).
			WithHint("Use fewer rejects inside of allowed networks, or fewer port ranges")
	}
	return ph, nil
}

// notInName tells what no name of a phase or secret holds.
func notInName(r rune) bool {
	return !('a' <= r && r <= 'z' || 'A' <= r && r <= 'Z' || '0' <= r && r <= '9' || r == '-' || r == '_')
}

func (r Rule) validate(field string, inspect bool) (Rule, error) {
	var err error
	switch set := r.targets(); {
	case len(set) == 0:
		return r, invalid(field, "", "names nothing that it is about").WithHint("Set one of domain, cidr and service")
	case len(set) > 1:
		return r, invalid(field, "", "has both %s and %s", set[0], set[1]).WithHint("Make two rules of it")
	case r.Domain != "":
		r.Domain, err = checkDomain(field+".domain", r.Domain)
	case r.CIDR != "":
		r.CIDR, err = checkCIDR(field+".cidr", r.CIDR)
	default:
		r.Service, err = checkService(field+".service", r.Service)
	}
	if err != nil {
		return r, err
	}
	if r.Service != "" && len(r.Ports) > 0 {
		return r, invalid(field+".ports", "", "a service takes none").WithHint("Leave them out")
	}
	if r.Ports, err = checkPorts(field+".ports", r.Ports); err != nil {
		return r, err
	}
	switch {
	case r.Protocol != "" && r.Protocol != TCP && r.Protocol != UDP:
		return r, invalid(field+".protocol", "", "%q is not known", clip(string(r.Protocol))).WithHint("Use tcp or udp")
	case r.Protocol == UDP && r.Service != "":
		return r, invalid(field+".protocol", "", "a service is reached by TCP").WithHint("Leave it out")
	}
	if err := r.checkSecret(field+".secret", inspect); err != nil {
		return r, err
	}
	r.Name = r.name()
	return r, checkRuleName(field+".name", r.Name)
}

// targets lists which of the fields that say what the rule is about are set.
func (r Rule) targets() []string {
	var out []string
	for _, t := range []struct{ field, v string }{{"domain", r.Domain}, {"cidr", r.CIDR}, {"service", r.Service}} {
		if t.v != "" {
			out = append(out, t.field)
		}
	}
	return out
}

func (r Rule) checkSecret(field string, inspect bool) error {
	switch {
	case r.Secret == "":
		return nil
	case len(r.Secret) > maxPhaseName || strings.ContainsFunc(r.Secret, notInName):
		return invalid(field, "64 letters", "%q is no name of a secret", clip(r.Secret)).
			WithHint(`Use letters, digits, "-" and "_", at most 64`)
	case !inspect:
		return invalid(field, "", "Aether sees no request that it could add %s to", r.Secret).WithHint("Set network.inspect_tls")
	case r.Reject || r.CIDR != "" || r.Protocol == UDP || r.Service != "" && !strings.HasPrefix(r.Service, gitPrefix):
		return invalid(field, "", "goes with no such rule").
			WithHint("Put it on a rule that allows a domain or a repository by TCP")
	}
	return nil
}

// checkRuleName keeps names printable and apart from those that verdicts have for what no rule says.
func checkRuleName(field, name string) error {
	if len(name) > maxRuleName+maxEntry || strings.ContainsFunc(name, func(r rune) bool { return r < ' ' || r > '~' }) {
		return invalid(field, "128 letters", "%q is no name of a rule", clip(name)).
			WithHint("Use printable ASCII, at most %d letters", maxRuleName)
	}
	first, _, _ := strings.Cut(name, " ")
	if name == RuleDefault || slices.Contains([]string{RulePlatform, RuleAsOf, RuleDeny, RuleLimit, RuleInbound}, first) {
		return invalid(field, "", "%q is what the log calls a decision of no rule", clip(name)).WithHint("Choose another name")
	}
	return nil
}

func checkDomain(field, s string) (string, error) {
	if d, ok := canonicalDomain(s); ok {
		for label := range strings.SplitSeq(d, ".") {
			if code, ok := strings.CutPrefix(label, "xn--"); ok && !isPunycode(code) {
				return s, invalid(field, "", "%q is the form of no international name", clip(label)).
					WithHint("Give the xn-- form that the registrar shows")
			}
		}
		return d, nil
	}
	bad := func(hint string) (string, error) {
		return s, invalid(field, "253 letters", "%q is no domain", clip(s)).WithHint("%s", hint)
	}
	bare := strings.TrimSuffix(strings.TrimPrefix(s, "["), "]")
	_, notAddress := netip.ParseAddr(bare)
	_, notNetwork := netip.ParsePrefix(bare)
	switch host, port, hasPort := strings.Cut(s, ":"); {
	case strings.ContainsFunc(s, func(r rune) bool { return r > '~' }):
		return bad("Give an international name in its xn-- form")
	case notAddress == nil || notNetwork == nil:
		return bad("Put addresses into cidr")
	case strings.Contains(s, "/"):
		return bad("Give the host name alone, without scheme and path")
	case hasPort && isNumeric(port) && host != "":
		return bad("Put the port into ports")
	case strings.Contains(s, "*"):
		return bad(`A wildcard is "*" alone, or "*." before a name`)
	}
	return bad(`Use a host name, "*.name" for all below it, or "*"`)
}

func checkCIDR(field, s string) (string, error) {
	if p, ok := cidr(s); ok {
		if p.IsSingleIP() {
			return p.Addr().String(), nil
		}
		return p.String(), nil
	}
	p, err := netip.ParsePrefix(s)
	if err != nil {
		if a, err := netip.ParseAddr(s); err == nil {
			p = netip.PrefixFrom(a.WithZone(""), a.BitLen())
		}
	}
	e := invalid(field, "", "%q is no address and no network", clip(s))
	switch {
	case !p.IsValid():
		return s, e.WithHint(`Write it as "192.0.2.7" or "2001:db8::/32"; names go into domain, ports into ports`)
	case p.Addr().Is4In6() && p.Bits() < 96:
		return s, e.WithHint("Give the IPv4 network")
	case p.Addr().Is4In6():
		return s, e.WithHint("Give the IPv4 form, %s", netip.PrefixFrom(p.Addr().Unmap(), p.Bits()-96).Masked())
	case p != p.Masked():
		return s, e.WithHint("The network is %s, the address alone %s", p.Masked(), p.Addr())
	}
	return s, e.WithHint("Leave out the zone")
}

func checkService(field, s string) (string, error) {
	path, git := strings.CutPrefix(s, gitPrefix)
	if !git {
		if !slices.Contains(services, s) {
			return s, invalid(field, "", "there is no package service %q", clip(s)).
				WithHint("%s, or git:<host>/<path>", strings.Replace(serviceHint(), " or ", ", ", 1))
		}
		return s, nil
	}
	segs, ok := repoPath(path)
	if !ok || len(segs) < 2 {
		return s, invalid(field, "512 bytes", "%q names no repository", clip(s)).
			WithHint("Write it as git:<host>/<path>, without scheme and user")
	}
	return gitPrefix + strings.Join(segs, "/"), nil
}

func checkPorts(field string, in []Ports) ([]Ports, error) {
	if len(in) > MaxRanges {
		return in, invalid(field, "64 ranges", "%d ranges", len(in)).WithHint("Give at most %d", MaxRanges)
	}
	out := slices.Clone(in)
	for i := range out {
		r := &out[i]
		if r.Last == 0 {
			r.Last = r.First
		}
		at := fmt.Sprintf("%s[%d]", field, i)
		switch {
		case r.First == 0:
			return in, invalid(at+".first", "1 to 65535", "there is no port 0").WithHint("Give 1 to 65535, or no ports at all")
		case r.Last < r.First:
			return in, invalid(at+".last", "1 to 65535", "%d is below the first port, %d", r.Last, r.First).
				WithHint("Give the lower port first")
		}
	}
	return out, nil
}

// checkAsOf keeps the date in the range that people mean, and in UTC.
func checkAsOf(field string, t time.Time) (time.Time, error) {
	if t.IsZero() {
		return t, nil
	}
	if t = t.UTC().Round(0); t.Year() < 1970 || t.Year() > 9999 {
		return t, invalid(field, "1970 to 9999", "%s is no date of a package", t.Format(time.RFC3339)).
			WithHint("Give a date from 1970 on, or none for today")
	}
	return t, nil
}

func checkEntries(field string, in []string, most int, versioned bool) ([]string, error) {
	if len(in) > most {
		return in, invalid(field, fmt.Sprint(most, " entries"), "%d entries", len(in)).WithHint("Give at most %d", most)
	}
	out := slices.Clone(in)
	for i, s := range out {
		e, problem := readEntry(s)
		at := fmt.Sprintf("%s[%d]", field, i)
		switch {
		case problem != "" && !versioned:
			return in, invalid(at, "", "%q %s", clip(s), problem).
				WithHint("Write <service>:<name>, <service>:<name>@<version> or git:<host>/<path>")
		case problem != "" || versioned && e.version == "":
			return in, invalid(at, "", "%q %s", clip(s), or(problem, "names no version")).
				WithHint("Write <service>:<name>@<version>")
		}
		out[i] = e.text()
	}
	return out, nil
}

func or(s, fallback string) string {
	if s == "" {
		return fallback
	}
	return s
}

func (l Limits) check() error {
	for _, c := range []struct {
		field string
		v, hi int64
	}{
		{"network.limits.bytes", l.Bytes, maxLimitBytes},
		{"network.limits.flows", int64(l.Flows), maxLimitFlows},
		{"network.limits.dns_per_second", int64(l.DNSPerSecond), maxLimitFlows},
	} {
		if c.v < 0 || c.v > c.hi {
			return invalid(c.field, fmt.Sprint(c.hi), "%d is not between 0 and %d", c.v, c.hi).WithHint("0 takes the node's limit")
		}
	}
	return nil
}

// checkSize keeps the whole below what one message between edge and Aether carries.
func (p Policy) checkSize() error {
	raw, err := json.Marshal(p)
	if err != nil {
		return invalid("network", "", "cannot be written down: %v", err)
	}
	if len(raw) > MaxBytes {
		return invalid("network", "512 KiB", "takes %d KiB", len(raw)>>10).WithHint("Use at most 512 KiB of rules and lists")
	}
	return nil
}

// Granted checks what Validate cannot: that no rule allows an address or network of which the platform's deny list
// leaves nothing. Such a rule could never be in force. The error is errdefs.Denied and names the field. p is validated.
func (p Policy) Granted(g Grants) error {
	for i, ph := range p.Phases {
		for j, r := range ph.Rules {
			if r.Reject || r.CIDR == "" {
				continue
			}
			n, ok := cidr(r.CIDR)
			if !ok {
				continue
			}
			rest := []netip.Prefix{n}
			for _, c := range g.closed() {
				rest = minusPrefix(rest, c)
			}
			if len(rest) > 0 {
				continue
			}
			_, why := Platform(n.Addr())
			field := fmt.Sprintf("network.phases[%d].rules[%d].cidr", i, j)
			return errdefs.New(errdefs.Denied, "", "%s: %s is %s, which the platform denies", field, r.CIDR, why).
				WithField(field, "").WithHint("Ask the operator for a grant, or leave the rule out")
		}
	}
	return nil
}
