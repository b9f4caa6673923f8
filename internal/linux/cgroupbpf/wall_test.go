package cgroupbpf

import (
	"encoding/binary"
	"errors"
	"fmt"
	"net/netip"
	"os"
	"path/filepath"
	"slices"
	"testing"

	"github.com/cilium/ebpf"
	"github.com/moby/sys/mountinfo"
	"golang.org/x/sys/unix"
	"pgregory.net/rapid"

	"github.com/sandsea/sandsea/internal/testkit/leak"
	"github.com/sandsea/sandsea/internal/testkit/require"
)

func TestMain(m *testing.M) { os.Exit(leak.Main(m)) }

var layout = Layout{
	Gateway: netip.MustParseAddr("100.64.0.1"), Ports: []uint16{53, 80, 3128}, Names: netip.MustParsePrefix("198.18.0.0/15"),
}

func parent(t testing.TB) *os.File {
	t.Helper()
	require.Root(t)
	require.Feature(t, "cgroup2")
	mounts, err := mountinfo.GetMounts(mountinfo.FSTypeFilter("cgroup2"))
	if err != nil || len(mounts) == 0 {
		t.Fatal(err)
	}
	path := filepath.Join(mounts[0].Mountpoint, "sandsea-"+leak.Tag())
	if err := os.Mkdir(path, 0o755); err != nil {
		t.Fatal(err)
	}
	dir, err := os.Open(path)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		dir.Close()
		if err := os.Remove(path); err != nil {
			t.Error(err)
		}
	})
	return dir
}

func open(t testing.TB, dir *os.File) *Wall {
	t.Helper()
	w, err := Open(dir, layout)
	require.That(t, "egress", err)
	t.Cleanup(func() { w.Close() })
	return w
}

// nobody is the group that the kernel says of a packet whose socket is in none: such packets are made by the tests.
const nobody = 0

// run gives a packet to a program, as the kernel would, and reports whether it passes.
func run(t *rapid.T, p *ebpf.Program, packet []byte) bool {
	frame := append(make([]byte, 12), 8, 0)
	if packet[0]>>4 == 6 {
		frame[12], frame[13] = 0x86, 0xdd
	}
	got, err := p.Run(&ebpf.RunOptions{Data: append(frame, packet...)})
	if err != nil {
		t.Fatal(err)
	}
	return got == 1
}

// point is a place that packets go to or come from.
type point struct {
	addr     netip.Addr
	port     uint16
	protocol uint8
}

// packetOf is an IPv4 packet between itself and the point, with options of some words.
func packetOf(out bool, self netip.Addr, p point, options int, tcpFlags byte, fragment uint16) []byte {
	from, to, source, dest := p.addr, self, p.port, uint16(40000)
	if out {
		from, to, source, dest = self, p.addr, 40000, p.port
	}
	b := []byte{0x45 + byte(options), 0, 0, 0, 0, 1, byte(fragment >> 8), byte(fragment), 64, p.protocol, 0, 0}
	b = append(append(b, from.AsSlice()...), to.AsSlice()...)
	for range options {
		b = append(b, 1, 1, 1, 1)
	}
	b = binary.BigEndian.AppendUint16(binary.BigEndian.AppendUint16(b, source), dest)
	b = append(b, make([]byte, 16)...)
	b[len(b)-20+13] = tcpFlags
	binary.BigEndian.PutUint16(b[2:], uint16(len(b)))
	return b
}

// passes is the model of the programs.
func passes(e *Entry, p point) bool {
	if p.addr.IsLoopback() {
		return true
	}
	if e == nil {
		return false
	}
	if p.addr == e.Addr {
		return true
	}
	if p.protocol != unix.IPPROTO_TCP && p.protocol != unix.IPPROTO_UDP {
		return false
	}
	if e.Names && (layout.Names.Contains(p.addr) || p.addr == layout.Gateway && slices.Contains(layout.Ports, p.port)) {
		return true
	}
	var best *Opening
	for i, o := range e.Openings {
		if o.Prefix.Contains(p.addr) && (best == nil || o.Prefix.Bits() > best.Prefix.Bits()) {
			best = &e.Openings[i]
		}
	}
	return best != nil && slices.ContainsFunc(best.Ranges, func(r Range) bool {
		return r.Protocol == p.protocol && r.First <= p.port && p.port <= r.Last
	})
}

var interesting = []netip.Addr{
	netip.MustParseAddr("127.0.0.1"), netip.MustParseAddr("127.255.255.255"), netip.MustParseAddr("126.255.255.255"),
	netip.MustParseAddr("128.0.0.0"), netip.MustParseAddr("0.0.0.0"), layout.Gateway, netip.MustParseAddr("100.64.0.2"),
	netip.MustParseAddr("100.64.1.1"), netip.MustParseAddr("100.64.1.2"), netip.MustParseAddr("198.17.255.255"),
	netip.MustParseAddr("198.18.0.0"), netip.MustParseAddr("198.19.255.255"), netip.MustParseAddr("198.20.0.0"),
	netip.MustParseAddr("10.0.0.0"), netip.MustParseAddr("10.1.2.3"), netip.MustParseAddr("10.1.2.4"),
	netip.MustParseAddr("10.255.255.255"), netip.MustParseAddr("11.0.0.0"), netip.MustParseAddr("255.255.255.255"),
	netip.MustParseAddr("224.0.0.1"), netip.MustParseAddr("1.0.0.127"),
}

var prefixes = []netip.Prefix{
	netip.MustParsePrefix("0.0.0.0/0"), netip.MustParsePrefix("10.0.0.0/8"), netip.MustParsePrefix("10.1.0.0/16"),
	netip.MustParsePrefix("10.1.2.3/32"), netip.MustParsePrefix("128.0.0.0/1"), netip.MustParsePrefix("100.64.1.2/32"),
}

var portEdges = rapid.SampledFrom([]uint16{0, 1, 52, 53, 54, 79, 80, 81, 443, 3128, 65534, 65535})

func drawEntry(t *rapid.T) *Entry {
	if rapid.IntRange(0, 9).Draw(t, "none") == 0 {
		return nil
	}
	e := &Entry{Addr: netip.MustParseAddr("100.64.1.1"), Names: rapid.Bool().Draw(t, "names")}
	for _, p := range prefixes {
		if !rapid.Bool().Draw(t, p.String()) {
			continue
		}
		o := Opening{Prefix: p}
		for range rapid.IntRange(1, MaxRanges).Draw(t, "ranges") {
			a, b := portEdges.Draw(t, "a"), portEdges.Draw(t, "b")
			o.Ranges = append(o.Ranges, Range{min(a, b), max(a, b), rapid.SampledFrom([]uint8{6, 17}).Draw(t, "protocol")})
		}
		e.Openings = append(e.Openings, o)
	}
	return e
}

func TestPacketsAreJudgedAsTheModelSays(t *testing.T) {
	w := open(t, parent(t))
	t.Cleanup(func() {
		if err := w.Detach(); err != nil {
			t.Error(err)
		}
	})
	programs := map[string]*ebpf.Program{}
	for i, h := range hooks {
		programs[h.name] = w.programs[i]
	}
	rapid.Check(t, func(t *rapid.T) {
		e := drawEntry(t)
		var err error
		if e == nil {
			err = w.Delete(nobody)
		} else {
			err = w.Put(nobody, *e)
		}
		if err != nil {
			t.Fatal(err)
		}
		self := netip.MustParseAddr("100.64.1.1")
		for range 30 {
			p := point{
				rapid.SampledFrom(interesting).Draw(t, "addr"), portEdges.Draw(t, "port"),
				rapid.SampledFrom([]uint8{6, 17, 1, 47, 132, 0, 255}).Draw(t, "protocol"),
			}
			options := rapid.IntRange(0, 10).Draw(t, "options")
			want := passes(e, p)
			if got := run(t, programs["sandsea_egress"], packetOf(true, self, p, options, 0x04, 0)); got != want {
				t.Fatalf("out to %+v: %v, entry %+v", p, got, e)
			}
			if got := run(t, programs["sandsea_ingress"], packetOf(false, self, p, options, 0xfb, 0)); got != want {
				t.Fatalf("in from %+v: %v, entry %+v", p, got, e)
			}
			// A reset always comes in.
			if p.protocol == unix.IPPROTO_TCP && !run(t, programs["sandsea_ingress"], packetOf(false, self, p, options, 0x14, 0)) {
				t.Fatalf("a reset from %+v was stopped", p)
			}
			// What has no ports passes only where ports do not matter.
			lost := p
			lost.protocol = unix.IPPROTO_RAW
			if got := run(t, programs["sandsea_egress"], packetOf(true, self, p, options, 0, 185)); got != passes(e, lost) {
				t.Fatalf("a fragment to %+v: %v", p, got)
			}
		}
	})
	if err := w.Delete(nobody); err != nil {
		t.Fatal(err)
	}
	if groups, openings, err := w.Size(); err != nil || groups+openings > 0 {
		t.Errorf("%d groups, %d openings, %v", groups, openings, err)
	}
}

func TestPacketsOfIPv6AreLoopback(t *testing.T) {
	w := open(t, parent(t))
	defer func() {
		if err := w.Detach(); err != nil {
			t.Error(err)
		}
	}()
	if err := w.Put(nobody, Entry{Addr: netip.MustParseAddr("100.64.1.1"), Names: true, Openings: []Opening{
		{netip.MustParsePrefix("0.0.0.0/0"), []Range{{0, 65535, 6}, {0, 65535, 17}}},
	}}); err != nil {
		t.Fatal(err)
	}
	rapid.Check(t, func(t *rapid.T) {
		addr := netip.IPv6Loopback()
		if rapid.Bool().Draw(t, "other") {
			b := addr.As16()
			b[rapid.IntRange(0, 15).Draw(t, "byte")] ^= byte(rapid.IntRange(1, 255).Draw(t, "bits"))
			addr = netip.AddrFrom16(b)
		}
		for i, h := range hooks {
			if h.kind != ebpf.CGroupSKB {
				continue
			}
			from, to := netip.IPv6Loopback(), addr
			if h.attach == ebpf.AttachCGroupInetIngress {
				from, to = to, from
			}
			b := append([]byte{0x60, 0, 0, 0, 0, 20, 6, 64}, from.AsSlice()...)
			b = append(append(b, to.AsSlice()...), make([]byte, 20)...)
			if got := run(t, w.programs[i], b); got != addr.IsLoopback() {
				t.Fatalf("%s of %s: %v", h.name, addr, got)
			}
		}
	})
}

func TestAnExemptGroupMaySendAnything(t *testing.T) {
	w := open(t, parent(t))
	defer func() {
		if err := w.Detach(); err != nil {
			t.Error(err)
		}
	}()
	if err := w.Exempt(nobody); err != nil {
		t.Fatal(err)
	}
	rapid.Check(t, func(t *rapid.T) {
		p := point{rapid.SampledFrom(interesting).Draw(t, "addr"), portEdges.Draw(t, "port"), rapid.Uint8().Draw(t, "protocol")}
		for i, h := range hooks {
			if h.kind == ebpf.CGroupSKB && !run(t, w.programs[i], packetOf(h.attach == ebpf.AttachCGroupInetEgress, layout.Gateway, p, 0, 0, 0)) {
				t.Fatalf("%s stopped %+v", h.name, p)
			}
		}
	})
}

func TestEverythingIsFoundAgain(t *testing.T) {
	dir := parent(t)
	w := open(t, dir)
	a := Entry{Addr: netip.MustParseAddr("100.64.1.1"), Names: true, Openings: []Opening{
		{prefixes[1], []Range{{80, 90, 6}}}, {prefixes[2], []Range{{1, 2, 17}, {3, 4, 6}}},
	}}
	for group := uint64(1); group <= 3; group++ {
		if err := w.Put(group, a); err != nil {
			t.Fatal(err)
		}
	}
	if err := w.Exempt(9); err != nil {
		t.Fatal(err)
	}
	ids := attachedIDs(t, w)
	if err := w.Close(); err != nil {
		t.Fatal(err)
	}
	w = open(t, dir)
	if got := attachedIDs(t, w); !slices.Equal(got, ids) {
		t.Errorf("programs %v instead of %v", got, ids)
	}
	if groups, openings, err := w.Size(); err != nil || groups != 4 || openings != 6 {
		t.Errorf("%d groups, %d openings, %v", groups, openings, err)
	}
	if addr, ok := w.Addr(2); !ok || addr != a.Addr {
		t.Errorf("%s, %v", addr, ok)
	}
	if _, ok := w.Addr(9); ok {
		t.Error("an exempt group has an address")
	}
	// Other rules take the place of the old ones, and the maps stay.
	if err := w.Close(); err != nil {
		t.Fatal(err)
	}
	old := layout
	layout.Ports = []uint16{53}
	defer func() { layout = old }()
	w = open(t, dir)
	got := attachedIDs(t, w)
	for i := range hooks {
		// Programs without ports are the same.
		if same := slices.Contains(ids, got[i]); same != (hooks[i].name == "sandsea_socket") {
			t.Errorf("%s was replaced: %v", hooks[i].name, !same)
		}
	}
	if groups, openings, err := w.Size(); err != nil || groups != 4 || openings != 6 {
		t.Errorf("%d groups, %d openings, %v", groups, openings, err)
	}
	if err := w.Exempt(10); err != nil {
		t.Fatal(err)
	}
	if err := w.Sweep(func(group uint64) bool { return group == 2 }); err != nil {
		t.Fatal(err)
	}
	if groups, openings, err := w.Size(); err != nil || groups != 2 || openings != 2 {
		t.Errorf("%d groups, %d openings, %v", groups, openings, err)
	}
	for range 2 {
		if err := w.Detach(); err != nil {
			t.Fatal(err)
		}
	}
	if got := attachedIDs(t, w); len(got) > 0 {
		t.Errorf("left %v", got)
	}
}

func attachedIDs(t *testing.T, w *Wall) []string {
	t.Helper()
	found, err := w.attached()
	if err != nil {
		t.Fatal(err)
	}
	var ids []string
	for _, h := range hooks {
		p := found[h.name]
		if p == nil {
			continue
		}
		info, err := p.Info()
		if err != nil {
			t.Fatal(err)
		}
		id, _ := info.ID()
		ids = append(ids, fmt.Sprint(id))
		p.Close()
	}
	return ids
}

func TestOpeningsThatCannotBeChangeNothing(t *testing.T) {
	w := open(t, parent(t))
	defer func() {
		if err := w.Detach(); err != nil {
			t.Error(err)
		}
	}()
	good := Entry{Addr: netip.MustParseAddr("100.64.1.1"), Openings: []Opening{{prefixes[1], []Range{{80, 80, 6}}}}}
	if err := w.Put(nobody, good); err != nil {
		t.Fatal(err)
	}
	for what, o := range map[string][]Opening{
		"no ranges":        {good.Openings[0], {Prefix: prefixes[2]}},
		"too many ranges":  {good.Openings[0], {Prefix: prefixes[2], Ranges: make([]Range, MaxRanges+1)}},
		"IPv6":             {{netip.MustParsePrefix("2001:db8::/32"), []Range{{1, 1, 6}}}},
		"a prefix, twice":  {good.Openings[0], good.Openings[0]},
		"an opening of no": {{Ranges: []Range{{1, 1, 6}}}},
	} {
		if err := w.Put(nobody, Entry{Addr: good.Addr, Openings: o}); err == nil {
			t.Errorf("%s was taken", what)
		}
		if groups, openings, err := w.Size(); err != nil || groups != 1 || openings != 1 {
			t.Errorf("%s: %d groups, %d openings, %v", what, groups, openings, err)
		}
	}
	if !errors.Is(full(unix.ENOSPC), ErrFull) || errors.Is(full(unix.EPERM), ErrFull) {
		t.Error("a full map")
	}
}

func TestTheLevelIsFound(t *testing.T) {
	dir := parent(t)
	id, levels, err := place(dir)
	if err != nil || id < 2 {
		t.Fatal(id, err)
	}
	if len(levels) != 1 {
		t.Skipf("needs the root of the tree of control groups; the levels are %v", levels)
	}
	// Where the tree is seen in part only, the programs look at every level; these load as well.
	w := open(t, dir)
	defer func() {
		if err := w.Detach(); err != nil {
			t.Error(err)
		}
	}()
	for _, h := range hooks {
		a := &assembler{layout: layout, maps: w.maps, parent: id, levels: []int{1, 2, 3, maxLevel}, errno: true}
		p, err := ebpf.NewProgram(&ebpf.ProgramSpec{
			Name: h.name, Type: h.kind, AttachType: h.attach, Instructions: h.code(a), License: "GPL",
		})
		if err != nil {
			t.Errorf("%s: %+v", h.name, err)
			continue
		}
		p.Close()
	}
}

func TestAGroupHasAnID(t *testing.T) {
	dir := parent(t)
	if id, err := ID(dir.Name()); err != nil || id < 2 {
		t.Errorf("%d, %v", id, err)
	}
	for _, path := range []string{t.TempDir(), "/not/there"} {
		if id, err := ID(path); err == nil {
			t.Errorf("%s has id %d", path, id)
		}
	}
}

// FuzzDecode: whatever the bytes are, it returns.
func FuzzDecode(f *testing.F) {
	f.Add(make([]byte, eventSize))
	f.Add([]byte{1})
	f.Fuzz(func(t *testing.T, b []byte) {
		if _, ok := decode(b); ok != (len(b) >= eventSize) {
			t.Error(len(b), ok)
		}
	})
}
