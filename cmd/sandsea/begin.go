package main

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"net"
	"os"
	"runtime/debug"
	"syscall"
	"time"

	"github.com/spf13/cobra"

	"github.com/sandsea/sandsea/api/errdefs"
	"github.com/sandsea/sandsea/internal/version"
)

// What up, server and edge have in common.

// drainLimit is how long calls in flight get when a daemon ends; those that only wait end at once.
const drainLimit = 10 * time.Second

// gcPercent lets a daemon's heap, a few ten MB of which live on, grow to five times that before it is collected. With
// the default a fifth of its time on a busy node is collection: each create leaves some hundred KB behind.
const gcPercent = 400

// setting is a flag of a daemon that goes before the environment and the configuration file.
type setting struct {
	name string
	of   func(*serverConfig) *string
	help string
}

var (
	setData     = setting{"data", func(c *serverConfig) *string { return &c.Data }, "data directory"}
	setListen   = setting{"listen", func(c *serverConfig) *string { return &c.Listen }, "address of the API"}
	setLogLevel = setting{"log-level", func(c *serverConfig) *string { return &c.LogLevel }, "debug, info, warn or error"}
	setCluster  = setting{
		"cluster-listen", func(c *serverConfig) *string { return &c.ClusterListen }, "address at which nodes reach the store",
	}
	setNode = setting{
		"listen", func(c *serverConfig) *string { return &c.NodeListen }, "address at which servers and nodes reach this one",
	}
)

// settings gives a command its flags and returns what reads them, over environment and file.
func settings(cmd *cobra.Command, list ...setting) (read func() (serverConfig, error)) {
	var file string
	cmd.Flags().StringVar(&file, "config", "", "configuration file (default: "+systemConfig+" if it is there)")
	def := defaultServerConfig()
	given := make([]string, len(list))
	for i, s := range list {
		cmd.Flags().StringVar(&given[i], s.name, *s.of(&def), s.help)
	}
	return func() (serverConfig, error) {
		cfg, err := loadServerConfig(file, os.Getenv)
		if err != nil {
			return cfg, err
		}
		for i, s := range list {
			if cmd.Flags().Changed(s.name) {
				*s.of(&cfg) = given[i]
			}
		}
		return cfg, cfg.validate()
	}
}

// needRoot refuses a command that cannot work without.
func needRoot(what string) error {
	if os.Geteuid() == 0 {
		return nil
	}
	return errdefs.New(errdefs.Denied, "", "%s needs root, clients do not", what).WithHint("Run: sudo sandsea %s", what)
}

// begin sets a daemon's process up and takes its data directory, which the caller closes.
func (a *app) begin(cfg serverConfig) (*dataDir, *slog.Logger, error) {
	if os.Getenv("GOGC") == "" {
		debug.SetGCPercent(gcPercent)
	}
	log, err := newLog(cfg.LogLevel)
	if err != nil {
		return nil, nil, err
	}
	relax(log)
	dir, err := openDataDir(cfg.Data)
	if err != nil {
		return nil, nil, err
	}
	state := "new"
	if !dir.fresh {
		state = "used before"
	}
	a.io.Note("sandsea %s, data %s (%s)", version.String(), cfg.Data, state)
	return dir, log, nil
}

// drain is the context for the calls that are in flight when ctx has ended.
func drain(ctx context.Context) (context.Context, context.CancelFunc) {
	return context.WithTimeoutCause(context.WithoutCancel(ctx), drainLimit, errdefs.Deadline)
}

// listen opens a port; one that is taken says by whom.
func listen(addr, flag string) (net.Listener, error) {
	l, err := (&net.ListenConfig{}).Listen(context.Background(), "tcp", addr)
	if err == nil {
		return l, nil
	}
	host, port, _ := net.SplitHostPort(addr)
	e := errdefs.New(errdefs.FailedPrecondition, "listen "+addr, "%s", rootMessage(err)).WithField(flag, "").
		WithHint("Choose another: --%s HOST:PORT", flag).Wrap(err)
	if errors.Is(err, syscall.EADDRINUSE) {
		e.Msg = "used by another process"
		if who := portHolder(port); who != "" {
			e.Msg = "used by " + who
		}
		if n, aerr := net.DefaultResolver.LookupPort(context.Background(), "tcp", port); aerr == nil {
			e = e.WithHint("Try --%s %s", flag, net.JoinHostPort(host, fmt.Sprint(n+1)))
		}
	}
	return nil, e
}
