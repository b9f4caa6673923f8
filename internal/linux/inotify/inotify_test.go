package inotify

import (
	"errors"
	"os"
	"path/filepath"
	"testing"
	"time"

	"golang.org/x/sys/unix"
)

func wait(t *testing.T, x *Watch, what string) {
	t.Helper()
	select {
	case <-x.C():
	case <-time.After(20 * time.Second):
		t.Fatalf("not woken by %s", what)
	}
}

func TestEveryWaiterIsWokenByWriteAndTruncate(t *testing.T) {
	w, err := New()
	if errors.Is(err, unix.EMFILE) {
		t.Skip("no inotify instance left for this user")
	}
	if err != nil {
		t.Fatal(err)
	}
	defer w.Close()
	f, err := os.Create(filepath.Join(t.TempDir(), "f"))
	if err != nil {
		t.Fatal(err)
	}
	defer f.Close()
	r, err := os.Open(f.Name())
	if err != nil {
		t.Fatal(err)
	}
	defer r.Close()
	a, err := w.Watch(r)
	if err != nil {
		t.Fatal(err)
	}
	b, err := w.Watch(r)
	if err != nil {
		t.Fatal(err)
	}
	// The name does not matter.
	if err := os.Remove(f.Name()); err != nil {
		t.Fatal(err)
	}
	for range 3 {
		if _, err := f.WriteString("x"); err != nil {
			t.Fatal(err)
		}
		wait(t, a, "write")
		wait(t, b, "write")
	}
	if err := f.Truncate(100); err != nil {
		t.Fatal(err)
	}
	wait(t, a, "truncate")
	wait(t, b, "truncate")
	a.Close()
	a.Close()
	if _, err := f.WriteString("x"); err != nil {
		t.Fatal(err)
	}
	wait(t, b, "write after the other left")
	select {
	case <-a.C():
		t.Error("woken after Close")
	default:
	}
	b.Close()
	c, err := w.Watch(r)
	if err != nil {
		t.Fatal(err)
	}
	if _, err := f.WriteString("x"); err != nil {
		t.Fatal(err)
	}
	wait(t, c, "write after all others left")
	for range 2 {
		if err := w.Close(); err != nil {
			t.Fatal(err)
		}
	}
	c.Close()
	if _, err := w.Watch(r); !errors.Is(err, os.ErrClosed) {
		t.Errorf("got %v, want ErrClosed", err)
	}
}
