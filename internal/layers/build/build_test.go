package build

import (
	"archive/tar"
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"github.com/sandsea/sandsea/api/errdefs"
	"github.com/sandsea/sandsea/internal/image"
	"github.com/sandsea/sandsea/internal/layers/blob"
	"github.com/sandsea/sandsea/internal/layers/blob/conform"
	"github.com/sandsea/sandsea/internal/layers/blob/mem"
)

func memBuilder(t *testing.T, now func() time.Time) (*Builder, *mem.Store) {
	t.Helper()
	store := &mem.Store{}
	b, err := New(Config{Store: store, Dir: t.TempDir(), Now: now})
	must(t, err)
	return b, store
}

func rootfs(t *testing.T, b *Builder, ents ...ent) Result {
	t.Helper()
	res, err := b.Rootfs(t.Context(), bytes.NewReader(makeTar(t, ents...)), ArchiveOptions{})
	must(t, err)
	return res
}

func TestEqualTreesMakeEqualLayers(t *testing.T) {
	b, store := memBuilder(t, nil)
	ents := []ent{
		{name: "d/", typ: tar.TypeDir},
		{name: "d/a", body: noise(300_000)},
		{name: "d/b", body: "b", pax: map[string]string{xattrRecord + "user.z": "1", xattrRecord + "user.a": "2"}},
		{name: "d/c", typ: tar.TypeLink, link: "d/a"},
	}
	one, two := rootfs(t, b, ents...), rootfs(t, b, ents...)
	if one.Layers[0] != two.Layers[0] {
		t.Errorf("%+v and %+v", one.Layers, two.Layers)
	}
	n := 0
	for range store.All(t.Context()) {
		n++
	}
	if n != 3 {
		t.Errorf("%d blobs, want manifest, metadata and data", n)
	}
	ents[2].body = "B"
	if other := rootfs(t, b, ents...); other.Layers[0].Digest == one.Layers[0].Digest {
		t.Error("another content makes the same layer")
	}
}

func TestTheManifestTellsTheTruth(t *testing.T) {
	b, store := memBuilder(t, nil)
	layer := rootfs(t, b, ent{name: "f", body: noise(700_000)}, ent{name: "g", body: "g"}).Layers[0]
	m, err := ReadManifest(t.Context(), store, layer.Digest)
	must(t, err)
	if m.Files != 2 || m.Bytes != 700_001 || layer.Files != 2 || layer.Bytes != 700_001 {
		t.Errorf("manifest %+v, layer %+v", m, layer)
	}
	data := make([]byte, m.DataBytes)
	if _, err := store.ReadAt(t.Context(), m.Data, data, 0); err != nil && !errors.Is(err, io.EOF) {
		t.Fatal(err)
	}
	i := 0
	for chunk := range slices.Chunk(data, ChunkSize) {
		if want := conform.DigestOf(chunk).Hex(); m.Chunks[i] != want {
			t.Errorf("chunk %d is %s, want %s", i, m.Chunks[i], want)
		}
		i++
	}
	if i != len(m.Chunks) {
		t.Errorf("%d chunks, want %d", len(m.Chunks), i)
	}
	if _, _, err := Files(t.Context(), store, layer.Digest); !errors.Is(err, errdefs.FailedPrecondition) {
		t.Errorf("a store without files gives %v", err)
	}
}

func TestBadManifestsAreDataLoss(t *testing.T) {
	_, store := memBuilder(t, nil)
	good := Manifest{
		Schema: ManifestSchema, Meta: conform.DigestOf([]byte("m")), Data: conform.DigestOf([]byte("d")), MetaBytes: 1, DataBytes: 1,
		ChunkSize: ChunkSize, Chunks: []string{strings.Repeat("a", 64)},
	}
	put := func(b []byte) image.Digest {
		d := conform.DigestOf(b)
		must(t, store.Put(t.Context(), d, bytes.NewReader(b)))
		return d
	}
	enc := func(change func(*Manifest)) []byte {
		m := good
		change(&m)
		b, err := json.Marshal(m)
		must(t, err)
		return b
	}
	if _, err := ReadManifest(t.Context(), store, put(enc(func(*Manifest) {}))); err != nil {
		t.Fatal(err)
	}
	later := bytes.Replace(enc(func(*Manifest) {}), []byte(`"schema"`), []byte(`"later":1,"schema"`), 1)
	if _, err := ReadManifest(t.Context(), store, put(later)); err != nil {
		t.Errorf("a field of a later version: %v", err)
	}
	for name, b := range map[string][]byte{
		"no JSON": []byte("{"), "another schema": enc(func(m *Manifest) { m.Schema = "sandsea.layer/2" }),
		"a bad digest":        enc(func(m *Manifest) { m.Meta = "sha256:../x" }),
		"a negative size":     enc(func(m *Manifest) { m.DataBytes = -1 }),
		"no metadata":         enc(func(m *Manifest) { m.MetaBytes = 0 }),
		"another chunk size":  enc(func(m *Manifest) { m.ChunkSize = 1 }),
		"too many chunks":     enc(func(m *Manifest) { m.Chunks = append(m.Chunks, m.Chunks[0]) }),
		"too few chunks":      enc(func(m *Manifest) { m.DataBytes = ChunkSize + 1 }),
		"a bad chunk":         enc(func(m *Manifest) { m.Chunks = []string{strings.Repeat("z", 64)} }),
		"a chunk that is cut": enc(func(m *Manifest) { m.Chunks = []string{"aa"} }),
	} {
		if _, err := ReadManifest(t.Context(), store, put(b)); !errors.Is(err, errdefs.DataLoss) {
			t.Errorf("%s: got %v", name, err)
		}
	}
	if _, err := ReadManifest(t.Context(), store, conform.DigestOf([]byte("none"))); !errors.Is(err, errdefs.NotFound) {
		t.Errorf("none: got %v", err)
	}
}

func TestFilesNoticesABlobOfAnotherSize(t *testing.T) {
	b, store := testBuilder(t, Limits{})
	d := rootfs(t, b, ent{name: "f", body: "x"}).Layers[0].Digest
	_, data, err := Files(t.Context(), store, d)
	must(t, err)
	must(t, os.Truncate(data, 1))
	if _, _, err := Files(t.Context(), store, d); !errors.Is(err, errdefs.DataLoss) {
		t.Errorf("got %v", err)
	}
}

func TestTheCollectorKeepsWhatIsReachableAndYoung(t *testing.T) {
	now := time.Unix(1_700_000_000, 0)
	b, store := memBuilder(t, func() time.Time { return now })
	kept := rootfs(t, b, ent{name: "kept", body: "kept"}).Layers[0]
	same := rootfs(t, b, ent{name: "other", body: "kept"}).Layers[0] // shares the data blob
	gone := rootfs(t, b, ent{name: "gone", body: "gone"}).Layers[0]
	orphan, d := conform.Bytes(1, 1000)
	must(t, store.Put(t.Context(), d, bytes.NewReader(orphan)))

	freed, err := b.Collect(t.Context(), []image.Digest{kept.Digest})
	must(t, err)
	if freed != 1000 {
		t.Errorf("freed %d, want the orphan's 1000: the others are young", freed)
	}
	now = now.Add(2 * time.Hour)
	young := rootfs(t, b, ent{name: "young", body: "young"}).Layers[0]
	freed, err = b.Collect(t.Context(), []image.Digest{kept.Digest, conform.DigestOf([]byte("lost"))})
	must(t, err)
	if freed == 0 {
		t.Error("nothing freed")
	}
	for _, l := range []image.Layer{kept, young} {
		m, err := ReadManifest(t.Context(), store, l.Digest)
		must(t, err)
		for _, x := range []image.Digest{m.Meta, m.Data} {
			if _, err := store.Stat(t.Context(), x); err != nil {
				t.Errorf("%v", err)
			}
		}
	}
	for _, l := range []image.Layer{same, gone} {
		if _, err := store.Stat(t.Context(), l.Digest); !errors.Is(err, errdefs.NotFound) {
			t.Errorf("layer %s: %v", l.Digest, err)
		}
	}
	b.Forget([]image.Layer{young})
	if _, err = b.Collect(t.Context(), nil); err != nil {
		t.Fatal(err)
	}
	for d := range store.All(t.Context()) {
		t.Errorf("left %s", d)
	}
}

func TestTheCollectorDeletesNothingWhenItCannotReadAManifest(t *testing.T) {
	b, store := memBuilder(t, nil)
	rootfs(t, b, ent{name: "f", body: "f"})
	bad, d := conform.Bytes(1, 100)
	must(t, store.Put(t.Context(), d, bytes.NewReader(bad)))
	if freed, err := Collect(t.Context(), store, []image.Digest{d}); err == nil || freed != 0 {
		t.Errorf("freed %d, %v", freed, err)
	}
	n := 0
	for range store.All(t.Context()) {
		n++
	}
	if n != 4 {
		t.Errorf("%d blobs left, want all 4", n)
	}
}

// slowStore makes Create wait, so that imports overlap.
type slowStore struct {
	blob.Creator
	wait    chan struct{}
	mu      sync.Mutex
	creates int // guarded by mu
}

func (s *slowStore) Create(ctx context.Context) (blob.Writer, error) {
	s.mu.Lock()
	s.creates++
	s.mu.Unlock()
	select {
	case <-s.wait:
	case <-ctx.Done():
		return nil, context.Cause(ctx)
	}
	return s.Creator.Create(ctx)
}

func TestEqualImportsAtOnceAreOne(t *testing.T) {
	dir := t.TempDir()
	arch := makeTar(t, ent{name: "f", body: "f"})
	synctest.Test(t, func(t *testing.T) {
		store := &slowStore{Creator: &mem.Store{}, wait: make(chan struct{})}
		b, err := New(Config{Store: store, Dir: dir})
		must(t, err)
		var wg sync.WaitGroup
		results := make([]Result, 10)
		reports := make([][]Progress, 10)
		cancelled, cancel := context.WithCancel(t.Context())
		wg.Go(func() { // the first comes and goes; the import goes on for the others
			_, err := b.Rootfs(cancelled, bytes.NewReader(arch), ArchiveOptions{Key: "k"})
			if !errors.Is(err, context.Canceled) {
				t.Errorf("got %v", err)
			}
		})
		synctest.Wait()
		for i := range results {
			wg.Go(func() {
				var err error
				results[i], err = b.Rootfs(t.Context(), bytes.NewReader(arch), ArchiveOptions{
					Key: "k", Report: func(p Progress) { reports[i] = append(reports[i], p) },
				})
				if err != nil {
					t.Error(err)
				}
			})
		}
		synctest.Wait()
		cancel()
		time.Sleep(3 * time.Second) // of the bubble's clock: reports must come meanwhile
		close(store.wait)
		wg.Wait()
		if store.creates != 2 { // data and metadata, once
			t.Errorf("%d blobs were made, want 2", store.creates)
		}
		for i, r := range results {
			if len(r.Layers) != 1 || r.Layers[0] != results[0].Layers[0] {
				t.Errorf("result %d: %+v", i, r)
			}
			if len(reports[i]) < 6 {
				t.Errorf("%d reports in 3 seconds", len(reports[i]))
			}
			var ended []string
			for _, p := range reports[i] {
				if p.Finished {
					ended = append(ended, p.Stage)
				}
			}
			if !slices.Equal(ended, []string{"unpack", "write"}) {
				t.Errorf("stages that ended: %q", ended)
			}
		}
	})
}

func TestAnImportThatNobodyWaitsForStops(t *testing.T) {
	dir := t.TempDir()
	arch := makeTar(t, ent{name: "f", body: "f"})
	synctest.Test(t, func(t *testing.T) {
		store := &slowStore{Creator: &mem.Store{}, wait: make(chan struct{})}
		b, err := New(Config{Store: store, Dir: dir})
		must(t, err)
		ctx, cancel := context.WithCancelCause(t.Context())
		var wg sync.WaitGroup
		for range 3 {
			wg.Go(func() {
				if _, err := b.Rootfs(ctx, bytes.NewReader(arch), ArchiveOptions{Key: "k"}); err == nil {
					t.Error("no error")
				}
			})
		}
		synctest.Wait()
		cancel(errors.New("gone away"))
		wg.Wait() // the store never lets go: only the cancellation ends it
		close(store.wait)
		if _, err := b.Rootfs(t.Context(), bytes.NewReader(arch), ArchiveOptions{Key: "k"}); err != nil {
			t.Errorf("a later one: %v", err)
		}
	})
}

func TestUploads(t *testing.T) {
	now := time.Now()
	store := &mem.Store{}
	b, err := New(Config{Store: store, Dir: t.TempDir(), Now: func() time.Time { return now }, Limits: Limits{Bytes: 3000}})
	must(t, err)
	u := b.Uploads()
	body := noise(1000)
	id, n, err := u.Upload(t.Context(), strings.NewReader(body))
	must(t, err)
	if n != 1000 {
		t.Errorf("%d bytes", n)
	}
	f, err := u.Open(id)
	must(t, err)
	got, err := io.ReadAll(f)
	must(t, errors.Join(err, f.Close()))
	if string(got) != body {
		t.Error("other bytes")
	}
	for _, bad := range []string{"", "../../etc/passwd", strings.ToLower(id), id + ".part", "AAAAAAAAAAAAAAAAAAAAAAAAAA"} {
		if _, err := u.Open(bad); !errors.Is(err, errdefs.NotFound) {
			t.Errorf("open %q: %v", bad, err)
		}
	}
	if _, _, err := u.Upload(t.Context(), strings.NewReader(noise(2001))); !errors.Is(err, errdefs.Exhausted) {
		t.Errorf("more than all uploads may have: %v", err)
	}
	broken := errors.New("the line broke")
	_, _, err = u.Upload(t.Context(), io.MultiReader(strings.NewReader("x"), readerFunc(func([]byte) (int, error) { return 0, broken })))
	if !errors.Is(err, broken) {
		t.Errorf("got %v", err)
	}
	files := func() []string {
		ents, err := os.ReadDir(filepath.Join(b.dir, "tmp"))
		must(t, err)
		var out []string
		for _, e := range ents {
			out = append(out, e.Name())
		}
		return out
	}
	if got := files(); len(got) != 1 {
		t.Errorf("files %v", got)
	}
	// A part of a process that is gone.
	must(t, os.WriteFile(filepath.Join(b.dir, "tmp", "upload-AAAAAAAAAAAAAAAAAAAAAAAAAA.part"), nil, 0o600))
	must(t, u.Expire())
	if got := files(); len(got) != 1 {
		t.Errorf("files %v", got)
	}
	now = time.Now().Add(time.Hour)
	if _, err := u.Open(id); !errors.Is(err, errdefs.NotFound) {
		t.Errorf("an hour later: %v", err)
	}
	must(t, u.Expire())
	if got := files(); len(got) != 0 {
		t.Errorf("files %v", got)
	}
	now = time.Now()
	id, _, err = u.Upload(t.Context(), strings.NewReader(body))
	must(t, err)
	must(t, errors.Join(u.Remove(id), u.Remove(id)))
	if got := files(); len(got) != 0 {
		t.Errorf("files %v", got)
	}
}

func TestSweepRemovesWhatADeadImportLeft(t *testing.T) {
	b, _ := memBuilder(t, nil)
	for _, n := range []string{"debian-1/a/b", "oci-2", "upload-AAAAAAAAAAAAAAAAAAAAAAAAAA", "of-others"} {
		p := filepath.Join(b.dir, "tmp", n)
		must(t, os.MkdirAll(filepath.Dir(p), 0o700))
		must(t, os.WriteFile(p, nil, 0o600))
	}
	// Uploads: one that is past its hour, and one that was cut by the end of its process.
	for _, n := range []string{"upload-BBBBBBBBBBBBBBBBBBBBBBBBBB", "upload-CCCCCCCCCCCCCCCCCCCCCCCCCC.part"} {
		p := filepath.Join(b.dir, "tmp", n)
		must(t, os.WriteFile(p, nil, 0o600))
		must(t, os.Chtimes(p, time.Now(), time.Now().Add(-uploadFor)))
	}
	must(t, b.Sweep())
	ents, err := os.ReadDir(filepath.Join(b.dir, "tmp"))
	must(t, err)
	if len(ents) != 2 {
		t.Errorf("left %v", ents)
	}
}

func FuzzParseManifest(f *testing.F) {
	f.Add([]byte(fmt.Sprintf(`{"schema":%q,"meta":"sha256:%064d","data":"sha256:%064d","meta_bytes":1,"data_bytes":0,"chunk_size":%d}`,
		ManifestSchema, 0, 1, ChunkSize)))
	f.Add([]byte(`{}`))
	f.Fuzz(func(t *testing.T, b []byte) {
		m, err := ParseManifest(b)
		if err != nil {
			return
		}
		enc, _, err := m.encode()
		if err != nil {
			t.Fatal(err)
		}
		again, err := ParseManifest(enc)
		if err != nil || again.Meta != m.Meta || len(again.Chunks) != len(m.Chunks) {
			t.Fatalf("%+v became %+v, %v", m, again, err)
		}
	})
}

func FuzzTar(f *testing.F) {
	t := &testing.T{}
	f.Add(makeTar(t, ent{name: "d/", typ: tar.TypeDir}, ent{name: "d/f", body: "x"}, ent{name: "l", typ: tar.TypeLink, link: "d/f"}), true)
	f.Add(makeTar(t, odd(0)...), true)
	f.Add(makeTar(t, odd(1)...), true)
	f.Add(gz(t, makeTar(t, odd(1)...)), false)
	f.Add(zst(t, makeTar(t, odd(0)...)), false)
	f.Add([]byte{0xfd, '7', 'z', 'X', 'Z', 0, 0, 4, 0xe6, 0xd6, 0xb4, 0x46, 2, 0, 0x21, 1, 0x16, 0, 0, 0}, false)
	dir := f.TempDir()
	f.Fuzz(func(t *testing.T, arch []byte, whiteouts bool) {
		store := &mem.Store{}
		b, err := New(Config{Store: store, Dir: dir, Limits: Limits{Bytes: 1 << 20, Entries: 1000, Metadata: 1 << 20}})
		must(t, err)
		l, err := b.tarLayer(t.Context(), bytes.NewReader(arch), tarReader{archive: "fuzz", used: &usage{}, whiteouts: whiteouts}, nil)
		if err != nil {
			if !errors.Is(err, errdefs.Invalid) {
				t.Fatalf("an error that says nothing about the archive: %v", err)
			}
			return
		}
		layers, err := b.commit(t.Context(), []*layer{l}, "fuzz")
		if err != nil {
			t.Fatal(err)
		}
		if _, err := ReadManifest(t.Context(), store, layers[0].Digest); err != nil {
			t.Fatal(err)
		}
	})
}

func FuzzAptSources(f *testing.F) {
	f.Add("deb [signed-by=/usr/share/keyrings/k.gpg arch=amd64] https://mirror.example/debian bookworm main contrib # c\n")
	f.Add("Types: deb\nURIs: http://a.example/d\nSuites: bookworm bookworm-updates\nComponents: main\nSigned-By: /k.gpg\n\n")
	f.Fuzz(func(t *testing.T, text string) {
		all := append(parseSourcesList(strings.NewReader(text), "amd64"), parseDeb822(strings.NewReader(text), "amd64")...)
		for _, s := range ofSuite(all, "bookworm") {
			if strings.ContainsAny(s.line(), "\n\"'") {
				t.Fatalf("line %q", s.line())
			}
		}
		suitesOf(all)
	})
}

func TestAJoinedImportOutlivesTheFileOfItsFirstCaller(t *testing.T) {
	dir := t.TempDir()
	name := filepath.Join(dir, "a.tar")
	must(t, os.WriteFile(name, makeTar(t, ent{name: "f", body: noise(1 << 20)}), 0o600))
	store := &slowStore{Creator: &mem.Store{}, wait: make(chan struct{})}
	b, err := New(Config{Store: store, Dir: dir})
	must(t, err)
	f, err := os.Open(name)
	must(t, err)
	ctx, cancel := context.WithCancel(t.Context())
	running := make(chan struct{})
	first := make(chan error)
	go func() {
		_, err := b.Rootfs(ctx, f, ArchiveOptions{Key: "k", Report: once(running)})
		first <- errors.Join(err, f.Close())
	}()
	<-running
	second := make(chan error)
	joined := make(chan struct{})
	go func() {
		_, err := b.Rootfs(t.Context(), strings.NewReader("not read"), ArchiveOptions{
			Key: "k", Report: once(joined),
		})
		second <- err
	}()
	<-joined
	cancel()
	if err := <-first; !errors.Is(err, context.Canceled) {
		t.Errorf("the first: %v", err)
	}
	close(store.wait)
	if err := <-second; err != nil {
		t.Errorf("the second: %v", err)
	}
}

// once closes c at the first report.
func once(c chan struct{}) Report {
	f := sync.OnceFunc(func() { close(c) })
	return func(Progress) { f() }
}
