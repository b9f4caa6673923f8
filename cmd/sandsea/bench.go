package main

import (
	"bytes"
	"cmp"
	"context"
	"errors"
	"fmt"
	"log/slog"
	"os"
	"path/filepath"
	"sync/atomic"
	"time"

	"github.com/spf13/cobra"

	"github.com/sandsea/sandsea/api/errdefs"
	sandseav1 "github.com/sandsea/sandsea/api/sandsea/v1"
	"github.com/sandsea/sandsea/bench"
	"github.com/sandsea/sandsea/client"
	"github.com/sandsea/sandsea/cmd/sandsea/ui"
	"github.com/sandsea/sandsea/internal/edge/backend"
	"github.com/sandsea/sandsea/internal/edge/backend/container/native"
	"github.com/sandsea/sandsea/internal/layers/build"
	"github.com/sandsea/sandsea/internal/layers/plan"
	"github.com/sandsea/sandsea/internal/linux/seccomp"
	"github.com/sandsea/sandsea/internal/node"
	"github.com/sandsea/sandsea/internal/sandbox"
	"github.com/sandsea/sandsea/internal/version"
)

func (a *app) benchCommand() *cobra.Command {
	cmd := &cobra.Command{
		Use: "bench", Short: "Measure, side by side with peers",
		Example: "  sudo sandsea bench create\n  sudo sandsea bench net\n  sandsea bench run --image py --in-flight 4 --json",
	}
	cmd.AddCommand(a.benchCreateCommand(), a.benchNetCommand(), a.benchRunCommand(), a.benchCallerCommand())
	return cmd
}

// benchLimits are enforced on every sandbox of the bench, and given to the peers that can enforce them.
var benchLimits = sandbox.Limits{
	Memory: 256 << 20, CPUMillis: 1000, Pids: 256, Disk: 256 << 20, OpenFiles: 1024, Output: 1 << 20,
}

func (a *app) benchCreateCommand() *cobra.Command {
	var rounds, warmup, own, crun int
	var rate time.Duration
	cmd := &cobra.Command{
		Use: "create", Short: "Create until ready: native and crun in turn, same root file system", Args: cobra.NoArgs,
		Long: `Measures how long a sandbox takes from the request to its readiness for commands, hardened and with memory, CPU, process
and disk limits in force; and crun on the same root file system, in turn, with the same isolation as far as it can: by create
and start, as container engines call it, and by one call (crun-run). Runs beside a sandsea up without touching it.`,
		RunE: func(cmd *cobra.Command, _ []string) error {
			if os.Geteuid() != 0 {
				return errdefs.New(errdefs.Denied, "", "bench create makes sandboxes by itself and needs root").WithHint("Run: sudo sandsea bench create")
			}
			if err := cmp.Or(atLeast("rounds", rounds, 1), atLeast("warmup", warmup, 0), atLeast("native", own, 1),
				atLeast("crun", crun, 1), atLeast("rate", rate, 0)); err != nil {
				return err
			}
			dir, err := os.MkdirTemp("/var/tmp", "sandsea-bench-")
			if err != nil {
				return fmt.Errorf("bench: %w", err)
			}
			defer os.RemoveAll(dir)
			// Root of crun's containers must reach its root file system.
			if err := os.Chmod(dir, 0o711); err != nil {
				return fmt.Errorf("bench: %w", err)
			}
			rootfs := filepath.Join(dir, "rootfs")
			if err := busyboxRoot(rootfs); err != nil {
				return err
			}
			filter, err := seccomp.Default()
			if err != nil {
				return fmt.Errorf("assemble the system-call filter: %w", err)
			}
			peer := bench.CrunConfig{
				Rootfs: rootfs, Dir: dir, Overlay: true, Memory: benchLimits.Memory, CPUMillis: benchLimits.CPUMillis,
				Pids: benchLimits.Pids, Filter: filter,
			}
			oneCall := peer
			oneCall.OneCall = true
			progress := a.io.NewProgress()
			defer progress.Clear()
			doc, err := bench.Run(cmd.Context(), bench.Config{
				Bench: "create", Metric: "create_ready", RateMetric: "create_rate", Version: version.String(),
				Title:  "create until ready: native and crun in turn, same rootfs",
				Warmup: warmup, Rounds: rounds, PerRound: map[string]int{"native": own, "crun": crun, "crun-run": crun}, RateFor: rate, Seed: 1,
				Progress: func(round, of int) { progress.Update("round", int64(round), int64(of), "rounds", "", round == of) },
			},
				&nativePeer{benchEdge{dir: filepath.Join(dir, "data"), rootfs: rootfs}},
				bench.NewCrun(peer), bench.NewCrun(oneCall))
			progress.Clear()
			if err != nil {
				return err
			}
			return a.printBench(doc)
		},
	}
	cmd.Flags().IntVar(&rounds, "rounds", 5, "turns of each peer")
	cmd.Flags().IntVar(&warmup, "warmup", 50, "samples of each peer that come first and do not count")
	cmd.Flags().IntVar(&own, "native", 200, "samples of ours in a turn")
	cmd.Flags().IntVar(&crun, "crun", 20, "samples of crun in a turn")
	cmd.Flags().DurationVar(&rate, "rate", 2*time.Second, "how long to drive each peer for its rate in a turn; 0: not")
	return cmd
}

// atLeast is an error of the command line if what a flag says is less.
func atLeast[T int | time.Duration](flag string, value, least T) error {
	if value >= least {
		return nil
	}
	return misuse(errdefs.New(errdefs.Invalid, "", "--%s %v: at least %v", flag, value, least).WithField(flag, "").
		WithHint("Leave it out for the default"))
}

func (a *app) printBench(doc bench.Document) error {
	if a.json {
		return printJSON(a.io.Out, doc)
	}
	return bench.WriteTable(a.io.Out, doc)
}

// busyboxRoot makes a root file system of the machine's static busybox.
func busyboxRoot(root string) error {
	const busybox = "/bin/busybox"
	program, err := os.ReadFile(busybox)
	if err != nil {
		return errdefs.New(errdefs.FailedPrecondition, busybox, "%s", rootMessage(err)).WithHint("apt-get install busybox-static")
	}
	for _, d := range []string{"bin", "dev", "etc", "proc", "root", "sys", "tmp"} {
		if err := os.MkdirAll(filepath.Join(root, d), 0o755); err != nil {
			return fmt.Errorf("bench: %w", err)
		}
	}
	if err := os.WriteFile(filepath.Join(root, "bin/busybox"), program, 0o755); err != nil {
		return fmt.Errorf("bench: %w", err)
	}
	for _, name := range []string{"sh", "sleep", "true", "cat", "echo"} {
		if err := os.Symlink("busybox", filepath.Join(root, "bin", name)); err != nil {
			return fmt.Errorf("bench: %w", err)
		}
	}
	return nil
}

// benchEdge is an edge without servers on a data directory of its own, driven from outside.
type benchEdge struct {
	dir, rootfs string

	data   *dataDir
	edge   *edge
	be     *native.Backend
	plan   plan.Plan
	egress egress
	serial atomic.Int64
}

// open makes it, with the way out if asked to.
func (b *benchEdge) open(ctx context.Context, network bool) error {
	var err error
	if b.data, err = openDataDir(b.dir); err != nil {
		return err
	}
	log := slog.New(slog.DiscardHandler)
	relax(log) // as sandsea up does
	b.edge = &edge{dir: b.data, log: log}
	if b.edge.parts, err = b.edge.openParts(ctx); err != nil {
		return err
	}
	if network {
		if b.egress, err = b.edge.openEgress(ctx, b.edge.parts.cgroups); err != nil {
			return err
		}
	}
	if b.be, _, err = b.edge.openBackend(ctx, b.edge.parts, b.egress.gate, native.DefaultWarm); err != nil {
		return err
	}
	if err := b.edge.startAether(ctx, b.egress, b.edge.parts.cgroups); err != nil {
		return err
	}
	var tarball bytes.Buffer
	if err := packTree(b.rootfs, &tarball); err != nil {
		return err
	}
	res, err := b.edge.parts.builder.Rootfs(ctx, &tarball, build.ArchiveOptions{Name: "bench"})
	if err != nil {
		return err
	}
	b.plan = plan.Plan{Config: res.Config, Hostname: "bench"}
	for _, l := range res.Layers {
		b.plan.Layers = append(b.plan.Layers, l.Digest)
	}
	return nil
}

// mint makes the id of the next sandbox.
func (b *benchEdge) mint() (sandbox.ID, error) {
	return sandbox.Mint(node.MaxNumber, &counter{n: b.serial.Add(1)})
}

// close ends it and removes everything.
func (b *benchEdge) close() error {
	if b.data == nil {
		return nil
	}
	var errs []error
	if b.edge != nil {
		errs = append(errs, b.edge.close())
	}
	ctx, stop := context.WithTimeoutCause(context.Background(), time.Minute, errdefs.Deadline)
	defer stop()
	errs = append(errs, removeAll(ctx, b.data))
	b.data.close()
	return errors.Join(append(errs, os.RemoveAll(b.dir))...)
}

// nativePeer measures the native backend.
type nativePeer struct{ benchEdge }

func (p *nativePeer) Name() string { return "native" }

// Notes say what a reader must know to compare.
func (p *nativePeer) Notes() []string {
	return []string{fmt.Sprintf("native: memory, cpu, pids and disk limits in force; up to %d sandboxes are made ready in the background,"+
		" as sandsea up does, up to what depends on the image and the limits: the rate has that work in it, the times have"+
		" what a create waits for", native.DefaultWarm)}
}

func (p *nativePeer) Prepare(ctx context.Context) error { return p.open(ctx, false) }

func (p *nativePeer) Close() error { return p.close() }

func (p *nativePeer) Once(ctx context.Context) (time.Duration, error) {
	id, err := p.mint()
	if err != nil {
		return 0, err
	}
	began := time.Now()
	i, err := p.be.Start(ctx, backend.Spec{ID: id, Plan: p.plan, Limits: benchLimits, Hard: time.Now().Add(time.Minute)})
	if err != nil {
		return 0, err
	}
	took := time.Since(began)
	_, err = i.Stop(ctx, 0)
	return took, err
}

// counter is a source of distinct tags: ids of a bench need not be unguessable.
type counter struct{ n int64 }

func (c *counter) Read(b []byte) (int, error) {
	for i := range b {
		b[i] = byte(c.n >> (8 * (i % 8)))
	}
	return len(b), nil
}

func (a *app) benchRunCommand() *cobra.Command {
	var image string
	var n, inFlight int
	cmd := &cobra.Command{
		Use: "run", Short: "Create, first command's output and stop, through the API", Args: cobra.NoArgs,
		Long: `Measures, with the Go client against a running server, how long it takes from the create request to the first command's
output, with a number of callers at once.`,
		RunE: func(cmd *cobra.Command, _ []string) error {
			if err := cmp.Or(atLeast("n", n, 1), atLeast("in-flight", inFlight, 1)); err != nil {
				return err
			}
			c, err := a.client()
			if err != nil {
				return err
			}
			spec := &sandseav1.SandboxSpec{Environment: &sandseav1.Environment{Image: image}, IdleMs: 60_000}
			if err := a.defaultImage(cmd, spec); err != nil {
				return err
			}
			doc, err := bench.Load(cmd.Context(), bench.LoadConfig{
				Bench: "run", Metric: "create_first_output", Of: "api", RateMetric: "create_rate", Version: version.String(),
				Title:  fmt.Sprintf("create and first output through the API, %d in flight", inFlight),
				Warmup: 20, Samples: n, InFlight: inFlight,
			}, func(ctx context.Context) (time.Duration, error) { return createAndRun(ctx, c, spec) })
			if err != nil {
				return err
			}
			return a.printBench(doc)
		},
	}
	cmd.Flags().StringVar(&image, "image", "", "image to start from (default: the only one there is)")
	cmd.Flags().IntVar(&n, "n", 400, "samples")
	cmd.Flags().IntVar(&inFlight, "in-flight", 4, "callers at once")
	return cmd
}

// createAndRun is one sample; it leaves no sandbox.
func createAndRun(ctx context.Context, c *client.Client, spec *sandseav1.SandboxSpec) (time.Duration, error) {
	began := time.Now()
	sb, err := c.Create(ctx, spec, "")
	if err != nil {
		return 0, err
	}
	res, err := sb.Run(ctx, client.Argv("echo", "ready"))
	took := time.Since(began)
	if err == nil && string(res.GetStdout()) != "ready\n" {
		err = fmt.Errorf("output %q, exit %d", ui.Text(string(res.GetStdout())), res.GetResult().GetExitCode())
	}
	// Also when the bench was interrupted.
	ctx, stop := context.WithTimeoutCause(context.WithoutCancel(ctx), stopLimit, errdefs.Deadline)
	defer stop()
	return took, errors.Join(err, sb.Stop(ctx))
}
