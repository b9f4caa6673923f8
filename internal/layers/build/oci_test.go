package build

import (
	"archive/tar"
	"bytes"
	"compress/gzip"
	"crypto/sha256"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"maps"
	"os"
	"path/filepath"
	"runtime"
	"slices"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/klauspost/compress/zstd"

	"github.com/sandsea/sandsea/api/errdefs"
	"github.com/sandsea/sandsea/internal/image"
	"github.com/sandsea/sandsea/internal/testkit/require"
)

// ent is an entry of a tar in tests.
type ent struct {
	name  string
	typ   byte
	body  string
	link  string
	mode  int64
	uid   int
	major int64
	minor int64
	pax   map[string]string
	mtime int64
}

func makeTar(t *testing.T, ents ...ent) []byte {
	t.Helper()
	var buf bytes.Buffer
	w := tar.NewWriter(&buf)
	for _, e := range ents {
		typ := e.typ
		if typ == 0 {
			typ = tar.TypeReg
		}
		mode := e.mode
		if mode == 0 {
			mode = map[byte]int64{tar.TypeDir: 0o755, tar.TypeSymlink: 0o777}[typ]
			if mode == 0 {
				mode = 0o644
			}
		}
		must(t, w.WriteHeader(&tar.Header{
			Name: e.name, Typeflag: typ, Size: int64(len(e.body)), Linkname: e.link, Mode: mode, Uid: e.uid, Gid: e.uid,
			Devmajor: e.major, Devminor: e.minor, PAXRecords: e.pax, ModTime: time.Unix(1_600_000_000+e.mtime, 0),
			Format: tar.FormatPAX,
		}))
		_, err := io.WriteString(w, e.body)
		must(t, err)
	}
	must(t, w.Close())
	return buf.Bytes()
}

func digestOf(b []byte) string { return fmt.Sprintf("sha256:%x", sha256.Sum256(b)) }

func gz(t *testing.T, b []byte) []byte {
	t.Helper()
	var buf bytes.Buffer
	w := gzip.NewWriter(&buf)
	_, err := w.Write(b)
	must(t, errors.Join(err, w.Close()))
	return buf.Bytes()
}

func zst(t *testing.T, b []byte) []byte {
	t.Helper()
	var buf bytes.Buffer
	w, err := zstd.NewWriter(&buf)
	must(t, err)
	_, err = w.Write(b)
	must(t, errors.Join(err, w.Close()))
	return buf.Bytes()
}

// ociImageSpec makes an OCI layout.
type ociImageSpec struct {
	layers  [][]byte // plain tars
	pack    func(*testing.T, []byte) []byte
	media   string
	config  map[string]any
	arch    string
	change  func(files map[string][]byte) // damages it
	indexed bool                          // an index by platform between index.json and the manifest
	names   []string
}

func layoutTar(t *testing.T, s ociImageSpec) []byte {
	t.Helper()
	files := map[string][]byte{"oci-layout": []byte(`{"imageLayoutVersion":"1.0.0"}`)}
	blob := func(b []byte, media string) map[string]any {
		files["blobs/sha256/"+digestOf(b)[7:]] = b
		return map[string]any{"mediaType": media, "digest": digestOf(b), "size": len(b)}
	}
	doc := func(v any) []byte {
		b, err := json.Marshal(v)
		must(t, err)
		return b
	}
	if s.pack == nil {
		s.pack = gz
	}
	if s.media == "" {
		s.media = "application/vnd.oci.image.layer.v1.tar+gzip"
	}
	if s.arch == "" {
		s.arch = runtime.GOARCH
	}
	layers, diffs := []any{}, []any{}
	for _, l := range s.layers {
		layers = append(layers, blob(s.pack(t, l), s.media))
		diffs = append(diffs, digestOf(l))
	}
	config := blob(doc(map[string]any{
		"architecture": s.arch, "os": "linux", "config": s.config,
		"rootfs": map[string]any{"type": "layers", "diff_ids": diffs},
	}), "application/vnd.oci.image.config.v1+json")
	man := blob(doc(map[string]any{
		"schemaVersion": 2, "mediaType": "application/vnd.oci.image.manifest.v1+json", "config": config, "layers": layers,
	}), "application/vnd.oci.image.manifest.v1+json")
	if s.indexed {
		man["platform"] = map[string]any{"os": "linux", "architecture": s.arch}
		other := maps.Clone(man)
		other["digest"] = digestOf([]byte("other"))
		other["platform"] = map[string]any{"os": "plan9", "architecture": "mips"}
		man = blob(doc(map[string]any{
			"schemaVersion": 2, "manifests": []any{other, man},
		}), "application/vnd.oci.image.index.v1+json")
	}
	var heads []any
	for _, n := range s.names {
		m := maps.Clone(man)
		m["annotations"] = map[string]any{refName: n}
		heads = append(heads, m)
	}
	if len(heads) == 0 {
		heads = append(heads, man)
	}
	files["index.json"] = doc(map[string]any{"schemaVersion": 2, "manifests": heads})
	if s.change != nil {
		s.change(files)
	}
	var ents []ent
	// Blobs before the index: no order is promised.
	for _, name := range slices.Sorted(maps.Keys(files)) {
		ents = append(ents, ent{name: name, body: string(files[name])})
	}
	return makeTar(t, ents...)
}

// reference applies the layers one after the other in a directory, as an image is meant, by the plainest code that does it.
func reference(t *testing.T, layers ...[]ent) string {
	t.Helper()
	root := filepath.Join(t.TempDir(), "ref")
	must(t, os.Mkdir(root, 0o755))
	p := func(rel string) string { return filepath.Join(root, rel) }
	for _, ents := range layers {
		for _, e := range ents { // whiteouts speak of the layers below: first
			base := filepath.Base(e.name)
			dir := filepath.Dir(e.name)
			if base == whOpaque {
				kids, err := os.ReadDir(p(dir))
				if err != nil {
					continue
				}
				for _, k := range kids {
					must(t, os.RemoveAll(p(filepath.Join(dir, k.Name()))))
				}
			} else if rest, ok := strings.CutPrefix(base, wh); ok {
				must(t, os.RemoveAll(p(filepath.Join(dir, rest))))
			}
		}
		for _, e := range ents {
			if strings.HasPrefix(filepath.Base(e.name), wh) {
				continue
			}
			path := p(e.name)
			if e.typ != tar.TypeDir {
				must(t, os.RemoveAll(path))
			}
			must(t, os.MkdirAll(filepath.Dir(path), 0o755))
			switch e.typ {
			case tar.TypeDir:
				if st, err := os.Lstat(path); err != nil || !st.IsDir() {
					must(t, os.RemoveAll(path))
					must(t, os.Mkdir(path, 0o755))
				}
			case tar.TypeSymlink:
				must(t, os.Symlink(e.link, path))
			case tar.TypeLink:
				must(t, os.Link(p(e.link), path))
				continue
			case tar.TypeChar:
				must(t, syscall.Mknod(path, syscall.S_IFCHR|0o644, int(e.major<<8|e.minor)))
			case tar.TypeFifo:
				must(t, syscall.Mkfifo(path, 0o644))
			default:
				must(t, os.WriteFile(path, []byte(e.body), 0o600))
			}
			must(t, os.Lchown(path, e.uid, e.uid))
			if e.typ != tar.TypeSymlink {
				mode := e.mode
				if mode == 0 {
					mode = 0o644
					if e.typ == tar.TypeDir {
						mode = 0o755
					}
				}
				must(t, syscall.Chmod(path, uint32(mode)))
			}
		}
	}
	return root
}

// overlaySurvey stacks directories, lowest first, and gives what the result looks like. Layers that overlayfs refuses are
// a failure; only a kernel without it is none.
func overlaySurvey(t *testing.T, lowers []string) map[string]facts {
	t.Helper()
	slices.Reverse(lowers)
	dir := t.TempDir()
	err := syscall.Mount("overlay", dir, "overlay", syscall.MS_RDONLY, "lowerdir="+strings.Join(lowers, ":"))
	if errors.Is(err, syscall.ENODEV) {
		require.That(t, "overlay", err)
	}
	if err != nil {
		t.Fatalf("overlayfs refuses these layers: %v", err)
	}
	defer func() {
		if err := syscall.Unmount(dir, syscall.MNT_DETACH); err != nil {
			t.Error(err)
		}
	}()
	return survey(t, dir)
}

// plainFacts keeps what the reference promises: no times, which it does not set.
func plainFacts(m map[string]facts) map[string]facts {
	out := map[string]facts{}
	for k, f := range m {
		f.Mtime = ""
		if strings.HasPrefix(f.Mode, "4") {
			f.Nlink = 0 // overlayfs counts links of directories as 1
		}
		out[k] = f
	}
	return out
}

func odd(layer int) []ent {
	dir, link, sym := byte(tar.TypeDir), byte(tar.TypeLink), byte(tar.TypeSymlink)
	if layer == 0 {
		return []ent{
			{name: "etc/", typ: dir, mode: 0o751, uid: 5},
			{name: "etc/keep", body: "kept"},
			{name: "etc/gone", body: "gone"},
			{name: "etc/again", body: "old"},
			{name: "etc/changed", body: "old", mode: 0o600},
			{name: "a/", typ: dir},
			{name: "a/b/", typ: dir, mode: 0o700, uid: 7},
			{name: "a/b/old", body: "old"},
			{name: "a/b/sub/", typ: dir},
			{name: "a/b/sub/deep", body: "deep"},
			{name: "opaque/", typ: dir},
			{name: "opaque/hidden", body: "hidden"},
			{name: "opaque/dir/", typ: dir},
			{name: "opaque/dir/hidden", body: "hidden"},
			{name: "remade/", typ: dir},
			{name: "remade/old", body: "old"},
			{name: "became-file/", typ: dir},
			{name: "became-file/x", body: "x"},
			{name: "became-dir", body: "file"},
			{name: "linked", body: strings.Repeat("linked ", 1000), mode: 0o4755},
			{name: "linked2", typ: link, link: "linked"},
			{name: "usr/lib/", typ: dir},
			{name: "lib", typ: sym, link: "usr/lib"},
			{name: "dev-gone", typ: tar.TypeChar, major: 1, minor: 3},
			{name: "link-gone", body: "1"},
		}
	}
	return []ent{
		{name: "etc/.wh.gone"},
		{name: "etc/.wh.again"},
		{name: "etc/again", body: "new"},
		{name: "etc/", typ: dir, mode: 0o711, uid: 6},
		{name: "etc/changed", body: "changed", mode: 0o640},
		{name: "a/b/.wh.old"}, // neither a nor a/b is named: they keep what they have
		{name: "a/b/new", body: "new"},
		{name: "opaque/", typ: dir},
		{name: "opaque/shown", body: "shown"},
		{name: "opaque/.wh..wh..opq"},
		{name: ".wh.remade"},
		{name: "remade/", typ: dir, mode: 0o700},
		{name: "remade/new", body: "new"},
		{name: ".wh.became-file"},
		{name: "became-file", body: "file now"},
		{name: ".wh.became-dir"},
		{name: "became-dir/", typ: dir},
		{name: "became-dir/in", body: "in"},
		{name: ".wh.dev-gone", typ: tar.TypeChar}, // by its name, whatever it is
		{name: ".wh.link-gone", typ: link, link: "etc/.wh.gone"},
		{name: ".wh..wh.plnk/", typ: dir}, // AUFS's own
		{name: ".wh.never-there"},
	}
}

func TestOCILayersStackLikeTheImageTheyAre(t *testing.T) {
	needRoot(t)
	l0, l1 := odd(0), odd(1)
	for _, tc := range []struct {
		name    string
		pack    func(*testing.T, []byte) []byte
		media   string
		indexed bool
	}{
		{"gzip", gz, "application/vnd.oci.image.layer.v1.tar+gzip", false},
		{"zstd", zst, "application/vnd.oci.image.layer.v1.tar+zstd", true},
		{"plain", func(_ *testing.T, b []byte) []byte { return b }, "application/vnd.oci.image.layer.v1.tar", false},
		{"docker's media type", gz, "application/vnd.docker.image.rootfs.diff.tar.gzip", false},
		{"zstd under a type that says gzip", zst, "application/vnd.docker.image.rootfs.diff.tar.gzip", true},
	} {
		t.Run(tc.name, func(t *testing.T) {
			b, store := testBuilder(t, Limits{})
			arch := layoutTar(t, ociImageSpec{
				layers: [][]byte{makeTar(t, l0...), makeTar(t, l1...)}, pack: tc.pack, media: tc.media, indexed: tc.indexed,
				config: map[string]any{
					"User": "1000:1000", "WorkingDir": "/work", "Env": []string{"A=1"}, "Entrypoint": []string{"/e"}, "Cmd": []string{"c"},
				},
				names: []string{"demo:1"},
			})
			res, err := b.OCI(t.Context(), bytes.NewReader(arch), ArchiveOptions{Name: "demo.tar"})
			must(t, err)
			if res.Name != "demo:1" || len(res.Layers) != 2 {
				t.Fatalf("result %+v", res)
			}
			want := image.Config{
				User: "1000:1000", Workdir: "/work", Env: []string{defaultConfig().Env[0], "A=1"},
				Entrypoint: []string{"/e"}, Cmd: []string{"c"},
			}
			if fmt.Sprint(res.Config) != fmt.Sprint(want) {
				t.Errorf("config %+v, want %+v", res.Config, want)
			}
			noTemps(t, b)
			lowers := []string{
				mountLayer(t, store, res.Layers[0].Digest), mountLayer(t, store, res.Layers[1].Digest),
			}
			got := overlaySurvey(t, lowers)
			sameTree(t, plainFacts(got), plainFacts(survey(t, reference(t, l0, l1))))
		})
	}
}

func TestALayerWithAnOpaqueRootHidesAllBelowIt(t *testing.T) {
	needRoot(t)
	dir := byte(tar.TypeDir)
	layers := [][]ent{
		{
			{name: "file", body: "low"},
			{name: "dir/", typ: dir, mode: 0o750},
			{name: "dir/in", body: "low"},
			{name: "remade/", typ: dir},
			{name: "remade/in", body: "low"},
			{name: "changed", body: "low"},
		},
		{{name: ".wh.file"}, {name: "middle", body: "middle"}},
		{
			{name: ".wh..wh..opq"},
			{name: "remade/", typ: dir, mode: 0o700},
			{name: "remade/new", body: "new"},
			{name: "changed/", typ: dir},
			{name: "changed/in", body: "in"},
		},
		{{name: "above", body: "above"}, {name: "dir/above", body: "above"}},
	}
	tars := make([][]byte, len(layers))
	for i, l := range layers {
		tars[i] = makeTar(t, l...)
	}
	b, store := testBuilder(t, Limits{})
	res, err := b.OCI(t.Context(), bytes.NewReader(layoutTar(t, ociImageSpec{layers: tars})), ArchiveOptions{})
	must(t, err)
	var lowers []string
	for _, l := range res.Layers {
		lowers = append(lowers, mountLayer(t, store, l.Digest))
	}
	sameTree(t, plainFacts(overlaySurvey(t, lowers)), plainFacts(survey(t, reference(t, layers...))))
}

func TestAHardLinkToALowerLayerIsACopyThatIsLinked(t *testing.T) {
	needRoot(t)
	b, store := testBuilder(t, Limits{})
	body := strings.Repeat("x", 70_000) + strings.Repeat("\x00", 200_000) + "end"
	l0 := makeTar(t, ent{name: "bin/", typ: tar.TypeDir, mode: 0o711, uid: 3}, ent{name: "bin/a", body: body, mode: 0o4711, uid: 9})
	l1 := makeTar(t, ent{name: "b", typ: tar.TypeLink, link: "bin/a"})
	res, err := b.OCI(t.Context(), bytes.NewReader(layoutTar(t, ociImageSpec{layers: [][]byte{l0, l1}})), ArchiveOptions{})
	must(t, err)
	got := survey(t, mountLayer(t, store, res.Layers[1].Digest))
	a, link, bin := got["bin/a"], got["b"], got["bin"]
	if a.Nlink != 2 || link.Same != "b" || a.Same != "b" || a.Mode != "104711" || a.UID != 9 || a.Size != int64(len(body)) ||
		a.Sum != digestOf([]byte(body))[7:] {
		t.Errorf("bin/a %+v\nb %+v", a, link)
	}
	if bin.Mode != "40711" || bin.UID != 3 {
		t.Errorf("bin %+v: a directory that the layer does not name keeps its attributes", bin)
	}
}

func TestALayerMayWriteThroughALinkBelowIt(t *testing.T) {
	needRoot(t)
	b, store := testBuilder(t, Limits{})
	l0 := makeTar(t, ent{name: "usr/lib/", typ: tar.TypeDir}, ent{name: "lib", typ: tar.TypeSymlink, link: "/usr/./lib"},
		ent{name: "out", typ: tar.TypeSymlink, link: "../../../../usr"})
	l1 := makeTar(t, ent{name: "lib/x", body: "x"}, ent{name: "out/lib/y", body: "y"})
	res, err := b.OCI(t.Context(), bytes.NewReader(layoutTar(t, ociImageSpec{layers: [][]byte{l0, l1}})), ArchiveOptions{})
	must(t, err)
	got := survey(t, mountLayer(t, store, res.Layers[1].Digest))
	if want := []string{".", "usr", "usr/lib", "usr/lib/x", "usr/lib/y"}; !slices.Equal(slices.Sorted(maps.Keys(got)), want) {
		t.Errorf("got %v, want %v", slices.Sorted(maps.Keys(got)), want)
	}
}

func TestDockerSaveArchives(t *testing.T) {
	b, _ := testBuilder(t, Limits{})
	l := makeTar(t, ent{name: "f", body: "f"})
	config, err := json.Marshal(map[string]any{
		"architecture": runtime.GOARCH, "os": "linux", "config": map[string]any{"Cmd": []string{"/f"}},
		"rootfs": map[string]any{"type": "layers", "diff_ids": []string{digestOf(l)}},
	})
	must(t, err)
	name := digestOf(config)[7:] + ".json"
	arch := makeTar(t, ent{name: name, body: string(config)}, ent{name: "aa/layer.tar", body: string(l)},
		ent{name: "manifest.json", body: fmt.Sprintf(`[{"Config":%q,"RepoTags":["demo:2"],"Layers":["aa/layer.tar"]}]`, name)})
	for _, r := range []io.Reader{bytes.NewReader(arch), io.MultiReader(bytes.NewReader(arch)), bytes.NewReader(gz(t, arch))} {
		res, err := b.OCI(t.Context(), r, ArchiveOptions{Reference: "demo:2"})
		must(t, err)
		if res.Name != "demo:2" || len(res.Layers) != 1 || !slices.Equal(res.Config.Cmd, []string{"/f"}) {
			t.Errorf("result %+v", res)
		}
	}
	noTemps(t, b)
}

func TestBadOCIArchives(t *testing.T) {
	good := makeTar(t, ent{name: "f", body: "f"})
	many := make([][]byte, 65)
	for i := range many {
		many[i] = good
	}
	// damage changes the blob of the given kind, found by what it contains.
	damage := func(has string, change func([]byte) []byte) func(map[string][]byte) {
		return func(files map[string][]byte) {
			for name, b := range files {
				if strings.HasPrefix(name, "blobs/") && bytes.Contains(b, []byte(has)) {
					files[name] = change(bytes.Clone(b))
				}
			}
		}
	}
	for _, tc := range []struct {
		name string
		spec ociImageSpec
		ref  string
		kind errdefs.Kind
		says string
	}{
		{
			"no index",
			ociImageSpec{layers: [][]byte{good}, change: func(f map[string][]byte) { delete(f, "index.json") }},
			"", errdefs.Invalid,
			"no index.json",
		},
		{
			"an index that is no JSON",
			ociImageSpec{layers: [][]byte{good}, change: func(f map[string][]byte) { f["index.json"] = []byte("{") }},
			"", errdefs.Invalid,
			"index.json",
		},
		{"an index of 10 MB", ociImageSpec{layers: [][]byte{good}, change: func(f map[string][]byte) {
			f["index.json"] = append(f["index.json"], bytes.Repeat([]byte(" "), 10<<20)...)
		}}, "", errdefs.Invalid, "more than the 4194304"},
		{"an index without images", ociImageSpec{layers: [][]byte{good}, change: func(f map[string][]byte) {
			f["index.json"] = []byte(`{"manifests":[]}`)
		}}, "", errdefs.Invalid, "no image in its index"},
		{"a digest that is a path", ociImageSpec{layers: [][]byte{good}, change: func(f map[string][]byte) {
			f["index.json"] = []byte(`{"manifests":[{"digest":"sha256:../../index.json","size":3}]}`)
		}}, "", errdefs.Invalid, "index.json"},
		{"an index that holds itself", ociImageSpec{layers: [][]byte{good}, change: func(f map[string][]byte) {
			// An index cannot hold its own digest, but many can hold each other.
			inner := []byte(`{"manifests":[]}`)
			for range 20 {
				d := digestOf(inner)
				f["blobs/sha256/"+d[7:]] = inner
				inner = fmt.Appendf(nil, `{"manifests":[{"digest":%q,"size":%d,"platform":{"os":"linux","architecture":%q}}]}`, d, len(inner), runtime.GOARCH)
			}
			f["index.json"] = inner
		}}, "", errdefs.Invalid, "indexes inside each other"},
		{"a manifest that was changed", ociImageSpec{layers: [][]byte{good}, change: damage(`"layers":[`, func(b []byte) []byte {
			return bytes.Replace(b, []byte(`"schemaVersion":2`), []byte(`"schemaVersion":1`), 1)
		})}, "", errdefs.Invalid, "its descriptor says"},
		{"a manifest of another size", ociImageSpec{layers: [][]byte{good}, change: damage(`"layers":[`, func(b []byte) []byte {
			return append(b, ' ')
		})}, "", errdefs.Invalid, "its descriptor says"},
		{"a layer that was changed", ociImageSpec{layers: [][]byte{good}, pack: func(_ *testing.T, b []byte) []byte { return b }, change: damage("ustar", func(b []byte) []byte {
			b[512] = 'g'
			return b
		})}, "", errdefs.Invalid, "says"},
		{"a layer that is missing", ociImageSpec{layers: [][]byte{good}, change: func(f map[string][]byte) {
			for name, b := range f {
				if bytes.HasPrefix(b, []byte{0x1f, 0x8b}) {
					delete(f, name)
				}
			}
		}}, "", errdefs.Invalid, "which the image needs"},
		{"65 layers", ociImageSpec{layers: many}, "", errdefs.Invalid, "65 layers"},
		{"no layers", ociImageSpec{}, "", errdefs.Invalid, "without layers"},
		{
			"a layer that is no file tree",
			ociImageSpec{layers: [][]byte{good}, media: "application/vnd.in-toto+json"},
			"", errdefs.Invalid,
			"no file tree",
		},
		{
			"an encrypted layer",
			ociImageSpec{layers: [][]byte{good}, media: "application/vnd.oci.image.layer.v1.tar+gzip+encrypted"},
			"", errdefs.Invalid,
			"no file tree",
		},
		{
			"another architecture",
			ociImageSpec{layers: [][]byte{good}, arch: "vax"},
			"", errdefs.FailedPrecondition,
			"vax",
		},
		{
			"another architecture in an index",
			ociImageSpec{layers: [][]byte{good}, arch: "vax", indexed: true},
			"", errdefs.FailedPrecondition,
			"plan9/mips",
		},
		{
			"a reference that is not there",
			ociImageSpec{layers: [][]byte{good}, names: []string{"a", "b"}},
			"c", errdefs.NotFound,
			"It has: a, b",
		},
		{
			"several images and no reference",
			ociImageSpec{layers: [][]byte{good}, names: []string{"a", "b"}, change: func(f map[string][]byte) {
				at := bytes.LastIndex(f["index.json"], []byte(`"digest":"sha256:`)) + len(`"digest":"sha256:`)
				copy(f["index.json"][at:], strings.Repeat("0", 64))
			}},
			"", errdefs.Invalid,
			"has 2 images (a, b)",
		},
		{
			"a variable without a name",
			ociImageSpec{layers: [][]byte{good}, config: map[string]any{"Env": []string{"=x"}}},
			"", errdefs.Invalid,
			"variable",
		},
		{
			"a relative working directory",
			ociImageSpec{layers: [][]byte{good}, config: map[string]any{"WorkingDir": "../x"}},
			"", errdefs.Invalid,
			"not absolute",
		},
		{
			"a second layer that is hostile",
			ociImageSpec{layers: [][]byte{good, makeTar(t, ent{name: "../x", body: "x"})}},
			"", errdefs.Invalid,
			`layer 2: entry 1 "../x" leaves the root`,
		},
		{"a layer whose tar is another than the config says", ociImageSpec{layers: [][]byte{good}, change: func(f map[string][]byte) {
			other := gz(t, makeTar(t, ent{name: "g", body: "g"}))
			f["blobs/sha256/"+digestOf(other)[7:]] = other
			for name, b := range f {
				if !bytes.Contains(b, []byte(`"layers":[`)) {
					continue
				}
				var m map[string]any
				must(t, json.Unmarshal(b, &m))
				m["layers"] = []any{map[string]any{"mediaType": "application/vnd.oci.image.layer.v1.tar+gzip", "digest": digestOf(other), "size": len(other)}}
				n, err := json.Marshal(m)
				must(t, err)
				delete(f, name)
				f["blobs/sha256/"+digestOf(n)[7:]] = n
				f["index.json"] = fmt.Appendf(nil, `{"manifests":[{"digest":%q,"size":%d}]}`, digestOf(n), len(n))
				return
			}
		}}, "", errdefs.Invalid, "its config says"},
	} {
		t.Run(tc.name, func(t *testing.T) {
			b, store := testBuilder(t, Limits{})
			_, err := b.OCI(t.Context(), bytes.NewReader(layoutTar(t, tc.spec)), ArchiveOptions{Name: "evil.tar", Reference: tc.ref})
			if !errors.Is(err, tc.kind) || !strings.Contains(fmt.Sprint(err), tc.says) {
				t.Errorf("got %v, want kind %s and %q", err, tc.kind, tc.says)
			}
			noTemps(t, b)
			if _, err := os.Stat(b.notes()); !errors.Is(err, fs.ErrNotExist) {
				t.Errorf("left notes: %v", err)
			}
			for d := range store.All(t.Context()) {
				t.Errorf("left a blob %s", d)
			}
		})
	}
}
