package cache

import (
	"container/list"
	"context"
	"crypto/rand"
	"crypto/sha256"
	"encoding/hex"
	"errors"
	"fmt"
	"io/fs"
	"log/slog"
	"net/http"
	"os"
	"path"
	"sync"
	"syscall"
	"time"

	"github.com/sandsea/sandsea/api/errdefs"
)

const (
	// DefaultBytes bounds a cache whose Config does not.
	DefaultBytes = 20 << 30
	// DefaultStale is how long after its freshness an object answers for an upstream that fails.
	DefaultStale = 24 * time.Hour

	negativeFor  = 30 * time.Second // a 404 is believed
	staleHold    = 10 * time.Second // after a failed confirmation before the next is tried
	linger       = 5 * time.Second  // a fetch goes on without callers: a client that reconnects finds it
	touchEvery   = time.Minute      // uses are noted on disk
	maxNegatives = 10_000
)

// Config of a Cache.
type Config struct {
	// Dir is made if it is missing; its parent must be there.
	Dir string
	// UID is who uses the cache after Open, if not the caller: a process that opens it as root and drops to this id. 0:
	// the caller.
	UID int
	// MaxBytes bounds all objects together, those under way included. 0: DefaultBytes.
	MaxBytes int64
	// Offline answers from what is here, whatever its age, and asks no upstream.
	Offline bool
	Log     *slog.Logger
}

// Validate tells what is wrong with a Config.
func (c Config) Validate() error {
	switch {
	case c.Dir == "":
		return errdefs.New(errdefs.Invalid, "cache", "has no directory").WithField("dir", "")
	case c.MaxBytes < 0:
		return errdefs.New(errdefs.Invalid, "cache", "%d bytes is less than nothing", c.MaxBytes).WithField("bytes", "0 or more")
	case c.Log == nil:
		return errdefs.New(errdefs.Invalid, "cache", "has no log")
	}
	return nil
}

// Source tells where an object's bytes came from for the caller who got it.
type Source string

// The sources. Of callers who share a fetch, the first has FromUpstream and the others FromCache: the bytes crossed the
// network once.
const (
	FromCache    Source = "cache"
	FromUpstream Source = "upstream"
)

// Options of one Get.
type Options struct {
	// Fresh is how long the object is used before upstream is asked whether it still holds. 0: for ever, it cannot change.
	Fresh time.Duration
	// Stale is how long after Fresh it still answers for an upstream that fails. 0: DefaultStale.
	Stale time.Duration
	// Digests are all to hold of the bytes.
	Digests []Digest
	// MaxBytes bounds this object. 0: the cache's bound.
	MaxBytes int64
}

// Validators are what upstream is asked by whether an object still holds. Both may be empty.
type Validators struct {
	ETag         string
	LastModified string
}

// Set puts the validators into a request's header.
func (v Validators) Set(h http.Header) {
	if v.ETag != "" {
		h.Set("If-None-Match", v.ETag)
	}
	if v.LastModified != "" {
		h.Set("If-Modified-Since", v.LastModified)
	}
}

// Fetch asks upstream for an object, conditionally if there are validators. Its context lives as long as the fetch, not
// as long as one caller. The cache reads the answer: 200 fills, 304 confirms, all else is a StatusError.
type Fetch func(ctx context.Context, known Validators) (*http.Response, error)

// Stats of a Cache since Open.
type Stats struct {
	Objects       int
	Bytes         int64 // on disk, fetches under way included
	UpstreamBytes int64 // fetched since Open
	Evicted       int64 // objects since Open
}

// Cache is a bounded store of fetched objects. See the package.
type Cache struct {
	cfg    Config
	root   *os.Root
	ctx    context.Context // of all fetches; ended by Close
	cancel context.CancelCauseFunc
	wg     sync.WaitGroup

	mu        sync.Mutex
	closed    bool               // guarded by mu
	entries   map[id]*entry      // guarded by mu
	lru       *list.List         // of *entry, most recent first; guarded by mu
	flights   map[string]*flight // guarded by mu
	negatives map[id]negative    // by what flights have as key; guarded by mu
	stats     Stats              // guarded by mu
}

type id [sha256.Size]byte

// path of an object's file below the root.
func (i id) path() string {
	h := hex.EncodeToString(i[:])
	return path.Join(objectsDir, h[:2], h)
}

const (
	objectsDir = "objects"
	tempDir    = "tmp"
)

// entry is a committed object. Its fields are guarded by the cache's mu.
type entry struct {
	id      id
	size    int64 // of the file
	fetched time.Time
	touched time.Time // as on disk
	retry   time.Time // upstream failed: not asked again before
	at      *list.Element
}

// negative is an answer that there is no such object. It is small whatever the key, which callers may choose the length of.
type negative struct {
	status int
	until  time.Time
}

// errOffline marks what an offline cache does not have.
var errOffline = errors.New("offline")

// errClosed ends fetches when the cache closes.
var errClosed = errdefs.New(errdefs.Unavailable, "package cache", "is closed")

// Open makes or finds the cache in cfg.Dir, sweeps what a crash left, and evicts down to the bound.
func Open(cfg Config) (*Cache, error) {
	if err := cfg.Validate(); err != nil {
		return nil, err
	}
	if cfg.MaxBytes == 0 {
		cfg.MaxBytes = DefaultBytes
	}
	if err := os.Mkdir(cfg.Dir, 0o700); err != nil && !errors.Is(err, fs.ErrExist) {
		return nil, fmt.Errorf("make package cache: %w", err)
	}
	root, err := os.OpenRoot(cfg.Dir)
	if err != nil {
		return nil, fmt.Errorf("open package cache: %w", err)
	}
	c := &Cache{
		cfg: cfg, root: root,
		entries: map[id]*entry{}, lru: list.New(), flights: map[string]*flight{}, negatives: map[id]negative{},
	}
	c.ctx, c.cancel = context.WithCancelCause(context.Background())
	if err := c.load(); err != nil {
		_ = root.Close()
		return nil, fmt.Errorf("open package cache %s: %w", cfg.Dir, err)
	}
	return c, nil
}

// load makes the directories, sweeps temporary files and reads what objects there are.
func (c *Cache) load() error {
	if err := c.root.RemoveAll(tempDir); err != nil {
		return err
	}
	for _, dir := range []string{tempDir, objectsDir} {
		if err := c.root.Mkdir(dir, 0o700); err != nil && !errors.Is(err, fs.ErrExist) {
			return err
		}
	}
	if c.cfg.UID != 0 {
		for _, dir := range []string{".", tempDir, objectsDir} {
			if err := c.root.Chown(dir, c.cfg.UID, c.cfg.UID); err != nil {
				return err
			}
		}
	}
	var found []*entry
	files := c.root.FS()
	shards, err := fs.ReadDir(files, objectsDir)
	if err != nil {
		return err
	}
	for _, shard := range shards {
		dir := path.Join(objectsDir, shard.Name())
		if !shard.IsDir() {
			c.cfg.Log.Warn("package cache drops what is no object of its", "file", dir)
			if err := c.root.Remove(dir); err != nil {
				return err
			}
			continue
		}
		names, err := fs.ReadDir(files, dir)
		if err != nil {
			return err
		}
		for _, n := range names {
			name := path.Join(dir, n.Name())
			e, err := c.loadEntry(name, n)
			if short(err) {
				return err
			}
			if err != nil {
				c.cfg.Log.Warn("package cache drops an object", "file", name, "err", err)
				if err := c.root.RemoveAll(name); err != nil {
					return err
				}
				continue
			}
			found = append(found, e)
		}
	}
	c.mu.Lock()
	sortByUse(found)
	for _, e := range found {
		c.addLocked(e)
	}
	victims := c.evictLocked(0)
	c.mu.Unlock()
	c.remove(victims)
	return nil
}

func (c *Cache) loadEntry(name string, d fs.DirEntry) (*entry, error) {
	raw, err := hex.DecodeString(d.Name())
	if err != nil || len(raw) != sha256.Size {
		return nil, errors.New("not an object's name")
	}
	info, err := d.Info()
	if err != nil {
		return nil, err
	}
	f, err := c.openFile(name)
	if err != nil {
		return nil, err
	}
	defer f.Close()
	if _, err := readMeta(f); err != nil {
		return nil, err
	}
	e := &entry{id: id(raw), size: info.Size(), fetched: info.ModTime(), touched: info.ModTime()}
	if st, ok := info.Sys().(*syscall.Stat_t); ok {
		e.touched = time.Unix(st.Atim.Unix())
	}
	if e.id.path() != name {
		return nil, errors.New("an object in the wrong place")
	}
	return e, nil
}

// Close ends the fetches under way and waits for them. Objects that callers hold stay readable.
func (c *Cache) Close() error {
	c.mu.Lock()
	was := c.closed
	c.closed = true
	c.mu.Unlock()
	if was {
		return nil
	}
	c.cancel(errClosed)
	c.wg.Wait()
	return c.root.Close()
}

// Stats tells the cache's figures.
func (c *Cache) Stats() Stats {
	c.mu.Lock()
	defer c.mu.Unlock()
	s := c.stats
	s.Objects = len(c.entries)
	return s
}

// Get finds the object of key, by fetch where the cache has none that is fresh. The caller closes the Object. It may
// come back while its bytes are still under way.
//
// Errors: a *StatusError when upstream answered something else, a *DigestError when the bytes are wrong (later, from the
// Object, if the bytes were under way), errdefs.Unavailable when upstream is not to be had or the cache is offline,
// errdefs.Exhausted when the object is larger than it may be.
func (c *Cache) Get(ctx context.Context, key string, opts Options, fetch Fetch) (*Object, Source, error) {
	if opts.Stale == 0 {
		opts.Stale = DefaultStale
	}
	kid := id(sha256.Sum256([]byte(key)))
	// Callers who expect other digests of the same key do not share a fetch.
	flightKey := key
	for _, d := range opts.Digests {
		flightKey += "\x00" + d.Algorithm + ":" + d.Hex
	}
	negativeID := id(sha256.Sum256([]byte(flightKey)))
	var tried bool // a hit whose file was not what it should be has been dropped
	for {
		now := time.Now()
		c.mu.Lock()
		if c.closed {
			c.mu.Unlock()
			return nil, "", errClosed
		}
		if e := c.entries[kid]; e != nil && (c.cfg.Offline || opts.Fresh == 0 || now.Sub(e.fetched) < opts.Fresh || now.Before(e.retry)) {
			stale := opts.Fresh != 0 && now.Sub(e.fetched) >= opts.Fresh
			c.mu.Unlock()
			if o, err := c.open(e, opts, stale); err == nil || tried {
				return o, FromCache, err
			}
			tried = true
			continue
		}
		if c.cfg.Offline {
			c.mu.Unlock()
			return nil, "", errdefs.New(errdefs.Unavailable, fmt.Sprintf("%q", key), "is not in the package cache, which is offline").Wrap(errOffline).
				WithHint("Install it once with offline = false in [cache] of aether.toml")
		}
		if n, ok := c.negatives[negativeID]; ok && now.Before(n.until) {
			c.mu.Unlock()
			return nil, FromCache, &StatusError{Key: key, Status: n.status}
		}
		f, source := c.flights[flightKey], FromCache
		if f == nil {
			f, source = c.takeOffLocked(key, flightKey, kid, opts, fetch), FromUpstream
		}
		f.board()
		c.mu.Unlock()

		o, err := f.wait(ctx)
		if o != nil && c.entry(kid) != nil && opts.Fresh > 0 {
			// There is an older one to fall back to, so the new one is taken only when it is whole.
			if _, err = o.Wait(ctx); err != nil {
				_ = o.Close()
				o = nil
			}
		}
		switch {
		case err == nil && o != nil: // a new object
			o.digests = opts.Digests
			return o, source, nil
		case err == nil: // confirmed, or committed before this caller looked
			e := c.entry(kid)
			if e == nil {
				continue // evicted meanwhile
			}
			if !f.filled() {
				source = FromCache
			}
			if o, err := c.open(e, opts, false); err == nil || tried {
				return o, source, err
			}
			tried = true
			continue
		case ctx.Err() != nil:
			return nil, source, err
		}
		if e := c.staleEntry(kid, opts, err); e != nil {
			if o, err := c.open(e, opts, true); err == nil {
				return o, FromCache, nil
			}
		}
		return nil, source, err
	}
}

// entry finds a committed object.
func (c *Cache) entry(k id) *entry {
	c.mu.Lock()
	defer c.mu.Unlock()
	return c.entries[k]
}

// staleEntry finds the object that answers for an upstream which failed with err: nil where none may.
func (c *Cache) staleEntry(k id, opts Options, err error) *entry {
	if isGone(err) {
		return nil
	}
	c.mu.Lock()
	defer c.mu.Unlock()
	e := c.entries[k]
	if e == nil || time.Since(e.fetched) >= opts.Fresh+opts.Stale {
		return nil
	}
	e.retry = time.Now().Add(staleHold)
	c.cfg.Log.Warn("package list is stale: upstream fails", "age", time.Since(e.fetched).Round(time.Second).String(), "err", err)
	return e
}

// short tells of an error that says nothing about a file: this process, or the machine, has no more of what it takes to
// look at one.
func short(err error) bool {
	return errors.Is(err, syscall.EMFILE) || errors.Is(err, syscall.ENFILE) || errors.Is(err, syscall.ENOMEM)
}

// open makes an Object of a committed entry. An entry whose file is gone, broken, or has not the digests that opts
// expect is dropped, and an error returned.
func (c *Cache) open(e *entry, opts Options, stale bool) (*Object, error) {
	name := e.id.path()
	f, err := c.openFile(name)
	var m Meta
	if err == nil {
		m, err = readMeta(f)
	}
	if err == nil {
		err = m.verify(f, opts.Digests)
	}
	if err != nil {
		if f != nil {
			_ = f.Close()
		}
		if short(err) {
			return nil, errdefs.New(errdefs.Exhausted, "package cache", "cannot look at an object: %v", err).Wrap(err)
		}
		c.drop(e)
		return nil, fmt.Errorf("package cache: object of %q: %w", m.Key, err)
	}
	now := time.Now()
	c.mu.Lock()
	m.Fetched = e.fetched
	touch := now.Sub(e.touched) > touchEvery
	if c.entries[e.id] == e {
		c.lru.MoveToFront(e.at)
		if touch {
			e.touched = now
		}
	}
	c.mu.Unlock()
	if touch {
		// Best effort: the object may be evicted at this moment, and its time of use is only a hint for the next Open.
		_ = c.root.Chtimes(name, now, m.Fetched)
	}
	return &Object{meta: m, stale: stale, file: newShared(f), digests: opts.Digests}, nil
}

// drop forgets an entry and removes its file.
func (c *Cache) drop(e *entry) {
	c.mu.Lock()
	there := c.entries[e.id] == e
	if there {
		c.forgetLocked(e)
	}
	c.mu.Unlock()
	if there {
		c.remove([]id{e.id})
	}
}

func (c *Cache) addLocked(e *entry) {
	if old := c.entries[e.id]; old != nil {
		c.forgetLocked(old)
	}
	e.at = c.lru.PushFront(e)
	c.entries[e.id] = e
	c.stats.Bytes += e.size
}

func (c *Cache) forgetLocked(e *entry) {
	c.lru.Remove(e.at)
	delete(c.entries, e.id)
	c.stats.Bytes -= e.size
}

// evictLocked forgets the objects used longest ago until n more bytes fit, and returns whose files are to be removed.
func (c *Cache) evictLocked(n int64) []id {
	var victims []id
	for c.stats.Bytes+n > c.cfg.MaxBytes && c.lru.Len() > 0 {
		e := c.lru.Back().Value.(*entry)
		c.forgetLocked(e)
		c.stats.Evicted++
		victims = append(victims, e.id)
	}
	return victims
}

// remove removes files of forgotten objects, unless the object came back.
func (c *Cache) remove(victims []id) {
	for _, v := range victims {
		c.mu.Lock()
		back := c.entries[v] != nil
		c.mu.Unlock()
		if back {
			continue
		}
		if err := c.root.Remove(v.path()); err != nil && !errors.Is(err, fs.ErrNotExist) {
			c.cfg.Log.Error("package cache cannot remove an object", "file", v.path(), "err", err)
		}
	}
}

// reserve takes n bytes of the bound for a fetch under way, evicting as needed.
func (c *Cache) reserve(n int64) error {
	c.mu.Lock()
	victims := c.evictLocked(n)
	full := c.stats.Bytes+n > c.cfg.MaxBytes
	if !full {
		c.stats.Bytes += n
		c.stats.UpstreamBytes += n
	}
	c.mu.Unlock()
	c.remove(victims)
	if full {
		return errdefs.New(errdefs.Exhausted, "package cache", "fetches under way fill all of its %d bytes", c.cfg.MaxBytes).
			WithHint("Raise bytes in [cache] of aether.toml")
	}
	return nil
}

// release gives reserved bytes back.
func (c *Cache) release(n int64) {
	c.mu.Lock()
	c.stats.Bytes -= n
	c.mu.Unlock()
}

// openFile opens an object's file. Its atime stays as it is: it says when a caller last used the object.
func (c *Cache) openFile(name string) (*os.File, error) {
	return c.root.OpenFile(name, os.O_RDONLY|syscall.O_NOATIME, 0)
}

// temp makes a new temporary file.
func (c *Cache) temp() (*os.File, string, error) {
	name := path.Join(tempDir, rand.Text())
	f, err := c.root.OpenFile(name, os.O_CREATE|os.O_EXCL|os.O_RDWR|syscall.O_NOATIME, 0o600)
	if err != nil {
		return nil, "", fmt.Errorf("package cache: make a file: %w", err)
	}
	return f, name, nil
}
