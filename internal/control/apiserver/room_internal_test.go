package apiserver

import (
	"context"
	"errors"
	"net/http"
	"net/http/httptest"
	"strings"
	"testing"
	"time"

	"github.com/sandsea/sandsea/api/sandsea/v1/sandseav1connect"
	"github.com/sandsea/sandsea/internal/control/watcher"
	"github.com/sandsea/sandsea/internal/store/mem"
)

func newIdleServer(t *testing.T) *Server {
	t.Helper()
	st := mem.New(mem.Config{})
	t.Cleanup(func() { _ = st.Close() })
	return New(Config{Store: st, Watcher: watcher.New(watcher.Config{Store: st})})
}

// A small body that is packed may become as large as any.
func TestAPackedMessageWaitsForRoomLikeALargeOne(t *testing.T) {
	s := newIdleServer(t)
	for range largeAtOnce {
		s.large <- struct{}{}
	}
	errLate := errors.New("it waits")
	for name, tc := range map[string]struct {
		header, value string
		waits         bool
	}{
		"as it is":         {"", "", false},
		"said to be as is": {"Content-Encoding", "identity", false},
		"packed":           {"Content-Encoding", "gzip", true},
		"packed by gRPC":   {"Grpc-Encoding", "gzip", true},
	} {
		ctx, stop := context.WithTimeoutCause(t.Context(), 50*time.Millisecond, errLate)
		defer stop()
		r := httptest.NewRequestWithContext(ctx, http.MethodPost, sandseav1connect.FileServiceWriteBatchProcedure,
			strings.NewReader("{}"))
		if tc.header != "" {
			r.Header.Set(tc.header, tc.value)
		}
		_, err := s.roomFor(r, s.calls[sandseav1connect.FileServiceWriteBatchProcedure])
		if errors.Is(err, errLate) != tc.waits {
			t.Errorf("%s: %v", name, err)
		}
	}
}
