// Package record is the pure format of recorded output, shared by the keeper that writes it and chronus that reads it.
//
// One sparse file per stream: the file's offset is the stream's offset, its size is the number of bytes that the command
// ever wrote, a hole is a gap. Nothing has to be kept in step: a byte leaves the pipe only once it is in the file, so
// a killed keeper goes on at the file's size. Head and tail are kept by punching holes behind the tail, Step at a time.
package record

import (
	"fmt"
	"path/filepath"
)

// Step is the granule of holes: 8 MiB, aligned in the file. A file system block never holds both data and a gap.
const Step = 8 << 20

// MaxStream ends a sandbox with output_limit: 256 GiB in one stream.
const MaxStream = 256 << 30

// Caps bound what is kept of one stream: the first Head and the last Tail bytes, both rounded up to Step in effect.
type Caps struct {
	Head int64
	Tail int64
}

// DefaultCaps are 32 MiB each.
var DefaultCaps = Caps{Head: 32 << 20, Tail: 32 << 20}

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

// Punch gives the range to punch in a stream of the given size whose hole so far ends at punched (0: none yet), so that
// the caps hold, whole Steps at a time; ok is false when there is nothing to do. keep bounds it from above: no byte at or
// after keep is punched (a lossless reader's offset, or the range that an answer names); negative means no bound.
func Punch(c Caps, size, punched, keep int64) (r Range, ok bool) {
	from := max(roundUp(c.Head), punched)
	to := (size - c.Tail) / Step * Step
	if keep >= 0 {
		to = min(to, keep/Step*Step)
	}
	if to <= from {
		return Range{}, false
	}
	return Range{From: from, To: to}, true
}

func roundUp(n int64) int64 { return (n + Step - 1) / Step * Step }
