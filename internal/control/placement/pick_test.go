package placement

import (
	"errors"
	"math/rand/v2"
	"slices"
	"testing"
	"time"

	"pgregory.net/rapid"

	"github.com/sandsea/sandsea/api/errdefs"
	"github.com/sandsea/sandsea/internal/node"
)

var start = time.Date(2026, 1, 1, 0, 0, 0, 0, time.UTC)

func entry(n node.Number, change ...func(*node.Entry)) node.Entry {
	e := node.Entry{
		Ref: node.Ref{Number: n, Epoch: 1}, SeenAt: start,
		Capabilities: node.Capabilities{CPUs: 2, Memory: 25125558682, PidMax: 4 << 20},
		Load:         node.Load{MaxSandboxes: 100},
	}
	for _, c := range change {
		c(&e)
	}
	return e
}

func cordon(e *node.Entry)  { e.Cordoned = true }
func stale(e *node.Entry)   { e.SeenAt = start.Add(-Stale - time.Second) }
func full(e *node.Entry)    { e.Load.Sandboxes = 100 }
func starts(e *node.Entry)  { e.Load.Starting, e.Load.MaxStarting = 48, 48 }
func promise(e *node.Entry) { e.Load.Memory, e.Load.MaxMemory = 24<<30, 24<<30 }

func lacking(node.Capabilities) (node.Feature, string, bool) {
	return node.Feature{Name: "limit.disk", Fix: "mount with project quota"}, "limits.disk_bytes", true
}

func TestPickSaysWhyNoNodeFits(t *testing.T) {
	small := Need{Memory: 1 << 29, CPUMillis: 1000, Pids: 4096}
	for _, tc := range []struct {
		name  string
		nodes []node.Entry
		need  Need
		not   []node.Number
		kind  errdefs.Kind
		text  string
		wait  bool
	}{
		{
			"no node at all", nil, small, nil, errdefs.Unavailable,
			"no node has registered. Start one: sandsea edge, or sandsea up on one machine", true,
		},
		{
			"all away",
			[]node.Entry{entry(1, stale), entry(2, stale)},
			small, nil, errdefs.Unavailable,
			"all 2 nodes unreachable. See sandsea up's log on the nodes", true,
		},
		{
			"too much memory",
			[]node.Entry{entry(1), entry(2, func(e *node.Entry) { e.Capabilities.Memory = 8 << 30 })},
			Need{Memory: 64 << 30},
			nil, errdefs.Exhausted,
			"memory 64 GiB: largest node has 23.4 GiB. Ask for less or add a node", false,
		},
		{
			"too many CPUs",
			[]node.Entry{entry(1, func(e *node.Entry) { e.Load.MaxCPUMillis = 8000 })},
			Need{CPUMillis: 8500},
			nil,
			errdefs.Exhausted, "cpu 8.5: largest node has 8 to promise. Ask for less or add a node", false,
		},
		{
			"too many pids",
			[]node.Entry{entry(1)},
			Need{Pids: 5 << 20},
			nil, errdefs.Exhausted,
			"pids 5242880: largest node has 4194304. Ask for less or add a node", false,
		},
		{
			"a feature that none has",
			[]node.Entry{entry(1)},
			Need{Missing: lacking},
			nil, errdefs.FailedPrecondition,
			"limits.disk_bytes: no node enforces limit.disk (mount with project quota). See: sandsea doctor", false,
		},
		{
			"a mixture",
			[]node.Entry{
				entry(1, cordon), entry(2, stale), entry(3, full), entry(4, starts), entry(5, promise),
				entry(6),
			},
			small,
			[]node.Number{6},
			errdefs.Exhausted,
			"no node can take it: of 6 nodes, 1 refused it just now, 1 cordoned, 1 unreachable, 1 at its sandbox limit, " +
				"1 memory is promised, 1 at its start limit. Try again in a second, or stop some: sandsea ls", true,
		},
	} {
		t.Run(tc.name, func(t *testing.T) {
			_, err := Pick(node.View{Nodes: tc.nodes}, nil, tc.need, tc.not, start, rand.New(rand.NewPCG(1, 1)))
			e, ok := errors.AsType[*errdefs.Error](err)
			if !ok || e.Kind != tc.kind || e.Error() != tc.text || (e.RetryAfter > 0) != tc.wait {
				t.Errorf("got  %v\nwant %s (%s, wait %v)", err, tc.text, tc.kind, tc.wait)
			}
		})
	}
}

func TestPickOnlyChoosesNodesThatFit(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		var v node.View
		fit := map[node.Number]bool{}
		n := rapid.IntRange(1, 40).Draw(t, "nodes")
		for i := range n {
			e := entry(node.Number(i + 1))
			bad := rapid.SampledFrom([]func(*node.Entry){nil, nil, cordon, stale, full, starts, promise}).Draw(t, "state")
			if bad != nil {
				bad(&e)
			}
			v.Nodes = append(v.Nodes, e)
			fit[e.Number] = bad == nil
		}
		var not []node.Number
		for range rapid.IntRange(0, 5).Draw(t, "tried") {
			x := node.Number(rapid.IntRange(1, n).Draw(t, "tried"))
			not = append(not, x)
			fit[x] = false
		}
		any := false
		for _, f := range fit {
			any = any || f
		}
		seed := rapid.Uint64().Draw(t, "seed")
		pick := func() (node.Ref, error) {
			return Pick(v, nil, Need{Memory: 1 << 29}, not, start, rand.New(rand.NewPCG(seed, 1)))
		}
		ref, err := pick()
		switch {
		case any && err != nil:
			t.Fatalf("a node fits, got %v", err)
		case !any && err == nil:
			t.Fatalf("no node fits, got %v", ref)
		case any && !fit[ref.Number]:
			t.Fatalf("node %d does not fit", ref.Number)
		}
		if again, _ := pick(); again != ref {
			t.Fatalf("same inputs, other answer: %v, %v", ref, again)
		}
	})
}

func TestPickPrefersTheEmptierAfterItsOwnChoices(t *testing.T) {
	v := node.View{Nodes: []node.Entry{
		entry(1, func(e *node.Entry) { e.Load.Sandboxes = 10 }), entry(2, func(e *node.Entry) { e.Load.Sandboxes = 12 }),
	}}
	o, r := NewOverlay(), rand.New(rand.NewPCG(1, 1))
	now := start.Add(time.Millisecond)
	got := map[node.Number]int{}
	for range 22 {
		ref, err := Pick(v, o, Need{}, nil, now, r)
		if err != nil {
			t.Fatal(err)
		}
		got[ref.Number]++
		o.Placed(ref.Number, Need{}, now)
	}
	if got[1] != 12 || got[2] != 10 {
		t.Errorf("got %v, want both to reach 22", got)
	}
	o.Refused(1, Need{}, now)
	for range 5 {
		if ref, _ := Pick(v, o, Need{}, nil, now, r); ref.Number != 2 {
			t.Error("the node that just refused was preferred")
		}
	}
	// Once the nodes were seen again, the overlay no longer counts.
	for i := range v.Nodes {
		v.Nodes[i].SeenAt = now.Add(time.Second)
	}
	if ref, _ := Pick(v, o, Need{}, nil, now.Add(time.Second), r); ref.Number != 1 {
		t.Error("the overlay outlived the view")
	}
}

func TestOverlayForgetsWithTime(t *testing.T) {
	o := NewOverlay()
	for i := range 1000 {
		o.Placed(1, Need{Memory: 1}, start.Add(time.Duration(i)*50*time.Millisecond))
	}
	if l := len(o.nodes[1].buckets); l > int(Stale/grain)+2 {
		t.Errorf("%d buckets are kept", l)
	}
	var none *Overlay
	if none.since(1, start) != (sum{}) {
		t.Error("a nil overlay is not empty")
	}
}

// TestSimulation: 160 nodes of 3,200 slots, 8 servers that see the nodes as they were up to a second ago, 5,000 creates
// a second, at most 48 starts at once on a node, 60 to 80 % use.
func TestSimulation(t *testing.T) {
	const (
		nodes, slots, servers, rate = 160, 3200, 8, 5000
		startLimit                  = 48
		startTakes                  = 300 * time.Millisecond
		seconds                     = 20
		tries                       = 5
	)
	type truth struct {
		running  int
		starting []time.Time // when each start ends
	}
	r := rand.New(rand.NewPCG(7, 7))
	world := make([]truth, nodes)
	for i := range world {
		world[i].running = slots*60/100 + r.IntN(slots/50)
	}
	views := make([]node.View, servers)
	overlays := make([]*Overlay, servers)
	for s := range servers {
		overlays[s] = NewOverlay()
	}
	look := func(now time.Time) node.View {
		v := node.View{At: now, Nodes: make([]node.Entry, nodes)}
		for i := range world {
			v.Nodes[i] = entry(node.Number(i+1), func(e *node.Entry) {
				e.SeenAt = now
				e.Load = node.Load{
					Sandboxes: world[i].running, MaxSandboxes: slots,
					Starting: len(world[i].starting), MaxStarting: startLimit,
				}
			})
		}
		return v
	}
	asked, refused, failed := 0, 0, 0
	for i := range rate * seconds {
		now := start.Add(time.Duration(i) * time.Second / rate)
		if i%(rate/servers) == 0 {
			s := i / (rate / servers) % servers // servers look in turn, each once a second
			views[s] = look(now)
		}
		s := r.IntN(servers)
		if views[s].Nodes == nil {
			views[s] = look(now)
		}
		var not []node.Number
		placed := false
		for range tries {
			ref, err := Pick(views[s], overlays[s], Need{Memory: 1 << 20}, not, now, r)
			if err != nil {
				break
			}
			overlays[s].Placed(ref.Number, Need{Memory: 1 << 20}, now)
			asked++
			w := &world[ref.Number-1]
			w.starting = slices.DeleteFunc(w.starting, func(end time.Time) bool { return end.Before(now) })
			if len(w.starting) >= startLimit || w.running >= slots {
				refused++
				overlays[s].Refused(ref.Number, Need{Memory: 1 << 20}, now)
				not = append(not, ref.Number)
				continue
			}
			w.starting = append(w.starting, now.Add(startTakes))
			w.running++
			placed = true
			break
		}
		if !placed {
			failed++
		}
	}
	most, sum := 0, 0
	for _, w := range world {
		most, sum = max(most, w.running), sum+w.running
	}
	ratio := float64(most) * nodes / float64(sum)
	share := float64(refused) / float64(asked)
	t.Logf("max/mean %.4f, refused %.3f %%, failed %d of %d", ratio, 100*share, failed, rate*seconds)
	if ratio > 1.05 || share > 0.01 || float64(failed) > 0.0001*rate*seconds {
		t.Errorf("max/mean %.4f (≤ 1.05), refused %.4f (≤ 0.01), failed %d", ratio, share, failed)
	}
}

func BenchmarkPick160(b *testing.B) {
	var v node.View
	features := []node.Feature{{Name: "kill", Status: node.OK}, {Name: "layers", Status: node.OK}, {
		Name:   "limit.memory",
		Status: node.OK,
	}}
	for i := range 160 {
		v.Nodes = append(v.Nodes, entry(node.Number(i+1), func(e *node.Entry) { e.Capabilities.Features = features }))
	}
	o, r := NewOverlay(), rand.New(rand.NewPCG(1, 1))
	need := Need{Memory: 1 << 29, Missing: func(c node.Capabilities) (node.Feature, string, bool) {
		return node.Feature{}, "", !c.Enforces("limit.memory")
	}}
	took := make([]time.Duration, 0, b.N)
	b.ReportAllocs()
	for b.Loop() {
		began := time.Now()
		ref, err := Pick(v, o, need, nil, start, r)
		if err != nil {
			b.Fatal(err)
		}
		took = append(took, time.Since(began))
		o.Placed(ref.Number, need, start)
		if len(took)%1000 == 0 {
			o = NewOverlay()
		}
	}
	slices.Sort(took)
	b.ReportMetric(float64(took[len(took)*99/100].Nanoseconds()), "p99-ns")
}
