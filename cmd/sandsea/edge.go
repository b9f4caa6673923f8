package main

import (
	"context"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"net"
	"net/http"
	"os"
	"slices"
	"strings"
	"time"

	"github.com/sandsea/sandsea/api/errdefs"
	"github.com/sandsea/sandsea/internal/chronus/wire"
	"github.com/sandsea/sandsea/internal/cluster"
	"github.com/sandsea/sandsea/internal/edge/admission"
	"github.com/sandsea/sandsea/internal/edge/backend/container/native"
	"github.com/sandsea/sandsea/internal/edge/cgroup"
	"github.com/sandsea/sandsea/internal/edge/journal"
	"github.com/sandsea/sandsea/internal/edge/netslot"
	"github.com/sandsea/sandsea/internal/edge/nodeapi"
	"github.com/sandsea/sandsea/internal/edge/peers"
	"github.com/sandsea/sandsea/internal/edge/probe"
	"github.com/sandsea/sandsea/internal/edge/runner"
	"github.com/sandsea/sandsea/internal/edge/supervise"
	"github.com/sandsea/sandsea/internal/edge/sweep"
	"github.com/sandsea/sandsea/internal/edge/uidrange"
	"github.com/sandsea/sandsea/internal/edge/upper"
	"github.com/sandsea/sandsea/internal/image"
	"github.com/sandsea/sandsea/internal/keeper"
	"github.com/sandsea/sandsea/internal/layers/blob/posix"
	"github.com/sandsea/sandsea/internal/layers/build"
	"github.com/sandsea/sandsea/internal/layers/compose"
	"github.com/sandsea/sandsea/internal/linux/seccomp"
	"github.com/sandsea/sandsea/internal/node"
	"github.com/sandsea/sandsea/internal/spawner"
	"github.com/sandsea/sandsea/internal/store"
	"github.com/sandsea/sandsea/internal/version"
)

// spawnerPatience is how long a create waits for a spawner that is being started again.
const spawnerPatience = 5 * time.Second

// edge is one node's part, wired. Its fields are closed in the reverse order of their making.
type edge struct {
	dir     *dataDir
	log     *slog.Logger
	store   store.Store
	at      place
	machine nodeapi.Machine
	caps    node.Capabilities
	parts   parts
	room    *admission.Admission
	runner  *runner.Runner
	api     *nodeapi.Server
	id      nodeapi.Identity
	guest   image.Digest // layer below every sandbox with a network
	lost    chan error   // why the node is not registered any more and will not be again
	undo    []func() error
}

// place is where an edge answers, and as whom.
type place struct {
	name    string // for people; empty: n and the number
	address string // as it is registered
	control string // HOST:PORT of the control plane; empty: it is beside the edge
	// listener and identity are those of a node of a cluster; nil: a socket for this machine's root.
	listener net.Listener
	identity *cluster.Identity
	// machine and id are who the store says that this is; set by identify.
	machine nodeapi.Machine
	id      nodeapi.Identity
}

// onSocket is the place of an edge beside its server.
func onSocket(dir *dataDir) place { return place{address: "unix:" + dir.join("run", "node.sock")} }

func (e *edge) onClose(f func() error) { e.undo = append(e.undo, f) }

// close ends the edge and leaves the sandboxes, the keeper and the spawner running.
func (e *edge) close() error {
	var errs []error
	for i := len(e.undo) - 1; i >= 0; i-- {
		errs = append(errs, e.undo[i]())
	}
	return errors.Join(errs...)
}

// bootID names this boot of the machine.
func bootID() (string, error) {
	b, err := os.ReadFile("/proc/sys/kernel/random/boot_id")
	if err != nil {
		return "", fmt.Errorf("read the boot id: %w", err)
	}
	return strings.TrimSpace(string(b)), nil
}

// errStoreAway: nobody can say which node this is.
var errStoreAway = errors.New("the store does not answer")

// identify asks the store which node this is; errStoreAway when that cannot say.
func (at place) identify(ctx context.Context, dir *dataDir, st store.Store) (place, error) {
	boot, err := bootID()
	if err != nil {
		return at, err
	}
	at.machine = nodeapi.Machine{Name: at.name, Address: at.address, DataID: dir.id, Boot: boot, Machine: machineID()}
	at.id, err = nodeapi.Identify(ctx, st, dir.path, at.machine)
	if errors.Is(err, errdefs.Unavailable) || errors.Is(err, errdefs.Unknown) {
		err = fmt.Errorf("%w: %w", errStoreAway, err)
	}
	return at, err
}

// openEdge makes the part of the node that the place was identified as: what it can enforce, its helpers, what of its
// sandboxes still lives. It answers nobody before serve.
func openEdge(ctx context.Context, dir *dataDir, cfg serverConfig, st store.Store, at place, log *slog.Logger,
) (_ *edge, err error) {
	e := &edge{dir: dir, log: log, store: st, at: at, machine: at.machine, id: at.id}
	defer func() {
		if err != nil {
			err = errors.Join(err, e.close())
		}
	}()
	if e.parts, err = e.openParts(ctx); err != nil {
		return nil, err
	}
	jr, err := journal.Open(dir.join("journal"), at.machine.Boot)
	if err != nil {
		return nil, err
	}
	e.onClose(jr.Close)

	x, err := e.openEgress(ctx, e.parts.cgroups)
	if err != nil {
		return nil, err
	}
	e.guest = x.guest
	be, links, err := e.openBackend(ctx, e.parts, x.gate, cfg.WarmSandboxes)
	if err != nil {
		return nil, err
	}

	most := admission.Of(e.caps, admission.Overcommit{Memory: cfg.MemoryOvercommit, CPU: cfg.CPUOvercommit})
	if cfg.MaxSandboxes > 0 {
		most.Sandboxes = cfg.MaxSandboxes
	}
	if e.room, err = admission.New(most, e.parts.uppers.Free); err != nil {
		return nil, err
	}
	rcfg := runner.Config{
		Journal: jr, Backend: be, Keeper: links.keeper, Room: e.room, Capabilities: e.caps, Output: dir.join("output"),
		Flows: dir.join("flows"), Guest: x.guest, Record: nodeapi.EndedRecorder(st, e.id.Name), Now: time.Now, Log: log,
	}
	if x.network != nil {
		rcfg.Network = x.network
	}
	e.runner, err = runner.New(rcfg)
	if err != nil {
		return nil, err
	}
	e.onClose(func() error {
		// First the supervision: the runner ends the line, which is to break nobody's rest.
		return errors.Join(links.supervision.Close(), e.runner.Close())
	})
	err = sweep.Run(ctx, sweep.Config{
		Runner: e.runner, Backend: be, Keeper: links.keeper, Roster: links.roster, Output: dir.join("output"), Log: log,
	})
	if err != nil {
		return nil, err
	}
	return e, e.startAether(ctx, x, e.parts.cgroups)
}

// links are the lines to the keeper.
type links struct {
	keeper      *runner.Link
	roster      *sweep.Roster
	supervision io.Closer
}

// openBackend finds or starts the keeper and the spawner, and opens the native backend over them, which keeps so many
// sandboxes warm.
func (e *edge) openBackend(ctx context.Context, p parts, gate *netslot.Gate, warm int) (*native.Backend, links, error) {
	l := links{keeper: runner.NewLink(nil)}
	var err error
	if l.supervision, err = e.superviseKeeper(ctx, l.keeper, p.cgroups); err != nil {
		return nil, l, err
	}
	spawn := spawner.Redial(e.dir.join("run", "spawner.sock"), e.dir.id, spawnerPatience)
	e.onClose(spawn.Close)
	if err := e.superviseSpawner(ctx, p.cgroups); err != nil {
		return nil, l, err
	}
	if l.roster, err = sweep.Ask(ctx, l.keeper); err != nil {
		return nil, l, err
	}
	filter, err := seccomp.Default()
	if err != nil {
		return nil, l, fmt.Errorf("assemble the system-call filter: %w", err)
	}
	be, err := native.New(native.Config{
		Spawner: spawn, Keeper: l.keeper, Cgroups: p.cgroups, Uppers: p.uppers, Ranges: p.ranges, Layers: p.layers, Gate: gate,
		Filter: filter, Caps: wire.DefaultCaps, Output: e.dir.join("output"), Held: l.roster.Sandbox, Warm: warm, Log: e.log,
	})
	if err != nil {
		return nil, l, err
	}
	e.onClose(be.Close)
	return be, l, nil
}

// parts are what the backend stands on.
type parts struct {
	cgroups *cgroup.Manager
	uppers  *upper.Store
	ranges  *uidrange.Pool
	blobs   *posix.Store
	layers  *compose.Composer
	builder *build.Builder
}

// openParts opens the pools and finds out what the machine enforces.
func (e *edge) openParts(ctx context.Context) (p parts, err error) {
	if p.cgroups, err = cgroup.Open(cgroup.Config{Tag: e.dir.tag(), Log: e.log}); err != nil {
		return p, err
	}
	e.onClose(p.cgroups.Close)
	if p.uppers, err = upper.Open(ctx, upper.Config{Dir: e.dir.path, Log: e.log}); err != nil {
		return p, err
	}
	e.onClose(p.uppers.Close)
	if p.ranges, err = uidrange.Open(uidrange.Config{Tag: e.dir.tag(), Log: e.log}); err != nil {
		return p, err
	}
	e.onClose(p.ranges.Close)
	if p.blobs, err = posix.Open(e.dir.join("blobs")); err != nil {
		return p, err
	}
	if _, err := p.blobs.Sweep(ctx); err != nil {
		return p, err
	}
	if p.layers, err = compose.New(compose.Config{Blobs: p.blobs, Log: e.log}); err != nil {
		return p, err
	}
	e.onClose(p.layers.Close)
	p.builder, err = build.New(build.Config{
		Store: p.blobs, Dir: e.dir.path, Log: e.log, Proxy: http.ProxyFromEnvironment,
	})
	if err != nil {
		return p, err
	}
	if err := p.builder.Sweep(); err != nil {
		return p, err
	}
	e.caps = probe.Run(ctx, probe.Config{Dir: e.dir.path, Cgroup: p.cgroups, Upper: p.uppers, Log: e.log})
	return p, nil
}

// superviseKeeper finds or starts the keeper; a later one is told everything that must be held. One that an edge of
// another version has left becomes ours.
func (e *edge) superviseKeeper(ctx context.Context, link *runner.Link, cgroups *cgroup.Manager) (io.Closer, error) {
	exe, err := os.Executable()
	if err != nil {
		return nil, fmt.Errorf("find our own binary: %w", err)
	}
	socket := e.dir.join("run", "keeper.sock")
	argv := []string{exe, "keeper", "--socket", socket, "--data-id", e.dir.id, "--index", e.dir.join("run")}
	var held []keeper.Held // while the keeper is being renewed
	d, err := supervise.Start(ctx, supervise.Config[*keeper.Conn]{
		Name: "keeper", Socket: socket, LogFile: e.dir.join("run", "keeper.log"), Log: e.log, Protect: true, Argv: argv,
		Dial: func(ctx context.Context) (*keeper.Conn, error) { return keeper.Dial(ctx, socket, e.dir.id) },
		OnConnect: func(ctx context.Context, c *keeper.Conn) error {
			if e.runner != nil {
				return e.runner.Keep(ctx, c)
			}
			// A renewed keeper has it all; one that died of it has a successor by now, which has nothing.
			err := keeper.Restore(ctx, c, held)
			held = nil
			link.Set(c)
			return err
		},
		Renew: func(ctx context.Context, program *os.File) (err error) {
			held, err = keeper.Upgrade(ctx, socket, e.dir.id, program, argv)
			return err
		},
		Cgroup: cgroups.DaemonPath("keeper"),
	})
	if err != nil {
		return nil, err
	}
	e.onClose(d.Close)
	return d, nil
}

// superviseSpawner finds or starts the spawner. It is born in a mount namespace of its own, which becomes the nursery.
func (e *edge) superviseSpawner(ctx context.Context, cgroups *cgroup.Manager) error {
	exe, err := os.Executable()
	if err != nil {
		return fmt.Errorf("find our own binary: %w", err)
	}
	socket := e.dir.join("run", "spawner.sock")
	argv := []string{exe, "spawner", "--socket", socket, "--data-id", e.dir.id}
	d, err := supervise.Start(ctx, supervise.Config[io.Closer]{
		Name: "spawner", Socket: socket, LogFile: e.dir.join("run", "spawner.log"), Log: e.log,
		Argv: argv, Successor: append(slices.Clone(argv), "--takeover"),
		// The backend has the one line that the spawner serves: another would end it.
		Dial:       func(context.Context) (io.Closer, error) { return io.NopCloser(nil), nil },
		Cgroup:     cgroups.DaemonPath("spawner"),
		Cloneflags: spawner.Attr().Cloneflags,
	})
	if err != nil {
		return err
	}
	e.onClose(d.Close)
	return nil
}

// serve opens the node's door and keeps it registered; it is in the store when serve returns.
func (e *edge) serve(ctx context.Context) error {
	layers := peers.New(peers.Config{
		Blobs: e.parts.blobs, Store: e.store, Self: e.id.Number, Identity: e.at.identity, Free: e.parts.uppers.Free,
		Reserve: admission.DefaultDiskReserve, Log: e.log,
	})
	e.onClose(layers.Close)
	var err error
	e.api, err = nodeapi.New(nodeapi.Config{
		Runner: e.runner, Room: e.room, Builder: e.parts.builder, Mounts: e.parts.layers, Layers: layers, Blobs: e.parts.blobs,
		Keep:     e.keep(),
		Identity: e.id, Capabilities: e.caps, Version: version.String(), Now: time.Now, Log: e.log,
	})
	if err != nil {
		return err
	}
	if e.at.identity != nil {
		e.api.ServeCluster(e.at.listener, e.at.identity)
	} else {
		l, err := nodeapi.ListenUnix(strings.TrimPrefix(e.at.address, "unix:"))
		if err != nil {
			return err
		}
		if err := e.api.Serve(l); err != nil {
			return err
		}
	}
	e.onClose(func() error {
		// Calls had their time in drain.
		ctx, stop := context.WithTimeoutCause(context.Background(), time.Second, errdefs.Deadline)
		defer stop()
		return e.api.Shutdown(ctx)
	})
	rctx, leave := context.WithCancelCause(context.WithoutCancel(ctx))
	ended, ready := make(chan struct{}), make(chan struct{})
	e.lost = make(chan error, 1)
	go func() {
		defer close(ended)
		if err := nodeapi.Register(rctx, e.store, e.machine, e.id, e.log, func() { close(ready) }); err != nil {
			e.lost <- err
		}
	}()
	e.onClose(func() error {
		leave(errors.New("the edge shuts down"))
		<-ended
		return nil
	})
	select {
	case <-ready:
		return nil
	case err := <-e.lost:
		return err
	case <-ctx.Done():
		return context.Cause(ctx)
	}
}

// keep are the layers that this node needs for itself.
func (e *edge) keep() []image.Digest {
	if e.guest == "" {
		return nil
	}
	return []image.Digest{e.guest}
}

// drain closes the node's door and gives calls in flight their time.
func (e *edge) drain(ctx context.Context) {
	ctx, done := drain(ctx)
	defer done()
	if err := e.api.Shutdown(ctx); err != nil {
		e.log.Info("calls were cut off", "err", err)
	}
}

// running counts the node's living sandboxes.
func (e *edge) running() int {
	n := 0
	all, _ := e.runner.Roster()
	for _, s := range all {
		if s.End.Cause == "" {
			n++
		}
	}
	return n
}

// machineID tells this machine from others; a machine without one is known by its boots alone.
func machineID() string {
	b, err := os.ReadFile("/etc/machine-id")
	if err != nil {
		return ""
	}
	return strings.TrimSpace(string(b))
}
