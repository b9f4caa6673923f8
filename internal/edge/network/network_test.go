package network_test

import (
	"context"
	"errors"
	"log/slog"
	"net/netip"
	"reflect"
	"slices"
	"sync"
	"testing"

	"github.com/sandsea/sandsea/api/errdefs"
	"github.com/sandsea/sandsea/internal/aether/wire"
	"github.com/sandsea/sandsea/internal/edge/network"
	"github.com/sandsea/sandsea/internal/policy"
)

// aether remembers what it was told.
type aether struct {
	mu    sync.Mutex
	boxes map[string]wire.Sandbox // guarded by mu
	fail  error                   // guarded by mu: of the next Put
	log   *[]string
}

func newAether(order *[]string) *aether {
	return &aether{boxes: map[string]wire.Sandbox{}, log: order}
}

func (a *aether) Sync(_ context.Context, all []wire.Sandbox) error {
	a.mu.Lock()
	defer a.mu.Unlock()
	a.boxes = map[string]wire.Sandbox{}
	for _, s := range all {
		a.boxes[s.ID] = s
	}
	return nil
}

func (a *aether) Put(_ context.Context, s wire.Sandbox) error {
	a.mu.Lock()
	defer a.mu.Unlock()
	if err := a.fail; err != nil {
		a.fail = nil
		return err
	}
	a.boxes[s.ID] = s
	*a.log = append(*a.log, "aether "+s.Phase)
	return nil
}

func (a *aether) Drop(_ context.Context, id string) (wire.Counters, error) {
	a.mu.Lock()
	defer a.mu.Unlock()
	delete(a.boxes, id)
	return wire.Counters{}, nil
}

func (a *aether) Counters(_ context.Context, ids []string) (map[string]wire.Counters, error) {
	return map[string]wire.Counters{ids[0]: {Sent: 7}}, nil
}
func (a *aether) CA(context.Context, string) ([]byte, error)   { return []byte("pem"), nil }
func (a *aether) Denials(context.Context, []wire.Denial) error { return nil }
func (a *aether) knows(id string) (s wire.Sandbox, ok bool) {
	a.mu.Lock()
	defer a.mu.Unlock()
	s, ok = a.boxes[id]
	return s, ok
}

type link struct {
	walls policy.Walls
	fail  error
	log   *[]string
}

func (*link) Addr() netip.Addr { return netip.MustParseAddr("100.64.1.7") }
func (l *link) Set(w policy.Walls) error {
	if err := l.fail; err != nil {
		l.fail = nil
		return err
	}
	l.walls = w
	*l.log = append(*l.log, "walls")
	return nil
}

func valid(t *testing.T, p policy.Policy) policy.Policy {
	t.Helper()
	p, err := p.Validate()
	if err != nil {
		t.Fatal(err)
	}
	return p
}

func phases(t *testing.T) policy.Policy {
	return valid(t, policy.Policy{Phases: []policy.Phase{
		{Name: "agent", Rules: []policy.Rule{{Domain: "a.example"}, {CIDR: "192.0.2.7"}}}, {Name: "grade"},
	}})
}

type rig struct {
	n     *network.Network
	a     *aether
	l     *link
	order []string
}

func newRig(t *testing.T) *rig {
	t.Helper()
	r := &rig{n: network.New(network.Config{Log: slog.New(slog.DiscardHandler)})}
	r.a, r.l = newAether(&r.order), &link{log: &r.order}
	if err := r.n.Connect(t.Context(), r.a); err != nil {
		t.Fatal(err)
	}
	return r
}

func TestAetherKnowsBeforeTheWallsOpen(t *testing.T) {
	r := newRig(t)
	p := phases(t)
	for _, phase := range []string{"agent", "grade"} {
		r.order = nil
		if err := r.n.Enforce(t.Context(), wire.Sandbox{ID: "s", Policy: p, Phase: phase}, r.l); err != nil {
			t.Fatal(err)
		}
		if want := []string{"aether " + phase, "walls"}; !slices.Equal(r.order, want) {
			t.Errorf("order %q, want %q", r.order, want)
		}
		if got := r.l.walls; !reflect.DeepEqual(got, policy.Compile(p, phase, nil)) {
			t.Errorf("walls of %s: %+v", phase, got)
		}
		if s, _ := r.a.knows("s"); s.Addr != r.l.Addr() || s.Phase != phase {
			t.Errorf("aether has %+v", s)
		}
	}
}

func TestWhatFailsLeavesTheOldPolicyInForce(t *testing.T) {
	broken := errdefs.New(errdefs.Internal, "", "broken")
	p := phases(t)
	for name, fail := range map[string]func(*rig){
		"aether": func(r *rig) { r.a.fail = broken },
		"walls":  func(r *rig) { r.l.fail = broken },
	} {
		t.Run(name, func(t *testing.T) {
			r := newRig(t)
			if err := r.n.Enforce(t.Context(), wire.Sandbox{ID: "s", Policy: p, Phase: "grade"}, r.l); err != nil {
				t.Fatal(err)
			}
			fail(r)
			err := r.n.Enforce(t.Context(), wire.Sandbox{ID: "s", Policy: p, Phase: "agent"}, r.l)
			if !errors.Is(err, broken) {
				t.Errorf("error %v", err)
			}
			if s, _ := r.a.knows("s"); s.Phase != "grade" {
				t.Errorf("aether enforces %q", s.Phase)
			}
			if r.l.walls.Names || len(r.l.walls.Openings) > 0 {
				t.Errorf("walls are open: %+v", r.l.walls)
			}
			// An Aether that comes later is told of the old one.
			next := newAether(&r.order)
			if err := r.n.Connect(t.Context(), next); err != nil {
				t.Fatal(err)
			}
			if s, _ := next.knows("s"); s.Phase != "grade" {
				t.Errorf("the next aether is told %q", s.Phase)
			}
		})
	}
	t.Run("first", func(t *testing.T) {
		r := newRig(t)
		r.l.fail = broken
		if err := r.n.Enforce(t.Context(), wire.Sandbox{ID: "s", Policy: p, Phase: "agent"}, r.l); !errors.Is(err, broken) {
			t.Errorf("error %v", err)
		}
		if _, ok := r.a.knows("s"); ok {
			t.Error("aether knows a sandbox that was not to be")
		}
	})
}

func TestAPolicyThatNeedsAGrantIsRefused(t *testing.T) {
	r := newRig(t)
	p := valid(t, policy.Policy{Phases: []policy.Phase{{Name: "agent", Rules: []policy.Rule{{CIDR: "10.1.2.3"}}}}})
	err := r.n.Enforce(t.Context(), wire.Sandbox{ID: "s", Project: "lab", Policy: p, Phase: "agent"}, r.l)
	if !errors.Is(err, errdefs.Denied) || len(r.order) > 0 {
		t.Errorf("error %v after %q", err, r.order)
	}
	n := network.New(network.Config{
		Grants: func(project string) policy.Grants {
			if project != "lab" {
				return nil
			}
			return policy.Grants{netip.MustParsePrefix("10.1.0.0/16")}
		},
		Log: slog.New(slog.DiscardHandler),
	})
	if err := n.Connect(t.Context(), r.a); err != nil {
		t.Fatal(err)
	}
	if err := n.Enforce(t.Context(), wire.Sandbox{ID: "s", Project: "lab", Policy: p, Phase: "agent"}, r.l); err != nil {
		t.Fatal(err)
	}
	if len(r.l.walls.Openings) != 1 {
		t.Errorf("walls: %+v", r.l.walls)
	}
}

func TestAChangeWaitsForTheNextAether(t *testing.T) {
	r := newRig(t)
	r.a.fail = errdefs.New(errdefs.Unavailable, "aether", "gone")
	done := make(chan error, 1)
	p := phases(t)
	go func() { done <- r.n.Enforce(t.Context(), wire.Sandbox{ID: "s", Policy: p, Phase: "agent"}, r.l) }()
	next := newAether(&r.order)
	for {
		// Until the change has found the line broken it would be told by Sync alone.
		r.a.mu.Lock()
		met := r.a.fail == nil
		r.a.mu.Unlock()
		if met {
			break
		}
	}
	if err := r.n.Connect(t.Context(), next); err != nil {
		t.Fatal(err)
	}
	if err := <-done; err != nil {
		t.Fatal(err)
	}
	if s, ok := next.knows("s"); !ok || s.Phase != "agent" {
		t.Errorf("the next aether has %+v", s)
	}
}

func TestASandboxThatEndedIsForgotten(t *testing.T) {
	r := newRig(t)
	if err := r.n.Enforce(t.Context(), wire.Sandbox{ID: "s", Policy: phases(t), Phase: "agent"}, r.l); err != nil {
		t.Fatal(err)
	}
	if c, err := r.n.Counters(t.Context(), "s"); err != nil || c.Sent != 7 {
		t.Errorf("counters %+v, %v", c, err)
	}
	for range 2 {
		if err := r.n.Release(t.Context(), "s"); err != nil {
			t.Fatal(err)
		}
	}
	if _, ok := r.a.knows("s"); ok {
		t.Error("aether still knows it")
	}
	if c, err := r.n.Counters(t.Context(), "s"); err != nil || c != (wire.Counters{}) {
		t.Errorf("counters %+v, %v", c, err)
	}
}

func TestTheNextAetherKnowsWhatWasCounted(t *testing.T) {
	r := newRig(t)
	p := phases(t)
	if err := r.n.Enforce(t.Context(), wire.Sandbox{ID: "s", Policy: p, Phase: "agent"}, r.l); err != nil {
		t.Fatal(err)
	}
	r.n.Recall(t.Context())
	if err := r.n.Enforce(t.Context(), wire.Sandbox{ID: "s", Policy: p, Phase: "grade"}, r.l); err != nil {
		t.Fatal(err)
	}
	next := newAether(&r.order)
	if err := r.n.Connect(t.Context(), next); err != nil {
		t.Fatal(err)
	}
	if s, _ := next.knows("s"); s.Before.Sent != 7 {
		t.Errorf("the next aether is told %+v", s.Before)
	}
}

// TestTheNextEdgeKnowsWhatWasCounted ends the Aether that an edge before has left.
func TestTheNextEdgeKnowsWhatWasCounted(t *testing.T) {
	r := newRig(t)
	n := network.New(network.Config{Log: slog.New(slog.DiscardHandler)})
	if err := n.Inherit(t.Context(), r.a); err != nil {
		t.Fatal(err)
	}
	if err := n.Expect(wire.Sandbox{ID: "s", Policy: phases(t), Phase: "agent"}, r.l); err != nil {
		t.Fatal(err)
	}
	if err := n.Inherit(t.Context(), r.a); err != nil {
		t.Fatal(err)
	}
	next := newAether(&r.order)
	if err := n.Connect(t.Context(), next); err != nil {
		t.Fatal(err)
	}
	if s, _ := next.knows("s"); s.Before.Sent != 7 {
		t.Errorf("the next aether is told %+v", s.Before)
	}
}

func TestASecretThatIsNotThereIsRefused(t *testing.T) {
	p := valid(t, policy.Policy{InspectTLS: true, Phases: []policy.Phase{
		{Name: "agent", Rules: []policy.Rule{{Domain: "a.example"}, {Domain: "api.example", Secret: "model"}}},
	}})
	r := newRig(t)
	err := r.n.Enforce(t.Context(), wire.Sandbox{ID: "s", Project: "lab", Policy: p, Phase: "agent"}, r.l)
	if e := errdefs.From(err); !errors.Is(err, errdefs.Denied) || e.Field != "network.phases[0].rules[1].secret" || len(r.order) > 0 {
		t.Errorf("error %v after %q", err, r.order)
	}
	n := network.New(network.Config{
		Secret: func(project, name string) bool { return project == "lab" && name == "model" }, Log: slog.New(slog.DiscardHandler),
	})
	if err := n.Connect(t.Context(), r.a); err != nil {
		t.Fatal(err)
	}
	if err := n.Enforce(t.Context(), wire.Sandbox{ID: "s", Project: "lab", Policy: p, Phase: "agent"}, r.l); err != nil {
		t.Error(err)
	}
}

// TestAChangeDoesNotBringBackWhatEnded ends a sandbox while Aether is being told of another phase of its.
func TestAChangeDoesNotBringBackWhatEnded(t *testing.T) {
	for name, wall := range map[string]error{
		"before its link is gone": nil, "after": errdefs.New(errdefs.NotFound, "network slot 7", "it has been released"),
	} {
		t.Run(name, func(t *testing.T) {
			r := newRig(t)
			s := wire.Sandbox{ID: "s1", Policy: phases(t), Phase: "agent"}
			if err := r.n.Enforce(t.Context(), s, r.l); err != nil {
				t.Fatal(err)
			}
			slow := &ending{aether: r.a, end: func() {
				if err := r.n.Release(t.Context(), "s1"); err != nil {
					t.Error(err)
				}
				r.l.fail = wall
			}}
			if err := r.n.Connect(t.Context(), slow); err != nil {
				t.Fatal(err)
			}
			s.Phase = "grade"
			if err := r.n.Enforce(t.Context(), s, r.l); !errors.Is(err, errdefs.NotFound) {
				t.Errorf("error %v", err)
			}
			if s, ok := r.a.knows("s1"); ok {
				t.Errorf("aether knows it after its end: %+v", s)
			}
			next := newAether(&r.order)
			if err := r.n.Connect(t.Context(), next); err != nil {
				t.Fatal(err)
			}
			if s, ok := next.knows("s1"); ok {
				t.Errorf("the next aether is told of it: %+v", s)
			}
		})
	}
}

// ending is an Aether that is told of a sandbox which ends meanwhile.
type ending struct {
	*aether
	end  func()
	once sync.Once
}

func (a *ending) Put(ctx context.Context, s wire.Sandbox) error {
	a.once.Do(a.end)
	return a.aether.Put(ctx, s)
}
