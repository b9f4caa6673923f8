package runner_test

import (
	"context"
	"errors"
	"net"
	"net/netip"
	"slices"
	"strings"
	"sync"
	"testing"

	"github.com/sandsea/sandsea/api/errdefs"
	"github.com/sandsea/sandsea/internal/aether/wire"
	"github.com/sandsea/sandsea/internal/edge/backend"
	"github.com/sandsea/sandsea/internal/edge/runner"
	"github.com/sandsea/sandsea/internal/edge/runner/edgetest"
	"github.com/sandsea/sandsea/internal/policy"
	"github.com/sandsea/sandsea/internal/sandbox"
	"github.com/sandsea/sandsea/internal/testkit/wait"
)

// gate remembers what is in force, as Aether and the kernel do while edges come and go.
type gate struct {
	mu      sync.Mutex
	inForce map[string]string // guarded by mu: phase by sandbox
	fail    error             // guarded by mu: of every Enforce
}

func (g *gate) Enforce(_ context.Context, s wire.Sandbox, _ backend.Link) error {
	g.mu.Lock()
	defer g.mu.Unlock()
	if g.fail != nil {
		return g.fail
	}
	g.inForce[s.ID] = s.Phase
	return nil
}

func (g *gate) Expect(s wire.Sandbox, l backend.Link) error {
	return g.Enforce(context.Background(), s, l)
}

func (g *gate) Release(_ context.Context, id string) error {
	g.mu.Lock()
	defer g.mu.Unlock()
	delete(g.inForce, id)
	return nil
}

func (*gate) Counters(context.Context, string) (wire.Counters, error) {
	return wire.Counters{Sent: 3}, nil
}
func (*gate) CA(context.Context, string) ([]byte, error) { return nil, nil }
func (*gate) Evaluate(_ string, p policy.Policy, phase string, q policy.Question) policy.Verdict {
	return policy.Evaluate(p, phase, q, nil)
}

func (g *gate) phase(id sandbox.ID) (string, bool) {
	g.mu.Lock()
	defer g.mu.Unlock()
	p, ok := g.inForce[string(id)]
	return p, ok
}

func (g *gate) failWith(err error) {
	g.mu.Lock()
	defer g.mu.Unlock()
	g.fail = err
}

// networked is an edge with a gate, and what makes a spec use it.
func networked(t *testing.T) (*edgetest.Edge, *gate, func(*sandbox.Spec)) {
	t.Helper()
	g := &gate{inForce: map[string]string{}}
	e := edgetest.New(t, func(c *runner.Config) { c.Network = g })
	return e, g, func(s *sandbox.Spec) {
		s.Network = policy.Policy{Phases: []policy.Phase{
			{Name: "agent", Rules: []policy.Rule{{Domain: "a.example"}}}, {Name: "grade", InboundClosed: true},
		}}
	}
}

func TestAPolicyIsInForceFromReadyToEnd(t *testing.T) {
	e, g, open := networked(t)
	id := e.Create(open)
	if p, ok := g.phase(id); !ok || p != "agent" {
		t.Fatalf("in force: %q, %v", p, ok)
	}
	s, err := e.Runner.SetPhase(t.Context(), id, "grade")
	if err != nil || s.Phase != "grade" {
		t.Fatalf("%+v, %v", s, err)
	}
	if p, _ := g.phase(id); p != "grade" {
		t.Errorf("in force: %q", p)
	}
	if _, err := e.Runner.SetPhase(t.Context(), id, "nosuch"); !errors.Is(err, errdefs.Invalid) || errdefs.From(err).Field != "phase" {
		t.Errorf("an unknown phase: %v", err)
	}
	if _, err := e.Runner.Stop(t.Context(), id, 0, "t"); err != nil {
		t.Fatal(err)
	}
	if _, ok := g.phase(id); ok {
		t.Error("it is in force after the end")
	}
	if _, err := e.Runner.SetPhase(t.Context(), id, "agent"); errdefs.From(err).Cause != "stopped" {
		t.Errorf("a change after the end: %v", err)
	}
	none(t, e)
}

func TestAPolicyThatCannotBeEnforcedFailsTheCreate(t *testing.T) {
	e, g, open := networked(t)
	broken := errdefs.New(errdefs.Unavailable, "network", "aether does not answer")
	g.failWith(broken)
	id := e.ID()
	if _, err := e.Runner.Create(t.Context(), e.Request(id, open)); errdefs.KindOf(err) != errdefs.Refused {
		t.Errorf("create: %v", err)
	}
	none(t, e)
	g.failWith(nil)
	closed := e.Create()
	if _, ok := g.phase(closed); ok {
		t.Error("a sandbox without network is known to the gate")
	}
	plain := edgetest.New(t)
	if _, err := plain.Runner.Create(t.Context(), plain.Request(plain.ID(), open)); !errors.Is(err, errdefs.FailedPrecondition) {
		t.Errorf("create without a gate: %v", err)
	}
	none(t, plain)
}

func TestAStartThatFailsAfterItsPolicyWasPutInForceTakesItBack(t *testing.T) {
	e, g, open := networked(t)
	var seen sandbox.ID
	e.World.OnStep(func(step string, id sandbox.ID) error {
		if step != "start/ready" {
			return nil
		}
		wait.Until(t, edgetest.Patience, func() bool { _, ok := g.phase(id); return ok }, "the policy in force before the sandbox is ready")
		seen = id
		return errdefs.New(errdefs.Internal, "machine", "no more")
	})
	id := e.ID()
	if _, err := e.Runner.Create(t.Context(), e.Request(id, open)); err == nil || seen != id {
		t.Fatalf("create: %v, of %q", err, seen)
	}
	if _, ok := g.phase(id); ok {
		t.Error("the policy of a sandbox that never was is in force")
	}
	none(t, e)
}

func TestAChangeThatFailsLeavesTheJournalAlone(t *testing.T) {
	e, g, open := networked(t)
	id := e.Create(open)
	g.failWith(errdefs.New(errdefs.Unavailable, "network", "aether does not answer"))
	if _, err := e.Runner.SetPhase(t.Context(), id, "grade"); !errors.Is(err, errdefs.Unavailable) {
		t.Fatalf("error %v", err)
	}
	g.failWith(nil)
	if s, err := e.Runner.Get(id); err != nil || s.Phase != "agent" {
		t.Errorf("%+v, %v", s, err)
	}
}

func TestTheNextEdgeKnowsThePolicyInForce(t *testing.T) {
	e, g, open := networked(t)
	id := e.Create(open)
	next, err := policy.Policy{Phases: []policy.Phase{
		{Name: "one", Rules: []policy.Rule{{Domain: "b.example"}}}, {Name: "two", Rules: []policy.Rule{{Domain: "c.example"}}},
	}}.Validate()
	if err != nil {
		t.Fatal(err)
	}
	if _, err := e.Runner.SetPolicy(t.Context(), id, next); err != nil {
		t.Fatal(err)
	}
	if _, err := e.Runner.SetPhase(t.Context(), id, "two"); err != nil {
		t.Fatal(err)
	}
	clear(g.inForce)
	e.Restart()
	if p, ok := g.phase(id); !ok || p != "two" {
		t.Errorf("in force: %q, %v", p, ok)
	}
	s, err := e.Runner.Get(id)
	if err != nil || s.Phase != "two" || len(s.Spec.Network.Phases) != 2 || s.Spec.Network.Phases[0].Name != "one" {
		t.Errorf("%+v, %v", s, err)
	}
	v, _, err := e.Runner.Check(id, policy.Question{Name: "c.example", Port: 443})
	if err != nil || !v.Allow {
		t.Errorf("check: %+v, %v", v, err)
	}
	if v, _, _ = e.Runner.Check(id, policy.Question{Name: "b.example", Port: 443}); v.Allow {
		t.Errorf("check: %+v", v)
	}
}

func TestCommandsArePointedAtAether(t *testing.T) {
	e, _, open := networked(t)
	id := e.Create(open)
	a := e.Run(id, "env")
	if !slices.Contains(lines(a.Stdout.Head), "GOPROXY=http://100.64.0.1/golang") {
		t.Errorf("environment: %s", a.Stdout.Head)
	}
	own := e.Create(open, func(s *sandbox.Spec) { s.Env = map[string]string{"GOPROXY": "off"} })
	if a := e.Run(own, "env"); !slices.Contains(lines(a.Stdout.Head), "GOPROXY=off") {
		t.Errorf("environment: %s", a.Stdout.Head)
	}
	if a := e.Run(e.Create(), "env"); slices.Contains(lines(a.Stdout.Head), "GOPROXY=http://100.64.0.1/golang") {
		t.Errorf("environment of a sandbox without network: %s", a.Stdout.Head)
	}
}

func TestEndpointsFollowThePhase(t *testing.T) {
	e, _, open := networked(t)
	id := e.Create(open)
	u, err := e.Runner.Open(id, true)
	if err != nil {
		t.Fatal(err)
	}
	defer u.Done()
	if _, _, err := u.Dial(t.Context(), 1); !errors.Is(err, errdefs.Unavailable) {
		t.Errorf("a port of nobody: %v", err)
	}
	if _, err := e.Runner.SetPhase(t.Context(), id, "grade"); err != nil {
		t.Fatal(err)
	}
	if _, _, err := u.Dial(t.Context(), 1); !errors.Is(err, errdefs.Denied) {
		t.Errorf("a closed phase: %v", err)
	}
}

func TestAPhaseCutsWhatEndpointsMayNotReach(t *testing.T) {
	e, _, open := networked(t)
	id := e.Create(open, func(s *sandbox.Spec) {
		s.Network.Phases = append(s.Network.Phases, policy.Phase{Name: "port1", Inbound: []policy.Ports{{First: 1, Last: 1}}})
	})
	visit := func() (context.Context, *runner.Use) {
		t.Helper()
		ln, err := net.Listen("tcp", "127.0.0.1:0")
		if err != nil {
			t.Fatal(err)
		}
		t.Cleanup(func() { ln.Close() })
		u, err := e.Runner.Open(id, true)
		if err != nil {
			t.Fatal(err)
		}
		t.Cleanup(u.Done)
		c, allowed, err := u.Dial(t.Context(), netip.MustParseAddrPort(ln.Addr().String()).Port())
		if err != nil {
			t.Fatal(err)
		}
		t.Cleanup(func() { c.Close() })
		return allowed, u
	}
	for _, phase := range []string{"grade", "port1"} {
		if _, err := e.Runner.SetPhase(t.Context(), id, "agent"); err != nil {
			t.Fatal(err)
		}
		allowed, _ := visit()
		if _, err := e.Runner.SetPhase(t.Context(), id, "agent"); err != nil {
			t.Fatal(err)
		}
		if allowed.Err() != nil {
			t.Errorf("cut by the phase that it was opened in: %v", context.Cause(allowed))
		}
		if _, err := e.Runner.SetPhase(t.Context(), id, phase); err != nil {
			t.Fatal(err)
		}
		if !errors.Is(context.Cause(allowed), errdefs.Denied) {
			t.Errorf("phase %s: a connection from before goes on: %v", phase, context.Cause(allowed))
		}
	}
	if _, err := e.Runner.SetPhase(t.Context(), id, "agent"); err != nil {
		t.Fatal(err)
	}
	allowed, u := visit()
	u.Done()
	if allowed.Err() == nil {
		t.Error("it goes on after the call")
	}
}

func lines(b []byte) []string { return strings.Split(string(b), "\n") }

// TestAPolicyThatIsRefusedInsideIsNotInForce opens a sandbox that has no network, and whose inside takes no file: the
// resolver's settings cannot be written.
func TestAPolicyThatIsRefusedInsideIsNotInForce(t *testing.T) {
	e, g, open := networked(t)
	id := e.Create()
	var spec sandbox.Spec
	open(&spec)
	if _, err := e.Runner.SetPolicy(t.Context(), id, spec.Network); !errors.Is(err, errdefs.FailedPrecondition) {
		t.Fatalf("error %v", err)
	}
	if s, err := e.Runner.Get(id); err != nil || s.Spec.Network.Open() {
		t.Errorf("%+v, %v", s, err)
	}
	if p, ok := g.phase(id); ok {
		t.Errorf("in force although its change failed: %q", p)
	}
}

func TestConnectionsOfEndpointsAreBounded(t *testing.T) {
	e := edgetest.New(t)
	id := e.Create()
	ln, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	defer ln.Close()
	port := netip.MustParseAddrPort(ln.Addr().String()).Port()
	var uses []*runner.Use
	for range 2048 {
		u, err := e.Runner.Open(id, true)
		if err != nil {
			t.Fatal(err)
		}
		defer u.Done()
		c, _, err := u.Dial(t.Context(), port)
		if err != nil {
			t.Fatal(err)
		}
		defer c.Close()
		uses = append(uses, u)
	}
	u, err := e.Runner.Open(id, true)
	if err != nil {
		t.Fatal(err)
	}
	defer u.Done()
	if _, _, err := u.Dial(t.Context(), port); errdefs.KindOf(err) != errdefs.Exhausted || errdefs.From(err).Limit == "" {
		t.Errorf("one more: %v", err)
	}
	uses[0].Done()
	c, _, err := u.Dial(t.Context(), port)
	if err != nil {
		t.Fatalf("after one has ended: %v", err)
	}
	c.Close()
}
