package dns

import (
	"log/slog"
	"net/netip"
	"testing"

	"github.com/miekg/dns"

	"github.com/sandsea/sandsea/internal/aether/config"
	"github.com/sandsea/sandsea/internal/aether/flowlog"
	"github.com/sandsea/sandsea/internal/aether/roster"
	"github.com/sandsea/sandsea/internal/aether/services"
	"github.com/sandsea/sandsea/internal/aether/wire"
	"github.com/sandsea/sandsea/internal/policy"
)

type nowhere struct{}

func (nowhere) Add(string, flowlog.Event) {}

// FuzzDNS sends anything: there is no answer, or one to the question, that fits, and never with an address for a name that
// is not allowed.
func FuzzDNS(f *testing.F) {
	r := roster.New(roster.Config{
		Grants: func(string) policy.Grants { return nil }, Own: func(netip.Addr) bool { return false },
		Limits: config.Limits{Flows: 1, ProjectFlows: 1, DNSPerSecond: 1 << 30}, Log: nowhere{},
	})
	addr := netip.MustParseAddr("100.64.1.1")
	err := r.Put(wire.Sandbox{ID: "s", Addr: addr, Phase: "agent", Policy: policy.Policy{
		Phases: []policy.Phase{{Name: "agent", Rules: []policy.Rule{{Domain: "*.example"}}}},
	}})
	if err != nil {
		f.Fatal(err)
	}
	box, _ := r.ByAddr(addr)
	res := New(r, &services.Set{}, slog.New(slog.DiscardHandler))
	for _, q := range []struct {
		name string
		kind uint16
	}{{"a.example.", dns.TypeA}, {"A.EXAMPLE.", dns.TypeAAAA}, {"other.test.", dns.TypeA}, {"1.0.64.100.in-addr.arpa.", dns.TypePTR}} {
		m := new(dns.Msg).SetQuestion(q.name, q.kind)
		m.SetEdns0(4096, true)
		b, err := m.Pack()
		if err != nil {
			f.Fatal(err)
		}
		f.Add(b)
	}
	f.Fuzz(func(t *testing.T, packet []byte) {
		answer := res.answer(box, packet, maxUDP)
		if answer == nil {
			return
		}
		if len(answer) > maxUDP {
			t.Fatalf("%d bytes", len(answer))
		}
		var a dns.Msg
		if err := a.Unpack(answer); err != nil {
			t.Fatal(err)
		}
		if !a.Response || len(a.Question) > 1 {
			t.Fatalf("%v", &a)
		}
		for _, rr := range a.Answer {
			name := roster.Canonical(rr.Header().Name)
			if _, ok := rr.(*dns.A); ok && !box.Judge(policy.Question{Name: name}).Allow && name != "aether.internal" {
				t.Fatalf("an address for %q", name)
			}
		}
	})
}
