package runner

import (
	"context"
	"encoding/json"
	"fmt"
	"maps"
	"slices"
	"strings"
	"sync"
	"time"

	"github.com/sandsea/sandsea/api/errdefs"
	"github.com/sandsea/sandsea/internal/chronus/files"
	"github.com/sandsea/sandsea/internal/chronus/sessions"
	"github.com/sandsea/sandsea/internal/chronus/shells"
	"github.com/sandsea/sandsea/internal/edge/admission"
	"github.com/sandsea/sandsea/internal/edge/backend"
	"github.com/sandsea/sandsea/internal/edge/journal"
	"github.com/sandsea/sandsea/internal/image"
	"github.com/sandsea/sandsea/internal/layers/plan"
	"github.com/sandsea/sandsea/internal/sandbox"
)

// The kinds of journal record that the runner writes.
const (
	kindSandbox = "sandbox"
	kindProcess = "process"
	kindShell   = "shell"
)

// entry is what the journal remembers of a sandbox.
type entry struct {
	ID          sandbox.ID        `json:"id"`
	Project     string            `json:"project"`
	Spec        sandbox.Spec      `json:"spec"`
	Layers      []image.Digest    `json:"layers"`
	Config      image.Config      `json:"config"`
	Image       image.Digest      `json:"image,omitempty"`
	By          string            `json:"by"`
	Digest      string            `json:"digest"`
	Epoch       int64             `json:"epoch"`
	State       sandbox.State     `json:"state"`
	End         sandbox.End       `json:"end,omitzero"`
	Seq         int64             `json:"seq"`
	Created     time.Time         `json:"created"`
	Ready       time.Time         `json:"ready,omitzero"`
	Expires     time.Time         `json:"expires"`
	Ended       time.Time         `json:"ended,omitzero"`
	Handle      json.RawMessage   `json:"handle,omitempty"`
	Enforcement map[string]string `json:"enforcement,omitempty"`
	// Phase of Spec.Network in force.
	Phase string `json:"phase,omitempty"`
	// Grace of the stop that is under way.
	Grace time.Duration `json:"grace,omitempty"`
	// Stored says that the store has the record of the end.
	Stored bool `json:"stored,omitempty"`
}

// Snapshot is a sandbox as it is shown.
type Snapshot struct {
	ID          sandbox.ID
	Project     string
	Spec        sandbox.Spec // with the limits in force
	Layers      []image.Digest
	Image       image.Digest // of the image or composition, as the server said
	Config      image.Config
	State       sandbox.State
	End         sandbox.End
	Epoch       int64
	Seq         int64 // of the sandbox's own story, gapless
	By          string
	Created     time.Time
	Ready       time.Time
	Expires     time.Time
	Ended       time.Time
	Enforcement map[string]string
	IdleFor     time.Duration
	Phase       string // of Spec.Network, in force
	Stored      bool   // it has ended, and the store knows how
}

// box is one sandbox.
type box struct {
	r  *Runner
	id sandbox.ID

	// step serialises transitions: it is held across the journal's put, and over nothing else that waits.
	step sync.Mutex
	// net serialises changes of the network, which wait for Aether; it is taken before step.
	net sync.Mutex

	started chan struct{} // closed when the create is decided
	ended   chan struct{} // closed in Ended
	stored  chan struct{} // closed after the first attempt to tell the store, and in any case once it knows
	fired   chan struct{} // closed when the keeper said why it killed the sandbox
	built   chan struct{} // closed when the backend's Start has returned
	idle    *idleClock

	mu       sync.Mutex
	rec      entry                   // guarded by mu
	startErr error                   // guarded by mu: why the create failed
	cancel   context.CancelCauseFunc // guarded by mu: of the start
	inst     backend.Instance        // guarded by mu
	table    *sessions.Table         // guarded by mu: from the first adoption on
	shells   *shells.Set             // guarded by mu: as table
	files    *files.Helpers          // guarded by mu
	lookups  int                     // guarded by mu: of users inside, ever; those of an earlier edge count as one
	grant    *admission.Grant        // guarded by mu
	pending  []sandbox.Action        // guarded by mu: found at recovery, to be performed
	waiting  int                     // guarded by mu: callers of the create that wait
	visits   map[*visit]struct{}     // guarded by mu: of endpoints, under way
	word     sandbox.End             // guarded by mu: what the keeper said; no cause: nothing
	isStored bool                    // guarded by mu: stored is closed
}

func newBox(r *Runner, rec entry) *box {
	b := &box{
		r: r, id: rec.ID, rec: rec, started: make(chan struct{}), ended: make(chan struct{}), stored: make(chan struct{}),
		fired: make(chan struct{}), built: make(chan struct{}), visits: map[*visit]struct{}{},
	}
	b.idle = newIdleClock(rec.Spec.Idle, r.cfg.Now, b.wentIdle)
	return b
}

func (b *box) object() string { return "sandbox " + b.id.Short() }

func (b *box) status() sandbox.Status {
	b.mu.Lock()
	defer b.mu.Unlock()
	return sandbox.Status{State: b.rec.State, End: b.rec.End}
}

func (b *box) snapshot(now time.Time) Snapshot {
	b.mu.Lock()
	defer b.mu.Unlock()
	return b.snapshotLocked(now)
}

func (b *box) snapshotLocked(now time.Time) Snapshot {
	rec := b.rec
	s := Snapshot{
		ID: rec.ID, Project: rec.Project, Spec: rec.Spec, Layers: slices.Clone(rec.Layers), Image: rec.Image,
		Config: rec.Config, State: rec.State, End: rec.End,
		Epoch: rec.Epoch, Seq: rec.Seq, By: rec.By, Created: rec.Created, Ready: rec.Ready, Expires: rec.Expires,
		Ended: rec.Ended, Enforcement: rec.Enforcement, Phase: rec.Phase, Stored: rec.Stored,
	}
	if rec.State == sandbox.Running {
		s.IdleFor = b.idle.idleFor(now)
	}
	return s
}

// event applies one event: the new state is journaled, then told to followers, then its actions are the caller's to
// perform. change may set what goes with the transition.
func (b *box) event(e sandbox.Event, change func(*entry)) ([]sandbox.Action, error) {
	return b.eventIf(nil, e, change)
}

// eventIf applies an event only while something holds, which is asked with mu held and between transitions; else it is
// FailedPrecondition.
func (b *box) eventIf(holds func() bool, e sandbox.Event, change func(*entry)) ([]sandbox.Action, error) {
	b.step.Lock()
	defer b.step.Unlock()
	b.mu.Lock()
	rec, ok := b.rec, holds == nil || holds()
	b.mu.Unlock()
	if !ok {
		return nil, errdefs.New(errdefs.FailedPrecondition, b.object(), "%s does not apply any more", e.Kind)
	}
	next, actions, err := sandbox.Next(sandbox.Status{State: rec.State, End: rec.End}, e)
	if err != nil {
		return nil, err
	}
	if next == (sandbox.Status{State: rec.State, End: rec.End}) {
		return actions, nil
	}
	rec.State, rec.End = next.State, next.End
	if next.State == sandbox.Ended {
		rec.Ended = b.r.cfg.Now().UTC()
	}
	if change != nil {
		change(&rec)
	}
	return actions, b.commit(rec, what(rec.State))
}

// commit journals and publishes rec as the sandbox's next step. The caller holds step.
func (b *box) commit(rec entry, word string) error {
	err := b.sequence(func(seq int64) (journal.Record, error) {
		rec.Seq = seq
		data, err := json.Marshal(rec)
		return journal.Record{Key: journal.Key{Kind: kindSandbox, Name: string(rec.ID)}, Data: data}, err
	})
	if err != nil {
		return err
	}
	now := b.r.cfg.Now()
	b.mu.Lock()
	defer b.mu.Unlock()
	seq := b.rec.Seq
	b.rec = rec
	b.rec.Seq = seq
	// Published with the lock held, so that followers see a sandbox's steps in their order.
	b.r.feed.publish(now, word, b.snapshotLocked(now))
	return nil
}

// sequence journals what make gives for the next number of the sandbox's story.
func (b *box) sequence(make func(seq int64) (journal.Record, error)) error {
	b.r.seqMu.Lock(b.id)
	defer b.r.seqMu.Unlock(b.id)
	b.mu.Lock()
	seq := b.rec.Seq + 1
	b.mu.Unlock()
	rec, err := make(seq)
	if err != nil {
		return fmt.Errorf("encode a step of %s: %w", b.object(), err)
	}
	if err := b.r.cfg.Journal.Put(rec); err != nil {
		return fmt.Errorf("journal a step of %s: %w", b.object(), err)
	}
	b.mu.Lock()
	b.rec.Seq = seq
	b.mu.Unlock()
	return nil
}

// memory is the journal as a Table sees it.
type memory struct{ b *box }

func (m memory) Save(name string, data []byte) error {
	return m.b.r.cfg.Journal.Put(journal.Record{Key: journal.Key{Kind: kindProcess, Name: name}, Data: data})
}

func (m memory) SaveNext(name string, encode func(int64) ([]byte, error)) error {
	return m.b.sequence(func(seq int64) (journal.Record, error) {
		data, err := encode(seq)
		return journal.Record{Key: journal.Key{Kind: kindProcess, Name: name}, Data: data}, err
	})
}

func (m memory) Forget(names ...string) error {
	keys := make([]journal.Key, 0, len(names))
	for _, n := range names {
		keys = append(keys, journal.Key{Kind: kindProcess, Name: n})
	}
	return m.b.r.cfg.Journal.Delete(keys...)
}

// newTable makes the commands of the sandbox.
func (b *box) newTable() *sessions.Table {
	r := b.r
	b.mu.Lock()
	rec := b.rec
	b.mu.Unlock()
	set := b.newShells(rec)
	table := sessions.New(sessions.Config{
		ID: string(b.id), Dir: r.cfg.Output, Env: environment(rec),
		User: firstOf(rec.Spec.User, rec.Config.User), Workdir: workdir(rec), Output: rec.Spec.Limits.Output,
		Keeper: r.cfg.Keeper, Follow: r.follow, Memory: memory{b}, Lookup: b.lookup, Busy: b.idle.commands,
		Ended: b.commandEnded, Starting: r.starts.begin, Shells: set,
		Now: r.cfg.Now, Log: r.cfg.Log,
	})
	set.Use(table)
	return table
}

// environment is that of every command: the image's, what points at Aether, the sandbox's own, the later over the earlier.
func environment(rec entry) []string {
	lines := func(m map[string]string) []string {
		out := make([]string, 0, len(m))
		for _, k := range slices.Sorted(maps.Keys(m)) {
			out = append(out, k+"="+m[k])
		}
		return out
	}
	return image.MergeEnv(rec.Config.Env, lines(guestEnv(rec)), lines(rec.Spec.Env))
}

func firstOf(list ...string) string {
	for _, s := range list {
		if s != "" {
			return s
		}
	}
	return ""
}

func workdir(rec entry) string { return firstOf(rec.Spec.Workdir, rec.Config.Workdir, "/") }

func (b *box) plan() plan.Plan {
	b.mu.Lock()
	defer b.mu.Unlock()
	p := plan.Plan{
		Layers: b.rec.Layers, Config: b.rec.Config, NoNewPrivs: b.rec.Spec.NoNewPrivs, Hostname: b.id.Short(),
		Network: b.rec.Spec.Network.Open(),
	}
	if p.Network && b.r.cfg.Guest != "" {
		p.Layers = slices.Concat([]image.Digest{b.r.cfg.Guest}, p.Layers)
	}
	return p
}

// lookup finds a user inside by the sandbox's own files. It comes before everything that runs or writes there, so that
// before the first one they are as in the layers.
func (b *box) lookup(ctx context.Context, user string) (sessions.User, error) {
	if b.r.cfg.Lookup != nil {
		return b.r.cfg.Lookup(ctx, b.id, user)
	}
	b.mu.Lock()
	h := b.files
	if h != nil {
		b.lookups++
	}
	first, key := b.lookups == 1, ""
	if first {
		key = userKey(b.rec.Layers, user)
	}
	b.mu.Unlock()
	if h == nil {
		return sessions.User{}, errdefs.New(errdefs.Unavailable, b.object(), "is not ready yet")
	}
	if first {
		if u, ok := b.r.users.get(key); ok {
			return u, nil
		}
	}
	found, err := h.LookupUser(ctx, user)
	if err != nil {
		return sessions.User{}, err
	}
	u := sessions.User{IDs: found.IDs, Name: found.Name, Home: found.Home}
	b.mu.Lock()
	alone := b.lookups == 1 // else somebody may have run meanwhile, and written what was read here
	b.mu.Unlock()
	if alone {
		b.r.users.put(key, u)
	}
	return u, nil
}

// wentIdle ends the sandbox because of its idle limit.
func (b *box) wentIdle() {
	b.r.wg.Go(func() {
		b.r.end(b, sandbox.Event{
			Kind: sandbox.EventStop, Cause: sandbox.CauseIdle, Detail: fmt.Sprintf("no use for %s", b.idle.limit),
			By: sandbox.ByPlatform,
		})
	})
}

// commandEnded is told of each command's end; that of an entrypoint ends the sandbox.
func (b *box) commandEnded(number int64, res sessions.Result) {
	b.mu.Lock()
	entry := b.rec.Spec.Entrypoint
	state := b.rec.State
	b.mu.Unlock()
	own := entry == sandbox.EntrypointImage || entry == sandbox.EntrypointArgv
	if number != entrypointNumber || state != sandbox.Running || !own {
		return
	}
	detail := fmt.Sprintf("the entrypoint ended with code %d", res.ExitCode)
	if res.StartFailure != nil {
		detail = "the entrypoint did not start: " + res.StartFailure.Message
	}
	b.r.wg.Go(func() {
		b.r.end(b, sandbox.Event{
			Kind: sandbox.EventStop, Cause: sandbox.CauseCompleted, Detail: detail, By: sandbox.ByWorkload,
		})
	})
}

// entrypoint is what starts by itself; nil for nothing.
func entrypoint(rec entry) []string {
	switch rec.Spec.Entrypoint {
	case sandbox.EntrypointArgv:
		return rec.Spec.Argv
	case sandbox.EntrypointImage:
		return slices.Concat(rec.Config.Entrypoint, rec.Config.Cmd)
	default:
		return nil
	}
}

// belongs reports whether a process record's name is of this sandbox.
func processOwner(name string) (sandbox.ID, bool) {
	id, _, ok := strings.Cut(name, "/")
	return sandbox.ID(id), ok
}
