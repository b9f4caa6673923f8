package record

import (
	"math/rand/v2"
	"path/filepath"
	"testing"
)

const mib = 1 << 20

func TestPathNamesSandboxNumberAndStream(t *testing.T) {
	if got, want := Path("/d/output", "s1", 7, Stderr), filepath.Join("/d/output", "s1", "7.2"); got != want {
		t.Errorf("got %s, want %s", got, want)
	}
}

func TestPunch(t *testing.T) {
	d := DefaultCaps
	small := Caps{Head: mib, Tail: mib}
	for _, c := range []struct {
		name                string
		caps                Caps
		size, punched, keep int64
		want                Range
		ok                  bool
	}{
		{"nothing while head and tail touch", d, 64 * mib, 0, -1, Range{}, false},
		{"nothing before a whole step lies between them", d, 72*mib - 1, 0, -1, Range{}, false},
		{"one step behind the head", d, 72 * mib, 0, -1, Range{32 * mib, 40 * mib}, true},
		{"several steps at once after a pause", d, 100 * mib, 0, -1, Range{32 * mib, 64 * mib}, true},
		{"only what is new", d, 100 * mib, 56 * mib, -1, Range{56 * mib, 64 * mib}, true},
		{"nothing new", d, 100 * mib, 64 * mib, -1, Range{}, false},
		{"a lossless reader bounds it, rounded down", d, 100 * mib, 0, 50 * mib, Range{32 * mib, 48 * mib}, true},
		{"a lossless reader in the head stops it", d, 100 * mib, 0, 0, Range{}, false},
		{"an odd head is rounded up", Caps{Head: 1, Tail: 32 * mib}, 100 * mib, 0, -1, Range{8 * mib, 64 * mib}, true},
		{"no head at all", Caps{Tail: 32 * mib}, 100 * mib, 0, -1, Range{0, 64 * mib}, true},
		{"small caps have small steps", small, 2*mib + 256<<10, 0, -1, Range{mib, mib + 256<<10}, true},
		{"nothing of an empty stream", small, 0, 0, -1, Range{}, false},
	} {
		if got, ok := Punch(c.caps, c.size, c.punched, c.keep); got != c.want || ok != c.ok {
			t.Errorf("%s: got %v, %v; want %v, %v", c.name, got, ok, c.want, c.ok)
		}
	}
}

// TestPunchKeepsHeadAndTailAndItsBound feeds random writes and checks after each what the contract promises.
func TestPunchKeepsHeadAndTailAndItsBound(t *testing.T) {
	r := rand.New(rand.NewPCG(1, 2))
	for range 300 {
		c := Caps{Head: r.Int64N(40 * mib), Tail: r.Int64N(40 * mib)}
		step := c.Step()
		if step&(step-1) != 0 || step < MinStep || step > Step {
			t.Fatalf("step %d of %v", step, c)
		}
		var size, punched, holes int64
		for range 400 {
			n := r.Int64N(mib)
			size += n
			h, ok := Punch(c, size, punched, -1)
			if !ok {
				continue
			}
			switch {
			case h.From < c.Head || h.To > size-c.Tail:
				t.Fatalf("%v: hole %v in size %d touches head or tail", c, h, size)
			case h.From%MinStep != 0 || h.To%MinStep != 0:
				t.Fatalf("%v: hole %v is not aligned", c, h)
			case punched > 0 && h.From != punched:
				t.Fatalf("%v: hole %v does not go on at %d", c, h, punched)
			}
			holes += h.Len()
			punched = h.To
			if kept := size - holes; kept > c.Head+c.Tail+2*step {
				t.Fatalf("%v: keeps %d, more than two steps above its caps", c, kept)
			}
		}
	}
}

func TestShare(t *testing.T) {
	d := DefaultCaps
	for _, c := range []struct {
		name         string
		budget, used int64
		want         Caps
	}{
		{"no budget is no bound", 0, 100 * mib, d},
		{"the first stream has all", 64 * mib, 0, d},
		{"then half of what is left each", 64 * mib, 44 * mib, Caps{10 * mib, 10 * mib}},
		{"the floor when it is used up", 64 * mib, 64 * mib, FloorCaps},
		{"the floor when it is overdrawn", 64 * mib, 99 * mib, FloorCaps},
	} {
		if got := Share(d, c.budget, c.used); got != c.want {
			t.Errorf("%s: got %v, want %v", c.name, got, c.want)
		}
	}
	if got, want := Share(Caps{100, 200}, mib, mib), (Caps{100, 200}); got != want {
		t.Errorf("caps below the floor: got %v, want %v", got, want)
	}
	for _, k := range []Keep{KeepHead, KeepTail} {
		if got := Share(k.Caps(), 64*mib, 44*mib); got.Head+got.Tail != 20*mib || got.Head*got.Tail != 0 {
			t.Errorf("one end only: got %v, want all that is left", got)
		}
	}
}

func TestWithout(t *testing.T) {
	const k = MinStep
	r := Range{10 * k, 20 * k}
	for _, c := range []struct {
		name string
		pins []Range
		want []Range
	}{
		{"no pin leaves all", nil, []Range{r}},
		{"pins elsewhere leave all", []Range{{0, 10 * k}, {20 * k, 30 * k}}, []Range{r}},
		{"an empty pin leaves all", []Range{{15 * k, 15 * k}}, []Range{r}},
		{"one in the middle", []Range{{12*k + 1, 13*k - 1}}, []Range{{10 * k, 12 * k}, {13 * k, 20 * k}}},
		{"one over an end", []Range{{5 * k, 12*k + 1}}, []Range{{13 * k, 20 * k}}},
		{"two", []Range{{18 * k, 99 * k}, {12 * k, 13 * k}}, []Range{{10 * k, 12 * k}, {13 * k, 18 * k}}},
		{"all of it", []Range{{0, 99 * k}}, nil},
	} {
		got := Without(r, c.pins)
		if len(got) != len(c.want) {
			t.Errorf("%s: got %v, want %v", c.name, got, c.want)
			continue
		}
		for i := range got {
			if got[i] != c.want[i] {
				t.Errorf("%s: got %v, want %v", c.name, got, c.want)
			}
		}
	}
}
