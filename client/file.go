package client

import (
	"context"
	"errors"
	"fmt"
	"io"
	"iter"

	"connectrpc.com/connect"

	"github.com/sandsea/sandsea/api/errwire"
	sandseav1 "github.com/sandsea/sandsea/api/sandsea/v1"
)

// chunk is the size of a streamed piece of a file.
const chunk = 256 << 10

// ReadFile copies a file of the sandbox to w and returns what was read of it.
func (s *Sandbox) ReadFile(ctx context.Context, req *sandseav1.ReadFileRequest, w io.Writer) (*sandseav1.FileInfo, error) {
	req.Id = s.ID
	var info *sandseav1.FileInfo
	err := each(ctx, s.c.Files.Read, req, func(m *sandseav1.ReadFileResponse) error {
		if i := m.GetInfo(); i != nil {
			info = i
		}
		return writeTo(w, m.GetData(), req.GetPath())
	})
	return info, err
}

func writeTo(w io.Writer, data []byte, path string) error {
	if _, err := w.Write(data); err != nil {
		return fmt.Errorf("write what was read of %s: %w", path, err)
	}
	return nil
}

// WriteFile replaces a file of the sandbox with what r gives.
func (s *Sandbox) WriteFile(ctx context.Context, h *sandseav1.WriteFileHeader, r io.Reader) (*sandseav1.FileInfo, error) {
	h.Id = s.ID
	res, err := upload(ctx, s.c.Files.Write, &sandseav1.WriteFileRequest{Header: h}, r,
		func(b []byte) *sandseav1.WriteFileRequest { return &sandseav1.WriteFileRequest{Data: b} })
	return res.GetInfo(), err
}

// Stat describes a file.
func (s *Sandbox) Stat(ctx context.Context, req *sandseav1.StatFileRequest) (*sandseav1.FileInfo, error) {
	req.Id = s.ID
	res, err := s.c.Files.Stat(ctx, connect.NewRequest(req))
	if err != nil {
		return nil, err
	}
	return res.Msg.GetInfo(), nil
}

// ListFiles lists a directory.
func (s *Sandbox) ListFiles(ctx context.Context, req *sandseav1.ListFilesRequest) ([]*sandseav1.FileInfo, error) {
	req.Id = s.ID
	var out []*sandseav1.FileInfo
	err := each(ctx, s.c.Files.List, req, func(m *sandseav1.ListFilesResponse) error {
		out = append(out, m.GetFiles()...)
		return nil
	})
	return out, err
}

// UploadTar unpacks a tar stream below a directory of the sandbox.
func (s *Sandbox) UploadTar(ctx context.Context, h *sandseav1.UploadTarHeader, r io.Reader) (*sandseav1.UploadTarResponse, error) {
	h.Id = s.ID
	return upload(ctx, s.c.Files.UploadTar, &sandseav1.UploadTarRequest{Header: h}, r,
		func(b []byte) *sandseav1.UploadTarRequest { return &sandseav1.UploadTarRequest{Data: b} })
}

// DownloadTar writes a file or tree of the sandbox to w as a tar stream and returns what was left out of it.
func (s *Sandbox) DownloadTar(ctx context.Context, req *sandseav1.DownloadTarRequest, w io.Writer) ([]string, error) {
	req.Id = s.ID
	var skipped []string
	err := each(ctx, s.c.Files.DownloadTar, req, func(m *sandseav1.DownloadTarResponse) error {
		skipped = append(skipped, m.GetSkipped()...)
		return writeTo(w, m.GetData(), req.GetPath())
	})
	return skipped, err
}

// MakeDir makes a directory.
func (s *Sandbox) MakeDir(ctx context.Context, req *sandseav1.MakeDirRequest) error {
	req.Id = s.ID
	_, err := s.c.Files.MakeDir(ctx, connect.NewRequest(req))
	return err
}

// MoveFile renames a file, link or directory.
func (s *Sandbox) MoveFile(ctx context.Context, req *sandseav1.MoveFileRequest) error {
	req.Id = s.ID
	_, err := s.c.Files.Move(ctx, connect.NewRequest(req))
	return err
}

// RemoveFile removes a file, link or directory.
func (s *Sandbox) RemoveFile(ctx context.Context, req *sandseav1.RemoveFileRequest) error {
	req.Id = s.ID
	_, err := s.c.Files.Remove(ctx, connect.NewRequest(req))
	return err
}

// ReadFiles reads small files whole: one result per path, in order. A file that cannot be read has an error in its
// place, as FileError gives it; the error returned is that of the call as a whole.
func (s *Sandbox) ReadFiles(ctx context.Context, req *sandseav1.ReadBatchRequest) ([]*sandseav1.FileContent, error) {
	req.Id = s.ID
	res, err := s.c.Files.ReadBatch(ctx, connect.NewRequest(req))
	if err != nil {
		return nil, err
	}
	return res.Msg.GetFiles(), nil
}

// WriteFiles writes small files: one result per file, in order; one that fails does not stop the others.
func (s *Sandbox) WriteFiles(ctx context.Context, req *sandseav1.WriteBatchRequest) ([]*sandseav1.FileWritten, error) {
	req.Id = s.ID
	res, err := s.c.Files.WriteBatch(ctx, connect.NewRequest(req))
	if err != nil {
		return nil, err
	}
	return res.Msg.GetFiles(), nil
}

// FileError is the error of one result of ReadFiles or WriteFiles, nil if it has none.
func FileError(item interface {
	GetError() *sandseav1.ErrorDetail
	GetMessage() string
},
) error {
	if item.GetError() == nil {
		return nil
	}
	return errwire.FromDetail(item.GetError(), item.GetMessage())
}

// ChangeFile sets mode, owner and time of a file and returns what it is then.
func (s *Sandbox) ChangeFile(ctx context.Context, req *sandseav1.ChangeFileRequest) (*sandseav1.FileInfo, error) {
	req.Id = s.ID
	res, err := s.c.Files.Change(ctx, connect.NewRequest(req))
	if err != nil {
		return nil, err
	}
	return res.Msg.GetInfo(), nil
}

// MakeLink makes a symbolic link.
func (s *Sandbox) MakeLink(ctx context.Context, req *sandseav1.MakeLinkRequest) (*sandseav1.FileInfo, error) {
	req.Id = s.ID
	res, err := s.c.Files.MakeLink(ctx, connect.NewRequest(req))
	if err != nil {
		return nil, err
	}
	return res.Msg.GetInfo(), nil
}

// WatchFiles yields what changes below a path, first FILE_CHANGE_READY: what happens after that is told. It ends without
// an error when the path itself is removed, which is told before. Leaving the loop early removes the watch.
func (s *Sandbox) WatchFiles(ctx context.Context, req *sandseav1.WatchFilesRequest,
) iter.Seq2[*sandseav1.WatchFilesResponse, error] {
	req.Id = s.ID
	return messages(ctx, s.c.Files.Watch, req)
}

// upload sends head, unless it is nil, then r in pieces, and gives the answer. When r or ctx ends it early, the cancel
// makes the server drop what it has.
func upload[Req, Res any](ctx context.Context, open func(context.Context) *connect.ClientStreamForClient[Req, Res],
	head *Req, r io.Reader, piece func([]byte) *Req,
) (*Res, error) {
	ctx, cancel := context.WithCancelCause(ctx)
	defer cancel(nil)
	stream := open(ctx)
	var err error
	if head != nil {
		err = stream.Send(head)
	}
	if err == nil {
		err = pump(r, func(b []byte) error { return stream.Send(piece(b)) })
	}
	if err := unsent(ctx, err); err != nil {
		cancel(err)
		giveUp(stream)
		return nil, err
	}
	res, err := stream.CloseAndReceive()
	if err != nil {
		return nil, err
	}
	return res.Msg, nil
}

// giveUp closes the body of a call that was cancelled, which breaks it off (whole): net/http waits for it to end.
func giveUp[Req, Res any](stream *connect.ClientStreamForClient[Req, Res]) {
	if conn, err := stream.Conn(); err == nil {
		_ = conn.CloseRequest() // the call has failed already
	}
}

// pump sends r in chunks until its end.
func pump(r io.Reader, send func([]byte) error) error {
	buf := make([]byte, chunk)
	for {
		n, err := io.ReadFull(r, buf)
		if n > 0 {
			if serr := send(buf[:n]); serr != nil {
				return serr
			}
		}
		if errors.Is(err, io.EOF) || errors.Is(err, io.ErrUnexpectedEOF) {
			return nil
		}
		if err != nil {
			return fmt.Errorf("read what is to be written: %w", err)
		}
	}
}
