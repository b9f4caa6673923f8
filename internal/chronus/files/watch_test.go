package files

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"maps"
	"math/rand/v2"
	"os"
	"path"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"
	"unsafe"

	"github.com/google/go-cmp/cmp"

	"github.com/sandsea/sandsea/api/errdefs"
)

const sysRenameat2 = 316

// watching is a watch whose events a test takes one by one.
type watching struct {
	t      *testing.T
	events chan Event
	end    chan error // of one
	stop   context.CancelFunc
}

// watch begins to watch and waits for the first word.
func watch(t *testing.T, v *View, path string, recursive bool) *watching {
	t.Helper()
	w := begin(t, v, path, recursive)
	if e := w.next(); e.Change != Ready {
		t.Fatalf("the first event is %+v", e)
	}
	return w
}

func begin(t *testing.T, v *View, path string, recursive bool) *watching {
	ctx, stop := context.WithCancel(t.Context())
	w := &watching{t: t, events: make(chan Event), end: make(chan error, 1), stop: stop}
	go func() {
		defer close(w.events)
		for e, err := range v.Watch(ctx, path, recursive) {
			if err != nil {
				w.end <- err
				return
			}
			select {
			case w.events <- e:
			case <-ctx.Done():
			}
		}
		w.end <- nil
	}()
	t.Cleanup(func() {
		stop()
		for range w.events { //nolint:revive // to its end
		}
	})
	return w
}

func (w *watching) next() Event {
	w.t.Helper()
	select {
	case e, ok := <-w.events:
		if !ok {
			w.t.Fatalf("the watch ended: %v", <-w.end)
		}
		return e
	case <-time.After(20 * time.Second):
		w.t.Fatal("no event in 20 s")
		return Event{}
	}
}

// want takes the next events and compares them, as "created /a".
func (w *watching) want(events ...string) {
	w.t.Helper()
	for i, want := range events {
		if got := w.next().String(); got != want {
			w.t.Fatalf("event %d is %q, want %q", i, got, want)
		}
	}
}

func (e Event) String() string {
	s := [...]string{
		Ready: "ready", Created: "created", Modified: "modified", Attributes: "attributes", Removed: "removed",
		Moved: "moved", Gap: "gap",
	}[e.Change]
	if e.From != "" {
		s += " " + e.From
	}
	s += " " + e.Path
	if e.Type == Directory {
		s += "/"
	}
	return s
}

func TestWatchTellsWhatHappensToADirectory(t *testing.T) {
	s := newScratch(t, "p")
	dir := s.host("/tmp/d")
	must(t, os.MkdirAll(filepath.Join(dir, "old/deep"), 0o755))
	w := watch(t, s.rootUser(), "/tmp/d", true)
	must(t, os.WriteFile(filepath.Join(dir, "f"), []byte("x"), 0o600))
	w.want("created /tmp/d/f", "modified /tmp/d/f")
	must(t, os.Chmod(filepath.Join(dir, "f"), 0o644))
	w.want("attributes /tmp/d/f")
	must(t, os.Rename(filepath.Join(dir, "f"), filepath.Join(dir, "old/deep/g")))
	w.want("moved /tmp/d/f /tmp/d/old/deep/g")
	must(t, os.Mkdir(filepath.Join(dir, "new"), 0o755))
	w.want("created /tmp/d/new/")
	must(t, os.Rename(filepath.Join(dir, "old"), filepath.Join(dir, "new/old")))
	w.want("moved /tmp/d/old /tmp/d/new/old/")
	// What was watched below follows the move.
	must(t, os.Remove(filepath.Join(dir, "new/old/deep/g")))
	w.want("removed /tmp/d/new/old/deep/g")
	must(t, os.Rename(filepath.Join(dir, "new"), s.host("/tmp/away")))
	w.want("removed /tmp/d/new/")
	must(t, os.WriteFile(s.host("/tmp/away/old/unseen"), nil, 0o600))
	must(t, os.Rename(s.host("/tmp/away"), filepath.Join(dir, "back")))
	got := []string{}
	for range 4 {
		got = append(got, w.next().String())
	}
	if want := []string{
		"created /tmp/d/back/", "created /tmp/d/back/old/", "created /tmp/d/back/old/deep/", "created /tmp/d/back/old/unseen",
	}; got[0] != want[0] || !cmp.Equal(slices.Sorted(slices.Values(got)), want) {
		t.Errorf("moved in: %q", got)
	}
	must(t, os.Symlink("/etc", filepath.Join(dir, "link")))
	w.want("created /tmp/d/link")
	// The end of the top is told, whoever has it open, and is the end.
	f, err := os.Open(dir)
	must(t, err)
	defer f.Close()
	must(t, os.RemoveAll(dir))
	for {
		e := w.next()
		if e.Change != Removed {
			t.Errorf("while it is removed: %v", e)
		}
		if e.Path == "/tmp/d" {
			break
		}
	}
	if err := <-w.end; err != nil {
		t.Errorf("the end: %v", err)
	}
}

func TestWatchOfOneDirectoryAndOfOneFile(t *testing.T) {
	s := newScratch(t, "p")
	must(t, os.MkdirAll(s.host("/tmp/d/in"), 0o755))
	s.put("/tmp/d/f", "x", 0o644, 0)
	flat, file := watch(t, s.rootUser(), "/tmp/d", false), watch(t, s.rootUser(), "/tmp/d/f", true)
	must(t, os.WriteFile(s.host("/tmp/d/in/deep"), nil, 0o600))
	must(t, os.WriteFile(s.host("/tmp/d/f"), []byte("y"), 0o600))
	flat.want("modified /tmp/d/f")
	file.want("modified /tmp/d/f")
	// As editors save: beside it, then renamed.
	must(t, os.WriteFile(s.host("/tmp/d/f.new"), []byte("z"), 0o644))
	must(t, os.Rename(s.host("/tmp/d/f.new"), s.host("/tmp/d/f")))
	flat.want("created /tmp/d/f.new", "modified /tmp/d/f.new", "moved /tmp/d/f.new /tmp/d/f")
	file.want("modified /tmp/d/f")
	must(t, os.WriteFile(s.host("/tmp/d/f"), []byte("again"), 0o600))
	file.want("modified /tmp/d/f")
	must(t, os.Remove(s.host("/tmp/d/f")))
	file.want("attributes /tmp/d/f", "removed /tmp/d/f") // it has one name less
	if err := <-file.end; err != nil {
		t.Errorf("the end: %v", err)
	}
}

func TestAFileThatStaysOpenIsToldOnceASecond(t *testing.T) {
	s := newScratch(t, "p")
	w := watch(t, s.rootUser(), "/tmp", false)
	f, err := os.Create(s.host("/tmp/log"))
	must(t, err)
	w.want("created /tmp/log")
	done := make(chan int)
	go func() {
		n := 0
		for began := time.Now(); time.Since(began) < 2500*time.Millisecond; n++ {
			_, _ = f.WriteString("line\n")
		}
		done <- n
	}()
	w.want("modified /tmp/log", "modified /tmp/log")
	if n := <-done; n < 100 {
		t.Errorf("only %d writes", n)
	}
	_, err = f.WriteString("last\n")
	must(t, errors.Join(err, f.Close()))
	// A third one is due by now or comes with the end.
	w.want("modified /tmp/log")
	must(t, os.WriteFile(s.host("/tmp/mark"), nil, 0o600))
	for {
		e := w.next().String()
		if e == "created /tmp/mark" {
			break
		}
		if e != "modified /tmp/log" {
			t.Errorf("then %q", e)
		}
	}
}

func TestWatchObeysTheUsersRightsAndSaysSo(t *testing.T) {
	s := newScratch(t, "p")
	must(t, os.Mkdir(s.host("/home/closed"), 0o711))
	must(t, os.Chown(s.host("/home/closed"), uidBase, uidBase))
	for path, errno := range map[string]syscall.Errno{
		"/home/closed": syscall.EACCES, "/none": syscall.ENOENT, "/home/closed/none": syscall.ENOENT,
	} {
		w := begin(t, s.user(), path, true)
		for e := range w.events {
			t.Errorf("%s: told %v", path, e)
		}
		kind := errdefs.NotFound
		if errno == syscall.EACCES {
			kind = errdefs.Denied
		}
		wantErrno(t, <-w.end, kind, errno)
	}
	w := begin(t, s.user(), "/proc/self", true)
	for e := range w.events {
		t.Errorf("told %v", e)
	}
	if err := <-w.end; !errors.Is(err, errdefs.FailedPrecondition) {
		t.Errorf("/proc/self: %v", err)
	}
	// One below is told as such, at the beginning and later.
	w = watch(t, s.user(), "/home", true)
	w.want("gap /home/closed/")
	must(t, os.Mkdir(s.host("/home/secret"), 0o700))
	w.want("created /home/secret/", "gap /home/secret/")
	// A tree with /proc in it is told without it.
	must(t, os.Chown(s.host("/home/secret"), uidBase, uidBase))
	all := watch(t, s.rootUser(), "/", true)
	must(t, os.WriteFile(s.host("/etc/hosts"), nil, 0o600))
	all.want("created /etc/hosts")
}

func TestWatchGapsWhenEventsAreLostAndGoesOn(t *testing.T) {
	limit := 16384
	s := newScratch(t, "p")
	must(t, os.Mkdir(s.host("/tmp/d"), 0o755))
	w := watch(t, s.rootUser(), "/tmp", true)
	// Nobody reads, so the kernel's queue and that of the watch fill up.
	must(t, os.Mkdir(s.host("/tmp/d/first"), 0o755))
	for i := range 2*maxQueued + 2*limit {
		name := s.host(fmt.Sprintf("/tmp/d/%d", i%7))
		if i%14 < 7 {
			must(t, os.WriteFile(name, nil, 0o600))
		} else {
			must(t, os.Remove(name))
		}
	}
	must(t, os.Mkdir(s.host("/tmp/d/last"), 0o755))
	for {
		if e := w.next(); e.Change == Gap && e.Path == "" {
			break
		}
	}
	// After the gap nothing is missed, also not in a directory whose making was.
	must(t, os.WriteFile(s.host("/tmp/d/last/f"), nil, 0o600))
	for {
		e := w.next()
		if e.String() == "created /tmp/d/last/f" {
			break
		}
	}
}

func TestWatchEndsWithItsCallAndItsHelper(t *testing.T) {
	s := newScratch(t, "p")
	w := watch(t, s.rootUser(), "/tmp", true)
	w.stop()
	if err := <-w.end; !errors.Is(err, errdefs.Canceled) && err != nil {
		t.Errorf("canceled: %v", err)
	}
	w = watch(t, s.rootUser(), "/tmp", true)
	proc, gone := s.last()
	must(t, proc.Kill())
	<-gone
	if err := <-w.end; !errors.Is(err, errdefs.Unavailable) {
		t.Errorf("the helper was killed: %v", err)
	}
	// A reader that leaves the loop removes the watch and what it counted.
	for range s.rootUser().Watch(t.Context(), "/", true) {
		break
	}
	s.Helpers.mu.Lock()
	defer s.Helpers.mu.Unlock()
	if s.watches != 0 || s.watchedDirs != 0 {
		t.Errorf("%d watches and %d directories are left", s.watches, s.watchedDirs)
	}
}

func TestAWatchKeepsItsHelperAndLeavesNothingInIt(t *testing.T) {
	s := newScratch(t, "p")
	s.idle = 10 * time.Millisecond
	w := watch(t, s.rootUser(), "/tmp", true)
	proc, gone := s.last()
	fds := func() int {
		entries, err := os.ReadDir(fmt.Sprintf("/proc/%d/fd", proc.Pid))
		must(t, err)
		return len(entries)
	}
	with := fds()
	for range 50 {
		for range s.rootUser().Watch(t.Context(), "/tmp", true) {
			break
		}
	}
	if got := fds(); got != with {
		t.Errorf("the helper has %d descriptors, had %d", got, with)
	}
	// Longer than it would stay without one.
	select {
	case <-gone:
		t.Error("the helper ended under a watch")
	case <-time.After(time.Second):
	}
	must(t, os.WriteFile(s.host("/tmp/f"), nil, 0o600))
	w.want("created /tmp/f")
	w.stop()
	select {
	case <-gone:
	case <-time.After(10 * time.Second):
		t.Error("the helper stays without a watch")
	}
}

func TestWatchesAndTheirDirectoriesAreLimited(t *testing.T) {
	s := newScratch(t, "p")
	for range maxWatches {
		watch(t, s.rootUser(), "/tmp", false)
	}
	w := begin(t, s.rootUser(), "/tmp", false)
	err := <-w.end
	if e, ok := errors.AsType[*errdefs.Error](err); !ok || e.Kind != errdefs.Exhausted || e.Limit != "32 watches" {
		t.Errorf("one too many: %v", err)
	}
}

func TestAHelperOfAnotherVersionIsRecognised(t *testing.T) {
	h := fake(t, func(f *fakeHelper) {
		for {
			op, cookie, ok := f.next()
			if !ok {
				return
			}
			f.send(message(op, cookie, int(syscall.EOPNOTSUPP), 0, 0, ""))
		}
	})
	w := begin(t, (&scratch{Helpers: h}).rootUser(), "/tmp", true)
	err := <-w.end
	if e, ok := errors.AsType[*errdefs.Error](err); !ok || e.Kind != errdefs.FailedPrecondition || e.Feature != "watch" {
		t.Errorf("got %v", err)
	}
}

func TestADescriptorThatIsNoInstanceIsRefused(t *testing.T) {
	h := fake(t, func(f *fakeHelper) {
		_, cookie, ok := f.next()
		if !ok {
			return
		}
		r, w, err := os.Pipe()
		must(t, err)
		defer r.Close()
		defer w.Close()
		f.send(message(opWatch, cookie, 0, 1, 0, ""), r)
		f.next()
	})
	w := begin(t, (&scratch{Helpers: h}).rootUser(), "/tmp", true)
	if err := <-w.end; !errors.Is(err, errdefs.Unavailable) {
		t.Errorf("got %v", err)
	}
}

// knowledge is what a listener knows: paths, and whether they are directories.
type knowledge map[string]bool

// apply takes an event in and refuses what cannot be after all that was told before.
func (tr knowledge) apply(e Event) error {
	_, there := tr[e.Path]
	switch e.Change {
	case Created:
		if there {
			return fmt.Errorf("%v: it was there already", e)
		}
		tr[e.Path] = e.Type == Directory
	case Removed:
		if !there {
			return fmt.Errorf("%v: it was not there", e)
		}
		maps.DeleteFunc(tr, func(p string, _ bool) bool { return p == e.Path || strings.HasPrefix(p, e.Path+"/") })
	case Moved:
		if _, ok := tr[e.From]; !ok {
			return fmt.Errorf("%v: it was not there", e)
		}
		for p, dir := range maps.Clone(tr) {
			if p == e.From || strings.HasPrefix(p, e.From+"/") {
				delete(tr, p)
				tr[e.Path+strings.TrimPrefix(p, e.From)] = dir
			}
		}
	case Gap:
		return fmt.Errorf("%v", e)
	}
	return nil
}

// What is told, taken in step by step, gives what is there: nothing is missed and nothing told twice, whatever several
// processes do at once.
func TestWhatIsToldIsWhatIsThere(t *testing.T) {
	for seed := range uint64(8) {
		t.Run(fmt.Sprint(seed), func(t *testing.T) {
			s := newScratch(t, "p")
			top := s.host("/tmp/t")
			must(t, os.MkdirAll(filepath.Join(top, "0/1"), 0o755))
			must(t, os.MkdirAll(s.host("/tmp/out"), 0o755))
			w := watch(t, s.rootUser(), "/tmp/t", true)
			known := knowledge{"/tmp/t/0": true, "/tmp/t/0/1": true}
			var wg sync.WaitGroup
			for worker := range uint64(3) {
				wg.Go(func() { churn(rand.New(rand.NewPCG(seed, worker)), top, s.host("/tmp/out")) })
			}
			t.Cleanup(wg.Wait)
			go func() {
				wg.Wait()
				_ = os.WriteFile(filepath.Join(top, "end"), nil, 0o600)
			}()
			var story []string
			for {
				e := w.next()
				if e.Path == "/tmp/t/end" {
					break
				}
				story = append(story, e.String())
				if err := known.apply(e); err != nil {
					t.Fatalf("%v\nafter %d events:\n%s", err, len(story), strings.Join(story, "\n"))
				}
			}
			there := knowledge{}
			must(t, filepath.WalkDir(top, func(p string, d fs.DirEntry, err error) error {
				if p != top && d.Name() != "end" {
					there[strings.TrimPrefix(p, s.root)] = d.IsDir()
				}
				return err
			}))
			if diff := cmp.Diff(slices.Sorted(maps.Keys(there)), slices.Sorted(maps.Keys(known))); diff != "" {
				t.Errorf("after %d events (-there +told):\n%s\nend of the story:\n%s", len(story), diff,
					strings.Join(story[max(0, len(story)-60):], "\n"))
			}
		})
	}
}

// TestADirectoryThatIsFoundWhereAnotherWasIsToldOnce: the events of the first are yet to come.
func TestADirectoryThatIsFoundWhereAnotherWasIsToldOnce(t *testing.T) {
	s := newScratch(t, "p")
	dir := func(name string) string { return s.host("/tmp/" + name) }
	must(t, os.MkdirAll(dir("d/from/moved"), 0o755))
	w := watch(t, s.rootUser(), "/tmp/d", true)
	must(t, os.Mkdir(dir("d/last"), 0o755)) // the watch waits until that is read; the events behind it do, too
	must(t, os.Mkdir(dir("d/at"), 0o755))
	must(t, os.Rename(dir("d/from"), dir("away")))
	must(t, os.Remove(dir("d/at")))
	must(t, os.Rename(dir("away/moved"), dir("d/at")))
	w.want("created /tmp/d/last/", "created /tmp/d/at/", "removed /tmp/d/from/", "removed /tmp/d/at/", "created /tmp/d/at/")
	must(t, os.WriteFile(dir("d/at/f"), nil, 0o600))
	w.want("created /tmp/d/at/f")
}

// moveIn moves to where nothing is: of a move in from what is not watched, or not yet, the kernel does not tell that it
// replaced something, so that it is told as created once more.
func moveIn(from, to string) {
	const atCwd, noReplace = ^uintptr(99), 1
	a, _ := syscall.BytePtrFromString(from)
	b, _ := syscall.BytePtrFromString(to)
	_, _, _ = syscall.Syscall6(sysRenameat2, atCwd, uintptr(unsafe.Pointer(a)), atCwd, uintptr(unsafe.Pointer(b)), noReplace, 0)
}

// churn makes, fills, moves and removes. What fails, fails.
func churn(r *rand.Rand, top, out string) {
	name := func() string {
		parts := make([]string, 1+r.IntN(3))
		for i := range parts {
			parts[i] = string('0' + rune(r.IntN(4)))
		}
		return path.Join(parts...)
	}
	for range 600 {
		p := filepath.Join(top, name())
		switch r.IntN(8) {
		case 0:
			_ = os.Mkdir(p, 0o755)
		case 1, 2:
			_ = os.MkdirAll(filepath.Join(p, name()), 0o755)
		case 3, 4:
			_ = os.WriteFile(p, []byte("x"), 0o600)
		case 5:
			_ = os.RemoveAll(p)
		case 6:
			moveIn(p, filepath.Join(top, name()))
		case 7:
			if r.IntN(2) == 0 {
				_ = os.Rename(p, filepath.Join(out, name()))
			} else {
				moveIn(filepath.Join(out, string('0'+rune(r.IntN(4)))), p)
			}
		}
	}
}
