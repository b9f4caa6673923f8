package etcd

import (
	"bytes"
	"context"
	"encoding/binary"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"runtime"
	"runtime/debug"
	"sync/atomic"
	"syscall"
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
// by waiting for ever. So database and log are read here first. What etcd still says at its start is caught.

// databaseWait is how long another process may hold the database.
const databaseWait = time.Second

// damaged is the error of a store whose files are not what etcd wrote.
func damaged(dir, format string, args ...any) *errdefs.Error {
	return errdefs.New(errdefs.DataLoss, "store "+dir, "is damaged: "+format, args...).
		WithHint("Restore it from a backup, or start with a new data directory: --data DIR")
}

// notStarted is the error of a store whose files may be good.
func notStarted(dir string, err error) error {
	return errdefs.New(errdefs.FailedPrecondition, "store "+dir, "does not start: %v", err).
		WithHint("See the log above and the free space, or restore the folder from a backup").Wrap(err)
}

// fallen is the error of a member that ended with this word: of the system, as on a full disk, or about its files.
func fallen(dir string, word error) error {
	if _, ok := errors.AsType[syscall.Errno](word); ok {
		return notStarted(dir, word)
	}
	return damaged(dir, "%v", word)
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
		switch p := recover().(type) {
		case nil:
		case runtime.Error:
			last.say(errors.New("etcd cannot read its files"))
		case error:
			last.say(p)
		default:
			last.say(fmt.Errorf("%v", p))
		}
	}()
	e, err := embed.StartEtcd(ec)
	if err != nil {
		err = notStarted(ec.Dir, err)
	}
	return e, err
}

// lastWord is what etcd says before it would end the process; the goroutine that says it ends instead. After over such a
// message ends the process.
type lastWord struct {
	words chan error
	ended *atomic.Bool
}

func newLastWord() lastWord { return lastWord{make(chan error, 1), new(atomic.Bool)} }

func (l lastWord) over() { l.ended.Store(true) }

// say keeps the first word.
func (l lastWord) say(word error) {
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
	word := errors.New(ce.Message)
	for _, f := range fields {
		if err, ok := f.Interface.(error); ok {
			word = fmt.Errorf("%w: %w", word, err)
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
	defer func() { _ = db.Close() }()
	applied, err = readDatabase(ctx, db, info.Size())
	if ctx.Err() != nil {
		return 0, context.Cause(ctx)
	}
	if err != nil {
		return 0, damaged(dir, "its database %s: %v", path, err)
	}
	return applied, nil
}

// readDatabase goes through all that a database of so many bytes holds. bbolt meets what it did not write with a panic, and
// the processor what lies outside its map with a fault.
func readDatabase(ctx context.Context, db *bolt.DB, size int64) (applied uint64, err error) {
	defer debug.SetPanicOnFault(debug.SetPanicOnFault(true))
	defer func() {
		if p := recover(); p != nil {
			err = fmt.Errorf("a page of it cannot be read: %v", p)
		}
	}()
	err = db.View(func(tx *bolt.Tx) error {
		if tx.Size() > size {
			return fmt.Errorf("it has %d of %d bytes", size, tx.Size())
		}
		err := tx.ForEach(func(_ []byte, b *bolt.Bucket) error {
			return b.ForEach(func(k, v []byte) error {
				_, _ = bytes.Clone(k), bytes.Clone(v)
				return context.Cause(ctx)
			})
		})
		if err != nil {
			return err
		}
		if meta := tx.Bucket(schema.Meta.Name()); meta != nil {
			if v := meta.Get(schema.MetaConsistentIndexKeyName); len(v) == 8 {
				applied = binary.BigEndian.Uint64(v)
			}
		}
		return nil
	})
	return applied, err
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
	defer func() { _ = w.Close() }()
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
