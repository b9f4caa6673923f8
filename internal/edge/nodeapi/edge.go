package nodeapi

import (
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"slices"
	"time"

	"connectrpc.com/connect"
	"google.golang.org/protobuf/types/known/timestamppb"

	"github.com/sandsea/sandsea/api/errdefs"
	nodev1 "github.com/sandsea/sandsea/api/node/v1"
	sandseav1 "github.com/sandsea/sandsea/api/sandsea/v1"
	"github.com/sandsea/sandsea/internal/edge/runner"
	"github.com/sandsea/sandsea/internal/image"
	"github.com/sandsea/sandsea/internal/layers/build"
	"github.com/sandsea/sandsea/internal/sandbox"
	"github.com/sandsea/sandsea/internal/sandboxpb"
)

// edgeService implements node.v1.EdgeService.
type edgeService struct{ s *Server }

func (e edgeService) Create(ctx context.Context, r *connect.Request[nodev1.CreateRequest],
) (*connect.Response[nodev1.CreateResponse], error) {
	m := r.Msg
	id, err := sandbox.Parse(m.GetId())
	if err != nil {
		return nil, err
	}
	self := e.s.cfg.Identity
	if id.Node() != self.Number {
		return nil, errdefs.New(errdefs.Invalid, "sandbox "+id.Short(), "its id names node %d, this is node %d",
			id.Node(), self.Number)
	}
	if m.GetNodeEpoch() < self.Epoch {
		return nil, errdefs.New(errdefs.Refused, "node "+self.Name, "epoch %d is over, this is %d",
			m.GetNodeEpoch(), self.Epoch)
	}
	if m.GetProject() == "" {
		return nil, errdefs.New(errdefs.Invalid, "", "project: is empty").WithField("project", "")
	}
	spec, err := sandboxpb.ToSpec(m.GetSpec())
	if err != nil {
		return nil, err
	}
	if spec, err = spec.Validate(); err != nil {
		return nil, err
	}
	layers, err := sandboxpb.ToDigests(m.GetLayers())
	if err != nil {
		return nil, err
	}
	if len(layers) == 0 || len(layers) > image.MaxLayers {
		return nil, errdefs.New(errdefs.Invalid, "", "layers: %d of them", len(layers)).WithField("layers", "1 to 64")
	}
	var img image.Digest
	if m.GetImageDigest() != "" {
		if img, err = image.ParseDigest(m.GetImageDigest()); err != nil {
			return nil, err
		}
	}
	if e.s.cfg.Layers != nil {
		if err := e.s.cfg.Layers.Ensure(ctx, layers); err != nil {
			return nil, err
		}
	}
	snap, err := e.s.cfg.Runner.Create(ctx, runner.Request{
		ID: id, Project: m.GetProject(), Spec: spec, Layers: layers, Config: sandboxpb.ToConfig(m.GetConfig()), Image: img,
		By: m.GetBy(), Digest: m.GetDigest(),
	})
	if err != nil {
		return nil, err
	}
	return connect.NewResponse(&nodev1.CreateResponse{Sandbox: e.s.sandbox(snap)}), nil
}

func (e edgeService) Get(ctx context.Context, r *connect.Request[nodev1.GetRequest],
) (*connect.Response[nodev1.GetResponse], error) {
	id, snap, err := e.s.visible(r.Header(), r.Msg.GetId())
	if err != nil {
		return nil, err
	}
	m := e.s.sandbox(snap)
	u, output, err := e.s.cfg.Runner.Usage(ctx, id)
	if err != nil {
		// It may be ending just now; its state is the answer.
		e.s.cfg.Log.Debug("usage of a sandbox", "sandbox", id, "err", err)
	}
	m.Usage = &sandseav1.Usage{
		MemoryBytes: u.Memory, MemoryPeakBytes: u.MemoryPeak, CpuUs: u.CPU.Microseconds(), Pids: u.Pids, DiskBytes: u.Disk,
		OutputBytes: output,
	}
	e.s.netUsage(ctx, id, m.Usage)
	return connect.NewResponse(&nodev1.GetResponse{Sandbox: m}), nil
}

func (e edgeService) Stop(ctx context.Context, r *connect.Request[nodev1.StopRequest],
) (*connect.Response[nodev1.StopResponse], error) {
	id, _, err := e.s.visible(r.Header(), r.Msg.GetId())
	if err != nil {
		return nil, err
	}
	by := r.Msg.GetBy()
	if by == "" {
		by = r.Header().Get(sandboxpb.PrincipalHeader)
	}
	snap, err := e.s.cfg.Runner.Stop(ctx, id, milliseconds(r.Msg.GetGraceMs()), by)
	if err != nil {
		return nil, err
	}
	return connect.NewResponse(&nodev1.StopResponse{Sandbox: e.s.sandbox(snap)}), nil
}

func (e edgeService) ExtendTTL(ctx context.Context, r *connect.Request[nodev1.ExtendTTLRequest],
) (*connect.Response[nodev1.ExtendTTLResponse], error) {
	id, _, err := e.s.visible(r.Header(), r.Msg.GetId())
	if err != nil {
		return nil, err
	}
	snap, err := e.s.cfg.Runner.ExtendTTL(ctx, id, milliseconds(r.Msg.GetTtlMs()))
	if err != nil {
		return nil, err
	}
	return connect.NewResponse(&nodev1.ExtendTTLResponse{Sandbox: e.s.sandbox(snap)}), nil
}

// milliseconds keeps what a duration cannot hold far out of every bound.
func milliseconds(ms int64) time.Duration {
	const most = int64(1<<63-1) / int64(time.Millisecond)
	return time.Duration(min(max(ms, -most), most)) * time.Millisecond
}

func (e edgeService) Roster(context.Context, *connect.Request[nodev1.RosterRequest],
) (*connect.Response[nodev1.RosterResponse], error) {
	all, seq := e.s.cfg.Runner.Roster()
	out := &nodev1.RosterResponse{Seq: seq, Incarnation: e.s.cfg.Runner.Incarnation(), Node: e.s.node(all)}
	for _, snap := range all {
		if !snap.Stored {
			out.Sandboxes = append(out.Sandboxes, sandboxpb.Brief(e.s.sandbox(snap)))
		}
	}
	return connect.NewResponse(out), nil
}

func (e edgeService) Follow(ctx context.Context, r *connect.Request[nodev1.FollowRequest],
	st *connect.ServerStream[nodev1.FollowResponse],
) error {
	gone := func(why string) error { return connect.NewError(connect.CodeOutOfRange, errors.New(why)) }
	if r.Msg.GetIncarnation() != e.s.cfg.Runner.Incarnation() {
		return gone("the edge has restarted: take the roster")
	}
	after := r.Msg.GetAfter()
	// The headers first, so that the follower knows that it follows.
	if err := st.Send(nil); err != nil {
		return err
	}
	for {
		batch, news, err := e.s.cfg.Runner.After(after)
		if err != nil {
			return gone(err.Error())
		}
		for _, t := range batch {
			err := st.Send(&nodev1.FollowResponse{
				Seq: t.Seq, At: timestamppb.New(t.At), What: t.What, Sandbox: sandboxpb.Brief(e.s.sandbox(t.Sandbox)),
			})
			if err != nil {
				return err
			}
			after = t.Seq
		}
		if len(batch) > 0 {
			continue
		}
		select {
		case <-news:
		case <-ctx.Done():
			return context.Cause(ctx)
		}
	}
}

func (e edgeService) builder() (Builder, error) {
	if e.s.cfg.Builder == nil {
		return nil, errdefs.New(errdefs.FailedPrecondition, "node "+e.s.cfg.Identity.Name, "it builds no images")
	}
	return e.s.cfg.Builder, nil
}

func (e edgeService) Build(ctx context.Context, r *connect.Request[nodev1.BuildRequest],
	st *connect.ServerStream[nodev1.BuildResponse],
) error {
	b, err := e.builder()
	if err != nil {
		return err
	}
	// The last state is enough for a slow reader: what it has not seen is over.
	progress := make(chan build.Progress, 1)
	report := func(p build.Progress) {
		for {
			select {
			case progress <- p:
				return
			default:
			}
			select {
			case <-progress:
			default:
			}
		}
	}
	type outcome struct {
		res build.Result
		err error
	}
	done := make(chan outcome, 1)
	go func() {
		res, err := e.runImport(ctx, b, r.Msg, report)
		done <- outcome{res, err}
	}()
	send := func(p build.Progress) error {
		return st.Send(&nodev1.BuildResponse{Event: &nodev1.BuildResponse_Progress{Progress: &sandseav1.ImportProgress{
			Stage: p.Stage, Done: p.Done, Total: p.Total, Unit: p.Unit, Detail: valid(p.Detail), Finished: p.Finished,
		}}})
	}
	for {
		select {
		case p := <-progress:
			if err := send(p); err != nil {
				return err
			}
		case o := <-done:
			select {
			case p := <-progress:
				if err := send(p); err != nil {
					return err
				}
			default:
			}
			if o.err != nil {
				return o.err
			}
			return st.Send(&nodev1.BuildResponse{Event: &nodev1.BuildResponse_Built{Built: &nodev1.Built{
				Layers: sandboxpb.FromLayers(o.res.Layers), Config: sandboxpb.FromConfig(o.res.Config), Name: o.res.Name,
				Packages: o.res.Packages,
			}}})
		}
	}
}

func (e edgeService) runImport(ctx context.Context, b Builder, m *nodev1.BuildRequest, report build.Report,
) (build.Result, error) {
	switch src := m.GetImport().GetSource().(type) {
	case *sandseav1.ImportImageRequest_Debian:
		return b.Debian(ctx, build.DebianOptions{
			Suite: src.Debian.GetSuite(), Include: src.Debian.GetInclude(), Refresh: src.Debian.GetRefresh(), Report: report,
			Known: func(ctx context.Context, name, packages string) (build.Result, bool, error) {
				return e.findKnown(ctx, m.GetKnown(), name, packages)
			},
		})
	case *sandseav1.ImportImageRequest_Archive:
		return importArchive(ctx, b, src.Archive, report)
	case *sandseav1.ImportImageRequest_Registry:
		auth := src.Registry.GetAuth()
		return b.Registry(ctx, build.RegistryOptions{
			Reference: src.Registry.GetReference(), Username: auth.GetUsername(), Password: auth.GetPassword(),
			Token: auth.GetToken(), Insecure: src.Registry.GetInsecure(), Platform: src.Registry.GetPlatform(), Report: report,
		})
	}
	return build.Result{}, errdefs.New(errdefs.Invalid, "", "source: names nothing to import").WithField("source", "").
		WithHint("Give debian, archive or registry")
}

// findKnown finds an earlier import by its name and, when they are known, its packages. One whose layers are lost is not
// known: who imports it again wants them back.
func (e edgeService) findKnown(ctx context.Context, known []*nodev1.Built, name, packages string,
) (build.Result, bool, error) {
	for _, k := range known {
		if k.GetName() != name || (packages != "" && k.GetPackages() != packages) {
			continue
		}
		layers, err := sandboxpb.ToLayers(k.GetLayers())
		if err != nil {
			return build.Result{}, false, err
		}
		if e.s.cfg.Layers != nil {
			var digests []image.Digest
			for _, l := range layers {
				digests = append(digests, l.Digest)
			}
			if err := e.s.cfg.Layers.Ensure(ctx, digests); errors.Is(err, errdefs.Refused) {
				e.s.cfg.Log.Warn("layers of an image are lost; it is made again", "image", name, "err", err)
				continue
			} else if err != nil {
				return build.Result{}, false, err
			}
		}
		return build.Result{
			Name: name, Layers: layers, Config: sandboxpb.ToConfig(k.GetConfig()), Packages: k.GetPackages(),
		}, true, nil
	}
	return build.Result{}, false, nil
}

func importArchive(ctx context.Context, b Builder, m *sandseav1.ArchiveSource, report build.Report,
) (build.Result, error) {
	f, err := b.Uploads().Open(m.GetUpload())
	if err != nil {
		return build.Result{}, err
	}
	defer f.Close()
	fi, err := f.Stat()
	if err != nil {
		return build.Result{}, fmt.Errorf("size of an upload: %w", err)
	}
	o := build.ArchiveOptions{
		Key: fmt.Sprint(m.GetUpload(), " ", m.GetFormat(), " ", m.GetReference()), Size: fi.Size(),
		Reference: m.GetReference(),
		Report:    report,
	}
	switch m.GetFormat() {
	case sandseav1.ArchiveFormat_ARCHIVE_FORMAT_OCI:
		return b.OCI(ctx, f, o)
	case sandseav1.ArchiveFormat_ARCHIVE_FORMAT_DOCKER:
		return b.Docker(ctx, f, o)
	case sandseav1.ArchiveFormat_ARCHIVE_FORMAT_ROOTFS, sandseav1.ArchiveFormat_ARCHIVE_FORMAT_UNSPECIFIED:
		return b.Rootfs(ctx, f, o)
	}
	return build.Result{}, errdefs.New(errdefs.Invalid, "", "source.archive.format: %d is unknown", m.GetFormat()).
		WithField("source.archive.format", "").WithHint("Use rootfs, OCI or Docker")
}

func (e edgeService) Upload(ctx context.Context, st *connect.ClientStream[nodev1.UploadRequest],
) (*connect.Response[nodev1.UploadResponse], error) {
	b, err := e.builder()
	if err != nil {
		return nil, err
	}
	id, n, err := b.Uploads().Upload(ctx, &reader{next: func() ([]byte, error) {
		if !st.Receive() {
			return nil, end(st.Err())
		}
		return st.Msg().GetData(), nil
	}})
	if err != nil {
		return nil, err
	}
	return connect.NewResponse(&nodev1.UploadResponse{Upload: id, Bytes: n}), nil
}

// Collect keeps what the request lists and what sandboxes of this node use.
func (e edgeService) Collect(ctx context.Context, r *connect.Request[nodev1.CollectRequest],
) (*connect.Response[nodev1.CollectResponse], error) {
	b, err := e.builder()
	if err != nil {
		return nil, err
	}
	keep, err := sandboxpb.ToDigests(r.Msg.GetKeep())
	if err != nil {
		return nil, err
	}
	all, _ := e.s.cfg.Runner.Roster()
	for _, snap := range all {
		if snap.State != sandbox.Ended {
			keep = append(keep, snap.Layers...)
		}
	}
	keep = append(keep, e.s.cfg.Keep...)
	slices.Sort(keep)
	keep = slices.Compact(keep)
	if e.s.cfg.Mounts != nil {
		e.s.cfg.Mounts.Keep(keep)
	}
	if e.s.cfg.Layers != nil {
		defer e.s.cfg.Layers.Collected()
	}
	freed, err := b.Collect(ctx, keep)
	if err != nil {
		return nil, err
	}
	return connect.NewResponse(&nodev1.CollectResponse{FreedBytes: freed}), nil
}

// reader turns the messages of a stream into bytes.
type reader struct {
	next func() ([]byte, error)
	rest []byte
}

func (r *reader) Read(p []byte) (int, error) {
	for len(r.rest) == 0 {
		data, err := r.next()
		if err != nil {
			return 0, err
		}
		r.rest = data
	}
	n := copy(p, r.rest)
	r.rest = r.rest[n:]
	return n, nil
}

// end is why a client's stream has ended: whole, or cut.
func end(err error) error {
	if err == nil {
		return io.EOF
	}
	if errors.Is(err, os.ErrDeadlineExceeded) || errors.Is(err, context.DeadlineExceeded) {
		return errdefs.New(errdefs.Deadline, "", "the upload did not end in time").Wrap(err)
	}
	return errdefs.New(errdefs.Canceled, "", "the upload was cut off").Wrap(err)
}
