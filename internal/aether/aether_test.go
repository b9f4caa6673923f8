package aether

import (
	"bufio"
	"crypto/tls"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"net"
	"net/http"
	"net/netip"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/miekg/dns"

	sandseav1 "github.com/sandsea/sandsea/api/sandsea/v1"
	"github.com/sandsea/sandsea/internal/aether/flowlog"
	"github.com/sandsea/sandsea/internal/aether/wire"
	"github.com/sandsea/sandsea/internal/policy"
	"github.com/sandsea/sandsea/internal/testkit/wait"
)

// hello says which host answers.
func hello(name string) http.Handler {
	return http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		fmt.Fprintf(w, "%s: %s %s", name, r.Host, r.URL.RequestURI())
	})
}

func TestTheResolver(t *testing.T) {
	r := newRig(t, "")
	b := r.sandbox(allow(domain("a.example"), domain("*.b.example"), policy.Rule{Domain: "no.b.example", Reject: true}))
	for _, c := range []struct {
		name  string
		kind  uint16
		rcode int
		count int
	}{
		{"a.example", dns.TypeA, dns.RcodeSuccess, 1},
		{"A.eXample", dns.TypeA, dns.RcodeSuccess, 1},
		{"a.example", dns.TypeAAAA, dns.RcodeSuccess, 0},
		{"a.example", dns.TypeHTTPS, dns.RcodeSuccess, 0},
		{"a.example", dns.TypeTXT, dns.RcodeRefused, 0},
		{"a.example", dns.TypeANY, dns.RcodeRefused, 0},
		{"a.example", dns.TypeNS, dns.RcodeRefused, 0},
		{"x.y.b.example", dns.TypeA, dns.RcodeSuccess, 1},
		{"b.example", dns.TypeA, dns.RcodeRefused, 0},
		{"xb.example", dns.TypeA, dns.RcodeRefused, 0},
		{"other.example", dns.TypeA, dns.RcodeRefused, 0},
		{"other.example", dns.TypeAAAA, dns.RcodeRefused, 0},
		{"secret-data.other.example", dns.TypeTXT, dns.RcodeRefused, 0},
		{"a\\.x.b.example", dns.TypeA, dns.RcodeRefused, 0},
		{"aether.internal", dns.TypeA, dns.RcodeSuccess, 1},
		{"use-application-dns.net", dns.TypeA, dns.RcodeNameError, 0},
		{"localhost", dns.TypeA, dns.RcodeRefused, 0},
		{"1.0.64.100.in-addr.arpa", dns.TypePTR, dns.RcodeSuccess, 1},
		{"7.7.18.198.in-addr.arpa", dns.TypePTR, dns.RcodeNameError, 0},
		{"8.8.8.8.in-addr.arpa", dns.TypePTR, dns.RcodeRefused, 0},
	} {
		a, err := b.ask(c.name, c.kind)
		if err != nil {
			t.Fatalf("%s: %v", c.name, err)
		}
		if a.Rcode != c.rcode || len(a.Answer) != c.count {
			t.Errorf("%s %s: %s with %d answers, want %s with %d", c.name, dns.TypeToString[c.kind], dns.RcodeToString[a.Rcode],
				len(a.Answer), dns.RcodeToString[c.rcode], c.count)
		}
	}
	if asked := r.zone.questions(); len(asked) != 0 {
		t.Errorf("questions left the node: %q", asked)
	}
	addr, err := b.resolve("a.example")
	if err != nil || !wire.Names.Contains(addr) {
		t.Fatalf("%v, %v", addr, err)
	}
	// Over TCP, two questions on one connection.
	c := &dns.Conn{Conn: b.must(at(wire.PortDNS))}
	for range 2 {
		if err := c.WriteMsg(new(dns.Msg).SetQuestion("a.example.", dns.TypeA)); err != nil {
			t.Fatal(err)
		}
		if a, err := c.ReadMsg(); err != nil || len(a.Answer) != 1 || a.Answer[0].(*dns.A).A.String() != addr.String() {
			t.Fatalf("%v, %v", a, err)
		}
	}
	for name, strange := range map[string]func(*dns.Msg){
		"version.bind": func(m *dns.Msg) { m.Question[0].Qclass = dns.ClassCHAOS },
		"zone.example": func(m *dns.Msg) { m.Opcode = dns.OpcodeUpdate },
	} {
		m := new(dns.Msg).SetQuestion(name+".", dns.TypeA)
		strange(m)
		if err := c.WriteMsg(m); err != nil {
			t.Fatal(err)
		}
		if a, err := c.ReadMsg(); err != nil || a.Rcode != dns.RcodeRefused {
			t.Errorf("%s: %v, %v", name, a, err)
		}
		if e := b.events(func(e *sandseav1.NetworkEvent) bool { return e.GetName() == name }); !e.GetDenied() || e.GetRule() == "" {
			t.Errorf("%s: event %v", name, e)
		}
	}
	back, err := dns.ReverseAddr(addr.String())
	if err != nil {
		t.Fatal(err)
	}
	if a, err := b.ask(back, dns.TypePTR); err != nil || len(a.Answer) != 1 || a.Answer[0].(*dns.PTR).Ptr != "a.example." {
		t.Errorf("%v, %v", a, err)
	}
	e := b.events(func(e *sandseav1.NetworkEvent) bool { return e.GetName() == "other.example" })
	if !e.GetDenied() || e.GetRule() != policy.RuleDefault || e.GetSource() != "REFUSED" || e.GetPhase() != "agent" {
		t.Errorf("event %v", e)
	}
}

func TestTLSPassesToTheHostThatIsMeant(t *testing.T) {
	r := newRig(t, "")
	// Two hosts on one address, as with a CDN.
	ln := r.host("203.0.113.1:443", "a.example", "neighbour.example")
	r.secure(ln, hello("cdn"), "a.example", "neighbour.example")
	b := r.sandbox(allow(domain("a.example")))

	if status, body := get(t, b.client(), "https://a.example/x?y=1"); status != 200 || body != "cdn: a.example /x?y=1" {
		t.Errorf("got %d %q", status, body)
	}
	if _, err := b.connect("neighbour.example:443"); !errors.Is(err, errRefused) {
		t.Errorf("the neighbour resolves: %v", err)
	}
	for name, cfg := range map[string]*tls.Config{
		"the neighbour's server name": {ServerName: "neighbour.example", RootCAs: r.roots},
		"no server name":              {InsecureSkipVerify: true},
		"an address":                  {ServerName: "203.0.113.1", RootCAs: r.roots},
		"a name below":                {ServerName: "x.a.example", RootCAs: r.roots},
	} {
		c := b.must("a.example:443")
		err := tls.Client(c, cfg).HandshakeContext(t.Context())
		if !errors.Is(err, syscall.ECONNRESET) {
			t.Errorf("with %s: %v", name, err)
		}
	}
	b.denied("server name")
	// The address itself is nobody's.
	if c, err := b.connect("203.0.113.1:443"); !errors.Is(err, syscall.ECONNREFUSED) {
		t.Errorf("the address: %v, %v", c, err)
	}
	// Another port of the name is refused at once.
	if err := b.fails("a.example:444"); !errors.Is(err, syscall.ECONNRESET) {
		t.Errorf("another port: %v", err)
	}
}

func TestPlainHTTPGoesToItsHostOnly(t *testing.T) {
	r := newRig(t, "")
	ln := r.host("203.0.113.1:80", "a.example", "neighbour.example")
	r.web(ln, hello("cdn"))
	b := r.sandbox(allow(domain("a.example")))
	if status, body := get(t, b.client(), "http://a.example/x/../y%2f?z"); status != 200 || body != "cdn: a.example /x/../y%2f?z" {
		t.Errorf("got %d %q", status, body)
	}
	for _, c := range []struct {
		name, request string
		want          []int // statuses in order; the connection then ends
	}{
		{"keep-alive", "GET /1 HTTP/1.1\r\nHost: a.example\r\n\r\nGET /2 HTTP/1.1\r\nHost: a.example\r\nConnection: close\r\n\r\n", []int{200, 200}},
		{"capitals, a dot and the port", "GET / HTTP/1.1\r\nHost: A.Example.:80\r\nConnection: close\r\n\r\n", []int{200}},
		{"absolute form", "GET http://a.example/ HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n", []int{200}},
		{"another host", "GET / HTTP/1.1\r\nHost: neighbour.example\r\n\r\n", []int{403}},
		{"another host behind a good one", "GET / HTTP/1.1\r\nHost: a.example\r\n\r\nGET / HTTP/1.1\r\nHost: neighbour.example\r\n\r\n", []int{200, 403}},
		{"another host in absolute form", "GET http://neighbour.example/ HTTP/1.1\r\nHost: a.example\r\n\r\n", []int{403}},
		{"another port", "GET / HTTP/1.1\r\nHost: a.example:8080\r\n\r\n", []int{403}},
		{"two hosts", "GET / HTTP/1.1\r\nHost: a.example\r\nHost: neighbour.example\r\n\r\n", []int{400}},
		{"no host", "GET / HTTP/1.1\r\n\r\n", []int{400}},
		{"no host in HTTP/1.0", "GET / HTTP/1.0\r\n\r\n", []int{403}},
		{"empty lines first", "\r\n\r\nGET / HTTP/1.1\r\nHost: neighbour.example\r\n\r\n", []int{400}},
		{"a request in a body whose length is said twice", "POST / HTTP/1.1\r\nHost: a.example\r\nContent-Length: 4\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\nGET / HTTP/1.1\r\nHost: neighbour.example\r\n\r\n", []int{200, 403}},
		{"two lengths", "POST / HTTP/1.1\r\nHost: a.example\r\nContent-Length: 4\r\nContent-Length: 5\r\n\r\nabcde", []int{400}},
		{"a blank in a header's name", "GET / HTTP/1.1\r\nHost : neighbour.example\r\nHost: a.example\r\n\r\n", []int{400}},
		{"a tunnel", "CONNECT a.example:80 HTTP/1.1\r\nHost: a.example:80\r\n\r\n", []int{405}},
	} {
		t.Run(c.name, func(t *testing.T) {
			conn := b.must("a.example:80")
			if _, err := conn.Write([]byte(c.request)); err != nil {
				t.Fatal(err)
			}
			br := bufio.NewReader(conn)
			var got []int
			for {
				resp, err := http.ReadResponse(br, &http.Request{Method: http.MethodGet})
				if err != nil {
					break
				}
				body, _ := io.ReadAll(resp.Body)
				got = append(got, resp.StatusCode)
				if resp.StatusCode == http.StatusForbidden && resp.Header.Get("Sandsea-Rule") == "" {
					t.Errorf("no rule is named: %q", body)
				}
				if strings.Contains(string(body), "cdn: neighbour") {
					t.Errorf("the neighbour was reached: %q", body)
				}
				if resp.StatusCode == http.StatusMethodNotAllowed || resp.Close {
					break
				}
			}
			if !slices.Equal(got, c.want) {
				t.Errorf("got %v, want %v", got, c.want)
			}
		})
	}
	// What is neither TLS nor HTTP has no business on port 80.
	conn := b.must("a.example:80")
	_, _ = conn.Write([]byte("\x00\x01binary\n"))
	if _, err := conn.Read(make([]byte, 1)); !errors.Is(err, syscall.ECONNRESET) {
		t.Errorf("binary on port 80: %v", err)
	}
}

func TestAnUpgradedConnectionGoesOn(t *testing.T) {
	r := newRig(t, "")
	r.web(r.host("203.0.113.1:80", "a.example"), http.HandlerFunc(func(w http.ResponseWriter, _ *http.Request) {
		c, rw, err := w.(http.Hijacker).Hijack()
		if err != nil {
			t.Error(err)
			return
		}
		defer c.Close()
		_, _ = rw.WriteString("HTTP/1.1 101 Switching Protocols\r\nConnection: Upgrade\r\nUpgrade: websocket\r\n\r\n")
		_ = rw.Flush()
		_, _ = io.Copy(c, rw)
	}))
	b := r.sandbox(allow(domain("a.example")))
	c := b.must("a.example:80")
	_, _ = c.Write([]byte("GET /chat HTTP/1.1\r\nHost: a.example\r\nConnection: Upgrade\r\nUpgrade: websocket\r\n\r\n"))
	br := bufio.NewReader(c)
	resp, err := http.ReadResponse(br, nil)
	if err != nil || resp.StatusCode != http.StatusSwitchingProtocols {
		t.Fatalf("%v, %v", resp, err)
	}
	for _, word := range []string{"one", "two"} {
		_, _ = c.Write([]byte(word))
		got := make([]byte, len(word))
		if _, err := io.ReadFull(br, got); err != nil || string(got) != word {
			t.Fatalf("%q, %v", got, err)
		}
	}
}

// TestAnAnswerBeforeTheEndOfItsRequest has a host answer each piece of a request's body as it comes.
func TestAnAnswerBeforeTheEndOfItsRequest(t *testing.T) {
	r := newRig(t, "")
	r.web(r.host("203.0.113.1:80", "a.example"), http.HandlerFunc(func(w http.ResponseWriter, req *http.Request) {
		_ = http.NewResponseController(w).EnableFullDuplex()
		buf := make([]byte, 1)
		for {
			if _, err := io.ReadFull(req.Body, buf); err != nil {
				return
			}
			_, _ = w.Write(buf)
			_ = http.NewResponseController(w).Flush()
		}
	}))
	b := r.sandbox(allow(domain("a.example")))
	for _, to := range []struct{ at, url string }{{"a.example:80", "/"}, {at(wire.PortProxy), "http://a.example/"}} {
		c := b.must(to.at)
		_, _ = io.WriteString(c, "POST "+to.url+" HTTP/1.1\r\nHost: a.example\r\nTransfer-Encoding: chunked\r\n\r\n1\r\na\r\n")
		resp, err := http.ReadResponse(bufio.NewReader(c), nil)
		if err != nil {
			t.Fatalf("%s: %v", to.url, err)
		}
		got := make([]byte, 1)
		for _, want := range "abc" {
			if want != 'a' {
				_, _ = fmt.Fprintf(c, "1\r\n%c\r\n", want)
			}
			if _, err := io.ReadFull(resp.Body, got); err != nil || got[0] != byte(want) {
				t.Fatalf("%s: %q came for %q, %v", to.url, got, want, err)
			}
		}
		_, _ = io.WriteString(c, "0\r\n\r\n")
		if rest, err := io.ReadAll(resp.Body); err != nil || len(rest) > 0 {
			t.Errorf("%s: %q, %v", to.url, rest, err)
		}
	}
}

func TestHTTP2WithoutTLSIsReadToo(t *testing.T) {
	r := newRig(t, "")
	var both http.Protocols
	both.SetUnencryptedHTTP2(true)
	srv := &http.Server{Protocols: &both, Handler: http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		w.Header().Set("Trailer", "Grpc-Status")
		fmt.Fprintf(w, "%s %s", r.Proto, r.Host)
		w.Header().Set("Grpc-Status", "0")
	})}
	ln := r.host("203.0.113.1:50051", "a.example")
	go func() { _ = srv.Serve(ln) }()
	t.Cleanup(func() { _ = srv.Close() })
	b := r.sandbox(allow(policy.Rule{Domain: "a.example", Ports: []policy.Ports{{First: 50051, Last: 50051}}}))
	c := b.client()
	c.Transport.(*http.Transport).Protocols = &both
	resp, err := c.Get("http://a.example:50051/")
	if err != nil {
		t.Fatal(err)
	}
	body, _ := io.ReadAll(resp.Body)
	if string(body) != "HTTP/2.0 a.example:50051" || resp.Trailer.Get("Grpc-Status") != "0" {
		t.Errorf("%q, trailer %v", body, resp.Trailer)
	}
	req, _ := http.NewRequest(http.MethodGet, "http://a.example:50051/", nil)
	req.Host = "neighbour.example"
	if resp, err = c.Do(req); err != nil || resp.StatusCode != http.StatusForbidden {
		t.Errorf("another authority: %v, %v", resp, err)
	}
}

func ports(n uint16) []policy.Ports { return []policy.Ports{{First: n, Last: n}} }

func TestOtherProtocolsPass(t *testing.T) {
	r := newRig(t, "")
	b := r.sandbox(allow(policy.Rule{Domain: "*.example", Ports: []policy.Ports{{First: 1000, Last: 9999}}}))
	r.echo(r.host("203.0.113.1:7000", "echo.example"))

	t.Run("the client first", func(t *testing.T) {
		c := b.must("echo.example:7000")
		_, _ = c.Write([]byte{0, 1, 2})
		got := make([]byte, 3)
		if _, err := io.ReadFull(c, got); err != nil || got[2] != 2 {
			t.Fatalf("%v, %v", got, err)
		}
		// The end of one direction is not that of the other.
		if err := c.(*net.TCPConn).CloseWrite(); err != nil {
			t.Fatal(err)
		}
		if rest, err := io.ReadAll(c); err != nil || len(rest) != 0 {
			t.Errorf("%q, %v", rest, err)
		}
	})
	t.Run("a client that pauses in the middle of its first words", func(t *testing.T) {
		c := b.must("echo.example:7000")
		br := bufio.NewReader(c)
		for _, word := range []string{"d", "x", "GET"} {
			_, _ = c.Write([]byte(word))
			got := make([]byte, len(word))
			if _, err := io.ReadFull(br, got); err != nil || string(got) != word {
				t.Fatalf("%q, %v", got, err)
			}
		}
		_, _ = c.Write([]byte(" / HTTP/1.1\r\nHost: neighbour.example\r\n\r\n"))
		if _, err := br.ReadByte(); !errors.Is(err, syscall.ECONNRESET) {
			t.Errorf("a request in small pieces: %v", err)
		}
		b.denied("protocol")
	})
	t.Run("the server first, and the client looked at all the same", func(t *testing.T) {
		ln := r.host("203.0.113.2:2500", "mail.example")
		go func() {
			for {
				c, err := ln.Accept()
				if err != nil {
					return
				}
				_, _ = c.Write([]byte("220 ready\r\n"))
				go func() { _, _ = io.Copy(c, c); c.Close() }()
			}
		}()
		c := b.must("mail.example:2500")
		br := bufio.NewReader(c)
		if line, err := br.ReadString('\n'); err != nil || line != "220 ready\r\n" {
			t.Fatalf("%q, %v", line, err)
		}
		_, _ = c.Write([]byte("EHLO me\r\n"))
		if line, err := br.ReadString('\n'); err != nil || line != "EHLO me\r\n" {
			t.Fatalf("%q, %v", line, err)
		}
		c = b.must("mail.example:2500")
		br = bufio.NewReader(c)
		_, _ = br.ReadString('\n')
		_, _ = c.Write([]byte("GET / HTTP/1.1\r\nHost: neighbour.example\r\n\r\n"))
		if _, err := br.ReadByte(); !errors.Is(err, syscall.ECONNRESET) {
			t.Errorf("a request behind a banner: %v", err)
		}
		c = b.must("mail.example:2500")
		br = bufio.NewReader(c)
		_, _ = br.ReadString('\n')
		err := tls.Client(buffered{c, br}, &tls.Config{ServerName: "neighbour.example"}).HandshakeContext(t.Context())
		if !errors.Is(err, syscall.ECONNRESET) {
			t.Errorf("TLS to another behind a banner: %v", err)
		}
	})
	t.Run("a client that says nothing more", func(t *testing.T) {
		ln := r.host("203.0.113.3:1300", "day.example")
		go func() {
			for {
				c, err := ln.Accept()
				if err != nil {
					return
				}
				_, _ = io.Copy(io.Discard, c)
				_, _ = c.Write([]byte("monday"))
				c.Close()
			}
		}()
		c := b.must("day.example:1300")
		_ = c.(*net.TCPConn).CloseWrite()
		if got, err := io.ReadAll(c); err != nil || string(got) != "monday" {
			t.Errorf("%q, %v", got, err)
		}
	})
	t.Run("a reset is one", func(t *testing.T) {
		ln := r.host("203.0.113.4:1400", "rst.example")
		go func() {
			c, err := ln.Accept()
			if err != nil {
				return
			}
			_, _ = c.Read(make([]byte, 1))
			_ = c.(*net.TCPConn).SetLinger(0)
			c.Close()
		}()
		c := b.must("rst.example:1400")
		_, _ = c.Write([]byte{0})
		if _, err := c.Read(make([]byte, 1)); !errors.Is(err, syscall.ECONNRESET) {
			t.Error(err)
		}
	})
	t.Run("a closed port is a reset", func(t *testing.T) {
		if err := b.fails("echo.example:7001"); !errors.Is(err, syscall.ECONNRESET) {
			t.Error(err)
		}
		b.events(func(e *sandseav1.NetworkEvent) bool {
			return e.GetPort() == 7001 && !e.GetDenied() && strings.Contains(e.GetError(), "connection refused")
		})
	})
}

// buffered reads through a buffer.
type buffered struct {
	net.Conn
	r io.Reader
}

func (b buffered) Read(p []byte) (int, error) { return b.r.Read(p) }

func TestNamesThatResolveToPlatformAddressesLeadNowhere(t *testing.T) {
	r := newRig(t, "[[grants]]\nproject = \"other\"\ncidrs = [\"10.9.0.0/24\"]\n")
	reached := make(chan string, 16)
	for _, at := range []string{"10.9.0.1:80", "127.0.0.1:80", "203.0.113.1:80"} {
		r.web(r.host(at), http.HandlerFunc(func(http.ResponseWriter, *http.Request) { reached <- at }))
	}
	r.zone.set("private.example", "10.9.0.1")
	r.zone.set("loop.example", "127.0.0.1")
	r.zone.set("mapped.example", "::ffff:127.0.0.1")
	r.zone.set("meta.example", "169.254.169.254")
	r.zone.set("alias.example", "cname:private.other")
	r.zone.set("private.other", "10.9.0.1")
	r.zone.set("mixed.example", "10.9.0.1", "203.0.113.1")
	r.zone.set("sandbox.example", "100.64.2.1")
	r.zone.set("gate.example", "100.64.0.1")
	r.zone.set("name.example", "198.18.1.1")
	b := r.sandbox(allow(domain("*.example")))
	for _, name := range []string{"private", "loop", "mapped", "meta", "alias", "sandbox", "gate", "name"} {
		if status, body := get(t, b.client(), "http://"+name+".example/"); status != 403 || !strings.Contains(body, "rule platform") {
			t.Errorf("%s: %d %q", name, status, body)
		}
	}
	if len(reached) != 0 {
		t.Fatalf("reached %s", <-reached)
	}
	b.denied(policy.RulePlatform)
	// Of several addresses the allowed one is taken.
	if status, _ := get(t, b.client(), "http://mixed.example/"); status != 200 || <-reached != "203.0.113.1:80" {
		t.Errorf("mixed: %d", status)
	}
	if status, body := get(t, b.client(), "http://absent.example/"); status != 502 || !strings.Contains(body, "no such name") {
		t.Errorf("absent: %d %q", status, body)
	}
}

func TestAddressesThatRulesAllow(t *testing.T) {
	r := newRig(t, "")
	r.secure(r.host("203.0.113.1:443", "a.example", "bad.example"), hello("one"), "a.example", "bad.example")
	r.web(r.host("203.0.113.1:80"), hello("one"))
	r.echo(r.host("203.0.113.1:7000"))
	b := r.sandbox(allow(
		policy.Rule{Domain: "bad.example", Reject: true}, policy.Rule{Domain: "*.bad.example", Reject: true}, policy.Rule{CIDR: "203.0.113.1/32"},
	))

	c := b.must("203.0.113.1:7000")
	_, _ = c.Write([]byte{0})
	if _, err := io.ReadFull(c, make([]byte, 1)); err != nil {
		t.Error(err)
	}
	if status, body := get(t, b.client(), "http://203.0.113.1/"); status != 200 || body != "one: 203.0.113.1 /" {
		t.Errorf("%d %q", status, body)
	}
	for name, want := range map[string]error{
		"a.example": nil, "bad.example": syscall.ECONNRESET, "x.bad.example": syscall.ECONNRESET,
		// No rule can name it, and a server of "*.bad.example" answers to it.
		"x-.bad.example": syscall.ECONNRESET,
	} {
		c := b.must("203.0.113.1:443")
		if err := tls.Client(c, &tls.Config{ServerName: name, InsecureSkipVerify: true}).HandshakeContext(t.Context()); !errors.Is(err, want) {
			t.Errorf("server name %s: %v", name, err)
		}
	}
	b.denied("reject domain bad.example")
	for host, want := range map[string]int{"a.example": 200, "x-.bad.example": 403, "203.0.113.1:80": 200} {
		req, err := http.NewRequest(http.MethodGet, "http://203.0.113.1/", nil)
		if err != nil {
			t.Fatal(err)
		}
		req.Host = host
		if resp, err := b.client().Do(req); err != nil || resp.StatusCode != want {
			t.Errorf("host %s: %v, %v", host, resp, err)
		}
	}
	for _, at := range []string{"203.0.113.2:443", "100.64.2.2:80", "10.9.0.1:80"} {
		if c, err := b.connect(at); err == nil {
			t.Errorf("%s answers", at)
			c.Close()
		}
	}
}

func TestAnotherPolicyCutsWhatItDoesNotAllow(t *testing.T) {
	r := newRig(t, "")
	r.echo(r.host("203.0.113.1:7000", "a.example", "b.example"))
	rule := func(name string) policy.Rule { return policy.Rule{Domain: name, Ports: ports(7000)} }
	p := policy.Policy{Phases: []policy.Phase{
		{Name: "build", Rules: []policy.Rule{rule("a.example"), rule("b.example"), rule("hold.example")}},
		{Name: "agent", Rules: []policy.Rule{rule("b.example")}},
	}}
	b := r.sandbox(p)
	open := func(name string) net.Conn {
		c := b.must(name + ":7000")
		_, _ = c.Write([]byte{0})
		if _, err := io.ReadFull(c, make([]byte, 1)); err != nil {
			t.Fatal(err)
		}
		return c
	}
	a, stays := open("a.example"), open("b.example")
	hold := r.host("203.0.113.2:7000", "hold.example")
	held := make(chan net.Conn, 1)
	go func() {
		if c, err := hold.Accept(); err == nil {
			_, _ = c.Read(make([]byte, 1))
			held <- c
		}
	}()
	counters, err := r.edge.Counters(t.Context(), []string{b.desc.ID, "unknown"})
	if err != nil || len(counters) != 1 || counters[b.desc.ID].Flows != 2 || counters[b.desc.ID].Sent != 2 {
		t.Errorf("counters %+v, %v", counters, err)
	}
	// One that has said all and waits, to a host that says nothing.
	waits := b.must("hold.example:7000")
	_, _ = waits.Write([]byte{0})
	_ = waits.(*net.TCPConn).CloseWrite()
	far := <-held
	defer far.Close()
	if _, err := far.Read(make([]byte, 1)); !errors.Is(err, io.EOF) {
		t.Error(err)
	}
	b.put(p, "agent")
	if _, err := far.Write([]byte{0}); err == nil {
		if _, err = far.Read(make([]byte, 1)); err == nil {
			t.Error("the far side hears nothing of the cut")
		}
	}
	b.events(func(e *sandseav1.NetworkEvent) bool {
		return e.GetName() == "hold.example" && e.GetDenied() && e.GetSentBytes() == 1
	})
	// Put has returned: there is nothing to wait for.
	if _, err := a.Read(make([]byte, 1)); !errors.Is(err, syscall.ECONNRESET) {
		t.Errorf("a.example: %v", err)
	}
	_, _ = stays.Write([]byte{7})
	if _, err := io.ReadFull(stays, make([]byte, 1)); err != nil {
		t.Errorf("b.example: %v", err)
	}
	if _, err := b.resolve("a.example"); !errors.Is(err, errRefused) {
		t.Errorf("a.example resolves: %v", err)
	}
	b.denied(policy.RuleDefault)
	b.events(func(e *sandseav1.NetworkEvent) bool {
		return e.GetKind() == sandseav1.NetworkEventKind_NETWORK_EVENT_KIND_POLICY && e.GetPhase() == "agent"
	})
	counted, err := r.edge.Drop(t.Context(), b.desc.ID)
	if err != nil || counted.Flows != 0 {
		t.Fatal(counted, err)
	}
	flows := filepath.Join(r.dir, "flows")
	events, _, _, err := flowlog.Read(flows, b.desc.ID, 0, 1000)
	if err != nil || len(events) == 0 {
		t.Fatal(events, err)
	}
	// No rule denied what the sandbox's end has cut.
	last := events[len(events)-1]
	for _, e := range events {
		if e.GetName() == "b.example" && e.GetPort() == 7000 {
			last = e
		}
	}
	if last.GetName() != "b.example" || last.GetDenied() || last.GetError() != "the sandbox has ended, or Aether" {
		t.Errorf("the last event is %v", last)
	}
	if err := flowlog.Remove(flows, b.desc.ID); err != nil {
		t.Fatal(err)
	}
	if _, err := stays.Read(make([]byte, 1)); !errors.Is(err, syscall.ECONNRESET) {
		t.Errorf("after the end: %v", err)
	}
	time.Sleep(100 * time.Millisecond)
	if _, err := os.Stat(filepath.Join(flows, b.desc.ID)); !errors.Is(err, fs.ErrNotExist) {
		t.Errorf("the log is there again: %v", err)
	}
}

func TestDenialsOfTheWallsAreTold(t *testing.T) {
	r := newRig(t, "")
	b := r.sandbox(allow(domain("a.example")))
	err := r.edge.Denials(t.Context(), []wire.Denial{
		{Addr: b.desc.Addr, To: netip.MustParseAddrPort("10.9.0.1:80"), Protocol: policy.TCP, Count: 2}, {Addr: b.desc.Addr, Count: 7},
	})
	if err != nil {
		t.Fatal(err)
	}
	for count, want := range map[int64]string{2: "10.9.0.1 is a private address", 7: "too many different addresses at once: they are not kept"} {
		e := b.events(func(e *sandseav1.NetworkEvent) bool { return e.GetDenied() && e.GetCount() == count })
		if e.GetError() != want {
			t.Errorf("%v, want %q", e, want)
		}
	}
}

func TestLimits(t *testing.T) {
	r := newRig(t, "[limits]\nproject_flows = 5\n")
	r.echo(r.host("203.0.113.1:7000", "a.example"))
	limited := func(l policy.Limits) policy.Policy {
		p := allow(policy.Rule{Domain: "a.example", Ports: ports(7000)})
		p.Limits = l
		return p
	}
	say := func(c net.Conn, n int) error {
		go func() { _, _ = c.Write(make([]byte, n)) }()
		_, err := io.ReadFull(c, make([]byte, n))
		return err
	}
	t.Run("flows", func(t *testing.T) {
		b := r.sandbox(limited(policy.Limits{Flows: 2}))
		one, two := b.must("a.example:7000"), b.must("a.example:7000")
		if err := errors.Join(say(one, 1), say(two, 1)); err != nil {
			t.Fatal(err)
		}
		if err := b.fails("a.example:7000"); !errors.Is(err, syscall.ECONNRESET) {
			t.Errorf("the third: %v", err)
		}
		b.denied("limit flows")
		one.Close()
		b.events(func(e *sandseav1.NetworkEvent) bool { return e.GetPort() == 7000 && !e.GetDenied() })
		if err := say(b.must("a.example:7000"), 1); err != nil {
			t.Errorf("after one has ended: %v", err)
		}
		if _, err := r.edge.Drop(t.Context(), b.desc.ID); err != nil {
			t.Fatal(err)
		}
	})
	t.Run("bytes", func(t *testing.T) {
		b := r.sandbox(limited(policy.Limits{Bytes: 1 << 20}))
		c := b.must("a.example:7000")
		if err := say(c, 400<<10); err != nil {
			t.Fatal(err)
		}
		if err := say(c, 4<<20); err == nil {
			t.Error("goes on")
		}
		b.denied("limit bytes")
		if err := b.fails("a.example:7000"); !errors.Is(err, syscall.ECONNRESET) {
			t.Errorf("another: %v", err)
		}
		n, err := r.edge.Drop(t.Context(), b.desc.ID)
		if err != nil || n.Sent+n.Received > 2<<20 {
			t.Errorf("%+v, %v", n, err)
		}
	})
	t.Run("flows of a project", func(t *testing.T) {
		x, y := r.sandbox(limited(policy.Limits{})), r.sandbox(limited(policy.Limits{}))
		for _, b := range []*box{x, y, x, y, x} {
			if err := say(b.must("a.example:7000"), 1); err != nil {
				t.Fatal(err)
			}
		}
		if err := y.fails("a.example:7000"); !errors.Is(err, syscall.ECONNRESET) {
			t.Errorf("the sixth: %v", err)
		}
		y.denied("limit project_flows")
	})
	t.Run("questions and names", func(t *testing.T) {
		p := allow(domain("*.example"))
		p.Limits.DNSPerSecond = 1000
		b := r.sandbox(p)
		refused := 0
		for i := range 400 {
			name := fmt.Sprintf("%s%d.example", strings.Repeat("x", 50), i)
			if _, err := b.resolve(name); errors.Is(err, errRefused) {
				refused++
			} else if err != nil {
				t.Fatal(err)
			}
		}
		if refused < 50 || refused > 200 {
			t.Errorf("%d of 400 long names were refused", refused)
		}
		b.denied("limit names")
		p.Limits.DNSPerSecond = 1
		b.put(p, "agent")
		for range 5 {
			_, _ = b.resolve("a.example")
		}
		b.denied("limit dns_per_second")
	})
}

func TestALargeTransferIsWhole(t *testing.T) {
	r := newRig(t, "")
	const size = 64 << 20
	ln := r.host("203.0.113.1:7000", "a.example")
	go func() {
		c, err := ln.Accept()
		if err != nil {
			return
		}
		defer c.Close()
		_, _ = io.Copy(c, io.TeeReader(c, io.Discard))
	}()
	b := r.sandbox(allow(policy.Rule{Domain: "a.example", Ports: ports(7000)}))
	c := b.must("a.example:7000")
	_ = c.SetDeadline(time.Now().Add(2 * time.Minute))
	go func() {
		_, _ = c.Write([]byte{0})
		_, _ = io.Copy(c, io.LimitReader(&pattern{at: 1}, size-1))
		_ = c.(*net.TCPConn).CloseWrite()
	}()
	got, want := &pattern{}, make([]byte, 1<<20)
	buf := make([]byte, 1<<20)
	var total int
	for {
		n, err := c.Read(buf)
		_, _ = got.Read(want[:n])
		if string(buf[:n]) != string(want[:n]) {
			t.Fatalf("wrong bytes behind %d", total)
		}
		total += n
		if err != nil {
			break
		}
	}
	if total != size {
		t.Errorf("%d of %d bytes", total, size)
	}
	e := b.events(func(e *sandseav1.NetworkEvent) bool { return e.GetPort() == 7000 })
	if e.GetSentBytes() != size || e.GetReceivedBytes() != size || e.GetAddress() != "203.0.113.1" || e.GetProtocol() != "tcp" {
		t.Errorf("event %v", e)
	}
}

// pattern is bytes that tell where they stand.
type pattern struct{ at int }

func (p *pattern) Read(b []byte) (int, error) {
	for i := range b {
		b[i] = byte(p.at * p.at >> 3)
		p.at++
	}
	return len(b), nil
}

// TestWhatComesSlowlyCounts has a host send in bulk first and little later: it must not look idle.
func TestWhatComesSlowlyCounts(t *testing.T) {
	r := newRig(t, "")
	ln := r.host("203.0.113.1:7000", "a.example")
	const bulk = 4 << 20
	more := make(chan struct{})
	go func() {
		c, err := ln.Accept()
		if err != nil {
			return
		}
		defer c.Close()
		_, _ = io.ReadFull(c, make([]byte, 1))
		_, _ = c.Write(make([]byte, bulk))
		<-more
		_, _ = c.Write([]byte("more"))
		_, _ = io.Copy(io.Discard, c)
	}()
	b := r.sandbox(allow(policy.Rule{Domain: "a.example", Ports: ports(7000)}))
	c := b.must("a.example:7000")
	_, _ = c.Write([]byte{0})
	if _, err := io.ReadFull(c, make([]byte, bulk)); err != nil {
		t.Fatal(err)
	}
	close(more)
	if _, err := io.ReadFull(c, make([]byte, 4)); err != nil {
		t.Fatal(err)
	}
	wait.Until(t, 10*time.Second, func() bool {
		n, err := r.edge.Counters(t.Context(), []string{b.desc.ID})
		if err != nil {
			t.Fatal(err)
		}
		return n[b.desc.ID].Received == bulk+4
	}, "all bytes are counted while the connection is open")
}
