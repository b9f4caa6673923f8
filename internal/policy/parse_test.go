package policy

import (
	"errors"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"

	"github.com/sandsea/sandsea/api/errdefs"
)

func TestParse(t *testing.T) {
	for text, want := range map[string]Rule{
		"pypi":                        {Service: "pypi"},
		"!npm":                        {Service: "npm", Reject: true},
		"git:git.example/org/repo":    {Service: "git:git.example/org/repo"},
		"git:git.example:8443/org":    {Service: "git:git.example:8443/org"},
		"!git:Git.Example/org/x.git":  {Service: "git:git.example/org/x", Reject: true},
		"example.org":                 {Domain: "example.org"},
		"EXAMPLE.org.:443":            {Domain: "example.org", Ports: []Ports{{443, 443}}},
		"example.org:80,8000-8100":    {Domain: "example.org", Ports: []Ports{{80, 80}, {8000, 8100}}},
		"*.example.org":               {Domain: "*.example.org"},
		"*":                           {Domain: "*"},
		"!*:25":                       {Domain: "*", Ports: []Ports{{25, 25}}, Reject: true},
		"intranet.":                   {Domain: "intranet"},
		"intranet.:8080":              {Domain: "intranet", Ports: []Ports{{8080, 8080}}},
		"udp://ntp.example:123":       {Domain: "ntp.example", Ports: []Ports{{123, 123}}, Protocol: UDP},
		"tcp://192.0.2.7:5432":        {CIDR: "192.0.2.7", Ports: []Ports{{5432, 5432}}, Protocol: TCP},
		"192.0.2.0/24:5432":           {CIDR: "192.0.2.0/24", Ports: []Ports{{5432, 5432}}},
		"192.0.2.0/24":                {CIDR: "192.0.2.0/24"},
		"2001:db8::7":                 {CIDR: "2001:db8::7"},
		"2001:db8::/32":               {CIDR: "2001:db8::/32"},
		"[2001:db8::7]":               {CIDR: "2001:db8::7"},
		"[2001:db8::7]:443":           {CIDR: "2001:db8::7", Ports: []Ports{{443, 443}}},
		"!udp://[2001:db8::/32]:1-53": {CIDR: "2001:db8::/32", Ports: []Ports{{1, 53}}, Protocol: UDP, Reject: true},
	} {
		want.Name = want.name()
		got, err := Parse(text)
		if err != nil {
			t.Errorf("%s: %v", text, err)
			continue
		}
		if d := cmp.Diff(want, got); d != "" {
			t.Errorf("%s (-want +got):\n%s", text, d)
		}
	}
}

func TestParseRefuses(t *testing.T) {
	for text, hint := range map[string]string{
		"":                             "service",
		"!":                            "service",
		"!!pypi":                       "",
		"pipy":                         "pypi, npm",
		"pypi:443":                     "pypi",
		"example.org:":                 "443",
		"example.org:0":                "443",
		"example.org:65536":            "443",
		"example.org:443-80":           "443",
		"example.org:https":            "443",
		"example.org:443,":             "443",
		"example.org:+443":             "443",
		"example.org/path":             "domain",
		"https://example.org/":         "example.org",
		"icmp://192.0.2.1":             "tcp:// or udp://",
		"192.0.2.7/24":                 "192.0.2.0/24",
		"192.0.2.300":                  "host name",
		"2001:db8::7:443:x":            "",
		"[2001:db8::7":                 "443",
		"[2001:db8::7]443":             "443",
		"udp://pypi":                   "out",
		"git:git.example":              "git:<host>/<path>",
		"münchen.example":              "xn--",
		"a.*.example":                  `"*."`,
		strings.Repeat("a", 300) + ".": "",
	} {
		r, err := Parse(text)
		e, ok := errors.AsType[*errdefs.Error](err)
		if !ok || e.Kind != errdefs.Invalid || e.Hint == "" || !strings.Contains(e.Hint, hint) {
			t.Errorf("%q: %+v, %v; want a hint with %q", text, r, err, hint)
		}
	}
}
