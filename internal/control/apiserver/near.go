package apiserver

import (
	"slices"
	"strings"

	"github.com/sandsea/sandsea/api/errdefs"
	"github.com/sandsea/sandsea/internal/typo"
)

// notFound says that there is none, what resembles it, and how to see all.
func notFound(object, msg, name string, names []string, list string) *errdefs.Error {
	e := errdefs.New(errdefs.NotFound, object, "%s", msg)
	e.Near = near(name, names)
	hint := "All: " + list
	if len(e.Near) > 0 {
		hint = "Did you mean " + e.Near[0] + "? " + hint
	}
	return e.WithHint("%s", hint)
}

// near gives the names within two edits of name, nearest first, at most three; a name with a tag is compared without it
// too.
func near(name string, names []string) []string {
	type hit struct {
		name string
		d    int
	}
	const most = 2
	if len(name) > 256 {
		return nil
	}
	var hits []hit
	bare, _, _ := strings.Cut(name, ":")
	for _, n := range names {
		d := typo.Distance(name, n, most)
		if b, _, tagged := strings.Cut(n, ":"); tagged {
			d = min(d, typo.Distance(bare, b, most))
		}
		if d <= most && d < len(name) {
			hits = append(hits, hit{n, d})
		}
	}
	slices.SortStableFunc(hits, func(a, b hit) int { return a.d - b.d })
	var out []string
	for _, h := range hits[:min(3, len(hits))] {
		out = append(out, h.name)
	}
	return out
}
