package nodeapi

import (
	"context"

	"connectrpc.com/connect"

	sandseav1 "github.com/sandsea/sandsea/api/sandsea/v1"
	"github.com/sandsea/sandsea/internal/chronus/follow"
	"github.com/sandsea/sandsea/internal/chronus/sessions"
	"github.com/sandsea/sandsea/internal/edge/runner"
)

// processService implements sandsea.v1.ProcessService.
type processService struct{ s *Server }

// opened begins a unary call for a sandbox.
func opened[T any](s *Server, r *connect.Request[T], id string) (*runner.Use, error) {
	return s.open(r.Spec().Procedure, r.Header(), id)
}

func (p processService) Run(ctx context.Context, r *connect.Request[sandseav1.RunRequest],
) (*connect.Response[sandseav1.RunResponse], error) {
	u, err := opened(p.s, r, r.Msg.GetId())
	if err != nil {
		return nil, err
	}
	defer u.Done()
	m := r.Msg
	a, err := u.Commands.Run(ctx, sessions.Start{
		Command: fromCommand(m.GetCommand()), Key: m.GetKey(), Note: m.GetNote(), Input: m.Stdin,
	}, m.GetMaxOutputBytes())
	if err != nil {
		return nil, u.Because(ctx, err)
	}
	return connect.NewResponse(toAnswer(a)), nil
}

func toAnswer(a sessions.Answer) *sandseav1.RunResponse {
	out := &sandseav1.RunResponse{Number: a.Number, Result: toResult(a.Result)}
	out.Result.Replayed = a.Replayed
	out.Stdout, out.StdoutGapBytes, out.StdoutGapAt = inline(a.Stdout)
	out.Stderr, out.StderrGapBytes, out.StderrGapAt = inline(a.Stderr)
	return out
}

// inline is a stream as an answer carries it.
func inline(in follow.Inline) (data []byte, gap, gapAt int64) {
	if in.Gap == 0 {
		return in.Head, 0, 0
	}
	return append(in.Head, in.Tail...), in.Gap, int64(len(in.Head))
}

func (p processService) Start(ctx context.Context, r *connect.Request[sandseav1.StartRequest],
	st *connect.ServerStream[sandseav1.StartResponse],
) error {
	u, err := opened(p.s, r, r.Msg.GetId())
	if err != nil {
		return err
	}
	defer u.Done()
	m := r.Msg
	start := sessions.Start{
		Command: fromCommand(m.GetCommand()), Key: m.GetKey(), Note: m.GetNote(), Stream: m.GetStdin(),
		Lossless: m.GetLossless(), Terminal: fromTerminal(m.GetTerminal()),
	}
	for e, err := range u.Commands.Start(ctx, start, m.GetDetached()) {
		if err != nil {
			return u.Because(ctx, err)
		}
		if err := st.Send(&sandseav1.StartResponse{Event: toEvent(e)}); err != nil {
			return err
		}
	}
	return nil
}

func (p processService) Attach(ctx context.Context, r *connect.Request[sandseav1.AttachRequest],
	st *connect.ServerStream[sandseav1.AttachResponse],
) error {
	u, err := opened(p.s, r, r.Msg.GetId())
	if err != nil {
		return err
	}
	defer u.Done()
	m := r.Msg
	at := sessions.From{
		Stdout: m.GetStdoutOffset(), Stderr: m.GetStderrOffset(), NoFollow: m.GetNoFollow(), Lossless: m.GetLossless(),
	}
	for e, err := range u.Commands.Attach(ctx, m.GetNumber(), at) {
		if err != nil {
			return err
		}
		if err := st.Send(&sandseav1.AttachResponse{Event: toEvent(e)}); err != nil {
			return err
		}
	}
	return nil
}

func (p processService) SendInput(ctx context.Context, r *connect.Request[sandseav1.SendInputRequest],
) (*connect.Response[sandseav1.SendInputResponse], error) {
	u, err := opened(p.s, r, r.Msg.GetId())
	if err != nil {
		return nil, err
	}
	defer u.Done()
	next, err := u.Commands.SendInput(ctx, r.Msg.GetNumber(), r.Msg.GetOffset(), r.Msg.GetData())
	if err != nil {
		return nil, err
	}
	return connect.NewResponse(&sandseav1.SendInputResponse{NextOffset: next}), nil
}

func (p processService) CloseInput(ctx context.Context, r *connect.Request[sandseav1.CloseInputRequest],
) (*connect.Response[sandseav1.CloseInputResponse], error) {
	u, err := opened(p.s, r, r.Msg.GetId())
	if err != nil {
		return nil, err
	}
	defer u.Done()
	if err := u.Commands.CloseInput(ctx, r.Msg.GetNumber()); err != nil {
		return nil, err
	}
	return connect.NewResponse(&sandseav1.CloseInputResponse{}), nil
}

func (p processService) Signal(ctx context.Context, r *connect.Request[sandseav1.SignalRequest],
) (*connect.Response[sandseav1.SignalResponse], error) {
	u, err := opened(p.s, r, r.Msg.GetId())
	if err != nil {
		return nil, err
	}
	defer u.Done()
	if err := u.Commands.Signal(ctx, r.Msg.GetNumber(), int(r.Msg.GetSignal()), r.Msg.GetTree()); err != nil {
		return nil, err
	}
	return connect.NewResponse(&sandseav1.SignalResponse{}), nil
}

func (p processService) List(_ context.Context, r *connect.Request[sandseav1.ListProcessesRequest],
) (*connect.Response[sandseav1.ListProcessesResponse], error) {
	u, err := opened(p.s, r, r.Msg.GetId())
	if err != nil {
		return nil, err
	}
	defer u.Done()
	out := &sandseav1.ListProcessesResponse{}
	for _, i := range u.Commands.List() {
		out.Processes = append(out.Processes, toProcess(i))
	}
	return connect.NewResponse(out), nil
}
