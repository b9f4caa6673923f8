package keeper

import (
	"bufio"
	"context"
	"encoding/binary"
	"fmt"
	"io"
	"log/slog"
	"os"
	"os/exec"
	"os/signal"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"

	"github.com/sandsea/sandsea/internal/linux/pipe"
	"github.com/sandsea/sandsea/internal/record"
)

// roleEnv makes the test binary another process: a keeper, or something that writes.
const roleEnv = "SANDSEA_KEEPER_TEST"

func TestMain(m *testing.M) {
	role, args, _ := strings.Cut(os.Getenv(roleEnv), " ")
	switch role {
	case "":
		os.Exit(m.Run())
	case "keeper":
		os.Exit(keeperRole(strings.Fields(args)))
	case "writer":
		os.Exit(writerRole(strings.Fields(args)))
	case "edge":
		os.Exit(edgeRole(strings.Fields(args)))
	}
	fmt.Fprintln(os.Stderr, "unknown role", role)
	os.Exit(2)
}

// keeperRole: DIR [RATE WINDOW PATIENCE-MS MAXSTREAM OPENFILES].
func keeperRole(args []string) int {
	cfg := Config{Socket: filepath.Join(args[0], "keeper.sock"), DataID: "data", Index: args[0]}
	cfg.Log = slog.New(slog.NewTextHandler(os.Stderr, nil))
	if i := slices.Index(os.Args, "--table"); i > 0 {
		cfg.Table, _ = strconv.Atoi(os.Args[i+1])
	}
	if len(args) == 6 {
		n := make([]int64, 5)
		for i := range n {
			n[i], _ = strconv.ParseInt(args[1+i], 10, 64)
		}
		cfg.limits = limits{rate: n[0], window: n[1], patience: time.Duration(n[2]) * time.Millisecond, maxStream: n[3]}
		if lim := uint64(n[4]); lim > 0 {
			if err := syscall.Setrlimit(syscall.RLIMIT_NOFILE, &syscall.Rlimit{Cur: lim, Max: lim}); err != nil {
				fmt.Fprintln(os.Stderr, err)
				return 1
			}
		}
	}
	ctx, stop := signal.NotifyContext(context.Background(), syscall.SIGTERM)
	defer stop()
	if err := Run(ctx, cfg); err != nil {
		fmt.Fprintln(os.Stderr, err)
		return 1
	}
	return 0
}

// writerRole: SEED BYTES [CHUNK] writes its sequence to standard output.
func writerRole(args []string) int {
	seed, _ := strconv.ParseUint(args[0], 10, 64)
	total, _ := strconv.ParseInt(args[1], 10, 64)
	chunk := 64 << 10
	if len(args) > 2 {
		chunk, _ = strconv.Atoi(args[2])
	}
	buf := make([]byte, chunk)
	for off := int64(0); off < total; {
		n := min(int64(len(buf)), total-off)
		sequence(buf[:n], seed, off)
		if _, err := os.Stdout.Write(buf[:n]); err != nil {
			fmt.Fprintln(os.Stderr, "writer:", err)
			return 1
		}
		off += n
	}
	return 0
}

// sequence fills p with what stream seed has at off: each word differs from all others near and far.
func sequence(p []byte, seed uint64, off int64) {
	var w [8]byte
	for i := 0; i < len(p); {
		o := off + int64(i)
		x := (uint64(o/8) + seed<<40) * 0x9e3779b97f4a7c15
		binary.LittleEndian.PutUint64(w[:], x^x>>29)
		i += copy(p[i:], w[o%8:])
	}
}

// checkRecord fails unless the file holds the whole sequence.
func checkRecord(t *testing.T, path string, seed uint64, total int64) {
	t.Helper()
	f, err := os.Open(path)
	if err != nil {
		t.Fatal(err)
	}
	defer f.Close()
	got, want := make([]byte, 1<<20), make([]byte, 1<<20)
	var off int64
	for {
		n, err := io.ReadFull(f, got)
		sequence(want[:n], seed, off)
		if string(got[:n]) != string(want[:n]) {
			for i := range n {
				if got[i] != want[i] {
					t.Fatalf("%s: byte %d differs", path, off+int64(i))
				}
			}
		}
		off += int64(n)
		if err != nil {
			break
		}
	}
	if off != total {
		t.Fatalf("%s: %d bytes, want %d", path, off, total)
	}
}

// process is a keeper of the test's own.
type process struct {
	dir string
	cmd *exec.Cmd
}

func (p *process) socket() string { return filepath.Join(p.dir, "keeper.sock") }

// startKeeper starts one; small gives it limits that tests reach.
func startKeeper(t testing.TB, dir string, args ...string) *process {
	t.Helper()
	p := &process{dir: dir}
	p.start(t, args...)
	t.Cleanup(func() { p.kill(t) })
	return p
}

func (p *process) start(t testing.TB, args ...string) {
	t.Helper()
	p.cmd = exec.Command("/proc/self/exe")
	p.cmd.Env = append(os.Environ(), roleEnv+"=keeper "+p.dir+" "+strings.Join(args, " "))
	p.cmd.Stderr = os.Stderr
	if !testing.Verbose() {
		p.cmd.Stderr = nil
	}
	if err := p.cmd.Start(); err != nil {
		t.Fatal(err)
	}
}

// kill ends it as a crash would.
func (p *process) kill(t testing.TB) {
	t.Helper()
	if p.cmd == nil {
		return
	}
	_ = p.cmd.Process.Kill()
	_ = p.cmd.Wait()
	p.cmd = nil
}

// dial waits for the keeper to listen.
func (p *process) dial(t testing.TB) *Conn {
	t.Helper()
	var c *Conn
	var err error
	if !eventually(10*time.Second, func() bool {
		c, err = Dial(context.Background(), p.socket(), "data")
		return err == nil
	}) {
		t.Fatalf("no keeper: %v", err)
	}
	t.Cleanup(func() { c.Close() })
	return c
}

// eventually polls, with a limit.
func eventually(limit time.Duration, ok func() bool) bool {
	end := time.Now().Add(limit)
	tick := time.NewTicker(time.Millisecond)
	defer tick.Stop()
	for !ok() {
		if time.Now().After(end) {
			return false
		}
		<-tick.C
	}
	return true
}

// child is a recorded writer.
type child struct {
	cmd    *exec.Cmd
	exec   Exec
	path   string
	seed   uint64
	stderr strings.Builder
}

// newRecord makes a pipe and a record file for one stream of a command.
func newRecord(t testing.TB, dir string, k Key, s record.Stream) (st Stream, w *os.File) {
	t.Helper()
	r, w, err := pipe.New()
	if err != nil {
		t.Fatal(err)
	}
	path := record.Path(dir, k.Sandbox, k.Number, s)
	if err := os.MkdirAll(filepath.Dir(path), 0o700); err != nil {
		t.Fatal(err)
	}
	f, err := os.OpenFile(path, os.O_RDWR|os.O_CREATE, 0o600)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { r.Close(); w.Close(); f.Close() })
	return Stream{Stream: s, Pipe: r, File: f}, w
}

// startWriter records and starts a writer.
func startWriter(t testing.TB, c Client, dir string, k Key, total int64, caps record.Caps) *child {
	t.Helper()
	st, w := newRecord(t, dir, k, record.Stdout)
	ch := &child{
		exec: Exec{Key: k, Caps: caps, Streams: []Stream{st}}, path: st.File.Name(),
		seed: uint64(k.Number),
	}
	if err := c.Record(t.Context(), ch.exec); err != nil {
		t.Fatal(err)
	}
	ch.cmd = exec.Command("/proc/self/exe")
	ch.cmd.Env = append(os.Environ(), fmt.Sprintf("%s=writer %d %d", roleEnv, ch.seed, total))
	ch.cmd.Stdout = w
	ch.cmd.Stderr = &ch.stderr
	if err := ch.cmd.Start(); err != nil {
		t.Fatal(err)
	}
	w.Close()
	t.Cleanup(func() {
		if ch.cmd.ProcessState == nil {
			_ = ch.cmd.Process.Kill()
			_ = ch.cmd.Wait()
		}
	})
	return ch
}

// listener collects what a connection tells.
type listener struct {
	mu  sync.Mutex
	all []Event // guarded by mu
	err error   // guarded by mu
}

func listen(c Client) *listener {
	l := &listener{}
	go func() {
		for e, err := range c.Events() {
			l.mu.Lock()
			if err != nil {
				l.err = err
			} else {
				l.all = append(l.all, e)
			}
			l.mu.Unlock()
		}
	}()
	return l
}

func (l *listener) find(fits func(Event) bool) (e Event, ok bool) {
	l.mu.Lock()
	defer l.mu.Unlock()
	for _, e := range l.all {
		if fits(e) {
			return e, true
		}
	}
	return Event{}, false
}

// wait waits for an event that fits, past or to come.
func (l *listener) wait(t testing.TB, fits func(Event) bool) Event {
	t.Helper()
	var e Event
	if !eventually(30*time.Second, func() (ok bool) { e, ok = l.find(fits); return ok }) {
		l.mu.Lock()
		defer l.mu.Unlock()
		t.Fatalf("no such event among %v, %v", l.all, l.err)
	}
	return e
}

// of fits events of a kind about a key.
func of(kind EventKind, k Key) func(Event) bool {
	return func(e Event) bool { return e.Kind == kind && e.Key == k }
}

func procLine(pid int, file, name string) string {
	f, err := os.Open(fmt.Sprintf("/proc/%d/%s", pid, file))
	if err != nil {
		return ""
	}
	defer f.Close()
	s := bufio.NewScanner(f)
	for s.Scan() {
		if rest, ok := strings.CutPrefix(s.Text(), name); ok {
			return strings.TrimSpace(rest)
		}
	}
	return ""
}

// cpu is the time that a process has used, in clock ticks of 10 ms.
func cpuTicks(t testing.TB, pid int) int {
	t.Helper()
	b, err := os.ReadFile(fmt.Sprintf("/proc/%d/stat", pid))
	if err != nil {
		t.Fatal(err)
	}
	f := strings.Fields(string(b[strings.LastIndexByte(string(b), ')')+1:]))
	u, _ := strconv.Atoi(f[11])
	s, _ := strconv.Atoi(f[12])
	return u + s
}
