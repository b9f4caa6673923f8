package upstream

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"log"
	"math/rand/v2"
	"net/http"
	"net/http/httptest"
	"net/url"
	"os"
	"path/filepath"
	"strings"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	"github.com/sandsea/sandsea/api/errdefs"
	"github.com/sandsea/sandsea/internal/testkit/leak"
)

func TestMain(m *testing.M) { os.Exit(leak.Main(m)) }

// client never waits between tries.
func client(t *testing.T, rt http.RoundTripper, u Upstream) *Client {
	if rt == nil {
		tr := &http.Transport{}
		t.Cleanup(tr.CloseIdleConnections)
		rt = tr
	}
	c := NewClient(rt, u)
	c.pause = func(ctx context.Context, _ time.Duration) error { return context.Cause(ctx) }
	return c
}

// quiet swallows what a server says of connections that a test breaks.
func quiet() *log.Logger { return log.New(io.Discard, "", 0) }

func serve(t *testing.T, h http.HandlerFunc) *httptest.Server {
	s := httptest.NewServer(h)
	t.Cleanup(s.Close)
	return s
}

func read(t *testing.T, c *Client, url string) (string, error) {
	t.Helper()
	resp, err := c.Get(t.Context(), url, nil)
	if err != nil {
		return "", err
	}
	defer resp.Body.Close()
	b, err := io.ReadAll(resp.Body)
	return string(b), err
}

func TestCredentialsGoToTheirOwnOriginAndPathOnly(t *testing.T) {
	other := serve(t, func(w http.ResponseWriter, r *http.Request) {
		fmt.Fprintf(w, "other %q", r.Header.Get("Authorization"))
	})
	own := serve(t, func(w http.ResponseWriter, r *http.Request) {
		switch r.URL.Path {
		case "/r/away":
			http.Redirect(w, r, other.URL+"/file", http.StatusFound)
		case "/r/stay":
			http.Redirect(w, r, "/r/file", http.StatusMovedPermanently)
		case "/r/user":
			http.Redirect(w, r, strings.Replace(other.URL, "://", "://evil:secret@", 1), http.StatusFound)
		case "/r/loop":
			http.Redirect(w, r, "/r/loop", http.StatusFound)
		case "/r/odd":
			w.Header().Set("Location", "file:///etc/passwd")
			w.WriteHeader(http.StatusFound)
		default:
			fmt.Fprintf(w, "own %q", r.Header.Get("Authorization"))
		}
	})
	c := client(t, nil, Upstream{Credentials: []Credential{{Origin: own.URL, Path: "/r/", Header: "Authorization", Value: "Bearer x"}}})
	for path, want := range map[string]string{
		"/r/file": `own "Bearer x"`, "/r": `own "Bearer x"`, "/rest": `own ""`, "/": `own ""`,
		"/r/away": `other ""`, "/r/stay": `own "Bearer x"`, "/r/user": `other ""`,
	} {
		if got, err := read(t, c, own.URL+path); err != nil || got != want {
			t.Errorf("%s: %q, %v; want %q", path, got, err, want)
		}
	}
	for _, path := range []string{"/r/loop", "/r/odd"} {
		if _, err := read(t, c, own.URL+path); !errors.Is(err, errdefs.Denied) {
			t.Errorf("%s: %v", path, err)
		}
	}
}

func TestOfSeveralCredentialsOfAHostTheNearestIsSent(t *testing.T) {
	own := serve(t, func(w http.ResponseWriter, r *http.Request) { fmt.Fprint(w, r.Header.Get("Authorization")) })
	var u Upstream
	for _, repo := range []string{"a", "b"} {
		u.add(strings.Replace(own.URL, "://", "://"+repo+":secret@", 1) + "/repository/" + repo + "/simple/")
	}
	u.Credentials = append(u.Credentials, parseNpmrc(strings.NewReplacer("HOST", strings.TrimPrefix(own.URL, "http:")).Replace(
		"HOST/npm/private/:_authToken=private\nHOST/npm/:_authToken=all\n"), nil)...)
	c := client(t, nil, u)
	a, b := Basic("", "", "a", "secret").Value, Basic("", "", "b", "secret").Value
	for path, want := range map[string]string{
		"/repository/a/simple/x/": a, "/repository/b/simple/x/": b, "/repository/a/files/x.whl": a, "/repository/b/files/x.whl": b,
		"/npm/private/x": "Bearer private", "/npm/x": "Bearer all",
	} {
		if got, err := read(t, c, own.URL+path); err != nil || got != want {
			t.Errorf("%s: %q, %v; want %q", path, got, err, want)
		}
	}
	pass := filepath.Join(t.TempDir(), "pass")
	if err := os.WriteFile(pass, []byte("mine"), 0o600); err != nil {
		t.Fatal(err)
	}
	u, err := Setting{User: "me", PasswordFile: pass}.apply("pypi", u)
	if err != nil {
		t.Fatal(err)
	}
	if got, err := read(t, client(t, nil, u), own.URL+"/repository/a/simple/x/"); err != nil || got != Basic("", "", "me", "mine").Value {
		t.Errorf("the operator's own: %q, %v", got, err)
	}
}

func TestARedirectFromHTTPSToHTTPIsNotFollowed(t *testing.T) {
	plain := serve(t, func(w http.ResponseWriter, _ *http.Request) { fmt.Fprint(w, "plain") })
	tls := httptest.NewTLSServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) { http.Redirect(w, r, plain.URL, http.StatusFound) }))
	t.Cleanup(tls.Close)
	if _, err := read(t, client(t, tls.Client().Transport, Upstream{}), tls.URL); !errors.Is(err, errdefs.Denied) {
		t.Errorf("got %v", err)
	}
}

func TestACertificateOfNobodyIsRefused(t *testing.T) {
	tls := httptest.NewUnstartedServer(http.HandlerFunc(func(w http.ResponseWriter, _ *http.Request) { fmt.Fprint(w, "x") }))
	tls.Config.ErrorLog = quiet()
	tls.StartTLS()
	t.Cleanup(tls.Close)
	if _, err := read(t, client(t, nil, Upstream{}), tls.URL); !errors.Is(err, errdefs.Unavailable) || !strings.Contains(err.Error(), "certificate") {
		t.Errorf("got %v", err)
	}
}

func TestPassingFailuresAreTriedAgainAndAnswersAreNot(t *testing.T) {
	for _, tt := range []struct {
		answers []int
		want    int
		asked   int64
	}{
		{[]int{503, 200}, 200, 2},
		{[]int{429, 502, 200}, 200, 3},
		{[]int{504, 504, 504, 200}, 504, 3},
		{[]int{404, 200}, 404, 1},
		{[]int{500, 200}, 500, 1},
		{[]int{401, 200}, 401, 1},
		{[]int{0, 200}, 200, 2}, // the connection breaks
	} {
		var n atomic.Int64
		s := serve(t, func(w http.ResponseWriter, _ *http.Request) {
			status := tt.answers[n.Add(1)-1]
			if status == 0 {
				panic(http.ErrAbortHandler)
			}
			w.Header().Set("Retry-After", "3600")
			w.WriteHeader(status)
		})
		resp, err := client(t, nil, Upstream{}).Get(t.Context(), s.URL, nil)
		if err != nil {
			t.Errorf("%v: %v", tt.answers, err)
			continue
		}
		resp.Body.Close()
		if resp.StatusCode != tt.want || n.Load() != tt.asked {
			t.Errorf("%v: %d after %d requests, want %d after %d", tt.answers, resp.StatusCode, n.Load(), tt.want, tt.asked)
		}
	}
	if _, err := read(t, client(t, nil, Upstream{}), "http://127.0.0.1:1/"); !errors.Is(err, errdefs.Unavailable) {
		t.Errorf("nobody there: %v", err)
	}
}

// flaky serves data, breaking the connection after a step of bytes each time.
type flaky struct {
	data    []byte
	step    int
	tag     func(try int64) string
	noRange bool
	tries   atomic.Int64
}

func (f *flaky) ServeHTTP(w http.ResponseWriter, r *http.Request) {
	try := f.tries.Add(1)
	w.Header().Set("ETag", f.tag(try))
	off := 0
	if rng := r.Header.Get("Range"); rng != "" && !f.noRange && r.Header.Get("If-Range") == f.tag(try) {
		_, _ = fmt.Sscanf(rng, "bytes=%d-", &off)
		w.Header().Set("Content-Range", fmt.Sprintf("bytes %d-%d/%d", off, len(f.data)-1, len(f.data)))
	}
	w.Header().Set("Content-Length", fmt.Sprint(len(f.data)-off))
	if off > 0 {
		w.WriteHeader(http.StatusPartialContent)
	}
	end := min(off+f.step, len(f.data))
	_, _ = w.Write(f.data[off:end])
	if end < len(f.data) {
		_ = http.NewResponseController(w).Flush()
		panic(http.ErrAbortHandler)
	}
}

func TestABrokenBodyIsResumedIfItsETagIsTheSame(t *testing.T) {
	data := make([]byte, 500_000)
	for i := range data {
		data[i] = byte(rand.Uint32())
	}
	strong := func(int64) string { return `"v1"` }
	for name, tt := range map[string]struct {
		f    *flaky
		want bool
	}{
		"resumes many times":    {&flaky{step: 60_000, tag: strong}, true},
		"whole at once":         {&flaky{step: 1 << 20, tag: strong}, true},
		"another object by now": {&flaky{step: 60_000, tag: func(n int64) string { return fmt.Sprintf(`"v%d"`, n) }}, false},
		"a weak tag":            {&flaky{step: 60_000, tag: func(int64) string { return `W/"v1"` }}, false},
		"no ranges":             {&flaky{step: 60_000, tag: strong, noRange: true}, false},
		"never a byte any more": {&flaky{step: 0, tag: strong}, false},
		"no tag":                {&flaky{step: 60_000, tag: func(int64) string { return "" }}, false},
	} {
		t.Run(name, func(t *testing.T) {
			tt.f.data = data
			s := httptest.NewUnstartedServer(tt.f)
			s.Config.ErrorLog = quiet()
			s.Start()
			t.Cleanup(s.Close)
			c := client(t, nil, Upstream{})
			got, err := read(t, c, s.URL)
			if tt.want && (err != nil || !bytes.Equal([]byte(got), data) || c.Received() != int64(len(data))) {
				t.Errorf("%d bytes, %d received, %v", len(got), c.Received(), err)
			}
			if !tt.want && (err == nil || errdefs.KindOf(err) != errdefs.Unavailable) {
				t.Errorf("%d bytes, %v", len(got), err)
			}
		})
	}
}

type roundTrip func(*http.Request) (*http.Response, error)

func (f roundTrip) RoundTrip(r *http.Request) (*http.Response, error) { return f(r) }

func TestAnUpstreamThatHangsIsGivenUp(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		tries := 0
		c := NewClient(roundTrip(func(r *http.Request) (*http.Response, error) {
			tries++
			<-r.Context().Done()
			return nil, r.Context().Err()
		}), Upstream{})
		start := time.Now()
		_, err := c.Get(t.Context(), "http://up.example/x", nil)
		if !errors.Is(err, errdefs.Unavailable) || time.Since(start) != headerLimit || tries != 1 {
			t.Errorf("after %s and %d tries: %v", time.Since(start), tries, err)
		}
		// It begins to answer, and then says nothing more.
		c = NewClient(roundTrip(func(r *http.Request) (*http.Response, error) {
			pr, pw := io.Pipe()
			go func() {
				_, _ = pw.Write([]byte("some"))
				<-r.Context().Done()
				_ = pw.CloseWithError(r.Context().Err())
			}()
			return &http.Response{StatusCode: http.StatusOK, ContentLength: 100, Header: http.Header{}, Body: pr, Request: r}, nil
		}), Upstream{})
		start = time.Now()
		got, err := read(t, c, "http://up.example/x")
		if got != "some" || !errors.Is(err, errdefs.Unavailable) || time.Since(start) != idleLimit {
			t.Errorf("after %s: %q, %v", time.Since(start), got, err)
		}
	})
}

func TestACallerWhoIsCancelledIsToldWhy(t *testing.T) {
	s := serve(t, func(w http.ResponseWriter, _ *http.Request) { w.WriteHeader(http.StatusServiceUnavailable) })
	why := errors.New("the sandbox is gone")
	ctx, cancel := context.WithCancelCause(t.Context())
	cancel(why)
	if _, err := client(t, nil, Upstream{}).Get(ctx, s.URL, nil); !errors.Is(err, why) {
		t.Errorf("got %v", err)
	}
}

func TestOrigins(t *testing.T) {
	for raw, want := range map[string]string{
		"HTTPS://A.Example:443/x": "https://a.example", "http://a.example:80": "http://a.example", "https://a.example:80/": "https://a.example:80",
		"http://[::1]:8080/": "http://[::1]:8080",
	} {
		u, err := url.Parse(raw)
		if err != nil || origin(u) != want {
			t.Errorf("%s: %q, %v", raw, origin(u), err)
		}
	}
}
