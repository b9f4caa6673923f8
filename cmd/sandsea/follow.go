package main

import (
	"context"
	"errors"
	"fmt"
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
	// With --json the output is kept here, and cut says that it is not all there.
	stdout, stderr []byte
	cut            bool
}

// follow starts a command and passes its output on as it comes. A broken link is taken up again where it broke. Ctrl-C
// and SIGTERM go to the command once it runs.
func (a *app) follow(ctx context.Context, sb *client.Sandbox, req *sandseav1.StartRequest) (*outcome, error) {
	out := &outcome{}
	offsets := map[sandseav1.Stream]int64{}
	defer a.forwardSignals(ctx, sb, out)()

	events := sb.Start(ctx, req)
	l := link{a: a}
	for {
		var broken error
		for ev, err := range events {
			if err != nil {
				broken = err
				break
			}
			l.works()
			if p := ev.GetStarted(); p != nil && req.GetStdin() && out.number.Load() == 0 {
				go a.sendInput(ctx, sb, p.GetNumber())
			}
			if err := a.take(out, offsets, ev); err != nil {
				return nil, err
			}
		}
		if out.result != nil {
			return out, nil
		}
		if broken == nil {
			broken = errdefs.New(errdefs.Unavailable, "", "the stream ended early")
		}
		if out.number.Load() == 0 {
			return nil, broken
		}
		if err := l.broke(ctx, broken); err != nil {
			return nil, err
		}
		events = sb.Attach(ctx, &sandseav1.AttachRequest{
			Number:       out.number.Load(),
			StdoutOffset: offsets[sandseav1.Stream_STREAM_STDOUT], StderrOffset: offsets[sandseav1.Stream_STREAM_STDERR],
		})
	}
}

// take notes one piece of a command's story and passes its output on.
func (a *app) take(out *outcome, offsets map[sandseav1.Stream]int64, ev *sandseav1.ProcessEvent) error {
	switch e := ev.GetEvent().(type) {
	case *sandseav1.ProcessEvent_Started:
		out.number.Store(e.Started.GetNumber())
	case *sandseav1.ProcessEvent_Data:
		offsets[e.Data.GetStream()] = e.Data.GetOffset() + int64(len(e.Data.GetData()))
		return a.passOn(out, e.Data)
	case *sandseav1.ProcessEvent_Gap:
		offsets[e.Gap.GetStream()] = e.Gap.GetOffset() + e.Gap.GetBytes()
		out.cut = true
		if !a.json {
			a.io.Note("sandsea: %s of output not kept (--output)", ui.LongSize(e.Gap.GetBytes()))
		}
	case *sandseav1.ProcessEvent_Exited:
		out.number.Store(e.Exited.GetNumber())
		out.result = e.Exited.GetResult()
	}
	return nil
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

// sendInput passes standard input on until its end, or until the command does not read any more: its own end tells.
func (a *app) sendInput(ctx context.Context, sb *client.Sandbox, number int64) {
	var offset int64
	buf := make([]byte, 64<<10)
	for {
		n, err := a.io.In.Read(buf)
		for sent := 0; sent < n; {
			next, serr := sb.SendInput(ctx, number, offset, buf[sent:n])
			if errors.Is(serr, errdefs.Unavailable) && pause(ctx, linkPause) == nil {
				continue // follow says that the link is lost, and gives up in time
			}
			if serr != nil {
				return
			}
			sent, offset = sent+int(next-offset), next
		}
		if err != nil {
			_ = sb.CloseInput(ctx, number)
			return
		}
	}
}

const (
	linkPause = 200 * time.Millisecond
	linkLimit = time.Minute
)

// link is the connection of a long stream, which may break and come back.
type link struct {
	a     *app
	lost  time.Time // zero while it works
	known bool      // the loss was told
}

// works says that the link is back, if it was lost.
func (l *link) works() {
	if !l.lost.IsZero() {
		l.a.io.Note("sandsea: link lost, back in %s", ui.Took(time.Since(l.lost)))
	}
	l.lost, l.known = time.Time{}, false
}

// broke waits before the next try. It returns the error when there is none to be: another kind, too late, interrupted.
func (l *link) broke(ctx context.Context, err error) error {
	if !errors.Is(err, errdefs.Unavailable) {
		return err
	}
	if l.lost.IsZero() {
		l.lost = time.Now()
	}
	switch lost := time.Since(l.lost); {
	case lost > linkLimit:
		return err
	case lost > time.Second && !l.known:
		l.a.io.Note("sandsea: link lost, trying again, limit %s", ui.Span(linkLimit))
		l.known = true
	}
	return pause(ctx, linkPause)
}
