package supervise

import (
	"context"
	"errors"
	"log/slog"
	"os"
	"path/filepath"
	"strings"
	"syscall"
	"testing"

	"github.com/sandsea/sandsea/internal/testkit/process"
)

// otherProgram is a copy of this one, which counts as another.
func otherProgram(t *testing.T) string {
	t.Helper()
	b, err := os.ReadFile("/proc/self/exe")
	if err != nil {
		t.Fatal(err)
	}
	path := filepath.Join(t.TempDir(), "other")
	if err := os.WriteFile(path, b, 0o755); err != nil {
		t.Fatal(err)
	}
	return path
}

// old starts a daemon of another program and leaves it; it gives its process.
func old(t *testing.T, cfg Config[*conn]) int {
	t.Helper()
	cfg.Argv = []string{otherProgram(t)}
	d, err := Start(t.Context(), cfg)
	if err != nil {
		t.Fatal(err)
	}
	defer d.Close()
	return d.Pid()
}

func TestADaemonOfAnotherProgramIsRenewedOnce(t *testing.T) {
	cfg := config(t, "good")
	before := old(t, cfg)
	renewed := 0
	cfg.Renew = func(_ context.Context, program *os.File) error {
		renewed++
		if same, err := runs(os.Getpid(), program); err != nil || !same {
			t.Errorf("renewed to another program: %v", err)
		}
		return nil
	}
	d, err := Start(t.Context(), cfg)
	if err != nil {
		t.Fatal(err)
	}
	defer d.Close()
	if renewed != 1 || d.Pid() != before {
		t.Errorf("renewed %d times, process %d, before %d", renewed, d.Pid(), before)
	}
}

func TestADaemonOfThisProgramIsNotRenewed(t *testing.T) {
	cfg := config(t, "good")
	first, err := Start(t.Context(), cfg)
	if err != nil {
		t.Fatal(err)
	}
	pid := first.Pid()
	if err := first.Close(); err != nil {
		t.Fatal(err)
	}
	cfg.Renew = func(context.Context, *os.File) error {
		t.Error("renewed")
		return nil
	}
	cfg.Successor = []string{"/does/not/run"}
	d, err := Start(t.Context(), cfg)
	if err != nil {
		t.Fatal(err)
	}
	defer d.Close()
	if d.Pid() != pid {
		t.Errorf("process %d, before %d", d.Pid(), pid)
	}
}

func TestARenewalThatFailsLeavesTheDaemon(t *testing.T) {
	cfg := config(t, "good")
	before := old(t, cfg)
	cfg.Renew = func(context.Context, *os.File) error { return errors.New("no") }
	d, err := Start(t.Context(), cfg)
	if err != nil {
		t.Fatal(err)
	}
	defer d.Close()
	if d.Pid() != before {
		t.Errorf("process %d, before %d", d.Pid(), before)
	}
}

func TestADaemonThatDiesOfItsRenewalIsStartedAnew(t *testing.T) {
	cfg := config(t, "good")
	before := old(t, cfg)
	cfg.Renew = func(context.Context, *os.File) error {
		_ = syscall.Kill(before, syscall.SIGKILL)
		eventually(t, "the daemon is gone", func() bool { return !process.Alive(before) })
		return errors.New("it died")
	}
	d, err := Start(t.Context(), cfg)
	if err != nil {
		t.Fatal(err)
	}
	defer d.Close()
	if pid := d.Pid(); pid == before || pid == 0 {
		t.Errorf("process %d, before %d", pid, before)
	}
}

func TestASuccessorTakesOverBeforeTheOldOneEnds(t *testing.T) {
	cfg := config(t, "good")
	before := old(t, cfg)
	cfg.Successor = []string{"/proc/self/exe", "takeover"}
	d, err := Start(t.Context(), cfg)
	if err != nil {
		t.Fatal(err)
	}
	defer d.Close()
	if pid := d.Pid(); pid == before || pid == 0 {
		t.Errorf("process %d, before %d", pid, before)
	}
	if process.Alive(before) {
		t.Error("the old one is still there")
	}
}

func TestASuccessorThatDoesNotRunLeavesTheOldOne(t *testing.T) {
	cfg := config(t, "good")
	before := old(t, cfg)
	var says strings.Builder
	cfg.Log = slog.New(slog.NewTextHandler(&says, nil))
	cfg.Successor = []string{"/bin/false"}
	d, err := Start(t.Context(), cfg)
	if err != nil {
		t.Fatal(err)
	}
	defer d.Close()
	if d.Pid() != before || !strings.Contains(says.String(), "not renewed") {
		t.Errorf("process %d, before %d, says %s", d.Pid(), before, says.String())
	}
}
