package attacks

import (
	"archive/tar"
	"bytes"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"github.com/sandsea/sandsea/api/errdefs"
	sandseav1 "github.com/sandsea/sandsea/api/sandsea/v1"
	"github.com/sandsea/sandsea/client"
	"github.com/sandsea/sandsea/internal/testkit/server"
)

// without leaves entries out of the image, with all below them.
func (h *house) without(names ...string) []server.File {
	return slices.DeleteFunc(slices.Clone(h.files), func(f server.File) bool {
		return slices.ContainsFunc(names, func(n string) bool {
			return f.Name == n || f.Name == n+"/" || strings.HasPrefix(f.Name, n+"/")
		})
	})
}

// look is run in sandboxes of hostile images: what is mounted there must be the platform's.
const look = `set -e
test "$(stat -c %F /dev /proc /sys | sort -u)" = directory
test "$(stat -f -c %T /proc)" = proc
test "$(stat -f -c %T /sys)" = sysfs
test "$(stat -f -c %T /dev)" = tmpfs
test "$(stat -c '%F %t %T' /dev/null)" = 'character special file 1 3'
test -z "$(cat /dev/null)"
echo x > /dev/null
echo x > /dev/shm/x
test "$(readlink /proc/self)" -gt 1
test -z "$(head -c 16 /proc/kcore 2>/dev/null)"
test -z "$(ls -A /sys/kernel)"
echo mine`

// The build of a root file system by path followed links of the image: CVE-2021-30465, CVE-2025-31133 (/dev/null),
// CVE-2025-52565 (/dev/console), CVE-2025-52881 and CVE-2019-19921 (/proc), CVE-2026-41579 (/dev).
func TestImagesWhoseMountPointsLeadElsewhere(t *testing.T) {
	h := attacked(t)
	link := func(name, to string) []server.File { return []server.File{{Name: name, Link: to}} }
	file := func(name string) []server.File { return []server.File{{Name: name, Body: "of the image"}} }
	for _, c := range []struct {
		name    string
		without []string
		with    []server.File
		refused bool
	}{
		{"dev is a link", []string{"dev"}, link("dev", "/etc"), true},
		{"dev is a link to a descriptor", []string{"dev"}, link("dev", "/proc/self/fd/4"), true},
		{"dev is a link upwards", []string{"dev"}, link("dev", "../../../../dev"), true},
		{"dev is a file", []string{"dev"}, file("dev"), true},
		{"proc is a link", []string{"proc"}, link("proc", "/etc"), true},
		{"proc is a link to the root of init", []string{"proc"}, link("proc", "/proc/1/root"), true},
		{"proc is a file", []string{"proc"}, file("proc"), true},
		{"sys is a link", []string{"sys"}, link("sys", "tmp"), true},
		{"sys is a file", []string{"sys"}, file("sys"), true},
		{"none of them is there", []string{"dev", "proc", "sys"}, nil, false},
		{"dev/shm is a link", nil, link("dev/shm", "/etc"), false},
		{"dev/pts is a link", nil, link("dev/pts", "/etc"), false},
		{"dev/mqueue is a link", nil, link("dev/mqueue", "/etc"), false},
		{"dev/null is a link", nil, link("dev/null", "/etc/passwd"), false},
		{"dev/null is a file", nil, file("dev/null"), false},
		{"dev/console is a link", nil, link("dev/console", "/etc/passwd"), false},
		{"dev/ptmx is a file", nil, file("dev/ptmx"), false},
		{"proc/self is a link", nil, link("proc/self", "/etc"), false},
		{"proc/kcore is a link", nil, link("proc/kcore", "/etc/passwd"), false},
		{"sys/kernel is a link", nil, link("sys/kernel", "/etc"), false},
		{"proc/sys is a link", nil, link("proc/sys", "/tmp"), false},
	} {
		t.Run(c.name, func(t *testing.T) {
			name := "hostile-" + strings.NewReplacer(" ", "-", "/", "-").Replace(c.name)
			if _, err := h.Import(within(t), name, append(h.without(c.without...), c.with...), nil); err != nil {
				t.Fatal(err)
			}
			sb, err := h.Client.Create(within(t), spec(image(name)), "")
			if err == nil {
				defer stop(t, sb)
			}
			if c.refused {
				if e := errdefs.From(err); err == nil || e.Kind != errdefs.FailedPrecondition || e.Hint == "" {
					t.Errorf("it starts, or the error is no good: %v", err)
				}
				return
			}
			if err != nil {
				t.Fatal(err)
			}
			if out := sh(t, sb, look); !strings.HasSuffix(out, "mine\n") {
				t.Errorf("%q", out)
			}
		})
	}
}

func TestImagesWhoseUserFilesAreTraps(t *testing.T) {
	h := attacked(t)
	for _, c := range []struct {
		name string
		file server.File
	}{
		{"a link into proc", server.File{Name: "etc/passwd", Link: "/proc/self/environ"}},
		{"a link to the host", server.File{Name: "etc/passwd", Link: "../../../../etc/passwd"}},
		{"a link to itself", server.File{Name: "etc/passwd", Link: "passwd"}},
		{"a link to a device", server.File{Name: "etc/passwd", Link: "/dev/zero"}},
		{"a device", server.File{Name: "etc/passwd", Device: &[2]int64{1, 5}}},
		{"a directory", server.File{Name: "etc/passwd/"}},
		{"huge", server.File{Name: "etc/passwd", Body: strings.Repeat("root:x:0:0::/:/bin/sh\n", 100_000)}},
		{"nonsense", server.File{Name: "etc/passwd", Body: "root:x:4294967295:-1:\x1b]0;x\x07:../..:\n" +
			"alice:x:0x0:1e3::/:/\n::::::\nalice\x00:x:1:1::/:/\n"}},
		{"ids beyond the range", server.File{
			Name: "etc/passwd", Body: "root:x:0:65536::/:/bin/sh\nalice:x:65536:0::/:/bin/sh\n",
		}},
	} {
		t.Run(c.name, func(t *testing.T) {
			name := "users-" + strings.ReplaceAll(c.name, " ", "-")
			if _, err := h.Import(within(t), name, append(h.without("etc/passwd"), c.file), nil); err != nil {
				t.Fatal(err)
			}
			sb, err := h.Client.Create(within(t), spec(image(name)), "")
			if err != nil {
				t.Fatal(err)
			}
			defer stop(t, sb)
			for _, user := range []string{"", "root", "alice", "0", "1000", "1000:1000"} {
				cmd := client.Argv("/bin/busybox", "sh", "-c", "id -u; cat /proc/self/uid_map")
				cmd.User = user
				// It runs as somebody inside, or is refused and says why; never in silence as somebody else.
				res, err := sb.Run(within(t), cmd)
				if err != nil {
					if k := errdefs.KindOf(err); k == errdefs.Internal || k == errdefs.Unknown || k == errdefs.Unavailable {
						t.Errorf("user %q: %v", user, err)
					}
					continue
				}
				f := strings.Fields(string(res.GetStdout()))
				if r := res.GetResult(); r.GetStartFailure() != nil && r.GetInfraError() == "" {
					continue
				}
				if len(f) != 4 || f[3] != "65536" || f[2] == "0" || user == "1000" && f[0] != "1000" || user == "0" && f[0] != "0" {
					t.Errorf("user %q: %q, %v", user, f, res.GetResult())
				}
			}
		})
	}
}

// containerd CVE-2022-23648 and its like: what an image says of itself became what the platform did.
func TestWhatAnImageSaysOfItselfIsNoPolicy(t *testing.T) {
	h := attacked(t)
	plain := h.open(t)
	const facts = "grep -E '^(Cap|Seccomp|NoNew)' /proc/self/status; grep -c . /proc/self/mountinfo; ulimit -n; " +
		"cat /proc/sys/kernel/hostname | wc -l"
	want := sh(t, plain, facts)
	for name, cfg := range map[string]*sandseav1.ImageConfig{
		"a working directory behind a descriptor": {Workdir: "/proc/self/fd/4"},
		"a working directory above the root":      {Workdir: "../../../.."},
		"a user that is a number beyond":          {User: "4294967295"},
		"a user of two lines":                     {User: "root\nroot"},
		"a user with a path":                      {User: "../../root"},
		"variables for the loader": {Env: []string{
			"LD_PRELOAD=/bin/attack", "LD_LIBRARY_PATH=/tmp", "BASH_ENV=/bin/attack", "ENV=/bin/attack", "GCONV_PATH=/tmp",
		}},
		"variables that are none": {Env: []string{"=x", "A", "B=\x00", "PATH", "", strings.Repeat("C", 1<<16) + "=x"}},
		"an endless variable":     {Env: []string{"A=" + strings.Repeat("x", 1<<20)}},
		"a program of the host":   {Entrypoint: []string{"/proc/1/exe"}, Cmd: []string{"up"}},
		"no program":              {Entrypoint: []string{""}, Cmd: []string{"\x00"}},
		"more than all":           {Cmd: slices.Repeat([]string{strings.Repeat("x", 1<<10)}, 3000)},
		"words for a terminal":    {Workdir: "/\x1b]0;x\x07", User: "\x1b[2J"},
	} {
		t.Run(name, func(t *testing.T) {
			img := "says-" + strings.ReplaceAll(name, " ", "-")
			if _, err := h.Import(within(t), img, h.files, cfg); err != nil {
				if k := errdefs.KindOf(err); k != errdefs.Invalid && k != errdefs.FailedPrecondition {
					t.Errorf("import: %v", err)
				}
				return
			}
			for _, mode := range []sandseav1.EntrypointMode{
				sandseav1.EntrypointMode_ENTRYPOINT_MODE_IDLE, sandseav1.EntrypointMode_ENTRYPOINT_MODE_IMAGE,
			} {
				sb, err := h.Client.Create(within(t), spec(image(img), func(s *sandseav1.SandboxSpec) {
					s.Entrypoint = &sandseav1.Entrypoint{Mode: mode}
				}), "")
				if err != nil {
					if k := errdefs.KindOf(err); k == errdefs.Internal || k == errdefs.Unknown || k == errdefs.Unavailable {
						t.Errorf("create: %v", err)
					}
					continue
				}
				defer stop(t, sb)
				cmd := client.Shell(facts)
				cmd.Cwd, cmd.User, cmd.EnvMode = "/", "root", sandseav1.EnvMode_ENV_MODE_REPLACE
				res, err := sb.Run(within(t), cmd)
				if err != nil {
					// An entrypoint that does not run may have ended it.
					if e := errdefs.From(err); e.Cause == "" && e.Kind != errdefs.NotFound {
						t.Errorf("run: %v", err)
					}
					continue
				}
				if got := string(res.GetStdout()); got != want {
					t.Errorf("it is another sandbox:\n%s\nnot\n%s", got, want)
				}
			}
		})
	}
}

func TestDeviceNodesOfAnImageAreNames(t *testing.T) {
	h := attacked(t)
	files := slices.Clone(h.files)
	for name, numbers := range map[string][2]int64{
		"mem": {1, 1}, "kmsg": {1, 11}, "port": {1, 4}, "null": {1, 3}, "fuse": {10, 229}, "kvm": {10, 232},
	} {
		files = append(files, server.File{Name: "srv-" + name, Device: &numbers, Mode: 0o666})
	}
	if _, err := h.Import(within(t), "nodes", files, nil); err != nil {
		t.Fatal(err)
	}
	sb := h.open(t, image("nodes"))
	for _, user := range []string{"root", "alice"} {
		cmd := client.Shell("for f in /srv-*; do head -c 1 $f >/dev/null 2>&1 && echo read $f; " +
			"(echo x > $f) 2>/dev/null && echo wrote $f; cp -a $f /tmp/x 2>/dev/null && echo copied $f; done; true")
		cmd.User = user
		if res := run(t, sb, cmd); len(res.GetStdout()) > 0 {
			t.Errorf("as %s: %s", user, res.GetStdout())
		}
	}
	var b bytes.Buffer
	_, err := sb.ReadFile(within(t), &sandseav1.ReadFileRequest{Path: "/srv-null"}, &b)
	if !errors.Is(err, errdefs.FailedPrecondition) {
		t.Errorf("a file call reads a device: %v", err)
	}
}

func TestSetUserIDProgramsOfAnImageStayInside(t *testing.T) {
	h := attacked(t)
	var busybox string
	for _, f := range h.files {
		if f.Name == "bin/busybox" {
			busybox = f.Body
		}
	}
	files := append(slices.Clone(h.files),
		server.File{Name: "bin/become", Body: busybox, Mode: 0o6755},
		server.File{Name: "bin/able", Body: busybox, Mode: 0o755, Xattrs: map[string]string{
			// VFS_CAP_REVISION_2, effective, with every capability there is.
			"security.capability": "\x01\x00\x00\x02\xff\xff\xff\xff\xff\xff\xff\xff\xff\x01\x00\x00\xff\x01\x00\x00",
		}},
		// What overlayfs would take for its own.
		server.File{Name: "srv/x/", Xattrs: map[string]string{
			"trusted.overlay.opaque": "y", "trusted.overlay.redirect": "/etc",
		}},
		server.File{Name: "srv/meta", Body: "mine", Xattrs: map[string]string{
			"trusted.overlay.metacopy": "", "user.overlay.redirect": "/etc/passwd", "trusted.overlay.redirect": "/etc/passwd",
		}},
	)
	if _, err := h.Import(within(t), "powers", files, nil); err != nil {
		t.Fatal(err)
	}
	sb := h.open(t, image("powers"))
	bounding := strings.TrimSpace(sh(t, sb, "sed -n 's/^CapBnd:[^0-9a-f]*//p' /proc/self/status"))
	for _, program := range []string{"/bin/become", "/bin/able"} {
		cmd := client.Argv(program, "cat", "/proc/self/status")
		cmd.User = "alice"
		res := run(t, sb, cmd)
		for line := range strings.Lines(string(res.GetStdout())) {
			if f := strings.Fields(line); strings.HasPrefix(line, "CapEff") && (len(f[1]) != len(bounding) || f[1] > bounding) {
				t.Errorf("%s has capabilities %s beyond %s", program, f[1], bounding)
			}
		}
		for _, line := range []string{
			"mount -t tmpfs none /tmp", "mknod /tmp/m c 1 1", "cat /proc/1/environ", "echo x > /proc/sys/kernel/core_pattern",
		} {
			cmd := client.Argv(program, "sh", "-c", line)
			cmd.User = "alice"
			if res := run(t, sb, cmd); res.GetResult().GetExitCode() == 0 {
				t.Errorf("%s: %s works: %q", program, line, res.GetStdout())
			}
		}
	}
	if out := sh(t, sb, "cat /srv/meta; ls -A /srv/x"); out != "mine" {
		t.Errorf("attributes of the image are obeyed: %q", out)
	}
}

// archive is a tar whose entries the helpers of the harness would not make.
func archive(t *testing.T, heads ...*tar.Header) []byte {
	t.Helper()
	var b bytes.Buffer
	w := tar.NewWriter(&b)
	for _, h := range heads {
		if h.Typeflag == tar.TypeReg {
			h.Size = 6
		}
		h.Mode = 0o777
		if err := w.WriteHeader(h); err != nil {
			t.Fatal(err)
		}
		if h.Size > 0 {
			if _, err := w.Write([]byte("hostil")); err != nil {
				t.Fatal(err)
			}
		}
	}
	if err := w.Close(); err != nil {
		t.Fatal(err)
	}
	return b.Bytes()
}

func TestArchivesThatReachOutOfTheirDirectory(t *testing.T) {
	h := attacked(t)
	outside := filepath.Join(t.TempDir(), "outside")
	if err := os.Mkdir(outside, 0o777); err != nil {
		t.Fatal(err)
	}
	up := strings.Repeat("../", 40)
	sb := h.open(t)
	sh(t, sb, "mkdir -p /home/alice/in")
	before := sh(t, sb, "ls -lR /etc | md5sum")
	for name, heads := range map[string][]*tar.Header{
		"dots":             {{Typeflag: tar.TypeReg, Name: up + outside[1:] + "/a"}},
		"an absolute name": {{Typeflag: tar.TypeReg, Name: outside + "/a"}},
		"dots in the middle": {
			{Typeflag: tar.TypeDir, Name: "a/"}, {Typeflag: tar.TypeReg, Name: "a/../../../../../.." + outside + "/a"},
		},
		"through a link": {
			{Typeflag: tar.TypeSymlink, Name: "l", Linkname: outside}, {Typeflag: tar.TypeReg, Name: "l/a"},
		},
		"through a link to etc": {
			{Typeflag: tar.TypeSymlink, Name: "e", Linkname: "/etc"}, {Typeflag: tar.TypeReg, Name: "e/hostile"},
		},
		"a hard link outwards": {
			{Typeflag: tar.TypeLink, Name: "h", Linkname: up + "etc/passwd"}, {Typeflag: tar.TypeReg, Name: "h"},
		},
		"a link over the directory": {
			{Typeflag: tar.TypeSymlink, Name: ".", Linkname: outside}, {Typeflag: tar.TypeReg, Name: "a"},
		},
		"a device": {{Typeflag: tar.TypeChar, Name: "mem", Devmajor: 1, Devminor: 1}},
	} {
		t.Run(name, func(t *testing.T) {
			b := archive(t, heads...)
			// As files of a sandbox. Refused or kept below the directory.
			_, err := sb.UploadTar(within(t), &sandseav1.UploadTarHeader{Path: "/home/alice/in", User: "root"}, bytes.NewReader(b))
			if err != nil && errdefs.KindOf(err) != errdefs.Invalid && errdefs.KindOf(err) != errdefs.FailedPrecondition {
				t.Errorf("%v", err)
			}
			if after := sh(t, sb, "ls -lR /etc | md5sum"); after != before {
				t.Error("/etc has changed")
			}
			// As an image.
			up, err := h.Client.UploadImage(within(t), bytes.NewReader(b))
			if err != nil {
				t.Fatal(err)
			}
			_, _, err = h.Client.ImportImage(within(t), &sandseav1.ImportImageRequest{
				Source: &sandseav1.ImportImageRequest_Archive{Archive: &sandseav1.ArchiveSource{
					Upload: up, Format: sandseav1.ArchiveFormat_ARCHIVE_FORMAT_ROOTFS,
				}},
				Name: "out-" + strings.ReplaceAll(name, " ", "-"),
			}, nil)
			if err != nil && errdefs.KindOf(err) != errdefs.Invalid {
				t.Errorf("import: %v", err)
			}
			if left, err := os.ReadDir(outside); err != nil || len(left) > 0 {
				t.Errorf("the host has %v, %v", left, err)
			}
		})
	}
}

// A bomb is stopped by what it unpacks to, not by what it was.
func TestABombOfAnArchiveIsRefused(t *testing.T) {
	h := attacked(t)
	packed := bomb(t, 64<<30)
	up, err := h.Client.UploadImage(within(t), bytes.NewReader(packed))
	if err != nil {
		t.Fatal(err)
	}
	_, _, err = h.Client.ImportImage(within(t), &sandseav1.ImportImageRequest{
		Source: &sandseav1.ImportImageRequest_Archive{Archive: &sandseav1.ArchiveSource{
			Upload: up, Format: sandseav1.ArchiveFormat_ARCHIVE_FORMAT_ROOTFS,
		}},
		Name: "bomb",
	}, nil)
	if k := errdefs.KindOf(err); k != errdefs.Invalid && k != errdefs.Exhausted {
		t.Errorf("%d bytes that unpack to 64 GiB: %v", len(packed), err)
	}
	if fmt.Sprint(err) == "" {
		t.Error("without a word")
	}
}
