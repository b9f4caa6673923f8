package compose_test

import (
	"archive/tar"
	"bytes"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"os"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"

	"github.com/sandsea/sandsea/api/errdefs"
	"github.com/sandsea/sandsea/internal/image"
	"github.com/sandsea/sandsea/internal/layers/blob/posix"
	"github.com/sandsea/sandsea/internal/layers/build"
	"github.com/sandsea/sandsea/internal/layers/compose"
	"github.com/sandsea/sandsea/internal/linux/mount"
	"github.com/sandsea/sandsea/internal/linux/userns"
	"github.com/sandsea/sandsea/internal/testkit/leak"
	"github.com/sandsea/sandsea/internal/testkit/require"
)

const base = 0x7ff00000

type entry struct {
	tar.Header
	content string
}

func file(name, content string) entry {
	return entry{tar.Header{Name: name, Typeflag: tar.TypeReg, Mode: 0o644}, content}
}

type fixture struct {
	*compose.Composer
	store *posix.Store
	dir   string
	ns    *os.File
}

func setUp(t *testing.T) *fixture {
	t.Helper()
	require.Root(t)
	f := &fixture{dir: t.TempDir()}
	leak.Check(t, f.dir)
	var err error
	if f.store, err = posix.Open(f.dir + "/blobs"); err != nil {
		t.Fatal(err)
	}
	if f.Composer, err = compose.New(compose.Config{Blobs: f.store, Log: slog.New(slog.DiscardHandler)}); err != nil {
		t.Fatal(err)
	}
	if f.ns, err = userns.New(base); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { f.ns.Close(); f.Close() })
	if ok, reason := compose.Probe(f.ns); !ok {
		t.Skip(reason)
	}
	return f
}

// layer imports entries as one layer.
func (f *fixture) layer(t *testing.T, entries ...entry) image.Digest {
	t.Helper()
	var buf bytes.Buffer
	w := tar.NewWriter(&buf)
	for _, e := range entries {
		e.Size, e.ModTime = int64(len(e.content)), time.Unix(1700000000, 0)
		if err := w.WriteHeader(&e.Header); err != nil {
			t.Fatal(err)
		}
		if _, err := io.WriteString(w, e.content); err != nil {
			t.Fatal(err)
		}
	}
	if err := w.Close(); err != nil {
		t.Fatal(err)
	}
	b, err := build.New(build.Config{Store: f.store, Dir: f.dir})
	if err != nil {
		t.Fatal(err)
	}
	res, err := b.Rootfs(t.Context(), &buf, build.ArchiveOptions{Name: "test"})
	if err != nil {
		t.Fatal(err)
	}
	return res.Layers[0].Digest
}

// upper gives an empty writable layer on a detached tmpfs.
func upper(t *testing.T) compose.Upper {
	t.Helper()
	m, err := mount.New("tmpfs", 0, mount.Value("size", "1m"))
	if err != nil {
		t.Fatal(err)
	}
	var dirs [2]*os.File
	for i, name := range []string{"u", "w"} {
		if err := mount.MakeDir(m, name, 0o755); err != nil {
			t.Fatal(err)
		}
		if dirs[i], err = mount.OpenDir(m, name); err != nil {
			t.Fatal(err)
		}
	}
	if err := syscall.Fchown(int(dirs[0].Fd()), base, base); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { dirs[0].Close(); dirs[1].Close(); m.Close() })
	return compose.Upper{Dir: dirs[0], Work: dirs[1]}
}

func in(m *os.File, path string) string { return fmt.Sprintf("/proc/self/fd/%d/%s", m.Fd(), path) }

func TestLayersLieOverEachOtherUnderTheUpper(t *testing.T) {
	f := setUp(t)
	low := f.layer(t, file("a", "low"), file("b", "low"), file("gone", "low"), entry{
		tar.Header{Name: "setuid", Typeflag: tar.TypeReg, Mode: 0o4755, Uid: 5, Gid: 6}, "x",
	}, entry{tar.Header{Name: "disk", Typeflag: tar.TypeBlock, Mode: 0o666, Devmajor: 254}, ""})
	high := f.layer(t, file("b", "high"), entry{tar.Header{Name: "gone", Typeflag: tar.TypeChar}, ""})
	up := upper(t)
	m, err := f.Overlay(t.Context(), []image.Digest{low, high}, f.ns, up)
	if err != nil {
		t.Fatal(err)
	}
	defer m.Close()
	for name, want := range map[string]string{"a": "low", "b": "high"} {
		got, err := os.ReadFile(in(m, name))
		if err != nil || string(got) != want {
			t.Errorf("%s = %q, %v, want %q", name, got, err, want)
		}
	}
	if _, err := os.Stat(in(m, "gone")); !errors.Is(err, os.ErrNotExist) {
		t.Errorf("a file under a whiteout: %v", err)
	}
	var st syscall.Stat_t
	if err := syscall.Stat(in(m, "setuid"), &st); err != nil {
		t.Fatal(err)
	}
	if st.Uid != base+5 || st.Gid != base+6 || st.Mode&0o7777 != 0o4755 {
		t.Errorf("owner %d:%d, mode %o", st.Uid, st.Gid, st.Mode)
	}
	if _, err := os.Open(in(m, "disk")); !errors.Is(err, syscall.EACCES) {
		t.Errorf("a device of an image opens: %v", err)
	}
	if err := os.WriteFile(in(m, "a"), []byte("mine"), 0o644); err != nil {
		t.Fatal(err)
	}
	if got, err := os.ReadFile(in(up.Dir, "a")); err != nil || string(got) != "mine" {
		t.Errorf("in the upper: %q, %v", got, err)
	}
	other, err := f.Overlay(t.Context(), []image.Digest{low, high}, f.ns, upper(t))
	if err != nil {
		t.Fatal(err)
	}
	defer other.Close()
	if got, err := os.ReadFile(in(other, "a")); err != nil || string(got) != "low" {
		t.Errorf("another sandbox sees %q, %v", got, err)
	}
}

func TestALayerIsMountedOnceForAllWhoAsk(t *testing.T) {
	f := setUp(t)
	d := f.layer(t, file("a", "x"))
	var mu sync.Mutex
	seen := map[*os.File]bool{}
	var wg sync.WaitGroup
	for range 16 {
		wg.Go(func() {
			m, err := f.Lower(t.Context(), d)
			if err != nil {
				t.Error(err)
			}
			mu.Lock()
			seen[m] = true
			mu.Unlock()
		})
	}
	wg.Wait()
	if len(seen) != 1 {
		t.Errorf("%d mounts", len(seen))
	}
}

func TestASandboxKeepsALayerThatIsDropped(t *testing.T) {
	f := setUp(t)
	d := f.layer(t, file("a", "x"))
	m, err := f.Overlay(t.Context(), []image.Digest{d}, f.ns, upper(t))
	if err != nil {
		t.Fatal(err)
	}
	defer m.Close()
	f.Keep(nil)
	f.Keep(nil)
	if got, err := os.ReadFile(in(m, "a")); err != nil || string(got) != "x" {
		t.Errorf("got %q, %v", got, err)
	}
	if _, err := f.Lower(t.Context(), d); err != nil {
		t.Errorf("mounting it anew: %v", err)
	}
}

func TestWhatIsRefused(t *testing.T) {
	f := setUp(t)
	d := f.layer(t, file("a", "x"))
	absent := image.Digest("sha256:" + strings.Repeat("0", 64))
	up := upper(t)
	for name, c := range map[string]struct {
		layers []image.Digest
		ns     *os.File
		up     compose.Upper
		kind   errdefs.Kind
	}{
		"no upper":         {[]image.Digest{d}, f.ns, compose.Upper{}, errdefs.Invalid},
		"no work":          {[]image.Digest{d}, f.ns, compose.Upper{Dir: up.Dir}, errdefs.Invalid},
		"no namespace":     {[]image.Digest{d}, nil, up, errdefs.Invalid},
		"no layer":         {nil, f.ns, up, errdefs.Invalid},
		"too many layers":  {make([]image.Digest, image.MaxLayers+1), f.ns, up, errdefs.Invalid},
		"an absent layer":  {[]image.Digest{d, absent}, f.ns, up, errdefs.NotFound},
		"the absent again": {[]image.Digest{absent}, f.ns, up, errdefs.NotFound},
	} {
		t.Run(name, func(t *testing.T) {
			m, err := f.Overlay(t.Context(), c.layers, c.ns, c.up)
			if err == nil {
				m.Close()
			}
			if !errors.Is(err, c.kind) {
				t.Errorf("err = %v, want %s", err, c.kind)
			}
		})
	}
	f.Close()
	if _, err := f.Lower(t.Context(), d); !errors.Is(err, errdefs.Unavailable) {
		t.Errorf("after Close: %v", err)
	}
}

// TestAnUpperThatWasTakenBackIsNotTheNextOnes: a volume is emptied and used again, and its directories have the names
// that they had.
func TestAnUpperThatWasTakenBackIsNotTheNextOnes(t *testing.T) {
	f := setUp(t)
	d := f.layer(t, file("a", "x"))
	for _, renewed := range []string{"u", "w"} {
		up := upper(t)
		vol, err := mount.CloneAt(up.Dir, "..", false)
		if err != nil {
			t.Fatal(err)
		}
		defer vol.Close()
		if err := mount.RemoveDir(vol, renewed); err != nil {
			t.Fatal(err)
		}
		if err := mount.MakeDir(vol, renewed, 0o755); err != nil {
			t.Fatal(err)
		}
		m, err := f.Overlay(t.Context(), []image.Digest{d}, f.ns, up)
		if err == nil {
			m.Close()
		}
		if !errors.Is(err, errdefs.FailedPrecondition) {
			t.Errorf("%s is another's now: err = %v, want %s", renewed, err, errdefs.FailedPrecondition)
		}
		if left, err := os.ReadDir(in(vol, "w")); err != nil || len(left) > 0 {
			t.Errorf("in the work directory: %v, %v", left, err)
		}
	}
}

func BenchmarkOverlay(b *testing.B) {
	require.Root(b)
	ns, err := userns.New(base)
	if err != nil {
		b.Fatal(err)
	}
	defer ns.Close()
	for b.Loop() {
		if ok, reason := compose.Probe(ns); !ok {
			b.Skip(reason)
		}
	}
}
