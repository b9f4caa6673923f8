package packages

import (
	"context"
	"encoding/json"
	"fmt"
	"io"
	"net/http"
	"os"
	"sync"
	"testing"
	"time"

	"github.com/sandsea/sandsea/internal/aether/upstream"
	"github.com/sandsea/sandsea/internal/testkit/require"
)

const (
	askLimit  = 30 * time.Second
	maxAnswer = 64 << 20
)

// found is what this machine's clients are configured with, asked as `sandsea up` does.
var found = sync.OnceValues(func() (upstream.Upstreams, error) {
	return upstream.Discover(context.Background(), upstream.Node{Env: os.Environ()}, nil)
})

// reached remembers, by service, whether its registry answers.
var reached sync.Map

// registry gives the first URL of a service's upstream, and skips the test if nobody answers there.
func registry(t testing.TB, service, probe string) string {
	t.Helper()
	all, err := found()
	if err != nil {
		t.Fatal(err)
	}
	u := all[service]
	if len(u.URLs) == 0 {
		require.That(t, "registry:"+service, fmt.Errorf("%s", u.Missing))
	}
	once, _ := reached.LoadOrStore(service, sync.OnceValue(func() error {
		_, err := get(context.WithoutCancel(t.Context()), u.URLs[0]+probe, "")
		return err
	}))
	require.That(t, "registry:"+service, once.(func() error)())
	return u.URLs[0]
}

// get asks a registry from outside of any sandbox.
func get(ctx context.Context, url, accept string) ([]byte, error) {
	ctx, stop := context.WithTimeoutCause(ctx, askLimit, fmt.Errorf("%s gave no answer within %s", url, askLimit))
	defer stop()
	req, err := http.NewRequestWithContext(ctx, http.MethodGet, url, nil)
	if err != nil {
		return nil, err
	}
	if accept != "" {
		req.Header.Set("Accept", accept)
	}
	res, err := http.DefaultClient.Do(req)
	if err != nil {
		return nil, err
	}
	defer res.Body.Close()
	if res.StatusCode != http.StatusOK {
		return nil, fmt.Errorf("%s answers %s", url, res.Status)
	}
	return io.ReadAll(io.LimitReader(res.Body, maxAnswer))
}

// ask is get for what must be there.
func ask(t testing.TB, url, accept string) []byte {
	t.Helper()
	b, err := get(t.Context(), url, accept)
	if err != nil {
		t.Fatal(err)
	}
	return b
}

// askJSON reads an answer.
func askJSON(t testing.TB, url, accept string, into any) {
	t.Helper()
	if err := json.Unmarshal(ask(t, url, accept), into); err != nil {
		t.Fatalf("%s: %v", url, err)
	}
}

// day is the first moment of a day.
func day(t testing.TB, text string) time.Time {
	t.Helper()
	at, err := time.Parse(time.DateOnly, text)
	if err != nil {
		t.Fatal(err)
	}
	return at
}
