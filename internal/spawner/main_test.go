package spawner_test

import (
	"context"
	"log/slog"
	"os"
	"os/signal"
	"syscall"
	"testing"

	sandseainit "github.com/sandsea/sandsea/init"
	"github.com/sandsea/sandsea/internal/spawner"
)

const dataID = "0123456789abcdef"

// TestMain is also the spawner process of the tests.
func TestMain(m *testing.M) {
	if socket := os.Getenv("SANDSEA_TEST_SPAWNER"); socket != "" {
		ctx, stop := signal.NotifyContext(context.Background(), syscall.SIGTERM)
		defer stop()
		if err := spawner.Run(ctx, spawner.Config{
			Socket: socket, Takeover: os.Getenv("SANDSEA_TEST_TAKEOVER") != "", DataID: dataID, Init: sandseainit.Binary(), Log: slog.New(slog.NewTextHandler(os.Stderr, nil)),
		}); err != nil {
			println(err.Error())
			os.Exit(1)
		}
		os.Exit(0)
	}
	os.Exit(m.Run())
}
