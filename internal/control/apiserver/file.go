package apiserver

import (
	"context"

	"connectrpc.com/connect"

	pb "github.com/sandsea/sandsea/api/sandsea/v1"
	"github.com/sandsea/sandsea/api/sandsea/v1/sandseav1connect"
	"github.com/sandsea/sandsea/internal/control/nodeclient"
)

// files passes the file service on.
type files struct{ s *Server }

type fileClient = sandseav1connect.FileServiceClient

func fileLine(c *nodeclient.Client) fileClient { return c.File }

func (f files) Read(
	ctx context.Context, r request[pb.ReadFileRequest], down *connect.ServerStream[pb.ReadFileResponse],
) error {
	return passDown(ctx, f.s, r, down, reads, fileLine, fileClient.Read)
}

func (f files) Write(
	ctx context.Context, up *connect.ClientStream[pb.WriteFileRequest],
) (response[pb.WriteFileResponse], error) {
	return passUp(ctx, f.s, up, func(m *pb.WriteFileRequest) withID { return header(m.GetHeader()) }, fileLine,
		fileClient.Write)
}

func (f files) Stat(ctx context.Context, r request[pb.StatFileRequest]) (response[pb.StatFileResponse], error) {
	return pass(ctx, f.s, r, reads, fileLine, fileClient.Stat)
}

func (f files) List(
	ctx context.Context, r request[pb.ListFilesRequest], down *connect.ServerStream[pb.ListFilesResponse],
) error {
	return passDown(ctx, f.s, r, down, reads, fileLine, fileClient.List)
}

func (f files) MakeDir(ctx context.Context, r request[pb.MakeDirRequest]) (response[pb.MakeDirResponse], error) {
	return pass(ctx, f.s, r, changes, fileLine, fileClient.MakeDir)
}

func (f files) Move(ctx context.Context, r request[pb.MoveFileRequest]) (response[pb.MoveFileResponse], error) {
	return pass(ctx, f.s, r, changes, fileLine, fileClient.Move)
}

func (f files) Remove(ctx context.Context, r request[pb.RemoveFileRequest]) (response[pb.RemoveFileResponse], error) {
	return pass(ctx, f.s, r, changes, fileLine, fileClient.Remove)
}

func (f files) UploadTar(
	ctx context.Context, up *connect.ClientStream[pb.UploadTarRequest],
) (response[pb.UploadTarResponse], error) {
	return passUp(ctx, f.s, up, func(m *pb.UploadTarRequest) withID { return header(m.GetHeader()) }, fileLine,
		fileClient.UploadTar)
}

func (f files) DownloadTar(
	ctx context.Context, r request[pb.DownloadTarRequest], down *connect.ServerStream[pb.DownloadTarResponse],
) error {
	return passDown(ctx, f.s, r, down, reads, fileLine, fileClient.DownloadTar)
}

func (f files) ReadBatch(ctx context.Context, r request[pb.ReadBatchRequest]) (response[pb.ReadBatchResponse], error) {
	return pass(ctx, f.s, r, reads, fileLine, fileClient.ReadBatch)
}

func (f files) WriteBatch(ctx context.Context, r request[pb.WriteBatchRequest]) (response[pb.WriteBatchResponse], error) {
	return pass(ctx, f.s, r, changes, fileLine, fileClient.WriteBatch)
}

func (f files) Change(ctx context.Context, r request[pb.ChangeFileRequest]) (response[pb.ChangeFileResponse], error) {
	return pass(ctx, f.s, r, changes, fileLine, fileClient.Change)
}

func (f files) MakeLink(ctx context.Context, r request[pb.MakeLinkRequest]) (response[pb.MakeLinkResponse], error) {
	return pass(ctx, f.s, r, changes, fileLine, fileClient.MakeLink)
}

func (f files) Watch(
	ctx context.Context, r request[pb.WatchFilesRequest], down *connect.ServerStream[pb.WatchFilesResponse],
) error {
	return passDown(ctx, f.s, r, down, reads, fileLine, fileClient.Watch)
}

// header is h, and nil when h is.
func header[H any, P interface {
	*H
	withID
}](h P) withID {
	if h == nil {
		return nil
	}
	return h
}
