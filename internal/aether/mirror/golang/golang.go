// Package golang serves Go modules in the module proxy protocol, and the checksum database behind it.
//
// A version exists for a caller if its .info file's time, and that of a pseudo-version's own name, is not after the
// world's date. Lists, "latest", queries by branch or commit and the files of a version all ask the same question, so
// they agree. Times are those of commits: a proxy knows no other, so a tag put on an old commit today looks old.
//
// A denied module is also denied under the paths of its forks, which declare its path in their go.mod, and under vanity
// paths, as far as the upstream tells which repository they come from (Origin).
//
// A zip is served when it has been seen whole: all its files lie below module@version, and its hash is the one that the
// checksum database has, if that is in use and knows the module. Signatures of the database are for clients to verify:
// its answers pass as they are. Versions that the caller's world lacks are not looked up.
package golang

import (
	"context"
	"errors"
	"net/http"
	"slices"
	"strings"
	"time"

	"golang.org/x/mod/modfile"
	"golang.org/x/mod/module"
	"golang.org/x/mod/sumdb/tlog"

	"github.com/sandsea/sandsea/api/errdefs"
	"github.com/sandsea/sandsea/internal/aether/cache"
	"github.com/sandsea/sandsea/internal/aether/mirror"
	"github.com/sandsea/sandsea/internal/aether/mirror/source"
	"github.com/sandsea/sandsea/internal/aether/upstream"
	"github.com/sandsea/sandsea/internal/policy"
)

// Limits of what is read whole.
const (
	maxText = 16 << 20  // lists, go.mod files, as the go command has it
	maxZip  = 500 << 20 // as the go command has it
	infos   = 16        // asked for at once by one list
)

// How long answers that can change are believed.
const (
	freshList      = 5 * time.Minute
	freshQuery     = time.Minute
	freshSupported = time.Hour
)

// Service is the module proxy. It is safe for concurrent use.
type Service struct {
	src   source.Source
	bases []string // of the upstreams' protocol
	sums  database
	seen  *verified
}

// database is the checksum database in use; its zero value is none.
type database struct {
	name   string
	direct string // where it answers itself, without a slash at the end
}

// New makes the service of an upstream.
func New(src source.Source, u upstream.Upstream) *Service {
	s := &Service{src: src, bases: u.URLs, seen: newVerified()}
	// "name", "name+hash+key" or "name+hash+key url", as in GOSUMDB.
	if fields := strings.Fields(u.Checksums); len(fields) > 0 {
		s.sums.name, _, _ = strings.Cut(fields[0], "+")
		s.sums.direct = "https://" + s.sums.name
		if len(fields) > 1 {
			s.sums.direct = strings.TrimSuffix(fields[1], "/")
		}
	}
	return s
}

// Name implements mirror.Service.
func (s *Service) Name() string { return policy.Golang }

// Hosts implements mirror.Service.
func (s *Service) Hosts() []string {
	u := upstream.Upstream{URLs: s.bases}
	if s.sums.name != "" {
		u.Files = []string{s.sums.direct}
	}
	return u.Hosts()
}

// Match implements mirror.Service.
func (s *Service) Match(_, host, path string) (string, bool) {
	if rest, ok := source.Below(s.bases, host, path); ok {
		return rest, true
	}
	if s.sums.name != "" {
		if rest, ok := source.Below([]string{s.sums.direct}, host, path); ok {
			return "/sumdb/" + s.sums.name + rest, true
		}
	}
	return "", false
}

// ServeHTTP implements mirror.Service.
func (s *Service) ServeHTTP(w http.ResponseWriter, r *http.Request) {
	if mirror.ReadOnly(w, r) {
		return
	}
	c := mirror.CallerOf(r.Context())
	req, err := parsePath(r.URL.Path)
	a := mirror.Artefact{Kind: req.endpoint.kind(), Name: req.module, Version: req.version}
	if err != nil {
		mirror.Fail(w, c, a, errdefs.New(errdefs.Invalid, "request", "%v", err))
		return
	}
	if req.module != "" {
		if v := c.World.Package(policy.Golang, req.module); !v.Allow {
			mirror.Deny(w, c, a, v)
			return
		}
	}
	if module.IsPseudoVersion(req.version) {
		// It says itself when its commit was made, and upstream cannot make it older.
		if v := c.World.Version(policy.Golang, req.module, req.version, revision{Version: req.version}.published()); !v.Allow {
			mirror.Deny(w, c, a, v)
			return
		}
	}
	switch req.endpoint {
	case list:
		s.serveList(w, r, c, a)
	case latest:
		s.serveLatest(w, r, c, a)
	case info:
		s.serveInfo(w, r, c, a, req)
	case goMod, archive:
		s.serveFile(w, r, c, a, req)
	default:
		s.serveSum(w, r, c, a, req)
	}
}

// kind of artefact for the flow log.
func (e endpoint) kind() string {
	switch e {
	case list, latest:
		return "list"
	case archive:
		return "file"
	}
	return "metadata"
}

// judge asks the world about one version. It has no date if upstream gives no .info of it.
func (s *Service) judge(ctx context.Context, w policy.World, path, version string) (policy.Verdict, error) {
	if !w.Hides() {
		return policy.Verdict{Allow: true}, nil
	}
	rev, err := s.revision(ctx, path, version)
	if err != nil && !source.Refused(err) {
		return policy.Verdict{}, err
	}
	v := w.Version(policy.Golang, path, version, rev.published())
	if !v.Allow {
		return v, nil
	}
	hosts, repo := rev.repository()
	for _, host := range hosts {
		if v = w.Repo(host, repo); !v.Allow {
			break
		}
	}
	return v, nil
}

// judgeDeclared asks the world about the path that a version's go.mod declares, which is another one in forks.
func (s *Service) judgeDeclared(ctx context.Context, w policy.World, path, version string) (policy.Verdict, error) {
	if len(w.Deny) == 0 {
		return policy.Verdict{Allow: true}, nil
	}
	b, _, err := s.modFile(ctx, path, version)
	if err != nil {
		return policy.Verdict{}, err
	}
	declared := modfile.ModulePath(b)
	if declared == path {
		return policy.Verdict{Allow: true}, nil
	}
	w.AsOf = time.Time{} // the version's own date has been judged
	return w.Version(policy.Golang, declared, version, time.Time{}), nil
}

// judgeWhole asks all there is to ask about a version.
func (s *Service) judgeWhole(ctx context.Context, w policy.World, path, version string) (policy.Verdict, error) {
	v, err := s.judge(ctx, w, path, version)
	if err == nil && v.Allow {
		v, err = s.judgeDeclared(ctx, w, path, version)
	}
	return v, err
}

// revision reads the .info file of a canonical version, which never changes.
func (s *Service) revision(ctx context.Context, path, version string) (revision, error) {
	_, rev, _, err := s.infoFile(ctx, path, version)
	return rev, err
}

// infoFile reads an .info file, of a version or of a query for one.
func (s *Service) infoFile(ctx context.Context, path, version string) ([]byte, revision, cache.Source, error) {
	opts := cache.Options{MaxBytes: maxText}
	if !canonical(version) {
		opts.Fresh = freshQuery
	}
	rev := revision{Version: version}
	b, from, err := s.read(ctx, s.bases, filePath(path, version, ".info"), opts, func(b []byte) error {
		r, err := parseInfo(b, version)
		if err != nil {
			return wrong(path+"@"+version, "%v", err)
		}
		rev = r
		return nil
	})
	return b, rev, from, err
}

// modFile reads a version's go.mod.
func (s *Service) modFile(ctx context.Context, path, version string) ([]byte, cache.Source, error) {
	return s.read(ctx, s.bases, filePath(path, version, ".mod"), cache.Options{MaxBytes: maxText}, func(b []byte) error {
		if modfile.ModulePath(b) == "" {
			return wrong(path+"@"+version, "go.mod names no module")
		}
		return nil
	})
}

// read reads a file and checks it. One that is wrong is not kept, and one that was kept is fetched once more: upstream
// may be in order again.
func (s *Service) read(ctx context.Context, bases []string, path string, opts cache.Options, check func(b []byte) error) ([]byte, cache.Source, error) {
	for again := true; ; again = false {
		b, from, base, err := s.src.ReadFirst(ctx, bases, path, opts)
		if err != nil {
			return nil, from, err
		}
		if err = check(b); err == nil {
			return b, from, nil
		}
		s.src.Forget(ctx, base+path)
		if !again || from != cache.FromCache {
			return nil, from, err
		}
	}
}

// filePath of a version, which has been parsed and so can be escaped.
func filePath(path, version, ending string) string {
	p, _ := module.EscapePath(path)
	v, _ := module.EscapeVersion(version)
	return "/" + p + "/@v/" + v + ending
}

// visible is the list of a module's versions in ascending order, without those that the world lacks. The verdict is of
// the last one left out, for messages; it allows if none was.
func (s *Service) visible(ctx context.Context, w policy.World, path string) ([]string, policy.Verdict, cache.Source, error) {
	allow := policy.Verdict{Allow: true}
	p, _ := module.EscapePath(path)
	b, from, _, err := s.src.ReadFirst(ctx, s.bases, "/"+p+"/@v/list", cache.Options{Fresh: freshList, MaxBytes: maxText})
	if err != nil {
		return nil, allow, from, err
	}
	all, err := parseList(b, path)
	if err != nil {
		return nil, allow, from, wrong(path, "%v", err)
	}
	verdicts := make([]policy.Verdict, len(all))
	err = source.Each(ctx, len(all), infos, func(ctx context.Context, i int) error {
		var err error
		if w.AsOf.IsZero() {
			verdicts[i] = w.Version(policy.Golang, path, all[i], time.Time{})
		} else {
			verdicts[i], err = s.judge(ctx, w, path, all[i])
		}
		return err
	})
	if err != nil {
		return nil, allow, from, err
	}
	var shown []string
	hidden := allow
	for i, v := range verdicts {
		if v.Allow {
			shown = append(shown, all[i])
		} else {
			hidden = v
		}
	}
	if last := newest(shown); last != "" {
		// Where all of a module comes from is told by its newest version; the files of the others are asked about one by one.
		v, err := s.judgeWhole(ctx, w, path, last)
		if err != nil {
			return nil, allow, from, err
		}
		if !v.Allow {
			return nil, v, from, nil
		}
	}
	return shown, hidden, from, nil
}

func (s *Service) serveList(w http.ResponseWriter, r *http.Request, c *mirror.Caller, a mirror.Artefact) {
	versions, hidden, from, err := s.visible(r.Context(), c.World, a.Name)
	if err != nil {
		mirror.Fail(w, c, a, err)
		return
	}
	a.Rule = hidden.Rule
	var body strings.Builder
	for _, v := range versions {
		if !module.IsPseudoVersion(v) {
			body.WriteString(v + "\n")
		}
	}
	mirror.SendBytes(w, r, c, a, "text/plain; charset=utf-8", []byte(body.String()), from)
}

// serveLatest answers with the newest version that the caller's list has, else with upstream's own answer if the caller
// may see it.
func (s *Service) serveLatest(w http.ResponseWriter, r *http.Request, c *mirror.Caller, a mirror.Artefact) {
	ctx := r.Context()
	p, _ := module.EscapePath(a.Name)
	versions, hidden, _, err := s.visible(ctx, c.World, a.Name)
	if err != nil && !errors.Is(err, errdefs.NotFound) {
		mirror.Fail(w, c, a, err)
		return
	}
	best := newest(versions)
	if best == "" || module.IsPseudoVersion(best) {
		b, from, _, err := s.src.ReadFirst(ctx, s.bases, "/"+p+"/@latest", cache.Options{Fresh: freshQuery, MaxBytes: maxText})
		var rev revision
		if err == nil {
			if rev, err = parseInfo(b, ""); err != nil {
				err = wrong(a.Name, "%v", err)
			}
		}
		var v policy.Verdict
		if err == nil {
			v, err = s.judgeWhole(ctx, c.World, a.Name, rev.Version)
		}
		switch {
		case err == nil && v.Allow:
			a.Version = rev.Version
			mirror.SendBytes(w, r, c, a, "application/json", b, from)
			return
		case err == nil && best == "":
			a.Version = rev.Version
			mirror.Deny(w, c, a, v)
			return
		case err != nil && !errors.Is(err, errdefs.NotFound), err != nil && best == "" && hidden.Allow:
			mirror.Fail(w, c, a, err)
			return
		case best == "":
			mirror.Deny(w, c, a, hidden)
			return
		}
	}
	a.Version = best
	b, _, from, err := s.infoFile(ctx, a.Name, best)
	if err != nil {
		mirror.Fail(w, c, a, err)
		return
	}
	mirror.SendBytes(w, r, c, a, "application/json", b, from)
}

// serveInfo answers for versions, and for branches, commits and parts of versions, which upstream resolves.
func (s *Service) serveInfo(w http.ResponseWriter, r *http.Request, c *mirror.Caller, a mirror.Artefact, req request) {
	ctx := r.Context()
	b, rev, from, err := s.infoFile(ctx, req.module, req.version)
	if err != nil {
		mirror.Fail(w, c, a, err)
		return
	}
	a.Version = rev.Version
	v, err := s.judgeWhole(ctx, c.World, req.module, rev.Version)
	switch {
	case err != nil:
		mirror.Fail(w, c, a, err)
	case !v.Allow:
		mirror.Deny(w, c, a, v)
	default:
		mirror.SendBytes(w, r, c, a, "application/json", b, from)
	}
}

// serveFile answers with a go.mod or a zip.
func (s *Service) serveFile(w http.ResponseWriter, r *http.Request, c *mirror.Caller, a mirror.Artefact, req request) {
	ctx := r.Context()
	v, err := s.judgeWhole(ctx, c.World, req.module, req.version)
	if err != nil {
		mirror.Fail(w, c, a, err)
		return
	}
	if !v.Allow {
		mirror.Deny(w, c, a, v)
		return
	}
	if req.endpoint == goMod {
		b, from, err := s.modFile(ctx, req.module, req.version)
		if err != nil {
			mirror.Fail(w, c, a, err)
			return
		}
		mirror.SendBytes(w, r, c, a, "text/plain; charset=utf-8", b, from)
		return
	}
	o, from, err := s.openZip(ctx, req)
	if err != nil {
		mirror.Fail(w, c, a, err)
		return
	}
	defer func() { _ = o.Close() }()
	mirror.SendObject(w, r, c, a, o, from)
}

// openZip finds a version's zip, verified. One that was kept and is wrong, by what the checksum database says now, is
// fetched once more: upstream may be in order again.
func (s *Service) openZip(ctx context.Context, req request) (*cache.Object, cache.Source, error) {
	path := filePath(req.module, req.version, ".zip")
	for again := true; ; again = false {
		o, from, base, err := s.src.OpenFirst(ctx, s.bases, path, cache.Options{MaxBytes: maxZip})
		if err != nil {
			return nil, from, err
		}
		if err = s.verify(ctx, o, req.module, req.version); err == nil {
			return o, from, nil
		}
		_ = o.Close()
		if !again || from != cache.FromCache || !errors.Is(err, errdefs.DataLoss) {
			return nil, from, err
		}
		s.src.Forget(ctx, base+path)
	}
}

// serveSum answers for the checksum database.
func (s *Service) serveSum(w http.ResponseWriter, r *http.Request, c *mirror.Caller, a mirror.Artefact, req request) {
	ctx := r.Context()
	if req.database != s.sums.name {
		a.Name = req.database
		mirror.Fail(w, c, a, errdefs.New(errdefs.NotFound, "checksum database", "%q is not the node's", req.database))
		return
	}
	if req.endpoint == sumSupported {
		mirror.SendBytes(w, r, c, a, "text/plain; charset=utf-8", nil, cache.FromCache)
		return
	}
	var opts cache.Options
	switch {
	case req.endpoint == sumLookup:
		v, err := s.judgeWhole(ctx, c.World, req.module, req.version)
		if err != nil {
			mirror.Fail(w, c, a, err)
			return
		}
		if !v.Allow {
			mirror.Deny(w, c, a, v)
			return
		}
	case req.endpoint == sumLatest:
		opts.Fresh = freshQuery
	case slices.Contains(strings.Split(req.path, "/"), "data") && c.World.Hides():
		// Tiles of data list every version of every module. The go command reads none.
		mirror.Fail(w, c, a, errdefs.New(errdefs.NotFound, "checksum database", "has no data tiles where policy hides modules"))
		return
	}
	opts.MaxBytes = maxText
	b, from, err := s.read(ctx, s.sumBases(ctx), "/"+req.path, opts, func(b []byte) error { return checkSum(req, b) })
	if err != nil {
		mirror.Fail(w, c, a, err)
		return
	}
	mirror.SendBytes(w, r, c, a, "application/octet-stream", b, from)
}

// checkSum tells whether an answer of the checksum database can be one, so that what an upstream sends instead of it for
// a while is not kept for ever.
func checkSum(req request, b []byte) error {
	switch req.endpoint {
	case sumLookup:
		if _, err := parseLookup(b, req.module, req.version); err != nil {
			return wrong(req.module+"@"+req.version, "%v", err)
		}
	case sumTile:
		if t, err := tlog.ParseTilePath(req.path); err == nil && t.L >= 0 && len(b) != t.W*tlog.HashSize {
			return wrong(req.path, "has %d bytes, not %d", len(b), t.W*tlog.HashSize)
		}
	}
	return nil
}

// sumBases are where the database answers: through the proxies that say so, else itself.
func (s *Service) sumBases(ctx context.Context) []string {
	for _, base := range s.bases {
		through := base + "/sumdb/" + s.sums.name
		_, _, _, err := s.src.Read(ctx, through+"/supported", cache.Options{Fresh: freshSupported, MaxBytes: maxText})
		if err == nil {
			return []string{through}
		}
	}
	return []string{s.sums.direct}
}
