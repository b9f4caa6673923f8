package typo_test

import (
	"testing"

	"pgregory.net/rapid"

	"github.com/sandsea/sandsea/internal/typo"
)

func TestDistanceCountsSlips(t *testing.T) {
	for _, c := range []struct {
		a, b string
		want int
	}{
		{"", "", 0},
		{"", "ab", 2},
		{"stop", "stop", 0},
		{"stop", "stpo", 1}, // a swap is one slip
		{"stop", "stopp", 1},
		{"stop", "sop", 1},
		{"stop", "step", 1},
		{"stop", "tsep", 2},
		{"stop", "list", 3}, // and more: it stops counting
		{"memory", "m", 3},
	} {
		if got := typo.Distance(c.a, c.b, 2); got != c.want {
			t.Errorf("Distance(%q, %q, 2) = %d, want %d", c.a, c.b, got, c.want)
		}
	}
}

func TestDistanceIsTheSameBothWaysAndUpToTheLimit(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		word := rapid.StringOfN(rapid.RuneFrom([]rune("ab-")), 0, 9, -1)
		a, b := word.Draw(t, "a"), word.Draw(t, "b")
		whole := typo.Distance(a, b, 100)
		if (whole == 0) != (a == b) {
			t.Errorf("Distance(%q, %q) = %d", a, b, whole)
		}
		for most := range 4 {
			got, back := typo.Distance(a, b, most), typo.Distance(b, a, most)
			if want := min(whole, most+1); got != want || back != want {
				t.Errorf("Distance(%q, %q, %d) = %d and %d back, want %d", a, b, most, got, back, want)
			}
		}
	})
}
