// Package backend is the contract of what runs sandboxes of one kind of isolation. Implementations: container/native,
// fake (tests). The suite in backend/conform runs over each of them.
package backend

import (
	"context"
	"net"
	"net/netip"
	"os"
	"time"

	"github.com/sandsea/sandsea/internal/chronus"
	"github.com/sandsea/sandsea/internal/layers/plan"
	"github.com/sandsea/sandsea/internal/node"
	"github.com/sandsea/sandsea/internal/policy"
	"github.com/sandsea/sandsea/internal/sandbox"
)

// Handle is what a backend needs to find an instance again: opaque, versioned JSON that the caller journals.
type Handle []byte

// Exit is how an instance ended, by evidence in the order of walks A6; the caller's own intents come before it.
type Exit struct {
	Cause  sandbox.Cause
	Detail string
}

// Usage is what an instance uses now.
type Usage struct {
	Memory     int64
	MemoryPeak int64
	CPU        time.Duration
	Pids       int64
	Disk       int64
}

// Backend runs sandboxes of one isolation class on this node.
//
// Order of calls: Probe; Recover once per journaled Handle; Sweep; the rest. Calls for one sandbox never overlap, calls
// for different ones do. Start leaves a ready Instance or nothing; what a crash leaves bears the id in its name and
// Sweep finds it. Recover starts nothing: errdefs.NotFound if the instance is gone. One whose PID 1 died while no edge
// was there may be found still: it is done, and tells the evidence.
type Backend interface {
	Probe(ctx context.Context) (node.Capabilities, error)
	// Start builds the sandbox and returns when commands and files work.
	Start(ctx context.Context, s Spec) (Instance, error)
	Recover(ctx context.Context, id sandbox.ID, h Handle) (Instance, error)
	// Sweep removes every trace of sandboxes for which keep is false, whoever left them.
	Sweep(ctx context.Context, keep func(sandbox.ID) bool) error
	Close() error
}

// Spec is what Start builds.
type Spec struct {
	ID     sandbox.ID
	Plan   plan.Plan
	Limits sandbox.Limits
	// Hard is the hard end, for the keeper.
	Hard time.Time
	// Linked, if set, is called once as soon as a sandbox whose plan has a network has its link, while the rest is being
	// made, so that its walls can be set meanwhile. It must not block. After an error of Start that link is dead.
	Linked func(Link)
}

// Exec are the kernel objects that one command needs beside its pipes.
type Exec interface {
	// Stdio with only Cgroup set; the caller adds the streams.
	Stdio() chronus.Stdio
	// Kill ends every process of the command's tree, at once and surely.
	Kill() error
	// KillFile is the open cgroup.kill for the keeper; it stays the Exec's.
	KillFile() *os.File
	// Signal sends to every process of the tree.
	Signal(sig int) error
	// CPU is the time that the tree has used.
	CPU() (time.Duration, error)
	// Pids lists host pids of the tree.
	Pids() ([]int, error)
	// Remove gives the objects back; processes that are left stay in the sandbox.
	Remove() error
}

// Link is a sandbox's way to the gate, where Aether is and nothing else.
type Link interface {
	// Addr is the sandbox's address there.
	Addr() netip.Addr
	// Set puts the kernel's walls in force; until the first call they are closed.
	Set(w policy.Walls) error
}

// Instance is one running sandbox.
type Instance interface {
	// Handle changes with Update and with the first Link.
	Handle() Handle
	// Channel of an instance from Start has been greeted, and nothing runs. After Recover the caller greets: Hello then
	// lists what lives and what ended unacknowledged.
	Channel() chronus.Channel
	// UIDBase is the host id of root inside.
	UIDBase() uint32
	// Enforcement names the mechanism of each limit and feature in force.
	Enforcement() map[string]string
	// NewExec makes what command number needs, or finds it again after a restart.
	NewExec(ctx context.Context, number int64) (Exec, error)
	// OOMKills counts kills by the out-of-memory killer so far.
	OOMKills() (int64, error)
	Usage(ctx context.Context) (Usage, error)
	// Link gives the sandbox's link, which is made now if the plan had none. FailedPrecondition where the node has no
	// gate.
	Link(ctx context.Context) (Link, error)
	// Dial connects to a TCP server inside, at its loopback address or that of its link; Unavailable when nobody listens
	// there.
	Dial(ctx context.Context, port uint16) (net.Conn, error)
	// Update changes limits in place.
	Update(ctx context.Context, l sandbox.Limits) error
	// Stop sends TERM to what runs, waits grace, kills all, waits until no process is left and gives every resource
	// back. Idempotent.
	Stop(ctx context.Context, grace time.Duration) (Exit, error)
	// Done is closed when PID 1 is gone or the line to it broke, for whatever reason; Exit then tells the evidence.
	Done() <-chan struct{}
	Exit() Exit
}
