package build

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"log"
	"log/slog"
	"net/http"
	"net/http/httptest"
	"net/netip"
	"runtime"
	"slices"
	"strconv"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/google/go-containerregistry/pkg/name"
	"github.com/google/go-containerregistry/pkg/registry"
	v1 "github.com/google/go-containerregistry/pkg/v1"
	"github.com/google/go-containerregistry/pkg/v1/empty"
	"github.com/google/go-containerregistry/pkg/v1/mutate"
	pusher "github.com/google/go-containerregistry/pkg/v1/remote"
	"github.com/google/go-containerregistry/pkg/v1/static"
	"github.com/google/go-containerregistry/pkg/v1/tarball"
	"github.com/google/go-containerregistry/pkg/v1/types"

	"github.com/sandsea/sandsea/api/errdefs"
	"github.com/sandsea/sandsea/internal/image"
	"github.com/sandsea/sandsea/internal/layers/blob/mem"
)

// dockerHub is the registry of names without one.
var dockerHub = strings.TrimPrefix(name.DefaultRegistry, "index.")

// hub is a registry on a loopback port; before sees every request first and may answer it.
type hub struct {
	*httptest.Server
	host   string
	before func(w http.ResponseWriter, r *http.Request, next http.Handler)

	mu   sync.Mutex
	asks []string // guarded by mu; "GET /v2/…" of blobs
}

func newHub(t *testing.T, before func(w http.ResponseWriter, r *http.Request, next http.Handler)) *hub {
	t.Helper()
	h := &hub{before: before}
	inner := registry.New(registry.Logger(log.New(io.Discard, "", 0)))
	h.Server = httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		if r.Method == http.MethodGet && strings.Contains(r.URL.Path, "/blobs/") {
			h.mu.Lock()
			h.asks = append(h.asks, r.URL.Path[strings.LastIndex(r.URL.Path, "/")+1:])
			h.mu.Unlock()
		}
		if h.before != nil && r.Method == http.MethodGet {
			h.before(w, r, inner)
			return
		}
		inner.ServeHTTP(w, r)
	}))
	t.Cleanup(h.Close)
	h.host = strings.TrimPrefix(h.URL, "http://")
	return h
}

// fetched counts how often a blob was asked for.
func (h *hub) fetched(digest string) int {
	h.mu.Lock()
	defer h.mu.Unlock()
	n := 0
	for _, a := range h.asks {
		if a == digest {
			n++
		}
	}
	return n
}

func (h *hub) forget() {
	h.mu.Lock()
	defer h.mu.Unlock()
	h.asks = nil
}

// tarOf makes a gzip layer of a tar.
func tarOf(t *testing.T, b []byte) v1.Layer {
	t.Helper()
	l, err := tarball.LayerFromOpener(func() (io.ReadCloser, error) { return io.NopCloser(bytes.NewReader(b)), nil })
	must(t, err)
	return l
}

// imageOf makes an image of plain tars, lowest first.
func imageOf(t *testing.T, cfg v1.Config, tars ...[]byte) v1.Image {
	t.Helper()
	img, err := mutate.ConfigFile(empty.Image, &v1.ConfigFile{OS: "linux", Architecture: runtime.GOARCH})
	must(t, err)
	for _, b := range tars {
		img, err = mutate.AppendLayers(img, tarOf(t, b))
		must(t, err)
	}
	img, err = mutate.Config(img, cfg)
	must(t, err)
	return img
}

func (h *hub) push(t *testing.T, repo string, img pusher.Taggable) string {
	t.Helper()
	ref, err := name.ParseReference(h.host + "/" + repo)
	must(t, err)
	must(t, pusher.Push(ref, img))
	return ref.Name()
}

func layerDigest(t *testing.T, img v1.Image, n int) string {
	t.Helper()
	layers, err := img.Layers()
	must(t, err)
	d, err := layers[n].Digest()
	must(t, err)
	return d.String()
}

// hasty is a builder that does not wait between attempts.
func hasty(t *testing.T) (*Builder, *mem.Store) {
	t.Helper()
	b, store := memBuilder(t, nil)
	b.pause = func(ctx context.Context, _ time.Duration) error { return context.Cause(ctx) }
	return b, store
}

func TestAnImageOfARegistryIsTheOneThatWasPushed(t *testing.T) {
	h := newHub(t, nil)
	b, _ := hasty(t)
	l0 := makeTar(t, ent{name: "bin/a", body: noise(300_000)}, ent{name: "gone", body: "x"})
	l1 := makeTar(t, ent{name: ".wh.gone"}, ent{name: "b", typ: '1', link: "bin/a"})
	cfg := v1.Config{
		User: "7:8", WorkingDir: "/w", Env: []string{"A=1", "PATH=/bin"}, Entrypoint: []string{"/bin/a"}, Cmd: []string{"x"},
	}
	img := imageOf(t, cfg, l0, l1)
	ref := h.push(t, "team/app:1", img)
	var stages []string
	got, err := b.Registry(t.Context(), RegistryOptions{Reference: ref, Report: func(p Progress) {
		if p.Finished {
			stages = append(stages, p.Stage)
		}
	}})
	must(t, err)
	if got.Name != ref || got.Existed || len(got.Layers) != 2 || got.Layers[0].Source != ref {
		t.Errorf("result %+v", got)
	}
	want := image.Config{User: "7:8", Workdir: "/w", Env: []string{"A=1", "PATH=/bin"}, Entrypoint: []string{"/bin/a"}, Cmd: []string{"x"}}
	if fmt.Sprint(got.Config) != fmt.Sprint(want) {
		t.Errorf("config %+v", got.Config)
	}
	if !slices.Equal(stages, []string{"resolve", "download", "unpack", "write"}) {
		t.Errorf("stages %v", stages)
	}
	// From an archive it becomes the same layers.
	plain, _ := hasty(t)
	same, err := plain.OCI(t.Context(), bytes.NewReader(layoutTar(t, ociImageSpec{layers: [][]byte{l0, l1}})), ArchiveOptions{})
	must(t, err)
	for i := range same.Layers {
		if same.Layers[i].Digest != got.Layers[i].Digest {
			t.Errorf("layer %d is %s from an archive, %s from the registry", i, same.Layers[i].Digest, got.Layers[i].Digest)
		}
	}
	noTemps(t, b)
	// By digest, and by tag and digest.
	d, err := img.Digest()
	must(t, err)
	for _, at := range []string{h.host + "/team/app@" + d.String(), h.host + "/team/app:1@" + d.String()} {
		again, err := b.Registry(t.Context(), RegistryOptions{Reference: at})
		must(t, err)
		if !again.Existed || again.Name != h.host+"/team/app@"+d.String() || again.Layers[1].Digest != got.Layers[1].Digest {
			t.Errorf("%s: %+v", at, again)
		}
	}
}

func TestLayersThatAreHereAreNotFetched(t *testing.T) {
	h := newHub(t, nil)
	b, store := hasty(t)
	base := makeTar(t, ent{name: "bin/", typ: '5', mode: 0o711, uid: 3}, ent{name: "bin/a", body: noise(100_000) + strings.Repeat("\x00", 200_000) + "end", mode: 0o4755, pax: map[string]string{
		xattrRecord + xattrCap: "\x01\x00\x00\x02" + strings.Repeat("\x00", 16), xattrRecord + "user.odd": "x",
	}},
		ent{name: "lib", typ: '2', link: "usr/lib"}, ent{name: "usr/lib/", typ: '5', pax: map[string]string{
			xattrRecord + "user.k": "v", xattrRecord + xattrDefault: "\x02\x00\x00\x00\x01\x00\x07\x00\xff\xff\xff\xff",
		}},
		ent{name: "old/x", body: "x"})
	top := makeTar(t, ent{name: "c", typ: '1', link: "bin/a"}, ent{name: "lib/y", body: "y"}, ent{name: ".wh.old"})
	first := imageOf(t, v1.Config{}, base)
	_, err := b.Registry(t.Context(), RegistryOptions{Reference: h.push(t, "base:1", first)})
	must(t, err)
	h.forget()
	second := imageOf(t, v1.Config{}, base, top)
	ref := h.push(t, "app:1", second)
	got, err := b.Registry(t.Context(), RegistryOptions{Reference: ref})
	must(t, err)
	if n := h.fetched(layerDigest(t, second, 0)); n != 0 {
		t.Errorf("the base was fetched %d times", n)
	}
	if n := h.fetched(layerDigest(t, second, 1)); n != 1 {
		t.Errorf("the layer above it was fetched %d times", n)
	}
	// What looks names up in a layer that was not read again makes of them the same.
	fresh, _ := hasty(t)
	want, err := fresh.Registry(t.Context(), RegistryOptions{Reference: ref})
	must(t, err)
	for i := range want.Layers {
		if got.Layers[i].Digest != want.Layers[i].Digest {
			t.Errorf("layer %d: %s on a known base, %s on a new one", i, got.Layers[i].Digest, want.Layers[i].Digest)
		}
	}
	// The same tar on another base is another layer.
	other := makeTar(t, ent{name: "bin/a", body: "other"}, ent{name: "lib", typ: '2', link: "usr"})
	third, err := b.Registry(t.Context(), RegistryOptions{Reference: h.push(t, "app:2", imageOf(t, v1.Config{}, other, top))})
	must(t, err)
	if third.Layers[1].Digest == got.Layers[1].Digest {
		t.Error("a layer's links lead into another image")
	}
	// A layer that is not whole any more is fetched again.
	m, err := ReadManifest(t.Context(), store, got.Layers[0].Digest)
	must(t, err)
	must(t, store.Delete(t.Context(), m.Data))
	h.forget()
	again, err := b.Registry(t.Context(), RegistryOptions{Reference: ref})
	must(t, err)
	if h.fetched(layerDigest(t, second, 0)) != 1 || again.Layers[0].Digest != got.Layers[0].Digest {
		t.Errorf("a layer without its data was taken for whole")
	}
	// Notes go with their layers.
	b.Forget(got.Layers)
	b.Forget(third.Layers)
	_, err = b.Collect(t.Context(), nil)
	must(t, err)
	h.forget()
	_, err = b.Registry(t.Context(), RegistryOptions{Reference: ref})
	must(t, err)
	if h.fetched(layerDigest(t, second, 0)) != 1 {
		t.Error("a collected layer was taken for present")
	}
}

func TestAHundredEqualImportsAreOneFetch(t *testing.T) {
	all := make(chan struct{})
	h := newHub(t, func(w http.ResponseWriter, r *http.Request, next http.Handler) {
		if strings.Contains(r.URL.Path, "/blobs/") {
			<-all
		}
		next.ServeHTTP(w, r)
	})
	b, _ := hasty(t)
	img := imageOf(t, v1.Config{}, makeTar(t, ent{name: "f", body: noise(100_000)}))
	ref := h.push(t, "f:1", img)
	var wg sync.WaitGroup
	for range 100 {
		wg.Go(func() {
			if _, err := b.Registry(t.Context(), RegistryOptions{Reference: ref}); err != nil {
				t.Error(err)
			}
		})
	}
	// All of them wait for the one flight before the registry gives anything away.
	for joined := 0; joined < 100; {
		b.mu.Lock()
		joined = 0
		for _, f := range b.flights {
			joined += f.waiters
		}
		b.mu.Unlock()
		runtime.Gosched()
	}
	close(all)
	wg.Wait()
	if n := h.fetched(layerDigest(t, img, 0)); n != 1 {
		t.Errorf("fetched %d times", n)
	}
}

func TestTheImageOfAnIndexIsTheOneThatRunsHere(t *testing.T) {
	h := newHub(t, nil)
	b, _ := hasty(t)
	mine := imageOf(t, v1.Config{Cmd: []string{"mine"}}, makeTar(t, ent{name: "mine", body: "x"}))
	foreign := imageOf(t, v1.Config{Cmd: []string{"other"}}, makeTar(t, ent{name: "other", body: "x"}))
	index := func(with ...mutate.IndexAddendum) v1.ImageIndex {
		return mutate.AppendManifests(empty.Index, with...)
	}
	at := func(img v1.Image, os, arch, variant string) mutate.IndexAddendum {
		return mutate.IndexAddendum{Add: img, Descriptor: v1.Descriptor{Platform: &v1.Platform{OS: os, Architecture: arch, Variant: variant}}}
	}
	ref := h.push(t, "multi:1", index(at(foreign, "linux", "vax", ""), at(foreign, "unknown", "unknown", ""),
		at(mine, "linux", runtime.GOARCH, "")))
	for _, platform := range []string{"", "linux/" + runtime.GOARCH} {
		got, err := b.Registry(t.Context(), RegistryOptions{Reference: ref, Platform: platform})
		must(t, err)
		if !slices.Equal(got.Config.Cmd, []string{"mine"}) {
			t.Errorf("platform %q: %+v", platform, got)
		}
	}
	// Inside another index.
	nested := mutate.AppendManifests(empty.Index, mutate.IndexAddendum{Add: index(at(mine, "linux", runtime.GOARCH, ""))})
	if _, err := b.Registry(t.Context(), RegistryOptions{Reference: h.push(t, "nested:1", nested)}); err != nil {
		t.Errorf("an index in an index: %v", err)
	}
	for _, tc := range []struct {
		name, platform string
		ref            string
		says           []string
	}{
		{
			"none for this machine", "", h.push(t, "far:1", index(at(foreign, "linux", "vax", ""), at(foreign, "unknown", "unknown", ""))),
			[]string{"no image for linux/" + runtime.GOARCH, "(it has: linux/vax)"},
		},
		{"another machine's", "linux/vax", ref, []string{"do not run on this node", "linux/" + runtime.GOARCH}},
		{"one image for another machine", "", h.push(t, "vax:1", vax(t, foreign)), []string{"is for linux/vax"}},
	} {
		_, err := b.Registry(t.Context(), RegistryOptions{Reference: tc.ref, Platform: tc.platform})
		for _, want := range tc.says {
			if !errors.Is(err, errdefs.FailedPrecondition) || !strings.Contains(fmt.Sprint(err), want) {
				t.Errorf("%s: %v, want %q", tc.name, err, want)
			}
		}
	}
}

func vax(t *testing.T, img v1.Image) v1.Image {
	t.Helper()
	cf, err := img.ConfigFile()
	must(t, err)
	cf = cf.DeepCopy()
	cf.Architecture = "vax"
	img, err = mutate.ConfigFile(img, cf)
	must(t, err)
	return img
}

func TestCredentialsAreShownToTheRegistryAlone(t *testing.T) {
	var seen sync.Map // Authorization headers by host
	cdn := newHub(t, nil)
	cdn.before = func(w http.ResponseWriter, r *http.Request, next http.Handler) {
		seen.Store("cdn", r.Header.Get("Authorization"))
		next.ServeHTTP(w, r)
	}
	img := imageOf(t, v1.Config{}, makeTar(t, ent{name: "f", body: noise(10_000)}))
	cdn.push(t, "private/app:1", img)
	layer := layerDigest(t, img, 0)
	var tokens atomic.Int64
	h := newHub(t, nil)
	h.push(t, "private/app:1", img)
	h.push(t, "basic/app:1", img)
	bearer := func(w http.ResponseWriter, r *http.Request, next http.Handler) {
		switch user, password, _ := r.BasicAuth(); {
		case r.URL.Path == "/token" && (user != "me" || password != "s3cret"):
			http.Error(w, `{"details":"no"}`, http.StatusUnauthorized)
		case r.URL.Path == "/token":
			if s := r.URL.Query().Get("scope"); !strings.Contains(s, "private/app:pull") {
				t.Errorf("scope %q", s)
			}
			_, _ = fmt.Fprintf(w, `{"token":"t%d"}`, tokens.Add(1))
		case strings.HasPrefix(r.Header.Get("Authorization"), "Bearer t"), r.Header.Get("Authorization") == "Bearer given":
			if strings.HasSuffix(r.URL.Path, layer) {
				http.Redirect(w, r, cdn.URL+r.URL.Path, http.StatusTemporaryRedirect)
				return
			}
			next.ServeHTTP(w, r)
		default:
			w.Header().Set("WWW-Authenticate", fmt.Sprintf(`Bearer realm="%s/token",service="hub"`, h.URL))
			http.Error(w, `{"errors":[{"code":"UNAUTHORIZED"}]}`, http.StatusUnauthorized)
		}
	}
	basic := func(w http.ResponseWriter, r *http.Request, next http.Handler) {
		if user, password, _ := r.BasicAuth(); user != "me" || password != "s3cret" {
			w.Header().Set("WWW-Authenticate", `Basic realm="hub"`)
			http.Error(w, `{"errors":[{"code":"UNAUTHORIZED"}]}`, http.StatusUnauthorized)
			return
		}
		next.ServeHTTP(w, r)
	}
	var said bytes.Buffer
	for _, kind := range []struct {
		repo   string
		before func(http.ResponseWriter, *http.Request, http.Handler)
	}{{"private/app:1", bearer}, {"basic/app:1", basic}} {
		h.before = kind.before
		for _, tc := range []struct {
			name string
			opts RegistryOptions
			says string // "" for success
		}{
			{"nobody", RegistryOptions{}, "asks for credentials"},
			{"a wrong password", RegistryOptions{Username: "me", Password: "wr0ng"}, "refuses these credentials"},
			{"the right one", RegistryOptions{Username: "me", Password: "s3cret"}, ""},
		} {
			b, _ := hasty(t)
			b.log = slog.New(slog.NewTextHandler(&said, &slog.HandlerOptions{Level: slog.LevelDebug}))
			tc.opts.Reference = h.host + "/" + kind.repo
			_, err := b.Registry(t.Context(), tc.opts)
			switch {
			case tc.says == "" && err != nil:
				t.Errorf("%s, %s: %v", kind.repo, tc.name, err)
			case tc.says != "" && (!errors.Is(err, errdefs.Denied) || !strings.Contains(err.Error(), tc.says)):
				t.Errorf("%s, %s: %v, want %q", kind.repo, tc.name, err, tc.says)
			}
			if strings.Contains(fmt.Sprintf("%+v", err), "wr0ng") {
				t.Errorf("%s: the error tells the password: %+v", tc.name, err)
			}
			mustHoldNoSecret(t, b, "s3cret", "wr0ng")
		}
	}
	if auth, ok := seen.Load("cdn"); !ok || auth != "" {
		t.Errorf("the place that the registry leads to saw %q (asked: %t)", auth, ok)
	}
	if strings.Contains(said.String(), "s3cret") {
		t.Errorf("log: %s", said.String())
	}
	h.before = bearer
	b, _ := hasty(t)
	if _, err := b.Registry(t.Context(), RegistryOptions{Reference: h.host + "/private/app:1", Token: "given"}); err != nil {
		t.Errorf("a bearer token: %v", err)
	}
}

// mustHoldNoSecret looks through all files of a builder.
func mustHoldNoSecret(t *testing.T, b *Builder, secrets ...string) {
	t.Helper()
	for path, doc := range allFiles(t, b.dir) {
		for _, s := range secrets {
			if bytes.Contains(doc, []byte(s)) {
				t.Errorf("%s holds a password", path)
			}
		}
	}
}

func TestOneCallersCredentialsDoNotServeAnother(t *testing.T) {
	enter := make(chan struct{})
	h := newHub(t, nil)
	img := imageOf(t, v1.Config{}, makeTar(t, ent{name: "f", body: "f"}))
	ref := h.push(t, "f:1", img)
	h.before = func(w http.ResponseWriter, r *http.Request, next http.Handler) {
		if user, _, _ := r.BasicAuth(); user != "me" {
			w.Header().Set("WWW-Authenticate", `Basic realm="hub"`)
			w.WriteHeader(http.StatusUnauthorized)
			return
		}
		if strings.Contains(r.URL.Path, "/blobs/") {
			<-enter
		}
		next.ServeHTTP(w, r)
	}
	b, _ := hasty(t)
	done := make(chan error, 1)
	go func() {
		_, err := b.Registry(t.Context(), RegistryOptions{Reference: ref, Username: "me", Password: "x"})
		done <- err
	}()
	_, err := b.Registry(t.Context(), RegistryOptions{Reference: ref, Username: "you", Password: "x"})
	if !errors.Is(err, errdefs.Denied) {
		t.Errorf("another's import let in: %v", err)
	}
	close(enter)
	must(t, <-done)
}

// breaker cuts the first answers with a layer off after some bytes.
func breaker(layer string, times int, ranges bool) (func(http.ResponseWriter, *http.Request, http.Handler), *atomic.Int64) {
	var asked atomic.Int64
	return func(w http.ResponseWriter, r *http.Request, next http.Handler) {
		if !strings.HasSuffix(r.URL.Path, layer) {
			next.ServeHTTP(w, r)
			return
		}
		n := asked.Add(1)
		rec := httptest.NewRecorder()
		plain := r.Clone(r.Context())
		plain.Header.Del("Range")
		next.ServeHTTP(rec, plain)
		all := rec.Body.Bytes()
		from := 0
		if rg := r.Header.Get("Range"); ranges && rg != "" {
			from, _ = strconv.Atoi(strings.TrimSuffix(strings.TrimPrefix(rg, "bytes="), "-"))
			w.Header().Set("Content-Range", fmt.Sprintf("bytes %d-%d/%d", from, len(all)-1, len(all)))
		}
		rest := all[from:]
		w.Header().Set("Content-Length", strconv.Itoa(len(rest)))
		if from > 0 {
			w.WriteHeader(http.StatusPartialContent)
		}
		if n <= int64(times) {
			rest = rest[:min(len(rest), 30_000)]
		}
		_, _ = w.Write(rest)
		if n <= int64(times) {
			panic(http.ErrAbortHandler) // cuts the connection
		}
	}, &asked
}

func TestABrokenDownloadGoesOn(t *testing.T) {
	for _, ranges := range []bool{true, false} {
		h := newHub(t, nil)
		img := imageOf(t, v1.Config{}, makeTar(t, ent{name: "f", body: noise(400_000)}))
		ref := h.push(t, "f:1", img)
		times := 8
		if !ranges {
			times = 3 // each begins anew: nothing moves on
		}
		var asked *atomic.Int64
		h.before, asked = breaker(layerDigest(t, img, 0), times, ranges)
		b, _ := hasty(t)
		if _, err := b.Registry(t.Context(), RegistryOptions{Reference: ref}); err != nil {
			t.Errorf("ranges %t: %v", ranges, err)
		}
		if n := asked.Load(); n != int64(times)+1 {
			t.Errorf("ranges %t: asked %d times", ranges, n)
		}
		noTemps(t, b)
	}
	// One that never comes is given up, and may be tried again.
	h := newHub(t, nil)
	img := imageOf(t, v1.Config{}, makeTar(t, ent{name: "f", body: noise(400_000)}))
	ref := h.push(t, "f:1", img)
	h.before, _ = breaker(layerDigest(t, img, 0), 1000, false)
	b, store := hasty(t)
	_, err := b.Registry(t.Context(), RegistryOptions{Reference: ref})
	if !errors.Is(err, errdefs.Unavailable) || !errdefs.From(err).Retryable() {
		t.Errorf("a download that never ends: %v", err)
	}
	noTemps(t, b)
	for d := range store.All(t.Context()) {
		t.Errorf("left a blob %s", d)
	}
}

func TestABrokenImportThatNobodyWaitsForEnds(t *testing.T) {
	h := newHub(t, nil)
	img := imageOf(t, v1.Config{}, makeTar(t, ent{name: "f", body: noise(400_000)}))
	ref := h.push(t, "f:1", img)
	asked := make(chan struct{}, 10)
	h.before = func(w http.ResponseWriter, r *http.Request, next http.Handler) {
		if strings.Contains(r.URL.Path, layerDigest(t, img, 0)) {
			asked <- struct{}{}
			<-r.Context().Done()
			return
		}
		next.ServeHTTP(w, r)
	}
	b, _ := hasty(t)
	ctx, stop := context.WithCancel(t.Context())
	go func() {
		<-asked
		stop()
	}()
	if _, err := b.Registry(ctx, RegistryOptions{Reference: ref}); !errors.Is(err, context.Canceled) {
		t.Errorf("got %v", err)
	}
	noTemps(t, b)
}

func TestWhatARegistryRefusesIsSaidWithTheWayOut(t *testing.T) {
	status := func(code int, body string, header ...string) func(http.ResponseWriter, *http.Request, http.Handler) {
		return func(w http.ResponseWriter, r *http.Request, next http.Handler) {
			if r.URL.Path == "/v2/" {
				next.ServeHTTP(w, r)
				return
			}
			for i := 0; i+1 < len(header); i += 2 {
				w.Header().Set(header[i], header[i+1])
			}
			w.WriteHeader(code)
			_, _ = io.WriteString(w, body)
		}
	}
	manifest := func(media string, doc string) func(http.ResponseWriter, *http.Request, http.Handler) {
		return func(w http.ResponseWriter, r *http.Request, next http.Handler) {
			if !strings.Contains(r.URL.Path, "/manifests/") {
				next.ServeHTTP(w, r)
				return
			}
			w.Header().Set("Content-Type", media)
			_, _ = io.WriteString(w, doc)
		}
	}
	const oci = "application/vnd.oci.image.manifest.v1+json"
	for _, tc := range []struct {
		name      string
		before    func(http.ResponseWriter, *http.Request, http.Handler)
		kind      errdefs.Kind
		retryable bool
		says      []string
	}{
		{"no such repository", nil, errdefs.NotFound, false, []string{"no such", "Check repository and tag"}},
		{"no such tag", status(404, `{"errors":[{"code":"MANIFEST_UNKNOWN"}]}`), errdefs.NotFound, false, []string{"no such tag"}},
		{"forbidden", status(403, `{"errors":[{"code":"DENIED"}]}`), errdefs.Denied, false, []string{"forbids", "--username"}},
		{
			"too many requests", status(429, `{"errors":[{"code":"TOOMANYREQUESTS"}]}`, "Retry-After", "77"), errdefs.Exhausted, true,
			[]string{"its share", "give credentials"},
		},
		{"overloaded", status(503, "<html>"), errdefs.Unavailable, true, []string{"503 Service Unavailable"}},
		{"no registry", status(418, "tea"), errdefs.FailedPrecondition, false, []string{"418", "Check that it is a registry"}},
		{"a redirect to itself", func(w http.ResponseWriter, r *http.Request, next http.Handler) {
			if r.URL.Path == "/v2/" {
				next.ServeHTTP(w, r)
				return
			}
			http.Redirect(w, r, r.URL.Path, http.StatusFound)
		}, errdefs.FailedPrecondition, false, []string{"leads on"}},
		{"a redirect to a cloud's secrets", func(w http.ResponseWriter, r *http.Request, next http.Handler) {
			if r.URL.Path == "/v2/" {
				next.ServeHTTP(w, r)
				return
			}
			http.Redirect(w, r, "http://169.254.169.254/latest/meta-data", http.StatusFound)
		}, errdefs.Denied, false, []string{"no business with"}},
		{
			"schema 1", manifest(string(types.DockerManifestSchema1Signed), `{"schemaVersion":1,"name":"x","fsLayers":[]}`),
			errdefs.FailedPrecondition, false,
			[]string{"schema 1", "Docker of today"},
		},
		{"a manifest of 10 MB", manifest(oci, strings.Repeat(" ", 10<<20)), errdefs.Invalid, false, []string{"a manifest may have"}},
		{"a manifest that is none", manifest(oci, "<html>"), errdefs.Invalid, false, []string{"its manifest"}},
		{
			"a chart", manifest(oci, `{"schemaVersion":2,"config":{"mediaType":"application/vnd.cncf.helm.config.v1+json","digest":"`+
				digestOf(nil)+`","size":0},"layers":[{"mediaType":"application/vnd.cncf.helm.chart.content.v1.tar+gzip","digest":"`+digestOf(nil)+`","size":0}]}`),
			errdefs.Invalid, false,
			[]string{"no file tree"},
		},
		{
			"a foreign layer", manifest(oci, `{"schemaVersion":2,"config":{"digest":"`+digestOf(nil)+`","size":0},"layers":[{"mediaType":"`+
				string(types.DockerForeignLayer)+`","digest":"`+digestOf(nil)+`","size":0,"urls":["http://elsewhere/"]}]}`),
			errdefs.FailedPrecondition, false,
			[]string{"may not be distributed"},
		},
		{"a layer of another size", manifest(oci, `{"schemaVersion":2,"config":{"digest":"`+digestOf(nil)+`","size":-5},"layers":[{"mediaType":"`+
			string(types.OCILayer)+`","digest":"`+digestOf(nil)+`","size":0}]}`), errdefs.Invalid, false, []string{"-5 bytes"}},
		{
			"65 layers", manifest(oci, `{"schemaVersion":2,"config":{"digest":"`+digestOf(nil)+`","size":0},"layers":[`+strings.TrimSuffix(
				strings.Repeat(`{"mediaType":"`+string(types.OCILayer)+`","digest":"`+digestOf(nil)+`","size":0},`, 65), ",")+`]}`),
			errdefs.Invalid, false,
			[]string{"65 layers"},
		},
	} {
		t.Run(tc.name, func(t *testing.T) {
			h := newHub(t, tc.before)
			b, store := hasty(t)
			_, err := b.Registry(t.Context(), RegistryOptions{Reference: h.host + "/team/app:1"})
			e := errdefs.From(err)
			if err == nil || e.Kind != tc.kind || e.Retryable() != tc.retryable {
				t.Fatalf("got %v, want kind %s", err, tc.kind)
			}
			for _, want := range append(tc.says, h.host+"/team/app:1") {
				if !strings.Contains(err.Error(), want) {
					t.Errorf("%q does not say %q", err, want)
				}
			}
			if tc.kind == errdefs.Exhausted && e.RetryAfter != 77*time.Second {
				t.Errorf("retry after %s", e.RetryAfter)
			}
			noTemps(t, b)
			for d := range store.All(t.Context()) {
				t.Errorf("left a blob %s", d)
			}
		})
	}
}

func TestWhatARegistryGivesIsVerified(t *testing.T) {
	good := imageOf(t, v1.Config{}, makeTar(t, ent{name: "f", body: noise(50_000)}))
	layer := layerDigest(t, good, 0)
	config, err := good.ConfigName()
	must(t, err)
	for name, tc := range map[string]struct {
		of     string
		change func([]byte) []byte
		says   string
	}{
		"a changed layer": {layer, func(b []byte) []byte { b[len(b)/2] ^= 1; return b }, "damaged"},
		"a longer layer":  {layer, func(b []byte) []byte { return append(b, 'x') }, "more than the"},
		"a changed config": {config.String(), func(b []byte) []byte {
			return bytes.Replace(b, []byte("linux"), []byte("LINUX"), 1)
		}, "damaged"},
		"a changed manifest": {"/manifests/1", func(b []byte) []byte { return append(b, '\n') }, "damaged"},
	} {
		t.Run(name, func(t *testing.T) {
			h := newHub(t, func(w http.ResponseWriter, r *http.Request, next http.Handler) {
				rec := httptest.NewRecorder()
				next.ServeHTTP(rec, r)
				b := rec.Body.Bytes()
				if strings.HasSuffix(r.URL.Path, tc.of) {
					b = tc.change(bytes.Clone(b))
				}
				for k, v := range rec.Header() {
					if k != "Content-Length" {
						w.Header()[k] = v
					}
				}
				w.WriteHeader(rec.Code)
				_, _ = w.Write(b)
			})
			b, store := hasty(t)
			_, err := b.Registry(t.Context(), RegistryOptions{Reference: h.push(t, "f:1", good)})
			if err == nil || !strings.Contains(err.Error(), tc.says) {
				t.Errorf("got %v, want %q", err, tc.says)
			}
			for d := range store.All(t.Context()) {
				t.Errorf("left a blob %s", d)
			}
		})
	}
}

func TestCertificatesAreVerifiedUnlessTheCallerSaysOtherwise(t *testing.T) {
	img := imageOf(t, v1.Config{}, makeTar(t, ent{name: "f", body: "f"}))
	h := newHub(t, nil)
	h.push(t, "f:1", img)
	tls := httptest.NewTLSServer(h.Config.Handler)
	t.Cleanup(tls.Close)
	b, _ := hasty(t)
	ref := strings.TrimPrefix(tls.URL, "https://") + "/f:1"
	_, err := b.Registry(t.Context(), RegistryOptions{Reference: ref})
	if !errors.Is(err, errdefs.FailedPrecondition) || !strings.Contains(err.Error(), "authority") ||
		!strings.Contains(err.Error(), "--insecure") {
		t.Errorf("got %v", err)
	}
	if _, err := b.Registry(t.Context(), RegistryOptions{Reference: ref, Insecure: true}); err != nil {
		t.Errorf("insecure: %v", err)
	}
}

func TestPlainHTTPIsForThisMachineOrWhoAsksForIt(t *testing.T) {
	for host, want := range map[string]bool{
		"localhost": true, "127.0.0.1": true, "127.8.8.8": true, "[::1]": true, "10.0.0.1": false, "192.168.1.1": false,
		"registry.local": false, "registry.example": false, "localhost.example": false,
	} {
		b, _ := memBuilder(t, nil)
		for _, insecure := range []bool{true, false} {
			opts := RegistryOptions{Reference: host + ":5000/f:1", Insecure: insecure}
			ref, _, err := opts.parse()
			must(t, err)
			if got := b.newRemote(ref, opts).plain; got != (want || insecure) {
				t.Errorf("%s, insecure %t: plain HTTP is %t", host, insecure, got)
			}
		}
	}
}

func TestNoRegistryAnswers(t *testing.T) {
	h := newHub(t, nil)
	h.Close()
	b, _ := hasty(t)
	_, err := b.Registry(t.Context(), RegistryOptions{Reference: h.host + "/f:1"})
	if !errors.Is(err, errdefs.Unavailable) || !strings.Contains(err.Error(), "connection refused") {
		t.Errorf("nobody there: %v", err)
	}
	for _, ref := range []string{"", "UPPER:1", "a b", "f:", "f@sha256:12", strings.Repeat("x", 300)} {
		_, err := b.Registry(t.Context(), RegistryOptions{Reference: ref})
		if !errors.Is(err, errdefs.Invalid) || errdefs.From(err).Field == "" {
			t.Errorf("%q: %v", ref, err)
		}
	}
	for _, platform := range []string{"linux", "a/b/c/d", "/"} {
		if _, err := b.Registry(t.Context(), RegistryOptions{Reference: "f:1", Platform: platform}); !errors.Is(err, errdefs.Invalid) {
			t.Errorf("platform %q: %v", platform, err)
		}
	}
}

func TestNamesAreReadAsDockerReadsThem(t *testing.T) {
	for in, want := range map[string][2]string{ // registry, familiar name
		"python":                                  {name.DefaultRegistry, "python:latest"},
		"python:3.11":                             {name.DefaultRegistry, "python:3.11"},
		dockerHub + "/python:3.11":                {name.DefaultRegistry, "python:3.11"},
		dockerHub + "/library/python":             {name.DefaultRegistry, "python:latest"},
		"team/tool":                               {name.DefaultRegistry, "team/tool:latest"},
		"localhost/tool":                          {"localhost", "localhost/tool:latest"},
		"registry:5000/team/image":                {"registry:5000", "registry:5000/team/image:latest"},
		"registry.example/a/b/c:v1.2":             {"registry.example", "registry.example/a/b/c:v1.2"},
		"[::1]:5000/a:1":                          {"[::1]:5000", "[::1]:5000/a:1"},
		"python@" + digestOf(nil):                 {name.DefaultRegistry, "python@" + digestOf(nil)},
		"python:3.11@" + digestOf(nil):            {name.DefaultRegistry, "python@" + digestOf(nil)},
		"other.example/x/y:z@" + digestOf(nil):    {"other.example", "other.example/x/y@" + digestOf(nil)},
		"third.example/distroless/static:nonroot": {"third.example", "third.example/distroless/static:nonroot"},
		"registry.example.com:443/img:2.0-a":      {"registry.example.com:443", "registry.example.com:443/img:2.0-a"},
	} {
		ref, _, err := RegistryOptions{Reference: in}.parse()
		if err != nil {
			t.Errorf("%s: %v", in, err)
			continue
		}
		if got := [2]string{ref.Context().RegistryStr(), familiar(ref)}; got != want {
			t.Errorf("%s: %v, want %v", in, got, want)
		}
	}
}

func TestARegistryMayNotLeadIntoTheNodesNetwork(t *testing.T) {
	ref, _, err := RegistryOptions{Reference: "registry.example/f:1"}.parse()
	must(t, err)
	b, _ := memBuilder(t, nil)
	for _, addr := range []string{"127.0.0.1:1", "10.0.0.1:1", "192.168.0.1:1", "[::1]:1", "[fd00::1]:1", "169.254.169.254:80", "[fe80::1]:1", "0.0.0.0:1"} {
		r := b.newRemote(ref, RegistryOptions{})
		if _, err := r.dial(t.Context(), "tcp", addr); !errors.Is(err, errAddress) {
			t.Errorf("%s: %v", addr, err)
		}
		// Once the registry itself has answered from inside, others there are as good, but never a link's own.
		r.private.Store(true)
		link := netip.MustParseAddrPort(addr).Addr().IsLinkLocalUnicast()
		ctx, stop := context.WithCancel(t.Context())
		if !link { // nobody may be there to refuse it
			ctx, stop = context.WithTimeout(ctx, 20*time.Millisecond)
		}
		if _, err := r.dial(ctx, "tcp", addr); link && !errors.Is(err, errAddress) || strings.HasPrefix(addr, "127") && errors.Is(err, errAddress) {
			t.Errorf("%s, from inside: %v", addr, err)
		}
		stop()
	}
}

func TestAnEmptyImageIsRefused(t *testing.T) {
	h := newHub(t, nil)
	b, _ := hasty(t)
	none, err := mutate.ConfigFile(empty.Image, &v1.ConfigFile{OS: "linux", Architecture: runtime.GOARCH})
	must(t, err)
	if _, err := b.Registry(t.Context(), RegistryOptions{Reference: h.push(t, "none:1", none)}); !errors.Is(err, errdefs.Invalid) ||
		!strings.Contains(err.Error(), "without layers") {
		t.Errorf("got %v", err)
	}
	// A layer that is none of gzip, zstd or plain tar.
	bad, err := mutate.AppendLayers(none, static.NewLayer([]byte("no tar at all"), types.OCILayer))
	must(t, err)
	if _, err := b.Registry(t.Context(), RegistryOptions{Reference: h.push(t, "bad:1", bad)}); !errors.Is(err, errdefs.Invalid) {
		t.Errorf("got %v", err)
	}
}

func TestDockerSaveOfToday(t *testing.T) {
	one, two := makeTar(t, ent{name: "one", body: "1"}), makeTar(t, ent{name: "two", body: "2"})
	// save is what Docker 25 and later writes: an OCI layout whose index has full names, and a manifest.json for older
	// readers.
	save := func(images ...ociImageSpec) []byte {
		files := map[string]string{}
		var heads []any
		var list []map[string]any
		for _, spec := range images {
			spec.pack = func(_ *testing.T, b []byte) []byte { return b }
			spec.media = "application/vnd.oci.image.layer.v1.tar"
			names := spec.names
			spec.names = nil
			spec.change = func(f map[string][]byte) {
				var idx struct{ Manifests []map[string]any }
				must(t, json.Unmarshal(f["index.json"], &idx))
				if len(names) == 0 {
					heads = append(heads, idx.Manifests[0])
				}
				for _, n := range names {
					m := map[string]any{}
					for k, v := range idx.Manifests[0] {
						m[k] = v
					}
					m["annotations"] = map[string]any{imageName: dockerHub + "/library/" + n, refName: n[strings.LastIndex(n, ":")+1:]}
					heads = append(heads, m)
				}
				for name, b := range f {
					files[name] = string(b)
				}
			}
			layoutTar(t, spec)
			list = append(list, map[string]any{"RepoTags": names})
		}
		doc, err := json.Marshal(map[string]any{"schemaVersion": 2, "manifests": heads})
		must(t, err)
		files["index.json"] = string(doc)
		doc, err = json.Marshal(list)
		must(t, err)
		files["manifest.json"] = string(doc)
		var ents []ent
		for name, body := range files {
			ents = append(ents, ent{name: name, body: body})
		}
		return makeTar(t, ents...)
	}
	a := ociImageSpec{layers: [][]byte{one}, names: []string{"app:1", "app:latest"}, config: map[string]any{"Cmd": []string{"one"}}}
	other := ociImageSpec{layers: [][]byte{two}, names: []string{"tool:1"}, config: map[string]any{"Cmd": []string{"two"}}}
	bare := ociImageSpec{layers: [][]byte{two}, config: map[string]any{"Cmd": []string{"bare"}}}
	for _, tc := range []struct {
		name      string
		archive   []byte
		reference string
		cmd, want string
		kind      errdefs.Kind
		says      string
	}{
		{"one image, two names", save(a), "", "one", "app:1", "", ""},
		{"by a short name", save(a, other), "app", "one", "app:latest", "", ""},
		{"by its tag", save(a, other), "tool:1", "two", "tool:1", "", ""},
		{"by its full name", save(a, other), dockerHub + "/library/app:1", "one", "app:1", "", ""},
		{"without a name", save(bare), "", "bare", "", "", ""},
		{"several", save(a, other), "", "", "", errdefs.Invalid, "app:1, app:latest, tool:1"},
		{"none of that name", save(a, other), "app:2", "", "", errdefs.NotFound, "It has: app:1, app:latest, tool:1"},
	} {
		b, _ := memBuilder(t, nil)
		got, err := b.Docker(t.Context(), bytes.NewReader(tc.archive), ArchiveOptions{Reference: tc.reference})
		switch {
		case tc.kind != "":
			if !errors.Is(err, tc.kind) || !strings.Contains(err.Error(), tc.says) {
				t.Errorf("%s: %v", tc.name, err)
			}
		case err != nil:
			t.Errorf("%s: %v", tc.name, err)
		case !slices.Equal(got.Config.Cmd, []string{tc.cmd}) || got.Name != tc.want || got.Layers[0].Source != "docker":
			t.Errorf("%s: %+v", tc.name, got)
		}
	}
}

func TestDockerSaveOfOldNamesImagesShortAndByID(t *testing.T) {
	var files []ent
	var list []map[string]any
	ids := map[string]string{}
	for _, n := range []string{"one", "two"} {
		l := makeTar(t, ent{name: n, body: n})
		config, err := json.Marshal(map[string]any{
			"architecture": runtime.GOARCH, "os": "linux", "config": map[string]any{"Cmd": []string{n}},
			"rootfs": map[string]any{"type": "layers", "diff_ids": []string{digestOf(l)}},
		})
		must(t, err)
		id := digestOf(config)[7:]
		ids[n] = id
		files = append(files, ent{name: id + ".json", body: string(config)}, ent{name: n + "/layer.tar", body: string(l)})
		list = append(list, map[string]any{"Config": id + ".json", "RepoTags": []string{n + ":latest"}, "Layers": []string{n + "/layer.tar"}})
	}
	doc, err := json.Marshal(list)
	must(t, err)
	archive := makeTar(t, append(files, ent{name: "manifest.json", body: string(doc)})...)
	for reference, want := range map[string]string{
		"one": "one", "two:latest": "two", dockerHub + "/library/two": "two", ids["one"][:12]: "one", "sha256:" + ids["two"]: "two",
	} {
		b, _ := memBuilder(t, nil)
		got, err := b.Docker(t.Context(), bytes.NewReader(archive), ArchiveOptions{Reference: reference})
		if err != nil || !slices.Equal(got.Config.Cmd, []string{want}) {
			t.Errorf("%s: %+v, %v", reference, got, err)
		}
	}
}
