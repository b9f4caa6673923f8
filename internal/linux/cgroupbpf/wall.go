package cgroupbpf

import (
	"encoding/binary"
	"errors"
	"fmt"
	"net/netip"
	"os"
	"slices"
	"sync"
	"syscall"

	"github.com/cilium/ebpf"
	"github.com/cilium/ebpf/link"
	"github.com/cilium/ebpf/ringbuf"
	"golang.org/x/sys/unix"
)

// Sizes of the maps. Only what is used takes memory, but for the buffer of events.
const (
	maxGroups   = 1 << 16
	maxOpenings = 1 << 20
	eventBuffer = 256 << 10 // bytes
)

// Names of the maps; the digit is that of what stands in them.
const (
	groupsName   = "sandsea_group1"
	openingsName = "sandsea_open1"
	pacesName    = "sandsea_pace1"
	eventsName   = "sandsea_event1"
)

// Range of ports of a protocol, ends included.
type Range struct {
	First, Last uint16
	Protocol    uint8
}

// Opening is what is open of a prefix of addresses, but for what a longer prefix of the same group says.
type Opening struct {
	Prefix netip.Prefix
	Ranges []Range
}

// Entry is what a group may do.
type Entry struct {
	// Addr is the group's own address.
	Addr netip.Addr
	// Names opens the gateway's ports and the range of addresses that stand for names.
	Names    bool
	Openings []Opening
}

// ErrFull says that a map of the kernel has no room.
var ErrFull = errors.New("the map is full")

// Wall is the programs on one parent group and what they go by.
type Wall struct {
	parent   *os.File // ours
	maps     mapSet
	events   *ringbuf.Reader
	programs []*ebpf.Program

	mu   sync.Mutex
	gen  uint64              // guarded by mu: given last
	open map[uint64]opened   // guarded by mu: by group
	host map[uint64]struct{} // guarded by mu: exempt groups
}

// opened is what of the map of openings is a group's.
type opened struct {
	addr netip.Addr
	gen  uint64
	keys [][openingKey]byte
}

// Open attaches the programs to a group, or finds them there. The error names what is missing, and then nothing new is
// attached.
func Open(parent *os.File, l Layout) (_ *Wall, err error) {
	dir, err := os.Open(parent.Name())
	if err != nil {
		return nil, fmt.Errorf("cgroup BPF: %w", err)
	}
	w := &Wall{parent: dir, open: map[uint64]opened{}, host: map[uint64]struct{}{}}
	defer func() {
		if err != nil {
			_ = w.Close()
		}
	}()
	attached, err := w.attached()
	if err != nil {
		return nil, err
	}
	defer func() {
		for _, p := range attached {
			_ = p.Close()
		}
	}()
	if err := w.findMaps(attached); err != nil {
		return nil, err
	}
	if err := w.makeMaps(); err != nil {
		return nil, err
	}
	if err := w.load(l); err != nil {
		return nil, err
	}
	if err := w.attach(attached); err != nil {
		return nil, err
	}
	if err := w.read(); err != nil {
		return nil, err
	}
	w.events, err = ringbuf.NewReader(w.maps.events)
	if err != nil {
		return nil, fmt.Errorf("cgroup BPF: read events: %w", err)
	}
	return w, nil
}

// attached finds our programs on the parent, by hook.
func (w *Wall) attached() (map[string]*ebpf.Program, error) {
	found := map[string]*ebpf.Program{}
	for _, h := range hooks {
		all, err := link.QueryPrograms(link.QueryOptions{Target: int(w.parent.Fd()), Attach: h.attach})
		if err != nil {
			return found, fmt.Errorf("cgroup BPF: programs of %s: %w", h.name, err)
		}
		for _, a := range all.Programs {
			p, err := ebpf.NewProgramFromID(a.ID)
			if errors.Is(err, os.ErrNotExist) {
				continue // detached meanwhile
			}
			if err != nil {
				return found, fmt.Errorf("cgroup BPF: program of %s: %w", h.name, err)
			}
			info, err := p.Info()
			if err != nil || info.Name != h.name || found[h.name] != nil {
				_ = p.Close()
				if err != nil {
					return found, fmt.Errorf("cgroup BPF: program of %s: %w", h.name, err)
				}
				continue // somebody else's
			}
			found[h.name] = p
		}
	}
	return found, nil
}

// findMaps takes over the maps of programs that are attached, as far as they are of our making.
func (w *Wall) findMaps(attached map[string]*ebpf.Program) error {
	for _, h := range hooks {
		p := attached[h.name]
		if p == nil {
			continue
		}
		info, err := p.Info()
		if err != nil {
			return fmt.Errorf("cgroup BPF: maps of %s: %w", h.name, err)
		}
		ids, _ := info.MapIDs()
		for _, id := range ids {
			m, err := ebpf.NewMapFromID(id)
			if err != nil {
				return fmt.Errorf("cgroup BPF: map of %s: %w", h.name, err)
			}
			info, err := m.Info()
			if err != nil {
				_ = m.Close()
				return fmt.Errorf("cgroup BPF: map of %s: %w", h.name, err)
			}
			for _, s := range w.mapSpecs() {
				if info.Name == s.spec.Name && *s.at == nil && s.spec.Compatible(m) == nil {
					*s.at, m = m, nil
					break
				}
			}
			_ = m.Close()
		}
	}
	return nil
}

// mapSpec is a map and where it belongs.
type mapSpec struct {
	spec *ebpf.MapSpec
	at   **ebpf.Map
}

func (w *Wall) mapSpecs() []mapSpec {
	const sparse = unix.BPF_F_NO_PREALLOC
	return []mapSpec{
		{&ebpf.MapSpec{
			Name: groupsName, Type: ebpf.Hash, KeySize: 8, ValueSize: entrySize, MaxEntries: maxGroups, Flags: sparse,
		}, &w.maps.groups},
		{&ebpf.MapSpec{
			Name: openingsName, Type: ebpf.LPMTrie, KeySize: openingKey, ValueSize: openingSize, MaxEntries: maxOpenings,
			Flags: sparse,
		}, &w.maps.openings},
		{&ebpf.MapSpec{
			Name: pacesName, Type: ebpf.Hash, KeySize: 8, ValueSize: paceSize, MaxEntries: maxGroups, Flags: sparse,
		}, &w.maps.paces},
		{&ebpf.MapSpec{Name: eventsName, Type: ebpf.RingBuf, MaxEntries: eventBuffer}, &w.maps.events},
	}
}

func (w *Wall) makeMaps() error {
	for _, s := range w.mapSpecs() {
		if *s.at != nil {
			continue
		}
		m, err := ebpf.NewMap(s.spec)
		if err != nil {
			return fmt.Errorf("cgroup BPF: map %s: %w", s.spec.Name, err)
		}
		*s.at = m
	}
	return nil
}

// load makes the programs. A kernel that does not let them choose an error gives its own.
func (w *Wall) load(l Layout) error {
	id, levels, err := place(w.parent)
	if err != nil {
		return fmt.Errorf("cgroup BPF: %w", err)
	}
	var errs []error
	for _, choose := range []bool{true, false} {
		var made []*ebpf.Program
		var err error
		for _, h := range hooks {
			a := &assembler{layout: l, maps: w.maps, parent: id, levels: levels, errno: choose}
			var p *ebpf.Program
			p, err = ebpf.NewProgram(&ebpf.ProgramSpec{
				Name: h.name, Type: h.kind, AttachType: h.attach, Instructions: h.code(a), License: "GPL",
			})
			if err != nil {
				errs = append(errs, fmt.Errorf("cgroup BPF: program %s: %w", h.name, err))
				break
			}
			made = append(made, p)
		}
		if err == nil {
			w.programs = made
			return nil
		}
		for _, p := range made {
			_ = p.Close()
		}
	}
	return errors.Join(errs...)
}

// attach puts the programs in place of those that are attached and differ, and beside those that are somebody else's.
func (w *Wall) attach(attached map[string]*ebpf.Program) (err error) {
	var fresh []int
	defer func() {
		if err == nil {
			return
		}
		for _, i := range fresh {
			err = errors.Join(err, w.detach(w.programs[i], hooks[i]))
		}
	}()
	for i, h := range hooks {
		o := link.RawAttachProgramOptions{
			Target: int(w.parent.Fd()), Program: w.programs[i], Attach: h.attach, Flags: unix.BPF_F_ALLOW_MULTI,
		}
		old := attached[h.name]
		if old != nil {
			same, err := equal(old, w.programs[i])
			if err != nil {
				return err
			}
			if same {
				continue
			}
			o.Anchor = link.ReplaceProgram(old)
		}
		if err := link.RawAttachProgram(o); err != nil {
			return fmt.Errorf("cgroup BPF: attach %s: %w", h.name, err)
		}
		if old == nil {
			fresh = append(fresh, i)
		}
	}
	return nil
}

// equal reports whether two programs are the same code with the same maps.
func equal(a, b *ebpf.Program) (bool, error) {
	x, err := a.Info()
	if err != nil {
		return false, err
	}
	y, err := b.Info()
	if err != nil {
		return false, err
	}
	m, _ := x.MapIDs()
	n, _ := y.MapIDs()
	return x.Tag == y.Tag && slices.Equal(m, n), nil
}

func (w *Wall) detach(p *ebpf.Program, h hook) error {
	err := link.RawDetachProgram(link.RawDetachProgramOptions{Target: int(w.parent.Fd()), Program: p, Attach: h.attach})
	if err != nil && !errors.Is(err, unix.ENOENT) {
		return fmt.Errorf("cgroup BPF: detach %s: %w", h.name, err)
	}
	return nil
}

// read learns what the maps hold.
func (w *Wall) read() error {
	var group uint64
	var entry [entrySize]byte
	byGen := map[uint64][][openingKey]byte{}
	var key [openingKey]byte
	var value [openingSize]byte
	for it := w.maps.openings.Iterate(); ; {
		if !it.Next(&key, &value) {
			if err := it.Err(); err != nil {
				return fmt.Errorf("cgroup BPF: read openings: %w", err)
			}
			break
		}
		gen := binary.NativeEndian.Uint64(key[4:])
		byGen[gen] = append(byGen[gen], key)
		w.gen = max(w.gen, gen)
	}
	for it := w.maps.groups.Iterate(); ; {
		if !it.Next(&group, &entry) {
			if err := it.Err(); err != nil {
				return fmt.Errorf("cgroup BPF: read groups: %w", err)
			}
			break
		}
		gen := binary.NativeEndian.Uint64(entry[entryGen:])
		w.gen = max(w.gen, gen)
		if binary.NativeEndian.Uint32(entry[entryFlags:])&flagHost != 0 {
			continue // whoever is exempt is so by Exempt
		}
		w.open[group] = opened{
			addr: netip.AddrFrom4([4]byte(entry[entryAddr : entryAddr+4])), gen: gen, keys: byGen[gen],
		}
	}
	return nil
}

// Put says what a group may do. Once it returns, nothing else is in force; on an error it is what was, or nothing.
func (w *Wall) Put(group uint64, e Entry) error {
	w.mu.Lock()
	defer w.mu.Unlock()
	return w.putLocked(group, e)
}

func (w *Wall) putLocked(group uint64, e Entry) (err error) {
	old, had := w.open[group]
	w.gen++
	now := opened{addr: e.Addr, gen: w.gen}
	flags := uint32(0)
	if e.Names {
		flags |= flagNames
	}
	defer func() {
		if err != nil {
			err = errors.Join(err, w.forget(now.keys))
		}
	}()
	for _, o := range e.Openings {
		flags |= flagOpenings
		key, value, err := encode(now.gen, o)
		if err != nil {
			return err
		}
		if err := w.maps.openings.Update(&key, &value, ebpf.UpdateNoExist); err != nil {
			return fmt.Errorf("cgroup BPF: opening %s: %w", o.Prefix, full(err))
		}
		now.keys = append(now.keys, key)
	}
	if !had {
		var pace [paceSize]byte
		if err := w.maps.paces.Update(group, &pace, ebpf.UpdateAny); err != nil {
			return fmt.Errorf("cgroup BPF: pace of group %d: %w", group, full(err))
		}
	}
	if err := w.maps.groups.Update(group, encodeEntry(flags, e.Addr, now.gen), ebpf.UpdateAny); err != nil {
		return fmt.Errorf("cgroup BPF: group %d: %w", group, full(err))
	}
	w.open[group] = now
	if err := w.forget(old.keys); err != nil {
		return err
	}
	return nil
}

// Exempt opens everything to a group.
func (w *Wall) Exempt(group uint64) error {
	w.mu.Lock()
	defer w.mu.Unlock()
	if err := w.maps.groups.Update(group, encodeEntry(flagHost, netip.IPv4Unspecified(), 0), ebpf.UpdateAny); err != nil {
		return fmt.Errorf("cgroup BPF: group %d: %w", group, full(err))
	}
	w.host[group] = struct{}{}
	return nil
}

// Delete closes a group. Success when it has no entry.
func (w *Wall) Delete(group uint64) error {
	w.mu.Lock()
	defer w.mu.Unlock()
	return w.deleteLocked(group)
}

func (w *Wall) deleteLocked(group uint64) error {
	var errs []error
	for _, m := range []*ebpf.Map{w.maps.groups, w.maps.paces} {
		if err := m.Delete(group); err != nil && !errors.Is(err, ebpf.ErrKeyNotExist) {
			errs = append(errs, fmt.Errorf("cgroup BPF: close group %d: %w", group, err))
		}
	}
	errs = append(errs, w.forget(w.open[group].keys))
	if err := errors.Join(errs...); err != nil {
		return err
	}
	delete(w.open, group)
	delete(w.host, group)
	return nil
}

// forget removes openings that no group points at.
func (w *Wall) forget(keys [][openingKey]byte) error {
	for _, k := range keys {
		if err := w.maps.openings.Delete(&k); err != nil && !errors.Is(err, ebpf.ErrKeyNotExist) {
			return fmt.Errorf("cgroup BPF: remove an old opening: %w", err)
		}
	}
	return nil
}

// Addr is the address in the entry of a group, if it has one.
func (w *Wall) Addr(group uint64) (netip.Addr, bool) {
	w.mu.Lock()
	defer w.mu.Unlock()
	o, ok := w.open[group]
	return o.addr, ok
}

// Sweep closes the groups that keep does not want, and removes what a crash left between two writes. Exempt groups are
// those of this Wall.
func (w *Wall) Sweep(keep func(group uint64) bool) error {
	w.mu.Lock()
	defer w.mu.Unlock()
	groups, err := keys(w.maps.groups)
	if err != nil {
		return err
	}
	paces, err := keys(w.maps.paces)
	if err != nil {
		return err
	}
	var errs []error
	for _, g := range append(groups, paces...) {
		_, host := w.host[g]
		_, open := w.open[g]
		if !host && (!open || !keep(g)) {
			errs = append(errs, w.deleteLocked(g))
		}
	}
	used := map[uint64]bool{}
	for _, o := range w.open {
		used[o.gen] = true
	}
	var key [openingKey]byte
	var value [openingSize]byte
	var stale [][openingKey]byte
	it := w.maps.openings.Iterate()
	for it.Next(&key, &value) {
		if !used[binary.NativeEndian.Uint64(key[4:])] {
			stale = append(stale, key)
		}
	}
	errs = append(errs, it.Err(), w.forget(stale))
	return errors.Join(errs...)
}

// Size tells how many groups and openings there are.
func (w *Wall) Size() (groups, openings int, err error) {
	g, err := keys(w.maps.groups)
	if err != nil {
		return 0, 0, err
	}
	var key [openingKey]byte
	var value [openingSize]byte
	it := w.maps.openings.Iterate()
	for it.Next(&key, &value) {
		openings++
	}
	return len(g), openings, it.Err()
}

func keys(m *ebpf.Map) ([]uint64, error) {
	var key uint64
	var value [entrySize]byte
	var out []uint64
	it := m.Iterate()
	for it.Next(&key, &value) {
		out = append(out, key)
	}
	if err := it.Err(); err != nil {
		return nil, fmt.Errorf("cgroup BPF: list groups: %w", err)
	}
	return out, nil
}

func encodeEntry(flags uint32, addr netip.Addr, gen uint64) []byte {
	b := binary.NativeEndian.AppendUint32(make([]byte, 0, entrySize), flags)
	b = append(b, addr.AsSlice()...)
	return binary.NativeEndian.AppendUint64(b, gen)
}

func encode(gen uint64, o Opening) (key [openingKey]byte, value [openingSize]byte, err error) {
	if !o.Prefix.Addr().Is4() || len(o.Ranges) == 0 || len(o.Ranges) > MaxRanges {
		return key, value, fmt.Errorf("cgroup BPF: opening %s has %d ranges of ports: 1 to %d of an IPv4 prefix", o.Prefix,
			len(o.Ranges), MaxRanges)
	}
	binary.NativeEndian.PutUint32(key[0:], uint32(openingBits-32+o.Prefix.Bits()))
	binary.NativeEndian.PutUint64(key[4:], gen)
	copy(key[12:], o.Prefix.Masked().Addr().AsSlice())
	binary.NativeEndian.PutUint32(value[openingCount:], uint32(len(o.Ranges)))
	for i, r := range o.Ranges {
		at := value[openingFirst+i*rangeSize:]
		binary.NativeEndian.PutUint16(at, r.First)
		binary.NativeEndian.PutUint16(at[2:], r.Last)
		at[4] = r.Protocol
	}
	return key, value, nil
}

func full(err error) error {
	if errors.Is(err, unix.E2BIG) || errors.Is(err, unix.ENOSPC) || errors.Is(err, unix.ENOMEM) {
		return fmt.Errorf("%w: %w", ErrFull, err)
	}
	return err
}

// Event is a denial.
type Event struct {
	Group uint64
	// To is where it should have gone; no address for a socket that was not made, no port where it was not known.
	To       netip.AddrPort
	Protocol uint8
	// Untold is how many denials of the group before this one were not told.
	Untold uint32
}

// Next waits for a denial. It is os.ErrClosed after Close.
func (w *Wall) Next() (Event, error) {
	for {
		r, err := w.events.Read()
		if err != nil {
			return Event{}, err
		}
		if e, ok := decode(r.RawSample); ok {
			return e, nil
		}
	}
}

func decode(b []byte) (Event, bool) {
	if len(b) < eventSize {
		return Event{}, false
	}
	e := Event{
		Group:  binary.NativeEndian.Uint64(b[eventGroup:]),
		Untold: binary.NativeEndian.Uint32(b[eventUntold:]), Protocol: b[eventProtocol],
	}
	// The protocol is stored as a number of 16 bits.
	e.Protocol = uint8(binary.NativeEndian.Uint16(b[eventProtocol:]))
	addr := netip.AddrFrom16([16]byte(b[eventAddr : eventAddr+16])).Unmap()
	port := binary.NativeEndian.Uint16(b[eventPort:])
	if addr != netip.IPv6Unspecified() || port != 0 {
		e.To = netip.AddrPortFrom(addr, port)
	}
	return e, true
}

// Detach takes the programs off the group, which opens everything, and with them the maps go.
func (w *Wall) Detach() error {
	attached, err := w.attached()
	errs := []error{err}
	for _, h := range hooks {
		if p := attached[h.name]; p != nil {
			errs = append(errs, w.detach(p, h), p.Close())
		}
	}
	return errors.Join(errs...)
}

// Close gives up the descriptors and leaves everything in the kernel as it is.
func (w *Wall) Close() error {
	var errs []error
	if w.events != nil {
		errs = append(errs, w.events.Close())
	}
	for _, s := range w.mapSpecs() {
		if *s.at != nil {
			errs = append(errs, (*s.at).Close())
		}
	}
	for _, p := range w.programs {
		errs = append(errs, p.Close())
	}
	return errors.Join(append(errs, w.parent.Close())...)
}

// rootID is the id of the root of the tree of control groups.
const rootID = 1

// maxLevel bounds the search for the level of a group whose tree is seen in part only.
const maxLevel = 16

// place gives the id of a group and the levels at which its children may be: exactly one where the whole tree is
// mounted, else, as in a container, whichever the kernel finds the group itself above.
func place(dir *os.File) (id uint64, levels []int, err error) {
	id, dev, err := identify(dir.Name())
	if err != nil {
		return 0, nil, err
	}
	path := dir.Name()
	for depth := 1; depth < maxLevel; depth++ {
		at, d, err := identify(path)
		if err != nil {
			return 0, nil, err
		}
		if d != dev {
			break
		}
		if at == rootID {
			return id, []int{depth}, nil
		}
		path += "/.."
	}
	for l := 1; l <= maxLevel; l++ {
		levels = append(levels, l)
	}
	return id, levels, nil
}

func identify(path string) (id, dev uint64, err error) {
	st, err := os.Stat(path)
	if err != nil {
		return 0, 0, err
	}
	sys, ok := st.Sys().(*syscall.Stat_t)
	if !ok {
		return 0, 0, fmt.Errorf("%s has no inode", path)
	}
	return sys.Ino, sys.Dev, nil
}

// ID is that of the group at path.
func ID(path string) (uint64, error) {
	var fs unix.Statfs_t
	if err := unix.Statfs(path, &fs); err != nil {
		return 0, fmt.Errorf("control group %s: %w", path, err)
	}
	if fs.Type != unix.CGROUP2_SUPER_MAGIC {
		return 0, fmt.Errorf("%s is not a control group of version 2", path)
	}
	id, _, err := identify(path)
	return id, err
}
