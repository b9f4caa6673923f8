package client

import (
	"context"
	"iter"

	"connectrpc.com/connect"

	sandseav1 "github.com/sandsea/sandsea/api/sandsea/v1"
)

// Shell is a command line for the image's /bin/sh.
func Shell(line string) *sandseav1.Command {
	return &sandseav1.Command{Argv: []string{"/bin/sh", "-c", line}}
}

// Argv is a command without a shell.
func Argv(argv ...string) *sandseav1.Command { return &sandseav1.Command{Argv: argv} }

// Run runs a command to its end. When ctx ends first, the command's whole tree is killed.
func (s *Sandbox) Run(ctx context.Context, cmd *sandseav1.Command) (*sandseav1.RunResponse, error) {
	return s.RunRequest(ctx, &sandseav1.RunRequest{Command: cmd})
}

// RunRequest is Run with all that a request can say; the id is filled in. Input may be of any size: what one message does
// not hold is sent in pieces.
func (s *Sandbox) RunRequest(ctx context.Context, req *sandseav1.RunRequest) (*sandseav1.RunResponse, error) {
	req.Id = s.ID
	if len(req.GetStdin()) > inputPiece {
		return s.runLarge(ctx, req)
	}
	res, err := s.c.Processes.Run(ctx, connect.NewRequest(req))
	if err != nil {
		return nil, err
	}
	return res.Msg, nil
}

// Start starts a command and yields its story: started, output, exited. Leaving the loop early ends the stream, and
// with it the command unless the request is detached or has a key. A stream that breaks is an error, never an end of
// the process; Follow takes it up again.
func (s *Sandbox) Start(ctx context.Context, req *sandseav1.StartRequest) iter.Seq2[*sandseav1.ProcessEvent, error] {
	req.Id = s.ID
	return told(messages(ctx, s.c.Processes.Start, req), req.GetDetached())
}

// Attach yields the record of a process from byte offsets, while it runs and after its end. Rejoin does the same over
// connections that break.
func (s *Sandbox) Attach(ctx context.Context, req *sandseav1.AttachRequest) iter.Seq2[*sandseav1.ProcessEvent, error] {
	req.Id = s.ID
	return told(messages(ctx, s.c.Processes.Attach, req), req.GetNoFollow())
}

// SendInput writes to a process's standard input at an offset and returns where the next byte goes. Bytes that were
// taken before are dropped, so that a call may be repeated.
func (s *Sandbox) SendInput(ctx context.Context, number, offset int64, data []byte) (int64, error) {
	res, err := s.c.Processes.SendInput(ctx,
		connect.NewRequest(&sandseav1.SendInputRequest{Id: s.ID, Number: number, Offset: offset, Data: data}))
	if err != nil {
		return offset, err
	}
	return res.Msg.GetNextOffset(), nil
}

// CloseInput ends a process's standard input.
func (s *Sandbox) CloseInput(ctx context.Context, number int64) error {
	_, err := s.c.Processes.CloseInput(ctx, connect.NewRequest(&sandseav1.CloseInputRequest{Id: s.ID, Number: number}))
	return err
}

// Signal sends a signal to a process, or to its whole tree.
func (s *Sandbox) Signal(ctx context.Context, number int64, signal int, tree bool) error {
	_, err := s.c.Processes.Signal(ctx,
		connect.NewRequest(&sandseav1.SignalRequest{Id: s.ID, Number: number, Signal: int32(signal), Tree: tree}))
	return err
}

// Processes lists what calls have started in the sandbox.
func (s *Sandbox) Processes(ctx context.Context) ([]*sandseav1.Process, error) {
	res, err := s.c.Processes.List(ctx, connect.NewRequest(&sandseav1.ListProcessesRequest{Id: s.ID}))
	if err != nil {
		return nil, err
	}
	return res.Msg.GetProcesses(), nil
}
