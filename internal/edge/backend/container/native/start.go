package native

import (
	"context"
	"encoding/json"
	"fmt"
	"os"
	"strconv"
	"time"

	"github.com/sandsea/sandsea/api/errdefs"
	aether "github.com/sandsea/sandsea/internal/aether/wire"
	"github.com/sandsea/sandsea/internal/chronus"
	"github.com/sandsea/sandsea/internal/chronus/wire"
	"github.com/sandsea/sandsea/internal/edge/backend"
	"github.com/sandsea/sandsea/internal/edge/cgroup"
	"github.com/sandsea/sandsea/internal/layers/compose"
	"github.com/sandsea/sandsea/internal/layers/plan"
	"github.com/sandsea/sandsea/internal/node"
	"github.com/sandsea/sandsea/internal/sandbox"
)

// Start implements backend.Backend.
func (b *Backend) Start(ctx context.Context, s backend.Spec) (_ backend.Instance, err error) {
	id, p, l := s.ID, s.Plan, s.Limits
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

	b.warm.open()
	defer b.warm.begin(l, p.Network)()
	b.stage("")
	sh, err := b.takeShell(ctx, id, l, p.Network)
	if err != nil {
		return nil, err
	}
	i := &Instance{
		slot: sh.slot,
		b:    b, id: id, hard: s.Hard, limits: l, lease: sh.lease, group: sh.group, pid: sh.pid, identity: sh.identity,
		pidfd: sh.pidfd, control: sh.control, line: sh.line, broke: sh.broke, done: make(chan struct{}),
	}
	u.push(func(ctx context.Context) error { return sh.taken.run(ctx) })
	if s.Linked != nil && sh.slot != nil {
		s.Linked(sh.slot)
	}
	root, err := b.root(ctx, i, p, &u)
	if err != nil {
		return nil, err
	}
	defer root.Close()
	i.lease.Mounted()
	if err := sh.ready(ctx); err != nil {
		return nil, b.explain(i, err)
	}

	// The keeper takes its descriptors while the inside is set up: nothing of the workload runs before both are done.
	b.register(i)
	u.push(func(ctx context.Context) error {
		b.forget(id)
		k, _ := b.keeper()
		return releaseKept(ctx, k, id)
	})
	u.push(sh.kill) // before its root is taken back
	held := make(chan error, 1)
	go func() { held <- b.holdInstance(ctx, i) }()
	setup := wire.Setup{
		Hostname: p.Hostname, OpenFiles: files, NoNewPrivs: p.NoNewPrivs, Caps: b.cfg.Caps, Filter: b.cfg.Filter,
		CPUs: b.pin(l.CPUMillis), VisibleCPUs: b.visible(l.CPUMillis), ShmBytes: shmBytes(l.Memory),
		Root: root,
	}
	if p.Network {
		setup.Resolver = aether.Gateway
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
	root, err := b.cfg.Layers.Overlay(ctx, p.Layers, i.lease.UserNS(), compose.Upper{Dir: up.Dir, Work: up.Work})
	return root, errdefs.AtStage(err, errdefs.StageImage)
}

// takeShell gives a shell in which the limits of this sandbox are in force, with a link if it is to have one: one made
// ahead, or a new one.
func (b *Backend) takeShell(ctx context.Context, id sandbox.ID, l sandbox.Limits, network bool) (*shell, error) {
	s := b.warm.take(ctx, network)
	if s != nil {
		b.stage("warm")
		s.group.Serve(string(id))
		err := s.limit(l)
		b.stage("limits")
		if err == nil && network && s.slot == nil {
			err = b.connect(ctx, id, s)
			b.stage("link")
		}
		if err == nil {
			return s, nil
		}
		b.discard(ctx, s)
		// It may be too large for the limits already, which is for a start of its own to find and to tell.
		if cerr := context.Cause(ctx); cerr != nil {
			return nil, fmt.Errorf("start %s: %w", id, cerr)
		}
	}
	s, err := b.newShell(ctx, id, l, network, b.stage)
	if err != nil {
		return nil, err
	}
	s.group.Serve(string(id))
	return s, nil
}

// limit puts limits in force.
func (s *shell) limit(l sandbox.Limits) error {
	if l.Memory == s.limits.Memory && l.CPUMillis == s.limits.CPUMillis && l.Pids == s.limits.Pids {
		return nil
	}
	if err := s.group.Update(l); err != nil {
		return err
	}
	s.limits = l
	return nil
}

// explain adds to a failed start what the kernel knows: a sandbox whose memory is too small for PID 1 says so.
func (b *Backend) explain(i *Instance, err error) error {
	return b.explainOOM(i.id, i.group, i.limits, err)
}

func (b *Backend) explainOOM(id sandbox.ID, g *cgroup.Group, l sandbox.Limits, err error) error {
	if g == nil {
		return err
	}
	if n, oerr := g.OOMKills(); oerr == nil && n > 0 {
		return errdefs.New(errdefs.FailedPrecondition, object(id), "out of memory while it started").
			WithField("limits.memory_bytes", strconv.FormatInt(l.Memory, 10)).WithHint("Ask for more memory").Wrap(err)
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
	if s.Resolver.IsValid() {
		out[node.FeatureNetwork] = "network namespace with one link, to Aether"
		out[node.FeatureEgress] = "nftables, cgroup BPF, Aether"
	}
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
	Group       string            `json:"group,omitempty"` // its control groups; empty: named as it is itself
	UIDBase     uint32            `json:"uid_base"`
	Pid         int               `json:"pid"`
	Identity    uint64            `json:"identity"` // of the pidfd, unique in this boot
	Hard        time.Time         `json:"hard"`
	Limits      sandbox.Limits    `json:"limits"`
	CPUs        []int             `json:"cpus,omitempty"`
	Enforcement map[string]string `json:"enforcement"`
	Slot        uint32            `json:"slot,omitempty"` // number of its link; 0: none
}

func (i *Instance) encode() (backend.Handle, error) {
	var slot uint32
	if i.slot != nil {
		slot = i.slot.Number()
	}
	return json.Marshal(handle{
		Slot: slot, Version: handleVersion, ID: i.id, Group: i.group.ID(), UIDBase: i.lease.Base, Pid: i.pid, Identity: i.identity, Hard: i.hard,
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
func (b *Backend) groupOf(h handle) (*cgroup.Group, error) {
	name := h.Group
	if name == "" {
		name = string(h.ID)
	}
	g, err := b.cfg.Cgroups.Find(name)
	if err == nil {
		g.Serve(string(h.ID))
	}
	return g, err
}

// stage tells a benchmark that a step is done.
func (b *Backend) stage(name string) {
	if b.onStage != nil {
		b.onStage(name)
	}
}
