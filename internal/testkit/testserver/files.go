package testserver

import (
	"archive/tar"
	"context"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"net/http"
	"os"
	"path"
	"syscall"

	"connectrpc.com/connect"
	"google.golang.org/protobuf/types/known/timestamppb"

	"github.com/sandsea/sandsea/api/errdefs"
	pb "github.com/sandsea/sandsea/api/sandsea/v1"
	"github.com/sandsea/sandsea/api/sandsea/v1/sandseav1connect"
)

// files serves the files of a sandbox, which lie below its directory.
type files struct {
	sandseav1connect.UnimplementedFileServiceHandler
	e *edge
}

func (h files) root(ctx context.Context, id string, hd http.Header) (*os.Root, error) {
	b, err := h.e.box(ctx, id, hd, false)
	if err != nil {
		return nil, err
	}
	return os.OpenRoot(b.dir)
}

// explain gives an error of the system its kind.
func explain(name string, err error) error {
	errno, ok := errors.AsType[syscall.Errno](err)
	if !ok {
		return err
	}
	kind, symbol := errdefs.FailedPrecondition, "EIO"
	switch errno {
	case syscall.ENOENT:
		kind, symbol = errdefs.NotFound, "ENOENT"
	case syscall.EISDIR:
		symbol = "EISDIR"
	case syscall.ENOTDIR:
		symbol = "ENOTDIR"
	case syscall.EEXIST:
		kind, symbol = errdefs.AlreadyExists, "EEXIST"
	}
	e := errdefs.New(kind, name, "%s", errno.Error()).WithHint("Check the path")
	e.Errno, e.ErrnoName = int(errno), symbol
	return e
}

func info(name string, st fs.FileInfo) *pb.FileInfo {
	out := &pb.FileInfo{
		Path: name, Size: st.Size(), Mode: uint32(st.Mode().Perm()), ModifiedAt: timestamppb.New(st.ModTime()), Type: pb.FileType_FILE_TYPE_OTHER,
	}
	switch {
	case st.Mode().IsRegular():
		out.Type = pb.FileType_FILE_TYPE_REGULAR
	case st.IsDir():
		out.Type = pb.FileType_FILE_TYPE_DIRECTORY
	case st.Mode()&fs.ModeSymlink != 0:
		out.Type = pb.FileType_FILE_TYPE_SYMLINK
	}
	return out
}

func (h files) Stat(ctx context.Context, r *connect.Request[pb.StatFileRequest]) (*connect.Response[pb.StatFileResponse], error) {
	root, err := h.root(ctx, r.Msg.GetId(), r.Header())
	if err != nil {
		return nil, err
	}
	defer root.Close()
	look := root.Stat
	if r.Msg.GetNoFollow() {
		look = root.Lstat
	}
	st, err := look(inside(r.Msg.GetPath()))
	if err != nil {
		return nil, explain(r.Msg.GetPath(), err)
	}
	return connect.NewResponse(&pb.StatFileResponse{Info: info(r.Msg.GetPath(), st)}), nil
}

func (h files) List(ctx context.Context, r *connect.Request[pb.ListFilesRequest], down *connect.ServerStream[pb.ListFilesResponse]) error {
	root, err := h.root(ctx, r.Msg.GetId(), r.Header())
	if err != nil {
		return err
	}
	defer root.Close()
	entries, err := fs.ReadDir(root.FS(), inside(r.Msg.GetPath()))
	if err != nil {
		return explain(r.Msg.GetPath(), err)
	}
	out := &pb.ListFilesResponse{}
	for _, e := range entries {
		st, err := e.Info()
		if err != nil {
			return explain(e.Name(), err)
		}
		out.Files = append(out.Files, info(path.Join(r.Msg.GetPath(), e.Name()), st))
	}
	return down.Send(out)
}

func (h files) Read(ctx context.Context, r *connect.Request[pb.ReadFileRequest], down *connect.ServerStream[pb.ReadFileResponse]) error {
	root, err := h.root(ctx, r.Msg.GetId(), r.Header())
	if err != nil {
		return err
	}
	defer root.Close()
	f, err := root.Open(inside(r.Msg.GetPath()))
	if err != nil {
		return explain(r.Msg.GetPath(), err)
	}
	defer f.Close()
	st, err := f.Stat()
	if err != nil {
		return explain(r.Msg.GetPath(), err)
	}
	if st.IsDir() {
		return explain(r.Msg.GetPath(), syscall.EISDIR)
	}
	if err := down.Send(&pb.ReadFileResponse{Info: info(r.Msg.GetPath(), st)}); err != nil {
		return err
	}
	_, err = io.Copy(sender(func(b []byte) error { return down.Send(&pb.ReadFileResponse{Data: b}) }), f)
	return err
}

// sender is a writer that sends.
type sender func([]byte) error

func (s sender) Write(b []byte) (int, error) { return len(b), s(b) }

func (h files) Write(ctx context.Context, up *connect.ClientStream[pb.WriteFileRequest]) (*connect.Response[pb.WriteFileResponse], error) {
	if !up.Receive() {
		return nil, errdefs.New(errdefs.Invalid, "", "header: missing")
	}
	head := up.Msg().GetHeader()
	root, err := h.root(ctx, head.GetId(), up.RequestHeader())
	if err != nil {
		return nil, err
	}
	defer root.Close()
	name := inside(head.GetPath())
	if st, err := root.Stat(name); err == nil && st.IsDir() {
		return nil, explain(head.GetPath(), syscall.EISDIR)
	}
	var data []byte
	for more := true; more; more = up.Receive() {
		data = append(data, up.Msg().GetData()...)
	}
	if err := up.Err(); err != nil {
		return nil, err
	}
	if head.Size != nil && head.GetSize() != int64(len(data)) {
		return nil, errdefs.New(errdefs.Invalid, head.GetPath(), "%d bytes came, not %d", len(data), head.GetSize())
	}
	mode := fs.FileMode(head.GetMode())
	if mode == 0 {
		mode = 0o644
	}
	if err := put(root, name, data, mode); err != nil {
		return nil, explain(head.GetPath(), err)
	}
	return connect.NewResponse(&pb.WriteFileResponse{Info: &pb.FileInfo{Path: head.GetPath(), Size: int64(len(data))}}), nil
}

func put(root *os.Root, name string, data []byte, mode fs.FileMode) error {
	if err := root.MkdirAll(path.Dir(name), 0o755); err != nil {
		return err
	}
	return root.WriteFile(name, data, mode)
}

func (h files) MakeDir(ctx context.Context, r *connect.Request[pb.MakeDirRequest]) (*connect.Response[pb.MakeDirResponse], error) {
	root, err := h.root(ctx, r.Msg.GetId(), r.Header())
	if err != nil {
		return nil, err
	}
	defer root.Close()
	if err := root.MkdirAll(inside(r.Msg.GetPath()), 0o755); err != nil {
		return nil, explain(r.Msg.GetPath(), err)
	}
	return connect.NewResponse(&pb.MakeDirResponse{}), nil
}

func (h files) UploadTar(ctx context.Context, up *connect.ClientStream[pb.UploadTarRequest]) (*connect.Response[pb.UploadTarResponse], error) {
	if !up.Receive() {
		return nil, errdefs.New(errdefs.Invalid, "", "header: missing")
	}
	head := up.Msg().GetHeader()
	root, err := h.root(ctx, head.GetId(), up.RequestHeader())
	if err != nil {
		return nil, err
	}
	defer root.Close()
	pr, pw := io.Pipe()
	go func() {
		for more := true; more; more = up.Receive() {
			if _, err := pw.Write(up.Msg().GetData()); err != nil {
				return
			}
		}
		pw.CloseWithError(up.Err())
	}()
	out, err := untar(root, inside(head.GetPath()), pr)
	pr.CloseWithError(io.ErrClosedPipe)
	if err != nil {
		return nil, errdefs.New(errdefs.Invalid, head.GetPath(), "%v", err).WithHint("Send a tar stream")
	}
	return connect.NewResponse(out), nil
}

func untar(root *os.Root, base string, r io.Reader) (*pb.UploadTarResponse, error) {
	out := &pb.UploadTarResponse{}
	if err := root.MkdirAll(base, 0o755); err != nil {
		return nil, err
	}
	tr := tar.NewReader(r)
	for {
		h, err := tr.Next()
		if errors.Is(err, io.EOF) {
			_, err = io.Copy(io.Discard, r)
			return out, err
		}
		if err != nil {
			return nil, err
		}
		name := path.Join(base, inside(h.Name))
		switch h.Typeflag {
		case tar.TypeDir:
			err = root.MkdirAll(name, h.FileInfo().Mode().Perm())
		case tar.TypeSymlink:
			err = root.Symlink(h.Linkname, name)
		case tar.TypeReg:
			var data []byte
			if data, err = io.ReadAll(tr); err == nil {
				err = put(root, name, data, h.FileInfo().Mode().Perm())
			}
			out.Files++
			out.Bytes += h.Size
		default:
			err = fmt.Errorf("entry %s has type %c", h.Name, h.Typeflag)
		}
		if err != nil {
			return nil, err
		}
	}
}

func (h files) DownloadTar(ctx context.Context, r *connect.Request[pb.DownloadTarRequest], down *connect.ServerStream[pb.DownloadTarResponse]) error {
	root, err := h.root(ctx, r.Msg.GetId(), r.Header())
	if err != nil {
		return err
	}
	defer root.Close()
	skipped, err := totar(root, inside(r.Msg.GetPath()), sender(func(b []byte) error {
		return down.Send(&pb.DownloadTarResponse{Data: b})
	}))
	if err != nil {
		return explain(r.Msg.GetPath(), err)
	}
	return down.Send(&pb.DownloadTarResponse{Skipped: skipped})
}

// totar packs a tree with names relative to it, a file under its own name.
func totar(root *os.Root, base string, w io.Writer) (skipped []string, err error) {
	tw := tar.NewWriter(w)
	err = fs.WalkDir(root.FS(), base, func(name string, d fs.DirEntry, err error) error {
		if err != nil {
			return err
		}
		st, err := d.Info()
		if err != nil {
			return err
		}
		short := name[min(len(name), len(base)+1):]
		switch {
		case name == base && st.IsDir():
			return nil
		case name == base:
			short = path.Base(name)
		case base == ".":
			short = name
		}
		link := ""
		if st.Mode()&fs.ModeSymlink != 0 {
			if link, err = root.Readlink(name); err != nil {
				return err
			}
		} else if !st.Mode().IsRegular() && !st.IsDir() {
			skipped = append(skipped, short)
			return nil
		}
		h, err := tar.FileInfoHeader(st, link)
		if err != nil {
			return err
		}
		h.Name = short
		if err := tw.WriteHeader(h); err != nil || !st.Mode().IsRegular() {
			return err
		}
		data, err := root.ReadFile(name)
		if err != nil {
			return err
		}
		_, err = tw.Write(data)
		return err
	})
	return skipped, errors.Join(err, tw.Close())
}
