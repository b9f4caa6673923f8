package nodeapi

import (
	"bufio"
	"context"
	"errors"
	"io"
	"net/http"

	"connectrpc.com/connect"

	"github.com/sandsea/sandsea/api/errdefs"
	sandseav1 "github.com/sandsea/sandsea/api/sandsea/v1"
	"github.com/sandsea/sandsea/internal/chronus/files"
)

// fileService implements sandsea.v1.FileService.
type fileService struct {
	s       *Server
	batches chan struct{} // held while a batch is read
}

// view begins a file call; done ends it.
func (f fileService) view(ctx context.Context, procedure string, h http.Header, id, user string,
) (v *files.View, done func(), err error) {
	u, err := f.s.open(procedure, h, id)
	if err != nil {
		return nil, nil, err
	}
	v, err = u.Files(ctx, user)
	if err != nil {
		u.Done()
		return nil, nil, err
	}
	return v, u.Done, nil
}

func (f fileService) Read(ctx context.Context, r *connect.Request[sandseav1.ReadFileRequest],
	st *connect.ServerStream[sandseav1.ReadFileResponse],
) error {
	m := r.Msg
	v, done, err := f.view(ctx, r.Spec().Procedure, r.Header(), m.GetId(), m.GetUser())
	if err != nil {
		return err
	}
	defer done()
	part := files.Range{Offset: m.GetOffset(), Length: m.GetLength(), MaxBytes: m.GetMaxBytes()}
	rd, err := v.Read(ctx, m.GetPath(), part)
	if err != nil {
		return err
	}
	defer func() { _ = rd.Close() }()
	info := toInfo(rd.Info())
	buf := make([]byte, chunk)
	for {
		n, err := io.ReadFull(rd, buf)
		whole := errors.Is(err, io.EOF) || errors.Is(err, io.ErrUnexpectedEOF)
		if err != nil && !whole {
			return err
		}
		if n > 0 || info != nil {
			if err := st.Send(&sandseav1.ReadFileResponse{Info: info, Data: buf[:n]}); err != nil {
				return err
			}
			info = nil
		}
		if whole {
			return nil
		}
	}
}

func noHeader() error {
	return errdefs.New(errdefs.Invalid, "", "header: the first message has none").WithField("header", "").
		WithHint("Send the header first")
}

func (f fileService) Write(ctx context.Context, st *connect.ClientStream[sandseav1.WriteFileRequest],
) (*connect.Response[sandseav1.WriteFileResponse], error) {
	if !st.Receive() {
		return nil, errors.Join(noHeader(), st.Err())
	}
	h, first := st.Msg().GetHeader(), st.Msg().GetData()
	if h == nil {
		return nil, noHeader()
	}
	v, done, err := f.view(ctx, st.Spec().Procedure, st.RequestHeader(), h.GetId(), h.GetUser())
	if err != nil {
		return nil, err
	}
	defer done()
	body := &reader{rest: first, next: func() ([]byte, error) {
		if !st.Receive() {
			return nil, end(st.Err())
		}
		return st.Msg().GetData(), nil
	}}
	if v, err = v.GivingTo(ctx, h.GetOwner()); err != nil {
		return nil, err
	}
	info, err := v.Write(ctx, h.GetPath(), h.GetMode(), h.Size, body)
	if err != nil {
		return nil, err
	}
	return connect.NewResponse(&sandseav1.WriteFileResponse{Info: toInfo(info)}), nil
}

func (f fileService) Stat(ctx context.Context, r *connect.Request[sandseav1.StatFileRequest],
) (*connect.Response[sandseav1.StatFileResponse], error) {
	v, done, err := f.view(ctx, r.Spec().Procedure, r.Header(), r.Msg.GetId(), r.Msg.GetUser())
	if err != nil {
		return nil, err
	}
	defer done()
	info, err := v.Stat(ctx, r.Msg.GetPath(), r.Msg.GetNoFollow())
	if err != nil {
		return nil, err
	}
	return connect.NewResponse(&sandseav1.StatFileResponse{Info: toInfo(info)}), nil
}

func (f fileService) List(ctx context.Context, r *connect.Request[sandseav1.ListFilesRequest],
	st *connect.ServerStream[sandseav1.ListFilesResponse],
) error {
	v, done, err := f.view(ctx, r.Spec().Procedure, r.Header(), r.Msg.GetId(), r.Msg.GetUser())
	if err != nil {
		return err
	}
	defer done()
	for batch, err := range v.List(ctx, r.Msg.GetPath()) {
		if err != nil {
			return err
		}
		out := &sandseav1.ListFilesResponse{}
		for _, i := range batch {
			out.Files = append(out.Files, toInfo(i))
		}
		if err := st.Send(out); err != nil {
			return err
		}
	}
	return nil
}

func (f fileService) MakeDir(ctx context.Context, r *connect.Request[sandseav1.MakeDirRequest],
) (*connect.Response[sandseav1.MakeDirResponse], error) {
	v, done, err := f.view(ctx, r.Spec().Procedure, r.Header(), r.Msg.GetId(), r.Msg.GetUser())
	if err != nil {
		return nil, err
	}
	defer done()
	if err := v.MakeDir(ctx, r.Msg.GetPath(), r.Msg.GetMode(), r.Msg.GetParents()); err != nil {
		return nil, err
	}
	return connect.NewResponse(&sandseav1.MakeDirResponse{}), nil
}

func (f fileService) Move(ctx context.Context, r *connect.Request[sandseav1.MoveFileRequest],
) (*connect.Response[sandseav1.MoveFileResponse], error) {
	v, done, err := f.view(ctx, r.Spec().Procedure, r.Header(), r.Msg.GetId(), r.Msg.GetUser())
	if err != nil {
		return nil, err
	}
	defer done()
	if err := v.Move(ctx, r.Msg.GetFrom(), r.Msg.GetTo()); err != nil {
		return nil, err
	}
	return connect.NewResponse(&sandseav1.MoveFileResponse{}), nil
}

func (f fileService) Remove(ctx context.Context, r *connect.Request[sandseav1.RemoveFileRequest],
) (*connect.Response[sandseav1.RemoveFileResponse], error) {
	v, done, err := f.view(ctx, r.Spec().Procedure, r.Header(), r.Msg.GetId(), r.Msg.GetUser())
	if err != nil {
		return nil, err
	}
	defer done()
	if err := v.Remove(ctx, r.Msg.GetPath(), r.Msg.GetRecursive()); err != nil {
		return nil, err
	}
	return connect.NewResponse(&sandseav1.RemoveFileResponse{}), nil
}

func (f fileService) UploadTar(ctx context.Context, st *connect.ClientStream[sandseav1.UploadTarRequest],
) (*connect.Response[sandseav1.UploadTarResponse], error) {
	if !st.Receive() {
		return nil, errors.Join(noHeader(), st.Err())
	}
	h, first := st.Msg().GetHeader(), st.Msg().GetData()
	if h == nil {
		return nil, noHeader()
	}
	v, done, err := f.view(ctx, st.Spec().Procedure, st.RequestHeader(), h.GetId(), h.GetUser())
	if err != nil {
		return nil, err
	}
	defer done()
	if v, err = v.GivingTo(ctx, h.GetOwner()); err != nil {
		return nil, err
	}
	up, err := v.UploadTar(ctx, h.GetPath(), &reader{rest: first, next: func() ([]byte, error) {
		if !st.Receive() {
			return nil, end(st.Err())
		}
		return st.Msg().GetData(), nil
	}})
	if err != nil {
		return nil, err
	}
	return connect.NewResponse(&sandseav1.UploadTarResponse{Files: up.Files, Bytes: up.Bytes}), nil
}

// tarSink sends what is written as messages.
type tarSink struct {
	st *connect.ServerStream[sandseav1.DownloadTarResponse]
}

func (s tarSink) Write(p []byte) (int, error) {
	if err := s.st.Send(&sandseav1.DownloadTarResponse{Data: p}); err != nil {
		return 0, err
	}
	return len(p), nil
}

func (f fileService) DownloadTar(ctx context.Context, r *connect.Request[sandseav1.DownloadTarRequest],
	st *connect.ServerStream[sandseav1.DownloadTarResponse],
) error {
	v, done, err := f.view(ctx, r.Spec().Procedure, r.Header(), r.Msg.GetId(), r.Msg.GetUser())
	if err != nil {
		return err
	}
	defer done()
	w := bufio.NewWriterSize(tarSink{st}, chunk)
	skipped, err := v.DownloadTar(ctx, r.Msg.GetPath(), w)
	if err != nil {
		return err
	}
	if err := w.Flush(); err != nil {
		return err
	}
	for i := range skipped {
		skipped[i] = escaped(skipped[i])
	}
	return st.Send(&sandseav1.DownloadTarResponse{Skipped: skipped})
}
