package apiserver_test

import (
	"context"
	"errors"
	"fmt"
	"io"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"connectrpc.com/connect"

	"github.com/sandsea/sandsea/api/errdefs"
	"github.com/sandsea/sandsea/api/errwire"
	pb "github.com/sandsea/sandsea/api/sandsea/v1"
	"github.com/sandsea/sandsea/internal/control/fakeedge"
	"github.com/sandsea/sandsea/internal/sandbox"
	"github.com/sandsea/sandsea/internal/store"
	"github.com/sandsea/sandsea/internal/store/etcd"
	"github.com/sandsea/sandsea/internal/store/keys"
)

func kindIs(t *testing.T, err error, want errdefs.Kind) *errdefs.Error {
	t.Helper()
	e, ok := errors.AsType[*errdefs.Error](err)
	if !ok || e.Kind != want {
		t.Fatalf("got %v, want %s", err, want)
	}
	if e.HintText() == "" {
		t.Errorf("%v says not what to do", err)
	}
	return e
}

func TestCreateFillsDefaultsAndIsSeenAtOnce(t *testing.T) {
	h := newHouse(t, 1)
	c := h.admin()
	sb := c.create(t, "")
	if id, err := sandbox.Parse(sb.GetId()); err != nil || id.Node() != 1 {
		t.Errorf("id %q, %v", sb.GetId(), err)
	}
	if sb.GetProject() != "default" || sb.GetSpec().GetLimits().GetMemoryBytes() != sandbox.DefaultMemory ||
		sb.GetSpec().GetBackend() != pb.Backend_BACKEND_CONTAINER {
		t.Errorf("got %v", sb)
	}
	if want := string(digest("py")); !slices.Equal(sb.GetLayers(), []string{want}) {
		t.Errorf("layers %v, want %s", sb.GetLayers(), want)
	}
	if l := c.list(t, &pb.ListSandboxesRequest{}); l.GetTotal() != 1 || l.GetSandboxes()[0].GetId() != sb.GetId() {
		t.Errorf("list: %v", l)
	}
	if h.stored(keys.Sandboxes) != 1 || h.stored(keys.CreateKeys) != 0 {
		t.Error("records: want one of the sandbox and none of a key")
	}
}

func TestCreateComposesBaseWorkspaceToolkits(t *testing.T) {
	h := newHouse(t, 1)
	sb, err := h.admin().tryCreate(t.Context(), &pb.SandboxSpec{
		Environment: &pb.Environment{Base: "py", Workspace: "ws", Toolkits: []string{"tools", string(digestOf("go"))}},
	}, "")
	if err != nil {
		t.Fatal(err)
	}
	want := []string{string(digest("py")), string(digest("ws")), string(digest("tools")), string(digest("go"))}
	if !slices.Equal(sb.GetLayers(), want) {
		t.Errorf("got %v, want %v", sb.GetLayers(), want)
	}
}

func TestCreateRefusesWhatCannotBe(t *testing.T) {
	h := newHouse(t, 1, func(c *fakeedge.Config) { c.Lacks = []string{"x"} })
	c := h.admin()
	for _, tc := range []struct {
		name  string
		spec  *pb.SandboxSpec
		key   string
		kind  errdefs.Kind
		field string
		text  string
	}{
		{"no spec", nil, "", errdefs.Invalid, "environment", ""},
		{
			"a misspelt image", spec(func(s *pb.SandboxSpec) { s.Environment.Image = "yp" }), "", errdefs.NotFound,
			"environment.image", "",
		},
		{
			"a near name", spec(func(s *pb.SandboxSpec) { s.Environment.Image = "tolls" }), "", errdefs.NotFound,
			"environment.image",
			`image "tolls": none. Did you mean tools? All: sandsea image ls`,
		},
		{
			"a missing toolkit", &pb.SandboxSpec{Environment: &pb.Environment{Base: "py", Toolkits: []string{"nothing"}}}, "",
			errdefs.NotFound,
			"environment.toolkits", `image "nothing": none. All: sandsea image ls`,
		},
		{
			"a digest of nothing", spec(func(s *pb.SandboxSpec) { s.Environment.Image = string(digest("none")) }), "",
			errdefs.NotFound, "environment.image", "",
		},
		{
			"half a digest", spec(func(s *pb.SandboxSpec) { s.Environment.Image = "sha256:12" }), "", errdefs.Invalid,
			"environment.image", "",
		},
		{
			"too much memory", spec(func(s *pb.SandboxSpec) { s.Limits = &pb.Limits{MemoryBytes: 64 << 30} }), "k",
			errdefs.Exhausted,
			"limits.memory_bytes", "memory 64 GiB: largest node has 23.4 GiB. Ask for less or add a node",
		},
		{
			"little memory", spec(func(s *pb.SandboxSpec) { s.Limits = &pb.Limits{MemoryBytes: -5} }), "", errdefs.Invalid,
			"limits.memory_bytes", "",
		},
		{
			"a required feature", spec(func(s *pb.SandboxSpec) { s.Require = []string{"warp"} }), "k",
			errdefs.FailedPrecondition, "require", "",
		},
		{"a long key", spec(), strings.Repeat("k", 257), errdefs.Invalid, "key", ""},
		{"a misspelt service", spec(func(s *pb.SandboxSpec) {
			s.Network = &pb.NetworkPolicy{Services: map[string]bool{"pipy": true}}
		}), "", errdefs.Invalid, "network.services", ""},
		{"a rule about nothing", spec(func(s *pb.SandboxSpec) {
			s.Network = &pb.NetworkPolicy{Phases: []*pb.NetworkPhase{{Name: "a", Rules: []*pb.NetworkRule{{}}}}}
		}), "", errdefs.Invalid, "network.phases[0].rules[0]", ""},
	} {
		t.Run(tc.name, func(t *testing.T) {
			_, err := c.tryCreateWithin(t.Context(), tc.spec, tc.key, time.Second)
			e := kindIs(t, err, tc.kind)
			if e.Field != tc.field || tc.text != "" && e.Error() != tc.text {
				t.Errorf("got field %q, %s", e.Field, e)
			}
		})
	}
	if _, err := c.sandboxes.Create(t.Context(), connect.NewRequest(&pb.CreateSandboxRequest{
		Spec:           spec(),
		ReadyTimeoutMs: -1,
	})); err == nil {
		t.Error("a negative ready_timeout_ms was taken")
	}
	if n, _ := h.edges[0].Count(); n != 0 || h.stored(keys.Sandboxes)+h.stored(keys.CreateKeys) != 0 {
		t.Error("a refused create left something")
	}
}

func TestKeyGivesTheSameSandbox(t *testing.T) {
	h := newHouse(t, 2)
	c := h.admin()
	first := c.create(t, "a/b = c")
	if again := c.create(t, "a/b = c"); again.GetId() != first.GetId() {
		t.Errorf("got %s, want %s", again.GetId(), first.GetId())
	}
	_, err := c.tryCreate(t.Context(), spec(func(s *pb.SandboxSpec) { s.Environment.Image = "go" }), "a/b = c")
	kindIs(t, err, errdefs.AlreadyExists)
	if other := c.create(t, "a/b = d"); other.GetId() == first.GetId() {
		t.Error("another key gave the same sandbox")
	}
	// Also when it has ended, and when its image is gone.
	if _, err := c.sandboxes.Stop(t.Context(), connect.NewRequest(&pb.StopSandboxRequest{Id: first.GetId()})); err != nil {
		t.Fatal(err)
	}
	for _, e := range h.edges {
		e.Forget()
	}
	if again := c.create(t, "a/b = c"); again.GetId() != first.GetId() ||
		again.GetState() != pb.SandboxState_SANDBOX_STATE_ENDED {
		t.Errorf("after its end: got %v", again)
	}
	if _, err := c.images.Delete(t.Context(), connect.NewRequest(&pb.DeleteImageRequest{
		Ref:   "py",
		Force: true,
	})); err != nil {
		t.Fatal(err)
	}
	if again := c.create(t, "a/b = c"); again.GetId() != first.GetId() {
		t.Errorf("without its image: got %v", again)
	}
	// Keys are per project.
	h.putImage("py", "py")
	inner := h.client(connect.WithInterceptors(bearer{h.token, "default/inner"}))
	if other := inner.create(t, "a/b = c"); other.GetId() == first.GetId() || other.GetProject() != "default/inner" {
		t.Errorf("another project: got %v", other)
	}
}

func TestConcurrentCreatesWithOneKeyMakeOne(t *testing.T) {
	h := newHouse(t, 3)
	c := h.admin()
	var n atomic.Int64
	for _, e := range h.edges {
		// Every third request is refused, so that the key moves while others use it.
		e.Refuse(func(string) error {
			if n.Add(1)%3 == 0 {
				return errdefs.New(errdefs.Refused, "", "start limit 48")
			}
			return nil
		})
	}
	for round := range 30 {
		var wg sync.WaitGroup
		ids := make([]string, 8)
		for i := range ids {
			wg.Go(func() {
				sb, err := c.tryCreate(t.Context(), spec(), fmt.Sprint("key", round))
				if err != nil {
					t.Errorf("create: %v", err)
					return
				}
				ids[i] = sb.GetId()
			})
		}
		wg.Wait()
		slices.Sort(ids)
		if len(slices.Compact(ids)) != 1 {
			t.Fatalf("round %d: one key made %v", round, ids)
		}
	}
	living := 0
	for _, e := range h.edges {
		n, _ := e.Count()
		living += n
	}
	if living != 30 || h.stored(keys.Sandboxes) != 30 || h.stored(keys.CreateKeys) != 30 {
		t.Errorf("%d sandboxes, %d records, %d keys, want 30 each", living, h.stored(keys.Sandboxes),
			h.stored(keys.CreateKeys))
	}
}

func TestRefusedCreateGoesToTheNextNode(t *testing.T) {
	h := newHouse(t, 4)
	for _, e := range h.edges[:3] {
		e.Refuse(func(string) error { return errdefs.New(errdefs.Refused, "", "start limit 48") })
	}
	for i := range 20 {
		sb := h.admin().create(t, fmt.Sprint("k", i))
		if sb.GetNode() != "n4" {
			t.Errorf("on %s, want n4", sb.GetNode())
		}
	}
	if h.stored(keys.Sandboxes) != 20 || h.stored(keys.CreateKeys) != 20 {
		t.Errorf("%d records and %d keys, want 20 each", h.stored(keys.Sandboxes), h.stored(keys.CreateKeys))
	}
}

func TestCreateWaitsForRoomUpToItsTimeout(t *testing.T) {
	h := newHouse(t, 2)
	var open atomic.Bool
	for _, e := range h.edges {
		e.Refuse(func(string) error {
			if open.Load() {
				return nil
			}
			return errdefs.New(errdefs.Refused, "", "start limit 48")
		})
	}
	_, err := h.admin().tryCreateWithin(t.Context(), spec(), "k", 3*time.Second)
	e := kindIs(t, err, errdefs.Exhausted)
	if e.RetryAfter == 0 || !strings.Contains(e.Msg, "× start limit 48") || !strings.Contains(e.Msg, "(queue)") {
		t.Errorf("got %v, retry after %s", e, e.RetryAfter)
	}
	if h.stored(keys.Sandboxes)+h.stored(keys.CreateKeys) != 0 {
		t.Error("records are left")
	}
	done := make(chan error, 1)
	go func() {
		_, err := h.admin().tryCreateWithin(t.Context(), spec(), "k", limit)
		done <- err
	}()
	_, asked := h.edges[0].Count()
	until(t, "the waiting create asks again", func() bool { _, n := h.edges[0].Count(); return n > asked+3 })
	open.Store(true)
	if err := <-done; err != nil {
		t.Error(err)
	}
}

func TestNodeThatDoesNotAnswerIsNeverReplaced(t *testing.T) {
	h := newHouse(t, 2)
	c := h.admin()
	var hang atomic.Bool
	hang.Store(true)
	for _, e := range h.edges {
		e.After(func(call string) error {
			if call == "create" && hang.Load() {
				return errdefs.New(errdefs.Unknown, "", "the answer is lost")
			}
			return nil
		})
	}
	_, err := c.tryCreate(t.Context(), spec(), "k-41")
	e := kindIs(t, err, errdefs.Unknown)
	if want := "Ask again with the same key: --key k-41"; e.Hint != want {
		t.Errorf("hint %q, want %q", e.Hint, want)
	}
	hang.Store(false)
	sb := c.create(t, "k-41")
	total := 0
	for _, e := range h.edges {
		n, _ := e.Count()
		total += n
	}
	if total != 1 || sb.GetState() != pb.SandboxState_SANDBOX_STATE_RUNNING {
		t.Errorf("%d sandboxes, want 1: %v", total, sb)
	}
}

func TestCreateThatNeverReachedItsNodeIsMadeByTheRetry(t *testing.T) {
	h := newHouse(t, 1)
	c := h.admin()
	var fail atomic.Bool
	fail.Store(true)
	h.edges[0].Before(func(_ context.Context, call string) error {
		if call == "create" && fail.Load() {
			return errdefs.New(errdefs.Unavailable, "", "shutting down")
		}
		return nil
	})
	_, err := c.tryCreate(t.Context(), spec(), "k")
	kindIs(t, err, errdefs.Unknown)
	if h.stored(keys.CreateKeys) != 1 {
		t.Fatal("the key was forgotten")
	}
	fail.Store(false)
	c.create(t, "k")
	if n, _ := h.edges[0].Count(); n != 1 {
		t.Errorf("%d sandboxes", n)
	}
}

func TestCreateWithoutKeyLeavesNothingWhenItsCallerGoes(t *testing.T) {
	h := newHouse(t, 1)
	release, entered := make(chan struct{}), make(chan struct{}, 1)
	var stops atomic.Int64
	h.edges[0].After(func(call string) error {
		if call == "create" {
			entered <- struct{}{}
			<-release
		}
		return nil
	})
	h.edges[0].Before(func(_ context.Context, call string) error {
		if call == "stop" {
			stops.Add(1)
		}
		return nil
	})
	ctx, cancel := context.WithCancel(t.Context())
	done := make(chan error, 1)
	go func() {
		_, err := h.admin().tryCreate(ctx, spec(), "")
		done <- err
	}()
	<-entered
	cancel()
	if err := <-done; err == nil {
		t.Error("the cancelled create succeeded")
	}
	until(t, "the sandbox is stopped", func() bool { n, _ := h.edges[0].Count(); return n == 0 && stops.Load() > 0 })
	close(release)
	until(t, "its record is gone", func() bool { return h.stored(keys.Sandboxes) == 0 })
}

func TestReadyTimeoutWithoutKeySaysThatNothingIsLeft(t *testing.T) {
	h := newHouse(t, 1)
	h.edges[0].Before(func(ctx context.Context, call string) error {
		if call == "create" {
			<-ctx.Done()
			return errdefs.New(errdefs.Canceled, "", "gone")
		}
		return nil
	})
	_, err := h.admin().tryCreateWithin(t.Context(), spec(), "", 200*time.Millisecond)
	e := kindIs(t, err, errdefs.Deadline)
	if !strings.Contains(e.Error(), "nothing is left") {
		t.Errorf("got %v", e)
	}
	_, err = h.admin().tryCreateWithin(t.Context(), spec(), "k", 200*time.Millisecond)
	if e := kindIs(t, err, errdefs.Unknown); !strings.Contains(e.Error(), "no answer in 200ms") {
		t.Errorf("with a key: got %v", e)
	}
}

// TestReadyTimeoutTellsTheRefusalBefore has a node that takes a create back, and does not answer the next one in time.
func TestReadyTimeoutTellsTheRefusalBefore(t *testing.T) {
	for _, key := range []string{"", "k"} {
		h := newHouse(t, 1)
		var tries atomic.Int64
		h.edges[0].Before(func(ctx context.Context, call string) error {
			if call != "create" {
				return nil
			}
			if tries.Add(1) == 1 {
				return errdefs.New(errdefs.Refused, "", "network: aether does not answer")
			}
			<-ctx.Done()
			return errdefs.New(errdefs.Canceled, "", "gone")
		})
		_, err := h.admin().tryCreateWithin(t.Context(), spec(), key, 4*time.Second)
		if err == nil || !strings.Contains(err.Error(), "aether does not answer") {
			t.Errorf("key %q: %v", key, err)
		}
	}
}

func TestNodesOwnRefusalFreesTheKey(t *testing.T) {
	h := newHouse(t, 1)
	c := h.admin()
	h.edges[0].Refuse(func(string) error { return errdefs.New(errdefs.FailedPrecondition, "disk", "no quota") })
	_, err := c.tryCreate(t.Context(), spec(), "k")
	kindIs(t, err, errdefs.FailedPrecondition)
	h.edges[0].Refuse(nil)
	c.create(t, "k")
}

func TestCreateThatFailedAfterItBeganIsPlacedAnewByTheRetry(t *testing.T) {
	h := newHouse(t, 1)
	c := h.admin()
	// The edge died while it built: the answer is lost, and its sweep wrote the end.
	h.edges[0].After(func(call string) error {
		if call == "create" {
			return errdefs.New(errdefs.Unknown, "", "the edge died")
		}
		return nil
	})
	_, err := c.tryCreate(t.Context(), spec(), "k")
	kindIs(t, err, errdefs.Unknown)
	page, err := h.store.Range(t.Context(), keys.Sandboxes, store.RangeOptions{})
	if err != nil || len(page.Pairs) != 1 {
		t.Fatal(page, err)
	}
	_, id, _ := keys.ParseSandbox(page.Pairs[0].Key)
	h.edges[0].FailStart(t.Context(), id, string(sandbox.CauseInfraInterrupted))
	h.edges[0].After(nil)
	sb := c.create(t, "k")
	if sb.GetId() == id || sb.GetState() != pb.SandboxState_SANDBOX_STATE_RUNNING {
		t.Errorf("got %v, want a new one", sb)
	}
	if again := c.create(t, "k"); again.GetId() != sb.GetId() {
		t.Errorf("again: got %s, want %s", again.GetId(), sb.GetId())
	}
}

func TestRebootMakesKnownKeysLost(t *testing.T) {
	h := newHouse(t, 1)
	c := h.admin()
	sb := c.create(t, "k")
	h.edges[0].Reboot()
	if err := h.edges[0].Register(t.Context()); err != nil {
		t.Fatal(err)
	}
	_, err := c.tryCreate(t.Context(), spec(), "k")
	e := kindIs(t, err, errdefs.Lost)
	if e.Cause != string(sandbox.CauseInfraLost) {
		t.Errorf("cause %q", e.Cause)
	}
	// So does every other call, before the loss is written down.
	_, err = c.processes.Run(t.Context(), connect.NewRequest(&pb.RunRequest{Id: sb.GetId()}))
	if e := kindIs(t, errwire.FromConnect(err), errdefs.Lost); e.Cause != string(sandbox.CauseInfraLost) {
		t.Errorf("run: cause %q", e.Cause)
	}
	got, err := c.get(t, sb.GetId())
	if err != nil || got.GetState() != pb.SandboxState_SANDBOX_STATE_LOST ||
		got.GetSpec().GetEnvironment().GetImage() != "py" {
		t.Errorf("get: %v, %v", got, err)
	}
	// A new create on the new epoch works, and the sweep writes the loss down, once.
	until(t, "creates work again", func() bool { _, err := c.tryCreate(t.Context(), spec(), "k2"); return err == nil })
	until(t, "the loss is written down", func() bool {
		if err := h.server.Sweep(t.Context(), time.Now()); err != nil {
			t.Fatal(err)
		}
		return h.stored(keys.Ended) == 1
	})
	if err := h.server.Sweep(t.Context(), time.Now()); err != nil || h.stored(keys.Ended) != 1 {
		t.Errorf("second sweep: %d ends, want 1, %v", h.stored(keys.Ended), err)
	}
	until(t, "commands say that it is lost", func() bool {
		_, err = c.processes.Run(t.Context(), connect.NewRequest(&pb.RunRequest{Id: sb.GetId()}))
		return errors.Is(errwire.FromConnect(err), errdefs.Lost)
	})
}

func TestStoreAwayMakesCreatesUnavailableAndNothingElse(t *testing.T) {
	h := newHouse(t, 1)
	c := h.admin()
	sb := c.create(t, "")
	h.mem.SetAway(true)
	began := time.Now()
	_, err := c.tryCreate(t.Context(), spec(), "k")
	kindIs(t, err, errdefs.Unavailable)
	if took := time.Since(began); took > limit { // it does not wait for its 30 s
		t.Errorf("took %s", took)
	}
	if _, err := c.processes.Run(t.Context(), connect.NewRequest(&pb.RunRequest{Id: sb.GetId()})); err != nil {
		t.Errorf("run: %v", err)
	}
	if _, err := c.get(t, sb.GetId()); err != nil {
		t.Errorf("get: %v", err)
	}
	if l := c.list(t, &pb.ListSandboxesRequest{}); l.GetTotal() != 1 {
		t.Errorf("list: %v", l)
	}
	h.mem.SetAway(false)
	c.create(t, "k")
}

func TestLostAnswerOfTheStoreIsUnknownAndTheRetryMakesOne(t *testing.T) {
	h := newHouse(t, 1)
	c := h.admin()
	h.mem.LoseAnswers(1)
	_, err := c.tryCreate(t.Context(), spec(), "k")
	kindIs(t, err, errdefs.Unknown)
	c.create(t, "k")
	if n, _ := h.edges[0].Count(); n != 1 {
		t.Errorf("%d sandboxes, want 1", n)
	}
	h.mem.LoseAnswers(1)
	_, err = c.tryCreate(t.Context(), spec(), "")
	kindIs(t, err, errdefs.Unavailable)
	if n, _ := h.edges[0].Count(); n != 1 {
		t.Errorf("%d sandboxes, want 1: a create without a sure record asked a node", n)
	}
}

func TestCreateBatch(t *testing.T) {
	h := newHouse(t, 2)
	c := h.admin()
	batch := func(count int32, key string) (map[int32]*pb.CreateBatchResponse, error) {
		stream, err := c.sandboxes.CreateBatch(t.Context(), connect.NewRequest(&pb.CreateBatchRequest{
			Spec: spec(), Count: count, Key: key,
		}))
		if err != nil {
			return nil, err
		}
		defer stream.Close()
		out := map[int32]*pb.CreateBatchResponse{}
		for stream.Receive() {
			if out[stream.Msg().GetIndex()] != nil {
				t.Errorf("two results for %d", stream.Msg().GetIndex())
			}
			out[stream.Msg().GetIndex()] = stream.Msg()
		}
		return out, errwire.FromConnect(stream.Err())
	}
	first, err := batch(300, "job")
	if err != nil || len(first) != 300 {
		t.Fatalf("%d results, %v", len(first), err)
	}
	again, err := batch(300, "job")
	if err != nil {
		t.Fatal(err)
	}
	for i, r := range first {
		if r.GetSandbox().GetId() == "" || r.GetSandbox().GetId() != again[i].GetSandbox().GetId() {
			t.Fatalf("item %d: %v, again %v", i, r, again[i])
		}
	}
	for _, n := range []int32{0, -1, 10001} {
		_, err := batch(n, "")
		kindIs(t, err, errdefs.Invalid)
	}
	var n atomic.Int64
	for _, e := range h.edges {
		e.Refuse(func(string) error {
			if n.Add(1)%2 == 0 {
				return errdefs.New(errdefs.FailedPrecondition, "disk", "no quota")
			}
			return nil
		})
	}
	mixed, err := batch(20, "")
	failed := 0
	for _, r := range mixed {
		if r.GetError() != nil {
			failed++
			if r.GetMessage() != "disk: no quota. See its state: sandsea inspect" ||
				r.GetError().GetKind() != "failed_precondition" {
				t.Errorf("got %v", r)
			}
		}
	}
	if err != nil || len(mixed) != 20 || failed == 0 || failed == 20 {
		t.Errorf("%d results, %d failed, %v", len(mixed), failed, err)
	}
}

func TestTheTimeOfABatchIsThatOfAllItsItems(t *testing.T) {
	h := newHouse(t, 1)
	c := h.admin()
	h.edges[0].Refuse(func(string) error { return errdefs.New(errdefs.Refused, "", "full") })
	begun := time.Now()
	stream, err := c.sandboxes.CreateBatch(t.Context(), connect.NewRequest(&pb.CreateBatchRequest{
		Spec: spec(), Count: 480, ReadyTimeoutMs: 1000,
	}))
	if err != nil {
		t.Fatal(err)
	}
	defer stream.Close()
	n := 0
	for stream.Receive() {
		if stream.Msg().GetError() == nil {
			t.Errorf("item %d was made", stream.Msg().GetIndex())
		}
		n++
	}
	// One turn after another, each with a second of its own, would take ten seconds and more.
	if took := time.Since(begun); n != 480 || stream.Err() != nil || took > 8*time.Second {
		t.Errorf("%d results in %v, %v", n, took, stream.Err())
	}
}

func TestStopMany(t *testing.T) {
	h := newHouse(t, 2)
	c := h.admin()
	var ids []string
	for i := range 10 {
		sb, err := c.tryCreate(t.Context(), spec(func(s *pb.SandboxSpec) {
			s.Labels = map[string]string{"job": fmt.Sprint(i % 2)}
		}), "")
		if err != nil {
			t.Fatal(err)
		}
		ids = append(ids, sb.GetId())
	}
	stop := func(r *pb.StopManyRequest) (n int, failed []string, err error) {
		stream, err := c.sandboxes.StopMany(t.Context(), connect.NewRequest(r))
		if err != nil {
			return 0, nil, err
		}
		defer stream.Close()
		for stream.Receive() {
			if n++; stream.Msg().GetError() != nil {
				failed = append(failed, stream.Msg().GetMessage())
			}
		}
		return n, failed, errwire.FromConnect(stream.Err())
	}
	if n, failed, err := stop(&pb.StopManyRequest{Labels: map[string]string{"job": "1"}}); n != 5 || failed != nil ||
		err != nil {
		t.Errorf("by label: %d, %v, %v", n, failed, err)
	}
	ghost, err := sandbox.Mint(1, strings.NewReader(strings.Repeat("x", 64)))
	if err != nil {
		t.Fatal(err)
	}
	n, failed, err := stop(&pb.StopManyRequest{Ids: append(ids, string(ghost), ids[0])})
	if n != 11 || len(failed) != 1 || err != nil {
		t.Errorf("by id: %d, %v, %v", n, failed, err)
	}
	for _, r := range []*pb.StopManyRequest{
		{},
		{Ids: ids, Labels: map[string]string{"a": "b"}},
		{Ids: slices.Repeat([]string{"x"}, 10001)},
	} {
		_, _, err := stop(r)
		kindIs(t, err, errdefs.Invalid)
	}
}

func BenchmarkCreate(b *testing.B) {
	for _, name := range []string{"mem", "etcd"} {
		b.Run(name, func(b *testing.B) {
			var h *house
			if name == "mem" {
				h = newHouse(b, 1, roomy)
			} else {
				s, err := etcd.Open(b.Context(), etcd.Config{Dir: b.TempDir()})
				if err != nil {
					b.Fatal(err)
				}
				b.Cleanup(func() { _ = s.Close() })
				h = newHouseOn(b, s, 1, roomy)
			}
			c := h.admin()
			var mu sync.Mutex
			var took []time.Duration
			b.SetParallelism(16)
			b.ResetTimer()
			b.RunParallel(func(p *testing.PB) {
				for p.Next() {
					began := time.Now()
					if _, err := c.tryCreate(b.Context(), spec(), ""); err != nil && !errors.Is(err, io.EOF) {
						b.Error(err)
					}
					d := time.Since(began)
					mu.Lock()
					took = append(took, d)
					mu.Unlock()
				}
			})
			b.StopTimer()
			slices.Sort(took)
			b.ReportMetric(float64(b.N)/b.Elapsed().Seconds(), "creates/s")
			b.ReportMetric(float64(took[len(took)*99/100].Microseconds())/1000, "p99-ms")
			b.ReportMetric(float64(took[len(took)/2].Microseconds())/1000, "p50-ms")
		})
	}
}

func roomy(c *fakeedge.Config) { c.Max = 10_000_000 }
