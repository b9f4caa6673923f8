// Package nodeapi is the node's door: node.v1 for the servers and, beside it, the process and file services of its
// sandboxes; and the node's registration in the store.
//
// It owns the translation between messages and the Runner, the check of project, epoch and caller, and the table that
// says which call wakes a sandbox. It decides nothing about sandboxes. A sandbox outside the caller's projects is
// NotFound, with the same words as one that never was. Errors carry the kinds of api/errdefs. On a unix socket the
// caller is this machine's root; on the network it is who its certificate says: a server may call everything, another
// node ReadBlob alone.
//
// Handlers may run at once in any number. A slow reader of a stream holds up its own handler only; nothing here has a
// time limit of its own but the reading of request headers and the silence of a reader of blobs.
package nodeapi

import (
	"context"
	"crypto/tls"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"net"
	"net/http"
	"os"
	"sync"
	"syscall"
	"time"

	"connectrpc.com/connect"

	"github.com/sandsea/sandsea/api/errdefs"
	"github.com/sandsea/sandsea/api/errwire"
	"github.com/sandsea/sandsea/api/node/v1/nodev1connect"
	"github.com/sandsea/sandsea/api/sandsea/v1/sandseav1connect"
	"github.com/sandsea/sandsea/internal/cluster"
	"github.com/sandsea/sandsea/internal/edge/admission"
	"github.com/sandsea/sandsea/internal/edge/runner"
	"github.com/sandsea/sandsea/internal/image"
	"github.com/sandsea/sandsea/internal/layers/blob"
	"github.com/sandsea/sandsea/internal/layers/build"
	"github.com/sandsea/sandsea/internal/node"
	"github.com/sandsea/sandsea/internal/sandbox"
	"github.com/sandsea/sandsea/internal/sandboxpb"
)

const (
	chunk         = 256 << 10
	maxMessage    = 4 << 20
	maxRunMessage = 72 << 20 // 64 MiB of input and a command
	headerLimit   = 10 * time.Second
)

// Builder makes layers; *build.Builder is one.
type Builder interface {
	Debian(ctx context.Context, o build.DebianOptions) (build.Result, error)
	Rootfs(ctx context.Context, r io.Reader, o build.ArchiveOptions) (build.Result, error)
	OCI(ctx context.Context, r io.Reader, o build.ArchiveOptions) (build.Result, error)
	Docker(ctx context.Context, r io.Reader, o build.ArchiveOptions) (build.Result, error)
	Registry(ctx context.Context, o build.RegistryOptions) (build.Result, error)
	Collect(ctx context.Context, keep []image.Digest) (freed int64, err error)
	Uploads() *build.Uploads
}

// Mounts are the layers that this node has mounted; *compose.Composer is them.
type Mounts interface {
	// Keep unmounts all others.
	Keep(layers []image.Digest)
}

// Layers are the layers that this node has or can get; *peers.Layers is them.
type Layers interface {
	// Ensure returns when all of these are here, got from other nodes where they were not; the kind Refused when they
	// cannot be had.
	Ensure(ctx context.Context, layers []image.Digest) error
	// Collected says that layers may have been removed.
	Collected()
}

// Config is what a Server works with.
type Config struct {
	Runner  *runner.Runner
	Room    *admission.Admission
	Builder Builder // nil: this node builds nothing
	Mounts  Mounts  // nil: this node mounts no layers
	Layers  Layers  // nil: every layer that is named is taken to be here
	// Keep are layers that are never collected.
	Keep []image.Digest
	// Blobs are what ReadBlob reads; nil: this node gives none away.
	Blobs        blob.Store
	Identity     Identity
	Capabilities node.Capabilities
	Version      string
	Now          func() time.Time
	Log          *slog.Logger
}

// Server serves one node.
type Server struct {
	cfg     Config
	srv     *http.Server
	wg      sync.WaitGroup
	giving  chan struct{} // has room for as many blobs as are read at once
	stall   time.Duration // giveStall but in tests
	leaving context.Context
	leave   context.CancelCauseFunc
}

// New makes a Server that listens nowhere yet.
func New(cfg Config) (*Server, error) {
	if cfg.Runner == nil || cfg.Room == nil || cfg.Identity.Number == 0 || cfg.Now == nil || cfg.Log == nil {
		return nil, errdefs.New(errdefs.Internal, "node door", "its configuration is not complete")
	}
	s := &Server{cfg: cfg, giving: make(chan struct{}, blobsAtOnce), stall: giveStall}
	s.leaving, s.leave = context.WithCancelCause(context.Background())
	s.srv = &http.Server{
		Handler: s.Handler(), ReadHeaderTimeout: headerLimit, ErrorLog: slog.NewLogLogger(cfg.Log.Handler(), slog.LevelDebug),
	}
	return s, nil
}

// Handler serves the services and tunnels to those who may call them.
func (s *Server) Handler() http.Handler {
	opts := func(most int) []connect.HandlerOption {
		return []connect.HandlerOption{
			connect.WithInterceptors(guard{s}), connect.WithReadMaxBytes(most), connect.WithCompressMinBytes(1 << 30),
		}
	}
	mux := http.NewServeMux()
	mux.Handle(nodev1connect.NewEdgeServiceHandler(edgeService{s}, opts(maxMessage)...))
	mux.Handle(sandseav1connect.NewProcessServiceHandler(processService{s}, opts(maxRunMessage)...))
	mux.Handle(sandseav1connect.NewFileServiceHandler(fileService{s, make(chan struct{}, batchesAtOnce)},
		append(opts(maxMessage), connect.WithConditionalHandlerOptions(sizes))...))
	mux.Handle(sandseav1connect.NewNetworkServiceHandler(networkService{s}, opts(maxMessage)...))
	mux.HandleFunc(TunnelPath, s.tunnel)
	refuse := connect.NewErrorWriter()
	return http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		if err := mayCall(r.TLS, r.URL.Path); err != nil {
			_ = refuse.Write(w, r, errwire.ToConnect(err)) // a caller who has gone
			return
		}
		if r.URL.Path == nodev1connect.EdgeServiceReadBlobProcedure {
			w = impatient{w, s.stall}
		}
		mux.ServeHTTP(w, r)
	})
}

// mayCall judges the other end of a line. One without TLS is a unix socket, whose peer was checked.
func mayCall(line *tls.ConnectionState, procedure string) error {
	if line == nil {
		return nil
	}
	peer, err := cluster.PeerOf(line)
	switch {
	case err != nil:
		return err
	case peer.Role == cluster.Server, procedure == nodev1connect.EdgeServiceReadBlobProcedure:
		return nil
	}
	return errdefs.New(errdefs.Denied, "node "+peer.Name, "is no server and may not call this")
}

// ListenUnix makes the socket, mode 0600, whose connections must come from root or from the edge's own user. A file
// that is left of an edge before is replaced.
func ListenUnix(path string) (net.Listener, error) {
	if err := os.Remove(path); err != nil && !errors.Is(err, os.ErrNotExist) {
		return nil, fmt.Errorf("remove the old socket %s: %w", path, err)
	}
	ln, err := net.ListenUnix("unix", &net.UnixAddr{Name: path, Net: "unix"})
	if err != nil {
		return nil, fmt.Errorf("listen on %s: %w", path, err)
	}
	if err := os.Chmod(path, 0o600); err != nil {
		return nil, errors.Join(err, ln.Close())
	}
	return &rootOnly{ln}, nil
}

// rootOnly drops connections of other users, should the file's mode ever let them in.
type rootOnly struct{ *net.UnixListener }

func (l *rootOnly) Accept() (net.Conn, error) {
	for {
		c, err := l.AcceptUnix()
		if err != nil {
			return nil, err
		}
		if peerAllowed(c) {
			return c, nil
		}
		_ = c.Close()
	}
}

func peerAllowed(c *net.UnixConn) bool {
	raw, err := c.SyscallConn()
	if err != nil {
		return false
	}
	var cred *syscall.Ucred
	cerr := raw.Control(func(fd uintptr) {
		cred, err = syscall.GetsockoptUcred(int(fd), syscall.SOL_SOCKET, syscall.SO_PEERCRED)
	})
	return cerr == nil && err == nil && (cred.Uid == 0 || int(cred.Uid) == os.Geteuid())
}

// ServeCluster serves a network address until Shutdown, in the background, to those of the same cluster.
func (s *Server) ServeCluster(ln net.Listener, id *cluster.Identity) {
	s.serve(tls.NewListener(ln, id.Accept()))
}

// Serve serves a unix socket until Shutdown, in the background.
func (s *Server) Serve(ln net.Listener) error {
	if ln.Addr().Network() != "unix" {
		return errdefs.New(errdefs.Internal, "node door", "a network address needs certificates")
	}
	s.serve(ln)
	return nil
}

func (s *Server) serve(ln net.Listener) {
	s.wg.Go(func() {
		if err := s.srv.Serve(ln); err != nil && !errors.Is(err, http.ErrServerClosed) {
			s.cfg.Log.Error("serve the node's door", "err", err)
		}
	})
}

// Shutdown closes the listeners and gives calls in flight until ctx ends, but those that only wait for a command or for
// news: they end at once, as leave.go says. Commands of calls that are cut go on: the Runner is told before.
func (s *Server) Shutdown(ctx context.Context) error {
	s.cfg.Runner.Leave()
	s.leave(errLeaving)
	err := s.srv.Shutdown(ctx)
	if err != nil {
		err = s.srv.Close()
	}
	s.wg.Wait()
	return err
}

// guard turns errors into Connect's, and ends calls that wait when the edge leaves.
type guard struct{ s *Server }

func (g guard) WrapUnary(next connect.UnaryFunc) connect.UnaryFunc {
	return func(ctx context.Context, req connect.AnyRequest) (connect.AnyResponse, error) {
		ctx, settle := g.s.patient(ctx, req.Spec().Procedure)
		res, err := next(ctx, req)
		if err = settle(err, req.Any()); err != nil {
			return nil, errwire.ToConnect(err)
		}
		return res, nil
	}
}

func (guard) WrapStreamingClient(next connect.StreamingClientFunc) connect.StreamingClientFunc {
	return next
}

func (g guard) WrapStreamingHandler(next connect.StreamingHandlerFunc) connect.StreamingHandlerFunc {
	return func(ctx context.Context, conn connect.StreamingHandlerConn) error {
		ctx, settle := g.s.patient(ctx, conn.Spec().Procedure)
		first := &firstMessage{StreamingHandlerConn: conn}
		return errwire.ToConnect(settle(next(ctx, first), first.message))
	}
}

// waking says which calls count as use of a sandbox and wake a paused one; ok is false for a call that nobody declared.
func waking(procedure string) (wakes, ok bool) {
	switch procedure {
	case sandseav1connect.ProcessServiceRunProcedure,
		sandseav1connect.ProcessServiceStartProcedure,
		sandseav1connect.ProcessServiceSendInputProcedure,
		sandseav1connect.ProcessServiceCloseInputProcedure,
		sandseav1connect.ProcessServiceSignalProcedure,
		sandseav1connect.ProcessServiceResizeTTYProcedure,
		sandseav1connect.ProcessServiceOpenShellProcedure,
		sandseav1connect.ProcessServiceRunInShellProcedure,
		sandseav1connect.ProcessServiceCloseShellProcedure,
		sandseav1connect.FileServiceReadProcedure,
		sandseav1connect.FileServiceStatProcedure,
		sandseav1connect.FileServiceListProcedure,
		sandseav1connect.FileServiceWriteProcedure,
		sandseav1connect.FileServiceMakeDirProcedure,
		sandseav1connect.FileServiceMoveProcedure,
		sandseav1connect.FileServiceRemoveProcedure,
		sandseav1connect.FileServiceUploadTarProcedure,
		sandseav1connect.FileServiceDownloadTarProcedure,
		sandseav1connect.FileServiceReadBatchProcedure,
		sandseav1connect.FileServiceWriteBatchProcedure,
		sandseav1connect.FileServiceChangeProcedure,
		sandseav1connect.FileServiceMakeLinkProcedure,
		sandseav1connect.FileServiceWatchProcedure,
		TunnelPath:
		return true, true
	case sandseav1connect.ProcessServiceAttachProcedure,
		sandseav1connect.ProcessServiceListProcedure,
		sandseav1connect.NetworkServiceSetPolicyProcedure,
		sandseav1connect.NetworkServiceSetPhaseProcedure,
		sandseav1connect.NetworkServiceCheckProcedure,
		sandseav1connect.NetworkServiceLogProcedure,
		sandseav1connect.NetworkServiceEndpointProcedure,
		nodev1connect.EdgeServiceCreateProcedure,
		nodev1connect.EdgeServiceGetProcedure,
		nodev1connect.EdgeServiceStopProcedure,
		nodev1connect.EdgeServiceExtendTTLProcedure,
		nodev1connect.EdgeServiceRosterProcedure,
		nodev1connect.EdgeServiceFollowProcedure,
		nodev1connect.EdgeServiceBuildProcedure,
		nodev1connect.EdgeServiceUploadProcedure,
		nodev1connect.EdgeServiceReadBlobProcedure,
		nodev1connect.EdgeServiceCollectProcedure:
		return false, true
	}
	return false, false
}

// visible gives a sandbox that the caller's projects cover.
func (s *Server) visible(h http.Header, raw string) (sandbox.ID, runner.Snapshot, error) {
	id, err := sandbox.Parse(raw)
	if err != nil {
		return "", runner.Snapshot{}, err
	}
	snap, err := s.cfg.Runner.Get(id)
	if err != nil {
		return "", runner.Snapshot{}, err
	}
	if !sandboxpb.Covers(sandboxpb.SplitProjects(h.Get(sandboxpb.ProjectsHeader)), snap.Project) {
		return "", runner.Snapshot{}, runner.NotFound(id)
	}
	return id, snap, nil
}

// open begins a call for a sandbox.
func (s *Server) open(procedure string, h http.Header, raw string) (*runner.Use, error) {
	id, _, err := s.visible(h, raw)
	if err != nil {
		return nil, err
	}
	wakes, ok := waking(procedure)
	if !ok {
		return nil, errdefs.New(errdefs.Internal, "node door", "%s is neither waking nor still", procedure)
	}
	return s.cfg.Runner.Open(id, wakes)
}
