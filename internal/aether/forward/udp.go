package forward

import (
	"context"
	"errors"
	"fmt"
	"io"
	"net"
	"net/netip"
	"os"
	"sync"
	"sync/atomic"
	"time"

	"github.com/sandsea/sandsea/internal/aether/roster"
	"github.com/sandsea/sandsea/internal/linux/transparent"
	"github.com/sandsea/sandsea/internal/policy"
)

const (
	// udpIdle is how long a flow of datagrams lives without one, RFC 4787 wants two minutes.
	udpIdle = 2 * time.Minute
	// udpQueue is how many datagrams wait while a flow is being opened.
	udpQueue = 32
	maxUDP   = 64 << 10
	// openWithin bounds the opening of a flow.
	openWithin = 10 * time.Second
)

// Foreign makes a socket that is bound to an address of somebody else's, from which a sandbox is answered.
type Foreign func(ctx context.Context, from netip.AddrPort) (*os.File, error)

// pair is who talks to whom, as the sandbox sees it.
type pair struct{ from, to netip.AddrPort }

// Datagrams carries those that were sent to addresses which are not the gate's.
type Datagrams struct {
	f       *Forwarder
	in      *net.UDPConn
	foreign Foreign
	run     sync.WaitGroup
	ending  atomic.Bool

	mu    sync.Mutex
	flows map[pair]*datagrams // guarded by mu
}

// datagrams is one flow of them.
type datagrams struct {
	queue chan []byte
	last  atomic.Int64 // Unix nanoseconds
	up    atomic.Pointer[net.UDPConn]
	flow  *roster.Flow
}

// Datagrams carries what comes from the socket, which is one of transparent.ListenPacket.
func (f *Forwarder) Datagrams(in *net.UDPConn, foreign Foreign) *Datagrams {
	return &Datagrams{f: f, in: in, foreign: foreign, flows: map[pair]*datagrams{}}
}

// Serve carries datagrams until the socket is closed, and returns when all flows have ended.
func (d *Datagrams) Serve() error {
	defer d.run.Wait()
	defer d.end()
	buf := make([]byte, maxUDP)
	for {
		n, from, to, err := transparent.ReadFrom(d.in, buf)
		if errors.Is(err, net.ErrClosed) {
			return nil
		}
		if err != nil {
			d.f.cfg.Log.Debug("read datagram", "err", err)
			if !from.IsValid() {
				time.Sleep(time.Millisecond)
			}
			continue
		}
		d.packet(pair{from, to}, buf[:n])
	}
}

// end cuts what is open.
func (d *Datagrams) end() {
	d.ending.Store(true)
	d.mu.Lock()
	defer d.mu.Unlock()
	for _, g := range d.flows {
		if up := g.up.Load(); up != nil {
			_ = up.SetReadDeadline(past) // ends its reader
		}
	}
}

// packet sends one on, or opens a flow for it. It does not wait.
func (d *Datagrams) packet(p pair, b []byte) {
	d.mu.Lock()
	g := d.flows[p]
	d.mu.Unlock()
	if g != nil {
		if up := g.up.Load(); up != nil {
			d.send(g, up, b)
			return
		}
	} else if g = d.open(p); g == nil {
		return
	}
	select {
	case g.queue <- append([]byte(nil), b...):
	default: // as any network does with too many
	}
	if up := g.up.Load(); up != nil {
		d.queued(g, up) // it was opened meanwhile, and its opener may have looked before this one came
	}
}

// queued sends what waited for the flow to open.
func (d *Datagrams) queued(g *datagrams, up *net.UDPConn) {
	for {
		select {
		case b := <-g.queue:
			d.send(g, up, b)
		default:
			return
		}
	}
}

func (d *Datagrams) send(g *datagrams, up *net.UDPConn, b []byte) {
	g.last.Store(time.Now().UnixNano())
	if g.flow.Cause() == nil && g.flow.Sent(len(b)) == nil { // one that was cut as it opened is closed soon
		_, _ = up.Write(b) // a refusal of an earlier one comes here; datagrams may be lost
	}
}

// open admits a flow and has it opened. nil: it is refused.
func (d *Datagrams) open(p pair) *datagrams {
	box, ok := d.f.cfg.Roster.ByAddr(p.from.Addr())
	if !ok {
		return nil
	}
	t, ok := TargetAt(box, p.to)
	q := t.question()
	q.Protocol = policy.UDP
	l := t.label("udp")
	var err error
	g := &datagrams{queue: make(chan []byte, udpQueue)}
	ctx, cancel := context.WithCancelCause(context.Background())
	if !ok {
		l.Addr = p.to.Addr()
		err = mismatch(policy.RuleDefault, "the address stands for no name")
	} else {
		g.flow, err = box.Open(q, l, func() {
			cancel(errCut)
			if up := g.up.Load(); up != nil {
				_ = up.Close()
			}
		}, func() error { return d.f.unread(box, t) })
	}
	if err != nil {
		cancel(err)
		box.Deny(l, err)
		return nil
	}
	d.mu.Lock()
	d.flows[p] = g
	d.mu.Unlock()
	d.run.Go(func() {
		defer cancel(nil)
		err := d.carry(ctx, p, g, t)
		d.mu.Lock()
		delete(d.flows, p)
		d.mu.Unlock()
		g.flow.Close(err)
	})
	return g
}

// unread is why datagrams to a target may not pass: they may be HTTP/3, which nobody reads here, to a host of which a package
// service or the path of a request would decide.
func (f *Forwarder) unread(s *roster.Sandbox, t Target) error {
	if t.Name != "" && s.World().Hides() && !f.cfg.Services.Known() {
		return mismatch(policy.RuleDefault, "nobody has told yet where packages come from")
	}
	svc, _, err := f.service(s, t)
	if err != nil {
		return err
	}
	if svc != nil {
		return mismatch("service "+svc.Name(), "what %s shows depends on the policy, so datagrams to its hosts cannot pass", svc.Name())
	}
	if entry := s.DeniedRepo(t.Name); entry != "" && t.Port == 443 {
		return mismatch(policy.RuleDeny+" "+entry, "%s is denied, and datagrams to %s would hide it", entry, t.Name)
	}
	return nil
}

// carry opens both sides of a flow and brings the answers back until it was idle for too long.
func (d *Datagrams) carry(ctx context.Context, p pair, g *datagrams, t Target) error {
	ctx, stop := context.WithTimeoutCause(ctx, openWithin, fmt.Errorf("%s: not open within %v", t, openWithin))
	defer stop()
	addr := t.Addr
	if t.Name != "" {
		all, err := d.f.cfg.Dialer.Lookup(ctx, t.Name, g.flow.Sandbox().Check(g.flow.Question()))
		if err != nil {
			return err
		}
		addr = all[0]
		if v := g.flow.Reached(addr); !v.Allow {
			return roster.Refusal(v)
		}
	}
	file, err := d.foreign(ctx, p.to)
	if err != nil {
		return err
	}
	back, err := net.FilePacketConn(file)
	file.Close()
	if err != nil {
		return err
	}
	defer func() { _ = back.Close() }()
	up, err := d.f.cfg.Dialer.UDP(ctx, netip.AddrPortFrom(addr, t.Port))
	if err != nil {
		return err
	}
	defer func() { _ = up.Close() }()
	g.last.Store(time.Now().UnixNano())
	g.up.Store(up)
	if g.flow.Cause() != nil || ctx.Err() != nil {
		return context.Cause(ctx) // cut meanwhile
	}
	d.queued(g, up)
	return d.answers(p, g, up, back)
}

func (d *Datagrams) answers(p pair, g *datagrams, up *net.UDPConn, back net.PacketConn) error {
	to := net.UDPAddrFromAddrPort(p.from)
	read := reader(up)
	for {
		// A deadline that was set by end may be overwritten here, so end's word is asked for after that.
		_ = up.SetReadDeadline(time.Unix(0, g.last.Load()).Add(udpIdle)) // on a closed one, reading sees it
		if d.ending.Load() {
			return nil
		}
		buf, n, err := read()
		if buf == nil {
			switch {
			case errors.Is(err, os.ErrDeadlineExceeded):
				if time.Since(time.Unix(0, g.last.Load())) >= udpIdle {
					return nil
				}
				continue // the sandbox has said something meanwhile
			case errors.Is(err, net.ErrClosed):
				return nil
			}
			return fmt.Errorf("udp: %w", err)
		}
		if err == nil || errors.Is(err, io.EOF) { // empty datagrams look like ends
			_, _ = back.WriteTo((*buf)[:n], to) // a sandbox that has gone does not miss it
			err = g.flow.Received(n)
		}
		buffers.Put(buf)
		if err != nil {
			return fmt.Errorf("udp: %w", err) // refused on the far side
		}
		g.last.Store(time.Now().UnixNano())
	}
}
