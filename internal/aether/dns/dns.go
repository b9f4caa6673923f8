// Package dns is the resolver that sandboxes see.
//
// It asks nobody: a name that the policy allows, on whatever port, gets an address that stands for it in this sandbox
// (package names), and all others are refused. So no question ever leaves the node, and what a sandbox can tell the
// world by asking is nothing.
//
//	A                      the address of an allowed name
//	AAAA, HTTPS, SVCB      nothing, of an allowed name
//	PTR                    the name that an address stands for
//	all else               REFUSED
//
// aether.internal is the gateway. use-application-dns.net does not exist, which keeps browsers from asking elsewhere.
package dns

import (
	"encoding/binary"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"net"
	"net/netip"
	"strconv"
	"strings"
	"sync"
	"time"

	"github.com/miekg/dns"

	"github.com/sandsea/sandsea/internal/aether/door"
	"github.com/sandsea/sandsea/internal/aether/flowlog"
	"github.com/sandsea/sandsea/internal/aether/forward"
	"github.com/sandsea/sandsea/internal/aether/roster"
	"github.com/sandsea/sandsea/internal/aether/services"
	"github.com/sandsea/sandsea/internal/aether/wire"
	"github.com/sandsea/sandsea/internal/policy"
)

// ttl of answers in seconds: short, since after a restart of Aether the addresses stand for nothing until they are asked
// for again.
const ttl = 30

// canary is what browsers look up to learn whether they may use a resolver of their own over HTTPS.
const canary = "use-application-dns.net"

// ruleType refuses questions for anything but addresses.
const ruleType = "record type"

// maxUDP is how large an answer over UDP may be.
const maxUDP = 1232

// idleWithin bounds the time between questions on a connection.
const idleWithin = 20 * time.Second

// Resolver answers. Its methods may be called at once.
type Resolver struct {
	roster   *roster.Roster
	services *services.Set
	log      *slog.Logger
}

// New makes a Resolver.
func New(r *roster.Roster, s *services.Set, log *slog.Logger) *Resolver {
	return &Resolver{roster: r, services: s, log: log}
}

// ServeUDP answers questions until the socket is closed.
func (r *Resolver) ServeUDP(c net.PacketConn) error {
	buf := make([]byte, dns.MaxMsgSize)
	for {
		n, from, err := c.ReadFrom(buf)
		if errors.Is(err, net.ErrClosed) {
			return nil
		}
		if err != nil {
			// A socket that works goes on after an error that some packet made.
			r.log.Debug("read question", "err", err)
			if n == 0 && from == nil {
				time.Sleep(time.Millisecond)
			}
			continue
		}
		a, ok := from.(*net.UDPAddr)
		if !ok {
			continue
		}
		box, ok := r.roster.ByAddr(a.AddrPort().Addr())
		if !ok {
			continue
		}
		if answer := r.answer(box, buf[:n], maxUDP); answer != nil {
			_, _ = c.WriteTo(answer, from) // a sandbox that has gone does not miss it
		}
	}
}

// ServeTCP answers questions until the listener is closed, and returns when all connections have ended.
func (r *Resolver) ServeTCP(ln *door.Listener) error {
	var open sync.WaitGroup
	defer open.Wait()
	for {
		c, err := ln.Accept()
		if errors.Is(err, net.ErrClosed) {
			return nil
		}
		if err != nil {
			return fmt.Errorf("dns: %w", err)
		}
		open.Go(func() {
			defer c.Close()
			r.serve(c.(*door.Conn))
		})
	}
}

// serve answers on one connection, RFC 7766.
func (r *Resolver) serve(c *door.Conn) {
	var size [2]byte
	for {
		if err := c.SetDeadline(time.Now().Add(idleWithin)); err != nil {
			return
		}
		if _, err := io.ReadFull(c, size[:]); err != nil {
			return
		}
		question := make([]byte, binary.BigEndian.Uint16(size[:]))
		if _, err := io.ReadFull(c, question); err != nil {
			return
		}
		answer := r.answer(c.Box, question, dns.MaxMsgSize)
		if answer == nil {
			return
		}
		if _, err := c.Write(append(binary.BigEndian.AppendUint16(nil, uint16(len(answer))), answer...)); err != nil {
			return
		}
	}
}

// answer gives what is sent back, nil: nothing.
func (r *Resolver) answer(box *roster.Sandbox, packet []byte, most int) []byte {
	var q dns.Msg
	if len(packet) < 12 || packet[2]&0x80 != 0 {
		return nil // too short to answer, or itself an answer
	}
	if err := q.Unpack(packet); err != nil || len(q.Question) != 1 {
		a := new(dns.Msg)
		a.Id, a.Response, a.Rcode = binary.BigEndian.Uint16(packet), true, dns.RcodeFormatError
		return pack(a)
	}
	a := new(dns.Msg).SetReply(&q)
	a.RecursionAvailable = true
	a.Compress = true
	if opt := q.IsEdns0(); opt != nil {
		a.SetEdns0(maxUDP, false)
		most = max(min(most, int(opt.UDPSize())), dns.MinMsgSize)
	} else if most == maxUDP {
		most = dns.MinMsgSize
	}
	a.Rcode = dns.RcodeRefused
	r.question(box, a, q.Question[0])
	a.Truncate(most)
	return pack(a)
}

func pack(m *dns.Msg) []byte {
	b, err := m.Pack()
	if err != nil {
		return nil // a name that cannot be said again
	}
	return b
}

// question fills in the answer, and writes both down.
func (r *Resolver) question(box *roster.Sandbox, a *dns.Msg, q dns.Question) {
	name := roster.Canonical(q.Name)
	v, err := r.resolve(box, a, q, name)
	e := flowlog.Event{
		Kind: flowlog.DNS, Name: name, Protocol: "dns", Rule: v.Rule, Source: dns.RcodeToString[a.Rcode],
	}
	if d, ok := errors.AsType[*roster.Denial](err); ok {
		e.Denied, e.Rule, e.Error = true, d.Rule, d.Reason
	}
	box.Event(e)
}

// resolve says by what rule a name is answered for; an error is why it is refused.
func (r *Resolver) resolve(box *roster.Sandbox, a *dns.Msg, q dns.Question, name string) (v policy.Verdict, err error) {
	if err := box.AllowQuestion(); err != nil {
		return v, err
	}
	switch {
	case a.Opcode != dns.OpcodeQuery || q.Qclass != dns.ClassINET:
		return v, roster.Refusal(policy.Verdict{Rule: ruleType, Reason: "only questions about the Internet are answered"})
	case name == canary:
		a.Rcode = dns.RcodeNameError
		return v, nil
	case name == forward.GatewayName:
		a.Rcode = dns.RcodeSuccess
		if q.Qtype == dns.TypeA {
			a.Answer = append(a.Answer, address(q.Name, wire.Gateway))
		}
		return v, nil
	case q.Qtype == dns.TypePTR:
		return v, r.reverse(box, a, q.Name, name)
	}
	v = r.judge(box, name)
	if !v.Allow {
		return v, roster.Refusal(v)
	}
	switch q.Qtype {
	case dns.TypeA:
		addr, err := box.Resolve(name)
		if err != nil {
			return v, err
		}
		a.Answer = append(a.Answer, address(q.Name, addr))
	case dns.TypeAAAA, dns.TypeHTTPS, dns.TypeSVCB:
	default:
		return v, roster.Refusal(policy.Verdict{Rule: ruleType, Reason: "only addresses are answered for, not " + dns.TypeToString[q.Qtype]})
	}
	a.Rcode = dns.RcodeSuccess
	return v, nil
}

// judge asks the policy about a name, on any port. The host of a package service that the policy knows is the service's.
func (r *Resolver) judge(box *roster.Sandbox, name string) policy.Verdict {
	if svc, _, v := r.services.Judge(box, name); svc != nil && (v.Allow || v.Rule != policy.RuleDefault) {
		return v
	}
	v := box.Judge(policy.Question{Name: name})
	if v.Rule == policy.RuleDefault && box.Repos(name) {
		return policy.Verdict{Allow: true, Rule: "service git:" + name} // requests are judged
	}
	return v
}

func address(name string, a netip.Addr) dns.RR {
	return &dns.A{Hdr: dns.RR_Header{Name: name, Rrtype: dns.TypeA, Class: dns.ClassINET, Ttl: ttl}, A: a.AsSlice()}
}

// reverse answers for Aether's own addresses.
func (r *Resolver) reverse(box *roster.Sandbox, a *dns.Msg, asked, name string) error {
	rest, ok := strings.CutSuffix(name, ".in-addr.arpa")
	parts := strings.Split(rest, ".")
	var raw [4]byte
	ok = ok && len(parts) == 4
	for i := 0; ok && i < 4; i++ {
		n, err := strconv.ParseUint(parts[3-i], 10, 8)
		raw[i], ok = byte(n), err == nil
	}
	addr := netip.AddrFrom4(raw)
	if !ok || !wire.Names.Contains(addr) && addr != wire.Gateway {
		return roster.Refusal(policy.Verdict{Rule: policy.RuleDefault, Reason: "only addresses that stand for names are answered for"})
	}
	target := forward.GatewayName
	if addr != wire.Gateway {
		if target, ok = box.Names.Name(addr); !ok {
			a.Rcode = dns.RcodeNameError
			return nil
		}
	}
	a.Rcode = dns.RcodeSuccess
	a.Answer = append(a.Answer, &dns.PTR{
		Hdr: dns.RR_Header{Name: asked, Rrtype: dns.TypePTR, Class: dns.ClassINET, Ttl: ttl}, Ptr: target + ".",
	})
	return nil
}
