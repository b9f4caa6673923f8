package confine_test

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/sandsea/sandsea/internal/linux/confine"
)

const idBase = 1_999_000_000

func spec(t *testing.T, script string) confine.Spec {
	t.Helper()
	if os.Geteuid() != 0 {
		t.Skip("needs root")
	}
	dir := t.TempDir()
	if err := os.Chown(dir, idBase, idBase); err != nil {
		t.Fatal(err)
	}
	return confine.Spec{
		Args: []string{"sh", "-c", script}, Env: []string{"PATH=/usr/sbin:/usr/bin:/sbin:/bin"}, IDBase: idBase,
		Binds: []confine.Bind{{Source: dir, Name: "work"}}, Hide: []string{"/root"},
	}
}

func TestTheProgramIsRootOfNothingButItsOwn(t *testing.T) {
	var out bytes.Buffer
	s := spec(t, `id -u; cat /proc/self/uid_map; echo $$; touch /tmp/work/f; ls -A /root; mount -t tmpfs x /mnt && echo mounted
		cat /etc/shadow 2>/dev/null; echo hi >&3`)
	var status bytes.Buffer
	s.Stdout, s.Status = &out, &status
	if err := confine.Run(t.Context(), s); err != nil {
		t.Fatal(err)
	}
	got := strings.Fields(out.String())
	want := []string{"0", "0", fmt.Sprint(idBase), "65536", "1", "mounted"}
	if strings.Join(got, " ") != strings.Join(want, " ") {
		t.Errorf("got %q, want %q", got, want)
	}
	if status.String() != "hi\n" {
		t.Errorf("status %q", status.String())
	}
	st, err := os.Stat(filepath.Join(s.Binds[0].Source, "f"))
	if err != nil {
		t.Fatal(err)
	}
	if uid := st.Sys().(*syscall.Stat_t).Uid; uid != idBase {
		t.Errorf("its file belongs to %d, want %d", uid, idBase)
	}
}

func TestABindMayBeReadOnlyAndStaysSo(t *testing.T) {
	s := spec(t, `touch /tmp/work/f 2>/dev/null && exit 9; mount -o remount,bind,rw /tmp/work 2>/dev/null && exit 8; exit 0`)
	s.Binds[0].ReadOnly = true
	if err := confine.Run(t.Context(), s); err != nil {
		t.Fatal(err)
	}
}

func TestAFailureCarriesTheExitCode(t *testing.T) {
	err := confine.Run(t.Context(), spec(t, "exit 3"))
	if e, ok := errors.AsType[*exec.ExitError](err); !ok || e.ExitCode() != 3 {
		t.Fatalf("got %v, want exit code 3", err)
	}
}

// alive waits until a file is locked by nobody, that is until the program that holds the lock is gone.
func waitFree(t *testing.T, path string) {
	t.Helper()
	f, err := os.Open(path)
	if err != nil {
		t.Fatal(err)
	}
	defer func() { _ = f.Close() }()
	for end := time.Now().Add(10 * time.Second); ; {
		err := syscall.Flock(int(f.Fd()), syscall.LOCK_EX|syscall.LOCK_NB)
		if err == nil {
			return
		}
		if time.Now().After(end) {
			t.Fatalf("a descendant lives on: %v", err)
		}
		time.Sleep(5 * time.Millisecond) // a poll with a limit
	}
}

const holdLock = `cd /tmp/work; touch lock; setsid sh -c 'exec 9<lock; flock 9; touch held; sleep 600' & sleep 600`

func waitHeld(t *testing.T, dir string) {
	t.Helper()
	for end := time.Now().Add(10 * time.Second); ; {
		if _, err := os.Stat(filepath.Join(dir, "held")); err == nil {
			return
		}
		if time.Now().After(end) {
			t.Fatal("the program did not start")
		}
		time.Sleep(5 * time.Millisecond) // a poll with a limit
	}
}

func TestACancelledProgramDiesWithItsDescendants(t *testing.T) {
	s := spec(t, holdLock)
	gone := errors.New("gone away")
	ctx, cancel := context.WithCancelCause(t.Context())
	done := make(chan error)
	go func() { done <- confine.Run(ctx, s) }()
	waitHeld(t, s.Binds[0].Source)
	cancel(gone)
	if err := <-done; !errors.Is(err, gone) {
		t.Errorf("got %v, want %v", err, gone)
	}
	waitFree(t, filepath.Join(s.Binds[0].Source, "lock"))
}

func TestTheProgramDiesWithTheProcessThatRunsIt(t *testing.T) {
	if dir := os.Getenv("CONFINE_TEST_DIR"); dir != "" {
		_ = confine.Run(context.Background(), confine.Spec{
			Args: []string{"sh", "-c", holdLock}, Env: []string{"PATH=/usr/sbin:/usr/bin:/sbin:/bin"}, IDBase: idBase,
			Binds: []confine.Bind{{Source: dir, Name: "work"}},
		})
		os.Exit(0)
	}
	dir := spec(t, "").Binds[0].Source
	cmd := exec.CommandContext(t.Context(), os.Args[0], "-test.run=^TestTheProgramDiesWithTheProcessThatRunsIt$")
	cmd.Env = append(os.Environ(), "CONFINE_TEST_DIR="+dir)
	if err := cmd.Start(); err != nil {
		t.Fatal(err)
	}
	waitHeld(t, dir)
	if err := cmd.Process.Kill(); err != nil {
		t.Fatal(err)
	}
	_ = cmd.Wait()
	waitFree(t, filepath.Join(dir, "lock"))
}
