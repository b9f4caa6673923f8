package policy

import (
	"fmt"
	"slices"
	"strings"
	"testing"
	"time"
)

func TestDeniedPackages(t *testing.T) {
	for _, c := range []struct {
		entry, service string
		names          []string // that it hides
		others         []string // that it leaves
	}{
		{
			"pypi:Flask", PyPI,
			[]string{"flask", "Flask", "FLASK", "flask-2.0.3-py3-none-any.whl", "Flask-2.0.3.tar.gz", "Flask-2.0.3-py3.9.egg", "flask%20"[:5], "%46lask"},
			[]string{"flask-login", "flaskx", "xflask", "quart", "Flask_Login-0.6.0-py3-none-any.whl", "flask-login-0.6.tar.gz"},
		},
		{
			"pypi:zope.interface", PyPI,
			[]string{"zope-interface", "zope_interface", "Zope--Interface", "zope._-interface", "zope.interface-5.0.tar.gz", "zope_interface-5.0-cp39-cp39-linux_x86_64.whl"},
			[]string{"zopeinterface", "zope"},
		},
		{"npm:lodash", NPM, []string{"lodash", "Lodash"}, []string{"@types/lodash", "lodash-es", "lodash.merge"}},
		{"npm:@Scope/Name", NPM, []string{"@scope/name", "@scope%2fname", "@SCOPE%2Fname", "@scope%252fname"}, []string{"name", "@other/name", "@scope/name2"}},
		{
			"golang:github.com/Azure/sdk/v2", Golang,
			[]string{"github.com/azure/sdk", "github.com/!azure/sdk", "github.com/Azure/sdk/v3", "github.com/azure/sdk/sub/module/v2", "github.com/Azure/sdk.git"},
			[]string{"github.com/azure/sdk2", "github.com/azure", "github.com/azur/sdk"},
		},
		{
			"golang:gopkg.in/yaml.v3", Golang,
			[]string{"gopkg.in/yaml.v3", "gopkg.in/yaml.v2", "github.com/go-yaml/yaml", "github.com/go-yaml/yaml/v3", "gopkg.in/yaml.v3-unstable"},
			[]string{"gopkg.in/ini.v1", "github.com/other/yaml"},
		},
		{"golang:gopkg.in/src-d/go-git.v4", Golang, []string{"github.com/src-d/go-git", "github.com/src-d/go-git/v4"}, []string{"github.com/src-d/other"}},
		{
			"golang:golang.org/x/net", Golang,
			[]string{"golang.org/x/net", "github.com/golang/net", "github.com/Golang/Net"},
			[]string{"golang.org/x/text", "golang.org/x"},
		},
		{
			"git:github.com/pallets/flask", Golang,
			[]string{"github.com/pallets/flask", "github.com/Pallets/Flask/v2", "github.com/pallets/flask/sub"},
			[]string{"github.com/pallets/click", "github.com/fork/flask"},
		},
		{"git:github.com/golang/net", Golang, []string{"golang.org/x/net"}, []string{"golang.org/x/text"}},
		{"git:github.com/go-yaml/yaml", Golang, []string{"gopkg.in/yaml.v2", "gopkg.in/yaml.v3"}, []string{"gopkg.in/ini.v1"}},
		{"git:github.com/uber-go/zap", Golang, []string{"go.uber.org/zap", "go.uber.org/zap/exp"}, []string{"go.uber.org/multierr"}},
		{"git:github.com/kubernetes/api", Golang, []string{"k8s.io/api"}, []string{"k8s.io/apimachinery"}},
		{"git:github.com/grpc/grpc-go", Golang, []string{"google.golang.org/grpc", "google.golang.org/grpc/cmd/protoc"}, []string{"google.golang.org/protobuf"}},
		{
			"git:github.com/*/flask", Golang,
			[]string{"github.com/pallets/flask", "github.com/some-fork/Flask"},
			[]string{"github.com/flask", "github.com/pallets/click", "git.example/pallets/flask"},
		},
		{"git:*/pallets/flask", Golang, []string{"git.example/pallets/flask"}, []string{"git.example/pallets/click"}},
		{"git:git.example/org", Golang, []string{"git.example/org/a", "git.example/org/b/v7"}, []string{"git.example/org2/a"}},
		{"crates:serde_json", Crates, []string{"serde_json", "serde-json", "Serde-JSON"}, []string{"serde", "serdejson"}},
		{
			"debian:python3-flask", Debian,
			[]string{"python3-flask", "python3-flask:amd64", "python3-flask:any", "src:python3-flask", "python3-flask_1.0-1_all.deb"},
			[]string{"flask", "python3-flask-doc", "src:flask"},
		},
		{"debian:src:flask", Debian, []string{"src:flask"}, []string{"flask", "python3-flask"}},
		{"maven:org.Example:lib", Maven, []string{"org.example:lib", "ORG.example:LIB"}, []string{"org.example:lib2", "org.example.lib:lib"}},
		{"rubygems:Rack", RubyGems, []string{"rack", "Rack", "rack-2.2.3.gem", "rack-2.2.3-java.gem"}, []string{"rack-test", "rack-test-1.1.0.gem", "rack_"}},
	} {
		for _, w := range worlds(t, c.entry) {
			for _, name := range c.names {
				v := w.Package(c.service, name)
				if v.Allow || !strings.HasPrefix(v.Rule, "deny ") || v.Reason == "" {
					t.Errorf("%s leaves %s: %+v", c.entry, name, v)
				}
				if v := w.Version(c.service, name, "1.0", time.Time{}); v.Allow {
					t.Errorf("%s leaves a version of %s", c.entry, name)
				}
			}
			for _, name := range c.others {
				if v := w.Package(c.service, name); !v.Allow {
					t.Errorf("%s hides %s: %+v", c.entry, name, v)
				}
				if v := w.Version(c.service, name, "1.0", time.Time{}); !v.Allow {
					t.Errorf("%s hides a version of %s: %+v", c.entry, name, v)
				}
			}
			for _, other := range services {
				if other == c.service || other == Golang {
					continue
				}
				if v := w.Package(other, c.others[0]); !v.Allow && v.Rule != RuleDeny {
					t.Errorf("%s hides a package of %s: %+v", c.entry, other, v)
				}
			}
		}
	}
}

// worlds are the two ways to make one with a denied entry.
func worlds(t *testing.T, deny ...string) []World {
	p, err := Policy{Deny: deny}.Validate()
	if err != nil {
		t.Fatal(err)
	}
	return []World{{Deny: deny}, p.World(DefaultPhase)}
}

func TestDeniedVersions(t *testing.T) {
	for _, c := range []struct {
		entry, service, name string
		versions, others     []string
	}{
		{"pypi:flask@2.0", PyPI, "Flask", []string{"2.0", "2.0.0", "v2.0", "2", "02.0"}, []string{"2.0.1", "2.0rc1", "2.0.post1", "20", "1!2.0", "2.0+local"}},
		{"pypi:flask@1.0-RC.1", PyPI, "flask", []string{"1.0rc1", "1.0c1", "1.0.0.rc1", "1.0_pre1", "1rc01"}, []string{"1.0rc2", "1.0", "1.0a1"}},
		{"pypi:flask@1.0.post1", PyPI, "flask", []string{"1.0-1", "1.0rev1", "1.0.post1", "1.0-r1"}, []string{"1.0", "1.0.1"}},
		{"pypi:flask@1!1.0.dev3", PyPI, "flask", []string{"1!1.dev3", "1!1.0.0-DEV3"}, []string{"1.0.dev3"}},
		{"pypi:torch@2.0+cu-118", PyPI, "torch", []string{"2.0.0+cu.118", "2.0+CU_118"}, []string{"2.0", "2.0+cpu"}},
		{"npm:@a/b@1.2.3", NPM, "@a/b", []string{"1.2.3", "v1.2.3", "=1.2.3", "1.2.3+build"}, []string{"1.2.4", "1.2.3-beta"}},
		{"golang:git.example/a/v2@v2.1.0", Golang, "git.example/a/v2", []string{"v2.1.0", "2.1.0", "v2.1.0+incompatible"}, []string{"v2.1.1", "v2.1.0-rc1"}},
		{"crates:serde@1.0.0", Crates, "serde", []string{"1.0.0", "1.0.0+meta"}, []string{"1.0.1"}},
		{"debian:flask@1:2.0-1", Debian, "flask:amd64", []string{"2.0-1", "1:2.0-1", "0:2.0-1", "1%3a2.0-1"}, []string{"2.0-2"}},
		{"maven:a:b@1.0", Maven, "a:b", []string{"1.0"}, []string{"1.0.0", "1"}},
		{"rubygems:rack@2.0", RubyGems, "rack", []string{"2.0", "2.0.0", "2.0-java", "2.0.0-x86_64-linux"}, []string{"2.0.1", "2.0.pre"}},
	} {
		for _, w := range worlds(t, c.entry) {
			if v := w.Package(c.service, c.name); !v.Allow {
				t.Errorf("%s hides the whole package", c.entry)
			}
			for _, version := range c.versions {
				if v := w.Version(c.service, c.name, version, time.Time{}); v.Allow || !strings.HasPrefix(v.Rule, "deny "+c.service) {
					t.Errorf("%s leaves %s: %+v", c.entry, version, v)
				}
			}
			for _, version := range c.others {
				if v := w.Version(c.service, c.name, version, time.Time{}); !v.Allow {
					t.Errorf("%s hides %s: %+v", c.entry, version, v)
				}
			}
		}
	}
}

func TestRepo(t *testing.T) {
	for _, c := range []struct {
		entry        string
		paths, other []string
	}{
		{
			"git:github.com/pallets/flask",
			[]string{
				"github.com/pallets/flask", "github.com/Pallets/Flask.git", "GitHub.com./pallets//flask/info/refs", "www.github.com/pallets/flask",
				"github.com:443/pallets/flask", "codeload.github.com/pallets/flask/tar.gz/main", "raw.githubusercontent.com/pallets/flask/main/a",
				"api.github.com/repos/pallets/flask/tarball", "github.com/pallets%2fflask", "github.com/./pallets/flask", "github.com/pallets/%66lask.git",
				"github.com/pallets/flask/archive/main.zip", "uploads.github.com/repos/pallets/flask/releases/1/assets",
				"media.githubusercontent.com/media/pallets/flask/main/a", "patch-diff.githubusercontent.com/raw/pallets/flask/pull/1.patch",
				"api.github.com/networks/pallets/flask/events",
			},
			[]string{"github.com/pallets/flask2", "github.com/pallets", "github.com/fork/flask", "git.example/pallets/flask", "github.com/pallets/click"},
		},
		{"git:gitlab.example/group/sub/repo", []string{"gitlab.example/group/sub/repo.git", "gitlab.example/api/v4/projects/group%2Fsub%2Frepo/repository/archive"}, []string{"gitlab.example/group/repo"}},
		{
			"git:git.example/org/repo",
			[]string{"git.example/api/v1/repos/org/repo/archive/main.zip", "git.example/api/v3/repos/Org/Repo/tarball", "git.example/api%2fv1/repos/org%2Frepo"},
			[]string{"git.example/api/v1/repos/org/other", "git.example/api/v1/users/org/repo", "git.example/api/v1/repos/org"},
		},
		{"golang:golang.org/x/net", []string{"golang.org/x/net", "github.com/golang/net"}, []string{"github.com/golang/text"}},
		{"golang:git.example/a/b/v3", []string{"git.example/a/b.git"}, []string{"git.example/a/c"}},
		{"golang:git.example/a/b@v1.0.0", nil, []string{"git.example/a/b"}},
		{"git:git.example:8443/a", []string{"git.example:8443/a/b"}, []string{"git.example/a/b"}},
		{"git:git.example/*/b", []string{"git.example/a/b", "git.example/c/B.git"}, []string{"git.example/a/c"}},
		{"pypi:flask", nil, []string{"github.com/pallets/flask"}},
	} {
		for _, w := range worlds(t, c.entry) {
			for _, p := range c.paths {
				host, path, _ := strings.Cut(p, "/")
				if v := w.Repo(host, path); v.Allow || !strings.HasPrefix(v.Rule, "deny ") {
					t.Errorf("%s leaves %s: %+v", c.entry, p, v)
				}
				if v := w.Repo(host, "/"+path); v.Allow {
					t.Errorf("%s leaves %s with a slash", c.entry, p)
				}
			}
			for _, p := range c.other {
				host, path, _ := strings.Cut(p, "/")
				if v := w.Repo(host, path); !v.Allow {
					t.Errorf("%s hides %s: %+v", c.entry, p, v)
				}
			}
		}
	}
	w := World{Deny: []string{"git:github.com/pallets/flask"}}
	for _, p := range []string{"x/../pallets/flask", "%2e%2e/pallets/flask", "pallets\\flask", "pallets/flask%00", "pallets/flask%zz", "a b"} {
		if v := w.Repo("github.com", p); v.Allow {
			t.Errorf("a path that nobody can read the same way passes: %s", p)
		}
	}
}

func TestAsOf(t *testing.T) {
	day := func(d int) time.Time { return time.Date(2024, 6, d, 0, 0, 0, 0, time.UTC) }
	p, err := Policy{
		AsOf: day(10), Deny: []string{"pypi:evil"}, Pin: []string{"pypi:Six@1.16.0", "golang:git.example/m/v2@v2.0.0", "debian:hello@1:2.10-3"},
		Phases: []Phase{{Name: "all"}, {Name: "early", AsOf: day(1), Deny: []string{"pypi:late"}}},
	}.Validate()
	if err != nil {
		t.Fatal(err)
	}
	for what, c := range map[string]struct {
		phase, service, name, version string
		published                     time.Time
		want                          string // rule; empty: shown
	}{
		"before":                         {"all", PyPI, "a", "1", day(9), ""},
		"at the moment itself":           {"all", PyPI, "a", "1", day(10), ""},
		"a moment later":                 {"all", PyPI, "a", "1", day(10).Add(time.Nanosecond), "as_of 2024-06-10"},
		"in another zone":                {"all", PyPI, "a", "1", day(10).In(time.FixedZone("", 7200)), ""},
		"after the phase's":              {"early", PyPI, "a", "1", day(9), "as_of 2024-06-01"},
		"without a date":                 {"all", PyPI, "a", "1", time.Time{}, "as_of undated"},
		"pinned":                         {"all", PyPI, "six", "1.16", time.Time{}, ""},
		"another version than pinned":    {"all", PyPI, "six", "1.17", time.Time{}, "as_of undated"},
		"another package than pinned":    {"all", PyPI, "sixx", "1.16", time.Time{}, "as_of undated"},
		"another service than pinned":    {"all", NPM, "six", "1.16.0", time.Time{}, "as_of undated"},
		"a pin does not overrule a date": {"all", PyPI, "six", "1.16.0", day(11), "as_of 2024-06-10"},
		"a pinned module":                {"all", Golang, "git.example/m/v2", "v2.0.0", time.Time{}, ""},
		"not what lies below it":         {"all", Golang, "git.example/m/sub/v2", "v2.0.0", time.Time{}, "as_of undated"},
		"a pinned version with epoch":    {"all", Debian, "hello:amd64", "2.10-3", time.Time{}, ""},
		"denied comes first":             {"all", PyPI, "evil", "1", day(1), "deny pypi:evil"},
		"denied by the phase":            {"early", PyPI, "late", "1", day(1), "deny pypi:late"},
		"and not by another":             {"all", PyPI, "late", "1", day(1), ""},
		"denied by both":                 {"early", PyPI, "evil", "1", day(1), "deny pypi:evil"},
	} {
		v := p.World(c.phase).Version(c.service, c.name, c.version, c.published)
		if v.Allow != (c.want == "") || v.Rule != c.want || !v.Allow && v.Reason == "" {
			t.Errorf("%s: %+v", what, v)
		}
	}
	noon := World{AsOf: day(1).Add(12 * time.Hour)}
	if v := noon.Version(PyPI, "a", "1", day(2)); v.Rule != "as_of 2024-06-01T12:00:00Z" {
		t.Errorf("%+v", v)
	}
	if v := (World{}).Version(PyPI, "a", "1", time.Time{}); !v.Allow {
		t.Errorf("today: %+v", v)
	}
}

func TestHides(t *testing.T) {
	for what, c := range map[string]struct {
		w    World
		want bool
	}{
		"nothing": {World{Pin: []string{"pypi:a@1"}}, false},
		"a date":  {World{AsOf: time.Unix(1, 0)}, true},
		"a list":  {World{Deny: []string{"pypi:a"}}, true},
	} {
		if got := c.w.Hides(); got != c.want {
			t.Errorf("%s: %v", what, got)
		}
	}
}

func TestAWorldWhoseListsWereReplacedAnswersByTheNewOnes(t *testing.T) {
	w := worlds(t, "pypi:a")[1]
	w.Deny = []string{"pypi:b"}
	if !w.Package(PyPI, "a").Allow || w.Package(PyPI, "b").Allow {
		t.Error("the old list holds")
	}
}

func TestAnEntryThatNobodyCanReadHidesEverything(t *testing.T) {
	w := World{Deny: []string{"pypi"}}
	if w.Package(NPM, "a").Allow || w.Repo("git.example", "a/b").Allow || w.Version(PyPI, "a", "1", time.Time{}).Allow {
		t.Error("something exists in a world whose list cannot be read")
	}
}

func TestNamesThatNoEcosystemHasDoNotExist(t *testing.T) {
	w := World{Deny: []string{"pypi:a", "npm:a", "golang:git.example/a", "crates:a", "debian:a", "maven:a:b", "rubygems:a"}}
	for _, s := range services {
		for _, name := range []string{"", "\x00", "a\nb", "%", "%zz", "ä", "..", strings.Repeat("a", 600)} {
			if name == ".." && s != PyPI && s != Golang {
				continue
			}
			if v := w.Package(s, name); v.Allow {
				t.Errorf("%s shows %q", s, name)
			}
		}
	}
}

func BenchmarkVersion(b *testing.B) {
	var pins []string
	for i := range MaxPins {
		pins = append(pins, fmt.Sprintf("pypi:p%d@1.0", i))
	}
	p, err := Policy{Pin: slices.Clone(pins), Deny: []string{"git:git.example/a/b"}, AsOf: time.Unix(1e9, 0)}.Validate()
	if err != nil {
		b.Fatal(err)
	}
	b.Run("version", func(b *testing.B) {
		w := p.World(DefaultPhase)
		for b.Loop() {
			w.Version(PyPI, "p17", "1.0", time.Time{})
		}
	})
	b.Run("world", func(b *testing.B) {
		for b.Loop() {
			p.World(DefaultPhase)
		}
	})
}

// TestRepoAt has no host where Repo denies and RepoAt does not say so.
func TestRepoAt(t *testing.T) {
	hosts := []string{"github.com", "www.github.com", "codeload.github.com", "api.github.com", "gopkg.in", "golang.org", "k8s.io", "cloud.google.com", "git.example"}
	paths := []string{"a/b", "repos/a/b", "b.v2", "x/b", "go/b", "api/v3/repos/a/b"}
	for _, deny := range []string{
		"git:github.com/a/b", "git:*/a/b", "golang:git.example/a/b", "git:codeload.github.com/a/b", "git:github.com/golang/b", "golang:gopkg.in/b.v2",
		"git:github.com/googleapis/google-cloud-go", "golang:k8s.io/b", "git:git.example:8443/a/b", "nonsense",
	} {
		w := World{Deny: []string{deny}}
		for _, host := range hosts {
			for _, path := range paths {
				if v := w.Repo(host, path); !v.Allow && w.RepoAt(host) == "" {
					t.Errorf("deny %s: %s/%s is denied, and RepoAt knows nothing of %s", deny, host, path, host)
				}
			}
		}
	}
	w := World{Deny: []string{"git:github.com/a/b", "git:git.example:8443/a/b"}}
	for host, want := range map[string]string{
		"github.com": "git:github.com/a/b", "raw.githubusercontent.com": "git:github.com/a/b", "git.example": "git:git.example:8443/a/b",
		"other.example": "", "": "",
	} {
		if got := w.RepoAt(host); got != want {
			t.Errorf("%s: %q, want %q", host, got, want)
		}
	}
}
