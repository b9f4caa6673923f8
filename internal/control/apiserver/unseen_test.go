package apiserver_test

import (
	"context"
	"encoding/json"
	"fmt"
	"net/http/httptest"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"connectrpc.com/connect"

	"github.com/sandsea/sandsea/api/errdefs"
	"github.com/sandsea/sandsea/api/errwire"
	pb "github.com/sandsea/sandsea/api/sandsea/v1"
	"github.com/sandsea/sandsea/internal/control/apiserver"
	"github.com/sandsea/sandsea/internal/control/nodeclient"
	"github.com/sandsea/sandsea/internal/control/watcher"
	"github.com/sandsea/sandsea/internal/node"
	"github.com/sandsea/sandsea/internal/sandbox"
	"github.com/sandsea/sandsea/internal/store"
	"github.com/sandsea/sandsea/internal/store/keys"
)

// TestNothingIsSaidNotToBeThereBeforeTheNodesWereAsked has calls come to a server that has heard of no node yet.
func TestNothingIsSaidNotToBeThereBeforeTheNodesWereAsked(t *testing.T) {
	h := newHouse(t, 1)
	h.admin().create(t, "")
	pool := nodeclient.NewPool(nil)
	t.Cleanup(pool.Close)
	young := apiserver.New(apiserver.Config{
		Store: h.store, IAM: h.iam, Watcher: watcher.New(watcher.Config{Store: h.store, Nodes: pool}),
	})
	srv := httptest.NewServer(young)
	t.Cleanup(srv.Close)
	h.url = srv.URL
	c := h.admin()
	ctx, stop := context.WithTimeout(t.Context(), 500*time.Millisecond)
	defer stop()
	if resp, err := c.sandboxes.List(ctx, connect.NewRequest(&pb.ListSandboxesRequest{})); err == nil {
		t.Errorf("it lists %d sandboxes", resp.Msg.GetTotal())
	}
	stream, err := c.sandboxes.StopMany(ctx, connect.NewRequest(&pb.StopManyRequest{Labels: map[string]string{"a": "b"}}))
	if err == nil {
		for stream.Receive() {
		}
		err = stream.Err()
	}
	if err == nil {
		t.Error("it stopped all that there is")
	}
}

// TestStopManyTellsOfSandboxesOnNodesThatAreAway has one sandbox on a node that is registered and does not answer, and
// one on a node whose registration has lapsed.
func TestStopManyTellsOfSandboxesOnNodesThatAreAway(t *testing.T) {
	h := newHouse(t, 1)
	var away []string
	record := func(n node.Number, project, label string) string {
		id, err := sandbox.Mint(n, strings.NewReader(strings.Repeat(fmt.Sprint(n, project, label), 13)))
		if err != nil {
			t.Fatal(err)
		}
		value := fmt.Sprintf(`{"id":%q,"project":%q,"node":%d,"node_epoch":1,"created":"2026-01-02T03:04:05Z","spec":{"labels":{"job":%q}}}`,
			id, project, n, label)
		if _, err := h.store.Txn(t.Context(), nil, []store.Op{store.Put(keys.Sandbox(project, string(id)), []byte(value))}, nil); err != nil {
			t.Fatal(err)
		}
		return string(id)
	}
	away = append(away, record(8, "default", "1"), record(9, "default/team", "1"))
	record(8, "default", "2")
	record(8, "other", "1")
	reg, err := json.Marshal(node.Registration{
		Number: 8, Name: "n8", Address: "unix:" + filepath.Join(t.TempDir(), "none.sock"), Epoch: 1,
	})
	if err != nil {
		t.Fatal(err)
	}
	if _, err := h.store.Txn(t.Context(), nil, []store.Op{store.Put(keys.Node(8), reg)}, nil); err != nil {
		t.Fatal(err)
	}
	stream, err := h.admin().sandboxes.StopMany(t.Context(),
		connect.NewRequest(&pb.StopManyRequest{Labels: map[string]string{"job": "1"}}))
	if err != nil {
		t.Fatal(err)
	}
	told := map[string]string{}
	for stream.Receive() {
		told[stream.Msg().GetId()] = stream.Msg().GetError().GetKind()
	}
	if err := stream.Err(); err != nil {
		t.Fatal(errwire.FromConnect(err))
	}
	if len(told) != 2 || told[away[0]] != string(errdefs.Unavailable) || told[away[1]] != string(errdefs.Unavailable) {
		t.Errorf("told %v, want %v to be unavailable", told, away)
	}
}
