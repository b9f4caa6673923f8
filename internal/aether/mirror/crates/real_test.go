package crates_test

import (
	"encoding/json"
	"net/http"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"golang.org/x/mod/semver"

	"github.com/sandsea/sandsea/internal/aether/cache"
	"github.com/sandsea/sandsea/internal/aether/mirror/crates"
	"github.com/sandsea/sandsea/internal/aether/mirror/source/sourcetest"
	"github.com/sandsea/sandsea/internal/aether/upstream"
	"github.com/sandsea/sandsea/internal/policy"
)

// Cargo itself, against the index that this machine uses, led here by the configuration that sandboxes get.
func TestCargo(t *testing.T) {
	const crate, file = "itoa", "/it/oa/itoa"
	u := sourcetest.Discovered(t, policy.Crates, file, "cargo")
	asOf := sourcetest.Day("2023-12-01")
	before, after := newestAround(t, u, file, asOf)
	m := sourcetest.Serve(t, crates.New(sourcetest.NewSource(t, u), u), policy.World{AsOf: asOf})

	root := t.TempDir()
	m.Guest(policy.Crates, root)
	dir := filepath.Join(root, "home", "user", "project")
	if err := os.MkdirAll(filepath.Join(dir, "src"), 0o755); err != nil {
		t.Fatal(err)
	}
	write := func(name, body string) {
		t.Helper()
		if err := os.WriteFile(filepath.Join(dir, name), []byte(body), 0o600); err != nil {
			t.Fatal(err)
		}
	}
	manifest := "[package]\nname = \"x\"\nversion = \"0.1.0\"\nedition = \"2021\"\n"
	write("Cargo.toml", manifest)
	write("src/main.rs", "fn main() {}\n")
	env := []string{"CARGO_HOME=" + filepath.Join(root, "cargo"), "CARGO_NET_RETRY=0"}

	if out, err := sourcetest.Run(t, dir, env, "cargo", "add", crate); err != nil {
		t.Fatalf("add: %v: %s", err, out)
	}
	if out, err := sourcetest.Run(t, dir, env, "cargo", "fetch"); err != nil {
		t.Fatalf("fetch: %v: %s", err, out)
	}
	lock, err := os.ReadFile(filepath.Join(dir, "Cargo.lock"))
	if err != nil || !strings.Contains(string(lock), "name = \""+crate+"\"\nversion = \""+before+"\"") {
		t.Errorf("the newest of %s before %s is %s, but the lock file has: %v %s", crate, asOf, before, err, lock)
	}
	fetched := 0
	for _, e := range m.Events() {
		if e.Kind == "file" && e.Name == crate && e.Version == before && e.Error == "" && e.Digest != "" {
			fetched++
		}
	}
	if fetched != 1 {
		t.Errorf("crate reported %d times", fetched)
	}

	// A later version is not there to resolve, and cannot be downloaded where a lock file names it.
	write("Cargo.toml", manifest+"[dependencies]\n"+crate+" = \"="+after+"\"\n")
	_ = os.Remove(filepath.Join(dir, "Cargo.lock"))
	if out, err := sourcetest.Run(t, dir, env, "cargo", "fetch"); err == nil {
		t.Errorf("a later version was found: %s", out)
	}
	if got := m.Get("/crates/" + crate + "/" + after + "/download"); got.Status != http.StatusForbidden || !strings.HasPrefix(got.Rule(), policy.RuleAsOf+" 2023") {
		t.Errorf("a later crate: %d, rule %q", got.Status, got.Rule())
	}

	m.In(policy.World{Deny: []string{"crates:" + crate}})
	out, err := sourcetest.Run(t, dir, append(env, "CARGO_HOME="+filepath.Join(root, "cargo2")), "cargo", "fetch")
	if err == nil || !strings.Contains(out, "403") || !strings.Contains(out, "deny crates:"+crate) {
		t.Errorf("a denied crate: %v: %s", err, out)
	}
}

// newestAround asks the index itself for the newest releases up to a date and of all.
func newestAround(t *testing.T, u upstream.Upstream, file string, asOf time.Time) (before, after string) {
	t.Helper()
	b, _, _, err := sourcetest.NewSource(t, u).Read(t.Context(), u.URLs[0]+file, cache.Options{})
	if err != nil {
		t.Fatal(err)
	}
	for line := range strings.Lines(string(b)) {
		var r struct {
			Version string    `json:"vers"`
			At      time.Time `json:"pubtime"`
			Yanked  bool      `json:"yanked"`
		}
		if err := json.Unmarshal([]byte(line), &r); err != nil {
			t.Fatal(err)
		}
		v := "v" + r.Version
		if r.Yanked || semver.Prerelease(v) != "" {
			continue
		}
		if r.At.IsZero() {
			t.Skip("this index gives no dates")
		}
		if !r.At.After(asOf) && semver.Compare(v, "v"+before) > 0 {
			before = r.Version
		}
		if semver.Compare(v, "v"+after) > 0 {
			after = r.Version
		}
	}
	if before == "" || before == after {
		t.Fatalf("releases before and after %s: %q and %q", asOf, before, after)
	}
	return before, after
}
