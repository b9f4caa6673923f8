package runner

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"maps"
	"slices"
	"sync"

	"github.com/sandsea/sandsea/api/errdefs"
	"github.com/sandsea/sandsea/internal/chronus"
	"github.com/sandsea/sandsea/internal/edge/backend"
	"github.com/sandsea/sandsea/internal/edge/journal"
	"github.com/sandsea/sandsea/internal/keeper"
	"github.com/sandsea/sandsea/internal/sandbox"
)

const (
	recoverAtOnce = 32
	greetTries    = 3
)

// found is what a recovered sandbox knows of its commands.
type found struct {
	inside []chronus.Process
	execs  []keeper.Held
}

// Held is what the keeper had when this edge started; see package sweep.
type Held interface {
	// Execs gives a sandbox's commands, with descriptors that become the caller's. Once.
	Execs(id sandbox.ID) []keeper.Held
	// Fired reports whether the sandbox's hard end came.
	Fired(id sandbox.ID) bool
	// Knows reports whether the sandbox is held.
	Knows(id sandbox.ID) bool
}

// Load reads the journal. First of all.
func (r *Runner) Load() error {
	commands := map[sandbox.ID]map[string][]byte{}
	for rec, err := range r.cfg.Journal.All(kindProcess) {
		if err != nil {
			return err
		}
		id, ok := processOwner(rec.Key.Name)
		if !ok {
			return errdefs.New(errdefs.DataLoss, "journal", "a process record is named %q", rec.Key.Name)
		}
		if commands[id] == nil {
			commands[id] = map[string][]byte{}
		}
		commands[id][rec.Key.Name] = rec.Data
	}
	sets, err := r.shellRecords()
	if err != nil {
		return err
	}
	for item, err := range r.cfg.Journal.All(kindSandbox) {
		if err != nil {
			return err
		}
		var rec entry
		if err := json.Unmarshal(item.Data, &rec); err != nil {
			return errdefs.New(errdefs.DataLoss, "journal record "+item.Key.Name, "it is no sandbox").Wrap(err)
		}
		own := commands[rec.ID]
		open := sets[rec.ID]
		delete(commands, rec.ID)
		delete(sets, rec.ID)
		for _, data := range own {
			var step struct{ Seq int64 }
			if err := json.Unmarshal(data, &step); err == nil {
				rec.Seq = max(rec.Seq, step.Seq)
			}
		}
		b := newBox(r, rec)
		b.lookups = 1 // something may have run
		close(b.built)
		if rec.State != sandbox.Creating {
			close(b.started)
		}
		b.table = b.newTable()
		if err := b.shells.Load(open); err != nil {
			return err
		}
		if err := b.table.Load(own); err != nil {
			return err
		}
		b.shells.Use(b.table)
		r.mu.Lock()
		r.boxes[rec.ID] = b
		r.mu.Unlock()
	}
	// Left by a crash in the middle of forgetting a sandbox.
	for _, left := range sets {
		if err := r.cfg.Journal.Delete(shellKeys(slices.Collect(maps.Keys(left)))...); err != nil {
			return err
		}
	}
	for _, names := range commands {
		for name := range names {
			if err := r.cfg.Journal.Delete(journal.Key{Kind: kindProcess, Name: name}); err != nil {
				return err
			}
		}
	}
	return nil
}

// Recover finds out what became of every sandbox of the journal, and journals it. What is then to be done waits for
// Resume, so that the backend can be swept in between. After Load, once.
func (r *Runner) Recover(ctx context.Context, held Held) error {
	var mu sync.Mutex
	var errs []error
	var wg sync.WaitGroup
	turn := make(chan struct{}, recoverAtOnce)
	for _, b := range r.list() {
		turn <- struct{}{}
		wg.Go(func() {
			defer func() { <-turn }()
			if err := r.recoverOne(ctx, b, held); err != nil {
				mu.Lock()
				defer mu.Unlock()
				errs = append(errs, fmt.Errorf("recover %s: %w", b.object(), err))
			}
		})
	}
	wg.Wait()
	return errors.Join(errs...)
}

func (r *Runner) recoverOne(ctx context.Context, b *box, held Held) error {
	b.mu.Lock()
	rec := b.rec
	b.mu.Unlock()
	execs := held.Execs(b.id)
	e := sandbox.Event{Kind: sandbox.EventRecovered, By: sandbox.ByPlatform}
	var inst backend.Instance
	if rec.State != sandbox.Creating && rec.State != sandbox.Ended && len(rec.Handle) > 0 {
		var err error
		inst, err = r.cfg.Backend.Recover(ctx, b.id, backend.Handle(rec.Handle))
		if err != nil && !errors.Is(err, errdefs.NotFound) {
			r.cfg.Log.Error("recover a sandbox", "sandbox", b.id, "err", err)
		}
		e.Found = err == nil
	}
	switch {
	case held.Fired(b.id):
		e.Cause = sandbox.CauseTTL
		b.hearKill(sandbox.End{Cause: sandbox.CauseTTL})
	case !held.Knows(b.id):
		e.Cause, e.Detail = sandbox.CauseInfraOrphaned, "neither the node's daemon nor its keeper was there"
	}
	var err error
	if e.Found {
		b.mu.Lock()
		b.inst = inst
		b.mu.Unlock()
		err = r.takeBack(ctx, b, inst, execs)
	} else {
		keeper.CloseHeld(execs)
	}
	if errors.Is(err, errUnanswered) {
		actions, everr := b.event(sandbox.Event{
			Kind: sandbox.EventGone, Cause: sandbox.CauseInfraUnknown, Detail: "its inside does not answer",
			By: sandbox.ByPlatform,
		}, nil)
		b.mu.Lock()
		b.pending = actions
		b.mu.Unlock()
		return everr
	}
	if err != nil {
		// Its descriptors are where they were; what could not be taken over is told by its commands.
		r.cfg.Log.Error("take a sandbox's commands back", "sandbox", b.id, "err", err)
	}
	actions, err := b.event(e, nil)
	if err != nil {
		return err
	}
	b.mu.Lock()
	b.pending = actions
	b.mu.Unlock()
	return nil
}

var errUnanswered = errors.New("no answer from inside")

// takeBack gives a found sandbox its room, its deadline and its commands.
func (r *Runner) takeBack(ctx context.Context, b *box, inst backend.Instance, execs []keeper.Held) error {
	b.mu.Lock()
	rec := b.rec
	b.mu.Unlock()
	grant, err := r.cfg.Room.Adopt(b.id, rec.Spec.Limits)
	if err != nil {
		keeper.CloseHeld(execs)
		return err
	}
	b.mu.Lock()
	b.grant = grant
	b.mu.Unlock()
	if rec.State == sandbox.Stopping {
		keeper.CloseHeld(execs)
		return nil
	}
	if err := r.expectNetwork(ctx, b, inst); err != nil {
		// Aether is not told of it, so nothing passes.
		r.cfg.Log.Error("take a sandbox's network back", "sandbox", b.id, "err", err)
	}
	inside, err := r.greet(ctx, inst)
	if err != nil {
		keeper.CloseHeld(execs)
		select {
		case <-inst.Done():
			return nil // dead already: the watcher tells how
		default:
			return err
		}
	}
	if err := r.adopt(b, inst, &found{inside: inside, execs: execs}); err != nil {
		return err
	}
	// An ExtendTTL that was cut off may have armed what the journal does not have.
	err = r.cfg.Keeper.Rearm(ctx, keeper.Key{Sandbox: string(b.id)}, rec.Expires, 0)
	if errors.Is(err, errdefs.NotFound) {
		return nil // it has fired
	}
	return err
}

// greet asks the inside what lives; it waits for an instance that is dead to say so.
func (r *Runner) greet(ctx context.Context, inst backend.Instance) ([]chronus.Process, error) {
	for try := 0; ; try++ {
		gctx, stop := context.WithTimeoutCause(ctx, greetLimit, errdefs.Deadline)
		_, inside, err := inst.Channel().Hello(gctx)
		if err == nil {
			stop()
			return inside, nil
		}
		select {
		case <-inst.Done():
			stop()
			return nil, errUnanswered
		case <-gctx.Done():
		}
		stop()
		if try == greetTries-1 || ctx.Err() != nil {
			return nil, fmt.Errorf("%w: %w", errUnanswered, err)
		}
	}
}

// Keeps reports whether this edge has the instance of this id: a sandbox that runs, or that is still to be stopped.
func (r *Runner) Keeps(id sandbox.ID) bool {
	b, err := r.find(id)
	if err != nil {
		return false
	}
	b.mu.Lock()
	defer b.mu.Unlock()
	return b.inst != nil
}

// Spares reports whether what bears this id is not to be swept: what Keeps says, and what has ended, of which only the
// record of output is left until it is forgotten.
func (r *Runner) Spares(id sandbox.ID) bool {
	b, err := r.find(id)
	if err != nil {
		return false
	}
	b.mu.Lock()
	defer b.mu.Unlock()
	return b.inst != nil || b.rec.State == sandbox.Ended
}

// Remembers reports whether there is a record of this sandbox, ended or not.
func (r *Runner) Remembers(id sandbox.ID) bool {
	_, err := r.find(id)
	return err == nil
}

// Resume performs what Recover found is to be done, and begins to listen to the keeper. After it the node may take
// sandboxes.
func (r *Runner) Resume() {
	for _, b := range r.list() {
		b.mu.Lock()
		actions := b.pending
		b.pending = nil
		creating := len(actions) > 0 && b.rec.Ready.IsZero()
		b.mu.Unlock()
		if len(actions) > 0 && actions[0] == sandbox.ActionAdopt {
			r.perform(b, actions) // takes no time, and is done before anything can happen to it
			continue
		}
		r.wg.Go(func() {
			r.perform(b, actions)
			if !creating {
				return
			}
			select {
			case <-b.ended:
				select {
				case <-b.started:
				default:
					b.decide(errdefs.New(errdefs.Unavailable, b.object(), "start: the node's daemon restarted, nothing is left of it").
						WithHint("Create it again"))
				}
			case <-r.ctx.Done():
			}
		})
	}
	r.wg.Go(r.commitLoop)
	r.wg.Go(r.janitor)
	r.wg.Go(r.listen)
}

// listen takes the keeper's events until Close.
func (r *Runner) listen() {
	for e, err := range r.cfg.Keeper.Events() {
		if err != nil || r.ctx.Err() != nil {
			return
		}
		r.hear(e)
		// Before the next one is asked for, which may be another keeper's.
		if err := r.cfg.Keeper.Ack(e.Seq); err != nil {
			r.cfg.Log.Debug("acknowledge an event of the keeper", "seq", e.Seq, "err", err)
		}
	}
}

// hear takes one event. It is acknowledged afterwards: what it says is either remembered, or told again by the kernel.
func (r *Runner) hear(e keeper.Event) {
	b, err := r.find(sandbox.ID(e.Key.Sandbox))
	if err != nil {
		return
	}
	switch {
	case e.Kind == keeper.Overflow:
		r.killed(b, sandbox.End{
			Cause: sandbox.CauseOutputLimit, Detail: fmt.Sprintf("stream %d of process %d", e.Stream, e.Key.Number),
		})
	case e.Key.Number > 0:
		b.mu.Lock()
		t := b.table
		b.mu.Unlock()
		if t != nil {
			t.Event(e)
		}
	case e.Kind == keeper.Fired:
		r.killed(b, sandbox.End{Cause: sandbox.CauseTTL})
	}
	// Died is seen by the instance too, with evidence.
}

// killed ends a sandbox that the keeper has killed.
func (r *Runner) killed(b *box, why sandbox.End) {
	b.hearKill(why)
	r.wg.Go(func() {
		r.end(b, sandbox.Event{Kind: sandbox.EventStop, Cause: why.Cause, Detail: why.Detail, By: sandbox.ByPlatform})
	})
}

// hearKill notes why the keeper killed the sandbox; its first word counts.
func (b *box) hearKill(why sandbox.End) {
	b.mu.Lock()
	defer b.mu.Unlock()
	if b.word.Cause == "" {
		b.word = why
		close(b.fired)
	}
}

// Keep makes another keeper hold and record everything, after the death of the one before.
func (r *Runner) Keep(ctx context.Context, c keeper.Client) error {
	select {
	case <-r.ctx.Done():
		return nil // this edge is leaving: the next one takes over what the keeper holds
	default:
	}
	var errs []error
	if k, ok := r.cfg.Backend.(interface {
		Keep(context.Context, keeper.Client) error
	}); ok {
		errs = append(errs, k.Keep(ctx, current{c, r}))
	}
	// Only now, since a command is refused by a keeper that does not hold its sandbox.
	if l, ok := r.cfg.Keeper.(*Link); ok {
		l.Set(c)
	}
	for _, b := range r.list() {
		b.mu.Lock()
		t, state := b.table, b.rec.State
		b.mu.Unlock()
		if t == nil || state != sandbox.Running {
			continue
		}
		errs = append(errs, r.rearm(ctx, b), t.Rerecord(ctx))
	}
	return errors.Join(errs...)
}

// rearm tells the keeper the hard end in force. It holds step, so that no ExtendTTL comes between the look and the word.
func (r *Runner) rearm(ctx context.Context, b *box) error {
	b.step.Lock()
	defer b.step.Unlock()
	b.mu.Lock()
	expires := b.rec.Expires
	b.mu.Unlock()
	if err := r.cfg.Keeper.Rearm(ctx, keeper.Key{Sandbox: string(b.id)}, expires, 0); err != nil {
		return fmt.Errorf("arm the hard end of %s: %w", b.object(), err)
	}
	return nil
}

// current is a keeper that gets each sandbox with the hard end in force. A backend knows only the one that it began with,
// and a keeper kills at once what it is given with one that has passed.
type current struct {
	keeper.Client
	r *Runner
}

// Hold implements keeper.Client.
func (c current) Hold(ctx context.Context, s keeper.Sandbox) error {
	if b, err := c.r.find(sandbox.ID(s.ID)); err == nil {
		b.mu.Lock()
		s.Hard = b.rec.Expires
		b.mu.Unlock()
	}
	return c.Client.Hold(ctx, s)
}
