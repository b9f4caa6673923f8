// Package sourcetest has what tests of package services share: an upstream made of files, and a caller whose world the
// test chooses.
package sourcetest

import (
	"context"
	"errors"
	"io"
	"log/slog"
	"maps"
	"net/http"
	"net/http/httptest"
	"net/url"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/sandsea/sandsea/internal/aether/cache"
	"github.com/sandsea/sandsea/internal/aether/guest"
	"github.com/sandsea/sandsea/internal/aether/mirror"
	"github.com/sandsea/sandsea/internal/aether/mirror/source"
	"github.com/sandsea/sandsea/internal/aether/upstream"
	"github.com/sandsea/sandsea/internal/policy"
)

var errSlow = errors.New("the upstream or a client takes too long")

// Day is the beginning of a day, "2024-06-01".
func Day(s string) time.Time {
	t, err := time.Parse(time.DateOnly, s)
	if err != nil {
		panic(err) // a test's own constant
	}
	return t
}

// Upstream is a server of files on the loopback interface. What it does not have is 404.
type Upstream struct {
	URL string

	mu    sync.Mutex
	files map[string]File // guarded by mu
	asked map[string]int  // guarded by mu
}

// File is what an Upstream answers with. A zero Status is 200.
type File struct {
	Body     string
	Status   int
	Modified time.Time
	ETag     string
	// Cut sends the header for all of Body and only so many bytes of it, if it is not 0, and breaks the connection.
	Cut int
}

// NewUpstream starts an Upstream that ends with the test.
func NewUpstream(t testing.TB) *Upstream {
	u := &Upstream{files: map[string]File{}, asked: map[string]int{}}
	server := httptest.NewServer(u)
	t.Cleanup(server.Close)
	u.URL = server.URL
	return u
}

// Put sets what is at a path, which begins with a slash.
func (u *Upstream) Put(path, body string) { u.PutFile(path, File{Body: body}) }

// PutFile sets what is at a path.
func (u *Upstream) PutFile(path string, f File) {
	u.mu.Lock()
	defer u.mu.Unlock()
	u.files[path] = f
}

// Files are the bodies of all files by path.
func (u *Upstream) Files() map[string]string {
	u.mu.Lock()
	defer u.mu.Unlock()
	all := map[string]string{}
	for path, f := range u.files {
		all[path] = f.Body
	}
	return all
}

// Asked is how often each path was asked for.
func (u *Upstream) Asked() map[string]int {
	u.mu.Lock()
	defer u.mu.Unlock()
	return maps.Clone(u.asked)
}

// ServeHTTP implements http.Handler.
func (u *Upstream) ServeHTTP(w http.ResponseWriter, r *http.Request) {
	u.mu.Lock()
	path := r.URL.EscapedPath()
	f, ok := u.files[path]
	if !ok {
		f, ok = u.files[r.URL.Path]
	}
	u.asked[path]++
	u.mu.Unlock()
	if !ok {
		http.NotFound(w, r)
		return
	}
	if f.ETag != "" {
		w.Header().Set("ETag", f.ETag)
	}
	if f.Status != 0 {
		w.WriteHeader(f.Status)
		_, _ = io.WriteString(w, f.Body)
		return
	}
	if f.Cut != 0 {
		w.Header().Set("Content-Length", "1000000")
		_, _ = io.WriteString(w, f.Body[:f.Cut])
		panic(http.ErrAbortHandler)
	}
	w.Header().Set("Content-Type", "application/octet-stream")
	http.ServeContent(w, r, "", f.Modified, strings.NewReader(f.Body))
}

// NewSource makes a Source with an empty cache.
func NewSource(t testing.TB, u upstream.Upstream) source.Source {
	t.Helper()
	c, err := cache.Open(cache.Config{Dir: filepath.Join(t.TempDir(), "cache"), MaxBytes: 1 << 30, Log: slog.New(slog.DiscardHandler)})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = c.Close() })
	rt := &http.Transport{Proxy: http.ProxyFromEnvironment}
	t.Cleanup(rt.CloseIdleConnections)
	return source.Source{Cache: c, Client: upstream.NewClient(rt, u)}
}

// Mount is a service as one caller reaches it.
type Mount struct {
	// URL of the service, without a slash at the end.
	URL string

	t      testing.TB
	mu     sync.Mutex
	world  policy.World      // guarded by mu
	events []mirror.Artefact // guarded by mu
}

// Serve mounts a service below its name, as Aether does.
func Serve(t testing.TB, s mirror.Service, w policy.World) *Mount {
	m := &Mount{t: t, world: w}
	below := http.StripPrefix("/"+s.Name(), s)
	server := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		m.mu.Lock()
		c := &mirror.Caller{Sandbox: "s1", World: m.world, Base: m.URL, Report: m.report}
		m.mu.Unlock()
		below.ServeHTTP(w, r.WithContext(mirror.WithCaller(r.Context(), c)))
	}))
	t.Cleanup(server.Close)
	m.URL = server.URL + "/" + s.Name()
	return m
}

// In puts another world in force.
func (m *Mount) In(w policy.World) {
	m.mu.Lock()
	defer m.mu.Unlock()
	m.world = w
}

func (m *Mount) report(a mirror.Artefact) {
	m.mu.Lock()
	defer m.mu.Unlock()
	m.events = append(m.events, a)
}

// Events are what was reported, and forgets them.
func (m *Mount) Events() []mirror.Artefact {
	m.mu.Lock()
	defer m.mu.Unlock()
	e := m.events
	m.events = nil
	return e
}

// Answer is what the service said. Broken tells that it broke off.
type Answer struct {
	Status int
	Header http.Header
	Body   string
	Broken bool
}

// Rule that denied, "" if none did.
func (a Answer) Rule() string { return a.Header.Get("Sandsea-Rule") }

// Get asks for a path, which begins with a slash. header are pairs of name and value.
func (m *Mount) Get(path string, header ...string) Answer {
	m.t.Helper()
	req, err := http.NewRequestWithContext(m.t.Context(), http.MethodGet, m.URL+path, nil)
	if err != nil {
		m.t.Fatal(err)
	}
	for i := 0; i < len(header); i += 2 {
		req.Header.Set(header[i], header[i+1])
	}
	resp, err := http.DefaultClient.Do(req)
	if err != nil {
		return Answer{Broken: true, Header: http.Header{}}
	}
	defer resp.Body.Close()
	b, err := io.ReadAll(resp.Body)
	return Answer{Status: resp.StatusCode, Header: resp.Header, Body: string(b), Broken: err != nil}
}

// Discovered is the upstream that this machine's own clients use for a service. Tests that need one are skipped where
// there is none, where it cannot be reached (probe is a path behind one of its URLs, with a slash at its beginning), where
// one of the programs is missing, and in short runs.
func Discovered(t testing.TB, service, probe string, programs ...string) upstream.Upstream {
	t.Helper()
	if testing.Short() {
		t.Skip("asks a real upstream")
	}
	for _, p := range programs {
		if _, err := exec.LookPath(p); err != nil {
			t.Skipf("no %s on this machine", p)
		}
	}
	all, err := upstream.Discover(t.Context(), upstream.Node{Env: os.Environ()}, nil)
	if err != nil {
		t.Fatal(err)
	}
	u := all[service]
	if len(u.URLs) == 0 {
		t.Skipf("no upstream for %s: %s", service, u.Missing)
	}
	ctx, cancel := context.WithTimeoutCause(t.Context(), 30*time.Second, errSlow)
	defer cancel()
	resp, err := upstream.NewClient(&http.Transport{Proxy: http.ProxyFromEnvironment}, u).Get(ctx, u.URLs[0]+probe, nil)
	if err != nil {
		t.Skipf("upstream for %s cannot be reached: %v", service, err)
	}
	_ = resp.Body.Close()
	if resp.StatusCode != http.StatusOK {
		t.Skipf("upstream for %s answers %d", service, resp.StatusCode)
	}
	return u
}

// Guest writes the files that sandboxes get (guest.Files) below dir, with the mount instead of the gateway in them.
func (m *Mount) Guest(service, dir string) {
	m.t.Helper()
	for _, f := range guest.Files() {
		path := filepath.Join(dir, f.Path)
		if err := os.MkdirAll(filepath.Dir(path), 0o755); err != nil {
			m.t.Fatal(err)
		}
		body := strings.ReplaceAll(f.Body, guest.Mount(service), m.URL)
		if err := os.WriteFile(path, []byte(body), os.FileMode(f.Mode)); err != nil {
			m.t.Fatal(err)
		}
	}
}

// Run runs a program in dir with env over this process's environment, and returns what it printed.
func Run(t testing.TB, dir string, env []string, name string, args ...string) (string, error) {
	t.Helper()
	ctx, cancel := context.WithTimeoutCause(t.Context(), 5*time.Minute, errSlow)
	defer cancel()
	cmd := exec.CommandContext(ctx, name, args...)
	cmd.Dir = dir
	cmd.Env = append(os.Environ(), env...)
	out, err := cmd.CombinedOutput()
	return string(out), err
}

// Proxy is the address of an HTTP proxy that brings requests for the service's hosts to it, as Aether does for clients
// that name such a host. Other hosts are 403.
func (m *Mount) Proxy(s mirror.Service) string {
	server := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		path, ok := s.Match(r.URL.Scheme, r.URL.Hostname(), r.URL.Path)
		if !ok {
			http.Error(w, "not the service's host", http.StatusForbidden)
			return
		}
		m.mu.Lock()
		c := &mirror.Caller{Sandbox: "s1", World: m.world, Base: m.URL, Report: m.report}
		m.mu.Unlock()
		r = r.Clone(mirror.WithCaller(r.Context(), c))
		r.URL = &url.URL{Path: path, RawQuery: r.URL.RawQuery}
		s.ServeHTTP(w, r)
	}))
	m.t.Cleanup(server.Close)
	return server.URL
}
