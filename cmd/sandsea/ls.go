package main

import (
	"fmt"
	"maps"
	"slices"
	"sort"
	"strings"
	"time"

	"github.com/spf13/cobra"

	sandseav1 "github.com/sandsea/sandsea/api/sandsea/v1"
	"github.com/sandsea/sandsea/cmd/sandsea/ui"
)

// stateWord is a sandbox's state for people: an ended one shows its cause.
func stateWord(sb *sandseav1.Sandbox) string {
	if end := sb.GetEnd(); end != nil && end.GetCause() != "" {
		return end.GetCause()
	}
	return strings.ToLower(strings.TrimPrefix(sb.GetState().String(), "SANDBOX_STATE_"))
}

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
	cmd := &cobra.Command{
		Use:   "ls",
		Short: "List sandboxes, newest first",
		Example: `  sandsea ls
  sandsea ls --all -l job=eval-12
  sandsea ls --json | jq -r '.[].id'`,
		Args: cobra.NoArgs,
		RunE: func(cmd *cobra.Command, _ []string) error {
			want, err := pairs("label", labels)
			if err != nil {
				return err
			}
			c, err := a.client()
			if err != nil {
				return err
			}
			var list []*sandseav1.Sandbox
			more := false
			for sb, err := range c.List(cmd.Context(), &sandseav1.ListSandboxesRequest{All: all, Labels: want}) {
				if err != nil {
					return err
				}
				if len(list) == limit {
					more = true
					break
				}
				list = append(list, sb)
			}
			if a.json {
				docs, err := documents("sandsea.sandbox/1", list)
				if err != nil {
					return err
				}
				return printJSON(a.io.Out, docs)
			}
			if len(list) == 0 {
				a.io.Note("No sandboxes here. Start one: sandsea create")
				return nil
			}
			a.printSandboxes(list)
			if more {
				a.io.Note("first %d; more: --limit", limit)
			}
			return nil
		},
	}
	cmd.Flags().BoolVarP(&all, "all", "a", false, "also those that ended in the last 24 hours")
	cmd.Flags().StringArrayVarP(&labels, "label", "l", nil, "only with this label, as k=v")
	cmd.Flags().IntVar(&limit, "limit", 500, "at most so many")
	return cmd
}

func (a *app) printSandboxes(list []*sandseav1.Sandbox) {
	now := time.Now()
	sort.SliceStable(list, func(i, j int) bool {
		return list[i].GetCreatedAt().AsTime().After(list[j].GetCreatedAt().AsTime())
	})
	cols := []ui.Column{
		{Name: "ID"}, {Name: "STATE"}, {Name: "IMAGE", Cut: true},
		{Name: "NODE", Drop: 4}, {Name: "MEM", Right: true, Drop: 2}, {Name: "AGE", Right: true},
		{Name: "IDLE", Right: true, Drop: 3}, {Name: "LABELS", Drop: 5},
	}
	var rows [][]ui.Cell
	running := 0
	for _, sb := range list {
		id := sb.GetId()
		if a.io.OutTTY {
			id = short(id)
		}
		idle := "-"
		if sb.GetState() == sandseav1.SandboxState_SANDBOX_STATE_RUNNING {
			running++
			idle = ui.Age(time.Duration(sb.GetIdleForMs()) * time.Millisecond)
		}
		rows = append(rows, []ui.Cell{
			{Text: id}, {Text: stateWord(sb), Color: stateColor(sb)}, {Text: ui.Text(imageWord(sb))}, {Text: sb.GetNode()},
			{Text: ui.Size(sb.GetSpec().GetLimits().GetMemoryBytes())}, {Text: ui.Age(now.Sub(sb.GetCreatedAt().AsTime()))},
			{Text: idle}, {Text: ui.Text(labelWords(sb.GetSpec().GetLabels()))},
		})
	}
	a.io.Table(cols, rows)
	if a.io.OutTTY {
		a.io.Note("%d running, %d others", running, len(list)-running)
	}
}

func (a *app) inspectCommand() *cobra.Command {
	return &cobra.Command{
		Use: "inspect ID", Short: "Show everything about one sandbox", Args: cobra.ExactArgs(1),
		Example:           "  sandsea inspect s7q3k2m5\n  sandsea inspect --json s7q3k2m5 | jq .usage",
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
			sb, err := c.Sandbox(id).Info(cmd.Context())
			if err != nil {
				return err
			}
			procs, err := c.Sandbox(id).Processes(cmd.Context())
			if err != nil && sb.GetState() == sandseav1.SandboxState_SANDBOX_STATE_RUNNING {
				return err
			}
			if a.json {
				doc, err := document("sandsea.sandbox/1", sb)
				if err != nil {
					return err
				}
				if doc["processes"], err = documents("", procs); err != nil {
					return err
				}
				return printJSON(a.io.Out, doc)
			}
			a.printSandbox(sb, procs)
			return nil
		},
	}
}

func (a *app) printSandbox(sb *sandseav1.Sandbox, procs []*sandseav1.Process) {
	section := func(name string) { fmt.Fprintln(a.io.Out, name) }
	row := func(name, format string, args ...any) {
		fmt.Fprintf(a.io.Out, "  %-12s %s\n", name, ui.Text(fmt.Sprintf(format, args...)))
	}
	l, u := sb.GetSpec().GetLimits(), sb.GetUsage()
	section("State")
	row("id", "%s", sb.GetId())
	fmt.Fprintf(a.io.Out, "  %-12s %s\n", "state", a.io.Paint(stateColor(sb), stateWord(sb)))
	row("project", "%s", sb.GetProject())
	row("node", "%s, epoch %d", sb.GetNode(), sb.GetEpoch())
	row("image", "%s", imageWord(sb))
	row("created", "%s ago", ui.Age(time.Since(sb.GetCreatedAt().AsTime())))
	if sb.GetExpiresAt() != nil && sb.GetEnd() == nil {
		row("ends", "in %s (--ttl)", ui.Age(time.Until(sb.GetExpiresAt().AsTime())))
	}
	if w := labelWords(sb.GetSpec().GetLabels()); w != "" {
		row("labels", "%s", w)
	}
	section("Limits")
	row("memory", "%s / %s, peak %s", ui.Size(u.GetMemoryBytes()), ui.Size(l.GetMemoryBytes()), ui.Size(u.GetMemoryPeakBytes()))
	row("cpu", "%.2f CPUs, used %s", float64(l.GetCpuMillis())/1000, ui.Took(time.Duration(u.GetCpuUs())*time.Microsecond))
	row("pids", "%d / %d", u.GetPids(), l.GetPids())
	row("disk", "%s / %s", ui.Size(u.GetDiskBytes()), ui.Size(l.GetDiskBytes()))
	row("output", "%s / %s", ui.Size(u.GetOutputBytes()), ui.Size(l.GetOutputBytes()))
	row("open files", "%d per process", l.GetOpenFiles())
	section("Enforcement")
	for _, e := range sb.GetEnforcement() {
		row(e.GetName(), "%s", e.GetMechanism())
	}
	section("Layers")
	for i, d := range slices.Backward(sb.GetLayers()) {
		row(fmt.Sprint(i), "%s", d)
	}
	section("Network")
	row("policy", "none: loopback only")
	if len(procs) > 0 {
		section("Processes")
		for _, p := range procs {
			row(fmt.Sprint(p.GetNumber()), "%s  %s", processWord(p), strings.Join(p.GetCommand().GetArgv(), " "))
		}
	}
	if end := sb.GetEnd(); end != nil {
		section("End")
		row("cause", "%s", end.GetCause())
		if end.GetDetail() != "" {
			row("detail", "%s", end.GetDetail())
		}
		row("by", "%s", end.GetBy())
		row("fault", "%s", fault(end.GetCause()))
	}
}

// fault says who is to blame for an end.
func fault(cause string) string {
	switch {
	case strings.HasPrefix(cause, "infra_"):
		return "the platform's, not the task's"
	case cause == "agent_destroyed" || cause == "oom" || cause == "disk" || cause == "pids" || cause == "output_limit":
		return "the workload's"
	}
	return "nobody's"
}

func processWord(p *sandseav1.Process) string {
	r := p.GetResult()
	switch {
	case p.GetState() == sandseav1.ProcessState_PROCESS_STATE_RUNNING:
		return "running " + ui.Age(time.Since(p.GetStartedAt().AsTime()))
	case r.GetInfraError() != "":
		return "platform fault: " + r.GetInfraError()
	case r.GetStartFailure() != nil:
		return "not started: " + r.GetStartFailure().GetKind()
	case r.GetTimedOut():
		return "timed out after " + ui.Took(time.Duration(r.GetWallUs())*time.Microsecond)
	case r.GetOom():
		return "out of memory"
	case r.GetSignal() != 0:
		return r.GetSignalName() + " after " + ui.Took(time.Duration(r.GetWallUs())*time.Microsecond)
	}
	return fmt.Sprintf("exit %d, %s", r.GetExitCode(), ui.Took(time.Duration(r.GetWallUs())*time.Microsecond))
}
