// Package store is the contract of the replicated record: what must survive nodes. Implementations: etcd (embedded or a
// cluster), mem (tests and simulation). The suite in store/conform runs over both.
package store

import (
	"context"
	"iter"
	"time"
)

// Store is a small replicated key-value record with etcd's words.
//
// Txn is all or nothing: when every Cond holds, then is applied, otherwise the other list. A Txn whose answer did not
// arrive is errdefs.Unknown: read before deciding. When the store is away every call is errdefs.Unavailable within a
// second. Watch yields events after rev in order, without gaps or duplicates, or ends with ErrCompacted: list again.
// Leases fence by epoch, they are not locks. Safe for concurrent use.
type Store interface {
	Txn(ctx context.Context, conds []Cond, then, otherwise []Op) (Result, error)
	// Range gives the pairs under prefix in key order at one revision; rev 0 is now. limit 0 is no limit; after
	// continues behind that key.
	Range(ctx context.Context, prefix string, opts RangeOptions) (Page, error)
	Watch(ctx context.Context, prefix string, rev int64) iter.Seq2[Event, error]
	Lease(ctx context.Context, ttl time.Duration) (Lease, error)
	Close() error
}

// RangeOptions narrow a Range.
type RangeOptions struct {
	Revision int64
	Limit    int
	After    string
}

// Pair is a key with its value and the revision that wrote it.
type Pair struct {
	Key     string
	Value   []byte
	ModRev  int64
	LeaseID int64
}

// Cond is one condition of a transaction on one key. Exactly one of its uses: ModRev 0 with Absent: the key is not
// there; ModRev > 0: the key was last written at that revision; Present: the key is there.
type Cond struct {
	Key     string
	Absent  bool
	Present bool
	ModRev  int64
}

// OpKind is what an Op does.
type OpKind int

// The operations of a transaction.
const (
	OpPut OpKind = iota + 1
	OpDelete
	OpGet
	OpDeletePrefix
)

// Op is one operation of a transaction. Lease 0 is none.
type Op struct {
	Kind  OpKind
	Key   string
	Value []byte
	Lease int64
}

// Put writes a pair.
func Put(key string, value []byte) Op { return Op{Kind: OpPut, Key: key, Value: value} }

// Delete removes a key; an absent one is no error.
func Delete(key string) Op { return Op{Kind: OpDelete, Key: key} }

// Get reads a key inside the transaction.
func Get(key string) Op { return Op{Kind: OpGet, Key: key} }

// Result tells which list was applied, at which revision, and what its Gets found (absent keys are left out).
type Result struct {
	Succeeded bool
	Revision  int64
	Pairs     []Pair
}

// Page is one Range answer.
type Page struct {
	Pairs    []Pair
	Revision int64
	More     bool
}

// Event is one change. Deleted events carry the key alone.
type Event struct {
	Pair
	Deleted bool
}

// Lease is a time-bound claim that lapses unless kept alive. KeepAlive runs until ctx ends or the lease is lost, and then
// returns why. Revoke removes the keys that were written under it.
type Lease interface {
	ID() int64
	KeepAlive(ctx context.Context) error
	Revoke(ctx context.Context) error
}

// ErrCompacted ends a Watch whose revision the store no longer has.
type compacted struct{}

func (compacted) Error() string { return "revision compacted: list again" }

// ErrCompacted ends a Watch whose revision the store no longer has.
var ErrCompacted error = compacted{}
