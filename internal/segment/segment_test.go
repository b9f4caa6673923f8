package segment

import (
	"bytes"
	"encoding/binary"
	"errors"
	"fmt"
	"io"
	"math/rand/v2"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/sandsea/sandsea/api/errdefs"
	"github.com/sandsea/sandsea/internal/testkit/leak"
	"github.com/sandsea/sandsea/internal/testkit/wait"
)

func TestMain(m *testing.M) {
	if dir := os.Getenv("SEGMENT_TEST_WRITER"); dir != "" {
		writeUntilKilled(dir)
	}
	os.Exit(leak.Main(m))
}

func newPool(t testing.TB, openFiles int) *Pool {
	t.Helper()
	p, err := NewPool(openFiles)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if err := p.Close(); err != nil {
			t.Error(err)
		}
	})
	return p
}

func openLog(t testing.TB, p *Pool, dir string, keep int64) *Log {
	t.Helper()
	l, err := p.Open(Config{Dir: dir, Keep: keep})
	if err != nil {
		t.Fatal(err)
	}
	return l
}

// content of a record is a function of its number.
func content(seq int64, size int) []byte {
	b := binary.LittleEndian.AppendUint64(nil, uint64(seq))
	r := rand.New(rand.NewPCG(uint64(seq), 7))
	for len(b) < max(8, size) {
		b = append(b, "abcdefgh"[r.IntN(8)])
	}
	return b
}

// size of a record's content, likewise; the mean is about most/2.
func size(seq int64, most int) int {
	return 8 + rand.New(rand.NewPCG(uint64(seq), 9)).IntN(most)
}

func appendN(t testing.TB, l *Log, n, most int) {
	t.Helper()
	for range n {
		next := l.Next()
		got, err := l.Append(content(next, size(next, most)))
		if err != nil || got != next {
			t.Fatalf("append: %d, %v; want %d", got, err, next)
		}
	}
}

func openReader(t testing.TB, dir string, from int64) *Reader {
	t.Helper()
	root, err := os.OpenRoot(filepath.Dir(dir))
	if err != nil {
		t.Fatal(err)
	}
	r := OpenReader(root, filepath.Base(dir), from)
	t.Cleanup(func() {
		r.Close()
		root.Close()
	})
	return r
}

// readAll gives the numbers that a reader yields to the end, and checks the contents. Errors are counted.
func readAll(t testing.TB, dir string, from int64, most int) (seqs []int64, errs []error) {
	t.Helper()
	r := openReader(t, dir, from)
	for {
		seq, payload, err := r.Next()
		switch {
		case errors.Is(err, io.EOF):
			return seqs, errs
		case err != nil:
			if errs = append(errs, err); len(errs) > 3 {
				return seqs, errs
			}
			continue
		case !bytes.Equal(payload, content(seq, size(seq, most))):
			t.Fatalf("record %d has another's content", seq)
		case len(seqs) > 0 && seq <= seqs[len(seqs)-1]:
			t.Fatalf("record %d after %d", seq, seqs[len(seqs)-1])
		}
		seqs = append(seqs, seq)
	}
}

func wantAll(t testing.TB, dir string, from, to int64, most int) {
	t.Helper()
	seqs, errs := readAll(t, dir, from, most)
	if len(errs) > 0 {
		t.Fatalf("read %s: %v", dir, errs)
	}
	if int64(len(seqs)) != to-from || len(seqs) > 0 && (seqs[0] != from || seqs[len(seqs)-1] != to-1) {
		t.Fatalf("read %d records, want %d to %d: %v…", len(seqs), from, to, seqs[:min(len(seqs), 5)])
	}
}

func files(t testing.TB, dir, ext string) (names []string) {
	t.Helper()
	entries, err := os.ReadDir(dir)
	if err != nil {
		t.Fatal(err)
	}
	for _, e := range entries {
		if strings.HasSuffix(e.Name(), ext) {
			names = append(names, e.Name())
		}
	}
	return names
}

func packed(t testing.TB, dir string, n int) {
	t.Helper()
	wait.Until(t, 30*time.Second, func() bool {
		return len(files(t, dir, extSealed)) == n && len(files(t, dir, extOpen)) <= 1 && len(files(t, dir, extPacking)) == 0
	}, fmt.Sprintf("%d packed segments", n))
}

func TestRecordsAreReadInOrderAcrossSegments(t *testing.T) {
	dir := filepath.Join(t.TempDir(), "log")
	l := openLog(t, newPool(t, 8), dir, 0)
	const n, most = 6000, 4000 // about 12 MB
	appendN(t, l, n, most)
	wantAll(t, dir, 0, n, most)
	packed(t, dir, 2)
	for _, from := range []int64{0, 1, n / 3, n / 2, n - 1, n} {
		wantAll(t, dir, from, n, most)
	}
	if seqs, errs := readAll(t, dir, n+10, most); len(seqs)+len(errs) > 0 {
		t.Errorf("from behind the end: %v, %v", seqs, errs)
	}
}

func TestAnEmptyLogHasNoFilesAndNoRecords(t *testing.T) {
	dir := filepath.Join(t.TempDir(), "log")
	l := openLog(t, newPool(t, 8), dir, 0)
	l.Seal()
	if err := errors.Join(l.Sync(), l.Close()); err != nil {
		t.Error(err)
	}
	if _, err := os.Stat(dir); !errors.Is(err, os.ErrNotExist) {
		t.Errorf("the directory: %v", err)
	}
	wantAll(t, dir, 0, 0, 8)
}

func TestRecordsThatDoNotFitAreRefused(t *testing.T) {
	l := openLog(t, newPool(t, 8), filepath.Join(t.TempDir(), "log"), 0)
	for _, n := range []int{0, MaxPayload + 1} {
		if _, err := l.Append(make([]byte, n)); !errors.Is(err, errdefs.Invalid) {
			t.Errorf("%d bytes: %v", n, err)
		}
	}
	if _, err := l.Append(make([]byte, MaxPayload)); err != nil {
		t.Error(err)
	}
	if l.Next() != 1 {
		t.Errorf("next is %d", l.Next())
	}
}

func TestSegmentsEndAtTheirSize(t *testing.T) {
	dir := filepath.Join(t.TempDir(), "log")
	p := newPool(t, 8)
	l := openLog(t, p, dir, 0)
	for i := range int64(9) { // three and a bit of them fit
		if _, err := l.Append(content(i, MaxPayload)); err != nil {
			t.Fatal(err)
		}
	}
	packed(t, dir, 2)
	want := []string{name(0, extSealed), name(3, extSealed), name(6, extOpen)}
	if got := files(t, dir, ""); !slices.Equal(got, want) {
		t.Errorf("got %v, want %v", got, want)
	}
	if st, err := os.Stat(filepath.Join(dir, want[2])); err != nil || st.Size() > MaxSize {
		t.Errorf("%v, %v", st.Size(), err)
	}
}

func TestASealedLogGoesOnInANewSegment(t *testing.T) {
	dir := filepath.Join(t.TempDir(), "log")
	p := newPool(t, 8)
	l := openLog(t, p, dir, 0)
	for i := range 3 {
		appendN(t, l, 10, 90)
		l.Seal()
		l.Seal() // an empty one is none
		packed(t, dir, i+1)
		if err := l.Close(); err != nil {
			t.Fatal(err)
		}
		l = openLog(t, p, dir, 0)
	}
	if l.Next() != 30 {
		t.Errorf("next is %d", l.Next())
	}
	appendN(t, l, 5, 90)
	wantAll(t, dir, 0, 35, 90)
}

// TestASealedLogIsOpenedAgainBeforeItIsPacked: what is being packed must not grow.
func TestASealedLogIsOpenedAgainBeforeItIsPacked(t *testing.T) {
	dir := filepath.Join(t.TempDir(), "log")
	p := newPool(t, 2)
	for range 200 {
		l := openLog(t, p, dir, 0)
		appendN(t, l, 3, 90)
		l.Seal()
		if err := l.Close(); err != nil {
			t.Fatal(err)
		}
	}
	packed(t, dir, 200)
	wantAll(t, dir, 0, 600, 90)
}

func TestALogGoesOnAfterItWasClosed(t *testing.T) {
	dir := filepath.Join(t.TempDir(), "log")
	for i := range 5 {
		p, err := NewPool(1)
		if err != nil {
			t.Fatal(err)
		}
		l := openLog(t, p, dir, 0)
		if want := int64(i * 500); l.Next() != want {
			t.Fatalf("next is %d, want %d", l.Next(), want)
		}
		appendN(t, l, 500, 8000) // about 2 MB
		if err := errors.Join(l.Sync(), p.Close(), p.Close()); err != nil {
			t.Fatal(err)
		}
		if _, err := l.Append([]byte("late")); !errors.Is(err, os.ErrClosed) {
			t.Errorf("after Close: %v", err)
		}
	}
	wantAll(t, dir, 0, 2500, 8000)
}

func TestASegmentThatWaitedForPackingIsPackedAtTheNextStart(t *testing.T) {
	dir := filepath.Join(t.TempDir(), "log")
	p, err := NewPool(4)
	if err != nil {
		t.Fatal(err)
	}
	l := openLog(t, p, dir, 0)
	appendN(t, l, 2000, 4000)
	if err := p.Close(); err != nil {
		t.Fatal(err)
	}
	// Counted while nothing is packed: for a moment a segment has both forms.
	full := len(files(t, dir, extOpen)) + len(files(t, dir, extSealed)) - 1
	if err := os.WriteFile(filepath.Join(dir, name(0, extPacking)), []byte("half"), 0o600); err != nil {
		t.Fatal(err)
	}
	openLog(t, newPool(t, 4), dir, 0)
	packed(t, dir, full)
	wantAll(t, dir, 0, 2000, 4000)
}

func TestOfBothFormsThePackedOneWins(t *testing.T) {
	dir := filepath.Join(t.TempDir(), "log")
	l := openLog(t, newPool(t, 4), dir, 0)
	appendN(t, l, 100, 90)
	raw, err := os.ReadFile(filepath.Join(dir, name(0, extOpen)))
	if err != nil {
		t.Fatal(err)
	}
	l.Seal()
	packed(t, dir, 1)
	// As when it is killed before it removes the other.
	if err := os.WriteFile(filepath.Join(dir, name(0, extOpen)), raw[:500], 0o600); err != nil {
		t.Fatal(err)
	}
	wantAll(t, dir, 0, 100, 90)
	if l := openLog(t, newPool(t, 4), dir, 0); l.Next() != 100 || l.Damaged() != 0 {
		t.Errorf("next is %d, %d bytes damaged", l.Next(), l.Damaged())
	}
	if left := files(t, dir, extOpen); len(left) > 0 {
		t.Errorf("left: %v", left)
	}
	// As after a loss of power in which it did not come to the disk.
	if err := errors.Join(
		os.WriteFile(filepath.Join(dir, name(0, extOpen)), raw, 0o600), os.Truncate(filepath.Join(dir, name(0, extSealed)), 300),
	); err != nil {
		t.Fatal(err)
	}
	if l := openLog(t, newPool(t, 4), dir, 0); l.Next() != 100 || l.Damaged() != 0 {
		t.Errorf("next is %d, %d bytes damaged", l.Next(), l.Damaged())
	}
	wantAll(t, dir, 0, 100, 90)
}

func TestTheNewestBytesAreKept(t *testing.T) {
	dir := filepath.Join(t.TempDir(), "log")
	const keep, most = 6 << 20, 4000
	l := openLog(t, newPool(t, 4), dir, keep)
	stale := openReader(t, dir, 0)
	appendN(t, l, 100, most)
	if seq, _, err := stale.Next(); seq != 0 || err != nil {
		t.Fatal(seq, err)
	}
	const n = 20000 // about 40 MB, half of that packed
	appendN(t, l, n-100, most)
	wait.Until(t, 30*time.Second, func() bool { return len(files(t, dir, extOpen)) == 1 }, "all packed")
	appendN(t, l, 2200, most) // what is packed counts as it lies there
	var total int64
	wait.Until(t, 30*time.Second, func() bool {
		total = 0
		for _, f := range files(t, dir, "") {
			st, err := os.Stat(filepath.Join(dir, f))
			if errors.Is(err, os.ErrNotExist) {
				return false // it was packed meanwhile
			}
			if err != nil {
				t.Fatal(err)
			}
			total += st.Size()
		}
		return true
	}, "a look at all files")
	if total < keep || total > keep+2*MaxSize {
		t.Errorf("%d bytes are there", total)
	}
	seqs, errs := readAll(t, dir, 0, most)
	if len(errs) > 0 || len(seqs) == 0 || seqs[0] == 0 || seqs[len(seqs)-1] != n+2200-1 || seqs[len(seqs)-1]-seqs[0] != int64(len(seqs)-1) {
		t.Errorf("%d records from %v on, %v", len(seqs), seqs[:min(1, len(seqs))], errs)
	}
	// A reader that was overtaken goes on with what is there.
	last := int64(0)
	for {
		seq, _, err := stale.Next()
		if errors.Is(err, io.EOF) {
			break
		}
		if err != nil || seq <= last {
			t.Fatal(seq, err)
		}
		last = seq
	}
	if last != n+2200-1 {
		t.Errorf("the overtaken reader ends at %d", last)
	}
}

func TestAReaderFollowsAWriter(t *testing.T) {
	dir := filepath.Join(t.TempDir(), "log")
	l := openLog(t, newPool(t, 4), dir, 0)
	const n, most = 12000, 4000 // 24 MB: five segments
	failed := make(chan error, 1)
	go func() {
		defer close(failed)
		for i := range int64(n) {
			if _, err := l.Append(content(i, size(i, most))); err != nil {
				failed <- err
				return
			}
		}
	}()
	r := openReader(t, dir, 0)
	for want := int64(0); want < n; {
		seq, payload, err := r.Next()
		if errors.Is(err, io.EOF) {
			if err, ok := <-failed; ok {
				t.Fatal(err)
			}
			continue
		}
		if err != nil || seq != want || !bytes.Equal(payload, content(seq, size(seq, most))) {
			t.Fatalf("got record %d, %v; want %d", seq, err, want)
		}
		want++
	}
}

func TestManyLogsShareFewFiles(t *testing.T) {
	base := t.TempDir()
	p := newPool(t, 3)
	var logs []*Log
	for i := range 40 {
		logs = append(logs, openLog(t, p, filepath.Join(base, fmt.Sprint(i)), 0))
	}
	for round := range 20 {
		for _, l := range logs {
			appendN(t, l, 3, 200)
		}
		p.mu.Lock()
		if n := p.open.Len(); n > 3 {
			t.Errorf("round %d: %d files are open", round, n)
		}
		p.mu.Unlock()
	}
	for i := range logs {
		wantAll(t, filepath.Join(base, fmt.Sprint(i)), 0, 60, 200)
	}
}

func TestAFailedWriteLeavesNoTrace(t *testing.T) {
	dir := filepath.Join(t.TempDir(), "log")
	p := newPool(t, 3)
	l := openLog(t, p, dir, 0)
	appendN(t, l, 10, 90)
	// A file that is open for reading only refuses every write.
	f, err := os.Open(filepath.Join(dir, name(0, extOpen)))
	if err != nil {
		t.Fatal(err)
	}
	p.mu.Lock()
	s := l.slot.Value.(*slot)
	good := s.f
	s.f = f
	p.mu.Unlock()
	if _, err := l.Append(content(10, 50)); err == nil {
		t.Fatal("it was written")
	}
	p.mu.Lock()
	s.f = good
	p.mu.Unlock()
	f.Close()
	appendN(t, l, 10, 90)
	wantAll(t, dir, 0, 20, 90)
}

// oneSegment makes a log of one segment and gives its bytes, growing and packed.
func oneSegment(t testing.TB, n, most int) (raw, sealed []byte) {
	t.Helper()
	dir := filepath.Join(t.TempDir(), "log")
	l := openLog(t, newPool(t, 2), dir, 0)
	appendN(t, l, n, most)
	raw, err := os.ReadFile(filepath.Join(dir, name(0, extOpen)))
	if err != nil {
		t.Fatal(err)
	}
	l.Seal()
	packed(t, dir, 1)
	sealed, err = os.ReadFile(filepath.Join(dir, name(0, extSealed)))
	if err != nil {
		t.Fatal(err)
	}
	return raw, sealed
}

func put(t testing.TB, dir, file string, b []byte) {
	t.Helper()
	if err := errors.Join(os.MkdirAll(dir, 0o700), os.WriteFile(filepath.Join(dir, file), b, 0o600)); err != nil {
		t.Fatal(err)
	}
}

func TestEveryPrefixIsAShorterLogThatGoesOn(t *testing.T) {
	const n, most = 12, 60
	raw, _ := oneSegment(t, n, most)
	base := t.TempDir()
	p := newPool(t, 2)
	ends := 0
	for cut := range len(raw) + 1 {
		dir := filepath.Join(base, fmt.Sprint(cut))
		put(t, dir, name(0, extOpen), raw[:cut])
		seqs, errs := readAll(t, dir, 0, most)
		if len(errs) > 0 || len(seqs) > 0 && seqs[len(seqs)-1] != int64(len(seqs)-1) {
			t.Fatalf("cut at %d: %v, %v", cut, seqs, errs)
		}
		l := openLog(t, p, dir, 0)
		if l.Next() != int64(len(seqs)) || l.Damaged() != 0 {
			t.Fatalf("cut at %d: next is %d, %d are there; %d damaged", cut, l.Next(), len(seqs), l.Damaged())
		}
		appendN(t, l, 2, most)
		wantAll(t, dir, 0, int64(len(seqs)+2), most)
		ends = len(seqs)
		if err := l.Close(); err != nil {
			t.Fatal(err)
		}
	}
	if ends != n {
		t.Errorf("all of it is %d records", ends)
	}
}

func TestZerosBehindTheEndAreCut(t *testing.T) {
	raw, _ := oneSegment(t, 10, 60)
	dir := filepath.Join(t.TempDir(), "log")
	put(t, dir, name(0, extOpen), append(slices.Clone(raw), make([]byte, 4096)...))
	l := openLog(t, newPool(t, 2), dir, 0)
	if l.Next() != 10 || l.Damaged() != 0 {
		t.Errorf("next is %d, %d bytes damaged", l.Next(), l.Damaged())
	}
	wantAll(t, dir, 0, 10, 60)
}

// TestNoChangedByteIsAccepted flips bits everywhere: what is still read was written so.
func TestNoChangedByteIsAccepted(t *testing.T) {
	const n, most = 60, 60
	raw, sealed := oneSegment(t, n, most)
	dir := filepath.Join(t.TempDir(), "log")
	r := rand.New(rand.NewPCG(3, 4))
	for ext, whole := range map[string][]byte{extOpen: raw, extSealed: sealed} {
		unseen := 0
		for i := range len(whole) {
			b := slices.Clone(whole)
			b[i] ^= 1 << r.IntN(8)
			put(t, dir, name(0, ext), b)
			if seqs, errs := readAll(t, dir, 0, most); len(seqs) == n && len(errs) == 0 {
				t.Fatalf("%s: byte %d of %d: nothing was seen", ext, i, len(whole))
			} else if len(errs) == 0 {
				unseen++
			}
		}
		// Only a length that points behind the end looks like a record that is still being written.
		if ext == extSealed && unseen > 0 || unseen > 4*n {
			t.Errorf("%s: %d of %d changes look like a shorter log", ext, unseen, len(whole))
		}
		if err := os.Remove(filepath.Join(dir, name(0, ext))); err != nil {
			t.Fatal(err)
		}
	}
}

func TestFramesThatMovedRepeatOrAreMissingAreSeen(t *testing.T) {
	const most = 60
	raw, _ := oneSegment(t, 5, most)
	var at []int // where frames begin
	for i := headerSize; i < len(raw); i += frameHead + int(le.Uint32(raw[i:])) {
		at = append(at, i)
	}
	at = append(at, len(raw))
	f := func(i int) []byte { return raw[at[i]:at[i+1]] }
	head := raw[:headerSize]
	for what, b := range map[string][]byte{
		"missing first": slices.Concat(head, f(1), f(2), f(3), f(4)),
		"missing":       slices.Concat(head, f(0), f(1), f(3), f(4)),
		"repeated":      slices.Concat(head, f(0), f(1), f(1), f(2)),
		"swapped":       slices.Concat(head, f(0), f(2), f(1), f(3)),
	} {
		dir := filepath.Join(t.TempDir(), "log")
		put(t, dir, name(0, extOpen), b)
		if _, errs := readAll(t, dir, 0, most); len(errs) == 0 || !errors.Is(errs[0], errdefs.DataLoss) {
			t.Errorf("%s: %v", what, errs)
		}
	}
}

func TestASegmentOfAnotherLogIsSeen(t *testing.T) {
	base := t.TempDir()
	p := newPool(t, 4)
	var dirs []string
	for i := range 2 {
		dir := filepath.Join(base, fmt.Sprint(i))
		l := openLog(t, p, dir, 0)
		if _, err := l.Append([]byte{byte(i), 1, 2, 3}); err != nil {
			t.Fatal(err)
		}
		l.Seal()
		appendN(t, l, 3, 40)
		packed(t, dir, 1)
		dirs = append(dirs, dir)
	}
	other, err := os.ReadFile(filepath.Join(dirs[1], name(1, extOpen)))
	if err != nil {
		t.Fatal(err)
	}
	put(t, dirs[0], name(1, extOpen), other)
	r := openReader(t, dirs[0], 0)
	if seq, _, err := r.Next(); seq != 0 || err != nil {
		t.Fatal(seq, err)
	}
	if _, _, err := r.Next(); !errors.Is(err, errdefs.DataLoss) {
		t.Errorf("got %v", err)
	}
}

func TestDamageIsSetAsideAndTheLogGoesOn(t *testing.T) {
	const n, most = 40, 60
	raw, sealed := oneSegment(t, n, most)
	t.Run("in a record", func(t *testing.T) {
		dir := filepath.Join(t.TempDir(), "log")
		b := slices.Clone(raw)
		b[len(b)/2] ^= 4
		put(t, dir, name(0, extOpen), b)
		good, _ := readAll(t, dir, 0, most)
		l := openLog(t, newPool(t, 2), dir, 0)
		if l.Damaged() == 0 || l.Next() <= n || len(good) < 2 {
			t.Fatalf("%d bytes damaged, next is %d; %d are good", l.Damaged(), l.Next(), len(good))
		}
		first := l.Next()
		appendN(t, l, 3, most)
		seqs, errs := readAll(t, dir, 0, most)
		if want := append(good, first, first+1, first+2); !slices.Equal(seqs, want) || len(errs) > 0 {
			t.Errorf("got %v, %v; want %v", seqs, errs, want)
		}
		if aside := files(t, dir, extDamaged); len(aside) != 1 {
			t.Errorf("set aside: %v", aside)
		}
	})
	t.Run("in a header", func(t *testing.T) {
		dir := filepath.Join(t.TempDir(), "log")
		b := slices.Clone(raw)
		b[20] ^= 4
		put(t, dir, name(0, extOpen), b)
		l := openLog(t, newPool(t, 2), dir, 0)
		if l.Damaged() == 0 || l.Next() <= n {
			t.Fatalf("%d bytes damaged, next is %d", l.Damaged(), l.Next())
		}
		first := l.Next()
		appendN(t, l, 3, most)
		if seqs, errs := readAll(t, dir, 0, most); !slices.Equal(seqs, []int64{first, first + 1, first + 2}) || len(errs) > 0 {
			t.Errorf("got %v, %v", seqs, errs)
		}
	})
	t.Run("in a packed segment", func(t *testing.T) {
		dir := filepath.Join(t.TempDir(), "log")
		b := slices.Clone(sealed)
		b[len(b)-10] ^= 4
		put(t, dir, name(0, extSealed), b)
		l := openLog(t, newPool(t, 2), dir, 0)
		first := l.Next()
		appendN(t, l, 3, most)
		if seqs, errs := readAll(t, dir, 0, most); !slices.Equal(seqs, []int64{first, first + 1, first + 2}) || len(errs) != 1 || first <= n {
			t.Errorf("got %v, %v", seqs, errs)
		}
	})
}

func TestAReaderIsNotLedAstray(t *testing.T) {
	base := t.TempDir()
	raw, _ := oneSegment(t, 5, 60)
	outside := filepath.Join(t.TempDir(), "outside")
	put(t, outside, name(0, extOpen), raw)
	try := func(t *testing.T, dir string) {
		seqs, errs := readAll(t, dir, 0, 60)
		if len(seqs) > 0 || len(errs) == 0 {
			t.Errorf("got %v, %v", seqs, errs)
		}
	}
	t.Run("by a link to a file", func(t *testing.T) {
		dir := filepath.Join(base, "file")
		if err := errors.Join(os.Mkdir(dir, 0o700), os.Symlink(filepath.Join(outside, name(0, extOpen)), filepath.Join(dir, name(0, extOpen)))); err != nil {
			t.Fatal(err)
		}
		try(t, dir)
	})
	t.Run("by a link to a directory", func(t *testing.T) {
		dir := filepath.Join(base, "dir")
		if err := os.Symlink(outside, dir); err != nil {
			t.Fatal(err)
		}
		try(t, dir)
	})
	t.Run("by a FIFO", func(t *testing.T) {
		dir := filepath.Join(base, "fifo")
		if err := errors.Join(os.Mkdir(dir, 0o700), syscall.Mkfifo(filepath.Join(dir, name(0, extOpen)), 0o600)); err != nil {
			t.Fatal(err)
		}
		try(t, dir)
	})
	t.Run("by a large file", func(t *testing.T) {
		dir := filepath.Join(base, "large")
		put(t, dir, name(0, extOpen), raw)
		if err := os.Truncate(filepath.Join(dir, name(0, extOpen)), 1<<40); err != nil {
			t.Fatal(err)
		}
		try(t, dir)
	})
}

// FuzzReader feeds a reader what it likes: it must end, and give records in their order.
func FuzzReader(f *testing.F) {
	raw, sealed := seeds(f)
	dir := filepath.Join(f.TempDir(), "log")
	f.Fuzz(func(t *testing.T, b []byte, packed bool) {
		ext, like := extOpen, raw
		if packed {
			ext, like = extSealed, sealed
		}
		put(t, dir, name(0, ext), b)
		defer os.Remove(filepath.Join(dir, name(0, ext)))
		if last := lastRead(t, dir); bytes.Equal(b, like) && last != 19 {
			t.Fatalf("the last is %d", last)
		}
	})
}

// FuzzOpen lets a writer go on behind what it likes: no number may come twice.
func FuzzOpen(f *testing.F) {
	seeds(f)
	f.Fuzz(func(t *testing.T, b []byte, packed bool) {
		dir := filepath.Join(t.TempDir(), "log")
		ext := extOpen
		if packed {
			ext = extSealed
		}
		put(t, dir, name(0, ext), b)
		last := lastRead(t, dir)
		p, err := NewPool(1)
		if err != nil {
			t.Fatal(err)
		}
		defer p.Close()
		l, err := p.Open(Config{Dir: dir})
		if err != nil {
			return // a later version
		}
		seq, err := l.Append([]byte("more"))
		if err != nil || seq <= last {
			t.Fatalf("append: %d, %v; %d was there", seq, err, last)
		}
		if got := lastRead(t, dir); got != seq {
			t.Fatalf("the last is %d, want %d", got, seq)
		}
	})
}

func seeds(f *testing.F) (raw, sealed []byte) {
	raw, sealed = oneSegment(f, 20, 60)
	f.Add(raw, false)
	f.Add(sealed, true)
	f.Add(raw[:100], false)
	f.Add([]byte{}, true)
	return raw, sealed
}

// lastRead is the number of the last record that can be read, -1 if none can.
func lastRead(t *testing.T, dir string) int64 {
	t.Helper()
	root, err := os.OpenRoot(filepath.Dir(dir))
	if err != nil {
		t.Fatal(err)
	}
	defer root.Close()
	r := OpenReader(root, filepath.Base(dir), 0)
	defer r.Close()
	last := int64(-1)
	for bad := 0; bad < 3; {
		seq, payload, err := r.Next()
		switch {
		case errors.Is(err, io.EOF):
			return last
		case err != nil:
			bad++
		case seq <= last || len(payload) == 0 || len(payload) > MaxPayload:
			t.Fatalf("record %d of %d bytes after %d", seq, len(payload), last)
		default:
			last = seq
		}
	}
	return last
}

func BenchmarkAppend(b *testing.B) {
	for _, logs := range []int{1, 1000} {
		b.Run(fmt.Sprint(logs), func(b *testing.B) {
			base := b.TempDir()
			p := newPool(b, 1024)
			all := make([]*Log, logs)
			for i := range all {
				all[i] = openLog(b, p, filepath.Join(base, fmt.Sprint(i)), 64<<20)
			}
			payload := content(1, 81)
			b.SetBytes(int64(len(payload) + frameHead))
			b.ReportAllocs()
			for i := 0; b.Loop(); i++ {
				if _, err := all[i%logs].Append(payload); err != nil {
					b.Fatal(err)
				}
			}
		})
	}
}

func BenchmarkRead(b *testing.B) {
	dir := filepath.Join(b.TempDir(), "log")
	l := openLog(b, newPool(b, 4), dir, 0)
	const n = 200_000
	appendN(b, l, n, 150)
	wait.Until(b, time.Minute, func() bool { return len(files(b, dir, extOpen)) == 1 }, "all packed")
	for b.Loop() {
		r := openReader(b, dir, 0)
		count := 0
		for {
			if _, _, err := r.Next(); err != nil {
				break
			}
			count++
		}
		if count != n {
			b.Fatal(count)
		}
		r.Close()
	}
	b.ReportMetric(float64(n*b.N)/b.Elapsed().Seconds(), "records/s")
}
