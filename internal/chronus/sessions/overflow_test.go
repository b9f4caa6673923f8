package sessions_test

import (
	"errors"
	"fmt"
	"testing"

	"github.com/sandsea/sandsea/api/errdefs"
	"github.com/sandsea/sandsea/internal/chronus/sessions"
	"github.com/sandsea/sandsea/internal/edge/backend/fake"
)

func TestOverflowIsThePolicyOfACall(t *testing.T) {
	r := newRig(t)
	const size, limit = 100_000, 1000
	for policy, want := range map[sessions.Overflow]struct {
		head, tail int
		exceeded   bool
	}{
		sessions.OverflowHeadTail: {limit / 2, limit / 2, false},
		sessions.OverflowTail:     {0, limit, false},
		sessions.OverflowHead:     {limit, 0, false},
		sessions.OverflowFail:     {limit, 0, true},
	} {
		s := cmd("bytes", fmt.Sprint(size))
		s.Command.Overflow = policy
		a, err := r.table.Run(t.Context(), s, limit)
		if err != nil {
			t.Fatal(err)
		}
		head, tail := fake.Pattern(0, want.head), fake.Pattern(size-int64(want.tail), want.tail)
		if string(a.Stdout.Head) != string(head) || string(a.Stdout.Tail) != string(tail) ||
			a.Stdout.Gap != size-limit || a.Stdout.Size != size {
			t.Errorf("%q: %d and %d bytes around %d", policy, len(a.Stdout.Head), len(a.Stdout.Tail), a.Stdout.Gap)
		}
		x := a.Result
		if x.ExitCode != 0 || !x.Truncated || x.Exceeded != want.exceeded || x.StdoutBytes != size {
			t.Errorf("%q: %+v", policy, x)
		}
		// Exactly the limit is within it.
		if a, err = r.table.Run(t.Context(), s, size); err != nil || a.Stdout.Gap != 0 || a.Result.Exceeded || a.Result.Truncated {
			t.Errorf("%q at the limit: %+v %v", policy, a.Result, err)
		}
	}
}

func TestOverflowIsPartOfWhatAKeyStandsFor(t *testing.T) {
	r := newRig(t)
	s := cmd("echo", "a")
	s.Key, s.Command.Overflow = "k", sessions.OverflowFail
	r.run(s)
	if a := r.run(s); !a.Replayed {
		t.Error("the same request is not the same")
	}
	s.Command.Overflow = sessions.OverflowTail
	if _, err := r.table.Run(t.Context(), s, 0); !errors.Is(err, errdefs.AlreadyExists) {
		t.Errorf("another policy: %v", err)
	}
	s.Command.Overflow = "both"
	_, err := r.table.Run(t.Context(), s, 0)
	if e, ok := errors.AsType[*errdefs.Error](err); !ok || e.Kind != errdefs.Invalid || e.Field != "command.overflow" {
		t.Errorf("a policy that nobody knows: %v", err)
	}
}
