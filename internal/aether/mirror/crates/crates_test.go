package crates_test

import (
	"crypto/sha256"
	"encoding/hex"
	"fmt"
	"net/http"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"

	"github.com/sandsea/sandsea/internal/aether/mirror"
	"github.com/sandsea/sandsea/internal/aether/mirror/crates"
	"github.com/sandsea/sandsea/internal/aether/mirror/source/sourcetest"
	"github.com/sandsea/sandsea/internal/aether/upstream"
	"github.com/sandsea/sandsea/internal/policy"
)

func sum(body string) string {
	s := sha256.Sum256([]byte(body))
	return hex.EncodeToString(s[:])
}

// line of an index; when is empty for a registry that gives no dates.
func line(name, version, when string) string {
	l := fmt.Sprintf(`{"name":%q,"vers":%q,"deps":[],"cksum":%q,"features":{},"yanked":false`, name, version, sum(name+version))
	if when != "" {
		l += fmt.Sprintf(`,"pubtime":"%sT12:00:00Z"`, when)
	}
	return l + "}\n"
}

func start(t testing.TB, w policy.World) (*sourcetest.Upstream, *sourcetest.Mount) {
	up := sourcetest.NewUpstream(t)
	up.Put("/config.json", fmt.Sprintf(`{"dl":"%s/dl","api":"%s"}`, up.URL, up.URL))
	up.Put("/se/rd/serde_x", line("Serde_X", "1.0.0", "2023-01-01")+line("Serde_X", "1.1.0", "2024-01-01")+
		line("Serde_X", "2.0.0+meta", "2025-01-01")+line("Serde_X", "0.1.0", ""))
	for _, v := range []string{"1.0.0", "1.1.0", "2.0.0+meta", "0.1.0"} {
		up.Put("/dl/Serde_X/"+v+"/download", "Serde_X"+v)
	}
	u := upstream.Upstream{URLs: []string{up.URL}}
	return up, sourcetest.Serve(t, crates.New(sourcetest.NewSource(t, u), u), w)
}

func versions(body string) []string {
	var vs []string
	for l := range strings.Lines(body) {
		_, rest, _ := strings.Cut(l, `"vers":"`)
		v, _, _ := strings.Cut(rest, `"`)
		vs = append(vs, v)
	}
	return vs
}

func TestIndexAndCratesAgree(t *testing.T) {
	every := []string{"1.0.0", "1.1.0", "2.0.0+meta", "0.1.0"}
	for _, c := range []struct {
		name  string
		world policy.World
		want  []string
		rules map[string]string // of what is missing; "" of the rest
	}{
		{"today", policy.World{}, every, nil},
		{"a date", policy.World{AsOf: sourcetest.Day("2024-06-01")}, []string{"1.0.0", "1.1.0"}, map[string]string{"2.0.0+meta": policy.RuleAsOf + " 20", "0.1.0": policy.RuleUndated}},
		{
			"a date and a pin",
			policy.World{AsOf: sourcetest.Day("2023-06-01"), Pin: []string{"crates:serde-x@0.1.0"}},
			[]string{"1.0.0", "0.1.0"},
			map[string]string{"1.1.0": policy.RuleAsOf + " 20"},
		},
		{"a denied version", policy.World{Deny: []string{"crates:SERDE-x@1.1.0"}}, []string{"1.0.0", "2.0.0+meta", "0.1.0"}, map[string]string{"1.1.0": policy.RuleDeny}},
	} {
		t.Run(c.name, func(t *testing.T) {
			_, m := start(t, c.world)
			got := m.Get("/index/se/rd/serde_x")
			if got.Status != http.StatusOK {
				t.Fatalf("index: %d %s", got.Status, got.Body)
			}
			if diff := cmp.Diff(c.want, versions(got.Body)); diff != "" {
				t.Errorf("index (-want +got):\n%s", diff)
			}
			shown := map[string]bool{}
			for _, v := range c.want {
				shown[v] = true
			}
			for _, v := range every {
				got := m.Get("/crates/Serde_X/" + v + "/download")
				switch {
				case shown[v] && got.Body != "Serde_X"+v:
					t.Errorf("crate %s: %d %s", v, got.Status, got.Body)
				case !shown[v] && (got.Status != http.StatusForbidden || !strings.HasPrefix(got.Rule(), c.rules[v])):
					t.Errorf("crate %s: got %d, rule %q, want rule %q", v, got.Status, got.Rule(), c.rules[v])
				}
			}
		})
	}
}

func TestNothingLeftIsARefusal(t *testing.T) {
	_, m := start(t, policy.World{AsOf: sourcetest.Day("2020-01-01")})
	if got := m.Get("/index/se/rd/serde_x"); got.Status != http.StatusForbidden || !strings.HasPrefix(got.Rule(), policy.RuleAsOf) {
		t.Errorf("got %d, rule %q", got.Status, got.Rule())
	}
}

func TestDeniedCratesUnderEverySpelling(t *testing.T) {
	for _, entry := range []string{"crates:serde_x", "crates:Serde-X", "crates:SERDE_X"} {
		up, m := start(t, policy.World{Deny: []string{entry}})
		for _, path := range []string{"/index/se/rd/serde_x", "/index/se/rd/serde-x", "/crates/serde-x/1.0.0/download", "/crates/SERDE_x/1.0.0/download"} {
			if got := m.Get(path); got.Status != http.StatusForbidden || !strings.HasPrefix(got.Rule(), policy.RuleDeny) {
				t.Errorf("%s with %s denied: got %d, rule %q", path, entry, got.Status, got.Rule())
			}
		}
		if asked := up.Asked(); len(asked) > 0 {
			t.Errorf("asked upstream for %v", asked)
		}
	}
}

func TestConfigLeadsHere(t *testing.T) {
	_, m := start(t, policy.World{})
	want := `{"dl":"` + m.URL + `/crates","api":"` + m.URL + `"}`
	if got := m.Get("/index/config.json"); got.Body != want {
		t.Errorf("got %s, want %s", got.Body, want)
	}
	if got := m.Get("/api/v1/crates?q=serde"); got.Status != http.StatusNotFound || !strings.Contains(got.Body, "no search") {
		t.Errorf("search: %d %s", got.Status, got.Body)
	}
}

func TestIndexHasAnETagOfWhatTheCallerSees(t *testing.T) {
	_, m := start(t, policy.World{})
	first := m.Get("/index/se/rd/serde_x")
	tag := first.Header.Get("ETag")
	if got := m.Get("/index/se/rd/serde_x", "If-None-Match", tag); got.Status != http.StatusNotModified || got.Body != "" {
		t.Errorf("same index: %d", got.Status)
	}
	m.In(policy.World{AsOf: sourcetest.Day("2024-06-01")})
	if got := m.Get("/index/se/rd/serde_x", "If-None-Match", tag); got.Status != http.StatusOK || got.Header.Get("ETag") == tag {
		t.Errorf("index of another world: %d, ETag %s", got.Status, got.Header.Get("ETag"))
	}
}

func TestWrongCratesBreakOff(t *testing.T) {
	up, m := start(t, policy.World{})
	for name, f := range map[string]sourcetest.File{
		"other bytes": {Body: "Serde_X1.0.1"},
		"too few":     {Body: "Serde_X", Cut: 3},
	} {
		up.PutFile("/dl/Serde_X/1.0.0/download", f)
		if got := m.Get("/crates/Serde_X/1.0.0/download"); !got.Broken && got.Status == http.StatusOK {
			t.Errorf("%s: %d %q", name, got.Status, got.Body)
		}
	}
	up.Put("/dl/Serde_X/1.0.0/download", "Serde_X1.0.0")
	if got := m.Get("/crates/Serde_X/1.0.0/download"); got.Body != "Serde_X1.0.0" {
		t.Errorf("right bytes again: %d %q", got.Status, got.Body)
	}
}

func TestWrongIndexesAreErrors(t *testing.T) {
	up, m := start(t, policy.World{})
	for name, body := range map[string]string{
		"another crate": line("other", "1.0.0", ""),
		"no json":       "<html>\n",
		"a path":        line("abcd", "1.0.0/../..", ""),
		"no checksum":   `{"name":"abcd","vers":"1.0.0","cksum":"x"}`,
	} {
		up.PutFile("/ab/cd/abcd", sourcetest.File{Body: body})
		if got := m.Get("/index/ab/cd/abcd"); got.Status != http.StatusBadGateway {
			t.Errorf("%s: got %d", name, got.Status)
		}
		up, m = start(t, policy.World{})
	}
}

func TestDownloadTemplates(t *testing.T) {
	up, m := start(t, policy.World{})
	up.Put("/config.json", `{"dl":"`+up.URL+`/t/{lowerprefix}/{prefix}/{crate}-{version}.{sha256-checksum}"}`)
	up.Put("/t/se/rd/Se/rd/Serde_X-1.0.0."+sum("Serde_X1.0.0"), "Serde_X1.0.0")
	if got := m.Get("/crates/serde_x/1.0.0/download"); got.Body != "Serde_X1.0.0" {
		t.Errorf("got %d %s", got.Status, got.Body)
	}
}

func TestUnknownAndMalformed(t *testing.T) {
	_, m := start(t, policy.World{})
	for _, path := range []string{
		"/index/no/ne/none", "/index/xx/xx/serde_x", "/index/se/rd/../../etc", "/index/Se/rd/Serde_x", "/index/",
		"/crates/serde_x/9.9.9/download", "/crates/serde_x/..%2f..%2fx/download", "/", "/crates/a/b",
	} {
		if got := m.Get(path); got.Status != http.StatusNotFound {
			t.Errorf("%s: got %d", path, got.Status)
		}
	}
}

func TestMatch(t *testing.T) {
	u := upstream.Upstream{URLs: []string{"https://index.test/sparse"}, Files: []string{"https://files.test/crates"}}
	s := crates.New(sourcetest.NewSource(t, u), u)
	for _, c := range []struct{ host, path, want string }{
		{"index.test", "/sparse/config.json", "/index/config.json"},
		{"index.test", "/sparse/se/rd/serde", "/index/se/rd/serde"},
		{"files.test", "/crates/serde/1.0.0/download", "/crates/serde/1.0.0/download"},
		{"files.test", "/else", ""},
		{"index.test", "/else", ""},
	} {
		if got, ok := s.Match("https", c.host, c.path); got != c.want || ok != (c.want != "") {
			t.Errorf("%s%s: got %q %v, want %q", c.host, c.path, got, ok, c.want)
		}
	}
}

var _ mirror.Service = (*crates.Service)(nil)
