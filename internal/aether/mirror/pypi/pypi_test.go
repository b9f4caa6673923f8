package pypi

import (
	"bytes"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net/http"
	"os"
	"path/filepath"
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

func TestMain(m *testing.M) {
	os.Exit(leak.Main(m))
}

func library() []*release {
	later := wheel("Base-Lib", "1.2", "2023-01-01")
	later.yanked = "broken <badly>"
	return []*release{
		wheel("Base-Lib", "1.0", "2020-01-01"), sdist("Base-Lib", "1.0", "Base-Lib-1.0.tar.gz", "2020-01-02"),
		wheel("Base-Lib", "1.1", "2021-01-01"), later,
		wheel("Base-Lib", "2.0", "2024-01-01"), wheel("Base-Lib", "3.0rc1", "2022-01-01"),
		wheel("app", "1.0", "2021-06-01", "base-lib"),
	}
}

func TestAWorldsDateHoldsForListsDocumentsAndDownloads(t *testing.T) {
	x := newIndex(t, library()...)
	b := newBed(t, x.upstream(), cache.Config{})
	tests := []struct {
		world    policy.World
		versions []string
		newest   string
	}{
		{policy.World{}, []string{"1.0", "1.1", "1.2", "2.0", "3.0rc1"}, "2.0"},
		{policy.World{AsOf: date("2021-06-01")}, []string{"1.0", "1.1"}, "1.1"},
		{policy.World{AsOf: date("2023-06-01")}, []string{"1.0", "1.1", "1.2", "3.0rc1"}, "1.1"}, // 1.2 is yanked
		{policy.World{Deny: []string{"pypi:base_lib@2.0.0"}}, []string{"1.0", "1.1", "1.2", "3.0rc1"}, "1.1"},
		{policy.World{AsOf: date("2020-01-01")}, []string{"1.0"}, "1.0"},
	}
	for _, tt := range tests {
		b.set(tt.world)
		page, status := b.page("base.lib")
		if status != http.StatusOK || !slices.Equal(page.Versions, tt.versions) {
			t.Errorf("%+v: page %d with %v, want %v", tt.world, status, page.Versions, tt.versions)
		}
		listed := map[string]bool{}
		for _, f := range page.Files {
			listed[f.Filename] = true
			if !strings.HasPrefix(f.URL, b.web.URL+"/pypi/files/base-lib/") {
				t.Errorf("a link leads to %s", f.URL)
			}
		}
		page5 := b.get("/pypi/simple/base-lib/").body
		for _, r := range x.projects["base-lib"] {
			want := http.StatusForbidden
			if listed[r.file] {
				want = http.StatusOK
			}
			if strings.Contains(page5, ">"+r.file+"<") != listed[r.file] {
				t.Errorf("%+v: JSON and HTML differ about %s", tt.world, r.file)
			}
			// By the mirror's own path, by the path of upstream's URL, and each metadata file.
			matched, ok := b.s.Match("https", strings.TrimPrefix(x.files.URL, "http://"), strings.TrimPrefix(x.url(r), x.files.URL))
			if !ok {
				t.Fatalf("no place for %s", x.url(r))
			}
			for _, path := range []string{"/pypi/files/Base_Lib/" + r.file, "/pypi" + matched} {
				got := b.get(path)
				if got.status != want {
					t.Errorf("%+v: GET %s: %d, want %d", tt.world, path, got.status, want)
				}
				e := b.last()
				if want == http.StatusOK && (got.body != string(r.body) || e.Version != r.version || e.Digest != sha(r.body) || e.Bytes != int64(len(r.body))) {
					t.Errorf("%s: %d bytes, event %+v", path, len(got.body), e)
				}
				if want == http.StatusForbidden && (got.header.Get("Sandsea-Rule") == "" || !e.Denied || e.Rule != got.header.Get("Sandsea-Rule") || e.Version != r.version) {
					t.Errorf("%s: rule %q, event %+v", path, got.header.Get("Sandsea-Rule"), e)
				}
				if r.metadata != nil {
					if m := b.get(path + ".metadata"); m.status != want || want == http.StatusOK && m.body != string(r.metadata) {
						t.Errorf("%+v: GET %s.metadata: %d, %q", tt.world, path, m.status, m.body)
					}
				}
			}
			doc := b.get("/pypi/pypi/base-lib/" + r.version + "/json")
			visible := slices.Contains(tt.versions, r.version)
			if (doc.status == http.StatusOK) != visible || !visible && doc.status != http.StatusForbidden {
				t.Errorf("%+v: document of %s: %d", tt.world, r.version, doc.status)
			}
		}
		var doc struct {
			Info struct {
				Version, Summary string
			} `json:"info"`
			Releases map[string][]struct{ Filename, URL string } `json:"releases"`
			URLs     []struct{ Filename, URL string }            `json:"urls"`
		}
		r := b.get("/pypi/pypi/Base-Lib/json")
		if err := json.Unmarshal([]byte(r.body), &doc); err != nil {
			t.Fatalf("%d %s: %v", r.status, r.body, err)
		}
		if !tt.world.Hides() {
			// Unfiltered, it is as upstream has it.
			if doc.Info.Version != "3.0rc1" && doc.Info.Version != "2.0" {
				t.Errorf("newest is %s", doc.Info.Version)
			}
		} else if doc.Info.Version != tt.newest || doc.Info.Summary != "as of "+tt.newest || strings.Contains(r.body, "fixed later") {
			t.Errorf("%+v: document of %s: %s", tt.world, doc.Info.Version, r.body)
		}
		var got []string
		for v, files := range doc.Releases {
			got = append(got, v)
			for _, f := range files {
				if !listed[f.Filename] || !strings.HasPrefix(f.URL, b.web.URL) {
					t.Errorf("document has %s at %s", f.Filename, f.URL)
				}
			}
		}
		slices.Sort(got)
		if !slices.Equal(got, tt.versions) {
			t.Errorf("%+v: document has %v", tt.world, got)
		}
	}
}

func TestAVersionWithoutFilesTellsNothingInAWorldWithADate(t *testing.T) {
	x := newIndex(t, wheel("app", "1.0", "2020-01-01"), &release{name: "app", version: "2.0"})
	b := newBed(t, x.upstream(), cache.Config{})
	b.set(policy.World{AsOf: date("2021-01-01")})
	got := b.get("/pypi/pypi/app/json")
	if got.status != http.StatusOK || strings.Contains(got.body, "2.0") || !strings.Contains(got.body, "as of 1.0") {
		t.Errorf("%d %s", got.status, got.body)
	}
}

func TestDeniedProjectsDoNotExistUnderAnySpelling(t *testing.T) {
	x := newIndex(t, append(library(), sdist("base", "1", "base-1.zip", "2020-01-01"))...)
	b := newBed(t, x.upstream(), cache.Config{})
	b.set(policy.World{Deny: []string{"pypi:base-lib"}})
	file := x.projects["base-lib"][1]
	paths := []string{"/pypi/files/base-lib/" + file.file, "/pypi/files/base_lib/" + file.file, "/pypi/pypi/BASE.LIB/json", "/pypi/pypi/base-lib/1.0/json"}
	for _, n := range []string{"base-lib", "Base_Lib", "base.lib", "base--lib", "BASE-LIB", "base%2dlib"} {
		paths = append(paths, "/pypi/simple/"+n+"/", "/pypi/simple/"+n)
	}
	at, _ := b.s.Match("http", strings.TrimPrefix(x.web.URL, "http://"), "/simple/base_lib/")
	paths = append(paths, "/pypi"+at, "/pypi/at/127.0.0.1"+strings.TrimPrefix(x.url(file), x.files.URL))
	for _, p := range paths {
		if r := b.get(p); r.status != http.StatusForbidden || r.header.Get("Sandsea-Rule") != "deny pypi:base-lib" {
			t.Errorf("GET %s: %d, rule %q: %s", p, r.status, r.header.Get("Sandsea-Rule"), r.body)
		}
	}
	if x.artefacts.Load() != 0 {
		t.Error("upstream was asked for what is denied")
	}
	if list := b.get("/pypi/simple/", "Accept", typeJSON).body; strings.Contains(list, "base-lib") || !strings.Contains(list, `"app"`) {
		t.Errorf("list: %s", list)
	}
	// Another project, whose name a denied one's begins with, is there: its files are found by the page.
	if r := b.get("/pypi/files/base/base-1.zip"); r.status != http.StatusOK {
		t.Errorf("the neighbour: %d", r.status)
	}
	b.set(policy.World{Deny: []string{"pypi:base"}})
	matched, _ := b.s.Match("http", "127.0.0.1", strings.TrimPrefix(x.url(file), x.files.URL))
	if r := b.get("/pypi" + matched); r.status != http.StatusOK {
		t.Errorf("a file whose name begins like a denied project's: %d %s", r.status, r.body)
	}
}

func TestAnUpstreamWithoutDatesShowsOnlyWhatIsPinnedInAWorldWithADate(t *testing.T) {
	for _, htmlOnly := range []bool{true, false} {
		rs := library()
		for _, r := range rs {
			r.uploaded = time.Time{}
		}
		x := newIndex(t, rs...)
		x.htmlOnly = htmlOnly
		b := newBed(t, x.upstream(), cache.Config{})
		page, status := b.page("base-lib")
		if status != 200 || len(page.Files) != 6 {
			t.Fatalf("without a date: %d, %d files", status, len(page.Files))
		}
		b.set(policy.World{AsOf: date("2030-01-01")})
		r := b.get("/pypi/simple/base-lib/")
		if r.status != http.StatusForbidden || r.header.Get("Sandsea-Rule") != policy.RuleUndated || !strings.Contains(r.body, "pin it as") {
			t.Errorf("with a date: %d %s", r.status, r.body)
		}
		if r := b.get("/pypi/files/base-lib/" + x.projects["base-lib"][0].file); r.status != http.StatusForbidden {
			t.Errorf("file: %d", r.status)
		}
		b.set(policy.World{AsOf: date("2030-01-01"), Pin: []string{"pypi:base-lib@1.1"}})
		page, status = b.page("base-lib")
		if status != 200 || len(page.Files) != 1 || page.Files[0].Filename != "base_lib-1.1-py3-none-any.whl" {
			t.Errorf("pinned: %d %+v", status, page.Files)
		}
		if r := b.get("/pypi/files/base-lib/base_lib-1.1-py3-none-any.whl"); r.status != http.StatusOK {
			t.Errorf("pinned file: %d", r.status)
		}
	}
}

func TestThePageKeepsWhatInstallersDecideBy(t *testing.T) {
	for _, htmlOnly := range []bool{true, false} {
		x := newIndex(t, library()...)
		x.htmlOnly = htmlOnly
		b := newBed(t, x.upstream(), cache.Config{})
		page, _ := b.page("base-lib")
		byName := map[string]wireFile{}
		for _, f := range page.Files {
			byName[f.Filename] = f
		}
		f := byName["base_lib-1.2-py3-none-any.whl"]
		r := x.projects["base-lib"][3]
		if f.RequiresPython == nil || *f.RequiresPython != ">=3.6" || string(f.Yanked) != `"broken \u003cbadly\u003e"` && string(f.Yanked) != `"broken <badly>"` ||
			f.Hashes["sha256"] != sha(r.body) || !strings.Contains(string(f.Core), sha(r.metadata)) || !bytes.Equal(f.Core, f.DistInfo) {
			t.Errorf("html %v: JSON %+v", htmlOnly, f)
		}
		h := b.get("/pypi/simple/base-lib/", "Accept", "text/html").body
		want := fmt.Sprintf(`<a href="%s/pypi/files/base-lib/base_lib-1.2-py3-none-any.whl#sha256=%s" data-requires-python="&gt;=3.6" data-dist-info-metadata="sha256=%s" data-core-metadata="sha256=%[3]s" data-yanked="broken &lt;badly&gt;">base_lib-1.2-py3-none-any.whl</a>`,
			b.web.URL, sha(r.body), sha(r.metadata))
		if !strings.Contains(h, want) {
			t.Errorf("html %v: no %s in\n%s", htmlOnly, want, h)
		}
	}
}

func TestTheFormIsTheOneThatTheClientPrefers(t *testing.T) {
	x := newIndex(t, library()...)
	b := newBed(t, x.upstream(), cache.Config{})
	tests := []struct{ accept, want string }{
		{"", "text/html"},
		{"*/*", "text/html"},
		{"text/html", "text/html"},
		{typeJSON, typeJSON},
		{typeJSON + ", " + typeHTML + "; q=0.1, text/html; q=0.01", typeJSON},
		{"text/html, " + typeJSON + ";q=0.5", "text/html"},
		{"application/vnd.pypi.simple.latest+json", typeJSON},
		{"application/vnd.pypi.simple.v2+json, " + typeHTML + ";q=0.2", typeHTML},
		{"text/html;q=0, */*;q=0.1", "text/html"},
		{"application/json", ""},
		{"application/vnd.pypi.simple.v9+json", ""},
	}
	if r := b.get("/pypi/simple/app/?format=" + typeJSON); r.status != 200 || r.header.Get("Content-Type") != typeJSON {
		t.Errorf("by the address, with a plus as it is: %d %s", r.status, r.header.Get("Content-Type"))
	}
	for _, tt := range tests {
		for _, path := range []string{"/pypi/simple/app/", "/pypi/simple/"} {
			h := []string{}
			if tt.accept != "" {
				h = append(h, "Accept", tt.accept)
			}
			r := b.get(path, h...)
			got, _, _ := strings.Cut(r.header.Get("Content-Type"), ";")
			if tt.want == "" && r.status != http.StatusNotAcceptable || tt.want != "" && (r.status != 200 || got != tt.want) {
				t.Errorf("%s, Accept %q: %d %s", path, tt.accept, r.status, got)
			}
		}
	}
	if r := b.get("/pypi/simple/app/?format=" + strings.ReplaceAll(typeJSON, "+", "%2B")); r.header.Get("Content-Type") != typeJSON {
		t.Errorf("format in the query: %s", r.header.Get("Content-Type"))
	}
}

func TestWhatIsNotServedIsRefusedClearly(t *testing.T) {
	x := newIndex(t, library()...)
	b := newBed(t, x.upstream(), cache.Config{})
	for path, want := range map[string]int{
		"/pypi/": 404, "/pypi/search": 404, "/pypi/simple/nope/": 404, "/pypi/simple/..%2f..%2fetc/": 404, "/pypi/simple/a b/": 400,
		"/pypi/simple/-x/": 400, "/pypi/files/app/nope-1.0.tar.gz": 404, "/pypi/files/app/base_lib-1.0-py3-none-any.whl": 404,
		"/pypi/at/127.0.0.1/etc/passwd": 404, "/pypi/at/127.0.0.1/x/app-1.0-py3-none-any.whl": 404, "/pypi/at/other.example/app-1.0-py3-none-any.whl": 404,
		"/pypi/pypi/app/9.9/json": 404, "/pypi/pypi/nope/json": 404, "/pypi/files/app/base-lib-1.0.tar.gz.metadata": 404,
	} {
		if r := b.get(strings.ReplaceAll(path, " ", "%20")); r.status != want {
			t.Errorf("GET %s: %d %s, want %d", path, r.status, r.body, want)
		}
	}
	resp, err := http.Post(b.web.URL+"/pypi/legacy/", "text/xml", strings.NewReader("<x/>"))
	if err != nil {
		t.Fatal(err)
	}
	resp.Body.Close()
	if resp.StatusCode != http.StatusMethodNotAllowed {
		t.Errorf("an upload: %d", resp.StatusCode)
	}
	b.set(policy.World{AsOf: date("2024-01-01")})
	if r := b.get("/pypi/simple/"); r.status != http.StatusForbidden || r.header.Get("Sandsea-Rule") != policy.RuleUndated {
		t.Errorf("the list of all projects: %d", r.status)
	}
	if _, err := New(Config{}); !errors.Is(err, errdefs.FailedPrecondition) {
		t.Errorf("no upstream: %v", err)
	}
}

func TestURLsOfUpstreamLeadHere(t *testing.T) {
	x := newIndex(t, library()...)
	u := x.upstream()
	u.Files = []string{"https://files.example"}
	b := newBed(t, u, cache.Config{})
	host := strings.TrimPrefix(x.web.URL, "http://")
	for _, tt := range []struct {
		host, path, want string
		ok               bool
	}{
		{host, "/simple/", "/simple/", true},
		{host, "/simple/app/", "/simple/app/", true},
		{host, "/simple", "/simple", true},
		{host, "/simpler/app/", "/at/127.0.0.1/simpler/app/", true},
		{host, "/pypi/app/json", "/pypi/app/json", true},
		{"FILES.example:443", "/packages/aa/app-1.0.tar.gz", "/at/files.example/packages/aa/app-1.0.tar.gz", true},
		{"other.example", "/simple/", "", false},
		{"", "/simple/", "", false},
	} {
		got, ok := b.s.Match("https", tt.host, tt.path)
		if got != tt.want || ok != tt.ok {
			t.Errorf("Match(%s%s) = %q, %v", tt.host, tt.path, got, ok)
		}
	}
	if !slices.Contains(b.s.Hosts(), "files.example") {
		t.Errorf("hosts %v", b.s.Hosts())
	}
}

func TestFiftyClientsCauseOneFetchAndTheSecondInstallNone(t *testing.T) {
	x := newIndex(t, library()...)
	b := newBed(t, x.upstream(), cache.Config{})
	x.slow = make(chan struct{})
	r := x.projects["base-lib"][0]
	var wg sync.WaitGroup
	started := make(chan struct{}, 50)
	for range 50 {
		wg.Go(func() {
			resp, err := http.Get(b.web.URL + "/pypi/files/base-lib/" + r.file)
			if err != nil {
				t.Error(err)
				return
			}
			defer resp.Body.Close()
			// The first half is here while upstream still holds the rest back.
			half := make([]byte, 1000)
			if _, err := io.ReadFull(resp.Body, half); err != nil {
				t.Error(err)
			}
			started <- struct{}{}
			rest, err := io.ReadAll(resp.Body)
			if err != nil || !bytes.Equal(append(half, rest...), r.body) {
				t.Errorf("%d bytes, %v", len(half)+len(rest), err)
			}
		})
	}
	for range 50 {
		<-started
	}
	close(x.slow)
	wg.Wait()
	if x.artefacts.Load() != 1 || x.bytes.Load() != int64(len(r.body)) {
		t.Errorf("%d fetches, %d bytes", x.artefacts.Load(), x.bytes.Load())
	}
	if got := b.get("/pypi/files/base-lib/" + r.file); got.body != string(r.body) || x.artefacts.Load() != 1 || b.last().Source != "cache" {
		t.Errorf("second time: %d fetches, event %+v", x.artefacts.Load(), b.last())
	}
	if got := b.get("/pypi/files/base-lib/"+r.file, "Range", "bytes=100-199"); got.status != 206 || got.body != string(r.body[100:200]) {
		t.Errorf("a range: %d, %d bytes", got.status, len(got.body))
	}
}

func TestWrongAndCutFilesBreakTheTransferAndSayWhy(t *testing.T) {
	bad, cut := wheel("bad", "1.0", "2020-01-01"), wheel("cut", "1.0", "2020-01-01")
	bad.corrupt, cut.cut = true, true
	x := newIndex(t, bad, cut)
	b := newBed(t, x.upstream(), cache.Config{})
	for _, r := range []*release{bad, cut} {
		for range 2 {
			got := b.get("/pypi/files/" + r.name + "/" + r.file)
			if got.status == http.StatusOK && got.err == nil {
				t.Errorf("%s: the client took %d bytes for a whole file", r.name, len(got.body))
			}
			e := b.last()
			want := "sha256"
			if r == cut {
				want = "broke off"
			}
			if !strings.Contains(e.Error, want) {
				t.Errorf("%s: event %+v", r.name, e)
			}
		}
	}
	// Two pages come to be kept, and nothing else is.
	wait.Until(t, 10*time.Second, func() bool { return b.cache.Stats().Objects == 2 })
	if n := x.artefacts.Load(); n != 4 {
		t.Errorf("upstream was asked %d times: what is wrong is asked for again each time", n)
	}
}

func TestADeadUpstreamIsToldAndWhatIsHereGoesOn(t *testing.T) {
	x := newIndex(t, library()...)
	b := newBed(t, x.upstream(), cache.Config{})
	r := x.projects["base-lib"][0]
	if got := b.get("/pypi/files/base-lib/" + r.file); got.status != 200 {
		t.Fatal(got.status)
	}
	x.dead.Store(true)
	if got := b.get("/pypi/files/base-lib/" + r.file); got.body != string(r.body) {
		t.Errorf("a cached file: %d", got.status)
	}
	if _, status := b.page("base-lib"); status != 200 {
		t.Errorf("a cached page: %d", status)
	}
	for _, path := range []string{"/pypi/simple/app/", "/pypi/files/base-lib/" + x.projects["base-lib"][2].file, "/pypi/at/127.0.0.1/x/app-1.0.tar.gz"} {
		if got := b.get(path); got.status != http.StatusServiceUnavailable || got.err != nil || !strings.Contains(got.body, "does not answer") {
			t.Errorf("%s: %d %s", path, got.status, got.body)
		}
	}
}

func TestOfflineServesWhatIsHere(t *testing.T) {
	x := newIndex(t, library()...)
	dir := filepath.Join(t.TempDir(), "cache")
	b := newBed(t, x.upstream(), cache.Config{Dir: dir})
	r := x.projects["base-lib"][0]
	b.get("/pypi/files/base-lib/" + r.file)
	if err := b.cache.Close(); err != nil {
		t.Fatal(err)
	}
	x.dead.Store(true)
	b = newBed(t, x.upstream(), cache.Config{Dir: dir, Offline: true})
	b.set(policy.World{AsOf: date("2021-01-01")})
	if got := b.get("/pypi/files/base-lib/" + r.file); got.body != string(r.body) {
		t.Errorf("%d %s", got.status, got.body)
	}
	if got := b.get("/pypi/files/base-lib/" + x.projects["base-lib"][2].file); got.status != http.StatusServiceUnavailable || !strings.Contains(got.body, "offline") {
		t.Errorf("%d %s", got.status, got.body)
	}
}

func TestOfflineServesWhatTheSecondUpstreamHad(t *testing.T) {
	mine, public := newIndex(t, wheel("inner", "1.0", "2020-01-01")), newIndex(t, wheel("app", "1.0", "2020-01-01"))
	u := mine.upstream()
	u.URLs = append(u.URLs, public.upstream().URLs...)
	dir := filepath.Join(t.TempDir(), "cache")
	r := public.projects["app"][0]
	for _, offline := range []bool{false, true} {
		b := newBed(t, u, cache.Config{Dir: dir, Offline: offline})
		if _, status := b.page("app"); status != http.StatusOK {
			t.Errorf("offline %v: page %d", offline, status)
		}
		for _, path := range []string{"/pypi/files/app/" + r.file, "/pypi/pypi/app/json"} {
			if got := b.get(path); got.status != http.StatusOK {
				t.Errorf("offline %v: %s: %d %s", offline, path, got.status, got.body)
			}
		}
		wait.Until(t, 10*time.Second, func() bool { return b.cache.Stats().Objects == 3 })
		if err := b.cache.Close(); err != nil {
			t.Fatal(err)
		}
	}
}

func TestTheFirstUpstreamThatHasAProjectAnswersForIt(t *testing.T) {
	mine := newIndex(t, wheel("inner", "1.0", "2020-01-01"))
	public := newIndex(t, wheel("inner", "99.0", "2020-01-01"), wheel("app", "1.0", "2020-01-01"))
	u := mine.upstream()
	u.URLs = append(u.URLs, public.upstream().URLs...)
	b := newBed(t, u, cache.Config{})
	if page, _ := b.page("inner"); !slices.Equal(page.Versions, []string{"1.0"}) {
		t.Errorf("inner has %v", page.Versions)
	}
	if _, status := b.page("app"); status != 200 {
		t.Errorf("app: %d", status)
	}
	b = newBed(t, u, cache.Config{})
	mine.dead.Store(true)
	if _, status := b.page("inner"); status != http.StatusServiceUnavailable {
		t.Errorf("the second answers for the first, which is away: %d", status)
	}
}

func TestVersionsInFileNames(t *testing.T) {
	tests := []struct{ project, file, want string }{
		{"base-lib", "base_lib-1.0-py3-none-any.whl", "1.0"},
		{"base-lib", "Base.Lib-1.0-1-cp311-abi3-manylinux1_x86_64.whl", "1.0"},
		{"base-lib", "base-lib-1.0.tar.gz", "1.0"},
		{"base-lib", "base_lib-1.0-beta1.zip", "1.0-beta1"},
		{"torch", "torch-2.0+cu118-cp311-cp311-linux_x86_64.whl", "2.0+cu118"},
		{"foo", "foo-1.0.win32-py2.7.exe", "1.0"},
		{"foo", "foo-1.0-py2.7.egg", "1.0"},
		{"foo", "foo-1.0.linux-x86_64.tar.gz", "1.0"},
		{"foo", "foo-1.0-1.noarch.rpm", "1.0"},
		{"foo-2", "foo-2-1.0.tgz", "1.0"},
		{"foo", "foo.tar.gz", ""},
		{"foo", "foo-1.0.asc", ""},
		{"foo", "bar-1.0.tar.gz", ""},
		{"foo", "foo-1.whl", ""},
	}
	for _, tt := range tests {
		if got := fileVersion(tt.project, tt.file, nil); got != tt.want {
			t.Errorf("%s: %q, want %q", tt.file, got, tt.want)
		}
	}
	if got := fileVersion("foo", "foo-1.0-x-2.zip", map[string]bool{"1.0-x": true, "1.0": true}); got != "1.0-x" {
		t.Errorf("with upstream's list: %q", got)
	}
	if diff := cmp.Diff([]string{"python-dateutil", "python"}, candidates("python-dateutil-2.8.2.tar.gz")); diff != "" {
		t.Error(diff)
	}
	if diff := cmp.Diff([]string{"base-lib"}, candidates("base_lib-1.0-py3-none-any.whl")); diff != "" {
		t.Error(diff)
	}
}

func TestVersionsAreInTheOrderOfPEP440(t *testing.T) {
	order := []string{
		"not a version", "1.0.dev1", "1.0a1.dev1", "1.0a1", "1.0a1.post1", "1.0b2", "1.0rc1", "1.0", "1.0+abc", "1.0+abc.5", "1.0+5",
		"1.0.post1.dev2", "1.0.post1", "1.0.1", "1.1.dev0", "1.10", "2", "10.0", "1!0.1",
	}
	for i := range order {
		for j := range order {
			if got, want := parseVersion(order[i]).compare(parseVersion(order[j])), cmpInt(i, j); got != want {
				t.Errorf("compare(%s, %s) = %d", order[i], order[j], got)
			}
		}
	}
	for _, same := range [][2]string{{"1.0", "1"}, {"1.0-1", "1.0.post1"}, {"V1.0", "1.0"}, {"1.0alpha1", "1.0a1"}, {"1.0-RC.1", "1.0c1"}, {"1.0.0+AbC", "1+abc"}} {
		if parseVersion(same[0]).compare(parseVersion(same[1])) != 0 {
			t.Errorf("%s and %s differ", same[0], same[1])
		}
	}
	rapid.Check(t, func(t *rapid.T) {
		gen := rapid.StringMatching(`(1!)?[0-9](\.[0-9]{1,2}){0,2}((a|b|rc)[0-9])?(\.post[0-9])?(\.dev[0-9])?(\+[a-z0-9]{1,2})?|[a-z.]{0,5}`)
		a, b, c := parseVersion(gen.Draw(t, "a")), parseVersion(gen.Draw(t, "b")), parseVersion(gen.Draw(t, "c"))
		if a.compare(b) != -b.compare(a) {
			t.Fatalf("%s, %s: no order", a.text, b.text)
		}
		if a.compare(b) <= 0 && b.compare(c) <= 0 && a.compare(c) > 0 {
			t.Fatalf("%s, %s, %s: not transitive", a.text, b.text, c.text)
		}
	})
}

func cmpInt(a, b int) int {
	switch {
	case a < b:
		return -1
	case a > b:
		return 1
	}
	return 0
}

func FuzzPage(f *testing.F) {
	f.Add("text/html", `<a href="/x/app-1.0.tar.gz#sha256=aa" data-yanked>x</a>`)
	f.Add(typeJSON, `{"meta":{"api-version":"1.0"},"files":[{"filename":"app-1.0.tar.gz","url":"/x/app-1.0.tar.gz","hashes":{},"yanked":"x","core-metadata":true,"upload-time":"2020-01-01T00:00:00Z","size":1}]}`)
	f.Add("", `{"meta":{"api-version":"1.0"},"files":[{"filename":"../../etc","url":"file:///etc"}]}`)
	f.Fuzz(func(t *testing.T, contentType, body string) {
		p, err := parsePage("app", contentType, "https://up.example/simple/app/", []byte(body))
		if err != nil {
			return
		}
		for _, fl := range p.files {
			if strings.ContainsAny(fl.name, "/\\") || fl.name == "" || !strings.HasPrefix(fl.url, "http") {
				t.Errorf("a file %q at %q", fl.name, fl.url)
			}
			candidates(fl.name)
		}
		raw, err := p.json("http://mirror.example/pypi", p.files)
		if err != nil {
			t.Fatal(err)
		}
		again, err := parsePage("app", typeJSON, "http://mirror.example/pypi/simple/app/", raw)
		if err != nil || len(again.files) != len(p.files) {
			t.Errorf("the page is not read back: %v, %d of %d files", err, len(again.files), len(p.files))
		}
		again, err = parsePage("app", "text/html", "http://mirror.example/pypi/simple/app/", p.html("http://mirror.example/pypi", p.files))
		if err != nil || len(again.files) != len(p.files) {
			t.Errorf("the HTML page is not read back: %v, %d of %d files", err, len(again.files), len(p.files))
		}
	})
}
