package inotify

import (
	"errors"
	"os"
	"path/filepath"
	"testing"
	"time"

	"golang.org/x/sys/unix"
)

func TestAnInstanceOfAnotherIsReadAndNothingElseIsTaken(t *testing.T) {
	dir := t.TempDir()
	fd, err := unix.InotifyInit1(unix.IN_CLOEXEC)
	if err != nil {
		t.Skip("no inotify instance left for this user")
	}
	wd, err := unix.InotifyAddWatch(fd, dir, unix.IN_ALL_EVENTS)
	if err != nil {
		t.Fatal(err)
	}
	s, err := Adopt(os.NewFile(uintptr(fd), "theirs"))
	if err != nil {
		t.Fatal(err)
	}
	defer s.Close()
	if n, err := s.Pending(); n != 0 || err != nil {
		t.Errorf("%d bytes wait before anything happened, %v", n, err)
	}
	if err := os.Mkdir(filepath.Join(dir, "made"), 0o700); err != nil {
		t.Fatal(err)
	}
	n, err := s.Pending()
	if err != nil {
		t.Fatal(err)
	}
	got, err := s.Read(nil)
	if err != nil || len(got) != 1 {
		t.Fatalf("got %+v, %v", got, err)
	}
	if want := (Event{WD: int32(wd), Mask: Create | IsDir, Name: "made", Size: n}); got[0] != want {
		t.Errorf("got %+v, want %+v", got[0], want)
	}
	// It waits without holding a thread, and up to a deadline.
	if err := s.SetDeadline(time.Unix(1, 0)); err != nil {
		t.Fatal(err)
	}
	if _, err := s.Read(nil); !errors.Is(err, os.ErrDeadlineExceeded) {
		t.Errorf("got %v after the deadline", err)
	}

	r, w, err := os.Pipe()
	if err != nil {
		t.Fatal(err)
	}
	defer w.Close()
	odd := filepath.Join(dir, "anon_inode:inotify")
	file, err := os.Create(odd)
	if err != nil {
		t.Fatal(err)
	}
	for _, f := range []*os.File{r, file} {
		if _, err := Adopt(f); !errors.Is(err, ErrNotInotify) {
			t.Errorf("%s: %v", f.Name(), err)
		}
		if err := f.Close(); !errors.Is(err, os.ErrClosed) {
			t.Errorf("%s was kept open", f.Name())
		}
	}
}
