package keeper

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"os"
	"os/exec"
	"path/filepath"
	"runtime"
	"strconv"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/sandsea/sandsea/api/errdefs"
	"github.com/sandsea/sandsea/internal/linux/mount"
	"github.com/sandsea/sandsea/internal/linux/pipe"
	"github.com/sandsea/sandsea/internal/linux/scm"
	"github.com/sandsea/sandsea/internal/linux/sparse"
	"github.com/sandsea/sandsea/internal/record"
)

// smallLimits are for startKeeper: rate, window, patience in ms, where a stream overflows, open files.
func smallLimits(rate, window, patience, maxStream, openFiles int64) []string {
	return strings.Fields(fmt.Sprint(rate, window, patience, maxStream, openFiles))
}

// cgroup makes a v2 cgroup of the test's own, or skips.
func cgroup(t *testing.T) string {
	t.Helper()
	b, err := os.ReadFile("/proc/self/mountinfo")
	if err != nil {
		t.Fatal(err)
	}
	for line := range strings.Lines(string(b)) {
		pre, post, _ := strings.Cut(line, " - ")
		if !strings.HasPrefix(post, "cgroup2 ") {
			continue
		}
		dir := filepath.Join(strings.Fields(pre)[4], fmt.Sprintf("sandsea-keepertest%d", os.Getpid()))
		if err := os.Mkdir(dir, 0o755); err != nil {
			t.Skipf("no cgroup can be made: %v", err)
		}
		t.Cleanup(func() {
			_ = os.WriteFile(filepath.Join(dir, "cgroup.kill"), []byte("1"), 0)
			if !eventually(10*time.Second, func() bool { return os.Remove(dir) == nil }) {
				t.Errorf("cgroup %s is left", dir)
			}
		})
		if _, err := os.Stat(filepath.Join(dir, "cgroup.kill")); err != nil {
			t.Skipf("no cgroup.kill: %v", err)
		}
		return dir
	}
	t.Skip("no cgroup v2 mount")
	return ""
}

func populated(t *testing.T, dir string) bool {
	t.Helper()
	b, err := os.ReadFile(filepath.Join(dir, "cgroup.events"))
	if err != nil {
		t.Fatal(err)
	}
	return strings.Contains(string(b), "populated 1")
}

// TestADeadlineComesWithoutAnEdgeAndIsKnownToTheNextKeeper kills a whole tree, sessions of their own included, while no
// edge is connected; then the keeper is killed, and its successor still knows.
func TestADeadlineComesWithoutAnEdgeAndIsKnownToTheNextKeeper(t *testing.T) {
	group := cgroup(t)
	dir := t.TempDir()
	p := startKeeper(t, dir)
	c := p.dial(t)
	kill, err := os.OpenFile(filepath.Join(group, "cgroup.kill"), os.O_WRONLY, 0)
	if err != nil {
		t.Fatal(err)
	}
	defer kill.Close()
	dirfd, err := os.Open(group)
	if err != nil {
		t.Fatal(err)
	}
	defer dirfd.Close()
	cmd := exec.Command("sh", "-c", "setsid sleep 100 & (sleep 100 &) ; exec sleep 100")
	cmd.SysProcAttr = &syscall.SysProcAttr{UseCgroupFD: true, CgroupFD: int(dirfd.Fd())}
	if err := cmd.Start(); err != nil {
		t.Fatal(err)
	}
	e := Exec{Key: Key{"s1", 1}, Kill: kill, Remaining: 150 * time.Millisecond}
	begun := time.Now()
	if err := errors.Join(c.Hold(t.Context(), Sandbox{ID: "s1"}), c.Record(t.Context(), e)); err != nil {
		t.Fatal(err)
	}
	c.Close()
	if !populated(t, group) && time.Since(begun) < e.Remaining {
		t.Error("it died before its time")
	}
	_ = cmd.Wait()
	if ws := cmd.ProcessState.Sys().(syscall.WaitStatus); ws.Signal() != syscall.SIGKILL {
		t.Errorf("it ended by %v", ws)
	}
	if !eventually(20*time.Second, func() bool { return !populated(t, group) }) {
		t.Error("descendants are left")
	}
	p.kill(t)
	p.start(t)
	c = p.dial(t)
	l := listen(c)
	e.Remaining = time.Hour
	if err := errors.Join(c.Hold(t.Context(), Sandbox{ID: "s1"}), c.Record(t.Context(), e)); err != nil {
		t.Fatal(err)
	}
	l.wait(t, of(Fired, e.Key))
	if err := c.Release(t.Context(), e.Key); err != nil {
		t.Fatal(err)
	}
	p.kill(t)
	p.start(t)
	c = p.dial(t)
	if err := errors.Join(c.Hold(t.Context(), Sandbox{ID: "s1"}), c.Record(t.Context(), e)); err != nil {
		t.Fatal(err)
	}
	if held, err := c.Roster(t.Context()); err != nil || len(held) != 2 || held[1].Fired {
		t.Errorf("after release it is still known as fired: %+v, %v", held, err)
	}
}

// TestAKillThatWasDecidedButNotDoneIsDoneByTheNextKeeper covers a keeper that was killed between index and kill.
func TestAKillThatWasDecidedButNotDoneIsDoneByTheNextKeeper(t *testing.T) {
	dir := t.TempDir()
	boot, err := os.ReadFile("/proc/sys/kernel/random/boot_id")
	if err != nil {
		t.Fatal(err)
	}
	content := "sandsea-keeper 1 " + strings.TrimSpace(string(boot)) + " data\nfired s1 7\noverflow s2 0\nfired s1 8"
	if err := os.WriteFile(filepath.Join(dir, "keeper.index"), []byte(content), 0o600); err != nil {
		t.Fatal(err)
	}
	c := startKeeper(t, dir).dial(t)
	l := listen(c)
	kills := make([]*os.File, 3)
	shows := make([]*os.File, 3)
	for i := range kills {
		if shows[i], kills[i], err = pipe.New(); err != nil {
			t.Fatal(err)
		}
		defer kills[i].Close()
		defer shows[i].Close()
	}
	for _, err := range []error{
		c.Hold(t.Context(), Sandbox{ID: "s1"}),
		c.Record(t.Context(), Exec{Key: Key{"s1", 7}, Kill: kills[0], Remaining: time.Hour}),
		c.Record(t.Context(), Exec{Key: Key{"s1", 8}, Kill: kills[1], Remaining: time.Hour}), // its line was cut
		c.Hold(t.Context(), Sandbox{ID: "s2", Kill: kills[2]}),
	} {
		if err != nil {
			t.Fatal(err)
		}
	}
	l.wait(t, of(Fired, Key{"s1", 7}))
	l.wait(t, of(Overflow, Key{Sandbox: "s2"}))
	for i, want := range []bool{true, false, true} {
		n, err := pipe.Buffered(int(shows[i].Fd()))
		if err != nil || (n > 0) != want {
			t.Errorf("kill %d: %d bytes, %v; want killed %v", i, n, err, want)
		}
	}
}

func TestAFloodStaysBoundedOnDisk(t *testing.T) {
	dir := t.TempDir()
	p := startKeeper(t, dir)
	c := p.dial(t)
	if err := c.Hold(t.Context(), Sandbox{ID: "s1", Budget: 64 << 20}); err != nil {
		t.Fatal(err)
	}
	st, w := newRecord(t, dir, Key{"s1", 1}, record.Stdout)
	e := Exec{Key: Key{"s1", 1}, Caps: record.DefaultCaps, Streams: []Stream{st}}
	if err := c.Record(t.Context(), e); err != nil {
		t.Fatal(err)
	}
	const seconds, whole = 2, 64 << 20
	ticks := cpuTicks(t, p.cmd.Process.Pid)
	var most int64
	begun := time.Now()
	yes := exec.Command("yes")
	yes.Stdout = w
	if err := yes.Start(); err != nil {
		t.Fatal(err)
	}
	w.Close()
	eventually(20*time.Second, func() bool {
		n, err := sparse.Allocated(int(st.File.Fd()))
		if err != nil {
			t.Fatal(err)
		}
		most = max(most, n)
		fi, err := st.File.Stat()
		return err == nil && fi.Size() >= whole && time.Since(begun) >= seconds*time.Second
	})
	ticks = cpuTicks(t, p.cmd.Process.Pid) - ticks
	_ = yes.Process.Kill()
	_ = yes.Wait()
	took := time.Since(begun)
	fi, err := st.File.Stat()
	if err != nil {
		t.Fatal(err)
	}
	t.Logf("%d MiB seen, at most %d MiB on disk, %.1f%% of a core",
		fi.Size()>>20, most>>20, float64(ticks)/took.Seconds())
	if most > 84<<20 {
		t.Errorf("%d bytes on disk", most)
	}
	// What is within the caps comes at full speed, the rest at 32 MiB/s.
	if limit := int64(whole + float64(took.Seconds()+0.5)*(32<<20)); fi.Size() > limit {
		t.Errorf("%d bytes were drained in %v, want at most %d", fi.Size(), took, limit)
	}
	if fi.Size() < whole {
		t.Errorf("only %d bytes were drained", fi.Size())
	}
}

// TestAFullDiskMakesAGapAndNeverABlock fills a small file system under a writer, then makes room again.
func TestAFullDiskMakesAGapAndNeverABlock(t *testing.T) {
	m, err := mount.New("tmpfs", 0, mount.Value("size", "8m"))
	if err != nil {
		t.Skipf("no tmpfs can be made: %v", err)
	}
	defer m.Close()
	small := fmt.Sprintf("/proc/self/fd/%d", m.Fd())
	dir := t.TempDir()
	p := startKeeper(t, dir)
	c := p.dial(t)
	if err := c.Hold(t.Context(), Sandbox{ID: "s1"}); err != nil {
		t.Fatal(err)
	}
	filler, err := os.Create(filepath.Join(small, "filler"))
	if err != nil {
		t.Fatal(err)
	}
	defer filler.Close()
	if _, err := filler.Write(make([]byte, 4<<20)); err != nil {
		t.Fatal(err)
	}
	r, w, err := pipe.New()
	if err != nil {
		t.Fatal(err)
	}
	defer r.Close()
	f, err := os.OpenFile(filepath.Join(small, "1.1"), os.O_RDWR|os.O_CREATE, 0o600)
	if err != nil {
		t.Fatal(err)
	}
	defer f.Close()
	e := Exec{Key: Key{"s1", 1}, Caps: wide, Streams: []Stream{{Stream: record.Stdout, Pipe: r, File: f}}}
	if err := c.Record(t.Context(), e); err != nil {
		t.Fatal(err)
	}
	// Odd sizes, so that the gap would like to begin and end within a block.
	write := func(from, to int64) {
		t.Helper()
		buf := make([]byte, 12345)
		for off := from; off < to; off += int64(len(buf)) {
			b := buf[:min(int64(len(buf)), to-off)]
			sequence(b, 5, off)
			if _, err := w.Write(b); err != nil {
				t.Fatal(err)
			}
		}
	}
	size := func(n int64) {
		t.Helper()
		if !eventually(10*time.Second, func() bool { fi, err := f.Stat(); return err == nil && fi.Size() == n }) {
			fi, _ := f.Stat()
			t.Fatalf("size %d, want %d", fi.Size(), n)
		}
	}
	const full, total = 7<<20 + 77, 9 << 20
	write(0, full)
	size(full)
	// A successor must see that a gap is under way.
	p.kill(t)
	if err := filler.Truncate(0); err != nil {
		t.Fatal(err)
	}
	p.start(t)
	c = p.dial(t)
	l := listen(c)
	if err := errors.Join(c.Hold(t.Context(), Sandbox{ID: "s1"}), c.Record(t.Context(), e)); err != nil {
		t.Fatal(err)
	}
	write(full, total)
	w.Close()
	if ev := l.wait(t, of(Closed, e.Key)); ev.Size != total {
		t.Errorf("size %d, want %d", ev.Size, total)
	}
	var data, gap int64
	buf, want := make([]byte, 64<<10), make([]byte, 64<<10)
	for off := int64(0); off < total; {
		hole, _, err := sparse.NextHole(int(f.Fd()), off)
		if err != nil {
			t.Fatal(err)
		}
		if hole == off {
			next, ok, err := sparse.NextData(int(f.Fd()), off)
			if err != nil || !ok {
				t.Fatalf("the record ends in a gap: %v", err)
			}
			gap += next - off
			off = next
			continue
		}
		b := buf[:min(int64(len(buf)), hole-off)]
		if _, err := f.ReadAt(b, off); err != nil {
			t.Fatal(err)
		}
		sequence(want[:len(b)], 5, off)
		if !bytes.Equal(b, want[:len(b)]) {
			t.Fatalf("wrong bytes at %d", off)
		}
		data += int64(len(b))
		off += int64(len(b))
	}
	t.Logf("%d bytes of data, %d of gap", data, gap)
	if gap == 0 || data < 5<<20 {
		t.Errorf("%d bytes of data, %d of gap", data, gap)
	}
}

func TestAStreamThatNeverEndsEndsItsSandbox(t *testing.T) {
	dir := t.TempDir()
	c := startKeeper(t, dir, smallLimits(32<<20, 64<<20, 60000, 3<<20, 0)...).dial(t)
	l := listen(c)
	shows, kill, err := pipe.New()
	if err != nil {
		t.Fatal(err)
	}
	defer shows.Close()
	defer kill.Close()
	if err := c.Hold(t.Context(), Sandbox{ID: "s1", Kill: kill}); err != nil {
		t.Fatal(err)
	}
	ch := startWriter(t, c, dir, Key{"s1", 1}, 5<<20, record.DefaultCaps)
	e := l.wait(t, of(Overflow, Key{Sandbox: "s1"}))
	if e.Stream != record.Stdout || e.Size < 3<<20 {
		t.Errorf("event %+v", e)
	}
	b := make([]byte, 10)
	if n, err := shows.Read(b); err != nil || string(b[:n]) != "1" {
		t.Errorf("wrote %q, %v", b[:n], err)
	}
	// It is drained to its end all the same.
	l.wait(t, of(Closed, ch.exec.Key))
	if err := ch.cmd.Wait(); err != nil {
		t.Error(err)
	}
}

func TestALosslessReaderHoldsTheWriterUpForAWhileOnly(t *testing.T) {
	dir := t.TempDir()
	const window, patience = 2 << 20, 2000
	c := startKeeper(t, dir, smallLimits(1<<40, window, patience, 1<<40, 0)...).dial(t)
	l := listen(c)
	if err := c.Hold(t.Context(), Sandbox{ID: "s1"}); err != nil {
		t.Fatal(err)
	}
	st, w := newRecord(t, dir, Key{"s1", 1}, record.Stdout)
	e := Exec{Key: Key{"s1", 1}, Caps: record.Caps{Head: 1 << 20, Tail: 1 << 20}, Streams: []Stream{st}}
	if err := c.Record(t.Context(), e); err != nil {
		t.Fatal(err)
	}
	if err := c.Retain(t.Context(), e.Key, record.Stdout, 0); err != nil {
		t.Fatal(err)
	}
	begun := time.Now()
	wrote := make(chan error, 1)
	const total = 16 << 20
	go func() {
		_, err := w.Write(make([]byte, total))
		w.Close()
		wrote <- err
	}()
	reached := func(n int64) {
		t.Helper()
		if !eventually(10*time.Second, func() bool { fi, err := st.File.Stat(); return err == nil && fi.Size() >= n }) {
			t.Fatalf("%d bytes were not recorded", n)
		}
	}
	// An acknowledged offset lets it go on.
	reached(window)
	if err := c.Retain(t.Context(), e.Key, record.Stdout, window); err != nil {
		t.Fatal(err)
	}
	reached(2 * window)
	if fi, err := st.File.Stat(); err != nil || fi.Size() > 2*window+2<<20 {
		t.Errorf("%d bytes are recorded, the window is full", fi.Size())
	}
	if ev := l.wait(t, of(Closed, e.Key)); ev.Size != total {
		t.Errorf("size %d", ev.Size)
	}
	if err := <-wrote; err != nil {
		t.Error(err)
	}
	if d := time.Since(begun); d < patience*time.Millisecond {
		t.Errorf("the writer was held up for %v only", d)
	}
}

func TestAPeerThatIsNotTheEdgeIsRefused(t *testing.T) {
	dir := t.TempDir()
	p := startKeeper(t, dir)
	good := p.dial(t)
	if _, err := Dial(t.Context(), p.socket(), "other"); !errors.Is(err, errdefs.FailedPrecondition) {
		t.Errorf("another data directory: %v", err)
	}
	if _, err := Dial(t.Context(), filepath.Join(dir, "none"), "data"); !errors.Is(err, errdefs.Unavailable) {
		t.Errorf("no keeper: %v", err)
	}
	null, err := os.Open(os.DevNull)
	if err != nil {
		t.Fatal(err)
	}
	defer null.Close()
	for name, first := range map[string][]byte{
		"no greeting":           begin(kRoster, 1).b,
		"garbage":               {0xff},
		"a greeting cut short":  hello{version: wireVersion, dataID: "data"}.encode(kHello)[:9],
		"more than any message": make([]byte, maxMessage+1),
	} {
		c, err := scm.Dial(t.Context(), p.socket())
		if err != nil {
			t.Fatal(err)
		}
		if err := c.Send(t.Context(), first, null); err != nil {
			t.Fatal(err)
		}
		ctx, cancel := context.WithTimeout(t.Context(), 20*time.Second)
		for err == nil {
			_, _, err = c.Recv(ctx, make([]byte, maxMessage))
		}
		cancel()
		c.Close()
		if !errors.Is(err, io.EOF) {
			t.Errorf("%s: %v", name, err)
		}
	}
	// Nonsense after the greeting is answered or ends the connection, and harms nobody else.
	for _, msg := range [][]byte{
		begin(99, 999).b, begin(kHold, 999).b, begin(kRecord, 999).b, begin(kRearm, 999).b,
		append(begin(kRecord, 999).b, 1, 2, 3),
	} {
		if err := good.c.Send(t.Context(), msg); err != nil {
			t.Fatal(err)
		}
	}
	if err := good.Hold(t.Context(), Sandbox{ID: "s1"}); err != nil {
		t.Errorf("after nonsense: %v", err)
	}
	if err := good.c.Send(t.Context(), begin(kRoster, 1).b, null); err != nil {
		t.Fatal(err)
	}
	if !eventually(20*time.Second, func() bool {
		return errors.Is(good.Suspend(t.Context(), "s1"), errdefs.Unavailable)
	}) {
		t.Error("files where none belong were taken")
	}
	if held, err := p.dial(t).Roster(t.Context()); err != nil || len(held) != 1 {
		t.Errorf("held %+v, %v", held, err)
	}
}

// TestAKeeperThatCanHoldNoMoreSaysSo fills the descriptor table of the keeper.
func TestAKeeperThatCanHoldNoMoreSaysSo(t *testing.T) {
	dir := t.TempDir()
	c := startKeeper(t, dir, smallLimits(32<<20, 64<<20, 60000, 1<<40, 64)...).dial(t)
	null, err := os.Open(os.DevNull)
	if err != nil {
		t.Fatal(err)
	}
	defer null.Close()
	var full error
	n := 0
	for ; n < 100 && full == nil; n++ {
		full = c.Hold(t.Context(), Sandbox{ID: fmt.Sprintf("s%d", n), Control: null, Kill: null})
	}
	if !errors.Is(full, errdefs.Exhausted) {
		t.Fatalf("after %d sandboxes: %v", n, full)
	}
	// What it holds it goes on holding, and room can be made.
	if err := c.Release(t.Context(), Key{Sandbox: "s1"}); err != nil {
		t.Fatal(err)
	}
	if err := c.Hold(t.Context(), Sandbox{ID: "late", Control: null, Kill: null}); err != nil {
		t.Error(err)
	}
	if err := c.Suspend(t.Context(), "s0"); err != nil {
		t.Error(err)
	}
}

func TestThereIsOneKeeperOfADirectory(t *testing.T) {
	dir := t.TempDir()
	p := startKeeper(t, dir)
	p.dial(t)
	err := Run(t.Context(), Config{Socket: p.socket(), DataID: "data", Index: dir})
	if !errors.Is(err, ErrRunning) {
		t.Errorf("got %v", err)
	}
	if err := p.cmd.Process.Signal(syscall.SIGTERM); err != nil {
		t.Fatal(err)
	}
	if err := p.cmd.Wait(); err != nil {
		t.Errorf("a keeper asked to end: %v", err)
	}
	p.cmd = nil
	if _, err := os.Stat(p.socket()); !errors.Is(err, os.ErrNotExist) {
		t.Errorf("its socket is left: %v", err)
	}
}

// TestRunInThisProcessGivesEverythingUp is for the leak checks: descriptors and goroutines before and after.
func TestRunInThisProcessGivesEverythingUp(t *testing.T) {
	dir := t.TempDir()
	count := func() int {
		e, err := os.ReadDir("/proc/self/fd")
		if err != nil {
			t.Fatal(err)
		}
		return len(e)
	}
	st, w := newRecord(t, dir, Key{"s1", 1}, record.Stdout)
	fds, routines := count(), runtime.NumGoroutine()
	ctx, cancel := context.WithCancel(t.Context())
	ended := make(chan error, 1)
	p := &process{dir: dir}
	go func() {
		ended <- Run(ctx, Config{Socket: p.socket(), DataID: "data", Index: dir, Log: slog.New(slog.DiscardHandler)})
	}()
	c := p.dial(t)
	if err := errors.Join(
		c.Hold(t.Context(), Sandbox{ID: "s1", Control: w, Kill: w}),
		c.Record(t.Context(), Exec{Key: Key{"s1", 1}, Streams: []Stream{st}, Stdin: w, Kill: w}),
	); err != nil {
		t.Fatal(err)
	}
	cancel()
	if err := <-ended; err != nil {
		t.Error(err)
	}
	c.Close()
	if !eventually(20*time.Second, func() bool { return count() <= fds && runtime.NumGoroutine() <= routines }) {
		t.Errorf("%d descriptors, %d before; %d goroutines, %d before", count(), fds, runtime.NumGoroutine(), routines)
	}
}

// TestAReleaseIsAnsweredOnceNobodyReadsThePipes: the edge then takes what is left in them, see sessions.
func TestAReleaseIsAnsweredOnceNobodyReadsThePipes(t *testing.T) {
	dir := t.TempDir()
	idx, err := openIndex(filepath.Join(dir, "keeper.index"), "boot", "data", nil)
	if err != nil {
		t.Fatal(err)
	}
	defer func() { _ = idx.close() }()
	p := &process{dir: dir}
	s, err := newServer(Config{
		Socket: p.socket(), DataID: "data", Log: slog.New(slog.DiscardHandler), limits: defaultLimits(),
	}, idx, -1)
	if err != nil {
		t.Fatal(err)
	}
	ended := make(chan error, 1)
	go func() { ended <- s.run() }()
	defer func() {
		s.tell(func() { s.ends = true })
		if err := <-ended; err != nil {
			t.Error(err)
		}
		s.close()
	}()
	c := p.dial(t)
	st, _ := newRecord(t, dir, Key{"s1", 1}, record.Stdout)
	if err := errors.Join(
		c.Hold(t.Context(), Sandbox{ID: "s1"}),
		c.Record(t.Context(), Exec{Key: Key{"s1", 1}, Caps: record.DefaultCaps, Streams: []Stream{st}}),
	); err != nil {
		t.Fatal(err)
	}
	goOn := make(chan struct{})
	for _, r := range s.recs {
		r.tell(func() { <-goOn }) // at work on other streams
	}
	released := make(chan error, 1)
	go func() { released <- c.Release(t.Context(), Key{"s1", 1}) }()
	select {
	case err := <-released:
		t.Errorf("answered while the recorder still has the pipe: %v", err)
		released <- err
	case <-time.After(200 * time.Millisecond):
	}
	close(goOn)
	if err := <-released; err != nil {
		t.Fatal(err)
	}
	if err := c.Release(t.Context(), Key{"s1", 1}); err != nil {
		t.Errorf("once more: %v", err)
	}
}

// TestFiveHundredStreamsCostLittle prints what a keeper of 500 streams takes up, and what it does while nobody writes.
func TestFiveHundredStreamsCostLittle(t *testing.T) {
	const streams = 500
	dir := t.TempDir()
	p := startKeeper(t, dir)
	c := p.dial(t)
	l := listen(c)
	pid := p.cmd.Process.Pid
	rss := func() int {
		n, _ := strconv.Atoi(strings.Fields(procLine(pid, "status", "VmRSS:"))[0])
		return n
	}
	before := rss()
	writers := make([]*os.File, 0, streams)
	begun := time.Now()
	for n := int64(1); n <= streams/2; n++ {
		k := Key{fmt.Sprintf("s%d", n%50), n}
		if err := c.Hold(t.Context(), Sandbox{ID: k.Sandbox}); err != nil {
			t.Fatal(err)
		}
		out, wo := newRecord(t, dir, k, record.Stdout)
		errs, we := newRecord(t, dir, k, record.Stderr)
		e := Exec{
			Key: k, Caps: record.DefaultCaps, Streams: []Stream{out, errs}, Stdin: wo, Kill: we, Remaining: time.Hour,
		}
		if err := c.Record(t.Context(), e); err != nil {
			t.Fatal(err)
		}
		writers = append(writers, wo, we)
	}
	t.Logf("%d streams recorded in %v", streams, time.Since(begun))
	line := make([]byte, 100)
	for range 20 {
		for i, w := range writers {
			sequence(line, uint64(i), 0)
			if _, err := w.Write(line); err != nil {
				t.Fatal(err)
			}
		}
	}
	recorded := func() bool {
		for n := int64(1); n <= streams/2; n++ {
			for _, which := range []record.Stream{record.Stdout, record.Stderr} {
				fi, err := os.Stat(record.Path(dir, fmt.Sprintf("s%d", n%50), n, which))
				if err != nil || fi.Size() != 2000 {
					return false
				}
			}
		}
		return true
	}
	if !eventually(20*time.Second, recorded) {
		t.Fatal("not all was recorded")
	}
	ticks := cpuTicks(t, pid)
	const idle = 500 * time.Millisecond
	<-time.After(idle)
	ticks = cpuTicks(t, pid) - ticks
	t.Logf("RSS %d KB with 500 streams, %d KB without; %d ms CPU in %v of idleness", rss(), before, ticks*10, idle)
	if ticks > 1 {
		t.Errorf("%d ms CPU while idle", ticks*10)
	}
	begun = time.Now()
	held, err := c.Roster(t.Context())
	if err != nil || len(held) != streams/2+50 {
		t.Fatalf("%d entries, %v", len(held), err)
	}
	n := 0
	for _, h := range held {
		n += len(h.Files())
	}
	t.Logf("roster of %d descriptors in %v", n, time.Since(begun))
	CloseHeld(held)
	for n := range 50 {
		if err := c.Release(t.Context(), Key{Sandbox: fmt.Sprintf("s%d", n)}); err != nil {
			t.Fatal(err)
		}
	}
	if _, ok := l.find(func(e Event) bool { return true }); ok {
		t.Error("events of streams that did not end")
	}
}

// BenchmarkRecord is one Record and one Release, each a round trip to the keeper process.
func BenchmarkRecord(b *testing.B) {
	dir := b.TempDir()
	c := startKeeper(b, dir).dial(b)
	if err := c.Hold(b.Context(), Sandbox{ID: "s1"}); err != nil {
		b.Fatal(err)
	}
	out, wo := newRecord(b, dir, Key{"s1", 1}, record.Stdout)
	errs, we := newRecord(b, dir, Key{"s1", 1}, record.Stderr)
	var released time.Duration
	for n := int64(1); b.Loop(); n++ {
		e := Exec{
			Key: Key{"s1", n}, Caps: record.DefaultCaps, Streams: []Stream{out, errs}, Stdin: wo, Kill: we,
			Remaining: time.Hour,
		}
		if err := c.Record(b.Context(), e); err != nil {
			b.Fatal(err)
		}
		begun := time.Now()
		if err := c.Release(b.Context(), e.Key); err != nil {
			b.Fatal(err)
		}
		released += time.Since(begun)
	}
	b.ReportMetric(float64(b.Elapsed()-released)/float64(b.N)/1000, "µs/record")
	b.ReportMetric(float64(released)/float64(b.N)/1000, "µs/release")
}

// BenchmarkThroughput records 1 GiB of a writer in another process.
func BenchmarkThroughput(b *testing.B) {
	dir := b.TempDir()
	c := startKeeper(b, dir).dial(b)
	l := listen(c)
	if err := c.Hold(b.Context(), Sandbox{ID: "s1"}); err != nil {
		b.Fatal(err)
	}
	const total = 1 << 30
	b.SetBytes(total)
	for n := int64(1); b.Loop(); n++ {
		k := Key{"s1", n}
		st, w := newRecord(b, dir, k, record.Stdout)
		caps := record.Caps{Head: 1 << 40, Tail: 0}
		if err := c.Record(b.Context(), Exec{Key: k, Caps: caps, Streams: []Stream{st}}); err != nil {
			b.Fatal(err)
		}
		cmd := exec.Command("head", "-c", strconv.Itoa(total), "/dev/zero")
		cmd.Stdout = w
		if err := cmd.Start(); err != nil {
			b.Fatal(err)
		}
		w.Close()
		l.wait(b, of(Closed, k))
		if err := cmd.Wait(); err != nil {
			b.Fatal(err)
		}
		if err := c.Release(b.Context(), k); err != nil {
			b.Fatal(err)
		}
		os.Remove(st.File.Name())
		st.Pipe.Close()
		st.File.Close()
	}
}
