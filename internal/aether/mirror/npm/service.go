package npm

import (
	"bufio"
	"context"
	"encoding/json"
	"io"
	"net/http"
	"net/url"
	"slices"
	"strings"
	"time"

	"github.com/sandsea/sandsea/api/errdefs"
	"github.com/sandsea/sandsea/internal/aether/cache"
	"github.com/sandsea/sandsea/internal/aether/mirror"
	"github.com/sandsea/sandsea/internal/aether/upstream"
	"github.com/sandsea/sandsea/internal/policy"
)

const (
	fresh  = 5 * time.Minute // of packuments, as upstreams ask for
	memory = 64 << 20        // of packuments kept parsed, by their size at upstream
)

// typeAbbreviated is the content type of packuments for installers.
const typeAbbreviated = "application/vnd.npm.install-v1+json"

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
		return errdefs.New(errdefs.FailedPrecondition, "npm", "has no upstream: %s", c.Upstream.Missing)
	case c.Client == nil || c.Cache == nil:
		return errdefs.New(errdefs.Invalid, "npm", "needs a client and a cache")
	}
	return nil
}

// Service is the mirror.Service of policy.NPM. It is safe for concurrent use.
type Service struct {
	cfg        Config
	packuments *cache.Memo[*packument]
}

var (
	_ mirror.Service = (*Service)(nil)
	_ mirror.Denier  = (*Service)(nil)
)

// New makes the service of an upstream.
func New(cfg Config) (*Service, error) {
	if err := cfg.Validate(); err != nil {
		return nil, err
	}
	return &Service{cfg: cfg, packuments: cache.NewMemo[*packument](memory)}, nil
}

// Name implements mirror.Service.
func (s *Service) Name() string { return policy.NPM }

// Hosts implements mirror.Service.
func (s *Service) Hosts() []string { return s.cfg.Upstream.Hosts() }

// Match implements mirror.Service.
func (s *Service) Match(scheme, host, p string) (string, bool) {
	at, err := url.Parse("http://" + host)
	if err != nil || scheme != "http" && scheme != "https" {
		return "", false
	}
	host = strings.ToLower(at.Hostname())
	if host == "" || !slices.Contains(s.Hosts(), host) {
		return "", false
	}
	for _, raw := range slices.Concat(s.cfg.Upstream.URLs, s.cfg.Upstream.Files) {
		u, err := url.Parse(raw)
		if err != nil || !strings.EqualFold(u.Hostname(), host) {
			continue
		}
		if rest, ok := strings.CutPrefix(p, u.Path); ok && strings.HasPrefix(rest, "/") {
			return rest, true
		}
	}
	return "", false
}

// ServeHTTP implements http.Handler.
func (s *Service) ServeHTTP(w http.ResponseWriter, r *http.Request) {
	c := mirror.CallerOf(r.Context())
	if c == nil {
		http.Error(w, "nobody asks", http.StatusInternalServerError)
		return
	}
	segs := strings.Split(strings.Trim(r.URL.Path, "/"), "/")
	if segs[0] == "-" {
		s.special(w, r, c, segs[1:])
		return
	}
	if mirror.ReadOnly(w, r) {
		return
	}
	name, rest := segs[0], segs[1:]
	if strings.HasPrefix(name, "@") && len(rest) > 0 {
		name, rest = name+"/"+rest[0], rest[1:]
	}
	switch {
	case len(rest) == 0:
		s.list(w, r, c, name)
	case len(rest) == 1 && rest[0] != "-":
		s.one(w, r, c, name, rest[0])
	case len(rest) == 2 && rest[0] == "-":
		s.tarball(w, r, c, name, rest[1])
	case len(rest) == 3 && rest[0] == "-" && strings.HasPrefix(rest[1], "@"):
		s.tarball(w, r, c, name, rest[2]) // an old form: /@scope/name/-/@scope/name-1.0.0.tgz
	default:
		http.Error(w, "this mirror has packages, their versions and tarballs, not "+r.URL.Path, http.StatusNotFound)
	}
}

// special answers below /-/, where registries have what is no package.
func (s *Service) special(w http.ResponseWriter, r *http.Request, c *mirror.Caller, segs []string) {
	get := r.Method == http.MethodGet || r.Method == http.MethodHead
	what := strings.Join(segs, "/")
	switch {
	case what == "ping" && get:
		w.Header().Set("Content-Type", "application/json")
		_, _ = io.WriteString(w, "{}")
	case len(segs) >= 3 && segs[0] == "package" && segs[len(segs)-1] == "dist-tags" && get:
		s.tags(w, r, c, strings.Join(segs[1:len(segs)-1], "/"))
	case what == "all" || what == "v1/search":
		lacks(w, c, "search", "results have no date and no policy")
	case strings.HasPrefix(what, "npm/v1/security"):
		lacks(w, c, "audit", "advisories tell of what came later")
	case what == "whoami", strings.HasPrefix(what, "user"), strings.HasPrefix(what, "npm/v1/tokens"), strings.HasPrefix(what, "v1/login"):
		lacks(w, c, "accounts", "credentials of the upstream are held outside of the sandbox")
	case !get:
		mirror.ReadOnly(w, r)
	default:
		refuse(w, http.StatusNotFound, "this mirror has no /-/"+what)
	}
}

// lacks denies what registries have beside packages and this mirror has not.
func lacks(w http.ResponseWriter, c *mirror.Caller, what, why string) {
	deny(w, c, mirror.Artefact{Kind: what}, policy.Verdict{Rule: "service npm", Reason: "this mirror has no " + what + ": " + why})
}

// refuse answers as registries do, so that npm shows the reason.
func refuse(w http.ResponseWriter, status int, reason string) {
	w.Header().Set("Content-Type", "application/json")
	w.WriteHeader(status)
	_ = json.NewEncoder(w).Encode(map[string]string{"error": reason}) // the client is gone, if this fails
}

// fetch finds upstream's packument. Only the full one tells dates.
func (s *Service) fetch(ctx context.Context, name string, full bool) (*cache.Object, cache.Source, error) {
	var missing error
	for _, base := range s.cfg.Upstream.URLs {
		u := base + "/" + strings.Replace(name, "/", "%2f", 1)
		key, accept := u, typeAbbreviated+"; q=1.0, application/json; q=0.8"
		if full {
			key, accept = u+" full", "application/json"
		}
		o, from, err := s.cfg.Cache.Get(ctx, key, cache.Options{Fresh: fresh, MaxBytes: maxPackument}, func(ctx context.Context, known cache.Validators) (*http.Response, error) {
			h := http.Header{"Accept": {accept}, "Accept-Encoding": {"gzip"}}
			known.Set(h)
			return s.cfg.Client.Get(ctx, u, h)
		})
		if err != nil && cache.IsAbsent(err) {
			missing = err
			continue
		}
		return o, from, err
	}
	return nil, "", missing
}

// opened is what a caller may see of a package.
type opened struct {
	view
	object *cache.Object // upstream's packument
	from   cache.Source
}

// read gives upstream's packument from its beginning.
func (o *opened) read(ctx context.Context) io.Reader {
	return bufio.NewReaderSize(o.object.Reader(ctx), 256<<10)
}

// open finds a package, or answers for it and returns nil. The caller closes the object. full: the packument must have
// all of each version.
func (s *Service) open(w http.ResponseWriter, r *http.Request, c *mirror.Caller, a mirror.Artefact, full bool) *opened {
	if err := checkName(a.Name); err != nil {
		mirror.Fail(w, c, a, err)
		return nil
	}
	if v := c.World.Package(policy.NPM, a.Name); !v.Allow {
		deny(w, c, a, v)
		return nil
	}
	o, from, err := s.fetch(r.Context(), a.Name, full || !c.World.AsOf.IsZero())
	if err != nil {
		mirror.Fail(w, c, a, err)
		return nil
	}
	p, err := s.packuments.Read(r.Context(), o, func(r io.Reader, _ cache.Meta) (*packument, error) {
		return parsePackument(a.Name, bufio.NewReaderSize(r, 256<<10))
	})
	if err == nil && len(p.versions) == 0 {
		err = errdefs.New(errdefs.NotFound, "package "+a.Name, "has no versions: it was unpublished")
	}
	if err != nil {
		_ = o.Close()
		mirror.Fail(w, c, a, err)
		return nil
	}
	return &opened{view: p.view(c.World), object: o, from: from}
}

// list answers with a packument.
func (s *Service) list(w http.ResponseWriter, r *http.Request, c *mirror.Caller, name string) {
	a := mirror.Artefact{Kind: "list", Name: name}
	full := !wantsAbbreviated(r)
	p := s.open(w, r, c, a, full)
	if p == nil {
		return
	}
	defer func() { _ = p.object.Close() }()
	a.Rule = p.hidden.Rule
	if !p.any {
		deny(w, c, a, p.hidden)
		return
	}
	w.Header().Set("Vary", "Accept")
	w.Header().Set("Cache-Control", "no-cache")
	if !full {
		body, err := p.abbreviate(c.Base)
		if err != nil {
			mirror.Fail(w, c, a, err)
			return
		}
		mirror.SendBytes(w, r, c, a, typeAbbreviated, body, p.from)
		return
	}
	mirror.SendWritten(w, r, c, a, "application/json", p.from, func(out *bufio.Writer) error {
		return p.full(c.Base, p.read(r.Context()), out)
	})
}

// wantsAbbreviated tells whether the client asks for what installers need; npm names both forms, that one first.
func wantsAbbreviated(r *http.Request) bool {
	for part := range strings.SplitSeq(strings.Join(r.Header.Values("Accept"), ","), ",") {
		name, _, _ := strings.Cut(part, ";")
		switch strings.TrimSpace(strings.ToLower(name)) {
		case typeAbbreviated:
			return true
		case "application/json", "*/*":
			return false
		}
	}
	return false
}

// tags answers with the dist-tags.
func (s *Service) tags(w http.ResponseWriter, r *http.Request, c *mirror.Caller, name string) {
	a := mirror.Artefact{Kind: "list", Name: name}
	p := s.open(w, r, c, a, false)
	if p == nil {
		return
	}
	defer func() { _ = p.object.Close() }()
	a.Rule = p.hidden.Rule
	if !p.any {
		deny(w, c, a, p.hidden)
		return
	}
	body, err := json.Marshal(p.view.tags)
	if err != nil {
		mirror.Fail(w, c, a, err)
		return
	}
	mirror.SendBytes(w, r, c, a, "application/json", body, p.from)
}

// one answers with a version's document, by version or tag.
func (s *Service) one(w http.ResponseWriter, r *http.Request, c *mirror.Caller, name, wanted string) {
	a := mirror.Artefact{Kind: "metadata", Name: name, Version: wanted}
	p := s.open(w, r, c, a, true)
	if p == nil {
		return
	}
	defer func() { _ = p.object.Close() }()
	if v, ok := p.view.tags[wanted]; ok {
		wanted = v
	}
	a.Version = wanted
	i, ok := p.byName[wanted]
	if !ok {
		if hidden, was := p.packument.tags[wanted]; was {
			i, ok = p.byName[hidden]
		}
	}
	switch {
	case !ok:
		mirror.Fail(w, c, a, errdefs.New(errdefs.NotFound, "package "+name, "has no version or tag %q", wanted))
		return
	case !p.shown[i]:
		p.hide(w, c, a, i)
		return
	}
	doc, err := p.one(wanted, p.read(r.Context()))
	if err == nil {
		doc, err = p.here(c.Base, p.versions[i], doc)
	}
	var body []byte
	if err == nil {
		body, err = json.Marshal(doc)
	}
	if err != nil {
		mirror.Fail(w, c, a, err)
		return
	}
	mirror.SendBytes(w, r, c, a, "application/json", body, p.from)
}

// hide answers for a version that the caller's world hides.
func (p *opened) hide(w http.ResponseWriter, c *mirror.Caller, a mirror.Artefact, i int) {
	e := p.versions[i]
	a.Version = e.name
	deny(w, c, a, c.World.Version(policy.NPM, p.name, e.name, e.published))
}

// Deny implements mirror.Denier.
func (s *Service) Deny(w http.ResponseWriter, c *mirror.Caller, a mirror.Artefact, v policy.Verdict) {
	deny(w, c, a, v)
}

// deny is mirror.Deny in the form that npm shows to people.
func deny(w http.ResponseWriter, c *mirror.Caller, a mirror.Artefact, v policy.Verdict) {
	a.Denied, a.Rule = true, v.Rule
	c.Report(a)
	w.Header().Set("Sandsea-Rule", v.Rule)
	refuse(w, http.StatusForbidden, v.Reason+" (rule "+v.Rule+")")
}

// tarball answers with one.
func (s *Service) tarball(w http.ResponseWriter, r *http.Request, c *mirror.Caller, name, file string) {
	a := mirror.Artefact{Kind: "file", Name: name}
	p := s.open(w, r, c, a, false)
	if p == nil {
		return
	}
	defer func() { _ = p.object.Close() }()
	i := p.find(file)
	if i < 0 || p.versions[i].tarball == "" {
		mirror.Fail(w, c, a, errdefs.New(errdefs.NotFound, "package "+name, "has no tarball %q", file))
		return
	}
	e := p.versions[i]
	a.Version = e.name
	if !p.shown[i] {
		p.hide(w, c, a, i)
		return
	}
	o, from, err := s.cfg.Cache.Get(r.Context(), e.tarball, cache.Options{Digests: e.digests}, func(ctx context.Context, _ cache.Validators) (*http.Response, error) {
		return s.cfg.Client.Get(ctx, e.tarball, nil)
	})
	if err != nil {
		mirror.Fail(w, c, a, err)
		return
	}
	defer func() { _ = o.Close() }()
	w.Header().Set("Content-Type", "application/octet-stream")
	w.Header().Set("Cache-Control", "public, max-age=31536000, immutable")
	mirror.SendObject(w, r, c, a, o, from)
}
