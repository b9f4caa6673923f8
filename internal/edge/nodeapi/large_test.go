package nodeapi_test

import (
	"context"
	"crypto/rand"
	"strings"
	"testing"
	"time"

	"connectrpc.com/connect"
	"google.golang.org/protobuf/proto"

	nodev1 "github.com/sandsea/sandsea/api/node/v1"
	"github.com/sandsea/sandsea/internal/edge/nodeapi"
	"github.com/sandsea/sandsea/internal/edge/runner"
	"github.com/sandsea/sandsea/internal/image"
	"github.com/sandsea/sandsea/internal/node"
	"github.com/sandsea/sandsea/internal/sandbox"
	"github.com/sandsea/sandsea/internal/store"
	"github.com/sandsea/sandsea/internal/store/etcd"
	"github.com/sandsea/sandsea/internal/store/keys"
)

// TestLargeSandboxesDoNotFillTheRoster: beyond a bound servers take no roster, and the node is away for everybody.
func TestLargeSandboxesDoNotFillTheRoster(t *testing.T) {
	d := newDoor(t)
	const count = 8
	for range count {
		r := d.request(d.ID())
		r.Spec.Env = map[string]string{"A": strings.Repeat("a", 1<<20)}
		if _, err := d.edge.Create(t.Context(), connect.NewRequest(r)); err != nil {
			t.Fatal(err)
		}
	}
	res, err := d.edge.Roster(t.Context(), connect.NewRequest(&nodev1.RosterRequest{}))
	if err != nil {
		t.Fatal(err)
	}
	if got := len(res.Msg.GetSandboxes()); got != count {
		t.Errorf("%d sandboxes, want %d", got, count)
	}
	if size := proto.Size(res.Msg); size > count<<16 {
		t.Errorf("the roster of %d sandboxes has %d bytes", count, size)
	}
}

// TestEndsOfLargeSandboxesReachTheStore: ends that the store does not take hold up all others of the node.
func TestEndsOfLargeSandboxesReachTheStore(t *testing.T) {
	s, err := etcd.Open(t.Context(), etcd.Config{Dir: t.TempDir()})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = s.Close() })
	for name, env := range map[string]string{
		"far too large":         strings.Repeat("a", 2<<20),
		"large when it is told": strings.Repeat("\x01", 30<<10), // six times so in JSON
	} {
		var ended []runner.Snapshot
		for range 64 {
			id, err := sandbox.Mint(node.Number(1), rand.Reader)
			if err != nil {
				t.Fatal(err)
			}
			ended = append(ended, runner.Snapshot{
				ID: id, Project: "default", State: sandbox.Ended, Created: time.Now(), Ended: time.Now(),
				Spec: sandbox.Spec{Env: map[string]string{"A": env}}, Config: image.Config{Env: []string{"A=1"}},
			})
		}
		if err := nodeapi.EndedRecorder(s, "n1")(context.WithoutCancel(t.Context()), ended); err != nil {
			t.Errorf("%s: %v", name, err)
		}
	}
	page, err := s.Range(t.Context(), keys.Ended, store.RangeOptions{})
	if err != nil || len(page.Pairs) != 128 {
		t.Errorf("%d ends, %v", len(page.Pairs), err)
	}
}
