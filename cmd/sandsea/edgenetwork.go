package main

import (
	"archive/tar"
	"bytes"
	"context"
	"crypto/sha256"
	"errors"
	"fmt"
	"io/fs"
	"log/slog"
	"maps"
	"net"
	"net/netip"
	"os"
	"path"
	"path/filepath"
	"slices"
	"strings"
	"sync"

	"github.com/sandsea/sandsea/api/errdefs"
	"github.com/sandsea/sandsea/internal/aether/config"
	"github.com/sandsea/sandsea/internal/aether/guest"
	"github.com/sandsea/sandsea/internal/aether/upstream"
	"github.com/sandsea/sandsea/internal/aether/wire"
	"github.com/sandsea/sandsea/internal/edge/cgroup"
	"github.com/sandsea/sandsea/internal/edge/netslot"
	"github.com/sandsea/sandsea/internal/edge/network"
	"github.com/sandsea/sandsea/internal/edge/supervise"
	"github.com/sandsea/sandsea/internal/image"
	"github.com/sandsea/sandsea/internal/layers/build"
	"github.com/sandsea/sandsea/internal/node"
)

// egress is what a node needs to let anything leave its sandboxes.
type egress struct {
	gate    *netslot.Gate
	network *network.Network
	guest   image.Digest // the layer that points package clients at Aether
	supply  *supply
	deny    []netip.Prefix // the control plane, to Aether
	told    []byte         // digest of all that Aether is told at its start; nil: not known
}

// supply is what the package services draw on. Finding it out takes seconds, so an Aether may be told later.
type supply struct {
	log     *slog.Logger
	scratch string // DIR/tmp, which down empties

	mu    sync.Mutex
	found upstream.Upstreams // guarded by mu: nil until it is known
	line  *wire.Conn         // guarded by mu: the Aether of now
}

// tell hands what is known to a new Aether.
func (s *supply) tell(ctx context.Context, line *wire.Conn) error {
	s.mu.Lock()
	s.line = line
	found := s.found
	s.mu.Unlock()
	if found == nil {
		return nil
	}
	return line.Upstreams(ctx, found)
}

// find asks the node's clients, and tells the Aether that is there by then.
func (s *supply) find(ctx context.Context, settings map[string]upstream.Setting) {
	found, err := upstream.Discover(ctx, upstream.Node{Env: os.Environ(), Dir: s.scratch}, settings)
	if err != nil {
		if ctx.Err() == nil {
			s.log.Error("package services have no upstreams", "err", err)
		}
		return
	}
	s.mu.Lock()
	s.found = found
	line := s.line
	s.mu.Unlock()
	if line == nil {
		return
	}
	if err := line.Upstreams(ctx, found); err != nil && !errors.Is(err, errdefs.Unavailable) { // the next one is told anyhow
		s.log.Error("tell aether of its upstreams", "err", err)
	}
}

// openEgress opens the gate. On a machine that lacks what it takes there is none: sandboxes have no network then, and
// policies that allow anything are refused.
func (e *edge) openEgress(ctx context.Context, cgroups *cgroup.Manager) (x egress, err error) {
	if !e.caps.Enforces(node.FeatureEgress) {
		e.log.Warn("no network policy can be enforced here: sandboxes get no network",
			"why", e.caps.Feature(node.FeatureEgress).Mechanism)
		// Flow logs are read all the same: there are none, or some of better days.
		if err := os.MkdirAll(e.dir.join("flows"), 0o700); err != nil {
			return x, fmt.Errorf("directory of flow logs: %w", err)
		}
		return x, nil
	}
	aether := cgroups.DaemonPath("aether")
	if err := os.MkdirAll(aether, 0o755); err != nil {
		return x, fmt.Errorf("control group of aether: %w", err)
	}
	if x.gate, err = netslot.Open(ctx, gateConfig(e.dir, cgroups, e.log)); err != nil {
		return x, err
	}
	e.onClose(x.gate.Close)
	if err := x.gate.Exempt(aether); err != nil {
		return x, err
	}
	cfg, err := config.Load(e.dir.join(config.FileName))
	if err != nil {
		return x, err
	}
	if err := e.tellsAether(ctx, cfg, &x); err != nil {
		return x, err
	}
	x.network = network.New(network.Config{
		Grants: cfg.Grants, Log: e.log,
		Secret: func(project, name string) bool {
			s, ok := cfg.Secrets[name]
			return ok && s.For(project)
		},
	})
	x.supply = &supply{log: e.log, scratch: e.dir.join("tmp")}
	fctx, stop := context.WithCancelCause(context.WithoutCancel(ctx))
	var finding sync.WaitGroup
	finding.Go(func() { x.supply.find(fctx, cfg.Services) })
	e.onClose(func() error {
		stop(errors.New("the edge shuts down"))
		finding.Wait()
		return nil
	})
	x.guest, err = guestLayer(ctx, e.parts.builder)
	return x, err
}

// gateConfig is that of the data directory's gate.
func gateConfig(dir *dataDir, cgroups *cgroup.Manager, log *slog.Logger) netslot.Config {
	return netslot.Config{Dir: dir.path, Tag: dir.tag(), Cgroup: filepath.Dir(cgroups.DaemonPath("aether")), Log: log}
}

// aetherMemory is what Aether may take, in bytes: twice what it tries to stay below, for what the kernel holds for it. One
// that outgrows it is ended, which closes everything until the next one serves.
const aetherMemory = 1536 << 20

// startAether finds or starts Aether once it is known what lives, and reports what the kernel's walls reject.
func (e *edge) startAether(ctx context.Context, x egress, cgroups *cgroup.Manager) error {
	if x.gate == nil {
		return nil
	}
	exe, err := os.Executable()
	if err != nil {
		return fmt.Errorf("find our own binary: %w", err)
	}
	socket := e.dir.join("run", "aether.sock")
	if err := e.endMisinformed(ctx, x, socket); err != nil {
		return err
	}
	argv := []string{exe, "aether", "--socket", socket, "--data-id", e.dir.id, "--data", e.dir.path, "--gate", x.gate.Path()}
	for _, p := range x.deny {
		argv = append(argv, "--deny", p.String())
	}
	d, err := supervise.Start(ctx, supervise.Config[*wire.Conn]{
		Name: "aether", Socket: socket, LogFile: e.dir.join("run", "aether.log"), Log: e.log, Argv: argv,
		Dial: func(ctx context.Context) (*wire.Conn, error) { return wire.Dial(ctx, socket, e.dir.id) },
		OnConnect: func(ctx context.Context, c *wire.Conn) error {
			c.ServeUDP(x.gate.UDP)
			// Where memory cannot be bounded, no sandbox is made that could have Aether take it.
			if err := cgroups.LimitDaemon("aether", aetherMemory); errors.Is(err, errdefs.FailedPrecondition) {
				e.log.Warn("aether's memory is not bounded", "err", err)
			} else if err != nil {
				return err
			}
			return errors.Join(x.network.Connect(ctx, c), x.supply.tell(ctx, c))
		},
		// One that an edge of another version left is ended: it keeps nothing that a new one is not told, but its
		// connections are cut.
		Renew:  func(ctx context.Context, _ *os.File) error { return e.endAether(ctx, x, socket) },
		Cgroup: cgroups.DaemonPath("aether"),
	})
	if err != nil {
		return err
	}
	e.onClose(d.Close)
	go x.network.Report(x.gate.Denials()) // until the gate is closed
	rctx, stop := context.WithCancelCause(context.WithoutCancel(ctx))
	var remembering sync.WaitGroup
	remembering.Go(func() { x.network.Remember(rctx) })
	e.onClose(func() error {
		stop(errors.New("the edge shuts down"))
		remembering.Wait()
		return nil
	})
	return nil
}

// controlPlane are the addresses of the host of a HOST:PORT, sorted, which no sandbox may reach whatever is
// granted; none for an edge beside its server, whose addresses are the node's own.
func controlPlane(ctx context.Context, at string) ([]netip.Prefix, error) {
	if at == "" {
		return nil, nil
	}
	host, _, err := net.SplitHostPort(at)
	if err != nil {
		return nil, fmt.Errorf("address of the control plane: %w", err)
	}
	all, err := net.DefaultResolver.LookupNetIP(ctx, "ip", host)
	if err != nil {
		return nil, fmt.Errorf("addresses of %s: %w", host, err)
	}
	out := make([]netip.Prefix, 0, len(all))
	for _, a := range all {
		a = a.Unmap()
		out = append(out, netip.PrefixFrom(a, a.BitLen()))
	}
	slices.SortFunc(out, netip.Prefix.Compare)
	return slices.Compact(out), nil
}

// aetherTold is the file in DIR/run with the digest of what the Aether that serves was told.
const aetherTold = "aether.told"

// tellsAether finds out what Aether is told: the addresses of the control plane, and a digest of them, of aether.toml and
// of the secrets that it names. There is no digest when the addresses are not known.
func (e *edge) tellsAether(ctx context.Context, cfg *config.Config, x *egress) error {
	text, err := os.ReadFile(e.dir.join(config.FileName))
	if err != nil && !errors.Is(err, fs.ErrNotExist) {
		return fmt.Errorf("read what the operator tells aether: %w", err)
	}
	if x.deny, err = controlPlane(ctx, e.at.control); err != nil {
		e.log.Warn("the control plane's addresses are not known: only what is private is denied to sandboxes until the next start",
			"err", err)
		return nil
	}
	h := sha256.New()
	_, _ = fmt.Fprintf(h, "%v\n", x.deny)
	_, _ = h.Write(text)
	for _, name := range slices.Sorted(maps.Keys(cfg.Secrets)) {
		_, _ = fmt.Fprintf(h, "\n%q %q", name, cfg.Secrets[name].Value)
	}
	x.told = h.Sum(nil)
	return nil
}

// endMisinformed ends an Aether of an edge before that was told something else: what aether.toml says holds once up is
// ready. While it is not known what there is to tell, the one that serves stays, and the next edge ends it.
func (e *edge) endMisinformed(ctx context.Context, x egress, socket string) error {
	record := e.dir.join("run", aetherTold)
	if x.told == nil {
		if err := os.Remove(record); err != nil && !errors.Is(err, fs.ErrNotExist) {
			return fmt.Errorf("note that aether may not know the control plane: %w", err)
		}
		return nil
	}
	before, err := os.ReadFile(record)
	if err != nil && !errors.Is(err, fs.ErrNotExist) {
		return fmt.Errorf("read what aether was told: %w", err)
	}
	if bytes.Equal(before, x.told) {
		return nil
	}
	if err := e.endAether(ctx, x, socket); err != nil {
		return err
	}
	if err := os.WriteFile(record, x.told, 0o600); err != nil {
		return fmt.Errorf("note what aether is told: %w", err)
	}
	return nil
}

// endAether ends the Aether that serves, if any. What it has counted is taken over first: limits of bytes hold over a
// sandbox's life.
func (e *edge) endAether(ctx context.Context, x egress, socket string) error {
	last, err := wire.Dial(ctx, socket, e.dir.id)
	if err == nil {
		err = errors.Join(x.network.Inherit(ctx, last), last.Close())
	}
	if err != nil && !errors.Is(err, errdefs.Unavailable) { // there is none
		e.log.Warn("what sandboxes have sent and received is counted anew", "err", err)
	}
	return supervise.Stop(ctx, socket, "")
}

// guestLayer makes the layer of files that point package clients at Aether.
func guestLayer(ctx context.Context, b *build.Builder) (image.Digest, error) {
	var buf bytes.Buffer
	w := tar.NewWriter(&buf)
	dirs := map[string]bool{"/": true}
	var errs []error
	var parents func(dir string)
	parents = func(dir string) {
		if dirs[dir] {
			return
		}
		dirs[dir] = true
		parents(path.Dir(dir))
		errs = append(errs, w.WriteHeader(&tar.Header{
			Typeflag: tar.TypeDir, Name: strings.TrimPrefix(dir, "/") + "/", Mode: 0o755,
		}))
	}
	for _, f := range guest.Files() {
		parents(path.Dir(f.Path))
		errs = append(errs, w.WriteHeader(&tar.Header{
			Typeflag: tar.TypeReg, Name: strings.TrimPrefix(f.Path, "/"), Mode: int64(f.Mode), Size: int64(len(f.Body)),
		}))
		_, err := w.Write([]byte(f.Body))
		errs = append(errs, err)
	}
	if err := errors.Join(append(errs, w.Close())...); err != nil {
		return "", fmt.Errorf("layer of package clients' settings: %w", err)
	}
	made, err := b.Rootfs(ctx, &buf, build.ArchiveOptions{Name: "package clients' settings", Size: int64(buf.Len())})
	if err != nil {
		return "", err
	}
	if len(made.Layers) != 1 {
		return "", errdefs.New(errdefs.Internal, "", "the layer of package clients' settings is %d layers", len(made.Layers))
	}
	return made.Layers[0].Digest, nil
}
