package packages

import (
	"bytes"
	"encoding/xml"
	"fmt"
	"io"
	"net/http"
	"net/http/httptest"
	"net/http/httputil"
	"net/url"
	"os"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"sync/atomic"
	"testing"
	"time"

	"golang.org/x/sync/errgroup"

	"github.com/sandsea/sandsea/client"
	"github.com/sandsea/sandsea/internal/policy"
	"github.com/sandsea/sandsea/internal/testkit/server"
)

// The way to the distant registry.
const (
	distance = 150 * time.Millisecond // until a request gets there
	width    = 512 << 10              // bytes a second, of one answer
	faster   = 5                      // times that the second install is to be faster
)

// distant is a registry far away: a real one behind a narrow line. It counts what it is asked for.
type distant struct {
	*httptest.Server
	requests atomic.Int64
	files    atomic.Int64 // zips of modules among them
}

func newDistant(t testing.TB, real string) *distant {
	t.Helper()
	d := &distant{}
	proxy := before(t, real, func(res *http.Response) error {
		res.Body = &narrow{ReadCloser: res.Body, done: res.Request.Context().Done()}
		return nil
	})
	d.Server = httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		d.requests.Add(1)
		if strings.HasSuffix(r.URL.Path, ".zip") {
			d.files.Add(1)
		}
		select {
		case <-time.After(distance):
		case <-r.Context().Done():
		}
		proxy.ServeHTTP(w, r)
	}))
	t.Cleanup(d.Close)
	return d
}

// before makes a server that answers as a real one does, after a change.
func before(t testing.TB, real string, change func(*http.Response) error) *httputil.ReverseProxy {
	t.Helper()
	to, err := url.Parse(real)
	if err != nil {
		t.Fatal(err)
	}
	return &httputil.ReverseProxy{
		Rewrite: func(r *httputil.ProxyRequest) {
			r.SetURL(to)
			r.Out.Host = ""
		},
		ModifyResponse: change,
	}
}

// narrow lets no more through than the line does.
type narrow struct {
	io.ReadCloser
	done <-chan struct{}
}

// Read implements io.Reader.
func (n *narrow) Read(p []byte) (int, error) {
	const piece = width / 20
	m, err := n.ReadCloser.Read(p[:min(len(p), piece)])
	select {
	case <-time.After(time.Second * time.Duration(m) / width):
	case <-n.done:
	}
	return m, err
}

// newDated is a Maven repository that tells when its files came: gson's from 2.11 on in 2024, all others in 2010.
func newDated(t testing.TB, real string) *httptest.Server {
	t.Helper()
	late := regexp.MustCompile(`/com/google/code/gson/gson[^/]*/(2\.1[1-9]|2\.[2-9][0-9]|[3-9])`)
	s := httptest.NewServer(before(t, real, func(res *http.Response) error {
		at := day(t, "2010-06-01")
		if late.MatchString(res.Request.URL.Path) {
			at = day(t, "2024-05-20")
		}
		res.Header.Set("Last-Modified", at.Format(http.TimeFormat))
		return nil
	}))
	t.Cleanup(s.Close)
	return s
}

// TestUpstreamsThatTheOperatorNames has one server for all of them, since it takes its time to be made.
func TestUpstreamsThatTheOperatorNames(t *testing.T) {
	far := newDistant(t, registry(t, policy.Golang, "/golang.org/x/text/@v/list"))
	repo := registry(t, policy.Maven, "/com/google/code/gson/gson/maven-metadata.xml")
	gems := newGems(t)
	settings := fmt.Sprintf("[services.golang]\nurls = [%q]\n[services.maven]\nurls = [%q]\n[services.rubygems]\nurls = [%q]\n",
		far.URL, newDated(t, repo).URL, gems.URL)
	s := server.Start(t, server.Config{Aether: settings})
	ready(t, importDebian(within(t, imageLimit), s))
	t.Run("maven sees the world as of a date", func(t *testing.T) { mavenAsOf(t, s, repo) })
	t.Run("gem installs", func(t *testing.T) { gemInstalls(t, s, gems) })
	t.Run("the cache stands in for a distant registry and for none", func(t *testing.T) {
		kit := goKit.useOn(t, s)
		const line = goEnv + goProgram + "go mod tidy"
		cold := openOn(t, s, allow(policy.Golang), kit).timed(line)
		asked, files := far.requests.Load(), far.files.Load()
		modules := int(files)
		if modules < 2 {
			t.Fatalf("the registry was asked for %d modules", modules)
		}
		second := openOn(t, s, allow(policy.Golang), kit)
		warm := second.timed(line)
		if n := far.files.Load(); n != files {
			t.Errorf("the second install asked the registry for %d modules", n-files)
		}
		t.Logf("%d requests and %.1f s, then %d and %.1f s: %.1f times faster", asked, cold.Seconds(), far.requests.Load()-asked,
			warm.Seconds(), cold.Seconds()/warm.Seconds())
		if cold < faster*warm {
			t.Errorf("the first install took %s, the second %s", cold, warm)
		}

		// Who asks for the same at the same time waits for one fetch.
		files = far.files.Load()
		var all errgroup.Group
		for _, b := range []box{second, openOn(t, s, allow(policy.Golang), kit), openOn(t, s, allow(policy.Golang), kit)} {
			all.Go(func() error {
				res, err := b.Run(within(t, commandLimit), client.Shell(goEnv+"go mod download golang.org/x/mod@v0.17.0"))
				if err == nil && res.GetResult().GetExitCode() != 0 {
					err = fmt.Errorf("%s", res.GetStderr())
				}
				return err
			})
		}
		if err := all.Wait(); err != nil {
			t.Error(err)
		}
		if n := far.files.Load() - files; n != 1 {
			t.Errorf("three at once asked the registry %d times for a module", n)
		}

		// Without any registry the cache serves what it has, and says why it has no more.
		if err := s.Terminate(); err != nil {
			t.Fatal(err)
		}
		if err := s.Kill("aether"); err != nil {
			t.Fatal(err)
		}
		settings += "[cache]\noffline = true\n"
		if err := os.WriteFile(filepath.Join(s.Dir, "aether.toml"), []byte(settings), 0o600); err != nil {
			t.Fatal(err)
		}
		if err := s.Up(within(t, imageLimit)); err != nil {
			t.Fatal(err)
		}
		asked = far.requests.Load()
		third := openOn(t, s, allow(policy.Golang), kit)
		third.sh(line)
		got := third.files(policy.Golang)
		if len(got) != modules {
			t.Errorf("%d modules from the cache, %d of the registry", len(got), modules)
		}
		for _, e := range got {
			if e.GetSource() != "cache" {
				t.Errorf("%s %s came from %q", e.GetName(), e.GetVersion(), e.GetSource())
			}
		}
		third.refused(goEnv+"cd /w && go mod download golang.org/x/term@v0.20.0", "offline")
		// A sandbox from before the restart goes on.
		second.sh(goEnv + "cd /w && go clean -modcache && go mod tidy")
		if n := far.requests.Load(); n != asked {
			t.Errorf("the registry was asked %d times while offline", n-asked)
		}
	})
}

func mavenAsOf(t *testing.T, s *server.Server, repo string) {
	t.Helper()
	var meta struct {
		Versions []string `xml:"versioning>versions>version"`
	}
	if err := xml.Unmarshal(ask(t, repo+"/com/google/code/gson/gson/maven-metadata.xml", ""), &meta); err != nil {
		t.Fatal(err)
	}
	number := regexp.MustCompile(`^\d+(\.\d+)+$`)
	then := slices.DeleteFunc(meta.Versions, func(v string) bool {
		return !number.MatchString(v) || compareVersions(v, "2.11") >= 0
	})
	want := slices.MaxFunc(then, compareVersions)

	b := openOn(t, s, asOf(allow(policy.Maven), day(t, "2024-01-01")), mavenKit.useOn(t, s))
	b.sh(mavenProject + "sed -i 's/2.10.1/[2.0,)/' pom.xml && " + mavenBuild)
	if got := b.sh("cd /root/.m2/repository/com/google/code/gson/gson && echo */*.jar"); got != want+"/gson-"+want+".jar\n" {
		t.Errorf("got %s, want %s", got, want)
	}
	b.shortened(policy.Maven, "com.google.code.gson:gson", "as_of 2024-01-01")
	b.refused(`cd /w && sed -i 's/\[2.0,)/2.11.0/' pom.xml && `+mavenBuild, "com.google.code.gson:gson:pom:2.11.0", "403")
	b.denied(policy.Maven, "com.google.code.gson:gson", "as_of 2024-01-01")
}

// gems is a gem server of two gems, of which one needs the other, with two versions each. A sandbox makes the gems.
type gems struct {
	*httptest.Server
	files atomic.Pointer[map[string][]byte]
	asked atomic.Int64 // for gems
}

func newGems(t testing.TB) *gems {
	t.Helper()
	g := &gems{}
	g.Server = httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		files := g.files.Load()
		if files == nil || (*files)[r.URL.Path] == nil {
			http.NotFound(w, r)
			return
		}
		if strings.HasSuffix(r.URL.Path, ".gem") {
			g.asked.Add(1)
		}
		http.ServeContent(w, r, "", time.Time{}, bytes.NewReader((*files)[r.URL.Path]))
	}))
	t.Cleanup(g.Close)
	return g
}
