package upper

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"math"
	"os"
	"path/filepath"
	"regexp"
	"slices"
	"strconv"
	"sync"
	"sync/atomic"
	"syscall"
	"time"

	"github.com/sandsea/sandsea/api/errdefs"
	"github.com/sandsea/sandsea/internal/linux/dirfd"
	"github.com/sandsea/sandsea/internal/linux/projquota"
	"github.com/sandsea/sandsea/internal/node"
)

const (
	// DefaultPool is how many empty volumes are kept ready: more than a burst of creates takes before they are made
	// anew.
	DefaultPool = 64
	// retryPause is how long the background waits after something that did not work.
	retryPause = time.Second
	// idRange is the number of host ids of one sandbox.
	idRange = 65536
)

// Config says where the layers are kept.
type Config struct {
	// Dir is the data directory; everything is made in Dir/disk.
	Dir string
	// Log gets state changes and what goes wrong in the background. Nil discards.
	Log *slog.Logger
	// Pool is how many empty volumes are kept ready. 0: DefaultPool; negative: none.
	Pool int
	// ImageBytes is the size of a new image. 0: three quarters of what is free.
	ImageBytes int64
}

// Validate checks the configuration.
func (c Config) Validate() error {
	if !filepath.IsAbs(c.Dir) {
		return errdefs.New(errdefs.Invalid, "upper", "data directory %q is not absolute", c.Dir)
	}
	if c.ImageBytes < 0 {
		return errdefs.New(errdefs.Invalid, "upper", "image size %d is negative", c.ImageBytes)
	}
	return nil
}

// Store keeps the writable layers of one edge.
type Store struct {
	log               *slog.Logger
	disk              string
	diskDir           *os.File
	v                 volumes
	pool, live, trash *os.File

	ready   chan string   // names in pool; room for twice as many as are made ahead, the rest are renewed ones
	refill  chan struct{} // of length 1: somebody took one
	empty   chan struct{} // of length 1: something is in the trash
	serial  atomic.Int64
	session string // makes names that no earlier Store of the same place gave

	stop      context.CancelCauseFunc
	workers   sync.WaitGroup
	closeOnce sync.Once
	closeErr  error
}

// Upper is the writable layer of one sandbox. Its files are open until Close, which leaves the layer as it is; an
// overlay needs them only while it is made.
type Upper struct {
	// Dir and Work are upperdir and workdir for overlayfs. Dir belongs to root of the sandbox.
	Dir, Work *os.File
}

// Close gives up the descriptors.
func (u *Upper) Close() error { return errors.Join(u.Dir.Close(), u.Work.Close()) }

// Open finds how limits can be enforced below cfg.Dir, and what an earlier Store left there: volumes of sandboxes are
// kept, and those in the trash go. FailedPrecondition when there is no way.
func Open(ctx context.Context, cfg Config) (_ *Store, err error) {
	if err := cfg.Validate(); err != nil {
		return nil, err
	}
	s := &Store{
		log: cfg.Log, disk: filepath.Join(cfg.Dir, "disk"),
		refill: make(chan struct{}, 1), empty: make(chan struct{}, 1),
		session: strconv.FormatInt(time.Now().UnixNano(), 36),
	}
	if s.log == nil {
		s.log = slog.New(slog.DiscardHandler)
	}
	if err := os.MkdirAll(s.disk, 0o700); err != nil {
		return nil, err
	}
	if s.diskDir, err = os.Open(s.disk); err != nil {
		return nil, err
	}
	defer func() {
		if err != nil {
			_ = s.closeFiles() // err is the reason
		}
	}()
	if s.v, err = find(ctx, s.disk, cfg, s.log); err != nil {
		return nil, err
	}
	if s.pool, s.live, s.trash, err = places(s.v.root()); err != nil {
		return nil, fmt.Errorf("writable layers in %s: %w", s.disk, err)
	}
	if err := s.clean(); err != nil {
		return nil, fmt.Errorf("writable layers in %s: %w", s.disk, err)
	}
	size := cfg.Pool
	if size == 0 {
		size = DefaultPool
	}
	size = max(size, 0)
	s.ready = make(chan string, 2*size)
	ctx, s.stop = context.WithCancelCause(context.WithoutCancel(ctx))
	s.workers.Go(func() { s.fillPool(ctx, size) })
	s.workers.Go(func() { s.emptyTrash(ctx) })
	wake(s.refill)
	wake(s.empty)
	return s, nil
}

// find tries the ways in order; what was used before comes first.
func find(ctx context.Context, disk string, cfg Config, log *slog.Logger) (volumes, error) {
	type way struct {
		name string
		open func() (volumes, error)
	}
	image := way{"btrfs image", func() (volumes, error) { return openImage(ctx, disk, cfg.ImageBytes, directIO, log) }}
	ways := []way{
		{"project quota", func() (volumes, error) { return openProjects(disk, kernelQuotas{}) }},
		{"btrfs", func() (volumes, error) { return openBtrfs(disk) }},
	}
	hasImage, err := exists(filepath.Join(disk, imageName))
	if err != nil {
		return nil, err
	}
	hasDir, err := exists(filepath.Join(disk, dirName))
	if err != nil {
		return nil, err
	}
	switch {
	case hasImage:
		ways = []way{image}
	case !hasDir:
		ways = append(ways, image)
	}
	var reasons []error
	for _, w := range ways {
		v, err := w.open()
		if err == nil {
			if err = tryBounded(v); err == nil {
				log.Info("disk limits", "mechanism", v.mechanism())
				return v, nil
			}
			err = errors.Join(err, v.close())
			// What was there before may hold layers of sandboxes and is not ours to throw away.
			if !hasImage && !hasDir {
				err = errors.Join(err, v.remove())
			}
		}
		reasons = append(reasons, fmt.Errorf("%s: %w", w.name, err))
	}
	why := errors.Join(reasons...)
	e := errdefs.New(errdefs.FailedPrecondition, "disk limit", "no way to enforce one below %s: %s", disk, oneLine(why)).
		WithHint("Install btrfs-progs, or put the data directory on XFS or ext4 mounted with prjquota").
		WithField("limits.disk_bytes", "").Wrap(why)
	e.Feature = node.FeatureDisk
	return nil, e
}

// directIO is on: past the page cache of the image a page is kept once and not twice, and writes that reach the disk
// are three times as fast (BenchmarkWrite: 760 against 220 MiB/s).
const directIO = true

func exists(path string) (bool, error) {
	_, err := os.Lstat(path)
	if errors.Is(err, os.ErrNotExist) {
		return false, nil
	}
	return err == nil, err
}

func tryBounded(v volumes) error {
	return projquota.Bounded(func() error { return try(v) })
}

// oneLine joins the lines of an error, for a message.
func oneLine(err error) string {
	return regexp.MustCompile(`\s*\n\s*`).ReplaceAllString(err.Error(), "; ")
}

// clean puts what an earlier Store left where it belongs: empty volumes of its pool are as good as new ones, but
// whether they are whole nobody knows.
func (s *Store) clean() error {
	for _, from := range []*os.File{s.pool, s.v.root()} {
		names, err := dirfd.Names(from)
		if err != nil {
			return err
		}
		for _, n := range names {
			if from == s.v.root() && (n == "pool" || n == "live" || n == "trash") {
				continue
			}
			if err := s.discard(from, n); err != nil {
				return err
			}
		}
	}
	return nil
}

// Mechanism names how the limit is enforced.
func (s *Store) Mechanism() string { return s.v.mechanism() }

// Free is what may be written before the disk is full, whatever the limits.
func (s *Store) Free() (int64, error) {
	inside, err := dirfd.Free(s.v.root())
	if err != nil {
		return 0, err
	}
	outside, err := dirfd.Free(s.diskDir)
	if err != nil {
		return 0, err
	}
	return min(inside, outside), nil
}

var idForm = regexp.MustCompile(`^[0-9a-z][0-9a-z-]{0,127}$`)

func checkID(id string) error {
	if !idForm.MatchString(id) {
		return errdefs.New(errdefs.Invalid, "", "%q cannot be a sandbox's name", id)
	}
	return nil
}

// Take gives sandbox id an empty layer that may hold so many bytes, owned by host id uidBase, which no other sandbox
// has now. AlreadyExists when the sandbox has one. On an error nothing is taken.
func (s *Store) Take(ctx context.Context, id string, bytes int64, uidBase uint32) (_ *Upper, err error) {
	if err := checkID(id); err != nil {
		return nil, err
	}
	if bytes <= 0 {
		return nil, errdefs.New(errdefs.Invalid, "sandbox "+id, "disk limit %d: a layer without a limit is not given", bytes).
			WithField("limits.disk_bytes", "above 0")
	}
	if uidBase > math.MaxUint32-idRange {
		return nil, errdefs.New(errdefs.Invalid, "sandbox "+id, "host ids from %d on do not fit", uidBase)
	}
	if err := context.Cause(ctx); err != nil {
		return nil, err
	}
	name, err := s.next()
	if err != nil {
		return nil, s.explain(id, err)
	}
	defer wake(s.refill)
	u, err := s.prepare(name, bytes, uidBase)
	if err != nil {
		return nil, errors.Join(s.explain(id, err), s.discard(s.pool, name))
	}
	// The last step: what is in live has its limit.
	if err := dirfd.Rename(s.pool, name, s.live, id); err != nil {
		u.Close()
		if errors.Is(err, os.ErrExist) {
			err = errdefs.New(errdefs.AlreadyExists, "sandbox "+id, "it has a writable layer").Wrap(err)
		}
		return nil, errors.Join(s.explain(id, err), s.discard(s.pool, name))
	}
	return u, nil
}

// explain gives errors of a full or broken disk their kind.
func (s *Store) explain(id string, err error) error {
	if _, ok := errors.AsType[*errdefs.Error](err); ok {
		return err
	}
	switch {
	case errors.Is(err, syscall.ENOSPC):
		return errdefs.New(errdefs.Exhausted, "sandbox "+id, "the disk for writable layers is full").
			WithField("limits.disk_bytes", "").WithHint("Free space below %s, then try again", s.disk).Wrap(err)
	case errors.Is(err, syscall.EROFS), errors.Is(err, syscall.EIO):
		return errdefs.New(errdefs.Unavailable, "sandbox "+id, "the disk for writable layers takes no more writes").
			WithHint("See the kernel's log; stop all sandboxes, then restart sandsea up").Wrap(err)
	}
	return fmt.Errorf("writable layer of sandbox %s: %w", id, err)
}

// next gives the name of an empty volume in the pool.
func (s *Store) next() (string, error) {
	select {
	case name := <-s.ready:
		return name, nil
	default:
		return s.makeOne()
	}
}

func (s *Store) makeOne() (string, error) {
	name := fmt.Sprintf("%s-%d", s.session, s.serial.Add(1))
	if err := s.v.create(s.pool, name); err != nil {
		return "", err
	}
	return name, nil
}

func (s *Store) prepare(name string, bytes int64, uidBase uint32) (_ *Upper, err error) {
	vol, err := dirfd.Open(s.pool, name)
	if err != nil {
		return nil, err
	}
	defer vol.Close()
	if err := s.v.limit(vol, bytes, uidBase); err != nil {
		return nil, err
	}
	if err := dirfd.Chown(vol, upperName, uidBase, uidBase); err != nil {
		return nil, err
	}
	return openUpper(vol)
}

func openUpper(vol *os.File) (*Upper, error) {
	dir, err := dirfd.Path(vol, upperName)
	if err != nil {
		return nil, err
	}
	work, err := dirfd.Path(vol, workName)
	if err != nil {
		dir.Close()
		return nil, err
	}
	return &Upper{Dir: dir, Work: work}, nil
}

// Find opens the layer that a sandbox has: NotFound when it has none.
func (s *Store) Find(id string) (*Upper, error) {
	vol, err := s.open(id)
	if err != nil {
		return nil, err
	}
	defer vol.Close()
	return openUpper(vol)
}

func (s *Store) open(id string) (*os.File, error) {
	if err := checkID(id); err != nil {
		return nil, err
	}
	vol, err := dirfd.Open(s.live, id)
	if errors.Is(err, os.ErrNotExist) {
		return nil, errdefs.New(errdefs.NotFound, "sandbox "+id, "it has no writable layer").Wrap(err)
	}
	return vol, err
}

// Update changes the limit of a sandbox's layer. One that is below what it holds stops its writes and takes nothing
// away. uidBase is that of Take.
func (s *Store) Update(id string, bytes int64, uidBase uint32) error {
	if bytes <= 0 {
		return errdefs.New(errdefs.Invalid, "sandbox "+id, "disk limit %d", bytes).WithField("limits.disk_bytes", "above 0")
	}
	vol, err := s.open(id)
	if err != nil {
		return err
	}
	defer vol.Close()
	return s.v.limit(vol, bytes, uidBase)
}

// Usage is what a sandbox's layer holds, in bytes.
func (s *Store) Usage(id string) (int64, error) {
	vol, err := s.open(id)
	if err != nil {
		return 0, err
	}
	defer vol.Close()
	n, err := s.v.usage(vol)
	if err != nil {
		return 0, fmt.Errorf("usage of sandbox %s: %w", id, err)
	}
	return n, nil
}

// Release takes a sandbox's layer back; the removal itself happens in the background. Success when it has none.
func (s *Store) Release(id string) error {
	if err := checkID(id); err != nil {
		return err
	}
	err := s.discard(s.live, id)
	if err != nil {
		return fmt.Errorf("release the writable layer of sandbox %s: %w", id, err)
	}
	return nil
}

// discard moves a volume into the trash.
func (s *Store) discard(from *os.File, name string) error {
	target := fmt.Sprintf("%s-%d", s.session, s.serial.Add(1))
	err := dirfd.Rename(from, name, s.trash, target)
	if errors.Is(err, os.ErrNotExist) {
		return nil
	}
	wake(s.empty)
	return err
}

// Names lists, sorted, the ids of sandboxes that have a layer.
func (s *Store) Names() ([]string, error) {
	names, err := dirfd.Names(s.live)
	if err != nil {
		return nil, fmt.Errorf("list writable layers: %w", err)
	}
	slices.Sort(names)
	return names, nil
}

// fillPool keeps so many volumes in the pool.
func (s *Store) fillPool(ctx context.Context, size int) {
	var again <-chan time.Time
	for {
		select {
		case <-ctx.Done():
			return
		case <-s.refill:
		case <-again:
		}
		again = nil
		for len(s.ready) < size && ctx.Err() == nil {
			name, err := s.makeOne()
			if err == nil {
				err = s.offer(s.pool, name)
			}
			if err != nil {
				s.log.Warn("no new writable layer for the pool", "err", err)
				again = time.After(retryPause)
				break
			}
		}
	}
}

// offer puts an empty volume into the pool, or into the trash when that has become full.
func (s *Store) offer(from *os.File, name string) error {
	if from != s.pool {
		if err := dirfd.Rename(from, name, s.pool, name); err != nil {
			return err
		}
	}
	select {
	case s.ready <- name:
		return nil
	default:
		return s.discard(s.pool, name)
	}
}

// recycle makes a volume of the trash one of the pool, if the pool has room and that is worth it.
func (s *Store) recycle(name string) (bool, error) {
	if len(s.ready) == cap(s.ready) {
		return false, nil
	}
	if ok, err := s.v.renew(s.trash, name); err != nil || !ok {
		return false, err
	}
	return true, s.offer(s.trash, name)
}

// remove takes a volume out of the trash.
func (s *Store) remove(name string) error {
	if ok, err := s.recycle(name); ok && err == nil {
		return nil
	}
	// Whatever kept it from being used again: nothing of it stays.
	if err := s.v.destroy(s.trash, name); err != nil && !errors.Is(err, os.ErrNotExist) {
		return err
	}
	return nil
}

// emptyTrash removes what was given back, and once a second as long as there is something what that left behind.
func (s *Store) emptyTrash(ctx context.Context) {
	var again <-chan time.Time
	for {
		timed := false
		select {
		case <-ctx.Done():
			return
		case <-s.empty:
		case <-again:
			again, timed = nil, true
		}
		names, err := dirfd.Names(s.trash)
		for _, n := range names {
			if ctx.Err() != nil {
				return
			}
			err = errors.Join(err, s.remove(n))
		}
		if err != nil {
			s.log.Warn("a writable layer is not gone yet", "err", err)
		}
		more := err != nil || !timed && len(names) > 0
		if timed && s.v.collect() {
			more = true
		}
		if more && again == nil {
			again = time.After(retryPause)
		}
	}
}

// Close stops the background work and gives up the descriptors. Layers stay, and running sandboxes go on with them.
func (s *Store) Close() error {
	s.closeOnce.Do(func() {
		s.stop(errors.New("store closed"))
		s.workers.Wait()
		s.closeErr = s.closeFiles()
	})
	return s.closeErr
}

func (s *Store) closeFiles() error {
	var errs []error
	for _, f := range []*os.File{s.pool, s.live, s.trash, s.diskDir} {
		if f != nil {
			errs = append(errs, f.Close())
		}
	}
	if s.v != nil {
		errs = append(errs, s.v.close())
	}
	return errors.Join(errs...)
}

// Destroy removes every layer and all that was made for them; the Store is closed by it. Sandboxes must have ended.
func (s *Store) Destroy() error {
	if err := s.Close(); err != nil {
		return err
	}
	if err := s.v.remove(); err != nil {
		return fmt.Errorf("remove writable layers: %w", err)
	}
	err := os.Remove(s.disk)
	if errors.Is(err, os.ErrNotExist) || errors.Is(err, syscall.ENOTEMPTY) {
		return nil
	}
	return err
}

// wake notes that there is work; once is enough however often it is said.
func wake(c chan struct{}) {
	select {
	case c <- struct{}{}:
	default:
	}
}
