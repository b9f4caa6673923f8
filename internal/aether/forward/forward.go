package forward

import (
	"bytes"
	"cmp"
	"context"
	"crypto/x509"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"net"
	"net/netip"
	"os"
	"sync"
	"sync/atomic"
	"time"

	"github.com/sandsea/sandsea/internal/aether/config"
	"github.com/sandsea/sandsea/internal/aether/dial"
	"github.com/sandsea/sandsea/internal/aether/door"
	"github.com/sandsea/sandsea/internal/aether/inspect"
	"github.com/sandsea/sandsea/internal/aether/mirror"
	"github.com/sandsea/sandsea/internal/aether/roster"
	"github.com/sandsea/sandsea/internal/aether/services"
	"github.com/sandsea/sandsea/internal/aether/wire"
	"github.com/sandsea/sandsea/internal/policy"
)

// Names of rules for what does not agree with itself.
const (
	ruleServerName = "server name" // the one in TLS is not the target's
	ruleHost       = "host"        // the one in a request is not the target's
	ruleProtocol   = "protocol"    // what is spoken does not go there
)

// firstWords bounds the time until a client has said what it wants, where it must speak first.
const firstWords = time.Minute

// Config of a Forwarder.
type Config struct {
	Roster      *roster.Roster
	Dialer      *dial.Dialer
	Services    *services.Set
	Authorities *inspect.Authorities
	Secrets     map[string]config.Secret
	// Roots are trusted of hosts whose TLS is inspected; nil: those that the node trusts.
	Roots *x509.CertPool
	Log   *slog.Logger
}

// Forwarder carries connections. Its methods may be called at once.
type Forwarder struct {
	cfg   Config
	pipes chan struct{}
	web   *web
	open  sync.WaitGroup
}

// New makes a Forwarder.
func New(cfg Config) *Forwarder {
	f := &Forwarder{cfg: cfg, pipes: make(chan struct{}, pipes)}
	f.web = newWeb()
	return f
}

// Close returns when all connections have ended; the roster's flows must have been cut.
func (f *Forwarder) Close() {
	f.web.close()
	f.open.Wait()
}

// Target is what a sandbox wants to reach: a name, in canonical form, or an address.
type Target struct {
	Name string
	Addr netip.Addr
	Port uint16
}

// String is "name:port" or "address:port".
func (t Target) String() string {
	host := t.Name
	if host == "" {
		host = t.Addr.String()
	}
	return net.JoinHostPort(host, fmt.Sprint(t.Port))
}

func (t Target) question() policy.Question {
	return policy.Question{Name: t.Name, Addr: t.Addr, Port: t.Port, Protocol: policy.TCP}
}

func (t Target) label(protocol string) roster.Label {
	return roster.Label{Name: t.Name, Addr: t.Addr, Port: t.Port, Protocol: protocol}
}

// TargetAt is what a sandbox means by an address: the name that it stands for there. False: it stands for none, as after
// a restart of Aether; the sandbox asks the resolver again.
func TargetAt(s *roster.Sandbox, a netip.AddrPort) (Target, bool) {
	if !wire.Names.Contains(a.Addr()) {
		return Target{Addr: a.Addr(), Port: a.Port()}, true
	}
	name, ok := s.Names.Name(a.Addr())
	return Target{Name: name, Port: a.Port()}, ok
}

// TargetOf is what a sandbox means by a host, a name or an address, as a proxy is told it.
func TargetOf(s *roster.Sandbox, host string, port uint16) (Target, bool) {
	if a, err := netip.ParseAddr(host); err == nil {
		return TargetAt(s, netip.AddrPortFrom(a.Unmap(), port))
	}
	return Target{Name: roster.Canonical(host), Port: port}, true
}

// Transparent serves connections that were sent to addresses which are not the gate's, until the listener is closed.
func (f *Forwarder) Transparent(ln *door.Listener) error { return f.accept(ln, f.transparent) }

// accept hands out connections until the listener is closed.
func (f *Forwarder) accept(ln *door.Listener, serve func(*door.Conn)) error {
	for {
		c, err := ln.Accept()
		if errors.Is(err, net.ErrClosed) {
			return nil
		}
		if err != nil {
			return fmt.Errorf("accept: %w", err)
		}
		f.open.Go(func() { serve(c.(*door.Conn)) })
	}
}

func (f *Forwarder) transparent(c *door.Conn) {
	to, is := c.LocalAddr().(*net.TCPAddr)
	if !is {
		reset(c)
		return
	}
	at := to.AddrPort()
	at = netip.AddrPortFrom(at.Addr().Unmap(), at.Port())
	t, ok := TargetAt(c.Box, at)
	if !ok {
		c.Box.Deny(roster.Label{Addr: at.Addr(), Port: at.Port(), Protocol: "tcp"}, mismatch(policy.RuleDefault, "the address stands for no name"))
		reset(c)
		return
	}
	f.Tunnel(c, t, nil, "tcp", nil)
}

// Tunnel carries a connection to a target until it ends, and closes it. early is what was read from it already. reply, if
// not nil, is told once that the target was reached, or why it was not; without one a refusal is a reset.
func (f *Forwarder) Tunnel(nc *door.Conn, t Target, early []byte, protocol string, reply func(error) error) {
	s := nc.Box
	ctx, cancel := context.WithCancelCause(context.Background())
	defer cancel(nil)
	nc.Taken()
	flow, svc, err := f.admit(s, t, protocol, func() {
		cancel(errCut)
		reset(nc)
	})
	if err != nil {
		s.Deny(t.label(protocol), err)
		if reply != nil {
			_ = reply(err) // whoever does not read it has gone
			_ = nc.Close()
		} else {
			reset(nc)
		}
		return
	}
	up := f.upstream(ctx, flow, t)
	// A direction that waits for the far side alone must end too.
	stop := context.AfterFunc(ctx, func() {
		up.end(func(c net.Conn) error {
			reset(c)
			return nil
		})
	})
	defer stop()
	// With a package service or inspection it shows later whether anything is dialled.
	local := svc != nil || t.Name != "" && s.InspectTLS()
	if !local {
		up.begin()
	}
	if reply != nil {
		if !local {
			_, err = up.wait()
		}
		err = errors.Join(err, reply(err))
	}
	if err == nil {
		err = f.converse(&conn{Conn: nc, tcp: nc.TCPConn, flow: flow, early: early, guest: NewGuest(nc)}, t, svc, up)
	}
	stop()
	cancel(errEnded)
	up.end(net.Conn.Close)
	if err != nil && reply == nil {
		reset(nc)
	}
	_ = nc.Close()
	flow.Close(err)
}

var (
	errCut   = errors.New("the connection was cut")
	errEnded = errors.New("the connection ended")
)

// admit judges a target and opens the flow for it. A package service that comes with it answers instead of the host.
func (f *Forwarder) admit(s *roster.Sandbox, t Target, protocol string, cut func()) (*roster.Flow, mirror.Service, error) {
	q, l := t.question(), t.label(protocol)
	if t.Name != "" && s.World().Hides() && !f.cfg.Services.Await(context.Background()) {
		// Its host may be one of a service, which shows less than the host.
		return nil, nil, mismatch(policy.RuleDefault, "nobody has told yet where packages come from")
	}
	svc, asked, err := f.service(s, t)
	if err != nil {
		return nil, nil, err
	}
	if asked.Service != "" {
		l.Service = asked.Service
		q = asked
	}
	if svc == nil && onlyRepos(s, t) {
		q = policy.Question{} // each request is judged
	}
	flow, err := s.Open(q, l, cut, func() error {
		now, _, err := f.service(s, t)
		if err == nil && serviceName(now) != serviceName(svc) {
			err = mismatch("service "+cmp.Or(serviceName(now), serviceName(svc)), "who answers for %s is another by the policy in force", t.Name)
		}
		return err
	})
	if err != nil {
		return nil, nil, err
	}
	return flow, svc, nil
}

// service gives the package service that answers instead of a target, nil: none, and the question that it is judged by, the
// zero one: that about the target.
func (f *Forwarder) service(s *roster.Sandbox, t Target) (mirror.Service, policy.Question, error) {
	svc, asked, v := f.cfg.Services.Judge(s, t.Name)
	switch {
	case svc == nil:
	case v.Allow:
		return svc, asked, nil
	case v.Rule != policy.RuleDefault:
		return nil, policy.Question{}, roster.Refusal(v)
	case s.World().Hides():
		// The name is allowed, if at all, but the world is bounded: the service shows what of it there is.
		return svc, policy.Question{}, nil
	}
	return nil, policy.Question{}, nil
}

// upstream is the connection to a target, dialled when it is first needed.
type upstream struct {
	dial func() (net.Conn, error)
	once sync.Once
	done chan struct{} // closed when dial returned
	conn net.Conn
	err  error
	used atomic.Bool // somebody took it
}

func (f *Forwarder) upstream(ctx context.Context, flow *roster.Flow, t Target) *upstream {
	return &upstream{done: make(chan struct{}), dial: func() (net.Conn, error) { return f.dial(ctx, flow, t) }}
}

func (u *upstream) begin() {
	u.once.Do(func() {
		go func() {
			defer close(u.done)
			u.conn, u.err = u.dial()
		}()
	})
}

func (u *upstream) wait() (net.Conn, error) {
	u.begin()
	<-u.done
	return u.conn, u.err
}

// take gives the connection to the first who asks; to others, false.
func (u *upstream) take() bool { return u.used.CompareAndSwap(false, true) }

// end closes it; if it was not dialled yet, it never is. The context of the dialling must have ended.
func (u *upstream) end(closing func(net.Conn) error) {
	u.once.Do(func() {
		u.err = errEnded
		close(u.done)
	})
	<-u.done
	if u.conn != nil {
		_ = closing(u.conn) // one that is closed already is no loss
	}
}

// questionKey finds in the context of a request what it is judged by, if that is not what its flow is about.
type questionKey struct{}

// dial connects to a target for a flow.
func (f *Forwarder) dial(ctx context.Context, flow *roster.Flow, t Target) (net.Conn, error) {
	q, ok := ctx.Value(questionKey{}).(policy.Question)
	if !ok {
		q = flow.Question()
	}
	check := flow.Sandbox().Check(q)
	if t.Name == "" {
		return f.cfg.Dialer.Addr(ctx, netip.AddrPortFrom(t.Addr, t.Port), check)
	}
	c, err := f.cfg.Dialer.Name(ctx, t.Name, t.Port, check)
	if err != nil {
		return nil, err
	}
	if a, ok := c.RemoteAddr().(*net.TCPAddr); ok && !f.cfg.Dialer.Proxied() {
		if v := flow.Reached(a.AddrPort().Addr().Unmap()); !v.Allow {
			_ = c.Close()
			return nil, roster.Refusal(v)
		}
	}
	return c, nil
}

// converse finds out what a connection speaks and carries it accordingly. It returns when both directions have ended.
func (f *Forwarder) converse(c *conn, t Target, svc mirror.Service, up *upstream) error {
	if t.Name == "" && !c.flow.Sandbox().RejectsNames() {
		// An address that is open is open for whatever is spoken there, as long as no rule is about names.
		err := c.flow.Needs(func() error {
			if c.flow.Sandbox().RejectsNames() {
				return mismatch(policy.RuleDefault, "what is spoken with %s was not read, and the policy in force rejects names", t)
			}
			return nil
		})
		if err != nil {
			return err
		}
		return f.raw(c, up, nil)
	}
	patient := t.Name != "" && t.Port == 80 || svc != nil || onlyRepos(c.flow.Sandbox(), t)
	var server *serverFirst
	if t.Name != "" && t.Port == 443 || patient {
		_ = c.SetReadDeadline(time.Now().Add(firstWords)) // on a closed one, sniff sees it
	} else {
		server = listen(c, up)
	}
	speech, err := c.sniff(patient)
	spoke, uerr := server.stop()
	_ = c.SetReadDeadline(time.Time{})
	if uerr != nil {
		return uerr
	}
	switch {
	case errors.Is(err, io.EOF) && len(c.early) == 0 && server != nil:
		speech = isRaw // it says nothing, and listens
	case errors.Is(err, io.EOF) && len(c.early) == 0:
		return nil
	case err != nil && speech == perhapsHTTP:
		return mismatch(ruleProtocol, "half of a request")
	case err != nil:
		return err
	}
	switch speech {
	case isTLS:
		return f.tls(c, t, svc, up)
	case isHTTP:
		if spoke {
			return mismatch(ruleProtocol, "HTTP to a server that spoke first")
		}
		c.flow.Is("http", serviceName(svc))
		h2c := bytes.HasPrefix(c.early, []byte("PRI "))
		e := newExchange(f, c.flow, t, "http", svc, f.taking(c.flow, t, up), h2c)
		defer e.close()
		return f.web.serve(c, c, e)
	}
	if patient {
		return mismatch(ruleProtocol, "neither TLS nor HTTP")
	}
	if speech == unsaid {
		return f.raw(c, up, c.trickle)
	}
	return f.raw(c, up, nil)
}

// raw carries what is neither TLS nor HTTP. first, which may be nil, passes on its beginning.
func (f *Forwarder) raw(c *conn, up *upstream, first func(net.Conn) error) error {
	to, err := up.wait()
	if err != nil {
		return err
	}
	return f.relay(c, to, func() error {
		if first == nil {
			return nil
		}
		return first(to)
	}, nil)
}

// mismatch refuses what does not agree with itself.
func mismatch(rule, format string, args ...any) error {
	return roster.Refusal(policy.Verdict{Rule: rule, Reason: fmt.Sprintf(format, args...)})
}

func serviceName(svc mirror.Service) string {
	if svc == nil {
		return ""
	}
	return svc.Name()
}

// serverFirst passes on what a server says while nothing was heard of the client yet.
type serverFirst struct {
	up       *upstream
	stopping atomic.Bool
	done     chan struct{}
	spoke    bool
	err      error
}

func listen(c *conn, up *upstream) *serverFirst {
	s := &serverFirst{up: up, done: make(chan struct{})}
	go func() {
		defer close(s.done)
		s.err = s.run(c)
		if s.err != nil {
			reset(c.Conn) // so that the sniffing ends
		}
	}()
	return s
}

func (s *serverFirst) run(c *conn) error {
	from, err := s.up.wait()
	if err != nil {
		return err
	}
	read := reader(from)
	for !s.stopping.Load() {
		buf, n, err := read()
		if n > 0 {
			s.spoke = true
			if _, werr := c.Write((*buf)[:n]); werr != nil {
				err = werr
			}
		}
		if buf != nil {
			buffers.Put(buf)
		}
		switch {
		case errors.Is(err, io.EOF):
			return nil // whoever reads next sees it again
		case errors.Is(err, os.ErrDeadlineExceeded):
			return nil
		case err != nil:
			return err
		}
	}
	return nil
}

// stop ends it and tells whether the server spoke.
func (s *serverFirst) stop() (spoke bool, err error) {
	if s == nil {
		return false, nil
	}
	s.stopping.Store(true)
	if to, err := s.up.wait(); err == nil {
		_ = to.SetReadDeadline(past) // fails only on a closed one, which ends it too
		<-s.done
		_ = to.SetReadDeadline(time.Time{})
	}
	<-s.done
	return s.spoke, s.err
}
