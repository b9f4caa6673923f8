package nodeapi_test

import (
	"encoding/json"
	"errors"
	"testing"

	"github.com/sandsea/sandsea/api/errdefs"
	"github.com/sandsea/sandsea/internal/edge/nodeapi"
	"github.com/sandsea/sandsea/internal/node"
	"github.com/sandsea/sandsea/internal/store"
	"github.com/sandsea/sandsea/internal/store/keys"
	"github.com/sandsea/sandsea/internal/store/mem"
)

func TestANameIsOneNodes(t *testing.T) {
	s := mem.New(mem.Config{})
	t.Cleanup(func() { _ = s.Close() })
	first, err := nodeapi.Identify(t.Context(), s, t.TempDir(), here("d1"))
	if err != nil {
		t.Fatal(err)
	}
	value, err := json.Marshal(node.Registration{Number: first.Number, Name: first.Name, DataID: "d1", Address: "10.0.0.1:1"})
	if err != nil {
		t.Fatal(err)
	}
	if _, err := s.Txn(t.Context(), nil, []store.Op{store.Put(keys.Node(first.Number), value)}, nil); err != nil {
		t.Fatal(err)
	}
	if _, err := nodeapi.Identify(t.Context(), s, t.TempDir(), here("d2")); !errors.Is(err, errdefs.AlreadyExists) {
		t.Errorf("the same name on another data directory: %v", err)
	}
	if _, err := nodeapi.Identify(t.Context(), s, t.TempDir(), here("d1")); err != nil {
		t.Errorf("the node itself again: %v", err)
	}
	other := here("d2")
	other.Name = ""
	if _, err := nodeapi.Identify(t.Context(), s, t.TempDir(), other); err != nil {
		t.Errorf("a node that has no name of its own: %v", err)
	}
}
