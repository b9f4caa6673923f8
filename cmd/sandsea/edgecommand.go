package main

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"net"
	"time"

	"github.com/spf13/cobra"

	"github.com/sandsea/sandsea/api/errdefs"
	"github.com/sandsea/sandsea/cmd/sandsea/ui"
	"github.com/sandsea/sandsea/internal/cluster"
	"github.com/sandsea/sandsea/internal/store"
	"github.com/sandsea/sandsea/internal/store/etcd"
)

const (
	// storeAgain is how often an edge that starts looks for a store that is away.
	storeAgain = time.Second
	// expiryAlarm is how long before the end of its certificate an edge begins to say so.
	expiryAlarm = 30 * 24 * time.Hour
)

func (a *app) edgeCommand() *cobra.Command {
	var join string
	cmd := &cobra.Command{
		Use:   "edge",
		Short: "Run this machine as a node of a cluster",
		Long: `Runs sandboxes for the servers of a cluster, and starts the keeper and the spawner beside it. The first start needs the
file that sandsea node invite made; the data directory keeps it. Prints "ready node NAME HOST:PORT" on standard output
when it has joined. SIGTERM ends the daemon, never the sandboxes: the next edge takes them back. How to run a cluster:
docs/CLUSTER.md.`,
		Example: `  sudo sandsea edge --join n2.join
  sudo sandsea edge --data /srv/sandsea --listen 10.0.0.2:7072`,
		Args: cobra.NoArgs,
	}
	cmd.Flags().StringVar(&join, "join", "", "file that sandsea node invite made; for the first start")
	read := settings(cmd, setData, setNode, setLogLevel)
	cmd.RunE = func(cmd *cobra.Command, _ []string) error {
		cfg, err := read()
		if err == nil {
			err = needRoot("edge")
		}
		if err != nil {
			return err
		}
		return a.edge(cmd.Context(), cfg, join)
	}
	return cmd
}

// edge runs one node until ctx ends.
func (a *app) edge(ctx context.Context, cfg serverConfig, join string) (err error) {
	dir, log, err := a.begin(cfg)
	if err != nil {
		return err
	}
	defer dir.close()
	if dir.isServer() {
		return wrongDirectory(dir, "a server", "server")
	}
	invitation, err := accept(dir, join)
	if err != nil {
		return err
	}
	at, err := onNetwork(ctx, invitation, cfg.NodeListen)
	if err != nil {
		return err
	}
	defer at.listener.Close()
	if left := time.Until(at.identity.Expires); left < expiryAlarm {
		log.Warn("the cluster's authority ends soon: make a new one and invite every node again", "ends", at.identity.Expires)
	}
	st, err := dialStore(ctx, invitation, at.identity, log)
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, st.Close()) }()
	if at, err = a.identifyWhenStoreAnswers(ctx, dir, st, at); err != nil {
		return err
	}
	if err := invitation.Keep(dir.join(joinFile)); err != nil {
		return err
	}
	e, err := openEdge(ctx, dir, cfg, st, at, log)
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, e.close()) }()
	stopDebug, err := serveDebug(dir, log)
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, stopDebug()) }()
	if err := e.serve(ctx); err != nil {
		return err
	}
	a.describeNode(e)
	fmt.Fprintf(a.io.Out, "ready node %s %s\n", e.id.Name, at.address)
	select {
	case <-ctx.Done():
	case err = <-e.lost:
	}
	a.io.Note("stopping the edge; %s (sandsea edge takes them back,\nsandsea down ends them)",
		counted(e.running(), "sandbox keeps running", "sandboxes keep running"))
	e.drain(ctx)
	return err
}

// accept reads the invitation: the one that is given, or the one that the data directory has kept when it joined.
func accept(dir *dataDir, join string) (cluster.Invitation, error) {
	kept := dir.join(joinFile)
	if join == "" {
		v, err := cluster.ReadInvitation(kept)
		if errors.Is(err, errdefs.NotFound) {
			return v, misuse(errdefs.New(errdefs.Invalid, "", "this data directory has joined no cluster yet").
				WithField("join", "").WithHint("On the server's machine: sandsea node invite NAME > NAME.join; then here: --join NAME.join"))
		}
		return v, err
	}
	v, err := cluster.ReadInvitation(join)
	if errors.Is(err, errdefs.NotFound) {
		return v, errdefs.New(errdefs.NotFound, join, "is not there").WithField("join", "").
			WithHint("On the server's machine: sandsea node invite NAME > NAME.join; then move it here").Wrap(err)
	}
	if err != nil {
		return v, err
	}
	if old, err := cluster.ReadInvitation(kept); err == nil && old.Name != v.Name {
		return v, errdefs.New(errdefs.FailedPrecondition, dir.path, "is the node %s, the invitation is for %s", old.Name, v.Name).
			WithField("join", "").WithHint("Choose another: --data DIR")
	}
	return v, nil
}

// onNetwork is the place of a node of a cluster. An address that is every address of this machine is registered as the
// one from which the store is reached.
func onNetwork(ctx context.Context, v cluster.Invitation, addr string) (place, error) {
	id, err := v.Identity()
	if err == nil {
		err = id.ValidAt(time.Now())
	}
	if err != nil {
		return place{}, err
	}
	l, err := listen(addr, "listen")
	if err != nil {
		return place{}, err
	}
	bound := l.Addr().(*net.TCPAddr) // of a listener on tcp
	if bound.IP.IsUnspecified() {
		c, err := (&net.Dialer{}).DialContext(ctx, "udp", v.Store) // sends nothing
		if err != nil {
			l.Close()
			return place{}, errdefs.New(errdefs.FailedPrecondition, "store "+v.Store, "no way leads there: %s", rootMessage(err)).
				WithHint("Check the network, or invite the node with another address: --store HOST:PORT").Wrap(err)
		}
		bound = &net.TCPAddr{IP: c.LocalAddr().(*net.UDPAddr).IP, Port: bound.Port}
		c.Close()
	}
	return place{name: v.Name, address: bound.String(), control: v.Store, listener: l, identity: id}, nil
}

// dialStore connects to the cluster's store.
func dialStore(ctx context.Context, v cluster.Invitation, id *cluster.Identity, log *slog.Logger) (*etcd.Store, error) {
	return etcd.Dial(ctx, []string{v.Store}, id.DialServer(), log)
}

// identifyWhenStoreAnswers is identify that waits for a server that is not up yet, as after a power failure, and says
// why it does not answer.
func (a *app) identifyWhenStoreAnswers(ctx context.Context, dir *dataDir, st store.Store, at place) (place, error) {
	began, told := time.Now(), ""
	for {
		known, err := at.identify(ctx, dir, st)
		if !errors.Is(err, errStoreAway) {
			return known, err
		}
		if e, ok := errors.AsType[*errdefs.Error](err); ok && e.Msg != told {
			told = e.Msg
			a.io.Note("  store      at %s: %s; waiting for it", at.control, told)
		}
		select {
		case <-time.After(storeAgain):
		case <-ctx.Done():
			return at, fmt.Errorf("%w, waited %s", err, ui.Took(time.Since(began)))
		}
	}
}
