package native

import (
	"errors"
	"io/fs"
	"os"

	"github.com/sandsea/sandsea/internal/linux/mount"
)

// devices is one file system with a directory for each sandbox, which becomes its /dev by an id-mapped, read-only copy of
// the mount: a file system each would cost every memory cgroup of the machine, and nodes that sandboxes shared would
// show one's locks and watches to the others. sandsea-init mounts the sandbox's own pts, shm and mqueue into it. What an
// image says about /dev is not looked at.
type devices struct{ fs *os.File }

func newDevices() (devices, error) {
	f, err := mount.New("tmpfs", mount.NoSUID|mount.NoExec, mount.Value("mode", "0755"), mount.Value("size", "1m"),
		mount.Value("nr_inodes", "1m"), mount.Value("source", "dev"))
	return devices{f}, err
}

func (d devices) close() error { return d.fs.Close() }

var (
	deviceNodes = []mount.Device{
		{Name: "null", Major: 1, Minor: 3, Mode: 0o666},
		{Name: "zero", Major: 1, Minor: 5, Mode: 0o666},
		{Name: "full", Major: 1, Minor: 7, Mode: 0o666},
		{Name: "random", Major: 1, Minor: 8, Mode: 0o666},
		{Name: "urandom", Major: 1, Minor: 9, Mode: 0o666},
		{Name: "tty", Major: 5, Minor: 0, Mode: 0o666},
	}
	deviceLinks = [][2]string{
		{"ptmx", "pts/ptmx"},
		{"fd", "/proc/self/fd"},
		{"stdin", "/proc/self/fd/0"},
		{"stdout", "/proc/self/fd/1"},
		{"stderr", "/proc/self/fd/2"},
	}
	deviceDirs = []string{"pts", "shm", "mqueue"}
)

// add makes the directory of one sandbox and gives a copy of its mount, not attached anywhere.
func (d devices) add(name string) (_ *os.File, err error) {
	defer func() {
		if err != nil {
			err = errors.Join(err, d.remove(name))
		}
	}()
	if err := mount.MakeDir(d.fs, name, 0o755); err != nil {
		return nil, err
	}
	dir, err := mount.OpenDir(d.fs, name)
	if err != nil {
		return nil, err
	}
	defer dir.Close()
	for _, n := range deviceNodes {
		if err := mount.MakeDevice(dir, n); err != nil {
			return nil, err
		}
	}
	for _, l := range deviceLinks {
		if err := mount.MakeLink(dir, l[0], l[1]); err != nil {
			return nil, err
		}
	}
	for _, n := range deviceDirs {
		if err := mount.MakeDir(dir, n, 0o755); err != nil {
			return nil, err
		}
	}
	return mount.Clone(dir, false)
}

// remove takes a directory away. One that an edge before made lies in a file system that goes with its last sandbox.
func (d devices) remove(name string) error {
	dir, err := mount.OpenDir(d.fs, name)
	if errors.Is(err, fs.ErrNotExist) {
		return nil
	}
	if err != nil {
		return err
	}
	defer dir.Close()
	var errs []error
	for _, n := range deviceNodes {
		errs = append(errs, mount.Remove(dir, n.Name))
	}
	for _, l := range deviceLinks {
		errs = append(errs, mount.Remove(dir, l[0]))
	}
	for _, n := range deviceDirs {
		errs = append(errs, mount.RemoveDir(dir, n))
	}
	return errors.Join(append(errs, mount.RemoveDir(d.fs, name))...)
}
