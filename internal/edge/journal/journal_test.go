package journal

import (
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"testing"

	bolt "go.etcd.io/bbolt"

	"github.com/sandsea/sandsea/api/errdefs"
)

func open(t *testing.T, dir string) *Bolt {
	t.Helper()
	j, err := Open(dir, "boot-1")
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = j.Close() })
	return j
}

func names(t *testing.T, j Journal, kind string) []string {
	t.Helper()
	var out []string
	for r, err := range j.All(kind) {
		if err != nil {
			t.Fatal(err)
		}
		out = append(out, r.Key.Name+"="+string(r.Data))
	}
	return out
}

func TestRecordsAreReadInNameOrderByKind(t *testing.T) {
	j := open(t, t.TempDir())
	for _, n := range []string{"b", "c", "a"} {
		if err := j.Put(Record{Key{"sandbox", n}, []byte("1")}); err != nil {
			t.Fatal(err)
		}
	}
	if err := j.PutAll(Record{Key{"process", "x"}, []byte("2")}, Record{Key{"sandbox", "b"}, []byte("3")}); err != nil {
		t.Fatal(err)
	}
	if err := j.Delete(Key{"sandbox", "c"}, Key{"sandbox", "nobody"}, Key{"nothing", "x"}); err != nil {
		t.Fatal(err)
	}
	if got := names(t, j, "sandbox"); !slices.Equal(got, []string{"a=1", "b=3"}) {
		t.Fatal(got)
	}
	if got := names(t, j, "absent"); got != nil {
		t.Fatal(got)
	}
	r, ok, err := j.Get(Key{"process", "x"})
	if err != nil || !ok || string(r.Data) != "2" {
		t.Fatal(r, ok, err)
	}
	if _, ok, err := j.Get(Key{"process", "y"}); ok || err != nil {
		t.Fatal(ok, err)
	}
	if _, ok, err := j.Get(Key{"none", "y"}); ok || err != nil {
		t.Fatal(ok, err)
	}
}

func TestTheConsumerOfAllMayWriteAndStop(t *testing.T) {
	j := open(t, t.TempDir())
	const n = 3*pageSize + 5
	for i := range n {
		if err := j.Put(Record{Key{"k", fmt.Sprintf("%06d", i)}, []byte("x")}); err != nil {
			t.Fatal(err)
		}
	}
	seen := 0
	for r, err := range j.All("k") {
		if err != nil {
			t.Fatal(err)
		}
		if want := fmt.Sprintf("%06d", seen); r.Key.Name != want {
			t.Fatalf("got %s, want %s", r.Key.Name, want)
		}
		seen++
		if err := j.Delete(r.Key); err != nil {
			t.Fatal(err)
		}
	}
	if seen != n {
		t.Fatalf("saw %d of %d", seen, n)
	}
	if left := names(t, j, "k"); left != nil {
		t.Fatal(left)
	}
	if err := j.PutAll(Record{Key{"k", "a"}, nil}, Record{Key{"k", "b"}, nil}); err != nil {
		t.Fatal(err)
	}
	for range j.All("k") {
		break
	}
}

func TestAnotherBootIsDiscardedUnread(t *testing.T) {
	dir := t.TempDir()
	j := open(t, dir)
	if err := j.Put(Record{Key{"sandbox", "old"}, nil}); err != nil {
		t.Fatal(err)
	}
	if err := j.Close(); err != nil {
		t.Fatal(err)
	}
	if err := os.WriteFile(filepath.Join(dir, "boot-0.db"), []byte("not a journal at all"), 0o600); err != nil {
		t.Fatal(err)
	}
	if err := os.WriteFile(filepath.Join(dir, "note.txt"), nil, 0o600); err != nil {
		t.Fatal(err)
	}
	j2, err := Open(dir, "boot-2")
	if err != nil {
		t.Fatal(err)
	}
	defer j2.Close()
	if got := names(t, j2, "sandbox"); got != nil {
		t.Fatal(got)
	}
	entries, err := os.ReadDir(dir)
	if err != nil {
		t.Fatal(err)
	}
	var left []string
	for _, e := range entries {
		left = append(left, e.Name())
	}
	if !slices.Equal(left, []string{"boot-2.db", "note.txt"}) {
		t.Fatal(left)
	}
}

func TestASecondWriterIsRefused(t *testing.T) {
	dir := t.TempDir()
	open(t, dir)
	if _, err := Open(dir, "boot-1"); !errors.Is(err, errdefs.FailedPrecondition) {
		t.Fatalf("second open: %v", err)
	}
}

func TestABootIDThatIsAPathIsRefused(t *testing.T) {
	for _, id := range []string{"", "../x", "a/b", "a\x00"} {
		if _, err := Open(t.TempDir(), id); !errors.Is(err, errdefs.Invalid) {
			t.Errorf("%q: %v", id, err)
		}
	}
}

func TestATornRecordIsDataLoss(t *testing.T) {
	dir := t.TempDir()
	j := open(t, dir)
	if err := j.Put(Record{Key{"sandbox", "a"}, []byte(`{"state":"running"}`)}); err != nil {
		t.Fatal(err)
	}
	err := j.db.Update(func(tx *bolt.Tx) error {
		b := tx.Bucket([]byte("sandbox"))
		v := append([]byte(nil), b.Get([]byte("a"))...)
		v[len(v)-2] ^= 1
		return b.Put([]byte("a"), v)
	})
	if err != nil {
		t.Fatal(err)
	}
	if _, _, err := j.Get(Key{"sandbox", "a"}); !errors.Is(err, errdefs.DataLoss) {
		t.Fatalf("Get: %v", err)
	}
	var last error
	for _, err := range j.All("sandbox") {
		last = err
	}
	if !errors.Is(last, errdefs.DataLoss) {
		t.Fatalf("All: %v", last)
	}
}

func BenchmarkPut(b *testing.B) {
	j, err := Open(b.TempDir(), "bench")
	if err != nil {
		b.Fatal(err)
	}
	defer j.Close()
	data := make([]byte, 600)
	for i := 0; b.Loop(); i++ {
		if err := j.Put(Record{Key{"sandbox", fmt.Sprint(i % 4000)}, data}); err != nil {
			b.Fatal(err)
		}
	}
}
