package apiserver

import (
	"context"
	"fmt"

	"connectrpc.com/connect"
	"google.golang.org/protobuf/types/known/timestamppb"

	"github.com/sandsea/sandsea/api/errdefs"
	pb "github.com/sandsea/sandsea/api/sandsea/v1"
)

// nodes serves the node service from the picture.
type nodes struct{ s *Server }

func (h nodes) Get(_ context.Context, r request[pb.GetNodeRequest]) (response[pb.GetNodeResponse], error) {
	name := r.Msg.GetName()
	if name == "" {
		return nil, errdefs.New(errdefs.Invalid, "", "name: missing").WithField("name", "").WithHint("All: sandsea node ls")
	}
	var names []string
	for _, n := range h.s.watcher.Nodes() {
		if n.GetName() == name {
			return connect.NewResponse(&pb.GetNodeResponse{Node: n}), nil
		}
		names = append(names, n.GetName())
	}
	return nil, notFound(fmt.Sprintf("node %q", clip(name)), "none", name, names, "sandsea node ls")
}

func (h nodes) List(context.Context, request[pb.ListNodesRequest]) (response[pb.ListNodesResponse], error) {
	return connect.NewResponse(&pb.ListNodesResponse{Nodes: h.s.watcher.Nodes()}), nil
}

// who serves the IAM service.
type who struct{ s *Server }

func (h who) WhoAmI(ctx context.Context, _ request[pb.WhoAmIRequest]) (response[pb.WhoAmIResponse], error) {
	c := caller(ctx)
	out := &pb.WhoAmIResponse{Principal: c.Principal, Project: c.Project, May: c.May, Version: h.s.version}
	if !c.ExpiresAt.IsZero() {
		out.TokenExpiresAt = timestamppb.New(c.ExpiresAt)
	}
	return connect.NewResponse(out), nil
}
