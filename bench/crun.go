package bench

import (
	"bytes"
	"context"
	"encoding/base64"
	"encoding/json"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"runtime"
	"strings"
	"sync"
	"sync/atomic"
	"syscall"
	"time"

	"github.com/moby/sys/mountinfo"
)

// CrunConfig says how crun is run.
type CrunConfig struct {
	// Rootfs is the root file system, a directory.
	Rootfs string
	// Dir is scratch space; what is made in it is removed by Close. It should lie on the file system that the other
	// peers write to.
	Dir string
	// Args is what runs. It must go on until it is killed. Default: /bin/sleep 3600.
	Args []string
	// Overlay gives each container a writable layer of its own over Rootfs, made within the measured time. Without it
	// the root is read-only.
	Overlay bool
	// Memory in bytes, CPUMillis and Pids limit each container where crun can do that.
	Memory, CPUMillis, Pids int64
	// Filter of system calls, a classic BPF program in the kernel's layout. Empty: none.
	Filter []byte
	// OneCall makes it `crun run --detach`, one process that does create and start, under the name crun-run.
	OneCall bool
	// Workers is how many calls of Once may overlap. 0: one per CPU.
	Workers int
}

// hostID is the host's name for root of the containers.
const hostID = 0x5f000000

// startLimit bounds one container's start, and its end.
const startLimit = 30 * time.Second

var errStartLimit = fmt.Errorf("not done in %s: %w", startLimit, context.DeadlineExceeded)

// Crun measures crun as those drive it who make containers on a machine (containerd's shims, Docker, CRI-O): from the
// call of `crun create` through `crun start` until the container runs its own program. Needs root.
//
// The configuration is what `crun spec` gives, with the program and what a native sandbox has too, as far as crun can:
// namespaces of its own, the user namespace with 65,536 ids among them, the filter of system calls, capabilities, masked
// and read-only paths, limits, an overlay of its own. The filter is given to it compiled: crun 1.8 takes some 50 ms to
// compile Moby's, which those who drive it pay for each container, and which would be a comparison of compilers.
//
// crun refuses machines on which control groups are hybrid. There it gets a private mount namespace that shows it the
// v2 tree alone, which has no controllers, so that its containers have no limits: a difference in its favour.
type Crun struct {
	cfg    CrunConfig
	path   string
	dir    string // ours in cfg.Dir
	spec   []byte
	hybrid bool
	cgroup string
	serial atomic.Int64
	// started is told of each container's process; for tests.
	started func(pid string) error
	work    chan job
	wg      sync.WaitGroup
}

type job struct {
	ctx   context.Context
	reply chan outcome
}

type outcome struct {
	took time.Duration
	err  error
}

// NewCrun makes the peer.
func NewCrun(cfg CrunConfig) *Crun {
	if len(cfg.Args) == 0 {
		cfg.Args = []string{"/bin/sleep", "3600"}
	}
	if cfg.Workers == 0 {
		cfg.Workers = runtime.NumCPU()
	}
	return &Crun{cfg: cfg, work: make(chan job)}
}

// Name of the peer.
func (c *Crun) Name() string {
	if c.cfg.OneCall {
		return "crun-run"
	}
	return "crun"
}

// Prepare finds crun and starts the threads that call it.
func (c *Crun) Prepare(ctx context.Context) (err error) {
	if c.path, err = exec.LookPath("crun"); err != nil {
		return err
	}
	if st, err := os.Stat(c.cfg.Rootfs); err != nil || !st.IsDir() {
		return errors.Join(fmt.Errorf("root file system %s is not a directory", c.cfg.Rootfs), err)
	}
	table, err := mountinfo.GetMounts(mountinfo.FSTypeFilter("cgroup", "cgroup2"))
	if err != nil {
		return err
	}
	c.hybrid = layout(table) == "hybrid"
	if c.dir, err = os.MkdirTemp(c.cfg.Dir, "bench-crun-"); err != nil {
		return err
	}
	// Root of a container must reach its root file system.
	if err := os.Chmod(c.dir, 0o711); err != nil {
		return err
	}
	c.cgroup = fmt.Sprintf("sandsea-bench-%d-%s", os.Getpid(), c.Name())
	if c.spec, err = c.makeSpec(ctx); err != nil {
		return err
	}
	ready := make(chan error, c.cfg.Workers)
	for range c.cfg.Workers {
		c.wg.Go(func() { c.worker(ready) })
	}
	for range c.cfg.Workers {
		err = errors.Join(err, <-ready)
	}
	return err
}

// makeSpec takes crun's own configuration and changes what a sandbox needs.
func (c *Crun) makeSpec(ctx context.Context) ([]byte, error) {
	dir := filepath.Join(c.dir, "spec")
	if err := os.Mkdir(dir, 0o700); err != nil {
		return nil, err
	}
	cmd := exec.CommandContext(ctx, c.path, "spec")
	cmd.Dir = dir
	if out, err := cmd.CombinedOutput(); err != nil {
		return nil, fmt.Errorf("crun spec: %w: %s", err, bytes.TrimSpace(out))
	}
	b, err := os.ReadFile(filepath.Join(dir, "config.json"))
	if err != nil {
		return nil, err
	}
	var spec map[string]any
	if err := json.Unmarshal(b, &spec); err != nil {
		return nil, fmt.Errorf("crun spec: %w", err)
	}
	process, ok := spec["process"].(map[string]any)
	linux, ok2 := spec["linux"].(map[string]any)
	if !ok || !ok2 {
		return nil, errors.New("crun spec: no process or linux in it")
	}
	process["terminal"] = false
	process["args"] = c.cfg.Args
	process["noNewPrivileges"] = false // sudo works in ours
	held := map[string]any{}
	for _, set := range []string{"bounding", "effective", "permitted"} {
		held[set] = capabilities
	}
	process["capabilities"] = held
	spec["root"] = map[string]any{"path": "rootfs", "readonly": !c.cfg.Overlay}
	spaces := []map[string]any{}
	for _, kind := range []string{"user", "pid", "network", "ipc", "uts", "mount", "cgroup"} {
		spaces = append(spaces, map[string]any{"type": kind})
	}
	linux["namespaces"] = spaces
	ids := []map[string]any{{"containerID": 0, "hostID": hostID, "size": 65536}}
	linux["uidMappings"], linux["gidMappings"] = ids, ids
	if len(c.cfg.Filter) > 0 {
		spec["annotations"] = map[string]string{"run.oci.seccomp_bpf_data": base64.StdEncoding.EncodeToString(c.cfg.Filter)}
	}
	linux["maskedPaths"], linux["readonlyPaths"] = masked, readOnly
	delete(linux, "resources")
	if !c.hybrid {
		resources := map[string]any{}
		if c.cfg.Memory > 0 {
			resources["memory"] = map[string]any{"limit": c.cfg.Memory}
		}
		if c.cfg.CPUMillis > 0 {
			resources["cpu"] = map[string]any{"quota": c.cfg.CPUMillis * 100, "period": 100_000}
		}
		if c.cfg.Pids > 0 {
			resources["pids"] = map[string]any{"limit": c.cfg.Pids}
		}
		linux["resources"] = resources
	}
	// Replaced for each container.
	linux["cgroupsPath"] = "/" + c.cgroup + "/" + placeholder
	return json.Marshal(spec)
}

const placeholder = "@name@"

// What a native sandbox has.
var (
	capabilities = []string{
		"CAP_AUDIT_WRITE", "CAP_CHOWN", "CAP_DAC_OVERRIDE", "CAP_FOWNER", "CAP_FSETID", "CAP_KILL", "CAP_MKNOD",
		"CAP_NET_BIND_SERVICE", "CAP_NET_RAW", "CAP_SETFCAP", "CAP_SETGID", "CAP_SETPCAP", "CAP_SETUID", "CAP_SYS_CHROOT",
	}
	masked = []string{
		"/proc/acpi", "/proc/asound", "/proc/cmdline", "/proc/config.gz", "/proc/driver", "/proc/interrupts", "/proc/iomem",
		"/proc/ioports", "/proc/kallsyms", "/proc/kcore", "/proc/key-users", "/proc/keys", "/proc/kmsg",
		"/proc/kpagecgroup", "/proc/kpagecount", "/proc/kpageflags", "/proc/latency_stats", "/proc/mtrr",
		"/proc/pagetypeinfo", "/proc/pressure", "/proc/sched_debug", "/proc/schedstat", "/proc/scsi", "/proc/slabinfo",
		"/proc/sysrq-trigger", "/proc/timer_list", "/proc/timer_stats", "/proc/vmallocinfo", "/proc/vmcore",
		"/proc/zoneinfo", "/sys/devices/virtual/block", "/sys/devices/virtual/powercap", "/sys/firmware", "/sys/kernel",
	}
	readOnly = []string{"/proc/bus", "/proc/fs", "/proc/irq", "/proc/sys"}
)

// worker calls crun from a thread that sees the machine as crun wants it.
func (c *Crun) worker(ready chan<- error) {
	// Never unlocked when the namespace was changed: the thread ends with this goroutine.
	runtime.LockOSThread()
	if syscall.Gettid() == syscall.Getpid() {
		// The first thread never ends, so it must not be changed. Held here, it leaves another one to the worker.
		done := make(chan struct{})
		go func() {
			defer close(done)
			c.worker(ready)
		}()
		<-done
		runtime.UnlockOSThread()
		return
	}
	if err := c.view(); err != nil {
		ready <- err
		return
	}
	ready <- nil
	for j := range c.work {
		took, err := c.once(j.ctx)
		j.reply <- outcome{took, err}
	}
}

// view gives the calling thread a mount namespace of its own, in which overlays are mounted and, on a hybrid machine,
// the v2 tree is all that there is of control groups.
func (c *Crun) view() error {
	if err := syscall.Unshare(syscall.CLONE_NEWNS | syscall.CLONE_FS); err != nil {
		return fmt.Errorf("mount namespace for crun: %w", err)
	}
	if err := syscall.Mount("", "/", "", syscall.MS_REC|syscall.MS_PRIVATE, ""); err != nil {
		return fmt.Errorf("mount namespace for crun: %w", err)
	}
	if !c.hybrid {
		return nil
	}
	if err := syscall.Mount("none", "/sys/fs/cgroup", "cgroup2", 0, ""); err != nil {
		return fmt.Errorf("show crun the v2 tree: %w", err)
	}
	return nil
}

// Once starts a container, ends it and removes it.
func (c *Crun) Once(ctx context.Context) (time.Duration, error) {
	j := job{ctx, make(chan outcome, 1)}
	select {
	case c.work <- j:
	case <-ctx.Done():
		return 0, context.Cause(ctx)
	}
	o := <-j.reply
	return o.took, o.err
}

func (c *Crun) once(ctx context.Context) (took time.Duration, err error) {
	ctx, stop := context.WithTimeoutCause(ctx, startLimit, errStartLimit)
	defer stop()
	name := fmt.Sprintf("b%d", c.serial.Add(1))
	bundle := filepath.Join(c.dir, name)
	for _, d := range []string{"", "rootfs", "upper", "work"} {
		if err := os.Mkdir(filepath.Join(bundle, d), 0o755); err != nil {
			return 0, err
		}
	}
	defer func() { err = errors.Join(err, os.RemoveAll(bundle)) }()
	if err := os.Chown(filepath.Join(bundle, "upper"), hostID, hostID); err != nil {
		return 0, err
	}
	spec := bytes.Replace(c.spec, []byte(placeholder), []byte(name), 1)
	if err := os.WriteFile(filepath.Join(bundle, "config.json"), spec, 0o600); err != nil {
		return 0, err
	}
	root := filepath.Join(bundle, "rootfs")
	pidFile := filepath.Join(bundle, "pid")
	// Files of its own: crun gives the container's root what it has for standard streams, and that would be the machine's
	// /dev/null. And no pipe, since the container inherits it and would keep it open.
	stdio, err := os.Create(filepath.Join(bundle, "stdio"))
	if err != nil {
		return 0, err
	}
	defer stdio.Close()

	begin := time.Now()
	if c.cfg.Overlay {
		options := fmt.Sprintf("lowerdir=%s,upperdir=%s,workdir=%s", c.cfg.Rootfs, filepath.Join(bundle, "upper"),
			filepath.Join(bundle, "work"))
		err = syscall.Mount("overlay", root, "overlay", 0, options)
	} else {
		err = syscall.Mount(c.cfg.Rootfs, root, "", syscall.MS_BIND|syscall.MS_REC, "")
	}
	if err != nil {
		return 0, fmt.Errorf("mount the root: %w", err)
	}
	defer func() {
		if umountErr := syscall.Unmount(root, syscall.MNT_DETACH); umountErr != nil {
			err = errors.Join(err, fmt.Errorf("unmount the root: %w", umountErr))
		}
	}()
	calls := [][]string{{"create", "--bundle", bundle, "--pid-file", pidFile, name}, {"start", name}}
	if c.cfg.OneCall {
		calls = [][]string{{"run", "--detach", "--bundle", bundle, "--pid-file", pidFile, name}}
	}
	defer func() { err = errors.Join(err, c.remove(ctx, name)) }()
	for _, args := range calls {
		cmd := c.command(ctx, args...)
		cmd.Stdin, cmd.Stdout, cmd.Stderr = stdio, stdio, stdio
		if err := cmd.Run(); err != nil {
			said, _ := os.ReadFile(stdio.Name())
			return 0, fmt.Errorf("crun %s: %w: %s", args[0], err, bytes.TrimSpace(said))
		}
	}
	if err := c.awaitProgram(ctx, pidFile); err != nil {
		return 0, err
	}
	took = time.Since(begin)
	if c.started != nil {
		b, err := os.ReadFile(pidFile)
		if err == nil {
			err = c.started(strings.TrimSpace(string(b)))
		}
		if err != nil {
			return 0, err
		}
	}
	return took, nil
}

func (c *Crun) command(ctx context.Context, args ...string) *exec.Cmd {
	cmd := exec.CommandContext(ctx, c.path, append([]string{"--root", filepath.Join(c.dir, "state")}, args...)...)
	cmd.Dir = c.dir
	return cmd
}

// awaitProgram returns when the container's process runs its own program and crun's no more.
func (c *Crun) awaitProgram(ctx context.Context, pidFile string) error {
	b, err := os.ReadFile(pidFile)
	if err != nil {
		return err
	}
	link := "/proc/" + strings.TrimSpace(string(b)) + "/exe"
	want := filepath.Base(c.cfg.Args[0])
	if real, err := filepath.EvalSymlinks(filepath.Join(c.cfg.Rootfs, c.cfg.Args[0])); err == nil {
		want = filepath.Base(real)
	}
	for {
		exe, err := os.Readlink(link)
		if err != nil {
			return fmt.Errorf("the container ended at once: %w", err)
		}
		if filepath.Base(exe) == want {
			return nil
		}
		if err := context.Cause(ctx); err != nil {
			return fmt.Errorf("the container still runs %s: %w", exe, err)
		}
		runtime.Gosched()
	}
}

// remove ends a container. After a failed start there may be none.
func (c *Crun) remove(ctx context.Context, name string) error {
	ctx, stop := context.WithTimeoutCause(context.WithoutCancel(ctx), startLimit, errStartLimit)
	defer stop()
	if _, err := os.Stat(filepath.Join(c.dir, "state", name)); errors.Is(err, os.ErrNotExist) {
		return nil
	}
	if out, err := c.command(ctx, "delete", "--force", name).CombinedOutput(); err != nil {
		return fmt.Errorf("crun delete: %w: %s", err, bytes.TrimSpace(out))
	}
	return nil
}

// Notes say what differs from other peers.
func (c *Crun) Notes() []string {
	root := "read-only root"
	if c.cfg.Overlay {
		root = "overlay root"
	}
	if c.cfg.OneCall {
		return []string{"crun-run: the same by one call, crun run --detach"}
	}
	notes := []string{fmt.Sprintf("crun: create, then start, %s; user namespace, capabilities and masked"+
		" paths like ours, the same filter of system calls, given to it compiled; the lower layer is not id-mapped, and there"+
		" is no disk limit, no output limit and nobody inside who waits for commands", root)}
	if c.hybrid {
		notes = append(notes, "crun refuses hybrid control groups: it sees the v2 tree alone and enforces no memory, cpu or"+
			" pids limit here")
	}
	return notes
}

// Close removes everything.
func (c *Crun) Close() error {
	if c.work != nil {
		close(c.work)
		c.work = nil
	}
	c.wg.Wait()
	var errs []error
	if c.dir != "" {
		errs = append(errs, os.RemoveAll(c.dir))
	}
	if c.cgroup != "" {
		table, err := mountinfo.GetMounts(mountinfo.FSTypeFilter("cgroup", "cgroup2"))
		errs = append(errs, err)
		for _, m := range table {
			err := os.Remove(filepath.Join(m.Mountpoint, c.cgroup))
			if err != nil && !errors.Is(err, os.ErrNotExist) {
				errs = append(errs, err)
			}
		}
	}
	return errors.Join(errs...)
}
