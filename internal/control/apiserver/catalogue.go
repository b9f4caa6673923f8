package apiserver

import (
	"cmp"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"log/slog"
	"slices"
	"strings"
	"sync"
	"time"

	"github.com/sandsea/sandsea/api/errdefs"
	"github.com/sandsea/sandsea/internal/image"
	"github.com/sandsea/sandsea/internal/sandbox"
	"github.com/sandsea/sandsea/internal/store"
	"github.com/sandsea/sandsea/internal/store/keys"
)

// named is an image in the catalogue. Written by the API server alone.
type named struct {
	image.Image
	Created time.Time `json:"created"`
	// Origin is set for imports from Debian packages.
	Origin *origin `json:"origin,omitempty"`

	digest image.Digest
	rev    int64
}

// origin is what an import from Debian packages gave before its name and config were changed by the request: an equal
// import finds it.
type origin struct {
	Name     string       `json:"name"`
	Packages string       `json:"packages"`
	Config   image.Config `json:"config"`
}

// decodeImage reads a record; the kind DataLoss when it names no image or no layers.
func decodeImage(p store.Pair) (*named, error) {
	name := strings.TrimPrefix(p.Key, keys.Images)
	broken := func(format string, args ...any) *errdefs.Error {
		return errdefs.New(errdefs.DataLoss, "image "+name, "its record cannot be read: "+format, args...).
			WithHint("Remove it and import it again: sandsea image rm %s", name)
	}
	var n named
	if err := json.Unmarshal(p.Value, &n); err != nil {
		return nil, broken("%v", err).Wrap(err)
	}
	if n.Name != name {
		return nil, broken("it is that of %q", clip(n.Name))
	}
	if len(n.Layers) == 0 {
		return nil, broken("it names no layer")
	}
	for _, l := range n.Layers {
		if _, err := image.ParseDigest(string(l.Digest)); err != nil {
			return nil, broken("%v", err).Wrap(err)
		}
	}
	n.digest, n.rev = n.Digest(), p.ModRev
	return &n, nil
}

// catalogue is a copy of the images in the store, followed by a watch, so that a create reads nothing. A name that it
// does not have is looked up in the store before it is said to be missing.
type catalogue struct {
	store store.Store
	log   *slog.Logger
	first chan struct{}
	once  sync.Once

	mu     sync.RWMutex
	byName map[string]*named // guarded by mu; the values never change
}

func newCatalogue(s store.Store, log *slog.Logger) *catalogue {
	return &catalogue{store: s, log: log, first: make(chan struct{}), byName: map[string]*named{}}
}

func (c *catalogue) wait(ctx context.Context) error {
	select {
	case <-c.first:
		return nil
	case <-ctx.Done():
		return fmt.Errorf("wait for the image catalogue: %w", context.Cause(ctx))
	}
}

func (c *catalogue) run(ctx context.Context) {
	store.Repeat(ctx, c.log, "images", c.follow)
}

func (c *catalogue) follow(ctx context.Context) error {
	all, rev, err := c.read(ctx)
	if err != nil {
		return err
	}
	c.mu.Lock()
	for name, n := range c.byName {
		if n.rev > rev { // written by ourselves while we read
			all[name] = n
		}
	}
	c.byName = all
	c.mu.Unlock()
	c.once.Do(func() { close(c.first) })
	for e, err := range c.store.Watch(ctx, keys.Images, rev) {
		if err != nil {
			return err
		}
		if e.Deleted {
			c.forget(strings.TrimPrefix(e.Key, keys.Images), e.ModRev)
			continue
		}
		n, err := decodeImage(e.Pair)
		if err != nil {
			c.log.Warn("image record cannot be read", "key", e.Key, "err", err)
			c.forget(strings.TrimPrefix(e.Key, keys.Images), e.ModRev) // what it was before is no longer true
			continue
		}
		c.take(n)
	}
	return nil
}

// read gives all images whose records can be read, as the store has them.
func (c *catalogue) read(ctx context.Context) (map[string]*named, int64, error) {
	all := map[string]*named{}
	rev, err := store.All(ctx, c.store, keys.Images, func(p store.Pair) {
		n, err := decodeImage(p)
		if err != nil {
			c.log.Warn("image record cannot be read", "key", p.Key, "err", err)
			return
		}
		all[n.Name] = n
	})
	return all, rev, err
}

// layers lists the layers of all images, as the store has them, sorted. While a record cannot be read nobody knows what
// its image needs: the kind DataLoss, with the record's name.
func (c *catalogue) layers(ctx context.Context) ([]string, error) {
	var out []string
	var unread error
	_, err := store.All(ctx, c.store, keys.Images, func(p store.Pair) {
		n, err := decodeImage(p)
		if err != nil {
			unread = cmp.Or(unread, err)
			return
		}
		for _, l := range n.Layers {
			out = append(out, string(l.Digest))
		}
	})
	if err = cmp.Or(err, unread); err != nil {
		return nil, err
	}
	slices.Sort(out)
	return slices.Compact(out), nil
}

func (c *catalogue) take(n *named) {
	c.mu.Lock()
	defer c.mu.Unlock()
	if old := c.byName[n.Name]; old == nil || old.rev < n.rev {
		c.byName[n.Name] = n
	}
}

func (c *catalogue) forget(name string, rev int64) {
	c.mu.Lock()
	defer c.mu.Unlock()
	if old := c.byName[name]; old != nil && old.rev < rev {
		delete(c.byName, name)
	}
}

func (c *catalogue) list() []*named {
	c.mu.RLock()
	defer c.mu.RUnlock()
	out := make([]*named, 0, len(c.byName))
	for _, n := range c.byName {
		out = append(out, n)
	}
	slices.SortFunc(out, func(a, b *named) int { return cmp.Compare(a.Name, b.Name) })
	return out
}

// find gives the image that ref names, by name or digest.
func (c *catalogue) find(ctx context.Context, ref string) (*named, error) {
	if ref == "" {
		return nil, errdefs.New(errdefs.Invalid, "", "ref: missing").WithField("ref", "").WithHint("All: sandsea image ls")
	}
	if strings.HasPrefix(ref, "sha256:") {
		d, err := image.ParseDigest(ref)
		if err != nil {
			return nil, err
		}
		for _, n := range c.list() { // by name: the same image under two names is one
			if n.digest == d {
				return n, nil
			}
		}
		if all, _, err := c.read(ctx); err == nil {
			for _, n := range all {
				if n.digest == d {
					c.take(n)
					return n, nil
				}
			}
		}
		return nil, errdefs.New(errdefs.NotFound, "image "+ref[:15],
			"none with this digest").WithHint("All: sandsea image ls")
	}
	for _, name := range slices.Compact([]string{ref, spelled(ref)}) {
		c.mu.RLock()
		n := c.byName[name]
		c.mu.RUnlock()
		if n != nil {
			return n, nil
		}
		if checkImageName("ref", name) == nil {
			n, err := c.fresh(ctx, name)
			if err != nil || n != nil {
				return n, err
			}
		}
	}
	var names []string
	for _, n := range c.list() {
		names = append(names, n.Name)
	}
	return nil, notFound(fmt.Sprintf("image %q", clip(ref)), "none", ref, names, "sandsea image ls")
}

// fresh reads one name from the store; nil when there is none.
func (c *catalogue) fresh(ctx context.Context, name string) (*named, error) {
	res, err := c.store.Txn(ctx, nil, []store.Op{store.Get(keys.Image(name))}, nil)
	if err != nil || len(res.Pairs) == 0 {
		return nil, err
	}
	n, err := decodeImage(res.Pairs[0])
	if err == nil {
		c.take(n)
	}
	return n, err
}

// environment composes what a sandbox's root is made of.
func (c *catalogue) environment(ctx context.Context, e sandbox.Environment) (image.Image, error) {
	if e.Image != "" {
		n, err := c.find(ctx, e.Image)
		if err != nil {
			return image.Image{}, atField(err, "environment.image")
		}
		return n.Image, nil
	}
	return c.stack(ctx, "environment.", e.Base, e.Workspace, e.Toolkits)
}

func (c *catalogue) stack(ctx context.Context, prefix, base, workspace string, toolkits []string) (image.Image, error) {
	if base == "" {
		return image.Image{}, errdefs.New(errdefs.Invalid, "", "%sbase: missing", prefix).WithField(prefix+"base", "").
			WithHint("Name the base image; all: sandsea image ls")
	}
	bottom, err := c.find(ctx, base)
	if err != nil {
		return image.Image{}, atField(err, prefix+"base")
	}
	var above []image.Image
	if workspace != "" {
		n, err := c.find(ctx, workspace)
		if err != nil {
			return image.Image{}, atField(err, prefix+"workspace")
		}
		above = append(above, n.Image)
	}
	for _, t := range toolkits {
		n, err := c.find(ctx, t)
		if err != nil {
			return image.Image{}, atField(err, prefix+"toolkits")
		}
		above = append(above, n.Image)
	}
	return image.Compose(bottom.Image, above...)
}

// atField says which field of the request named what was not found.
func atField(err error, field string) error {
	if e, ok := errors.AsType[*errdefs.Error](err); ok && e.Field == "" {
		c := *e
		c.Field = field
		return &c
	}
	return err
}

// put names an image. rev is the revision at which the name was read, 0 for absent; not done means that the name has
// changed since.
func (c *catalogue) put(
	ctx context.Context, img image.Image, from *origin, created time.Time, rev int64,
) (n *named, done bool, err error) {
	n = &named{Image: img, Created: created.UTC(), Origin: from, digest: img.Digest()}
	value, err := json.Marshal(n)
	if err != nil {
		return nil, false, fmt.Errorf("encode image %s: %w", img.Name, err)
	}
	key := keys.Image(img.Name)
	cond := store.Cond{Key: key, Absent: true}
	if rev != 0 {
		cond = store.Cond{Key: key, ModRev: rev}
	}
	res, err := c.store.Txn(ctx, []store.Cond{cond}, []store.Op{store.Put(key, value)}, nil)
	if err != nil || !res.Succeeded {
		return nil, false, err
	}
	n.rev = res.Revision
	c.take(n)
	return n, true, nil
}

// remove deletes a name as it was read; not done means that the name has changed since.
func (c *catalogue) remove(ctx context.Context, n *named) (done bool, err error) {
	key := keys.Image(n.Name)
	res, err := c.store.Txn(ctx, []store.Cond{{Key: key, ModRev: n.rev}}, []store.Op{store.Delete(key)}, nil)
	if err == nil && res.Succeeded {
		c.forget(n.Name, res.Revision)
	}
	return res.Succeeded, err
}

// unread gives the image that ref names and whose record cannot be read: its name and revision, so that it can be
// removed.
func (c *catalogue) unread(ctx context.Context, ref string) (*named, error) {
	for _, name := range slices.Compact([]string{ref, spelled(ref)}) {
		res, err := c.store.Txn(ctx, nil, []store.Op{store.Get(keys.Image(name))}, nil)
		if err != nil {
			return nil, err
		}
		if len(res.Pairs) == 0 {
			continue
		}
		if _, err := decodeImage(res.Pairs[0]); err == nil {
			continue
		}
		return &named{Image: image.Image{Name: name}, rev: res.Pairs[0].ModRev}, nil
	}
	return nil, errdefs.New(errdefs.FailedPrecondition, "image "+clip(ref), "was changed at this moment").
		WithHint("Look at it again: sandsea image inspect %s", clip(ref))
}

// checkImageName checks a name as people and registries write them: "py", "debian:bookworm+git,python3",
// "registry:5000/team/tools@v2".
func checkImageName(field, name string) error {
	const letters = "abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789"
	bad := func(format string, args ...any) error {
		return errdefs.New(errdefs.Invalid, "", field+": "+format, args...).WithField(field, "256 bytes").
			WithHint("Use letters, digits and . _ - + , : @ / and begin with a letter or digit")
	}
	switch {
	case name == "":
		return bad("missing")
	case len(name) > 256:
		return bad("%d bytes, at most 256", len(name))
	case strings.HasPrefix(name, "sha256:"):
		return bad("%q reads as a digest", clip(name))
	case strings.Trim(name[:1], letters) != "", strings.Trim(name, letters+"._-+,:@/") != "",
		strings.Contains(name, "//"), strings.HasSuffix(name, "/"), slices.Contains(strings.Split(name, "/"), ".."):
		return bad("%q is no name", clip(name))
	}
	return nil
}
