package main

import (
	"fmt"
	"slices"
	"strings"
	"time"

	"github.com/spf13/cobra"

	sandseav1 "github.com/sandsea/sandsea/api/sandsea/v1"
	"github.com/sandsea/sandsea/cmd/sandsea/ui"
	"github.com/sandsea/sandsea/internal/span"
)

func (a *app) inspectCommand() *cobra.Command {
	return &cobra.Command{
		Use: "inspect ID", Short: "Show everything about one sandbox", Args: cobra.ExactArgs(1),
		Example:           "  sandsea inspect s7q3k2m5\n  sandsea inspect --json s7q3k2m5 | jq .usage",
		ValidArgsFunction: a.completeID,
		RunE: func(cmd *cobra.Command, args []string) error {
			sb, err := a.sandbox(cmd.Context(), args[0])
			if err != nil {
				return err
			}
			info, err := sb.Info(cmd.Context())
			if err != nil {
				return err
			}
			procs, err := sb.Processes(cmd.Context())
			if err != nil && info.GetState() == sandseav1.SandboxState_SANDBOX_STATE_RUNNING {
				return err // an ended sandbox's may be gone
			}
			if a.json {
				list := make([]object, 0, len(procs))
				for _, p := range procs {
					list = append(list, members(p.ProtoReflect()))
				}
				return printJSON(a.io.Out, append(document("sandsea.sandbox/1", info), member{"processes", list}))
			}
			a.printSandbox(info, procs)
			return nil
		},
	}
}

// section prints a heading, and its rows under it. Foreign text is made harmless.
func (a *app) section(title string, rows ...[2]string) {
	if len(rows) == 0 {
		return
	}
	width := 12
	for _, r := range rows {
		width = max(width, len(r[0]))
	}
	fmt.Fprintln(a.io.Out, title)
	for _, r := range rows {
		fmt.Fprintf(a.io.Out, "  %-*s %s\n", width, ui.Text(r[0]), r[1])
	}
}

func row(name, format string, args ...any) [2]string {
	return [2]string{name, ui.Text(fmt.Sprintf(format, args...))}
}

func (a *app) printSandbox(sb *sandseav1.Sandbox, procs []*sandseav1.Process) {
	a.section("State", a.stateRows(sb)...)
	a.section("Limits", limitRows(sb.GetSpec().GetLimits(), sb.GetUsage())...)
	var enforcement, layers, processes [][2]string
	for _, e := range sb.GetEnforcement() {
		enforcement = append(enforcement, row(e.GetName(), "%s", e.GetMechanism()))
	}
	for i, d := range slices.Backward(sb.GetLayers()) {
		layers = append(layers, row(fmt.Sprint(i), "%s", d))
	}
	for _, p := range procs {
		processes = append(processes, row(fmt.Sprint(p.GetNumber()), "%s  %s", processWord(p, a.now()), a.io.Short(commandWord(p))))
	}
	a.section("Enforcement", enforcement...)
	a.section("Layers", layers...)
	a.section("Network", networkRows(sb)...)
	a.section("Processes", processes...)
	a.section("End", endRows(sb.GetEnd())...)
}

func (a *app) stateRows(sb *sandseav1.Sandbox) [][2]string {
	rows := [][2]string{
		row("id", "%s", sb.GetId()),
		{"state", a.io.Paint(stateColor(sb), ui.Text(stateWord(sb)))},
		row("project", "%s", sb.GetProject()),
		row("node", "%s, epoch %d", sb.GetNode(), sb.GetEpoch()), row("image", "%s", imageWord(sb)),
		row("created", "%s ago", span.Short(a.now().Sub(sb.GetCreatedAt().AsTime()))),
	}
	if sb.GetExpiresAt() != nil && sb.GetEnd() == nil {
		rows = append(rows, row("ends", "in %s (--ttl)", span.Short(sb.GetExpiresAt().AsTime().Sub(a.now()))))
	}
	if w := labelWords(sb.GetSpec().GetLabels()); w != "" {
		rows = append(rows, row("labels", "%s", w))
	}
	return rows
}

// limitRows are the limits beside what is used of them; of a sandbox that has ended often nothing is known.
func limitRows(l *sandseav1.Limits, u *sandseav1.Usage) [][2]string {
	if u == nil {
		return [][2]string{
			row("memory", "%s", ui.Size(l.GetMemoryBytes())), row("cpu", "%.2f CPUs", float64(l.GetCpuMillis())/1000),
			row("pids", "%d", l.GetPids()), row("disk", "%s", ui.Size(l.GetDiskBytes())),
			row("output", "%s", ui.Size(l.GetOutputBytes())), row("open files", "%d per process", l.GetOpenFiles()),
		}
	}
	return [][2]string{
		row("memory", "%s / %s, peak %s", ui.Size(u.GetMemoryBytes()), ui.Size(l.GetMemoryBytes()), ui.Size(u.GetMemoryPeakBytes())),
		row("cpu", "%.2f CPUs, used %s", float64(l.GetCpuMillis())/1000, ui.Took(time.Duration(u.GetCpuUs())*time.Microsecond)),
		row("pids", "%d / %d", u.GetPids(), l.GetPids()),
		row("disk", "%s / %s", ui.Size(u.GetDiskBytes()), ui.Size(l.GetDiskBytes())),
		row("output", "%s / %s", ui.Size(u.GetOutputBytes()), ui.Size(l.GetOutputBytes())),
		row("open files", "%d per process", l.GetOpenFiles()),
	}
}

func endRows(end *sandseav1.End) [][2]string {
	if end == nil {
		return nil
	}
	rows := [][2]string{row("cause", "%s", end.GetCause())}
	if end.GetDetail() != "" {
		rows = append(rows, row("detail", "%s", end.GetDetail()))
	}
	return append(rows, row("by", "%s", end.GetBy()), row("fault", "%s", fault(end.GetCause())))
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

// processWord says how a process is or was.
func processWord(p *sandseav1.Process, now time.Time) string {
	r := p.GetResult()
	switch {
	case p.GetState() == sandseav1.ProcessState_PROCESS_STATE_RUNNING:
		return "running " + span.Short(now.Sub(p.GetStartedAt().AsTime()))
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

// commandWord is a process's command on one line.
func commandWord(p *sandseav1.Process) string {
	argv := p.GetCommand().GetArgv()
	if len(argv) == 3 && argv[2] == loginShell {
		return "shell"
	}
	return strings.Join(argv, " ")
}
