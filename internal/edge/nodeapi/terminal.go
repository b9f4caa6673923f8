package nodeapi

import (
	"context"

	"connectrpc.com/connect"

	sandseav1 "github.com/sandsea/sandsea/api/sandsea/v1"
	"github.com/sandsea/sandsea/internal/chronus/sessions"
)

func (p processService) ResizeTTY(ctx context.Context, r *connect.Request[sandseav1.ResizeTTYRequest],
) (*connect.Response[sandseav1.ResizeTTYResponse], error) {
	u, err := opened(p.s, r, r.Msg.GetId())
	if err != nil {
		return nil, err
	}
	defer u.Done()
	size := r.Msg.GetSize()
	err = u.Commands.Resize(ctx, r.Msg.GetNumber(),
		sessions.TerminalSize{Columns: size.GetColumns(), Rows: size.GetRows()})
	if err != nil {
		return nil, err
	}
	return connect.NewResponse(&sandseav1.ResizeTTYResponse{}), nil
}

// fromTerminal is nil where no terminal is asked for.
func fromTerminal(m *sandseav1.TerminalSize) *sessions.TerminalSize {
	if m == nil {
		return nil
	}
	return &sessions.TerminalSize{Columns: m.GetColumns(), Rows: m.GetRows()}
}

func toTerminal(s *sessions.TerminalSize) *sandseav1.TerminalSize {
	if s == nil {
		return nil
	}
	return &sandseav1.TerminalSize{Columns: s.Columns, Rows: s.Rows}
}
