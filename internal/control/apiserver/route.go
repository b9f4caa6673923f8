package apiserver

import (
	"context"
	"errors"
	"fmt"
	"io"
	"net/http"
	"strings"
	"time"

	"connectrpc.com/connect"

	"github.com/sandsea/sandsea/api/errdefs"
	sandseav1 "github.com/sandsea/sandsea/api/sandsea/v1"
	"github.com/sandsea/sandsea/internal/control/iam"
	"github.com/sandsea/sandsea/internal/control/nodeclient"
	"github.com/sandsea/sandsea/internal/sandbox"
	"github.com/sandsea/sandsea/internal/sandboxpb"
	"github.com/sandsea/sandsea/internal/span"
	"github.com/sandsea/sandsea/internal/store"
	"github.com/sandsea/sandsea/internal/store/keys"
)

// line is where a call for one sandbox goes.
type line struct {
	*nodeclient.Client
	id   sandbox.ID
	node string
}

// route decodes the id: no look-up.
func (s *Server) route(ctx context.Context, id string) (line, error) {
	if id == "" {
		return line{}, errdefs.New(errdefs.Invalid, "", "id: missing").WithField("id", "").
			WithHint("Give all 27 letters as create printed them")
	}
	parsed, err := sandbox.Parse(id)
	if err != nil {
		return line{}, err
	}
	client, name, reachable, known := s.watcher.Node(parsed.Node())
	switch {
	case !known:
		// Nobody has this number now. A sandbox that was made there is away with its node; otherwise there is none.
		if _, ok, err := s.recorded(ctx, caller(ctx), id); err != nil || ok {
			return line{}, nodeAway(parsed, fmt.Sprintf("its node %d is away", parsed.Node())).Wrap(err)
		}
		return line{}, none(caller(ctx), parsed)
	case !reachable:
		return line{}, nodeAway(parsed, fmt.Sprintf("its node %s does not answer", name))
	}
	return line{client, parsed, name}, nil
}

func nodeAway(id sandbox.ID, why string) *errdefs.Error {
	return errdefs.New(errdefs.Unavailable, "sandbox "+id.Short(), "%s", why).
		WithHint("It may well run; try again when the node is back").WithRetryAfter(5 * time.Second)
}

func none(who iam.Caller, id sandbox.ID) error {
	return errdefs.New(errdefs.NotFound, "sandbox "+id.Short(), "none in project %s", who.Project).
		WithHint("All: sandsea ls --all")
}

// recorded reports whether the store has a record of a create of that sandbox in a project of the caller's.
func (s *Server) recorded(ctx context.Context, who iam.Caller, id string) (createRecord, bool, error) {
	for _, project := range append([]string{who.Project}, who.Covers...) {
		rec, ok, err := s.readRecord(ctx, project, id)
		if err != nil || ok {
			return rec, ok, err
		}
	}
	return createRecord{}, false, nil
}

// ended finds the record of an end, in the picture or in the store.
func (s *Server) ended(ctx context.Context, who iam.Caller, id string) (*sandseav1.Sandbox, bool, error) {
	if sb, ok := s.watcher.Sandbox(id); ok && sandboxpb.Over(sb.GetState()) {
		return sb, sandboxpb.Covers(who.Covers, sb.GetProject()), nil
	}
	tried := map[string]bool{}
	for _, project := range append([]string{who.Project}, who.Covers...) {
		if tried[project] {
			continue
		}
		tried[project] = true
		res, err := s.store.Txn(ctx, nil, []store.Op{store.Get(keys.EndedSandbox(project, id))}, nil)
		if err != nil {
			return nil, false, err
		}
		if len(res.Pairs) == 1 {
			sb, err := sandboxpb.DecodeEnded(res.Pairs[0].Value)
			return sb, err == nil, err
		}
	}
	return nil, false, nil
}

// gone is the one error for calls on a sandbox that has ended.
func gone(sb *sandseav1.Sandbox) error {
	id := sandbox.ID(sb.GetId())
	end := sb.GetEnd()
	if sb.GetState() == sandseav1.SandboxState_SANDBOX_STATE_LOST {
		e := errdefs.New(errdefs.Lost, "sandbox "+id.Short(), "lost: %s", orWord(end.GetDetail(), "its node lost it")).
			WithHint("Platform fault, not the task's. Create again")
		e.Cause = end.GetCause()
		return e
	}
	e := errdefs.New(errdefs.FailedPrecondition, "sandbox "+id.Short(), "ended %s ago: %s", span.Short(time.Since(end.GetAt().AsTime())), why(sb)).
		WithHint("See: sandsea logs %s", id.Short())
	e.Cause = end.GetCause()
	return e
}

// why is the cause of an end with the limit that was met, or else the detail.
func why(sb *sandseav1.Sandbox) string {
	end, spec := sb.GetEnd(), sb.GetSpec()
	switch cause := sandbox.Cause(end.GetCause()); {
	case cause == sandbox.CauseIdle && spec.GetIdleMs() > 0:
		return fmt.Sprintf("idle %d s (--idle)", spec.GetIdleMs()/1000)
	case cause == sandbox.CauseTTL && spec.GetTtlMs() > 0:
		return fmt.Sprintf("ttl %d s (--ttl)", spec.GetTtlMs()/1000)
	}
	if end.GetDetail() != "" {
		return end.GetCause() + " (" + end.GetDetail() + ")"
	}
	return end.GetCause()
}

func orWord(s, word string) string {
	if s == "" {
		return word
	}
	return s
}

// lostLimit bounds the look at the record of a sandbox that its node does not know.
const lostLimit = time.Second

var errLostLimit = fmt.Errorf("the store did not answer in %s: %w", lostLimit, context.DeadlineExceeded)

// answer turns what a node's call for a sandbox returned into its kind. "Not found" of a sandbox that is known to have
// ended says so instead, and so does the node's own word that it has: after the end every call raises the same error.
func (s *Server) answer(ctx context.Context, l line, err error, change bool) error {
	if err == nil {
		return nil
	}
	err = nodeclient.Error(err, l.node, change)
	e, ok := errors.AsType[*errdefs.Error](err)
	if !ok || e.Kind != errdefs.NotFound && e.Cause == "" {
		return err
	}
	// Only from memory: this path must not lean on the store.
	if sb, ok := s.watcher.Sandbox(string(l.id)); ok && sandboxpb.Over(sb.GetState()) &&
		sandboxpb.Covers(caller(ctx).Covers, sb.GetProject()) {
		return gone(sb)
	}
	if e.Kind == errdefs.NotFound && e.Field == "" && e.Errno == 0 && s.lost(ctx, l) {
		return lostError(l.id, l.node)
	}
	return err
}

// lost reports whether a sandbox that its node does not know was made in an earlier epoch of the node. The picture has
// nothing of it until the sweep has told its end. A store that does not answer soon leaves the node's word.
func (s *Server) lost(ctx context.Context, l line) bool {
	now := s.epoch(l.id.Node())
	if now <= 1 {
		return false
	}
	ctx, stop := context.WithTimeoutCause(ctx, lostLimit, errLostLimit)
	defer stop()
	rec, ok, err := s.recorded(ctx, caller(ctx), string(l.id))
	return err == nil && ok && now > rec.NodeEpoch
}

func lostError(id sandbox.ID, node string) *errdefs.Error {
	e := errdefs.New(errdefs.Lost, "sandbox "+id.Short(), "lost: node %s restarted or was fenced", node).
		WithHint("Platform fault, not the task's. Create again")
	e.Cause = string(sandbox.CauseInfraLost)
	return e
}

// speak puts who calls on a request to a node.
func speak(h http.Header, who iam.Caller) {
	h.Set(sandboxpb.ProjectsHeader, strings.Join(who.Covers, ","))
	h.Set(sandboxpb.PrincipalHeader, who.Principal)
}

// withID is a message that names its sandbox.
type withID interface{ GetId() string }

// Whether a call changes something: without an answer it is then Unknown instead of Unavailable.
const (
	changes = true
	reads   = false
)

// Short names for what every handler takes and gives.
type (
	request[T any]  = *connect.Request[T]
	response[T any] = *connect.Response[T]
)

// The three kinds of passing: C is the service's client, do its method, as sandseav1connect.FileServiceClient.Stat.

// pass sends a call with one message each way on to the sandbox's node.
func pass[C, Req, Res any](
	ctx context.Context, s *Server, req request[Req], change bool,
	of func(*nodeclient.Client) C, do func(C, context.Context, request[Req]) (response[Res], error),
) (response[Res], error) {
	l, err := s.route(ctx, idOf(req.Msg))
	if err != nil {
		return nil, err
	}
	out := connect.NewRequest(req.Msg)
	speak(out.Header(), caller(ctx))
	resp, err := do(of(l.Client), ctx, out)
	if err != nil {
		return nil, s.answer(ctx, l, err, change)
	}
	return connect.NewResponse(resp.Msg), nil
}

// passDown sends a call on whose answer is a stream; each message goes out as it comes in.
func passDown[C, Req, Res any](
	ctx context.Context, s *Server, req request[Req], down *connect.ServerStream[Res], change bool,
	of func(*nodeclient.Client) C, do func(C, context.Context, request[Req]) (*connect.ServerStreamForClient[Res], error),
) error {
	l, err := s.route(ctx, idOf(req.Msg))
	if err != nil {
		return err
	}
	// When the client is gone the node must know at once: its part of the stream ends with ours.
	ctx, stop := context.WithCancelCause(ctx)
	defer stop(nil)
	out := connect.NewRequest(req.Msg)
	speak(out.Header(), caller(ctx))
	up, err := do(of(l.Client), ctx, out)
	if err != nil {
		return s.answer(ctx, l, err, change)
	}
	defer func() {
		stop(nil)
		_ = up.Close()
	}()
	for up.Receive() {
		if err := down.Send(up.Msg()); err != nil {
			return errdefs.New(errdefs.Canceled, "", "the caller went away").Wrap(err)
		}
		change = false // the node has answered: it is known to have begun
	}
	return s.answer(ctx, l, up.Err(), change)
}

// passUp sends a stream of the client's on. The first message names the sandbox. A stream that breaks is broken for the
// node too: it never takes half a file for a whole one.
func passUp[C, Req, Res any](
	ctx context.Context, s *Server, up *connect.ClientStream[Req], header func(*Req) withID,
	of func(*nodeclient.Client) C, do func(C, context.Context) *connect.ClientStreamForClient[Req, Res],
) (response[Res], error) {
	if !up.Receive() {
		if err := up.Err(); err != nil {
			return nil, brokenUpload(err)
		}
		return nil, noHeader("the stream is empty")
	}
	h := header(up.Msg())
	if h == nil {
		return nil, noHeader("the first message has none")
	}
	l, err := s.route(ctx, h.GetId())
	if err != nil {
		return nil, err
	}
	ctx, stop := context.WithCancelCause(ctx)
	defer stop(nil)
	down := do(of(l.Client), ctx)
	speak(down.RequestHeader(), caller(ctx))
	if err := forward(ctx, up, down); err != nil {
		abort(stop, down)
		return nil, brokenUpload(err)
	}
	resp, err := down.CloseAndReceive()
	if err != nil {
		return nil, s.answer(ctx, l, err, true)
	}
	return connect.NewResponse(resp.Msg), nil
}

// forward sends the message that up holds and all that follow. nil means that up has ended well or that the node has
// answered early, so that its answer is to be read; after any other error the stream must be aborted.
func forward[Req, Res any](
	ctx context.Context, up *connect.ClientStream[Req], down *connect.ClientStreamForClient[Req, Res],
) error {
	for {
		if err := down.Send(up.Msg()); err != nil {
			return early(ctx, err)
		}
		if !up.Receive() {
			return up.Err()
		}
	}
}

// early judges a failed send to a node: nil when the node has answered already. When our caller has gone it is no such
// answer, though it looks the same: closing the stream in good order would then end half a file like a whole one.
func early(ctx context.Context, err error) error {
	if errors.Is(err, io.EOF) && ctx.Err() == nil {
		return nil
	}
	return err
}

// abort breaks a stream to a node: cancelled first, its end is none in good order (package nodeclient).
func abort[Req, Res any](stop context.CancelCauseFunc, down *connect.ClientStreamForClient[Req, Res]) {
	stop(nil)
	if conn, err := down.Conn(); err == nil {
		_ = conn.CloseRequest()
		_ = conn.CloseResponse()
	}
}

func noHeader(why string) error {
	return errdefs.New(errdefs.Invalid, "", "header: %s", why).WithField("header", "").
		WithHint("Send the header in the first message")
}

func brokenUpload(err error) error {
	if e, ok := errors.AsType[*errdefs.Error](err); ok {
		return e
	}
	if ce, ok := errors.AsType[*connect.Error](err); ok && ce.Code() != connect.CodeUnknown &&
		ce.Code() != connect.CodeCanceled {
		return fmt.Errorf("the stream broke: %w", ce)
	}
	return errdefs.New(errdefs.Canceled, "", "the stream broke, nothing was changed").Wrap(err)
}

func idOf(m any) string {
	if w, ok := m.(withID); ok {
		return w.GetId()
	}
	return ""
}
