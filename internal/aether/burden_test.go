package aether

import (
	"bufio"
	"bytes"
	"context"
	"crypto/tls"
	"errors"
	"fmt"
	"io"
	"net"
	"net/http"
	"runtime"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"

	"golang.org/x/net/http2"
	"golang.org/x/net/http2/hpack"

	"github.com/sandsea/sandsea/internal/aether/mirror"
	"github.com/sandsea/sandsea/internal/aether/wire"
	"github.com/sandsea/sandsea/internal/testkit/wait"
)

// burden is how much more memory of ours comes into use by what do does, at most, within a second.
func burden(most int64, do func()) int64 {
	held := func() int64 {
		runtime.GC()
		var m runtime.MemStats
		runtime.ReadMemStats(&m)
		return int64(m.HeapInuse)
	}
	before := held()
	do()
	worst := int64(0)
	wait.For(time.Second, func() bool {
		worst = max(worst, held()-before)
		return worst > most
	})
	return worst
}

// unfinished begins a request with so much header.
func unfinished(c net.Conn, size int) {
	_, _ = io.WriteString(c, "GET / HTTP/1.1\r\nHost: a.example\r\n")
	_ = c.SetWriteDeadline(time.Now().Add(100 * time.Millisecond)) // who is refused is not read any more
	for i := 0; size > 0; i++ {
		n := min(size, 16<<10)
		if _, err := fmt.Fprintf(c, "X-%d: %s\r\n", i, strings.Repeat("x", n)); err != nil {
			return
		}
		size -= n
	}
}

// together sends requests over one connection of HTTP/2, each with so much header.
func together(c net.Conn, requests, size int) {
	f := http2.NewFramer(c, c)
	_, _ = io.WriteString(c, http2.ClientPreface)
	_ = f.WriteSettings()
	go func() { _, _ = io.Copy(io.Discard, c) }()
	var head bytes.Buffer
	e := hpack.NewEncoder(&head)
	e.SetMaxDynamicTableSizeLimit(0)
	for _, h := range []hpack.HeaderField{
		{Name: ":method", Value: "GET"}, {Name: ":scheme", Value: "http"}, {Name: ":authority", Value: "100.64.0.1"}, {Name: ":path", Value: "/pypi/drip"},
	} {
		_ = e.WriteField(h)
	}
	for i := 0; size > 0; i++ {
		n := min(size, 64<<10)
		_ = e.WriteField(hpack.HeaderField{Name: fmt.Sprintf("x-%d", i), Value: strings.Repeat("~", n), Sensitive: true})
		size -= n
	}
	for s := range uint32(requests) {
		_ = c.SetWriteDeadline(time.Now().Add(time.Second))
		rest := head.Bytes()
		first := rest[:min(len(rest), 16<<10)]
		rest = rest[len(first):]
		if f.WriteHeaders(http2.HeadersFrameParam{StreamID: 2*s + 1, BlockFragment: first, EndStream: true, EndHeaders: len(rest) == 0}) != nil {
			return
		}
		for len(rest) > 0 {
			n := min(len(rest), 16<<10)
			if f.WriteContinuation(2*s+1, n == len(rest), rest[:n]) != nil {
				return
			}
			rest = rest[n:]
		}
	}
}

// A sandbox that sends headers and never ends them, or asks for much at once, must not have it all held for it.
func TestHeadersAreNotHeldForEverybody(t *testing.T) {
	r := newRig(t, "")
	r.p.services.Use([]mirror.Service{drip{"pypi"}})
	p := allow(domain("unrelated.example"))
	p.Services = map[string]bool{"pypi": true}
	for _, c := range []struct {
		name  string
		most  int64
		ports []uint16
		conns int
		do    func(c net.Conn)
	}{
		{
			"unfinished headers that are too long", 8 << 20,
			[]uint16{wire.PortProxy, wire.PortMirrors},
			20,
			func(c net.Conn) { unfinished(c, 960<<10) },
		},
		{
			"unfinished headers", 24 << 20,
			[]uint16{wire.PortProxy, wire.PortMirrors},
			200,
			func(c net.Conn) { unfinished(c, 60<<10) },
		},
		{
			"requests at once whose headers are too long", 16 << 20,
			[]uint16{wire.PortMirrors},
			2,
			func(c net.Conn) { together(c, 250, 896<<10) },
		},
		{
			"requests at once", 48 << 20,
			[]uint16{wire.PortMirrors},
			40,
			func(c net.Conn) { together(c, 32, 60<<10) },
		},
	} {
		t.Run(c.name, func(t *testing.T) {
			b := r.sandbox(p)
			var open []net.Conn
			got := burden(c.most, func() {
				for _, port := range c.ports {
					for range c.conns {
						conn := b.must(at(port))
						open = append(open, conn)
						c.do(conn)
					}
				}
			})
			t.Logf("%d MiB", got>>20)
			if got > c.most {
				t.Errorf("%d connections to %d doors hold %d MiB", c.conns, len(c.ports), got>>20)
			}
			for _, conn := range open {
				conn.Close()
			}
			if _, err := r.edge.Drop(t.Context(), b.desc.ID); err != nil {
				t.Fatal(err)
			}
			wait.Until(t, 10*time.Second, func() bool { return r.p.roster.Totals().Flows == 0 }, "the end of all flows")
		})
	}
}

// A sandbox has so many requests served at once; others wait, and those beyond them have no answer.
func TestRequestsHaveTurns(t *testing.T) {
	r := newRig(t, "")
	r.p.services.Use([]mirror.Service{drip{"pypi"}})
	p := allow(domain("unrelated.example"))
	p.Services = map[string]bool{"pypi": true}
	b := r.sandbox(p)
	ask := func() (net.Conn, *bufio.Reader) {
		c := b.must(at(wire.PortMirrors))
		_, _ = io.WriteString(c, "GET /pypi/drip HTTP/1.1\r\nHost: 100.64.0.1\r\n\r\n")
		return c, bufio.NewReader(c)
	}
	var served []net.Conn
	for range 64 {
		c, br := ask()
		if _, err := http.ReadResponse(br, nil); err != nil {
			t.Fatal(err)
		}
		served = append(served, c)
	}
	waiting, its := ask()
	for range 63 {
		ask()
	}
	box, _ := r.p.roster.ByID(b.desc.ID)
	wait.Until(t, 10*time.Second, func() bool { return box.Counters().Flows == 128 }, "all to be there")
	// Those that wait may not all have said so yet, so that what comes now may wait, too.
	wait.Until(t, 10*time.Second, func() bool {
		c, br := ask()
		_ = c.SetReadDeadline(time.Now().Add(100 * time.Millisecond))
		_, err := br.ReadByte()
		return errors.Is(err, io.EOF)
	}, "one that is one too many")
	b.denied("limit requests")
	for _, c := range served {
		c.Close()
	}
	if resp, err := http.ReadResponse(its, nil); err != nil || resp.StatusCode != http.StatusOK {
		t.Errorf("the first that waited: %v, %v", resp, err)
	}
	waiting.Close()
}

// Connections that say nothing count for the project.
func TestIdleConnectionsCount(t *testing.T) {
	r := newRig(t, "[limits]\nproject_flows = 6\n")
	b := r.sandbox(allow(domain("a.example")))
	for _, port := range []uint16{wire.PortDNS, wire.PortSOCKS, wire.PortProxy, wire.PortDNS, wire.PortSOCKS, wire.PortProxy} {
		b.must(at(port))
	}
	// Each door counts for itself, so that one of the six may come after the seventh. One more is one too many in any case.
	another := r.sandbox(allow(domain("a.example")))
	wait.Until(t, 10*time.Second, func() bool {
		c, err := another.connect(at(wire.PortProxy))
		if err == nil {
			t.Cleanup(func() { c.Close() })
			_ = c.SetReadDeadline(time.Now().Add(200 * time.Millisecond))
			_, err = c.Read(make([]byte, 1))
		}
		return errors.Is(err, syscall.ECONNRESET)
	}, "one that is one too many")
	another.denied("limit project_flows")
}

// Names below an allowed wildcard carry no more by a proxy than by the resolver.
func TestNamesCarryLittleThroughProxies(t *testing.T) {
	for _, c := range []struct {
		name string
		port uint16
		say  func(name string) string
	}{
		{"SOCKS", wire.PortSOCKS, func(name string) string {
			return "\x05\x01\x00\x05\x01\x00\x03" + string(rune(len(name))) + name + "\x00\x50"
		}},
		{"CONNECT", wire.PortProxy, func(name string) string {
			return "CONNECT " + name + ":80 HTTP/1.1\r\nHost: " + name + "\r\n\r\n"
		}},
		{"a request", wire.PortProxy, func(name string) string {
			return "GET http://" + name + "/ HTTP/1.1\r\nHost: " + name + "\r\nConnection: close\r\n\r\n"
		}},
	} {
		t.Run(c.name, func(t *testing.T) {
			r := newRig(t, "")
			b := r.sandbox(allow(domain("*.wild.example")))
			began := time.Now()
			for i := range 300 {
				conn := b.must(at(c.port))
				_, _ = io.WriteString(conn, c.say(fmt.Sprintf("%050d.%050d.wild.example", i, i)))
				_ = conn.SetReadDeadline(time.Now().Add(time.Second))
				_, _ = io.ReadAll(conn)
				conn.Close()
			}
			said := 0
			for _, q := range r.zone.questions() {
				said += len(q)
			}
			// roster: nameBurst, and nameRate a second.
			if most := 16<<10 + int(125*time.Since(began).Seconds()); said > 2*most || said == 0 { // A and AAAA
				t.Errorf("%d bytes of names were asked, at most %d", said, 2*most)
			}
			b.denied("limit names")
			// One that was asked for goes on.
			if status, body := get(t, b.throughProxy(), fmt.Sprintf("http://%050d.%050d.wild.example/", 0, 0)); status != http.StatusBadGateway {
				t.Errorf("%d %q", status, body)
			}
		})
	}
}

// TestWhoLeavesASilentHostLeavesNothing has clients go while the host says nothing: what was opened to it ends.
func TestWhoLeavesASilentHostLeavesNothing(t *testing.T) {
	r := newRig(t, "")
	listen := make(chan struct{}) // closed when the hosts listen again
	var reached, open sync.WaitGroup
	// serve takes one request of each connection, with as much of its body as comes along, and says nothing.
	serve := func(ln net.Listener) {
		for {
			c, err := ln.Accept()
			if err != nil {
				return
			}
			open.Go(func() {
				defer c.Close()
				br := bufio.NewReader(c)
				req, err := http.ReadRequest(br)
				if err != nil {
					t.Error(err)
					return
				}
				if req.Header.Get("Upgrade") != "" {
					_, _ = io.WriteString(c, "HTTP/1.1 101 Switching Protocols\r\nConnection: Upgrade\r\nUpgrade: x\r\n\r\n")
				}
				reached.Done()
				<-listen
				_, _ = io.Copy(io.Discard, br)
			})
		}
	}
	plain := r.host("203.0.113.1:80", "a.example")
	secure := tls.NewListener(r.host("203.0.113.1:443"), &tls.Config{Certificates: []tls.Certificate{r.certificate("a.example")}})
	go serve(plain)
	go serve(secure)
	p := allow(domain("a.example"))
	p.InspectTLS = true
	b := r.sandbox(p)
	pem, err := r.edge.CA(t.Context(), b.desc.ID)
	if err != nil {
		t.Fatal(err)
	}
	requests := map[string]string{
		"a question": "GET %s HTTP/1.1\r\nHost: a.example\r\n\r\n",
		"two":        "GET %s HTTP/1.1\r\nHost: a.example\r\n\r\nGET / HTTP/1.1\r\nHost: a.example\r\n\r\n",
		"an upgrade": "GET %s HTTP/1.1\r\nHost: a.example\r\nConnection: Upgrade\r\nUpgrade: x\r\n\r\n",
		"an upload":  "POST %s HTTP/1.1\r\nHost: a.example\r\nContent-Length: 1000000000\r\n\r\n",
	}
	ways := map[string]struct {
		url  string
		dial func() net.Conn
	}{
		"plain":   {"/", func() net.Conn { return b.must("a.example:80") }},
		"proxied": {"http://a.example/", func() net.Conn { return b.must(at(wire.PortProxy)) }},
		"tunnel":  {"/", func() net.Conn { return b.tunnel(t, "a.example:80", http.StatusOK) }},
		"inspected": {"/", func() net.Conn {
			return tls.Client(b.must("a.example:443"), &tls.Config{ServerName: "a.example", RootCAs: certPool(t, pem), NextProtos: []string{"http/1.1"}})
		}},
	}
	var clients []*net.TCPConn
	for _, way := range ways {
		for kind, request := range requests {
			reached.Add(1)
			c := way.dial()
			tcp, ok := c.(*net.TCPConn)
			if over, is := c.(*tls.Conn); is {
				tcp, ok = over.NetConn().(*net.TCPConn)
			}
			if !ok {
				t.Fatalf("%T", c)
			}
			clients = append(clients, tcp)
			if _, err := fmt.Fprintf(c, request, way.url); err != nil {
				t.Fatal(err)
			}
			switch kind {
			case "an upgrade":
				if resp, err := http.ReadResponse(bufio.NewReader(c), nil); err != nil || resp.StatusCode != http.StatusSwitchingProtocols {
					t.Fatal(resp, err)
				}
			case "an upload":
				// Until nobody takes any more. The end would wait behind what was not taken; so this one breaks off.
				_ = tcp.SetLinger(0)
				_ = c.SetWriteDeadline(time.Now().Add(300 * time.Millisecond))
				for {
					if _, err := c.Write(make([]byte, 64<<10)); err != nil {
						break
					}
				}
			}
		}
	}
	// By HTTP/2, the client ends the request alone.
	reached.Add(1)
	h2 := &http.Transport{
		DialContext:     func(_ context.Context, _, addr string) (net.Conn, error) { return b.connect(addr) },
		TLSClientConfig: &tls.Config{RootCAs: certPool(t, pem)}, ForceAttemptHTTP2: true,
	}
	ctx, cancel := context.WithCancelCause(t.Context())
	req, err := http.NewRequestWithContext(ctx, http.MethodGet, "https://a.example/", http.NoBody)
	if err != nil {
		t.Fatal(err)
	}
	done := make(chan error, 1)
	go func() {
		resp, err := h2.RoundTrip(req)
		if err == nil {
			err = resp.Body.Close()
		}
		done <- err
	}()
	reached.Wait()
	cancel(errors.New("enough"))
	if err := <-done; err == nil {
		t.Error("a silent host answers")
	}
	for _, c := range clients {
		c.Close() // without a word of TLS
	}
	wait.Until(t, 30*time.Second, func() bool {
		h2.CloseIdleConnections()
		return r.p.roster.Totals().Flows == 0
	}, "the end of all flows")
	close(listen)
	ended := make(chan struct{})
	go func() {
		open.Wait()
		close(ended)
	}()
	select {
	case <-ended:
	case <-time.After(10 * time.Second):
		t.Error("a connection to the host stays open")
	}
}
