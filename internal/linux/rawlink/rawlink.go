// Package rawlink reads the packets that arrive at a link, as a capture does.
package rawlink

import (
	"fmt"
	"net"
	"os"

	"golang.org/x/sys/unix"

	"github.com/sandsea/sandsea/internal/linux/netns"
)

// Open gives a file from which each Read takes one packet of the link in the namespace, in either direction, from its
// network header on. Close ends a Read that waits.
func Open(ns *os.File, link string) (*os.File, error) {
	var f *os.File
	err := netns.Do(ns, func() error {
		i, err := net.InterfaceByName(link)
		if err != nil {
			return err
		}
		const all = uint16(unix.ETH_P_ALL>>8 | unix.ETH_P_ALL&0xff<<8) // in network order
		fd, err := unix.Socket(unix.AF_PACKET, unix.SOCK_DGRAM|unix.SOCK_CLOEXEC|unix.SOCK_NONBLOCK, int(all))
		if err != nil {
			return err
		}
		if err := unix.Bind(fd, &unix.SockaddrLinklayer{Protocol: all, Ifindex: i.Index}); err != nil {
			_ = unix.Close(fd)
			return err
		}
		f = os.NewFile(uintptr(fd), "packets of "+link)
		return nil
	})
	if err != nil {
		return nil, fmt.Errorf("read packets of %s: %w", link, err)
	}
	return f, nil
}
