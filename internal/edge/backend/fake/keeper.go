package fake

import (
	"context"
	"errors"
	"fmt"
	"io"
	"iter"
	"os"
	"slices"
	"sync"
	"syscall"
	"time"

	"github.com/sandsea/sandsea/api/errdefs"
	"github.com/sandsea/sandsea/internal/keeper"
	"github.com/sandsea/sandsea/internal/record"
)

// Keeper is a keeper inside the test's process: it really drains pipes into files, keeps duplicates and fires
// deadlines. Like a World it outlives the clients that Connect gives; Kill is its death.
type Keeper struct {
	mu     sync.Mutex
	held   map[keeper.Key]*held // guarded by mu
	events []keeper.Event       // guarded by mu, not acknowledged
	seq    uint64               // guarded by mu
	conn   *keeperConn          // guarded by mu: the latest
	killed bool                 // guarded by mu
	wg     sync.WaitGroup
}

type held struct {
	key     keeper.Key
	sandbox *keeper.Sandbox // owns its files
	exec    *keeper.Exec    // owns its files
	timer   *time.Timer
	ends    time.Time
	fired   bool
	closed  []record.Stream
	readers []*os.File
	wg      sync.WaitGroup // of the goroutines that read
}

// NewKeeper makes one that holds nothing.
func NewKeeper() *Keeper { return &Keeper{held: map[keeper.Key]*held{}} }

// Connect makes a client; the one before gets no more events.
func (k *Keeper) Connect() keeper.Client {
	c := &keeperConn{k: k, news: make(chan struct{}, 1), closed: make(chan struct{})}
	k.mu.Lock()
	old := k.conn
	k.conn = c
	killed := k.killed
	k.mu.Unlock()
	if killed {
		_ = c.Close()
	}
	if old != nil {
		_ = old.Close()
	}
	c.wake()
	return c
}

// Kill closes everything that is held, fires nothing and breaks the connection, as kill -9 does.
func (k *Keeper) Kill() {
	k.mu.Lock()
	k.killed = true
	var dropped []*held
	for key := range k.held {
		dropped = append(dropped, k.dropLocked(key))
	}
	c := k.conn
	k.mu.Unlock()
	for _, h := range dropped {
		h.finish()
	}
	if c != nil {
		_ = c.Close()
	}
	k.wg.Wait()
}

// Keys lists what is held.
func (k *Keeper) Keys() []keeper.Key {
	k.mu.Lock()
	defer k.mu.Unlock()
	var out []keeper.Key
	for key := range k.held {
		out = append(out, key)
	}
	return out
}

// Overflow says that a command wrote more than a stream may have. The real one kills the sandbox before.
func (k *Keeper) Overflow(key keeper.Key, stream record.Stream) {
	k.mu.Lock()
	defer k.mu.Unlock()
	k.emitLocked(keeper.Event{Kind: keeper.Overflow, Key: key, Stream: stream})
}

func (k *Keeper) emitLocked(e keeper.Event) {
	k.seq++
	e.Seq = k.seq
	k.events = append(k.events, e)
	if k.conn != nil {
		k.conn.wake()
	}
}

// dropLocked forgets key; the caller finishes what it gives, without the lock.
func (k *Keeper) dropLocked(key keeper.Key) *held {
	h := k.held[key]
	if h == nil {
		return nil
	}
	delete(k.held, key)
	if h.timer != nil {
		h.timer.Stop()
	}
	return h
}

// finish closes everything. A byte that was taken out of a pipe is in its record before: the real one splices.
func (h *held) finish() {
	if h == nil {
		return
	}
	for _, r := range h.readers {
		_ = r.Close()
	}
	h.wg.Wait()
	h.closeFiles()
}

func (h *held) closeFiles() {
	var files []*os.File
	if s := h.sandbox; s != nil {
		files = append(files, s.Control, s.Pidfd, s.Kill)
	}
	if e := h.exec; e != nil {
		files = append(files, e.Stdin, e.Kill)
		for _, s := range e.Streams {
			files = append(files, s.Pipe, s.File, s.Terminal, s.Feed)
		}
	}
	for _, f := range files {
		if f != nil {
			_ = f.Close()
		}
	}
}

func dup(f *os.File) (*os.File, error) {
	if f == nil {
		return nil, nil
	}
	conn, err := f.SyscallConn()
	if err != nil {
		return nil, fmt.Errorf("duplicate %s: %w", f.Name(), err)
	}
	n := -1
	err2 := conn.Control(func(fd uintptr) {
		r, _, errno := syscall.Syscall(syscall.SYS_FCNTL, fd, syscall.F_DUPFD_CLOEXEC, 0)
		if errno != 0 {
			err = errno
			return
		}
		n = int(r)
	})
	if err := errors.Join(err, err2); err != nil {
		return nil, fmt.Errorf("duplicate %s: %w", f.Name(), err)
	}
	return os.NewFile(uintptr(n), f.Name()), nil
}

// armLocked arms or disarms; the kill is written after the event is kept.
func (k *Keeper) armLocked(h *held, after time.Duration, on bool) {
	if h.timer != nil {
		h.timer.Stop()
		h.timer = nil
	}
	if !on {
		return
	}
	h.ends = time.Now().Add(after)
	var timer *time.Timer
	timer = time.AfterFunc(max(after, 0), func() {
		k.mu.Lock()
		defer k.mu.Unlock()
		if h.timer != timer || k.held[h.key] != h {
			return
		}
		h.fired = true
		k.emitLocked(keeper.Event{Kind: keeper.Fired, Key: h.key})
		f := h.killFile()
		_, _ = f.Write([]byte("1"))
	})
	h.timer = timer
}

func (h *held) killFile() *os.File {
	if h.sandbox != nil {
		return h.sandbox.Kill
	}
	return h.exec.Kill
}

func (k *Keeper) drain(h *held, s keeper.Stream, pipe *os.File) {
	defer k.wg.Done()
	defer h.wg.Done()
	size, err := s.File.Seek(0, io.SeekEnd)
	if err != nil {
		return
	}
	buf := make([]byte, 64<<10)
	for {
		n, err := pipe.Read(buf)
		if n > 0 {
			if _, werr := s.File.WriteAt(buf[:n], size); werr != nil {
				return
			}
			size += int64(n)
		}
		if err != nil {
			if errors.Is(err, io.EOF) || s.Terminal != nil && errors.Is(err, syscall.EIO) {
				k.mu.Lock()
				defer k.mu.Unlock()
				if k.held[h.key] == h {
					h.closed = append(h.closed, s.Stream)
					k.emitLocked(keeper.Event{Kind: keeper.Closed, Key: h.key, Stream: s.Stream, Size: size})
				}
			}
			return
		}
	}
}

type keeperConn struct {
	k      *Keeper
	news   chan struct{}
	once   sync.Once
	closed chan struct{}
}

var _ keeper.Client = (*keeperConn)(nil)

func (c *keeperConn) wake() {
	select {
	case c.news <- struct{}{}:
	default:
	}
}

func (c *keeperConn) err() error {
	select {
	case <-c.closed:
		return errdefs.New(errdefs.Unavailable, "keeper", "the connection is closed")
	default:
		return nil
	}
}

func (c *keeperConn) Hold(_ context.Context, s keeper.Sandbox) error {
	if err := c.err(); err != nil {
		return err
	}
	k := c.k
	k.mu.Lock()
	defer k.mu.Unlock()
	key := keeper.Key{Sandbox: s.ID}
	if k.held[key] != nil {
		return nil
	}
	own := s
	h := &held{key: key, sandbox: &own}
	var errs [3]error
	own.Control, errs[0] = dup(s.Control)
	own.Pidfd, errs[1] = dup(s.Pidfd)
	own.Kill, errs[2] = dup(s.Kill)
	if err := errors.Join(errs[:]...); err != nil {
		h.closeFiles()
		return err
	}
	k.held[key] = h
	k.armLocked(h, time.Until(s.Hard), !s.Hard.IsZero())
	return nil
}

func (c *keeperConn) Record(_ context.Context, e keeper.Exec) error {
	if err := c.err(); err != nil {
		return err
	}
	k := c.k
	k.mu.Lock()
	defer k.mu.Unlock()
	if k.held[e.Key] != nil {
		return nil
	}
	own := e
	own.Streams = nil
	h := &held{key: e.Key, exec: &own}
	var errs []error
	take := func(f *os.File) *os.File {
		d, err := dup(f)
		errs = append(errs, err)
		return d
	}
	own.Stdin, own.Kill = take(e.Stdin), take(e.Kill)
	for _, s := range e.Streams {
		own.Streams = append(own.Streams, keeper.Stream{
			Stream: s.Stream, Pipe: take(s.Pipe), File: take(s.File), Terminal: take(s.Terminal), Feed: take(s.Feed),
		})
		var r *os.File
		var err error
		if s.Terminal != nil {
			r, err = dup(s.Terminal)
		} else {
			r, err = reopen(s.Pipe, syscall.O_RDONLY)
		}
		errs = append(errs, err)
		if err == nil {
			h.readers = append(h.readers, r)
		}
	}
	if err := errors.Join(errs...); err != nil {
		for _, r := range h.readers {
			_ = r.Close()
		}
		h.closeFiles()
		return err
	}
	k.held[e.Key] = h
	k.armLocked(h, e.Remaining, e.Remaining > 0)
	for i, s := range own.Streams {
		k.wg.Add(1)
		h.wg.Add(1)
		go k.drain(h, s, h.readers[i])
	}
	return nil
}

func (c *keeperConn) Rearm(_ context.Context, key keeper.Key, hard time.Time, remaining time.Duration) error {
	if err := c.err(); err != nil {
		return err
	}
	c.k.mu.Lock()
	defer c.k.mu.Unlock()
	h := c.k.held[key]
	if h == nil {
		return errdefs.New(errdefs.NotFound, "keeper", "holds nothing for %v", key)
	}
	if h.sandbox != nil {
		h.sandbox.Hard = hard
		c.k.armLocked(h, time.Until(hard), !hard.IsZero())
	} else {
		c.k.armLocked(h, remaining, remaining > 0)
	}
	return nil
}

func (c *keeperConn) Suspend(context.Context, string) error  { return c.err() }
func (c *keeperConn) Continue(context.Context, string) error { return c.err() }

func (c *keeperConn) Retain(context.Context, keeper.Key, record.Stream, int64) error { return c.err() }

func (c *keeperConn) CloseInput(_ context.Context, key keeper.Key) error {
	if err := c.err(); err != nil {
		return err
	}
	c.k.mu.Lock()
	defer c.k.mu.Unlock()
	if h := c.k.held[key]; h != nil && h.exec != nil && h.exec.Stdin != nil {
		_ = h.exec.Stdin.Close()
		h.exec.Stdin = nil
	}
	return nil
}

func (c *keeperConn) Release(_ context.Context, key keeper.Key) error {
	if err := c.err(); err != nil {
		return err
	}
	c.k.mu.Lock()
	var dropped []*held
	for other := range c.k.held {
		if other == key || key.Number == 0 && other.Sandbox == key.Sandbox {
			dropped = append(dropped, c.k.dropLocked(other))
		}
	}
	c.k.mu.Unlock()
	for _, h := range dropped {
		h.finish()
	}
	return nil
}

func (c *keeperConn) Roster(context.Context) ([]keeper.Held, error) {
	if err := c.err(); err != nil {
		return nil, err
	}
	c.k.mu.Lock()
	defer c.k.mu.Unlock()
	var out []keeper.Held
	var errs []error
	take := func(f *os.File) *os.File {
		d, err := dup(f)
		errs = append(errs, err)
		return d
	}
	for _, h := range c.k.held {
		r := keeper.Held{Fired: h.fired, Closed: slices.Clone(h.closed)}
		if s := h.sandbox; s != nil {
			own := *s
			own.Control, own.Pidfd, own.Kill = take(s.Control), take(s.Pidfd), take(s.Kill)
			r.Sandbox = &own
		} else {
			own := *h.exec
			own.Streams = nil
			own.Stdin, own.Kill = take(h.exec.Stdin), take(h.exec.Kill)
			for _, s := range h.exec.Streams {
				own.Streams = append(own.Streams, keeper.Stream{
					Stream: s.Stream, Pipe: take(s.Pipe), File: take(s.File), Terminal: take(s.Terminal), Feed: take(s.Feed),
				})
			}
			if h.timer != nil {
				own.Remaining = max(time.Until(h.ends), 1)
			}
			r.Exec = &own
		}
		out = append(out, r)
	}
	return out, errors.Join(errs...)
}

func (c *keeperConn) Events() iter.Seq2[keeper.Event, error] {
	return func(yield func(keeper.Event, error) bool) {
		var last uint64
		for {
			c.k.mu.Lock()
			var e keeper.Event
			for _, x := range c.k.events {
				if x.Seq > last {
					e = x
					break
				}
			}
			c.k.mu.Unlock()
			if c.err() == nil && e.Seq > 0 {
				last = e.Seq
				if !yield(e, nil) {
					return
				}
				continue
			}
			select {
			case <-c.news:
			case <-c.closed:
				yield(keeper.Event{}, c.err())
				return
			}
		}
	}
}

func (c *keeperConn) Ack(seq uint64) error {
	if err := c.err(); err != nil {
		return err
	}
	c.k.mu.Lock()
	defer c.k.mu.Unlock()
	c.k.events = slices.DeleteFunc(c.k.events, func(e keeper.Event) bool { return e.Seq == seq })
	return nil
}

func (c *keeperConn) Close() error {
	c.once.Do(func() { close(c.closed) })
	return nil
}
