// Command licences checks that every module linked into the binary or the tests has a licence that Apache-2.0 code may
// ship with, and prints those that do not.
package main

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"

	"github.com/google/licensecheck"
)

// allowed are the licences that are fine; MPL-2.0 is file-level copyleft, fine for unchanged libraries.
var allowed = []string{
	"Apache-2.0", "MIT", "MIT-0", "BSD-2-Clause", "BSD-3-Clause", "ISC", "MPL-2.0", "Unlicense", "CC0-1.0", "Zlib",
	"BlueOak-1.0.0", "CC-BY-4.0", "CC-BY-SA-4.0",
}

func main() {
	if err := run(); err != nil {
		fmt.Fprintln(os.Stderr, "licences:", err)
		os.Exit(1)
	}
}

func run() error {
	out, err := exec.CommandContext(context.Background(), "go", "list", "-deps", "-test", "-json=Module", "./...").Output()
	if err != nil {
		return fmt.Errorf("go list: %w", err)
	}
	dirs := map[string]string{}
	for d := json.NewDecoder(strings.NewReader(string(out))); ; {
		var p struct {
			Module *struct {
				Path, Version, Dir string
				Main               bool
			}
		}
		if err := d.Decode(&p); errors.Is(err, io.EOF) {
			break
		} else if err != nil {
			return fmt.Errorf("go list: %w", err)
		}
		if p.Module != nil && !p.Module.Main {
			dirs[p.Module.Path+"@"+p.Module.Version] = p.Module.Dir
		}
	}
	var bad []string
	for module, dir := range dirs {
		if why := check(dir); why != "" {
			bad = append(bad, module+": "+why)
		}
	}
	slices.Sort(bad)
	if len(bad) > 0 {
		return errors.New("\n  " + strings.Join(bad, "\n  "))
	}
	fmt.Printf("licences: %d modules, all fine\n", len(dirs))
	return nil
}

// check returns why a module's licence is not fine, or "".
func check(dir string) string {
	files, err := filepath.Glob(filepath.Join(dir, "*"))
	if err != nil {
		return err.Error()
	}
	found := false
	for _, f := range files {
		name := strings.ToUpper(filepath.Base(f))
		if !strings.HasPrefix(name, "LICENSE") && !strings.HasPrefix(name, "LICENCE") && !strings.HasPrefix(name, "COPYING") {
			continue
		}
		text, err := os.ReadFile(f)
		if err != nil {
			continue
		}
		for _, m := range licensecheck.Scan(text).Match {
			found = true
			if !slices.Contains(allowed, m.ID) {
				return m.ID + " in " + filepath.Base(f)
			}
		}
	}
	if !found {
		return "no known licence"
	}
	return ""
}
