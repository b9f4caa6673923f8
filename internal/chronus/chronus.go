// Package chronus is the contract of the line to the inside of one sandbox: to sandsea-init in a container, later to
// the guest agent of a VM. Sub-packages: wire (messages and the client of sandsea-init), sessions (numbers, keys, the
// life of commands), files (file calls), follow (readers of recorded output).
package chronus

import (
	"context"
	"fmt"
	"iter"
	"os"
	"syscall"
	"time"
)

// IDs are the numeric rights that a command or a file helper acts with, as numbers inside the sandbox.
type IDs struct {
	UID    uint32
	GID    uint32
	Groups []uint32
}

// Spawn is one command. Everything is resolved: no names, no defaults.
type Spawn struct {
	Number int64 // cookie, never reused in its sandbox
	Argv   []string
	Env    []string
	Cwd    string
	IDs    IDs
	Umask  uint32
}

// Stdio are the descriptors of a command. Cgroup is its own v2 cgroup directory. A nil Err sends standard error to Out.
// The callee does not keep or close them.
type Stdio struct {
	Cgroup *os.File
	In     *os.File
	Out    *os.File
	Err    *os.File
	// TTY says that In is a terminal of OpenPTY's, which becomes the command's controlling one. Out is the same then, and
	// Err nil.
	TTY bool
	// StateIn and StateOut, both or none, are what a command of a shell session finds at the descriptors StateIn and
	// StateOut.
	StateIn  *os.File
	StateOut *os.File
}

// StateIn and StateOut are the numbers of a command's descriptors for the state of a shell session: above what scripts
// use, below 255, which is bash's own.
const (
	StateIn  = 250
	StateOut = 251
)

// Step names where a start failed.
type Step string

// The steps of a start, in their order.
const (
	StepFork   Step = "fork"
	StepStdio  Step = "stdio"
	StepCgroup Step = "cgroup"
	StepCwd    Step = "cwd"
	StepUser   Step = "user"
	StepFilter Step = "filter"
	StepExec   Step = "exec"
	// StepTerminal is of OpenPTY and of a Spawn with Stdio.TTY.
	StepTerminal Step = "terminal"
)

// StartError says why a command never ran.
type StartError struct {
	Step  Step
	Errno syscall.Errno
	// Interpreter is set for an exec that failed since the script's interpreter or the dynamic loader is missing.
	Interpreter bool
}

func (e *StartError) Error() string { return fmt.Sprintf("start: %s: %v", e.Step, e.Errno) }

// Process is what the inside knows of a command.
type Process struct {
	Number int64
	Pid    int // inside
	Exited bool
	Exit   Exit
}

// Exit is how a command ended. It is reported again after every Hello until it is acknowledged.
type Exit struct {
	Number int64
	Status syscall.WaitStatus
	CPU    time.Duration // user + system of the process and the children that it waited for
	MaxRSS int64         // bytes
	Wall   time.Duration // by the inside's monotonic clock, from start to end
	// Failed says that the command never ran. Only for one that Hello listed while it was still starting; whoever calls
	// Spawn gets the error from there.
	Failed *StartError
}

// InForce is what the inside reports as applied; less than what was asked for is a failed start.
type InForce struct {
	Version    uint32
	Seccomp    bool
	Caps       uint64 // bounding set
	UserNS     bool
	NoNewPrivs bool
	Masks      int // masked and read-only paths
	OpenFiles  int64
	Terminals  bool // it knows OpenPTY and Stdio.TTY
	Shells     bool // it knows Stdio.StateIn and StateOut
}

// Channel is the line to one sandbox. The peer is not trusted: a message of the wrong size, kind or cookie ends the line
// with an error, and the caller ends the sandbox. Spawn of a known number answers its state and starts nothing. All
// methods may be called at once; each takes the limit of its ctx.
type Channel interface {
	// Hello greets; the answer lists live processes and exits that nobody acknowledged. Once per connection.
	Hello(ctx context.Context) (InForce, []Process, error)
	// Spawn returns when the command runs (its exec succeeded), with its pid inside, or a *StartError.
	Spawn(ctx context.Context, s Spawn, io Stdio) (pid int, err error)
	// OpenPTY makes a terminal among the sandbox's own and returns its master, non-blocking and checked to be one; the
	// caller owns it. *StartError when the sandbox has no room for another. FailedPrecondition when its inside is of a
	// version that knows no terminals.
	OpenPTY(ctx context.Context) (*os.File, error)
	// ServeFiles forks a file helper with these rights and returns the caller's end of its socket.
	ServeFiles(ctx context.Context, ids IDs) (*os.File, error)
	// Signal sends a signal to the command's first process; NotFound after its end.
	Signal(ctx context.Context, number int64, sig syscall.Signal) error
	// Exits yields ends until the line closes; the last pair carries why it closed. One consumer.
	Exits() iter.Seq2[Exit, error]
	// Ack forgets an exit inside.
	Ack(number int64) error
	Close() error
}
