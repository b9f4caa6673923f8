package main

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"os/exec"
	"path/filepath"
	"runtime/debug"
	"slices"
	"strconv"
	"strings"
	"sync"
	"time"

	"github.com/spf13/cobra"

	"github.com/sandsea/sandsea/api/errdefs"
	"github.com/sandsea/sandsea/bench"
	"github.com/sandsea/sandsea/bench/netload"
	"github.com/sandsea/sandsea/internal/linux/netns"
	"github.com/sandsea/sandsea/internal/version"
)

// netBench is what sandsea bench net is asked for.
type netBench struct {
	rounds, warmup, samples int
	streams                 time.Duration
	flows, burst            int
	home                    string // of the part that runs inside; empty: this is the part outside
}

func (a *app) benchNetCommand() *cobra.Command {
	var n netBench
	cmd := &cobra.Command{
		Use: "net", Short: "The network: policy against none, Aether against a direct line", Args: cobra.NoArgs,
		Long: `Measures what a network policy adds to a create, what Aether adds to a connection by name and to a question to the
resolver, how many bits it carries, what open connections cost, and a burst of sandboxes that have a policy: made at once,
left idle, and destroyed.

Everything happens in two network namespaces of its own, one that stands for this machine and one for the rest of the world:
nothing is sent anywhere. Runs beside a sandsea up without touching it.`,
		Example: "  sudo sandsea bench net\n  sudo sandsea bench net --burst 3200 --json",
		RunE: func(cmd *cobra.Command, _ []string) error {
			if err := needRoot("bench net"); err != nil {
				return err
			}
			if err := cmp.Or(atLeast("rounds", n.rounds, 1), atLeast("samples", n.samples, 1), atLeast("warmup", n.warmup, 0),
				atLeast("flows", n.flows, 0), atLeast("burst", n.burst, 0), atLeast("streams", n.streams, 0)); err != nil {
				return err
			}
			if n.home == "" {
				return a.benchNetOutside(cmd.Context())
			}
			return a.benchNetInside(cmd.Context(), n)
		},
	}
	cmd.Flags().IntVar(&n.rounds, "rounds", 5, "turns of each peer")
	cmd.Flags().IntVar(&n.warmup, "warmup", 20, "samples of each peer that come first and do not count")
	cmd.Flags().IntVar(&n.samples, "samples", 100, "samples of each peer in a turn")
	cmd.Flags().DurationVar(&n.streams, "streams", time.Second, "how long bytes flow each time; 0: not at all")
	cmd.Flags().IntVar(&n.flows, "flows", 5000, "connections to hold open at once; 0: none")
	cmd.Flags().IntVar(&n.burst, "burst", 1000, "sandboxes to make at once; 0: none")
	cmd.Flags().StringVar(&n.home, "home", "", "")
	_ = cmd.Flags().MarkHidden("home") // it is there
	return cmd
}

// benchNetOutside runs this program again in a namespace that stands for the machine, and cleans up behind it.
func (a *app) benchNetOutside(ctx context.Context) (err error) {
	home, err := os.MkdirTemp("/var/tmp", "sandsea-bench-")
	if err != nil {
		return fmt.Errorf("bench: %w", err)
	}
	defer func() { err = errors.Join(err, os.RemoveAll(home)) }()
	if err := os.Chmod(home, 0o711); err != nil {
		return fmt.Errorf("bench: %w", err)
	}
	exe, err := os.Executable()
	if err != nil {
		return fmt.Errorf("find our own binary: %w", err)
	}
	host, err := netns.New()
	if err != nil {
		return fmt.Errorf("a network namespace for the bench: %w", err)
	}
	defer host.Close()
	child := exec.Command(exe, append(slices.Clone(os.Args[1:]), "--home="+home)...) //nolint:noctx // it cleans up first, see below
	child.Stdout, child.Stderr = os.Stdout, os.Stderr
	// It ends when this closes, so also when we are killed.
	alive, err := child.StdinPipe()
	if err != nil {
		return fmt.Errorf("bench: %w", err)
	}
	if err := netns.Do(host, child.Start); err != nil {
		return fmt.Errorf("bench: %w", err)
	}
	stop := context.AfterFunc(ctx, func() { _ = alive.Close() })
	defer stop()
	err = child.Wait()
	if exit, ok := errors.AsType[*exec.ExitError](err); ok && exit.Exited() {
		err = &exitError{code: exit.ExitCode()} // it has said why
	} else if err != nil {
		err = fmt.Errorf("bench net: the process that measures: %w", err)
	}
	if lerr := removeLeft(filepath.Join(home, "data")); lerr != nil {
		return lerr
	}
	return err
}

// removeLeft removes what the part inside has left, if it could not do so itself.
func removeLeft(path string) error {
	if _, err := os.Stat(filepath.Join(path, "id")); errors.Is(err, os.ErrNotExist) {
		return nil
	}
	data, err := openDataDir(path)
	if err != nil {
		return err
	}
	defer data.close()
	ctx, stop := context.WithTimeoutCause(context.Background(), time.Minute, errdefs.Deadline)
	defer stop()
	return removeAll(ctx, data)
}

// benchNetInside measures, in the namespace that stands for the machine.
func (a *app) benchNetInside(ctx context.Context, n netBench) (err error) {
	ctx, cancel := context.WithCancelCause(ctx)
	defer cancel(nil)
	go func() {
		_, _ = io.Copy(io.Discard, os.Stdin)
		cancel(errInterrupted)
	}()
	// The part outside does so too, if it lives.
	defer func() { err = errors.Join(err, os.RemoveAll(n.home)) }()
	debug.SetGCPercent(gcPercent) // as sandsea up does
	progress := a.io.NewProgress()
	defer progress.Clear()
	progress.Update("prepare", 0, 0, "", "", false)
	w, err := openBenchWorld(ctx, n.home)
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, w.close()) }()
	progress.Update("prepare", 0, 0, "", "", true)

	var parts []bench.Document
	for _, part := range w.parts(n) {
		step := func(done, of int) { progress.Update(part.name, int64(done), int64(of), part.unit, "", done == of) }
		step(0, part.of)
		d, err := part.run(ctx, step)
		if err == nil {
			err = context.Cause(ctx)
		}
		if errors.Is(err, errInterrupted) {
			return &exitError{code: exitInterrupted, err: a.wasInterrupted()}
		}
		if err != nil {
			return fmt.Errorf("bench net: %s: %w", part.name, err)
		}
		parts = append(parts, d)
	}
	doc := bench.Join("net", "network: a policy against none, Aether against a direct line, in turn", parts...)
	doc.Version = version.String()
	doc.Notes = append(doc.Notes, w.notes(n)...)
	if err := w.close(); err != nil {
		return err
	}
	progress.Clear()
	return a.printBench(doc)
}

// part is one of those that are measured one after the other.
type part struct {
	name, unit string
	of         int
	run        func(ctx context.Context, step func(done, of int)) (bench.Document, error)
}

func (w *benchWorld) parts(n netBench) []part {
	cfg := func(metric string, step func(done, of int)) bench.Config {
		return bench.Config{
			Bench: "net", Metric: metric, Added: true, Warmup: n.warmup, Rounds: n.rounds, Seed: 1, Progress: step,
			PerRound: map[string]int{policyPeer: n.samples, nonePeer: n.samples, aetherPeer: n.samples, directPeer: n.samples},
		}
	}
	between := func(metric string, do func(end *benchEnd) netload.Order) part {
		return part{metric, "rounds", n.rounds, func(ctx context.Context, step func(done, of int)) (bench.Document, error) {
			return bench.Run(ctx, cfg(metric, step), &callPeer{aetherPeer, &w.inside, do}, &callPeer{directPeer, &w.direct, do})
		}}
	}
	all := []part{
		{"create_ready", "rounds", n.rounds, func(ctx context.Context, step func(done, of int)) (bench.Document, error) {
			return bench.Run(ctx, cfg("create_ready", step), &createPeer{policyPeer, w, true}, &createPeer{nonePeer, w, false})
		}},
		between("connect", func(e *benchEnd) netload.Order {
			return netload.Order{Do: netload.Connect, To: e.site, Name: benchName}
		}),
		between("resolve", func(e *benchEnd) netload.Order {
			return netload.Order{Do: netload.Resolve, To: e.resolver, Name: benchName}
		}),
	}
	if n.streams > 0 {
		all = append(all, part{"streams", "rounds", n.rounds, func(ctx context.Context, step func(done, of int)) (bench.Document, error) {
			return bench.Measure(func() (bench.Document, error) { return w.streams(ctx, n, step) })
		}})
	}
	if n.flows > 0 {
		all = append(all, part{"flows", "", 1, func(ctx context.Context, step func(done, of int)) (bench.Document, error) {
			return bench.Measure(func() (bench.Document, error) { return w.hold(n.flows, step) })
		}})
	}
	if n.burst > 0 {
		all = append(all, part{"burst", "sandboxes", n.burst, func(ctx context.Context, step func(done, of int)) (bench.Document, error) {
			return bench.Measure(func() (bench.Document, error) { return w.burst(ctx, n.burst, step) })
		}})
	}
	return all
}

// Names of the peers.
const (
	policyPeer = "policy" // a sandbox with a network policy
	nonePeer   = "none"   // one without
	aetherPeer = "aether" // out of a sandbox
	directPeer = "direct" // from the machine
)

// createPeer measures creates of one kind, each of which finds one made ready ahead and nothing in the making.
type createPeer struct {
	name    string
	w       *benchWorld
	network bool
}

func (p *createPeer) Name() string                  { return p.name }
func (p *createPeer) Prepare(context.Context) error { return nil }
func (p *createPeer) Close() error                  { return nil }

func (p *createPeer) Once(ctx context.Context) (time.Duration, error) {
	if err := p.w.awaitPool(ctx, p.network); err != nil {
		return 0, err
	}
	s, took, err := p.w.start(ctx, p.network, benchLimits)
	if err != nil {
		return 0, err
	}
	return took, s.stop(ctx)
}

// callPeer measures what a caller does.
type callPeer struct {
	name string
	end  *benchEnd
	do   func(*benchEnd) netload.Order
}

func (p *callPeer) Name() string                  { return p.name }
func (p *callPeer) Prepare(context.Context) error { return nil }
func (p *callPeer) Close() error                  { return nil }

func (p *callPeer) Once(context.Context) (time.Duration, error) {
	r, err := p.end.line.Do(p.do(p.end))
	if err != nil {
		return 0, err
	}
	return r.Took[0], nil
}

// several is how many connections carry bytes at once, where it is not one.
const several = 4

// streams measures bits in a second, each way, over one connection and several.
func (w *benchWorld) streams(ctx context.Context, n netBench, step func(done, of int)) (bench.Document, error) {
	type kind struct {
		way, of string
		count   int
	}
	found := map[kind][]float64{}
	var kinds []kind
	for _, way := range []string{netload.Download, netload.Upload} {
		for _, count := range []int{1, several} {
			for _, of := range []string{aetherPeer, directPeer} {
				kinds = append(kinds, kind{way, of, count})
			}
		}
	}
	for round := range n.rounds {
		for i := range kinds {
			k := kinds[(i+round)%len(kinds)]
			end := &w.inside
			if k.of == directPeer {
				end = &w.direct
			}
			r, err := end.line.Do(netload.Order{Do: k.way, To: end.site, Name: benchName, N: k.count, For: n.streams})
			if err != nil {
				return bench.Document{}, errors.Join(context.Cause(ctx), err)
			}
			found[k] = append(found[k], float64(r.Bytes)*8/1e9/r.Took[0].Seconds())
		}
		step(round+1, n.rounds)
	}
	var d bench.Document
	for _, k := range kinds {
		d.Results = append(d.Results, bench.Value(fmt.Sprintf("%s_%d", k.way, k.count), k.of, "Gbit/s", found[k]...))
	}
	return d, nil
}

// hold measures connections that are open and idle.
func (w *benchWorld) hold(flows int, step func(done, of int)) (bench.Document, error) {
	var d bench.Document
	before, err := w.aetherMemory()
	if err != nil {
		return d, err
	}
	r, err := w.inside.line.Do(netload.Order{Do: netload.Hold, To: w.inside.site, Name: benchName, N: flows})
	if err != nil {
		return d, err
	}
	after, err := w.aetherMemory()
	if err != nil {
		return d, err
	}
	open := w.far.Open()
	if _, err := w.inside.line.Do(netload.Order{Do: netload.Release}); err != nil {
		return d, err
	}
	d.Results = []bench.Result{
		bench.Distribution("hold", aetherPeer, r.Took),
		bench.Value("flows_held", aetherPeer, "flows", float64(open)),
		bench.Value("memory", aetherPeer, "MB", float64(after)/1e6),
		bench.Value("memory_per_flow", aetherPeer, "kB", float64(after-before)/1e3/float64(flows)),
	}
	step(1, 1)
	return d, nil
}

// burst makes many sandboxes with a policy, as many at once as a node starts, leaves them idle, and destroys them.
func (w *benchWorld) burst(ctx context.Context, count int, step func(done, of int)) (d bench.Document, err error) {
	if err := w.awaitPool(ctx, true); err != nil {
		return d, err
	}
	before, err := bench.MemoryUsed()
	if err != nil {
		return d, err
	}
	c := crowd{w: w, of: count, step: step}
	began := time.Now()
	c.make(ctx)
	made := time.Now()
	if err := context.Cause(ctx); err != nil {
		return d, err
	}
	if err := w.awaitPool(ctx, true); err != nil {
		return d, err
	}
	refill := time.Since(made)
	// What the kernel frees late is freed by then.
	if err := pause(ctx, settle); err != nil {
		return d, err
	}
	after, err := bench.MemoryUsed()
	if err != nil {
		return d, err
	}
	alive := len(c.made)
	ending := time.Now()
	c.end(ctx)
	if err := w.awaitLinks(ctx); err != nil {
		return d, err
	}
	d.Failures, d.Errors = c.failures, c.errs
	if len(c.took) == 0 {
		return d, fmt.Errorf("no sandbox could be made: %s", strings.Join(c.errs, "; "))
	}
	d.Results = []bench.Result{
		bench.Distribution("burst_create", policyPeer, c.took),
		bench.Value("burst_rate", policyPeer, "1/s", float64(alive)/made.Sub(began).Seconds()),
		bench.Value("pool_refill", policyPeer, "s", refill.Seconds()),
		bench.Value("idle_sandboxes", policyPeer, "sandboxes", float64(alive)),
		bench.Value("idle_memory", policyPeer, "MB", float64(after-before)/1e6),
		bench.Value("idle_memory_each", policyPeer, "kB", float64(after-before)/1e3/float64(alive)),
		bench.Value("destroy", policyPeer, "s", time.Since(ending).Seconds()),
	}
	return d, nil
}

// settle is how long the kernel gets to free what it frees late.
const settle = time.Second

// crowd is many sandboxes that are made and ended.
type crowd struct {
	w    *benchWorld
	of   int
	step func(done, of int)

	mu       sync.Mutex
	made     []*benchSandbox // guarded by mu
	took     []time.Duration // guarded by mu
	failures int             // guarded by mu
	errs     []string        // guarded by mu: the first
}

func (c *crowd) make(ctx context.Context) {
	var next int
	var wg sync.WaitGroup
	for range startsAtOnce() {
		wg.Go(func() {
			for ctx.Err() == nil {
				c.mu.Lock()
				next++
				mine := next
				c.mu.Unlock()
				if mine > c.of {
					return
				}
				s, took, err := c.w.start(ctx, true, idleLimits)
				c.mu.Lock()
				if err == nil {
					c.made, c.took = append(c.made, s), append(c.took, took)
				} else {
					c.failedLocked(err)
				}
				if done := len(c.made); done%50 == 0 || done == c.of {
					c.step(done, c.of)
				}
				c.mu.Unlock()
			}
		})
	}
	wg.Wait()
}

func (c *crowd) failedLocked(err error) {
	c.failures++
	if len(c.errs) < 5 {
		c.errs = append(c.errs, err.Error())
	}
}

func (c *crowd) end(ctx context.Context) {
	var wg sync.WaitGroup
	all := make(chan *benchSandbox)
	for range stopAtOnce {
		wg.Go(func() {
			for s := range all {
				if err := s.stop(ctx); err != nil {
					c.mu.Lock()
					c.failedLocked(err)
					c.mu.Unlock()
				}
			}
		})
	}
	for _, s := range c.made {
		all <- s
	}
	close(all)
	wg.Wait()
}

// benchCallerCommand is what runs at either end of the connections that bench net measures.
func (a *app) benchCallerCommand() *cobra.Command {
	return &cobra.Command{
		Use: "caller", Short: "Measure connections as told (started by bench net)", Hidden: true, Args: cobra.NoArgs,
		RunE: func(cmd *cobra.Command, _ []string) error { return netload.Serve(cmd.Context(), os.Stdin, os.Stdout) },
	}
}

// residentMemory adds up the memory of the processes of a control group, in bytes.
func residentMemory(group string) (int64, error) {
	pids, err := os.ReadFile(filepath.Join(group, "cgroup.procs"))
	if err != nil {
		return 0, err
	}
	var sum int64
	for pid := range strings.FieldsSeq(string(pids)) {
		n, err := residentOf("/proc/" + pid + "/status")
		if err != nil {
			return 0, err
		}
		sum += n
	}
	return sum, nil
}

func residentOf(status string) (int64, error) {
	text, err := os.ReadFile(status)
	if err != nil {
		return 0, err
	}
	for line := range strings.Lines(string(text)) {
		if kib, ok := strings.CutPrefix(line, "VmRSS:"); ok {
			n, err := strconv.ParseInt(strings.TrimSpace(strings.TrimSuffix(strings.TrimSpace(kib), "kB")), 10, 64)
			return n * 1024, err
		}
	}
	return 0, fmt.Errorf("%s has no VmRSS", status)
}
