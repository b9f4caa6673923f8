package leak

import (
	"os"
	"os/exec"
	"strings"
	"testing"
)

func TestALeakedDescriptorIsSeen(t *testing.T) {
	before, err := Take()
	if err != nil {
		t.Fatal(err)
	}
	f, err := os.Open("/dev/zero")
	if err != nil {
		t.Fatal(err)
	}
	after, err := Take()
	if err != nil {
		t.Fatal(err)
	}
	if got := after["descriptor of /dev/zero"] - before["descriptor of /dev/zero"]; got != 1 {
		t.Errorf("saw %d more descriptors of /dev/zero, want 1", got)
	}
	f.Close()
	if err := Compare(before); err != nil {
		t.Error(err)
	}
}

func TestALeakedProcessIsSeenAlsoAsAGrandchild(t *testing.T) {
	before, err := Take()
	if err != nil {
		t.Fatal(err)
	}
	// The shell waits for its child, so that both are there.
	cmd := exec.Command("sh", "-c", "cat; :")
	in, err := cmd.StdinPipe()
	if err != nil {
		t.Fatal(err)
	}
	out, err := cmd.StdoutPipe()
	if err != nil {
		t.Fatal(err)
	}
	if err := cmd.Start(); err != nil {
		t.Fatal(err)
	}
	if _, err := in.Write([]byte("x")); err != nil {
		t.Fatal(err)
	}
	if _, err := out.Read(make([]byte, 1)); err != nil { // now cat runs
		t.Fatal(err)
	}
	after, err := Take()
	if err != nil {
		t.Fatal(err)
	}
	names := ""
	for what := range after {
		if before[what] == 0 && strings.HasPrefix(what, "process ") {
			names += what + "\n"
		}
	}
	if !strings.Contains(names, "(cat)") || !strings.Contains(names, "(sh)") {
		t.Errorf("saw %q, want sh and cat", names)
	}
	in.Close()
	if err := cmd.Wait(); err != nil {
		t.Fatal(err)
	}
	if err := Compare(before); err != nil {
		t.Error(err)
	}
}

func TestOnlyPathsBelowTheDirectoriesCount(t *testing.T) {
	dirs := []string{"/tmp/a", "/srv/"}
	for path, want := range map[string]bool{
		"/tmp/a": true, "/tmp/a/b": true, "/tmp/ab": false, "/srv/x": true, "/": false, "": false,
	} {
		if got := below(path, dirs); got != want {
			t.Errorf("below(%q) = %v", path, got)
		}
	}
}
