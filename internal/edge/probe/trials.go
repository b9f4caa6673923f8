package probe

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"os/exec"
	"path/filepath"
	"runtime"
	"slices"
	"strings"
	"syscall"

	goerofs "github.com/erofs/go-erofs"

	"github.com/sandsea/sandsea/api/errdefs"
	"github.com/sandsea/sandsea/internal/edge/cgroup"
	"github.com/sandsea/sandsea/internal/linux/cgroupfs"
	"github.com/sandsea/sandsea/internal/linux/confine"
	"github.com/sandsea/sandsea/internal/linux/dirfd"
	"github.com/sandsea/sandsea/internal/linux/erofs"
	"github.com/sandsea/sandsea/internal/linux/mount"
	"github.com/sandsea/sandsea/internal/linux/pidfd"
	"github.com/sandsea/sandsea/internal/linux/sparse"
	"github.com/sandsea/sandsea/internal/linux/trial"
	"github.com/sandsea/sandsea/internal/linux/userns"
	"github.com/sandsea/sandsea/internal/sandbox"
)

// prober tries with one configuration. Names that it gives in the kernel carry its process number, so that two of them
// do not meet.
type prober struct{ cfg Config }

var tinyLimits = sandbox.Limits{Memory: sandbox.MinMemory, CPUMillis: sandbox.MinCPUMillis, Pids: sandbox.MinPids}

func (p *prober) name(what string) string { return fmt.Sprintf("probe-%d-%s", os.Getpid(), what) }

// group makes a group for a trial, with limits if all of them can be had.
func (p *prober) group(what string) (*cgroup.Group, error) {
	if p.cfg.Cgroup == nil {
		return nil, cgroupErr(p.cfg.CgroupErr)
	}
	return p.cfg.Cgroup.Create(p.name(what), tinyLimits)
}

func cgroupErr(err error) error {
	if err == nil {
		return errors.New("there are no control groups to try with")
	}
	return err
}

// drop removes a group, also when ctx has ended.
func drop(ctx context.Context, g *cgroup.Group) error {
	ctx, stop := context.WithTimeoutCause(context.WithoutCancel(ctx), limit, errLimit)
	defer stop()
	return g.Remove(ctx)
}

// limit tries whether a limit can be written.
func (p *prober) limit(feature, controller string) result {
	fix := "Boot with the controller " + controller + " enabled, or mount it: see docs of cgroups(7)"
	if p.cfg.Cgroup == nil {
		return missing(cgroupErr(p.cfg.CgroupErr), "%s", hint(p.cfg.CgroupErr, fix))
	}
	mechanism, there := p.cfg.Cgroup.Mechanisms()[feature]
	if !there {
		return missing(errors.New(p.cfg.Cgroup.Lacks()[feature]), "%s", fix)
	}
	g, err := p.group(controller)
	e, typed := errors.AsType[*errdefs.Error](err)
	switch {
	case err == nil:
		if err := drop(context.Background(), g); err != nil {
			return unsure(err, "%s", fix)
		}
	case typed && e.Feature == feature:
		return missing(err, "%s", hint(err, fix))
	case typed && e.Feature != "":
		// Another limit is the one that is missing; this one is made of the same stuff and has its mechanism.
	default:
		return unsure(err, "%s", fix)
	}
	return ok("%s", mechanism)
}

// hint is what the error says to do, if it says something better than to ask us.
func hint(err error, other string) string {
	if e, ok := errors.AsType[*errdefs.Error](err); ok && e.Hint != "" && !strings.Contains(e.Hint, "sandsea doctor") {
		return e.Hint
	}
	return other
}

// disk: the store proved the limit by writing over one when it was opened.
func (p *prober) disk(context.Context) result {
	const fix = "Install btrfs-progs, or put the data directory on XFS or ext4 mounted with prjquota"
	if p.cfg.Upper == nil {
		err := p.cfg.UpperErr
		if err == nil {
			return unsure(errors.New("there are no writable layers to try with"), fix)
		}
		if errors.Is(err, errdefs.FailedPrecondition) {
			return missing(err, "%s", hint(err, fix))
		}
		return unsure(err, fix)
	}
	return ok("%s", p.cfg.Upper.Mechanism())
}

func (p *prober) openFiles(context.Context) result {
	n := noFile()
	if n <= 0 {
		return unsure(errors.New("the limit of open files cannot be read"), "See: ulimit -Hn")
	}
	if n < sandbox.DefaultOpenFiles {
		return ok("RLIMIT_NOFILE, at most %d: the hard limit of this process", n)
	}
	return ok("RLIMIT_NOFILE")
}

// output: a record is kept within its bound by punching holes into it.
func (p *prober) output(context.Context) result {
	const fix = "Put the data directory on ext4, XFS or btrfs"
	f, err := os.CreateTemp(p.cfg.Dir, ".probe-")
	if err != nil {
		return unsure(err, "Make the data directory writable")
	}
	defer f.Close()
	defer os.Remove(f.Name())
	block := bytes.Repeat([]byte("x"), 256<<10)
	if _, err := f.Write(block); err != nil {
		return unsure(err, "Free space in the data directory")
	}
	fd := int(f.Fd())
	before, err := sparse.Allocated(fd)
	if err == nil {
		err = sparse.Punch(fd, 0, int64(len(block))/2)
	}
	if err != nil {
		return missing(fmt.Errorf("punch a hole: %w", err), fix)
	}
	// A file system that allocates late may show nothing yet in either figure.
	if err := f.Sync(); err != nil {
		return unsure(err, fix)
	}
	after, err := sparse.Allocated(fd)
	if err != nil {
		return unsure(err, fix)
	}
	if after >= int64(len(block)) || before > 0 && after >= before {
		return missing(trial.ErrNoEffect, fix)
	}
	st, err := f.Stat()
	if err != nil || st.Size() != int64(len(block)) {
		return missing(fmt.Errorf("a hole changed the size: %w", err), fix)
	}
	return ok("keeper: splice, holes punched in the record")
}

// kill: a process born in a group is ended through the group. The group has no limits, so that a limit that is missing
// does not look like a kill that is.
func (p *prober) kill(context.Context) (r result) {
	const fix = "Use Linux 5.14 or later with a cgroup v2 tree"
	if p.cfg.Cgroup == nil {
		return missing(cgroupErr(p.cfg.CgroupErr), "%s", hint(p.cfg.CgroupErr, fix))
	}
	dir, err := p.cfg.Cgroup.Daemon(p.name("kill"))
	if err != nil {
		return unsure(err, fix)
	}
	defer func() {
		dir.Close()
		// Whoever was in it has been waited for.
		if err := os.Remove(dir.Name()); err != nil {
			r = unsure(err, fix)
		}
	}()
	status, err := killed(dir)
	if err != nil {
		return missing(err, fix)
	}
	if !status.Signaled() || status.Signal() != syscall.SIGKILL {
		return missing(trial.ErrNoEffect, fix)
	}
	return ok("cgroup v2 cgroup.kill, clone into the group")
}

// killed starts a process in the group that never runs an instruction, kills the group and tells how the process ended.
func killed(group *os.File) (syscall.WaitStatus, error) {
	runtime.LockOSThread() // it is traced by this thread
	defer runtime.UnlockOSThread()
	pid, err := syscall.ForkExec("/proc/self/exe", []string{"probe"}, &syscall.ProcAttr{
		Env: []string{},
		Sys: &syscall.SysProcAttr{
			Ptrace: true, Pdeathsig: syscall.SIGKILL, UseCgroupFD: true, CgroupFD: int(group.Fd()),
		},
	})
	if err != nil {
		return 0, fmt.Errorf("clone into a control group: %w", err)
	}
	var ws syscall.WaitStatus
	wait := func() error {
		for {
			_, err := syscall.Wait4(pid, &ws, syscall.WALL, nil)
			if err == nil || !errors.Is(err, syscall.EINTR) {
				return err
			}
		}
	}
	err = wait() // it stops at exec
	var inside []int
	if err == nil {
		inside, err = cgroupfs.Procs(group)
	}
	if err == nil && !slices.Contains(inside, pid) {
		err = errors.New("the child is not in its control group")
	}
	if err == nil {
		err = cgroupfs.Write(group, "cgroup.kill", "1")
	}
	if err != nil {
		_ = syscall.Kill(pid, syscall.SIGKILL)
	}
	for {
		if waitErr := wait(); waitErr != nil || !ws.Stopped() {
			return ws, errors.Join(err, waitErr)
		}
	}
}

// userns: a namespace with 65,536 ids, and a layer seen through it.
func (p *prober) userns(context.Context) result {
	const fix = "Allow user namespaces: sysctl user.max_user_namespaces, and id-mapped EROFS mounts"
	err := p.withLayer(func(layer *os.File) error {
		root, err := dirfd.Open(layer, ".")
		if err != nil {
			return err
		}
		defer root.Close()
		f, err := os.Open(fmt.Sprintf("/proc/self/fd/%d/%s", root.Fd(), tinyFile))
		if err != nil {
			return err
		}
		defer f.Close()
		st, err := f.Stat()
		if err != nil {
			return err
		}
		if uid := st.Sys().(*syscall.Stat_t).Uid; uid != p.cfg.IDBase {
			return fmt.Errorf("a file of root shows as one of %d, not of %d", uid, p.cfg.IDBase)
		}
		return nil
	})
	if err != nil {
		return missing(err, fix)
	}
	return ok("user namespace with %d ids, id-mapped layers", userns.Size)
}

func (p *prober) seccomp(context.Context) result {
	if err := trial.Seccomp(p.cfg.Filter); err != nil {
		return missing(err, "Use a kernel with CONFIG_SECCOMP_FILTER")
	}
	return ok("seccomp filter")
}

// layers: an overlay over a layer, all by descriptor, with the writable layer that sandboxes have.
func (p *prober) layers(ctx context.Context) result {
	const fix = "Use Linux 6.15 or later with EROFS and overlayfs"
	err := p.withLayer(func(layer *os.File) (err error) {
		dir, work, undo, err := p.upperDirs(ctx)
		if err != nil {
			return err
		}
		defer func() { err = errors.Join(err, undo()) }()
		m, err := mount.New("overlay", mount.NoDev, mount.File("lowerdir+", layer), mount.File("upperdir", dir),
			mount.File("workdir", work), mount.Flag("volatile"), mount.Value("index", "off"), mount.Value("xino", "off"))
		if err != nil {
			return err
		}
		defer m.Close()
		root, err := dirfd.Open(m, ".")
		if err != nil {
			return err
		}
		defer root.Close()
		b, err := os.ReadFile(fmt.Sprintf("/proc/self/fd/%d/%s", root.Fd(), tinyFile))
		if err != nil {
			return err
		}
		if string(b) != tinyText {
			return fmt.Errorf("a layer of %q reads as %q", tinyText, b)
		}
		f, err := dirfd.CreateFile(root, "new", 0o600)
		if err != nil {
			return err
		}
		return f.Close()
	})
	if err != nil {
		return missing(err, fix)
	}
	return ok("EROFS from files, overlayfs by descriptor")
}

// upperDirs gives directories for an overlay: a real writable layer where there are any, else memory.
func (p *prober) upperDirs(ctx context.Context) (dir, work *os.File, undo func() error, err error) {
	if p.cfg.Upper != nil {
		name := p.name("layers")
		u, err := p.cfg.Upper.Take(ctx, name, sandbox.MinDisk, p.cfg.IDBase)
		if err != nil {
			return nil, nil, nil, err
		}
		return u.Dir, u.Work, func() error { return errors.Join(u.Close(), p.cfg.Upper.Release(name)) }, nil
	}
	tmp, err := mount.New("tmpfs", 0, mount.Value("size", "1m"), mount.Value("mode", "0755"))
	if err != nil {
		return nil, nil, nil, err
	}
	files := []*os.File{tmp}
	undo = func() error {
		var errs []error
		for _, f := range files {
			errs = append(errs, f.Close())
		}
		return errors.Join(errs...)
	}
	for _, name := range []string{"u", "w"} {
		err := dirfd.Mkdir(tmp, name, 0o755)
		var d *os.File
		if err == nil {
			d, err = dirfd.Path(tmp, name)
		}
		if err != nil {
			return nil, nil, nil, errors.Join(err, undo())
		}
		files = append(files, d)
	}
	return files[1], files[2], undo, nil
}

const (
	tinyFile = "hello"
	tinyText = "written once, read by everybody\n"
)

// withLayer makes a tiny split image in the data directory, mounts it, maps it through a user namespace, and calls do
// with the mount.
func (p *prober) withLayer(do func(layer *os.File) error) (err error) {
	dir, err := os.MkdirTemp(p.cfg.Dir, ".probe-")
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, os.RemoveAll(dir)) }()
	meta, data := filepath.Join(dir, "meta"), filepath.Join(dir, "data")
	if err := writeImage(meta, data); err != nil {
		return fmt.Errorf("write an EROFS image: %w", err)
	}
	m, err := erofs.Mount(meta, data, erofs.DirectIO())
	if err != nil {
		return err
	}
	defer m.Close()
	ns, err := userns.New(p.cfg.IDBase)
	if err != nil {
		return err
	}
	defer ns.Close()
	if err := mount.Idmap(m, ns, 0); err != nil {
		return fmt.Errorf("map the ids of an EROFS mount: %w", err)
	}
	return do(m)
}

func writeImage(meta, data string) (err error) {
	m, err := os.Create(meta)
	if err != nil {
		return err
	}
	defer m.Close()
	d, err := os.Create(data)
	if err != nil {
		return err
	}
	defer d.Close()
	w := goerofs.Create(m, goerofs.WithBlockSize(4096), goerofs.WithBuildTime(0, 0), goerofs.WithDataFile(d))
	f, err := w.Create("/" + tinyFile)
	if err != nil {
		return err
	}
	if _, err := io.WriteString(f, tinyText); err != nil {
		return err
	}
	if err := f.Close(); err != nil {
		return err
	}
	if err := w.Close(); err != nil {
		return err
	}
	// Whole blocks, as the kernel reads them.
	for _, f := range []*os.File{m, d} {
		st, err := f.Stat()
		if err != nil {
			return err
		}
		if err := f.Truncate((st.Size() + 4095) &^ 4095); err != nil {
			return err
		}
	}
	return nil
}

func (p *prober) network(context.Context) result {
	if err := trial.Network(); err != nil {
		return missing(err, "Use a kernel with CONFIG_NET_NS, and check sysctl user.max_net_namespaces")
	}
	return ok("own empty network namespace")
}

// debian: an import from Debian packages runs mmdebstrap as root of a user namespace.
func (p *prober) debian(ctx context.Context) result {
	const install = "apt-get install mmdebstrap"
	for _, program := range []string{"mmdebstrap", "apt-get", "dpkg"} {
		if _, err := exec.LookPath(program); err != nil {
			return missing(err, install)
		}
	}
	var out bytes.Buffer
	err := confine.Run(ctx, confine.Spec{
		Args: []string{"mmdebstrap", "--version"}, Env: []string{"PATH=" + os.Getenv("PATH"), "LC_ALL=C.UTF-8"},
		IDBase: int(p.cfg.IDBase), Stdout: &out, Stderr: &out,
	})
	if err != nil {
		said, _, _ := strings.Cut(strings.TrimSpace(out.String()), "\n")
		return missing(fmt.Errorf("mmdebstrap in a user namespace: %w %s", err, said), install)
	}
	return ok("%s in a user namespace", strings.TrimSpace(out.String()))
}

func (p *prober) exitFacts(context.Context) result {
	if err := pidfd.Probe(); err != nil {
		return missing(err, "Use Linux 6.15 or later; without it some ends are infra_unknown")
	}
	return ok("PIDFD_GET_INFO")
}
