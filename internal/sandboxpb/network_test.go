package sandboxpb_test

import (
	"errors"
	"strings"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	"google.golang.org/protobuf/proto"
	"google.golang.org/protobuf/testing/protocmp"
	"google.golang.org/protobuf/types/known/timestamppb"
	"pgregory.net/rapid"

	"github.com/sandsea/sandsea/api/errdefs"
	sandseav1 "github.com/sandsea/sandsea/api/sandsea/v1"
	"github.com/sandsea/sandsea/internal/policy"
	"github.com/sandsea/sandsea/internal/sandboxpb"
)

// drawPolicy draws what the model can hold, valid or not.
func drawPolicy(t *rapid.T) policy.Policy {
	text := rapid.StringMatching(`[a-z]{1,8}`)
	list := rapid.SliceOfN(text, 1, 3)
	when := func(label string) time.Time {
		return time.Unix(rapid.Int64Range(0, 4e9).Draw(t, label), rapid.Int64Range(0, 999999999).Draw(t, label+" ns")).UTC()
	}
	ports := rapid.SliceOfN(rapid.Custom(func(t *rapid.T) policy.Ports {
		return policy.Ports{First: rapid.Uint16Min(1).Draw(t, "first"), Last: rapid.Uint16Min(1).Draw(t, "last")}
	}), 1, 3)
	rule := rapid.Custom(func(t *rapid.T) policy.Rule {
		r := policy.Rule{
			Name: text.Draw(t, "name"), Reject: rapid.Bool().Draw(t, "reject"), Secret: text.Draw(t, "secret"),
			Protocol: rapid.SampledFrom([]policy.Protocol{"", policy.TCP, policy.UDP}).Draw(t, "protocol"), Ports: ports.Draw(t, "ports"),
		}
		*rapid.SampledFrom([]*string{&r.Domain, &r.CIDR, &r.Service}).Draw(t, "target") = text.Draw(t, "of")
		return r
	})
	p := policy.Policy{
		Services: rapid.MapOfN(text, rapid.Bool(), 1, 3).Draw(t, "services"), Start: text.Draw(t, "start"),
		Deny: list.Draw(t, "deny"), Pin: list.Draw(t, "pin"), InspectTLS: rapid.Bool().Draw(t, "inspect"),
		Limits: policy.Limits{
			Bytes: rapid.Int64().Draw(t, "bytes"), Flows: int(rapid.Int32().Draw(t, "flows")), DNSPerSecond: int(rapid.Int32().Draw(t, "dns")),
		},
	}
	if rapid.Bool().Draw(t, "dated") {
		p.AsOf = when("as of")
	}
	for range rapid.IntRange(0, 2).Draw(t, "phases") {
		ph := policy.Phase{
			Name: text.Draw(t, "phase"), Rules: rapid.SliceOfN(rule, 1, 3).Draw(t, "rules"), AsOf: when("phase as of"),
			Deny: list.Draw(t, "phase deny"), Inbound: ports.Draw(t, "inbound"), InboundClosed: rapid.Bool().Draw(t, "closed"),
		}
		p.Phases = append(p.Phases, ph)
	}
	return p
}

func TestPolicySurvivesTheWire(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		want := drawPolicy(t)
		m := sandboxpb.FromPolicy(want)
		got, err := sandboxpb.ToPolicy("network", m)
		if err != nil {
			t.Fatal(err)
		}
		if d := cmp.Diff(want, got); d != "" {
			t.Fatalf("(-want +got):\n%s", d)
		}
		if d := cmp.Diff(m, sandboxpb.FromPolicy(got), protocmp.Transform()); d != "" {
			t.Fatalf("the message changed (-first +second):\n%s", d)
		}
	})
	if m := sandboxpb.FromPolicy(policy.Policy{}); m != nil {
		t.Errorf("the empty policy is %v", m)
	}
	if p, err := sandboxpb.ToPolicy("network", nil); err != nil || cmp.Diff(policy.Policy{}, p) != "" {
		t.Errorf("no message is %+v, %v", p, err)
	}
}

func TestEveryFieldOfTheNetworkMessagesReachesThePolicy(t *testing.T) {
	// A field that is added to a message and forgotten in the conversion would be dropped in silence.
	for m, want := range map[proto.Message]int{
		&sandseav1.NetworkPolicy{}: 8, &sandseav1.NetworkLimits{}: 3, &sandseav1.NetworkPhase{}: 6, &sandseav1.NetworkRule{}: 8,
		&sandseav1.PortRange{}: 2,
	} {
		if d := m.ProtoReflect().Descriptor(); d.Fields().Len() != want {
			t.Errorf("%s has %d fields, the conversion knows %d", d.Name(), d.Fields().Len(), want)
		}
	}
}

func TestAPortAloneIsARangeOfOne(t *testing.T) {
	p, err := sandboxpb.ToPolicy("network", &sandseav1.NetworkPolicy{Phases: []*sandseav1.NetworkPhase{{
		Inbound: []*sandseav1.PortRange{{First: 80}},
	}}})
	if err != nil || p.Phases[0].Inbound[0] != (policy.Ports{First: 80, Last: 80}) {
		t.Errorf("%+v, %v", p, err)
	}
}

func TestWhatThePolicyHasNoRoomForIsInvalidAndNamed(t *testing.T) {
	rule := func(r *sandseav1.NetworkRule) *sandseav1.NetworkPolicy {
		return &sandseav1.NetworkPolicy{Phases: []*sandseav1.NetworkPhase{{}, {Rules: []*sandseav1.NetworkRule{{}, r}}}}
	}
	ports := func(r *sandseav1.PortRange) *sandseav1.NetworkPolicy {
		return rule(&sandseav1.NetworkRule{Ports: []*sandseav1.PortRange{{First: 1}, r}})
	}
	for field, ms := range map[string][]*sandseav1.NetworkPolicy{
		"phases[1].rules[1].protocol": {rule(&sandseav1.NetworkRule{Protocol: 9})},
		"phases[1].rules[1].ports[1].first": {
			ports(&sandseav1.PortRange{}), ports(&sandseav1.PortRange{First: 65536}), ports(&sandseav1.PortRange{First: -1}),
			ports(&sandseav1.PortRange{Last: 80}), ports(&sandseav1.PortRange{First: 1<<16 + 443, Last: 1<<16 + 443}),
		},
		"phases[1].rules[1].ports[1].last": {
			ports(&sandseav1.PortRange{First: 1, Last: 65536}), ports(&sandseav1.PortRange{First: 1, Last: -1}),
		},
		"phases[0].inbound[0].first": {{Phases: []*sandseav1.NetworkPhase{{Inbound: []*sandseav1.PortRange{{}}}}}},
		"as_of":                      {{AsOf: &timestamppb.Timestamp{Nanos: -1}}, {AsOf: timestamppb.New(time.Time{})}},
		"phases[0].as_of":            {{Phases: []*sandseav1.NetworkPhase{{AsOf: &timestamppb.Timestamp{Seconds: 1 << 60}}}}},
	} {
		for _, m := range ms {
			_, err := sandboxpb.ToPolicy("network", m)
			e, ok := errors.AsType[*errdefs.Error](err)
			if !ok || e.Kind != errdefs.Invalid || e.Field != "network."+field || !strings.HasPrefix(e.Msg, e.Field+": ") || e.Hint == "" {
				t.Errorf("%v: got %v, want Invalid for network.%s", m, err, field)
			}
		}
	}
}
