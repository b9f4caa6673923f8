package netload

import (
	"context"
	"crypto/tls"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net"
	"net/netip"
	"sync"
	"sync/atomic"
	"time"

	"golang.org/x/net/dns/dnsmessage"
)

// What a caller can be told.
const (
	// Resolve asks the resolver at To for Name. Took is how long it took, At the address.
	Resolve = "resolve"
	// Connect opens a connection to To with the server name Name and ends it. Took is the time until the first byte of
	// the answer.
	Connect = "connect"
	// Download and Upload move bytes over N connections for a while. Bytes are those that went within Took.
	Download = "download"
	Upload   = "upload"
	// Hold opens N connections and keeps them. Took is that of each, as for Connect.
	Hold = "hold"
	// Release makes sure that each connection of Hold still carries a byte there and back, and ends them.
	Release = "release"
)

// Order is what a caller is to do.
type Order struct {
	Do   string         `json:"do"`
	To   netip.AddrPort `json:"to"`
	Name string         `json:"name"`
	N    int            `json:"n,omitempty"`
	For  time.Duration  `json:"for,omitempty"`
}

// Report is what came of it.
type Report struct {
	Took  []time.Duration `json:"took,omitempty"`
	Bytes int64           `json:"bytes,omitempty"`
	At    netip.Addr      `json:"at,omitzero"`
	Error string          `json:"error,omitempty"`
}

const (
	// within bounds a connection or a question, opening how many connections are opened at once.
	within  = 10 * time.Second
	opening = 64
	// warm is how long bytes flow before they count.
	warm = 300 * time.Millisecond
)

// Serve does what it is told, one order after the other, until there are no more.
func Serve(ctx context.Context, in io.Reader, out io.Writer) error {
	c := &caller{hellos: map[string][]byte{}}
	defer func() { _ = c.release() }()
	orders, reports := json.NewDecoder(in), json.NewEncoder(out)
	for {
		var o Order
		err := orders.Decode(&o)
		if errors.Is(err, io.EOF) {
			return nil
		}
		if err != nil {
			return fmt.Errorf("an order: %w", err)
		}
		r, err := c.do(ctx, o)
		if err != nil {
			r.Error = err.Error()
		}
		if err := reports.Encode(r); err != nil {
			return fmt.Errorf("a report: %w", err)
		}
	}
}

// caller measures connections.
type caller struct {
	hellos map[string][]byte // by server name
	held   []net.Conn
}

func (c *caller) do(ctx context.Context, o Order) (r Report, err error) {
	switch o.Do {
	case Resolve:
		began := time.Now()
		r.At, err = resolve(o.To, o.Name)
		r.Took = []time.Duration{time.Since(began)}
		return r, err
	case Connect:
		hello, err := c.hello(ctx, o.Name)
		if err != nil {
			return r, err
		}
		conn, took, err := open(ctx, o.To, hello)
		if err != nil {
			return r, err
		}
		r.Took = []time.Duration{took}
		return r, conn.Close()
	case Download, Upload:
		return c.flow(ctx, o)
	case Hold:
		r.Took, err = c.hold(ctx, o)
		return r, err
	case Release:
		return r, c.release()
	}
	return r, fmt.Errorf("%q is nothing that can be done", o.Do)
}

// resolve asks for the address of a name.
func resolve(resolver netip.AddrPort, name string) (netip.Addr, error) {
	n, err := dnsmessage.NewName(name + ".")
	if err != nil {
		return netip.Addr{}, err
	}
	q, err := (&dnsmessage.Message{
		Header:    dnsmessage.Header{ID: 1, RecursionDesired: true},
		Questions: []dnsmessage.Question{{Name: n, Type: dnsmessage.TypeA, Class: dnsmessage.ClassINET}},
	}).Pack()
	if err != nil {
		return netip.Addr{}, err
	}
	c, err := net.DialUDP("udp", nil, net.UDPAddrFromAddrPort(resolver))
	if err != nil {
		return netip.Addr{}, err
	}
	defer func() { _ = c.Close() }()
	if err := c.SetDeadline(time.Now().Add(within)); err != nil {
		return netip.Addr{}, err
	}
	if _, err := c.Write(q); err != nil {
		return netip.Addr{}, err
	}
	b := make([]byte, 1500)
	size, err := c.Read(b)
	if err != nil {
		return netip.Addr{}, err
	}
	var m dnsmessage.Message
	if err := m.Unpack(b[:size]); err != nil {
		return netip.Addr{}, err
	}
	for _, a := range m.Answers {
		if v4, ok := a.Body.(*dnsmessage.AResource); ok {
			return netip.AddrFrom4(v4.A), nil
		}
	}
	return netip.Addr{}, fmt.Errorf("%s has no address: %v", name, m.RCode)
}

// hello is the first record of a client of TLS for a server name.
func (c *caller) hello(ctx context.Context, name string) ([]byte, error) {
	if b, ok := c.hellos[name]; ok {
		return b, nil
	}
	ours, theirs := net.Pipe()
	done := make(chan struct{})
	go func() {
		defer close(done)
		_ = tls.Client(theirs, &tls.Config{ServerName: name}).HandshakeContext(ctx) // of which there is only the beginning
	}()
	b, err := readRecord(ours)
	_ = ours.Close()
	<-done
	if err != nil {
		return nil, fmt.Errorf("make a ClientHello: %w", err)
	}
	c.hellos[name] = b
	return b, nil
}

// open makes a connection and waits for the first byte of the answer, and, beyond what is measured, for the rest of it.
func open(ctx context.Context, to netip.AddrPort, hello []byte) (net.Conn, time.Duration, error) {
	began := time.Now()
	c, err := (&net.Dialer{Timeout: within, KeepAlive: -1}).DialContext(ctx, "tcp", to.String())
	if err != nil {
		return nil, 0, err
	}
	b := make([]byte, len(serverHello))
	err = c.SetDeadline(began.Add(within))
	if err == nil {
		_, err = c.Write(hello)
	}
	if err == nil {
		_, err = io.ReadFull(c, b[:1])
	}
	took := time.Since(began)
	if err == nil {
		_, err = io.ReadFull(c, b[1:])
	}
	if err == nil {
		err = c.SetDeadline(time.Time{})
	}
	if err != nil {
		_ = c.Close()
		return nil, 0, err
	}
	return c, took, nil
}

// begin makes a connection for something.
func (c *caller) begin(ctx context.Context, o Order, verb byte) (net.Conn, time.Duration, error) {
	hello, err := c.hello(ctx, o.Name)
	if err != nil {
		return nil, 0, err
	}
	conn, took, err := open(ctx, o.To, hello)
	if err == nil {
		if _, err = conn.Write([]byte{verb}); err != nil {
			_ = conn.Close()
		}
	}
	return conn, took, err
}

// flow moves bytes.
func (c *caller) flow(ctx context.Context, o Order) (Report, error) {
	verb, move := byte(download), net.Conn.Read
	if o.Do == Upload {
		verb, move = upload, net.Conn.Write
	}
	var all []net.Conn
	closeAll := func() {
		for _, conn := range all {
			_ = conn.Close()
		}
	}
	for range o.N {
		conn, _, err := c.begin(ctx, o, verb)
		if err != nil {
			closeAll()
			return Report{}, err
		}
		all = append(all, conn)
	}
	var moved atomic.Int64
	var ending atomic.Bool
	errs := make([]error, len(all))
	var wg sync.WaitGroup
	for i, conn := range all {
		wg.Go(func() {
			b := make([]byte, block)
			for {
				n, err := move(conn, b)
				moved.Add(int64(n))
				if err != nil {
					if !ending.Load() {
						errs[i] = err
					}
					return
				}
			}
		})
	}
	err := pause(ctx, warm)
	before, began := moved.Load(), time.Now()
	if err == nil {
		err = pause(ctx, o.For)
	}
	r := Report{Bytes: moved.Load() - before, Took: []time.Duration{time.Since(began)}}
	ending.Store(true)
	closeAll()
	wg.Wait()
	return r, errors.Join(append(errs, err)...)
}

func pause(ctx context.Context, d time.Duration) error {
	select {
	case <-time.After(d):
		return nil
	case <-ctx.Done():
		return context.Cause(ctx)
	}
}

// hold opens connections and keeps them. After an error those that it opened are there.
func (c *caller) hold(ctx context.Context, o Order) ([]time.Duration, error) {
	if _, err := c.hello(ctx, o.Name); err != nil { // so that it is there for all
		return nil, err
	}
	var mu sync.Mutex
	var took []time.Duration
	var errs []error
	var next atomic.Int64
	var wg sync.WaitGroup
	for range opening {
		wg.Go(func() {
			for next.Add(1) <= int64(o.N) {
				conn, d, err := c.begin(ctx, o, echo)
				mu.Lock()
				if err == nil {
					c.held, took = append(c.held, conn), append(took, d)
				} else {
					errs = append(errs, err)
				}
				mu.Unlock()
				if err != nil {
					return
				}
			}
		})
	}
	wg.Wait()
	return took, errors.Join(errs...)
}

// release ends what is held, each after a byte there and back.
func (c *caller) release() error {
	var errs []error
	b := make([]byte, 1)
	for i, conn := range c.held {
		err := conn.SetDeadline(time.Now().Add(within))
		if err == nil {
			_, err = conn.Write([]byte{byte(i)})
		}
		if err == nil {
			_, err = io.ReadFull(conn, b)
		}
		if err == nil && b[0] != byte(i) {
			err = errors.New("another byte came back")
		}
		if err != nil && len(errs) < 5 {
			errs = append(errs, fmt.Errorf("held connection %d: %w", i, err))
		}
		_ = conn.Close()
	}
	c.held = nil
	return errors.Join(errs...)
}

// Line is the way to a caller elsewhere. Its calls do not overlap.
type Line struct {
	orders  *json.Encoder
	reports *json.Decoder
	close   func() error
}

// NewLine makes a line of a caller's input and output, which have room for an order and a report. Close calls end.
func NewLine(in io.Writer, out io.Reader, end func() error) *Line {
	return &Line{orders: json.NewEncoder(in), reports: json.NewDecoder(out), close: end}
}

// Close ends the line.
func (l *Line) Close() error { return l.close() }

// Do has the caller do something and waits for its report, however long that takes: who wants to give up ends the caller.
func (l *Line) Do(o Order) (Report, error) {
	if err := l.orders.Encode(o); err != nil {
		return Report{}, fmt.Errorf("tell a caller to %s: %w", o.Do, err)
	}
	var r Report
	if err := l.reports.Decode(&r); err != nil {
		return Report{}, fmt.Errorf("a caller that was to %s: %w", o.Do, err)
	}
	if r.Error != "" {
		return r, fmt.Errorf("%s %s: %s", o.Do, o.To, r.Error)
	}
	return r, nil
}
