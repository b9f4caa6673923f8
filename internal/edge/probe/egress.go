package probe

import (
	"context"
	"errors"
	"fmt"
	"net"
	"net/netip"
	"os"
	"syscall"

	"github.com/sandsea/sandsea/internal/aether/wire"
	"github.com/sandsea/sandsea/internal/edge/netslot"
	"github.com/sandsea/sandsea/internal/linux/netns"
	"github.com/sandsea/sandsea/internal/linux/transparent"
	"github.com/sandsea/sandsea/internal/linux/trial"
	"github.com/sandsea/sandsea/internal/policy"
)

// egress makes a gate, with its programs on a group that holds nobody, links an empty namespace to it, and connects from
// there: refused, brought to a proxy, refused again.
func (p *prober) egress(ctx context.Context) (r result) {
	const fix = "Use Linux 6.15 or later with veth, nftables (fib, tproxy, reject) and BPF on control groups"
	if p.cfg.Cgroup == nil {
		return missing(cgroupErr(p.cfg.CgroupErr), "%s", hint(p.cfg.CgroupErr, fix))
	}
	group, err := p.cfg.Cgroup.Daemon(p.name("egress"))
	if err != nil {
		return unsure(err, fix)
	}
	defer func() {
		group.Close()
		if err := os.Remove(group.Name()); err != nil {
			r = unsure(err, fix)
		}
	}()
	// Without a directory: a mount would outlive a process that is killed.
	g, err := netslot.Open(ctx, netslot.Config{Tag: p.name("egress"), Cgroup: group.Name(), Log: p.cfg.Log})
	if err != nil {
		return missing(err, fix)
	}
	err = crossing(ctx, g)
	undo, stop := context.WithTimeoutCause(context.WithoutCancel(ctx), limit, errLimit)
	defer stop()
	if derr := g.Destroy(undo); derr != nil {
		return unsure(errors.Join(err, derr), fix)
	}
	if err != nil {
		return missing(err, fix)
	}
	return ok("veth to a gate, nft tproxy, cgroup bpf")
}

// crossing tries walls that are closed, open and closed again.
func crossing(ctx context.Context, g *netslot.Gate) error {
	local := netip.AddrPortFrom(netip.AddrFrom4([4]byte{127, 0, 0, 1}), wire.PortTransparent)
	l, err := transparent.Listen(g.Namespace(), local)
	if err != nil {
		return err
	}
	defer l.Close()
	defer context.AfterFunc(ctx, func() { l.Close() })()
	ns, err := netns.New()
	if err != nil {
		return err
	}
	defer ns.Close()
	// No process is in a group of this number: 0 is nobody's.
	slot, err := g.Attach(ctx, ns, "probe", 0)
	if err != nil {
		return err
	}
	name := netip.AddrPortFrom(wire.Names.Addr().Next(), wire.PortMirrors).String()
	for _, open := range []bool{false, true, false} {
		if err := slot.Set(policy.Walls{Names: open}); err != nil {
			return err
		}
		if err := knock(ctx, ns, l, name, open); err != nil {
			return err
		}
	}
	return slot.Release()
}

// knock connects to an address that stands for a name.
func knock(ctx context.Context, ns *os.File, l net.Listener, name string, open bool) error {
	c, err := netns.Dial(ctx, ns, "tcp", name)
	switch {
	case !open && errors.Is(err, syscall.ECONNREFUSED):
		return nil
	case !open && err == nil:
		c.Close()
		return fmt.Errorf("a closed wall let a connection pass: %w", trial.ErrNoEffect)
	case err != nil:
		return fmt.Errorf("connect from a namespace through the gate: %w", err)
	}
	defer c.Close()
	got, err := l.Accept()
	if err != nil {
		return err
	}
	defer got.Close()
	if at := got.LocalAddr().String(); at != name {
		return fmt.Errorf("a connection to %s arrived as one to %s", name, at)
	}
	return nil
}
