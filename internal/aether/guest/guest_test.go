package guest_test

import (
	"encoding/xml"
	"path"
	"regexp"
	"slices"
	"strings"
	"testing"

	"github.com/BurntSushi/toml"
	"github.com/google/go-cmp/cmp"

	"github.com/sandsea/sandsea/internal/aether/guest"
	"github.com/sandsea/sandsea/internal/policy"
)

var every = []string{policy.PyPI, policy.NPM, policy.Golang, policy.Crates, policy.Debian, policy.Maven, policy.RubyGems}

func TestVariablesOfServices(t *testing.T) {
	for _, c := range []struct {
		services []string
		name     string
		want     string
	}{
		{[]string{policy.PyPI}, "PIP_INDEX_URL", "http://100.64.0.1/pypi/simple/"},
		{[]string{policy.PyPI}, "PIP_TRUSTED_HOST", "100.64.0.1"},
		{[]string{policy.PyPI}, "UV_DEFAULT_INDEX", "http://100.64.0.1/pypi/simple/"},
		{[]string{policy.PyPI}, "GOPROXY", ""},
		{[]string{policy.NPM}, "npm_config_registry", "http://100.64.0.1/npm/"},
		{[]string{policy.NPM}, "YARN_NPM_REGISTRY_SERVER", "http://100.64.0.1/npm"},
		{[]string{policy.NPM, policy.Golang}, "GOPROXY", "http://100.64.0.1/golang"},
		{every, "GOSUMDB", ""},
		{every, "GOFLAGS", ""},
		{[]string{policy.RubyGems}, "BUNDLE_MIRROR__ALL", "http://100.64.0.1/rubygems/"},
		{[]string{policy.Maven}, "MAVEN_ARGS", "-gs " + guest.MavenSettings},
		{every, "SSL_CERT_FILE", ""},
		{nil, "PIP_INDEX_URL", ""},
	} {
		if got := guest.Env(c.services, false)[c.name]; got != c.want {
			t.Errorf("%s with services %q: got %q, want %q", c.name, c.services, got, c.want)
		}
	}
}

func TestInspectionAddsCertificatesAndNothingElse(t *testing.T) {
	plain, inspected := guest.Env(every, false), guest.Env(every, true)
	added := 0
	for name, value := range inspected {
		old, ok := plain[name]
		switch {
		case ok && old != value:
			t.Errorf("inspection changes %s from %q to %q", name, old, value)
		case !ok && value != guest.CAFile:
			t.Errorf("inspection adds %s=%q, want %q", name, value, guest.CAFile)
		case !ok:
			added++
		}
	}
	if added == 0 || len(inspected) != len(plain)+added {
		t.Errorf("got %d variables with inspection and %d without", len(inspected), len(plain))
	}
}

// What a client reads must lead to the gateway and to nobody else.
func TestEveryAddressIsTheGateways(t *testing.T) {
	link := regexp.MustCompile(`[a-z+]*://[^/"<\s]*`)
	texts := map[string]string{}
	for name, value := range guest.Env(every, true) {
		texts[name] = value
	}
	for _, f := range guest.Files() {
		texts[f.Path] = f.Body
	}
	seen := 0
	for where, text := range texts {
		for _, got := range link.FindAllString(text, -1) {
			seen++
			if got != "http://100.64.0.1" && got != "sparse+http://100.64.0.1" {
				t.Errorf("%s names %s", where, got)
			}
		}
	}
	if seen < 10 {
		t.Errorf("found only %d addresses", seen)
	}
}

func TestFilesAreOrderedCleanAndAlike(t *testing.T) {
	files := guest.Files()
	for i, f := range files {
		if path.Clean(f.Path) != f.Path || !path.IsAbs(f.Path) {
			t.Errorf("path %q is not absolute and clean", f.Path)
		}
		if i > 0 && files[i-1].Path >= f.Path {
			t.Errorf("%q does not come after %q", f.Path, files[i-1].Path)
		}
		if f.Mode != 0o644 {
			t.Errorf("%s: mode %o, want 644", f.Path, f.Mode)
		}
		if !strings.HasSuffix(f.Body, "\n") {
			t.Errorf("%s does not end in a newline", f.Path)
		}
		if f.Path == guest.CAFile {
			t.Errorf("the layer that all sandboxes share holds the authority of one")
		}
	}
	if diff := cmp.Diff(files, guest.Files()); diff != "" {
		t.Errorf("two calls differ (-first +second):\n%s", diff)
	}
}

func TestFilesParse(t *testing.T) {
	read := func(name string) string {
		t.Helper()
		i := slices.IndexFunc(guest.Files(), func(f guest.File) bool { return f.Path == name })
		if i < 0 {
			t.Fatalf("no file %s", name)
		}
		return guest.Files()[i].Body
	}

	var cargo struct {
		Source     map[string]map[string]string `toml:"source"`
		Registries map[string]map[string]string `toml:"registries"`
	}
	if _, err := toml.Decode(read("/.cargo/config.toml"), &cargo); err != nil {
		t.Fatal(err)
	}
	registry := cargo.Registries[cargo.Source["crates-io"]["replace-with"]]
	if got, want := registry["index"], "sparse+http://100.64.0.1/crates/index/"; got != want {
		t.Errorf("Cargo's registry: got %q, want %q", got, want)
	}

	var uv struct {
		Index []struct {
			URL     string `toml:"url"`
			Default bool   `toml:"default"`
		} `toml:"index"`
	}
	if _, err := toml.Decode(read("/etc/uv/uv.toml"), &uv); err != nil {
		t.Fatal(err)
	}
	if len(uv.Index) != 1 || !uv.Index[0].Default || uv.Index[0].URL != "http://100.64.0.1/pypi/simple/" {
		t.Errorf("uv's index: %+v", uv.Index)
	}

	var maven struct {
		Mirrors []struct {
			Of  string `xml:"mirrorOf"`
			URL string `xml:"url"`
		} `xml:"mirrors>mirror"`
	}
	for _, name := range []string{"/root/.m2/settings.xml", guest.MavenSettings} {
		maven.Mirrors = nil
		if err := xml.Unmarshal([]byte(read(name)), &maven); err != nil {
			t.Fatalf("%s: %v", name, err)
		}
		if len(maven.Mirrors) != 1 || maven.Mirrors[0].Of != "*" || maven.Mirrors[0].URL != "http://100.64.0.1/maven" {
			t.Errorf("%s: mirrors %+v", name, maven.Mirrors)
		}
	}
}
