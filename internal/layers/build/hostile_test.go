package build

import (
	"archive/tar"
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"os/exec"
	"path/filepath"
	"runtime"
	"strings"
	"sync"
	"testing"
	"testing/iotest"
	"time"

	"github.com/sandsea/sandsea/api/errdefs"
)

// rawHeader makes one ustar header without the scruples of a writer.
func rawHeader(name string, typ byte, size int64, change func(h []byte)) []byte {
	h := make([]byte, 512)
	copy(h, name)
	copy(h[100:], "0000644\x00")
	copy(h[108:], "0000000\x00")
	copy(h[116:], "0000000\x00")
	copy(h[124:], fmt.Sprintf("%011o\x00", size))
	copy(h[136:], "00000000000\x00")
	h[156] = typ
	copy(h[257:], "ustar\x0000")
	if change != nil {
		change(h)
	}
	copy(h[148:], "        ")
	sum := 0
	for _, b := range h {
		sum += int(b)
	}
	copy(h[148:], fmt.Sprintf("%06o\x00 ", sum))
	return h
}

func pad(b []byte) []byte { return append(b, make([]byte, (512-len(b)%512)%512)...) }

var tarEnd = make([]byte, 1024)

func TestHostileRootfsArchives(t *testing.T) {
	dir, link, sym := byte(tar.TypeDir), byte(tar.TypeLink), byte(tar.TypeSymlink)
	long := strings.Repeat("n", 256)
	var deep strings.Builder
	for range 1400 {
		deep.WriteString("dd/")
	}
	several := func(n int) []ent {
		out := make([]ent, n)
		for i := range out {
			out[i] = ent{name: fmt.Sprintf("f%d", i)}
		}
		return out
	}
	tight := Limits{Entries: 100, Bytes: 1 << 20, Metadata: 20 << 10}
	for _, tc := range []struct {
		name   string
		limits Limits
		arch   []byte
		says   string
	}{
		{
			"leaves the root",
			Limits{},
			makeTar(t, ent{name: "ok", body: "x"}, ent{name: "../../etc/x", body: "x"}),
			`evil.tar: entry 2 "../../etc/x" leaves the root. Nothing imported; repack without it`,
		},
		{"leaves the root from inside", Limits{}, makeTar(t, ent{name: "a/../../x"}), `has ".." in it`},
		{"dots inside", Limits{}, makeTar(t, ent{name: "a/../x"}), `has ".." in it`},
		{"absolute", Limits{}, makeTar(t, ent{name: "/etc/x"}), `entry 1 "/etc/x" its name is absolute`},
		{
			"through a link to outside",
			Limits{},
			makeTar(t, ent{name: "l", typ: sym, link: "/"}, ent{name: "l/etc/x", body: "x"}),
			`entry 2 "l/etc/x" goes through the symbolic link "l"`,
		},
		{
			"through a link to inside",
			Limits{},
			makeTar(t, ent{name: "d/", typ: dir}, ent{name: "l", typ: sym, link: "d"}, ent{name: "l/x"}),
			`goes through the symbolic link "l"`,
		},
		{"through a file", Limits{}, makeTar(t, ent{name: "f", body: "x"}, ent{name: "f/x"}), `which is no directory`},
		{
			"hard link to outside",
			Limits{},
			makeTar(t, ent{name: "l", typ: link, link: "../../etc/shadow"}),
			"leaves the root",
		},
		{
			"absolute hard link",
			Limits{},
			makeTar(t, ent{name: "l", typ: link, link: "/etc/shadow"}),
			"its link target is absolute",
		},
		{
			"hard link to nothing",
			Limits{},
			makeTar(t, ent{name: "l", typ: link, link: "later"}, ent{name: "later"}),
			"does not come before it",
		},
		{
			"hard link to a directory",
			Limits{},
			makeTar(t, ent{name: "d/", typ: dir}, ent{name: "l", typ: link, link: "d"}),
			"a directory",
		},
		{"hard link to the root", Limits{}, makeTar(t, ent{name: "l", typ: link, link: "."}), "a directory"},
		{
			"hard link through a link",
			Limits{},
			makeTar(t, ent{name: "l", typ: sym, link: "/etc"}, ent{name: "h", typ: link, link: "l/shadow"}),
			"does not come before it",
		},
		{"long part", Limits{}, makeTar(t, ent{name: long}), "longer than 255"},
		{"long path", Limits{}, makeTar(t, ent{name: deep.String() + "f"}), "longer than 4096"},
		{"name of 64 KiB", Limits{}, makeTar(t, ent{name: strings.Repeat("x/", 32<<10) + "f"}), "longer than 4096"},
		{"the root as a file", Limits{}, makeTar(t, ent{name: ".", body: "x"}), "stands for the root"},
		{"the root as a link", Limits{}, makeTar(t, ent{name: ".", typ: sym, link: "/"}), "stands for the root"},
		{"empty link", Limits{}, append(rawHeader("l", tar.TypeSymlink, 0, nil), tarEnd...), "target that cannot be"},
		{
			"a uid that is too large",
			Limits{},
			makeTar(t, ent{name: "f", uid: 65536}),
			`entry 1 "f" belongs to 65536:65536; ids go up to 65535`,
		},
		{
			"a device that cannot be",
			Limits{},
			makeTar(t, ent{name: "d", typ: tar.TypeChar, major: 5000}),
			"numbers that Linux does not have",
		},
		{"an unknown type", Limits{}, append(rawHeader("f", 'Q', 0, nil), tarEnd...), `of type 'Q'`},
		{"a part of several volumes", Limits{}, append(rawHeader("f", 'M', 0, nil), tarEnd...), `of type 'M'`},
		{"too many entries", tight, makeTar(t, several(101)...), "more than 100 entries"},
		{
			"too many directories that no entry names", tight, makeTar(t, ent{name: strings.Repeat("d/", 200) + "f"}),
			"more than 100 entries",
		},
		{
			"too much content", tight, makeTar(t, ent{name: "f", body: strings.Repeat("x", 1<<20+1)}),
			"more than 1.0 MiB of content",
		},
		{
			"too many names", tight, makeTar(t, ent{name: "f", pax: map[string]string{xattrRecord + "user.x": strings.Repeat("v", 21<<10)}}),
			"of names and attributes",
		},
		{
			"an attribute that is too long",
			Limits{},
			makeTar(t, ent{name: "f", pax: map[string]string{xattrRecord + "user.x": strings.Repeat("v", 70<<10)}}),
			"too long",
		},
		{"attributes that are too many", Limits{}, makeTar(t, ent{name: "f", pax: map[string]string{
			xattrRecord + "user.x": strings.Repeat("v", 40<<10), xattrRecord + "user.y": strings.Repeat("v", 40<<10),
		}}), "of extended attributes"},
		{
			"a size that lies", tight, append(pad(append(rawHeader("f", tar.TypeReg, 8<<30-1, nil), "x"...)), tarEnd...),
			"more than 1.0 MiB of content",
		},
		{
			"a size that lies a little",
			Limits{},
			append(pad(append(rawHeader("f", tar.TypeReg, 100_000, nil), "x"...)), tarEnd...),
			"ends in the middle",
		},
		{"a negative size", Limits{}, append(rawHeader("f", tar.TypeReg, 0, func(h []byte) {
			copy(h[124:], bytes.Repeat([]byte{0xff}, 12))
		}), tarEnd...), "no valid tar header"},
		{
			"cut off in the content",
			Limits{},
			makeTar(t, ent{name: "f", body: strings.Repeat("x", 10_000)})[:5000],
			"ends in the middle",
		},
		{"cut off between entries", Limits{}, makeTar(t, ent{name: "f", body: "x"})[:1024], "ends without the end mark"},
		{"empty", Limits{}, nil, "is empty"},
		{"no tar at all", Limits{}, bytes.Repeat([]byte("hello world "), 1000), "no valid tar header"},
		{
			"cut off gzip",
			Limits{},
			func() []byte { b := gz(t, makeTar(t, several(50)...)); return b[:len(b)-9] }(),
			"ends in the middle",
		},
		{
			"gzip with a wrong checksum",
			Limits{},
			func() []byte { b := gz(t, makeTar(t, several(50)...)); b[len(b)-8] ^= 1; return b }(),
			"gzip",
		},
		{"lz4", Limits{}, []byte{0x04, 0x22, 0x4d, 0x18, 0, 0, 0, 0}, "lz4"},
		{"zstd with a window of 2 GiB", Limits{}, []byte{0x28, 0xb5, 0x2f, 0xfd, 0x00, 21 << 3, 0, 0, 0, 0, 0}, "zstd"},
		{"a chain of headers without an entry", tight, nil, "unpacked"},
	} {
		t.Run(tc.name, func(t *testing.T) {
			b, store := testBuilder(t, tc.limits)
			var r io.Reader = bytes.NewReader(tc.arch)
			if tc.arch == nil && tc.says == "unpacked" {
				r = bombOfHeaders(t)
			}
			_, err := b.Rootfs(t.Context(), r, ArchiveOptions{Name: "evil.tar"})
			if !errors.Is(err, errdefs.Invalid) || !strings.Contains(fmt.Sprint(err), tc.says) {
				t.Errorf("got %v, want Invalid and %q", err, tc.says)
			}
			if !strings.HasPrefix(fmt.Sprint(err), "evil.tar: ") || !strings.Contains(fmt.Sprint(err), "Nothing imported") {
				t.Errorf("%q does not name the archive and what became of it", err)
			}
			noTemps(t, b)
			for d := range store.All(t.Context()) {
				t.Errorf("left a blob %s", d)
			}
		})
	}
}

// bombOfHeaders is a gzip of extended headers that never come to an entry, longer unpacked than any limit here.
func bombOfHeaders(t *testing.T) io.Reader {
	t.Helper()
	rec := fmt.Sprintf("%d comment=%s\n", 900_000, strings.Repeat("x", 900_000-len("900000 comment=\n")))
	one := gz(t, append(rawHeader("x", tar.TypeXHeader, int64(len(rec)), nil), pad([]byte(rec))...))
	return &endless{b: one}
}

type endless struct {
	b  []byte
	at int
}

func (e *endless) Read(p []byte) (int, error) {
	n := copy(p, e.b[e.at:])
	if e.at += n; e.at == len(e.b) {
		e.at = 0
	}
	return n, nil
}

func TestABombIsStoppedByItsRatio(t *testing.T) {
	b, store := testBuilder(t, Limits{Ratio: 100})
	one := zst(t, make([]byte, 64<<20))
	head := zst(t, rawHeader("zeros", tar.TypeReg, 8<<30-1, nil))
	_, err := b.Rootfs(t.Context(), io.MultiReader(bytes.NewReader(head), &endless{b: one}), ArchiveOptions{Name: "bomb.tar.zst"})
	if !errors.Is(err, errdefs.Invalid) || !strings.Contains(fmt.Sprint(err), "100 times its compressed size") {
		t.Errorf("got %v", err)
	}
	noTemps(t, b)
	for d := range store.All(t.Context()) {
		t.Errorf("left a blob %s", d)
	}
}

func TestASparseBombCostsNoSpaceAndMeetsTheLimit(t *testing.T) {
	b, _ := testBuilder(t, Limits{Bytes: 1 << 30})
	// GNU sparse 1.0: a terabyte of nothing in two blocks.
	rec := ""
	for _, kv := range []string{"GNU.sparse.major=1", "GNU.sparse.minor=0", "GNU.sparse.name=f", "GNU.sparse.realsize=1099511627776"} {
		rec += fmt.Sprintf("%d %s\n", len(kv)+4, kv)
	}
	arch := append(rawHeader("x", tar.TypeXHeader, int64(len(rec)), nil), pad([]byte(rec))...)
	arch = append(arch, rawHeader("f", tar.TypeReg, 512, nil)...)
	arch = append(arch, pad([]byte("0\n"))...)
	_, err := b.Rootfs(t.Context(), bytes.NewReader(append(arch, tarEnd...)), ArchiveOptions{Name: "evil.tar"})
	if !errors.Is(err, errdefs.Invalid) || !strings.Contains(fmt.Sprint(err), "more than 1.0 GiB of content") {
		t.Errorf("got %v", err)
	}
	noTemps(t, b)
}

func TestZerosTakeNoSpace(t *testing.T) {
	b, store := testBuilder(t, Limits{})
	res, err := b.Rootfs(t.Context(), bytes.NewReader(makeTar(t, ent{name: "z", body: strings.Repeat("\x00", 20<<20)})), ArchiveOptions{})
	must(t, err)
	m, err := ReadManifest(t.Context(), store, res.Layers[0].Digest)
	must(t, err)
	if m.Bytes != 20<<20 || m.DataBytes > 1<<20 || m.MetaBytes > 1<<20 {
		t.Errorf("manifest %+v", m)
	}
}

func TestMemoryDoesNotGrowWithTheArchive(t *testing.T) {
	b, _ := testBuilder(t, Limits{})
	var before, after runtime.MemStats
	runtime.GC()
	runtime.ReadMemStats(&before)
	// 200 MiB that do not compress to nothing, packed as they are read.
	pr, pw := io.Pipe()
	go func() {
		w := tar.NewWriter(pw)
		body := bytes.Repeat([]byte("0123456789abcdef"), 64<<10)
		for i := range 200 {
			_ = w.WriteHeader(&tar.Header{Name: fmt.Sprint(i), Size: int64(len(body)), Mode: 0o644})
			_, _ = w.Write(body)
		}
		_ = pw.CloseWithError(errors.Join(w.Close(), io.EOF))
	}()
	_, err := b.Rootfs(t.Context(), pr, ArchiveOptions{})
	if err != nil && !errors.Is(err, io.EOF) {
		t.Fatal(err)
	}
	runtime.ReadMemStats(&after)
	if grown := int64(after.Sys) - int64(before.Sys); grown > 100<<20 {
		t.Errorf("took %d MiB for an archive of 200 MiB", grown>>20)
	}
}

func TestOnlySoManyImportsHaveTreesInMemoryAtOnce(t *testing.T) {
	b, _ := testBuilder(t, Limits{Entries: 100 * smallShare})
	files := func(n int) io.Reader {
		var ents []ent
		for i := range n {
			ents = append(ents, ent{name: fmt.Sprint(i)})
		}
		return bytes.NewReader(makeTar(t, ents...))
	}
	for range largeAtOnce {
		b.large <- struct{}{}
	}
	waits, done := make(chan struct{}), make(chan error, 1)
	var once sync.Once
	go func() {
		_, err := b.Rootfs(t.Context(), files(101), ArchiveOptions{Report: func(p Progress) {
			if p.Detail == "waiting for other imports" {
				once.Do(func() { close(waits) })
			}
		}})
		done <- err
	}()
	select {
	case <-waits:
	case err := <-done:
		t.Fatalf("a large import beside %d others did not wait: %v", largeAtOnce, err)
	}
	_, err := b.Rootfs(t.Context(), files(100), ArchiveOptions{})
	must(t, err) // a small one goes on
	for range largeAtOnce {
		<-b.large
	}
	must(t, <-done)
	if len(b.large) != 0 || len(b.turns) != 0 {
		t.Errorf("%d large and %d other turns are not given back", len(b.large), len(b.turns))
	}
	for range importsAtOnce {
		b.turns <- struct{}{}
	}
	ctx, stop := context.WithTimeout(t.Context(), 50*time.Millisecond)
	defer stop()
	if _, err := b.Rootfs(ctx, files(1), ArchiveOptions{}); !errors.Is(err, context.DeadlineExceeded) {
		t.Errorf("one more than may run: %v", err)
	}
}

func TestTheLastOfEqualNamesWins(t *testing.T) {
	needRoot(t)
	dir, link, sym := byte(tar.TypeDir), byte(tar.TypeLink), byte(tar.TypeSymlink)
	b, store := testBuilder(t, Limits{})
	res, err := b.Rootfs(t.Context(), bytes.NewReader(makeTar(t,
		ent{name: "f", body: "first"}, ent{name: "keeps", typ: link, link: "f"}, ent{name: "f", body: "second"},
		ent{name: "d/", typ: dir, mode: 0o700}, ent{name: "d/in"}, ent{name: "./d", typ: dir, mode: 0o711},
		ent{name: "s", typ: sym, link: "/"}, ent{name: "s/", typ: dir}, ent{name: "s/in", body: "inside"},
		ent{name: "gone/", typ: dir}, ent{name: "gone/in"}, ent{name: "gone", body: "file"},
		ent{name: "implied/in"}, ent{name: "implied", typ: dir, mode: 0o750},
		ent{name: "null", typ: tar.TypeChar, major: 1, minor: 3}, ent{name: "null2", typ: link, link: "null"},
	)), ArchiveOptions{})
	must(t, err)
	got := survey(t, mountLayer(t, store, res.Layers[0].Digest))
	for name, want := range map[string]string{
		"f": "100644 1 6", "keeps": "100644 1 5", "d": "40711 2 0", "d/in": "100644 1 0", "s": "40755 2 0", "s/in": "100644 1 6",
		"gone": "100644 1 4", "implied": "40750 2 0", "null": "20644 2 0", "null2": "20644 2 0",
	} {
		f := got[name]
		if s := fmt.Sprintf("%s %d %d", f.Mode, f.Nlink, f.Size); s != want {
			t.Errorf("%s is %q, want %q", name, s, want)
		}
	}
	if got["null2"].Rdev != 1<<8|3 || got["null2"].Same != "null" {
		t.Errorf("null2 %+v", got["null2"])
	}
}

func TestAttributesThatSpeakToTheHostAreLeftOut(t *testing.T) {
	needRoot(t)
	b, store := testBuilder(t, Limits{})
	okCap := string([]byte{1, 0, 0, 2, 0, 4, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0})
	res, err := b.Rootfs(t.Context(), bytes.NewReader(makeTar(t, ent{name: "f", body: "x", pax: map[string]string{
		xattrRecord + "trusted.overlay.opaque": "y", xattrRecord + "trusted.overlay.redirect": "/etc",
		xattrRecord + "security.selinux": "label", xattrRecord + "security.ima": "x", xattrRecord + xattrCap: okCap,
		xattrRecord + "user.fine": "1", xattrRecord + "user.": "nameless", xattrRecord + xattrACL: "no acl",
		xattrRecord + "system.other": "x", xattrRecord + "nonsense": "x",
	}}, ent{name: "g", body: "x", pax: map[string]string{xattrRecord + xattrCap: okCap[:4] + "garbage"}})), ArchiveOptions{})
	must(t, err)
	got := survey(t, mountLayer(t, store, res.Layers[0].Digest))
	if want := fmt.Sprintf("%s=%x user.fine=31", xattrCap, okCap); got["f"].Xattrs != want {
		t.Errorf("attributes %q, want %q", got["f"].Xattrs, want)
	}
	if got["g"].Xattrs != "" {
		t.Errorf("attributes %q", got["g"].Xattrs)
	}
	if len(res.Notes) != 9 {
		t.Errorf("notes %q", res.Notes)
	}
}

func TestXZ(t *testing.T) {
	if _, err := exec.LookPath("xz"); err != nil {
		t.Skip("needs xz")
	}
	plain := bytes.Repeat([]byte("some text to compress "), 100_000)
	xz := func(args ...string) []byte {
		cmd := exec.CommandContext(t.Context(), "xz", append(args, "-c")...)
		cmd.Stdin = bytes.NewReader(plain)
		out, err := cmd.Output()
		must(t, err)
		return out
	}
	one := xz()
	for _, tc := range []struct {
		name   string
		packed []byte
		times  int
		err    error
	}{
		{"one block", one, 1, nil},
		{"many blocks", xz("--block-size=100000"), 1, nil},
		{"crc32", xz("--check=crc32"), 1, nil},
		{"no check", xz("--check=none"), 1, nil},
		{"sha256", xz("--check=sha256", "--block-size=300000"), 1, nil},
		{"sizes in the block headers", xz("-T2", "--block-size=100000"), 1, nil},
		{"what does not compress", xz("-0", "--block-size=70000"), 1, nil},
		{"two streams", append(bytes.Clone(one), one...), 2, nil},
		{"streams with padding between", append(append(bytes.Clone(one), make([]byte, 8)...), one...), 2, nil},
		{"a dictionary of 256 MiB", xz("--lzma2=dict=256MiB"), 0, errWindow},
		{"a dictionary of 256 MiB in a later stream", append(bytes.Clone(one), xz("--lzma2=dict=256MiB")...), 1, errWindow},
	} {
		t.Run(tc.name, func(t *testing.T) {
			for _, r := range []io.Reader{bytes.NewReader(tc.packed), iotest.HalfReader(bytes.NewReader(tc.packed))} {
				out, name, closer, err := decompress(r)
				if err == nil {
					var got []byte
					got, err = io.ReadAll(out)
					closer()
					if err == nil && (name != "xz" || !bytes.Equal(got, bytes.Repeat(plain, tc.times))) {
						t.Errorf("%s: %d bytes", name, len(got))
					}
				}
				if !errors.Is(err, tc.err) {
					t.Errorf("got %v, want %v", err, tc.err)
				}
			}
		})
	}
}

func TestACancelledImportLeavesNothing(t *testing.T) {
	b, store := testBuilder(t, Limits{})
	gone := errors.New("gone away")
	ctx, cancel := context.WithCancelCause(t.Context())
	// It would go on for gigabytes.
	r := io.MultiReader(bytes.NewReader(rawHeader("f", tar.TypeReg, 8<<30-1, nil)), readerFunc(func(p []byte) (int, error) {
		cancel(gone)
		return copy(p, "not only zeros"), nil
	}))
	if _, err := b.Rootfs(ctx, r, ArchiveOptions{}); !errors.Is(err, gone) {
		t.Errorf("got %v, want %v", err, gone)
	}
	noTemps(t, b)
	for d := range store.All(t.Context()) {
		t.Errorf("left a blob %s", d)
	}
}

type readerFunc func(p []byte) (int, error)

func (f readerFunc) Read(p []byte) (int, error) { return f(p) }

func TestASourceThatFailsIsNoBadArchive(t *testing.T) {
	b, _ := testBuilder(t, Limits{})
	broken := errors.New("the line broke")
	arch := gz(t, makeTar(t, ent{name: "f", body: strings.Repeat("x", 1<<20)}))
	_, err := b.Rootfs(t.Context(), io.MultiReader(bytes.NewReader(arch[:100]), iotest.ErrReader(broken)), ArchiveOptions{})
	if !errors.Is(err, broken) || errors.Is(err, errdefs.Invalid) {
		t.Errorf("got %v", err)
	}
	noTemps(t, b)
}

func TestAnImportThatDoesNotFitIsRefused(t *testing.T) {
	b, store := testBuilder(t, Limits{Reserve: 1 << 60})
	_, err := b.Rootfs(t.Context(), bytes.NewReader(makeTar(t, ent{name: "f"})), ArchiveOptions{Size: 1 << 30})
	if !errors.Is(err, errdefs.Exhausted) || !strings.Contains(fmt.Sprint(err), b.dir+" has ") ||
		!strings.Contains(fmt.Sprint(err), "sandsea image rm") {
		t.Errorf("got %v", err)
	}
	for d := range store.All(t.Context()) {
		t.Errorf("left a blob %s", d)
	}
}

func TestAFullDiskIsExhausted(t *testing.T) {
	needRoot(t)
	if os.Getenv("BUILD_TEST_FULL") == "" {
		// In a mount namespace of its own, so that nothing can be left behind.
		cmd := exec.CommandContext(t.Context(), "unshare", "-m", os.Args[0], "-test.run=^TestAFullDiskIsExhausted$")
		cmd.Env = append(os.Environ(), "BUILD_TEST_FULL="+t.TempDir())
		out, err := cmd.CombinedOutput()
		if err != nil {
			t.Fatalf("%v\n%s", err, out)
		}
		return
	}
	dir := os.Getenv("BUILD_TEST_FULL")
	run(t, "mount", "-t", "tmpfs", "-o", "size=4m", "none", dir)
	b, store := builderAt(t, dir, Limits{Reserve: 1})
	r := noise(8 << 20)
	_, err := b.Rootfs(t.Context(), bytes.NewReader(makeTar(t, ent{name: "f", body: r})), ArchiveOptions{})
	if !errors.Is(err, errdefs.Exhausted) || !strings.Contains(fmt.Sprint(err), dir) {
		t.Errorf("got %v", err)
	}
	noTemps(t, b)
	for d := range store.All(t.Context()) {
		t.Errorf("left a blob %s", d)
	}
	ents, err := os.ReadDir(filepath.Join(dir, "tmp"))
	must(t, err)
	if len(ents) != 0 {
		t.Errorf("left %v", ents)
	}
}

// noise makes n bytes that are no zeros.
func noise(n int) string {
	b := make([]byte, n)
	x := uint32(1)
	for i := range b {
		x = x*1664525 + 1013904223
		b[i] = byte(x>>24) | 1
	}
	return string(b)
}
