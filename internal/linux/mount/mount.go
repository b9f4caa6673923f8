package mount

import (
	"bytes"
	"errors"
	"fmt"
	"os"
	"strconv"

	"golang.org/x/sys/unix"
)

// Attr are attributes of one mount, not of its file system.
type Attr uint64

// The attributes.
const (
	ReadOnly Attr = unix.MOUNT_ATTR_RDONLY
	NoSUID   Attr = unix.MOUNT_ATTR_NOSUID
	NoDev    Attr = unix.MOUNT_ATTR_NODEV
	NoExec   Attr = unix.MOUNT_ATTR_NOEXEC
	NoATime  Attr = unix.MOUNT_ATTR_NOATIME
)

// Option is one parameter of a file system. Exactly one of Value and File is used; with neither it is a flag.
type Option struct {
	Key   string
	Value string
	File  *os.File
}

// Flag is an option without a value.
func Flag(key string) Option { return Option{Key: key} }

// Value is an option with a string.
func Value(key, value string) Option { return Option{Key: key, Value: value} }

// File is an option that names a file or directory by descriptor.
func File(key string, f *os.File) Option { return Option{Key: key, File: f} }

// New makes a file system of the named type and returns it as a detached mount.
func New(fstype string, attr Attr, opts ...Option) (*os.File, error) {
	fsfd, err := unix.Fsopen(fstype, unix.FSOPEN_CLOEXEC)
	if err != nil {
		return nil, fmt.Errorf("fsopen %s: %w", fstype, err)
	}
	defer func() { _ = unix.Close(fsfd) }()
	for _, o := range opts {
		if err := set(fsfd, o); err != nil {
			return nil, fmt.Errorf("option %s of %s: %w", o.Key, fstype, explain(fsfd, err))
		}
	}
	if err := unix.FsconfigCreate(fsfd); err != nil {
		return nil, fmt.Errorf("create %s: %w", fstype, explain(fsfd, err))
	}
	mfd, err := unix.Fsmount(fsfd, unix.FSMOUNT_CLOEXEC, int(attr))
	if err != nil {
		return nil, fmt.Errorf("fsmount %s: %w", fstype, explain(fsfd, err))
	}
	return os.NewFile(uintptr(mfd), fstype), nil
}

func set(fsfd int, o Option) error {
	switch {
	case o.File != nil:
		return unix.FsconfigSetFd(fsfd, o.Key, int(o.File.Fd()))
	case o.Value != "":
		return unix.FsconfigSetString(fsfd, o.Key, o.Value)
	default:
		return unix.FsconfigSetFlag(fsfd, o.Key)
	}
}

// explain adds what the kernel wrote into the log of the file system context, since EINVAL alone says nothing.
func explain(fsfd int, err error) error {
	var buf [1024]byte
	for range 8 { // the kernel keeps at most 8 messages
		n, rerr := unix.Read(fsfd, buf[:])
		if rerr != nil || n <= 0 {
			break
		}
		err = fmt.Errorf("%w (%s)", err, bytes.TrimSpace(buf[:n]))
	}
	return err
}

// Clone makes a detached copy of the mount, or of the directory below it, that f names. With deep it takes the mounts
// below along.
func Clone(f *os.File, deep bool) (*os.File, error) {
	return CloneAt(f, "", deep)
}

// CloneAt is Clone of a path below dir; no symbolic link is followed at its end.
func CloneAt(dir *os.File, path string, deep bool) (*os.File, error) {
	flags := uint(unix.OPEN_TREE_CLONE | unix.OPEN_TREE_CLOEXEC | unix.AT_EMPTY_PATH | unix.AT_SYMLINK_NOFOLLOW)
	if deep {
		flags |= unix.AT_RECURSIVE
	}
	fd, err := unix.OpenTree(int(dir.Fd()), path, flags)
	if err != nil {
		return nil, fmt.Errorf("clone mount of %s: %w", dir.Name(), err)
	}
	return os.NewFile(uintptr(fd), dir.Name()), nil
}

// Idmap maps the owners that a detached mount shows through a user namespace, and sets further attributes in the same
// step.
func Idmap(m, userns *os.File, attr Attr) error {
	a := unix.MountAttr{Attr_set: unix.MOUNT_ATTR_IDMAP | uint64(attr), Userns_fd: uint64(userns.Fd())}
	if err := unix.MountSetattr(int(m.Fd()), "", unix.AT_EMPTY_PATH, &a); err != nil {
		return fmt.Errorf("id-map mount of %s: %w", m.Name(), err)
	}
	return nil
}

// Set adds attributes to a mount and, with deep, to the mounts below it.
func Set(m *os.File, attr Attr, deep bool) error {
	flags := uint(unix.AT_EMPTY_PATH)
	if deep {
		flags |= unix.AT_RECURSIVE
	}
	if err := unix.MountSetattr(int(m.Fd()), "", flags, &unix.MountAttr{Attr_set: uint64(attr)}); err != nil {
		return fmt.Errorf("set attributes of mount %s: %w", m.Name(), err)
	}
	return nil
}

// Attach puts a detached mount onto a path of this process.
func Attach(m *os.File, path string) error {
	return AttachAt(m, nil, path)
}

// AttachAt puts a detached mount onto a path below dir; a nil dir is the working directory, an empty path dir itself.
func AttachAt(m, dir *os.File, path string) error {
	at, flags := unix.AT_FDCWD, unix.MOVE_MOUNT_F_EMPTY_PATH
	if dir != nil {
		at = int(dir.Fd())
	}
	if path == "" {
		flags |= unix.MOVE_MOUNT_T_EMPTY_PATH
	}
	if err := unix.MoveMount(int(m.Fd()), "", at, path, flags); err != nil {
		return fmt.Errorf("attach %s to %q: %w", m.Name(), path, err)
	}
	return nil
}

// MakePrivate stops every mount of this namespace from sharing its changes with other namespaces.
func MakePrivate() error {
	if err := unix.Mount("", "/", "", unix.MS_REC|unix.MS_PRIVATE, ""); err != nil {
		return fmt.Errorf("make the mounts private: %w", err)
	}
	return nil
}

// PivotInto makes the mount at path the root of this process and drops every other mount of its namespace. Only for a
// process in a mount namespace of its own.
func PivotInto(path string) error {
	if err := unix.Chdir(path); err != nil {
		return fmt.Errorf("enter %s: %w", path, err)
	}
	if err := unix.PivotRoot(".", "."); err != nil {
		return fmt.Errorf("pivot into %s: %w", path, err)
	}
	// The old root now lies on top of the new one, at ".".
	if err := unix.Unmount(".", unix.MNT_DETACH); err != nil {
		return fmt.Errorf("drop the old root: %w", err)
	}
	if err := unix.Chdir("/"); err != nil {
		return fmt.Errorf("enter the new root: %w", err)
	}
	return nil
}

// Namespace identifies the mount namespace of a process: "self", "1" or another pid.
func Namespace(pid string) (string, error) {
	s, err := os.Readlink("/proc/" + pid + "/ns/mnt")
	if err != nil {
		return "", fmt.Errorf("mount namespace of %s: %w", pid, err)
	}
	return s, nil
}

// OwnNamespace reports whether this process is in another mount namespace than its parent and, as far as we may look,
// than pid 1.
func OwnNamespace() (bool, error) {
	own, err := Namespace("self")
	if err != nil {
		return false, err
	}
	parent, err := Namespace(strconv.Itoa(os.Getppid()))
	if err != nil && !errors.Is(err, os.ErrNotExist) { // a parent that went away tells nothing
		return false, err
	}
	first, err := Namespace("1")
	if err != nil && !errors.Is(err, os.ErrPermission) { // it has capabilities that we lack
		return false, err
	}
	return own != parent && own != first, nil
}

// Device is a character device to make.
type Device struct {
	Name         string
	Major, Minor uint32
	Mode         uint32 // permission bits
}

// MakeDevice makes a character device below dir, with exactly its mode whatever the umask.
func MakeDevice(dir *os.File, d Device) error {
	dev := unix.Mkdev(d.Major, d.Minor)
	if err := unix.Mknodat(int(dir.Fd()), d.Name, unix.S_IFCHR|d.Mode, int(dev)); err != nil {
		return fmt.Errorf("make device %s: %w", d.Name, err)
	}
	if err := unix.Fchmodat(int(dir.Fd()), d.Name, d.Mode, 0); err != nil {
		return fmt.Errorf("set the mode of device %s: %w", d.Name, err)
	}
	return nil
}

// MakeDir makes a directory below dir, with exactly its mode whatever the umask.
func MakeDir(dir *os.File, name string, mode uint32) error {
	if err := unix.Mkdirat(int(dir.Fd()), name, mode); err != nil {
		return fmt.Errorf("make directory %s: %w", name, err)
	}
	if err := unix.Fchmodat(int(dir.Fd()), name, mode, 0); err != nil {
		return fmt.Errorf("set the mode of directory %s: %w", name, err)
	}
	return nil
}

// MakeLink makes a symbolic link below dir.
func MakeLink(dir *os.File, name, target string) error {
	if err := unix.Symlinkat(target, int(dir.Fd()), name); err != nil {
		return fmt.Errorf("make link %s: %w", name, err)
	}
	return nil
}

// Remove removes what is no directory below dir. A missing one is no error.
func Remove(dir *os.File, name string) error { return remove(dir, name, 0) }

// RemoveDir removes an empty directory below dir. A missing one is no error.
func RemoveDir(dir *os.File, name string) error { return remove(dir, name, unix.AT_REMOVEDIR) }

func remove(dir *os.File, name string, flags int) error {
	if err := unix.Unlinkat(int(dir.Fd()), name, flags); err != nil && !errors.Is(err, unix.ENOENT) {
		return fmt.Errorf("remove %s: %w", name, err)
	}
	return nil
}

// OpenDir opens a directory below dir; a symbolic link is not followed.
func OpenDir(dir *os.File, name string) (*os.File, error) {
	fd, err := unix.Openat(int(dir.Fd()), name, unix.O_DIRECTORY|unix.O_RDONLY|unix.O_NOFOLLOW|unix.O_CLOEXEC, 0)
	if err != nil {
		return nil, fmt.Errorf("open directory %s: %w", name, err)
	}
	return os.NewFile(uintptr(fd), name), nil
}

// Known reports whether the kernel has a file system of this type, loading its module if need be.
func Known(fstype string) bool {
	fd, err := unix.Fsopen(fstype, unix.FSOPEN_CLOEXEC)
	if err != nil {
		return false
	}
	_ = unix.Close(fd)
	return true
}
