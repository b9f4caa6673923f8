package keeper

import (
	"context"
	"errors"
	"fmt"
	"math/rand/v2"
	"os"
	"path/filepath"
	"slices"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"

	"github.com/sandsea/sandsea/api/errdefs"
	"github.com/sandsea/sandsea/internal/linux/pidfd"
	"github.com/sandsea/sandsea/internal/linux/pipe"
	"github.com/sandsea/sandsea/internal/linux/scm"
	"github.com/sandsea/sandsea/internal/record"
)

// version makes a copy of this program, another file as another version is.
func version(t *testing.T) *os.File {
	t.Helper()
	b, err := os.ReadFile("/proc/self/exe")
	if err != nil {
		t.Fatal(err)
	}
	path := filepath.Join(t.TempDir(), "keeper")
	if err := os.WriteFile(path, b, 0o755); err != nil {
		t.Fatal(err)
	}
	f, err := os.Open(path)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { f.Close() })
	return f
}

// upgrade makes the keeper the program that f is, and dials it.
func (p *process) upgrade(t *testing.T, f *os.File) *Conn {
	t.Helper()
	held, err := Upgrade(t.Context(), p.socket(), "data", f, []string{f.Name(), "keeper"})
	if err != nil {
		t.Fatal(err)
	}
	c := p.dial(t)
	if err := Restore(t.Context(), c, held); err != nil {
		t.Fatal(err)
	}
	exe, err := os.Readlink(fmt.Sprintf("/proc/%d/exe", p.cmd.Process.Pid))
	if err != nil || exe != f.Name() || c.Pid() != p.cmd.Process.Pid {
		t.Fatalf("process %d runs %s, %v; was process %d", c.Pid(), exe, err, p.cmd.Process.Pid)
	}
	return c
}

func TestUpgradesUnderFullOutputLoseNoByte(t *testing.T) {
	const writers, total, upgrades = 3, 96 << 20, 20
	dir := t.TempDir()
	p := startKeeper(t, dir)
	c := p.dial(t)
	l := listen(c)
	if err := c.Hold(t.Context(), Sandbox{ID: "s1"}); err != nil {
		t.Fatal(err)
	}
	versions := []*os.File{version(t), version(t)}
	r := rand.New(rand.NewPCG(2, uint64(os.Getpid())))
	done := 0
	var longest time.Duration
	for number := int64(1); done < upgrades; number += writers {
		var children []*child
		for i := range int64(writers) {
			children = append(children, startWriter(t, c, dir, Key{"s1", number + i}, total, wide))
		}
		whileWriting(t, children, r, 60*time.Millisecond, func() {
			if done >= upgrades {
				return
			}
			begin := time.Now()
			c = p.upgrade(t, versions[done%2])
			longest = max(longest, time.Since(begin))
			l = listen(c)
			done++
		})
		for _, ch := range children {
			e := l.wait(t, of(Closed, ch.exec.Key))
			if e.Size != total {
				t.Errorf("stream of %d bytes, want %d", e.Size, total)
			}
			checkRecord(t, ch.path, ch.seed, total)
			if err := c.Release(t.Context(), ch.exec.Key); err != nil {
				t.Fatal(err)
			}
			os.Remove(ch.path)
		}
	}
	t.Logf("%d upgrades, longest until the new program answered %v", done, longest)
}

// all is the roster without its descriptors, in order, with the times that go on rounded.
func all(t *testing.T, c Client) (list []Held) {
	t.Helper()
	held, err := c.Roster(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	for _, h := range held {
		scm.CloseFiles(h.Files())
		// Told again by the new program once it has looked.
		h.Closed = nil
		if s := h.Sandbox; s != nil {
			s.Control, s.Pidfd, s.Kill = nil, nil, nil
		}
		if e := h.Exec; e != nil {
			e.Stdin, e.Kill = nil, nil
			e.Remaining = e.Remaining.Round(time.Minute)
			for i := range e.Streams {
				e.Streams[i].Pipe, e.Streams[i].File = nil, nil
			}
		}
		list = append(list, h)
	}
	slices.SortFunc(list, func(a, b Held) int { return order(a) - order(b) })
	return list
}

func order(h Held) int {
	if h.Exec != nil {
		return int(h.Exec.Key.Number)
	}
	return int(h.Sandbox.ID[1]) - 1000
}

func descriptors(t *testing.T, pid int) int {
	t.Helper()
	list, err := os.ReadDir(fmt.Sprintf("/proc/%d/fd", pid))
	if err != nil {
		t.Fatal(err)
	}
	return len(list)
}

func TestAnUpgradeKeepsWhatIsHeld(t *testing.T) {
	dir := t.TempDir()
	p := startKeeper(t, dir)
	c := p.dial(t)
	self, err := pidfd.Open(os.Getpid())
	if err != nil {
		t.Fatal(err)
	}
	defer self.Close()
	inside, outside, err := scm.Socketpair()
	if err != nil {
		t.Fatal(err)
	}
	defer inside.Close()
	defer outside.Close()
	killed, kill, err := pipe.New() // stands for cgroup.kill
	if err != nil {
		t.Fatal(err)
	}
	defer killed.Close()
	defer kill.Close()
	stdin, feed, err := pipe.New()
	if err != nil {
		t.Fatal(err)
	}
	defer stdin.Close()
	hard := time.Now().Add(time.Hour).Round(0)
	for _, s := range []Sandbox{
		{ID: "s1", Control: outside, Pidfd: self, Kill: kill, Hard: hard, Budget: 1 << 30},
		{ID: "s2", Control: outside, Suspended: true},
	} {
		if err := c.Hold(t.Context(), s); err != nil {
			t.Fatal(err)
		}
	}
	st, w := newRecord(t, dir, Key{"s1", 1}, record.Stdout)
	st.Pins = []record.Range{{From: 3, To: 9}}
	late, _ := newRecord(t, dir, Key{"s1", 2}, record.Stdout)
	for _, e := range []Exec{
		{Key: Key{"s1", 1}, Caps: record.Caps{Head: 100, Tail: 200}, Streams: []Stream{st}, Stdin: feed, Kill: kill, Remaining: time.Hour},
		{Key: Key{"s1", 2}, Streams: []Stream{late}, Kill: kill, Remaining: time.Millisecond},
		{Key: Key{"s2", 3}, Kill: kill, Remaining: 2 * time.Hour},
	} {
		if err := c.Record(t.Context(), e); err != nil {
			t.Fatal(err)
		}
	}
	feed.Close()
	listen(c).wait(t, of(Fired, Key{"s1", 2}))
	want := all(t, c)
	pid := p.cmd.Process.Pid
	before := descriptors(t, pid)

	v := version(t)
	c = p.upgrade(t, v)
	if diff := cmp.Diff(want, all(t, c)); diff != "" {
		t.Errorf("held (-before +after):\n%s", diff)
	}
	if !eventually(20*time.Second, func() bool { return descriptors(t, pid) == before }) {
		t.Errorf("%d descriptors, before %d", descriptors(t, pid), before)
	}
	l := listen(c)
	// What was decided stays so, and is told again to a line that has not acknowledged it.
	l.wait(t, of(Fired, Key{"s1", 2}))
	// Deadlines and inputs go on.
	if err := c.Rearm(t.Context(), Key{"s1", 1}, time.Time{}, time.Millisecond); err != nil {
		t.Fatal(err)
	}
	l.wait(t, of(Fired, Key{"s1", 1}))
	if err := c.CloseInput(t.Context(), Key{"s1", 1}); err != nil {
		t.Fatal(err)
	}
	if n, err := stdin.Read(make([]byte, 1)); n != 0 || err == nil {
		t.Errorf("input is not closed: %d, %v", n, err)
	}
	w.Close()
	l.wait(t, of(Closed, Key{"s1", 1}))
	// Nothing is passed on to what is not ours: a second upgrade finds the same.
	c = p.upgrade(t, version(t))
	if err := c.Release(t.Context(), Key{Sandbox: "s1"}); err != nil {
		t.Fatal(err)
	}
	if left := all(t, c); len(left) != 2 {
		t.Errorf("left: %+v", left)
	}
}

func TestAProgramThatDoesNotRunChangesNothing(t *testing.T) {
	dir := t.TempDir()
	p := startKeeper(t, dir)
	c := p.dial(t)
	if err := c.Hold(t.Context(), Sandbox{ID: "s1"}); err != nil {
		t.Fatal(err)
	}
	path := filepath.Join(dir, "text")
	if err := os.WriteFile(path, []byte("no program\n"), 0o755); err != nil {
		t.Fatal(err)
	}
	f, err := os.Open(path)
	if err != nil {
		t.Fatal(err)
	}
	defer f.Close()
	held, err := Upgrade(t.Context(), p.socket(), "data", f, []string{path})
	CloseHeld(held)
	if !errors.Is(err, errdefs.FailedPrecondition) {
		t.Fatalf("got %v", err)
	}
	c = p.dial(t)
	if got := all(t, c); len(got) != 1 {
		t.Errorf("held: %+v", got)
	}
	// It tries again, with a program that runs.
	p.upgrade(t, version(t))
}

// A program that runs and ends takes everything along; what Upgrade returned makes another keeper whole.
func TestAKeeperThatDiesInItsUpgradeIsMadeGood(t *testing.T) {
	dir := t.TempDir()
	p := startKeeper(t, dir)
	c := p.dial(t)
	if err := c.Hold(t.Context(), Sandbox{ID: "s1"}); err != nil {
		t.Fatal(err)
	}
	const total = 64 << 20
	ch := startWriter(t, c, dir, Key{"s1", 1}, total, wide)
	f, err := os.Open("/bin/true")
	if err != nil {
		t.Skip(err)
	}
	defer f.Close()
	held, err := Upgrade(t.Context(), p.socket(), "data", f, []string{"/bin/true"})
	if err != nil {
		t.Fatal(err)
	}
	_ = p.cmd.Wait()
	for _, s := range ch.exec.Streams { // the edge has nothing but what was returned
		s.Pipe.Close()
	}
	p.start(t)
	c = p.dial(t)
	l := listen(c)
	if err := Restore(t.Context(), c, held); err != nil {
		t.Fatal(err)
	}
	if err := ch.cmd.Wait(); err != nil {
		t.Fatalf("writer: %v: %s", err, ch.stderr.String())
	}
	if e := l.wait(t, of(Closed, ch.exec.Key)); e.Size != total {
		t.Errorf("stream of %d bytes, want %d", e.Size, total)
	}
	checkRecord(t, ch.path, ch.seed, total)
}

func TestAPeerOfAnotherVersionMayUpgradeAndNoMore(t *testing.T) {
	p := startKeeper(t, t.TempDir())
	c := p.dial(t)
	if err := c.Hold(t.Context(), Sandbox{ID: "s1"}); err != nil {
		t.Fatal(err)
	}
	ctx, stop := context.WithTimeout(t.Context(), 20*time.Second)
	defer stop()
	foreign := func() *scm.Conn {
		sc, err := scm.Dial(ctx, p.socket())
		if err != nil {
			t.Fatal(err)
		}
		t.Cleanup(func() { _ = sc.Close() })
		if err := sc.Send(ctx, hello{version: wireVersion + 1, dataID: "data", features: upgrades}.encode(kHello)); err != nil {
			t.Fatal(err)
		}
		receive(ctx, t, sc, kWelcome)
		return sc
	}
	sc := foreign()
	if err := sc.Send(ctx, begin(kRoster, 7).b); err != nil {
		t.Fatal(err)
	}
	receive(ctx, t, sc, kHeldSandbox)
	receive(ctx, t, sc, kReply)
	if err := sc.Send(ctx, keyMsg{key: Key{Sandbox: "s1"}}.encode(kRelease, 8)); err != nil {
		t.Fatal(err)
	}
	if _, _, err := sc.Recv(ctx, make([]byte, maxMessage)); err == nil {
		t.Error("it may release")
	}
	if got := all(t, c); len(got) != 1 {
		t.Errorf("the edge's own line, or what is held, is gone: %+v", got)
	}
	v := version(t)
	sc = foreign()
	if err := sc.Send(ctx, encodeArgv(9, []string{v.Name()}), v); err != nil {
		t.Fatal(err)
	}
	if _, _, err := sc.Recv(ctx, make([]byte, maxMessage)); err == nil {
		t.Error("the line outlived the program")
	}
	if got := all(t, p.dial(t)); len(got) != 1 {
		t.Errorf("held: %+v", got)
	}
}

func receive(ctx context.Context, t *testing.T, sc *scm.Conn, want kind) {
	t.Helper()
	buf := make([]byte, maxMessage)
	n, files, err := sc.Recv(ctx, buf)
	scm.CloseFiles(files)
	if k, _, _ := open(buf[:n]); err != nil || k != want {
		t.Fatalf("message %d, %v; want %d", k, err, want)
	}
}

func TestTablesThatAreNone(t *testing.T) {
	s := &server{cfg: Config{DataID: "data"}, listen: 5, boxes: map[string]*held{
		"s1": {id: "s1", control: 7, pidfd: -1, kill: -1, execs: map[int64]*heldExec{
			1: {key: Key{"s1", 1}, stdin: 8, kill: -1},
		}},
	}}
	lock, err := os.CreateTemp(t.TempDir(), "lock")
	if err != nil {
		t.Fatal(err)
	}
	s.index = &index{lock: lock}
	good, _ := s.table(features)
	h, fd, err := decodeTable(good, "data")
	if err != nil || len(h.entries) != 2 || h.listen != 5 || fd != int(lock.Fd()) {
		t.Fatalf("%+v, %d, %v", h, fd, err)
	}
	if _, _, err := decodeTable(good, "other"); err == nil {
		t.Error("a table of another data directory")
	}
	whole := 0
	for cut := 1; cut < len(good); cut++ {
		// At the end of an entry nothing is missing that could be seen.
		if h, _, err := decodeTable(good[:cut], "data"); err == nil {
			whole++
			if len(h.entries) > 1 {
				t.Errorf("cut at %d of %d: %d entries", cut, len(good), len(h.entries))
			}
		}
	}
	if whole != 2 {
		t.Errorf("%d cuts were not seen, want 2", whole)
	}
}
