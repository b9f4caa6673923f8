package build

import (
	"bytes"
	"context"
	"crypto/sha256"
	"encoding/hex"
	"errors"
	"fmt"
	"hash"
	"io"

	"github.com/erofs/go-erofs"

	"github.com/sandsea/sandsea/internal/image"
	"github.com/sandsea/sandsea/internal/layers/blob"
)

const (
	blockSize = 4096
	// holeSize is the shortest run of zeros that is left out of the data file, a multiple of the block size.
	holeSize = 64 << 10
)

// layer is a layer in the making: a tree in memory and the staged data file that its contents go to as they are read.
type layer struct {
	root  *node
	data  blob.Writer
	from  io.ReaderAt // where contents are read: data, or the blob of a layer that was made earlier
	off   int64       // of the data file's end, always a multiple of the block size between files
	bytes int64       // of content, holes included

	chunk      hash.Hash // of the chunk in the making
	chunkBytes int64
	chunks     []string

	buf []byte
}

func newLayer(ctx context.Context, store blob.Creator) (*layer, error) {
	w, err := store.Create(ctx)
	if err != nil {
		return nil, err
	}
	return &layer{root: newDir(), data: w, from: w, chunk: sha256.New(), buf: make([]byte, holeSize)}, nil
}

// Write appends to the data file and its chunk digests.
func (l *layer) Write(p []byte) (int, error) {
	n, err := l.data.Write(p)
	l.off += int64(n)
	for p := p[:n]; len(p) > 0; {
		take := min(int64(len(p)), ChunkSize-l.chunkBytes)
		l.chunk.Write(p[:take])
		if l.chunkBytes += take; l.chunkBytes == ChunkSize {
			l.endChunk()
		}
		p = p[take:]
	}
	if err != nil {
		err = &writeError{err}
	}
	return n, err
}

func (l *layer) endChunk() {
	l.chunks = append(l.chunks, hex.EncodeToString(l.chunk.Sum(nil)))
	l.chunk.Reset()
	l.chunkBytes = 0
}

// file takes the content of n from r, which holds n.size bytes.
func (l *layer) file(n *node, r io.Reader) error {
	var ranges []erofs.DataRange
	add := func(off, size int64) {
		if k := len(ranges); k > 0 {
			last := &ranges[k-1]
			if (off < 0 && last.Offset < 0) || (off >= 0 && last.Offset >= 0 && last.Offset+last.Size == off) {
				last.Size += size
				return
			}
		}
		ranges = append(ranges, erofs.DataRange{Offset: off, Size: size})
	}
	for left := n.size; left > 0; {
		buf := l.buf[:min(left, holeSize)]
		if _, err := io.ReadFull(r, buf); err != nil {
			if errors.Is(err, io.EOF) {
				err = io.ErrUnexpectedEOF
			}
			return err
		}
		left -= int64(len(buf))
		inHole := len(ranges) > 0 && ranges[len(ranges)-1].Offset < 0
		if (len(buf) == holeSize || inHole) && allZero(buf) {
			add(-1, int64(len(buf)))
			continue
		}
		at := l.off
		if _, err := l.Write(buf); err != nil {
			return err
		}
		add(at, int64(len(buf)))
	}
	l.bytes += n.size
	n.ranges = ranges
	return l.pad()
}

func (l *layer) pad() error {
	if rest := l.off % blockSize; rest != 0 {
		_, err := l.Write(zeroBlock[:blockSize-rest])
		return err
	}
	return nil
}

var zeroBlock [blockSize]byte

func allZero(b []byte) bool {
	for len(b) > blockSize {
		if !bytes.Equal(b[:blockSize], zeroBlock[:]) {
			return false
		}
		b = b[blockSize:]
	}
	return bytes.Equal(b, zeroBlock[:len(b)])
}

// content reads what a node of this layer holds.
func (l *layer) content(n *node) io.Reader {
	parts := make([]io.Reader, 0, len(n.ranges))
	for _, r := range n.ranges {
		if r.Offset < 0 {
			parts = append(parts, io.LimitReader(zeros{}, r.Size))
		} else {
			parts = append(parts, io.NewSectionReader(l.from, r.Offset, r.Size))
		}
	}
	return io.MultiReader(parts...)
}

type zeros struct{}

func (zeros) Read(p []byte) (int, error) {
	clear(p)
	return len(p), nil
}

// staged is a layer that is written whole and not yet visible.
type staged struct {
	info     image.Layer
	data     blob.Writer
	meta     blob.Writer
	manifest []byte
}

// finish writes the metadata image and the manifest. The layer's tree stays for look-ups by layers above.
func (l *layer) finish(ctx context.Context, store blob.Creator, source string) (_ *staged, err error) {
	l.root.overlay()
	files := l.root.number()
	if l.off == 0 { // a device of no size would be a case of its own everywhere
		if _, err := l.Write(zeroBlock[:]); err != nil {
			return nil, err
		}
	}
	if l.chunkBytes > 0 {
		l.endChunk()
	}
	meta, err := l.metadata()
	if err != nil {
		return nil, fmt.Errorf("write EROFS metadata: %w", err)
	}
	w, err := store.Create(ctx)
	if err != nil {
		return nil, err
	}
	defer func() {
		if err != nil {
			err = errors.Join(err, w.Abort())
		}
	}()
	if _, err := w.Write(meta); err != nil {
		return nil, err
	}
	m := Manifest{
		Schema: ManifestSchema, Meta: w.Digest(), Data: l.data.Digest(), MetaBytes: int64(len(meta)),
		DataBytes: l.off, Bytes: l.bytes, Files: files, ChunkSize: ChunkSize, Chunks: l.chunks,
	}
	b, d, err := m.encode()
	if err != nil {
		return nil, err
	}
	return &staged{
		info: image.Layer{Digest: d, Bytes: l.bytes, Files: files, Source: source},
		data: l.data, meta: w, manifest: b,
	}, nil
}

// commit makes the layer's blobs visible, the manifest last.
func (s *staged) commit(ctx context.Context, store blob.Store) error {
	if _, err := s.data.Commit(ctx); err != nil {
		return err
	}
	if _, err := s.meta.Commit(ctx); err != nil {
		return err
	}
	return store.Put(ctx, s.info.Digest, bytes.NewReader(s.manifest))
}

func (s *staged) abort() error { return errors.Join(s.data.Abort(), s.meta.Abort()) }

// metadata gives the EROFS image of the tree: entries sorted, so that equal trees give equal images.
func (l *layer) metadata() ([]byte, error) {
	var out memFile
	w := erofs.Create(&out, erofs.WithBlockSize(blockSize), erofs.WithBuildTime(0, 0))
	src := deviceFS{treeFS{l.root}, uint64(l.off / blockSize)}
	if err := w.CopyFrom(src, erofs.MetadataOnly()); err != nil {
		return nil, err
	}
	if err := w.Close(); err != nil {
		return nil, err
	}
	if err := relink(out.b, l.root); err != nil {
		return nil, err
	}
	return out.b, nil
}

// memFile is a file in memory for the EROFS writer.
type memFile struct {
	b   []byte
	off int
}

func (m *memFile) Write(p []byte) (int, error) {
	if need := m.off + len(p); need > len(m.b) {
		if need > cap(m.b) {
			m.b = append(make([]byte, 0, max(need, 2*cap(m.b))), m.b...)
		}
		m.b = m.b[:need]
	}
	m.off += copy(m.b[m.off:], p)
	return len(p), nil
}

func (m *memFile) ReadAt(p []byte, off int64) (int, error) {
	return bytes.NewReader(m.b).ReadAt(p, off)
}

func (m *memFile) Seek(off int64, whence int) (int64, error) {
	switch whence {
	case io.SeekCurrent:
		off += int64(m.off)
	case io.SeekEnd:
		off += int64(len(m.b))
	}
	if off < 0 || off > int64(len(m.b)) {
		return 0, fmt.Errorf("seek to %d of %d", off, len(m.b))
	}
	m.off = int(off)
	return off, nil
}
