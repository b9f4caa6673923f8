package fake

import (
	"context"
	"fmt"
	"net"
	"net/netip"
	"strconv"

	"github.com/sandsea/sandsea/api/errdefs"
	"github.com/sandsea/sandsea/internal/edge/backend"
	"github.com/sandsea/sandsea/internal/policy"
	"github.com/sandsea/sandsea/internal/sandbox"
)

// link remembers the walls of a box, which survive edges as the kernel's do.
type link struct {
	w *World
	b *box
}

// Link implements backend.Instance.
func (i *instance) Link(context.Context) (backend.Link, error) {
	i.b.mu.Lock()
	defer i.b.mu.Unlock()
	if i.b.dead {
		return nil, errdefs.New(errdefs.NotFound, "sandbox "+i.b.id.Short(), "it is ending")
	}
	return link{i.f.w, i.b}, nil
}

// Addr implements backend.Link.
func (link) Addr() netip.Addr { return netip.AddrFrom4([4]byte{100, 64, 1, 1}) }

// Set implements backend.Link.
func (l link) Set(w policy.Walls) error {
	if err := l.w.step("link/set", l.b.id); err != nil {
		return err
	}
	l.b.mu.Lock()
	defer l.b.mu.Unlock()
	if l.b.dead {
		return errdefs.New(errdefs.NotFound, "sandbox "+l.b.id.Short(), "its link has been released")
	}
	l.b.walls = w
	return nil
}

// Walls are those in force for a sandbox; none for one that is not there.
func (w *World) Walls(id sandbox.ID) policy.Walls {
	b := w.box(id)
	if b == nil {
		return policy.Walls{}
	}
	b.mu.Lock()
	defer b.mu.Unlock()
	return b.walls
}

// Dial implements backend.Instance: programs of this world are in the test's own network.
func (*instance) Dial(ctx context.Context, port uint16) (net.Conn, error) {
	var d net.Dialer
	c, err := d.DialContext(ctx, "tcp", "127.0.0.1:"+strconv.Itoa(int(port)))
	if err != nil {
		return nil, errdefs.New(errdefs.Unavailable, "", "nobody listens at port %d inside", port).
			WithField("port", "").Wrap(fmt.Errorf("dial: %w", err))
	}
	return c, nil
}
