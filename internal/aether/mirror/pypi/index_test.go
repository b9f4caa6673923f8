package pypi

import (
	"archive/zip"
	"bytes"
	"crypto/sha256"
	"encoding/base64"
	"encoding/hex"
	"encoding/json"
	"fmt"
	"html"
	"io"
	"log"
	"log/slog"
	"net/http"
	"net/http/httptest"
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

// index is a package index as upstreams are: a simple index, the JSON documents, and the files on a host of their own.
type index struct {
	t        *testing.T
	htmlOnly bool
	projects map[string][]*release // by normalised name
	web      *httptest.Server
	files    *httptest.Server

	pages, artefacts atomic.Int64  // requests answered
	bytes            atomic.Int64  // of artefacts
	dead             atomic.Bool   // connections break
	serve            http.Handler  // instead of the files, if set
	mu               sync.Mutex    // guards slow
	slow             chan struct{} // artefacts stop in the middle until it is closed
}

// release is one file.
type release struct {
	name     string // of the project, as its author writes it
	version  string
	file     string // "": the version has none
	body     []byte
	metadata []byte
	uploaded time.Time
	requires string
	yanked   string
	corrupt  bool
	cut      bool // the transfer ends in the middle, and cannot be resumed
}

func newIndex(t *testing.T, releases ...*release) *index {
	x := &index{t: t, projects: map[string][]*release{}}
	for _, r := range releases {
		n, _ := normalise(r.name)
		x.projects[n] = append(x.projects[n], r)
	}
	start := func(h http.HandlerFunc) *httptest.Server {
		s := httptest.NewUnstartedServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
			if x.dead.Load() {
				panic(http.ErrAbortHandler)
			}
			h(w, r)
		}))
		s.Config.ErrorLog = log.New(io.Discard, "", 0)
		s.Start()
		t.Cleanup(s.Close)
		return s
	}
	x.web, x.files = start(x.serveIndex), start(x.serveFiles)
	return x
}

func sha(b []byte) string {
	h := sha256.Sum256(b)
	return hex.EncodeToString(h[:])
}

// url of a file.
func (x *index) url(r *release) string {
	return x.files.URL + "/packages/" + sha([]byte(r.file))[:8] + "/" + r.file
}

func (x *index) serveIndex(w http.ResponseWriter, r *http.Request) {
	x.pages.Add(1)
	segs := strings.Split(strings.Trim(r.URL.Path, "/"), "/")
	switch {
	case len(segs) == 1 && segs[0] == "simple":
		if x.htmlOnly {
			w.Header().Set("Content-Type", "text/html")
			for n := range x.projects {
				fmt.Fprintf(w, "<a href=\"/simple/%s/\">%[1]s</a>", n)
			}
			return
		}
		w.Header().Set("Content-Type", typeJSON)
		var list []map[string]string
		for n := range x.projects {
			list = append(list, map[string]string{"name": n})
		}
		_ = json.NewEncoder(w).Encode(map[string]any{"meta": map[string]any{"_last-serial": 7, "api-version": "1.4"}, "projects": list})
	case len(segs) == 2 && segs[0] == "simple" && x.projects[segs[1]] != nil:
		if x.htmlOnly {
			x.htmlPage(w, segs[1])
			return
		}
		if !strings.Contains(r.Header.Get("Accept"), typeJSON) {
			x.t.Errorf("upstream was asked for %q", r.Header.Get("Accept"))
		}
		x.jsonPage(w, segs[1])
	case segs[0] == "pypi" && len(segs) >= 3 && x.projects[segs[1]] != nil && !x.htmlOnly:
		x.document(w, segs[1], strings.Join(segs[2:len(segs)-1], ""))
	default:
		http.NotFound(w, r)
	}
}

func (x *index) jsonPage(w http.ResponseWriter, name string) {
	w.Header().Set("Content-Type", typeJSON)
	var files []map[string]any
	seen := map[string]bool{}
	var versions []string
	for _, r := range x.projects[name] {
		if r.file == "" {
			continue
		}
		f := map[string]any{
			"filename": r.file, "url": x.url(r), "hashes": map[string]string{"sha256": sha(r.body)}, "size": len(r.body),
			"upload-time": r.uploaded.UTC().Format("2006-01-02T15:04:05.000000Z"), "yanked": false, "provenance": nil,
		}
		if r.requires != "" {
			f["requires-python"] = r.requires
		}
		if r.yanked != "" {
			f["yanked"] = r.yanked
		}
		if r.metadata != nil {
			f["core-metadata"] = map[string]string{"sha256": sha(r.metadata)}
		}
		if r.uploaded.IsZero() {
			delete(f, "upload-time")
		}
		files = append(files, f)
		if !seen[r.version] {
			seen[r.version] = true
			versions = append(versions, r.version)
		}
	}
	_ = json.NewEncoder(w).Encode(map[string]any{"meta": map[string]any{"api-version": "1.4"}, "name": name, "versions": versions, "files": files})
}

func (x *index) htmlPage(w http.ResponseWriter, name string) {
	w.Header().Set("Content-Type", "text/html; charset=utf-8")
	fmt.Fprint(w, "<!DOCTYPE html><html><body>")
	for _, r := range x.projects[name] {
		fmt.Fprintf(w, `<a href="%s#sha256=%s"`, x.url(r), sha(r.body))
		if r.requires != "" {
			fmt.Fprintf(w, ` data-requires-python="%s"`, html.EscapeString(r.requires))
		}
		if r.yanked != "" {
			fmt.Fprintf(w, ` data-yanked="%s"`, html.EscapeString(r.yanked))
		}
		if r.metadata != nil {
			fmt.Fprintf(w, ` data-dist-info-metadata="sha256=%s"`, sha(r.metadata))
		}
		fmt.Fprintf(w, ">%s</a><br/>\n", r.file)
	}
}

func (x *index) document(w http.ResponseWriter, name, wanted string) {
	releases := map[string][]map[string]any{}
	var newest string
	for _, r := range x.projects[name] {
		newest = r.version
		if r.file == "" {
			releases[r.version] = []map[string]any{}
			continue
		}
		releases[r.version] = append(releases[r.version], map[string]any{
			"filename": r.file, "url": x.url(r), "digests": map[string]string{"sha256": sha(r.body)},
			"upload_time_iso_8601": r.uploaded.UTC().Format("2006-01-02T15:04:05.000000Z"),
		})
	}
	doc := map[string]any{"last_serial": 9, "vulnerabilities": []any{map[string]string{"id": "PYSEC-1", "details": "fixed later"}}}
	if wanted == "" {
		doc["releases"] = releases
		wanted = newest
	}
	if releases[wanted] == nil {
		http.Error(w, "no", http.StatusNotFound)
		return
	}
	doc["info"] = map[string]any{"name": name, "version": wanted, "summary": "as of " + wanted}
	doc["urls"] = releases[wanted]
	w.Header().Set("Content-Type", "application/json")
	_ = json.NewEncoder(w).Encode(doc)
}

func (x *index) serveFiles(w http.ResponseWriter, r *http.Request) {
	if x.serve != nil {
		x.serve.ServeHTTP(w, r)
		return
	}
	x.artefacts.Add(1)
	for _, rs := range x.projects {
		for _, rel := range rs {
			u := strings.TrimPrefix(x.url(rel), x.files.URL)
			body := rel.body
			switch r.URL.Path {
			case u:
			case u + ".metadata":
				body = rel.metadata
			default:
				continue
			}
			if rel.corrupt {
				body = append(bytes.Clone(body[:len(body)-1]), body[len(body)-1]^1)
			}
			w.Header().Set("Content-Length", fmt.Sprint(len(body)))
			half := len(body) / 2
			n, _ := w.Write(body[:half])
			x.bytes.Add(int64(n))
			x.mu.Lock()
			slow := x.slow
			x.mu.Unlock()
			if slow != nil {
				_ = http.NewResponseController(w).Flush()
				<-slow
			}
			if rel.cut {
				_ = http.NewResponseController(w).Flush()
				panic(http.ErrAbortHandler)
			}
			n, _ = w.Write(body[half:])
			x.bytes.Add(int64(n))
			return
		}
	}
	http.NotFound(w, r)
}

// wheel makes an installable one.
func wheel(name, version string, uploaded string, requires ...string) *release {
	t, err := time.Parse(time.DateOnly, uploaded)
	if err != nil {
		panic(err)
	}
	mod := strings.ReplaceAll(strings.ToLower(name), "-", "_")
	meta := fmt.Sprintf("Metadata-Version: 2.1\nName: %s\nVersion: %s\nRequires-Python: >=3.6\n", name, version)
	for _, r := range requires {
		meta += "Requires-Dist: " + r + "\n"
	}
	info := fmt.Sprintf("%s-%s.dist-info/", mod, version)
	files := []struct{ name, text string }{
		{mod + ".py", fmt.Sprintf("version = %q\n", version) + strings.Repeat("# some more bytes, so that there is something to stream\n", 4000)},
		{info + "METADATA", meta},
		{info + "WHEEL", "Wheel-Version: 1.0\nGenerator: test\nRoot-Is-Purelib: true\nTag: py3-none-any\n"},
	}
	var b bytes.Buffer
	z := zip.NewWriter(&b)
	var record strings.Builder
	add := func(name, text string) {
		w, err := z.CreateHeader(&zip.FileHeader{Name: name, Method: zip.Store})
		if err != nil {
			panic(err)
		}
		_, _ = io.WriteString(w, text)
	}
	for _, f := range files {
		add(f.name, f.text)
		h := sha256.Sum256([]byte(f.text))
		fmt.Fprintf(&record, "%s,sha256=%s,%d\n", f.name, base64.RawURLEncoding.EncodeToString(h[:]), len(f.text))
	}
	fmt.Fprintf(&record, "%sRECORD,,\n", info)
	add(info+"RECORD", record.String())
	if err := z.Close(); err != nil {
		panic(err)
	}
	return &release{
		name: name, version: version, file: fmt.Sprintf("%s-%s-py3-none-any.whl", mod, version), body: b.Bytes(), metadata: []byte(meta),
		uploaded: t, requires: ">=3.6",
	}
}

// sdist is a file that is only looked at by name and bytes.
func sdist(name, version, file, uploaded string) *release {
	t, err := time.Parse(time.DateOnly, uploaded)
	if err != nil {
		panic(err)
	}
	return &release{name: name, version: version, file: file, body: []byte("source of " + file), uploaded: t}
}

// bed is a mirror of an index, served over HTTP as Aether does.
type bed struct {
	t     *testing.T
	s     *Service
	cache *cache.Cache
	web   *httptest.Server

	busy atomic.Int64 // handlers at work

	mu     sync.Mutex
	world  policy.World      // guarded by mu
	events []mirror.Artefact // guarded by mu
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
		path, ok := strings.CutPrefix(r.URL.Path, "/pypi")
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
		c := &mirror.Caller{Sandbox: "s", World: world, Base: b.web.URL + "/pypi", Report: func(a mirror.Artefact) {
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

func (x *index) upstream() upstream.Upstream {
	return upstream.Upstream{URLs: []string{x.web.URL + "/simple"}, Found: "test"}
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

func (b *bed) get(path string, header ...string) reply {
	b.t.Helper()
	req, err := http.NewRequest(http.MethodGet, b.web.URL+path, nil)
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

// page is a project's JSON page.
func (b *bed) page(name string) (got struct {
	Versions []string   `json:"versions"`
	Files    []wireFile `json:"files"`
}, status int,
) {
	b.t.Helper()
	r := b.get("/pypi/simple/"+name+"/", "Accept", typeJSON)
	if r.status == http.StatusOK {
		if err := json.Unmarshal([]byte(r.body), &got); err != nil {
			b.t.Fatal(err)
		}
	}
	return got, r.status
}

func date(s string) time.Time {
	t, err := time.Parse(time.DateOnly, s)
	if err != nil {
		panic(err)
	}
	return t
}
