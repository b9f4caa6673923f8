package fake_test

import (
	"testing"

	"github.com/sandsea/sandsea/internal/edge/backend"
	"github.com/sandsea/sandsea/internal/edge/backend/conform"
	"github.com/sandsea/sandsea/internal/edge/backend/fake"
	"github.com/sandsea/sandsea/internal/sandbox"
)

func TestTheFakeConforms(t *testing.T) {
	conform.Run(t, func(t *testing.T) conform.Fixture {
		w := fake.NewWorld()
		k := fake.NewKeeper()
		t.Cleanup(func() { w.Close(); k.Kill() })
		return conform.Fixture{
			Open: func(*testing.T) backend.Backend { return fake.New(w, k.Connect()) },
			Left: func(*testing.T) []string {
				var out []string
				for _, id := range w.Boxes() {
					out = append(out, string(id))
				}
				return out
			},
			Tree: []string{"tree", "60"},
			Gate: true,
			KillInit: func(_ *testing.T, id sandbox.ID) {
				w.KillInit(id, backend.Exit{Cause: sandbox.CauseInfraKilled, Detail: "SIGKILL"})
			},
		}
	})
}
