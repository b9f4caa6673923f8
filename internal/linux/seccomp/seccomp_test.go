package seccomp

import (
	"encoding/binary"
	"fmt"
	"runtime"
	"slices"
	"testing"

	"github.com/elastic/go-seccomp-bpf/arch"
	moby "github.com/moby/profiles/seccomp"
	"github.com/opencontainers/runtime-spec/specs-go"
	"golang.org/x/net/bpf"
	"golang.org/x/sys/unix"
)

// machine runs the program on calls.
type machine struct {
	t     testing.TB
	vm    *bpf.VM
	table *arch.Info
}

func newMachine(t testing.TB) *machine {
	t.Helper()
	table, err := arch.GetInfo(runtime.GOARCH)
	if err != nil {
		t.Skip(err)
	}
	raw, err := program()
	if err != nil {
		t.Fatal(err)
	}
	instructions, all := bpf.Disassemble(raw)
	if !all {
		t.Fatal("an instruction is unknown")
	}
	vm, err := bpf.NewVM(instructions)
	if err != nil {
		t.Fatal(err)
	}
	return &machine{t, vm, table}
}

// run gives the verdict. The VM reads big endian, so each word of seccomp_data is laid out so, at its place in the
// kernel's layout for this machine.
func (m *machine) run(id, number uint32, args ...uint64) uint32 {
	m.t.Helper()
	data := make([]byte, 64)
	binary.BigEndian.PutUint32(data[0:], number)
	binary.BigEndian.PutUint32(data[4:], id)
	for i, a := range args {
		low := low32(uint(i))
		high := 2*uint32(16+8*i) + 4 - low // the other half
		binary.BigEndian.PutUint32(data[low:], uint32(a))
		binary.BigEndian.PutUint32(data[high:], uint32(a>>32))
	}
	got, err := m.vm.Run(data)
	if err != nil {
		m.t.Fatal(err)
	}
	return uint32(got)
}

func (m *machine) call(name string, args ...uint64) uint32 {
	m.t.Helper()
	number, ok := m.table.SyscallNames[name]
	if !ok {
		m.t.Fatalf("no call %s", name)
	}
	return m.run(uint32(m.table.ID), uint32(number), args...)
}

func verdict(v uint32) string {
	switch {
	case v == allow:
		return "allow"
	case v&^0xffff == fail:
		return unix.ErrnoName(unix.Errno(v & 0xffff))
	}
	return fmt.Sprintf("%#x", v)
}

func TestVerdicts(t *testing.T) {
	m := newMachine(t)
	const high = 1 << 32
	for _, c := range []struct {
		name string
		call string
		args []uint64
		want string
	}{
		{"reading", "read", nil, "allow"},
		{"executing", "execve", nil, "allow"},
		{"becoming another user", "setresuid", nil, "allow"},
		{"another root directory, which sshd and apt need", "chroot", nil, "allow"},
		{"tracing its own", "ptrace", nil, "allow"},
		{"opening without links", "openat2", nil, "allow"},
		{"mounting", "mount", nil, "EPERM"},
		{"mounting the new way", "fsopen", nil, "EPERM"},
		{"moving mounts", "move_mount", nil, "EPERM"},
		{"changing the root", "pivot_root", nil, "EPERM"},
		{"leaving namespaces", "unshare", []uint64{unix.CLONE_NEWUSER}, "EPERM"},
		{"entering namespaces", "setns", nil, "EPERM"},
		{"kernel modules", "init_module", nil, "EPERM"},
		{"another kernel", "kexec_load", nil, "EPERM"},
		{"the clock", "clock_settime", nil, "EPERM"},
		{"reboot", "reboot", nil, "EPERM"},
		{"swap", "swapon", nil, "EPERM"},
		{"counters", "perf_event_open", nil, "EPERM"},
		{"files by handle", "open_by_handle_at", nil, "EPERM"},
		{"io_uring", "io_uring_setup", nil, "EPERM"},
		{"io_uring's entry", "io_uring_enter", nil, "EPERM"},
		{"io_uring's registry", "io_uring_register", nil, "EPERM"},
		{"bpf", "bpf", nil, "EPERM"},
		{"userfaultfd", "userfaultfd", nil, "EPERM"},
		{"keys", "keyctl", nil, "EPERM"},
		{"adding keys", "add_key", nil, "EPERM"},
		{"asking for keys", "request_key", nil, "EPERM"},
		{"the fork whose flags no filter sees", "clone3", nil, "ENOSYS"},
		{"threads", "clone", []uint64{unix.CLONE_VM | unix.CLONE_THREAD | unix.CLONE_SIGHAND}, "allow"},
		{"a fork", "clone", []uint64{uint64(unix.SIGCHLD)}, "allow"},
		{"a fork into a user namespace", "clone", []uint64{unix.CLONE_NEWUSER}, "EPERM"},
		{"a fork into a mount namespace", "clone", []uint64{unix.CLONE_NEWNS | unix.CLONE_VM}, "EPERM"},
		{"a fork into a cgroup namespace", "clone", []uint64{unix.CLONE_NEWCGROUP}, "EPERM"},
		{"a fork into a user namespace behind high bits", "clone", []uint64{high | unix.CLONE_NEWUSER}, "EPERM"},
		{"the default personality", "personality", []uint64{0}, "allow"},
		{"asking for the personality", "personality", []uint64{0xffffffff}, "allow"},
		{"no randomisation", "personality", []uint64{0x0040000}, "EPERM"},
		{"no randomisation behind high bits", "personality", []uint64{high | 0x0040000}, "EPERM"},
		{"a unix socket", "socket", []uint64{unix.AF_UNIX}, "allow"},
		{"an IPv6 socket", "socket", []uint64{unix.AF_INET6}, "allow"},
		{"routes", "socket", []uint64{unix.AF_NETLINK, unix.SOCK_RAW, unix.NETLINK_ROUTE}, "allow"},
		{"nf_tables", "socket", []uint64{unix.AF_NETLINK, unix.SOCK_RAW, unix.NETLINK_NETFILTER}, "EPERM"},
		{
			"nf_tables behind high bits", "socket",
			[]uint64{high | unix.AF_NETLINK, unix.SOCK_RAW, high | unix.NETLINK_NETFILTER},
			"EPERM",
		},
		{"protocol 12 of another family", "socket", []uint64{unix.AF_INET, unix.SOCK_RAW, 12}, "allow"},
		{"vsock", "socket", []uint64{unix.AF_VSOCK}, "EPERM"},
		{"the kernel's ciphers", "socket", []uint64{unix.AF_ALG}, "EPERM"},
		{"an IPv4 socket", "socket", []uint64{unix.AF_INET, unix.SOCK_STREAM | unix.SOCK_CLOEXEC}, "allow"},
		{"multipath TCP", "socket", []uint64{unix.AF_INET, unix.SOCK_STREAM, unix.IPPROTO_MPTCP}, "allow"},
		{"frames", "socket", []uint64{unix.AF_PACKET, unix.SOCK_RAW, 0x300}, "EPERM"},
		{"frames behind high bits", "socket", []uint64{high | unix.AF_PACKET, unix.SOCK_DGRAM, 0x300}, "EPERM"},
		{"frames past the kernel", "socket", []uint64{unix.AF_XDP, unix.SOCK_RAW}, "EAFNOSUPPORT"},
		{"events of devices", "socket", []uint64{unix.AF_NETLINK, unix.SOCK_RAW, unix.NETLINK_KOBJECT_UEVENT}, "EPROTONOSUPPORT"},
		{"generic netlink", "socket", []uint64{unix.AF_NETLINK, unix.SOCK_RAW, unix.NETLINK_GENERIC}, "EPROTONOSUPPORT"},
		{"sockets of others", "socket", []uint64{unix.AF_NETLINK, unix.SOCK_RAW, unix.NETLINK_SOCK_DIAG}, "EPROTONOSUPPORT"},
		{"auditing", "socket", []uint64{unix.AF_NETLINK, unix.SOCK_RAW, unix.NETLINK_AUDIT}, "EPROTONOSUPPORT"},
		{"the connector of the machine", "socket", []uint64{unix.AF_NETLINK, unix.SOCK_DGRAM, unix.NETLINK_CONNECTOR}, "EPROTONOSUPPORT"},
		{"SCTP", "socket", []uint64{unix.AF_INET, unix.SOCK_SEQPACKET, unix.IPPROTO_SCTP}, "EPROTONOSUPPORT"},
		{
			"SCTP by IPv6 with flags behind high bits", "socket",
			[]uint64{unix.AF_INET6, high | unix.SOCK_STREAM | unix.SOCK_CLOEXEC, high | unix.IPPROTO_SCTP},
			"EPROTONOSUPPORT",
		},
		{"DCCP", "socket", []uint64{unix.AF_INET, unix.SOCK_DCCP, unix.IPPROTO_DCCP}, "EPROTONOSUPPORT"},
		{"raw packets of SCTP", "socket", []uint64{unix.AF_INET, unix.SOCK_RAW | unix.SOCK_NONBLOCK, unix.IPPROTO_SCTP}, "allow"},
		{"a pipe of two ends", "socketpair", []uint64{unix.AF_UNIX, unix.SOCK_SEQPACKET}, "allow"},
		{"a pair of TIPC", "socketpair", []uint64{unix.AF_TIPC, unix.SOCK_SEQPACKET}, "ENOTSUP"},
		{"asynchronous reads", "io_setup", []uint64{1}, "ENOSYS"},
		{"terminal size", "ioctl", []uint64{0, unix.TIOCGWINSZ}, "allow"},
		{"cloning a range of a file", "ioctl", []uint64{0, 0x4020940D}, "allow"},
		{"the command in another argument", "ioctl", []uint64{0, 1, 0xC0C0586D}, "allow"},
		{"swapping extents", "ioctl", []uint64{0, 0xC0C0586D}, "EPERM"},
		{"swapping extents behind high bits", "ioctl", []uint64{0, 0x1_C0C0586D}, "EPERM"},
		{"swapping extents behind all high bits", "ioctl", []uint64{0, 0xFFFFFFFF_C0C0586D}, "EPERM"},
		{"exchanging ranges", "ioctl", []uint64{0, 0x40285881}, "EPERM"},
		{"moving extents of ext4", "ioctl", []uint64{0, 0xC028660F}, "EPERM"},
		{"typing for others", "ioctl", []uint64{0, unix.TIOCSTI}, "EPERM"},
		{"typing for others behind high bits", "ioctl", []uint64{0, high | unix.TIOCSTI}, "EPERM"},
		{"pasting", "ioctl", []uint64{0, unix.TIOCLINUX}, "EPERM"},
	} {
		t.Run(c.name, func(t *testing.T) {
			m.t = t
			if got := verdict(m.call(c.call, c.args...)); got != c.want {
				t.Errorf("%s%#x: got %s, want %s", c.call, c.args, got, c.want)
			}
		})
	}
}

func TestSocketsAreOfAFewFamilies(t *testing.T) {
	m := newMachine(t)
	var got []uint64
	for family := range uint64(unix.AF_MAX + 64) {
		for kind := range uint64(16) {
			if m.call("socket", family, kind, 0) == allow {
				got = append(got, family)
				break
			}
		}
	}
	want := []uint64{unix.AF_UNIX, unix.AF_INET, unix.AF_INET6, unix.AF_NETLINK}
	if !slices.Equal(got, want) {
		t.Errorf("families %v, want %v", got, want)
	}
}

func TestOtherTablesHaveNoCalls(t *testing.T) {
	m := newMachine(t)
	for name, id := range map[string]uint32{"i386": 0x40000003, "arm": 0x40000028, "nothing": 0, "s390": 0x80000016} {
		for _, number := range []uint32{0, 1, 11, 59, 102, 1 << 31} {
			if got := verdict(m.run(id, number)); got != "ENOSYS" {
				t.Errorf("call %d of %s: %s", number, name, got)
			}
		}
	}
	own := uint32(m.table.ID)
	top := uint32(slices.Max(slices.Collect(func(yield func(int) bool) {
		for n := range m.table.SyscallNumbers {
			if !yield(n) {
				return
			}
		}
	})))
	for _, number := range []uint32{top + 1, top + 1000, x32Bit, x32Bit | 1, x32Bit | 520, 1 << 31, 1<<32 - 1} {
		if got := verdict(m.run(own, number)); got != "ENOSYS" {
			t.Errorf("call %#x: %s", number, got)
		}
	}
}

// The search tree must say of every number what the profile says, and not what it says of the number beside it.
func TestEveryCallIsTheProfiles(t *testing.T) {
	m := newMachine(t)
	spec := &specs.Spec{Process: &specs.Process{Capabilities: &specs.LinuxCapabilities{Bounding: capabilities}}}
	profile, err := moby.GetDefaultProfile(spec)
	if err != nil {
		t.Fatal(err)
	}
	plain := map[string]string{}
	conditional := map[string]bool{"ioctl": true, "socket": true, "socketpair": true}
	for _, s := range profile.Syscalls {
		for _, name := range s.Names {
			switch {
			case len(s.Args) > 0:
				conditional[name] = true
			case s.Action == specs.ActAllow:
				plain[name] = "allow"
			default:
				plain[name] = unix.ErrnoName(unix.Errno(*s.ErrnoRet))
			}
		}
	}
	allowed := 0
	for number, name := range m.table.SyscallNumbers {
		if conditional[name] {
			continue
		}
		want := "EPERM"
		if p, ok := plain[name]; ok && !slices.Contains(subtracted, name) {
			want = p
		}
		if slices.Contains(absent, name) {
			want = "ENOSYS"
		}
		if want == "allow" {
			allowed++
		}
		if got := verdict(m.run(uint32(m.table.ID), uint32(number))); got != want {
			t.Errorf("%s (%d): got %s, want %s", name, number, got, want)
		}
	}
	if allowed < 250 {
		t.Errorf("only %d calls are allowed", allowed)
	}
}

func TestTheProgramIsSmallAndFast(t *testing.T) {
	raw, err := program()
	if err != nil {
		t.Fatal(err)
	}
	b, err := Default()
	if err != nil {
		t.Fatal(err)
	}
	if len(raw) > 400 || len(b) != 8*len(raw) {
		t.Errorf("%d instructions in %d bytes", len(raw), len(b))
	}
	// The longest way: the head, one comparison for each halving, the conditions of one call, the return.
	var longest func(at int) int
	longest = func(at int) int {
		switch r := raw[at]; r.Op & 7 {
		case 6:
			return 1
		case 5:
			if r.Op&0xf0 == 0 {
				return 1 + longest(at+1+int(r.K))
			}
			return 1 + max(longest(at+1+int(r.Jt)), longest(at+1+int(r.Jf)))
		}
		return 1 + longest(at+1)
	}
	if n := longest(0); n > 120 {
		t.Errorf("the longest way has %d instructions", n)
	} else {
		t.Logf("%d instructions, longest way %d", len(raw), n)
	}
}

func BenchmarkDefault(b *testing.B) {
	for b.Loop() {
		if _, err := Default(); err != nil {
			b.Fatal(err)
		}
	}
}
