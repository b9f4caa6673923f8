package forward

import (
	"context"
	"crypto/tls"
	"errors"
	"io"
	"log"
	"net"
	"net/http"
	"net/http/httputil"
	"net/netip"
	"strconv"
	"strings"
	"time"

	"github.com/sandsea/sandsea/api/errdefs"
	"github.com/sandsea/sandsea/internal/aether/mirror"
	"github.com/sandsea/sandsea/internal/aether/roster"
	"github.com/sandsea/sandsea/internal/policy"
)

// exchange is the requests of one connection to one target. Each is sent anew over connections of the exchange's own, so
// that two sandboxes never share one.
type exchange struct {
	f         *Forwarder
	flow      *roster.Flow
	target    Target
	scheme    string
	svc       mirror.Service
	transport *http.Transport
	proxy     *httputil.ReverseProxy
	hosts     hosts
}

// dialFunc makes a connection to the target of an exchange.
type dialFunc func(ctx context.Context) (net.Conn, error)

// taking gives the connection that is there, then new ones, and those that are judged by a request of their own.
func (f *Forwarder) taking(flow *roster.Flow, t Target, up *upstream) dialFunc {
	return func(ctx context.Context) (net.Conn, error) {
		if ctx.Value(questionKey{}) == nil && up.take() {
			return up.wait()
		}
		return f.dial(ctx, flow, t)
	}
}

// newExchange makes one. h2c: the client speaks HTTP/2 without TLS, and so must the target (gRPC).
func newExchange(f *Forwarder, flow *roster.Flow, t Target, scheme string, svc mirror.Service, dial dialFunc, h2c bool) *exchange {
	e := &exchange{f: f, flow: flow, target: t, scheme: scheme, svc: svc}
	e.transport = &http.Transport{
		DialContext: func(ctx context.Context, _, _ string) (net.Conn, error) {
			c, err := dial(ctx)
			if err != nil {
				return nil, err
			}
			return e.hosts.add(c)
		},
		TLSClientConfig:        &tls.Config{ServerName: t.Name, RootCAs: f.cfg.Roots, MinVersion: tls.VersionTLS12},
		TLSHandshakeTimeout:    15 * time.Second,
		ExpectContinueTimeout:  time.Second,
		IdleConnTimeout:        90 * time.Second,
		DisableCompression:     true,
		MaxResponseHeaderBytes: maxHeader,
		Protocols:              new(http.Protocols),
		HTTP2:                  &http.HTTP2Config{MaxReceiveBufferPerStream: windowHost, MaxReceiveBufferPerConnection: windowHosts},
	}
	e.transport.Protocols.SetHTTP1(!h2c)
	e.transport.Protocols.SetHTTP2(!h2c)
	e.transport.Protocols.SetUnencryptedHTTP2(h2c)
	e.proxy = &httputil.ReverseProxy{
		Rewrite:       e.rewrite,
		Transport:     e.transport,
		FlushInterval: -1, // what comes goes on at once
		BufferPool:    pool{},
		ErrorHandler:  e.failed,
		ErrorLog:      log.New(io.Discard, "", 0), // the flow log tells
	}
	return e
}

// close ends all connections to the target.
func (e *exchange) close() {
	e.transport.CloseIdleConnections()
	e.hosts.close()
}

// pool makes buffers of the relay those of the proxy.
type pool struct{}

func (pool) Get() []byte  { return *buffers.Get().(*[]byte) }
func (pool) Put(b []byte) { buffers.Put(&b) }

// ServeHTTP answers one request.
func (e *exchange) ServeHTTP(w http.ResponseWriter, r *http.Request) {
	box := e.flow.Sandbox()
	err := e.host(r.Host)
	if err == nil && r.URL.Opaque != "" {
		// "x:http://neighbour.example/" would be sent as the URL in it, whose host counts more than the header's.
		err = mismatch(ruleHost, "%.80q is no path", r.RequestURI)
	}
	if err != nil {
		// What comes behind such a request cannot be trusted to be one.
		w.Header().Set("Connection", "close")
		e.deny(w, err)
		return
	}
	if r.Method == http.MethodConnect {
		http.Error(w, "this is no proxy", http.StatusMethodNotAllowed)
		return
	}
	if e.svc != nil {
		if e.f.cfg.Services.ServeHost(w, r, e.flow, e.svc, e.scheme, e.target.Name) {
			return
		}
		e.deny(w, mismatch("service "+e.svc.Name(), "%s has nothing at this place", e.svc.Name()))
		return
	}
	v := box.Judge(e.target.question())
	if onlyRepos(box, e.target) {
		q, ok := e.clone(r)
		if !ok {
			v = policy.Verdict{Rule: "service git:" + e.target.Name, Reason: "only clones of repositories are allowed at " + e.target.Name}
		} else {
			var done func()
			v, done = e.flow.During(q)
			defer done()
			r = r.WithContext(context.WithValue(r.Context(), questionKey{}, q))
		}
	}
	if v.Allow {
		if d := e.repo(r); !d.Allow {
			v = d
		}
	}
	if !v.Allow {
		e.deny(w, roster.Refusal(v))
		return
	}
	if v.Secret != "" {
		s, ok := e.f.cfg.Secrets[v.Secret]
		switch {
		case !ok || !s.For(e.flow.Sandbox().Project):
			e.deny(w, mismatch(v.Rule, "the operator's aether.toml has no secret %.80q for this project", v.Secret))
			return
		case e.scheme != "https":
			// Goes on without it.
		case !s.Covers(e.target.Name):
			e.deny(w, mismatch(v.Rule, "the secret %.80q does not go to %s", v.Secret, e.target.Name))
			return
		case r.Method == http.MethodTrace:
			e.deny(w, mismatch(v.Rule, "TRACE would show the secret %.80q", v.Secret))
			return
		default:
			r = r.WithContext(context.WithValue(r.Context(), secretKey{}, header{s.Header, s.Value}))
		}
	}
	// A host that answers before it has read all is heard at once. HTTP/2 always does.
	_ = http.NewResponseController(w).EnableFullDuplex()
	e.proxy.ServeHTTP(w, r)
}

// secretKey finds the header to add in the context of a request.
type secretKey struct{}

// header is a line of one.
type header struct{ name, value string }

// host checks that a request is for the target.
func (e *exchange) host(header string) error {
	host, port := header, uint16(0)
	if h, p, err := net.SplitHostPort(header); err == nil {
		n, err := strconv.ParseUint(p, 10, 16)
		if err != nil {
			return mismatch(ruleHost, "the host %.80q has no port", header)
		}
		host, port = h, uint16(n)
	}
	if port != 0 && port != e.target.Port {
		return mismatch(ruleHost, "the host is %.80q, the connection is to %s", header, e.target)
	}
	if e.target.Name != "" {
		if roster.Canonical(host) != e.target.Name {
			return mismatch(ruleHost, "the host is %.80q, the connection is to %s", header, e.target)
		}
		return nil
	}
	if _, err := netip.ParseAddr(host); err == nil || host == "" {
		return nil
	}
	return rejected(e.flow.Sandbox(), e.target, roster.Canonical(host))
}

// rewrite makes the request that is sent from the one that came.
func (e *exchange) rewrite(p *httputil.ProxyRequest) {
	p.Out.URL.Scheme, p.Out.URL.Host = e.scheme, e.target.String()
	p.Out.URL.RawQuery = p.In.URL.RawQuery
	p.Out.Host = p.In.Host
	for _, h := range []string{"Forwarded", "X-Forwarded-For", "X-Forwarded-Host", "X-Forwarded-Proto"} {
		if v, ok := p.In.Header[h]; ok {
			p.Out.Header[h] = v
		}
	}
	if u := strings.ToLower(p.Out.Header.Get("Upgrade")); strings.Contains(u, "h2c") || strings.Contains(u, "tls") {
		// Behind them come requests that nobody would read.
		for _, h := range []string{"Upgrade", "Connection", "Http2-Settings"} {
			p.Out.Header.Del(h)
		}
	}
	if h, ok := p.In.Context().Value(secretKey{}).(header); ok {
		p.Out.Header.Set(h.name, h.value)
	}
}

// deny answers a request that may not be, and writes it down.
func (e *exchange) deny(w http.ResponseWriter, err error) {
	e.flow.Sandbox().Deny(e.label(), err)
	WriteError(w, err)
}

func (e *exchange) label() roster.Label {
	l := e.target.label(e.scheme)
	l.Service = serviceName(e.svc)
	return l
}

// failed answers a request whose target was not reached.
func (e *exchange) failed(w http.ResponseWriter, _ *http.Request, err error) {
	switch {
	case errors.Is(err, errdefs.Denied):
		e.flow.Sandbox().Deny(e.label(), err)
	case !errors.Is(err, context.Canceled): // whoever asked went away
		e.flow.Failed(err)
	}
	WriteError(w, err)
}

// WriteError answers with what stands in the way of a request: 403 with the rule's name in the header Sandsea-Rule, or
// what became of the attempt.
func WriteError(w http.ResponseWriter, err error) {
	if d, ok := errors.AsType[*roster.Denial](err); ok {
		w.Header().Set("Sandsea-Rule", d.Rule)
		http.Error(w, d.Error(), http.StatusForbidden)
		return
	}
	if e, ok := errors.AsType[*errdefs.Error](err); ok {
		status := http.StatusBadGateway
		switch {
		case e.Kind == errdefs.Denied:
			status = http.StatusForbidden
		case e.Kind == errdefs.Deadline:
			status = http.StatusGatewayTimeout
		}
		http.Error(w, e.Object+": "+e.Msg, status)
		return
	}
	if cert, ok := errors.AsType[*tls.CertificateVerificationError](err); ok {
		http.Error(w, "the host's certificate does not hold: "+cert.Err.Error(), http.StatusBadGateway)
		return
	}
	http.Error(w, "the host broke the connection off", http.StatusBadGateway)
}
