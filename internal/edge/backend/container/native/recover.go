package native

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"os"

	"github.com/sandsea/sandsea/api/errdefs"
	"github.com/sandsea/sandsea/internal/edge/backend"
	"github.com/sandsea/sandsea/internal/edge/cgroup"
	"github.com/sandsea/sandsea/internal/edge/netslot"
	"github.com/sandsea/sandsea/internal/linux/pidfd"
	"github.com/sandsea/sandsea/internal/sandbox"
)

// Recover implements backend.Backend. A sandbox whose PID 1 died while no edge was there is found too: its Instance is
// done, with the evidence of how it ended. It sends nothing over the line; the caller greets.
func (b *Backend) Recover(_ context.Context, id sandbox.ID, raw backend.Handle) (_ backend.Instance, err error) {
	h, err := decodeHandle(id, raw)
	if err != nil {
		return nil, err
	}
	gone := func(format string, args ...any) error {
		return errdefs.New(errdefs.NotFound, object(id), format, args...)
	}
	if b.cfg.Held == nil {
		return nil, gone("nobody holds it")
	}
	control, pid, ok := b.cfg.Held(id)
	if !ok {
		return nil, gone("nobody holds it")
	}
	i := &Instance{
		b: b, id: id, hard: h.Hard, limits: h.Limits, pid: h.Pid, identity: h.Identity, pidfd: pid, control: control,
		cpus: h.CPUs, enforce: h.Enforcement, handle: raw, broke: make(chan struct{}, 1), done: make(chan struct{}),
	}
	defer func() {
		if err == nil {
			return
		}
		if i.line != nil {
			_ = i.line.Close()
		}
		if i.group != nil {
			_ = i.group.Close()
		}
		if i.lease != nil {
			i.lease.Give()
		}
		control.Close()
		pid.Close()
	}()
	identity, err := pidfd.Identity(pid)
	if err != nil {
		return nil, err
	}
	if identity != h.Identity {
		return nil, gone("what is held under its name is another process")
	}
	if i.group, err = b.groupOf(h); err != nil {
		return nil, err // NotFound when it is gone
	}
	if i.lease, err = b.cfg.Ranges.Adopt(h.UIDBase); err != nil {
		return nil, fmt.Errorf("recover %s: %w", id, err)
	}
	if i.oom, err = i.group.OOMKills(); err != nil {
		return nil, err
	}
	if i.slot, err = b.slotOf(h, i.group); err != nil {
		return nil, fmt.Errorf("recover %s: %w", id, err)
	}
	if dead, derr := pidfd.Done(pid); derr != nil {
		return nil, derr
	} else if dead {
		i.oom = 0 // nobody has looked yet
	}
	i.line = newLine(control, i.lineEnded)
	b.own(i.group.ID())
	b.register(i)
	if !b.watch(i) {
		b.disown(i.group.ID())
		b.forget(id)
		return nil, errdefs.New(errdefs.Unavailable, object(id), "the edge is closing")
	}
	return i, nil
}

// slotOf finds the link of a sandbox from before. One whose process 1 is gone has none any more; nor has one on a node
// that lost its gate, whose walls stand as they were.
func (b *Backend) slotOf(h handle, g *cgroup.Group) (*netslot.Slot, error) {
	if h.Slot == 0 || b.cfg.Gate == nil {
		return nil, nil
	}
	id, err := g.Number()
	if err != nil {
		return nil, err
	}
	slot, err := b.cfg.Gate.Adopt(h.Slot, id)
	if errors.Is(err, errdefs.NotFound) {
		return nil, nil
	}
	return slot, err
}

// Sweep implements backend.Backend. It goes by names: control groups, writable layers and records of output that bear
// this edge's tag or lie in its data directory. A control group is named in the handle of its sandbox, so that what no
// instance of this Backend uses is nobody's: half of a start, or a process that an edge before had made ready.
// Afterwards every range of user ids that no kept sandbox has is free.
func (b *Backend) Sweep(ctx context.Context, keep func(sandbox.ID) bool) error {
	groups, err := b.cfg.Cgroups.Names()
	errs := []error{err}
	// The groups first: with them everything that could still use the rest ends.
	for _, n := range groups {
		b.mu.Lock()
		ours := b.groups[n]
		b.mu.Unlock()
		if ours {
			continue
		}
		b.log.Info("sweeping a control group", "group", n)
		if err := b.cfg.Cgroups.Remove(ctx, n); err != nil {
			errs = append(errs, fmt.Errorf("sweep: %w", err))
		}
	}
	found := map[sandbox.ID]bool{}
	collect := func(names []string, err error) error {
		for _, n := range names {
			found[sandbox.ID(n)] = true
		}
		return err
	}
	errs = append(errs, collect(b.cfg.Uppers.Names()), collect(b.records()))
	for id := range found {
		if keep(id) {
			continue
		}
		if err := b.sweep(ctx, id); err != nil {
			errs = append(errs, fmt.Errorf("sweep %s: %w", id, err))
		}
	}
	if err := errors.Join(errs...); err != nil {
		return err
	}
	b.cfg.Ranges.Settle()
	if b.cfg.Gate != nil {
		if err := b.cfg.Gate.Settle(ctx); err != nil {
			return err
		}
	}
	b.warm.open()
	return nil
}

// sweep removes every trace of one sandbox, whose control group is gone or an instance's.
func (b *Backend) sweep(ctx context.Context, id sandbox.ID) error {
	b.log.Info("sweeping a sandbox", "sandbox", id)
	b.mu.Lock()
	i := b.instances[id]
	b.mu.Unlock()
	if i != nil {
		if _, err := i.Stop(ctx, 0); err != nil {
			return err
		}
	}
	k, _ := b.keeper()
	return errors.Join(releaseKept(ctx, k, id), b.cfg.Uppers.Release(string(id)), b.removeRecord(id))
}

func (b *Backend) records() ([]string, error) {
	if b.cfg.Output == "" {
		return nil, nil
	}
	entries, err := os.ReadDir(b.cfg.Output)
	if errors.Is(err, fs.ErrNotExist) {
		return nil, nil
	}
	if err != nil {
		return nil, fmt.Errorf("list recorded output: %w", err)
	}
	var names []string
	for _, e := range entries {
		if _, err := sandbox.Parse(e.Name()); err == nil {
			names = append(names, e.Name())
		}
	}
	return names, nil
}

func (b *Backend) removeRecord(id sandbox.ID) error {
	if b.cfg.Output == "" {
		return nil
	}
	root, err := os.OpenRoot(b.cfg.Output)
	if errors.Is(err, fs.ErrNotExist) {
		return nil
	}
	if err != nil {
		return err
	}
	defer func() { _ = root.Close() }()
	return root.RemoveAll(string(id))
}
