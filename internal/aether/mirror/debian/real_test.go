package debian_test

import (
	"log/slog"
	"os"
	"path/filepath"
	"regexp"
	"strings"
	"testing"
	"time"

	"github.com/sandsea/sandsea/internal/aether/mirror/debian"
	"github.com/sandsea/sandsea/internal/aether/mirror/source/sourcetest"
	"github.com/sandsea/sandsea/internal/policy"
)

// apt itself in a root of its own, against the archive that this machine uses, with its sources as they are.
func TestApt(t *testing.T) {
	release, err := os.ReadFile("/etc/os-release")
	codename := regexp.MustCompile(`(?m)^VERSION_CODENAME=(\w+)$`).FindSubmatch(release)
	if err != nil || codename == nil {
		t.Skip("no codename of a release in /etc/os-release")
	}
	const keyring = "/usr/share/keyrings/debian-archive-keyring.gpg"
	if _, err := os.Stat(keyring); err != nil {
		t.Skip("no keyring of the archive on this machine")
	}
	suite := string(codename[1])
	u := sourcetest.Discovered(t, policy.Debian, "/dists/"+suite+"/InRelease", "apt-get")
	s := debian.New(sourcetest.NewSource(t, u), u, slog.New(slog.DiscardHandler))
	t.Cleanup(func() { _ = s.Close() })
	m := sourcetest.Serve(t, s, policy.World{})

	root := t.TempDir()
	m.Guest(policy.Debian, root)
	for _, dir := range []string{"etc/apt/preferences.d", "var/lib/apt/lists/partial", "var/cache/apt/archives/partial", "var/lib/dpkg", "work"} {
		if err := os.MkdirAll(filepath.Join(root, dir), 0o755); err != nil {
			t.Fatal(err)
		}
	}
	for name, body := range map[string]string{
		"etc/apt/sources.list": "deb [signed-by=" + keyring + "] " + u.URLs[0] + " " + suite + " main\n",
		"var/lib/dpkg/status":  "",
		"apt.conf": `Dir "` + root + `"; Acquire::http::Proxy "` + m.Proxy(s) + `"; Acquire::Languages "none"; Acquire::Retries "0";
			APT::Sandbox::User "root"; APT::Update::Error-Mode "any";`,
	} {
		if err := os.WriteFile(filepath.Join(root, name), []byte(body), 0o600); err != nil {
			t.Fatal(err)
		}
	}
	apt := func(args ...string) (string, error) {
		t.Helper()
		return sourcetest.Run(t, filepath.Join(root, "work"), []string{"APT_CONFIG=" + filepath.Join(root, "apt.conf"), "LC_ALL=C"}, "apt-get", args...)
	}
	if out, err := apt("update"); err != nil {
		t.Fatalf("update: %v: %s", err, out)
	}

	// With today's date everything is old enough, and the pool's files are those that the index lists.
	m.In(policy.World{AsOf: time.Now()})
	if out, err := apt("download", "hello"); err != nil {
		t.Fatalf("download: %v: %s", err, out)
	}
	if found, _ := filepath.Glob(filepath.Join(root, "work", "hello_*.deb")); len(found) != 1 {
		t.Errorf("downloaded %v", found)
	}
	m.In(policy.World{Deny: []string{"debian:hello"}})
	for _, deb := range must(filepath.Glob(filepath.Join(root, "work", "hello_*.deb"))) {
		if err := os.Remove(deb); err != nil {
			t.Fatal(err)
		}
	}
	if out, err := apt("download", "hello"); err == nil || !strings.Contains(out, "403") {
		t.Errorf("a denied package: %v: %s", err, out)
	}
	m.In(policy.World{AsOf: sourcetest.Day("2000-01-01")})
	if out, err := apt("update"); err == nil || !strings.Contains(out, "403") {
		t.Errorf("a suite of later: %v: %s", err, out)
	}
	var files, denied int
	for _, e := range m.Events() {
		if e.Error != "" {
			t.Errorf("%+v", e)
		}
		if e.Kind == "file" && e.Name == "hello" && e.Digest != "" {
			files++
		}
		if e.Denied {
			denied++
		}
	}
	if files != 1 || denied < 2 {
		t.Errorf("%d files and %d denials reported", files, denied)
	}
}

func must[T any](v T, err error) T {
	if err != nil {
		panic(err)
	}
	return v
}
