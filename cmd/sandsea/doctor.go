package main

import (
	"fmt"
	"log/slog"
	"os"

	"github.com/spf13/cobra"

	"github.com/sandsea/sandsea/api/errdefs"
	"github.com/sandsea/sandsea/cmd/sandsea/ui"
	"github.com/sandsea/sandsea/internal/edge/probe"
	"github.com/sandsea/sandsea/internal/node"
)

func (a *app) doctorCommand() *cobra.Command {
	var data string
	cmd := &cobra.Command{
		Use: "doctor", Short: "Say what this machine enforces and by which mechanism", Args: cobra.NoArgs,
		Long: `Tries every feature that the container backend needs and says what was found. Exit 0 when it can enforce all that it
promises, 1 when something is missing, with a line for each.`,
		Example: "  sudo sandsea doctor\n  sudo sandsea doctor --json | jq '.features[] | select(.status != \"ok\")'",
		RunE: func(cmd *cobra.Command, _ []string) error {
			if os.Geteuid() != 0 {
				return errdefs.New(errdefs.Denied, "", "doctor tries kernel features and needs root").WithHint("Run: sudo sandsea doctor")
			}
			c, err := probe.Machine(cmd.Context(), data, slog.New(slog.DiscardHandler))
			if err != nil {
				return err
			}
			line, good := probe.Summary(c)
			if a.json {
				if err := printJSON(a.io.Out, doctorDocument(c, line, good)); err != nil {
					return err
				}
			} else {
				a.printFeatures(c)
				fmt.Fprintln(a.io.Out, line)
			}
			if !good {
				return &exitError{code: 1}
			}
			return nil
		},
	}
	cmd.Flags().StringVar(&data, "data", defaultServerConfig().Data, "data directory that would be used")
	return cmd
}

func (a *app) printFeatures(c node.Capabilities) {
	fmt.Fprintf(a.io.Out, "node  Linux %s, %d CPUs, %s, cgroup %s\n", c.Kernel, c.CPUs, ui.LongSize(c.Memory), c.Cgroup)
	for _, f := range c.Features {
		word, color := "ok", ui.Green
		switch {
		case f.Status == node.Slower:
			word, color = "warn", ui.Yellow
		case f.Status != node.OK && f.Optional:
			word, color = "info", ui.Yellow
		case f.Status != node.OK:
			word, color = "FAIL", ui.Red
		}
		fmt.Fprintf(a.io.Out, "%s  %-17s %s\n", a.io.Paint(color, fmt.Sprintf("%-4s", word)), f.Name, ui.Text(f.Mechanism))
		if f.Fix != "" && f.Status != node.OK {
			fmt.Fprintf(a.io.Out, "      %-17s fix: %s\n", "", ui.Text(f.Fix))
		}
	}
}

func doctorDocument(c node.Capabilities, line string, good bool) object {
	features := make([]object, 0, len(c.Features))
	for _, f := range c.Features {
		features = append(features, object{
			{"name", f.Name}, {"status", string(f.Status)}, {"mechanism", f.Mechanism}, {"fix", f.Fix}, {"optional", f.Optional},
		})
	}
	return object{
		{"schema", "sandsea.doctor/1"},
		{"kernel", c.Kernel},
		{"cpus", c.CPUs},
		{"memory_bytes", c.Memory},
		{"cgroup", c.Cgroup},
		{"features", features},
		{"container", object{{"enforces_all", good}, {"summary", line}}},
	}
}
