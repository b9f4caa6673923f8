package attacks

import (
	"slices"
	"strings"
	"testing"

	"github.com/sandsea/sandsea/client"
)

// The calls that led out of containers, or to bugs of the kernel, before.
func TestCallsIntoTheKernelAreRefused(t *testing.T) {
	h := attacked(t)
	sb := h.open(t)
	for _, kind := range []string{"namespaces", "mounts", "kernel", "ioctls", "devices"} {
		t.Run(kind, func(t *testing.T) {
			for _, user := range []string{"root", "alice"} {
				for _, y := range attackAs(t, sb, user, kind) {
					// What the file system would refuse by itself must be refused before: there may be another one below.
					if y.outcome == "done" || strings.HasPrefix(y.outcome, "signal") || y.outcome == "ENOTTY" {
						t.Errorf("as %s: %s: %s", user, y.name, y.outcome)
					}
				}
			}
		})
	}
	t.Run("other system-call tables", func(t *testing.T) {
		for _, y := range attack(t, sb, "kernel") {
			if (strings.HasPrefix(y.name, "x32") || strings.HasPrefix(y.name, "i386")) && y.outcome != "ENOSYS" {
				t.Errorf("%s: %s", y.name, y.outcome)
			}
		}
	})
	works(t, within(t), sb)
}

func TestSwappingTheExtentsOfFilesIsRefusedInEveryForm(t *testing.T) {
	h := attacked(t)
	tries := attack(t, h.open(t), "ioctls")
	for _, name := range []string{
		"XFS_IOC_SWAPEXT", "XFS_IOC_SWAPEXT behind a high bit", "XFS_IOC_SWAPEXT behind all high bits",
		"XFS_IOC_EXCHANGE_RANGE", "EXT4_IOC_MOVE_EXT", "BTRFS_IOC_SNAP_CREATE_V2",
	} {
		// EPERM is the filter's word; a file system that was asked would say ENOTTY.
		if got := outcome(t, tries, name); got != "EPERM" {
			t.Errorf("%s: %s", name, got)
		}
	}
	if got := outcome(t, tries, "another project's quota"); got == "done" {
		t.Error("a file leaves the account of its project")
	}
}

func TestSocketsAreOfTheFamiliesThatEndAtTheSandbox(t *testing.T) {
	h := attacked(t)
	var got []string
	for _, y := range attack(t, h.open(t), "sockets") {
		if y.outcome == "done" {
			got = append(got, y.name)
		}
	}
	// unix, inet, inet6, netlink, packet; routes, user, diagnosis, audit, events, generic.
	want := []string{
		"family 1", "family 2", "family 10", "family 16", "family 17",
		"netlink 0", "netlink 2", "netlink 4", "netlink 9", "netlink 15", "netlink 16",
	}
	for _, name := range got {
		if !slices.Contains(want, name) {
			t.Errorf("a socket of %s", name)
		}
	}
	for _, name := range want[:3] {
		if !slices.Contains(got, name) {
			t.Errorf("no socket of %s, which programs need", name)
		}
	}
}

// DeepSeek's first kernel crash was a recursive grep that came to /proc/kpagecgroup.
func TestReadingAllOfProcAndSysTellsNothingAndHurtsNobody(t *testing.T) {
	h := attacked(t)
	sb := h.open(t)
	for _, user := range []string{"root", "alice"} {
		tries := attackAs(t, sb, user, "walk", "20", h.Dir, h.Tag, h.witness.ID, h.Binary, "init=")
		for _, y := range tries {
			switch y.name {
			case "found":
				// Its own arguments hold what it looks for.
				if !strings.HasSuffix(y.outcome, "/cmdline") || y.outcome == "/proc/cmdline" {
					t.Errorf("as %s: %s tells of %s", user, y.outcome, y.more)
				}
			case "can write":
				t.Errorf("as %s: %s can be written to", user, y.outcome)
			case "/proc", "/sys", "/dev":
				if y.outcome != "done" {
					t.Errorf("as %s: the walk through %s %s", user, y.name, y.outcome)
				}
			}
		}
		if n := outcome(t, tries, "walked"); len(n) < 3 {
			t.Errorf("as %s: only %s files", user, n)
		}
	}
	// The same by the tool that did it. It ends by itself or is ended.
	cmd := client.Shell("grep -r -s -q nothing-has-this /proc/[a-z]* /sys")
	cmd.TimeoutMs = 4_000
	if r := run(t, sb, cmd).GetResult(); r.GetExitCode() == 0 {
		t.Errorf("grep: %v", r)
	}
	works(t, within(t), sb)
}

func TestWhatIsMaskedReadsAsEmpty(t *testing.T) {
	h := attacked(t)
	sb := h.open(t)
	for _, path := range []string{
		"/proc/kcore", "/proc/kallsyms", "/proc/kmsg", "/proc/keys", "/proc/kpagecgroup", "/proc/kpagecount",
		"/proc/kpageflags", "/proc/sysrq-trigger", "/proc/timer_list", "/proc/cmdline", "/proc/iomem",
	} {
		if out := sh(t, sb, "test ! -e "+path+" || head -c 16 "+path); out != "" {
			t.Errorf("%s gives %q", path, out)
		}
	}
	for _, path := range []string{
		"/sys/kernel", "/sys/firmware", "/sys/devices/virtual/block", "/sys/fs/cgroup", "/proc/acpi", "/proc/pressure",
	} {
		if out := sh(t, sb, "test ! -e "+path+" || ls -A "+path); out != "" {
			t.Errorf("%s holds %q", path, out)
		}
	}
	for _, line := range []string{
		// What covers it swallows it.
		"test ! -e /proc/sysrq-trigger || { echo h > /proc/sysrq-trigger; test -c /proc/sysrq-trigger; }",
		"! echo '|/bin/attack' > /proc/sys/kernel/core_pattern",
		"! echo 1 > /proc/sys/vm/drop_caches",
		"! echo 1 > /proc/sys/net/ipv4/ip_forward",
		"! echo /bin/attack > /proc/sys/kernel/modprobe",
		"! echo /bin/attack > /sys/kernel/uevent_helper",
		"! echo 1 > /sys/module/kernel/parameters/panic",
	} {
		sh(t, sb, "exec 2>/dev/null; "+line)
	}
}

func TestACrashLeavesNoCore(t *testing.T) {
	h := attacked(t)
	sb := h.open(t)
	cmd := client.Argv("/bin/attack", "crash")
	cmd.Cwd = "/root"
	if r := run(t, sb, cmd).GetResult(); r.GetSignalName() != "SIGSEGV" {
		t.Errorf("%v", r)
	}
	if out := sh(t, sb, "ulimit -c; ulimit -H -c; ls -A /root"); out != "0\n0\n" && out != "1\n1\n" {
		t.Errorf("limits and files: %q", out)
	}
}
