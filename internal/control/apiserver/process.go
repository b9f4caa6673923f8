package apiserver

import (
	"context"

	"connectrpc.com/connect"

	pb "github.com/sandsea/sandsea/api/sandsea/v1"
	"github.com/sandsea/sandsea/api/sandsea/v1/sandseav1connect"
	"github.com/sandsea/sandsea/internal/control/nodeclient"
)

// processes passes the process service on.
type processes struct{ s *Server }

type processClient = sandseav1connect.ProcessServiceClient

func processLine(c *nodeclient.Client) processClient { return c.Process }

func (p processes) Run(ctx context.Context, r request[pb.RunRequest]) (response[pb.RunResponse], error) {
	return pass(ctx, p.s, r, changes, processLine, processClient.Run)
}

func (p processes) Start(
	ctx context.Context, r request[pb.StartRequest], down *connect.ServerStream[pb.StartResponse],
) error {
	return passDown(ctx, p.s, r, down, changes, processLine, processClient.Start)
}

func (p processes) Attach(
	ctx context.Context, r request[pb.AttachRequest], down *connect.ServerStream[pb.AttachResponse],
) error {
	return passDown(ctx, p.s, r, down, reads, processLine, processClient.Attach)
}

func (p processes) SendInput(ctx context.Context, r request[pb.SendInputRequest]) (response[pb.SendInputResponse],
	error,
) {
	return pass(ctx, p.s, r, changes, processLine, processClient.SendInput)
}

func (p processes) CloseInput(ctx context.Context, r request[pb.CloseInputRequest]) (response[pb.CloseInputResponse],
	error,
) {
	return pass(ctx, p.s, r, changes, processLine, processClient.CloseInput)
}

func (p processes) Signal(ctx context.Context, r request[pb.SignalRequest]) (response[pb.SignalResponse], error) {
	return pass(ctx, p.s, r, changes, processLine, processClient.Signal)
}

func (p processes) List(ctx context.Context, r request[pb.ListProcessesRequest]) (response[pb.ListProcessesResponse],
	error,
) {
	return pass(ctx, p.s, r, reads, processLine, processClient.List)
}

func (p processes) ResizeTTY(ctx context.Context, r request[pb.ResizeTTYRequest]) (response[pb.ResizeTTYResponse], error) {
	return pass(ctx, p.s, r, changes, processLine, processClient.ResizeTTY)
}

func (p processes) OpenShell(ctx context.Context, r request[pb.OpenShellRequest]) (response[pb.OpenShellResponse], error) {
	return pass(ctx, p.s, r, changes, processLine, processClient.OpenShell)
}

func (p processes) RunInShell(ctx context.Context, r request[pb.RunInShellRequest]) (response[pb.RunInShellResponse],
	error,
) {
	return pass(ctx, p.s, r, changes, processLine, processClient.RunInShell)
}

func (p processes) CloseShell(ctx context.Context, r request[pb.CloseShellRequest]) (response[pb.CloseShellResponse],
	error,
) {
	return pass(ctx, p.s, r, changes, processLine, processClient.CloseShell)
}
