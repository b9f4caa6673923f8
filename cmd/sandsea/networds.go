package main

import (
	"cmp"
	"fmt"
	"maps"
	"slices"
	"strconv"
	"strings"
	"time"

	"google.golang.org/protobuf/types/known/timestamppb"

	sandseav1 "github.com/sandsea/sandsea/api/sandsea/v1"
	"github.com/sandsea/sandsea/cmd/sandsea/ui"
	"github.com/sandsea/sandsea/internal/policy"
)

// phaseInForce is the phase of a sandbox's policy that holds; nil when it has none by that name.
func phaseInForce(sb *sandseav1.Sandbox) *sandseav1.NetworkPhase {
	phases := sb.GetSpec().GetNetwork().GetPhases()
	name := cmp.Or(sb.GetNetworkPhase(), sb.GetSpec().GetNetwork().GetPhase())
	if name == "" && len(phases) > 0 {
		return phases[0]
	}
	at := slices.IndexFunc(phases, func(p *sandseav1.NetworkPhase) bool { return p.GetName() == name })
	if at < 0 {
		return nil
	}
	return phases[at]
}

func phaseWord(sb *sandseav1.Sandbox) string {
	return cmp.Or(sb.GetNetworkPhase(), phaseInForce(sb).GetName(), defaultPhase)
}

// netWord sums up what may leave a sandbox in the phase in force: the package services, and how many rules allow more.
func netWord(sb *sandseav1.Sandbox) string {
	words, more := letOut(sb)
	if more > 0 {
		words = append(words, "+"+strconv.Itoa(more))
	}
	return cmp.Or(strings.Join(words, ","), "-")
}

// netSentence is netWord in full.
func netSentence(sb *sandseav1.Sandbox) string {
	words, more := letOut(sb)
	switch {
	case more == 1:
		words = append(words, "1 rule")
	case more > 1:
		words = append(words, strconv.Itoa(more)+" rules")
	}
	return cmp.Or(strings.Join(words, ", "), "nothing is let out")
}

// letOut are the package services that the phase in force allows, and how many of its rules allow something else.
func letOut(sb *sandseav1.Sandbox) (services []string, rules int) {
	allowed := map[string]bool{}
	for name, yes := range sb.GetSpec().GetNetwork().GetServices() {
		allowed[name] = yes
	}
	for _, r := range phaseInForce(sb).GetRules() {
		name := r.GetService()
		_, decided := allowed[name]
		switch {
		case slices.Contains(packageServices, name) && !decided:
			allowed[name] = !r.GetReject()
		case !slices.Contains(packageServices, name) && !r.GetReject():
			rules++
		}
	}
	for _, name := range slices.Sorted(maps.Keys(allowed)) {
		if allowed[name] {
			services = append(services, name)
		}
	}
	return services, rules
}

// networkRows are the policy of a sandbox and its traffic.
func networkRows(sb *sandseav1.Sandbox) [][2]string {
	p := sb.GetSpec().GetNetwork()
	if closed(p) {
		return append([][2]string{row("policy", "none: loopback only")}, endpointRows(phaseInForce(sb))...)
	}
	rows := [][2]string{row("services", "%s", serviceWords(p.GetServices()))}
	if names := phaseNames(p); len(names) > 1 {
		rows = append(rows, row("phase", "%s, of %s", phaseWord(sb), strings.Join(names, ", ")))
	} else {
		rows = append(rows, row("phase", "%s", phaseWord(sb)))
	}
	phase := phaseInForce(sb)
	for i, r := range phase.GetRules() {
		rows = append(rows, row(fmt.Sprintf("rule %d", i+1), "%s", ruleText(r)))
	}
	if asOf := cmp.Or(phase.GetAsOf(), p.GetAsOf()); asOf != nil {
		rows = append(rows, row("as of", "%s", dateWord(asOf)))
	}
	if deny := slices.Concat(p.GetDeny(), phase.GetDeny()); len(deny) > 0 {
		rows = append(rows, row("deny", "%s", strings.Join(deny, ", ")))
	}
	if n := len(p.GetPin()); n > 0 {
		rows = append(rows, row("pinned", "%d versions without a date", n))
	}
	if p.GetInspectTls() {
		rows = append(rows, row("TLS", "inspected, by an authority of this sandbox alone"))
	}
	rows = append(rows, endpointRows(phase)...)
	if u := sb.GetUsage(); u != nil {
		sum := u.GetNetSentBytes() + u.GetNetReceivedBytes()
		traffic := fmt.Sprintf("%s sent, %s received", ui.Size(u.GetNetSentBytes()), ui.Size(u.GetNetReceivedBytes()))
		if most := p.GetLimits().GetBytes(); most > 0 {
			traffic += fmt.Sprintf("; %s / %s", ui.Size(sum), ui.Size(most))
		}
		rows = append(rows, row("traffic", "%s", traffic), row("flows", "%s open, %s denied: sandsea net log %s",
			ofLimit(u.GetNetFlows(), int64(p.GetLimits().GetFlows())), ui.Count(u.GetNetDenied()), short(sb.GetId())))
	}
	return rows
}

// endpointRows say what endpoints may reach, unless that is everything.
func endpointRows(phase *sandseav1.NetworkPhase) [][2]string {
	if phase.GetInboundClosed() {
		return [][2]string{row("endpoints", "none")}
	}
	if in := phase.GetInbound(); len(in) > 0 {
		return [][2]string{row("endpoints", "ports %s", portWords(in))}
	}
	return nil
}

// closed reports whether a policy lets nothing out in any phase.
func closed(p *sandseav1.NetworkPolicy) bool {
	for _, yes := range p.GetServices() {
		if yes {
			return false
		}
	}
	return !slices.ContainsFunc(p.GetPhases(), func(ph *sandseav1.NetworkPhase) bool {
		return slices.ContainsFunc(ph.GetRules(), func(r *sandseav1.NetworkRule) bool { return !r.GetReject() })
	})
}

func ofLimit(n, limit int64) string {
	if limit > 0 {
		return fmt.Sprintf("%s / %s", ui.Count(n), ui.Count(limit))
	}
	return ui.Count(n)
}

func serviceWords(services map[string]bool) string {
	var words []string
	for _, name := range slices.Sorted(maps.Keys(services)) {
		word := name
		if !services[name] {
			word = "not " + name
		}
		words = append(words, word)
	}
	return cmp.Or(strings.Join(words, ", "), "none")
}

func phaseNames(p *sandseav1.NetworkPolicy) (out []string) {
	for _, ph := range p.GetPhases() {
		out = append(out, ph.GetName())
	}
	return out
}

// dateWord is a moment for people: a day, when it is its first moment.
func dateWord(t *timestamppb.Timestamp) string {
	at := t.AsTime()
	if at.Equal(at.Truncate(24 * time.Hour)) {
		return at.Format(time.DateOnly)
	}
	return at.Format(time.RFC3339)
}

// ruleText is a rule as --allow takes it, with its name.
func ruleText(r *sandseav1.NetworkRule) string {
	var b strings.Builder
	if r.GetReject() {
		b.WriteString("!")
	}
	if r.GetProtocol() == sandseav1.NetworkProtocol_NETWORK_PROTOCOL_UDP {
		b.WriteString("udp://")
	}
	target, ports := cmp.Or(r.GetDomain(), r.GetService(), r.GetCidr()), portWords(r.GetPorts())
	if ports != "" && strings.Contains(target, ":") {
		b.WriteString("[" + target + "]")
	} else {
		b.WriteString(target)
	}
	if ports != "" {
		b.WriteString(":" + ports)
	}
	kind, own, _ := strings.Cut(strings.TrimPrefix(r.GetName(), "reject "), " ")
	if r.GetName() != "" && (own != target || !slices.Contains(targetKinds, kind)) {
		fmt.Fprintf(&b, " (%s)", r.GetName())
	}
	if r.GetSecret() != "" {
		fmt.Fprintf(&b, " with secret %s", r.GetSecret())
	}
	return b.String()
}

// targetKinds begin the names that rules get which have none: "domain example.org", "reject cidr 192.0.2.7".
var targetKinds = []string{"domain", "cidr", "service"}

func portWords(ports []*sandseav1.PortRange) string {
	var words []string
	for _, p := range ports {
		word := strconv.Itoa(int(p.GetFirst()))
		if last := p.GetLast(); last != 0 && last != p.GetFirst() {
			word += "-" + strconv.Itoa(int(last))
		}
		words = append(words, word)
	}
	return strings.Join(words, ",")
}

// ruleWord names the rule that decided; those that no policy holds speak for themselves.
func ruleWord(rule string) string {
	switch {
	case rule == "":
		return ""
	case rule == policy.RuleDefault, rule == policy.RulePlatform, strings.HasPrefix(rule, policy.RuleLimit+" "):
		return rule
	}
	return "rule " + rule
}
