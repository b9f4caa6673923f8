package link

import (
	"errors"
	"fmt"
	"net"
	"net/netip"
	"os"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/vishvananda/netlink"
	"golang.org/x/sys/unix"

	"github.com/sandsea/sandsea/internal/linux/netns"
	"github.com/sandsea/sandsea/internal/testkit/leak"
	"github.com/sandsea/sandsea/internal/testkit/require"
	"github.com/sandsea/sandsea/internal/testkit/wait"
)

func TestMain(m *testing.M) { os.Exit(leak.Main(m)) }

var gateway = netip.MustParseAddr("100.64.0.1")

func space(t *testing.T) *os.File {
	t.Helper()
	require.Root(t)
	ns, err := netns.New()
	require.That(t, "netns", err)
	t.Cleanup(func() { ns.Close() })
	return ns
}

func open(t *testing.T) (*Gate, *os.File) {
	t.Helper()
	ns := space(t)
	g, err := Open(ns, gateway, 1, 100)
	require.That(t, "egress", err)
	t.Cleanup(func() { g.Close() })
	return g, ns
}

func TestALinkIsWhole(t *testing.T) {
	g, gate := open(t)
	inside := space(t)
	addr := netip.MustParseAddr("100.64.1.7")
	if err := g.Attach(inside, 7, addr); err != nil {
		t.Fatal(err)
	}
	if err := netns.Do(inside, func() error {
		l, err := netlink.LinkByName("eth0")
		if err != nil {
			return err
		}
		if a := l.Attrs(); a.Flags&net.FlagUp == 0 || a.RawFlags&unix.IFF_NOARP == 0 || a.OperState != netlink.OperUp ||
			a.NumTxQueues != 1 || a.NumRxQueues != 1 {
			t.Errorf("eth0 is %+v", a)
		}
		addrs, err := netlink.AddrList(l, netlink.FAMILY_ALL)
		if err != nil || len(addrs) != 1 || addrs[0].IPNet.String() != "100.64.1.7/32" {
			t.Errorf("addresses %v, %v", addrs, err)
		}
		routes, err := netlink.RouteList(nil, netlink.FAMILY_ALL)
		var all []string
		for _, r := range routes {
			all = append(all, fmt.Sprintf("%s via %s by %d", r.Dst, r.Gw, r.LinkIndex))
		}
		slices.Sort(all)
		want := []string{"0.0.0.0/0 via 100.64.0.1 by 64", "100.64.0.1/32 via <nil> by 64"}
		if err != nil || !slices.Equal(all, want) {
			t.Errorf("routes %q, %v", all, err)
		}
		near, err := netlink.NeighList(l.Attrs().Index, netlink.FAMILY_ALL)
		if err != nil || len(near) != 1 || near[0].State != netlink.NUD_PERMANENT {
			t.Errorf("neighbours %v, %v", near, err)
		}
		if _, err := os.Stat("/proc/sys/net/ipv6/conf/eth0"); !errors.Is(err, os.ErrNotExist) {
			t.Errorf("IPv6 is there: %v", err)
		}
		return nil
	}); err != nil {
		t.Fatal(err)
	}
	if err := netns.Do(gate, func() error {
		l, err := netlink.LinkByName("s7")
		if err != nil {
			return err
		}
		if l.Attrs().Index != int(gateIndex(7)) || l.Attrs().OperState != netlink.OperUp {
			t.Errorf("s7 is %+v", l.Attrs())
		}
		for file, want := range map[string]string{
			"ipv4/ip_forward": "0", "ipv4/conf/s7/forwarding": "0", "ipv4/conf/s7/rp_filter": "1",
			"ipv4/conf/s7/route_localnet": "0", "ipv6/conf/default/disable_ipv6": "1",
		} {
			b, err := os.ReadFile("/proc/sys/net/" + file)
			if err == nil && strings.TrimSpace(string(b)) != want {
				t.Errorf("%s is %q", file, b)
			}
		}
		if _, err := os.Stat("/proc/sys/net/ipv6/conf/s7"); !errors.Is(err, os.ErrNotExist) {
			t.Errorf("IPv6 is there: %v", err)
		}
		rules, err := netlink.RuleList(unix.AF_INET)
		marked := 0
		for _, r := range rules {
			if r.Mark == 1 && r.Table == 100 {
				marked++
			}
		}
		if err != nil || marked != 1 {
			t.Errorf("rules %v, %v", rules, err)
		}
		return nil
	}); err != nil {
		t.Fatal(err)
	}
}

func TestOpenIsIdempotentAndForwardsNothingWhateverTheHostDoes(t *testing.T) {
	ns := space(t)
	var host settings
	if err := netns.Do(ns, func() error { return host.set("ipv4/ip_forward", "1") }); err != nil {
		t.Fatal(err)
	}
	if err := host.close(); err != nil {
		t.Fatal(err)
	}
	for range 3 {
		g, err := Open(ns, gateway, 1, 100)
		require.That(t, "egress", err)
		g.Close()
	}
	if err := netns.Do(ns, func() error {
		b, err := os.ReadFile("/proc/sys/net/ipv4/ip_forward")
		if err == nil && strings.TrimSpace(string(b)) != "0" {
			t.Errorf("ip_forward is %q", b)
		}
		rules, rerr := netlink.RuleList(unix.AF_INET)
		if len(rules) != 4 {
			t.Errorf("rules %v", rules)
		}
		return errors.Join(err, rerr)
	}); err != nil {
		t.Fatal(err)
	}
}

func TestWhatIsThereIsNotMadeAgain(t *testing.T) {
	g, _ := open(t)
	a, b := space(t), space(t)
	addr := netip.MustParseAddr("100.64.1.1")
	if err := g.Attach(a, 1, addr); err != nil {
		t.Fatal(err)
	}
	if err := g.Attach(b, 1, addr); !errors.Is(err, ErrExists) {
		t.Errorf("the number again: %v", err)
	}
	if err := g.Attach(a, 2, addr.Next()); !errors.Is(err, ErrExists) {
		t.Errorf("the namespace again: %v", err)
	}
	// The same address behind two links is refused by the route, and the half link goes.
	if err := g.Attach(b, 3, addr); err == nil || errors.Is(err, ErrExists) {
		t.Errorf("the address again: %v", err)
	}
	if n, err := g.List(); err != nil || !slices.Equal(n, []uint32{1}) {
		t.Errorf("links %v, %v", n, err)
	}
	if err := g.Attach(b, 2, addr.Next()); err != nil {
		t.Errorf("after all that: %v", err)
	}
}

func TestManyLinksGoAtOnce(t *testing.T) {
	g, _ := open(t)
	var all sync.WaitGroup
	for w := range 4 {
		all.Go(func() {
			for i := range 25 {
				n := uint32(1 + 25*w + i)
				ns, err := netns.New()
				if err != nil {
					t.Error(err)
					return
				}
				t.Cleanup(func() { ns.Close() })
				addr := netip.AddrFrom4([4]byte{100, 64, 1, byte(n)})
				if err := g.Attach(ns, n, addr); err != nil {
					t.Error(err)
					return
				}
			}
		})
	}
	all.Wait()
	numbers, err := g.List()
	if err != nil || len(numbers) != 100 {
		t.Fatalf("%d links, %v", len(numbers), err)
	}
	some := append(slices.Clone(numbers[:50]), 4711)
	if err := g.Delete(some); err != nil {
		t.Fatal(err)
	}
	left, err := g.List()
	if err != nil || len(left) != 50 || slices.Contains(left, numbers[0]) {
		t.Errorf("%d links left, %v", len(left), err)
	}
	if there, err := g.Exists(numbers[0]); err != nil || there {
		t.Errorf("%v, %v", there, err)
	}
	if there, err := g.Exists(left[0]); err != nil || !there {
		t.Errorf("%v, %v", there, err)
	}
	if err := g.Delete(nil); err != nil {
		t.Error(err)
	}
}

func TestALinkGoesWithItsNamespace(t *testing.T) {
	g, _ := open(t)
	ns, err := netns.New()
	if err != nil {
		t.Fatal(err)
	}
	if err := g.Attach(ns, 1, netip.MustParseAddr("100.64.1.1")); err != nil {
		t.Fatal(err)
	}
	if err := ns.Close(); err != nil {
		t.Fatal(err)
	}
	wait.Until(t, 30*time.Second, func() bool {
		there, err := g.Exists(1)
		return err == nil && !there
	})
}

func TestNames(t *testing.T) {
	for device, want := range map[string]uint32{"s1": 1, "s4194047": 4194047, "s0": 0} {
		if n, ok := numberOf(device); !ok || n != want {
			t.Errorf("%s: %d, %v", device, n, ok)
		}
	}
	for _, device := range []string{"", "s", "sit0", "s01", "s-1", "s+1", "lo", "s1x", "s99999999999", "S1"} {
		if n, ok := numberOf(device); ok {
			t.Errorf("%s is link %d", device, n)
		}
	}
}

func TestErrorsSayWhatTheKernelSaid(t *testing.T) {
	g, _ := open(t)
	err := g.socket.do(request{"route to nowhere", routeTo(4711, gateway, 32, netip.Addr{})})
	if !errors.Is(err, unix.ENODEV) || !strings.Contains(err.Error(), "route to nowhere") {
		t.Errorf("%v", err)
	}
}

func TestSettingsReachEachOfManyNamespaces(t *testing.T) {
	require.Root(t)
	var s settings
	t.Cleanup(func() {
		if err := s.close(); err != nil {
			t.Error(err)
		}
	})
	const name = "ipv4/ip_forward"
	for i := range 2*usesOfProc + 1 {
		ns, err := netns.New()
		require.That(t, "netns", err)
		want := fmt.Sprint(1 - i%2)
		err = netns.Do(ns, func() error {
			if err := s.set(name, want); err != nil {
				return err
			}
			b, err := os.ReadFile("/proc/sys/net/" + name)
			if got := strings.TrimSpace(string(b)); got != want {
				t.Errorf("namespace %d has %q, not %s", i, got, want)
			}
			return err
		})
		if err := errors.Join(err, ns.Close()); err != nil {
			t.Fatal(err)
		}
	}
	if err := s.set("ipv4/no_such_setting", "1"); !errors.Is(err, os.ErrNotExist) {
		t.Errorf("a setting that is not there: %v", err)
	}
}
