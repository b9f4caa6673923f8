package apiserver

import (
	"context"
	"errors"
	"time"

	"connectrpc.com/connect"

	"github.com/sandsea/sandsea/api/errdefs"
	"github.com/sandsea/sandsea/api/sandsea/v1/sandseav1connect"
)

// errLeaving ends what only waits when the server stops.
var errLeaving = errors.New("the server stops")

// Leave says that the server is about to stop: calls that only wait for news end at once with Unavailable, and so do
// calls that wait for a command under a key. Whoever asks again, there or at another server, hears the rest. All other
// calls have the time that the server's shutdown gives them. Idempotent.
func (s *Server) Leave() { s.leave(errLeaving) }

// patient gives a call a context that ends when the server leaves, if it is one that need not be waited for once keyed
// is known, and settle, which words the end of one that was cut off so.
func (s *Server) patient(ctx context.Context, procedure string, keyed func() bool) (_ context.Context, settle func(error) error) {
	var waits func() bool
	switch procedure {
	case sandseav1connect.ProcessServiceAttachProcedure, sandseav1connect.FileServiceWatchProcedure,
		sandseav1connect.SandboxServiceWatchProcedure, sandseav1connect.NetworkServiceLogProcedure:
		waits = func() bool { return true }
	case sandseav1connect.ProcessServiceRunProcedure, sandseav1connect.ProcessServiceStartProcedure,
		sandseav1connect.ProcessServiceRunInShellProcedure:
		waits = keyed
	default:
		return ctx, func(err error) error { return err }
	}
	ctx, cancel := context.WithCancelCause(ctx)
	stop := context.AfterFunc(s.leaving, func() {
		if waits() {
			cancel(errLeaving)
		}
	})
	return ctx, func(err error) error {
		stop()
		cut := errors.Is(context.Cause(ctx), errLeaving)
		cancel(nil)
		if err == nil || !cut {
			return err
		}
		return errdefs.New(errdefs.Unavailable, "", "the server stops; sandboxes and commands go on").
			WithRetryAfter(time.Second).WithHint("Ask again with the same key or offset").Wrap(err)
	}
}

// hasKey reports whether a message carries a key.
func hasKey(m any) bool {
	k, ok := m.(interface{ GetKey() string })
	return ok && k.GetKey() != ""
}

// keyedStream notes whether the first message of a stream carries a key.
type keyedStream struct {
	connect.StreamingHandlerConn
	first func(any)
}

// Receive says of a stream that cannot be read, which the library calls an internal error, that it is the caller's.
func (k *keyedStream) Receive(m any) error {
	err := k.StreamingHandlerConn.Receive(m)
	if ce, ok := errors.AsType[*connect.Error](err); ok && ce.Code() == connect.CodeInternal {
		return errdefs.New(errdefs.Invalid, "", "the stream of the request cannot be read: %s", ce.Message()).
			WithHint("Send whole messages").Wrap(err)
	}
	if err == nil && k.first != nil {
		k.first(m)
		k.first = nil
	}
	return err
}
