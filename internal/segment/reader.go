package segment

import (
	"crypto/sha256"
	"errors"
	"fmt"
	"hash"
	"io"
	"io/fs"
	"os"
	"slices"
	"syscall"

	"github.com/klauspost/compress/zstd"

	"github.com/sandsea/sandsea/api/errdefs"
)

// readAhead is how much of a growing segment is read at once.
const readAhead = 64 << 10

// Reader reads one directory, while it is written or later, in this process or another. It trusts nothing that lies in
// it: whatever the files hold, it gives the records that were appended, or an error, and uses a few MiB at most.
type Reader struct {
	root *os.Root
	dir  string
	next int64 // number of the record that is wanted

	cur *current
	dec *zstd.Decoder
	// before is the segment that was read to its end, if it was read from its start.
	before *finished
}

// current is the segment that is being read.
type current struct {
	f      *os.File
	first  int64
	packed bool
	seq    int64 // of the record at the beginning of buf
	seed   uint32
	buf    []byte

	// Of a growing one.
	offset int64 // in the file, behind buf
	sum    hash.Hash

	// Of a packed one.
	footer footer
	blocks []block // those not read yet
	skip   bool    // the first were not read
}

// finished says what the next segment must say of the one before.
type finished struct {
	next int64
	sum  [sha256.Size]byte
}

// OpenReader reads the directory dir below root from record number from on. Nothing outside root is ever opened,
// whatever symbolic links there are. The directory need not exist yet. The root must stay open.
func OpenReader(root *os.Root, dir string, from int64) *Reader {
	return &Reader{root: root, dir: dir, next: max(0, from)}
}

// Close gives the file back. Idempotent.
func (r *Reader) Close() {
	r.leave()
	if r.dec != nil {
		r.dec.Close()
		r.dec = nil
	}
}

func (r *Reader) leave() {
	if r.cur != nil {
		_ = r.cur.f.Close() // read only
		r.cur = nil
	}
}

// Next gives the next record that there is, and its number, which is higher than expected where records are gone. The
// payload holds until the next call. At the end of what there is it gives io.EOF, and may be called again later. Bytes
// that are no record are DataLoss; called again it goes on in the next segment, if there is one.
func (r *Reader) Next() (seq int64, payload []byte, err error) {
	for {
		if r.cur == nil {
			if err := r.enter(); err != nil {
				return 0, nil, err
			}
		}
		seq, payload, err := r.record()
		switch {
		case err == nil && seq < r.next:
			continue
		case err == nil:
			r.next = seq + 1
			return seq, payload, nil
		case errors.Is(err, io.EOF):
			if err := r.pass(); err != nil {
				return 0, nil, err
			}
		case errors.Is(err, errdefs.DataLoss):
			return 0, nil, r.skipDamage(err)
		default:
			return 0, nil, r.failed(err)
		}
	}
}

func (r *Reader) failed(err error) error {
	r.leave()
	return fmt.Errorf("read log %s: %w", r.dir, err)
}

// skipDamage leaves a damaged segment for the next, and tells of it.
func (r *Reader) skipDamage(err error) error {
	object := fmt.Sprintf("log %s", r.dir)
	if r.cur != nil {
		object += fmt.Sprintf(", segment %d", r.cur.first)
		if _, later, lerr := r.neighbours(r.cur.first); lerr == nil && later != nil {
			r.next = max(r.next, later.first)
			r.before = nil
		}
	}
	r.leave()
	e := *errdefs.From(err)
	e.Object, e.Err = object, err
	return &e
}

// file is a segment's file.
type file struct {
	first  int64
	packed bool
}

// neighbours finds the segment that a record lies in, or would, and the one after. Either may be nil.
func (r *Reader) neighbours(seq int64) (here, later *file, err error) {
	files, err := r.files()
	if err != nil {
		return nil, nil, err
	}
	for i, f := range files {
		if f.first > seq {
			return here, &files[i], nil
		}
		here = &files[i]
	}
	return here, nil, nil
}

// files lists the segments, oldest first. A directory that changes while it is read may show neither of a segment's two
// names: what was seen twice holds.
func (r *Reader) files() ([]file, error) {
	files, err := r.list()
	for range 100 {
		again, aerr := r.list()
		if err = errors.Join(err, aerr); err != nil || slices.Equal(files, again) {
			return files, err
		}
		files = again
	}
	return nil, errdefs.New(errdefs.Unavailable, "", "its segments change all the time")
}

func (r *Reader) list() (files []file, err error) {
	d, err := r.root.Open(r.dir)
	if errors.Is(err, fs.ErrNotExist) {
		return nil, nil
	}
	if err != nil {
		return nil, err
	}
	defer d.Close()
	names, err := d.Readdirnames(-1)
	if err != nil {
		return nil, err
	}
	slices.Sort(names)
	for _, n := range names { // of both names of a segment, .seg comes later
		first, ext, ok := parseName(n)
		if !ok || ext != extOpen && ext != extSealed {
			continue
		}
		if n := len(files); n > 0 && files[n-1].first == first {
			files = files[:n-1]
		}
		files = append(files, file{first: first, packed: ext == extSealed})
	}
	return files, nil
}

// enter opens the segment of the next record. io.EOF says that there is none yet.
func (r *Reader) enter() error {
	// A segment may be packed, or removed as too old, between the look at the directory and the opening of the file.
	for range 100 {
		here, later, err := r.neighbours(r.next)
		if err != nil {
			return r.failed(err)
		}
		if here == nil {
			here = later
		}
		if here == nil {
			return io.EOF
		}
		err = r.open(*here)
		switch {
		case errors.Is(err, fs.ErrNotExist):
			continue
		case errors.Is(err, io.EOF):
			return io.EOF
		case errors.Is(err, errdefs.DataLoss):
			return r.skipDamage(err)
		case err != nil:
			return r.failed(err)
		}
		return nil
	}
	return r.failed(errdefs.New(errdefs.Unavailable, "", "its segments change all the time"))
}

// open makes a segment the current one.
func (r *Reader) open(at file) (err error) {
	ext := extOpen
	if at.packed {
		ext = extSealed
	}
	f, err := r.root.OpenFile(r.dir+"/"+name(at.first, ext), os.O_RDONLY|syscall.O_NONBLOCK, 0) // a FIFO must not hold us up
	if err != nil {
		return err
	}
	c := &current{f: f, first: at.first, seq: at.first, packed: at.packed}
	r.leave()
	r.cur = c
	st, err := f.Stat()
	if err != nil {
		return err
	}
	if !st.Mode().IsRegular() || st.Size() > 2*MaxSize {
		return damaged("no segment")
	}
	head := make([]byte, headerSize)
	if _, err := f.ReadAt(head, 0); err != nil && !errors.Is(err, io.EOF) {
		return err
	} else if err != nil && !at.packed { // it is being made
		r.leave()
		return io.EOF
	}
	magic := magicOpen
	if at.packed {
		magic = magicSealed
	}
	h, err := decodeHeader(head, magic, at.first)
	if err != nil {
		return err
	}
	if b := r.before; b != nil && b.next == at.first && b.sum != h.prev {
		return damaged("it does not follow the segment before it")
	}
	r.before = nil
	c.seed = h.seed()
	if !at.packed {
		c.offset, c.sum = headerSize, sha256.New()
		c.sum.Write(head)
		return nil
	}
	return c.readIndex(st.Size(), r.next)
}

// readIndex finds the blocks of a packed segment, from that of record number from on.
func (c *current) readIndex(size, from int64) error {
	if size < headerSize+footerSize {
		return damaged("too short")
	}
	b := make([]byte, footerSize)
	if err := c.readAt(b, size-footerSize); err != nil {
		return err
	}
	f, err := decodeFooter(b)
	if err != nil {
		return err
	}
	end := size - footerSize - indexSize*int64(f.blocks)
	if end < headerSize {
		return damaged("too short")
	}
	index := make([]byte, indexSize*int(f.blocks))
	if err := c.readAt(index, end); err != nil {
		return err
	}
	c.footer = f
	if c.blocks, err = decodeIndex(index, f, c.first, end); err != nil {
		return err
	}
	for len(c.blocks) > 1 && c.blocks[1].first <= from {
		c.blocks, c.skip = c.blocks[1:], true
	}
	return nil
}

// readAt reads what a packed segment must hold.
func (c *current) readAt(b []byte, offset int64) error {
	_, err := c.f.ReadAt(b, offset)
	if errors.Is(err, io.EOF) {
		return damaged("it ends early")
	}
	return err
}

// record gives the next record of the current segment, io.EOF at the end of what there is of it.
func (r *Reader) record() (int64, []byte, error) {
	c := r.cur
	for {
		payload, size, sum, err := frame(c.buf, c.seed)
		if err == nil {
			seq := c.seq
			if c.sum != nil {
				c.sum.Write(c.buf[:size])
			}
			c.buf, c.seed, c.seq = c.buf[size:], sum, seq+1
			return seq, payload, nil
		}
		if !errors.Is(err, short{}) {
			return 0, nil, err
		}
		if c.packed {
			err = r.nextBlock()
		} else {
			err = c.more()
		}
		if err != nil {
			return 0, nil, err
		}
	}
}

// more reads on in a growing segment.
func (c *current) more() error {
	want := readAhead
	if len(c.buf) >= 4 {
		want = max(want, frameHead+int(min(le.Uint32(c.buf), MaxPayload)))
	}
	buf := make([]byte, len(c.buf), len(c.buf)+want)
	copy(buf, c.buf)
	n, err := c.f.ReadAt(buf[len(buf):cap(buf)], c.offset)
	if n > 0 {
		c.buf, c.offset = buf[:len(buf)+n], c.offset+int64(n)
		return nil
	}
	return err
}

// nextBlock reads on in a packed segment.
func (r *Reader) nextBlock() error {
	c := r.cur
	if len(c.buf) > 0 {
		return damaged("a record goes on behind its block")
	}
	if len(c.blocks) == 0 {
		if c.seed != c.footer.last || c.seq != c.first+c.footer.count {
			return damaged("records are missing")
		}
		return io.EOF
	}
	b := c.blocks[0]
	if !c.skip && (b.seed != c.seed || b.first != c.seq) {
		return damaged("records are missing")
	}
	c.blocks, c.skip = c.blocks[1:], false
	packed := make([]byte, b.packed)
	if err := c.readAt(packed, b.offset); err != nil {
		return err
	}
	if r.dec == nil {
		dec, err := zstd.NewReader(nil, zstd.WithDecoderConcurrency(1), zstd.WithDecoderMaxMemory(2*mostBlock),
			zstd.WithDecoderLowmem(true))
		if err != nil {
			return err
		}
		r.dec = dec
	}
	raw, err := unpack(r.dec, packed, b)
	if err != nil {
		return err
	}
	c.buf, c.seed, c.seq = raw, b.seed, b.first
	return nil
}

// pass goes on to the next segment if there is one; io.EOF says that there is none yet.
func (r *Reader) pass() error {
	c := r.cur
	_, later, err := r.neighbours(c.first)
	if err != nil {
		return r.failed(err)
	}
	if later == nil {
		return io.EOF
	}
	if !c.packed {
		// All that it ever held was there before the later one was made: what is there now is all.
		if err := c.more(); err == nil {
			return nil
		} else if !errors.Is(err, io.EOF) {
			return r.failed(err)
		}
		if len(c.buf) > 0 {
			return r.skipDamage(damaged("the last record is cut"))
		}
	}
	f := &finished{next: c.seq}
	if c.packed {
		f.sum = c.footer.sum
	} else {
		c.sum.Sum(f.sum[:0])
	}
	r.leave()
	r.next, r.before = max(r.next, later.first), f
	return r.enter()
}
