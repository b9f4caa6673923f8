// Package dial makes Aether's connections to the world, from the node's own network.
//
// Names are resolved here and nowhere else, at the moment of a connection, and every address is put to the caller's
// check before anything is sent to it: a name that resolves to an address on the platform's deny list leads nowhere,
// whatever else it resolves to. Errors say what went wrong in words that a sandbox may read; their kinds are Denied (no
// address may be dialled), NotFound (no such name), Deadline and Unavailable.
package dial

import (
	"bufio"
	"context"
	"crypto/tls"
	"encoding/base64"
	"errors"
	"fmt"
	"io"
	"net"
	"net/http"
	"net/netip"
	"net/url"
	"slices"
	"sync"
	"syscall"
	"time"

	"github.com/sandsea/sandsea/api/errdefs"
)

// The times that dialling goes by.
const (
	// connectWithin bounds a connection over all addresses of a name, and lookupWithin the search for them.
	connectWithin = 15 * time.Second
	lookupWithin  = 10 * time.Second
	// stagger is how long one address has before the next is tried beside it (RFC 8305).
	stagger = 250 * time.Millisecond
)

// most is how many addresses of a name are tried.
const most = 16

// keepAlive finds dead peers within two minutes without ever ending an idle connection whose peer lives.
var keepAlive = net.KeepAliveConfig{Enable: true, Idle: 60 * time.Second, Interval: 15 * time.Second, Count: 4}

// Resolver looks names up. *net.Resolver is one.
type Resolver interface {
	LookupNetIP(ctx context.Context, network, host string) ([]netip.Addr, error)
}

// Config of a Dialer. The zero Config uses the resolvers that the node has, and connects directly.
type Config struct {
	// Resolver is asked; nil: that of Resolvers.
	Resolver Resolver
	// Resolvers are the DNS servers asked, in turn; none: those that the node is configured with.
	Resolvers []netip.AddrPort
	// Proxy is an HTTP proxy (http or https, with user information if it wants some) that all TCP connections go
	// through, by CONNECT and by name: which addresses it may reach is its business then.
	Proxy *url.URL
	// ProxyTLS is how an https Proxy is verified; nil: as usual.
	ProxyTLS *tls.Config
}

// Dialer makes connections. Its methods may be called at once.
type Dialer struct {
	resolver Resolver
	proxy    *url.URL
	proxyTLS *tls.Config
	net      net.Dialer
	cache    cache
}

// New makes a Dialer.
func New(cfg Config) *Dialer {
	d := &Dialer{resolver: cfg.Resolver, proxy: cfg.Proxy, proxyTLS: cfg.ProxyTLS, net: net.Dialer{KeepAliveConfig: keepAlive}}
	if d.resolver == nil {
		d.resolver = resolverOf(cfg.Resolvers)
	}
	return d
}

// resolverOf asks these servers, one after the other: net.Resolver dials anew for each try.
func resolverOf(servers []netip.AddrPort) *net.Resolver {
	if len(servers) == 0 {
		return &net.Resolver{PreferGo: true}
	}
	var mu sync.Mutex
	next := 0
	return &net.Resolver{PreferGo: true, Dial: func(ctx context.Context, network, _ string) (net.Conn, error) {
		mu.Lock()
		server := servers[next%len(servers)]
		next++
		mu.Unlock()
		return (&net.Dialer{}).DialContext(ctx, network, server.String())
	}}
}

// Proxied tells whether TCP connections go through a proxy, so that their far side is not the host's.
func (d *Dialer) Proxied() bool { return d.proxy != nil }

// Check says whether an address may be dialled; its error is what the caller is told if no address may.
type Check func(netip.Addr) error

// Name connects to a name.
func (d *Dialer) Name(ctx context.Context, name string, port uint16, check Check) (net.Conn, error) {
	ctx, stop := context.WithTimeoutCause(ctx, connectWithin, errTimeout(name))
	defer stop()
	if d.proxy != nil {
		return d.throughProxy(ctx, net.JoinHostPort(name, fmt.Sprint(port)))
	}
	addrs, err := d.Lookup(ctx, name, check)
	if err != nil {
		return nil, err
	}
	return d.race(ctx, name, addrs, port)
}

// Addr connects to an address.
func (d *Dialer) Addr(ctx context.Context, to netip.AddrPort, check Check) (net.Conn, error) {
	if err := check(to.Addr()); err != nil {
		return nil, err
	}
	ctx, stop := context.WithTimeoutCause(ctx, connectWithin, errTimeout(to.String()))
	defer stop()
	if d.proxy != nil {
		return d.throughProxy(ctx, to.String())
	}
	c, err := d.net.DialContext(ctx, "tcp", to.String())
	if err != nil {
		return nil, failed(ctx, to.String(), err)
	}
	return c, nil
}

// UDP makes a connected socket to an address that was checked.
func (d *Dialer) UDP(ctx context.Context, to netip.AddrPort) (*net.UDPConn, error) {
	c, err := d.net.DialContext(ctx, "udp", to.String())
	if err != nil {
		return nil, failed(ctx, to.String(), err)
	}
	return c.(*net.UDPConn), nil
}

// Lookup gives the addresses of a name that may be dialled.
func (d *Dialer) Lookup(ctx context.Context, name string, check Check) ([]netip.Addr, error) {
	all, err := d.cache.lookup(ctx, d.resolver, name)
	if err != nil {
		return nil, err
	}
	var allowed []netip.Addr
	var denied error
	for _, a := range all {
		if err := check(a); err != nil {
			denied = err
			continue
		}
		allowed = append(allowed, a)
	}
	if len(allowed) == 0 {
		return nil, denied
	}
	return allowed[:min(len(allowed), most)], nil
}

// race connects to the first address that answers, IPv6 and IPv4 in turn.
func (d *Dialer) race(ctx context.Context, name string, addrs []netip.Addr, port uint16) (net.Conn, error) {
	if len(addrs) == 1 {
		c, err := d.net.DialContext(ctx, "tcp", netip.AddrPortFrom(addrs[0], port).String())
		if err != nil {
			return nil, failed(ctx, name, err)
		}
		return c, nil
	}
	addrs = interleave(addrs)
	ctx, cancel := context.WithCancelCause(ctx)
	type attempt struct {
		c   net.Conn
		err error
	}
	done := make(chan attempt)
	started, ended := 0, 0
	start := func() {
		to := netip.AddrPortFrom(addrs[started], port).String()
		started++
		go func() {
			c, err := d.net.DialContext(ctx, "tcp", to)
			done <- attempt{c, err}
		}()
	}
	defer func() {
		cancel(errWon)
		// Those that lost end at once now.
		for ; ended < started; ended++ {
			if a := <-done; a.c != nil {
				_ = a.c.Close()
			}
		}
	}()
	tick := time.NewTicker(stagger)
	defer tick.Stop()
	start()
	var first error
	for {
		select {
		case a := <-done:
			ended++
			if a.err == nil {
				return a.c, nil
			}
			if first == nil {
				first = a.err
			}
			if ended == len(addrs) {
				return nil, failed(ctx, name, first)
			}
			if started < len(addrs) {
				start()
				tick.Reset(stagger)
			}
		case <-tick.C:
			if started < len(addrs) {
				start()
			}
		}
	}
}

var errWon = errors.New("another address answered")

// interleave puts IPv6 and IPv4 in turn, each in the order that it came in.
func interleave(addrs []netip.Addr) []netip.Addr {
	var six, four, out []netip.Addr
	for _, a := range addrs {
		if a.Unmap().Is4() {
			four = append(four, a)
		} else {
			six = append(six, a)
		}
	}
	for len(six)+len(four) > 0 {
		for _, of := range []*[]netip.Addr{&six, &four} {
			if len(*of) > 0 {
				out = append(out, (*of)[0])
				*of = (*of)[1:]
			}
		}
	}
	return out
}

func errTimeout(object string) error {
	return errdefs.New(errdefs.Deadline, object, "no connection within %v", connectWithin)
}

// failed gives a dialling error its kind.
func failed(ctx context.Context, object string, err error) error {
	if cause := context.Cause(ctx); cause != nil && !errors.Is(cause, errWon) {
		return cause
	}
	why := "unreachable"
	for _, c := range []struct {
		errno syscall.Errno
		why   string
	}{
		{syscall.ECONNREFUSED, "connection refused"},
		{syscall.ECONNRESET, "connection reset"},
		{syscall.ETIMEDOUT, "no answer"},
		{syscall.ENETUNREACH, "no route"},
		{syscall.EHOSTUNREACH, "no route"},
		{syscall.EMFILE, "the node has no descriptors left"},
		{syscall.EADDRNOTAVAIL, "the node has no ports left"},
	} {
		if errors.Is(err, c.errno) {
			why = c.why
		}
	}
	return errdefs.New(errdefs.Unavailable, object, "%s", why).Wrap(err)
}

// throughProxy connects by CONNECT.
func (d *Dialer) throughProxy(ctx context.Context, to string) (net.Conn, error) {
	object := "upstream proxy " + d.proxy.Host
	host := d.proxy.Host
	if d.proxy.Port() == "" {
		host = net.JoinHostPort(d.proxy.Hostname(), map[string]string{"http": "80", "https": "443"}[d.proxy.Scheme])
	}
	c, err := d.net.DialContext(ctx, "tcp", host)
	if err != nil {
		return nil, failed(ctx, object, err)
	}
	stop := context.AfterFunc(ctx, func() { _ = c.SetDeadline(time.Unix(1, 0)) })
	got, err := d.connect(ctx, c, to)
	if !stop() && err == nil {
		err = context.Cause(ctx)
	}
	if err != nil {
		_ = c.Close()
		if errors.Is(err, errdefs.Unavailable) {
			return nil, err
		}
		return nil, failed(ctx, object, err)
	}
	return got, nil
}

// maxAnswer bounds what a proxy may say before the tunnel.
const maxAnswer = 64 << 10

func (d *Dialer) connect(ctx context.Context, c net.Conn, to string) (net.Conn, error) {
	if d.proxy.Scheme == "https" {
		cfg := &tls.Config{}
		if d.proxyTLS != nil {
			cfg = d.proxyTLS.Clone()
		}
		cfg.ServerName = d.proxy.Hostname()
		over := tls.Client(c, cfg)
		if err := over.HandshakeContext(ctx); err != nil {
			return nil, err
		}
		c = over
	}
	req := &http.Request{Method: http.MethodConnect, URL: &url.URL{Opaque: to}, Host: to, Header: http.Header{}}
	if u := d.proxy.User; u != nil {
		password, _ := u.Password()
		req.Header.Set("Proxy-Authorization", "Basic "+base64.StdEncoding.EncodeToString([]byte(u.Username()+":"+password)))
	}
	if err := req.Write(c); err != nil {
		return nil, err
	}
	br := bufio.NewReader(io.LimitReader(c, maxAnswer))
	resp, err := http.ReadResponse(br, req)
	if err != nil {
		return nil, err
	}
	_ = resp.Body.Close()
	if resp.StatusCode != http.StatusOK {
		return nil, errdefs.New(errdefs.Unavailable, "upstream proxy "+d.proxy.Host, "answers %d to a tunnel to %s", resp.StatusCode, to)
	}
	if n := br.Buffered(); n > 0 {
		early, _ := br.Peek(n)
		return &tunnel{Conn: c, early: slices.Clone(early)}, nil
	}
	return c, nil
}

// tunnel is a connection whose first bytes came with the proxy's answer.
type tunnel struct {
	net.Conn
	early []byte
}

func (t *tunnel) Read(b []byte) (int, error) {
	if len(t.early) > 0 {
		n := copy(b, t.early)
		t.early = t.early[n:]
		return n, nil
	}
	return t.Conn.Read(b)
}

// CloseWrite ends one direction, where the connection can.
func (t *tunnel) CloseWrite() error {
	if c, ok := t.Conn.(interface{ CloseWrite() error }); ok {
		return c.CloseWrite()
	}
	return errors.ErrUnsupported
}
