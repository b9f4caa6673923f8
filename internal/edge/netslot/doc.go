// Package netslot gives sandboxes their network: each a link of its own into the gate, the network namespace of this
// edge in which there is nothing but Aether, and the kernel's walls around it.
//
// It owns
//
//	DIR/run/gate.netns     the gate, a mount that keeps the namespace
//	s<number> in the gate  a sandbox's link, whose other end is eth0 inside
//	table inet sandsea     in the gate: who may send what to Aether; all else is refused at once
//	programs on the cgroup sandsea-TAG: what a process may open, dial, send and receive
//
// and nothing in the host's own namespace: no link, no route, no rule. Nothing is ever forwarded out of the gate; what
// Aether does not answer is refused.
//
// Everything of it is the kernel's and stays when the edge dies, with the walls as they were. Open finds it again, Adopt
// takes each living sandbox back, and Settle removes what nobody took.
//
// A slot's number stands for its address, 100.64.1.0 + number. It is given again only when the kernel has no link of
// that number any more, and numbers go round, so that an address rests before somebody else has it.
//
// Walls are closed but for loopback until Set. A group of the cgroup that has no slot is closed likewise. If any part
// cannot be had, Open fails, naming it; there is no gate with fewer walls.
//
// Gate and Slot may be used concurrently, but for Close and Destroy, which come last.
package netslot
