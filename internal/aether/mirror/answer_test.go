package mirror_test

import (
	"log/slog"
	"net/http"
	"path/filepath"
	"strings"
	"testing"

	"github.com/sandsea/sandsea/internal/aether/cache"
	"github.com/sandsea/sandsea/internal/aether/mirror/crates"
	"github.com/sandsea/sandsea/internal/aether/mirror/source"
	"github.com/sandsea/sandsea/internal/aether/mirror/source/sourcetest"
	"github.com/sandsea/sandsea/internal/aether/upstream"
	"github.com/sandsea/sandsea/internal/policy"
)

func TestACallerIsNotToldWhereAnUpstreamIsThatIsAway(t *testing.T) {
	const place = "127.0.0.1:1" // a port that nobody is given
	c, err := cache.Open(cache.Config{Dir: filepath.Join(t.TempDir(), "cache"), Log: slog.New(slog.DiscardHandler)})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = c.Close() })
	u := upstream.Upstream{URLs: []string{"http://" + place}}
	m := sourcetest.Serve(t, crates.New(source.Source{Cache: c, Client: upstream.NewClient(&http.Transport{}, u)}, u), policy.World{})
	got := m.Get("/index/se/rd/serde")
	if got.Status != http.StatusServiceUnavailable || strings.Contains(got.Body, place) || !strings.Contains(got.Body, "does not answer") {
		t.Errorf("%d %s", got.Status, got.Body)
	}
	if e := m.Events(); len(e) != 1 || !strings.Contains(e[0].Error, place) {
		t.Errorf("the log does not say where: %+v", e)
	}
}
