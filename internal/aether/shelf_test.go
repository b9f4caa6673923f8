package aether

import (
	"compress/gzip"
	"context"
	"errors"
	"io"
	"log/slog"
	"net"
	"net/http"
	"net/http/httptest"
	"net/netip"
	"strings"
	"testing"
	"time"

	"github.com/sandsea/sandsea/api/errdefs"
	"github.com/sandsea/sandsea/internal/aether/dial"
	"github.com/sandsea/sandsea/internal/aether/upstream"
)

func TestWhereAnUpstreamLeadsIsCheckedUnlessTheOperatorNamedIt(t *testing.T) {
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	defer l.Close()
	here := l.Addr().String()
	control := netip.MustParseAddr("203.0.113.9")
	s := newShelf(nil, dial.New(dial.Config{}), func(a netip.Addr) bool { return a == control }, slog.New(slog.DiscardHandler))
	for addr, why := range map[string]string{
		here: "loopback", "169.254.169.254:80": "metadata", "[::ffff:10.0.0.1]:443": "private", "203.0.113.9:443": "control plane",
	} {
		c, err := s.dial(t.Context(), "tcp", addr)
		if err == nil {
			_ = c.Close()
		}
		if !errors.Is(err, errdefs.Denied) || !strings.Contains(err.Error(), why) {
			t.Errorf("%s: %v, want denied as %s", addr, err, why)
		}
	}
	s.named = map[string]bool{here: true}
	c, err := s.dial(t.Context(), "tcp", here)
	if err != nil {
		t.Fatalf("one that the operator named: %v", err)
	}
	_ = c.Close()
}

func TestListsComeCompressedAndFilesAsTheyAre(t *testing.T) {
	srv := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		w.Header().Set("X-Asked", r.Header.Get("Accept-Encoding"))
		if r.Header.Get("Accept-Encoding") != "gzip" {
			_, _ = io.WriteString(w, "plain")
			return
		}
		w.Header().Set("Content-Encoding", "gzip")
		z := gzip.NewWriter(w)
		_, _ = io.WriteString(z, "plain")
		_ = z.Close()
	}))
	defer srv.Close()
	s := newShelf(nil, dial.New(dial.Config{}), func(netip.Addr) bool { return false }, slog.New(slog.DiscardHandler))
	defer s.transport.CloseIdleConnections()
	s.named = map[string]bool{strings.TrimPrefix(srv.URL, "http://"): true}
	for want, header := range map[string]http.Header{"identity": nil, "gzip": {"Accept-Encoding": {"gzip"}}} {
		resp, err := upstream.NewClient(s.transport, upstream.Upstream{}).Get(t.Context(), srv.URL, header)
		if err != nil {
			t.Fatal(err)
		}
		b, err := io.ReadAll(resp.Body)
		_ = resp.Body.Close()
		if asked := resp.Header.Get("X-Asked"); err != nil || string(b) != "plain" || asked != want {
			t.Errorf("asked for %q, want %q: %q, %v", asked, want, b, err)
		}
	}
}

// A sandbox has so many turns at the package services, which is no matter of others.
func TestTurnsAtTheShelf(t *testing.T) {
	var all turns
	var held []func()
	for range mostAtShelf {
		done, ok := all.take(t.Context(), "greedy")
		if !ok {
			t.Fatal("no turn")
		}
		held = append(held, done)
	}
	ended, cancel := context.WithCancel(t.Context())
	cancel()
	if _, ok := all.take(ended, "greedy"); ok {
		t.Error("one turn too many")
	}
	other, ok := all.take(t.Context(), "other")
	if !ok {
		t.Error("no turn for another")
	}
	other()
	got := make(chan func())
	go func() {
		done, _ := all.take(t.Context(), "greedy")
		got <- done
	}()
	held[0]()
	select {
	case done := <-got:
		done()
	case <-time.After(10 * time.Second):
		t.Fatal("a turn that was given back is nobody's")
	}
	for _, done := range held[1:] {
		done()
	}
	if len(all.all) != 0 {
		t.Errorf("%d sandboxes are remembered", len(all.all))
	}
}
