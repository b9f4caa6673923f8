// Package link ties network namespaces to a gate: a namespace of one's own in which many point-to-point links end.
//
// Each link is a veth pair that is made where it will be: "eth0" in the other namespace and "s<number>" in the gate, with
// an address for the one and a route to it in the other. Neither end asks who is where (ARP): both know the other's
// hardware address, by entries that do not count towards the kernel's limit. The MTU is too small
// for the kernel to give either end IPv6, which would be off if it did.
//
// A link goes with either of its namespaces; the kernel takes many at once in no time, whereas each that is deleted
// alone waits for RCU.
//
// Attach runs in two steps so that the lock of the kernel, which there is one of, is all that calls wait for. All methods
// may be called concurrently.
package link

import (
	"encoding/binary"
	"errors"
	"fmt"
	"net"
	"net/netip"
	"os"
	"strconv"
	"strings"
	"sync"

	"github.com/vishvananda/netlink"
	"github.com/vishvananda/netlink/nl"
	"golang.org/x/sys/unix"

	"github.com/sandsea/sandsea/internal/linux/netns"
)

// Inside is the name of the link's end in the other namespace.
const Inside = "eth0"

// prefix begins the name of each end in the gate.
const prefix = "s"

// base is the interface index of link 0: those of links follow from their numbers, in both namespaces, so that nobody has
// to ask. The kernel's own devices are below.
const base = 64

// mtu is the largest for which the kernel makes no IPv6 on a device: RFC 8200 section 5 asks for 1,280. That saves a
// quarter of a link's memory. TCP hands over segments of up to 64 KiB in one piece whatever it is.
const mtu = 1279

// loopback is the index of lo in every namespace.
const loopback = 1

// doomed is the device group of links that are about to be deleted together.
const doomed = 0x5ea

// ErrExists says that there is a link of this number or name already, in one of the namespaces.
var ErrExists = errors.New("the link exists")

// Gate makes and lists links that end in one namespace.
type Gate struct {
	gateway  netip.Addr
	ns       *os.File // ours
	settings settings

	mu     sync.Mutex // one batch at a time: the kernel has one lock for all of them
	socket *socket    // guarded by mu
	handle *netlink.Handle
}

// Open prepares a namespace to be a gate and holds it: nothing is forwarded, IPv6 is off, packets whose source is not
// behind the link that they come by are dropped, and gateway is its own address. Packets that carry mark are for the
// gate itself, whatever their destination, by the routing table of that number. Idempotent.
func Open(ns *os.File, gateway netip.Addr, mark uint32, table int) (_ *Gate, err error) {
	own, err := duplicate(ns)
	if err != nil {
		return nil, err
	}
	g := &Gate{gateway: gateway, ns: own}
	defer func() {
		if err != nil {
			_ = g.Close()
		}
	}()
	if err := netns.Do(ns, func() error {
		for _, s := range gateSettings {
			if err := g.settings.set(s.name, s.value); err != nil {
				return err
			}
		}
		if g.socket, err = dial(); err != nil {
			return err
		}
		g.handle, err = netlink.NewHandle(unix.NETLINK_ROUTE)
		return err
	}); err != nil {
		return nil, err
	}
	if err := g.route(mark, table); err != nil {
		return nil, err
	}
	return g, nil
}

type setting struct{ name, value string }

// gateSettings come before the first link, since a namespace takes those of IPv4 over from the host, which may forward,
// and each link those of "default".
var gateSettings = []setting{
	{"ipv4/ip_forward", "0"},
	{"ipv4/conf/all/forwarding", "0"},
	{"ipv4/conf/default/forwarding", "0"},
	{"ipv4/conf/all/rp_filter", "1"},
	{"ipv4/conf/default/rp_filter", "1"},
	{"ipv4/conf/all/route_localnet", "0"},
	{"ipv4/conf/default/route_localnet", "0"},
	{"ipv4/conf/all/accept_local", "0"},
	{"ipv4/conf/default/accept_local", "0"},
	{"ipv4/conf/all/accept_source_route", "0"},
	{"ipv4/conf/default/accept_source_route", "0"},
	{"ipv4/conf/all/accept_redirects", "0"},
	{"ipv4/conf/default/accept_redirects", "0"},
	{"ipv4/conf/all/send_redirects", "0"},
	{"ipv4/conf/default/send_redirects", "0"},
	{"ipv4/conf/all/proxy_arp", "0"},
	{"ipv4/conf/default/proxy_arp", "0"},
	{"ipv4/conf/all/log_martians", "0"},
	{"ipv4/conf/default/log_martians", "0"},
	// Each refused datagram is answered, not one in a second: a client that hears nothing hangs.
	{"ipv4/icmp_ratelimit", "0"},
}

// noIPv6 turns IPv6 off for devices to come, on the calling thread's namespace. A kernel without it needs no turning off.
func (g *Gate) noIPv6() error {
	if err := g.settings.set("ipv6/conf/default/disable_ipv6", "1"); err != nil && !errors.Is(err, os.ErrNotExist) {
		return err
	}
	return nil
}

// route makes the gate's own address, and has marked packets end here.
func (g *Gate) route(mark uint32, table int) error {
	if err := netns.Do(g.ns, func() error {
		err := g.settings.set("ipv6/conf/all/disable_ipv6", "1")
		if errors.Is(err, os.ErrNotExist) {
			err = nil
		}
		return errors.Join(err, g.noIPv6())
	}); err != nil {
		return err
	}
	lo := &netlink.Device{LinkAttrs: netlink.LinkAttrs{Name: "lo", Index: loopback}}
	if err := g.handle.LinkSetUp(lo); err != nil {
		return fmt.Errorf("bring lo of the gate up: %w", err)
	}
	self := &net.IPNet{IP: g.gateway.AsSlice(), Mask: net.CIDRMask(32, 32)}
	if err := g.handle.AddrReplace(lo, &netlink.Addr{IPNet: self, Scope: unix.RT_SCOPE_HOST}); err != nil {
		return fmt.Errorf("address of the gate: %w", err)
	}
	if err := g.handle.RouteReplace(&netlink.Route{
		LinkIndex: loopback, Table: table, Type: unix.RTN_LOCAL, Scope: unix.RT_SCOPE_HOST,
		Dst: &net.IPNet{IP: net.IPv4zero.To4(), Mask: net.CIDRMask(0, 32)},
	}); err != nil {
		return fmt.Errorf("route of marked packets: %w", err)
	}
	rules, err := g.handle.RuleList(unix.AF_INET)
	if err != nil {
		return fmt.Errorf("routing rules: %w", err)
	}
	for _, r := range rules {
		if r.Mark == mark && r.Table == table {
			return nil
		}
	}
	rule := netlink.NewRule()
	rule.Family, rule.Mark, rule.Table = unix.AF_INET, mark, table
	if err := g.handle.RuleAdd(rule); err != nil {
		return fmt.Errorf("rule of marked packets: %w", err)
	}
	return nil
}

// Attach makes link number between the gate and another namespace, whose address there becomes addr and whose every
// route leads to the gate. ErrExists when the number is taken or the namespace has a device of that name. On an error
// nothing is left.
func (g *Gate) Attach(inside *os.File, number uint32, addr netip.Addr) error {
	var s *socket
	if err := netns.Do(inside, func() error {
		if err := g.noIPv6(); err != nil {
			return err
		}
		var err error
		s, err = dial()
		return err
	}); err != nil {
		if s != nil {
			_ = s.close()
		}
		return err
	}
	defer func() { _ = s.close() }()
	there := inner(g.ns, number, addr, g.gateway)
	here := outer(number, addr)

	g.mu.Lock()
	defer g.mu.Unlock()
	if err := s.do(there[0]); err != nil {
		// EBUSY: the index is taken.
		if errors.Is(err, unix.EEXIST) || errors.Is(err, unix.EBUSY) {
			err = fmt.Errorf("%w: %w", ErrExists, err)
		}
		return fmt.Errorf("link %d: %w", number, err)
	}
	err := errors.Join(s.do(there[1:]...), g.socket.do(here...))
	if err == nil {
		// Without this what is sent at once is lost.
		err = errors.Join(s.do(settled(base)), g.socket.do(settled(gateIndex(number))))
	}
	if err != nil {
		return fmt.Errorf("link %d: %w", number, errors.Join(err, g.deleteLocked([]uint32{number})))
	}
	return nil
}

// hardware addresses: the gate's end is the same for all, the other follows from the IP address. They are of the range
// that nobody is sold.
var gateHardware = []byte{0x02, 0x5e, 0, 0, 0, 1}

func hardware(a netip.Addr) []byte { return append([]byte{0x02, 0x5f}, a.AsSlice()...) }

// inner are the requests for the end in the other namespace. The first makes both ends.
func inner(gate *os.File, number uint32, addr, gateway netip.Addr) []request {
	const flags = unix.IFF_UP | unix.IFF_NOARP
	index := int32(base)
	head := nl.NewIfInfomsg(unix.AF_UNSPEC)
	head.Index, head.Flags, head.Change = index, flags, flags
	make := nl.NewNetlinkRequest(unix.RTM_NEWLINK, unix.NLM_F_CREATE|unix.NLM_F_EXCL)
	make.AddData(head)
	make.AddData(nl.NewRtAttr(unix.IFLA_IFNAME, nl.ZeroTerminated(Inside)))
	make.AddData(nl.NewRtAttr(unix.IFLA_ADDRESS, hardware(addr)))
	// One queue each way, however many processors there are: each costs memory and time.
	one := nl.Uint32Attr(1)
	make.AddData(nl.NewRtAttr(unix.IFLA_NUM_TX_QUEUES, one))
	make.AddData(nl.NewRtAttr(unix.IFLA_NUM_RX_QUEUES, one))
	make.AddData(nl.NewRtAttr(unix.IFLA_MTU, nl.Uint32Attr(mtu)))
	info := nl.NewRtAttr(unix.IFLA_LINKINFO, nil)
	info.AddRtAttr(nl.IFLA_INFO_KIND, nl.NonZeroTerminated("veth"))
	peer := info.AddRtAttr(nl.IFLA_INFO_DATA, nil).AddRtAttr(nl.VETH_INFO_PEER, nil)
	phead := nl.NewIfInfomsgChild(peer, unix.AF_UNSPEC)
	phead.Index, phead.Flags, phead.Change = gateIndex(number), unix.IFF_NOARP, unix.IFF_NOARP
	peer.AddRtAttr(unix.IFLA_IFNAME, nl.ZeroTerminated(name(number)))
	peer.AddRtAttr(unix.IFLA_ADDRESS, gateHardware)
	peer.AddRtAttr(unix.IFLA_NUM_TX_QUEUES, one)
	peer.AddRtAttr(unix.IFLA_NUM_RX_QUEUES, one)
	peer.AddRtAttr(unix.IFLA_MTU, nl.Uint32Attr(mtu))
	peer.AddRtAttr(unix.IFLA_NET_NS_FD, nl.Uint32Attr(uint32(gate.Fd())))
	make.AddData(info)

	return []request{
		{"make the pair", make},
		{"address", addressOf(index, addr)},
		{"hardware address of the gate", neighbour(index, gateway, gateHardware)},
		{"route to the gate", routeTo(index, gateway, 32, netip.Addr{})},
		{"default route", routeTo(index, netip.IPv4Unspecified(), 0, gateway)},
	}
}

// outer are the requests for the end in the gate.
func outer(number uint32, addr netip.Addr) []request {
	// The kernel does not bring a pair's second end up before the first is there.
	up := nl.NewNetlinkRequest(unix.RTM_SETLINK, 0)
	head := nl.NewIfInfomsg(unix.AF_UNSPEC)
	head.Index, head.Flags, head.Change = gateIndex(number), unix.IFF_UP, unix.IFF_UP
	up.AddData(head)
	return []request{
		{"bring the end in the gate up", up},
		{"route from the gate", routeTo(gateIndex(number), addr, 32, netip.Addr{})},
		{"hardware address", neighbour(gateIndex(number), addr, hardware(addr))},
	}
}

// settled has the kernel finish what it does in the background when a link comes up: until then the queue of the device
// swallows everything. To be asked about the device makes it do so before it answers.
func settled(index int32) request {
	r := nl.NewNetlinkRequest(unix.RTM_GETLINK, 0)
	head := nl.NewIfInfomsg(unix.AF_UNSPEC)
	head.Index = index
	r.AddData(head)
	r.AddData(nl.NewRtAttr(unix.IFLA_EXT_MASK, nl.Uint32Attr(skipStats)))
	return request{"wait for the link to be up", r}
}

// skipStats is RTEXT_FILTER_SKIP_STATS.
const skipStats = 1 << 3

const fresh = unix.NLM_F_CREATE | unix.NLM_F_EXCL

func addressOf(index int32, a netip.Addr) *nl.NetlinkRequest {
	r := nl.NewNetlinkRequest(unix.RTM_NEWADDR, fresh)
	m := nl.NewIfAddrmsg(unix.AF_INET)
	m.Index, m.Prefixlen, m.Scope = uint32(index), 32, unix.RT_SCOPE_UNIVERSE
	r.AddData(m)
	r.AddData(nl.NewRtAttr(unix.IFA_LOCAL, a.AsSlice()))
	r.AddData(nl.NewRtAttr(unix.IFA_ADDRESS, a.AsSlice()))
	return r
}

// routeTo leads to what is right behind the link, or beyond via.
func routeTo(index int32, to netip.Addr, bits uint8, via netip.Addr) *nl.NetlinkRequest {
	r := nl.NewNetlinkRequest(unix.RTM_NEWROUTE, fresh)
	m := nl.NewRtMsg()
	m.Family, m.Dst_len, m.Scope = unix.AF_INET, bits, unix.RT_SCOPE_LINK
	if via.IsValid() {
		m.Scope = unix.RT_SCOPE_UNIVERSE
	}
	r.AddData(m)
	if bits > 0 {
		r.AddData(nl.NewRtAttr(unix.RTA_DST, to.AsSlice()))
	}
	if via.IsValid() {
		r.AddData(nl.NewRtAttr(unix.RTA_GATEWAY, via.AsSlice()))
	}
	r.AddData(nl.NewRtAttr(unix.RTA_OIF, nl.Uint32Attr(uint32(index))))
	return r
}

func neighbour(index int32, a netip.Addr, hw []byte) *nl.NetlinkRequest {
	r := nl.NewNetlinkRequest(unix.RTM_NEWNEIGH, unix.NLM_F_CREATE|unix.NLM_F_REPLACE)
	r.AddData(&netlink.Ndmsg{Family: unix.AF_INET, Index: uint32(index), State: netlink.NUD_PERMANENT})
	r.AddData(nl.NewRtAttr(netlink.NDA_DST, a.AsSlice()))
	r.AddData(nl.NewRtAttr(netlink.NDA_LLADDR, hw))
	return r
}

func name(number uint32) string { return prefix + strconv.FormatUint(uint64(number), 10) }

func gateIndex(number uint32) int32 { return int32(base + number) }

// numberOf is the number of the link that ends in a device of this name, if it is one.
func numberOf(device string) (uint32, bool) {
	digits, ok := strings.CutPrefix(device, prefix)
	if !ok {
		return 0, false
	}
	n, err := strconv.ParseUint(digits, 10, 32)
	return uint32(n), err == nil && device == name(uint32(n))
}

// List gives the numbers of all links, in no order.
func (g *Gate) List() ([]uint32, error) {
	for {
		all, err := g.handle.LinkList()
		if errors.Is(err, netlink.ErrDumpInterrupted) {
			continue // it changed meanwhile
		}
		if err != nil {
			return nil, fmt.Errorf("links of the gate: %w", err)
		}
		var numbers []uint32
		for _, l := range all {
			if n, ok := numberOf(l.Attrs().Name); ok {
				numbers = append(numbers, n)
			}
		}
		return numbers, nil
	}
}

// Exists reports whether there is a link of this number.
func (g *Gate) Exists(number uint32) (bool, error) {
	g.mu.Lock()
	defer g.mu.Unlock()
	err := g.socket.do(settled(gateIndex(number)))
	if errors.Is(err, unix.ENODEV) {
		return false, nil
	}
	return err == nil, err
}

// Delete removes links, all at once. Those that are gone already do not matter.
func (g *Gate) Delete(numbers []uint32) error {
	g.mu.Lock()
	defer g.mu.Unlock()
	return g.deleteLocked(numbers)
}

func (g *Gate) deleteLocked(numbers []uint32) error {
	if len(numbers) == 0 {
		return nil
	}
	for _, n := range numbers {
		r := nl.NewNetlinkRequest(unix.RTM_SETLINK, 0)
		head := nl.NewIfInfomsg(unix.AF_UNSPEC)
		head.Index = gateIndex(n)
		r.AddData(head)
		r.AddData(nl.NewRtAttr(unix.IFLA_GROUP, nl.Uint32Attr(doomed)))
		if err := g.socket.do(request{"doom " + name(n), r}); err != nil && !errors.Is(err, unix.ENODEV) {
			return err
		}
	}
	r := nl.NewNetlinkRequest(unix.RTM_DELLINK, 0)
	r.AddData(nl.NewIfInfomsg(unix.AF_UNSPEC))
	r.AddData(nl.NewRtAttr(unix.IFLA_GROUP, binary.NativeEndian.AppendUint32(nil, doomed)))
	if err := g.socket.do(request{"delete links", r}); err != nil && !errors.Is(err, unix.ENODEV) {
		return err
	}
	return nil
}

// Close gives up the namespace and leaves everything in it as it is.
func (g *Gate) Close() error {
	var errs []error
	if g.handle != nil {
		g.handle.Close()
	}
	if g.socket != nil {
		errs = append(errs, g.socket.close())
	}
	return errors.Join(append(errs, g.settings.close(), g.ns.Close())...)
}

func duplicate(f *os.File) (*os.File, error) {
	rc, err := f.SyscallConn()
	if err != nil {
		return nil, err
	}
	fd := -1
	var inner error
	if err := rc.Control(func(old uintptr) { fd, inner = unix.FcntlInt(old, unix.F_DUPFD_CLOEXEC, 3) }); err != nil {
		return nil, err
	}
	if inner != nil {
		return nil, inner
	}
	return os.NewFile(uintptr(fd), f.Name()), nil
}
