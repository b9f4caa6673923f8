package cache

import (
	"bytes"
	"context"
	"crypto/sha1"
	"crypto/sha256"
	"encoding/hex"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"log/slog"
	"math/rand/v2"
	"net/http"
	"net/http/httptest"
	"os"
	"path/filepath"
	"runtime"
	"strconv"
	"strings"
	"sync"
	"sync/atomic"
	"syscall"
	"testing"
	"testing/synctest"
	"time"

	"github.com/google/go-cmp/cmp"

	"github.com/sandsea/sandsea/api/errdefs"
	"github.com/sandsea/sandsea/internal/testkit/leak"
	"github.com/sandsea/sandsea/internal/testkit/wait"
)

func TestMain(m *testing.M) { os.Exit(leak.Main(m)) }

func open(t testing.TB, cfg Config) *Cache {
	t.Helper()
	if cfg.Dir == "" {
		cfg.Dir = filepath.Join(t.TempDir(), "cache")
	}
	cfg.Log = slog.New(slog.DiscardHandler)
	c, err := Open(cfg)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if err := c.Close(); err != nil {
			t.Error(err)
		}
	})
	return c
}

// answer makes an upstream's answer.
func answer(status int, body string, header ...string) *http.Response {
	r := &http.Response{StatusCode: status, Header: http.Header{}, ContentLength: int64(len(body)), Body: io.NopCloser(strings.NewReader(body))}
	for i := 0; i < len(header); i += 2 {
		r.Header.Set(header[i], header[i+1])
	}
	return r
}

// always answers the same and counts.
func always(n *atomic.Int64, status int, body string, header ...string) Fetch {
	return func(context.Context, Validators) (*http.Response, error) {
		n.Add(1)
		return answer(status, body, header...), nil
	}
}

func sum(s string) Digest {
	h := sha256.Sum256([]byte(s))
	return SHA256(hex.EncodeToString(h[:]))
}

// get returns the bytes of a Get.
func get(t testing.TB, c *Cache, key string, o Options, f Fetch) (string, Source, error) {
	t.Helper()
	obj, src, err := c.Get(t.Context(), key, o, f)
	if err != nil {
		return "", src, err
	}
	defer func() { _ = obj.Close() }()
	b, err := obj.Bytes(t.Context())
	settle(t, c)
	return string(b), src, err
}

// settle waits until the cache has committed what its callers have already read.
func settle(t testing.TB, c *Cache) {
	t.Helper()
	wait.Until(t, 10*time.Second, func() bool {
		c.mu.Lock()
		defer c.mu.Unlock()
		return len(c.flights) == 0
	})
}

func mustGet(t testing.TB, c *Cache, key string, o Options, f Fetch, want string, from Source) {
	t.Helper()
	got, src, err := get(t, c, key, o, f)
	if err != nil || got != want || src != from {
		t.Fatalf("Get(%s) = %.40q from %s, %v; want %.40q from %s", key, got, src, err, want, from)
	}
}

func TestFiftyCallersAreServedByOneFetch(t *testing.T) {
	c := open(t, Config{})
	body := strings.Repeat("0123456789abcdef", 1<<16)
	var fetches, upstream atomic.Int64
	pr, pw := io.Pipe()
	fetch := func(context.Context, Validators) (*http.Response, error) {
		fetches.Add(1)
		r := answer(200, "")
		r.ContentLength, r.Body = int64(len(body)), pr
		return r, nil
	}
	var wg, boarded sync.WaitGroup
	boarded.Add(50)
	for range 50 {
		wg.Go(func() {
			o, src, err := c.Get(t.Context(), "k", Options{Digests: []Digest{sum(body)}}, fetch)
			boarded.Done()
			if err != nil {
				t.Error(err)
				return
			}
			defer func() { _ = o.Close() }()
			if src == FromUpstream {
				upstream.Add(1)
			}
			if b, err := o.Bytes(t.Context()); err != nil || string(b) != body {
				t.Errorf("got %d bytes, %v", len(b), err)
			}
		})
	}
	boarded.Wait()
	if _, err := io.WriteString(pw, body); err != nil {
		t.Fatal(err)
	}
	pw.Close()
	wg.Wait()
	settle(t, c)
	if fetches.Load() != 1 || upstream.Load() != 1 {
		t.Errorf("%d fetches, %d callers served from upstream; want 1 and 1", fetches.Load(), upstream.Load())
	}
	mustGet(t, c, "k", Options{}, nil, body, FromCache)
}

func TestBytesReachReadersWhileTheRestIsUnderWay(t *testing.T) {
	c := open(t, Config{})
	pr, pw := io.Pipe()
	fetch := func(context.Context, Validators) (*http.Response, error) {
		r := answer(200, "")
		r.ContentLength, r.Body = 10, pr
		return r, nil
	}
	srv := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		o, _, err := c.Get(r.Context(), "k", Options{}, fetch)
		if err != nil {
			http.Error(w, err.Error(), http.StatusInternalServerError)
			return
		}
		defer func() { _ = o.Close() }()
		if _, err := o.Serve(w, r); err != nil {
			panic(http.ErrAbortHandler)
		}
	}))
	defer srv.Close()
	go func() { _, _ = pw.Write([]byte("hello")) }()
	resp, err := http.Get(srv.URL)
	if err != nil {
		t.Fatal(err)
	}
	defer resp.Body.Close()
	b := make([]byte, 5)
	if _, err := io.ReadFull(resp.Body, b); err != nil || string(b) != "hello" {
		t.Fatalf("first bytes are %q, %v", b, err)
	}
	_, _ = pw.Write([]byte("world"))
	pw.Close()
	rest, err := io.ReadAll(resp.Body)
	if err != nil || string(rest) != "world" {
		t.Fatalf("rest is %q, %v", rest, err)
	}
}

func TestACallerWhoLeavesCancelsNothingForOthersAndTheLastEndsTheFetch(t *testing.T) {
	dir := filepath.Join(t.TempDir(), "cache")
	synctest.Test(t, func(t *testing.T) {
		c := open(t, Config{Dir: dir})
		gate := make(chan struct{})
		var ended atomic.Bool
		fetch := func(ctx context.Context, _ Validators) (*http.Response, error) {
			select {
			case <-gate:
				return answer(200, "body"), nil
			case <-ctx.Done():
				ended.Store(true)
				return nil, context.Cause(ctx)
			}
		}
		call := func(ctx context.Context) <-chan error {
			done := make(chan error, 1)
			go func() {
				o, _, err := c.Get(ctx, "k", Options{}, fetch)
				if err == nil {
					_, err = o.Bytes(ctx)
					_ = o.Close()
				}
				done <- err
			}()
			synctest.Wait()
			return done
		}
		first, leave := context.WithCancel(t.Context())
		a, b := call(first), call(t.Context())
		leave()
		if err := <-a; !errors.Is(err, context.Canceled) {
			t.Errorf("the caller who left got %v", err)
		}
		time.Sleep(10 * linger) // fake time
		close(gate)
		if err := <-b; err != nil {
			t.Errorf("the caller who stayed got %v", err)
		}
		gate = make(chan struct{})
		second, leave := context.WithCancel(t.Context())
		o, _, err := c.Get(second, "k", Options{}, fetch) // cached
		if err != nil {
			t.Fatal(err)
		}
		_ = o.Close()
		d := make(chan error, 1)
		go func() {
			_, _, err := c.Get(second, "other", Options{}, fetch)
			d <- err
		}()
		synctest.Wait()
		leave()
		<-d
		time.Sleep(linger - time.Millisecond)
		synctest.Wait()
		if ended.Load() {
			t.Error("the fetch ended before its time: a client that reconnects would start again")
		}
		time.Sleep(2 * time.Millisecond)
		synctest.Wait()
		if !ended.Load() {
			t.Error("a fetch that nobody waits for goes on")
		}
	})
}

func TestWrongBytesBreakTheTransferAndAreNeverServedAgain(t *testing.T) {
	for _, known := range []bool{true, false} {
		t.Run(fmt.Sprintf("length known %v", known), func(t *testing.T) {
			c := open(t, Config{})
			bad := strings.Repeat("x", 300_000) + "y"
			good := strings.Repeat("x", 300_000) + "z"
			var n atomic.Int64
			opts := Options{Digests: []Digest{sum(good)}}
			fetch := func(context.Context, Validators) (*http.Response, error) {
				body := good
				if n.Add(1) <= 2 {
					body = bad
				}
				r := answer(200, body)
				if !known {
					r.ContentLength = -1
				}
				return r, nil
			}
			_, _, err := get(t, c, "k", opts, fetch)
			if e, ok := errors.AsType[*DigestError](err); !ok || e.Want != sum(good) || !errors.Is(err, errdefs.DataLoss) {
				t.Fatalf("got %v", err)
			}
			told := make(chan error, 1)
			srv := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
				o, _, err := c.Get(r.Context(), "k", opts, fetch)
				if err != nil {
					http.Error(w, err.Error(), http.StatusBadGateway)
					return
				}
				defer func() { _ = o.Close() }()
				_, err = o.Serve(w, r)
				told <- err
				if err != nil {
					panic(http.ErrAbortHandler)
				}
			}))
			defer srv.Close()
			srv.Config.ErrorLog = slog.NewLogLogger(slog.DiscardHandler, slog.LevelError)
			// Depending on who is faster, the client sees an error's status, a body that ends too early, or no answer at all.
			if resp, err := http.Get(srv.URL); err == nil {
				b, err := io.ReadAll(resp.Body)
				resp.Body.Close()
				if err == nil && resp.StatusCode == http.StatusOK {
					t.Errorf("the client took %d wrong bytes for a whole answer", len(b))
				}
				if resp.StatusCode == http.StatusOK {
					if err := <-told; !errors.Is(err, errdefs.DataLoss) {
						t.Errorf("Serve told %v", err)
					}
				}
			}
			if s := c.Stats(); s.Bytes != 0 || s.Objects != 0 {
				t.Errorf("kept %+v", s)
			}
			mustGet(t, c, "k", opts, fetch, good, FromUpstream)
			mustGet(t, c, "k", opts, fetch, good, FromCache)
		})
	}
}

func TestAnEmptyAnswerIsVerifiedToo(t *testing.T) {
	c := open(t, Config{})
	ends := make(chan struct{})
	body := readerFunc(func([]byte) (int, error) {
		<-ends
		return 0, io.EOF
	})
	o, _, err := c.Get(t.Context(), "k", Options{Digests: []Digest{sum("something")}}, func(context.Context, Validators) (*http.Response, error) {
		r := answer(http.StatusOK, "")
		r.Body = io.NopCloser(body)
		return r, nil
	})
	if err != nil {
		t.Fatal(err)
	}
	defer func() { _ = o.Close() }()
	w := httptest.NewRecorder()
	told := make(chan error, 1)
	go func() {
		_, err := o.Serve(w, httptest.NewRequest(http.MethodGet, "/", nil))
		told <- err
	}()
	close(ends)
	if err := <-told; !errors.Is(err, errdefs.DataLoss) {
		t.Errorf("Serve told %v", err)
	}
}

type readerFunc func(p []byte) (int, error)

func (f readerFunc) Read(p []byte) (int, error) { return f(p) }

func TestAnObjectWithoutTheDigestExpectedNowIsFetchedAgain(t *testing.T) {
	c := open(t, Config{})
	var n atomic.Int64
	mustGet(t, c, "k", Options{}, always(&n, 200, "old"), "old", FromUpstream)
	s1 := sha1.Sum([]byte("old"))
	weak := Digest{Algorithm: "sha1", Hex: hex.EncodeToString(s1[:])}
	mustGet(t, c, "k", Options{Digests: []Digest{sum("old"), weak}}, nil, "old", FromCache)
	mustGet(t, c, "k", Options{Digests: []Digest{sum("new")}}, always(&n, 200, "new"), "new", FromUpstream)
	mustGet(t, c, "k", Options{}, nil, "new", FromCache)
}

func TestDigestsThatCannotBeCheckedAreRefused(t *testing.T) {
	c := open(t, Config{})
	var n atomic.Int64
	for _, d := range []Digest{{"crc32", "00000000"}, {"sha256", "zz"}, {"sha256", ""}, {"md5", strings.Repeat("A", 32)}} {
		if _, _, err := get(t, c, "k", Options{Digests: []Digest{d}}, always(&n, 200, "x")); !errors.Is(err, errdefs.Invalid) {
			t.Errorf("%+v: %v", d, err)
		}
	}
}

func TestListsAreConfirmedByTheirValidatorsAndStaleOnesAnswerForADeadUpstream(t *testing.T) {
	dir := filepath.Join(t.TempDir(), "cache")
	synctest.Test(t, func(t *testing.T) {
		c := open(t, Config{Dir: dir})
		opts := Options{Fresh: time.Minute, Stale: time.Hour}
		var n atomic.Int64
		var seen Validators
		mustGet(t, c, "list", opts, always(&n, 200, "v1", "ETag", `"1"`, "Last-Modified", "Mon, 02 Jan 2006 15:04:05 GMT"), "v1", FromUpstream)
		mustGet(t, c, "list", opts, nil, "v1", FromCache)
		time.Sleep(2 * time.Minute)
		confirm := func(_ context.Context, v Validators) (*http.Response, error) {
			seen = v
			return answer(304, ""), nil
		}
		mustGet(t, c, "list", opts, confirm, "v1", FromCache)
		if want := (Validators{`"1"`, "Mon, 02 Jan 2006 15:04:05 GMT"}); seen != want {
			t.Errorf("upstream was asked with %+v", seen)
		}
		mustGet(t, c, "list", opts, nil, "v1", FromCache) // fresh again

		time.Sleep(2 * time.Minute)
		failures := 0
		dead := func(context.Context, Validators) (*http.Response, error) {
			failures++
			return nil, errors.New("connection refused")
		}
		for _, f := range []Fetch{dead, dead, func(context.Context, Validators) (*http.Response, error) {
			failures++
			return answer(503, ""), nil
		}} {
			o, src, err := c.Get(t.Context(), "list", opts, f)
			if err != nil || src != FromCache || !o.Stale() {
				t.Fatalf("stale list: %s, %v", src, err)
			}
			_ = o.Close()
			time.Sleep(staleHold * 2 / 3)
		}
		if failures != 2 {
			t.Errorf("a dead upstream was asked %d times, want 2: not again at once", failures)
		}
		time.Sleep(time.Minute)
		short := func(context.Context, Validators) (*http.Response, error) {
			r := answer(200, "v2 is cut")
			r.ContentLength += 5
			return r, nil
		}
		mustGet(t, c, "list", opts, short, "v1", FromCache)
		time.Sleep(time.Hour)
		if _, _, err := get(t, c, "list", opts, dead); !errors.Is(err, errdefs.Unavailable) || !strings.Contains(err.Error(), "connection refused") {
			t.Errorf("a list past its bound: %v", err)
		}
		mustGet(t, c, "list", opts, always(&n, 200, "v3"), "v3", FromUpstream)
		time.Sleep(time.Minute)
		if _, _, err := get(t, c, "list", opts, always(&n, 404, "")); !errors.Is(err, errdefs.NotFound) {
			t.Errorf("a list that upstream removed: %v", err)
		}
		if c.Stats().Objects != 0 {
			t.Error("a list that upstream removed is kept")
		}
	})
}

func TestA404IsBelievedBriefly(t *testing.T) {
	dir := filepath.Join(t.TempDir(), "cache")
	synctest.Test(t, func(t *testing.T) {
		c := open(t, Config{Dir: dir})
		var n atomic.Int64
		for range 5 {
			if _, _, err := get(t, c, "k", Options{}, always(&n, 404, "no")); !errors.Is(err, errdefs.NotFound) {
				t.Fatal(err)
			}
		}
		if n.Load() != 1 {
			t.Errorf("asked %d times", n.Load())
		}
		time.Sleep(negativeFor)
		mustGet(t, c, "k", Options{}, always(&n, 200, "yes"), "yes", FromUpstream)
		for _, status := range []int{401, 403, 500} {
			if _, _, err := get(t, c, "f", Options{}, always(&n, status, "")); !errors.Is(err, errdefs.Unavailable) {
				t.Errorf("%d: %v", status, err)
			}
		}
		mustGet(t, c, "f", Options{}, always(&n, 200, "yes"), "yes", FromUpstream)
	})
}

func TestWhatIsNotThereTakesLittleMemoryHoweverLongItsName(t *testing.T) {
	c := open(t, Config{})
	heap := func() int64 {
		runtime.GC()
		var m runtime.MemStats
		runtime.ReadMemStats(&m)
		return int64(m.HeapAlloc)
	}
	before := heap()
	var n atomic.Int64
	for i := range 500 {
		if _, _, err := get(t, c, fmt.Sprint(i)+strings.Repeat("x", 60<<10), Options{}, always(&n, http.StatusNotFound, "")); !errors.Is(err, errdefs.NotFound) {
			t.Fatal(err)
		}
	}
	if grown := heap() - before; grown > 2<<20 {
		t.Errorf("500 names that are not there take %d bytes", grown)
	}
}

func TestTheBoundHoldsAndWhatWasUsedLongestAgoGoes(t *testing.T) {
	const size = 10_000
	c := open(t, Config{MaxBytes: 5 * (size + 1000)})
	var n atomic.Int64
	body := strings.Repeat("b", size)
	name := func(i int) string { return fmt.Sprint("k", i) }
	for i := range 5 {
		mustGet(t, c, name(i), Options{}, always(&n, 200, body), body, FromUpstream)
	}
	mustGet(t, c, name(0), Options{}, nil, body, FromCache)
	mustGet(t, c, name(5), Options{}, always(&n, 200, body), body, FromUpstream)
	mustGet(t, c, name(0), Options{}, nil, body, FromCache)
	mustGet(t, c, name(1), Options{}, always(&n, 200, body), body, FromUpstream) // was evicted
	s := c.Stats()
	if s.Evicted != 2 || s.Bytes > 5*(size+1000) {
		t.Errorf("stats %+v", s)
	}
	if got := onDisk(t, c.cfg.Dir); got != s.Bytes {
		t.Errorf("%d bytes on disk, %d counted", got, s.Bytes)
	}
	if _, _, err := get(t, c, "big", Options{}, always(&n, 200, strings.Repeat("x", 60_000))); !errors.Is(err, errdefs.Exhausted) {
		t.Errorf("an object larger than the cache: %v", err)
	}
	long := func(context.Context, Validators) (*http.Response, error) {
		r := answer(200, strings.Repeat("x", 3000))
		r.ContentLength = -1
		return r, nil
	}
	if _, _, err := get(t, c, "long", Options{MaxBytes: 2000}, long); !errors.Is(err, errdefs.Exhausted) {
		t.Errorf("an object larger than its limit: %v", err)
	}
	if got := onDisk(t, c.cfg.Dir); got != c.Stats().Bytes {
		t.Errorf("%d bytes on disk, %d counted", got, c.Stats().Bytes)
	}
}

func onDisk(t *testing.T, dir string) int64 {
	t.Helper()
	var n int64
	err := filepath.WalkDir(dir, func(_ string, d fs.DirEntry, err error) error {
		if err == nil && !d.IsDir() {
			var i fs.FileInfo
			if i, err = d.Info(); err == nil {
				n += i.Size()
			}
		}
		return err
	})
	if err != nil {
		t.Fatal(err)
	}
	return n
}

func TestManyCallersOfManyObjectsInASmallCache(t *testing.T) {
	const keys, size, most = 40, 20_000, 10 * 21_000
	c := open(t, Config{MaxBytes: most})
	body := func(k int) string { return strings.Repeat(fmt.Sprintf("%08d", k), size/8) }
	var wg sync.WaitGroup
	for w := range 8 {
		wg.Go(func() {
			rnd := rand.New(rand.NewPCG(uint64(w), 1))
			for range 150 {
				k := rnd.IntN(keys)
				ctx, leave := context.WithCancel(t.Context())
				fetch := func(context.Context, Validators) (*http.Response, error) {
					switch rnd := k % 7; rnd {
					case 3:
						return answer(404, ""), nil
					case 5:
						return answer(200, body(k+1)), nil // wrong bytes
					}
					return answer(200, body(k)), nil
				}
				if rnd.IntN(10) == 0 {
					leave()
				}
				o, _, err := c.Get(ctx, fmt.Sprint(k), Options{Digests: []Digest{sum(body(k))}}, fetch)
				var b []byte
				if err == nil {
					b, err = o.Bytes(ctx)
					_ = o.Close()
				}
				leave()
				switch {
				case err == nil && string(b) != body(k):
					t.Errorf("object %d has other bytes", k)
				case err != nil && k%7 != 3 && k%7 != 5 && ctx.Err() == nil && !errors.Is(err, errdefs.Exhausted):
					t.Errorf("object %d: %v", k, err)
				}
				if s := c.Stats(); s.Bytes > most+1000 {
					t.Errorf("%d bytes", s.Bytes)
				}
			}
		})
	}
	wg.Wait()
	settle(t, c)
	if s := c.Stats(); s.Evicted == 0 || s.Bytes != onDisk(t, c.cfg.Dir) {
		t.Errorf("stats %+v, %d bytes on disk", s, onDisk(t, c.cfg.Dir))
	}
}

func TestObjectsSurviveARestartAndWhatACrashLeftDoesNot(t *testing.T) {
	dir := filepath.Join(t.TempDir(), "cache")
	c := open(t, Config{Dir: dir})
	var n atomic.Int64
	for i := range 20 {
		b := fmt.Sprint("body ", i)
		mustGet(t, c, fmt.Sprint(i), Options{Digests: []Digest{sum(b)}}, always(&n, 200, b, "Content-Type", "text/x"), b, FromUpstream)
	}
	if err := c.Close(); err != nil {
		t.Fatal(err)
	}
	if _, _, err := c.Get(t.Context(), "0", Options{}, nil); !errors.Is(err, errdefs.Unavailable) {
		t.Errorf("a closed cache: %v", err)
	}
	if err := os.WriteFile(filepath.Join(dir, tempDir, "left"), []byte("half"), 0o600); err != nil {
		t.Fatal(err)
	}
	if err := os.WriteFile(filepath.Join(dir, objectsDir, "stray"), nil, 0o600); err != nil {
		t.Fatal(err)
	}
	// What a lost cache of the disk may leave of object 0: any part of it, or zeros.
	k := id(sha256.Sum256([]byte("0")))
	file := filepath.Join(dir, k.path())
	whole, err := os.ReadFile(file)
	if err != nil {
		t.Fatal(err)
	}
	var broken [][]byte
	for i := range whole {
		broken = append(broken, whole[:i])
	}
	broken = append(broken, make([]byte, len(whole)), append(bytes.Clone(whole), 0), append([]byte{0}, whole...))
	for _, b := range broken {
		if err := os.WriteFile(file, b, 0o600); err != nil {
			t.Fatal(err)
		}
		again, err := Open(Config{Dir: dir, Log: slog.New(slog.DiscardHandler)})
		if err != nil {
			t.Fatal(err)
		}
		if s := again.Stats(); s.Objects != 19 {
			t.Errorf("%d of %d bytes of an object: %d objects found, want 19", len(b), len(whole), s.Objects)
		}
		if err := again.Close(); err != nil {
			t.Fatal(err)
		}
	}
	c = open(t, Config{Dir: dir})
	if _, err := os.Stat(filepath.Join(dir, tempDir, "left")); !errors.Is(err, fs.ErrNotExist) {
		t.Errorf("a temporary file is left: %v", err)
	}
	for i := 1; i < 20; i++ {
		mustGet(t, c, fmt.Sprint(i), Options{}, nil, fmt.Sprint("body ", i), FromCache)
	}
	o, _, err := c.Get(t.Context(), "7", Options{}, nil)
	if err != nil {
		t.Fatal(err)
	}
	defer func() { _ = o.Close() }()
	m := o.Meta()
	if m.ContentType != "text/x" || m.Key != "7" || m.Digests["sha256"] != sum("body 7").Hex || m.Size != 6 {
		t.Errorf("metadata %+v", m)
	}
}

func TestTheOrderOfUseSurvivesARestart(t *testing.T) {
	dir := filepath.Join(t.TempDir(), "cache")
	var n atomic.Int64
	synctest.Test(t, func(t *testing.T) {
		c := open(t, Config{Dir: dir})
		for i := range 4 {
			mustGet(t, c, fmt.Sprint(i), Options{}, always(&n, 200, "body"), "body", FromUpstream)
			time.Sleep(2 * touchEvery)
		}
		mustGet(t, c, "0", Options{}, nil, "body", FromCache)
	})
	size := onDisk(t, dir) / 4
	c := open(t, Config{Dir: dir, MaxBytes: 2*size + size/2})
	mustGet(t, c, "0", Options{}, nil, "body", FromCache)
	mustGet(t, c, "3", Options{}, nil, "body", FromCache)
	if s := c.Stats(); s.Objects != 2 || s.Evicted != 2 {
		t.Errorf("stats %+v", s)
	}
}

func TestAnObjectWhoseFileIsSpoiledUnderARunningCacheIsFetchedAgain(t *testing.T) {
	c := open(t, Config{})
	var n atomic.Int64
	for _, spoil := range []func(string) error{os.Remove, func(p string) error { return os.Truncate(p, 3) }} {
		mustGet(t, c, "k", Options{}, always(&n, 200, "body"), "body", FromUpstream)
		k := id(sha256.Sum256([]byte("k")))
		if err := spoil(filepath.Join(c.cfg.Dir, k.path())); err != nil {
			t.Fatal(err)
		}
		mustGet(t, c, "k", Options{}, always(&n, 200, "body"), "body", FromUpstream)
		c.drop(c.entry(k))
	}
}

func TestAnObjectThatCannotBeOpenedForLackOfDescriptorsIsKept(t *testing.T) {
	c := open(t, Config{})
	var n atomic.Int64
	mustGet(t, c, "k", Options{}, always(&n, http.StatusOK, "body"), "body", FromUpstream)
	var old syscall.Rlimit
	if err := syscall.Getrlimit(syscall.RLIMIT_NOFILE, &old); err != nil {
		t.Fatal(err)
	}
	none := old
	none.Cur = 3 // nothing beside the standard ones can be opened
	if err := syscall.Setrlimit(syscall.RLIMIT_NOFILE, &none); err != nil {
		t.Fatal(err)
	}
	_, _, err := c.Get(t.Context(), "k", Options{}, always(&n, http.StatusOK, "body"))
	if err := syscall.Setrlimit(syscall.RLIMIT_NOFILE, &old); err != nil {
		t.Fatal(err)
	}
	if !errors.Is(err, errdefs.Exhausted) {
		t.Errorf("without descriptors: %v", err)
	}
	mustGet(t, c, "k", Options{}, always(&n, http.StatusOK, "body"), "body", FromCache)
}

func TestOfflineAnswersFromTheCacheOnlyWhateverTheAge(t *testing.T) {
	dir := filepath.Join(t.TempDir(), "cache")
	synctest.Test(t, func(t *testing.T) {
		c := open(t, Config{Dir: dir})
		var n atomic.Int64
		mustGet(t, c, "list", Options{Fresh: time.Minute}, always(&n, 200, "v1"), "v1", FromUpstream)
		if err := c.Close(); err != nil {
			t.Fatal(err)
		}
		time.Sleep(1000 * time.Hour)
		c = open(t, Config{Dir: dir, Offline: true})
		mustGet(t, c, "list", Options{Fresh: time.Minute, Digests: []Digest{sum("v1")}}, nil, "v1", FromCache)
		_, _, err := get(t, c, "missing", Options{}, nil)
		if !errors.Is(err, errdefs.Unavailable) || !strings.Contains(err.Error(), "offline") {
			t.Errorf("a missing object: %v", err)
		}
	})
}

func TestRangesOfWholeObjectsAndOfThoseUnderWay(t *testing.T) {
	c := open(t, Config{})
	body := make([]byte, 1<<20)
	for i := range body {
		body[i] = byte(rand.Uint32())
	}
	want := sum(string(body))
	step := make(chan struct{})
	fetch := func(context.Context, Validators) (*http.Response, error) {
		pr, pw := io.Pipe()
		go func() {
			_, _ = pw.Write(body[:1000])
			<-step
			_, _ = pw.Write(body[1000:])
			pw.Close()
		}()
		r := answer(200, "")
		r.ContentLength, r.Body = int64(len(body)), pr
		return r, nil
	}
	srv := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		o, _, err := c.Get(r.Context(), "k", Options{Digests: []Digest{want}}, fetch)
		if err != nil {
			http.Error(w, err.Error(), http.StatusInternalServerError)
			return
		}
		defer func() { _ = o.Close() }()
		if n, err := o.Serve(w, r); err != nil {
			t.Errorf("after %d bytes: %v", n, err)
		}
	}))
	defer srv.Close()
	ask := func(rng, ifRange string) (int, []byte, string) {
		req, _ := http.NewRequest(http.MethodGet, srv.URL, nil)
		req.Header.Set("Range", rng)
		if ifRange != "" {
			req.Header.Set("If-Range", ifRange)
		}
		resp, err := http.DefaultClient.Do(req)
		if err != nil {
			t.Error(err)
			return 0, nil, ""
		}
		defer resp.Body.Close()
		b, err := io.ReadAll(resp.Body)
		if err != nil {
			t.Error(err)
		}
		return resp.StatusCode, b, resp.Header.Get("ETag")
	}
	var wg sync.WaitGroup
	for _, r := range []string{"bytes=500-", "bytes=-100", "bytes=0-9", "bytes=900-1100", "bytes=1048575-"} {
		wg.Go(func() {
			status, got, tag := ask(r, "")
			wantStatus, wantBytes := slice(body, r)
			if status != wantStatus || !bytes.Equal(got, wantBytes) || tag != `"`+want.Hex+`"` {
				t.Errorf("under way, %s: %d, %d bytes, tag %s", r, status, len(got), tag)
			}
		})
	}
	close(step)
	wg.Wait()
	for _, r := range []string{"bytes=500-", "bytes=-100", "bytes=0-9", "bytes=1048576-"} {
		status, got, tag := ask(r, `"`+want.Hex+`"`)
		wantStatus, wantBytes := slice(body, r)
		if status != wantStatus || status == 206 && !bytes.Equal(got, wantBytes) || status == 206 && tag != `"`+want.Hex+`"` {
			t.Errorf("whole, %s: %d, %d bytes, tag %s", r, status, len(got), tag)
		}
	}
	if status, got, _ := ask("bytes=500-", `"another"`); status != 200 || !bytes.Equal(got, body) {
		t.Errorf("If-Range of another object: %d, %d bytes", status, len(got))
	}
}

// slice is what a range of body must give.
func slice(body []byte, r string) (int, []byte) {
	var a, b int
	switch {
	case strings.HasPrefix(r, "bytes=-"):
		_, _ = fmt.Sscanf(r, "bytes=-%d", &a)
		return 206, body[len(body)-a:]
	default:
		if n, _ := fmt.Sscanf(r, "bytes=%d-%d", &a, &b); n == 1 {
			b = len(body) - 1
		}
	}
	if a >= len(body) {
		return 416, nil
	}
	return 206, body[a : b+1]
}

func TestDirectoriesBelongToWhoUsesTheCache(t *testing.T) {
	if os.Geteuid() != 0 {
		t.Skip("needs root")
	}
	const uid = 54321
	c := open(t, Config{UID: uid})
	for _, d := range []string{".", tempDir, objectsDir} {
		info, err := os.Stat(filepath.Join(c.cfg.Dir, d))
		if err != nil {
			t.Fatal(err)
		}
		if st := info.Sys().(*syscall.Stat_t); st.Uid != uid || info.Mode().Perm() != 0o700 {
			t.Errorf("%s: uid %d, mode %s", d, st.Uid, info.Mode())
		}
	}
}

func TestConfigsThatCannotWorkAreRefused(t *testing.T) {
	log := slog.New(slog.DiscardHandler)
	for _, cfg := range []Config{{Log: log}, {Dir: "x"}, {Dir: "x", Log: log, MaxBytes: -1}} {
		if _, err := Open(cfg); !errors.Is(err, errdefs.Invalid) {
			t.Errorf("%+v: %v", cfg, err)
		}
	}
}

func TestAMemoParsesTheSameBytesOnce(t *testing.T) {
	c := open(t, Config{})
	var n atomic.Int64
	parses := 0
	m := NewMemo[string](10)
	parse := func(b []byte, _ Meta) (string, error) {
		parses++
		if string(b) == "bad" {
			return "", errors.New("bad")
		}
		return "parsed " + string(b), nil
	}
	of := func(key, body string) (string, error) {
		o, _, err := c.Get(t.Context(), key, Options{}, always(&n, 200, body))
		if err != nil {
			t.Fatal(err)
		}
		defer func() { _ = o.Close() }()
		return m.Of(t.Context(), o, parse)
	}
	var got []string
	for _, k := range []string{"a", "a", "b", "c", "a"} {
		s, err := of(k, "body"+k)
		if err != nil {
			t.Fatal(err)
		}
		got = append(got, s)
	}
	if diff := cmp.Diff([]string{"parsed bodya", "parsed bodya", "parsed bodyb", "parsed bodyc", "parsed bodya"}, got); diff != "" || parses != 4 {
		t.Errorf("%d parses, %s", parses, diff)
	}
	for range 2 {
		if _, err := of("bad", "bad"); err == nil {
			t.Error("no error")
		}
	}
	if parses != 6 || m.used > 10 {
		t.Errorf("%d parses, %d bytes remembered", parses, m.used)
	}
}

// A cached object of 1 MiB over HTTP.
func BenchmarkServe(b *testing.B) {
	c := open(b, Config{})
	body := strings.Repeat("0123456789abcdef", 1<<16)
	var n atomic.Int64
	want := sum(body)
	srv := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		o, _, err := c.Get(r.Context(), "k", Options{Digests: []Digest{want}}, always(&n, 200, body))
		if err != nil {
			b.Error(err)
			return
		}
		defer func() { _ = o.Close() }()
		if _, err := o.Serve(w, r); err != nil {
			b.Error(err)
		}
	}))
	defer srv.Close()
	b.SetBytes(int64(len(body)))
	for b.Loop() {
		resp, err := http.Get(srv.URL)
		if err != nil {
			b.Fatal(err)
		}
		if m, err := io.Copy(io.Discard, resp.Body); err != nil || m != int64(len(body)) {
			b.Fatal(m, err)
		}
		resp.Body.Close()
	}
}

func FuzzParseMeta(f *testing.F) {
	m := Meta{Key: "k", Size: 4, Digests: map[string]string{"sha256": "x"}}
	tail, err := m.trailer()
	if err != nil {
		f.Fatal(err)
	}
	f.Add(append([]byte("body"), tail...))
	f.Add([]byte(magic))
	f.Add([]byte{})
	f.Fuzz(func(t *testing.T, b []byte) {
		m, err := parseMeta(bytes.NewReader(b), int64(len(b)))
		if err == nil && (m.Size < 0 || m.Size >= int64(len(b))) {
			t.Errorf("size %d of a file of %d bytes", m.Size, len(b))
		}
	})
}

func TestAMemoMakesFewAtOnce(t *testing.T) {
	m := NewMemo[int](1 << 20)
	var wg sync.WaitGroup
	var now, most atomic.Int64
	for i := range 40 {
		wg.Go(func() {
			got, err := m.Make(strconv.Itoa(i%20), 1, func() (int, error) {
				for n := now.Add(1); ; {
					if old := most.Load(); n <= old || most.CompareAndSwap(old, n) {
						break
					}
				}
				time.Sleep(time.Millisecond)
				now.Add(-1)
				return i % 20, nil
			})
			if err != nil || got != i%20 {
				t.Errorf("%d: %d, %v", i, got, err)
			}
		})
	}
	wg.Wait()
	if n := most.Load(); n > madeAtOnce {
		t.Errorf("%d were made at once", n)
	}
}
