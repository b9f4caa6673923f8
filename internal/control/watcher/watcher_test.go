package watcher_test

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	"connectrpc.com/connect"
	"google.golang.org/protobuf/types/known/timestamppb"

	nodev1 "github.com/sandsea/sandsea/api/node/v1"
	pb "github.com/sandsea/sandsea/api/sandsea/v1"
	"github.com/sandsea/sandsea/internal/control/fakeedge"
	"github.com/sandsea/sandsea/internal/control/nodeclient"
	"github.com/sandsea/sandsea/internal/control/watcher"
	"github.com/sandsea/sandsea/internal/node"
	"github.com/sandsea/sandsea/internal/sandbox"
	"github.com/sandsea/sandsea/internal/sandboxpb"
	"github.com/sandsea/sandsea/internal/store"
	"github.com/sandsea/sandsea/internal/store/keys"
	"github.com/sandsea/sandsea/internal/store/mem"
	"github.com/sandsea/sandsea/internal/testkit/wait"
)

const limit = 20 * time.Second

func until(t *testing.T, what string, cond func() bool) {
	t.Helper()
	wait.Until(t, limit, cond, what)
}

type world struct {
	store *mem.Store
	edges []*fakeedge.Edge
	stops []func()
	pool  *nodeclient.Pool
}

func newWorld(t *testing.T, n int) *world {
	t.Helper()
	w := &world{store: mem.New(mem.Config{}), pool: nodeclient.NewPool(nil)}
	dir := t.TempDir()
	for i := range n {
		e := fakeedge.New(fakeedge.Config{
			Number: node.Number(i + 1), Socket: filepath.Join(dir, fmt.Sprintf("%d.sock", i+1)), Store: w.store,
		})
		stop, err := e.Serve()
		if err != nil {
			t.Fatal(err)
		}
		t.Cleanup(stop)
		w.edges, w.stops = append(w.edges, e), append(w.stops, stop)
	}
	t.Cleanup(w.pool.Close)
	return w
}

// watch starts a watcher and waits until it is ready.
func (w *world) watch(t *testing.T, events int) *watcher.Watcher {
	t.Helper()
	wt := watcher.New(watcher.Config{Store: w.store, Nodes: w.pool, Events: events})
	ctx, stop := context.WithCancel(context.Background())
	var wg sync.WaitGroup
	wg.Go(func() { _ = wt.Run(ctx) })
	t.Cleanup(func() { stop(); wg.Wait() })
	ready, done := context.WithTimeout(ctx, limit)
	defer done()
	if err := wt.Ready(ready); err != nil {
		t.Fatal(err)
	}
	return wt
}

type zeros struct{ n byte }

func (z *zeros) Read(p []byte) (int, error) {
	for i := range p {
		z.n++
		p[i] = z.n
	}
	return len(p), nil
}

var random = &zeros{}

func (w *world) create(t *testing.T, i int) string {
	t.Helper()
	id, err := sandbox.Mint(node.Number(i+1), random)
	if err != nil {
		t.Fatal(err)
	}
	c, err := w.pool.Client(fmt.Sprintf("unix:%s", w.socket(t, i)), "")
	if err != nil {
		t.Fatal(err)
	}
	if _, err := c.Edge.Create(t.Context(), connect.NewRequest(&nodev1.CreateRequest{
		Id: string(id), Project: "default", NodeEpoch: 1 << 30, Spec: &pb.SandboxSpec{},
	})); err != nil {
		t.Fatal(err)
	}
	return string(id)
}

func (w *world) socket(t *testing.T, i int) string {
	t.Helper()
	page, err := w.store.Range(t.Context(), keys.Node(node.Number(i+1)), store.RangeOptions{})
	if err != nil || len(page.Pairs) != 1 {
		t.Fatal(err)
	}
	var reg node.Registration
	if err := json.Unmarshal(page.Pairs[0].Value, &reg); err != nil {
		t.Fatal(err)
	}
	return strings.TrimPrefix(reg.Address, "unix:")
}

func TestPictureIsBuiltFromTheNodesAloneAndFollowsThem(t *testing.T) {
	w := newWorld(t, 3)
	var ids []string
	for i := range 9 {
		ids = append(ids, w.create(t, i%3))
	}
	for range 2 { // a second watcher, as after a restart, sees the same
		wt := w.watch(t, 0)
		v := wt.View()
		if len(v.Nodes) != 3 || v.Nodes[2].Number != 3 || v.Nodes[0].Capabilities.CPUs != 2 ||
			v.Nodes[0].Load.Sandboxes == 0 ||
			!v.Nodes[0].Capabilities.Enforces(node.FeatureKill) || v.At.IsZero() {
			t.Errorf("view: %+v", v)
		}
		if got := len(wt.Sandboxes(false)); got != len(ids) {
			t.Errorf("%d sandboxes, want %d", got, len(ids))
		}
		ids = append(ids, w.create(t, 0))
		until(t, "the new one is seen", func() bool { _, ok := wt.Sandbox(ids[len(ids)-1]); return ok })
		if age := wt.Age(time.Now()); age < 0 || age > 3*time.Second {
			t.Errorf("age %s", age)
		}
	}
}

func TestEventsSurviveAnEdgesRestart(t *testing.T) {
	w := newWorld(t, 1)
	first := w.create(t, 0)
	wt := w.watch(t, 0)
	ctx, stop := context.WithTimeout(t.Context(), limit)
	defer stop()
	var mu sync.Mutex
	var seen []string
	started := make(chan struct{})
	var once sync.Once
	var wg sync.WaitGroup
	wg.Go(func() {
		for e, err := range wt.Events(ctx, "other-1") {
			if err != nil {
				return
			}
			once.Do(func() { close(started) })
			if e.Gap {
				continue
			}
			mu.Lock()
			seen = append(seen, e.What+" "+e.Sandbox.GetId())
			mu.Unlock()
		}
	})
	<-started
	has := func(what string) func() bool {
		return func() bool { mu.Lock(); defer mu.Unlock(); return slices.Contains(seen, what) }
	}
	// What happens while the edge's stream is being set up anew is told from the roster.
	w.edges[0].Restart()
	second := w.create(t, 0)
	if _, err := w.edges[0].End(t.Context(), first, "oom", "platform"); err != nil {
		t.Fatal(err)
	}
	until(t, "the new sandbox is told", has("running "+second))
	until(t, "the end is told", has("ended "+first))
	stop()
	wg.Wait()
	mu.Lock()
	defer mu.Unlock()
	slices.Sort(seen)
	if n := len(seen); n != len(slices.Compact(seen)) {
		t.Errorf("told twice: %v", seen)
	}
}

// told collects what a subscriber is told from now on, until it is asked for.
func told(t *testing.T, wt *watcher.Watcher) (seen func() []string) {
	t.Helper()
	ctx, stop := context.WithCancel(t.Context())
	var mu sync.Mutex
	var all []string
	started := make(chan struct{})
	var wg sync.WaitGroup
	wg.Go(func() {
		first := true
		for e, err := range wt.Events(ctx, "other-1") {
			switch {
			case err != nil:
				return
			case first: // the gap of a foreign cursor
				first = false
				close(started)
				continue
			}
			what := "gap"
			if !e.Gap {
				what = e.What + " " + e.Sandbox.GetId()
			}
			mu.Lock()
			all = append(all, what)
			mu.Unlock()
		}
	})
	t.Cleanup(func() { stop(); wg.Wait() })
	<-started
	return func() []string {
		mu.Lock()
		defer mu.Unlock()
		return slices.Clone(all)
	}
}

// whole creates a sandbox on an edge whose line is broken, extends and ends it, and makes the edge forget it.
func whole(t *testing.T, e *fakeedge.Edge) []string {
	t.Helper()
	id, err := sandbox.Mint(1, random)
	if err != nil {
		t.Fatal(err)
	}
	if _, err := e.Create(t.Context(), connect.NewRequest(&nodev1.CreateRequest{
		Id: string(id), Project: "default", NodeEpoch: 1 << 30, Spec: &pb.SandboxSpec{},
	})); err != nil {
		t.Fatal(err)
	}
	extend := connect.NewRequest(&nodev1.ExtendTTLRequest{Id: string(id), TtlMs: time.Hour.Milliseconds()})
	extend.Header().Set(sandboxpb.ProjectsHeader, "default")
	if _, err := e.ExtendTTL(t.Context(), extend); err != nil {
		t.Fatal(err)
	}
	if _, err := e.End(t.Context(), string(id), "stopped", "user"); err != nil {
		t.Fatal(err)
	}
	e.Forget()
	return []string{"running " + string(id), "ttl_extended " + string(id), "ended " + string(id)}
}

func TestWhatHappensWhileTheLineIsBrokenIsTold(t *testing.T) {
	w := newWorld(t, 1)
	first := w.create(t, 0)
	wt := w.watch(t, 0)
	seen := told(t, wt)
	w.stops[0]()
	want := whole(t, w.edges[0])
	stop, err := w.edges[0].Serve()
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(stop)
	if _, err := w.edges[0].End(t.Context(), first, "oom", "platform"); err != nil {
		t.Fatal(err)
	}
	want = append(want, "ended "+first)
	until(t, "the last end is told", func() bool { return slices.Contains(seen(), "ended "+first) })
	if got := seen(); !slices.Equal(slices.DeleteFunc(got, func(s string) bool { return strings.HasPrefix(s, "creating") }), want) {
		t.Errorf("got %v, want %v", got, want)
	}
}

func TestWhatAnEdgeCannotTellAnyMoreIsAGap(t *testing.T) {
	for name, lose := range map[string]func(*fakeedge.Edge){
		"it restarted":               (*fakeedge.Edge).Restart,
		"it keeps no transitions":    (*fakeedge.Edge).DropEvents,
		"it restarted and forgot it": func(e *fakeedge.Edge) { e.Restart(); e.Forget() },
	} {
		t.Run(name, func(t *testing.T) {
			w := newWorld(t, 1)
			wt := w.watch(t, 0)
			seen := told(t, wt)
			w.stops[0]()
			whole(t, w.edges[0])
			lose(w.edges[0])
			stop, err := w.edges[0].Serve()
			if err != nil {
				t.Fatal(err)
			}
			t.Cleanup(stop)
			until(t, "the gap is told", func() bool { return slices.Contains(seen(), "gap") })
		})
	}
}

func TestANodeThatAppearsWithAPastIsAGap(t *testing.T) {
	w := newWorld(t, 1)
	wt := watcher.New(watcher.Config{Store: w.store, Nodes: w.pool})
	seen := told(t, wt)
	whole(t, w.edges[0])
	ctx, stop := context.WithCancel(context.Background())
	var wg sync.WaitGroup
	wg.Go(func() { _ = wt.Run(ctx) })
	t.Cleanup(func() { stop(); wg.Wait() })
	until(t, "the gap is told", func() bool { return slices.Contains(seen(), "gap") })
}

func TestNodeThatStaysAwayIsUnreachableAndKeepsItsSandboxes(t *testing.T) {
	w := newWorld(t, 2)
	id := w.create(t, 1)
	wt := w.watch(t, 0)
	var away atomic.Bool
	away.Store(true)
	w.edges[1].Before(func(context.Context, string) error {
		if away.Load() {
			return errors.New("away")
		}
		return nil
	})
	// The lease lapses too.
	if _, err := w.store.Txn(t.Context(), nil, []store.Op{store.Delete(keys.Node(2))}, nil); err != nil {
		t.Fatal(err)
	}
	wait.Until(t, watcher.Unreachable+limit, func() bool {
		_, _, reachable, ok := wt.Node(2)
		return ok && !reachable
	}, "the node counts as unreachable")
	if n := wt.Nodes()[1]; n.GetState() != pb.NodeState_NODE_STATE_UNREACHABLE {
		t.Errorf("got %v", n)
	}
	if _, ok := wt.Sandbox(id); !ok {
		t.Error("its sandbox is no longer listed")
	}
	if n := wt.Nodes()[0]; n.GetState() != pb.NodeState_NODE_STATE_READY {
		t.Errorf("the other one: %v", n)
	}
	away.Store(false)
	until(t, "the node is back", func() bool { _, _, reachable, _ := wt.Node(2); return reachable })
}

func TestForeignAndBrokenWordsOfNodesAreIgnored(t *testing.T) {
	w := newWorld(t, 1)
	put := func(key string, value any) {
		t.Helper()
		b, err := json.Marshal(value)
		if err != nil {
			t.Fatal(err)
		}
		if _, err := w.store.Txn(t.Context(), nil, []store.Op{store.Put(key, b)}, nil); err != nil {
			t.Fatal(err)
		}
	}
	put(keys.Nodes+"x", map[string]any{"number": 5, "address": "unix:/x"})
	put(keys.Node(6), map[string]any{"number": 7, "address": "unix:/x"})
	put(keys.Node(8), map[string]any{"number": 8, "address": "nonsense"})
	put(keys.Node(9), "no object")
	// A node that answers under another one's number.
	put(keys.Node(10), map[string]any{"number": 10, "address": "unix:" + w.socket(t, 0)})
	put(keys.EndedSandbox("default", "s123"), map[string]any{"id": "another"})
	wt := w.watch(t, 0)
	var numbers []node.Number
	for _, e := range wt.View().Nodes {
		if !e.SeenAt.IsZero() {
			numbers = append(numbers, e.Number)
		}
	}
	if !slices.Equal(numbers, []node.Number{1}) || len(wt.Sandboxes(true)) != 0 {
		t.Errorf("nodes %v, sandboxes %v", numbers, wt.Sandboxes(true))
	}
}

func TestRegistrationOfALaterEpochReachesTheView(t *testing.T) {
	w := newWorld(t, 1)
	wt := w.watch(t, 0)
	w.edges[0].Reboot()
	if err := w.edges[0].Register(t.Context()); err != nil {
		t.Fatal(err)
	}
	until(t, "the epoch rises", func() bool { return wt.View().Nodes[0].Epoch == 2 })
}

func TestSlowReaderIsToldOfItsGap(t *testing.T) {
	w := newWorld(t, 1)
	wt := w.watch(t, 8)
	told := make(chan string, 1)
	ctx, stop := context.WithTimeout(t.Context(), limit)
	defer stop()
	release := make(chan struct{})
	go func() {
		gaps, events := 0, 0
		for e, err := range wt.Events(ctx, "other-1") {
			if err != nil {
				told <- err.Error()
				return
			}
			if e.Gap {
				gaps++
				if gaps == 1 {
					told <- "subscribed"
					<-release
				}
				continue
			}
			if events++; events == 8 {
				told <- fmt.Sprintf("%d gaps", gaps)
				return
			}
		}
	}()
	if got := <-told; got != "subscribed" {
		t.Fatal(got)
	}
	var last string
	for range 20 {
		last = w.create(t, 0)
	}
	until(t, "all are seen", func() bool { _, ok := wt.Sandbox(last); return ok })
	close(release)
	if got := <-told; got != "2 gaps" {
		t.Errorf("got %s, want 2 gaps: the foreign cursor and the lost events", got)
	}
}

func TestEventsEndWithTheirContext(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		wt := watcher.New(watcher.Config{})
		ctx, stop := context.WithTimeoutCause(t.Context(), time.Minute, errors.New("enough"))
		defer stop()
		began := time.Now()
		for _, err := range wt.Events(ctx, "") {
			if err == nil || err.Error() != "enough" || time.Since(began) != time.Minute {
				t.Errorf("got %v after %s", err, time.Since(began))
			}
		}
	})
}

// A node that ended its sandboxes and went, as sandsea down does, has told the store and nobody else.
func TestTheRecordOfAnEndIsNewerThanWhatTheNodeLastSaid(t *testing.T) {
	w := newWorld(t, 1)
	id := w.create(t, 0)
	wt := w.watch(t, 0)
	if sb, ok := wt.Sandbox(id); !ok || sandboxpb.Over(sb.GetState()) {
		t.Fatalf("%v, %v", sb, ok)
	}
	value, err := sandboxpb.EncodeEnded(&pb.Sandbox{
		Id: id, Project: "default", State: pb.SandboxState_SANDBOX_STATE_ENDED,
		End: &pb.End{Cause: "stopped", At: timestamppb.Now()},
	})
	if err != nil {
		t.Fatal(err)
	}
	if _, err := w.store.Txn(t.Context(), nil, []store.Op{store.Put(keys.EndedSandbox("default", id), value)}, nil); err != nil {
		t.Fatal(err)
	}
	until(t, "it shows as ended", func() bool {
		sb, ok := wt.Sandbox(id)
		all := wt.Sandboxes(true)
		return ok && sandboxpb.Over(sb.GetState()) && len(all) == 1 && sandboxpb.Over(all[0].GetState()) && len(wt.Sandboxes(false)) == 0
	})
}
