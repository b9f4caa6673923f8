package trial

import (
	"encoding/binary"
	"os"
	"strings"
	"testing"

	"github.com/sandsea/sandsea/internal/testkit/require"
)

func TestATrialLeavesTheProcessAsItWas(t *testing.T) {
	require.Root(t)
	before, err := os.Readlink("/proc/self/ns/net")
	if err != nil {
		t.Fatal(err)
	}
	require.That(t, "network", Network())
	require.That(t, "seccomp", Seccomp(nil))
	after, err := os.Readlink("/proc/self/ns/net")
	if err != nil || before != after {
		t.Errorf("network namespace %s became %s, %v", before, after, err)
	}
	if os.Getppid() <= 0 {
		t.Error("getppid is refused outside of the trial")
	}
	status, err := os.ReadFile("/proc/self/status")
	if err != nil || strings.Contains(string(status), "NoNewPrivs:\t1") {
		t.Errorf("no_new_privs is set, %v", err)
	}
}

func TestAWrongFilterIsAnError(t *testing.T) {
	require.That(t, "seccomp", Seccomp(nil))
	jumpOut := binary.NativeEndian.AppendUint64(nil, 0x05) // ja 0, with nothing behind it
	for name, program := range map[string][]byte{
		"that is cut": {1, 2, 3}, "that jumps out of itself": jumpOut, "that is empty": {},
	} {
		if err := Seccomp(program); err == nil {
			t.Errorf("a filter %s was taken", name)
		}
	}
}
