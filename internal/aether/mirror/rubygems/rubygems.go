// Package rubygems serves Ruby gems by the compact index: /versions, /names, /info/<gem>, the gems below /gems/ and
// their specifications below /quick/Marshal.4.8/.
//
// A version exists for a caller if upstream's list of the gem's versions (/api/v1/versions/<gem>.json) gives it a date
// that is not after the world's. Where there is no such list, versions have no dates and are there only if they are
// pinned. Lines of other versions are left out of /info, and their gems refused by the same question. Gems are checked
// against the SHA-256 of their line.
//
// /versions has no dates, and only clients' use of it decides what it must be: it tells them whether their copy of an
// info file is still right. Where a world hides versions it lists names with sums that no copy has, so that clients ask
// for /info; names of gems that are younger than the world's date do show.
//
// The old indexes (specs.4.8.gz and its like) are there for worlds that hide nothing: they list everything, without
// dates. Where they are refused, clients since RubyGems 3 do without.
package rubygems

import (
	"bytes"
	"context"
	"crypto/md5"
	"crypto/sha256"
	"encoding/base64"
	"encoding/hex"
	"errors"
	"io"
	"net/http"
	"strconv"
	"strings"
	"time"

	"github.com/sandsea/sandsea/api/errdefs"
	"github.com/sandsea/sandsea/internal/aether/cache"
	"github.com/sandsea/sandsea/internal/aether/mirror"
	"github.com/sandsea/sandsea/internal/aether/mirror/source"
	"github.com/sandsea/sandsea/internal/aether/upstream"
	"github.com/sandsea/sandsea/internal/policy"
)

const (
	maxInfo = 64 << 20
	maxAll  = 512 << 20 // /versions, /names and the old indexes
	maxGem  = 1 << 30

	freshList = time.Minute
	freshInfo = 5 * time.Minute

	memory    = 64 << 20  // of info files and dates that are kept parsed
	memoryAll = 128 << 20 // of /versions and /names that are kept as worlds have them, by upstream's size
)

// Service is the gem server. It is safe for concurrent use.
type Service struct {
	src   source.Source
	bases []string
	infos *cache.Memo[[]gem]
	dates *cache.Memo[map[string]time.Time]
	sums  *cache.Memo[sums] // of what is answered as it is
	lists *cache.Memo[list] // of what is not
}

// New makes the service of an upstream.
func New(src source.Source, u upstream.Upstream) *Service {
	return &Service{
		src: src, bases: u.URLs,
		infos: cache.NewMemo[[]gem](memory), dates: cache.NewMemo[map[string]time.Time](memory),
		sums:  cache.NewMemo[sums](4 * maxAll), // it keeps the sums, not the bytes
		lists: cache.NewMemo[list](memoryAll),
	}
}

// Name implements mirror.Service.
func (s *Service) Name() string { return policy.RubyGems }

// Hosts implements mirror.Service.
func (s *Service) Hosts() []string { return upstream.Upstream{URLs: s.bases}.Hosts() }

// Match implements mirror.Service.
func (s *Service) Match(_, host, path string) (string, bool) {
	return source.Below(s.bases, host, path)
}

// oldIndexes are those before the compact one.
var oldIndexes = map[string]bool{
	"/specs.4.8.gz": true, "/latest_specs.4.8.gz": true, "/prerelease_specs.4.8.gz": true,
	"/specs.4.8": true, "/latest_specs.4.8": true, "/prerelease_specs.4.8": true,
}

// ServeHTTP implements mirror.Service.
func (s *Service) ServeHTTP(w http.ResponseWriter, r *http.Request) {
	if mirror.ReadOnly(w, r) {
		return
	}
	c := mirror.CallerOf(r.Context())
	p := r.URL.Path
	a := mirror.Artefact{Kind: "list", Name: p}
	switch {
	case p == "/":
		// RubyGems before 3.4 takes a server for one with a compact index if it has a front page.
		mirror.SendBytes(w, r, c, a, "text/plain; charset=utf-8", []byte("gems by the compact index\n"), cache.FromCache)
		return
	case p == "/versions", p == "/names":
		s.serveAll(w, r, c, a, p)
		return
	case oldIndexes[p]:
		if c.World.Hides() {
			mirror.Fail(w, c, a, errdefs.New(errdefs.NotFound, "request", "%s is not served where policy hides gems", p).
				WithHint("Use a client that reads the compact index, as those since RubyGems 3 do"))
			return
		}
		s.serve(w, r, c, a, s.bases, p, cache.Options{Fresh: freshList, MaxBytes: maxAll})
		return
	}
	if name, ok := strings.CutPrefix(p, "/info/"); ok && isName(name) {
		a.Name = name
		s.serveInfo(w, r, c, a)
		return
	}
	if file, ok := strings.CutPrefix(p, "/gems/"); ok {
		if full, ok := strings.CutSuffix(file, ".gem"); ok && !strings.Contains(full, "/") {
			s.serveFile(w, r, c, mirror.Artefact{Kind: "file", Name: full}, p, full)
			return
		}
	}
	if file, ok := strings.CutPrefix(p, "/quick/Marshal.4.8/"); ok {
		if full, ok := strings.CutSuffix(file, ".gemspec.rz"); ok && !strings.Contains(full, "/") {
			s.serveFile(w, r, c, mirror.Artefact{Kind: "metadata", Name: full}, p, full)
			return
		}
	}
	mirror.Fail(w, c, a, errdefs.New(errdefs.NotFound, "request", "is for nothing that this mirror has: the compact index, gems and their specifications"))
}

// serve answers with upstream's object as it is.
func (s *Service) serve(w http.ResponseWriter, r *http.Request, c *mirror.Caller, a mirror.Artefact, bases []string, path string, opts cache.Options) {
	o, from, _, err := s.src.OpenFirst(r.Context(), bases, path, opts)
	if err != nil {
		mirror.Fail(w, c, a, err)
		return
	}
	defer func() { _ = o.Close() }()
	mirror.SendObject(w, r, c, a, o, from)
}

// info reads the info file of a gem, and tells which source has it.
func (s *Service) info(ctx context.Context, name string) ([]gem, cache.Source, string, error) {
	o, from, base, err := s.src.OpenFirst(ctx, s.bases, "/info/"+name, cache.Options{Fresh: freshInfo, MaxBytes: maxInfo})
	if err != nil {
		return nil, from, base, err
	}
	defer func() { _ = o.Close() }()
	all, err := s.infos.Of(ctx, o, func(b []byte, _ cache.Meta) ([]gem, error) {
		all, err := parseInfo(b, name)
		if err != nil {
			return nil, wrong(name, err)
		}
		return all, nil
	})
	return all, from, base, err
}

func wrong(name string, err error) error {
	return errdefs.New(errdefs.DataLoss, "gem "+name, "%v", err).WithHint("Upstream's index is wrong; try again later")
}

// published is when the versions of a gem came, if the world asks and the source that has the gem tells: what another says
// is of another gem.
func (s *Service) published(ctx context.Context, w policy.World, base, name string) (map[string]time.Time, error) {
	if w.AsOf.IsZero() {
		return nil, nil
	}
	o, _, err := s.src.Open(ctx, base+"/api/v1/versions/"+name+".json", cache.Options{Fresh: freshInfo, MaxBytes: maxInfo})
	if source.Refused(err) {
		return nil, nil // this upstream has no such list
	}
	if err != nil {
		return nil, err
	}
	defer func() { _ = o.Close() }()
	return s.dates.Of(ctx, o, func(b []byte, _ cache.Meta) (map[string]time.Time, error) {
		dates, err := parseDates(b)
		if err != nil {
			return nil, wrong(name, err)
		}
		return dates, nil
	})
}

// serveInfo answers with the lines of the versions that the caller's world has.
func (s *Service) serveInfo(w http.ResponseWriter, r *http.Request, c *mirror.Caller, a mirror.Artefact) {
	ctx := r.Context()
	if v := c.World.Package(policy.RubyGems, a.Name); !v.Allow {
		mirror.Deny(w, c, a, v)
		return
	}
	all, from, base, err := s.info(ctx, a.Name)
	if err != nil {
		mirror.Fail(w, c, a, err)
		return
	}
	dates, err := s.published(ctx, c.World, base, a.Name)
	if err != nil {
		mirror.Fail(w, c, a, err)
		return
	}
	body := bytes.NewBufferString(head)
	hidden := policy.Verdict{Allow: true}
	for _, g := range all {
		v := c.World.Version(policy.RubyGems, a.Name, g.Version, dates[g.Version])
		if !v.Allow {
			hidden = v
			continue
		}
		body.Write(g.line)
		body.WriteByte('\n')
	}
	if body.Len() == len(head) && !hidden.Allow {
		mirror.Deny(w, c, a, hidden)
		return
	}
	a.Rule = hidden.Rule
	sendRanges(w, r, c, a, bytes.NewReader(body.Bytes()), sumsOf(body.Bytes()), from)
}

// openAll opens a list of every source that has it. The caller closes them.
func (s *Service) openAll(ctx context.Context, path string) (all []*cache.Object, from cache.Source, err error) {
	missing := error(errdefs.New(errdefs.NotFound, "rubygems", "has no source with a compact index"))
	for _, base := range s.bases {
		o, src, err := s.src.Open(ctx, base+path, cache.Options{Fresh: freshList, MaxBytes: maxAll})
		if err == nil {
			if _, err = o.Wait(ctx); err != nil {
				_ = o.Close()
			}
		}
		switch {
		case cache.IsAbsent(err):
			missing = err
			continue
		case err != nil:
			closeAll(all)
			return nil, src, err
		}
		all = append(all, o)
		if from != cache.FromUpstream {
			from = src
		}
	}
	if len(all) == 0 {
		return nil, from, missing
	}
	return all, from, nil
}

func closeAll(all []*cache.Object) {
	for _, o := range all {
		_ = o.Close()
	}
}

// serveAll answers with /versions or /names: those of all sources, since Bundler asks for no gem that is not listed. As
// for /info, a gem is that of the first source that has it.
func (s *Service) serveAll(w http.ResponseWriter, r *http.Request, c *mirror.Caller, a mirror.Artefact, path string) {
	ctx := r.Context()
	all, from, err := s.openAll(ctx, path)
	if err != nil {
		mirror.Fail(w, c, a, err)
		return
	}
	defer closeAll(all)
	if len(all) == 1 && !c.World.Hides() {
		// Upstream's ETag need not be what Bundler before 2.5 compares it with: the MD5.
		sums, err := s.sums.Of(ctx, all[0], func(b []byte, _ cache.Meta) (sums, error) { return sumsOf(b), nil })
		if err != nil {
			mirror.Fail(w, c, a, err)
			return
		}
		sendRanges(w, r, c, a, all[0].Reader(ctx), sums, from)
		return
	}
	key, size := path+" "+worldSum(c.World, ""), int64(0)
	for _, o := range all {
		key += " " + o.Meta().Digests["sha256"]
		size += o.Meta().Size
	}
	l, err := s.lists.Make(key, size, func() (list, error) {
		var body bytes.Buffer
		listed := map[string]bool{} // by the sources before
		for i, o := range all {
			var own bytes.Buffer
			var names []string
			show := func(name string) bool {
				if i+1 < len(all) {
					names = append(names, name)
				}
				return !listed[name]
			}
			rewrite := rewriteVersions
			if path == "/names" {
				rewrite = rewriteNames
			}
			// Others may wait for it, too.
			err := rewrite(&own, o.Reader(context.WithoutCancel(ctx)), func(name, versions, sum string) string {
				switch {
				case !show(name):
					return ""
				case path == "/names":
					if !c.World.Package(policy.RubyGems, name).Allow {
						return ""
					}
					return name
				}
				return versionsLine(c.World, name, versions, sum)
			})
			if err != nil {
				return list{}, wrong(path, err)
			}
			for _, name := range names {
				listed[name] = true
			}
			b := own.Bytes()
			if at := bytes.Index(b, []byte(head)); i > 0 && at >= 0 {
				b = b[at+len(head):]
			}
			body.Write(b)
		}
		b := bytes.Clone(body.Bytes())
		return list{b, sumsOf(b)}, nil
	})
	if err != nil {
		mirror.Fail(w, c, a, err)
		return
	}
	sendRanges(w, r, c, a, bytes.NewReader(l.body), l.sums, from)
}

// list is /versions or /names in a world, shared by all who ask for it there.
type list struct {
	body []byte
	sums sums
}

// versionsLine is a gem's line of /versions in a world that hides something; empty if the gem does not exist.
func versionsLine(w policy.World, name, versions, sum string) string {
	if !w.Package(policy.RubyGems, name).Allow {
		return ""
	}
	if w.AsOf.IsZero() {
		var shown []string
		hidden := false
		for v := range strings.SplitSeq(versions, ",") {
			if w.Version(policy.RubyGems, name, strings.TrimPrefix(v, "-"), time.Time{}).Allow {
				shown = append(shown, v)
			} else {
				hidden = true
			}
		}
		if !hidden {
			return name + " " + versions + " " + sum
		}
		if len(shown) == 0 {
			return ""
		}
		return name + " " + strings.Join(shown, ",") + " " + worldSum(w, sum)
	}
	// Which versions there are is told by /info alone.
	return name + " 0 " + worldSum(w, sum)
}

// worldSum changes whenever upstream's sum or the world does, and is the MD5 of no info file.
func worldSum(w policy.World, sum string) string {
	h := md5.New()
	for _, part := range append([]string{sum, w.AsOf.UTC().Format(time.RFC3339Nano)}, w.Deny...) {
		h.Write([]byte(strconv.Itoa(len(part)) + ":" + part))
	}
	return hex.EncodeToString(h.Sum(nil))
}

// serveFile answers with a gem or its specification. full is its name without the ending: it is the gem's whose info
// file has the version.
func (s *Service) serveFile(w http.ResponseWriter, r *http.Request, c *mirror.Caller, a mirror.Artefact, path, full string) {
	ctx := r.Context()
	missing := error(errdefs.New(errdefs.NotFound, "gem "+full, "is in no index"))
	for _, split := range splits(full) {
		name, version := split[0], split[1]
		if v := c.World.Package(policy.RubyGems, name); !v.Allow {
			a.Name, a.Version = name, version
			mirror.Deny(w, c, a, v)
			return
		}
		all, _, base, err := s.info(ctx, name)
		if cache.IsAbsent(err) {
			if !errors.Is(err, errdefs.NotFound) { // offline
				missing = err
			}
			continue
		}
		if err != nil {
			mirror.Fail(w, c, a, err)
			return
		}
		for _, g := range all {
			if g.Version != version {
				continue
			}
			a.Name, a.Version = name, version
			s.serveVersion(w, r, c, a, base, path, g)
			return
		}
	}
	mirror.Fail(w, c, a, missing)
}

func (s *Service) serveVersion(w http.ResponseWriter, r *http.Request, c *mirror.Caller, a mirror.Artefact, base, path string, g gem) {
	dates, err := s.published(r.Context(), c.World, base, a.Name)
	if err != nil {
		mirror.Fail(w, c, a, err)
		return
	}
	if v := c.World.Version(policy.RubyGems, a.Name, g.Version, dates[g.Version]); !v.Allow {
		mirror.Deny(w, c, a, v)
		return
	}
	opts := cache.Options{MaxBytes: maxGem}
	if a.Kind == "file" && g.Sum != "" {
		opts.Digests = []cache.Digest{cache.SHA256(g.Sum)}
	}
	s.serve(w, r, c, a, []string{base}, path, opts)
}

// sums of a document.
type sums struct {
	md5    [md5.Size]byte
	sha256 [sha256.Size]byte
}

func sumsOf(b []byte) sums { return sums{md5.Sum(b), sha256.Sum256(b)} }

// sendRanges answers with a document, or the range of it that is asked for: clients append to their copies, and check what
// they have put together against the sums in the header, which are of the whole. Bundler before 2.5 takes the ETag for
// the MD5, later ones read Digest or Repr-Digest.
func sendRanges(w http.ResponseWriter, r *http.Request, c *mirror.Caller, a mirror.Artefact, doc io.ReadSeeker, of sums, from cache.Source) {
	a.Source = string(from)
	sha := base64.StdEncoding.EncodeToString(of.sha256[:])
	h := w.Header()
	h.Set("Content-Type", "text/plain; charset=utf-8")
	h.Set("ETag", `"`+hex.EncodeToString(of.md5[:])+`"`)
	h.Set("Digest", "sha-256="+sha)
	h.Set("Repr-Digest", "sha-256=:"+sha+":")
	out := &counter{ResponseWriter: w}
	http.ServeContent(out, r, "", time.Time{}, doc)
	a.Bytes = out.n
	if out.err != nil {
		a.Error = out.err.Error()
	}
	c.Report(a)
}

// counter counts a body.
type counter struct {
	http.ResponseWriter
	n   int64
	err error
}

// Write implements http.ResponseWriter.
func (w *counter) Write(p []byte) (int, error) {
	n, err := w.ResponseWriter.Write(p)
	w.n += int64(n)
	w.err = err
	return n, err
}
