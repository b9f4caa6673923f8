// Command sandsea is the platform in one binary: the daemons, and the client for people and scripts. It is the only
// place that reads flags, configuration files and the environment, and that wires the parts together.
package main

import (
	"context"
	"errors"
	"fmt"
	"os"
	"os/signal"
	"slices"
	"strings"
	"sync/atomic"
	"syscall"
	"time"

	"github.com/spf13/cobra"
	"github.com/spf13/pflag"

	"github.com/sandsea/sandsea/api/errdefs"
	"github.com/sandsea/sandsea/client"
	"github.com/sandsea/sandsea/cmd/sandsea/ui"
	"github.com/sandsea/sandsea/internal/version"
)

// app is what every command shares.
type app struct {
	io    *ui.IO
	json  bool
	color string
	yes   bool
	// wrapped marks commands whose exit codes belong to the command inside: our own failures are 125.
	wrapped bool
	// onInterrupt, when set, takes the first Ctrl-C instead of the context.
	onInterrupt atomic.Pointer[func()]
}

// exitError ends the program with a code; text, when not empty, is printed first.
type exitError struct {
	code int
	err  error
	// inside: the code is that of the command in the sandbox.
	inside bool
}

func (e *exitError) Error() string {
	if e.err == nil {
		return fmt.Sprintf("exit %d", e.code)
	}
	return e.err.Error()
}

func (e *exitError) Unwrap() error { return e.err }

func main() { os.Exit(run(os.Args[1:])) }

func run(args []string) int {
	a := &app{}
	ctx, stop := a.interrupted()
	defer stop()
	root := a.root()
	root.SetArgs(args)
	err := root.ExecuteContext(ctx)
	if a.io == nil {
		a.io = ui.Stdio(a.color, os.Getenv)
	}
	return a.exitCode(ctx, err)
}

// errInterrupted is the cause of a context that Ctrl-C or SIGTERM ended.
var errInterrupted = errors.New("interrupted")

// interrupted gives a context that the first SIGINT or SIGTERM cancels, unless onInterrupt takes it; a second one within
// two seconds ends the program.
func (a *app) interrupted() (context.Context, func()) {
	ctx, cancel := context.WithCancelCause(context.Background())
	ch := make(chan os.Signal, 2)
	signal.Notify(ch, os.Interrupt, syscall.SIGTERM)
	go func() {
		var last time.Time
		for range ch {
			if time.Since(last) < 2*time.Second {
				os.Exit(130)
			}
			last = time.Now()
			if take := a.onInterrupt.Load(); take != nil && ctx.Err() == nil {
				(*take)()
				continue
			}
			cancel(errInterrupted)
		}
	}()
	return ctx, func() {
		signal.Stop(ch)
		close(ch)
		cancel(nil)
	}
}

func (a *app) root() *cobra.Command {
	root := &cobra.Command{
		Use:   "sandsea",
		Short: "Thousands of isolated, stateful computers for agents",
		Example: `  sudo sandsea up
  sandsea image import debian:bookworm --include python3,git
  sandsea run -- python3 -c 'print("hello")'`,
		SilenceUsage:  true,
		SilenceErrors: true,
		Args:          cobra.NoArgs,
		RunE:          func(cmd *cobra.Command, _ []string) error { return cmd.Help() },
		PersistentPreRun: func(*cobra.Command, []string) {
			a.io = ui.Stdio(a.color, os.Getenv)
			a.io.Yes = a.yes
		},
	}
	root.SetFlagErrorFunc(func(cmd *cobra.Command, err error) error { return flagError(cmd, err) })
	root.PersistentFlags().BoolVar(&a.json, "json", false, "print one JSON document (one per line for streams)")
	root.PersistentFlags().StringVar(&a.color, "color", "auto", "colour states: auto, always or never")
	root.PersistentFlags().BoolVar(&a.yes, "yes", false, "answer yes to every question")
	root.AddCommand(
		a.upCommand(), a.downCommand(), a.doctorCommand(),
		a.runCommand(), a.createCommand(), a.execCommand(), a.cpCommand(),
		a.lsCommand(), a.inspectCommand(), a.logsCommand(), a.eventsCommand(), a.stopCommand(),
		a.imageCommand(), a.nodeCommand(), a.whoamiCommand(), a.benchCommand(), a.versionCommand(),
		a.keeperCommand(), a.spawnerCommand(),
	)
	root.SuggestionsMinimumDistance = 2
	root.CompletionOptions.HiddenDefaultCmd = true
	for _, c := range root.Commands() {
		if c.HasSubCommands() && c.RunE == nil {
			c.Args = cobra.NoArgs
			c.RunE = func(cmd *cobra.Command, args []string) error { return cmd.Help() }
		}
	}
	return root
}

// flagError says which flag was meant.
func flagError(cmd *cobra.Command, err error) error {
	e := errdefs.New(errdefs.Invalid, "", "%s", err.Error()).WithHint("See: %s --help", cmd.CommandPath())
	if name, ok := strings.CutPrefix(err.Error(), "unknown flag: --"); ok {
		var known []string
		cmd.Flags().VisitAll(func(f *pflag.Flag) { known = append(known, f.Name) })
		e.Msg, e.Field = "unknown flag --"+name, name
		if near := ui.Nearest(name, known); near != "" {
			e = e.WithHint("Did you mean --%s?", near)
		}
	}
	return &exitError{code: 2, err: e}
}

// usage makes an error of the command line itself: exit 2, nothing done.
func usage(format string, args ...any) error {
	return &exitError{code: 2, err: errdefs.New(errdefs.Invalid, "", format, args...)}
}

// exitCode prints err once and chooses the exit code.
func (a *app) exitCode(ctx context.Context, err error) int {
	if err == nil {
		return 0
	}
	code := 1
	exit, chosen := errors.AsType[*exitError](err)
	if chosen {
		code, err = exit.code, exit.err
	}
	if err == nil {
		return code
	}
	if errors.Is(err, syscall.EPIPE) {
		return 0
	}
	if errors.Is(context.Cause(ctx), errInterrupted) {
		fmt.Fprintln(a.io.Err, "interrupted:", ui.Text(firstLine(err.Error())))
		return 130
	}
	e := errdefs.From(err)
	if name, ok := strings.CutPrefix(e.Msg, "unknown command "); ok {
		word, _, _ := strings.Cut(strings.TrimPrefix(name, `"`), `"`)
		e = errdefs.New(errdefs.Invalid, "", "unknown command %q", word).WithHint("All: sandsea --help")
		var known []string
		for _, c := range a.root().Commands() {
			known = append(known, c.Name())
		}
		if near := ui.Nearest(word, known); near != "" {
			e = e.WithHint("Did you mean %s?", near)
		}
		code = 2
	}
	if a.wrapped && !chosen || a.wrapped && !exit.inside {
		code = 125
	}
	if a.json {
		printJSONError(a.io.Err, e)
		return code
	}
	fmt.Fprintln(a.io.Err, "sandsea: "+ui.Text(e.Error()))
	return code
}

func firstLine(s string) string {
	line, _, _ := strings.Cut(s, "\n")
	return line
}

// client connects to the server that the environment names.
func (a *app) client() (*client.Client, error) {
	return client.New(client.Config{})
}

func (a *app) versionCommand() *cobra.Command {
	return &cobra.Command{
		Use: "version", Short: "Print the version", Args: cobra.NoArgs,
		RunE: func(*cobra.Command, []string) error {
			if a.json {
				return printJSON(a.io.Out, map[string]string{"schema": "sandsea.version/1", "version": version.String()})
			}
			fmt.Fprintln(a.io.Out, "sandsea", version.String())
			return nil
		},
	}
}

// completeIDs offers the ids of live sandboxes, or nothing when the server does not answer at once.
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
