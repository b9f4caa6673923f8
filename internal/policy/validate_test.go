package policy

import (
	"encoding/json"
	"errors"
	"fmt"
	"net/netip"
	"reflect"
	"strings"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"

	"github.com/sandsea/sandsea/api/errdefs"
)

func TestTheLeastPolicyGetsEveryDefault(t *testing.T) {
	got, err := Policy{}.Validate()
	if err != nil {
		t.Fatal(err)
	}
	if d := cmp.Diff(Policy{Phases: []Phase{{Name: "default"}}, Start: "default"}, got); d != "" {
		t.Fatalf("(-want +got):\n%s", d)
	}
}

func TestValidateWritesEverythingInItsCanonicalSpelling(t *testing.T) {
	zone := time.FixedZone("east", 3600)
	in := Policy{
		Services: map[string]bool{"npm": false},
		Phases: []Phase{{
			Name: "build", AsOf: time.Date(2024, 6, 1, 1, 0, 0, 0, zone), Deny: []string{"pypi:Flask_Login"}, Inbound: []Ports{{First: 80}},
			Rules: []Rule{
				{Domain: "Example.ORG."},
				{Domain: "*.XN--mnchen-3ya.example", Ports: []Ports{{First: 22}}, Name: "mine"},
				{CIDR: "2001:DB8:0::/32", Reject: true},
				{CIDR: "192.0.2.7/32"},
				{Service: "git:Git.Example/Org//Repo.git/"},
				{Service: "pypi"},
			},
		}, {Name: "agent"}},
		Deny: []string{"git:Git.Example/Org/Repo.git", "npm:@Scope%2FName@1.0.0", "golang:git.example/!azure/sdk/v2"},
		Pin:  []string{"pypi:Six@1.0.0"},
	}
	want := Policy{
		Services: map[string]bool{"npm": false}, Start: "build",
		Phases: []Phase{{
			Name: "build", AsOf: time.Date(2024, 6, 1, 0, 0, 0, 0, time.UTC), Deny: []string{"pypi:flask-login"}, Inbound: []Ports{{80, 80}},
			Rules: []Rule{
				{Domain: "example.org", Name: "domain example.org"},
				{Domain: "*.xn--mnchen-3ya.example", Ports: []Ports{{22, 22}}, Name: "mine"},
				{CIDR: "2001:db8::/32", Reject: true, Name: "reject cidr 2001:db8::/32"},
				{CIDR: "192.0.2.7", Name: "cidr 192.0.2.7"},
				{Service: "git:git.example/org/repo", Name: "service git:git.example/org/repo"},
				{Service: "pypi", Name: "service pypi"},
			},
		}, {Name: "agent"}},
		Deny: []string{"git:git.example/org/repo", "npm:@scope/name@1.0.0", "golang:git.example/azure/sdk"},
		Pin:  []string{"pypi:six@1.0.0"},
	}
	before := fmt.Sprint(in)
	got, err := in.Validate()
	if err != nil {
		t.Fatal(err)
	}
	if d := cmp.Diff(want, got); d != "" {
		t.Fatalf("(-want +got):\n%s", d)
	}
	if fmt.Sprint(in) != before {
		t.Error("the caller's policy was written to")
	}
	again, err := got.Validate()
	if err != nil || !reflect.DeepEqual(got, again) {
		t.Fatalf("a validated policy changed: %v\n%s", err, cmp.Diff(got, again))
	}
}

func TestBadFieldsAreNamed(t *testing.T) {
	rule := func(r Rule) Policy {
		return Policy{Phases: []Phase{{Name: "a"}, {Name: "b", Rules: []Rule{{Domain: "*"}, r}}}}
	}
	phase := func(ph Phase) Policy { return Policy{Phases: []Phase{ph}} }
	const at = "network.phases[1].rules[1]"
	var many []Rule
	for i := range MaxRules + 1 {
		many = append(many, Rule{Domain: fmt.Sprintf("d%d.example", i)})
	}
	var cut []Rule
	for i := range 200 {
		cut = append(cut, Rule{CIDR: fmt.Sprintf("9.%d.7.7", i), Reject: true})
	}
	cut = append(cut, Rule{CIDR: "0.0.0.0/0", Ports: []Ports{{80, 80}}}, Rule{CIDR: "0.0.0.0/0", Ports: []Ports{{443, 443}}})
	var long []string
	for i := range 2000 {
		long = append(long, fmt.Sprintf("pypi:%s%d@1.0", strings.Repeat("a", 400), i))
	}
	for what, c := range map[string]struct {
		p     Policy
		field string
		hint  string // a part of it
	}{
		"a misspelt service":           {Policy{Services: map[string]bool{"pipy": false}}, "network.services", "pypi, npm, golang"},
		"a repository as a service":    {Policy{Services: map[string]bool{"git:git.example/a": true}}, "network.services", "rule"},
		"17 phases":                    {Policy{Phases: make([]Phase, 17)}, "network.phases", "16"},
		"a phase without a name":       {phase(Phase{}), "network.phases[0].name", "letters"},
		"a phase with a space":         {phase(Phase{Name: "a b"}), "network.phases[0].name", "letters"},
		"a phase of 65 letters":        {phase(Phase{Name: strings.Repeat("a", 65)}), "network.phases[0].name", "64"},
		"two phases of one name":       {Policy{Phases: []Phase{{Name: "a"}, {Name: "a"}}}, "network.phases[1].name", "own"},
		"a start that is no phase":     {Policy{Start: "b", Phases: []Phase{{Name: "a"}}}, "network.phase", "network.phases"},
		"a start without phases":       {Policy{Start: "build"}, "network.phase", "network.phases"},
		"257 rules":                    {phase(Phase{Name: "a", Rules: many}), "network.phases[0].rules", "256"},
		"too many pieces":              {phase(Phase{Name: "a", Rules: cut}), "network.phases[0].rules", "fewer"},
		"a date before there were any": {Policy{AsOf: time.Date(1969, 1, 1, 0, 0, 0, 0, time.UTC)}, "network.as_of", "1970"},
		"one in a phase":               {phase(Phase{Name: "a", AsOf: time.Date(10000, 1, 1, 0, 0, 0, 0, time.UTC)}), "network.phases[0].as_of", "1970"},
		"inbound ports that it closes": {phase(Phase{Name: "a", Inbound: []Ports{{80, 80}}, InboundClosed: true}), "network.phases[0].inbound_closed", "one of"},
		"an inbound port 0":            {phase(Phase{Name: "a", Inbound: []Ports{{80, 80}, {}}}), "network.phases[0].inbound[1].first", "65535"},
		"a rule about nothing":         {rule(Rule{}), at, "domain, cidr and service"},
		"a rule about two things":      {rule(Rule{Domain: "*", Service: "pypi"}), at, "two rules"},
		"a name beyond ASCII":          {rule(Rule{Domain: "münchen.example"}), at + ".domain", "xn--"},
		"one in an empty xn--":         {rule(Rule{Domain: "xn--.example"}), at + ".domain", "host name"},
		"one in a broken xn--":         {rule(Rule{Domain: "xn--ä.example"}), at + ".domain", "xn--"},
		"one in xn-- of ASCII":         {rule(Rule{Domain: "xn--abc-.example"}), at + ".domain", "host name"},
		"one in no spelling of xn--":   {rule(Rule{Domain: "xn--99999999.example"}), at + ".domain", "xn--"},
		"a wildcard in the middle":     {rule(Rule{Domain: "a.*.example"}), at + ".domain", `"*."`},
		"a part of a label":            {rule(Rule{Domain: "a*.example"}), at + ".domain", `"*."`},
		"two wildcards":                {rule(Rule{Domain: "*.*.example"}), at + ".domain", `"*."`},
		"a wildcard of nothing":        {rule(Rule{Domain: "*."}), at + ".domain", `"*."`},
		"a URL":                        {rule(Rule{Domain: "https://example.org/"}), at + ".domain", "scheme"},
		"a name with a port":           {rule(Rule{Domain: "example.org:443"}), at + ".domain", "ports"},
		"an address as a domain":       {rule(Rule{Domain: "192.0.2.1"}), at + ".domain", "cidr"},
		"one of IPv6":                  {rule(Rule{Domain: "[2001:db8::1]"}), at + ".domain", "cidr"},
		"a network as a domain":        {rule(Rule{Domain: "192.0.2.0/24"}), at + ".domain", "cidr"},
		"a number as a domain":         {rule(Rule{Domain: "127.1"}), at + ".domain", "host name"},
		"a hyphen at the end":          {rule(Rule{Domain: "a-.example"}), at + ".domain", "host name"},
		"an empty label":               {rule(Rule{Domain: "a..example"}), at + ".domain", "host name"},
		"a name of 254 bytes":          {rule(Rule{Domain: strings.Repeat("a.", 125) + "exam"}), at + ".domain", "host name"},
		"a name as a network":          {rule(Rule{CIDR: "example.org"}), at + ".cidr", "domain"},
		"bits behind the mask":         {rule(Rule{CIDR: "192.0.2.7/24"}), at + ".cidr", "192.0.2.0/24"},
		"a mapped address":             {rule(Rule{CIDR: "::ffff:192.0.2.7"}), at + ".cidr", "192.0.2.7/32"},
		"a mapped network":             {rule(Rule{CIDR: "::ffff:192.0.2.0/120"}), at + ".cidr", "192.0.2.0/24"},
		"all that is mapped":           {rule(Rule{CIDR: "::ffff:0:0/96"}), at + ".cidr", "0.0.0.0/0"},
		"more than is mapped":          {rule(Rule{CIDR: "::ffff:0:0/95"}), at + ".cidr", ""},
		"a zone":                       {rule(Rule{CIDR: "2001:db8::1%eth0"}), at + ".cidr", "zone"},
		"a mask of 33":                 {rule(Rule{CIDR: "192.0.2.0/33"}), at + ".cidr", "2001:db8::/32"},
		"a network with a port":        {rule(Rule{CIDR: "192.0.2.0/24:443"}), at + ".cidr", "ports"},
		"an unknown service":           {rule(Rule{Service: "pip"}), at + ".service", "rubygems, or git:<host>/<path>"},
		"a repository without a path":  {rule(Rule{Service: "git:git.example"}), at + ".service", "git:<host>/<path>"},
		"one with a scheme":            {rule(Rule{Service: "git:https://git.example/a"}), at + ".service", "scheme"},
		"one with a user":              {rule(Rule{Service: "git:git@git.example/a"}), at + ".service", "user"},
		"one with dots":                {rule(Rule{Service: "git:git.example/a/../b"}), at + ".service", ""},
		"one with a star":              {rule(Rule{Service: "git:git.example/*/b"}), at + ".service", ""},
		"ports of a service":           {rule(Rule{Service: "pypi", Ports: []Ports{{443, 443}}}), at + ".ports", "out"},
		"a service by UDP":             {rule(Rule{Service: "pypi", Protocol: UDP}), at + ".protocol", "out"},
		"port 0":                       {rule(Rule{Domain: "*", Ports: []Ports{{443, 443}, {0, 10}}}), at + ".ports[1].first", "65535"},
		"ports in disorder":            {rule(Rule{Domain: "*", Ports: []Ports{{443, 80}}}), at + ".ports[0].last", "lower"},
		"65 ranges":                    {rule(Rule{Domain: "*", Ports: make([]Ports, 65)}), at + ".ports", "64"},
		"ICMP":                         {rule(Rule{CIDR: "192.0.2.1", Protocol: "icmp"}), at + ".protocol", "tcp or udp"},
		"a secret without inspection":  {rule(Rule{Domain: "*", Secret: "key"}), at + ".secret", "network.inspect_tls"},
		"a rule called platform":       {rule(Rule{Domain: "*", Name: "platform"}), at + ".name", "another"},
		"a rule called like a verdict": {rule(Rule{Domain: "*", Name: "deny pypi:x"}), at + ".name", "another"},
		"a rule called like none":      {rule(Rule{Domain: "*", Name: "default reject"}), at + ".name", "another"},
		"a name with a newline":        {rule(Rule{Domain: "*", Name: "a\nb"}), at + ".name", "ASCII"},
		"a deny of nothing":            {Policy{Deny: []string{"pypi:a", "flask"}}, "network.deny[1]", "<service>:<name>"},
		"a deny of no service":         {Policy{Deny: []string{"pip:flask"}}, "network.deny[0]", "<service>:<name>"},
		"a deny of no name":            {Policy{Deny: []string{"pypi:"}}, "network.deny[0]", "<service>:<name>"},
		"a deny of an empty version":   {Policy{Deny: []string{"pypi:flask@"}}, "network.deny[0]", "<service>:<name>"},
		"a deny of half a coordinate":  {Policy{Deny: []string{"maven:junit"}}, "network.deny[0]", "<service>:<name>"},
		"a deny of a host":             {Policy{Deny: []string{"git:git.example"}}, "network.deny[0]", "git:<host>/<path>"},
		"a deny of everything":         {Policy{Deny: []string{"git:*/*"}}, "network.deny[0]", "git:<host>/<path>"},
		"a deny of a part of a word":   {Policy{Deny: []string{"git:git.example/a*"}}, "network.deny[0]", "git:<host>/<path>"},
		"a star in a package":          {Policy{Deny: []string{"pypi:*"}}, "network.deny[0]", "<service>:<name>"},
		"one in a phase's deny":        {phase(Phase{Name: "a", Deny: []string{"x"}}), "network.phases[0].deny[0]", "<service>:<name>"},
		"257 denials":                  {Policy{Deny: make([]string, 257)}, "network.deny", "256"},
		"a pin without a version":      {Policy{Pin: []string{"pypi:six"}}, "network.pin[0]", "@<version>"},
		"a pin of a repository":        {Policy{Pin: []string{"git:git.example/a"}}, "network.pin[0]", "@<version>"},
		"4097 pins":                    {Policy{Pin: make([]string, 4097)}, "network.pin", "4096"},
		"negative bytes":               {Policy{Limits: Limits{Bytes: -1}}, "network.limits.bytes", "0"},
		"too many flows":               {Policy{Limits: Limits{Flows: 1 << 30}}, "network.limits.flows", "0"},
		"negative questions":           {Policy{Limits: Limits{DNSPerSecond: -1}}, "network.limits.dns_per_second", "0"},
		"more than a message holds":    {Policy{Pin: long}, "network", "512 KiB"},
	} {
		t.Run(what, func(t *testing.T) {
			_, err := c.p.Validate()
			e, ok := errors.AsType[*errdefs.Error](err)
			if !ok || e.Kind != errdefs.Invalid || e.Field != c.field {
				t.Fatalf("error %v, want Invalid for the field %s", err, c.field)
			}
			if !strings.HasPrefix(e.Msg, c.field+": ") || e.Hint == "" || !strings.Contains(e.Hint, c.hint) || strings.HasSuffix(e.Hint, ".") {
				t.Fatalf("message %q, hint %q", e.Msg, e.Hint)
			}
		})
	}
}

func TestSecretsGoWithRulesThatAllowNames(t *testing.T) {
	for what, c := range map[string]struct {
		r    Rule
		good bool
	}{
		"a domain":     {Rule{Domain: "api.example"}, true},
		"a repository": {Rule{Service: "git:git.example/a"}, true},
		"a network":    {Rule{CIDR: "192.0.2.1"}, false},
		"a service":    {Rule{Service: "pypi"}, false},
		"a reject":     {Rule{Domain: "api.example", Reject: true}, false},
		"UDP":          {Rule{Domain: "api.example", Protocol: UDP}, false},
	} {
		c.r.Secret = "key-1"
		_, err := Policy{InspectTLS: true, Phases: []Phase{{Name: "a", Rules: []Rule{c.r}}}}.Validate()
		if (err == nil) != c.good {
			t.Errorf("%s: %v", what, err)
		}
	}
}

func TestAPolicyAtEveryBoundIsTakenAndFitsItsMessage(t *testing.T) {
	p := Policy{}
	for i := range MaxPhases {
		ph := Phase{Name: fmt.Sprint("p", i)}
		for j := range MaxRules {
			ph.Rules = append(ph.Rules, Rule{Domain: fmt.Sprintf("d%d.example", j)})
		}
		p.Phases = append(p.Phases, ph)
	}
	for i := range MaxDeny {
		p.Deny = append(p.Deny, fmt.Sprint("pypi:d", i))
	}
	for i := range MaxPins {
		p.Pin = append(p.Pin, fmt.Sprintf("debian:p%d@1.0", i))
	}
	p, err := p.Validate()
	if err != nil {
		t.Fatal(err)
	}
	raw, err := json.Marshal(p)
	if err != nil || len(raw) > MaxBytes {
		t.Fatalf("%d bytes, %v", len(raw), err)
	}
	var back Policy
	if err := json.Unmarshal(raw, &back); err != nil || !reflect.DeepEqual(p, back) {
		t.Fatalf("does not survive JSON: %v", err)
	}
}

func TestGranted(t *testing.T) {
	p := agent(t, Rule{Domain: "*"}, Rule{CIDR: "10.0.0.0/8", Reject: true}, Rule{CIDR: "0.0.0.0/0"}, Rule{CIDR: "10.1.0.0/16"})
	err := p.Granted(nil)
	e, ok := errors.AsType[*errdefs.Error](err)
	if !ok || e.Kind != errdefs.Denied || e.Field != "network.phases[0].rules[3].cidr" || !strings.Contains(e.Msg, "private") {
		t.Fatalf("got %v", err)
	}
	if err := p.Granted(Grants{netip.MustParsePrefix("10.1.2.0/24")}); err != nil {
		t.Errorf("a part of it is granted: %v", err)
	}
	if err := agent(t, Rule{CIDR: "169.254.169.254"}).Granted(Grants{netip.MustParsePrefix("0.0.0.0/0")}); err == nil {
		t.Error("metadata is granted")
	}
}

func TestPunycode(t *testing.T) {
	// From RFC 3492, section 7.1, and registrars.
	for code, want := range map[string]string{
		"mnchen-3ya":                 "münchen",
		"egbpdaj6bu4bxfgehfvwxn":     "ليهمابتكلموشعربي؟",
		"ihqwcrb4cv8a8dqg056pqjye":   "他们为什么不说中文",
		"Pro-2ya":                    "",
		"pproprostnemluvesky-uyb24d": "",
		"ls8h":                       "💩",
		"p1b6ci4b4b3a":               "",
		"a":                          "",
		"-":                          "",
		"99zzz999":                   "",
	} {
		runes, ok := decodePunycode(code)
		if want != "" && (!ok || string(runes) != want || encodePunycode([]rune(want)) != code || !isPunycode(code)) {
			t.Errorf("%s: %q, %v; %s is %s", code, string(runes), ok, want, encodePunycode([]rune(want)))
		}
	}
	for _, bad := range []string{"", "a-", "abc-", "-", "a\u00fc", "MNCHEN-3YA", "99999999", "mnchen-3y"} {
		if isPunycode(bad) {
			t.Errorf("%q passes", bad)
		}
	}
}
