package apiserver

import (
	"cmp"
	"context"
	"encoding/base64"
	"encoding/json"
	"errors"
	"fmt"
	"maps"
	"slices"
	"strconv"
	"strings"
	"sync"
	"time"

	"connectrpc.com/connect"
	"google.golang.org/protobuf/encoding/protojson"
	"google.golang.org/protobuf/types/known/timestamppb"

	"github.com/sandsea/sandsea/api/errdefs"
	"github.com/sandsea/sandsea/api/errwire"
	nodev1 "github.com/sandsea/sandsea/api/node/v1"
	pb "github.com/sandsea/sandsea/api/sandsea/v1"
	"github.com/sandsea/sandsea/internal/control/iam"
	"github.com/sandsea/sandsea/internal/sandbox"
	"github.com/sandsea/sandsea/internal/sandboxpb"
	"github.com/sandsea/sandsea/internal/store"
	"github.com/sandsea/sandsea/internal/store/keys"
)

const (
	maxBatch    = 10_000
	inFlight    = 64
	maxPage     = 1000
	defaultPage = 500
	leastPrefix = 4
	maxGrace    = 5 * time.Minute
	stopLimit   = 30 * time.Second
	// pictureLimit bounds the wait of a listing that comes while the server starts.
	pictureLimit = 10 * time.Second
)

var errPictureLimit = fmt.Errorf("not all nodes answered or failed in %s: %w", pictureLimit, context.DeadlineExceeded)

// sandboxes serves the sandbox service.
type sandboxes struct{ s *Server }

func (h sandboxes) Create(
	ctx context.Context, r request[pb.CreateSandboxRequest],
) (response[pb.CreateSandboxResponse], error) {
	sb, err := h.s.create(ctx, r.Msg.GetSpec(), r.Msg.GetKey(), r.Msg.GetReadyTimeoutMs())
	if err != nil {
		return nil, err
	}
	return connect.NewResponse(&pb.CreateSandboxResponse{Sandbox: sb}), nil
}

// CreateBatch makes count sandboxes, a bounded number at a time, and tells of each as it is done.
func (h sandboxes) CreateBatch(
	ctx context.Context, r request[pb.CreateBatchRequest], down *connect.ServerStream[pb.CreateBatchResponse],
) error {
	n := int(r.Msg.GetCount())
	if n < 1 || n > maxBatch {
		return errdefs.New(errdefs.Invalid, "", "count: %d is not between 1 and 10000", n).WithField("count", "10000").
			WithHint("Send several batches")
	}
	if key := r.Msg.GetKey(); len(key) > sandbox.MaxKeyBytes-6 {
		return errdefs.New(errdefs.Invalid, "", "key: %d bytes", len(key)).WithField("key", "250 bytes").
			WithHint("Item i uses KEY/i; use at most 250 bytes")
	}
	begun, limit := time.Now(), r.Msg.GetReadyTimeoutMs()
	return eachInFlight(ctx, n, func(i int) *pb.CreateBatchResponse {
		left := limit
		if limit > 0 {
			left = max(1, limit-time.Since(begun).Milliseconds())
		}
		key := r.Msg.GetKey()
		if key != "" {
			key += "/" + strconv.Itoa(i)
		}
		out := &pb.CreateBatchResponse{Index: int32(i)}
		sb, err := h.s.create(ctx, r.Msg.GetSpec(), key, left)
		if err != nil {
			err = h.s.logged(ctx, "CreateBatch", err)
			out.Result, out.Message = &pb.CreateBatchResponse_Error{Error: errwire.Detail(err)}, err.Error()
			return out
		}
		out.Result = &pb.CreateBatchResponse_Sandbox{Sandbox: sb}
		return out
	}, down.Send)
}

// eachInFlight runs do for 0 to n-1, a bounded number at once, and sends each result as it comes. A failed send ends it
// all; it returns when every started one has ended.
func eachInFlight[T any](ctx context.Context, n int, do func(int) T, send func(T) error) error {
	ctx, stop := context.WithCancelCause(ctx)
	defer stop(nil)
	work := make(chan int)
	results := make(chan T)
	var wg sync.WaitGroup
	for range min(n, inFlight) {
		wg.Go(func() {
			for i := range work {
				results <- do(i)
			}
		})
	}
	go func() {
		defer close(results)
		defer wg.Wait()
		defer close(work)
		for i := range n {
			select {
			case work <- i:
			case <-ctx.Done():
				return
			}
		}
	}()
	var failed error
	for r := range results {
		if failed == nil {
			if failed = send(r); failed != nil {
				stop(failed)
			}
		}
	}
	if failed != nil {
		return errdefs.New(errdefs.Canceled, "", "the caller went away").Wrap(failed)
	}
	return ctx.Err()
}

// Get asks the owning node; for what has ended it reads the record of the end.
func (h sandboxes) Get(ctx context.Context, r request[pb.GetSandboxRequest]) (response[pb.GetSandboxResponse], error) {
	who := caller(ctx)
	id := r.Msg.GetId()
	if sb, ok := h.s.watcher.Sandbox(id); ok && sandboxpb.Over(sb.GetState()) && sandboxpb.Covers(who.Covers,
		sb.GetProject()) {
		return connect.NewResponse(&pb.GetSandboxResponse{Sandbox: sb}), nil
	}
	l, err := h.s.route(ctx, id)
	if err != nil {
		return nil, err
	}
	req := connect.NewRequest(&nodev1.GetRequest{Id: id})
	speak(req.Header(), who)
	resp, err := l.Edge.Get(ctx, req)
	if err == nil {
		return connect.NewResponse(&pb.GetSandboxResponse{Sandbox: resp.Msg.GetSandbox()}), nil
	}
	sb, err := h.s.afterlife(ctx, l, h.s.answer(ctx, l, err, reads))
	if err != nil {
		return nil, err
	}
	return connect.NewResponse(&pb.GetSandboxResponse{Sandbox: sb}), nil
}

// afterlife finds what became of a sandbox that its node does not know: an end on record, or a record of its create by
// an earlier epoch of the node, which means that it is lost. Otherwise cause stands.
func (s *Server) afterlife(ctx context.Context, l line, cause error) (*pb.Sandbox, error) {
	who := caller(ctx)
	if e, ok := errors.AsType[*errdefs.Error](cause); !ok || e.Kind != errdefs.NotFound && e.Cause == "" {
		return nil, cause
	}
	sb, ok, err := s.ended(ctx, who, string(l.id))
	if err != nil || ok {
		return sb, err
	}
	rec, ok, err := s.recorded(ctx, who, string(l.id))
	if err != nil {
		return nil, err
	}
	if ok && s.epoch(l.id.Node()) > rec.NodeEpoch {
		return lostSandbox(rec, l.node), nil
	}
	return nil, none(who, l.id)
}

// lostSandbox is what is left of a sandbox whose node did not bring it through a restart.
func lostSandbox(rec createRecord, nodeName string) *pb.Sandbox {
	sb := &pb.Sandbox{
		Id: string(rec.ID), Project: rec.Project, State: pb.SandboxState_SANDBOX_STATE_LOST, Node: nodeName,
		CreatedAt: timestamppb.New(rec.Created), Spec: &pb.SandboxSpec{},
		End: &pb.End{
			Cause: string(sandbox.CauseInfraLost), Detail: "node " + nodeName + " restarted or was fenced", By: "platform",
			At: timestamppb.Now(),
		},
	}
	// A record of a later version may hold more than we know.
	_ = protojson.UnmarshalOptions{DiscardUnknown: true}.Unmarshal(rec.Spec, sb.GetSpec())
	return sb
}

// List answers from the picture, newest first.
func (h sandboxes) List(
	ctx context.Context, r request[pb.ListSandboxesRequest],
) (response[pb.ListSandboxesResponse], error) {
	m := r.Msg
	f := filter{who: caller(ctx), labels: m.GetLabels(), states: m.GetStates(), prefix: m.GetIdPrefix()}
	switch {
	case f.prefix != "" && len(f.prefix) < leastPrefix:
		return nil, errdefs.New(errdefs.Invalid, "", "id_prefix: %q has less than 4 letters", f.prefix).
			WithField("id_prefix", "4 letters").WithHint("Give more letters")
	case m.GetPageSize() < 0 || m.GetPageSize() > maxPage:
		return nil, errdefs.New(errdefs.Invalid, "", "page_size: %d is not between 0 and 1000", m.GetPageSize()).
			WithField("page_size", "1000").WithHint("0 means 500")
	}
	if err := h.s.pictured(ctx); err != nil {
		return nil, err
	}
	over := m.GetAll() || slices.ContainsFunc(f.states, sandboxpb.Over)
	all := slices.DeleteFunc(h.s.watcher.Sandboxes(over), func(sb *pb.Sandbox) bool { return !f.takes(sb) })
	slices.SortFunc(all, newest)
	out := &pb.ListSandboxesResponse{Total: int64(len(all)), ViewAgeMs: h.s.watcher.Age(time.Now()).Milliseconds()}
	if token := m.GetPageToken(); token != "" {
		last, err := parseToken(token)
		if err != nil {
			return nil, err
		}
		i, found := slices.BinarySearchFunc(all, last, newest)
		if found {
			i++
		}
		all = all[i:]
	}
	size := cmp.Or(int(m.GetPageSize()), defaultPage)
	if len(all) > size {
		all = all[:size]
		out.NextPageToken = pageToken(all[size-1])
	}
	out.Sandboxes = all
	return connect.NewResponse(out), nil
}

// pictured waits until every registered node has answered or failed once since this server started: before that the
// picture would say of most sandboxes that they are not there.
func (s *Server) pictured(ctx context.Context) error {
	if s.ready.Load() {
		return nil
	}
	wctx, stop := context.WithTimeoutCause(ctx, pictureLimit, errPictureLimit)
	defer stop()
	if err := s.watcher.Ready(wctx); err != nil {
		return errdefs.New(errdefs.Unavailable, "", "the server has just started and has not heard of all nodes yet").
			WithRetryAfter(time.Second).WithHint("Try again in a second").Wrap(err)
	}
	return nil
}

// unseen finds by the records of their creates sandboxes on nodes that have not answered this server yet, of which the
// picture knows nothing, and says of each why it cannot be reached.
func (s *Server) unseen(ctx context.Context, f filter) (map[string]error, error) {
	out := map[string]error{}
	for _, project := range f.who.Covers {
		_, err := store.All(ctx, s.store, keys.Sandboxes+project+"/", func(p store.Pair) {
			var rec createRecord
			if json.Unmarshal(p.Value, &rec) != nil || s.watcher.Answered(rec.Node) {
				return
			}
			if _, ok := s.watcher.Sandbox(string(rec.ID)); ok {
				return // it has ended
			}
			if f.takes(lostSandbox(rec, "")) {
				out[string(rec.ID)] = nodeAway(rec.ID, fmt.Sprintf("its node %d is away", rec.Node))
			}
		})
		if err != nil {
			return nil, fmt.Errorf("look for sandboxes on nodes that are away: %w", err)
		}
	}
	return out, nil
}

// StopMany ends several, by id or by labels.
func (h sandboxes) StopMany(
	ctx context.Context, r request[pb.StopManyRequest], down *connect.ServerStream[pb.StopManyResponse],
) error {
	ids, labels := r.Msg.GetIds(), r.Msg.GetLabels()
	var away map[string]error
	var untold error // of sandboxes that are away, when the store is too: what the picture has is stopped all the same
	switch {
	case len(ids) > 0 && len(labels) > 0:
		return errdefs.New(errdefs.Invalid, "", "labels: go with no ids").WithField("labels",
			"").WithHint("Give one of the two")
	case len(ids) == 0 && len(labels) == 0:
		return errdefs.New(errdefs.Invalid, "", "ids: none, and no labels").WithField("ids", "").
			WithHint("List what to stop: sandsea ls")
	case len(ids) > maxBatch:
		return errdefs.New(errdefs.Invalid, "", "ids: %d", len(ids)).WithField("ids",
			"10000").WithHint("Send several requests")
	case len(labels) > 0:
		if err := h.s.pictured(ctx); err != nil {
			return err
		}
		f := filter{who: caller(ctx), labels: labels}
		for _, sb := range h.s.watcher.Sandboxes(false) {
			if f.takes(sb) {
				ids = append(ids, sb.GetId())
			}
		}
		away, untold = h.s.unseen(ctx, f)
		ids = slices.AppendSeq(ids, maps.Keys(away))
	}
	slices.Sort(ids)
	ids = slices.Compact(ids)
	return cmp.Or(eachInFlight(ctx, len(ids), func(i int) *pb.StopManyResponse {
		out := &pb.StopManyResponse{Id: ids[i]}
		err := away[ids[i]]
		if err == nil {
			_, err = h.s.stop(ctx, ids[i], r.Msg.GetGraceMs())
		}
		if err != nil {
			err = h.s.logged(ctx, "StopMany", err)
			out.Error, out.Message = errwire.Detail(err), err.Error()
		}
		return out
	}, down.Send), untold)
}

func (h sandboxes) Stop(ctx context.Context, r request[pb.StopSandboxRequest]) (response[pb.StopSandboxResponse],
	error,
) {
	sb, err := h.s.stop(ctx, r.Msg.GetId(), r.Msg.GetGraceMs())
	if err != nil {
		return nil, err
	}
	return connect.NewResponse(&pb.StopSandboxResponse{Sandbox: sb}), nil
}

// stop ends a sandbox; one that has ended answers the same.
func (s *Server) stop(ctx context.Context, id string, graceMs int64) (*pb.Sandbox, error) {
	who := caller(ctx)
	if graceMs < 0 || graceMs > maxGrace.Milliseconds() {
		return nil, errdefs.New(errdefs.Invalid, "", "grace_ms: %d is not between 0 and 5 minutes", graceMs).
			WithField("grace_ms", "5 min").WithHint("Give at most 5 minutes")
	}
	if sb, ok := s.watcher.Sandbox(id); ok && sandboxpb.Over(sb.GetState()) && sandboxpb.Covers(who.Covers,
		sb.GetProject()) {
		return sb, nil
	}
	l, err := s.route(ctx, id)
	if err != nil {
		return nil, err
	}
	limit := time.Duration(graceMs)*time.Millisecond + stopLimit
	ctx, done := context.WithTimeoutCause(ctx, limit, fmt.Errorf("not stopped in %s: %w", limit,
		context.DeadlineExceeded))
	defer done()
	req := connect.NewRequest(&nodev1.StopRequest{Id: id, GraceMs: graceMs, By: who.Principal})
	speak(req.Header(), who)
	resp, err := l.Edge.Stop(ctx, req)
	if err == nil {
		s.watcher.Note(resp.Msg.GetSandbox())
		return resp.Msg.GetSandbox(), nil
	}
	return s.afterlife(ctx, l, s.answer(ctx, l, err, changes))
}

func (h sandboxes) ExtendTTL(ctx context.Context, r request[pb.ExtendTTLRequest]) (response[pb.ExtendTTLResponse],
	error,
) {
	const most = int64(sandbox.MaxTTL / time.Millisecond)
	if ms := r.Msg.GetTtlMs(); ms <= 0 || ms > most {
		return nil, errdefs.New(errdefs.Invalid, "", "ttl_ms: %d is not above 0 and at most 30 days", ms).
			WithField("ttl_ms", "30 days").WithHint("Give at most 30 days")
	}
	l, err := h.s.route(ctx, r.Msg.GetId())
	if err != nil {
		return nil, err
	}
	req := connect.NewRequest(&nodev1.ExtendTTLRequest{Id: r.Msg.GetId(), TtlMs: r.Msg.GetTtlMs()})
	speak(req.Header(), caller(ctx))
	resp, err := l.Edge.ExtendTTL(ctx, req)
	if err != nil {
		return nil, h.s.answer(ctx, l, err, changes)
	}
	return connect.NewResponse(&pb.ExtendTTLResponse{Sandbox: resp.Msg.GetSandbox()}), nil
}

// filter says which sandboxes a caller asked for.
type filter struct {
	who    iam.Caller
	labels map[string]string
	states []pb.SandboxState
	prefix string
	id     string
}

func (f filter) takes(sb *pb.Sandbox) bool {
	if !sandboxpb.Covers(f.who.Covers, sb.GetProject()) {
		return false
	}
	if f.id != "" && sb.GetId() != f.id {
		return false
	}
	// The short form for people leaves out the first letter, which is the same in all ids.
	if f.prefix != "" && !strings.HasPrefix(sb.GetId(), f.prefix) && !strings.HasPrefix(sb.GetId(), "s"+f.prefix) {
		return false
	}
	if len(f.states) > 0 && !slices.Contains(f.states, sb.GetState()) {
		return false
	}
	for k, v := range f.labels {
		if got, ok := sb.GetSpec().GetLabels()[k]; !ok || got != v {
			return false
		}
	}
	return true
}

// newest orders sandboxes for people; the id makes the order total.
func newest(a, b *pb.Sandbox) int {
	return cmp.Or(b.GetCreatedAt().AsTime().Compare(a.GetCreatedAt().AsTime()), strings.Compare(a.GetId(), b.GetId()))
}

// pageToken names the last sandbox of a page by its place in the order.
func pageToken(sb *pb.Sandbox) string {
	return base64.RawURLEncoding.EncodeToString(fmt.Appendf(nil, "%d/%s", sb.GetCreatedAt().AsTime().UnixNano(),
		sb.GetId()))
}

func parseToken(token string) (*pb.Sandbox, error) {
	bad := errdefs.New(errdefs.Invalid, "", "page_token: is none of ours").WithField("page_token", "").
		WithHint("Take it from the page before, unchanged")
	b, err := base64.RawURLEncoding.DecodeString(token)
	at, id, ok := strings.Cut(string(b), "/")
	nanos, perr := strconv.ParseInt(at, 10, 64)
	if err != nil || !ok || perr != nil {
		return nil, bad
	}
	return &pb.Sandbox{Id: id, CreatedAt: timestamppb.New(time.Unix(0, nanos))}, nil
}

// Watch streams what happens to the caller's sandboxes.
func (h sandboxes) Watch(
	ctx context.Context, r request[pb.WatchSandboxesRequest], down *connect.ServerStream[pb.WatchSandboxesResponse],
) error {
	f := filter{who: caller(ctx), labels: r.Msg.GetLabels(), id: r.Msg.GetId()}
	if f.id != "" {
		if _, err := sandbox.Parse(f.id); err != nil {
			return err
		}
	}
	for e, err := range h.s.watcher.Events(ctx, r.Msg.GetCursor()) {
		if err != nil {
			return err
		}
		if !e.Gap && !f.takes(e.Sandbox) {
			continue
		}
		if err := down.Send(&pb.WatchSandboxesResponse{
			Cursor: e.Cursor, At: e.At, Sandbox: e.Sandbox, What: e.What, Gap: e.Gap,
		}); err != nil {
			return errdefs.New(errdefs.Canceled, "", "the caller went away").Wrap(err)
		}
	}
	return nil
}

// logged notes an error that goes out inside an answer, and words an Internal one as the door does.
func (s *Server) logged(ctx context.Context, what string, err error) error {
	return errwire.FromConnect(s.outward(ctx, what, err))
}
