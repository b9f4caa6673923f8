package main

import (
	"context"
	"errors"
	"fmt"
	"maps"
	"os/signal"
	"slices"
	"strings"
	"syscall"
	"time"

	"github.com/spf13/cobra"

	"github.com/sandsea/sandsea/api/errdefs"
	sandseav1 "github.com/sandsea/sandsea/api/sandsea/v1"
	"github.com/sandsea/sandsea/client"
	"github.com/sandsea/sandsea/cmd/sandsea/ui"
)

const (
	// runIdle ends the sandbox of a `run` whose client died.
	runIdle = 5 * time.Minute
	// readyLimit is how long the server waits for a sandbox to be ready.
	readyLimit = 30 * time.Second
	// stopLimit is how long the server takes at most for a stop, beside the grace.
	stopLimit = 30 * time.Second
	// settleLimit is how long an interrupted program waits for the server before it leaves something behind.
	settleLimit = 5 * time.Second
)

func (a *app) runCommand() *cobra.Command {
	var f specFlags
	var timeout time.Duration
	var stdin bool
	cmd := &cobra.Command{
		Use:   "run [flags] -- CMD…",
		Short: "Create a sandbox, run one command in it, stop it",
		Long: `The exit code is the command's, 128+n when signal n ended it; 124 when --timeout did, 125 when the platform failed,
126 or 127 when the command could not be started.`,
		Example: `  sandsea run -- python3 -c 'print("hello")'
  sandsea run --memory 2G --cpu 2 --timeout 60s -- sh -c 'make test'
  sandsea run --json -- echo hi
  echo hi | sandsea run -i -- cat`,
		Args: cobra.MinimumNArgs(1), Annotations: wraps,
		RunE: func(cmd *cobra.Command, args []string) error {
			spec, err := f.spec(cmd)
			if err != nil {
				return err
			}
			if spec.GetIdleMs() == 0 {
				spec.IdleMs = runIdle.Milliseconds()
			}
			sb, err := a.create(cmd, spec, f.key)
			if err != nil {
				return err
			}
			defer a.leaves("sandbox %s is left to its idle limit. End it: sandsea stop %s", short(sb.ID), short(sb.ID))()
			signal.Ignore(syscall.SIGPIPE) // a reader that has seen enough must not keep us from stopping
			out, err := a.follow(cmd.Context(), sb, &sandseav1.StartRequest{
				Command: &sandseav1.Command{Argv: args, TimeoutMs: timeout.Milliseconds()}, Stdin: stdin, Lossless: !a.json,
			})
			a.stopAfterRun(cmd.Context(), sb)
			if err != nil {
				return err
			}
			return a.finish(finished{sb.ID, "sandsea.run/1", args, timeout, spec.GetLimits().GetMemoryBytes(), out})
		},
	}
	f.register(cmd)
	cmd.Flags().Lookup("idle").Usage = fmt.Sprintf("end after so long without use, as 300s (default: %s)", ui.Span(runIdle))
	cmd.Flags().DurationVar(&timeout, "timeout", 0, "kill the command and all it started after so long (default: never)")
	cmd.Flags().BoolVarP(&stdin, "stdin", "i", false, "pass standard input on")
	cmd.Flags().SetInterspersed(false)
	return cmd
}

// stopAfterRun stops the sandbox of a run, also when the run was interrupted.
func (a *app) stopAfterRun(ctx context.Context, sb *client.Sandbox) {
	ctx, stop := context.WithTimeoutCause(context.WithoutCancel(ctx), stopLimit, errdefs.Deadline)
	defer stop()
	defer a.io.Waiting("sandbox "+short(sb.ID)+" to stop", stopLimit)()
	if err := sb.Stop(ctx); err != nil {
		a.io.Note("sandsea: sandbox %s was not stopped: %s", short(sb.ID), ui.Text(err.Error()))
	}
}

// create makes a sandbox from a spec whose image may be left out.
func (a *app) create(cmd *cobra.Command, spec *sandseav1.SandboxSpec, key string) (*client.Sandbox, error) {
	c, err := a.client()
	if err != nil {
		return nil, err
	}
	if err := a.defaultImage(cmd, spec); err != nil {
		return nil, err
	}
	a.undone = "no sandbox was made"
	if key != "" {
		a.undone = "the sandbox may exist; the same --key finds it"
	}
	defer a.io.Waiting("the sandbox to be ready", readyLimit)()
	sb, err := c.Create(cmd.Context(), spec, key)
	if e, ok := errors.AsType[*errdefs.Error](err); ok && e.Kind == errdefs.Unknown {
		if errors.Is(err, context.DeadlineExceeded) {
			e.Msg = fmt.Sprintf("create: no answer in %s, it may exist", ui.Span(a.callLimit))
		}
		exit := &exitError{code: 1, err: err}
		if key != "" {
			exit.fields = object{{"key", key}}
		}
		return nil, exit
	}
	if err != nil {
		return nil, err
	}
	a.undone = ""
	return sb, nil
}

func (a *app) createCommand() *cobra.Command {
	var f specFlags
	var count int
	var entrypoint string
	cmd := &cobra.Command{
		Use:   "create [flags] [-- CMD…]",
		Short: "Create a sandbox and print its id",
		Long: `Nothing is started in it unless asked for. CMD, or with --entrypoint image the image's ENTRYPOINT and CMD, is
started as its process 1: sandsea logs shows its output, and the sandbox ends with it.`,
		Example: `  sandsea create --image py --memory 1G --idle 300s
  sandsea create --image nginx:1.27 --entrypoint image
  sandsea create --image py -- python3 -m http.server
  sandsea create --base debian:bookworm --workspace task-17 --toolkit pytest
  sandsea create --count 64 -l job=eval-12`,
		RunE: func(cmd *cobra.Command, args []string) error {
			spec, err := f.spec(cmd)
			if err != nil {
				return err
			}
			if spec.Entrypoint, err = entrypointOf(cmd, entrypoint, args); err != nil {
				return err
			}
			if count < 1 {
				return usage(cmd, "--count %d: at least 1", count)
			}
			if count > 1 {
				return a.createMany(cmd, spec, count, f.key)
			}
			sb, err := a.create(cmd, spec, f.key)
			if err != nil {
				return err
			}
			if !a.json {
				fmt.Fprintln(a.io.Out, sb.ID)
				return nil
			}
			info, err := sb.Info(cmd.Context())
			if err != nil {
				return err
			}
			return printJSON(a.io.Out, document("sandsea.sandbox/1", info))
		},
	}
	f.register(cmd)
	cmd.Flags().IntVar(&count, "count", 1, "how many of the same")
	cmd.Flags().StringVar(&entrypoint, "entrypoint", "", "what starts by itself: idle (nothing, the default) or image")
	cmd.Flags().SetInterspersed(false)
	return cmd
}

// entrypointOf says what starts by itself: what the flag names, or argv.
func entrypointOf(cmd *cobra.Command, mode string, argv []string) (*sandseav1.Entrypoint, error) {
	switch {
	case len(argv) > 0 && mode != "":
		return nil, usage(cmd, "create: --entrypoint %s and CMD: give one of the two", ui.Text(mode))
	case len(argv) > 0:
		return &sandseav1.Entrypoint{Mode: sandseav1.EntrypointMode_ENTRYPOINT_MODE_ARGV, Argv: argv}, nil
	case mode == "", mode == "idle":
		return nil, nil
	case mode == "image":
		return &sandseav1.Entrypoint{Mode: sandseav1.EntrypointMode_ENTRYPOINT_MODE_IMAGE}, nil
	}
	return nil, usage(cmd, "--entrypoint %s: write idle or image; a command of your own goes after --", ui.Text(mode))
}

// createMany prints the ids that were made, and one line for each kind of failure with its count.
func (a *app) createMany(cmd *cobra.Command, spec *sandseav1.SandboxSpec, count int, key string) error {
	c, err := a.client()
	if err != nil {
		return err
	}
	if err := a.defaultImage(cmd, spec); err != nil {
		return err
	}
	a.undone = "those whose ids were printed exist: sandsea ls"
	failed := map[string]*sandseav1.CreateBatchResponse{}
	times := map[string]int{}
	for res, err := range c.CreateBatch(cmd.Context(), &sandseav1.CreateBatchRequest{Spec: spec, Count: int32(count), Key: key}) {
		switch {
		case err != nil:
			return err
		case res.GetSandbox() == nil:
			failed[res.GetMessage()] = res
			times[res.GetMessage()]++
		case a.json:
			if err := printJSON(a.io.Out, document("sandsea.sandbox/1", res.GetSandbox())); err != nil {
				return err
			}
		default:
			fmt.Fprintln(a.io.Out, res.GetSandbox().GetId())
		}
	}
	for _, msg := range slices.Sorted(maps.Keys(failed)) {
		a.complainOf(failed[msg].GetError(), msg, times[msg])
	}
	if len(failed) > 0 {
		return &exitError{code: 1}
	}
	return nil
}

// startDetached prints the number of a command that goes on without us. The stream ends when it has begun, so that the
// list of processes must tell whether it could be started at all.
func (a *app) startDetached(ctx context.Context, sb *client.Sandbox, req *sandseav1.StartRequest) error {
	out := &outcome{}
	for ev, err := range sb.Start(ctx, req) {
		if err != nil {
			return err
		}
		if p := ev.GetStarted(); p != nil {
			out.number.Store(p.GetNumber())
		}
	}
	number := out.number.Load()
	if number == 0 {
		return errdefs.New(errdefs.Unavailable, "", "the stream ended before the command started")
	}
	procs, err := sb.Processes(ctx)
	if err != nil {
		a.io.Note("sandsea: whether process %d runs is not known: %s", number, ui.Text(err.Error()))
	}
	for _, p := range procs {
		if p.GetNumber() == number && p.GetResult().GetStartFailure() != nil {
			out.result = p.GetResult()
			return a.finish(finished{sb.ID, "sandsea.exec/1", req.GetCommand().GetArgv(), 0, 0, out})
		}
	}
	if a.json {
		return printJSON(a.io.Out, object{{"schema", "sandsea.process/1"}, {"sandbox", sb.ID}, {"number", number}})
	}
	fmt.Fprintln(a.io.Out, number)
	return nil
}

// finished is what there is to report about a command.
type finished struct {
	sandbox, schema string
	argv            []string
	timeout         time.Duration
	memory          int64 // the limit that was asked for, 0 for the default or when it is not known here
	*outcome
}

// finish reports how a command ended and chooses the exit code.
func (a *app) finish(f finished) error {
	code := int(f.result.GetExitCode())
	if f.result.GetInfraError() != "" {
		code = exitPlatform
	}
	trouble := f.trouble()
	if a.json {
		if err := printJSON(a.io.Out, f.document(trouble)); err != nil {
			return err
		}
	} else if trouble != nil {
		a.io.Note("sandsea: %s (exit %d)", ui.Text(trouble.Error()), code)
	}
	if code == 0 {
		return nil
	}
	return &exitError{code: code, inside: true}
}

// trouble is what we have to say about the end of a command, nil when its own output says it all.
func (f finished) trouble() *errdefs.Error {
	r, object := f.result, "sandbox "+short(f.sandbox)
	switch {
	case r.GetInfraError() != "":
		return errdefs.New(errdefs.Internal, object, "%s", r.GetInfraError()).WithHint("Platform fault, not the command's")
	case r.GetStartFailure().GetKind() == "not_found" && !strings.Contains(f.argv[0], "/"):
		return errdefs.New(errdefs.Invalid, "", "exec: %q not in PATH of %s", f.argv[0], short(f.sandbox)).WithHint("%s", startHint("not_found"))
	case r.GetStartFailure() != nil:
		return errdefs.New(errdefs.Invalid, "", "exec: %s", r.GetStartFailure().GetMessage()).WithHint("%s", startHint(r.GetStartFailure().GetKind()))
	case r.GetTimedOut():
		return errdefs.New(errdefs.Deadline, "", "timed out after %s, all its processes ended", ui.Span(f.timeout)).WithHint("Raise --timeout")
	case r.GetOom() && strings.HasPrefix(f.schema, "sandsea.run/"):
		limit := f.memory
		if limit == 0 {
			limit = 512 << 20 // the API's default
		}
		return errdefs.New(errdefs.Exhausted, object, "out of memory, limit %s", ui.LongSize(limit)).WithHint("Raise --memory")
	case r.GetOom():
		return errdefs.New(errdefs.Exhausted, object, "out of memory").WithHint("See its limit: sandsea inspect %s", short(f.sandbox))
	case f.end != nil:
		return errdefs.New(errdefs.FailedPrecondition, object, "ended: %s", endWord(f.end)).WithHint("See: sandsea inspect %s", short(f.sandbox))
	}
	return nil
}

func startHint(kind string) string {
	switch kind {
	case "not_found":
		return "Give its path, or an image with it"
	case "not_executable":
		return "Make it executable, or name its interpreter"
	case "bad_interpreter":
		return "Install the interpreter of its first line"
	case "argument_too_long":
		return "Pass it by file or standard input"
	case "cwd":
		return "Make the directory, or choose another: --workdir"
	case "user":
		return "Add the user, or choose another: --user"
	}
	return "See: sandsea inspect"
}

// document is the result for programs.
func (f finished) document(trouble *errdefs.Error) object {
	out := object{
		{"schema", f.schema}, {"sandbox", f.sandbox}, {"number", f.number.Load()}, {"exit_code", nil}, {"signal", nil}, {"cause", f.cause()},
	}
	out.setBytes("stdout", f.stdout)
	out.setBytes("stderr", f.stderr)
	for _, m := range members(f.result.ProtoReflect()) {
		if m.name != "signal" && m.name != "signal_name" {
			out.set(m.name, m.value)
		}
	}
	if name := f.result.GetSignalName(); name != "" {
		out.set("signal", name)
	}
	if f.cut {
		out.set("truncated", true)
	}
	if trouble != nil {
		out.set("message", trouble.Error())
	}
	return out
}

// cause is one word for how a command ended.
func (f finished) cause() string {
	switch r := f.result; {
	case r.GetInfraError() != "":
		return "infra"
	case r.GetStartFailure() != nil:
		return "start_failure"
	case r.GetTimedOut():
		return "timeout"
	case r.GetOom():
		return "oom"
	case r.GetSignal() != 0:
		return "signal"
	}
	return "completed"
}
