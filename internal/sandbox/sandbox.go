// Package sandbox is the pure model of a sandbox: what may be asked for (Spec), its name (ID), the one place where its
// state changes (Next), why it ended (Cause), and the digest of a request that an idempotency key stands for.
package sandbox

import (
	"time"

	"github.com/sandsea/sandsea/internal/policy"
)

// State is where a sandbox stands. Nothing leaves Ended.
type State string

// The states. Pausing, Paused and Resuming are walked by the pause calls.
const (
	Creating State = "creating"
	Running  State = "running"
	Pausing  State = "pausing"
	Paused   State = "paused"
	Resuming State = "resuming"
	Stopping State = "stopping"
	Ended    State = "ended"
)

// Cause says why a sandbox ended. infra_* is the platform's fault and never mixed with the task's own.
type Cause string

// The causes.
const (
	CauseCompleted        Cause = "completed"    // its entrypoint, or the one command of `sandsea run`, came to its end
	CauseStopped          Cause = "stopped"      // a call ended it
	CauseTTL              Cause = "ttl"          // hard end reached
	CauseIdle             Cause = "idle"         // idle limit reached
	CauseOOM              Cause = "oom"          // out of memory took PID 1 or everything
	CauseDisk             Cause = "disk"         // disk limit, where the policy is to end
	CausePids             Cause = "pids"         // process limit, where the policy is to end
	CauseOutputLimit      Cause = "output_limit" // a stream passed 256 GiB
	CausePolicy           Cause = "policy"
	CauseAgentDestroyed   Cause = "agent_destroyed"   // the workload broke its own sandbox
	CauseInfraKilled      Cause = "infra_killed"      // PID 1 got SIGKILL from outside
	CauseInfraInit        Cause = "infra_init"        // PID 1 crashed
	CauseInfraUnknown     Cause = "infra_unknown"     // the kernel cannot say
	CauseInfraOrphaned    Cause = "infra_orphaned"    // edge and keeper both died
	CauseInfraInterrupted Cause = "infra_interrupted" // the edge died during the create
	CauseInfraFenced      Cause = "infra_fenced"      // the node was fenced
	CauseInfraStart       Cause = "infra_start"       // the node could not build it
	CauseInfraLost        Cause = "infra_lost"        // gone with its node
)

// Infra reports whether the platform is at fault.
func (c Cause) Infra() bool { return len(c) > 6 && c[:6] == "infra_" }

// Limits are what a sandbox may use. In a validated Spec every field is set.
type Limits struct {
	Memory    int64 // bytes, swap included
	CPUMillis int64 // thousandths of a CPU
	Disk      int64 // bytes of the upper layer
	Pids      int64
	OpenFiles int64 // per process
	Output    int64 // bytes of recorded output kept
}

// The defaults and bounds of reliability.md section 8.
const (
	DefaultMemory    = 512 << 20
	MinMemory        = 16 << 20
	DefaultCPUMillis = 1000
	MinCPUMillis     = 10
	DefaultDisk      = 10 << 30
	MinDisk          = 16 << 20
	DefaultPids      = 4096
	MinPids          = 8
	DefaultOpenFiles = 65536
	DefaultOutput    = 64 << 20
	MinOutput        = 1 << 20
	DefaultTTL       = 24 * time.Hour
	MaxTTL           = 30 * 24 * time.Hour
	MaxLabels        = 64
	MaxLabelBytes    = 256
	MaxEnvBytes      = 2 << 20
	MaxKeyBytes      = 256
)

// EntrypointMode says what starts by itself.
type EntrypointMode string

// The modes.
const (
	EntrypointIdle  EntrypointMode = "idle"
	EntrypointImage EntrypointMode = "image"
	EntrypointArgv  EntrypointMode = "argv"
)

// Environment names what the root file system is made of: Image alone, or Base with the others above it.
type Environment struct {
	Image     string
	Base      string
	Workspace string
	Toolkits  []string
}

// Spec is what a create asks for. It is stored as JSON; fields are only ever added.
type Spec struct {
	Backend     string // "container"
	Class       string // "native"
	Environment Environment
	Limits      Limits
	Idle        time.Duration // 0: never
	TTL         time.Duration
	Network     policy.Policy
	User        string
	Env         map[string]string
	Workdir     string
	Labels      map[string]string
	Entrypoint  EntrypointMode
	Argv        []string
	NoNewPrivs  bool
	Require     []string
	Job         string
	Rollout     string
	Attempt     int
	ParentID    string
	ParentSeq   int64
}

// EventKind is what happened to a sandbox.
type EventKind string

// The events of this state machine.
const (
	EventStarted   EventKind = "started"    // the backend reports a ready instance
	EventStartFail EventKind = "start_fail" // the backend left nothing
	EventStop      EventKind = "stop"       // an intent to end it, with its cause
	EventGone      EventKind = "gone"       // the instance ended by itself, with the cause from evidence
	EventReleased  EventKind = "released"   // every resource is given back
	EventRecovered EventKind = "recovered"  // a restarted edge found it in this state
)

// Event is one thing that happened.
type Event struct {
	Kind   EventKind
	Cause  Cause
	Detail string
	By     string
	// Found says, for EventRecovered, whether the backend still has the instance.
	Found bool
}

// Action is what the caller performs after it has journaled the new state; each is idempotent and performed again after
// a restart.
type Action string

// The actions.
const (
	ActionUndo     Action = "undo"     // kill by name and take back whatever a half-made start left
	ActionKill     Action = "kill"     // TERM, grace, cgroup.kill, wait
	ActionRelease  Action = "release"  // give the resources back in reverse order
	ActionAdopt    Action = "adopt"    // take a recovered instance into service
	ActionAnnounce Action = "announce" // tell the roster, the followers and the store
)

// End says why and when a sandbox ended. The first intent wins: a later event does not change Cause.
type End struct {
	Cause  Cause
	Detail string
	By     string
}

// Status is State with the End that goes with Stopping and Ended.
type Status struct {
	State State
	End   End
}
