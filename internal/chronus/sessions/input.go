package sessions

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"os"
	"sync"
	"syscall"
	"time"

	"github.com/sandsea/sandsea/api/errdefs"
	"github.com/sandsea/sandsea/internal/linux/pipe"
)

// input is the write end of a command's standard input. One send at a time.
type input struct {
	turn chan struct{} // capacity 1: held by the send in progress

	mu      sync.Mutex
	f       *os.File // guarded by mu: nil once closed
	next    int64    // guarded by mu: offset of the next byte
	unknown bool     // guarded by mu: a send was in flight when an edge died
	grown   bool     // guarded by mu: the pipe has been made large
}

// growAt is from what size on a send makes the pipe large.
const growAt = 64 << 10

// sent is what is remembered of an input: up to where it was taken, and what was being sent.
type sent struct {
	Next    int64 `json:"next"`
	Sending int64 `json:"sending,omitempty"` // bytes from Next on that a send in progress may have written
}

func newInput(f *os.File) *input { return &input{turn: make(chan struct{}, 1), f: f} }

// recoverInput takes over what the keeper held. It still is a descriptor that can be waited on: that is a property of
// the open pipe. What was on its way to a terminal counts as typed: a person sees what arrived, and must be able to go on.
func recoverInput(f *os.File, p *proc) *input {
	in := newInput(f)
	in.next = p.Sent.Next
	if p.Input == inputTerminal {
		in.next += p.Sent.Sending
		return in
	}
	in.unknown = p.Sent.Sending > 0
	return in
}

func (in *input) isClosed() bool {
	in.mu.Lock()
	defer in.mu.Unlock()
	return in.f == nil
}

// holder is the descriptor for a keeper; nil once closed.
func (in *input) holder() *os.File {
	in.mu.Lock()
	defer in.mu.Unlock()
	return in.f
}

func (in *input) close() {
	in.mu.Lock()
	f := in.f
	in.f = nil
	in.mu.Unlock()
	if f != nil {
		_ = f.Close() // frees a send in progress, which then says how far it came
	}
}

// write writes all of data, or returns how much went through and why not more. It waits while the pipe is full.
func (in *input) write(ctx context.Context, data []byte) (int, error) {
	in.mu.Lock()
	f, grow := in.f, !in.grown && len(data) > growAt
	in.grown = in.grown || grow
	in.mu.Unlock()
	if f == nil {
		return 0, os.ErrClosed
	}
	if conn, err := f.SyscallConn(); grow && err == nil {
		// Left small it is slower and nothing else.
		_ = conn.Control(func(fd uintptr) { _, _ = pipe.Grow(int(fd), pipe.MaxSize) })
	}
	cut := make(chan struct{})
	stop := context.AfterFunc(ctx, func() {
		defer close(cut)
		_ = f.SetWriteDeadline(time.Unix(1, 0))
	})
	n, err := f.Write(data)
	if !stop() {
		<-cut // else it might come after ours, and no later send would get through
		_ = f.SetWriteDeadline(time.Time{})
	}
	in.mu.Lock()
	in.next += int64(n)
	in.mu.Unlock()
	return n, err
}

// SendInput writes to a command's standard input at an offset and returns where the next byte goes. Bytes that were
// taken before are dropped; a hole is Invalid. It waits while the pipe is full. When the outcome of a send was lost
// with an edge, every further one is Unknown; not to a terminal, where those bytes count as taken.
func (t *Table) SendInput(ctx context.Context, number, offset int64, data []byte) (int64, error) {
	p, err := t.find(number)
	if err != nil {
		return 0, err
	}
	if err := p.wait(ctx, p.begun); err != nil {
		return 0, err
	}
	p.mu.Lock()
	in, stream, over := p.input, p.Input == inputStream || p.Input == inputTerminal, p.hungUpLocked()
	p.mu.Unlock()
	if in == nil || !stream {
		return 0, p.inputClosed()
	}
	select {
	case in.turn <- struct{}{}:
		defer func() { <-in.turn }()
	case <-ctx.Done():
		return 0, canceled(ctx, p.object())
	}
	in.mu.Lock()
	next, unknown, open := in.next, in.unknown, in.f != nil && !over
	in.mu.Unlock()
	switch {
	case unknown:
		return 0, errdefs.New(errdefs.Unknown, p.object(), "a send was in flight when the node's daemon restarted").
			WithHint("How much arrived cannot be told. Start the command again if it matters")
	case offset < 0 || offset > next:
		return next, errdefs.New(errdefs.Invalid, p.object(), "input at offset %d, but the next byte is %d", offset, next).
			WithField("offset", "").WithHint("Send what is missing first")
	case offset+int64(len(data)) <= next:
		return next, nil
	case !open:
		return next, p.inputClosed()
	}
	data = data[next-offset:]
	if err := p.saveInput(sent{Next: next, Sending: int64(len(data))}); err != nil {
		return next, err
	}
	n, werr := in.write(ctx, data)
	next += int64(n)
	if err := p.saveInput(sent{Next: next}); err != nil {
		return next, err
	}
	switch {
	case werr == nil:
		return next, nil
	case errors.Is(werr, os.ErrDeadlineExceeded):
		return next, canceled(ctx, p.object())
	case errors.Is(werr, syscall.EPIPE), errors.Is(werr, os.ErrClosed), errors.Is(werr, syscall.EIO):
		// EIO is a terminal's that nobody has open any more.
		return next, p.inputClosed()
	}
	return next, fmt.Errorf("write to the input of %s: %w", p.object(), werr)
}

// inputClosed says why nothing more can be sent.
func (p *proc) inputClosed() error {
	if gone := p.t.goneError(); gone != nil {
		return gone
	}
	what, hint := "its input is closed", "Send before you close it, or before the command closes it itself"
	switch {
	case p.Input != inputStream && p.Input != inputTerminal:
		what, hint = "it was started without an input to send to", "Start it with stdin to send input"
	case p.ended():
		what, hint = "it has ended", "Its output and its result can still be read"
	}
	return errdefs.New(errdefs.FailedPrecondition, p.object(), "%s", what).WithHint("%s", hint)
}

func (p *proc) saveInput(s sent) error {
	data, err := json.Marshal(s)
	if err != nil {
		return fmt.Errorf("encode the input of %s: %w", p.object(), err)
	}
	if err := p.t.cfg.Memory.Save(p.inputName(), data); err != nil {
		return fmt.Errorf("remember the input of %s: %w", p.object(), err)
	}
	return nil
}

// CloseInput gives a command the end of its input. Idempotent. Refused for a terminal.
func (t *Table) CloseInput(ctx context.Context, number int64) error {
	p, err := t.find(number)
	if err != nil {
		return err
	}
	if err := p.wait(ctx, p.begun); err != nil {
		return err
	}
	if err := p.refuseEndOfInput(); err != nil {
		return err
	}
	if gone := t.goneError(); gone != nil {
		return gone
	}
	t.closeInput(p)
	return nil
}
