// Command sandsea is the platform in one binary: the daemons, and the client for people and scripts. It is the only
// place that reads flags, configuration files and the environment, and that wires the parts together.
package main

import (
	"context"
	"fmt"
	"os"
	"slices"
	"strings"
	"sync/atomic"
	"time"

	"github.com/spf13/cobra"

	"github.com/sandsea/sandsea/api/errdefs"
	"github.com/sandsea/sandsea/client"
	"github.com/sandsea/sandsea/cmd/sandsea/ui"
	"github.com/sandsea/sandsea/internal/version"
)

// app is what every command shares.
type app struct {
	io    *ui.IO
	now   func() time.Time
	json  bool
	color string
	yes   bool
	// undone says in what state an interrupt leaves things, as "no image was made". Empty when nothing was to change.
	undone string
	// onInterrupt, when set, is offered the first interrupt before the context gets it.
	onInterrupt atomic.Pointer[func(os.Signal) bool]
	// left is what a program that is made to leave at once says about what it leaves.
	left atomic.Pointer[string]
	// atExit, when set, gives the terminal back before the program leaves at once.
	atExit atomic.Pointer[func()]
	// clients are those that were made, for settle.
	clients []*client.Client
	// callLimit is how long a call that is no stream may take.
	callLimit time.Duration
}

func main() { os.Exit(run(os.Args[1:])) }

func run(args []string) int {
	a := &app{io: ui.Stdio(os.Getenv), now: time.Now}
	ctx, stop := a.interrupted()
	defer stop()
	root := a.root()
	root.SetArgs(args)
	cmd, err := root.ExecuteContextC(ctx)
	if ctx.Err() != nil {
		a.settle(context.WithoutCancel(ctx))
	}
	return a.exitCode(ctx, cmd, err)
}

func (a *app) root() *cobra.Command {
	root := &cobra.Command{
		Use:   "sandsea",
		Short: "Thousands of isolated, stateful computers for agents",
		Example: `  sudo sandsea up
  sandsea image import debian:bookworm --include python3,git
  sandsea run -- python3 -c 'print("hello")'`,
		SilenceUsage:      true,
		SilenceErrors:     true,
		PersistentPreRunE: func(cmd *cobra.Command, _ []string) error { return a.prepare(cmd) },
	}
	root.SetOut(a.io.Out)
	root.SetErr(a.io.Err)
	root.SetFlagErrorFunc(flagError)
	root.SetHelpFunc(a.printHelp)
	root.PersistentFlags().BoolVar(&a.json, "json", false, "print one JSON document (one per line for streams)")
	root.PersistentFlags().StringVar(&a.color, "color", "auto", "colour states: auto, always or never")
	root.PersistentFlags().BoolVar(&a.yes, "yes", false, "answer yes to every question")
	root.AddCommand(
		a.upCommand(), a.serverCommand(), a.edgeCommand(), a.downCommand(), a.doctorCommand(),
		a.runCommand(), a.createCommand(), a.execCommand(), a.shellCommand(), a.cpCommand(),
		a.lsCommand(), a.topCommand(), a.inspectCommand(), a.logsCommand(), a.eventsCommand(), a.netCommand(),
		a.endpointCommand(), a.stopCommand(),
		a.imageCommand(), a.nodeCommand(), a.whoamiCommand(), a.configCommand(), a.benchCommand(), a.versionCommand(),
		a.completionCommand(), a.keeperCommand(), a.spawnerCommand(), a.aetherCommand(),
	)
	root.SetHelpCommand(helpCommand(root))
	root.CompletionOptions.DisableDefaultCmd = true
	strict(root)
	return root
}

// prepare uses the global flags before a command runs.
func (a *app) prepare(cmd *cobra.Command) error {
	if !slices.Contains([]string{"auto", "always", "never"}, a.color) {
		return usage(cmd, "--color %s: auto, always or never", ui.Text(a.color))
	}
	a.io.UseColor(a.color, os.Getenv)
	a.io.Yes, a.io.Quiet = a.yes, a.json
	if !cmd.Hidden {
		a.noteUnknownVariables()
	}
	return nil
}

// variables are the environment variables that we read; SANDSEA_REQUIRE is for our own tests.
var variables = []string{
	"SANDSEA_URL", "SANDSEA_TOKEN", "SANDSEA_TOKEN_FILE", "SANDSEA_PROJECT", "SANDSEA_TIMEOUT", "SANDSEA_DEBUG",
	"SANDSEA_DATA", "SANDSEA_LISTEN", "SANDSEA_LOG_LEVEL", "SANDSEA_REQUIRE",
}

// noteUnknownVariables says which variables look like ours and are not, since a typo there would have no effect.
func (a *app) noteUnknownVariables() {
	for _, kv := range os.Environ() {
		name, _, _ := strings.Cut(kv, "=")
		if !strings.HasPrefix(name, "SANDSEA_") || slices.Contains(variables, name) {
			continue
		}
		hint := ""
		if near := ui.Nearest(name, variables); near != "" {
			hint = ". Did you mean " + near + "?"
		}
		a.io.Note("sandsea: unknown variable %s is ignored%s", ui.Text(name), hint)
	}
}

// resolve finds a sandbox's full id. An id that is too short or fits several is a mistake of the command line.
func (a *app) resolve(ctx context.Context, c *client.Client, prefix string) (string, error) {
	id, err := c.Resolve(ctx, prefix)
	if errdefs.KindOf(err) != errdefs.Invalid {
		return id, err
	}
	exit := &exitError{code: 2, err: err}
	if near := errdefs.From(err).Near; len(near) > 0 {
		exit.fields = object{{"candidates", near}}
	}
	return "", exit
}

// sandbox connects and finds a sandbox.
func (a *app) sandbox(ctx context.Context, prefix string) (*client.Sandbox, error) {
	c, err := a.client()
	if err != nil {
		return nil, err
	}
	id, err := a.resolve(ctx, c, prefix)
	if err != nil {
		return nil, err
	}
	return c.Sandbox(id), nil
}

func (a *app) versionCommand() *cobra.Command {
	return &cobra.Command{
		Use: "version", Short: "Print the version", Args: cobra.NoArgs,
		Example: "  sandsea version\n  sandsea version --json",
		RunE: func(*cobra.Command, []string) error {
			if a.json {
				return printJSON(a.io.Out, object{{"schema", "sandsea.version/1"}, {"version", version.String()}})
			}
			fmt.Fprintln(a.io.Out, "sandsea", version.String())
			return nil
		},
	}
}

// completeID offers the ids of live sandboxes for the first argument, completeIDs for every one; nothing when the server
// does not answer at once.
func (a *app) completeID(cmd *cobra.Command, args []string, prefix string) ([]string, cobra.ShellCompDirective) {
	if len(args) > 0 {
		return nil, cobra.ShellCompDirectiveNoFileComp
	}
	return a.completeIDs(cmd, args, prefix)
}

func (a *app) completeIDs(cmd *cobra.Command, args []string, prefix string) ([]string, cobra.ShellCompDirective) {
	ctx, stop := context.WithTimeoutCause(cmd.Context(), 200*time.Millisecond, errdefs.Deadline)
	defer stop()
	c, err := a.client()
	if err != nil {
		return nil, cobra.ShellCompDirectiveNoFileComp
	}
	var out []string
	for sb, err := range c.List(ctx, nil) {
		if err != nil {
			break
		}
		if id := short(sb.GetId()); strings.HasPrefix(id, prefix) && !slices.Contains(args, id) {
			out = append(out, id)
		}
	}
	return out, cobra.ShellCompDirectiveNoFileComp
}

func short(id string) string { return id[:min(8, len(id))] }
