// Package fake is a backend without a kernel, for tests: sandboxes are objects in memory, processes are goroutines
// that run small programs (see programs.go) on real pipes.
//
// A World stands for the machine. It outlives every Backend and Keeper client that is made over it, as a kernel
// outlives an edge: a test drops a Backend without closing it and makes another over the same World. Everything that
// exists in the World shows in Boxes, so that a test sees what is left behind. All of it is safe for concurrent use.
package fake

import (
	"fmt"
	"maps"
	"os"
	"slices"
	"sync"
	"syscall"
	"time"

	"github.com/sandsea/sandsea/internal/chronus"
	"github.com/sandsea/sandsea/internal/edge/backend"
	"github.com/sandsea/sandsea/internal/layers/plan"
	"github.com/sandsea/sandsea/internal/node"
	"github.com/sandsea/sandsea/internal/policy"
	"github.com/sandsea/sandsea/internal/sandbox"
)

// World is the machine.
type World struct {
	mu       sync.Mutex
	boxes    map[sandbox.ID]*box                    // guarded by mu
	programs map[string]Program                     // guarded by mu
	starts   map[sandbox.ID]int                     // guarded by mu: how often each was started
	hook     func(step string, id sandbox.ID) error // guarded by mu
	caps     node.Capabilities                      // guarded by mu
}

// NewWorld makes an empty machine that can enforce everything.
func NewWorld() *World {
	w := &World{
		boxes: map[sandbox.ID]*box{}, starts: map[sandbox.ID]int{}, programs: maps.Clone(programs()),
		caps: node.Capabilities{Kernel: "fake", CPUs: 64, Memory: 64 << 30, Cgroup: "v2", NoFile: 1 << 20, PidMax: 1 << 22},
	}
	for _, name := range []string{
		node.FeatureCPU, node.FeatureDisk, node.FeatureExitFacts, node.FeatureKill, node.FeatureLayers, node.FeatureMemory,
		node.FeatureNetwork, node.FeatureEgress, node.FeatureOpenFiles, node.FeatureOutput, node.FeaturePids, node.FeatureSeccomp,
		node.FeatureUserNS,
	} {
		w.caps.Features = append(w.caps.Features, node.Feature{Name: name, Status: node.OK, Mechanism: "fake"})
	}
	slices.SortFunc(w.caps.Features, func(a, b node.Feature) int {
		if a.Name < b.Name {
			return -1
		}
		return 1
	})
	return w
}

// OnStep calls f at each step of a start or stop: "start/made", "start/ready", "stop/killed". An error from it fails
// the start there, which then undoes itself; a stop ignores it. At "terminal" it fails OpenPTY.
func (w *World) OnStep(f func(step string, id sandbox.ID) error) {
	w.mu.Lock()
	defer w.mu.Unlock()
	w.hook = f
}

// Capabilities replaces what Probe answers.
func (w *World) Capabilities(change func(*node.Capabilities)) {
	w.mu.Lock()
	defer w.mu.Unlock()
	change(&w.caps)
}

// Handle adds a program that argv[0] names.
func (w *World) Handle(name string, p Program) {
	w.mu.Lock()
	defer w.mu.Unlock()
	w.programs[name] = p
}

// Boxes lists the sandboxes that exist, half-made ones too, in order.
func (w *World) Boxes() []sandbox.ID {
	w.mu.Lock()
	defer w.mu.Unlock()
	return slices.Sorted(maps.Keys(w.boxes))
}

// Starts is how often a sandbox was started.
func (w *World) Starts(id sandbox.ID) int {
	w.mu.Lock()
	defer w.mu.Unlock()
	return w.starts[id]
}

// Spawns is how often command number was started in a sandbox.
func (w *World) Spawns(id sandbox.ID, number int64) int {
	b := w.box(id)
	if b == nil {
		return 0
	}
	b.mu.Lock()
	defer b.mu.Unlock()
	return b.spawns[number]
}

// Tasks counts the running processes of a sandbox, background ones too.
func (w *World) Tasks(id sandbox.ID) int {
	b := w.box(id)
	if b == nil {
		return 0
	}
	b.mu.Lock()
	defer b.mu.Unlock()
	n := 0
	for _, g := range b.groups {
		n += len(g.tasks)
	}
	return n
}

// KillInit ends PID 1 of a sandbox, and with it everything inside; the evidence will show exit.
func (w *World) KillInit(id sandbox.ID, exit backend.Exit) {
	if b := w.box(id); b != nil {
		b.die(exit)
	}
}

// Close ends everything that runs, for the end of a test.
func (w *World) Close() {
	for _, id := range w.Boxes() {
		w.remove(id)
	}
}

func (w *World) box(id sandbox.ID) *box {
	w.mu.Lock()
	defer w.mu.Unlock()
	return w.boxes[id]
}

func (w *World) step(step string, id sandbox.ID) error {
	w.mu.Lock()
	hook := w.hook
	w.mu.Unlock()
	if hook == nil {
		return nil
	}
	return hook(step, id)
}

func (w *World) remove(id sandbox.ID) {
	b := w.box(id)
	if b == nil {
		return
	}
	b.die(backend.Exit{Cause: sandbox.CauseInfraKilled, Detail: "killed by cgroup"})
	b.wg.Wait()
	w.mu.Lock()
	defer w.mu.Unlock()
	if w.boxes[id] == b {
		delete(w.boxes, id)
	}
}

// box is one sandbox: what the kernel and sandsea-init know of it.
type box struct {
	w      *World
	id     sandbox.ID
	plan   plan.Plan
	hard   time.Time
	done   chan struct{}
	wg     sync.WaitGroup
	mu     sync.Mutex
	limits sandbox.Limits            // guarded by mu
	exit   backend.Exit              // guarded by mu, set before done closes
	dead   bool                      // guarded by mu
	groups map[int64]*group          // guarded by mu
	spawns map[int64]int             // guarded by mu
	failed map[int64]error           // guarded by mu
	exits  map[int64]chronus.Exit    // guarded by mu, not acknowledged
	order  []int64                   // guarded by mu, keys of exits in order
	line   *line                     // guarded by mu: who is connected
	ooms   int64                     // guarded by mu
	walls  policy.Walls              // guarded by mu
	pid    int                       // guarded by mu
	begun  map[int64]chronus.Process // guarded by mu: live main processes
}

// group is the cgroup of one command.
type group struct {
	tasks map[*task]struct{}
	cpu   time.Duration
}

func (b *box) die(exit backend.Exit) {
	b.mu.Lock()
	if b.dead {
		b.mu.Unlock()
		return
	}
	b.dead, b.exit = true, exit
	tasks := b.tasksLocked()
	l := b.line
	b.mu.Unlock()
	for _, t := range tasks {
		t.kill(syscall.SIGKILL)
	}
	if l != nil {
		l.breakOff(fmt.Errorf("the line to %s: end of file", b.id))
	}
	close(b.done)
}

func (b *box) tasksLocked() []*task {
	var out []*task
	for _, g := range b.groups {
		out = slices.AppendSeq(out, maps.Keys(g.tasks))
	}
	return out
}

func (b *box) groupTasks(number int64) []*task {
	b.mu.Lock()
	defer b.mu.Unlock()
	if g := b.groups[number]; g != nil {
		return slices.Collect(maps.Keys(g.tasks))
	}
	return nil
}

// killGroup is cgroup.kill of one command.
func (b *box) killGroup(number int64) {
	for {
		tasks := b.groupTasks(number)
		if len(tasks) == 0 {
			return
		}
		for _, t := range tasks {
			t.kill(syscall.SIGKILL)
		}
		for _, t := range tasks {
			<-t.gone
		}
	}
}

// killFile makes a descriptor that kills when something is written to it, as cgroup.kill does. It works until every
// holder has closed it.
func killFile(kill func()) (*os.File, error) {
	r, w, err := os.Pipe()
	if err != nil {
		return nil, fmt.Errorf("make a kill file: %w", err)
	}
	go func() {
		defer r.Close()
		var one [1]byte
		for {
			if n, err := r.Read(one[:]); n == 0 || err != nil {
				return
			}
			kill()
		}
	}()
	return w, nil
}
