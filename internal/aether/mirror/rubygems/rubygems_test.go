package rubygems_test

import (
	"crypto/md5"
	"crypto/sha256"
	"encoding/base64"
	"encoding/hex"
	"fmt"
	"net/http"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"

	"github.com/sandsea/sandsea/internal/aether/mirror"
	"github.com/sandsea/sandsea/internal/aether/mirror/rubygems"
	"github.com/sandsea/sandsea/internal/aether/mirror/source/sourcetest"
	"github.com/sandsea/sandsea/internal/aether/upstream"
	"github.com/sandsea/sandsea/internal/policy"
)

func sha(s string) string {
	h := sha256.Sum256([]byte(s))
	return hex.EncodeToString(h[:])
}

func md5Of(s string) string {
	h := md5.Sum([]byte(s))
	return hex.EncodeToString(h[:])
}

const versions = "created_at: 2026-01-01T00:00:00Z\n---\nother 1.0.0 0123\nrack 1.0.0,1.0.0-java,2.0.0,3.0.0 4567\nrack 3.1.0 89ab\n"

func start(t testing.TB, w policy.World) (*sourcetest.Upstream, *sourcetest.Mount) {
	up := sourcetest.NewUpstream(t)
	up.Put("/versions", versions)
	up.Put("/names", "---\nother\nrack\n")
	info := "---\n"
	for _, v := range []string{"1.0.0", "1.0.0-java", "2.0.0", "3.0.0"} {
		body := "gem rack " + v
		info += fmt.Sprintf("%s dep:>= 1.0&< 2|checksum:%s,ruby:>= 2.0\n", v, sha(body))
		up.Put("/gems/rack-"+v+".gem", body)
		up.Put("/quick/Marshal.4.8/rack-"+v+".gemspec.rz", "spec "+v)
	}
	up.Put("/info/rack", info)
	up.Put("/api/v1/versions/rack.json", `[
		{"number":"2.0.0","platform":"ruby","created_at":"2024-01-01T12:00:00.000Z"},
		{"number":"1.0.0","platform":"ruby","created_at":"2023-01-01T12:00:00.000Z"},
		{"number":"1.0.0","platform":"java","created_at":"2023-02-01T12:00:00.000Z"}]`)
	up.Put("/specs.4.8.gz", "marshalled")
	u := upstream.Upstream{URLs: []string{up.URL}}
	return up, sourcetest.Serve(t, rubygems.New(sourcetest.NewSource(t, u), u), w)
}

func shown(info string) []string {
	var vs []string
	for l := range strings.Lines(strings.TrimPrefix(info, "---\n")) {
		v, _, _ := strings.Cut(l, " ")
		vs = append(vs, v)
	}
	return vs
}

func TestInfoAndGemsAgree(t *testing.T) {
	every := []string{"1.0.0", "1.0.0-java", "2.0.0", "3.0.0"}
	for _, c := range []struct {
		name  string
		world policy.World
		want  []string
		rules map[string]string
	}{
		{"today", policy.World{}, every, nil},
		{
			"a date", policy.World{AsOf: sourcetest.Day("2024-06-01")}, every[:3], map[string]string{"3.0.0": policy.RuleUndated},
		},
		{
			"a date and a pin",
			policy.World{AsOf: sourcetest.Day("2023-01-15"), Pin: []string{"rubygems:rack@3.0.0"}},
			[]string{"1.0.0", "3.0.0"},
			map[string]string{"1.0.0-java": policy.RuleAsOf + " 20", "2.0.0": policy.RuleAsOf + " 20"},
		},
		{
			"a denied version",
			policy.World{Deny: []string{"rubygems:RACK@1.0"}},
			every[2:],
			map[string]string{"1.0.0": policy.RuleDeny, "1.0.0-java": policy.RuleDeny},
		},
	} {
		t.Run(c.name, func(t *testing.T) {
			_, m := start(t, c.world)
			got := m.Get("/info/rack")
			if diff := cmp.Diff(c.want, shown(got.Body)); diff != "" {
				t.Fatalf("info: %d (-want +got):\n%s", got.Status, diff)
			}
			if tag, want := got.Header.Get("ETag"), `"`+md5Of(got.Body)+`"`; tag != want {
				t.Errorf("ETag: got %s, want %s", tag, want)
			}
			sum := sha256.Sum256([]byte(got.Body))
			if d, want := got.Header.Get("Repr-Digest"), "sha-256=:"+base64.StdEncoding.EncodeToString(sum[:])+":"; d != want {
				t.Errorf("Repr-Digest: got %s, want %s", d, want)
			}
			visible := map[string]bool{}
			for _, v := range c.want {
				visible[v] = true
			}
			for _, v := range every {
				for path, body := range map[string]string{
					"/gems/rack-" + v + ".gem": "gem rack " + v, "/quick/Marshal.4.8/rack-" + v + ".gemspec.rz": "spec " + v,
				} {
					got := m.Get(path)
					switch {
					case visible[v] && got.Body != body:
						t.Errorf("%s: %d %s", path, got.Status, got.Body)
					case !visible[v] && (got.Status != http.StatusForbidden || !strings.HasPrefix(got.Rule(), c.rules[v])):
						t.Errorf("%s: got %d, rule %q, want rule %q", path, got.Status, got.Rule(), c.rules[v])
					}
				}
			}
		})
	}
}

func TestVersionsSendClientsToInfo(t *testing.T) {
	_, m := start(t, policy.World{})
	if got := m.Get("/versions"); got.Body != versions {
		t.Errorf("today: %d %s", got.Status, got.Body)
	}
	if got := m.Get("/versions", "Range", "bytes=10-19"); got.Status != http.StatusPartialContent || got.Body != versions[10:20] {
		t.Errorf("range: %d %q", got.Status, got.Body)
	}
	m.In(policy.World{Deny: []string{"rubygems:rack@2.0.0"}})
	lines := strings.Split(m.Get("/versions").Body, "\n")
	if lines[2] != "other 1.0.0 0123" || !strings.HasPrefix(lines[3], "rack 1.0.0,1.0.0-java,3.0.0 ") || strings.HasSuffix(lines[3], "4567") || lines[4] != "rack 3.1.0 89ab" {
		t.Errorf("a denied version: %q", lines)
	}
	m.In(policy.World{Deny: []string{"rubygems:rack"}})
	if got := m.Get("/versions"); strings.Contains(got.Body, "rack") || !strings.Contains(got.Body, "other 1.0.0 0123") {
		t.Errorf("a denied gem: %q", got.Body)
	}
	if got := m.Get("/names"); got.Body != "---\nother\n" {
		t.Errorf("names: %q", got.Body)
	}
	m.In(policy.World{AsOf: sourcetest.Day("2023-01-15")})
	got := m.Get("/versions").Body
	if strings.Contains(got, "3.1.0") || strings.Contains(got, " 4567\n") || !strings.Contains(got, "\nrack 0 ") {
		t.Errorf("a date: %q", got)
	}
	m.In(policy.World{AsOf: sourcetest.Day("2024-01-15")})
	if m.Get("/versions").Body == got {
		t.Error("another date gives the same sums, so clients would keep what they have")
	}
}

func TestRangesOfInfoContinueACopy(t *testing.T) {
	_, m := start(t, policy.World{AsOf: sourcetest.Day("2024-06-01")})
	whole := m.Get("/info/rack")
	if got := m.Get("/info/rack", "Range", "bytes=5-", "If-None-Match", `"old"`); got.Status != http.StatusPartialContent || got.Body != whole.Body[5:] {
		t.Errorf("range: %d %q", got.Status, got.Body)
	}
	if got := m.Get("/info/rack", "If-None-Match", whole.Header.Get("ETag")); got.Status != http.StatusNotModified {
		t.Errorf("the same: %d", got.Status)
	}
	if got := m.Get("/info/rack", "Range", "bytes=100000-"); got.Status != http.StatusRequestedRangeNotSatisfiable {
		t.Errorf("behind the end: %d", got.Status)
	}
}

func TestWithoutDatesNothingIsThereUnlessPinned(t *testing.T) {
	for _, status := range []int{http.StatusNotFound, http.StatusForbidden} {
		up, m := start(t, policy.World{AsOf: sourcetest.Day("2030-01-01"), Pin: []string{"rubygems:rack@2.0.0"}})
		up.PutFile("/api/v1/versions/rack.json", sourcetest.File{Status: status})
		if diff := cmp.Diff([]string{"2.0.0"}, shown(m.Get("/info/rack").Body)); diff != "" {
			t.Errorf("list of dates answers %d (-want +got):\n%s", status, diff)
		}
		if got := m.Get("/gems/rack-1.0.0.gem"); got.Rule() != policy.RuleUndated {
			t.Errorf("gem: %d, rule %q", got.Status, got.Rule())
		}
	}
	up, m := start(t, policy.World{AsOf: sourcetest.Day("2030-01-01")})
	up.PutFile("/api/v1/versions/rack.json", sourcetest.File{Status: http.StatusInternalServerError})
	if got := m.Get("/info/rack"); got.Status != http.StatusServiceUnavailable {
		t.Errorf("list of dates fails: %d %s", got.Status, got.Body)
	}
}

func TestListsAreOfAllSources(t *testing.T) {
	public, _ := start(t, policy.World{})
	mine := sourcetest.NewUpstream(t)
	mine.Put("/versions", "created_at: 2025-01-01T00:00:00Z\n---\ninner 1.0.0 77\nrack 9.0.0 88\n")
	mine.Put("/names", "---\ninner\nrack\n")
	none := sourcetest.NewUpstream(t) // without a compact index
	u := upstream.Upstream{URLs: []string{mine.URL, none.URL, public.URL}}
	m := sourcetest.Serve(t, rubygems.New(sourcetest.NewSource(t, u), u), policy.World{})
	want := "created_at: 2025-01-01T00:00:00Z\n---\ninner 1.0.0 77\nrack 9.0.0 88\nother 1.0.0 0123\n"
	if got := m.Get("/versions"); got.Body != want {
		t.Errorf("versions: %d %q", got.Status, got.Body)
	}
	if got := m.Get("/names"); got.Body != "---\ninner\nrack\nother\n" {
		t.Errorf("names: %d %q", got.Status, got.Body)
	}
	m.In(policy.World{Deny: []string{"rubygems:rack"}})
	if got := m.Get("/names"); got.Body != "---\ninner\nother\n" {
		t.Errorf("names without a denied one: %d %q", got.Status, got.Body)
	}
}

func TestDatesAreOfTheSourceThatHasTheGem(t *testing.T) {
	public, _ := start(t, policy.World{})
	mine := sourcetest.NewUpstream(t) // it tells no dates, and its gem has the name and the versions of a public one
	mine.Put("/info/rack", "---\n2.0.0 |checksum:"+sha("mine")+"\n")
	mine.Put("/gems/rack-2.0.0.gem", "mine")
	u := upstream.Upstream{URLs: []string{mine.URL, public.URL}}
	m := sourcetest.Serve(t, rubygems.New(sourcetest.NewSource(t, u), u), policy.World{AsOf: sourcetest.Day("2024-06-01")})
	for _, path := range []string{"/info/rack", "/gems/rack-2.0.0.gem"} {
		if got := m.Get(path); got.Rule() != policy.RuleUndated {
			t.Errorf("%s: %d, rule %q: %s", path, got.Status, got.Rule(), got.Body)
		}
	}
}

func TestDeniedGems(t *testing.T) {
	up, m := start(t, policy.World{Deny: []string{"rubygems:Rack"}})
	for _, path := range []string{"/info/rack", "/info/RACK", "/gems/rack-1.0.0.gem", "/gems/rack-1.0.0-java.gem", "/gems/Rack-9.gem", "/quick/Marshal.4.8/rack-1.0.0.gemspec.rz"} {
		if got := m.Get(path); got.Status != http.StatusForbidden || !strings.HasPrefix(got.Rule(), policy.RuleDeny) {
			t.Errorf("%s: %d, rule %q", path, got.Status, got.Rule())
		}
	}
	if asked := up.Asked(); len(asked) > 0 {
		t.Errorf("asked upstream for %v", asked)
	}
}

func TestOldIndexes(t *testing.T) {
	_, m := start(t, policy.World{})
	if got := m.Get("/specs.4.8.gz"); got.Body != "marshalled" {
		t.Errorf("today: %d", got.Status)
	}
	m.In(policy.World{AsOf: sourcetest.Day("2024-01-01")})
	if got := m.Get("/specs.4.8.gz"); got.Status != http.StatusNotFound || !strings.Contains(got.Body, "compact index") {
		t.Errorf("where gems are hidden: %d %s", got.Status, got.Body)
	}
}

func TestWrongGemsBreakOff(t *testing.T) {
	up, m := start(t, policy.World{})
	for name, f := range map[string]sourcetest.File{"other bytes": {Body: "gem rack 1.0.1"}, "too few": {Body: "gem rack 1.0.0", Cut: 3}} {
		up.PutFile("/gems/rack-1.0.0.gem", f)
		if got := m.Get("/gems/rack-1.0.0.gem"); !got.Broken && got.Status == http.StatusOK {
			t.Errorf("%s: %d %q", name, got.Status, got.Body)
		}
	}
	up.Put("/gems/rack-1.0.0.gem", "gem rack 1.0.0")
	if got := m.Get("/gems/rack-1.0.0.gem"); got.Body != "gem rack 1.0.0" {
		t.Errorf("right bytes again: %d", got.Status)
	}
}

func TestUnknownAndMalformed(t *testing.T) {
	up, m := start(t, policy.World{})
	for _, path := range []string{
		"/info/none", "/info/..%2f..%2fx", "/gems/none-1.0.gem", "/gems/rack-9.9.gem", "/gems/rack.gem", "/gems/..%2frack-1.0.0.gem",
		"/api/v1/versions/rack.json", "/api/v1/dependencies?gems=rack", "/quick/Marshal.4.8/rack.gemspec.rz",
	} {
		if got := m.Get(path); got.Status != http.StatusNotFound {
			t.Errorf("%s: got %d", path, got.Status)
		}
	}
	up.Put("/info/bad", "<html>\n")
	if got := m.Get("/info/bad"); got.Status != http.StatusBadGateway {
		t.Errorf("no info: %d", got.Status)
	}
}

var _ mirror.Service = (*rubygems.Service)(nil)
