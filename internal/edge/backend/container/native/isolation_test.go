package native

import (
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"runtime"
	"slices"
	"strconv"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/moby/sys/mountinfo"

	"github.com/sandsea/sandsea/api/errdefs"
	"github.com/sandsea/sandsea/internal/chronus"
	"github.com/sandsea/sandsea/internal/edge/backend"
	"github.com/sandsea/sandsea/internal/image"
	"github.com/sandsea/sandsea/internal/linux/pidfd"
	"github.com/sandsea/sandsea/internal/node"
	"github.com/sandsea/sandsea/internal/sandbox"
)

var user = chronus.IDs{UID: 1000, GID: 1000}

func TestASandboxIsIsolated(t *testing.T) {
	m := use(t)
	e := m.open(t)
	b := e.start(t, m.plan(), smallLimits)

	t.Run("its namespaces are its own", func(t *testing.T) {
		for _, ns := range []string{"user", "mnt", "pid", "ipc", "uts", "net", "cgroup"} {
			own, err := os.Readlink("/proc/self/ns/" + ns)
			if err != nil {
				t.Fatal(err)
			}
			if theirs := b.sh("readlink /proc/self/ns/" + ns); theirs == own || !strings.HasPrefix(theirs, ns) {
				t.Errorf("%s namespace %q, the host's is %q", ns, theirs, own)
			}
		}
	})
	t.Run("root inside is nobody outside", func(t *testing.T) {
		want := fmt.Sprintf("0 %d 65536", b.UIDBase())
		for _, f := range []string{"uid_map", "gid_map"} {
			if got := strings.Join(strings.Fields(b.sh("cat /proc/self/"+f)), " "); got != want {
				t.Errorf("%s = %q, want %q", f, got, want)
			}
		}
		if got := b.sh("id -u; id -g"); got != "0\n0" {
			t.Errorf("ids inside %q", got)
		}
		out, end := b.begin(chronus.IDs{}, "sleep", "60")
		var st syscall.Stat_t
		pids, err := b.group.Pids()
		if err != nil {
			t.Fatal(err)
		}
		for _, pid := range pids {
			if err := syscall.Stat("/proc/"+strconv.Itoa(pid), &st); err != nil {
				t.Fatal(err)
			}
			// The directory of a process that is not dumpable is root's, whoever runs it.
			if st.Uid != b.UIDBase() && pid != b.Pid() {
				t.Errorf("process %d is run by %d", pid, st.Uid)
			}
		}
		b.boxMu.Lock()
		n := b.number
		b.boxMu.Unlock()
		if err := b.Channel().Signal(t.Context(), n, syscall.SIGKILL); err != nil {
			t.Error(err)
		}
		_ = out()
		end()
	})
	t.Run("it sees no process and no mount of the host", func(t *testing.T) {
		if pids := strings.Fields(b.sh("ls /proc | grep '^[0-9]'")); len(pids) > 5 {
			t.Errorf("processes inside: %q", pids)
		}
		mounts := b.sh("cat /proc/self/mountinfo")
		for line := range strings.Lines(mounts) {
			f := strings.Fields(line)
			at, dash := f[4], slices.Index(f, "-")
			if dash < 0 {
				t.Fatalf("line %q", line)
			}
			switch fstype := f[dash+1]; fstype {
			case "overlay", "proc", "sysfs", "tmpfs", "devpts", "mqueue":
			default:
				t.Errorf("a mount of %s at %s", fstype, at)
			}
			if strings.Contains(line, m.dir) || strings.Contains(line, string(b.id)) {
				t.Errorf("the mount table tells of the host: %s", line)
			}
			if strings.Contains(line, "master:") || strings.Contains(line, "shared:") {
				t.Errorf("a mount that hears of the host's: %s", line)
			}
		}
		if n := strings.Count(mounts, " / / "); n != 1 {
			t.Errorf("%d mounts at /:\n%s", n, mounts)
		}
	})
	t.Run("its control groups look like the whole tree", func(t *testing.T) {
		for line := range strings.Lines(b.sh("cat /proc/self/cgroup")) {
			path := strings.TrimSpace(line[strings.LastIndex(line, ":")+1:])
			// v1 trees that we do not use show where the platform is, v2 the command's group.
			if strings.Contains(path, m.tag) || strings.Contains(path, string(b.id)) {
				t.Errorf("control group %q", strings.TrimSpace(line))
			}
		}
		if out := b.sh("ls /sys/fs/cgroup"); out != "" {
			t.Errorf("/sys/fs/cgroup holds %q", out)
		}
	})
	t.Run("what could tell of the host or hurt it is masked", func(t *testing.T) {
		for _, p := range []string{"kcore", "keys", "sysrq-trigger", "kpagecount", "timer_list", "kallsyms"} {
			if out := b.sh("test ! -e /proc/" + p + " || head -c 64 /proc/" + p); out != "" {
				t.Errorf("/proc/%s gives %q", p, out)
			}
		}
		if out := b.sh("ls /sys/firmware /sys/kernel 2>&1 | grep -v :"); strings.TrimSpace(out) != "" {
			t.Errorf("/sys/firmware and /sys/kernel hold %q", out)
		}
		for _, script := range []string{
			"test -e /proc/sysrq-trigger && ! test -c /proc/sysrq-trigger", // it would be a device that swallows all
			"echo 1 > /proc/sys/vm/drop_caches", "echo x > /proc/sys/kernel/core_pattern", "touch /sys/x",
			"mount -o remount,rw /proc/sys", "umount /proc/kcore", "umount /sys", "mount -t proc p /tmp",
			"cat /etc/disk", "mknod /tmp/d b 254 0", "dmesg", "echo 1 > /dev/new", "unshare -U true",
			"chroot /proc/1/root true",
		} {
			if out, ws := b.run(chronus.IDs{}, script); ws == 0 {
				t.Errorf("%s works: %q", script, out)
			}
		}
	})
	t.Run("PID 1 is out of reach", func(t *testing.T) {
		for _, script := range []string{
			"cat /proc/1/environ", "ls /proc/1/fd/", "readlink /proc/1/exe", "cat /proc/1/maps", "head -c 1 /proc/1/mem",
			"cat /proc/1/stack",
		} {
			if out, ws := b.run(chronus.IDs{}, script); ws == 0 && out != "" {
				t.Errorf("%s gives %q", script, out)
			}
		}
		b.sh("kill -9 1; kill -TERM 1; kill -SEGV 1; kill -STOP 1; true")
		if got := b.sh("echo alive"); got != "alive" {
			t.Errorf("after signals to PID 1: %q", got)
		}
		if done, err := pidfd.Done(b.pidfd); done || err != nil {
			t.Errorf("PID 1 done %v, %v", done, err)
		}
	})
	t.Run("devices are those that everybody may use", func(t *testing.T) {
		b.sh("echo x > /dev/null && head -c 4 /dev/zero | wc -c && head -c 4 /dev/urandom | wc -c")
		b.sh("test -L /dev/ptmx && test -e /dev/pts/ptmx && test -L /dev/fd && test -d /dev/shm")
		b.sh("echo x > /dev/shm/x && rm /dev/shm/x")
		if out, ws := b.run(chronus.IDs{}, "rm /dev/null || touch /dev/x"); ws == 0 {
			t.Errorf("/dev can be changed: %s", out)
		}
		if out := b.sh("ls -ln /dev/null"); !strings.Contains(out, " 0        0 ") && !strings.Contains(out, "0 0") {
			t.Errorf("/dev/null: %s", out)
		}
	})
	t.Run("its network has a loopback and nothing else", func(t *testing.T) {
		out := b.sh("cat /proc/net/dev")
		if strings.Count(out, ":") != 1 || !strings.Contains(out, "lo:") {
			t.Errorf("devices:\n%s", out)
		}
		b.sh("ping -c 1 -W 2 127.0.0.1")
		if out := b.sh("ls /sys/class/net"); out != "" {
			t.Errorf("/sys/class/net tells of %q", out)
		}
	})
	t.Run("its name is its own", func(t *testing.T) {
		if got := b.sh("hostname"); got != "box" {
			t.Errorf("hostname %q", got)
		}
	})
	t.Run("every command runs under the filter, with few capabilities", func(t *testing.T) {
		got := strings.Fields(b.sh("grep -E '^(Seccomp|NoNewPrivs|CapBnd|CapEff):' /proc/self/status"))
		caps := fmt.Sprintf("%016x", e.cfg.Caps)
		want := []string{"CapEff:", caps, "CapBnd:", caps, "NoNewPrivs:", "0", "Seccomp:", "2"}
		if !slices.Equal(got, want) {
			t.Errorf("status %q, want %q", got, want)
		}
	})
}

func TestRootInsideHasTheRightsOfRoot(t *testing.T) {
	m := use(t)
	e := m.open(t)
	b := e.start(t, m.plan(), smallLimits)
	b.sh("touch /home/f && chown 1000:1000 /home/f && chmod 4711 /home/f")
	if got := b.sh("stat -c '%u %g %a' /home/f"); got != "1000 1000 4711" {
		t.Errorf("stat %q", got)
	}
	b.sh("chown 65535:65535 /home/f")
	if out, ws := b.run(chronus.IDs{}, "chown 65536 /home/f"); ws == 0 {
		t.Errorf("an id beyond the range is taken: %s", out)
	}
	if got := b.sh("stat -c '%u %g %a' /bin/busybox /tmp /etc/passwd"); got != "0 0 755\n0 0 1777\n0 0 644" {
		t.Errorf("files of the layer: %q", got)
	}
	b.sh("rm /etc/group && test ! -e /etc/group && mkdir /etc/group && rmdir /etc/group")
	b.sh("rm -r /usr && mkdir /usr && test -z \"$(ls /usr)\"") // opaque
	t.Run("set-user-id works", func(t *testing.T) {
		if got, ws := b.run(user, "/bin/su root -c 'id -u'"); got != "0" || ws != 0 {
			t.Errorf("su as a user gives %q, %v", got, ws)
		}
	})
	t.Run("a user is no root", func(t *testing.T) {
		for _, script := range []string{"touch /etc/x", "chown 0 /tmp", "cat /proc/1/environ", "echo x > /etc/passwd"} {
			if out, ws := b.run(user, script); ws == 0 {
				t.Errorf("%s works: %q", script, out)
			}
		}
		if got, _ := b.run(user, "id -u"); got != "1000" {
			t.Errorf("id %q", got)
		}
	})
	t.Run("set-user-id gains nothing under no_new_privs", func(t *testing.T) {
		p := m.plan()
		p.NoNewPrivs = true
		b := e.start(t, p, smallLimits)
		if got, ws := b.run(user, "/bin/su root -c 'id -u'"); ws == 0 {
			t.Errorf("su as a user gives %q", got)
		}
		if b.Enforcement()["no_new_privs"] == "" {
			t.Errorf("not named: %v", b.Enforcement())
		}
	})
	t.Run("owners outside are of the range", func(t *testing.T) {
		up, err := m.uppers.Find(string(b.id))
		if err != nil {
			t.Fatal(err)
		}
		defer up.Close()
		var st syscall.Stat_t
		if err := syscall.Stat(fmt.Sprintf("/proc/self/fd/%d/home/f", up.Dir.Fd()), &st); err != nil {
			t.Fatal(err)
		}
		if st.Uid != b.UIDBase()+65535 {
			t.Errorf("owner outside %d, want %d", st.Uid, b.UIDBase()+65535)
		}
	})
}

func TestLimitsHold(t *testing.T) {
	m := use(t)
	e := m.open(t)

	t.Run("memory: the command is killed, the sandbox lives and the kill is counted", func(t *testing.T) {
		l := smallLimits
		l.Memory = 32 << 20
		b := e.start(t, m.plan(), l)
		// A process whose own memory grows, not the page cache.
		_, ws := b.run(chronus.IDs{}, "awk 'BEGIN{x=\"0123456789abcdef\"; while(1) x = x x}'")
		if ws.Signal() != syscall.SIGKILL && ws.ExitStatus() != 128+9 {
			t.Errorf("status %v, exit %d", ws.Signal(), ws.ExitStatus())
		}
		if n, err := b.OOMKills(); err != nil || n < 1 {
			t.Errorf("%d kills counted, %v", n, err)
		}
		if got := b.sh("echo alive"); got != "alive" {
			t.Errorf("got %q", got)
		}
		if u, err := b.Usage(t.Context()); err != nil || u.MemoryPeak > l.Memory || u.MemoryPeak == 0 {
			t.Errorf("peak %d, %v, limit %d", u.MemoryPeak, err, l.Memory)
		}
	})
	t.Run("memory: what lies in /dev/shm counts", func(t *testing.T) {
		l := smallLimits
		l.Memory = 32 << 20
		b := e.start(t, m.plan(), l)
		if _, ws := b.run(chronus.IDs{}, "dd if=/dev/zero of=/dev/shm/x bs=1M count=64 2>&1"); ws == 0 {
			t.Error("64 MiB fit into /dev/shm of a sandbox with 32")
		}
	})
	t.Run("pids: a fork bomb is contained and can be killed", func(t *testing.T) {
		b := e.start(t, m.plan(), smallLimits)
		out, _ := b.begin(chronus.IDs{}, "/bin/sh", "-c", "f() { f | f & }; f; f; f; sleep 60")
		begin := time.Now()
		var most int64
		for time.Since(begin) < time.Second || most < smallLimits.Pids/2 && time.Since(begin) < patience {
			// The controller's own count goes one too far for the moment in which it refuses.
			pids, err := b.group.Pids()
			if err != nil {
				t.Fatal(err)
			}
			most = max(most, int64(len(pids)))
		}
		if most > smallLimits.Pids {
			t.Errorf("%d processes, limit %d", most, smallLimits.Pids)
		}
		if most < smallLimits.Pids/2 {
			t.Errorf("only %d processes: no bomb", most)
		}
		b.stop(t)
		_ = out()
	})
	t.Run("cpu: two loops use what one processor's half gives", func(t *testing.T) {
		l := smallLimits
		l.CPUMillis = 500
		b := e.start(t, m.plan(), l)
		begin := time.Now()
		u0, err := b.Usage(t.Context())
		if err != nil {
			t.Fatal(err)
		}
		out, _ := b.begin(chronus.IDs{}, "/bin/sh", "-c", "(while :; do :; done) & while :; do :; done")
		for time.Since(begin) < time.Second {
			runtime.Gosched()
			if _, err := b.Usage(t.Context()); err != nil {
				t.Fatal(err)
			}
			<-time.After(20 * time.Millisecond)
		}
		u, err := b.Usage(t.Context())
		took := time.Since(begin)
		if err != nil {
			t.Fatal(err)
		}
		// One period of 100 ms at each end may count whole.
		if used := u.CPU - u0.CPU; used > took/2+150*time.Millisecond {
			t.Errorf("%v of CPU in %v", used, took)
		}
		b.stop(t)
		_ = out()
	})
	t.Run("cpu: a workload sees its quota", func(t *testing.T) {
		b := e.start(t, m.plan(), smallLimits)
		if got := b.sh("nproc; cat /sys/devices/system/cpu/online"); got != "1\n0" {
			t.Errorf("nproc and online: %q", got)
		}
	})
	t.Run("disk", func(t *testing.T) {
		l := smallLimits
		l.Disk = 16 << 20
		b := e.start(t, m.plan(), l)
		out, ws := b.run(chronus.IDs{}, "dd if=/dev/urandom of=/root/x bs=1M count=40 conv=fsync 2>&1")
		if ws == 0 {
			t.Errorf("40 MiB fit: %s", out)
		}
		b.sh("rm /root/x && echo more > /root/y")
	})
	t.Run("open files", func(t *testing.T) {
		b := e.start(t, m.plan(), smallLimits)
		if got := b.sh("ulimit -n; ulimit -Hn"); got != "1024\n1024" {
			t.Errorf("limits %q", got)
		}
		l := smallLimits
		l.OpenFiles = e.noFile + 1
		_, err := e.Start(t.Context(), backend.Spec{ID: newID(t), Plan: m.plan(), Limits: l})
		if !errors.Is(err, errdefs.FailedPrecondition) || errdefs.From(err).Field != "limits.open_files" {
			t.Errorf("a limit beyond the node's: %v", err)
		}
	})
	t.Run("all in force are named", func(t *testing.T) {
		b := e.start(t, m.plan(), smallLimits)
		got := b.Enforcement()
		for _, f := range []string{
			node.FeatureMemory, node.FeatureCPU, node.FeaturePids, node.FeatureDisk, node.FeatureOpenFiles,
			node.FeatureOutput, node.FeatureKill, node.FeatureUserNS, node.FeatureSeccomp, node.FeatureLayers,
			node.FeatureNetwork,
		} {
			if got[f] == "" {
				t.Errorf("%s is not named: %v", f, got)
			}
		}
	})
}

func TestAStartThatCannotBeIsRefusedAndLeavesNothing(t *testing.T) {
	m := use(t)
	e := m.open(t)
	before := m.left(t)
	for name, c := range map[string]struct {
		change func(*sandbox.Limits)
		layers []image.Digest
		kind   errdefs.Kind
	}{
		"a layer that is not here": {
			func(*sandbox.Limits) {}, []image.Digest{"sha256:" + image.Digest(strings.Repeat("0", 64))}, errdefs.NotFound,
		},
		"no layer":          {func(*sandbox.Limits) {}, nil, errdefs.Invalid},
		"no memory limit":   {func(l *sandbox.Limits) { l.Memory = 0 }, m.plan().Layers, errdefs.Invalid},
		"no pids limit":     {func(l *sandbox.Limits) { l.Pids = 0 }, m.plan().Layers, errdefs.Invalid},
		"no disk limit":     {func(l *sandbox.Limits) { l.Disk = 0 }, m.plan().Layers, errdefs.Invalid},
		"no open files":     {func(l *sandbox.Limits) { l.OpenFiles = 0 }, m.plan().Layers, errdefs.Invalid},
		"memory for nobody": {func(l *sandbox.Limits) { l.Memory = 64 << 10 }, m.plan().Layers, errdefs.FailedPrecondition},
	} {
		t.Run(name, func(t *testing.T) {
			l := smallLimits
			c.change(&l)
			p := m.plan()
			p.Layers = c.layers
			i, err := e.Start(t.Context(), backend.Spec{ID: newID(t), Plan: p, Limits: l})
			if err == nil {
				_, _ = i.Stop(t.Context(), 0)
			}
			if !errors.Is(err, c.kind) {
				t.Errorf("err = %v, want %s", err, c.kind)
			}
			if left := m.left(t); !slices.Equal(left, before) {
				t.Errorf("left: %q", left)
			}
		})
	}
}

func TestLayersStack(t *testing.T) {
	m := use(t)
	above, err := m.layer(smallTar(t, map[string]string{
		"etc/passwd": "above\n", "opt/tool": "tool\n",
	}, "bin/ls"))
	if err != nil {
		t.Fatal(err)
	}
	p := m.plan()
	p.Layers = append(p.Layers, above)
	b := m.open(t).start(t, p, smallLimits)
	if got := b.sh("cat /etc/passwd /opt/tool"); got != "above\ntool" {
		t.Errorf("files of the upper layer: %q", got)
	}
	if out := b.sh("test -e /bin/ls && echo there; test -e /bin/cat && echo cat"); out != "cat" {
		t.Errorf("whiteout: %q", out)
	}
}

func TestProbeFindsEverythingThatTheTestsUse(t *testing.T) {
	m := use(t)
	c, err := m.open(t).Probe(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	for _, f := range c.Features {
		if f.Status != node.OK && !f.Optional {
			t.Errorf("%s: %s, %s", f.Name, f.Status, f.Fix)
		}
		if f.Status == node.OK && f.Mechanism == "" {
			t.Errorf("%s without a mechanism", f.Name)
		}
	}
	if c.Kernel == "" || c.CPUs < 1 || c.Memory < 1<<20 || c.NoFile < 1 || c.PidMax < 1 || c.Cgroup == "" {
		t.Errorf("capabilities %+v", c)
	}
	if !slices.IsSortedFunc(c.Features, func(a, b node.Feature) int { return strings.Compare(a.Name, b.Name) }) {
		t.Error("features are not sorted")
	}
}

// countMounts counts what is mounted in our namespace, but for what lies below the directory of temporary files: other
// tests mount there meanwhile, and leak.Compare knows what is ours.
func countMounts(tb testing.TB) int {
	tb.Helper()
	table, err := mountinfo.GetMounts(func(m *mountinfo.Info) (skip, stop bool) {
		return strings.HasPrefix(m.Mountpoint, os.TempDir()+"/"), false
	})
	if err != nil {
		tb.Fatal(err)
	}
	return len(table)
}

func countFiles(tb testing.TB, pid string) int {
	tb.Helper()
	e, err := os.ReadDir(filepath.Join("/proc", pid, "fd"))
	if err != nil {
		tb.Fatal(err)
	}
	return len(e)
}
