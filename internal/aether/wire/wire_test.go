package wire_test

import (
	"context"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"maps"
	"net/netip"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	"github.com/google/go-cmp/cmp/cmpopts"

	"github.com/sandsea/sandsea/api/errdefs"
	"github.com/sandsea/sandsea/internal/aether/upstream"
	"github.com/sandsea/sandsea/internal/aether/wire"
	"github.com/sandsea/sandsea/internal/linux/scm"
	"github.com/sandsea/sandsea/internal/policy"
	"github.com/sandsea/sandsea/internal/testkit/require"
)

const dataID = "0123456789abcdef"

// recorder writes down what it is told.
type recorder struct {
	mu      sync.Mutex
	boxes   map[string]wire.Sandbox // guarded by mu
	denials []wire.Denial           // guarded by mu
	found   upstream.Upstreams      // guarded by mu
}

func (r *recorder) Sync(all []wire.Sandbox) error {
	r.mu.Lock()
	defer r.mu.Unlock()
	r.boxes = map[string]wire.Sandbox{}
	for _, b := range all {
		r.boxes[b.ID] = b
	}
	return nil
}

func (r *recorder) Put(b wire.Sandbox) error {
	r.mu.Lock()
	defer r.mu.Unlock()
	r.boxes[b.ID] = b
	return nil
}

func (r *recorder) Drop(id string) (wire.Counters, error) {
	r.mu.Lock()
	defer r.mu.Unlock()
	if _, ok := r.boxes[id]; !ok {
		return wire.Counters{}, errdefs.New(errdefs.NotFound, "sandbox "+id, "is not known").WithHint("Look")
	}
	delete(r.boxes, id)
	return wire.Counters{Sent: 7}, nil
}

func (r *recorder) Counters(ids []string) map[string]wire.Counters {
	m := map[string]wire.Counters{}
	for _, id := range ids {
		m[id] = wire.Counters{Sent: 1, Received: 2, Flows: 3, Denied: 4}
	}
	return m
}

func (r *recorder) CA(id string) ([]byte, error) { return []byte("pem of " + id), nil }

func (r *recorder) Denials(all []wire.Denial) {
	r.mu.Lock()
	defer r.mu.Unlock()
	r.denials = all
}

func (r *recorder) Services() []wire.ServiceState {
	return []wire.ServiceState{{Name: "npm", Missing: "name it"}}
}

func (r *recorder) Upstreams(all upstream.Upstreams) error {
	r.mu.Lock()
	defer r.mu.Unlock()
	r.found = all
	return nil
}

func (r *recorder) known() map[string]wire.Sandbox {
	r.mu.Lock()
	defer r.mu.Unlock()
	return maps.Clone(r.boxes)
}

func (r *recorder) told() []wire.Denial {
	r.mu.Lock()
	defer r.mu.Unlock()
	return r.denials
}

func (r *recorder) upstreams() upstream.Upstreams {
	r.mu.Lock()
	defer r.mu.Unlock()
	return r.found
}

// serve runs a Server until the test ends.
func serve(t *testing.T) (*wire.Server, *recorder, string) {
	t.Helper()
	require.Root(t)
	rec := &recorder{boxes: map[string]wire.Sandbox{}}
	s := wire.NewServer(dataID, rec, slog.New(slog.DiscardHandler))
	path := filepath.Join(t.TempDir(), "s")
	ln, err := scm.Listen(path)
	if err != nil {
		t.Fatal(err)
	}
	ctx, cancel := context.WithCancelCause(context.Background())
	done := make(chan error, 1)
	go func() { done <- s.Serve(ctx, ln) }()
	t.Cleanup(func() {
		cancel(errors.New("the test ends"))
		if err := <-done; err != nil {
			t.Error(err)
		}
		_ = ln.Close()
	})
	return s, rec, path
}

func dial(t *testing.T, path string) *wire.Conn {
	t.Helper()
	c, err := wire.Dial(t.Context(), path, dataID)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if err := c.Close(); err != nil {
			t.Error(err)
		}
	})
	return c
}

func sandbox(n int) wire.Sandbox {
	var rules []policy.Rule
	for i := range 40 {
		rules = append(rules, policy.Rule{Domain: fmt.Sprintf("%s%d.example", strings.Repeat("x", 50), i)})
	}
	return wire.Sandbox{
		ID: fmt.Sprintf("s%d", n), Project: "p", Addr: netip.AddrFrom4([4]byte{100, 64, byte(n >> 8), byte(n)}), Phase: "agent",
		Policy: policy.Policy{Phases: []policy.Phase{{Name: "agent", Rules: rules}}, AsOf: time.Unix(1, 0).UTC()},
		Before: wire.Counters{Sent: int64(n)},
	}
}

func TestCalls(t *testing.T) {
	_, rec, path := serve(t)
	c := dial(t, path)
	ctx := t.Context()
	// More than one message holds.
	var all []wire.Sandbox
	want := map[string]wire.Sandbox{}
	for n := range 1200 {
		b := sandbox(n)
		all = append(all, b)
		want[b.ID] = b
	}
	if err := c.Sync(ctx, all); err != nil {
		t.Fatal(err)
	}
	last := sandbox(2000)
	if err := c.Put(ctx, last); err != nil {
		t.Fatal(err)
	}
	want[last.ID] = last
	if n, err := c.Drop(ctx, "s1"); err != nil || n.Sent != 7 {
		t.Errorf("%+v, %v", n, err)
	}
	delete(want, "s1")
	if d := cmp.Diff(want, rec.known(), cmpopts.EquateComparable(netip.Addr{})); d != "" {
		t.Error(d)
	}
	var e *errdefs.Error
	if _, err := c.Drop(ctx, "s1"); !errors.Is(err, errdefs.NotFound) || !errors.As(err, &e) || e.Object != "sandbox s1" || e.Hint != "Look" {
		t.Errorf("%v", err)
	}
	if m, err := c.Counters(ctx, []string{"a", "b"}); err != nil || len(m) != 2 || m["a"].Denied != 4 {
		t.Errorf("%v, %v", m, err)
	}
	if pem, err := c.CA(ctx, "x"); err != nil || string(pem) != "pem of x" {
		t.Errorf("%q, %v", pem, err)
	}
	d := []wire.Denial{{Addr: netip.MustParseAddr("100.64.0.9"), To: netip.MustParseAddrPort("192.0.2.1:80"), Protocol: policy.TCP, Count: 3}}
	if err := c.Denials(ctx, d); err != nil || !slices.Equal(rec.told(), d) {
		t.Errorf("%v, %v", rec.told(), err)
	}
	if s, err := c.Services(ctx); err != nil || len(s) != 1 || s[0].Missing != "name it" {
		t.Errorf("%v, %v", s, err)
	}
	u := upstream.Upstreams{"npm": {URLs: []string{"https://registry.example"}}}
	if err := c.Upstreams(ctx, u); err != nil || cmp.Diff(u, rec.upstreams()) != "" {
		t.Errorf("%v, %v", rec.upstreams(), err)
	}
	// An empty Sync forgets all.
	if err := c.Sync(ctx, nil); err != nil || len(rec.known()) != 0 {
		t.Errorf("%d left, %v", len(rec.known()), err)
	}
}

func TestTheEdgeMakesSockets(t *testing.T) {
	s, _, path := serve(t)
	at := netip.MustParseAddrPort("198.18.0.1:53")
	if _, err := s.UDP(t.Context(), at); !errors.Is(err, errdefs.Unavailable) {
		t.Errorf("without an edge: %v", err)
	}
	c := dial(t, path)
	if err := c.Put(t.Context(), sandbox(1)); err != nil { // the server has the connection now
		t.Fatal(err)
	}
	if _, err := s.UDP(t.Context(), at); !errors.Is(err, errdefs.Unavailable) {
		t.Errorf("without a maker: %v", err)
	}
	c.ServeUDP(func(got netip.AddrPort) (*os.File, error) {
		if got != at {
			return nil, errdefs.New(errdefs.Denied, "gate", "%v", got)
		}
		r, w, err := os.Pipe()
		if err != nil {
			return nil, err
		}
		_, _ = w.WriteString("here")
		w.Close()
		return r, nil
	})
	var open sync.WaitGroup
	for range 20 {
		open.Go(func() {
			f, err := s.UDP(t.Context(), at)
			if err != nil {
				t.Error(err)
				return
			}
			defer f.Close()
			if b, err := io.ReadAll(f); err != nil || string(b) != "here" {
				t.Errorf("%q, %v", b, err)
			}
		})
	}
	open.Wait()
	if _, err := s.UDP(t.Context(), netip.MustParseAddrPort("192.0.2.1:1")); !errors.Is(err, errdefs.Denied) {
		t.Errorf("a refusal: %v", err)
	}
}

func TestWhoMayConnect(t *testing.T) {
	_, _, path := serve(t)
	for range 200 { // the refusal and the end of the connection come together
		if _, err := wire.Dial(t.Context(), path, "ffffffffffffffff"); !errors.Is(err, errdefs.FailedPrecondition) {
			t.Fatalf("another data directory: %v", err)
		}
	}
	if _, err := wire.Dial(t.Context(), path+"-absent", dataID); !errors.Is(err, errdefs.Unavailable) {
		t.Errorf("nobody: %v", err)
	}
	old := dial(t, path)
	next := dial(t, path)
	<-old.Done()
	if err := old.Put(t.Context(), sandbox(1)); !errors.Is(err, errdefs.Unavailable) {
		t.Errorf("the edge of before: %v", err)
	}
	if err := next.Put(t.Context(), sandbox(1)); err != nil {
		t.Error(err)
	}
	// What is no message ends the connection and nothing else.
	raw, err := scm.Dial(t.Context(), path)
	if err != nil {
		t.Fatal(err)
	}
	_ = raw.Send(t.Context(), []byte{9, 1, 2})
	if _, _, err := raw.Recv(t.Context(), make([]byte, 100)); !errors.Is(err, io.EOF) {
		t.Errorf("noise: %v", err)
	}
	_ = raw.Close()
	if err := next.Put(t.Context(), sandbox(2)); err != nil {
		t.Error(err)
	}
	ctx, cancel := context.WithCancelCause(t.Context())
	cause := errors.New("enough")
	cancel(cause)
	if err := next.Put(ctx, sandbox(3)); !errors.Is(err, cause) {
		t.Errorf("a caller that left: %v", err)
	}
	if err := next.Put(t.Context(), sandbox(3)); err != nil {
		t.Errorf("others: %v", err)
	}
}
