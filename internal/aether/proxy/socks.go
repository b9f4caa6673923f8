package proxy

import (
	"encoding/binary"
	"errors"
	"fmt"
	"io"
	"net"
	"net/netip"
	"sync"
	"time"

	"github.com/sandsea/sandsea/api/errdefs"
	"github.com/sandsea/sandsea/internal/aether/door"
	"github.com/sandsea/sandsea/internal/aether/forward"
	"github.com/sandsea/sandsea/internal/aether/roster"
)

// greetWithin bounds the time until a client has said where it wants to go.
const greetWithin = 30 * time.Second

// SOCKS5, RFC 1928.
const (
	socksVersion = 5
	noAuth       = 0
	noMethod     = 0xff
	cmdConnect   = 1
	addrIPv4     = 1
	addrName     = 3
	addrIPv6     = 4
)

// Its replies.
const (
	replyGranted     = 0
	replyFailure     = 1
	replyNotAllowed  = 2
	replyUnreachable = 4
	replyRefused     = 5
	replyExpired     = 6
	replyNoCommand   = 7
	replyNoAddress   = 8
)

// SOCKS serves SOCKS5 until the listener is closed, and returns when all connections have ended.
func SOCKS(ln *door.Listener, f *forward.Forwarder) error {
	var open sync.WaitGroup
	defer open.Wait()
	for {
		c, err := ln.Accept()
		if errors.Is(err, net.ErrClosed) {
			return nil
		}
		if err != nil {
			return fmt.Errorf("socks: %w", err)
		}
		open.Go(func() { serveSOCKS(c.(*door.Conn), f) })
	}
}

func serveSOCKS(c *door.Conn, f *forward.Forwarder) {
	_ = c.SetDeadline(time.Now().Add(greetWithin)) // on a closed one, reading sees it
	host, port, code, err := greet(c)
	if err != nil {
		if code != 0 {
			_ = reply(c, code)
		}
		_ = c.Close()
		return
	}
	_ = c.SetDeadline(time.Time{})
	t, ok := forward.TargetOf(c.Box, host, port)
	if !ok {
		_ = reply(c, replyUnreachable)
		_ = c.Close()
		return
	}
	f.Tunnel(c, t, nil, "socks5", func(err error) error { return reply(c, codeOf(err)) })
}

var errProtocol = errors.New("not SOCKS5 as it is served here")

// greet reads what the client wants. It takes no byte more than it needs. code is what to answer with an error; 0:
// nothing.
func greet(c io.ReadWriter) (host string, port uint16, code byte, err error) {
	var b [256]byte
	if _, err = io.ReadFull(c, b[:2]); err != nil {
		return "", 0, 0, err
	}
	methods := b[2 : 2+min(int(b[1]), 254)]
	if b[0] != socksVersion || b[1] == 0 || b[1] == 255 {
		return "", 0, 0, errProtocol
	}
	if _, err = io.ReadFull(c, methods); err != nil {
		return "", 0, 0, err
	}
	method := byte(noMethod)
	for _, m := range methods {
		if m == noAuth {
			method = noAuth
		}
	}
	if _, err = c.Write([]byte{socksVersion, method}); err != nil {
		return "", 0, 0, err
	}
	if method == noMethod {
		return "", 0, 0, errProtocol
	}
	if _, err = io.ReadFull(c, b[:4]); err != nil {
		return "", 0, 0, err
	}
	command, kind := b[1], b[3]
	if b[0] != socksVersion || b[2] != 0 {
		return "", 0, replyFailure, errProtocol
	}
	size := 0
	switch kind {
	case addrIPv4:
		size = 4
	case addrIPv6:
		size = 16
	case addrName:
		if _, err = io.ReadFull(c, b[:1]); err != nil {
			return "", 0, 0, err
		}
		size = int(b[0])
	}
	if size == 0 {
		return "", 0, replyNoAddress, errProtocol
	}
	addr := make([]byte, size+2)
	if _, err = io.ReadFull(c, addr); err != nil {
		return "", 0, 0, err
	}
	port = binary.BigEndian.Uint16(addr[size:])
	if command != cmdConnect {
		return "", 0, replyNoCommand, errProtocol
	}
	if port == 0 {
		return "", 0, replyFailure, errProtocol
	}
	host = string(addr[:size])
	if kind != addrName {
		a, _ := netip.AddrFromSlice(addr[:size])
		host = a.Unmap().String()
	}
	return host, port, 0, nil
}

func reply(c io.Writer, code byte) error {
	_, err := c.Write([]byte{socksVersion, code, 0, addrIPv4, 0, 0, 0, 0, 0, 0})
	return err
}

// codeOf says with SOCKS's words what stood in the way.
func codeOf(err error) byte {
	_, denial := errors.AsType[*roster.Denial](err)
	switch {
	case err == nil:
		return replyGranted
	case denial, errors.Is(err, errdefs.Denied):
		return replyNotAllowed
	case errors.Is(err, errdefs.NotFound):
		return replyUnreachable
	case errors.Is(err, errdefs.Deadline):
		return replyExpired
	case errors.Is(err, errdefs.Unavailable):
		return replyRefused
	}
	return replyFailure
}
