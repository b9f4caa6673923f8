// Package record is the pure format of recorded output, shared by the keeper that writes it and chronus that reads it.
//
// One sparse file per stream: the file's offset is the stream's offset, its size is the number of bytes that the
// command ever wrote, a hole is a gap. Nothing has to be kept in step: a byte leaves the pipe only once it is in the
// file, so a killed keeper goes on at the file's size. Head and tail are kept by punching holes behind the tail, a
// step at a time.
package record

import (
	"fmt"
	"path/filepath"
)

// Step is the granule of holes: 8 MiB, aligned in the file. A file system block never holds both data and a gap.
// Streams with a small tail have a smaller step, see Caps.Step.
const Step = 8 << 20

// MinStep is the smallest granule of holes, a multiple of every file system's block size.
const MinStep = 64 << 10

// MaxStream ends a sandbox with output_limit: 256 GiB in one stream.
const MaxStream = 256 << 30

// Caps bound what is kept of one stream: the first Head and the last Tail bytes, both rounded up to a step in effect.
type Caps struct {
	Head int64
	Tail int64
}

// DefaultCaps are 32 MiB each.
var DefaultCaps = Caps{Head: 32 << 20, Tail: 32 << 20}

// FloorCaps are what a stream may keep even when its sandbox's budget is used up.
var FloorCaps = Caps{Head: 512 << 10, Tail: 512 << 10}

// Step is the granule of holes for these caps: a power of two, at most a quarter of the tail where MinStep allows that.
func (c Caps) Step() int64 {
	step := int64(Step)
	for step > MinStep && step > c.Tail/4 {
		step /= 2
	}
	return step
}

// Share gives the caps of one stream of a sandbox whose other streams keep used bytes of the budget: what is left, half
// for each end or all for the only one, never more than c and never less than the smaller of c and FloorCaps. A budget
// of 0 or less is no bound.
func Share(c Caps, budget, used int64) Caps {
	if budget <= 0 {
		return c
	}
	left := budget - used
	if c.Head > 0 && c.Tail > 0 {
		left /= 2
	}
	return Caps{
		Head: min(c.Head, max(left, FloorCaps.Head)),
		Tail: min(c.Tail, max(left, FloorCaps.Tail)),
	}
}

// Stream is 1 for standard output, 2 for standard error.
type Stream int

// The streams.
const (
	Stdout Stream = 1
	Stderr Stream = 2
)

// Path is where the record of a stream lies below the output directory.
func Path(dir, sandbox string, number int64, s Stream) string {
	return filepath.Join(dir, sandbox, fmt.Sprintf("%d.%d", number, int(s)))
}

// Range is a half-open run of bytes.
type Range struct{ From, To int64 }

// Len is the number of bytes in the range, 0 for one that ends before it begins.
func (r Range) Len() int64 { return max(r.To-r.From, 0) }

// Punch gives the range to punch in a stream of the given size whose hole so far ends at punched (0: none yet), so
// that the caps hold, whole steps at a time; ok is false when there is nothing to do. keep bounds it from above: no
// byte at or after keep is punched (a lossless reader's offset); negative means no bound.
func Punch(c Caps, size, punched, keep int64) (r Range, ok bool) {
	step := c.Step()
	from := max(roundUp(c.Head, step), punched)
	to := (size - c.Tail) / step * step
	if keep >= 0 {
		to = min(to, keep/step*step)
	}
	if to <= from {
		return Range{}, false
	}
	return Range{From: from, To: to}, true
}

// Without cuts r into what of it lies outside every pin, in order. Pins are widened to whole blocks of MinStep, so that
// what is left can be punched.
func Without(r Range, pins []Range) []Range {
	left := []Range{r}
	for _, p := range pins {
		if p.Len() == 0 {
			continue
		}
		p = Range{From: p.From / MinStep * MinStep, To: roundUp(p.To, MinStep)}
		var next []Range
		for _, l := range left {
			if before := (Range{From: l.From, To: min(l.To, p.From)}); before.Len() > 0 {
				next = append(next, before)
			}
			if after := (Range{From: max(l.From, p.To), To: l.To}); after.Len() > 0 {
				next = append(next, after)
			}
		}
		left = next
	}
	return left
}

func roundUp(n, step int64) int64 { return (n + step - 1) / step * step }
