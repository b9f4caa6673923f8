package wire

import (
	"context"
	"errors"
	"fmt"
	"io"
	"iter"
	"math/rand/v2"
	"os"
	"slices"
	"sync"
	"syscall"
	"time"

	"github.com/sandsea/sandsea/api/errdefs"
	"github.com/sandsea/sandsea/internal/chronus"
	"github.com/sandsea/sandsea/internal/linux/memfd"
	"github.com/sandsea/sandsea/internal/linux/scm"
)

// ackLimit bounds the sending of an acknowledgement, which waits only while the peer is frozen and the socket full.
const ackLimit = 5 * time.Second

// endLimit bounds the reading of what the inside said before its end.
const endLimit = 5 * time.Second

var errAckLimit = fmt.Errorf("not acknowledged in %s: %w", ackLimit, context.DeadlineExceeded)

// SetupError says at which step sandsea-init could not make the sandbox.
type SetupError struct {
	Step  string
	Errno syscall.Errno
}

func (e *SetupError) Error() string { return fmt.Sprintf("set up %s: %v", e.Step, e.Errno) }

// Channel is the line to one sandsea-init. It implements chronus.Channel.
type Channel struct {
	conn   *scm.Conn
	sender chan struct{} // holds one token; who has it may send
	done   chan struct{} // closed when the line is dead
	more   chan struct{} // told when exits grew or the line died
	reader sync.WaitGroup

	mu sync.Mutex
	// open is set once what is read belongs to this side's calls and not to an earlier edge's; guarded by mu.
	open bool
	// seq is the last number given to a request; guarded by mu.
	seq uint32
	// waiting are the calls whose answer is found by seq; guarded by mu.
	waiting map[uint32]chan message
	// known are the processes that this side started or was told of, until acknowledged; guarded by mu.
	known map[int64]*process
	// acked are numbers acknowledged of late: what the inside still says of them crossed the acknowledgement; guarded by
	// mu.
	acked []int64
	// exits are to be handed to the consumer of Exits; guarded by mu.
	exits []chronus.Exit
	// terminals and shells say that the inside knows what it takes for one; guarded by mu.
	terminals, shells bool
	// hello is the greeting under way; guarded by mu.
	hello *greeting
	// dead is why the line closed; guarded by mu.
	dead error
}

// process is what is known of one.
type process struct {
	state   uint32 // 0: asked for, no answer yet
	seq     uint32 // of the last request about it
	queued  bool   // its exit went to the consumer since the last greeting
	waiters []chan message
}

// greeting gathers a roster.
type greeting struct {
	seq    uint32
	facts  *message
	listed map[int64]message
	order  []int64
	// crossed counts the listed that were acknowledged before the inside heard of it.
	crossed int
	answer  chan greeted
	given   bool // its caller gave up
}

type greeted struct {
	facts chronus.InForce
	list  []chronus.Process
}

var _ chronus.Channel = (*Channel)(nil)

// New makes the client's end of a control socket. The file stays the caller's; the Channel works on a duplicate of its
// own. Problems with the file show at the first call.
func New(control *os.File) *Channel {
	c := &Channel{
		sender:  make(chan struct{}, 1),
		done:    make(chan struct{}),
		more:    make(chan struct{}, 1),
		waiting: map[uint32]chan message{},
		known:   map[int64]*process{},
		// Answers to an earlier edge may lie in the socket; their numbers must not be ours.
		seq: rand.Uint32N(1 << 31),
	}
	dup, err := duplicate(control)
	if err == nil {
		c.conn, err = scm.New(dup)
	}
	if err != nil {
		c.die(err)
		return c
	}
	c.sender <- struct{}{}
	c.reader.Go(c.read)
	return c
}

func duplicate(f *os.File) (*os.File, error) {
	rc, err := f.SyscallConn()
	if err != nil {
		return nil, fmt.Errorf("control socket: %w", err)
	}
	var d uintptr
	var errno syscall.Errno
	err = rc.Control(func(fd uintptr) {
		d, _, errno = syscall.Syscall(syscall.SYS_FCNTL, fd, syscall.F_DUPFD_CLOEXEC, 3)
	})
	if err == nil && errno != 0 {
		err = errno
	}
	if err != nil {
		return nil, fmt.Errorf("duplicate control socket: %w", err)
	}
	return os.NewFile(d, "control"), nil
}

// die closes the line for good; the first reason stays.
func (c *Channel) die(why error) {
	c.mu.Lock()
	first := c.dead == nil
	if first {
		c.dead = errdefs.New(errdefs.Unavailable, "sandbox", "the line to its inside is closed: %v", why).
			WithHint("See how it ended: sandsea inspect").Wrap(why)
		close(c.done)
	}
	c.mu.Unlock()
	if first && c.conn != nil {
		_ = c.conn.Close() // its first reason counts
	}
	c.notify()
}

func (c *Channel) notify() {
	select {
	case c.more <- struct{}{}:
	default:
	}
}

func (c *Channel) reason() error {
	c.mu.Lock()
	defer c.mu.Unlock()
	return c.dead
}

// Close ends the line on this side. The sandbox lives on while another holder keeps the socket.
func (c *Channel) Close() error {
	c.die(os.ErrClosed)
	c.reader.Wait()
	return nil
}

// read is the goroutine that takes what the inside says.
func (c *Channel) read() {
	buf := make([]byte, messageSize+1)
	for {
		n, files, err := c.conn.Recv(context.Background(), buf)
		// That this process can hold no more descriptors is not the inside's fault: who asked for one gets none.
		cut := errors.Is(err, scm.ErrTruncated) && n > 0
		if err != nil && !cut {
			if errors.Is(err, io.EOF) {
				err = errors.New("its first process is gone")
			}
			c.die(err)
			return
		}
		m, err := decode(buf[:n])
		if err == nil {
			err = m.check()
		}
		if err == nil && cut {
			err = m.cut()
		} else if err == nil {
			err = m.carry(files)
		}
		if err == nil {
			err = c.take(m)
		}
		if err != nil {
			scm.CloseFiles(files)
			c.die(err)
			return
		}
	}
}

// take gives a message to whom it concerns. An error means that the peer said what it cannot have meant.
func (c *Channel) take(m message) error {
	c.mu.Lock()
	defer c.mu.Unlock()
	if !c.open {
		// Left in the socket by an earlier edge, unless it answers the call that opens the line.
		opens := m.kind == kindRoster && c.hello != nil && c.hello.seq == m.seq
		if w := c.waiting[m.seq]; w != nil && (m.kind == kindReady || m.kind == kindPrepared || m.kind == kindFailed && m.cookie == 0) {
			opens = true
		}
		if !opens {
			m.drop()
			return nil
		}
		c.open = true
	}
	if m.cookie != 0 && c.known[m.cookie] == nil && slices.Contains(c.acked, m.cookie) {
		if g := c.hello; m.kind == kindProcess && g != nil && g.seq == m.seq && g.facts != nil {
			g.crossed++
		}
		return nil
	}
	switch m.kind {
	case kindPrepared, kindReady, kindServing, kindSignalled, kindPTY:
		c.answerLocked(m)
		return nil
	case kindFailed:
		if m.cookie == 0 {
			c.answerLocked(m)
			return nil
		}
		return c.failedLocked(m)
	case kindStarted:
		p := c.known[m.cookie]
		if p == nil {
			return fmt.Errorf("%w: process %d started, which nobody asked for", errMessage, m.cookie)
		}
		if p.state == 0 || p.state == stateStarting {
			p.state = stateRunning
		}
		p.tell(m)
		return nil
	case kindExit:
		return c.exitLocked(m)
	case kindRoster, kindProcess, kindRosterEnd:
		return c.rosterLocked(m)
	}
	return fmt.Errorf("%w: kind %d", errMessage, m.kind)
}

// answerLocked wakes the caller; one who gave up meanwhile is gone from the table.
func (c *Channel) answerLocked(m message) {
	if w, ok := c.waiting[m.seq]; ok {
		delete(c.waiting, m.seq)
		w <- m
		return
	}
	m.drop()
}

func (p *process) tell(m message) {
	for _, w := range p.waiters {
		w <- m
	}
	p.waiters = nil
}

func (c *Channel) failedLocked(m message) error {
	p := c.known[m.cookie]
	if p == nil || p.state == stateRunning || p.state == stateExited {
		return fmt.Errorf("%w: start of process %d failed, which is not starting", errMessage, m.cookie)
	}
	if p.state == stateStarting && len(p.waiters) == 0 {
		// An earlier edge asked for it and Hello listed it: whoever waits for its end is told.
		p.state, p.queued = stateExited, true
		c.exits = append(c.exits, chronus.Exit{Number: m.cookie, Failed: m.startError()})
		c.notify()
		return nil
	}
	delete(c.known, m.cookie)
	p.tell(m)
	return nil
}

func (c *Channel) exitLocked(m message) error {
	p := c.known[m.cookie]
	if p == nil || p.state == 0 || p.state == stateStarting {
		return fmt.Errorf("%w: process %d ended, which did not run", errMessage, m.cookie)
	}
	p.state = stateExited
	if !p.queued {
		p.queued = true
		c.exits = append(c.exits, m.exit())
		c.notify()
	}
	return nil
}

func (c *Channel) rosterLocked(m message) error {
	g := c.hello
	if g != nil && m.seq < g.seq {
		return nil // of a greeting that was given up
	}
	if g == nil || g.seq != m.seq || (m.kind == kindRoster) != (g.facts == nil) {
		return fmt.Errorf("%w: a roster nobody asked for", errMessage)
	}
	switch m.kind {
	case kindRoster:
		g.facts = &m
		// What was asked before the greeting and has no answer yet gets none.
		for seq, w := range c.waiting {
			if seq < g.seq {
				delete(c.waiting, seq)
				close(w)
			}
		}
		return nil
	case kindProcess:
		if _, twice := g.listed[m.cookie]; twice || len(g.listed) >= slots {
			return fmt.Errorf("%w: process %d is listed twice", errMessage, m.cookie)
		}
		g.listed[m.cookie] = m
		g.order = append(g.order, m.cookie)
		return nil
	}
	if got := len(g.listed) + g.crossed; int(g.facts.count) != got {
		return fmt.Errorf("%w: roster of %d lists %d", errMessage, g.facts.count, got)
	}
	c.hello = nil
	out := greeted{facts: g.facts.inForce()}
	c.terminals, c.shells = out.facts.Terminals, out.facts.Shells
	for number, p := range c.known {
		if _, there := g.listed[number]; !there && p.seq < g.seq {
			delete(c.known, number)
			for _, w := range p.waiters {
				close(w)
			}
		}
	}
	for _, number := range g.order {
		m := g.listed[number]
		p := c.known[number]
		if p == nil {
			p = &process{}
			c.known[number] = p
		}
		p.state, p.queued = m.state, false
		e := chronus.Process{Number: number, Pid: int(m.pid)}
		if m.state == stateExited {
			e.Exited, e.Exit = true, m.exit()
		}
		if m.state != stateStarting {
			p.tell(message{head: head{kind: kindStarted, cookie: number}, pid: m.pid})
		}
		out.list = append(out.list, e)
	}
	// Exits told before the greeting come again behind it.
	c.exits = slices.DeleteFunc(c.exits, func(e chronus.Exit) bool {
		p := c.known[e.Number]
		return e.Failed == nil && p != nil && !p.queued
	})
	g.answer <- out
	return nil
}

// send sends one request. register is called under mu with the request's seq before anything is sent, and may refuse;
// revoke is called under mu when nothing was sent after all. Requests leave in the order of their seq.
func (c *Channel) send(ctx context.Context, m message, files []*os.File, register func(seq uint32) error,
	revoke func(),
) error {
	select {
	case <-c.sender:
	case <-c.done:
		return c.reason()
	case <-ctx.Done():
		return limitError(ctx, errdefs.Deadline, "nothing was sent")
	}
	defer func() { c.sender <- struct{}{} }()
	c.mu.Lock()
	if c.dead != nil {
		defer c.mu.Unlock()
		return c.dead
	}
	c.seq++
	m.seq = c.seq
	if err := register(m.seq); err != nil {
		c.mu.Unlock()
		return err
	}
	c.mu.Unlock()
	err := c.conn.Send(ctx, m.encode(), files...)
	if err == nil {
		return nil
	}
	c.mu.Lock()
	revoke()
	c.mu.Unlock()
	if ctx.Err() != nil {
		return limitError(ctx, errdefs.Deadline, "nothing was sent")
	}
	// A full descriptor table or lack of memory hurts this call only.
	if errors.Is(err, syscall.EPIPE) || errors.Is(err, syscall.ECONNRESET) || errors.Is(err, os.ErrClosed) {
		// The reader finds the end behind what was said before it.
		limit := time.NewTimer(endLimit)
		defer limit.Stop()
		select {
		case <-c.done:
		case <-limit.C:
			c.die(err)
		}
		return c.reason()
	}
	return errdefs.New(errdefs.Unavailable, "sandbox", "cannot reach its inside: %v", err).Wrap(err)
}

// limitError is for a call whose ctx ended. The kind given holds for a deadline.
func limitError(ctx context.Context, kind errdefs.Kind, what string) error {
	cause := context.Cause(ctx)
	if kind == errdefs.Deadline && errors.Is(ctx.Err(), context.Canceled) {
		kind = errdefs.Canceled
	}
	return errdefs.New(kind, "sandbox", "its inside did not answer in time: %s", what).Wrap(cause)
}

// ask sends a request whose one answer is found by its seq.
func (c *Channel) ask(ctx context.Context, m message, files []*os.File) (message, error) {
	answer := make(chan message, 1)
	var seq uint32
	err := c.send(ctx, m, files, func(s uint32) error {
		seq = s
		c.waiting[s] = answer
		return nil
	}, func() {
		delete(c.waiting, seq)
	})
	if err != nil {
		return message{}, err
	}
	forget := func() {
		c.mu.Lock()
		delete(c.waiting, seq)
		c.mu.Unlock()
	}
	late := func() {
		select {
		case got, ok := <-answer:
			if ok {
				got.drop()
			}
		default:
		}
	}
	select {
	case got, ok := <-answer:
		if !ok {
			return message{}, errdefs.New(errdefs.Unknown, "sandbox", "the answer was lost in a new greeting")
		}
		return got, nil
	case <-c.done:
		forget()
		select {
		case got, ok := <-answer: // it came before the end
			if ok {
				return got, nil
			}
		default:
		}
		return message{}, c.reason()
	case <-ctx.Done():
		forget()
		late()
		return message{}, limitError(ctx, errdefs.Unknown, "it was asked")
	}
}

// Prepare makes everything of a sandbox that does not depend on it, at most once and before Setup: what is left of Setup
// is short then. After an error sandsea-init is gone or going.
func (c *Channel) Prepare(ctx context.Context) error {
	m, err := c.ask(ctx, message{head: head{kind: kindPrepare}}, nil)
	switch {
	case err != nil:
		return err
	case m.kind == kindPrepared:
		return nil
	case m.kind == kindFailed:
		return m.setupError()
	}
	return c.distrust(m)
}

// Setup makes the sandbox; once, before everything else but Prepare. What is in force may be less than what was asked
// for: the caller must compare. After an error sandsea-init is gone or going.
func (c *Channel) Setup(ctx context.Context, s Setup) (chronus.InForce, error) {
	b, err := s.encode()
	if err != nil {
		return chronus.InForce{}, err
	}
	f, err := memfd.Sealed("sandsea-plan", b)
	if err != nil {
		return chronus.InForce{}, err
	}
	defer f.Close()
	files := []*os.File{f}
	if s.Root != nil {
		files = append(files, s.Root)
	}
	m, err := c.ask(ctx, message{head: head{kind: kindSetup}}, files)
	switch {
	case err != nil:
		return chronus.InForce{}, err
	case m.kind == kindReady:
		c.mu.Lock()
		c.terminals, c.shells = m.inForce().Terminals, m.inForce().Shells
		c.mu.Unlock()
		return m.inForce(), nil
	case m.kind == kindFailed:
		return chronus.InForce{}, m.setupError()
	}
	return chronus.InForce{}, c.distrust(m)
}

func (m *message) setupError() error {
	step, ok := setupSteps[m.step]
	if !ok {
		step = fmt.Sprintf("step %d", m.step)
	}
	e := &SetupError{Step: step, Errno: syscall.Errno(m.errno)}
	return errdefs.New(errdefs.FailedPrecondition, "sandbox", "cannot start: %v", e).
		WithHint("See whether the image has a plain directory (or nothing) at /proc, /dev and /sys, then: sandsea doctor").
		Wrap(e)
}

// distrust closes the line because of an answer of the wrong kind.
func (c *Channel) distrust(m message) error {
	c.die(fmt.Errorf("%w: answer of kind %d", errMessage, m.kind))
	return c.reason()
}

// Hello implements chronus.Channel. Exits in the list are also yielded by Exits unless they are acknowledged first.
func (c *Channel) Hello(ctx context.Context) (chronus.InForce, []chronus.Process, error) {
	g := &greeting{listed: map[int64]message{}, answer: make(chan greeted, 1)}
	err := c.send(ctx, message{head: head{kind: kindHello}}, nil, func(seq uint32) error {
		if c.hello != nil && !c.hello.given {
			return errdefs.New(errdefs.FailedPrecondition, "sandbox", "a greeting is under way")
		}
		g.seq = seq
		c.hello = g
		return nil
	}, func() {
		if c.hello == g {
			c.hello = nil
		}
	})
	if err != nil {
		return chronus.InForce{}, nil, err
	}
	select {
	case got := <-g.answer:
		return got.facts, got.list, nil
	case <-c.done:
		select {
		case got := <-g.answer: // it came before the end
			return got.facts, got.list, nil
		default:
		}
		return chronus.InForce{}, nil, c.reason()
	case <-ctx.Done():
		// The roster may still come, and is then taken for what it is.
		c.mu.Lock()
		g.given = true
		c.mu.Unlock()
		return chronus.InForce{}, nil, limitError(ctx, errdefs.Deadline, "it was greeted")
	}
}

// Spawn implements chronus.Channel.
func (c *Channel) Spawn(ctx context.Context, s chronus.Spawn, io chronus.Stdio) (int, error) {
	object := fmt.Sprintf("process %d", s.Number)
	switch {
	case s.Number <= 0:
		return 0, errdefs.New(errdefs.Invalid, object, "number is not positive").WithField("number", "")
	case len(s.Argv) == 0:
		return 0, errdefs.New(errdefs.Invalid, object, "no program").WithField("argv", "")
	case io.Cgroup == nil || io.In == nil || io.Out == nil:
		return 0, errdefs.New(errdefs.Internal, object, "cgroup, standard input or output is missing")
	}
	b, err := encodeSpec(s.IDs, s.Umask, s.Argv, s.Env, s.Cwd)
	if err != nil {
		return 0, err
	}
	f, err := memfd.Sealed("sandsea-spec", b)
	if err != nil {
		return 0, err
	}
	defer f.Close()
	m := message{head: head{kind: kindSpawn, cookie: s.Number}}
	files := []*os.File{f, io.Cgroup, io.In, io.Out}
	if io.Err != nil {
		m.flags |= spawnErr
		files = append(files, io.Err)
	}
	if io.TTY {
		if err := c.knowsTerminals(object); err != nil {
			return 0, err
		}
		m.flags |= spawnTTY
	}
	if io.StateIn != nil {
		if err := c.knowsShells(object); err != nil {
			return 0, err
		}
		m.flags |= spawnState
		files = append(files, io.StateIn, io.StateOut)
	}
	answer := make(chan message, 1)
	mine := false
	err = c.send(ctx, m, files, func(seq uint32) error {
		p := c.known[s.Number]
		if p == nil {
			p, mine = &process{}, true
			c.known[s.Number] = p
		}
		p.seq = seq
		p.waiters = append(p.waiters, answer)
		return nil
	}, func() {
		c.forgetLocked(s.Number, answer, mine)
	})
	if err != nil {
		return 0, err
	}
	select {
	case got, ok := <-answer:
		return c.spawned(got, ok)
	case <-c.done:
		select {
		case got, ok := <-answer:
			return c.spawned(got, ok)
		default:
		}
		return 0, c.reason()
	case <-ctx.Done():
		c.mu.Lock()
		c.forgetLocked(s.Number, answer, false)
		c.mu.Unlock()
		return 0, limitError(ctx, errdefs.Unknown, "it may start")
	}
}

// forgetLocked takes a waiter away, and with all the process, of which then nothing was asked.
func (c *Channel) forgetLocked(number int64, w chan message, all bool) {
	p := c.known[number]
	if p == nil {
		return
	}
	p.waiters = slices.DeleteFunc(p.waiters, func(x chan message) bool { return x == w })
	if all && p.state == 0 && len(p.waiters) == 0 {
		delete(c.known, number)
	}
}

func (c *Channel) spawned(m message, ok bool) (int, error) {
	switch {
	case !ok:
		return 0, errdefs.New(errdefs.Unknown, "sandbox", "the answer was lost in a new greeting")
	case m.kind == kindFailed:
		return 0, m.startError()
	}
	return int(m.pid), nil
}

// ServeFiles implements chronus.Channel. The socket is of type SOCK_SEQPACKET. Rights that cannot be taken show as its
// end.
func (c *Channel) ServeFiles(ctx context.Context, ids chronus.IDs) (*os.File, error) {
	b, err := encodeSpec(ids, 0o022, nil, nil, "")
	if err != nil {
		return nil, err
	}
	f, err := memfd.Sealed("sandsea-ids", b)
	if err != nil {
		return nil, err
	}
	defer f.Close()
	ours, theirs, err := scm.Socketpair()
	if err != nil {
		return nil, err
	}
	defer theirs.Close()
	m, err := c.ask(ctx, message{head: head{kind: kindServeFiles}}, []*os.File{f, theirs})
	switch {
	case err != nil:
	case m.kind == kindServing:
		return ours, nil
	case m.kind == kindFailed:
		err = m.startError()
	default:
		err = c.distrust(m)
	}
	ours.Close()
	return nil, err
}

// Signal implements chronus.Channel.
func (c *Channel) Signal(ctx context.Context, number int64, sig syscall.Signal) error {
	object := fmt.Sprintf("process %d", number)
	if sig < 0 || sig > 64 {
		return errdefs.New(errdefs.Invalid, object, "signal %d", int(sig)).WithField("signal", "64")
	}
	gone := errdefs.New(errdefs.NotFound, object, "has ended or never started").WithHint("List what runs: sandsea inspect")
	c.mu.Lock()
	p := c.known[number]
	ended := p == nil || p.state == stateExited
	dead := c.dead
	c.mu.Unlock()
	switch {
	case dead != nil:
		return dead
	case ended:
		return gone
	}
	m, err := c.ask(ctx, message{head: head{kind: kindSignal, cookie: number}, signal: int32(sig)}, nil)
	switch {
	case err != nil:
		return err
	case m.kind != kindSignalled || m.cookie != number:
		return c.distrust(m)
	case syscall.Errno(m.errno) == syscall.ESRCH:
		return gone
	case m.errno != 0:
		return fmt.Errorf("signal %s: %w", object, syscall.Errno(m.errno))
	}
	return nil
}

// Exits implements chronus.Channel.
func (c *Channel) Exits() iter.Seq2[chronus.Exit, error] {
	return func(yield func(chronus.Exit, error) bool) {
		for {
			c.mu.Lock()
			batch, dead := c.exits, c.dead
			c.exits = nil
			c.mu.Unlock()
			for i, e := range batch {
				if !yield(e, nil) {
					c.mu.Lock()
					c.exits = append(batch[i+1:], c.exits...)
					c.mu.Unlock()
					return
				}
			}
			if len(batch) > 0 {
				continue
			}
			if dead != nil {
				yield(chronus.Exit{}, dead)
				return
			}
			<-c.more
		}
	}
}

// Ack implements chronus.Channel.
func (c *Channel) Ack(number int64) error {
	object := fmt.Sprintf("process %d", number)
	ctx, stop := context.WithTimeoutCause(context.Background(), ackLimit, errAckLimit)
	defer stop()
	c.mu.Lock()
	p, dead := c.known[number], c.dead
	c.mu.Unlock()
	switch {
	case dead != nil:
		return dead
	case p == nil:
		return nil
	case p.state != stateExited:
		return errdefs.New(errdefs.FailedPrecondition, object, "has not ended")
	}
	return c.send(ctx, message{head: head{kind: kindAck, cookie: number}}, nil, func(uint32) error {
		delete(c.known, number)
		c.exits = slices.DeleteFunc(c.exits, func(e chronus.Exit) bool { return e.Number == number })
		c.acked = append(c.acked, number)
		if len(c.acked) > slots {
			c.acked = slices.Delete(c.acked, 0, slots/2)
		}
		return nil
	}, func() {
		c.known[number] = p
	})
}
