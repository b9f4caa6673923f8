package sweep_test

import (
	"context"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/sandsea/sandsea/api/errdefs"
	"github.com/sandsea/sandsea/internal/chronus/sessions"
	"github.com/sandsea/sandsea/internal/edge/backend/fake"
	"github.com/sandsea/sandsea/internal/edge/runner/edgetest"
	"github.com/sandsea/sandsea/internal/edge/sweep"
	"github.com/sandsea/sandsea/internal/sandbox"
	"github.com/sandsea/sandsea/internal/testkit/wait"
)

// story is one scenario of an edge's life. What it has got an answer for is promised.
type story struct {
	e       *edgetest.Edge
	id      sandbox.ID
	other   sandbox.ID
	created bool // the create was answered
	ran     bool // the keyed command was answered
	stopped bool // the stop was answered

	mu    sync.Mutex
	marks int // effects of the keyed command
}

func newStory(t *testing.T) *story {
	s := &story{e: edgetest.New(t)}
	s.e.World.Handle("mark", func(p *fake.Proc) int {
		s.mu.Lock()
		s.marks++
		s.mu.Unlock()
		fmt.Fprintln(p.Stdout, "marked")
		return 7
	})
	s.id, s.other = s.e.ID(), s.e.ID()
	return s
}

// tell goes through the story until something fails.
func (s *story) tell() {
	ctx, stop := context.WithTimeout(context.Background(), edgetest.Patience)
	defer stop()
	if _, err := s.e.Runner.Create(ctx, s.e.Request(s.id)); err != nil {
		return
	}
	s.created = true
	if _, err := s.e.Runner.Create(ctx, s.e.Request(s.other)); err != nil {
		return
	}
	if _, err := s.e.TryRun(s.id, "key", "mark"); err != nil {
		return
	}
	s.ran = true
	u, err := s.e.Runner.Open(s.id, true)
	if err != nil {
		return
	}
	defer u.Done()
	if _, err := u.Commands.Launch(ctx, sessions.Start{Command: sessions.Command{Argv: []string{"sleep", "60"}}}); err != nil {
		return
	}
	if _, err := s.e.Runner.ExtendTTL(ctx, s.id, time.Hour); err != nil {
		return
	}
	if _, err := s.e.Runner.Stop(ctx, s.other, 0, "user:x"); err != nil {
		return
	}
	s.stopped = true
}

// settle waits until every sandbox is at rest.
func (s *story) settle(t *testing.T) map[sandbox.ID]sandbox.State {
	t.Helper()
	states := map[sandbox.ID]sandbox.State{}
	wait.Until(t, edgetest.Patience, func() bool {
		clear(states)
		all, _ := s.e.Runner.Roster()
		for _, x := range all {
			states[x.ID] = x.State
			if x.State != sandbox.Running && x.State != sandbox.Ended {
				return false
			}
		}
		return true
	}, "every sandbox at rest")
	return states
}

// check holds the promises against what the next edge has made of the machine.
func (s *story) check(t *testing.T) {
	t.Helper()
	states := s.settle(t)
	wait.Until(t, edgetest.Patience, func() bool { return len(s.e.Leftovers()) == 0 }, fmt.Sprint("a half: ", s.e.Leftovers()))
	if s.created && states[s.id] != sandbox.Running {
		t.Errorf("a create that was answered is %q", states[s.id])
	}
	if s.stopped && states[s.other] != sandbox.Ended {
		t.Errorf("a stop that was answered left it %q", states[s.other])
	}
	for id, st := range states {
		if st != sandbox.Running {
			continue
		}
		if a := s.e.Run(id, "echo", "alive"); string(a.Stdout.Head) != "alive\n" {
			t.Errorf("a running sandbox says %q", a.Stdout.Head)
		}
	}
	// The retry with the same id: the same sandbox, or a word that it may be placed anew.
	got, err := s.e.Runner.Create(t.Context(), s.e.Request(s.id))
	switch {
	case err == nil && got.State == sandbox.Running:
		if s.e.World.Starts(s.id) > 1 && s.created {
			t.Errorf("started %d times", s.e.World.Starts(s.id))
		}
	case errors.Is(err, errdefs.Refused) || errors.Is(err, errdefs.Unavailable):
		return
	default:
		t.Fatalf("the retried create: %+v, %v", got.State, err)
	}
	// The retry with the same key: one effect, one result.
	a, err := s.e.TryRun(s.id, "key", "mark")
	if err != nil {
		t.Fatalf("the retried command: %v", err)
	}
	if a.Result.ExitCode != 7 || string(a.Stdout.Head) != "marked\n" {
		t.Errorf("the retried command: %+v, %q", a.Result, a.Stdout.Head)
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.marks != 1 {
		t.Errorf("a keyed command had %d effects", s.marks)
	}
	if s.ran && !a.Replayed {
		t.Error("an answered command was not replayed")
	}
}

// finish ends what is left and looks for zero leftovers.
func (s *story) finish(t *testing.T) {
	t.Helper()
	all, _ := s.e.Runner.Roster()
	for _, x := range all {
		if _, err := s.e.Runner.Stop(t.Context(), x.ID, 0, "end"); err != nil {
			t.Errorf("stop at the end: %v", err)
		}
	}
	if b := s.e.World.Boxes(); len(b) > 0 {
		t.Errorf("left on the machine: %v", b)
	}
	if k := s.e.Keeper.Keys(); len(k) > 0 {
		t.Errorf("left with the keeper: %v", k)
	}
	for _, x := range all {
		wait.Until(t, edgetest.Patience, func() bool { _, ok := s.e.Ended(x.ID); return ok }, "the store told")
	}
}

func TestNeverAHalfWhereverTheEdgeIsKilled(t *testing.T) {
	whole := newStory(t)
	whole.e.TripAt(0)
	whole.tell()
	if !whole.stopped {
		t.Fatal("the story does not come to its end without a kill")
	}
	steps := whole.e.Steps()
	whole.check(t)
	whole.finish(t)
	if steps < 30 {
		t.Fatalf("only %d steps reach outside", steps)
	}
	for n := 1; n <= steps; n++ {
		t.Run(fmt.Sprintf("step %d of %d", n, steps), func(t *testing.T) {
			t.Parallel()
			s := newStory(t)
			s.e.TripAt(n)
			told := make(chan struct{})
			go func() { s.tell(); close(told) }()
			wait.Until(t, edgetest.Patience, func() bool {
				select {
				case <-told:
					return true
				default:
					return s.e.Tripped()
				}
			}, "the kill")
			s.e.Kill()
			<-told
			s.e.Start()
			s.check(t)
			s.finish(t)
		})
	}
}

func TestARecoveryThatIsKilledIsDoneAgain(t *testing.T) {
	// One create cut off, one sandbox that runs with commands, one stop cut off, one end that the store does not know.
	prepare := func(t *testing.T) *story {
		s := newStory(t)
		s.e.StoreAway(true)
		s.tell()
		half := s.e.ID()
		s.e.World.OnStep(func(step string, id sandbox.ID) error {
			if id == half && step == "start/made" {
				s.e.TripAt(1)
			}
			return nil
		})
		_, _ = s.e.Runner.Create(t.Context(), s.e.Request(half))
		s.e.Kill()
		s.e.World.OnStep(nil)
		s.e.StoreAway(false)
		return s
	}
	for n := 1; ; n++ {
		var whole bool
		t.Run(fmt.Sprintf("killed at step %d", n), func(t *testing.T) {
			s := prepare(t)
			err := s.e.TryStart(n)
			if err == nil {
				// The steps after Run: give the goroutines the time to come to theirs.
				whole = !wait.For(300*time.Millisecond, s.e.Tripped)
			}
			s.e.Kill()
			s.e.Start()
			s.check(t)
			s.finish(t)
		})
		if whole {
			if n < 8 {
				t.Errorf("a recovery of %d steps", n)
			}
			return
		}
		if n > 60 || t.Failed() {
			return
		}
	}
}

func TestWhatNoRecordKnowsIsSwept(t *testing.T) {
	e := edgetest.New(t)
	id := e.Create()
	e.Run(id, "echo", "kept")
	stray := filepath.Join(e.Output(), string(e.ID()))
	if err := os.MkdirAll(stray, 0o700); err != nil {
		t.Fatal(err)
	}
	if err := os.WriteFile(filepath.Join(stray, "1.1"), []byte("x"), 0o600); err != nil {
		t.Fatal(err)
	}
	ended := e.Create()
	e.Run(ended, "echo", "remembered")
	if _, err := e.Runner.Stop(t.Context(), ended, 0, "x"); err != nil {
		t.Fatal(err)
	}
	e.Restart()
	if _, err := os.Stat(stray); !errors.Is(err, os.ErrNotExist) {
		t.Errorf("a stray record: %v", err)
	}
	for _, want := range []sandbox.ID{id, ended} {
		if _, err := os.Stat(filepath.Join(e.Output(), string(want), "1.1")); err != nil {
			t.Errorf("a record that is still wanted: %v", err)
		}
	}
	if left := e.Leftovers(); len(left) > 0 {
		t.Error(left)
	}
}

func TestARosterGivesDescriptorsOnceAndClosesTheRest(t *testing.T) {
	k := fake.NewKeeper()
	t.Cleanup(k.Kill)
	w := fake.NewWorld()
	t.Cleanup(w.Close)
	e := edgetest.New(t)
	id := e.Create()
	go func() { _, _ = e.TryRun(id, "", "sleep", "60") }()
	wait.Until(t, edgetest.Patience, func() bool { return len(e.Keeper.Keys()) == 2 })
	r, err := sweep.Ask(t.Context(), e.Keeper.Connect())
	if err != nil {
		t.Fatal(err)
	}
	if !r.Knows(id) || r.Fired(id) || r.Knows("s") || len(r.IDs()) != 1 {
		t.Errorf("%v", r.IDs())
	}
	control, pidfd, ok := r.Sandbox(id)
	if !ok {
		t.Fatal("its sandbox is not held")
	}
	_, _, again := r.Sandbox(id)
	if again {
		t.Error("given twice")
	}
	if err := errors.Join(control.Close(), pidfd.Close()); err != nil {
		t.Error(err)
	}
	r.Close()
	r.Close()
	if x := r.Execs(id); len(x) != 0 {
		t.Errorf("%d commands after Close", len(x))
	}
	if !strings.HasPrefix(string(id), "s") {
		t.Error(id)
	}
}
