package main

import (
	"context"
	"errors"
	"fmt"
	"io"
	"net"
	"net/netip"
	"os"
	"os/exec"
	"path/filepath"
	"runtime"
	"slices"
	"strings"
	"sync"
	"time"

	"github.com/sandsea/sandsea/api/errdefs"
	"github.com/sandsea/sandsea/bench/netload"
	"github.com/sandsea/sandsea/internal/aether/config"
	"github.com/sandsea/sandsea/internal/aether/wire"
	"github.com/sandsea/sandsea/internal/chronus"
	"github.com/sandsea/sandsea/internal/edge/backend"
	"github.com/sandsea/sandsea/internal/edge/backend/container/native"
	"github.com/sandsea/sandsea/internal/image"
	veth "github.com/sandsea/sandsea/internal/linux/link"
	"github.com/sandsea/sandsea/internal/linux/netns"
	"github.com/sandsea/sandsea/internal/node"
	"github.com/sandsea/sandsea/internal/policy"
	"github.com/sandsea/sandsea/internal/sandbox"
)

// The world of bench net: the machine and the rest, with one line between them.
var (
	benchHost = netip.MustParseAddr("203.0.113.1")
	benchFar  = netip.MustParseAddr("203.0.113.2")
)

// benchName is the host that sandboxes may reach, and benchPort its port.
const (
	benchName = "far.bench.test"
	benchPort = 443
)

// benchAether is aether.toml of the bench: its own resolver, room for the connections that are held, and package services
// that are named, so that the machine's package clients need not be asked meanwhile.
func benchAether() string {
	var b strings.Builder
	fmt.Fprintf(&b, "resolvers = [%q]\n[limits]\nflows = 100000\nproject_flows = 100000\ndns_per_second = 100000\n", benchFar)
	for _, s := range []string{
		policy.PyPI, policy.NPM, policy.Golang, policy.Crates, policy.Debian, policy.Maven, policy.RubyGems,
	} {
		fmt.Fprintf(&b, "[services.%s]\nurls = [\"http://packages.bench.test/%[1]s\"]\n", s)
		if s == policy.Golang {
			b.WriteString("checksums = \"off\"\n")
		}
	}
	return b.String()
}

// benchPolicy allows one name.
func benchPolicy() (policy.Policy, error) {
	return policy.Policy{Phases: []policy.Phase{{
		Name: "agent", Rules: []policy.Rule{{Domain: benchName, Ports: []policy.Ports{{First: benchPort, Last: benchPort}}}},
	}}}.Validate()
}

// idleLimits are those of a sandbox of a burst.
var idleLimits = sandbox.Limits{
	Memory: 64 << 20, CPUMillis: 1000, Pids: 64, Disk: 64 << 20, OpenFiles: 1024, Output: 1 << 20,
}

// callerLimits are those of the sandbox that connects: not what is measured.
var callerLimits = sandbox.Limits{
	Memory: 1 << 30, CPUMillis: int64(runtime.NumCPU()) * 1000, Pids: 256, Disk: 64 << 20, OpenFiles: 16384, Output: 1 << 20,
}

func startsAtOnce() int { return node.StartsAtOnce(runtime.NumCPU()) }

// benchEnd is one from which connections are made.
type benchEnd struct {
	line     *netload.Line
	resolver netip.AddrPort
	site     netip.AddrPort // of benchName
}

// benchWorld is the far side, an edge with a gate, and a caller at either end.
type benchWorld struct {
	benchEdge
	policy policy.Policy
	far    *netload.Far
	inside benchEnd
	direct benchEnd

	warm struct{ known, network bool } // what the pool fills up with; one goroutine's
	undo []func() error
}

func (w *benchWorld) onClose(f func() error) { w.undo = append(w.undo, f) }

// close ends everything. Idempotent.
func (w *benchWorld) close() error {
	var errs []error
	for len(w.undo) > 0 {
		last := len(w.undo) - 1
		f := w.undo[last]
		w.undo = w.undo[:last]
		errs = append(errs, f())
	}
	return errors.Join(errs...)
}

// openBenchWorld makes it in the namespace that this process is in, which must be nobody's.
func openBenchWorld(ctx context.Context, home string) (_ *benchWorld, err error) {
	w := &benchWorld{benchEdge: benchEdge{dir: filepath.Join(home, "data"), rootfs: filepath.Join(home, "rootfs")}}
	defer func() {
		if err != nil {
			err = errors.Join(err, w.close())
		}
	}()
	if w.policy, err = benchPolicy(); err != nil {
		return nil, err
	}
	if err := w.openFar(ctx); err != nil {
		return nil, fmt.Errorf("far side: %w", err)
	}
	if err := busyboxRoot(w.rootfs); err != nil {
		return nil, err
	}
	if err := copyProgram(filepath.Join(w.rootfs, "bin", "sandsea")); err != nil {
		return nil, err
	}
	if err := os.MkdirAll(w.dir, 0o711); err != nil {
		return nil, err
	}
	if err := os.WriteFile(filepath.Join(w.dir, config.FileName), []byte(benchAether()), 0o600); err != nil {
		return nil, err
	}
	w.onClose(w.benchEdge.close)
	if err := w.open(ctx, true); err != nil {
		return nil, err
	}
	if w.egress.gate == nil {
		e := errdefs.New(errdefs.FailedPrecondition, "bench net", "this machine cannot enforce a network policy").
			WithHint("See what is missing: sandsea doctor")
		e.Feature = node.FeatureEgress
		return nil, e
	}
	if err := w.openDirect(ctx); err != nil {
		return nil, fmt.Errorf("caller of the machine: %w", err)
	}
	if err := w.openInside(ctx); err != nil {
		return nil, fmt.Errorf("caller inside a sandbox: %w", err)
	}
	return w, nil
}

// openFar makes the rest of the world.
func (w *benchWorld) openFar(ctx context.Context) error {
	// It becomes the way out of here, which nobody else may need.
	if all, err := net.Interfaces(); err != nil || slices.ContainsFunc(all, func(i net.Interface) bool { return i.Flags&net.FlagUp != 0 }) {
		return errors.Join(err, errdefs.New(errdefs.FailedPrecondition, "bench net", "the network namespace is in use"))
	}
	ns, err := netns.New()
	if err != nil {
		return err
	}
	defer ns.Close() // its servers hold it
	own, err := netns.Open("/proc/self/ns/net")
	if err != nil {
		return err
	}
	defer own.Close()
	// A gate whose one link leads to the machine: an address, and the machine's default route.
	g, err := veth.Open(ns, benchFar, wire.Mark, wire.Table)
	if err != nil {
		return err
	}
	w.onClose(g.Close)
	if err := g.Attach(own, 1, benchHost); err != nil {
		return err
	}
	return netns.Do(ns, func() error {
		ln, err := (&net.ListenConfig{}).Listen(ctx, "tcp", netip.AddrPortFrom(benchFar, benchPort).String())
		if err != nil {
			return err
		}
		pc, err := (&net.ListenConfig{}).ListenPacket(ctx, "udp", netip.AddrPortFrom(benchFar, 53).String())
		if err != nil {
			return errors.Join(err, ln.Close())
		}
		w.far = netload.NewFar(ln, pc, benchFar)
		w.onClose(w.far.Close)
		return nil
	})
}

// copyProgram writes what runs now to path.
func copyProgram(path string) error {
	in, err := os.Open("/proc/self/exe")
	if err != nil {
		return err
	}
	defer in.Close()
	out, err := os.OpenFile(path, os.O_CREATE|os.O_WRONLY, 0o755)
	if err != nil {
		return err
	}
	_, err = io.Copy(out, in)
	return errors.Join(err, out.Close())
}

// openDirect starts a caller on the machine.
func (w *benchWorld) openDirect(ctx context.Context) error {
	cmd := exec.CommandContext(ctx, "/proc/self/exe", "bench", "caller")
	cmd.Stderr = os.Stderr
	in, err := cmd.StdinPipe()
	if err != nil {
		return err
	}
	out, err := cmd.StdoutPipe()
	if err != nil {
		return err
	}
	if err := cmd.Start(); err != nil {
		return err
	}
	w.direct = benchEnd{
		line: netload.NewLine(in, out, func() error {
			err := errors.Join(in.Close(), cmd.Wait())
			if ctx.Err() != nil {
				return nil //nolint:nilerr // it was killed
			}
			return err
		}),
		resolver: netip.AddrPortFrom(benchFar, 53), site: netip.AddrPortFrom(benchFar, benchPort),
	}
	w.onClose(w.direct.line.Close)
	return nil
}

// openInside makes a sandbox with a caller.
func (w *benchWorld) openInside(ctx context.Context) error {
	s, _, err := w.start(ctx, true, callerLimits)
	if err != nil {
		return err
	}
	w.onClose(func() error {
		ctx, stop := context.WithTimeoutCause(context.Background(), time.Minute, errdefs.Deadline)
		defer stop()
		return s.stop(ctx)
	})
	in, tell, err := os.Pipe()
	if err != nil {
		return err
	}
	hear, out, err := os.Pipe()
	if err != nil {
		return errors.Join(err, in.Close(), tell.Close())
	}
	w.onClose(func() error { return errors.Join(tell.Close(), hear.Close()) })
	err = s.run(ctx, in, out, "/bin/sandsea", "bench", "caller")
	if err := errors.Join(err, in.Close(), out.Close()); err != nil {
		return err
	}
	// Whoever waits for a report when it is time to end waits no more.
	stop := context.AfterFunc(ctx, func() { _ = hear.SetReadDeadline(time.Unix(1, 0)) })
	w.onClose(func() error { stop(); return nil })
	w.inside = benchEnd{
		line: netload.NewLine(tell, hear, tell.Close), resolver: netip.AddrPortFrom(wire.Gateway, wire.PortDNS),
	}
	r, err := w.inside.line.Do(netload.Order{Do: netload.Resolve, To: w.inside.resolver, Name: benchName})
	if err != nil {
		return err
	}
	w.inside.site = netip.AddrPortFrom(r.At, benchPort)
	return nil
}

// benchSandbox is one of the bench's.
type benchSandbox struct {
	backend.Instance
	w  *benchWorld
	id sandbox.ID
}

// start makes a sandbox as a runner does, with the bench's policy in force if it is to have a network. It tells how long
// that took.
func (w *benchWorld) start(ctx context.Context, network bool, l sandbox.Limits) (*benchSandbox, time.Duration, error) {
	id, err := w.mint()
	if err != nil {
		return nil, 0, err
	}
	p := w.plan
	if network {
		p.Network = true
		p.Layers = append([]image.Digest{w.egress.guest}, p.Layers...)
	}
	var enforced sync.WaitGroup
	var refused error
	began := time.Now()
	inst, err := w.be.Start(ctx, backend.Spec{
		ID: id, Plan: p, Limits: l, Hard: time.Now().Add(time.Hour),
		Linked: func(link backend.Link) { enforced.Go(func() { refused = w.enforce(ctx, id, link) }) },
	})
	enforced.Wait()
	if err != nil {
		return nil, 0, errors.Join(err, w.egress.network.Release(ctx, string(id)))
	}
	s := &benchSandbox{inst, w, id}
	if refused != nil {
		return nil, 0, errors.Join(refused, s.stop(ctx))
	}
	return s, time.Since(began), nil
}

func (w *benchWorld) enforce(ctx context.Context, id sandbox.ID, link backend.Link) error {
	return w.egress.network.Enforce(ctx, wire.Sandbox{
		ID: string(id), Project: "/bench", Policy: w.policy, Phase: w.policy.Start,
	}, link)
}

func (s *benchSandbox) stop(ctx context.Context) error {
	_, err := s.Stop(ctx, 0)
	return errors.Join(err, s.w.egress.network.Release(ctx, string(s.id)))
}

// run starts a command inside, which lives as long as the sandbox.
func (s *benchSandbox) run(ctx context.Context, in, out *os.File, argv ...string) error {
	const number = 1
	x, err := s.NewExec(ctx, number)
	if err != nil {
		return err
	}
	go func() { // ends with the sandbox
		for e, err := range s.Channel().Exits() {
			if err != nil {
				return
			}
			_ = s.Channel().Ack(e.Number)
		}
	}()
	stdio := x.Stdio()
	stdio.In, stdio.Out = in, out
	_, err = s.Channel().Spawn(ctx, chronus.Spawn{Number: number, Argv: argv, Cwd: "/", Umask: 0o22, Env: []string{"HOME=/root", "PATH=/bin"}}, stdio)
	return err
}

// poolLimit bounds the waits for what goes on in the background.
const poolLimit = time.Minute

var (
	errPoolEmpty = errors.New("the pool of sandboxes made ready ahead did not fill up")
	errLinksStay = errors.New("links of sandboxes that have ended are left in the gate")
)

// awaitPool waits until as many sandboxes of one kind are made ready ahead as there are to be, so that nothing more is in
// the making.
func (w *benchWorld) awaitPool(ctx context.Context, network bool) error {
	if !w.warm.known || w.warm.network != network {
		// The pool fills up with what was asked for last.
		s, _, err := w.start(ctx, network, benchLimits)
		if err != nil {
			return err
		}
		if err := s.stop(ctx); err != nil {
			return err
		}
		w.warm.known, w.warm.network = true, network
	}
	return await(ctx, errPoolEmpty, func() (bool, error) {
		plain, linked := w.be.Ready()
		if network {
			return linked >= native.DefaultWarm, nil
		}
		return plain >= native.DefaultWarm, nil
	})
}

// awaitLinks waits until the gate has no link but those of the sandboxes that are ready, and of the caller's.
func (w *benchWorld) awaitLinks(ctx context.Context) error {
	return await(ctx, errLinksStay, func() (bool, error) {
		links := 0
		err := netns.Do(w.egress.gate.Namespace(), func() error {
			all, err := net.Interfaces()
			for _, i := range all {
				if i.Flags&net.FlagLoopback == 0 && i.Flags&net.FlagUp != 0 {
					links++
				}
			}
			return err
		})
		return links <= native.DefaultWarm+1, err
	})
}

// await looks again and again until something is so.
func await(ctx context.Context, late error, is func() (bool, error)) error {
	ctx, stop := context.WithTimeoutCause(ctx, poolLimit, late)
	defer stop()
	for {
		ok, err := is()
		if ok || err != nil {
			return err
		}
		if err := pause(ctx, time.Millisecond); err != nil {
			return err
		}
	}
}

// aetherMemory is what the Aether process holds, in bytes.
func (w *benchWorld) aetherMemory() (int64, error) {
	return residentMemory(w.edge.parts.cgroups.DaemonPath("aether"))
}

// notes say what a reader must know to compare.
func (w *benchWorld) notes(n netBench) []string {
	out := []string{
		"create_ready: each finds a sandbox made ready ahead; policy has the link and the walls in it, and Aether's answer",
		"connect: from the call until the first byte of the answer to a ClientHello, the name resolved before; direct is the same" +
			" from the machine, over the line that Aether uses",
	}
	if n.streams > 0 {
		out = append(out, "streams: TLS that passes as it is, one and 4 connections; both ends and Aether share the processors; what"+
			" follows the ClientHello is not encrypted, which would be the ends' work")
	}
	if n.flows > 0 {
		out = append(out, "flows: memory is what Aether's process holds; socket buffers are the kernel's")
	}
	if n.burst > 0 {
		out = append(out, fmt.Sprintf("burst: %d starts at once, as a node admits; idle_memory is what is less available on the whole machine,"+
			" whoever else uses it, with the edge, keeper and Aether in it and no server; destroy ends when the last link is gone", startsAtOnce()))
	}
	return out
}
