package roster

import "testing"

func TestAPolicyAsksForNoMoreThanTheOperatorAllows(t *testing.T) {
	for _, c := range []struct{ asked, most, want int }{{0, 0, 0}, {0, 5, 5}, {3, 5, 3}, {9, 5, 5}, {9, 0, 9}} {
		if got := within(c.asked, c.most); got != c.want {
			t.Errorf("%d of at most %d: %d, want %d", c.asked, c.most, got, c.want)
		}
	}
}
