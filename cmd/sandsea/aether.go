package main

import (
	"fmt"
	"log/slog"
	"net/netip"
	"os"

	"github.com/spf13/cobra"

	"github.com/sandsea/sandsea/internal/aether"
)

// aetherCommand is the process through which everything goes that leaves a sandbox. An edge starts it, like the keeper.
func (a *app) aetherCommand() *cobra.Command {
	var cfg aether.Config
	var deny []string
	cmd := &cobra.Command{
		Use: "aether", Short: "Carry what leaves sandboxes (started by up)", Hidden: true, Args: cobra.NoArgs,
		RunE: func(cmd *cobra.Command, _ []string) error {
			for _, s := range deny {
				p, err := netip.ParsePrefix(s)
				if err != nil {
					return fmt.Errorf("--deny: %w", err)
				}
				cfg.Deny = append(cfg.Deny, p)
			}
			cfg.Log = slog.New(slog.NewTextHandler(os.Stderr, nil))
			relax(cfg.Log)
			return aether.Run(cmd.Context(), cfg)
		},
	}
	cmd.Flags().StringVar(&cfg.Socket, "socket", "", "where the edge connects")
	cmd.Flags().StringVar(&cfg.DataID, "data-id", "", "id of the data directory")
	cmd.Flags().StringVar(&cfg.Data, "data", "", "data directory")
	cmd.Flags().StringVar(&cfg.Gate, "gate", "", "file of the gate's network namespace")
	cmd.Flags().StringSliceVar(&deny, "deny", nil, "network of the control plane's that no sandbox may reach")
	return cmd
}
