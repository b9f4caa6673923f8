// Package dirfd works on the entries of an open directory, for directories that have no path: those of detached mounts.
//
// No function follows a symbolic link. All may be called concurrently.
package dirfd

import (
	"errors"
	"io"
	"io/fs"
	"os"

	"golang.org/x/sys/unix"
)

// Open opens the directory name below dir for reading; "." is dir itself, which may be a mount from fsmount.
func Open(dir *os.File, name string) (*os.File, error) {
	return open(dir, name, unix.O_RDONLY|unix.O_DIRECTORY, 0)
}

// Path opens the directory name below dir as a name only (O_PATH), as the kernel takes it for mounts.
func Path(dir *os.File, name string) (*os.File, error) {
	return open(dir, name, unix.O_PATH|unix.O_DIRECTORY, 0)
}

// CreateFile makes a new regular file below dir and opens it for writing.
func CreateFile(dir *os.File, name string, mode uint32) (*os.File, error) {
	return open(dir, name, unix.O_RDWR|unix.O_CREAT|unix.O_EXCL, mode)
}

// Mkdir makes a directory below dir with exactly this mode.
func Mkdir(dir *os.File, name string, mode uint32) error {
	if err := unix.Mkdirat(int(dir.Fd()), name, mode); err != nil {
		return failed("mkdir", dir, name, err)
	}
	if err := unix.Fchmodat(int(dir.Fd()), name, mode, 0); err != nil {
		return failed("chmod", dir, name, err)
	}
	return nil
}

// Chown gives an entry to uid and gid.
func Chown(dir *os.File, name string, uid, gid uint32) error {
	if err := unix.Fchownat(int(dir.Fd()), name, int(uid), int(gid), unix.AT_SYMLINK_NOFOLLOW); err != nil {
		return failed("chown", dir, name, err)
	}
	return nil
}

// Rename moves an entry and never replaces one: fs.ErrExist.
func Rename(from *os.File, name string, to *os.File, target string) error {
	err := unix.Renameat2(int(from.Fd()), name, int(to.Fd()), target, unix.RENAME_NOREPLACE)
	if err != nil {
		return failed("rename", from, name+" to "+target, err)
	}
	return nil
}

// Names lists the entries of dir.
func Names(dir *os.File) ([]string, error) {
	// A descriptor of its own, since the offset of dir is shared by all who hold it.
	d, err := Open(dir, ".")
	if err != nil {
		return nil, err
	}
	defer d.Close()
	return d.Readdirnames(-1)
}

// Clear removes everything below dir, if that is at most so many entries that hold at most so many bytes; else it is
// false, and some may be gone.
func Clear(dir *os.File, entries int, bytes int64) (bool, error) {
	return budget{&entries, &bytes}.clear(dir)
}

// budget is what Clear may still remove.
type budget struct {
	entries *int
	bytes   *int64
}

func (b budget) clear(dir *os.File) (bool, error) {
	d, err := Open(dir, ".")
	if err != nil {
		return false, err
	}
	defer d.Close()
	names, err := d.Readdirnames(*b.entries + 1)
	if err != nil && !errors.Is(err, io.EOF) {
		return false, err
	}
	if *b.entries -= len(names); *b.entries < 0 {
		return false, nil
	}
	for _, name := range names {
		if ok, err := b.remove(d, name); !ok || err != nil {
			return false, err
		}
	}
	return true, nil
}

func (b budget) remove(dir *os.File, name string) (bool, error) {
	var st unix.Stat_t
	if err := unix.Fstatat(int(dir.Fd()), name, &st, unix.AT_SYMLINK_NOFOLLOW); err != nil {
		return false, failed("stat", dir, name, err)
	}
	if *b.bytes -= st.Blocks * 512; *b.bytes < 0 {
		return false, nil
	}
	flags := 0
	if st.Mode&unix.S_IFMT == unix.S_IFDIR {
		sub, err := Open(dir, name)
		if err != nil {
			return false, err
		}
		ok, err := b.clear(sub)
		sub.Close()
		if !ok || err != nil {
			return false, err
		}
		flags = unix.AT_REMOVEDIR
	}
	if err := unix.Unlinkat(int(dir.Fd()), name, flags); err != nil {
		return false, failed("remove", dir, name, err)
	}
	return true, nil
}

// Free is what may be written to the file system that f lies on.
func Free(f *os.File) (int64, error) {
	var st unix.Statfs_t
	if err := unix.Fstatfs(int(f.Fd()), &st); err != nil {
		return 0, failed("statfs", f, "", err)
	}
	return int64(st.Bavail) * st.Bsize, nil
}

// NoCow asks btrfs to write an empty file in place, so that an image in it does not fall to pieces. Other file systems
// do so anyhow.
func NoCow(f *os.File) error {
	err := unix.IoctlSetPointerInt(int(f.Fd()), unix.FS_IOC_SETFLAGS, noCow)
	if errors.Is(err, unix.ENOTTY) || errors.Is(err, unix.EOPNOTSUPP) {
		return nil
	}
	return err
}

const noCow = 0x800000 // FS_NOCOW_FL

func open(dir *os.File, name string, flags int, mode uint32) (*os.File, error) {
	for {
		fd, err := unix.Openat(int(dir.Fd()), name, flags|unix.O_CLOEXEC|unix.O_NOFOLLOW, mode)
		switch {
		case err == nil:
			return os.NewFile(uintptr(fd), dir.Name()+"/"+name), nil
		case !errors.Is(err, unix.EINTR):
			return nil, failed("open", dir, name, err)
		}
	}
}

func failed(op string, dir *os.File, name string, err error) error {
	return &fs.PathError{Op: op, Path: dir.Name() + "/" + name, Err: err}
}
