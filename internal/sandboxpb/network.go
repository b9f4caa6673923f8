package sandboxpb

import (
	"fmt"
	"maps"
	"math"
	"reflect"
	"slices"
	"time"

	"google.golang.org/protobuf/types/known/timestamppb"

	"github.com/sandsea/sandsea/api/errdefs"
	sandseav1 "github.com/sandsea/sandsea/api/sandsea/v1"
	"github.com/sandsea/sandsea/internal/policy"
)

// ToPolicy is the policy that a message asks for, not validated. A nil message is the empty policy. What the model has
// no room for is Invalid here, named below field ("network.phases[0].rules[1].ports[0].first"): a port beyond 65535, an
// unknown protocol, a time that does not exist.
func ToPolicy(field string, m *sandseav1.NetworkPolicy) (policy.Policy, error) {
	p := policy.Policy{
		Services: maps.Clone(m.GetServices()), Start: m.GetPhase(), Deny: slices.Clone(m.GetDeny()),
		Pin: slices.Clone(m.GetPin()), InspectTLS: m.GetInspectTls(),
		Limits: policy.Limits{
			Bytes: m.GetLimits().GetBytes(), Flows: int(m.GetLimits().GetFlows()), DNSPerSecond: int(m.GetLimits().GetDnsPerSecond()),
		},
	}
	var err error
	if p.AsOf, err = toTime(field+".as_of", m.GetAsOf()); err != nil {
		return p, err
	}
	for i, phase := range m.GetPhases() {
		ph, err := toPhase(fmt.Sprintf("%s.phases[%d]", field, i), phase)
		if err != nil {
			return p, err
		}
		p.Phases = append(p.Phases, ph)
	}
	return p, nil
}

func toPhase(field string, m *sandseav1.NetworkPhase) (policy.Phase, error) {
	ph := policy.Phase{Name: m.GetName(), Deny: slices.Clone(m.GetDeny()), InboundClosed: m.GetInboundClosed()}
	var err error
	if ph.AsOf, err = toTime(field+".as_of", m.GetAsOf()); err != nil {
		return ph, err
	}
	if ph.Inbound, err = toPorts(field+".inbound", m.GetInbound()); err != nil {
		return ph, err
	}
	for i, rule := range m.GetRules() {
		r, err := toRule(fmt.Sprintf("%s.rules[%d]", field, i), rule)
		if err != nil {
			return ph, err
		}
		ph.Rules = append(ph.Rules, r)
	}
	return ph, nil
}

func toRule(field string, m *sandseav1.NetworkRule) (policy.Rule, error) {
	r := policy.Rule{
		Name: m.GetName(), Reject: m.GetReject(), Domain: m.GetDomain(), CIDR: m.GetCidr(), Service: m.GetService(),
		Secret: m.GetSecret(),
	}
	var err error
	if r.Protocol, err = ToProtocol(field+".protocol", m.GetProtocol()); err != nil {
		return r, err
	}
	r.Ports, err = toPorts(field+".ports", m.GetPorts())
	return r, err
}

// ToProtocol reads a protocol; unspecified is empty.
func ToProtocol(field string, m sandseav1.NetworkProtocol) (policy.Protocol, error) {
	switch m {
	case sandseav1.NetworkProtocol_NETWORK_PROTOCOL_UNSPECIFIED:
		return "", nil
	case sandseav1.NetworkProtocol_NETWORK_PROTOCOL_TCP:
		return policy.TCP, nil
	case sandseav1.NetworkProtocol_NETWORK_PROTOCOL_UDP:
		return policy.UDP, nil
	}
	return "", errdefs.New(errdefs.Invalid, "", "%s: %d is not known", field, m).WithField(field, "").WithHint("Use tcp or udp")
}

func fromProtocol(p policy.Protocol) sandseav1.NetworkProtocol {
	switch p {
	case policy.TCP:
		return sandseav1.NetworkProtocol_NETWORK_PROTOCOL_TCP
	case policy.UDP:
		return sandseav1.NetworkProtocol_NETWORK_PROTOCOL_UDP
	}
	return sandseav1.NetworkProtocol_NETWORK_PROTOCOL_UNSPECIFIED
}

// toPorts reads ranges of ports; a last of 0 is the first.
func toPorts(field string, ms []*sandseav1.PortRange) ([]policy.Ports, error) {
	var out []policy.Ports
	for i, m := range ms {
		last := m.GetLast()
		if last == 0 {
			last = m.GetFirst()
		}
		for _, p := range []struct {
			name string
			v    int32
		}{{"first", m.GetFirst()}, {"last", last}} {
			if p.v < 1 || p.v > math.MaxUint16 {
				at := fmt.Sprintf("%s[%d].%s", field, i, p.name)
				return nil, errdefs.New(errdefs.Invalid, "", "%s: there is no port %d", at, p.v).WithField(at, "1 to 65535").
					WithHint("Give 1 to 65535, or no ports at all")
			}
		}
		out = append(out, policy.Ports{First: uint16(m.GetFirst()), Last: uint16(last)})
	}
	return out, nil
}

func toTime(field string, m *timestamppb.Timestamp) (t time.Time, err error) {
	if m == nil {
		return t, nil
	}
	if m.CheckValid() != nil || m.AsTime().IsZero() {
		return t, errdefs.New(errdefs.Invalid, "", "%s: %d s and %d ns are no time", field, m.GetSeconds(), m.GetNanos()).
			WithField(field, "1970 to 9999").WithHint("Give a date from 1970 on, or none for today")
	}
	return m.AsTime(), nil
}

// FromPolicy is the message for a policy; nil for the empty one.
func FromPolicy(p policy.Policy) *sandseav1.NetworkPolicy {
	if reflect.ValueOf(p).IsZero() {
		return nil
	}
	m := &sandseav1.NetworkPolicy{
		Services: maps.Clone(p.Services), Phase: p.Start, AsOf: fromTime(p.AsOf), Deny: slices.Clone(p.Deny),
		Pin: slices.Clone(p.Pin), InspectTls: p.InspectTLS,
	}
	if p.Limits != (policy.Limits{}) {
		m.Limits = &sandseav1.NetworkLimits{
			Bytes: p.Limits.Bytes, Flows: int32(p.Limits.Flows), DnsPerSecond: int32(p.Limits.DNSPerSecond),
		}
	}
	for _, ph := range p.Phases {
		phase := &sandseav1.NetworkPhase{
			Name: ph.Name, AsOf: fromTime(ph.AsOf), Deny: slices.Clone(ph.Deny), Inbound: fromPorts(ph.Inbound),
			InboundClosed: ph.InboundClosed,
		}
		for _, r := range ph.Rules {
			phase.Rules = append(phase.Rules, fromRule(r))
		}
		m.Phases = append(m.Phases, phase)
	}
	return m
}

func fromRule(r policy.Rule) *sandseav1.NetworkRule {
	m := &sandseav1.NetworkRule{
		Name: r.Name, Reject: r.Reject, Ports: fromPorts(r.Ports), Protocol: fromProtocol(r.Protocol), Secret: r.Secret,
	}
	switch {
	case r.Domain != "":
		m.Target = &sandseav1.NetworkRule_Domain{Domain: r.Domain}
	case r.CIDR != "":
		m.Target = &sandseav1.NetworkRule_Cidr{Cidr: r.CIDR}
	case r.Service != "":
		m.Target = &sandseav1.NetworkRule_Service{Service: r.Service}
	}
	return m
}

func fromPorts(ps []policy.Ports) []*sandseav1.PortRange {
	var out []*sandseav1.PortRange
	for _, p := range ps {
		out = append(out, &sandseav1.PortRange{First: int32(p.First), Last: int32(p.Last)})
	}
	return out
}

func fromTime(t time.Time) *timestamppb.Timestamp {
	if t.IsZero() {
		return nil
	}
	return timestamppb.New(t)
}
