package main

import (
	"context"
	"fmt"
	"maps"
	"math"
	"slices"
	"strings"
	"time"

	"connectrpc.com/connect"
	"github.com/spf13/cobra"

	sandseav1 "github.com/sandsea/sandsea/api/sandsea/v1"
	"github.com/sandsea/sandsea/client"
	"github.com/sandsea/sandsea/cmd/sandsea/ui"
	"github.com/sandsea/sandsea/internal/span"
)

// stateWord is a sandbox's state for people: an ended one shows its cause.
func stateWord(sb *sandseav1.Sandbox) string {
	if end := sb.GetEnd(); end != nil && end.GetCause() != "" {
		return end.GetCause()
	}
	return stateName(sb.GetState())
}

func stateName(s sandseav1.SandboxState) string { return enumWord(s.Descriptor(), s.Number()) }

func stateColor(sb *sandseav1.Sandbox) string {
	switch sb.GetState() {
	case sandseav1.SandboxState_SANDBOX_STATE_RUNNING:
		return ui.Green
	case sandseav1.SandboxState_SANDBOX_STATE_LOST:
		return ui.Red
	case sandseav1.SandboxState_SANDBOX_STATE_ENDED:
		if c := sb.GetEnd().GetCause(); c != "stopped" && c != "completed" {
			return ui.Red
		}
		return ui.Gray
	}
	return ui.Yellow
}

func imageWord(sb *sandseav1.Sandbox) string {
	e := sb.GetSpec().GetEnvironment()
	if e.GetImage() != "" {
		return e.GetImage()
	}
	return strings.Join(append(slices.DeleteFunc([]string{e.GetBase(), e.GetWorkspace()},
		func(s string) bool { return s == "" }), e.GetToolkits()...), "+")
}

func labelWords(labels map[string]string) string {
	var out []string
	for _, k := range slices.Sorted(maps.Keys(labels)) {
		out = append(out, k+"="+labels[k])
	}
	return strings.Join(out, ",")
}

func (a *app) lsCommand() *cobra.Command {
	var all bool
	var labels []string
	var limit int
	var by string
	cmd := &cobra.Command{
		Use:   "ls",
		Short: "List sandboxes, newest first",
		Long: `Lists sandboxes, newest first, or by the columns that --sort names, of which one with a minus counts backwards. On a
terminal that does not hold the list, the program named by PAGER shows it.`,
		Example: `  sandsea ls
  sandsea ls --sort mem,-age
  sandsea ls --all -l job=eval-12
  sandsea ls --json | jq -r '.[].id'`,
		Args: cobra.NoArgs,
		RunE: func(cmd *cobra.Command, _ []string) error {
			want, err := pairs("label", labels)
			if err != nil {
				return err
			}
			if limit < 1 {
				return usage(cmd, "--limit %d: at least 1", limit)
			}
			get := limit
			var compare comparison
			if by != "" {
				if compare, err = parseSort(by); err != nil {
					return err
				}
				get = math.MaxInt // which are first is known when all are
			}
			c, err := a.client()
			if err != nil {
				return err
			}
			list, total, err := listSandboxes(cmd.Context(), c, &sandseav1.ListSandboxesRequest{All: all, Labels: want}, get)
			if err != nil {
				return err
			}
			if compare != nil {
				slices.SortStableFunc(list, compare)
				list = list[:min(len(list), limit)]
			}
			if a.json {
				return printJSON(a.io.Out, documents("sandsea.sandbox/1", list))
			}
			if len(list) == 0 {
				return a.noSandboxes(cmd.Context(), c, len(want) > 0)
			}
			hidden := a.hidden(cmd.Context(), c, all, want, total)
			a.paged(cmd.Context(), func() {
				a.printSandboxes(list, hidden)
				if int64(len(list)) < total {
					a.io.Note("first %s of %s; more: --limit", ui.Count(int64(len(list))), ui.Count(total))
				}
			})
			return nil
		},
	}
	cmd.Flags().BoolVarP(&all, "all", "a", false, "also those that ended in the last 24 hours")
	cmd.Flags().StringArrayVarP(&labels, "label", "l", nil, "only with this label, as k=v")
	cmd.Flags().IntVar(&limit, "limit", 500, "at most so many")
	cmd.Flags().StringVar(&by, "sort", "", "by these columns, as mem,-age: "+strings.Join(sortNames(), ", "))
	return cmd
}

// maxPage is the most that the server gives at once.
const maxPage = 1000

// listSandboxes gives the newest limit sandboxes and how many there are.
func listSandboxes(ctx context.Context, c *client.Client, req *sandseav1.ListSandboxesRequest, limit int) (list []*sandseav1.Sandbox, total int64, err error) {
	for {
		req.PageSize = int32(min(limit-len(list), maxPage))
		res, err := c.Sandboxes.List(ctx, connect.NewRequest(req))
		if err != nil {
			return nil, 0, err
		}
		list, total = append(list, res.Msg.GetSandboxes()...), res.Msg.GetTotal()
		req.PageToken = res.Msg.GetNextPageToken()
		if req.GetPageToken() == "" || len(list) >= limit {
			return list, total, nil
		}
	}
}

// noSandboxes says that the list is empty, and where.
func (a *app) noSandboxes(ctx context.Context, c *client.Client, chosen bool) error {
	res, err := c.IAM.WhoAmI(ctx, connect.NewRequest(&sandseav1.WhoAmIRequest{}))
	if err != nil {
		return err
	}
	with := ""
	if chosen {
		with = " with these labels"
	}
	a.io.Note("No sandboxes%s in project %s. Start one: sandsea create", with, ui.Text(res.Msg.GetProject()))
	return nil
}

// sandboxColumns: what a narrow terminal can do without goes first, then the middle of the image's name, and then more.
var sandboxColumns = []ui.Column{
	{Name: "ID"},
	{Name: "STATE"},
	{Name: "IMAGE", Cut: true, Drop: 3},
	{Name: "BACKEND", Drop: 7},
	{Name: "NODE", Drop: 6},
	{Name: "MEM", Right: true, Drop: 2},
	{Name: "NET", Drop: 5},
	{Name: "AGE", Right: true},
	{Name: "IDLE", Right: true, Drop: 1},
	{Name: "LABELS", Drop: 4},
}

// hidden is how many sandboxes have ended of late and are not listed. People see it, and it is worth one call.
func (a *app) hidden(ctx context.Context, c *client.Client, all bool, labels map[string]string, total int64) int64 {
	if all || !a.io.OutTTY {
		return 0
	}
	res, err := c.Sandboxes.List(ctx, connect.NewRequest(&sandseav1.ListSandboxesRequest{All: true, Labels: labels, PageSize: 1}))
	if err != nil {
		return 0 // the list is what was asked for
	}
	return res.Msg.GetTotal() - total
}

func (a *app) printSandboxes(list []*sandseav1.Sandbox, hidden int64) {
	var rows [][]ui.Cell
	counts := map[string]int{}
	for _, sb := range list {
		id := sb.GetId()
		if a.io.OutTTY {
			id = short(id)
		}
		state, idle := stateName(sb.GetState()), "-"
		counts[state]++
		if sb.GetState() == sandseav1.SandboxState_SANDBOX_STATE_RUNNING {
			idle = span.Short(time.Duration(sb.GetIdleForMs()) * time.Millisecond)
		}
		rows = append(rows, []ui.Cell{
			{Text: id},
			{Text: ui.Text(stateWord(sb)), Color: stateColor(sb)},
			{Text: ui.Text(imageWord(sb))},
			{Text: "container"},
			{Text: ui.Text(sb.GetNode())},
			{Text: ui.Size(sb.GetSpec().GetLimits().GetMemoryBytes())},
			{Text: ui.Text(netWord(sb))},
			{Text: span.Short(a.now().Sub(sb.GetCreatedAt().AsTime()))},
			{Text: idle},
			{Text: ui.Text(labelWords(sb.GetSpec().GetLabels()))},
		})
	}
	a.io.Table(sandboxColumns, rows)
	if !a.io.OutTTY {
		return
	}
	var words []string
	for _, state := range []string{"running", "creating", "stopping", "ended", "lost"} {
		if counts[state] > 0 {
			words = append(words, fmt.Sprintf("%d %s", counts[state], state))
		}
	}
	more := ""
	if hidden > 0 {
		more = fmt.Sprintf(" (%d more ended in 24 h: --all)", hidden)
	}
	a.io.Note("%s%s", strings.Join(words, ", "), more)
}
