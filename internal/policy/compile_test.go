package policy

import (
	"fmt"
	"net/netip"
	"testing"

	"github.com/google/go-cmp/cmp"
	"github.com/google/go-cmp/cmp/cmpopts"
	"pgregory.net/rapid"
)

func TestCompile(t *testing.T) {
	open := func(p string, first, last uint16, proto Protocol) Opening {
		return Opening{netip.MustParsePrefix(p), Ports{first, last}, proto}
	}
	for what, c := range map[string]struct {
		rules []Rule
		g     Grants
		want  Walls
	}{
		"nothing":         {nil, nil, Walls{}},
		"rejects":         {[]Rule{{Domain: "*", Reject: true}}, nil, Walls{}},
		"names alone":     {[]Rule{{Domain: "example.org"}}, nil, Walls{Names: true}},
		"a service alone": {[]Rule{{Service: "pypi"}}, nil, Walls{Names: true}},
		"a repository":    {[]Rule{{Service: "git:git.example/a"}}, nil, Walls{Names: true}},
		"an address": {
			[]Rule{{CIDR: "203.0.113.7", Ports: []Ports{{5432, 5432}}}},
			nil,
			Walls{Openings: []Opening{open("203.0.113.7/32", 5432, 5432, TCP)}},
		},
		"every port": {
			[]Rule{{CIDR: "203.0.113.0/24", Protocol: UDP}},
			nil,
			Walls{Openings: []Opening{open("203.0.113.0/24", 1, 65535, UDP)}},
		},
		"a hole": {
			[]Rule{{CIDR: "203.0.113.64/26", Reject: true}, {CIDR: "203.0.113.0/24"}},
			nil,
			Walls{Openings: []Opening{open("203.0.113.0/26", 1, 65535, TCP), open("203.0.113.128/25", 1, 65535, TCP)}},
		},
		"a hole of some ports": {
			[]Rule{{CIDR: "203.0.113.128/25", Reject: true, Ports: []Ports{{25, 25}}}, {CIDR: "203.0.113.0/24", Ports: []Ports{{1, 100}}}},
			nil,
			Walls{Openings: []Opening{
				open("203.0.113.0/25", 1, 100, TCP), open("203.0.113.128/25", 1, 24, TCP), open("203.0.113.128/25", 26, 100, TCP),
			}},
		},
		"a reject after it": {
			[]Rule{{CIDR: "203.0.113.0/24"}, {CIDR: "203.0.113.64/26", Reject: true}},
			nil,
			Walls{Openings: []Opening{open("203.0.113.0/24", 1, 65535, TCP)}},
		},
		"the same twice": {
			[]Rule{{CIDR: "203.0.113.7", Ports: []Ports{{1, 10}}}, {CIDR: "203.0.113.7", Ports: []Ports{{5, 20}}}},
			nil,
			Walls{Openings: []Opening{open("203.0.113.7/32", 1, 20, TCP)}},
		},
		"a network and a part of it": {
			[]Rule{{CIDR: "203.0.113.128/25"}, {CIDR: "203.0.113.0/24"}},
			nil,
			Walls{Openings: []Opening{open("203.0.113.0/25", 1, 65535, TCP), open("203.0.113.128/25", 1, 65535, TCP)}},
		},
		"a private network":             {[]Rule{{CIDR: "10.0.0.0/8"}}, nil, Walls{}},
		"a metadata service in a grant": {[]Rule{{CIDR: "169.254.169.254"}}, Grants{netip.MustParsePrefix("0.0.0.0/0")}, Walls{}},
		"a granted part": {
			[]Rule{{CIDR: "10.0.0.0/8"}},
			Grants{netip.MustParsePrefix("10.2.0.0/16")},
			Walls{Openings: []Opening{open("10.2.0.0/16", 1, 65535, TCP)}},
		},
		"a network with a private end": {
			[]Rule{{CIDR: "172.0.0.0/11"}},
			nil,
			Walls{Openings: []Opening{open("172.0.0.0/12", 1, 65535, TCP)}},
		},
	} {
		t.Run(what, func(t *testing.T) {
			got := Compile(agent(t, c.rules...), "agent", c.g)
			if d := cmp.Diff(c.want, got, cmpopts.EquateComparable(netip.Prefix{})); d != "" {
				t.Fatalf("(-want +got):\n%s", d)
			}
		})
	}
	if w := Compile(Policy{Services: map[string]bool{"pypi": true}, Phases: []Phase{{Name: "a"}}}, "a", nil); !w.Names {
		t.Error("a service of the policy opens no names")
	}
}

// drawPolicy draws a policy of one phase "agent" whose rules meet each other.
func drawPolicy(t *rapid.T) Policy {
	port := rapid.SampledFrom([]uint16{1, 22, 79, 80, 81, 443, 8080, 65534, 65535})
	rules := rapid.SliceOfN(rapid.Custom(func(t *rapid.T) Rule {
		r := Rule{
			Reject:   rapid.Bool().Draw(t, "reject"),
			Protocol: rapid.SampledFrom([]Protocol{"", TCP, UDP}).Draw(t, "protocol"),
		}
		switch rapid.IntRange(0, 3).Draw(t, "target") {
		case 0:
			r.Domain = rapid.SampledFrom([]string{"*", "*.example", "a.example", "*.a.example"}).Draw(t, "domain")
		default:
			r.CIDR = rapid.SampledFrom(drawn()).Draw(t, "cidr").String()
		}
		for range rapid.IntRange(0, 2).Draw(t, "ranges") {
			a, b := port.Draw(t, "first"), port.Draw(t, "last")
			r.Ports = append(r.Ports, Ports{min(a, b), max(a, b)})
		}
		return r
	}), 0, 6).Draw(t, "rules")
	p, err := Policy{Phases: []Phase{{Name: "agent", Rules: rules}}}.Validate()
	if err != nil {
		t.Fatal(err)
	}
	return p
}

func drawQuestion(t *rapid.T) Question {
	return Question{
		Addr:     drawAddr(t),
		Port:     rapid.SampledFrom([]uint16{1, 2, 21, 22, 23, 79, 80, 81, 443, 8080, 8081, 65534, 65535}).Draw(t, "port"),
		Protocol: rapid.SampledFrom([]Protocol{TCP, UDP}).Draw(t, "by"),
	}
}

func TestWallsAreOpenWhereEvaluateAllowsAnAddressAndNowhereElse(t *testing.T) {
	allowed := 0
	rapid.Check(t, func(t *rapid.T) {
		p, g := drawPolicy(t), drawGrants(t)
		w := Compile(p, "agent", g)
		for range 20 {
			q := drawQuestion(t)
			var in []Opening
			for _, o := range w.Openings {
				if o.Prefix.Contains(q.Addr) && o.Ports.has(q.Port) && o.Protocol == q.Protocol {
					in = append(in, o)
				}
			}
			v := Evaluate(p, "agent", q, g)
			if v.Allow != (len(in) > 0) || len(in) > 1 {
				t.Fatalf("%+v: %+v, openings %v", q, v, in)
			}
			if v.Allow {
				allowed++
			}
			// The question about any port is the sum of those about each.
			if any := Evaluate(p, "agent", Question{Addr: q.Addr}, g); v.Allow && !any.Allow {
				t.Fatalf("port %d of %s is allowed, any port is not: %+v", q.Port, q.Addr, any)
			}
		}
		for i := 1; i < len(w.Openings); i++ {
			if a, b := w.Openings[i-1], w.Openings[i]; a.Prefix == b.Prefix && a.Protocol == b.Protocol && a.Ports.Last >= b.Ports.First {
				t.Fatalf("openings overlap: %v, %v", a, b)
			}
		}
	})
	if allowed == 0 {
		t.Fatal("nothing was ever allowed: the property says nothing")
	}
}

func TestThePlatformIsNeverOpenWithoutAGrant(t *testing.T) {
	hit := 0
	rapid.Check(t, func(t *rapid.T) {
		p := drawPolicy(t)
		for range 20 {
			q := drawQuestion(t)
			denied, _ := Platform(q.Addr)
			if !denied {
				continue
			}
			hit++
			if v := Evaluate(p, "agent", q, nil); v.Allow || v.Rule != RulePlatform {
				t.Fatalf("%+v: %+v", q, v)
			}
			q.Name = "a.example"
			if v := Evaluate(p, "agent", q, nil); v.Allow || v.Rule != RulePlatform {
				t.Fatalf("%+v: %+v", q, v)
			}
		}
	})
	if hit == 0 {
		t.Fatal("no address of the platform's was drawn")
	}
}

func TestNothingIsAllowedThatNoRuleNames(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		p := drawPolicy(t)
		q := drawQuestion(t)
		if rapid.Bool().Draw(t, "by name") {
			q = Question{Name: rapid.SampledFrom([]string{"a.example", "b.a.example", "example", "other.test"}).Draw(t, "name"), Port: q.Port, Protocol: q.Protocol}
		}
		v := Evaluate(p, "agent", q, nil)
		// The reference: the first rule that covers the question, found by the plainest means.
		want, rule := false, RuleDefault
		if denied, _ := Platform(q.Addr); denied && q.Name == "" {
			rule = RulePlatform
		} else {
			for _, r := range p.Phases[0].Rules {
				if plainMatch(r, q) {
					want, rule = !r.Reject, r.Name
					break
				}
			}
		}
		if v.Allow != want || v.Rule != rule {
			t.Fatalf("%+v: got %+v, want %v by %s", q, v, want, rule)
		}
	})
}

// plainMatch is what the package's comment says of one rule, one port and one protocol.
func plainMatch(r Rule, q Question) bool {
	port := func(def ...Ports) bool {
		list := r.Ports
		if len(list) == 0 {
			list = def
		}
		for _, p := range list {
			if p.First <= q.Port && q.Port <= p.Last {
				return true
			}
		}
		return false
	}
	if r.Protocol != q.Protocol && !(r.Protocol == "" && (r.Reject || q.Protocol == TCP)) {
		return false
	}
	every := Ports{1, 65535}
	if r.CIDR != "" {
		p, err := netip.ParsePrefix(r.CIDR)
		if err != nil {
			a := netip.MustParseAddr(r.CIDR)
			p = netip.PrefixFrom(a, a.BitLen())
		}
		return q.Name == "" && p.Contains(q.Addr) && port(every)
	}
	if q.Name == "" {
		return false
	}
	covers := map[string]map[string]bool{
		"*":           {"a.example": true, "b.a.example": true, "example": true, "other.test": true},
		"*.example":   {"a.example": true, "b.a.example": true},
		"a.example":   {"a.example": true},
		"*.a.example": {"b.a.example": true},
	}[r.Domain][q.Name]
	if r.Reject {
		return covers && port(every)
	}
	return covers && port(Ports{80, 80}, Ports{443, 443})
}

func BenchmarkEvaluate(b *testing.B) {
	var rules []Rule
	for i := range MaxRules / 2 {
		rules = append(rules, Rule{Domain: fmt.Sprintf("*.d%d.example", i)}, Rule{CIDR: fmt.Sprintf("203.0.113.%d", i)})
	}
	p := agent(b, rules...)
	for b.Loop() {
		Evaluate(p, "agent", name("a.none.example", 443), nil)
	}
}

func BenchmarkCompile(b *testing.B) {
	for what, p := range map[string]Policy{
		"names":   agent(b, Rule{Service: "pypi"}, Rule{Domain: "*.example"}),
		"address": agent(b, Rule{Service: "pypi"}, Rule{CIDR: "203.0.113.7", Ports: []Ports{{5432, 5432}}}),
		"all":     agent(b, Rule{CIDR: "203.0.113.0/24", Reject: true}, Rule{CIDR: "0.0.0.0/0"}, Rule{CIDR: "::/0", Ports: []Ports{{443, 443}}}),
	} {
		b.Run(what, func(b *testing.B) {
			for b.Loop() {
				Compile(p, "agent", nil)
			}
		})
	}
}
