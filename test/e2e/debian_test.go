package e2e

import (
	"archive/tar"
	"archive/zip"
	"bytes"
	"compress/gzip"
	"context"
	"crypto/md5" //nolint:gosec // the form of a package index wants it
	"crypto/sha256"
	"encoding/base64"
	"errors"
	"fmt"
	"os"
	"strings"
	"sync"
	"testing"
	"time"

	sandseav1 "github.com/sandsea/sandsea/api/sandsea/v1"
	"github.com/sandsea/sandsea/client"
	"github.com/sandsea/sandsea/internal/testkit/require"
	"github.com/sandsea/sandsea/internal/testkit/server"
)

// debian is the image of the shared server that the tests of real programs use; it is made when the first one asks.
var debian struct {
	once sync.Once
	err  error
}

const debianLimit = 10 * time.Minute

// errNoDebian: this machine cannot make one.
var errNoDebian = errors.New("no Debian root file system")

func onDebian(t testing.TB, toolkits ...string) *client.Sandbox {
	t.Helper()
	s := serve(t)
	debian.once.Do(func() {
		ctx, stop := context.WithTimeoutCause(context.Background(), debianLimit, errors.New("making the image took too long"))
		defer stop()
		debian.err = importDebian(ctx, s)
	})
	if errors.Is(debian.err, errNoDebian) {
		require.That(t, "debian", debian.err)
	}
	if debian.err != nil {
		t.Fatal(debian.err)
	}
	return open(t, of(&sandseav1.Environment{Base: "debian", Toolkits: toolkits}), func(s *sandseav1.SandboxSpec) {
		s.Limits = &sandseav1.Limits{MemoryBytes: 512 << 20, CpuMillis: 2000, DiskBytes: 1 << 30}
	})
}

func importDebian(ctx context.Context, s *server.Server) error {
	path, err := server.Debian(ctx, "python3-minimal", "python3-pip", "sudo", "procps")
	if err != nil {
		return fmt.Errorf("%w: %w", errNoDebian, err)
	}
	f, err := os.Open(path)
	if err != nil {
		return err
	}
	defer f.Close()
	up, err := s.Client.UploadImage(ctx, f)
	if err != nil {
		return err
	}
	_, _, err = s.Client.ImportImage(ctx, &sandseav1.ImportImageRequest{
		Source: &sandseav1.ImportImageRequest_Archive{Archive: &sandseav1.ArchiveSource{
			Upload: up, Format: sandseav1.ArchiveFormat_ARCHIVE_FORMAT_ROOTFS,
		}},
		Name: "debian",
	}, nil)
	return err
}

// deb makes a Debian package.
func deb(t testing.TB, name, depends, script string, files []server.File) []byte {
	t.Helper()
	pack := func(files []server.File) []byte {
		b, err := server.Tar(files)
		if err != nil {
			t.Fatal(err)
		}
		var z bytes.Buffer
		w := gzip.NewWriter(&z)
		_, _ = w.Write(b)
		_ = w.Close()
		return z.Bytes()
	}
	control := fmt.Sprintf("Package: %s\nVersion: 1.0\nArchitecture: all\nMaintainer: Test <test@example.org>\n%sDescription: test\n",
		name, map[bool]string{true: "Depends: " + depends + "\n"}[depends != ""])
	var b bytes.Buffer
	b.WriteString("!<arch>\n")
	for _, m := range []struct {
		name string
		body []byte
	}{
		{"debian-binary", []byte("2.0\n")},
		{"control.tar.gz", pack([]server.File{{Name: "./control", Body: control}, {Name: "./postinst", Body: script, Mode: 0o755}})},
		{"data.tar.gz", pack(files)},
	} {
		fmt.Fprintf(&b, "%-16s%-12d%-6d%-6d%-8s%-10d`\n", m.name, 0, 0, 0, "100644", len(m.body))
		b.Write(m.body)
		if len(m.body)%2 == 1 {
			b.WriteByte('\n')
		}
	}
	return b.Bytes()
}

func TestAptInstallsFromADirectoryInALayer(t *testing.T) {
	t.Parallel()
	debs := map[string][]byte{
		"e2e-tool": deb(t, "e2e-tool", "e2e-lib", "#!/bin/sh\nset -e\nuseradd --system --home-dir /var/lib/e2e e2e-daemon\nchown e2e-daemon /opt/e2e\n",
			[]server.File{
				{Name: "./opt/"},
				{Name: "./opt/e2e/"},
				{Name: "./usr/"},
				{Name: "./usr/bin/"},
				{Name: "./usr/bin/e2e-tool", Body: "#!/bin/sh\ncat /usr/share/e2e-lib/data\n", Mode: 0o755},
			}),
		"e2e-lib": deb(t, "e2e-lib", "", "#!/bin/sh\nexit 0\n", []server.File{
			{Name: "./usr/"}, {Name: "./usr/share/"}, {Name: "./usr/share/e2e-lib/"}, {Name: "./usr/share/e2e-lib/data", Body: "from the library\n"},
		}),
	}
	files := []server.File{{Name: "repo/"}, {Name: "etc/"}, {Name: "etc/apt/"}, {Name: "etc/apt/sources.list", Body: "deb [trusted=yes] file:/repo ./\n"}}
	var index strings.Builder
	for name, b := range debs {
		files = append(files, server.File{Name: "repo/" + name + ".deb", Body: string(b)})
		depends := ""
		if name == "e2e-tool" {
			depends = "Depends: e2e-lib\n"
		}
		fmt.Fprintf(&index, "Package: %s\nVersion: 1.0\nArchitecture: all\nMaintainer: Test <test@example.org>\n%sFilename: ./%s.deb\nSize: %d\nMD5sum: %x\nSHA256: %x\nDescription: test\n\n",
			name, depends, name, len(b), md5.Sum(b), sha256.Sum256(b)) //nolint:gosec // see above
	}
	layer(t, "apt-repository", append(files, server.File{Name: "repo/Packages", Body: index.String()}), nil)
	sb := onDebian(t, "apt-repository")
	sh(t, sb, "rm -f /etc/apt/sources.list.d/*; apt-get update 2>&1 && DEBIAN_FRONTEND=noninteractive apt-get install -y e2e-tool 2>&1")
	if got := sh(t, sb, "e2e-tool; stat -c %U /opt/e2e; dpkg -s e2e-tool | grep Status"); got != "from the library\ne2e-daemon\nStatus: install ok installed\n" {
		t.Errorf("got %q", got)
	}
	sh(t, sb, "apt-get purge -y e2e-tool 2>&1 && ! command -v e2e-tool")
}

func TestPipInstallsFromADirectoryInALayer(t *testing.T) {
	t.Parallel()
	var wheel bytes.Buffer
	z := zip.NewWriter(&wheel)
	var record strings.Builder
	for _, f := range []struct{ name, body string }{
		{"e2e_wheel/__init__.py", "def main():\n    print('from the wheel')\n"},
		{"e2e_wheel-1.0.dist-info/METADATA", "Metadata-Version: 2.1\nName: e2e-wheel\nVersion: 1.0\n"},
		{"e2e_wheel-1.0.dist-info/WHEEL", "Wheel-Version: 1.0\nGenerator: test\nRoot-Is-Purelib: true\nTag: py3-none-any\n"},
		{"e2e_wheel-1.0.dist-info/entry_points.txt", "[console_scripts]\ne2e-wheel = e2e_wheel:main\n"},
	} {
		w, err := z.Create(f.name)
		if err != nil {
			t.Fatal(err)
		}
		_, _ = w.Write([]byte(f.body))
		sum := sha256.Sum256([]byte(f.body))
		fmt.Fprintf(&record, "%s,sha256=%s,%d\n", f.name, base64.RawURLEncoding.EncodeToString(sum[:]), len(f.body))
	}
	w, err := z.Create("e2e_wheel-1.0.dist-info/RECORD")
	if err != nil {
		t.Fatal(err)
	}
	_, _ = w.Write([]byte(record.String() + "e2e_wheel-1.0.dist-info/RECORD,,\n"))
	_ = z.Close()
	layer(t, "wheels", []server.File{{Name: "wheels/"}, {Name: "wheels/e2e_wheel-1.0-py3-none-any.whl", Body: wheel.String()}}, nil)
	sb := onDebian(t, "wheels")
	sh(t, sb, "python3 -m pip install --break-system-packages --no-index --find-links /wheels e2e-wheel 2>&1")
	if got := sh(t, sb, "e2e-wheel && python3 -c 'import e2e_wheel'"); got != "from the wheel\n" {
		t.Errorf("got %q", got)
	}
}

func TestUsersAreAddedAndBecomeOneAnother(t *testing.T) {
	t.Parallel()
	sb := onDebian(t)
	sh(t, sb, `useradd -m -s /bin/bash worker && echo 'worker ALL=(ALL) NOPASSWD: ALL' >/etc/sudoers.d/worker &&
		chmod 440 /etc/sudoers.d/worker && groupadd crew && usermod -aG crew worker`)
	for line, want := range map[string]string{
		"su - worker -c 'id -un; pwd'":                                     "worker\n/home/worker\n",
		"su worker -c 'sudo -n id -un' 2>/dev/null":                        "root\n",
		"su worker -c 'sudo -n -u nobody id -un' 2>/dev/null":              "nobody\n",
		"touch /srv/f && chown worker:crew /srv/f && stat -c %U:%G /srv/f": "worker:crew\n",
		"su worker -c 'touch /etc/x' 2>/dev/null || echo denied":           "denied\n",
		"touch /srv/g && chown 65534:65534 /srv/g && stat -c %u /srv/g":    "65534\n",
	} {
		if got := sh(t, sb, line); got != want {
			t.Errorf("%s: got %q, want %q", line, got, want)
		}
	}
	cmd := client.Argv("id", "-Gn")
	cmd.User = "worker"
	if got := string(run(t, sb, cmd).GetStdout()); got != "worker crew\n" {
		t.Errorf("a user made a moment ago: %q", got)
	}
	// Without setuid, on request.
	s := serve(t)
	locked := openOn(t, s, of(&sandseav1.Environment{Base: "debian"}), func(s *sandseav1.SandboxSpec) { s.NoNewPrivs = true })
	sh(t, locked, "useradd worker && echo 'worker ALL=(ALL) NOPASSWD: ALL' >/etc/sudoers.d/worker")
	cmd = client.Shell("sudo -n id -un")
	cmd.User = "worker"
	if r := run(t, locked, cmd); r.GetResult().GetExitCode() == 0 {
		t.Errorf("no_new_privs: sudo gave %q", r.GetStdout())
	}
}

func TestThePackageDatabaseOfTheImageIsWhole(t *testing.T) {
	t.Parallel()
	sb := onDebian(t)
	// dpkg knows digests of nearly every file: that is a comparison with what was unpacked elsewhere.
	if got := sh(t, sb, "dpkg --verify | grep -v ' c /etc\\| /usr/share/\\(doc\\|man\\|locale\\)'; true"); got != "" {
		t.Errorf("files differ from their packages:\n%s", got)
	}
	if got := sh(t, sb, "stat -c '%a %U' /usr/bin/sudo /usr/bin/su /tmp /etc/shadow"); got != "4755 root\n4755 root\n1777 root\n640 root\n" {
		t.Errorf("modes: %q", got)
	}
	if got := sh(t, sb, "apt-get check 2>&1 | tail -1"); strings.Contains(got, "E:") {
		t.Errorf("apt: %s", got)
	}
}

func TestProcessOneCannotBeKilledTracedOrReplaced(t *testing.T) {
	t.Parallel()
	sb := onDebian(t)
	before := info(t, sb)
	script := `
import ctypes, os, signal, resource, errno
libc = ctypes.CDLL(None, use_errno=True)
def attempt(name, f):
    try:
        r = f()
    except OSError as e:
        r = errno.errorcode[e.errno]
    print(name, r)
def call(*a):
    r = libc.syscall(*[ctypes.c_long(x) if isinstance(x, int) else x for x in a])
    if r < 0:
        raise OSError(ctypes.get_errno(), "")
    return r
for s in range(1, 65):
    try:
        os.kill(1, s)
    except OSError:
        pass
attempt("attach", lambda: call(101, 16, 1, 0, 0))
attempt("seize", lambda: call(101, 0x4206, 1, 0, 0))
attempt("mem", lambda: open("/proc/1/mem", "r+b").close() or "opened")
attempt("exe", lambda: os.readlink("/proc/1/exe"))
attempt("root", lambda: os.listdir("/proc/1/root"))
attempt("fd", lambda: os.listdir("/proc/1/fd"))
attempt("environ", lambda: open("/proc/1/environ").read())
attempt("prlimit", lambda: resource.prlimit(1, resource.RLIMIT_NOFILE, (3, 3)))
attempt("pidfd_getfd", lambda: call(438, os.pidfd_open(1), 3, 0))
buf = ctypes.create_string_buffer(16)
here = (ctypes.c_size_t * 2)(ctypes.addressof(buf), 8)
there = (ctypes.c_size_t * 2)(0x400000, 8)
attempt("process_vm_readv", lambda: call(310, 1, ctypes.byref(here), 1, ctypes.byref(there), 1, 0))
`
	path := "/tmp/attempts.py"
	if _, err := write(t, sb, &sandseav1.WriteFileHeader{Path: path}, script); err != nil {
		t.Fatal(err)
	}
	res := run(t, sb, client.Argv("python3", path))
	out := string(res.GetStdout())
	for line := range strings.Lines(out) {
		name, got, _ := strings.Cut(strings.TrimSpace(line), " ")
		switch got {
		case "EPERM", "EACCES", "ENOSYS", "EINVAL", "EFAULT", "ESRCH":
		default:
			t.Errorf("%s of process 1: %s", name, got)
		}
	}
	if n := strings.Count(out, "\n"); n != 10 {
		t.Errorf("%d attempts: %q %q", n, out, res.GetStderr())
	}
	if after := info(t, sb); after.GetState() != before.GetState() || sh(t, sb, "echo on") != "on\n" {
		t.Errorf("after it: %v", after)
	}
}

func TestNothingOfTheHostIsSeen(t *testing.T) {
	t.Parallel()
	s := serve(t)
	sb := onDebian(t)
	for _, path := range []string{"/proc/self/mountinfo", "/proc/mounts", "/proc/net/unix", "/proc/self/cgroup", "/proc/1/cgroup", "/proc/self/environ", "/proc/cmdline", "/proc/1/cmdline"} {
		got := sh(t, sb, "cat "+path+" 2>/dev/null | tr '\\0' '\\n'; true")
		for _, word := range []string{s.Dir, "sandsea-test", s.Tag, "uppers", "/work/", "/root/"} {
			if strings.Contains(got, word) {
				t.Errorf("%s shows %q:\n%s", path, word, got)
			}
		}
	}
	if got := sh(t, sb, "find / -xdev \\( -type s -o -type b -o -type p \\) 2>/dev/null; ls /sys/fs/cgroup; true"); got != "" {
		t.Errorf("sockets, devices or groups: %q", got)
	}
	// Its own processes only: PID 1 and those of this command.
	if got := sh(t, sb, "ls -d /proc/[0-9]* | wc -l"); strings.TrimSpace(got) > "5" {
		t.Errorf("%s processes", got)
	}
	if got := sh(t, sb, "tail -n +3 /proc/net/dev | cut -d: -f1 | tr -d ' '; tail -n +2 /proc/net/route"); got != "lo\n" {
		t.Errorf("network: %q", got)
	}
	if got := sh(t, sb, "cat /proc/self/uid_map | tr -s ' '"); strings.Contains(got, "4294967295") || !strings.HasPrefix(got, " 0 ") {
		t.Errorf("ids: %q", got)
	}
	for _, line := range []string{
		"mount -t tmpfs none /mnt", "mount --bind / /mnt", "umount /proc", "mknod /tmp/sda b 8 0 && cat /tmp/sda", "swapoff -a && false || swapon /dev/sda",
		"echo 1 >/proc/sys/kernel/panic", "echo b >/proc/sysrq-trigger", "unshare -n true && false || ip link add x type dummy", "date -s 2001-01-01", "hostname other && false",
		"dmesg", "cat /proc/kcore", "chroot /proc/1/root true",
	} {
		if r := run(t, sb, client.Shell(line)).GetResult(); r.GetExitCode() == 0 && !strings.Contains(line, "kcore") && !strings.Contains(line, "sysrq") {
			t.Errorf("%s: it worked", line)
		}
	}
	sh(t, sb, "true")
}

func TestASearchThroughProcAndSysCrashesNothing(t *testing.T) {
	t.Parallel()
	sb := onDebian(t)
	cmd := client.Shell("grep -r -s -m1 nosuchword /proc /sys /dev/shm >/dev/null 2>&1; echo over")
	cmd.TimeoutMs = 8_000
	res := run(t, sb, cmd)
	if r := res.GetResult(); !r.GetTimedOut() && string(res.GetStdout()) != "over\n" {
		t.Errorf("got %v", r)
	}
	if i := info(t, sb); i.GetState() != sandseav1.SandboxState_SANDBOX_STATE_RUNNING {
		t.Errorf("ended %v", i.GetEnd())
	}
	sh(t, sb, "true")
}

func TestPythonSeesItsShareOfTheMachine(t *testing.T) {
	t.Parallel()
	sb := onDebian(t)
	got := sh(t, sb, "python3 -c 'import os; print(os.cpu_count(), len(os.sched_getaffinity(0)))'; nproc")
	var count, affinity, nproc int
	if _, err := fmt.Sscan(got, &count, &affinity, &nproc); err != nil || count > 2 || affinity > 2 || nproc > 2 || count < 1 {
		t.Errorf("two CPUs: %q, %v", got, err)
	}
	one := openOn(t, serve(t), of(&sandseav1.Environment{Base: "debian"}), func(s *sandseav1.SandboxSpec) { s.Limits.CpuMillis = 1000 })
	if got := sh(t, one, "python3 -c 'import os; print(os.cpu_count())'; nproc"); got != "1\n1\n" {
		t.Errorf("one CPU: %q", got)
	}
}

func TestTheTreeOfTheImageComesBackAsItWentIn(t *testing.T) {
	t.Parallel()
	sb := onDebian(t)
	var b bytes.Buffer
	if _, err := sb.DownloadTar(within(t, 60*time.Second), &sandseav1.DownloadTarRequest{Path: "/usr/bin"}, &b); err != nil {
		t.Fatal(err)
	}
	got := map[string]*tar.Header{}
	for r := tar.NewReader(&b); ; {
		h, err := r.Next()
		if err != nil {
			break
		}
		got[strings.TrimPrefix(h.Name, "bin/")] = h
	}
	path, err := server.Debian(t.Context(), "python3-minimal", "python3-pip", "sudo", "procps")
	if err != nil {
		t.Fatal(err)
	}
	f, err := os.Open(path)
	if err != nil {
		t.Fatal(err)
	}
	defer f.Close()
	n := 0
	for r := tar.NewReader(f); ; {
		h, err := r.Next()
		if err != nil {
			break
		}
		name, ok := strings.CutPrefix(strings.TrimPrefix(h.Name, "./"), "usr/bin/")
		if !ok || name == "" {
			continue
		}
		n++
		g := got[name]
		if g == nil || g.Mode&0o7777 != h.Mode&0o7777 && h.Typeflag != tar.TypeSymlink || g.Uid != h.Uid || g.Gid != h.Gid ||
			h.Typeflag == tar.TypeReg && (g.Typeflag != tar.TypeLink && g.Size != h.Size || g.ModTime.Unix() != h.ModTime.Unix()) ||
			h.Typeflag == tar.TypeSymlink && g.Linkname != h.Linkname {
			t.Errorf("%s: went in as %v, came back as %v", name, h, g)
		}
	}
	if n < 200 {
		t.Errorf("only %d programs compared", n)
	}
}
