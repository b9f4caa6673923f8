package nodeapi

import (
	"context"
	"net/netip"
	"slices"
	"time"

	"connectrpc.com/connect"

	"github.com/sandsea/sandsea/api/errdefs"
	sandseav1 "github.com/sandsea/sandsea/api/sandsea/v1"
	"github.com/sandsea/sandsea/internal/aether/flowlog"
	"github.com/sandsea/sandsea/internal/policy"
	"github.com/sandsea/sandsea/internal/sandbox"
	"github.com/sandsea/sandsea/internal/sandboxpb"
)

// networkService implements NetworkService, but for Endpoint, whose addresses are the server's.
type networkService struct{ s *Server }

func (n networkService) SetPolicy(ctx context.Context, r *connect.Request[sandseav1.SetNetworkPolicyRequest],
) (*connect.Response[sandseav1.SetNetworkPolicyResponse], error) {
	id, _, err := n.s.visible(r.Header(), r.Msg.GetId())
	if err != nil {
		return nil, err
	}
	p, err := sandboxpb.ToPolicy("network", r.Msg.GetPolicy())
	if err != nil {
		return nil, err
	}
	if p, err = p.Validate(); err != nil {
		return nil, err
	}
	snap, err := n.s.cfg.Runner.SetPolicy(ctx, id, p)
	if err != nil {
		return nil, err
	}
	return connect.NewResponse(&sandseav1.SetNetworkPolicyResponse{Sandbox: n.s.sandbox(snap)}), nil
}

func (n networkService) SetPhase(ctx context.Context, r *connect.Request[sandseav1.SetNetworkPhaseRequest],
) (*connect.Response[sandseav1.SetNetworkPhaseResponse], error) {
	id, _, err := n.s.visible(r.Header(), r.Msg.GetId())
	if err != nil {
		return nil, err
	}
	snap, err := n.s.cfg.Runner.SetPhase(ctx, id, r.Msg.GetPhase())
	if err != nil {
		return nil, err
	}
	return connect.NewResponse(&sandseav1.SetNetworkPhaseResponse{Sandbox: n.s.sandbox(snap)}), nil
}

func (n networkService) Check(_ context.Context, r *connect.Request[sandseav1.CheckNetworkRequest],
) (*connect.Response[sandseav1.CheckNetworkResponse], error) {
	id, _, err := n.s.visible(r.Header(), r.Msg.GetId())
	if err != nil {
		return nil, err
	}
	q, err := toQuestion(r.Msg)
	if err != nil {
		return nil, err
	}
	v, snap, err := n.s.cfg.Runner.Check(id, q)
	if err != nil {
		return nil, err
	}
	if v.Allow && r.Msg.GetPackage() != "" {
		v = packageVerdict(v, snap.Spec.Network.World(snap.Phase), r.Msg)
	}
	return connect.NewResponse(&sandseav1.CheckNetworkResponse{
		Allowed: v.Allow, Rule: v.Rule, Phase: snap.Phase, Reason: v.Reason,
	}), nil
}

// defaultPort is asked about where a question names none.
const defaultPort = 443

func toQuestion(m *sandseav1.CheckNetworkRequest) (policy.Question, error) {
	invalid := func(field, text string) *errdefs.Error {
		return errdefs.New(errdefs.Invalid, "", "%s: %s", field, text).WithField(field, "")
	}
	q := policy.Question{Service: m.GetService(), Port: defaultPort, Protocol: policy.TCP}
	switch {
	case (m.GetHost() == "") == (m.GetService() == ""):
		return q, invalid("host", "give a host or a service").WithHint("One of the two")
	case m.GetService() == "" && (m.GetPackage() != "" || m.GetVersion() != ""):
		return q, invalid("package", "belongs to a service").WithHint("Give the service, as pypi")
	case m.GetPackage() == "" && m.GetVersion() != "":
		return q, invalid("version", "belongs to a package").WithHint("Give the package")
	case m.GetPort() < 0 || m.GetPort() > 65535:
		return q, errdefs.New(errdefs.Invalid, "", "port: %d is not between 1 and 65535", m.GetPort()).
			WithField("port", "65535").WithHint("0 takes 443")
	}
	if m.GetPort() > 0 {
		q.Port = uint16(m.GetPort())
	}
	if m.GetProtocol() == sandseav1.NetworkProtocol_NETWORK_PROTOCOL_UDP {
		q.Protocol = policy.UDP
	}
	if a, err := netip.ParseAddr(m.GetHost()); err == nil {
		q.Addr = a
	} else {
		q.Name = m.GetHost()
	}
	return q, nil
}

// packageVerdict judges a package of a service that service allows. Nobody asks its registry here, so when a version was
// published is not known: where that decides, the answer says so.
func packageVerdict(service policy.Verdict, w policy.World, m *sandseav1.CheckNetworkRequest) policy.Verdict {
	v := w.Package(m.GetService(), m.GetPackage())
	if v.Allow && m.GetVersion() != "" {
		v = w.Version(m.GetService(), m.GetPackage(), m.GetVersion(), w.AsOf)
	}
	if !v.Allow {
		return v
	}
	if !w.AsOf.IsZero() {
		service.Reason = "versions that were published by " + w.AsOf.UTC().Format(time.DateOnly) + "; the registry was not asked"
	}
	return service
}

func (n networkService) Log(ctx context.Context, r *connect.Request[sandseav1.NetworkLogRequest],
	st *connect.ServerStream[sandseav1.NetworkLogResponse],
) error {
	id, _, err := n.s.visible(r.Header(), r.Msg.GetId())
	if err != nil {
		return err
	}
	if from := r.Msg.GetFromSeq(); from < 0 {
		return errdefs.New(errdefs.Invalid, "", "from_seq: %d is below 0", from).WithField("from_seq", "0")
	}
	ended, err := n.s.cfg.Runner.Ended(id)
	if err != nil {
		return err
	}
	if !r.Msg.GetFollow() {
		now := make(chan struct{})
		close(now)
		ended = now
	}
	// The headers first, so that a follower knows that it follows.
	if err := st.Send(nil); err != nil {
		return err
	}
	for batch, err := range flowlog.Follow(ctx, n.s.cfg.Runner.Flows(), string(id), r.Msg.GetFromSeq(), ended) {
		if err != nil {
			return err
		}
		m := &sandseav1.NetworkLogResponse{NextSeq: batch.Next, Missing: batch.Missing, Events: batch.Events}
		if r.Msg.GetDenied() {
			m.Events = slices.DeleteFunc(m.Events, func(e *sandseav1.NetworkEvent) bool { return !e.GetDenied() })
		}
		if len(m.Events) == 0 && m.Missing == 0 {
			continue
		}
		if err := st.Send(m); err != nil {
			return err
		}
	}
	return nil
}

func (n networkService) Endpoint(context.Context, *connect.Request[sandseav1.EndpointRequest],
) (*connect.Response[sandseav1.EndpointResponse], error) {
	return nil, errdefs.New(errdefs.Internal, "node "+n.s.cfg.Identity.Name, "endpoints are the server's to give")
}

// netUsage adds what crossed the sandbox's network.
func (s *Server) netUsage(ctx context.Context, id sandbox.ID, u *sandseav1.Usage) {
	c, err := s.cfg.Runner.NetUsage(ctx, id)
	if err != nil {
		s.cfg.Log.Debug("network usage of a sandbox", "sandbox", id, "err", err)
		return
	}
	u.NetSentBytes, u.NetReceivedBytes, u.NetFlows, u.NetDenied = c.Sent, c.Received, c.Flows, c.Denied
}
