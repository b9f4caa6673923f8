package client

import (
	"context"
	"iter"
	"time"

	"connectrpc.com/connect"

	sandseav1 "github.com/sandsea/sandsea/api/sandsea/v1"
)

// SetPolicy replaces what may leave the sandbox. When it returns the new policy is in force, in the phase that it names or
// else its first; connections that it does not allow are cut within two seconds. After an error the old one holds.
func (s *Sandbox) SetPolicy(ctx context.Context, p *sandseav1.NetworkPolicy) (*sandseav1.Sandbox, error) {
	res, err := s.c.Network.SetPolicy(ctx, connect.NewRequest(&sandseav1.SetNetworkPolicyRequest{Id: s.ID, Policy: p}))
	if err != nil {
		return nil, err
	}
	return res.Msg.GetSandbox(), nil
}

// SetPhase puts another phase of the sandbox's policy in force, likewise.
func (s *Sandbox) SetPhase(ctx context.Context, phase string) (*sandseav1.Sandbox, error) {
	res, err := s.c.Network.SetPhase(ctx, connect.NewRequest(&sandseav1.SetNetworkPhaseRequest{Id: s.ID, Phase: phase}))
	if err != nil {
		return nil, err
	}
	return res.Msg.GetSandbox(), nil
}

// Check says what the policy in force answers to a question; the id is filled in. Nothing is sent anywhere, and that
// something is rejected is an answer, no error.
func (s *Sandbox) Check(ctx context.Context, q *sandseav1.CheckNetworkRequest) (*sandseav1.CheckNetworkResponse, error) {
	res, err := s.c.Network.Check(ctx, connect.NewRequest(&sandseav1.CheckNetworkRequest{
		Id: s.ID, Host: q.GetHost(), Port: q.GetPort(), Protocol: q.GetProtocol(), Service: q.GetService(),
		Package: q.GetPackage(), Version: q.GetVersion(),
	}))
	if err != nil {
		return nil, err
	}
	return res.Msg, nil
}

// Log yields the sandbox's flow log in order, some events at a time; the id is filled in. It ends with what there is, or,
// when it follows, with the sandbox. Each answer says where to go on when the connection breaks. A sandbox that has ended
// can be asked for as long as its output is kept.
func (s *Sandbox) Log(ctx context.Context, req *sandseav1.NetworkLogRequest) iter.Seq2[*sandseav1.NetworkLogResponse, error] {
	return messages(ctx, s.c.Network.Log, &sandseav1.NetworkLogRequest{
		Id: s.ID, FromSeq: req.GetFromSeq(), Follow: req.GetFollow(), Denied: req.GetDenied(),
	})
}

// Endpoint gives the address at which a TCP server inside is reached, with the headers that every request needs. It holds
// for ttl, rounded up to milliseconds; 0 is the rest of the sandbox's life.
func (s *Sandbox) Endpoint(ctx context.Context, port int, ttl time.Duration) (*sandseav1.EndpointResponse, error) {
	ms := ttl.Milliseconds()
	if ttl%time.Millisecond > 0 {
		ms++ // never 0
	}
	res, err := s.c.Network.Endpoint(ctx, connect.NewRequest(&sandseav1.EndpointRequest{
		Id: s.ID, Port: int32(port), TtlMs: ms,
	}))
	if err != nil {
		return nil, err
	}
	return res.Msg, nil
}
