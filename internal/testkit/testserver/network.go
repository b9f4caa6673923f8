package testserver

import (
	"context"
	"fmt"
	"net/netip"
	"time"

	"connectrpc.com/connect"
	"google.golang.org/protobuf/proto"
	"google.golang.org/protobuf/types/known/timestamppb"

	"github.com/sandsea/sandsea/api/errdefs"
	pb "github.com/sandsea/sandsea/api/sandsea/v1"
	"github.com/sandsea/sandsea/api/sandsea/v1/sandseav1connect"
	"github.com/sandsea/sandsea/internal/policy"
	"github.com/sandsea/sandsea/internal/sandboxpb"
)

// networks keeps policies, judges by them and shows flow logs that a test wrote. Nothing is sent anywhere.
type networks struct {
	sandseav1connect.UnimplementedNetworkServiceHandler
	e *edge
}

// flows is the flow log of a sandbox.
type flows struct {
	events []*pb.NetworkEvent // seq is the index plus gone
	gone   int64
	woken  chan struct{}
}

// Flow adds events to a sandbox's flow log, as traffic would, and counts them in its usage. The numbers and, where there
// is none, the time are filled in.
func (s *Server) Flow(id string, events ...*pb.NetworkEvent) {
	s.edge.flow(id, func(f *flows) {
		for _, e := range events {
			e = proto.CloneOf(e)
			e.Seq, e.Count = f.gone+int64(len(f.events)), max(1, e.GetCount())
			if e.GetAt() == nil {
				e.At = timestamppb.Now()
			}
			f.events = append(f.events, e)
		}
	})
	s.Edge.Change(id, func(b *pb.Sandbox) {
		if b.Usage == nil {
			b.Usage = &pb.Usage{}
		}
		for _, e := range events {
			b.Usage.NetSentBytes += e.GetSentBytes()
			b.Usage.NetReceivedBytes += e.GetReceivedBytes()
			if e.GetDenied() {
				b.Usage.NetDenied += max(1, e.GetCount())
			}
		}
	})
}

// ForgetFlows drops the oldest n events of a sandbox's flow log.
func (s *Server) ForgetFlows(id string, n int) {
	s.edge.flow(id, func(f *flows) { f.events, f.gone = f.events[n:], f.gone+int64(n) })
}

// flow changes a log and wakes who follows it.
func (e *edge) flow(id string, change func(*flows)) {
	e.mu.Lock()
	defer e.mu.Unlock()
	f := e.flowsLocked(id)
	change(f)
	close(f.woken)
	f.woken = make(chan struct{})
}

func (e *edge) flowsLocked(id string) *flows {
	if e.logs == nil {
		e.logs = map[string]*flows{}
	}
	f := e.logs[id]
	if f == nil {
		f = &flows{woken: make(chan struct{})}
		e.logs[id] = f
	}
	return f
}

func (n networks) SetPolicy(_ context.Context, r *connect.Request[pb.SetNetworkPolicyRequest]) (
	*connect.Response[pb.SetNetworkPolicyResponse], error,
) {
	p, err := sandboxpb.ToPolicy("network", r.Msg.GetPolicy())
	if err != nil {
		return nil, err
	}
	if p, err = p.Validate(); err != nil {
		return nil, err
	}
	b, err := n.change(r.Msg.GetId(), func(b *pb.Sandbox) error {
		b.Spec.Network, b.NetworkPhase = sandboxpb.FromPolicy(p), p.Start
		return nil
	})
	if err != nil {
		return nil, err
	}
	return connect.NewResponse(&pb.SetNetworkPolicyResponse{Sandbox: b}), nil
}

func (n networks) SetPhase(_ context.Context, r *connect.Request[pb.SetNetworkPhaseRequest]) (
	*connect.Response[pb.SetNetworkPhaseResponse], error,
) {
	b, err := n.change(r.Msg.GetId(), func(b *pb.Sandbox) error {
		p, err := sandboxpb.ToPolicy("network", b.GetSpec().GetNetwork())
		if err != nil {
			return err
		}
		if _, ok := p.Phase(r.Msg.GetPhase()); !ok {
			return errdefs.New(errdefs.NotFound, "phase "+r.Msg.GetPhase(), "none in the policy of sandbox %s", b.GetId()[:8]).
				WithField("phase", "").WithHint("See its phases: sandsea inspect %s", b.GetId()[:8])
		}
		b.NetworkPhase = r.Msg.GetPhase()
		return nil
	})
	if err != nil {
		return nil, err
	}
	return connect.NewResponse(&pb.SetNetworkPhaseResponse{Sandbox: b}), nil
}

// change replaces a living sandbox.
func (n networks) change(id string, f func(*pb.Sandbox) error) (*pb.Sandbox, error) {
	var err error
	b := n.e.Change(id, func(b *pb.Sandbox) {
		if sandboxpb.Over(b.GetState()) {
			err = errdefs.New(errdefs.NotFound, "sandbox "+id[:8], "has ended")
			return
		}
		if b.Spec == nil {
			b.Spec = &pb.SandboxSpec{}
		}
		err = f(b)
	})
	if b == nil && err == nil {
		err = errdefs.New(errdefs.NotFound, "sandbox "+id[:min(8, len(id))], "none on this node")
	}
	return b, err
}

func (n networks) Check(_ context.Context, r *connect.Request[pb.CheckNetworkRequest]) (
	*connect.Response[pb.CheckNetworkResponse], error,
) {
	b := n.e.Change(r.Msg.GetId(), func(*pb.Sandbox) {})
	p, err := sandboxpb.ToPolicy("network", b.GetSpec().GetNetwork())
	if err != nil {
		return nil, err
	}
	if p, err = p.Validate(); err != nil {
		return nil, err
	}
	phase := b.GetNetworkPhase()
	if phase == "" {
		phase = p.Start
	}
	q := policy.Question{Name: r.Msg.GetHost(), Port: 443, Protocol: policy.TCP, Service: r.Msg.GetService()}
	if port := r.Msg.GetPort(); port > 0 {
		q.Port = uint16(port)
	}
	if r.Msg.GetProtocol() == pb.NetworkProtocol_NETWORK_PROTOCOL_UDP {
		q.Protocol = policy.UDP
	}
	if a, err := netip.ParseAddr(q.Name); err == nil {
		q.Name, q.Addr = "", a
	}
	v := policy.Evaluate(p, phase, q, nil)
	if v.Allow && r.Msg.GetPackage() != "" {
		w := p.World(phase)
		seen := w.Package(q.Service, r.Msg.GetPackage())
		if seen.Allow && r.Msg.GetVersion() != "" {
			seen = w.Version(q.Service, r.Msg.GetPackage(), r.Msg.GetVersion(), time.Time{})
		}
		if !seen.Allow {
			v = seen
		}
	}
	return connect.NewResponse(&pb.CheckNetworkResponse{Allowed: v.Allow, Rule: v.Rule, Phase: phase, Reason: v.Reason}), nil
}

// Log shows what Flow added, some events at a time.
func (n networks) Log(ctx context.Context, r *connect.Request[pb.NetworkLogRequest],
	down *connect.ServerStream[pb.NetworkLogResponse],
) error {
	const most = 3
	ctx, done := n.e.breakable(ctx)
	defer done()
	for next := r.Msg.GetFromSeq(); ; {
		// Asked first: what came before the end is told.
		over := sandboxpb.Over(n.e.Change(r.Msg.GetId(), func(*pb.Sandbox) {}).GetState())
		n.e.mu.Lock()
		f := n.e.flowsLocked(r.Msg.GetId())
		missing := max(0, f.gone-next)
		next += missing
		events := f.events[min(int64(len(f.events)), next-f.gone):]
		events, woken := events[:min(most, len(events))], f.woken
		n.e.mu.Unlock()
		next += int64(len(events))
		m := &pb.NetworkLogResponse{NextSeq: next, Missing: missing}
		for _, e := range events {
			if e.GetDenied() || !r.Msg.GetDenied() {
				m.Events = append(m.Events, e)
			}
		}
		if len(events) > 0 || missing > 0 {
			if err := down.Send(m); err != nil {
				return fmt.Errorf("send: %w", err)
			}
			continue
		}
		if !r.Msg.GetFollow() || over {
			return nil
		}
		select {
		case <-woken:
		case <-time.After(logPoll):
		case <-ctx.Done():
			return context.Cause(ctx)
		}
	}
}

// logPoll is how often a followed sandbox is asked whether it has ended.
const logPoll = 20 * time.Millisecond
