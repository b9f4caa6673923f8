package client

import (
	"context"
	"errors"
	"fmt"
	"iter"
	"time"

	"github.com/sandsea/sandsea/api/errdefs"
	sandseav1 "github.com/sandsea/sandsea/api/sandsea/v1"
)

const (
	// A broken stream is taken up again within rejoinLimit of the break, or not at all.
	rejoinLimit = 30 * time.Second
	rejoinFirst = 50 * time.Millisecond
	rejoinLast  = time.Second
	killLimit   = 5 * time.Second
	// rejoinStable is how long a try must have held for a break to be a new one, though the stream was silent.
	rejoinStable = 10 * time.Second
)

// Follow is Start over connections that break: the stream is taken up again where it broke, so that every byte comes
// once, and cut, unless it is nil, is told of each break. The end is what the server says of the process; when the
// server cannot be reached again within 30 s, the last error comes instead. As with Start, leaving early ends a
// command without a key. The server may take a break for that and kill the command: such an end says nothing of it and
// comes as errdefs.Unknown. With a key the command outlives the break.
func (s *Sandbox) Follow(ctx context.Context, req *sandseav1.StartRequest, cut func(error),
) iter.Seq2[*sandseav1.ProcessEvent, error] {
	return func(yield func(*sandseav1.ProcessEvent, error) bool) {
		if req.GetDetached() {
			s.Start(ctx, req)(yield)
			return
		}
		f := &follower{
			s: s, cut: cut, rest: &sandseav1.AttachRequest{Lossless: req.GetLossless()}, leashed: req.GetKey() == "",
		}
		f.run(ctx, s.Start(ctx, req), yield)
		if f.rejoined && !f.over && f.leashed {
			// The server does not know this stream as the one whose end is the command's.
			kctx, stop := context.WithTimeoutCause(context.WithoutCancel(ctx), killLimit, errdefs.Deadline)
			defer stop()
			_ = s.Signal(kctx, f.rest.GetNumber(), sigKill, true)
		}
	}
}

const sigKill = 9

// Rejoin is Attach over connections that break, as Follow is Start.
func (s *Sandbox) Rejoin(ctx context.Context, req *sandseav1.AttachRequest, cut func(error),
) iter.Seq2[*sandseav1.ProcessEvent, error] {
	return func(yield func(*sandseav1.ProcessEvent, error) bool) {
		f := &follower{s: s, cut: cut, rest: &sandseav1.AttachRequest{
			Number: req.GetNumber(), StdoutOffset: req.GetStdoutOffset(), StderrOffset: req.GetStderrOffset(),
			Lossless: req.GetLossless(), NoFollow: req.GetNoFollow(),
		}}
		f.run(ctx, s.Attach(ctx, req), yield)
	}
}

// follower takes one process's story from several streams.
type follower struct {
	s   *Sandbox
	cut func(error)
	// rest asks for what has not come yet; its number is 0 until the process is known.
	rest     *sandseav1.AttachRequest
	leashed  bool // the server kills the process when its stream goes away
	rejoined bool
	over     bool // the end has come
}

func (f *follower) run(ctx context.Context, events iter.Seq2[*sandseav1.ProcessEvent, error],
	yield func(*sandseav1.ProcessEvent, error) bool,
) {
	wait, lost, tried := rejoinFirst, time.Time{}, time.Time{}
	for {
		var broken error
		for e, err := range events {
			if err != nil {
				broken = err
				break
			}
			wait, lost = rejoinFirst, time.Time{}
			f.saw(e)
			if f.leashed && f.rejoined && killed(e.GetExited().GetResult()) {
				yield(nil, errdefs.New(errdefs.Unknown, fmt.Sprintf("process %d", f.rest.GetNumber()),
					"the link to the server broke and the command was killed with it").
					WithHint("Run it again; with a key it outlives a broken link"))
				return
			}
			if !yield(e, nil) {
				return
			}
		}
		if broken == nil {
			return
		}
		if lost.IsZero() || time.Since(tried) > rejoinStable {
			lost = time.Now()
		}
		if f.rest.GetNumber() == 0 || !isCut(ctx, broken) || time.Since(lost) > rejoinLimit {
			yield(nil, broken)
			return
		}
		if f.cut != nil {
			f.cut(broken)
		}
		pause := time.NewTimer(wait)
		select {
		case <-pause.C:
		case <-ctx.Done():
			pause.Stop()
			yield(nil, broken)
			return
		}
		wait = min(2*wait, rejoinLast)
		f.rejoined, tried = true, time.Now()
		events = f.s.Attach(ctx, f.rest)
	}
}

// killed reports whether a process ended as it does when the server kills it because its caller is gone.
func killed(r *sandseav1.Result) bool {
	return r.GetSignal() == sigKill && !r.GetTimedOut() && !r.GetOom() && r.GetInfraError() == ""
}

// isCut reports whether a stream's error says nothing of its process. A server that goes away cancels its calls.
func isCut(ctx context.Context, err error) bool {
	return errors.Is(err, errdefs.Unavailable) || errors.Is(err, errdefs.Canceled) && ctx.Err() == nil
}

func (f *follower) saw(e *sandseav1.ProcessEvent) {
	pass := func(s sandseav1.Stream, to int64) {
		if s == sandseav1.Stream_STREAM_STDERR {
			f.rest.StderrOffset = to
		} else {
			f.rest.StdoutOffset = to
		}
	}
	switch e := e.GetEvent().(type) {
	case *sandseav1.ProcessEvent_Started:
		f.rest.Number = e.Started.GetNumber()
	case *sandseav1.ProcessEvent_Data:
		pass(e.Data.GetStream(), e.Data.GetOffset()+int64(len(e.Data.GetData())))
	case *sandseav1.ProcessEvent_Gap:
		pass(e.Gap.GetStream(), e.Gap.GetOffset()+e.Gap.GetBytes())
	case *sandseav1.ProcessEvent_Exited:
		f.over = true
	}
}

// told yields the events of a stream and makes one that ends in good order before its process does an error: the end of
// a process is what the server says, never what a connection does. open says that the stream ends so by itself.
func told[M interface {
	GetEvent() *sandseav1.ProcessEvent
}](stream iter.Seq2[M, error], open bool) iter.Seq2[*sandseav1.ProcessEvent, error] {
	return func(yield func(*sandseav1.ProcessEvent, error) bool) {
		ended := open
		for m, err := range stream {
			if err != nil {
				yield(nil, err)
				return
			}
			e := m.GetEvent()
			ended = ended || e.GetExited() != nil
			if !yield(e, nil) {
				return
			}
		}
		if !ended {
			yield(nil, errdefs.New(errdefs.Unavailable, "", "the stream ended before its process did").
				WithHint("Attach again: the process may well run"))
		}
	}
}
