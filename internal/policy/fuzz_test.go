package policy

import (
	"encoding/json"
	"errors"
	"net/netip"
	"reflect"
	"strings"
	"testing"
	"time"

	"github.com/sandsea/sandsea/api/errdefs"
)

func FuzzEvaluate(f *testing.F) {
	f.Add("*.example", "203.0.113.0/24", "git:git.example/a", false, "a.example", "203.0.113.7", uint16(443), "tcp")
	f.Add("*", "0.0.0.0/0", "pypi", true, "[::ffff:127.0.0.1]", "169.254.169.254", uint16(0), "udp")
	f.Add("a..b", "::/0", "git:x", true, "127.1", "64:ff9b::a00:1", uint16(1), "icmp")
	f.Add("xn--mnchen-3ya.example", "2001:db8::7%eth0", "npm", false, "EXAMPLE.org.", "", uint16(80), "")
	f.Fuzz(func(t *testing.T, domain, cidr, service string, reject bool, name, addr string, port uint16, proto string) {
		raw := Policy{Phases: []Phase{{Name: "a", Rules: []Rule{
			{Domain: domain, Reject: reject}, {CIDR: cidr}, {Service: service}, {Domain: domain},
		}}}}
		a, _ := netip.ParseAddr(addr)
		q := Question{Name: name, Addr: a, Port: port, Protocol: Protocol(proto)}
		policies := []Policy{raw}
		if valid, err := raw.Validate(); err == nil {
			if one, two := Evaluate(raw, "a", q, nil), Evaluate(valid, "a", q, nil); one.Allow != two.Allow {
				t.Fatalf("%+v before Validate, %+v after", one, two)
			}
			policies = append(policies, valid)
		}
		for _, p := range policies {
			v := Evaluate(p, "a", q, nil)
			if v.Rule == "" || v.Reason == "" {
				t.Fatalf("no rule or reason: %+v", v)
			}
			if !v.Allow {
				continue
			}
			if a.IsValid() {
				if denied, why := Platform(a); denied {
					t.Fatalf("%s is %s and allowed by %s", a, why, v.Rule)
				}
			}
			if literal, err := netip.ParseAddr(strings.Trim(name, "[]")); err == nil {
				if denied, why := Platform(literal); denied {
					t.Fatalf("%s is %s and allowed by %s", literal, why, v.Rule)
				}
			}
			if strings.ContainsFunc(name, func(r rune) bool { return r <= ' ' || r > '~' }) {
				t.Fatalf("name %q is allowed", name)
			}
			if Evaluate(p, "b", q, nil).Allow {
				t.Fatal("a phase that does not exist allows")
			}
		}
		Evaluate(raw, "a", Question{Service: service}, nil)
	})
}

func FuzzValidate(f *testing.F) {
	for _, p := range []Policy{
		{},
		{Services: map[string]bool{"pypi": true, "npm": false}, Start: "agent", Phases: []Phase{{Name: "build"}, {Name: "agent"}}},
		{
			AsOf: time.Unix(1e9, 0), Deny: []string{"pypi:Flask", "git:git.example/*/x"}, Pin: []string{"npm:@a/b@1"}, InspectTLS: true,
			Limits: Limits{1, 2, 3}, Phases: []Phase{{
				Name: "a", Inbound: []Ports{{First: 80}}, Deny: []string{"golang:golang.org/x/net"}, Rules: []Rule{
					{Domain: "*.xn--mnchen-3ya.example", Ports: []Ports{{1, 2}}, Secret: "k"},
					{CIDR: "::/0", Reject: true, Protocol: UDP},
					{CIDR: "0.0.0.0/0"},
					{Service: "git:git.example/a"},
					{Service: "maven"},
				},
			}},
		},
	} {
		raw, err := json.Marshal(p)
		if err != nil {
			f.Fatal(err)
		}
		f.Add(raw)
	}
	f.Fuzz(func(t *testing.T, raw []byte) {
		var p Policy
		if json.Unmarshal(raw, &p) != nil {
			return
		}
		valid, err := p.Validate()
		if err != nil {
			e, ok := errors.AsType[*errdefs.Error](err)
			if !ok || e.Kind != errdefs.Invalid || !strings.HasPrefix(e.Field, "network") || e.Hint == "" {
				t.Fatalf("%v names no field or no way out", err)
			}
			return
		}
		again, err := valid.Validate()
		if err != nil || !reflect.DeepEqual(valid, again) {
			t.Fatalf("a validated policy is not stable: %v\n%+v\n%+v", err, valid, again)
		}
		for _, ph := range valid.Phases {
			if w := Compile(valid, ph.Name, nil); len(w.Openings) > 2*MaxOpenings {
				t.Fatalf("%d openings", len(w.Openings))
			}
			for _, r := range ph.Rules {
				if m, ok := r.matcher(); !ok || m.all {
					t.Fatalf("a valid rule is not read: %+v", r)
				}
			}
			if valid.World(ph.Name).entries().broken != "" {
				t.Fatal("a valid entry is not read")
			}
		}
	})
}

func FuzzNormalise(f *testing.F) {
	for _, s := range []string{
		"Flask", "zope.interface-5.0-py3-none-any.whl", "a-1.0.tar.gz.zip", "@a%2fb", "github.com/!azure/x/v2", "gopkg.in/yaml.v3",
		"src:flask:amd64_1", "org:art", "rack-2.0-java.gem", "1.0-RC.1+l_1", "1!v2.0.post3.dev4", "..", "%252525", "a/v2/v3",
	} {
		f.Add(s, s)
	}
	f.Fuzz(func(t *testing.T, name, version string) {
		for _, s := range services {
			n := normalise(s, name)
			if n != "" && normalise(s, n) != n {
				t.Fatalf("%s: %q is %q is %q", s, name, n, normalise(s, n))
			}
			v := normaliseVersion(s, version)
			if again := normaliseVersion(s, v); again != v {
				t.Fatalf("%s: version %q is %q is %q", s, version, v, again)
			}
			e, problem := readEntry(s + ":" + name)
			if problem != "" {
				continue
			}
			text := e.text()
			back, problem := readEntry(text)
			if problem != "" || back.text() != text {
				t.Fatalf("entry %q is %q is %q %s", s+":"+name, text, back.text(), problem)
			}
			// An entry hides the very name that it was written with.
			if e.version == "" && !strings.Contains(e.name, "*") {
				if v := (World{Deny: []string{s + ":" + name}}).Package(s, name); v.Allow {
					t.Fatalf("%s:%s does not hide it", s, name)
				}
			}
		}
		if e, problem := readEntry(gitPrefix + name); problem == "" && !strings.Contains(e.text(), "*") {
			host, path, _ := strings.Cut(strings.TrimLeft(name, "/"), "/")
			if v := (World{Deny: []string{gitPrefix + name}}).Repo(host, path); v.Allow {
				t.Fatalf("git:%s does not hide it", name)
			}
		}
	})
}

func FuzzParseRule(f *testing.F) {
	for _, s := range []string{"pypi", "!*.example:1-2,3", "udp://[2001:db8::/32]:53", "git:git.example:8443/a", "192.0.2.0/24:5432", "::", "!!"} {
		f.Add(s)
	}
	f.Fuzz(func(t *testing.T, s string) {
		r, err := Parse(s)
		if err != nil {
			if e, ok := errors.AsType[*errdefs.Error](err); !ok || e.Hint == "" || e.Kind != errdefs.Invalid {
				t.Fatalf("%q: %v", s, err)
			}
			return
		}
		p, err := Policy{Phases: []Phase{{Name: "a", Rules: []Rule{r}}}}.Validate()
		if err != nil || !reflect.DeepEqual(p.Phases[0].Rules[0], r) {
			t.Fatalf("%q is %+v, which is no valid rule: %v", s, r, err)
		}
	})
}

func FuzzPunycode(f *testing.F) {
	f.Add("mnchen-3ya", "münchen")
	f.Add("99999999", "他们")
	f.Fuzz(func(t *testing.T, code, label string) {
		if isPunycode(code) {
			runes, _ := decodePunycode(code)
			if encodePunycode(runes) != code {
				t.Fatalf("%q passes and is %q again", code, encodePunycode(runes))
			}
		}
		if label == "" || len(label) > 200 || strings.ToValidUTF8(label, "") != label {
			return
		}
		if back, ok := decodePunycode(strings.ToLower(encodePunycode([]rune(strings.ToLower(label))))); !ok || string(back) != strings.ToLower(label) {
			t.Fatalf("%q comes back as %q", label, string(back))
		}
	})
}
