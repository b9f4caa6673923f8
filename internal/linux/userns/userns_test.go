package userns_test

import (
	"os"
	"os/exec"
	"strconv"
	"strings"
	"syscall"
	"testing"

	"github.com/sandsea/sandsea/internal/linux/userns"
)

func TestNew(t *testing.T) {
	if os.Getuid() != 0 {
		t.Skip("needs root to map 65,536 ids")
	}
	const base = 0x7ff00000
	before := children(t)
	f, err := userns.New(base)
	if err != nil {
		t.Fatal(err)
	}
	defer f.Close()
	if got := children(t); got != before {
		t.Errorf("children after = %q, before = %q: the helper was left", got, before)
	}
	own, err := os.Readlink("/proc/self/ns/user")
	if err != nil {
		t.Fatal(err)
	}
	var st syscall.Stat_t
	if err := syscall.Fstat(int(f.Fd()), &st); err != nil {
		t.Fatal(err)
	}
	if strings.Contains(own, "["+strconv.FormatUint(st.Ino, 10)+"]") {
		t.Fatal("the namespace is our own")
	}
	nsenter, err := exec.LookPath("nsenter")
	if err != nil {
		t.Skip("needs nsenter to look into the namespace")
	}
	cmd := exec.Command(nsenter, "--user=/proc/self/fd/3", "cat", "/proc/self/uid_map", "/proc/self/gid_map")
	cmd.ExtraFiles = []*os.File{f}
	out, err := cmd.CombinedOutput()
	if err != nil {
		t.Fatalf("nsenter: %v: %s", err, out)
	}
	want := strings.Repeat(strings.TrimSpace(userns.Mapping(base))+" ", 2)
	if got := strings.Join(strings.Fields(string(out)), " ") + " "; got != want {
		t.Errorf("maps = %q, want %q", got, want)
	}
}

func BenchmarkNew(b *testing.B) {
	if os.Getuid() != 0 {
		b.Skip("needs root")
	}
	for b.Loop() {
		f, err := userns.New(0x7ff00000)
		if err != nil {
			b.Fatal(err)
		}
		f.Close()
	}
}

func children(t *testing.T) string {
	t.Helper()
	var all []string
	tasks, err := os.ReadDir("/proc/self/task")
	if err != nil {
		t.Fatal(err)
	}
	for _, task := range tasks {
		b, err := os.ReadFile("/proc/self/task/" + task.Name() + "/children")
		if err != nil {
			t.Skip("the kernel does not list children")
		}
		all = append(all, strings.Fields(string(b))...)
	}
	return strings.Join(all, " ")
}
