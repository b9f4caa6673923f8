package forward

import (
	"context"
	"crypto/tls"
	"errors"
	"io"
	"log"
	"net"
	"net/http"
	"sync"
	"time"
)

// The times of HTTP connections.
const (
	headerWithin = time.Minute
	idleWithin   = 15 * time.Minute
)

// maxHeader bounds the header of a request and of an answer.
const maxHeader = 64 << 10

// With HTTP/2, what is said before anybody reads it is kept here; these bound it, in bytes.
const (
	streams      = 32 // requests of one connection at once
	windowGuest  = 64 << 10
	windowGuests = 256 << 10 // of all streams of a connection
	windowHost   = 512 << 10
	windowHosts  = 2 << 20
)

// takesWithin is how long a client of HTTP/2 may take nothing of what is written to it.
const takesWithin = time.Minute

// web is the HTTP server of all connections that turn out to be HTTP.
type web struct {
	srv   *http.Server
	queue chan net.Conn
	ends  chan struct{}
	once  sync.Once
	run   sync.WaitGroup
}

func newWeb() *web {
	w := &web{queue: make(chan net.Conn), ends: make(chan struct{})}
	w.srv = NewServer(http.HandlerFunc(func(rw http.ResponseWriter, r *http.Request) {
		ConnOf(r).(*conn).handler.ServeHTTP(rw, r)
	}))
	w.run.Go(func() { _ = w.srv.Serve(w) }) // ends with close
	return w
}

// connKey finds the connection of a request in its context.
type connKey struct{}

// ConnOf is the connection that a request of NewServer's came over, without its TLS.
func ConnOf(r *http.Request) net.Conn { return r.Context().Value(connKey{}).(net.Conn) }

// guested is the connections that NewServer serves.
type guested interface {
	net.Conn
	Guest() *Guest
}

func guestedOf(c net.Conn) guested {
	if over, ok := c.(*tls.Conn); ok {
		c = over.NetConn()
	}
	return c.(guested)
}

// NewServer makes an HTTP server that bears what sandboxes do to it. It speaks HTTP/1 and HTTP/2, the latter also without
// TLS. What its listener accepts has a method Guest() *Guest, or is TLS over that.
func NewServer(h http.Handler) *http.Server {
	var p http.Protocols
	p.SetHTTP1(true)
	p.SetHTTP2(true)
	p.SetUnencryptedHTTP2(true)
	return &http.Server{
		Handler: http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
			ConnOf(r).(guested).Guest().serve(w, r, h)
		}),
		ConnContext: func(ctx context.Context, c net.Conn) context.Context {
			return context.WithValue(ctx, connKey{}, guestedOf(c))
		},
		ConnState: func(c net.Conn, s http.ConnState) {
			if s == http.StateIdle {
				guestedOf(c).Guest().release()
			}
		},
		ReadHeaderTimeout: headerWithin, IdleTimeout: idleWithin, MaxHeaderBytes: maxHeader, Protocols: &p,
		HTTP2: &http.HTTP2Config{
			MaxConcurrentStreams: streams, MaxReceiveBufferPerStream: windowGuest, MaxReceiveBufferPerConnection: windowGuests,
			WriteByteTimeout: takesWithin,
		},
		// What clients do wrong is theirs to see.
		ErrorLog: log.New(io.Discard, "", 0),
	}
}

// serve serves the requests of a connection, which over speaks, until it ends.
func (w *web) serve(c *conn, over net.Conn, h http.Handler) error {
	done := make(chan struct{})
	c.handler, c.closed = h, func() { close(done) }
	select {
	case w.queue <- over:
		<-done
	case <-w.ends:
	}
	return nil
}

// Accept, Close and Addr make web a net.Listener.
func (w *web) Accept() (net.Conn, error) {
	select {
	case c := <-w.queue:
		return c, nil
	case <-w.ends:
		return nil, net.ErrClosed
	}
}

// Close ends Accept.
func (w *web) Close() error {
	w.once.Do(func() { close(w.ends) })
	return nil
}

// Addr is nobody's.
func (w *web) Addr() net.Addr { return &net.TCPAddr{} }

func (w *web) close() {
	if err := w.srv.Close(); err != nil && !errors.Is(err, net.ErrClosed) {
		return
	}
	_ = w.Close()
	w.run.Wait()
}
