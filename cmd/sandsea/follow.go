package main

import (
	"context"
	"errors"
	"fmt"
	"io"
	"iter"
	"os"
	"sync/atomic"
	"syscall"
	"time"

	"github.com/sandsea/sandsea/api/errdefs"
	sandseav1 "github.com/sandsea/sandsea/api/sandsea/v1"
	"github.com/sandsea/sandsea/client"
	"github.com/sandsea/sandsea/cmd/sandsea/ui"
)

// jsonKeep bounds what --json keeps in memory of one stream.
const jsonKeep = 64 << 20

// outcome is what follow saw of a command.
type outcome struct {
	number atomic.Int64 // 0 until it has started
	result *sandseav1.Result
	// How much of each stream has been passed on, with what is not kept.
	offsets map[sandseav1.Stream]int64
	// watch, when set, sees every piece of output before it is passed on.
	watch func([]byte)
	// With --json the output is kept here, and cut says that it is not all there.
	stdout, stderr []byte
	cut            bool
	// gap is how much the record did not keep.
	gap int64
	// broke says that the link was lost while the command ran.
	broke bool
	// lossless is how the command was asked for: it waits for us, also over another link.
	lossless bool
	// end is of the sandbox, when that took the command with it and is known.
	end *sandseav1.End
}

// follow starts a command and passes its output on as it comes. A broken link is taken up again where it broke. Ctrl-C
// and SIGTERM go to the command once it runs.
func (a *app) follow(ctx context.Context, sb *client.Sandbox, req *sandseav1.StartRequest) (*outcome, error) {
	out := &outcome{lossless: req.GetLossless()}
	defer a.forwardSignals(ctx, sb, out)()
	defer a.tellGap(out)
	ctx, cancel := context.WithCancelCause(ctx)
	defer cancel(nil)
	err := unfed(ctx, a.passAll(ctx, sb, out, sb.Start(ctx, req), func(number int64) {
		if req.GetStdin() {
			go a.feed(ctx, cancel, sb, number, 0)
		}
	}))
	if err == nil && req.GetKey() == "" && out.killedWithLink() {
		err = errdefs.New(errdefs.Unknown, fmt.Sprintf("process %d", out.number.Load()),
			"the link to the server broke and the command was killed with it").
			WithHint("Run it again; with sandsea exec --key it outlives a broken link")
	}
	return out, err
}

// killedWithLink reports whether a command ended as one does that the server kills because its caller is gone: that says
// nothing of the command.
func (o *outcome) killedWithLink() bool {
	r := o.result
	return o.broke && r.GetSignal() == int32(syscall.SIGKILL) && !r.GetTimedOut() && !r.GetOom() && r.GetInfraError() == ""
}

// passAll passes a command's story on to its end; events is its beginning. began is called once its number is known.
func (a *app) passAll(ctx context.Context, sb *client.Sandbox, out *outcome, events iter.Seq2[*sandseav1.ProcessEvent, error],
	began func(number int64),
) error {
	if out.offsets == nil {
		out.offsets = map[sandseav1.Stream]int64{}
	}
	l := link{a: a}
	for {
		var broken error
		for ev, err := range events {
			if err != nil {
				broken = err
				break
			}
			l.works()
			if p := ev.GetStarted(); p != nil && out.number.Load() == 0 {
				began(p.GetNumber())
			}
			if err := a.take(out, ev); err != nil {
				return err
			}
		}
		if out.result != nil {
			return nil
		}
		if broken == nil {
			broken = errdefs.New(errdefs.Unavailable, "", "the stream ended early")
		}
		if out.number.Load() == 0 || !errors.Is(broken, errdefs.Unavailable) {
			return broken
		}
		out.broke = true
		for errors.Is(broken, errdefs.Unavailable) {
			if err := l.broke(ctx, broken); err != nil {
				return err
			}
			_, broken = sb.Info(ctx) // what is wrong with the sandbox itself, Attach tells better
		}
		if ctx.Err() != nil {
			return broken
		}
		l.answers()
		events = sb.Attach(ctx, out.rest())
	}
}

// rest asks for what has not been passed on.
func (o *outcome) rest() *sandseav1.AttachRequest {
	return &sandseav1.AttachRequest{
		Number: o.number.Load(), Lossless: o.lossless,
		StdoutOffset: o.offsets[sandseav1.Stream_STREAM_STDOUT], StderrOffset: o.offsets[sandseav1.Stream_STREAM_STDERR],
	}
}

// take notes one piece of a command's story and passes its output on.
func (a *app) take(out *outcome, ev *sandseav1.ProcessEvent) error {
	switch e := ev.GetEvent().(type) {
	case *sandseav1.ProcessEvent_Started:
		out.number.Store(e.Started.GetNumber())
	case *sandseav1.ProcessEvent_Data:
		if out.watch != nil {
			out.watch(e.Data.GetData())
		}
		out.offsets[e.Data.GetStream()] = e.Data.GetOffset() + int64(len(e.Data.GetData()))
		return a.passOn(out, e.Data)
	case *sandseav1.ProcessEvent_Gap:
		out.offsets[e.Gap.GetStream()] = e.Gap.GetOffset() + e.Gap.GetBytes()
		out.cut = true
		out.gap += e.Gap.GetBytes()
	case *sandseav1.ProcessEvent_Exited:
		out.number.Store(e.Exited.GetNumber())
		out.result = e.Exited.GetResult()
	}
	return nil
}

// tellGap says once how much output is missing; programs read it in the result.
func (a *app) tellGap(out *outcome) {
	if out.gap > 0 && !a.json {
		a.io.Note("sandsea: %s of output not kept. Keep more: --output SIZE where the sandbox is made", ui.LongSize(out.gap))
	}
}

// passOn writes output through, or keeps it for --json.
func (a *app) passOn(out *outcome, d *sandseav1.OutputData) error {
	w, kept := a.io.Out, &out.stdout
	if d.GetStream() == sandseav1.Stream_STREAM_STDERR {
		w, kept = a.io.Err, &out.stderr
	}
	if !a.json {
		if _, err := w.Write(d.GetData()); err != nil {
			return fmt.Errorf("write the command's output: %w", err)
		}
		return nil
	}
	room := max(0, jsonKeep-len(*kept))
	out.cut = out.cut || len(d.GetData()) > room
	*kept = append(*kept, d.GetData()[:min(room, len(d.GetData()))]...)
	return nil
}

// forwardSignals passes interrupts on to the command's tree; before it runs they are ours.
func (a *app) forwardSignals(ctx context.Context, sb *client.Sandbox, out *outcome) (stop func()) {
	take := func(sig os.Signal) bool {
		number, s := out.number.Load(), syscall.SIGINT
		if sig == syscall.SIGTERM {
			s = syscall.SIGTERM
		}
		if number > 0 {
			go func() {
				ctx, stop := context.WithTimeoutCause(ctx, 5*time.Second, errdefs.Deadline)
				defer stop()
				if err := sb.Signal(ctx, number, int(s), true); err != nil {
					a.io.Note("sandsea: the command did not get the signal: %s", ui.Text(err.Error()))
				}
			}()
		}
		return number > 0
	}
	a.onInterrupt.Store(&take)
	return func() { a.onInterrupt.Store(nil) }
}

// inputError ends a call whose input could not be read or sent: the command would wait for the rest for ever.
type inputError struct{ err error }

func (e *inputError) Error() string { return e.err.Error() }
func (e *inputError) Unwrap() error { return e.err }

// unfed is the error of a call, or what kept its input from the command.
func unfed(ctx context.Context, err error) error {
	if in, ok := errors.AsType[*inputError](context.Cause(ctx)); ok && err != nil {
		return in.err
	}
	return err
}

// feed passes standard input on, and ends the call when that fails.
func (a *app) feed(ctx context.Context, cancel context.CancelCauseFunc, sb *client.Sandbox, number, offset int64) {
	if err := a.sendInput(ctx, sb, number, offset); err != nil {
		cancel(&inputError{err})
	}
}

// sendInput passes standard input on until its end, or until the command does not read any more: its own end tells.
func (a *app) sendInput(ctx context.Context, sb *client.Sandbox, number, offset int64) error {
	buf := make([]byte, 64<<10)
	for {
		n, rerr := a.io.In.Read(buf)
		for sent := 0; sent < n; {
			var next int64
			err := untilItReads(ctx, func() (err error) {
				next, err = sb.SendInput(ctx, number, offset, buf[sent:n])
				return err
			})
			if err != nil {
				return ofInput(err)
			}
			sent, offset = sent+int(next-offset), next
		}
		if rerr != nil && !errors.Is(rerr, io.EOF) {
			return fmt.Errorf("standard input: %w", rerr)
		}
		if rerr != nil {
			return ofInput(untilItReads(ctx, func() error { return sb.CloseInput(ctx, number) }))
		}
	}
}

// untilItReads repeats a send, which does no harm: over a lost link or a server that goes away, of which follow tells and
// gives up in time, and when it was not taken within the limit of a call: a command reads when it likes.
func untilItReads(ctx context.Context, send func() error) error {
	for {
		err := send()
		switch errdefs.KindOf(err) {
		case errdefs.Unavailable, errdefs.Deadline, errdefs.Canceled:
			if pause(ctx, linkPause) == nil {
				continue
			}
		}
		return err
	}
}

// ofInput is nil for a command that takes no more input: its own end tells.
func ofInput(err error) error {
	if err == nil || errors.Is(err, errdefs.FailedPrecondition) {
		return nil
	}
	return fmt.Errorf("send standard input: %w", err)
}

const (
	linkPause = 200 * time.Millisecond
	linkLimit = time.Minute
	// linkStable is how long a try must have held for a break to be a new one, though the stream was silent.
	linkStable = 10 * time.Second
)

// link is the connection of a long stream, which may break and come back.
type link struct {
	a     *app
	lost  time.Time // zero while it works
	tried time.Time // when broke last let a try begin
	known bool      // the loss was told
	back  bool      // and that it is over
}

// works says that the link is back, if it was lost.
func (l *link) works() {
	l.answers()
	l.lost, l.known, l.back = time.Time{}, false, false
}

// answers says that the link is back while the stream has nothing to tell yet.
func (l *link) answers() {
	if !l.lost.IsZero() && !l.back {
		l.a.io.Note("sandsea: link lost, back in %s", ui.Took(time.Since(l.lost)))
		l.back = true
	}
}

// broke waits before the next try. It returns the error when there is none to be: another kind, too late, interrupted.
func (l *link) broke(ctx context.Context, err error) error {
	if !errors.Is(err, errdefs.Unavailable) {
		return err
	}
	if l.lost.IsZero() || time.Since(l.tried) > linkStable {
		l.lost, l.known, l.back = time.Now(), false, false
	}
	switch lost := time.Since(l.lost); {
	case lost > linkLimit:
		return err
	case lost > time.Second && !l.known:
		l.a.io.Note("sandsea: link lost, trying again, limit %s", ui.Span(linkLimit))
		l.known = true
	}
	err = pause(ctx, linkPause)
	l.tried = time.Now()
	return err
}
