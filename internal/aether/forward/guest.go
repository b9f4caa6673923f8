package forward

import (
	"context"
	"encoding/binary"
	"errors"
	"net"
	"net/http"
	"sync"
	"sync/atomic"
	"syscall"
	"time"

	"github.com/sandsea/sandsea/internal/aether/door"
	"github.com/sandsea/sandsea/internal/aether/roster"
)

// Guest is what a connection of a sandbox that speaks HTTP holds here. It keeps all of a sandbox's requests within what the
// roster lets it have, and ends those whose client has gone. Its methods may be called at once.
type Guest struct {
	conn  *door.Conn
	moved atomic.Int64 // bytes, both ways

	mu      sync.Mutex
	gone    bool // guarded by mu
	serving int  // guarded by mu: requests
	held    int  // guarded by mu: bytes read since the last request, none while one is served
}

// NewGuest makes one of a connection that nothing was read from.
func NewGuest(c *door.Conn) *Guest { return &Guest{conn: c} }

// mostHeld is what one connection is counted for: the server reads no more of a header.
const mostHeld = 2 * maxHeader

// Said counts bytes that were read. An error says that the sandbox has begun too many requests; the connection must end.
func (g *Guest) Said(n int) error {
	g.moved.Add(int64(n))
	g.mu.Lock()
	defer g.mu.Unlock()
	if n = min(n, mostHeld-g.held); g.gone || g.serving > 0 || n <= 0 {
		return nil
	}
	if err := g.conn.Box.Hold(n); err != nil {
		g.conn.Box.Deny(g.label(), err)
		return err
	}
	g.held += n
	return nil
}

// Heard counts bytes that were written.
func (g *Guest) Heard(n int) { g.moved.Add(int64(n)) }

// Gone says that the connection is closed. Idempotent.
func (g *Guest) Gone() {
	g.mu.Lock()
	defer g.mu.Unlock()
	g.gone = true
	g.releaseLocked()
}

// release gives up what is counted: no request is half said.
func (g *Guest) release() {
	g.mu.Lock()
	defer g.mu.Unlock()
	g.releaseLocked()
}

func (g *Guest) releaseLocked() {
	_ = g.conn.Box.Hold(-g.held) // less is always possible
	g.held = 0
}

func (g *Guest) label() roster.Label {
	l := roster.Label{Protocol: "http"}
	if to, ok := g.conn.LocalAddr().(*net.TCPAddr); ok {
		l.Addr, l.Port = to.AddrPort().Addr().Unmap(), to.AddrPort().Port()
	}
	return l
}

// serve has a request served in its turn, for as long as its client is there.
func (g *Guest) serve(w http.ResponseWriter, r *http.Request, h http.Handler) {
	g.mu.Lock()
	g.serving++
	g.releaseLocked()
	g.mu.Unlock()
	defer func() {
		g.mu.Lock()
		defer g.mu.Unlock()
		g.serving--
	}()
	ctx, stop := g.attend(r.Context())
	defer stop()
	err := g.conn.Box.Request(ctx, func(err error) {
		if err != nil {
			g.conn.Box.Deny(g.label(), err)
			crowded(w, err)
			return
		}
		h.ServeHTTP(w, r.WithContext(ctx))
	})
	if err != nil {
		if _, ok := errors.AsType[*roster.Denial](err); ok {
			g.conn.Box.Deny(g.label(), err)
		}
		// An answer could wait for its client, and hold the request meanwhile.
		panic(http.ErrAbortHandler)
	}
}

// crowded answers a request that had no turn.
func crowded(w http.ResponseWriter, err error) {
	if d, ok := errors.AsType[*roster.Denial](err); ok {
		w.Header().Set("Sandsea-Rule", d.Rule)
	}
	w.Header().Set("Retry-After", "5")
	http.Error(w, err.Error(), http.StatusServiceUnavailable)
}

// attends is how often somebody looks whether the client of a request is still there. Most ends are seen at once; not that
// of a client whose last words nobody reads, since the host does not, or that of an upgraded connection.
const attends = 5 * time.Second

var errLeft = errors.New("the client has gone")

// attend gives a context that ends when the client has ended its side and nothing has moved since the last look.
func (g *Guest) attend(parent context.Context) (context.Context, func()) {
	ctx, cancel := context.WithCancelCause(parent)
	ended, moved := false, int64(0)
	var mu sync.Mutex
	var tick *time.Timer // guarded by mu
	mu.Lock()
	defer mu.Unlock()
	tick = time.AfterFunc(attends, func() {
		now := g.moved.Load()
		if g.ended() {
			if ended && moved == now {
				cancel(errLeft)
				return
			}
			ended, moved = true, now
		}
		mu.Lock()
		defer mu.Unlock()
		if ctx.Err() == nil {
			tick.Reset(attends)
		}
	})
	return ctx, func() {
		cancel(errEnded)
		mu.Lock()
		defer mu.Unlock()
		tick.Stop()
	}
}

// States of a connection whose far side has closed, or is gone: include/net/tcp_states.h.
const (
	tcpClose     = 7
	tcpCloseWait = 8
	tcpLastAck   = 9
)

// ended tells whether the client has ended its side, whatever it said before and nobody has read yet.
func (g *Guest) ended() bool {
	rc, err := g.conn.SyscallConn()
	if err != nil {
		return true // closed
	}
	var state byte
	if cerr := rc.Control(func(fd uintptr) {
		var v int
		v, err = syscall.GetsockoptInt(int(fd), syscall.IPPROTO_TCP, syscall.TCP_INFO)
		var raw [4]byte
		binary.NativeEndian.PutUint32(raw[:], uint32(v))
		state = raw[0] // tcpi_state
	}); cerr != nil {
		return true
	}
	return err == nil && (state == tcpClose || state == tcpCloseWait || state == tcpLastAck)
}
