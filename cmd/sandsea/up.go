package main

import (
	"context"
	"errors"
	"fmt"
	"sync"

	"github.com/spf13/cobra"

	"github.com/sandsea/sandsea/cmd/sandsea/ui"
	"github.com/sandsea/sandsea/internal/edge/probe"
)

func (a *app) upCommand() *cobra.Command {
	cmd := &cobra.Command{
		Use:   "up",
		Short: "Run the whole platform on this machine",
		Long: `Runs API server, placement, watcher, store and edge in one process, and starts the keeper and the spawner beside it.
Prints "ready URL" on standard output when sandboxes can be created. SIGTERM ends the daemons, never the sandboxes: the next
up takes them back. sandsea down ends both.`,
		Example: "  sudo sandsea up\n  sudo sandsea up --data /srv/sandsea --listen 0.0.0.0:7070",
		Args:    cobra.NoArgs,
	}
	read := settings(cmd, setData, setListen, setLogLevel)
	cmd.RunE = func(cmd *cobra.Command, _ []string) error {
		cfg, err := read()
		if err == nil {
			err = needRoot("up")
		}
		if err != nil {
			return err
		}
		return a.up(cmd.Context(), cfg)
	}
	return cmd
}

// up runs everything until ctx ends.
func (a *app) up(ctx context.Context, cfg serverConfig) (err error) {
	dir, log, err := a.begin(cfg)
	if err != nil {
		return err
	}
	defer dir.close()
	if dir.isNode() {
		return wrongDirectory(dir, "a node of a cluster", "edge")
	}
	door, err := listen(cfg.Listen, "listen")
	if err != nil {
		return err
	}
	defer door.Close()
	st, err := a.openStore(ctx, dir, alone, log)
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, st.Close()) }()
	first, err := bootstrap(ctx, st, dir)
	if err != nil {
		return err
	}
	at, err := onSocket(dir).identify(ctx, dir, st)
	if err != nil {
		return err
	}
	e, err := openEdge(ctx, dir, cfg, st, at, log)
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, e.close()) }()
	if err := e.serve(ctx); err != nil {
		return err
	}
	a.describeNode(e)
	a.describeToken(first)
	stopDebug, err := serveDebug(dir, log)
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, stopDebug()) }()
	s, err := startServer(ctx, st, alone, log)
	if err != nil {
		return err
	}
	defer s.stop()
	if err := s.serve(ctx, door); err != nil {
		return err
	}
	fmt.Fprintln(a.io.Out, "ready "+s.url)
	a.firstSteps(ctx, st, s.url, first.File)
	if err := s.await(ctx, e.lost); err != nil {
		return err
	}
	a.io.Note("stopping daemons; %s (sandsea up takes them back,\nsandsea down ends them)",
		counted(e.running(), "sandbox keeps running", "sandboxes keep running"))
	// Both at once: a call through the API is one of the edge too.
	var wg sync.WaitGroup
	defer wg.Wait()
	wg.Go(func() { e.drain(ctx) })
	s.drain(ctx)
	return nil
}

// describeNode prints what the node is and enforces.
func (a *app) describeNode(e *edge) {
	c := e.caps
	kept := ""
	if n := e.running(); n > 0 {
		kept = ", " + sandboxes(n) + " kept running"
	}
	a.io.Note("  node       %s: %d CPUs, %s, Linux %s, cgroup %s%s", e.id.Name, c.CPUs, ui.LongSize(c.Memory), c.Kernel, c.Cgroup, kept)
	line, _ := probe.Summary(c)
	a.io.Note("  %s", line)
}
