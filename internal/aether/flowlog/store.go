package flowlog

import (
	"errors"
	"fmt"
	"log/slog"
	"maps"
	"path/filepath"
	"slices"
	"sync"
	"time"

	"golang.org/x/time/rate"

	"github.com/sandsea/sandsea/internal/segment"
)

const (
	// Window is how long equal events are folded into one.
	Window = 10 * time.Second
	// Keep is how many bytes of a sandbox's newest segments stay on the disk.
	Keep = 64 << 20

	// A sandbox may make so many different events at once, and so many a second later on.
	burst     = 4096
	perSecond = 100
	// They may have so many bytes. Then 64 MiB last for two hours, and noise, however long its names are, does not wash away
	// sooner what it is to hide.
	burstBytes     = 4 << 20
	bytesPerSecond = 8 << 10

	// mostQueued events of all sandboxes wait to be written.
	mostQueued = 16 << 10
	// mostFolds kinds of events of all sandboxes are told from each other.
	mostFolds = 64 << 10
	// own kinds of a sandbox are told from each other however many others make, whose noise is not to hide them.
	own = 16
	// openFiles of all logs.
	openFiles = 256
)

// Config of a Store.
type Config struct {
	// Dir holds a directory for each sandbox; it must exist and be writable.
	Dir string
	// Log hears when events cannot be written; nil: nobody.
	Log *slog.Logger
}

// Store writes the flow logs of all sandboxes of a node.
type Store struct {
	dir  string
	log  *slog.Logger
	pool *segment.Pool
	wake chan struct{} // of the writer; holds one
	done chan struct{} // closed when the writer has ended

	mu      sync.Mutex
	boxes   map[string]*box // guarded by mu
	queue   []item          // in order; guarded by mu
	windows []*fold         // in the order of their ends; guarded by mu
	folds   int             // of all boxes; guarded by mu
	stats   Stats           // guarded by mu
	closed  bool            // guarded by mu
}

// Stats count events since the Store was opened.
type Stats struct {
	Added  int64 // all
	Folded int64 // of them, that another one stands for
	Lost   int64 // of them, that could not be written; the log tells how many as soon as it can be written again
}

// box is what the Store knows of a sandbox.
type box struct {
	id    string
	limit *rate.Limiter // of events
	room  *rate.Limiter // of their bytes
	folds map[key]*fold // guarded by Store.mu

	// Of the writer alone.
	log    *segment.Log
	lost   int64 // events since one was last written
	reason error
}

// fold stands for an event that was written, or is to be when its window ends, and for its repeats.
type fold struct {
	b    *box
	key  key
	ends time.Time
	sum  Event // of the repeats; Count 0: none
}

// item is an event to be written, or the end of a sandbox's log.
type item struct {
	b    *box
	e    Event
	gone chan struct{} // closed when the log was let go of
}

// Open makes a Store. Logs that are there go on.
func Open(cfg Config) (*Store, error) {
	pool, err := segment.NewPool(openFiles)
	if err != nil {
		return nil, fmt.Errorf("flow log: %w", err)
	}
	s := &Store{
		dir: cfg.Dir, log: cfg.Log, pool: pool, wake: make(chan struct{}, 1), done: make(chan struct{}),
		boxes: map[string]*box{},
	}
	if s.log == nil {
		s.log = slog.New(slog.DiscardHandler)
	}
	go s.write()
	return s, nil
}

// Close writes what is there, folded events too, and returns when that is done. Later events are lost. Idempotent.
func (s *Store) Close() error {
	s.mu.Lock()
	if !s.closed {
		s.closed = true
		for _, b := range s.boxes {
			s.flushLocked(b)
		}
	}
	s.mu.Unlock()
	s.wakeUp()
	<-s.done
	return s.pool.Close()
}

// Stats gives the counts.
func (s *Store) Stats() Stats {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.stats
}

// Add takes an event of a sandbox. It does not wait for the disk.
func (s *Store) Add(sandbox string, e Event) {
	now := time.Now()
	if e.At.IsZero() {
		e.At = now
	}
	e.Count = max(1, e.Count)
	e.clip()
	s.mu.Lock()
	defer s.mu.Unlock()
	s.stats.Added += e.Count
	if s.closed {
		s.stats.Lost += e.Count
		return
	}
	b := s.boxes[sandbox]
	if b == nil {
		b = &box{id: sandbox, limit: rate.NewLimiter(perSecond, burst), room: rate.NewLimiter(bytesPerSecond, burstBytes), folds: map[key]*fold{}}
		s.boxes[sandbox] = b
	}
	k := e.key()
	if f := b.folds[k]; f != nil {
		s.foldLocked(f, &e)
		return
	}
	crowded := (s.folds >= mostFolds || len(s.queue) >= mostQueued) && len(b.folds) >= own
	if crowded || !b.limit.AllowN(now, 1) || !b.room.AllowN(now, e.size()) {
		e = e.coarse()
		k = e.key()
		f := b.folds[k]
		if f == nil {
			f = s.windowLocked(b, k, now)
		}
		s.foldLocked(f, &e)
		return
	}
	s.windowLocked(b, k, now)
	s.queue = append(s.queue, item{b: b, e: e})
	s.wakeUp()
}

func (s *Store) foldLocked(f *fold, e *Event) {
	s.stats.Folded += e.Count
	f.sum.add(e)
}

// windowLocked begins to fold.
func (s *Store) windowLocked(b *box, k key, now time.Time) *fold {
	f := &fold{b: b, key: k, ends: now.Add(Window)}
	b.folds[k] = f
	s.folds++
	s.windows = append(s.windows, f)
	if len(s.windows) == 1 {
		s.wakeUp()
	}
	return f
}

// Forget ends a sandbox's log and returns when all of it is written. Its files stay until Remove. A later event takes it
// up again.
func (s *Store) Forget(sandbox string) {
	s.mu.Lock()
	b := s.boxes[sandbox]
	if b == nil || s.closed {
		s.mu.Unlock()
		return
	}
	s.flushLocked(b)
	delete(s.boxes, sandbox)
	gone := make(chan struct{})
	s.queue = append(s.queue, item{b: b, gone: gone})
	s.mu.Unlock()
	s.wakeUp()
	select {
	case <-gone:
	case <-s.done:
	}
}

// flushLocked queues what is folded of a sandbox.
func (s *Store) flushLocked(b *box) {
	begun := slices.SortedFunc(maps.Values(b.folds), func(x, y *fold) int { return x.ends.Compare(y.ends) })
	for _, f := range begun {
		if f.sum.Count > 0 {
			s.queue = append(s.queue, item{b: b, e: f.sum})
			f.sum = Event{} // its window goes on in vain
		}
	}
	s.folds -= len(b.folds)
	b.folds = nil
}

func (s *Store) wakeUp() {
	select {
	case s.wake <- struct{}{}:
	default:
	}
}

// write is the writer.
func (s *Store) write() {
	defer close(s.done)
	timer := time.NewTimer(0)
	defer timer.Stop()
	var buf []byte
	for {
		items, next, closed := s.take(time.Now())
		for _, it := range items {
			buf = s.put(it, buf[:0])
		}
		if len(items) > 0 {
			continue
		}
		if closed {
			return
		}
		timer.Reset(next)
		select {
		case <-s.wake:
		case <-timer.C:
		}
	}
}

// take gives what is to be written now, and how long it is until a window ends.
func (s *Store) take(now time.Time) (items []item, next time.Duration, closed bool) {
	s.mu.Lock()
	defer s.mu.Unlock()
	for len(s.windows) > 0 && !s.windows[0].ends.After(now) {
		f := s.windows[0]
		s.windows = s.windows[1:]
		switch {
		case f.b.folds[f.key] != f: // its sandbox was forgotten
		case f.sum.Count == 0:
			delete(f.b.folds, f.key)
			s.folds--
		default: // it goes on
			s.queue = append(s.queue, item{b: f.b, e: f.sum})
			f.sum, f.ends = Event{}, now.Add(Window)
			s.windows = append(s.windows, f)
		}
	}
	items, s.queue = s.queue, nil
	next = time.Hour
	if len(s.windows) > 0 {
		next = s.windows[0].ends.Sub(now)
	}
	return items, next, s.closed
}

// put writes an event, or ends a log. It gives the buffer back.
func (s *Store) put(it item, buf []byte) []byte {
	b := it.b
	if it.gone != nil {
		if b.log != nil {
			b.log.Seal()
			_ = b.log.Close() // what was written is with the kernel
			b.log = nil
		}
		close(it.gone)
		return buf
	}
	buf, err := s.append(b, &it.e, buf)
	if err == nil {
		return buf
	}
	if b.lost == 0 {
		s.log.Warn("flow log cannot be written", "sandbox", b.id, "err", err)
	}
	b.lost, b.reason = b.lost+it.e.Count, err
	s.mu.Lock()
	s.stats.Lost += it.e.Count
	s.mu.Unlock()
	return buf
}

func (s *Store) append(b *box, e *Event, buf []byte) ([]byte, error) {
	if b.log == nil {
		l, err := s.pool.Open(segment.Config{Dir: filepath.Join(s.dir, b.id), Keep: Keep})
		if err != nil {
			return buf, err
		}
		b.log = l
		if n := l.Damaged(); n > 0 {
			s.log.Warn("flow log was damaged", "sandbox", b.id, "bytes", n)
			told := Event{At: e.At, Error: fmt.Sprintf("%d bytes of the log were damaged and set aside", n), Count: 1}
			if buf, err = b.append(&told, buf); err != nil {
				return buf, err
			}
		}
	}
	if b.lost > 0 {
		told := Event{At: e.At, Error: "events were not written: " + cause(b.reason), Count: b.lost}
		var err error
		if buf, err = b.append(&told, buf); err != nil {
			return buf, err
		}
		b.lost = 0
	}
	return b.append(e, buf)
}

func (b *box) append(e *Event, buf []byte) ([]byte, error) {
	buf, err := e.encode(buf[:0])
	if err == nil {
		_, err = b.log.Append(buf)
	}
	return buf, err
}

// cause is the innermost message, as "no space left on device".
func cause(err error) string {
	for {
		next := errors.Unwrap(err)
		if next == nil {
			return err.Error()
		}
		err = next
	}
}
