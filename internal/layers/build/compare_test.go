package build

import (
	"bytes"
	"crypto/sha256"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"maps"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/sandsea/sandsea/internal/image"
	"github.com/sandsea/sandsea/internal/layers/blob/posix"
	"github.com/sandsea/sandsea/internal/linux/erofs"
)

// testBuilder makes a builder and its store in a temporary directory.
func testBuilder(t *testing.T, limits Limits) (*Builder, *posix.Store) {
	t.Helper()
	return builderAt(t, t.TempDir(), limits)
}

func builderAt(t *testing.T, dir string, limits Limits) (*Builder, *posix.Store) {
	t.Helper()
	store, err := posix.Open(filepath.Join(dir, "blobs"))
	if err != nil {
		t.Fatal(err)
	}
	b, err := New(Config{Store: store, Dir: dir, Limits: limits})
	if err != nil {
		t.Fatal(err)
	}
	return b, store
}

func needRoot(t *testing.T) {
	t.Helper()
	if os.Geteuid() != 0 {
		t.Skip("needs root to mount and to make devices")
	}
}

// mountLayer mounts a layer detached and gives a path to its root.
func mountLayer(t *testing.T, store *posix.Store, d image.Digest) string {
	t.Helper()
	meta, data, err := Files(t.Context(), store, d)
	if err != nil {
		t.Fatal(err)
	}
	f, err := erofs.Mount(meta, data)
	if errors.Is(err, syscall.ENODEV) || errors.Is(err, syscall.ENOTBLK) || errors.Is(err, syscall.EPERM) {
		t.Skipf("this kernel does not mount EROFS from files here: %v", err)
	}
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = f.Close() })
	return fmt.Sprintf("/proc/self/fd/%d", f.Fd())
}

// facts is what a walk sees of one entry.
type facts struct {
	Mode     string
	UID, GID uint32
	Size     int64
	Mtime    string
	Nlink    uint64
	Rdev     uint64
	Link     string
	Sum      string
	Xattrs   string
	Same     string // the first name of the same inode
}

// survey walks a tree and tells everything that a program could see of it.
func survey(t *testing.T, root string) map[string]facts {
	t.Helper()
	out := map[string]facts{}
	first := map[uint64]string{}
	var walk func(rel string)
	walk = func(rel string) {
		path := root + "/" + rel
		if rel == "." {
			path = root + "/."
		}
		st, err := os.Lstat(path)
		if err != nil {
			t.Fatal(err)
		}
		sys := st.Sys().(*syscall.Stat_t)
		f := facts{
			Mode: fmt.Sprintf("%o", sys.Mode), UID: sys.Uid, GID: sys.Gid, Nlink: sys.Nlink, Rdev: sys.Rdev,
			Mtime: fmt.Sprintf("%d.%09d", sys.Mtim.Sec, sys.Mtim.Nsec),
		}
		if !st.IsDir() {
			f.Size = st.Size()
			if _, ok := first[sys.Ino]; !ok {
				first[sys.Ino] = rel
			}
			f.Same = first[sys.Ino]
		}
		switch {
		case st.Mode()&fs.ModeSymlink != 0:
			if f.Link, err = os.Readlink(path); err != nil {
				t.Fatal(err)
			}
		case st.Mode().IsRegular():
			h := sha256.New()
			r, err := os.Open(path)
			if err != nil {
				t.Fatal(err)
			}
			if _, err := io.Copy(h, r); err != nil {
				t.Fatalf("read %s: %v", path, err)
			}
			_ = r.Close()
			f.Sum = fmt.Sprintf("%x", h.Sum(nil))
		}
		if st.Mode()&fs.ModeSymlink == 0 {
			f.Xattrs = xattrsOf(t, path)
		}
		out[rel] = f
		if st.IsDir() {
			ents, err := os.ReadDir(path)
			if err != nil {
				t.Fatal(err)
			}
			for _, e := range ents {
				walk(filepath.Join(rel, e.Name()))
			}
		}
	}
	walk(".")
	return out
}

func xattrsOf(t *testing.T, path string) string {
	t.Helper()
	buf := make([]byte, 64<<10)
	n, err := syscall.Listxattr(path, buf)
	if err != nil {
		t.Fatalf("listxattr %s: %v", path, err)
	}
	var out []string
	for name := range strings.SplitSeq(string(buf[:n]), "\x00") {
		if name == "" {
			continue
		}
		val := make([]byte, 64<<10)
		k, err := syscall.Getxattr(path, name, val)
		if err != nil {
			t.Fatalf("getxattr %s %s: %v", path, name, err)
		}
		out = append(out, fmt.Sprintf("%s=%x", name, val[:k]))
	}
	slices.Sort(out)
	return strings.Join(out, " ")
}

// sameTree reports every difference between two surveys.
func sameTree(t *testing.T, got, want map[string]facts) {
	t.Helper()
	for _, name := range slices.Sorted(maps.Keys(want)) {
		g, ok := got[name]
		if !ok {
			t.Errorf("%q is missing", name)
		} else if g != want[name] {
			t.Errorf("%q differs:\n got %+v\nwant %+v", name, g, want[name])
		}
	}
	for name := range got {
		if _, ok := want[name]; !ok {
			t.Errorf("%q is there and should not be: %+v", name, got[name])
		}
	}
}

func run(t *testing.T, name string, args ...string) []byte {
	t.Helper()
	if _, err := exec.LookPath(name); err != nil {
		t.Skipf("needs %s: %v", name, err)
	}
	var stderr bytes.Buffer
	cmd := exec.CommandContext(t.Context(), name, args...)
	cmd.Stderr = &stderr
	out, err := cmd.Output()
	if err != nil {
		t.Fatalf("%s %v: %v\n%s", name, args, err, stderr.String())
	}
	return out
}

func must(t *testing.T, err error) {
	t.Helper()
	if err != nil {
		t.Fatal(err)
	}
}

// oddTree makes a directory with every odd case that a root file system may have.
func oddTree(t *testing.T) string {
	t.Helper()
	dir := filepath.Join(t.TempDir(), "tree")
	p := func(rel string) string { return filepath.Join(dir, rel) }
	write := func(rel string, b []byte, mode os.FileMode) {
		must(t, os.MkdirAll(filepath.Dir(p(rel)), 0o755))
		must(t, os.WriteFile(p(rel), b, 0o600))
		must(t, os.Chmod(p(rel), mode))
	}
	must(t, os.MkdirAll(dir, 0o755))
	write("empty", nil, 0o644)
	write("etc/passwd", []byte("root:x:0:0::/root:/bin/sh\n"), 0o644)
	write("bin/setuid", []byte("#!/bin/true\n"), 0o755|fs.ModeSetuid)
	write("bin/setgid", []byte("#!/bin/true\n"), 0o750|fs.ModeSetgid)
	must(t, os.Mkdir(p("tmp"), 0o700))
	must(t, os.Chmod(p("tmp"), 0o777|fs.ModeSticky))
	// Sizes about the block, the hole and the chunk.
	for _, n := range []int{1, 4095, 4096, 4097, 65535, 65536, 65537, 262143, 262144, 262145, 1 << 20} {
		b := make([]byte, n)
		for i := range b {
			b[i] = byte(i*7 + n)
		}
		write(fmt.Sprintf("sizes/%d", n), b, 0o640)
	}
	// Sparse: a hole first, in the middle, at the end, and nothing but a hole.
	sparse := func(rel string, size int64, at ...int64) {
		write(rel, nil, 0o600)
		f, err := os.OpenFile(p(rel), os.O_RDWR, 0)
		must(t, err)
		for _, off := range at {
			_, err := f.WriteAt([]byte("data in a sparse file"), off)
			must(t, err)
		}
		must(t, f.Truncate(size))
		must(t, f.Close())
	}
	sparse("sparse/hole", 10<<20+5)
	sparse("sparse/first", 1<<20, 900_000)
	sparse("sparse/middle", 3<<20+1, 0, 3<<20-30)
	sparse("sparse/end", 2<<20, 10)
	sparse("sparse/small", 100)
	// Links.
	must(t, os.Link(p("etc/passwd"), p("bin/passwd-link")))
	must(t, os.Link(p("etc/passwd"), p("zz-last-link")))
	must(t, os.Symlink("../etc/passwd", p("bin/sym")))
	must(t, os.Symlink("/absolute/nowhere", p("dangling")))
	must(t, os.Symlink(strings.Repeat("long/", 700)+"x", p("long-target")))
	must(t, os.Link(p("dangling"), p("dangling-link")))
	// Nodes.
	must(t, syscall.Mkfifo(p("fifo"), 0o620))
	must(t, os.MkdirAll(p("dev"), 0o755))
	must(t, syscall.Mknod(p("dev/null"), syscall.S_IFCHR|0o666, 1<<8|3))
	must(t, syscall.Mknod(p("dev/big"), syscall.S_IFBLK|0o660, int(259<<8|(300&0xff)|(300&^0xff)<<12)))
	// Names.
	write("names/"+strings.Repeat("n", 255), []byte("long"), 0o644)
	write("names/"+strings.Repeat("d", 200)+"/"+strings.Repeat("e", 200)+"/f", []byte("deep"), 0o644)
	write("names/with space\nnewline\ttab", []byte("odd"), 0o644)
	write("names/\xff\xfenot-utf8", []byte("odd"), 0o644)
	write("names/ünïcödé", []byte("odd"), 0o644)
	write("names/.wh.plain", []byte("no whiteout in a root file system"), 0o644)
	write("names/-dash", []byte("odd"), 0o644)
	// A directory of several blocks, and many small ones.
	for i := range 700 {
		write(fmt.Sprintf("many/entry-with-a-rather-long-name-%04d", i), fmt.Appendf(nil, "%d", i), 0o644)
	}
	must(t, os.Link(p("many/entry-with-a-rather-long-name-0500"), p("many/link-into-a-later-block")))
	for i := range 40 {
		must(t, os.MkdirAll(p(fmt.Sprintf("dirs/%d/sub", i)), 0o711))
	}
	// Attributes; values of several lengths, so that what follows them in the image is aligned and not.
	xattr := func(rel, name string, val []byte) {
		if err := syscall.Setxattr(p(rel), name, val, 0); err != nil {
			t.Skipf("this file system keeps no %s: %v", name, err)
		}
	}
	for i := range 20 {
		rel := fmt.Sprintf("xattr/%d", i)
		write(rel, bytes.Repeat([]byte{byte('a' + i)}, 5000*i+1), 0o644)
		xattr(rel, "user.v", bytes.Repeat([]byte("v"), i))
	}
	write("xattr/many", []byte("m"), 0o644)
	for i := range 12 {
		xattr("xattr/many", fmt.Sprintf("user.name%d", i), []byte(strings.Repeat("x", 150)))
	}
	write("xattr/cap", []byte("#!/bin/true\n"), 0o755)
	xattr("xattr/cap", xattrCap, []byte{1, 0, 0, 2, 0, 4, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0})
	xattr("xattr", "user.on-a-directory", []byte("yes"))
	acl := []byte{
		2, 0, 0, 0, 1, 0, 6, 0, 255, 255, 255, 255, 2, 0, 4, 0, 0xe8, 3, 0, 0,
		4, 0, 4, 0, 255, 255, 255, 255, 0x10, 0, 4, 0, 255, 255, 255, 255, 0x20, 0, 4, 0, 255, 255, 255, 255,
	}
	write("xattr/acl", []byte("acl"), 0o644)
	xattr("xattr/acl", xattrACL, acl)
	sparse("xattr/sparse", 1<<20, 500_000)
	xattr("xattr/sparse", "user.odd", []byte("12345678"))
	// Owners and times, directories last.
	must(t, os.Lchown(p("etc/passwd"), 65535, 65535))
	must(t, os.Lchown(p("bin/setgid"), 1000, 12))
	must(t, os.Chmod(p("bin/setgid"), 0o750|fs.ModeSetgid))
	must(t, os.Lchown(p("bin/sym"), 33, 33))
	must(t, os.Chtimes(p("empty"), time.Time{}, time.Unix(-86400*365, 250_000_000)))
	must(t, os.Chtimes(p("etc/passwd"), time.Time{}, time.Unix(0, 0)))
	must(t, os.Chtimes(p("sizes/1"), time.Time{}, time.Unix(8_000_000_000, 123_456_789)))
	must(t, os.Chtimes(p("etc"), time.Time{}, time.Unix(1_000_000_000, 1)))
	must(t, os.Chtimes(dir, time.Time{}, time.Unix(1_234_567_890, 0)))
	return dir
}

// packTar packs dir as GNU tar does, with everything.
func packTar(t *testing.T, dir string, extra ...string) string {
	t.Helper()
	out := filepath.Join(t.TempDir(), "tree.tar")
	args := append([]string{"--format=posix", "--sparse", "--xattrs", "--xattrs-include=*", "--numeric-owner"}, extra...)
	run(t, "tar", append(args, "-cf", out, "-C", dir, ".")...)
	return out
}

func TestRootfsEqualsTheTreeThatWasPacked(t *testing.T) {
	needRoot(t)
	dir := oddTree(t)
	want := survey(t, dir)
	for _, tc := range []struct {
		name  string
		extra []string
	}{
		{"pax tar", nil},
		{"pax tar with every sparse map inside", []string{"--sparse-version=1.0"}},
		{"pax tar of the first sparse kind", []string{"--sparse-version=0.0"}},
		{"gzip", []string{"--gzip"}},
		{"zstd", []string{"--zstd"}},
		{"xz", []string{"--xz"}},
		{"bzip2", []string{"--bzip2"}},
	} {
		t.Run(tc.name, func(t *testing.T) {
			b, store := testBuilder(t, Limits{})
			f, err := os.Open(packTar(t, dir, tc.extra...))
			must(t, err)
			defer func() { _ = f.Close() }()
			res, err := b.Rootfs(t.Context(), f, ArchiveOptions{})
			must(t, err)
			if len(res.Notes) != 0 {
				t.Errorf("notes %q", res.Notes)
			}
			got := survey(t, mountLayer(t, store, res.Layers[0].Digest))
			sameTree(t, got, want)
			if want := int64(len(want) - 1); res.Layers[0].Files != want {
				t.Errorf("files %d, want %d", res.Layers[0].Files, want)
			}
			noTemps(t, b)
		})
	}
}

// noTemps checks that an import has left nothing but blobs, and notes about layers.
func noTemps(t *testing.T, b *Builder) {
	t.Helper()
	err := filepath.WalkDir(b.dir, func(path string, d fs.DirEntry, err error) error {
		if err != nil {
			return err
		}
		if path == b.notes() {
			return fs.SkipDir
		}
		if d.Type().IsRegular() && (!strings.HasPrefix(path, filepath.Join(b.dir, "blobs")) || strings.HasPrefix(d.Name(), ".")) {
			t.Errorf("left behind: %s", path)
		}
		return nil
	})
	must(t, err)
}

// allFiles reads every file below a directory.
func allFiles(t *testing.T, dir string) map[string][]byte {
	t.Helper()
	out := map[string][]byte{}
	must(t, filepath.WalkDir(dir, func(path string, d fs.DirEntry, err error) error {
		if err != nil || !d.Type().IsRegular() {
			return err
		}
		out[path], err = os.ReadFile(path)
		return err
	}))
	return out
}
