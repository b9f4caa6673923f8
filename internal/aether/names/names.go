// Package names gives host names addresses of their own, for one sandbox.
//
// An address stands for one name as long as the Table lives, so that whoever connects to it says which name is meant,
// whatever the protocol. The first choice for a name is a hash of it: a Table that was lost and built anew gives most
// names what they had. Nothing expires: a program may keep an address for as long as it likes.
package names

import (
	"encoding/binary"
	"hash/fnv"
	"net/netip"
	"sync"
)

// Most is how many names one Table holds.
const Most = 4096

// Table is the names of one sandbox. Its methods may be called at once.
type Table struct {
	pool netip.Prefix

	mu     sync.RWMutex
	byName map[string]netip.Addr // guarded by mu
	byAddr map[netip.Addr]string // guarded by mu
}

// New makes a Table that gives out addresses of pool, an IPv4 network of at least 2*Most addresses.
func New(pool netip.Prefix) *Table { return &Table{pool: pool.Masked()} }

// Addr gives the address that stands for name, a new one if it has none yet; false when the table is full.
func (t *Table) Addr(name string) (netip.Addr, bool) {
	t.mu.RLock()
	a, ok := t.byName[name]
	t.mu.RUnlock()
	if ok {
		return a, true
	}
	t.mu.Lock()
	defer t.mu.Unlock()
	if a, ok := t.byName[name]; ok {
		return a, true
	}
	if len(t.byName) >= Most {
		return netip.Addr{}, false
	}
	if t.byName == nil {
		t.byName, t.byAddr = map[string]netip.Addr{}, map[netip.Addr]string{}
	}
	h := fnv.New32a()
	_, _ = h.Write([]byte(name))
	size := uint32(1) << (32 - t.pool.Bits())
	for n := h.Sum32(); ; n++ {
		// The ends of the pool and addresses that end in 0 or 255 look like networks and broadcasts to some programs.
		if last := n % 256; last == 0 || last == 255 {
			continue
		}
		a := t.at(n % size)
		if _, taken := t.byAddr[a]; !taken {
			t.byName[name], t.byAddr[a] = a, name
			return a, true
		}
	}
}

func (t *Table) at(n uint32) netip.Addr {
	b := t.pool.Addr().As4()
	binary.BigEndian.PutUint32(b[:], binary.BigEndian.Uint32(b[:])+n)
	return netip.AddrFrom4(b)
}

// Name tells which name the address stands for.
func (t *Table) Name(a netip.Addr) (string, bool) {
	t.mu.RLock()
	defer t.mu.RUnlock()
	name, ok := t.byAddr[a]
	return name, ok
}

// Has tells whether a name has an address.
func (t *Table) Has(name string) bool {
	t.mu.RLock()
	defer t.mu.RUnlock()
	_, ok := t.byName[name]
	return ok
}
