package packages

import (
	"encoding/json"
	"maps"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/sandsea/sandsea/internal/policy"
)

// npmLock makes a lock file with this machine's npm, as a developer's repository has it: with the registry's own URLs.
func npmLock(t testing.TB, manifest string) []byte {
	t.Helper()
	dir := t.TempDir()
	if err := os.WriteFile(filepath.Join(dir, "package.json"), []byte(manifest), 0o600); err != nil {
		t.Fatal(err)
	}
	cmd := exec.CommandContext(t.Context(), "npm", "install", "--package-lock-only", "--no-audit", "--no-fund", "--ignore-scripts",
		"--omit-lockfile-registry-resolved=false")
	cmd.Dir = dir
	if out, err := cmd.CombinedOutput(); err != nil {
		t.Fatalf("npm install --package-lock-only: %v\n%s", err, out)
	}
	lock, err := os.ReadFile(filepath.Join(dir, "package-lock.json"))
	if err != nil {
		t.Fatal(err)
	}
	return lock
}

// npmProject is a shell line that makes the folder /w of a project.
func npmProject(manifest string, lock []byte) string {
	return "mkdir -p /w && cd /w && cat >package.json <<'E'\n" + manifest + "\nE\ncat >package-lock.json <<'E'\n" + string(lock) + "\nE\n"
}

func TestNpmCiInstallsFromALockFileAndTheSecondTimeFromTheCache(t *testing.T) {
	url := registry(t, policy.NPM, "/ms")
	node := nodeKit.use(t)
	const manifest = `{"name":"w","version":"1.0.0","dependencies":{"express":"4.21.2","typescript":"5.7.2"}}`
	lock := npmLock(t, manifest)
	if !strings.Contains(string(lock), `"resolved": "`+url+"/") {
		t.Fatalf("the lock file has no URL of the registry: %s", lock)
	}
	b := twice(t, policy.NPM, npmProject(manifest, lock)+"npm ci --no-audit --no-fund", 60, node)
	b.sh(`cd /w && node -e 'require("express")()' && node node_modules/typescript/bin/tsc --version | grep 5.7.2`)
	var in struct {
		Packages map[string]struct{ Resolved string }
	}
	if err := json.Unmarshal(lock, &in); err != nil {
		t.Fatal(err)
	}
	if got := len(b.files(policy.NPM)); got != len(in.Packages)-1 {
		t.Errorf("%d tarballs for a lock file of %d packages", got, len(in.Packages)-1)
	}
}

// packument is what the registry tells of a package.
type packument struct {
	Time     map[string]time.Time
	Versions map[string]struct{ Dependencies map[string]string }
}

var stable = regexp.MustCompile(`^\d+\.\d+\.\d+$`)

// newest is the highest stable version of a major one, or of all, that was there at a moment; "" if none was.
func (p packument) newest(major string, at time.Time) (best string) {
	for v := range p.Versions {
		if stable.MatchString(v) && strings.HasPrefix(v, major) && !p.Time[v].After(at) && compareVersions(v, best) > 0 {
			best = v
		}
	}
	return best
}

func TestNpmSeesTheWorldAsOfADate(t *testing.T) {
	url := registry(t, policy.NPM, "/ms")
	node := nodeKit.use(t)
	var p, dep packument
	askJSON(t, url+"/debug", "", &p)
	askJSON(t, url+"/ms", "", &dep)
	// The registry's dates may be those of a mirror, so the day is looked for: one on which another version was the newest,
	// and its dependency was there.
	var at time.Time
	var version, depVersion string
	for _, moment := range slices.SortedFunc(maps.Values(p.Time), func(a, b time.Time) int { return b.Compare(a) }) {
		v := p.newest("", moment)
		wants := strings.TrimPrefix(p.Versions[v].Dependencies["ms"], "^")
		d := dep.newest("2.", moment)
		if v != "" && v != p.newest("", time.Now()) && strings.HasPrefix(wants, "2.") && d != "" && compareVersions(d, wants) >= 0 {
			at, version, depVersion = moment, v, d
			if !strings.HasPrefix(p.Versions[v].Dependencies["ms"], "^") {
				depVersion = wants
			}
			break
		}
	}
	if version == "" {
		t.Skip("no day of the registry's proves anything")
	}
	late := p.newest("", time.Now())
	rule := "as_of " + at.UTC().Format(time.RFC3339)
	t.Logf("on %s debug was %s with ms %s; today it is %s", at, version, depVersion, late)
	var want []string
	for v := range p.Versions {
		if !p.Time[v].After(at) {
			want = append(want, v)
		}
	}
	b := open(t, asOf(allow(policy.NPM), at), node)
	var got []string
	out := b.sh("npm view debug versions --json")
	if err := json.Unmarshal([]byte(out), &got); err != nil {
		t.Fatalf("%v: %s", err, out)
	}
	slices.Sort(want)
	slices.Sort(got)
	if !slices.Equal(got, want) {
		t.Errorf("npm view: got %v, and the registry published %v until then", got, want)
	}
	if got := strings.TrimSpace(b.sh("npm view debug version")); got != version {
		t.Errorf("latest: got %s, want %s", got, version)
	}
	b.sh("mkdir /w && cd /w && npm init -y >/dev/null && npm install --no-audit --no-fund debug")
	for name, want := range map[string]string{"debug": version, "ms": depVersion} {
		if got := strings.TrimSpace(b.sh("cd /w && node -p 'require(\"./node_modules/" + name + "/package.json\").version'")); got != want {
			t.Errorf("%s: %s was installed, want %s", name, got, want)
		}
	}
	b.shortened(policy.NPM, "debug", rule)

	// A lock file of today is refused by name.
	manifest := `{"name":"late","version":"1.0.0","dependencies":{"debug":"` + late + `"}}`
	b.refused(strings.ReplaceAll(npmProject(manifest, npmLock(t, manifest)), "/w", "/late")+"npm ci --no-audit --no-fund",
		"403", "debug "+late, rule)
	b.denied(policy.NPM, "debug", rule)
}

func TestNpmDoesNotFindWhatIsDenied(t *testing.T) {
	registry(t, policy.NPM, "/ms")
	p := allow(policy.NPM)
	p.Deny = []string{"npm:ansi-styles", "npm:chalk@4.1.2"}
	b := open(t, p, nodeKit.use(t))
	b.refused("npm view ansi-styles version", "403", "deny npm:ansi-styles")
	b.refused("npm view chalk@4.1.2 version && exit 1 || npm pack chalk@4.1.2", "chalk")
	// What needs it cannot be installed, under an alias neither.
	b.refused("mkdir /w && cd /w && npm init -y >/dev/null && npm install --no-audit --no-fund x@npm:ansi-styles", "403", "deny npm:ansi-styles")
	b.refused("cd /w && npm install --no-audit --no-fund chalk@4.1.1", "deny npm:ansi-styles")
	b.denied(policy.NPM, "ansi-styles", "deny npm:ansi-styles")
}
