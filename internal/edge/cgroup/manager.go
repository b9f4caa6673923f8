package cgroup

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"log/slog"
	"maps"
	"os"
	"path/filepath"
	"regexp"
	"slices"
	"strconv"
	"strings"
	"sync"
	"sync/atomic"
	"syscall"
	"time"

	"github.com/moby/sys/mountinfo"

	"github.com/sandsea/sandsea/api/errdefs"
	"github.com/sandsea/sandsea/internal/linux/cgroupfs"
	"github.com/sandsea/sandsea/internal/node"
	"github.com/sandsea/sandsea/internal/sandbox"
)

// removeLimit bounds how long Remove waits for a group whose processes are dying.
const removeLimit = 5 * time.Second

// daemonPrefix marks groups of the platform's own processes; no sandbox id begins with it.
const daemonPrefix = "_"

// Config says whose groups these are.
type Config struct {
	// Tag is the first 8 hex digits of the data directory's id: it keeps two edges of one machine apart.
	Tag string
	// Log gets what is removed without having been asked for. Nil discards.
	Log *slog.Logger
}

var tagForm = regexp.MustCompile(`^[0-9a-z][0-9a-z-]{0,63}$`)

// Validate checks the configuration.
func (c Config) Validate() error {
	if !tagForm.MatchString(c.Tag) {
		return errdefs.New(errdefs.Invalid, "cgroup", "tag %q is not made of lower-case letters, digits and dashes", c.Tag)
	}
	return nil
}

// place is where one controller is used: a tree and our directory in it.
type place struct {
	mount  string
	parent *os.File
	v2     bool
}

// groupPrefix begins the name of each edge's directory in each tree.
const groupPrefix = "sandsea-"

// Manager owns the groups of one edge.
type Manager struct {
	name   string // "sandsea-TAG"
	log    *slog.Logger
	mode   string
	v2     place
	at     map[string]place // by controller; those that are missing have a reason in lacks
	lacks  map[string]string
	closes []*os.File
	// swapAccounted is false only where the kernel cannot count swap; whether there is any is asked at each Create.
	swapAccounted bool

	closeOnce sync.Once
	destroyed atomic.Bool
}

// Open finds the trees and makes our directory in each. It is FailedPrecondition when there is no v2 tree: without
// cgroup.kill a sandbox could not be ended surely. A controller that is in neither tree is not an error here; it shows
// in Mechanisms, and Create refuses.
func Open(cfg Config) (*Manager, error) {
	if err := cfg.Validate(); err != nil {
		return nil, err
	}
	table, err := mountinfo.GetMounts(mountinfo.FSTypeFilter("cgroup", "cgroup2"))
	if err != nil {
		return nil, fmt.Errorf("read mount table: %w", err)
	}
	return open(cfg, findMounts(table))
}

// Tags lists, of all edges of this machine that have groups, the tags that begin so. None without a v2 tree.
func Tags(prefix string) ([]string, error) {
	table, err := mountinfo.GetMounts(mountinfo.FSTypeFilter("cgroup", "cgroup2"))
	if err != nil {
		return nil, fmt.Errorf("read mount table: %w", err)
	}
	v2 := findMounts(table).v2
	if v2 == "" {
		return nil, nil
	}
	entries, err := os.ReadDir(v2)
	if err != nil {
		return nil, fmt.Errorf("list control groups: %w", err)
	}
	var out []string
	for _, e := range entries {
		if tag, ours := strings.CutPrefix(e.Name(), groupPrefix); ours && strings.HasPrefix(tag, prefix) {
			out = append(out, tag)
		}
	}
	return out, nil
}

func open(cfg Config, found mounts) (_ *Manager, err error) {
	m := &Manager{
		name: groupPrefix + cfg.Tag, log: cfg.Log, at: map[string]place{}, lacks: map[string]string{},
	}
	if m.log == nil {
		m.log = slog.New(slog.DiscardHandler)
	}
	if found.v2 == "" {
		return nil, missing("kill", node.FeatureKill, "cgroup.kill: no cgroup v2 tree is mounted").
			WithHint("Mount one: mkdir -p /sys/fs/cgroup/unified && mount -t cgroup2 none /sys/fs/cgroup/unified")
	}
	defer func() {
		if err != nil {
			m.Close()
		}
	}()
	root, err := cgroupfs.Open(found.v2)
	if err != nil {
		return nil, fmt.Errorf("open cgroup v2 tree: %w", err)
	}
	defer root.Close()
	available, err := cgroupfs.Read(root, "cgroup.controllers")
	if err != nil {
		return nil, fmt.Errorf("read controllers of the v2 tree: %w", err)
	}
	if m.v2, err = m.place(found.v2, root, true); err != nil {
		return nil, err
	}
	if !cgroupfs.Exists(m.v2.parent, "cgroup.kill") {
		return nil, missing("kill", node.FeatureKill, "cgroup.kill: this kernel does not have it").
			WithHint("Use Linux 5.14 or later")
	}
	onV2, onV1 := 0, 0
	for _, c := range controllers {
		switch {
		case slices.Contains(strings.Fields(available), c):
			if err := enable(c, root, m.v2.parent); err != nil {
				m.lacks[c] = err.Error()
				continue
			}
			m.at[c] = m.v2
			onV2++
		case found.v1[c] != "":
			p, err := m.placeV1(c, found.v1[c])
			if err != nil {
				m.lacks[c] = err.Error()
				continue
			}
			m.at[c] = p
			onV1++
		default:
			m.lacks[c] = "controller " + c + " is in neither the v2 nor a v1 tree"
		}
	}
	m.mode = "hybrid"
	if onV1 == 0 && onV2 > 0 {
		m.mode = "v2"
	}
	m.swapAccounted = m.probeSwap()
	return m, nil
}

// enable turns a v2 controller on for our directory and for the sandboxes in it.
func enable(controller string, dirs ...*os.File) error {
	for _, d := range dirs {
		on, err := cgroupfs.Read(d, "cgroup.subtree_control")
		if err != nil {
			return err
		}
		if slices.Contains(strings.Fields(on), controller) {
			continue
		}
		if err := cgroupfs.Write(d, "cgroup.subtree_control", "+"+controller); err != nil {
			return fmt.Errorf("enable controller %s: %w", controller, err)
		}
	}
	return nil
}

func (m *Manager) placeV1(controller, mount string) (place, error) {
	root, err := cgroupfs.Open(mount)
	if err != nil {
		return place{}, fmt.Errorf("open cgroup v1 tree of %s: %w", controller, err)
	}
	defer root.Close()
	return m.place(mount, root, false)
}

// place makes our directory in a tree, or finds it.
func (m *Manager) place(mount string, root *os.File, v2 bool) (place, error) {
	if err := cgroupfs.Mkdir(root, m.name); err != nil && !errors.Is(err, fs.ErrExist) {
		return place{}, fmt.Errorf("make the parent of all sandboxes: %w", err)
	}
	parent, err := cgroupfs.OpenAt(root, m.name)
	if err != nil {
		return place{}, fmt.Errorf("open the parent of all sandboxes: %w", err)
	}
	m.closes = append(m.closes, parent)
	return place{mount: mount, parent: parent, v2: v2}, nil
}

// probeSwap tells whether the memory controller counts swap.
func (m *Manager) probeSwap() bool {
	p, ok := m.at["memory"]
	if !ok {
		return false
	}
	if p.v2 {
		return cgroupfs.Exists(p.parent, "memory.swap.max")
	}
	return cgroupfs.Exists(p.parent, "memory.memsw.limit_in_bytes")
}

// Mode is "v2" when every controller that is there is on the v2 tree, else "hybrid".
func (m *Manager) Mode() string { return m.mode }

// Mechanisms names, by feature of package node, how a limit is enforced. A feature that is not there cannot be; Lacks
// tells why.
func (m *Manager) Mechanisms() map[string]string {
	out := map[string]string{node.FeatureKill: "cgroup v2 cgroup.kill"}
	for c, p := range m.at {
		if c == "memory" && !m.swapAccounted && swapOn() {
			continue
		}
		out[feature(c)] = mechanism(c, p.v2, m.swapAccounted)
	}
	return out
}

// Lacks tells, by feature, why a limit cannot be enforced.
func (m *Manager) Lacks() map[string]string {
	out := map[string]string{}
	for c, why := range m.lacks {
		out[feature(c)] = why
	}
	if _, ok := m.at["memory"]; ok && !m.swapAccounted && swapOn() {
		out[node.FeatureMemory] = noSwapAccount
	}
	return out
}

const noSwapAccount = "swap is on and the kernel does not count it (swapoff -a, or boot with swapaccount=1)"

// swapOn reports whether the machine has swap; when it cannot tell it says yes.
func swapOn() bool {
	b, err := os.ReadFile("/proc/swaps")
	if errors.Is(err, fs.ErrNotExist) {
		return false // a kernel without swap
	}
	return err != nil || strings.Count(strings.TrimSpace(string(b)), "\n") > 0
}

// ready refuses when one of the limits could not be enforced.
func (m *Manager) ready(object string, l sandbox.Limits) error {
	for _, f := range []struct {
		name  string
		value int64
	}{{"limits.memory_bytes", l.Memory}, {"limits.cpu_millis", l.CPUMillis}, {"limits.pids", l.Pids}} {
		if f.value <= 0 {
			return errdefs.New(errdefs.Invalid, object, "%s is %d: a sandbox without a limit is not made", f.name, f.value).
				WithField(f.name, "above 0")
		}
	}
	for _, c := range controllers {
		if why, ok := m.lacks[c]; ok {
			return cannot(object, c, why)
		}
	}
	if !m.swapAccounted && swapOn() {
		return cannot(object, "memory", noSwapAccount)
	}
	return nil
}

func cannot(object, controller, why string) error {
	e := missing(object, feature(controller), "the "+controller+" limit cannot be enforced: "+why)
	return e.WithField(settings(controller, true, sandbox.Limits{}, false)[0].field, "")
}

func missing(object, feature, msg string) *errdefs.Error {
	e := errdefs.New(errdefs.FailedPrecondition, object, "%s", msg).WithHint("See: sandsea doctor")
	e.Feature = feature
	return e
}

// Create makes the group id with all limits in force. AlreadyExists when there is one, whoever left it;
// Exhausted when the kernel has no room.
func (m *Manager) Create(id string, l sandbox.Limits) (_ *Group, err error) {
	if err := checkName(id); err != nil {
		return nil, err
	}
	if err := m.ready("sandbox "+id, l); err != nil {
		return nil, err
	}
	g := &Group{m: m, id: id}
	var made []*os.File
	defer func() {
		if err == nil {
			return
		}
		g.Close()
		for _, parent := range slices.Backward(made) {
			_ = cgroupfs.Rmdir(parent, id)
		}
	}()
	for _, p := range m.places() {
		if err := cgroupfs.Mkdir(p.parent, id); err != nil {
			return nil, wrapMkdir("sandbox "+id, err)
		}
		made = append(made, p.parent)
	}
	if g.dir, err = cgroupfs.OpenAt(m.v2.parent, id); err != nil {
		return nil, err
	}
	if err := g.each(func(controller string, p place, dir *os.File) error {
		for _, s := range settings(controller, p.v2, l, m.swapAccounted) {
			if err := g.set(dir, s); err != nil {
				return err
			}
		}
		return nil
	}); err != nil {
		return nil, err
	}
	return g, nil
}

// Find opens the group of a sandbox that lives on from before: NotFound when it is gone.
func (m *Manager) Find(id string) (*Group, error) {
	if err := checkName(id); err != nil {
		return nil, err
	}
	dir, err := cgroupfs.OpenAt(m.v2.parent, id)
	if errors.Is(err, fs.ErrNotExist) {
		return nil, errdefs.New(errdefs.NotFound, "sandbox "+id, "it has no control group").Wrap(err)
	}
	if err != nil {
		return nil, err
	}
	return &Group{m: m, id: id, dir: dir}, nil
}

// Names lists, sorted, the groups of sandboxes that there are in any tree.
func (m *Manager) Names() ([]string, error) {
	all := map[string]bool{}
	for _, p := range m.places() {
		names, err := cgroupfs.Groups(p.parent)
		if err != nil {
			return nil, fmt.Errorf("list control groups: %w", err)
		}
		for _, n := range names {
			if !strings.HasPrefix(n, daemonPrefix) {
				all[n] = true
			}
		}
	}
	return slices.Sorted(maps.Keys(all)), nil
}

// Kill ends every process of sandbox id, by name. Success when there is no such group.
func (m *Manager) Kill(id string) error {
	if err := checkName(id); err != nil {
		return err
	}
	dir, err := cgroupfs.OpenAt(m.v2.parent, id)
	if errors.Is(err, fs.ErrNotExist) {
		return nil
	}
	if err != nil {
		return err
	}
	defer dir.Close()
	return kill(dir)
}

// Remove kills whatever is in the groups of sandbox id and removes them from every tree, whether or not the sandbox was
// ever whole. Idempotent.
func (m *Manager) Remove(ctx context.Context, id string) error {
	if err := checkName(id); err != nil {
		return err
	}
	if m.destroyed.Load() {
		return nil
	}
	ctx, stop := context.WithTimeoutCause(ctx, removeLimit, errBusy)
	defer stop()
	if err := m.Kill(id); err != nil {
		return fmt.Errorf("kill sandbox %s: %w", id, err)
	}
	// v2 last: as long as its name is there, somebody who died in between sees that there is something to remove, and
	// what moved into v1 groups can be killed through it.
	for _, p := range slices.Backward(m.places()) {
		if err := removeTree(ctx, p.parent, id, !p.v2); err != nil {
			return fmt.Errorf("remove control group of sandbox %s below %s: %w", id, p.mount, err)
		}
	}
	return nil
}

// Daemon makes the group of one of the platform's own processes, outside of the group of whoever starts it, and returns
// its open v2 directory for syscall.SysProcAttr.CgroupFD. No limits but LimitDaemon's. Idempotent.
func (m *Manager) Daemon(name string) (*os.File, error) {
	if !tagForm.MatchString(name) {
		return nil, errdefs.New(errdefs.Invalid, "cgroup", "daemon name %q", name)
	}
	if err := cgroupfs.Mkdir(m.v2.parent, daemonPrefix+name); err != nil && !errors.Is(err, fs.ErrExist) {
		return nil, wrapMkdir("daemon "+name, err)
	}
	return cgroupfs.OpenAt(m.v2.parent, daemonPrefix+name)
}

// LimitDaemon bounds the memory, in bytes, of the processes that are in Daemon's group now; on v2, of whatever enters it
// later, too. Swap is not bounded: a daemon that outgrows its limit ends either way. Idempotent.
func (m *Manager) LimitDaemon(name string, memory int64) error {
	object := "daemon " + name
	p, ok := m.at["memory"]
	if !ok {
		return cannot(object, "memory", m.lacks["memory"])
	}
	own, err := m.Daemon(name)
	if err != nil {
		return err
	}
	defer own.Close()
	limit := settings("memory", p.v2, sandbox.Limits{Memory: memory}, false)[0]
	if p.v2 {
		if err := cgroupfs.Write(own, limit.file, limit.value); err != nil {
			return fmt.Errorf("limit memory of %s: %w", object, err)
		}
		return nil
	}
	if err := cgroupfs.Mkdir(p.parent, daemonPrefix+name); err != nil && !errors.Is(err, fs.ErrExist) {
		return wrapMkdir(object, err)
	}
	dir, err := cgroupfs.OpenAt(p.parent, daemonPrefix+name)
	if err != nil {
		return err
	}
	defer dir.Close()
	if err := cgroupfs.Write(dir, limit.file, limit.value); err != nil {
		return fmt.Errorf("limit memory of %s: %w", object, err)
	}
	pids, err := cgroupfs.Procs(own)
	if err != nil {
		return err
	}
	for _, pid := range pids {
		if err := cgroupfs.Write(dir, "cgroup.procs", strconv.Itoa(pid)); err != nil && !errors.Is(err, syscall.ESRCH) {
			return fmt.Errorf("limit memory of %s: %w", object, err)
		}
	}
	return nil
}

// DaemonPath is where Daemon's group lies, for whoever makes it by path (package supervise).
func (m *Manager) DaemonPath(name string) string {
	return filepath.Join(m.v2.mount, m.name, daemonPrefix+name)
}

// Close gives up the descriptors and leaves every group as it is.
func (m *Manager) Close() error {
	m.closeOnce.Do(func() {
		for _, f := range m.closes {
			f.Close()
		}
	})
	return nil
}

// Destroy removes every group of this edge, killing what is in them, and our directory in each tree; groups of daemons
// must be empty. The Manager is closed by it. Idempotent.
func (m *Manager) Destroy(ctx context.Context) error {
	if m.destroyed.Load() {
		return nil
	}
	names, err := m.Names()
	if err != nil {
		return err
	}
	var errs []error
	for _, id := range names {
		m.log.Info("removing control group", "sandbox", id)
		errs = append(errs, m.Remove(ctx, id))
	}
	ctx, stop := context.WithTimeoutCause(ctx, removeLimit, errBusy)
	defer stop()
	for _, p := range m.places() {
		errs = append(errs, m.removeParent(ctx, p))
	}
	if err := errors.Join(errs...); err != nil {
		return err
	}
	m.destroyed.Store(true)
	return m.Close()
}

func (m *Manager) removeParent(ctx context.Context, p place) error {
	root, err := cgroupfs.Open(p.mount)
	if err != nil {
		return err
	}
	defer root.Close()
	if err := removeTree(ctx, root, m.name, false); err != nil {
		return fmt.Errorf("remove %s/%s: %w", p.mount, m.name, err)
	}
	return nil
}

// places lists the trees in use, v2 first, each once: v1 controllers may share a mount.
func (m *Manager) places() []place {
	out := []place{m.v2}
	for _, c := range controllers {
		p, ok := m.at[c]
		if ok && !slices.ContainsFunc(out, func(o place) bool { return o.mount == p.mount }) {
			out = append(out, p)
		}
	}
	return out
}

var nameForm = regexp.MustCompile(`^[0-9a-z][0-9a-z-]{0,127}$`)

// checkName keeps names that are paths away from the kernel.
func checkName(id string) error {
	if !nameForm.MatchString(id) {
		return errdefs.New(errdefs.Invalid, "", "%q cannot be a sandbox's name", id)
	}
	return nil
}

func wrapMkdir(object string, err error) error {
	switch {
	case errors.Is(err, fs.ErrExist):
		return errdefs.New(errdefs.AlreadyExists, object, "it has a control group").Wrap(err)
	case cgroupfs.Full(err):
		return errdefs.New(errdefs.Exhausted, object, "the kernel has no room for another control group").Wrap(err)
	default:
		return fmt.Errorf("make control group of %s: %w", object, err)
	}
}
