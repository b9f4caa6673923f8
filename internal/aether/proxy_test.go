package aether

import (
	"bufio"
	"context"
	"crypto/tls"
	"encoding/binary"
	"errors"
	"io"
	"net"
	"net/http"
	"net/netip"
	"net/url"
	"strings"
	"syscall"
	"testing"
	"time"

	"golang.org/x/net/proxy"

	"github.com/sandsea/sandsea/internal/aether/mirror"
	"github.com/sandsea/sandsea/internal/aether/wire"
	"github.com/sandsea/sandsea/internal/policy"
)

func at(port uint16) string { return netip.AddrPortFrom(wire.Gateway, port).String() }

// throughProxy makes an HTTP client that only knows the proxy.
func (b *box) throughProxy() *http.Client {
	t := &http.Transport{
		Proxy:           http.ProxyURL(&url.URL{Scheme: "http", Host: at(wire.PortProxy)}),
		DialContext:     func(_ context.Context, network, addr string) (net.Conn, error) { return b.dial(network, addr) },
		TLSClientConfig: &tls.Config{RootCAs: b.r.roots}, ForceAttemptHTTP2: true,
	}
	b.r.t.Cleanup(t.CloseIdleConnections)
	return &http.Client{Transport: t, Timeout: 20 * time.Second}
}

func TestTheHTTPProxy(t *testing.T) {
	r := newRig(t, "")
	r.secure(r.host("203.0.113.1:443", "a.example", "neighbour.example"), hello("cdn"), "a.example", "neighbour.example")
	r.web(r.host("203.0.113.1:80"), hello("cdn"))
	r.web(r.host("203.0.113.2:8080", "b.example"), hello("b"))
	b := r.sandbox(allow(domain("a.example"), policy.Rule{Domain: "b.example", Ports: ports(8080)}, policy.Rule{CIDR: "203.0.113.2/32"}))
	c := b.throughProxy()
	for _, want := range []struct {
		url    string
		status int
		body   string
	}{
		{"http://a.example/x", 200, "cdn: a.example /x"},
		{"http://b.example:8080/x", 200, "b: b.example:8080 /x"},
		{"http://203.0.113.2:8080/", 200, "b: 203.0.113.2:8080 /"},
		{"https://a.example/y", 200, "cdn: a.example /y"},
		{"http://neighbour.example/", 403, "rule default reject"},
		{"http://a.example:81/", 403, "rule default reject"},
		{"http://203.0.113.1/", 403, "rule default reject"},
		{"http://10.9.0.1/", 403, "rule platform"},
		{"http://[::1]/", 403, "rule platform"},
		{"http://[::ffff:127.0.0.1]/", 403, "rule platform"},
		{"http://[2001:db8::1]/", 403, "rule default reject"},
		{"http://localhost/", 403, "rule platform"},
		{"http://100.64.0.1/", 404, "no package service"},
		{"http://aether.internal/", 404, "no package service"},
	} {
		if status, body := get(t, c, want.url); status != want.status || !strings.Contains(body, want.body) {
			t.Errorf("%s: %d %q", want.url, status, body)
		}
	}
	// An address that stands for a name means the name, also here.
	addr, err := b.resolve("a.example")
	if err != nil {
		t.Fatal(err)
	}
	for host, status := range map[string]int{
		addr.String() + ":443": 200, "a.example:443": 200, "neighbour.example:443": 403, "203.0.113.1:443": 403, "[::1]:443": 403,
		"a.example:22": 403, "198.18.7.7:443": 400, "a.example": 400, "a.example:0": 400, "a.example:99999": 400, ":443": 400,
		"b.example:8081": 403, "203.0.113.2:8081": 502,
	} {
		conn := b.tunnel(t, host, status)
		if status != 200 {
			continue
		}
		over := tls.Client(conn, &tls.Config{ServerName: "neighbour.example", RootCAs: r.roots})
		if err := over.HandshakeContext(t.Context()); err == nil {
			t.Errorf("the neighbour answers in the tunnel to %s", host)
		}
		conn = b.tunnel(t, host, status)
		over = tls.Client(conn, &tls.Config{ServerName: "a.example", RootCAs: r.roots})
		if err := over.HandshakeContext(t.Context()); err != nil {
			t.Errorf("in the tunnel to %s: %v", host, err)
		}
	}
	b.denied("server name")
}

// tunnel asks the proxy for one and checks the answer.
func (b *box) tunnel(t *testing.T, host string, status int) net.Conn {
	t.Helper()
	conn := b.must(at(wire.PortProxy))
	_, _ = conn.Write([]byte("CONNECT " + host + " HTTP/1.1\r\nHost: " + host + "\r\n\r\n"))
	br := bufio.NewReader(conn)
	resp, err := http.ReadResponse(br, &http.Request{Method: http.MethodConnect})
	if err != nil {
		t.Fatalf("CONNECT %s: %v", host, err)
	}
	if resp.StatusCode != status {
		body, _ := io.ReadAll(resp.Body)
		t.Errorf("CONNECT %s: %d %q, want %d", host, resp.StatusCode, body, status)
	}
	return conn
}

func TestACutPolicyEndsRequestsThroughTheProxy(t *testing.T) {
	r := newRig(t, "")
	going := make(chan struct{})
	r.web(r.host("203.0.113.1:80", "a.example"), http.HandlerFunc(func(w http.ResponseWriter, req *http.Request) {
		_, _ = w.Write([]byte("first"))
		_ = http.NewResponseController(w).Flush()
		close(going)
		<-req.Context().Done()
	}))
	b := r.sandbox(allow(domain("a.example")))
	resp, err := b.throughProxy().Get("http://a.example/")
	if err != nil {
		t.Fatal(err)
	}
	defer resp.Body.Close()
	<-going
	b.put(allow(domain("b.example")), "agent")
	if _, err := io.ReadAll(resp.Body); err == nil {
		t.Error("the answer ended well")
	}
}

func TestSOCKS(t *testing.T) {
	r := newRig(t, "")
	r.secure(r.host("203.0.113.1:443", "a.example", "neighbour.example"), hello("cdn"), "a.example", "neighbour.example")
	b := r.sandbox(allow(domain("a.example")))
	addr, err := b.resolve("a.example")
	if err != nil {
		t.Fatal(err)
	}
	d, err := proxy.SOCKS5("tcp", at(wire.PortSOCKS), nil, dialer{b})
	if err != nil {
		t.Fatal(err)
	}
	for _, host := range []string{"a.example:443", addr.String() + ":443"} {
		for name, ok := range map[string]bool{"a.example": true, "neighbour.example": false} {
			c, err := d.Dial("tcp", host)
			if err != nil {
				t.Fatalf("%s: %v", host, err)
			}
			err = tls.Client(c, &tls.Config{ServerName: name, RootCAs: r.roots}).HandshakeContext(t.Context())
			if (err == nil) != ok {
				t.Errorf("%s at %s: %v", name, host, err)
			}
			c.Close()
		}
	}
	for host, says := range map[string]string{
		"neighbour.example:443": "not allowed", "203.0.113.1:443": "not allowed", "[::1]:443": "not allowed", "10.9.0.1:443": "not allowed",
		"a.example:80": "connection refused", "198.18.9.9:443": "unreachable",
	} {
		if c, err := d.Dial("tcp", host); err == nil || !strings.Contains(err.Error(), says) {
			t.Errorf("%s: %v, %v", host, c, err)
		}
	}
	for name, c := range map[string]struct {
		send, want []byte
	}{
		"SOCKS4":          {[]byte{4, 1, 0, 80, 1, 2, 3, 4, 0}, nil},
		"passwords only":  {[]byte{5, 1, 2}, []byte{5, 0xff}},
		"no methods":      {[]byte{5, 0}, nil},
		"UDP associate":   {[]byte{5, 1, 0, 5, 3, 0, 1, 1, 2, 3, 4, 0, 53}, []byte{5, 0, 5, 7, 0, 1, 0, 0, 0, 0, 0, 0}},
		"bind":            {[]byte{5, 1, 0, 5, 2, 0, 1, 1, 2, 3, 4, 0, 53}, []byte{5, 0, 5, 7, 0, 1, 0, 0, 0, 0, 0, 0}},
		"no address type": {[]byte{5, 1, 0, 5, 1, 0, 9}, []byte{5, 0, 5, 8, 0, 1, 0, 0, 0, 0, 0, 0}},
		"an empty name":   {[]byte{5, 1, 0, 5, 1, 0, 3, 0}, []byte{5, 0, 5, 8, 0, 1, 0, 0, 0, 0, 0, 0}},
		"port 0":          {[]byte{5, 1, 0, 5, 1, 0, 1, 1, 2, 3, 4, 0, 0}, []byte{5, 0, 5, 1, 0, 1, 0, 0, 0, 0, 0, 0}},
	} {
		conn := b.must(at(wire.PortSOCKS))
		_, _ = conn.Write(c.send)
		got, err := io.ReadAll(conn)
		if err != nil && !errors.Is(err, syscall.ECONNRESET) || string(got) != string(c.want) {
			t.Errorf("%s: %v, %v", name, got, err)
		}
	}
}

type dialer struct{ b *box }

func (d dialer) Dial(network, addr string) (net.Conn, error) { return d.b.dial(network, addr) }

func TestDatagrams(t *testing.T) {
	r := newRig(t, "")
	pc, err := net.ListenPacket("udp", "203.0.113.1:9000")
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { pc.Close() })
	go func() {
		buf := make([]byte, 2048)
		for {
			n, from, err := pc.ReadFrom(buf)
			if err != nil {
				return
			}
			_, _ = pc.WriteTo(append([]byte("echo "), buf[:n]...), from)
		}
	}()
	r.zone.set("a.example", "203.0.113.1")
	r.zone.set("private.example", "10.9.0.1")
	udp := func(r policy.Rule) policy.Rule {
		r.Protocol, r.Ports = policy.UDP, ports(9000)
		return r
	}
	p := allow(udp(domain("*.example")), udp(policy.Rule{CIDR: "203.0.113.1/32"}))
	b := r.sandbox(p)
	const answered, silent = 20 * time.Second, 2 * time.Second
	ask := func(host string, within time.Duration) error {
		addr, err := netip.ParseAddr(host)
		if err != nil {
			if addr, err = b.resolve(host); err != nil {
				return err
			}
		}
		c, err := b.dial("udp", netip.AddrPortFrom(addr, 9000).String())
		if err != nil {
			return err
		}
		defer c.Close()
		for n := range 3 {
			_ = c.SetDeadline(time.Now().Add(within))
			msg := binary.BigEndian.AppendUint32(nil, uint32(n))
			if _, err := c.Write(msg); err != nil {
				return err
			}
			buf := make([]byte, 100)
			got, err := c.Read(buf)
			if err != nil {
				return err
			}
			if string(buf[:got]) != "echo "+string(msg) {
				t.Errorf("%s: %q", host, buf[:got])
			}
		}
		return nil
	}
	if err := errors.Join(ask("a.example", answered), ask("203.0.113.1", answered)); err != nil {
		t.Error(err)
	}
	if err := ask("203.0.113.2", answered); !errors.Is(err, syscall.ECONNREFUSED) && !errors.Is(err, syscall.EHOSTUNREACH) && !errors.Is(err, syscall.EACCES) {
		t.Errorf("an address that nothing allows: %v", err)
	}
	if ask("private.example", silent) == nil {
		t.Error("a private address answers")
	}
	b.denied(policy.RulePlatform)
	// Nobody reads them, so that they do not pass where a service or a path decides.
	r.p.services.Use([]mirror.Service{shelfOf{"npm", "registry.example"}})
	r.zone.set("registry.example", "203.0.113.1")
	if err := ask("registry.example", answered); err != nil {
		t.Errorf("the host of a service that the policy knows nothing of: %v", err)
	}
	bounded := allow(append(p.Phases[0].Rules, policy.Rule{Domain: "*.example", Ports: ports(443), Protocol: policy.UDP})...)
	bounded.Deny = []string{"git:a.example/org/repo"}
	b.put(bounded, "agent")
	if ask("registry.example", silent) == nil {
		t.Error("the host of a service whose world is bounded answers")
	}
	b.denied("service npm")
	if err := ask("a.example", answered); err != nil {
		t.Errorf("not HTTP/3: %v", err)
	}
	at443, err := b.resolve("a.example")
	if err != nil {
		t.Fatal(err)
	}
	quic, err := b.dial("udp", netip.AddrPortFrom(at443, 443).String())
	if err != nil {
		t.Fatal(err)
	}
	defer quic.Close()
	_, _ = quic.Write([]byte("x"))
	b.denied("deny git:a.example/org/repo")
	b.put(p, "agent")
	// What is open is cut, and nothing new comes to be.
	addr, err := b.resolve("a.example")
	if err != nil {
		t.Fatal(err)
	}
	b.put(allow(domain("a.example")), "agent")
	c, err := b.dial("udp", netip.AddrPortFrom(addr, 9000).String())
	if err != nil {
		t.Fatal(err)
	}
	defer c.Close()
	_, _ = c.Write([]byte("x"))
	b.events(deniedUDP)
}
