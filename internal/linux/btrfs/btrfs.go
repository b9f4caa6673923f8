// Package btrfs makes, limits, measures and removes subvolumes of a btrfs file system by ioctl.
//
// All functions may be called concurrently.
package btrfs

import (
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"strconv"
	"strings"

	"golang.org/x/sys/unix"
)

// Is reports whether f lies on btrfs.
func Is(f *os.File) (bool, error) {
	var st unix.Statfs_t
	if err := unix.Fstatfs(int(f.Fd()), &st); err != nil {
		return false, fmt.Errorf("statfs %s: %w", f.Name(), err)
	}
	return st.Type == unix.BTRFS_SUPER_MAGIC, nil
}

// Quota is how a file system counts what subvolumes hold.
type Quota string

// The ways. Simple counts an extent for the subvolume that wrote it, which costs next to nothing (Linux 6.7 or later);
// full follows every reference.
const (
	QuotaNone   Quota = "none"
	QuotaSimple Quota = "simple quotas"
	QuotaFull   Quota = "qgroups"
)

const (
	quotaEnable       = 1
	quotaEnableSimple = 4
)

// EnableQuota turns counting on, simple where the kernel can, and reports how it counts. It may be called again.
func EnableQuota(fs *os.File) (Quota, error) {
	if q, err := QuotaOf(fs); err != nil || q != QuotaNone {
		return q, err
	}
	err := quotaCtl(fs, quotaEnableSimple)
	if err == nil {
		return QuotaSimple, nil
	}
	// EINVAL: a kernel that does not know the command.
	if !errors.Is(err, unix.EINVAL) {
		return QuotaNone, fmt.Errorf("enable simple quotas: %w", err)
	}
	if err := quotaCtl(fs, quotaEnable); err != nil {
		return QuotaNone, fmt.Errorf("enable qgroups: %w", err)
	}
	if err := quotaRescanWait(fs); err != nil {
		return QuotaNone, fmt.Errorf("wait for the first count: %w", err)
	}
	return QuotaFull, nil
}

// QuotaOf tells how a file system counts now.
func QuotaOf(fs *os.File) (Quota, error) {
	dir, err := sysfs(fs)
	if err != nil {
		return QuotaNone, err
	}
	mode, err := readFile(filepath.Join(dir, "qgroups", "mode"))
	switch {
	case errors.Is(err, os.ErrNotExist):
		// Kernels that have no "mode" have full qgroups or none.
		if _, err := os.Stat(filepath.Join(dir, "qgroups", "0_5")); errors.Is(err, os.ErrNotExist) {
			return QuotaNone, nil
		}
		return QuotaFull, nil
	case err != nil:
		return QuotaNone, err
	case mode == "squota":
		return QuotaSimple, nil
	case mode == "qgroup":
		return QuotaFull, nil
	default:
		return QuotaNone, nil
	}
}

// Create makes an empty subvolume below dir.
func Create(dir *os.File, name string) error {
	if err := volArgs(dir, iocSubvolCreate, name); err != nil {
		return fmt.Errorf("create subvolume %s/%s: %w", dir.Name(), name, err)
	}
	return nil
}

// Destroy removes the subvolume name below dir, whatever is in it and however full it is. The kernel frees the space in
// the background, once nothing in it is in use, after a checkpoint: they are 30 s apart unless the mount option "commit"
// says otherwise. (BTRFS_IOC_START_SYNC asks for one now, and at times waits for the next one itself.)
func Destroy(dir *os.File, name string) error {
	if err := volArgs(dir, iocSnapDestroy, name); err != nil {
		return fmt.Errorf("destroy subvolume %s/%s: %w", dir.Name(), name, err)
	}
	return nil
}

// Limit bounds what the subvolume that f lies in may hold, metadata included. Counting must be on.
//
// The bound is on what it refers to, not on what it has for itself: of an extent that a snapshot shares the latter is
// nothing, and who is snapshotted could write on for ever.
func Limit(f *os.File, bytes int64) error {
	if err := limit(f, uint64(bytes)); err != nil {
		return fmt.Errorf("limit subvolume %s: %w", f.Name(), err)
	}
	return nil
}

// ID is the number of the subvolume that f lies in.
func ID(f *os.File) (uint64, error) {
	id, err := treeID(f)
	if err != nil {
		return 0, fmt.Errorf("number of subvolume %s: %w", f.Name(), err)
	}
	return id, nil
}

// Usage is what the subvolume that f lies in holds, and what it has set aside for writes under way.
func Usage(f *os.File) (int64, error) {
	id, err := ID(f)
	if err != nil {
		return 0, err
	}
	dir, err := sysfs(f)
	if err != nil {
		return 0, err
	}
	sum := int64(0)
	for _, file := range []string{"referenced", "rsv_data"} {
		s, err := readFile(filepath.Join(dir, "qgroups", fmt.Sprintf("0_%d", id), file))
		if err != nil {
			return 0, err
		}
		n, err := strconv.ParseInt(s, 10, 64)
		if err != nil {
			return 0, fmt.Errorf("%s of subvolume %d: %w", file, id, err)
		}
		sum += n
	}
	return sum, nil
}

// DropCount forgets the count of a destroyed subvolume; kernels since 6.11 do so by themselves. Busy until the kernel
// has freed the last of it; success when there is none.
func DropCount(fs *os.File, id uint64) error {
	err := qgroupDrop(fs, id)
	if errors.Is(err, unix.ENOENT) {
		return nil
	}
	return err
}

// Busy reports whether err says that something is still in use.
func Busy(err error) bool { return errors.Is(err, unix.EBUSY) }

// sysfs is the directory of the file system that f lies on.
func sysfs(f *os.File) (string, error) {
	id, err := fsid(f)
	if err != nil {
		return "", fmt.Errorf("identity of btrfs at %s: %w", f.Name(), err)
	}
	return fmt.Sprintf("/sys/fs/btrfs/%x-%x-%x-%x-%x", id[0:4], id[4:6], id[6:8], id[8:10], id[10:16]), nil
}

func readFile(path string) (string, error) {
	b, err := os.ReadFile(path)
	return strings.TrimSpace(string(b)), err
}
