// Package door lets sandboxes in: its listeners accept connections of sandboxes that the roster knows, so many of each at
// once and no more, and reset all others. A connection to the gateway counts for the project's limit of flows until it is
// taken by one.
package door

import (
	"errors"
	"net"
	"net/netip"
	"sync"
	"syscall"
	"time"

	"github.com/sandsea/sandsea/internal/aether/roster"
)

// Listener accepts connections of sandboxes, which are *Conn.
type Listener struct {
	net.Listener
	roster *roster.Roster
	most   int64
	flows  bool // connections are flows from the first

	mu   sync.Mutex
	open map[netip.Addr]int64 // guarded by mu: connections of sandboxes that have any
}

// New makes a Listener over another, which it closes. most is how many connections of a sandbox may be open at once.
func New(ln net.Listener, r *roster.Roster, most int) *Listener {
	return &Listener{Listener: ln, roster: r, most: int64(most), open: map[netip.Addr]int64{}}
}

// Flows makes a Listener, likewise, whose connections each become a flow at once.
func Flows(ln net.Listener, r *roster.Roster, most int) *Listener {
	l := New(ln, r, most)
	l.flows = true
	return l
}

// Conn is a connection of a sandbox.
type Conn struct {
	*net.TCPConn
	Box *roster.Sandbox
	// Taken says that the connection is a flow from now on, which counts by itself. Idempotent.
	Taken func()

	ln   *Listener
	once sync.Once
}

// Accept gives the next connection.
func (l *Listener) Accept() (net.Conn, error) {
	for {
		c, err := l.Listener.Accept()
		if err != nil {
			// No descriptors, no memory: others end soon.
			for _, short := range []syscall.Errno{syscall.EMFILE, syscall.ENFILE, syscall.ENOMEM, syscall.ENOBUFS, syscall.ECONNABORTED} {
				if errors.Is(err, short) {
					time.Sleep(5 * time.Millisecond)
					err = nil
				}
			}
			if err != nil {
				return nil, err
			}
			continue
		}
		tcp, ok := c.(*net.TCPConn)
		if !ok {
			_ = c.Close()
			continue
		}
		from, ok := tcp.RemoteAddr().(*net.TCPAddr)
		if ok {
			var box *roster.Sandbox
			if box, ok = l.roster.ByAddr(from.AddrPort().Addr()); ok {
				if conn := l.conn(box, tcp); conn != nil {
					return conn, nil
				}
			}
		}
		_ = tcp.SetLinger(0) // a reset is quicker understood
		_ = tcp.Close()
	}
}

// conn lets a connection of a sandbox in; nil: there is no room for it.
func (l *Listener) conn(box *roster.Sandbox, tcp *net.TCPConn) *Conn {
	if !l.enter(box.Addr) {
		return nil
	}
	c := &Conn{TCPConn: tcp, Box: box, Taken: func() {}, ln: l}
	if l.flows {
		return c
	}
	taken, err := box.Arrive()
	if err != nil {
		l.leave(box.Addr)
		at := roster.Label{Protocol: "tcp"}
		if to, ok := tcp.LocalAddr().(*net.TCPAddr); ok {
			at.Addr, at.Port = to.AddrPort().Addr().Unmap(), to.AddrPort().Port()
		}
		box.Deny(at, err)
		return nil
	}
	c.Taken = taken
	return c
}

func (l *Listener) enter(a netip.Addr) bool {
	l.mu.Lock()
	defer l.mu.Unlock()
	if l.open[a] >= l.most {
		return false
	}
	l.open[a]++
	return true
}

func (l *Listener) leave(a netip.Addr) {
	l.mu.Lock()
	defer l.mu.Unlock()
	if l.open[a]--; l.open[a] <= 0 {
		delete(l.open, a)
	}
}

// Close closes the connection.
func (c *Conn) Close() error {
	c.once.Do(func() {
		c.Taken()
		c.ln.leave(c.Box.Addr)
	})
	return c.TCPConn.Close()
}
