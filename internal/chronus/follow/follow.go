// Package follow reads recorded output: from any offset, by any number of readers, while the command runs and after,
// across restarts of edge and keeper.
//
// It owns nothing but open record files. What it promises: a reader yields every offset of the stream once, in order,
// as data or as part of a gap, then the end. Bytes that it yields were written by the command: a range that is
// punched while it is read becomes a gap, never zeros. A slow reader holds up nobody.
//
// A Follower may be used by any number of goroutines, a Reader by one at a time.
package follow

import (
	"context"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"os"
	"sync"
	"time"

	"github.com/sandsea/sandsea/api/errdefs"
	"github.com/sandsea/sandsea/internal/linux/inotify"
	"github.com/sandsea/sandsea/internal/linux/sparse"
	"github.com/sandsea/sandsea/internal/record"
)

// pollEvery is how often a reader at the live end looks where the system gives no inotify instance.
const pollEvery = 20 * time.Millisecond

// Piece is what a reader yields: data, a gap, or the end.
type Piece struct {
	// Offset of the piece in the stream; for the end the stream's size.
	Offset int64
	// Data lies in the buffer given to Next, and is not empty if this is data.
	Data []byte
	// Gap is how many bytes are missing, above 0 if this is a gap. Adjoining gaps may come in several pieces.
	Gap int64
	// End says that nothing follows.
	End bool
}

// Follower opens readers of the records below one directory, and wakes them.
type Follower struct {
	dir string
	log *slog.Logger

	mu      sync.Mutex
	notify  *inotify.Watcher // made when first needed; guarded by mu
	polling bool             // there is no inotify for us; guarded by mu
	closed  bool             // guarded by mu
}

// New makes a Follower for the output directory dir.
func New(dir string, log *slog.Logger) *Follower {
	return &Follower{dir: dir, log: log}
}

// Close gives the Follower's resources back. Readers that wait are not woken by it: end them first.
func (f *Follower) Close() error {
	f.mu.Lock()
	defer f.mu.Unlock()
	f.closed = true
	if f.notify == nil {
		return nil
	}
	return f.notify.Close()
}

// Open begins to read a stream at offset from. done is closed once all of the stream is in its record (the keeper's
// event Closed); nil says that it is already.
func (f *Follower) Open(
	sandbox string, number int64, s record.Stream, from int64, done <-chan struct{},
) (*Reader, error) {
	object := fmt.Sprintf("stream %d of command %d", s, number)
	if from < 0 {
		return nil, errdefs.New(errdefs.Invalid, object, "offset %d is negative", from).WithField("offset", "")
	}
	file, err := os.Open(record.Path(f.dir, sandbox, number, s))
	if errors.Is(err, os.ErrNotExist) {
		return nil, errdefs.New(errdefs.NotFound, object, "there is no record of it").Wrap(err)
	}
	if err != nil {
		return nil, fmt.Errorf("open %s: %w", object, err)
	}
	return &Reader{f: f, file: file, fd: int(file.Fd()), object: object, off: from, done: done}, nil
}

// watch is nil, nil when the reader has to poll.
func (f *Follower) watch(file *os.File) (*inotify.Watch, error) {
	f.mu.Lock()
	defer f.mu.Unlock()
	if f.closed {
		return nil, fmt.Errorf("follow %s: %w", file.Name(), os.ErrClosed)
	}
	if f.polling {
		return nil, nil
	}
	if f.notify == nil {
		w, err := inotify.New()
		if err != nil {
			f.log.Warn("no inotify, live output is polled", "err", err)
			f.polling = true
			return nil, nil
		}
		f.notify = w
	}
	x, err := f.notify.Watch(file)
	if err != nil {
		// The number of watches is limited too; others may be given back, so the next reader tries again.
		f.log.Debug("no inotify watch, output is polled", "err", err)
		return nil, nil
	}
	return x, nil
}

// Reader reads one stream.
type Reader struct {
	f      *Follower
	file   *os.File
	fd     int // of file, which stays open until Close
	object string
	off    int64
	done   <-chan struct{}
	watch  *inotify.Watch
	polls  bool // there is no watch to be had
}

// Close ends the reader.
func (r *Reader) Close() error {
	if r.watch != nil {
		r.watch.Close()
	}
	return r.file.Close()
}

// Next yields the next piece; its data is in buf, which must not be empty. It waits only at the live end, until ctx
// ends. After the end it yields the end again.
func (r *Reader) Next(ctx context.Context, buf []byte) (Piece, error) {
	if len(buf) == 0 {
		return Piece{}, fmt.Errorf("read %s: %w", r.object, io.ErrShortBuffer)
	}
	for {
		// Looked at before the read: what the read then does not find does not exist.
		ended := r.ended()
		p, err := pieceAt(r.file, r.fd, buf, r.off)
		if err != nil {
			return Piece{}, fmt.Errorf("read %s: %w", r.object, err)
		}
		switch {
		case !p.End:
			r.off += int64(len(p.Data)) + p.Gap
			return p, nil
		case ended && p.Offset < r.off:
			return Piece{}, errdefs.New(errdefs.Invalid, r.object, "offset %d is past its end at %d", r.off, p.Offset).
				WithField("offset", fmt.Sprint(p.Offset))
		case ended:
			return p, nil
		}
		if err := r.wait(ctx); err != nil {
			return Piece{}, fmt.Errorf("read %s: %w", r.object, err)
		}
	}
}

func (r *Reader) ended() bool {
	if r.done == nil {
		return true
	}
	select {
	case <-r.done:
		return true
	default:
		return false
	}
}

// wait returns when there may be more, at the first call at once: a write between the look and the watch would be
// missed.
func (r *Reader) wait(ctx context.Context) error {
	if r.watch == nil && !r.polls {
		w, err := r.f.watch(r.file)
		if err != nil {
			return err
		}
		r.watch, r.polls = w, w == nil
		return nil
	}
	if r.polls {
		t := time.NewTimer(pollEvery)
		defer t.Stop()
		select {
		case <-t.C:
		case <-r.done:
		case <-ctx.Done():
			return context.Cause(ctx)
		}
		return nil
	}
	select {
	case <-r.watch.C():
	case <-r.done:
	case <-ctx.Done():
		return context.Cause(ctx)
	}
	return nil
}

// pieceAt is what the record has at off; the end if that is at or past its size.
func pieceAt(file *os.File, fd int, buf []byte, off int64) (Piece, error) {
	for {
		n, err := file.ReadAt(buf, off)
		if err != nil && !errors.Is(err, io.EOF) {
			return Piece{}, err
		}
		size, err := sizeOf(file)
		if err != nil {
			return Piece{}, err
		}
		if n == 0 {
			if size > off {
				continue // it came between
			}
			return Piece{Offset: size, End: true}, nil
		}
		// Holes are only ever made, never filled: what is no hole now was none while it was read.
		hole, ok, err := sparse.NextHole(fd, off)
		if err != nil {
			return Piece{}, err
		}
		if ok && hole > off {
			return Piece{Offset: off, Data: buf[:min(int64(n), hole-off)]}, nil
		}
		data, ok, err := sparse.NextData(fd, off)
		if err != nil {
			return Piece{}, err
		}
		if !ok {
			// No data up to what was the end before the question.
			data = size
		}
		if data > off {
			return Piece{Offset: off, Gap: data - off}, nil
		}
	}
}

func sizeOf(file *os.File) (int64, error) {
	fi, err := file.Stat()
	if err != nil {
		return 0, err
	}
	return fi.Size(), nil
}
