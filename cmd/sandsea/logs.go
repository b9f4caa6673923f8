package main

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"io"
	"strings"
	"sync"
	"time"

	"github.com/spf13/cobra"
	"golang.org/x/sync/errgroup"

	"github.com/sandsea/sandsea/api/errdefs"
	sandseav1 "github.com/sandsea/sandsea/api/sandsea/v1"
	"github.com/sandsea/sandsea/client"
	"github.com/sandsea/sandsea/cmd/sandsea/ui"
)

func (a *app) logsCommand() *cobra.Command {
	var follow, raw bool
	var number int64
	cmd := &cobra.Command{
		Use: "logs ID", Short: "Show what the commands of a sandbox wrote", Args: cobra.ExactArgs(1),
		Long: `Output as it was written, standard error on standard error. On a terminal each command gets a heading, colours pass, and
whatever else a terminal would obey is escaped; pipes get the bytes.`,
		Example:           "  sandsea logs s7q3k2m5\n  sandsea logs -f --process 3 s7q3k2m5",
		ValidArgsFunction: a.completeID,
		RunE: func(cmd *cobra.Command, args []string) error {
			sb, err := a.sandbox(cmd.Context(), args[0])
			if err != nil {
				return err
			}
			l := logPrinter{a: a, sb: sb, only: number, follow: follow, raw: raw}
			return l.print(cmd.Context())
		},
	}
	cmd.Flags().BoolVarP(&follow, "follow", "f", false, "wait for more, until the sandbox ends")
	cmd.Flags().BoolVar(&raw, "raw", false, "do not escape what a terminal would obey")
	cmd.Flags().Int64Var(&number, "process", 0, "one process only")
	return cmd
}

// logPoll is how often a followed sandbox is asked for new commands.
const logPoll = 500 * time.Millisecond

type logPrinter struct {
	a           *app
	sb          *client.Sandbox
	only        int64 // this process alone, or 0
	follow, raw bool
	seen        int64      // the last process that was begun
	mu          sync.Mutex // keeps pieces of output whole
}

// print shows every process once, in order, and with follow those that come later, until the sandbox ends.
func (l *logPrinter) print(ctx context.Context) error {
	if !l.follow {
		return l.all(ctx, func(p *sandseav1.Process) error { return l.one(ctx, p) })
	}
	group, gctx := errgroup.WithContext(ctx)
	begin := func(p *sandseav1.Process) error {
		if p.GetState() != sandseav1.ProcessState_PROCESS_STATE_RUNNING {
			return l.one(gctx, p)
		}
		group.Go(func() error { return l.one(gctx, p) })
		return nil
	}
	group.Go(func() error {
		for {
			end, err := l.ended(gctx)
			if err == nil {
				err = l.all(gctx, begin)
			}
			if end != nil || err != nil || l.only > 0 && l.seen == l.only {
				return err
			}
			if err := pause(gctx, logPoll); err != nil {
				return err
			}
		}
	})
	failed := group.Wait()
	end, err := l.ended(ctx)
	if end == nil {
		return cmp.Or(failed, err)
	}
	// Whatever broke, broke because the sandbox is no more.
	l.a.io.Note("sandbox %s ended: %s", short(l.sb.ID), ui.Text(endWord(end)))
	return l.a.io.OutError()
}

// all hands the processes that have not been seen to f.
func (l *logPrinter) all(ctx context.Context, f func(*sandseav1.Process) error) error {
	procs, err := l.sb.Processes(ctx)
	if err != nil {
		return err
	}
	for _, p := range procs {
		if p.GetNumber() <= l.seen || l.only > 0 && p.GetNumber() != l.only {
			continue
		}
		l.seen = p.GetNumber()
		if err := f(p); err != nil {
			return err
		}
	}
	if l.only > 0 && l.seen != l.only && !l.follow {
		return errdefs.New(errdefs.NotFound, fmt.Sprintf("process %d", l.only), "none in sandbox %s", short(l.sb.ID)).
			WithHint("All: sandsea inspect %s", short(l.sb.ID))
	}
	return nil
}

// ended is how the sandbox ended, nil while it lives.
func (l *logPrinter) ended(ctx context.Context) (*sandseav1.End, error) {
	info, err := l.sb.Info(ctx)
	return info.GetEnd(), err
}

// endWord is a cause with its detail.
func endWord(end *sandseav1.End) string {
	return strings.TrimSuffix(end.GetCause()+": "+end.GetDetail(), ": ")
}

// one shows a process's record.
func (l *logPrinter) one(ctx context.Context, p *sandseav1.Process) error {
	if l.a.io.OutTTY && !l.a.json {
		l.a.io.Note("%s [%d] %s (%s)", l.a.io.Dash(), p.GetNumber(), l.a.io.Short(commandWord(p)), ui.Text(processWord(p, l.a.now())))
	}
	out, errs := l.writer(l.a.io.Out), l.writer(l.a.io.Err)
	for ev, err := range l.sb.Attach(ctx, &sandseav1.AttachRequest{Number: p.GetNumber(), NoFollow: !l.follow}) {
		if err != nil {
			return err
		}
		if l.a.json {
			if err := l.printPiece(p.GetNumber(), ev); err != nil {
				return err
			}
			continue
		}
		w := out
		if ev.GetData().GetStream() == sandseav1.Stream_STREAM_STDERR {
			w = errs
		}
		if err := l.write(w, ev.GetData().GetData()); err != nil {
			return err
		}
		if gap := ev.GetGap(); gap != nil {
			l.a.io.Note("%s %s not kept (--output)", l.a.io.Dash(), ui.LongSize(gap.GetBytes()))
		}
	}
	return errors.Join(out.Close(), errs.Close())
}

// writer escapes when a terminal would obey the output.
func (l *logPrinter) writer(w io.Writer) *ui.Escaper {
	return &ui.Escaper{W: w, Raw: l.raw || !l.a.io.OutTTY}
}

func (l *logPrinter) write(w io.Writer, b []byte) error {
	l.mu.Lock()
	defer l.mu.Unlock()
	_, err := w.Write(b)
	return err
}

// printPiece is one piece of a record for programs.
func (l *logPrinter) printPiece(number int64, ev *sandseav1.ProcessEvent) error {
	doc := object{{"schema", "sandsea.output/1"}, {"number", number}}
	stream := func(s sandseav1.Stream) string { return enumWord(s.Descriptor(), s.Number()) }
	switch e := ev.GetEvent().(type) {
	case *sandseav1.ProcessEvent_Data:
		doc = append(doc, object{{"event", "data"}, {"stream", stream(e.Data.GetStream())}, {"offset", e.Data.GetOffset()}}...)
		doc.setBytes("data", e.Data.GetData())
	case *sandseav1.ProcessEvent_Gap:
		doc = append(doc, object{{"event", "gap"}, {"stream", stream(e.Gap.GetStream())}, {"offset", e.Gap.GetOffset()}, {"bytes", e.Gap.GetBytes()}}...)
	case *sandseav1.ProcessEvent_Exited:
		doc = append(doc, object{{"event", "exited"}, {"result", members(e.Exited.GetResult().ProtoReflect())}}...)
	default:
		return nil
	}
	l.mu.Lock()
	defer l.mu.Unlock()
	return printJSON(l.a.io.Out, doc)
}

func (a *app) eventsCommand() *cobra.Command {
	var labels []string
	var after string
	var utc bool
	cmd := &cobra.Command{
		Use: "events", Short: "Follow state changes of sandboxes", Args: cobra.NoArgs,
		Example: "  sandsea events\n  sandsea events --json --after CURSOR",
		RunE: func(cmd *cobra.Command, _ []string) error {
			want, err := pairs("label", labels)
			if err != nil {
				return err
			}
			c, err := a.client()
			if err != nil {
				return err
			}
			zone := time.Local
			if utc {
				zone = time.UTC
			}
			return a.followEvents(cmd.Context(), c, &sandseav1.WatchSandboxesRequest{Cursor: after, Labels: want}, zone)
		},
	}
	cmd.Flags().StringArrayVarP(&labels, "label", "l", nil, "only with this label, as k=v")
	cmd.Flags().StringVar(&after, "after", "", "continue behind this cursor")
	cmd.Flags().BoolVar(&utc, "utc", false, "times in UTC")
	return cmd
}

// followEvents prints events until ctx ends. A broken link goes on behind the last cursor.
func (a *app) followEvents(ctx context.Context, c *client.Client, req *sandseav1.WatchSandboxesRequest, zone *time.Location) error {
	l := link{a: a}
	for {
		var broken error
		for ev, err := range c.Watch(ctx, req) {
			if err != nil {
				broken = err
				break
			}
			l.works()
			req.Cursor = ev.GetCursor()
			if err := a.printEvent(ev, zone); err != nil {
				return err
			}
		}
		if broken == nil {
			broken = errdefs.New(errdefs.Unavailable, "", "the stream ended")
		}
		if req.GetCursor() == "" {
			return broken
		}
		if err := l.broke(ctx, broken); err != nil {
			return err
		}
	}
}

func (a *app) printEvent(ev *sandseav1.WatchSandboxesResponse, zone *time.Location) error {
	if a.json {
		return printJSON(a.io.Out, document("sandsea.event/1", ev))
	}
	if ev.GetGap() {
		a.io.Note("events were lost here: sandsea ls")
	}
	if ev.GetSandbox() == nil {
		return nil
	}
	detail := ""
	if end := ev.GetSandbox().GetEnd(); end != nil {
		detail = endWord(end)
	}
	line := fmt.Sprintf("%s  %s  %-8s  %s", ev.GetAt().AsTime().In(zone).Format("15:04:05"), short(ev.GetSandbox().GetId()),
		ui.Text(ev.GetWhat()), ui.Text(detail))
	_, err := fmt.Fprintln(a.io.Out, strings.TrimRight(line, " "))
	return err
}
