package forward

import (
	"bytes"
	"crypto/tls"
	"encoding/binary"
	"errors"
	"io"
	"net"
	"net/netip"
	"strings"
	"time"

	"github.com/sandsea/sandsea/internal/aether/hello"
	"github.com/sandsea/sandsea/internal/aether/mirror"
	"github.com/sandsea/sandsea/internal/aether/roster"
	"github.com/sandsea/sandsea/internal/policy"
)

// tls carries a connection that speaks TLS.
func (f *Forwarder) tls(c *conn, t Target, svc mirror.Service, up *upstream) error {
	c.flow.Is("tls", serviceName(svc))
	_ = c.SetReadDeadline(time.Now().Add(firstWords)) // on a closed one, Read sees it
	raw, h, err := hello.Read(&peeker{c: c})
	_ = c.SetReadDeadline(time.Time{})
	if err != nil {
		return unreadable(err)
	}
	if err := serverName(c.flow.Sandbox(), t, h.ServerName); err != nil {
		return err
	}
	if t.Name != "" && c.flow.Sandbox().InspectTLS() {
		return f.inspect(c, t, svc, up)
	}
	if svc != nil {
		return mismatch("service "+svc.Name(), "what %s shows depends on the policy, so TLS to its hosts cannot pass unseen: use http://%s/%s/, or inspect_tls",
			svc.Name(), GatewayName, svc.Name())
	}
	err = c.flow.Needs(func() error {
		if t.Name != "" && c.flow.Sandbox().InspectTLS() {
			return mismatch(policy.RuleDefault, "TLS to %s is inspected by the policy in force", t.Name)
		}
		return errors.Join(serverName(c.flow.Sandbox(), t, h.ServerName), unseen(c.flow.Sandbox(), t))
	})
	if err != nil {
		return err
	}
	to, err := up.wait()
	if err != nil {
		return err
	}
	w := &watch{box: c.flow.Sandbox(), target: t, first: len(raw), retry: make(chan bool, 1)}
	return f.relay(c, to,
		func() error { return w.client(c, to) },
		func() error { return w.server(c.tcp, to, c.flow.Received) })
}

// GatewayName is the name of the gateway inside sandboxes.
const GatewayName = "aether.internal"

func unreadable(err error) error {
	if errors.Is(err, hello.ErrMalformed) {
		return mismatch(ruleProtocol, "%v", err)
	}
	return err
}

// serverName checks the name in a ClientHello.
func serverName(s *roster.Sandbox, t Target, name string) error {
	is := roster.Canonical(name)
	switch {
	case t.Name != "" && name == "":
		return mismatch(ruleServerName, "TLS without a server name, to %s", t.Name)
	case t.Name != "" && is != t.Name:
		return mismatch(ruleServerName, "the server name is %.80q, the connection is to %s", name, t.Name)
	case t.Name == "" && name != "":
		return rejected(s, t, is)
	}
	return nil
}

// rejected is why a name may not be used on a connection to an address: some rule rejects it by name, or would if it were
// one. A server of all names below another answers to what no rule can name, as "x-.example".
func rejected(s *roster.Sandbox, t Target, name string) error {
	if _, err := netip.ParseAddr(strings.Trim(name, "[]")); err != nil && s.RejectsNames() && !policy.IsName(name) {
		return mismatch(policy.RuleDefault, "%.80q is no host name", name)
	}
	q := t.question()
	q.Name = name
	if v := s.Judge(q); !v.Allow && v.Rule != policy.RuleDefault {
		return roster.Refusal(v)
	}
	return nil
}

// inspect ends TLS here and serves the requests inside.
func (f *Forwarder) inspect(c *conn, t Target, svc mirror.Service, up *upstream) error {
	cert, err := f.cfg.Authorities.Certificate(c.flow.Sandbox().ID, t.Name)
	if err != nil {
		return err
	}
	over := tls.Server(c, &tls.Config{
		GetCertificate: func(*tls.ClientHelloInfo) (*tls.Certificate, error) { return cert, nil },
		NextProtos:     []string{"h2", "http/1.1"},
		MinVersion:     tls.VersionTLS12,
	})
	e := newExchange(f, c.flow, t, "https", svc, f.taking(c.flow, t, up), false)
	defer e.close()
	return f.web.serve(c, over, e)
}

// watch looks at the second ClientHello of a connection, if the server asks for one (HelloRetryRequest): it could name
// another server than the first.
type watch struct {
	box    *roster.Sandbox
	target Target
	first  int // bytes of the first ClientHello
	retry  chan bool
}

// retryRandom marks a ServerHello as a HelloRetryRequest, RFC 8446 section 4.1.3.
var retryRandom = []byte{
	0xCF, 0x21, 0xAD, 0x74, 0xE5, 0x9A, 0x61, 0x11, 0xBE, 0x1D, 0x8C, 0x02, 0x1E, 0x65, 0xB8, 0x91,
	0xC2, 0xA2, 0x11, 0x16, 0x7A, 0xBB, 0x8C, 0x5E, 0x07, 0x9E, 0x09, 0xE2, 0xC8, 0xA8, 0x33, 0x9C,
}

// serverHello is as much of a ServerHello as tells what it is: headers of record and message, version, random.
const serverHello = 5 + 4 + 2 + 32

// server passes on the first bytes of the server and tells client what they were.
func (w *watch) server(to, from net.Conn, count func(int) error) error {
	retry := false
	defer func() { w.retry <- retry }()
	b := make([]byte, serverHello)
	n, err := io.ReadFull(from, b)
	retry = n == len(b) && b[0] == hello.RecordHandshake && b[5] == 2 && bytes.Equal(b[11:], retryRandom)
	if n > 0 {
		if cerr := count(n); cerr != nil {
			return cerr
		}
		if _, werr := to.Write(b[:n]); werr != nil {
			return werr
		}
	}
	if err != nil && !errors.Is(err, io.EOF) && !errors.Is(err, io.ErrUnexpectedEOF) {
		return err
	}
	return nil
}

// client passes on the first ClientHello, waits for what server saw, and passes on the second one if that is what comes.
// Nothing of the client's goes by meanwhile.
func (w *watch) client(c *conn, up net.Conn) error {
	pass := func(n int) error {
		_, err := up.Write(c.early[:n])
		c.early = c.early[n:]
		return err
	}
	if err := pass(w.first); err != nil {
		return err
	}
	if !<-w.retry {
		return nil
	}
	const header = 5
	for {
		for len(c.early) < header {
			if err := c.more(); err != nil {
				return ended(err)
			}
		}
		if c.early[0] == hello.RecordHandshake {
			raw, h, err := hello.Read(&peeker{c: c})
			if err != nil {
				return unreadable(err)
			}
			if err := serverName(w.box, w.target, h.ServerName); err != nil {
				return err
			}
			return pass(len(raw))
		}
		// Data that was sent early, or the change of ciphers that older middle boxes want.
		size := header + int(binary.BigEndian.Uint16(c.early[3:]))
		for len(c.early) < size {
			if err := c.more(); err != nil {
				return ended(err)
			}
		}
		if err := pass(size); err != nil {
			return err
		}
	}
}

// ended is nil for an orderly end, which whoever reads next sees again.
func ended(err error) error {
	if errors.Is(err, io.EOF) {
		return nil
	}
	return err
}
