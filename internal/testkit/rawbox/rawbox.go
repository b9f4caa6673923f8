// Package rawbox starts one sandsea-init without an edge: in a nursery of its own, in all namespaces, with a root file
// system of busybox, below a control group that is the test's. It is for tests of what talks to sandsea-init.
//
// The test ends with nothing left: clean-up closes the line, kills the group, waits for PID 1 and removes the group. If
// the test process is killed, the end of the control socket makes sandsea-init end everything.
package rawbox

import (
	"context"
	"crypto/rand"
	"encoding/hex"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"runtime"
	"strconv"
	"sync/atomic"
	"syscall"
	"testing"
	"time"

	"github.com/moby/sys/mountinfo"

	sandseainit "github.com/sandsea/sandsea/init"
	"github.com/sandsea/sandsea/internal/chronus/wire"
	"github.com/sandsea/sandsea/internal/linux/cgroupfs"
	"github.com/sandsea/sandsea/internal/linux/mount"
	"github.com/sandsea/sandsea/internal/linux/scm"
	"github.com/sandsea/sandsea/internal/linux/seccomp"
	"github.com/sandsea/sandsea/internal/testkit/require"
	"github.com/sandsea/sandsea/internal/testkit/wait"
)

// Base is the host id of root inside.
const Base = 0x60000000

const (
	cloneNewCgroup = 0x02000000
	idCount        = 65536
	busybox        = "/bin/busybox"
)

// setupLimit bounds the set-up of a box, which takes milliseconds.
const setupLimit = 30 * time.Second

var errSetupLimit = fmt.Errorf("no box in %s: %w", setupLimit, context.DeadlineExceeded)

// Options of a box; the zero value is fine.
type Options struct {
	// Populate may change the root file system, which root names, before it is given to the ids inside. What it makes
	// belongs to root inside unless it has chowned it to ids from Base on.
	Populate func(root string) error
	// NoSys leaves the mounting of /sys to sandsea-init.
	NoSys bool
	// Setup may change what Open asks for.
	Setup func(*wire.Setup)
	// Warm makes a sandsea-init that is prepared before it is given its root.
	Warm bool
	// NoDev gives a plain file for /dev.
	NoDev bool
}

// Box is a started sandsea-init.
type Box struct {
	// Control is the outside end of the line; it stays open until the test ends.
	Control *os.File
	// Pid of PID 1 outside.
	Pid int
	// Dir is its v2 control group.
	Dir string

	cgroup *os.File
	execs  atomic.Int64
	status chan syscall.WaitStatus
	setup  func(*wire.Setup)
	// root is given with the set-up.
	root *os.File
}

// Start makes a box whose sandsea-init waits for SETUP. Tests without the rights or the kernel for it are skipped.
func Start(t testing.TB, o Options) *Box {
	t.Helper()
	require.Root(t)
	require.Feature(t, "bin:busybox")
	v2, err := cgroup2()
	require.That(t, "cgroup2", err)

	b := &Box{status: make(chan syscall.WaitStatus, 1), setup: o.Setup}
	var tag [6]byte
	_, _ = rand.Read(tag[:])
	b.Dir = filepath.Join(v2, "sandsea-wiretest-"+hex.EncodeToString(tag[:]))
	if err := os.Mkdir(b.Dir, 0o755); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { b.clean(t) })
	if err := giveAway(b.Dir); err != nil {
		t.Fatal(err)
	}
	if b.cgroup, err = cgroupfs.Open(b.Dir); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { b.cgroup.Close() })

	inside, outside, err := scm.Socketpair()
	if err != nil {
		t.Fatal(err)
	}
	defer inside.Close()
	b.Control = outside
	t.Cleanup(func() { outside.Close() })

	root, err := rootfs(o.Populate)
	if err != nil {
		t.Fatal(err)
	}
	given := root
	if o.Warm {
		b.root, given = root, nil
		t.Cleanup(func() { root.Close() })
	} else {
		defer root.Close()
	}
	dev, err := devices()
	if err != nil {
		t.Fatal(err)
	}
	defer dev.Close()
	if o.NoDev {
		dev.Close()
		if dev, err = os.Open(os.DevNull); err != nil {
			t.Fatal(err)
		}
		defer dev.Close()
	}
	var sys *os.File
	if !o.NoSys {
		if sys, err = mount.Sysfs(); err != nil {
			t.Fatal(err)
		}
		defer sys.Close()
	}
	if b.Pid, err = fork(t.TempDir(), b.cgroup, inside, given, dev, sys); err != nil {
		t.Fatal(err)
	}
	go func() {
		var ws syscall.WaitStatus
		for {
			if _, err := syscall.Wait4(b.Pid, &ws, 0, nil); !errors.Is(err, syscall.EINTR) {
				break
			}
		}
		b.status <- ws
	}()
	return b
}

// Open sets the box up with the default capabilities and filter and returns the line to it.
func (b *Box) Open(t testing.TB) *wire.Channel {
	t.Helper()
	filter, err := seccomp.Default()
	if err != nil {
		t.Fatal(err)
	}
	s := wire.Setup{Hostname: "box", OpenFiles: 1024, Caps: wire.DefaultCaps, Filter: filter}
	if b.setup != nil {
		b.setup(&s)
	}
	c := wire.New(b.Control)
	t.Cleanup(func() { _ = c.Close() })
	ctx, stop := context.WithTimeoutCause(context.Background(), setupLimit, errSetupLimit)
	defer stop()
	if b.root != nil {
		if err := c.Prepare(ctx); err != nil {
			t.Fatal(err)
		}
		s.Root = b.root
	}
	if _, err := c.Setup(ctx, s); err != nil {
		t.Fatal(err)
	}
	return c
}

// Root is the root that a Warm box is to be given, else nil.
func (b *Box) Root() *os.File { return b.root }

// Exec makes a control group for a command. It goes with the box.
func (b *Box) Exec(t testing.TB) *os.File {
	t.Helper()
	dir := filepath.Join(b.Dir, "e"+strconv.FormatInt(b.execs.Add(1), 10))
	if err := os.Mkdir(dir, 0o755); err != nil {
		t.Fatal(err)
	}
	if err := giveAway(dir); err != nil {
		t.Fatal(err)
	}
	f, err := cgroupfs.Open(dir)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { f.Close() })
	return f
}

// Wait returns how PID 1 ended, as its parent sees it.
func (b *Box) Wait(t testing.TB, limit time.Duration) syscall.WaitStatus {
	t.Helper()
	select {
	case ws := <-b.status:
		b.status <- ws
		return ws
	case <-time.After(limit):
		t.Fatalf("PID 1 lives on after %s", limit)
	}
	return 0
}

// Kill ends everything in the box.
func (b *Box) Kill() error { return cgroupfs.Write(b.cgroup, "cgroup.kill", "1") }

func (b *Box) clean(t testing.TB) {
	if b.Control != nil {
		b.Control.Close()
	}
	// By path, since the descriptor is closed already.
	if err := os.WriteFile(filepath.Join(b.Dir, "cgroup.kill"), []byte("1"), 0); err != nil {
		t.Error(err)
	}
	if b.Pid > 0 {
		b.Wait(t, 30*time.Second)
	}
	removed := wait.For(30*time.Second, func() bool {
		entries, err := os.ReadDir(b.Dir)
		if errors.Is(err, fs.ErrNotExist) {
			return true
		}
		for _, e := range entries {
			if e.IsDir() {
				_ = os.Remove(filepath.Join(b.Dir, e.Name()))
			}
		}
		return os.Remove(b.Dir) == nil
	})
	if !removed {
		t.Errorf("control group %s cannot be removed", b.Dir)
	}
}

func cgroup2() (string, error) {
	mounts, err := mountinfo.GetMounts(mountinfo.FSTypeFilter("cgroup2"))
	if err != nil {
		return "", err
	}
	if len(mounts) == 0 {
		return "", errors.New("no cgroup2 mount")
	}
	return mounts[0].Mountpoint, nil
}

// giveAway lets root inside move its own children below dir.
func giveAway(dir string) error {
	for _, name := range []string{"", "cgroup.procs", "cgroup.threads"} {
		if err := os.Chown(filepath.Join(dir, name), Base, Base); err != nil {
			return err
		}
	}
	return nil
}

// path names the root of a mount that is attached nowhere.
func path(m *os.File) string { return "/proc/self/fd/" + strconv.Itoa(int(m.Fd())) }

func rootfs(populate func(string) error) (*os.File, error) {
	m, err := mount.New("tmpfs", 0, mount.Value("mode", "0755"))
	if err != nil {
		return nil, err
	}
	root := path(m)
	err = fill(root)
	if err == nil && populate != nil {
		err = populate(root)
	}
	if err == nil {
		err = shift(root)
	}
	if err != nil {
		m.Close()
		return nil, fmt.Errorf("root file system: %w", err)
	}
	return m, nil
}

func fill(root string) error {
	for _, dir := range []string{"bin", "etc", "root", "tmp", "home/user"} {
		if err := os.MkdirAll(filepath.Join(root, dir), 0o755); err != nil {
			return err
		}
	}
	if err := os.Chmod(filepath.Join(root, "tmp"), 0o777|fs.ModeSticky); err != nil {
		return err
	}
	program, err := os.ReadFile(busybox)
	if err != nil {
		return err
	}
	if err := os.WriteFile(filepath.Join(root, "bin/busybox"), program, 0o755); err != nil {
		return err
	}
	for _, applet := range []string{
		"sh", "cat", "cp", "chmod", "chown", "dd", "echo", "env", "false", "grep", "head", "hostname", "id", "ip", "kill",
		"ln", "ls",
		"mkdir", "mkfifo", "mount", "mv", "nproc", "od", "ps", "pwd", "readlink", "rm", "seq", "sleep", "stat", "tail",
		"touch", "true",
		"umount", "uname", "unshare", "wc", "yes",
	} {
		if err := os.Symlink("busybox", filepath.Join(root, "bin", applet)); err != nil {
			return err
		}
	}
	return errors.Join(
		os.WriteFile(filepath.Join(root, "etc/passwd"),
			[]byte("root:x:0:0::/root:/bin/sh\nuser:x:1000:1000::/home/user:/bin/sh\n"), 0o644),
		os.WriteFile(filepath.Join(root, "etc/group"), []byte("root:x:0:\ntty:x:5:\nuser:x:1000:\nextra:x:2000:user\n"),
			0o644),
		os.Chown(filepath.Join(root, "home/user"), Base+1000, Base+1000),
	)
}

// shift gives all that belongs to host root to root inside.
func shift(root string) error {
	return filepath.WalkDir(root+"/", func(p string, d fs.DirEntry, err error) error {
		if err != nil {
			return err
		}
		info, err := d.Info()
		if err != nil {
			return err
		}
		st := info.Sys().(*syscall.Stat_t)
		if st.Uid >= Base {
			return nil
		}
		if err := os.Lchown(p, Base+int(st.Uid), Base+int(st.Gid)); err != nil {
			return err
		}
		if info.Mode().IsRegular() {
			return syscall.Chmod(p, st.Mode&0o7777) // a change of owner takes set-user-id away
		}
		return nil
	})
}

func devices() (*os.File, error) {
	m, err := mount.New("tmpfs", mount.NoSUID|mount.NoExec, mount.Value("mode", "0755"))
	if err != nil {
		return nil, err
	}
	for _, d := range []mount.Device{
		{Name: "null", Major: 1, Minor: 3, Mode: 0o666},
		{Name: "zero", Major: 1, Minor: 5, Mode: 0o666},
		{Name: "full", Major: 1, Minor: 7, Mode: 0o666},
		{Name: "random", Major: 1, Minor: 8, Mode: 0o666},
		{Name: "urandom", Major: 1, Minor: 9, Mode: 0o666},
		{Name: "tty", Major: 5, Minor: 0, Mode: 0o666},
	} {
		err = errors.Join(err, mount.MakeDevice(m, d))
	}
	for _, dir := range []string{"pts", "shm", "mqueue"} {
		err = errors.Join(err, mount.MakeDir(m, dir, 0o755))
	}
	for name, target := range map[string]string{
		"ptmx": "pts/ptmx", "fd": "/proc/self/fd", "stdin": "/proc/self/fd/0", "stdout": "/proc/self/fd/1",
		"stderr": "/proc/self/fd/2",
	} {
		err = errors.Join(err, mount.MakeLink(m, name, target))
	}
	if err != nil {
		m.Close()
		return nil, err
	}
	return m, nil
}

// fork makes a nursery on a thread of its own, which it never gives back, and forks from there.
func fork(scratch string, cgroup, control, root, dev, sys *os.File) (int, error) {
	type result struct {
		pid int
		err error
	}
	done := make(chan result)
	go func() {
		runtime.LockOSThread()
		pid, err := forkHere(scratch, cgroup, control, root, dev, sys)
		done <- result{pid, err}
	}()
	r := <-done
	return r.pid, r.err
}

func forkHere(scratch string, cgroup, control, root, dev, sys *os.File) (int, error) {
	if err := syscall.Unshare(syscall.CLONE_FS | syscall.CLONE_NEWNS); err != nil {
		return 0, fmt.Errorf("unshare: %w", err)
	}
	if err := mount.MakePrivate(); err != nil {
		return 0, err
	}
	nursery, err := mount.New("tmpfs", mount.NoSUID|mount.NoDev, mount.Value("mode", "0755"))
	if err != nil {
		return 0, err
	}
	defer nursery.Close()
	if err := mount.Attach(nursery, scratch); err != nil {
		return 0, err
	}
	for _, dir := range []string{"mnt", "proc", "sys"} {
		if err := mount.MakeDir(nursery, dir, 0o755); err != nil {
			return 0, err
		}
	}
	for _, name := range []string{"proc", "sysfs"} {
		m, err := mount.New(name, mount.NoSUID|mount.NoDev|mount.NoExec)
		if err != nil {
			return 0, err
		}
		err = mount.AttachAt(m, nursery, map[string]string{"proc": "proc", "sysfs": "sys"}[name])
		m.Close()
		if err != nil {
			return 0, err
		}
	}
	program := filepath.Join(scratch, "init")
	if err := os.WriteFile(program, sandseainit.Binary(), 0o711); err != nil {
		return 0, err
	}
	if err := mount.PivotInto(scratch); err != nil {
		return 0, err
	}
	const none = ^uintptr(0)
	files := []uintptr{none, none, none, control.Fd(), none, dev.Fd(), none}
	if root != nil {
		files[4] = root.Fd()
	}
	if sys != nil {
		files[6] = sys.Fd()
	}
	ids := []syscall.SysProcIDMap{{ContainerID: 0, HostID: Base, Size: idCount}}
	return syscall.ForkExec("/init", []string{"sandsea-init"}, &syscall.ProcAttr{
		Dir:   "/",
		Env:   []string{},
		Files: files,
		Sys: &syscall.SysProcAttr{
			Cloneflags: syscall.CLONE_NEWUSER | syscall.CLONE_NEWNS | syscall.CLONE_NEWPID | syscall.CLONE_NEWIPC |
				syscall.CLONE_NEWUTS | syscall.CLONE_NEWNET | cloneNewCgroup,
			UidMappings:                ids,
			GidMappings:                ids,
			GidMappingsEnableSetgroups: true,
			Credential:                 &syscall.Credential{},
			UseCgroupFD:                true,
			CgroupFD:                   int(cgroup.Fd()),
		},
	})
}
