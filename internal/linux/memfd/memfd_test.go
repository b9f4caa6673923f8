package memfd

import (
	"bytes"
	"io"
	"os"
	"testing"

	"golang.org/x/sys/unix"
)

func TestASealedFileKeepsItsContent(t *testing.T) {
	for _, data := range [][]byte{nil, []byte("spec"), bytes.Repeat([]byte("x"), 1<<20)} {
		f, err := Sealed("test", data)
		if err != nil {
			t.Fatal(err)
		}
		if got, err := io.ReadAll(f); err != nil || !bytes.Equal(got, data) {
			t.Errorf("read %d bytes, %v; want %d", len(got), err, len(data))
		}
		if !isSealed(f) {
			t.Error("not sealed")
		}
		if _, err := f.WriteAt([]byte("y"), 0); err == nil {
			t.Error("a sealed file was written")
		}
		if err := f.Truncate(0); err == nil && len(data) > 0 {
			t.Error("a sealed file was cut")
		}
		f.Close()
	}
	f, err := Create("open")
	if err != nil {
		t.Fatal(err)
	}
	defer f.Close()
	if isSealed(f) {
		t.Error("a fresh file counts as sealed")
	}
	null, err := os.Open(os.DevNull)
	if err != nil {
		t.Fatal(err)
	}
	defer null.Close()
	if isSealed(null) {
		t.Error("/dev/null counts as sealed")
	}
}

// isSealed reports whether the file is a memfd whose content and size cannot change.
func isSealed(f *os.File) bool {
	const want = unix.F_SEAL_WRITE | unix.F_SEAL_SHRINK | unix.F_SEAL_GROW
	seals := 0
	err := control(f, func(fd uintptr) error {
		var err error
		seals, err = unix.FcntlInt(fd, unix.F_GET_SEALS, 0)
		return err
	})
	return err == nil && seals&want == want
}
