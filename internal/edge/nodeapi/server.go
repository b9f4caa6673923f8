// Package nodeapi is the node's door: node.v1 for the servers and, beside it, the process and file services of its
// sandboxes; and the node's registration in the store.
//
// It owns the translation between messages and the Runner, the check of project, epoch and token, and the table that
// says which call wakes a sandbox. It decides nothing about sandboxes. A sandbox outside the caller's projects is
// NotFound, with the same words as one that never was. Errors carry the kinds of api/errdefs.
//
// Handlers may run at once in any number. A slow reader of a stream holds up its own handler only; nothing here has a
// time limit of its own but the reading of request headers.
package nodeapi

import (
	"context"
	"crypto/subtle"
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
	"github.com/sandsea/sandsea/internal/edge/admission"
	"github.com/sandsea/sandsea/internal/edge/runner"
	"github.com/sandsea/sandsea/internal/image"
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
	Collect(ctx context.Context, keep []image.Digest) (freed int64, err error)
	Uploads() *build.Uploads
}

// Mounts are the layers that this node has mounted; *compose.Composer is them.
type Mounts interface {
	// Keep unmounts all others.
	Keep(layers []image.Digest)
}

// Config is what a Server works with.
type Config struct {
	Runner       *runner.Runner
	Room         *admission.Admission
	Builder      Builder // nil: this node builds nothing
	Mounts       Mounts  // nil: this node mounts no layers
	Identity     Identity
	Capabilities node.Capabilities
	Version      string
	// Token is the secret that servers and edges share. Empty only on a unix socket.
	Token string
	Now   func() time.Time
	Log   *slog.Logger
}

// Server serves one node.
type Server struct {
	cfg Config
	srv *http.Server
	wg  sync.WaitGroup
}

// New makes a Server that listens nowhere yet.
func New(cfg Config) (*Server, error) {
	if cfg.Runner == nil || cfg.Room == nil || cfg.Identity.Number == 0 || cfg.Now == nil || cfg.Log == nil {
		return nil, errdefs.New(errdefs.Internal, "node door", "its configuration is not complete")
	}
	s := &Server{cfg: cfg}
	s.srv = &http.Server{
		Handler: s.Handler(), ReadHeaderTimeout: headerLimit, ErrorLog: slog.NewLogLogger(cfg.Log.Handler(), slog.LevelDebug),
	}
	return s, nil
}

// Handler serves the three services.
func (s *Server) Handler() http.Handler {
	opts := func(most int) []connect.HandlerOption {
		return []connect.HandlerOption{
			connect.WithInterceptors(guard{s}), connect.WithReadMaxBytes(most), connect.WithCompressMinBytes(1 << 30),
		}
	}
	mux := http.NewServeMux()
	mux.Handle(nodev1connect.NewEdgeServiceHandler(edgeService{s}, opts(maxMessage)...))
	mux.Handle(sandseav1connect.NewProcessServiceHandler(processService{s}, opts(maxRunMessage)...))
	mux.Handle(sandseav1connect.NewFileServiceHandler(fileService{s}, opts(maxMessage)...))
	return mux
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

// Serve serves ln until Shutdown, in the background.
func (s *Server) Serve(ln net.Listener) error {
	if ln.Addr().Network() != "unix" && s.cfg.Token == "" {
		return errdefs.New(errdefs.FailedPrecondition, "node door", "a network address needs the shared token")
	}
	s.wg.Go(func() {
		if err := s.srv.Serve(ln); err != nil && !errors.Is(err, http.ErrServerClosed) {
			s.cfg.Log.Error("serve the node's door", "err", err)
		}
	})
	return nil
}

// Shutdown closes the listeners and gives calls in flight until ctx ends. Commands of those that are cut then go on:
// the Runner is told before.
func (s *Server) Shutdown(ctx context.Context) error {
	s.cfg.Runner.Leave()
	err := s.srv.Shutdown(ctx)
	if err != nil {
		err = s.srv.Close()
	}
	s.wg.Wait()
	return err
}

// guard checks the token and turns errors into Connect's.
type guard struct{ s *Server }

func (g guard) check(h http.Header) error {
	want := g.s.cfg.Token
	if want != "" && subtle.ConstantTimeCompare([]byte(want), []byte(h.Get(sandboxpb.NodeTokenHeader))) != 1 {
		return errdefs.New(errdefs.Unauthenticated, "node", "the shared token is missing or wrong").
			WithHint("Give servers and edges the same token")
	}
	return nil
}

func (g guard) WrapUnary(next connect.UnaryFunc) connect.UnaryFunc {
	return func(ctx context.Context, req connect.AnyRequest) (connect.AnyResponse, error) {
		if err := g.check(req.Header()); err != nil {
			return nil, errwire.ToConnect(err)
		}
		res, err := next(ctx, req)
		if err != nil {
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
		if err := g.check(conn.RequestHeader()); err != nil {
			return errwire.ToConnect(err)
		}
		return errwire.ToConnect(next(ctx, conn))
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
		sandseav1connect.FileServiceReadProcedure,
		sandseav1connect.FileServiceStatProcedure,
		sandseav1connect.FileServiceListProcedure,
		sandseav1connect.FileServiceWriteProcedure,
		sandseav1connect.FileServiceMakeDirProcedure,
		sandseav1connect.FileServiceMoveProcedure,
		sandseav1connect.FileServiceRemoveProcedure,
		sandseav1connect.FileServiceUploadTarProcedure,
		sandseav1connect.FileServiceDownloadTarProcedure:
		return true, true
	case sandseav1connect.ProcessServiceAttachProcedure,
		sandseav1connect.ProcessServiceListProcedure,
		nodev1connect.EdgeServiceCreateProcedure,
		nodev1connect.EdgeServiceGetProcedure,
		nodev1connect.EdgeServiceStopProcedure,
		nodev1connect.EdgeServiceExtendTTLProcedure,
		nodev1connect.EdgeServiceRosterProcedure,
		nodev1connect.EdgeServiceFollowProcedure,
		nodev1connect.EdgeServiceBuildProcedure,
		nodev1connect.EdgeServiceUploadProcedure,
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
