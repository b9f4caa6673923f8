package policy

import (
	"net/netip"
	"slices"
	"strings"
	"testing"
)

// agent is a policy of one phase "agent" with the rules, validated.
func agent(t testing.TB, rules ...Rule) Policy {
	t.Helper()
	p, err := Policy{Phases: []Phase{{Name: "agent", Rules: rules}}}.Validate()
	if err != nil {
		t.Fatal(err)
	}
	return p
}

func name(host string, port uint16) Question {
	return Question{Name: host, Port: port, Protocol: TCP}
}

func address(a string, port uint16) Question {
	return Question{Addr: netip.MustParseAddr(a), Port: port, Protocol: TCP}
}

func at(q Question, a string) Question {
	q.Addr = netip.MustParseAddr(a)
	return q
}

func udp(q Question) Question {
	q.Protocol = UDP
	return q
}

func TestEvaluate(t *testing.T) {
	domain := func(d string, ports ...Ports) Rule { return Rule{Domain: d, Ports: ports} }
	network := func(c string, ports ...Ports) Rule { return Rule{CIDR: c, Ports: ports} }
	not := func(r Rule) Rule { r.Reject = true; return r }
	by := func(r Rule, p Protocol) Rule { r.Protocol = p; return r }
	for what, c := range map[string]struct {
		rules []Rule
		ask   Question
		want  string // rule that allows; "-" and the rule that rejects
	}{
		"nothing is allowed by default":         {nil, name("example.org", 443), "-default reject"},
		"nor an address":                        {nil, address("203.0.113.1", 443), "-default reject"},
		"a name on 443":                         {[]Rule{domain("example.org")}, name("example.org", 443), "domain example.org"},
		"and on 80":                             {[]Rule{domain("example.org")}, name("example.org", 80), "domain example.org"},
		"no other port":                         {[]Rule{domain("example.org")}, name("example.org", 22), "-default reject"},
		"not by UDP":                            {[]Rule{domain("example.org")}, udp(name("example.org", 443)), "-default reject"},
		"in capitals":                           {[]Rule{domain("example.org")}, name("EXAMPLE.Org", 443), "domain example.org"},
		"with a trailing dot":                   {[]Rule{domain("example.org")}, name("example.org.", 443), "domain example.org"},
		"a rule with a trailing dot":            {[]Rule{domain("Example.org.")}, name("example.org", 443), "domain example.org"},
		"two dots at the end are no name":       {[]Rule{domain("*")}, name("example.org..", 443), "-default reject"},
		"no name below it":                      {[]Rule{domain("example.org")}, name("a.example.org", 443), "-default reject"},
		"a name below a wildcard":               {[]Rule{domain("*.example.org")}, name("a.example.org", 443), "domain *.example.org"},
		"at any depth":                          {[]Rule{domain("*.example.org")}, name("a.b.c.example.org", 443), "domain *.example.org"},
		"a wildcard is not its own name":        {[]Rule{domain("*.d.example")}, name("d.example", 443), "-default reject"},
		"nor one that ends alike":               {[]Rule{domain("*.d.example")}, name("xd.example", 443), "-default reject"},
		"nor one that ends alike and is longer": {[]Rule{domain("*.d.example")}, name("a.xyd.example", 443), "-default reject"},
		"nor one that continues":                {[]Rule{domain("*.d.example")}, name("a.d.example.evil.test", 443), "-default reject"},
		"nor a dot alone before it":             {[]Rule{domain("*.d.example")}, name(".d.example", 443), "-default reject"},
		"every name":                            {[]Rule{domain("*")}, name("anything.test", 443), "domain *"},
		"every name is no address":              {[]Rule{domain("*")}, address("203.0.113.1", 443), "-default reject"},
		"nor an address as a name":              {[]Rule{domain("*")}, name("203.0.113.1", 443), "-default reject"},
		"nor one of IPv6":                       {[]Rule{domain("*")}, name("2001:db8::1", 443), "-default reject"},
		"nor one in brackets":                   {[]Rule{domain("*")}, name("[2001:db8::1]", 443), "-default reject"},
		"nor a short address":                   {[]Rule{domain("*")}, name("127.1", 443), "-default reject"},
		"nor one number":                        {[]Rule{domain("*")}, name("2130706433", 443), "-default reject"},
		"nor one in hexadecimal":                {[]Rule{domain("*")}, name("0x7f000001", 443), "-default reject"},
		"nor one with a dot at the end":         {[]Rule{domain("*")}, name("127.0.0.1.", 443), "-default reject"},
		"nor one in octal":                      {[]Rule{domain("*")}, name("0177.0.0.01", 443), "-default reject"},
		"nor a name with a NUL":                 {[]Rule{domain("*")}, name("example.org\x00.evil.test", 443), "-default reject"},
		"nor one with a space":                  {[]Rule{domain("*")}, name("example.org ", 443), "-default reject"},
		"nor one beyond ASCII":                  {[]Rule{domain("*")}, name("exämple.org", 443), "-default reject"},
		"nor one with a letter that folds":      {[]Rule{domain("*")}, name("\u212aey.test", 443), "-default reject"},
		"nor one with a user":                   {[]Rule{domain("*")}, name("user@example.org", 443), "-default reject"},
		"nor an empty label":                    {[]Rule{domain("*")}, name("a..test", 443), "-default reject"},
		"nor a label of 64":                     {[]Rule{domain("*")}, name(strings.Repeat("a", 64)+".test", 443), "-default reject"},
		"the machine itself":                    {[]Rule{domain("*")}, name("localhost", 443), "-platform"},
		"under any name":                        {[]Rule{domain("*")}, name("a.LocalHost.", 443), "-platform"},
		"an international name":                 {[]Rule{domain("xn--mnchen-3ya.example")}, name("XN--mnchen-3ya.example", 443), "domain xn--mnchen-3ya.example"},
		"is not what it looks like":             {[]Rule{domain("xn--mnchen-3ya.example")}, name("munchen.example", 443), "-default reject"},
		"a port of the rule":                    {[]Rule{domain("example.org", Ports{22, 22}, Ports{8000, 8100})}, name("example.org", 8050), "domain example.org"},
		"not the one beside":                    {[]Rule{domain("example.org", Ports{8000, 8100})}, name("example.org", 8101), "-default reject"},
		"nor the usual ones":                    {[]Rule{domain("example.org", Ports{22, 22})}, name("example.org", 443), "-default reject"},
		"the resolver asks about any port":      {[]Rule{domain("example.org", Ports{22, 22})}, Question{Name: "example.org"}, "domain example.org"},
		"and any protocol":                      {[]Rule{by(domain("example.org", Ports{123, 123}), UDP)}, Question{Name: "example.org"}, "domain example.org"},
		"unless it names one":                   {[]Rule{by(domain("example.org", Ports{123, 123}), UDP)}, Question{Name: "example.org", Protocol: TCP}, "-default reject"},
		"a part that is left is enough":         {[]Rule{not(domain("example.org", Ports{443, 443})), domain("example.org")}, Question{Name: "example.org"}, "domain example.org"},
		"nothing that is left is not":           {[]Rule{not(domain("example.org", Ports{1, 443})), domain("example.org")}, Question{Name: "example.org"}, "-reject domain example.org"},
		"nor is a reject of all":                {[]Rule{not(domain("*.org")), domain("example.org")}, Question{Name: "example.org"}, "-reject domain *.org"},
		"the first rule decides":                {[]Rule{not(domain("a.example.org")), domain("*.example.org")}, name("a.example.org", 443), "-reject domain a.example.org"},
		"an allow before a reject too":          {[]Rule{domain("a.example.org"), not(domain("*"))}, name("a.example.org", 443), "domain a.example.org"},
		"and the reject holds for the rest":     {[]Rule{domain("a.example.org"), not(domain("*")), domain("*")}, name("b.example.org", 443), "-reject domain *"},
		"a reject is of every port":             {[]Rule{not(domain("example.org")), domain("*", Ports{1, 65535})}, name("example.org", 8080), "-reject domain example.org"},
		"and of both protocols":                 {[]Rule{not(domain("example.org")), by(domain("*"), UDP)}, udp(name("example.org", 443)), "-reject domain example.org"},
		"unless it names ports":                 {[]Rule{not(domain("example.org", Ports{25, 25})), domain("*")}, name("example.org", 443), "domain *"},
		"or a protocol":                         {[]Rule{by(not(domain("example.org")), UDP), domain("*")}, name("example.org", 443), "domain *"},
		"UDP by its rule":                       {[]Rule{by(domain("ntp.example", Ports{123, 123}), UDP)}, udp(name("ntp.example", 123)), "domain ntp.example"},
		"ICMP never":                            {[]Rule{network("0.0.0.0/0")}, Question{Addr: netip.MustParseAddr("203.0.113.1"), Protocol: "icmp"}, "-default reject"},
		"an address":                            {[]Rule{network("203.0.113.7")}, address("203.0.113.7", 5432), "cidr 203.0.113.7"},
		"its neighbour not":                     {[]Rule{network("203.0.113.7")}, address("203.0.113.8", 5432), "-default reject"},
		"a network":                             {[]Rule{network("203.0.113.0/24")}, address("203.0.113.8", 5432), "cidr 203.0.113.0/24"},
		"a network of IPv6":                     {[]Rule{network("2001:db8::/32")}, address("2001:db8::8", 443), "cidr 2001:db8::/32"},
		"a port of IPv6":                        {[]Rule{network("2001:db8::/32", Ports{443, 443})}, address("2001:db8::8", 80), "-default reject"},
		"IPv4 is not in IPv6":                   {[]Rule{network("::/0")}, address("203.0.113.8", 443), "-default reject"},
		"a mapped address is IPv4":              {[]Rule{network("203.0.113.0/24")}, address("::ffff:203.0.113.8", 443), "cidr 203.0.113.0/24"},
		"and not IPv6":                          {[]Rule{network("::/0")}, address("::ffff:203.0.113.8", 443), "-default reject"},
		"an address as a name":                  {[]Rule{network("203.0.113.0/24")}, name("203.0.113.8", 443), "cidr 203.0.113.0/24"},
		"a mapped one as a name":                {[]Rule{network("203.0.113.0/24")}, name("[::ffff:203.0.113.8]", 443), "cidr 203.0.113.0/24"},
		"one with a zone":                       {[]Rule{network("::/0")}, name("2001:db8::1%eth0", 443), "-platform"},
		"one that is another":                   {[]Rule{network("203.0.113.0/24")}, at(name("203.0.113.8", 443), "203.0.113.9"), "-default reject"},
		"an address opens no name":              {[]Rule{network("203.0.113.0/24")}, at(name("example.org", 443), "203.0.113.8"), "-default reject"},
		"a name wherever it resolves to":        {[]Rule{domain("example.org")}, at(name("example.org", 443), "203.0.113.8"), "domain example.org"},
		"but not to this network":               {[]Rule{domain("example.org")}, at(name("example.org", 443), "10.0.0.8"), "-platform"},
		"nor to loopback":                       {[]Rule{domain("example.org")}, at(name("example.org", 443), "127.0.0.1"), "-platform"},
		"nor to mapped loopback":                {[]Rule{domain("example.org")}, at(name("example.org", 443), "::ffff:127.0.0.1"), "-platform"},
		"nor to metadata":                       {[]Rule{domain("metadata.example")}, at(name("metadata.example", 80), "169.254.169.254"), "-platform"},
		"nor to metadata behind NAT64":          {[]Rule{domain("metadata.example")}, at(name("metadata.example", 80), "64:ff9b::a9fe:a9fe"), "-platform"},
		"nor where a reject stands before":      {[]Rule{not(network("203.0.113.0/24")), domain("*")}, at(name("example.org", 443), "203.0.113.8"), "-reject cidr 203.0.113.0/24"},
		"a reject after it is too late":         {[]Rule{domain("*"), not(network("203.0.113.0/24"))}, at(name("example.org", 443), "203.0.113.8"), "domain *"},
		"the platform before every rule":        {[]Rule{network("0.0.0.0/0")}, address("10.1.2.3", 80), "-platform"},
		"carrier-grade NAT":                     {[]Rule{network("0.0.0.0/0")}, address("100.64.3.4", 80), "-platform"},
		"the public part":                       {[]Rule{network("0.0.0.0/0")}, address("8.8.8.8", 80), "cidr 0.0.0.0/0"},
		"an unspecified address":                {[]Rule{network("0.0.0.0/0")}, address("0.0.0.0", 80), "-platform"},
		"one of IPv6":                           {[]Rule{network("::/0")}, address("::", 80), "-platform"},
		"a hole in a network":                   {[]Rule{not(network("203.0.113.128/25")), network("203.0.113.0/24")}, address("203.0.113.200", 80), "-reject cidr 203.0.113.128/25"},
		"around the hole":                       {[]Rule{not(network("203.0.113.128/25")), network("203.0.113.0/24")}, address("203.0.113.100", 80), "cidr 203.0.113.0/24"},
		"any port of an address":                {[]Rule{not(network("203.0.113.0/24", Ports{1, 1023})), network("203.0.113.0/24")}, Question{Addr: netip.MustParseAddr("203.0.113.1")}, "cidr 203.0.113.0/24"},
		"a service by a rule":                   {[]Rule{{Service: "pypi"}}, Question{Service: "pypi"}, "service pypi"},
		"another service":                       {[]Rule{{Service: "pypi"}}, Question{Service: "npm"}, "-default reject"},
		"a service that is none":                {[]Rule{{Service: "pypi"}}, Question{Service: "PyPI"}, "-default reject"},
		"every name is no service":              {[]Rule{domain("*")}, Question{Service: "pypi"}, "-default reject"},
		"a service is no name":                  {[]Rule{{Service: "pypi"}}, name("pypi", 443), "-default reject"},
		"a rejected service":                    {[]Rule{not(Rule{Service: "pypi"}), {Service: "pypi"}}, Question{Service: "pypi"}, "-reject service pypi"},
		"a repository":                          {[]Rule{{Service: "git:git.example/org/repo"}}, Question{Service: "git:git.example/org/repo"}, "service git:git.example/org/repo"},
		"in its other spellings":                {[]Rule{{Service: "git:git.example/org/repo"}}, Question{Service: "git:GIT.example./Org//repo.git/info/refs"}, "service git:git.example/org/repo"},
		"all below a path":                      {[]Rule{{Service: "git:git.example/org"}}, Question{Service: "git:git.example/org/other"}, "service git:git.example/org"},
		"not above it":                          {[]Rule{{Service: "git:git.example/org/repo"}}, Question{Service: "git:git.example/org"}, "-default reject"},
		"not what begins alike":                 {[]Rule{{Service: "git:git.example/org/repo"}}, Question{Service: "git:git.example/org/repo2"}, "-default reject"},
		"not through the back":                  {[]Rule{{Service: "git:git.example/org"}}, Question{Service: "git:git.example/org/../other/repo"}, "-default reject"},
		"nor escaped":                           {[]Rule{{Service: "git:git.example/org"}}, Question{Service: "git:git.example/org/%2e%2e/other/repo"}, "-default reject"},
		"nor escaped twice":                     {[]Rule{{Service: "git:git.example/org"}}, Question{Service: "git:git.example/org/%252e%252e/other"}, "-default reject"},
		"a hole among repositories":             {[]Rule{not(Rule{Service: "git:git.example/org/secret"}), {Service: "git:git.example/org"}}, Question{Service: "git:git.example/org/secret/info/refs"}, "-reject service git:git.example/org/secret"},
		"a repository that resolves to inside":  {[]Rule{{Service: "git:git.example/org"}}, Question{Service: "git:git.example/org/x", Addr: netip.MustParseAddr("10.0.0.1")}, "-platform"},
		"no question":                           {[]Rule{domain("*"), network("0.0.0.0/0")}, Question{Port: 443}, "-default reject"},
	} {
		t.Run(what, func(t *testing.T) {
			got := Evaluate(agent(t, c.rules...), "agent", c.ask, nil)
			rule, reject := strings.CutPrefix(c.want, "-")
			if got.Allow == reject || got.Rule != rule {
				t.Fatalf("got %+v, want %s", got, c.want)
			}
			if got.Reason == "" || strings.HasSuffix(got.Reason, ".") {
				t.Errorf("reason %q", got.Reason)
			}
		})
	}
}

func TestServicesOfThePolicyComeBeforeTheRulesOfEveryPhase(t *testing.T) {
	p, err := Policy{
		Services: map[string]bool{"pypi": true, "npm": false},
		Phases: []Phase{
			{Name: "build", Rules: []Rule{{Service: "npm"}, {Service: "crates"}}},
			{Name: "agent", Rules: []Rule{{Service: "pypi", Reject: true}}},
		},
	}.Validate()
	if err != nil {
		t.Fatal(err)
	}
	for phase, want := range map[string][]string{"build": {"crates", "pypi"}, "agent": {"pypi"}, "none": nil} {
		if got := p.AllowedServices(phase); !slices.Equal(got, want) {
			t.Errorf("phase %s allows %v, want %v", phase, got, want)
		}
	}
	if v := Evaluate(p, "build", Question{Service: "npm"}, nil); v.Allow || v.Rule != "service npm" {
		t.Errorf("npm: %+v", v)
	}
}

func TestAPhaseThatDoesNotExistRejects(t *testing.T) {
	p := agent(t, Rule{Domain: "*"}, Rule{CIDR: "0.0.0.0/0"}, Rule{Service: "pypi"})
	p.Services = map[string]bool{"pypi": true}
	for _, q := range []Question{name("example.org", 443), address("203.0.113.1", 443), {Service: "pypi"}} {
		if v := Evaluate(p, "Agent", q, nil); v.Allow || v.Rule != RuleDefault {
			t.Errorf("%+v: %+v", q, v)
		}
	}
	if w := Compile(p, "", nil); w.Names || w.Openings != nil {
		t.Errorf("walls %+v", w)
	}
	if v := p.Inbound("", 80); v.Allow {
		t.Errorf("inbound %+v", v)
	}
}

func TestGrantsLiftWhatTheyMayAndNothingElse(t *testing.T) {
	p := agent(t, Rule{Domain: "*"}, Rule{CIDR: "0.0.0.0/0"}, Rule{CIDR: "::/0"})
	grant := func(s ...string) (g Grants) {
		for _, p := range s {
			g = append(g, netip.MustParsePrefix(p))
		}
		return g
	}
	all := grant("0.0.0.0/0", "::/0")
	for _, c := range []struct {
		g     Grants
		addr  string
		allow bool
	}{
		{grant("10.0.0.0/8"), "10.1.2.3", true},
		{grant("10.0.0.0/8"), "::ffff:10.1.2.3", true},
		{grant("10.0.0.0/8"), "192.168.1.1", false},
		{grant("10.1.0.0/16"), "10.2.0.1", false},
		{grant("10.1.2.3/8"), "10.2.0.1", true}, // bits behind the mask do not count
		{grant("10.0.0.0/8"), "64:ff9b::a01:203", false},
		{grant("64:ff9b::/96"), "64:ff9b::a01:203", false},
		{grant("127.0.0.1/32"), "127.0.0.1", true},
		{grant("fd00::/8"), "fd12::1", true},
		{grant("fd00::/8"), "fd00:ec2::254", false},
		{all, "169.254.169.254", false},
		{all, "169.254.1.1", false},
		{all, "fe80::1", false},
		{all, "100.100.100.200", false},
		{all, "100.64.0.1", false},
		{all, "100.64.0.2", true},
		{all, "198.18.0.1", false},
		{all, "224.0.0.1", false},
		{all, "255.255.255.255", false},
		{all, "0.0.0.0", false},
		{all, "::", false},
		{all, "ff02::1", false},
		{all, "2002:a00:1::", false},
	} {
		for what, q := range map[string]Question{"address": address(c.addr, 443), "name": at(name("example.org", 443), c.addr)} {
			if v := Evaluate(p, "agent", q, c.g); v.Allow != c.allow {
				t.Errorf("%s %s with %v: %+v", what, c.addr, c.g, v)
			}
		}
	}
}

func TestAMalformedRuleOpensNothing(t *testing.T) {
	everything := Rule{Domain: "*", Ports: []Ports{{1, 65535}}}
	for what, r := range map[string]Rule{
		"no target":           {},
		"two targets":         {Domain: "example.org", CIDR: "0.0.0.0/0"},
		"a malformed domain":  {Domain: "a..b"},
		"a malformed network": {CIDR: "203.0.113.0/33"},
		"a mapped network":    {CIDR: "::ffff:0:0/96"},
		"an unknown service":  {Service: "pipy"},
		"a port 0":            {Domain: "example.org", Ports: []Ports{{0, 443}}},
		"ports in disorder":   {CIDR: "203.0.113.0/24", Ports: []Ports{{443, 80}}},
		"an unknown protocol": {CIDR: "203.0.113.0/24", Protocol: "sctp"},
	} {
		for _, q := range []Question{name("example.org", 443), address("203.0.113.1", 100), {Service: "pypi"}} {
			p := Policy{Phases: []Phase{{Name: "agent", Rules: []Rule{r}}}}
			if v := Evaluate(p, "agent", q, nil); v.Allow {
				t.Errorf("%s allows %+v: %+v", what, q, v)
			}
			r := r
			r.Reject = true
			p.Phases[0].Rules = []Rule{r, everything, {CIDR: "0.0.0.0/0"}, {Service: "pypi"}}
			if v := Evaluate(p, "agent", q, nil); v.Allow {
				t.Errorf("%s as a reject does not hold for %+v: %+v", what, q, v)
			}
			if w := Compile(p, "agent", nil); len(w.Openings) > 0 {
				t.Errorf("%s as a reject leaves openings: %v", what, w.Openings[0])
			}
		}
	}
}

func TestSecretsGoWithTheRuleThatAllows(t *testing.T) {
	p, err := Policy{InspectTLS: true, Phases: []Phase{{Name: "agent", Rules: []Rule{
		{Domain: "api.example", Secret: "key"}, {Domain: "*.example"},
	}}}}.Validate()
	if err != nil {
		t.Fatal(err)
	}
	if v := Evaluate(p, "agent", name("api.example", 443), nil); v.Secret != "key" {
		t.Errorf("%+v", v)
	}
	if v := Evaluate(p, "agent", name("a.api.example", 443), nil); !v.Allow || v.Secret != "" {
		t.Errorf("%+v", v)
	}
}

func TestInbound(t *testing.T) {
	p, err := Policy{Phases: []Phase{
		{Name: "all"}, {Name: "some", Inbound: []Ports{{First: 8080}, {9000, 9009}}}, {Name: "none", InboundClosed: true},
	}}.Validate()
	if err != nil {
		t.Fatal(err)
	}
	for _, c := range []struct {
		phase string
		port  uint16
		want  bool
	}{
		{"all", 1, true},
		{"all", 0, false},
		{"some", 8080, true},
		{"some", 8081, false},
		{"some", 9009, true},
		{"none", 8080, false},
		{"other", 8080, false},
	} {
		if v := p.Inbound(c.phase, c.port); v.Allow != c.want || v.Rule != RuleInbound || v.Reason == "" {
			t.Errorf("%s %d: %+v", c.phase, c.port, v)
		}
	}
}

func TestOpen(t *testing.T) {
	for what, c := range map[string]struct {
		p    Policy
		want bool
	}{
		"zero":                {Policy{}, false},
		"a rejected service":  {Policy{Services: map[string]bool{"npm": false}}, false},
		"a service":           {Policy{Services: map[string]bool{"npm": false, "pypi": true}}, true},
		"rejects alone":       {Policy{Phases: []Phase{{Name: "a", Rules: []Rule{{Domain: "*", Reject: true}}}}}, false},
		"a later phase":       {Policy{Phases: []Phase{{Name: "a"}, {Name: "b", Rules: []Rule{{CIDR: "203.0.113.1"}}}}}, true},
		"lists and TLS alone": {Policy{Deny: []string{"pypi:flask"}, InspectTLS: true}, false},
	} {
		if got := c.p.Open(); got != c.want {
			t.Errorf("%s: %v", what, got)
		}
	}
}
