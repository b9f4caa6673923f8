package upper

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"log/slog"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"sync"
	"syscall"
	"time"

	"github.com/sandsea/sandsea/internal/linux/btrfs"
	"github.com/sandsea/sandsea/internal/linux/dirfd"
	"github.com/sandsea/sandsea/internal/linux/loop"
	"github.com/sandsea/sandsea/internal/linux/mount"
)

const (
	imageName = "uppers.btrfs"
	dirName   = "uppers"
	// minImage is the least that mkfs.btrfs takes, with room to spare.
	minImage = 256 << 20
	// mkfsLimit bounds mkfs.btrfs, which writes a few MiB.
	mkfsLimit = 60 * time.Second
	// checkpoint is how far apart checkpoints are, in seconds. Each writes what all sandboxes changed in names and counts,
	// and the space of destroyed volumes is free after one.
	checkpoint = "10"
	// detachLimit bounds the wait for the kernel to let go of the image.
	detachLimit = 10 * time.Second
)

// subvolumes keeps volumes as subvolumes of a btrfs, limited by qgroups.
type subvolumes struct {
	dir *os.File
	// mount is the detached mount in which dir lies, nil if it is attached. Overlays are only made of what lies in a mount
	// that is still open.
	mount *os.File
	quota btrfs.Quota
	where string
	// Undo of what was made below DIR, after close.
	undo func() error

	mu    sync.Mutex
	spent []uint64 // guarded by mu: destroyed subvolumes whose count is still kept
}

// openBtrfs uses the file system that DIR lies on, if it counts already. Turning that on is its owner's business: it
// costs everybody on it.
func openBtrfs(disk string) (_ volumes, err error) {
	path := filepath.Join(disk, dirName)
	if err := os.Mkdir(path, 0o700); err != nil && !errors.Is(err, os.ErrExist) {
		return nil, err
	}
	dir, err := os.Open(path)
	if err != nil {
		return nil, err
	}
	defer func() {
		if err != nil {
			dir.Close()
			os.Remove(path) // unless there is something in it
		}
	}()
	if is, err := btrfs.Is(dir); err != nil || !is {
		return nil, errors.Join(err, errors.New("the data directory does not lie on btrfs"))
	}
	q, err := btrfs.QuotaOf(dir)
	if err != nil {
		return nil, err
	}
	if q == btrfs.QuotaNone {
		return nil, errors.New("the data directory lies on btrfs without quotas (btrfs quota enable)")
	}
	return &subvolumes{dir: dir, quota: q, where: "data directory", undo: func() error { return os.RemoveAll(path) }}, nil
}

// openImage makes the image, or finds it, and mounts it detached.
func openImage(ctx context.Context, disk string, size int64, direct bool, log *slog.Logger) (volumes, error) {
	path := filepath.Join(disk, imageName)
	if _, err := os.Stat(path); errors.Is(err, os.ErrNotExist) {
		if err := makeImage(ctx, path, size, log); err != nil {
			return nil, err
		}
	} else if err != nil {
		return nil, err
	}
	m, err := mountImage(ctx, path, direct)
	if err != nil {
		return nil, err
	}
	dir, err := dirfd.Open(m, ".")
	if err != nil {
		m.Close()
		return nil, err
	}
	s := &subvolumes{dir: dir, mount: m, where: "loop image", undo: func() error { return removeImage(path) }}
	if s.quota, err = btrfs.EnableQuota(dir); err != nil {
		return nil, errors.Join(err, s.close())
	}
	return s, nil
}

// makeImage makes the file system beside its name and renames it, so that a name always stands for a whole one.
func makeImage(ctx context.Context, path string, size int64, log *slog.Logger) (err error) {
	mkfs, err := exec.LookPath("mkfs.btrfs")
	if err != nil {
		return fmt.Errorf("%w: it is in the package btrfs-progs", err)
	}
	tmp := path + ".tmp"
	if err := os.Remove(tmp); err != nil && !errors.Is(err, os.ErrNotExist) {
		return err
	}
	f, err := os.OpenFile(tmp, os.O_RDWR|os.O_CREATE|os.O_EXCL, 0o600)
	if err != nil {
		return err
	}
	defer f.Close()
	defer func() {
		if err != nil {
			os.Remove(tmp)
		}
	}()
	if err := dirfd.NoCow(f); err != nil {
		return fmt.Errorf("write %s in place: %w", tmp, err)
	}
	if size == 0 {
		free, err := dirfd.Free(f)
		if err != nil {
			return err
		}
		// The rest is for layers, output and the journal. The file is sparse: it takes what the sandboxes write and,
		// since the loop device passes discards on, gives it back.
		size = free / 4 * 3
	}
	if size = size &^ (1<<20 - 1); size < minImage {
		return fmt.Errorf("%d MiB are free for sandboxes, %d are needed", size>>20, minImage>>20)
	}
	if err := f.Truncate(size); err != nil {
		return err
	}
	ctx, stop := context.WithTimeoutCause(ctx, mkfsLimit, fmt.Errorf("not done in %s: %w", mkfsLimit,
		context.DeadlineExceeded))
	defer stop()
	// One copy of everything: the image lies on one disk, and its content does not outlive the machine's run.
	cmd := exec.CommandContext(ctx, mkfs, "-q", "-f", "--nodiscard", "-m", "single", "-d", "single",
		"-L", "sandsea-uppers", tmp)
	if out, err := cmd.CombinedOutput(); err != nil {
		return fmt.Errorf("mkfs.btrfs: %w: %s", cmp.Or(context.Cause(ctx), err), strings.TrimSpace(string(out)))
	}
	if err := f.Sync(); err != nil {
		return err
	}
	log.Info("made the image for writable layers", "path", path, "bytes", size)
	return os.Rename(tmp, path)
}

// mountImage returns the file system in the image, as a detached mount.
func mountImage(ctx context.Context, path string, direct bool) (*os.File, error) {
	image, err := os.OpenFile(path, os.O_RDWR, 0)
	if err != nil {
		return nil, err
	}
	defer image.Close()
	ctx, stop := context.WithTimeoutCause(ctx, detachLimit, errors.New("its last mount does not end"))
	defer stop()
	for {
		// A device that is there is the one that running sandboxes write to; a second one would be a second cache of the
		// same blocks.
		dev, err := loop.Find(image)
		if err == nil && dev == nil {
			dev, err = loop.Attach(image, direct)
		}
		if err != nil {
			return nil, err
		}
		m, err := mount.New("btrfs", mount.NoATime, mount.Value("source", dev.Name()), mount.Value("discard", "async"),
			mount.Value("commit", checkpoint))
		// From here on the mount holds the device.
		dev.Close()
		if err == nil {
			return m, nil
		}
		if !errors.Is(err, syscall.EBUSY) {
			return nil, fmt.Errorf("mount %s: %w", path, err)
		}
		// The last mount of it is on its way out.
		select {
		case <-ctx.Done():
			return nil, fmt.Errorf("mount %s: %w: %w", path, context.Cause(ctx), err)
		case <-time.After(20 * time.Millisecond):
		}
	}
}

// removeImage waits for the kernel to let go of the image and removes it.
func removeImage(path string) error {
	image, err := os.OpenFile(path, os.O_RDWR, 0)
	if errors.Is(err, os.ErrNotExist) {
		return nil
	}
	if err != nil {
		return err
	}
	defer image.Close()
	for end := time.Now().Add(detachLimit); ; {
		dev, err := loop.Find(image)
		if err != nil {
			return err
		}
		if dev == nil {
			return os.Remove(path)
		}
		dev.Close() // and with it, perhaps, the last hold on the device
		if time.Now().After(end) {
			return fmt.Errorf("%s is still in use by %s", path, dev.Name())
		}
		<-time.After(10 * time.Millisecond)
	}
}

func (s *subvolumes) mechanism() string { return fmt.Sprintf("btrfs %s, %s", s.quota, s.where) }

func (s *subvolumes) root() *os.File { return s.dir }

func (s *subvolumes) create(dir *os.File, name string) error {
	if err := btrfs.Create(dir, name); err != nil {
		return err
	}
	return fill(dir, name)
}

func (s *subvolumes) limit(volume *os.File, bytes int64, _ uint32) error {
	return btrfs.Limit(volume, bytes)
}

func (s *subvolumes) usage(volume *os.File) (int64, error) { return btrfs.Usage(volume) }

// What a volume may hold to be renewed: the kernel frees a subvolume in a transaction of its own, for which all that
// write to the file system wait, and that costs more than the removal of so few entries. The bytes are a few hundredths
// of the smallest limit.
const (
	renewEntries = 64
	renewBytes   = 256 << 10
)

// renew removes what the sandbox left, and the two directories with it: who still has one of them open can reach
// nothing of the next. What was counted has to be little too, since what was removed counts until the next checkpoint.
func (s *subvolumes) renew(dir *os.File, name string) (bool, error) {
	vol, err := dirfd.Open(dir, name)
	if err != nil {
		return false, err
	}
	defer vol.Close()
	if own, err := separate(vol, dir); err != nil || !own {
		return false, err
	}
	if used, err := btrfs.Usage(vol); err != nil || used > renewBytes {
		return false, err
	}
	if ok, err := dirfd.Clear(vol, renewEntries, renewBytes); err != nil || !ok {
		return false, err
	}
	return true, fill(dir, name)
}

// separate reports whether vol is another subvolume than dir, and so has a count and a limit of its own.
func separate(vol, dir *os.File) (bool, error) {
	a, err := btrfs.ID(vol)
	if err != nil {
		return false, err
	}
	b, err := btrfs.ID(dir)
	return a != b, err
}

func (s *subvolumes) destroy(dir *os.File, name string) error {
	vol, err := dirfd.Open(dir, name)
	if err != nil {
		return err
	}
	id, err := btrfs.ID(vol)
	vol.Close()
	if err != nil {
		return err
	}
	if err := btrfs.Destroy(dir, name); err != nil {
		return err
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	s.spent = append(s.spent, id)
	return nil
}

// busyMost is how many counts in a row may be busy before the rest of them is left for later: the kernel frees what was
// destroyed in order.
const busyMost = 4

// collect forgets the counts of what was destroyed, where the kernel does not by itself. It is worth its calls only now
// and then, for many at once.
func (s *subvolumes) collect() bool {
	s.mu.Lock()
	ids := s.spent
	s.spent = nil
	s.mu.Unlock()
	var busy []uint64
	row := 0
	for i, id := range ids {
		if row == busyMost {
			busy = append(busy, ids[i:]...)
			break
		}
		if btrfs.Busy(btrfs.DropCount(s.dir, id)) {
			busy = append(busy, id)
			row++
			continue
		}
		row = 0
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	s.spent = append(busy, s.spent...)
	return len(s.spent) > 0
}

func (s *subvolumes) full(err error) bool { return errors.Is(err, syscall.EDQUOT) }

func (s *subvolumes) close() error {
	err := s.dir.Close()
	if s.mount != nil {
		err = errors.Join(err, s.mount.Close())
	}
	return err
}

func (s *subvolumes) remove() error { return s.undo() }
