package build

import (
	"bufio"
	"bytes"
	"compress/bzip2"
	"errors"
	"fmt"
	"io"

	"github.com/klauspost/compress/gzip"
	"github.com/klauspost/compress/zstd"
	"github.com/ulikunitz/xz"
)

// maxWindow bounds what a decompressor keeps of what it has written, whatever the archive asks for.
const maxWindow = 128 << 20

var errLZ4 = errors.New("is compressed with lz4, which is not read; repack it with gzip, zstd, xz or bzip2")

// decompress finds out by the first bytes how r is compressed. The name is "" for what is not. close frees the
// decompressor, not r.
func decompress(r io.Reader) (out io.Reader, name string, closer func(), err error) {
	br := bufio.NewReaderSize(r, 64<<10)
	head, err := br.Peek(6)
	if err != nil && !errors.Is(err, io.EOF) {
		return nil, "", nil, err
	}
	none := func() {}
	switch {
	case bytes.HasPrefix(head, []byte{0x1f, 0x8b}):
		zr, err := gzip.NewReader(br)
		if err != nil {
			return nil, "", nil, fmt.Errorf("gzip: %w", err)
		}
		return named{zr, "gzip"}, "gzip", func() { _ = zr.Close() }, nil
	case bytes.HasPrefix(head, []byte{0x28, 0xb5, 0x2f, 0xfd}), isSkippable(head):
		zr, err := zstd.NewReader(br, zstd.WithDecoderMaxWindow(maxWindow), zstd.WithDecoderConcurrency(1),
			zstd.WithDecoderLowmem(true))
		if err != nil {
			return nil, "", nil, fmt.Errorf("zstd: %w", err)
		}
		return named{zr, "zstd"}, "zstd", zr.Close, nil
	case bytes.HasPrefix(head, []byte{0xfd, '7', 'z', 'X', 'Z', 0}):
		zr, err := xz.NewReader(&xzGuard{r: br})
		if err != nil {
			return nil, "", nil, fmt.Errorf("xz: %w", err)
		}
		return named{zr, "xz"}, "xz", none, nil
	case bytes.HasPrefix(head, []byte("BZh")):
		return named{bzip2.NewReader(br), "bzip2"}, "bzip2", none, nil
	case bytes.HasPrefix(head, []byte{0x04, 0x22, 0x4d, 0x18}):
		return nil, "", nil, errLZ4
	}
	return br, "", none, nil
}

// isSkippable tells a zstd skippable frame, with which seekable and zstd:chunked files may begin.
func isSkippable(b []byte) bool {
	return len(b) >= 4 && b[0]&0xf0 == 0x50 && b[1] == 0x2a && b[2] == 0x4d && b[3] == 0x18
}

// named says in errors which decompressor they come from.
type named struct {
	r    io.Reader
	name string
}

func (n named) Read(p []byte) (int, error) {
	k, err := n.r.Read(p)
	if err != nil && !errors.Is(err, io.EOF) {
		err = fmt.Errorf("%s: %w", n.name, err)
	}
	return k, err
}

// xzGuard passes an xz file through and follows its framing, since the decoder allocates whatever dictionary a block
// asks for, up to 4 GiB. See the .xz file format, version 1.0.4, and LZMA2's chunk headers.
type xzGuard struct {
	r     io.Reader
	skip  int64  // bytes that mean nothing here
	want  int    // bytes to gather for next
	have  []byte // gathered
	next  func(*xzGuard, []byte) error
	check int64 // size of the check after a block
	block int64 // bytes of the present block, for its padding
	index *xzIndex
}

type xzIndex struct {
	bytes int64
	count int64
	shift uint
}

func (i *xzIndex) add(b byte) {
	if i.shift < 56 {
		i.count |= int64(b&0x7f) << i.shift
	}
	i.shift += 7
}

var errWindow = fmt.Errorf("xz: asks for a dictionary of more than %d MiB", maxWindow>>20)

func (g *xzGuard) Read(p []byte) (int, error) {
	n, err := g.r.Read(p)
	if gerr := g.follow(p[:n]); gerr != nil {
		return 0, gerr
	}
	return n, err
}

func (g *xzGuard) follow(p []byte) error {
	for len(p) > 0 {
		if g.skip > 0 {
			n := min(g.skip, int64(len(p)))
			g.skip -= n
			p = p[n:]
			continue
		}
		if g.next == nil {
			g.want, g.next = 12, (*xzGuard).stream
		}
		n := min(g.want-len(g.have), len(p))
		g.have = append(g.have, p[:n]...)
		p = p[n:]
		if len(g.have) < g.want {
			return nil
		}
		have := g.have
		g.have = g.have[:0]
		if err := g.next(g, have); err != nil {
			return err
		}
	}
	return nil
}

func (g *xzGuard) then(want int, next func(*xzGuard, []byte) error) { g.want, g.next = want, next }

// stream reads a stream header; four zero bytes of stream padding may come before it.
func (g *xzGuard) stream(b []byte) error {
	if bytes.Equal(b[:4], zeroBlock[:4]) {
		rest := bytes.Clone(b[4:])
		g.then(12, (*xzGuard).stream)
		return g.follow(rest)
	}
	g.check = [...]int64{0, 4, 4, 4, 8, 8, 8, 16, 16, 16, 32, 32, 32, 64, 64, 64}[b[7]&0x0f]
	g.then(1, (*xzGuard).blockOrIndex)
	return nil
}

func (g *xzGuard) blockOrIndex(b []byte) error {
	if b[0] == 0 {
		g.index = &xzIndex{bytes: 1}
		g.then(1, (*xzGuard).indexNumber)
		g.block = -1 // the number of records comes first
		return nil
	}
	g.then((int(b[0])+1)*4-1, (*xzGuard).blockHeader)
	return nil
}

// blockHeader looks for the LZMA2 filter and its dictionary size.
func (g *xzGuard) blockHeader(b []byte) error {
	flags, at := b[0], 1
	skipNumber := func() {
		for at < len(b) && b[at]&0x80 != 0 {
			at++
		}
		at++
	}
	if flags&0x40 != 0 {
		skipNumber()
	}
	if flags&0x80 != 0 {
		skipNumber()
	}
	for range flags&3 + 1 {
		if at+2 >= len(b) {
			return errors.New("xz: short block header")
		}
		if b[at] != 0x21 || b[at+1] != 1 {
			return errors.New("xz: a filter other than LZMA2")
		}
		d := b[at+2]
		if d > 40 || int64(2|d&1)<<(d/2+11) > maxWindow {
			return errWindow
		}
		at += 3
	}
	g.block = 0
	g.then(1, (*xzGuard).chunk)
	return nil
}

// chunk reads the control byte of an LZMA2 chunk.
func (g *xzGuard) chunk(b []byte) error {
	g.block++
	switch c := b[0]; {
	case c == 0:
		g.skip = (4-g.block%4)%4 + g.check
		g.then(1, (*xzGuard).blockOrIndex)
	case c < 3:
		g.then(2, (*xzGuard).plainChunk)
	case c < 0x80:
		return errors.New("xz: bad LZMA2 chunk")
	case c < 0xc0:
		g.then(4, (*xzGuard).packedChunk)
	default:
		g.then(5, (*xzGuard).packedChunk)
	}
	return nil
}

func (g *xzGuard) plainChunk(b []byte) error { return g.body(len(b), b[0], b[1]) }

func (g *xzGuard) packedChunk(b []byte) error { return g.body(len(b), b[2], b[3]) }

func (g *xzGuard) body(head int, hi, lo byte) error {
	g.skip = int64(hi)<<8 + int64(lo) + 1
	g.block += int64(head) + g.skip
	g.then(1, (*xzGuard).chunk)
	return nil
}

// indexNumber reads the index byte by byte: a count, then two numbers for each record.
func (g *xzGuard) indexNumber(b []byte) error {
	g.index.bytes++
	if g.block == -1 { // the count, low bits first
		g.index.add(b[0])
		if b[0]&0x80 == 0 {
			g.block = 2 * g.index.count
		}
	} else if b[0]&0x80 == 0 {
		g.block--
	}
	if g.block == 0 {
		// Padding to four bytes, the CRC and the footer; then perhaps another stream.
		g.skip = (4-g.index.bytes%4)%4 + 4 + 12
		g.index = nil
		g.next = nil
		return nil
	}
	g.then(1, (*xzGuard).indexNumber)
	return nil
}
