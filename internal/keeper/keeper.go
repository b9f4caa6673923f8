// Package keeper is the second holder of every descriptor of a node that cannot be made again, and the recorder of what
// commands write.
//
// The keeper is a process of its own (`sandsea keeper`) that outlives the edge. It holds control sockets, pidfds,
// standard streams and cgroup.kill descriptors; splices output into record files; and writes to cgroup.kill when a
// deadline comes, edge alive or not. It decides nothing else and never reads a control socket. The edge reaches it
// over a SOCK_SEQPACKET unix socket at DIR/run/keeper.sock; both ends check the peer's uid 0 and the data directory's
// id.
//
// When the keeper dies, the edge starts another and sends every descriptor and deadline again; children wait
// milliseconds. When the edge dies, its successor takes them all from Roster.
package keeper

import (
	"context"
	"iter"
	"os"
	"time"

	"github.com/sandsea/sandsea/internal/record"
)

// Key names a command, or with Number 0 the sandbox itself.
type Key struct {
	Sandbox string
	Number  int64
}

// Sandbox is what is held for a sandbox.
type Sandbox struct {
	ID      string
	Control *os.File // the outside end of the control socket
	Pidfd   *os.File // of PID 1
	Kill    *os.File // cgroup.kill of the sandbox's v2 cgroup, open for writing
	// Hard is when the sandbox is killed, in wall time; zero: never.
	Hard time.Time
	// Budget bounds the bytes kept of all its streams together, released ones included; 0: none. Each stream keeps at
	// least record.FloorCaps.
	Budget int64
	// Suspended: the clocks of its commands stand still, as after Suspend.
	Suspended bool
}

// Stream is one recorded stream.
type Stream struct {
	Stream record.Stream
	Pipe   *os.File // read end
	File   *os.File // the record, open for reading and writing; recording goes on at its size
	// Terminal is the non-blocking master of the terminal whose output this is, nil for a pipe's. The keeper moves it
	// through Pipe, of which Feed is the write end that only the two holders have. The stream ends when nobody has the
	// other end of the terminal open. FailedPrecondition from a keeper of a version that knows no terminals.
	Terminal *os.File
	Feed     *os.File
	// Pins are never punched, see Pinner.
	Pins []record.Range
}

// Exec is what is held and recorded for one command.
type Exec struct {
	Key     Key
	Streams []Stream
	Caps    record.Caps
	// Stdin is the write end, nil when there is none. A command of a shell session has the file of its state held here.
	Stdin *os.File
	Kill  *os.File // cgroup.kill of the command's cgroup
	// Remaining is the active time until the command's tree is killed; 0: never.
	Remaining time.Duration
	// Settled is how many bytes the records of the sandbox's released commands hold by now; they count towards its budget.
	Settled int64
}

// Held is one entry of the roster, with descriptors that the receiver owns. Exactly one of Sandbox and Exec is set.
type Held struct {
	Sandbox *Sandbox
	Exec    *Exec
	// Fired says that the deadline came and the kill was written.
	Fired bool
	// Closed lists the streams that reached their end.
	Closed []record.Stream
}

// EventKind is what the keeper tells.
type EventKind string

// The events.
const (
	// Closed: a stream reached end of file, all of it is in its record.
	Closed EventKind = "closed"
	// Fired: a deadline came; the kill was written after the event was kept.
	Fired EventKind = "fired"
	// Died: PID 1 of a sandbox is gone.
	Died EventKind = "died"
	// Overflow: a stream passed record.MaxStream; the sandbox was killed.
	Overflow EventKind = "overflow"
)

// Event is repeated on every new connection until it is acknowledged.
type Event struct {
	Seq    uint64
	Kind   EventKind
	Key    Key
	Stream record.Stream
	// Size of the stream, for Closed.
	Size int64
}

// Client is the edge's end. Hold and Record return when the descriptors are kept: start nothing before. Repeats with
// the same key are no-ops. The files given stay the caller's. After a broken connection every call is
// errdefs.Unavailable; the edge starts another keeper, connects again and repeats all Holds and Records.
type Client interface {
	Hold(ctx context.Context, s Sandbox) error
	Record(ctx context.Context, e Exec) error
	// Rearm sets a deadline anew: Hard of a sandbox (wall), Remaining of a command (active). Zero disarms.
	Rearm(ctx context.Context, k Key, hard time.Time, remaining time.Duration) error
	// Suspend stops the clocks of a paused sandbox's commands, Continue lets them go on.
	Suspend(ctx context.Context, sandbox string) error
	Continue(ctx context.Context, sandbox string) error
	// Retain keeps a stream from this offset on for a lossless reader; negative lifts it.
	Retain(ctx context.Context, k Key, s record.Stream, from int64) error
	// CloseInput closes the keeper's duplicate of a command's standard input.
	CloseInput(ctx context.Context, k Key) error
	// Release forgets a command, or with Number 0 the sandbox and all its commands. Idempotent.
	Release(ctx context.Context, k Key) error
	// Roster yields everything held.
	Roster(ctx context.Context) ([]Held, error)
	// Events yields events until the connection ends; the last pair carries why. One consumer.
	Events() iter.Seq2[Event, error]
	Ack(seq uint64) error
	Close() error
}

// Pinner is what a Client can do beside: Pin keeps a range of a stream from being punched, so that the range that a
// finished command's answer names stays readable while a child of the command writes on. Ranges add up; they end with
// the command's Release, and a Record for a new keeper brings them along in Stream.Pins.
type Pinner interface {
	Pin(ctx context.Context, k Key, s record.Stream, r record.Range) error
}
