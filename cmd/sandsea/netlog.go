package main

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"io"
	"iter"
	"net"
	"slices"
	"strconv"
	"strings"
	"sync"
	"time"

	"github.com/charmbracelet/x/ansi"
	"github.com/spf13/cobra"
	"golang.org/x/sync/errgroup"

	"github.com/sandsea/sandsea/api/errdefs"
	sandseav1 "github.com/sandsea/sandsea/api/sandsea/v1"
	"github.com/sandsea/sandsea/client"
	"github.com/sandsea/sandsea/cmd/sandsea/ui"
	"github.com/sandsea/sandsea/internal/policy"
)

func (a *app) netLogCommand() *cobra.Command {
	var follow, denied, utc bool
	var labels []string
	after := int64(-1)
	cmd := &cobra.Command{
		Use: "log ID… | -l k=v", Short: "Show what left sandboxes, and what was denied",
		Long: `A line for each DNS question, connection and file of a package service: time, sandbox, phase, verdict, what it was, and
which rule denied it or where it came from. Of several sandboxes the lines are in the order of time. The log keeps the
newest 64 MiB of a sandbox; equal events within ten seconds are one line.`,
		Example: `  sandsea net log s7q3k2m5
  sandsea net log -f --denied -l job=eval-12
  sandsea net log --json s7q3k2m5 | jq -r 'select(.denied).name'
  sandsea net log --json --after 41 s7q3k2m5`,
		ValidArgsFunction: a.completeIDs,
		RunE: func(cmd *cobra.Command, args []string) error {
			want, err := pairs("label", labels)
			switch {
			case err != nil:
				return err
			case (len(args) > 0) == (len(labels) > 0):
				return usage(cmd, "net log: name sandboxes, or say -l k=v")
			case cmd.Flags().Changed("after") && (after < 0 || len(args) != 1):
				return usage(cmd, "--after %d: takes one sandbox, and the seq of an event of its", after)
			}
			c, err := a.client()
			if err != nil {
				return err
			}
			p := newFlowPrinter(a, time.Local)
			p.c, p.denied = c, denied
			if utc {
				p.zone = time.UTC
			}
			ids, err := p.ids(cmd.Context(), args, want)
			if err != nil {
				return err
			}
			p.single = len(ids) == 1
			if len(ids) > mostFlowLogs {
				return errdefs.New(errdefs.Exhausted, "", "net log: %d sandboxes, %d at once", len(ids), mostFlowLogs).
					WithField("label", fmt.Sprint(mostFlowLogs)).WithHint("Choose fewer: -l k=v")
			}
			next, err := p.past(cmd.Context(), ids, after+1)
			if err != nil {
				return err
			}
			if p.single && !p.printed && !a.json {
				if err := p.tellClosed(cmd.Context(), ids[0]); err != nil {
					return err
				}
			}
			if !follow {
				return nil
			}
			return p.follow(cmd.Context(), next)
		},
	}
	cmd.Flags().BoolVarP(&follow, "follow", "f", false, "wait for more, until the sandboxes end")
	cmd.Flags().BoolVar(&denied, "denied", false, "only what was denied")
	cmd.Flags().StringArrayVarP(&labels, "label", "l", nil, "those with this label, as k=v")
	cmd.Flags().Int64Var(&after, "after", -1, "continue behind the event with this seq")
	cmd.Flags().Lookup("after").DefValue = "0" // which help does not show
	cmd.Flags().BoolVar(&utc, "utc", false, "times in UTC")
	return cmd
}

// mostFlowLogs is how many logs are read at once.
const mostFlowLogs = 256

// flowPrinter prints events of flow logs.
type flowPrinter struct {
	a      *app
	c      *client.Client
	denied bool
	zone   *time.Location
	single bool // of one sandbox only

	mu      sync.Mutex
	printed bool   // some event; guarded by mu
	wide    [2]int // what the columns that vary took so far; guarded by mu
}

func newFlowPrinter(a *app, zone *time.Location) *flowPrinter {
	return &flowPrinter{a: a, zone: zone, wide: [2]int{leastKind, 0}}
}

// ids are the sandboxes that were named, or chosen by labels.
func (p *flowPrinter) ids(ctx context.Context, args []string, labels map[string]string) (ids []string, err error) {
	for _, arg := range args {
		id, err := p.a.resolve(ctx, p.c, arg)
		if err != nil {
			return nil, err
		}
		if !slices.Contains(ids, id) {
			ids = append(ids, id)
		}
	}
	if len(args) > 0 {
		return ids, nil
	}
	for sb, err := range p.c.List(ctx, &sandseav1.ListSandboxesRequest{Labels: labels}) {
		if err != nil {
			return nil, err
		}
		ids = append(ids, sb.GetId())
	}
	if len(ids) == 0 {
		p.a.io.Note("No sandboxes with these labels.")
	}
	return ids, nil
}

// events are those of one log that are there, one by one. Where some are gone it says so. next gets where to go on.
func (p *flowPrinter) events(ctx context.Context, id string, from int64, follow bool, next *int64) iter.Seq2[*sandseav1.NetworkEvent, error] {
	return func(yield func(*sandseav1.NetworkEvent, error) bool) {
		*next = from
		req := &sandseav1.NetworkLogRequest{FromSeq: from, Follow: follow, Denied: p.denied}
		for m, err := range p.c.Sandbox(id).Log(ctx, req) {
			if err != nil {
				yield(nil, err)
				return
			}
			if n := m.GetMissing(); n > 0 {
				what := ui.Count(n) + " events are"
				if n == 1 {
					what = "one event is"
				}
				p.a.io.Note("%s %s: %s gone", p.a.io.Dash(), short(id), what)
			}
			for _, e := range m.GetEvents() {
				if !yield(e, nil) {
					return
				}
				*next = max(*next, e.GetSeq()+1)
			}
			*next = max(*next, m.GetNextSeq())
		}
	}
}

// source is a log that is being merged with others.
type source struct {
	id   string
	head *sandseav1.NetworkEvent // nil: at its end
	pull func() (*sandseav1.NetworkEvent, error, bool)
}

func (s *source) step() (err error) {
	e, err, ok := s.pull()
	if s.head = e; !ok {
		s.head = nil
	}
	return err
}

// past prints what is there, in the order of time, and gives where each log goes on.
func (p *flowPrinter) past(ctx context.Context, ids []string, from int64) (next map[string]*int64, err error) {
	next = map[string]*int64{}
	var sources []*source
	for _, id := range ids {
		next[id] = new(int64)
		pull, stop := iter.Pull2(p.events(ctx, id, from, false, next[id]))
		defer stop()
		s := &source{id: id, pull: pull}
		if err := s.step(); err != nil {
			return nil, err
		}
		sources = append(sources, s)
	}
	for {
		var first *source
		for _, s := range sources {
			if s.head != nil && (first == nil || s.head.GetAt().AsTime().Before(first.head.GetAt().AsTime())) {
				first = s
			}
		}
		if first == nil {
			return next, nil
		}
		if err := p.print(first.id, first.head); err != nil {
			return nil, err
		}
		if err := first.step(); err != nil {
			return nil, err
		}
	}
}

// follow prints what comes, until the sandboxes have ended.
func (p *flowPrinter) follow(ctx context.Context, next map[string]*int64) error {
	group, ctx := errgroup.WithContext(ctx)
	for id, from := range next {
		group.Go(func() error { return p.followOne(ctx, id, *from) })
	}
	return group.Wait()
}

// followOne follows one log over connections that break.
func (p *flowPrinter) followOne(ctx context.Context, id string, from int64) error {
	l := link{a: p.a}
	for {
		var broken error
		for e, err := range p.events(ctx, id, from, true, &from) {
			if err != nil {
				broken = err
				break
			}
			l.works()
			if err := p.print(id, e); err != nil {
				return err
			}
		}
		if broken == nil {
			return p.tellEnd(ctx, id)
		}
		if errors.Is(broken, errdefs.NotFound) { // it ended, and is forgotten
			return nil
		}
		if err := l.broke(ctx, broken); err != nil {
			return err
		}
	}
}

// tellClosed says of a log without events that there can be none, where that is so.
func (p *flowPrinter) tellClosed(ctx context.Context, id string) error {
	info, err := p.c.Sandbox(id).Info(ctx)
	if err != nil {
		return err
	}
	if info.GetEnd() == nil && closed(info.GetSpec().GetNetwork()) {
		p.a.io.Note("sandbox %s has its loopback only, so nothing is asked or denied. Let something out: sandsea net set %s --allow pypi",
			short(id), short(id))
	}
	return nil
}

// tellEnd says why a log that was followed ended.
func (p *flowPrinter) tellEnd(ctx context.Context, id string) error {
	info, err := p.c.Sandbox(id).Info(ctx)
	if err != nil && !errors.Is(err, errdefs.NotFound) {
		return err
	}
	if end := info.GetEnd(); end != nil {
		p.a.io.Note("sandbox %s ended: %s", short(id), ui.Text(endWord(end)))
	}
	return nil
}

// print prints one event.
func (p *flowPrinter) print(id string, e *sandseav1.NetworkEvent) error {
	p.mu.Lock()
	defer p.mu.Unlock()
	p.printed = true
	if p.a.json {
		return printJSON(p.a.io.Out, flowDocument(id, e))
	}
	_, err := io.WriteString(p.a.io.Out, p.lineLocked(id, e)+"\n")
	return err
}

// flowDocument is an event for programs.
func flowDocument(id string, e *sandseav1.NetworkEvent) object {
	doc := document("sandsea.flow/1", e)
	return slices.Insert(doc, 1, member{"sandbox", id})
}

// What varying columns take at least, and at most before they push the rest of their line.
const (
	leastKind = 4
	mostKind  = 8
	mostName  = 32
)

// lineLocked is an event for people. On a narrow terminal the phase goes first, then the id, the time, and then the middle
// of the name.
func (p *flowPrinter) lineLocked(id string, e *sandseav1.NetworkEvent) string {
	s := p.a.io
	verdict, color := verdictWord(e)
	kind, name, rest := ui.Text(kindWord(e)), ui.Text(targetWord(e)), ui.Text(strings.Join(factWords(e), "  "))
	full := !s.OutTTY
	if !full {
		id = short(id)
	}
	showPhase, showID, showTime := full || s.Width >= 80, full || s.Width >= 72 || s.Width >= 60 && !p.single, full || s.Width >= 60
	var b strings.Builder
	if showTime {
		b.WriteString(e.GetAt().AsTime().In(p.zone).Format("15:04:05") + "  ")
	}
	if showID {
		b.WriteString(id + "  ")
	}
	if showPhase {
		fmt.Fprintf(&b, "%-5s  ", ui.Text(orDash(e.GetPhase())))
	}
	b.WriteString(s.Paint(color, verdict) + strings.Repeat(" ", 5-len(verdict)) + "  ")
	b.WriteString(p.padLocked(0, kind, mostKind) + "  ")
	left := s.Width - ansi.StringWidth(b.String())
	switch {
	case full:
		b.WriteString(p.padLocked(1, name, mostName) + "  " + rest)
	case left >= ansi.StringWidth(name)+2+ansi.StringWidth(rest):
		b.WriteString(ansi.Truncate(p.padLocked(1, name, mostName), left-2-ansi.StringWidth(rest), "") + "  " + rest)
	default:
		name = s.Middle(name, max(leastName, left-2-ansi.StringWidth(rest)))
		b.WriteString(ansi.Truncate(name+"  "+rest, left, s.Plain("…")))
	}
	return strings.TrimRight(b.String(), " ")
}

// leastName is what is left of a name at least.
const leastName = 15

func orDash(s string) string {
	if s == "" {
		return "-"
	}
	return s
}

// padLocked fills a column to what its widest cell took so far.
func (p *flowPrinter) padLocked(column int, text string, most int) string {
	n := ansi.StringWidth(text)
	p.wide[column] = max(p.wide[column], min(n, most))
	return text + strings.Repeat(" ", max(0, p.wide[column]-n))
}

// ruleTells reports whether of what was denied the rule says why. It does not where nothing is known of what was asked
// for, nor where a rule allowed it and something else was wrong, as a secret that its host may not have.
func ruleTells(e *sandseav1.NetworkEvent) bool {
	if !e.GetDenied() || e.GetName()+e.GetAddress() == "" {
		return false
	}
	if e.GetKind() != sandseav1.NetworkEventKind_NETWORK_EVENT_KIND_CONNECTION {
		return true
	}
	rule := e.GetRule()
	return ruleWord(rule) == rule || strings.HasPrefix(rule, policy.RuleDeny+" ") || strings.HasPrefix(e.GetError(), "rule "+rule+" ")
}

func verdictWord(e *sandseav1.NetworkEvent) (word, color string) {
	switch {
	case e.GetKind() == sandseav1.NetworkEventKind_NETWORK_EVENT_KIND_UNSPECIFIED:
		return "NOTE", ""
	case e.GetKind() == sandseav1.NetworkEventKind_NETWORK_EVENT_KIND_POLICY:
		return "SET", ""
	case e.GetDenied():
		return "DENY", ui.Red
	}
	return "ALLOW", ui.Green
}

// kindWord is what an event is about: a package service or a protocol.
func kindWord(e *sandseav1.NetworkEvent) string {
	service, _, _ := strings.Cut(e.GetService(), ":")
	switch e.GetKind() {
	case sandseav1.NetworkEventKind_NETWORK_EVENT_KIND_POLICY:
		return "policy"
	case sandseav1.NetworkEventKind_NETWORK_EVENT_KIND_DNS:
		return "dns"
	case sandseav1.NetworkEventKind_NETWORK_EVENT_KIND_UNSPECIFIED:
		return "log"
	}
	if e.GetKind() == sandseav1.NetworkEventKind_NETWORK_EVENT_KIND_CONNECTION && e.GetProtocol() != "" {
		return e.GetProtocol()
	}
	return orDash(cmp.Or(service, e.GetProtocol()))
}

// targetWord is what was asked for.
func targetWord(e *sandseav1.NetworkEvent) string {
	switch e.GetKind() {
	case sandseav1.NetworkEventKind_NETWORK_EVENT_KIND_POLICY:
		return "phase " + orDash(e.GetPhase())
	case sandseav1.NetworkEventKind_NETWORK_EVENT_KIND_UNSPECIFIED:
		return e.GetError()
	case sandseav1.NetworkEventKind_NETWORK_EVENT_KIND_CONNECTION:
		if host := e.GetName(); host != "" || e.GetAddress() != "" {
			if host == "" {
				host = e.GetAddress()
			}
			if e.GetPort() == 0 {
				return host
			}
			return net.JoinHostPort(host, strconv.Itoa(int(e.GetPort())))
		}
	}
	if e.GetVersion() != "" {
		return e.GetName() + " " + e.GetVersion()
	}
	return orDash(e.GetName())
}

// factWords are what else there is to say.
func factWords(e *sandseav1.NetworkEvent) (words []string) {
	kind := e.GetKind()
	switch {
	case e.GetDenied():
		words = append(words, orDash(ruleWord(e.GetRule())))
	case kind == sandseav1.NetworkEventKind_NETWORK_EVENT_KIND_POLICY:
		words = append(words, "in force")
	default:
		if n := e.GetSentBytes() + e.GetReceivedBytes(); kind == sandseav1.NetworkEventKind_NETWORK_EVENT_KIND_CONNECTION && n > 0 {
			words = append(words, ui.LongSize(n))
		} else if e.GetReceivedBytes() > 0 {
			words = append(words, ui.LongSize(e.GetReceivedBytes()))
		}
		if e.GetSource() != "" {
			words = append(words, e.GetSource())
		}
		if kind == sandseav1.NetworkEventKind_NETWORK_EVENT_KIND_CONNECTION && e.GetDurationUs() > 0 {
			words = append(words, ui.Took(time.Duration(e.GetDurationUs())*time.Microsecond))
		}
	}
	if e.GetCount() > 1 {
		words = append(words, ui.Count(e.GetCount())+" times")
	}
	if e.GetError() != "" && kind != sandseav1.NetworkEventKind_NETWORK_EVENT_KIND_UNSPECIFIED && !ruleTells(e) {
		words = append(words, e.GetError())
	}
	return words
}
