package posix_test

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/sandsea/sandsea/api/errdefs"
	"github.com/sandsea/sandsea/internal/layers/blob"
	"github.com/sandsea/sandsea/internal/layers/blob/conform"
	"github.com/sandsea/sandsea/internal/layers/blob/posix"
)

func open(t *testing.T, dir string) *posix.Store {
	t.Helper()
	s, err := posix.Open(dir)
	if err != nil {
		t.Fatal(err)
	}
	return s
}

// temps lists the temporary files of a store.
func temps(t *testing.T, dir string) []string {
	t.Helper()
	var out []string
	err := filepath.WalkDir(dir, func(path string, d fs.DirEntry, err error) error {
		if err == nil && strings.HasPrefix(d.Name(), ".") {
			out = append(out, path)
		}
		return err
	})
	if err != nil {
		t.Fatal(err)
	}
	return out
}

func TestConformance(t *testing.T) {
	conform.Run(t, func(t *testing.T) blob.Store {
		dir := t.TempDir()
		t.Cleanup(func() {
			if left := temps(t, dir); len(left) != 0 {
				t.Errorf("left behind: %v", left)
			}
		})
		return open(t, dir)
	})
}

func TestABlobThatIsNoFileIsDataLoss(t *testing.T) {
	dir := t.TempDir()
	s := open(t, dir)
	b, d := conform.Bytes(1, 10)
	if err := s.Put(t.Context(), d, bytes.NewReader(b)); err != nil {
		t.Fatal(err)
	}
	path, err := s.Path(t.Context(), d)
	if err != nil {
		t.Fatal(err)
	}
	if err := errors.Join(os.Remove(path), os.Symlink("/etc/passwd", path)); err != nil {
		t.Fatal(err)
	}
	if _, err := s.ReadAt(t.Context(), d, make([]byte, 1), 0); !errors.Is(err, errdefs.DataLoss) {
		t.Errorf("got %v", err)
	}
}

func TestSweepLeavesAWriterThatLives(t *testing.T) {
	dir := t.TempDir()
	s := open(t, dir)
	w, err := s.Create(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	b, d := conform.Bytes(1, 1000)
	if _, err := w.Write(b); err != nil {
		t.Fatal(err)
	}
	n, err := open(t, dir).Sweep(t.Context())
	if err != nil || n != 0 {
		t.Errorf("swept %d, %v", n, err)
	}
	if got, err := w.Commit(t.Context()); err != nil || got != d {
		t.Errorf("commit: %s, %v", got, err)
	}
}

// TestKilledWriters kills processes in the middle of puts: what is visible is whole, what is not is swept.
func TestKilledWriters(t *testing.T) {
	if dir := os.Getenv("POSIX_TEST_DIR"); dir != "" {
		writeForever(dir)
	}
	dir := t.TempDir()
	s := open(t, dir)
	// The kill may come late, between two blobs.
	for kills := 0; kills < 8 || len(temps(t, dir)) == 0 && kills < 100; kills++ {
		cmd := exec.CommandContext(t.Context(), os.Args[0], "-test.run=^TestKilledWriters$")
		cmd.Env = append(os.Environ(), "POSIX_TEST_DIR="+dir)
		out, err := cmd.StdoutPipe()
		if err != nil {
			t.Fatal(err)
		}
		if err := cmd.Start(); err != nil {
			t.Fatal(err)
		}
		// It says when it is in the middle of a blob.
		if _, err := io.ReadFull(out, make([]byte, 1)); err != nil {
			t.Fatal(err)
		}
		if err := cmd.Process.Kill(); err != nil {
			t.Fatal(err)
		}
		_ = cmd.Wait()
	}
	if len(temps(t, dir)) == 0 {
		t.Error("no writer was killed in the middle of a blob")
	}
	if _, err := s.Sweep(t.Context()); err != nil {
		t.Fatal(err)
	}
	if left := temps(t, dir); len(left) != 0 {
		t.Errorf("left after the sweep: %v", left)
	}
	n := 0
	for d, err := range s.All(t.Context()) {
		if err != nil {
			t.Fatal(err)
		}
		size, err := s.Stat(t.Context(), d)
		if err != nil {
			t.Fatal(err)
		}
		b := make([]byte, size)
		if _, err := s.ReadAt(t.Context(), d, b, 0); err != nil && !errors.Is(err, io.EOF) {
			t.Fatal(err)
		}
		if got := conform.DigestOf(b); got != d {
			t.Errorf("blob %s has digest %s", d, got)
		}
		n++
	}
	t.Logf("%d whole blobs", n)
}

func writeForever(dir string) {
	s, err := posix.Open(dir)
	if err != nil {
		panic(err)
	}
	for i := uint64(time.Now().UnixNano()); ; i++ {
		b, d := conform.Bytes(i, 300_000)
		half := len(b) / 2
		r := io.MultiReader(bytes.NewReader(b[:half]), &announce{}, bytes.NewReader(b[half:]))
		if err := s.Put(context.Background(), d, r); err != nil {
			panic(err)
		}
	}
}

// announce tells the parent that half of the blob is written.
type announce struct{}

func (*announce) Read([]byte) (int, error) {
	fmt.Print(".")
	return 0, io.EOF
}
