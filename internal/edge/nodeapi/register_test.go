package nodeapi_test

import (
	"bufio"
	"context"
	"encoding/json"
	"errors"
	"io"
	"log/slog"
	"os"
	"path/filepath"
	"strings"
	"sync"
	"testing"

	"github.com/google/go-cmp/cmp"

	"github.com/sandsea/sandsea/api/errdefs"
	"github.com/sandsea/sandsea/internal/edge/nodeapi"
	"github.com/sandsea/sandsea/internal/edge/runner"
	"github.com/sandsea/sandsea/internal/edge/runner/edgetest"
	"github.com/sandsea/sandsea/internal/node"
	"github.com/sandsea/sandsea/internal/sandbox"
	"github.com/sandsea/sandsea/internal/sandboxpb"
	"github.com/sandsea/sandsea/internal/store"
	"github.com/sandsea/sandsea/internal/store/keys"
	"github.com/sandsea/sandsea/internal/store/mem"
	"github.com/sandsea/sandsea/internal/testkit/wait"
)

func here(data string) nodeapi.Machine {
	return nodeapi.Machine{Name: "host", Address: "unix:/x", DataID: data, Boot: "b1", Machine: "m1"}
}

func TestANumberIsForEverAndTheEpochRisesWithTheBoot(t *testing.T) {
	s := mem.New(mem.Config{})
	t.Cleanup(func() { _ = s.Close() })
	dir := t.TempDir()
	ask := func(change func(*nodeapi.Machine)) nodeapi.Identity {
		t.Helper()
		m := here("d1")
		change(&m)
		id, err := nodeapi.Identify(t.Context(), s, dir, m)
		if err != nil {
			t.Fatal(err)
		}
		return id
	}
	same := func(*nodeapi.Machine) {}
	first := ask(same)
	if first.Number != 1 || first.Epoch != 1 || first.Name != "host" {
		t.Fatalf("%+v", first)
	}
	if again := ask(same); again != first {
		t.Fatalf("a restarted edge: %+v", again)
	}
	if next := ask(func(m *nodeapi.Machine) { m.Boot = "b2" }); next.Number != 1 || next.Epoch != 2 {
		t.Fatalf("another boot: %+v", next)
	}
	if next := ask(func(m *nodeapi.Machine) { m.Boot, m.Machine = "b2", "m2" }); next.Number != 1 || next.Epoch != 3 {
		t.Fatalf("another machine: %+v", next)
	}
	if fi, err := os.Stat(filepath.Join(dir, "node.json")); err != nil || fi.Mode().Perm() != 0o600 {
		t.Fatalf("%v, %v", fi, err)
	}
	// A copied data directory is not this node.
	if _, err := nodeapi.Identify(t.Context(), s, dir, here("d2")); !errors.Is(err, errdefs.FailedPrecondition) {
		t.Fatalf("%v", err)
	}
	// A store that starts anew: ids name the number, so it stays.
	fresh := mem.New(mem.Config{})
	t.Cleanup(func() { _ = fresh.Close() })
	id, err := nodeapi.Identify(t.Context(), fresh, dir, here("d1"))
	if err != nil || id.Number != 1 || id.Epoch != 4 {
		t.Fatalf("%+v, %v", id, err)
	}
	taken := mem.New(mem.Config{})
	t.Cleanup(func() { _ = taken.Close() })
	if _, err := nodeapi.Identify(t.Context(), taken, t.TempDir(), here("other")); err != nil {
		t.Fatal(err)
	}
	if _, err := nodeapi.Identify(t.Context(), taken, dir, here("d1")); !errors.Is(err, errdefs.FailedPrecondition) {
		t.Fatalf("a number that another node has: %v", err)
	}
}

// TestNodesComeBackToANewStoreInAnyOrder loses a store of three nodes, which all keep their numbers, and a fourth gets one
// that nobody has.
func TestNodesComeBackToANewStoreInAnyOrder(t *testing.T) {
	s := mem.New(mem.Config{})
	t.Cleanup(func() { _ = s.Close() })
	dirs := map[string]string{}
	for _, m := range []string{"d1", "d2", "d3"} {
		dirs[m] = t.TempDir()
		if _, err := nodeapi.Identify(t.Context(), s, dirs[m], here(m)); err != nil {
			t.Fatal(err)
		}
	}
	fresh := mem.New(mem.Config{})
	t.Cleanup(func() { _ = fresh.Close() })
	got := map[string]node.Number{}
	for _, m := range []string{"d3", "d1", "d2", "d4"} {
		if dirs[m] == "" {
			dirs[m] = t.TempDir()
		}
		id, err := nodeapi.Identify(t.Context(), fresh, dirs[m], here(m))
		if err != nil {
			t.Fatalf("%s: %v", m, err)
		}
		got[m] = id.Number
	}
	if diff := cmp.Diff(map[string]node.Number{"d1": 1, "d2": 2, "d3": 3, "d4": 4}, got); diff != "" {
		t.Error(diff)
	}
}

func TestNodesThatAskAtOnceGetDifferentNumbers(t *testing.T) {
	s := mem.New(mem.Config{})
	t.Cleanup(func() { _ = s.Close() })
	var wg sync.WaitGroup
	var mu sync.Mutex
	seen := map[node.Number]bool{}
	for i := range 8 {
		wg.Go(func() {
			m := here(string(rune('a' + i)))
			id, err := nodeapi.Identify(t.Context(), s, t.TempDir(), m)
			if err != nil {
				t.Error(err)
				return
			}
			mu.Lock()
			defer mu.Unlock()
			if seen[id.Number] {
				t.Errorf("%d given twice", id.Number)
			}
			seen[id.Number] = true
		})
	}
	wg.Wait()
}

func TestRegistrationStandsUnderALeaseAndEndsWithTheEdge(t *testing.T) {
	s := mem.New(mem.Config{})
	t.Cleanup(func() { _ = s.Close() })
	m := here("d1")
	id, err := nodeapi.Identify(t.Context(), s, t.TempDir(), m)
	if err != nil {
		t.Fatal(err)
	}
	ctx, stop := context.WithCancel(t.Context())
	ready := make(chan struct{})
	done := make(chan error, 1)
	go func() {
		done <- nodeapi.Register(ctx, s, m, id, slog.New(slog.DiscardHandler), func() { close(ready) })
	}()
	<-ready
	page, err := s.Range(t.Context(), keys.Nodes, store.RangeOptions{})
	if err != nil || len(page.Pairs) != 1 || page.Pairs[0].Key != keys.Node(1) || page.Pairs[0].LeaseID == 0 {
		t.Fatalf("%+v, %v", page, err)
	}
	var reg struct {
		Number  node.Number `json:"number"`
		Address string      `json:"address"`
		Epoch   int64       `json:"epoch"`
		DataID  string      `json:"data_id"`
	}
	if err := json.Unmarshal(page.Pairs[0].Value, &reg); err != nil || reg.Number != 1 || reg.Address != "unix:/x" || reg.Epoch != 1 || reg.DataID != "d1" {
		t.Fatalf("%+v, %v", reg, err)
	}
	stop()
	if err := <-done; err != nil {
		t.Fatal(err)
	}
	page, err = s.Range(t.Context(), keys.Nodes, store.RangeOptions{})
	if err != nil || len(page.Pairs) != 0 {
		t.Fatalf("after the end: %+v, %v", page, err)
	}
}

func TestAFencedNodeDoesNotRegister(t *testing.T) {
	s := mem.New(mem.Config{})
	t.Cleanup(func() { _ = s.Close() })
	m := here("d1")
	id, err := nodeapi.Identify(t.Context(), s, t.TempDir(), m)
	if err != nil {
		t.Fatal(err)
	}
	value := []byte(`{"number":1,"epoch":2,"boot":"b1","machine":"m1"}`)
	if _, err := s.Txn(t.Context(), nil, []store.Op{store.Put(keys.NodeDataID("d1"), value)}, nil); err != nil {
		t.Fatal(err)
	}
	ctx, stop := context.WithTimeout(t.Context(), edgetest.Patience)
	defer stop()
	err = nodeapi.Register(ctx, s, m, id, slog.New(slog.DiscardHandler), nil)
	if !errors.Is(err, errdefs.FailedPrecondition) {
		t.Fatalf("%v", err)
	}
}

func TestEndsAreWrittenForTheServersToRead(t *testing.T) {
	s := mem.New(mem.Config{})
	t.Cleanup(func() { _ = s.Close() })
	e := edgetest.New(t, func(c *runner.Config) { c.Record = nodeapi.EndedRecorder(s, "n42") })
	id := e.Create()
	if _, err := e.Runner.Stop(t.Context(), id, 0, "user:x"); err != nil {
		t.Fatal(err)
	}
	key := keys.EndedSandbox("default", string(id))
	var pairs []store.Pair
	wait.Until(t, edgetest.Patience, func() bool {
		page, err := s.Range(t.Context(), keys.Ended, store.RangeOptions{})
		pairs = page.Pairs
		return err == nil && len(pairs) == 1
	})
	m, err := sandboxpb.DecodeEnded(pairs[0].Value)
	if pairs[0].Key != key || err != nil || m.GetId() != string(id) || m.GetNode() != "n42" || m.GetEnd().GetCause() != string(sandbox.CauseStopped) {
		t.Fatalf("%s: %v, %v", pairs[0].Key, m, err)
	}
}

// TestANameIsOneNodesAlsoAfterACut has a node come under the name of one that was cut off from the store, which then comes
// back: it waits until the other has gone.
func TestANameIsOneNodesAlsoAfterACut(t *testing.T) {
	s := mem.New(mem.Config{})
	t.Cleanup(func() { _ = s.Close() })
	first, second := here("d1"), here("d2")
	first.Name, second.Name = "n2", "n2"
	id1, err := nodeapi.Identify(t.Context(), s, t.TempDir(), first)
	if err != nil {
		t.Fatal(err)
	}
	id2, err := nodeapi.Identify(t.Context(), s, t.TempDir(), second)
	if err != nil {
		t.Fatal(err)
	}
	register := func(m nodeapi.Machine, id nodeapi.Identity, log io.Writer) (ready chan struct{}, leave func()) {
		ctx, stop := context.WithCancel(t.Context())
		ready, done := make(chan struct{}), make(chan error, 1)
		go func() {
			done <- nodeapi.Register(ctx, s, m, id, slog.New(slog.NewTextHandler(log, nil)), func() { close(ready) })
		}()
		return ready, func() {
			stop()
			if err := <-done; err != nil {
				t.Error(err)
			}
		}
	}
	ready2, leave2 := register(second, id2, io.Discard)
	<-ready2
	says, log := io.Pipe()
	ready1, leave1 := register(first, id1, log)
	line, err := bufio.NewReader(says).ReadString('\n')
	if err != nil || !strings.Contains(line, "node n2: runs at ") {
		t.Errorf("%q, %v", line, err)
	}
	select {
	case <-ready1:
		t.Error("two nodes have one name")
	default:
	}
	go func() { _, _ = io.Copy(io.Discard, says) }()
	leave2()
	<-ready1
	leave1()
}
