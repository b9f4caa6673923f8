package config_test

import (
	"errors"
	"fmt"
	"net/netip"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"
	"github.com/google/go-cmp/cmp/cmpopts"

	"github.com/sandsea/sandsea/api/errdefs"
	"github.com/sandsea/sandsea/internal/aether/config"
	"github.com/sandsea/sandsea/internal/aether/upstream"
	"github.com/sandsea/sandsea/internal/policy"
)

func TestAFileThatIsNotThereSaysNothing(t *testing.T) {
	c, err := config.Load(filepath.Join(t.TempDir(), config.FileName))
	if err != nil {
		t.Fatal(err)
	}
	if c.Limits != config.DefaultLimits || c.Proxy != nil || len(c.Resolvers)+len(c.Secrets)+len(c.Services)+len(c.Grants("p")) != 0 {
		t.Errorf("got %+v", c)
	}
}

func TestLoad(t *testing.T) {
	dir := t.TempDir()
	write := func(name, text string) string {
		t.Helper()
		path := filepath.Join(dir, name)
		if err := os.WriteFile(path, []byte(text), 0o600); err != nil {
			t.Fatal(err)
		}
		return path
	}
	write("password", "hunter2\n")
	write("token", "Bearer t0ken\n")
	c, err := config.Load(write(config.FileName, `
resolvers = ["192.0.2.53", "[2001:db8::53]:5353"]
upstream_proxy = "http://u:p@proxy.example:3128"

[services.pypi]
urls = ["https://packages.example/simple/"]
files = ["https://files.example"]
user = "reader"
password_file = "password"

[[grants]]
cidrs = ["10.1.0.0/16"]

[[grants]]
project = "research"
cidrs = ["10.2.0.0/16", "fd00:1::/64"]

[secrets.model]
projects = ["lab"]
hosts = ["api.example", "*.eu.example"]
header = "Authorization"
value_file = "token"

[cache]
offline = true

[limits]
flows = 10
`))
	if err != nil {
		t.Fatal(err)
	}
	if want := []netip.AddrPort{netip.MustParseAddrPort("192.0.2.53:53"), netip.MustParseAddrPort("[2001:db8::53]:5353")}; !cmp.Equal(c.Resolvers, want, cmpopts.EquateComparable(netip.AddrPort{})) {
		t.Errorf("resolvers %v", c.Resolvers)
	}
	want := map[string]upstream.Setting{policy.PyPI: {
		URLs: []string{"https://packages.example/simple/"}, Files: []string{"https://files.example"},
		User: "reader", PasswordFile: filepath.Join(dir, "password"),
	}}
	if d := cmp.Diff(want, c.Services); d != "" {
		t.Error(d)
	}
	if got := fmt.Sprint(c.Grants("other"), c.Grants("research")); got != "[10.1.0.0/16] [10.1.0.0/16 10.2.0.0/16 fd00:1::/64]" {
		t.Errorf("grants %s", got)
	}
	if c.Limits.Flows != 10 || c.Limits.DNSPerSecond != config.DefaultLimits.DNSPerSecond || !c.Cache.Offline {
		t.Errorf("limits %+v, cache %+v", c.Limits, c.Cache)
	}
	s := c.Secrets["model"]
	if s.Value != "Bearer t0ken" {
		t.Errorf("secret %q", s.Value)
	}
	for host, want := range map[string]bool{
		"api.example": true, "x.api.example": false, "xapi.example": false, "a.eu.example": true, "eu.example": false, "xeu.example": false,
	} {
		if s.Covers(host) != want {
			t.Errorf("covers %s: %v", host, !want)
		}
	}
	if shown := fmt.Sprintf("%v %+v %#v", c.Secrets, c.Secrets, c.Secrets); strings.Contains(shown, "t0ken") {
		t.Errorf("a secret shows itself: %s", shown)
	}
}

func TestWhatIsWrongIsNamed(t *testing.T) {
	for _, c := range []struct {
		name, text string
		line       int // 0: none
		says       string
	}{
		{"no TOML", "resolvers = [", 1, ""},
		{"an unknown key", "resolver = []", 1, "resolvers"},
		{"an unknown key in a table", "[cache]\nbyte = 1", 2, "Did you mean bytes"},
		{"an unknown key in a list", "[[grants]]\nproject = \"p\"\ncidr = [\"10.0.0.0/8\"]", 3, "Did you mean cidrs"},
		{"an unknown key below a service", "[services.pypi]\nurls=[\"https://a.example\"]\nindex = 1", 3, "Known here: checksums, files, header"},
		{"a resolver by name", "resolvers = [\"dns.example\"]", 1, "dns.example"},
		{"a proxy that is none", "upstream_proxy = \"socks5://a.example\"", 1, "HTTP proxy"},
		{"a service that is none", "[services.pipy]\nurls = [\"https://a.example\"]", 0, "there is no service"},
		{"a URL that is none", "[services.npm]\nurls = [\"registry\"]", 2, "not an http or https URL"},
		{"checksums of npm", "[services.npm]\nurls = [\"https://a.example\"]\nchecksums = \"x\"", 3, "only golang"},
		{"a network with bits behind its mask", "[[grants]]\ncidrs = [\"10.0.0.1/8\"]", 2, "no network"},
		{"a grant of nothing", "[[grants]]\nproject = \"p\"", 0, "none is given"},
		{"a secret without hosts", "[secrets.s]\nprojects = [\"*\"]\nheader = \"A\"", 0, "hosts"},
		{"a secret of no project", "[secrets.s]\nhosts = [\"a.example\"]\nheader = \"A\"", 0, "projects"},
		{"a secret in Host", "[secrets.s]\nprojects = [\"*\"]\nhosts = [\"a.example\"]\nheader = \"Host\"", 4, "no header that can be set"},
		{"a secret without a file", "[secrets.s]\nprojects = [\"*\"]\nhosts = [\"a.example\"]\nheader = \"A\"\nvalue_file = \"absent\"", 5, "absent"},
		{"a secret for everybody", "[secrets.s]\nprojects = [\"*\"]\nhosts = [\"*\"]\nheader = \"A\"\nvalue_file = \"absent\"", 3, "no host name"},
		{"no flows", "[limits]\nflows = 0", 2, "too small"},
		{"a wrong type", "[limits]\nflows = \"many\"", 0, ""},
	} {
		t.Run(c.name, func(t *testing.T) {
			_, err := config.Parse("/d/aether.toml", c.text)
			if !errors.Is(err, errdefs.Invalid) {
				t.Fatalf("got %v", err)
			}
			if at := fmt.Sprintf("/d/aether.toml:%d", c.line); c.line > 0 && !strings.Contains(err.Error(), at) || !strings.Contains(err.Error(), c.says) {
				t.Errorf("got %q, want %q and %q", err, at, c.says)
			}
		})
	}
}
