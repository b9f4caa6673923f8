package npm

import (
	"bytes"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"maps"
	"net/http"
	"os"
	"path"
	"path/filepath"
	"runtime"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	"pgregory.net/rapid"

	"github.com/sandsea/sandsea/api/errdefs"
	"github.com/sandsea/sandsea/internal/aether/cache"
	"github.com/sandsea/sandsea/internal/policy"
	"github.com/sandsea/sandsea/internal/testkit/leak"
	"github.com/sandsea/sandsea/internal/testkit/wait"
)

func TestMain(m *testing.M) { os.Exit(leak.Main(m)) }

func library() []*pkg {
	return []*pkg{
		{name: "lib", tags: map[string]string{"latest": "2.1.0", "next": "3.0.0-rc.1", "old": "1.0.0", "gone": "9.9.9"}, releases: []*release{
			{version: "1.0.0", time: "2020-01-01", sha1: true},
			{version: "2.0.0", time: "2021-01-01"},
			{version: "1.0.1", time: "2021-06-01"}, // a late repair of the old line
			{version: "3.0.0-rc.1", time: "2022-01-01", scripts: map[string]string{"install": "true"}},
			{version: "2.1.0", time: "2024-01-01"},
		}},
		{name: "@org/app", tags: map[string]string{"latest": "1.0.0"}, releases: []*release{
			{version: "1.0.0", time: "2021-06-01", deps: map[string]string{"lib": ">=1.0.0"}},
		}},
		{name: "early", tags: map[string]string{"latest": "0.2.0-beta.1"}, releases: []*release{
			{version: "0.2.0-beta.1", time: "2021-01-01"}, {version: "0.1.0-beta.9", time: "2020-01-01"},
		}},
		{name: "empty"},
	}
}

type seen struct {
	Name     string
	Modified string
	Readme   string            `json:"readme"`
	Desc     string            `json:"description"`
	Rev      string            `json:"_rev"`
	Nested   any               `json:"nested"`
	Tags     map[string]string `json:"dist-tags"`
	Time     map[string]string
	Versions map[string]struct {
		Name, Version, Description string
		HasInstallScript           bool
		Scripts                    map[string]string
		Dist                       struct{ Tarball, Integrity, Shasum string }
	}
}

func (b *bed) packument(name, accept string) (seen, int) {
	b.t.Helper()
	r := b.get("/"+name, "Accept", accept)
	var s seen
	if r.status == http.StatusOK {
		if err := json.Unmarshal([]byte(r.body), &s); err != nil {
			b.t.Fatalf("%v in %s", err, r.body)
		}
	}
	return s, r.status
}

func TestAWorldsDateHoldsForListsTagsVersionsAndTarballs(t *testing.T) {
	g := newRegistry(t, library()...)
	b := newBed(t, g.upstream(), cache.Config{})
	all := []string{"1.0.0", "1.0.1", "2.0.0", "2.1.0", "3.0.0-rc.1"}
	tests := []struct {
		world    policy.World
		versions []string
		tags     map[string]string
	}{
		{policy.World{}, all, map[string]string{"latest": "2.1.0", "next": "3.0.0-rc.1", "old": "1.0.0"}},
		{policy.World{AsOf: date("2023-01-01")}, []string{"1.0.0", "1.0.1", "2.0.0", "3.0.0-rc.1"}, map[string]string{"latest": "2.0.0", "next": "3.0.0-rc.1", "old": "1.0.0"}},
		{policy.World{AsOf: date("2021-07-01")}, []string{"1.0.0", "1.0.1", "2.0.0"}, map[string]string{"latest": "2.0.0", "old": "1.0.0"}},
		{policy.World{AsOf: date("2020-01-01")}, []string{"1.0.0"}, map[string]string{"latest": "1.0.0", "old": "1.0.0"}},
		{policy.World{Deny: []string{"npm:lib@2.1.0"}}, []string{"1.0.0", "1.0.1", "2.0.0", "3.0.0-rc.1"}, map[string]string{"latest": "2.0.0", "next": "3.0.0-rc.1", "old": "1.0.0"}},
	}
	lib := g.packages["lib"]
	for _, tt := range tests {
		b.set(tt.world)
		for _, accept := range []string{typeAbbreviated + "; q=1.0, application/json; q=0.8, */*", "application/json", ""} {
			p, status := b.packument("lib", accept)
			got := slices.Sorted(maps.Keys(p.Versions))
			if status != 200 || !slices.Equal(got, tt.versions) || !maps.Equal(p.Tags, tt.tags) {
				t.Errorf("%+v, %q: %d, %v, %v; want %v, %v", tt.world, accept, status, got, p.Tags, tt.versions, tt.tags)
			}
			for v, d := range p.Versions {
				if d.Version != v || d.Name != "lib" || d.Dist.Tarball != fmt.Sprintf("%s/npm/lib/-/lib-%s.tgz", b.web.URL, v) || d.Dist.Shasum == "" {
					t.Errorf("version %s: %+v", v, d)
				}
				if strings.HasPrefix(accept, typeAbbreviated) && (d.HasInstallScript != (v == "3.0.0-rc.1") || d.Scripts != nil || d.Description != "") {
					t.Errorf("abbreviated %s: %+v", v, d)
				}
				if accept == "" && v == "3.0.0-rc.1" && d.Scripts["install"] != "true" {
					t.Errorf("full %s: %+v", v, d)
				}
			}
			if accept != "" && accept != "application/json" {
				continue
			}
			whole := len(tt.versions) == len(all)
			if whole != (p.Readme != "") || whole != (p.Nested != nil) || p.Rev != "" {
				t.Errorf("%+v: readme %q, nested %v, rev %q", tt.world, p.Readme, p.Nested, p.Rev)
			}
			if want := "lib as of " + tt.tags["latest"]; !whole && p.Desc != want {
				t.Errorf("%+v: description %q, want %q", tt.world, p.Desc, want)
			}
			if len(p.Time) != len(tt.versions)+2 || !whole && p.Time["modified"] >= "2024" {
				t.Errorf("%+v: times %v", tt.world, p.Time)
			}
		}
		var tags map[string]string
		if r := b.get("/-/package/lib/dist-tags"); json.Unmarshal([]byte(r.body), &tags) != nil || !maps.Equal(tags, tt.tags) {
			t.Errorf("%+v: dist-tags %s", tt.world, r.body)
		}
		for _, rel := range lib.releases {
			want := http.StatusForbidden
			if slices.Contains(tt.versions, rel.version) {
				want = http.StatusOK
			}
			matched, ok := b.s.Match("http", strings.TrimPrefix(g.web.URL, "http://"), strings.TrimPrefix(g.tarballURL(lib, rel), g.web.URL))
			if !ok {
				t.Fatal("no place for a lock file's URL")
			}
			for _, p := range []string{"/lib/-/lib-" + rel.version + ".tgz", matched} {
				r := b.get(p)
				e := b.last()
				if r.status != want || want == 200 && r.body != string(rel.body) || e.Version != rel.version || e.Denied != (want != 200) {
					t.Errorf("%+v: GET %s: %d, want %d, event %+v", tt.world, p, r.status, want, e)
				}
				if want != 200 && (r.header.Get("Sandsea-Rule") == "" || !strings.Contains(r.body, `"error"`) || !strings.Contains(r.body, r.header.Get("Sandsea-Rule"))) {
					t.Errorf("refusal: %v %s", r.header, r.body)
				}
			}
			r := b.get("/lib/" + rel.version)
			var d struct {
				Version string
				Dist    struct{ Tarball string }
				Readme  string
			}
			if r.status != want || want == 200 && (json.Unmarshal([]byte(r.body), &d) != nil || d.Version != rel.version || d.Readme == "" || !strings.HasPrefix(d.Dist.Tarball, b.web.URL)) {
				t.Errorf("%+v: version %s: %d %s", tt.world, rel.version, r.status, r.body)
			}
		}
		if r := b.get("/lib/latest"); !strings.Contains(r.body, fmt.Sprintf(`"version":%q`, tt.tags["latest"])) {
			t.Errorf("latest: %d %s", r.status, r.body)
		}
		want := http.StatusForbidden
		if tt.tags["next"] != "" {
			want = http.StatusOK
		}
		if r := b.get("/lib/next"); r.status != want {
			t.Errorf("%+v: next: %d", tt.world, r.status)
		}
	}
	b.set(policy.World{AsOf: date("2020-06-01")})
	if p, _ := b.packument("early", ""); p.Tags["latest"] != "0.1.0-beta.9" {
		t.Errorf("only pre-releases: latest %s", p.Tags["latest"])
	}
	b.set(policy.World{AsOf: date("2019-06-01")})
	if r := b.get("/lib"); r.status != http.StatusForbidden || r.header.Get("Sandsea-Rule") != "as_of 2019-06-01" {
		t.Errorf("a package that did not exist: %d %s", r.status, r.body)
	}
}

func TestVersionsWithoutATimeAreHiddenUnlessPinned(t *testing.T) {
	g := newRegistry(t, &pkg{name: "lib", tags: map[string]string{"latest": "1.1.0"}, releases: []*release{{version: "1.0.0"}, {version: "1.1.0"}}})
	b := newBed(t, g.upstream(), cache.Config{})
	b.set(policy.World{AsOf: date("2040-01-01")})
	if r := b.get("/lib"); r.status != 403 || r.header.Get("Sandsea-Rule") != policy.RuleUndated {
		t.Errorf("%d %s", r.status, r.body)
	}
	b.set(policy.World{AsOf: date("2040-01-01"), Pin: []string{"npm:lib@1.0.0"}})
	if p, _ := b.packument("lib", ""); len(p.Versions) != 1 || p.Tags["latest"] != "1.0.0" {
		t.Errorf("pinned: %+v", p)
	}
}

func TestDeniedPackagesDoNotExistUnderAnySpelling(t *testing.T) {
	g := newRegistry(t, library()...)
	b := newBed(t, g.upstream(), cache.Config{})
	b.set(policy.World{Deny: []string{"npm:@org/app", "npm:lib"}})
	for _, p := range []string{
		"/lib", "/LIB", "/lib/latest", "/lib/1.0.0", "/lib/-/lib-1.0.0.tgz", "/-/package/lib/dist-tags",
		"/@org/app", "/@org%2fapp", "/@org%2Fapp", "/@ORG/app", "/@org%2fapp/1.0.0", "/@org/app/-/app-1.0.0.tgz", "/@org/app/-/@org/app-1.0.0.tgz",
	} {
		if r := b.get(p); r.status != http.StatusForbidden || !strings.HasPrefix(r.header.Get("Sandsea-Rule"), "deny npm:") {
			t.Errorf("GET %s: %d %s", p, r.status, r.body)
		}
	}
	if g.lists.Load()+g.artefacts.Load() != 0 {
		t.Error("upstream was asked for what is denied")
	}
}

func TestScopedNames(t *testing.T) {
	g := newRegistry(t, library()...)
	b := newBed(t, g.upstream(), cache.Config{})
	for _, p := range []string{"@org/app", "@org%2fapp"} {
		s, status := b.packument(p, typeAbbreviated)
		if status != 200 || s.Versions["1.0.0"].Dist.Tarball != b.web.URL+"/npm/@org/app/-/app-1.0.0.tgz" {
			t.Errorf("%s: %d %+v", p, status, s)
		}
	}
	for _, p := range []string{"/@org/app/-/app-1.0.0.tgz", "/@org%2fapp/-/app-1.0.0.tgz", "/@org/app/-/@org/app-1.0.0.tgz"} {
		if r := b.get(p); r.status != 200 || r.body != string(g.packages["@org/app"].releases[0].body) {
			t.Errorf("%s: %d", p, r.status)
		}
	}
}

func TestWhatIsNotServedIsRefusedClearly(t *testing.T) {
	g := newRegistry(t, library()...)
	b := newBed(t, g.upstream(), cache.Config{})
	for p, want := range map[string]int{
		"/": 400, "/-/ping": 200, "/-/v1/search?text=x": 403, "/-/all": 403, "/-/whoami": 403, "/-/npm/v1/security/audits": 403, "/-/npm/v1/keys": 404,
		"/-/user/org.couchdb.user:x": 403, "/nope": 404, "/empty": 404, "/lib/9.9.9": 404, "/lib/nothing": 404, "/lib/-/lib-9.9.9.tgz": 404, "/lib/-/x.tgz": 404,
		"/lib/-/a/b/c": 404, "/..%2f..%2fetc": 404, "/@org": 400, "/.hidden": 400, "/_design": 400, "/a%20b": 400,
	} {
		if r := b.get(p); r.status != want {
			t.Errorf("GET %s: %d %s, want %d", p, r.status, r.body, want)
		} else if want == http.StatusForbidden && r.header.Get("Sandsea-Rule") != "service npm" {
			t.Errorf("GET %s: no rule, %q", p, r.body)
		}
	}
	for p, want := range map[string]int{"/-/npm/v1/security/advisories/bulk": 403, "/-/v1/login": 403, "/lib": 405, "/-/package/lib/dist-tags": 405} {
		resp, err := http.Post(b.web.URL+"/npm"+p, "application/json", strings.NewReader("{}"))
		if err != nil {
			t.Fatal(err)
		}
		resp.Body.Close()
		if resp.StatusCode != want {
			t.Errorf("POST %s: %d, want %d", p, resp.StatusCode, want)
		}
	}
	if _, err := New(Config{}); !errors.Is(err, errdefs.FailedPrecondition) {
		t.Errorf("no upstream: %v", err)
	}
	if got, ok := b.s.Match("https", "other.example", "/lib"); ok {
		t.Errorf("another host leads to %s", got)
	}
	if got, ok := b.s.Match("https", strings.TrimPrefix(g.web.URL, "http://"), "/elsewhere/lib"); ok {
		t.Errorf("another path leads to %s", got)
	}
}

func TestFiftyClientsCauseOneFetchAndTheSecondInstallNone(t *testing.T) {
	g := newRegistry(t, library()...)
	b := newBed(t, g.upstream(), cache.Config{})
	want := g.packages["lib"].releases[4].body
	for range 2 {
		var wg sync.WaitGroup
		for range 50 {
			wg.Go(func() {
				resp, err := http.Get(b.web.URL + "/npm/lib/-/lib-2.1.0.tgz")
				if err != nil {
					t.Error(err)
					return
				}
				defer resp.Body.Close()
				if got, err := io.ReadAll(resp.Body); err != nil || !bytes.Equal(got, want) {
					t.Errorf("%d bytes, %v", len(got), err)
				}
			})
		}
		wg.Wait()
	}
	if g.artefacts.Load() != 1 || g.bytes.Load() != int64(len(want)) || g.lists.Load() != 1 {
		t.Errorf("%d fetches of artefacts, %d bytes, %d lists", g.artefacts.Load(), g.bytes.Load(), g.lists.Load())
	}
	if r := b.get("/lib/-/lib-2.1.0.tgz", "Range", "bytes=10-19"); r.status != 206 || r.body != string(want[10:20]) {
		t.Errorf("a range: %d", r.status)
	}
}

func TestWrongAndCutTarballsBreakTheTransferAndSayWhy(t *testing.T) {
	g := newRegistry(t, &pkg{name: "lib", tags: map[string]string{"latest": "1.0.0"}, releases: []*release{
		{version: "1.0.0", time: "2020-01-01", corrupt: true},
		{version: "1.0.1", time: "2020-01-01", corrupt: true, sha1: true},
		{version: "1.0.2", time: "2020-01-01", cut: true},
	}})
	b := newBed(t, g.upstream(), cache.Config{})
	for v, word := range map[string]string{"1.0.0": "sha512", "1.0.1": "sha1", "1.0.2": "broke off"} {
		for range 2 {
			r := b.get("/lib/-/lib-" + v + ".tgz")
			if r.status == 200 && r.err == nil {
				t.Errorf("%s: the client took %d bytes for a whole tarball", v, len(r.body))
			}
			if e := b.last(); !strings.Contains(e.Error, word) || e.Version != v {
				t.Errorf("%s: event %+v", v, e)
			}
		}
	}
	wait.Until(t, 10*time.Second, func() bool { return b.cache.Stats().Objects == 1 }) // the packument alone
}

func TestADeadUpstreamIsToldAndWhatIsHereGoesOn(t *testing.T) {
	g := newRegistry(t, library()...)
	dir := filepath.Join(t.TempDir(), "cache")
	b := newBed(t, g.upstream(), cache.Config{Dir: dir})
	want := g.packages["lib"].releases[4].body
	if r := b.get("/lib/-/lib-2.1.0.tgz"); r.status != 200 {
		t.Fatal(r.status)
	}
	g.dead.Store(true)
	if r := b.get("/lib/-/lib-2.1.0.tgz"); r.body != string(want) {
		t.Errorf("a cached tarball: %d", r.status)
	}
	for _, p := range []string{"/lib/-/lib-1.0.0.tgz", "/@org%2fapp"} {
		if r := b.get(p); r.status != http.StatusServiceUnavailable || r.err != nil || !strings.Contains(r.body, "does not answer") {
			t.Errorf("%s: %d %s", p, r.status, r.body)
		}
	}
	if err := b.cache.Close(); err != nil {
		t.Fatal(err)
	}
	b = newBed(t, g.upstream(), cache.Config{Dir: dir, Offline: true})
	if r := b.get("/lib/-/lib-2.1.0.tgz"); r.body != string(want) {
		t.Errorf("offline: %d %s", r.status, r.body)
	}
	if r := b.get("/lib/-/lib-1.0.0.tgz"); r.status != http.StatusServiceUnavailable || !strings.Contains(r.body, "offline") {
		t.Errorf("offline, missing: %d %s", r.status, r.body)
	}
	if err := b.cache.Close(); err != nil {
		t.Fatal(err)
	}
	u := g.upstream()
	u.URLs = append(newRegistry(t).upstream().URLs, u.URLs...)
	b = newBed(t, u, cache.Config{Dir: dir, Offline: true})
	if r := b.get("/lib/-/lib-2.1.0.tgz"); r.body != string(want) {
		t.Errorf("offline, of the second upstream: %d %s", r.status, r.body)
	}
}

func TestVersionsAreInTheOrderOfSemver(t *testing.T) {
	order := []string{
		"1", "nonsense", "0.0.1", "1.0.0-1", "1.0.0-2", "1.0.0-11", "1.0.0-alpha", "1.0.0-alpha.1", "1.0.0-alpha.beta", "1.0.0-beta", "1.0.0-rc.1", "1.0.0",
		"1.0.1", "1.2.0", "1.10.0", "99999999999999999999.0.0", "100000000000000000000.0.0",
	}
	for i := range order {
		for j := range order {
			want := 0
			if i < j {
				want = -1
			} else if i > j {
				want = 1
			}
			if got := parseVersion(order[i]).compare(parseVersion(order[j])); got != want {
				t.Errorf("compare(%s, %s) = %d", order[i], order[j], got)
			}
		}
	}
	if parseVersion("v1.0.0+b").compare(parseVersion("1.0.0")) != 0 {
		t.Error("build metadata counts")
	}
	rapid.Check(t, func(t *rapid.T) {
		gen := rapid.StringMatching(`[0-9]\.[0-9]{1,2}\.[0-9](-[a-b0-9]{1,2}(\.[0-9a]{1,2})?)?|[a-z.]{0,4}`)
		a, b, c := parseVersion(gen.Draw(t, "a")), parseVersion(gen.Draw(t, "b")), parseVersion(gen.Draw(t, "c"))
		if a.compare(b) != -b.compare(a) || a.compare(b) <= 0 && b.compare(c) <= 0 && a.compare(c) > 0 {
			t.Fatalf("%s, %s, %s: no order", a.text, b.text, c.text)
		}
	})
}

func TestIntegrity(t *testing.T) {
	zeros := func(n int) string { return strings.Repeat("00", n) }
	b64 := strings.Repeat("A", 86) + "=="
	for _, tt := range []struct {
		integrity, shasum string
		want              []cache.Digest
	}{
		{"sha512-" + b64, "", []cache.Digest{{Algorithm: "sha512", Hex: zeros(64)}}},
		{"sha1-AAAAAAAAAAAAAAAAAAAAAAAAAAA= sha512-" + b64 + "?opt", zeros(20), []cache.Digest{{Algorithm: "sha512", Hex: zeros(64)}}},
		{"sha1-AAAAAAAAAAAAAAAAAAAAAAAAAAA=", "", []cache.Digest{{Algorithm: "sha1", Hex: zeros(20)}}},
		{"sha512-short", zeros(20), []cache.Digest{{Algorithm: "sha1", Hex: zeros(20)}}},
		{"md5-x", "zz", nil},
		{"", "", nil},
	} {
		if diff := cmp.Diff(tt.want, digests(tt.integrity, tt.shasum)); diff != "" {
			t.Errorf("%q, %q: %s", tt.integrity, tt.shasum, diff)
		}
	}
}

func TestTarballsThatUpstreamNamesOddly(t *testing.T) {
	p, err := parsePackument("@o/lib", strings.NewReader(`{"versions":{
		"1.0.0":{"dist":{"tarball":"https://u.example/download/abc"}},
		"1.1.0":{"dist":{"tarball":"https://u.example/x/same.tgz"}},
		"1.2.0":{"dist":{"tarball":"https://u.example/y/same.tgz"}},
		"1.3.0":{"dist":{"tarball":"file:///etc/passwd"}},
		"1.4.0":{}}}`))
	if err != nil {
		t.Fatal(err)
	}
	for file, want := range map[string]string{"abc": "1.0.0", "lib-1.0.0.tgz": "1.0.0", "same.tgz": "", "lib-1.2.0.tgz": "1.2.0", "other.tgz": ""} {
		got := ""
		if i := p.find(file); i >= 0 {
			got = p.versions[i].name
		}
		if got != want {
			t.Errorf("%s is of %q, want %q", file, got, want)
		}
	}
	for _, v := range []string{"1.3.0", "1.4.0"} {
		if e := p.versions[p.byName[v]]; e.tarball != "" {
			t.Errorf("%s has a tarball at %s", v, e.tarball)
		}
	}
}

// endless makes a packument of about n bytes, most of which nobody needs.
type endless struct {
	n    int64
	left []byte
	i    int
	end  bool
}

func (e *endless) Read(p []byte) (int, error) {
	for len(e.left) == 0 {
		switch {
		case e.end:
			return 0, io.EOF
		case e.i == 0:
			e.left = []byte(`{"name":"big","readme":"x","dist-tags":{"latest":"1.0.1"},"versions":{`)
		case e.n <= 0:
			e.left, e.end = []byte(`},"time":{}}`), true
		}
		if e.i > 0 && !e.end {
			sep := ","
			if e.i == 1 {
				sep = ""
			}
			e.left = fmt.Appendf(nil, `%s"1.0.%d":{"name":"big","version":"1.0.%[2]d","readme":%[3]q,"dist":{"tarball":"https://u.example/big-1.0.%[2]d.tgz"}}`, sep, e.i, strings.Repeat("words ", 10_000))
		}
		e.i++
	}
	n := copy(p, e.left)
	e.left = e.left[n:]
	e.n -= int64(n)
	return n, nil
}

func TestAPackumentOf200MBNeedsLittleMemory(t *testing.T) {
	if testing.Short() {
		t.Skip("reads 200 MB")
	}
	var peak, before runtime.MemStats
	runtime.GC()
	runtime.ReadMemStats(&before)
	p, err := parsePackument("big", &endless{n: 200 << 20})
	if err != nil {
		t.Fatal(err)
	}
	runtime.ReadMemStats(&peak)
	runtime.GC()
	var after runtime.MemStats
	runtime.ReadMemStats(&after)
	if held := int64(after.HeapAlloc) - int64(before.HeapAlloc); len(p.versions) < 3000 || held > 32<<20 {
		t.Errorf("%d versions hold %d bytes", len(p.versions), held)
	}
	if grown := int64(peak.HeapSys) - int64(before.HeapSys); grown > 64<<20 {
		t.Errorf("reading took %d bytes", grown)
	}
	runtime.KeepAlive(p)
}

func FuzzPackument(f *testing.F) {
	f.Add(`{"name":"lib","dist-tags":{"latest":"1.0.0"},"versions":{"1.0.0":{"name":"lib","version":"1.0.0","dist":{"tarball":"https://u.example/lib-1.0.0.tgz","shasum":"x"}}},"time":{"1.0.0":"2020-01-01T00:00:00Z","unpublished":{}}}`)
	f.Add(`{"versions":{"1":{"dist":null},"2":{"dist":[]}}}`)
	f.Add(`{"versions":null}`)
	f.Add(`[]`)
	f.Fuzz(func(t *testing.T, body string) {
		p, err := parsePackument("lib", strings.NewReader(body))
		if err != nil {
			return
		}
		for _, w := range []policy.World{{}, {AsOf: date("2020-06-01")}} {
			v := p.view(w)
			short, err := v.abbreviate("http://m.example/npm")
			if err != nil {
				continue
			}
			var long bytes.Buffer
			if err := v.full("http://m.example/npm", strings.NewReader(body), &long); err != nil {
				continue
			}
			for _, raw := range [][]byte{short, long.Bytes()} {
				again, err := parsePackument("lib", bytes.NewReader(raw))
				if err != nil {
					t.Fatalf("what is served is not read back: %v: %s", err, raw)
				}
				for _, e := range again.versions {
					if i, ok := p.byName[e.name]; !ok || !v.shown[i] {
						t.Errorf("version %q is shown", e.name)
					}
					if e.tarball != "" && !strings.HasPrefix(e.tarball, "http://m.example/npm/lib/-/"+path.Base(p.name)) {
						t.Errorf("a link leads to %s", e.tarball)
					}
				}
			}
		}
	})
}
