// Package aether is the process through which everything goes that leaves a sandbox.
//
// It is all that answers in the gate, the network namespace in which a node's sandboxes meet: a resolver (dns), package
// services (services, mirror), proxies (proxy), and a forwarder for whatever else is dialled (forward). It knows what the
// edge told it (wire, roster) and keeps nothing but a cache and the flow logs; a new one starts with no sandboxes, which
// opens nothing, and is told all of them when the edge connects.
//
// It begins as root, opens what needs that, and then is nobody for good: a user of its own without capabilities, which
// owns DIR/aether and DIR/flows and can write nowhere else.
package aether

import (
	"context"
	"crypto/x509"
	"errors"
	"fmt"
	"io/fs"
	"log/slog"
	"net"
	"net/netip"
	"os"
	"path/filepath"
	"runtime/debug"
	"syscall"
	"time"

	"golang.org/x/sync/errgroup"

	"github.com/sandsea/sandsea/internal/aether/cache"
	"github.com/sandsea/sandsea/internal/aether/config"
	"github.com/sandsea/sandsea/internal/aether/dial"
	"github.com/sandsea/sandsea/internal/aether/dns"
	"github.com/sandsea/sandsea/internal/aether/door"
	"github.com/sandsea/sandsea/internal/aether/flowlog"
	"github.com/sandsea/sandsea/internal/aether/forward"
	"github.com/sandsea/sandsea/internal/aether/inspect"
	"github.com/sandsea/sandsea/internal/aether/proxy"
	"github.com/sandsea/sandsea/internal/aether/roster"
	"github.com/sandsea/sandsea/internal/aether/services"
	"github.com/sandsea/sandsea/internal/aether/wire"
	"github.com/sandsea/sandsea/internal/linux/scm"
	"github.com/sandsea/sandsea/internal/linux/unprivileged"
)

// UID is the user and group that Aether becomes.
const UID = 0x6fffffff

// Config of the process.
type Config struct {
	// Socket is where the edge connects: DIR/run/aether.sock.
	Socket string
	// DataID is the data directory's id; a peer must know it.
	DataID string
	// Data is the data directory.
	Data string
	// Gate is the file of the gate's network namespace.
	Gate string
	// Deny are addresses that no sandbox may reach without a grant, beside the node's own: those of the control plane.
	Deny []netip.Prefix
	Log  *slog.Logger
}

// Validate reports what is missing.
func (c Config) Validate() error {
	for name, path := range map[string]string{"socket": c.Socket, "data directory": c.Data, "gate": c.Gate} {
		if !filepath.IsAbs(path) {
			return fmt.Errorf("aether: %s %q is no absolute path", name, path)
		}
	}
	if c.DataID == "" || c.Log == nil {
		return errors.New("aether: no data directory id or no log")
	}
	return nil
}

// openFiles is how many descriptors Aether may have: two for a connection, four while it is spliced.
const openFiles = 1 << 18

// memory is what the garbage collector tries to stay below.
const memory = 768 << 20

// Most connections of a sandbox to each of the gateway's doors, and through the gate, where the policy's limit of flows
// acts first.
const (
	mostAtDoors     = 256
	mostThroughGate = 1 << 16
)

// resolvers is how many questions over UDP are answered at once.
const resolvers = 2

// idleFlow is how long a connection may say nothing. Dead peers are found sooner.
const idleFlow = 2 * time.Hour

// Run is the Aether process: it returns when ctx ends, or when it cannot go on.
func Run(ctx context.Context, cfg Config) error {
	if err := cfg.Validate(); err != nil {
		return err
	}
	debug.SetMemoryLimit(memory)
	raiseOpenFiles(cfg.Log)
	settings, err := config.Load(filepath.Join(cfg.Data, config.FileName))
	if err != nil {
		return err
	}
	// In the order of what must be there when the edge connects: the control socket is the last.
	sockets, err := openGate(cfg.Gate)
	if err != nil {
		return err
	}
	defer sockets.close()
	p, err := newProcess(cfg, settings, nil)
	if err != nil {
		return err
	}
	defer p.close()
	dbg, err := listenDebug(filepath.Join(filepath.Dir(cfg.Socket), "aether-debug.sock"))
	if err != nil {
		return err
	}
	defer dbg.Close()
	ln, err := scm.Listen(cfg.Socket)
	if err != nil {
		return fmt.Errorf("aether: %w", err)
	}
	defer func() { _ = ln.Close() }() // the file is root's and stays: the next one replaces it
	if err := unprivileged.Become(UID); err != nil {
		return fmt.Errorf("aether: %w", err)
	}
	cfg.Log.Info("aether serves", "socket", cfg.Socket, "gate", cfg.Gate)
	return p.serve(ctx, ln, sockets, dbg)
}

// raiseOpenFiles makes room for connections: as much as is wanted, or as we may.
func raiseOpenFiles(log *slog.Logger) {
	var l syscall.Rlimit
	err := syscall.Getrlimit(syscall.RLIMIT_NOFILE, &l)
	if err == nil && l.Cur < openFiles {
		if err = syscall.Setrlimit(syscall.RLIMIT_NOFILE, &syscall.Rlimit{Cur: openFiles, Max: max(l.Max, openFiles)}); err != nil {
			err = syscall.Setrlimit(syscall.RLIMIT_NOFILE, &syscall.Rlimit{Cur: min(l.Max, openFiles), Max: l.Max})
		}
	}
	if err != nil {
		log.Warn("limit of open files stays", "limit", l.Cur, "err", err)
	}
}

// process is what Aether is made of.
type process struct {
	cfg         Config
	settings    *config.Config
	roster      *roster.Roster
	dialer      *dial.Dialer
	services    *services.Set
	authorities *inspect.Authorities
	forwarder   *forward.Forwarder
	resolver    *dns.Resolver
	edge        *wire.Server
	flows       *flowlog.Store
	logs        *os.File // the directory of flows
	cache       *cache.Cache
	shelf       *shelf
}

// newProcess opens what lies in the data directory and puts the parts together. roots are trusted of hosts whose TLS is
// inspected; nil: those that the node trusts.
func newProcess(cfg Config, settings *config.Config, roots *x509.CertPool) (*process, error) {
	own := filepath.Join(cfg.Data, "aether")
	logs := filepath.Join(cfg.Data, "flows")
	for _, dir := range []string{own, logs} {
		if err := ownDirectory(dir); err != nil {
			return nil, fmt.Errorf("aether: %w", err)
		}
	}
	p := &process{cfg: cfg, settings: settings, services: &services.Set{}}
	var err error
	if p.authorities, err = inspect.Load(filepath.Join(own, "authorities")); err != nil {
		return nil, err
	}
	p.cache, err = cache.Open(cache.Config{
		Dir: filepath.Join(own, "cache"), UID: UID, MaxBytes: settings.Cache.Bytes, Offline: settings.Cache.Offline, Log: cfg.Log,
	})
	if err != nil {
		return nil, err
	}
	// The directories above may be closed to Aether's own user: it goes through what it holds open.
	if p.logs, err = os.Open(logs); err == nil {
		p.flows, err = flowlog.Open(flowlog.Config{Dir: fmt.Sprintf("/proc/self/fd/%d", p.logs.Fd()), Log: cfg.Log})
	}
	if err != nil {
		_ = p.cache.Close()
		return nil, err
	}
	addresses := &ownAddresses{deny: cfg.Deny}
	p.dialer = dial.New(dial.Config{Resolvers: settings.Resolvers, Proxy: settings.Proxy})
	p.roster = roster.New(roster.Config{
		Grants: settings.Grants, Own: addresses.has, Limits: settings.Limits, Log: p.flows,
	})
	p.shelf = newShelf(p.cache, p.dialer, addresses.has, cfg.Log)
	p.forwarder = forward.New(forward.Config{
		Roster: p.roster, Dialer: p.dialer, Services: p.services, Authorities: p.authorities, Secrets: settings.Secrets,
		Roots: roots, Log: cfg.Log,
	})
	p.resolver = dns.New(p.roster, p.services, cfg.Log)
	p.edge = wire.NewServer(cfg.DataID, (*handler)(p), cfg.Log)
	return p, nil
}

// ownDirectory makes a directory that is Aether's alone.
func ownDirectory(dir string) error {
	if err := os.Mkdir(dir, 0o700); err != nil && !errors.Is(err, fs.ErrExist) {
		return err
	}
	return os.Lchown(dir, UID, UID)
}

func (p *process) close() {
	p.shelf.close()
	if err := errors.Join(p.flows.Close(), p.logs.Close(), p.cache.Close()); err != nil {
		p.cfg.Log.Warn("aether closes", "err", err)
	}
}

// serve serves until ctx ends or a part fails.
func (p *process) serve(ctx context.Context, ln *scm.Listener, s *sockets, dbg net.Listener) error {
	g, ctx := errgroup.WithContext(ctx)
	doors := map[string]*door.Listener{}
	for name, l := range map[string]net.Listener{"dns": s.dnsTCP, "mirrors": s.mirrors, "socks": s.socks, "proxy": s.proxy} {
		doors[name] = door.New(l, p.roster, mostAtDoors)
	}
	transparent := door.Flows(s.transparent, p.roster, mostThroughGate)
	datagrams := p.forwarder.Datagrams(s.datagrams, p.edge.UDP)
	g.Go(func() error {
		err := p.edge.Serve(ctx, ln)
		// What the edge told last may have come behind the end of all flows below.
		return errors.Join(err, p.roster.Sync(nil))
	})
	for range resolvers {
		g.Go(func() error { return p.resolver.ServeUDP(s.dnsUDP) })
	}
	g.Go(func() error { return p.resolver.ServeTCP(doors["dns"]) })
	g.Go(func() error { return p.forwarder.Gateway(doors["mirrors"]) })
	g.Go(func() error { return proxy.SOCKS(doors["socks"], p.forwarder) })
	g.Go(func() error { return proxy.HTTP(doors["proxy"], p.forwarder) })
	g.Go(func() error { return p.forwarder.Transparent(transparent) })
	g.Go(datagrams.Serve)
	g.Go(func() error { return serveDebug(dbg, p) })
	g.Go(func() error {
		tick := time.NewTicker(time.Minute)
		defer tick.Stop()
		for {
			select {
			case now := <-tick.C:
				p.roster.CutIdle(now.Add(-idleFlow))
			case <-ctx.Done():
				return nil
			}
		}
	})
	g.Go(func() error {
		<-ctx.Done()
		s.close()
		_ = dbg.Close()
		// Nobody is known any more: all flows are cut.
		return p.roster.Sync(nil)
	})
	err := g.Wait()
	p.forwarder.Close()
	return err
}
