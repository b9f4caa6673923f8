package golang_test

import (
	"archive/zip"
	"bytes"
	"fmt"
	"io"
	"net/http"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	"golang.org/x/mod/module"
	"golang.org/x/mod/sumdb/dirhash"

	"github.com/sandsea/sandsea/internal/aether/mirror"
	"github.com/sandsea/sandsea/internal/aether/mirror/golang"
	"github.com/sandsea/sandsea/internal/aether/mirror/source/sourcetest"
	"github.com/sandsea/sandsea/internal/aether/upstream"
	"github.com/sandsea/sandsea/internal/policy"
	"github.com/sandsea/sandsea/internal/testkit/wait"
)

const database = "sum.test"

// proxy is a module proxy with a checksum database behind it.
type proxy struct {
	*sourcetest.Upstream
	t testing.TB
}

// add publishes a version. declared is the path in its go.mod, origin the address of its repository; both may be empty.
func (p proxy) add(path, version, when, declared, origin string) {
	p.t.Helper()
	if declared == "" {
		declared = path
	}
	info := fmt.Sprintf(`{"Version":%q,"Time":"%sT12:00:00Z"`, version, when)
	if origin != "" {
		info += fmt.Sprintf(`,"Origin":{"VCS":"git","URL":%q}`, origin)
	}
	mod := "module " + declared + "\n"
	p.Put(at(path, version, ".info"), info+"}")
	p.Put(at(path, version, ".mod"), mod)
	z := zipOf(p.t, path+"@"+version+"/", mod)
	p.Put(at(path, version, ".zip"), z)
	p.lookup(path, version, hash(p.t, z))
}

func (p proxy) lookup(path, version, sum string) {
	escaped, _ := module.EscapePath(path)
	p.Put("/sumdb/"+database+"/lookup/"+escaped+"@"+version,
		fmt.Sprintf("7\n%s %s %s\n%s %s/go.mod h1:x\n\ngo.sum database tree\n7\nx=\n", path, version, sum, path, version))
}

func (p proxy) list(path string, versions ...string) {
	escaped, _ := module.EscapePath(path)
	p.Put("/"+escaped+"/@v/list", strings.Join(versions, "\n")+"\n")
}

func at(path, version, ending string) string {
	p, _ := module.EscapePath(path)
	v, _ := module.EscapeVersion(version)
	return "/" + p + "/@v/" + v + ending
}

func zipOf(t testing.TB, root, mod string) string {
	t.Helper()
	var b bytes.Buffer
	z := zip.NewWriter(&b)
	for name, body := range map[string]string{"go.mod": mod, "x.go": "package x\n"} {
		w, err := z.Create(root + name)
		if err != nil {
			t.Fatal(err)
		}
		_, _ = io.WriteString(w, body)
	}
	if err := z.Close(); err != nil {
		t.Fatal(err)
	}
	return b.String()
}

func hash(t testing.TB, z string) string {
	t.Helper()
	file := filepath.Join(t.TempDir(), "z.zip")
	if err := os.WriteFile(file, []byte(z), 0o600); err != nil {
		t.Fatal(err)
	}
	h, err := dirhash.HashZip(file, dirhash.Hash1)
	if err != nil {
		t.Fatal(err)
	}
	return h
}

func start(t testing.TB, w policy.World) (proxy, *sourcetest.Mount) {
	t.Helper()
	p := proxy{sourcetest.NewUpstream(t), t}
	p.Put("/sumdb/"+database+"/supported", "")
	u := upstream.Upstream{URLs: []string{p.URL}, Checksums: database}
	return p, sourcetest.Serve(t, golang.New(sourcetest.NewSource(t, u), u), w)
}

const (
	lib    = "code.test/Org/lib"
	pseudo = "v1.2.1-0.20240301120000-0123456789ab"
)

func releases(p proxy) {
	p.add(lib, "v1.0.0", "2023-01-01", "", "")
	p.add(lib, "v1.1.0", "2024-01-01", "", "")
	p.add(lib, "v1.2.0-rc.1", "2024-02-01", "", "")
	p.add(lib, "v1.2.0", "2024-06-01", "", "")
	p.add(lib, pseudo, "2024-03-01", "", "")
	p.list(lib, "v1.2.0", "v1.0.0", pseudo, "v1.1.0", "v1.2.0-rc.1", "not a version", "v3.0.0")
}

func TestListLatestAndFilesAgreeOnTheDate(t *testing.T) {
	for _, c := range []struct {
		asOf   string
		list   []string
		latest string // "": 403
	}{
		{"", []string{"v1.0.0", "v1.1.0", "v1.2.0-rc.1", "v1.2.0"}, "v1.2.0"},
		{"2024-12-31", []string{"v1.0.0", "v1.1.0", "v1.2.0-rc.1", "v1.2.0"}, "v1.2.0"},
		{"2024-04-01", []string{"v1.0.0", "v1.1.0", "v1.2.0-rc.1"}, "v1.1.0"},
		{"2024-01-02", []string{"v1.0.0", "v1.1.0"}, "v1.1.0"},
		{"2023-06-01", []string{"v1.0.0"}, "v1.0.0"},
		{"2022-01-01", nil, ""},
	} {
		t.Run("as of "+c.asOf, func(t *testing.T) {
			w := policy.World{}
			if c.asOf != "" {
				w.AsOf = sourcetest.Day(c.asOf)
			}
			p, m := start(t, w)
			releases(p)
			got := m.Get("/code.test/!org/lib/@v/list")
			if got.Status != http.StatusOK {
				t.Fatalf("list: %d %s", got.Status, got.Body)
			}
			if diff := cmp.Diff(c.list, strings.Fields(got.Body), cmp.Transformer("none", func(s []string) []string { return append([]string{}, s...) })); diff != "" {
				t.Errorf("list (-want +got):\n%s", diff)
			}
			got = m.Get("/code.test/!org/lib/@latest")
			switch {
			case c.latest == "" && (got.Status != http.StatusForbidden || !strings.HasPrefix(got.Rule(), policy.RuleAsOf+" 20")):
				t.Errorf("latest: %d, rule %q: %s", got.Status, got.Rule(), got.Body)
			case c.latest != "" && !strings.Contains(got.Body, `"`+c.latest+`"`):
				t.Errorf("latest: got %d %s, want %s", got.Status, got.Body, c.latest)
			}
			// Whatever the list lacks cannot be had, and whatever it has can.
			for _, v := range []string{"v1.0.0", "v1.1.0", "v1.2.0-rc.1", "v1.2.0"} {
				want := http.StatusForbidden
				if slices.Contains(c.list, v) {
					want = http.StatusOK
				}
				for _, path := range []string{
					at(lib, v, ".info"), at(lib, v, ".mod"), at(lib, v, ".zip"),
					"/sumdb/" + database + "/lookup/code.test/!org/lib@" + v,
				} {
					got := m.Get(path)
					if got.Status != want {
						t.Errorf("%s: got %d, want %d: %s", path, got.Status, want, got.Body)
					}
					if want == http.StatusForbidden && (!strings.HasPrefix(got.Rule(), policy.RuleAsOf+" 20") || !strings.Contains(got.Body, v)) {
						t.Errorf("%s: rule %q, body %q", path, got.Rule(), got.Body)
					}
				}
			}
		})
	}
}

func TestPseudoVersionsHaveTheirOwnDate(t *testing.T) {
	p, m := start(t, policy.World{AsOf: sourcetest.Day("2024-02-15")})
	// Back-dated: the proxy's file says 2023, the name says 2024.
	p.add(lib, pseudo, "2023-01-01", "", "")
	if got := m.Get(at(lib, pseudo, ".zip")); got.Status != http.StatusForbidden {
		t.Errorf("zip of a later commit: %d", got.Status)
	}
	m.In(policy.World{AsOf: sourcetest.Day("2024-03-02")})
	if got := m.Get(at(lib, pseudo, ".zip")); got.Status != http.StatusOK {
		t.Errorf("zip of an earlier commit: %d %s", got.Status, got.Body)
	}
}

func TestALaterCommitIsNotAskedFor(t *testing.T) {
	p, m := start(t, policy.World{AsOf: sourcetest.Day("2024-02-15")})
	for _, path := range []string{
		at(lib, pseudo, ".info"), at(lib, pseudo, ".mod"), at(lib, pseudo, ".zip"),
		"/sumdb/" + database + "/lookup/code.test/!org/lib@" + pseudo,
	} {
		if got := m.Get(path); got.Status != http.StatusForbidden || got.Rule() != policy.RuleAsOf+" 2024-02-15" {
			t.Errorf("%s: got %d, rule %q: %s", path, got.Status, got.Rule(), got.Body)
		}
	}
	if asked := p.Asked(); len(asked) != 0 {
		t.Errorf("asked upstream for %v", asked)
	}
}

func TestABranchIsJudgedByWhatItResolvesTo(t *testing.T) {
	p, m := start(t, policy.World{AsOf: sourcetest.Day("2024-02-15")})
	p.add(lib, pseudo, "2024-03-01", "", "")
	p.Put("/code.test/!org/lib/@v/main.info", fmt.Sprintf(`{"Version":%q,"Time":"2024-03-01T12:00:00Z"}`, pseudo))
	if got := m.Get("/code.test/!org/lib/@v/main.info"); got.Status != http.StatusForbidden || !strings.HasPrefix(got.Rule(), policy.RuleAsOf+" 20") {
		t.Errorf("branch: %d, rule %q", got.Status, got.Rule())
	}
	m.In(policy.World{})
	if got := m.Get("/code.test/!org/lib/@v/main.info"); got.Status != http.StatusOK || !strings.Contains(got.Body, pseudo) {
		t.Errorf("branch today: %d %s", got.Status, got.Body)
	}
}

func TestLatestWithoutTagsIsTheLatestCommitOfTheDay(t *testing.T) {
	const older, newer = "v0.0.0-20230101120000-0123456789ab", "v0.0.0-20240101120000-0123456789cd"
	p, m := start(t, policy.World{AsOf: sourcetest.Day("2023-06-01")})
	p.add(lib, older, "2023-01-01", "", "")
	p.add(lib, newer, "2024-01-01", "", "")
	p.list(lib, older, newer)
	p.Put("/code.test/!org/lib/@latest", fmt.Sprintf(`{"Version":%q,"Time":"2024-01-01T12:00:00Z"}`, newer))
	if got := m.Get("/code.test/!org/lib/@latest"); !strings.Contains(got.Body, older) {
		t.Errorf("latest: %d %s", got.Status, got.Body)
	}
	if got := m.Get("/code.test/!org/lib/@v/list"); got.Status != http.StatusOK || got.Body != "" {
		t.Errorf("list shows pseudo-versions: %d %q", got.Status, got.Body)
	}
	m.In(policy.World{})
	if got := m.Get("/code.test/!org/lib/@latest"); !strings.Contains(got.Body, newer) {
		t.Errorf("latest today: %d %s", got.Status, got.Body)
	}
}

func TestDeniedModulesHaveNoOtherName(t *testing.T) {
	deny := func(entries ...string) policy.World { return policy.World{Deny: entries} }
	for _, c := range []struct {
		name                   string
		world                  policy.World
		path, declared, origin string
		version                string
		denied                 bool
	}{
		{"itself", deny("golang:code.test/Org/lib"), lib, "", "", "v1.0.0", true},
		{"case", deny("golang:CODE.test/oRG/LIB"), lib, "", "", "v1.0.0", true},
		{"another major version", deny("golang:code.test/Org/lib"), lib + "/v2", "", "", "v2.0.0", true},
		{"by its major version", deny("golang:code.test/Org/lib/v2"), lib, "", "", "v1.0.0", true},
		{"incompatible", deny("golang:code.test/Org/lib"), lib, "", "", "v2.0.0+incompatible", true},
		{"repository", deny("git:code.test/org/lib"), lib, "", "", "v1.0.0", true},
		{"module in a folder of it", deny("git:code.test/org/lib"), lib + "/sub", "", "", "v1.0.0", true},
		{"fork that declares the path", deny("golang:code.test/Org/lib"), "code.test/other/fork", lib, "", "v1.0.0", true},
		{"vanity path", deny("git:code.test/org/lib"), "vanity.test/lib", "", "https://code.test/Org/lib.git", "v1.0.0", true},
		{"vanity path, denied as module", deny("golang:code.test/org/lib"), "vanity.test/lib", "", "https://code.test/Org/lib", "v1.0.0", true},
		{"vanity path of a host with a port", deny("git:code.test:8443/org/lib"), "vanity.test/lib", "", "https://code.test:8443/org/lib", "v1.0.0", true},
		{"vanity path, by SSH", deny("git:code.test/org/lib"), "vanity.test/lib", "", "ssh://git@code.test:2222/org/lib", "v1.0.0", true},
		{"that version", deny("golang:code.test/org/lib@v1.0.0"), lib, "", "", "v1.0.0", true},
		{"that version of a fork that declares the path", deny("golang:code.test/org/lib@v1.0.0"), "code.test/other/fork", lib, "", "v1.0.0", true},
		{"another version of a fork that declares the path", deny("golang:code.test/org/lib@v1.1.0"), "code.test/other/fork", lib, "", "v1.0.0", false},
		{"another version", deny("golang:code.test/org/lib@v1.1.0"), lib, "", "", "v1.0.0", false},
		{"neighbour", deny("golang:code.test/org/lib"), "code.test/Org/libs", "", "", "v1.0.0", false},
		{"neighbour's origin", deny("git:code.test/org/lib"), "vanity.test/libs", "", "https://code.test/Org/libs", "v1.0.0", false},
	} {
		t.Run(c.name, func(t *testing.T) {
			p, m := start(t, c.world)
			p.add(c.path, c.version, "2023-01-01", c.declared, c.origin)
			p.list(c.path, c.version)
			escaped, _ := module.EscapePath(c.path)
			for _, path := range []string{
				at(c.path, c.version, ".info"), at(c.path, c.version, ".mod"), at(c.path, c.version, ".zip"),
				"/" + escaped + "/@latest", "/sumdb/" + database + "/lookup/" + escaped + "@" + c.version,
			} {
				got := m.Get(path)
				if denied := got.Status == http.StatusForbidden; denied != c.denied || denied && !strings.HasPrefix(got.Rule(), policy.RuleDeny) {
					t.Errorf("%s: got %d, rule %q, want denied %v: %s", path, got.Status, got.Rule(), c.denied, got.Body)
				}
			}
			if got := m.Get("/" + escaped + "/@v/list"); c.denied && strings.TrimSpace(got.Body) == c.version {
				t.Errorf("list shows it: %d %q", got.Status, got.Body)
			}
			events := m.Events()
			if len(events) == 0 || events[0].Denied != c.denied || events[0].Name != c.path {
				t.Errorf("reported %+v", events)
			}
		})
	}
}

func TestADeniedNameNeverReachesUpstream(t *testing.T) {
	p, m := start(t, policy.World{Deny: []string{"golang:code.test/org/lib"}})
	releases(p)
	m.Get("/code.test/!org/lib/@v/list")
	m.Get(at(lib, "v1.0.0", ".zip"))
	if asked := p.Asked(); len(asked) != 0 {
		t.Errorf("asked upstream for %v", asked)
	}
}

func TestWrongZipsAreNotServed(t *testing.T) {
	good := func(t *testing.T) string { return zipOf(t, lib+"@v1.0.0/", "module "+lib+"\n") }
	for _, c := range []struct {
		name string
		body func(t *testing.T) string
		sum  string // "": that of the body
	}{
		{"not the database's hash", good, "h1:AAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAA="},
		{"another module's files", func(t *testing.T) string { return zipOf(t, "code.test/x/y@v1.0.0/", "module x\n") }, ""},
		{"another version's files", func(t *testing.T) string { return zipOf(t, lib+"@v1.0.1/", "module x\n") }, ""},
		{"a path that leads out", func(t *testing.T) string { return zipOf(t, lib+"@v1.0.0/../", "module x\n") }, ""},
		{"no zip", func(*testing.T) string { return "<html>sorry</html>" }, "h1:x"},
	} {
		t.Run(c.name, func(t *testing.T) {
			p, m := start(t, policy.World{})
			p.add(lib, "v1.0.0", "2023-01-01", "", "")
			right := good(t)
			p.Put(at(lib, "v1.0.0", ".zip"), c.body(t))
			if c.sum != "" {
				p.lookup(lib, "v1.0.0", c.sum)
			}
			got := m.Get(at(lib, "v1.0.0", ".zip"))
			if got.Status != http.StatusBadGateway {
				t.Fatalf("wrong zip: %d", got.Status)
			}
			if events := m.Events(); len(events) != 1 || events[0].Error == "" {
				t.Errorf("reported %+v", events)
			}
			// When upstream is in order again, so is the answer, as soon as the cache has finished with the wrong one.
			p.Put(at(lib, "v1.0.0", ".zip"), right)
			if c.sum == "" {
				wait.Until(t, 10*time.Second, func() bool { return m.Get(at(lib, "v1.0.0", ".zip")).Body == right }, "the right zip")
			}
		})
	}
}

func TestAWrongAnswerIsNotKept(t *testing.T) {
	p, m := start(t, policy.World{})
	releases(p)
	lookup, tile := "/sumdb/"+database+"/lookup/code.test/!org/lib@", "/sumdb/"+database+"/tile/8/1/000.p/3"
	p.Put(tile, strings.Repeat("h", 3*32))
	for _, c := range []struct{ wrong, asked string }{
		{at(lib, "v1.0.0", ".info"), at(lib, "v1.0.0", ".info")},
		{at(lib, "v1.2.0", ".info"), "/code.test/!org/lib/@latest"},
		{at(lib, "v1.0.0", ".mod"), at(lib, "v1.0.0", ".mod")},
		{lookup + "v1.0.0", at(lib, "v1.0.0", ".zip")},
		{lookup + "v1.1.0", lookup + "v1.1.0"},
		{tile, tile},
	} {
		right := p.Files()[c.wrong]
		p.Put(c.wrong, "<html>please log in</html>")
		// What has just come may not be kept yet, so it is asked for until it was found in the cache.
		for range 3 {
			if got := m.Get(c.asked); got.Status != http.StatusBadGateway {
				t.Errorf("%s while %s is wrong: %d %q", c.asked, c.wrong, got.Status, got.Body)
			}
		}
		p.Put(c.wrong, right)
		wait.Until(t, 10*time.Second, func() bool { return m.Get(c.asked).Status == http.StatusOK })
	}
}

func TestATruncatedZipIsAnError(t *testing.T) {
	p, m := start(t, policy.World{})
	p.add(lib, "v1.0.0", "2023-01-01", "", "")
	p.PutFile(at(lib, "v1.0.0", ".zip"), sourcetest.File{Body: strings.Repeat("x", 1000), Cut: 500})
	if got := m.Get(at(lib, "v1.0.0", ".zip")); !got.Broken && got.Status < 500 {
		t.Errorf("got %d with %d bytes", got.Status, len(got.Body))
	}
}

func TestAVersionThatUpstreamRefusesHasNoDate(t *testing.T) {
	p, m := start(t, policy.World{AsOf: sourcetest.Day("2024-12-31")})
	releases(p)
	p.PutFile(at(lib, "v1.1.0", ".info"), sourcetest.File{Status: http.StatusForbidden})
	if got := m.Get("/code.test/!org/lib/@v/list"); got.Status != http.StatusOK || strings.Contains(got.Body, "v1.1.0") || !strings.Contains(got.Body, "v1.2.0\n") {
		t.Errorf("list: %d %q", got.Status, got.Body)
	}
	if got := m.Get(at(lib, "v1.1.0", ".zip")); got.Rule() != policy.RuleUndated {
		t.Errorf("zip: %d, rule %q", got.Status, got.Rule())
	}
	// One that upstream cannot tell of just now makes the list wrong, so there is none.
	p.PutFile(at(lib, "v1.0.0", ".info"), sourcetest.File{Status: http.StatusInternalServerError})
	u := upstream.Upstream{URLs: []string{p.URL}}
	m = sourcetest.Serve(t, golang.New(sourcetest.NewSource(t, u), u), policy.World{AsOf: sourcetest.Day("2024-12-31")})
	if got := m.Get("/code.test/!org/lib/@v/list"); got.Status != http.StatusServiceUnavailable {
		t.Errorf("list while upstream fails: %d %q", got.Status, got.Body)
	}
}

func TestUpstreamsAreAskedInOrder(t *testing.T) {
	first, second := proxy{sourcetest.NewUpstream(t), t}, proxy{sourcetest.NewUpstream(t), t}
	u := upstream.Upstream{URLs: []string{first.URL, second.URL}}
	m := sourcetest.Serve(t, golang.New(sourcetest.NewSource(t, u), u), policy.World{AsOf: sourcetest.Day("2024-01-01")})
	second.add(lib, "v1.0.0", "2023-01-01", "", "")
	if got := m.Get(at(lib, "v1.0.0", ".zip")); got.Status != http.StatusOK {
		t.Errorf("what the first has not: %d %s", got.Status, got.Body)
	}
	// A first proxy that refuses is not gone round: what it knows by that name is not the second's to answer.
	first.PutFile(at(lib, "v1.1.0", ".info"), sourcetest.File{Status: http.StatusForbidden})
	second.add(lib, "v1.1.0", "2023-02-01", "", "")
	if got := m.Get(at(lib, "v1.1.0", ".info")); got.Status == http.StatusOK {
		t.Error("what the first refuses came from the second")
	}
}

func TestOnlyTheNodesChecksumDatabaseIsThere(t *testing.T) {
	p, m := start(t, policy.World{})
	p.Put("/sumdb/"+database+"/tile/8/0/x001/234", strings.Repeat("h", 256*32))
	p.Put("/sumdb/"+database+"/tile/8/data/000", "records")
	for path, want := range map[string]int{
		"/sumdb/" + database + "/supported":         200,
		"/sumdb/other.test/supported":               404,
		"/sumdb/" + database + "/tile/8/0/x001/234": 200,
		"/sumdb/" + database + "/tile/8/data/000":   200,
		"/sumdb/" + database + "/tile/../../x":      400,
	} {
		if got := m.Get(path); got.Status != want {
			t.Errorf("%s: got %d, want %d", path, got.Status, want)
		}
	}
	m.In(policy.World{AsOf: sourcetest.Day("2024-01-01")})
	if got := m.Get("/sumdb/" + database + "/tile/8/data/000"); got.Status != http.StatusNotFound {
		t.Errorf("data tile where modules are hidden: %d", got.Status)
	}
}

func TestUnknownAndMalformed(t *testing.T) {
	_, m := start(t, policy.World{AsOf: sourcetest.Day("2024-01-01")})
	for path, want := range map[string]int{
		"/code.test/none/@v/list":                    404,
		"/code.test/none/@latest":                    404,
		"/code.test/Upper/@v/list":                   400,
		"/code.test/x/@v/v1.0.0.exe":                 400,
		"/code.test/x/@v/v1.zip":                     400,
		"/code.test/x/@v/%2e%2e/%2e%2e/etc.info":     400,
		"/code.test/x/@v/v2.0.0.info":                400,
		"/../../etc/passwd":                          400,
		"/":                                          400,
		"/sumdb/sum.test/lookup/code.test/!x@master": 400,
	} {
		if got := m.Get(path); got.Status != want {
			t.Errorf("%s: got %d, want %d: %s", path, got.Status, want, got.Body)
		}
	}
}

func TestMatchFindsItsOwnHosts(t *testing.T) {
	u := upstream.Upstream{URLs: []string{"https://proxy.test/go"}, Checksums: "sum.test+0123+key https://sums.test/db"}
	s := golang.New(sourcetest.NewSource(t, u), u)
	for _, c := range []struct{ host, path, want string }{
		{"proxy.test", "/go/code.test/x/@v/list", "/code.test/x/@v/list"},
		{"Proxy.test", "/go/code.test/x/@v/list", "/code.test/x/@v/list"},
		{"proxy.test", "/other/code.test/x/@v/list", ""},
		{"sums.test", "/db/latest", "/sumdb/sum.test/latest"},
		{"else.test", "/go/x", ""},
	} {
		got, ok := s.Match("https", c.host, c.path)
		if got != c.want || ok != (c.want != "") {
			t.Errorf("%s%s: got %q %v, want %q", c.host, c.path, got, ok, c.want)
		}
	}
	if diff := cmp.Diff([]string{"proxy.test", "sums.test"}, s.Hosts()); diff != "" {
		t.Error(diff)
	}
}

func TestFilesAreFetchedOnce(t *testing.T) {
	p, m := start(t, policy.World{AsOf: sourcetest.Day("2024-12-31")})
	releases(p)
	for range 3 {
		m.Get("/code.test/!org/lib/@v/list")
		m.Get(at(lib, "v1.0.0", ".zip"))
	}
	for path, n := range p.Asked() {
		if n > 1 {
			t.Errorf("asked %d times for %s", n, path)
		}
	}
	files := 0
	for _, e := range m.Events() {
		if e.Kind == "file" {
			if files++; files > 1 && e.Source != "cache" || e.Digest == "" || e.Bytes == 0 {
				t.Errorf("file reported as %+v", e)
			}
		}
	}
	if files != 3 {
		t.Errorf("%d files reported", files)
	}
}

var _ mirror.Service = (*golang.Service)(nil)
