// Package loop attaches image files to loop devices.
//
// Every device is attached with autoclear: it detaches itself when the last user, an open descriptor or a mounted file
// system, is gone, so that a crash leaves no device. All functions may be called concurrently.
package loop

import (
	"errors"
	"fmt"
	"os"
	"path/filepath"

	"golang.org/x/sys/unix"
)

// blockSize is the logical block size of our devices: that of a page, since no file system that we put on one uses
// smaller blocks, and direct I/O asks for it on some disks.
const blockSize = 4096

// attachTries bounds the race for a free device with everybody else on the machine.
const attachTries = 64

// Attach gives a loop device whose content is the image; the caller keeps it open until the device is in use otherwise.
// With direct, reads and writes go past the page cache of the image where its file system can do that.
func Attach(image *os.File, direct bool) (*os.File, error) {
	control, err := os.OpenFile("/dev/loop-control", os.O_RDWR, 0)
	if err != nil {
		return nil, err
	}
	defer control.Close()
	config := unix.LoopConfig{Fd: uint32(image.Fd()), Size: blockSize}
	config.Info.Flags = unix.LO_FLAGS_AUTOCLEAR
	if direct {
		config.Info.Flags |= unix.LO_FLAGS_DIRECT_IO
	}
	for range attachTries {
		n, err := unix.IoctlRetInt(int(control.Fd()), unix.LOOP_CTL_GET_FREE)
		if err != nil {
			return nil, fmt.Errorf("find a free loop device: %w", err)
		}
		dev, err := os.OpenFile(fmt.Sprintf("/dev/loop%d", n), os.O_RDWR, 0)
		if err != nil {
			return nil, err
		}
		err = unix.IoctlLoopConfigure(int(dev.Fd()), &config)
		if err == nil {
			return dev, nil
		}
		dev.Close()
		if !errors.Is(err, unix.EBUSY) {
			return nil, fmt.Errorf("attach %s to %s: %w", image.Name(), dev.Name(), err)
		}
	}
	return nil, fmt.Errorf("attach %s: others took %d free loop devices first: %w", image.Name(), attachTries, unix.EBUSY)
}

// Find gives the loop device whose content is the image, open, so that it cannot detach itself any more. Both are nil
// when there is none.
func Find(image *os.File) (*os.File, error) {
	var want unix.Stat_t
	if err := unix.Fstat(int(image.Fd()), &want); err != nil {
		return nil, fmt.Errorf("stat %s: %w", image.Name(), err)
	}
	attached, err := filepath.Glob("/sys/block/loop*/loop")
	if err != nil {
		return nil, err
	}
	for _, dir := range attached {
		dev, err := os.OpenFile("/dev/"+filepath.Base(filepath.Dir(dir)), os.O_RDWR, 0)
		if errors.Is(err, unix.ENXIO) || errors.Is(err, unix.ENOENT) {
			continue // it was detached meanwhile
		}
		if err != nil {
			return nil, err
		}
		info, err := unix.IoctlLoopGetStatus64(int(dev.Fd()))
		if err == nil && info.Device == want.Dev && info.Inode == want.Ino {
			return dev, nil
		}
		dev.Close()
		if err != nil && !errors.Is(err, unix.ENXIO) {
			return nil, fmt.Errorf("status of %s: %w", dev.Name(), err)
		}
	}
	return nil, nil
}
