package main

import (
	"context"
	"fmt"
	"strings"

	"github.com/spf13/cobra"

	sandseav1 "github.com/sandsea/sandsea/api/sandsea/v1"
	"github.com/sandsea/sandsea/client"
	"github.com/sandsea/sandsea/cmd/sandsea/ui"
)

func (a *app) netTopCommand() *cobra.Command {
	t := topFlags{view: netView}
	cmd := &cobra.Command{
		Use: "top", Short: "Show what sandboxes send and receive, live", Args: cobra.NoArgs,
		Long: `FLOWS are connections open now, DENY/s what is rejected, LAST what was asked for last. Looking does not count as use.
Keys: / filters, s sorts by the next column, enter inspects, x stops, q leaves. In a pipe: one table.`,
		Example: "  sandsea net top\n  sandsea net top -l job=eval-12\n  sandsea net top --json | jq '.sandboxes[0]'",
		RunE:    func(cmd *cobra.Command, _ []string) error { return a.top(cmd, t) },
	}
	t.register(cmd)
	return cmd
}

// netView shows the network.
var netView = topTable{
	columns: []ui.Column{
		{Name: "ID"},
		{Name: "PHASE", Drop: 4},
		{Name: "POLICY", Drop: 5},
		{Name: "FLOWS", Right: true, Drop: 1},
		{Name: "OUT/s", Right: true},
		{Name: "IN/s", Right: true},
		{Name: "DENY/s", Right: true},
		{Name: "LAST", Cut: true, Drop: 6},
	},
	sorts: []string{"NET/s", "DENY/s", "FLOWS", "AGE"},
	cells: func(v rowView, r topRow) []ui.Cell {
		denied, color := rateWord(r.denied), ""
		if r.denied > 0 {
			color = ui.Red
		}
		return []ui.Cell{
			{Text: v.id(r)},
			{Text: ui.Text(phaseWord(r.sb))},
			{Text: ui.Text(netWord(r.sb))},
			{Text: fmt.Sprint(r.sb.GetUsage().GetNetFlows())},
			{Text: ui.Size(int64(r.sent))},
			{Text: ui.Size(int64(r.received))},
			{Text: denied, Color: color},
			{Text: orDash(v.io.Short(r.last))},
		}
	},
	head: (*look).netLine,
	document: func(r topRow) object {
		u := r.sb.GetUsage()
		return object{
			{"id", r.sb.GetId()},
			{"node", r.sb.GetNode()},
			{"phase", phaseWord(r.sb)},
			{"flows", u.GetNetFlows()},
			{"sent_bytes_per_s", int64(r.sent)},
			{"received_bytes_per_s", int64(r.received)},
			{"denied_per_s", r.denied},
			{"sent_bytes", u.GetNetSentBytes()},
			{"received_bytes", u.GetNetReceivedBytes()},
			{"denied", u.GetNetDenied()},
			{"last", r.last},
		}
	},
	schema: "sandsea.net_top/1",
	asks:   (*sampler).lastFlow,
}

// rateWord is a rate that may be below one.
func rateWord(v float64) string {
	if v > 0 && v < 10 {
		return fmt.Sprintf("%.1f", v)
	}
	return fmt.Sprintf("%.0f", v)
}

// netLine sums up the traffic of a node's sandboxes.
func (l *look) netLine(n *sandseav1.Node) string {
	var sent, received, denied float64
	var flows, count int64
	for _, r := range l.rows {
		if r.sb.GetNode() == n.GetName() {
			sent, received, denied = sent+r.sent, received+r.received, denied+r.denied
			flows, count = flows+r.sb.GetUsage().GetNetFlows(), count+1
		}
	}
	return fmt.Sprintf("%s  out %s/s  in %s/s  denied %s/s   %s flows   %d running", ui.Text(n.GetName()), ui.Size(int64(sent)),
		ui.Size(int64(received)), rateWord(denied), ui.Count(flows), count)
}

// lastFlow finds what a sandbox asked for last. Only one with traffic since the last look is asked.
func (s *sampler) lastFlow(ctx context.Context, sb *sandseav1.Sandbox, before reading) (string, int64) {
	u := sb.GetUsage()
	quiet := u.GetNetSentBytes() == before.sent && u.GetNetReceivedBytes() == before.received && u.GetNetDenied() == before.denied
	if quiet && (before.at.IsZero() || before.seq > 0 || u.GetNetFlows() == 0) {
		return before.last, before.seq
	}
	last, next := newestFlow(ctx, s.c.Sandbox(sb.GetId()), before.seq)
	if last == nil {
		return before.last, next
	}
	return flowWord(last), next
}

// flowWord is an event in a few words.
func flowWord(e *sandseav1.NetworkEvent) string {
	word := kindWord(e) + " " + targetWord(e)
	if e.GetDenied() {
		word += " denied"
	}
	return strings.TrimSpace(word)
}

// newestFlow is the newest event of a log from a number on, and the number behind it. A log that goes on for long is not
// read to its end: its end is searched for.
func newestFlow(ctx context.Context, sb *client.Sandbox, from int64) (newest *sandseav1.NetworkEvent, next int64) {
	// there gives the first events from a number on.
	there := func(at int64) []*sandseav1.NetworkEvent {
		for m, err := range sb.Log(ctx, &sandseav1.NetworkLogRequest{FromSeq: at}) {
			if err != nil {
				return nil // the next look tells
			}
			if len(m.GetEvents()) > 0 {
				return m.GetEvents()
			}
		}
		return nil
	}
	known, beyond := from, int64(-1) // there may be events from known on, and are none from beyond on
	for step := int64(0); ; {
		at := known + step
		if beyond >= 0 {
			at = known + (beyond-known)/2
		}
		events := there(at)
		if len(events) == 0 {
			if at == known {
				return newest, known
			}
			beyond = at
			continue
		}
		if newest != nil {
			step = max(1<<10, 4*step)
		}
		newest = events[len(events)-1]
		known = newest.GetSeq() + 1
		if beyond >= 0 && known >= beyond {
			return newest, known
		}
	}
}
