package client

import (
	"context"
	"errors"
	"slices"
	"syscall"

	"connectrpc.com/connect"

	"github.com/sandsea/sandsea/api/errdefs"
	sandseav1 "github.com/sandsea/sandsea/api/sandsea/v1"
)

// ShellSession is a handle on a shell session of a sandbox: its name, and the client to reach it. Working directory,
// variables, functions and options are kept from Run to Run; each Run is a process of its own.
type ShellSession struct {
	Name string
	// Opened is the session as it was opened; each answer of Run has it as it is then.
	Opened *sandseav1.Shell
	s      *Sandbox
}

// OpenShell opens a shell session. An empty request opens the image's bash, else its sh, as the sandbox's user; the
// id is filled in.
func (s *Sandbox) OpenShell(ctx context.Context, req *sandseav1.OpenShellRequest) (*ShellSession, error) {
	req.Id = s.ID
	res, err := s.c.Processes.OpenShell(ctx, connect.NewRequest(req))
	if err != nil {
		return nil, err
	}
	shell := res.Msg.GetShell()
	return &ShellSession{Name: shell.GetName(), Opened: shell, s: s}, nil
}

// ShellSession gives the handle for the name of an open session. It asks nobody.
func (s *Sandbox) ShellSession(name string) *ShellSession {
	return &ShellSession{Name: name, Opened: &sandseav1.Shell{Name: name}, s: s}
}

// Run runs a piece of shell script to its end. A script that fails, and one that cannot be parsed, is a result. When
// ctx ends first, the command's whole tree is killed; the session stays.
func (h *ShellSession) Run(ctx context.Context, script string) (*sandseav1.RunInShellResponse, error) {
	return h.RunRequest(ctx, &sandseav1.RunInShellRequest{Script: script})
}

// RunRequest is Run with all that a request can say; id and shell are filled in.
func (h *ShellSession) RunRequest(ctx context.Context, req *sandseav1.RunInShellRequest,
) (*sandseav1.RunInShellResponse, error) {
	req.Id, req.Shell = h.s.ID, h.Name
	res, err := h.s.c.Processes.RunInShell(ctx, connect.NewRequest(req))
	if err != nil {
		return nil, err
	}
	return res.Msg, nil
}

// Interrupt sends SIGINT to the whole tree of the command that runs in the session, as Ctrl-C does. NotFound when none
// runs.
func (h *ShellSession) Interrupt(ctx context.Context) error {
	all, err := h.s.Processes(ctx)
	if err != nil {
		return err
	}
	for _, p := range slices.Backward(all) {
		if p.GetShell() == h.Name && p.GetState() == sandseav1.ProcessState_PROCESS_STATE_RUNNING {
			err := h.s.Signal(ctx, p.GetNumber(), int(syscall.SIGINT), true)
			if !errors.Is(err, errdefs.FailedPrecondition) { // else it has just ended
				return err
			}
			break
		}
	}
	return errdefs.New(errdefs.NotFound, "shell session "+h.Name, "runs nothing")
}

// Close forgets the session and kills the command that runs in it; one that is closed already is no error.
func (h *ShellSession) Close(ctx context.Context) error {
	_, err := h.s.c.Processes.CloseShell(ctx,
		connect.NewRequest(&sandseav1.CloseShellRequest{Id: h.s.ID, Shell: h.Name}))
	return err
}
