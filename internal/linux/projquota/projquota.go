// Package projquota limits directory trees by project quota, which ext4 and XFS have.
//
// A directory that bears a project id gives it to all that is made in it; the file system counts by id. Counting must
// have been turned on when the file system was mounted (prjquota). All functions may be called concurrently.
package projquota

import (
	"errors"
	"fmt"
	"os"
	"runtime"

	"golang.org/x/sys/unix"
)

// Mark gives an empty directory to a project; what is made in it inherits that.
func Mark(dir *os.File, project uint32) error {
	x, err := getXattr(dir)
	if err == nil {
		x.projid = project
		x.xflags |= projInherit
		err = setXattr(dir, x)
	}
	if err != nil {
		return fmt.Errorf("give %s to project %d: %w", dir.Name(), project, err)
	}
	return nil
}

// Project is the project to which f belongs; 0 is none.
func Project(f *os.File) (uint32, error) {
	x, err := getXattr(f)
	if err != nil {
		return 0, fmt.Errorf("project of %s: %w", f.Name(), err)
	}
	return x.projid, nil
}

// Limits of a project; 0 is without limit.
type Limits struct {
	Bytes  int64
	Inodes int64
}

// Set limits a project on the file system that fs lies on.
func Set(fs *os.File, project uint32, l Limits) error {
	q := dqblk{
		bhardlimit: uint64((l.Bytes + 1023) / 1024), bsoftlimit: uint64((l.Bytes + 1023) / 1024),
		ihardlimit: uint64(l.Inodes), isoftlimit: uint64(l.Inodes),
		valid: qifBlimits | qifIlimits,
	}
	if err := quotactl(fs, qSetQuota, project, &q); err != nil {
		return fmt.Errorf("set quota of project %d on %s: %w", project, fs.Name(), err)
	}
	return nil
}

// Usage is what a project holds on the file system that fs lies on, and its limits.
func Usage(fs *os.File, project uint32) (bytes int64, l Limits, err error) {
	var q dqblk
	if err := quotactl(fs, qGetQuota, project, &q); err != nil {
		return 0, l, fmt.Errorf("quota of project %d on %s: %w", project, fs.Name(), err)
	}
	return int64(q.curspace), Limits{Bytes: int64(q.bhardlimit) * 1024, Inodes: int64(q.ihardlimit)}, nil
}

// Full reports whether err is what a writer sees at the limit: EDQUOT, or ENOSPC from XFS.
func Full(err error) bool { return errors.Is(err, unix.EDQUOT) || errors.Is(err, unix.ENOSPC) }

// Bounded runs do without CAP_SYS_RESOURCE, with which no limit of ext4 would count. do must not start goroutines.
func Bounded(do func() error) error {
	runtime.LockOSThread()
	head := unix.CapUserHeader{Version: unix.LINUX_CAPABILITY_VERSION_3}
	var old, less [2]unix.CapUserData
	if err := unix.Capget(&head, &old[0]); err != nil {
		runtime.UnlockOSThread()
		return fmt.Errorf("capget: %w", err)
	}
	less = old
	less[0].Effective &^= 1 << unix.CAP_SYS_RESOURCE
	if err := unix.Capset(&head, &less[0]); err != nil {
		runtime.UnlockOSThread()
		return fmt.Errorf("capset: %w", err)
	}
	err := do()
	if capErr := unix.Capset(&head, &old[0]); capErr != nil {
		// The thread stays locked, so it ends with the goroutine and nobody else runs with less.
		return errors.Join(err, fmt.Errorf("capset: %w", capErr))
	}
	runtime.UnlockOSThread()
	return err
}
