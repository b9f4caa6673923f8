package span_test

import (
	"testing"
	"time"

	"github.com/sandsea/sandsea/internal/span"
)

func TestShort(t *testing.T) {
	for d, want := range map[time.Duration]string{
		2 * time.Second: "2s", 3 * time.Minute: "3m", 2 * time.Hour: "2h", 5 * 24 * time.Hour: "5d", -time.Second: "0s",
	} {
		if got := span.Short(d); got != want {
			t.Errorf("Short(%v) = %q, want %q", d, got, want)
		}
	}
}
