package cache

import (
	"cmp"
	"context"
	"crypto/sha256"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"net/http"
	"os"
	"path"
	"slices"
	"sync"
	"time"

	"github.com/sandsea/sandsea/api/errdefs"
)

// StatusError says that upstream answered, but not with the object.
type StatusError struct {
	Key    string
	Status int // HTTP
}

// Error names the object and the answer.
func (e *StatusError) Error() string {
	return fmt.Sprintf("%q: upstream answered %d %s", e.Key, e.Status, http.StatusText(e.Status))
}

// Unwrap makes a StatusError an errdefs.NotFound if upstream knows no such object, else an errdefs.Unavailable.
func (e *StatusError) Unwrap() error {
	if isGone(e) {
		return errdefs.NotFound
	}
	return errdefs.Unavailable
}

// isGone tells whether upstream said that there is no such object. A mirror on an object store says 403 for that, but
// so does one that wants credentials: it is a failure.
func isGone(err error) bool {
	e, ok := errors.AsType[*StatusError](err)
	return ok && (e.Status == http.StatusNotFound || e.Status == http.StatusGone || e.Status == http.StatusUnavailableForLegalReasons)
}

// IsAbsent tells whether an error of Get says that there is no such object, so that another upstream may be asked for it:
// upstream has none, or the cache is offline and has none. Of an upstream that was never asked, nobody learns anything.
func IsAbsent(err error) bool {
	return errors.Is(err, errdefs.NotFound) || errors.Is(err, errOffline)
}

// flight is one fetch and all who wait for it or read from it while it lasts.
type flight struct {
	cache  *Cache
	key    string // in the cache's flights
	cancel context.CancelCauseFunc
	// started is closed when the answer's header is judged: file, meta and err may be read then.
	started chan struct{}

	mu       sync.Mutex
	callers  int         // waiting or reading; guarded by mu
	stop     *time.Timer // ends a flight without callers; guarded by mu
	meta     Meta        // guarded by mu
	file     *shared     // nil: confirmed, or failed at once; guarded by mu
	written  int64       // guarded by mu
	finished bool        // no byte will come any more; guarded by mu
	err      error       // of a finished flight; guarded by mu
	// progress is closed when written or finished changes, and replaced; nil while nobody waits. Guarded by mu.
	progress chan struct{}
}

// takeOffLocked starts a fetch. It has no callers yet: the caller boards before it unlocks.
func (c *Cache) takeOffLocked(key, flightKey string, k id, opts Options, fetch Fetch) *flight {
	ctx, cancel := context.WithCancelCause(c.ctx)
	f := &flight{cache: c, key: flightKey, cancel: cancel, started: make(chan struct{})}
	c.flights[flightKey] = f
	c.wg.Go(func() {
		defer cancel(nil)
		err := c.fly(ctx, f, key, k, opts, fetch)
		c.mu.Lock()
		if c.flights[flightKey] == f {
			delete(c.flights, flightKey)
		}
		var gone *entry
		if e, ok := errors.AsType[*StatusError](err); ok && isGone(e) {
			if len(c.negatives) >= maxNegatives {
				clear(c.negatives)
			}
			c.negatives[sha256.Sum256([]byte(flightKey))] = negative{e.Status, time.Now().Add(negativeFor)}
			if gone = c.entries[k]; gone != nil {
				c.forgetLocked(gone)
			}
		}
		c.mu.Unlock()
		if gone != nil {
			c.remove([]id{k})
		}
		f.finish(err)
		f.drop()
	})
	return f
}

// fly fetches, and fills a new object or confirms the one that is there.
func (c *Cache) fly(ctx context.Context, f *flight, key string, k id, opts Options, fetch Fetch) error {
	var known Validators
	if e := c.entry(k); e != nil && opts.Fresh > 0 {
		if old, err := c.openFile(k.path()); err == nil {
			if m, err := readMeta(old); err == nil {
				known = Validators{ETag: m.ETag, LastModified: m.LastModified}
			}
			_ = old.Close()
		}
	}
	resp, err := fetch(ctx, known)
	if err != nil {
		return c.upstreamErr(ctx, key, err)
	}
	defer resp.Body.Close()
	switch {
	case resp.StatusCode == http.StatusNotModified && known != Validators{}:
		c.confirm(k)
		return nil
	case resp.StatusCode != http.StatusOK:
		return &StatusError{Key: key, Status: resp.StatusCode}
	}
	sums, err := newSums(opts.Digests)
	if err != nil {
		return err
	}
	limit := min(cmp.Or(opts.MaxBytes, c.cfg.MaxBytes), c.cfg.MaxBytes)
	tooLarge := func(n string) error {
		return errdefs.New(errdefs.Exhausted, fmt.Sprintf("%q", key), "is %s bytes, at most %d are taken", n, limit).
			WithHint("Raise bytes in [cache] of aether.toml if it is too small for one object")
	}
	if resp.ContentLength > limit {
		return tooLarge(fmt.Sprint(resp.ContentLength))
	}
	file, name, err := c.temp()
	if err != nil {
		return err
	}
	meta := Meta{
		Key: key, ContentType: resp.Header.Get("Content-Type"), ETag: resp.Header.Get("ETag"),
		LastModified: resp.Header.Get("Last-Modified"), Size: resp.ContentLength, Fetched: time.Now(),
	}
	if resp.Request != nil && resp.Request.URL != nil {
		u := *resp.Request.URL
		u.User = nil
		meta.URL = u.String()
	}
	f.start(meta, newShared(file))
	var reserved int64
	committed := false
	defer func() {
		if !committed {
			_ = c.root.Remove(name)
			c.release(reserved)
		}
	}()
	buf := make([]byte, 128<<10)
	var size int64
	for {
		n, rerr := resp.Body.Read(buf)
		if n > 0 {
			if size += int64(n); size > limit {
				return tooLarge("more than " + fmt.Sprint(limit))
			}
			if err := c.reserve(int64(n)); err != nil {
				return err
			}
			reserved += int64(n)
			if _, err := file.Write(buf[:n]); err != nil {
				return fmt.Errorf("package cache: keep %q: %w", key, err)
			}
			_, _ = sums.Write(buf[:n])
			f.advance(size)
		}
		if errors.Is(rerr, io.EOF) {
			break
		}
		if rerr != nil {
			return c.upstreamErr(ctx, key, rerr)
		}
	}
	if meta.Size >= 0 && size != meta.Size {
		return c.upstreamErr(ctx, key, fmt.Errorf("%d of %d bytes came: %w", size, meta.Size, io.ErrUnexpectedEOF))
	}
	meta.Size, meta.Digests = size, sums.hex()
	if err := check(key, meta.Digests, opts.Digests); err != nil {
		return err
	}
	// The bytes are right, so readers need not wait for the disk.
	f.land(meta)
	if err := c.commit(file, name, k, meta); err != nil {
		c.cfg.Log.Error("package cache cannot keep an object", "key", key, "err", err)
		return nil
	}
	committed = true
	return nil
}

// commit moves a whole temporary file into place. Its entry counts instead of the bytes that were reserved for it.
func (c *Cache) commit(file *os.File, name string, k id, m Meta) error {
	tail, err := m.trailer()
	if err != nil {
		return err
	}
	if _, err := file.Write(tail); err != nil {
		return err
	}
	if err := file.Sync(); err != nil {
		return err
	}
	now := time.Now()
	if err := c.root.Chtimes(name, now, m.Fetched); err != nil {
		return err
	}
	if err := c.root.Mkdir(path.Dir(k.path()), 0o700); err != nil && !errors.Is(err, fs.ErrExist) {
		return err
	}
	if err := c.root.Rename(name, k.path()); err != nil {
		return err
	}
	c.mu.Lock()
	c.stats.Bytes -= m.Size
	c.addLocked(&entry{id: k, size: m.Size + int64(len(tail)), fetched: m.Fetched, touched: now})
	victims := c.evictLocked(0)
	c.mu.Unlock()
	c.remove(victims)
	return nil
}

// confirm notes that upstream still has the object.
func (c *Cache) confirm(k id) {
	now := time.Now()
	c.mu.Lock()
	e := c.entries[k]
	if e != nil {
		e.fetched, e.touched, e.retry = now, now, time.Time{}
	}
	c.mu.Unlock()
	if e != nil {
		// Best effort: if it is lost, the next Open asks upstream sooner.
		_ = c.root.Chtimes(k.path(), now, now)
	}
}

// upstreamErr gives a failed fetch its kind, or the reason for which it was ended.
func (c *Cache) upstreamErr(ctx context.Context, key string, err error) error {
	if cause := context.Cause(ctx); cause != nil {
		err = cause
	}
	if k := errdefs.KindOf(err); k != errdefs.Internal && k != errdefs.Unknown {
		return fmt.Errorf("fetch %q: %w", key, err)
	}
	return errdefs.New(errdefs.Unavailable, fmt.Sprintf("%q", key), "cannot be fetched: %v", err).Wrap(err)
}

// board adds a caller.
func (f *flight) board() {
	f.mu.Lock()
	defer f.mu.Unlock()
	f.callers++
	if f.stop != nil {
		f.stop.Stop()
		f.stop = nil
	}
}

// leave takes a caller away. The last one starts the clock.
func (f *flight) leave() {
	f.mu.Lock()
	defer f.mu.Unlock()
	if f.callers--; f.callers == 0 && !f.finished {
		f.stop = time.AfterFunc(linger, f.abandon)
	}
}

// errNoCallers ends a fetch that nobody waits for.
var errNoCallers = errdefs.New(errdefs.Canceled, "fetch", "has no callers any more")

// abandon ends a flight that has had no callers for a while, so that nobody boards it any more.
func (f *flight) abandon() {
	f.cache.mu.Lock()
	defer f.cache.mu.Unlock()
	f.mu.Lock()
	defer f.mu.Unlock()
	if f.callers > 0 || f.finished {
		return
	}
	if f.cache.flights[f.key] == f {
		delete(f.cache.flights, f.key)
	}
	f.cancel(errNoCallers)
}

// wait for the answer's header: an Object that the caller closes, nil for a confirmed one, or an error.
func (f *flight) wait(ctx context.Context) (*Object, error) {
	select {
	case <-f.started:
	case <-ctx.Done():
		f.leave()
		return nil, context.Cause(ctx)
	}
	f.mu.Lock()
	file, meta, err := f.file, f.meta, f.err
	if file != nil && (!f.finished || err == nil) && file.acquire() {
		f.mu.Unlock()
		return &Object{meta: meta, file: file, flight: f}, nil
	}
	f.mu.Unlock()
	f.leave()
	return nil, err
}

// filled tells whether bytes came.
func (f *flight) filled() bool {
	f.mu.Lock()
	defer f.mu.Unlock()
	return f.file != nil
}

// start lets readers in.
func (f *flight) start(m Meta, file *shared) {
	f.mu.Lock()
	f.meta, f.file = m, file
	f.mu.Unlock()
	close(f.started)
}

func (f *flight) advance(written int64) {
	f.mu.Lock()
	defer f.mu.Unlock()
	f.written = written
	f.tellLocked()
}

// land marks the bytes as whole and right.
func (f *flight) land(m Meta) {
	f.mu.Lock()
	defer f.mu.Unlock()
	f.meta, f.written, f.finished = m, m.Size, true
	f.tellLocked()
}

// finish ends a flight that has not landed.
func (f *flight) finish(err error) {
	f.mu.Lock()
	if !f.finished {
		f.finished, f.err = true, err
	}
	f.tellLocked()
	started := f.file != nil
	f.mu.Unlock()
	if !started {
		close(f.started)
	}
}

// drop gives up the flight's own hold of the file.
func (f *flight) drop() {
	f.mu.Lock()
	file := f.file
	f.mu.Unlock()
	if file != nil {
		file.release()
	}
}

func (f *flight) tellLocked() {
	if f.progress != nil {
		close(f.progress)
		f.progress = nil
	}
}

// await blocks until bytes behind off are there, or none will come: then it returns the number of bytes there are and
// io.EOF, or the error of the flight. idle, which may be nil, is called before blocking.
func (f *flight) await(ctx context.Context, off int64, idle func()) (int64, error) {
	for {
		f.mu.Lock()
		written, finished, err := f.written, f.finished, f.err
		if finished && err != nil {
			f.mu.Unlock()
			return 0, err
		}
		if written > off || finished {
			f.mu.Unlock()
			if written <= off {
				return written, io.EOF
			}
			return written, nil
		}
		if f.progress == nil {
			f.progress = make(chan struct{})
		}
		progress := f.progress
		f.mu.Unlock()
		if idle != nil {
			idle()
		}
		select {
		case <-progress:
		case <-ctx.Done():
			return 0, context.Cause(ctx)
		}
	}
}

// settle waits for the end of the flight and returns what became of it.
func (f *flight) settle(ctx context.Context) (Meta, error) {
	for {
		f.mu.Lock()
		finished, meta, err := f.finished, f.meta, f.err
		if !finished && f.progress == nil {
			f.progress = make(chan struct{})
		}
		progress := f.progress
		f.mu.Unlock()
		if finished {
			return meta, err
		}
		select {
		case <-progress:
		case <-ctx.Done():
			return Meta{}, context.Cause(ctx)
		}
	}
}

// shared is a file with several holders; the last one closes it.
type shared struct {
	*os.File
	mu   sync.Mutex
	held int // guarded by mu; 0: closed
}

func newShared(f *os.File) *shared { return &shared{File: f, held: 1} }

func (s *shared) acquire() bool {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.held == 0 {
		return false
	}
	s.held++
	return true
}

func (s *shared) release() {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.held--; s.held == 0 {
		_ = s.Close() // all that matters was synced at commit
	}
}

// sortByUse puts the entry used longest ago first.
func sortByUse(es []*entry) {
	slices.SortFunc(es, func(a, b *entry) int { return a.touched.Compare(b.touched) })
}
