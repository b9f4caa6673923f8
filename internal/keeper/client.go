package keeper

import (
	"context"
	"errors"
	"fmt"
	"io"
	"iter"
	"os"
	"sync"
	"time"

	"github.com/sandsea/sandsea/api/errdefs"
	"github.com/sandsea/sandsea/internal/linux/scm"
	"github.com/sandsea/sandsea/internal/record"
)

// greeting bounds how long a keeper may take to answer a new connection.
const greeting = 5 * time.Second

// errSilent ends the wait for a keeper that does not turn.
var errSilent = errors.New("no answer in time")

// Conn is a connection to a keeper process. It implements Client and Pinner; any number of goroutines may use it,
// Events one. A goroutine of its own reads the socket; it ends with the connection.
type Conn struct {
	c     *scm.Conn
	pid   int
	pidfd *os.File
	knows feature
	done  chan struct{} // closed when the reading goroutine has ended
	more  chan struct{} // has room for one: events came

	mu      sync.Mutex
	last    uint32               // guarded by mu
	waiting map[uint32]*exchange // guarded by mu
	events  []Event              // guarded by mu
	err     error                // why the connection ended; guarded by mu
}

// exchange is one request under way.
type exchange struct {
	answer chan error // has room for one
	held   []Held     // the reader's until the answer
}

var (
	_ Client = (*Conn)(nil)
	_ Pinner = (*Conn)(nil)
)

// Dial connects to the keeper at socket, once: Unavailable when none listens there. Both must run as the same user and
// for the same data directory. The new connection supersedes one that another edge has.
func Dial(ctx context.Context, socket, dataID string) (*Conn, error) {
	return dial(ctx, socket, dataID, false)
}

// dial is Dial to a keeper of any version, if foreign: such a line is good for a Roster and an Upgrade.
func dial(ctx context.Context, socket, dataID string, foreign bool) (*Conn, error) {
	ctx, cancel := context.WithTimeoutCause(ctx, greeting, errSilent)
	defer cancel()
	sc, err := scm.Dial(ctx, socket)
	if err != nil {
		return nil, unavailable(err)
	}
	c, err := greet(ctx, sc, dataID, foreign)
	if err != nil {
		_ = sc.Close()
		return nil, err
	}
	go c.read()
	return c, nil
}

func greet(ctx context.Context, sc *scm.Conn, dataID string, foreign bool) (*Conn, error) {
	cred, err := sc.Peer()
	if err != nil {
		return nil, unavailable(err)
	}
	if int(cred.UID) != os.Geteuid() {
		return nil, errdefs.New(errdefs.Denied, "keeper", "the process at its socket runs as uid %d", cred.UID)
	}
	if err := sc.Send(ctx, hello{version: wireVersion, dataID: dataID, features: features}.encode(kHello)); err != nil {
		return nil, unavailable(err)
	}
	buf := make([]byte, maxMessage)
	n, files, err := sc.Recv(ctx, buf)
	if err != nil {
		return nil, unavailable(err)
	}
	scm.CloseFiles(files)
	k, _, r := open(buf[:n])
	m, err := decodeHello(r)
	switch {
	case err != nil || k != kWelcome:
		return nil, errdefs.New(errdefs.Internal, "keeper", "its greeting makes no sense").Wrap(err)
	case m.version != wireVersion && !foreign:
		return nil, errdefs.New(errdefs.FailedPrecondition, "keeper", "it speaks version %d, not %d",
			m.version, wireVersion)
	case m.dataID != dataID:
		return nil, errdefs.New(errdefs.FailedPrecondition, "keeper", "it serves another data directory")
	}
	pidfd, err := sc.PeerPidfd()
	if err != nil {
		return nil, unavailable(err)
	}
	return &Conn{
		c: sc, pid: cred.Pid, pidfd: pidfd, knows: m.features, done: make(chan struct{}), more: make(chan struct{}, 1),
		waiting: make(map[uint32]*exchange),
	}, nil
}

func unavailable(err error) error {
	return errdefs.New(errdefs.Unavailable, "keeper", "no connection: %v", err).Wrap(err)
}

// Pid is the keeper's process.
func (c *Conn) Pid() int { return c.pid }

// Pidfd names the keeper's process; it stays the Conn's.
func (c *Conn) Pidfd() *os.File { return c.pidfd }

// Done is closed when the connection has ended.
func (c *Conn) Done() <-chan struct{} { return c.done }

// Close ends the connection; the keeper keeps what it holds. It returns when the reading goroutine is gone.
func (c *Conn) Close() error {
	err := c.c.Close()
	<-c.done
	c.pidfd.Close()
	if errors.Is(err, os.ErrClosed) {
		return nil
	}
	return err
}

// read is the goroutine that takes in what the keeper sends.
func (c *Conn) read() {
	buf := make([]byte, maxMessage)
	var err error
	for err == nil {
		var n int
		var files []*os.File
		if n, files, err = c.c.Recv(context.Background(), buf); err == nil {
			err = c.take(buf[:n], files)
		}
	}
	if errors.Is(err, io.EOF) {
		err = errors.New("the keeper closed it")
	}
	_ = c.c.Close()
	c.mu.Lock()
	c.err = unavailable(err)
	for _, x := range c.waiting {
		CloseHeld(x.held)
		x.held = nil
		x.answer <- c.err
	}
	clear(c.waiting)
	c.mu.Unlock()
	close(c.done)
}

func (c *Conn) take(msg []byte, files []*os.File) error {
	k, id, r := open(msg)
	if k != kHeldSandbox && k != kHeldExec && len(files) > 0 {
		scm.CloseFiles(files)
		return fmt.Errorf("message %d with files", k)
	}
	switch k {
	case kReply:
		m, err := decodeReply(r)
		if err != nil {
			return err
		}
		c.mu.Lock()
		x := c.waiting[id]
		delete(c.waiting, id)
		c.mu.Unlock()
		if x == nil {
			return nil
		}
		if m.kind == "" {
			x.answer <- nil
		} else {
			x.answer <- errdefs.New(errdefs.Kind(m.kind), m.object, "%s", m.msg)
		}
	case kEvent:
		e, err := decodeEvent(r)
		if err != nil {
			return err
		}
		c.mu.Lock()
		c.events = append(c.events, e)
		c.mu.Unlock()
		select {
		case c.more <- struct{}{}:
		default:
		}
	case kHeldSandbox, kHeldExec:
		h, err := decodeHeld(k, r, files)
		if err != nil {
			scm.CloseFiles(files)
			return err
		}
		c.mu.Lock()
		x := c.waiting[id]
		if x != nil {
			x.held = append(x.held, h)
		}
		c.mu.Unlock()
		if x == nil {
			scm.CloseFiles(files)
		}
	}
	return nil
}

func decodeHeld(k kind, r *reader, files []*os.File) (Held, error) {
	take := func(present bool) *os.File {
		if !present {
			return nil
		}
		f := files[0]
		files = files[1:]
		return f
	}
	if k == kHeldSandbox {
		m, err := decodeSandbox(r)
		if err != nil || m.fileCount() != len(files) {
			return Held{}, fmt.Errorf("sandbox with %d files: %w", len(files), errors.Join(err, io.ErrUnexpectedEOF))
		}
		return Held{Fired: m.fired, Sandbox: &Sandbox{
			ID: m.id, Control: take(m.files[0]), Pidfd: take(m.files[1]), Kill: take(m.files[2]),
			Hard: m.hard, Budget: m.budget, Suspended: m.suspended,
		}}, nil
	}
	m, err := decodeExec(r)
	if err != nil || m.fileCount() != len(files) {
		return Held{}, fmt.Errorf("command with %d files: %w", len(files), errors.Join(err, io.ErrUnexpectedEOF))
	}
	h := Held{Fired: m.fired, Exec: &Exec{Key: m.key, Caps: m.caps, Remaining: m.remaining}}
	for _, s := range m.streams {
		h.Exec.Streams = append(h.Exec.Streams, Stream{
			Stream: s.stream, Pipe: take(true), File: take(true), Pins: s.pins,
		})
		if s.closed {
			h.Closed = append(h.Closed, s.stream)
		}
	}
	h.Exec.Stdin, h.Exec.Kill = take(m.stdin), take(m.kill)
	for i, s := range m.streams {
		h.Exec.Streams[i].Terminal, h.Exec.Streams[i].Feed = take(s.terminal), take(s.terminal)
	}
	return h, nil
}

// Files lists the descriptors of the entry.
func (h Held) Files() []*os.File {
	var all []*os.File
	if h.Sandbox != nil {
		all = append(all, h.Sandbox.Control, h.Sandbox.Pidfd, h.Sandbox.Kill)
	}
	if h.Exec != nil {
		all = append(all, h.Exec.Stdin, h.Exec.Kill)
		for _, s := range h.Exec.Streams {
			all = append(all, s.Pipe, s.File, s.Terminal, s.Feed)
		}
	}
	out := all[:0]
	for _, f := range all {
		if f != nil {
			out = append(out, f)
		}
	}
	return out
}

// CloseHeld closes the descriptors of all entries.
func CloseHeld(hs []Held) {
	for _, h := range hs {
		scm.CloseFiles(h.Files())
	}
}

// call sends one request and waits for its answer. What ctx cut short may have been done; every request can be
// repeated.
func (c *Conn) call(ctx context.Context, what string, build func(id uint32) []byte, files ...*os.File) ([]Held, error) {
	x := &exchange{answer: make(chan error, 1)}
	c.mu.Lock()
	if c.err != nil {
		defer c.mu.Unlock()
		return nil, fmt.Errorf("%s: %w", what, c.err)
	}
	c.last++
	id := c.last
	c.waiting[id] = x
	c.mu.Unlock()
	if err := c.c.Send(ctx, build(id), files...); err != nil {
		c.abandon(id, x)
		if ctx.Err() == nil {
			err = unavailable(err)
		}
		return nil, fmt.Errorf("%s: %w", what, err)
	}
	select {
	case err := <-x.answer:
		if err != nil {
			CloseHeld(x.held)
			return nil, fmt.Errorf("%s: %w", what, err)
		}
		return x.held, nil
	case <-ctx.Done():
		c.abandon(id, x)
		return nil, fmt.Errorf("%s: %w", what, context.Cause(ctx))
	}
}

func (c *Conn) abandon(id uint32, x *exchange) {
	c.mu.Lock()
	defer c.mu.Unlock()
	delete(c.waiting, id)
	CloseHeld(x.held)
	x.held = nil
}

// Hold implements Client.
func (c *Conn) Hold(ctx context.Context, s Sandbox) error {
	m := sandboxMsg{id: s.ID, hard: s.Hard, budget: s.Budget, suspended: s.Suspended}
	var files []*os.File
	for i, f := range []*os.File{s.Control, s.Pidfd, s.Kill} {
		if m.files[i] = f != nil; f != nil {
			files = append(files, f)
		}
	}
	_, err := c.call(ctx, "hold", func(id uint32) []byte { return m.encode(kHold, id) }, files...)
	return err
}

// Record implements Client.
func (c *Conn) Record(ctx context.Context, e Exec) error {
	m := execMsg{
		key: e.Key, caps: e.Caps, remaining: e.Remaining, stdin: e.Stdin != nil, kill: e.Kill != nil, settled: e.Settled,
	}
	if len(e.Streams) > maxStreams {
		return errdefs.New(errdefs.Invalid, object(e.Key), "%d streams, at most %d", len(e.Streams), maxStreams)
	}
	files := make([]*os.File, 0, 6)
	for _, s := range e.Streams {
		if len(s.Pins) > maxPins {
			return errdefs.New(errdefs.Invalid, object(e.Key), "%d pins, at most %d", len(s.Pins), maxPins)
		}
		if s.Terminal != nil && c.knows&terminals == 0 {
			return errdefs.New(errdefs.FailedPrecondition, "keeper",
				"the running one (process %d) is of an older version, which cannot record terminals", c.pid).
				WithHint("End that process; the node's daemon starts a new one, and nothing is lost")
		}
		m.streams = append(m.streams, streamMsg{stream: s.Stream, pins: s.Pins, terminal: s.Terminal != nil})
		files = append(files, s.Pipe, s.File)
	}
	for _, f := range []*os.File{e.Stdin, e.Kill} {
		if f != nil {
			files = append(files, f)
		}
	}
	for _, s := range e.Streams {
		if s.Terminal != nil {
			files = append(files, s.Terminal, s.Feed)
		}
	}
	_, err := c.call(ctx, "record", func(id uint32) []byte { return m.encode(kRecord, id) }, files...)
	return err
}

func (c *Conn) about(ctx context.Context, what string, k kind, m keyMsg) error {
	_, err := c.call(ctx, what, func(id uint32) []byte { return m.encode(k, id) })
	return err
}

// Rearm implements Client.
func (c *Conn) Rearm(ctx context.Context, k Key, hard time.Time, remaining time.Duration) error {
	return c.about(ctx, "rearm", kRearm, keyMsg{key: k, hard: hard, remaining: remaining})
}

// Suspend implements Client.
func (c *Conn) Suspend(ctx context.Context, sandbox string) error {
	return c.about(ctx, "suspend", kSuspend, keyMsg{key: Key{Sandbox: sandbox}})
}

// Continue implements Client.
func (c *Conn) Continue(ctx context.Context, sandbox string) error {
	return c.about(ctx, "continue", kContinue, keyMsg{key: Key{Sandbox: sandbox}})
}

// Retain implements Client.
func (c *Conn) Retain(ctx context.Context, k Key, s record.Stream, from int64) error {
	return c.about(ctx, "retain", kRetain, keyMsg{key: k, stream: s, span: record.Range{From: from}})
}

// Pin implements Pinner.
func (c *Conn) Pin(ctx context.Context, k Key, s record.Stream, r record.Range) error {
	return c.about(ctx, "pin", kPin, keyMsg{key: k, stream: s, span: r})
}

// CloseInput implements Client.
func (c *Conn) CloseInput(ctx context.Context, k Key) error {
	return c.about(ctx, "close input", kCloseInput, keyMsg{key: k})
}

// Release implements Client.
func (c *Conn) Release(ctx context.Context, k Key) error {
	return c.about(ctx, "release", kRelease, keyMsg{key: k})
}

// Roster implements Client.
func (c *Conn) Roster(ctx context.Context) ([]Held, error) {
	return c.call(ctx, "roster", func(id uint32) []byte { return begin(kRoster, id).b })
}

// Ack implements Client.
func (c *Conn) Ack(seq uint64) error {
	// A full queue means a keeper that does not turn; it will be found out by then.
	ctx, cancel := context.WithTimeoutCause(context.Background(), greeting, errSilent)
	defer cancel()
	if err := c.c.Send(ctx, encodeAck(seq)); err != nil {
		return fmt.Errorf("acknowledge: %w", unavailable(err))
	}
	return nil
}

// Events implements Client.
func (c *Conn) Events() iter.Seq2[Event, error] {
	return func(yield func(Event, error) bool) {
		for {
			c.mu.Lock()
			batch, err := c.events, c.err
			c.events = nil
			c.mu.Unlock()
			for i, e := range batch {
				if !yield(e, nil) {
					c.mu.Lock()
					c.events = append(batch[i+1:], c.events...)
					c.mu.Unlock()
					return
				}
			}
			if err != nil {
				yield(Event{}, err)
				return
			}
			if len(batch) > 0 {
				continue
			}
			select {
			case <-c.more:
			case <-c.done:
			}
		}
	}
}
