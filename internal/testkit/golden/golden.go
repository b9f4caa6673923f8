// Package golden compares output with a file below testdata. `go test ./the/package -update` records the files anew.
package golden

import (
	"flag"
	"os"
	"path/filepath"
	"testing"

	"github.com/google/go-cmp/cmp"
)

// The testing package parses flags before it runs tests, so the flag is made with the variable.
var update = flag.Bool("update", false, "record golden files anew")

// Equal fails the test when got is not what testdata/name holds.
func Equal(t testing.TB, name string, got []byte) {
	t.Helper()
	path := filepath.Join("testdata", name)
	if *update {
		if err := os.MkdirAll(filepath.Dir(path), 0o755); err != nil {
			t.Fatal(err)
		}
		if err := os.WriteFile(path, got, 0o644); err != nil {
			t.Fatal(err)
		}
		return
	}
	want, err := os.ReadFile(path)
	if err != nil {
		t.Fatalf("%v (record it: go test -run '%s' -update)", err, t.Name())
	}
	if diff := cmp.Diff(string(want), string(got)); diff != "" {
		t.Errorf("%s differs (-file +got):\n%s\nif this is what you want: go test -run '%s' -update", path, diff, t.Name())
	}
}
