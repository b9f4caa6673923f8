package egress

import (
	"bytes"
	"context"
	"crypto/ecdsa"
	"crypto/elliptic"
	"crypto/rand"
	"crypto/tls"
	"crypto/x509"
	"crypto/x509/pkix"
	"encoding/hex"
	"errors"
	"fmt"
	"io"
	"math/big"
	"net"
	"net/http"
	"net/netip"
	"os/exec"
	"path/filepath"
	"strconv"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"golang.org/x/net/dns/dnsmessage"

	sandseav1 "github.com/sandsea/sandsea/api/sandsea/v1"
	"github.com/sandsea/sandsea/client"
	"github.com/sandsea/sandsea/internal/testkit/farside"
	"github.com/sandsea/sandsea/internal/testkit/require"
	"github.com/sandsea/sandsea/internal/testkit/server"
	"github.com/sandsea/sandsea/internal/testkit/wait"
)

// The far side. Every address there answers; these are the ones that policies of the tests allow.
var (
	resolver = netip.MustParseAddr("198.51.100.53")
	site     = netip.MustParseAddr("198.51.100.20") // of allowed.example, and of its neighbour that is not
	direct   = netip.MustParseAddrPort("198.51.100.10:5432")
	datagram = netip.MustParseAddrPort("198.51.100.11:9999")
	clock    = netip.MustParseAddrPort("198.51.100.12:123") // of clock.example
)

// gateway is where a sandbox finds Aether.
const gateway = "100.64.0.1"

// zone is what the world's resolver answers. A name that is not here does not exist.
var zone = map[string]string{
	"allowed.example":       site.String(),
	"neighbour.example":     site.String(),
	"x.wild.example":        site.String(),
	"a.b.wild.example":      site.String(),
	"wild.example":          site.String(),
	"xwild.example":         site.String(),
	"denied.example":        "198.51.100.66",
	"rejected.wild.example": "198.51.100.67",
	"clock.example":         clock.Addr().String(),
	"loopback.example":      "127.0.0.1",
	"private.example":       "10.1.2.3",
	"metadata.example":      "169.254.169.254",
	"host.example":          farside.Host.String(),
	"zero.example":          "0.0.0.0",
}

// outside is the world, with what it was asked.
type outside struct {
	*farside.World

	drips atomic.Int64 // answers of /drip under way

	mu    sync.Mutex
	asked []string // guarded by mu: names asked of the resolver
}

func newOutside(t *testing.T) *outside {
	t.Helper()
	w := &outside{World: farside.New(t)}
	go w.answerNames(w.Packets(t, netip.AddrPortFrom(resolver, 53)))
	for _, port := range []uint16{80, 8080} {
		w.serveHTTP(t, w.Listen(t, netip.AddrPortFrom(site, port)))
	}
	w.serveTLS(t, w.Listen(t, netip.AddrPortFrom(site, 443)))
	echoTCP(w.Listen(t, direct))
	for _, at := range []netip.AddrPort{datagram, clock} {
		echoUDP(w.Packets(t, at))
	}
	return w
}

func (w *outside) answerNames(c net.PacketConn) {
	buf := make([]byte, 4096)
	for {
		n, from, err := c.ReadFrom(buf)
		if err != nil {
			return
		}
		var m dnsmessage.Message
		if m.Unpack(buf[:n]) != nil || len(m.Questions) != 1 {
			continue
		}
		q := m.Questions[0]
		name := strings.TrimSuffix(strings.ToLower(q.Name.String()), ".")
		w.mu.Lock()
		w.asked = append(w.asked, name)
		w.mu.Unlock()
		m.Response, m.RecursionAvailable, m.Additionals = true, true, nil
		addr, known := zone[name]
		if !known {
			m.RCode = dnsmessage.RCodeNameError
		} else if q.Type == dnsmessage.TypeA {
			m.Answers = []dnsmessage.Resource{{
				Header: dnsmessage.ResourceHeader{Name: q.Name, Type: q.Type, Class: q.Class, TTL: 1},
				Body:   &dnsmessage.AResource{A: netip.MustParseAddr(addr).As4()},
			}}
		}
		if b, err := m.Pack(); err == nil {
			_, _ = c.WriteTo(b, from)
		}
	}
}

// names are those asked so far.
func (w *outside) names() []string {
	w.mu.Lock()
	defer w.mu.Unlock()
	return append([]string(nil), w.asked...)
}

func (w *outside) serveHTTP(t *testing.T, l net.Listener) {
	srv := &http.Server{Handler: http.HandlerFunc(func(rw http.ResponseWriter, r *http.Request) {
		if r.URL.Path == "/drip" { // a byte a tenth of a second, for as long as somebody listens
			w.drips.Add(1)
			defer w.drips.Add(-1)
			for r.Context().Err() == nil {
				_, _ = io.WriteString(rw, ".")
				_ = http.NewResponseController(rw).Flush()
				time.Sleep(100 * time.Millisecond)
			}
			return
		}
		if r.URL.Path == "/file" {
			http.ServeContent(&slow{rw}, r, "file", time.Unix(1e9, 0), bytes.NewReader(file))
			return
		}
		fmt.Fprintf(rw, "far says %s%s\n", r.Host, r.URL.Path)
	}), ReadHeaderTimeout: 10 * time.Second}
	go func() { _ = srv.Serve(l) }()
	t.Cleanup(func() { _ = srv.Close() })
}

// file takes a while to fetch.
var file = bytes.Repeat([]byte("0123456789abcdef"), 4<<20)

// slow is an answer of some 50 MB/s.
type slow struct{ http.ResponseWriter }

func (s *slow) Write(b []byte) (int, error) {
	time.Sleep(time.Duration(len(b)) * 20 * time.Nanosecond)
	return s.ResponseWriter.Write(b)
}

func (w *outside) serveTLS(t *testing.T, l net.Listener) {
	t.Helper()
	key, err := ecdsa.GenerateKey(elliptic.P256(), rand.Reader)
	if err != nil {
		t.Fatal(err)
	}
	tmpl := &x509.Certificate{
		SerialNumber: big.NewInt(1), Subject: pkix.Name{CommonName: "far"}, NotBefore: time.Now().Add(-time.Hour),
		NotAfter: time.Now().Add(time.Hour), DNSNames: []string{"allowed.example", "*.wild.example"},
	}
	der, err := x509.CreateCertificate(rand.Reader, tmpl, tmpl, &key.PublicKey, key)
	if err != nil {
		t.Fatal(err)
	}
	w.serveHTTP(t, tls.NewListener(l, &tls.Config{Certificates: []tls.Certificate{{Certificate: [][]byte{der}, PrivateKey: key}}}))
}

func echoTCP(l net.Listener) {
	go func() {
		for {
			c, err := l.Accept()
			if err != nil {
				return
			}
			go func() {
				_, _ = io.Copy(c, c)
				_ = c.Close()
			}()
		}
	}()
}

func echoUDP(c net.PacketConn) {
	go func() {
		buf := make([]byte, 4096)
		for {
			n, from, err := c.ReadFrom(buf)
			if err != nil {
				return
			}
			_, _ = c.WriteTo(buf[:n], from)
		}
	}()
}

// house is the platform on the world's host.
type house struct {
	*server.Server
	world *outside
}

func open(t *testing.T) *house {
	t.Helper()
	require.Root(t)
	require.Feature(t, "bin:busybox")
	require.Feature(t, "bin:musl-gcc")
	w := newOutside(t)
	h := &house{world: w, Server: server.Start(t, server.Config{
		NetNS: w.HostNS, Aether: fmt.Sprintf("resolvers = [%q]\n", resolver.String()),
	})}
	files, err := server.Busybox(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	files = append(files, server.File{Name: "bin/probe", Body: string(compile(t)), Mode: 0o755})
	if _, err := h.Import(t.Context(), "probe", files, nil); err != nil {
		t.Fatal(err)
	}
	return h
}

// compile builds the probe.
func compile(t *testing.T) []byte {
	t.Helper()
	out := filepath.Join(t.TempDir(), "probe")
	cmd := exec.CommandContext(t.Context(), "musl-gcc", "-static", "-O1", "-std=gnu11", "-Wall", "-Wextra", "-Werror",
		"-o", out, filepath.Join("testdata", "probe.c"))
	if text, err := cmd.CombinedOutput(); err != nil {
		t.Fatalf("build the probe: %v\n%s", err, text)
	}
	b, err := exec.CommandContext(t.Context(), "cat", out).Output()
	if err != nil {
		t.Fatal(err)
	}
	return b
}

// sandbox makes one with a policy; nil: none.
func (h *house) sandbox(t *testing.T, p *sandseav1.NetworkPolicy) *client.Sandbox {
	t.Helper()
	sb, err := h.Client.Create(t.Context(), &sandseav1.SandboxSpec{
		Environment: &sandseav1.Environment{Image: "probe"}, Network: p,
	}, "")
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if err := sb.Stop(context.WithoutCancel(t.Context())); err != nil {
			t.Error(err)
		}
	})
	return sb
}

// probe makes one attempt and gives its line.
func probe(t *testing.T, sb *client.Sandbox, user string, argv ...string) string {
	t.Helper()
	return probeWith(t, sb, nil, user, argv...)
}

// probePatiently is probe for what must be answered, however busy the machine is.
func probePatiently(t *testing.T, sb *client.Sandbox, user string, argv ...string) string {
	t.Helper()
	return probeWith(t, sb, map[string]string{"LIMIT_MS": "20000"}, user, argv...)
}

func probeWith(t *testing.T, sb *client.Sandbox, env map[string]string, user string, argv ...string) string {
	t.Helper()
	ctx, stop := context.WithTimeoutCause(t.Context(), 30*time.Second, errors.New("a probe hangs"))
	defer stop()
	cmd := client.Argv(append([]string{"/bin/probe"}, argv...)...)
	cmd.User, cmd.Env = user, env
	res, err := sb.Run(ctx, cmd)
	if err != nil {
		t.Fatalf("probe %q: %v", argv, err)
	}
	if res.GetResult().GetExitCode() != 0 {
		t.Fatalf("probe %q: exit %d, %s%s", argv, res.GetResult().GetExitCode(), res.GetStdout(), res.GetStderr())
	}
	line := strings.TrimSpace(string(res.GetStdout()))
	if text, ok := strings.CutPrefix(line, "answer "); ok {
		b, err := hex.DecodeString(text)
		if err != nil {
			t.Fatalf("probe %q: %q", argv, line)
		}
		return "answer " + string(b)
	}
	return line
}

// ask puts a question to the sandbox's resolver, over UDP or TCP, and gives the response code and the address.
func ask(t *testing.T, sb *client.Sandbox, user, kind, name string, typ dnsmessage.Type) (string, netip.Addr) {
	t.Helper()
	q := question(t, name, typ)
	if kind == "tcp" {
		q = append([]byte{byte(len(q) >> 8), byte(len(q))}, q...)
	}
	line := probe(t, sb, user, kind, gateway, "53", hex.EncodeToString(q))
	text, ok := strings.CutPrefix(line, "answer ")
	if !ok {
		return line, netip.Addr{}
	}
	b := []byte(text)
	if kind == "tcp" && len(b) > 2 {
		b = b[2:]
	}
	var m dnsmessage.Message
	if err := m.Unpack(b); err != nil {
		t.Fatalf("answer for %s: %v", name, err)
	}
	for _, r := range m.Answers {
		if a, ok := r.Body.(*dnsmessage.AResource); ok {
			return m.RCode.String(), netip.AddrFrom4(a.A)
		}
	}
	return m.RCode.String(), netip.Addr{}
}

func question(t *testing.T, name string, typ dnsmessage.Type) []byte {
	t.Helper()
	n, err := dnsmessage.NewName(name + ".")
	if err != nil {
		t.Fatal(err)
	}
	b, err := (&dnsmessage.Message{
		Header:    dnsmessage.Header{ID: 7, RecursionDesired: true},
		Questions: []dnsmessage.Question{{Name: n, Type: typ, Class: dnsmessage.ClassINET}},
	}).Pack()
	if err != nil {
		t.Fatal(err)
	}
	return b
}

// address is what an allowed name resolves to inside.
func address(t *testing.T, sb *client.Sandbox, name string) string {
	t.Helper()
	var code string
	var a netip.Addr
	wait.For(patience, func() bool { // a question may be lost
		code, a = ask(t, sb, "root", "udp", name, dnsmessage.TypeA)
		return code != "silence"
	})
	if !a.IsValid() {
		t.Fatalf("%s does not resolve: %s", name, code)
	}
	return a.String()
}

// hello is the first flight of TLS for a server name; empty: without one.
func hello(t *testing.T, name string) string {
	t.Helper()
	ours, theirs := net.Pipe()
	defer ours.Close()
	go func() {
		c := tls.Client(theirs, &tls.Config{ServerName: name, InsecureSkipVerify: true})
		_ = c.Handshake()
		_ = theirs.Close()
	}()
	_ = ours.SetReadDeadline(time.Now().Add(5 * time.Second))
	head := make([]byte, 5)
	if _, err := io.ReadFull(ours, head); err != nil {
		t.Fatal(err)
	}
	body := make([]byte, int(head[3])<<8|int(head[4]))
	if _, err := io.ReadFull(ours, body); err != nil {
		t.Fatal(err)
	}
	return hex.EncodeToString(append(head, body...))
}

func text(lines ...string) string {
	return hex.EncodeToString([]byte(strings.Join(lines, "\r\n") + "\r\n\r\n"))
}

func get(host, path string) string { return text("GET "+path+" HTTP/1.1", "Host: "+host) }

// socks5 is the greeting, and the request to connect, by name or by address.
func socks5(host string, port uint16) (greeting, connect string) {
	var b bytes.Buffer
	b.Write([]byte{5, 1, 0})
	if a, err := netip.ParseAddr(host); err == nil {
		kind := byte(1)
		if a.Is6() {
			kind = 4
		}
		b.WriteByte(kind)
		b.Write(a.AsSlice())
	} else {
		b.Write([]byte{3, byte(len(host))})
		b.WriteString(host)
	}
	b.Write([]byte{byte(port >> 8), byte(port)})
	return "050100", hex.EncodeToString(b.Bytes())
}

func itoa(n uint16) string { return strconv.Itoa(int(n)) }
