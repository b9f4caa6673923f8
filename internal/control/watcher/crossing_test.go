package watcher

import (
	"crypto/rand"
	"testing"
	"time"

	nodev1 "github.com/sandsea/sandsea/api/node/v1"
	pb "github.com/sandsea/sandsea/api/sandsea/v1"
	"github.com/sandsea/sandsea/internal/sandbox"
)

// TestWhatCrossesAnAnswerDoesNotTurnTheClockBack has the answer of a stop overtake the transitions that led to it, and a
// roster from before.
func TestWhatCrossesAnAnswerDoesNotTurnTheClockBack(t *testing.T) {
	id, err := sandbox.Mint(1, rand.Reader)
	if err != nil {
		t.Fatal(err)
	}
	at := func(s pb.SandboxState) *pb.Sandbox { return &pb.Sandbox{Id: string(id), Epoch: 1, State: s} }
	running, stopping, ended := at(pb.SandboxState_SANDBOX_STATE_RUNNING), at(pb.SandboxState_SANDBOX_STATE_STOPPING),
		at(pb.SandboxState_SANDBOX_STATE_ENDED)
	w := New(Config{})
	m := &member{number: 1, incarnation: "a", sandboxes: map[string]*pb.Sandbox{}}
	w.nodes[1] = m
	living := func(want int, when string) {
		t.Helper()
		if n := len(w.Sandboxes(false)); n != want {
			t.Errorf("%s: %d living, want %d", when, n, want)
		}
	}
	w.transition(m, &nodev1.FollowResponse{Seq: 1, What: "running", Sandbox: running})
	living(1, "while it runs")
	w.Note(ended)
	living(0, "after the answer")
	w.apply(m, &nodev1.RosterResponse{Seq: 1, Incarnation: "a", Sandboxes: []*pb.Sandbox{running}}, time.Now())
	living(0, "after a roster from before")
	w.transition(m, &nodev1.FollowResponse{Seq: 2, What: "stopping", Sandbox: stopping})
	living(0, "after a transition from before")
	w.transition(m, &nodev1.FollowResponse{Seq: 3, What: "ended", Sandbox: ended})
	living(0, "at the end")
	again := at(pb.SandboxState_SANDBOX_STATE_RUNNING)
	again.Epoch = 2
	w.transition(m, &nodev1.FollowResponse{Seq: 4, What: "running", Sandbox: again})
	living(1, "in a later epoch")
}

// TestARosterFromBeforeACreateTakesNothingAway has an answer come while a roster that knows nothing of it is on its way.
func TestARosterFromBeforeACreateTakesNothingAway(t *testing.T) {
	id, err := sandbox.Mint(1, rand.Reader)
	if err != nil {
		t.Fatal(err)
	}
	w := New(Config{})
	m := &member{number: 1, sandboxes: map[string]*pb.Sandbox{}}
	w.nodes[1] = m
	for what, known := range map[string]string{"of the edge that we follow": "a", "of a new edge": "b"} {
		m.incarnation = known
		roster := &nodev1.RosterResponse{Incarnation: "a"}
		asked := time.Now()
		w.Note(&pb.Sandbox{Id: string(id), Epoch: 1, State: pb.SandboxState_SANDBOX_STATE_RUNNING})
		w.apply(m, roster, asked)
		if _, ok := w.Sandbox(string(id)); !ok {
			t.Errorf("%s: what was just made is gone", what)
		}
		w.apply(m, roster, time.Now())
		if _, ok := w.Sandbox(string(id)); ok {
			t.Errorf("%s: what the node has forgotten is there", what)
		}
	}
}
