package link

import (
	"encoding/binary"
	"errors"
	"fmt"
	"os"
	"strings"

	"github.com/vishvananda/netlink/nl"
	"golang.org/x/sys/unix"
)

// request is one message of a batch, with a name for errors.
type request struct {
	what string
	nl   *nl.NetlinkRequest
}

// socket is a netlink socket of one namespace. Not for concurrent use.
type socket struct {
	fd  int
	seq uint32
}

// patience bounds the wait for an answer, which the kernel gives before the call that asks returns.
var patience = unix.Timeval{Sec: 5}

// dial makes the socket on the calling thread, in whose namespace it will be.
func dial() (*socket, error) {
	fd, err := unix.Socket(unix.AF_NETLINK, unix.SOCK_RAW|unix.SOCK_CLOEXEC, unix.NETLINK_ROUTE)
	if err != nil {
		return nil, os.NewSyscallError("socket", err)
	}
	s := &socket{fd: fd}
	for _, err := range []error{
		unix.SetsockoptTimeval(fd, unix.SOL_SOCKET, unix.SO_RCVTIMEO, &patience),
		unix.SetsockoptInt(fd, unix.SOL_NETLINK, unix.NETLINK_CAP_ACK, 1),
		unix.SetsockoptInt(fd, unix.SOL_NETLINK, unix.NETLINK_EXT_ACK, 1),
	} {
		if err != nil {
			_ = s.close()
			return nil, os.NewSyscallError("setsockopt", err)
		}
	}
	return s, nil
}

func (s *socket) close() error { return unix.Close(s.fd) }

// do performs the requests in one call, in order. The kernel goes on after one that fails; the errors say which did.
func (s *socket) do(batch ...request) error {
	var out []byte
	first := s.seq + 1
	for _, r := range batch {
		s.seq++
		r.nl.Seq = s.seq
		r.nl.Flags |= unix.NLM_F_ACK
		out = append(out, r.nl.Serialize()...)
		for len(out)%unix.NLMSG_ALIGNTO != 0 {
			out = append(out, 0)
		}
	}
	if err := unix.Sendto(s.fd, out, 0, &unix.SockaddrNetlink{Family: unix.AF_NETLINK}); err != nil {
		return os.NewSyscallError("sendto", err)
	}
	var errs []error
	in := make([]byte, 8192)
	for answered := 0; answered < len(batch); {
		n, _, err := unix.Recvfrom(s.fd, in, 0)
		if errors.Is(err, unix.EINTR) {
			continue
		}
		if err != nil {
			return errors.Join(append(errs, os.NewSyscallError("recvfrom", err))...)
		}
		for b := in[:n]; len(b) >= unix.SizeofNlMsghdr; {
			size := int(binary.NativeEndian.Uint32(b))
			if size < unix.SizeofNlMsghdr || size > len(b) {
				return errors.Join(append(errs, errors.New("netlink: an answer of a wrong length"))...)
			}
			kind, flags, seq := binary.NativeEndian.Uint16(b[4:]), binary.NativeEndian.Uint16(b[6:]), binary.NativeEndian.Uint32(b[8:])
			body := b[unix.SizeofNlMsghdr:size]
			b = b[min(len(b), (size+3)&^3):]
			// Answers to a batch before, which was given up, have lower numbers.
			if kind != unix.NLMSG_ERROR || seq-first >= uint32(len(batch)) || len(body) < 4 {
				continue
			}
			answered++
			if code := int32(binary.NativeEndian.Uint32(body)); code != 0 {
				errs = append(errs, &requestError{batch[seq-first].what, unix.Errno(-code), explain(body, flags)})
			}
		}
	}
	return errors.Join(errs...)
}

// requestError is one request that the kernel refused.
type requestError struct {
	what  string
	errno unix.Errno
	text  string
}

func (e *requestError) Error() string {
	if e.text == "" {
		return fmt.Sprintf("%s: %v", e.what, e.errno)
	}
	return fmt.Sprintf("%s: %v (%s)", e.what, e.errno, e.text)
}

func (e *requestError) Unwrap() error { return e.errno }

// explain is what the kernel says about an error in words, if anything: attributes behind the code and the request's
// header, which is all of it that comes back.
func explain(body []byte, flags uint16) string {
	const head = 4 + unix.SizeofNlMsghdr
	if flags&unix.NLM_F_ACK_TLVS == 0 || len(body) < head {
		return ""
	}
	attrs, err := nl.ParseRouteAttr(body[head:])
	if err != nil {
		return ""
	}
	for _, a := range attrs {
		if a.Attr.Type == unix.NLMSGERR_ATTR_MSG {
			return strings.TrimRight(string(a.Value), "\x00")
		}
	}
	return ""
}
