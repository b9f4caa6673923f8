package apiserver

import (
	"slices"
	"strings"

	"github.com/sandsea/sandsea/api/errdefs"
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
	if len(name) > 256 {
		return nil
	}
	var hits []hit
	bare, _, _ := strings.Cut(name, ":")
	for _, n := range names {
		d := distance(name, n)
		if b, _, tagged := strings.Cut(n, ":"); tagged {
			d = min(d, distance(bare, b))
		}
		if d <= 2 && d < len(name) {
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

// distance counts the edits between two short names: insert, delete, replace, swap of neighbours.
func distance(a, b string) int {
	if max(len(a)-len(b), len(b)-len(a)) > 2 {
		return 3
	}
	before, last, row := make([]int, len(b)+1), make([]int, len(b)+1), make([]int, len(b)+1)
	for j := range last {
		last[j] = j
	}
	for i := 1; i <= len(a); i++ {
		row[0] = i
		for j := 1; j <= len(b); j++ {
			cost := 1
			if a[i-1] == b[j-1] {
				cost = 0
			}
			row[j] = min(last[j]+1, row[j-1]+1, last[j-1]+cost)
			if i > 1 && j > 1 && a[i-1] == b[j-2] && a[i-2] == b[j-1] {
				row[j] = min(row[j], before[j-2]+1)
			}
		}
		before, last, row = last, row, before
	}
	return last[len(b)]
}
