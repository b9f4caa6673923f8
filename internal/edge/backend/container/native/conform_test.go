package native

import (
	"testing"

	"github.com/sandsea/sandsea/internal/edge/backend"
	"github.com/sandsea/sandsea/internal/edge/backend/conform"
	"github.com/sandsea/sandsea/internal/linux/pidfd"
	"github.com/sandsea/sandsea/internal/sandbox"
)

func TestConform(t *testing.T) {
	m := use(t)
	conform.Run(t, func(*testing.T) conform.Fixture {
		var current *edge
		return conform.Fixture{
			Plan: m.plan(),
			Open: func(t *testing.T) backend.Backend {
				if current != nil {
					current.close() // as the death of an edge would
				}
				current = m.open(t)
				return current
			},
			Left: func(t *testing.T) []string { return m.left(t) },
			Tree: []string{"sh", "-c", "sleep 60 & sleep 60 & wait"},
			KillInit: func(t *testing.T, id sandbox.ID) {
				current.mu.Lock()
				i := current.instances[id]
				current.mu.Unlock()
				if err := pidfd.Signal(i.pidfd, 9); err != nil {
					t.Fatal(err)
				}
			},
			Limits: smallLimits,
		}
	})
}
