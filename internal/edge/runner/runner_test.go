package runner_test

import (
	"context"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"runtime/debug"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/sandsea/sandsea/api/errdefs"
	"github.com/sandsea/sandsea/internal/chronus/sessions"
	"github.com/sandsea/sandsea/internal/edge/backend"
	"github.com/sandsea/sandsea/internal/edge/backend/fake"
	"github.com/sandsea/sandsea/internal/edge/runner"
	"github.com/sandsea/sandsea/internal/edge/runner/edgetest"
	"github.com/sandsea/sandsea/internal/edge/sweep"
	"github.com/sandsea/sandsea/internal/keeper"
	"github.com/sandsea/sandsea/internal/node"
	"github.com/sandsea/sandsea/internal/sandbox"
	"github.com/sandsea/sandsea/internal/testkit/wait"
)

func none(t *testing.T, e *edgetest.Edge) {
	t.Helper()
	wait.Until(t, edgetest.Patience, func() bool { return len(e.Leftovers()) == 0 }, fmt.Sprint("nothing left: ", e.Leftovers()))
	if l := e.Room.Load(); l.Starting != 0 {
		t.Errorf("turns to start are taken: %+v", l)
	}
}

// waitStopping returns when it is remembered that a sandbox is to end.
func waitStopping(t *testing.T, e *edgetest.Edge, id sandbox.ID) {
	t.Helper()
	wait.Until(t, edgetest.Patience, func() bool {
		s, err := e.Runner.Get(id)
		return err == nil && s.State == sandbox.Stopping
	}, "the begin of the stop")
}

func TestASandboxFromCreateToEnd(t *testing.T) {
	e := edgetest.New(t)
	id := e.Create()
	s, err := e.Runner.Get(id)
	if err != nil {
		t.Fatal(err)
	}
	if s.Epoch != 1 || s.Seq < 2 || s.Ready.Before(s.Created) || !s.Expires.Equal(s.Created.Add(24*time.Hour)) || len(s.Enforcement) == 0 {
		t.Errorf("%+v", s)
	}
	if a := e.Run(id, "echo", "hello"); string(a.Stdout.Head) != "hello\n" {
		t.Errorf("%q", a.Stdout.Head)
	}
	again, err := e.Runner.Create(t.Context(), e.Request(id))
	if err != nil || again.Created != s.Created || e.World.Starts(id) != 1 {
		t.Fatalf("a repeated create: %+v, %v, %d starts", again, err, e.World.Starts(id))
	}
	if _, err := e.Runner.Create(t.Context(), e.Request(id, func(s *sandbox.Spec) { s.Limits.Memory = 64 << 20 })); !errors.Is(err, errdefs.AlreadyExists) {
		t.Fatalf("another request for the same id: %v", err)
	}
	for range 2 {
		s, err = e.Runner.Stop(t.Context(), id, 0, "user:alice")
		if err != nil || s.State != sandbox.Ended || s.End.Cause != sandbox.CauseStopped || s.End.By != "user:alice" || s.Ended.IsZero() {
			t.Fatalf("%+v, %v", s, err)
		}
	}
	gone, leave := context.WithCancel(t.Context())
	leave()
	for range 20 {
		if s, err := e.Runner.Stop(gone, id, 0, "user:alice"); err != nil || s.State != sandbox.Ended {
			t.Fatalf("for who gives up when it has ended: %+v, %v", s, err)
		}
	}
	none(t, e)
	if got, ok := e.Ended(id); !ok || got.End.Cause != sandbox.CauseStopped {
		t.Fatalf("the store knows %+v, %v", got, ok)
	}
	if l := e.Room.Load(); l.Sandboxes != 0 || l.Memory != 0 {
		t.Errorf("room is not given back: %+v", l)
	}
	_, err = e.TryRun(id, "", "true")
	if x, ok := errors.AsType[*errdefs.Error](err); !ok || x.Cause != "stopped" {
		t.Fatalf("a command after the end: %v", err)
	}
	u, err := e.Runner.Open(id, false)
	if err != nil {
		t.Fatal(err)
	}
	defer u.Done()
	if l := u.Commands.List(); len(l) != 1 || l[0].Result.ExitCode != 0 {
		t.Fatalf("the record of an ended sandbox: %+v", l)
	}
	if _, err := e.Runner.ExtendTTL(t.Context(), id, time.Hour); errdefs.From(err).Cause != "stopped" {
		t.Fatalf("extend after the end: %v", err)
	}
}

func TestAFailedStartLeavesNothingAndSaysTheStage(t *testing.T) {
	for _, step := range []string{"start/made", "start/ready"} {
		t.Run(step, func(t *testing.T) {
			e := edgetest.New(t)
			e.World.OnStep(func(s string, _ sandbox.ID) error {
				if s == step {
					return errors.New("broken machine")
				}
				return nil
			})
			id := e.ID()
			_, err := e.Runner.Create(t.Context(), e.Request(id))
			if err == nil || !strings.Contains(err.Error(), "start:") || !strings.Contains(err.Error(), "broken machine") {
				t.Fatalf("%v", err)
			}
			none(t, e)
			s := e.WaitEnded(id)
			if s.End.Cause != sandbox.CauseInfraStart || !s.Ready.IsZero() {
				t.Fatalf("%+v", s)
			}
			if _, again := e.Runner.Create(t.Context(), e.Request(id)); again == nil || e.World.Starts(id) != 1 {
				t.Fatalf("repeated: %v, %d starts", again, e.World.Starts(id))
			}
			e.Restart()
			if _, err := e.Runner.Create(t.Context(), e.Request(id)); !errors.Is(err, errdefs.Refused) {
				t.Fatalf("after a restart: %v, want Refused", err)
			}
		})
	}
}

func TestWhatTheNodeCannotEnforceIsRefused(t *testing.T) {
	e := edgetest.New(t)
	e.Kill()
	e.World.Capabilities(func(c *node.Capabilities) {
		for i := range c.Features {
			if c.Features[i].Name == node.FeatureDisk {
				c.Features[i].Status = node.Missing
			}
		}
	})
	e.Start()
	_, err := e.Runner.Create(t.Context(), e.Request(e.ID()))
	if x, ok := errors.AsType[*errdefs.Error](err); !ok || x.Kind != errdefs.Refused || x.Feature != node.FeatureDisk {
		t.Fatalf("%v", err)
	}
}

func TestACallerWhoGoesAwayTakesTheCreateAlong(t *testing.T) {
	e := edgetest.New(t)
	inside := make(chan struct{})
	release := make(chan struct{})
	var once sync.Once
	e.World.OnStep(func(s string, _ sandbox.ID) error {
		if s == "start/made" {
			once.Do(func() { close(inside) })
			<-release
		}
		return nil
	})
	ctx, cancel := context.WithCancel(t.Context())
	id := e.ID()
	got := make(chan error, 1)
	go func() { _, err := e.Runner.Create(ctx, e.Request(id)); got <- err }()
	<-inside
	cancel()
	waitStopping(t, e, id)
	close(release)
	if err := <-got; !errors.Is(err, errdefs.Canceled) {
		t.Fatal(err)
	}
	if s := e.WaitEnded(id); s.End.Cause != sandbox.CauseStopped {
		t.Fatalf("%+v", s.End)
	}
	none(t, e)
}

func TestACreateThatIsDecidedIsAnsweredToWhoGivesUpToo(t *testing.T) {
	e := edgetest.New(t)
	id := e.Create()
	gone, leave := context.WithCancel(t.Context())
	leave()
	for range 20 {
		if s, err := e.Runner.Create(gone, e.Request(id)); err != nil || s.State != sandbox.Running {
			t.Fatalf("%+v, %v", s, err)
		}
	}
}

func TestACreateIsSharedByAllWhoAskForIt(t *testing.T) {
	e := edgetest.New(t)
	id := e.ID()
	release := make(chan struct{})
	e.World.OnStep(func(s string, _ sandbox.ID) error {
		if s == "start/made" {
			<-release
		}
		return nil
	})
	first, leave := context.WithCancel(t.Context())
	var wg sync.WaitGroup
	var ok atomic.Int64
	wg.Go(func() { _, _ = e.Runner.Create(first, e.Request(id)) })
	wait.Until(t, edgetest.Patience, func() bool { return e.Runner.Remembers(id) })
	for range 8 {
		wg.Go(func() {
			if s, err := e.Runner.Create(t.Context(), e.Request(id)); err == nil && s.State == sandbox.Running {
				ok.Add(1)
			}
		})
	}
	wait.Until(t, edgetest.Patience, func() bool { return e.Runner.Waiting(id) == 9 }, "all nine waiting")
	leave() // the others still wait
	close(release)
	wg.Wait()
	if ok.Load() != 8 || e.World.Starts(id) != 1 {
		t.Fatalf("%d of 8 got it, %d starts", ok.Load(), e.World.Starts(id))
	}
}

func TestAStopDuringTheCreateWins(t *testing.T) {
	e := edgetest.New(t)
	id := e.ID()
	inside, release := make(chan struct{}), make(chan struct{})
	e.World.OnStep(func(s string, _ sandbox.ID) error {
		if s == "start/ready" {
			close(inside)
			<-release
		}
		return nil
	})
	got := make(chan error, 1)
	go func() { _, err := e.Runner.Create(t.Context(), e.Request(id)); got <- err }()
	<-inside
	stopped := make(chan struct{})
	go func() {
		defer close(stopped)
		s, err := e.Runner.Stop(t.Context(), id, 0, "user:bob")
		if err != nil || s.State != sandbox.Ended || s.End.By != "user:bob" {
			t.Errorf("%+v, %v", s, err)
		}
	}()
	waitStopping(t, e, id)
	close(release)
	<-stopped
	if err := <-got; errdefs.From(err).Cause != "stopped" {
		t.Fatalf("the create said %v", err)
	}
	none(t, e)
}

func TestAStopInTheQueueWins(t *testing.T) {
	e := edgetest.New(t)
	release := make(chan struct{})
	e.World.OnStep(func(s string, _ sandbox.ID) error {
		if s == "start/made" {
			<-release
		}
		return nil
	})
	var wg sync.WaitGroup
	most := e.Room.Load().MaxStarting
	for range most {
		wg.Go(func() { _, _ = e.Runner.Create(t.Context(), e.Request(e.ID())) })
	}
	wait.Until(t, edgetest.Patience, func() bool { return len(e.World.Boxes()) == most }, "a full queue")
	id := e.ID()
	got := make(chan error, 1)
	go func() { _, err := e.Runner.Create(t.Context(), e.Request(id)); got <- err }()
	wait.Until(t, edgetest.Patience, func() bool { return e.Room.Load().Starting == most+1 }, "one in the queue")
	if s, err := e.Runner.Stop(t.Context(), id, 0, "user:bob"); err != nil || s.State != sandbox.Ended {
		t.Fatalf("%+v, %v", s, err)
	}
	if err := <-got; err == nil {
		t.Fatal("created although it was stopped")
	}
	ctx, cancel := context.WithTimeout(t.Context(), 50*time.Millisecond)
	defer cancel()
	late := e.ID()
	if _, err := e.Runner.Create(ctx, e.Request(late)); !errors.Is(err, errdefs.Refused) || !strings.Contains(err.Error(), "queue") {
		t.Fatalf("no turn in time: %v", err)
	}
	if e.Runner.Remembers(late) {
		t.Error("a create that was refused in the queue is remembered")
	}
	close(release)
	wg.Wait()
	if n := e.World.Starts(id); n != 0 {
		t.Fatalf("started %d times", n)
	}
}

func TestEndsByThemselvesHaveTheirCause(t *testing.T) {
	for name, c := range map[string]struct {
		exit backend.Exit
		by   string
	}{
		"oom":             {backend.Exit{Cause: sandbox.CauseOOM}, sandbox.ByWorkload},
		"agent_destroyed": {backend.Exit{Cause: sandbox.CauseAgentDestroyed, Detail: "exit status 3"}, sandbox.ByWorkload},
		"infra_killed":    {backend.Exit{Cause: sandbox.CauseInfraKilled}, sandbox.ByPlatform},
	} {
		t.Run(name, func(t *testing.T) {
			e := edgetest.New(t)
			id := e.Create()
			got := make(chan error, 1)
			go func() { _, err := e.TryRun(id, "", "sleep", "60"); got <- err }()
			wait.Until(t, edgetest.Patience, func() bool { return e.World.Tasks(id) == 1 })
			e.World.KillInit(id, c.exit)
			s := e.WaitEnded(id)
			if string(s.End.Cause) != name || s.End.By != c.by || s.End.Detail != c.exit.Detail {
				t.Fatalf("%+v", s.End)
			}
			if err := <-got; errdefs.From(err).Cause != name {
				t.Fatalf("the command's caller got %v", err)
			}
			none(t, e)
		})
	}
}

// TestTheKeepersWordOnAKillCounts has deaths of sandboxes be seen before the keeper says what it killed them for.
func TestTheKeepersWordOnAKillCounts(t *testing.T) {
	e := edgetest.New(t)
	var ids []sandbox.ID
	for range 16 {
		ids = append(ids, e.Create())
	}
	running, away := ids[:8], ids[8:]
	kill := func(ids []sandbox.ID, cause sandbox.Cause) {
		for _, id := range ids {
			e.World.KillInit(id, backend.Exit{Cause: cause})
		}
		for _, id := range ids {
			e.Keeper.Overflow(keeper.Key{Sandbox: string(id), Number: 3}, 1)
		}
	}
	kill(running, sandbox.CauseInfraKilled)
	for _, id := range running {
		if s := e.WaitEnded(id); s.End.Cause != sandbox.CauseOutputLimit || s.End.Detail != "stream 1 of process 3" {
			t.Errorf("%+v", s.End)
		}
	}
	e.Kill()
	kill(away, sandbox.CauseInfraUnknown)
	e.Start()
	for _, id := range away {
		if s := e.WaitEnded(id); s.End.Cause != sandbox.CauseOutputLimit || s.End.By != sandbox.ByPlatform {
			t.Errorf("without an edge: %+v", s.End)
		}
	}
	none(t, e)
}

func TestTheHardEnd(t *testing.T) {
	e := edgetest.New(t)
	// Long enough for a create to be ready before, also on a busy machine.
	short := func(s *sandbox.Spec) { s.TTL = 2 * time.Second }
	id, longer := e.Create(short), e.Create(short)
	begun, err := e.Runner.Get(longer)
	if err != nil {
		t.Fatal(err)
	}
	s, err := e.Runner.ExtendTTL(t.Context(), longer, time.Hour)
	if err != nil || time.Until(s.Expires) < 59*time.Minute {
		t.Fatalf("%+v, %v", s, err)
	}
	if s := e.WaitEnded(id); s.End.Cause != sandbox.CauseTTL || s.End.By != sandbox.ByPlatform {
		t.Fatalf("%+v", s.End)
	}
	none(t, e)
	away := e.Create()
	if _, err := e.Runner.ExtendTTL(t.Context(), away, 300*time.Millisecond); err != nil {
		t.Fatal(err)
	}
	e.Kill()
	wait.Until(t, edgetest.Patience, func() bool {
		held, err := sweep.Ask(t.Context(), e.Keeper.Connect())
		if err != nil {
			t.Fatal(err)
		}
		defer held.Close()
		return held.Fired(away) && time.Now().After(begun.Expires)
	}, "the hard end without an edge")
	e.Start()
	if s := e.WaitEnded(away); s.End.Cause != sandbox.CauseTTL {
		t.Fatalf("the hard end without an edge: %+v", s.End)
	}
	if a := e.Run(longer, "echo", "lives"); string(a.Stdout.Head) != "lives\n" {
		t.Fatal("the longer one is gone")
	}
	for _, bad := range []time.Duration{0, -1, 31 * 24 * time.Hour} {
		if _, err := e.Runner.ExtendTTL(t.Context(), longer, bad); !errors.Is(err, errdefs.Invalid) {
			t.Errorf("%s: %v", bad, err)
		}
	}
	none(t, e)
}

func TestTheIdleLimitCountsOnlyTimeWithoutUse(t *testing.T) {
	e := edgetest.New(t)
	const limit = 400 * time.Millisecond
	idle := func(s *sandbox.Spec) { s.Idle = limit }
	// Those in use are so at once: the limit begins when they are ready.
	busy := e.Create(idle)
	go func() { _, _ = e.TryRun(busy, "", "sleep", "60") }()
	used := e.Create(idle)
	u, err := e.Runner.Open(used, true)
	if err != nil {
		t.Fatal(err)
	}
	quiet := e.Create(idle)
	if s := e.WaitEnded(quiet); s.End.Cause != sandbox.CauseIdle || s.Ended.Sub(s.Ready) < limit {
		t.Fatalf("%+v after %s", s.End, s.Ended.Sub(s.Ready))
	}
	for _, id := range []sandbox.ID{busy, used} {
		if s, err := e.Runner.Get(id); err != nil || s.State != sandbox.Running {
			t.Fatalf("one in use ended: %+v, %v", s.End, err)
		}
	}
	done := time.Now()
	u.Done()
	if s := e.WaitEnded(used); s.End.Cause != sandbox.CauseIdle || s.Ended.Sub(done) < limit {
		t.Fatalf("%+v after %s", s.End, s.Ended.Sub(done))
	}
	// Looking is no use.
	looked := e.Create(idle)
	wait.Until(t, edgetest.Patience, func() bool {
		if still, err := e.Runner.Open(looked, false); err == nil {
			still.Commands.List()
			still.Done()
		}
		s, err := e.Runner.Get(looked)
		return err == nil && s.State == sandbox.Ended
	}, "the end of one that is only looked at")
	if s := e.WaitEnded(looked); s.End.Cause != sandbox.CauseIdle {
		t.Fatalf("%+v", s.End)
	}
}

func TestTimeWithoutAnEdgeIsNoIdleTime(t *testing.T) {
	e := edgetest.New(t)
	id := e.Create(func(s *sandbox.Spec) { s.Idle = time.Hour })
	e.Kill()
	e.Change = func(c *runner.Config) {
		start := time.Now()
		c.Now = func() time.Time { return start.Add(2 * time.Hour).Add(time.Since(start)) }
	}
	e.Start()
	s, err := e.Runner.Get(id)
	if err != nil || s.State != sandbox.Running || s.IdleFor > time.Minute {
		t.Fatalf("%+v, %v", s, err)
	}
}

func TestEntrypoints(t *testing.T) {
	e := edgetest.New(t)
	id := e.ID()
	brief := func(s *sandbox.Spec) { s.Entrypoint, s.Argv = sandbox.EntrypointArgv, []string{"sleep", "0.2"} }
	if _, err := e.Runner.Create(t.Context(), e.Request(id, brief)); err != nil { // it may have ended by then
		t.Fatal(err)
	}
	s := e.WaitEnded(id)
	if s.End.Cause != sandbox.CauseCompleted || s.End.By != sandbox.ByWorkload {
		t.Fatalf("%+v", s.End)
	}
	none(t, e)
	image := e.ID()
	if _, err := e.Runner.Create(t.Context(), e.Request(image, func(s *sandbox.Spec) { s.Entrypoint = sandbox.EntrypointImage })); err != nil {
		t.Fatal(err)
	}
	e.WaitEnded(image)
	u, err := e.Runner.Open(image, false)
	if err != nil {
		t.Fatal(err)
	}
	defer u.Done()
	var log strings.Builder
	for ev, err := range u.Commands.Attach(t.Context(), 1, sessions.From{}) {
		if err != nil {
			t.Fatal(err)
		}
		log.Write(ev.Data)
	}
	if log.String() != "from the image\n" {
		t.Fatalf("%q", log.String())
	}
	_, err = e.Runner.Create(t.Context(), e.Request(e.ID(), func(s *sandbox.Spec) {
		s.Entrypoint, s.Argv = sandbox.EntrypointArgv, []string{"no-such"}
	}))
	if !errors.Is(err, errdefs.FailedPrecondition) || !strings.Contains(err.Error(), "entrypoint") {
		t.Fatalf("%v", err)
	}
	wait.Until(t, edgetest.Patience, func() bool { return len(e.Leftovers()) == 0 })
}

func TestFollowersSeeEveryStepInOrder(t *testing.T) {
	e := edgetest.New(t)
	_, start := e.Runner.Roster()
	var ids []sandbox.ID
	var wg sync.WaitGroup
	var mu sync.Mutex
	for range 8 {
		wg.Go(func() {
			id := e.ID()
			if _, err := e.Runner.Create(context.Background(), e.Request(id)); err != nil {
				t.Error(err)
				return
			}
			if _, err := e.Runner.Stop(context.Background(), id, 0, "x"); err != nil {
				t.Error(err)
			}
			mu.Lock()
			defer mu.Unlock()
			ids = append(ids, id)
		})
	}
	wg.Wait()
	story := map[sandbox.ID]string{}
	seqs := map[sandbox.ID]int64{}
	next := start
	for {
		batch, _, err := e.Runner.After(next)
		if err != nil {
			t.Fatal(err)
		}
		if len(batch) == 0 {
			break
		}
		for _, x := range batch {
			if next++; x.Seq != next {
				t.Fatalf("transition %d after %d", x.Seq, next-1)
			}
			story[x.Sandbox.ID] += x.What + " "
			if last := seqs[x.Sandbox.ID]; x.Sandbox.Seq != last+1 {
				t.Fatalf("step %d of a sandbox after %d", x.Sandbox.Seq, last)
			}
			seqs[x.Sandbox.ID] = x.Sandbox.Seq
		}
	}
	for _, id := range ids {
		if story[id] != "creating running stopping ended " {
			t.Errorf("%q", story[id])
		}
	}
	if _, _, err := e.Runner.After(next + 1); err == nil {
		t.Error("the future is known")
	}
	if all, seq := e.Runner.Roster(); len(all) != 8 || seq != next {
		t.Errorf("%d in the roster at %d", len(all), seq)
	}
	old := e.Runner.Incarnation()
	e.Restart()
	if e.Runner.Incarnation() == old {
		t.Error("two edges have one incarnation")
	}
}

func TestEndsWaitForAStoreThatIsAway(t *testing.T) {
	e := edgetest.New(t)
	e.StoreAway(true)
	var ids []sandbox.ID
	for range 5 {
		id := e.Create()
		begin := time.Now()
		if s, err := e.Runner.Stop(t.Context(), id, 0, "x"); err != nil || s.State != sandbox.Ended {
			t.Fatalf("%+v, %v", s, err)
		}
		if d := time.Since(begin); d >= 2*time.Second { // as long as it waits for the store's word
			t.Fatalf("a stop without the store took %s", d)
		}
		ids = append(ids, id)
	}
	e.Restart()
	if _, ok := e.Ended(ids[0]); ok {
		t.Fatal("the store was away, and knows")
	}
	e.StoreAway(false)
	for _, id := range ids {
		wait.Until(t, 2*edgetest.Patience, func() bool { _, ok := e.Ended(id); return ok }, "the store told")
		wait.Until(t, edgetest.Patience, func() bool { return e.Runner.Stored(id) }, "the journal told")
	}
	batches := len(e.Batches())
	e.Restart()
	e.Run(e.Create(), "true")
	if n := len(e.Batches()); n != batches {
		t.Fatalf("ends that the store knows were told again: %v", e.Batches())
	}
}

func TestEndsOfABurstShareTransactions(t *testing.T) {
	e := edgetest.New(t)
	e.StoreAway(true)
	var wg sync.WaitGroup
	const n = 150
	for range n {
		wg.Go(func() {
			id := e.ID()
			if _, err := e.Runner.Create(context.Background(), e.Request(id)); err != nil {
				t.Error(err)
				return
			}
			if _, err := e.Runner.Stop(context.Background(), id, 0, "x"); err != nil {
				t.Error(err)
			}
		})
	}
	wg.Wait()
	e.StoreAway(false)
	total := 0
	wait.Until(t, 3*edgetest.Patience, func() bool {
		total = 0
		for _, b := range e.Batches() {
			total += b
		}
		return total >= n
	}, "all ends told")
	for _, b := range e.Batches() {
		if b > 128 {
			t.Errorf("a transaction of %d ends", b)
		}
	}
	if len(e.Batches()) > 10 {
		t.Errorf("%d transactions for %d ends", len(e.Batches()), n)
	}
}

func TestEndedOnesAreForgottenInTheEnd(t *testing.T) {
	var ahead atomic.Int64
	e := edgetest.New(t, func(c *runner.Config) {
		c.MaxEnded = 3
		c.Now = func() time.Time { return time.Now().Add(time.Duration(ahead.Load())) }
	})
	var ids []sandbox.ID
	for range 5 {
		id := e.Create()
		e.Run(id, "echo", "x")
		if _, err := e.Runner.Stop(t.Context(), id, 0, "x"); err != nil {
			t.Fatal(err)
		}
		wait.Until(t, edgetest.Patience, func() bool { _, ok := e.Ended(id); return ok })
		ids = append(ids, id)
	}
	live := e.Create()
	wait.Until(t, edgetest.Patience, func() bool { e.Runner.Tidy(); return !e.Runner.Remembers(ids[1]) }, "the oldest forgotten")
	if e.Runner.Remembers(ids[0]) || !e.Runner.Remembers(ids[2]) {
		t.Error("not the oldest were forgotten")
	}
	if _, err := os.Stat(filepath.Join(e.Output(), string(ids[0]))); !errors.Is(err, os.ErrNotExist) {
		t.Errorf("output of a forgotten one: %v", err)
	}
	ahead.Store(int64(25 * time.Hour))
	e.Runner.Tidy()
	for _, id := range ids {
		if _, err := e.Runner.Get(id); !errors.Is(err, errdefs.NotFound) {
			t.Errorf("%s after a day: %v", id.Short(), err)
		}
	}
	if !e.Runner.Remembers(live) {
		t.Error("a running one was forgotten")
	}
	e.Restart()
	if all, _ := e.Runner.Roster(); len(all) != 1 {
		t.Errorf("%d in the roster after a restart", len(all))
	}
}

func TestASandboxThatNobodyHeldIsOrphaned(t *testing.T) {
	e := edgetest.New(t)
	id := e.Create()
	e.Kill()
	e.Keeper.Kill()
	e.World.KillInit(id, backend.Exit{Cause: sandbox.CauseInfraUnknown})
	e.World.Close()
	e.Keeper = fake.NewKeeper()
	e.Start()
	if s := e.WaitEnded(id); s.End.Cause != sandbox.CauseInfraOrphaned {
		t.Fatalf("%+v", s.End)
	}
	none(t, e)
}

func TestASandboxThatDiedWithoutAnEdgeHasItsEvidence(t *testing.T) {
	e := edgetest.New(t)
	id := e.Create()
	keyed, err := e.TryRun(id, "k", "echo", "kept")
	if err != nil {
		t.Fatal(err)
	}
	e.Kill()
	e.World.KillInit(id, backend.Exit{Cause: sandbox.CauseOOM})
	e.Start()
	if s := e.WaitEnded(id); s.End.Cause != sandbox.CauseOOM {
		t.Fatalf("%+v", s.End)
	}
	if a, err := e.TryRun(id, "k", "echo", "kept"); err != nil || !a.Replayed || a.Number != keyed.Number || string(a.Stdout.Head) != "kept\n" {
		t.Fatalf("a recorded result after the end: %+v, %v", a, err)
	}
	none(t, e)
}

func TestNoDescriptorIsLeftOfASandboxThatDiedWithoutAnEdge(t *testing.T) {
	defer debug.SetGCPercent(debug.SetGCPercent(-1)) // it closes what is forgotten
	terminals := func() (n int) {
		entries, err := os.ReadDir("/proc/self/fd")
		if err != nil {
			t.Fatal(err)
		}
		for _, e := range entries {
			if target, err := os.Readlink("/proc/self/fd/" + e.Name()); err == nil && strings.HasSuffix(target, "/ptmx") {
				n++
			}
		}
		return n
	}
	before := terminals()
	e := edgetest.New(t)
	id := e.Create()
	u, err := e.Runner.Open(id, true)
	if err != nil {
		t.Fatal(err)
	}
	_, err = u.Commands.Launch(t.Context(), sessions.Start{
		Command: sessions.Command{Argv: []string{"sleep", "60"}}, Terminal: &sessions.TerminalSize{Columns: 80, Rows: 24},
	})
	u.Done()
	if err != nil {
		t.Fatal(err)
	}
	if terminals() == before {
		t.Fatal("its terminal is not seen")
	}
	e.Kill()
	e.World.KillInit(id, backend.Exit{Cause: sandbox.CauseOOM})
	e.Start()
	e.WaitEnded(id)
	wait.Until(t, edgetest.Patience, func() bool { return terminals() <= before }, "no descriptor of its terminal")
}

func TestAKeeperThatDiesIsReplaced(t *testing.T) {
	e := edgetest.New(t)
	id := e.Create(func(s *sandbox.Spec) { s.TTL = 10 * time.Hour })
	moved := e.Create(func(s *sandbox.Spec) { s.TTL = 10 * time.Hour })
	u, err := e.Runner.Open(id, true)
	if err != nil {
		t.Fatal(err)
	}
	defer u.Done()
	info, err := u.Commands.Launch(t.Context(), sessions.Start{Command: sessions.Command{Argv: []string{"tick", "300", "0.002"}}})
	if err != nil {
		t.Fatal(err)
	}
	if _, err := e.Runner.ExtendTTL(t.Context(), moved, 600*time.Millisecond); err != nil {
		t.Fatal(err)
	}
	e.Keeper.Kill()
	if _, err := e.TryRun(id, "", "true"); !errors.Is(err, errdefs.Unavailable) {
		t.Fatalf("a command without a keeper: %v", err)
	}
	e.Keeper = fake.NewKeeper()
	if err := e.Runner.Keep(t.Context(), e.Keeper.Connect()); err != nil {
		t.Fatal(err)
	}
	if a := e.Run(id, "echo", "again"); string(a.Stdout.Head) != "again\n" {
		t.Fatalf("%q", a.Stdout.Head)
	}
	if s := e.WaitEnded(moved); s.End.Cause != sandbox.CauseTTL {
		t.Fatalf("the hard end that was moved before the keeper died: %+v", s.End)
	}
	if _, err := e.Runner.Stop(t.Context(), id, 0, "x"); err != nil {
		t.Fatal(err)
	}
	var out strings.Builder
	for ev, err := range u.Commands.Attach(t.Context(), info.Number, sessions.From{NoFollow: true}) {
		if err != nil {
			t.Fatal(err)
		}
		if ev.Gap > 0 {
			t.Fatalf("a gap of %d at %d", ev.Gap, ev.Offset)
		}
		out.Write(ev.Data)
	}
	for i, line := range strings.Split(strings.TrimSpace(out.String()), "\n") {
		if line != fmt.Sprint("tick ", i) {
			t.Fatalf("line %d is %q", i, line)
		}
	}
	none(t, e)
}

// holds notes with which hard end each sandbox was held.
type holds struct {
	keeper.Client
	hard map[string]time.Time
}

func (h holds) Hold(ctx context.Context, s keeper.Sandbox) error {
	h.hard[s.ID] = s.Hard
	return h.Client.Hold(ctx, s)
}

func TestANewKeeperGetsTheHardEndInForce(t *testing.T) {
	e := edgetest.New(t)
	id := e.Create(func(s *sandbox.Spec) { s.TTL = time.Minute })
	s, err := e.Runner.ExtendTTL(t.Context(), id, time.Hour)
	if err != nil {
		t.Fatal(err)
	}
	e.Keeper.Kill()
	e.Keeper = fake.NewKeeper()
	next := holds{e.Keeper.Connect(), map[string]time.Time{}}
	if err := e.Runner.Keep(t.Context(), next); err != nil {
		t.Fatal(err)
	}
	if got := next.hard[string(id)]; !got.Equal(s.Expires) {
		t.Fatalf("held until %s, it was moved to %s", got, s.Expires)
	}
}

func TestAnEdgeThatShutsDownLeavesEverythingRunning(t *testing.T) {
	e := edgetest.New(t)
	goOn := make(chan struct{})
	e.World.Handle("halves", func(p *fake.Proc) int {
		for i := range 100 {
			if i == 50 {
				select {
				case <-goOn:
				case <-p.Ctx.Done():
					return 1
				}
			}
			if _, err := fmt.Fprintln(p.Stdout, "line", i); err != nil {
				return 1
			}
		}
		return 0
	})
	id := e.Create(func(s *sandbox.Spec) { s.Idle = time.Hour })
	ctx, cancel := context.WithCancel(t.Context())
	got := make(chan error, 1)
	go func() {
		u, err := e.Runner.Open(id, true)
		if err != nil {
			got <- err
			return
		}
		defer u.Done()
		_, err = u.Commands.Run(ctx, sessions.Start{Command: sessions.Command{Argv: []string{"halves"}}}, 0)
		got <- err
	}()
	wait.Until(t, edgetest.Patience, func() bool { return e.World.Tasks(id) == 1 })
	e.Runner.Leave()
	cancel()
	if err := <-got; !errors.Is(err, errdefs.Canceled) {
		t.Fatal(err)
	}
	if _, err := e.Runner.Create(t.Context(), e.Request(e.ID())); !errors.Is(err, errdefs.Unavailable) {
		t.Fatalf("a create at the end: %v", err)
	}
	if _, err := e.Runner.Stop(t.Context(), id, 0, "x"); !errors.Is(err, errdefs.Unavailable) {
		t.Fatalf("a stop at the end: %v", err)
	}
	if err := e.Runner.Close(); err != nil {
		t.Fatal(err)
	}
	if e.World.Tasks(id) != 1 {
		t.Fatal("the command ended with its edge")
	}
	e.Restart()
	close(goOn)
	u, err := e.Runner.Open(id, false)
	if err != nil {
		t.Fatal(err)
	}
	defer u.Done()
	lines := 0
	for ev, err := range u.Commands.Attach(t.Context(), 1, sessions.From{}) {
		if err != nil {
			t.Fatal(err)
		}
		lines += strings.Count(string(ev.Data), "\n")
		if ev.Exited != nil && ev.Exited.Result.ExitCode != 0 {
			t.Fatalf("%+v", ev.Exited.Result)
		}
	}
	if lines != 100 {
		t.Fatalf("%d lines", lines)
	}
}
