package peers_test

import (
	"bytes"
	"context"
	"crypto/rand"
	"crypto/sha256"
	"crypto/tls"
	"encoding/hex"
	"encoding/json"
	"errors"
	"io"
	"log/slog"
	"net"
	"net/http"
	"path/filepath"
	"slices"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"connectrpc.com/connect"

	"github.com/sandsea/sandsea/api/errdefs"
	"github.com/sandsea/sandsea/api/errwire"
	nodev1 "github.com/sandsea/sandsea/api/node/v1"
	"github.com/sandsea/sandsea/api/node/v1/nodev1connect"
	"github.com/sandsea/sandsea/internal/cluster"
	"github.com/sandsea/sandsea/internal/edge/peers"
	"github.com/sandsea/sandsea/internal/image"
	"github.com/sandsea/sandsea/internal/layers/blob"
	"github.com/sandsea/sandsea/internal/layers/blob/posix"
	"github.com/sandsea/sandsea/internal/layers/build"
	"github.com/sandsea/sandsea/internal/node"
	"github.com/sandsea/sandsea/internal/store"
	"github.com/sandsea/sandsea/internal/store/keys"
	"github.com/sandsea/sandsea/internal/store/mem"
)

// world is a cluster of fake nodes that give blobs away, and one node that lacks them.
type world struct {
	authority *cluster.Authority
	store     store.Store
	blobs     *posix.Store
	layers    *peers.Layers
	free      int64
	count     node.Number
}

func newWorld(t *testing.T) *world {
	t.Helper()
	w := &world{store: mem.New(mem.Config{}), count: 1, free: 1 << 40}
	var err error
	if w.authority, err = cluster.EnsureAuthority(filepath.Join(t.TempDir(), "cluster"), time.Now()); err != nil {
		t.Fatal(err)
	}
	if w.blobs, err = posix.Open(t.TempDir()); err != nil {
		t.Fatal(err)
	}
	w.layers = w.layersOver(t, w.blobs)
	return w
}

// layersOver are the layers of a node with these blobs.
func (w *world) layersOver(t *testing.T, blobs blob.Creator) *peers.Layers {
	t.Helper()
	l := peers.New(peers.Config{
		Blobs: blobs, Store: w.store, Self: 1, Identity: w.invite(t, "self"), Log: slog.New(slog.DiscardHandler),
		Free: func() (int64, error) { return w.free, nil }, Reserve: 1 << 20,
	})
	t.Cleanup(func() { _ = l.Close() })
	return l
}

func (w *world) invite(t *testing.T, name string) *cluster.Identity {
	t.Helper()
	v, err := w.authority.Invite(name, "127.0.0.1:1", time.Now())
	if err != nil {
		t.Fatal(err)
	}
	id, err := v.Identity()
	if err != nil {
		t.Fatal(err)
	}
	return id
}

// giver is a fake node. read gives a blob from an offset on, and an error to end with.
type giver struct {
	nodev1connect.UnimplementedEdgeServiceHandler
	read func(digest string, offset int64) ([]byte, error)

	mu    sync.Mutex
	asked map[string][]int64 // guarded by mu: the offsets that were asked for, by digest
}

func (g *giver) ReadBlob(_ context.Context, r *connect.Request[nodev1.ReadBlobRequest],
	st *connect.ServerStream[nodev1.ReadBlobResponse],
) error {
	g.mu.Lock()
	g.asked[r.Msg.GetDigest()] = append(g.asked[r.Msg.GetDigest()], r.Msg.GetOffset())
	g.mu.Unlock()
	data, err := g.read(r.Msg.GetDigest(), r.Msg.GetOffset())
	for piece := range slices.Chunk(data, 100_000) {
		if err := st.Send(&nodev1.ReadBlobResponse{Data: piece}); err != nil {
			return err
		}
	}
	if err != nil {
		return errwire.ToConnect(err)
	}
	return nil
}

func (g *giver) offsets(digest string) []int64 {
	g.mu.Lock()
	defer g.mu.Unlock()
	return g.asked[digest]
}

// add makes a node of that name and registers it.
func (w *world) add(t *testing.T, name string, read func(digest string, offset int64) ([]byte, error)) *giver {
	t.Helper()
	g := &giver{read: read, asked: map[string][]int64{}}
	mux := http.NewServeMux()
	mux.Handle(nodev1connect.NewEdgeServiceHandler(g))
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	srv := &http.Server{
		Handler: mux, ReadHeaderTimeout: time.Minute, ErrorLog: slog.NewLogLogger(slog.DiscardHandler, slog.LevelDebug),
	}
	go func() { _ = srv.Serve(tls.NewListener(l, w.invite(t, name).Accept())) }()
	t.Cleanup(func() { _ = srv.Close() })
	w.register(t, name, l.Addr().String())
	return g
}

func (w *world) register(t *testing.T, name, address string) {
	t.Helper()
	w.count++
	value, err := json.Marshal(node.Registration{Number: w.count, Name: name, Address: address})
	if err != nil {
		t.Fatal(err)
	}
	if _, err := w.store.Txn(t.Context(), nil, []store.Op{store.Put(keys.Node(w.count), value)}, nil); err != nil {
		t.Fatal(err)
	}
}

func digest(b []byte) image.Digest {
	h := sha256.New()
	h.Write(b)
	return image.FromHash(h)
}

// layer makes the blobs of one layer, by digest; the first is the layer's own.
func layer(t *testing.T) (image.Digest, image.Digest, map[string][]byte) {
	t.Helper()
	meta, data := make([]byte, 8192), make([]byte, 900_000)
	_, _ = rand.Read(meta)
	_, _ = rand.Read(data)
	m := build.Manifest{
		Schema: build.ManifestSchema, Meta: digest(meta), Data: digest(data), MetaBytes: int64(len(meta)),
		DataBytes: int64(len(data)), ChunkSize: build.ChunkSize,
	}
	for at := 0; at < len(data); at += build.ChunkSize {
		sum := sha256.Sum256(data[at:min(at+build.ChunkSize, len(data))])
		m.Chunks = append(m.Chunks, hex.EncodeToString(sum[:]))
	}
	text, err := json.Marshal(m)
	if err != nil {
		t.Fatal(err)
	}
	return digest(text), m.Data, map[string][]byte{
		string(digest(text)): text, string(m.Meta): meta, string(m.Data): data,
	}
}

// having gives what it has.
func having(all map[string][]byte) func(string, int64) ([]byte, error) {
	return func(d string, at int64) ([]byte, error) {
		b, ok := all[d]
		if !ok {
			return nil, errdefs.New(errdefs.NotFound, "blob "+d, "none")
		}
		return b[min(at, int64(len(b))):], nil
	}
}

// check compares what is here with what should be.
func (w *world) check(t *testing.T, all map[string][]byte) {
	t.Helper()
	for d, want := range all {
		got := make([]byte, len(want)+1)
		n, err := w.blobs.ReadAt(t.Context(), image.Digest(d), got, 0)
		if err != nil && !errors.Is(err, io.EOF) || !bytes.Equal(got[:n], want) {
			t.Errorf("blob %s: %d bytes of %d, %v", d, n, len(want), err)
		}
	}
}

func TestALayerComesFromANodeThatHasIt(t *testing.T) {
	w := newWorld(t)
	d, data, all := layer(t)
	w.add(t, "empty", having(nil))
	w.register(t, "dead", "127.0.0.1:1")
	w.register(t, "local", "unix:/nowhere/node.sock")
	has := w.add(t, "has", having(all))
	var wg sync.WaitGroup
	for range 8 {
		wg.Go(func() {
			if err := w.layers.Ensure(t.Context(), []image.Digest{d}); err != nil {
				t.Error(err)
			}
		})
	}
	wg.Wait()
	w.check(t, all)
	if n := len(has.offsets(string(data))); n != 1 {
		t.Errorf("fetched %d times", n)
	}
	if err := w.layers.Ensure(t.Context(), []image.Digest{d, d}); err != nil {
		t.Errorf("a layer that is here: %v", err)
	}
}

func TestABrokenTransferGoesOnAtItsOffset(t *testing.T) {
	w := newWorld(t)
	d, data, all := layer(t)
	var once sync.Once
	g := w.add(t, "weak", func(name string, at int64) ([]byte, error) {
		b, err := having(all)(name, at)
		if name == string(data) {
			once.Do(func() { b, err = b[:300_000], errdefs.New(errdefs.Unavailable, "node", "it stops") })
		}
		return b, err
	})
	if err := w.layers.Ensure(t.Context(), []image.Digest{d}); err != nil {
		t.Fatal(err)
	}
	w.check(t, all)
	if got := g.offsets(string(data)); len(got) != 2 || got[0] != 0 || got[1] != 300_000 {
		t.Errorf("asked for the offsets %v", got)
	}
}

func TestWrongBytesAreNeverKept(t *testing.T) {
	for name, bend := range map[string]func([]byte) []byte{
		"another byte": func(b []byte) []byte { b = bytes.Clone(b); b[7] ^= 1; return b },
		"cut":          func(b []byte) []byte { return b[:len(b)-1] },
		"more":         func(b []byte) []byte { return append(bytes.Clone(b), make([]byte, 5_000_000)...) },
	} {
		t.Run(name, func(t *testing.T) {
			w := newWorld(t)
			d, data, all := layer(t)
			w.add(t, "liar", func(name string, at int64) ([]byte, error) {
				b, err := having(all)(name, 0)
				if name == string(data) {
					b = bend(b)
				}
				return b[min(at, int64(len(b))):], err
			})
			if err := w.layers.Ensure(t.Context(), []image.Digest{d}); !errors.Is(err, errdefs.Refused) {
				t.Fatalf("got %v", err)
			}
			if _, err := w.blobs.Stat(t.Context(), data); !errors.Is(err, errdefs.NotFound) {
				t.Errorf("it was kept: %v", err)
			}
			w.add(t, "honest", having(all))
			if err := w.layers.Ensure(t.Context(), []image.Digest{d}); err != nil {
				t.Fatal(err)
			}
			w.check(t, all)
		})
	}
}

func TestANodeIsNotBlamedForWhatAnotherSentBeforeIt(t *testing.T) {
	w := newWorld(t)
	d, data, all := layer(t)
	var lied atomic.Bool
	w.add(t, "liar", func(name string, at int64) ([]byte, error) {
		b, err := having(all)(name, at)
		if name != string(data) {
			return b, err
		}
		lied.Store(true)
		return make([]byte, 1000), errdefs.New(errdefs.Unavailable, "node", "it stops")
	})
	w.add(t, "honest", func(name string, at int64) ([]byte, error) {
		if name == string(data) && !lied.Load() {
			return nil, errdefs.New(errdefs.Unavailable, "node", "it starts") // so that the other one is first
		}
		return having(all)(name, at)
	})
	if err := w.layers.Ensure(t.Context(), []image.Digest{d}); err != nil {
		t.Fatal(err)
	}
	w.check(t, all)
}

func TestWhatNobodyHasIsRefused(t *testing.T) {
	w := newWorld(t)
	d, _, _ := layer(t)
	w.add(t, "empty", having(nil))
	if err := w.layers.Ensure(t.Context(), []image.Digest{d}); !errors.Is(err, errdefs.Refused) {
		t.Errorf("got %v", err)
	}
}

func TestANodeThatPassesForAnotherIsNotAsked(t *testing.T) {
	w := newWorld(t)
	d, _, all := layer(t)
	g := w.add(t, "n2", having(all))
	page, err := w.store.Range(t.Context(), keys.Nodes, store.RangeOptions{})
	if err != nil || len(page.Pairs) != 1 {
		t.Fatal(page, err)
	}
	moved := bytes.ReplaceAll(page.Pairs[0].Value, []byte(`"n2"`), []byte(`"n3"`))
	if _, err := w.store.Txn(t.Context(), nil, []store.Op{store.Put(page.Pairs[0].Key, moved)}, nil); err != nil {
		t.Fatal(err)
	}
	if err := w.layers.Ensure(t.Context(), []image.Digest{d}); !errors.Is(err, errdefs.Refused) {
		t.Errorf("got %v", err)
	}
	if len(g.offsets(string(d))) > 0 {
		t.Error("it was asked")
	}
}

func TestALayerThatDoesNotFitIsRefused(t *testing.T) {
	w := newWorld(t)
	d, data, all := layer(t)
	g := w.add(t, "has", having(all))
	w.free = 1<<20 + 900_000
	if err := w.layers.Ensure(t.Context(), []image.Digest{d}); !errors.Is(err, errdefs.Refused) {
		t.Errorf("got %v", err)
	}
	if len(g.offsets(string(data))) > 0 {
		t.Error("it was fetched all the same")
	}
}

func TestWhoStopsWaitingDoesNotStopTheFetch(t *testing.T) {
	w := newWorld(t)
	d, data, all := layer(t)
	asked, release := make(chan struct{}), make(chan struct{})
	var once sync.Once
	w.add(t, "slow", func(name string, at int64) ([]byte, error) {
		if name == string(data) {
			once.Do(func() { close(asked) })
			<-release
		}
		return having(all)(name, at)
	})
	ctx, leave := context.WithCancel(t.Context())
	got := make(chan error, 1)
	go func() { got <- w.layers.Ensure(ctx, []image.Digest{d}) }()
	<-asked
	leave()
	if err := <-got; !errors.Is(err, errdefs.Canceled) {
		t.Errorf("got %v", err)
	}
	close(release)
	if err := w.layers.Ensure(t.Context(), []image.Digest{d}); err != nil {
		t.Fatal(err)
	}
	w.check(t, all)
}

func TestACollectionIsNoticed(t *testing.T) {
	w := newWorld(t)
	d, data, all := layer(t)
	w.add(t, "has", having(all))
	if err := w.layers.Ensure(t.Context(), []image.Digest{d}); err != nil {
		t.Fatal(err)
	}
	if err := w.blobs.Delete(t.Context(), data); err != nil {
		t.Fatal(err)
	}
	w.layers.Collected()
	if err := w.layers.Ensure(t.Context(), []image.Digest{d}); err != nil {
		t.Fatal(err)
	}
	w.check(t, all)
}

// collecting is a store out of which a blob is collected as soon as it has been looked at.
type collecting struct {
	*posix.Store
	gone image.Digest
	once sync.Once
	told func()
}

func (c *collecting) Stat(ctx context.Context, d image.Digest) (int64, error) {
	n, err := c.Store.Stat(ctx, d)
	if d == c.gone && err == nil {
		c.once.Do(func() {
			err = c.Delete(ctx, d)
			c.told()
		})
	}
	return n, err
}

func TestACollectionDuringALookIsNoticed(t *testing.T) {
	w := newWorld(t)
	d, data, all := layer(t)
	w.add(t, "has", having(all))
	if err := w.layers.Ensure(t.Context(), []image.Digest{d}); err != nil {
		t.Fatal(err)
	}
	blobs := &collecting{Store: w.blobs, gone: data}
	layers := w.layersOver(t, blobs)
	blobs.told = layers.Collected
	for range 2 { // the first one has seen it before
		if err := layers.Ensure(t.Context(), []image.Digest{d}); err != nil {
			t.Fatal(err)
		}
	}
	w.check(t, all)
}
