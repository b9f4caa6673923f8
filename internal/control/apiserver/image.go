package apiserver

import (
	"cmp"
	"context"
	"crypto/sha256"
	"errors"
	"fmt"
	"slices"
	"strconv"
	"strings"
	"sync"
	"time"

	"connectrpc.com/connect"
	"google.golang.org/protobuf/proto"
	"google.golang.org/protobuf/types/known/timestamppb"

	"github.com/sandsea/sandsea/api/errdefs"
	nodev1 "github.com/sandsea/sandsea/api/node/v1"
	pb "github.com/sandsea/sandsea/api/sandsea/v1"
	"github.com/sandsea/sandsea/internal/control/nodeclient"
	"github.com/sandsea/sandsea/internal/image"
	"github.com/sandsea/sandsea/internal/node"
	"github.com/sandsea/sandsea/internal/sandbox"
	"github.com/sandsea/sandsea/internal/sandboxpb"
	"github.com/sandsea/sandsea/internal/store"
	"github.com/sandsea/sandsea/internal/store/keys"
)

// importLease is how long the sign of an import that runs outlives its server.
const importLease = 30 * time.Second

var errUnwatched = fmt.Errorf("nobody waits for the import any more: %w", context.Canceled)

// images serves the image service.
type images struct{ s *Server }

// describe is an image as it is shown. A sandbox uses an image when it has all its layers.
func (s *Server) describe(n *named, users int64) *pb.Image {
	return &pb.Image{
		Name: n.Name, Digest: string(n.digest), Layers: sandboxpb.FromLayers(n.Layers),
		Config:    sandboxpb.FromConfig(n.Config),
		CreatedAt: timestamppb.New(n.Created), Users: users,
	}
}

// users counts the living sandboxes whose roots hold all layers of n.
func users(n *named, living []*pb.Sandbox) int64 {
	var count int64
	for _, sb := range living {
		has := len(n.Layers) > 0
		for _, l := range n.Layers {
			has = has && slices.Contains(sb.GetLayers(), string(l.Digest))
		}
		if has {
			count++
		}
	}
	return count
}

func (h images) Get(ctx context.Context, r request[pb.GetImageRequest]) (response[pb.GetImageResponse], error) {
	n, err := h.s.catalogue.find(ctx, r.Msg.GetRef())
	if err != nil {
		return nil, err
	}
	img := h.s.describe(n, users(n, h.s.watcher.Sandboxes(false)))
	return connect.NewResponse(&pb.GetImageResponse{Image: img}), nil
}

func (h images) List(ctx context.Context, _ request[pb.ListImagesRequest]) (response[pb.ListImagesResponse], error) {
	if err := h.s.catalogue.wait(ctx); err != nil {
		return nil, err
	}
	living := h.s.watcher.Sandboxes(false)
	out := &pb.ListImagesResponse{}
	for _, n := range h.s.catalogue.list() {
		out.Images = append(out.Images, h.s.describe(n, users(n, living)))
	}
	return connect.NewResponse(out), nil
}

// Compose names a stack of images. The same stack again is success.
func (h images) Compose(ctx context.Context, r request[pb.ComposeImageRequest]) (response[pb.ComposeImageResponse],
	error,
) {
	m := r.Msg
	if err := checkImageName("name", m.GetName()); err != nil {
		return nil, err
	}
	// No layer of the stack is collected before the stack has its name.
	h.s.imports.naming.RLock()
	defer h.s.imports.naming.RUnlock()
	img, err := h.s.catalogue.stack(ctx, "", m.GetBase(), m.GetWorkspace(), m.GetToolkits())
	if err != nil {
		return nil, err
	}
	img.Name = m.GetName()
	if img.Config, err = overlay(img.Config, m.GetConfig()); err != nil {
		return nil, err
	}
	old, err := h.s.catalogue.fresh(ctx, img.Name)
	if err != nil {
		return nil, err
	}
	if old == nil {
		n, done, err := h.s.catalogue.put(ctx, img, nil, time.Now(), 0)
		if err != nil {
			return nil, err
		}
		if done {
			return connect.NewResponse(&pb.ComposeImageResponse{Image: h.s.describe(n, 0)}), nil
		}
		if old, err = h.s.catalogue.fresh(ctx, img.Name); err != nil {
			return nil, err
		}
	}
	if old == nil || old.digest != img.Digest() {
		return nil, errdefs.New(errdefs.AlreadyExists, "image "+img.Name, "is another composition").WithField("name", "").
			WithHint("Choose another name, or remove it: sandsea image rm %s", img.Name)
	}
	return connect.NewResponse(&pb.ComposeImageResponse{
		Image: h.s.describe(old, users(old, h.s.watcher.Sandboxes(false))),
	}), nil
}

// overlay lays a config of the caller's over an image's.
func overlay(c image.Config, m *pb.ImageConfig) (image.Config, error) {
	over := sandboxpb.ToConfig(m)
	if err := sandbox.CheckUser("config.user", over.User); err != nil {
		return c, err
	}
	if over.Workdir != "" && !strings.HasPrefix(over.Workdir, "/") {
		return c, errdefs.New(errdefs.Invalid, "", "config.workdir: %q is not absolute", clip(over.Workdir)).
			WithField("config.workdir", "").WithHint("Start it with /")
	}
	if err := sandbox.CheckPath("config.workdir", over.Workdir); err != nil {
		return c, err
	}
	size := 0
	for _, kv := range slices.Concat(over.Env, over.Entrypoint, over.Cmd) {
		size += len(kv) + 1
		if strings.Contains(kv, "\x00") {
			return c, errdefs.New(errdefs.Invalid, "", "config: holds NUL").WithField("config", "").WithHint("Remove it")
		}
	}
	for _, kv := range over.Env {
		if k, _, ok := strings.Cut(kv, "="); !ok || k == "" {
			return c, errdefs.New(errdefs.Invalid, "", "config.env: %q is not NAME=VALUE", clip(kv)).
				WithField("config.env", "").WithHint("Write NAME=VALUE")
		}
	}
	if size > 1<<20 {
		return c, errdefs.New(errdefs.Invalid, "", "config: %d bytes", size).WithField("config", "1 MiB").
			WithHint("Use at most 1 MiB")
	}
	return c.Over(over), nil
}

// Delete takes a name out of the catalogue and lets the nodes collect what no image holds.
func (h images) Delete(ctx context.Context, r request[pb.DeleteImageRequest]) (response[pb.DeleteImageResponse],
	error,
) {
	n, err := h.s.catalogue.find(ctx, r.Msg.GetRef())
	if errors.Is(err, errdefs.DataLoss) && r.Msg.GetForce() {
		n, err = h.s.catalogue.unread(ctx, r.Msg.GetRef())
	}
	if err != nil {
		return nil, err
	}
	if c := users(n, h.s.watcher.Sandboxes(false)); c > 0 && !r.Msg.GetForce() {
		return nil, errdefs.New(errdefs.FailedPrecondition, "image "+n.Name, "%d sandboxes use it", c).
			WithField("force", "").WithHint("Stop them, or delete it by force: they keep their layers")
	}
	done, err := h.s.catalogue.remove(ctx, n)
	if err != nil {
		return nil, err
	}
	if !done {
		return nil, errdefs.New(errdefs.FailedPrecondition, "image "+n.Name, "was changed at this moment").
			WithHint("Look at it again: sandsea image inspect %s", n.Name)
	}
	h.s.log.Info("image deleted", "image", n.Name, "digest", n.digest, "principal", caller(ctx).Principal)
	return connect.NewResponse(&pb.DeleteImageResponse{FreedBytes: h.s.collect(ctx)}), nil
}

// buildRoom is the free disk space that a node should have to build an image.
const buildRoom = 8 << 30

// buildNode chooses where an image is built: the first node that answers, has the feature and has room, so that what it
// fetched before is found again; when none has room, the one with the most.
func (s *Server) buildNode(feature string) (node.Number, error) {
	var lacking int
	var fix string
	var most node.Number
	free := int64(-1)
	for _, e := range s.watcher.View().Nodes {
		if e.Cordoned || time.Since(e.SeenAt) > 10*time.Second {
			continue
		}
		if feature == "" || e.Capabilities.Enforces(feature) {
			if e.Load.DiskFree >= buildRoom {
				return e.Number, nil
			}
			if e.Load.DiskFree > free {
				most, free = e.Number, e.Load.DiskFree
			}
			continue
		}
		lacking++
		fix = e.Capabilities.Feature(feature).Fix
	}
	if most != 0 {
		return most, nil
	}
	if lacking > 0 {
		e := errdefs.New(errdefs.FailedPrecondition, "", "no node can import this: %s is missing", feature).
			WithHint("%s", orWord(fix, "See: sandsea doctor"))
		e.Feature = feature
		return 0, e
	}
	return 0, errdefs.New(errdefs.Unavailable, "", "no node that can build answers").WithRetryAfter(time.Second)
}

// Upload hands an archive to a build node; the name that comes back carries the node's number.
func (h images) Upload(
	ctx context.Context, up *connect.ClientStream[pb.UploadImageRequest],
) (response[pb.UploadImageResponse], error) {
	number, err := h.s.buildNode("")
	if err != nil {
		return nil, err
	}
	client, name, _, ok := h.s.watcher.Node(number)
	if !ok {
		return nil, errdefs.New(errdefs.Unavailable, "", "node %d is away", number).WithRetryAfter(time.Second)
	}
	ctx, stop := context.WithCancelCause(ctx)
	defer stop(nil)
	down := client.Edge.Upload(ctx)
	speak(down.RequestHeader(), caller(ctx))
	send := func() error {
		for up.Receive() {
			if err := down.Send(&nodev1.UploadRequest{Data: up.Msg().GetData()}); err != nil {
				return early(ctx, err)
			}
		}
		return up.Err()
	}
	if err := send(); err != nil {
		abort(stop, down)
		return nil, brokenUpload(err)
	}
	resp, err := down.CloseAndReceive()
	if err != nil {
		return nil, nodeclient.Error(err, name, reads) // an archive without a name is removed by itself
	}
	return connect.NewResponse(&pb.UploadImageResponse{
		Upload: fmt.Sprintf("%d-%s", number, resp.Msg.GetUpload()), Bytes: resp.Msg.GetBytes(),
	}), nil
}

// Import builds and names an image. Who asks for the same while it runs joins it; when the last one leaves it is
// cancelled.
func (h images) Import(
	ctx context.Context, r request[pb.ImportImageRequest], down *connect.ServerStream[pb.ImportImageResponse],
) error {
	number, build, err := h.s.importPlan(r.Msg)
	if err != nil {
		return err
	}
	flight, leave := h.s.imports.join(ctx, r.Msg, func(ctx context.Context, tell func(*pb.ImportProgress)) (*pb.Image,
		bool, error,
	) {
		return h.s.build(ctx, number, build, tell)
	})
	defer leave()
	var sent uint64
	for {
		news, ended, more := flight.since(sent)
		for _, p := range news {
			sent = max(sent, p.number)
			event := &pb.ImportImageResponse_Progress{Progress: p.progress}
			if err := down.Send(&pb.ImportImageResponse{Event: event}); err != nil {
				return errdefs.New(errdefs.Canceled, "", "the caller went away").Wrap(err)
			}
		}
		if ended {
			if flight.err != nil {
				return flight.err
			}
			return down.Send(&pb.ImportImageResponse{
				Event: &pb.ImportImageResponse_Image{Image: flight.image}, Existed: flight.existed,
			})
		}
		select {
		case <-more:
		case <-ctx.Done():
			return errdefs.New(errdefs.Canceled, "", "import interrupted, no image was named").Wrap(context.Cause(ctx))
		}
	}
}

// importPlan checks a request and finds its node.
func (s *Server) importPlan(m *pb.ImportImageRequest) (node.Number, *pb.ImportImageRequest, error) {
	if m.GetName() != "" {
		if err := checkImageName("name", m.GetName()); err != nil {
			return 0, nil, err
		}
	}
	if _, err := overlay(image.Config{}, m.GetConfig()); err != nil {
		return 0, nil, err
	}
	switch {
	case m.GetDebian() != nil:
		if m.GetDebian().GetSuite() == "" {
			return 0, nil, errdefs.New(errdefs.Invalid, "", "debian.suite: missing").WithField("debian.suite", "").
				WithHint("Name one, as bookworm")
		}
		n, err := s.buildNode(node.FeatureDebian)
		return n, m, err
	case m.GetArchive() != nil:
		number, upload, ok := strings.Cut(m.GetArchive().GetUpload(), "-")
		n, err := strconv.ParseUint(number, 10, 32)
		if !ok || err != nil || n == 0 || node.Number(n) > node.MaxNumber || upload == "" {
			return 0, nil, errdefs.New(errdefs.Invalid, "", "archive.upload: is no upload").WithField("archive.upload", "").
				WithHint("Upload the archive first and give what the answer says")
		}
		build := proto.CloneOf(m)
		build.GetArchive().Upload = upload
		return node.Number(n), build, nil
	case m.GetRegistry() != nil:
		if m.GetRegistry().GetReference() == "" {
			return 0, nil, errdefs.New(errdefs.Invalid, "", "registry.reference: missing").
				WithField("registry.reference", "").WithHint("Name an image, as python:3.11")
		}
		n, err := s.buildNode("")
		return n, m, err
	}
	return 0, nil, errdefs.New(errdefs.Invalid, "", "source: missing").WithField("source", "").
		WithHint("Set debian, archive or registry")
}

// build makes the layers on a node and gives them their name.
func (s *Server) build(
	ctx context.Context, number node.Number, m *pb.ImportImageRequest, tell func(*pb.ImportProgress),
) (*pb.Image, bool, error) {
	client, nodeName, reachable, ok := s.watcher.Node(number)
	if !ok || !reachable {
		return nil, false, errdefs.New(errdefs.Unavailable, "", "node %d, which has the upload, is away", number).
			WithRetryAfter(5 * time.Second)
	}
	var before *named
	if m.GetName() != "" {
		var err error
		if before, err = s.catalogue.fresh(ctx, m.GetName()); err != nil {
			return nil, false, err
		}
	}
	// While this sign stands no server lets nodes collect layers, since ours have no name yet.
	done, err := s.announceImport(ctx)
	if err != nil {
		return nil, false, err
	}
	defer done()
	built, err := s.buildOn(ctx, client, nodeName, m, tell)
	if err != nil {
		return nil, false, err
	}
	img := image.Image{Name: cmp.Or(m.GetName(), built.GetName())}
	if img.Name == "" {
		return nil, false, errdefs.New(errdefs.Invalid, "", "the archive's image has no name").WithField("name", "").
			WithHint("Give it one: --name")
	}
	if err := checkImageName("name", img.Name); err != nil {
		return nil, false, err
	}
	if img.Layers, err = sandboxpb.ToLayers(built.GetLayers()); err != nil {
		return nil, false, errdefs.New(errdefs.Internal, "node "+nodeName, "built a layer without a digest").Wrap(err)
	}
	if img.Config, err = overlay(sandboxpb.ToConfig(built.GetConfig()), m.GetConfig()); err != nil {
		return nil, false, err
	}
	if m.GetName() == "" {
		if before, err = s.catalogue.fresh(ctx, img.Name); err != nil {
			return nil, false, err
		}
	}
	var rev int64
	if before != nil {
		rev = before.rev
		if before.digest == img.Digest() {
			now, err := s.catalogue.fresh(ctx, img.Name)
			if err != nil {
				return nil, false, err
			}
			if now == nil {
				rev = 0 // deleted while the layers were made
			} else if now.digest == img.Digest() {
				return s.describe(now, 0), true, nil
			}
		}
	}
	var from *origin
	if built.GetPackages() != "" {
		from = &origin{Name: built.GetName(), Packages: built.GetPackages(), Config: sandboxpb.ToConfig(built.GetConfig())}
	}
	n, named, err := s.catalogue.put(ctx, img, from, time.Now(), rev)
	if err != nil {
		return nil, false, err
	}
	if named {
		if rev != 0 {
			s.imports.leave() // the layers that the name stood for
		}
		s.log.Info("image imported", "image", n.Name, "digest", n.digest, "layers", len(n.Layers))
		return s.describe(n, 0), false, nil
	}
	// Another import was first. The same content is success, other content is not ours to overwrite.
	now, err := s.catalogue.fresh(ctx, img.Name)
	if err != nil {
		return nil, false, err
	}
	if now != nil && now.digest == img.Digest() {
		return s.describe(now, 0), true, nil
	}
	return nil, false, errdefs.New(errdefs.AlreadyExists, "image "+img.Name, "was changed by another import meanwhile").
		WithHint("Import again, or choose another name: --name")
}

func (s *Server) buildOn(
	ctx context.Context, client *nodeclient.Client, nodeName string, m *pb.ImportImageRequest,
	tell func(*pb.ImportProgress),
) (*nodev1.Built, error) {
	ctx, stop := context.WithCancelCause(ctx)
	defer stop(nil)
	known, err := s.knownImports(ctx, m)
	if err != nil {
		return nil, err
	}
	req := connect.NewRequest(&nodev1.BuildRequest{Import: m, Known: known})
	speak(req.Header(), caller(ctx))
	stream, err := client.Edge.Build(ctx, req)
	if err != nil {
		return nil, nodeclient.Error(err, nodeName, reads)
	}
	defer func() {
		stop(nil)
		_ = stream.Close()
	}()
	var built *nodev1.Built
	for stream.Receive() {
		switch {
		case stream.Msg().GetProgress() != nil:
			tell(stream.Msg().GetProgress())
		case stream.Msg().GetBuilt() != nil:
			built = stream.Msg().GetBuilt()
		}
	}
	if err := stream.Err(); err != nil {
		// A build that nobody names is collected: doing it again is safe.
		return nil, nodeclient.Error(err, nodeName, reads)
	}
	if built == nil || len(built.GetLayers()) == 0 {
		return nil, errdefs.New(errdefs.Internal, "node "+nodeName, "ended a build without layers")
	}
	return built, nil
}

// knownImports lists what earlier imports from Debian packages made, when m is one too.
func (s *Server) knownImports(ctx context.Context, m *pb.ImportImageRequest) ([]*nodev1.Built, error) {
	if m.GetDebian() == nil {
		return nil, nil
	}
	all, _, err := s.catalogue.read(ctx)
	if err != nil {
		return nil, err
	}
	var known []*nodev1.Built
	for _, n := range all {
		if n.Origin != nil {
			known = append(known, &nodev1.Built{
				Name: n.Origin.Name, Packages: n.Origin.Packages, Config: sandboxpb.FromConfig(n.Origin.Config),
				Layers: sandboxpb.FromLayers(n.Layers),
			})
		}
	}
	return known, nil
}

// announceImport writes the sign of an import that runs, under a lease, so that it goes when this server does.
func (s *Server) announceImport(ctx context.Context) (done func(), err error) {
	s.imports.naming.RLock()
	lease, err := s.store.Lease(ctx, importLease)
	if err == nil {
		_, err = s.store.Txn(ctx, nil, []store.Op{{
			Kind: store.OpPut, Key: keys.Import(newRequestID()), Value: []byte("{}"), Lease: lease.ID(),
		}}, nil)
	}
	if err != nil {
		s.imports.naming.RUnlock()
		return nil, err
	}
	ctx, stop := context.WithCancelCause(context.WithoutCancel(ctx))
	var wg sync.WaitGroup
	wg.Go(func() { _ = lease.KeepAlive(ctx) }) // without the lease the import still ends well, only less safely
	return func() {
		stop(nil)
		wg.Wait()
		ctx, stop := context.WithTimeoutCause(context.WithoutCancel(ctx), dropLimit, errDropLimit)
		defer stop()
		if err := lease.Revoke(ctx); err != nil {
			s.log.Debug("sign of an import not removed", "err", err)
		}
		s.imports.naming.RUnlock()
		select {
		case s.imports.over <- struct{}{}:
		default: // the collector is told already
		}
	}, nil
}

// imports are the imports in flight on this server.
type imports struct {
	// naming is held for reading from the start of an import or composition until its layers have a name, for writing by
	// the collector, which does not wait for it; collecting before it, by one collector at a time.
	naming     sync.RWMutex
	collecting sync.Mutex
	over       chan struct{} // holds a sign when an import has ended

	mu      sync.Mutex
	flights map[[sha256.Size]byte]*flight // guarded by mu
	left    bool                          // guarded by mu; there may be layers that no image names any more
	hourly  time.Time                     // guarded by mu; the last collection that nothing but the time asked for
}

func newImports(now time.Time) *imports {
	return &imports{over: make(chan struct{}, 1), flights: map[[sha256.Size]byte]*flight{}, hourly: now}
}

// flight is one import that several callers may follow. image, existed and err are set before done is.
type flight struct {
	image   *pb.Image
	existed bool
	err     error

	mu       sync.Mutex
	stages   []told        // guarded by mu; the last word of each stage, in order of their beginning
	last     uint64        // guarded by mu
	done     bool          // guarded by mu
	more     chan struct{} // guarded by mu; closed and replaced at every change
	watching int           // guarded by imports.mu
	stop     context.CancelCauseFunc
}

type told struct {
	number   uint64
	progress *pb.ImportProgress
}

// join finds the flight for a request or starts one. leave must be called once; the last to leave cancels the flight.
func (i *imports) join(
	ctx context.Context, m *pb.ImportImageRequest,
	run func(context.Context, func(*pb.ImportProgress)) (*pb.Image, bool, error),
) (f *flight, leave func()) {
	bytes, err := proto.MarshalOptions{Deterministic: true}.Marshal(m)
	if err != nil {
		bytes = []byte(newRequestID()) // not joinable
	}
	key := sha256.Sum256(bytes)
	i.mu.Lock()
	defer i.mu.Unlock()
	f = i.flights[key]
	if f == nil {
		fctx, stop := context.WithCancelCause(context.WithoutCancel(ctx))
		f = &flight{more: make(chan struct{}), stop: stop}
		i.flights[key] = f
		go func(f *flight) {
			defer stop(nil)
			img, existed, err := run(fctx, f.tell)
			if err != nil && fctx.Err() != nil && !errors.Is(err, errdefs.Canceled) {
				err = errdefs.New(errdefs.Canceled, "", "import interrupted, no image was named").Wrap(err)
			}
			i.mu.Lock()
			if i.flights[key] == f {
				delete(i.flights, key)
			}
			i.mu.Unlock()
			f.mu.Lock()
			defer f.mu.Unlock()
			f.image, f.existed, f.err, f.done = img, existed, err, true
			close(f.more)
		}(f)
	}
	f.watching++
	return f, func() {
		i.mu.Lock()
		defer i.mu.Unlock()
		if f.watching--; f.watching == 0 {
			f.stop(errUnwatched)
			if i.flights[key] == f { // who comes now starts anew
				delete(i.flights, key)
			}
		}
	}
}

// tell replaces the last word of a stage, so that a slow reader sees the newest and costs nothing.
func (f *flight) tell(p *pb.ImportProgress) {
	f.mu.Lock()
	defer f.mu.Unlock()
	f.last++
	t := told{f.last, p}
	if i := slices.IndexFunc(f.stages, func(o told) bool { return o.progress.GetStage() == p.GetStage() }); i >= 0 {
		f.stages[i] = t
	} else if len(f.stages) < 64 {
		f.stages = append(f.stages, t)
	}
	close(f.more)
	f.more = make(chan struct{})
}

// since gives what was told after number n, in order, and whether the flight has ended.
func (f *flight) since(n uint64) (news []told, ended bool, more <-chan struct{}) {
	f.mu.Lock()
	defer f.mu.Unlock()
	for _, t := range f.stages {
		if t.number > n {
			news = append(news, t)
		}
	}
	slices.SortFunc(news, func(a, b told) int { return cmp.Compare(a.number, b.number) })
	return news, f.done, f.more
}
