package npm

import (
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net/http"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/sandsea/sandsea/internal/aether/cache"
	"github.com/sandsea/sandsea/internal/aether/upstream"
	"github.com/sandsea/sandsea/internal/policy"
	"github.com/sandsea/sandsea/internal/testkit/require"
)

// npm runs the machine's own in dir, with no configuration but the mirror and an empty cache.
func (b *bed) npm(dir string, args ...string) (output string, err error) {
	b.t.Helper()
	home := b.t.TempDir()
	cmd := exec.CommandContext(b.t.Context(), "npm", args...)
	cmd.Dir = dir
	cmd.Env = []string{
		"PATH=" + os.Getenv("PATH"), "HOME=" + home, "npm_config_registry=" + b.web.URL + "/npm/", "npm_config_cache=" + filepath.Join(home, "cache"),
		"npm_config_userconfig=" + filepath.Join(home, "none"), "npm_config_globalconfig=" + filepath.Join(home, "none2"),
		"npm_config_update_notifier=false", "npm_config_fetch_retries=0", "npm_config_fund=false", "npm_config_proxy=" + b.web.URL,
	}
	out, err := cmd.CombinedOutput()
	return string(out), err
}

// installed tells the version of a package below dir.
func installed(dir, name string) string {
	b, err := os.ReadFile(filepath.Join(dir, "node_modules", name, "package.json"))
	if err != nil {
		return ""
	}
	var p struct{ Version string }
	if json.Unmarshal(b, &p) != nil {
		return ""
	}
	return p.Version
}

func project(t *testing.T, files map[string]any) string {
	t.Helper()
	dir := t.TempDir()
	for name, v := range files {
		b, err := json.Marshal(v)
		if err == nil {
			err = os.WriteFile(filepath.Join(dir, name), b, 0o600)
		}
		if err != nil {
			t.Fatal(err)
		}
	}
	return dir
}

func TestNpmInstallsTheWorldOfADay(t *testing.T) {
	require.Feature(t, "bin:npm")
	g := newRegistry(t, library()...)
	b := newBed(t, g.upstream(), cache.Config{})
	b.set(policy.World{AsOf: date("2021-12-31")})
	manifest := map[string]any{"package.json": map[string]any{"name": "p", "version": "1.0.0", "dependencies": map[string]string{
		"@org/app": "*", "other": "npm:lib@^1.0.0", // an alias of a package that is there
	}}}
	dir := project(t, manifest)
	out, err := b.npm(dir, "install")
	if err != nil || installed(dir, "@org/app") != "1.0.0" || installed(dir, "lib") != "2.0.0" || installed(dir, "other") != "1.0.1" {
		t.Errorf("@org/app %s, lib %s, other %s: %v\n%s", installed(dir, "@org/app"), installed(dir, "lib"), installed(dir, "other"), err, out)
	}
	before := g.artefacts.Load()
	lock, err := os.ReadFile(filepath.Join(dir, "package-lock.json"))
	if err != nil {
		t.Fatal(err)
	}
	dir = project(t, manifest)
	if err := os.WriteFile(filepath.Join(dir, "package-lock.json"), lock, 0o600); err != nil {
		t.Fatal(err)
	}
	if out, err := b.npm(dir, "ci"); err != nil || installed(dir, "lib") != "2.0.0" || g.artefacts.Load() != before {
		t.Errorf("npm ci asked upstream for %d artefacts: %v\n%s", g.artefacts.Load()-before, err, out)
	}
	out, err = b.npm(dir, "install", "lib@2.1.0")
	if err == nil || !strings.Contains(out, "ETARGET") {
		t.Errorf("a later version: %v\n%s", err, out)
	}
	if out, err := b.npm(dir, "view", "lib", "versions", "dist-tags", "--json"); err != nil || strings.Contains(out, "2.1.0") || strings.Contains(out, "rc.1") || !strings.Contains(out, `"latest": "2.0.0"`) {
		t.Errorf("npm view: %v\n%s", err, out)
	}
	if out, err := b.npm(dir, "view", "lib@2.1.0", "version"); err == nil && strings.TrimSpace(out) != "" {
		t.Errorf("npm view of a later version: %q", out)
	}
	if out, err := b.npm(dir, "audit"); err == nil || !strings.Contains(out, "403") && !strings.Contains(out, "no audit") {
		t.Errorf("npm audit: %v\n%s", err, out)
	}
	b.set(policy.World{Deny: []string{"npm:lib"}})
	dir = project(t, map[string]any{"package.json": map[string]any{"name": "p", "version": "1.0.0", "dependencies": map[string]string{"x": "npm:lib@1.0.0"}}})
	if out, err := b.npm(dir, "install"); err == nil || !strings.Contains(out, "E403") || !strings.Contains(out, "deny npm:lib") {
		t.Errorf("a denied package by an alias: %v\n%s", err, out)
	}
}

func TestNpmCIWithUpstreamsURLsInTheLockFile(t *testing.T) {
	require.Feature(t, "bin:npm")
	g := newRegistry(t, library()...)
	b := newBed(t, g.upstream(), cache.Config{})
	lib := g.packages["lib"]
	lock := func(r *release, sum string) map[string]any {
		return map[string]any{
			"package.json": map[string]any{"name": "p", "version": "1.0.0", "dependencies": map[string]string{"lib": r.version}},
			"package-lock.json": map[string]any{"name": "p", "version": "1.0.0", "lockfileVersion": 3, "requires": true, "packages": map[string]any{
				"":                 map[string]any{"name": "p", "version": "1.0.0", "dependencies": map[string]string{"lib": r.version}},
				"node_modules/lib": map[string]any{"version": r.version, "resolved": g.tarballURL(lib, r), "integrity": sum},
			}},
		}
	}
	b.set(policy.World{AsOf: date("2021-12-31")})
	old, later := lib.releases[1], lib.releases[4]
	dir := project(t, lock(old, integrity(old.body)))
	if out, err := b.npm(dir, "ci"); err != nil || installed(dir, "lib") != old.version {
		t.Errorf("installed %q: %v\n%s", installed(dir, "lib"), err, out)
	}
	dir = project(t, lock(old, integrity(later.body)))
	if out, err := b.npm(dir, "ci"); err == nil || !strings.Contains(out, "EINTEGRITY") {
		t.Errorf("another integrity: %v\n%s", err, out)
	}
	dir = project(t, lock(later, integrity(later.body)))
	out, err := b.npm(dir, "ci")
	if e := b.last(); err == nil || !strings.Contains(out, "E403") || !strings.Contains(out, "as_of 2021-12-31") || !e.Denied || e.Version != "2.1.0" {
		t.Errorf("a locked version after the date: %v, event %+v\n%s", err, e, out)
	}
}

func TestNpmEndsWhenUpstreamIsWrong(t *testing.T) {
	require.Feature(t, "bin:npm")
	g := newRegistry(t, &pkg{name: "lib", tags: map[string]string{"latest": "1.0.0"}, releases: []*release{{version: "1.0.0", time: "2020-01-01", corrupt: true}}})
	b := newBed(t, g.upstream(), cache.Config{})
	dir := project(t, map[string]any{"package.json": map[string]any{"name": "p", "version": "1.0.0"}})
	var exit *exec.ExitError
	if out, err := b.npm(dir, "install", "lib"); !errors.As(err, &exit) || installed(dir, "lib") != "" {
		t.Errorf("wrong bytes: %v\n%s", err, out)
	}
	g.dead.Store(true)
	if out, err := b.npm(dir, "install", "other"); !errors.As(err, &exit) || !strings.Contains(out, "503") {
		t.Errorf("dead: %v\n%s", err, out)
	}
}

func TestNpmAgreesWithTheDatesOfTheMachinesUpstream(t *testing.T) {
	require.Feature(t, "bin:npm")
	all, err := upstream.Discover(t.Context(), upstream.Node{Env: os.Environ()}, nil)
	if err != nil {
		t.Fatal(err)
	}
	u := all[policy.NPM]
	if len(u.URLs) == 0 {
		require.That(t, "net:npm", errors.New(u.Missing))
	}
	t.Cleanup(http.DefaultClient.CloseIdleConnections)
	resp, err := upstream.NewClient(http.DefaultTransport, u).Get(t.Context(), u.URLs[0]+"/left-pad", http.Header{"Accept": {typeAbbreviated}})
	if err == nil {
		_, err = io.Copy(io.Discard, resp.Body)
		resp.Body.Close()
		if resp.StatusCode != http.StatusOK {
			err = fmt.Errorf("it answers %d", resp.StatusCode)
		}
	}
	require.That(t, "net:npm", err)

	b := newBed(t, u, cache.Config{})
	// Upstreams that keep copies of others date versions by the copy, so the day is chosen by what this one says.
	const name = "left-pad"
	p, status := b.packument(name, "application/json")
	if status != http.StatusOK {
		t.Fatalf("packument of %s: %d", name, status)
	}
	var times []time.Time
	for v := range p.Versions {
		if at, err := time.Parse(time.RFC3339Nano, p.Time[v]); err == nil && !parseVersion(v).prerelease() {
			times = append(times, at)
		}
	}
	if len(times) < 3 {
		t.Skip("the machine's upstream tells no dates")
	}
	slices.SortFunc(times, time.Time.Compare)
	asOf := times[len(times)/2]
	want, hidden := "", ""
	for v := range p.Versions {
		at, err := time.Parse(time.RFC3339Nano, p.Time[v])
		switch {
		case err != nil || at.After(asOf):
			hidden = v
		case !parseVersion(v).prerelease() && parseVersion(v).compare(parseVersion(want)) > 0:
			want = v
		}
	}
	b.set(policy.World{AsOf: asOf})
	dir := project(t, map[string]any{"package.json": map[string]any{"name": "p", "version": "1.0.0"}})
	start := time.Now()
	if out, err := b.npm(dir, "install", name); err != nil {
		t.Fatalf("%v\n%s", err, out)
	}
	first := time.Since(start)
	if got := installed(dir, name); got != want {
		t.Errorf("installed %s, and upstream's dates say %s", got, want)
	}
	if out, err := b.npm(dir, "view", name, "version"); err != nil || strings.TrimSpace(out) != want {
		t.Errorf("npm view says %q, %v; want %s", out, err, want)
	}
	if out, err := b.npm(dir, "install", name+"@"+hidden); err == nil || installed(dir, name) != want {
		t.Errorf("a later version: %s", out)
	}
	before := b.cache.Stats().UpstreamBytes
	if err := os.RemoveAll(filepath.Join(dir, "node_modules")); err != nil {
		t.Fatal(err)
	}
	start = time.Now()
	if out, err := b.npm(dir, "ci"); err != nil || installed(dir, name) != want {
		t.Errorf("npm ci: %v\n%s", err, out)
	}
	if n := b.cache.Stats().UpstreamBytes - before; n != 0 {
		t.Errorf("npm ci took %d bytes from upstream", n)
	}
	t.Logf("as of %s: %s %s; install %s, npm ci %s", asOf.Format(time.DateOnly), name, want, first.Round(time.Millisecond), time.Since(start).Round(time.Millisecond))
}
