package segment

import (
	"bytes"
	"crypto/sha256"
	"encoding/binary"
	"errors"
	"fmt"
	"hash/crc32"
	"strconv"
	"strings"

	"github.com/klauspost/compress/zstd"

	"github.com/sandsea/sandsea/api/errdefs"
)

const (
	// MaxPayload is the most that one record may hold. None is empty.
	MaxPayload = 1 << 20
	// MaxSize is where a segment ends: a frame that would pass it goes to the next.
	MaxSize = 4 << 20

	version    = 1
	headerSize = 64
	frameHead  = 8
	// blockSize is where a block of a packed segment ends. Blocks hold whole frames.
	blockSize  = 256 << 10
	indexSize  = 36
	footerSize = 64
	// mostBlocks of a packed segment: each but the last, with the frame that did not fit, is more than blockSize.
	mostBlocks = 2 * MaxSize / blockSize
	mostBlock  = blockSize + frameHead + MaxPayload
)

const (
	magicOpen   = "sstj"
	magicSealed = "sstz"
)

var (
	castagnoli = crc32.MakeTable(crc32.Castagnoli)
	le         = binary.LittleEndian
)

// header opens a segment:
//
//	magic [4] | version u32 | first u64 | SHA-256 of the segment before [32] | 0 [12] | CRC of these u32
type header struct {
	first int64
	prev  [sha256.Size]byte
}

func (h header) encode(magic string) []byte {
	b := make([]byte, headerSize)
	copy(b, magic)
	le.PutUint32(b[4:], version)
	le.PutUint64(b[8:], uint64(h.first))
	copy(b[16:48], h.prev[:])
	le.PutUint32(b[60:], crc32.Checksum(b[:60], castagnoli))
	return b
}

func decodeHeader(b []byte, magic string, first int64) (h header, err error) {
	switch {
	case len(b) < headerSize || string(b[:4]) != magic || crc32.Checksum(b[:60], castagnoli) != le.Uint32(b[60:]):
		return h, damaged("header")
	case le.Uint32(b[4:]) != version:
		return h, errdefs.New(errdefs.FailedPrecondition, "", "segment of version %d, this program reads %d", le.Uint32(b[4:]), version).
			WithHint("Read it with the version that wrote it")
	case int64(le.Uint64(b[8:])) != first:
		return h, damaged("header is that of another segment")
	}
	copy(h.prev[:], b[16:48])
	h.first = first
	return h, nil
}

// seed is the checksum that the first frame's is seeded with.
func (h header) seed() uint32 { return le.Uint32(h.encode(magicOpen)[60:]) }

// appendFrame adds a record: length u32 | CRC-32C u32, seeded, over length and payload | payload. It gives the checksum
// that seeds the next.
func appendFrame(b []byte, seed uint32, payload []byte) ([]byte, uint32) {
	var head [frameHead]byte
	le.PutUint32(head[:], uint32(len(payload)))
	sum := crc32.Update(crc32.Update(seed, castagnoli, head[:4]), castagnoli, payload)
	le.PutUint32(head[4:], sum)
	return append(append(b, head[:]...), payload...), sum
}

// short says that a frame goes on behind the bytes that there are.
type short struct{}

func (short) Error() string { return "incomplete" }

// frame reads the first record of b: its payload, which lies in b, how long the frame is, and the checksum that seeds
// the next. It is short{} when b ends inside the frame, DataLoss when it is no frame that follows one with this seed.
func frame(b []byte, seed uint32) (payload []byte, size int, sum uint32, err error) {
	if len(b) < frameHead {
		return nil, 0, 0, short{}
	}
	n := int(le.Uint32(b))
	switch {
	case n == 0 || n > MaxPayload:
		return nil, 0, 0, damaged("a record of %d bytes", n)
	case len(b) < frameHead+n:
		return nil, 0, 0, short{}
	}
	payload = b[frameHead : frameHead+n]
	sum = crc32.Update(crc32.Update(seed, castagnoli, b[:4]), castagnoli, payload)
	if sum != le.Uint32(b[4:]) {
		return nil, 0, 0, damaged("checksum of a record")
	}
	return payload, frameHead + n, sum, nil
}

// block is where a run of frames lies in a packed segment.
type block struct {
	first  int64
	count  uint32
	offset int64
	raw    uint32
	packed uint32
	crc    uint32 // of the packed bytes
	seed   uint32 // of its first frame
}

// footer ends a packed segment, behind the index of its blocks:
//
//	magic [4] | version u32 | blocks u32 | last checksum u32 | records u64 | SHA-256 of the raw segment [32] |
//	CRC of the index u32 | CRC of these u32
type footer struct {
	blocks uint32
	last   uint32
	count  int64
	sum    [sha256.Size]byte
	index  uint32
}

// pack turns the raw bytes of a whole segment into what a .seg file holds. A segment that does not read is DataLoss.
func pack(enc *zstd.Encoder, raw []byte, first int64) ([]byte, error) {
	h, err := decodeHeader(raw, magicOpen, first)
	if err != nil {
		return nil, err
	}
	out := h.encode(magicSealed)
	var blocks []block
	seed, next := h.seed(), first
	for rest := raw[headerSize:]; len(rest) > 0; {
		b := block{first: next, offset: int64(len(out)), seed: seed}
		for int(b.raw) < len(rest) && b.raw < blockSize {
			_, size, sum, err := frame(rest[b.raw:], seed)
			if err != nil {
				return nil, damaged("record %d: %v", next, err)
			}
			b.raw, seed = b.raw+uint32(size), sum
			b.count++
			next++
		}
		out = enc.EncodeAll(rest[:b.raw], out)
		b.packed = uint32(len(out) - int(b.offset))
		b.crc = crc32.Checksum(out[b.offset:], castagnoli)
		rest = rest[b.raw:]
		blocks = append(blocks, b)
	}
	index := make([]byte, 0, indexSize*len(blocks))
	for _, b := range blocks {
		index = le.AppendUint64(index, uint64(b.first))
		index = le.AppendUint32(index, b.count)
		index = le.AppendUint64(index, uint64(b.offset))
		for _, v := range []uint32{b.raw, b.packed, b.crc, b.seed} {
			index = le.AppendUint32(index, v)
		}
	}
	f := footer{
		blocks: uint32(len(blocks)), last: seed, count: next - first, sum: sha256.Sum256(raw),
		index: crc32.Checksum(index, castagnoli),
	}
	return append(append(out, index...), f.encode()...), nil
}

func (f footer) encode() []byte {
	b := make([]byte, 0, footerSize)
	b = append(b, magicSealed...)
	b = le.AppendUint32(b, version)
	b = le.AppendUint32(b, f.blocks)
	b = le.AppendUint32(b, f.last)
	b = le.AppendUint64(b, uint64(f.count))
	b = append(b, f.sum[:]...)
	b = le.AppendUint32(b, f.index)
	return le.AppendUint32(b, crc32.Checksum(b, castagnoli))
}

func decodeFooter(b []byte) (f footer, err error) {
	if len(b) != footerSize || string(b[:4]) != magicSealed || crc32.Checksum(b[:60], castagnoli) != le.Uint32(b[60:]) ||
		le.Uint32(b[4:]) != version {
		return f, damaged("footer")
	}
	f = footer{
		blocks: le.Uint32(b[8:]), last: le.Uint32(b[12:]), count: int64(le.Uint64(b[16:])), index: le.Uint32(b[56:]),
	}
	copy(f.sum[:], b[24:56])
	if f.blocks > mostBlocks || f.count < 0 || f.count > MaxSize {
		return f, damaged("footer")
	}
	return f, nil
}

// decodeIndex reads the index of blocks that end at byte end of the file, and checks that they lie side by side.
func decodeIndex(b []byte, f footer, first, end int64) ([]block, error) {
	if len(b) != indexSize*int(f.blocks) || crc32.Checksum(b, castagnoli) != f.index {
		return nil, damaged("index")
	}
	out := make([]block, f.blocks)
	next, offset := first, int64(headerSize)
	for i := range out {
		e := b[i*indexSize:]
		x := block{
			first: int64(le.Uint64(e)), count: le.Uint32(e[8:]), offset: int64(le.Uint64(e[12:])),
			raw: le.Uint32(e[20:]), packed: le.Uint32(e[24:]), crc: le.Uint32(e[28:]), seed: le.Uint32(e[32:]),
		}
		if x.first != next || x.offset != offset || x.count == 0 || x.raw > mostBlock || x.packed > 2*mostBlock {
			return nil, damaged("index")
		}
		next, offset = next+int64(x.count), offset+int64(x.packed)
		out[i] = x
	}
	if next != first+f.count || offset != end {
		return nil, damaged("index")
	}
	return out, nil
}

// unpack gives the frames of a block.
func unpack(dec *zstd.Decoder, packed []byte, b block) ([]byte, error) {
	if crc32.Checksum(packed, castagnoli) != b.crc {
		return nil, damaged("block of record %d", b.first)
	}
	raw, err := dec.DecodeAll(packed, make([]byte, 0, b.raw))
	if err != nil || len(raw) != int(b.raw) {
		return nil, damaged("block of record %d", b.first)
	}
	return raw, nil
}

// torn reports whether what follows the last whole frame can be what a killed writer, or a file system after a loss of
// power, leaves: the beginning of one frame, or zeros.
func torn(rest []byte) bool {
	_, _, _, err := frame(rest, 0)
	return errors.Is(err, short{}) || len(bytes.Trim(rest, "\x00")) == 0
}

func damaged(format string, args ...any) error {
	return errdefs.New(errdefs.DataLoss, "", "damaged: "+format, args...)
}

const (
	extOpen    = ".open"
	extSealed  = ".seg"
	extPacking = ".tmp"
	// extDamaged keeps what was cut off and was no torn tail, for people.
	extDamaged = ".damaged"
)

func name(first int64, ext string) string { return fmt.Sprintf("%020d%s", first, ext) }

// parseName is the inverse of name.
func parseName(s string) (first int64, ext string, ok bool) {
	digits, ext, found := strings.Cut(s, ".")
	first, err := strconv.ParseInt(digits, 10, 64)
	ext = "." + ext
	return first, ext, found && err == nil && first >= 0 && s == name(first, ext)
}
