package roster_test

import (
	"errors"
	"fmt"
	"net/netip"
	"runtime"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/sandsea/sandsea/api/errdefs"
	"github.com/sandsea/sandsea/internal/aether/config"
	"github.com/sandsea/sandsea/internal/aether/flowlog"
	"github.com/sandsea/sandsea/internal/aether/roster"
	"github.com/sandsea/sandsea/internal/aether/wire"
	"github.com/sandsea/sandsea/internal/policy"
)

// log keeps events.
type log struct {
	mu  sync.Mutex
	all []flowlog.Event // guarded by mu
}

func (l *log) Add(_ string, e flowlog.Event) {
	l.mu.Lock()
	defer l.mu.Unlock()
	l.all = append(l.all, e)
}

var own = netip.MustParseAddr("192.0.2.99")

func newRoster(l *log) *roster.Roster {
	return roster.New(roster.Config{
		Grants: func(project string) policy.Grants {
			if project == "granted" {
				return policy.Grants{netip.PrefixFrom(own, 32), netip.MustParsePrefix("10.0.0.0/8")}
			}
			return nil
		},
		Own: func(a netip.Addr) bool { return a == own }, Limits: config.DefaultLimits, Log: l,
	})
}

func box(n byte, project string, rules ...policy.Rule) wire.Sandbox {
	return wire.Sandbox{
		ID: fmt.Sprintf("s%d", n), Project: project, Addr: netip.AddrFrom4([4]byte{100, 64, 1, n}), Phase: "agent",
		Policy: policy.Policy{Phases: []policy.Phase{{Name: "agent", Rules: rules}}},
	}
}

func TestWhoIsThere(t *testing.T) {
	r := newRoster(&log{})
	if err := r.Sync([]wire.Sandbox{box(1, "p"), box(2, "p")}); err != nil {
		t.Fatal(err)
	}
	clash := box(3, "p")
	clash.Addr = box(1, "p").Addr
	moved := box(2, "p")
	moved.Addr = box(9, "p").Addr
	foreign := box(4, "p")
	foreign.Addr = netip.MustParseAddr("192.0.2.1")
	for name, c := range map[string]struct {
		b    wire.Sandbox
		want error
	}{
		"the address of another": {clash, errdefs.AlreadyExists},
		"another address":        {moved, errdefs.Invalid},
		"another project":        {box(2, "q"), errdefs.Invalid},
		"no sandbox's address":   {foreign, errdefs.Invalid},
		"the same again":         {box(2, "p"), nil},
	} {
		if err := r.Put(c.b); !errors.Is(err, c.want) {
			t.Errorf("%s: %v", name, err)
		}
	}
	// What is wrong with one keeps none of the others out.
	if err := r.Sync([]wire.Sandbox{foreign, box(2, "p"), box(5, "p")}); err == nil {
		t.Error("a wrong one was taken")
	}
	for n, want := range map[byte]bool{1: false, 2: true, 5: true} {
		if _, ok := r.ByAddr(box(n, "p").Addr); ok != want {
			t.Errorf("s%d is there: %v", n, ok)
		}
	}
	if _, err := r.Drop("s1"); !errors.Is(err, errdefs.NotFound) {
		t.Error(err)
	}
}

func TestTheNodesOwnAddressesAreThePlatforms(t *testing.T) {
	r := newRoster(&log{})
	everywhere := policy.Rule{CIDR: "0.0.0.0/0"}
	for n, c := range []struct {
		project string
		addr    string
		allow   bool
	}{
		{"p", "192.0.2.98", true},
		{"p", "192.0.2.99", false},
		{"p", "::ffff:192.0.2.99", false},
		{"p", "10.0.0.1", false},
		{"granted", "192.0.2.99", true},
		{"granted", "10.0.0.1", true},
	} {
		b := box(byte(n+1), c.project, everywhere)
		if err := r.Put(b); err != nil {
			t.Fatal(err)
		}
		s, _ := r.ByID(b.ID)
		v := s.Judge(policy.Question{Addr: netip.MustParseAddr(c.addr), Port: 80, Protocol: policy.TCP})
		if v.Allow != c.allow || !c.allow && v.Rule != policy.RulePlatform {
			t.Errorf("%s of project %s: %+v", c.addr, c.project, v)
		}
	}
}

// TestNoFlowSlipsBetween opens flows while the policy changes: after the last change none is open that it does not allow.
func TestNoFlowSlipsBetween(t *testing.T) {
	l := &log{}
	r := newRoster(l)
	open, closed := box(1, "p", policy.Rule{Domain: "a.example"}), box(1, "p")
	if err := r.Put(open); err != nil {
		t.Fatal(err)
	}
	s, _ := r.ByID("s1")
	q := policy.Question{Name: "a.example", Port: 443, Protocol: policy.TCP}
	var cut, opened atomic.Int64
	stop := make(chan struct{})
	var openers sync.WaitGroup
	for range 4 {
		openers.Go(func() {
			for {
				select {
				case <-stop:
					return
				default:
				}
				done := make(chan struct{})
				f, err := s.Open(q, roster.Label{Name: q.Name}, func() { close(done) })
				if err != nil {
					continue
				}
				opened.Add(1)
				select {
				case <-done:
					cut.Add(1)
				case <-stop:
				case <-time.After(time.Millisecond):
				}
				f.Close(nil)
			}
		})
	}
	for n := 0; n < 200 || opened.Load() == 0 || cut.Load() == 0; n++ {
		if err := errors.Join(t.Context().Err(), r.Put(closed), r.Put(open)); err != nil {
			t.Fatal(err)
		}
		runtime.Gosched() // or on few cores nobody else may have a turn between the two
	}
	// One that is open when the last change comes is cut by it.
	var last atomic.Bool
	f, err := s.Open(q, roster.Label{}, func() { last.Store(true) })
	if err != nil {
		t.Fatal(err)
	}
	if err := r.Put(closed); err != nil {
		t.Fatal(err)
	}
	if !last.Load() || f.Cause() == nil {
		t.Error("a flow outlives its policy")
	}
	f.Close(nil)
	close(stop)
	openers.Wait()
	if n := s.Counters().Flows; n != 0 {
		t.Errorf("%d flows are left", n)
	}
	for _, e := range l.all {
		if e.Kind == flowlog.Connection && e.Denied && e.Rule == "" {
			t.Fatalf("a denial without a rule: %+v", e)
		}
	}
}

// TestAFlowThatEndsWithItsSandboxIsWrittenDown drops a sandbox while its only flow is being closed.
func TestAFlowThatEndsWithItsSandboxIsWrittenDown(t *testing.T) {
	q := policy.Question{Name: "a.example", Port: 443, Protocol: policy.TCP}
	for range 5000 {
		l := &log{}
		r := newRoster(l)
		if err := r.Put(box(1, "p", policy.Rule{Domain: "a.example"})); err != nil {
			t.Fatal(err)
		}
		s, _ := r.ByID("s1")
		f, err := s.Open(q, roster.Label{Name: q.Name}, func() {})
		if err != nil {
			t.Fatal(err)
		}
		var closing sync.WaitGroup
		closing.Go(func() { f.Close(nil) })
		n, err := r.Drop("s1")
		closing.Wait()
		if err != nil || n.Flows != 0 || len(l.all) != 1 || l.all[0].Name != q.Name {
			t.Fatalf("%+v, %v, log %+v", n, err, l.all)
		}
	}
}

func TestRequestsAreJudgedAlone(t *testing.T) {
	l := &log{}
	r := newRoster(l)
	with := func(services ...string) wire.Sandbox {
		b := box(1, "p")
		b.Policy.Services = map[string]bool{}
		for _, s := range services {
			b.Policy.Services[s] = true
		}
		return b
	}
	if err := r.Put(with("pypi", "npm")); err != nil {
		t.Fatal(err)
	}
	s, _ := r.ByID("s1")
	cuts := 0
	f, err := s.Open(policy.Question{}, roster.Label{}, func() { cuts++ })
	if err != nil {
		t.Fatal(err)
	}
	_, pypi := f.During(policy.Question{Service: "pypi"})
	if v, npm := f.During(policy.Question{Service: "npm"}); !v.Allow {
		t.Errorf("%+v", v)
	} else {
		npm()
	}
	v, golang := f.During(policy.Question{Service: "golang"})
	if v.Allow {
		t.Errorf("%+v", v)
	}
	// That it is denied does not matter to the others, while it is answered.
	if v := f.Reached(netip.MustParseAddr("192.0.2.1")); !v.Allow {
		t.Errorf("%+v", v)
	}
	golang()
	// npm is done: that it goes does not matter.
	if err := r.Put(with("pypi")); err != nil || cuts != 0 {
		t.Errorf("cut %d times, %v", cuts, err)
	}
	if err := r.Put(with("npm")); err != nil || cuts != 1 {
		t.Errorf("cut %d times, %v", cuts, err)
	}
	pypi()
	f.Close(nil)
	// Of a flow that was not cut the log names no rule that denied something on it.
	f, err = s.Open(policy.Question{}, roster.Label{}, func() {})
	if err != nil {
		t.Fatal(err)
	}
	_, npm := f.During(policy.Question{Service: "npm"})
	npm()
	_, golang = f.During(policy.Question{Service: "golang"})
	golang()
	f.Close(nil)
	if e := l.all[len(l.all)-1]; e.Denied || e.Rule != "service npm" {
		t.Errorf("%+v", e)
	}
}

func TestCountersGoOn(t *testing.T) {
	r := newRoster(&log{})
	b := box(1, "p", policy.Rule{Domain: "*"})
	b.Before = wire.Counters{Sent: 60, Received: 30, Denied: 2}
	b.Policy.Limits.Bytes = 100
	if err := r.Put(b); err != nil {
		t.Fatal(err)
	}
	s, _ := r.ByID("s1")
	cut := false
	f, err := s.Open(policy.Question{Name: "a.example", Port: 80, Protocol: policy.TCP}, roster.Label{}, func() { cut = true })
	if err != nil {
		t.Fatal(err)
	}
	if room := f.Room(1 << 20); room != 11 {
		t.Errorf("room for %d", room)
	}
	if err := f.Sent(10); err != nil || cut {
		t.Errorf("within the limit: %v", err)
	}
	if err := f.Received(1); err == nil || !cut {
		t.Errorf("beyond the limit: %v", err)
	}
	f.Close(nil)
	if n, err := r.Drop("s1"); err != nil || n != (wire.Counters{Sent: 70, Received: 31, Denied: 3}) {
		t.Errorf("%+v, %v", n, err)
	}
}
