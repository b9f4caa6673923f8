package aether

import (
	"bufio"
	"bytes"
	"crypto/tls"
	"encoding/binary"
	"errors"
	"fmt"
	"io"
	"net"
	"net/http"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"

	"golang.org/x/net/http2"
	"golang.org/x/net/http2/hpack"

	"github.com/sandsea/sandsea/internal/aether/flowlog"
	"github.com/sandsea/sandsea/internal/aether/mirror"
	"github.com/sandsea/sandsea/internal/aether/upstream"
	"github.com/sandsea/sandsea/internal/aether/wire"
	"github.com/sandsea/sandsea/internal/policy"
	"github.com/sandsea/sandsea/internal/testkit/wait"
)

// This file is what a sandbox does that wants more than its policy gives. What it wants stands in what it sends as
// "bypass"; the far side keeps all that it is sent.

// wiretap is a host of the world that reads, and answers nothing.
type wiretap struct {
	mu  sync.Mutex
	got bytes.Buffer // guarded by mu
}

func (r *rig) wiretap(ln net.Listener) *wiretap {
	w := &wiretap{}
	var open sync.WaitGroup
	open.Go(func() {
		for {
			c, err := ln.Accept()
			if err != nil {
				return
			}
			open.Go(func() {
				defer c.Close()
				buf := make([]byte, 4096)
				for {
					n, err := c.Read(buf)
					w.mu.Lock()
					w.got.Write(buf[:n])
					w.mu.Unlock()
					if err != nil {
						return
					}
				}
			})
		}
	})
	r.t.Cleanup(func() {
		ln.Close()
		if err := r.stop(); err != nil { // nothing of Aether's is left open then
			r.t.Error(err)
		}
		open.Wait()
	})
	return w
}

func (w *wiretap) heard() string {
	w.mu.Lock()
	defer w.mu.Unlock()
	return w.got.String()
}

// TestNoWordForANeighbourPasses says to the address of an allowed name what some HTTP or TLS server would take for a
// request to its neighbour there.
func TestNoWordForANeighbourPasses(t *testing.T) {
	r := newRig(t, "")
	taps := map[uint16]*wiretap{}
	for _, port := range []uint16{80, 443, 8080} {
		taps[port] = r.wiretap(r.host(fmt.Sprintf("203.0.113.1:%d", port), "allowed.example", "neighbour.example"))
	}
	b := r.sandbox(allow(policy.Rule{Domain: "allowed.example", Ports: []policy.Ports{{First: 1, Last: 65535}}}))
	// Without this, silence would say nothing.
	for port, word := range map[uint16]string{80: "GET /control HTTP/1.1\r\nHost: allowed.example\r\n\r\n", 443: "control\n", 8080: "control\n"} {
		_, _ = io.WriteString(b.must(fmt.Sprintf("allowed.example:%d", port)), word)
		wait.Until(t, 10*time.Second, func() bool { return strings.Contains(taps[port].heard(), "control") }, "what is allowed")
	}
	for name, words := range map[string][]string{
		"HTTP/0.9 by absolute form":           {"GET http://neighbour.example/bypass\r\n"},
		"HTTP/0.9 by a path":                  {"GET /bypass\r\n"},
		"HTTP/0.9 in pieces":                  {"GET http://neigh", "bour.example/bypass", "\r\n"},
		"line ends of carriage returns":       {"GET http://neighbour.example/bypass HTTP/1.1\rHost: neighbour.example\r\r"},
		"a URL in a URL":                      {"GET x:http://neighbour.example/bypass HTTP/1.1\r\nHost: allowed.example\r\n\r\n"},
		"a long method":                       {strings.Repeat("X", 33) + " / HTTP/1.1\r\nHost: allowed.example\r\n\r\nGET /bypass HTTP/1.1\r\nHost: neighbour.example\r\n\r\n"},
		"a very long method":                  {strings.Repeat("X", 20<<10) + " / HTTP/1.1\r\nHost: allowed.example\r\n\r\nGET /bypass HTTP/1.1\r\nHost: neighbour.example\r\n\r\n"},
		"an empty line first":                 {"\r\n\r\nGET /bypass HTTP/1.1\r\nHost: neighbour.example\r\n\r\n"},
		"white space first":                   {" \t GET /bypass HTTP/1.1\r\nHost: neighbour.example\r\n\r\n"},
		"a tab between":                       {"GET\t/bypass\tHTTP/1.1\r\nHost: neighbour.example\r\n\r\n"},
		"small letters":                       {"get /bypass http/1.1\r\nhost: neighbour.example\r\n\r\n"},
		"a version of the future":             {"GET /bypass HTTP/9.9\r\nHost: neighbour.example\r\n\r\n"},
		"a Host with a space before it":       {"GET /x HTTP/1.1\r\n Host: allowed.example\r\nHost: neighbour.example\r\nX: bypass\r\n\r\n"},
		"a Host with a space behind its name": {"GET /x HTTP/1.1\r\nHost : neighbour.example\r\nHost: allowed.example\r\nX: bypass\r\n\r\n"},
		"a Host on two lines":                 {"GET /x HTTP/1.1\r\nHost: allowed.example\r\n neighbour.example\r\nX: bypass\r\n\r\n"},
		"a Host with user information":        {"GET /bypass HTTP/1.1\r\nHost: allowed.example@neighbour.example\r\n\r\n"},
		"a Host list":                         {"GET /bypass HTTP/1.1\r\nHost: allowed.example, neighbour.example\r\n\r\n"},
		"a NUL in the Host":                   {"GET /bypass HTTP/1.1\r\nHost: allowed.example\x00.neighbour.example\r\n\r\n"},
		"a carriage return in a header":       {"GET /x HTTP/1.1\r\nHost: allowed.example\r\nX: 1\rHost: neighbour.example\r\nY: bypass\r\n\r\n"},
		"a request behind chunks":             {"POST / HTTP/1.1\r\nHost: allowed.example\r\nTransfer-Encoding: chunked\r\nContent-Length: 6\r\n\r\n0\r\n\r\nGET /bypass HTTP/1.1\r\nHost: neighbour.example\r\n\r\n"},
		"chunked twice":                       {"POST / HTTP/1.1\r\nHost: allowed.example\r\nTransfer-Encoding: chunked\r\nTransfer-Encoding: identity\r\n\r\n0\r\n\r\nGET /bypass HTTP/1.1\r\nHost: neighbour.example\r\n\r\n"},
		"chunked with a tail":                 {"POST / HTTP/1.1\r\nHost: allowed.example\r\nTransfer-Encoding: \vchunked\r\nContent-Length: 3\r\n\r\nabcGET /bypass HTTP/1.1\r\nHost: neighbour.example\r\n\r\n"},
		"two lengths":                         {"POST / HTTP/1.1\r\nHost: allowed.example\r\nContent-Length: 0\r\nContent-Length: 60\r\n\r\nGET /bypass HTTP/1.1\r\nHost: neighbour.example\r\n\r\n"},
		"a length with a sign":                {"POST / HTTP/1.1\r\nHost: allowed.example\r\nContent-Length: +0\r\n\r\nGET /bypass HTTP/1.1\r\nHost: neighbour.example\r\n\r\n"},
		"a chunk of a bad size":               {"POST / HTTP/1.1\r\nHost: allowed.example\r\nTransfer-Encoding: chunked\r\n\r\n0_0\r\n\r\nGET /bypass HTTP/1.1\r\nHost: neighbour.example\r\n\r\n"},
		"upgrade to HTTP/2":                   {"GET / HTTP/1.1\r\nHost: allowed.example\r\nConnection: Upgrade, HTTP2-Settings\r\nUpgrade: h2c\r\nHTTP2-Settings: AAMAAABkAAQAAP__\r\n\r\n", "PRI * HTTP/2.0\r\n\r\nSM\r\n\r\nbypass"},
		"TLS of another name":                 {string(clientHello("neighbour.example")) + "bypass"},
		"TLS without a name":                  {"\x16\x03\x01\x00\x2d\x01\x00\x00\x29\x03\x03" + strings.Repeat("b", 32) + "\x00\x00\x02\x13\x01\x01\x00bypass"},
		"TLS in two records":                  {split2(clientHello("neighbour.example")) + "bypass"},
		"SSL 2":                               {"\x80\x2e\x01\x03\x01\x00\x15\x00\x00\x00\x10bypass"},
		"a name in TLS with a NUL":            {string(clientHello("allowed.example\x00.neighbour.example")) + "bypass"},
		"the name of a proxy's line":          {"PROXY TCP4 127.0.0.1 127.0.0.1 1 2\r\nGET /bypass HTTP/1.1\r\nHost: neighbour.example\r\n\r\n"},
		"a request behind one that is none":   {"X\r\nGET /bypass HTTP/1.1\r\nHost: neighbour.example\r\n\r\n"},
	} {
		for port, tap := range taps {
			if skip := map[string]bool{
				// What is neither TLS nor HTTP passes to the ports of other protocols.
				"the name of a proxy's line": true, "a request behind one that is none": true,
			}; port != 80 && skip[name] {
				continue
			}
			before := len(tap.heard())
			c, err := b.connect(fmt.Sprintf("allowed.example:%d", port))
			if err != nil {
				t.Fatal(err)
			}
			for i, w := range words {
				if i > 0 {
					time.Sleep(20 * time.Millisecond) // a piece by itself, most of the time
				}
				if _, err := io.WriteString(c, w); err != nil {
					break
				}
			}
			time.Sleep(50 * time.Millisecond) // a request whose client has gone is not sent on
			_ = c.(*net.TCPConn).CloseWrite()
			_ = c.SetReadDeadline(time.Now().Add(300 * time.Millisecond))
			_, _ = io.Copy(io.Discard, c)
			c.Close()
			if heard := tap.heard()[before:]; strings.Contains(heard, "bypass") || strings.Contains(heard, "neighbour") {
				t.Errorf("%s, port %d: the far side heard %.200q", name, port, heard)
			}
		}
	}
}

// split2 puts a ClientHello into two records.
func split2(b []byte) string {
	record := func(p []byte) string {
		return string(append([]byte{22, 3, 1, byte(len(p) >> 8), byte(len(p))}, p...))
	}
	return record(b[5:20]) + record(b[20:])
}

// TestARepositoryIsNotADoorToOthers asks for other places by the paths of one that is allowed.
func TestARepositoryIsNotADoorToOthers(t *testing.T) {
	r := newRig(t, "")
	var mu sync.Mutex
	var seen []string
	r.secure(r.host("203.0.113.1:443", "git.example"), http.HandlerFunc(func(_ http.ResponseWriter, req *http.Request) {
		mu.Lock()
		defer mu.Unlock()
		seen = append(seen, req.Method+" "+req.RequestURI)
	}), "git.example")
	p := allow(policy.Rule{Service: "git:git.example/org/repo"})
	p.InspectTLS = true
	b := r.sandbox(p)
	pem, err := r.edge.CA(t.Context(), b.desc.ID)
	if err != nil {
		t.Fatal(err)
	}
	for _, line := range []string{
		"GET /org/repo/objects/../../../other/repo/archive/main.zip", "GET /org/repo/objects/%2e%2e/%2e%2e/other/repo",
		"GET /org/repo/objects/..%2f..%2fother", "GET /org/repo/objects/..\\..\\other", "GET /org/repo/objects/%252e%252e/%252e%252e/other",
		"GET /org/repo/../../other/repo/HEAD", "GET /org/repo/../../other/repo/info/refs", "GET //other/org/repo/HEAD",
		"GET /org/repo%2f..%2f..%2fother/HEAD", "GET /org/repo;/../../other/HEAD", "GET /org/repo/objects/;/../../../other",
		"POST /org/repo/objects/ab", "GET /org/repo2/HEAD", "GET /org/repo/info/refs?service=git-receive-pack",
		"GET /org/repo/info/refs?service=git-upload-pack&service=git-receive-pack", "POST /org/repo/git-receive-pack",
		"GET /org/repo.git.git/../../x/HEAD", "GET /other/repo/HEAD?/org/repo/HEAD", "GET /other#/org/repo/HEAD", "PUT /org/repo/HEAD",
		"GET /other/repo/objects/../../../org/repo/HEAD",
		"GET https://git.example/other/HEAD", "GET https://git.example:443/org/repo/objects/../../../other",
	} {
		over := tls.Client(b.must("git.example:443"), &tls.Config{ServerName: "git.example", RootCAs: certPool(t, pem), NextProtos: []string{"http/1.1"}})
		fmt.Fprintf(over, "%s HTTP/1.1\r\nHost: git.example\r\nContent-Length: 0\r\nConnection: close\r\n\r\n", line)
		_, _ = io.Copy(io.Discard, over)
		over.Close()
	}
	mu.Lock()
	defer mu.Unlock()
	for _, line := range seen {
		t.Errorf("the far side was asked %q", line)
	}
}

// TestADeniedRepositoryHasNoOtherDoor asks for one by its aliases, where no entry names the host that is asked.
func TestADeniedRepositoryHasNoOtherDoor(t *testing.T) {
	r := newRig(t, "")
	names := []string{"codeload.github.com", "api.github.com", "git.example"}
	r.secure(r.host("203.0.113.1:443", names...), hello("git"), names...)
	for _, port := range []string{"80", "8080"} {
		r.web(r.host("203.0.113.1:"+port), hello("git"))
	}
	for _, want := range []struct{ deny, hidden, there string }{
		{"git:github.com/org/repo", "https://codeload.github.com/org/repo/tar.gz/main", "https://codeload.github.com/org/other/tar.gz/main"},
		{"git:github.com/org/repo", "https://api.github.com/repos/org/repo/tarball", "https://api.github.com/repos/org/other/tarball"},
		{"git:*/org/repo", "https://git.example/org/repo/HEAD", "https://git.example/org/other/HEAD"},
		{"git:*/org/repo", "http://git.example/org/repo/HEAD", "http://git.example/org/other/HEAD"},
		{"golang:git.example/org/repo", "https://git.example/org/repo/HEAD", "https://git.example/org/other/HEAD"},
		{"git:git.example:8080/org/repo", "http://git.example:8080/org/repo/HEAD", "http://git.example/org/repo/HEAD"},
		{"git:git.example/org/repo", "http://git.example:8080/org/repo/HEAD", "http://git.example:8080/org/other/HEAD"},
	} {
		p := allow(policy.Rule{Domain: "*", Ports: []policy.Ports{{First: 1, Last: 65535}}})
		p.Deny, p.InspectTLS = []string{want.deny}, true
		b := r.sandbox(p)
		c := b.trust(t, b.client())
		if status, body := get(t, c, want.hidden); status != http.StatusForbidden {
			t.Errorf("deny %s: %s: %d %q", want.deny, want.hidden, status, body)
		}
		if status, body := get(t, c, want.there); status != http.StatusOK {
			t.Errorf("deny %s: %s: %d %q", want.deny, want.there, status, body)
		}
		if !strings.HasPrefix(want.hidden, "https://") {
			continue
		}
		p.InspectTLS = false
		b.put(p, "agent")
		if _, err := b.client().Get(want.hidden); !errors.Is(err, syscall.ECONNRESET) {
			t.Errorf("deny %s: %s unseen: %v", want.deny, want.hidden, err)
		}
	}
}

// TestASecretStaysOutside asks in every way for a request whose answer shows the secret, or a request by another way.
func TestASecretStaysOutside(t *testing.T) {
	file := filepath.Join(t.TempDir(), "secret")
	if err := os.WriteFile(file, []byte("Bearer hush\n"), 0o600); err != nil {
		t.Fatal(err)
	}
	r := newRig(t, fmt.Sprintf("[secrets.model]\nprojects = [\"*\"]\nhosts = [\"api.example\"]\nheader = \"Authorization\"\nvalue_file = %q\n", file))
	plain := r.wiretap(r.host("203.0.113.1:80", "api.example"))
	r.secure(r.host("203.0.113.1:443", "api.example"), http.HandlerFunc(func(w http.ResponseWriter, req *http.Request) {
		switch req.URL.Path {
		case "/redirect":
			http.Redirect(w, req, "https://evil.example/", http.StatusTemporaryRedirect)
			return
		case "/broken":
			panic(http.ErrAbortHandler)
		}
		// What a server of the kind that shows requests would say of this one, but for the header itself.
		for name, values := range req.Header {
			if name != "Authorization" {
				fmt.Fprintln(w, name, values)
			}
		}
		fmt.Fprintln(w, len(req.Header["Authorization"]), req.Trailer)
	}), "api.example")
	evil := r.wiretap(r.host("203.0.113.2:443", "evil.example"))
	p := allow(policy.Rule{Domain: "api.example", Secret: "model"}, domain("evil.example"))
	p.InspectTLS = true
	b := r.sandbox(p)
	pem, err := r.edge.CA(t.Context(), b.desc.ID)
	if err != nil {
		t.Fatal(err)
	}
	say := func(port, text string) string {
		c := b.must("api.example:" + port)
		var rw net.Conn = c
		if port == "443" {
			rw = tls.Client(c, &tls.Config{ServerName: "api.example", RootCAs: certPool(t, pem), NextProtos: []string{"http/1.1"}})
		}
		defer rw.Close()
		_ = rw.SetDeadline(time.Now().Add(time.Second))
		_, _ = io.WriteString(rw, text)
		out, _ := io.ReadAll(rw)
		return string(out)
	}
	const end = "\r\nConnection: close\r\n\r\n"
	for name, text := range map[string]string{
		"as it is":               "GET / HTTP/1.1\r\nHost: api.example" + end,
		"TRACE":                  "TRACE / HTTP/1.1\r\nHost: api.example" + end,
		"a header of its own":    "GET / HTTP/1.1\r\nHost: api.example\r\nAuthorization: x\r\nauthorization: y" + end,
		"hop by hop":             "GET / HTTP/1.1\r\nHost: api.example\r\nConnection: Authorization, close\r\nAuthorization: x\r\n\r\n",
		"a trailer":              "POST / HTTP/1.1\r\nHost: api.example\r\nTransfer-Encoding: chunked\r\nTrailer: Authorization\r\nConnection: close\r\n\r\n0\r\nAuthorization: x\r\n\r\n",
		"a redirect":             "GET /redirect HTTP/1.1\r\nHost: api.example" + end,
		"an answer that breaks":  "GET /broken HTTP/1.1\r\nHost: api.example" + end,
		"another Host":           "GET / HTTP/1.1\r\nHost: evil.example" + end,
		"an absolute form":       "GET https://evil.example/ HTTP/1.1\r\nHost: api.example" + end,
		"a URL in a URL":         "GET x:https://evil.example/ HTTP/1.1\r\nHost: api.example" + end,
		"a host with a port":     "GET / HTTP/1.1\r\nHost: api.example:80" + end,
		"an upgrade":             "GET / HTTP/1.1\r\nHost: api.example\r\nConnection: Upgrade\r\nUpgrade: x\r\n\r\n",
		"CONNECT":                "CONNECT evil.example:443 HTTP/1.1\r\nHost: evil.example:443" + end,
		"CONNECT to itself":      "CONNECT api.example:443 HTTP/1.1\r\nHost: api.example:443" + end,
		"a header that is large": "GET / HTTP/1.1\r\nHost: api.example\r\nX: " + strings.Repeat("x", 2<<20) + end,
	} {
		if got := say("443", text); strings.Contains(got, "hush") {
			t.Errorf("%s: %.300q", name, got)
		}
	}
	_ = say("80", "GET / HTTP/1.1\r\nHost: api.example\r\n\r\n")
	for name, tap := range map[string]*wiretap{"without TLS": plain, "another host": evil} {
		if heard := tap.heard(); strings.Contains(heard, "hush") {
			t.Errorf("%s: the far side heard %.300q", name, heard)
		}
	}
	events, _, _, err := flowlog.Read(filepath.Join(r.dir, "flows"), b.desc.ID, 0, 10000)
	if err != nil || strings.Contains(fmt.Sprint(events), "hush") {
		t.Errorf("the flow log tells: %v, %v", events, err)
	}
}

// TestNoConnectionOutlivesItsPolicy keeps one of every kind open over a change.
func TestNoConnectionOutlivesItsPolicy(t *testing.T) {
	r := newRig(t, "")
	r.echo(r.host("203.0.113.1:7000", "a.example"))
	r.web(r.host("203.0.113.1:80", "a.example"), http.HandlerFunc(func(w http.ResponseWriter, req *http.Request) {
		if req.Header.Get("Upgrade") != "" {
			c, rw, err := http.NewResponseController(w).Hijack()
			if err != nil {
				return
			}
			defer c.Close()
			_, _ = io.WriteString(c, "HTTP/1.1 101 Switching Protocols\r\nConnection: Upgrade\r\nUpgrade: echo\r\n\r\n")
			_, _ = io.Copy(c, rw)
			return
		}
		_ = http.NewResponseController(w).EnableFullDuplex()
		w.WriteHeader(http.StatusOK)
		buf := make([]byte, 1)
		for {
			_ = http.NewResponseController(w).Flush()
			if _, err := io.ReadFull(req.Body, buf); err != nil {
				return
			}
			_, _ = w.Write(buf)
		}
	}))
	open := allow(policy.Rule{Domain: "a.example", Ports: []policy.Ports{{First: 80, Last: 80}, {First: 7000, Last: 7000}}})
	// line says what stands before the bytes that come back.
	line := func(c net.Conn, br *bufio.Reader) {
		for {
			l, err := br.ReadString('\n')
			if err != nil {
				t.Fatalf("%q, %v", l, err)
			}
			if strings.TrimSpace(l) == "" {
				return
			}
		}
	}
	dialled := func(b *box, hostport, head string) (net.Conn, *bufio.Reader) {
		c := b.must(hostport)
		_, _ = io.WriteString(c, head)
		br := bufio.NewReader(c)
		line(c, br)
		return c, br
	}
	const upgrade = "GET / HTTP/1.1\r\nHost: a.example\r\nConnection: Upgrade\r\nUpgrade: echo\r\n\r\n"
	for name, begin := range map[string]func(b *box) (io.Writer, *bufio.Reader){
		"as it is": func(b *box) (io.Writer, *bufio.Reader) {
			c := b.must("a.example:7000")
			return c, bufio.NewReader(c)
		},
		"an upgrade": func(b *box) (io.Writer, *bufio.Reader) { return dialled(b, "a.example:80", upgrade) },
		"an upgrade by the proxy": func(b *box) (io.Writer, *bufio.Reader) {
			return dialled(b, at(wire.PortProxy), strings.Replace(upgrade, "GET /", "GET http://a.example/", 1))
		},
		"CONNECT": func(b *box) (io.Writer, *bufio.Reader) {
			return dialled(b, at(wire.PortProxy), "CONNECT a.example:7000 HTTP/1.1\r\nHost: a.example:7000\r\n\r\n")
		},
		"SOCKS": func(b *box) (io.Writer, *bufio.Reader) {
			c := b.must(at(wire.PortSOCKS))
			_, _ = c.Write(append([]byte{5, 1, 0, 5, 1, 0, 3, 9}, "a.example\x1b\x58"...))
			br := bufio.NewReader(c)
			if _, err := io.ReadFull(br, make([]byte, 12)); err != nil {
				t.Fatal(err)
			}
			return c, br
		},
	} {
		t.Run(name, func(t *testing.T) {
			b := r.sandbox(open)
			w, br := begin(b)
			echo := func(x byte) error {
				if _, err := w.Write([]byte{x}); err != nil {
					return err
				}
				got, err := br.ReadByte()
				if err == nil && got != x {
					err = fmt.Errorf("%d came back as %d", x, got)
				}
				return err
			}
			if err := echo(1); err != nil {
				t.Fatal(err)
			}
			b.put(open, "agent") // the same again: nothing happens
			if err := echo(2); err != nil {
				t.Errorf("the same policy: %v", err)
			}
			b.put(allow(domain("b.example")), "agent")
			if err := echo(3); err == nil {
				t.Error("it goes on")
			}
		})
	}
	t.Run("a proxy's connection that is kept", func(t *testing.T) {
		b := r.sandbox(open)
		c := b.must(at(wire.PortProxy))
		br := bufio.NewReader(c)
		ask := func() int {
			_, _ = io.WriteString(c, "GET http://a.example/ HTTP/1.1\r\nHost: a.example\r\n\r\n")
			resp, err := http.ReadResponse(br, nil)
			if err != nil {
				return 0
			}
			_, _ = io.Copy(io.Discard, resp.Body)
			return resp.StatusCode
		}
		if got := ask(); got != 200 {
			t.Fatal(got)
		}
		b.put(allow(domain("b.example")), "agent")
		if got := ask(); got == 200 {
			t.Error("it is served")
		}
	})
}

// TestAnAddressThatWasNotReadIsCutWhenNamesAreRejected has bytes flow to an address that no rule about names concerned.
func TestAnAddressThatWasNotReadIsCutWhenNamesAreRejected(t *testing.T) {
	r := newRig(t, "")
	r.echo(r.host("203.0.113.1:7000"))
	p := allow(policy.Rule{CIDR: "203.0.113.1/32"})
	b := r.sandbox(p)
	c := b.must("203.0.113.1:7000")
	echoes := func() error {
		_ = c.SetDeadline(time.Now().Add(20 * time.Second))
		_, _ = c.Write([]byte{0})
		_, err := io.ReadFull(c, make([]byte, 1))
		return err
	}
	if err := echoes(); err != nil {
		t.Fatal(err)
	}
	p.Phases[0].Rules = append(p.Phases[0].Rules, policy.Rule{Domain: "other.example"})
	b.put(p, "agent")
	if err := echoes(); err != nil {
		t.Errorf("by a policy that allows more: %v", err)
	}
	p.Phases[0].Rules = append([]policy.Rule{{Domain: "bad.example", Reject: true}}, p.Phases[0].Rules...)
	b.put(p, "agent")
	if err := echoes(); !errors.Is(err, syscall.ECONNRESET) && !errors.Is(err, io.EOF) {
		t.Errorf("by a policy that rejects names: %v", err)
	}
}

// TestNoConnectionOutlivesItsWorld keeps connections open that were let by when the world had no bounds.
func TestNoConnectionOutlivesItsWorld(t *testing.T) {
	r := newRig(t, "")
	r.p.services.Use([]mirror.Service{shelfOf{"pypi", "index.example"}})
	names := []string{"index.example", "git.example", "a.example"}
	r.secure(r.host("203.0.113.1:443", names...), hello("world"), names...)
	r.web(r.host("203.0.113.1:80"), hello("world"))
	for name, test := range map[string]struct {
		change     func(*policy.Policy)
		cut, stays []string
	}{
		"a date": {
			func(p *policy.Policy) { p.AsOf = time.Date(2024, 1, 2, 0, 0, 0, 0, time.UTC) },
			[]string{"https://index.example/new", "http://index.example/new"},
			[]string{"https://git.example/", "http://a.example/"},
		},
		"a denied repository": {
			func(p *policy.Policy) { p.Deny = []string{"git:git.example/a/b"} },
			[]string{"https://git.example/a/b", "https://index.example/"},
			[]string{"https://a.example/", "http://a.example/"},
		},
		"inspection": {
			func(p *policy.Policy) { p.InspectTLS = true },
			[]string{"https://a.example/"},
			[]string{"http://a.example/"},
		},
	} {
		p := allow(domain("*"))
		b := r.sandbox(p)
		c := b.client()
		for _, url := range slices.Concat(test.cut, test.stays) {
			if status, body := get(t, c, url); status != http.StatusOK {
				t.Fatalf("%s: %d %q", url, status, body)
			}
		}
		test.change(&p)
		flows := func() int64 {
			n, err := r.edge.Counters(t.Context(), []string{b.desc.ID})
			if err != nil {
				t.Fatal(err)
			}
			return n[b.desc.ID].Flows
		}
		before := flows()
		b.put(p, "agent")
		for _, url := range test.cut {
			if resp, err := c.Get(url); err == nil {
				body, _ := io.ReadAll(resp.Body)
				_ = resp.Body.Close()
				if strings.HasPrefix(string(body), "world") {
					t.Errorf("%s: %s: %q", name, url, body)
				}
			}
		}
		for _, url := range test.stays {
			if status, body := get(t, c, url); status != http.StatusOK || !strings.HasPrefix(body, "world") {
				t.Errorf("%s: %s: %d %q", name, url, status, body)
			}
		}
		if before != int64(len(test.cut)+len(test.stays)) {
			t.Errorf("%s: %d connections were open", name, before)
		}
	}
}

// drip is a package service whose answers never end.
type drip struct{ name string }

func (d drip) Name() string                              { return d.name }
func (drip) Hosts() []string                             { return nil }
func (drip) Match(string, string, string) (string, bool) { return "", false }

func (d drip) ServeHTTP(w http.ResponseWriter, r *http.Request) {
	for i := 0; r.Context().Err() == nil && (i == 0 || r.URL.Path == "/drip"); i++ {
		if _, err := io.WriteString(w, "."); err != nil {
			return
		}
		_ = http.NewResponseController(w).Flush()
		time.Sleep(10 * time.Millisecond)
	}
}

// TestAServiceThatIsTakenAwayEnds has answers of two services under way on one connection, and takes one away.
func TestAServiceThatIsTakenAwayEnds(t *testing.T) {
	r := newRig(t, "")
	r.p.services.Use([]mirror.Service{drip{"pypi"}, drip{"npm"}})
	services := func(pypi bool) policy.Policy {
		p := allow(domain("unrelated.example"))
		p.Services = map[string]bool{"pypi": pypi, "npm": true}
		return p
	}
	b := r.sandbox(services(true))
	c := b.must(at(wire.PortMirrors))
	f := http2.NewFramer(c, c)
	_, _ = io.WriteString(c, http2.ClientPreface)
	if err := f.WriteSettings(); err != nil {
		t.Fatal(err)
	}
	ask := func(stream uint32, path string) {
		var head bytes.Buffer
		e := hpack.NewEncoder(&head)
		for _, h := range []hpack.HeaderField{
			{Name: ":method", Value: "GET"}, {Name: ":scheme", Value: "http"}, {Name: ":authority", Value: "100.64.0.1"}, {Name: ":path", Value: path},
		} {
			_ = e.WriteField(h)
		}
		if err := f.WriteHeaders(http2.HeadersFrameParam{StreamID: stream, BlockFragment: head.Bytes(), EndStream: true, EndHeaders: true}); err != nil {
			t.Fatal(err)
		}
	}
	// until reads frames until a stream has said something, or the connection has ended.
	until := func(stream uint32) error {
		for {
			fr, err := f.ReadFrame()
			if err != nil {
				return err
			}
			if d, ok := fr.(*http2.DataFrame); ok && d.StreamID == stream && len(d.Data()) > 0 {
				return nil
			}
		}
	}
	ask(1, "/pypi/drip")
	err := until(1)
	if err != nil {
		t.Fatal(err)
	}
	ask(3, "/npm/x")
	if err = until(3); err != nil {
		t.Fatal(err)
	}
	b.put(services(false), "agent")
	// What was said before may still be on its way here, and the end comes behind it.
	_ = c.SetReadDeadline(time.Now().Add(10 * time.Second))
	for err == nil {
		err = until(1)
	}
	if errors.Is(err, os.ErrDeadlineExceeded) {
		t.Error("the answer of a service that the policy does not allow any more goes on")
	}
}

// TestListsLeadNowhereInside has the lists of an upstream, which whoever publishes packages may have a word in, name
// places that are not the world's.
func TestListsLeadNowhereInside(t *testing.T) {
	r := newRig(t, "")
	inside := r.wiretap(r.host("10.9.0.9:80", "inside.example"))
	cases := []struct {
		name, link string
		want       int
	}{
		{"a file where it should be", "/files/x-1.0.tar.gz", 200},
		{"a file elsewhere in the world", "http://203.0.113.2/files/x-1.0.tar.gz", 200},
		{"an address inside", "http://10.9.0.9/bypass/x-1.0.tar.gz", 502},
		{"a name of one", "http://inside.example/bypass/x-1.0.tar.gz", 502},
		{"a redirect to one", "/away/x-1.0.tar.gz", 502},
		{"metadata of a cloud", "http://169.254.169.254/bypass/x-1.0.tar.gz", 502},
		{"this node", "http://127.0.0.1:7272/bypass/x-1.0.tar.gz", 502},
		{"this node, by 0", "http://0.0.0.0:7272/bypass/x-1.0.tar.gz", 502},
		{"this node over IPv6", "http://[::1]:7272/bypass/x-1.0.tar.gz", 502},
		{"IPv4 inside IPv6", "http://[::ffff:10.9.0.9]/bypass/x-1.0.tar.gz", 502},
		{"the host of the index, another port", "http://10.9.0.8:81/bypass/x-1.0.tar.gz", 502},
		{"no web address", "file:///etc/x-1.0.tar.gz", 404},
	}
	index := http.HandlerFunc(func(w http.ResponseWriter, req *http.Request) {
		var n int
		switch {
		case strings.HasPrefix(req.URL.Path, "/simple/x") && len(cases) > 0:
			_, _ = fmt.Sscanf(req.URL.Path, "/simple/x%d/", &n)
			w.Header().Set("Content-Type", "text/html")
			fmt.Fprintf(w, `<a href="%s">x</a>`, strings.Replace(cases[n].link, "x-1", fmt.Sprintf("x%d-1", n), 1))
		case strings.HasPrefix(req.URL.Path, "/away/"):
			http.Redirect(w, req, "http://10.9.0.9/bypass", http.StatusFound)
		case strings.HasPrefix(req.URL.Path, "/files/"):
			_, _ = io.WriteString(w, "file")
		default:
			http.NotFound(w, req)
		}
	})
	// The index itself is inside, since the operator says so.
	r.web(r.host("10.9.0.8:80", "index.example"), index)
	r.web(r.host("203.0.113.2:80"), index)
	if err := r.edge.Upstreams(t.Context(), upstream.Upstreams{policy.PyPI: {URLs: []string{"http://index.example/simple"}}}); err != nil {
		t.Fatal(err)
	}
	p := allow(domain("unrelated.example"))
	p.Services = map[string]bool{policy.PyPI: true}
	c := r.sandbox(p).client()
	for n, want := range cases {
		if got, body := get(t, c, fmt.Sprintf("http://100.64.0.1/pypi/files/x%d/x%[1]d-1.0.tar.gz", n)); got != want.want {
			t.Errorf("%s: %d %.200q, want %d", want.name, got, body, want.want)
		}
	}
	if heard := inside.heard(); heard != "" {
		t.Errorf("a place inside heard %.200q", heard)
	}
}

// The host of an index's files is a package service's before anybody has read a page of it: else a world with a date has
// a hole for whoever asks first, where a rule allows that host by name.
func TestTheHostOfFilesIsKnownBeforeTheFirstPage(t *testing.T) {
	r := newRig(t, "")
	r.web(r.host("203.0.113.1:80", "index.example"), http.HandlerFunc(func(w http.ResponseWriter, req *http.Request) {
		w.Header().Set("Content-Type", "text/html")
		_, _ = io.WriteString(w, `<a href="http://files.example/x-9.0.tar.gz">x</a>`)
	}))
	r.web(r.host("203.0.113.2:80", "files.example"), hello("files"))
	if err := r.edge.Upstreams(t.Context(), upstream.Upstreams{policy.PyPI: {URLs: []string{"http://index.example/simple"}}}); err != nil {
		t.Fatal(err)
	}
	p := allow(domain("*"))
	p.Services = map[string]bool{policy.PyPI: true}
	p.AsOf = time.Date(2020, 1, 1, 0, 0, 0, 0, time.UTC)
	b := r.sandbox(p)
	wait.Until(t, 10*time.Second, func() bool {
		_, ok := r.p.services.OfHost("files.example")
		return ok
	}, "the host of the files")
	if status, body := get(t, b.client(), "http://files.example/x-9.0.tar.gz"); status == 200 {
		t.Errorf("%d %q", status, body)
	}
}

// TestAFloodHidesNoDenial makes noise of every kind, then does what is denied.
func TestAFloodHidesNoDenial(t *testing.T) {
	r := newRig(t, "[limits]\ndns_per_second = 100000\n")
	p := allow(domain("a.example"))
	p.Limits.DNSPerSecond = 100_000
	b, quiet := r.sandbox(p), r.sandbox(p)
	c, err := b.dial("tcp", at(wire.PortDNS)) // where nothing is lost
	if err != nil {
		t.Fatal(err)
	}
	defer c.Close()
	_ = c.SetDeadline(time.Now().Add(time.Minute))
	for i := range 6000 { // more than a log takes one by one
		q := []byte{0, 84, 0, 1, 1, 0, 0, 1, 0, 0, 0, 0, 0, 0, 60}
		q = append(q, fmt.Sprintf("%060d", i)...)
		q = append(q, 5, 'n', 'o', 'i', 's', 'e', 0, 0, 1, 0, 1)
		_, _ = c.Write(q)
		if _, err := io.ReadFull(c, make([]byte, 2+84)); err != nil {
			t.Fatal(err)
		}
	}
	if err := b.fails("203.0.113.9:443"); err == nil {
		t.Error("an address that is not allowed")
	}
	if _, err := b.resolve("bypass.example"); !errors.Is(err, errRefused) {
		t.Errorf("%v", err)
	}
	// How many denials there were is not lost, nor by which rule.
	if n := r.p.roster.Totals().Denied; n < 6001 {
		t.Errorf("%d denials are counted", n)
	}
	r.p.flows.Forget(b.desc.ID)
	events, _, _, err := flowlog.Read(filepath.Join(r.dir, "flows"), b.desc.ID, 0, 10_000)
	if err != nil {
		t.Fatal(err)
	}
	var logged int64
	for _, e := range events {
		if e.GetDenied() && e.GetRule() == policy.RuleDefault {
			logged += e.GetCount()
		}
	}
	if logged < 6001 {
		t.Errorf("%d denials are logged", logged)
	}
	// A neighbour's log knows every name all the same.
	if _, err := quiet.resolve("bypass.example"); !errors.Is(err, errRefused) {
		t.Errorf("%v", err)
	}
	if e := quiet.denied(policy.RuleDefault); e.GetName() != "bypass.example" {
		t.Errorf("the neighbour's log says %v", e)
	}
}

// TestNamesFromSandboxesAreHarmless gives every door names with what terminals and records obey.
func TestNamesFromSandboxesAreHarmless(t *testing.T) {
	r := newRig(t, "")
	b := r.sandbox(allow(domain("*")))
	evil := "a\x1b[2J\r\n\x00\u202e.example"
	c := b.must(at(wire.PortSOCKS))
	_, _ = c.Write(append(append([]byte{5, 1, 0, 5, 1, 0, 3, byte(len(evil))}, evil...), 0, 80))
	got, err := io.ReadAll(c)
	if err != nil && !errors.Is(err, syscall.ECONNRESET) || len(got) < 4 || got[3] == 0 {
		t.Errorf("SOCKS: %v, %v", got, err)
	}
	resp := b.must(at(wire.PortProxy))
	_, _ = io.WriteString(resp, "CONNECT a\x1b[2J.example:443 HTTP/1.1\r\nHost: x\r\n\r\n")
	_ = resp.SetReadDeadline(time.Now().Add(2 * time.Second))
	if text, _ := io.ReadAll(resp); bytes.Contains(text, []byte("200")) {
		t.Errorf("CONNECT: %q", text)
	}
	for _, name := range r.zone.questions() {
		if strings.ContainsAny(name, "\x1b\r\n\x00") {
			t.Errorf("the world was asked %q", name)
		}
	}
}

// TestDatagramsOfADeadPolicyStay sends on a flow of datagrams over a change.
func TestDatagramsOfADeadPolicyStay(t *testing.T) {
	r := newRig(t, "")
	pc, err := net.ListenPacket("udp", "203.0.113.1:9000")
	if err != nil {
		t.Fatal(err)
	}
	defer pc.Close()
	got := make(chan string, 100)
	go func() {
		buf := make([]byte, 2048)
		for {
			n, from, err := pc.ReadFrom(buf)
			if err != nil {
				return
			}
			got <- string(buf[:n])
			_, _ = pc.WriteTo(buf[:n], from)
		}
	}()
	b := r.sandbox(allow(policy.Rule{CIDR: "203.0.113.1/32", Protocol: policy.UDP}))
	c, err := b.dial("udp", "203.0.113.1:9000")
	if err != nil {
		t.Fatal(err)
	}
	defer c.Close()
	_ = c.SetDeadline(time.Now().Add(20 * time.Second))
	buf := make([]byte, 100)
	_, _ = c.Write([]byte("open"))
	if _, err := c.Read(buf); err != nil || <-got != "open" {
		t.Fatal(err)
	}
	b.put(allow(policy.Rule{CIDR: "203.0.113.7/32", Protocol: policy.UDP}), "agent")
	for range 10 {
		_, _ = c.Write(binary.BigEndian.AppendUint32([]byte("bypass"), 1))
	}
	_ = c.SetReadDeadline(time.Now().Add(500 * time.Millisecond))
	if n, err := c.Read(buf); err == nil {
		t.Errorf("an answer: %q", buf[:n])
	}
	select {
	case s := <-got:
		t.Errorf("the far side heard %q", s)
	default:
	}
}
