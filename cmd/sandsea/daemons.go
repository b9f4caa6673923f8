package main

import (
	"fmt"
	"log/slog"
	"os"

	"github.com/spf13/cobra"

	sandseainit "github.com/sandsea/sandsea/init"
	"github.com/sandsea/sandsea/internal/keeper"
	"github.com/sandsea/sandsea/internal/linux/monitor"
	"github.com/sandsea/sandsea/internal/spawner"
)

// The keeper and the spawner are processes of their own that an edge starts, and finds there when it starts again; nobody
// starts them by hand. Edges of other versions do too: their flags are only ever added to.

func (a *app) keeperCommand() *cobra.Command {
	var cfg keeper.Config
	cmd := &cobra.Command{
		Use: "keeper", Short: "Hold descriptors and record output (started by up)", Hidden: true, Args: cobra.NoArgs,
		RunE: func(cmd *cobra.Command, _ []string) error {
			cfg.Log = slog.New(slog.NewTextHandler(os.Stderr, nil))
			relax(cfg.Log)
			return keeper.Run(cmd.Context(), cfg)
		},
	}
	cmd.Flags().StringVar(&cfg.Socket, "socket", "", "where the edge connects")
	cmd.Flags().StringVar(&cfg.DataID, "data-id", "", "id of the data directory")
	cmd.Flags().StringVar(&cfg.Index, "index", "", "directory of the index file")
	cmd.Flags().IntVar(&cfg.Table, "table", 0, "descriptor of what the keeper that this process was has left")
	return cmd
}

func (a *app) spawnerCommand() *cobra.Command {
	var cfg spawner.Config
	cmd := &cobra.Command{
		Use: "spawner", Short: "Fork sandboxes (started by up)", Hidden: true, Args: cobra.NoArgs,
		RunE: func(cmd *cobra.Command, _ []string) error {
			cfg.Log = slog.New(slog.NewTextHandler(os.Stderr, nil))
			relax(cfg.Log)
			cfg.Init = sandseainit.Binary()
			return spawner.Run(cmd.Context(), cfg)
		},
	}
	cmd.Flags().BoolVar(&cfg.Takeover, "takeover", false, "take the socket from a spawner that lives")
	cmd.Flags().StringVar(&cfg.Socket, "socket", "", "where the edge connects")
	cmd.Flags().StringVar(&cfg.DataID, "data-id", "", "id of the data directory")
	return cmd
}

// relax makes a daemon cheaper that works in short bursts, see package monitor. Without it, it only costs more.
func relax(log *slog.Logger) {
	if err := monitor.Relax(monitor.Slack); err != nil {
		log.Debug("the runtime's monitor stays as it is", "err", err)
	}
}

// newLog writes to standard error: plain text for people and journals alike.
func newLog(level string) (*slog.Logger, error) {
	var l slog.Level
	if err := l.UnmarshalText([]byte(level)); err != nil {
		return nil, fmt.Errorf("log level %q: %w", level, err)
	}
	return slog.New(slog.NewTextHandler(os.Stderr, &slog.HandlerOptions{Level: l})), nil
}
