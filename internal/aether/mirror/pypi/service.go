package pypi

import (
	"context"
	"errors"
	"net/http"
	"net/url"
	"path"
	"slices"
	"strings"
	"sync"
	"time"

	"github.com/sandsea/sandsea/api/errdefs"
	"github.com/sandsea/sandsea/internal/aether/cache"
	"github.com/sandsea/sandsea/internal/aether/mirror"
	"github.com/sandsea/sandsea/internal/aether/upstream"
	"github.com/sandsea/sandsea/internal/policy"
)

const (
	fresh    = 10 * time.Minute // of pages, as upstreams ask for
	maxPage  = 64 << 20         // of one project
	maxList  = 256 << 20        // of all projects
	memory   = 64 << 20         // of pages kept parsed
	maxHosts = 64               // that pages may add
)

// accept is what upstream's index is asked for.
const accept = typeJSON + ", " + typeHTML + ";q=0.2, text/html;q=0.1"

// The content types of the simple index.
const (
	typeJSON = "application/vnd.pypi.simple.v1+json"
	typeHTML = "application/vnd.pypi.simple.v1+html"
)

// Config of a Service.
type Config struct {
	Upstream upstream.Upstream
	Client   *upstream.Client
	Cache    *cache.Cache
}

// Validate tells what is missing.
func (c Config) Validate() error {
	switch {
	case len(c.Upstream.URLs) == 0:
		return errdefs.New(errdefs.FailedPrecondition, "pypi", "has no upstream: %s", c.Upstream.Missing)
	case c.Client == nil || c.Cache == nil:
		return errdefs.New(errdefs.Invalid, "pypi", "needs a client and a cache")
	}
	return nil
}

// Service is the mirror.Service of policy.PyPI. It is safe for concurrent use.
type Service struct {
	cfg   Config
	pages *cache.Memo[*project]

	mu    sync.Mutex
	hosts []string // of files, beside the upstream's; guarded by mu
}

var _ mirror.Service = (*Service)(nil)

// New makes the service of an upstream.
func New(cfg Config) (*Service, error) {
	if err := cfg.Validate(); err != nil {
		return nil, err
	}
	return &Service{cfg: cfg, pages: cache.NewMemo[*project](memory)}, nil
}

// Name implements mirror.Service.
func (s *Service) Name() string { return policy.PyPI }

// Hosts implements mirror.Service: the index and where the files lie, as the upstream's Files say or, without them, as
// the pages do that have been read.
func (s *Service) Hosts() []string {
	hosts := s.cfg.Upstream.Hosts()
	s.mu.Lock()
	defer s.mu.Unlock()
	for _, h := range s.hosts {
		if !slices.Contains(hosts, h) {
			hosts = append(hosts, h)
		}
	}
	return hosts
}

// learn notes the hosts of a project's files, if nobody has said where they lie. Where somebody has, a page does not make
// other hosts this service's.
func (s *Service) learn(p *project) {
	if len(s.cfg.Upstream.Files) > 0 {
		return
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	for _, f := range p.files {
		u, err := url.Parse(f.url)
		if err != nil || slices.Contains(s.hosts, strings.ToLower(u.Hostname())) {
			continue
		}
		if len(s.hosts) == maxHosts {
			return
		}
		s.hosts = append(s.hosts, strings.ToLower(u.Hostname()))
	}
}

// known is a project that every index has, as installers install it.
const known = "pip"

// Learn reads a page to learn where files lie, so that Hosts says it before anybody has asked for one. errdefs.NotFound: the
// index has no such page.
func (s *Service) Learn(ctx context.Context) error {
	if len(s.cfg.Upstream.Files) > 0 {
		return nil
	}
	_, _, err := s.project(ctx, known)
	return err
}

// Match implements mirror.Service.
func (s *Service) Match(scheme, host, p string) (string, bool) {
	host = hostname(host)
	if host == "" || !slices.Contains(s.Hosts(), host) || scheme != "http" && scheme != "https" {
		return "", false
	}
	for _, raw := range s.cfg.Upstream.URLs {
		u, err := url.Parse(raw)
		if err != nil || !strings.EqualFold(u.Hostname(), host) {
			continue
		}
		if rest, ok := strings.CutPrefix(p, u.Path); ok && (rest == "" || rest[0] == '/') {
			return "/simple" + rest, true
		}
		if base, ok := strings.CutSuffix(u.Path, "/simple"); ok {
			if rest, ok := strings.CutPrefix(p, base+"/pypi/"); ok {
				return "/pypi/" + rest, true
			}
		}
	}
	return "/at/" + host + "/" + strings.TrimPrefix(p, "/"), true
}

// hostname of a host with or without a port, in lower case.
func hostname(host string) string {
	u, err := url.Parse("http://" + host)
	if err != nil {
		return ""
	}
	return strings.ToLower(u.Hostname())
}

// ServeHTTP implements http.Handler.
func (s *Service) ServeHTTP(w http.ResponseWriter, r *http.Request) {
	c := mirror.CallerOf(r.Context())
	if c == nil {
		http.Error(w, "nobody asks", http.StatusInternalServerError)
		return
	}
	if mirror.ReadOnly(w, r) {
		return
	}
	segs := strings.Split(strings.Trim(r.URL.Path, "/"), "/")
	switch {
	case len(segs) == 1 && segs[0] == "simple":
		s.list(w, r, c)
	case len(segs) == 2 && segs[0] == "simple":
		if !strings.HasSuffix(r.URL.Path, "/") {
			http.Redirect(w, r, c.Base+"/simple/"+url.PathEscape(segs[1])+"/", http.StatusMovedPermanently)
			return
		}
		s.page(w, r, c, segs[1])
	case len(segs) == 3 && segs[0] == "files":
		s.file(w, r, c, segs[1], segs[2])
	case len(segs) >= 3 && segs[0] == "at":
		s.at(w, r, c, segs[1], "/"+strings.Join(segs[2:], "/"))
	case len(segs) == 3 && segs[0] == "pypi" && segs[2] == "json":
		s.document(w, r, c, segs[1], "")
	case len(segs) == 4 && segs[0] == "pypi" && segs[3] == "json":
		s.document(w, r, c, segs[1], segs[2])
	default:
		http.Error(w, "this mirror has /simple/, /files/ and /pypi/<name>/json, not "+r.URL.Path, http.StatusNotFound)
	}
}

// fetch asks upstream for a document that may change.
func (s *Service) fetch(ctx context.Context, u, accept string, max int64) (*cache.Object, cache.Source, error) {
	return s.cfg.Cache.Get(ctx, u, cache.Options{Fresh: fresh, MaxBytes: max}, func(ctx context.Context, known cache.Validators) (*http.Response, error) {
		h := http.Header{"Accept": {accept}, "Accept-Encoding": {"gzip"}}
		known.Set(h)
		return s.cfg.Client.Get(ctx, u, h)
	})
}

// project finds upstream's page of a project: the first upstream that has one answers for it.
func (s *Service) project(ctx context.Context, name string) (*project, cache.Source, error) {
	var missing error
	for _, base := range s.cfg.Upstream.URLs {
		o, from, err := s.fetch(ctx, base+"/"+name+"/", accept, maxPage)
		if err != nil {
			// An upstream that is away might have the project, so the next must not answer for it.
			if cache.IsAbsent(err) {
				missing = err
				continue
			}
			return nil, from, err
		}
		defer func() { _ = o.Close() }()
		p, err := s.pages.Of(ctx, o, func(b []byte, m cache.Meta) (*project, error) {
			p, err := parsePage(name, m.ContentType, m.URL, b)
			if err == nil {
				s.learn(p)
			}
			return p, err
		})
		return p, from, err
	}
	return nil, "", missing
}

// judge tells what the caller's world says of a file.
func judge(c *mirror.Caller, p *project, f file) policy.Verdict {
	return c.World.Version(policy.PyPI, p.name, f.version, f.uploaded)
}

// open finds what a caller may see of a project, or answers for it and returns nil.
func (s *Service) open(w http.ResponseWriter, r *http.Request, c *mirror.Caller, kind, name string) (*project, cache.Source) {
	a := mirror.Artefact{Kind: kind, Name: name}
	normal, ok := normalise(name)
	if !ok {
		mirror.Fail(w, c, a, errdefs.New(errdefs.Invalid, "project", "%q is not a project's name", name))
		return nil, ""
	}
	a.Name = normal
	if v := c.World.Package(policy.PyPI, normal); !v.Allow {
		mirror.Deny(w, c, a, v)
		return nil, ""
	}
	p, from, err := s.project(r.Context(), normal)
	if err != nil {
		mirror.Fail(w, c, a, err)
		return nil, ""
	}
	return p, from
}

// visible are the files that a caller's world shows, and the verdict on the last one that it hides.
func visible(c *mirror.Caller, p *project) ([]file, policy.Verdict) {
	var out []file
	last := policy.Verdict{Allow: true}
	for _, f := range p.files {
		if v := judge(c, p, f); v.Allow {
			out = append(out, f)
		} else {
			last = v
		}
	}
	return out, last
}

// page answers with the files of a project.
func (s *Service) page(w http.ResponseWriter, r *http.Request, c *mirror.Caller, name string) {
	p, from := s.open(w, r, c, "list", name)
	if p == nil {
		return
	}
	a := mirror.Artefact{Kind: "list", Name: p.name}
	files, hidden := visible(c, p)
	if len(files) == 0 && !hidden.Allow {
		mirror.Deny(w, c, a, hidden)
		return
	}
	a.Rule = hidden.Rule
	s.send(w, r, c, a, from, func(asJSON bool) ([]byte, error) {
		if asJSON {
			return p.json(c.Base, files)
		}
		return p.html(c.Base, files), nil
	})
}

// send answers in the form that the caller prefers.
func (s *Service) send(w http.ResponseWriter, r *http.Request, c *mirror.Caller, a mirror.Artefact, from cache.Source, render func(asJSON bool) ([]byte, error)) {
	w.Header().Set("Vary", "Accept")
	contentType := negotiate(r)
	if contentType == "" {
		s.unacceptable(w, c, a)
		return
	}
	body, err := render(contentType == typeJSON)
	if err != nil {
		mirror.Fail(w, c, a, err)
		return
	}
	w.Header().Set("Cache-Control", "no-cache")
	mirror.SendBytes(w, r, c, a, withCharset(contentType), body, from)
}

// unacceptable answers a caller that takes none of the forms that there are.
func (s *Service) unacceptable(w http.ResponseWriter, c *mirror.Caller, a mirror.Artefact) {
	a.Error = "not acceptable"
	c.Report(a)
	http.Error(w, "the simple index comes as "+typeJSON+", "+typeHTML+" and text/html", http.StatusNotAcceptable)
}

func withCharset(contentType string) string {
	if contentType == "text/html" {
		return contentType + "; charset=utf-8"
	}
	return contentType
}

// file answers with a file of a project, or its metadata.
func (s *Service) file(w http.ResponseWriter, r *http.Request, c *mirror.Caller, name, fileName string) {
	p, _ := s.open(w, r, c, "file", name)
	if p == nil {
		return
	}
	at, ok := p.byName[fileName]
	if !ok {
		at, ok = p.byName[strings.TrimSuffix(fileName, ".metadata")]
	}
	if !ok {
		mirror.Fail(w, c, mirror.Artefact{Kind: "file", Name: p.name}, errdefs.New(errdefs.NotFound, "project "+p.name, "has no file %q", fileName))
		return
	}
	s.sendFile(w, r, c, p, p.files[at], p.files[at].name != fileName)
}

// sendFile answers with a file of a project or, if metadata is set, with its metadata, if the caller's world shows it.
func (s *Service) sendFile(w http.ResponseWriter, r *http.Request, c *mirror.Caller, p *project, f file, metadata bool) {
	a := mirror.Artefact{Kind: "file", Name: p.name, Version: f.version}
	u, sums, contentType := f.url, f.hashes, "application/octet-stream"
	if metadata {
		a.Kind = "metadata"
		u, sums, contentType = withSuffix(f.url, ".metadata"), f.metadataHashes, "text/plain; charset=utf-8"
	}
	if v := judge(c, p, f); !v.Allow {
		mirror.Deny(w, c, a, v)
		return
	}
	if metadata && !f.metadata {
		mirror.Fail(w, c, a, errdefs.New(errdefs.NotFound, "file "+f.name, "has no metadata beside it"))
		return
	}
	o, from, err := s.cfg.Cache.Get(r.Context(), u, cache.Options{Digests: digests(sums)}, func(ctx context.Context, _ cache.Validators) (*http.Response, error) {
		return s.cfg.Client.Get(ctx, u, nil)
	})
	if err != nil {
		mirror.Fail(w, c, a, err)
		return
	}
	defer func() { _ = o.Close() }()
	w.Header().Set("Content-Type", contentType)
	w.Header().Set("Cache-Control", "public, max-age=31536000, immutable")
	mirror.SendObject(w, r, c, a, o, from)
}

// withSuffix puts a suffix behind the path of a URL.
func withSuffix(raw, suffix string) string {
	u, err := url.Parse(raw)
	if err != nil {
		return raw + suffix
	}
	u.Path += suffix
	if u.RawPath != "" {
		u.RawPath += suffix
	}
	return u.String()
}

// at answers for an absolute URL of upstream's: it finds the project whose page has it.
func (s *Service) at(w http.ResponseWriter, r *http.Request, c *mirror.Caller, host, p string) {
	name := path.Base(p)
	a := mirror.Artefact{Kind: "file", Name: name}
	metadata := strings.HasSuffix(name, ".metadata")
	if metadata {
		name, p = strings.TrimSuffix(name, ".metadata"), strings.TrimSuffix(p, ".metadata")
	}
	denied := policy.Verdict{Allow: true}
	var absent error = errdefs.New(errdefs.NotFound, "file "+name, "is on no project's page at this URL")
	for _, candidate := range candidates(name) {
		if v := c.World.Package(policy.PyPI, candidate); !v.Allow {
			// It may still be another project's file, whose name begins like this one's.
			if denied.Allow {
				denied, a.Name = v, candidate
			}
			continue
		}
		prj, _, err := s.project(r.Context(), candidate)
		if cache.IsAbsent(err) {
			if !errors.Is(err, errdefs.NotFound) {
				absent = err
			}
			continue
		}
		if err != nil {
			mirror.Fail(w, c, a, err)
			return
		}
		i, ok := prj.byName[name]
		if !ok || !sameURL(prj.files[i].url, host, p) {
			continue
		}
		s.sendFile(w, r, c, prj, prj.files[i], metadata)
		return
	}
	if !denied.Allow {
		mirror.Deny(w, c, a, denied)
		return
	}
	mirror.Fail(w, c, a, absent)
}

func sameURL(raw, host, p string) bool {
	u, err := url.Parse(raw)
	return err == nil && strings.EqualFold(u.Hostname(), host) && u.Path == p
}
