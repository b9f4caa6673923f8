package nft

import (
	"fmt"
	"maps"
	"net/netip"
	"os"
	"os/exec"
	"reflect"
	"slices"
	"strings"
	"testing"

	"github.com/google/nftables"
	"pgregory.net/rapid"

	"github.com/sandsea/sandsea/internal/linux/netns"
	"github.com/sandsea/sandsea/internal/testkit/leak"
	"github.com/sandsea/sandsea/internal/testkit/require"
)

func TestMain(m *testing.M) { os.Exit(leak.Main(m)) }

var layout = Layout{
	Gateway: netip.MustParseAddr("100.64.0.1"), Ports: []uint16{53, 80}, Names: netip.MustParsePrefix("198.18.0.0/15"),
	Proxy: netip.MustParseAddrPort("127.0.0.1:7001"), Mark: 1,
}

func space(t *testing.T) *os.File {
	t.Helper()
	require.Root(t)
	ns, err := netns.New()
	require.That(t, "netns", err)
	t.Cleanup(func() { ns.Close() })
	return ns
}

func open(t testing.TB, ns *os.File, l Layout) *Table {
	t.Helper()
	x, err := Open(ns, l)
	require.That(t, "egress", err)
	t.Cleanup(func() { x.Close() })
	return x
}

// same compares what a Table thinks with what the kernel has.
func same(a, b *Table) error {
	// Class numbers that were given last are nobody's business.
	x, y := a.state, b.state
	x.last, y.last = 0, 0
	if !reflect.DeepEqual(x, y) {
		return fmt.Errorf("%+v is not %+v", x, y)
	}
	return nil
}

var some = []Opening{
	{netip.MustParseAddr("10.0.0.0"), netip.MustParseAddr("10.255.255.255"), 80, 90, 6},
	{netip.MustParseAddr("10.0.0.0"), netip.MustParseAddr("10.255.255.255"), 53, 53, 17},
	{netip.MustParseAddr("0.0.0.0"), netip.MustParseAddr("9.255.255.254"), 1, 65535, 6},
	{netip.MustParseAddr("203.0.113.7"), netip.MustParseAddr("203.0.113.7"), 0, 65535, 6},
	{netip.MustParseAddr("255.255.255.255"), netip.MustParseAddr("255.255.255.255"), 1, 1, 17},
}

func TestWhatIsPutIsWhatTheKernelHas(t *testing.T) {
	ns := space(t)
	x := open(t, ns, layout)
	rapid.Check(t, func(t *rapid.T) {
		for range rapid.IntRange(1, 12).Draw(t, "changes") {
			source := netip.AddrFrom4([4]byte{100, 64, 1, byte(rapid.IntRange(1, 4).Draw(t, "source"))})
			names := rapid.Bool().Draw(t, "names")
			var openings []Opening
			for i, o := range some {
				if rapid.IntRange(0, 2).Draw(t, fmt.Sprint("opening ", i)) == 0 {
					openings = append(openings, o)
				}
			}
			if err := x.Put(source, names, openings); err != nil {
				t.Fatal(err)
			}
		}
		y, err := Open(ns, layout)
		if err != nil {
			t.Fatal(err)
		}
		defer y.Close()
		if err := same(x, y); err != nil {
			t.Fatal(err)
		}
		for number, c := range x.state.classes {
			if c.users == 0 || x.state.byKey[key(c.boxes)] != number {
				t.Fatalf("class %d: %+v", number, c)
			}
		}
	})
	for _, a := range sources(t, x) {
		if err := x.Put(a, false, nil); err != nil {
			t.Fatal(err)
		}
	}
	if y := open(t, ns, layout); len(y.Classes()) > 0 || len(sources(t, y)) > 0 {
		t.Errorf("left: %+v", y.state)
	}
}

func sources(t *testing.T, x *Table) []netip.Addr {
	t.Helper()
	s, err := x.Sources()
	if err != nil {
		t.Fatal(err)
	}
	return s
}

func TestOtherRulesComeWithWhoMayWhat(t *testing.T) {
	ns := space(t)
	x := open(t, ns, layout)
	a, b := netip.MustParseAddr("100.64.1.1"), netip.MustParseAddr("100.64.1.2")
	if err := x.Put(a, true, some); err != nil {
		t.Fatal(err)
	}
	if err := x.Put(b, false, some); err != nil {
		t.Fatal(err)
	}
	if got := x.Classes(); len(got) != 1 || !slices.Equal(slices.Collect(maps.Values(got)), []int{2}) {
		t.Errorf("two sources with the same openings have classes %v", got)
	}
	other := layout
	other.Ports = append(slices.Clone(layout.Ports), 3128)
	y := open(t, ns, other)
	if err := same(x, y); err != nil {
		t.Error(err)
	}
	chains, err := y.conn.ListChainsOfTableFamily(nftables.TableFamilyINet)
	if err != nil {
		t.Fatal(err)
	}
	gates := slices.DeleteFunc(chains, func(c *nftables.Chain) bool { return !strings.HasPrefix(c.Name, chainPrefix) })
	if want, _ := y.chain(); len(gates) != 1 || gates[0].Name != want {
		t.Errorf("chains %v", gates)
	}
	if err := y.Put(a, false, nil); err != nil {
		t.Fatal(err)
	}
}

func TestARejectedChangeLeavesAllAsItWas(t *testing.T) {
	ns := space(t)
	x := open(t, ns, layout)
	a, b := netip.MustParseAddr("100.64.1.1"), netip.MustParseAddr("100.64.1.2")
	if err := x.Put(a, true, some[:1]); err != nil {
		t.Fatal(err)
	}
	overlap := []Opening{some[0], {some[0].From.Next(), some[0].To, 85, 95, 6}}
	for range 2 {
		if err := x.Put(b, true, overlap); err == nil {
			t.Fatal("openings that overlap were taken")
		}
	}
	if err := x.Put(a, true, overlap); err == nil {
		t.Fatal("openings that overlap were taken")
	}
	if got := sources(t, x); !slices.Equal(got, []netip.Addr{a}) {
		t.Errorf("sources %v", got)
	}
	if err := same(x, open(t, ns, layout)); err != nil {
		t.Error(err)
	}
	// Somebody else's hand in it is found out, and then it goes on.
	y := open(t, ns, layout)
	if err := y.Put(a, false, nil); err != nil {
		t.Fatal(err)
	}
	if err := x.Put(a, false, nil); err == nil {
		t.Error("removed twice")
	}
	if err := x.Put(a, false, some[1:2]); err != nil {
		t.Fatal(err)
	}
	if err := same(x, open(t, ns, layout)); err != nil {
		t.Error(err)
	}
}

func TestAClassThatNobodyHasIsSwept(t *testing.T) {
	ns := space(t)
	x := open(t, ns, layout)
	if err := x.add(shard(7), encode(7, some)); err != nil {
		t.Fatal(err)
	}
	if err := x.conn.Flush(); err != nil {
		t.Fatal(err)
	}
	y := open(t, ns, layout)
	if n := y.Classes(); len(n) != 1 {
		t.Fatalf("classes %v", n)
	}
	for range 2 {
		if err := y.Sweep(); err != nil {
			t.Fatal(err)
		}
	}
	if z := open(t, ns, layout); len(z.Classes()) > 0 || len(y.Classes()) > 0 {
		t.Errorf("classes %v and %v", y.Classes(), z.Classes())
	}
}

func TestManyOpeningsFitOneChange(t *testing.T) {
	ns := space(t)
	x := open(t, ns, layout)
	var many []Opening
	for i := range 3000 {
		a := netip.AddrFrom4([4]byte{10, byte(i >> 8), byte(i), 1})
		many = append(many, Opening{a, a, 80, 80, 6})
	}
	a := netip.MustParseAddr("100.64.1.1")
	if err := x.Put(a, false, many); err != nil {
		t.Fatal(err)
	}
	if err := same(x, open(t, ns, layout)); err != nil {
		t.Error("what was read differs")
	}
	if err := x.Put(a, false, nil); err != nil {
		t.Fatal(err)
	}
}

// TestToolsShowIt keeps the table readable for an operator; there are makings of nft that die of some.
func TestToolsShowIt(t *testing.T) {
	require.Feature(t, "bin:nft")
	ns := space(t)
	x := open(t, ns, layout)
	if err := x.Put(netip.MustParseAddr("100.64.1.1"), true, some); err != nil {
		t.Fatal(err)
	}
	if err := netns.Do(ns, func() error {
		out, err := exec.Command("nft", "list", "table", "inet", "sandsea").CombinedOutput()
		for _, want := range []string{
			"ip daddr 198.18.0.0/15 ip saddr @named tproxy ip to 127.0.0.1:7001", "ip daddr 100.64.0.1 tcp dport 53",
			"100.64.1.1 : 0x00000001", "policy drop", "203.0.113.7",
		} {
			if !strings.Contains(string(out), want) {
				t.Errorf("no %q in\n%s", want, out)
				break
			}
		}
		return err
	}); err != nil {
		t.Fatal(err)
	}
}
