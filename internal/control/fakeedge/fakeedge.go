// Package fakeedge is a node for tests and benchmarks of the control part: node.v1, processes and files over a real
// socket, with sandboxes that exist in a map. It keeps the contract of node.v1 (idempotent by id, epochs, refusals,
// gapless transitions, projects) and can be told to misbehave.
package fakeedge

import (
	"bytes"
	"cmp"
	"context"
	"crypto/rand"
	"encoding/hex"
	"encoding/json"
	"fmt"
	"net"
	"net/http"
	"slices"
	"strings"
	"sync"
	"time"

	"connectrpc.com/connect"
	"google.golang.org/protobuf/proto"
	"google.golang.org/protobuf/types/known/timestamppb"

	"github.com/sandsea/sandsea/api/errdefs"
	"github.com/sandsea/sandsea/api/errwire"
	nodev1 "github.com/sandsea/sandsea/api/node/v1"
	"github.com/sandsea/sandsea/api/node/v1/nodev1connect"
	pb "github.com/sandsea/sandsea/api/sandsea/v1"
	"github.com/sandsea/sandsea/api/sandsea/v1/sandseav1connect"
	"github.com/sandsea/sandsea/internal/node"
	"github.com/sandsea/sandsea/internal/sandbox"
	"github.com/sandsea/sandsea/internal/sandboxpb"
	"github.com/sandsea/sandsea/internal/store"
	"github.com/sandsea/sandsea/internal/store/keys"
)

// Config of an Edge.
type Config struct {
	Number node.Number
	// Socket is where it listens.
	Socket string
	Store  store.Store
	// Max is how many sandboxes it takes; 0 means 100,000.
	Max int
	// Memory is the machine's, in bytes; 0 means 23.4 GiB.
	Memory int64
	// Features that it lacks.
	Lacks []string
}

// Edge is a node in a map.
type Edge struct {
	nodev1connect.UnimplementedEdgeServiceHandler
	cfg         Config
	incarnation string

	mu     sync.Mutex
	epoch  int64                  // guarded by mu
	boxes  map[string]*pb.Sandbox // guarded by mu; messages are replaced, never changed
	events []*nodev1.FollowResponse
	base   int64 // guarded by mu; number of the event before events[0]
	woken  chan struct{}
	files  map[string][]byte // guarded by mu; by id and path
	ups    map[string][]byte // guarded by mu
	inside map[string]Dial   // guarded by mu; servers inside, by id and port
	flows  map[string][]*pb.NetworkEvent
	// Faults, guarded by mu.
	refuse  func(id string) error
	before  func(ctx context.Context, call string) error
	after   func(call string) error
	built   *nodev1.Built
	Creates int // guarded by mu; how often Create reached us
	kept    []string
	owners  []string
}

// New makes an Edge that does not listen yet.
func New(cfg Config) *Edge {
	cfg.Max = cmp.Or(cfg.Max, 100_000)
	cfg.Memory = cmp.Or(cfg.Memory, 25125558682)
	var b [4]byte
	_, _ = rand.Read(b[:])
	return &Edge{
		cfg: cfg, incarnation: hex.EncodeToString(b[:]), epoch: 1, boxes: map[string]*pb.Sandbox{},
		woken: make(chan struct{}),
		files: map[string][]byte{}, ups: map[string][]byte{}, inside: map[string]Dial{}, flows: map[string][]*pb.NetworkEvent{},
	}
}

// Serve registers and listens until stop is called, which returns when all is closed.
func (e *Edge) Serve() (stop func(), err error) {
	ln, err := net.Listen("unix", e.cfg.Socket)
	if err != nil {
		return nil, fmt.Errorf("listen: %w", err)
	}
	mux := http.NewServeMux()
	opts := []connect.HandlerOption{connect.WithCompressMinBytes(1 << 30), connect.WithInterceptors(Outward{})}
	mux.Handle(nodev1connect.NewEdgeServiceHandler(e, opts...))
	mux.Handle(sandseav1connect.NewProcessServiceHandler(processes{e: e}, opts...))
	mux.Handle(sandseav1connect.NewFileServiceHandler(files{e: e}, opts...))
	e.HandleNetwork(mux, opts...)
	srv := &http.Server{Handler: mux, ReadHeaderTimeout: 10 * time.Second}
	var wg sync.WaitGroup
	wg.Go(func() { _ = srv.Serve(ln) })
	if err := e.Register(context.Background()); err != nil {
		_ = srv.Close()
		return nil, err
	}
	return func() {
		_ = srv.Close()
		wg.Wait()
	}, nil
}

// Register writes the node's registration with its epoch.
func (e *Edge) Register(ctx context.Context) error {
	e.mu.Lock()
	epoch := e.epoch
	e.mu.Unlock()
	value, err := json.Marshal(node.Registration{
		Number: e.cfg.Number, Name: fmt.Sprintf("n%d", e.cfg.Number), Address: "unix:" + e.cfg.Socket, Epoch: epoch,
		Boot: "b", Machine: "m", DataID: "d",
	})
	if err != nil {
		return err
	}
	_, err = e.cfg.Store.Txn(ctx, nil, []store.Op{store.Put(keys.Node(e.cfg.Number), value)}, nil)
	return err
}

// Reboot forgets every sandbox, as a machine does, and raises the epoch.
func (e *Edge) Reboot() {
	e.mu.Lock()
	defer e.mu.Unlock()
	e.boxes, e.epoch = map[string]*pb.Sandbox{}, e.epoch+1
	e.restartLocked()
}

// Restart gives the edge a new incarnation that remembers its sandboxes.
func (e *Edge) Restart() {
	e.mu.Lock()
	defer e.mu.Unlock()
	e.restartLocked()
}

// DropEvents loses the transitions so far, as an edge does of which more happened than it keeps.
func (e *Edge) DropEvents() {
	e.mu.Lock()
	defer e.mu.Unlock()
	e.base += int64(len(e.events))
	e.events = nil
}

func (e *Edge) restartLocked() {
	e.incarnation += "x"
	e.events, e.base = nil, 0
	close(e.woken)
	e.woken = make(chan struct{})
}

// Refuse makes f decide whether a create is refused; nil takes that back.
func (e *Edge) Refuse(f func(id string) error) {
	e.mu.Lock()
	defer e.mu.Unlock()
	e.refuse = f
}

// Before runs f before each call ("create", "get", …); its error is the answer, and it may wait.
func (e *Edge) Before(f func(ctx context.Context, call string) error) {
	e.mu.Lock()
	defer e.mu.Unlock()
	e.before = f
}

// After runs f after each call that succeeded; its error replaces the answer.
func (e *Edge) After(f func(call string) error) {
	e.mu.Lock()
	defer e.mu.Unlock()
	e.after = f
}

// Builds says what Build answers.
func (e *Edge) Builds(b *nodev1.Built) {
	e.mu.Lock()
	defer e.mu.Unlock()
	e.built = b
}

// Count tells how many sandboxes live and how often Create was called.
func (e *Edge) Count() (living, creates int) {
	e.mu.Lock()
	defer e.mu.Unlock()
	return e.livingLocked(), e.Creates
}

// Kept is what the last Collect was told to keep.
func (e *Edge) Kept() []string {
	e.mu.Lock()
	defer e.mu.Unlock()
	return e.kept
}

// Asked lists the values of the projects header of the calls so far.
func (e *Edge) Asked() []string {
	e.mu.Lock()
	defer e.mu.Unlock()
	return slices.Clone(e.owners)
}

func (e *Edge) livingLocked() int {
	n := 0
	for _, b := range e.boxes {
		if !sandboxpb.Over(b.GetState()) {
			n++
		}
	}
	return n
}

// enter runs the faults before a call and notes who asks.
func (e *Edge) enter(ctx context.Context, call string, h http.Header) error {
	e.mu.Lock()
	f := e.before
	if len(e.owners) < 1000 {
		e.owners = append(e.owners, h.Get(sandboxpb.ProjectsHeader))
	}
	e.mu.Unlock()
	if f != nil {
		return f(ctx, call)
	}
	return nil
}

func (e *Edge) leave(call string) error {
	e.mu.Lock()
	f := e.after
	e.mu.Unlock()
	if f != nil {
		return f(call)
	}
	return nil
}

// findLocked gives a sandbox of the caller's projects.
func (e *Edge) find(id string, h http.Header) (*pb.Sandbox, error) {
	e.mu.Lock()
	defer e.mu.Unlock()
	b := e.boxes[id]
	if b == nil || !sandboxpb.Covers(sandboxpb.SplitProjects(h.Get(sandboxpb.ProjectsHeader)), b.GetProject()) {
		return nil, errdefs.New(errdefs.NotFound, "sandbox "+sandbox.ID(id).Short(), "none on this node")
	}
	return b, nil
}

func (e *Edge) setLocked(b *pb.Sandbox, what string) {
	e.boxes[b.GetId()] = b
	seq := e.base + int64(len(e.events)) + 1
	e.events = append(e.events, &nodev1.FollowResponse{Seq: seq, At: timestamppb.Now(), What: what, Sandbox: b})
	if len(e.events) > 1<<15 {
		e.base += 1 << 14
		e.events = slices.Clone(e.events[1<<14:])
	}
	close(e.woken)
	e.woken = make(chan struct{})
}

// Create makes a sandbox at once.
func (e *Edge) Create(ctx context.Context,
	r *connect.Request[nodev1.CreateRequest],
) (*connect.Response[nodev1.CreateResponse], error) {
	if err := e.enter(ctx, "create", r.Header()); err != nil {
		return nil, err
	}
	b, err := e.create(r.Msg)
	if err == nil {
		err = e.leave("create")
	}
	if err != nil {
		return nil, err
	}
	return connect.NewResponse(&nodev1.CreateResponse{Sandbox: b}), nil
}

func (e *Edge) create(m *nodev1.CreateRequest) (*pb.Sandbox, error) {
	e.mu.Lock()
	defer e.mu.Unlock()
	e.Creates++
	if b := e.boxes[m.GetId()]; b != nil {
		if sandboxpb.Over(b.GetState()) && b.GetReadyAt() == nil {
			err := errdefs.New(errdefs.Refused, "", "it never was ready")
			err.Cause = b.GetEnd().GetCause()
			return nil, err
		}
		return b, nil
	}
	if id, err := sandbox.Parse(m.GetId()); err != nil || id.Node() != e.cfg.Number {
		return nil, errdefs.New(errdefs.Invalid, "", "id %s is not of this node", m.GetId())
	}
	switch {
	case m.GetNodeEpoch() < e.epoch:
		return nil, errdefs.New(errdefs.Refused, "", "epoch %d is over, now %d", m.GetNodeEpoch(), e.epoch)
	case len(e.boxes) >= e.cfg.Max && e.livingLocked() >= e.cfg.Max:
		return nil, errdefs.New(errdefs.Refused, "", "%d sandboxes, the limit", e.cfg.Max)
	case e.refuse != nil:
		if err := e.refuse(m.GetId()); err != nil {
			return nil, err
		}
	}
	now := timestamppb.Now()
	b := &pb.Sandbox{
		Id: m.GetId(), Project: m.GetProject(), Spec: m.GetSpec(), State: pb.SandboxState_SANDBOX_STATE_RUNNING,
		Node: fmt.Sprintf("n%d", e.cfg.Number), Epoch: 1, CreatedAt: now, ReadyAt: now, Layers: m.GetLayers(),
		ImageDigest: m.GetImageDigest(), Config: m.GetConfig(),
	}
	e.setLocked(b, "running")
	return b, nil
}

// Get shows a sandbox.
func (e *Edge) Get(ctx context.Context, r *connect.Request[nodev1.GetRequest]) (*connect.Response[nodev1.GetResponse],
	error,
) {
	if err := e.enter(ctx, "get", r.Header()); err != nil {
		return nil, err
	}
	b, err := e.find(r.Msg.GetId(), r.Header())
	if err != nil {
		return nil, err
	}
	return connect.NewResponse(&nodev1.GetResponse{Sandbox: b}), nil
}

// Stop ends a sandbox and writes its end to the store.
func (e *Edge) Stop(ctx context.Context,
	r *connect.Request[nodev1.StopRequest],
) (*connect.Response[nodev1.StopResponse], error) {
	if err := e.enter(ctx, "stop", r.Header()); err != nil {
		return nil, err
	}
	b, err := e.find(r.Msg.GetId(), r.Header())
	if err != nil {
		return nil, err
	}
	if !sandboxpb.Over(b.GetState()) {
		if b, err = e.End(ctx, b.GetId(), "stopped", r.Msg.GetBy()); err != nil {
			return nil, err
		}
	}
	return connect.NewResponse(&nodev1.StopResponse{Sandbox: b}), nil
}

// End ends a sandbox for a cause.
func (e *Edge) End(ctx context.Context, id, cause, by string) (*pb.Sandbox, error) {
	e.mu.Lock()
	b := proto.CloneOf(e.boxes[id])
	b.State, b.End = pb.SandboxState_SANDBOX_STATE_ENDED, &pb.End{Cause: cause, By: by, At: timestamppb.Now()}
	e.setLocked(b, "ended")
	e.mu.Unlock()
	value, err := sandboxpb.EncodeEnded(b)
	if err != nil {
		return nil, err
	}
	_, err = e.cfg.Store.Txn(ctx, nil, []store.Op{store.Put(keys.EndedSandbox(b.GetProject(), id), value)}, nil)
	return b, err
}

// Change replaces a sandbox by a changed copy, and gives it; nil when there is none.
func (e *Edge) Change(id string, f func(*pb.Sandbox)) *pb.Sandbox {
	e.mu.Lock()
	defer e.mu.Unlock()
	b := e.boxes[id]
	if b == nil {
		return nil
	}
	b = proto.CloneOf(b)
	f(b)
	e.boxes[id] = b
	return b
}

// FailStart makes it so that a create began and came to nothing.
func (e *Edge) FailStart(ctx context.Context, id, cause string) {
	e.mu.Lock()
	b := proto.CloneOf(e.boxes[id])
	b.ReadyAt = nil
	e.boxes[id] = b
	e.mu.Unlock()
	_, _ = e.End(ctx, id, cause, "platform")
}

// Forget drops ended sandboxes from the roster.
func (e *Edge) Forget() {
	e.mu.Lock()
	defer e.mu.Unlock()
	for id, b := range e.boxes {
		if sandboxpb.Over(b.GetState()) {
			delete(e.boxes, id)
		}
	}
}

// ExtendTTL moves the end.
func (e *Edge) ExtendTTL(ctx context.Context,
	r *connect.Request[nodev1.ExtendTTLRequest],
) (*connect.Response[nodev1.ExtendTTLResponse], error) {
	if err := e.enter(ctx, "extend", r.Header()); err != nil {
		return nil, err
	}
	if _, err := e.find(r.Msg.GetId(), r.Header()); err != nil {
		return nil, err
	}
	e.mu.Lock()
	defer e.mu.Unlock()
	b := proto.CloneOf(e.boxes[r.Msg.GetId()])
	b.ExpiresAt = timestamppb.New(time.Now().Add(time.Duration(r.Msg.GetTtlMs()) * time.Millisecond))
	e.setLocked(b, "ttl_extended")
	return connect.NewResponse(&nodev1.ExtendTTLResponse{Sandbox: b}), nil
}

// Roster shows everything.
func (e *Edge) Roster(ctx context.Context,
	r *connect.Request[nodev1.RosterRequest],
) (*connect.Response[nodev1.RosterResponse], error) {
	if err := e.enter(ctx, "roster", r.Header()); err != nil {
		return nil, err
	}
	e.mu.Lock()
	defer e.mu.Unlock()
	out := &nodev1.RosterResponse{
		Seq: e.base + int64(len(e.events)), Incarnation: e.incarnation,
		Node: &pb.Node{
			Name: fmt.Sprintf("n%d",
				e.cfg.Number), Number: int64(e.cfg.Number), Epoch: e.epoch, Cpus: 2, MemoryBytes: e.cfg.Memory,
			SandboxesMax: int64(e.cfg.Max), SandboxesRunning: int64(e.livingLocked()), Kernel: "6.18",
		},
	}
	for _, f := range []string{
		node.FeatureMemory, node.FeatureCPU, node.FeaturePids, node.FeatureDisk, node.FeatureOpenFiles, node.FeatureOutput,
		node.FeatureKill, node.FeatureUserNS, node.FeatureSeccomp, node.FeatureLayers, node.FeatureNetwork,
		node.FeatureDebian, node.FeatureEgress,
	} {
		status := node.OK
		if slices.Contains(e.cfg.Lacks, f) {
			status = node.Missing
		}
		out.Node.Features = append(out.Node.Features, &pb.Feature{Name: f, Status: string(status), Mechanism: "a map"})
	}
	for _, b := range e.boxes {
		out.Sandboxes = append(out.Sandboxes, b)
	}
	return connect.NewResponse(out), nil
}

// Follow streams transitions.
func (e *Edge) Follow(ctx context.Context, r *connect.Request[nodev1.FollowRequest],
	down *connect.ServerStream[nodev1.FollowResponse],
) error {
	at := r.Msg.GetAfter()
	for {
		e.mu.Lock()
		if r.Msg.GetIncarnation() != e.incarnation || at < e.base {
			e.mu.Unlock()
			return connect.NewError(connect.CodeOutOfRange, fmt.Errorf("transition %d is gone", at))
		}
		batch := e.events[min(int64(len(e.events)), at-e.base):]
		woken := e.woken
		e.mu.Unlock()
		for _, ev := range batch {
			if err := down.Send(ev); err != nil {
				return err
			}
			at = ev.GetSeq()
		}
		if len(batch) > 0 {
			continue
		}
		select {
		case <-woken:
		case <-ctx.Done():
			return ctx.Err()
		}
	}
}

// Build answers what Builds said.
func (e *Edge) Build(ctx context.Context, r *connect.Request[nodev1.BuildRequest],
	down *connect.ServerStream[nodev1.BuildResponse],
) error {
	for i := range int64(3) {
		p := &pb.ImportProgress{Stage: "write", Done: i, Total: 3, Unit: "bytes", Finished: i == 2}
		if err := down.Send(&nodev1.BuildResponse{Event: &nodev1.BuildResponse_Progress{Progress: p}}); err != nil {
			return err
		}
	}
	if err := e.enter(ctx, "build", r.Header()); err != nil {
		return err
	}
	e.mu.Lock()
	built := e.built
	if up := r.Msg.GetImport().GetArchive().GetUpload(); up != "" && e.ups[up] == nil {
		e.mu.Unlock()
		return errdefs.New(errdefs.NotFound, "upload "+up, "none")
	}
	e.mu.Unlock()
	return down.Send(&nodev1.BuildResponse{Event: &nodev1.BuildResponse_Built{Built: built}})
}

// Upload keeps an archive.
func (e *Edge) Upload(_ context.Context,
	up *connect.ClientStream[nodev1.UploadRequest],
) (*connect.Response[nodev1.UploadResponse], error) {
	var b bytes.Buffer
	for up.Receive() {
		b.Write(up.Msg().GetData())
	}
	if err := up.Err(); err != nil {
		return nil, err
	}
	e.mu.Lock()
	defer e.mu.Unlock()
	name := fmt.Sprintf("u%d", len(e.ups)+1)
	e.ups[name] = b.Bytes()
	return connect.NewResponse(&nodev1.UploadResponse{Upload: name, Bytes: int64(b.Len())}), nil
}

// Collect notes what is to be kept.
func (e *Edge) Collect(_ context.Context,
	r *connect.Request[nodev1.CollectRequest],
) (*connect.Response[nodev1.CollectResponse], error) {
	e.mu.Lock()
	defer e.mu.Unlock()
	e.kept = append([]string{}, r.Msg.GetKeep()...)
	return connect.NewResponse(&nodev1.CollectResponse{FreedBytes: 1}), nil
}

// processes runs two programs: echo, and yes, which writes until its reader goes away.
type processes struct {
	sandseav1connect.UnimplementedProcessServiceHandler
	e *Edge
}

func (p processes) Run(ctx context.Context, r *connect.Request[pb.RunRequest]) (*connect.Response[pb.RunResponse],
	error,
) {
	if err := p.e.enter(ctx, "run", r.Header()); err != nil {
		return nil, err
	}
	if _, err := p.e.find(r.Msg.GetId(), r.Header()); err != nil {
		return nil, err
	}
	out := strings.Join(r.Msg.GetCommand().GetArgv(), " ") + "\n" + string(r.Msg.GetStdin())
	if err := p.e.leave("run"); err != nil {
		return nil, err
	}
	return connect.NewResponse(&pb.RunResponse{Number: 1, Result: &pb.Result{}, Stdout: []byte(out)}), nil
}

func (p processes) Start(ctx context.Context, r *connect.Request[pb.StartRequest],
	down *connect.ServerStream[pb.StartResponse],
) error {
	if err := p.e.enter(ctx, "start", r.Header()); err != nil {
		return err
	}
	if _, err := p.e.find(r.Msg.GetId(), r.Header()); err != nil {
		return err
	}
	started := &pb.ProcessEvent{Event: &pb.ProcessEvent_Started{Started: &pb.Process{Number: 1}}}
	if err := down.Send(&pb.StartResponse{Event: started}); err != nil {
		return err
	}
	if argv := r.Msg.GetCommand().GetArgv(); len(argv) > 0 && argv[0] == "yes" {
		for off := int64(0); ; off += 64 << 10 {
			data := &pb.OutputData{Stream: pb.Stream_STREAM_STDOUT, Offset: off, Data: yes}
			event := &pb.ProcessEvent{Event: &pb.ProcessEvent_Data{Data: data}}
			if err := down.Send(&pb.StartResponse{Event: event}); err != nil {
				_ = p.e.leave("start ended")
				return err
			}
		}
	}
	exited := &pb.ProcessEvent{Event: &pb.ProcessEvent_Exited{Exited: &pb.Process{Number: 1}}}
	return down.Send(&pb.StartResponse{Event: exited})
}

var yes = bytes.Repeat([]byte("y\n"), 32<<10)

// files keeps whole files in a map.
type files struct {
	sandseav1connect.UnimplementedFileServiceHandler
	e *Edge
}

func (f files) Write(_ context.Context,
	up *connect.ClientStream[pb.WriteFileRequest],
) (*connect.Response[pb.WriteFileResponse], error) {
	var h *pb.WriteFileHeader
	var b bytes.Buffer
	for up.Receive() {
		if h == nil {
			h = up.Msg().GetHeader()
			if _, err := f.e.find(h.GetId(), up.RequestHeader()); err != nil {
				return nil, err
			}
			_ = f.e.leave("write began")
		}
		b.Write(up.Msg().GetData())
	}
	if err := up.Err(); err != nil {
		_ = f.e.leave("write broken")
		return nil, err
	}
	f.e.mu.Lock()
	defer f.e.mu.Unlock()
	f.e.files[h.GetId()+":"+h.GetPath()] = b.Bytes()
	return connect.NewResponse(&pb.WriteFileResponse{Info: &pb.FileInfo{Path: h.GetPath(), Size: int64(b.Len())}}), nil
}

// File gives what was written.
func (e *Edge) File(id, path string) ([]byte, bool) {
	e.mu.Lock()
	defer e.mu.Unlock()
	b, ok := e.files[id+":"+path]
	return b, ok
}

func (f files) Read(_ context.Context, r *connect.Request[pb.ReadFileRequest],
	down *connect.ServerStream[pb.ReadFileResponse],
) error {
	if _, err := f.e.find(r.Msg.GetId(), r.Header()); err != nil {
		return err
	}
	b, ok := f.e.File(r.Msg.GetId(), r.Msg.GetPath())
	if !ok {
		e := errdefs.New(errdefs.NotFound, "file "+r.Msg.GetPath(), "does not exist")
		e.Errno, e.ErrnoName = 2, "ENOENT"
		return e
	}
	if err := down.Send(&pb.ReadFileResponse{Info: &pb.FileInfo{Path: r.Msg.GetPath(), Size: int64(len(b))}}); err != nil {
		return err
	}
	for c := range slices.Chunk(b, 1<<20) {
		if err := down.Send(&pb.ReadFileResponse{Data: c}); err != nil {
			return err
		}
	}
	return nil
}

// Outward turns errors into their form on the wire.
type Outward struct{}

// WrapUnary implements connect.Interceptor.
func (Outward) WrapUnary(next connect.UnaryFunc) connect.UnaryFunc {
	return func(ctx context.Context, r connect.AnyRequest) (connect.AnyResponse, error) {
		resp, err := next(ctx, r)
		if err != nil {
			return nil, errwire.ToConnect(err)
		}
		return resp, nil
	}
}

// WrapStreamingClient implements connect.Interceptor.
func (Outward) WrapStreamingClient(next connect.StreamingClientFunc) connect.StreamingClientFunc {
	return next
}

// WrapStreamingHandler implements connect.Interceptor.
func (Outward) WrapStreamingHandler(next connect.StreamingHandlerFunc) connect.StreamingHandlerFunc {
	return func(ctx context.Context, conn connect.StreamingHandlerConn) error {
		return errwire.ToConnect(next(ctx, conn))
	}
}
