// Package roster knows the sandboxes that Aether serves: who has which address, which policy and phase are in force, how
// much each has used, and which of its connections are open.
//
// It is the one place that asks package policy. A Flow is judged when it opens and again whenever another policy or phase
// comes in force; one that is no longer allowed is cut before Put returns. Between the two there is no gap: a Flow is on
// the list before it is judged.
package roster

import (
	"errors"
	"maps"
	"net/netip"
	"slices"
	"sync"
	"sync/atomic"
	"time"

	"golang.org/x/time/rate"

	"github.com/sandsea/sandsea/api/errdefs"
	"github.com/sandsea/sandsea/internal/aether/config"
	"github.com/sandsea/sandsea/internal/aether/flowlog"
	"github.com/sandsea/sandsea/internal/aether/names"
	"github.com/sandsea/sandsea/internal/aether/wire"
	"github.com/sandsea/sandsea/internal/policy"
)

// nameRate is how many bytes of names that it never asked for before a sandbox may look up in a second, nameBurst how many
// at once: whoever runs the servers of an allowed wildcard learns no more than 1 kbit/s from names.
const (
	nameRate  = 125
	nameBurst = 16 << 10
)

// Log takes events. *flowlog.Store is one.
type Log interface {
	Add(sandbox string, e flowlog.Event)
}

// Config of a Roster.
type Config struct {
	// Grants are the operator's for a project.
	Grants func(project string) policy.Grants
	// Own tells whether an address is the node's or the control plane's, which no sandbox may reach without a grant.
	Own    func(netip.Addr) bool
	Limits config.Limits
	Log    Log
}

// Roster is all sandboxes. Its methods may be called at once.
type Roster struct {
	cfg Config
	totals

	mu       sync.RWMutex
	byID     map[string]*Sandbox     // guarded by mu
	byAddr   map[netip.Addr]*Sandbox // guarded by mu
	projects map[string]*project     // guarded by mu
}

// totals count since the process began, sandboxes that are gone included.
type totals struct{ opened, denied, sent, received atomic.Int64 }

// project is what the sandboxes of one share.
type project struct {
	flows   atomic.Int64
	members int // guarded by Roster.mu
}

// New makes an empty Roster.
func New(cfg Config) *Roster {
	return &Roster{
		cfg: cfg, byID: map[string]*Sandbox{}, byAddr: map[netip.Addr]*Sandbox{}, projects: map[string]*project{},
	}
}

// Sync makes the roster exactly these.
func (r *Roster) Sync(all []wire.Sandbox) error {
	keep := map[string]bool{}
	for _, b := range all {
		keep[b.ID] = true
	}
	r.mu.RLock()
	known := slices.Collect(maps.Keys(r.byID))
	r.mu.RUnlock()
	for _, id := range known {
		if !keep[id] {
			_, _ = r.Drop(id) // gone is what it is to be
		}
	}
	var errs []error
	for _, b := range all {
		errs = append(errs, r.Put(b))
	}
	return errors.Join(errs...)
}

// Put adds a sandbox or puts its policy and phase in force.
func (r *Roster) Put(b wire.Sandbox) error {
	if b.ID == "" || !wire.Links.Contains(b.Addr) && !b.Addr.IsLoopback() {
		return errdefs.New(errdefs.Invalid, "sandbox "+b.ID, "address %v is none of a sandbox", b.Addr)
	}
	r.mu.Lock()
	s := r.byID[b.ID]
	if other := r.byAddr[b.Addr]; other != nil && other != s {
		r.mu.Unlock()
		return errdefs.New(errdefs.AlreadyExists, "sandbox "+b.ID, "address %v is that of %s", b.Addr, other.ID)
	}
	if s != nil && (s.Addr != b.Addr || s.Project != b.Project) {
		r.mu.Unlock()
		return errdefs.New(errdefs.Invalid, "sandbox "+b.ID, "its address and project do not change")
	}
	fresh := s == nil
	if fresh {
		p := r.projects[b.Project]
		if p == nil {
			p = &project{}
			r.projects[b.Project] = p
		}
		p.members++
		s = &Sandbox{
			ID: b.ID, Project: b.Project, Addr: b.Addr, Names: names.New(wire.Names),
			roster: r, project: p, grants: r.cfg.Grants(b.Project), flows: map[*Flow]struct{}{},
			fresh: rate.NewLimiter(nameRate, nameBurst), turns: make(chan struct{}, mostServed),
		}
		s.sent.Store(b.Before.Sent)
		s.received.Store(b.Before.Received)
		s.denied.Store(b.Before.Denied)
		s.state.Store(r.stateOf(b))
	}
	r.byID[b.ID], r.byAddr[b.Addr] = s, s
	r.mu.Unlock()
	if !fresh {
		s.change(r.stateOf(b))
	}
	return nil
}

// Drop removes a sandbox and cuts its flows.
func (r *Roster) Drop(id string) (wire.Counters, error) {
	r.mu.Lock()
	s := r.byID[id]
	if s == nil {
		r.mu.Unlock()
		return wire.Counters{}, errdefs.New(errdefs.NotFound, "sandbox "+id, "Aether does not know it")
	}
	delete(r.byID, id)
	delete(r.byAddr, s.Addr)
	if s.project.members--; s.project.members == 0 {
		delete(r.projects, s.Project)
	}
	r.mu.Unlock()
	s.end()
	return s.Counters(), nil
}

// ByAddr finds the sandbox that sends from an address.
func (r *Roster) ByAddr(a netip.Addr) (*Sandbox, bool) {
	r.mu.RLock()
	defer r.mu.RUnlock()
	s, ok := r.byAddr[a.Unmap()]
	return s, ok
}

// ByID finds a sandbox.
func (r *Roster) ByID(id string) (*Sandbox, bool) {
	r.mu.RLock()
	defer r.mu.RUnlock()
	s, ok := r.byID[id]
	return s, ok
}

// Counters gives those of the sandboxes named, or of all.
func (r *Roster) Counters(ids []string) map[string]wire.Counters {
	out := map[string]wire.Counters{}
	for _, s := range r.all(ids) {
		out[s.ID] = s.Counters()
	}
	return out
}

func (r *Roster) all(ids []string) []*Sandbox {
	r.mu.RLock()
	defer r.mu.RUnlock()
	if len(ids) == 0 {
		return slices.Collect(maps.Values(r.byID))
	}
	var out []*Sandbox
	for _, id := range ids {
		if s := r.byID[id]; s != nil {
			out = append(out, s)
		}
	}
	return out
}

// Totals of all sandboxes.
type Totals struct {
	Sandboxes, Flows int64 // now
	// Since the process began, those of sandboxes that are gone too.
	Opened, Denied, Sent, Received int64
}

// Totals counts.
func (r *Roster) Totals() Totals {
	t := Totals{Opened: r.opened.Load(), Denied: r.denied.Load(), Sent: r.sent.Load(), Received: r.received.Load()}
	for _, s := range r.all(nil) {
		t.Sandboxes++
		t.Flows += s.open.Load()
	}
	return t
}

// CutIdle cuts the flows on which nothing was said since then.
func (r *Roster) CutIdle(since time.Time) {
	for _, s := range r.all(nil) {
		for _, f := range s.list() {
			if f.active.Load() < since.UnixNano() {
				f.Cut(errIdle)
			}
		}
	}
}

var errIdle = errdefs.New(errdefs.Deadline, "", "nothing was said for too long")
