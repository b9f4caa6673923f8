package npm

import (
	"archive/tar"
	"bytes"
	"compress/gzip"
	"crypto/sha1"
	"crypto/sha512"
	"encoding/base64"
	"encoding/hex"
	"encoding/json"
	"fmt"
	"io"
	"log"
	"log/slog"
	"net/http"
	"net/http/httptest"
	"path"
	"path/filepath"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/sandsea/sandsea/internal/aether/cache"
	"github.com/sandsea/sandsea/internal/aether/mirror"
	"github.com/sandsea/sandsea/internal/aether/upstream"
	"github.com/sandsea/sandsea/internal/policy"
	"github.com/sandsea/sandsea/internal/testkit/wait"
)

// registry is an npm registry as upstreams are.
type registry struct {
	t        *testing.T
	packages map[string]*pkg
	web      *httptest.Server

	lists, artefacts atomic.Int64
	bytes            atomic.Int64 // of artefacts
	dead             atomic.Bool
}

type pkg struct {
	name     string
	releases []*release
	tags     map[string]string
}

type release struct {
	version string
	time    string // "": unknown
	body    []byte
	deps    map[string]string
	scripts map[string]string
	corrupt bool
	cut     bool
	sha1    bool // no integrity, as of old
}

func newRegistry(t *testing.T, packages ...*pkg) *registry {
	g := &registry{t: t, packages: map[string]*pkg{}}
	for _, p := range packages {
		g.packages[p.name] = p
		for _, r := range p.releases {
			r.body = tarball(p.name, r)
		}
	}
	g.web = httptest.NewUnstartedServer(http.HandlerFunc(g.serve))
	g.web.Config.ErrorLog = log.New(io.Discard, "", 0)
	g.web.Start()
	t.Cleanup(g.web.Close)
	return g
}

// tarball makes one that npm installs.
func tarball(name string, r *release) []byte {
	fields := map[string]any{"name": name, "version": r.version, "main": "index.js"}
	if r.deps != nil {
		fields["dependencies"] = r.deps
	}
	if r.scripts != nil {
		fields["scripts"] = r.scripts
	}
	manifest, err := json.Marshal(fields)
	if err != nil {
		panic(err)
	}
	var b bytes.Buffer
	z := gzip.NewWriter(&b)
	tw := tar.NewWriter(z)
	for file, text := range map[string]string{
		"package/package.json": string(manifest),
		"package/index.js":     fmt.Sprintf("module.exports = %q\n", r.version) + strings.Repeat("// "+name+"\n", 500),
	} {
		if err := tw.WriteHeader(&tar.Header{Name: file, Mode: 0o644, Size: int64(len(text)), Typeflag: tar.TypeReg}); err != nil {
			panic(err)
		}
		_, _ = io.WriteString(tw, text)
	}
	_, _ = tw.Close(), z.Close()
	return b.Bytes()
}

func integrity(b []byte) string {
	h := sha512.Sum512(b)
	return "sha512-" + base64.StdEncoding.EncodeToString(h[:])
}

func (g *registry) tarballURL(p *pkg, r *release) string {
	return g.web.URL + "/r/" + p.name + "/-/" + path.Base(p.name) + "-" + r.version + ".tgz"
}

func (g *registry) document(p *pkg, r *release, full bool) map[string]any {
	h := sha1.Sum(r.body)
	dist := map[string]any{"tarball": g.tarballURL(p, r), "shasum": hex.EncodeToString(h[:])}
	if !r.sha1 {
		dist["integrity"] = integrity(r.body)
	}
	d := map[string]any{"name": p.name, "version": r.version, "dist": dist}
	if r.deps != nil {
		d["dependencies"] = r.deps
	}
	if full {
		if r.scripts != nil {
			d["scripts"] = r.scripts
		}
		d["description"] = p.name + " as of " + r.version
		d["readme"] = "words"
	} else if r.scripts["install"] != "" {
		d["hasInstallScript"] = true
	}
	return d
}

func (g *registry) serve(w http.ResponseWriter, r *http.Request) {
	if g.dead.Load() {
		panic(http.ErrAbortHandler)
	}
	where := strings.TrimPrefix(r.URL.Path, "/r/")
	for _, p := range g.packages {
		for _, rel := range p.releases {
			if g.web.URL+"/r/"+where != g.tarballURL(p, rel) {
				continue
			}
			g.artefacts.Add(1)
			body := rel.body
			if rel.corrupt {
				body = bytes.Clone(body)
				body[len(body)-1] ^= 1
			}
			w.Header().Set("Content-Length", fmt.Sprint(len(body)))
			if rel.cut {
				_, _ = w.Write(body[:len(body)/2])
				_ = http.NewResponseController(w).Flush()
				panic(http.ErrAbortHandler)
			}
			n, _ := w.Write(body)
			g.bytes.Add(int64(n))
			return
		}
	}
	p := g.packages[where]
	if p == nil {
		http.NotFound(w, r)
		return
	}
	if strings.Contains(p.name, "/") && !strings.Contains(r.URL.RawPath, "%2f") {
		g.t.Errorf("a scoped name is asked for as %s", r.URL.Path)
	}
	g.lists.Add(1)
	full := !strings.Contains(r.Header.Get("Accept"), typeAbbreviated)
	doc := map[string]any{"name": p.name, "dist-tags": p.tags, "modified": "2030-01-01T00:00:00.000Z"}
	versions, times := map[string]any{}, map[string]any{"created": "2019-01-01T00:00:00.000Z", "modified": "2030-01-01T00:00:00.000Z"}
	for _, rel := range p.releases {
		versions[rel.version] = g.document(p, rel, full)
		if rel.time != "" {
			times[rel.version] = rel.time + "T00:00:00.000Z"
		}
	}
	if len(versions) > 0 {
		doc["versions"] = versions
	} else {
		times["unpublished"] = map[string]any{"time": "2020-01-01T00:00:00.000Z"}
	}
	w.Header().Set("Content-Type", typeAbbreviated)
	if full {
		w.Header().Set("Content-Type", "application/json")
		doc["_id"], doc["_rev"], doc["time"], doc["readme"], doc["description"] = p.name, "7-x", times, "what is new in the newest", "of the newest"
		doc["nested"] = map[string]any{"a": []any{1, map[string]any{"b": "}"}}}
	}
	_ = json.NewEncoder(w).Encode(doc)
}

// bed is a mirror of a registry, served over HTTP as Aether does.
type bed struct {
	t     *testing.T
	s     *Service
	cache *cache.Cache
	web   *httptest.Server
	busy  atomic.Int64 // handlers at work

	mu     sync.Mutex
	world  policy.World      // guarded by mu
	events []mirror.Artefact // guarded by mu
}

func (g *registry) upstream() upstream.Upstream {
	return upstream.Upstream{URLs: []string{g.web.URL + "/r"}, Found: "test"}
}

func newBed(t *testing.T, u upstream.Upstream, cfg cache.Config) *bed {
	b := &bed{t: t}
	if cfg.Dir == "" {
		cfg.Dir = filepath.Join(t.TempDir(), "cache")
	}
	cfg.Log = slog.New(slog.DiscardHandler)
	var err error
	if b.cache, err = cache.Open(cfg); err != nil {
		t.Fatal(err)
	}
	tr := &http.Transport{}
	if b.s, err = New(Config{Upstream: u, Client: upstream.NewClient(tr, u), Cache: b.cache}); err != nil {
		t.Fatal(err)
	}
	b.web = httptest.NewUnstartedServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		r.URL.RawPath = ""
		path, ok := strings.CutPrefix(r.URL.Path, "/npm")
		if r.URL.Host != "" && "http://"+r.URL.Host != b.web.URL { // as a proxy, for a lock file's absolute URLs
			path, ok = b.s.Match("http", r.URL.Host, r.URL.Path)
		}
		if !ok {
			http.Error(w, "no such place", http.StatusBadGateway)
			return
		}
		r.URL.Path = path
		b.busy.Add(1)
		defer b.busy.Add(-1)
		b.mu.Lock()
		world := b.world
		b.mu.Unlock()
		c := &mirror.Caller{Sandbox: "s", World: world, Base: b.web.URL + "/npm", Report: func(a mirror.Artefact) {
			b.mu.Lock()
			defer b.mu.Unlock()
			b.events = append(b.events, a)
		}}
		b.s.ServeHTTP(w, r.WithContext(mirror.WithCaller(r.Context(), c)))
	}))
	b.web.Config.ErrorLog = log.New(io.Discard, "", 0)
	b.web.Start()
	t.Cleanup(func() {
		b.web.Close()
		tr.CloseIdleConnections()
		if err := b.cache.Close(); err != nil {
			t.Error(err)
		}
	})
	return b
}

func (b *bed) set(w policy.World) {
	b.mu.Lock()
	defer b.mu.Unlock()
	b.world = w
}

// last event, of a request that is over.
func (b *bed) last() mirror.Artefact {
	b.t.Helper()
	wait.Until(b.t, 10*time.Second, func() bool { return b.busy.Load() == 0 })
	b.mu.Lock()
	defer b.mu.Unlock()
	if len(b.events) == 0 {
		return mirror.Artefact{}
	}
	return b.events[len(b.events)-1]
}

type reply struct {
	status int
	body   string
	header http.Header
	err    error
}

func (b *bed) get(p string, header ...string) reply {
	b.t.Helper()
	req, err := http.NewRequest(http.MethodGet, b.web.URL+"/npm"+p, nil)
	if err != nil {
		b.t.Fatal(err)
	}
	for i := 0; i < len(header); i += 2 {
		req.Header.Set(header[i], header[i+1])
	}
	resp, err := http.DefaultClient.Do(req)
	if err != nil {
		return reply{err: err}
	}
	defer resp.Body.Close()
	body, err := io.ReadAll(resp.Body)
	return reply{resp.StatusCode, string(body), resp.Header, err}
}

func date(s string) time.Time {
	t, err := time.Parse(time.DateOnly, s)
	if err != nil {
		panic(err)
	}
	return t
}
