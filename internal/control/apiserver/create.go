package apiserver

import (
	"cmp"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"maps"
	"slices"
	"strings"
	"time"

	"connectrpc.com/connect"
	"golang.org/x/time/rate"
	"google.golang.org/protobuf/encoding/protojson"

	"github.com/sandsea/sandsea/api/errdefs"
	nodev1 "github.com/sandsea/sandsea/api/node/v1"
	pb "github.com/sandsea/sandsea/api/sandsea/v1"
	"github.com/sandsea/sandsea/internal/control/iam"
	"github.com/sandsea/sandsea/internal/control/nodeclient"
	"github.com/sandsea/sandsea/internal/control/placement"
	"github.com/sandsea/sandsea/internal/image"
	"github.com/sandsea/sandsea/internal/node"
	"github.com/sandsea/sandsea/internal/sandbox"
	"github.com/sandsea/sandsea/internal/sandboxpb"
	"github.com/sandsea/sandsea/internal/store"
	"github.com/sandsea/sandsea/internal/store/keys"
)

const (
	defaultReady = 30 * time.Second
	maxReady     = time.Hour
	// tries is how many nodes one round asks.
	tries = 5
	// undoLimit bounds what is done for a create after its caller has gone.
	undoLimit = 30 * time.Second
	// dropLimit bounds the removal of a record that nobody needs.
	dropLimit = 2 * time.Second
	// lastRound is how long before the deadline no new round of a waiting create begins.
	lastRound = time.Second
)

var (
	errUndoLimit = fmt.Errorf("not undone in %s: %w", undoLimit, context.DeadlineExceeded)
	errDropLimit = fmt.Errorf("not removed in %s: %w", dropLimit, context.DeadlineExceeded)
)

// createRecord is what the store remembers of a create: under its sandbox's id with the spec, under its key without.
// Written by the API server alone, before the node is asked.
type createRecord struct {
	ID        sandbox.ID      `json:"id"`
	Project   string          `json:"project"`
	Node      node.Number     `json:"node"`
	NodeEpoch int64           `json:"node_epoch"`
	Digest    string          `json:"digest"`
	Key       string          `json:"key,omitempty"`
	By        string          `json:"by"`
	Job       string          `json:"job,omitempty"`
	Created   time.Time       `json:"created"`
	Spec      json.RawMessage `json:"spec,omitempty"`
}

func (s *Server) readRecord(ctx context.Context, project, id string) (createRecord, bool, error) {
	var rec createRecord
	res, err := s.store.Txn(ctx, nil, []store.Op{store.Get(keys.Sandbox(project, id))}, nil)
	if err != nil || len(res.Pairs) == 0 {
		return rec, false, err
	}
	if err := json.Unmarshal(res.Pairs[0].Value, &rec); err != nil {
		return rec, false, errdefs.New(errdefs.DataLoss, "record of sandbox "+id, "cannot be read").Wrap(err)
	}
	return rec, true, nil
}

// attempt is one create in work.
type attempt struct {
	s      *Server
	who    iam.Caller
	key    string
	digest string
	spec   sandbox.Spec
	wire   *pb.SandboxSpec // the complete spec as a message
	json   json.RawMessage // the same for the record, in brief
	layers []image.Digest
	config image.Config
	image  image.Digest
	need   placement.Need
	began  time.Time
	ready  time.Duration

	rec    createRecord // in the store when rec.ID is set
	keyRev int64        // revision of the key's record that is ours
	// inherited: the id is an earlier call's, whose request may have reached the node.
	inherited bool
	// spent: the node began with the id and gave up; it takes the same id for that one for ever.
	spent    bool
	refusals map[string]int
	refusal  string // the last one
}

// create makes a sandbox, or finds the one that the key stands for.
func (s *Server) create(ctx context.Context, spec *pb.SandboxSpec, key string, readyMs int64) (*pb.Sandbox, error) {
	if s.creating.Add(1) > maxCreates {
		s.creating.Add(-1)
		return nil, errdefs.New(errdefs.Exhausted, "", "%d creates are in work", maxCreates).WithRetryAfter(time.Second).
			WithHint("Try again in a second")
	}
	defer s.creating.Add(-1)
	a := &attempt{s: s, who: caller(ctx), key: key, began: time.Now(), refusals: map[string]int{}}
	if err := a.read(spec, readyMs); err != nil {
		return nil, err
	}
	ctx, stop := context.WithTimeoutCause(ctx, a.ready, fmt.Errorf("not ready in %s: %w", a.ready,
		context.DeadlineExceeded))
	defer stop()
	if err := a.resolve(ctx); err != nil {
		// What the key stands for exists even when its image is gone.
		if key != "" {
			if rec, rev, ok, kerr := a.lookUp(ctx); kerr == nil && ok {
				if sb, found, err := a.known(ctx, rec, rev); found || err != nil && !errors.Is(err, errRefused) {
					return sb, err
				}
			}
		}
		return nil, errdefs.AtStage(err, errdefs.StageImage)
	}
	sb, err := a.run(ctx)
	if err != nil {
		return nil, err
	}
	if key == "" && ctx.Err() != nil {
		// Nobody will hear of it.
		return nil, a.unsure(ctx, "", context.Cause(ctx))
	}
	s.watcher.Note(sb)
	return sb, nil
}

// read checks what the caller wrote.
func (a *attempt) read(m *pb.SandboxSpec, readyMs int64) error {
	if err := sandbox.CheckKey("key", a.key); err != nil {
		return err
	}
	a.ready = time.Duration(readyMs) * time.Millisecond
	if readyMs < 0 || readyMs > maxReady.Milliseconds() {
		return errdefs.New(errdefs.Invalid, "", "ready_timeout_ms: %d is not between 0 and an hour", readyMs).
			WithField("ready_timeout_ms", "1 h").WithHint("0 means 30 s")
	}
	a.ready = cmp.Or(a.ready, defaultReady)
	asked, err := sandboxpb.ToSpec(m)
	if err != nil {
		return err
	}
	a.digest = asked.Digest()
	if a.spec, err = asked.Validate(); err != nil {
		return err
	}
	a.wire = sandboxpb.FromSpec(a.spec)
	// The record is for what is shown of a sandbox that is lost.
	kept := sandboxpb.Brief(&pb.Sandbox{Spec: a.wire}).GetSpec()
	if a.json, err = (protojson.MarshalOptions{UseProtoNames: true}).Marshal(kept); err != nil {
		return fmt.Errorf("encode the spec: %w", err)
	}
	l := a.spec.Limits
	a.need = placement.Need{Memory: l.Memory, CPUMillis: l.CPUMillis, Pids: l.Pids, Missing: a.spec.Missing}
	return nil
}

// resolve turns names into layers.
func (a *attempt) resolve(ctx context.Context) error {
	img, err := a.s.catalogue.environment(ctx, a.spec.Environment)
	if err != nil {
		return err
	}
	for _, l := range img.Layers {
		a.layers = append(a.layers, l.Digest)
	}
	a.config, a.image = img.Config, img.Digest()
	if a.spec.Entrypoint == sandbox.EntrypointImage && len(img.Config.Entrypoint)+len(img.Config.Cmd) == 0 {
		return errdefs.New(errdefs.Invalid, "", "entrypoint.mode: the image has neither entrypoint nor command to start").
			WithField("entrypoint.mode", "").WithHint("Give a command (-- CMD…, mode argv), or use the mode idle")
	}
	return nil
}

// errRefused says that a node left nothing and another may be asked.
var errRefused = errors.New("refused")

// run places the sandbox, round after round while there is no room and time is left.
func (a *attempt) run(ctx context.Context) (*pb.Sandbox, error) {
	for {
		sb, err := a.round(ctx)
		if !errors.Is(err, errRefused) {
			return sb, err
		}
		last := errors.Unwrap(err)
		if e, ok := errors.AsType[*errdefs.Error](last); ok && e.RetryAfter == 0 || !a.wait(ctx) {
			a.drop(ctx)
			return nil, a.noRoom(last)
		}
	}
}

// round asks up to five nodes. An error that wraps errRefused and why says that nothing is left anywhere.
func (a *attempt) round(ctx context.Context) (*pb.Sandbox, error) {
	var tried []node.Number
	var last error
	for range tries {
		ref, err := a.s.pick(a.need, tried)
		if err != nil {
			if last == nil {
				last = err
			}
			break
		}
		sb, err := a.place(ctx, ref)
		if !errors.Is(err, errRefused) {
			return sb, err
		}
		last = errors.Unwrap(err)
		a.s.log.Debug("node refused a create", "node", ref.Number, "err", last)
		a.s.overlay.Refused(ref.Number, a.need, time.Now())
		a.refusal = text(last)
		a.refusals[a.refusal]++
		tried = append(tried, ref.Number)
		if ctx.Err() != nil {
			break
		}
	}
	return nil, refused{last}
}

// refused is errRefused with its reason.
type refused struct{ why error }

func (r refused) Error() string        { return "refused: " + r.why.Error() }
func (r refused) Is(target error) bool { return target == errRefused }
func (r refused) Unwrap() error        { return r.why }

func text(err error) string {
	if e, ok := errors.AsType[*errdefs.Error](err); ok {
		return e.Msg
	}
	return err.Error()
}

// place claims an id on the node and asks it.
func (a *attempt) place(ctx context.Context, ref node.Ref) (*pb.Sandbox, error) {
	if a.rec.ID != "" && !a.spent && a.rec.Node == ref.Number && a.rec.NodeEpoch == ref.Epoch {
		return a.settle(ctx, nil, 0) // refused before and asked again: the same id, nothing to write
	}
	id, err := sandbox.Mint(ref.Number, a.s.random)
	if err != nil {
		return nil, err
	}
	other, rev, err := a.claim(ctx, createRecord{
		ID: id, Project: a.who.Project, Node: ref.Number, NodeEpoch: ref.Epoch, Digest: a.digest, Key: a.key,
		By:  a.who.Principal,
		Job: a.spec.Job, Created: time.Now().UTC(),
	})
	if err != nil {
		return nil, err
	}
	return a.settle(ctx, other, rev)
}

// settle asks the record's node, or follows other when the key stands for that one, until key and sandbox agree.
func (a *attempt) settle(ctx context.Context, other *createRecord, rev int64) (*pb.Sandbox, error) {
	for n := 0; a.crossed(ctx, n); n++ {
		if other != nil {
			sb, found, err := a.known(ctx, *other, rev)
			if found || err != nil {
				return sb, err
			}
		}
		sb, err := a.ask(ctx)
		if err != nil || a.key == "" {
			return sb, err
		}
		if other, rev, err = a.confirm(ctx); err != nil || other == nil {
			return sb, err
		}
		// While we asked, another call was refused with our id and moved the key on: what the node just made is nobody's.
		if err := a.undo(ctx); err != nil {
			return nil, a.unknown("calls with this key crossed", err)
		}
	}
	return nil, a.unknown("other calls with this key keep at it", nil)
}

// crossed lets calls with one key that got into each other's way try again, further apart each time; false when the
// time is up. The first try waits for nothing.
func (a *attempt) crossed(ctx context.Context, n int) bool {
	if n > 0 {
		most := min(time.Millisecond<<min(n, 10), 100*time.Millisecond)
		a.s.rngMu.Lock()
		d := time.Duration(a.s.rng.Int64N(int64(most)))
		a.s.rngMu.Unlock()
		pause(ctx, d)
	}
	return ctx.Err() == nil
}

// confirm sees to it that the key stands for our id and stays so. When another call has taken the record over since, it
// is written anew, so that the other one's move fails; when it has moved to another id, that record comes back.
func (a *attempt) confirm(ctx context.Context) (other *createRecord, rev int64, err error) {
	name := keys.CreateKey(a.rec.Project, a.key)
	get := []store.Op{store.Get(name)}
	res, err := a.s.store.Txn(ctx, []store.Cond{{Key: name, ModRev: a.keyRev}}, nil, get)
	for n := 0; a.crossed(ctx, n); n++ {
		if err != nil {
			return nil, 0, a.storeError(err, errdefs.Unknown)
		}
		if res.Succeeded {
			return nil, 0, nil
		}
		if len(res.Pairs) == 0 {
			// Dropped by a call that was told that nothing is left. Ours is there: claim the key again.
			short, full, merr := a.encode(a.rec)
			if merr != nil {
				return nil, 0, merr
			}
			res, err = a.s.store.Txn(ctx, []store.Cond{{Key: name, Absent: true}},
				[]store.Op{store.Put(name, short), store.Put(keys.Sandbox(a.rec.Project, string(a.rec.ID)), full)}, get)
			if err == nil && res.Succeeded {
				a.keyRev = res.Revision
			}
			continue
		}
		pair := res.Pairs[0]
		other = &createRecord{}
		if err := json.Unmarshal(pair.Value, other); err != nil {
			return nil, 0, errdefs.New(errdefs.DataLoss, "record of key "+clip(a.key), "cannot be read").Wrap(err)
		}
		if other.ID != a.rec.ID {
			return other, pair.ModRev, nil
		}
		res, err = a.s.store.Txn(ctx, []store.Cond{{Key: name, ModRev: pair.ModRev}}, []store.Op{store.Put(name,
			pair.Value)}, get)
		if err == nil && res.Succeeded {
			a.keyRev = res.Revision
		}
	}
	return nil, 0, a.unknown("other calls with this key keep at it", nil)
}

// undo ends the sandbox of our record, which nobody has been told of.
func (a *attempt) undo(ctx context.Context) error {
	client, name, _, there := a.s.watcher.Node(a.rec.Node)
	if !there {
		return errdefs.New(errdefs.Unavailable, fmt.Sprintf("node %d", a.rec.Node), "is gone")
	}
	ctx, stop := context.WithTimeoutCause(context.WithoutCancel(ctx), undoLimit, errUndoLimit)
	defer stop()
	req := connect.NewRequest(&nodev1.StopRequest{Id: string(a.rec.ID), By: "platform"})
	speak(req.Header(), iam.Caller{Principal: "platform", Covers: []string{a.rec.Project}})
	_, err := client.Edge.Stop(ctx, req)
	if err = nodeclient.Error(err, name, changes); errors.Is(err, errdefs.NotFound) {
		return nil
	}
	return err
}

// claim writes the record, durably, in the place of an earlier one of this attempt. When the key stands for another
// create, that one's record comes back.
func (a *attempt) claim(ctx context.Context, rec createRecord) (other *createRecord, rev int64, err error) {
	short, full, err := a.encode(rec)
	if err != nil {
		return nil, 0, err
	}
	ops := []store.Op{store.Put(keys.Sandbox(rec.Project, string(rec.ID)), full)}
	if a.rec.ID != "" {
		ops = append(ops, store.Delete(keys.Sandbox(a.rec.Project, string(a.rec.ID))))
	}
	if a.key == "" {
		if _, err := a.s.store.Txn(ctx, nil, ops, nil); err != nil {
			// No node was asked for this id: whatever was written, no sandbox is there.
			return nil, 0, a.storeError(err, errdefs.Unavailable)
		}
		a.rec, a.spent = rec, false
		return nil, 0, nil
	}
	name := keys.CreateKey(rec.Project, a.key)
	cond := store.Cond{Key: name, Absent: true}
	if a.keyRev != 0 {
		cond = store.Cond{Key: name, ModRev: a.keyRev}
	}
	res, err := a.s.store.Txn(ctx, []store.Cond{cond}, append(ops, store.Put(name, short)), []store.Op{store.Get(name)})
	if err != nil {
		return nil, 0, a.storeError(err, errdefs.Unknown)
	}
	if res.Succeeded {
		a.rec, a.keyRev, a.inherited, a.spent = rec, res.Revision, false, false
		return nil, 0, nil
	}
	if len(res.Pairs) == 0 {
		// Another call with our key gave up in this moment; ours goes on as a new one.
		a.keyRev, a.rec = 0, createRecord{}
		return a.claim(ctx, rec)
	}
	other = &createRecord{}
	if err := json.Unmarshal(res.Pairs[0].Value, other); err != nil {
		return nil, 0, errdefs.New(errdefs.DataLoss, "record of key "+clip(a.key), "cannot be read").Wrap(err)
	}
	return other, res.Pairs[0].ModRev, nil
}

// encode gives a record as it stands under its key, and with the spec as it stands under its sandbox.
func (a *attempt) encode(rec createRecord) (short, full []byte, err error) {
	rec.Spec = nil
	if short, err = json.Marshal(rec); err == nil {
		rec.Spec = a.json
		full, err = json.Marshal(rec)
	}
	if err != nil {
		return nil, nil, fmt.Errorf("encode a record: %w", err)
	}
	return short, full, nil
}

func (a *attempt) storeError(err error, unsure errdefs.Kind) error {
	if errors.Is(err, errdefs.Unknown) {
		if unsure == errdefs.Unknown {
			return a.unknown("the store gave no answer", err)
		}
		return errdefs.New(errdefs.Unavailable, "", "create: the store gave no answer, nothing was started").
			WithRetryAfter(time.Second).WithHint("Try again in a second").Wrap(err)
	}
	return fmt.Errorf("create: %w", err)
}

// lookUp reads what the key stands for.
func (a *attempt) lookUp(ctx context.Context) (rec createRecord, rev int64, ok bool, err error) {
	res, err := a.s.store.Txn(ctx, nil, []store.Op{store.Get(keys.CreateKey(a.who.Project, a.key))}, nil)
	if err != nil || len(res.Pairs) == 0 {
		return rec, 0, false, err
	}
	if err := json.Unmarshal(res.Pairs[0].Value, &rec); err != nil {
		return rec, 0, false, errdefs.New(errdefs.DataLoss, "record of key "+clip(a.key), "cannot be read").Wrap(err)
	}
	return rec, res.Pairs[0].ModRev, true, nil
}

// known finds the sandbox that the key stands for. Not found means that the record is now this attempt's and that its
// node, asked for the same id again, will make the sandbox or tell of it; an error that wraps errRefused, that it is
// this attempt's and that the node has given that id up.
func (a *attempt) known(ctx context.Context, rec createRecord, rev int64) (sb *pb.Sandbox, found bool, err error) {
	for n := 0; a.crossed(ctx, n); n++ {
		if rec.Digest != a.digest {
			return nil, false, errdefs.New(errdefs.AlreadyExists, fmt.Sprintf("key %q", clip(a.key)),
				"stands for another create (sandbox %s)", rec.ID.Short()).WithField("key", "").WithHint("Choose another key")
		}
		sb, err := a.trace(ctx, rec)
		if err != nil {
			return nil, false, err
		}
		failed := sb != nil && neverReady(sb)
		if sb != nil && !failed && sandboxpb.Over(sb.GetState()) {
			return sb, true, nil
		}
		// Take the record over, so that an earlier call that is still at work cannot move the key away from this id.
		short, err := json.Marshal(rec)
		if err != nil {
			return nil, false, fmt.Errorf("encode a record: %w", err)
		}
		key := keys.CreateKey(rec.Project, a.key)
		res, err := a.s.store.Txn(ctx, []store.Cond{{Key: key, ModRev: rev}}, []store.Op{store.Put(key, short)},
			[]store.Op{store.Get(key)})
		if err != nil {
			return nil, false, a.storeError(err, errdefs.Unknown)
		}
		if res.Succeeded {
			// One that was never ready is being made, or taken back since its caller went away: its node, asked again, knows.
			if sb != nil && !failed && sb.GetReadyAt() != nil {
				return sb, true, nil
			}
			a.rec, a.keyRev, a.inherited, a.spent = rec, res.Revision, !failed, failed
			if failed {
				return nil, false, refused{transient(errdefs.New(errdefs.Refused, "", "the first try failed: %s",
					sb.GetEnd().GetCause()))}
			}
			return nil, false, nil
		}
		if len(res.Pairs) == 0 {
			return nil, false, errdefs.New(errdefs.Unavailable, "", "create: another call with this key gave up just now").
				WithRetryAfter(100 * time.Millisecond).WithHint("Try again with the same key")
		}
		rev = res.Pairs[0].ModRev
		if err := json.Unmarshal(res.Pairs[0].Value, &rec); err != nil {
			return nil, false, errdefs.New(errdefs.DataLoss, "record of key "+clip(a.key), "cannot be read").Wrap(err)
		}
	}
	return nil, false, a.unknown("other calls with this key keep at it", nil)
}

// trace finds the sandbox of a record, alive or ended; nil when its node is there and does not know it.
func (a *attempt) trace(ctx context.Context, rec createRecord) (*pb.Sandbox, error) {
	who := iam.Caller{Principal: a.who.Principal, Project: rec.Project, Covers: []string{rec.Project}}
	end, ok, err := a.s.ended(ctx, who, string(rec.ID))
	switch {
	case err != nil:
		return nil, err
	case ok && end.GetState() == pb.SandboxState_SANDBOX_STATE_LOST:
		return nil, gone(end)
	case ok:
		return end, nil
	}
	client, name, reachable, there := a.s.watcher.Node(rec.Node)
	if !there || !reachable {
		return nil, a.unknown(fmt.Sprintf("node %d does not answer", rec.Node), nil)
	}
	get := connect.NewRequest(&nodev1.GetRequest{Id: string(rec.ID)})
	speak(get.Header(), who)
	resp, err := client.Edge.Get(ctx, get)
	if err == nil {
		return resp.Msg.GetSandbox(), nil
	}
	err = nodeclient.Error(err, name, reads)
	if !errors.Is(err, errdefs.NotFound) {
		return nil, a.unknown("node "+name+" does not tell", err)
	}
	if a.s.epoch(rec.Node) > rec.NodeEpoch {
		return nil, a.lost(rec, name)
	}
	return nil, nil
}

// neverReady reports whether a sandbox ended before anybody could use it: its create failed and left nothing. One that
// was lost may have been used.
func neverReady(sb *pb.Sandbox) bool {
	switch sandbox.Cause(sb.GetEnd().GetCause()) {
	case sandbox.CauseInfraLost, sandbox.CauseInfraFenced:
		return false
	}
	return sandboxpb.Over(sb.GetState()) && sb.GetReadyAt() == nil
}

func (a *attempt) lost(rec createRecord, name string) error {
	return lostError(rec.ID, name).WithHint("Platform fault, not the task's. Create again with another key")
}

// epoch is a node's epoch as the view knows it.
func (s *Server) epoch(n node.Number) int64 {
	e, _ := s.watcher.View().Find(n)
	return e.Epoch
}

// ask sends the create to the record's node.
func (a *attempt) ask(ctx context.Context) (*pb.Sandbox, error) {
	client, name, _, there := a.s.watcher.Node(a.rec.Node)
	if !there {
		return nil, a.unknown(fmt.Sprintf("node %d is gone", a.rec.Node), nil)
	}
	req := connect.NewRequest(&nodev1.CreateRequest{
		Id: string(a.rec.ID), Project: a.rec.Project, NodeEpoch: a.rec.NodeEpoch, Spec: a.wire,
		Layers: sandboxpb.FromDigests(a.layers), Config: sandboxpb.FromConfig(a.config), By: a.who.Principal,
		Digest: a.digest, ImageDigest: string(a.image),
	})
	speak(req.Header(), iam.Caller{Principal: a.who.Principal, Covers: []string{a.rec.Project}})
	asked := time.Now()
	resp, err := client.Edge.Create(ctx, req)
	if err == nil {
		return resp.Msg.GetSandbox(), nil
	}
	sent := connect.IsWireError(err) || nodeclient.Sent(err)
	ce, _ := errors.AsType[*connect.Error](err)
	worded := ce != nil && len(ce.Details()) > 0 // by the node itself, not by what lies between
	err = nodeclient.Error(err, name, changes)
	switch kind := errdefs.KindOf(err); {
	case kind == errdefs.Refused:
		if a.inherited && a.restarted(ctx, asked) {
			return nil, a.lost(a.rec, name)
		}
		// With a cause: it began and gave up. Without: it never began.
		a.spent = errdefs.From(err).Cause != ""
		return nil, refused{transient(err)}
	case unsureKinds[kind] || kind == errdefs.Internal && !worded:
		if !sent && !a.inherited {
			return nil, refused{err} // nobody has ever told that node of this id
		}
		return nil, a.unsure(ctx, name, err)
	default:
		a.drop(ctx) // the node's own word: nothing is left
		return nil, errdefs.AtStage(err, errdefs.StageStart)
	}
}

// unsureKinds are the answers after which the sandbox may exist; after any other word of the node nothing is left.
var unsureKinds = map[errdefs.Kind]bool{
	errdefs.Unavailable: true, errdefs.Unknown: true, errdefs.Canceled: true, errdefs.Deadline: true,
}

// transient makes a refusal one that is worth waiting for, unless it is for what the node cannot enforce: that does not
// pass.
func transient(err error) error {
	e := *errdefs.From(err)
	if e.Feature == "" {
		e.RetryAfter = max(e.RetryAfter, time.Second)
	}
	return &e
}

// restarted reports whether the node's epoch has risen above the record's, as a view that is newer than asked shows.
func (a *attempt) restarted(ctx context.Context, asked time.Time) bool {
	tick := time.NewTicker(50 * time.Millisecond)
	defer tick.Stop()
	for {
		e, ok := a.s.watcher.View().Find(a.rec.Node)
		if ok && e.Epoch > a.rec.NodeEpoch {
			return true
		}
		if !ok || e.SeenAt.After(asked) {
			return false
		}
		select {
		case <-tick.C:
		case <-ctx.Done():
			return false
		}
	}
}

// unsure ends a create whose node gave no sure answer. With a key the same key asks again. Without one nobody could
// find the sandbox, so it is stopped.
func (a *attempt) unsure(ctx context.Context, name string, cause error) error {
	// The node has the same deadline and may be the first to notice.
	kind := errdefs.KindOf(cause)
	late := ctx.Err() != nil || kind == errdefs.Deadline || kind == errdefs.Canceled
	stage := errdefs.StageStart
	if e, ok := errors.AsType[*errdefs.Error](cause); ok && e.Stage != "" {
		stage = e.Stage
	}
	why := "node " + name + " gave no sure answer"
	if late {
		why = "no answer in " + a.ready.String()
	}
	before := ""
	if a.refusal != "" {
		before = " (before: " + a.refusal + ")" // most likely what goes on
	}
	why += before
	if a.key != "" {
		return a.unknown(why, cause)
	}
	if err := a.undo(ctx); err != nil {
		return errdefs.New(errdefs.Unknown, "", "create: %s, sandbox %s may exist", why, a.rec.ID).
			WithHint("Stop it: sandsea stop %s, or wait for its TTL", a.rec.ID).Wrap(cause)
	}
	a.drop(ctx)
	switch {
	case errors.Is(context.Cause(ctx), context.Canceled):
		return errdefs.New(errdefs.Canceled, "", "create: the caller went away; nothing is left").Wrap(cause)
	case late:
		e := errdefs.New(errdefs.Deadline, "", "create: not ready in %s (%s)%s; nothing is left", a.ready, stage, before).
			WithField("ready_timeout_ms", a.ready.String()).WithHint("Give it more time, or see the log of node %s", name)
		return errdefs.AtStage(e.Wrap(cause), stage)
	}
	e := errdefs.New(errdefs.Unavailable, "", "create: %s (%s); nothing is left", why, stage).
		WithRetryAfter(time.Second).WithHint("Try again")
	return errdefs.AtStage(e.Wrap(cause), stage)
}

func (a *attempt) unknown(why string, cause error) error {
	e := errdefs.New(errdefs.Unknown, "", "create: %s, it may exist", why).WithField("key", "")
	if a.key != "" {
		e = e.WithHint("Ask again with the same key: --key %s", clip(a.key))
	}
	if cause != nil {
		e = e.Wrap(cause)
	}
	return e
}

// drop takes the record back after a create that left nothing. What fails here is swept later.
func (a *attempt) drop(ctx context.Context) {
	if a.rec.ID == "" {
		return
	}
	ctx, stop := context.WithTimeoutCause(context.WithoutCancel(ctx), dropLimit, errDropLimit)
	defer stop()
	ops := []store.Op{store.Delete(keys.Sandbox(a.rec.Project, string(a.rec.ID)))}
	var conds []store.Cond
	if a.key != "" {
		name := keys.CreateKey(a.rec.Project, a.key)
		conds = []store.Cond{{Key: name, ModRev: a.keyRev}}
		ops = append(ops, store.Delete(name))
	}
	if _, err := a.s.store.Txn(ctx, conds, ops, nil); err != nil {
		a.s.log.Debug("record of a failed create not removed", "sandbox", a.rec.ID, "err", err)
	}
}

// wait lets a create without room wait for its next round; false when it should not or cannot wait longer.
func (a *attempt) wait(ctx context.Context) bool {
	if a.s.waiting.Add(1) > maxWaiting {
		a.s.waiting.Add(-1)
		return false
	}
	defer a.s.waiting.Add(-1)
	// A round that is cut off by the deadline has no sure end, so none begins shortly before it.
	if end, ok := ctx.Deadline(); ok && time.Until(end) < min(a.ready/5, lastRound) {
		return false
	}
	// The rounds of all who wait are paced together, in the order in which they came.
	a.s.retries.SetLimit(rate.Limit(retryRate * max(1, len(a.s.watcher.View().Nodes))))
	timer := time.NewTimer(10*time.Millisecond + min(time.Since(a.began)/10, 200*time.Millisecond))
	defer timer.Stop()
	select {
	case <-timer.C:
	case <-ctx.Done():
		return false
	}
	return a.s.retries.Wait(ctx) == nil
}

// noRoom words the end of the waiting, with a count per reason.
func (a *attempt) noRoom(last error) error {
	e, ok := errors.AsType[*errdefs.Error](last)
	if !ok || len(a.refusals) == 0 {
		return errdefs.AtStage(last, errdefs.StageQueue) // placement's own words
	}
	if e.Feature != "" && len(a.refusals) == 1 {
		lacking := *e
		lacking.Kind = errdefs.FailedPrecondition
		return errdefs.AtStage(&lacking, errdefs.StageQueue)
	}
	stage, what := errdefs.StageQueue, "no node had room"
	if e.Stage != "" && e.Stage != errdefs.StageQueue {
		stage, what = e.Stage, "it came up on no node"
	}
	var parts []string
	for _, why := range slices.Sorted(maps.Keys(a.refusals)) {
		parts = append(parts, fmt.Sprintf("%d × %s", a.refusals[why], why))
	}
	waited := time.Since(a.began).Round(100 * time.Millisecond)
	out := errdefs.New(errdefs.Exhausted, "", "%s for %s (%s): %s", what, waited, stage, strings.Join(parts, ", ")).
		WithRetryAfter(2 * time.Second).WithHint("Try again in 2 s, or stop some: sandsea ls")
	return errdefs.AtStage(out.Wrap(last), stage)
}
