package cgroupbpf

import (
	"encoding/binary"
	"fmt"
	"net"
	"net/netip"

	"github.com/cilium/ebpf"
	"github.com/cilium/ebpf/asm"
	"golang.org/x/sys/unix"
)

// What stands in an entry of the map of groups: flags, own address, number of the generation of its openings.
const (
	entryFlags = 0
	entryAddr  = 4
	entryGen   = 8
	entrySize  = 16
)

// Flags of an entry.
const (
	flagHost     = 1 << iota // everything is open
	flagNames                // the gateway and addresses that stand for names
	flagOpenings             // what the map of openings has for the generation
)

// MaxRanges is how many ranges of ports one prefix can have.
const MaxRanges = 32

// What stands in the map of openings: for a generation and a prefix of addresses the ranges of ports.
const (
	openingBits  = 8 * (8 + 4) // the longest prefix
	openingKey   = 4 + 8 + 4
	openingCount = 0
	openingFirst = 8 // of the first range; each has first, last, protocol and padding
	rangeSize    = 8
	openingSize  = openingFirst + MaxRanges*rangeSize
)

// What stands in the map of paces: a second, what it saw of denials, and what was not told of them.
const (
	paceSecond = 0
	paceSeen   = 8
	paceUntold = 12
	paceSize   = 16
)

// toldPerSecond is how many denials of one group are told in a second.
const toldPerSecond = 32

// An event is a denial.
const (
	eventGroup    = 0
	eventAddr     = 8 // IPv6, or IPv4 as IPv6
	eventPort     = 24
	eventProtocol = 26
	eventUntold   = 28
	eventSize     = 32
)

// The stack of every program, from the frame pointer down.
const (
	atGroup  = -8
	atKey    = -24 // of an opening
	atEvent  = atKey - eventSize
	atHeader = atEvent - 40 // of a packet
	atPorts  = atHeader - 8
)

// hook is one place where a program sits.
type hook struct {
	name   string
	kind   ebpf.ProgramType
	attach ebpf.AttachType
	code   func(*assembler) asm.Instructions
}

var hooks = []hook{
	{"sandsea_socket", ebpf.CGroupSock, ebpf.AttachCGroupInetSockCreate, (*assembler).socket},
	{"sandsea_conn4", ebpf.CGroupSockAddr, ebpf.AttachCGroupInet4Connect, (*assembler).address4},
	{"sandsea_conn6", ebpf.CGroupSockAddr, ebpf.AttachCGroupInet6Connect, (*assembler).address6},
	{"sandsea_send4", ebpf.CGroupSockAddr, ebpf.AttachCGroupUDP4Sendmsg, (*assembler).address4},
	{"sandsea_send6", ebpf.CGroupSockAddr, ebpf.AttachCGroupUDP6Sendmsg, (*assembler).address6},
	{"sandsea_egress", ebpf.CGroupSKB, ebpf.AttachCGroupInetEgress, func(a *assembler) asm.Instructions { return a.packet(true) }},
	{"sandsea_ingress", ebpf.CGroupSKB, ebpf.AttachCGroupInetIngress, func(a *assembler) asm.Instructions { return a.packet(false) }},
}

// Layout is what is the same for all groups.
type Layout struct {
	// Gateway is the proxy's own address, and Ports those that it serves there.
	Gateway netip.Addr
	Ports   []uint16
	// Names is the range of addresses that stand for names.
	Names netip.Prefix
}

// maps by descriptor.
type mapSet struct{ groups, openings, paces, events *ebpf.Map }

// assembler makes the programs. In all of them R6 is the context, R7 the other end's IPv4 address as in the packet, R8
// its port and R9 the protocol.
type assembler struct {
	layout Layout
	maps   mapSet
	// parent is the group that programs are attached to, and levels those at which its children may be: one, unless it
	// cannot be told.
	parent uint64
	levels []int
	// errno: the kernel lets a program choose the error.
	errno bool

	out asm.Instructions
}

// The labels that every program has.
const (
	allow  = "allow"
	deny   = "deny"   // told and refused
	refuse = "refuse" // refused
)

func (a *assembler) put(i ...asm.Instruction) { a.out = append(a.out, i...) }

// mark gives the next instruction a name: a place to jump to.
func (a *assembler) mark(label string, i asm.Instruction) { a.put(i.WithSymbol(label)) }

// be is four bytes of a packet as the program has them when it loads them.
func be(b []byte) int32 { return int32(binary.NativeEndian.Uint32(b)) }

func be16(v uint16) int32 {
	return int32(binary.NativeEndian.Uint16(binary.BigEndian.AppendUint16(nil, v)))
}

// group puts the id of the group at its place. id makes the call that gives the id at a level.
func (a *assembler) group(id func(level int) []asm.Instruction) {
	if len(a.levels) == 1 {
		a.put(id(a.levels[0])...)
		a.put(asm.StoreMem(asm.RFP, atGroup, asm.R0, asm.DWord))
		return
	}
	for _, level := range a.levels {
		next := fmt.Sprintf("level%d", level+1)
		a.put(id(level - 1)...)
		a.put(
			asm.LoadImm(asm.R1, int64(a.parent), asm.DWord),
			asm.JNE.Reg(asm.R0, asm.R1, next),
		)
		a.put(id(level)...)
		a.put(
			asm.StoreMem(asm.RFP, atGroup, asm.R0, asm.DWord),
			asm.Ja.Label("grouped"),
		)
		a.mark(next, asm.Mov.Imm(asm.R0, 0))
	}
	a.put(asm.StoreMem(asm.RFP, atGroup, asm.R0, asm.DWord)) // no group of ours
	a.mark("grouped", asm.Mov.Imm(asm.R0, 0))
}

// currentGroup is the group of the process that makes the call.
func (a *assembler) currentGroup() {
	a.group(func(level int) []asm.Instruction {
		return []asm.Instruction{asm.Mov.Imm(asm.R1, int32(level)), asm.FnGetCurrentAncestorCgroupId.Call()}
	})
}

// socketGroup is the group of the socket that the packet is of.
func (a *assembler) socketGroup() {
	a.group(func(level int) []asm.Instruction {
		return []asm.Instruction{
			asm.Mov.Reg(asm.R1, asm.R6), asm.Mov.Imm(asm.R2, int32(level)), asm.FnSkbAncestorCgroupId.Call(),
		}
	})
}

// lookup leaves in R0 the entry for the key on the stack, or 0.
func (a *assembler) lookup(m *ebpf.Map, key int16) {
	a.put(
		asm.LoadMapPtr(asm.R1, m.FD()),
		asm.Mov.Reg(asm.R2, asm.RFP),
		asm.Add.Imm(asm.R2, int32(key)),
		asm.FnMapLookupElem.Call(),
	)
}

// remember4 notes the address in R7 for the event, as IPv6.
func (a *assembler) remember4() {
	a.put(
		asm.StoreImm(asm.RFP, atEvent+eventAddr, 0, asm.Word),
		asm.StoreImm(asm.RFP, atEvent+eventAddr+4, 0, asm.Word),
		asm.StoreImm(asm.RFP, atEvent+eventAddr+8, int64(be([]byte{0, 0, 0xff, 0xff})), asm.Word),
		asm.StoreMem(asm.RFP, atEvent+eventAddr+12, asm.R7, asm.Word),
	)
}

// judge4 jumps to allow or deny by R7, R8 and R9.
func (a *assembler) judge4() {
	a.put(
		asm.Mov.Reg32(asm.R1, asm.R7),
		asm.And.Imm32(asm.R1, be([]byte{0xff, 0, 0, 0})),
		asm.JEq.Imm32(asm.R1, be([]byte{127, 0, 0, 0}), allow),
	)
	a.lookup(a.maps.groups, atGroup)
	a.put(
		asm.JEq.Imm(asm.R0, 0, deny),
		asm.LoadMem(asm.R3, asm.R0, entryFlags, asm.Word),
		asm.JSet.Imm(asm.R3, flagHost, allow),
		asm.LoadMem(asm.R1, asm.R0, entryAddr, asm.Word),
		asm.JEq.Reg32(asm.R7, asm.R1, allow), // itself
		asm.JEq.Imm(asm.R9, unix.IPPROTO_TCP, "transport"),
		asm.JNE.Imm(asm.R9, unix.IPPROTO_UDP, deny),
	)
	a.mark("transport", asm.Mov.Reg(asm.R1, asm.R3))
	a.put(
		asm.And.Imm(asm.R1, flagNames),
		asm.JEq.Imm(asm.R1, 0, "openings"),
		asm.Mov.Reg32(asm.R1, asm.R7),
		asm.And.Imm32(asm.R1, be(net.CIDRMask(a.layout.Names.Bits(), 32))),
		asm.JEq.Imm32(asm.R1, be(a.layout.Names.Masked().Addr().AsSlice()), allow),
		asm.JNE.Imm32(asm.R7, be(a.layout.Gateway.AsSlice()), "openings"),
	)
	for _, p := range a.layout.Ports {
		a.put(asm.JEq.Imm(asm.R8, int32(p), allow))
	}
	a.mark("openings", asm.And.Imm(asm.R3, flagOpenings))
	a.put(
		asm.JEq.Imm(asm.R3, 0, deny),
		asm.StoreImm(asm.RFP, atKey, openingBits, asm.Word),
		asm.LoadMem(asm.R1, asm.R0, entryGen, asm.Word),
		asm.StoreMem(asm.RFP, atKey+4, asm.R1, asm.Word),
		asm.LoadMem(asm.R1, asm.R0, entryGen+4, asm.Word),
		asm.StoreMem(asm.RFP, atKey+8, asm.R1, asm.Word),
		asm.StoreMem(asm.RFP, atKey+12, asm.R7, asm.Word),
	)
	a.lookup(a.maps.openings, atKey)
	a.put(
		asm.JEq.Imm(asm.R0, 0, deny),
		asm.LoadMem(asm.R1, asm.R0, openingCount, asm.Word),
	)
	for i := range int32(MaxRanges) {
		at := int16(openingFirst + i*rangeSize)
		next := fmt.Sprintf("range%d", i+1)
		a.mark(fmt.Sprintf("range%d", i), asm.JLE.Imm(asm.R1, i, deny))
		a.put(
			asm.LoadMem(asm.R2, asm.R0, at+4, asm.Byte),
			asm.JNE.Reg(asm.R2, asm.R9, next),
			asm.LoadMem(asm.R2, asm.R0, at, asm.Half),
			asm.JLT.Reg(asm.R8, asm.R2, next),
			asm.LoadMem(asm.R2, asm.R0, at+2, asm.Half),
			asm.JLE.Reg(asm.R8, asm.R2, allow),
		)
	}
	a.mark(fmt.Sprintf("range%d", MaxRanges), asm.Ja.Label(deny))
}

// hostOnly jumps to allow if the group is exempt and to deny if not.
func (a *assembler) hostOnly() {
	a.lookup(a.maps.groups, atGroup)
	a.put(
		asm.JEq.Imm(asm.R0, 0, deny),
		asm.LoadMem(asm.R1, asm.R0, entryFlags, asm.Word),
		asm.JSet.Imm(asm.R1, flagHost, allow),
		asm.Ja.Label(deny),
	)
}

// end is allow, deny and refuse. errno is the error for refused calls, 0 to leave it to the kernel.
func (a *assembler) end(tell bool, errno ...asm.Instruction) asm.Instructions {
	a.mark(allow, asm.Mov.Imm(asm.R0, 1))
	a.put(asm.Return())
	if tell {
		a.tell()
	} else {
		a.mark(deny, asm.Mov.Imm(asm.R0, 0))
	}
	a.mark(refuse, asm.Mov.Imm(asm.R0, 0))
	if a.errno {
		a.put(errno...)
	}
	a.put(asm.Mov.Imm(asm.R0, 0), asm.Return())
	return a.out
}

func errno(e unix.Errno) []asm.Instruction {
	return []asm.Instruction{asm.Mov.Imm(asm.R1, -int32(e)), asm.FnSetRetval.Call()}
}

// tell reports the denial, unless the group has had enough of this second. It needs the event's address.
func (a *assembler) tell() {
	a.mark(deny, asm.Mov.Imm(asm.R0, 0))
	a.lookup(a.maps.paces, atGroup)
	a.put(
		asm.JEq.Imm(asm.R0, 0, refuse),
		asm.Mov.Reg(asm.R6, asm.R0),
		asm.FnKtimeGetCoarseNs.Call(),
		asm.Div.Imm(asm.R0, 1_000_000_000),
		asm.Mov.Imm(asm.R7, 0),
		asm.LoadMem(asm.R1, asm.R6, paceSecond, asm.DWord),
		asm.JEq.Reg(asm.R1, asm.R0, "told"),
		// Two processors may both begin the second, which tells a few more or a few less.
		asm.StoreMem(asm.R6, paceSecond, asm.R0, asm.DWord),
		asm.Xchg.Mem(asm.R6, asm.R7, asm.Word, paceUntold),
		asm.StoreImm(asm.R6, paceSeen, 0, asm.Word),
	)
	a.mark("told", asm.Mov.Imm(asm.R1, 1))
	a.put(
		asm.FetchAdd.Mem(asm.R6, asm.R1, asm.Word, paceSeen),
		asm.JLT.Imm(asm.R1, toldPerSecond, "event"),
		asm.Mov.Imm(asm.R1, 1),
		asm.AddAtomic.Mem(asm.R6, asm.R1, asm.Word, paceUntold),
		asm.Ja.Label(refuse),
	)
	a.mark("event", asm.LoadMem(asm.R1, asm.RFP, atGroup, asm.DWord))
	a.put(
		asm.StoreMem(asm.RFP, atEvent+eventGroup, asm.R1, asm.DWord),
		asm.StoreMem(asm.RFP, atEvent+eventPort, asm.R8, asm.Half),
		asm.StoreMem(asm.RFP, atEvent+eventProtocol, asm.R9, asm.Half),
		asm.StoreMem(asm.RFP, atEvent+eventUntold, asm.R7, asm.Word),
		asm.LoadMapPtr(asm.R1, a.maps.events.FD()),
		asm.Mov.Reg(asm.R2, asm.RFP),
		asm.Add.Imm(asm.R2, atEvent),
		asm.Mov.Imm(asm.R3, eventSize),
		asm.Mov.Imm(asm.R4, 0),
		asm.FnRingbufOutput.Call(),
	)
}

// Offsets in struct bpf_sock.
const (
	sockType     = 8
	sockProtocol = 12
)

// socket judges a socket of IPv4 or IPv6 before it is there.
func (a *assembler) socket() asm.Instructions {
	a.put(
		asm.Mov.Reg(asm.R6, asm.R1),
		asm.LoadMem(asm.R7, asm.R6, sockType, asm.Word),
		asm.LoadMem(asm.R9, asm.R6, sockProtocol, asm.Word),
		asm.Mov.Imm(asm.R8, 0),
		asm.StoreMem(asm.RFP, atEvent+eventAddr, asm.R8, asm.DWord),
		asm.StoreMem(asm.RFP, atEvent+eventAddr+8, asm.R8, asm.DWord),
		asm.JNE.Imm(asm.R7, unix.SOCK_STREAM, "datagrams"),
		asm.JEq.Imm(asm.R9, unix.IPPROTO_TCP, allow),
	)
	a.mark("datagrams", asm.JNE.Imm(asm.R7, unix.SOCK_DGRAM, "others"))
	a.put(asm.JEq.Imm(asm.R9, unix.IPPROTO_UDP, allow))
	a.mark("others", asm.StoreMem(asm.RFP, atPorts, asm.R7, asm.Word))
	a.currentGroup()
	a.hostOnly()
	// Raw packets are for the privileged, other transports are not there: MPTCP falls back to TCP.
	return a.end(true, append([]asm.Instruction{
		asm.LoadMem(asm.R2, asm.RFP, atPorts, asm.Word),
		asm.Mov.Imm(asm.R1, -int32(unix.EPERM)),
		asm.JEq.Imm(asm.R2, unix.SOCK_RAW, "choose"),
		asm.Mov.Imm(asm.R1, -int32(unix.EPROTONOSUPPORT)),
	}, asm.FnSetRetval.Call().WithSymbol("choose"))...)
}

// Offsets in struct bpf_sock_addr.
const (
	addrIP4      = 4
	addrIP6      = 8
	addrPort     = 24
	addrProtocol = 36
)

// target loads the port and the protocol of a call.
func (a *assembler) target() {
	a.put(
		asm.LoadMem(asm.R8, asm.R6, addrPort, asm.Word),
		asm.HostTo(asm.BE, asm.R8, asm.Half),
		asm.LoadMem(asm.R9, asm.R6, addrProtocol, asm.Word),
	)
}

// address4 judges connect and sendmsg to an IPv4 address.
func (a *assembler) address4() asm.Instructions {
	a.put(
		asm.Mov.Reg(asm.R6, asm.R1),
		asm.LoadMem(asm.R7, asm.R6, addrIP4, asm.Word),
	)
	a.target()
	a.currentGroup()
	a.remember4()
	a.put(asm.JEq.Imm(asm.R7, 0, allow)) // this host
	a.judge4()
	return a.end(true, errno(unix.ECONNREFUSED)...)
}

// address6 judges connect and sendmsg to an IPv6 address.
func (a *assembler) address6() asm.Instructions {
	a.put(
		asm.Mov.Reg(asm.R6, asm.R1),
		asm.LoadMem(asm.R1, asm.R6, addrIP6, asm.Word),
		asm.LoadMem(asm.R2, asm.R6, addrIP6+4, asm.Word),
		asm.LoadMem(asm.R3, asm.R6, addrIP6+8, asm.Word),
		asm.LoadMem(asm.R7, asm.R6, addrIP6+12, asm.Word),
		asm.StoreMem(asm.RFP, atEvent+eventAddr, asm.R1, asm.Word),
		asm.StoreMem(asm.RFP, atEvent+eventAddr+4, asm.R2, asm.Word),
		asm.StoreMem(asm.RFP, atEvent+eventAddr+8, asm.R3, asm.Word),
		asm.StoreMem(asm.RFP, atEvent+eventAddr+12, asm.R7, asm.Word),
	)
	a.target()
	a.currentGroup()
	a.put(
		// The helper took the registers.
		asm.LoadMem(asm.R1, asm.RFP, atEvent+eventAddr, asm.Word),
		asm.LoadMem(asm.R2, asm.RFP, atEvent+eventAddr+4, asm.Word),
		asm.LoadMem(asm.R3, asm.RFP, atEvent+eventAddr+8, asm.Word),
		asm.Or.Reg32(asm.R1, asm.R2),
		asm.JNE.Imm32(asm.R1, 0, "foreign"),
		asm.JEq.Imm32(asm.R3, be([]byte{0, 0, 0xff, 0xff}), "mapped"),
		asm.JNE.Imm32(asm.R3, 0, "foreign"),
		asm.JEq.Imm32(asm.R7, 0, allow), // this host
		asm.JEq.Imm32(asm.R7, be([]byte{0, 0, 0, 1}), allow),
	)
	a.mark("foreign", asm.Mov.Imm(asm.R0, 0))
	a.hostOnly()
	a.mark("mapped", asm.JEq.Imm32(asm.R7, 0, allow))
	a.judge4()
	// IPv4 in IPv6 is refused as IPv4.
	return a.end(true, append([]asm.Instruction{
		asm.LoadMem(asm.R2, asm.RFP, atEvent+eventAddr+8, asm.Word),
		asm.Mov.Imm(asm.R1, -int32(unix.ECONNREFUSED)),
		asm.JEq.Imm32(asm.R2, be([]byte{0, 0, 0xff, 0xff}), "choose"),
		asm.Mov.Imm(asm.R1, -int32(unix.ENETUNREACH)),
	}, asm.FnSetRetval.Call().WithSymbol("choose"))...)
}

// skbProtocol is an offset in struct __sk_buff.
const skbProtocol = 16

// load reads bytes of the packet from the network header on; R2 is the offset.
func (a *assembler) load(to int16, size int32) {
	a.put(
		asm.Mov.Reg(asm.R1, asm.R6),
		asm.Mov.Reg(asm.R3, asm.RFP),
		asm.Add.Imm(asm.R3, int32(to)),
		asm.Mov.Imm(asm.R4, size),
		asm.Mov.Imm(asm.R5, 1), // BPF_HDR_START_NET
		asm.FnSkbLoadBytesRelative.Call(),
		asm.JNE.Imm(asm.R0, 0, refuse),
	)
}

// packet judges a packet: where it goes when it goes out, where it comes from when it comes in.
func (a *assembler) packet(out bool) asm.Instructions {
	other4, other6, otherPort := int16(12), int16(8), int16(0)
	if out {
		other4, other6, otherPort = 16, 24, 2
	}
	a.put(asm.Mov.Reg(asm.R6, asm.R1))
	a.socketGroup()
	a.put(
		asm.LoadMem(asm.R1, asm.R6, skbProtocol, asm.Word),
		asm.JEq.Imm(asm.R1, be16(unix.ETH_P_IPV6), "v6"),
		asm.JNE.Imm(asm.R1, be16(unix.ETH_P_IP), refuse),
		asm.Mov.Imm(asm.R2, 0),
	)
	a.load(atHeader, 20)
	a.put(
		asm.LoadMem(asm.R7, asm.RFP, atHeader+other4, asm.Word),
		asm.LoadMem(asm.R9, asm.RFP, atHeader+9, asm.Byte),
		asm.Mov.Imm(asm.R8, 0),
	)
	a.remember4()
	a.put(
		// A fragment that is not the first has no ports; sockets send none.
		asm.LoadMem(asm.R1, asm.RFP, atHeader+6, asm.Half),
		asm.And.Imm(asm.R1, be16(0x1fff)),
		asm.JNE.Imm(asm.R1, 0, "portless"),
		asm.JEq.Imm(asm.R9, unix.IPPROTO_TCP, "ports"),
		asm.JEq.Imm(asm.R9, unix.IPPROTO_UDP, "ports"),
		asm.Ja.Label("judge"),
	)
	a.mark("portless", asm.Mov.Imm(asm.R9, unix.IPPROTO_RAW))
	a.put(asm.Ja.Label("judge"))
	a.mark("ports", asm.LoadMem(asm.R2, asm.RFP, atHeader, asm.Byte))
	a.put(
		asm.And.Imm(asm.R2, 0xf),
		asm.LSh.Imm(asm.R2, 2),
		asm.StoreMem(asm.RFP, atKey, asm.R2, asm.DWord),
	)
	a.load(atPorts, 4)
	a.put(
		asm.LoadMem(asm.R8, asm.RFP, atPorts+otherPort, asm.Half),
		asm.HostTo(asm.BE, asm.R8, asm.Half),
	)
	if !out {
		a.put(
			asm.JNE.Imm(asm.R9, unix.IPPROTO_TCP, "judge"),
			asm.LoadMem(asm.R2, asm.RFP, atKey, asm.DWord),
			asm.And.Imm(asm.R2, 0x3f),
			asm.Add.Imm(asm.R2, 13), // the flags of TCP
		)
		a.load(atPorts, 1)
		a.put(
			asm.LoadMem(asm.R1, asm.RFP, atPorts, asm.Byte),
			asm.JSet.Imm(asm.R1, 0x04, allow), // a reset
		)
	}
	a.mark("judge", asm.Mov.Imm(asm.R0, 0))
	a.judge4()

	a.mark("v6", asm.Mov.Imm(asm.R2, 0))
	a.load(atHeader, 40)
	a.put(
		asm.LoadMem(asm.R9, asm.RFP, atHeader+6, asm.Byte),
		asm.Mov.Imm(asm.R8, 0),
		asm.LoadMem(asm.R1, asm.RFP, atHeader+other6, asm.DWord),
		asm.LoadMem(asm.R2, asm.RFP, atHeader+other6+8, asm.DWord),
		asm.StoreMem(asm.RFP, atEvent+eventAddr, asm.R1, asm.DWord),
		asm.StoreMem(asm.RFP, atEvent+eventAddr+8, asm.R2, asm.DWord),
		asm.JNE.Imm(asm.R1, 0, "foreign"),
		asm.LoadImm(asm.R1, int64(binary.NativeEndian.Uint64([]byte{7: 1})), asm.DWord),
		asm.JEq.Reg(asm.R2, asm.R1, allow),
	)
	a.mark("foreign", asm.Mov.Imm(asm.R0, 0))
	a.hostOnly()
	return a.end(out)
}
