package aether

import (
	"fmt"
	"net"
	"net/netip"
	"os"
	"sync"
	"syscall"
	"time"

	"github.com/sandsea/sandsea/internal/aether/wire"
	"github.com/sandsea/sandsea/internal/linux/netns"
	"github.com/sandsea/sandsea/internal/linux/transparent"
)

// sockets are Aether's in the gate.
type sockets struct {
	dnsTCP, mirrors, socks, proxy, transparent net.Listener
	dnsUDP, datagrams                          *net.UDPConn
}

// openGate opens them, as root.
func openGate(path string) (_ *sockets, err error) {
	ns, err := netns.Open(path)
	if err != nil {
		return nil, fmt.Errorf("aether: gate: %w", err)
	}
	defer ns.Close()
	s := &sockets{}
	defer func() {
		if err != nil {
			s.close()
			err = fmt.Errorf("aether: gate: %w", err)
		}
	}()
	for _, l := range []struct {
		to   *net.Listener
		port uint16
	}{{&s.dnsTCP, wire.PortDNS}, {&s.mirrors, wire.PortMirrors}, {&s.socks, wire.PortSOCKS}, {&s.proxy, wire.PortProxy}} {
		if *l.to, err = transparent.Listen(ns, netip.AddrPortFrom(wire.Gateway, l.port)); err != nil {
			return nil, err
		}
	}
	if s.dnsUDP, err = transparent.ListenPacket(ns, netip.AddrPortFrom(wire.Gateway, wire.PortDNS)); err != nil {
		return nil, err
	}
	if err = queue(s.dnsUDP, questions); err != nil {
		return nil, err
	}
	local := netip.AddrPortFrom(netip.AddrFrom4([4]byte{127, 0, 0, 1}), wire.PortTransparent)
	if s.transparent, err = transparent.Listen(ns, local); err != nil {
		return nil, err
	}
	if s.datagrams, err = transparent.ListenPacket(ns, local); err != nil {
		return nil, err
	}
	return s, queue(s.datagrams, datagrams)
}

// Bytes that wait in sockets which all sandboxes share, so that a burst of one does not lose what others say. The kernel
// counts some 800 for a question.
const (
	questions = 8 << 20
	datagrams = 16 << 20
)

// queue sets how much may wait, beyond what the machine lets others have.
func queue(c *net.UDPConn, bytes int) error {
	rc, err := c.SyscallConn()
	if err != nil {
		return err
	}
	if cerr := rc.Control(func(fd uintptr) {
		err = os.NewSyscallError("setsockopt", syscall.SetsockoptInt(int(fd), syscall.SOL_SOCKET, syscall.SO_RCVBUFFORCE, bytes))
	}); cerr != nil {
		return cerr
	}
	return err
}

// close closes them. Idempotent.
func (s *sockets) close() {
	for _, l := range []net.Listener{s.dnsTCP, s.mirrors, s.socks, s.proxy, s.transparent} {
		if l != nil {
			_ = l.Close()
		}
	}
	for _, c := range []*net.UDPConn{s.dnsUDP, s.datagrams} {
		if c != nil {
			_ = c.Close()
		}
	}
}

// ownAddresses are the node's and the control plane's.
type ownAddresses struct {
	deny []netip.Prefix

	mu    sync.Mutex
	all   map[netip.Addr]bool // guarded by mu
	until time.Time           // guarded by mu: when they are looked up again
}

// freshFor is how long the node's addresses are taken to be what they were.
const freshFor = 5 * time.Second

// has tells whether an address is among them. When they cannot be looked up, those known last count.
func (o *ownAddresses) has(a netip.Addr) bool {
	for _, p := range o.deny {
		if p.Contains(a) {
			return true
		}
	}
	o.mu.Lock()
	defer o.mu.Unlock()
	if now := time.Now(); now.After(o.until) {
		if found, err := net.InterfaceAddrs(); err == nil {
			o.all = map[netip.Addr]bool{}
			for _, f := range found {
				if n, ok := f.(*net.IPNet); ok {
					if ip, ok := netip.AddrFromSlice(n.IP); ok {
						o.all[ip.Unmap()] = true
					}
				}
			}
			o.until = now.Add(freshFor)
		}
	}
	return o.all[a]
}
