package aether

import (
	"context"
	"errors"
	"io"
	"log/slog"
	"maps"
	"net"
	"net/http"
	"net/netip"
	"net/url"
	"slices"
	"strconv"
	"strings"
	"sync"
	"time"

	"github.com/sandsea/sandsea/api/errdefs"
	"github.com/sandsea/sandsea/internal/aether/cache"
	"github.com/sandsea/sandsea/internal/aether/dial"
	"github.com/sandsea/sandsea/internal/aether/mirror"
	"github.com/sandsea/sandsea/internal/aether/mirror/crates"
	"github.com/sandsea/sandsea/internal/aether/mirror/debian"
	"github.com/sandsea/sandsea/internal/aether/mirror/golang"
	"github.com/sandsea/sandsea/internal/aether/mirror/maven"
	"github.com/sandsea/sandsea/internal/aether/mirror/npm"
	"github.com/sandsea/sandsea/internal/aether/mirror/pypi"
	"github.com/sandsea/sandsea/internal/aether/mirror/rubygems"
	"github.com/sandsea/sandsea/internal/aether/mirror/source"
	"github.com/sandsea/sandsea/internal/aether/upstream"
	"github.com/sandsea/sandsea/internal/aether/wire"
	"github.com/sandsea/sandsea/internal/policy"
)

// shelf makes package services of their upstreams. Upstreams are the operator's choice, so no policy stands between them
// and Aether. Where their lists and redirects lead is not: there the platform's deny list holds.
type shelf struct {
	cache     *cache.Cache
	dialer    *dial.Dialer
	own       func(netip.Addr) bool // tells of addresses that are the node's or the control plane's
	transport *http.Transport
	log       *slog.Logger

	mu        sync.Mutex
	upstreams upstream.Upstreams // guarded by mu
	services  []mirror.Service   // guarded by mu
	named     map[string]bool    // guarded by mu: host:port of all that the upstreams name

	learn    context.CancelCauseFunc // guarded by mu: ends what services in force learn; nil: there are none
	learning sync.WaitGroup

	turns turns
}

func newShelf(c *cache.Cache, d *dial.Dialer, own func(netip.Addr) bool, log *slog.Logger) *shelf {
	s := &shelf{cache: c, dialer: d, own: own, log: log}
	s.transport = &http.Transport{
		DialContext:            s.dial,
		ForceAttemptHTTP2:      true,
		TLSHandshakeTimeout:    15 * time.Second,
		MaxIdleConnsPerHost:    32,
		IdleConnTimeout:        90 * time.Second,
		MaxResponseHeaderBytes: 1 << 20,
	}
	return s
}

// dial connects to a host that an upstream names, wherever it is, and to others if they are public.
func (s *shelf) dial(ctx context.Context, _, addr string) (net.Conn, error) {
	host, p, err := net.SplitHostPort(addr)
	if err != nil {
		return nil, err
	}
	port, err := strconv.ParseUint(p, 10, 16)
	if err != nil {
		return nil, err
	}
	s.mu.Lock()
	named := s.named[strings.ToLower(addr)]
	s.mu.Unlock()
	check := func(a netip.Addr) error {
		denied, why := policy.Platform(a)
		if !denied && s.own(a.Unmap()) {
			denied, why = true, "an address of the node or of the control plane"
		}
		if named || !denied {
			return nil
		}
		return errdefs.New(errdefs.Denied, addr, "a package service's upstream leads there, and it is %s", why).
			WithHint("If it is meant, name it in files of the service in aether.toml")
	}
	if a, err := netip.ParseAddr(host); err == nil {
		return s.dialer.Addr(ctx, netip.AddrPortFrom(a, uint16(port)), check)
	}
	return s.dialer.Name(ctx, host, uint16(port), check)
}

// places are the host:port of all that upstreams name.
func places(all upstream.Upstreams) map[string]bool {
	out := map[string]bool{}
	for _, u := range all {
		list := slices.Concat(u.URLs, u.Files)
		if f := strings.Fields(u.Checksums); len(f) == 1 {
			name, _, _ := strings.Cut(f[0], "+")
			list = append(list, "https://"+name)
		} else if len(f) > 1 {
			list = append(list, f[1])
		}
		for _, raw := range list {
			at, err := url.Parse(raw)
			if err != nil {
				continue
			}
			port := at.Port()
			if port == "" {
				port = map[string]string{"http": "80", "https": "443"}[at.Scheme]
			}
			out[net.JoinHostPort(strings.ToLower(at.Hostname()), port)] = true
		}
	}
	return out
}

// use makes the services anew. Requests under way end with the services that they began with.
func (s *shelf) use(all upstream.Upstreams) []mirror.Service {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.closeLocked()
	s.upstreams, s.services, s.named = all, nil, places(all)
	var ctx context.Context
	ctx, s.learn = context.WithCancelCause(context.Background())
	for _, name := range slices.Sorted(maps.Keys(all)) {
		if svc := s.make(name, all[name]); svc != nil {
			s.services = append(s.services, svc)
			s.teach(ctx, svc)
		}
	}
	out := make([]mirror.Service, len(s.services))
	for i, svc := range s.services {
		out[i] = queued{svc, &s.turns}
	}
	return out
}

// learner is a service that finds out something of its upstream.
type learner interface {
	Learn(ctx context.Context) error
}

// The pauses between tries to learn.
const (
	learnPause   = time.Second
	longestPause = time.Minute
)

// errReplaced ends what learns.
var errReplaced = errors.New("there are other services")

// teach lets a service learn beside its answers, until it has or ctx ends.
func (s *shelf) teach(ctx context.Context, svc mirror.Service) {
	l, ok := svc.(learner)
	if !ok {
		return
	}
	s.learning.Go(func() {
		for pause := learnPause; ; pause = min(2*pause, longestPause) {
			err := l.Learn(ctx)
			if err == nil || errors.Is(err, errdefs.NotFound) {
				return
			}
			s.log.Debug("package service learns nothing yet", "service", svc.Name(), "err", err)
			select {
			case <-time.After(pause):
			case <-ctx.Done():
				return
			}
		}
	})
}

// make gives the service of that name, nil if it has nothing to draw on.
func (s *shelf) make(name string, u upstream.Upstream) mirror.Service {
	if len(u.URLs) == 0 {
		return nil
	}
	client := upstream.NewClient(s.transport, u)
	src := source.Source{Cache: s.cache, Client: client}
	switch name {
	case policy.PyPI:
		svc, err := pypi.New(pypi.Config{Upstream: u, Client: client, Cache: s.cache})
		if err != nil {
			s.log.Error("package service", "service", name, "err", err)
			return nil
		}
		return svc
	case policy.NPM:
		svc, err := npm.New(npm.Config{Upstream: u, Client: client, Cache: s.cache})
		if err != nil {
			s.log.Error("package service", "service", name, "err", err)
			return nil
		}
		return svc
	case policy.Golang:
		return golang.New(src, u)
	case policy.Crates:
		return crates.New(src, u)
	case policy.Debian:
		return debian.New(src, u, s.log)
	case policy.Maven:
		return maven.New(src, u)
	case policy.RubyGems:
		return rubygems.New(src, u)
	}
	return nil
}

// states tells what each service has.
func (s *shelf) states() []wire.ServiceState {
	s.mu.Lock()
	defer s.mu.Unlock()
	var out []wire.ServiceState
	for _, name := range slices.Sorted(maps.Keys(s.upstreams)) {
		u := s.upstreams[name]
		out = append(out, wire.ServiceState{Name: name, Upstreams: u.URLs, Source: u.Found, Missing: u.Missing})
	}
	return out
}

func (s *shelf) closeLocked() {
	if s.learn != nil {
		s.learn(errReplaced)
		s.learn = nil
	}
	for _, svc := range s.services {
		if c, ok := svc.(io.Closer); ok {
			if err := c.Close(); err != nil {
				s.log.Warn("package service closes", "service", svc.Name(), "err", err)
			}
		}
	}
	s.services = nil
}

func (s *shelf) close() {
	s.mu.Lock()
	s.closeLocked()
	s.mu.Unlock()
	s.learning.Wait()
	s.transport.CloseIdleConnections()
}

// mostAtShelf is how many requests of a sandbox to package services are answered at once; the next wait. Some answers are
// made in memory, and a connection can carry hundreds of requests.
const mostAtShelf = 32

// turns are those of all sandboxes.
type turns struct {
	mu  sync.Mutex
	all map[string]*turn // guarded by mu: by sandbox
}

type turn struct {
	slots chan struct{}
	users int // who have or want one; guarded by turns.mu
}

// take waits for a turn of the sandbox; false: ctx ended before.
func (t *turns) take(ctx context.Context, sandbox string) (done func(), ok bool) {
	t.mu.Lock()
	if t.all == nil {
		t.all = map[string]*turn{}
	}
	of := t.all[sandbox]
	if of == nil {
		of = &turn{slots: make(chan struct{}, mostAtShelf)}
		t.all[sandbox] = of
	}
	of.users++
	t.mu.Unlock()
	leave := func() {
		t.mu.Lock()
		defer t.mu.Unlock()
		if of.users--; of.users == 0 {
			delete(t.all, sandbox)
		}
	}
	select {
	case of.slots <- struct{}{}:
		return func() {
			<-of.slots
			leave()
		}, true
	case <-ctx.Done():
		leave()
		return nil, false
	}
}

// queued is a service that answers so many requests of a sandbox at once.
type queued struct {
	mirror.Service
	turns *turns
}

// ServeHTTP implements http.Handler.
func (q queued) ServeHTTP(w http.ResponseWriter, r *http.Request) {
	done, ok := q.turns.take(r.Context(), mirror.CallerOf(r.Context()).Sandbox)
	if !ok {
		return // nobody is there to read an answer
	}
	defer done()
	q.Service.ServeHTTP(w, r)
}

// Deny implements mirror.Denier.
func (q queued) Deny(w http.ResponseWriter, c *mirror.Caller, a mirror.Artefact, v policy.Verdict) {
	if d, ok := q.Service.(mirror.Denier); ok {
		d.Deny(w, c, a, v)
		return
	}
	mirror.Deny(w, c, a, v)
}
