package proxy

import (
	"errors"
	"fmt"
	"io"
	"net"
	"net/http"
	"strconv"
	"sync"

	"github.com/sandsea/sandsea/internal/aether/door"
	"github.com/sandsea/sandsea/internal/aether/forward"
	"github.com/sandsea/sandsea/internal/aether/roster"
	"github.com/sandsea/sandsea/internal/aether/wire"
)

// HTTP serves HTTP proxy requests until the listener is closed, and returns when all connections but tunnels have ended.
func HTTP(ln *door.Listener, f *forward.Forwarder) error {
	var tunnels sync.WaitGroup
	srv := forward.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		c := forward.ConnOf(r).(*client)
		if r.Method == http.MethodConnect {
			c.tunnel(w, r, &tunnels)
			return
		}
		c.request(w, r)
	}))
	srv.Protocols.SetHTTP2(false)
	srv.Protocols.SetUnencryptedHTTP2(false)
	err := srv.Serve(&listener{Listener: ln, f: f})
	_ = srv.Close()
	tunnels.Wait()
	if errors.Is(err, http.ErrServerClosed) || errors.Is(err, net.ErrClosed) {
		return nil
	}
	return fmt.Errorf("http proxy: %w", err)
}

// client is a sandbox's connection to the proxy.
type client struct {
	*door.Conn
	f        *forward.Forwarder
	guest    *forward.Guest
	requests *forward.Requests
}

// Guest makes client one of forward.NewServer's.
func (c *client) Guest() *forward.Guest { return c.guest }

func (c *client) Read(b []byte) (int, error) {
	n, err := c.Conn.Read(b)
	if herr := c.guest.Said(n); herr != nil {
		return 0, herr
	}
	return n, err
}

func (c *client) Write(b []byte) (int, error) {
	n, err := c.Conn.Write(b)
	c.guest.Heard(n)
	return n, err
}

// ReadFrom is Write of all that there is to read.
func (c *client) ReadFrom(r io.Reader) (int64, error) {
	n, err := c.Conn.ReadFrom(r)
	c.guest.Heard(int(n))
	return n, err
}

// Close ends what was opened for it, too.
func (c *client) Close() error {
	c.requests.Close()
	c.guest.Gone()
	return c.Conn.Close()
}

// listener makes clients.
type listener struct {
	*door.Listener
	f *forward.Forwarder
}

func (l *listener) Accept() (net.Conn, error) {
	c, err := l.Listener.Accept()
	if err != nil {
		return nil, err
	}
	in := c.(*door.Conn)
	return &client{Conn: in, f: l.f, guest: forward.NewGuest(in), requests: l.f.Requests(in.Box)}, nil
}

// request serves one in absolute form.
func (c *client) request(w http.ResponseWriter, r *http.Request) {
	if r.URL.Scheme != "http" || r.URL.Host == "" {
		http.Error(w, "this is a proxy: it takes http URLs, and CONNECT for everything else", http.StatusBadRequest)
		return
	}
	t, err := target(c.Box, r.URL.Host, 80)
	if err != nil {
		http.Error(w, err.Error(), http.StatusBadRequest)
		return
	}
	if t.Port == wire.PortMirrors && (forward.IsGateway(t.Name) || t.Addr == wire.Gateway) {
		c.requests.Local(w, r)
		return
	}
	r.URL.Scheme, r.URL.Host = "", ""
	c.requests.Serve(w, r, t)
}

// tunnel serves CONNECT.
func (c *client) tunnel(w http.ResponseWriter, r *http.Request, tunnels *sync.WaitGroup) {
	t, err := target(c.Box, r.Host, 0)
	if err != nil {
		http.Error(w, err.Error(), http.StatusBadRequest)
		return
	}
	h, ok := w.(http.Hijacker)
	if !ok {
		http.Error(w, "CONNECT needs HTTP/1", http.StatusHTTPVersionNotSupported)
		return
	}
	_, rw, err := h.Hijack()
	if err != nil {
		return
	}
	var early []byte
	if n := rw.Reader.Buffered(); n > 0 {
		early = make([]byte, n)
		_, _ = rw.Reader.Read(early) // as much as is there
	}
	tunnels.Go(func() {
		c.requests.Close()
		c.f.Tunnel(c.Conn, t, early, "connect", func(err error) error { return answer(c.Conn, err) })
	})
}

// answer tells the client how CONNECT went.
func answer(c net.Conn, err error) error {
	if err == nil {
		_, err := c.Write([]byte("HTTP/1.1 200 Connection established\r\n\r\n"))
		return err
	}
	w := &plain{header: http.Header{}}
	forward.WriteError(w, err)
	w.header.Set("Connection", "close")
	w.header.Set("Content-Length", strconv.Itoa(len(w.body)))
	head := fmt.Sprintf("HTTP/1.1 %d %s\r\n", w.status, http.StatusText(w.status))
	if _, err := c.Write([]byte(head)); err != nil {
		return err
	}
	if err := w.header.Write(c); err != nil {
		return err
	}
	_, err = c.Write(append([]byte("\r\n"), w.body...))
	return err
}

// plain keeps an answer.
type plain struct {
	header http.Header
	status int
	body   []byte
}

func (p *plain) Header() http.Header    { return p.header }
func (p *plain) WriteHeader(status int) { p.status = status }
func (p *plain) Write(b []byte) (int, error) {
	p.body = append(p.body, b...)
	return len(b), nil
}

// target reads "host:port"; without a port it is assumed, unless that is 0.
func target(s *roster.Sandbox, hostport string, assumed uint16) (forward.Target, error) {
	host, p, err := net.SplitHostPort(hostport)
	port := uint64(assumed)
	if err == nil {
		port, err = strconv.ParseUint(p, 10, 16)
	} else if assumed != 0 {
		host, err = hostport, nil
		if len(host) > 2 && host[0] == '[' && host[len(host)-1] == ']' {
			host = host[1 : len(host)-1]
		}
	}
	if err != nil || host == "" || port == 0 {
		return forward.Target{}, fmt.Errorf("%.80q is no host and port", hostport)
	}
	t, ok := forward.TargetOf(s, host, uint16(port))
	if !ok {
		return t, fmt.Errorf("%.80q stands for no name: ask the resolver again", host)
	}
	return t, nil
}
