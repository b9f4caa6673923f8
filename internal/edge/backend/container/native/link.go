package native

import (
	"context"
	"errors"
	"fmt"
	"net"
	"net/netip"
	"os"
	"strconv"
	"syscall"
	"time"

	"github.com/sandsea/sandsea/api/errdefs"
	"github.com/sandsea/sandsea/internal/edge/backend"
	"github.com/sandsea/sandsea/internal/edge/cgroup"
	"github.com/sandsea/sandsea/internal/edge/netslot"
	"github.com/sandsea/sandsea/internal/linux/netns"
	"github.com/sandsea/sandsea/internal/linux/pidfd"
	"github.com/sandsea/sandsea/internal/node"
	"github.com/sandsea/sandsea/internal/sandbox"
)

// gate is the way out of this node, or why there is none.
func (b *Backend) gate(id sandbox.ID) (*netslot.Gate, error) {
	if b.cfg.Gate != nil {
		return b.cfg.Gate, nil
	}
	e := errdefs.New(errdefs.FailedPrecondition, object(id), "network: this node cannot enforce a network policy").
		WithField("network", "").WithHint("See what is missing: sandsea doctor")
	e.Feature = node.FeatureEgress
	return nil, e
}

// attach makes a link into the network namespace of a process, with closed walls.
func attach(ctx context.Context, g *netslot.Gate, pid int, life *os.File, group *cgroup.Group) (*netslot.Slot, error) {
	ns, err := netns.OfProcess(pid)
	if err != nil {
		return nil, err
	}
	defer ns.Close()
	// Had it died before, the number might be another's by now.
	if dead, err := pidfd.Done(life); err != nil || dead {
		return nil, errors.Join(err, fmt.Errorf("process 1 of group %s is gone: %w", group.ID(), syscall.ESRCH))
	}
	id, err := group.Number()
	if err != nil {
		return nil, err
	}
	return g.Attach(ctx, ns, group.ID(), id)
}

// connect gives a shell its link.
func (b *Backend) connect(ctx context.Context, id sandbox.ID, s *shell) error {
	g, err := b.gate(id)
	if err != nil {
		return err
	}
	s.slot, err = attach(ctx, g, s.pid, s.pidfd, s.group)
	if err != nil {
		return fmt.Errorf("network link: %w", err)
	}
	s.taken.push(func(context.Context) error { return s.slot.Release() })
	return nil
}

// Link implements backend.Instance.
func (i *Instance) Link(ctx context.Context) (backend.Link, error) {
	i.stopping.Lock()
	defer i.stopping.Unlock()
	i.mu.Lock()
	slot, ending := i.slot, i.intent || i.gone
	i.mu.Unlock()
	switch {
	case slot != nil:
		return slot, nil
	case ending:
		return nil, errdefs.New(errdefs.NotFound, object(i.id), "it is ending")
	}
	g, err := i.b.gate(i.id)
	if err != nil {
		return nil, err
	}
	if slot, err = attach(ctx, g, i.pid, i.pidfd, i.group); err != nil {
		return nil, fmt.Errorf("network link of %s: %w", i.id, err)
	}
	i.mu.Lock()
	defer i.mu.Unlock()
	i.slot = slot
	if i.handle, err = i.encode(); err != nil {
		return nil, err
	}
	return slot, nil
}

// Dial implements backend.Instance.
func (i *Instance) Dial(ctx context.Context, port uint16) (net.Conn, error) {
	dead, err := pidfd.Done(i.pidfd)
	if err != nil || dead {
		return nil, errdefs.New(errdefs.NotFound, object(i.id), "it is ending").Wrap(err)
	}
	ns, err := netns.OfProcess(i.pid)
	if err != nil {
		return nil, i.unreachable(err)
	}
	defer ns.Close()
	// Had it died before, the number might be another's by now.
	if dead, err := pidfd.Done(i.pidfd); err != nil || dead {
		return nil, errdefs.New(errdefs.NotFound, object(i.id), "it is ending").Wrap(err)
	}
	hosts := []netip.Addr{netip.AddrFrom4([4]byte{127, 0, 0, 1}), netip.IPv6Loopback()}
	i.mu.Lock()
	if i.slot != nil {
		hosts = append(hosts, i.slot.Addr()) // of servers that listen at the host's own address alone
	}
	i.mu.Unlock()
	var errs []error
	for _, host := range hosts {
		c, err := netns.Dial(ctx, ns, "tcp", netip.AddrPortFrom(host, port).String())
		if err == nil {
			return c, nil
		}
		if errors.Is(err, syscall.EMFILE) || errors.Is(err, syscall.ENFILE) || errors.Is(err, syscall.ENOMEM) {
			return nil, i.unreachable(err)
		}
		errs = append(errs, err)
	}
	return nil, errdefs.New(errdefs.Unavailable, object(i.id), "nobody listens at port %s inside", strconv.Itoa(int(port))).
		WithField("port", "").WithHint("Start the server, or wait until it listens").Wrap(errors.Join(errs...))
}

// unreachable is the error of a connection that failed for lack of something on the node.
func (i *Instance) unreachable(err error) error {
	return errdefs.New(errdefs.Exhausted, object(i.id), "the node cannot connect to it now: %v", err).Wrap(err).
		WithHint("Try again in a moment").WithRetryAfter(time.Second)
}

// unlink gives the link back; it goes with the sandbox's network namespace.
func (i *Instance) unlink() error {
	i.mu.Lock()
	slot := i.slot
	i.mu.Unlock()
	if slot == nil {
		return nil
	}
	return slot.Release()
}
