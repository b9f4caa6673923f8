package forward

import (
	"errors"
	"io"
	"net"
	"os"
	"sync"
	"syscall"
	"time"
)

const (
	// chunk is what is read at once; who fills it is sending in bulk, and is spliced.
	chunk = 64 << 10
	// spliced is how much is spliced before it is counted, and splicedFor how long: then who is not sending in bulk any more
	// is read again.
	spliced    = 1 << 20
	splicedFor = time.Second
	// pipes is how many directions may be spliced at once. The kernel gives one user few large pipes.
	pipes = 128
)

var buffers = sync.Pool{New: func() any { b := make([]byte, chunk); return &b }}

// relay carries both directions until both have ended, and says how, nil: in order. there and back (may be nil) pass on
// the beginnings of the two directions.
func (f *Forwarder) relay(c *conn, up net.Conn, there, back func() error) error {
	broke := make(chan error, 1)
	go func() {
		var err error
		if back != nil {
			err = back()
		}
		if err == nil {
			err = f.pump(c.tcp, up, c.flow.Received, c.flow.Room)
		}
		broke <- f.broken(err, c.tcp, up)
	}()
	err := there()
	if err == nil && len(c.early) > 0 {
		_, err = up.Write(c.early)
		c.early = nil
	}
	if err == nil {
		err = f.pump(up, c.tcp, c.flow.Sent, c.flow.Room)
	}
	err = f.broken(err, c.tcp, up)
	if berr := <-broke; err == nil {
		err = berr
	}
	return err
}

// broken resets both sides of a connection one direction of which broke, so that the other ends too.
func (f *Forwarder) broken(err error, a, b net.Conn) error {
	if err != nil {
		reset(a)
		reset(b)
	}
	return err
}

// pump carries one direction until it ends, and ends it on the other side. An idle one holds no buffer.
func (f *Forwarder) pump(dst, src net.Conn, count func(int) error, room func(int64) int64) error {
	if err := f.carry(dst, src, count, room); err != nil {
		return err
	}
	if err := closeWrite(dst); !isEnd(err) && !errors.Is(err, syscall.ENOTCONN) {
		return err
	}
	return nil
}

func (f *Forwarder) carry(dst, src net.Conn, count func(int) error, room func(int64) int64) error {
	read := reader(src)
	tcp, bulk := src.(*net.TCPConn)
	to, ok := dst.(*net.TCPConn)
	bulk = bulk && ok
	for {
		buf, n, err := read()
		if n > 0 {
			_, werr := dst.Write((*buf)[:n])
			if werr == nil {
				werr = count(n)
			}
			if werr != nil {
				err = werr
			}
		}
		if buf != nil {
			buffers.Put(buf)
		}
		if errors.Is(err, io.EOF) {
			return nil
		}
		if err != nil {
			return err
		}
		if !bulk || n < chunk {
			continue
		}
		for {
			moved, ok, err := f.splice(to, tcp, room(spliced))
			if !ok {
				break
			}
			if cerr := count(int(moved)); cerr != nil {
				return cerr
			}
			if errors.Is(err, os.ErrDeadlineExceeded) {
				break
			}
			if err != nil {
				return err
			}
			if moved == 0 {
				return nil
			}
		}
	}
}

// splice moves up to n bytes without copying them; false: no pipe is free. 0 bytes are the end, os.ErrDeadlineExceeded says
// that no more came in time.
func (f *Forwarder) splice(dst, src *net.TCPConn, n int64) (moved int64, ok bool, err error) {
	select {
	case f.pipes <- struct{}{}:
	default:
		return 0, false, nil
	}
	defer func() { <-f.pipes }()
	_ = src.SetReadDeadline(time.Now().Add(splicedFor)) // on a closed one, reading sees it
	defer func() { _ = src.SetReadDeadline(time.Time{}) }()
	moved, err = dst.ReadFrom(&io.LimitedReader{R: src, N: n})
	return moved, true, err
}

// reader makes a function that reads once, into a buffer that the caller gives back if it is not nil. Of a plain connection
// the buffer is taken only when there is something to read.
func reader(src net.Conn) func() (*[]byte, int, error) {
	var rc syscall.RawConn
	switch s := src.(type) {
	case *net.TCPConn:
		rc, _ = s.SyscallConn() // without it, the plain way
	case *net.UDPConn:
		rc, _ = s.SyscallConn()
	}
	if rc == nil {
		return func() (*[]byte, int, error) {
			buf := buffers.Get().(*[]byte)
			n, err := src.Read(*buf)
			return buf, n, err
		}
	}
	var buf *[]byte
	var n int
	var rerr error
	try := func(fd uintptr) bool {
		buf = buffers.Get().(*[]byte)
		for {
			n, rerr = syscall.Read(int(fd), *buf)
			if !errors.Is(rerr, syscall.EINTR) {
				break
			}
		}
		if errors.Is(rerr, syscall.EAGAIN) {
			buffers.Put(buf)
			buf = nil
			return false
		}
		return true
	}
	return func() (*[]byte, int, error) {
		buf, n, rerr = nil, 0, nil
		err := rc.Read(try)
		switch {
		case err != nil:
			return buf, 0, err
		case rerr != nil:
			return buf, 0, rerr
		case n == 0:
			return buf, 0, io.EOF
		}
		return buf, n, nil
	}
}
