// Package cgroupbpf closes the network to the processes of a tree of control groups, but for what is opened for each.
//
// Programs are attached once, to a group that is the parent of all, and look up by the id of the group right below it
// what its processes, and those of every group below, may do:
//
//	socket    TCP and UDP over IP, nothing else: no raw packets, no ICMP, no other transports
//	connect   \ loopback and the group's own address; where it is open, the gateway's ports, addresses that stand for
//	sendmsg   / names, and the openings
//	egress    the same of each packet that leaves a socket
//	ingress   the same of where a packet comes from; resets always, so that a flow that is cut ends at once
//
// A group without an entry has loopback only. IPv6 is loopback, and IPv4 in its clothes. Calls that are refused fail at
// once with ECONNREFUSED (IPv6: ENETUNREACH, as on a machine without it), or EPERM on kernels that have no choice.
//
// A change of a group's entry is one write, after the openings that it points at are there: a packet meets the old
// state or the new one. Programs and maps belong to the parent group and stay when the process ends; Open finds them.
// Programs of another making are replaced, each in one step, with the maps as they are.
//
// The programs are made here, instruction by instruction: neither a compiler nor a file is needed.
//
// Wall may be used concurrently.
package cgroupbpf
