package wire

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"os"
	"sync"
	"syscall"

	"github.com/sandsea/sandsea/api/errdefs"
	"github.com/sandsea/sandsea/internal/linux/scm"
)

// A message is JSON, sent as one or more frames: a byte that says whether more follow, then up to maxFrame bytes of it.
// Descriptors go with the last frame. A frame fits into the send buffer that every process has by default.
const (
	maxFrame   = 64 << 10
	maxMessage = 16 << 20

	frameLast = 0
	frameMore = 1
)

// kind says what a message asks for.
type kind string

const (
	kindHello     kind = "hello"
	kindSync      kind = "sync" // begins; the sandboxes follow in kindAdd, and kindSynced ends it
	kindAdd       kind = "add"
	kindSynced    kind = "synced"
	kindPut       kind = "put"
	kindDrop      kind = "drop"
	kindCounters  kind = "counters"
	kindCA        kind = "ca"
	kindDenials   kind = "denials"
	kindServices  kind = "services"
	kindUpstreams kind = "upstreams"
	kindUDP       kind = "udp" // the only one that Aether asks
)

// message is a call when Kind is set, else the answer to the call with the same Seq. It is what outgoing is when it comes.
type message struct {
	Seq   uint64          `json:"seq"`
	Kind  kind            `json:"kind,omitempty"`
	Body  json.RawMessage `json:"body,omitempty"`
	Error *failure        `json:"error,omitempty"`
}

// outgoing is a message before it is sent, so that its body is encoded once, with it.
type outgoing struct {
	Seq   uint64   `json:"seq"`
	Kind  kind     `json:"kind,omitempty"`
	Body  any      `json:"body,omitempty"`
	Error *failure `json:"error,omitempty"`
}

// failure is an error on the wire.
type failure struct {
	Kind   errdefs.Kind `json:"kind"`
	Object string       `json:"object,omitempty"`
	Msg    string       `json:"msg"`
	Hint   string       `json:"hint,omitempty"`
}

func failureOf(err error) *failure {
	e := errdefs.From(err)
	return &failure{Kind: e.Kind, Object: e.Object, Msg: e.Msg, Hint: e.Hint}
}

func (f *failure) err() error {
	e := errdefs.New(f.Kind, f.Object, "%s", f.Msg)
	e.Hint = f.Hint
	return e
}

// answerer serves one call. The file, if any, is closed when the answer has been sent.
type answerer func(k kind, body json.RawMessage) (answer any, file *os.File, err error)

// peer is one end: it makes calls and serves those of the other end, one after the other in the order of their coming.
type peer struct {
	conn   *scm.Conn
	answer answerer
	gone   chan struct{} // closed when the connection ended

	send sync.Mutex // held for all frames of one message

	mu      sync.Mutex
	seq     uint64                 // guarded by mu
	waiting map[uint64]chan result // guarded by mu: calls without an answer; nil after the end
	err     error                  // guarded by mu: why the connection ended
}

type result struct {
	message
	files []*os.File
}

func newPeer(conn *scm.Conn, answer answerer) *peer {
	return &peer{conn: conn, answer: answer, gone: make(chan struct{}), waiting: map[uint64]chan result{}}
}

// call asks and waits for the answer, which is decoded into out unless that is nil. files are the caller's.
func (p *peer) call(ctx context.Context, k kind, in, out any) (files []*os.File, err error) {
	ch := make(chan result, 1)
	p.mu.Lock()
	if p.waiting == nil {
		err := p.err
		p.mu.Unlock()
		return nil, unavailable(k, err)
	}
	p.seq++
	seq := p.seq
	p.waiting[seq] = ch
	p.mu.Unlock()
	if err := p.write(ctx, outgoing{Seq: seq, Kind: k, Body: in}, nil); err != nil {
		p.forget(seq, ch)
		if ctx.Err() != nil {
			return nil, fmt.Errorf("aether %s: %w", k, context.Cause(ctx))
		}
		return nil, err
	}
	var r result
	select {
	case r = <-ch:
	case <-ctx.Done():
		p.forget(seq, ch)
		return nil, fmt.Errorf("aether %s: %w", k, context.Cause(ctx))
	case <-p.gone:
		select {
		case r = <-ch: // it came before the end
		default:
			p.mu.Lock()
			err := p.err
			p.mu.Unlock()
			return nil, unavailable(k, err)
		}
	}
	if r.Error != nil {
		scm.CloseFiles(r.files)
		return nil, r.Error.err()
	}
	if out != nil {
		if err := json.Unmarshal(r.Body, out); err != nil {
			scm.CloseFiles(r.files)
			return nil, unavailable(k, err)
		}
	}
	return r.files, nil
}

// forget gives a call up: after that, either read has taken the entry and sent the answer, or nobody ever will.
func (p *peer) forget(seq uint64, ch chan result) {
	p.mu.Lock()
	_, mine := p.waiting[seq]
	delete(p.waiting, seq)
	p.mu.Unlock()
	if mine {
		return
	}
	select {
	case r := <-ch:
		scm.CloseFiles(r.files)
	default:
	}
}

func unavailable(k kind, err error) error {
	return errdefs.New(errdefs.Unavailable, "aether", "%s: %v", k, err).Wrap(err)
}

// write sends one message. A message that was begun and cannot be ended leaves nothing to go on from: the connection
// ends.
func (p *peer) write(ctx context.Context, m outgoing, file *os.File) error {
	b, err := json.Marshal(m)
	if err != nil {
		return fmt.Errorf("encode %s: %w", m.Kind, err)
	}
	if len(b) > maxMessage {
		return errdefs.New(errdefs.Invalid, "aether", "%s of %d bytes", m.Kind, len(b)).
			WithField("network", fmt.Sprintf("%d bytes", maxMessage)).WithHint("Use fewer rules, or wildcards")
	}
	p.send.Lock()
	defer p.send.Unlock()
	frame := make([]byte, 0, min(len(b), maxFrame)+1)
	for begun := false; ; begun = true {
		n := min(len(b), maxFrame)
		flag := byte(frameMore)
		var files []*os.File
		if n == len(b) {
			flag = frameLast
			if file != nil {
				files = []*os.File{file}
			}
		}
		frame = append(append(frame[:0], flag), b[:n]...)
		if err := p.conn.Send(ctx, frame, files...); err != nil {
			if begun || ctx.Err() == nil {
				_ = p.conn.Close()
			}
			return unavailable(m.Kind, err)
		}
		if b = b[n:]; flag == frameLast {
			return nil
		}
	}
}

// read receives one message.
func (p *peer) read(ctx context.Context, buf []byte) (result, error) {
	var whole []byte
	for {
		n, files, err := p.conn.Recv(ctx, buf)
		if err != nil {
			return result{}, err
		}
		flag, part := buf[0], buf[1:n]
		if flag > frameMore || flag == frameMore && len(files) > 0 || len(whole)+len(part) > maxMessage {
			scm.CloseFiles(files)
			return result{}, fmt.Errorf("frame %d of %d bytes after %d: %w", flag, n, len(whole), syscall.EBADMSG)
		}
		whole = append(whole, part...)
		if flag == frameMore {
			continue
		}
		r := result{files: files}
		if err := json.Unmarshal(whole, &r.message); err != nil {
			scm.CloseFiles(files)
			return result{}, fmt.Errorf("decode: %w", err)
		}
		return r, nil
	}
}

// serve reads until the connection ends, and says why it did: nil when either side closed it.
func (p *peer) serve(ctx context.Context) error {
	buf := make([]byte, maxFrame+1)
	calls := make(chan message, 64)
	var work sync.WaitGroup
	// Calls are served beside the reading, since serving one may take a call of our own.
	work.Go(func() {
		for m := range calls {
			p.answerTo(ctx, m)
		}
	})
	var err error
	for {
		var r result
		if r, err = p.read(ctx, buf); err != nil {
			break
		}
		if r.Kind != "" {
			scm.CloseFiles(r.files) // calls carry none
			calls <- r.message
			continue
		}
		p.mu.Lock()
		ch, ok := p.waiting[r.Seq]
		delete(p.waiting, r.Seq)
		if ok {
			ch <- r // has room for one; under mu, so that forget finds it
		}
		p.mu.Unlock()
		if !ok {
			scm.CloseFiles(r.files)
		}
	}
	p.mu.Lock()
	p.waiting, p.err = nil, err
	p.mu.Unlock()
	close(p.gone)
	_ = p.conn.Close()
	close(calls)
	work.Wait()
	if errors.Is(err, io.EOF) || errors.Is(err, os.ErrClosed) || ctx.Err() != nil {
		err = nil
	}
	return err
}

func (p *peer) answerTo(ctx context.Context, m message) {
	out := outgoing{Seq: m.Seq}
	answer, file, err := p.answer(m.Kind, m.Body)
	if file != nil {
		defer file.Close()
	}
	if err == nil {
		out.Body = answer
	} else {
		out.Error = failureOf(err)
	}
	if err := p.write(ctx, out, file); err != nil {
		_ = p.conn.Close() // the reader sees it
	}
}
