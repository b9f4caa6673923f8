package main

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"os"
	"strconv"
	"strings"
	"syscall"
	"time"

	"github.com/spf13/cobra"
	"golang.org/x/sync/errgroup"

	"github.com/sandsea/sandsea/api/errdefs"
	"github.com/sandsea/sandsea/cmd/sandsea/ui"
	"github.com/sandsea/sandsea/internal/cluster"
	"github.com/sandsea/sandsea/internal/edge/cgroup"
	"github.com/sandsea/sandsea/internal/edge/netslot"
	"github.com/sandsea/sandsea/internal/edge/supervise"
	"github.com/sandsea/sandsea/internal/edge/uidrange"
	"github.com/sandsea/sandsea/internal/edge/upper"
	"github.com/sandsea/sandsea/internal/store/etcd"
)

const (
	// daemonEnd is how long `up` may take to follow SIGTERM: its own drain and some.
	daemonEnd = drainLimit + 20*time.Second
	// stopAtOnce is how many sandboxes end at the same time.
	stopAtOnce = 16
)

func (a *app) downCommand() *cobra.Command {
	var file, data string
	cmd := &cobra.Command{
		Use:   "down",
		Short: "End the daemons and every sandbox of this machine",
		Long: `Ends sandsea up or edge, every sandbox that it ran, aether, keeper and spawner, and removes what they had: cgroups,
writable layers, mounts. Images, records, the token and what made the machine a node stay in the data directory. Of
sandsea server only the daemon is ended: sandboxes are the nodes'.

On a terminal it asks first, unless --yes is given; without one it does not ask.`,
		Example: "  sudo sandsea down\n  sudo sandsea down --data /srv/sandsea --yes",
		Args:    cobra.NoArgs,
		RunE: func(cmd *cobra.Command, _ []string) error {
			cfg, err := loadServerConfig(file, os.Getenv)
			if err != nil {
				return err
			}
			if cmd.Flags().Changed("data") {
				cfg.Data = data
			}
			if err := cfg.validate(); err != nil {
				return err
			}
			return a.down(cmd.Context(), cfg)
		},
	}
	cmd.Flags().StringVar(&file, "config", "", "configuration file")
	cmd.Flags().StringVar(&data, "data", defaultServerConfig().Data, "data directory")
	return cmd
}

func (a *app) down(ctx context.Context, cfg serverConfig) error {
	if _, err := os.Stat(cfg.Data); errors.Is(err, os.ErrNotExist) {
		a.io.Note("nothing runs: there is no %s", cfg.Data)
		return nil
	}
	if (&dataDir{path: cfg.Data}).hasEdge() {
		if err := needRoot("down"); err != nil {
			return err
		}
	}
	// A script has no terminal to ask on, and has said what it wants; a person is asked.
	if a.io.InTTY && a.io.ErrTTY {
		if yes, _ := a.io.Ask("End the daemons and every sandbox? Their files are lost, their logs stay."); !yes {
			return nil
		}
	}
	began := time.Now()
	dir, ran, err := a.takeOver(ctx, cfg.Data)
	if err != nil {
		return err
	}
	defer dir.close()
	if !dir.hasEdge() {
		if err := removeDoors(dir); err != nil {
			return err
		}
		if !ran {
			a.io.Note("nothing runs: %s has no daemon", cfg.Data)
			return nil
		}
		a.io.Note("down in %s: the server ended; it ran no sandboxes", ui.Took(time.Since(began)))
		return nil
	}
	ended, err := a.endSandboxes(ctx, dir, cfg)
	if err != nil {
		// What cannot be ended in order is ended by force; the next start records it.
		a.io.Note("sandsea: %s; ending by force", ui.Text(err.Error()))
	}
	if err := removeAll(ctx, dir); err != nil {
		return err
	}
	if err != nil {
		a.io.Note("down in %s: every sandbox ended; the next start on this directory records it", ui.Took(time.Since(began)))
		return nil
	}
	a.io.Note("down in %s: %s ended", ui.Took(time.Since(began)), sandboxes(ended))
	return nil
}

// takeOver ends the daemon that holds the data directory, if one ran, and locks it for us.
func (a *app) takeOver(ctx context.Context, path string) (dir *dataDir, ran bool, err error) {
	deadline := time.Now().Add(daemonEnd)
	for {
		dir, err := openDataDir(path)
		if err == nil || !errors.Is(err, errdefs.AlreadyExists) {
			return dir, ran, err
		}
		if time.Now().After(deadline) {
			return nil, ran, errdefs.New(errdefs.Deadline, path, "the daemon did not end in %s", daemonEnd).
				WithHint("See its log, or kill it: the pid is in %s/lock", path)
		}
		if !ran {
			text, rerr := os.ReadFile(path + "/lock")
			pid, perr := strconv.Atoi(strings.TrimSpace(string(text)))
			if rerr == nil && perr == nil && pid > 1 {
				err := syscall.Kill(pid, syscall.SIGTERM)
				if err != nil && !errors.Is(err, syscall.ESRCH) { // it may end by itself at this moment
					return nil, false, fmt.Errorf("end the daemon (pid %d): %w", pid, err)
				}
				ran = err == nil
			}
		}
		select {
		case <-ctx.Done():
			return nil, ran, context.Cause(ctx)
		case <-time.After(50 * time.Millisecond):
		}
	}
}

// endSandboxes takes the node's sandboxes over as a restart would, and stops each, so that its end is recorded.
func (a *app) endSandboxes(ctx context.Context, dir *dataDir, cfg serverConfig) (ended int, err error) {
	log, err := newLog("error")
	if err != nil {
		return 0, err
	}
	st, at, err := recordsOf(ctx, dir, log)
	if err != nil {
		return 0, err
	}
	defer func() { err = errors.Join(err, st.Close()) }()
	cfg.WarmSandboxes = 0 // none is to start
	if at, err = at.identify(ctx, dir, st); err != nil {
		return 0, err
	}
	e, err := openEdge(ctx, dir, cfg, st, at, log)
	if err != nil {
		return 0, err
	}
	defer func() { err = errors.Join(err, e.close()) }()
	all, _ := e.runner.Roster()
	var group errgroup.Group
	group.SetLimit(stopAtOnce)
	for _, s := range all {
		if s.End.Cause != "" {
			continue
		}
		ended++
		group.Go(func() error {
			_, err := e.runner.Stop(ctx, s.ID, 0, "sandsea down")
			return err
		})
	}
	return ended, group.Wait()
}

// recordsOf opens the store that knows this node's sandboxes, its own or the cluster's.
func recordsOf(ctx context.Context, dir *dataDir, log *slog.Logger) (*etcd.Store, place, error) {
	if !dir.isNode() {
		st, err := etcd.Open(ctx, etcd.Config{Dir: dir.join("etcd"), Log: log})
		return st, onSocket(dir), err
	}
	v, err := cluster.ReadInvitation(dir.join(joinFile))
	if err != nil {
		return nil, place{}, err
	}
	id, err := v.Identity()
	if err != nil {
		return nil, place{}, err
	}
	st, err := dialStore(ctx, v, id, log)
	return st, place{name: v.Name, control: v.Store}, err
}

// removeAll ends aether, keeper and spawner and removes everything of this edge from the machine.
func removeAll(ctx context.Context, dir *dataDir) error {
	log, err := newLog("error")
	if err != nil {
		return err
	}
	var errs []error
	groups, err := cgroup.Open(cgroup.Config{Tag: dir.tag(), Log: log})
	errs = append(errs, err)
	for _, name := range []string{"aether", "spawner", "keeper"} {
		path := ""
		if groups != nil {
			path = groups.DaemonPath(name)
		}
		errs = append(errs, supervise.Stop(ctx, dir.join("run", name+".sock"), path))
	}
	if groups != nil {
		if gate, err := netslot.Open(ctx, gateConfig(dir, groups, log)); err == nil {
			errs = append(errs, gate.Destroy(ctx))
		} else {
			errs = append(errs, netslot.Remove(dir.path))
		}
		errs = append(errs, groups.Destroy(ctx))
	}
	if uppers, err := upper.Open(ctx, upper.Config{Dir: dir.path, Log: log, Pool: -1}); err == nil {
		errs = append(errs, uppers.Destroy())
	}
	if ranges, err := uidrange.Open(uidrange.Config{Tag: dir.tag(), Log: log, Warm: -1}); err == nil {
		errs = append(errs, ranges.Release())
	}
	errs = append(errs, removeDoors(dir))
	// Archives that were uploaded and imports that were cut off.
	left, err := os.ReadDir(dir.join("tmp"))
	errs = append(errs, err)
	for _, e := range left {
		errs = append(errs, os.RemoveAll(dir.join("tmp", e.Name())))
	}
	return errors.Join(errs...)
}

// removeDoors removes what daemons that have ended leave in DIR/run.
func removeDoors(dir *dataDir) error {
	var errs []error
	for _, name := range []string{"keeper.sock", "spawner.sock", "aether.sock", "aether-debug.sock", aetherTold, "node.sock", "debug.sock", "keeper.index"} {
		if err := os.Remove(dir.join("run", name)); err != nil && !errors.Is(err, os.ErrNotExist) {
			errs = append(errs, err)
		}
	}
	return errors.Join(errs...)
}
