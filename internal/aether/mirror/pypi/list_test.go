package pypi

import (
	"encoding/json"
	"fmt"
	"net/http"
	"net/http/httptest"
	"strings"
	"testing"

	"github.com/sandsea/sandsea/internal/aether/cache"
	"github.com/sandsea/sandsea/internal/aether/mirror"
	"github.com/sandsea/sandsea/internal/policy"
)

// pieces is a client that looks at how large the parts are in which an answer comes.
type pieces struct {
	*httptest.ResponseRecorder
	largest int
}

// Write implements http.ResponseWriter.
func (p *pieces) Write(b []byte) (int, error) {
	p.largest = max(p.largest, len(b))
	return p.ResponseRecorder.Write(b)
}

// The list of all projects has tens of megabytes: who asks for it often, and reads slowly, must not have it held for him.
func TestTheListOfAllIsNotHeldInMemory(t *testing.T) {
	x := newIndex(t)
	const n = 20_000
	for i := range n {
		x.projects[fmt.Sprintf("project-%d", i)] = nil
	}
	x.projects["denied"] = nil
	b := newBed(t, x.upstream(), cache.Config{})
	c := &mirror.Caller{Base: "http://mirror.example/pypi", World: policy.World{Deny: []string{"pypi:denied"}}, Report: func(mirror.Artefact) {}}
	for _, accept := range []string{typeJSON, typeHTML} {
		r := httptest.NewRequestWithContext(mirror.WithCaller(t.Context(), c), http.MethodGet, "/simple/", nil)
		r.Header.Set("Accept", accept)
		w := &pieces{ResponseRecorder: httptest.NewRecorder()}
		b.s.ServeHTTP(w, r)
		got := w.Body.String()
		if w.Code != http.StatusOK || strings.Count(got, "project-") < n || strings.Contains(got, "denied") || len(got) < 5*w.largest || w.largest > 128<<10 {
			t.Errorf("%s: %d, %d bytes, %d of them at once", accept, w.Code, len(got), w.largest)
		}
		if accept != typeJSON {
			continue
		}
		var list struct {
			Projects []struct{ Name string }
		}
		if err := json.Unmarshal(w.Body.Bytes(), &list); err != nil || len(list.Projects) != n {
			t.Errorf("%d projects, %v", len(list.Projects), err)
		}
	}
}
