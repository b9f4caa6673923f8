package fakeedge

import (
	"context"
	"fmt"
	"io"
	"net"
	"net/http"
	"strconv"
	"sync"

	"connectrpc.com/connect"
	"google.golang.org/protobuf/proto"

	"github.com/sandsea/sandsea/api/errdefs"
	"github.com/sandsea/sandsea/api/errwire"
	pb "github.com/sandsea/sandsea/api/sandsea/v1"
	"github.com/sandsea/sandsea/api/sandsea/v1/sandseav1connect"
	"github.com/sandsea/sandsea/internal/sandbox"
	"github.com/sandsea/sandsea/internal/sandboxpb"
)

// Dial connects to a server that stands for one inside a sandbox.
type Dial func(ctx context.Context) (net.Conn, error)

// Inside makes a server the one at a port of a sandbox; nil takes it away.
func (e *Edge) Inside(id string, port int, d Dial) {
	e.mu.Lock()
	defer e.mu.Unlock()
	if d == nil {
		delete(e.inside, fmt.Sprint(id, ":", port))
		return
	}
	e.inside[fmt.Sprint(id, ":", port)] = d
}

// Flows adds events to a sandbox's flow log.
func (e *Edge) Flows(id string, events ...*pb.NetworkEvent) {
	e.mu.Lock()
	defer e.mu.Unlock()
	for _, ev := range events {
		ev = proto.CloneOf(ev)
		ev.Seq = int64(len(e.flows[id]))
		e.flows[id] = append(e.flows[id], ev)
	}
	close(e.woken)
	e.woken = make(chan struct{})
}

// HandleNetwork adds the network service and the tunnels to a node's door.
func (e *Edge) HandleNetwork(mux *http.ServeMux, opts ...connect.HandlerOption) {
	mux.Handle(sandseav1connect.NewNetworkServiceHandler(networks{e: e}, opts...))
	mux.HandleFunc("/node.v1.EdgeService/Tunnel", e.tunnel)
}

// networks keeps policies, and enforces none.
type networks struct {
	sandseav1connect.UnimplementedNetworkServiceHandler
	e *Edge
}

func (n networks) SetPolicy(ctx context.Context, r *connect.Request[pb.SetNetworkPolicyRequest],
) (*connect.Response[pb.SetNetworkPolicyResponse], error) {
	b, err := n.change(ctx, "set_policy", r.Msg.GetId(), r.Header(), func(b *pb.Sandbox) error {
		b.Spec.Network, b.NetworkPhase = r.Msg.GetPolicy(), r.Msg.GetPolicy().GetPhase()
		if phases := r.Msg.GetPolicy().GetPhases(); b.GetNetworkPhase() == "" && len(phases) > 0 {
			b.NetworkPhase = phases[0].GetName()
		}
		return nil
	})
	if err != nil {
		return nil, err
	}
	return connect.NewResponse(&pb.SetNetworkPolicyResponse{Sandbox: b}), nil
}

func (n networks) SetPhase(ctx context.Context, r *connect.Request[pb.SetNetworkPhaseRequest],
) (*connect.Response[pb.SetNetworkPhaseResponse], error) {
	b, err := n.change(ctx, "set_phase", r.Msg.GetId(), r.Header(), func(b *pb.Sandbox) error {
		for _, p := range b.GetSpec().GetNetwork().GetPhases() {
			if p.GetName() == r.Msg.GetPhase() {
				b.NetworkPhase = p.GetName()
				return nil
			}
		}
		return errdefs.New(errdefs.Invalid, "", "phase: its policy has none named %q", r.Msg.GetPhase()).WithField("phase", "")
	})
	if err != nil {
		return nil, err
	}
	return connect.NewResponse(&pb.SetNetworkPhaseResponse{Sandbox: b}), nil
}

func (n networks) change(ctx context.Context, call, id string, h http.Header, do func(*pb.Sandbox) error) (*pb.Sandbox, error) {
	if err := n.e.enter(ctx, call, h); err != nil {
		return nil, err
	}
	b, err := n.e.running(id, h)
	if err != nil {
		return nil, err
	}
	b = proto.CloneOf(b)
	if err := do(b); err != nil {
		return nil, err
	}
	n.e.mu.Lock()
	n.e.setLocked(b, "network_changed")
	n.e.mu.Unlock()
	return b, n.e.leave(call)
}

// Check knows package services only.
func (n networks) Check(_ context.Context, r *connect.Request[pb.CheckNetworkRequest],
) (*connect.Response[pb.CheckNetworkResponse], error) {
	b, err := n.e.find(r.Msg.GetId(), r.Header())
	if err != nil {
		return nil, err
	}
	allowed := b.GetSpec().GetNetwork().GetServices()[r.Msg.GetService()]
	out := &pb.CheckNetworkResponse{Allowed: allowed, Phase: b.GetNetworkPhase(), Rule: "default reject", Reason: "no rule allows it"}
	if allowed {
		out.Rule, out.Reason = r.Msg.GetService(), "the policy allows the service"
	}
	return connect.NewResponse(out), nil
}

func (n networks) Log(ctx context.Context, r *connect.Request[pb.NetworkLogRequest],
	down *connect.ServerStream[pb.NetworkLogResponse],
) error {
	if err := down.Send(nil); err != nil {
		return err
	}
	next := r.Msg.GetFromSeq()
	for {
		b, err := n.e.find(r.Msg.GetId(), r.Header())
		if err != nil {
			return err
		}
		n.e.mu.Lock()
		events := n.e.flows[r.Msg.GetId()]
		woken := n.e.woken
		n.e.mu.Unlock()
		m := &pb.NetworkLogResponse{NextSeq: int64(len(events))}
		for _, ev := range events[min(next, int64(len(events))):] {
			if ev.GetDenied() || !r.Msg.GetDenied() {
				m.Events = append(m.Events, ev)
			}
		}
		next = m.GetNextSeq()
		if len(m.GetEvents()) > 0 {
			if err := down.Send(m); err != nil {
				return err
			}
		}
		if !r.Msg.GetFollow() || sandboxpb.Over(b.GetState()) {
			return nil
		}
		select {
		case <-woken:
		case <-ctx.Done():
			return context.Cause(ctx)
		}
	}
}

// running gives a sandbox of the caller's projects that has not ended.
func (e *Edge) running(id string, h http.Header) (*pb.Sandbox, error) {
	b, err := e.find(id, h)
	if err == nil && sandboxpb.Over(b.GetState()) {
		over := errdefs.New(errdefs.FailedPrecondition, "sandbox "+sandbox.ID(id).Short(), "has ended")
		over.Cause = b.GetEnd().GetCause()
		return nil, over
	}
	return b, err
}

// tunnel keeps the contract of edge/nodeapi's: an upgrade to a line to a port, or a refusal as a unary call's.
func (e *Edge) tunnel(w http.ResponseWriter, r *http.Request) {
	if err := e.carry(w, r); err != nil {
		_ = connect.NewErrorWriter().Write(w, r, errwire.ToConnect(err))
	}
}

func (e *Edge) carry(w http.ResponseWriter, r *http.Request) error {
	id := r.URL.Query().Get("id")
	port, err := strconv.Atoi(r.URL.Query().Get("port"))
	if err != nil || r.Header.Get("Upgrade") != "sandsea-tunnel" {
		return errdefs.New(errdefs.Invalid, "", "no tunnel")
	}
	if err := e.enter(r.Context(), "tunnel", r.Header); err != nil {
		return err
	}
	if _, err := e.running(id, r.Header); err != nil {
		return err
	}
	e.mu.Lock()
	dial := e.inside[fmt.Sprint(id, ":", port)]
	e.mu.Unlock()
	if dial == nil {
		return errdefs.New(errdefs.Unavailable, "sandbox "+sandbox.ID(id).Short(), "nobody listens at port %d inside", port).
			WithField("port", "")
	}
	inside, err := dial(r.Context())
	if err != nil {
		return err
	}
	defer inside.Close()
	outside, buffered, err := http.NewResponseController(w).Hijack()
	if err != nil {
		return err
	}
	defer outside.Close()
	if _, err := io.WriteString(outside, "HTTP/1.1 101 Switching Protocols\r\nConnection: Upgrade\r\nUpgrade: sandsea-tunnel\r\n\r\n"); err != nil {
		return nil // nobody is there to hear of it
	}
	var wg sync.WaitGroup
	wg.Go(func() { copyHalf(inside, buffered, outside) })
	wg.Go(func() { copyHalf(outside, inside, inside) })
	wg.Wait()
	_ = e.leave("tunnel closed")
	return nil
}

// copyHalf copies one direction; its end is passed on, and when it breaks both ends are closed.
func copyHalf(dst net.Conn, src io.Reader, from net.Conn) {
	_, err := io.Copy(dst, src)
	half, ok := dst.(interface{ CloseWrite() error })
	if err != nil || !ok {
		_ = dst.Close()
		_ = from.Close()
		return
	}
	_ = half.CloseWrite()
}
