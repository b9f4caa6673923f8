package follow

import (
	"errors"
	"fmt"
	"io"
	"os"

	"github.com/sandsea/sandsea/api/errdefs"
	"github.com/sandsea/sandsea/internal/linux/sparse"
	"github.com/sandsea/sandsea/internal/record"
)

// Inline is a stream as a result carries it: the first bytes, what is left out, the last bytes.
type Inline struct {
	Head []byte
	Gap  int64 // 0: Head is all of it
	Tail []byte
	Size int64
}

// Ranges are the parts of the stream that the result names.
func (i Inline) Ranges() (head, tail record.Range) {
	return record.Range{From: 0, To: int64(len(i.Head))},
		record.Range{From: i.Size - int64(len(i.Tail)), To: i.Size}
}

// Inline reads at most limit bytes of a stream as it is now: all of it, or the part that keep names. The head ends and
// the tail begins at a gap that the record has there.
func (f *Follower) Inline(sandbox string, number int64, s record.Stream, limit int64, keep record.Keep) (Inline, error) {
	file, err := os.Open(record.Path(f.dir, sandbox, number, s))
	if errors.Is(err, os.ErrNotExist) {
		return Inline{}, errdefs.New(errdefs.NotFound, fmt.Sprintf("stream %d of command %d", s, number),
			"there is no record of it").Wrap(err)
	}
	if err != nil {
		return Inline{}, fmt.Errorf("open record: %w", err)
	}
	defer file.Close()
	return ReadInline(file, limit, keep)
}

// ReadInline is Follower.Inline of an open record.
func ReadInline(file *os.File, limit int64, keep record.Keep) (Inline, error) {
	fd := int(file.Fd())
	size, err := sizeOf(file)
	if err != nil {
		return Inline{}, fmt.Errorf("read record: %w", err)
	}
	limit = max(limit, 0)
	ends := [...]struct{ head, tail int64 }{
		record.KeepEnds: {limit / 2, limit / 2}, record.KeepTail: {0, limit}, record.KeepHead: {limit, 0},
	}[keep]
	for {
		in := Inline{Size: size}
		// Whole, if it fits and has no gap.
		first := ends.head
		if size <= limit {
			first = size
		}
		if in.Head, err = readRun(file, fd, 0, first); err != nil {
			return Inline{}, fmt.Errorf("read record: %w", err)
		}
		if int64(len(in.Head)) == size {
			return in, nil
		}
		in.Head = in.Head[:min(int64(len(in.Head)), ends.head)]
		from, err := lastRun(fd, max(size-ends.tail, int64(len(in.Head))), size)
		if err != nil {
			return Inline{}, fmt.Errorf("read record: %w", err)
		}
		if in.Tail, err = readRun(file, fd, from, size); err != nil {
			return Inline{}, fmt.Errorf("read record: %w", err)
		}
		if from+int64(len(in.Tail)) < size {
			continue // punched meanwhile: its end lies elsewhere now
		}
		in.Gap = size - int64(len(in.Head)) - int64(len(in.Tail))
		return in, nil
	}
}

// lastRun is where the data that goes on to size begins, at from at the earliest.
func lastRun(fd int, from, size int64) (int64, error) {
	for from < size {
		hole, ok, err := sparse.NextHole(fd, from)
		if err != nil {
			return 0, err
		}
		if !ok || hole >= size {
			return from, nil
		}
		data, ok, err := sparse.NextData(fd, hole)
		if err != nil {
			return 0, err
		}
		if !ok || data >= size {
			return size, nil
		}
		from = data
	}
	return size, nil
}

// readRun reads from, up to to or the first hole.
func readRun(file *os.File, fd int, from, to int64) ([]byte, error) {
	if to <= from {
		return nil, nil
	}
	buf := make([]byte, to-from)
	n, err := file.ReadAt(buf, from)
	if err != nil && !errors.Is(err, io.EOF) {
		return nil, err
	}
	hole, ok, err := sparse.NextHole(fd, from)
	if err != nil {
		return nil, err
	}
	if ok {
		n = int(min(int64(n), hole-from))
	}
	return buf[:n], nil
}
