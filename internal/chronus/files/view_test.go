package files

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"math/rand/v2"
	"os"
	"path/filepath"
	"runtime"
	"slices"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"

	"github.com/sandsea/sandsea/api/errdefs"
	"github.com/sandsea/sandsea/internal/chronus"
)

func TestFilesOfEverySizeComeBackAsTheyWere(t *testing.T) {
	s := newScratch(t, "")
	v := s.user()
	for _, size := range []int{0, 1, 256, 4095, 4096, 4097, 18 << 10, 97 << 10, 1<<22 - 1, 1 << 22, 1<<22 + 1, 1<<25 + 1} {
		want := make([]byte, size)
		for i := range want {
			want[i] = byte(i * 31 >> 3)
		}
		exact := int64(size)
		info, err := v.Write(t.Context(), "file", 0, &exact, bytes.NewReader(want))
		must(t, err)
		if info.Size != exact || info.UID != 1000 || info.Path != "/home/user/file" || info.Type != Regular {
			t.Errorf("size %d: got %+v", size, info)
		}
		if got := read(t, v, "file"); got != string(want) {
			t.Errorf("size %d: other bytes came back (%d)", size, len(got))
		}
	}
}

func TestWrite(t *testing.T) {
	none, three := int64(0), int64(3)
	broken := errors.New("the line broke")
	for _, c := range []struct {
		name    string
		before  func(s *scratch)
		as      func(s *scratch) *View
		path    string
		mode    uint32
		size    *int64
		from    func() io.Reader
		kind    errdefs.Kind
		errno   syscall.Errno
		at      string // where the content is afterwards, when it is not path
		content string // what is there, "" for what was sent
		is      os.FileMode
		uid     int
	}{
		{name: "a new file has mode 0644 and is the user's", path: "/tmp/a", is: 0o644, uid: 1000},
		{
			name: "a mode that was asked for holds exactly", path: "/tmp/a", mode: 0o4751, is: 0o751 | os.ModeSetuid,
			uid: 1000,
		},
		{name: "relative paths begin at the working directory", path: "a", at: "/home/user/a", is: 0o644, uid: 1000},
		{name: "missing parents are made", path: "/tmp/x/y/z/a", is: 0o644, uid: 1000},
		{
			name: "an old file keeps its mode", path: "/tmp/a", is: 0o600, uid: 1000,
			before: func(s *scratch) { s.put("tmp/a", "old", 0o600, 1000) },
		},
		{
			name: "a mode that is asked for wins over the old one", path: "/tmp/a", mode: 0o640, is: 0o640, uid: 1000,
			before: func(s *scratch) { s.put("tmp/a", "old", 0o600, 1000) },
		},
		{
			name: "a user's file stays the user's when root writes to it", path: "/home/user/a", is: 0o640, uid: 1000,
			before: func(s *scratch) { s.put("home/user/a", "old", 0o640, 1000) }, as: (*scratch).rootUser,
		},
		{
			name: "through a link the file behind it is replaced", path: "/tmp/link", at: "/home/user/a", is: 0o640, uid: 1000,
			before: func(s *scratch) {
				s.put("home/user/a", "old", 0o640, 1000)
				s.link("../home/user/a", "tmp/link", 1000)
			},
		},
		{
			name: "through a dangling link its target is made", path: "/tmp/link", at: "/home/user/new", is: 0o644, uid: 1000,
			before: func(s *scratch) { s.link("/../../home/user/new", "tmp/link", 1000) },
		},
		{
			name: "links in a ring are refused", path: "/tmp/one", kind: errdefs.FailedPrecondition, errno: syscall.ELOOP,
			before: func(s *scratch) {
				s.link("two", "tmp/one", 1000)
				s.link("one", "tmp/two", 1000)
			},
		},
		{name: "a directory is refused", path: "/tmp", kind: errdefs.FailedPrecondition, errno: syscall.EISDIR},
		{name: "the root is refused", path: "/", kind: errdefs.FailedPrecondition, errno: syscall.EISDIR},
		{name: "dots are refused", path: "/tmp/.", kind: errdefs.FailedPrecondition, errno: syscall.EISDIR},
		{
			name: "a path below a file is refused", path: "/tmp/a/b", kind: errdefs.FailedPrecondition, errno: syscall.ENOTDIR,
			before: func(s *scratch) { s.put("tmp/a", "old", 0o644, 1000) },
		},
		{
			name: "a file with a slash behind it is refused", path: "/tmp/a/", kind: errdefs.FailedPrecondition,
			errno: syscall.ENOTDIR, before: func(s *scratch) { s.put("tmp/a", "old", 0o644, 1000) }, at: "/tmp/a", content: "old",
			is: 0o644, uid: 1000,
		},
		{
			name: "a pipe is refused", path: "/tmp/pipe", kind: errdefs.FailedPrecondition, errno: syscall.ENXIO,
			before: func(s *scratch) { must(s.t, syscall.Mkfifo(s.host("tmp/pipe"), 0o666)) },
		},
		{
			name: "who may write to the directory only may not replace the file", path: "/home/user/a", kind: errdefs.Denied,
			errno: syscall.EACCES, before: func(s *scratch) { s.put("home/user/a", "old", 0o644, 0) }, content: "old",
			at: "/home/user/a", is: 0o644,
		},
		{
			name: "who may not write to the directory makes nothing", path: "/etc/a", kind: errdefs.Denied,
			errno: syscall.EACCES,
		},
		{name: "a NUL byte is refused", path: "/tmp/a\x00b", kind: errdefs.Invalid, errno: syscall.EINVAL},
		{name: "an empty path is refused", path: "", kind: errdefs.Invalid, errno: syscall.EINVAL},
		{
			name: "a long name is refused", path: "/tmp/" + strings.Repeat("n", 256), kind: errdefs.Invalid,
			errno: syscall.ENAMETOOLONG,
		},
		{
			name: "a long path is refused", path: "/tmp" + strings.Repeat("/n", 2100), kind: errdefs.Invalid,
			errno: syscall.ENAMETOOLONG,
		},
		{
			name: "the name of an unfinished file is refused", path: "/tmp/.sandsea-0123456789abcdef",
			kind: errdefs.Invalid,
		},
		{name: "bits above the mode are refused", path: "/tmp/a", mode: 0o100644, kind: errdefs.Invalid},
		{name: "more than announced changes nothing", path: "/tmp/new/a", size: &three, kind: errdefs.Invalid},
		{
			name: "less than announced changes nothing", path: "/tmp/a", size: &three, from: text("no"),
			kind: errdefs.Invalid, before: func(s *scratch) { s.put("tmp/a", "old", 0o600, 1000) }, content: "old", at: "/tmp/a",
			is: 0o600, uid: 1000,
		},
		{name: "nothing when nothing was announced", path: "/tmp/a", size: &none, from: text(""), is: 0o644, uid: 1000},
		{
			name: "a source that fails changes nothing", path: "/tmp/new/er/a", kind: errdefs.Internal,
			from: func() io.Reader { return io.MultiReader(strings.NewReader("part"), errReader{broken}) },
		},
	} {
		for _, options := range []string{"", "n"} {
			t.Run(c.name+" "+options, func(t *testing.T) {
				s := newScratch(t, options)
				if c.before != nil {
					c.before(s)
				}
				before := names(t, s.host("tmp"))
				v := s.user()
				if c.as != nil {
					v = c.as(s)
				}
				from := text("the new content")
				if c.from != nil {
					from = c.from
				}
				_, err := v.Write(t.Context(), c.path, c.mode, c.size, from())
				if got := errdefs.KindOf(err); got != c.kind {
					t.Fatalf("got %v (%v), want kind %q", got, err, c.kind)
				}
				if c.errno != 0 {
					wantErrno(t, err, c.kind, c.errno)
				}
				if c.kind != "" && c.at == "" {
					if diff := cmp.Diff(before, names(t, s.host("tmp"))); diff != "" {
						t.Errorf("something changed:\n%s", diff)
					}
					return
				}
				at := c.path
				if c.at != "" {
					at = c.at
				}
				content := c.content
				if content == "" && c.from == nil {
					content = "the new content"
				}
				got, err := os.ReadFile(s.host(at))
				must(t, err)
				if string(got) != content {
					t.Errorf("content is %q, want %q", got, content)
				}
				st, err := os.Lstat(s.host(at))
				must(t, err)
				if st.Mode() != c.is {
					t.Errorf("mode is %v, want %v", st.Mode(), c.is)
				}
				if uid := int(st.Sys().(*syscall.Stat_t).Uid) - uidBase; uid != c.uid {
					t.Errorf("owner is %d, want %d", uid, c.uid)
				}
				for _, n := range names(t, filepath.Dir(s.host(at))) {
					if strings.HasPrefix(n, ".sandsea") {
						t.Errorf("%s was left behind", n)
					}
				}
			})
		}
	}
}

func text(s string) func() io.Reader { return func() io.Reader { return strings.NewReader(s) } }

type errReader struct{ err error }

func (e errReader) Read([]byte) (int, error) { return 0, e.err }

func TestParentsBelongToTheUser(t *testing.T) {
	s := newScratch(t, "")
	write(t, s.user(), "/tmp/a/b/c", "x")
	for _, d := range []string{"tmp/a", "tmp/a/b"} {
		st, err := os.Stat(s.host(d))
		must(t, err)
		if st.Mode().Perm() != 0o755 || st.Sys().(*syscall.Stat_t).Uid != uidBase+1000 {
			t.Errorf("%s is %v of %d", d, st.Mode(), st.Sys().(*syscall.Stat_t).Uid)
		}
	}
}

func TestAUserMayWhatTheUserMay(t *testing.T) {
	s := newScratch(t, "")
	s.put("etc/shadow", "secret", 0o600, 0)
	s.put("etc/group-file", "shared", 0o640, 0)
	must(t, os.Chown(s.host("etc/group-file"), uidBase, uidBase+50))
	root, user := s.rootUser(), s.user()
	member := s.As(chronus.IDs{UID: 1000, GID: 1000, Groups: []uint32{1000, 50}}, "/")

	if got := read(t, root, "/etc/shadow"); got != "secret" {
		t.Errorf("root reads %q", got)
	}
	_, err := readAll(t.Context(), user, "/etc/shadow", Range{})
	wantErrno(t, err, errdefs.Denied, syscall.EACCES)
	if e, _ := errors.AsType[*errdefs.Error](err); e == nil || e.Object != "/etc/shadow" {
		t.Errorf("the error does not name the path: %v", err)
	}
	if got := read(t, member, "/etc/group-file"); got != "shared" {
		t.Errorf("a member of the group reads %q", got)
	}
	_, err = readAll(t.Context(), user, "/etc/group-file", Range{})
	wantErrno(t, err, errdefs.Denied, syscall.EACCES)
	wantErrno(t, user.Chmod(t.Context(), "/etc/shadow", 0o666), errdefs.Denied, syscall.EPERM)
	wantErrno(t, user.Chown(t.Context(), "/home/user", 0, 0), errdefs.Denied, syscall.EPERM)
	wantErrno(t, user.Remove(t.Context(), "/etc/shadow", false), errdefs.Denied, syscall.EACCES)
	wantErrno(t, user.Move(t.Context(), "/etc/shadow", "/tmp/x"), errdefs.Denied, syscall.EACCES)
	wantErrno(t, user.MakeDir(t.Context(), "/etc/d", 0, true), errdefs.Denied, syscall.EACCES)
	must(t, root.Chown(t.Context(), "/etc/shadow", 1000, 1000))
	if got := read(t, user, "/etc/shadow"); got != "secret" {
		t.Errorf("the owner reads %q", got)
	}
}

func TestNoPathLeavesTheSandbox(t *testing.T) {
	s := newScratch(t, "p")
	s.put("etc/passwd", "inside", 0o644, 0)
	s.link("/../../etc/passwd", "tmp/absolute", 0)
	s.link("../../../../../../etc/passwd", "tmp/relative", 0)
	s.link("/../../..", "tmp/up", 0)
	v := s.rootUser()
	for _, path := range []string{
		"/../../etc/passwd", "/tmp/absolute", "/tmp/relative", "/tmp/up/etc/passwd", "/tmp/up/../etc/passwd", "etc/passwd",
		"/tmp/../../../etc/./passwd", "//etc//passwd",
	} {
		if got := read(t, v, path); got != "inside" {
			t.Errorf("%s gives %q", path, got)
		}
	}
	for _, path := range []string{"/proc/self/root/etc/passwd", "/proc/self/cwd", "/proc/self/fd/3", "/proc/1/exe"} {
		_, err := readAll(t.Context(), v, path, Range{})
		wantErrno(t, err, errdefs.FailedPrecondition, syscall.ELOOP)
	}
	write(t, v, "/tmp/relative", "written")
	if got, err := os.ReadFile(s.host("etc/passwd")); err != nil || string(got) != "written" {
		t.Errorf("got %q, %v", got, err)
	}
}

func TestALinkOfAnotherUserInASharedDirectoryIsNotFollowed(t *testing.T) {
	s := newScratch(t, "")
	s.put("etc/passwd", "inside", 0o644, 0)
	s.put("home/user/mine", "mine", 0o644, 1000)
	s.link("/etc/passwd", "tmp/report", 1000)
	s.link("/etc/new", "tmp/dangling", 1000)
	for _, path := range []string{"/tmp/report", "/tmp/dangling"} {
		_, err := s.rootUser().Write(t.Context(), path, 0, nil, strings.NewReader("through"))
		wantErrno(t, err, errdefs.Denied, syscall.EACCES)
		wantErrno(t, s.rootUser().Chmod(t.Context(), path, 0o777), errdefs.Denied, syscall.EACCES)
	}
	if got := read(t, s.rootUser(), "/etc/passwd"); got != "inside" {
		t.Errorf("/etc/passwd holds %q", got)
	}
	// Its maker's, that of the directory's owner, and those in a directory of one's own are followed.
	s.link("/home/user/mine", "tmp/mine", 1000)
	write(t, s.user(), "/tmp/mine", "more")
	s.link("/home/user/mine", "tmp/roots", 0)
	write(t, s.user(), "/tmp/roots", "most")
	s.link("/etc/passwd", "home/user/link", 1000)
	write(t, s.rootUser(), "/home/user/link", "followed")
	if got := read(t, s.rootUser(), "/etc/passwd"); got != "followed" {
		t.Errorf("/etc/passwd holds %q", got)
	}
}

func TestNothingBlocksOnPipesSocketsAndDevices(t *testing.T) {
	s := newScratch(t, "")
	must(t, syscall.Mkfifo(s.host("tmp/pipe"), 0o666))
	must(t, syscall.Mknod(s.host("tmp/device"), syscall.S_IFCHR|0o666, 1<<8|5))
	fd, err := syscall.Socket(syscall.AF_UNIX, syscall.SOCK_STREAM, 0)
	must(t, err)
	defer syscall.Close(fd)
	dir, err := os.Open(s.host("tmp"))
	must(t, err)
	defer dir.Close()
	must(t, syscall.Bind(fd, &syscall.SockaddrUnix{Name: fmt.Sprintf("/proc/self/fd/%d/socket", dir.Fd())}))
	ctx, stop := context.WithTimeout(t.Context(), 20*time.Second)
	defer stop()
	for name, want := range map[string]string{"pipe": "a named pipe", "socket": "a socket", "device": "a device"} {
		_, err := readAll(ctx, s.rootUser(), "/tmp/"+name, Range{})
		wantErrno(t, err, errdefs.FailedPrecondition, syscall.ENXIO)
		if !strings.Contains(err.Error(), want) {
			t.Errorf("%q does not say %q", err, want)
		}
		info, err := s.rootUser().Stat(ctx, "/tmp/"+name, false)
		if err != nil || info.Type != Other {
			t.Errorf("%s: %+v, %v", name, info, err)
		}
	}
	_, err = readAll(ctx, s.rootUser(), "/tmp", Range{})
	wantErrno(t, err, errdefs.FailedPrecondition, syscall.EISDIR)
}

func TestFilesOfProcAreReadAsTheyLookInside(t *testing.T) {
	s := newScratch(t, "p")
	if got := read(t, s.user(), "/proc/sys/kernel/hostname"); got != "inside\n" {
		t.Errorf("hostname is %q", got)
	}
	r, err := s.user().Read(t.Context(), "/proc/self/status", Range{})
	must(t, err)
	defer r.Close()
	b, err := io.ReadAll(r)
	if err != nil || !strings.Contains(string(b), "\nUid:\t1000\t1000") || r.Info().Size != int64(len(b)) {
		t.Errorf("status of %d bytes: %v\n%s", r.Info().Size, err, b)
	}
	_, err = readAll(t.Context(), s.user(), "/proc/self/status", Range{MaxBytes: 10})
	wantErrno(t, err, errdefs.FailedPrecondition, syscall.EFBIG)
	_, err = readAll(t.Context(), s.rootUser(), "/proc/self/pagemap", Range{})
	wantErrno(t, err, errdefs.FailedPrecondition, syscall.EFBIG)
}

func TestRead(t *testing.T) {
	s := newScratch(t, "")
	s.put("tmp/ten", "0123456789", 0o644, 0)
	s.put("tmp/none", "", 0o644, 0)
	for _, c := range []struct {
		name  string
		path  string
		part  Range
		want  string
		kind  errdefs.Kind
		errno syscall.Errno
	}{
		{name: "all", path: "/tmp/ten", want: "0123456789"},
		{name: "from an offset", path: "/tmp/ten", part: Range{Offset: 7}, want: "789"},
		{name: "a length", path: "/tmp/ten", part: Range{Offset: 2, Length: 3}, want: "234"},
		{name: "a length beyond the end", path: "/tmp/ten", part: Range{Offset: 8, Length: 30}, want: "89"},
		{name: "an offset beyond the end", path: "/tmp/ten", part: Range{Offset: 30}},
		{name: "as large as allowed", path: "/tmp/ten", part: Range{MaxBytes: 10}, want: "0123456789"},
		{
			name: "larger than allowed", path: "/tmp/ten", part: Range{MaxBytes: 9}, kind: errdefs.FailedPrecondition,
			errno: syscall.EFBIG,
		},
		{name: "an empty file", path: "/tmp/none", part: Range{MaxBytes: 1}},
		{name: "a length of an empty file", path: "/tmp/none", part: Range{Length: 5}},
		{name: "a negative offset", path: "/tmp/ten", part: Range{Offset: -1}, kind: errdefs.Invalid},
		{name: "what is not there", path: "/tmp/gone", kind: errdefs.NotFound, errno: syscall.ENOENT},
		{name: "what is below a file", path: "/tmp/ten/x", kind: errdefs.FailedPrecondition, errno: syscall.ENOTDIR},
	} {
		t.Run(c.name, func(t *testing.T) {
			got, err := readAll(t.Context(), s.user(), c.path, c.part)
			if c.kind != "" {
				wantErrno(t, err, c.kind, c.errno)
				return
			}
			if err != nil || string(got) != c.want {
				t.Errorf("got %q, %v; want %q", got, err, c.want)
			}
		})
	}
}

func TestATooLargeFileNamesItsSize(t *testing.T) {
	s := newScratch(t, "")
	s.put("tmp/big", "", 0o644, 0)
	must(t, os.Truncate(s.host("tmp/big"), 1<<40))
	_, err := s.user().Read(t.Context(), "/tmp/big", Range{MaxBytes: 1000})
	e, _ := errors.AsType[*errdefs.Error](err)
	if e == nil || e.Field != "max_bytes" || !strings.Contains(e.Msg, "1099511627776") {
		t.Errorf("got %+v", e)
	}
}

func TestAFileThatShrinksIsALossAndOneThatGrowsIsCutOff(t *testing.T) {
	s := newScratch(t, "")
	s.put("tmp/a", "0123456789", 0o644, 0)
	r, err := s.user().Read(t.Context(), "/tmp/a", Range{})
	must(t, err)
	defer r.Close()
	_, err = io.ReadFull(r, make([]byte, 2))
	must(t, err)
	must(t, os.Truncate(s.host("tmp/a"), 5))
	got, err := io.ReadAll(r)
	if string(got) != "234" || !errors.Is(err, errdefs.DataLoss) {
		t.Errorf("got %q, %v", got, err)
	}
	r, err = s.user().Read(t.Context(), "/tmp/a", Range{})
	must(t, err)
	defer r.Close()
	must(t, os.WriteFile(s.host("tmp/a"), []byte("01234and more"), 0o644))
	if got, err := io.ReadAll(r); string(got) != "01234" || err != nil {
		t.Errorf("got %q, %v", got, err)
	}
}

func TestAGibibyteIsReadInFlatMemory(t *testing.T) {
	s := newScratch(t, "")
	s.put("tmp/big", "", 0o644, 0)
	must(t, os.Truncate(s.host("tmp/big"), 1<<30))
	r, err := s.user().Read(t.Context(), "/tmp/big", Range{})
	must(t, err)
	defer r.Close()
	var before, after runtime.MemStats
	runtime.ReadMemStats(&before)
	n, err := copyBytes(t.Context(), io.Discard, r)
	runtime.ReadMemStats(&after)
	if n != 1<<30 || err != nil {
		t.Errorf("read %d bytes, %v", n, err)
	}
	if grown := int64(after.TotalAlloc - before.TotalAlloc); grown > 4<<20 {
		t.Errorf("%d bytes were allocated on the way", grown)
	}
}

func TestListingABigDirectory(t *testing.T) {
	s := newScratch(t, "")
	must(t, os.Mkdir(s.host("tmp/many"), 0o755))
	const n = 100_000
	for i := range n {
		must(t, syscall.Mknod(s.host(fmt.Sprintf("tmp/many/entry-%06d", i)), syscall.S_IFREG|0o644, 0))
	}
	must(t, os.Chown(s.host("tmp/many"), uidBase, uidBase))
	began := time.Now()
	seen := map[string]bool{}
	for batch, err := range s.user().List(t.Context(), "/tmp/many") {
		must(t, err)
		for _, i := range batch {
			if i.Type != Regular || !strings.HasPrefix(i.Path, "/tmp/many/entry-") {
				t.Fatalf("got %+v", i)
			}
			seen[i.Path] = true
		}
	}
	if len(seen) != n {
		t.Errorf("listed %d entries", len(seen))
	}
	t.Logf("listed %d entries in %v", n, time.Since(began))
	must(t, s.rootUser().Remove(t.Context(), "/tmp/many", true))
	if got := names(t, s.host("tmp")); len(got) > 0 {
		t.Errorf("left: %v", got)
	}
}

func TestListing(t *testing.T) {
	s := newScratch(t, "")
	s.put("home/user/file", "12345", 0o640, 1000)
	must(t, os.Symlink(strings.Repeat("t", 4000), s.host("home/user/link")))
	must(t, os.Lchown(s.host("home/user/link"), uidBase, uidBase))
	must(t, os.Mkdir(s.host("home/user/\xff\n"), 0o700))
	must(t, os.Chown(s.host("home/user/\xff\n"), uidBase, uidBase))
	var got []string
	for batch, err := range s.user().List(t.Context(), ".") {
		must(t, err)
		for _, i := range batch {
			got = append(got, fmt.Sprintf("%q %d %d %o %d %d", i.Path, i.Type, i.Size, i.Mode, i.UID, len(i.Link)))
		}
	}
	slices.Sort(got)
	want := []string{
		`"/home/user/./\xff\n" 2 4096 700 0 0`, `"/home/user/./file" 1 5 640 1000 0`, `"/home/user/./link" 3 4000 777 0 4000`,
	}
	for i := range got {
		// Directories have the size that the file system says.
		if i < len(want) && strings.Contains(want[i], " 2 4096 ") {
			got[i] = want[i]
		}
	}
	if diff := cmp.Diff(want, got); diff != "" {
		t.Error(diff)
	}
	for _, err := range s.user().List(t.Context(), "/home/user/file") {
		wantErrno(t, err, errdefs.FailedPrecondition, syscall.ENOTDIR)
	}
	// A listing that is broken off gives its directory back: there are far fewer handles than this.
	for range 2 * wireHandles {
		for _, err := range s.user().List(t.Context(), "/") {
			must(t, err)
			break
		}
	}
}

func TestListingManyLongLinks(t *testing.T) {
	s := newScratch(t, "")
	for i := range 200 {
		must(t, os.Symlink(strings.Repeat("t", 4095), s.host(fmt.Sprintf("tmp/%0200d", i))))
	}
	n := 0
	for batch, err := range s.user().List(t.Context(), "/tmp") {
		must(t, err)
		n += len(batch)
	}
	if n != 200 {
		t.Errorf("listed %d of 200", n)
	}
}

func TestAFileSwappedForALinkNeverShowsWhatTheUserMayNotSee(t *testing.T) {
	s := newScratch(t, "")
	s.put("etc/secret", "secret", 0o600, 0)
	must(t, os.Mkdir(s.host("tmp/d"), 0o777))
	stop := make(chan struct{})
	var wg sync.WaitGroup
	wg.Go(func() {
		for i := 0; ; i++ {
			select {
			case <-stop:
				return
			default:
			}
			next := s.host("tmp/d/next")
			_ = os.Remove(next)
			switch i % 3 {
			case 0:
				_ = os.WriteFile(next, []byte("public"), 0o644)
			case 1:
				_ = os.Symlink("/etc/secret", next)
			case 2:
				_ = syscall.Mkfifo(next, 0o666)
			}
			_ = os.Rename(next, s.host("tmp/d/x"))
		}
	})
	defer wg.Wait()
	defer close(stop)
	ctx, cancel := context.WithTimeout(t.Context(), 30*time.Second)
	defer cancel()
	reads := 0
	for n := 0; n < 3000 || reads == 0; n++ {
		b, err := readAll(ctx, s.user(), "/tmp/d/x", Range{})
		if err == nil {
			reads++
		}
		if string(b) != "" && string(b) != "public" {
			t.Fatalf("read %q", b)
		}
		if ctx.Err() != nil {
			t.Fatalf("it hangs, or never reads the file: %d reads of %d", reads, n)
		}
	}
}

func TestRemove(t *testing.T) {
	for _, c := range []struct {
		name      string
		before    func(s *scratch)
		path      string
		recursive bool
		kind      errdefs.Kind
		errno     syscall.Errno
		left      []string
	}{
		{name: "a file", path: "/tmp/file"},
		{name: "an empty directory", path: "/tmp/empty"},
		{name: "an empty directory with a slash", path: "/tmp/empty/"},
		{name: "a full directory", path: "/tmp/full", kind: errdefs.FailedPrecondition, errno: syscall.ENOTEMPTY},
		{name: "what is not there", path: "/tmp/gone", kind: errdefs.NotFound, errno: syscall.ENOENT},
		{name: "a file with a slash", path: "/tmp/file/", kind: errdefs.FailedPrecondition, errno: syscall.ENOTDIR},
		{name: "a full directory, recursively", path: "/tmp/full", recursive: true},
		{name: "a file, recursively", path: "/tmp/file", recursive: true},
		{name: "what is not there, recursively", path: "/tmp/gone/away", recursive: true},
		{name: "a link, not what it leads to", path: "/tmp/link", recursive: true, left: []string{"a"}},
		{name: "the root", path: "/", recursive: true, kind: errdefs.FailedPrecondition, errno: syscall.EBUSY},
		{name: "dots", path: "/tmp/full/..", recursive: true, kind: errdefs.FailedPrecondition, errno: syscall.EBUSY},
	} {
		t.Run(c.name, func(t *testing.T) {
			s := newScratch(t, "")
			v := s.user()
			for _, f := range []string{"/tmp/file", "/tmp/full/a/b/c", "/tmp/full/d", "/home/user/keep/a"} {
				write(t, v, f, "x")
			}
			must(t, v.MakeDir(t.Context(), "/tmp/empty", 0, false))
			must(t, v.Symlink(t.Context(), "/home/user/keep", "/tmp/link"))
			must(t, v.Symlink(t.Context(), "/home/user/keep", "/tmp/full/link"))
			err := v.Remove(t.Context(), c.path, c.recursive)
			if c.kind != "" {
				wantErrno(t, err, c.kind, c.errno)
				return
			}
			must(t, err)
			if _, err := os.Lstat(s.host(c.path)); !errors.Is(err, os.ErrNotExist) {
				t.Errorf("it is still there: %v", err)
			}
			if diff := cmp.Diff([]string{"a"}, names(t, s.host("home/user/keep"))); diff != "" {
				t.Error(diff)
			}
		})
	}
}

func TestRemovingAVeryDeepTree(t *testing.T) {
	for _, options := range []string{"", "n"} {
		s := newScratch(t, options)
		const depth = 3000
		must(t, os.Mkdir(s.host("tmp/deep"), 0o755))
		must(t, os.Chown(s.host("tmp/deep"), uidBase+1000, uidBase+1000))
		fd, err := syscall.Open(s.host("tmp/deep"), syscall.O_DIRECTORY|syscall.O_CLOEXEC, 0)
		must(t, err)
		for range depth {
			must(t, syscall.Mkdirat(fd, "directory", 0o755))
			must(t, syscall.Fchownat(fd, "directory", uidBase+1000, uidBase+1000, 0))
			next, err := syscall.Openat(fd, "directory", syscall.O_DIRECTORY|syscall.O_CLOEXEC, 0)
			must(t, err)
			must(t, syscall.Close(fd))
			fd = next
		}
		must(t, syscall.Close(fd))
		must(t, s.user().Remove(t.Context(), "/tmp/deep", true))
		if got := names(t, s.host("tmp")); len(got) > 0 {
			t.Errorf("left: %v", got)
		}
	}
}

func TestARemovalThatIsDeniedNamesWhatStays(t *testing.T) {
	s := newScratch(t, "")
	write(t, s.user(), "/tmp/tree/a", "x")
	write(t, s.rootUser(), "/tmp/tree/locked/stays", "x")
	err := s.user().Remove(t.Context(), "/tmp/tree", true)
	wantErrno(t, err, errdefs.Denied, syscall.EACCES)
	if !strings.Contains(err.Error(), "stays") && !strings.Contains(err.Error(), "locked") {
		t.Errorf("%v does not name what stays", err)
	}
}

func TestMakeDir(t *testing.T) {
	s := newScratch(t, "")
	s.put("tmp/file", "", 0o644, 1000)
	s.link("/tmp/elsewhere", "tmp/dangling", 0)
	v := s.user()
	for _, c := range []struct {
		name    string
		path    string
		mode    uint32
		parents bool
		kind    errdefs.Kind
		errno   syscall.Errno
		is      os.FileMode
	}{
		{name: "one", path: "/tmp/one", is: 0o755},
		{name: "one with a slash", path: "/tmp/slash/", is: 0o755},
		{name: "one again", path: "/tmp/one", kind: errdefs.AlreadyExists, errno: syscall.EEXIST},
		{name: "one again with parents", path: "/tmp/one", mode: 0o700, parents: true, is: 0o755},
		{name: "a mode", path: "/tmp/mode", mode: 0o2777, is: 0o777 | os.ModeSetgid},
		{name: "a sticky one with parents", path: "/tmp/p/q/r", mode: 0o1777, parents: true, is: 0o777 | os.ModeSticky},
		{name: "without parents", path: "/tmp/no/way", kind: errdefs.NotFound, errno: syscall.ENOENT},
		{name: "over a file", path: "/tmp/file", kind: errdefs.AlreadyExists, errno: syscall.EEXIST},
		{
			name: "below a file", path: "/tmp/file/x", parents: true, kind: errdefs.FailedPrecondition,
			errno: syscall.ENOTDIR,
		},
		{
			name: "a dangling link", path: "/tmp/dangling", parents: true, kind: errdefs.AlreadyExists,
			errno: syscall.EEXIST,
		},
		{name: "the root", path: "/", kind: errdefs.AlreadyExists, errno: syscall.EEXIST},
		{name: "the root with parents", path: "/", parents: true, is: 0o755},
	} {
		t.Run(c.name, func(t *testing.T) {
			err := v.MakeDir(t.Context(), c.path, c.mode, c.parents)
			if c.kind != "" {
				wantErrno(t, err, c.kind, c.errno)
				return
			}
			must(t, err)
			st, err := os.Stat(s.host(c.path))
			must(t, err)
			if got := st.Mode() &^ os.ModeDir; got != c.is {
				t.Errorf("mode %v, want %v", got, c.is)
			}
		})
	}
	if st, err := os.Stat(s.host("tmp/p")); err != nil || st.Mode().Perm() != 0o755 {
		t.Errorf("parent: %v %v", st, err)
	}
}

func TestMove(t *testing.T) {
	for _, c := range []struct {
		name     string
		from, to string
		kind     errdefs.Kind
		errno    syscall.Errno
	}{
		{name: "a file", from: "/home/user/file", to: "/home/user/new"},
		{name: "a file over a file", from: "/home/user/file", to: "/home/user/other"},
		{name: "a directory", from: "/home/user/dir", to: "/home/user/new"},
		{name: "a link", from: "/home/user/link", to: "/home/user/new"},
		{name: "a file to another file system", from: "/home/user/file", to: "/mnt/new"},
		{name: "a directory to another file system", from: "/home/user/dir", to: "/mnt/new"},
		{name: "a link to another file system", from: "/home/user/link", to: "/mnt/new"},
		{name: "nothing", from: "/home/user/gone", to: "/mnt/new", kind: errdefs.NotFound, errno: syscall.ENOENT},
		{
			name: "a file over a directory", from: "/home/user/file", to: "/home/user/dir", kind: errdefs.FailedPrecondition,
			errno: syscall.EISDIR,
		},
		{
			name: "a directory into itself", from: "/home/user/dir", to: "/home/user/dir/sub", kind: errdefs.Invalid,
			errno: syscall.EINVAL,
		},
		{
			name: "a tree with a pipe to another file system", from: "/home/user/pipes", to: "/mnt/new",
			kind: errdefs.FailedPrecondition,
		},
		{name: "to nowhere", from: "/home/user/file", to: "/mnt/no/way", kind: errdefs.NotFound, errno: syscall.ENOENT},
		{name: "a NUL byte", from: "/home/user/file", to: "/mnt/\x00", kind: errdefs.Invalid},
	} {
		t.Run(c.name, func(t *testing.T) {
			s := newScratch(t, "t")
			v := s.user()
			write(t, v, "file", "content")
			write(t, v, "other", "other")
			write(t, v, "dir/sub/a", "content")
			must(t, v.Chmod(t.Context(), "dir/sub", 0o555))
			must(t, v.Symlink(t.Context(), "dangling", "link"))
			must(t, v.MakeDir(t.Context(), "pipes", 0, false))
			must(t, syscall.Mkfifo(s.host("home/user/pipes/pipe"), 0o666))
			if c.name == "a directory to another file system" {
				// Who may not write to a directory cannot remove what is in it, only root can.
				v = s.rootUser()
			}
			before, err := v.Stat(t.Context(), c.from, true)
			if err != nil && c.kind == "" {
				t.Fatal(err)
			}
			err = v.Move(t.Context(), c.from, c.to)
			if c.kind != "" {
				wantErrno(t, err, c.kind, c.errno)
				for batch := range v.List(t.Context(), "/mnt") {
					t.Errorf("left behind: %v", batch)
				}
				return
			}
			must(t, err)
			after, err := v.Stat(t.Context(), c.to, true)
			must(t, err)
			// What another place changes of itself.
			after.Path, after.Inode, after.Links, after.dev = before.Path, before.Inode, before.Links, before.dev
			if after.Type == Directory {
				after.Size = before.Size
			}
			if diff := cmp.Diff(before, after, cmp.AllowUnexported(Info{})); diff != "" {
				t.Error(diff)
			}
			if _, err := v.Stat(t.Context(), c.from, true); !errors.Is(err, errdefs.NotFound) {
				t.Errorf("the original: %v", err)
			}
			if after.Type == Directory {
				if got := read(t, v, c.to+"/sub/a"); got != "content" {
					t.Errorf("content is %q", got)
				}
				if i, err := v.Stat(t.Context(), c.to+"/sub", false); err != nil || i.Mode != 0o555 || i.UID != 1000 {
					t.Errorf("sub is %+v, %v", i, err)
				}
			}
		})
	}
}

func TestAttributes(t *testing.T) {
	s := newScratch(t, "")
	v := s.rootUser()
	write(t, v, "/tmp/a", "x")
	must(t, v.Symlink(t.Context(), "a", "/tmp/link"))
	when := time.Unix(-86400, 123456789)
	must(t, v.Chmod(t.Context(), "/tmp/link", 0o4711))
	must(t, v.Chtimes(t.Context(), "/tmp/link", when))
	info, err := v.Stat(t.Context(), "/tmp/link", false)
	must(t, err)
	if info.Mode != 0o4711 || !info.ModTime.Equal(when) || info.Type != Regular {
		t.Errorf("got %+v", info)
	}
	must(t, v.Chown(t.Context(), "/tmp/link", 1000, 50))
	if info, err = v.Stat(t.Context(), "/tmp/a", true); err != nil || info.UID != 1000 || info.GID != 50 {
		t.Errorf("got %+v, %v", info, err)
	}
	info, err = v.Stat(t.Context(), "/tmp/link", true)
	if err != nil || info.Link != "a" || info.Type != Symlink || info.UID != 0 {
		t.Errorf("got %+v, %v", info, err)
	}
	must(t, v.Chmod(t.Context(), "/", 0o711))
	wantErrno(t, v.Chown(t.Context(), "/tmp/a", 100_000, 0), errdefs.Invalid, syscall.EINVAL)
}

func TestAFullDiskIsNamedAndChangesNothing(t *testing.T) {
	s := newScratch(t, "t")
	write(t, s.user(), "/mnt/a", "old")
	_, err := s.user().Write(t.Context(), "/mnt/a", 0, nil, io.LimitReader(zeros{}, 16<<20))
	wantErrno(t, err, errdefs.Exhausted, syscall.ENOSPC)
	if e, _ := errors.AsType[*errdefs.Error](err); e == nil || e.Limit != "disk" {
		t.Errorf("the limit is not named: %v", err)
	}
	if got := read(t, s.user(), "/mnt/a"); got != "old" {
		t.Errorf("content is %q", got)
	}
}

func TestManyCallsAtOnce(t *testing.T) {
	s := newScratch(t, "")
	var wg sync.WaitGroup
	for g := range 32 {
		wg.Go(func() {
			v := s.user()
			if g%4 == 0 {
				v = s.As(chronus.IDs{UID: uint32(g), Groups: []uint32{0}}, "/tmp")
			}
			for i := range 20 {
				path := fmt.Sprintf("/tmp/%d/%d", g, i)
				content := strings.Repeat(path, 1+rand.IntN(1000))
				if _, err := v.Write(t.Context(), path, 0, nil, strings.NewReader(content)); err != nil {
					t.Error(err)
					return
				}
				if b, err := readAll(t.Context(), v, path, Range{}); err != nil || string(b) != content {
					t.Errorf("%s: %d bytes, %v", path, len(b), err)
				}
				for _, err := range v.List(t.Context(), fmt.Sprintf("/tmp/%d", g)) {
					if err != nil {
						t.Error(err)
					}
				}
			}
			if err := v.Remove(t.Context(), fmt.Sprintf("/tmp/%d", g), true); err != nil {
				t.Error(err)
			}
		})
	}
	wg.Wait()
	if got := names(t, s.host("tmp")); len(got) > 0 {
		t.Errorf("left: %v", got)
	}
}

func TestOnAnOverlay(t *testing.T) {
	s := newScratch(t, "o")
	lower := s.root + "-lower"
	must(t, os.MkdirAll(lower+"/repo/src", 0o755))
	must(t, os.WriteFile(lower+"/repo/src/a.py", []byte("old"), 0o644))
	for _, p := range []string{"/repo", "/repo/src", "/repo/src/a.py"} {
		must(t, os.Chown(lower+p, uidBase, uidBase))
	}
	v := s.rootUser()
	if err := s.restart(); err != nil {
		t.Fatal(err)
	}
	write(t, v, "/repo/src/a.py", "new")
	write(t, v, "/repo/made/b", "b")
	if got := read(t, v, "/repo/src/a.py"); got != "new" {
		t.Errorf("content is %q", got)
	}
	must(t, v.Move(t.Context(), "/repo/src", "/repo/moved"))
	if got := read(t, v, "/repo/moved/a.py"); got != "new" {
		t.Errorf("content after the move is %q", got)
	}
	var tree bytes.Buffer
	_, err := v.DownloadTar(t.Context(), "/repo", &tree)
	must(t, err)
	must(t, v.Remove(t.Context(), "/repo", true))
	if _, err := v.Stat(t.Context(), "/repo", false); !errors.Is(err, errdefs.NotFound) {
		t.Errorf("still there: %v", err)
	}
	done, err := v.UploadTar(t.Context(), "/repo", &tree)
	if err != nil || done.Files != 5 {
		t.Errorf("%+v, %v", done, err)
	}
}

// restart ends all helpers, so that the next one sees a changed lower directory.
func (s *scratch) restart() error {
	err := s.Close()
	s.closed = false
	return err
}
