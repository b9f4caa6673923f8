package pipe

import (
	"bytes"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"testing"

	"golang.org/x/sys/unix"
)

func TestBytesMoveFromAPipeIntoAFileAtAnOffset(t *testing.T) {
	r, w, err := New()
	if err != nil {
		t.Fatal(err)
	}
	defer r.Close()
	defer w.Close()
	for _, f := range []*os.File{r, w} {
		flags, err := unix.FcntlInt(f.Fd(), unix.F_GETFL, 0)
		if err != nil || flags&unix.O_NONBLOCK != 0 {
			t.Errorf("flags %x, %v: want a blocking end", flags, err)
		}
	}
	f, err := os.OpenFile(filepath.Join(t.TempDir(), "f"), os.O_RDWR|os.O_CREATE, 0o600)
	if err != nil {
		t.Fatal(err)
	}
	defer f.Close()
	rfd, ffd := int(r.Fd()), int(f.Fd())
	if !IsPipe(rfd) || IsPipe(ffd) {
		t.Error("IsPipe is wrong")
	}
	if _, err := ToFile(rfd, ffd, 0, 100); !errors.Is(err, unix.EAGAIN) {
		t.Fatalf("empty pipe: got %v, want EAGAIN", err)
	}
	if _, err := w.WriteString("0123456789"); err != nil {
		t.Fatal(err)
	}
	if n, err := Buffered(rfd); n != 10 || err != nil {
		t.Fatalf("buffered %d, %v", n, err)
	}
	if n, err := ToFile(rfd, ffd, 5, 4); n != 4 || err != nil {
		t.Fatalf("moved %d, %v", n, err)
	}
	null, err := os.OpenFile(os.DevNull, os.O_WRONLY, 0)
	if err != nil {
		t.Fatal(err)
	}
	defer null.Close()
	if n, err := Discard(rfd, int(null.Fd()), 3); n != 3 || err != nil {
		t.Fatalf("dropped %d, %v", n, err)
	}
	if n, err := ToFile(rfd, ffd, 9, 100); n != 3 || err != nil {
		t.Fatalf("moved %d, %v", n, err)
	}
	w.Close()
	if n, err := ToFile(rfd, ffd, 12, 100); n != 0 || err != nil {
		t.Fatalf("at the end: %d, %v", n, err)
	}
	got, err := os.ReadFile(f.Name())
	if want := []byte("\x00\x00\x00\x00\x000123789"); err != nil || !bytes.Equal(got, want) {
		t.Errorf("file %q, want %q, %v", got, want, err)
	}
}

func TestAPipeGrows(t *testing.T) {
	r, w, err := New()
	if err != nil {
		t.Fatal(err)
	}
	defer r.Close()
	defer w.Close()
	before, err := size(int(r.Fd()))
	if err != nil || before >= MaxSize {
		t.Fatalf("size %d, %v", before, err)
	}
	if n, err := Grow(int(r.Fd()), MaxSize); err != nil || n != MaxSize {
		t.Fatalf("grown to %d, %v", n, err)
	}
	if n, err := size(int(w.Fd())); err != nil || n != MaxSize {
		t.Errorf("size %d, %v", n, err)
	}
}

// size is how many bytes fit.
func size(fd int) (int, error) {
	n, err := unix.FcntlInt(uintptr(fd), unix.F_GETPIPE_SZ, 0)
	if err != nil {
		return 0, fmt.Errorf("size of pipe: %w", err)
	}
	return n, nil
}
