package wire

import (
	"math"
	"net/netip"
	"os"
	"strings"
	"syscall"

	"github.com/sandsea/sandsea/api/errdefs"
	"github.com/sandsea/sandsea/internal/chronus"
)

// Limits of a command, the kernel's own or below them.
const (
	MaxArguments = 2 << 20 // bytes of argv and env with their ends
	MaxString    = 131071  // bytes of one string, without its end
	maxStrings   = 1 << 18
	maxGroups    = 65536
	maxPath      = 4096
	maxFilter    = 4096
	maxCPU       = 1024
)

// Capability numbers of capabilities(7).
const (
	capChown          = 0
	capDacOverride    = 1
	capFowner         = 3
	capFsetid         = 4
	capKill           = 5
	capSetgid         = 6
	capSetuid         = 7
	capSetpcap        = 8
	capNetBindService = 10
	capNetRaw         = 13
	capSysChroot      = 18
	capMknod          = 27
	capAuditWrite     = 29
	capSetfcap        = 31
)

// DefaultCaps is the bounding set of a container sandbox: with it, root of the sandbox's own user namespace can install
// packages, make users, and change to them. It has nothing that reaches the machine.
const DefaultCaps uint64 = 1<<capChown | 1<<capDacOverride | 1<<capFowner | 1<<capFsetid | 1<<capKill | 1<<capSetgid |
	1<<capSetuid | 1<<capSetpcap | 1<<capNetBindService | 1<<capNetRaw | 1<<capSysChroot | 1<<capMknod |
	1<<capAuditWrite | 1<<capSetfcap

// Setup is what sandsea-init makes of the namespaces that it was born in.
type Setup struct {
	Hostname string // at most 63 bytes; empty leaves it
	// OpenFiles is the hard and soft limit of everything that runs inside; 0 leaves the inherited one. More than the
	// inherited hard limit is a failed set-up.
	OpenFiles  int64
	NoNewPrivs bool
	Caps       uint64 // bounding set; DefaultCaps
	// Filter is a classic BPF program, in the kernel's layout of 8 bytes per instruction. Empty means none.
	Filter []byte
	// CPUs is the affinity of everything inside; empty leaves it.
	CPUs []int
	// VisibleCPUs is how many processors /sys shows; 0 means as many as in CPUs, or all.
	VisibleCPUs int
	ShmBytes    int64 // of /dev/shm; 0 means 64 MiB
	// Resolver is the IPv4 address that /etc/resolv.conf names; the zero Addr leaves the file as it is.
	Resolver netip.Addr
	// Root is the detached mount of the root file system, for a sandsea-init that the spawner gave none; nil otherwise.
	Root *os.File
}

const (
	planMagic      = 0x4e4c5053
	planSize       = 256
	planNoNewPrivs = 1
	specMagic      = 0x43505353
	specSize       = 64
)

// encode gives the bytes of the plan memfd.
func (s *Setup) encode() ([]byte, error) {
	invalid := func(field, limit, format string, args ...any) error {
		return errdefs.New(errdefs.Invalid, "sandbox set-up", format, args...).WithField(field, limit)
	}
	visible := s.VisibleCPUs
	if visible == 0 {
		visible = len(s.CPUs)
	}
	switch {
	case len(s.Hostname) > 63:
		return nil, invalid("hostname", "63 bytes", "hostname of %d bytes", len(s.Hostname))
	case strings.ContainsRune(s.Hostname, 0):
		return nil, invalid("hostname", "", "hostname contains NUL")
	case s.OpenFiles < 0:
		return nil, invalid("open_files", "", "open files %d", s.OpenFiles)
	case s.ShmBytes < 0 || s.ShmBytes > math.MaxInt64/2:
		return nil, invalid("shm_bytes", "", "shared memory of %d bytes", s.ShmBytes)
	case len(s.Filter)%8 != 0 || len(s.Filter) > 8*maxFilter:
		return nil, invalid("filter", "4096 instructions", "filter of %d bytes", len(s.Filter))
	case s.Resolver.IsValid() && !s.Resolver.Is4():
		return nil, invalid("resolver", "", "resolver %s is no IPv4 address", s.Resolver)
	case visible < 0 || visible > 65536:
		return nil, invalid("visible_cpus", "65536", "%d visible processors", visible)
	}
	b := make([]byte, planSize, planSize+len(s.Filter))
	le.PutUint32(b[0:], planMagic)
	le.PutUint32(b[4:], Version)
	le.PutUint32(b[8:], uint32(planSize+len(s.Filter)))
	if s.NoNewPrivs {
		le.PutUint32(b[12:], planNoNewPrivs)
	}
	le.PutUint64(b[16:], s.Caps)
	le.PutUint64(b[24:], uint64(s.OpenFiles))
	le.PutUint64(b[32:], uint64(s.ShmBytes))
	le.PutUint32(b[40:], uint32(visible))
	le.PutUint32(b[44:], uint32(len(s.Filter)/8))
	copy(b[48:112], s.Hostname)
	for _, cpu := range s.CPUs {
		if cpu < 0 || cpu >= maxCPU {
			return nil, invalid("cpus", "1023", "processor %d", cpu)
		}
		b[112+cpu/8] |= 1 << (cpu % 8)
	}
	if s.Resolver.IsValid() {
		copy(b[240:255], s.Resolver.String())
	}
	return append(b, s.Filter...), nil
}

// encodeSpec gives the bytes of the spec memfd of a command, or of a file helper, which has ids only.
func encodeSpec(ids chronus.IDs, umask uint32, argv, env []string, cwd string) ([]byte, error) {
	invalid := func(field, limit, format string, args ...any) error {
		return errdefs.New(errdefs.Invalid, "command", format, args...).WithField(field, limit)
	}
	if ids.UID == math.MaxUint32 || ids.GID == math.MaxUint32 {
		return nil, invalid("user", "4294967294", "user %d, group %d", ids.UID, ids.GID)
	}
	if len(ids.Groups) > maxGroups {
		return nil, invalid("groups", "65536", "%d groups", len(ids.Groups))
	}
	if umask > 0o777 {
		return nil, invalid("umask", "0777", "umask %#o", umask)
	}
	if len(cwd) >= maxPath {
		return nil, &chronus.StartError{Step: chronus.StepCwd, Errno: syscall.ENAMETOOLONG}
	}
	total := 0
	for _, group := range []struct {
		field   string
		strings []string
	}{{"argv", argv}, {"env", env}, {"cwd", []string{cwd}}} {
		for i, s := range group.strings {
			if strings.IndexByte(s, 0) >= 0 {
				return nil, invalid(group.field, "", "%s[%d] contains NUL", group.field, i)
			}
			if len(s) > MaxString {
				return nil, &chronus.StartError{Step: chronus.StepExec, Errno: syscall.E2BIG}
			}
			total += len(s) + 1
		}
	}
	if total-len(cwd)-1 > MaxArguments || len(argv) > maxStrings || len(env) > maxStrings {
		return nil, &chronus.StartError{Step: chronus.StepExec, Errno: syscall.E2BIG}
	}
	size := specSize + 4*len(ids.Groups) + total
	b := make([]byte, specSize, size)
	le.PutUint32(b[0:], specMagic)
	le.PutUint32(b[4:], Version)
	le.PutUint32(b[8:], uint32(size))
	le.PutUint32(b[12:], umask)
	le.PutUint32(b[16:], ids.UID)
	le.PutUint32(b[20:], ids.GID)
	le.PutUint32(b[24:], uint32(len(ids.Groups)))
	le.PutUint32(b[28:], uint32(len(argv)))
	le.PutUint32(b[32:], uint32(len(env)))
	for _, g := range ids.Groups {
		b = le.AppendUint32(b, g)
	}
	for _, list := range [][]string{argv, env, {cwd}} {
		for _, s := range list {
			b = append(b, s...)
			b = append(b, 0)
		}
	}
	return b, nil
}
