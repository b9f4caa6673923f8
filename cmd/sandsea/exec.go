package main

import (
	"context"
	"fmt"
	"os"
	"time"

	"github.com/spf13/cobra"

	"github.com/sandsea/sandsea/api/errdefs"
	sandseav1 "github.com/sandsea/sandsea/api/sandsea/v1"
	"github.com/sandsea/sandsea/client"
)

// commandFlags say how a command runs in a sandbox that exists.
type commandFlags struct {
	user, workdir string
	env           []string
}

func (f *commandFlags) register(cmd *cobra.Command) {
	fl := cmd.Flags()
	fl.StringVarP(&f.user, "user", "u", "", "name, uid or uid:gid (default: the sandbox's)")
	fl.StringVarP(&f.workdir, "workdir", "w", "", "working directory")
	fl.StringArrayVarP(&f.env, "env", "e", nil, "environment variable, as K=V")
}

func (f *commandFlags) command(argv []string) (*sandseav1.Command, error) {
	vars, err := pairs("env", f.env)
	if err != nil {
		return nil, err
	}
	return &sandseav1.Command{Argv: argv, Env: vars, User: f.user, Cwd: f.workdir}, nil
}

const terminalKeys = `On a terminal every key is the command's, Ctrl-C too, and the command outlives a lost link and its client. ~. at the
beginning of a line detaches, ~? lists the keys.`

func (a *app) execCommand() *cobra.Command {
	var f commandFlags
	var key string
	var timeout time.Duration
	var stdin, detach, tty bool
	var number int64
	cmd := &cobra.Command{
		Use:   "exec [flags] ID -- CMD…",
		Short: "Run a command in a sandbox",
		Long: `The exit code is the command's, 128+n when signal n ended it; 124 when --timeout did, 125 when the platform failed,
126 or 127 when the command could not be started.

` + terminalKeys,
		Example: `  sandsea exec s7q3k2m5 -- pytest -q
  sandsea exec -it s7q3k2m5 -- python3
  sandsea exec --attach 3 s7q3k2m5                  # comes back to process 3
  sandsea exec --detach s7q3k2m5 -- ./server.sh     # prints the process number
  tar c src | sandsea exec -i s7q3k2m5 -- tar x -C /w`,
		Args: func(cmd *cobra.Command, args []string) error {
			if cmd.Flags().Changed("attach") {
				return cobra.ExactArgs(1)(cmd, args)
			}
			return cobra.MinimumNArgs(2)(cmd, args)
		},
		Annotations: wraps, ValidArgsFunction: a.completeID,
		RunE: func(cmd *cobra.Command, args []string) error {
			if cmd.Flags().Changed("attach") {
				return a.comeBack(cmd, args[0], number, stdin)
			}
			argv := args[1:]
			if argv[0] == "--" {
				argv = argv[1:]
			}
			if len(argv) == 0 {
				return usage(cmd, "exec: no command")
			}
			command, err := f.command(argv)
			if err != nil {
				return err
			}
			command.TimeoutMs = timeout.Milliseconds()
			req := &sandseav1.StartRequest{
				Command: command, Stdin: stdin, Detached: detach, Key: key, Lossless: !detach && !tty && !a.json,
			}
			if tty {
				if err := a.wantsTerminal(cmd, "exec -t", "Drop -t", req); err != nil {
					return err
				}
			}
			sb, err := a.sandbox(cmd.Context(), args[0])
			if err != nil {
				return err
			}
			if detach {
				return a.startDetached(cmd.Context(), sb, req)
			}
			return a.execute(cmd.Context(), sb, req)
		},
	}
	f.register(cmd)
	fl := cmd.Flags()
	fl.DurationVar(&timeout, "timeout", 0, "kill the command and all it started after so long")
	fl.BoolVarP(&stdin, "stdin", "i", false, "pass standard input on")
	fl.BoolVarP(&tty, "tty", "t", false, "on a terminal; passes input on too")
	fl.BoolVar(&detach, "detach", false, "do not wait: print the process number")
	fl.Int64Var(&number, "attach", 0, "come back to the process with this number, instead of starting one")
	fl.StringVar(&key, "key", "", "idempotency key: the same key gives the same process")
	fl.SetInterspersed(false)
	cmd.MarkFlagsMutuallyExclusive("attach", "detach")
	return cmd
}

// loginShell runs the user's start-up files as a login does, and then the image's shell: bash if there is one, else sh.
// The image's PATH stays in front, so that what `exec` finds is found here.
const loginShell = `p=$PATH; export p; s=sh; if command -v bash >/dev/null 2>&1; then s=bash; fi
exec "$s" -lc 'case $PATH in "$p") ;; *) PATH=$p:$PATH ;; esac; unset p; exec "$0" -i' "$s"`

func (a *app) shellCommand() *cobra.Command {
	var f commandFlags
	cmd := &cobra.Command{
		Use: "shell ID", Short: "Open a shell in a sandbox", Args: cobra.ExactArgs(1),
		Long:        "The image's shell on a terminal: bash if there is one, else sh. The exit code is the shell's.\n\n" + terminalKeys,
		Example:     "  sandsea shell s7q3k2m5\n  sandsea shell -u nobody -w /work s7q3k2m5",
		Annotations: wraps, ValidArgsFunction: a.completeID,
		RunE: func(cmd *cobra.Command, args []string) error {
			command, err := f.command([]string{"/bin/sh", "-c", loginShell})
			if err != nil {
				return err
			}
			req := &sandseav1.StartRequest{Command: command}
			if err := a.wantsTerminal(cmd, "shell", "For scripts: sandsea exec -i ID -- sh", req); err != nil {
				return err
			}
			sb, err := a.sandbox(cmd.Context(), args[0])
			if err != nil {
				return err
			}
			return a.execute(cmd.Context(), sb, req)
		},
	}
	f.register(cmd)
	return cmd
}

// wantsTerminal makes a request one for a terminal, or says why there can be none.
func (a *app) wantsTerminal(cmd *cobra.Command, what, hint string, req *sandseav1.StartRequest) error {
	if !a.io.InTTY {
		return misuse(errdefs.New(errdefs.Invalid, "", "%s: stdin is no terminal", what).WithField("tty", "").WithHint("%s", hint))
	}
	if a.json {
		return usage(cmd, "%s: a terminal and --json do not go together", what)
	}
	columns, rows := a.io.Size()
	req.Terminal = client.Terminal(uint32(columns), uint32(rows))
	env := req.GetCommand().GetEnv()
	if term := os.Getenv("TERM"); term != "" && env["TERM"] == "" {
		env["TERM"] = term
	}
	if req.GetKey() == "" {
		req.Key = newKey()
	}
	return nil
}

// execute starts a command and stays with it to its end.
func (a *app) execute(ctx context.Context, sb *client.Sandbox, req *sandseav1.StartRequest) error {
	follow := a.follow
	if req.GetTerminal() != nil {
		follow = func(ctx context.Context, sb *client.Sandbox, req *sandseav1.StartRequest) (*outcome, error) {
			return a.interact(ctx, sb, req, 0)
		}
	}
	out, err := follow(ctx, sb, req)
	if err != nil {
		return err
	}
	return a.finish(finished{
		sandbox: sb.ID, schema: "sandsea.exec/1", argv: req.GetCommand().GetArgv(),
		timeout: time.Duration(req.GetCommand().GetTimeoutMs()) * time.Millisecond, outcome: out,
	})
}

// comeBack takes up a command that runs, or ran: on its terminal if it has one and we have one, else from the beginning
// of its record.
func (a *app) comeBack(cmd *cobra.Command, id string, number int64, stdin bool) error {
	ctx := cmd.Context()
	sb, err := a.sandbox(ctx, id)
	if err != nil {
		return err
	}
	p, err := findProcess(ctx, sb, number)
	if err != nil {
		return err
	}
	var out *outcome
	if p.GetTerminal() != nil && a.io.InTTY && !a.json {
		out, err = a.interact(ctx, sb, nil, number)
	} else {
		out, err = a.followAgain(ctx, sb, number, stdin && p.GetInputOpen())
	}
	if err != nil {
		return err
	}
	return a.finish(finished{
		sandbox: sb.ID, schema: "sandsea.exec/1", argv: p.GetCommand().GetArgv(),
		timeout: time.Duration(p.GetCommand().GetTimeoutMs()) * time.Millisecond, outcome: out,
	})
}

// followAgain passes a command's whole record on, and stays with it to its end.
func (a *app) followAgain(ctx context.Context, sb *client.Sandbox, number int64, stdin bool) (*outcome, error) {
	out := &outcome{}
	out.number.Store(number)
	defer a.forwardSignals(ctx, sb, out)()
	defer a.tellGap(out)
	ctx, cancel := context.WithCancelCause(ctx)
	defer cancel(nil)
	if stdin {
		offset, err := sb.SendInput(ctx, number, 0, nil)
		if err != nil {
			return nil, err
		}
		go a.feed(ctx, cancel, sb, number, offset)
	}
	return out, unfed(ctx, a.passAll(ctx, sb, out, sb.Attach(ctx, out.rest()), nil))
}

// findProcess gives what is known of a sandbox's process.
func findProcess(ctx context.Context, sb *client.Sandbox, number int64) (*sandseav1.Process, error) {
	procs, err := sb.Processes(ctx)
	if err != nil {
		return nil, err
	}
	for _, p := range procs {
		if p.GetNumber() == number {
			return p, nil
		}
	}
	return nil, errdefs.New(errdefs.NotFound, fmt.Sprintf("process %d", number), "none in sandbox %s", short(sb.ID)).
		WithHint("All: sandsea inspect %s", short(sb.ID))
}
