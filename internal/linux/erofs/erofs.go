// Package erofs mounts split EROFS images: a metadata image with one data file beside it, both plain files.
//
// A mount is file-backed (Linux 6.12 or later), never over a loop device, and detached: it is reached through its
// descriptor alone and goes away with the last of them. Mounting needs CAP_SYS_ADMIN in the initial user namespace.
package erofs

import (
	"errors"
	"fmt"
	"os"
	"strings"

	"golang.org/x/sys/unix"

	"github.com/sandsea/sandsea/api/errdefs"
)

// Option changes how an image is mounted.
type Option func(*options)

type options struct {
	directIO bool
}

// DirectIO reads the files past their page cache, so that each page is kept once and not twice, at the price of a disk
// read when it is first wanted. A file system that cannot do it is read as usual.
func DirectIO() Option { return func(o *options) { o.directIO = true } }

// Mount returns the root of a detached, read-only mount of the image. The descriptor is O_PATH and close-on-exec.
// Device nodes in it cannot be opened; set-user-id programs keep their bit.
func Mount(meta, data string, opts ...Option) (*os.File, error) {
	var o options
	for _, opt := range opts {
		opt(&o)
	}
	fsfd, err := unix.Fsopen("erofs", unix.FSOPEN_CLOEXEC)
	if err != nil {
		if errors.Is(err, unix.ENODEV) {
			return nil, errdefs.New(errdefs.FailedPrecondition, "EROFS", "not in this kernel (ENODEV); containers need it").
				WithHint("See: sandsea doctor").Wrap(err)
		}
		return nil, fmt.Errorf("fsopen erofs: %w", err)
	}
	defer func() { _ = unix.Close(fsfd) }()
	// "source" first: the kernel opens the files in the order in which they are given.
	for _, kv := range [][2]string{{"source", meta}, {"device", data}} {
		if err := unix.FsconfigSetString(fsfd, kv[0], kv[1]); err != nil {
			return nil, mountErr(fsfd, meta, "set "+kv[0], err)
		}
	}
	if err := unix.FsconfigSetFlag(fsfd, "ro"); err != nil {
		return nil, mountErr(fsfd, meta, "set ro", err)
	}
	if o.directIO {
		if err := unix.FsconfigSetFlag(fsfd, "directio"); err != nil && !errors.Is(err, unix.EINVAL) {
			return nil, mountErr(fsfd, meta, "set directio", err)
		}
	}
	if err := unix.FsconfigCreate(fsfd); err != nil {
		return nil, mountErr(fsfd, meta, "create", err)
	}
	mfd, err := unix.Fsmount(fsfd, unix.FSMOUNT_CLOEXEC, unix.MOUNT_ATTR_RDONLY|unix.MOUNT_ATTR_NODEV)
	if err != nil {
		return nil, mountErr(fsfd, meta, "mount", err)
	}
	return os.NewFile(uintptr(mfd), "erofs:"+meta), nil
}

// mountErr adds what the kernel has to say about it.
func mountErr(fsfd int, meta, doing string, err error) error {
	var notes []string
	buf := make([]byte, 1024)
	for range 8 {
		n, rerr := unix.Read(fsfd, buf)
		if rerr != nil || n <= 0 {
			break
		}
		notes = append(notes, strings.TrimSpace(string(buf[:n])))
	}
	if len(notes) > 0 {
		return fmt.Errorf("mount EROFS image %s: %s: %w (%s)", meta, doing, err, strings.Join(notes, "; "))
	}
	return fmt.Errorf("mount EROFS image %s: %s: %w", meta, doing, err)
}
