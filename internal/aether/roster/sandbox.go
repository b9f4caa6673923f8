package roster

import (
	"cmp"
	"errors"
	"net"
	"net/netip"
	"reflect"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"time"

	"golang.org/x/time/rate"

	"github.com/sandsea/sandsea/api/errdefs"
	"github.com/sandsea/sandsea/internal/aether/flowlog"
	"github.com/sandsea/sandsea/internal/aether/names"
	"github.com/sandsea/sandsea/internal/aether/wire"
	"github.com/sandsea/sandsea/internal/policy"
)

// Sandbox is one of them. Its methods may be called at once, also after it was dropped: then nothing is allowed.
type Sandbox struct {
	ID      string
	Project string
	Addr    netip.Addr
	// Names are the names that have addresses in it.
	Names *names.Table

	roster  *Roster
	project *project
	grants  policy.Grants
	state   atomic.Pointer[state]
	fresh   *rate.Limiter // bytes of names

	open, sent, received, denied atomic.Int64

	turns   chan struct{} // of requests that are served
	asked   atomic.Int64  // requests that are served or wait
	unbegun atomic.Int64  // bytes of requests that have not begun

	mu    sync.Mutex
	gone  bool               // guarded by mu
	flows map[*Flow]struct{} // guarded by mu

	logging sync.RWMutex
	told    bool // guarded by logging: its log has ended
}

// state is what is in force; it never changes.
type state struct {
	policy    policy.Policy
	phase     string
	world     policy.World
	limits    policy.Limits // with the node's where the policy has none
	questions *rate.Limiter
	rejects   bool            // some rule rejects names
	repos     map[string]bool // hosts, and each with the port, of which some repository is allowed
}

// gitPrefix begins the services that are repositories.
const gitPrefix = "git:"

// hostOf is the host in the name of a repository, and the same with the port.
func hostOf(service string) (host, at string, ok bool) {
	place, ok := strings.CutPrefix(service, gitPrefix)
	at, _, _ = strings.Cut(place, "/")
	host, port, _ := strings.Cut(at, ":")
	host = Canonical(host)
	return host, net.JoinHostPort(host, cmp.Or(port, "443")), ok
}

// within is what a policy asks for, no more than the operator allows; 0 is none of them.
func within[T int | int64](asked, most T) T {
	if asked == 0 || most != 0 && asked > most {
		return most
	}
	return asked
}

func (r *Roster) stateOf(b wire.Sandbox) *state {
	l := policy.Limits{
		Flows: within(b.Policy.Limits.Flows, r.cfg.Limits.Flows), Bytes: within(b.Policy.Limits.Bytes, r.cfg.Limits.Bytes),
		DNSPerSecond: within(b.Policy.Limits.DNSPerSecond, r.cfg.Limits.DNSPerSecond),
	}
	ph, _ := b.Policy.Phase(b.Phase)
	st := &state{
		policy: b.Policy, phase: b.Phase, world: b.Policy.World(b.Phase), limits: l,
		questions: rate.NewLimiter(rate.Limit(l.DNSPerSecond), 2*l.DNSPerSecond),
		rejects:   slices.ContainsFunc(ph.Rules, func(r policy.Rule) bool { return r.Reject && r.Domain != "" }),
		repos:     map[string]bool{},
	}
	for _, r := range ph.Rules {
		if host, at, ok := hostOf(r.Service); ok && !r.Reject {
			st.repos[host], st.repos[at] = true, true
		}
	}
	return st
}

// Phase in force.
func (s *Sandbox) Phase() string { return s.state.Load().phase }

// World that package services show.
func (s *Sandbox) World() policy.World { return s.state.Load().world }

// InspectTLS tells whether the policy wants TLS to be ended here.
func (s *Sandbox) InspectTLS() bool { return s.state.Load().policy.InspectTLS }

// Repos tells whether some repository of a host, or of "host:port", is allowed.
func (s *Sandbox) Repos(host string) bool { return s.state.Load().repos[host] }

// DeniedRepo gives an entry by which some repository of a host does not exist; "": there is none.
func (s *Sandbox) DeniedRepo(host string) string { return s.World().RepoAt(host) }

// RejectsNames tells whether a rule of the phase in force rejects some name.
func (s *Sandbox) RejectsNames() bool { return s.state.Load().rejects }

// Judge answers a question by the policy and phase in force. An address of the node's own is the platform's.
func (s *Sandbox) Judge(q policy.Question) policy.Verdict {
	st := s.state.Load()
	v := policy.Evaluate(st.policy, st.phase, q, s.grants)
	if v.Allow && q.Addr.IsValid() && s.roster.cfg.Own(q.Addr.Unmap()) && !s.granted(q.Addr.Unmap()) {
		return policy.Verdict{Rule: policy.RulePlatform, Reason: q.Addr.String() + " is an address of the node or of the control plane"}
	}
	return v
}

func (s *Sandbox) granted(a netip.Addr) bool {
	return slices.ContainsFunc(s.grants, func(p netip.Prefix) bool { return p.Contains(a) })
}

// Check is what an address must pass before it is dialled for a question. Its errors are errdefs.Denied.
func (s *Sandbox) Check(q policy.Question) func(netip.Addr) error {
	return func(a netip.Addr) error {
		q.Addr = a
		if v := s.Judge(q); !v.Allow {
			return Refusal(v)
		}
		return nil
	}
}

// Denial is a verdict as an error, errdefs.Denied.
type Denial struct{ policy.Verdict }

// Refusal makes the error of a verdict that does not allow.
func Refusal(v policy.Verdict) *Denial { return &Denial{v} }

func (d *Denial) Error() string { return d.Reason + " (rule " + d.Rule + ")" }

// Is makes it errdefs.Denied.
func (d *Denial) Is(target error) bool { return target == errdefs.Denied }

// limit makes the Denial of a limit.
func limit(name, reason string) *Denial {
	return Refusal(policy.Verdict{Rule: policy.RuleLimit + " " + name, Reason: reason})
}

// AllowQuestion takes one question to the resolver from the sandbox's rate.
func (s *Sandbox) AllowQuestion() error {
	if !s.state.Load().questions.Allow() {
		return limit("dns_per_second", "too many questions to the resolver")
	}
	return nil
}

// Resolve gives the address that stands for a name which the policy allows.
func (s *Sandbox) Resolve(name string) (netip.Addr, error) {
	// A name that is there costs nothing; so the check comes first, at the price of counting a race twice.
	if !s.Names.Has(name) && !s.fresh.AllowN(time.Now(), len(name)) {
		return netip.Addr{}, limit("names", "too many new names")
	}
	a, ok := s.Names.Addr(name)
	if !ok {
		return a, limit("names", "too many names")
	}
	return a, nil
}

// Canonical gives the form in which a name stands in Names.
func Canonical(name string) string { return strings.ToLower(strings.TrimSuffix(name, ".")) }

// Event writes to the flow log, and counts a denial.
func (s *Sandbox) Event(e flowlog.Event) {
	if e.Phase == "" {
		e.Phase = s.Phase()
	}
	if e.Denied {
		n := max(e.Count, 1)
		s.denied.Add(n)
		s.roster.denied.Add(n)
	}
	s.logging.RLock()
	defer s.logging.RUnlock()
	if !s.told {
		s.roster.cfg.Log.Add(s.ID, e)
	}
}

// Counters of the sandbox.
func (s *Sandbox) Counters() wire.Counters {
	return wire.Counters{Sent: s.sent.Load(), Received: s.received.Load(), Flows: s.open.Load(), Denied: s.denied.Load()}
}

// change puts another state in force, judges the open flows by it and cuts those that it does not allow.
func (s *Sandbox) change(st *state) {
	// An edge that comes back tells what was in force already.
	if old := s.state.Load(); old.phase == st.phase && reflect.DeepEqual(old.policy, st.policy) {
		return
	}
	s.state.Store(st)
	for _, f := range s.list() {
		if err := f.check(); err != nil {
			f.Cut(err)
		}
	}
	s.Event(flowlog.Event{Kind: flowlog.Policy, Phase: st.phase})
}

var (
	errGone  = errdefs.New(errdefs.Denied, "", "the sandbox has ended")
	errEnded = errors.New("the sandbox has ended, or Aether")
)

// end cuts all flows and writes their records: whoever ends the log next has all of it, and nothing begins it again.
func (s *Sandbox) end() {
	s.mu.Lock()
	s.gone = true
	s.mu.Unlock()
	for _, f := range s.list() {
		f.Cut(errEnded)
		f.Close(nil)
	}
	s.logging.Lock()
	defer s.logging.Unlock()
	s.told = true
}

func (s *Sandbox) list() []*Flow {
	s.mu.Lock()
	defer s.mu.Unlock()
	out := make([]*Flow, 0, len(s.flows))
	for f := range s.flows {
		out = append(out, f)
	}
	return out
}
