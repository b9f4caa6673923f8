package netload

import (
	"errors"
	"io"
	"net"
	"net/netip"
	"sync"

	"golang.org/x/net/dns/dnsmessage"
)

// The caller's byte after the hello says what the connection is for.
const (
	download = 'd' // the far side sends without end
	upload   = 'u' // it reads without end
	echo     = 'e' // it sends back what comes
)

// block is what is written and read at once in bulk.
const block = 256 << 10

// serverHello is the form of a ServerHello: record, message, version, random, and as much again as they are long.
var serverHello = func() []byte {
	b := make([]byte, 5+122)
	copy(b, []byte{22, 3, 3, 0, 122, 2, 0, 0, 118, 3, 3})
	for i := range 32 {
		b[11+i] = byte(i + 1)
	}
	return b
}()

// Far is the side that answers.
type Far struct {
	ln    net.Listener
	names net.PacketConn
	all   sync.WaitGroup

	mu     sync.Mutex
	closed bool                  // guarded by mu
	open   map[net.Conn]struct{} // guarded by mu
}

// NewFar serves connections of ln and answers that every name has the address at, until Close, which closes both.
func NewFar(ln net.Listener, names net.PacketConn, at netip.Addr) *Far {
	f := &Far{ln: ln, names: names, open: map[net.Conn]struct{}{}}
	f.all.Go(f.accept)
	f.all.Go(func() { f.resolve(at) })
	return f
}

// Close ends everything. Idempotent.
func (f *Far) Close() error {
	err := errors.Join(f.ln.Close(), f.names.Close())
	if errors.Is(err, net.ErrClosed) {
		err = nil
	}
	f.mu.Lock()
	f.closed = true
	for c := range f.open {
		_ = c.Close()
	}
	f.mu.Unlock()
	f.all.Wait()
	return err
}

// Open is how many connections there are.
func (f *Far) Open() int {
	f.mu.Lock()
	defer f.mu.Unlock()
	return len(f.open)
}

func (f *Far) accept() {
	for {
		c, err := f.ln.Accept()
		if err != nil {
			return
		}
		f.mu.Lock()
		if f.closed {
			f.mu.Unlock()
			_ = c.Close()
			return
		}
		f.open[c] = struct{}{}
		f.mu.Unlock()
		f.all.Go(func() {
			serve(c)
			_ = c.Close()
			f.mu.Lock()
			delete(f.open, c)
			f.mu.Unlock()
		})
	}
}

// serve answers until the caller ends the connection; an error is its end too.
func serve(c net.Conn) {
	if _, err := readRecord(c); err != nil {
		return
	}
	if _, err := c.Write(serverHello); err != nil {
		return
	}
	verb := make([]byte, 1)
	if _, err := io.ReadFull(c, verb); err != nil {
		return
	}
	switch verb[0] {
	case download:
		b := make([]byte, block)
		for {
			if _, err := c.Write(b); err != nil {
				return
			}
		}
	case upload:
		b := make([]byte, block)
		for {
			if _, err := c.Read(b); err != nil {
				return
			}
		}
	case echo:
		for {
			if _, err := io.ReadFull(c, verb); err != nil {
				return
			}
			if _, err := c.Write(verb); err != nil {
				return
			}
		}
	}
}

// readRecord reads one record of TLS, whole.
func readRecord(r io.Reader) ([]byte, error) {
	head := make([]byte, 5)
	if _, err := io.ReadFull(r, head); err != nil {
		return nil, err
	}
	body := make([]byte, int(head[3])<<8|int(head[4]))
	_, err := io.ReadFull(r, body)
	return append(head, body...), err
}

// resolve answers questions about addresses.
func (f *Far) resolve(at netip.Addr) {
	b := make([]byte, 1500)
	for {
		n, from, err := f.names.ReadFrom(b)
		if err != nil {
			return
		}
		if answer, ok := answerTo(b[:n], at); ok {
			_, _ = f.names.WriteTo(answer, from) // whoever does not get it asks again
		}
	}
}

// answerTo gives at for a name, and no other record. False: it is no question.
func answerTo(question []byte, at netip.Addr) ([]byte, bool) {
	var m dnsmessage.Message
	if m.Unpack(question) != nil || m.Response || len(m.Questions) != 1 {
		return nil, false
	}
	q := m.Questions[0]
	m.Response, m.RecursionAvailable, m.Additionals = true, true, nil
	if q.Type == dnsmessage.TypeA && at.Is4() {
		m.Answers = []dnsmessage.Resource{{
			Header: dnsmessage.ResourceHeader{Name: q.Name, Type: q.Type, Class: q.Class, TTL: 60},
			Body:   &dnsmessage.AResource{A: at.As4()},
		}}
	}
	b, err := m.Pack()
	return b, err == nil
}
