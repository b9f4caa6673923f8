package journal

import (
	"encoding/binary"
	"errors"
	"fmt"
	"hash/crc32"
	"io/fs"
	"iter"
	"os"
	"path/filepath"
	"strings"
	"time"

	bolt "go.etcd.io/bbolt"
	bolterrors "go.etcd.io/bbolt/errors"

	"github.com/sandsea/sandsea/api/errdefs"
)

const (
	suffix   = ".db"
	openWait = 2 * time.Second
	sumBytes = 4
	pageSize = 256 // records read in one transaction by All
)

var castagnoli = crc32.MakeTable(crc32.Castagnoli)

// Bolt is the Journal in a bbolt file. Each value carries a checksum; one that does not match is errdefs.DataLoss.
type Bolt struct {
	db *bolt.DB
}

var _ Journal = (*Bolt)(nil)

// Open opens or makes dir/<bootID>.db and removes the files of other boots unread. A second opener is
// errdefs.FailedPrecondition.
func Open(dir, bootID string) (*Bolt, error) {
	if bootID == "" || strings.Trim(bootID, "0123456789abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ-_") != "" {
		return nil, errdefs.New(errdefs.Invalid, "journal", "%q is no boot id", bootID)
	}
	if err := os.MkdirAll(dir, 0o700); err != nil {
		return nil, fmt.Errorf("make the journal directory: %w", err)
	}
	path := filepath.Join(dir, bootID+suffix)
	db, err := bolt.Open(path, 0o600, &bolt.Options{
		Timeout: openWait, NoSync: true, NoGrowSync: true, NoFreelistSync: true, FreelistType: bolt.FreelistMapType,
	})
	if err != nil {
		if errors.Is(err, bolterrors.ErrTimeout) {
			return nil, errdefs.New(errdefs.FailedPrecondition, "journal "+path, "another edge has it open").
				WithHint("Stop the other one first").Wrap(err)
		}
		return nil, fmt.Errorf("open the journal %s: %w", path, err)
	}
	if err := discardOthers(dir, bootID+suffix); err != nil {
		return nil, errors.Join(err, db.Close())
	}
	return &Bolt{db: db}, nil
}

func discardOthers(dir, own string) error {
	entries, err := os.ReadDir(dir)
	if err != nil {
		return fmt.Errorf("list the journals: %w", err)
	}
	for _, e := range entries {
		if e.Name() == own || !e.Type().IsRegular() || !strings.HasSuffix(e.Name(), suffix) {
			continue
		}
		if err := os.Remove(filepath.Join(dir, e.Name())); err != nil && !errors.Is(err, fs.ErrNotExist) {
			return fmt.Errorf("discard the journal of another boot: %w", err)
		}
	}
	return nil
}

// Put replaces one record.
func (b *Bolt) Put(r Record) error { return b.PutAll(r) }

// PutAll replaces records in one transaction.
func (b *Bolt) PutAll(rs ...Record) error {
	err := b.db.Update(func(tx *bolt.Tx) error {
		for _, r := range rs {
			bucket, err := tx.CreateBucketIfNotExists([]byte(r.Key.Kind))
			if err != nil {
				return err
			}
			if err := bucket.Put([]byte(r.Key.Name), seal(r.Data)); err != nil {
				return err
			}
		}
		return nil
	})
	if err != nil {
		return fmt.Errorf("journal %d records: %w", len(rs), err)
	}
	return nil
}

// Get reads one record.
func (b *Bolt) Get(k Key) (Record, bool, error) {
	var data []byte
	var found bool
	err := b.db.View(func(tx *bolt.Tx) error {
		bucket := tx.Bucket([]byte(k.Kind))
		if bucket == nil {
			return nil
		}
		v := bucket.Get([]byte(k.Name))
		if v == nil {
			return nil
		}
		var err error
		data, err = unseal(k, v)
		found = err == nil
		return err
	})
	if err != nil || !found {
		return Record{}, false, err
	}
	return Record{Key: k, Data: data}, true, nil
}

// Delete removes records in one transaction; absent ones are no error.
func (b *Bolt) Delete(ks ...Key) error {
	err := b.db.Update(func(tx *bolt.Tx) error {
		for _, k := range ks {
			if bucket := tx.Bucket([]byte(k.Kind)); bucket != nil {
				if err := bucket.Delete([]byte(k.Name)); err != nil {
					return err
				}
			}
		}
		return nil
	})
	if err != nil {
		return fmt.Errorf("delete %d records from the journal: %w", len(ks), err)
	}
	return nil
}

// All yields the records of one kind in name order. It holds no transaction while it yields, so that the consumer may
// write; a record written meanwhile may or may not be seen. The first error ends it.
func (b *Bolt) All(kind string) iter.Seq2[Record, error] {
	return func(yield func(Record, error) bool) {
		var after []byte
		for first := true; ; first = false {
			var page []Record
			err := b.db.View(func(tx *bolt.Tx) error {
				bucket := tx.Bucket([]byte(kind))
				if bucket == nil {
					return nil
				}
				c := bucket.Cursor()
				k, v := c.Seek(after)
				if !first && k != nil && string(k) == string(after) {
					k, v = c.Next()
				}
				for ; k != nil && len(page) < pageSize; k, v = c.Next() {
					key := Key{Kind: kind, Name: string(k)}
					data, err := unseal(key, v)
					if err != nil {
						return err
					}
					page = append(page, Record{Key: key, Data: data})
				}
				return nil
			})
			for _, r := range page {
				if !yield(r, nil) {
					return
				}
			}
			if err != nil {
				yield(Record{}, fmt.Errorf("read the journal's %s records: %w", kind, err))
				return
			}
			if len(page) < pageSize {
				return
			}
			after = []byte(page[len(page)-1].Key.Name)
		}
	}
}

// Close closes the file. Idempotent.
func (b *Bolt) Close() error { return b.db.Close() }

func seal(data []byte) []byte {
	out := make([]byte, sumBytes, sumBytes+len(data))
	binary.LittleEndian.PutUint32(out, crc32.Checksum(data, castagnoli))
	return append(out, data...)
}

// unseal copies, since bbolt's bytes live as long as the transaction.
func unseal(k Key, v []byte) ([]byte, error) {
	if len(v) < sumBytes || binary.LittleEndian.Uint32(v) != crc32.Checksum(v[sumBytes:], castagnoli) {
		return nil, errdefs.New(errdefs.DataLoss, "journal record "+k.Kind+"/"+k.Name, "its checksum does not match")
	}
	return append([]byte(nil), v[sumBytes:]...), nil
}
