package client

import (
	"context"

	"connectrpc.com/connect"

	sandseav1 "github.com/sandsea/sandsea/api/sandsea/v1"
)

// Terminal is a terminal of so many characters, 1 to 65535 each, for StartRequest.Terminal: the command then runs on
// it. All output is stdout, input goes there by SendInput, and CloseInput is refused: send the byte 4 (Ctrl-D), as a
// keyboard does, or 3 (Ctrl-C) to interrupt what is in the foreground.
func Terminal(columns, rows uint32) *sandseav1.TerminalSize {
	return &sandseav1.TerminalSize{Columns: columns, Rows: rows}
}

// Resize sets the size of a process's terminal; its foreground group gets SIGWINCH if the size is another one. The last
// call wins. FailedPrecondition for a process without a terminal and for one that ended.
func (s *Sandbox) Resize(ctx context.Context, number int64, size *sandseav1.TerminalSize) error {
	_, err := s.c.Processes.ResizeTTY(ctx,
		connect.NewRequest(&sandseav1.ResizeTTYRequest{Id: s.ID, Number: number, Size: size}))
	return err
}
