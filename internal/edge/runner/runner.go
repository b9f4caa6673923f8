// Package runner runs the sandboxes of this node: it applies events to their states, journals each state before it
// acts, and performs the actions that sandbox.Next names.
//
// It owns the sandboxes' records in the journal, their instances, their commands (package sessions) and file helpers,
// the idle limit and the memory of what has ended. Nothing else changes a state. It promises that whatever is killed,
// and whenever: a create that was answered is there after the restart, one that was not is taken back whole, a stop
// that was begun is finished, and each end is told to the store until it knows.
//
// Everything may be called at once. For each sandbox there is at most one goroutine that performs actions; followers
// and callers never hold up one another. Close ends the edge's work and leaves the sandboxes running.
package runner

import (
	"context"
	"crypto/rand"
	"encoding/hex"
	"encoding/json"
	"errors"
	"fmt"
	"log/slog"
	"os"
	"path/filepath"
	"sync"
	"sync/atomic"
	"time"

	"github.com/sandsea/sandsea/api/errdefs"
	"github.com/sandsea/sandsea/internal/chronus/files"
	"github.com/sandsea/sandsea/internal/chronus/follow"
	"github.com/sandsea/sandsea/internal/chronus/sessions"
	"github.com/sandsea/sandsea/internal/chronus/shells"
	"github.com/sandsea/sandsea/internal/edge/admission"
	"github.com/sandsea/sandsea/internal/edge/backend"
	"github.com/sandsea/sandsea/internal/edge/journal"
	"github.com/sandsea/sandsea/internal/image"
	"github.com/sandsea/sandsea/internal/keeper"
	"github.com/sandsea/sandsea/internal/node"
	"github.com/sandsea/sandsea/internal/sandbox"
)

const (
	// DefaultStartLimit bounds a start once it has its turn.
	DefaultStartLimit = 60 * time.Second
	// DefaultKeepEnded and DefaultMaxEnded bound the memory of what has ended.
	DefaultKeepEnded = 24 * time.Hour
	DefaultMaxEnded  = 10_000

	entrypointNumber = 1
	greetLimit       = 2 * time.Second
	undoLimit        = 60 * time.Second
	closeLimit       = 5 * time.Second
	firedLimit       = time.Second     // how long the keeper's word about a kill of its may take
	endLimit         = 3 * time.Second // how long the end of a sandbox may take to show after its line broke, with that word
	storeAnswer      = 2 * time.Second
	retryFirst       = 100 * time.Millisecond
	retryLast        = 30 * time.Second
	janitorEvery     = time.Minute
)

// Config is what a Runner works with. Everything in it stays its owner's, but for the Keeper.
type Config struct {
	Journal journal.Journal
	Backend backend.Backend
	// Keeper is a Link. The Runner is the one consumer of its events, and closes it.
	Keeper keeper.Client
	Room   *admission.Admission
	// Capabilities that the Backend's Probe found.
	Capabilities node.Capabilities
	// Output is the directory of recorded output, DIR/output.
	Output string
	// Network puts network policies in force; nil: this node enforces none, and refuses those that allow anything.
	Network Network
	// Flows is the directory of flow logs, DIR/flows; empty: there are none.
	Flows string
	// Guest is the layer that lies lowest in every sandbox with a network; empty: none.
	Guest image.Digest
	// Record writes ends to the store, all or none of them.
	Record func(ctx context.Context, ended []Snapshot) error
	// Lookup, when set, replaces the look-up of users in the sandbox's own files.
	Lookup func(ctx context.Context, id sandbox.ID, user string) (sessions.User, error)

	StartLimit time.Duration // 0: DefaultStartLimit
	KeepEnded  time.Duration // 0: DefaultKeepEnded
	MaxEnded   int           // 0: DefaultMaxEnded

	Now func() time.Time
	Log *slog.Logger
}

// Validate reports what is missing.
func (c Config) Validate() error {
	if c.Journal == nil || c.Backend == nil || c.Keeper == nil || c.Room == nil || c.Output == "" || c.Record == nil ||
		c.Now == nil || c.Log == nil {
		return errdefs.New(errdefs.Internal, "runner", "its configuration is not complete")
	}
	return nil
}

// Runner runs the sandboxes of one node.
type Runner struct {
	cfg         Config
	follow      *follow.Follower
	feed        *feed
	incarnation string
	seqMu       keyed
	leaving     atomic.Bool
	ctx         context.Context // ends with Close; for goroutines of this package only
	stop        context.CancelCauseFunc
	wg          sync.WaitGroup
	commits     chan struct{} // capacity 1: there is a backlog
	users       users
	workdirs    workdirs
	starts      traffic // of sandboxes and commands

	mu      sync.Mutex
	boxes   map[sandbox.ID]*box // guarded by mu
	backlog []*box              // guarded by mu: ends that the store does not know
}

// keyed is a mutex for each sandbox's sequence, so that one sandbox's journal put holds up no other's.
type keyed struct{ m [64]sync.Mutex }

func (k *keyed) at(id sandbox.ID) *sync.Mutex {
	n := uint32(2166136261)
	for i := range len(id) {
		n = (n ^ uint32(id[i])) * 16777619
	}
	return &k.m[n%64]
}

func (k *keyed) Lock(id sandbox.ID)   { k.at(id).Lock() }
func (k *keyed) Unlock(id sandbox.ID) { k.at(id).Unlock() }

// New makes a Runner that knows no sandbox yet: Load, Recover and Resume come first (package sweep).
func New(cfg Config) (*Runner, error) {
	if err := cfg.Validate(); err != nil {
		return nil, err
	}
	if cfg.StartLimit <= 0 {
		cfg.StartLimit = DefaultStartLimit
	}
	if cfg.KeepEnded <= 0 {
		cfg.KeepEnded = DefaultKeepEnded
	}
	if cfg.MaxEnded <= 0 {
		cfg.MaxEnded = DefaultMaxEnded
	}
	var raw [8]byte
	if _, err := rand.Read(raw[:]); err != nil {
		return nil, fmt.Errorf("make an incarnation: %w", err)
	}
	r := &Runner{
		cfg: cfg, follow: follow.New(cfg.Output, cfg.Log), feed: newFeed(), incarnation: hex.EncodeToString(raw[:]),
		commits: make(chan struct{}, 1), boxes: map[sandbox.ID]*box{},
	}
	r.ctx, r.stop = context.WithCancelCause(context.Background())
	return r, nil
}

func (r *Runner) isLeaving() bool { return r.leaving.Load() }

// Leave says that the edge is about to shut down: callers that go away from now on end nothing, and nothing new starts.
func (r *Runner) Leave() {
	r.leaving.Store(true)
	for _, b := range r.list() {
		b.idle.halt() // time without an edge does not count
		b.mu.Lock()
		t := b.table
		b.mu.Unlock()
		if t != nil {
			t.Leave()
		}
	}
}

// Close ends the edge's work. Sandboxes, their commands and their recording go on. Idempotent.
func (r *Runner) Close() error {
	r.Leave()
	r.stop(errors.New("the edge shuts down"))
	err := r.cfg.Keeper.Close()
	for _, b := range r.list() {
		b.mu.Lock()
		t, h, cancel := b.table, b.files, b.cancel
		b.mu.Unlock()
		if cancel != nil {
			cancel(errors.New("the edge shuts down"))
		}
		if t != nil {
			t.Abandon()
		}
		if h != nil {
			_ = h.Close()
		}
	}
	r.wg.Wait()
	return errors.Join(err, r.follow.Close())
}

func (r *Runner) list() []*box {
	r.mu.Lock()
	defer r.mu.Unlock()
	out := make([]*box, 0, len(r.boxes))
	for _, b := range r.boxes {
		out = append(out, b)
	}
	return out
}

func (r *Runner) find(id sandbox.ID) (*box, error) {
	r.mu.Lock()
	defer r.mu.Unlock()
	b, ok := r.boxes[id]
	if !ok {
		return nil, NotFound(id)
	}
	return b, nil
}

// NotFound is what a sandbox gets that is not there, or not the caller's to see.
func NotFound(id sandbox.ID) error {
	return errdefs.New(errdefs.NotFound, "sandbox "+id.Short(), "is not there").
		WithHint("List what there is: sandsea ls --all")
}

// Request is one create.
type Request struct {
	ID      sandbox.ID
	Project string
	Spec    sandbox.Spec // validated
	Layers  []image.Digest
	// Config and Image are the config in force and the digest of the image, for the record.
	Config image.Config
	Image  image.Digest
	By     string
	Digest string
}

// Create makes a sandbox and returns when commands and files work. It is idempotent by id: a known one answers its
// state, after waiting for the create that is under way. A failure leaves nothing, and its text begins with the stage:
// queue, image or start. When every caller that waits for a create goes away, it is taken back.
func (r *Runner) Create(ctx context.Context, q Request) (Snapshot, error) {
	if f, field, missing := q.Spec.Missing(r.cfg.Capabilities); missing {
		e := errdefs.From(sandbox.MissingError(f, field))
		e.Kind, e.Stage = errdefs.Refused, errdefs.StageQueue
		return Snapshot{}, e
	}
	defer r.starts.begin()()
	now := r.cfg.Now().UTC()
	spec := q.Spec
	spec.Limits = spec.Limits.On(r.cfg.Capabilities)
	r.mu.Lock()
	b, known := r.boxes[q.ID]
	if !known {
		if r.isLeaving() {
			r.mu.Unlock()
			return Snapshot{}, errdefs.New(errdefs.Unavailable, "node", "it is shutting down")
		}
		b = newBox(r, entry{
			ID: q.ID, Project: q.Project, Spec: spec, Layers: q.Layers, Config: q.Config, Image: q.Image, By: q.By, Digest: q.Digest,
			Epoch: 1, State: sandbox.Creating, Phase: spec.Network.Start, Created: now, Expires: now.Add(spec.TTL),
		})
		r.boxes[q.ID] = b
		b.waiting = 1
	}
	r.mu.Unlock()
	if known {
		b.mu.Lock()
		same := b.rec.Digest == q.Digest && b.rec.Project == q.Project
		b.waiting++
		b.mu.Unlock()
		if !same {
			r.left(b)
			return Snapshot{}, errdefs.New(errdefs.AlreadyExists, b.object(), "stands for another request")
		}
		return r.await(ctx, b)
	}
	// A stop, and the edge's own end, cancel bctx; the caller's end does not: once the intent is journaled the create is
	// decided whether or not its caller stays to hear of it.
	bctx, cancel := context.WithCancelCause(context.WithoutCancel(ctx))
	b.mu.Lock()
	b.cancel = cancel
	b.mu.Unlock()
	if err := r.admit(ctx, bctx, b); err != nil {
		cancel(nil)
		err = errdefs.AtStage(err, errdefs.StageQueue)
		r.refuse(b, err)
		return Snapshot{}, err
	}
	r.wg.Go(func() {
		defer cancel(nil)
		r.build(bctx, b)
		b.mu.Lock()
		b.cancel = nil // it holds the caller's whole request, and the box stays for a day
		b.mu.Unlock()
	})
	return r.await(ctx, b)
}

// admit takes room and journals the intent. It waits for its turn as long as the caller waits and nobody stops it.
func (r *Runner) admit(ctx, bctx context.Context, b *box) error {
	ctx, cancel := context.WithCancelCause(ctx)
	defer cancel(nil)
	defer context.AfterFunc(bctx, func() { cancel(context.Cause(bctx)) })()
	b.mu.Lock()
	limits := b.rec.Spec.Limits
	b.mu.Unlock()
	grant, err := r.cfg.Room.Admit(ctx, b.id, limits)
	if err != nil {
		return err
	}
	b.step.Lock()
	defer b.step.Unlock()
	b.mu.Lock()
	rec := b.rec
	b.mu.Unlock()
	if rec.State != sandbox.Creating {
		grant.Release()
		return sessions.Gone(string(b.id), rec.End)
	}
	if err := b.commit(rec, what(rec.State)); err != nil {
		grant.Release()
		return err
	}
	b.mu.Lock()
	b.grant = grant
	b.mu.Unlock()
	return nil
}

// refuse ends a create before anything was made. Unless somebody stopped it meanwhile, it never was.
func (r *Runner) refuse(b *box, err error) {
	b.step.Lock()
	b.mu.Lock()
	never := b.rec.State == sandbox.Creating
	b.mu.Unlock()
	if never {
		r.mu.Lock()
		delete(r.boxes, b.id)
		r.mu.Unlock()
	}
	b.step.Unlock()
	close(b.built)
	b.decide(err)
}

// await waits until the create is decided.
func (r *Runner) await(ctx context.Context, b *box) (Snapshot, error) {
	select {
	case <-b.started:
	case <-ctx.Done():
	}
	select {
	case <-b.started: // also for who gave up at that moment: what was decided holds
	default:
		r.left(b)
		kind := errdefs.Canceled
		if errors.Is(ctx.Err(), context.DeadlineExceeded) {
			kind = errdefs.Deadline
		}
		return Snapshot{}, errdefs.AtStage(errdefs.New(kind, b.object(), "start: it was not ready in time").
			Wrap(context.Cause(ctx)).WithHint("Nothing is left of it. Give it more time"), errdefs.StageStart)
	}
	b.mu.Lock()
	b.waiting--
	err, rec := b.startErr, b.rec
	b.mu.Unlock()
	if rec.Ready.IsZero() && (err == nil || rec.End.Cause == sandbox.CauseStopped) {
		// Also for who joined a create that was being taken back, since its first caller went away.
		err = neverReady(b, rec.End)
	}
	if err != nil {
		return Snapshot{}, errdefs.AtStage(err, errdefs.StageStart)
	}
	return b.snapshot(r.cfg.Now()), nil
}

// neverReady is what a repeated create of an id gets whose first one came to nothing. Refused says that it may be
// placed anew.
func neverReady(b *box, end sandbox.End) error {
	kind := errdefs.FailedPrecondition
	if end.Cause.Infra() || end.Cause == sandbox.CauseStopped {
		kind = errdefs.Refused
	}
	e := errdefs.New(kind, b.object(), "start: it never was ready and nothing is left of it: %s %s", end.Cause, end.Detail)
	e.Cause = string(end.Cause)
	return e.WithHint("Create another one")
}

// left is called when a caller of a create goes away; after the last one the create is taken back, unless it became ready
// or somebody else asked for it in the meantime.
func (r *Runner) left(b *box) {
	b.mu.Lock()
	b.waiting--
	b.mu.Unlock()
	if r.isLeaving() {
		return
	}
	nobody := func() bool { return b.waiting == 0 && b.rec.State == sandbox.Creating }
	actions, err := b.eventIf(nobody, sandbox.Event{
		Kind: sandbox.EventStop, Cause: sandbox.CauseStopped, Detail: "its caller went away before it was ready",
		By: sandbox.ByPlatform,
	}, nil)
	switch {
	case err == nil:
		r.perform(b, actions)
	case !errors.Is(err, errdefs.FailedPrecondition):
		r.cfg.Log.Error("take a create back", "sandbox", b.id, "err", err)
	}
}

// build performs a create whose intent is journaled.
func (r *Runner) build(ctx context.Context, b *box) {
	sctx, stop := context.WithTimeoutCause(ctx, r.cfg.StartLimit, errdefs.Deadline)
	b.mu.Lock()
	limits, hard, grant, inspects := b.rec.Spec.Limits, b.rec.Expires, b.grant, b.rec.Spec.Network.InspectTLS
	b.mu.Unlock()
	var network sync.WaitGroup
	var refused error
	inst, err := r.cfg.Backend.Start(sctx, backend.Spec{
		ID: b.id, Plan: b.plan(), Limits: limits, Hard: hard,
		Linked: func(link backend.Link) { network.Go(func() { refused = r.openNetwork(ctx, b, link) }) },
	})
	stop()
	if err == nil {
		b.mu.Lock()
		b.inst = inst
		b.mu.Unlock()
	}
	grant.Started()
	if err == nil {
		err = r.adopt(b, inst, nil)
	}
	network.Wait()
	if err == nil {
		err = refused
	}
	if err == nil && inspects {
		err = r.putCA(ctx, b)
	}
	if err == nil {
		err = r.makeWorkdir(ctx, b)
	}
	close(b.built)
	if err != nil {
		r.failed(b, fmt.Errorf("start: %w", err))
		return
	}
	now := r.cfg.Now().UTC()
	_, err = b.event(sandbox.Event{Kind: sandbox.EventStarted}, func(rec *entry) {
		rec.Ready = now
		rec.Handle = json.RawMessage(inst.Handle())
		rec.Enforcement = inst.Enforcement()
	})
	if err != nil {
		r.failed(b, fmt.Errorf("start: %w", err))
		return
	}
	r.watch(b, inst)
	b.mu.Lock()
	argv := entrypoint(b.rec)
	mode := b.rec.Spec.Entrypoint
	table := b.table
	b.mu.Unlock()
	b.idle.start()
	if mode != sandbox.EntrypointIdle {
		if err := startEntrypoint(ctx, table, argv); err != nil {
			r.end(b, sandbox.Event{
				Kind: sandbox.EventStop, Cause: sandbox.CauseCompleted, Detail: err.Error(), By: sandbox.ByWorkload,
			})
			b.decide(err)
			return
		}
	}
	b.decide(nil)
}

func startEntrypoint(ctx context.Context, t *sessions.Table, argv []string) error {
	if len(argv) == 0 {
		return errdefs.New(errdefs.FailedPrecondition, "", "start: the image has neither entrypoint nor command").
			WithField("entrypoint.mode", "").WithHint("Use the mode argv, or idle")
	}
	info, err := t.Launch(ctx, sessions.Start{Command: sessions.Command{Argv: argv}})
	if err != nil {
		return fmt.Errorf("start: the entrypoint: %w", err)
	}
	if info.Result != nil && info.Result.StartFailure != nil {
		return errdefs.New(errdefs.FailedPrecondition, "", "start: the entrypoint did not start: %s",
			info.Result.StartFailure.Message).WithField("entrypoint", "").WithHint("Correct it, or use the mode idle")
	}
	return nil
}

// decide tells the callers of a create.
func (b *box) decide(err error) {
	b.mu.Lock()
	b.startErr = err
	b.mu.Unlock()
	close(b.started)
}

// failed takes a create back whose start failed, or that was stopped meanwhile, and tells its callers once nothing is
// left.
func (r *Runner) failed(b *box, err error) {
	if r.ctx.Err() != nil {
		b.decide(errdefs.New(errdefs.Unknown, b.object(), "the node's daemon is shutting down").Wrap(err))
		return
	}
	actions, everr := b.event(sandbox.Event{
		Kind: sandbox.EventStartFail, Cause: causeOf(err), Detail: errdefs.From(err).Error(), By: sandbox.ByPlatform,
	}, nil)
	switch {
	case everr == nil:
		r.perform(b, actions)
	case b.status().State == sandbox.Stopping || b.status().State == sandbox.Ended:
		// Stopped while it started: whoever stopped it performs what is to be done.
		err = sessions.Gone(string(b.id), b.status().End)
	default:
		r.cfg.Log.Error("take a create back", "sandbox", b.id, "err", everr)
		b.decide(errdefs.New(errdefs.Unknown, b.object(), "what became of it could not be remembered").Wrap(everr))
		return
	}
	select {
	case <-b.ended:
		err = sure(err, b.status().End)
	case <-r.ctx.Done():
	}
	b.decide(err)
}

// sure is the error of a start of which nothing is left: whatever the parts were unsure of, it may be placed anew.
func sure(err error, end sandbox.End) error {
	switch errdefs.KindOf(err) {
	case errdefs.Unavailable, errdefs.Unknown, errdefs.Deadline, errdefs.Canceled:
		e := *errdefs.From(err)
		e.Kind, e.Cause = errdefs.Refused, string(end.Cause)
		return &e
	default:
		return err
	}
}

func causeOf(err error) sandbox.Cause {
	if errdefs.KindOf(err) == errdefs.FailedPrecondition {
		return sandbox.CauseAgentDestroyed
	}
	return sandbox.CauseInfraStart
}

// adopt connects the commands and files of an instance.
func (r *Runner) adopt(b *box, inst backend.Instance, found *found) error {
	ch := inst.Channel()
	b.mu.Lock()
	table := b.table
	b.mu.Unlock()
	if table == nil {
		table = b.newTable()
	}
	b.mu.Lock()
	b.table = table
	b.files = files.New(ch.ServeFiles)
	b.mu.Unlock()
	ctx, stop := context.WithTimeoutCause(context.Background(), undoLimit, errdefs.Deadline)
	defer stop()
	line := sessions.Line{
		Channel: ch, OOMKills: inst.OOMKills, UIDBase: inst.UIDBase(),
		NewExec: func(ctx context.Context, n int64) (sessions.Exec, error) { return inst.NewExec(ctx, n) },
	}
	if found == nil {
		return table.Connect(ctx, line, nil, nil)
	}
	return table.Connect(ctx, line, found.inside, found.execs)
}

// watch ends the sandbox when its instance does.
func (r *Runner) watch(b *box, inst backend.Instance) {
	r.wg.Go(func() {
		select {
		case <-inst.Done():
		case <-b.ended:
			return
		case <-r.ctx.Done():
			return
		}
		if st := b.status().State; st == sandbox.Stopping || st == sandbox.Ended {
			return
		}
		e := r.evidence(b, inst)
		if r.ctx.Err() != nil {
			return // the next edge looks anew
		}
		r.end(b, e)
	})
}

// evidence says why an instance is gone, in the order of walks A6. The keeper kills first and says why behind it.
func (r *Runner) evidence(b *box, inst backend.Instance) sandbox.Event {
	x := inst.Exit()
	b.mu.Lock()
	due := !b.rec.Expires.IsZero() && r.cfg.Now().After(b.rec.Expires.Add(-firedLimit))
	b.mu.Unlock()
	if due || x.Cause == sandbox.CauseInfraKilled || x.Cause == sandbox.CauseInfraUnknown {
		timer := time.NewTimer(firedLimit)
		defer timer.Stop()
		select {
		case <-b.fired:
		case <-timer.C:
		case <-r.ctx.Done():
		}
	}
	b.mu.Lock()
	word := b.word
	b.mu.Unlock()
	if word.Cause != "" {
		return sandbox.Event{Kind: sandbox.EventGone, Cause: word.Cause, Detail: word.Detail, By: sandbox.ByPlatform}
	}
	e := sandbox.Event{Kind: sandbox.EventGone, Cause: x.Cause, Detail: x.Detail, By: sandbox.ByPlatform}
	if !x.Cause.Infra() && x.Cause != "" {
		e.By = sandbox.ByWorkload
	}
	return e
}

// end applies an event that ends a sandbox and performs what follows; it returns when that is done, or was another's
// to do.
func (r *Runner) end(b *box, e sandbox.Event) {
	actions, err := b.event(e, nil)
	if err != nil {
		if !errors.Is(err, errdefs.FailedPrecondition) {
			r.cfg.Log.Error("end a sandbox", "sandbox", b.id, "err", err)
		}
		return
	}
	r.perform(b, actions)
}

// perform does actions in their order. Each is repeated until it succeeds or the edge shuts down: a sandbox of which
// something is left has not ended.
func (r *Runner) perform(b *box, actions []sandbox.Action) {
	for _, a := range actions {
		if !r.insist(b, a) {
			return
		}
	}
	if len(actions) == 0 || actions[len(actions)-1] != sandbox.ActionRelease {
		return
	}
	for wait := retryFirst; ; wait = min(2*wait, retryLast) {
		next, err := b.event(sandbox.Event{Kind: sandbox.EventReleased}, nil)
		if err == nil {
			r.perform(b, next)
			return
		}
		r.cfg.Log.Error("remember an end", "sandbox", b.id, "err", err)
		if !r.pause(wait) {
			return
		}
	}
}

func (r *Runner) pause(d time.Duration) bool {
	timer := time.NewTimer(d)
	defer timer.Stop()
	select {
	case <-timer.C:
		return true
	case <-r.ctx.Done():
		return false
	}
}

func (r *Runner) insist(b *box, a sandbox.Action) bool {
	for wait := retryFirst; ; wait = min(2*wait, retryLast) {
		if r.ctx.Err() != nil {
			return false
		}
		err := r.act(b, a)
		if err == nil {
			return true
		}
		r.cfg.Log.Error("perform an action", "sandbox", b.id, "action", a, "err", err)
		if !r.pause(wait) {
			return false
		}
	}
}

// act performs one action, once.
func (r *Runner) act(b *box, a sandbox.Action) error {
	switch a {
	case sandbox.ActionAnnounce:
		return r.announce(b)
	case sandbox.ActionUndo:
		return r.undo(b)
	case sandbox.ActionKill:
		return r.kill(b)
	case sandbox.ActionRelease:
		return r.release(b)
	case sandbox.ActionAdopt:
		b.mu.Lock()
		inst := b.inst
		b.mu.Unlock()
		if inst != nil {
			b.idle.start()
			r.watch(b, inst)
		}
		return nil
	}
	return errdefs.New(errdefs.Internal, b.object(), "no such action: %s", a)
}

// announce has nothing to tell followers, who hear of every commit; an end goes to the store.
func (r *Runner) announce(b *box) error {
	st := b.status()
	if st.State != sandbox.Ended {
		r.cfg.Log.Info("sandbox "+string(st.State), "sandbox", b.id, "cause", st.End.Cause)
		return nil
	}
	select {
	case <-b.ended:
	default:
		r.cfg.Log.Info("sandbox ended", "sandbox", b.id, "cause", st.End.Cause, "detail", st.End.Detail)
		close(b.ended)
	}
	b.mu.Lock()
	done := b.rec.Stored
	b.mu.Unlock()
	if done {
		b.tellStored()
		return nil
	}
	r.enqueue(b)
	return nil
}

func (b *box) tellStored() {
	b.mu.Lock()
	defer b.mu.Unlock()
	if !b.isStored {
		b.isStored = true
		close(b.stored)
	}
}

// undo takes back whatever a start made or left.
func (r *Runner) undo(b *box) error {
	b.mu.Lock()
	cancel := b.cancel
	b.mu.Unlock()
	if cancel != nil {
		cancel(sessions.Gone(string(b.id), b.status().End))
		select {
		case <-b.built: // Calls for one sandbox never overlap.
		case <-r.ctx.Done():
			return context.Cause(r.ctx)
		}
	}
	// A Start that failed left nothing; what a crash left was swept by name before this is performed again.
	return r.kill(b)
}

// kill ends every process, and the commands' stories.
func (r *Runner) kill(b *box) error {
	r.starts.yield(yieldLimit)
	b.mu.Lock()
	inst, table, end, grace := b.inst, b.table, b.rec.End, b.rec.Grace
	b.mu.Unlock()
	b.idle.halt()
	if table != nil {
		table.End(end)
	}
	if inst != nil {
		ctx, stop := context.WithTimeoutCause(context.Background(), grace+undoLimit, errdefs.Deadline)
		defer stop()
		if _, err := inst.Stop(ctx, grace); err != nil {
			return err
		}
	}
	if table != nil && r.ctx.Err() == nil {
		ctx, stop := context.WithTimeoutCause(context.Background(), closeLimit, errdefs.Deadline)
		defer stop()
		table.Close(ctx, end)
	}
	return nil
}

// release gives back what is not the backend's.
func (r *Runner) release(b *box) error {
	b.mu.Lock()
	h, grant := b.files, b.grant
	b.files, b.inst, b.grant = nil, nil, nil
	b.mu.Unlock()
	if h != nil {
		_ = h.Close()
	}
	ctx, stop := context.WithTimeoutCause(context.Background(), undoLimit, errdefs.Deadline)
	defer stop()
	err := r.cfg.Keeper.Release(ctx, keeper.Key{Sandbox: string(b.id)})
	if err != nil && !errors.Is(err, errdefs.Unavailable) && !errors.Is(err, errdefs.NotFound) {
		return err // a keeper that is away holds nothing
	}
	if err := r.releaseNetwork(ctx, b); err != nil {
		return err
	}
	if grant != nil {
		grant.Release()
	}
	return nil
}

// Stop ends a sandbox and returns when nothing is left of it and the store has been told, or could not be for now.
// Idempotent: an ended one answers the same.
func (r *Runner) Stop(ctx context.Context, id sandbox.ID, grace time.Duration, by string) (Snapshot, error) {
	if grace < 0 || grace > time.Hour {
		return Snapshot{}, errdefs.New(errdefs.Invalid, "", "grace_ms: %s is not between 0 and 1 hour", grace).
			WithField("grace_ms", "1 hour").WithHint("0 kills at once")
	}
	b, err := r.find(id)
	if err != nil {
		return Snapshot{}, err
	}
	if r.isLeaving() {
		return Snapshot{}, errdefs.New(errdefs.Unavailable, "node", "it is shutting down")
	}
	actions, err := b.event(sandbox.Event{Kind: sandbox.EventStop, Cause: sandbox.CauseStopped, By: by},
		func(rec *entry) { rec.Grace = grace })
	if err != nil {
		return Snapshot{}, err
	}
	if len(actions) > 0 {
		r.wg.Go(func() { r.perform(b, actions) })
	}
	var unknown error
	select {
	case <-b.ended:
	case <-ctx.Done():
		unknown = errdefs.New(errdefs.Unknown, b.object(), "the stop goes on").Wrap(context.Cause(ctx)).
			WithHint("Ask for it again")
	case <-r.ctx.Done():
		unknown = errdefs.New(errdefs.Unknown, b.object(), "the node's daemon is shutting down").
			WithHint("The stop goes on at its next start. Ask for it again")
	}
	if b.status().State != sandbox.Ended {
		return Snapshot{}, unknown
	}
	timer := time.NewTimer(storeAnswer)
	defer timer.Stop()
	select {
	case <-b.stored:
	case <-timer.C:
	case <-ctx.Done():
	case <-r.ctx.Done():
	}
	return b.snapshot(r.cfg.Now()), nil
}

// Get shows a sandbox. It is no use.
func (r *Runner) Get(id sandbox.ID) (Snapshot, error) {
	b, err := r.find(id)
	if err != nil {
		return Snapshot{}, err
	}
	return b.snapshot(r.cfg.Now()), nil
}

// Usage is what a running sandbox uses, and what its output occupies.
func (r *Runner) Usage(ctx context.Context, id sandbox.ID) (u backend.Usage, output int64, err error) {
	b, err := r.find(id)
	if err != nil {
		return u, 0, err
	}
	b.mu.Lock()
	inst, table, state := b.inst, b.table, b.rec.State
	b.mu.Unlock()
	if table != nil {
		output = table.OutputBytes()
	}
	if inst == nil || state != sandbox.Running {
		return u, output, nil
	}
	u, err = inst.Usage(ctx)
	return u, output, err
}

// ExtendTTL moves the hard end to ttl from now.
func (r *Runner) ExtendTTL(ctx context.Context, id sandbox.ID, ttl time.Duration) (Snapshot, error) {
	if err := sandbox.CheckTTL(ttl); err != nil {
		return Snapshot{}, err
	}
	b, err := r.find(id)
	if err != nil {
		return Snapshot{}, err
	}
	b.step.Lock()
	defer b.step.Unlock()
	b.mu.Lock()
	rec := b.rec
	b.mu.Unlock()
	if rec.State != sandbox.Running {
		return Snapshot{}, unready(b)
	}
	rec.Expires = r.cfg.Now().UTC().Add(ttl)
	// The keeper first: an edge killed in between arms what the journal has, and nobody was answered.
	if err := r.cfg.Keeper.Rearm(ctx, keeper.Key{Sandbox: string(id)}, rec.Expires, 0); err != nil {
		return Snapshot{}, fmt.Errorf("move the hard end of %s: %w", b.object(), err)
	}
	if err := b.commit(rec, WhatExtended); err != nil {
		return Snapshot{}, err
	}
	return b.snapshot(r.cfg.Now()), nil
}

// unready says why a call for a sandbox that does not run is refused.
func unready(b *box) error {
	st := b.status()
	switch st.State {
	case sandbox.Stopping, sandbox.Ended:
		return sessions.Gone(string(b.id), st.End)
	default:
		return errdefs.New(errdefs.Unavailable, b.object(), "is %s", st.State)
	}
}

// Use is one call's hold on a sandbox.
type Use struct {
	b      *box
	waking bool
	once   sync.Once
	// Commands are there for an ended sandbox too, for reading.
	Commands *sessions.Table
	// Shells are the sandbox's shell sessions, over Commands.
	Shells  *shells.Set
	Project string
	visits  []*visit
}

// Open begins a call. A waking call counts as use until Done; a still one does not. For a sandbox that was never ready
// it is Unavailable, or Gone.
func (r *Runner) Open(id sandbox.ID, waking bool) (*Use, error) {
	b, err := r.find(id)
	if err != nil {
		return nil, err
	}
	b.mu.Lock()
	table, set, state, project := b.table, b.shells, b.rec.State, b.rec.Project
	b.mu.Unlock()
	if table == nil || state == sandbox.Creating {
		return nil, unready(b)
	}
	if waking {
		b.idle.use(1)
	}
	return &Use{b: b, waking: waking, Commands: table, Shells: set, Project: project}, nil
}

// Files is the sandbox's files as a user sees them; empty is the sandbox's own user.
func (u *Use) Files(ctx context.Context, user string) (*files.View, error) {
	if err := sandbox.CheckUser("user", user); err != nil {
		return nil, err
	}
	u.b.mu.Lock()
	h, rec := u.b.files, u.b.rec
	u.b.mu.Unlock()
	if h == nil || rec.State != sandbox.Running {
		return nil, unready(u.b)
	}
	found, err := u.b.lookup(ctx, firstOf(user, rec.Spec.User, rec.Config.User, "root"))
	if err != nil {
		return nil, err
	}
	return h.As(found.IDs, workdir(rec)), nil
}

// Because explains the error of a call. When the line to the inside broke, the sandbox is ending: then it waits until it is
// known why, which is the better answer.
func (u *Use) Because(ctx context.Context, err error) error {
	if !errors.Is(err, errdefs.Unavailable) || u.b.r.isLeaving() {
		return err
	}
	timer := time.NewTimer(endLimit)
	defer timer.Stop()
	select {
	case <-u.b.ended:
	case <-timer.C:
	case <-ctx.Done():
	}
	if st := u.b.status().State; st == sandbox.Stopping || st == sandbox.Ended {
		return unready(u.b)
	}
	return err
}

// Done ends the call. Idempotent.
func (u *Use) Done() {
	u.once.Do(func() {
		u.b.leave(u.visits...)
		if u.waking {
			u.b.idle.use(-1)
		}
	})
}

// forget drops an ended sandbox: its output first, so that what a crash leaves has a record.
func (r *Runner) forget(b *box) error {
	if err := os.RemoveAll(filepath.Join(r.cfg.Output, string(b.id))); err != nil {
		return fmt.Errorf("drop the output of %s: %w", b.object(), err)
	}
	if err := r.forgetFlows(b.id); err != nil {
		return err
	}
	keys := []journal.Key{{Kind: kindSandbox, Name: string(b.id)}}
	b.mu.Lock()
	table, set := b.table, b.shells
	b.mu.Unlock()
	if table != nil {
		for _, n := range table.Names() {
			keys = append(keys, journal.Key{Kind: kindProcess, Name: n})
		}
		keys = append(keys, shellKeys(set.Names())...)
	}
	if err := r.cfg.Journal.Delete(keys...); err != nil {
		return err
	}
	r.mu.Lock()
	defer r.mu.Unlock()
	delete(r.boxes, b.id)
	return nil
}
