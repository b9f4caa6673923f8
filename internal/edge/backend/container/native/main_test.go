package native

import (
	"context"
	"fmt"
	"io"
	"log/slog"
	"os"
	"os/signal"
	"path/filepath"
	"syscall"
	"testing"

	sandseainit "github.com/sandsea/sandsea/init"
	"github.com/sandsea/sandsea/internal/keeper"
	"github.com/sandsea/sandsea/internal/spawner"
)

const dataID = "00112233445566778899aabbccddeeff"

// TestMain is also the keeper and the spawner of the tests: SANDSEA_TEST_ROLE is "keeper DIR" or "spawner DIR".
func TestMain(m *testing.M) {
	var role, dir string
	if n, _ := fmt.Sscan(os.Getenv("SANDSEA_TEST_ROLE"), &role, &dir); n < 2 {
		code := m.Run()
		if err := theMachine.destroy(); err != nil {
			fmt.Fprintln(os.Stderr, "the test machine:", err)
			code = max(code, 1)
		}
		os.Exit(code)
	}
	ctx, stop := signal.NotifyContext(context.Background(), syscall.SIGTERM)
	defer stop()
	go func() { // standard input is a pipe that ends with the tests, however they end
		_, _ = io.Copy(io.Discard, os.Stdin)
		os.Exit(2)
	}()
	log := slog.New(slog.NewTextHandler(os.Stderr, &slog.HandlerOptions{Level: slog.LevelWarn}))
	var err error
	if role == "keeper" {
		err = keeper.Run(ctx, keeper.Config{
			Socket: filepath.Join(dir, "keeper.sock"), DataID: dataID, Index: dir, Log: log,
		})
	} else {
		err = spawner.Run(ctx, spawner.Config{
			Socket: filepath.Join(dir, "spawner.sock"), DataID: dataID, Init: sandseainit.Binary(), Log: log,
		})
	}
	if err != nil {
		fmt.Fprintln(os.Stderr, role, err)
		os.Exit(1)
	}
	os.Exit(0)
}
