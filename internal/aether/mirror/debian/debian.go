// Package debian serves Debian archives as they are: below the host and path of each archive's own address, so that
// apt's sources need no change.
//
// An archive is signed, so nothing can be left out of its lists. What a world shows is decided per suite and per file:
//
// A suite exists for a caller if the Date of its Release file is not after the world's date; a suite without a Date has
// to be pinned, as "debian:<suite>@<version>". Where the operator names an archive's history, an address with "{date}",
// the archive is read as of the world's date from there. Release files that have expired by that date are refused here,
// since apt inside would compare them with today (guest).
//
// A file of a pool exists if its package, by binary and by source name, and its version are not denied; with a date in
// force, if an index of a suite that was no later lists it, or if it is pinned. Which suites there are is known once any
// sandbox has run apt-get update through this Service.
//
// Files are checked against the hash in their by-hash name, in the Release file or in the indexes that were seen.
package debian

import (
	"context"
	"encoding/hex"
	"errors"
	"io"
	"log/slog"
	"net/http"
	"net/url"
	"path"
	"runtime"
	"slices"
	"strings"
	"sync"
	"time"

	"github.com/sandsea/sandsea/api/errdefs"
	"github.com/sandsea/sandsea/internal/aether/cache"
	"github.com/sandsea/sandsea/internal/aether/mirror"
	"github.com/sandsea/sandsea/internal/aether/mirror/source"
	"github.com/sandsea/sandsea/internal/aether/upstream"
	"github.com/sandsea/sandsea/internal/policy"
)

const (
	maxFile = 8 << 30

	freshRelease = time.Minute
	freshFile    = 5 * time.Minute // of what no Release file lists

	memory = 64 << 20 // of Release files that are kept parsed

	learnLimit = 30 * time.Second // for which a pool's file waits for indexes that are being read
)

// Service is the archives. It is safe for concurrent use. Close it.
type Service struct {
	src      source.Source
	log      *slog.Logger
	archives []archive
	releases *cache.Memo[*release]
	listed   *table
	seen     seen
	learning learning
}

// archive is one of the upstream's.
type archive struct {
	// names are the addresses under which it is known, host and path without a slash at the end: its own is the first.
	names []string
	url   string // without a slash at the end
	// history is its address with "{date}", "" if the operator names none.
	history string
}

const datePlace = "{date}"

// New makes the service of an upstream. Files of the upstream are further addresses of the archive whose path ends in the
// same folder: with "{date}" behind it the archive's history, else an address that images have in their sources.
func New(src source.Source, u upstream.Upstream, log *slog.Logger) *Service {
	s := &Service{
		src: src, log: log, releases: cache.NewMemo[*release](memory),
		seen:     seen{suites: map[string][]string{}},
		learning: learning{known: map[string]bool{}, slots: make(chan struct{}, 1)},
	}
	s.listed = newTable(maxListed, s.learning.forget)
	s.learning.ctx, s.learning.stop = context.WithCancelCause(context.Background())
	for _, raw := range u.URLs {
		if name, folder := address(raw); name != "" && folder != "" {
			s.archives = append(s.archives, archive{names: []string{name}, url: raw})
		}
	}
	for _, raw := range u.Files {
		raw = strings.ReplaceAll(raw, url.PathEscape(datePlace), datePlace)
		name, folder := address(strings.TrimSuffix(raw, "/"+datePlace))
		for i := range s.archives {
			a := &s.archives[i]
			if _, own := address(a.url); own != folder {
				continue
			}
			if strings.HasSuffix(raw, "/"+datePlace) {
				a.history = raw
			} else {
				a.names = append(a.names, name)
			}
		}
	}
	return s
}

// address is the host and path of a URL, and the last folder of it.
func address(raw string) (name, folder string) {
	u, err := url.Parse(raw)
	if err != nil || u.Hostname() == "" {
		return "", ""
	}
	name = strings.ToLower(u.Hostname()) + strings.TrimRight(u.Path, "/")
	return name, path.Base(name)
}

// Close ends the reading of indexes.
func (s *Service) Close() error {
	s.learning.close()
	return nil
}

// Name implements mirror.Service.
func (s *Service) Name() string { return policy.Debian }

// Hosts implements mirror.Service.
func (s *Service) Hosts() []string {
	var hosts []string
	for _, a := range s.archives {
		for _, n := range a.names {
			host, _, _ := strings.Cut(n, "/")
			if !slices.Contains(hosts, host) {
				hosts = append(hosts, host)
			}
		}
	}
	return hosts
}

// Match implements mirror.Service.
func (s *Service) Match(_, host, path string) (string, bool) {
	p := "/" + strings.ToLower(host) + path
	_, _, ok := s.find(p)
	return p, ok
}

// find tells which archive a path of this service lies in, and the rest of the path.
func (s *Service) find(p string) (*archive, string, bool) {
	for i := range s.archives {
		a := &s.archives[i]
		for _, n := range a.names {
			if rest, ok := strings.CutPrefix(p, "/"+n+"/"); ok {
				return a, rest, true
			}
		}
	}
	return nil, "", false
}

// base is where the archive is read for a world.
func (a *archive) base(w policy.World) string {
	if a.history == "" || w.AsOf.IsZero() {
		return a.url
	}
	return strings.ReplaceAll(a.history, datePlace, w.AsOf.UTC().Format("20060102T150405Z"))
}

// ServeHTTP implements mirror.Service.
func (s *Service) ServeHTTP(w http.ResponseWriter, r *http.Request) {
	if mirror.ReadOnly(w, r) {
		return
	}
	c := mirror.CallerOf(r.Context())
	a, rest, ok := s.find(r.URL.Path)
	switch {
	case ok && path.Clean(rest) == rest && (isPackageFile(rest) || strings.HasPrefix(rest, "pool/")):
		s.servePool(w, r, c, a, rest)
	case ok && path.Clean(rest) == rest && strings.HasPrefix(rest, "dists/"):
		s.serveSuite(w, r, c, a, rest)
	default:
		mirror.Fail(w, c, mirror.Artefact{Kind: "file", Name: r.URL.Path},
			errdefs.New(errdefs.NotFound, "request", "is for no file of an archive's suites or pool"))
	}
}

// suite is one that was found, with its Release file.
type suite struct {
	archive *archive
	base    string // of the archive for the world
	dir     string // "dists/bookworm"
	// confirmed is when upstream last had the Release file. An offline cache's does not grow old: it is all there is.
	confirmed time.Time
	*release
}

// name of the suite for policies: "bookworm-updates".
func (s suite) name() string {
	return strings.ReplaceAll(strings.TrimPrefix(s.dir, "dists/"), "/", "-")
}

// judge asks the world about the suite in its present state.
func (s suite) judge(w policy.World) policy.Verdict {
	version := s.Version
	if version == "" {
		version = s.Date.Format(time.DateOnly)
	}
	return w.Version(policy.Debian, s.name(), version, s.Date)
}

// expired tells whether the Release file holds no longer, at the world's date.
func (s suite) expired(w policy.World) bool {
	at := s.confirmed
	if !w.AsOf.IsZero() && w.AsOf.Before(at) {
		at = w.AsOf
	}
	return !s.ValidUntil.IsZero() && at.After(s.ValidUntil)
}

// findSuite finds the suite that a path below dists/ lies in: names of suites may have one slash.
func (s *Service) findSuite(ctx context.Context, w policy.World, a *archive, rest string) (suite, error) {
	parts := strings.Split(rest, "/")
	base := a.base(w)
	err := error(errdefs.New(errdefs.NotFound, rest, "lies in no suite of the archive"))
	for n := 2; n <= 3 && n < len(parts); n++ {
		dir := strings.Join(parts[:n], "/")
		for _, name := range []string{"InRelease", "Release"} {
			var rel *release
			var confirmed time.Time
			rel, confirmed, err = s.release(ctx, base, dir+"/"+name)
			if err == nil {
				return suite{archive: a, base: base, dir: dir, confirmed: confirmed, release: rel}, nil
			}
			if !cache.IsAbsent(err) {
				return suite{}, err
			}
		}
	}
	return suite{}, err
}

// release reads a Release file, and tells when upstream last had it.
func (s *Service) release(ctx context.Context, base, file string) (*release, time.Time, error) {
	o, _, err := s.src.Open(ctx, fileURL(base, file), cache.Options{Fresh: freshRelease, MaxBytes: maxRelease})
	if err != nil {
		return nil, time.Time{}, err
	}
	defer func() { _ = o.Close() }()
	rel, err := s.releases.Of(ctx, o, func(b []byte, _ cache.Meta) (*release, error) {
		rel, err := parseRelease(b)
		if err != nil {
			return nil, errdefs.New(errdefs.DataLoss, file, "%v", err).WithHint("Upstream's archive is wrong; try again later")
		}
		return rel, nil
	})
	return rel, o.Meta().Fetched, err
}

// fileURL is the address of a file of an archive, whose name is not escaped.
func fileURL(base, file string) string { return base + (&url.URL{Path: "/" + file}).EscapedPath() }

// serveSuite answers with a file below dists/.
func (s *Service) serveSuite(w http.ResponseWriter, r *http.Request, c *mirror.Caller, a *archive, rest string) {
	ctx := r.Context()
	art := mirror.Artefact{Kind: "list", Name: strings.TrimPrefix(rest, "dists/")}
	su, err := s.findSuite(ctx, c.World, a, rest)
	if err != nil {
		mirror.Fail(w, c, art, err)
		return
	}
	art.Version = su.Version
	if v := su.judge(c.World); !v.Allow {
		mirror.Deny(w, c, art, v)
		return
	}
	if su.expired(c.World) {
		mirror.Fail(w, c, art, errdefs.New(errdefs.DataLoss, "suite "+su.name(), "has a Release file that was valid until %s",
			su.ValidUntil.Format(time.RFC3339)).WithHint("The upstream archive is out of date; tell its operator"))
		return
	}
	s.seen.add(a, su.dir)
	file := strings.TrimPrefix(rest, su.dir+"/")
	opts, index := su.options(file)
	if opts.Fresh == freshFile && !c.World.AsOf.IsZero() && !strings.Contains(file, ".diff/") {
		mirror.Fail(w, c, art, errdefs.New(errdefs.NotFound, file, "is listed by no Release file, so nobody says of which date it is"))
		return
	}
	o, from, err := s.src.Open(ctx, fileURL(su.base, rest), opts)
	if err != nil {
		mirror.Fail(w, c, art, err)
		return
	}
	defer func() { _ = o.Close() }()
	if index != "" {
		s.learn(su, index)
	}
	mirror.SendObject(w, r, c, art, o, from)
}

// byHash are the folders of files by their hashes.
var byHash = map[string]string{"MD5Sum": "md5", "SHA1": "sha1", "SHA256": "sha256", "SHA512": "sha512"}

// options are how a file of the suite is fetched: what its hash has to be, if that is known, and which index it is.
func (s suite) options(file string) (opts cache.Options, index string) {
	opts.MaxBytes = maxFile
	dir, name := path.Split(file)
	if algorithm, ok := byHash[path.Base(dir)]; ok && path.Base(path.Dir(path.Clean(dir))) == "by-hash" {
		d := cache.Digest{Algorithm: algorithm, Hex: strings.ToLower(name)}
		if d.Validate() == nil {
			opts.Digests = []cache.Digest{d}
			for _, known := range s.bySum[d.Hex] {
				if indexKind(known) != "" {
					index = known
				}
			}
			return opts, index
		}
	}
	if f, ok := s.Files[file]; ok {
		opts.Digests = []cache.Digest{cache.SHA256(f.SHA256)}
		if indexKind(file) != "" {
			index = file
		}
		return opts, index
	}
	opts.Fresh = freshFile
	switch file {
	case "InRelease", "Release", "Release.gpg":
		opts.Fresh = freshRelease
		opts.MaxBytes = maxRelease
	}
	return opts, ""
}

// servePool answers with a package.
func (s *Service) servePool(w http.ResponseWriter, r *http.Request, c *mirror.Caller, a *archive, rest string) {
	ctx := r.Context()
	f, err := parsePool(rest)
	art := mirror.Artefact{Kind: "file", Name: f.Name, Version: f.Version}
	if err != nil {
		art.Name = rest
		mirror.Fail(w, c, art, errdefs.New(errdefs.NotFound, "request", "%v", err))
		return
	}
	// Denials need no byte of upstream's, not even an index's.
	open := c.World
	open.AsOf = time.Time{}
	if v := f.judge(open, time.Time{}); !v.Allow {
		mirror.Deny(w, c, art, v)
		return
	}
	known, ok := s.listed.find(a.url, rest)
	if !ok && !c.World.AsOf.IsZero() {
		s.learnFor(ctx, c.World, a, f)
		s.learning.wait(ctx, learnLimit)
		known, ok = s.listed.find(a.url, rest)
	}
	if v := f.judge(c.World, known.since); !v.Allow {
		if known.since.IsZero() {
			v.Reason += "; or run apt-get update, if one of its suites is old enough"
		}
		mirror.Deny(w, c, art, v)
		return
	}
	opts := cache.Options{MaxBytes: maxFile}
	if ok {
		opts.Digests = []cache.Digest{cache.SHA256(hex.EncodeToString(known.sha256[:]))}
	}
	// A pool's file never changes, so all dates share what the archive still has.
	bases := slices.Compact([]string{a.url, a.base(c.World)})
	o, from, _, err := s.src.OpenFirst(ctx, bases, fileURL("", rest), opts)
	if err != nil {
		mirror.Fail(w, c, art, err)
		return
	}
	defer func() { _ = o.Close() }()
	mirror.SendObject(w, r, c, art, o, from)
}

// judge asks the world about the file's package, and about its source.
func (f poolFile) judge(w policy.World, since time.Time) policy.Verdict {
	src := w
	src.AsOf = time.Time{} // the file has one date
	if f.Source != "" {
		if v := src.Version(policy.Debian, "src:"+f.Source, f.sourceVersion(), since); !v.Allow {
			return v
		}
	}
	if f.Arch == archSource {
		if v := src.Version(policy.Debian, "src:"+f.Name, f.Version, since); !v.Allow {
			return v
		}
	}
	return w.Version(policy.Debian, f.Name, f.Version, since)
}

// seen remembers the suites that were asked for, by archive.
type seen struct {
	mu     sync.Mutex
	suites map[string][]string // folders; guarded by mu
}

const maxSuites = 64 // of one archive

func (s *seen) add(a *archive, dir string) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if dirs := s.suites[a.url]; len(dirs) < maxSuites && !slices.Contains(dirs, dir) {
		s.suites[a.url] = append(dirs, dir)
	}
}

func (s *seen) of(a *archive) []string {
	s.mu.Lock()
	defer s.mu.Unlock()
	return slices.Clone(s.suites[a.url])
}

// learnFor begins to read the indexes of the suites seen that may list a file. Clients whose own copies are still right
// ask for no index, so one may be unknown here although they have it.
func (s *Service) learnFor(ctx context.Context, w policy.World, a *archive, f poolFile) {
	tails := []string{"/binary-" + f.Arch + "/Packages"}
	switch f.Arch {
	case archSource:
		tails = []string{"/source/Sources"}
	case "all":
		// Packages for every architecture may be in the index of each only.
		tails = append(tails, "/binary-"+runtime.GOARCH+"/Packages")
	}
	for _, dir := range s.seen.of(a) {
		su, err := s.findSuite(ctx, w, a, dir+"/InRelease")
		if err != nil || !su.judge(w).Allow {
			continue
		}
		for _, name := range su.indexes(f.Component, tails) {
			s.learn(su, name)
		}
	}
}

// indexes are those of a component with such ends, without the ending of how they are packed. Not every archive puts the
// component into the place of a file: where the suite has no such component, they are those of all of them.
func (s suite) indexes(component string, tails []string) []string {
	var own, all []string
	for file := range s.Files {
		name := unpacked(file)
		for _, tail := range tails {
			if c, ok := strings.CutSuffix(name, tail); ok {
				all = append(all, name)
				if c == component {
					own = append(own, name)
				}
			}
		}
	}
	if len(own) == 0 {
		own = all
	}
	slices.Sort(own)
	return slices.Compact(own)
}

// learning is the reading of indexes, beside the answers.
type learning struct {
	ctx   context.Context // of all reading; ended by close
	stop  context.CancelCauseFunc
	slots chan struct{} // one index at a time

	mu     sync.Mutex
	known  map[string]bool // indexes read or being read, by archive and hash; guarded by mu
	closed bool            // guarded by mu
	busy   int             // guarded by mu
	idle   chan struct{}   // closed when busy falls to 0; guarded by mu
	wg     sync.WaitGroup
}

const maxKnown = 10_000

// errClosed ends the reading of indexes.
var errClosed = errdefs.New(errdefs.Unavailable, "debian mirror", "is closed")

// start begins a task unless one of that key was begun before.
func (l *learning) start(key string, task func(ctx context.Context) error) {
	l.mu.Lock()
	defer l.mu.Unlock()
	if l.closed || l.known[key] {
		return
	}
	if len(l.known) >= maxKnown {
		clear(l.known)
	}
	l.known[key] = true
	if l.busy++; l.busy == 1 {
		l.idle = make(chan struct{})
	}
	l.wg.Go(func() {
		var err error
		select {
		case l.slots <- struct{}{}:
			err = task(l.ctx)
			<-l.slots
		case <-l.ctx.Done():
			err = context.Cause(l.ctx)
		}
		l.mu.Lock()
		defer l.mu.Unlock()
		if err != nil {
			delete(l.known, key) // tried again with the next answer
		}
		if l.busy--; l.busy == 0 {
			close(l.idle)
		}
	})
}

// forget that indexes were read: what they told is gone. One that is being read now may be read twice.
func (l *learning) forget() {
	l.mu.Lock()
	defer l.mu.Unlock()
	clear(l.known)
}

var errLearning = errors.New("an index is still being read")

// wait until nothing is being read, for as long as limit.
func (l *learning) wait(ctx context.Context, limit time.Duration) {
	l.mu.Lock()
	busy, idle := l.busy, l.idle
	l.mu.Unlock()
	if busy == 0 {
		return
	}
	ctx, cancel := context.WithTimeoutCause(ctx, limit, errLearning)
	defer cancel()
	select {
	case <-idle:
	case <-ctx.Done():
	}
}

func (l *learning) close() {
	l.mu.Lock()
	l.closed = true
	l.mu.Unlock()
	l.stop(errClosed)
	l.wg.Wait()
}

// learn begins to read an index of a suite, named with or without the ending of how it is packed. gzip comes first, also
// where clients fetch xz, which takes ten times as long to unpack. A Release file may list what the archive has not.
func (s *Service) learn(su suite, index string) {
	var names []string
	key := su.archive.url + " " + su.Date.String()
	for _, ending := range []string{".gz", ".xz", ".bz2", ""} {
		name := unpacked(index) + ending
		if file, ok := su.Files[name]; ok {
			names = append(names, name)
			key += " " + file.SHA256
		}
	}
	if len(names) == 0 {
		return
	}
	s.learning.start(key, func(ctx context.Context) error {
		var err error
		for _, name := range names {
			if err = s.readIndex(ctx, su, name); !source.Refused(err) {
				break
			}
		}
		if err != nil && ctx.Err() == nil {
			s.log.Warn("debian mirror cannot read an index", "suite", su.name(), "index", unpacked(index), "err", err)
		}
		return err
	})
}

func (s *Service) readIndex(ctx context.Context, su suite, name string) error {
	opts, _ := su.options(name)
	place := su.dir + "/" + name
	if su.ByHash { // as clients ask for it
		place = path.Dir(place) + "/by-hash/SHA256/" + su.Files[name].SHA256
	}
	o, _, err := s.src.Open(ctx, fileURL(su.base, place), opts)
	if err != nil {
		return err
	}
	defer func() { _ = o.Close() }()
	if _, err := o.Wait(ctx); err != nil {
		return err
	}
	return parseIndex(canceled{ctx, o.Reader(ctx)}, name, func(file, sum string) {
		s.listed.add(su.archive.url, file, sum, su.Date)
	})
}

// canceled is a reader that ends with its context.
type canceled struct {
	ctx context.Context // of the one index that is read
	io.Reader
}

// Read implements io.Reader.
func (c canceled) Read(p []byte) (int, error) {
	if c.ctx.Err() != nil {
		return 0, context.Cause(c.ctx)
	}
	return c.Reader.Read(p)
}
