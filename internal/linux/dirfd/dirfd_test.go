package dirfd_test

import (
	"os"
	"path/filepath"
	"syscall"
	"testing"

	"github.com/sandsea/sandsea/internal/linux/dirfd"
)

// tree makes a directory with five entries, of which one holds 100 KiB and one is a link to what must stay.
func tree(t *testing.T) (dir *os.File, outside string) {
	t.Helper()
	root := t.TempDir()
	outside = filepath.Join(t.TempDir(), "kept")
	path := filepath.Join(root, "a", "b")
	for _, err := range []error{
		os.MkdirAll(path, 0o700),
		os.WriteFile(outside, []byte("x"), 0o600),
		os.WriteFile(filepath.Join(path, "big"), make([]byte, 100<<10), 0o600),
		os.WriteFile(filepath.Join(root, "small"), []byte("x"), 0o600),
		os.Symlink(filepath.Dir(outside), filepath.Join(root, "link")),
	} {
		if err != nil {
			t.Fatal(err)
		}
	}
	dir, err := os.Open(root)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { dir.Close() })
	return dir, outside
}

func TestClearKeepsToWhatItMayRemove(t *testing.T) {
	for name, c := range map[string]struct {
		entries int
		bytes   int64
		want    bool
	}{
		"all of it":        {5, 1 << 20, true},
		"one entry more":   {4, 1 << 20, false},
		"more bytes":       {5, 64 << 10, false},
		"nothing is asked": {0, 0, false},
	} {
		t.Run(name, func(t *testing.T) {
			dir, outside := tree(t)
			ok, err := dirfd.Clear(dir, c.entries, c.bytes)
			if err != nil || ok != c.want {
				t.Fatalf("%v, %v", ok, err)
			}
			if left, err := dirfd.Names(dir); err != nil || ok != (len(left) == 0) {
				t.Errorf("left: %v, %v", left, err)
			}
			if _, err := os.Stat(outside); err != nil {
				t.Errorf("what a link pointed to: %v", err)
			}
		})
	}
}

// Who may have only few descriptors removes what is deeper than that, and follows no link.
func TestATreeIsRemovedHoweverDeepItIs(t *testing.T) {
	dir, outside := tree(t)
	const depth = 3000
	at, err := os.Open(filepath.Join(dir.Name(), "a"))
	if err != nil {
		t.Fatal(err)
	}
	for i := range depth {
		if err := dirfd.Mkdir(at, "1", 0o700); err != nil { // a name that is also given to what is moved
			t.Fatal(i, err)
		}
		f, err := dirfd.CreateFile(at, "file", 0o600)
		if err != nil {
			t.Fatal(i, err)
		}
		f.Close()
		next, err := dirfd.Open(at, "1")
		at.Close()
		if err != nil {
			t.Fatal(i, err)
		}
		at = next
	}
	at.Close()
	var old syscall.Rlimit
	if err := syscall.Getrlimit(syscall.RLIMIT_NOFILE, &old); err != nil {
		t.Fatal(err)
	}
	if err := syscall.Setrlimit(syscall.RLIMIT_NOFILE, &syscall.Rlimit{Cur: 64, Max: old.Max}); err != nil {
		t.Fatal(err)
	}
	defer func() {
		if err := syscall.Setrlimit(syscall.RLIMIT_NOFILE, &old); err != nil {
			t.Error(err)
		}
	}()
	parent, err := os.Open(filepath.Dir(dir.Name()))
	if err != nil {
		t.Fatal(err)
	}
	defer parent.Close()
	for range 2 {
		if err := dirfd.RemoveTree(parent, filepath.Base(dir.Name())); err != nil {
			t.Fatal(err)
		}
	}
	if _, err := os.Stat(dir.Name()); !os.IsNotExist(err) {
		t.Errorf("it is still there: %v", err)
	}
	if _, err := os.Stat(outside); err != nil {
		t.Errorf("what a link pointed to: %v", err)
	}
}
