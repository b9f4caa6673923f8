package golang_test

import (
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/sandsea/sandsea/internal/aether/mirror/golang"
	"github.com/sandsea/sandsea/internal/aether/mirror/source/sourcetest"
	"github.com/sandsea/sandsea/internal/policy"
)

// The go command itself, against the proxy and the checksum database that this machine uses.
func TestTheGoCommand(t *testing.T) {
	const mod = "github.com/google/uuid"
	u := sourcetest.Discovered(t, policy.Golang, "/"+mod+"/@v/v1.5.0.info", "go")
	m := sourcetest.Serve(t, golang.New(sourcetest.NewSource(t, u), u), policy.World{AsOf: sourcetest.Day("2024-01-20")})

	run := func(args ...string) (string, error) {
		t.Helper()
		dir := t.TempDir()
		if err := os.WriteFile(filepath.Join(dir, "go.mod"), []byte("module x.test/x\n\ngo 1.21\n"), 0o600); err != nil {
			t.Fatal(err)
		}
		return sourcetest.Run(t, dir, []string{
			"GOPROXY=" + m.URL, "GOMODCACHE=" + filepath.Join(dir, "mod"), "GOFLAGS=-modcacherw -mod=mod", "GOTOOLCHAIN=local",
			"GOSUMDB=" + u.Checksums, "GONOSUMDB=", "GONOPROXY=", "GOPRIVATE=", "GOENV=off",
		}, "go", args...)
	}

	// 1.5.0 is of December 2023, 1.6.0 of 23 January 2024.
	out, err := run("list", "-m", "-versions", mod)
	if err != nil || !strings.Contains(out, " v1.5.0") || strings.Contains(out, "v1.6.0") {
		t.Errorf("versions: %v: %s", err, out)
	}
	out, err = run("list", "-m", mod+"@latest")
	if err != nil || strings.TrimSpace(out) != mod+" v1.5.0" {
		t.Errorf("latest: %v: %s", err, out)
	}
	if out, err = run("get", mod); err != nil || !strings.Contains(out, "v1.5.0") {
		t.Errorf("get: %v: %s", err, out)
	}
	out, err = run("mod", "download", "-json", mod+"@v1.6.0")
	if err == nil || !strings.Contains(out, "403") || !strings.Contains(out, "as_of") {
		t.Errorf("a later version: %v: %s", err, out)
	}
	for _, e := range m.Events() {
		if e.Name == mod && e.Error != "" {
			t.Errorf("%+v", e)
		}
	}

	m.In(policy.World{})
	if out, err = run("mod", "download", "-json", mod+"@v1.6.0"); err != nil || !strings.Contains(out, `"Sum": "h1:`) {
		t.Errorf("today: %v: %s", err, out)
	}
	m.In(policy.World{Deny: []string{"git:github.com/google/uuid"}})
	if out, err = run("mod", "download", mod+"@v1.5.0"); err == nil || !strings.Contains(out, "deny git:github.com/google/uuid") {
		t.Errorf("a denied repository: %v: %s", err, out)
	}
}
