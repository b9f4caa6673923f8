package native

import (
	"os"

	"github.com/sandsea/sandsea/internal/linux/mount"
)

// newDev makes the /dev that all sandboxes share, each by an id-mapped, read-only copy of the mount: one file system
// instead of one each, since every one costs every memory cgroup of the machine. sandsea-init mounts the
// sandbox's own pts, shm and mqueue into it. What an image says about /dev is not looked at.
func newDev() (_ *os.File, err error) {
	dev, err := mount.New("tmpfs", mount.NoSUID|mount.NoExec, mount.Value("mode", "0755"), mount.Value("size", "64k"),
		mount.Value("nr_inodes", "32"), mount.Value("source", "dev"))
	if err != nil {
		return nil, err
	}
	defer func() {
		if err != nil {
			dev.Close()
		}
	}()
	for _, d := range []mount.Device{
		{Name: "null", Major: 1, Minor: 3, Mode: 0o666},
		{Name: "zero", Major: 1, Minor: 5, Mode: 0o666},
		{Name: "full", Major: 1, Minor: 7, Mode: 0o666},
		{Name: "random", Major: 1, Minor: 8, Mode: 0o666},
		{Name: "urandom", Major: 1, Minor: 9, Mode: 0o666},
		{Name: "tty", Major: 5, Minor: 0, Mode: 0o666},
	} {
		if err := mount.MakeDevice(dev, d); err != nil {
			return nil, err
		}
	}
	for _, l := range [][2]string{
		{"ptmx", "pts/ptmx"},
		{"fd", "/proc/self/fd"},
		{"stdin", "/proc/self/fd/0"},
		{"stdout", "/proc/self/fd/1"},
		{"stderr", "/proc/self/fd/2"},
	} {
		if err := mount.MakeLink(dev, l[0], l[1]); err != nil {
			return nil, err
		}
	}
	for _, d := range []string{"pts", "shm", "mqueue"} {
		if err := mount.MakeDir(dev, d, 0o755); err != nil {
			return nil, err
		}
	}
	return dev, nil
}
