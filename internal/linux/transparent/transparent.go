// Package transparent makes sockets that stand for addresses which are not the machine's own (IP_TRANSPARENT): those to
// which TPROXY rules bring other people's connections and datagrams, and those from which they are answered.
//
// A connection that such a listener accepts has what was dialled as its local address. Of a datagram the first
// destination comes beside the data (ReadFrom). Sockets belong to the namespace that they were made in, whoever holds
// them. Making one needs CAP_NET_ADMIN there; using it needs nothing.
package transparent

import (
	"encoding/binary"
	"errors"
	"fmt"
	"net"
	"net/netip"
	"os"

	"golang.org/x/sys/unix"

	"github.com/sandsea/sandsea/internal/linux/netns"
)

// backlog is how many connections may wait to be accepted; the kernel takes no more than net.core.somaxconn.
const backlog = 4096

// Listen listens for connections at an IPv4 address inside the namespace.
func Listen(ns *os.File, at netip.AddrPort) (net.Listener, error) {
	f, err := socket(ns, unix.SOCK_STREAM, at, option{unix.SOL_SOCKET, unix.SO_REUSEADDR})
	if err != nil {
		return nil, fmt.Errorf("transparent listener at %s: %w", at, err)
	}
	defer f.Close()
	if err := call(f, func(fd int) error { return os.NewSyscallError("listen", unix.Listen(fd, backlog)) }); err != nil {
		return nil, fmt.Errorf("transparent listener at %s: %w", at, err)
	}
	return net.FileListener(f)
}

// ListenPacket receives datagrams at an IPv4 address inside the namespace, each with its first destination.
func ListenPacket(ns *os.File, at netip.AddrPort) (*net.UDPConn, error) {
	f, err := socket(ns, unix.SOCK_DGRAM, at, option{unix.SOL_IP, unix.IP_RECVORIGDSTADDR})
	if err != nil {
		return nil, fmt.Errorf("transparent socket at %s: %w", at, err)
	}
	defer f.Close()
	c, err := net.FilePacketConn(f)
	if err != nil {
		return nil, fmt.Errorf("transparent socket at %s: %w", at, err)
	}
	udp, ok := c.(*net.UDPConn)
	if !ok {
		_ = c.Close()
		return nil, fmt.Errorf("transparent socket at %s is a %T", at, c)
	}
	return udp, nil
}

// Foreign gives a socket for datagrams inside the namespace whose address is at, whosever that is. Several may be bound
// to the same.
func Foreign(ns *os.File, at netip.AddrPort) (*os.File, error) {
	f, err := socket(ns, unix.SOCK_DGRAM, at, option{unix.SOL_SOCKET, unix.SO_REUSEADDR})
	if err != nil {
		return nil, fmt.Errorf("transparent socket at %s: %w", at, err)
	}
	return f, nil
}

// option is one that is to be on.
type option struct{ level, name int }

func socket(ns *os.File, kind int, at netip.AddrPort, more ...option) (_ *os.File, err error) {
	if !at.Addr().Is4() {
		return nil, errors.New("not an IPv4 address")
	}
	f, err := netns.Socket(ns, unix.AF_INET, kind, 0)
	if err != nil {
		return nil, err
	}
	err = call(f, func(fd int) error {
		for _, o := range append(more, option{unix.SOL_IP, unix.IP_TRANSPARENT}) {
			if err := unix.SetsockoptInt(fd, o.level, o.name, 1); err != nil {
				return os.NewSyscallError("setsockopt", err)
			}
		}
		return os.NewSyscallError("bind", unix.Bind(fd, &unix.SockaddrInet4{Port: int(at.Port()), Addr: at.Addr().As4()}))
	})
	if err != nil {
		f.Close()
		return nil, err
	}
	return f, nil
}

// call runs do with the descriptor, which stays open meanwhile.
func call(f *os.File, do func(fd int) error) error {
	rc, err := f.SyscallConn()
	if err != nil {
		return err
	}
	var inner error
	if err := rc.Control(func(fd uintptr) { inner = do(int(fd)) }); err != nil {
		return err
	}
	return inner
}

// oobSpace holds the one control message that is asked for.
const oobSpace = 64

// ReadFrom reads a datagram from a socket of ListenPacket, with its sender and the destination it was sent to.
func ReadFrom(c *net.UDPConn, b []byte) (n int, from, to netip.AddrPort, err error) {
	var oob [oobSpace]byte
	n, oobn, _, from, err := c.ReadMsgUDPAddrPort(b, oob[:])
	if err != nil {
		return n, from, to, err
	}
	to, err = Destination(oob[:oobn])
	return n, netip.AddrPortFrom(from.Addr().Unmap(), from.Port()), to, err
}

// Destination finds the first destination of a datagram in the control messages that came with it.
func Destination(oob []byte) (netip.AddrPort, error) {
	messages, err := unix.ParseSocketControlMessage(oob)
	if err != nil {
		return netip.AddrPort{}, fmt.Errorf("control message of a datagram: %w", err)
	}
	for _, m := range messages {
		// struct sockaddr_in: the family, and in network order the port and the address. unix.ParseOrigDstAddr reads beyond
		// what is shorter.
		if m.Header.Level != unix.SOL_IP || m.Header.Type != unix.IP_ORIGDSTADDR || len(m.Data) < 8 {
			continue
		}
		addr := netip.AddrFrom4([4]byte(m.Data[4:8]))
		return netip.AddrPortFrom(addr, binary.BigEndian.Uint16(m.Data[2:])), nil
	}
	return netip.AddrPort{}, errors.New("a datagram came without its destination")
}
