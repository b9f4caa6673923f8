package main

import (
	"context"
	"encoding/base64"
	"errors"
	"fmt"
	"strconv"
	"strings"
	"syscall"
	"time"
	"unicode/utf8"

	"github.com/spf13/cobra"

	"github.com/sandsea/sandsea/api/errdefs"
	sandseav1 "github.com/sandsea/sandsea/api/sandsea/v1"
	"github.com/sandsea/sandsea/client"
	"github.com/sandsea/sandsea/cmd/sandsea/ui"
)

// runIdle ends the sandbox of a `run` whose client died.
const runIdle = 5 * time.Minute

func (a *app) runCommand() *cobra.Command {
	var f specFlags
	var timeout time.Duration
	var stdin bool
	cmd := &cobra.Command{
		Use:   "run [flags] -- CMD…",
		Short: "Create a sandbox, run one command in it, stop it",
		Example: `  sandsea run -- python3 -c 'print("hello")'
  sandsea run --memory 2G --cpu 2 --timeout 60s -- sh -c 'make test'
  sandsea run --json -- echo hi
  echo hi | sandsea run -i -- cat`,
		Args: cobra.MinimumNArgs(1),
		RunE: func(cmd *cobra.Command, args []string) error {
			a.wrapped = true
			spec, err := f.spec()
			if err != nil {
				return err
			}
			if spec.GetIdleMs() == 0 {
				spec.IdleMs = runIdle.Milliseconds()
			}
			c, err := a.client()
			if err != nil {
				return err
			}
			if err := a.defaultImage(cmd, spec); err != nil {
				return err
			}
			sb, err := c.Create(cmd.Context(), spec, f.key)
			if err != nil {
				return err
			}
			out, err := a.follow(cmd.Context(), sb, &sandseav1.StartRequest{
				Command: &sandseav1.Command{Argv: args, TimeoutMs: timeout.Milliseconds()}, Stdin: stdin,
			})
			stopCtx, done := context.WithTimeoutCause(context.WithoutCancel(cmd.Context()), 30*time.Second, errdefs.Deadline)
			defer done()
			if serr := sb.Stop(stopCtx); serr != nil {
				a.io.Note("sandsea: sandbox %s was not stopped: %s", short(sb.ID), ui.Text(serr.Error()))
			}
			if err != nil {
				return err
			}
			return a.finish(sb.ID, "sandsea.run/1", args, timeout, spec, out)
		},
	}
	f.register(cmd)
	cmd.Flags().DurationVar(&timeout, "timeout", 0, "kill the command and all it started after so long (default: never)")
	cmd.Flags().BoolVarP(&stdin, "stdin", "i", false, "pass standard input on")
	cmd.Flags().SetInterspersed(false)
	return cmd
}

func (a *app) createCommand() *cobra.Command {
	var f specFlags
	var count int
	cmd := &cobra.Command{
		Use:   "create [flags] [-- CMD…]",
		Short: "Create a sandbox and print its id",
		Example: `  sandsea create --image py --memory 1G --idle 300s
  sandsea create --base debian:bookworm --workspace task-17 --toolkit pytest
  sandsea create --count 64 -l job=eval-12`,
		RunE: func(cmd *cobra.Command, args []string) error {
			spec, err := f.spec()
			if err != nil {
				return err
			}
			if len(args) > 0 {
				spec.Entrypoint = &sandseav1.Entrypoint{Mode: sandseav1.EntrypointMode_ENTRYPOINT_MODE_ARGV, Argv: args}
			}
			c, err := a.client()
			if err != nil {
				return err
			}
			if err := a.defaultImage(cmd, spec); err != nil {
				return err
			}
			if count > 1 {
				return a.createMany(cmd.Context(), c, spec, count, f.key)
			}
			sb, err := c.Create(cmd.Context(), spec, f.key)
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
			doc, err := document("sandsea.sandbox/1", info)
			if err != nil {
				return err
			}
			return printJSON(a.io.Out, doc)
		},
	}
	f.register(cmd)
	cmd.Flags().IntVar(&count, "count", 1, "how many of the same")
	return cmd
}

func (a *app) execCommand() *cobra.Command {
	var user, workdir string
	var env []string
	var timeout time.Duration
	var stdin, detach, tty bool
	var key string
	cmd := &cobra.Command{
		Use:   "exec [flags] ID -- CMD…",
		Short: "Run a command in a sandbox",
		Example: `  sandsea exec s7q3k2m5 -- pytest -q
  sandsea exec --detach s7q3k2m5 -- ./server.sh     # prints the process number
  tar c src | sandsea exec -i s7q3k2m5 -- tar x -C /w`,
		Args:              cobra.MinimumNArgs(2),
		ValidArgsFunction: a.completeIDs,
		RunE: func(cmd *cobra.Command, args []string) error {
			a.wrapped = true
			if tty {
				return &exitError{code: 125, err: errdefs.New(errdefs.Invalid, "", "exec -t: this version has no terminals").
					WithField("tty", "").WithHint("Drop -t")}
			}
			id, argv := args[0], args[1:]
			if argv[0] == "--" {
				argv = argv[1:]
			}
			if len(argv) == 0 {
				return usage("exec: no command")
			}
			vars, err := pairs("env", env)
			if err != nil {
				return err
			}
			c, err := a.client()
			if err != nil {
				return err
			}
			if id, err = c.Resolve(cmd.Context(), id); err != nil {
				return err
			}
			req := &sandseav1.StartRequest{
				Command: &sandseav1.Command{Argv: argv, Env: vars, User: user, Cwd: workdir, TimeoutMs: timeout.Milliseconds()},
				Stdin:   stdin, Detached: detach, Key: key,
			}
			if detach {
				return a.startDetached(cmd.Context(), c.Sandbox(id), req)
			}
			out, err := a.follow(cmd.Context(), c.Sandbox(id), req)
			if err != nil {
				return err
			}
			return a.finish(id, "sandsea.exec/1", argv, timeout, nil, out)
		},
	}
	fl := cmd.Flags()
	fl.StringVarP(&user, "user", "u", "", "name, uid or uid:gid (default: the sandbox's)")
	fl.StringVarP(&workdir, "workdir", "w", "", "working directory")
	fl.StringArrayVarP(&env, "env", "e", nil, "environment variable, as K=V")
	fl.DurationVar(&timeout, "timeout", 0, "kill the command and all it started after so long")
	fl.BoolVarP(&stdin, "stdin", "i", false, "pass standard input on")
	fl.BoolVarP(&tty, "tty", "t", false, "with a terminal")
	fl.BoolVar(&detach, "detach", false, "do not wait: print the process number")
	fl.StringVar(&key, "key", "", "idempotency key: the same key gives the same process")
	fl.SetInterspersed(false)
	return cmd
}

// outcome is what follow saw of a command.
type outcome struct {
	number         int64
	result         *sandseav1.Result
	stdout, stderr []byte
}

// jsonKeep bounds what --json keeps in memory of one stream.
const jsonKeep = 64 << 20

// follow starts a command and passes its output on as it comes. A broken link is taken up again where it broke. Ctrl-C
// goes to the command.
func (a *app) follow(ctx context.Context, sb *client.Sandbox, req *sandseav1.StartRequest) (*outcome, error) {
	out := &outcome{}
	offsets := map[sandseav1.Stream]int64{}
	take := func(ev *sandseav1.ProcessEvent) error {
		switch e := ev.GetEvent().(type) {
		case *sandseav1.ProcessEvent_Started:
			if out.number == 0 && req.GetStdin() {
				go a.sendInput(ctx, sb, e.Started.GetNumber())
			}
			out.number = e.Started.GetNumber()
		case *sandseav1.ProcessEvent_Data:
			offsets[e.Data.GetStream()] = e.Data.GetOffset() + int64(len(e.Data.GetData()))
			return a.passOn(out, e.Data)
		case *sandseav1.ProcessEvent_Gap:
			offsets[e.Gap.GetStream()] = e.Gap.GetOffset() + e.Gap.GetBytes()
			a.io.Note("sandsea: %s of output not kept (--output)", ui.LongSize(e.Gap.GetBytes()))
		case *sandseav1.ProcessEvent_Exited:
			out.result = e.Exited.GetResult()
		}
		return nil
	}
	interrupt := func() {
		if out.number > 0 {
			go func() {
				ctx, stop := context.WithTimeoutCause(ctx, 5*time.Second, errdefs.Deadline)
				defer stop()
				_ = sb.Signal(ctx, out.number, int(syscall.SIGINT), true)
			}()
		}
	}
	a.onInterrupt.Store(&interrupt)
	defer a.onInterrupt.Store(nil)

	events := sb.Start(ctx, req)
	lost := time.Time{}
	for {
		var broken error
		for ev, err := range events {
			if err != nil {
				broken = err
				break
			}
			if !lost.IsZero() {
				a.io.Note("sandsea: link lost, back in %s", ui.Took(time.Since(lost)))
				lost = time.Time{}
			}
			if err := take(ev); err != nil {
				return nil, err
			}
		}
		if out.result != nil {
			return out, nil
		}
		if broken == nil {
			broken = errdefs.New(errdefs.Unavailable, "", "the stream ended early")
		}
		if out.number == 0 || !errors.Is(broken, errdefs.Unavailable) {
			return nil, broken
		}
		if lost.IsZero() {
			lost = time.Now()
		} else if time.Since(lost) > time.Minute {
			return nil, broken
		}
		select {
		case <-ctx.Done():
			return nil, context.Cause(ctx)
		case <-time.After(200 * time.Millisecond):
		}
		events = sb.Attach(ctx, &sandseav1.AttachRequest{
			Number:       out.number,
			StdoutOffset: offsets[sandseav1.Stream_STREAM_STDOUT], StderrOffset: offsets[sandseav1.Stream_STREAM_STDERR],
		})
	}
}

// passOn writes output through, or keeps it for --json.
func (a *app) passOn(out *outcome, d *sandseav1.OutputData) error {
	w, kept := a.io.Out, &out.stdout
	if d.GetStream() == sandseav1.Stream_STREAM_STDERR {
		w, kept = a.io.Err, &out.stderr
	}
	if !a.json {
		if _, err := w.Write(d.GetData()); err != nil {
			return fmt.Errorf("write output: %w", err)
		}
		return nil
	}
	if len(*kept)+len(d.GetData()) <= jsonKeep {
		*kept = append(*kept, d.GetData()...)
	}
	return nil
}

// sendInput passes standard input on until its end.
func (a *app) sendInput(ctx context.Context, sb *client.Sandbox, number int64) {
	var offset int64
	buf := make([]byte, 64<<10)
	for {
		n, err := a.io.In.Read(buf)
		if n > 0 {
			next, serr := sb.SendInput(ctx, number, offset, buf[:n])
			if serr != nil {
				return // the command has ended, or does not read any more: its own end tells
			}
			offset = next
		}
		if err != nil {
			_ = sb.CloseInput(ctx, number)
			return
		}
	}
}

func (a *app) startDetached(ctx context.Context, sb *client.Sandbox, req *sandseav1.StartRequest) error {
	for ev, err := range sb.Start(ctx, req) {
		if err != nil {
			return err
		}
		p := ev.GetStarted()
		if p == nil {
			p = ev.GetExited()
		}
		if p == nil {
			continue
		}
		if f := p.GetResult().GetStartFailure(); f != nil {
			return a.finish(sb.ID, "sandsea.exec/1", req.GetCommand().GetArgv(), 0, nil, &outcome{number: p.GetNumber(), result: p.GetResult()})
		}
		if a.json {
			return printJSON(a.io.Out, map[string]any{"schema": "sandsea.process/1", "sandbox": sb.ID, "number": p.GetNumber()})
		}
		fmt.Fprintln(a.io.Out, p.GetNumber())
		return nil
	}
	return errdefs.New(errdefs.Unavailable, "", "the stream ended before the command started")
}

// finish reports how a command ended and chooses the exit code.
func (a *app) finish(id, schema string, argv []string, timeout time.Duration, spec *sandseav1.SandboxSpec, out *outcome) error {
	r := out.result
	code := int(r.GetExitCode())
	var trouble *errdefs.Error
	object := "sandbox " + short(id)
	switch {
	case r.GetInfraError() != "":
		code = 125
		trouble = errdefs.New(errdefs.Internal, object, "%s", r.GetInfraError()).WithHint("Platform fault, not the command's")
	case r.GetStartFailure() != nil:
		f := r.GetStartFailure()
		trouble = errdefs.New(errdefs.Invalid, object, "%s: %s", ui.Text(strconv.Quote(argv[0])), f.GetMessage()).
			WithField("command", "").WithHint("%s", startHint(f.GetKind()))
	case r.GetTimedOut():
		code = 124
		trouble = errdefs.New(errdefs.Deadline, "", "timed out after %s, all its processes ended", timeout).
			WithField("timeout", timeout.String()).WithHint("Raise --timeout")
	case r.GetOom():
		limit := int64(512 << 20)
		if spec.GetLimits().GetMemoryBytes() > 0 {
			limit = spec.GetLimits().GetMemoryBytes()
		}
		if spec == nil {
			trouble = errdefs.New(errdefs.Exhausted, object, "out of memory").WithHint("Raise --memory at create")
		} else {
			trouble = errdefs.New(errdefs.Exhausted, object, "out of memory, limit %s", ui.LongSize(limit)).
				WithField("memory", ui.LongSize(limit)).WithHint("Raise --memory")
		}
	}
	if a.json {
		if err := a.printOutcome(id, schema, out, trouble); err != nil {
			return err
		}
	} else if trouble != nil {
		fmt.Fprintf(a.io.Err, "sandsea: %s (exit %d)\n", ui.Text(trouble.Error()), code)
	}
	if code == 0 {
		return nil
	}
	return &exitError{code: code, inside: true}
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
	return "See sandsea inspect"
}

func (a *app) printOutcome(id, schema string, out *outcome, trouble *errdefs.Error) error {
	doc, err := document("", out.result)
	if err != nil {
		return err
	}
	doc["schema"], doc["sandbox"], doc["number"] = schema, id, out.number
	doc["cause"] = "completed"
	switch r := out.result; {
	case r.GetInfraError() != "":
		doc["cause"] = "infra"
	case r.GetStartFailure() != nil:
		doc["cause"] = "start_failure"
	case r.GetTimedOut():
		doc["cause"] = "timeout"
	case r.GetOom():
		doc["cause"] = "oom"
	case r.GetSignal() != 0:
		doc["cause"] = "signal"
	}
	doc["signal"] = nil
	if out.result.GetSignal() != 0 {
		doc["signal"] = out.result.GetSignalName()
	}
	delete(doc, "signal_name")
	if trouble != nil {
		doc["message"] = trouble.Error()
	}
	for name, b := range map[string][]byte{"stdout": out.stdout, "stderr": out.stderr} {
		if utf8.Valid(b) {
			doc[name] = string(b)
		} else {
			doc[name+"_base64"] = base64.StdEncoding.EncodeToString(b)
		}
	}
	return printJSON(a.io.Out, doc)
}

// createMany prints the ids that were made, and one line for each kind of failure with its count.
func (a *app) createMany(ctx context.Context, c *client.Client, spec *sandseav1.SandboxSpec, count int, key string) error {
	failed := map[string]int{}
	for res, err := range c.CreateBatch(ctx, &sandseav1.CreateBatchRequest{Spec: spec, Count: int32(count), Key: key}) {
		switch {
		case err != nil:
			return err
		case res.GetSandbox() != nil && a.json:
			doc, err := document("sandsea.sandbox/1", res.GetSandbox())
			if err != nil {
				return err
			}
			if err := printJSON(a.io.Out, doc); err != nil {
				return err
			}
		case res.GetSandbox() != nil:
			fmt.Fprintln(a.io.Out, res.GetSandbox().GetId())
		default:
			failed[res.GetMessage()]++
		}
	}
	if len(failed) == 0 {
		return nil
	}
	var lines []string
	for msg, n := range failed {
		lines = append(lines, fmt.Sprintf("sandsea: %d not made: %s", n, ui.Text(msg)))
	}
	fmt.Fprintln(a.io.Err, strings.Join(lines, "\n"))
	return &exitError{code: 1}
}
