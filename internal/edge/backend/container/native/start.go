package native

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"strconv"
	"time"

	"github.com/sandsea/sandsea/api/errdefs"
	"github.com/sandsea/sandsea/internal/chronus"
	"github.com/sandsea/sandsea/internal/chronus/wire"
	"github.com/sandsea/sandsea/internal/edge/backend"
	"github.com/sandsea/sandsea/internal/edge/cgroup"
	"github.com/sandsea/sandsea/internal/layers/compose"
	"github.com/sandsea/sandsea/internal/layers/plan"
	"github.com/sandsea/sandsea/internal/linux/mount"
	"github.com/sandsea/sandsea/internal/linux/pidfd"
	"github.com/sandsea/sandsea/internal/linux/scm"
	"github.com/sandsea/sandsea/internal/node"
	"github.com/sandsea/sandsea/internal/sandbox"
	"github.com/sandsea/sandsea/internal/spawner"
)

// Start implements backend.Backend.
func (b *Backend) Start(ctx context.Context, id sandbox.ID, p plan.Plan, l sandbox.Limits, hard time.Time,
) (_ backend.Instance, err error) {
	ctx, stop := context.WithTimeoutCause(ctx, startLimit,
		errdefs.New(errdefs.Deadline, object(id), "not ready after %s", startLimit))
	defer stop()
	var u undo
	defer func() {
		if err == nil {
			return
		}
		if uerr := u.run(ctx); uerr != nil {
			// Sweep finds by name what is left.
			b.log.Error("a start could not be taken back whole", "sandbox", id, "err", uerr)
		}
	}()
	if err := context.Cause(ctx); err != nil {
		return nil, fmt.Errorf("start %s: %w", id, err)
	}
	files, err := b.openFiles(id, l.OpenFiles)
	if err != nil {
		return nil, err
	}

	i := &Instance{b: b, id: id, hard: hard, limits: l, broke: make(chan struct{}, 1), done: make(chan struct{})}
	b.stage("")
	if i.lease, err = b.cfg.Ranges.Take(); err != nil {
		return nil, err
	}
	b.stage("range")
	u.push(func(context.Context) error { i.lease.Give(); return nil })
	if i.group, err = b.newGroup(i); err != nil {
		return nil, err
	}
	u.push(func(ctx context.Context) error { return i.group.Remove(ctx) }) // whichever it is by then
	b.stage("cgroup")
	root, err := b.root(ctx, i, p, &u)
	if err != nil {
		return nil, err
	}
	defer root.Close()
	dev, err := mount.Clone(b.dev, false)
	if err != nil {
		return nil, err
	}
	defer dev.Close()
	if err := mount.Idmap(dev, i.lease.UserNS(), mount.ReadOnly); err != nil {
		return nil, err
	}
	i.lease.Mounted()
	sys, err := mount.Clone(b.sys, false)
	if err != nil {
		return nil, err
	}
	defer sys.Close()

	b.stage("dev,sys")
	child, err := b.spawn(ctx, i, spawner.Spec{
		ID: string(id), Root: root, Dev: dev, Sys: sys, UIDBase: i.lease.Base,
	})
	if err != nil {
		return nil, err
	}
	b.stage("spawn")
	i.pid, i.pidfd, i.control = child.Pid, child.Pidfd, child.Control
	u.push(func(ctx context.Context) error {
		err := errors.Join(i.group.Kill(), pidfd.Wait(ctx, i.pidfd))
		i.pidfd.Close()
		i.control.Close()
		return err
	})
	if i.identity, err = pidfd.Identity(i.pidfd); err != nil {
		return nil, err
	}

	// The keeper takes its descriptors while the inside is set up: nothing of the workload runs before both are done.
	b.register(i)
	u.push(func(ctx context.Context) error {
		b.forget(id)
		k, _ := b.keeper()
		return releaseKept(ctx, k, id)
	})
	held := make(chan error, 1)
	go func() { held <- b.holdInstance(ctx, i) }()
	i.line = newLine(i.control, i.lineEnded)
	u.push(func(context.Context) error { return i.line.Close() })
	setup := wire.Setup{
		Hostname: p.Hostname, OpenFiles: files, NoNewPrivs: p.NoNewPrivs, Caps: b.cfg.Caps, Filter: b.cfg.Filter,
		CPUs: b.pin(l.CPUMillis), VisibleCPUs: b.visible(l.CPUMillis), ShmBytes: shmBytes(l.Memory),
	}
	force, err := i.line.Setup(ctx, setup)
	b.stage("setup")
	if herr := <-held; err == nil && herr != nil {
		err = fmt.Errorf("keeper: %w", herr)
	}
	if err != nil {
		return nil, b.explain(i, err)
	}
	if err := short(id, setup, force); err != nil {
		return nil, err
	}
	i.cpus = setup.CPUs
	i.enforce = b.enforcement(setup, force)
	if i.handle, err = i.encode(); err != nil {
		return nil, err
	}
	b.stage("keeper")
	if !b.watch(i) {
		return nil, errdefs.New(errdefs.Unavailable, object(id), "the edge is closing")
	}
	return i, nil
}

// root makes the root file system as a detached mount.
func (b *Backend) root(ctx context.Context, i *Instance, p plan.Plan, u *undo) (*os.File, error) {
	up, err := b.cfg.Uppers.Take(ctx, string(i.id), i.limits.Disk, i.lease.Base)
	if err != nil {
		return nil, err
	}
	defer func() { _ = up.Close() }()
	b.stage("upper")
	defer b.stage("overlay")
	u.push(func(context.Context) error { return b.cfg.Uppers.Release(string(i.id)) })
	dirs, closeDirs, err := anonymous(compose.Upper{Dir: up.Dir, Work: up.Work})
	if err != nil {
		return nil, fmt.Errorf("writable layer of %s: %w", i.id, err)
	}
	defer closeDirs() // the overlay has a mount of its own by then
	return b.cfg.Layers.Overlay(ctx, p.Layers, i.lease.UserNS(), dirs)
}

// anonymous names the directories of a writable layer from a mount that begins at their common parent: the mount table
// inside shows their paths, and those would tell where the layer lies.
func anonymous(up compose.Upper) (_ compose.Upper, closeAll func(), err error) {
	var files []*os.File
	closeAll = func() { scm.CloseFiles(files) }
	defer func() {
		if err != nil {
			closeAll()
		}
	}()
	vol, err := mount.CloneAt(up.Dir, "..", false)
	if err != nil {
		return compose.Upper{}, nil, err
	}
	files = append(files, vol)
	dir, err := mount.OpenDir(vol, filepath.Base(up.Dir.Name()))
	if err != nil {
		return compose.Upper{}, nil, err
	}
	files = append(files, dir)
	work, err := mount.OpenDir(vol, filepath.Base(up.Work.Name()))
	if err != nil {
		return compose.Upper{}, nil, err
	}
	files = append(files, work)
	return compose.Upper{Dir: dir, Work: work}, closeAll, nil
}

// newGroup makes the control groups of a sandbox, with all limits in force.
func (b *Backend) newGroup(i *Instance) (*cgroup.Group, error) {
	g, err := b.cfg.Cgroups.Create(string(i.id), i.limits)
	if err != nil {
		return nil, err
	}
	if err := g.Own(i.lease.Base); err != nil {
		return nil, errors.Join(fmt.Errorf("control group of %s: %w", i.id, err), g.Remove(context.Background()))
	}
	return g, nil
}

// spawn forks PID 1. A spawner that dies meanwhile may or may not have forked: what is in the group is killed, and it
// is tried once more, in a new group. (The kernel, as of Linux 6.18, kills whatever is cloned into a group whose
// cgroup.kill was ever used, if it comes from a group where that was used less often.)
func (b *Backend) spawn(ctx context.Context, i *Instance, s spawner.Spec) (spawner.Child, error) {
	for try := 0; ; try++ {
		tasks, err := i.group.Tasks()
		if err != nil {
			return spawner.Child{}, err
		}
		s.Cgroup, s.Tasks = i.group.V2(), tasks
		ch, err := b.cfg.Spawner.Spawn(ctx, s)
		scm.CloseFiles(tasks)
		if err == nil || try > 0 || ctx.Err() != nil || !errors.Is(err, errdefs.Unavailable) {
			return ch, err
		}
		b.log.Warn("spawner lost, trying again", "sandbox", i.id, "err", err)
		if err := i.group.Remove(ctx); err != nil {
			return spawner.Child{}, err
		}
		g, err := b.newGroup(i)
		if err != nil {
			return spawner.Child{}, err
		}
		i.group = g
	}
}

// explain adds to a failed start what the kernel knows: a sandbox whose memory is too small for PID 1 says so.
func (b *Backend) explain(i *Instance, err error) error {
	if n, oerr := i.group.OOMKills(); oerr == nil && n > 0 {
		return errdefs.New(errdefs.FailedPrecondition, object(i.id), "out of memory while it started").
			WithField("limits.memory_bytes", strconv.FormatInt(i.limits.Memory, 10)).WithHint("Ask for more memory").Wrap(err)
	}
	return err
}

// short compares what is in force with what was asked for.
func short(id sandbox.ID, want wire.Setup, got chronus.InForce) error {
	lacks := func(feature, format string, args ...any) error {
		e := errdefs.New(errdefs.FailedPrecondition, object(id), format, args...).WithHint("See: sandsea doctor")
		e.Feature = feature
		return e
	}
	switch {
	case !got.UserNS:
		return lacks(node.FeatureUserNS, "it has no user namespace of its own")
	case len(want.Filter) > 0 && !got.Seccomp:
		return lacks(node.FeatureSeccomp, "no system-call filter is in force")
	case want.NoNewPrivs && !got.NoNewPrivs:
		return lacks(node.FeatureSeccomp, "no_new_privs is not in force")
	case got.Caps&^want.Caps != 0:
		return lacks(node.FeatureUserNS, "capabilities %#x are left beyond the plan", got.Caps&^want.Caps)
	case got.Masks == 0:
		return lacks(node.FeatureUserNS, "nothing of /proc is masked")
	case got.OpenFiles != want.OpenFiles:
		return lacks(node.FeatureOpenFiles, "%d open files are in force, not %d", got.OpenFiles, want.OpenFiles)
	}
	return nil
}

// enforcement names the mechanism of everything that holds.
func (b *Backend) enforcement(s wire.Setup, f chronus.InForce) map[string]string {
	out := b.cfg.Cgroups.Mechanisms()
	out[node.FeatureDisk] = b.cfg.Uppers.Mechanism()
	out[node.FeatureOpenFiles] = "rlimit " + strconv.FormatInt(f.OpenFiles, 10)
	out[node.FeatureOutput] = "keeper"
	out[node.FeatureUserNS] = "65,536 ids, id-mapped layers"
	out[node.FeatureSeccomp] = fmt.Sprintf("%d instructions", len(s.Filter)/8)
	out[node.FeatureNetwork] = "network namespace without a way out"
	out[node.FeatureLayers] = "EROFS by file, overlayfs"
	if f.NoNewPrivs {
		out["no_new_privs"] = "prctl"
	}
	return out
}

// shmBytes bounds /dev/shm by half of the memory, as the kernel does for a machine; what is in it counts as memory.
func shmBytes(memory int64) int64 { return max(memory/2, 1<<20) &^ 4095 }

func (b *Backend) register(i *Instance) {
	b.mu.Lock()
	defer b.mu.Unlock()
	b.instances[i.id] = i
}

func (b *Backend) forget(id sandbox.ID) {
	b.mu.Lock()
	defer b.mu.Unlock()
	delete(b.instances, id)
}

// holdInstance gives the sandbox to the keeper.
func (b *Backend) holdInstance(ctx context.Context, i *Instance) error {
	h, ok, err := i.held()
	if err != nil || !ok {
		return err
	}
	defer h.Kill.Close()
	return b.hold(ctx, h)
}

// handleVersion is raised when a field changes its meaning; fields are only added.
const handleVersion = 1

// handle is what is journaled: names and numbers, no descriptors.
type handle struct {
	Version     int               `json:"version"`
	ID          sandbox.ID        `json:"id"`
	UIDBase     uint32            `json:"uid_base"`
	Pid         int               `json:"pid"`
	Identity    uint64            `json:"identity"` // of the pidfd, unique in this boot
	Hard        time.Time         `json:"hard"`
	Limits      sandbox.Limits    `json:"limits"`
	CPUs        []int             `json:"cpus,omitempty"`
	Enforcement map[string]string `json:"enforcement"`
}

func (i *Instance) encode() (backend.Handle, error) {
	return json.Marshal(handle{
		Version: handleVersion, ID: i.id, UIDBase: i.lease.Base, Pid: i.pid, Identity: i.identity, Hard: i.hard,
		Limits: i.limits, CPUs: i.cpus, Enforcement: i.enforce,
	})
}

func decodeHandle(id sandbox.ID, raw backend.Handle) (handle, error) {
	var h handle
	if err := json.Unmarshal(raw, &h); err != nil {
		return h, errdefs.New(errdefs.DataLoss, object(id), "its handle is no JSON").Wrap(err)
	}
	if h.Version != handleVersion || h.ID != id {
		return h, errdefs.New(errdefs.DataLoss, object(id), "a handle of version %d for sandbox %q", h.Version, h.ID)
	}
	return h, nil
}

// groupOf finds the control group of a sandbox from before.
func (b *Backend) groupOf(id sandbox.ID) (*cgroup.Group, error) {
	return b.cfg.Cgroups.Find(string(id))
}

// stage tells a benchmark that a step is done.
func (b *Backend) stage(name string) {
	if b.onStage != nil {
		b.onStage(name)
	}
}
