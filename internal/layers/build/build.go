// Package build makes layers: it imports root file system archives, OCI image layouts, what docker save writes, images of
// registries and Debian suites, and collects the layers that nothing names any more.
//
// A layer is a split EROFS image, that is a metadata image and a data file, and a manifest that names both and the
// digest of every 256 KiB of the data; the manifest's digest is the layer's. Archives are read as streams: contents go
// to a staged blob as they come, everything else is a tree in memory, and nothing is ever unpacked on the host. What an
// import reads is hostile until proven otherwise: sizes, counts and memory are bounded by Limits, and an import that
// fails leaves nothing behind. Equal trees that come in equal order make equal layers.
//
// A Builder may be used by any number of goroutines. Equal imports that run at once are one.
package build

import (
	"context"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"maps"
	"net/http"
	"net/url"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"time"

	"github.com/sandsea/sandsea/api/errdefs"
	"github.com/sandsea/sandsea/internal/image"
	"github.com/sandsea/sandsea/internal/layers/blob"
)

// Config says where a Builder works.
type Config struct {
	// Store takes the layers.
	Store blob.Creator
	// Dir is the data directory: its tmp and cache folders are used.
	Dir string
	// Limits of one import.
	Limits Limits
	// IDBase is the first of 65,536 user and group ids of the host that belong to nobody else: the packages' scripts of
	// Debian imports run under them. 0: DefaultIDBase.
	IDBase int
	// Proxy says through which proxy a registry is asked; nil: through none.
	Proxy func(*http.Request) (*url.URL, error)
	// Log may be nil.
	Log *slog.Logger
	// Now may be nil: time.Now.
	Now func() time.Time
}

// Validate reports what is missing.
func (c Config) Validate() error {
	switch {
	case c.Store == nil:
		return errdefs.New(errdefs.Invalid, "build", "no blob store").WithField("store", "")
	case !filepath.IsAbs(c.Dir):
		return errdefs.New(errdefs.Invalid, "build", "data directory %q is not absolute", c.Dir).WithField("dir", "")
	}
	return nil
}

// Builder imports images.
type Builder struct {
	store  blob.Creator
	dir    string
	limits Limits
	log    *slog.Logger
	now    func() time.Time
	idBase int
	proxy  func(*http.Request) (*url.URL, error)
	pause  func(context.Context, time.Duration) error // between attempts at a registry
	debian chan struct{}                              // holds a token while a Debian import runs
	turns  chan struct{}                              // holds a token for each import that has a tree in memory
	large  chan struct{}                              // likewise, for each large one

	uploads *Uploads

	// gc is held shared while layers are made visible and alone while blobs are deleted.
	gc sync.RWMutex

	mu      sync.Mutex
	flights map[string]*flight         // guarded by mu
	young   map[image.Digest]time.Time // guarded by mu; layers that were made lately
}

// New makes a builder.
func New(cfg Config) (*Builder, error) {
	if err := cfg.Validate(); err != nil {
		return nil, err
	}
	b := &Builder{
		store: cfg.Store, dir: cfg.Dir, limits: cfg.Limits.withDefaults(), log: cfg.Log, now: cfg.Now,
		idBase: cfg.IDBase, debian: make(chan struct{}, 1), flights: map[string]*flight{},
		turns: make(chan struct{}, importsAtOnce), large: make(chan struct{}, largeAtOnce),
		young: map[image.Digest]time.Time{}, proxy: cfg.Proxy, pause: pause,
	}
	if b.idBase == 0 {
		b.idBase = DefaultIDBase
	}
	if b.log == nil {
		b.log = slog.New(slog.DiscardHandler)
	}
	if b.now == nil {
		b.now = time.Now
	}
	for _, d := range []string{b.tmp(), filepath.Join(b.dir, "cache")} {
		if err := os.MkdirAll(d, 0o711); err != nil {
			return nil, fmt.Errorf("make %s: %w", d, err)
		}
	}
	b.uploads = newUploads(b)
	return b, nil
}

func (b *Builder) tmp() string { return filepath.Join(b.dir, "tmp") }

// Result is what an import has made.
type Result struct {
	// Name that suits the image, as "debian:bookworm+git,python3"; empty when the source suggests none.
	Name   string
	Layers []image.Layer
	Config image.Config
	// Packages is the identity of the set of packages that a Debian import resolved to.
	Packages string
	// Existed: an equal image was here, and nothing was made.
	Existed bool
	// Notes say what of the source is not in the image.
	Notes []string
}

// Progress is a state of an import. Stages are resolve, download, unpack and write, in that order where they occur.
type Progress struct {
	Stage string
	// Done of Total, in Unit ("bytes", "packages", "entries"); Total is 0 while it is unknown.
	Done, Total int64
	Unit        string
	// Detail is what is at work: a package, an entry. It comes from outside.
	Detail string
	// Finished: the stage is over.
	Finished bool
}

// Report takes progress. Calls for one import never overlap; they come at each change of stage and at least once a
// second.
type Report func(Progress)

// ArchiveOptions are those of Rootfs and OCI.
type ArchiveOptions struct {
	// Name of the archive for messages, as "evil.tar".
	Name string
	// Key names the bytes: imports of one key that run at once are one. Empty: none is joined.
	Key string
	// Size of the archive in bytes, if known, for progress and the check of free space.
	Size int64
	// Reference picks one of several images of an OCI layout.
	Reference string
	Report    Report
}

func (o ArchiveOptions) archive() string {
	if o.Name == "" {
		return "archive"
	}
	return o.Name
}

// Rootfs imports a tar of a root file system, plain or compressed with gzip, zstd, xz or bzip2, as one layer.
func (b *Builder) Rootfs(ctx context.Context, r io.Reader, opts ArchiveOptions) (Result, error) {
	r, done := own(r, opts.Key)
	return b.join(ctx, "rootfs", opts.Key, opts.Report, done, func(ctx context.Context, p *progress) (Result, error) {
		if err := roomFor(b.dir, opts.Size, b.limits.Reserve); err != nil {
			return Result{}, err
		}
		p.stage("unpack", "bytes", opts.Size)
		used, done, err := b.turn(ctx, p)
		if err != nil {
			return Result{}, err
		}
		defer done()
		l, err := b.tarLayer(ctx, r, tarReader{archive: opts.archive(), used: used}, p.add)
		if err != nil {
			return Result{}, err
		}
		p.stage("write", "bytes", 0)
		layers, err := b.commit(ctx, []*layer{l}, "rootfs")
		if err != nil {
			return Result{}, err
		}
		return Result{Layers: layers, Config: defaultConfig(), Notes: used.notes()}, nil
	})
}

// own gives a caller's file a second descriptor, since the import may go on for others when its caller has gone and has
// closed it. What is no file, or what nobody else can join, is left as it is.
func own(r io.Reader, key string) (_ io.Reader, done func()) {
	f, ok := r.(*os.File)
	if !ok || key == "" {
		return r, func() {}
	}
	again, err := os.Open(fmt.Sprintf("/proc/self/fd/%d", f.Fd()))
	if err != nil {
		return r, func() {}
	}
	return again, func() { _ = again.Close() }
}

// defaultConfig is that of a root file system which says nothing itself.
func defaultConfig() image.Config { return image.Config{Env: image.DefaultEnv()} }

// tarLayer reads one possibly compressed tar into a layer, which the caller must commit or abort.
func (b *Builder) tarLayer(ctx context.Context, r io.Reader, t tarReader, on func(int64)) (_ *layer, err error) {
	l, err := newLayer(ctx, b.store)
	if err != nil {
		return nil, err
	}
	defer func() {
		if err != nil {
			err = roomErr(b.dir, errors.Join(err, l.data.Abort()))
		}
	}()
	t.layer, t.limits, t.room = l, b.limits, func() error { return roomFor(b.dir, 0, b.limits.Reserve/2) }
	packed := &meter{alive: aliveIn(ctx), r: r, on: on}
	plain, name, closer, err := decompress(packed)
	if err != nil {
		return nil, t.broken(err)
	}
	defer closer()
	check := func(total int64) error {
		if total > b.limits.unpacked() {
			return t.over("unpacked", gib(b.limits.unpacked()))
		}
		if name != "" && total > ratioFrom && total/max(packed.count(), 1) > b.limits.Ratio {
			return t.over("times its compressed size", fmt.Sprint(b.limits.Ratio))
		}
		return nil
	}
	return l, t.run(ctx, &unpacked{r: plain, check: check})
}

// unpacked counts what a decompressor gives.
type unpacked struct {
	r     io.Reader
	total int64
	check func(int64) error
}

func (u *unpacked) Read(p []byte) (int, error) {
	n, err := u.r.Read(p)
	u.total += int64(n)
	if cerr := u.check(u.total); cerr != nil {
		return n, cerr
	}
	return n, err
}

// commit writes the metadata of all layers and then makes them visible, or none.
func (b *Builder) commit(ctx context.Context, layers []*layer, source string) (_ []image.Layer, err error) {
	var done []*staged
	defer func() {
		if err == nil {
			return
		}
		for _, s := range done {
			err = errors.Join(err, s.abort())
		}
		for _, l := range layers {
			err = errors.Join(err, l.data.Abort())
		}
		err = roomErr(b.dir, err)
	}()
	out := make([]image.Layer, 0, len(layers))
	for _, l := range layers {
		s, err := l.finish(ctx, b.store, source)
		if err != nil {
			return nil, err
		}
		done = append(done, s)
	}
	b.gc.RLock()
	defer b.gc.RUnlock()
	for _, s := range done {
		if err := s.commit(ctx, b.store); err != nil {
			return nil, err
		}
		b.mu.Lock()
		b.young[s.info.Digest] = b.now()
		b.mu.Unlock()
		out = append(out, s.info)
	}
	return out, nil
}

// notes lists what was dropped.
func (u *usage) notes() []string {
	var out []string
	for _, k := range slices.Sorted(maps.Keys(u.dropped)) {
		out = append(out, fmt.Sprintf("extended attribute %s left out (%d times)", k, u.dropped[k]))
		if len(out) == 20 {
			out = append(out, "more left out")
			break
		}
	}
	return out
}

// joinNames lists names for people.
func joinNames(names []string, most int) string {
	if len(names) > most {
		return strings.Join(names[:most], ", ") + fmt.Sprintf(" and %d more", len(names)-most)
	}
	return strings.Join(names, ", ")
}
