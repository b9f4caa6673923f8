package dial

import (
	"context"
	"errors"
	"net"
	"net/netip"
	"sync"
	"time"

	"github.com/sandsea/sandsea/api/errdefs"
)

// How long answers hold. The resolver that is asked honours the real times; these only spare it repeated questions.
const (
	holds       = 20 * time.Second
	holdsAbsent = 2 * time.Second
	// maxCached is how many names are kept.
	maxCached = 8192
)

// cache asks about one name once at a time, for all sandboxes.
type cache struct {
	mu      sync.Mutex
	entries map[string]*entry // guarded by mu
}

type entry struct {
	done  chan struct{} // closed when the answer is there
	addrs []netip.Addr
	err   error
	until time.Time
}

func (c *cache) lookup(ctx context.Context, r Resolver, name string) ([]netip.Addr, error) {
	c.mu.Lock()
	e := c.entries[name]
	if e != nil {
		select {
		case <-e.done:
			if time.Now().After(e.until) {
				e = nil
			}
		default:
		}
	}
	if e == nil {
		if c.entries == nil || len(c.entries) >= maxCached {
			c.entries = map[string]*entry{} // whoever waits for an answer still gets it
		}
		e = &entry{done: make(chan struct{})}
		c.entries[name] = e
		// It answers others too, so it does not end with who asked first.
		go e.fill(context.WithoutCancel(ctx), r, name)
	}
	c.mu.Unlock()
	select {
	case <-e.done:
		return e.addrs, e.err
	case <-ctx.Done():
		return nil, context.Cause(ctx)
	}
}

var errLookup = errors.New("the resolver did not answer in time")

func (e *entry) fill(ctx context.Context, r Resolver, name string) {
	defer close(e.done)
	ctx, stop := context.WithTimeoutCause(ctx, lookupWithin, errLookup)
	defer stop()
	// The dot keeps the node's search domains out of it.
	addrs, err := r.LookupNetIP(ctx, "ip", name+".")
	e.until = time.Now().Add(holdsAbsent)
	if de, ok := errors.AsType[*net.DNSError](err); ok && de.IsNotFound || err == nil && len(addrs) == 0 {
		e.err = errdefs.New(errdefs.NotFound, name, "no such name")
		return
	}
	if err != nil {
		e.err = errdefs.New(errdefs.Unavailable, name, "the node's resolver does not answer for it").Wrap(err)
		return
	}
	for _, a := range addrs {
		e.addrs = append(e.addrs, a.Unmap().WithZone(""))
	}
	e.until = time.Now().Add(holds)
}
