// Package conform is the suite that every blob.Store must pass.
package conform

import (
	"bytes"
	"context"
	"crypto/sha256"
	"errors"
	"fmt"
	"io"
	"math/rand/v2"
	"slices"
	"sync"
	"testing"
	"testing/iotest"

	"github.com/sandsea/sandsea/api/errdefs"
	"github.com/sandsea/sandsea/internal/image"
	"github.com/sandsea/sandsea/internal/layers/blob"
)

// Bytes makes n bytes that depend on the seed, and their digest.
func Bytes(seed uint64, n int) ([]byte, image.Digest) {
	b := make([]byte, n)
	r := rand.New(rand.NewPCG(seed, uint64(n)))
	for i := range b {
		b[i] = byte(r.Uint32())
	}
	return b, DigestOf(b)
}

// DigestOf is the digest of b.
func DigestOf(b []byte) image.Digest {
	h := sha256.New()
	h.Write(b)
	return image.FromHash(h)
}

// Run runs the suite; open gives an empty store each time.
func Run(t *testing.T, open func(t *testing.T) blob.Store) {
	for _, tc := range []struct {
		name string
		run  func(t *testing.T, s blob.Store)
	}{
		{"what was put is read back at any offset", readBack},
		{"an absent blob is NotFound everywhere", absent},
		{"a malformed digest is Invalid everywhere", malformed},
		{"wrong bytes are DataLoss and leave nothing", wrongBytes},
		{"a reader that fails leaves nothing", failingReader},
		{"a reader that ends early leaves nothing", truncatedReader},
		{"a cancelled put leaves nothing", cancelled},
		{"a put of what is there reads nothing", again},
		{"many puts of one digest at once are one blob", concurrentSame},
		{"many puts of many digests at once are all there", concurrentMany},
		{"delete is idempotent and the blob can be put again", deletes},
		{"all yields each blob once and stops when told", all},
		{"a staged blob shows only after its commit", staged},
		{"an aborted blob leaves nothing", aborted},
		{"a commit of what is there is success", commitAgain},
		{"a commit that is cancelled leaves nothing", commitCancelled},
	} {
		t.Run(tc.name, func(t *testing.T) { tc.run(t, open(t)) })
	}
}

func must(t *testing.T, err error) {
	t.Helper()
	if err != nil {
		t.Fatal(err)
	}
}

func wantKind(t *testing.T, err error, kind errdefs.Kind) {
	t.Helper()
	if !errors.Is(err, kind) {
		t.Errorf("got error %v, want kind %s", err, kind)
	}
}

func put(t *testing.T, s blob.Store, seed uint64, n int) ([]byte, image.Digest) {
	t.Helper()
	b, d := Bytes(seed, n)
	must(t, s.Put(t.Context(), d, bytes.NewReader(b)))
	return b, d
}

func list(t *testing.T, s blob.Store) []image.Digest {
	t.Helper()
	var out []image.Digest
	for d, err := range s.All(t.Context()) {
		must(t, err)
		out = append(out, d)
	}
	slices.Sort(out)
	return out
}

func wantNone(t *testing.T, s blob.Store, d image.Digest) {
	t.Helper()
	_, err := s.Stat(t.Context(), d)
	wantKind(t, err, errdefs.NotFound)
	if got := list(t, s); len(got) != 0 {
		t.Errorf("left behind: %v", got)
	}
}

func readBack(t *testing.T, s blob.Store) {
	for _, n := range []int{0, 1, 4096, 300_000} {
		b, d := put(t, s, 1, n)
		size, err := s.Stat(t.Context(), d)
		must(t, err)
		if size != int64(n) {
			t.Errorf("size %d, want %d", size, n)
		}
		for _, off := range []int{0, 1, n / 2, n} {
			if off > n {
				continue
			}
			p := make([]byte, n-off+10) // past the end
			k, err := s.ReadAt(t.Context(), d, p, int64(off))
			if !errors.Is(err, io.EOF) || !bytes.Equal(p[:k], b[off:]) {
				t.Errorf("ReadAt(%d) of %d: %d bytes, %v", off, n, k, err)
			}
			if len(b[off:]) > 0 {
				k, err = s.ReadAt(t.Context(), d, p[:1], int64(off))
				if k != 1 || (err != nil && !errors.Is(err, io.EOF)) || p[0] != b[off] {
					t.Errorf("ReadAt(%d) of one byte: %d, %v", off, k, err)
				}
			}
		}
		if local, ok := s.(blob.Local); ok {
			_, err := local.Path(t.Context(), d)
			must(t, err)
		}
	}
}

func absent(t *testing.T, s blob.Store) {
	_, d := Bytes(1, 10)
	_, err := s.Stat(t.Context(), d)
	wantKind(t, err, errdefs.NotFound)
	_, err = s.ReadAt(t.Context(), d, make([]byte, 1), 0)
	wantKind(t, err, errdefs.NotFound)
	if local, ok := s.(blob.Local); ok {
		_, err = local.Path(t.Context(), d)
		wantKind(t, err, errdefs.NotFound)
	}
	must(t, s.Delete(t.Context(), d))
}

func malformed(t *testing.T, s blob.Store) {
	upper := image.Digest("sha256:" + fmt.Sprintf("%064X", 10))
	for _, d := range []image.Digest{"", "sha256:", "sha256:../../../../etc/passwd", upper} {
		_, err := s.Stat(t.Context(), d)
		wantKind(t, err, errdefs.Invalid)
		_, err = s.ReadAt(t.Context(), d, make([]byte, 1), 0)
		wantKind(t, err, errdefs.Invalid)
		wantKind(t, s.Put(t.Context(), d, bytes.NewReader(nil)), errdefs.Invalid)
		wantKind(t, s.Delete(t.Context(), d), errdefs.Invalid)
	}
}

func wrongBytes(t *testing.T, s blob.Store) {
	b, d := Bytes(1, 100_000)
	b[50_000] ^= 1
	wantKind(t, s.Put(t.Context(), d, bytes.NewReader(b)), errdefs.DataLoss)
	wantNone(t, s, d)
	wantKind(t, s.Put(t.Context(), d, io.MultiReader(bytes.NewReader(b), bytes.NewReader(b))), errdefs.DataLoss)
	wantNone(t, s, d)
}

func failingReader(t *testing.T, s blob.Store) {
	b, d := Bytes(1, 100_000)
	broken := errors.New("the line broke")
	err := s.Put(t.Context(), d, io.MultiReader(bytes.NewReader(b[:60_000]), iotest.ErrReader(broken)))
	if !errors.Is(err, broken) {
		t.Errorf("got %v, want %v", err, broken)
	}
	wantNone(t, s, d)
}

func truncatedReader(t *testing.T, s blob.Store) {
	b, d := Bytes(1, 100_000)
	wantKind(t, s.Put(t.Context(), d, bytes.NewReader(b[:99_999])), errdefs.DataLoss)
	wantNone(t, s, d)
}

func cancelled(t *testing.T, s blob.Store) {
	b, d := Bytes(1, 1<<20)
	gone := errors.New("gone away")
	ctx, cancel := context.WithCancelCause(t.Context())
	n := 0
	err := s.Put(ctx, d, readerFunc(func(p []byte) (int, error) {
		if n == len(b) {
			return 0, io.EOF
		}
		if n > len(b)/2 {
			cancel(gone)
		}
		k := copy(p[:min(len(p), 10_000)], b[n:])
		n += k
		return k, nil
	}))
	if !errors.Is(err, gone) {
		t.Errorf("got %v, want %v", err, gone)
	}
	wantNone(t, s, d)
}

type readerFunc func(p []byte) (int, error)

func (f readerFunc) Read(p []byte) (int, error) { return f(p) }

func again(t *testing.T, s blob.Store) {
	_, d := put(t, s, 1, 1000)
	must(t, s.Put(t.Context(), d, iotest.ErrReader(errors.New("read"))))
}

func concurrentSame(t *testing.T, s blob.Store) {
	b, d := Bytes(1, 500_000)
	var wg sync.WaitGroup
	for range 16 {
		wg.Go(func() {
			if err := s.Put(t.Context(), d, bytes.NewReader(b)); err != nil {
				t.Error(err)
			}
		})
	}
	wg.Wait()
	if got := list(t, s); !slices.Equal(got, []image.Digest{d}) {
		t.Errorf("blobs %v", got)
	}
	p := make([]byte, len(b))
	if _, err := s.ReadAt(t.Context(), d, p, 0); err != nil && !errors.Is(err, io.EOF) || !bytes.Equal(p, b) {
		t.Errorf("other bytes, %v", err)
	}
}

func concurrentMany(t *testing.T, s blob.Store) {
	var wg sync.WaitGroup
	var want []image.Digest
	for i := range uint64(40) {
		b, d := Bytes(i, 10_000)
		want = append(want, d)
		wg.Go(func() {
			if err := s.Put(t.Context(), d, bytes.NewReader(b)); err != nil {
				t.Error(err)
			}
		})
	}
	wg.Wait()
	slices.Sort(want)
	if got := list(t, s); !slices.Equal(got, want) {
		t.Errorf("blobs %v, want %v", got, want)
	}
}

func deletes(t *testing.T, s blob.Store) {
	_, d := put(t, s, 1, 10)
	must(t, s.Delete(t.Context(), d))
	must(t, s.Delete(t.Context(), d))
	wantNone(t, s, d)
	put(t, s, 1, 10)
}

func all(t *testing.T, s blob.Store) {
	for i := range uint64(5) {
		put(t, s, i, 10)
	}
	if got := list(t, s); len(got) != 5 || len(slices.Compact(got)) != 5 {
		t.Errorf("%d blobs, want 5", len(got))
	}
	for _, err := range s.All(t.Context()) {
		must(t, err)
		break
	}
	gone := errors.New("gone away")
	ctx, cancel := context.WithCancelCause(t.Context())
	cancel(gone)
	var last error
	for _, err := range s.All(ctx) {
		last = err
	}
	if !errors.Is(last, gone) {
		t.Errorf("got %v, want %v", last, gone)
	}
}

func creator(t *testing.T, s blob.Store) blob.Creator {
	t.Helper()
	c, ok := s.(blob.Creator)
	if !ok {
		t.Skip("takes no bytes without their digest")
	}
	return c
}

func stage(t *testing.T, s blob.Creator, b []byte) blob.Writer {
	t.Helper()
	w, err := s.Create(t.Context())
	must(t, err)
	for part := range slices.Chunk(b, 70_001) {
		_, err := w.Write(part)
		must(t, err)
	}
	return w
}

func staged(t *testing.T, s blob.Store) {
	c := creator(t, s)
	b, d := Bytes(1, 200_000)
	w := stage(t, c, b)
	wantNone(t, s, d)
	p := make([]byte, 100)
	_, err := w.ReadAt(p, 150_000)
	must(t, err)
	if !bytes.Equal(p, b[150_000:150_100]) {
		t.Error("other bytes are read back")
	}
	if got := w.Digest(); got != d {
		t.Errorf("digest %s, want %s", got, d)
	}
	got, err := w.Commit(t.Context())
	must(t, err)
	if got != d {
		t.Errorf("digest %s, want %s", got, d)
	}
	must(t, w.Abort())
	size, err := s.Stat(t.Context(), d)
	must(t, err)
	if size != int64(len(b)) {
		t.Errorf("size %d", size)
	}
	if _, err := w.Write(b); err == nil {
		t.Error("a write after the commit is no error")
	}
	if _, err := w.Commit(t.Context()); err == nil {
		t.Error("a second commit is no error")
	}
}

func aborted(t *testing.T, s blob.Store) {
	b, d := Bytes(1, 200_000)
	w := stage(t, creator(t, s), b)
	must(t, w.Abort())
	must(t, w.Abort())
	wantNone(t, s, d)
}

func commitAgain(t *testing.T, s blob.Store) {
	c := creator(t, s)
	b, d := put(t, s, 1, 1000)
	got, err := stage(t, c, b).Commit(t.Context())
	must(t, err)
	if got != d || len(list(t, s)) != 1 {
		t.Errorf("digest %s, %d blobs", got, len(list(t, s)))
	}
}

func commitCancelled(t *testing.T, s blob.Store) {
	b, d := Bytes(1, 1000)
	w := stage(t, creator(t, s), b)
	gone := errors.New("gone away")
	ctx, cancel := context.WithCancelCause(t.Context())
	cancel(gone)
	if _, err := w.Commit(ctx); !errors.Is(err, gone) {
		t.Errorf("got %v", err)
	}
	wantNone(t, s, d)
}
