// Package apiserver is the only door between the trusted side and the sandboxes: it authenticates and authorises each
// call, decodes the sandbox id, and sends the call on to the node that the id names. No look-up and no state per
// sandbox: any number of servers may run, and one that dies loses nothing but its calls in flight, which a retry with
// the same key finishes.
//
// What needs more than routing: Create (the id is written to the store under its key before the node is asked, so that
// a retry knows whom to ask), the image catalogue, and the listings from the watcher's picture. An answer is success,
// failure or errdefs.Unknown. Handlers are safe for concurrent use; Run does the sweeping.
package apiserver

import (
	"context"
	"crypto/rand"
	"io"
	"log/slog"
	mrand "math/rand/v2"
	"net/http"
	"sync"
	"sync/atomic"
	"time"

	"connectrpc.com/connect"
	"golang.org/x/time/rate"

	"github.com/sandsea/sandsea/api/sandsea/v1/sandseav1connect"
	"github.com/sandsea/sandsea/internal/control/apiserver/entries"
	"github.com/sandsea/sandsea/internal/control/apiserver/strictjson"
	"github.com/sandsea/sandsea/internal/control/iam"
	"github.com/sandsea/sandsea/internal/control/placement"
	"github.com/sandsea/sandsea/internal/control/watcher"
	"github.com/sandsea/sandsea/internal/node"
	"github.com/sandsea/sandsea/internal/store"
)

// Limits of the door.
const (
	// MaxBody is the largest request message.
	MaxBody = 4 << 20
	// MaxBatchBody is the largest request message of a call that carries files: 64 MiB, and what JSON makes of them.
	MaxBatchBody = 96 << 20
	// largeAtOnce bounds the memory of such messages; a call beyond waits as long as a body may take.
	largeAtOnce = 4
	// MaxFrame is the largest message of a stream from the client: 1 MiB of data, and what JSON makes of it.
	MaxFrame   = 3 << 19
	maxHeaders = 64 << 10
	headerWait = 10 * time.Second
	bodyWait   = 30 * time.Second
	idleWait   = 2 * time.Minute
	h2Streams  = 1000
	// maxWaiting is how many creates may wait for room at once; beyond it they are refused at once.
	maxWaiting = 4096
	// maxCreates is how many creates may be in work at once.
	maxCreates = 8192
	// retryRate is how many rounds a second waiting creates make, for each node.
	retryRate = 500
)

// Config of a Server.
type Config struct {
	Store   store.Store
	IAM     *iam.Service
	Watcher *watcher.Watcher
	Log     *slog.Logger
	// Version is what WhoAmI answers.
	Version string
	// Random is the source of ids; nil means the system's.
	Random io.Reader
}

// Server serves the public API.
type Server struct {
	store   store.Store
	iam     *iam.Service
	watcher *watcher.Watcher
	log     *slog.Logger
	version string
	random  io.Reader

	overlay   *placement.Overlay
	catalogue *catalogue
	imports   *imports
	endpoints *endpoints
	large     chan struct{}   // held while a large message is
	calls     map[string]call // by procedure path; never changed
	errors    *connect.ErrorWriter
	mux       *http.ServeMux
	waiting   atomic.Int64
	creating  atomic.Int64
	ready     atomic.Bool
	leaving   context.Context
	leave     context.CancelCauseFunc
	retries   *rate.Limiter // paces the rounds of creates that wait for room

	rngMu sync.Mutex
	rng   *mrand.Rand // guarded by rngMu
}

// New makes a Server. It answers at once; Run makes it ready.
func New(cfg Config) *Server {
	s := &Server{
		store: cfg.Store, iam: cfg.IAM, watcher: cfg.Watcher, log: cfg.Log, version: cfg.Version, random: cfg.Random,
		overlay: placement.NewOverlay(), rng: mrand.New(mrand.NewChaCha8(seed())),
	}
	if s.log == nil {
		s.log = slog.New(slog.DiscardHandler)
	}
	if s.random == nil {
		s.random = rand.Reader
	}
	s.leaving, s.leave = context.WithCancelCause(context.Background())
	s.catalogue = newCatalogue(cfg.Store, s.log)
	s.imports = newImports(time.Now())
	s.endpoints = newEndpoints(s)
	s.large = make(chan struct{}, largeAtOnce)
	s.retries = rate.NewLimiter(retryRate, retryRate/10)
	opts := []connect.HandlerOption{
		connect.WithInterceptors(errorsOut{s}),
		// Answers go out as they are: on loopback and in a rack gzip costs more than it saves. Requests may be packed.
		connect.WithCompressMinBytes(1 << 30),
		connect.WithConditionalHandlerOptions(func(spec connect.Spec) []connect.HandlerOption {
			if spec.StreamType == connect.StreamTypeClient {
				return []connect.HandlerOption{connect.WithReadMaxBytes(MaxFrame)}
			}
			return []connect.HandlerOption{connect.WithReadMaxBytes(int(bodyLimit(spec.Procedure)))}
		}),
	}
	opts = append(opts, connect.WithCodec(entries.Codec{}))
	for _, c := range strictjson.Codecs() {
		opts = append(opts, connect.WithCodec(c))
	}
	s.errors, s.calls, s.mux = connect.NewErrorWriter(opts...), allCalls(), http.NewServeMux()
	s.mux.Handle(sandseav1connect.NewSandboxServiceHandler(sandboxes{s}, opts...))
	s.mux.Handle(sandseav1connect.NewProcessServiceHandler(processes{s}, opts...))
	s.mux.Handle(sandseav1connect.NewFileServiceHandler(files{s}, opts...))
	s.mux.Handle(sandseav1connect.NewNetworkServiceHandler(networks{s}, opts...))
	s.mux.Handle(sandseav1connect.NewImageServiceHandler(images{s}, opts...))
	s.mux.Handle(sandseav1connect.NewNodeServiceHandler(nodes{s}, opts...))
	s.mux.Handle(sandseav1connect.NewIAMServiceHandler(who{s}, opts...))
	return s
}

// Run keeps the catalogue true, sweeps old records and collects layers until ctx ends, and returns when all its
// goroutines have.
func (s *Server) Run(ctx context.Context) error {
	var wg sync.WaitGroup
	wg.Go(func() { s.catalogue.run(ctx) })
	wg.Go(func() { s.sweepLoop(ctx) })
	wg.Go(func() { s.collectLoop(ctx) })
	wg.Go(func() {
		if s.catalogue.wait(ctx) == nil && s.watcher.Ready(ctx) == nil {
			s.ready.Store(true)
		}
	})
	wg.Wait()
	s.endpoints.close()
	return context.Cause(ctx)
}

// Ready waits until the server can answer everything: the catalogue and the picture of the nodes are there.
func (s *Server) Ready(ctx context.Context) error {
	if err := s.catalogue.wait(ctx); err != nil {
		return err
	}
	return s.watcher.Ready(ctx)
}

// NewHTTPServer is an http.Server with the limits of the door, for HTTP/1.1 and HTTP/2 without TLS on one port.
func NewHTTPServer(h http.Handler, log *slog.Logger) *http.Server {
	var p http.Protocols
	p.SetHTTP1(true)
	p.SetUnencryptedHTTP2(true)
	srv := &http.Server{
		Handler: h, ReadHeaderTimeout: headerWait, MaxHeaderBytes: maxHeaders, IdleTimeout: idleWait, Protocols: &p,
		HTTP2: &http.HTTP2Config{
			MaxConcurrentStreams: h2Streams, SendPingTimeout: 30 * time.Second, PingTimeout: 15 * time.Second,
			WriteByteTimeout: time.Minute,
		},
	}
	if log != nil {
		srv.ErrorLog = slog.NewLogLogger(log.Handler(), slog.LevelDebug)
	}
	return srv
}

// pick chooses a node and notes the choice.
func (s *Server) pick(need placement.Need, not []node.Number) (node.Ref, error) {
	now := time.Now()
	v := s.watcher.View()
	s.rngMu.Lock()
	ref, err := placement.Pick(v, s.overlay, need, not, now, s.rng)
	s.rngMu.Unlock()
	if err == nil {
		s.overlay.Placed(ref.Number, need, now)
	}
	return ref, err
}

func seed() [32]byte {
	var b [32]byte
	_, _ = rand.Read(b[:]) // never fails: the runtime ends the process instead
	return b
}
