package placement

import (
	"sync"
	"time"

	"github.com/sandsea/sandsea/internal/node"
)

// grain is the width of an overlay's buckets: fine enough for a view that is a second old, coarse enough that a node
// never has more than a hundred.
const grain = 100 * time.Millisecond

// Overlay is what this server placed lately and what nodes refused, which the view cannot show yet. Entries count until
// the node was seen after them, and no longer than Stale. Safe for concurrent use; a nil Overlay is empty.
type Overlay struct {
	mu    sync.Mutex
	nodes map[node.Number]*recent // guarded by mu
}

type recent struct {
	buckets []bucket // oldest first
	refused time.Time
}

type bucket struct {
	end       time.Time
	sandboxes int
	memory    int64
}

// NewOverlay makes an empty overlay.
func NewOverlay() *Overlay { return &Overlay{nodes: map[node.Number]*recent{}} }

// Placed notes a choice.
func (o *Overlay) Placed(n node.Number, need Need, now time.Time) { o.add(n, 1, need.Memory, now) }

// Refused takes a choice back and notes that the node is fuller than it looks.
func (o *Overlay) Refused(n node.Number, need Need, now time.Time) {
	o.add(n, -1, -need.Memory, now)
	o.mu.Lock()
	defer o.mu.Unlock()
	o.nodes[n].refused = now
}

func (o *Overlay) add(n node.Number, sandboxes int, memory int64, now time.Time) {
	o.mu.Lock()
	defer o.mu.Unlock()
	r := o.nodes[n]
	if r == nil {
		r = &recent{}
		o.nodes[n] = r
	}
	i := 0
	for i < len(r.buckets) && now.Sub(r.buckets[i].end) > Stale {
		i++
	}
	if i > 0 {
		r.buckets = r.buckets[:copy(r.buckets, r.buckets[i:])]
	}
	if l := len(r.buckets); l == 0 || now.After(r.buckets[l-1].end) {
		r.buckets = append(r.buckets, bucket{end: now.Add(grain)})
	}
	b := &r.buckets[len(r.buckets)-1]
	b.sandboxes += sandboxes
	b.memory += memory
}

type sum struct {
	sandboxes int
	memory    int64
	refused   bool
}

// since sums what was noted for n and cannot be in a view that was taken at seen.
func (o *Overlay) since(n node.Number, seen time.Time) sum {
	if o == nil {
		return sum{}
	}
	o.mu.Lock()
	defer o.mu.Unlock()
	r := o.nodes[n]
	if r == nil {
		return sum{}
	}
	s := sum{refused: r.refused.After(seen)}
	for i := len(r.buckets) - 1; i >= 0 && r.buckets[i].end.After(seen); i-- {
		s.sandboxes += r.buckets[i].sandboxes
		s.memory += r.buckets[i].memory
	}
	s.sandboxes, s.memory = max(0, s.sandboxes), max(0, s.memory)
	return s
}
