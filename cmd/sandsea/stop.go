package main

import (
	"cmp"
	"context"
	"fmt"
	"slices"
	"strings"
	"time"

	"github.com/spf13/cobra"

	"github.com/sandsea/sandsea/api/errdefs"
	"github.com/sandsea/sandsea/api/errwire"
	sandseav1 "github.com/sandsea/sandsea/api/sandsea/v1"
	"github.com/sandsea/sandsea/client"
	"github.com/sandsea/sandsea/cmd/sandsea/ui"
)

func (a *app) stopCommand() *cobra.Command {
	var all, dry bool
	var labels []string
	var grace time.Duration
	cmd := &cobra.Command{
		Use:   "stop ID… | --all | -l k=v",
		Short: "End sandboxes",
		Example: `  sandsea stop s7q3k2m5
  sandsea stop -l job=eval-12 --yes
  sandsea stop --all --dry-run`,
		ValidArgsFunction: a.completeIDs,
		RunE: func(cmd *cobra.Command, args []string) error {
			if (len(args) > 0) == (all || len(labels) > 0) {
				return usage(cmd, "stop: name sandboxes, or say --all or -l k=v")
			}
			want, err := pairs("label", labels)
			if err != nil {
				return err
			}
			c, err := a.client()
			if err != nil {
				return err
			}
			s := stopper{a: a, c: c, grace: grace, dry: dry}
			if len(args) > 0 {
				return s.named(cmd.Context(), args)
			}
			what := "--all"
			if len(labels) > 0 {
				what = "-l " + strings.Join(labels, " -l ")
			}
			return s.chosen(cmd.Context(), what, want)
		},
	}
	cmd.Flags().BoolVar(&all, "all", false, "every sandbox of the project")
	cmd.Flags().BoolVar(&dry, "dry-run", false, "only list what would end")
	cmd.Flags().StringArrayVarP(&labels, "label", "l", nil, "those with this label, as k=v")
	cmd.Flags().DurationVar(&grace, "grace", 0, "time between SIGTERM and SIGKILL")
	return cmd
}

type stopper struct {
	a     *app
	c     *client.Client
	grace time.Duration
	dry   bool
}

// named stops sandboxes by id; one that is not there does not save the others.
func (s stopper) named(ctx context.Context, args []string) error {
	var ids []string
	var failed error
	for _, arg := range args {
		id, err := s.a.resolve(ctx, s.c, arg)
		if err != nil && len(args) == 1 {
			return err
		}
		if err != nil {
			s.a.complain(err)
			failed = &exitError{code: 1}
			continue
		}
		if !s.a.json {
			// One of which nothing is known is left to the stop, which says what is wrong.
			if info, err := s.c.Sandbox(id).Info(ctx); err == nil && over(info) {
				s.a.io.Note("sandbox %s already ended: %s", short(id), ui.Text(endWord(info.GetEnd())))
				continue
			}
		}
		ids = append(ids, id)
	}
	if len(ids) == 0 {
		return failed
	}
	if s.dry {
		s.list(ids)
		return failed
	}
	return cmp.Or(s.stop(ctx, ids), failed)
}

// over reports whether a sandbox has ended or is lost.
func over(sb *sandseav1.Sandbox) bool {
	state := sb.GetState()
	return state == sandseav1.SandboxState_SANDBOX_STATE_ENDED || state == sandseav1.SandboxState_SANDBOX_STATE_LOST
}

// chosen stops what labels choose, or everything, once that is confirmed; it stops what it listed only.
func (s stopper) chosen(ctx context.Context, what string, labels map[string]string) error {
	var ids []string
	fresh := 0
	for sb, err := range s.c.List(ctx, &sandseav1.ListSandboxesRequest{Labels: labels}) {
		if err != nil {
			return err
		}
		ids = append(ids, sb.GetId())
		if sb.GetIdleForMs() < freshFor.Milliseconds() {
			fresh++
		}
	}
	if len(ids) == 0 {
		s.a.io.Note("No sandboxes to stop.")
		return nil
	}
	if s.dry {
		s.list(ids)
		return nil
	}
	s.a.io.Note("%s; %d used just now", sandboxes(len(ids)), fresh)
	yes, asked := s.a.io.Ask(fmt.Sprintf("Stop all %d? Their files are lost, their logs stay.", len(ids)))
	if !asked {
		return misuse(errdefs.New(errdefs.FailedPrecondition, "", "stop %s: %s; no terminal to ask on", ui.Text(what), sandboxes(len(ids))).
			WithHint("Add --yes"))
	}
	if !yes {
		return nil
	}
	return s.stop(ctx, ids)
}

// freshFor is how long after its last use a sandbox counts as being in use.
const freshFor = 10 * time.Second

// stopBatch is how many ids the server takes in one request.
const stopBatch = 10_000

func sandboxes(n int) string { return counted(n, "sandbox", "sandboxes") }

func counted(n int, one, many string) string {
	if n == 1 {
		return "1 " + one
	}
	return fmt.Sprintf("%d %s", n, many)
}

func (s stopper) list(ids []string) {
	for _, id := range ids {
		fmt.Fprintln(s.a.io.Out, id)
	}
}

func (s stopper) stop(ctx context.Context, ids []string) error {
	began := time.Now()
	s.a.undone = "those that were asked to stop go on stopping: sandsea ls"
	defer s.a.io.Waiting(sandboxes(len(ids))+" to stop", s.grace+stopLimit)()
	done, failed := 0, 0
	for some := range slices.Chunk(ids, stopBatch) {
		for res, err := range s.c.StopMany(ctx, &sandseav1.StopManyRequest{Ids: some, GraceMs: s.grace.Milliseconds()}) {
			if err != nil {
				return err
			}
			if res.GetError() == nil {
				done++
			} else {
				failed++
			}
			if err := s.print(res); err != nil {
				return err
			}
		}
	}
	if !s.a.json && done > 0 {
		s.a.io.Note("stopped %d in %s", done, ui.Took(time.Since(began)))
	}
	if failed > 0 {
		return &exitError{code: 1}
	}
	return nil
}

// print tells of a stop that failed; programs learn of each.
func (s stopper) print(res *sandseav1.StopManyResponse) error {
	if !s.a.json {
		if res.GetError() != nil {
			s.a.complain(errwire.FromDetail(res.GetError(), res.GetMessage()))
		}
		return nil
	}
	doc := object{{"schema", "sandsea.stop/1"}, {"id", res.GetId()}, {"error", nil}}
	if res.GetError() != nil {
		doc.set("error", errorObject(errwire.FromDetail(res.GetError(), res.GetMessage())))
	}
	return printJSON(s.a.io.Out, doc)
}
