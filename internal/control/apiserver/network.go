package apiserver

import (
	"context"

	"connectrpc.com/connect"

	pb "github.com/sandsea/sandsea/api/sandsea/v1"
	"github.com/sandsea/sandsea/api/sandsea/v1/sandseav1connect"
	"github.com/sandsea/sandsea/internal/control/nodeclient"
)

// networks passes the network service on, but for Endpoint, whose addresses are ours.
type networks struct{ s *Server }

type networkClient = sandseav1connect.NetworkServiceClient

func networkLine(c *nodeclient.Client) networkClient { return c.Network }

func (n networks) SetPolicy(ctx context.Context, r request[pb.SetNetworkPolicyRequest]) (
	response[pb.SetNetworkPolicyResponse], error,
) {
	return pass(ctx, n.s, r, changes, networkLine, networkClient.SetPolicy)
}

func (n networks) SetPhase(ctx context.Context, r request[pb.SetNetworkPhaseRequest]) (
	response[pb.SetNetworkPhaseResponse], error,
) {
	return pass(ctx, n.s, r, changes, networkLine, networkClient.SetPhase)
}

func (n networks) Check(ctx context.Context, r request[pb.CheckNetworkRequest]) (
	response[pb.CheckNetworkResponse], error,
) {
	return pass(ctx, n.s, r, reads, networkLine, networkClient.Check)
}

func (n networks) Log(
	ctx context.Context, r request[pb.NetworkLogRequest], down *connect.ServerStream[pb.NetworkLogResponse],
) error {
	return passDown(ctx, n.s, r, down, reads, networkLine, networkClient.Log)
}
