// Package admission decides whether this node takes another sandbox.
//
// It keeps what is promised to sandboxes against what may be promised, and bounds how many starts are under way at
// once. A refusal is errdefs.Refused and names the reason, the field and the bound; nothing is ever promised beyond a
// bound. Everything may be called at once.
package admission

import (
	"context"
	"errors"
	"fmt"
	"sync"

	"github.com/sandsea/sandsea/api/errdefs"
	"github.com/sandsea/sandsea/internal/node"
	"github.com/sandsea/sandsea/internal/sandbox"
)

// Overcommit says how much more may be promised than there is, since sandboxes rarely use what they may. Zero fields
// take the defaults.
type Overcommit struct {
	Memory float64
	CPU    float64
	Pids   float64
}

// The defaults: CPU time is shared fairly whatever is promised, memory is bounded per sandbox and rarely full.
const (
	DefaultMemoryFactor = 8
	DefaultCPUFactor    = 256
	DefaultPidsFactor   = 8
	// DefaultDiskReserve is free disk space that no new sandbox may eat into.
	DefaultDiskReserve = 1 << 30
	maxSandboxes       = 8192
	pidsPerSandbox     = 8 // what an idle one needs, with room
)

// Capacity is what may be promised.
type Capacity struct {
	Sandboxes int
	Starting  int
	Memory    int64
	CPUMillis int64
	Pids      int64
	// DiskReserve is compared with DiskFree at each admission.
	DiskReserve int64
}

// Of gives the capacity of a machine.
func Of(c node.Capabilities, o Overcommit) Capacity {
	factor := func(v, fallback float64) float64 {
		if v <= 0 {
			return fallback
		}
		return v
	}
	return Capacity{
		Sandboxes:   int(min(maxSandboxes, max(c.PidMax/pidsPerSandbox, 1))),
		Starting:    node.StartsAtOnce(c.CPUs),
		Memory:      int64(float64(c.Memory) * factor(o.Memory, DefaultMemoryFactor)),
		CPUMillis:   int64(float64(c.CPUs) * 1000 * factor(o.CPU, DefaultCPUFactor)),
		Pids:        int64(float64(c.PidMax) * factor(o.Pids, DefaultPidsFactor)),
		DiskReserve: DefaultDiskReserve,
	}
}

// Admission is the gate of one node.
type Admission struct {
	most     Capacity
	diskFree func() (int64, error)
	starts   chan struct{}

	mu       sync.Mutex
	promised map[sandbox.ID]sandbox.Limits // guarded by mu
	sum      sandbox.Limits                // guarded by mu
	starting int                           // guarded by mu: in the queue or starting
}

// New makes a gate. diskFree tells the free bytes where uppers and output lie.
func New(most Capacity, diskFree func() (int64, error)) (*Admission, error) {
	if most.Sandboxes < 1 || most.Starting < 1 || most.Memory < 1 || most.CPUMillis < 1 || most.Pids < 1 {
		return nil, errdefs.New(errdefs.Invalid, "admission", "a capacity is below 1: %+v", most)
	}
	return &Admission{
		most: most, diskFree: diskFree, starts: make(chan struct{}, most.Starting),
		promised: map[sandbox.ID]sandbox.Limits{},
	}, nil
}

// Grant is the room of one sandbox.
type Grant struct {
	a        *Admission
	id       sandbox.ID
	starting sync.Once
	release  sync.Once
}

func refused(field, limit, format string, args ...any) error {
	return errdefs.New(errdefs.Refused, "node", "queue: "+format, args...).WithField(field, limit)
}

// Admit promises room for a sandbox and waits for its turn to start, as long as ctx lasts. The caller calls Started
// when the start is decided and Release when the sandbox is gone.
func (a *Admission) Admit(ctx context.Context, id sandbox.ID, l sandbox.Limits) (*Grant, error) {
	free, err := a.diskFree()
	if err != nil {
		return nil, fmt.Errorf("ask for free disk space: %w", err)
	}
	if free < a.most.DiskReserve {
		return nil, refused("limits.disk_bytes", fmt.Sprintf("%d bytes kept free", a.most.DiskReserve),
			"only %d bytes of disk are free", free)
	}
	if err := a.reserve(id, l, true); err != nil {
		return nil, err
	}
	g := &Grant{a: a, id: id}
	select {
	case a.starts <- struct{}{}:
		return g, nil
	default:
	}
	select {
	case a.starts <- struct{}{}:
		return g, nil
	case <-ctx.Done():
		a.mu.Lock()
		a.starting--
		waiting := a.starting
		a.mu.Unlock()
		g.starting.Do(func() {}) // it never had its turn
		g.Release()
		if errors.Is(ctx.Err(), context.DeadlineExceeded) {
			return nil, refused("ready_timeout_ms", fmt.Sprintf("%d starts at once", a.most.Starting),
				"no turn to start in time, %d starts are ahead", waiting)
		}
		return nil, errdefs.New(errdefs.Canceled, "sandbox "+id.Short(), "queue: the caller stopped waiting").
			Wrap(context.Cause(ctx))
	}
}

func (a *Admission) reserve(id sandbox.ID, l sandbox.Limits, bounded bool) error {
	a.mu.Lock()
	defer a.mu.Unlock()
	if _, ok := a.promised[id]; ok {
		return errdefs.New(errdefs.Internal, "sandbox "+id.Short(), "has been given room before")
	}
	if bounded {
		if len(a.promised) >= a.most.Sandboxes {
			return refused("", fmt.Sprintf("%d sandboxes", a.most.Sandboxes), "it has %d sandboxes, as many as it takes",
				len(a.promised))
		}
		for _, r := range []struct {
			field, unit      string
			used, want, most int64
		}{
			{"limits.memory_bytes", "bytes of memory", a.sum.Memory, l.Memory, a.most.Memory},
			{"limits.cpu_millis", "thousandths of a CPU", a.sum.CPUMillis, l.CPUMillis, a.most.CPUMillis},
			{"limits.pids", "processes", a.sum.Pids, l.Pids, a.most.Pids},
		} {
			if r.want > r.most-r.used {
				return refused(r.field, fmt.Sprintf("%d %s", r.most, r.unit), "%d %s are asked for, %d of %d are promised",
					r.want, r.unit, r.used, r.most)
			}
		}
		a.starting++
	}
	a.promised[id] = l
	a.sum.Memory += l.Memory
	a.sum.CPUMillis += l.CPUMillis
	a.sum.Pids += l.Pids
	return nil
}

// Adopt gives room to a sandbox that runs already, whatever the bounds.
func (a *Admission) Adopt(id sandbox.ID, l sandbox.Limits) (*Grant, error) {
	if err := a.reserve(id, l, false); err != nil {
		return nil, err
	}
	g := &Grant{a: a, id: id}
	g.starting.Do(func() {})
	return g, nil
}

// Started gives the turn to start back. Idempotent.
func (g *Grant) Started() {
	g.starting.Do(func() {
		<-g.a.starts
		g.a.mu.Lock()
		defer g.a.mu.Unlock()
		g.a.starting--
	})
}

// Release gives the room back, and the turn too. Idempotent.
func (g *Grant) Release() {
	g.Started()
	g.release.Do(func() {
		a := g.a
		a.mu.Lock()
		defer a.mu.Unlock()
		l := a.promised[g.id]
		delete(a.promised, g.id)
		a.sum.Memory -= l.Memory
		a.sum.CPUMillis -= l.CPUMillis
		a.sum.Pids -= l.Pids
	})
}

// Load is what is promised and what may be.
func (a *Admission) Load() node.Load {
	free, err := a.diskFree()
	if err != nil {
		free = 0 // a node that cannot tell takes nothing
	}
	a.mu.Lock()
	defer a.mu.Unlock()
	return node.Load{
		Sandboxes: len(a.promised), MaxSandboxes: a.most.Sandboxes, Starting: a.starting, MaxStarting: a.most.Starting,
		Memory: a.sum.Memory, MaxMemory: a.most.Memory, CPUMillis: a.sum.CPUMillis, MaxCPUMillis: a.most.CPUMillis,
		DiskFree: free,
	}
}
