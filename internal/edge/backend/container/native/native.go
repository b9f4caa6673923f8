package native

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"os"
	"slices"
	"strconv"
	"strings"
	"sync"
	"sync/atomic"
	"syscall"

	"github.com/sandsea/sandsea/api/errdefs"
	"github.com/sandsea/sandsea/internal/edge/backend"
	"github.com/sandsea/sandsea/internal/edge/cgroup"
	"github.com/sandsea/sandsea/internal/edge/netslot"
	"github.com/sandsea/sandsea/internal/edge/uidrange"
	"github.com/sandsea/sandsea/internal/edge/upper"
	"github.com/sandsea/sandsea/internal/keeper"
	"github.com/sandsea/sandsea/internal/layers/compose"
	"github.com/sandsea/sandsea/internal/linux/affinity"
	"github.com/sandsea/sandsea/internal/linux/mount"
	"github.com/sandsea/sandsea/internal/linux/pidfd"
	"github.com/sandsea/sandsea/internal/linux/userns"
	"github.com/sandsea/sandsea/internal/node"
	"github.com/sandsea/sandsea/internal/sandbox"
	"github.com/sandsea/sandsea/internal/spawner"
)

// Config is what a Backend works with. All parts stay the caller's and are closed after the Backend.
type Config struct {
	// Spawner lives through restarts of its process: spawner.Redial.
	Spawner spawner.Client
	// Keeper may be replaced later by Keep.
	Keeper  keeper.Client
	Cgroups *cgroup.Manager
	Uppers  *upper.Store
	Ranges  *uidrange.Pool
	Layers  *compose.Composer
	// Gate is where links lead; nil: this node gives none.
	Gate *netslot.Gate
	// Filter is the system-call filter of everything that runs inside: seccomp.Default.
	Filter []byte
	// Caps is the capability bounding set inside: wire.DefaultCaps.
	Caps uint64
	// Output is the directory of recorded output, DIR/output: Sweep removes that of sandboxes that are not kept. Empty:
	// none.
	Output string
	// Held gives the descriptors of a sandbox from before, out of the keeper's roster; they become the Backend's. Nil:
	// there are none.
	Held func(id sandbox.ID) (control, pidfd *os.File, ok bool)
	// Warm is how many sandboxes are kept made ready ahead, up to what depends on what is asked for: DefaultWarm. Each
	// costs some 0.4 MB of memory and a range of user ids. 0: none.
	Warm int
	Log  *slog.Logger
}

// DefaultWarm covers the starts that come at once now and then; those of a burst beyond it are made as they come.
const DefaultWarm = 8

// Validate reports what is missing.
func (c Config) Validate() error {
	for _, f := range []struct {
		name string
		ok   bool
	}{
		{"spawner", c.Spawner != nil},
		{"keeper", c.Keeper != nil},
		{"cgroups", c.Cgroups != nil},
		{"uppers", c.Uppers != nil},
		{"uid ranges", c.Ranges != nil},
		{"layers", c.Layers != nil},
		{"system-call filter", len(c.Filter) > 0},
		{"log", c.Log != nil},
	} {
		if !f.ok {
			return fmt.Errorf("native backend: no %s", f.name)
		}
	}
	return nil
}

// Backend implements backend.Backend.
type Backend struct {
	cfg     Config
	log     *slog.Logger
	dev     devices
	sys     *os.File // the /sys that all sandboxes share
	cpus    []int
	nextCPU atomic.Uint64
	noFile  int64

	onStage   func(string)  // for benchmarks; nil
	nameGroup func() string // groupName, but in a test

	warm *pool

	wg sync.WaitGroup // watchers of instances

	mu        sync.Mutex
	closed    bool                     // guarded by mu
	instances map[sandbox.ID]*Instance // guarded by mu: from before Hold until all is given back
	groups    map[string]bool          // guarded by mu: control groups of instances and shells, from before they are made
	keep      keeper.Client            // guarded by mu
	kept      chan struct{}            // guarded by mu: closed when keep is replaced
}

var _ backend.Backend = (*Backend)(nil)

// New prepares what all sandboxes share.
func New(cfg Config) (_ *Backend, err error) {
	if err := cfg.Validate(); err != nil {
		return nil, err
	}
	b := &Backend{
		cfg: cfg, log: cfg.Log, instances: map[sandbox.ID]*Instance{}, groups: map[string]bool{},
		keep: cfg.Keeper, kept: make(chan struct{}),
	}
	b.nameGroup = groupName
	b.warm = &pool{size: cfg.Warm, b: b, wake: make(chan struct{}, 1), limits: shellLimits}
	if b.cpus, err = affinity.Allowed(); err != nil {
		return nil, err
	}
	var lim syscall.Rlimit
	if err := syscall.Getrlimit(syscall.RLIMIT_NOFILE, &lim); err != nil {
		return nil, fmt.Errorf("limit of open files: %w", err)
	}
	b.noFile = int64(min(lim.Max, 1<<30))
	if b.dev, err = newDevices(); err != nil {
		return nil, fmt.Errorf("/dev of sandboxes: %w", err)
	}
	if b.sys, err = mount.Sysfs(); err != nil {
		_ = b.dev.close()
		return nil, fmt.Errorf("/sys of sandboxes: %w", err)
	}
	return b, nil
}

// Probe implements backend.Backend.
func (b *Backend) Probe(ctx context.Context) (node.Capabilities, error) {
	c := node.Capabilities{CPUs: len(b.cpus), Cgroup: b.cfg.Cgroups.Mode(), NoFile: b.noFile}
	var err error
	if c.Kernel, err = readLine("/proc/sys/kernel/osrelease"); err != nil {
		return c, err
	}
	pidMax, err := readLine("/proc/sys/kernel/pid_max")
	if err != nil {
		return c, err
	}
	if c.PidMax, err = strconv.ParseInt(pidMax, 10, 64); err != nil {
		return c, fmt.Errorf("pid_max: %w", err)
	}
	var info syscall.Sysinfo_t
	if err := syscall.Sysinfo(&info); err != nil {
		return c, fmt.Errorf("size of memory: %w", err)
	}
	c.Memory = int64(info.Totalram) * int64(info.Unit)

	have, lack := b.cfg.Cgroups.Mechanisms(), b.cfg.Cgroups.Lacks()
	for _, name := range []string{node.FeatureMemory, node.FeatureCPU, node.FeaturePids, node.FeatureKill} {
		f := node.Feature{Name: name, Status: node.OK, Mechanism: have[name]}
		if f.Mechanism == "" {
			f.Status, f.Fix = node.Missing, lack[name]
		}
		c.Features = append(c.Features, f)
	}
	add := func(name, mechanism, fix string, err error) {
		f := node.Feature{Name: name, Status: node.OK, Mechanism: mechanism}
		if err != nil {
			f.Status, f.Mechanism, f.Fix = node.Missing, "", fmt.Sprintf("%s (%v)", fix, err)
		}
		c.Features = append(c.Features, f)
	}
	// The Store would not be there if no limit held.
	add(node.FeatureDisk, b.cfg.Uppers.Mechanism(), "", nil)
	add(node.FeatureOpenFiles, fmt.Sprintf("rlimit, at most %d", b.noFile), "", nil)
	add(node.FeatureOutput, "keeper", "", nil)
	add(node.FeatureSeccomp, fmt.Sprintf("%d instructions", len(b.cfg.Filter)/8), "", seccompKnown())
	add(node.FeatureNetwork, "network namespace", "", nil) // b.sys was made in one
	ns, err := userns.New(probeBase)
	add(node.FeatureUserNS, "65,536 ids of its own, id-mapped layers",
		"Allow user namespaces: sysctl user.max_user_namespaces", err)
	if err == nil {
		ok, reason := compose.Probe(ns)
		ns.Close()
		err = nil
		if !ok {
			err = errors.New(reason)
		}
	}
	add(node.FeatureLayers, "EROFS by file, overlayfs by descriptor",
		"Use Linux 6.15 or later with EROFS and overlayfs", err)
	f := node.Feature{Name: node.FeatureExitFacts, Status: node.OK, Mechanism: "PIDFD_GET_INFO", Optional: true}
	if err := pidfd.Probe(); err != nil {
		f.Status, f.Mechanism = node.Missing, ""
		f.Fix = fmt.Sprintf("Use Linux 6.15 or later; until then a sandbox that ends by itself is infra_unknown (%v)", err)
	}
	c.Features = append(c.Features, f)
	slices.SortFunc(c.Features, func(a, b node.Feature) int { return strings.Compare(a.Name, b.Name) })
	return c, ctx.Err()
}

// probeBase is the last range that exists, which package uidrange never gives.
const probeBase = 1<<31 - 2*uidrange.Size

func readLine(path string) (string, error) {
	b, err := os.ReadFile(path)
	return strings.TrimSpace(string(b)), err
}

// seccompKnown reports whether the kernel takes filters; that the filter is in force in a sandbox is what its inside
// reports at each start.
func seccompKnown() error {
	_, err := os.Stat("/proc/sys/kernel/seccomp/actions_avail")
	return err
}

// Keep replaces the keeper after its death: every sandbox is held again. Calls that wait for a keeper go on.
func (b *Backend) Keep(ctx context.Context, k keeper.Client) error {
	b.mu.Lock()
	b.keep = k
	close(b.kept)
	b.kept = make(chan struct{})
	var all []*Instance
	for _, i := range b.instances {
		all = append(all, i)
	}
	b.mu.Unlock()
	var errs []error
	for _, i := range all {
		h, ok, err := i.held()
		if err == nil && ok {
			err = k.Hold(ctx, h)
			h.Kill.Close()
		}
		if i.givenBack() { // meanwhile: the Release of that may have come before
			err = releaseKept(ctx, k, i.id)
		}
		if err != nil {
			errs = append(errs, fmt.Errorf("hold sandbox %s: %w", i.id, err))
		}
	}
	return errors.Join(errs...)
}

func (b *Backend) keeper() (keeper.Client, <-chan struct{}) {
	b.mu.Lock()
	defer b.mu.Unlock()
	return b.keep, b.kept
}

var errNoKeeper = errors.New("no keeper came")

// hold gives a sandbox to the keeper, or to its successor if it dies just now.
func (b *Backend) hold(ctx context.Context, s keeper.Sandbox) error {
	for {
		k, replaced := b.keeper()
		err := k.Hold(ctx, s)
		if !errors.Is(err, errdefs.Unavailable) {
			return err
		}
		wait, stop := context.WithTimeoutCause(ctx, keeperLimit, errNoKeeper)
		select {
		case <-replaced:
			stop()
		case <-wait.Done():
			stop()
			return err
		}
	}
}

// Close ends the edge's interest: lines and descriptors are closed, sandboxes live on with the keeper. What was made
// ready ahead ends. Idempotent.
func (b *Backend) Close() error {
	b.mu.Lock()
	if b.closed {
		b.mu.Unlock()
		return nil
	}
	b.closed = true
	all := make([]*Instance, 0, len(b.instances))
	for _, i := range b.instances {
		all = append(all, i)
	}
	b.mu.Unlock()
	b.warm.close()
	for _, i := range all {
		i.abandon()
	}
	b.wg.Wait()
	return errors.Join(b.dev.close(), b.sys.Close())
}

// pin chooses processors for a quota: as many as it can keep busy, the next ones in turn. Nil is all of them.
func (b *Backend) pin(millis int64) []int {
	n := cpusFor(millis)
	if n >= len(b.cpus) {
		return nil
	}
	at := int((b.nextCPU.Add(uint64(n)) - uint64(n)) % uint64(len(b.cpus)))
	out := make([]int, n)
	for i := range out {
		out[i] = b.cpus[(at+i)%len(b.cpus)]
	}
	slices.Sort(out)
	return out
}

// visible is how many processors a workload with this quota sees.
func (b *Backend) visible(millis int64) int { return min(cpusFor(millis), len(b.cpus)) }

func cpusFor(millis int64) int { return int(min((max(millis, 1)+999)/1000, 1<<20)) }

// openFiles is the limit in force for a request. The default means as many as the node has; more that was asked for
// expressly is refused.
func (b *Backend) openFiles(id sandbox.ID, want int64) (int64, error) {
	switch {
	case want <= 0:
		return 0, errdefs.New(errdefs.Invalid, object(id), "limits.open_files is %d", want).
			WithField("limits.open_files", "above 0")
	case want <= b.noFile:
		return want, nil
	case want == sandbox.DefaultOpenFiles:
		return b.noFile, nil
	}
	e := errdefs.New(errdefs.FailedPrecondition, object(id), "limits.open_files is %d, this node has %d", want, b.noFile).
		WithField("limits.open_files", strconv.FormatInt(b.noFile, 10)).
		WithHint("Ask for less, or raise the node's hard limit of open files")
	e.Feature = node.FeatureOpenFiles
	return 0, e
}

func object(id sandbox.ID) string { return "sandbox " + id.Short() }
