package netslot

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"log/slog"
	"net/netip"
	"os"
	"path/filepath"
	"sync"

	"github.com/sandsea/sandsea/api/errdefs"
	"github.com/sandsea/sandsea/internal/aether/wire"
	"github.com/sandsea/sandsea/internal/linux/cgroupbpf"
	"github.com/sandsea/sandsea/internal/linux/link"
	"github.com/sandsea/sandsea/internal/linux/netns"
	"github.com/sandsea/sandsea/internal/linux/nft"
	"github.com/sandsea/sandsea/internal/linux/transparent"
	"github.com/sandsea/sandsea/internal/node"
)

// Config says whose gate it is.
type Config struct {
	// Dir is the data directory: the gate is kept at Dir/run/gate.netns. Without one it goes with this process.
	Dir string
	// Tag tells two edges of one machine apart, as for control groups.
	Tag string
	// Cgroup is the v2 directory sandsea-TAG, below which each sandbox has its group.
	Cgroup string
	// Log gets what is removed without having been asked for. Nil discards.
	Log *slog.Logger
}

// Validate checks the configuration.
func (c Config) Validate() error {
	if c.Tag == "" || c.Cgroup == "" {
		return errdefs.New(errdefs.Invalid, "gate", "tag %q, control group %q: both are needed", c.Tag, c.Cgroup)
	}
	return nil
}

// first is the address of slot 0, which nobody has.
var first = value(netip.AddrFrom4([4]byte{100, 64, 1, 0}))

// MaxNumber is the largest number of a slot: the address after its own is the last of the range.
var MaxNumber = func() uint32 {
	_, last := ends(wire.Links)
	return last - first - 1
}()

var ports = []uint16{wire.PortDNS, wire.PortMirrors, wire.PortSOCKS, wire.PortProxy}

// Gate is where all sandboxes of an edge meet Aether.
type Gate struct {
	cfg   Config
	path  string // "" without a directory
	ns    *os.File
	links *link.Gate
	table *nft.Table
	wall  *cgroupbpf.Wall
	told  *denials
	max   uint32 // largest number that is given

	mu     sync.Mutex
	slots  map[uint32]*Slot    // guarded by mu: in use
	groups map[uint64]*Slot    // guarded by mu: the same, by control group
	found  map[uint32]struct{} // guarded by mu: links from before that nobody adopted yet
	last   uint32              // guarded by mu: given last

	closeOnce sync.Once
	closeErr  error
}

// place is where the gate of a data directory is kept: nowhere without one.
func place(dir string) string {
	if dir == "" {
		return ""
	}
	return filepath.Join(dir, "run", "gate.netns")
}

// Remove takes away the gate of a data directory that Open cannot open, with the links and tables in it; its programs go
// with the control groups. Idempotent.
func Remove(dir string) error { return netns.Remove(place(dir)) }

// Open makes the gate and its walls, or finds them. FailedPrecondition with the feature "egress" names what this
// machine lacks; then nothing is left that Open made.
func Open(ctx context.Context, cfg Config) (_ *Gate, err error) {
	if err := cfg.Validate(); err != nil {
		return nil, err
	}
	if cause := context.Cause(ctx); cause != nil {
		return nil, cause
	}
	if cfg.Log == nil {
		cfg.Log = slog.New(slog.DiscardHandler)
	}
	g := &Gate{
		cfg: cfg, path: place(cfg.Dir), max: MaxNumber,
		slots: map[uint32]*Slot{}, groups: map[uint64]*Slot{}, found: map[uint32]struct{}{},
	}
	var made bool
	defer func() {
		if err == nil {
			return
		}
		// A gate that was there may have sandboxes: it stays.
		if made && g.wall != nil {
			err = errors.Join(err, g.wall.Detach())
		}
		err = errors.Join(err, g.Close())
		if made {
			err = errors.Join(err, g.unkeep())
		}
	}()
	if g.ns, made, err = g.namespace(); err != nil {
		return nil, missing("a network namespace that is kept", err)
	}
	if g.links, err = link.Open(g.ns, wire.Gateway, wire.Mark, wire.Table); err != nil {
		return nil, missing("routes of the gate", err)
	}
	g.table, err = nft.Open(g.ns, nft.Layout{
		Gateway: wire.Gateway, Ports: ports, Names: wire.Names, Mark: wire.Mark,
		Proxy: netip.AddrPortFrom(netip.AddrFrom4([4]byte{127, 0, 0, 1}), wire.PortTransparent),
	})
	if err != nil {
		return nil, missing("nftables with fib, tproxy and reject", err)
	}
	parent, err := os.Open(cfg.Cgroup)
	if err != nil {
		return nil, missing("the parent of the sandboxes' control groups", err)
	}
	defer parent.Close()
	g.wall, err = cgroupbpf.Open(parent, cgroupbpf.Layout{Gateway: wire.Gateway, Ports: ports, Names: wire.Names})
	if err != nil {
		return nil, missing("programs on control groups", err)
	}
	numbers, err := g.links.List()
	if err != nil {
		return nil, err
	}
	for _, n := range numbers {
		g.found[n] = struct{}{}
		g.last = max(g.last, n)
	}
	g.told = g.tell()
	return g, nil
}

// missing says what the machine lacks.
func missing(what string, err error) error {
	e := errdefs.New(errdefs.FailedPrecondition, "gate", "%s cannot be had: %v", what, err).
		WithHint("See: sandsea doctor").Wrap(err)
	e.Feature = node.FeatureEgress
	return e
}

// namespace finds the gate, or makes it and says so. A file without a mount is left from before the machine was started.
func (g *Gate) namespace() (ns *os.File, made bool, err error) {
	if g.path == "" {
		ns, err = netns.New()
		return ns, err == nil, err
	}
	ns, err = netns.Open(g.path)
	if err == nil || !errors.Is(err, fs.ErrNotExist) && !errors.Is(err, netns.ErrNone) {
		return ns, false, err
	}
	if err := netns.Remove(g.path); err != nil {
		return nil, false, err
	}
	if err := os.MkdirAll(filepath.Dir(g.path), 0o755); err != nil {
		return nil, false, err
	}
	ns, err = netns.Create(g.path)
	return ns, err == nil, err
}

// unkeep lets the namespace go with its last holder.
func (g *Gate) unkeep() error {
	if g.path == "" {
		return nil
	}
	return netns.Remove(g.path)
}

// Path of the file that stands for the gate's namespace; "" without a directory.
func (g *Gate) Path() string { return g.path }

// Namespace is the gate's network namespace. The file stays the Gate's.
func (g *Gate) Namespace() *os.File { return g.ns }

// Exempt lets the processes of one of the platform's own control groups pass the walls. Settle takes it back from those
// that are not exempt anew.
func (g *Gate) Exempt(cgroupDir string) error {
	id, err := cgroupbpf.ID(cgroupDir)
	if err != nil {
		return err
	}
	return g.wall.Exempt(id)
}

// Attach links the namespace of a new sandbox to the gate, with addresses and routes; all but loopback stays closed
// until Set. name is the sandbox's group and cgroupID that group's id. AlreadyExists when the group has a slot or the
// namespace a link, Exhausted when there is no room for one more. On an error nothing is left.
func (g *Gate) Attach(ctx context.Context, ns *os.File, name string, cgroupID uint64) (*Slot, error) {
	if err := g.foreign(ns); err != nil {
		return nil, fmt.Errorf("group %s: %w", name, err)
	}
	for {
		if cause := context.Cause(ctx); cause != nil {
			return nil, cause
		}
		s, err := g.reserve(name, cgroupID)
		if err != nil {
			return nil, err
		}
		err = g.attach(s, ns)
		if err == nil {
			return s, nil
		}
		g.forget(s)
		if !errors.Is(err, link.ErrExists) {
			return nil, err
		}
		// The link of whoever had the number before may still be going.
		there, lookErr := g.links.Exists(s.number)
		if lookErr != nil {
			return nil, errors.Join(err, lookErr)
		}
		if !there {
			return nil, errdefs.New(errdefs.AlreadyExists, "group "+name, "its network namespace has a link").Wrap(err)
		}
	}
}

// foreign makes sure that a namespace is neither ours nor the gate: a default route to the gate would cut us off.
func (g *Gate) foreign(ns *os.File) error {
	own, err := netns.Open("/proc/self/ns/net")
	if err != nil {
		return err
	}
	defer own.Close()
	for _, other := range []*os.File{own, g.ns} {
		same, err := netns.Same(ns, other)
		if err != nil {
			return err
		}
		if same {
			return errdefs.New(errdefs.Invalid, "", "the network namespace is not a sandbox's own")
		}
	}
	return nil
}

// reserve takes the next number that nobody has.
func (g *Gate) reserve(name string, cgroupID uint64) (*Slot, error) {
	g.mu.Lock()
	defer g.mu.Unlock()
	if _, ok := g.groups[cgroupID]; ok {
		return nil, errdefs.New(errdefs.AlreadyExists, "group "+name, "it has a network slot")
	}
	for range g.max {
		g.last = g.last%g.max + 1
		_, used := g.slots[g.last]
		_, old := g.found[g.last]
		if !used && !old {
			s := &Slot{g: g, number: g.last, name: name, group: cgroupID}
			g.slots[s.number], g.groups[cgroupID] = s, s
			return s, nil
		}
	}
	return nil, errdefs.New(errdefs.Exhausted, "group "+name, "all %d network slots are taken", g.max)
}

func (g *Gate) attach(s *Slot, ns *os.File) error {
	if err := g.wall.Put(s.group, cgroupbpf.Entry{Addr: s.Addr()}); err != nil {
		return exhausted(s.name, err)
	}
	if err := g.links.Attach(ns, s.number, s.Addr()); err != nil {
		return errors.Join(fmt.Errorf("group %s: %w", s.name, err), g.wall.Delete(s.group))
	}
	return nil
}

func exhausted(name string, err error) error {
	if errors.Is(err, cgroupbpf.ErrFull) {
		return errdefs.New(errdefs.Exhausted, "group "+name, "the kernel's walls have no room: %v", err).Wrap(err)
	}
	return err
}

// forget gives a number back.
func (g *Gate) forget(s *Slot) {
	g.mu.Lock()
	defer g.mu.Unlock()
	delete(g.slots, s.number)
	delete(g.groups, s.group)
}

// Adopt takes back the slot of a sandbox that lived on, walls as they are. NotFound when its link is gone.
func (g *Gate) Adopt(number uint32, cgroupID uint64) (*Slot, error) {
	object := fmt.Sprintf("network slot %d", number)
	if number == 0 || number > MaxNumber {
		return nil, errdefs.New(errdefs.NotFound, object, "there is none of this number")
	}
	there, err := g.links.Exists(number)
	if err != nil {
		return nil, err
	}
	if !there {
		return nil, errdefs.New(errdefs.NotFound, object, "its link is gone")
	}
	s := &Slot{g: g, number: number, name: fmt.Sprint(cgroupID), group: cgroupID}
	g.mu.Lock()
	_, taken := g.slots[number]
	if _, other := g.groups[cgroupID]; taken || other {
		g.mu.Unlock()
		return nil, errdefs.New(errdefs.AlreadyExists, object, "it is in use")
	}
	g.slots[number], g.groups[cgroupID] = s, s
	delete(g.found, number)
	g.mu.Unlock()
	// An entry of another making does not hold for this slot.
	if a, ok := g.wall.Addr(cgroupID); !ok || a != s.Addr() {
		if err := g.wall.Put(cgroupID, cgroupbpf.Entry{Addr: s.Addr()}); err != nil {
			g.forget(s)
			return nil, exhausted(s.name, err)
		}
	}
	return s, nil
}

// Settle removes the slots that nobody adopted since Open.
func (g *Gate) Settle(ctx context.Context) error {
	if cause := context.Cause(ctx); cause != nil {
		return cause
	}
	// Walls first: what is closed may take its time to go.
	errs := []error{g.wall.Sweep(func(group uint64) bool {
		g.mu.Lock()
		defer g.mu.Unlock()
		_, ok := g.groups[group]
		return ok
	})}
	sources, err := g.table.Sources()
	errs = append(errs, err)
	for _, a := range sources {
		g.mu.Lock()
		_, used := g.slots[value(a)-first]
		g.mu.Unlock()
		if !used {
			errs = append(errs, g.table.Put(a, false, nil))
		}
	}
	errs = append(errs, g.table.Sweep())
	g.mu.Lock()
	var stale []uint32
	for n := range g.found {
		stale = append(stale, n)
	}
	g.mu.Unlock()
	if err := errors.Join(append(errs, g.links.Delete(stale))...); err != nil {
		return fmt.Errorf("remove network slots that nobody uses: %w", err)
	}
	if len(stale) > 0 {
		g.cfg.Log.Info("removed network slots that nobody uses", "count", len(stale))
	}
	g.mu.Lock()
	defer g.mu.Unlock()
	for _, n := range stale {
		delete(g.found, n)
	}
	return nil
}

// UDP gives a socket of the gate that is bound to an address that is not its own, to answer from.
func (g *Gate) UDP(to netip.AddrPort) (*os.File, error) { return transparent.Foreign(g.ns, to) }

// Close gives up what this process holds and leaves everything in the kernel as it is. Idempotent.
func (g *Gate) Close() error {
	g.closeOnce.Do(func() {
		var errs []error
		if g.wall != nil {
			errs = append(errs, g.wall.Close()) // ends the reader of denials
		}
		if g.told != nil {
			g.told.wait()
		}
		if g.table != nil {
			errs = append(errs, g.table.Close())
		}
		if g.links != nil {
			errs = append(errs, g.links.Close())
		}
		if g.ns != nil {
			errs = append(errs, g.ns.Close())
		}
		g.closeErr = errors.Join(errs...)
	})
	return g.closeErr
}

// Destroy removes the walls and the gate, and with it every link. No sandbox may live. It closes the Gate.
func (g *Gate) Destroy(ctx context.Context) error {
	if cause := context.Cause(ctx); cause != nil {
		return cause
	}
	err := g.wall.Detach()
	return errors.Join(err, g.Close(), g.unkeep())
}
