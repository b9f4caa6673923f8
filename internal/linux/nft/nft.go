// Package nft keeps the packet filter of a gate: the network namespace in which the links of many peers end, who may
// speak to a proxy there, by TPROXY or at its own address, and to nobody else.
//
// It owns one table, "inet sandsea", of the namespace:
//
//	set named            sources that may use the gateway's ports and the range of addresses that stand for names
//	map classes          sources that may dial addresses, each with the number of what it may dial
//	sets direct0 …       class . destination . protocol . port, with intervals: what each class may dial
//	chain gate-<digits>  judges each packet as it comes in; the digits say which rules there are
//	chains direct0 …     look into the set of the class, by way of the map shards
//
// A set with intervals is copied at each change. Therefore sources with the same openings share a class, and classes are
// spread over 64 sets: a change costs nearly the same however many sources there are. All that is not let in is refused at once, TCP by a reset, everything else by an
// ICMP message.
//
// A change is one transaction of the kernel: all of it or nothing is in force. Everything stays when the process ends,
// and Open finds it again. If rules are of another making, Open replaces them in one transaction and keeps who may what.
//
// Table may be used concurrently.
package nft

import (
	"crypto/sha256"
	"encoding/binary"
	"encoding/hex"
	"errors"
	"fmt"
	"maps"
	"net/netip"
	"os"
	"slices"
	"strings"
	"sync"

	"github.com/google/nftables"
	"github.com/mdlayher/netlink"
)

// Layout is what the rules are made of.
type Layout struct {
	// Gateway is the proxy's own address, and Ports those that it serves there, TCP and UDP.
	Gateway netip.Addr
	Ports   []uint16
	// Names is the range of addresses that stand for names.
	Names netip.Prefix
	// Proxy is where connections and datagrams for other addresses are brought, and Mark what is put on them so that
	// they stay here.
	Proxy netip.AddrPort
	Mark  uint32
}

// Opening is a box of destinations: addresses, ports and one protocol, ends included.
type Opening struct {
	From, To    netip.Addr
	First, Last uint16
	Protocol    uint8
}

const (
	tableName   = "sandsea"
	chainPrefix = "gate-"
)

// shards is how many sets classes are spread over, a power of two.
const shards = 64

// chunk is how many elements go into one message: its length has 16 bits.
const chunk = 400

// buffers of the socket, which hold a whole transaction and its answers.
const buffers = 8 << 20

// Table is the filter of one namespace.
type Table struct {
	layout Layout
	ns     *os.File

	mu    sync.Mutex
	conn  *nftables.Conn // guarded by mu
	state state          // guarded by mu: what the kernel has
	stale bool           // guarded by mu: a change failed, so that state must be read again
}

// state is who may what.
type state struct {
	named   map[netip.Addr]bool
	classOf map[netip.Addr]uint32
	classes map[uint32]class
	byKey   map[string]uint32
	last    uint32 // class number that was given last
}

// class is what some sources may dial.
type class struct {
	boxes []Opening // sorted
	users int
}

// Open finds or makes the table in a namespace. ns stays open as long as the Table is used.
func Open(ns *os.File, l Layout) (*Table, error) {
	t := &Table{layout: l, ns: ns}
	if err := t.open(); err != nil {
		_ = t.Close()
		return nil, err
	}
	return t, nil
}

func (t *Table) open() error {
	if err := t.dial(); err != nil {
		return err
	}
	chain, err := t.chain()
	if err != nil {
		return err
	}
	found, err := t.rules()
	if err != nil {
		return err
	}
	if found != "" {
		if err := t.load(); err != nil {
			return err
		}
	} else {
		t.state = newState()
	}
	if found == chain {
		return nil
	}
	return t.build(chain, found != "")
}

func newState() state {
	return state{
		named: map[netip.Addr]bool{}, classOf: map[netip.Addr]uint32{}, classes: map[uint32]class{},
		byKey: map[string]uint32{},
	}
}

// dial makes a connection; one that had an error may have answers left that nobody wants.
func (t *Table) dial() error {
	if t.conn != nil {
		_ = t.conn.CloseLasting()
	}
	var err error
	t.conn, err = nftables.New(nftables.WithNetNSFd(int(t.ns.Fd())), nftables.AsLasting(),
		nftables.WithSockOptions(func(c *netlink.Conn) error {
			return errors.Join(c.SetReadBuffer(buffers), c.SetWriteBuffer(buffers))
		}))
	if err != nil {
		return fmt.Errorf("nftables: %w", err)
	}
	return nil
}

// rules is the name of our chain that is there, "" if none.
func (t *Table) rules() (string, error) {
	chains, err := t.conn.ListChainsOfTableFamily(nftables.TableFamilyINet)
	if err != nil {
		return "", fmt.Errorf("nftables: list chains: %w", err)
	}
	for _, c := range chains {
		if c.Table.Name == tableName && strings.HasPrefix(c.Name, chainPrefix) {
			return c.Name, nil
		}
	}
	return "", nil
}

// load reads who may what.
func (t *Table) load() error {
	s := newState()
	names, err := t.conn.GetSetElements(named)
	if err != nil {
		return fmt.Errorf("nftables: read %s: %w", named.Name, err)
	}
	for _, e := range names {
		if a, ok := netip.AddrFromSlice(e.Key); ok {
			s.named[a] = true
		}
	}
	for _, set := range direct {
		boxes, err := t.conn.GetSetElements(set)
		if err != nil {
			return fmt.Errorf("nftables: read %s: %w", set.Name, err)
		}
		for _, e := range boxes {
			number, box, ok := decode(e)
			if !ok || shard(number) != set {
				return fmt.Errorf("nftables: an element of %s is not ours: %x to %x", set.Name, e.Key, e.KeyEnd)
			}
			c := s.classes[number]
			c.boxes = append(c.boxes, box)
			s.classes[number] = c
		}
	}
	members, err := t.conn.GetSetElements(classes)
	if err != nil {
		return fmt.Errorf("nftables: read %s: %w", classes.Name, err)
	}
	for _, e := range members {
		a, ok := netip.AddrFromSlice(e.Key)
		if !ok || len(e.Val) != 4 {
			return fmt.Errorf("nftables: an element of %s is not ours: %x: %x", classes.Name, e.Key, e.Val)
		}
		number := binary.BigEndian.Uint32(e.Val)
		s.classOf[a] = number
		c := s.classes[number]
		c.users++
		s.classes[number] = c
	}
	for number, c := range s.classes {
		slices.SortFunc(c.boxes, compare)
		s.byKey[key(c.boxes)] = number
		s.last = max(s.last, number)
	}
	t.state = s
	return nil
}

// build makes the table with its rules and what state says, instead of one that may be there.
func (t *Table) build(chain string, there bool) error {
	if there {
		t.conn.DelTable(table)
	}
	t.conn.AddTable(table)
	sets := append([]*nftables.Set{named, classes}, direct[:]...)
	elements := map[*nftables.Set][]nftables.SetElement{}
	for a := range t.state.named {
		elements[named] = append(elements[named], nftables.SetElement{Key: a.AsSlice()})
	}
	for a, number := range t.state.classOf {
		elements[classes] = append(elements[classes], member(a, number))
	}
	for number, c := range t.state.classes {
		elements[shard(number)] = append(elements[shard(number)], encode(number, c.boxes)...)
	}
	for _, set := range sets {
		if err := t.conn.AddSet(set, nil); err != nil {
			return fmt.Errorf("nftables: set %s: %w", set.Name, err)
		}
		if err := t.add(set, elements[set]); err != nil {
			return err
		}
	}
	for i := range shards {
		c := t.conn.AddChain(&nftables.Chain{Name: shardName(i), Table: table})
		t.conn.AddRule(&nftables.Rule{Table: table, Chain: c, Exprs: shardRule(t.layout, i)})
	}
	if err := t.conn.AddSet(shardOf, jumps()); err != nil {
		return fmt.Errorf("nftables: map %s: %w", shardOf.Name, err)
	}
	policy := nftables.ChainPolicyDrop
	c := t.conn.AddChain(&nftables.Chain{
		Name: chain, Table: table, Type: nftables.ChainTypeFilter, Hooknum: nftables.ChainHookPrerouting,
		Priority: nftables.ChainPriorityMangle, Policy: &policy,
	})
	for _, r := range rules(t.layout) {
		t.conn.AddRule(&nftables.Rule{Table: table, Chain: c, Exprs: r})
	}
	if err := t.conn.Flush(); err != nil {
		return fmt.Errorf("nftables: make the table of the gate: %w", err)
	}
	return nil
}

// chain is the name of the chain with this layout's rules.
func (t *Table) chain() (string, error) {
	h := sha256.New()
	for _, r := range append(rules(t.layout), shardRule(t.layout, 0)) {
		b, err := marshal(r)
		if err != nil {
			return "", fmt.Errorf("nftables: %w", err)
		}
		h.Write(b)
	}
	return chainPrefix + hex.EncodeToString(h.Sum(nil)[:6]), nil
}

// Put says what a source may do; nothing at all closes it. The boxes of one source must not overlap.
func (t *Table) Put(source netip.Addr, names bool, openings []Opening) error {
	t.mu.Lock()
	defer t.mu.Unlock()
	if err := t.freshLocked(); err != nil {
		return err
	}
	if err := t.putLocked(source, names, openings); err != nil {
		t.stale = true
		return fmt.Errorf("nftables: rules of %s: %w", source, err)
	}
	return nil
}

// freshLocked finds out what there is after a change that failed: whether any of it is in force is then not known here.
// A table that somebody took away is made anew, closed.
func (t *Table) freshLocked() error {
	if !t.stale {
		return nil
	}
	if err := t.open(); err != nil {
		return err
	}
	t.stale = false
	return nil
}

func (t *Table) putLocked(source netip.Addr, names bool, openings []Opening) error {
	s := &t.state
	boxes := slices.SortedFunc(slices.Values(openings), compare)
	changed := false
	if was := s.named[source]; was != names {
		changed = true
		change := t.conn.SetAddElements
		if was {
			change = t.conn.SetDeleteElements
		}
		if err := change(named, []nftables.SetElement{{Key: source.AsSlice()}}); err != nil {
			return err
		}
	}
	old, had := s.classOf[source] // 0 is no class
	number := uint32(0)
	isNew := false
	if len(boxes) > 0 {
		var known bool
		if number, known = s.byKey[key(boxes)]; !known {
			number, isNew = s.free(), true
		}
	}
	if number != old {
		changed = true
		if isNew {
			if err := t.add(shard(number), encode(number, boxes)); err != nil {
				return err
			}
		}
		if had {
			if err := t.conn.SetDeleteElements(classes, []nftables.SetElement{member(source, old)}); err != nil {
				return err
			}
		}
		if number != 0 {
			if err := t.conn.SetAddElements(classes, []nftables.SetElement{member(source, number)}); err != nil {
				return err
			}
		}
		if c := s.classes[old]; had && c.users == 1 {
			if err := t.remove(shard(old), encode(old, c.boxes)); err != nil {
				return err
			}
		}
	}
	if !changed {
		return nil
	}
	if err := t.conn.Flush(); err != nil {
		return err
	}
	s.apply(source, names, old, number, boxes)
	return nil
}

// free is a class number that nobody has.
func (s *state) free() uint32 {
	for {
		s.last++
		if _, taken := s.classes[s.last]; !taken && s.last != 0 {
			return s.last
		}
	}
}

// apply notes a change that is in force.
func (s *state) apply(source netip.Addr, names bool, old, number uint32, boxes []Opening) {
	if names {
		s.named[source] = true
	} else {
		delete(s.named, source)
	}
	if old == number {
		return
	}
	if c, ok := s.classes[old]; ok {
		c.users--
		s.classes[old] = c
		if c.users == 0 {
			delete(s.classes, old)
			delete(s.byKey, key(c.boxes))
		}
	}
	delete(s.classOf, source)
	if number != 0 {
		c := s.classes[number]
		c.boxes, c.users = boxes, c.users+1
		s.classes[number] = c
		s.byKey[key(boxes)] = number
		s.classOf[source] = number
	}
}

// Sources are those that may do anything, in no order.
func (t *Table) Sources() ([]netip.Addr, error) {
	t.mu.Lock()
	defer t.mu.Unlock()
	if err := t.freshLocked(); err != nil {
		return nil, err
	}
	all := maps.Clone(t.state.named)
	for a := range t.state.classOf {
		all[a] = true
	}
	return slices.Collect(maps.Keys(all)), nil
}

// Classes tells how many sources each class has.
func (t *Table) Classes() map[uint32]int {
	t.mu.Lock()
	defer t.mu.Unlock()
	out := map[uint32]int{}
	for number, c := range t.state.classes {
		out[number] = c.users
	}
	return out
}

// Sweep removes classes that no source has. Only a crash of an older making leaves any.
func (t *Table) Sweep() error {
	t.mu.Lock()
	defer t.mu.Unlock()
	if err := t.freshLocked(); err != nil {
		return err
	}
	var gone []uint32
	for number, c := range t.state.classes {
		if c.users == 0 {
			gone = append(gone, number)
			if err := t.remove(shard(number), encode(number, c.boxes)); err != nil {
				return err
			}
		}
	}
	if len(gone) == 0 {
		return nil
	}
	if err := t.conn.Flush(); err != nil {
		t.stale = true
		return fmt.Errorf("nftables: remove what nobody uses: %w", err)
	}
	for _, number := range gone {
		delete(t.state.byKey, key(t.state.classes[number].boxes))
		delete(t.state.classes, number)
	}
	return nil
}

func (t *Table) add(set *nftables.Set, elements []nftables.SetElement) error {
	for part := range slices.Chunk(elements, chunk) {
		if err := t.conn.SetAddElements(set, part); err != nil {
			return err
		}
	}
	return nil
}

func (t *Table) remove(set *nftables.Set, elements []nftables.SetElement) error {
	for part := range slices.Chunk(elements, chunk) {
		if err := t.conn.SetDeleteElements(set, part); err != nil {
			return err
		}
	}
	return nil
}

// Close leaves everything in the kernel as it is.
func (t *Table) Close() error {
	t.mu.Lock()
	defer t.mu.Unlock()
	if t.conn == nil {
		return nil
	}
	return t.conn.CloseLasting()
}
