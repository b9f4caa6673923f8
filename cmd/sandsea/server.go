package main

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"net"
	"net/http"
	"strings"
	"sync"
	"time"

	"github.com/spf13/cobra"

	"github.com/sandsea/sandsea/client"
	"github.com/sandsea/sandsea/cmd/sandsea/ui"
	"github.com/sandsea/sandsea/internal/cluster"
	"github.com/sandsea/sandsea/internal/control/apiserver"
	"github.com/sandsea/sandsea/internal/control/iam"
	"github.com/sandsea/sandsea/internal/control/nodeclient"
	"github.com/sandsea/sandsea/internal/control/watcher"
	"github.com/sandsea/sandsea/internal/store"
	"github.com/sandsea/sandsea/internal/store/etcd"
	"github.com/sandsea/sandsea/internal/store/keys"
	"github.com/sandsea/sandsea/internal/version"
)

func (a *app) serverCommand() *cobra.Command {
	cmd := &cobra.Command{
		Use:   "server",
		Short: "Run the servers of a cluster on this machine",
		Long: `Runs API server, placement, watcher and store; sandboxes run on the machines that run sandsea edge. Prints "ready URL"
on standard output when it answers. It needs no root, only its data directory. How to run a cluster: docs/CLUSTER.md.`,
		Example: `  sandsea server --listen 10.0.0.1:7070 --cluster-listen 10.0.0.1:7071
  sandsea node invite n2 > n2.join`,
		Args: cobra.NoArgs,
	}
	read := settings(cmd, setData, setListen, setCluster, setLogLevel)
	cmd.RunE = func(cmd *cobra.Command, _ []string) error {
		cfg, err := read()
		if err != nil {
			return err
		}
		return a.server(cmd.Context(), cfg)
	}
	return cmd
}

// server runs the control part until ctx ends.
func (a *app) server(ctx context.Context, cfg serverConfig) (err error) {
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
	m, err := openMembership(dir, cfg.ClusterListen)
	if err != nil {
		return err
	}
	defer m.door.Close()
	st, err := a.openStore(ctx, dir, m, log)
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, st.Close()) }()
	if err := m.authority.SetStore(st.Address()); err != nil {
		return err
	}
	a.io.Note("  cluster    nodes reach it at %s (invite one: sandsea node invite NAME)", st.Address())
	first, err := bootstrap(ctx, st, dir)
	if err != nil {
		return err
	}
	a.describeToken(first)
	stopDebug, err := serveDebug(dir, log)
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, stopDebug()) }()
	s, err := startServer(ctx, st, m, log)
	if err != nil {
		return err
	}
	defer s.stop()
	if err := s.serve(ctx, door); err != nil {
		return err
	}
	fmt.Fprintln(a.io.Out, "ready "+s.url)
	if err := s.await(ctx, nil); err != nil {
		return err
	}
	a.io.Note("stopping the server; nodes and sandboxes keep running")
	s.drain(ctx)
	return nil
}

// membership is what makes a server one of a cluster.
type membership struct {
	door      net.Listener // for nodes
	authority *cluster.Authority
	identity  *cluster.Identity
}

// alone is the membership of a server without a cluster.
var alone *membership

// openMembership makes the authority of a cluster on the first start, and on each this server's certificate and its door
// for nodes.
func openMembership(dir *dataDir, addr string) (*membership, error) {
	door, err := listen(addr, "cluster-listen")
	if err != nil {
		return nil, err
	}
	m := &membership{door: door}
	m.authority, err = cluster.EnsureAuthority(dir.join("cluster"), time.Now())
	if err == nil {
		m.identity, err = m.authority.Server(time.Now())
	}
	if err == nil {
		err = m.identity.ValidAt(time.Now())
	}
	if err != nil {
		door.Close()
		return nil, err
	}
	return m, nil
}

// openStore opens the embedded store, for nodes too when there is a cluster.
func (a *app) openStore(ctx context.Context, dir *dataDir, m *membership, log *slog.Logger) (*etcd.Store, error) {
	began := time.Now()
	cfg := etcd.Config{Dir: dir.join("etcd"), Log: log, OnProgress: func(p etcd.Progress) {
		a.io.Note("  store      %s, %s so far", p, ui.Took(time.Since(began)))
	}}
	if m != alone {
		cfg.Listener, cfg.Identity = m.door, m.identity
	}
	st, err := etcd.Open(ctx, cfg)
	if err != nil {
		return nil, fmt.Errorf("store: %w", err)
	}
	a.io.Note("  store      etcd, embedded, %s", ui.Took(time.Since(began)))
	return st, nil
}

func bootstrap(ctx context.Context, st store.Store, dir *dataDir) (iam.FirstRun, error) {
	return iam.Bootstrap(ctx, st, dir.join("admin.token"))
}

func (a *app) describeToken(first iam.FirstRun) {
	switch {
	case first.Lost != "":
		a.io.Note("  token      %s", first.Lost)
	case first.New:
		a.io.Note("  token      %s (new, mode 0600)", first.File)
	default:
		a.io.Note("  token      %s", first.File)
	}
}

// server is the control part, wired.
type server struct {
	api    *apiserver.Server
	http   *http.Server
	log    *slog.Logger
	url    string
	served chan error
	stop   func()
}

func startServer(ctx context.Context, st *etcd.Store, m *membership, log *slog.Logger) (*server, error) {
	auth, err := iam.New(ctx, iam.Config{Store: st, Log: log})
	if err != nil {
		return nil, err
	}
	var identity *cluster.Identity
	if m != alone {
		identity = m.identity
	}
	pool := nodeclient.NewPool(identity)
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
	return &server{
		api: api, http: apiserver.NewHTTPServer(api, log), log: log, served: make(chan error, 1), stop: func() {
			cancel(errors.New("shutting down"))
			wg.Wait()
			pool.Close()
		},
	}, nil
}

// serve opens the API and returns when it can answer everything.
func (s *server) serve(ctx context.Context, door net.Listener) error {
	s.url = "http://" + door.Addr().String()
	go func() { s.served <- s.http.Serve(door) }()
	return s.api.Ready(ctx)
}

// await returns when ctx ends, or with why the API does or the node beside it is lost; nil: there is none.
func (s *server) await(ctx context.Context, lost <-chan error) error {
	select {
	case err := <-lost:
		return err
	case err := <-s.served:
		return fmt.Errorf("serve the API: %w", err)
	case <-ctx.Done():
		return nil
	}
}

// drain closes the API and gives calls in flight their time.
func (s *server) drain(ctx context.Context) {
	ctx, done := drain(ctx)
	defer done()
	s.api.Leave()
	if err := s.http.Shutdown(ctx); err != nil {
		s.log.Info("calls were cut off", "err", err)
		s.http.Close()
	}
}

// firstSteps tells a newcomer what to type next.
func (a *app) firstSteps(ctx context.Context, st store.Store, url, tokenFile string) {
	page, err := st.Range(ctx, keys.Images, store.RangeOptions{Limit: 1})
	if err != nil || len(page.Pairs) > 0 {
		return
	}
	a.io.Note("No image yet. In another terminal, about a minute:\n" + clientOf(url, tokenFile) +
		"  sandsea image import debian:bookworm --include python3,git\n" +
		"  sandsea run -- python3 -c 'print(\"hello\")'")
}

// clientOf is the line by which a client finds a server that is not where it looks by itself.
func clientOf(url, tokenFile string) string {
	line := ""
	if url != client.DefaultURL {
		line += " SANDSEA_URL=" + url
	}
	if tokenFile != client.DefaultTokenFile {
		line += " SANDSEA_TOKEN_FILE='" + strings.ReplaceAll(tokenFile, "'", `'\''`) + "'"
	}
	if line == "" {
		return ""
	}
	return "  export" + line + "\n"
}
