package sessions

import (
	"context"
	"errors"
	"iter"
	"os"
	"time"

	"github.com/sandsea/sandsea/api/errdefs"
	"github.com/sandsea/sandsea/internal/chronus/follow"
	"github.com/sandsea/sandsea/internal/keeper"
	"github.com/sandsea/sandsea/internal/linux/sparse"
	"github.com/sandsea/sandsea/internal/record"
	"github.com/sandsea/sandsea/internal/sandbox"
)

const (
	// DefaultInline and MaxInline bound the output in the answer of a Run, per stream.
	DefaultInline = 8 << 20
	MaxInline     = 64 << 20

	chunk = 256 << 10
)

// Answer is what a Run gives.
type Answer struct {
	Number   int64
	Result   Result
	Replayed bool
	Stdout   follow.Inline
	Stderr   follow.Inline
	Shell    *ShellEnd // of a command of a shell session
}

// Event is one piece of a command's story. Exactly one of Started, Exited, Data and Gap is set.
type Event struct {
	Started  *Info
	Exited   *Info
	Replayed bool // with Started: the key stands for an earlier start
	Stream   record.Stream
	Offset   int64
	Data     []byte // the callee's until the next event
	Gap      int64
}

// Run starts a command and waits for its end; most bounds the output in the answer, 0 is DefaultInline. When ctx ends
// first and the command has no key, its whole tree is killed. A command that ended because its sandbox did is an error,
// Gone.
func (t *Table) Run(ctx context.Context, s Start, most int64) (Answer, error) {
	if most < 0 || most > MaxInline {
		return Answer{}, errdefs.New(errdefs.Invalid, "", "max_output_bytes: %d is not between 0 and 64 MiB", most).
			WithField("max_output_bytes", "64 MiB").WithHint("Use Start to stream more")
	}
	if most == 0 {
		most = DefaultInline
	}
	s.Op = "run"
	p, replayed, err := t.begin(ctx, s)
	if err != nil {
		return Answer{}, err
	}
	defer p.let() // once the answer is read
	if err := p.wait(ctx, p.done); err != nil {
		if ctx.Err() != nil {
			t.callerLeft(p, s.Key != "")
		}
		return Answer{}, err
	}
	r, lost := p.result()
	if lost {
		if gone := t.goneError(); gone != nil {
			return Answer{}, gone
		}
	}
	r.Truncated = false // that the record was cut says nothing of the answer
	a := Answer{Number: p.number, Result: r, Replayed: replayed, Shell: p.shellEnd()}
	for stream, in := range map[record.Stream]*follow.Inline{record.Stdout: &a.Stdout, record.Stderr: &a.Stderr} {
		*in, err = t.cfg.Follow.Inline(t.cfg.ID, p.number, stream, most, s.Command.Overflow.keep())
		if err != nil && !errors.Is(err, errdefs.NotFound) {
			return Answer{}, err
		}
		a.Result.Truncated = a.Result.Truncated || in.Gap > 0
		a.Result.Exceeded = a.Result.Exceeded || in.Gap > 0 && s.Command.Overflow == OverflowFail
		if s.Key != "" {
			t.pin(ctx, p, stream, *in)
		}
	}
	return a, nil
}

// pin keeps the range that an answer names, for as long as a child of the command writes on.
func (t *Table) pin(ctx context.Context, p *proc, s record.Stream, in follow.Inline) {
	pinner, ok := t.cfg.Keeper.(keeper.Pinner)
	if !ok || p.settled() {
		return
	}
	head, tail := in.Ranges()
	for _, r := range []record.Range{head, tail} {
		if r.To <= r.From {
			continue
		}
		if err := pinner.Pin(ctx, p.keeperKey(), s, r); err != nil {
			t.cfg.Log.Debug("pin an answer's output", "sandbox", t.cfg.ID, "process", p.number, "err", err)
			continue
		}
		p.mu.Lock()
		for _, o := range p.out {
			if o.stream == s {
				o.pins = append(o.pins, r)
			}
		}
		p.mu.Unlock()
	}
}

// callerLeft kills what nobody waits for any more.
func (t *Table) callerLeft(p *proc, keyed bool) {
	t.mu.Lock()
	leaving := t.leaving
	t.mu.Unlock()
	if keyed || leaving {
		return
	}
	if err := p.kill(); err != nil {
		t.cfg.Log.Warn("kill a command whose caller left", "sandbox", t.cfg.ID, "process", p.number, "err", err)
		return
	}
	timer := time.NewTimer(killWait)
	defer timer.Stop()
	select {
	case <-p.done:
	case <-timer.C:
	}
}

func (p *proc) result() (r Result, lost bool) {
	p.mu.Lock()
	defer p.mu.Unlock()
	if p.Result == nil {
		return Result{}, true
	}
	return *p.Result, p.Lost
}

// Launch starts a command and does not follow it: for entrypoints.
func (t *Table) Launch(ctx context.Context, s Start) (Info, error) {
	s.Op = "start"
	p, _, err := t.begin(ctx, s)
	if err != nil {
		return Info{}, err
	}
	p.let()
	return p.info(), nil
}

// Start starts a command and yields its story: started, output, exited. Detached, it ends after started. Otherwise,
// when the consumer or ctx stops before the end and there is no key, the command's whole tree is killed.
func (t *Table) Start(ctx context.Context, s Start, detached bool) iter.Seq2[Event, error] {
	return func(yield func(Event, error) bool) {
		s.Op = "start"
		if s.Lossless && detached {
			yield(Event{}, errdefs.New(errdefs.Invalid, "", "lossless: a detached command has no reader").
				WithField("lossless", "").WithHint("Use one of the two, and lossless again at Attach"))
			return
		}
		p, replayed, err := t.begin(ctx, s)
		if err != nil {
			yield(Event{}, err)
			return
		}
		whole := false
		defer func() {
			if !whole && !detached {
				t.callerLeft(p, s.Key != "")
			}
		}()
		at := From{Lossless: s.Lossless}
		readers := t.register(ctx, p, at)
		defer readers.leave()
		p.let() // a reader that is not lossless takes what there is
		info := p.info()
		if !yield(Event{Started: &info, Replayed: replayed}, nil) || detached {
			return
		}
		for e, err := range t.follow(ctx, p, at, readers) {
			whole = e.Exited != nil
			if !yield(e, err) {
				return
			}
		}
	}
}

// From is where a reader begins.
type From struct {
	Stdout, Stderr int64
	// NoFollow ends at the end of what is recorded instead of waiting.
	NoFollow bool
	// Lossless as in Start, from these offsets on.
	Lossless bool
}

func (at From) validate() error {
	for field, offset := range map[string]int64{"stdout_offset": at.Stdout, "stderr_offset": at.Stderr} {
		if offset < 0 {
			return errdefs.New(errdefs.Invalid, "", "%s: is below 0", field).WithField(field, "").
				WithHint("0 is the beginning")
		}
	}
	return nil
}

// Attach yields a command's record from byte offsets: output, then exited. It waits for more while the command runs,
// unless NoFollow. After the command's end it gives what is recorded by then; what a child of the command still writes
// can be read by attaching again.
func (t *Table) Attach(ctx context.Context, number int64, at From) iter.Seq2[Event, error] {
	return func(yield func(Event, error) bool) {
		p, err := t.find(number)
		if err == nil {
			err = p.wait(ctx, p.begun)
		}
		if err == nil {
			err = at.validate() // before it counts as a reader
		}
		if err != nil {
			yield(Event{}, err)
			return
		}
		readers := t.register(ctx, p, at)
		defer readers.leave()
		for e, err := range t.follow(ctx, p, at, readers) {
			if !yield(e, err) {
				return
			}
		}
	}
}

// piece is what a stream's goroutine hands over; the consumer answers on its turn when it is done with the data.
type piece struct {
	Event
	end bool
	err error
}

func (t *Table) follow(ctx context.Context, p *proc, at From, readers retained) iter.Seq2[Event, error] {
	return func(yield func(Event, error) bool) {
		ctx, cancel := context.WithCancelCause(ctx)
		defer cancel(nil)
		var until <-chan struct{} = p.done
		if at.NoFollow {
			until = nil
		}
		pieces := make(chan piece)
		turn := make(chan struct{})
		streams := 0
		var finished []chan struct{}
		defer func() {
			cancel(nil)
			for _, c := range finished {
				<-c
			}
		}()
		for s, from := range at.offsets() {
			r, err := t.cfg.Follow.Open(t.cfg.ID, p.number, s, from, until)
			if errors.Is(err, errdefs.NotFound) {
				continue // merged, or it never ran
			}
			if err != nil {
				yield(Event{}, err)
				return
			}
			streams++
			done := make(chan struct{})
			finished = append(finished, done)
			go func() {
				defer close(done)
				defer func() { _ = r.Close() }()
				pump(ctx, r, s, pieces, turn)
			}()
		}
		for streams > 0 {
			var e piece
			select {
			case e = <-pieces:
			case <-ctx.Done():
				yield(Event{}, canceled(ctx, p.object()))
				return
			}
			switch {
			case e.err != nil:
				if ctx.Err() != nil {
					e.err = canceled(ctx, p.object())
				}
				yield(Event{}, e.err)
				return
			case e.end:
				streams--
			case !yield(e.Event, nil):
				return
			default:
				readers.passed(ctx, e.Event)
				turn <- struct{}{}
			}
		}
		if at.NoFollow && !p.ended() {
			return
		}
		if err := p.wait(ctx, p.done); err != nil {
			yield(Event{}, err)
			return
		}
		info := p.info()
		yield(Event{Exited: &info}, nil)
	}
}

// pump reads one stream to its end, a piece at a time.
func pump(ctx context.Context, r *follow.Reader, s record.Stream, out chan<- piece, turn <-chan struct{}) {
	buf := make([]byte, chunk)
	for {
		x, err := r.Next(ctx, buf)
		e := piece{Event: Event{Stream: s, Offset: x.Offset, Data: x.Data, Gap: x.Gap}, end: x.End, err: err}
		select {
		case out <- e:
		case <-ctx.Done():
			return
		}
		if err != nil || x.End {
			return
		}
		select {
		case <-turn:
		case <-ctx.Done():
			return
		}
	}
}

// holes reports whether a record lacks bytes that were written.
func holes(path string, size int64) bool {
	f, err := os.Open(path)
	if err != nil {
		return false
	}
	defer f.Close()
	hole, ok, err := sparse.NextHole(int(f.Fd()), 0)
	return err == nil && ok && hole < size
}

// withSandbox reports whether a command that ended so ended because its sandbox did.
func (t *Table) withSandbox(r Result) bool {
	t.mu.Lock()
	defer t.mu.Unlock()
	return t.end != nil && t.end.Cause != sandbox.CauseCompleted && !r.TimedOut && !r.OOM &&
		(r.Signal == 9 || r.Signal == 15 || r.InfraError != "")
}
