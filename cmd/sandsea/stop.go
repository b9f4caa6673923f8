package main

import (
	"context"
	"fmt"
	"time"

	"github.com/spf13/cobra"

	"github.com/sandsea/sandsea/api/errdefs"
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
				return usage("stop: name sandboxes, or say --all or -l k=v")
			}
			want, err := pairs("label", labels)
			if err != nil {
				return err
			}
			c, err := a.client()
			if err != nil {
				return err
			}
			ids := args
			if len(args) == 0 {
				if ids, err = a.chosen(cmd.Context(), c, want, dry); err != nil || len(ids) == 0 {
					return err
				}
			} else {
				for i := range ids {
					if ids[i], err = c.Resolve(cmd.Context(), ids[i]); err != nil {
						return err
					}
				}
			}
			if dry {
				return nil
			}
			return a.stop(cmd.Context(), c, ids, grace)
		},
	}
	cmd.Flags().BoolVar(&all, "all", false, "every sandbox of the project")
	cmd.Flags().BoolVar(&dry, "dry-run", false, "only list what would end")
	cmd.Flags().StringArrayVarP(&labels, "label", "l", nil, "those with this label, as k=v")
	cmd.Flags().DurationVar(&grace, "grace", 0, "time between SIGTERM and SIGKILL")
	return cmd
}

// chosen lists the sandboxes that labels choose and asks whether to end them.
func (a *app) chosen(ctx context.Context, c *client.Client, labels map[string]string, dry bool) ([]string, error) {
	var ids []string
	fresh := 0
	for sb, err := range c.List(ctx, &sandseav1.ListSandboxesRequest{Labels: labels}) {
		if err != nil {
			return nil, err
		}
		ids = append(ids, sb.GetId())
		if sb.GetIdleForMs() < 10_000 {
			fresh++
		}
	}
	if len(ids) == 0 {
		a.io.Note("No sandboxes to stop.")
		return nil, nil
	}
	a.io.Note("%d sandboxes; %d were used just now", len(ids), fresh)
	if dry {
		for _, id := range ids {
			fmt.Fprintln(a.io.Out, id)
		}
		return ids, nil
	}
	yes, asked := a.io.Ask(fmt.Sprintf("Stop all %d? Their files are lost, their logs stay.", len(ids)))
	if !asked {
		return nil, &exitError{code: 2, err: errdefs.New(errdefs.FailedPrecondition, "",
			"stop: %d sandboxes; no terminal to ask on", len(ids)).WithHint("Add --yes")}
	}
	if !yes {
		return nil, nil
	}
	return ids, nil
}

func (a *app) stop(ctx context.Context, c *client.Client, ids []string, grace time.Duration) error {
	began := time.Now()
	var failed []error
	done := 0
	for res, err := range c.StopMany(ctx, &sandseav1.StopManyRequest{Ids: ids, GraceMs: grace.Milliseconds()}) {
		switch {
		case err != nil:
			return err
		case res.GetError() != nil:
			failed = append(failed, fmt.Errorf("%s: %s", short(res.GetId()), res.GetMessage()))
		default:
			done++
		}
		if a.json {
			doc, err := document("sandsea.stop/1", res)
			if err != nil {
				return err
			}
			if err := printJSON(a.io.Out, doc); err != nil {
				return err
			}
		}
	}
	for _, err := range failed {
		a.io.Note("sandsea: %s", ui.Text(err.Error()))
	}
	if !a.json {
		a.io.Note("stopped %d in %s", done, ui.Took(time.Since(began)))
	}
	if len(failed) > 0 {
		return &exitError{code: 1}
	}
	return nil
}
