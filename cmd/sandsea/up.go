package main

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"net"
	"net/http"
	"os"
	"runtime/debug"
	"sync"
	"syscall"
	"time"

	"github.com/spf13/cobra"

	"github.com/sandsea/sandsea/api/errdefs"
	"github.com/sandsea/sandsea/cmd/sandsea/ui"
	"github.com/sandsea/sandsea/internal/control/apiserver"
	"github.com/sandsea/sandsea/internal/control/iam"
	"github.com/sandsea/sandsea/internal/control/nodeclient"
	"github.com/sandsea/sandsea/internal/control/watcher"
	"github.com/sandsea/sandsea/internal/edge/probe"
	"github.com/sandsea/sandsea/internal/store"
	"github.com/sandsea/sandsea/internal/store/etcd"
	"github.com/sandsea/sandsea/internal/store/keys"
	"github.com/sandsea/sandsea/internal/version"
)

// drainLimit is how long calls in flight get when the daemons end.
const drainLimit = 10 * time.Second

func (a *app) upCommand() *cobra.Command {
	var file, data, listen, level string
	cmd := &cobra.Command{
		Use:   "up",
		Short: "Run the whole platform on this machine",
		Long: `Runs API server, placement, watcher, store and edge in one process, and starts the keeper and the spawner beside it.
Prints "ready URL" on standard output when sandboxes can be created. SIGTERM ends the daemons, never the sandboxes: the next
up takes them back. sandsea down ends both.`,
		Example: "  sudo sandsea up\n  sudo sandsea up --data /srv/sandsea --listen 0.0.0.0:7070",
		Args:    cobra.NoArgs,
		RunE: func(cmd *cobra.Command, _ []string) error {
			cfg, err := loadServerConfig(file, os.Getenv)
			if err != nil {
				return err
			}
			for flag, to := range map[string]*string{"data": &cfg.Data, "listen": &cfg.Listen, "log-level": &cfg.LogLevel} {
				if cmd.Flags().Changed(flag) {
					*to = map[string]string{"data": data, "listen": listen, "log-level": level}[flag]
				}
			}
			if err := cfg.validate(); err != nil {
				return err
			}
			if os.Geteuid() != 0 {
				return errdefs.New(errdefs.Denied, "", "up needs root, clients do not").WithHint("Run: sudo sandsea up")
			}
			return a.up(cmd.Context(), cfg)
		},
	}
	def := defaultServerConfig()
	cmd.Flags().StringVar(&file, "config", "", "configuration file (default: "+systemConfig+" if it is there)")
	cmd.Flags().StringVar(&data, "data", def.Data, "data directory")
	cmd.Flags().StringVar(&listen, "listen", def.Listen, "address of the API")
	cmd.Flags().StringVar(&level, "log-level", def.LogLevel, "debug, info, warn or error")
	return cmd
}

// gcPercent lets the daemon's heap, a few ten MB of which live on, grow to five times that before it is collected. With
// the default a fifth of the daemon's time on a busy node is collection: each create leaves some hundred KB behind.
const gcPercent = 400

// up runs everything until ctx ends.
func (a *app) up(ctx context.Context, cfg serverConfig) (err error) {
	if os.Getenv("GOGC") == "" {
		debug.SetGCPercent(gcPercent)
	}
	log, err := newLog(cfg.LogLevel)
	if err != nil {
		return err
	}
	relax(log)
	dir, err := openDataDir(cfg.Data)
	if err != nil {
		return err
	}
	defer dir.close()
	door, err := listenAPI(cfg.Listen)
	if err != nil {
		return err
	}
	defer door.Close()
	state := "new"
	if !dir.fresh {
		state = "used before"
	}
	a.io.Note("sandsea %s, data %s (%s)", version.String(), cfg.Data, state)

	began := time.Now()
	st, err := etcd.Open(ctx, etcd.Config{Dir: dir.join("etcd"), Log: log, OnProgress: func(p etcd.Progress) {
		a.io.Note("  store      %s, %s so far", p, ui.Took(time.Since(began)))
	}})
	if err != nil {
		return fmt.Errorf("store: %w", err)
	}
	defer func() { err = errors.Join(err, st.Close()) }()
	a.io.Note("  store      etcd, embedded, %s", ui.Took(time.Since(began)))
	first, err := iam.Bootstrap(ctx, st, dir.join("admin.token"))
	if err != nil {
		return err
	}
	e, err := openEdge(ctx, dir, cfg, st, log)
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, e.close()) }()
	a.describe(e, first)
	stopDebug, err := serveDebug(dir, log)
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, stopDebug()) }()

	s, err := startServer(ctx, st, log)
	if err != nil {
		return err
	}
	defer s.stop()
	served := make(chan error, 1)
	go func() { served <- s.http.Serve(door) }()
	if err := s.api.Ready(ctx); err != nil {
		return err
	}
	fmt.Fprintln(a.io.Out, "ready http://"+door.Addr().String())
	a.firstSteps(ctx, st)
	select {
	case err := <-served:
		return fmt.Errorf("serve the API: %w", err)
	case <-ctx.Done():
	}
	a.io.Note("stopping daemons; %d sandboxes keep running (sandsea up takes them back,\nsandsea down ends them)", e.running())
	drain, done := context.WithTimeoutCause(context.WithoutCancel(ctx), drainLimit, errdefs.Deadline)
	defer done()
	e.runner.Leave()
	if err := s.http.Shutdown(drain); err != nil {
		log.Info("calls were cut off", "err", err)
		s.http.Close()
	}
	if err := e.api.Shutdown(drain); err != nil {
		log.Info("calls were cut off", "err", err)
	}
	return nil
}

// listenAPI opens the public door; a port that is taken says by whom.
func listenAPI(addr string) (net.Listener, error) {
	l, err := (&net.ListenConfig{}).Listen(context.Background(), "tcp", addr)
	if err == nil {
		return l, nil
	}
	host, port, _ := net.SplitHostPort(addr)
	e := errdefs.New(errdefs.FailedPrecondition, "listen "+addr, "%s", rootMessage(err)).WithField("listen", "").
		WithHint("Choose another: --listen HOST:PORT").Wrap(err)
	if errors.Is(err, syscall.EADDRINUSE) {
		e.Msg = "used by another process"
		if who := portHolder(port); who != "" {
			e.Msg = "used by " + who
		}
		if n, aerr := net.DefaultResolver.LookupPort(context.Background(), "tcp", port); aerr == nil {
			e = e.WithHint("Try --listen %s", net.JoinHostPort(host, fmt.Sprint(n+1)))
		}
	}
	return nil, e
}

// server is the control part, wired.
type server struct {
	api  *apiserver.Server
	http *http.Server
	stop func()
}

func startServer(ctx context.Context, st *etcd.Store, log *slog.Logger) (*server, error) {
	auth, err := iam.New(ctx, iam.Config{Store: st, Log: log})
	if err != nil {
		return nil, err
	}
	pool := nodeclient.NewPool("")
	w := watcher.New(watcher.Config{Store: st, Nodes: pool, Log: log})
	api := apiserver.New(apiserver.Config{Store: st, IAM: auth, Watcher: w, Log: log, Version: version.String()})
	ctx, cancel := context.WithCancelCause(context.WithoutCancel(ctx))
	var wg sync.WaitGroup
	for name, run := range map[string]func(context.Context) error{"iam": auth.Run, "watcher": w.Run, "api server": api.Run} {
		wg.Go(func() {
			if err := run(ctx); err != nil && ctx.Err() == nil {
				log.Error("part ended", "part", name, "err", err)
			}
		})
	}
	return &server{api: api, http: apiserver.NewHTTPServer(api, log), stop: func() {
		cancel(errors.New("shutting down"))
		wg.Wait()
		pool.Close()
	}}, nil
}

// describe prints what the node is and enforces.
func (a *app) describe(e *edge, first iam.FirstRun) {
	c := e.caps
	kept := ""
	if n := e.running(); n > 0 {
		kept = fmt.Sprintf(", %d sandboxes kept running", n)
	}
	a.io.Note("  node       %s: %d CPUs, %s, Linux %s, cgroup %s%s", e.id.Name, c.CPUs, ui.LongSize(c.Memory), c.Kernel, c.Cgroup, kept)
	line, _ := probe.Summary(c)
	a.io.Note("  %s", line)
	switch {
	case first.Lost != "":
		a.io.Note("  token      %s", first.Lost)
	case first.New:
		a.io.Note("  token      %s (new, mode 0600)", first.File)
	default:
		a.io.Note("  token      %s", first.File)
	}
}

// running counts the node's living sandboxes.
func (e *edge) running() int {
	n := 0
	all, _ := e.runner.Roster()
	for _, s := range all {
		if s.End.Cause == "" {
			n++
		}
	}
	return n
}

// firstSteps tells a newcomer what to type next.
func (a *app) firstSteps(ctx context.Context, st store.Store) {
	page, err := st.Range(ctx, keys.Images, store.RangeOptions{Limit: 1})
	if err != nil || len(page.Pairs) > 0 {
		return
	}
	a.io.Note("No image yet. In another terminal, about a minute:\n" +
		"  sandsea image import debian:bookworm --include python3,git\n" +
		"  sandsea run -- python3 -c 'print(\"hello\")'")
}
