package apiserver_test

import (
	"context"
	"crypto/sha256"
	"encoding/json"
	"fmt"
	"log/slog"
	"net"
	"net/http"
	"path/filepath"
	"sync"
	"testing"
	"time"

	"connectrpc.com/connect"

	"github.com/sandsea/sandsea/api/errwire"
	pb "github.com/sandsea/sandsea/api/sandsea/v1"
	"github.com/sandsea/sandsea/api/sandsea/v1/sandseav1connect"
	"github.com/sandsea/sandsea/internal/control/apiserver"
	"github.com/sandsea/sandsea/internal/control/fakeedge"
	"github.com/sandsea/sandsea/internal/control/iam"
	"github.com/sandsea/sandsea/internal/control/nodeclient"
	"github.com/sandsea/sandsea/internal/control/watcher"
	"github.com/sandsea/sandsea/internal/image"
	"github.com/sandsea/sandsea/internal/node"
	"github.com/sandsea/sandsea/internal/store"
	"github.com/sandsea/sandsea/internal/store/keys"
	"github.com/sandsea/sandsea/internal/store/mem"
	"github.com/sandsea/sandsea/internal/testkit/output"
	"github.com/sandsea/sandsea/internal/testkit/wait"
)

const limit = 20 * time.Second

// house is a control plane with nodes in maps, over real sockets.
type house struct {
	t       testing.TB
	store   store.Store
	mem     *mem.Store
	iam     *iam.Service
	watcher *watcher.Watcher
	server  *apiserver.Server
	edges   []*fakeedge.Edge
	url     string
	token   string
	http    *http.Client
	logs    output.Buffer
}

type option func(*fakeedge.Config)

// newHouse starts a server and n nodes on a store in memory.
func newHouse(t testing.TB, n int, opts ...option) *house {
	t.Helper()
	s := mem.New(mem.Config{})
	h := newHouseOn(t, s, n, opts...)
	h.mem = s
	return h
}

func newHouseOn(t testing.TB, s store.Store, n int, opts ...option) *house {
	t.Helper()
	h := &house{t: t, store: s}
	dir := t.TempDir()
	for i := range n {
		cfg := fakeedge.Config{Number: node.Number(i + 1), Socket: filepath.Join(dir, fmt.Sprintf("n%d.sock", i+1)), Store: s}
		for _, o := range opts {
			o(&cfg)
		}
		e := fakeedge.New(cfg)
		stop, err := e.Serve()
		if err != nil {
			t.Fatal(err)
		}
		t.Cleanup(stop)
		h.edges = append(h.edges, e)
	}
	for _, name := range []string{"py", "go", "ws", "tools"} {
		h.putImage(name, name)
	}
	h.serve()
	return h
}

// serve starts a server on the house's store.
func (h *house) serve() {
	t := h.t
	t.Helper()
	ctx, stop := context.WithCancel(context.Background())
	var err error
	if h.iam, err = iam.New(ctx, iam.Config{Store: h.store}); err != nil {
		t.Fatal(err)
	}
	if h.token == "" {
		h.token = h.newToken(iam.Request{Principal: "user:admin", Project: "default"})
	}
	pool := nodeclient.NewPool(nil)
	h.watcher = watcher.New(watcher.Config{Store: h.store, Nodes: pool})
	h.server = apiserver.New(apiserver.Config{
		Store: h.store, IAM: h.iam, Watcher: h.watcher, Version: "test", Log: slog.New(slog.NewTextHandler(&h.logs, nil)),
	})
	var wg sync.WaitGroup
	wg.Go(func() { _ = h.iam.Run(ctx) })
	wg.Go(func() { _ = h.watcher.Run(ctx) })
	wg.Go(func() { _ = h.server.Run(ctx) })
	ln, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	srv := apiserver.NewHTTPServer(h.server, nil)
	wg.Go(func() { _ = srv.Serve(ln) })
	t.Cleanup(func() {
		_ = srv.Close()
		stop()
		wg.Wait()
		pool.Close()
	})
	h.url = "http://" + ln.Addr().String()
	transport := &http.Transport{MaxIdleConnsPerHost: 256}
	t.Cleanup(transport.CloseIdleConnections)
	h.http = &http.Client{Transport: transport}
	ready, done := context.WithTimeout(ctx, limit)
	defer done()
	if err := h.server.Ready(ready); err != nil {
		t.Fatal(err)
	}
}

func (h *house) newToken(r iam.Request) string {
	h.t.Helper()
	token, err := h.iam.Create(context.Background(), r)
	if err != nil {
		h.t.Fatal(err)
	}
	return token
}

func digest(s string) image.Digest {
	return image.Digest(fmt.Sprintf("sha256:%x", sha256.Sum256([]byte(s))))
}

// putRecord writes the record of an image as it is given.
func (h *house) putRecord(name, record string) {
	h.t.Helper()
	ops := []store.Op{store.Put(keys.Image(name), []byte(record))}
	if _, err := h.store.Txn(context.Background(), nil, ops, nil); err != nil {
		h.t.Fatal(err)
	}
}

// putImage writes an image of one layer into the store.
func (h *house) putImage(name, layer string) {
	h.t.Helper()
	img := image.Image{Name: name, Layers: []image.Layer{{Digest: digest(layer), Bytes: 1, Files: 1, Source: "test"}}}
	value, err := json.Marshal(struct {
		image.Image
		Created time.Time `json:"created"`
	}{img, time.Now()})
	if err != nil {
		h.t.Fatal(err)
	}
	h.putRecord(name, string(value))
}

// client speaks as the holder of a token.
type client struct {
	sandboxes sandseav1connect.SandboxServiceClient
	processes sandseav1connect.ProcessServiceClient
	files     sandseav1connect.FileServiceClient
	networks  sandseav1connect.NetworkServiceClient
	images    sandseav1connect.ImageServiceClient
	nodes     sandseav1connect.NodeServiceClient
	iam       sandseav1connect.IAMServiceClient
}

func (h *house) as(token string, opts ...connect.ClientOption) client {
	opts = append(opts, connect.WithInterceptors(bearer{token, ""}))
	return h.client(opts...)
}

func (h *house) client(opts ...connect.ClientOption) client {
	return client{
		sandseav1connect.NewSandboxServiceClient(h.http, h.url, opts...),
		sandseav1connect.NewProcessServiceClient(h.http, h.url, opts...),
		sandseav1connect.NewFileServiceClient(h.http, h.url, opts...),
		sandseav1connect.NewNetworkServiceClient(h.http, h.url, opts...),
		sandseav1connect.NewImageServiceClient(h.http, h.url, opts...),
		sandseav1connect.NewNodeServiceClient(h.http, h.url, opts...),
		sandseav1connect.NewIAMServiceClient(h.http, h.url, opts...),
	}
}

func (h *house) admin(opts ...connect.ClientOption) client { return h.as(h.token, opts...) }

// bearer puts a token on every request.
type bearer struct{ token, project string }

func (b bearer) set(hd http.Header) {
	hd.Set("Authorization", "Bearer "+b.token)
	if b.project != "" {
		hd.Set(apiserver.ProjectHeader, b.project)
	}
}

func (b bearer) WrapUnary(next connect.UnaryFunc) connect.UnaryFunc {
	return func(ctx context.Context, r connect.AnyRequest) (connect.AnyResponse, error) {
		b.set(r.Header())
		return next(ctx, r)
	}
}

func (b bearer) WrapStreamingClient(next connect.StreamingClientFunc) connect.StreamingClientFunc {
	return func(ctx context.Context, spec connect.Spec) connect.StreamingClientConn {
		conn := next(ctx, spec)
		b.set(conn.RequestHeader())
		return conn
	}
}

func (bearer) WrapStreamingHandler(next connect.StreamingHandlerFunc) connect.StreamingHandlerFunc {
	return next
}

func spec(change ...func(*pb.SandboxSpec)) *pb.SandboxSpec {
	s := &pb.SandboxSpec{Environment: &pb.Environment{Image: "py"}}
	for _, c := range change {
		c(s)
	}
	return s
}

// create makes a sandbox and expects that to work.
func (c client) create(t testing.TB, key string) *pb.Sandbox {
	t.Helper()
	sb, err := c.tryCreate(t.Context(), spec(), key)
	if err != nil {
		t.Fatal(err)
	}
	return sb
}

func (c client) tryCreate(ctx context.Context, s *pb.SandboxSpec, key string) (*pb.Sandbox, error) {
	return c.tryCreateWithin(ctx, s, key, 0)
}

func (c client) tryCreateWithin(ctx context.Context, s *pb.SandboxSpec, key string, ready time.Duration) (*pb.Sandbox,
	error,
) {
	resp, err := c.sandboxes.Create(ctx, connect.NewRequest(&pb.CreateSandboxRequest{
		Spec: s, Key: key, ReadyTimeoutMs: ready.Milliseconds(),
	}))
	if err != nil {
		return nil, errwire.FromConnect(err)
	}
	return resp.Msg.GetSandbox(), nil
}

func (c client) get(t testing.TB, id string) (*pb.Sandbox, error) {
	t.Helper()
	resp, err := c.sandboxes.Get(t.Context(), connect.NewRequest(&pb.GetSandboxRequest{Id: id}))
	if err != nil {
		return nil, errwire.FromConnect(err)
	}
	return resp.Msg.GetSandbox(), nil
}

func (c client) list(t testing.TB, r *pb.ListSandboxesRequest) *pb.ListSandboxesResponse {
	t.Helper()
	resp, err := c.sandboxes.List(t.Context(), connect.NewRequest(r))
	if err != nil {
		t.Fatal(err)
	}
	return resp.Msg
}

// drop removes the record of a sandbox's end from the store.
func (h *house) drop(sb *pb.Sandbox) error {
	_, err := h.store.Txn(context.Background(), nil, []store.Op{store.Delete(keys.EndedSandbox(sb.GetProject(), sb.GetId()))}, nil)
	return err
}

func until(t testing.TB, what string, cond func() bool) {
	t.Helper()
	wait.Until(t, limit, cond, what)
}

// stored counts the keys under a prefix.
func (h *house) stored(prefix string) int {
	h.t.Helper()
	page, err := h.store.Range(context.Background(), prefix, store.RangeOptions{})
	if err != nil {
		h.t.Fatal(err)
	}
	return len(page.Pairs)
}

// digestOf is the digest of an image that putImage wrote.
func digestOf(layer string) image.Digest {
	return image.Image{Layers: []image.Layer{{Digest: digest(layer)}}}.Digest()
}
