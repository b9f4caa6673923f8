package build

import (
	"context"
	"crypto/sha256"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"os"
	"path/filepath"
	"strings"

	"github.com/erofs/go-erofs"
	"github.com/google/renameio/v2"

	"github.com/sandsea/sandsea/api/errdefs"
	"github.com/sandsea/sandsea/internal/image"
	"github.com/sandsea/sandsea/internal/layers/blob"
)

// chainSchema is that of the notes that say which of our layers an image's layer became. A change of what a layer is
// made into needs a new one.
const chainSchema = "sandsea.chain/2"

// chainNote says what an image's layer became, on top of those below it: a hard link or a directory that a layer does
// not spell out takes from them, so that equal tars on other layers may make other layers.
type chainNote struct {
	Schema string       `json:"schema"`
	Chain  image.Digest `json:"chain"`
	Layer  image.Digest `json:"layer"`
	Bytes  int64        `json:"bytes"`
	Files  int64        `json:"files"`
}

func (b *Builder) notes() string { return filepath.Join(b.dir, "cache", "chains") }

// chains names each layer of an image together with all below it, as OCI's chain ids do. It ends before the first layer
// whose content the image does not name.
func chains(layers []ociLayer) []image.Digest {
	var out []image.Digest
	for i, l := range layers {
		if l.diffID == "" {
			break
		}
		chain := image.Digest(l.diffID)
		if i > 0 {
			h := sha256.New()
			_, _ = fmt.Fprintf(h, "%s %s", out[i-1], l.diffID)
			chain = image.FromHash(h)
		}
		if _, err := image.ParseDigest(string(chain)); err != nil {
			break
		}
		out = append(out, chain)
	}
	return out
}

// recall fills in the layers that earlier imports have made of the same content, if all of them is still here. They are
// not collected for an hour from now.
func (b *Builder) recall(ctx context.Context, layers []ociLayer, source string) {
	b.gc.RLock()
	defer b.gc.RUnlock()
	for i, chain := range chains(layers) {
		doc, err := os.ReadFile(filepath.Join(b.notes(), chain.Hex()))
		if err != nil {
			continue
		}
		var n chainNote
		if json.Unmarshal(doc, &n) != nil || n.Schema != chainSchema || n.Chain != chain {
			continue
		}
		if b.whole(ctx, n.Layer) != nil {
			continue
		}
		layers[i].have = &image.Layer{Digest: n.Layer, Bytes: n.Bytes, Files: n.Files, Source: source}
		b.mu.Lock()
		b.young[n.Layer] = b.now()
		b.mu.Unlock()
	}
}

// whole tells whether all blobs of a layer are in the store.
func (b *Builder) whole(ctx context.Context, d image.Digest) error {
	m, err := ReadManifest(ctx, b.store, d)
	if err != nil {
		return err
	}
	for _, x := range []struct {
		d    image.Digest
		size int64
	}{{m.Meta, m.MetaBytes}, {m.Data, m.DataBytes}} {
		if size, err := b.store.Stat(ctx, x.d); err != nil || size != x.size {
			return errors.Join(err, errdefs.DataLoss)
		}
	}
	return nil
}

// remember notes what the layers of an image became. A note that cannot be written costs a later import time only.
func (b *Builder) remember(layers []ociLayer, made []image.Layer) {
	err := os.MkdirAll(b.notes(), 0o700)
	for i, chain := range chains(layers) {
		if err != nil {
			break
		}
		if layers[i].have != nil {
			continue
		}
		var doc []byte
		doc, err = json.Marshal(chainNote{chainSchema, chain, made[i].Digest, made[i].Bytes, made[i].Files})
		if err == nil {
			err = renameio.WriteFile(filepath.Join(b.notes(), chain.Hex()), doc, 0o600)
		}
	}
	if err != nil {
		b.log.Warn("what an image's layers became is not noted", "err", err)
	}
}

// forgetChains removes the notes about layers that are gone.
func (b *Builder) forgetChains(ctx context.Context) error {
	ents, err := os.ReadDir(b.notes())
	if errors.Is(err, fs.ErrNotExist) {
		return nil
	}
	if err != nil {
		return fmt.Errorf("collect layers: %w", err)
	}
	for _, e := range ents {
		path := filepath.Join(b.notes(), e.Name())
		var n chainNote
		doc, err := os.ReadFile(path)
		if err == nil {
			err = json.Unmarshal(doc, &n)
		}
		if err == nil {
			_, err = b.store.Stat(ctx, n.Layer)
		}
		if err == nil {
			continue
		}
		if err := os.Remove(path); err != nil && !errors.Is(err, fs.ErrNotExist) {
			return fmt.Errorf("collect layers: %w", err)
		}
	}
	return nil
}

// load reads the tree of a layer that is in the store, so that layers above it can look names up in it.
func (b *Builder) load(ctx context.Context, known image.Layer) (*layer, error) {
	m, err := ReadManifest(ctx, b.store, known.Digest)
	if err != nil {
		return nil, err
	}
	broken := func(err error) error {
		return errdefs.New(errdefs.DataLoss, "layer "+string(known.Digest), "its tree cannot be read").Wrap(err).
			WithHint("Remove the images that use it and import them again")
	}
	meta := make([]byte, m.MetaBytes)
	if n, err := b.store.ReadAt(ctx, m.Meta, meta, 0); err != nil && !errors.Is(err, io.EOF) || n < len(meta) {
		return nil, broken(err)
	}
	img, err := erofs.Open(&memFile{b: meta}, erofs.WithExtraDevices(storeReader{ctx, b.store, m.Data}))
	if err != nil {
		return nil, broken(err)
	}
	l := &layer{root: newDir(), from: storeReader{ctx, b.store, m.Data}}
	at := map[string]*node{".": l.root}
	err = fs.WalkDir(img, ".", func(path string, e fs.DirEntry, err error) error {
		if err != nil {
			return err
		}
		if err := context.Cause(ctx); err != nil {
			return err
		}
		fi, err := e.Info()
		if err != nil {
			return err
		}
		n, err := loadNode(img, path, fi)
		if err != nil {
			return err
		}
		if path == "." {
			*l.root = *n
			return nil
		}
		dir := at[filepath.Dir(path)]
		dir.children[e.Name()] = n
		if n.isDir() {
			at[path] = n
		}
		return nil
	})
	if err != nil {
		return nil, broken(err)
	}
	return l, nil
}

// loadNode is an entry of a layer that was made, as it was when it was made.
func loadNode(img fs.FS, path string, fi fs.FileInfo) (*node, error) {
	st, ok := fi.Sys().(*erofs.Stat)
	if !ok {
		return nil, fmt.Errorf("%s: no attributes", path)
	}
	n := &node{
		mode: unixMode(st.Mode), uid: st.UID, gid: st.GID, sec: fi.ModTime().Unix(), nsec: st.MtimeNs, rdev: st.Rdev,
	}
	for k, v := range st.Xattrs {
		if k == "" {
			continue // padding, see diskXattrs
		}
		if n.xattrs == nil {
			n.xattrs = map[string]string{}
		}
		n.xattrs[strings.TrimSuffix(k, ".")] = v
	}
	switch n.kind() {
	case modeDir:
		n.children = map[string]*node{}
		n.opaque = n.xattrs[xattrOpaque] == "y"
	case modeSymlink:
		link, err := fs.ReadLink(img, path)
		if err != nil {
			return nil, err
		}
		n.link = link
	case modeRegular:
		n.size = fi.Size()
		if r, ok := fi.(interface{ DataRange() []erofs.DataRange }); ok {
			n.ranges = r.DataRange()
		}
	}
	return n, nil
}

// unixMode is the inverse of info.Mode.
func unixMode(m fs.FileMode) uint32 {
	out := uint32(m.Perm())
	for _, b := range []struct {
		go_  fs.FileMode
		unix uint32
	}{{fs.ModeSetuid, 0o4000}, {fs.ModeSetgid, 0o2000}, {fs.ModeSticky, 0o1000}} {
		if m&b.go_ != 0 {
			out |= b.unix
		}
	}
	switch {
	case m.IsDir():
		return out | modeDir
	case m&fs.ModeSymlink != 0:
		return out | modeSymlink
	case m&fs.ModeCharDevice != 0:
		return out | modeChar
	case m&fs.ModeDevice != 0:
		return out | modeBlock
	case m&fs.ModeNamedPipe != 0:
		return out | modeFifo
	case m&fs.ModeSocket != 0:
		return out | modeSocket
	}
	return out | modeRegular
}

// storeReader reads a blob at any place.
type storeReader struct {
	ctx   context.Context //nolint:containedctx // an io.ReaderAt has no other way to give up
	store blob.Store
	d     image.Digest
}

func (s storeReader) ReadAt(p []byte, off int64) (int, error) {
	return s.store.ReadAt(s.ctx, s.d, p, off)
}
