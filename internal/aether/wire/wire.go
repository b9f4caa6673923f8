// Package wire is what an edge and its Aether process say to each other over DIR/run/aether.sock.
package wire

import (
	"net/netip"

	"github.com/sandsea/sandsea/internal/policy"
)

// Addresses and ports of the gate, the network namespace in which all sandboxes of a node meet Aether and nothing else.
// They are the same on every node: each gate is a world of its own.
var (
	// Gateway is Aether's address as sandboxes see it.
	Gateway = netip.MustParseAddr("100.64.0.1")
	// Links is the range of the sandboxes' addresses.
	Links = netip.MustParsePrefix("100.64.0.0/10")
	// Names is the range of addresses that stand for host names: RFC 2544 reserves it, so none of them is anybody's.
	Names = netip.MustParsePrefix("198.18.0.0/15")
)

// Ports of Gateway.
const (
	PortDNS     = 53
	PortMirrors = 80   // package services, http://100.64.0.1/<service>/…
	PortSOCKS   = 1080 // SOCKS5
	PortProxy   = 3128 // HTTP, with CONNECT
)

// PortTransparent is where the gate's rules bring connections and datagrams for other addresses (TPROXY), on
// 127.0.0.1 of the gate.
const PortTransparent = 7001

// Mark is what the gate's rules put on packets for PortTransparent, and Table the routing table that keeps them here.
const (
	Mark  = 1
	Table = 100
)

// Sandbox is all that Aether knows of one.
type Sandbox struct {
	ID      string     `json:"id"`
	Project string     `json:"project"`
	Addr    netip.Addr `json:"addr"` // in Links; its packets have no other source
	// Policy has been validated.
	Policy policy.Policy `json:"policy"`
	Phase  string        `json:"phase"`
	// Before is what its Counters were when another Aether last told them: its limits hold over its life.
	Before Counters `json:"before,omitzero"`
}

// Counters of one sandbox over its life, as far as Sandbox.Before told.
type Counters struct {
	Sent     int64 `json:"sent"`
	Received int64 `json:"received"`
	Flows    int64 `json:"flows"` // open now
	Denied   int64 `json:"denied"`
}

// Denial is a packet or call that the kernel's walls rejected, for the flow log.
type Denial struct {
	Addr     netip.Addr      `json:"addr"` // the sandbox's
	To       netip.AddrPort  `json:"to"`
	Protocol policy.Protocol `json:"protocol"` // or the number of another protocol
	Count    int64           `json:"count"`
}

// ServiceState tells what a package service draws on.
type ServiceState struct {
	Name string `json:"name"`
	// Upstreams are its URLs, without credentials; none: it answers nothing but what its cache holds.
	Upstreams []string `json:"upstreams,omitempty"`
	// Source is where they were found: "aether.toml", or the client whose configuration named them.
	Source string `json:"source,omitempty"`
	// Missing says what the operator must do for it to work; empty when nothing is missing.
	Missing string `json:"missing,omitempty"`
}
