package projquota

import (
	"errors"
	"os"
	"strings"
	"testing"

	"golang.org/x/sys/unix"

	"github.com/sandsea/sandsea/internal/testkit/require"
)

func capabilities(t *testing.T) string {
	t.Helper()
	b, err := os.ReadFile("/proc/thread-self/status")
	if err != nil {
		t.Fatal(err)
	}
	for line := range strings.Lines(string(b)) {
		if v, ok := strings.CutPrefix(line, "CapEff:"); ok {
			return strings.TrimSpace(v)
		}
	}
	t.Fatal("no capabilities in /proc/thread-self/status")
	return ""
}

func TestBoundedTakesOneCapabilityAndGivesItBack(t *testing.T) {
	const bit = 1 << unix.CAP_SYS_RESOURCE
	told := errors.New("told")
	err := Bounded(func() error {
		head := unix.CapUserHeader{Version: unix.LINUX_CAPABILITY_VERSION_3}
		var data [2]unix.CapUserData
		if err := unix.Capget(&head, &data[0]); err != nil {
			return err
		}
		if data[0].Effective&bit != 0 {
			return errors.New("it is still there")
		}
		return told
	})
	if !errors.Is(err, told) {
		t.Error(err)
	}
	before := capabilities(t)
	if err := Bounded(func() error { return nil }); err != nil {
		t.Fatal(err)
	}
	if after := capabilities(t); after != before {
		t.Errorf("capabilities %s became %s", before, after)
	}
}

// Where there is no project quota every call says so; where there is, a limit is read back.
func TestALimitIsInForceOrAnError(t *testing.T) {
	require.Root(t)
	dir, err := os.Open(t.TempDir())
	if err != nil {
		t.Fatal(err)
	}
	defer dir.Close()
	const project = 1<<31 - 17
	if err := Set(dir, project, Limits{Bytes: 1 << 20}); err != nil {
		t.Skipf("no project quota here: %v", err)
	}
	defer func() {
		if err := Set(dir, project, Limits{}); err != nil {
			t.Error(err)
		}
	}()
	if err := Mark(dir, project); err != nil {
		t.Fatal(err)
	}
	if got, err := Project(dir); err != nil || got != project {
		t.Errorf("project %d, %v", got, err)
	}
	if _, l, err := Usage(dir, project); err != nil || l.Bytes != 1<<20 {
		t.Errorf("%+v, %v", l, err)
	}
}
