package cgroup

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"syscall"
	"time"

	"github.com/sandsea/sandsea/internal/linux/cgroupfs"
)

// errBusy is the cause of a removal that ran out of time.
var errBusy = errors.New("processes in it do not end")

// kill ends every process in the group and below it.
func kill(dir *os.File) error {
	err := cgroupfs.Write(dir, "cgroup.kill", "1")
	if cgroupfs.Gone(err) {
		return nil
	}
	return err
}

// removeTree removes the group name below parent with the groups in it. While it is busy it tries again, until ctx
// ends: a process that was killed leaves its group when it is gone, not when the signal is sent. With v1 it kills by
// itself, since there is no cgroup.kill.
func removeTree(ctx context.Context, parent *os.File, name string, v1 bool) error {
	err := cgroupfs.Rmdir(parent, name)
	if err == nil || cgroupfs.Gone(err) {
		return nil
	}
	for wait := newBackoff(); ; {
		if cgroupfs.Busy(err) {
			if inner := removeInside(ctx, parent, name, v1); inner != nil {
				return inner
			}
			err = cgroupfs.Rmdir(parent, name)
		}
		if err == nil || cgroupfs.Gone(err) {
			return nil
		}
		if !cgroupfs.Busy(err) {
			return err
		}
		if stop := wait.sleep(ctx); stop != nil {
			return fmt.Errorf("%w: %w", stop, err)
		}
		err = cgroupfs.Rmdir(parent, name)
	}
}

func removeInside(ctx context.Context, parent *os.File, name string, v1 bool) error {
	dir, err := cgroupfs.OpenAt(parent, name)
	if errors.Is(err, fs.ErrNotExist) {
		return nil
	}
	if err != nil {
		return err
	}
	defer dir.Close()
	if v1 {
		if err := cgroupfs.Signal(dir, int(syscall.SIGKILL)); err != nil && !cgroupfs.Gone(err) {
			return err
		}
	}
	names, err := cgroupfs.Groups(dir)
	if err != nil && !cgroupfs.Gone(err) {
		return err
	}
	for _, n := range names {
		if err := removeTree(ctx, dir, n, v1); err != nil {
			return err
		}
	}
	return nil
}

// backoff waits a little longer each time, from 0.1 to 20 ms: most groups are empty at once, the rest are waited for
// without burning a core.
type backoff struct{ next time.Duration }

func newBackoff() *backoff { return &backoff{next: 100 * time.Microsecond} }

// sleep returns the cause of ctx when it ends before the time.
func (b *backoff) sleep(ctx context.Context) error {
	t := time.NewTimer(b.next)
	defer t.Stop()
	b.next = min(2*b.next, 20*time.Millisecond)
	select {
	case <-ctx.Done():
		return context.Cause(ctx)
	case <-t.C:
		return nil
	}
}
