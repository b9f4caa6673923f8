// Package journal remembers what this node intends, for one boot of the machine.
//
// The sandboxes of a node cannot outlive its kernel, so the journal need not either: DIR/journal/<boot-id>.db is a
// bbolt file written without fsync. A returned Put is seen by recovery after kill -9 of any process, not after power
// loss. The file of another boot is discarded unread. One writer: the edge. It holds intents and names only; pids,
// sizes, usage and what is alive are derived anew.
package journal

import (
	"iter"
)

// Key names a record: a kind ("sandbox", "process", "key") and a name within it that sorts as it should be read.
type Key struct {
	Kind string
	Name string
}

// Record is one remembered fact. Data is JSON owned by the package that wrote it; fields are only ever added.
type Record struct {
	Key  Key
	Data []byte
}

// Journal is the contract. Put replaces; PutAll is one transaction. All yields the records of one kind in name order.
// Suite: journal/crash_test.
type Journal interface {
	Put(Record) error
	PutAll(...Record) error
	Get(Key) (Record, bool, error)
	Delete(...Key) error
	All(kind string) iter.Seq2[Record, error]
	Close() error
}
