package memfd

import (
	"bytes"
	"io"
	"os"
	"testing"
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
		if !IsSealed(f) {
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
	if IsSealed(f) {
		t.Error("a fresh file counts as sealed")
	}
	null, err := os.Open(os.DevNull)
	if err != nil {
		t.Fatal(err)
	}
	defer null.Close()
	if IsSealed(null) {
		t.Error("/dev/null counts as sealed")
	}
}
