// Package watcher keeps the servers' picture of all nodes and their sandboxes.
//
// Nodes register in the store; the watcher follows each one: its transitions as a stream, its state by a poll about
// once a second. Nothing here is durable and nothing is asked of anybody else: after a restart everything is rebuilt
// from the nodes. A node that was not seen for ten seconds counts as unreachable, its sandboxes stay listed, since they
// may well run. Beside it stand the ended sandboxes of the last day, which the store remembers.
//
// Concurrency: one goroutine per node, one for the registrations, one for the ends; they share the maps under one
// mutex, which is never held across a call. Messages in the picture are never changed, only replaced, so that readers
// keep them without a copy. A subscriber reads the ring of events at its own pace and is told when it fell behind.
package watcher

import (
	"cmp"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"iter"
	"log/slog"
	"slices"
	"sync"
	"sync/atomic"
	"time"

	"connectrpc.com/connect"
	"google.golang.org/protobuf/types/known/timestamppb"

	"github.com/sandsea/sandsea/api/errdefs"
	nodev1 "github.com/sandsea/sandsea/api/node/v1"
	sandseav1 "github.com/sandsea/sandsea/api/sandsea/v1"
	"github.com/sandsea/sandsea/internal/control/nodeclient"
	"github.com/sandsea/sandsea/internal/control/placement"
	"github.com/sandsea/sandsea/internal/node"
	"github.com/sandsea/sandsea/internal/sandbox"
	"github.com/sandsea/sandsea/internal/sandboxpb"
	"github.com/sandsea/sandsea/internal/store"
	"github.com/sandsea/sandsea/internal/store/keys"
)

// Unreachable is the age at which a node counts as unreachable.
const Unreachable = placement.Stale

// EndedKept is how long ended sandboxes are shown.
const EndedKept = 24 * time.Hour

const (
	pollLeast   = time.Second
	pollMost    = 5 * time.Second
	pollLimit   = 5 * time.Second
	retryLeast  = 50 * time.Millisecond
	retryMost   = 2 * time.Second
	pruneEvery  = time.Minute
	maxRoster   = 1 << 20 // sandboxes that one node may name
	openFileTop = 1 << 20 // what a node's own refusal decides, not the view
)

// Config of a Watcher.
type Config struct {
	Store store.Store
	Nodes *nodeclient.Pool
	Log   *slog.Logger
	// Events is how many past events a subscriber can resume over; 0 means 65,536.
	Events int
}

// Watcher is the picture. Run keeps it true.
type Watcher struct {
	store store.Store
	pool  *nodeclient.Pool
	log   *slog.Logger
	view  atomic.Pointer[node.View]
	ring  *ring

	listed    chan struct{} // closed when the registrations were read once
	listOnce  sync.Once
	endsRead  chan struct{} // closed when the ended sandboxes were read once
	endsOnce  sync.Once
	followers sync.WaitGroup

	mu    sync.RWMutex
	nodes map[node.Number]*member       // guarded by mu
	ended map[string]*sandseav1.Sandbox // guarded by mu; by id
}

var (
	errPollLimit = fmt.Errorf("no answer in %s: %w", pollLimit, context.DeadlineExceeded)
	errMoved     = fmt.Errorf("the node has another address now: %w", context.Canceled)
)

// member is one node. Its fields are guarded by the watcher's mu, except the channel and what never changes.
type member struct {
	number node.Number
	client *nodeclient.Client
	stop   context.CancelCauseFunc
	first  chan struct{} // closed after the first answer or failure
	once   sync.Once

	reg         node.Registration
	state       *sandseav1.Node // nil until it answered once
	caps        node.Capabilities
	seenAt      time.Time
	incarnation string
	seq         int64
	cut         bool // the transitions behind seq are gone
	sandboxes   map[string]*sandseav1.Sandbox
	noted       map[string]time.Time // when Note took them over; a roster that was asked for before may lack them
	reachable   bool                 // the last word of the log
}

// New makes an empty picture.
func New(cfg Config) *Watcher {
	w := &Watcher{
		store: cfg.Store, pool: cfg.Nodes, log: cfg.Log, ring: newRing(cmp.Or(cfg.Events, 1<<16)),
		listed: make(chan struct{}), endsRead: make(chan struct{}),
		nodes: map[node.Number]*member{}, ended: map[string]*sandseav1.Sandbox{},
	}
	if w.log == nil {
		w.log = slog.New(slog.DiscardHandler)
	}
	w.view.Store(&node.View{})
	return w
}

// Run follows nodes and ends until ctx ends, and returns when all its goroutines have.
func (w *Watcher) Run(ctx context.Context) error {
	var wg sync.WaitGroup
	wg.Go(func() { store.Repeat(ctx, w.log, "registrations", w.followNodes) })
	wg.Go(func() { store.Repeat(ctx, w.log, "ended sandboxes", w.followEnds) })
	wg.Go(func() { w.prune(ctx) })
	wg.Wait()
	w.followers.Wait()
	return context.Cause(ctx)
}

// Ready waits until every registered node answered or failed once and the ends were read once.
func (w *Watcher) Ready(ctx context.Context) error {
	wait := func(c <-chan struct{}, what string) error {
		select {
		case <-c:
			return nil
		case <-ctx.Done():
			return fmt.Errorf("wait for %s: %w", what, context.Cause(ctx))
		}
	}
	if err := wait(w.listed, "the list of nodes"); err != nil {
		return err
	}
	w.mu.RLock()
	members := make([]*member, 0, len(w.nodes))
	for _, m := range w.nodes {
		members = append(members, m)
	}
	w.mu.RUnlock()
	for _, m := range members {
		if err := wait(m.first, fmt.Sprintf("node %d", m.number)); err != nil {
			return err
		}
	}
	return wait(w.endsRead, "the ended sandboxes")
}

func pause(ctx context.Context, d time.Duration) {
	timer := time.NewTimer(d)
	defer timer.Stop()
	select {
	case <-timer.C:
	case <-ctx.Done():
	}
}

func (w *Watcher) followNodes(ctx context.Context) error {
	rev, err := store.All(ctx, w.store, keys.Nodes, func(p store.Pair) { w.register(ctx, p) })
	if err != nil {
		return err
	}
	w.listOnce.Do(func() { close(w.listed) })
	for e, err := range w.store.Watch(ctx, keys.Nodes, rev) {
		if err != nil {
			return err
		}
		if !e.Deleted {
			w.register(ctx, e.Pair)
			continue
		}
		// The lease lapsed. The node may be cut off from the store only: whether it answers is what its follower sees.
		if n, ok := keys.ParseNode(e.Key); ok {
			w.log.Info("node registration lapsed", "node", n)
		}
	}
	return nil
}

// register takes a registration over, and starts to follow a node that is new or has moved to another address.
func (w *Watcher) register(ctx context.Context, p store.Pair) {
	n, ok := keys.ParseNode(p.Key)
	var reg node.Registration
	if err := json.Unmarshal(p.Value, &reg); !ok || err != nil || reg.Number != n {
		w.log.Warn("node registration cannot be read", "key", p.Key, "err", err)
		return
	}
	if reg.Name == "" {
		reg.Name = fmt.Sprintf("n%d", n)
	}
	client, err := w.pool.Client(reg.Address, reg.Name)
	if err != nil {
		w.log.Warn("node registration has no usable address", "node", n, "err", err)
		return
	}
	w.mu.Lock()
	m := w.nodes[n]
	if m != nil && m.client == client {
		m.reg = reg
		w.publishLocked()
		w.mu.Unlock()
		return
	}
	fctx, stop := context.WithCancelCause(ctx)
	fresh := &member{
		number: n, client: client, stop: stop, first: make(chan struct{}), reg: reg,
		sandboxes: map[string]*sandseav1.Sandbox{},
	}
	if m != nil { // moved: keep what is known until it answers from its new place
		m.stop(errMoved)
		fresh.state, fresh.caps, fresh.seenAt, fresh.sandboxes = m.state, m.caps, m.seenAt, m.sandboxes
		fresh.incarnation, fresh.seq, fresh.cut, fresh.noted = m.incarnation, m.seq, m.cut, m.noted
	}
	w.nodes[n] = fresh
	w.publishLocked()
	w.mu.Unlock()
	w.log.Info("node registered", "node", n, "name", reg.Name, "address", reg.Address, "epoch", reg.Epoch)
	w.followers.Go(func() { w.follow(fctx, fresh) })
}

// follow keeps one node's part of the picture until ctx ends.
func (w *Watcher) follow(ctx context.Context, m *member) {
	defer m.stop(nil)
	wait := retryLeast
	for ctx.Err() == nil {
		began := time.Now()
		err := w.session(ctx, m)
		m.once.Do(func() { close(m.first) })
		if ctx.Err() != nil {
			return
		}
		w.mu.Lock()
		if m.reachable {
			m.reachable = false
			w.log.Info("line to node broke", "node", m.number, "name", m.reg.Name, "err", err)
		}
		w.mu.Unlock()
		if time.Since(began) > retryMost {
			wait = retryLeast
		}
		pause(ctx, wait)
		wait = min(2*wait, retryMost)
	}
}

// session takes the roster and follows the node, from the last transition that it saw, until something breaks or a new
// roster is needed.
func (w *Watcher) session(ctx context.Context, m *member) error {
	roster, at, err := w.roster(ctx, m)
	if err != nil {
		return err
	}
	after := w.apply(m, roster, at)
	m.once.Do(func() { close(m.first) })

	ctx, cancel := context.WithCancelCause(ctx)
	defer cancel(nil)
	var wg sync.WaitGroup
	defer wg.Wait()
	wg.Go(func() { cancel(w.poll(ctx, m)) })
	defer cancel(nil) // before Wait

	stream, err := m.client.Edge.Follow(ctx, connect.NewRequest(&nodev1.FollowRequest{
		After: after, Incarnation: roster.GetIncarnation(),
	}))
	if err != nil {
		return fmt.Errorf("follow: %w", err)
	}
	defer func() { _ = stream.Close() }() // what it carried is read by then
	for stream.Receive() {
		w.transition(m, stream.Msg())
	}
	if connect.CodeOf(stream.Err()) == connect.CodeOutOfRange {
		w.mu.Lock()
		m.cut = true
		w.mu.Unlock()
	}
	if cause := context.Cause(ctx); cause != nil {
		return cause
	}
	return fmt.Errorf("follow: %w", stream.Err())
}

func (w *Watcher) roster(ctx context.Context, m *member) (*nodev1.RosterResponse, time.Time, error) {
	ctx, stop := context.WithTimeoutCause(ctx, pollLimit, errPollLimit)
	defer stop()
	at := time.Now()
	resp, err := m.client.Edge.Roster(ctx, connect.NewRequest(&nodev1.RosterRequest{}))
	if err != nil {
		return nil, at, fmt.Errorf("roster: %w", err)
	}
	r := resp.Msg
	if got := r.GetNode().GetNumber(); got != int64(m.number) {
		return nil, at, errdefs.New(errdefs.Internal, fmt.Sprintf("node %d", m.number), "answers as node %d", got)
	}
	if len(r.GetSandboxes()) > maxRoster {
		return nil, at, errdefs.New(errdefs.Internal, fmt.Sprintf("node %d", m.number), "names %d sandboxes",
			len(r.GetSandboxes()))
	}
	return r, at, nil
}

// poll refreshes the node's state. It ends with an error when the stream must be set up anew.
func (w *Watcher) poll(ctx context.Context, m *member) error {
	wait, stuck := pollLeast, int64(-1)
	for {
		pause(ctx, wait)
		if ctx.Err() != nil {
			return context.Cause(ctx)
		}
		began := time.Now()
		r, at, err := w.roster(ctx, m)
		if err != nil {
			return err
		}
		// A large roster costs both sides; it is asked for less often.
		wait = max(pollLeast, min(pollMost, 50*time.Since(began)))
		w.mu.RLock()
		seq, incarnation := m.seq, m.incarnation
		w.mu.RUnlock()
		if r.GetIncarnation() != incarnation {
			return errors.New("the edge restarted")
		}
		if r.GetSeq() > seq && seq == stuck {
			return errors.New("the stream of transitions is stuck")
		}
		stuck = seq
		w.apply(m, r, at)
	}
}

// apply takes a roster over, and gives the number of the transition after which to follow. Where the stream can go on, the
// sandboxes are only taken over when it is level with the roster, which heals whatever drifted. Where it cannot, since the
// edge restarted or keeps the transitions no longer, or this is the first word of it, subscribers are told of a gap and
// of how the sandboxes differ.
func (w *Watcher) apply(m *member, r *nodev1.RosterResponse, at time.Time) (after int64) {
	caps := capabilities(r.GetNode())
	now := make(map[string]*sandseav1.Sandbox, len(r.GetSandboxes()))
	for _, s := range r.GetSandboxes() {
		if id, err := sandbox.Parse(s.GetId()); err == nil && id.Node() == m.number {
			now[s.GetId()] = s
		}
	}
	w.mu.Lock()
	defer w.mu.Unlock()
	m.state, m.caps, m.seenAt = r.GetNode(), caps, at
	for id, when := range m.noted {
		if when.Before(at) {
			delete(m.noted, id)
		} else if s := m.sandboxes[id]; s != nil && now[id] == nil {
			now[id] = s
		}
	}
	if !m.reachable {
		m.reachable = true
		w.log.Info("node answers", "node", m.number, "name", m.reg.Name, "sandboxes", len(now))
	}
	switch {
	case m.cut || r.GetIncarnation() != m.incarnation:
		before, known := m.sandboxes, m.incarnation != ""
		m.sandboxes, m.seq, m.incarnation, m.cut = now, r.GetSeq(), r.GetIncarnation(), false
		if known || m.seq > 0 {
			w.ring.add(Event{At: timestamppb.New(at), Gap: true})
		}
		if known {
			w.tellDifferenceLocked(before, now)
		}
	case r.GetSeq() == m.seq:
		for id, s := range now {
			if old := m.sandboxes[id]; overtaken(s, old) {
				now[id] = old
			}
		}
		m.sandboxes = now
	}
	w.publishLocked()
	return m.seq
}

func (w *Watcher) tellDifferenceLocked(before, now map[string]*sandseav1.Sandbox) {
	at := timestamppb.Now()
	for id, s := range now {
		if old := before[id]; old == nil || old.GetState() != s.GetState() {
			w.ring.add(Event{At: at, What: word(s.GetState()), Sandbox: s})
		}
	}
	for id, old := range before {
		if end := w.ended[id]; end != nil && now[id] == nil && !sandboxpb.Over(old.GetState()) {
			w.ring.add(Event{At: at, What: "ended", Sandbox: end})
		}
	}
}

func word(s sandseav1.SandboxState) string {
	switch s {
	case sandseav1.SandboxState_SANDBOX_STATE_CREATING:
		return "creating"
	case sandseav1.SandboxState_SANDBOX_STATE_RUNNING:
		return "running"
	case sandseav1.SandboxState_SANDBOX_STATE_STOPPING:
		return "stopping"
	default:
		return "ended"
	}
}

func (w *Watcher) transition(m *member, e *nodev1.FollowResponse) {
	s := e.GetSandbox()
	if id, err := sandbox.Parse(s.GetId()); err != nil || id.Node() != m.number {
		return
	}
	w.mu.Lock()
	defer w.mu.Unlock()
	if e.GetSeq() <= m.seq {
		return
	}
	m.seq = e.GetSeq()
	if !overtaken(s, m.sandboxes[s.GetId()]) {
		m.sandboxes[s.GetId()] = s
	}
	w.ring.add(Event{At: e.GetAt(), What: e.GetWhat(), Sandbox: s})
}

// Note takes an answer of a node over at once, so that a server's own create is in its own list.
func (w *Watcher) Note(s *sandseav1.Sandbox) {
	id, err := sandbox.Parse(s.GetId())
	if err != nil {
		return
	}
	w.mu.Lock()
	defer w.mu.Unlock()
	m := w.nodes[id.Node()]
	if m == nil {
		return
	}
	if old := m.sandboxes[s.GetId()]; old == nil || overtaken(old, s) {
		m.sandboxes[s.GetId()] = sandboxpb.Brief(s)
		if m.noted == nil {
			m.noted = map[string]time.Time{}
		}
		m.noted[s.GetId()] = time.Now()
	}
}

// overtaken says that what a node said of a sandbox is older than what it said at another time: answers, transitions and
// rosters come by ways of their own, and who was told of an end must not be shown the way there.
func overtaken(s, by *sandseav1.Sandbox) bool {
	if by == nil {
		return false
	}
	return cmp.Or(cmp.Compare(s.GetEpoch(), by.GetEpoch()), cmp.Compare(rank(s.GetState()), rank(by.GetState()))) < 0
}

// rank orders states by time.
func rank(s sandseav1.SandboxState) int {
	if s == sandseav1.SandboxState_SANDBOX_STATE_LOST {
		return int(sandseav1.SandboxState_SANDBOX_STATE_ENDED)
	}
	return int(s)
}

// publishLocked makes the view for placement.
func (w *Watcher) publishLocked() {
	v := &node.View{Nodes: make([]node.Entry, 0, len(w.nodes))}
	now := time.Now()
	for _, m := range w.nodes {
		e := node.Entry{
			Ref:  node.Ref{Number: m.number, Epoch: max(m.reg.Epoch, m.state.GetEpoch())},
			Name: m.reg.Name, Address: m.reg.Address, Capabilities: m.caps, SeenAt: m.seenAt,
			Load: node.Load{
				Sandboxes: int(max(0, m.state.GetSandboxesRunning())), MaxSandboxes: int(max(0, m.state.GetSandboxesMax())),
				Memory: max(0, m.state.GetMemoryPromisedBytes()), CPUMillis: max(0, m.state.GetCpuMillisPromised()),
				DiskFree: max(0, m.state.GetDiskFreeBytes()),
			},
		}
		v.Nodes = append(v.Nodes, e)
		if now.Sub(m.seenAt) < Unreachable && (v.At.IsZero() || m.seenAt.Before(v.At)) {
			v.At = m.seenAt
		}
	}
	slices.SortFunc(v.Nodes, func(a, b node.Entry) int { return cmp.Compare(a.Number, b.Number) })
	w.view.Store(v)
}

// capabilities reads what a node says of itself; nonsense becomes nothing, so that placement does not choose it.
func capabilities(n *sandseav1.Node) node.Capabilities {
	c := node.Capabilities{
		Kernel: n.GetKernel(), CPUs: int(max(0, min(n.GetCpus(), 1<<20))), Memory: max(0, n.GetMemoryBytes()),
		NoFile: openFileTop,
	}
	for _, f := range n.GetFeatures() {
		c.Features = append(c.Features, node.Feature{
			Name: f.GetName(), Status: node.Status(f.GetStatus()), Mechanism: f.GetMechanism(), Fix: f.GetFix(),
		})
	}
	slices.SortFunc(c.Features, func(a, b node.Feature) int { return cmp.Compare(a.Name, b.Name) })
	return c
}

// View is the picture that placement reads.
func (w *Watcher) View() node.View { return *w.view.Load() }

// Age is how old the oldest part of the view is, of nodes that answer.
func (w *Watcher) Age(now time.Time) time.Duration {
	if at := w.view.Load().At; !at.IsZero() {
		return max(0, now.Sub(at))
	}
	return 0
}

// Node is the line to a node, its name, and whether it was seen lately.
func (w *Watcher) Node(n node.Number) (c *nodeclient.Client, name string, reachable, ok bool) {
	w.mu.RLock()
	defer w.mu.RUnlock()
	m := w.nodes[n]
	if m == nil {
		return nil, "", false, false
	}
	return m.client, m.reg.Name, time.Since(m.seenAt) < Unreachable, true
}

// Answered reports whether a node has told of its sandboxes since this watcher began.
func (w *Watcher) Answered(n node.Number) bool {
	w.mu.RLock()
	defer w.mu.RUnlock()
	m := w.nodes[n]
	return m != nil && m.state != nil
}

// Nodes describes all nodes, by number.
func (w *Watcher) Nodes() []*sandseav1.Node {
	w.mu.RLock()
	defer w.mu.RUnlock()
	out := make([]*sandseav1.Node, 0, len(w.nodes))
	for _, m := range w.nodes {
		out = append(out, w.describeLocked(m))
	}
	slices.SortFunc(out, func(a, b *sandseav1.Node) int { return cmp.Compare(a.GetNumber(), b.GetNumber()) })
	return out
}

func (w *Watcher) describeLocked(m *member) *sandseav1.Node {
	n := &sandseav1.Node{State: sandseav1.NodeState_NODE_STATE_UNREACHABLE}
	if s := m.state; s != nil {
		n = &sandseav1.Node{
			Kernel: s.GetKernel(), Version: s.GetVersion(), Cpus: s.GetCpus(), MemoryBytes: s.GetMemoryBytes(),
			DiskFreeBytes: s.GetDiskFreeBytes(), SandboxesRunning: s.GetSandboxesRunning(),
			MemoryPromisedBytes: s.GetMemoryPromisedBytes(), CpuMillisPromised: s.GetCpuMillisPromised(),
			SandboxesMax: s.GetSandboxesMax(), Features: s.GetFeatures(), State: sandseav1.NodeState_NODE_STATE_READY,
			SeenAt: timestamppb.New(m.seenAt),
		}
	}
	n.Name, n.Number, n.Epoch = m.reg.Name, int64(m.number), max(m.reg.Epoch, m.state.GetEpoch())
	if time.Since(m.seenAt) >= Unreachable {
		n.State = sandseav1.NodeState_NODE_STATE_UNREACHABLE
	}
	return n
}

// Sandbox finds a sandbox in the picture, living or ended.
func (w *Watcher) Sandbox(id string) (*sandseav1.Sandbox, bool) {
	w.mu.RLock()
	defer w.mu.RUnlock()
	if parsed, err := sandbox.Parse(id); err == nil {
		if m := w.nodes[parsed.Node()]; m != nil {
			if s := m.sandboxes[id]; s != nil {
				return w.latestLocked(s), true
			}
		}
	}
	s, ok := w.ended[id]
	return s, ok
}

// latestLocked prefers the record of an end to what a node said before it: the node may have gone since.
func (w *Watcher) latestLocked(s *sandseav1.Sandbox) *sandseav1.Sandbox {
	if end := w.ended[s.GetId()]; end != nil && !sandboxpb.Over(s.GetState()) {
		return end
	}
	return s
}

// Sandboxes gives a copy of the picture: every sandbox that a node names, and with ended those of the last day.
func (w *Watcher) Sandboxes(ended bool) []*sandseav1.Sandbox {
	w.mu.RLock()
	defer w.mu.RUnlock()
	var out []*sandseav1.Sandbox
	for _, m := range w.nodes {
		for _, s := range m.sandboxes {
			if ended || !sandboxpb.Over(s.GetState()) && w.ended[s.GetId()] == nil {
				out = append(out, w.latestLocked(s))
			}
		}
	}
	if !ended {
		return out
	}
	for id, s := range w.ended {
		if parsed, err := sandbox.Parse(id); err == nil {
			if m := w.nodes[parsed.Node()]; m != nil && m.sandboxes[id] != nil {
				continue
			}
		}
		out = append(out, s)
	}
	return out
}

func (w *Watcher) followEnds(ctx context.Context) error {
	all := map[string]*sandseav1.Sandbox{}
	rev, err := store.All(ctx, w.store, keys.Ended, func(p store.Pair) {
		if s := w.decodeEnd(p); s != nil {
			all[s.GetId()] = s
		}
	})
	if err != nil {
		return err
	}
	w.mu.Lock()
	w.ended = all
	w.mu.Unlock()
	w.endsOnce.Do(func() { close(w.endsRead) })
	for e, err := range w.store.Watch(ctx, keys.Ended, rev) {
		if err != nil {
			return err
		}
		_, id, ok := keys.ParseSandbox(e.Key)
		if !ok {
			continue
		}
		var s *sandseav1.Sandbox
		if !e.Deleted {
			s = w.decodeEnd(e.Pair)
		}
		w.mu.Lock()
		if s == nil {
			delete(w.ended, id)
		} else {
			w.ended[id] = s
		}
		w.mu.Unlock()
	}
	return nil
}

// decodeEnd reads a record whose key and value agree, and which is not older than what is shown.
func (w *Watcher) decodeEnd(p store.Pair) *sandseav1.Sandbox {
	project, id, ok := keys.ParseSandbox(p.Key)
	s, err := sandboxpb.DecodeEnded(p.Value)
	if !ok || err != nil || s.GetId() != id || s.GetProject() != project {
		w.log.Warn("record of an end cannot be read", "key", p.Key, "err", err)
		return nil
	}
	if time.Since(s.GetEnd().GetAt().AsTime()) > EndedKept {
		return nil
	}
	return s
}

func (w *Watcher) prune(ctx context.Context) {
	for ctx.Err() == nil {
		pause(ctx, pruneEvery)
		w.mu.Lock()
		for id, s := range w.ended {
			if time.Since(s.GetEnd().GetAt().AsTime()) > EndedKept {
				delete(w.ended, id)
			}
		}
		w.mu.Unlock()
	}
}

// Events yields what happens after the cursor, an event at a time; an empty cursor is now. When events were lost before
// one, or the cursor is of another run, an event with Gap and nothing else comes first. It ends with ctx's error.
func (w *Watcher) Events(ctx context.Context, cursor string) iter.Seq2[Event, error] {
	return w.ring.read(ctx, cursor)
}
