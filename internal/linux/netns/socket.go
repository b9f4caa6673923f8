package netns

import (
	"context"
	"net"
	"net/netip"
	"os"
	"time"

	"golang.org/x/sys/unix"
)

// Dial connects to an address as if from inside the namespace. network is "tcp" or "udp", and addr an address with a
// port: no name is resolved. It waits as long as ctx allows.
func Dial(ctx context.Context, ns *os.File, network, addr string) (net.Conn, error) {
	to, err := netip.ParseAddrPort(addr)
	if err != nil {
		return nil, &net.OpError{Op: "dial", Net: network, Err: err}
	}
	c, err := dial(ctx, ns, network, to)
	if err != nil {
		at := net.TCPAddrFromAddrPort(to)
		return nil, &net.OpError{Op: "dial", Net: network, Addr: at, Err: err}
	}
	return c, nil
}

func dial(ctx context.Context, ns *os.File, network string, to netip.AddrPort) (net.Conn, error) {
	var kind int
	switch network {
	case "tcp":
		kind = unix.SOCK_STREAM
	case "udp":
		kind = unix.SOCK_DGRAM
	default:
		return nil, net.UnknownNetworkError(network)
	}
	family, at := sockaddr(to)
	f, err := Socket(ns, family, kind, 0)
	if err != nil {
		return nil, err
	}
	defer f.Close()
	if err := connect(ctx, f, at); err != nil {
		return nil, err
	}
	return net.FileConn(f)
}

func connect(ctx context.Context, f *os.File, at unix.Sockaddr) error {
	// A limit in the past ends the wait below.
	stop := context.AfterFunc(ctx, func() { _ = f.SetWriteDeadline(time.Unix(1, 0)) })
	defer stop()
	rc, err := f.SyscallConn()
	if err != nil {
		return err
	}
	started := false
	var inner error
	err = rc.Write(func(fd uintptr) bool {
		if !started {
			started = true
			inner = unix.Connect(int(fd), at)
			return inner != unix.EINPROGRESS && inner != unix.EINTR
		}
		code, err := unix.GetsockoptInt(int(fd), unix.SOL_SOCKET, unix.SO_ERROR)
		switch {
		case err != nil:
			inner = err
		case code != 0:
			inner = unix.Errno(code)
		default:
			// The descriptor may be woken without there being anything to tell.
			_, err := unix.Getpeername(int(fd))
			if err == unix.ENOTCONN {
				return false
			}
			inner = err
		}
		return true
	})
	if err != nil {
		if cause := context.Cause(ctx); cause != nil {
			return cause
		}
		return err
	}
	if inner != nil {
		return os.NewSyscallError("connect", inner)
	}
	return nil
}

// Socket makes a socket inside the namespace, which does not wait and is not inherited.
func Socket(ns *os.File, family, kind, protocol int) (*os.File, error) {
	fd := -1
	err := Do(ns, func() error {
		var err error
		fd, err = unix.Socket(family, kind|unix.SOCK_CLOEXEC|unix.SOCK_NONBLOCK, protocol)
		return os.NewSyscallError("socket", err)
	})
	if err != nil {
		if fd >= 0 { // its thread could not come back
			unix.Close(fd)
		}
		return nil, err
	}
	return os.NewFile(uintptr(fd), "socket of "+ns.Name()), nil
}

// sockaddr is the address in the form of the system calls, with its family.
func sockaddr(a netip.AddrPort) (family int, _ unix.Sockaddr) {
	if ip := a.Addr(); ip.Is4() {
		return unix.AF_INET, &unix.SockaddrInet4{Port: int(a.Port()), Addr: ip.As4()}
	}
	return unix.AF_INET6, &unix.SockaddrInet6{Port: int(a.Port()), Addr: a.Addr().As16()}
}
