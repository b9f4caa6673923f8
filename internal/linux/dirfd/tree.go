package dirfd

import (
	"errors"
	"fmt"
	"io"
	"io/fs"
	"os"

	"golang.org/x/sys/unix"
)

// treeBatch is how many names are read at a time.
const treeBatch = 1024

// RemoveTree removes the directory name below dir with all that is in it. How deep that is costs neither descriptors nor
// stack: a directory that holds something is emptied in place, and those in it that hold something are moved up first.
// Nobody else may change it meanwhile. Success when it is not there.
func RemoveTree(dir *os.File, name string) error {
	top, err := Open(dir, name)
	if errors.Is(err, fs.ErrNotExist) {
		return nil
	}
	if err != nil {
		return err
	}
	defer top.Close()
	moved := 0
	err = eachName(top, func(name string) error {
		gone, err := removeEntry(top, name)
		if gone || err != nil {
			return err
		}
		sub, err := Open(top, name)
		if err != nil {
			return err
		}
		err = eachName(sub, func(name string) error {
			gone, err := removeEntry(sub, name)
			if gone || err != nil {
				return err
			}
			for {
				moved++
				err := Rename(sub, name, top, fmt.Sprintf("%d", moved))
				if !errors.Is(err, fs.ErrExist) {
					return err
				}
			}
		})
		sub.Close()
		if err != nil {
			return err
		}
		return removeDir(top, name)
	})
	if err != nil {
		return err
	}
	return removeDir(dir, name)
}

// eachName calls do, which takes the name away, until dir is empty.
func eachName(dir *os.File, do func(name string) error) error {
	for {
		// A descriptor of its own, since what is removed or added meanwhile may be missed by one that reads on.
		d, err := Open(dir, ".")
		if err != nil {
			return err
		}
		names, err := d.Readdirnames(treeBatch)
		d.Close()
		if errors.Is(err, io.EOF) {
			return nil
		}
		if err != nil {
			return err
		}
		for _, name := range names {
			if err := do(name); err != nil {
				return err
			}
		}
	}
}

// removeEntry is false for a directory that holds something.
func removeEntry(dir *os.File, name string) (bool, error) {
	err := unix.Unlinkat(int(dir.Fd()), name, 0)
	if errors.Is(err, unix.EISDIR) {
		err = unix.Unlinkat(int(dir.Fd()), name, unix.AT_REMOVEDIR)
	}
	switch {
	case err == nil, errors.Is(err, unix.ENOENT):
		return true, nil
	case errors.Is(err, unix.ENOTEMPTY), errors.Is(err, unix.EEXIST):
		return false, nil
	}
	return false, failed("remove", dir, name, err)
}

func removeDir(dir *os.File, name string) error {
	if err := unix.Unlinkat(int(dir.Fd()), name, unix.AT_REMOVEDIR); err != nil && !errors.Is(err, unix.ENOENT) {
		return failed("remove", dir, name, err)
	}
	return nil
}
