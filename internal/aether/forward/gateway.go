package forward

import (
	"context"
	"net"
	"net/http"
	"sync"

	"github.com/sandsea/sandsea/internal/aether/door"
	"github.com/sandsea/sandsea/internal/aether/roster"
	"github.com/sandsea/sandsea/internal/aether/wire"
	"github.com/sandsea/sandsea/internal/policy"
)

// Gateway serves requests to the gateway itself, for package services, until the listener is closed.
func (f *Forwarder) Gateway(ln *door.Listener) error { return f.accept(ln, f.gateway) }

func (f *Forwarder) gateway(nc *door.Conn) {
	s := nc.Box
	l := roster.Label{Name: GatewayName, Addr: wire.Gateway, Port: wire.PortMirrors, Protocol: "http"}
	nc.Taken()
	flow, err := s.Open(policy.Question{}, l, func() { reset(nc) })
	if err != nil {
		s.Deny(l, err)
		reset(nc)
		return
	}
	c := &conn{Conn: nc, tcp: nc.TCPConn, flow: flow, guest: NewGuest(nc)}
	_ = f.web.serve(c, c, http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) { f.serveGateway(w, r, flow) }))
	_ = nc.Close()
	flow.Close(nil)
}

// Local answers a request to the gateway that came to the proxy.
func (q *Requests) Local(w http.ResponseWriter, r *http.Request) {
	ctx, cancel := context.WithCancelCause(r.Context())
	defer cancel(nil)
	l := roster.Label{Name: GatewayName, Addr: wire.Gateway, Port: wire.PortMirrors, Protocol: "http"}
	flow, err := q.box.Open(policy.Question{}, l, func() { cancel(errCut) })
	if err != nil {
		q.box.Deny(l, err)
		WriteError(w, err)
		return
	}
	defer flow.Close(nil)
	q.f.serveGateway(&tally{w, flow}, r.WithContext(ctx), flow)
}

// tally is the answer of a package service to a request that came to a proxy, whose connection is no flow that counts, or
// is cut.
type tally struct {
	http.ResponseWriter
	flow *roster.Flow
}

// Write counts.
func (t *tally) Write(b []byte) (int, error) {
	if t.flow.Cause() != nil {
		return 0, errCut
	}
	n, err := t.ResponseWriter.Write(b)
	if cerr := t.flow.Received(n); cerr != nil && err == nil {
		err = cerr
	}
	return n, err
}

// Unwrap is for http.ResponseController.
func (t *tally) Unwrap() http.ResponseWriter { return t.ResponseWriter }

// serveGateway answers one request to the gateway, on the connection that the flow is of.
func (f *Forwarder) serveGateway(w http.ResponseWriter, r *http.Request, flow *roster.Flow) {
	base := wire.Gateway.String()
	if IsGateway(r.Host) {
		base = r.Host
	}
	f.cfg.Services.ServeGateway(w, r, flow, "http://"+base)
}

// IsGateway tells whether a host, with its port if that is not 80, is the gateway's.
func IsGateway(host string) bool {
	return host == GatewayName || host == wire.Gateway.String()
}

// Requests are those that came to a proxy over one connection, for any number of targets.
type Requests struct {
	f   *Forwarder
	box *roster.Sandbox

	mu     sync.Mutex
	closed bool                // guarded by mu
	all    map[Target]*request // guarded by mu
}

// request is what is kept for one target.
type request struct {
	*exchange
	ctx    context.Context // ends when the flow is cut
	cancel context.CancelCauseFunc
}

// mostTargets bounds what is kept of one connection.
const mostTargets = 64

// Requests makes one for a connection of a sandbox.
func (f *Forwarder) Requests(s *roster.Sandbox) *Requests {
	return &Requests{f: f, box: s, all: map[Target]*request{}}
}

// Serve sends a request to its target. The request's URL is that of a path, its Host that of the target.
func (q *Requests) Serve(w http.ResponseWriter, r *http.Request, t Target) {
	e, err := q.of(t)
	if err != nil {
		q.box.Deny(t.label("http"), err)
		WriteError(w, err)
		return
	}
	ctx, cancel := context.WithCancelCause(r.Context())
	defer cancel(nil)
	stop := context.AfterFunc(e.ctx, func() { cancel(context.Cause(e.ctx)) })
	defer stop()
	if e.svc != nil {
		w = &tally{w, e.flow}
	}
	e.ServeHTTP(w, r.WithContext(ctx))
}

func (q *Requests) of(t Target) (*request, error) {
	q.mu.Lock()
	defer q.mu.Unlock()
	if e := q.all[t]; e != nil && e.ctx.Err() == nil {
		return e, nil
	}
	if q.closed {
		return nil, errEnded
	}
	if len(q.all) >= mostTargets {
		q.endLocked()
	}
	ctx, cancel := context.WithCancelCause(context.Background())
	flow, svc, err := q.f.admit(q.box, t, "http", func() { cancel(errCut) })
	if err != nil {
		cancel(err)
		return nil, err
	}
	e := &request{ctx: ctx, cancel: cancel, exchange: newExchange(q.f, flow, t, "http", svc, func(ctx context.Context) (net.Conn, error) {
		c, err := q.f.dial(ctx, flow, t)
		if err != nil {
			return nil, err
		}
		return &counted{Conn: c, flow: flow}, nil
	}, false)}
	if old := q.all[t]; old != nil {
		old.end()
	}
	q.all[t] = e
	return e, nil
}

func (e *request) end() {
	e.cancel(errEnded)
	e.close()
	e.flow.Close(nil)
}

func (q *Requests) endLocked() {
	for _, e := range q.all {
		e.end()
	}
	clear(q.all)
}

// Close ends them. Idempotent.
func (q *Requests) Close() {
	q.mu.Lock()
	defer q.mu.Unlock()
	q.closed = true
	q.endLocked()
}
