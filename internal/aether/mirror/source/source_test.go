package source_test

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"net/http"
	"net/http/httptest"
	"path/filepath"
	"sync/atomic"
	"testing"
	"time"

	"github.com/sandsea/sandsea/api/errdefs"
	"github.com/sandsea/sandsea/internal/aether/cache"
	"github.com/sandsea/sandsea/internal/aether/mirror/source"
	"github.com/sandsea/sandsea/internal/aether/mirror/source/sourcetest"
	"github.com/sandsea/sandsea/internal/aether/upstream"
	"github.com/sandsea/sandsea/internal/testkit/wait"
)

func TestOnlyAbsenceLeadsToTheNextUpstream(t *testing.T) {
	first, second := sourcetest.NewUpstream(t), sourcetest.NewUpstream(t)
	s := sourcetest.NewSource(t, upstream.Upstream{})
	bases := []string{first.URL, second.URL}
	second.Put("/x", "second")
	second.Put("/gone", "second")
	second.Put("/refused", "second")
	first.PutFile("/gone", sourcetest.File{Status: http.StatusGone})
	first.PutFile("/refused", sourcetest.File{Status: http.StatusForbidden})
	for path, want := range map[string]error{"/x": nil, "/gone": nil, "/refused": errdefs.Unavailable, "/none": errdefs.NotFound} {
		b, _, base, err := s.ReadFirst(t.Context(), bases, path, cache.Options{})
		if !errors.Is(err, want) || err == nil && (string(b) != "second" || base != second.URL) {
			t.Errorf("%s: %q from %s: %v, want %v", path, b, base, err, want)
		}
	}
	if _, _, _, err := s.ReadFirst(t.Context(), nil, "/x", cache.Options{}); !errors.Is(err, errdefs.NotFound) {
		t.Errorf("no upstream: %v", err)
	}
}

func TestOfflineEveryUpstreamHasWhatCameOfIt(t *testing.T) {
	first, second := sourcetest.NewUpstream(t), sourcetest.NewUpstream(t)
	second.Put("/x", "second")
	bases, dir := []string{first.URL, second.URL}, filepath.Join(t.TempDir(), "cache")
	for _, offline := range []bool{false, true} {
		c, err := cache.Open(cache.Config{Dir: dir, Offline: offline, Log: slog.New(slog.DiscardHandler)})
		if err != nil {
			t.Fatal(err)
		}
		s := source.Source{Cache: c, Client: sourcetest.NewSource(t, upstream.Upstream{}).Client}
		b, _, base, err := s.ReadFirst(t.Context(), bases, "/x", cache.Options{})
		if err != nil || string(b) != "second" || base != second.URL {
			t.Errorf("offline %v: %q from %s: %v", offline, b, base, err)
		}
		if _, _, _, err := s.ReadFirst(t.Context(), bases, "/none", cache.Options{}); offline && !errors.Is(err, errdefs.Unavailable) {
			t.Errorf("what is nowhere: %v", err)
		}
		wait.Until(t, 10*time.Second, func() bool { return c.Stats().Objects == 1 })
		if err := c.Close(); err != nil {
			t.Fatal(err)
		}
	}
}

func TestRefusalsAreForGood(t *testing.T) {
	for status, want := range map[int]bool{404: true, 410: true, 403: true, 401: true, 408: false, 429: false, 500: false, 503: false} {
		if got := source.Refused(fmt.Errorf("x: %w", &cache.StatusError{Status: status})); got != want {
			t.Errorf("%d: got %v", status, got)
		}
	}
	if source.Refused(errdefs.New(errdefs.Unavailable, "x", "y")) || source.Refused(nil) {
		t.Error("something else is a refusal")
	}
}

func TestForgottenObjectsAreFetchedAgain(t *testing.T) {
	up := sourcetest.NewUpstream(t)
	s := sourcetest.NewSource(t, upstream.Upstream{})
	up.Put("/x", "wrong")
	read := func() string {
		b, _, _, err := s.Read(t.Context(), up.URL+"/x", cache.Options{})
		if err != nil {
			t.Fatal(err)
		}
		return string(b)
	}
	if got := read(); got != "wrong" {
		t.Fatal(got)
	}
	up.Put("/x", "right")
	if got := read(); got != "wrong" {
		t.Errorf("an object that cannot change was fetched again: %q", got)
	}
	// An object that has just come is not yet in its place.
	wait.Until(t, 10*time.Second, func() bool {
		s.Forget(t.Context(), up.URL+"/x")
		return read() == "right"
	})
	s.Forget(t.Context(), up.URL+"/none")
}

func TestBelow(t *testing.T) {
	bases := []string{"https://a.test", "https://b.test:8443/x/y"}
	for _, c := range []struct{ host, path, want string }{
		{"a.test", "/p", "/p"},
		{"A.test", "/p", "/p"},
		{"b.test", "/x/y/p", "/p"},
		{"b.test", "/x/yy/p", ""},
		{"b.test", "/x/y", ""},
		{"c.test", "/p", ""},
	} {
		if got, ok := source.Below(bases, c.host, c.path); got != c.want || ok != (c.want != "") {
			t.Errorf("%s%s: got %q %v, want %q", c.host, c.path, got, ok, c.want)
		}
	}
}

func TestEachStaysWithinItsLimitAndEndsWithTheFirstError(t *testing.T) {
	var now, most, calls atomic.Int32
	err := source.Each(t.Context(), 50, 4, func(context.Context, int) error {
		calls.Add(1)
		n := now.Add(1)
		defer now.Add(-1)
		for {
			old := most.Load()
			if n <= old || most.CompareAndSwap(old, n) {
				return nil
			}
		}
	})
	if err != nil || calls.Load() != 50 || most.Load() > 4 {
		t.Errorf("%d calls, %d at once: %v", calls.Load(), most.Load(), err)
	}
	calls.Store(0)
	broken := errors.New("broken")
	err = source.Each(t.Context(), 1000, 1, func(context.Context, int) error {
		calls.Add(1)
		return broken
	})
	if !errors.Is(err, broken) || calls.Load() > 10 {
		t.Errorf("%d calls: %v", calls.Load(), err)
	}
}

func TestUnchanged(t *testing.T) {
	ask := func(tag string) (*httptest.ResponseRecorder, bool) {
		w, r := httptest.NewRecorder(), httptest.NewRequest(http.MethodGet, "/", nil)
		r.Header.Set("If-None-Match", tag)
		return w, source.Unchanged(w, r, []byte("body"))
	}
	w, same := ask("")
	tag := w.Header().Get("ETag")
	if same || tag == "" {
		t.Fatalf("unconditional: %v, tag %q", same, tag)
	}
	for known, want := range map[string]bool{tag: true, "W/" + tag: true, `"x", ` + tag: true, `"x"`: false} {
		if w, same := ask(known); same != want || want && w.Code != http.StatusNotModified {
			t.Errorf("If-None-Match %s: %v, %d", known, same, w.Code)
		}
	}
}
