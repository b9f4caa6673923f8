// Package node is the pure model of a machine that runs sandboxes: its number, what it can enforce, what it has room
// for, and the view of all of them that placement reads. Nothing here touches the machine.
package node

import (
	"slices"
	"time"
)

// Number is a node's permanent number, given by the store and kept in the node's data directory. 20 bits, never 0.
type Number uint32

// MaxNumber is the largest number that an id can carry.
const MaxNumber Number = 1<<20 - 1

// Registration is a node's own record in the store, written by its edge under a lease and read by every server.
type Registration struct {
	Number  Number `json:"number"`
	Name    string `json:"name"`
	Address string `json:"address"`
	Epoch   int64  `json:"epoch"`
	Boot    string `json:"boot"`
	Machine string `json:"machine"`
	DataID  string `json:"data_id"`
}

// Status tells how well a feature holds.
type Status string

// What a probe can find. A feature is probed by trying it, never by comparing versions.
const (
	// OK: enforced by the best mechanism.
	OK Status = "ok"
	// Slower: enforced by a way that costs more.
	Slower Status = "slower"
	// Missing: not enforced; requests that need it are refused.
	Missing Status = "missing"
	// Unsure: the probe could not tell; treated as missing.
	Unsure Status = "unknown"
)

// The features that the container backend promises; each one Missing or Unsure makes the backend refuse what needs it.
const (
	FeatureMemory    = "limit.memory"
	FeatureCPU       = "limit.cpu"
	FeaturePids      = "limit.pids"
	FeatureDisk      = "limit.disk"
	FeatureOpenFiles = "limit.open_files"
	FeatureOutput    = "limit.output"
	FeatureKill      = "kill"         // kill a tree at once: cgroup.kill
	FeatureUserNS    = "userns"       // own 65,536-id range, id-mapped layers
	FeatureSeccomp   = "seccomp"      // system-call filter in every command
	FeatureLayers    = "layers"       // EROFS file-backed, overlayfs by descriptor
	FeatureNetwork   = "network"      // own empty network namespace
	FeatureEgress    = "egress"       // network policies: links to the gate, walls of the kernel, Aether
	FeatureDebian    = "image.debian" // import from Debian packages
	FeatureExitFacts = "exit_facts"   // exit status of a process that others reaped
)

// Feature is one thing that a node enforces or offers.
type Feature struct {
	Name      string
	Status    Status
	Mechanism string // how, as "cgroup v1 memory.limit_in_bytes"
	Fix       string // what to do when it is missing
	// Optional features do not count against the promise of the backend.
	Optional bool
}

// Capabilities is everything that a node found by trying.
type Capabilities struct {
	Kernel   string
	CPUs     int
	Memory   int64  // bytes
	Cgroup   string // "v2", "v1", "hybrid"
	NoFile   int64  // hard limit of open files that a sandbox can get
	PidMax   int64
	Features []Feature // sorted by name
}

// Feature gives the named feature; an unknown name is Missing.
func (c Capabilities) Feature(name string) Feature {
	i := slices.IndexFunc(c.Features, func(f Feature) bool { return f.Name == name })
	if i < 0 {
		return Feature{Name: name, Status: Missing, Fix: "this node does not know the feature"}
	}
	return c.Features[i]
}

// Enforces reports whether the named feature holds, by whatever mechanism.
func (c Capabilities) Enforces(name string) bool {
	s := c.Feature(name).Status
	return s == OK || s == Slower
}

// StartsAtOnce is how many sandboxes a node with so many CPUs starts at once; more of them wait for each other.
func StartsAtOnce(cpus int) int { return max(4, 2*cpus) }

// Load is what a node has promised and what it may promise.
type Load struct {
	Sandboxes    int
	MaxSandboxes int
	Starting     int   // creates in flight
	MaxStarting  int   // start limit
	Memory       int64 // bytes promised to sandboxes
	MaxMemory    int64 // bytes that may be promised, overcommit included
	CPUMillis    int64
	MaxCPUMillis int64
	DiskFree     int64 // bytes
}

// Ref names a node in the sense of placement: its number and the epoch at which the view knew it.
type Ref struct {
	Number Number
	Epoch  int64
}

// Entry is one node in the view.
type Entry struct {
	Ref
	Name         string
	Address      string // where node.v1 answers: "unix:/path" or "host:port"
	Capabilities Capabilities
	Load         Load
	SeenAt       time.Time
	// Cordoned nodes take no new sandboxes.
	Cordoned bool
}

// View is an immutable picture of all nodes, sorted by number. It may be stale; a node's refusal is the last word.
type View struct {
	Nodes []Entry
	// At is when the oldest part of the picture was taken.
	At time.Time
}

// Find gives the entry with number n.
func (v View) Find(n Number) (Entry, bool) {
	i, ok := slices.BinarySearchFunc(v.Nodes, n, func(e Entry, n Number) int { return int(e.Number) - int(n) })
	if !ok {
		return Entry{}, false
	}
	return v.Nodes[i], true
}
