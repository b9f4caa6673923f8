package apiserver

import (
	"context"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"mime"
	"net"
	"net/http"
	"net/http/httputil"
	"net/url"
	"os"
	"strconv"
	"strings"
	"sync"
	"time"

	"github.com/sandsea/sandsea/api/errdefs"
	"github.com/sandsea/sandsea/internal/control/iam"
	"github.com/sandsea/sandsea/internal/sandbox"
)

// Where a token of an endpoint may stand. None of the three reaches the sandbox.
const (
	EndpointHeader    = "Sandsea-Endpoint-Token"
	endpointParameter = "sandsea_endpoint_token"
	endpointCookie    = "sandsea_endpoint_token"
)

// ErrorHeader is in answers of the platform under an endpoint's address, with the kind of the error, and never in those
// of the server inside.
const ErrorHeader = "Sandsea-Error"

const (
	endpointPrefix = "/endpoint/"
	// endpointConnect is how long a server inside may take to accept a connection.
	endpointConnect = 10 * time.Second
	// endpointIdle is how long a connection to a server inside is kept for the next request. It is less than servers
	// keep theirs, and counts as use of the sandbox.
	endpointIdle     = 2 * time.Second
	endpointIdlePort = 32
	endpointIdleAll  = 1024
	// endpointRequests is how many requests of one sandbox's endpoints may be under way.
	endpointRequests = 1024
	endpointBuffer   = 64 << 10
)

var errEndpointConnect = fmt.Errorf("the server inside did not accept within %s: %w", endpointConnect, context.DeadlineExceeded)

// endpoints is the door of the servers inside sandboxes: what comes to /endpoint/<id>/<port>/ with a token goes on to that
// port, by a tunnel through the node. It speaks HTTP/1.1 inside, and HTTP/2 without TLS for gRPC. Bodies pass in both
// directions at once and nothing but a connect has a time limit.
type endpoints struct {
	s          *Server
	key        endpointKey
	plain, h2c *http.Transport
	buffers    buffers
	log        *slog.Logger

	mu   sync.Mutex
	open map[sandbox.ID]int // guarded by mu; requests under way
}

func newEndpoints(s *Server) *endpoints {
	e := &endpoints{
		s: s, key: endpointKey{store: s.store}, log: s.log, open: map[sandbox.ID]int{},
		buffers: buffers{New: func() any { return new([endpointBuffer]byte) }},
	}
	transport := func(set func(*http.Protocols)) *http.Transport {
		var p http.Protocols
		set(&p)
		return &http.Transport{
			DialContext: e.dial, Protocols: &p, DisableCompression: true, MaxResponseHeaderBytes: maxHeaders,
			MaxIdleConns: endpointIdleAll, MaxIdleConnsPerHost: endpointIdlePort, IdleConnTimeout: endpointIdle,
			ReadBufferSize: endpointBuffer, WriteBufferSize: endpointBuffer,
		}
	}
	e.plain = transport(func(p *http.Protocols) { p.SetHTTP1(true) })
	e.h2c = transport(func(p *http.Protocols) { p.SetUnencryptedHTTP2(true) })
	return e
}

// close drops the idle connections.
func (e *endpoints) close() {
	e.plain.CloseIdleConnections()
	e.h2c.CloseIdleConnections()
}

// path is where a port is found at a server of ours.
func (p place) path() string {
	return endpointPrefix + string(p.id) + "/" + strconv.Itoa(int(p.port)) + "/"
}

// readPlace takes a path apart: rest begins with the slash behind the port, and is empty when there is none.
func readPlace(path string) (at place, rest string, ok bool) {
	path, ok = strings.CutPrefix(path, endpointPrefix)
	if !ok {
		return at, "", false
	}
	raw, path, _ := strings.Cut(path, "/")
	number := path
	if i := strings.IndexByte(path, '/'); i >= 0 {
		number, rest = path[:i], path[i:]
	}
	id, err := sandbox.Parse(raw)
	port, perr := strconv.ParseUint(number, 10, 16)
	if err != nil || perr != nil || port == 0 || strconv.FormatUint(port, 10) != number {
		return at, "", false
	}
	return place{id, uint16(port)}, rest, true
}

func (e *endpoints) ServeHTTP(w http.ResponseWriter, r *http.Request) {
	at, rest, ok := readPlace(r.URL.EscapedPath())
	switch {
	case !ok:
		e.refuse(w, r, http.StatusNotFound, errdefs.New(errdefs.Invalid, "", "no endpoint %q", clip(r.URL.Path)).
			WithHint("Ask for one: sandsea endpoint ID PORT"))
		return
	case rest == "":
		target := *r.URL
		target.Path, target.RawPath = at.path(), ""
		w.Header().Set("Location", target.RequestURI())
		w.WriteHeader(http.StatusPermanentRedirect)
		return
	}
	c := readClaim(r)
	project, token, err := e.admit(r.Context(), at, c.tokens)
	if err != nil {
		e.refuse(w, r, 0, err)
		return
	}
	if c.visit {
		e.welcome(w, r, at, token, c.query)
		return
	}
	done, err := e.enter(at.id)
	if err != nil {
		e.refuse(w, r, 0, err)
		return
	}
	defer done()
	who := iam.Caller{Principal: "endpoint", Project: project, Covers: []string{project}}
	e.forward(w, r.WithContext(context.WithValue(r.Context(), callerKey, who)), at, rest, c)
}

// claim is what a request holds of ours, and what is left of it without that.
type claim struct {
	tokens []string
	query  string   // without the parameter
	cookie []string // the headers without ours
	visit  bool     // a browser that comes by the address with the parameter
}

// readClaim finds the tokens of a request: those of the first place that has any.
func readClaim(r *http.Request) claim {
	var c claim
	var inQuery, inCookie []string
	c.query, inQuery = takeParameter(r.URL.RawQuery)
	for _, line := range r.Header["Cookie"] {
		kept, tokens := takeCookie(line)
		inCookie = append(inCookie, tokens...)
		if kept != "" {
			c.cookie = append(c.cookie, kept)
		}
	}
	inHeader := r.Header[http.CanonicalHeaderKey(EndpointHeader)]
	switch {
	case len(inHeader) > 0:
		c.tokens = inHeader
	case len(inQuery) > 0:
		c.tokens = inQuery
		c.visit = (r.Method == http.MethodGet || r.Method == http.MethodHead) && r.Header.Get("Upgrade") == ""
	default:
		c.tokens = inCookie
	}
	return c
}

// takeParameter takes ours out of a query and leaves the rest as it is.
func takeParameter(query string) (rest string, values []string) {
	var kept []string
	for part := range strings.SplitSeq(query, "&") {
		name, value, _ := strings.Cut(part, "=")
		if name, err := url.QueryUnescape(name); err != nil || name != endpointParameter {
			kept = append(kept, part)
			continue
		}
		if v, err := url.QueryUnescape(value); err == nil {
			value = v
		}
		values = append(values, value)
	}
	return strings.Join(kept, "&"), values
}

// takeCookie takes ours out of a Cookie header and leaves the rest as it is.
func takeCookie(line string) (rest string, values []string) {
	if !strings.Contains(line, endpointCookie) {
		return line, nil
	}
	var kept []string
	for part := range strings.SplitSeq(line, ";") {
		name, value, _ := strings.Cut(part, "=")
		if strings.TrimSpace(name) != endpointCookie {
			kept = append(kept, part)
			continue
		}
		values = append(values, strings.Trim(value, ` "`))
	}
	return strings.TrimSpace(strings.Join(kept, ";")), values
}

// admit finds a token that opens the port, and gives the project of it, or why there is none.
func (e *endpoints) admit(ctx context.Context, at place, tokens []string) (project, token string, err error) {
	if len(tokens) == 0 {
		return "", "", errdefs.New(errdefs.Unauthenticated, "", "no %s header", EndpointHeader).
			WithHint("Send the headers of: sandsea endpoint %s %d", at.id.Short(), at.port)
	}
	key, err := e.key.get(ctx)
	if err != nil {
		return "", "", err
	}
	for _, token = range tokens {
		if project, err = readEndpoint(key, at, token, time.Now()); err == nil {
			return project, token, nil
		}
	}
	return "", "", err
}

// welcome gives a browser the cookie that stands for the token, and sends it to the address without that.
func (e *endpoints) welcome(w http.ResponseWriter, r *http.Request, at place, token, query string) {
	http.SetCookie(w, &http.Cookie{
		Name: endpointCookie, Value: token, Path: at.path(), HttpOnly: true, SameSite: http.SameSiteLaxMode, Secure: r.TLS != nil,
	})
	target := *r.URL
	target.RawQuery = query
	w.Header().Set("Cache-Control", "no-store")
	w.Header().Set("Referrer-Policy", "no-referrer")
	w.Header().Set("Location", target.RequestURI())
	w.WriteHeader(http.StatusSeeOther)
}

// enter counts a request of a sandbox's endpoints; the kind Exhausted when there are too many.
func (e *endpoints) enter(id sandbox.ID) (done func(), err error) {
	e.mu.Lock()
	defer e.mu.Unlock()
	if e.open[id] >= endpointRequests {
		full := errdefs.New(errdefs.Exhausted, "sandbox "+id.Short(), "%d requests to its servers are under way", endpointRequests).
			WithHint("Wait for some to end").WithRetryAfter(time.Second)
		full.Limit = fmt.Sprintf("%d requests", endpointRequests)
		return nil, full
	}
	e.open[id]++
	return func() {
		e.mu.Lock()
		defer e.mu.Unlock()
		if e.open[id]--; e.open[id] == 0 {
			delete(e.open, id)
		}
	}, nil
}

// forward sends a request to the server inside and its answer back.
func (e *endpoints) forward(w http.ResponseWriter, r *http.Request, at place, rest string, c claim) {
	ctx, cut := context.WithCancelCause(r.Context())
	defer cut(nil)
	// A server that answers before it has read all is heard at once. HTTP/2 always does.
	_ = http.NewResponseController(w).EnableFullDuplex()
	w.Header().Del("X-Content-Type-Options") // the server inside decides
	stop := func() bool { return true }
	defer func() { stop() }()
	proxy := &httputil.ReverseProxy{
		Transport: e.plain, FlushInterval: -1, BufferPool: &e.buffers, ErrorLog: slog.NewLogLogger(e.log.Handler(), slog.LevelDebug),
		Rewrite: func(pr *httputil.ProxyRequest) { e.rewrite(pr, at, rest, c) },
		ModifyResponse: func(res *http.Response) error {
			res.Header.Del(ErrorHeader)
			res.Header.Del(RequestHeader)
			confine(res.Header, at)
			if endless(res) {
				stop = context.AfterFunc(e.s.leaving, func() { cut(errLeaving) })
			}
			return nil
		},
		ErrorHandler: func(w http.ResponseWriter, r *http.Request, err error) {
			status, err := e.explain(r.Context(), at, err)
			e.refuse(w, r, status, err)
		},
	}
	if isGRPC(r) {
		// An answer that is headers alone must stay so. Streams, whose length is not known, are flushed all the same.
		proxy.Transport, proxy.FlushInterval = e.h2c, 0
	}
	proxy.ServeHTTP(informational{w, at, requestID(r.Context())}, r.WithContext(ctx))
}

// informational judges the headers of informational answers (103), which ReverseProxy passes on as they are, and puts the request's
// id back, which it clears with them.
type informational struct {
	http.ResponseWriter
	at place
	id string
}

func (w informational) WriteHeader(status int) {
	h := w.Header()
	if status < http.StatusOK && status != http.StatusSwitchingProtocols {
		h.Del(ErrorHeader)
		confine(h, w.at)
	}
	h.Set(RequestHeader, w.id)
	w.ResponseWriter.WriteHeader(status)
}

// Unwrap is for http.ResponseController.
func (w informational) Unwrap() http.ResponseWriter { return w.ResponseWriter }

// rewrite makes the request that the server inside sees.
func (e *endpoints) rewrite(pr *httputil.ProxyRequest, at place, rest string, c claim) {
	out := pr.Out
	out.URL.Scheme, out.URL.Host = "http", net.JoinHostPort(string(at.id), strconv.Itoa(int(at.port)))
	if path, err := url.PathUnescape(rest); err == nil { // always: it was read from a URL
		out.URL.Path, out.URL.RawPath = path, rest
	}
	out.URL.RawQuery = c.query
	out.Header.Del(EndpointHeader)
	out.Header.Del("Cookie")
	if len(c.cookie) > 0 {
		out.Header["Cookie"] = c.cookie
	}
	if iam.Holds(pr.In.Header) { // nothing for a sandbox to see, and its own for whoever has it
		out.Header.Del("Authorization")
	}
	pr.SetXForwarded()
	out.Header.Set("X-Forwarded-Prefix", strings.TrimSuffix(at.path(), "/"))
	// The values come with the end of the body, into this map.
	out.Trailer = pr.In.Trailer
}

// originWide are headers by which an answer speaks for the whole origin, which is the platform's and all its endpoints', to
// a browser.
var originWide = []string{
	"Alt-Svc", "Clear-Site-Data", "NEL", "Report-To", "Service-Worker-Allowed", "Strict-Transport-Security",
}

// confine takes out of an answer's headers what would reach other endpoints in a browser: what speaks for the origin, and
// cookies for places outside this one.
func confine(h http.Header, at place) {
	for _, name := range originWide {
		h.Del(name)
	}
	lines := h["Set-Cookie"]
	if len(lines) == 0 {
		return
	}
	kept := lines[:0:0]
	for _, line := range lines {
		if line, ok := confineCookie(line, at.path()); ok {
			kept = append(kept, line)
		}
	}
	h["Set-Cookie"] = kept
}

// confineCookie puts a cookie's path below that of the endpoint, where the server says one, and takes its domain: what the
// server sets for "/" is for all of the server. A cookie of ours is none of the server's to set.
func confineCookie(line, prefix string) (string, bool) {
	pair, attributes, _ := strings.Cut(line, ";")
	if name, _, _ := strings.Cut(pair, "="); strings.TrimSpace(name) == endpointCookie {
		return "", false
	}
	out, path := []string{pair}, ""
	for part := range strings.SplitSeq(attributes, ";") {
		name, value, _ := strings.Cut(part, "=")
		switch strings.ToLower(strings.TrimSpace(name)) {
		case "", "domain":
		case "path":
			path = strings.TrimSpace(value) // the last one counts
		default:
			out = append(out, part)
		}
	}
	// Without one, a browser takes that of the request, which lies below the endpoint's.
	if strings.HasPrefix(path, "/") {
		if path+"/" != prefix && !strings.HasPrefix(path, prefix) {
			path = strings.TrimSuffix(prefix, "/") + path
		}
		out = append(out, " Path="+path)
	}
	return strings.Join(out, ";"), true
}

// isGRPC reports whether the client speaks gRPC, which needs HTTP/2 to the end.
func isGRPC(r *http.Request) bool {
	t, _, err := mime.ParseMediaType(r.Header.Get("Content-Type"))
	return err == nil && r.ProtoMajor >= 2 && (t == "application/grpc" || strings.HasPrefix(t, "application/grpc+"))
}

// endless reports whether an answer goes on until somebody ends it.
func endless(res *http.Response) bool {
	t, _, err := mime.ParseMediaType(res.Header.Get("Content-Type"))
	return res.StatusCode == http.StatusSwitchingProtocols || err == nil && t == "text/event-stream"
}

// dial opens a tunnel to the port that an address names.
func (e *endpoints) dial(ctx context.Context, _, address string) (net.Conn, error) {
	id, text, err := net.SplitHostPort(address)
	if err != nil {
		return nil, err
	}
	port, err := strconv.ParseUint(text, 10, 16)
	if err != nil {
		return nil, err
	}
	l, err := e.s.route(ctx, id)
	if err != nil {
		return nil, err
	}
	ctx, stop := context.WithTimeoutCause(ctx, endpointConnect, errEndpointConnect)
	defer stop()
	header := http.Header{}
	speak(header, caller(ctx))
	c, err := l.Tunnel(ctx, header, id, uint16(port))
	switch {
	case err == nil:
		return tunnel{c, tunnelAddr(address)}, nil
	case errors.Is(context.Cause(ctx), errEndpointConnect):
		return nil, errdefs.New(errdefs.Deadline, "sandbox "+l.id.Short(), "port %d accepts no connection within %s", port, endpointConnect).
			WithHint("See what the server inside does: sandsea logs %s", l.id.Short()).Wrap(err)
	}
	return nil, e.s.buried(ctx, l, e.s.answer(ctx, l, err, reads))
}

// explain judges a request that got no answer.
func (e *endpoints) explain(ctx context.Context, at place, err error) (status int, _ error) {
	if _, known := errors.AsType[*errdefs.Error](err); !known {
		if ctx.Err() != nil {
			return 0, errdefs.New(errdefs.Canceled, "", "the caller went away").Wrap(err)
		}
		// Was it the server inside, or did it go with its sandbox or node?
		if _, gone := e.s.living(ctx, string(at.id)); gone == nil {
			return http.StatusBadGateway, errdefs.New(errdefs.Unavailable, "sandbox "+at.id.Short(),
				"the server at port %d gave no answer in HTTP", at.port).WithField("port", "").
				WithHint("See what it says: sandsea logs %s", at.id.Short()).Wrap(err)
		} else {
			err = gone
		}
	}
	switch {
	case silent(err):
		return http.StatusBadGateway, errdefs.New(errdefs.Unavailable, "sandbox "+at.id.Short(), "nobody listens at port %d yet", at.port).
			WithField("port", "").WithHint("Start the server, or wait until it listens").WithRetryAfter(time.Second).Wrap(err)
	case errdefs.KindOf(err) == errdefs.NotFound:
		// The token says that there was one.
		return http.StatusGone, errdefs.New(errdefs.NotFound, "sandbox "+at.id.Short(), "has ended, and its record is gone").
			WithHint("All: sandsea ls --all").Wrap(err)
	case errdefs.From(err).Cause != "", errdefs.KindOf(err) == errdefs.Lost:
		return http.StatusGone, err
	}
	return 0, err
}

// refuse answers for the platform. A status of 0 is that of the error's kind.
func (e *endpoints) refuse(w http.ResponseWriter, r *http.Request, status int, err error) {
	w.Header().Set(ErrorHeader, string(errdefs.KindOf(err)))
	if isGRPC(r) {
		e.s.fail(w, r, err) // its status is in the trailers
		return
	}
	r = r.Clone(r.Context())
	r.Header.Set("Content-Type", "application/json") // whatever the client speaks
	if status == 0 {
		e.s.fail(w, r, err)
		return
	}
	e.s.status(w, r, status, err)
}

// tunnel is a line to a server inside. It has no deadlines: whoever gives up closes it.
type tunnel struct {
	io.ReadWriteCloser
	to tunnelAddr
}

type tunnelAddr string

func (tunnelAddr) Network() string  { return "tunnel" }
func (a tunnelAddr) String() string { return string(a) }

// CloseWrite passes the end of what is written on.
func (t tunnel) CloseWrite() error {
	if half, ok := t.ReadWriteCloser.(interface{ CloseWrite() error }); ok {
		return half.CloseWrite()
	}
	return errors.ErrUnsupported
}

func (tunnel) LocalAddr() net.Addr              { return tunnelAddr("server") }
func (t tunnel) RemoteAddr() net.Addr           { return t.to }
func (tunnel) SetDeadline(time.Time) error      { return os.ErrNoDeadline }
func (tunnel) SetReadDeadline(time.Time) error  { return os.ErrNoDeadline }
func (tunnel) SetWriteDeadline(time.Time) error { return os.ErrNoDeadline }

// buffers are what bodies are copied through.
type buffers sync.Pool

// Get implements httputil.BufferPool.
func (b *buffers) Get() []byte {
	buf, _ := (*sync.Pool)(b).Get().(*[endpointBuffer]byte)
	return buf[:]
}

// Put implements httputil.BufferPool.
func (b *buffers) Put(buf []byte) { (*sync.Pool)(b).Put((*[endpointBuffer]byte)(buf)) }
