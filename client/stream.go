package client

import (
	"context"
	"iter"

	"connectrpc.com/connect"
)

// streamCall is a method of a service client whose answer is a stream.
type streamCall[Req, Res any] func(context.Context, *connect.Request[Req]) (*connect.ServerStreamForClient[Res], error)

// each hands the messages of a stream to f. When f fails the stream is let go of at once, which ends the call.
func each[Req, Res any](ctx context.Context, call streamCall[Req, Res], req *Req, f func(*Res) error) error {
	ctx, cancel := context.WithCancelCause(ctx)
	defer cancel(nil)
	stream, err := call(ctx, connect.NewRequest(req))
	if err != nil {
		return err
	}
	defer func() {
		cancel(nil) // Close alone would wait for more of the stream
		_ = stream.Close()
	}()
	for stream.Receive() {
		if err := f(stream.Msg()); err != nil {
			return err
		}
	}
	return stream.Err()
}

// messages yields the messages of a stream, and its error last.
func messages[Req, Res any](ctx context.Context, call streamCall[Req, Res], req *Req) iter.Seq2[*Res, error] {
	return func(yield func(*Res, error) bool) {
		left := false
		err := each(ctx, call, req, func(m *Res) error {
			if left = !yield(m, nil); left {
				return context.Canceled
			}
			return nil
		})
		if err != nil && !left {
			yield(nil, err)
		}
	}
}
