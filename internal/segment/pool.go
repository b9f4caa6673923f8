package segment

import (
	"container/list"
	"errors"
	"fmt"
	"os"
	"sync"

	"github.com/klauspost/compress/zstd"
)

// Pool writes many logs with few open files, and packs their full segments one at a time in the background.
type Pool struct {
	most int
	enc  *zstd.Encoder

	mu      sync.Mutex
	open    *list.List // of *slot, the one used last in front; guarded by mu
	queue   []packing  // guarded by mu
	packing bool       // a goroutine works on queue; guarded by mu
	closed  bool       // guarded by mu
	done    sync.WaitGroup

	// waiting counts by directory what is in queue or being packed: until it is done the newest segment looks as if it
	// could grow. Guarded by mu; fewer tells of each end.
	waiting map[string]int
	fewer   *sync.Cond
}

// slot is an open file of a log.
type slot struct {
	l    *Log
	f    *os.File
	used bool // is in use and cannot be closed
}

// packing is a full segment that waits to be packed.
type packing struct {
	l     *Log
	first int64
}

// NewPool makes a pool that keeps at most openFiles logs' files open, at least one.
func NewPool(openFiles int) (*Pool, error) {
	enc, err := zstd.NewWriter(nil, zstd.WithEncoderLevel(zstd.SpeedDefault), zstd.WithEncoderConcurrency(1),
		zstd.WithWindowSize(blockSize), zstd.WithLowerEncoderMem(true))
	if err != nil {
		return nil, fmt.Errorf("segment pool: %w", err)
	}
	p := &Pool{most: max(1, openFiles), enc: enc, open: list.New(), waiting: map[string]int{}}
	p.fewer = sync.NewCond(&p.mu)
	return p, nil
}

// Close closes the files of all logs, which write no more, and returns when nothing is being packed. Segments that still
// wait are packed when their log is opened again. Idempotent.
func (p *Pool) Close() error {
	p.mu.Lock()
	p.closed, p.queue = true, nil
	p.fewer.Broadcast()
	p.mu.Unlock()
	p.done.Wait()
	p.mu.Lock()
	var idle []*Log
	for e := p.open.Front(); e != nil; e = e.Next() {
		idle = append(idle, e.Value.(*slot).l)
	}
	p.mu.Unlock()
	var errs []error
	for _, l := range idle {
		errs = append(errs, l.Close())
	}
	return errors.Join(errs...)
}

// take gives the open file of a log for use, opening it by open if it was closed meanwhile. Called with l.mu held.
func (p *Pool) take(l *Log, open func() (*os.File, error)) (*os.File, error) {
	p.mu.Lock()
	if p.closed {
		p.mu.Unlock()
		return nil, fmt.Errorf("log %s: %w", l.dir, os.ErrClosed)
	}
	if l.slot != nil {
		s := l.slot.Value.(*slot)
		s.used = true
		p.open.MoveToFront(l.slot)
		p.mu.Unlock()
		return s.f, nil
	}
	p.mu.Unlock()
	f, err := open()
	if err != nil {
		return nil, err
	}
	p.mu.Lock()
	l.slot = p.open.PushFront(&slot{l: l, f: f, used: true})
	surplus := p.surplusLocked()
	p.mu.Unlock()
	for _, s := range surplus {
		_ = s.Close() // all that was written is with the kernel
	}
	return f, nil
}

// surplusLocked takes the files that were not used for longest, above the number that may be open, out of their logs.
func (p *Pool) surplusLocked() (out []*os.File) {
	for e := p.open.Back(); e != nil && p.open.Len() > p.most; {
		before := e.Prev()
		if s := e.Value.(*slot); !s.used {
			p.open.Remove(e)
			s.l.slot = nil
			out = append(out, s.f)
		}
		e = before
	}
	return out
}

// give ends the use of a log's file. Called with l.mu held.
func (p *Pool) give(l *Log) {
	p.mu.Lock()
	defer p.mu.Unlock()
	if l.slot != nil {
		l.slot.Value.(*slot).used = false
	}
}

// drop closes a log's file. Called with l.mu held.
func (p *Pool) drop(l *Log) error {
	p.mu.Lock()
	e := l.slot
	if e != nil {
		p.open.Remove(e)
		l.slot = nil
	}
	p.mu.Unlock()
	if e == nil {
		return nil
	}
	return e.Value.(*slot).f.Close()
}

// pack has a full segment packed in the background.
func (p *Pool) pack(l *Log, first int64) {
	p.mu.Lock()
	defer p.mu.Unlock()
	if p.closed {
		return
	}
	p.queue = append(p.queue, packing{l, first})
	p.waiting[l.dir]++
	if !p.packing {
		p.packing = true
		p.done.Go(p.packAll)
	}
}

func (p *Pool) packAll() {
	for {
		p.mu.Lock()
		if len(p.queue) == 0 {
			p.packing = false
			p.mu.Unlock()
			return
		}
		next := p.queue[0]
		p.queue = p.queue[1:]
		p.mu.Unlock()
		// What cannot be packed is read as it is, and tried again when the log is next opened.
		_ = next.l.packPart(next.first)
		p.mu.Lock()
		if p.waiting[next.l.dir]--; p.waiting[next.l.dir] == 0 {
			delete(p.waiting, next.l.dir)
		}
		p.fewer.Broadcast()
		p.mu.Unlock()
	}
}

// settle returns when nothing of a directory is being packed.
func (p *Pool) settle(dir string) error {
	p.mu.Lock()
	defer p.mu.Unlock()
	for p.waiting[dir] > 0 && !p.closed {
		p.fewer.Wait()
	}
	if p.closed {
		return os.ErrClosed
	}
	return nil
}
