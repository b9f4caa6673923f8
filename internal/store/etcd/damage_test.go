package etcd

import (
	"bytes"
	"errors"
	"fmt"
	"math/rand/v2"
	"os"
	"path/filepath"
	"strings"
	"testing"

	bolt "go.etcd.io/bbolt"
	"go.etcd.io/etcd/server/v3/storage/schema"

	"github.com/sandsea/sandsea/api/errdefs"
	"github.com/sandsea/sandsea/internal/store"
	"github.com/sandsea/sandsea/internal/store/keys"
)

// lived makes the directory of a store that was used and closed.
func lived(t *testing.T) string {
	t.Helper()
	dir := t.TempDir()
	s, err := Open(t.Context(), Config{Dir: dir})
	if err != nil {
		t.Fatal(err)
	}
	for i := range 40 {
		op := store.Put(keys.Image(fmt.Sprint(i)), bytes.Repeat([]byte("v"), 7000))
		if _, err := s.Txn(t.Context(), nil, []store.Op{op}, nil); err != nil {
			t.Fatal(err)
		}
	}
	if err := s.Close(); err != nil {
		t.Fatal(err)
	}
	return dir
}

func TestADamagedStoreIsOneSentence(t *testing.T) {
	good := lived(t)
	rnd := rand.New(rand.NewPCG(1, 2))
	garbage := func(b []byte) {
		for i := range b {
			b[i] = byte(rnd.Uint32())
		}
	}
	db := filepath.Join("member", "snap", "db")
	logs, err := filepath.Glob(filepath.Join(good, "member", "wal", "*-*.wal"))
	if err != nil || len(logs) == 0 {
		t.Fatal(logs, err)
	}
	wal := filepath.Join("member", "wal", filepath.Base(logs[0]))
	for name, c := range map[string]struct {
		file string
		harm func([]byte) []byte
	}{
		"database of zeros":         {db, func(b []byte) []byte { clear(b); return b }},
		"database cut short":        {db, func(b []byte) []byte { return b[:4*4096] }},
		"database cut inside":       {db, func(b []byte) []byte { return b[:len(b)/300] }},
		"database all garbage":      {db, func(b []byte) []byte { garbage(b); return b }},
		"database behind its heads": {db, func(b []byte) []byte { garbage(b[2*4096:]); return b }},
		"log gone":                  {wal, func([]byte) []byte { return nil }},
		"log of zeros":              {wal, func(b []byte) []byte { clear(b); return b }},
		"log cut short":             {wal, func(b []byte) []byte { return b[:1000] }},
		"log all garbage":           {wal, func(b []byte) []byte { garbage(b); return b }},
		"log with a changed record": {wal, func(b []byte) []byte { garbage(b[300:400]); return b }},
	} {
		t.Run(name, func(t *testing.T) {
			dir := t.TempDir()
			if err := os.CopyFS(dir, os.DirFS(good)); err != nil {
				t.Fatal(err)
			}
			path := filepath.Join(dir, c.file)
			b, err := os.ReadFile(path)
			if err != nil {
				t.Fatal(err)
			}
			if b = c.harm(b); b == nil {
				err = os.Remove(path)
			} else {
				err = os.WriteFile(path, b, 0o600)
			}
			if err != nil {
				t.Fatal(err)
			}
			s, err := Open(t.Context(), Config{Dir: dir})
			if err == nil {
				_ = s.Close()
				t.Fatal("it opened")
			}
			if !errors.Is(err, errdefs.DataLoss) || !strings.Contains(err.Error(), dir) || !strings.Contains(err.Error(), "backup") ||
				strings.Contains(err.Error(), "\n") {
				t.Fatal(err)
			}
			t.Log(err)
		})
	}
}

// What no check of pages finds, etcd meets itself, and would end the process.
func TestARecordThatEtcdCannotReadIsOneSentence(t *testing.T) {
	dir := lived(t)
	db, err := bolt.Open(filepath.Join(dir, "member", "snap", "db"), 0o600, nil)
	if err != nil {
		t.Fatal(err)
	}
	err = db.Update(func(tx *bolt.Tx) error {
		b := tx.Bucket(schema.Key.Name())
		k, _ := b.Cursor().Last()
		return b.Put(bytes.Clone(k), []byte("no record"))
	})
	if err := errors.Join(err, db.Close()); err != nil {
		t.Fatal(err)
	}
	_, err = Open(t.Context(), Config{Dir: dir})
	if !errors.Is(err, errdefs.DataLoss) || !strings.Contains(err.Error(), dir) {
		t.Fatal(err)
	}
}

// A page of garbage anywhere in the database is found, or is one that nothing points to.
func TestAnyPageOfADatabaseMayBeGarbage(t *testing.T) {
	dir := lived(t)
	path := filepath.Join(dir, "member", "snap", "db")
	good, err := os.ReadFile(path)
	if err != nil {
		t.Fatal(err)
	}
	if _, err := checkDatabase(t.Context(), dir); err != nil {
		t.Fatal(err)
	}
	f, err := os.OpenFile(path, os.O_RDWR, 0)
	if err != nil {
		t.Fatal(err)
	}
	defer f.Close()
	rnd := rand.New(rand.NewPCG(3, 4))
	found := 0
	for at := 0; at < 1<<19; at += 4096 {
		bad := make([]byte, 64)
		for i := range bad {
			bad[i] = byte(rnd.Uint32())
		}
		if _, err := f.WriteAt(bad, int64(at)); err != nil {
			t.Fatal(err)
		}
		if _, err := checkDatabase(t.Context(), dir); err != nil {
			found++
			if !errors.Is(err, errdefs.DataLoss) {
				t.Error(err)
			}
		}
		if _, err := f.WriteAt(good[at:at+64], int64(at)); err != nil {
			t.Fatal(err)
		}
	}
	if found < 5 {
		t.Errorf("%d damaged pages found", found)
	}
}
