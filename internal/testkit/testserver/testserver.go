// Package testserver is a whole server for tests of clients, without root: the real API server over a store in memory,
// and one node whose sandboxes are directories and whose commands are ordinary processes of this machine. It keeps the
// contracts that a client sees (results, time-outs, records, files), and isolates nothing.
//
// A Server is safe for concurrent use. Close ends every process and removes every file that it made.
package testserver

import (
	"context"
	"crypto/sha256"
	"encoding/json"
	"errors"
	"fmt"
	"net"
	"net/http"
	"os"
	"path/filepath"
	"sync"
	"testing"
	"time"

	"connectrpc.com/connect"

	"github.com/sandsea/sandsea/api/errdefs"
	nodev1 "github.com/sandsea/sandsea/api/node/v1"
	"github.com/sandsea/sandsea/api/node/v1/nodev1connect"
	pb "github.com/sandsea/sandsea/api/sandsea/v1"
	"github.com/sandsea/sandsea/api/sandsea/v1/sandseav1connect"
	"github.com/sandsea/sandsea/internal/control/apiserver"
	"github.com/sandsea/sandsea/internal/control/fakeedge"
	"github.com/sandsea/sandsea/internal/control/iam"
	"github.com/sandsea/sandsea/internal/control/nodeclient"
	"github.com/sandsea/sandsea/internal/control/watcher"
	"github.com/sandsea/sandsea/internal/image"
	"github.com/sandsea/sandsea/internal/sandboxpb"
	"github.com/sandsea/sandsea/internal/store"
	"github.com/sandsea/sandsea/internal/store/keys"
	"github.com/sandsea/sandsea/internal/store/mem"
)

// limit bounds every wait of the server's own.
const limit = 20 * time.Second

// Config of a Server; the zero value will do.
type Config struct {
	// Images are names in the catalogue; nil means one, "py".
	Images []string
	// Lacks are features that the node cannot enforce.
	Lacks []string
}

// Server is a running server with one node, n1.
type Server struct {
	URL string
	// Token is the admin's, of project default.
	Token string
	// Edge is the node, which can be told to misbehave.
	Edge *fakeedge.Edge
	IAM  *iam.Service

	store  store.Store
	edge   *edge
	http   *http.Server
	undo   []func() // run backwards by Close
	closed sync.Once
}

// Start runs a server for as long as a test.
func Start(t testing.TB, cfg Config) *Server {
	t.Helper()
	s, err := New(cfg)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(s.Close)
	return s
}

// New starts a server; it is ready when New returns.
func New(cfg Config) (*Server, error) {
	if cfg.Images == nil {
		cfg.Images = []string{"py"}
	}
	s := &Server{store: mem.New(mem.Config{})}
	if err := s.start(cfg); err != nil {
		s.Close()
		return nil, fmt.Errorf("start a test server: %w", err)
	}
	return s, nil
}

func (s *Server) start(cfg Config) error {
	dir, err := os.MkdirTemp("", "sandsea-fake-*")
	if err != nil {
		return err
	}
	s.undo = append(s.undo, func() { _ = os.RemoveAll(dir) })
	if err := s.startNode(cfg, dir); err != nil {
		return err
	}
	for _, name := range cfg.Images {
		if err := s.putImage(name); err != nil {
			return err
		}
	}
	return s.startServer()
}

// startNode serves the fake node's own calls, and processes and files of ours beside them.
func (s *Server) startNode(cfg Config, dir string) error {
	socket := filepath.Join(dir, "n1.sock")
	s.Edge = fakeedge.New(fakeedge.Config{Number: 1, Socket: socket, Store: s.store, Lacks: cfg.Lacks})
	s.Edge.Builds(&nodev1.Built{
		Name: "debian:bookworm", Layers: []*pb.Layer{{Digest: digest("built"), Bytes: 204 << 20, Files: 9000, Source: "debian:bookworm"}},
		Config: &pb.ImageConfig{Workdir: "/"},
	})
	s.edge = &edge{Edge: s.Edge, dir: dir, boxes: map[string]*box{}}
	ln, err := net.Listen("unix", socket)
	if err != nil {
		return err
	}
	mux := http.NewServeMux()
	opts := []connect.HandlerOption{connect.WithCompressMinBytes(1 << 30), connect.WithInterceptors(fakeedge.Outward{})}
	mux.Handle(nodev1connect.NewEdgeServiceHandler(s.edge, opts...))
	mux.Handle(sandseav1connect.NewProcessServiceHandler(processes{e: s.edge}, opts...))
	mux.Handle(sandseav1connect.NewFileServiceHandler(files{e: s.edge}, opts...))
	mux.Handle(sandseav1connect.NewNetworkServiceHandler(networks{e: s.edge}, opts...))
	s.serve(&http.Server{Handler: mux, ReadHeaderTimeout: limit}, ln)
	s.undo = append(s.undo, s.edge.killAll)
	return s.Edge.Register(context.Background())
}

func (s *Server) startServer() error {
	ctx, stop := context.WithCancelCause(context.Background())
	pool := nodeclient.NewPool(nil)
	var wg sync.WaitGroup
	s.undo = append(s.undo, func() {
		stop(nil)
		wg.Wait()
		pool.Close() // when all its connections are idle
	})
	var err error
	if s.IAM, err = iam.New(ctx, iam.Config{Store: s.store}); err != nil {
		return err
	}
	if s.Token, err = s.IAM.Create(ctx, iam.Request{Principal: "user:admin", Project: iam.DefaultProject}); err != nil {
		return err
	}
	w := watcher.New(watcher.Config{Store: s.store, Nodes: pool})
	api := apiserver.New(apiserver.Config{Store: s.store, IAM: s.IAM, Watcher: w, Version: "test"})
	for _, part := range []func(context.Context) error{s.IAM.Run, w.Run, api.Run} {
		wg.Go(func() { _ = part(ctx) })
	}
	ln, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		return err
	}
	s.URL = "http://" + ln.Addr().String()
	s.http = apiserver.NewHTTPServer(api, nil)
	s.serve(s.http, ln)
	ready, done := context.WithTimeoutCause(ctx, limit, errors.New("the server is not ready"))
	defer done()
	return api.Ready(ready)
}

// serve runs a server until Close.
func (s *Server) serve(srv *http.Server, ln net.Listener) {
	var wg sync.WaitGroup
	wg.Go(func() { _ = srv.Serve(ln) })
	s.undo = append(s.undo, func() {
		_ = srv.Close()
		wg.Wait()
		_ = srv.Close() // what was accepted while it closed
	})
}

// Close ends everything; a second call does nothing.
func (s *Server) Close() {
	s.closed.Do(func() {
		for i := len(s.undo) - 1; i >= 0; i-- {
			s.undo[i]()
		}
	})
}

// CutLinks breaks every connection of clients, as a network does; the server goes on.
func (s *Server) CutLinks() { s.edge.cut() }

// End ends a sandbox for a cause, as "oom".
func (s *Server) End(ctx context.Context, id, cause string) error {
	s.edge.kill(id)
	_, err := s.Edge.End(ctx, id, cause, "platform")
	return err
}

// Running counts the commands that run.
func (s *Server) Running() int { return s.edge.running() }

func digest(s string) string { return fmt.Sprintf("sha256:%x", sha256.Sum256([]byte(s))) }

// putImage writes an image of one layer into the store.
func (s *Server) putImage(name string) error {
	value, err := json.Marshal(struct {
		image.Image
		Created time.Time `json:"created"`
	}{
		image.Image{Name: name, Layers: []image.Layer{{Digest: image.Digest(digest(name)), Bytes: 64 << 20, Files: 3000, Source: "test"}}},
		time.Now().Add(-3 * time.Hour),
	})
	if err != nil {
		return err
	}
	_, err = s.store.Txn(context.Background(), nil, []store.Op{store.Put(keys.Image(name), value)}, nil)
	return err
}

// SpoilImage writes a record that cannot be read for an image.
func (s *Server) SpoilImage(name string) error {
	_, err := s.store.Txn(context.Background(), nil, []store.Op{store.Put(keys.Image(name), []byte("{"))}, nil)
	return err
}

// edge is the fake node with commands and files of its sandboxes.
type edge struct {
	*fakeedge.Edge
	dir string

	mu    sync.Mutex
	boxes map[string]*box                       // guarded by mu
	links map[*context.CancelCauseFunc]struct{} // guarded by mu; streams that CutLinks breaks
	logs  map[string]*flows                     // guarded by mu; flow logs
}

// box is what is inside one sandbox.
type box struct {
	dir   string
	spec  *pb.SandboxSpec
	mu    sync.Mutex
	procs []*proc          // guarded by mu; number i+1
	keys  map[string]*proc // guarded by mu
}

// Stop ends the sandbox's commands with it.
func (e *edge) Stop(ctx context.Context, r *connect.Request[nodev1.StopRequest]) (*connect.Response[nodev1.StopResponse], error) {
	res, err := e.Edge.Stop(ctx, r)
	if err == nil {
		e.kill(r.Msg.GetId())
	}
	return res, err
}

// box finds what is inside a sandbox that the caller may see. Only the record of an ended one can still be read.
func (e *edge) box(ctx context.Context, id string, h http.Header, record bool) (*box, error) {
	req := connect.NewRequest(&nodev1.GetRequest{Id: id})
	req.Header().Set(sandboxpb.ProjectsHeader, h.Get(sandboxpb.ProjectsHeader))
	res, err := e.Get(ctx, req)
	if err != nil {
		return nil, err
	}
	sb := res.Msg.GetSandbox()
	if sandboxpb.Over(sb.GetState()) && !record {
		return nil, errdefs.New(errdefs.NotFound, "sandbox "+id[:8], "has ended")
	}
	e.mu.Lock()
	defer e.mu.Unlock()
	b := e.boxes[id]
	if b == nil {
		b = &box{dir: filepath.Join(e.dir, id), spec: sb.GetSpec(), keys: map[string]*proc{}}
		if err := os.Mkdir(b.dir, 0o755); err != nil {
			return nil, err
		}
		e.boxes[id] = b
	}
	return b, nil
}

// kill ends the commands of a sandbox.
func (e *edge) kill(id string) {
	e.mu.Lock()
	b := e.boxes[id]
	e.mu.Unlock()
	if b != nil {
		b.kill()
	}
}

func (e *edge) killAll() {
	for _, b := range e.all() {
		b.kill()
	}
}

func (e *edge) running() int {
	n := 0
	for _, b := range e.all() {
		for _, p := range b.list() {
			if p.snapshot().GetState() == pb.ProcessState_PROCESS_STATE_RUNNING {
				n++
			}
		}
	}
	return n
}

func (e *edge) all() []*box {
	e.mu.Lock()
	defer e.mu.Unlock()
	var out []*box
	for _, b := range e.boxes {
		out = append(out, b)
	}
	return out
}

// errCut is why a stream ended that cut broke.
var errCut = errdefs.New(errdefs.Unavailable, "node n1", "the line broke")

// breakable is ctx until cut.
func (e *edge) breakable(ctx context.Context) (context.Context, func()) {
	ctx, stop := context.WithCancelCause(ctx)
	e.mu.Lock()
	defer e.mu.Unlock()
	if e.links == nil {
		e.links = map[*context.CancelCauseFunc]struct{}{}
	}
	e.links[&stop] = struct{}{}
	return ctx, func() {
		stop(nil)
		e.mu.Lock()
		defer e.mu.Unlock()
		delete(e.links, &stop)
	}
}

func (e *edge) cut() {
	e.mu.Lock()
	defer e.mu.Unlock()
	for stop := range e.links {
		(*stop)(errCut)
	}
}
