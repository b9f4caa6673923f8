package upper

import (
	"errors"
	"fmt"
	"os"

	"github.com/sandsea/sandsea/internal/linux/dirfd"
)

// volumes is one way to make directories with a limit. All methods may be called concurrently for different names.
type volumes interface {
	// mechanism names it for people.
	mechanism() string
	// root is the directory that holds pool, live and trash.
	root() *os.File
	// create makes an empty volume.
	create(dir *os.File, name string) error
	// limit bounds a volume; the host ids from first on are those of its sandbox, and were perhaps those of others before
	// it, whose volumes are not gone yet.
	limit(volume *os.File, bytes int64, first uint32) error
	// usage is what a volume holds.
	usage(volume *os.File) (int64, error)
	// renew makes a volume that was used as good as a new one. It is false where that is no cheaper than to destroy it
	// and to make another: it is to be destroyed then.
	renew(dir *os.File, name string) (bool, error)
	// destroy removes a volume, whatever is in it. It may leave work to collect.
	destroy(dir *os.File, name string) error
	// collect does work that is left, and reports whether there is more.
	collect() (more bool)
	// full reports whether err is what a writer sees at the limit.
	full(err error) bool
	// close gives up the descriptors.
	close() error
	// remove takes back all that was made below DIR, after close.
	remove() error
}

// Names inside a volume.
const (
	upperName = "upper"
	workName  = "work"
)

const (
	tryLimit   = 1 << 20
	tryWrite   = 8 << 20
	tryProject = 1<<31 - 11 // far above the ids of sandboxes, as are those that follow it
)

// try writes over a limit and returns an error unless the writer is stopped.
func try(v volumes) (err error) {
	name := fmt.Sprintf("try-%d", os.Getpid())
	if err := v.create(v.root(), name); err != nil {
		return err
	}
	defer func() { err = errors.Join(err, v.destroy(v.root(), name)) }()
	vol, err := dirfd.Open(v.root(), name)
	if err != nil {
		return err
	}
	defer vol.Close()
	if err := v.limit(vol, tryLimit, tryProject); err != nil {
		return err
	}
	upper, err := dirfd.Open(vol, upperName)
	if err != nil {
		return err
	}
	defer upper.Close()
	f, err := dirfd.CreateFile(upper, "fill", 0o600)
	if err != nil {
		return err
	}
	defer f.Close()
	block := make([]byte, 64<<10)
	for i := range block {
		block[i] = byte(i * 7) // no file system keeps this in less
	}
	for written := 0; written < tryWrite; written += len(block) {
		_, err := f.Write(block)
		if err == nil && written+len(block) == tryWrite {
			err = f.Sync() // a limit that is seen late is still a limit
		}
		if v.full(err) {
			return nil
		}
		if err != nil {
			return err
		}
	}
	return fmt.Errorf("%d bytes were written over a limit of %d", tryWrite, tryLimit)
}

// places makes pool, live and trash, or finds them.
func places(root *os.File) (pool, live, trash *os.File, err error) {
	var dirs [3]*os.File
	for i, name := range [...]string{"pool", "live", "trash"} {
		if err := dirfd.Mkdir(root, name, 0o700); err != nil && !errors.Is(err, os.ErrExist) {
			return nil, nil, nil, err
		}
		if dirs[i], err = dirfd.Open(root, name); err != nil {
			return nil, nil, nil, err
		}
	}
	return dirs[0], dirs[1], dirs[2], nil
}

// fill makes the two directories of overlayfs in the new volume name.
func fill(dir *os.File, name string) error {
	vol, err := dirfd.Open(dir, name)
	if err != nil {
		return err
	}
	defer vol.Close()
	if err := dirfd.Mkdir(vol, upperName, 0o755); err != nil {
		return err
	}
	return dirfd.Mkdir(vol, workName, 0o700)
}
