package process_test

import (
	"os/exec"
	"syscall"
	"testing"
	"time"

	"github.com/sandsea/sandsea/internal/testkit/process"
	"github.com/sandsea/sandsea/internal/testkit/wait"
)

func TestAProcessFromItsStartToItsEnd(t *testing.T) {
	cmd := exec.CommandContext(t.Context(), "cat")
	cmd.SysProcAttr = &syscall.SysProcAttr{Setsid: true}
	in, err := cmd.StdinPipe()
	if err != nil {
		t.Fatal(err)
	}
	if err := cmd.Start(); err != nil {
		t.Fatal(err)
	}
	pid := cmd.Process.Pid
	if s, err := process.Session(pid); err != nil || s != pid {
		t.Errorf("session %d of process %d, %v", s, pid, err)
	}
	if !process.Alive(pid) {
		t.Error("it is not alive")
	}
	if err := in.Close(); err != nil {
		t.Fatal(err)
	}
	wait.Until(t, 20*time.Second, func() bool { return !process.Alive(pid) }, "dead, though nobody has waited for it")
	if err := cmd.Wait(); err != nil {
		t.Error(err)
	}
	if process.Alive(pid) {
		t.Error("it is alive after its end")
	}
}
