package segment

import (
	"container/list"
	"crypto/sha256"
	"errors"
	"fmt"
	"hash"
	"io"
	"io/fs"
	"os"
	"path/filepath"
	"slices"
	"sync"

	"github.com/sandsea/sandsea/api/errdefs"
)

// Config of a Log.
type Config struct {
	// Dir holds the segments. It is made with the first record, mode 0700.
	Dir string
	// Keep is how many bytes of the newest segments stay, as they lie on the disk; 0 keeps all. Whole segments go, so up
	// to one more stays.
	Keep int64
}

// Log appends to one directory.
type Log struct {
	pool *Pool
	dir  string
	keep int64

	// mu is held over writes: it is what puts them in order.
	mu    sync.Mutex
	parts []part // oldest first; guarded by mu
	next  int64  // number of the next record; guarded by mu
	// open says that the last part is the one that grows; guarded by mu, as are the fields below, which are of it.
	open bool
	made bool // its name is not on the disk for sure
	seed uint32
	sum  hash.Hash // SHA-256 of its bytes
	prev [sha256.Size]byte
	buf  []byte

	cut int64 // bytes; see Recovered

	slot *list.Element // guarded by pool.mu
}

// part is a segment.
type part struct {
	first  int64
	size   int64
	packed bool
}

// Open takes a log up where it ended. What a killed writer left half written is cut off. If more than that is wrong the
// bytes at fault are set aside, as <first number>.damaged, and numbers go on behind all that can have been there.
func (p *Pool) Open(cfg Config) (*Log, error) {
	l := &Log{pool: p, dir: filepath.Clean(cfg.Dir), keep: cfg.Keep}
	err := p.settle(l.dir)
	if err == nil {
		err = l.recover()
	}
	if err != nil {
		return nil, fmt.Errorf("open log %s: %w", cfg.Dir, err)
	}
	return l, nil
}

// Next is the number that the next record will have.
func (l *Log) Next() int64 {
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.next
}

// Damaged is how many bytes were set aside when the log was opened; 0 after a mere kill.
func (l *Log) Damaged() int64 { return l.cut }

// Append adds a record and gives its number. When it returns every reader sees the record, whatever becomes of this
// process. An error means that it was not added; the log can still be used.
func (l *Log) Append(payload []byte) (int64, error) {
	if len(payload) == 0 || len(payload) > MaxPayload {
		return 0, errdefs.New(errdefs.Invalid, "log record", "%d bytes", len(payload)).
			WithField("payload", "1 byte to 1 MiB").WithHint("Split it")
	}
	l.mu.Lock()
	defer l.mu.Unlock()
	if l.open && l.last().size+frameHead+int64(len(payload)) > MaxSize && l.last().size > headerSize {
		l.endLocked()
	}
	if !l.open {
		if err := l.beginLocked(); err != nil {
			return 0, err
		}
	}
	var sum uint32
	l.buf, sum = appendFrame(l.buf[:0], l.seed, payload)
	if err := l.writeLocked(l.buf); err != nil {
		return 0, err
	}
	l.seed = sum
	if cap(l.buf) > 64<<10 {
		l.buf = nil
	}
	seq := l.next
	l.next++
	return seq, nil
}

// Sync returns when all that was appended is on the disk.
func (l *Log) Sync() error {
	l.mu.Lock()
	defer l.mu.Unlock()
	for i, p := range l.parts {
		if grows := l.open && i == len(l.parts)-1; p.packed || grows {
			continue
		}
		if err := syncFile(l.path(p.first, extOpen)); err != nil && !errors.Is(err, fs.ErrNotExist) {
			return err
		}
	}
	if l.open {
		f, err := l.fileLocked()
		if err != nil {
			return fmt.Errorf("sync log: %w", err)
		}
		defer l.pool.give(l)
		if err := f.Sync(); err != nil {
			return fmt.Errorf("sync log: %w", err)
		}
	}
	if l.made {
		if err := syncFile(l.dir); err != nil {
			return err
		}
		l.made = false
	}
	return nil
}

// Seal ends the newest segment, so that it is packed in the background. A later record begins another.
func (l *Log) Seal() {
	l.mu.Lock()
	defer l.mu.Unlock()
	if l.open && l.next > l.last().first {
		l.endLocked()
		l.pool.pack(l, l.last().first)
	}
}

// Close closes the file. The log may be opened again, by this or another process.
func (l *Log) Close() error {
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.pool.drop(l)
}

func (l *Log) last() *part { return &l.parts[len(l.parts)-1] }

func (l *Log) path(first int64, ext string) string { return filepath.Join(l.dir, name(first, ext)) }

// fileLocked is the newest segment's file, to be given back to the pool.
func (l *Log) fileLocked() (*os.File, error) {
	return l.pool.take(l, func() (*os.File, error) { return os.OpenFile(l.path(l.last().first, extOpen), os.O_WRONLY, 0) })
}

// writeLocked adds bytes to the newest segment.
func (l *Log) writeLocked(b []byte) error {
	f, err := l.fileLocked()
	if err != nil {
		return fmt.Errorf("append to log: %w", err)
	}
	defer l.pool.give(l)
	if n, err := f.WriteAt(b, l.last().size); err != nil {
		if n > 0 {
			err = errors.Join(err, f.Truncate(l.last().size))
		}
		return fmt.Errorf("append to log: %w", err)
	}
	l.sum.Write(b)
	l.last().size += int64(len(b))
	return nil
}

// endLocked lets the newest segment grow no more.
func (l *Log) endLocked() {
	l.open = false
	l.sum.Sum(l.prev[:0])
	_ = l.pool.drop(l)
}

// beginLocked makes the next segment, and then has the one before packed.
func (l *Log) beginLocked() error {
	if len(l.parts) == 0 {
		if err := os.MkdirAll(l.dir, 0o700); err != nil {
			return fmt.Errorf("begin a segment: %w", err)
		}
	}
	h := header{first: l.next, prev: l.prev}
	f, err := l.pool.take(l, func() (*os.File, error) {
		return os.OpenFile(l.path(l.next, extOpen), os.O_WRONLY|os.O_CREATE|os.O_TRUNC, 0o600)
	})
	if err != nil {
		return fmt.Errorf("begin a segment: %w", err)
	}
	defer l.pool.give(l)
	b := h.encode(magicOpen)
	if _, err := f.WriteAt(b, 0); err != nil {
		_ = l.pool.drop(l)
		return fmt.Errorf("begin a segment: %w", err)
	}
	l.open, l.made, l.seed, l.sum = true, true, h.seed(), sha256.New()
	l.sum.Write(b)
	l.parts = append(l.parts, part{first: l.next, size: headerSize})
	if n := len(l.parts); n > 1 && !l.parts[n-2].packed {
		l.pool.pack(l, l.parts[n-2].first)
	}
	l.trimLocked()
	return nil
}

// trimLocked removes the oldest segments that need not be kept. What cannot be removed is tried again with the next.
func (l *Log) trimLocked() {
	if l.keep <= 0 {
		return
	}
	var total int64
	for _, p := range l.parts {
		total += p.size
	}
	for len(l.parts) > 1 && total-l.parts[0].size >= l.keep {
		for _, ext := range []string{extSealed, extOpen, extDamaged} {
			if err := os.Remove(l.path(l.parts[0].first, ext)); err != nil && !errors.Is(err, fs.ErrNotExist) {
				return
			}
		}
		total -= l.parts[0].size
		l.parts = l.parts[1:]
	}
}

// packPart packs a segment that grows no more.
func (l *Log) packPart(first int64) error {
	raw, err := readWhole(l.path(first, extOpen))
	if err != nil {
		return err
	}
	packed, err := pack(l.pool.enc, raw, first)
	if err != nil {
		return err
	}
	tmp := l.path(first, extPacking)
	if err := writeSynced(tmp, packed); err != nil {
		_ = os.Remove(tmp)
		return err
	}
	// Under the lock, so that a segment which is removed as too old meanwhile does not come back.
	l.mu.Lock()
	defer l.mu.Unlock()
	at := slices.IndexFunc(l.parts, func(p part) bool { return p.first == first })
	if at < 0 {
		return os.Remove(tmp)
	}
	if err := os.Rename(tmp, l.path(first, extSealed)); err != nil {
		return fmt.Errorf("pack a segment: %w", err)
	}
	l.parts[at].size, l.parts[at].packed = int64(len(packed)), true
	if err := syncFile(l.dir); err != nil {
		return err
	}
	if err := os.Remove(l.path(first, extOpen)); err != nil {
		return fmt.Errorf("pack a segment: %w", err)
	}
	return nil
}

func writeSynced(path string, b []byte) error {
	f, err := os.OpenFile(path, os.O_WRONLY|os.O_CREATE|os.O_TRUNC, 0o600)
	if err != nil {
		return fmt.Errorf("pack a segment: %w", err)
	}
	_, err = f.Write(b)
	if err = errors.Join(err, f.Sync(), f.Close()); err != nil {
		return fmt.Errorf("pack a segment: %w", err)
	}
	return nil
}

// syncFile syncs a file or directory.
func syncFile(path string) error {
	f, err := os.Open(path)
	if err != nil {
		return fmt.Errorf("sync log: %w", err)
	}
	if err := errors.Join(f.Sync(), f.Close()); err != nil {
		return fmt.Errorf("sync log: %w", err)
	}
	return nil
}

// readWhole reads a segment that may be somewhat larger than it should be.
func readWhole(path string) ([]byte, error) {
	f, err := os.Open(path)
	if err != nil {
		return nil, fmt.Errorf("read a segment: %w", err)
	}
	defer f.Close()
	b, err := io.ReadAll(io.LimitReader(f, 2*MaxSize))
	if err != nil {
		return nil, fmt.Errorf("read a segment: %w", err)
	}
	return b, nil
}

// recover finds the segments, mends the newest and sets the state from it.
func (l *Log) recover() error {
	if err := l.find(); err != nil || len(l.parts) == 0 {
		return err
	}
	if err := l.resume(); err != nil {
		return err
	}
	for i, p := range l.parts {
		if grows := l.open && i == len(l.parts)-1; !p.packed && !grows {
			l.pool.pack(l, p.first)
		}
	}
	l.trimLocked()
	return nil
}

// find lists the segments, and removes what a packing that was killed left.
func (l *Log) find() error {
	entries, err := os.ReadDir(l.dir)
	if errors.Is(err, fs.ErrNotExist) {
		return nil
	}
	if err != nil {
		return err
	}
	for _, e := range entries { // sorted: a segment's .open comes before its .seg
		first, ext, ok := parseName(e.Name())
		if !ok || ext == extDamaged {
			continue
		}
		st, err := e.Info()
		if err != nil {
			return err
		}
		twice := len(l.parts) > 0 && l.last().first == first
		remove := ""
		switch {
		case ext == extPacking:
			remove = extPacking
		case !twice:
			l.parts = append(l.parts, part{first: first, size: st.Size(), packed: ext == extSealed})
		case !l.whole(first): // power was lost before it was on the disk; the other is whole
			remove = extSealed
		default:
			*l.last(), remove = part{first: first, size: st.Size(), packed: true}, extOpen
		}
		if remove == "" {
			continue
		}
		if err := os.Remove(l.path(first, remove)); err != nil {
			return err
		}
	}
	return nil
}

// whole reports whether a segment is packed to its end.
func (l *Log) whole(first int64) bool {
	_, err := readFooter(l.path(first, extSealed))
	return !errors.Is(err, errdefs.DataLoss)
}

func readFooter(path string) (f footer, err error) {
	file, err := os.Open(path)
	if err != nil {
		return f, err
	}
	defer file.Close()
	st, err := file.Stat()
	if err != nil {
		return f, err
	}
	b := make([]byte, footerSize)
	if st.Size() < headerSize+footerSize {
		return f, damaged("too short")
	}
	if _, err := file.ReadAt(b, st.Size()-footerSize); err != nil {
		return f, err
	}
	return decodeFooter(b)
}

// behindAll is a number that no record of these bytes, the first of which had this number, can have had.
func behindAll(first, size int64) int64 { return first + size/(frameHead+1) + 1 }

// resume sets the state from the newest segment. Its file is cut behind the last whole record.
func (l *Log) resume() error {
	p := *l.last()
	if p.packed {
		f, err := readFooter(l.path(p.first, extSealed))
		if errors.Is(err, errdefs.DataLoss) { // who reads it is told
			l.next, l.cut = behindAll(p.first, 2*MaxSize), p.size
			return nil
		}
		l.next, l.prev = p.first+f.count, f.sum
		return err
	}
	path := l.path(p.first, extOpen)
	raw, err := readWhole(path)
	if err != nil {
		return err
	}
	if len(raw) < headerSize {
		return l.resumeBefore(p.first)
	}
	h, err := decodeHeader(raw, magicOpen, p.first)
	if errors.Is(err, errdefs.DataLoss) {
		l.parts = l.parts[:len(l.parts)-1]
		l.next, l.cut = behindAll(p.first, p.size), p.size
		return os.Rename(path, l.path(p.first, extDamaged))
	}
	if err != nil {
		return err
	}
	good := headerSize
	l.next, l.seed, l.sum, l.open = p.first, h.seed(), sha256.New(), true
	for {
		_, size, sum, err := frame(raw[good:], l.seed)
		if err != nil {
			break
		}
		good, l.seed = good+size, sum
		l.next++
	}
	l.sum.Write(raw[:good])
	l.last().size = int64(good)
	if rest := raw[good:]; len(rest) > 0 {
		return l.cutOff(path, rest)
	}
	return nil
}

// resumeBefore removes a segment whose writer was killed between making the file and its first bytes.
func (l *Log) resumeBefore(first int64) error {
	if err := os.Remove(l.path(first, extOpen)); err != nil {
		return err
	}
	l.parts = l.parts[:len(l.parts)-1]
	if len(l.parts) > 0 {
		if err := l.resume(); err != nil {
			return err
		}
	}
	if l.open {
		l.endLocked()
	}
	l.next = max(l.next, first)
	return nil
}

// cutOff cuts the rest, in which no record can be read, off the newest segment.
func (l *Log) cutOff(path string, rest []byte) error {
	if !torn(rest) {
		if err := writeSynced(l.path(l.last().first, extDamaged), rest); err != nil {
			return err
		}
		l.cut = int64(len(rest))
		l.next = behindAll(l.next, l.cut)
	}
	if err := os.Truncate(path, l.last().size); err != nil {
		return err
	}
	if l.cut > 0 {
		l.endLocked()
	}
	return nil
}
