package forward

import (
	"errors"
	"io"
	"net"
	"net/http"
	"sync"
	"time"

	"github.com/sandsea/sandsea/internal/aether/roster"
)

// conn is a sandbox's end of a connection: it counts, and can be looked into.
type conn struct {
	net.Conn
	tcp     *net.TCPConn // the same, to move bytes without copying them
	flow    *roster.Flow
	guest   *Guest
	early   []byte       // read from the connection, not yet by Read
	handler http.Handler // of HTTP
	once    sync.Once
	closed  func() // told of Close
}

// Read gives what was looked at first.
func (c *conn) Read(b []byte) (int, error) {
	if len(b) == 1 && c.handler != nil {
		return c.await(b)
	}
	var n int
	var err error
	if len(c.early) > 0 {
		n = copy(b, c.early)
		c.skip(n)
	} else {
		n, err = c.read(b)
	}
	if c.handler != nil {
		if herr := c.guest.Said(n); herr != nil {
			return 0, herr
		}
	}
	return n, err
}

// skip gives up what was read early, and the memory with the last of it.
func (c *conn) skip(n int) {
	if c.early = c.early[n:]; len(c.early) == 0 {
		c.early = nil
	}
}

// ahead bounds what is read of the requests behind the one that is being answered.
const ahead = 64 << 10

// await is Read for net/http's server, which reads a single byte when it only wants to know whether the client is still
// there. Of a client that has sent another request already it would not notice the end: so what comes is kept, and what is
// told is the end, or that the server gave up waiting.
func (c *conn) await(b []byte) (int, error) {
	for len(c.early) < ahead {
		if err := c.more(); err != nil {
			return 0, err
		}
	}
	b[0] = c.early[0]
	c.skip(1)
	return 1, nil
}

func (c *conn) read(b []byte) (int, error) {
	n, err := c.Conn.Read(b)
	if cerr := c.flow.Sent(n); cerr != nil {
		return 0, cerr
	}
	return n, err
}

func (c *conn) Write(b []byte) (int, error) {
	n, err := c.Conn.Write(b)
	c.guest.Heard(n)
	if cerr := c.flow.Received(n); cerr != nil && err == nil {
		err = cerr
	}
	return n, err
}

// Guest makes conn one of NewServer's.
func (c *conn) Guest() *Guest { return c.guest }

// CloseWrite ends the direction to the sandbox.
func (c *conn) CloseWrite() error { return closeWrite(c.Conn) }

// Close closes the connection, and tells whoever waits for that.
func (c *conn) Close() error {
	err := c.Conn.Close()
	c.once.Do(func() {
		c.guest.Gone()
		if c.closed != nil {
			c.closed()
		}
	})
	return err
}

// more looks further into the connection: at least one byte.
func (c *conn) more() error {
	b := make([]byte, 4096)
	n, err := c.read(b)
	c.early = append(c.early, b[:n]...)
	if n > 0 {
		return nil
	}
	return err
}

// peeker reads what will be read again.
type peeker struct {
	c  *conn
	at int
}

func (p *peeker) Read(b []byte) (int, error) {
	if p.at == len(p.c.early) {
		if err := p.c.more(); err != nil {
			return 0, err
		}
	}
	n := copy(b, p.c.early[p.at:])
	p.at += n
	return n, nil
}

// closeWrite ends one direction of a connection that can do so, else both.
func closeWrite(c net.Conn) error {
	if half, ok := c.(interface{ CloseWrite() error }); ok {
		if err := half.CloseWrite(); !errors.Is(err, errors.ErrUnsupported) {
			return err
		}
	}
	return c.Close()
}

// reset closes a connection so that the other side sees a reset.
func reset(c net.Conn) {
	if l, ok := c.(interface{ SetLinger(sec int) error }); ok {
		_ = l.SetLinger(0) // on a closed one
	}
	_ = c.Close()
}

// past is a deadline that ends what waits.
var past = time.Unix(1, 0)

// isEnd reports whether an error is the orderly end of a connection.
func isEnd(err error) bool {
	return err == nil || errors.Is(err, io.EOF) || errors.Is(err, net.ErrClosed)
}

// counted is a connection to a target whose flow has no connection of its own: a request through the proxy. A cut ends
// the request, which takes a moment; nothing passes meanwhile.
type counted struct {
	net.Conn
	flow *roster.Flow
}

func (c *counted) Read(b []byte) (int, error) {
	n, err := c.Conn.Read(b)
	if cerr := c.flow.Received(n); cerr != nil {
		return 0, cerr
	}
	if c.flow.Cause() != nil {
		return 0, errCut
	}
	return n, err
}

func (c *counted) Write(b []byte) (int, error) {
	if c.flow.Cause() != nil {
		return 0, errCut
	}
	n, err := c.Conn.Write(b)
	if cerr := c.flow.Sent(n); cerr != nil && err == nil {
		err = cerr
	}
	return n, err
}
