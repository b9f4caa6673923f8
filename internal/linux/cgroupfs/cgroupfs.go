// Package cgroupfs works on the files of a control group through an open directory, so that a name that was removed and
// made again is never written by mistake and no call walks the path from the root.
//
// It knows files, not controllers: what to write where is the business of edge/cgroup. All functions may be called
// concurrently.
package cgroupfs

import (
	"errors"
	"fmt"
	"io/fs"
	"os"
	"slices"
	"strconv"
	"strings"

	"golang.org/x/sys/unix"
)

// maxRead bounds what is read of one file; cgroup.procs of a group with 100,000 processes is below it.
const maxRead = 1 << 20

// Open opens the control group directory at path.
func Open(path string) (*os.File, error) {
	fd, err := retry(func() (int, error) { return unix.Open(path, unix.O_DIRECTORY|unix.O_RDONLY|unix.O_CLOEXEC, 0) })
	if err != nil {
		return nil, &fs.PathError{Op: "open", Path: path, Err: err}
	}
	return os.NewFile(uintptr(fd), path), nil
}

// OpenAt opens the directory name below parent.
func OpenAt(parent *os.File, name string) (*os.File, error) {
	return openat(parent, name, unix.O_DIRECTORY|unix.O_RDONLY|unix.O_NOFOLLOW)
}

// OpenWrite opens a file of the group for writing: cgroup.procs, cgroup.kill.
func OpenWrite(dir *os.File, file string) (*os.File, error) {
	return openat(dir, file, unix.O_WRONLY|unix.O_NOFOLLOW)
}

// Mkdir makes the group name below parent. It is fs.ErrExist when there is one.
func Mkdir(parent *os.File, name string) error {
	return at("mkdir", parent, name, func(fd int) error { return unix.Mkdirat(fd, name, 0o755) })
}

// Rmdir removes the group name below parent: EBUSY while a process or a group is in it, fs.ErrNotExist when it is gone.
func Rmdir(parent *os.File, name string) error {
	return at("rmdir", parent, name, func(fd int) error { return unix.Unlinkat(fd, name, unix.AT_REMOVEDIR) })
}

// Chown gives a file of the group to uid and gid.
func Chown(dir *os.File, file string, uid, gid uint32) error {
	return at("chown", dir, file, func(fd int) error {
		return unix.Fchownat(fd, file, int(uid), int(gid), unix.AT_SYMLINK_NOFOLLOW)
	})
}

// Exists reports whether the group has the file.
func Exists(dir *os.File, file string) bool {
	var st unix.Stat_t
	err := at("stat", dir, file, func(fd int) error { return unix.Fstatat(fd, file, &st, unix.AT_SYMLINK_NOFOLLOW) })
	return err == nil
}

// Write writes value to a file of the group in one call, as the kernel wants it.
func Write(dir *os.File, file, value string) error {
	return at("write", dir, file, func(dirfd int) error {
		fd, err := retry(func() (int, error) {
			return unix.Openat(dirfd, file, unix.O_WRONLY|unix.O_CLOEXEC|unix.O_NOFOLLOW, 0)
		})
		if err != nil {
			return err
		}
		defer unix.Close(fd)
		n, err := retry(func() (int, error) { return unix.Write(fd, []byte(value)) })
		if err == nil && n != len(value) {
			err = unix.EIO
		}
		return err
	})
}

// Read reads a file of the group without its last newline.
func Read(dir *os.File, file string) (string, error) {
	var out []byte
	err := at("read", dir, file, func(dirfd int) error {
		fd, err := retry(func() (int, error) {
			return unix.Openat(dirfd, file, unix.O_RDONLY|unix.O_CLOEXEC|unix.O_NOFOLLOW, 0)
		})
		if err != nil {
			return err
		}
		defer unix.Close(fd)
		buf := make([]byte, 4096)
		for {
			n, err := retry(func() (int, error) { return unix.Read(fd, buf) })
			if err != nil {
				return err
			}
			if n == 0 {
				return nil
			}
			if len(out)+n > maxRead {
				return unix.EFBIG
			}
			out = append(out, buf[:n]...)
		}
	})
	if err != nil {
		return "", err
	}
	return strings.TrimSuffix(string(out), "\n"), nil
}

// ReadInt reads a file that holds one number; "max" is -1.
func ReadInt(dir *os.File, file string) (int64, error) {
	s, err := Read(dir, file)
	if err != nil {
		return 0, err
	}
	if s == "max" {
		return -1, nil
	}
	n, err := strconv.ParseUint(s, 10, 64)
	if err != nil {
		return 0, fmt.Errorf("read %s/%s: %w", dir.Name(), file, err)
	}
	// v1 says "unlimited" by a number near the top of 64 bits.
	return int64(min(n, 1<<63-1)), nil
}

// ReadKey reads one value of a file of lines "key value"; ok is false when the key is not there.
func ReadKey(dir *os.File, file, key string) (value int64, ok bool, err error) {
	s, err := Read(dir, file)
	if err != nil {
		return 0, false, err
	}
	for line := range strings.Lines(s) {
		k, v, _ := strings.Cut(strings.TrimSuffix(line, "\n"), " ")
		if k != key {
			continue
		}
		n, err := strconv.ParseInt(v, 10, 64)
		if err != nil {
			return 0, false, fmt.Errorf("read %s of %s/%s: %w", key, dir.Name(), file, err)
		}
		return n, true, nil
	}
	return 0, false, nil
}

// Procs lists the processes in the group itself, without those of groups below it. Processes of another pid namespace,
// which the kernel shows as 0, are left out.
func Procs(dir *os.File) ([]int, error) {
	s, err := Read(dir, "cgroup.procs")
	if err != nil {
		return nil, err
	}
	var pids []int
	for line := range strings.Lines(s) {
		pid, err := strconv.Atoi(strings.TrimSuffix(line, "\n"))
		if err != nil {
			return nil, fmt.Errorf("read %s/cgroup.procs: %w", dir.Name(), err)
		}
		if pid > 0 {
			pids = append(pids, pid)
		}
	}
	return pids, nil
}

// Groups lists the groups right below dir, sorted.
func Groups(dir *os.File) ([]string, error) {
	// A descriptor of its own, since the offset of dir is shared by all who hold it.
	d, err := openat(dir, ".", unix.O_DIRECTORY|unix.O_RDONLY)
	if err != nil {
		return nil, err
	}
	defer d.Close()
	entries, err := d.ReadDir(-1)
	if err != nil {
		return nil, err
	}
	var names []string
	for _, e := range entries {
		if e.IsDir() {
			names = append(names, e.Name())
		}
	}
	slices.Sort(names)
	return names, nil
}

// Busy reports whether err says that a group still holds processes or groups.
func Busy(err error) bool { return errors.Is(err, unix.EBUSY) || errors.Is(err, unix.ENOTEMPTY) }

// Gone reports whether err says that the group is not there any more: its name, or the directory that we hold open.
func Gone(err error) bool { return errors.Is(err, unix.ENOENT) || errors.Is(err, unix.ENODEV) }

// Full reports whether err says that the kernel has no room for one more group.
func Full(err error) bool {
	return errors.Is(err, unix.ENOSPC) || errors.Is(err, unix.EAGAIN) || errors.Is(err, unix.ENOMEM)
}

func openat(dir *os.File, name string, flags int) (*os.File, error) {
	var f *os.File
	err := at("open", dir, name, func(dirfd int) error {
		fd, err := retry(func() (int, error) { return unix.Openat(dirfd, name, flags|unix.O_CLOEXEC, 0) })
		if err == nil {
			f = os.NewFile(uintptr(fd), dir.Name()+"/"+name)
		}
		return err
	})
	return f, err
}

// at runs do with the descriptor of dir, which stays open meanwhile, and puts the path into its error: fs.ErrClosed when
// dir is closed.
func at(op string, dir *os.File, name string, do func(fd int) error) error {
	rc, err := dir.SyscallConn()
	if err != nil {
		return err
	}
	var inner error
	if rc.Control(func(fd uintptr) { inner = do(int(fd)) }) != nil {
		inner = fs.ErrClosed
	}
	if inner != nil {
		return &fs.PathError{Op: op, Path: dir.Name() + "/" + name, Err: inner}
	}
	return nil
}

func retry(call func() (int, error)) (int, error) {
	for {
		n, err := call()
		if !errors.Is(err, unix.EINTR) {
			return n, err
		}
	}
}
