package nodeapi

import (
	"context"
	"errors"
	"io"

	"connectrpc.com/connect"

	"github.com/sandsea/sandsea/api/errdefs"
	nodev1 "github.com/sandsea/sandsea/api/node/v1"
	"github.com/sandsea/sandsea/internal/image"
)

// blobsAtOnce is how many blobs other nodes may read from this one at the same time; more wait.
const blobsAtOnce = 8

// ReadBlob gives a blob of this node to another, from an offset on. The reader checks the digest.
func (e edgeService) ReadBlob(ctx context.Context, r *connect.Request[nodev1.ReadBlobRequest],
	st *connect.ServerStream[nodev1.ReadBlobResponse],
) error {
	if e.s.cfg.Blobs == nil {
		return errdefs.New(errdefs.NotFound, "blob", "this node keeps none")
	}
	d, err := image.ParseDigest(r.Msg.GetDigest())
	if err != nil {
		return err
	}
	at := r.Msg.GetOffset()
	if at < 0 {
		return errdefs.New(errdefs.Invalid, "", "offset: %d is negative", at).WithField("offset", "")
	}
	// Before the wait: who asks the wrong node goes on to the next.
	if _, err := e.s.cfg.Blobs.Stat(ctx, d); err != nil {
		return err
	}
	select {
	case e.s.giving <- struct{}{}:
		defer func() { <-e.s.giving }()
	case <-ctx.Done():
		return context.Cause(ctx)
	}
	buf := make([]byte, chunk)
	for {
		n, err := e.s.cfg.Blobs.ReadAt(ctx, d, buf, at)
		if n > 0 {
			if err := st.Send(&nodev1.ReadBlobResponse{Data: buf[:n]}); err != nil {
				return err
			}
			at += int64(n)
		}
		if errors.Is(err, io.EOF) {
			return nil
		}
		if err != nil {
			return err
		}
	}
}
