// Package require lets a test say what it needs of the machine. A test whose need is not met is skipped with the
// reason, but fails when the environment variable SANDSEA_REQUIRE, a list parted by commas, names the feature: so a CI
// job that is meant to have it cannot lose it in silence.
package require

import (
	"errors"
	"fmt"
	"os"
	"os/exec"
	"slices"
	"strings"
	"testing"

	"github.com/moby/sys/mountinfo"
)

// Root skips unless the test runs as root.
func Root(t testing.TB) {
	t.Helper()
	Feature(t, "root")
}

// Feature skips unless the named feature is there: root, kvm, cgroup2, or bin:NAME for a program in PATH. A test whose
// need is told by the code under test uses That.
func Feature(t testing.TB, name string) {
	t.Helper()
	That(t, name, probe(name))
}

// That skips when err is not nil: the feature is missing, and err says why.
func That(t testing.TB, name string, err error) {
	t.Helper()
	if err == nil {
		return
	}
	if slices.Contains(strings.Split(os.Getenv("SANDSEA_REQUIRE"), ","), name) {
		t.Fatalf("SANDSEA_REQUIRE says that %s is here: %v", name, err)
		return
	}
	t.Skipf("needs %s: %v", name, err)
}

func probe(name string) error {
	if program, ok := strings.CutPrefix(name, "bin:"); ok {
		_, err := exec.LookPath(program)
		return err
	}
	switch name {
	case "root":
		if uid := os.Geteuid(); uid != 0 {
			return fmt.Errorf("runs as uid %d", uid)
		}
		return nil
	case "kvm":
		f, err := os.OpenFile("/dev/kvm", os.O_RDWR, 0)
		if err != nil {
			return err
		}
		return f.Close()
	case "cgroup2":
		mounts, err := mountinfo.GetMounts(mountinfo.FSTypeFilter("cgroup2"))
		if err == nil && len(mounts) == 0 {
			err = errors.New("no cgroup v2 tree is mounted")
		}
		return err
	default:
		return fmt.Errorf("require does not know the feature %q", name)
	}
}
