package policy

import (
	"strconv"
	"strings"

	"github.com/sandsea/sandsea/api/errdefs"
)

// Parse reads the short form of a rule, as command lines take it, and gives the validated rule:
//
//	pypi                      a package service
//	git:example.org/org/repo  a repository and all below its path
//	example.org               a name, on ports 80 and 443
//	example.org:443           on one port; "80,443" and "8000-8100" name several
//	*.example.org             every name below it
//	udp://ntp.example:123     another protocol
//	192.0.2.0/24:5432         addresses; those of IPv6 with a port in brackets, [2001:db8::/32]:443
//	!example.org              rejects instead
//
// A name of one label must end in a dot ("intranet."), so that a misspelt service is no name.
func Parse(text string) (Rule, error) {
	r := Rule{}
	rest, reject := strings.CutPrefix(text, "!")
	r.Reject = reject
	bad := func(hint string, args ...any) (Rule, error) {
		return Rule{}, errdefs.New(errdefs.Invalid, "", "%q is no network rule", clip(text)).WithHint(hint, args...)
	}
	if scheme, after, ok := strings.Cut(rest, "://"); ok {
		if r.Protocol = Protocol(scheme); r.Protocol != TCP && r.Protocol != UDP {
			return bad("Write %s, or tcp:// or udp:// before it", or(hostOf(after), "a host name"))
		}
		rest = after
	}
	target, ports, ok := splitPorts(rest)
	if !ok {
		return bad(`Write ports as "443", "80,443" or "8000-8100"`)
	}
	r.Ports = ports
	_, isCIDR := cidr(target)
	switch {
	case target == "":
		return bad("Write a service, a host name or a network")
	case strings.HasPrefix(rest, gitPrefix) || isService(rest):
		r.Service, r.Ports = rest, nil
	case isCIDR || strings.Contains(target, ":") || strings.Contains(target, "/"):
		r.CIDR = target
	case target != "*" && !strings.Contains(target, "."):
		return bad(`%s, or "%s." for a host of that name`, serviceHint(), clip(target))
	default:
		r.Domain = target
	}
	valid, err := r.validate("rule", true)
	if err != nil {
		e := errdefs.From(err)
		return bad("%s", e.HintText())
	}
	return valid, nil
}

func isService(s string) bool {
	for _, name := range services {
		if s == name {
			return true
		}
	}
	return false
}

// hostOf is the host of what follows a URL's scheme.
func hostOf(s string) string {
	s, _, _ = strings.Cut(s, "/")
	return clip(s)
}

// splitPorts takes the ports off the end of a rule. The colons of an IPv6 address are none of ports, unless brackets
// end it.
func splitPorts(s string) (target string, ports []Ports, ok bool) {
	if inner, found := strings.CutPrefix(s, "["); found {
		target, after, closed := strings.Cut(inner, "]")
		list, hasPorts := strings.CutPrefix(after, ":")
		if !closed || after != "" && !hasPorts {
			return s, nil, false
		}
		if after == "" {
			return target, nil, true
		}
		ports, ok := parsePorts(list)
		return target, ports, ok
	}
	at := strings.IndexByte(s, ':')
	if at < 0 || strings.Count(s, ":") > 1 || strings.HasPrefix(s, gitPrefix) {
		return s, nil, true
	}
	ports, ok = parsePorts(s[at+1:])
	return s[:at], ports, ok
}

func parsePorts(list string) ([]Ports, bool) {
	var out []Ports
	for part := range strings.SplitSeq(list, ",") {
		first, last, isRange := strings.Cut(part, "-")
		if !isRange {
			last = first
		}
		a, okA := parsePort(first)
		b, okB := parsePort(last)
		if !okA || !okB || b < a {
			return nil, false
		}
		out = append(out, Ports{a, b})
	}
	return out, true
}

func parsePort(s string) (uint16, bool) {
	if !isNumeric(s) {
		return 0, false
	}
	n, err := strconv.ParseUint(s, 10, 16)
	return uint16(n), err == nil && n > 0
}
