package etcd

import (
	"context"
	"errors"
	"io"
	"net"
	"net/url"
	"os"
	"os/exec"
	"path/filepath"
	"strconv"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"go.etcd.io/etcd/server/v3/embed"

	"github.com/sandsea/sandsea/api/errdefs"
	"github.com/sandsea/sandsea/internal/store"
	"github.com/sandsea/sandsea/internal/store/conform"
)

// patience is for calls of tests that are not about their limit: others write to the same disk.
const patience = 20 * time.Second

func open(t *testing.T, dir string) *Store {
	t.Helper()
	s, err := Open(t.Context(), Config{Dir: dir, CallTimeout: patience})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = s.Close() })
	return s
}

func compact(t *testing.T, s *Store) func(int64) {
	return func(rev int64) {
		if _, err := s.cli.Compact(t.Context(), rev); err != nil {
			t.Errorf("compact: %v", err)
		}
	}
}

func TestEmbedded(t *testing.T) {
	conform.Run(t, func(t *testing.T) (store.Store, conform.Faults) {
		s := open(t, t.TempDir())
		return s, conform.Faults{Compact: compact(t, s)}
	})
}

func TestDialled(t *testing.T) {
	// A member with a client socket, and a line to it that can be cut and made mute.
	dir := t.TempDir()
	sock := filepath.Join(dir, "c.sock")
	ec := embed.NewConfig()
	ec.Dir, ec.ListenPeerUrls = filepath.Join(dir, "data"), nil
	ec.ListenClientUrls = []url.URL{{Scheme: "unix", Path: sock}}
	ec.AdvertiseClientUrls = ec.ListenClientUrls
	ec.TickMs, ec.ElectionMs, ec.MaxRequestBytes = 50, 500, maxRequest
	ec.ZapLoggerBuilder = embed.NewZapLoggerBuilder(zapTo(nil))
	e, err := embed.StartEtcd(ec)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(e.Close)
	select {
	case <-e.Server.ReadyNotify():
	case <-time.After(30 * time.Second):
		t.Fatal("member not ready in 30 s")
	}
	conform.Run(t, func(t *testing.T) (store.Store, conform.Faults) {
		l := newLine(t, sock)
		s, err := Dial(t.Context(), []string{l.addr()}, nil, nil)
		if err != nil {
			t.Fatal(err)
		}
		s.limit = patience
		if _, err := s.Txn(t.Context(), nil, []store.Op{{Kind: store.OpDeletePrefix, Key: "/"}}, nil); err != nil {
			t.Fatal(err)
		}
		return s, conform.Faults{
			Compact: compact(t, s),
			Away: func(away bool) {
				s.limit = DefaultCallTimeout
				l.cut(away)
			},
			LoseAnswers: func(int) {
				s.limit = DefaultCallTimeout
				l.mute(1500 * time.Millisecond)
			},
		}
	})
}

// line forwards TCP to a unix socket.
type line struct {
	ln    net.Listener
	sock  string
	muted atomic.Bool

	mu    sync.Mutex
	away  bool                  // guarded by mu
	conns map[net.Conn]struct{} // guarded by mu
}

func newLine(t *testing.T, sock string) *line {
	ln, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	l := &line{ln: ln, sock: sock, conns: map[net.Conn]struct{}{}}
	var wg sync.WaitGroup
	wg.Go(func() {
		for {
			c, err := ln.Accept()
			if err != nil {
				return
			}
			wg.Go(func() { l.serve(c) })
		}
	})
	t.Cleanup(func() {
		_ = ln.Close()
		l.closeAll()
		wg.Wait()
	})
	return l
}

func (l *line) addr() string { return l.ln.Addr().String() }

func (l *line) serve(c net.Conn) {
	defer c.Close()
	up, err := net.Dial("unix", l.sock)
	if err != nil {
		return
	}
	defer up.Close()
	l.mu.Lock()
	if l.away {
		l.mu.Unlock()
		return
	}
	l.conns[c], l.conns[up] = struct{}{}, struct{}{}
	l.mu.Unlock()
	var wg sync.WaitGroup
	wg.Go(func() { _, _ = io.Copy(up, c); _ = up.Close() })
	wg.Go(func() {
		defer c.Close()
		buf := make([]byte, 64<<10)
		for {
			n, err := up.Read(buf)
			if err != nil {
				return
			}
			if l.muted.Load() {
				continue
			}
			if _, err := c.Write(buf[:n]); err != nil {
				return
			}
		}
	})
	wg.Wait()
}

func (l *line) closeAll() {
	l.mu.Lock()
	defer l.mu.Unlock()
	for c := range l.conns {
		_ = c.Close()
	}
	clear(l.conns)
}

func (l *line) cut(away bool) {
	l.mu.Lock()
	l.away = away
	l.mu.Unlock()
	if away {
		l.closeAll()
	}
}

func (l *line) mute(d time.Duration) {
	l.muted.Store(true)
	time.AfterFunc(d, func() {
		l.muted.Store(false)
		l.closeAll() // bytes are missing: the connection is worth nothing
	})
}

func TestReopenKeepsEverything(t *testing.T) {
	dir := t.TempDir()
	s := open(t, dir)
	res, err := s.Txn(t.Context(), nil, []store.Op{store.Put("/a", []byte("1"))}, nil)
	if err != nil {
		t.Fatal(err)
	}
	if err := s.Close(); err != nil {
		t.Fatal(err)
	}
	s = open(t, dir)
	page, err := s.Range(t.Context(), "/a", store.RangeOptions{})
	if err != nil || len(page.Pairs) != 1 || page.Pairs[0].ModRev != res.Revision {
		t.Errorf("got %+v, %v, want the pair of revision %d", page, err, res.Revision)
	}
}

func TestTheFirstReadAfterAReopenSeesEverything(t *testing.T) {
	dir := t.TempDir()
	s := open(t, dir)
	var last int64
	for range 100 {
		res, err := s.Txn(t.Context(), nil, []store.Op{store.Put("/a", []byte("1"))}, nil)
		if err != nil {
			t.Fatal(err)
		}
		last = res.Revision
	}
	if err := s.Close(); err != nil {
		t.Fatal(err)
	}
	s = open(t, dir)
	res, err := s.Txn(t.Context(), nil, []store.Op{store.Get("/a")}, nil)
	if err != nil || len(res.Pairs) != 1 || res.Pairs[0].ModRev != last {
		t.Errorf("got %+v, %v, want the pair of revision %d", res, err, last)
	}
}

// TestMain doubles as the process that TestKill kills: it writes numbers and tells each after it was acknowledged.
func TestMain(m *testing.M) {
	if dir := os.Getenv("SANDSEA_TEST_STORE_DIR"); dir != "" {
		write(dir)
		return
	}
	os.Exit(m.Run())
}

func write(dir string) {
	s, err := Open(context.Background(), Config{Dir: dir})
	if err != nil {
		os.Stderr.WriteString(err.Error())
		os.Exit(1)
	}
	for i := 0; ; i++ {
		if _, err := s.Txn(context.Background(), nil, []store.Op{store.Put("/n", []byte(strconv.Itoa(i)))}, nil); err != nil {
			os.Exit(1)
		}
		if _, err := os.Stdout.WriteString(strconv.Itoa(i) + "\n"); err != nil {
			os.Exit(1)
		}
	}
}

func TestKillLosesNoAcknowledgedWrite(t *testing.T) {
	dir := t.TempDir()
	for range 3 {
		cmd := exec.Command(os.Args[0])
		cmd.Env = append(os.Environ(), "SANDSEA_TEST_STORE_DIR="+dir)
		out, err := cmd.StdoutPipe()
		if err != nil {
			t.Fatal(err)
		}
		cmd.Stderr = os.Stderr
		if err := cmd.Start(); err != nil {
			t.Fatal(err)
		}
		late := time.AfterFunc(30*time.Second, func() { _ = cmd.Process.Kill() })
		told := make([]byte, 0, 1<<16)
		buf := make([]byte, 4096)
		for len(told) < 600 {
			n, err := out.Read(buf)
			told = append(told, buf[:n]...)
			if err != nil {
				break
			}
		}
		_ = cmd.Process.Kill()
		rest, _ := io.ReadAll(out)
		told = append(told, rest...)
		_ = cmd.Wait()
		if !late.Stop() {
			t.Fatal("the writer hung")
		}
		last := lastNumber(told)
		s := open(t, dir)
		page, err := s.Range(t.Context(), "/n", store.RangeOptions{})
		if err != nil || len(page.Pairs) != 1 {
			t.Fatalf("got %+v, %v", page, err)
		}
		if n, _ := strconv.Atoi(string(page.Pairs[0].Value)); last < 0 || n < last {
			t.Errorf("stored %d, acknowledged %d", n, last)
		}
		if err := s.Close(); err != nil {
			t.Fatal(err)
		}
	}
}

func lastNumber(told []byte) int {
	last, cur, any := -1, 0, false
	for _, b := range told {
		if b == '\n' {
			if any {
				last = cur
			}
			cur, any = 0, false
			continue
		}
		cur, any = cur*10+int(b-'0'), true
	}
	return last
}

func TestDialToNobodyIsUnavailableWithinASecond(t *testing.T) {
	s, err := Dial(t.Context(), []string{"127.0.0.1:1"}, nil, nil)
	if err != nil {
		t.Fatal(err)
	}
	defer s.Close()
	began := time.Now()
	_, err = s.Txn(t.Context(), nil, []store.Op{store.Put("/a", nil)}, nil)
	if !errors.Is(err, errdefs.Unavailable) {
		t.Errorf("got %v, want Unavailable", err)
	}
	if took := time.Since(began); took > 5*time.Second {
		t.Errorf("took %s", took)
	}
}

func BenchmarkCreate(b *testing.B) {
	s, err := Open(b.Context(), Config{Dir: b.TempDir()})
	if err != nil {
		b.Fatal(err)
	}
	defer s.Close()
	value := make([]byte, 600)
	var n atomic.Int64
	b.SetParallelism(32)
	b.RunParallel(func(pb *testing.PB) {
		for pb.Next() {
			key := "/sandboxes/default/" + strconv.FormatInt(n.Add(1), 10)
			if _, err := s.Txn(b.Context(), []store.Cond{{Key: key, Absent: true}},
				[]store.Op{store.Put(key, value)}, nil); err != nil {
				b.Error(err)
			}
		}
	})
	b.ReportMetric(float64(b.N)/b.Elapsed().Seconds(), "creates/s")
}

// TestAStoreThatCannotWriteIsAnError starts one that may write no file as large as its log, of which etcd panics.
func TestAStoreThatCannotWriteIsAnError(t *testing.T) {
	const inside = "SANDSEA_TEST_SMALL_FILES"
	if os.Getenv(inside) == "" {
		cmd := exec.CommandContext(t.Context(), "sh", "-c", `ulimit -f 32768 && exec "$0" "$1"`, os.Args[0], "-test.run=^"+t.Name()+"$")
		cmd.Env = append(os.Environ(), inside+"=1")
		if out, err := cmd.CombinedOutput(); err != nil {
			t.Fatalf("%v\n%s", err, out)
		}
		return
	}
	s, err := Open(t.Context(), Config{Dir: t.TempDir()})
	if err == nil {
		_ = s.Close()
	}
	if !errors.Is(err, errdefs.FailedPrecondition) || !strings.Contains(err.Error(), "does not start: ") {
		t.Errorf("%v", err)
	}
}
