// Package compose makes the root file system of a sandbox out of layers that are present on this machine.
//
// Each layer is mounted once, as a detached mount that only a descriptor of this package names, and shared by all
// sandboxes; a sandbox's root is an overlay of id-mapped copies of those mounts under its own upper directory, detached
// as well until sandsea-init puts it into place. Nothing is ever attached to the host's mount tree, and a killed edge
// leaves nothing: running sandboxes keep their own copies.
//
// All methods of a Composer may be called at once.
package compose

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"os"
	"path/filepath"
	"slices"
	"sync"

	"github.com/sandsea/sandsea/api/errdefs"
	"github.com/sandsea/sandsea/internal/image"
	"github.com/sandsea/sandsea/internal/layers/blob"
	"github.com/sandsea/sandsea/internal/layers/build"
	"github.com/sandsea/sandsea/internal/linux/erofs"
	"github.com/sandsea/sandsea/internal/linux/mount"
	"github.com/sandsea/sandsea/internal/linux/scm"
)

// Config of a Composer.
type Config struct {
	// Blobs holds the layers; it implements blob.Local.
	Blobs blob.Store
	Log   *slog.Logger
}

// Composer keeps layers mounted.
type Composer struct {
	cfg     Config
	closing sync.WaitGroup // mounts that are on their way out

	mu     sync.Mutex
	layers map[image.Digest]*layer // guarded by mu
	closed bool                    // guarded by mu
}

// layer is a mount in the making until done is closed, then mount or err is set for good.
type layer struct {
	done  chan struct{}
	mount *os.File
	err   error
	users int  // guarded by Composer.mu: overlays being made from it
	drop  bool // guarded by Composer.mu: close it after the last user
}

// New makes a Composer with nothing mounted.
func New(cfg Config) (*Composer, error) {
	if _, ok := cfg.Blobs.(blob.Local); !ok {
		return nil, errors.New("compose: the blob store keeps no local files")
	}
	if cfg.Log == nil {
		return nil, errors.New("compose: no log")
	}
	return &Composer{cfg: cfg, layers: map[image.Digest]*layer{}}, nil
}

// Lower mounts a layer, once however many ask at the same time, and keeps it mounted until Drop or Close. NotFound when
// its blobs are not here. The file stays the Composer's.
func (c *Composer) Lower(ctx context.Context, d image.Digest) (*os.File, error) {
	l, err := c.take(ctx, d)
	if err != nil {
		return nil, err
	}
	defer c.give(l)
	return l.mount, nil
}

// take is Lower that also keeps the layer from being closed until give.
func (c *Composer) take(ctx context.Context, d image.Digest) (*layer, error) {
	c.mu.Lock()
	if c.closed {
		c.mu.Unlock()
		return nil, errdefs.New(errdefs.Unavailable, "layers", "closed")
	}
	l, ok := c.layers[d]
	if !ok {
		l = &layer{done: make(chan struct{})}
		c.layers[d] = l
	}
	l.users++
	c.mu.Unlock()
	if !ok {
		// Not bound to the first caller's patience: others wait for the same mount. It is local work of a millisecond.
		l.mount, l.err = c.mountLayer(context.WithoutCancel(ctx), d)
		close(l.done)
		if l.err != nil {
			c.mu.Lock()
			if c.layers[d] == l {
				delete(c.layers, d) // the next one tries again
			}
			c.mu.Unlock()
		}
	}
	select {
	case <-l.done:
	case <-ctx.Done():
		c.give(l)
		return nil, fmt.Errorf("mount layer %s: %w", d, context.Cause(ctx))
	}
	if l.err != nil {
		c.give(l)
		return nil, l.err
	}
	return l, nil
}

func (c *Composer) give(l *layer) {
	c.mu.Lock()
	l.users--
	last := l.users == 0 && l.drop
	c.mu.Unlock()
	if last && l.mount != nil {
		l.mount.Close()
	}
}

func (c *Composer) mountLayer(ctx context.Context, d image.Digest) (*os.File, error) {
	meta, data, err := build.Files(ctx, c.cfg.Blobs, d)
	if err != nil {
		return nil, err
	}
	// directio: every page would be in memory twice otherwise, as the image's and as the file's.
	m, err := erofs.Mount(meta, data, erofs.DirectIO())
	if err != nil {
		return nil, fmt.Errorf("layer %s: %w", d, err)
	}
	c.cfg.Log.Debug("layer mounted", "layer", d)
	return m, nil
}

// Keep unmounts every layer but these, since the others may be deleted: a mounted one keeps its disk space. Sandboxes that
// use it keep it, and one that is asked for again is mounted again.
func (c *Composer) Keep(layers []image.Digest) {
	c.mu.Lock()
	defer c.mu.Unlock()
	for d, l := range c.layers {
		if !slices.Contains(layers, d) {
			delete(c.layers, d)
			c.dropLocked(l)
		}
	}
}

func (c *Composer) dropLocked(l *layer) {
	if l == nil {
		return
	}
	l.drop = true
	if l.users == 0 && l.mount != nil {
		l.mount.Close()
	}
}

// Close unmounts every layer. Sandboxes that use them keep them. Idempotent.
func (c *Composer) Close() error {
	c.mu.Lock()
	c.closed = true
	for _, l := range c.layers {
		c.dropLocked(l)
	}
	clear(c.layers)
	c.mu.Unlock()
	c.closing.Wait()
	return nil
}

// Upper is where a sandbox's changes go: two directories beside each other, files named as they are. Dir is owned by the
// sandbox's root.
type Upper struct {
	Dir, Work *os.File
}

// Overlay makes a root file system: the layers, lowest first, seen through the user namespace, under the upper. The
// result is a detached mount, the caller's. Device nodes in it cannot be opened, whoever made them; set-user-id
// programs work. Without an upper it is refused.
func (c *Composer) Overlay(ctx context.Context, layers []image.Digest, userns *os.File, up Upper) (*os.File, error) {
	switch {
	case up.Dir == nil || up.Work == nil:
		return nil, errdefs.New(errdefs.Invalid, "overlay", "no upper directory")
	case userns == nil:
		return nil, errdefs.New(errdefs.Invalid, "overlay", "no user namespace")
	case len(layers) == 0 || len(layers) > image.MaxLayers:
		return nil, errdefs.New(errdefs.Invalid, "overlay", "%d layers, not 1 to %d", len(layers), image.MaxLayers)
	}
	opts := make([]mount.Option, 0, len(layers)+8)
	var clones []*os.File
	// The overlay has copies of its own. To close a detached mount waits for every processor (an expedited grace period
	// of RCU, some 0.1 ms each), which nobody needs to wait for here.
	defer func() { c.closing.Go(func() { scm.CloseFiles(clones) }) }()
	// The first lowerdir+ is the uppermost.
	for i := len(layers) - 1; i >= 0; i-- {
		l, err := c.take(ctx, layers[i])
		if err != nil {
			return nil, err
		}
		m, err := mount.Clone(l.mount, false)
		c.give(l)
		if err != nil {
			return nil, fmt.Errorf("layer %s: %w", layers[i], err)
		}
		clones = append(clones, m)
		if err := mount.Idmap(m, userns, 0); err != nil {
			return nil, fmt.Errorf("layer %s: %w", layers[i], err)
		}
		opts = append(opts, mount.File("lowerdir+", m))
	}
	vol, up, err := anonymous(up)
	if err != nil {
		return nil, err
	}
	clones = append(clones, vol)
	defer scm.CloseFiles([]*os.File{up.Dir, up.Work})
	return newOverlay(append(opts, mount.File("upperdir", up.Dir), mount.File("workdir", up.Work)))
}

// anonymous names the directories of an upper from a mount that begins at their common parent: the mount table inside
// shows their paths, and those would tell where the upper lies. All three files are the caller's; the mount must be open
// until the overlay is made.
func anonymous(up Upper) (vol *os.File, _ Upper, err error) {
	if vol, err = mount.CloneAt(up.Dir, "..", false); err != nil {
		return nil, Upper{}, fmt.Errorf("upper: %w", err)
	}
	dir, err := reopen(vol, up.Dir)
	if err != nil {
		vol.Close()
		return nil, Upper{}, err
	}
	work, err := reopen(vol, up.Work)
	if err != nil {
		dir.Close()
		vol.Close()
		return nil, Upper{}, err
	}
	return vol, Upper{Dir: dir, Work: work}, nil
}

// reopen opens a directory of an upper below vol. Another one of the same name is the next sandbox's, and a caller who
// lost the upper meanwhile must not touch it.
func reopen(vol, dir *os.File) (*os.File, error) {
	again, err := mount.OpenDir(vol, filepath.Base(dir.Name()))
	if err != nil {
		return nil, fmt.Errorf("upper: %w", err)
	}
	same, err := sameFile(dir, again)
	if err == nil && !same {
		err = errdefs.New(errdefs.FailedPrecondition, "overlay", "its upper directory was taken back meanwhile")
	}
	if err != nil {
		again.Close()
		return nil, err
	}
	return again, nil
}

func sameFile(a, b *os.File) (bool, error) {
	ai, err := a.Stat()
	if err != nil {
		return false, fmt.Errorf("upper: %w", err)
	}
	bi, err := b.Stat()
	if err != nil {
		return false, fmt.Errorf("upper: %w", err)
	}
	return os.SameFile(ai, bi), nil
}

// newOverlay adds what every overlay has.
func newOverlay(opts []mount.Option) (*os.File, error) {
	opts = append(opts,
		mount.Flag("volatile"), // an upper is used once: nothing of it has to survive a power loss
		// A layer is not ours alone, so what it says about other layers by redirects is not followed.
		mount.Value("redirect_dir", "nofollow"), mount.Value("metacopy", "off"),
		mount.Value("index", "off"), mount.Value("xino", "off"), mount.Value("uuid", "null"),
		mount.Value("source", "sandsea"))
	return mount.New("overlay", mount.NoDev, opts...)
}

// Probe tries whether this kernel can do all of it, without any layer: overlay over detached, id-mapped mounts by
// descriptor. ok false comes with the reason. userns is any mapped user namespace.
func Probe(userns *os.File) (ok bool, reason string) {
	lower, err := mount.New("tmpfs", 0, mount.Value("size", "64k"), mount.Value("mode", "0755"))
	if err != nil {
		return false, err.Error()
	}
	defer lower.Close()
	if err := mount.Idmap(lower, userns, 0); err != nil {
		return false, err.Error()
	}
	upper, err := mount.New("tmpfs", 0, mount.Value("size", "64k"), mount.Value("mode", "0755"))
	if err != nil {
		return false, err.Error()
	}
	defer upper.Close()
	var dirs [2]*os.File
	for i, name := range []string{"u", "w"} {
		if err := mount.MakeDir(upper, name, 0o755); err != nil {
			return false, err.Error()
		}
		if dirs[i], err = mount.OpenDir(upper, name); err != nil {
			return false, err.Error()
		}
		defer dirs[i].Close()
	}
	m, err := newOverlay([]mount.Option{
		mount.File("lowerdir+", lower), mount.File("upperdir", dirs[0]), mount.File("workdir", dirs[1]),
	})
	if err != nil {
		return false, err.Error()
	}
	m.Close()
	if !mount.Known("erofs") {
		return false, "this kernel has no EROFS"
	}
	return true, ""
}
