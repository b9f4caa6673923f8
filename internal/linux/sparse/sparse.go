// Package sparse makes and finds the holes of a file.
//
// Whole blocks that a punch covers, or that a truncation to a greater size passes over, are holes. Written zeros are
// data on the file systems that records lie on (ext4, XFS, btrfs, tmpfs). Functions take bare descriptors; NextData
// and NextHole move the file position of the open file.
package sparse

import (
	"errors"
	"fmt"

	"golang.org/x/sys/unix"
)

// Punch makes a hole of the range, whole blocks in effect: the parts of blocks at its ends are zeroed. The size stays.
func Punch(fd int, off, n int64) error {
	for {
		err := unix.Fallocate(fd, unix.FALLOC_FL_PUNCH_HOLE|unix.FALLOC_FL_KEEP_SIZE, off, n)
		if errors.Is(err, unix.EINTR) {
			continue
		}
		if err != nil {
			return fmt.Errorf("punch %d bytes at %d: %w", n, off, err)
		}
		return nil
	}
}

// NextData is the first offset at or after off that is not in a hole; ok is false when there is only a hole up to the
// end, or off is at or past the end.
func NextData(fd int, off int64) (next int64, ok bool, err error) {
	next, err = unix.Seek(fd, off, unix.SEEK_DATA)
	if errors.Is(err, unix.ENXIO) {
		return 0, false, nil
	}
	if err != nil {
		return 0, false, fmt.Errorf("seek data at %d: %w", off, err)
	}
	return next, true, nil
}

// NextHole is the first offset at or after off that is in a hole, the end of the file being one; ok is false when off
// is at or past the end.
func NextHole(fd int, off int64) (next int64, ok bool, err error) {
	next, err = unix.Seek(fd, off, unix.SEEK_HOLE)
	if errors.Is(err, unix.ENXIO) {
		return 0, false, nil
	}
	if err != nil {
		return 0, false, fmt.Errorf("seek hole at %d: %w", off, err)
	}
	return next, true, nil
}

// Block is the size of the blocks that the file's holes consist of, as far as the file system tells: a power of two,
// at least 4096.
func Block(fd int) (int64, error) {
	var st unix.Stat_t
	if err := unix.Fstat(fd, &st); err != nil {
		return 0, fmt.Errorf("block size: %w", err)
	}
	b := int64(st.Blksize) //nolint:unconvert // it is an int32 on arm64
	if b < 4096 || b&(b-1) != 0 {
		b = 4096
	}
	return b, nil
}

// Allocated is how many bytes the file occupies.
func Allocated(fd int) (int64, error) {
	var st unix.Stat_t
	if err := unix.Fstat(fd, &st); err != nil {
		return 0, fmt.Errorf("allocated size: %w", err)
	}
	return st.Blocks * 512, nil
}
