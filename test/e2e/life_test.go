package e2e

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"strings"
	"testing"
	"time"

	"connectrpc.com/connect"
	"golang.org/x/sync/errgroup"

	"github.com/sandsea/sandsea/api/errdefs"
	sandseav1 "github.com/sandsea/sandsea/api/sandsea/v1"
	"github.com/sandsea/sandsea/client"
	"github.com/sandsea/sandsea/internal/testkit/wait"
)

// labelled gives the sandbox labels.
func labelled(labels map[string]string) func(*sandseav1.SandboxSpec) {
	return func(s *sandseav1.SandboxSpec) { s.Labels = labels }
}

// list collects the ids of a listing.
func list(t testing.TB, c *client.Client, req *sandseav1.ListSandboxesRequest) []string {
	t.Helper()
	var ids []string
	for sb, err := range c.List(within(t, 20*time.Second), req) {
		if err != nil {
			t.Fatalf("list: %v", err)
		}
		ids = append(ids, sb.GetId())
	}
	return ids
}

// ended waits for the end of a sandbox and gives it.
func ended(t testing.TB, sb *client.Sandbox, limit time.Duration) *sandseav1.End {
	t.Helper()
	var last *sandseav1.Sandbox
	wait.Until(t, limit, func() bool {
		last = info(t, sb)
		return last.GetState() == sandseav1.SandboxState_SANDBOX_STATE_ENDED
	}, "the sandbox has ended")
	return last.GetEnd()
}

func TestASandboxIsCreatedFoundListedAndStopped(t *testing.T) {
	t.Parallel()
	s := serve(t)
	label := map[string]string{"e2e": fmt.Sprint(time.Now().UnixNano()), "task.name": "hello-world__bZZeEkw__verifier"}
	sb := open(t, labelled(label), func(s *sandseav1.SandboxSpec) {
		s.Limits.CpuMillis, s.Limits.Pids, s.Limits.DiskBytes = 1500, 77, 64<<20
	})
	i := info(t, sb)
	if i.GetId() != sb.ID || len(sb.ID) != 27 || i.GetState() != sandseav1.SandboxState_SANDBOX_STATE_RUNNING {
		t.Errorf("got %v", i)
	}
	l := i.GetSpec().GetLimits()
	if l.GetCpuMillis() != 1500 || l.GetPids() != 77 || l.GetDiskBytes() != 64<<20 || l.GetMemoryBytes() != 128<<20 {
		t.Errorf("limits in force %v", l)
	}
	if l.GetOpenFiles() == 0 || l.GetOutputBytes() == 0 {
		t.Errorf("defaults are not shown: %v", l)
	}
	mechanisms := map[string]string{}
	for _, e := range i.GetEnforcement() {
		mechanisms[e.GetName()] = e.GetMechanism()
	}
	for _, want := range []string{
		"limit.memory", "limit.cpu", "limit.pids", "limit.disk", "limit.open_files", "limit.output", "userns", "seccomp",
		"network", "layers",
	} {
		if mechanisms[want] == "" {
			t.Errorf("no mechanism of %s in %v", want, mechanisms)
		}
	}
	if len(i.GetLayers()) != 1 || i.GetExpiresAt().AsTime().Sub(i.GetCreatedAt().AsTime()).Round(time.Minute) != 24*time.Hour {
		t.Errorf("layers %v, created %v, expires %v", i.GetLayers(), i.GetCreatedAt().AsTime(), i.GetExpiresAt().AsTime())
	}
	wait.Until(t, 20*time.Second, func() bool {
		return slices.Equal(list(t, s.Client, &sandseav1.ListSandboxesRequest{Labels: label}), []string{sb.ID})
	}, "the watcher's view shows the sandbox")
	if got, err := s.Client.Resolve(within(t, 10*time.Second), sb.ID[:8]); err != nil || got != sb.ID {
		t.Errorf("its first letters give %q, %v", got, err)
	}

	if err := sb.Stop(within(t, 20*time.Second)); err != nil {
		t.Fatal(err)
	}
	if i = info(t, sb); i.GetState() != sandseav1.SandboxState_SANDBOX_STATE_ENDED || i.GetEnd().GetCause() != "stopped" ||
		!strings.Contains(i.GetEnd().GetBy(), "admin") {
		t.Errorf("after the stop: %v", i)
	}
	if err := sb.Stop(within(t, 20*time.Second)); err != nil {
		t.Errorf("a second stop: %v", err)
	}
	wait.Until(t, 20*time.Second, func() bool {
		return len(list(t, s.Client, &sandseav1.ListSandboxesRequest{Labels: label})) == 0
	}, "the listing has lost the ended sandbox")
	if got := list(t, s.Client, &sandseav1.ListSandboxesRequest{Labels: label, All: true}); !slices.Equal(got, []string{sb.ID}) {
		t.Errorf("with ended ones: %v", got)
	}
}

func TestCallsForASandboxThatHasEndedSayWhyItEnded(t *testing.T) {
	t.Parallel()
	sb := open(t)
	res := run(t, sb, client.Shell("echo kept"))
	if err := sb.Stop(within(t, 20*time.Second)); err != nil {
		t.Fatal(err)
	}
	ctx := within(t, 20*time.Second)
	_, runErr := sb.Run(ctx, client.Argv("true"))
	_, statErr := sb.Stat(ctx, &sandseav1.StatFileRequest{Path: "/"})
	for call, err := range map[string]error{"run": runErr, "stat": statErr, "extend": sb.ExtendTTL(ctx, time.Hour)} {
		e, ok := errors.AsType[*errdefs.Error](err)
		if !ok || e.Kind != errdefs.FailedPrecondition || e.Cause != "stopped" {
			t.Errorf("%s: %v", call, err)
		}
	}
	// What was recorded stays readable.
	out, last := attach(t, sb, &sandseav1.AttachRequest{Number: res.GetNumber()})
	if string(out[sandseav1.Stream_STREAM_STDOUT]) != "kept\n" || last.GetResult().GetExitCode() != 0 {
		t.Errorf("recorded %q, %v", out, last)
	}
}

func TestAnIdThatIsNoneIsInvalidAndOneThatNobodyHasIsNotFound(t *testing.T) {
	t.Parallel()
	s := serve(t)
	sb := open(t)
	ctx := within(t, 20*time.Second)
	for id, want := range map[string]errdefs.Kind{
		"":                            errdefs.Invalid,
		"nonsense":                    errdefs.Invalid,
		sb.ID[:26]:                    errdefs.Invalid,
		sb.ID + "/../x":               errdefs.Invalid,
		strings.ToUpper(sb.ID):        errdefs.Invalid,
		"s" + strings.Repeat("0", 26): errdefs.NotFound,
	} {
		h := s.Client.Sandbox(id)
		_, err := h.Info(ctx)
		_, runErr := h.Run(ctx, client.Argv("true"))
		for call, err := range map[string]error{"get": err, "run": runErr, "stop": h.Stop(ctx)} {
			if kind := errdefs.KindOf(err); kind != want && !(want == errdefs.NotFound && kind == errdefs.Invalid) {
				t.Errorf("%s of %q: %v", call, id, err)
			}
		}
	}
}

func TestOneKeyGivesOneSandbox(t *testing.T) {
	t.Parallel()
	s := serve(t)
	ctx := within(t, 60*time.Second)
	key := fmt.Sprintf("%s-%d", t.Name(), time.Now().UnixNano())
	ids := make([]string, 8)
	var g errgroup.Group
	for i := range ids {
		g.Go(func() error {
			sb, err := s.Client.Create(ctx, spec(), key)
			if err != nil {
				return err
			}
			ids[i] = sb.ID
			return nil
		})
	}
	err := g.Wait()
	slices.Sort(ids)
	if ids = slices.Compact(ids); err != nil || len(ids) != 1 {
		t.Fatalf("ids %v, %v", ids, err)
	}
	sb := s.Client.Sandbox(ids[0])
	t.Cleanup(func() { _ = sb.Stop(context.WithoutCancel(ctx)) })
	_, err = s.Client.Create(ctx, spec(func(s *sandseav1.SandboxSpec) { s.Limits.Pids = 99 }), key)
	if !errors.Is(err, errdefs.AlreadyExists) {
		t.Errorf("another request under the key: %v", err)
	}
	// A key stands for its sandbox also when that has ended.
	if err := sb.Stop(ctx); err != nil {
		t.Fatal(err)
	}
	again, err := s.Client.Create(ctx, spec(), key)
	if err != nil || again.ID != sb.ID {
		t.Errorf("the key of an ended sandbox gave %v, %v", again, err)
	}
}

func TestABatchGivesOneResultPerItemAndARepeatTheSame(t *testing.T) {
	t.Parallel()
	s := serve(t)
	key := fmt.Sprintf("batch-%d", time.Now().UnixNano())
	label := map[string]string{"batch": key}
	batch := func(n int32) map[int32]string {
		ids := map[int32]string{}
		req := &sandseav1.CreateBatchRequest{Spec: spec(labelled(label)), Count: n, Key: key}
		for r, err := range s.Client.CreateBatch(within(t, 60*time.Second), req) {
			if err != nil {
				t.Fatal(err)
			}
			if r.GetSandbox() == nil {
				t.Errorf("item %d: %s %v", r.GetIndex(), r.GetMessage(), r.GetError())
				continue
			}
			if _, dup := ids[r.GetIndex()]; dup {
				t.Errorf("item %d came twice", r.GetIndex())
			}
			ids[r.GetIndex()] = r.GetSandbox().GetId()
		}
		return ids
	}
	first := batch(6)
	if len(first) != 6 {
		t.Fatalf("%d results", len(first))
	}
	second := batch(6)
	for i, id := range first {
		if second[i] != id {
			t.Errorf("item %d: %s, then %s", i, id, second[i])
		}
	}
	wait.Until(t, 20*time.Second, func() bool {
		return len(list(t, s.Client, &sandseav1.ListSandboxesRequest{Labels: label, PageSize: 2})) == 6
	}, "a listing in pages of 2 shows the 6")
	stopped := map[string]bool{}
	for r, err := range s.Client.StopMany(within(t, 60*time.Second), &sandseav1.StopManyRequest{Labels: label}) {
		if err != nil || r.GetError() != nil {
			t.Fatalf("stop many: %v %v", err, r)
		}
		stopped[r.GetId()] = true
	}
	if len(stopped) != 6 {
		t.Errorf("%d stopped", len(stopped))
	}
	for _, id := range first {
		if e := info(t, s.Client.Sandbox(id)).GetEnd(); e.GetCause() != "stopped" {
			t.Errorf("%s ended %v", id, e)
		}
	}
}

func TestStopManyNeedsIdsOrLabels(t *testing.T) {
	t.Parallel()
	s := serve(t)
	for _, err := range s.Client.StopMany(within(t, 20*time.Second), &sandseav1.StopManyRequest{}) {
		if !errors.Is(err, errdefs.Invalid) {
			t.Errorf("got %v", err)
		}
	}
}

func TestAWatchTellsEveryStepInOrderAndResumes(t *testing.T) {
	t.Parallel()
	s := serve(t)
	label := map[string]string{"watched": fmt.Sprint(time.Now().UnixNano())}
	ctx, stop := context.WithCancelCause(within(t, 60*time.Second))
	defer stop(nil)
	steps := make(chan *sandseav1.WatchSandboxesResponse, 100)
	watching := make(chan struct{})
	go func() {
		defer close(steps)
		close(watching)
		for e, err := range s.Client.Watch(ctx, &sandseav1.WatchSandboxesRequest{Labels: label}) {
			if err != nil {
				return
			}
			steps <- e
		}
	}()
	<-watching
	var all []*sandseav1.WatchSandboxesResponse
	next := func(sb *client.Sandbox, what string) {
		t.Helper()
		for {
			select {
			case e, ok := <-steps:
				if !ok {
					t.Fatalf("the watch ended before %q of %s: %v", what, sb.ID, all)
				}
				all = append(all, e)
				if e.GetSandbox().GetId() == sb.ID && e.GetWhat() == what {
					return
				}
			case <-time.After(10 * time.Second):
				t.Fatalf("no %q of %s: %v", what, sb.ID, all)
			}
		}
	}
	// The watch begins at a time of its own: sandboxes are made until one is seen.
	var first *client.Sandbox
	wait.Until(t, 20*time.Second, func() bool {
		first = open(t, labelled(label))
		select {
		case e := <-steps:
			all = append(all, e)
			return true
		case <-time.After(500 * time.Millisecond):
			return false
		}
	}, "the watch shows something")
	sb := open(t, labelled(label))
	next(sb, "running")
	cursor := all[len(all)-1].GetCursor()
	if err := sb.ExtendTTL(ctx, time.Hour); err != nil {
		t.Fatal(err)
	}
	next(sb, "ttl_extended")
	if err := sb.Stop(ctx); err != nil {
		t.Fatal(err)
	}
	next(sb, "ended")
	if e := all[len(all)-1].GetSandbox().GetEnd(); e.GetCause() != "stopped" {
		t.Errorf("the last event says %v", e)
	}
	var order []string
	for _, e := range all {
		if e.GetSandbox().GetId() == sb.ID {
			order = append(order, e.GetWhat())
		}
		if e.GetGap() {
			t.Errorf("a gap: %v", e)
		}
	}
	if got := strings.Join(order, " "); got != "creating running ttl_extended stopping ended" {
		t.Errorf("order: %s", got)
	}
	// From the cursor on, only what came after it.
	var resumed []string
	for e, err := range s.Client.Watch(ctx, &sandseav1.WatchSandboxesRequest{Cursor: cursor, Id: sb.ID}) {
		if err != nil {
			t.Fatal(err)
		}
		resumed = append(resumed, e.GetWhat())
		if e.GetWhat() == "ended" {
			break
		}
	}
	if got := strings.Join(resumed, " "); got != "ttl_extended stopping ended" {
		t.Errorf("resumed: %s", got)
	}
	_ = first
}

func TestTheHardTTLEndsASandboxWithItsCommands(t *testing.T) {
	t.Parallel()
	began := time.Now()
	sb := open(t, func(s *sandseav1.SandboxSpec) { s.TtlMs = 1500 })
	_, err := sb.Run(within(t, 30*time.Second), client.Argv("sleep", "60"))
	e, ok := errors.AsType[*errdefs.Error](err)
	if !ok || e.Kind != errdefs.FailedPrecondition || e.Cause != "ttl" {
		t.Errorf("the command under way: %v", err)
	}
	if took := time.Since(began); took < 1400*time.Millisecond || took > 20*time.Second {
		t.Errorf("ended after %s", took)
	}
	if end := ended(t, sb, 30*time.Second); end.GetCause() != "ttl" || end.GetBy() != "platform" {
		t.Errorf("ended %v", end)
	}
}

func TestTheHardTTLIsMovedBothWays(t *testing.T) {
	t.Parallel()
	later := open(t, func(s *sandseav1.SandboxSpec) { s.TtlMs = 5000 })
	if err := later.ExtendTTL(within(t, 10*time.Second), time.Hour); err != nil {
		t.Fatal(err)
	}
	sooner := open(t)
	if err := sooner.ExtendTTL(within(t, 10*time.Second), 500*time.Millisecond); err != nil {
		t.Fatal(err)
	}
	if end := ended(t, sooner, 30*time.Second); end.GetCause() != "ttl" {
		t.Errorf("ended %v", end)
	}
	// The command outlasts the end that was moved away.
	sh(t, later, "sleep 5.5")
	if i := info(t, later); i.GetState() != sandseav1.SandboxState_SANDBOX_STATE_RUNNING {
		t.Errorf("got %v", i)
	}
	for _, d := range []time.Duration{0, -time.Second, 31 * 24 * time.Hour} {
		if err := later.ExtendTTL(within(t, 10*time.Second), d); !errors.Is(err, errdefs.Invalid) {
			t.Errorf("extend by %s: %v", d, err)
		}
	}
}

func TestTheIdleLimitEndsWhatNobodyUses(t *testing.T) {
	t.Parallel()
	sb := open(t, func(s *sandseav1.SandboxSpec) { s.IdleMs = 2500 })
	began := time.Now()
	// A command that runs is use, however long it takes.
	sh(t, sb, "sleep 3.5")
	// Asking is no use (D32): ended asks all the time.
	if end := ended(t, sb, 20*time.Second); end.GetCause() != "idle" || end.GetBy() != "platform" {
		t.Errorf("ended %v", end)
	}
	if took := time.Since(began); took < 6*time.Second {
		t.Errorf("ended after %s, 3.5 s of them used", took)
	}
}

func TestFileCallsAreUse(t *testing.T) {
	t.Parallel()
	sb := open(t, func(s *sandseav1.SandboxSpec) { s.IdleMs = 4000 })
	for range 20 {
		if _, err := sb.Stat(within(t, 10*time.Second), &sandseav1.StatFileRequest{Path: "/"}); err != nil {
			t.Fatal(err)
		}
		time.Sleep(300 * time.Millisecond) // time itself is what is tested
	}
	if i := info(t, sb); i.GetState() != sandseav1.SandboxState_SANDBOX_STATE_RUNNING {
		t.Errorf("ended %v", i.GetEnd())
	}
}

func TestAStopWithGraceLetsCommandsEndThemselves(t *testing.T) {
	t.Parallel()
	s := serve(t)
	sb := open(t)
	ctx := within(t, 60*time.Second)
	number := start(t, sb, client.Shell("trap 'echo told; exit 3' TERM; echo ready; while :; do sleep 0.05; done"))
	awaitOutput(t, sb, number, "ready\n")
	began := time.Now()
	_, err := s.Client.Sandboxes.Stop(ctx, connect.NewRequest(&sandseav1.StopSandboxRequest{Id: sb.ID, GraceMs: 30_000}))
	if err != nil {
		t.Fatal(err)
	}
	if took := time.Since(began); took > 20*time.Second {
		t.Errorf("took %s though the command had ended", took)
	}
	out, last := attach(t, sb, &sandseav1.AttachRequest{Number: number})
	if got := string(out[sandseav1.Stream_STREAM_STDOUT]); got != "ready\ntold\n" || last.GetResult().GetExitCode() != 3 {
		t.Errorf("output %q, result %v", got, last.GetResult())
	}
}

func TestACreateThatCannotBeSaysWhichStageAndLeavesNothing(t *testing.T) {
	t.Parallel()
	s := serve(t)
	ctx := within(t, 30*time.Second)
	tests := map[string]struct {
		change func(*sandseav1.SandboxSpec)
		kind   errdefs.Kind
		field  string
	}{
		"an image that nobody has": {
			func(s *sandseav1.SandboxSpec) { s.Environment.Image = "busyboxx" }, errdefs.NotFound, "environment.image",
		},
		"no image": {func(s *sandseav1.SandboxSpec) { s.Environment = nil }, errdefs.Invalid, "environment"},
		"an image and a base": {
			func(s *sandseav1.SandboxSpec) { s.Environment.Base = "busybox" }, errdefs.Invalid, "environment.image",
		},
		"too little memory": {
			func(s *sandseav1.SandboxSpec) { s.Limits.MemoryBytes = 1 }, errdefs.Invalid, "limits.memory_bytes",
		},
		"a negative limit": {func(s *sandseav1.SandboxSpec) { s.Limits.Pids = -1 }, errdefs.Invalid, "limits.pids"},
		"a misspelt package service": {
			func(s *sandseav1.SandboxSpec) {
				s.Network = &sandseav1.NetworkPolicy{Services: map[string]bool{"pipy": true}}
			}, errdefs.Invalid, "network.services",
		},
		"an unknown feature": {
			func(s *sandseav1.SandboxSpec) { s.Require = []string{"quantum"} }, errdefs.FailedPrecondition, "require",
		},
		"another class": {func(s *sandseav1.SandboxSpec) { s.Class = "runsc" }, errdefs.Invalid, "class"},
		"a relative working directory": {
			func(s *sandseav1.SandboxSpec) { s.Workdir = "x" }, errdefs.Invalid, "workdir",
		},
		"a variable with NUL": {
			func(s *sandseav1.SandboxSpec) { s.Env = map[string]string{"A": "x\x00y"} }, errdefs.Invalid, "env",
		},
		"an entrypoint without a program": {
			func(s *sandseav1.SandboxSpec) {
				s.Entrypoint = &sandseav1.Entrypoint{Mode: sandseav1.EntrypointMode_ENTRYPOINT_MODE_ARGV}
			}, errdefs.Invalid, "entrypoint.argv",
		},
		"an entrypoint that is not there": {
			func(s *sandseav1.SandboxSpec) {
				s.Entrypoint = &sandseav1.Entrypoint{
					Mode: sandseav1.EntrypointMode_ENTRYPOINT_MODE_ARGV, Argv: []string{"/no/such"},
				}
			}, errdefs.FailedPrecondition, "entrypoint",
		},
		"more open files than the node has": {
			func(s *sandseav1.SandboxSpec) { s.Limits.OpenFiles = 1 << 20 }, errdefs.FailedPrecondition, "limits.open_files",
		},
		"more memory than any node has": {
			func(s *sandseav1.SandboxSpec) { s.Limits.MemoryBytes = 1 << 49 }, errdefs.Exhausted, "limits.memory_bytes",
		},
	}
	for name, tt := range tests {
		label := map[string]string{"refused": name}
		sb, err := s.Client.Create(ctx, spec(labelled(label), tt.change), "")
		if err == nil {
			if name == "more open files than the node has" {
				_ = sb.Stop(ctx) // a node with so high a limit
				continue
			}
			t.Errorf("%s: it was made", name)
			_ = sb.Stop(ctx)
			continue
		}
		e, ok := errors.AsType[*errdefs.Error](err)
		if !ok || tt.kind != "" && e.Kind != tt.kind || e.Field != tt.field {
			t.Errorf("%s: kind %q, field %q: %v", name, errdefs.KindOf(err), e.Field, err)
		}
		if e.Hint == "" {
			t.Errorf("%s: no way out in %q", name, err)
		}
		wait.Until(t, 30*time.Second, func() bool { // the list may be a second old
			return len(list(t, s.Client, &sandseav1.ListSandboxesRequest{Labels: label})) == 0
		}, name+" leaves nothing")
	}
}

func TestACreateThatItsCallerGivesUpIsFoundByItsKeyOrLeavesNothing(t *testing.T) {
	t.Parallel()
	s := serve(t)
	run := fmt.Sprint(time.Now().UnixNano())
	label := map[string]string{"given-up": run}
	left := func() int { return len(list(t, s.Client, &sandseav1.ListSandboxesRequest{Labels: label})) }
	giveUp := func(after time.Duration, key string) *client.Sandbox {
		ctx, stop := context.WithTimeoutCause(t.Context(), after, errors.New("no patience"))
		defer stop()
		sb, err := s.Client.Create(ctx, spec(labelled(label)), key)
		if err != nil {
			return nil
		}
		return sb
	}
	// Given up at every stage: the key finds what there is, or makes it.
	ids := map[string]bool{}
	for i := range 24 {
		key := fmt.Sprintf("given-up-%s-%d", run, i)
		first := giveUp(time.Duration(i)*time.Millisecond/2, key)
		sb, err := s.Client.Create(within(t, 30*time.Second), spec(labelled(label)), key)
		if err != nil || first != nil && first.ID != sb.ID {
			t.Fatalf("asked again: %v, %v, first %v", sb, err, first)
		}
		ids[sb.ID] = true
	}
	if !wait.For(30*time.Second, func() bool { return left() == len(ids) }) {
		listed := list(t, s.Client, &sandseav1.ListSandboxesRequest{Labels: label})
		for _, id := range listed {
			if !ids[id] {
				t.Errorf("%s is listed and of no key", id)
			}
		}
		for id := range ids {
			got, err := s.Client.Sandbox(id).Info(within(t, 5*time.Second))
			if !slices.Contains(listed, id) {
				t.Errorf("%s is of a key and not listed; its node says: %v, %v", id, got, err)
			}
		}
	}
	for id := range ids {
		if err := s.Client.Sandbox(id).Stop(within(t, 20*time.Second)); err != nil {
			t.Error(err)
		}
	}
	// Without a key, given up on the way: taken back. An answer that is on its way already cannot be, so a few may stay.
	const creates, few = 12, 3
	stray := 0
	for range creates {
		if sb := giveUp(time.Millisecond, ""); sb != nil {
			if err := sb.Stop(within(t, 20*time.Second)); err != nil {
				t.Error(err)
			}
		}
	}
	if !wait.For(30*time.Second, func() bool { stray = left(); return stray == 0 }) && stray > few {
		t.Errorf("%d sandboxes are left of %d that were given up", stray, creates)
	}
	for _, id := range list(t, s.Client, &sandseav1.ListSandboxesRequest{Labels: label}) {
		_ = s.Client.Sandbox(id).Stop(within(t, 20*time.Second))
	}
}
