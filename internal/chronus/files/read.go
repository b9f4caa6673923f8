package files

import (
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"syscall"

	"github.com/sandsea/sandsea/api/errdefs"
)

// Range says what part of a file is read.
type Range struct {
	Offset int64
	Length int64 // 0: to the end
	// MaxBytes refuses a larger file before any byte is read; 0: no limit.
	MaxBytes int64
}

// Reader reads a part of a file as it was when it was opened: what is appended meanwhile is not read, and a file that
// shrinks is errdefs.DataLoss. A file of size 0 is read to its end, since some that say so have content. Not for use by
// several goroutines.
type Reader struct {
	f    *os.File
	path string
	info Info
	off  int64
	left int64 // bytes still to come; -1: until the end
	sure bool  // left is what the file has: less is a loss
	max  int64 // 0: no limit
	got  int64
}

// Read opens a part of a regular file.
func (v *View) Read(ctx context.Context, path string, part Range) (*Reader, error) {
	for _, c := range []struct {
		field string
		value int64
	}{{"offset", part.Offset}, {"length", part.Length}, {"max_bytes", part.MaxBytes}} {
		if c.value < 0 {
			return nil, errdefs.New(errdefs.Invalid, path, "%s is negative", c.field).WithField(c.field, "0")
		}
	}
	f, info, err := v.Open(ctx, path)
	if err != nil {
		return nil, err
	}
	if part.MaxBytes > 0 && info.Size > part.MaxBytes {
		_ = f.Close()
		return nil, tooLarge(path, info.Size, part.MaxBytes)
	}
	r := &Reader{f: f, path: path, info: info, off: part.Offset, max: part.MaxBytes, left: -1}
	if info.Size > 0 {
		r.left, r.sure = max(0, info.Size-part.Offset), true
	}
	if part.Length > 0 && (r.left < 0 || part.Length < r.left) {
		r.left = part.Length
	}
	return r, nil
}

func tooLarge(path string, size, limit int64) error {
	e := ofErrno(path, syscall.EFBIG).WithField("max_bytes", fmt.Sprintf("%d bytes", limit)).
		WithHint("Raise max_bytes, or read a part of it")
	e.Msg = fmt.Sprintf("the file has %d bytes, more than the %d allowed", size, limit)
	return e
}

// Info describes the file as it was opened.
func (r *Reader) Info() Info { return r.info }

// Read reads on.
func (r *Reader) Read(p []byte) (int, error) {
	if len(p) == 0 {
		return 0, nil
	}
	if r.left == 0 {
		return 0, io.EOF
	}
	room := int64(len(p))
	if r.left > 0 {
		room = min(room, r.left)
	}
	if r.max > 0 {
		// One byte more than allowed tells whether there is more.
		room = min(room, r.max-r.got+1)
	}
	n, err := r.f.ReadAt(p[:room], r.off)
	r.off += int64(n)
	r.got += int64(n)
	if r.left > 0 {
		r.left -= int64(n)
	}
	switch {
	case r.max > 0 && r.got > r.max:
		return 0, tooLarge(r.path, r.got, r.max)
	case n > 0:
		return n, nil // an error comes again
	case err == nil:
		return 0, io.ErrNoProgress
	case !errors.Is(err, io.EOF):
		return 0, ofOS(r.path, err)
	case r.sure:
		return 0, errdefs.New(errdefs.DataLoss, r.path, "the file shrank while it was read: %d of %d bytes",
			r.got, r.got+r.left)
	default:
		return 0, io.EOF
	}
}

// Close lets go of the file.
func (r *Reader) Close() error { return r.f.Close() }
