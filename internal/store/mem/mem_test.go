package mem_test

import (
	"testing"

	"github.com/sandsea/sandsea/internal/store"
	"github.com/sandsea/sandsea/internal/store/conform"
	"github.com/sandsea/sandsea/internal/store/mem"
)

func TestStore(t *testing.T) {
	conform.Run(t, func(*testing.T) (store.Store, conform.Faults) {
		s := mem.New(mem.Config{})
		return s, conform.Faults{Compact: s.Compact, Away: s.SetAway, LoseAnswers: s.LoseAnswers}
	})
}
