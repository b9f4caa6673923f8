// Package sweep brings an edge that starts into agreement with the machine: with what the journal intends, what the
// keeper holds and what the kernel still has.
//
// It owns the order of recovery and the table of what a crash can leave. After Run every sandbox of the journal is
// either adopted or on its way to Ended, and nothing bears our names that no record knows. Run is called once, before
// the node takes calls; it starts no sandbox.
package sweep

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"log/slog"
	"os"
	"path/filepath"
	"time"

	"github.com/sandsea/sandsea/api/errdefs"
	"github.com/sandsea/sandsea/internal/edge/backend"
	"github.com/sandsea/sandsea/internal/edge/runner"
	"github.com/sandsea/sandsea/internal/keeper"
	"github.com/sandsea/sandsea/internal/sandbox"
)

// Config is what a Run works with.
type Config struct {
	Runner  *runner.Runner
	Backend backend.Backend
	Keeper  keeper.Client
	Roster  *Roster
	// Output is the directory of recorded output, DIR/output.
	Output string
	Log    *slog.Logger
}

// artefact is something that a crash can leave, with its undo. Undo keeps what a living or remembered sandbox has.
type artefact struct {
	what string
	undo func(context.Context, Config) error
}

// table lists everything, in the order of its undo: what could still use the rest goes first.
func table() []artefact {
	return []artefact{
		{"processes, control groups, mounts, writable layers and uid ranges of sandboxes", undoBackend},
		{"descriptors and recordings that the keeper holds", undoHeld},
		{"records of output", undoOutput},
	}
}

// Run recovers, sweeps and then lets the Runner go on. An error means that the node must not take sandboxes.
func Run(ctx context.Context, c Config) error {
	begin := time.Now()
	if err := c.Runner.Load(); err != nil {
		return fmt.Errorf("read the journal: %w", err)
	}
	if err := c.Runner.Recover(ctx, c.Roster); err != nil {
		return err
	}
	for _, a := range table() {
		if err := a.undo(ctx, c); err != nil {
			return fmt.Errorf("sweep %s: %w", a.what, err)
		}
	}
	c.Roster.Close()
	c.Runner.Resume()
	all, _ := c.Runner.Roster()
	c.Log.Info("recovered", "sandboxes", len(all), "took", time.Since(begin))
	return nil
}

func undoBackend(ctx context.Context, c Config) error { return c.Backend.Sweep(ctx, c.Runner.Spares) }

func undoHeld(ctx context.Context, c Config) error {
	var errs []error
	for _, id := range c.Roster.IDs() {
		if c.Runner.Keeps(id) {
			continue
		}
		err := c.Keeper.Release(ctx, keeper.Key{Sandbox: string(id)})
		if err != nil && !errors.Is(err, errdefs.NotFound) {
			errs = append(errs, err)
		}
	}
	return errors.Join(errs...)
}

func undoOutput(_ context.Context, c Config) error {
	entries, err := os.ReadDir(c.Output)
	if errors.Is(err, fs.ErrNotExist) {
		return nil
	}
	if err != nil {
		return err
	}
	var errs []error
	for _, e := range entries {
		if c.Runner.Remembers(sandbox.ID(e.Name())) {
			continue
		}
		errs = append(errs, os.RemoveAll(filepath.Join(c.Output, e.Name())))
	}
	return errors.Join(errs...)
}
