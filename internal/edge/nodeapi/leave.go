package nodeapi

import (
	"context"
	"errors"
	"time"

	"connectrpc.com/connect"

	"github.com/sandsea/sandsea/api/errdefs"
	"github.com/sandsea/sandsea/api/node/v1/nodev1connect"
	"github.com/sandsea/sandsea/api/sandsea/v1/sandseav1connect"
)

// errLeaving ends what waits when the edge stops.
var errLeaving = errors.New("the node's daemon stops")

// waits says which calls last as long as what they wait for. A stop of the edge does not wait with them: what they
// follow goes on, and whoever asks the next edge hears the rest.
func waits(procedure string) bool {
	switch procedure {
	case sandseav1connect.ProcessServiceRunProcedure,
		sandseav1connect.ProcessServiceStartProcedure,
		sandseav1connect.ProcessServiceAttachProcedure,
		sandseav1connect.ProcessServiceRunInShellProcedure,
		sandseav1connect.FileServiceWatchProcedure,
		sandseav1connect.NetworkServiceLogProcedure,
		nodev1connect.EdgeServiceFollowProcedure:
		return true
	}
	return false
}

// patient gives a call that waits a context that ends when the edge leaves, and settle, which ends the call: it says
// what is true of one that was cut off so. Both leave every other call alone.
func (s *Server) patient(ctx context.Context, procedure string) (_ context.Context, settle func(err error, message any) error) {
	if !waits(procedure) {
		return ctx, func(err error, _ any) error { return err }
	}
	ctx, cancel := context.WithCancelCause(ctx)
	stop := context.AfterFunc(s.leaving, func() { cancel(errLeaving) })
	return ctx, func(err error, message any) error {
		stop()
		cut := errors.Is(context.Cause(ctx), errLeaving)
		cancel(nil)
		switch errdefs.KindOf(err) {
		case errdefs.Canceled, errdefs.Deadline, errdefs.Unavailable, errdefs.Unknown, errdefs.Internal:
			if cut {
				return left(procedure, message)
			}
		}
		return err
	}
}

// left is what a caller is told whose call was cut off by a stop. With a key, or for who only reads, Unavailable: asking
// again gives the rest. A command without a key goes on too, but nobody can ask for its answer again: Unknown.
func left(procedure string, message any) error {
	e := errdefs.New(errdefs.Unavailable, "node", "its daemon stops; sandboxes and commands go on").WithRetryAfter(time.Second)
	switch procedure {
	case sandseav1connect.ProcessServiceAttachProcedure:
		return e.WithHint("Attach again at the offset that you have")
	case sandseav1connect.ProcessServiceRunProcedure, sandseav1connect.ProcessServiceStartProcedure,
		sandseav1connect.ProcessServiceRunInShellProcedure:
		if k, ok := message.(interface{ GetKey() string }); ok && k.GetKey() != "" {
			return e.WithHint("Ask again with the same key: the command goes on")
		}
		e.Kind, e.RetryAfter = errdefs.Unknown, 0
		e.Msg = "its daemon stops; the command goes on and has not ended yet"
		return e.WithHint("Find it in the list of the sandbox's processes and attach to it. Use a key to be able to ask again")
	}
	return e.WithHint("Try again in a second")
}

// firstMessage keeps the first message of a stream, which says what it is about.
type firstMessage struct {
	connect.StreamingHandlerConn
	message any
}

func (f *firstMessage) Receive(m any) error {
	err := f.StreamingHandlerConn.Receive(m)
	if err == nil && f.message == nil {
		f.message = m
	}
	return err
}
