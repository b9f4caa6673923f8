package forward

import (
	"net"
	"sync"
)

// hosts are the connections to a target that an exchange has open: what its transport keeps must end with the exchange.
type hosts struct {
	mu     sync.Mutex
	closed bool               // guarded by mu
	open   map[*host]struct{} // guarded by mu
}

// host is one of them.
type host struct {
	net.Conn
	of *hosts
}

// add makes a connection one of them, or closes it if they have ended.
func (h *hosts) add(c net.Conn) (net.Conn, error) {
	h.mu.Lock()
	defer h.mu.Unlock()
	if h.closed {
		_ = c.Close()
		return nil, errEnded
	}
	if h.open == nil {
		h.open = map[*host]struct{}{}
	}
	one := &host{Conn: c, of: h}
	h.open[one] = struct{}{}
	return one, nil
}

// close closes all. Idempotent.
func (h *hosts) close() {
	h.mu.Lock()
	h.closed = true
	open := h.open
	h.open = nil
	h.mu.Unlock()
	for one := range open {
		_ = one.Conn.Close() // one that is closed already is no loss
	}
}

// Close closes one.
func (h *host) Close() error {
	h.of.mu.Lock()
	delete(h.of.open, h)
	h.of.mu.Unlock()
	return h.Conn.Close()
}

// CloseWrite ends the direction to the host.
func (h *host) CloseWrite() error { return closeWrite(h.Conn) }
