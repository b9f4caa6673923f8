package main

import (
	"context"
	"fmt"
	"io"
	"strings"
	"sync"
	"time"

	"github.com/spf13/cobra"

	sandseav1 "github.com/sandsea/sandsea/api/sandsea/v1"
	"github.com/sandsea/sandsea/client"
	"github.com/sandsea/sandsea/cmd/sandsea/ui"
)

func (a *app) logsCommand() *cobra.Command {
	var follow, raw bool
	var number int64
	cmd := &cobra.Command{
		Use: "logs ID", Short: "Show what the commands of a sandbox wrote", Args: cobra.ExactArgs(1),
		Example:           "  sandsea logs s7q3k2m5\n  sandsea logs -f --process 3 s7q3k2m5",
		ValidArgsFunction: a.completeIDs,
		RunE: func(cmd *cobra.Command, args []string) error {
			c, err := a.client()
			if err != nil {
				return err
			}
			id, err := c.Resolve(cmd.Context(), args[0])
			if err != nil {
				return err
			}
			l := logPrinter{a: a, sb: c.Sandbox(id), follow: follow, raw: raw || !a.io.OutTTY}
			return l.print(cmd.Context(), number)
		},
	}
	cmd.Flags().BoolVarP(&follow, "follow", "f", false, "wait for more, until the sandbox ends")
	cmd.Flags().BoolVar(&raw, "raw", false, "do not escape what a terminal would obey")
	cmd.Flags().Int64Var(&number, "process", 0, "one process only")
	return cmd
}

type logPrinter struct {
	a           *app
	sb          *client.Sandbox
	follow, raw bool
	mu          sync.Mutex // keeps pieces of output whole
}

// print shows every process once, in order, and with follow those that come later.
func (l *logPrinter) print(ctx context.Context, only int64) error {
	seen := int64(0)
	var running sync.WaitGroup
	defer running.Wait()
	for {
		procs, err := l.sb.Processes(ctx)
		if err != nil {
			return err
		}
		for _, p := range procs {
			if p.GetNumber() <= seen || (only > 0 && p.GetNumber() != only) {
				continue
			}
			seen = p.GetNumber()
			if l.follow && p.GetState() == sandseav1.ProcessState_PROCESS_STATE_RUNNING {
				running.Go(func() { _ = l.one(ctx, p) })
				continue
			}
			if err := l.one(ctx, p); err != nil {
				return err
			}
		}
		if !l.follow {
			return nil
		}
		if only > 0 && seen == only {
			return nil
		}
		info, err := l.sb.Info(ctx)
		if err != nil {
			return err
		}
		if end := info.GetEnd(); end != nil {
			running.Wait()
			l.a.io.Note("sandbox %s ended: %s", short(l.sb.ID), end.GetCause())
			return nil
		}
		select {
		case <-ctx.Done():
			return context.Cause(ctx)
		case <-time.After(500 * time.Millisecond):
		}
	}
}

// one shows a process's record.
func (l *logPrinter) one(ctx context.Context, p *sandseav1.Process) error {
	if l.a.io.OutTTY && !l.a.json {
		l.write(l.a.io.Err, fmt.Appendf(nil, "── [%d] %s (%s)\n", p.GetNumber(),
			ui.Text(strings.Join(p.GetCommand().GetArgv(), " ")), processWord(p)))
	}
	for ev, err := range l.sb.Attach(ctx, &sandseav1.AttachRequest{Number: p.GetNumber(), NoFollow: !l.follow}) {
		if err != nil {
			return err
		}
		if l.a.json {
			doc, err := document("sandsea.output/1", ev)
			if err != nil {
				return err
			}
			doc["number"] = p.GetNumber()
			if err := printJSON(l.a.io.Out, doc); err != nil {
				return err
			}
			continue
		}
		switch e := ev.GetEvent().(type) {
		case *sandseav1.ProcessEvent_Data:
			w := l.a.io.Out
			if e.Data.GetStream() == sandseav1.Stream_STREAM_STDERR {
				w = l.a.io.Err
			}
			if err := l.write(w, e.Data.GetData()); err != nil {
				return err
			}
		case *sandseav1.ProcessEvent_Gap:
			l.a.io.Note("── %s not kept (--output)", ui.LongSize(e.Gap.GetBytes()))
		}
	}
	return nil
}

// write passes bytes on, escaped line by line when a terminal would obey them; colours pass.
func (l *logPrinter) write(w io.Writer, b []byte) error {
	l.mu.Lock()
	defer l.mu.Unlock()
	if l.raw {
		_, err := w.Write(b)
		return err
	}
	for line := range strings.Lines(string(b)) {
		body, nl := strings.CutSuffix(line, "\n")
		out := escapeKeepingColours(body)
		if nl {
			out += "\n"
		}
		if _, err := io.WriteString(w, out); err != nil {
			return err
		}
	}
	return nil
}

// escapeKeepingColours escapes everything but tabs and complete colour sequences (ESC [ digits and ; m).
func escapeKeepingColours(s string) string {
	var b strings.Builder
	for len(s) > 0 {
		i := strings.IndexAny(s, "\x1b\t")
		if i < 0 {
			b.WriteString(ui.Text(s))
			break
		}
		b.WriteString(ui.Text(s[:i]))
		s = s[i:]
		if s[0] == '\t' {
			b.WriteByte('\t')
			s = s[1:]
			continue
		}
		n := colourLength(s)
		if n == 0 {
			b.WriteString(`\x1b`)
			s = s[1:]
			continue
		}
		b.WriteString(s[:n])
		s = s[n:]
	}
	return b.String()
}

func colourLength(s string) int {
	if len(s) < 3 || s[1] != '[' {
		return 0
	}
	for i := 2; i < min(len(s), 32); i++ {
		switch {
		case s[i] == 'm':
			return i + 1
		case s[i] != ';' && (s[i] < '0' || s[i] > '9'):
			return 0
		}
	}
	return 0
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
			for ev, err := range c.Watch(cmd.Context(), &sandseav1.WatchSandboxesRequest{Cursor: after, Labels: want}) {
				if err != nil {
					return err
				}
				if a.json {
					doc, err := document("sandsea.event/1", ev)
					if err != nil {
						return err
					}
					if err := printJSON(a.io.Out, doc); err != nil {
						return err
					}
					continue
				}
				if ev.GetGap() {
					a.io.Note("events were lost here: sandsea ls")
				}
				at := ev.GetAt().AsTime().Local()
				if utc {
					at = at.UTC()
				}
				detail := ""
				if end := ev.GetSandbox().GetEnd(); end != nil {
					detail = strings.TrimSuffix(end.GetCause()+": "+end.GetDetail(), ": ")
				}
				fmt.Fprintf(a.io.Out, "%s  %s  %-8s  %s\n", at.Format("15:04:05"), short(ev.GetSandbox().GetId()),
					ev.GetWhat(), ui.Text(detail))
			}
			return nil
		},
	}
	cmd.Flags().StringArrayVarP(&labels, "label", "l", nil, "only with this label, as k=v")
	cmd.Flags().StringVar(&after, "after", "", "continue behind this cursor")
	cmd.Flags().BoolVar(&utc, "utc", false, "times in UTC")
	return cmd
}
