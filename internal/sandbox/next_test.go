package sandbox

import (
	"errors"
	"fmt"
	"slices"
	"testing"

	"github.com/google/go-cmp/cmp"
	"pgregory.net/rapid"

	"github.com/sandsea/sandsea/api/errdefs"
)

var (
	allStates = []State{Creating, Running, Pausing, Paused, Resuming, Stopping, Ended}
	allEvents = []EventKind{EventStarted, EventStartFail, EventStop, EventGone, EventReleased, EventRecovered}
)

// pair is one cell of the table; found splits EventRecovered.
type pair struct {
	state State
	event EventKind
	found bool
}

type cell struct {
	to      State
	actions []Action
}

// table is the whole machine; a pair that is absent is FailedPrecondition.
var table = func() map[pair]cell {
	undo := []Action{ActionAnnounce, ActionUndo, ActionRelease}
	kill := []Action{ActionAnnounce, ActionKill, ActionRelease}
	t := map[pair]cell{
		{Creating, EventStarted, false}:   {Running, []Action{ActionAnnounce}},
		{Creating, EventStartFail, false}: {Stopping, undo},
		{Creating, EventStop, false}:      {Stopping, undo},
		{Creating, EventRecovered, false}: {Stopping, undo},
		{Creating, EventRecovered, true}:  {Stopping, undo},
		{Stopping, EventStop, false}:      {Stopping, nil},
		{Stopping, EventGone, false}:      {Stopping, nil},
		{Stopping, EventReleased, false}:  {Ended, []Action{ActionAnnounce}},
		{Stopping, EventRecovered, false}: {Stopping, undo},
		{Stopping, EventRecovered, true}:  {Stopping, kill},
		{Ended, EventStop, false}:         {Ended, nil},
		{Ended, EventRecovered, false}:    {Ended, []Action{ActionAnnounce}},
		{Ended, EventRecovered, true}:     {Ended, []Action{ActionAnnounce}},
	}
	for _, s := range []State{Running, Pausing, Paused, Resuming} {
		t[pair{s, EventStop, false}] = cell{Stopping, kill}
		t[pair{s, EventGone, false}] = cell{Stopping, kill}
		t[pair{s, EventRecovered, true}] = cell{s, []Action{ActionAdopt, ActionAnnounce}}
		t[pair{s, EventRecovered, false}] = cell{Stopping, undo}
	}
	return t
}()

func TestEveryPairOfStateAndEvent(t *testing.T) {
	for _, s := range allStates {
		for _, k := range allEvents {
			for _, found := range []bool{false, true} {
				if found && k != EventRecovered {
					continue
				}
				t.Run(fmt.Sprintf("%s in %s found %v", k, s, found), func(t *testing.T) {
					before := Status{State: s}
					if s == Stopping || s == Ended {
						before.End = End{Cause: CauseTTL, Detail: "first", By: ByPlatform}
					}
					got, actions, err := Next(before, Event{Kind: k, Cause: CauseIdle, Found: found, By: "user:x"})
					want, possible := table[pair{s, k, found}]
					if !possible {
						if !errors.Is(err, errdefs.FailedPrecondition) || got != before || actions != nil {
							t.Fatalf("Next = %v, %v, %v; want the same status and FailedPrecondition", got, actions, err)
						}
						return
					}
					if err != nil || got.State != want.to {
						t.Fatalf("Next = %v, %v; want %s", got, err, want.to)
					}
					if d := cmp.Diff(want.actions, actions); d != "" {
						t.Fatalf("actions (-want +got):\n%s", d)
					}
					if before.End.Cause != "" && got.End != before.End {
						t.Fatalf("the first intent was replaced: %v", got.End)
					}
				})
			}
		}
	}
}

func TestUnknownStatesAndEventsAreRefused(t *testing.T) {
	for _, s := range []State{"", "lost", "RUNNING"} {
		for _, k := range allEvents {
			if _, _, err := Next(Status{State: s}, Event{Kind: k}); !errors.Is(err, errdefs.FailedPrecondition) {
				t.Errorf("%s in %q: %v", k, s, err)
			}
		}
	}
	for _, s := range allStates {
		if _, _, err := Next(Status{State: s}, Event{Kind: "surprise"}); !errors.Is(err, errdefs.FailedPrecondition) {
			t.Errorf("surprise in %s: %v", s, err)
		}
	}
}

func TestCausesWhenTheEventNamesNone(t *testing.T) {
	for _, c := range []struct {
		state State
		event Event
		want  End
	}{
		{Creating, Event{Kind: EventStartFail}, End{Cause: CauseInfraStart, By: ByPlatform}},
		{Creating, Event{Kind: EventRecovered, Cause: CauseTTL}, End{Cause: CauseInfraInterrupted, By: ByPlatform}},
		{Creating, Event{Kind: EventStop, By: "user:a"}, End{Cause: CauseStopped, By: "user:a"}},
		{Running, Event{Kind: EventGone}, End{Cause: CauseInfraUnknown, By: ByPlatform}},
		{Running, Event{Kind: EventGone, Cause: CauseOOM, By: ByWorkload}, End{Cause: CauseOOM, By: ByWorkload}},
		{Running, Event{Kind: EventRecovered, Cause: CauseInfraOrphaned}, End{Cause: CauseInfraOrphaned, By: ByPlatform}},
	} {
		got, _, err := Next(Status{State: c.state}, c.event)
		if err != nil || got.End != c.want {
			t.Errorf("%s in %s: %+v, %v; want %+v", c.event.Kind, c.state, got.End, err, c.want)
		}
	}
}

// A sandbox that obeys its Actions, dies at any moment and is recovered ends exactly once, with its first cause, and
// holds nothing afterwards.
func TestNoOrderOfEventsAndCrashesLeavesAHalf(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		s := Status{State: Creating}
		exists := false // whether the backend has an instance
		released := true
		var first Cause
		apply := func(e Event) {
			before := s
			next, actions, err := Next(s, e)
			if err != nil {
				if next != before {
					t.Fatalf("a refused event changed %v to %v", before, next)
				}
				return
			}
			if before.State == Ended && next != before {
				t.Fatalf("%v left Ended", e)
			}
			if first != "" && next.End.Cause != first {
				t.Fatalf("cause changed from %s to %s", first, next.End.Cause)
			}
			first = next.End.Cause
			s = next
			if rapid.Bool().Draw(t, "crash before the actions") {
				return
			}
			for _, a := range actions {
				switch a {
				case ActionUndo, ActionKill:
					exists = false
				case ActionRelease:
					if exists {
						t.Fatalf("released while an instance exists: %v", actions)
					}
					released = true
				}
			}
		}
		start := func() {
			if s.State == Creating {
				exists, released = true, false
			}
		}
		for range rapid.IntRange(1, 12).Draw(t, "steps") {
			switch k := rapid.SampledFrom(append(slices.Clone(allEvents), "begin")).Draw(t, "event"); k {
			case "begin":
				start()
			case EventStarted:
				if s.State == Creating {
					start()
				}
				apply(Event{Kind: k})
			case EventReleased:
				// The caller says Released only after it performed the actions of Stopping.
				if s.State == Stopping && released && !exists {
					apply(Event{Kind: k})
				}
			default:
				apply(Event{Kind: k, Cause: CauseStopped, Found: exists})
			}
			if s.State == Ended && (exists || !released) {
				t.Fatal("ended with something left")
			}
		}
		// Recovery always reaches rest.
		for range 3 {
			before := s
			next, actions, err := Next(s, Event{Kind: EventRecovered, Found: exists})
			if err != nil {
				t.Fatalf("recovery refused in %v: %v", before, err)
			}
			s = next
			if slices.Contains(actions, ActionRelease) {
				exists, released = false, true
				s, _, err = Next(s, Event{Kind: EventReleased})
				if err != nil {
					t.Fatal(err)
				}
			}
		}
		if s.State != Ended && s.State != Running {
			t.Fatalf("recovery came to rest in %s", s.State)
		}
		if s.State == Running && !exists || s.State == Ended && (exists || !released) {
			t.Fatalf("a half: %s, instance %v, released %v", s.State, exists, released)
		}
	})
}
