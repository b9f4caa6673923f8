package apiserver

import (
	"context"
	"time"

	"connectrpc.com/connect"

	"github.com/sandsea/sandsea/api/errdefs"
	pb "github.com/sandsea/sandsea/api/sandsea/v1"
	"github.com/sandsea/sandsea/internal/control/placement"
	"github.com/sandsea/sandsea/internal/node"
)

// classNative is the one runtime class there is.
const classNative = "native"

// features are what works in every sandbox beside commands and files.
var features = []string{"endpoint", "entrypoint", "shell", "terminal", "watch"}

// networkEntries are what a policy may hold on a node that enforces it. There is no way out for IPv6.
var networkEntries = []string{"cidr", "domain", "git", "ipv4", "service", "wildcard"}

// Capabilities answers from the picture of the nodes. What some node enforces counts, since a sandbox that needs it is
// placed on no other.
func (h sandboxes) Capabilities(
	_ context.Context, r request[pb.CapabilitiesRequest],
) (response[pb.CapabilitiesResponse], error) {
	switch b := r.Msg.GetBackend(); b {
	case pb.Backend_BACKEND_UNSPECIFIED, pb.Backend_BACKEND_CONTAINER:
	default:
		return nil, errdefs.New(errdefs.Invalid, "", "backend: %d is not known", b).WithField("backend", "").
			WithHint("Use BACKEND_CONTAINER")
	}
	if c := r.Msg.GetClass(); c != "" && c != classNative {
		return nil, errdefs.New(errdefs.Invalid, "", "class: %q is not known", clip(c)).WithField("class", "").
			WithHint("Use %s", classNative)
	}
	out, nodes := capabilitiesOf(h.s.watcher.View(), time.Now())
	if nodes == 0 {
		return nil, errdefs.New(errdefs.Unavailable, "", "no node answers").WithRetryAfter(time.Second).
			WithHint("Start one: sandsea up, or see its log")
	}
	return connect.NewResponse(out), nil
}

// capabilitiesOf adds up what the nodes that answer can do.
func capabilitiesOf(v node.View, now time.Time) (out *pb.CapabilitiesResponse, nodes int) {
	out = &pb.CapabilitiesResponse{
		Resources: map[string]string{"cpu": "none", "memory": "none", "disk": "none", "pids": "none", "gpu": "none"},
		Features:  features, Largest: &pb.Limits{},
	}
	enforced := map[string]string{
		"cpu": node.FeatureCPU, "memory": node.FeatureMemory, "disk": node.FeatureDisk, "pids": node.FeaturePids,
	}
	for _, e := range v.Nodes {
		if now.Sub(e.SeenAt) > placement.Stale || e.Cordoned {
			continue
		}
		nodes++
		for resource, feature := range enforced {
			if e.Capabilities.Enforces(feature) {
				out.Resources[resource] = "limit"
			}
		}
		if e.Capabilities.Enforces(node.FeatureEgress) {
			out.NetworkEntries, out.NetworkChanges = networkEntries, true
		}
		if e.Capabilities.Memory > out.GetLargest().GetMemoryBytes() {
			out.Largest = &pb.Limits{
				MemoryBytes: e.Capabilities.Memory, CpuMillis: int64(e.Capabilities.CPUs) * 1000, DiskBytes: e.Load.DiskFree,
			}
		}
		out.SandboxesMax += int64(e.Load.MaxSandboxes)
		out.CreatesAtOnce += int64(node.StartsAtOnce(e.Capabilities.CPUs))
	}
	return out, nodes
}
