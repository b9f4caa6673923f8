package etcd

import (
	"context"
	"encoding/binary"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"os"
	"path/filepath"
	"runtime"
	"sync/atomic"
	"time"

	bolt "go.etcd.io/bbolt"
	berrors "go.etcd.io/bbolt/errors"
	"go.etcd.io/etcd/server/v3/embed"
	"go.etcd.io/etcd/server/v3/storage/schema"
	"go.etcd.io/etcd/server/v3/storage/wal"
	"go.etcd.io/etcd/server/v3/storage/wal/walpb"
	"go.uber.org/zap"
	"go.uber.org/zap/zapcore"

	"github.com/sandsea/sandsea/api/errdefs"
)

// What etcd finds wrong with its files it answers with a panic, with the end of the process, in goroutines of its own, or
// by waiting for ever. So database and log are read here first, the database page by page, since a map of a damaged file
// cannot be read without the risk of a fault. What etcd still says at its start is caught.

// databaseWait is how long another process may hold the database.
const databaseWait = time.Second

// damaged is the error of a store whose files are not what etcd wrote.
func damaged(dir, format string, args ...any) *errdefs.Error {
	return errdefs.New(errdefs.DataLoss, "store "+dir, "is damaged: "+format, args...).
		WithHint("Restore it from a backup, or start with a new data directory: --data DIR")
}

// start reads the files and runs the member. What etcd panics with meanwhile goes to last.
func start(ctx context.Context, ec *embed.Config, last lastWord) (*embed.Etcd, error) {
	applied, err := checkDatabase(ctx, ec.Dir)
	if err != nil {
		return nil, err
	}
	if err := checkLog(ec.Dir, applied); err != nil {
		return nil, err
	}
	defer func() {
		p := recover()
		if _, bug := p.(runtime.Error); bug {
			p = "etcd cannot read its files"
		}
		if p != nil {
			last.say(fmt.Sprint(p))
		}
	}()
	e, err := embed.StartEtcd(ec)
	if err != nil {
		err = errdefs.New(errdefs.FailedPrecondition, "store "+ec.Dir, "does not start: %v", err).
			WithHint("See the log, or restore the folder from a backup").Wrap(err)
	}
	return e, err
}

// lastWord is what etcd says before it would end the process; the goroutine that says it ends instead. After over such a
// message ends the process.
type lastWord struct {
	words chan string
	ended *atomic.Bool
}

func newLastWord() lastWord { return lastWord{make(chan string, 1), new(atomic.Bool)} }

func (l lastWord) over() { l.ended.Store(true) }

// say keeps the first word.
func (l lastWord) say(word string) {
	select {
	case l.words <- word:
	default:
	}
}

// OnWrite makes lastWord a hook of zap.
func (l lastWord) OnWrite(ce *zapcore.CheckedEntry, fields []zapcore.Field) {
	switch {
	case !l.ended.Load():
	case ce.Level == zapcore.FatalLevel:
		zapcore.WriteThenFatal.OnWrite(ce, fields)
	default:
		zapcore.WriteThenPanic.OnWrite(ce, fields)
	}
	word := ce.Message
	for _, f := range fields {
		if err, ok := f.Interface.(error); ok {
			word += ": " + err.Error()
		}
	}
	l.say(word)
	runtime.Goexit()
}

// checkDatabase reads the member's database, if there is one, and refuses one that etcd could not read. The pages that it
// leaves in memory are those that etcd maps next. applied is the number of the last entry of the log that is in it.
func checkDatabase(ctx context.Context, dir string) (applied uint64, err error) {
	path := filepath.Join(dir, "member", "snap", "db")
	f, err := os.Open(path)
	if errors.Is(err, fs.ErrNotExist) {
		return 0, nil
	}
	if err != nil {
		return 0, fmt.Errorf("read the store's database: %w", err)
	}
	defer f.Close()
	info, err := f.Stat()
	if err != nil {
		return 0, fmt.Errorf("read the store's database: %w", err)
	}
	if info.Size() == 0 {
		return 0, nil // made, and nothing written yet; etcd fills it from the log
	}
	db, err := bolt.Open(path, 0o600, &bolt.Options{ReadOnly: true, Timeout: databaseWait})
	if errors.Is(err, berrors.ErrTimeout) {
		return 0, errdefs.New(errdefs.FailedPrecondition, "store "+dir, "another process has its database open").
			WithHint("End it, or choose another: --data DIR").Wrap(err)
	}
	if err != nil {
		return 0, damaged(dir, "its database %s cannot be opened: %v", path, err)
	}
	defer db.Close()
	err = db.View(func(tx *bolt.Tx) error {
		if tx.Size() > info.Size() {
			return fmt.Errorf("it has %d of %d bytes", info.Size(), tx.Size())
		}
		size := db.Info().PageSize
		w := &walk{ctx: ctx, file: f, size: size, seen: make([]bool, tx.Size()/int64(size))}
		if err := w.page(uint64(tx.Cursor().Bucket().Root())); err != nil {
			return err
		}
		if meta := tx.Bucket(schema.Meta.Name()); meta != nil {
			if v := meta.Get(schema.MetaConsistentIndexKeyName); len(v) == 8 {
				applied = binary.BigEndian.Uint64(v)
			}
		}
		return nil
	})
	if ctx.Err() != nil {
		return 0, context.Cause(ctx)
	}
	if err != nil {
		return 0, damaged(dir, "its database %s: %v", path, err)
	}
	return applied, nil
}

// checkLog reads the member's log as etcd does, without its repairs, and refuses one that does not reach as far as the
// database: etcd would cut the log at the damage and then wait for what is gone.
func checkLog(dir string, applied uint64) error {
	path := filepath.Join(dir, "member", "wal")
	if !wal.Exist(path) {
		if applied > 0 {
			return damaged(dir, "its log %s is gone", path)
		}
		return nil
	}
	quiet := zap.NewNop()
	var from walpb.Snapshot
	snaps, err := wal.ValidSnapshotEntries(quiet, path)
	if err != nil {
		return damaged(dir, "its log %s: %v", path, err)
	}
	if len(snaps) > 0 {
		at := snaps[len(snaps)-1]
		from.Index, from.Term = at.Index, at.Term
	}
	w, err := wal.OpenForRead(quiet, path, &from)
	if err != nil {
		return damaged(dir, "its log %s: %v", path, err)
	}
	defer w.Close()
	_, _, entries, err := w.ReadAll()
	if err != nil {
		return damaged(dir, "its log %s: %v", path, err)
	}
	end := from.GetIndex()
	if n := len(entries); n > 0 {
		end = entries[n-1].GetIndex()
	}
	if end < applied {
		return damaged(dir, "its log %s can be read up to entry %d, the database has entry %d", path, end, applied)
	}
	return nil
}

// The layout of a page of bbolt: a header, elements, and what these point to, counted from the element.
const (
	pageHeader  = 16 // id 8, flags 2, count 2, overflow 4
	pageElement = 16 // branch: position 4, key size 4, page 8; leaf: flags 4, position 4, key size 4, value size 4
	bucketSize  = 16 // root page 8, sequence 8; root 0: a page follows inline
	branchPage  = 1
	leafPage    = 2
	isBucket    = 1
	rootBranch  = 64 // most pages from the root down
)

// walk goes through all pages that a database uses.
type walk struct {
	ctx  context.Context
	file io.ReaderAt
	size int
	// seen are the pages that somebody points to; the first two are none of the tree.
	seen  []bool
	depth int
}

func (w *walk) page(id uint64) error {
	if err := context.Cause(w.ctx); err != nil {
		return err
	}
	if w.depth++; w.depth > rootBranch {
		return fmt.Errorf("page %d is more than %d pages below the root", id, rootBranch)
	}
	defer func() { w.depth-- }()
	if id < 2 || id >= uint64(len(w.seen)) {
		return fmt.Errorf("page %d is not one of its %d pages", id, len(w.seen))
	}
	buf := make([]byte, w.size)
	if _, err := w.file.ReadAt(buf, int64(id)*int64(w.size)); err != nil {
		return fmt.Errorf("read page %d: %w", id, err)
	}
	if got := binary.NativeEndian.Uint64(buf); got != id {
		return fmt.Errorf("page %d says that it is page %d", id, got)
	}
	more := uint64(binary.NativeEndian.Uint32(buf[12:]))
	if id+more >= uint64(len(w.seen)) {
		return fmt.Errorf("page %d claims %d pages more than there are", id, id+more+1-uint64(len(w.seen)))
	}
	for i := id; i <= id+more; i++ {
		if w.seen[i] {
			return fmt.Errorf("page %d is used twice", i)
		}
		w.seen[i] = true
	}
	if more > 0 {
		buf = make([]byte, (more+1)*uint64(w.size))
		if _, err := w.file.ReadAt(buf, int64(id)*int64(w.size)); err != nil {
			return fmt.Errorf("read page %d: %w", id, err)
		}
	}
	if err := w.elements(buf); err != nil {
		return fmt.Errorf("page %d: %w", id, err)
	}
	return nil
}

// elements reads what a page, of its own or inline, holds, and follows it.
func (w *walk) elements(page []byte) error {
	flags, count := binary.NativeEndian.Uint16(page[8:]), int(binary.NativeEndian.Uint16(page[10:]))
	if flags != branchPage && flags != leafPage {
		return fmt.Errorf("it is of kind %#x", flags)
	}
	if pageHeader+count*pageElement > len(page) || flags == branchPage && count == 0 {
		return fmt.Errorf("it claims %d elements", count)
	}
	for i := range count {
		at := pageHeader + i*pageElement
		num := func(off int) uint64 { return uint64(binary.NativeEndian.Uint32(page[at+off:])) }
		if flags == branchPage {
			if uint64(at)+num(0)+num(4) > uint64(len(page)) {
				return fmt.Errorf("element %d lies outside", i)
			}
			if err := w.page(binary.NativeEndian.Uint64(page[at+8:])); err != nil {
				return err
			}
			continue
		}
		value := uint64(at) + num(4) + num(8)
		if value+num(12) > uint64(len(page)) {
			return fmt.Errorf("element %d lies outside", i)
		}
		if num(0)&isBucket == 0 {
			continue
		}
		if err := w.bucket(page[value : value+num(12)]); err != nil {
			return err
		}
	}
	return nil
}

func (w *walk) bucket(value []byte) error {
	if len(value) < bucketSize {
		return fmt.Errorf("a bucket of %d bytes", len(value))
	}
	if root := binary.NativeEndian.Uint64(value); root != 0 {
		return w.page(root)
	}
	inline := value[bucketSize:]
	if len(inline) < pageHeader {
		return fmt.Errorf("a bucket of %d bytes", len(value))
	}
	return w.elements(inline)
}
