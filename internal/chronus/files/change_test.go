package files

import (
	"archive/tar"
	"bytes"
	"errors"
	"io"
	"os"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/sandsea/sandsea/api/errdefs"
)

func TestChangeSetsAllAtOnceAsTheUserMay(t *testing.T) {
	s := newScratch(t, "p")
	s.put("/etc/passwd", "root:x:0:0::/root:\nuser:x:1000:1000::/home/user:\n", 0o644, 0)
	s.put("/home/user/f", "x", 0o644, 1000)
	mode, at := uint32(0o4711), time.Unix(1_000_000, 5)
	info, err := s.rootUser().Change(t.Context(), "/home/user/f", Attrs{Mode: &mode, Owner: "7:8", ModTime: at})
	must(t, err)
	// The owner comes before the mode, which the kernel would strip of its set-id bits else.
	if info.Mode != mode || info.UID != 7 || info.GID != 8 || !info.ModTime.Equal(at) {
		t.Errorf("changed to %+v", info)
	}
	_, err = s.rootUser().Change(t.Context(), "/home/user/f", Attrs{Owner: "user"})
	must(t, err)
	for what, a := range map[string]Attrs{"another's": {Owner: "root"}, "by number": {Owner: "0:0"}} {
		_, err = s.user().Change(t.Context(), "/home/user/f", a)
		if wantErrno(t, err, errdefs.Denied, syscall.EPERM); t.Failed() {
			t.Fatal(what)
		}
	}
	mode = 0o600
	info, err = s.user().Change(t.Context(), "f", Attrs{Mode: &mode})
	must(t, err)
	if info.Path != "/home/user/f" || info.Mode != 0o600 || info.UID != 1000 {
		t.Errorf("changed to %+v", info)
	}
	_, err = s.user().Change(t.Context(), "f", Attrs{})
	wantErrno(t, err, errdefs.Invalid, 0)
	s.link("/none", "/tmp/link", 1000)
	_, err = s.user().Change(t.Context(), "/tmp/link", Attrs{ModTime: at})
	wantErrno(t, err, errdefs.NotFound, syscall.ENOENT)
	info, err = s.user().Change(t.Context(), "/tmp/link", Attrs{ModTime: at, NoFollow: true})
	must(t, err)
	if info.Type != Symlink || !info.ModTime.Equal(at) {
		t.Errorf("the link is %+v", info)
	}
	_, err = s.user().Change(t.Context(), "/tmp/link", Attrs{Mode: &mode, NoFollow: true})
	wantErrno(t, err, errdefs.Invalid, 0)
}

func TestAChangeIsOfOneFileWhateverTakesItsName(t *testing.T) {
	s := newScratch(t, "s")
	s.put("/tmp/f", "x", 0o644, 0)
	s.put("/tmp/other", "other", 0o644, 0)
	v := s.rootUser()
	must(t, os.Link(s.root+"/tmp/f", s.root+"/tmp/kept"))
	at, mode := time.Unix(1_000_000, 5), uint32(0o600)
	info, err := v.Change(t.Context(), "/tmp/f", Attrs{Mode: &mode, ModTime: at})
	must(t, err)
	kept, err := v.Stat(t.Context(), "/tmp/kept", false)
	must(t, err)
	if info.Size != 5 || info.Mode != 0o644 || info.ModTime.Equal(at) {
		t.Errorf("what took the name became %+v", info)
	}
	if kept.Mode != mode || !kept.ModTime.Equal(at) {
		t.Errorf("the file became %+v", kept)
	}
}

func TestWhatIsGivenToAnotherIsHis(t *testing.T) {
	s := newScratch(t, "p")
	v, err := s.rootUser().GivingTo(t.Context(), "1000:1000")
	must(t, err)
	if info := write(t, v, "/tmp/new/f", "x"); info.UID != 1000 || info.GID != 1000 {
		t.Errorf("written: %+v", info)
	}
	_, err = v.UploadTar(t.Context(), "/tmp/up", archive(t,
		entry{Header: tar.Header{Name: "a/b/f", Typeflag: tar.TypeReg, Mode: 0o600, Uid: 5}},
		entry{Header: tar.Header{Name: "a/l", Typeflag: tar.TypeSymlink, Linkname: "b"}},
		entry{Header: tar.Header{Name: "d/", Typeflag: tar.TypeDir, Mode: 0o500, Uid: 5}}))
	must(t, err)
	for _, path := range []string{"/tmp/up", "/tmp/up/a", "/tmp/up/a/b", "/tmp/up/a/b/f", "/tmp/up/a/l", "/tmp/up/d"} {
		info, err := v.Stat(t.Context(), path, true)
		must(t, err)
		if info.UID != 1000 || info.GID != 1000 {
			t.Errorf("%s is %d:%d", path, info.UID, info.GID)
		}
	}
	mine, err := s.user().GivingTo(t.Context(), "0")
	must(t, err)
	_, err = mine.Write(t.Context(), "f", 0, nil, strings.NewReader("x"))
	wantErrno(t, err, errdefs.Denied, syscall.EPERM)
	if got := names(t, s.host("/home/user")); len(got) != 0 {
		t.Errorf("left: %q", got)
	}
	_, err = s.user().GivingTo(t.Context(), "nobody-such")
	if e, ok := errors.AsType[*errdefs.Error](err); !ok || e.Field != "owner" {
		t.Errorf("got %v", err)
	}
}

// growing writes to a file of the tree while that is packed.
type growing struct {
	io.Writer
	path string
	left int // bytes until then
	done bool
}

func (g *growing) Write(b []byte) (int, error) {
	if g.left -= len(b); g.left < 0 && !g.done {
		g.done = true
		f, err := os.OpenFile(g.path, os.O_WRONLY|os.O_APPEND, 0)
		if err == nil {
			_, err = f.WriteString("more")
			err = errors.Join(err, f.Close())
		}
		if err != nil {
			return 0, err
		}
	}
	return g.Writer.Write(b)
}

func TestAFileThatGrowsWhileItIsPackedIsListed(t *testing.T) {
	s := newScratch(t, "p")
	must(t, os.Mkdir(s.host("/tmp/d"), 0o755))
	s.put("/tmp/d/f", strings.Repeat("x", 3*chunk), 0o644, 0)
	var out bytes.Buffer
	skipped, err := s.rootUser().DownloadTar(t.Context(), "/tmp/d", &growing{Writer: &out, path: s.host("/tmp/d/f"), left: chunk})
	if err != nil || len(skipped) != 1 || skipped[0] != "f (grew while it was read)" {
		t.Errorf("skipped %q, %v", skipped, err)
	}
	tr := tar.NewReader(&out)
	for n := range 3 {
		h, err := tr.Next()
		switch {
		case n == 2 && err == io.EOF:
		case err != nil:
			t.Fatal(err)
		case n == 1 && (h.Name != "f" || h.Size != 3*chunk):
			t.Errorf("packed %+v", h)
		}
	}
}
