// Package seccomp assembles the system-call filter of container sandboxes as a classic BPF program.
//
// The list of calls is Moby's default profile for the capabilities of a sandbox, minus what has been a way to the
// kernel or to other sandboxes too often, and with some ioctl commands taken out; sockets are of a few families only.
// A call of the profile's past answers EPERM, one that is younger than the table ENOSYS, so that C libraries fall back;
// another system-call table (i386, x32) has no calls at all. The program finds a call by binary search.
//
// Conditions look at the low 32 bits of an argument and no more, since that is what the kernel does with each argument
// that the profile looks at: a comparison of all 64 would let ioctl(fd, 1<<32|cmd) pass.
//
// The package only assembles; sandsea-init loads. Default is pure and may be called by anyone at any time.
package seccomp

import (
	"encoding/binary"
	"fmt"
	"maps"
	"runtime"
	"slices"

	"github.com/elastic/go-seccomp-bpf/arch"
	moby "github.com/moby/profiles/seccomp"
	"github.com/opencontainers/runtime-spec/specs-go"
	"golang.org/x/net/bpf"
	"golang.org/x/sys/unix"
)

// MaxInstructions is what the kernel takes.
const MaxInstructions = 4096

// Capabilities are the names of those that the filter is made for: the bounding set of a sandbox.
var capabilities = []string{
	"CAP_AUDIT_WRITE", "CAP_CHOWN", "CAP_DAC_OVERRIDE", "CAP_FOWNER", "CAP_FSETID", "CAP_KILL", "CAP_MKNOD",
	"CAP_NET_BIND_SERVICE", "CAP_NET_RAW", "CAP_SETFCAP", "CAP_SETGID", "CAP_SETPCAP", "CAP_SETUID", "CAP_SYS_CHROOT",
}

// subtracted are calls that a sandbox does not get even where the profile has them.
var subtracted = []string{
	"add_key", "bpf", "io_uring_enter", "io_uring_register", "io_uring_setup", "keyctl", "request_key", "userfaultfd",
}

// absent are calls that answer as in a kernel without them. A node has one table of asynchronous reads and writes
// (fs.aio-max-nr) for all sandboxes, and each could fill it; databases fall back.
var absent = []string{"io_setup"}

// families are the sockets that a sandbox gets: those that programs use and that end at its network namespace, where
// the programs on its control group judge what is sent. The others are code that opening one may load into the kernel;
// AF_PACKET sends past every judge, and AF_VSOCK reaches the machine's own hypervisor.
var families = []uint32{unix.AF_UNIX, unix.AF_INET, unix.AF_INET6}

// netlinks are the protocols of AF_NETLINK that a sandbox gets: to look at links, addresses and routes.
var netlinks = []uint32{unix.NETLINK_ROUTE}

// transports are protocols over IP that a sandbox does not get: nobody uses them, and each loads a module with a past.
var transports = []uint32{unix.IPPROTO_DCCP, unix.IPPROTO_L2TP, unix.IPPROTO_SCTP}

// ioctls are commands that answer EPERM on whatever descriptor.
var ioctls = []uint32{
	0xC0C0586D,     // XFS_IOC_SWAPEXT: swaps the data of two files below every check of their content
	0x40285881,     // XFS_IOC_EXCHANGE_RANGE: its successor
	0x80585882,     // XFS_IOC_START_COMMIT
	0x40585883,     // XFS_IOC_COMMIT_RANGE
	0xC028660F,     // EXT4_IOC_MOVE_EXT
	0x6611,         // EXT4_IOC_SWAP_BOOT
	0xC020F509,     // F2FS_IOC_MOVE_RANGE
	0x50009401,     // BTRFS_IOC_SNAP_CREATE: a subvolume inside would be outside its limit of space
	0x50009417,     // BTRFS_IOC_SNAP_CREATE_V2
	0x5000940E,     // BTRFS_IOC_SUBVOL_CREATE
	0x50009418,     // BTRFS_IOC_SUBVOL_CREATE_V2
	0x5000940F,     // BTRFS_IOC_SNAP_DESTROY
	0x5000943F,     // BTRFS_IOC_SNAP_DESTROY_V2
	unix.TIOCSTI,   // types into a terminal for somebody else to run
	unix.TIOCLINUX, // pastes into a console
}

// condition compares (argument & mask) with value; everything in the low 32 bits.
type condition struct {
	arg   uint
	mask  uint32
	op    bpf.JumpTest
	value uint32
}

// rule applies when all its conditions hold; without any it always does.
type rule struct {
	when []condition
	then uint32
}

const (
	allow = uint32(unix.SECCOMP_RET_ALLOW)
	fail  = uint32(unix.SECCOMP_RET_ERRNO)
)

func errno(e unix.Errno) uint32 { return fail | uint32(e) }

// Default gives the program for the machine's own architecture in the kernel's layout, 8 bytes per instruction.
func Default() ([]byte, error) {
	raw, err := program()
	if err != nil {
		return nil, err
	}
	out := make([]byte, 0, 8*len(raw))
	for _, r := range raw {
		out = binary.NativeEndian.AppendUint16(out, r.Op)
		out = append(out, r.Jt, r.Jf)
		out = binary.NativeEndian.AppendUint32(out, r.K)
	}
	return out, nil
}

func program() ([]bpf.RawInstruction, error) {
	table, err := arch.GetInfo(runtime.GOARCH)
	if err != nil {
		return nil, fmt.Errorf("seccomp filter: %w", err)
	}
	rules, err := collect(table)
	if err != nil {
		return nil, fmt.Errorf("seccomp filter: %w", err)
	}
	raw, err := bpf.Assemble(assemble(table, rules))
	if err != nil {
		return nil, fmt.Errorf("seccomp filter: %w", err)
	}
	if len(raw) > MaxInstructions {
		return nil, fmt.Errorf("seccomp filter: %d instructions", len(raw))
	}
	return raw, nil
}

// collect gives the rules of each call by its number.
func collect(table *arch.Info) (map[int][]rule, error) {
	spec := &specs.Spec{Process: &specs.Process{Capabilities: &specs.LinuxCapabilities{Bounding: capabilities}}}
	profile, err := moby.GetDefaultProfile(spec)
	if err != nil {
		return nil, fmt.Errorf("default profile: %w", err)
	}
	if profile.DefaultAction != specs.ActErrno {
		return nil, fmt.Errorf("default action of the profile is %s", profile.DefaultAction)
	}
	rules := map[int][]rule{}
	for _, s := range profile.Syscalls {
		r, err := translate(s)
		if err != nil {
			return nil, err
		}
		for _, name := range s.Names {
			if number, ok := table.SyscallNames[name]; ok { // most unknown names are other architectures'
				rules[number] = append(rules[number], r)
			}
		}
	}
	for _, name := range subtracted {
		number, ok := table.SyscallNames[name]
		if !ok {
			return nil, fmt.Errorf("no number for %s", name)
		}
		delete(rules, number)
	}
	// What is refused stands before what allows.
	front := func(name string, r rule) error {
		number, ok := table.SyscallNames[name]
		if !ok {
			return fmt.Errorf("no number for %s", name)
		}
		rules[number] = slices.Insert(rules[number], 0, r)
		return nil
	}
	for _, cmd := range ioctls {
		r := rule{when: []condition{equal(1, cmd)}, then: errno(unix.EPERM)}
		if err := front("ioctl", r); err != nil {
			return nil, err
		}
	}
	for _, name := range absent {
		number, ok := table.SyscallNames[name]
		if !ok {
			return nil, fmt.Errorf("no number for %s", name)
		}
		rules[number] = []rule{{then: errno(unix.ENOSYS)}}
	}
	for name, own := range map[string][]rule{"socket": sockets(), "socketpair": pairs()} {
		number, ok := table.SyscallNames[name]
		if !ok {
			return nil, fmt.Errorf("no number for %s", name)
		}
		rules[number] = own
	}
	return rules, nil
}

// sockets are the rules of socket(family, type, protocol).
func sockets() []rule {
	// nf_tables is the largest attack surface that a user namespace opens.
	rules := []rule{{when: []condition{equal(0, unix.AF_NETLINK), equal(2, unix.NETLINK_NETFILTER)}, then: errno(unix.EPERM)}}
	for _, p := range netlinks {
		rules = append(rules, rule{when: []condition{equal(0, unix.AF_NETLINK), equal(2, p)}, then: allow})
	}
	rules = append(rules, rule{when: []condition{equal(0, unix.AF_NETLINK)}, then: errno(unix.EPROTONOSUPPORT)})
	// A raw socket carries any protocol without loading it.
	raw := condition{arg: 1, mask: sockTypes, op: bpf.JumpNotEqual, value: unix.SOCK_RAW}
	for _, p := range transports {
		for _, family := range []uint32{unix.AF_INET, unix.AF_INET6} {
			rules = append(rules, rule{
				when: []condition{equal(2, p), raw, equal(0, family)}, then: errno(unix.EPROTONOSUPPORT),
			})
		}
	}
	for _, f := range families {
		rules = append(rules, rule{when: []condition{equal(0, f)}, then: allow})
	}
	for _, f := range []uint32{unix.AF_PACKET, unix.AF_VSOCK, unix.AF_ALG} {
		rules = append(rules, rule{when: []condition{equal(0, f)}, then: errno(unix.EPERM)})
	}
	return append(rules, rule{then: errno(unix.EAFNOSUPPORT)})
}

// sockTypes parts the type of a socket from its flags.
const sockTypes = 0xf

// pairs are the rules of socketpair, which only AF_UNIX has beside families that nobody gets.
func pairs() []rule {
	return []rule{{when: []condition{equal(0, unix.AF_UNIX)}, then: allow}, {then: errno(unix.EOPNOTSUPP)}}
}

func equal(arg uint, value uint32) condition {
	return condition{arg: arg, mask: 0xffffffff, op: bpf.JumpEqual, value: value}
}

// narrow are the calls whose arguments the kernel takes as 32 bits, so that conditions on the low half are exact.
var narrow = []string{"clone", "personality", "socket"}

func translate(s specs.LinuxSyscall) (rule, error) {
	r := rule{}
	switch s.Action {
	case specs.ActAllow:
		r.then = allow
	case specs.ActErrno:
		e := unix.EPERM
		if s.ErrnoRet != nil {
			e = unix.Errno(*s.ErrnoRet)
		}
		r.then = errno(e)
	default:
		return r, fmt.Errorf("action %s of %v", s.Action, s.Names)
	}
	for _, a := range s.Args {
		for _, name := range s.Names {
			if !slices.Contains(narrow, name) {
				return r, fmt.Errorf("condition on %s, whose arguments are not known to be of 32 bits", name)
			}
		}
		if a.Value > 0xffffffff || a.ValueTwo > 0xffffffff {
			return r, fmt.Errorf("condition on %v beyond 32 bits", s.Names)
		}
		c := condition{arg: a.Index, mask: 0xffffffff, value: uint32(a.Value)}
		switch a.Op {
		case specs.OpEqualTo:
			c.op = bpf.JumpEqual
		case specs.OpNotEqual:
			c.op = bpf.JumpNotEqual
		case specs.OpLessThan:
			c.op = bpf.JumpLessThan
		case specs.OpLessEqual:
			c.op = bpf.JumpLessOrEqual
		case specs.OpGreaterThan:
			c.op = bpf.JumpGreaterThan
		case specs.OpGreaterEqual:
			c.op = bpf.JumpGreaterOrEqual
		case specs.OpMaskedEqual:
			c.op, c.mask, c.value = bpf.JumpEqual, uint32(a.Value), uint32(a.ValueTwo)
		default:
			return r, fmt.Errorf("operator %s of %v", a.Op, s.Names)
		}
		r.when = append(r.when, c)
	}
	return r, nil
}

// Offsets in struct seccomp_data.
const (
	offNumber = 0
	offArch   = 4
	offArgs   = 16
)

// x32Bit marks calls of the x32 table.
const x32Bit = 0x40000000

// span is a run of numbers that are treated alike.
type span struct {
	from uint32
	code []bpf.Instruction
}

func ret(v uint32) bpf.Instruction { return bpf.RetConstant{Val: v} }

func assemble(table *arch.Info, rules map[int][]rule) []bpf.Instruction {
	top := slices.Max(slices.Collect(maps.Values(table.SyscallNames)))
	var spans []span
	last := uint32(0) // plain action of the span before; 0 is none
	for n := 0; n <= top; n++ {
		code, plain := block(rules[n])
		if plain != 0 && plain == last {
			continue
		}
		spans = append(spans, span{uint32(n), code})
		last = plain
	}
	spans = append(spans, span{uint32(top + 1), []bpf.Instruction{ret(errno(unix.ENOSYS))}})

	// The words of seccomp_data are in host order: for the kernel's filter these loads are exact, for a VM that reads big
	// endian the test lays the data out accordingly.
	out := []bpf.Instruction{
		bpf.LoadAbsolute{Off: offArch, Size: 4},
		bpf.JumpIf{Cond: bpf.JumpEqual, Val: uint32(table.ID), SkipTrue: 1},
		ret(errno(unix.ENOSYS)),
		bpf.LoadAbsolute{Off: offNumber, Size: 4},
		bpf.JumpIf{Cond: bpf.JumpLessThan, Val: x32Bit, SkipTrue: 1},
		ret(errno(unix.ENOSYS)),
	}
	return append(out, search(spans)...)
}

// search is a binary tree over the starts of the spans. The number is in the accumulator until a leaf loads arguments.
func search(spans []span) []bpf.Instruction {
	if len(spans) == 1 {
		return spans[0].code
	}
	half := len(spans) / 2
	low, high := search(spans[:half]), search(spans[half:])
	var out []bpf.Instruction
	if len(low) <= 255 {
		out = append(out, bpf.JumpIf{
			Cond: bpf.JumpGreaterOrEqual, Val: spans[half].from, SkipTrue: uint8(len(low)),
		})
	} else {
		out = append(out,
			bpf.JumpIf{Cond: bpf.JumpGreaterOrEqual, Val: spans[half].from, SkipFalse: 1},
			bpf.Jump{Skip: uint32(len(low))})
	}
	out = append(out, low...)
	return append(out, high...)
}

// block is the code for one call, which always ends in a return, and its action if that never depends on arguments.
func block(rules []rule) (code []bpf.Instruction, plain uint32) {
	for _, r := range rules {
		if len(r.when) == 0 && len(code) == 0 {
			return []bpf.Instruction{ret(r.then)}, r.then
		}
		var one []bpf.Instruction
		for i, c := range r.when {
			one = append(one, bpf.LoadAbsolute{Off: low32(c.arg), Size: 4})
			if c.mask != 0xffffffff {
				one = append(one, bpf.ALUOpConstant{Op: bpf.ALUOpAnd, Val: c.mask})
			}
			// Over the rest of this rule: two or three for each condition left, and the return.
			skip := 1
			for _, rest := range r.when[i+1:] {
				skip += 2
				if rest.mask != 0xffffffff {
					skip++
				}
			}
			one = append(one, bpf.JumpIf{Cond: c.op, Val: c.value, SkipFalse: uint8(skip)})
		}
		code = append(append(code, one...), ret(r.then))
		if len(r.when) == 0 {
			return code, 0
		}
	}
	code = append(code, ret(errno(unix.EPERM)))
	if len(rules) == 0 {
		return code, errno(unix.EPERM)
	}
	return code, 0
}

// low32 is the offset of an argument's low half.
func low32(arg uint) uint32 {
	off := uint32(offArgs + 8*arg)
	if binary.NativeEndian.Uint16([]byte{0, 1}) == 1 {
		off += 4
	}
	return off
}
