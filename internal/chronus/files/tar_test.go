package files

import (
	"archive/tar"
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"

	"github.com/sandsea/sandsea/api/errdefs"
)

// entry is one entry of an archive in a test.
type entry struct {
	tar.Header
	content string
}

func archive(t testing.TB, entries ...entry) *bytes.Buffer {
	t.Helper()
	var b bytes.Buffer
	w := tar.NewWriter(&b)
	for _, e := range entries {
		h := e.Header
		h.Size = int64(len(e.content))
		must(t, w.WriteHeader(&h))
		_, err := io.WriteString(w, e.content)
		must(t, err)
	}
	must(t, w.Close())
	return &b
}

// described lists the entries of an archive, sorted.
func described(t testing.TB, b []byte) []string {
	t.Helper()
	var got []string
	r := tar.NewReader(bytes.NewReader(b))
	for {
		h, err := r.Next()
		if errors.Is(err, io.EOF) {
			slices.Sort(got)
			return got
		}
		must(t, err)
		content, err := io.ReadAll(r)
		must(t, err)
		got = append(got, fmt.Sprintf("%q %c %o %d:%d %s -> %q %q", h.Name, h.Typeflag, h.Mode, h.Uid, h.Gid,
			h.ModTime.UTC().Format(time.RFC3339Nano), h.Linkname, content))
	}
}

func at(sec, nsec int64) time.Time { return time.Unix(sec, nsec) }

func tree() []entry {
	long := strings.Repeat("d/", 100) + strings.Repeat("n", 200)
	return []entry{
		{Header: tar.Header{Name: "./", Typeflag: tar.TypeDir, Mode: 0o750, ModTime: at(1e9, 1)}},
		{Header: tar.Header{Name: "empty/", Typeflag: tar.TypeDir, Mode: 0o1777, ModTime: at(1e9, 2)}},
		{Header: tar.Header{Name: "sealed/", Typeflag: tar.TypeDir, Mode: 0o555, ModTime: at(1e9, 3)}},
		{
			Header:  tar.Header{Name: "sealed/a", Typeflag: tar.TypeReg, Mode: 0o400, ModTime: at(-5, 4)},
			content: "sealed",
		},
		{Header: tar.Header{Name: "run", Typeflag: tar.TypeReg, Mode: 0o4755, ModTime: at(4e9, 5)}, content: "#!"},
		{Header: tar.Header{Name: "run2", Typeflag: tar.TypeLink, Linkname: "run", Mode: 0o4755, ModTime: at(4e9, 5)}},
		{
			Header: tar.Header{Name: "link", Typeflag: tar.TypeSymlink, Linkname: "/etc/../a b", Mode: 0o777, ModTime: at(7, 6)},
		},
		{Header: tar.Header{Name: "none", Typeflag: tar.TypeReg, Mode: 0o600, ModTime: at(0, 0)}},
		{
			Header:  tar.Header{Name: "big", Typeflag: tar.TypeReg, Mode: 0o644, ModTime: at(9, 9)},
			content: strings.Repeat("0123456789abcdef\x00\xff", 40_000),
		},
		{
			Header:  tar.Header{Name: "\xfe byte\n\"", Typeflag: tar.TypeReg, Mode: 0o644, ModTime: at(9, 9)},
			content: "odd",
		},
		{Header: tar.Header{Name: long, Typeflag: tar.TypeReg, Mode: 0o644, ModTime: at(9, 9)}, content: "long"},
	}
}

func TestWhatWasUploadedIsDownloadedAgain(t *testing.T) {
	for _, options := range []string{"", "n", "o"} {
		s := newScratch(t, options)
		v := s.user()
		entries := tree()
		for i := range entries {
			entries[i].Format = tar.FormatPAX
			entries[i].Uid, entries[i].Gid = 77, 78
		}
		up := archive(t, entries...)
		done, err := v.UploadTar(t.Context(), "/tmp/x/tree", bytes.NewReader(up.Bytes()))
		must(t, err)
		if done.Files != int64(len(entries)) || done.Bytes < 700_000 {
			t.Errorf("did %+v", done)
		}
		var down, again bytes.Buffer
		skipped, err := v.DownloadTar(t.Context(), "/tmp/x/tree", &down)
		if err != nil || len(skipped) > 0 {
			t.Fatalf("skipped %q, %v", skipped, err)
		}
		want := described(t, up.Bytes())
		for i := range want {
			want[i] = strings.Replace(want[i], " 77:78 ", " 1000:1000 ", 1)
		}
		first := normal(described(t, down.Bytes()))
		// Directories that no entry names come along.
		got := slices.DeleteFunc(slices.Clone(first), func(e string) bool {
			return strings.HasPrefix(e, `"d/`) && strings.Contains(e, `/" 5`)
		})
		if diff := cmp.Diff(want, got); diff != "" {
			t.Errorf("options %q:\n%s", options, diff)
		}
		_, err = v.UploadTar(t.Context(), "/tmp/copy", bytes.NewReader(down.Bytes()))
		must(t, err)
		_, err = v.DownloadTar(t.Context(), "/tmp/copy", &again)
		must(t, err)
		if diff := cmp.Diff(first, normal(described(t, again.Bytes()))); diff != "" {
			t.Errorf("options %q, the second time:\n%s", options, diff)
		}
	}
}

// normal makes "run" the file and "run2" the link: either may come first in its directory.
func normal(entries []string) []string {
	swap := strings.NewReplacer(`"run" 1`, `"run2" 1`, `"run2" 0`, `"run" 0`, `-> "run2"`, `-> "run"`)
	if slices.ContainsFunc(entries, func(e string) bool { return strings.HasPrefix(e, `"run2" 0`) }) {
		for i := range entries {
			entries[i] = swap.Replace(entries[i])
		}
		slices.Sort(entries)
	}
	return entries
}

func TestUploadsThatAreRefused(t *testing.T) {
	file := func(name string) entry {
		return entry{Header: tar.Header{Name: name, Typeflag: tar.TypeReg, Mode: 0o644}, content: "evil"}
	}
	link := func(name, target string) entry {
		return entry{Header: tar.Header{Name: name, Typeflag: tar.TypeSymlink, Linkname: target}}
	}
	hard := func(name, target string) entry {
		return entry{Header: tar.Header{Name: name, Typeflag: tar.TypeLink, Linkname: target}}
	}
	for _, c := range []struct {
		name    string
		entries []entry
		kind    errdefs.Kind
		says    []string
	}{
		{
			"a name that leads up",
			[]entry{file("ok"), file("../evil")},
			errdefs.Invalid,
			[]string{"entry 2", `"../evil"`},
		},
		{"a name that leads up and down", []entry{file("a/../../x/evil")}, errdefs.Invalid, []string{"entry 1"}},
		{"a name with dots that stays inside", []entry{file("a/../evil")}, errdefs.Invalid, []string{"entry 1"}},
		{"an absolute name", []entry{file("/etc/evil")}, errdefs.Invalid, []string{"entry 1", "absolute"}},
		{"no name", []entry{file(".")}, errdefs.Invalid, []string{"entry 1"}},
		{"a name of 64 KiB", []entry{file(strings.Repeat("n", 65536))}, errdefs.Invalid, []string{"entry 1", "65536"}},
		{
			"a path of 64 KiB",
			[]entry{file(strings.Repeat("n/", 32768) + "n")},
			errdefs.Invalid,
			[]string{"entry 1", "65537"},
		},
		{
			"writing through a link that leads out",
			[]entry{link("out", "/etc"), file("out/evil")},
			errdefs.FailedPrecondition,
			[]string{"entry 2", "leads out"},
		},
		{
			"writing through a relative link that leads out",
			[]entry{link("out", "../../etc"), file("out/evil")},
			errdefs.FailedPrecondition,
			[]string{"entry 2", "leads out"},
		},
		{
			"a directory through a link that leads out",
			[]entry{link("out", "/etc"), {Header: tar.Header{Name: "out/evil/", Typeflag: tar.TypeDir, Mode: 0o755}}},
			errdefs.FailedPrecondition,
			[]string{"entry 2"},
		},
		{"a hard link out of the tree", []entry{hard("x", "../../etc/passwd")}, errdefs.Invalid, []string{"entry 1"}},
		{
			"an absolute hard link",
			[]entry{hard("x", "/etc/passwd")},
			errdefs.Invalid,
			[]string{"entry 1", "/etc/passwd"},
		},
		{
			"a hard link through a link that leads out",
			[]entry{link("out", "/etc"), hard("x", "out/passwd")},
			errdefs.FailedPrecondition,
			[]string{"entry 2", "leads out"},
		},
		{"a hard link to nothing", []entry{hard("x", "later")}, errdefs.NotFound, []string{"entry 1"}},
		{
			"a device",
			[]entry{{Header: tar.Header{Name: "null", Typeflag: tar.TypeChar, Devmajor: 1, Devminor: 3}}},
			errdefs.Invalid,
			[]string{"entry 1", "devices"},
		},
		{
			"a pipe",
			[]entry{{Header: tar.Header{Name: "p", Typeflag: tar.TypeFifo}}},
			errdefs.Invalid,
			[]string{"entry 1"},
		},
		{
			"a file over a directory",
			[]entry{{Header: tar.Header{Name: "d/", Typeflag: tar.TypeDir, Mode: 0o755}}, file("d")},
			errdefs.FailedPrecondition,
			[]string{"entry 2", "directory"},
		},
		{"a directory over a file", []entry{file("d"), file("d/x")}, errdefs.FailedPrecondition, []string{"entry 2"}},
		{
			"the name of an unfinished file",
			[]entry{file("d/.sandsea-0123456789abcdef")},
			errdefs.Invalid,
			[]string{"entry 1"},
		},
	} {
		t.Run(c.name, func(t *testing.T) {
			s := newScratch(t, "")
			s.put("etc/passwd", "root", 0o644, 0)
			etc := names(t, s.host("etc"))
			_, err := s.rootUser().UploadTar(t.Context(), "/tmp/up", archive(t, c.entries...))
			wantErrno(t, err, c.kind, 0)
			for _, say := range c.says {
				if !strings.Contains(err.Error(), say) {
					t.Errorf("%q does not say %q", err, say)
				}
			}
			if diff := cmp.Diff(etc, names(t, s.host("etc"))); diff != "" {
				t.Error(diff)
			}
			err = filepath.WalkDir(s.root, func(path string, _ os.DirEntry, err error) error {
				if strings.Contains(path, "evil") {
					t.Errorf("%s was made", path)
				}
				return err
			})
			must(t, err)
		})
	}
}

func TestAnUploadReplacesFilesAndLinksAndKeepsDirectories(t *testing.T) {
	s := newScratch(t, "")
	v := s.user()
	s.put("home/user/secret", "kept", 0o600, 1000)
	write(t, v, "/tmp/up/file", "old")
	write(t, v, "/tmp/up/dir/kept", "kept")
	must(t, v.Symlink(t.Context(), "/home/user/secret", "/tmp/up/link"))
	must(t, v.Symlink(t.Context(), "old-target", "/tmp/up/other"))
	must(t, v.Chmod(t.Context(), "/tmp/up", 0o711))
	reg := func(name string) entry {
		return entry{Header: tar.Header{Name: name, Typeflag: tar.TypeReg, Mode: 0o640}, content: "new"}
	}
	_, err := v.UploadTar(t.Context(), "/tmp/up", archive(t,
		entry{Header: tar.Header{Name: "./", Typeflag: tar.TypeDir, Mode: 0o700}},
		reg("file"), reg("link"), reg("dir/added"),
		entry{Header: tar.Header{Name: "other", Typeflag: tar.TypeSymlink, Linkname: "new-target"}},
		entry{Header: tar.Header{Name: "hard", Typeflag: tar.TypeLink, Linkname: "file"}},
		entry{Header: tar.Header{Name: "hard", Typeflag: tar.TypeLink, Linkname: "file"}},
		entry{Header: tar.Header{Name: "file", Typeflag: tar.TypeLink, Linkname: "hard"}},
	))
	must(t, err)
	for path, want := range map[string]string{
		"/tmp/up/file": "new", "/tmp/up/link": "new", "/tmp/up/dir/added": "new", "/tmp/up/dir/kept": "kept",
		"/home/user/secret": "kept", "/tmp/up/hard": "new",
	} {
		if got := read(t, v, path); got != want {
			t.Errorf("%s is %q, want %q", path, got, want)
		}
	}
	if i, err := v.Stat(t.Context(), "/tmp/up/other", true); err != nil || i.Link != "new-target" {
		t.Errorf("other is %+v, %v", i, err)
	}
	if i, err := v.Stat(t.Context(), "/tmp/up", true); err != nil || i.Mode != 0o711 {
		t.Errorf("an existing top is %+v, %v", i, err)
	}
	if got := names(t, s.host("tmp/up")); len(got) != 5 {
		t.Errorf("there are %q", got)
	}
}

func TestArchivesThatAreDamagedOrCutOff(t *testing.T) {
	s := newScratch(t, "")
	whole := archive(t, entry{
		Header:  tar.Header{Name: "a", Typeflag: tar.TypeReg, Mode: 0o644},
		content: strings.Repeat("a", 5000),
	})
	_, err := s.user().UploadTar(t.Context(), "/tmp/up", bytes.NewReader(whole.Bytes()[:3000]))
	wantErrno(t, err, errdefs.Invalid, 0)
	if got := names(t, s.host("tmp/up")); len(got) > 0 {
		t.Errorf("left behind: %q", got)
	}
	_, err = s.user().UploadTar(t.Context(), "/tmp/up", strings.NewReader(strings.Repeat("no archive", 1000)))
	wantErrno(t, err, errdefs.Invalid, 0)
	broken := errors.New("the line broke")
	cut := io.MultiReader(bytes.NewReader(whole.Bytes()[:3000]), errReader{broken})
	_, err = s.user().UploadTar(t.Context(), "/tmp/up", cut)
	if !errors.Is(err, broken) {
		t.Errorf("got %v", err)
	}
	_, err = s.user().UploadTar(t.Context(), "/etc/up", whole)
	wantErrno(t, err, errdefs.Denied, syscall.EACCES)
	if done, err := s.user().UploadTar(t.Context(), "/tmp/empty", archive(t)); err != nil || done.Files != 0 {
		t.Errorf("an empty archive: %+v, %v", done, err)
	}
}

func TestADownloadLeavesOutAndListsWhatIsNoFile(t *testing.T) {
	s := newScratch(t, "p")
	write(t, s.user(), "/tmp/t/file", "x")
	must(t, syscall.Mkfifo(s.host("tmp/t/pipe"), 0o666))
	must(t, syscall.Mknod(s.host("tmp/t/device"), syscall.S_IFBLK|0o666, 7<<8))
	var b bytes.Buffer
	skipped, err := s.user().DownloadTar(t.Context(), "/tmp/t", &b)
	must(t, err)
	slices.Sort(skipped)
	if diff := cmp.Diff([]string{"device", "pipe"}, skipped); diff != "" {
		t.Error(diff)
	}
	if got := described(t, b.Bytes()); len(got) != 2 {
		t.Errorf("packed %q", got)
	}
	b.Reset()
	skipped, err = s.rootUser().DownloadTar(t.Context(), "/", &b)
	must(t, err)
	slices.Sort(skipped)
	if diff := cmp.Diff([]string{"proc", "tmp/t/device", "tmp/t/pipe"}, skipped); diff != "" {
		t.Error(diff)
	}
}

func TestADownloadOfOneFileHasOneEntry(t *testing.T) {
	s := newScratch(t, "")
	write(t, s.user(), "/tmp/file", "x")
	must(t, s.user().Symlink(t.Context(), "file", "/tmp/link"))
	for _, path := range []string{"/tmp/file", "/tmp/link"} {
		var b bytes.Buffer
		_, err := s.user().DownloadTar(t.Context(), path, &b)
		must(t, err)
		want := fmt.Sprintf("%q 0 644", filepath.Base(path))
		if got := described(t, b.Bytes()); len(got) != 1 || !strings.HasPrefix(got[0], want) {
			t.Errorf("packed %q", got)
		}
	}
	_, err := s.user().DownloadTar(t.Context(), "/tmp/gone", io.Discard)
	wantErrno(t, err, errdefs.NotFound, syscall.ENOENT)
	must(t, syscall.Mkfifo(s.host("tmp/pipe"), 0o666))
	_, err = s.user().DownloadTar(t.Context(), "/tmp/pipe", io.Discard)
	wantErrno(t, err, errdefs.FailedPrecondition, syscall.ENXIO)
	s.put("tmp/locked", "", 0o600, 0)
	_, err = s.user().DownloadTar(t.Context(), "/tmp", io.Discard)
	wantErrno(t, err, errdefs.Denied, syscall.EACCES)
}

func TestADownloadSurvivesATreeThatChanges(t *testing.T) {
	s := newScratch(t, "")
	s.put("etc/secret", "secret", 0o644, 0)
	for i := range 200 {
		write(t, s.user(), fmt.Sprintf("/tmp/t/%d/file", i), strings.Repeat("x", 3000))
	}
	stop := make(chan struct{})
	var wg sync.WaitGroup
	wg.Go(func() {
		for i := 0; ; i = (i + 1) % 200 {
			select {
			case <-stop:
				return
			default:
			}
			d := s.host(fmt.Sprintf("tmp/t/%d", i))
			_ = os.Truncate(d+"/file", int64(i))
			_ = os.Rename(d, d+"-moved")
			_ = os.Symlink("/etc", d)
			_ = os.Remove(d)
			_ = os.Rename(d+"-moved", d)
			_ = os.Remove(d + "/file")
			_ = os.Symlink("/etc/secret", d+"/file")
			_ = os.Remove(d + "/file")
			_ = os.WriteFile(d+"/file", bytes.Repeat([]byte("y"), 2000+i), 0o644)
		}
	})
	defer wg.Wait()
	defer close(stop)
	for range 5 {
		var b bytes.Buffer
		_, err := s.rootUser().DownloadTar(t.Context(), "/tmp/t", &b)
		must(t, err)
		for _, e := range described(t, b.Bytes()) {
			if strings.Contains(e, `"secret"`) {
				t.Errorf("a link was followed: %s", e)
			}
		}
	}
}

func TestATreeDeeperThanAPathIsListed(t *testing.T) {
	s := newScratch(t, "")
	must(t, os.Mkdir(s.host("tmp/deep"), 0o755))
	must(t, os.Chown(s.host("tmp/deep"), uidBase, uidBase))
	fd, err := syscall.Open(s.host("tmp/deep"), syscall.O_DIRECTORY|syscall.O_CLOEXEC, 0)
	must(t, err)
	name := strings.Repeat("d", 200)
	for range 30 {
		must(t, syscall.Mkdirat(fd, name, 0o777))
		must(t, syscall.Fchownat(fd, name, uidBase, uidBase, 0))
		next, err := syscall.Openat(fd, name, syscall.O_DIRECTORY|syscall.O_CLOEXEC, 0)
		must(t, err)
		must(t, syscall.Close(fd))
		fd = next
	}
	must(t, syscall.Close(fd))
	skipped, err := s.rootUser().DownloadTar(t.Context(), "/tmp/deep", io.Discard)
	if err != nil || len(skipped) != 1 {
		t.Errorf("skipped %d, %v", len(skipped), err)
	}
	must(t, s.rootUser().Remove(t.Context(), "/tmp/deep", true))
}

func TestACallThatIsCancelledEndsAndLeavesNothing(t *testing.T) {
	s := newScratch(t, "n")
	ctx, cancel := context.WithCancelCause(t.Context())
	why := errors.New("nobody wants it any more")
	r, w := io.Pipe()
	defer w.Close()
	go func() {
		_, _ = w.Write([]byte("part"))
		cancel(why)
		_, _ = w.Write([]byte("more"))
		w.CloseWithError(why)
	}()
	_, err := s.user().Write(ctx, "/tmp/new/a", 0, nil, r)
	if !errors.Is(err, errdefs.Canceled) || !errors.Is(err, why) {
		t.Errorf("got %v", err)
	}
	if got := names(t, s.host("tmp")); len(got) > 0 {
		t.Errorf("left behind: %q", got)
	}
	_, err = s.user().DownloadTar(ctx, "/", io.Discard)
	if !errors.Is(err, errdefs.Canceled) {
		t.Errorf("got %v", err)
	}
}

func FuzzCleanName(f *testing.F) {
	for _, s := range []string{
		"a/b", "../x", "/x", "a/../b", "./a//b/", "", ".", "..", "a\x00", "...", ".sandsea-0123456789abcdef",
	} {
		f.Add(s)
	}
	f.Fuzz(func(t *testing.T, name string) {
		clean, err := cleanName(name)
		if err != nil {
			return
		}
		if clean == "" {
			if strings.Trim(name, "./") != "" {
				t.Errorf("%q became nothing", name)
			}
			return
		}
		if !filepath.IsLocal(clean) || filepath.Clean(clean) != clean || len(clean) > pathMax ||
			strings.Contains(clean, "\x00") {
			t.Errorf("%q became %q", name, clean)
		}
		if again, err := cleanName(clean); err != nil || again != clean {
			t.Errorf("%q became %q, then %q, %v", name, clean, again, err)
		}
	})
}
