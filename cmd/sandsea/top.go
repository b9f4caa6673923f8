package main

import (
	"bytes"
	"cmp"
	"context"
	"fmt"
	"slices"
	"strings"
	"sync"
	"time"

	"connectrpc.com/connect"
	"github.com/spf13/cobra"
	"golang.org/x/sync/errgroup"

	sandseav1 "github.com/sandsea/sandsea/api/sandsea/v1"
	"github.com/sandsea/sandsea/client"
	"github.com/sandsea/sandsea/cmd/sandsea/ui"
	"github.com/sandsea/sandsea/internal/span"
)

const (
	// topEvery is the time between two looks; rates are means over it.
	topEvery = 2 * time.Second
	// topFirst is the time between the first two, which give the first rates.
	topFirst = 500 * time.Millisecond
	// topInFlight is how many sandboxes are asked at once.
	topInFlight = 16
)

func (a *app) topCommand() *cobra.Command {
	t := topFlags{view: useView}
	cmd := &cobra.Command{
		Use: "top", Short: "Show what running sandboxes use, live", Args: cobra.NoArgs,
		Long: `CPU% is of one CPU, MEM what the sandbox holds of its limit, OUT/s what its commands write, NET/s what crosses its network
both ways. Looking does not count as use.
Keys: / filters, s sorts by the next column, enter inspects, x stops, q leaves. In a pipe: one table.`,
		Example: "  sandsea top\n  sandsea top -l job=eval-12\n  sandsea top --json | jq '.sandboxes[0]'",
		RunE:    func(cmd *cobra.Command, _ []string) error { return a.top(cmd, t) },
	}
	t.register(cmd)
	return cmd
}

// topFlags choose sandboxes, and what is shown of them.
type topFlags struct {
	view   topTable
	labels *[]string
	limit  *int
}

func (t *topFlags) register(cmd *cobra.Command) {
	t.labels = cmd.Flags().StringArrayP("label", "l", nil, "only with this label, as k=v")
	t.limit = cmd.Flags().Int("limit", 500, "at most so many sandboxes, newest first")
}

// top shows a table live, or once.
func (a *app) top(cmd *cobra.Command, t topFlags) error {
	want, err := pairs("label", *t.labels)
	if err != nil {
		return err
	}
	if *t.limit < 1 {
		return usage(cmd, "--limit %d: at least 1", *t.limit)
	}
	c, err := a.client()
	if err != nil {
		return err
	}
	s := &sampler{c: c, labels: want, limit: *t.limit, view: t.view, now: a.now}
	if a.io.OutTTY && a.io.ErrTTY && a.io.InTTY && !a.json {
		return a.watchTop(cmd.Context(), s)
	}
	look, err := s.twice(cmd.Context())
	if err != nil {
		return err
	}
	if a.json {
		return printJSON(a.io.Out, look.document(t.view))
	}
	a.printTop(look, t.view)
	return nil
}

// topTable is what is shown of sandboxes.
type topTable struct {
	columns []ui.Column
	// sorts are the columns that rows can be sorted by, the first at the beginning.
	sorts []string
	cells func(v rowView, r topRow) []ui.Cell
	// head is the line of a node.
	head func(l *look, n *sandseav1.Node) string
	// schema and document are the form for programs; nodes are told of where withNodes says so.
	schema    string
	document  func(r topRow) object
	withNodes bool
	// asks, when set, finds what a sandbox asked for last, and the number in its flow log to go on from.
	asks func(s *sampler, ctx context.Context, sb *sandseav1.Sandbox, before reading) (last string, seq int64)
}

// rowView is how rows are shown.
type rowView struct {
	io  *ui.IO
	now time.Time
}

func (v rowView) id(r topRow) string {
	if v.io.OutTTY {
		return short(r.sb.GetId())
	}
	return r.sb.GetId()
}

// look is what sandboxes and nodes use at one time.
type look struct {
	nodes []*sandseav1.Node
	rows  []topRow
	total int64 // sandboxes that run; rows may be fewer
}

// topRow is what one sandbox uses.
type topRow struct {
	sb      *sandseav1.Sandbox
	cpu     float64 // CPUs, as a mean since the last look
	output  float64 // bytes a second, likewise
	command string
	// What crosses its network, likewise: bytes and rejections a second.
	sent, received, denied float64
	last                   string // what it asked for last, where that is asked
}

func (r topRow) network() float64 { return r.sent + r.received }

func (r topRow) memory() int64 { return r.sb.GetUsage().GetMemoryBytes() }

// sampler looks again and again. One look at a time.
type sampler struct {
	c      *client.Client
	labels map[string]string
	limit  int
	view   topTable
	now    func() time.Time
	before map[string]reading
}

// reading is what a sandbox had used at a time.
type reading struct {
	at     time.Time
	cpu    int64 // microseconds
	output int64
	// Of its network: bytes and rejections, what it asked for last, and where its flow log goes on.
	sent, received, denied int64
	last                   string
	seq                    int64
}

// twice gives a look with rates.
func (s *sampler) twice(ctx context.Context) (*look, error) {
	if _, err := s.look(ctx); err != nil {
		return nil, err
	}
	if err := pause(ctx, topFirst); err != nil {
		return nil, err
	}
	return s.look(ctx)
}

func (s *sampler) look(ctx context.Context) (*look, error) {
	list, total, err := listSandboxes(ctx, s.c, &sandseav1.ListSandboxesRequest{
		Labels: s.labels, States: []sandseav1.SandboxState{sandseav1.SandboxState_SANDBOX_STATE_RUNNING},
	}, s.limit)
	if err != nil {
		return nil, err
	}
	nodes, err := s.c.Nodes.List(ctx, connect.NewRequest(&sandseav1.ListNodesRequest{}))
	if err != nil {
		return nil, err
	}
	out := &look{nodes: nodes.Msg.GetNodes(), total: total}
	var mu sync.Mutex
	after := map[string]reading{}
	group, gctx := errgroup.WithContext(ctx)
	group.SetLimit(topInFlight)
	for _, sb := range list {
		group.Go(func() error {
			row, now, ok := s.row(gctx, sb.GetId())
			if !ok {
				return context.Cause(gctx) // it has ended meanwhile, or its node is away
			}
			mu.Lock()
			defer mu.Unlock()
			after[sb.GetId()] = now
			out.rows = append(out.rows, row)
			return nil
		})
	}
	if err := group.Wait(); err != nil {
		return nil, err
	}
	s.before = after
	sortTop(out.rows, s.view.sorts[0])
	return out, nil
}

// row asks for one sandbox.
func (s *sampler) row(ctx context.Context, id string) (row topRow, now reading, ok bool) {
	sb, err := s.c.Sandbox(id).Info(ctx)
	if err != nil || sb.GetState() != sandseav1.SandboxState_SANDBOX_STATE_RUNNING {
		return row, now, false
	}
	u, before := sb.GetUsage(), s.before[id]
	now = reading{
		at: s.now(), cpu: u.GetCpuUs(), output: u.GetOutputBytes(), sent: u.GetNetSentBytes(), received: u.GetNetReceivedBytes(),
		denied: u.GetNetDenied(), last: before.last, seq: before.seq,
	}
	row = topRow{sb: sb}
	if s.view.asks != nil {
		now.last, now.seq = s.view.asks(s, ctx, sb, before)
		row.last = now.last
	} else {
		row.command = s.command(ctx, sb)
	}
	if took := now.at.Sub(before.at).Seconds(); !before.at.IsZero() && took > 0 {
		rate := func(now, before int64) float64 { return max(0, float64(now-before)/took) }
		row.cpu = rate(now.cpu, before.cpu) / 1e6
		row.output = rate(now.output, before.output)
		row.sent, row.received = rate(now.sent, before.sent), rate(now.received, before.received)
		row.denied = rate(now.denied, before.denied)
	}
	return row, now, true
}

// command is the newest command that runs. To ask for commands counts as use, so only a sandbox that is in use is asked.
func (s *sampler) command(ctx context.Context, sb *sandseav1.Sandbox) string {
	if sb.GetIdleForMs() > 0 {
		return ""
	}
	procs, err := s.c.Sandbox(sb.GetId()).Processes(ctx)
	if err != nil {
		return "" // it ended meanwhile: the next look tells
	}
	for _, p := range slices.Backward(procs) {
		if p.GetState() == sandseav1.ProcessState_PROCESS_STATE_RUNNING {
			return commandWord(p)
		}
	}
	return ""
}

// sortTop sorts, most first; the youngest of equals first.
func sortTop(rows []topRow, by string) {
	key := func(r topRow) float64 {
		switch by {
		case "MEM":
			return float64(r.memory())
		case "PIDS":
			return float64(r.sb.GetUsage().GetPids())
		case "OUT/s":
			return r.output
		case "NET/s":
			return r.network()
		case "DENY/s":
			return r.denied
		case "FLOWS":
			return float64(r.sb.GetUsage().GetNetFlows())
		case "AGE":
			return 0
		}
		return r.cpu
	}
	slices.SortFunc(rows, func(a, b topRow) int {
		return cmp.Or(cmp.Compare(key(b), key(a)), b.sb.GetCreatedAt().AsTime().Compare(a.sb.GetCreatedAt().AsTime()),
			strings.Compare(a.sb.GetId(), b.sb.GetId()))
	})
}

// useView shows what sandboxes use.
var useView = topTable{
	columns: []ui.Column{
		{Name: "ID"},
		{Name: "STATE", Drop: 6},
		{Name: "CPU%", Right: true},
		{Name: "MEM/LIMIT", Right: true},
		{Name: "PIDS", Right: true, Drop: 3},
		{Name: "OUT/s", Right: true, Drop: 2},
		{Name: "NET/s", Right: true, Drop: 1},
		{Name: "AGE", Right: true, Drop: 5},
		{Name: "COMMAND", Cut: true, Drop: 7},
	},
	sorts: []string{"CPU%", "MEM", "PIDS", "OUT/s", "NET/s", "AGE"},
	cells: func(v rowView, r topRow) []ui.Cell {
		return []ui.Cell{
			{Text: v.id(r)},
			{Text: ui.Text(stateWord(r.sb)), Color: stateColor(r.sb)},
			{Text: fmt.Sprintf("%.0f", 100*r.cpu)},
			{Text: ui.Size(r.memory()) + "/" + ui.Size(r.sb.GetSpec().GetLimits().GetMemoryBytes())},
			{Text: fmt.Sprint(r.sb.GetUsage().GetPids())},
			{Text: ui.Size(int64(r.output))},
			{Text: ui.Size(int64(r.network()))},
			{Text: span.Short(v.now.Sub(r.sb.GetCreatedAt().AsTime()))},
			{Text: orDash(v.io.Short(r.command))},
		}
	},
	head:   (*look).nodeLine,
	schema: "sandsea.top/1",
	document: func(r topRow) object {
		u := r.sb.GetUsage()
		return object{
			{"id", r.sb.GetId()},
			{"node", r.sb.GetNode()},
			{"state", stateName(r.sb.GetState())},
			{"cpus", r.cpu},
			{"memory_bytes", u.GetMemoryBytes()},
			{"memory_limit_bytes", r.sb.GetSpec().GetLimits().GetMemoryBytes()},
			{"pids", u.GetPids()},
			{"output_bytes_per_s", int64(r.output)},
			{"command", r.command},
			{"net_bytes_per_s", int64(r.network())},
		}
	},
	withNodes: true,
}

// printTop prints a line for each node and a table of the rows.
func (a *app) printTop(l *look, t topTable) {
	for _, n := range l.nodes {
		fmt.Fprintln(a.io.Out, t.head(l, n))
	}
	a.io.Table(t.columns, topCells(t, rowView{a.io, a.now()}, l.rows))
	if l.total > int64(len(l.rows)) {
		a.io.Note("newest %d of %d; more: --limit", len(l.rows), l.total)
	}
}

// nodeLine sums up what the sandboxes of a node use.
func (l *look) nodeLine(n *sandseav1.Node) string {
	var cpu float64
	var memory, count int64
	for _, r := range l.rows {
		if r.sb.GetNode() == n.GetName() {
			cpu, memory, count = cpu+r.cpu, memory+r.memory(), count+1
		}
	}
	return fmt.Sprintf("%s  %d CPUs %.0f %%   mem %s/%s   %d running", ui.Text(n.GetName()), n.GetCpus(),
		100*cpu/float64(max(1, n.GetCpus())), ui.Size(memory), ui.LongSize(n.GetMemoryBytes()), count)
}

func topCells(t topTable, v rowView, rows []topRow) [][]ui.Cell {
	var out [][]ui.Cell
	for _, r := range rows {
		out = append(out, t.cells(v, r))
	}
	return out
}

// document is a look for programs.
func (l *look) document(t topTable) object {
	nodes, boxes := []object{}, []object{}
	for _, n := range l.nodes {
		nodes = append(nodes, object{{"name", n.GetName()}, {"cpus", n.GetCpus()}, {"memory_bytes", n.GetMemoryBytes()}})
	}
	for _, r := range l.rows {
		boxes = append(boxes, t.document(r))
	}
	out := object{{"schema", t.schema}}
	if t.withNodes {
		out = append(out, member{"nodes", nodes})
	}
	return append(out, object{{"sandboxes", boxes}, {"total", l.total}}...)
}

// screen is a table for a screen of this size, as lines.
func screen(like *ui.IO, width int, cols []ui.Column, rows [][]ui.Cell) []string {
	var b bytes.Buffer
	(&ui.IO{Out: &b, OutTTY: true, Width: width, Color: like.Color, ASCII: like.ASCII}).Table(cols, rows)
	return strings.Split(strings.TrimSuffix(b.String(), "\n"), "\n")
}
