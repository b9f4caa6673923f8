package follow

import (
	"bytes"
	"context"
	"encoding/binary"
	"errors"
	"io"
	"log/slog"
	"os"
	"path/filepath"
	"sync"
	"testing"
	"time"

	"github.com/sandsea/sandsea/api/errdefs"
	"github.com/sandsea/sandsea/internal/linux/sparse"
	"github.com/sandsea/sandsea/internal/record"
)

const block = 4096

// sequence fills p with what the test's stream has at off. No word of it is zero.
func sequence(p []byte, off int64) {
	var w [8]byte
	for i := 0; i < len(p); {
		o := off + int64(i)
		binary.LittleEndian.PutUint64(w[:], uint64(o/8+1)*0x9e3779b97f4a7c15|0x0101010101010101)
		i += copy(p[i:], w[o%8:])
	}
}

func want(off int64, n int) []byte {
	p := make([]byte, n)
	sequence(p, off)
	return p
}

// rec is a record under test and its writer.
type rec struct {
	f    *os.File
	size int64
	dir  string
}

func newRec(t testing.TB) (*rec, *Follower) {
	t.Helper()
	dir := t.TempDir()
	path := record.Path(dir, "s1", 1, record.Stdout)
	if err := os.MkdirAll(filepath.Dir(path), 0o700); err != nil {
		t.Fatal(err)
	}
	f, err := os.Create(path)
	if err != nil {
		t.Fatal(err)
	}
	fo := New(dir, slog.New(slog.DiscardHandler))
	t.Cleanup(func() { fo.Close(); f.Close() })
	return &rec{f: f, dir: dir}, fo
}

func (r *rec) write(t testing.TB, n int) {
	t.Helper()
	if _, err := r.f.WriteAt(want(r.size, n), r.size); err != nil {
		t.Error(err)
	}
	r.size += int64(n)
}

func (r *rec) punch(t testing.TB, from, to int64) {
	t.Helper()
	if err := sparse.Punch(int(r.f.Fd()), from, to-from); err != nil {
		t.Error(err)
	}
}

// lengthen makes a gap at the end, as the keeper does on a full disk.
func (r *rec) lengthen(t testing.TB, n int64) {
	t.Helper()
	if r.size%block != 0 {
		t.Fatalf("a gap must begin at a block's end, not at %d", r.size)
	}
	if err := r.f.Truncate(r.size + n); err != nil {
		t.Error(err)
	}
	r.size += n
}

func span(from, to int64) record.Range { return record.Range{From: from, To: to} }

func open(t testing.TB, f *Follower, from int64, done <-chan struct{}) *Reader {
	t.Helper()
	r, err := f.Open("s1", 1, record.Stdout, from, done)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { r.Close() })
	return r
}

// collect reads to the end: the gaps, joined, and how many bytes came. It checks order, completeness and content.
func collect(t testing.TB, r *Reader, buf []byte) (gaps []record.Range, data, end int64) {
	t.Helper()
	at := r.off
	for {
		p, err := r.Next(t.Context(), buf)
		if err != nil {
			t.Fatal(err)
		}
		if p.Offset != at {
			t.Fatalf("piece at %d, want %d", p.Offset, at)
		}
		switch {
		case p.End:
			return gaps, data, p.Offset
		case p.Gap > 0:
			if n := len(gaps); n > 0 && gaps[n-1].To == at {
				gaps[n-1].To += p.Gap
			} else {
				gaps = append(gaps, record.Range{From: at, To: at + p.Gap})
			}
			at += p.Gap
		default:
			if !bytes.Equal(p.Data, want(at, len(p.Data))) {
				t.Fatalf("wrong bytes between %d and %d", at, at+int64(len(p.Data)))
			}
			at += int64(len(p.Data))
			data += int64(len(p.Data))
		}
	}
}

func TestReadersYieldDataGapsAndTheEndFromAnyOffset(t *testing.T) {
	r, f := newRec(t)
	r.write(t, 10*block)
	r.punch(t, 2*block, 5*block)
	r.lengthen(t, 3*block)
	r.write(t, 100)
	for _, c := range []struct {
		name string
		from int64
		gaps []record.Range
		data int64
	}{
		{"from the beginning", 0, []record.Range{span(2*block, 5*block), span(10*block, 13*block)}, 7*block + 100},
		{"from data", 5*block + 1, []record.Range{span(10*block, 13*block)}, 5*block + 99},
		{
			"from within a gap", 3*block + 7,
			[]record.Range{span(3*block+7, 5*block), span(10*block, 13*block)},
			5*block + 100,
		},
		{"from the end", r.size, nil, 0},
	} {
		for _, size := range []int{1000, block, 1 << 20} {
			gaps, data, end := collect(t, open(t, f, c.from, nil), make([]byte, size))
			if len(gaps) != len(c.gaps) || data != c.data || end != r.size {
				t.Fatalf("%s, buffer %d: gaps %v, %d bytes, end %d", c.name, size, gaps, data, end)
			}
			for i := range gaps {
				if gaps[i] != c.gaps[i] {
					t.Errorf("%s, buffer %d: gap %v, want %v", c.name, size, gaps[i], c.gaps[i])
				}
			}
		}
	}
}

func TestZerosThatTheCommandWroteAreData(t *testing.T) {
	r, f := newRec(t)
	if _, err := r.f.Write(make([]byte, 1<<20)); err != nil {
		t.Fatal(err)
	}
	for _, synced := range []bool{false, true} {
		if synced {
			if err := r.f.Sync(); err != nil {
				t.Fatal(err)
			}
		}
		rd := open(t, f, 0, nil)
		var n int
		for {
			p, err := rd.Next(t.Context(), make([]byte, 64<<10))
			if err != nil {
				t.Fatal(err)
			}
			if p.End {
				break
			}
			if p.Gap > 0 {
				t.Fatalf("synced %v: gap of %d at %d", synced, p.Gap, p.Offset)
			}
			n += len(p.Data)
		}
		if n != 1<<20 {
			t.Errorf("synced %v: %d bytes", synced, n)
		}
	}
}

func TestOpenAndOffsetsThatCannotBe(t *testing.T) {
	r, f := newRec(t)
	r.write(t, 10)
	if _, err := f.Open("s1", 2, record.Stdout, 0, nil); !errors.Is(err, errdefs.NotFound) {
		t.Errorf("no record: %v", err)
	}
	if _, err := f.Open("s1", 1, record.Stdout, -1, nil); !errors.Is(err, errdefs.Invalid) {
		t.Errorf("negative offset: %v", err)
	}
	if _, err := open(t, f, 11, nil).Next(t.Context(), make([]byte, 1)); !errors.Is(err, errdefs.Invalid) {
		t.Errorf("offset past the end: %v", err)
	}
	if _, err := open(t, f, 0, nil).Next(t.Context(), nil); !errors.Is(err, io.ErrShortBuffer) {
		t.Errorf("no buffer: %v", err)
	}
}

func TestReadersWaitAtTheLiveEndUntilTheStreamIsDone(t *testing.T) {
	for _, polling := range []bool{false, true} {
		r, f := newRec(t)
		f.polling = polling
		done := make(chan struct{})
		const readers, writes = 5, 300
		var wg sync.WaitGroup
		for range readers {
			rd := open(t, f, 0, done)
			wg.Go(func() {
				gaps, data, end := collect(t, rd, make([]byte, 8192))
				if len(gaps) > 0 || data != end || end != writes*777 {
					t.Errorf("gaps %v, %d bytes, end %d", gaps, data, end)
				}
			})
		}
		for range writes {
			r.write(t, 777)
		}
		close(done)
		wg.Wait()
	}
}

func TestAWaitingReaderIsWokenByOneWriteAndByItsContext(t *testing.T) {
	r, f := newRec(t)
	done := make(chan struct{})
	defer close(done)
	rd := open(t, f, 0, done)
	ctx, cancel := context.WithTimeout(t.Context(), 20*time.Millisecond)
	defer cancel()
	if _, err := rd.Next(ctx, make([]byte, 10)); !errors.Is(err, context.DeadlineExceeded) {
		t.Fatalf("got %v, want DeadlineExceeded", err)
	}
	got := make(chan Piece)
	go func() {
		p, err := rd.Next(t.Context(), make([]byte, 10))
		if err != nil {
			t.Error(err)
		}
		got <- p
	}()
	r.write(t, 5)
	select {
	case p := <-got:
		if len(p.Data) != 5 {
			t.Errorf("%d bytes", len(p.Data))
		}
	case <-time.After(20 * time.Second):
		t.Fatal("not woken")
	}
}

// TestNoZeroIsEverReadFromARangeThatIsPunchedMeanwhile has readers race a writer that punches close behind itself.
func TestNoZeroIsEverReadFromARangeThatIsPunchedMeanwhile(t *testing.T) {
	r, f := newRec(t)
	done := make(chan struct{})
	var wg sync.WaitGroup
	var seen sync.Map
	for i := range 3 {
		rd := open(t, f, 0, done)
		wg.Go(func() {
			_, data, end := collect(t, rd, make([]byte, 64<<10<<i))
			if end != r.size {
				t.Errorf("end %d", end)
			}
			seen.Store(i, data)
		})
	}
	punched := int64(0)
	for range 3000 {
		r.write(t, 16<<10)
		if to := (r.size - 64<<10) / (32 << 10) * (32 << 10); to > punched {
			r.punch(t, punched, to)
			punched = to
		}
	}
	close(done)
	wg.Wait()
	seen.Range(func(k, v any) bool { t.Logf("reader %v: %d of %d bytes", k, v, r.size); return true })
}

func TestHeadTail(t *testing.T) {
	r, f := newRec(t)
	check := func(name string, limit int64, head int, gap int64, tail int) {
		t.Helper()
		in, err := f.Inline("s1", 1, record.Stdout, limit, record.KeepEnds)
		if err != nil {
			t.Fatal(err)
		}
		if len(in.Head) != head || in.Gap != gap || len(in.Tail) != tail || in.Size != r.size {
			t.Errorf("%s: head %d, gap %d, tail %d, size %d", name, len(in.Head), in.Gap, len(in.Tail), in.Size)
		}
		h, tl := in.Ranges()
		if h.Len() != int64(len(in.Head)) || tl.Len() != int64(len(in.Tail)) || tl.To != in.Size {
			t.Errorf("%s: ranges %v, %v", name, h, tl)
		}
		if !bytes.Equal(in.Head, want(0, len(in.Head))) || !bytes.Equal(in.Tail, want(tl.From, len(in.Tail))) {
			t.Errorf("%s: wrong bytes", name)
		}
	}
	check("empty", 100, 0, 0, 0)
	r.write(t, 100)
	check("exactly the limit", 100, 100, 0, 0)
	check("one more than the limit", 99, 49, 2, 49)
	check("no room at all", 0, 0, 100, 0)
	r.write(t, 10*block-100)
	check("long", 2*block, block, 8*block, block)
	r.punch(t, 2*block, 8*block)
	check("the gap beside the ends", 2*block, block, 8*block, block)
	check("the gap cuts head and tail short", 8*block, 2*block, 6*block, 2*block)
	check("the gap in a stream within the limit", 100*block, 2*block, 6*block, 2*block)
	r.lengthen(t, 10)
	check("a gap at the end", 100*block, 2*block, 8*block+10, 0)
	if _, err := f.Inline("s1", 9, record.Stdout, 10, record.KeepEnds); !errors.Is(err, errdefs.NotFound) {
		t.Errorf("no record: %v", err)
	}
}

// FuzzGaps lets the input write, punch, lengthen and read in any order and compares each piece with a model.
func FuzzGaps(f *testing.F) {
	f.Add([]byte{0, 200, 1, 3, 2, 2, 3, 50, 0, 9, 3, 255})
	f.Add([]byte{0, 255, 0, 255, 0, 255, 3, 1, 1, 0, 3, 9, 3, 9, 2, 7, 3, 3, 3, 3})
	f.Add([]byte{2, 1, 3, 1, 0, 1, 3, 1})
	f.Fuzz(func(t *testing.T, ops []byte) {
		if len(ops) > 200 {
			t.Skip()
		}
		r, fo := newRec(t)
		done := make(chan struct{})
		rd := open(t, fo, 0, done)
		holes := make(map[int64]bool) // by block
		step := func(n int) (end bool) {
			ctx, cancel := context.WithCancel(t.Context())
			if rd.off == r.size {
				cancel() // it would wait
			}
			defer cancel()
			at := rd.off
			p, err := rd.Next(ctx, make([]byte, n))
			if errors.Is(err, context.Canceled) {
				return false
			}
			if err != nil || p.Offset != at {
				t.Fatalf("at %d of %d: %+v, %v", at, r.size, p, err)
			}
			for o := at; o < at+p.Gap; o++ {
				if !holes[o/block] {
					t.Fatalf("gap at %d, where there is data", o)
				}
			}
			for i, b := range p.Data {
				o := at + int64(i)
				if holes[o/block] {
					t.Fatalf("data at %d, where there is a gap", o)
				}
				if i == 0 || i == len(p.Data)-1 {
					if w := want(o, 1); b != w[0] {
						t.Fatalf("wrong byte at %d", o)
					}
				}
			}
			return p.End
		}
		for len(ops) >= 2 {
			op, n := ops[0]%4, int64(ops[1])
			ops = ops[2:]
			switch op {
			case 0:
				// A gap goes on to the end of its block.
				if r.size%block != 0 && holes[r.size/block] {
					r.size = (r.size/block + 1) * block
					if err := r.f.Truncate(r.size); err != nil {
						t.Fatal(err)
					}
				}
				r.write(t, int(n*211+1))
			case 1:
				if last := r.size / block; last > 0 {
					from := n % last
					to := min(from+n%5+1, last)
					r.punch(t, from*block, to*block)
					for b := from; b < to; b++ {
						holes[b] = true
					}
				}
			case 2:
				if r.size%block == 0 {
					from := r.size
					r.lengthen(t, n*97+1)
					for b := from / block; b*block < r.size; b++ {
						holes[b] = true
					}
				}
			case 3:
				step(int(n)*97 + 1)
			}
		}
		close(done)
		for !step(5000) {
		}
		if rd.off != r.size {
			t.Fatalf("ended at %d of %d", rd.off, r.size)
		}
	})
}
