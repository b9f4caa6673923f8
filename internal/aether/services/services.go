// Package services is the door to the package services: it finds the one that a request is for, by the mount point on the
// gateway ("/pypi/…") or by an upstream's own host name, and lets it answer as far as the policy of the caller goes.
package services

import (
	"context"
	"fmt"
	"net/http"
	"net/url"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"time"

	"github.com/sandsea/sandsea/api/errdefs"
	"github.com/sandsea/sandsea/internal/aether/flowlog"
	"github.com/sandsea/sandsea/internal/aether/mirror"
	"github.com/sandsea/sandsea/internal/aether/roster"
	"github.com/sandsea/sandsea/internal/policy"
)

// inside is the mount point of a service on its upstream's own hosts, in front of the service's name: links in answers to
// requests that named such a host lead there, so that they keep scheme and host.
const inside = "/.aether/"

// knownWithin is how long a request waits for the first Use: finding the upstreams takes a node's start some seconds.
const knownWithin = 30 * time.Second

// Set is the package services that there are. It may be changed while it is used.
type Set struct {
	list atomic.Pointer[[]mirror.Service] // nil before the first Use

	mu    sync.Mutex
	known chan struct{} // guarded by mu: closed by the first Use; nil: nobody waits
}

// Use makes the Set exactly these.
func (s *Set) Use(all []mirror.Service) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.list.Swap(&all) == nil && s.known != nil {
		close(s.known)
	}
}

// Known reports whether there was a Use.
func (s *Set) Known() bool { return s.list.Load() != nil }

// Await waits for the first Use, for a while, and reports whether there was one.
func (s *Set) Await(ctx context.Context) bool {
	if s.Known() {
		return true
	}
	s.mu.Lock()
	if s.list.Load() != nil {
		s.mu.Unlock()
		return true
	}
	if s.known == nil {
		s.known = make(chan struct{})
	}
	known := s.known
	s.mu.Unlock()
	ctx, stop := context.WithTimeoutCause(ctx, knownWithin, errdefs.Deadline)
	defer stop()
	select {
	case <-known:
		return true
	case <-ctx.Done():
		return false
	}
}

func (s *Set) all() []mirror.Service {
	if l := s.list.Load(); l != nil {
		return *l
	}
	return nil
}

// Named finds a service by its name.
func (s *Set) Named(name string) (mirror.Service, bool) {
	for _, svc := range s.all() {
		if svc.Name() == name {
			return svc, true
		}
	}
	return nil, false
}

// OfHost finds the service that a host name belongs to.
func (s *Set) OfHost(host string) (mirror.Service, bool) {
	if host == "" {
		return nil, false
	}
	for _, svc := range s.all() {
		if slices.Contains(svc.Hosts(), host) {
			return svc, true
		}
	}
	return nil, false
}

// Judge asks the policy about the service that a host name belongs to, nil if there is none. A verdict of
// policy.RuleDefault says that the policy knows nothing of the service: the rules about names decide.
func (s *Set) Judge(box *roster.Sandbox, host string) (mirror.Service, policy.Question, policy.Verdict) {
	svc, ok := s.OfHost(host)
	if !ok {
		return nil, policy.Question{}, policy.Verdict{}
	}
	q := policy.Question{Service: svc.Name()}
	return svc, q, box.Judge(q)
}

// ServeGateway answers a request to the gateway itself. The flow is that of the connection.
func (s *Set) ServeGateway(w http.ResponseWriter, r *http.Request, f *roster.Flow, base string) {
	if !s.Await(r.Context()) {
		w.Header().Set("Retry-After", "5")
		http.Error(w, "nobody has told yet where packages come from; try again", http.StatusServiceUnavailable)
		return
	}
	name, rest, _ := strings.Cut(strings.TrimPrefix(r.URL.EscapedPath(), "/"), "/")
	svc, ok := s.Named(name)
	if !ok {
		var names []string
		for _, svc := range s.all() {
			names = append(names, "/"+svc.Name()+"/")
		}
		http.Error(w, fmt.Sprintf("there is no package service here; there are: %s", strings.Join(names, " ")), http.StatusNotFound)
		return
	}
	serve(w, r, f, svc, base+"/"+name, "/"+rest)
}

// ServeHost answers a request that named an upstream's own host; false: that host has no such place.
func (s *Set) ServeHost(w http.ResponseWriter, r *http.Request, f *roster.Flow, svc mirror.Service, scheme, host string) bool {
	base := scheme + "://" + r.Host + inside + svc.Name()
	path := r.URL.EscapedPath()
	if rest, ok := strings.CutPrefix(path, inside+svc.Name()+"/"); ok {
		serve(w, r, f, svc, base, "/"+rest)
		return true
	}
	to, ok := svc.Match(scheme, host, path)
	if !ok {
		return false
	}
	serve(w, r, f, svc, base, to)
	return true
}

// serve hands the request to the service, for what the flow's sandbox may see.
func serve(w http.ResponseWriter, r *http.Request, f *roster.Flow, svc mirror.Service, base, path string) {
	box := f.Sandbox()
	f.Is("http", svc.Name())
	c := &mirror.Caller{
		Sandbox: box.ID, Phase: box.Phase(), World: box.World(), Base: base,
		Report: func(a mirror.Artefact) {
			box.Event(flowlog.Event{
				Kind: flowlog.Artefact, Denied: a.Denied, Rule: a.Rule, Service: svc.Name(), Name: a.Name, Version: a.Version,
				Protocol: a.Kind, Received: a.Bytes, Source: a.Source, Digest: a.Digest, Error: a.Error,
			})
		},
	}
	v, done := f.During(policy.Question{Service: svc.Name()})
	defer done()
	if !v.Allow {
		deny := mirror.Deny
		if d, ok := svc.(mirror.Denier); ok {
			deny = d.Deny
		}
		deny(w, c, mirror.Artefact{Kind: "list"}, v)
		return
	}
	to, err := url.ParseRequestURI(path)
	if err != nil {
		http.Error(w, "malformed path", http.StatusBadRequest)
		return
	}
	to.RawQuery = r.URL.RawQuery
	r2 := r.WithContext(mirror.WithCaller(r.Context(), c))
	r2.URL = to
	svc.ServeHTTP(w, r2)
}
