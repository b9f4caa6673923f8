package main

import (
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	"github.com/rogpeppe/go-internal/testscript"
	"google.golang.org/protobuf/encoding/protojson"
	"google.golang.org/protobuf/testing/protocmp"
	"google.golang.org/protobuf/types/known/timestamppb"

	"github.com/sandsea/sandsea/api/errdefs"
	sandseav1 "github.com/sandsea/sandsea/api/sandsea/v1"
	"github.com/sandsea/sandsea/client"
	"github.com/sandsea/sandsea/internal/testkit/golden"
	"github.com/sandsea/sandsea/internal/testkit/testserver"
	"github.com/sandsea/sandsea/internal/testkit/wait"
)

// flow lets the traffic of a file's lines, events as JSON, go through a sandbox.
func flow(ts *testscript.TestScript, _ bool, args []string) {
	var events []*sandseav1.NetworkEvent
	for line := range strings.Lines(ts.ReadFile(args[1])) {
		e := &sandseav1.NetworkEvent{}
		ts.Check(protojson.Unmarshal([]byte(line), e))
		events = append(events, e)
	}
	serverOf(ts).Flow(args[0], events...)
}

const (
	kindDNS        = sandseav1.NetworkEventKind_NETWORK_EVENT_KIND_DNS
	kindConnection = sandseav1.NetworkEventKind_NETWORK_EVENT_KIND_CONNECTION
	kindArtefact   = sandseav1.NetworkEventKind_NETWORK_EVENT_KIND_ARTEFACT
	kindPolicy     = sandseav1.NetworkEventKind_NETWORK_EVENT_KIND_POLICY
)

// traffic is one event of each form, and what a sandbox may try on who reads of it.
func traffic() []*sandseav1.NetworkEvent {
	list := []*sandseav1.NetworkEvent{
		{Phase: "build", Kind: kindPolicy},
		{Phase: "agent", Kind: kindArtefact, Rule: "service pypi", Service: "pypi", Name: "flask", Version: "3.0.3", Protocol: "file", ReceivedBytes: 98 << 10, Source: "cache"},
		{Phase: "agent", Kind: kindArtefact, Denied: true, Rule: "as_of 2024-06-01", Service: "pypi", Name: "flask", Version: "3.1.0", Protocol: "file"},
		{Phase: "agent", Kind: kindDNS, Denied: true, Rule: "default reject", Name: "github.example", Protocol: "dns", Source: "REFUSED", Count: 12, Error: "no rule of phase agent allows github.example"},
		{Phase: "agent", Kind: kindConnection, Rule: "domain example.org", Name: "example.org", Address: "192.0.2.7", Port: 443, Protocol: "tls", SentBytes: 1400, ReceivedBytes: 3 << 20, DurationUs: 1_250_000},
		{Phase: "agent", Kind: kindConnection, Denied: true, Rule: "platform", Address: "169.254.169.254", Port: 80, Protocol: "tcp"},
		{Phase: "agent", Kind: kindConnection, Denied: true, Rule: "limit flows", Address: "2001:db8::7", Port: 443, Protocol: "udp"},
		{Phase: "agent", Kind: kindArtefact, Denied: true, Rule: "deny git:git.example/team", Service: "git:git.example/team/repo", Name: "git.example/team/repo", Protocol: "list"},
		{Phase: "agent", Kind: kindDNS, Denied: true, Rule: "default reject", Name: "evil\x1b[2J\u202e" + strings.Repeat("a", 60) + ".example", Protocol: "dns"},
		{Phase: "grade", Kind: kindConnection, Rule: "proxy", Name: "proxy.example", Port: 8443, Protocol: "connect", Error: "reset by the far side"},
		{Phase: "agent", Kind: kindDNS, Denied: true, Rule: "default reject", Count: 90000, Error: "too many different events at once: names not kept"},
		{Error: "events were not written: no space left on device", Count: 41},
	}
	for i, e := range list {
		e.Seq, e.At, e.Count = int64(i), ago(time.Duration(60-i)*time.Second), max(1, e.GetCount())
	}
	return list
}

func TestNetLogLines(t *testing.T) {
	ids := []string{"s7q3k2m5w4xn6d2hr5tcabqe8vk", "s5xw2b4tw4xn6d2hr5tcabqe8vk"}
	print := func(a *app) {
		p := newFlowPrinter(a, time.UTC)
		for i, e := range traffic() {
			if err := p.print(ids[i%7/6], e); err != nil {
				t.Error(err)
			}
		}
	}
	for _, width := range []int{40, 60, 72, 80, 120} {
		text := show(width, false, print)
		for line := range strings.Lines(string(text)) {
			if n := len([]rune(strings.TrimSuffix(line, "\n"))); n > width {
				t.Errorf("%d letters: %s", n, line)
			}
		}
		golden.Equal(t, filepath.Join("tables", fmt.Sprintf("net_log_%d.txt", width)), text)
	}
	golden.Equal(t, "tables/net_log_pipe.txt", show(0, false, print))
	golden.Equal(t, "tables/net_log_colour.txt", show(80, true, print))
}

func TestNetTopTable(t *testing.T) {
	l := busy()
	for i, u := range []*sandseav1.Usage{
		{NetSentBytes: 1 << 20, NetReceivedBytes: 3 << 30, NetFlows: 12, NetDenied: 7}, {NetFlows: 0}, {},
	} {
		l.rows[i].sb.Usage = u
	}
	l.rows[0].sent, l.rows[0].received, l.rows[0].denied, l.rows[0].last = 1400, 12<<20, 0.5, "dns evil\x1b[2J.example denied"
	l.rows[0].sb.Spec.Network = &sandseav1.NetworkPolicy{
		Services: map[string]bool{"pypi": true, "npm": false},
		Phases:   []*sandseav1.NetworkPhase{{Name: "agent", Rules: []*sandseav1.NetworkRule{{Target: &sandseav1.NetworkRule_Domain{Domain: "example.org"}}}}},
	}
	l.rows[0].sb.NetworkPhase = "agent"
	sortTop(l.rows, "NET/s")
	for _, width := range []int{40, 80, 120, 0} {
		name := fmt.Sprintf("net_top_%d.txt", width)
		if width == 0 {
			name = "net_top_pipe.txt"
		}
		golden.Equal(t, filepath.Join("tables", name), show(width, false, func(a *app) { a.printTop(l, netView) }))
	}
}

func TestInspectShowsThePolicy(t *testing.T) {
	sb := fleet()[0]
	day := timestamppb.New(time.Date(2024, 6, 1, 0, 0, 0, 0, time.UTC))
	domain := func(s string) *sandseav1.NetworkRule {
		return &sandseav1.NetworkRule{Target: &sandseav1.NetworkRule_Domain{Domain: s}}
	}
	reject := domain("*.example.org")
	reject.Reject, reject.Ports = true, []*sandseav1.PortRange{{First: 443}, {First: 8000, Last: 8100}}
	net := &sandseav1.NetworkRule{
		Name: "time", Target: &sandseav1.NetworkRule_Cidr{Cidr: "2001:db8::/32"}, Protocol: sandseav1.NetworkProtocol_NETWORK_PROTOCOL_UDP,
		Ports: []*sandseav1.PortRange{{First: 123, Last: 123}},
	}
	secret := domain("models.example")
	secret.Secret = "model-key"
	sb.Spec.Network = &sandseav1.NetworkPolicy{
		Services: map[string]bool{"pypi": true, "npm": false}, AsOf: day, Deny: []string{"pypi:flask"}, Pin: []string{"maven:a:b@1"}, InspectTls: true,
		Limits: &sandseav1.NetworkLimits{Bytes: 1 << 30, Flows: 100},
		Phases: []*sandseav1.NetworkPhase{
			{Name: "build"},
			{Name: "agent", Rules: []*sandseav1.NetworkRule{reject, net, secret, {Target: &sandseav1.NetworkRule_Service{Service: "golang"}}}, Deny: []string{"git:git.example/team"}, Inbound: []*sandseav1.PortRange{{First: 8080}}},
			{Name: "evil\x1b[2J", InboundClosed: true},
		},
	}
	sb.NetworkPhase = "agent"
	sb.Usage = &sandseav1.Usage{NetSentBytes: 1400, NetReceivedBytes: 12 << 20, NetFlows: 3, NetDenied: 12000}
	golden.Equal(t, "tables/inspect_net.txt", show(80, false, func(a *app) { a.printSandbox(sb, nil) }))
	if got, want := netWord(sb), "golang,pypi,+2"; got != want {
		t.Errorf("got %s, want %s", got, want)
	}
}

func TestNetWord(t *testing.T) {
	service := func(s string, reject bool) *sandseav1.NetworkRule {
		return &sandseav1.NetworkRule{Reject: reject, Target: &sandseav1.NetworkRule_Service{Service: s}}
	}
	for _, tt := range []struct {
		name   string
		policy *sandseav1.NetworkPolicy
		want   string
	}{
		{"none", nil, "-"},
		{"all rejected", &sandseav1.NetworkPolicy{Services: map[string]bool{"pypi": false}}, "-"},
		{"a service in every phase goes before the rules", &sandseav1.NetworkPolicy{
			Services: map[string]bool{"pypi": false},
			Phases:   []*sandseav1.NetworkPhase{{Name: "a", Rules: []*sandseav1.NetworkRule{service("pypi", false)}}},
		}, "-"},
		{"of two rules the first decides", &sandseav1.NetworkPolicy{
			Phases: []*sandseav1.NetworkPhase{{Name: "a", Rules: []*sandseav1.NetworkRule{service("npm", true), service("npm", false), service("git:git.example/x", false)}}},
		}, "+1"},
	} {
		if got := netWord(&sandseav1.Sandbox{Spec: &sandseav1.SandboxSpec{Network: tt.policy}}); got != tt.want {
			t.Errorf("%s: got %s, want %s", tt.name, got, tt.want)
		}
	}
}

func TestQuestions(t *testing.T) {
	udp := sandseav1.NetworkProtocol_NETWORK_PROTOCOL_UDP
	for text, want := range map[string]*sandseav1.CheckNetworkRequest{
		"example.org":                  {Host: "example.org"},
		"example.org:8443":             {Host: "example.org", Port: 8443},
		"udp://192.0.2.7:123":          {Host: "192.0.2.7", Port: 123, Protocol: udp},
		"2001:db8::7":                  {Host: "2001:db8::7"},
		"[2001:db8::7]:443":            {Host: "2001:db8::7", Port: 443},
		"pypi":                         {Service: "pypi"},
		"pypi:flask":                   {Service: "pypi", Package: "flask"},
		"npm:@scope/name":              {Service: "npm", Package: "@scope/name"},
		"npm:@scope/name@1.2.3":        {Service: "npm", Package: "@scope/name", Version: "1.2.3"},
		"maven:org.example:lib@1.0":    {Service: "maven", Package: "org.example:lib", Version: "1.0"},
		"golang:go.example/mod@v1.2.3": {Service: "golang", Package: "go.example/mod", Version: "v1.2.3"},
		"git:git.example/team/repo":    {Service: "git:git.example/team/repo"},
	} {
		got, err := parseQuestion(text)
		if diff := cmp.Diff(want, got, protocmp.Transform()); err != nil || diff != "" {
			t.Errorf("%s: %v\n%s", text, err, diff)
		}
	}
	for _, bad := range []string{"", ":443", "example.org:0", "example.org:99999", "https://example.org/x", "a b", "[::1", "x/y"} {
		if q, err := parseQuestion(bad); errdefs.KindOf(err) != errdefs.Invalid {
			t.Errorf("%q: %v, %v", bad, q, err)
		}
	}
}

func TestPolicyFiles(t *testing.T) {
	want := &sandseav1.NetworkPolicy{
		Services: map[string]bool{"pypi": true, "npm": false},
		AsOf:     timestamppb.New(time.Date(2024, 6, 1, 0, 0, 0, 0, time.UTC)),
		Deny:     []string{"pypi:flask@3.1.0"}, InspectTls: true, Limits: &sandseav1.NetworkLimits{Bytes: 1 << 40, Flows: 100},
		Phases: []*sandseav1.NetworkPhase{
			{Name: "agent", Rules: []*sandseav1.NetworkRule{
				{Target: &sandseav1.NetworkRule_Domain{Domain: "example.org"}, Ports: []*sandseav1.PortRange{{First: 443}}},
				{Reject: true, Target: &sandseav1.NetworkRule_Cidr{Cidr: "192.0.2.0/24"}, Protocol: sandseav1.NetworkProtocol_NETWORK_PROTOCOL_UDP},
			}},
			{Name: "grade", AsOf: timestamppb.New(time.Date(2024, 6, 2, 10, 0, 0, 0, time.UTC))},
		},
	}
	for name, text := range map[string]string{
		"TOML": `
			as_of = 2024-06-01
			deny = ["pypi:flask@3.1.0"]
			inspect_tls = true
			[services]
			pypi = true
			npm = false
			[limits]
			bytes = 1099511627776
			flows = 100
			[[phases]]
			name = "agent"
			rules = [
				{ domain = "example.org", ports = [{ first = 443 }] },
				{ reject = true, cidr = "192.0.2.0/24", protocol = "udp" },
			]
			[[phases]]
			name = "grade"
			as_of = 2024-06-02T12:00:00+02:00`,
		"JSON": `{"services": {"pypi": true, "npm": false}, "asOf": "2024-06-01", "deny": ["pypi:flask@3.1.0"], "inspectTls": true,
			"limits": {"bytes": 1099511627776, "flows": 100}, "pin": null,
			"phases": [{"name": "agent", "rules": [
				{"domain": "example.org", "ports": [{"first": 443}], "protocol": "unspecified"},
				{"reject": true, "cidr": "192.0.2.0/24", "protocol": "NETWORK_PROTOCOL_UDP"}]},
				{"name": "grade", "as_of": "2024-06-02T10:00:00Z"}]}`,
	} {
		file := filepath.Join(t.TempDir(), "policy")
		if err := os.WriteFile(file, []byte(text), 0o600); err != nil {
			t.Fatal(err)
		}
		got, err := readPolicy("network", file)
		if diff := cmp.Diff(want, got, protocmp.Transform()); err != nil || diff != "" {
			t.Errorf("%s: %v\n%s", name, err, diff)
		}
	}
	// What --json prints is a policy file.
	b, err := encode(members(want.ProtoReflect()))
	if err != nil {
		t.Fatal(err)
	}
	file := filepath.Join(t.TempDir(), "policy.json")
	if err := os.WriteFile(file, b, 0o600); err != nil {
		t.Fatal(err)
	}
	got, err := readPolicy("network", file)
	if diff := cmp.Diff(want, got, protocmp.Transform()); err != nil || diff != "" {
		t.Errorf("%s: %v\n%s", b, err, diff)
	}
}

func TestPolicyFilesAreRefusedWithTheirPlace(t *testing.T) {
	for text, want := range map[string]string{
		"[services]\npypi = \"yes\"":          "f: services.pypi: must be true or false. Correct the file",
		"phase = 3":                           "f: phase: must be text, in quotes. Correct the file",
		"phases = \"agent\"":                  "f: phases: must be a list. Correct the file",
		"[[phases]]\nname = \"a\"\nruls = []": "f: unknown key phases[0].ruls. Did you mean rules?",
		"sercices = 1":                        "f: unknown key sercices. Did you mean services?",
		"x = 1":                               "f: unknown key x. Known: as_of, deny, inspect_tls, limits, phase, phases, pin, services",
		"as_of = \"June\"":                    "f: as_of: must be a date, as 2024-06-01 or 2024-06-01T12:00:00Z. Correct the file",
		"[limits]\nflows = 1.5":               "f: limits.flows: must be a whole number. Correct the file",
		"limits = []":                         "f: limits: must be a table with bytes, dns_per_second, flows. Correct the file",
		"phase = ":                            "f:1: unexpected EOF; expected value. Correct the file",
		"{\n\"phase\": }":                     "f:2: invalid character '}' looking for beginning of value. Correct the file",
		`{"phases": [{"rules": [{"protocol": 6}]}]}`:                              "f: phases[0].rules[0].protocol: must be tcp or udp. Correct the file",
		`{"phases": [{"rules": [{"domain": "a.example", "cidr": "192.0.2.7"}]}]}`: "f: phases[0].rules[0]: has both cidr and domain. Make two of it",
		"[limits]\nflows = 99999999999":                                           "f: limits.flows: must be a whole number, at most 2147483647. Correct the file",
		"\x1b[2J = 1":                                                             `f:1: `,
	} {
		dir := t.TempDir()
		file := filepath.Join(dir, "f")
		if err := os.WriteFile(file, []byte(text), 0o600); err != nil {
			t.Fatal(err)
		}
		_, err := readPolicy("network", file)
		if err == nil {
			t.Errorf("%q: no error", text)
			continue
		}
		if got := strings.ReplaceAll(err.Error(), dir+"/", ""); !strings.HasPrefix(got, want) || strings.Contains(got, "\x1b") {
			t.Errorf("%q: %s\nwant %s", text, got, want)
		}
	}
}

func TestTheNewestFlowIsFoundWithFewCalls(t *testing.T) {
	s := testserver.Start(t, testserver.Config{})
	id := living(t, s)
	c, err := client.New(client.Config{URL: s.URL, Token: s.Token})
	if err != nil {
		t.Fatal(err)
	}
	sb := c.Sandbox(id)
	if e, next := newestFlow(t.Context(), sb, 0); e != nil || next != 0 {
		t.Errorf("of an empty log: %v, %d", e, next)
	}
	sum := 0
	for _, n := range []int{1, 2, 1, 10, 5000, 3} {
		before := sum
		for range n {
			s.Flow(id, &sandseav1.NetworkEvent{Kind: kindDNS, Name: fmt.Sprintf("%d.example", sum)})
			sum++
		}
		for _, from := range []int{before, 0} {
			e, next := newestFlow(t.Context(), sb, int64(from))
			if want := fmt.Sprintf("%d.example", sum-1); e.GetName() != want || next != int64(sum) {
				t.Errorf("%d events, from %d: %s and %d", sum, from, e.GetName(), next)
			}
		}
	}
	if e, next := newestFlow(t.Context(), sb, int64(sum)); e != nil || next != int64(sum) {
		t.Errorf("nothing new: %v, %d", e, next)
	}
}

func TestNetTopOnATerminal(t *testing.T) {
	for _, columns := range []int{40, 80, 120} {
		t.Run(fmt.Sprint(columns), func(t *testing.T) {
			t.Parallel()
			s := testserver.Start(t, testserver.Config{})
			one, two := living(t, s), living(t, s)
			s.Flow(one, &sandseav1.NetworkEvent{Kind: kindDNS, Name: "first.example", Denied: true, SentBytes: 10})
			x := onTerminal(t, columns, append(against(s), "NO_COLOR=1"), "net", "top")
			x.untilShown("\n  " + one[:8])
			x.untilShown("\n  " + two[:8])
			x.untilShown("dns fi")
			x.types("ss/" + one[:8] + "\r")
			x.untilShown("s sort (FLOW")
			wait.Until(t, limit, func() bool { return !strings.Contains(x.shown(), two[:8]) }, "the filter filters")
			s.Flow(one, &sandseav1.NetworkEvent{Kind: kindDNS, Name: "second.example", SentBytes: 10})
			x.untilShown("dns se")
			x.types("q")
			if code, text := x.exits(); code != 0 {
				t.Errorf("exit %d, %q", code, text)
			}
			x.wasGivenBack()
		})
	}
}

// Where a rule allowed what was denied all the same, its name would mislead: the log says why.
func TestTheLogSaysWhatTheRuleDoesNot(t *testing.T) {
	for _, tt := range []struct{ rule, why, want string }{
		{"default reject", "no rule of phase agent allows api.example", "default reject"},
		{"reject domain api.example", "rule reject domain api.example rejects api.example", "rule reject domain api.example"},
		{"domain api.example", "the secret \"k\" does not go to api.example", "rule domain api.example  the secret \"k\" does not go to api.example"},
		{"host", "the host is \"b.example\", the connection is to api.example:443", "rule host  the host is \"b.example\", the connection is to api.example:443"},
		{"limit flows", "16 are open", "limit flows"},
	} {
		e := &sandseav1.NetworkEvent{Kind: kindConnection, Denied: true, Rule: tt.rule, Name: "api.example", Port: 443, Protocol: "https", Error: tt.why}
		if got := strings.Join(factWords(e), "  "); got != tt.want {
			t.Errorf("got %s\nwant %s", got, tt.want)
		}
	}
}

// TestAPhaseThatIsReplacedKeepsWhatEndpointsMayReach changes what leaves a phase that is closed to endpoints.
func TestAPhaseThatIsReplacedKeepsWhatEndpointsMayReach(t *testing.T) {
	sb := &sandseav1.Sandbox{Id: "s1", NetworkPhase: "agent", Spec: &sandseav1.SandboxSpec{Network: &sandseav1.NetworkPolicy{
		Phases: []*sandseav1.NetworkPhase{
			{Name: "agent", Inbound: []*sandseav1.PortRange{{First: 8000}}}, {Name: "grade", InboundClosed: true},
		},
	}}}
	f := networkFlags{allow: []string{"pypi"}, fileFlag: "file"}
	for _, phase := range []string{"agent", "grade"} {
		p, err := f.replaced(nil, sb, phase)
		if err != nil {
			t.Fatal(err)
		}
		if in := p.GetPhases()[0].GetInbound(); len(in) != 1 || in[0].GetFirst() != 8000 || !p.GetPhases()[1].GetInboundClosed() {
			t.Errorf("phase %s replaced: %v", phase, p)
		}
	}
}
