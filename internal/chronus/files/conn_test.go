package files

import (
	"context"
	"encoding/binary"
	"errors"
	"io"
	"math/rand/v2"
	"os"
	"path/filepath"
	"regexp"
	"strconv"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"

	"github.com/sandsea/sandsea/api/errdefs"
	"github.com/sandsea/sandsea/internal/chronus"
	"github.com/sandsea/sandsea/internal/linux/scm"
	"github.com/sandsea/sandsea/internal/testkit/wait"
)

// The numbers of both ends are the same: they are read out of the header of the other one.
func TestTheWireIsThatOfTheHelper(t *testing.T) {
	b, err := os.ReadFile("../../../init/files_wire.h")
	must(t, err)
	got := map[string]uint64{}
	define := regexp.MustCompile(`(?m)^#define FW_(\w+) (0x[0-9a-f]+|\d+)u?\b`)
	for _, m := range define.FindAllStringSubmatch(string(b), -1) {
		n, err := strconv.ParseUint(m[2], 0, 64)
		must(t, err)
		got[m[1]] = n
	}
	for name, want := range map[string]uint64{
		"MAGIC": wireMagic, "PATH_MAX": wirePathMax, "DATA_MAX": wireDataMax, "HANDLES": wireHandles,
		"STAT": uint64(opStat), "OPEN": uint64(opOpen), "CREATE": uint64(opCreate), "COMMIT": uint64(opCommit),
		"CLOSE": uint64(opClose), "DIR": uint64(opDir), "NEXT": uint64(opNext), "MKDIR": uint64(opMkdir),
		"RENAME": uint64(opRename), "UNLINK": uint64(opUnlink), "RMTREE": uint64(opRmtree), "SETATTR": uint64(opSetattr),
		"SYMLINK": uint64(opSymlink), "LINK": uint64(opLink), "WATCH": uint64(opWatch), "ADD": uint64(opAdd),
		"UNWATCH": uint64(opUnwatch), "NAMES": uint64(flagNames), "NOFOLLOW": uint64(flagNoFollow),
		"NOSYMLINKS": uint64(flagNoSymlinks), "PARENTS": uint64(flagParents), "PATHONLY": uint64(flagPathOnly),
		"REPLACE": uint64(flagReplace), "SET_MODE": uint64(flagSetMode), "SET_OWNER": uint64(flagSetOwner),
		"SET_MTIME": uint64(flagSetMtime), "DEFAULT_MODE": uint64(flagDefaultMode), "DIRECTORY": uint64(flagDirectory),
		"MORE": uint64(flagMore),
		"DID":  uint64(flagDid), "NOT_A_FILE": uint64(flagNotAFile), "PSEUDO": uint64(flagPseudo),
		"IDLE_MS": 30000, "PSEUDO_MAX": 16777216,
	} {
		if got[name] != want {
			t.Errorf("FW_%s is %d, here %d", name, got[name], want)
		}
		delete(got, name)
	}
	if len(got) > 0 {
		t.Errorf("not known here: %v", got)
	}
	if time.Duration(30000)*time.Millisecond <= 2*idleLimit {
		t.Error("a helper ends before this end gives it up")
	}
}

// fakeHelper answers requests as a test wants.
type fakeHelper struct {
	conn *scm.Conn
}

// fake makes Helpers whose helpers are run by a function each.
func fake(t *testing.T, run ...func(f *fakeHelper)) *Helpers {
	t.Helper()
	var wg sync.WaitGroup
	n := 0
	h := New(func(context.Context, chronus.IDs) (*os.File, error) {
		mine, theirs, err := scm.Socketpair()
		if err != nil {
			return nil, err
		}
		conn, err := scm.New(theirs)
		if err != nil {
			return nil, err
		}
		do := run[min(n, len(run)-1)]
		n++
		wg.Go(func() {
			defer conn.Close()
			do(&fakeHelper{conn})
		})
		return mine, nil
	})
	t.Cleanup(func() {
		must(t, h.Close())
		wg.Wait()
	})
	return h
}

// next receives a request: its operation and cookie, and false at the end.
func (f *fakeHelper) next() (op, uint64, bool) {
	buf := make([]byte, 16384)
	ctx, stop := context.WithTimeout(context.Background(), 10*time.Second)
	defer stop()
	n, _, err := f.conn.Recv(ctx, buf)
	if err != nil || n < requestSize {
		return 0, 0, false
	}
	return op(binary.LittleEndian.Uint32(buf[4:])), binary.LittleEndian.Uint64(buf[8:]), true
}

func message(o op, cookie uint64, errno int, handle, count uint32, data string) []byte {
	b := make([]byte, answerSize, answerSize+len(data))
	le := binary.LittleEndian
	le.PutUint32(b[0:], wireMagic)
	le.PutUint32(b[4:], uint32(o))
	le.PutUint64(b[8:], cookie)
	le.PutUint32(b[16:], uint32(errno))
	le.PutUint32(b[24:], handle)
	le.PutUint32(b[28:], count)
	le.PutUint32(b[32:], uint32(len(data)))
	le.PutUint32(b[40:], modeRegular|0o644)
	return append(b, data...)
}

func (f *fakeHelper) send(b []byte, files ...*os.File) {
	ctx, stop := context.WithTimeout(context.Background(), 10*time.Second)
	defer stop()
	_ = f.conn.Send(ctx, b, files...)
}

// drain waits for the end of the line.
func (f *fakeHelper) drain() {
	for {
		if _, _, ok := f.next(); !ok {
			return
		}
	}
}

func listEntry(name, link string, mode uint32) string {
	b := make([]byte, entrySize)
	binary.LittleEndian.PutUint32(b, mode)
	binary.LittleEndian.PutUint16(b[statSize:], uint16(len(name)))
	binary.LittleEndian.PutUint16(b[statSize+2:], uint16(len(link)))
	return string(b) + name + link
}

func TestAHelperThatLiesIsGivenUp(t *testing.T) {
	regular, err := os.CreateTemp(t.TempDir(), "")
	must(t, err)
	defer regular.Close()
	r, w, err := os.Pipe()
	must(t, err)
	defer r.Close()
	defer w.Close()
	dir, err := os.Open(t.TempDir())
	must(t, err)
	defer dir.Close()
	null, err := os.Open("/dev/null")
	must(t, err)
	defer null.Close()
	short := message(opOpen, 0, 0, 0, 0, "")

	for _, c := range []struct {
		name  string
		bytes func(cookie uint64) []byte
		files []*os.File
	}{
		{"a short message", func(uint64) []byte { return short[:20] }, nil},
		{"another cookie", func(c uint64) []byte { return message(opOpen, c+1, 2, 0, 0, "") }, nil},
		{"another operation", func(c uint64) []byte { return message(opStat, c, 2, 0, 0, "") }, nil},
		{"a negative errno", func(c uint64) []byte { return message(opOpen, c, -2, 0, 0, "") }, nil},
		{"a large errno", func(c uint64) []byte { return message(opOpen, c, 1<<30, 0, 0, "") }, nil},
		{"a large handle", func(c uint64) []byte { return message(opOpen, c, 2, 5000, 0, "") }, nil},
		{"a wrong length of data", func(c uint64) []byte { return append(message(opOpen, c, 2, 0, 0, ""), 1) }, nil},
		{
			"too much data",
			func(c uint64) []byte { return message(opOpen, c, 2, 0, 0, strings.Repeat("x", wireDataMax+1)) }, nil,
		},
		{"no magic", func(c uint64) []byte { b := message(opOpen, c, 2, 0, 0, ""); b[0]++; return b }, nil},
		{"no descriptor", func(c uint64) []byte { return message(opOpen, c, 0, 0, 0, "") }, nil},
		{
			"two descriptors", func(c uint64) []byte { return message(opOpen, c, 0, 0, 0, "") },
			[]*os.File{regular, regular},
		},
		{
			"a descriptor with an error", func(c uint64) []byte { return message(opOpen, c, 2, 0, 0, "") },
			[]*os.File{regular},
		},
		{"a pipe", func(c uint64) []byte { return message(opOpen, c, 0, 0, 0, "") }, []*os.File{r}},
		{"a directory", func(c uint64) []byte { return message(opOpen, c, 0, 0, 0, "") }, []*os.File{dir}},
		{"a device", func(c uint64) []byte { return message(opOpen, c, 0, 0, 0, "") }, []*os.File{null}},
	} {
		t.Run(c.name, func(t *testing.T) {
			h := fake(t, func(f *fakeHelper) {
				if _, cookie, ok := f.next(); ok {
					f.send(c.bytes(cookie), c.files...)
				}
				f.drain()
			})
			_, _, err := h.As(chronus.IDs{}, "").Open(t.Context(), "/x")
			wantErrno(t, err, errdefs.Unavailable, 0)
			if !strings.Contains(err.Error(), "broke the rules") {
				t.Errorf("got %v", err)
			}
		})
	}
}

func TestEntriesThatLieEndAListing(t *testing.T) {
	for name, data := range map[string]string{
		"a slash":                 listEntry("a/b", "", modeRegular),
		"dots":                    listEntry("..", "", modeDir),
		"no name":                 listEntry("", "", modeDir),
		"a NUL byte":              listEntry("a\x00b", "", modeRegular),
		"a target of a file":      listEntry("a", "b", modeRegular),
		"a NUL byte in a target":  listEntry("a", "b\x00", modeLink),
		"a long name":             listEntry(strings.Repeat("n", 256), "", modeRegular),
		"a name that is cut off":  listEntry("abc", "", modeRegular)[:entrySize+2],
		"bytes behind the last":   listEntry("a", "", modeRegular) + "x",
		"an entry that is no one": "",
	} {
		t.Run(name, func(t *testing.T) {
			h := fake(t, func(f *fakeHelper) {
				if _, cookie, ok := f.next(); ok {
					f.send(message(opDir, cookie, 0, 7, 0, ""))
				}
				if _, cookie, ok := f.next(); ok {
					f.send(message(opNext, cookie, 0, 0, 1, data))
				}
				f.drain()
			})
			var last error
			for batch, err := range h.As(chronus.IDs{}, "").List(t.Context(), "/") {
				if len(batch) > 0 {
					t.Errorf("yielded %v", batch)
				}
				last = err
			}
			wantErrno(t, last, errdefs.Unavailable, 0)
		})
	}
}

func TestAHelperThatEndsBeforeItAnswers(t *testing.T) {
	gone := func(f *fakeHelper) { f.next() }
	alive := func(f *fakeHelper) {
		for {
			o, cookie, ok := f.next()
			if !ok {
				return
			}
			f.send(message(o, cookie, 0, 0, 0, ""))
		}
	}
	v := fake(t, gone, alive).As(chronus.IDs{}, "")
	if _, err := v.Stat(t.Context(), "/x", false); err != nil {
		t.Errorf("a question is not asked again: %v", err)
	}
	v = fake(t, gone, alive).As(chronus.IDs{}, "")
	if err := v.Remove(t.Context(), "/x", false); !errors.Is(err, errdefs.Unknown) {
		t.Errorf("a change that may have happened: %v", err)
	}
	v = fake(t, gone, gone, alive).As(chronus.IDs{}, "")
	if _, err := v.Stat(t.Context(), "/x", false); !errors.Is(err, errdefs.Unavailable) {
		t.Errorf("twice is enough: %v", err)
	}
}

// TestAnAnswerBeforeTheEndIsHeard: a helper that does what it was asked and ends is found to have done so, also when
// somebody else finds it gone first.
func TestAnAnswerBeforeTheEndIsHeard(t *testing.T) {
	for range 100 {
		asked, ended := make(chan struct{}), make(chan struct{})
		h := fake(t,
			func(f *fakeHelper) {
				o, cookie, _ := f.next()
				close(asked)
				f.send(message(o, cookie, 0, 0, 0, ""))
				_ = f.conn.Close()
				close(ended)
			},
			func(f *fakeHelper) {
				for {
					o, cookie, ok := f.next()
					if !ok {
						return
					}
					errno := 0
					if o == opUnlink { // it is gone already
						errno = int(syscall.ENOENT)
					}
					f.send(message(o, cookie, errno, 0, 0, ""))
				}
			})
		v := h.As(chronus.IDs{}, "")
		removed := make(chan error, 1)
		go func() { removed <- v.Remove(t.Context(), "/x", false) }()
		<-asked
		<-ended
		_, err := v.Stat(t.Context(), "/y", false)
		must(t, err)
		must(t, <-removed)
	}
}

func TestAHelperThatDoesNotAnswerIsReplaced(t *testing.T) {
	release := make(chan struct{})
	h := fake(t,
		func(f *fakeHelper) { f.next(); <-release; f.drain() },
		func(f *fakeHelper) {
			if o, cookie, ok := f.next(); ok {
				f.send(message(o, cookie, 0, 0, 0, ""))
			}
			f.drain()
		})
	defer close(release)
	h.stall = 50 * time.Millisecond
	v := h.As(chronus.IDs{}, "")
	_, err := v.Stat(t.Context(), "/x", false)
	wantErrno(t, err, errdefs.Unavailable, 0)
	h.stall = stallLimit // the next one may take its time
	_, err = v.Stat(t.Context(), "/x", false)
	must(t, err)
}

func TestACallThatIsGivenUpClosesWhatItWouldHaveGot(t *testing.T) {
	cancelled, closed := make(chan struct{}), make(chan uint64, 1)
	regular, err := os.CreateTemp(t.TempDir(), "")
	must(t, err)
	defer regular.Close()
	ctx, end := context.WithCancelCause(t.Context())
	defer end(nil)
	h := fake(t, func(f *fakeHelper) {
		o, cookie, _ := f.next()
		end(context.DeadlineExceeded) // as the caller's own limit, once the request is here
		<-cancelled
		f.send(message(o, cookie, 0, 9, 0, ""), regular)
		if o, cookie, ok := f.next(); ok && o == opClose {
			closed <- cookie
			f.send(message(o, cookie, 0, 0, 0, ""))
		}
		f.drain()
	})
	_, err = h.As(chronus.IDs{}, "").Write(ctx, "/x", 0, nil, strings.NewReader(""))
	wantErrno(t, err, errdefs.Deadline, 0)
	close(cancelled)
	select {
	case <-closed:
	case <-time.After(20 * time.Second):
		t.Error("the handle was not closed")
	}
}

// fill takes every descriptor that this process could still open, until the test ends or free is called.
func fill(t *testing.T) (free func()) {
	t.Helper()
	var old syscall.Rlimit
	must(t, syscall.Getrlimit(syscall.RLIMIT_NOFILE, &old))
	next, err := syscall.Open("/", syscall.O_RDONLY|syscall.O_CLOEXEC, 0)
	must(t, err)
	must(t, syscall.Close(next))
	must(t, syscall.Setrlimit(syscall.RLIMIT_NOFILE, &syscall.Rlimit{Cur: uint64(next), Max: old.Max}))
	free = sync.OnceFunc(func() { must(t, syscall.Setrlimit(syscall.RLIMIT_NOFILE, &old)) })
	t.Cleanup(free)
	return free
}

func TestANodeWithoutDescriptorsKeepsItsHelper(t *testing.T) {
	regular, err := os.CreateTemp(t.TempDir(), "")
	must(t, err)
	defer regular.Close()
	closed := make(chan uint32, 8)
	h := fake(t, func(f *fakeHelper) {
		handle := uint32(0)
		buf := make([]byte, 16384)
		for {
			n, _, err := f.conn.Recv(context.Background(), buf)
			if err != nil || n < requestSize {
				return
			}
			o, cookie := op(binary.LittleEndian.Uint32(buf[4:])), binary.LittleEndian.Uint64(buf[8:])
			switch o {
			case opOpen:
				f.send(message(o, cookie, 0, 0, 0, ""), regular)
			case opCreate:
				handle++
				f.send(message(o, cookie, 0, handle, 0, ""), regular)
			case opClose:
				closed <- handle
				f.send(message(o, cookie, 0, 0, 0, ""))
			default:
				f.send(message(o, cookie, 0, 0, 0, ""))
			}
		}
	}, func(*fakeHelper) { t.Error("another helper was started") })
	v := h.As(chronus.IDs{}, "")
	_, err = v.Stat(t.Context(), "/x", false) // the helper is there
	must(t, err)

	free := fill(t)
	_, _, openErr := v.Open(t.Context(), "/x")
	_, writeErr := v.Write(t.Context(), "/x", 0, nil, strings.NewReader("text"))
	free()
	for _, err := range []error{openErr, writeErr} {
		if !errors.Is(err, errdefs.Unavailable) || !strings.Contains(err.Error(), "the node's daemon cannot hold more open files") {
			t.Errorf("got %v", err)
		}
	}
	select {
	case <-closed:
	case <-time.After(10 * time.Second):
		t.Error("the unfinished file was not closed")
	}
	f, _, err := v.Open(t.Context(), "/x")
	must(t, err)
	must(t, f.Close())
}

func TestHelpersComeAndGo(t *testing.T) {
	s := newScratch(t, "")
	s.idle = 50 * time.Millisecond
	v := s.user()
	before := s.started()
	write(t, v, "/tmp/a", "x")
	_, gone := s.last()
	select {
	case <-gone:
	case <-time.After(20 * time.Second):
		t.Fatal("an idle helper does not end")
	}
	if read(t, v, "/tmp/a") != "x" || s.started() != before+2 {
		t.Errorf("%d helpers for two calls", s.started()-before)
	}
	// The other end may be faster: its limit here is 0.7 s.
	s.idle = time.Hour
	read(t, v, "/tmp/a")
	_, gone = s.last()
	select {
	case <-gone:
	case <-time.After(20 * time.Second):
		t.Fatal("a helper that hears nothing does not end")
	}
	if read(t, v, "/tmp/a") != "x" {
		t.Error("no other helper came")
	}
	// It does not end under a file that is being written.
	r, w, err := os.Pipe()
	must(t, err)
	defer r.Close()
	_, err = w.WriteString("slow ")
	must(t, err)
	time.AfterFunc(1200*time.Millisecond, func() {
		_, _ = w.WriteString("line")
		_ = w.Close()
	})
	_, err = v.Write(t.Context(), "/tmp/slow", 0, nil, r)
	must(t, err)
	if got := read(t, v, "/tmp/slow"); got != "slow line" {
		t.Errorf("got %q", got)
	}
}

func TestManyUsersDoNotKeepManyHelpers(t *testing.T) {
	s := newScratch(t, "")
	for uid := range uint32(3 * maxHelpers) {
		_, err := s.As(chronus.IDs{UID: uid}, "").Stat(t.Context(), "/", false)
		must(t, err)
	}
	if !wait.For(20*time.Second, func() bool {
		s.mu.Lock()
		defer s.mu.Unlock()
		alive := 0
		for _, gone := range s.gone {
			select {
			case <-gone:
			default:
				alive++
			}
		}
		return alive <= maxHelpers
	}) {
		t.Error("more helpers live than may")
	}
}

func TestAHelperThatIsKilledInTheMiddleOfAWrite(t *testing.T) {
	for _, options := range []string{"", "n"} {
		s := newScratch(t, options)
		v := s.user()
		write(t, v, "/tmp/a", "old")
		r, w := io.Pipe()
		failed := make(chan error, 1)
		go func() {
			_, err := v.Write(t.Context(), "/tmp/a", 0, nil, r)
			failed <- err
		}()
		_, err := io.WriteString(w, "new") // returns when it is read, so when the file is begun
		must(t, err)
		if want := map[string]int{"": 1, "n": 2}[options]; len(names(t, s.host("tmp"))) != want {
			t.Errorf("options %q: there are %q", options, names(t, s.host("tmp")))
		}
		// Another user's and another helper's unfinished files are left alone while their makers live.
		other := s.As(chronus.IDs{UID: 1000, GID: 1000}, "/")
		write(t, other, "/tmp/b", "b")
		p, gone := s.procs[1].Process, s.gone[1]
		must(t, p.Signal(syscall.SIGKILL))
		<-gone
		must(t, w.Close())
		err = <-failed
		if !errors.Is(err, errdefs.Unavailable) && !errors.Is(err, errdefs.Unknown) {
			t.Errorf("got %v", err)
		}
		if got := read(t, v, "/tmp/a"); got != "old" {
			t.Errorf("content is %q", got)
		}
		// The next helper that writes there removes what the killed one left.
		write(t, s.As(chronus.IDs{UID: 1000, GID: 7}, "/"), "/tmp/c", "c")
		if got := names(t, s.host("tmp")); len(got) != 3 {
			t.Errorf("options %q: there are %q", options, got)
		}
	}
}

func TestTheEdgeDiesInTheMiddleOfAWrite(t *testing.T) {
	for _, options := range []string{"", "n"} {
		s := newScratch(t, options)
		c, err := s.start(t.Context(), chronus.IDs{UID: 1000, GID: 1000})
		must(t, err)
		line, err := newConn(c, time.Minute)
		must(t, err)
		create := request{op: opCreate, flags: flagParents, path: "/tmp/x/y/a", mode: 0o755}
		rep, _, err := line.roundTrip(t.Context(), create)
		must(t, err)
		must(t, ofAnswer("", rep.answer))
		_, err = rep.file.WriteString("part")
		must(t, err)
		must(t, rep.file.Close())
		_, gone := s.last()
		line.close()
		<-gone
		if got := names(t, s.host("tmp")); len(got) > 0 {
			t.Errorf("options %q: left behind: %q", options, got)
		}
	}
}

func TestAFileThatIsNotAskedForGoesNowhere(t *testing.T) {
	s := newScratch(t, "")
	c, err := s.start(t.Context(), chronus.IDs{})
	must(t, err)
	line, err := newConn(c, time.Minute)
	must(t, err)
	defer line.close()
	for _, r := range []request{
		{
			op: 0,
		},
		{op: 99},
		{op: opCommit, handle: 5},
		{op: opClose},
		{op: opClose, handle: 1 << 31},
		{
			op:     opNext,
			handle: 1,
		},
		{
			op: opStat, base: 3, path: "x",
		},
		{
			op: opStat, base: 1 << 31,
			path: "x",
		},
		{op: opStat},
		{op: opCreate},
		{
			op: opMkdir,
		},
		{op: opRmtree},
		{op: opUnlink},
		{op: opRename},
		{op: opLink},
		{op: opSymlink},
	} {
		rep, _, err := line.roundTrip(t.Context(), r)
		must(t, err)
		if rep.errno == 0 && r.op != opStat {
			t.Errorf("%+v succeeded", r)
		}
	}
}

// Whatever is asked, the helper answers, and nothing outside its root changes.
func TestAHelperSurvivesAnyRequests(t *testing.T) {
	s := newScratch(t, "pt")
	outside := filepath.Dir(s.root)
	before := names(t, outside)
	c, err := s.start(t.Context(), chronus.IDs{})
	must(t, err)
	line, err := newConn(c, time.Minute)
	must(t, err)
	defer line.close()
	rnd := rand.New(rand.NewPCG(1, 2))
	parts := []string{
		"a", "b", "c", "..", ".", "", "tmp", "mnt", "proc/self/root", "proc/self/fd/0", strings.Repeat("n", 255),
		strings.Repeat("n", 256), "proc", "l", "home", strings.Repeat("x/", 200),
	}
	path := func() string {
		p := ""
		for range rnd.IntN(6) {
			p += []string{"/", "", "//"}[rnd.IntN(3)] + parts[rnd.IntN(len(parts))]
			if rnd.IntN(4) == 0 {
				p += "/"
			}
		}
		return p[:min(len(p), wirePathMax)]
	}
	for range 5000 {
		r := request{
			op: op(rnd.IntN(16)), flags: rnd.Uint32N(512), base: rnd.Uint32N(4), handle: rnd.Uint32N(wireHandles + 2),
			mode: rnd.Uint32N(0o10000) | 0o700, uid: rnd.Uint32N(3), path: path(), path2: path(),
			mtime: time.Unix(rnd.Int64N(1e9), 1),
		}
		if rnd.IntN(3) > 0 {
			r.base = 0
		}
		rep, _, err := line.roundTrip(t.Context(), r)
		if err != nil {
			t.Fatalf("%+v: %v", r, err)
		}
		if rep.file != nil {
			must(t, rep.file.Close())
		}
	}
	if diff := cmp.Diff(before, names(t, outside)); diff != "" {
		t.Error(diff)
	}
}

func FuzzAnswer(f *testing.F) {
	f.Add(message(opOpen, 1, 0, 0, 0, ""))
	f.Add(message(opNext, 1, 0, 0, 2, listEntry("a", "", modeRegular)+listEntry("b", "c", modeLink)))
	f.Add(message(opStat, 1, 0, 0, 0, "target"))
	f.Fuzz(func(t *testing.T, b []byte) {
		a, err := decodeAnswer(b)
		if err != nil {
			return
		}
		entries, err := decodeEntries(a.count, a.data)
		if err != nil {
			return
		}
		if len(entries) != int(a.count) {
			t.Errorf("%d of %d entries", len(entries), a.count)
		}
		for _, e := range entries {
			if e.name == "" || strings.ContainsAny(e.name, "/\x00") || e.name == "." || e.name == ".." {
				t.Errorf("name %q", e.name)
			}
		}
	})
}
