// Package conform is the suite that every keeper.Client must pass.
package conform

import (
	"bytes"
	"errors"
	"io"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"sync"
	"syscall"
	"testing"
	"time"

	"github.com/sandsea/sandsea/api/errdefs"
	"github.com/sandsea/sandsea/internal/keeper"
	"github.com/sandsea/sandsea/internal/linux/pidfd"
	"github.com/sandsea/sandsea/internal/linux/pipe"
	"github.com/sandsea/sandsea/internal/linux/sparse"
	"github.com/sandsea/sandsea/internal/record"
)

// limit bounds every wait of the suite.
const limit = 20 * time.Second

// Dial makes a new connection to one keeper.
type Dial func(t *testing.T) keeper.Client

// Run runs the suite. fresh makes a keeper that holds nothing and lives as long as its test.
func Run(t *testing.T, fresh func(t *testing.T) Dial) {
	for _, c := range []struct {
		name string
		run  func(t *testing.T, w *world)
	}{
		{"output is recorded and its end told", testOutput},
		{"recording goes on at the record's size", testGoesOn},
		{"repeats change nothing", testRepeats},
		{"what is not held is not found, and cannot be recorded for", testUnknown},
		{"what cannot be recorded is refused", testRefused},
		{"the keeper's descriptors stand in for ours", testSecondHolder},
		{"input ends when both holders closed it", testCloseInput},
		{"release gives up every descriptor and may be repeated", testRelease},
		{"the roster gives everything back", testRoster},
		{"a command's deadline is kept, told and remembered", testDeadline},
		{"deadlines can be set anew and lifted", testRearm},
		{"the clocks of a suspended sandbox's commands stand still", testSuspend},
		{"a sandbox's hard end comes also while it is suspended", testHard},
		{"the death of PID 1 is told", testDied},
		{"events come again on every connection until they are acknowledged", testEvents},
		{"a new connection supersedes the old one", testSupersede},
		{"head and tail are kept and the middle is not", testHeadTail},
		{"the budget of a sandbox bounds its streams together", testBudget},
		{"a stream may keep one end only", testOneEnd},
		{"nothing after a lossless reader's offset is punched", testRetain},
		{"pinned ranges are not punched", testPin},
		{"a terminal is recorded like a pipe", testTerminal},
		{"a terminal that has ended is recorded", testTerminalEnded},
		{"the roster gives terminals back", testTerminalRoster},
		{"release hangs a terminal up", testTerminalRelease},
		{"head and tail of a terminal are kept", testTerminalCaps},
		{"what is no terminal is refused", testTerminalRefused},
	} {
		t.Run(c.name, func(t *testing.T) {
			w := &world{t: t, dir: t.TempDir(), dial: fresh(t)}
			w.connect()
			w.must(w.c.Hold(t.Context(), keeper.Sandbox{ID: "s1"}))
			c.run(t, w)
		})
	}
}

// world is one test's keeper and what it told.
type world struct {
	t    *testing.T
	dir  string
	dial Dial
	c    keeper.Client

	mu     sync.Mutex
	events []keeper.Event // of the present connection; guarded by mu
}

func (w *world) connect() {
	w.t.Helper()
	c := w.dial(w.t)
	w.t.Cleanup(func() { _ = c.Close() })
	w.mu.Lock()
	w.c, w.events = c, nil
	w.mu.Unlock()
	go func() {
		for e, err := range c.Events() {
			w.mu.Lock()
			if w.c == c && err == nil {
				w.events = append(w.events, e)
			}
			w.mu.Unlock()
		}
	}()
}

func (w *world) must(err error) {
	w.t.Helper()
	if err != nil {
		w.t.Fatal(err)
	}
}

func (w *world) eventually(what string, ok func() bool) {
	w.t.Helper()
	tick := time.NewTicker(time.Millisecond)
	defer tick.Stop()
	for end := time.Now().Add(limit); !ok(); <-tick.C {
		if time.Now().After(end) {
			w.t.Fatalf("not in time: %s", what)
		}
	}
}

func (w *world) find(kind keeper.EventKind, k keeper.Key, s record.Stream) (keeper.Event, bool) {
	w.mu.Lock()
	defer w.mu.Unlock()
	i := slices.IndexFunc(w.events, func(e keeper.Event) bool {
		return e.Kind == kind && e.Key == k && e.Stream == s
	})
	if i < 0 {
		return keeper.Event{}, false
	}
	return w.events[i], true
}

func (w *world) wait(kind keeper.EventKind, k keeper.Key, s record.Stream) keeper.Event {
	w.t.Helper()
	var e keeper.Event
	w.eventually(string(kind), func() (ok bool) { e, ok = w.find(kind, k, s); return ok })
	return e
}

func key(n int64) keeper.Key { return keeper.Key{Sandbox: "s1", Number: n} }

// pipe makes a pipe whose ends are closed with the test.
func (w *world) pipe() (r, wr *os.File) {
	w.t.Helper()
	r, wr, err := pipe.New()
	w.must(err)
	w.t.Cleanup(func() { r.Close(); wr.Close() })
	return r, wr
}

// stream makes a stream and the end to write to.
func (w *world) stream(n int64, s record.Stream) (keeper.Stream, *os.File) {
	w.t.Helper()
	r, wr := w.pipe()
	path := record.Path(w.dir, "s1", n, s)
	w.must(os.MkdirAll(filepath.Dir(path), 0o700))
	f, err := os.OpenFile(path, os.O_RDWR|os.O_CREATE, 0o600)
	w.must(err)
	w.t.Cleanup(func() { f.Close() })
	return keeper.Stream{Stream: s, Pipe: r, File: f}, wr
}

// kill makes something that takes the place of cgroup.kill, and the end that shows what was written to it.
func (w *world) kill() (kill, shows *os.File) {
	r, wr := w.pipe()
	return wr, r
}

// killed reports whether something was written.
func killed(shows *os.File) bool {
	n, err := pipe.Buffered(int(shows.Fd()))
	return err == nil && n > 0
}

func (w *world) write(f *os.File, b []byte) {
	w.t.Helper()
	if _, err := f.Write(b); err != nil {
		w.t.Fatal(err)
	}
}

func testOutput(t *testing.T, w *world) {
	out, wo := w.stream(1, record.Stdout)
	errs, we := w.stream(1, record.Stderr)
	w.must(w.c.Record(t.Context(), keeper.Exec{
		Key: key(1), Caps: record.DefaultCaps, Streams: []keeper.Stream{out, errs},
	}))
	var sent []byte
	for i := range 200 {
		line := bytes.Repeat([]byte{byte(i)}, i*37)
		sent = append(sent, line...)
		w.write(wo, line)
	}
	w.write(we, []byte("oops"))
	wo.Close()
	if e := w.wait(keeper.Closed, key(1), record.Stdout); e.Size != int64(len(sent)) {
		t.Errorf("size %d, want %d", e.Size, len(sent))
	}
	if got, err := os.ReadFile(out.File.Name()); err != nil || !bytes.Equal(got, sent) {
		t.Errorf("%d bytes recorded of %d, %v", len(got), len(sent), err)
	}
	w.eventually("standard error", func() bool {
		got, err := os.ReadFile(errs.File.Name())
		return err == nil && string(got) == "oops"
	})
	if _, ok := w.find(keeper.Closed, key(1), record.Stderr); ok {
		t.Error("standard error is told to be closed while a writer is left")
	}
	we.Close()
	w.wait(keeper.Closed, key(1), record.Stderr)
}

func testGoesOn(t *testing.T, w *world) {
	out, wo := w.stream(1, record.Stdout)
	if _, err := out.File.WriteAt([]byte("before "), 0); err != nil {
		t.Fatal(err)
	}
	w.write(wo, []byte("and after"))
	wo.Close()
	w.must(w.c.Record(t.Context(), keeper.Exec{Key: key(1), Streams: []keeper.Stream{out}, Caps: record.DefaultCaps}))
	if e := w.wait(keeper.Closed, key(1), record.Stdout); e.Size != 16 {
		t.Errorf("size %d", e.Size)
	}
	if got, err := os.ReadFile(out.File.Name()); err != nil || string(got) != "before and after" {
		t.Errorf("recorded %q, %v", got, err)
	}
}

func testRepeats(t *testing.T, w *world) {
	kill, shows := w.kill()
	out, wo := w.stream(1, record.Stdout)
	e := keeper.Exec{Key: key(1), Streams: []keeper.Stream{out}, Caps: record.DefaultCaps, Kill: kill}
	for range 3 {
		w.must(w.c.Record(t.Context(), e))
		w.must(w.c.Hold(t.Context(), keeper.Sandbox{ID: "s1", Hard: time.Now().Add(-time.Hour), Kill: kill}))
		e.Remaining = time.Nanosecond
	}
	w.write(wo, []byte("once"))
	wo.Close()
	if ev := w.wait(keeper.Closed, key(1), record.Stdout); ev.Size != 4 {
		t.Errorf("size %d", ev.Size)
	}
	if killed(shows) {
		t.Error("a repeated request armed a deadline")
	}
	for range 2 {
		w.must(w.c.Suspend(t.Context(), "s1"))
	}
	for range 2 {
		w.must(w.c.Continue(t.Context(), "s1"))
	}
}

func testUnknown(t *testing.T, w *world) {
	ctx := t.Context()
	out, _ := w.stream(1, record.Stdout)
	err := w.c.Record(ctx, keeper.Exec{Key: keeper.Key{Sandbox: "s2", Number: 1}, Streams: []keeper.Stream{out}})
	if !errors.Is(err, errdefs.FailedPrecondition) {
		t.Errorf("record without its sandbox: %v", err)
	}
	w.must(w.c.Record(ctx, keeper.Exec{Key: key(1), Streams: []keeper.Stream{out}}))
	for name, err := range map[string]error{
		"rearm a sandbox":       w.c.Rearm(ctx, keeper.Key{Sandbox: "s2"}, time.Now(), 0),
		"rearm a command":       w.c.Rearm(ctx, key(2), time.Time{}, time.Hour),
		"suspend":               w.c.Suspend(ctx, "s2"),
		"continue":              w.c.Continue(ctx, "s2"),
		"retain of no command":  w.c.Retain(ctx, key(2), record.Stdout, 0),
		"retain of no stream":   w.c.Retain(ctx, key(1), record.Stderr, 0),
		"close input":           w.c.CloseInput(ctx, key(2)),
		"close a sandbox's own": w.c.CloseInput(ctx, key(0)),
	} {
		if !errors.Is(err, errdefs.NotFound) {
			t.Errorf("%s: %v", name, err)
		}
	}
	w.must(w.c.Ack(12345))
}

func testRefused(t *testing.T, w *world) {
	ctx := t.Context()
	good, wo := w.stream(1, record.Stdout)
	kill, _ := w.kill()
	readOnly, err := os.Open(good.File.Name())
	w.must(err)
	defer readOnly.Close()
	appends, err := os.OpenFile(good.File.Name(), os.O_RDWR|os.O_APPEND, 0)
	w.must(err)
	defer appends.Close()
	for name, e := range map[string]keeper.Exec{
		"a pipe that is none":         {Streams: []keeper.Stream{{Stream: 1, Pipe: good.File, File: good.File}}},
		"a record that is a pipe":     {Streams: []keeper.Stream{{Stream: 1, Pipe: good.Pipe, File: wo}}},
		"a record to read only":       {Streams: []keeper.Stream{{Stream: 1, Pipe: good.Pipe, File: readOnly}}},
		"a record for appending":      {Streams: []keeper.Stream{{Stream: 1, Pipe: good.Pipe, File: appends}}},
		"the same stream twice":       {Streams: []keeper.Stream{good, good}},
		"a deadline without its kill": {Remaining: time.Hour},
		"a negative deadline":         {Remaining: -1, Kill: kill},
		"negative caps":               {Caps: record.Caps{Head: -1}},
	} {
		e.Key = key(1)
		if err := w.c.Record(ctx, e); !errors.Is(err, errdefs.Invalid) {
			t.Errorf("%s: %v", name, err)
		}
	}
	for name, s := range map[string]keeper.Sandbox{
		"no name":                     {},
		"a name that is no word":      {ID: "a b"},
		"a hard end without its kill": {ID: "s2", Hard: time.Now().Add(time.Hour)},
	} {
		if err := w.c.Hold(ctx, s); !errors.Is(err, errdefs.Invalid) {
			t.Errorf("%s: %v", name, err)
		}
	}
	held, err := w.c.Roster(ctx)
	w.must(err)
	if len(held) != 1 {
		t.Errorf("held after refusals: %+v", held)
	}
}

func testSecondHolder(t *testing.T, w *world) {
	out, wo := w.stream(1, record.Stdout)
	w.must(w.c.Record(t.Context(), keeper.Exec{Key: key(1), Streams: []keeper.Stream{out}, Caps: record.DefaultCaps}))
	out.Pipe.Close()
	out.File.Close()
	w.must(w.c.Close())
	w.write(wo, bytes.Repeat([]byte("x"), 300<<10)) // more than a pipe holds
	wo.Close()
	w.connect()
	if e := w.wait(keeper.Closed, key(1), record.Stdout); e.Size != 300<<10 {
		t.Errorf("size %d", e.Size)
	}
}

func testCloseInput(t *testing.T, w *world) {
	in, wi := w.pipe()
	w.must(w.c.Record(t.Context(), keeper.Exec{Key: key(1), Stdin: wi}))
	w.write(wi, []byte("x"))
	wi.Close()
	got := make([]byte, 1)
	if _, err := io.ReadFull(in, got); err != nil {
		t.Fatal(err)
	}
	atEnd := make(chan struct{})
	go func() {
		defer close(atEnd)
		if n, err := in.Read(got); n != 0 || !errors.Is(err, io.EOF) {
			t.Errorf("read %d, %v", n, err)
		}
	}()
	select {
	case <-atEnd:
		t.Error("input ended while the keeper held it")
	case <-time.After(10 * time.Millisecond):
	}
	for range 2 {
		w.must(w.c.CloseInput(t.Context(), key(1)))
	}
	select {
	case <-atEnd:
	case <-time.After(limit):
		t.Error("input did not end")
	}
}

func testRelease(t *testing.T, w *world) {
	ctx := t.Context()
	ctl, ctlPeer := w.pipe()
	w.must(w.c.Hold(ctx, keeper.Sandbox{ID: "s2", Control: ctl}))
	for n := int64(1); n <= 2; n++ {
		out, wo := w.stream(n, record.Stdout)
		in, wi := w.pipe()
		k := keeper.Key{Sandbox: "s2", Number: n}
		w.must(w.c.Record(ctx, keeper.Exec{Key: k, Streams: []keeper.Stream{out}, Stdin: wi}))
		out.Pipe.Close()
		wi.Close()
		if n == 1 {
			w.must(w.c.Release(ctx, k))
		} else {
			ctl.Close()
			w.must(w.c.Release(ctx, keeper.Key{Sandbox: "s2"}))
			w.eventually("the control descriptor to be closed", func() bool {
				_, err := ctlPeer.Write([]byte("x"))
				return errors.Is(err, syscall.EPIPE)
			})
		}
		w.eventually("the pipe to be closed", func() bool {
			_, err := wo.Write([]byte("x"))
			return errors.Is(err, syscall.EPIPE)
		})
		if m, err := in.Read(make([]byte, 1)); m != 0 || !errors.Is(err, io.EOF) {
			t.Errorf("input goes on after release: %d, %v", m, err)
		}
		w.must(w.c.Release(ctx, k))
	}
	w.must(w.c.Release(ctx, keeper.Key{Sandbox: "s2"}))
	held, err := w.c.Roster(ctx)
	w.must(err)
	if len(held) != 1 || held[0].Sandbox.ID != "s1" {
		t.Errorf("still held: %+v", held)
	}
}

// same reports whether two descriptors are of one open thing.
func same(t *testing.T, a, b *os.File) bool {
	t.Helper()
	if a == nil || b == nil {
		return a == b
	}
	fa, err := a.Stat()
	if err != nil {
		t.Fatal(err)
	}
	fb, err := b.Stat()
	if err != nil {
		t.Fatal(err)
	}
	return os.SameFile(fa, fb)
}

func testRoster(t *testing.T, w *world) {
	ctx := t.Context()
	ctl, _ := w.pipe()
	kill, _ := w.kill()
	self, err := pidfd.Open(os.Getpid())
	w.must(err)
	defer self.Close()
	hard := time.Now().Add(time.Hour)
	box := keeper.Sandbox{
		ID: "s2", Control: ctl, Pidfd: self, Kill: kill, Hard: hard, Budget: 123, Suspended: true,
	}
	w.must(w.c.Hold(ctx, box))
	k := keeper.Key{Sandbox: "s2", Number: 1 << 40}
	out, wo := w.stream(1, record.Stdout)
	errs, _ := w.stream(1, record.Stderr)
	out.Pins = []record.Range{{From: 1, To: 2}}
	_, wi := w.pipe()
	caps := record.Caps{Head: 5, Tail: 7}
	w.must(w.c.Record(ctx, keeper.Exec{
		Key: k, Streams: []keeper.Stream{out, errs}, Caps: caps, Stdin: wi, Kill: kill, Remaining: time.Minute,
	}))
	wo.Close()
	w.wait(keeper.Closed, k, record.Stdout)
	w.connect()
	held, err := w.c.Roster(ctx)
	w.must(err)
	defer func() {
		for _, h := range held {
			for _, f := range h.Files() {
				f.Close()
			}
		}
	}()
	if len(held) != 3 {
		t.Fatalf("%d entries", len(held))
	}
	for _, h := range held {
		switch {
		case h.Sandbox != nil && h.Sandbox.ID == "s1":
		case h.Sandbox != nil:
			s := h.Sandbox
			if s.ID != "s2" || !same(t, s.Control, ctl) || !same(t, s.Kill, kill) || s.Pidfd == nil ||
				!s.Hard.Equal(hard) || s.Budget != 123 || !s.Suspended || h.Fired {
				t.Errorf("sandbox: %+v", s)
			}
		default:
			e := h.Exec
			if e.Key != k || e.Caps != caps || e.Remaining != time.Minute || !same(t, e.Stdin, wi) ||
				!same(t, e.Kill, kill) || len(e.Streams) != 2 || h.Fired ||
				!slices.Equal(h.Closed, []record.Stream{record.Stdout}) {
				t.Fatalf("command: %+v, closed %v", e, h.Closed)
			}
			for i, want := range []keeper.Stream{out, errs} {
				got := e.Streams[i]
				if got.Stream != want.Stream || !same(t, got.Pipe, want.Pipe) || !same(t, got.File, want.File) ||
					!slices.Equal(got.Pins, want.Pins) {
					t.Errorf("stream: %+v, want %+v", got, want)
				}
			}
		}
	}
}

func testDeadline(t *testing.T, w *world) {
	ctx := t.Context()
	kill, shows := w.kill()
	begun := time.Now()
	const after = 50 * time.Millisecond
	w.must(w.c.Record(ctx, keeper.Exec{Key: key(1), Kill: kill, Remaining: after}))
	w.must(w.c.Record(ctx, keeper.Exec{Key: key(2), Kill: kill, Remaining: time.Hour}))
	w.wait(keeper.Fired, key(1), 0)
	if d := time.Since(begun); d < after || d > after+limit/4 {
		t.Errorf("fired after %v", d)
	}
	got := make([]byte, 10)
	if n, err := shows.Read(got); err != nil || string(got[:n]) != "1" {
		t.Errorf("wrote %q, %v", got[:n], err)
	}
	if err := w.c.Rearm(ctx, key(1), time.Time{}, time.Hour); !errors.Is(err, errdefs.FailedPrecondition) {
		t.Errorf("rearm after the end: %v", err)
	}
	held, err := w.c.Roster(ctx)
	w.must(err)
	for _, h := range held {
		if h.Exec != nil && h.Fired != (h.Exec.Key == key(1)) {
			t.Errorf("%v: fired %v", h.Exec.Key, h.Fired)
		}
		for _, f := range h.Files() {
			f.Close()
		}
	}
}

// slack is how late a request may be that changes a deadline.
const slack = time.Second

func testRearm(t *testing.T, w *world) {
	ctx := t.Context()
	kill, shows := w.kill()
	w.must(w.c.Record(ctx, keeper.Exec{Key: key(1), Kill: kill, Remaining: slack}))
	w.must(w.c.Rearm(ctx, key(1), time.Time{}, 0))
	w.must(w.c.Record(ctx, keeper.Exec{Key: key(2), Kill: kill}))
	w.must(w.c.Rearm(ctx, key(2), time.Time{}, slack+50*time.Millisecond))
	w.wait(keeper.Fired, key(2), 0)
	if _, ok := w.find(keeper.Fired, key(1), 0); ok {
		t.Error("a lifted deadline fired")
	}
	killS, showsS := w.kill()
	w.must(w.c.Hold(ctx, keeper.Sandbox{ID: "s2", Kill: killS, Hard: time.Now().Add(time.Hour)}))
	w.must(w.c.Rearm(ctx, keeper.Key{Sandbox: "s2"}, time.Now().Add(10*time.Millisecond), 0))
	w.wait(keeper.Fired, keeper.Key{Sandbox: "s2"}, 0)
	if !killed(shows) || !killed(showsS) {
		t.Error("told, but not killed")
	}
}

func testSuspend(t *testing.T, w *world) {
	ctx := t.Context()
	kill, _ := w.kill()
	w.must(w.c.Record(ctx, keeper.Exec{Key: key(1), Kill: kill, Remaining: slack}))
	w.must(w.c.Suspend(ctx, "s1"))
	w.must(w.c.Record(ctx, keeper.Exec{Key: key(2), Kill: kill, Remaining: time.Millisecond}))
	w.must(w.c.Hold(ctx, keeper.Sandbox{ID: "s2"}))
	other := keeper.Key{Sandbox: "s2", Number: 1}
	w.must(w.c.Record(ctx, keeper.Exec{Key: other, Kill: kill, Remaining: slack + 50*time.Millisecond}))
	w.wait(keeper.Fired, other, 0)
	for n := int64(1); n <= 2; n++ {
		if _, ok := w.find(keeper.Fired, key(n), 0); ok {
			t.Errorf("command %d of a suspended sandbox ran out of time", n)
		}
	}
	w.must(w.c.Continue(ctx, "s1"))
	w.wait(keeper.Fired, key(1), 0)
	w.wait(keeper.Fired, key(2), 0)
}

func testHard(t *testing.T, w *world) {
	ctx := t.Context()
	kill, shows := w.kill()
	k := keeper.Key{Sandbox: "s2"}
	w.must(w.c.Hold(ctx, keeper.Sandbox{ID: "s2", Kill: kill, Hard: time.Now().Add(30 * time.Millisecond)}))
	w.must(w.c.Suspend(ctx, "s2"))
	w.wait(keeper.Fired, k, 0)
	if !killed(shows) {
		t.Error("told, but not killed")
	}
	if err := w.c.Rearm(ctx, k, time.Now().Add(time.Hour), 0); !errors.Is(err, errdefs.FailedPrecondition) {
		t.Errorf("rearm after the end: %v", err)
	}
	w.must(w.c.Hold(ctx, keeper.Sandbox{ID: "s3", Kill: kill, Hard: time.Now().Add(-time.Hour)}))
	w.wait(keeper.Fired, keeper.Key{Sandbox: "s3"}, 0)
}

func testDied(t *testing.T, w *world) {
	cmd := exec.CommandContext(t.Context(), "sleep", "60")
	w.must(cmd.Start())
	defer func() { _ = cmd.Wait() }()
	p, err := pidfd.Open(cmd.Process.Pid)
	w.must(err)
	defer p.Close()
	w.must(w.c.Hold(t.Context(), keeper.Sandbox{ID: "s2", Pidfd: p}))
	if _, ok := w.find(keeper.Died, keeper.Key{Sandbox: "s2"}, 0); ok {
		t.Error("told while it lives")
	}
	w.must(cmd.Process.Kill())
	w.wait(keeper.Died, keeper.Key{Sandbox: "s2"}, 0)
}

func testEvents(t *testing.T, w *world) {
	ctx := t.Context()
	for n := int64(1); n <= 3; n++ {
		out, wo := w.stream(n, record.Stdout)
		w.must(w.c.Record(ctx, keeper.Exec{Key: key(n), Streams: []keeper.Stream{out}}))
		wo.Close()
	}
	var seqs []uint64
	for n := int64(1); n <= 3; n++ {
		seqs = append(seqs, w.wait(keeper.Closed, key(n), record.Stdout).Seq)
	}
	w.must(w.c.Ack(seqs[0]))
	w.must(w.c.Release(ctx, key(2)))
	for range 2 {
		w.connect()
		if e := w.wait(keeper.Closed, key(3), record.Stdout); e.Seq != seqs[2] {
			t.Errorf("event %d came as %d", seqs[2], e.Seq)
		}
		_, err := w.c.Roster(ctx) // all that was to be repeated comes before this answer
		w.must(err)
		w.mu.Lock()
		if len(w.events) != 1 {
			t.Errorf("events %v, want only that of command 3", w.events)
		}
		w.mu.Unlock()
	}
}

func testSupersede(t *testing.T, w *world) {
	old := w.c
	w.connect()
	w.must(w.c.Suspend(t.Context(), "s1"))
	w.eventually("the old connection's end", func() bool {
		return errors.Is(old.Suspend(t.Context(), "s1"), errdefs.Unavailable)
	})
	var last error
	for _, err := range old.Events() {
		last = err
	}
	if !errors.Is(last, errdefs.Unavailable) {
		t.Errorf("events ended with %v", last)
	}
	w.must(w.c.Continue(t.Context(), "s1"))
}

const mib = 1 << 20

// flood writes n bytes, each of which tells its offset in MiB.
func (w *world) flood(f *os.File, from, n int64) {
	w.t.Helper()
	buf := make([]byte, mib)
	for off := from; off < from+n; off += mib {
		for i := range buf {
			buf[i] = byte(off/mib) + 1
		}
		w.write(f, buf)
	}
}

// kept checks whether the MiB at off holds what flood wrote there; in a hole it is false.
func (w *world) kept(f *os.File, off int64) bool {
	w.t.Helper()
	buf := make([]byte, mib)
	if _, err := f.ReadAt(buf, off); err != nil {
		w.t.Fatal(err)
	}
	hole, ok, err := sparse.NextHole(int(f.Fd()), off)
	w.must(err)
	if !ok || hole < off+mib {
		return false
	}
	for _, b := range buf {
		if b != byte(off/mib)+1 {
			w.t.Fatalf("MiB %d holds %d", off/mib, b)
		}
	}
	return true
}

func (w *world) allocated(f *os.File) int64 {
	w.t.Helper()
	n, err := sparse.Allocated(int(f.Fd()))
	w.must(err)
	return n
}

func testHeadTail(t *testing.T, w *world) {
	caps := record.Caps{Head: 4 * mib, Tail: 4 * mib}
	out, wo := w.stream(1, record.Stdout)
	w.must(w.c.Record(t.Context(), keeper.Exec{Key: key(1), Streams: []keeper.Stream{out}, Caps: caps}))
	const total = 24 * mib
	w.flood(wo, 0, total)
	wo.Close()
	if e := w.wait(keeper.Closed, key(1), record.Stdout); e.Size != total {
		t.Errorf("size %d", e.Size)
	}
	for off := int64(0); off < total; off += mib {
		got := w.kept(out.File, off)
		switch {
		case (off < caps.Head || off >= total-caps.Tail) && !got:
			t.Errorf("MiB %d of head or tail is gone", off/mib)
		case off >= caps.Head && off < total-caps.Tail-2*caps.Step() && got:
			t.Errorf("MiB %d of the middle is kept", off/mib)
		}
	}
	if n := w.allocated(out.File); n > caps.Head+caps.Tail+3*caps.Step() {
		t.Errorf("%d bytes on disk", n)
	}
}

func testOneEnd(t *testing.T, w *world) {
	const total = 24 * mib
	for n, caps := range []record.Caps{{Head: 4 * mib}, {Tail: 4 * mib}} {
		k := key(int64(n + 1))
		out, wo := w.stream(k.Number, record.Stdout)
		w.must(w.c.Record(t.Context(), keeper.Exec{Key: k, Streams: []keeper.Stream{out}, Caps: caps}))
		w.flood(wo, 0, total)
		wo.Close()
		if e := w.wait(keeper.Closed, k, record.Stdout); e.Size != total {
			t.Errorf("%v: size %d", caps, e.Size)
		}
		for off := int64(0); off < total; off += mib {
			if wanted := off < caps.Head || off >= total-caps.Tail; wanted && !w.kept(out.File, off) {
				t.Errorf("%v: MiB %d is gone", caps, off/mib)
			}
		}
		if n := w.allocated(out.File); n > 4*mib+2*mib {
			t.Errorf("%v: %d bytes on disk", caps, n)
		}
	}
}

func testBudget(t *testing.T, w *world) {
	ctx := t.Context()
	const budget = 16 * mib
	w.must(w.c.Hold(ctx, keeper.Sandbox{ID: "s2", Budget: budget}))
	var sum int64
	for n := int64(1); n <= 4; n++ {
		out, wo := w.stream(n, record.Stdout)
		k := keeper.Key{Sandbox: "s2", Number: n}
		w.must(w.c.Record(ctx, keeper.Exec{Key: k, Streams: []keeper.Stream{out}, Caps: record.DefaultCaps, Settled: sum}))
		const total = 20 * mib
		w.flood(wo, 0, total)
		wo.Close()
		if e := w.wait(keeper.Closed, k, record.Stdout); e.Size != total {
			t.Errorf("size %d", e.Size)
		}
		first, last := make([]byte, record.FloorCaps.Head), make([]byte, record.FloorCaps.Tail)
		if _, err := out.File.ReadAt(first, 0); err != nil || first[0] != 1 || first[len(first)-1] != 1 {
			t.Errorf("command %d: its head is lost, %v", n, err)
		}
		if _, err := out.File.ReadAt(last, total-int64(len(last))); err != nil || last[0] != total/mib {
			t.Errorf("command %d: its tail is lost, %v", n, err)
		}
		sum += w.allocated(out.File)
		w.must(w.c.Release(ctx, k))
	}
	if sum > budget+4*3*mib {
		t.Errorf("%d bytes on disk with a budget of %d", sum, budget)
	}
	// Once the records of ended commands are gone, a new one has the budget again.
	out, wo := w.stream(5, record.Stdout)
	k := keeper.Key{Sandbox: "s2", Number: 5}
	w.must(w.c.Record(ctx, keeper.Exec{Key: k, Streams: []keeper.Stream{out}, Caps: record.DefaultCaps}))
	const whole = 12 * mib
	w.flood(wo, 0, whole)
	wo.Close()
	w.wait(keeper.Closed, k, record.Stdout)
	for off := int64(0); off < whole; off += mib {
		if !w.kept(out.File, off) {
			t.Errorf("MiB %d of a stream that fits the budget is gone", off/mib)
		}
	}
}

func testRetain(t *testing.T, w *world) {
	ctx := t.Context()
	caps := record.Caps{Head: mib, Tail: mib}
	out, wo := w.stream(1, record.Stdout)
	w.must(w.c.Record(ctx, keeper.Exec{Key: key(1), Streams: []keeper.Stream{out}, Caps: caps}))
	w.must(w.c.Retain(ctx, key(1), record.Stdout, 2*mib))
	w.flood(wo, 0, 12*mib)
	size := func(n int64) func() bool {
		return func() bool {
			fi, err := out.File.Stat()
			return err == nil && fi.Size() == n
		}
	}
	w.eventually("all to be recorded", size(12*mib))
	w.must(w.c.Suspend(ctx, "s1")) // a round trip, after which nothing is under way but in the recorder
	for off := int64(2 * mib); off < 12*mib; off += mib {
		if !w.kept(out.File, off) {
			t.Errorf("MiB %d is gone", off/mib)
		}
	}
	w.must(w.c.Retain(ctx, key(1), record.Stdout, 8*mib))
	w.eventually("what was read to be punched", func() bool { return !w.kept(out.File, 4*mib) })
	if !w.kept(out.File, 8*mib) {
		t.Error("MiB 8 is gone")
	}
	w.must(w.c.Retain(ctx, key(1), record.Stdout, -1))
	w.eventually("the caps to hold", func() bool { return !w.kept(out.File, 8*mib) })
}

func testPin(t *testing.T, w *world) {
	ctx := t.Context()
	p, ok := w.c.(keeper.Pinner)
	if !ok {
		t.Skip("this client cannot pin")
	}
	caps := record.Caps{Head: mib, Tail: mib}
	out, wo := w.stream(1, record.Stdout)
	out.Pins = []record.Range{{From: 3 * mib, To: 4 * mib}}
	w.must(w.c.Record(ctx, keeper.Exec{Key: key(1), Streams: []keeper.Stream{out}, Caps: caps}))
	w.must(p.Pin(ctx, key(1), record.Stdout, record.Range{From: 6 * mib, To: 7 * mib}))
	w.flood(wo, 0, 12*mib)
	wo.Close()
	w.wait(keeper.Closed, key(1), record.Stdout)
	for off := int64(mib); off < 10*mib; off += mib {
		want := off == 3*mib || off == 6*mib
		if got := w.kept(out.File, off); got != want {
			t.Errorf("MiB %d kept: %v", off/mib, got)
		}
	}
}
