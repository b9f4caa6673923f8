package nodeapi

import (
	"context"
	"errors"
	"fmt"
	"io"
	"net/http"
	"time"

	"connectrpc.com/connect"

	"github.com/sandsea/sandsea/api/errdefs"
	nodev1 "github.com/sandsea/sandsea/api/node/v1"
	"github.com/sandsea/sandsea/internal/image"
)

// blobsAtOnce is how many blobs other nodes may read from this one at the same time; more wait.
const blobsAtOnce = 8

// giveStall is how long a reader of a blob may take none of it before its connection is cut.
const giveStall = 30 * time.Second

// impatient cuts the connection of a reader that takes nothing for stall.
type impatient struct {
	http.ResponseWriter
	stall time.Duration
}

func (w impatient) Write(p []byte) (int, error) {
	if err := w.extend(); err != nil {
		return 0, err
	}
	return w.ResponseWriter.Write(p)
}

// Flush is FlushError for those who look for an http.Flusher; a broken connection shows at the next Write.
func (w impatient) Flush() { _ = w.FlushError() }

func (w impatient) FlushError() error {
	if err := w.extend(); err != nil {
		return err
	}
	return http.NewResponseController(w.ResponseWriter).Flush()
}

func (w impatient) extend() error {
	if err := http.NewResponseController(w.ResponseWriter).SetWriteDeadline(time.Now().Add(w.stall)); err != nil {
		return fmt.Errorf("limit the silence of a reader: %w", err)
	}
	return nil
}

// Unwrap is for http.ResponseController.
func (w impatient) Unwrap() http.ResponseWriter { return w.ResponseWriter }

// ReadBlob gives a blob of this node to another, from an offset on. The reader checks the digest. One that stops
// reading is cut off after giveStall, so that the place it has here is the next one's.
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
