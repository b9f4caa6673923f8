package packages

import (
	"encoding/json"
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

// crate is a version of one, as the index has it.
type crate struct {
	Version   string    `json:"vers"`
	Yanked    bool      `json:"yanked"`
	Published time.Time `json:"pubtime"`
}

func askCrate(t testing.TB, index, path string) (all []crate) {
	t.Helper()
	for line := range strings.Lines(string(ask(t, index+"/"+path, ""))) {
		var c crate
		if err := json.Unmarshal([]byte(line), &c); err != nil {
			t.Fatalf("%s: %v", path, err)
		}
		all = append(all, c)
	}
	return all
}

// cargoProject is a shell line that makes the folder /w of a project.
const cargoProject = `mkdir -p /w/src && cd /w && : >src/lib.rs && cat >Cargo.toml <<'E'
[package]
name = "w"
version = "0.1.0"
edition = "2021"
[dependencies]
E
`

func TestCargoFetchesAndTheSecondTimeFromTheCache(t *testing.T) {
	registry(t, policy.Crates, "/config.json")
	line := cargoProject + "cat >>Cargo.toml <<'E'\nserde_json = \"1\"\nregex = \"1\"\nE\ncargo fetch"
	b := twice(t, policy.Crates, line, 6, cargoKit.use(t))
	b.sh("cd /w && cargo fetch --locked --offline")
}

// itoa gives the two newest versions of a crate without dependencies, and the world just before the last.
func itoa(t testing.TB) (before, last crate, at time.Time) {
	t.Helper()
	index := registry(t, policy.Crates, "/config.json")
	number := regexp.MustCompile(`^\d+\.\d+\.\d+$`)
	all := slices.DeleteFunc(askCrate(t, index, "it/oa/itoa"), func(c crate) bool {
		return c.Yanked || !number.MatchString(c.Version)
	})
	slices.SortFunc(all, func(a, b crate) int { return compareVersions(a.Version, b.Version) })
	before, last = all[len(all)-2], all[len(all)-1]
	if before.Published.IsZero() || !before.Published.Before(last.Published) {
		t.Skipf("the index does not date the newest versions of itoa: %v, %v", before, last)
	}
	return before, last, last.Published.Add(-time.Second)
}

// cargoLock makes a lock file with this machine's cargo.
func cargoLock(t testing.TB, dependency string) (manifest, lock string) {
	t.Helper()
	dir := t.TempDir()
	manifest = "[package]\nname = \"w\"\nversion = \"0.1.0\"\nedition = \"2021\"\n[dependencies]\n" + dependency + "\n"
	if err := os.Mkdir(filepath.Join(dir, "src"), 0o700); err != nil {
		t.Fatal(err)
	}
	for name, text := range map[string]string{"Cargo.toml": manifest, "src/lib.rs": ""} {
		if err := os.WriteFile(filepath.Join(dir, name), []byte(text), 0o600); err != nil {
			t.Fatal(err)
		}
	}
	cmd := exec.CommandContext(within(t, askLimit), "cargo", "generate-lockfile")
	cmd.Dir = dir
	if out, err := cmd.CombinedOutput(); err != nil {
		t.Fatalf("cargo generate-lockfile: %v\n%s", err, out)
	}
	b, err := os.ReadFile(filepath.Join(dir, "Cargo.lock"))
	if err != nil {
		t.Fatal(err)
	}
	return manifest, string(b)
}

func TestCargoSeesTheWorldAsOfADate(t *testing.T) {
	before, last, at := itoa(t)
	b := open(t, asOf(allow(policy.Crates), at), cargoKit.use(t))
	rule := "as_of " + at.UTC().Format(time.RFC3339)
	b.sh(cargoProject + "cargo add itoa && cargo generate-lockfile && grep -A1 'name = \"itoa\"' Cargo.lock | grep '\"" + before.Version + "\"'")
	if out := b.sh("cargo info --registry sandsea itoa"); !strings.Contains(out, "version: "+before.Version) || strings.Contains(out, last.Version) {
		t.Errorf("cargo info: got %s, want version %s", out, before.Version)
	}
	b.shortened(policy.Crates, "itoa", rule)

	// A lock file of today is refused by name.
	manifest, lock := cargoLock(t, "itoa = \"="+last.Version+"\"")
	b.write("/late/Cargo.toml", manifest)
	b.write("/late/Cargo.lock", lock)
	b.refused("mkdir /late/src && : >/late/src/lib.rs && cd /late && cargo fetch --locked", "itoa", last.Version)
	// By its address, as a client with another index asks, it is refused as well.
	b.refused("exec python3 -c 'import urllib.request as r; r.urlopen(\"http://100.64.0.1/crates/crates/itoa/"+last.Version+"/download\")'", "403")
	b.denied(policy.Crates, "itoa", rule)
}

func TestCargoDoesNotFindWhatIsDenied(t *testing.T) {
	registry(t, policy.Crates, "/config.json")
	p := allow(policy.Crates)
	p.Deny = []string{"crates:Serde-JSON"}
	b := open(t, p, cargoKit.use(t))
	b.refused(cargoProject+"echo 'serde_json = \"1\"' >>Cargo.toml && cargo fetch", "403", "deny crates:serde-json")
	b.refused("cd /w && cargo add serde-json", "403", "deny crates:serde-json")
	b.denied(policy.Crates, "serde_json", "deny crates:serde-json")
	b.sh(strings.ReplaceAll(cargoProject, "/w", "/other") + "echo 'itoa = \"1\"' >>Cargo.toml && cargo fetch")
}
