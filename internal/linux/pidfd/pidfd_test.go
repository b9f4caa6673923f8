package pidfd_test

import (
	"context"
	"errors"
	"io"
	"os"
	"os/exec"
	"syscall"
	"testing"
	"time"

	"github.com/sandsea/sandsea/internal/linux/pidfd"
)

// start runs a script whose standard input ends when input is closed.
func start(t *testing.T, script string) (_ *exec.Cmd, f *os.File, input io.Closer) {
	t.Helper()
	cmd := exec.Command("/bin/sh", "-c", script)
	input, err := cmd.StdinPipe()
	if err != nil {
		t.Fatal(err)
	}
	if err := cmd.Start(); err != nil {
		t.Fatal(err)
	}
	if f, err = pidfd.Open(cmd.Process.Pid); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		_ = cmd.Process.Kill()
		_ = cmd.Wait()
		f.Close()
	})
	return cmd, f, input
}

func TestWaitReturnsWhenTheProcessEnds(t *testing.T) {
	cmd, f, input := start(t, "read x; exit 3")
	if done, err := pidfd.Done(f); err != nil || done {
		t.Fatalf("Done of a running process = %v, %v", done, err)
	}
	ctx, cancel := context.WithTimeout(t.Context(), 20*time.Second)
	defer cancel()
	if err := input.Close(); err != nil {
		t.Fatal(err)
	}
	if err := pidfd.Wait(ctx, f); err != nil {
		t.Fatal(err)
	}
	if _, ok, err := pidfd.ExitStatus(f); err != nil && !errors.Is(err, pidfd.ErrNoExitInfo) || ok {
		t.Errorf("ExitStatus before the wait = %v, %v", ok, err)
	}
	_ = cmd.Wait()
	ws, ok, err := pidfd.ExitStatus(f)
	if errors.Is(err, pidfd.ErrNoExitInfo) {
		t.Skip(err)
	}
	if err != nil || !ok || ws.ExitStatus() != 3 {
		t.Errorf("ExitStatus = %v, %v, %v, want 3", ws.ExitStatus(), ok, err)
	}
	if err := pidfd.Signal(f, syscall.SIGTERM); !errors.Is(err, os.ErrProcessDone) {
		t.Errorf("Signal to a gone process = %v", err)
	}
}

func TestWaitEndsWithItsContext(t *testing.T) {
	_, f, _ := start(t, "exec sleep 60")
	want := errors.New("enough")
	ctx, cancel := context.WithCancelCause(t.Context())
	cancel(want)
	if err := pidfd.Wait(ctx, f); !errors.Is(err, want) {
		t.Errorf("Wait = %v, want %v", err, want)
	}
	// Another Wait on the same pidfd still works.
	if err := pidfd.Signal(f, syscall.SIGKILL); err != nil {
		t.Fatal(err)
	}
	ctx2, cancel2 := context.WithTimeout(t.Context(), 20*time.Second)
	defer cancel2()
	if err := pidfd.Wait(ctx2, f); err != nil {
		t.Error(err)
	}
}

func TestIdentityDiffers(t *testing.T) {
	_, a, _ := start(t, "exec sleep 60")
	_, b, _ := start(t, "exec sleep 60")
	ia, err := pidfd.Identity(a)
	if err != nil {
		t.Fatal(err)
	}
	ib, err := pidfd.Identity(b)
	if err != nil {
		t.Fatal(err)
	}
	if ia == ib {
		t.Errorf("two processes with identity %d", ia)
	}
}

func TestProbeAgreesWithTheKernel(t *testing.T) {
	if err := pidfd.Probe(); err != nil && !errors.Is(err, pidfd.ErrNoExitInfo) {
		t.Error(err)
	}
}
