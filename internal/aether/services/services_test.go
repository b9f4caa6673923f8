package services

import (
	"context"
	"net/http"
	"net/http/httptest"
	"testing"
	"testing/synctest"
	"time"
)

// A request that comes while the node still asks its package clients where packages come from.
func TestARequestWaitsUntilItIsKnownWhatServicesThereAre(t *testing.T) {
	tests := []struct {
		name   string
		after  time.Duration // until Use; 0: never
		gives  time.Duration // until the client goes; 0: never
		took   time.Duration
		status int
	}{
		{"known soon", 5 * time.Second, 0, 5 * time.Second, http.StatusNotFound},
		{"never known", 0, 0, knownWithin, http.StatusServiceUnavailable},
		{"the client goes", 0, time.Second, time.Second, http.StatusServiceUnavailable},
	}
	for _, tt := range tests {
		t.Run(tt.name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				var s Set
				if tt.after > 0 {
					time.AfterFunc(tt.after, func() { s.Use(nil) })
				}
				ctx, stop := context.WithCancelCause(t.Context())
				defer stop(nil)
				if tt.gives > 0 {
					time.AfterFunc(tt.gives, func() { stop(context.Canceled) })
				}
				w := httptest.NewRecorder()
				began := time.Now()
				s.ServeGateway(w, httptest.NewRequestWithContext(ctx, http.MethodGet, "/pypi/simple/six/", nil), nil, "http://gateway")
				if took := time.Since(began); took != tt.took || w.Code != tt.status {
					t.Errorf("got %d after %s, want %d after %s", w.Code, took, tt.status, tt.took)
				}
			})
		})
	}
}

func TestAKnownSetAnswersAtOnce(t *testing.T) {
	var s Set
	s.Use(nil)
	s.Use(nil) // as often as upstreams change
	w := httptest.NewRecorder()
	s.ServeGateway(w, httptest.NewRequestWithContext(t.Context(), http.MethodGet, "/pypi/", nil), nil, "http://gateway")
	if w.Code != http.StatusNotFound {
		t.Errorf("got %d", w.Code)
	}
}
