package files

import (
	"context"
	"errors"
	"fmt"
	"os"
	"slices"
	"sync"
	"syscall"
	"time"

	"github.com/sandsea/sandsea/api/errdefs"
	"github.com/sandsea/sandsea/internal/linux/scm"
)

// inFlight is how many requests may wait for one helper.
const inFlight = 64

var (
	// errGone: the helper had ended before it got the request.
	errGone = errors.New("the file helper has ended")
	// errLost: the helper ended, or was given up, before it answered.
	errLost = errors.New("the file helper ended before it answered")
	// errStalled: the helper did not answer in time.
	errStalled = errors.New("the file helper does not answer")
)

// errNoRoom says that the helper did what it was asked, and this process could not take the descriptor. It is no fault of
// the sandbox, as Exhausted would be.
func errNoRoom() error {
	return errdefs.New(errdefs.Unavailable, "", "the node's daemon cannot hold more open files now").
		WithHint("Try again once other calls on this node have ended")
}

// reply is an answer with its descriptor. The data is its own.
type reply struct {
	answer
	file *os.File
	err  error
}

type pendingCall struct {
	cookie uint64
	op     op
	done   chan reply // of room for one
	// given up by its caller; guarded by conn.mu
	abandoned bool
}

// conn is the line to one helper. Requests are answered in their order.
type conn struct {
	sock  *scm.Conn
	stall time.Duration
	slots chan struct{} // one for each request in flight
	turn  chan struct{} // held while one request is queued and sent
	ended chan struct{} // closed when no answer can come any more
	wg    sync.WaitGroup

	mu      sync.Mutex
	pending []*pendingCall // guarded by mu; the order of sending
	next    uint64         // guarded by mu
	broken  error          // guarded by mu
}

// newConn takes the socket over.
func newConn(f *os.File, stall time.Duration) (*conn, error) {
	sock, err := scm.New(f)
	if err != nil {
		return nil, fmt.Errorf("line to the file helper: %w", err)
	}
	c := &conn{
		sock: sock, stall: stall,
		slots: make(chan struct{}, inFlight), turn: make(chan struct{}, 1), ended: make(chan struct{}),
	}
	c.wg.Go(c.receive)
	return c, nil
}

// close ends the helper, once it is done with what it does, and waits for the goroutines.
func (c *conn) close() {
	c.fail(errLost)
	c.wg.Wait()
}

func (c *conn) dead() bool {
	c.mu.Lock()
	defer c.mu.Unlock()
	return c.broken != nil
}

// fail gives the line up. The first reason stays.
func (c *conn) fail(reason error) {
	c.mu.Lock()
	if c.broken != nil {
		c.mu.Unlock()
		return
	}
	c.broken = reason
	calls := c.pending
	c.pending = nil
	c.mu.Unlock()
	close(c.ended)
	_ = c.sock.Close()
	for _, call := range calls {
		call.done <- reply{err: reason}
	}
}

// roundTrip sends one request and waits for its answer. sent reports whether the helper may have got it.
func (c *conn) roundTrip(ctx context.Context, r request) (rep reply, sent bool, err error) {
	limit := time.NewTimer(c.stall)
	defer limit.Stop()
	for _, sem := range []chan struct{}{c.slots, c.turn} {
		select {
		case sem <- struct{}{}:
		case <-ctx.Done():
			if sem == c.turn {
				<-c.slots
			}
			return reply{}, false, context.Cause(ctx)
		case <-c.ended:
			if sem == c.turn {
				<-c.slots
			}
			return reply{}, false, errGone
		case <-limit.C:
			c.fail(errStalled)
			if sem == c.turn {
				<-c.slots
			}
			return reply{}, false, errStalled
		}
	}
	call, err := c.post(ctx, r)
	<-c.turn
	if err != nil {
		<-c.slots
		return reply{}, false, err
	}
	select {
	case rep = <-call.done:
	case <-ctx.Done():
		if rep, sent = c.abandon(call); !sent {
			return reply{}, true, context.Cause(ctx)
		}
	case <-limit.C:
		c.fail(errStalled)
		rep = <-call.done
	}
	<-c.slots
	return rep, true, rep.err
}

// post queues and sends. The turn is the caller's.
func (c *conn) post(ctx context.Context, r request) (*pendingCall, error) {
	c.mu.Lock()
	if c.broken != nil {
		defer c.mu.Unlock()
		return nil, errGone
	}
	c.next++
	call := &pendingCall{cookie: c.next, op: r.op, done: make(chan reply, 1)}
	c.pending = append(c.pending, call)
	c.mu.Unlock()

	// What is full stays full while the sandbox is frozen.
	ctx, stop := context.WithTimeoutCause(ctx, c.stall, errStalled)
	defer stop()
	err := c.sock.Send(ctx, r.encode(call.cookie))
	if err == nil {
		return call, nil
	}
	c.mu.Lock()
	c.pending = slices.DeleteFunc(c.pending, func(p *pendingCall) bool { return p == call })
	c.mu.Unlock()
	if cause := context.Cause(ctx); cause != nil {
		if errors.Is(cause, errStalled) {
			c.fail(errStalled)
		}
		return nil, cause
	}
	if errors.Is(err, syscall.EPIPE) || errors.Is(err, syscall.ECONNRESET) {
		// What it answered before its end is still read, and then the end.
		select {
		case <-c.ended:
		case <-ctx.Done():
		}
	}
	c.fail(errLost) // the others' requests were sent
	return nil, errGone
}

// abandon gives a call up. If its answer is there already, it is returned.
func (c *conn) abandon(call *pendingCall) (reply, bool) {
	c.mu.Lock()
	defer c.mu.Unlock()
	select {
	case rep := <-call.done:
		return rep, true
	default:
		call.abandoned = true
		return reply{}, false
	}
}

// receive hands answers out until the line breaks.
func (c *conn) receive() {
	buf := make([]byte, answerSize+wireDataMax)
	for {
		n, got, err := c.sock.Recv(context.Background(), buf)
		// That this process can hold no more descriptors is not the helper's fault: who asked for one gets none.
		cut := errors.Is(err, scm.ErrTruncated) && n > 0
		if errors.Is(err, scm.ErrTruncated) && !cut {
			c.fail(fmt.Errorf("the file helper broke the rules: %w", err))
			return
		}
		if err != nil && !cut {
			c.fail(errLost)
			return
		}
		if err := c.deliver(buf[:n], got, cut); err != nil {
			for _, f := range got {
				_ = f.Close()
			}
			c.fail(fmt.Errorf("the file helper broke the rules: %w", err))
			return
		}
	}
}

// deliver checks a message and gives it to its call, which is the oldest. cut: its descriptors could not be taken. On an
// error the files stay the caller's.
func (c *conn) deliver(msg []byte, got []*os.File, cut bool) error {
	a, err := decodeAnswer(msg)
	if err != nil {
		return err
	}
	c.mu.Lock()
	defer c.mu.Unlock()
	if len(c.pending) == 0 {
		return errors.New("answer without a request")
	}
	call := c.pending[0]
	if a.cookie != call.cookie || a.op != call.op {
		return fmt.Errorf("answer %d to request %d", a.cookie, call.cookie)
	}
	rep := reply{answer: a}
	rep.data = slices.Clone(a.data)
	wanted := a.errno == 0 && (a.op == opOpen || a.op == opCreate || a.op == opWatch)
	switch {
	case wanted && cut:
		rep.err = errNoRoom()
	case cut:
		return errors.New("answer with descriptors")
	case wanted && len(got) != 1, !wanted && len(got) != 0:
		return fmt.Errorf("answer with %d descriptors", len(got))
	case wanted && a.op == opWatch:
		rep.file = got[0] // looked at by who reads it
	case wanted:
		// The helper may hand out anything that its user can open.
		info, err := got[0].Stat()
		if err != nil {
			return err
		}
		if !info.Mode().IsRegular() {
			return fmt.Errorf("descriptor of mode %v", info.Mode())
		}
		rep.file = got[0]
	}
	if (a.op == opCreate || a.op == opDir || a.op == opWatch) && (a.errno == 0) != (a.handle != 0) {
		return errors.New("answer with the wrong kind of handle")
	}
	c.pending = c.pending[1:]
	if call.abandoned {
		<-c.slots
		if rep.file != nil {
			_ = rep.file.Close()
		}
	} else {
		call.done <- rep
		if rep.err == nil {
			return nil
		}
	}
	if a.handle != 0 && c.broken == nil {
		c.wg.Go(func() { c.forget(a.handle) })
	}
	return nil
}

// forget closes a handle that nobody needs any more. What cannot be closed goes with its helper.
func (c *conn) forget(handle uint32) {
	ctx, stop := context.WithTimeoutCause(context.Background(), c.stall, errStalled)
	defer stop()
	if rep, _, err := c.roundTrip(ctx, request{op: opClose, handle: handle}); err != nil || rep.errno != 0 {
		c.fail(errLost)
	}
}
