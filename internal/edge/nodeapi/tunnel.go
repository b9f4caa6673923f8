package nodeapi

import (
	"bufio"
	"context"
	"crypto/tls"
	"errors"
	"io"
	"net"
	"net/http"
	"os"
	"strconv"
	"sync"
	"syscall"
	"time"

	"connectrpc.com/connect"

	"github.com/sandsea/sandsea/api/errdefs"
	"github.com/sandsea/sandsea/api/errwire"
	"github.com/sandsea/sandsea/internal/sandboxpb"
)

// A tunnel is an HTTP/1.1 connection that becomes a TCP connection to a port of a sandbox:
//
//	GET TunnelPath?id=<sandbox>&port=<number>
//	Connection: Upgrade
//	Upgrade: sandsea-tunnel
//
// It lasts until both sides have closed it, the server has hung up, the edge leaves, or a phase comes in force that does
// not let endpoints reach the port, and counts as use of the sandbox for that long. A refusal is answered as any call's error is.
const (
	TunnelPath     = sandboxpb.TunnelPath
	TunnelProtocol = sandboxpb.TunnelProtocol
)

// tunnel serves one.
func (s *Server) tunnel(w http.ResponseWriter, r *http.Request) {
	if err := s.carry(w, r); err != nil {
		r.Header.Set("Content-Type", "application/json") // errors in the form of a unary call's
		_ = connect.NewErrorWriter().Write(w, r, errwire.ToConnect(err))
	}
}

// carry answers, and returns an error only before it has.
func (s *Server) carry(w http.ResponseWriter, r *http.Request) error {
	port, err := strconv.ParseUint(r.URL.Query().Get("port"), 10, 16)
	if err != nil || port == 0 {
		return errdefs.New(errdefs.Invalid, "", "port: %q is no port", r.URL.Query().Get("port")).WithField("port", "65535")
	}
	if r.Header.Get("Upgrade") != TunnelProtocol {
		return errdefs.New(errdefs.Invalid, "", "the connection is not to become a tunnel")
	}
	use, err := s.open(TunnelPath, r.Header, r.URL.Query().Get("id"))
	if err != nil {
		return err
	}
	defer use.Done()
	inside, allowed, err := use.Dial(r.Context(), uint16(port))
	if e, ok := errors.AsType[*errdefs.Error](err); ok && e.Field == "port" {
		return err // the sandbox is well
	}
	if err != nil {
		return use.Because(r.Context(), err)
	}
	defer func() { _ = inside.Close() }()
	outside, buffered, err := http.NewResponseController(w).Hijack()
	if err != nil {
		return errdefs.New(errdefs.Internal, "node door", "this connection cannot become a tunnel").Wrap(err)
	}
	defer func() { _ = outside.Close() }()
	for _, ctx := range []context.Context{s.leaving, allowed} {
		stop := context.AfterFunc(ctx, func() {
			_ = outside.Close()
			_ = inside.Close()
		})
		defer stop()
	}
	_, err = io.WriteString(outside, "HTTP/1.1 101 Switching Protocols\r\nConnection: Upgrade\r\nUpgrade: "+TunnelProtocol+"\r\n\r\n")
	if err != nil {
		return nil // nobody is there to hear of it
	}
	join(outside, buffered.Reader, inside)
	return nil
}

// join copies both ways until both directions have ended; the end of one is passed on, the other goes on while there is
// somebody to hear it.
func join(outside net.Conn, from *bufio.Reader, inside net.Conn) {
	var wg sync.WaitGroup
	told, ended := context.WithCancelCause(context.Background()) // all that the inside has to say
	copyTo := func(dst net.Conn, src io.Reader) {
		if _, err := io.Copy(dst, src); err != nil && !errors.Is(err, net.ErrClosed) {
			// The other end broke: an end in good order would be a lie.
			_ = dst.Close()
			return
		}
		if half, ok := dst.(interface{ CloseWrite() error }); ok {
			_ = half.CloseWrite()
		}
	}
	wg.Go(func() {
		// What came with the request first; then straight from the socket, which the kernel can splice.
		if n := from.Buffered(); n > 0 {
			if _, err := io.CopyN(inside, from, int64(n)); err != nil {
				_ = inside.Close()
				return
			}
		}
		copyTo(inside, outside)
		stop := context.AfterFunc(told, func() { _ = outside.SetReadDeadline(time.Unix(1, 0)) })
		defer stop()
		if hungUp(outside) {
			_ = inside.Close() // a server that never ends by itself has nobody left
		}
	})
	wg.Go(func() {
		defer ended(io.EOF)
		copyTo(outside, inside)
	})
	wg.Wait()
}

// hungUp waits until the other end of a connection, which has ended its writing, does not read any more either; false when
// the wait ended before.
func hungUp(c net.Conn) (gone bool) {
	if line, ok := c.(*tls.Conn); ok {
		// The end of writing is a word of TLS, that of the connection comes with the end of both.
		_, err := line.NetConn().Read(make([]byte, 1))
		return err != nil && !errors.Is(err, os.ErrDeadlineExceeded)
	}
	line, ok := c.(syscall.Conn)
	if !ok {
		return false
	}
	raw, err := line.SyscallConn()
	if err != nil {
		return false
	}
	_ = raw.Read(func(fd uintptr) bool {
		_, err := syscall.SendmsgN(int(fd), nil, nil, nil, syscall.MSG_NOSIGNAL|syscall.MSG_DONTWAIT) // asks, and sends nothing
		gone = errors.Is(err, syscall.EPIPE)
		return gone
	})
	return gone
}
