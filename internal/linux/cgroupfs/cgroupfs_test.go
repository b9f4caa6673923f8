package cgroupfs

import (
	"errors"
	"io/fs"
	"os"
	"path/filepath"
	"slices"
	"testing"
)

// A plain directory stands in for a group: the files are read and written alike.
func group(t *testing.T, files map[string]string) *os.File {
	t.Helper()
	dir := t.TempDir()
	for name, text := range files {
		if err := os.WriteFile(filepath.Join(dir, name), []byte(text), 0o600); err != nil {
			t.Fatal(err)
		}
	}
	f, err := Open(dir)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { f.Close() })
	return f
}

func TestNumbers(t *testing.T) {
	g := group(t, map[string]string{
		"plain": "4096\n", "max": "max\n", "unlimited": "18446744073709551615\n", "words": "many\n", "empty": "",
	})
	for file, want := range map[string]int64{"plain": 4096, "max": -1, "unlimited": 1<<63 - 1} {
		if got, err := ReadInt(g, file); err != nil || got != want {
			t.Errorf("%s: %d, %v, want %d", file, got, err, want)
		}
	}
	for _, file := range []string{"words", "empty", "absent"} {
		if got, err := ReadInt(g, file); err == nil {
			t.Errorf("%s: read as %d", file, got)
		}
	}
	if _, err := ReadInt(g, "absent"); !errors.Is(err, fs.ErrNotExist) || !Gone(err) {
		t.Errorf("absent: %v", err)
	}
}

func TestKeys(t *testing.T) {
	g := group(t, map[string]string{
		"cpu.stat": "usage_usec 12\nuser_usec 5\n", "bad": "oom_kill x\n", "prefix": "oom_kill_disable 0\noom_kill 3\n",
	})
	if n, ok, err := ReadKey(g, "cpu.stat", "user_usec"); n != 5 || !ok || err != nil {
		t.Errorf("%d %v %v", n, ok, err)
	}
	if n, ok, err := ReadKey(g, "prefix", "oom_kill"); n != 3 || !ok || err != nil {
		t.Errorf("a longer key was taken for it: %d %v %v", n, ok, err)
	}
	if _, ok, err := ReadKey(g, "cpu.stat", "usage"); ok || err != nil {
		t.Errorf("a part of a key was found: %v", err)
	}
	if _, _, err := ReadKey(g, "bad", "oom_kill"); err == nil {
		t.Error("a word was read as a number")
	}
}

func TestProcs(t *testing.T) {
	g := group(t, map[string]string{"cgroup.procs": "12\n0\n7\n"})
	got, err := Procs(g)
	if err != nil || !slices.Equal(got, []int{12, 7}) {
		t.Errorf("%v, %v: processes of other namespaces show as 0", got, err)
	}
	if got, err := Procs(group(t, map[string]string{"cgroup.procs": ""})); err != nil || len(got) != 0 {
		t.Errorf("%v, %v", got, err)
	}
}

func TestWriteIsNeverThroughALink(t *testing.T) {
	g := group(t, map[string]string{"target": "old"})
	if err := os.Symlink("target", filepath.Join(g.Name(), "link")); err != nil {
		t.Fatal(err)
	}
	if err := Write(g, "link", "new"); err == nil {
		t.Error("a link was followed")
	}
	if err := Write(g, "target", "new"); err != nil {
		t.Fatal(err)
	}
	if got, err := Read(g, "target"); err != nil || got != "new" {
		t.Errorf("%q, %v", got, err)
	}
}

func TestGroupsAreListedAgainAndAgain(t *testing.T) {
	g := group(t, map[string]string{"file": ""})
	for _, name := range []string{"b", "a"} {
		if err := Mkdir(g, name); err != nil {
			t.Fatal(err)
		}
	}
	if err := Mkdir(g, "a"); !errors.Is(err, fs.ErrExist) {
		t.Errorf("made twice: %v", err)
	}
	for range 2 { // the offset of a directory is shared
		if got, err := Groups(g); err != nil || !slices.Equal(got, []string{"a", "b"}) {
			t.Errorf("%v, %v", got, err)
		}
	}
	if err := os.WriteFile(filepath.Join(g.Name(), "a", "x"), nil, 0o600); err != nil {
		t.Fatal(err)
	}
	if err := Rmdir(g, "a"); !Busy(err) {
		t.Errorf("a full one: %v", err)
	}
	if err := Rmdir(g, "none"); !Gone(err) {
		t.Errorf("none: %v", err)
	}
}
