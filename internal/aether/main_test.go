package aether

import (
	"context"
	"crypto/ecdsa"
	"crypto/elliptic"
	"crypto/rand"
	"crypto/tls"
	"crypto/x509"
	"crypto/x509/pkix"
	"encoding/pem"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"math/big"
	"net"
	"net/http"
	"net/netip"
	"os"
	"os/exec"
	"os/signal"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"

	"github.com/miekg/dns"

	sandseav1 "github.com/sandsea/sandsea/api/sandsea/v1"
	"github.com/sandsea/sandsea/internal/aether/config"
	"github.com/sandsea/sandsea/internal/aether/flowlog"
	"github.com/sandsea/sandsea/internal/aether/wire"
	"github.com/sandsea/sandsea/internal/linux/link"
	"github.com/sandsea/sandsea/internal/linux/netns"
	"github.com/sandsea/sandsea/internal/linux/nft"
	"github.com/sandsea/sandsea/internal/linux/scm"
	"github.com/sandsea/sandsea/internal/linux/transparent"
	"github.com/sandsea/sandsea/internal/policy"
	"github.com/sandsea/sandsea/internal/testkit/require"
	"github.com/sandsea/sandsea/internal/testkit/wait"
)

// The tests run in a network namespace of their own, in which these are local: it stands for the host and the world.
// Sandboxes are further namespaces, linked to a real gate.
var (
	world    = netip.MustParsePrefix("203.0.113.0/24")
	private  = netip.MustParsePrefix("10.9.0.0/24")
	resolver = netip.MustParseAddrPort("203.0.113.53:53")
)

const dataID = "0123456789abcdef"

// errIsolated is nil in the process that has the namespaces, and says why there are none otherwise.
var errIsolated = errors.New("not tried")

// TestMain is also the Aether process of the tests.
func TestMain(m *testing.M) {
	if os.Getenv("SANDSEA_TEST_AETHER") != "" {
		ctx, stop := signal.NotifyContext(context.Background(), syscall.SIGTERM)
		defer stop()
		dir := os.Getenv("SANDSEA_TEST_AETHER")
		err := Run(ctx, Config{
			Socket: filepath.Join(dir, "run", "aether.sock"), DataID: dataID, Data: dir, Gate: filepath.Join(dir, "run", "gate.netns"),
			Log: slog.New(slog.NewTextHandler(os.Stderr, nil)),
		})
		if err != nil {
			fmt.Fprintln(os.Stderr, err)
			os.Exit(1)
		}
		os.Exit(0)
	}
	if os.Getenv("SANDSEA_TEST_ISOLATED") == "" {
		os.Exit(isolate(m))
	}
	errIsolated = nil
	for _, args := range [][]string{
		{"link", "set", "lo", "up"},
		{"route", "add", "local", world.String(), "dev", "lo"},
		{"route", "add", "local", private.String(), "dev", "lo"},
	} {
		if out, err := exec.Command("ip", args...).CombinedOutput(); err != nil {
			fmt.Fprintf(os.Stderr, "ip %v: %v\n%s", args, err, out)
			os.Exit(1)
		}
	}
	os.Exit(m.Run())
}

// isolate runs the tests in namespaces of their own; without the right to make some, in ours, where most are skipped.
func isolate(m *testing.M) int {
	if os.Geteuid() != 0 {
		errIsolated = errors.New("not root")
		return m.Run()
	}
	if _, err := exec.LookPath("ip"); err != nil {
		errIsolated = err
		return m.Run()
	}
	exe, err := os.Executable()
	if err != nil {
		fmt.Fprintln(os.Stderr, err)
		return 1
	}
	cmd := exec.Command(exe, os.Args[1:]...)
	cmd.Env = append(os.Environ(), "SANDSEA_TEST_ISOLATED=1")
	cmd.Stdin, cmd.Stdout, cmd.Stderr = os.Stdin, os.Stdout, os.Stderr
	cmd.SysProcAttr = &syscall.SysProcAttr{
		Cloneflags: syscall.CLONE_NEWNET | syscall.CLONE_NEWNS, Unshareflags: syscall.CLONE_NEWNS, Pdeathsig: syscall.SIGKILL,
	}
	if err := cmd.Run(); err != nil {
		if ee, ok := errors.AsType[*exec.ExitError](err); ok {
			return ee.ExitCode()
		}
		errIsolated = err
		return m.Run()
	}
	return 0
}

// zone is the world's resolver: it answers what it was told, and writes down what it was asked.
type zone struct {
	mu    sync.Mutex
	hosts map[string][]string // guarded by mu: addresses, or one "cname:…"
	asked []string            // guarded by mu
}

func (z *zone) set(name string, addrs ...string) {
	z.mu.Lock()
	defer z.mu.Unlock()
	z.hosts[name] = addrs
}

func (z *zone) questions() []string {
	z.mu.Lock()
	defer z.mu.Unlock()
	return slices.Clone(z.asked)
}

func (z *zone) ServeDNS(w dns.ResponseWriter, q *dns.Msg) {
	z.mu.Lock()
	defer z.mu.Unlock()
	a := new(dns.Msg).SetReply(q)
	a.RecursionAvailable = true
	name := strings.ToLower(strings.TrimSuffix(q.Question[0].Name, "."))
	z.asked = append(z.asked, name)
	at, ok := z.hosts[name]
	if !ok {
		a.Rcode = dns.RcodeNameError
	}
	for len(at) == 1 && strings.HasPrefix(at[0], "cname:") {
		to := strings.TrimPrefix(at[0], "cname:")
		a.Answer = append(a.Answer, &dns.CNAME{Hdr: dns.RR_Header{Name: name + ".", Rrtype: dns.TypeCNAME, Class: 1, Ttl: 1}, Target: to + "."})
		name, at = to, z.hosts[to]
	}
	for _, s := range at {
		addr := netip.MustParseAddr(s)
		hdr := dns.RR_Header{Name: name + ".", Rrtype: dns.TypeA, Class: 1, Ttl: 1}
		switch {
		case addr.Is4() && q.Question[0].Qtype == dns.TypeA:
			a.Answer = append(a.Answer, &dns.A{Hdr: hdr, A: addr.AsSlice()})
		case addr.Is6() && q.Question[0].Qtype == dns.TypeAAAA:
			hdr.Rrtype = dns.TypeAAAA
			a.Answer = append(a.Answer, &dns.AAAA{Hdr: hdr, AAAA: addr.AsSlice()})
		}
	}
	_ = w.WriteMsg(a)
}

// rig is a node: a gate, sandboxes, and Aether, in this process or another.
type rig struct {
	t     testing.TB
	dir   string
	zone  *zone
	ns    *os.File // the gate
	links *link.Gate
	table *nft.Table
	p     *process // nil: another process
	edge  *wire.Conn
	roots *x509.CertPool
	ca    tls.Certificate
	next  uint32
	stop  func() error
}

// newRig makes a node. settings is its aether.toml, behind the resolvers.
func newRig(t testing.TB, settings string) *rig {
	t.Helper()
	r := newWorld(t, settings)
	r.begin()
	return r
}

func newWorld(t testing.TB, settings string) *rig {
	t.Helper()
	require.That(t, "namespaces", errIsolated)
	r := &rig{t: t, dir: t.TempDir(), zone: &zone{hosts: map[string][]string{}}}
	for d := r.dir; d != "/"; d = filepath.Dir(d) {
		_ = os.Chmod(d, 0o711) // for who has no rights; /tmp is wider already
		if filepath.Dir(d) == os.TempDir() {
			break
		}
	}
	if err := os.Mkdir(filepath.Join(r.dir, "run"), 0o700); err != nil {
		t.Fatal(err)
	}
	settings = fmt.Sprintf("resolvers = [%q]\n", resolver) + settings
	if err := os.WriteFile(filepath.Join(r.dir, config.FileName), []byte(settings), 0o600); err != nil {
		t.Fatal(err)
	}
	r.serveDNS()
	var err error
	gate := filepath.Join(r.dir, "run", "gate.netns")
	if r.ns, err = netns.Create(gate); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		r.ns.Close()
		if err := netns.Remove(gate); err != nil {
			t.Error(err)
		}
	})
	if r.links, err = link.Open(r.ns, wire.Gateway, wire.Mark, wire.Table); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = r.links.Close() })
	r.table, err = nft.Open(r.ns, nft.Layout{
		Gateway: wire.Gateway, Ports: []uint16{wire.PortDNS, wire.PortMirrors, wire.PortSOCKS, wire.PortProxy}, Names: wire.Names,
		Mark: wire.Mark, Proxy: netip.AddrPortFrom(netip.AddrFrom4([4]byte{127, 0, 0, 1}), wire.PortTransparent),
	})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = r.table.Close() })
	r.authority()
	return r
}

func (r *rig) serveDNS() {
	r.t.Helper()
	pc, err := net.ListenPacket("udp", resolver.String())
	if err != nil {
		r.t.Fatal(err)
	}
	ln, err := net.Listen("tcp", resolver.String())
	if err != nil {
		r.t.Fatal(err)
	}
	var servers sync.WaitGroup
	for _, s := range []*dns.Server{{PacketConn: pc, Handler: r.zone}, {Listener: ln, Handler: r.zone}} {
		servers.Go(func() { _ = s.ActivateAndServe() })
		r.t.Cleanup(func() { _ = s.Shutdown() })
	}
	r.t.Cleanup(func() { _, _ = pc.Close(), ln.Close() })
}

// authority makes the one that the world's hosts have their certificates of.
func (r *rig) authority() {
	r.t.Helper()
	key, err := ecdsa.GenerateKey(elliptic.P256(), rand.Reader)
	if err != nil {
		r.t.Fatal(err)
	}
	t := &x509.Certificate{
		SerialNumber: big.NewInt(1), Subject: pkix.Name{CommonName: "the world"}, NotBefore: time.Now().Add(-time.Hour),
		NotAfter: time.Now().Add(time.Hour), IsCA: true, BasicConstraintsValid: true, KeyUsage: x509.KeyUsageCertSign,
	}
	der, err := x509.CreateCertificate(rand.Reader, t, t, key.Public(), key)
	if err != nil {
		r.t.Fatal(err)
	}
	cert, err := x509.ParseCertificate(der)
	if err != nil {
		r.t.Fatal(err)
	}
	r.ca = tls.Certificate{Certificate: [][]byte{der}, PrivateKey: key, Leaf: cert}
	r.roots = x509.NewCertPool()
	r.roots.AddCert(cert)
}

// certificate makes one of the world's authority.
func (r *rig) certificate(names ...string) tls.Certificate {
	r.t.Helper()
	key, err := ecdsa.GenerateKey(elliptic.P256(), rand.Reader)
	if err != nil {
		r.t.Fatal(err)
	}
	t := &x509.Certificate{
		SerialNumber: big.NewInt(2), DNSNames: names, NotBefore: time.Now().Add(-time.Hour), NotAfter: time.Now().Add(time.Hour),
	}
	der, err := x509.CreateCertificate(rand.Reader, t, r.ca.Leaf, key.Public(), r.ca.PrivateKey)
	if err != nil {
		r.t.Fatal(err)
	}
	return tls.Certificate{Certificate: [][]byte{der}, PrivateKey: key}
}

// begin runs Aether in this process, as far as that goes without giving up its rights, and connects as the edge.
func (r *rig) begin() {
	r.t.Helper()
	cfg := Config{
		Socket: filepath.Join(r.dir, "run", "aether.sock"), DataID: dataID, Data: r.dir, Gate: filepath.Join(r.dir, "run", "gate.netns"),
		Log: slog.New(slog.NewTextHandler(os.Stderr, nil)),
	}
	settings, err := config.Load(filepath.Join(r.dir, config.FileName))
	if err != nil {
		r.t.Fatal(err)
	}
	sockets, err := openGate(cfg.Gate)
	if err != nil {
		r.t.Fatal(err)
	}
	p, err := newProcess(cfg, settings, r.roots)
	if err != nil {
		r.t.Fatal(err)
	}
	r.p = p
	p.services.Use(nil) // there are none, until a test says so
	dbg, err := listenDebug(filepath.Join(r.dir, "run", "aether-debug.sock"))
	if err != nil {
		r.t.Fatal(err)
	}
	ln, err := scm.Listen(cfg.Socket)
	if err != nil {
		r.t.Fatal(err)
	}
	ctx, cancel := context.WithCancelCause(context.Background())
	done := make(chan error, 1)
	go func() { done <- p.serve(ctx, ln, sockets, dbg) }()
	r.stop = sync.OnceValue(func() error {
		cancel(errors.New("the test ends"))
		select {
		case err := <-done:
			_ = ln.Close()
			p.close()
			return err
		case <-time.After(20 * time.Second):
			return errors.New("Aether does not end")
		}
	})
	r.t.Cleanup(func() {
		if err := r.stop(); err != nil {
			r.t.Error(err)
		}
	})
	r.connect()
}

// connect connects as the edge.
func (r *rig) connect() {
	r.t.Helper()
	c, err := wire.Dial(r.t.Context(), filepath.Join(r.dir, "run", "aether.sock"), dataID)
	if err != nil {
		r.t.Fatal(err)
	}
	c.ServeUDP(func(at netip.AddrPort) (*os.File, error) { return transparent.Foreign(r.ns, at) })
	r.edge = c
	r.t.Cleanup(func() { _ = c.Close() })
}

// box is a sandbox: a network namespace behind the gate.
type box struct {
	r    *rig
	ns   *os.File
	desc wire.Sandbox
}

// sandbox makes one with rules of one phase.
func (r *rig) sandbox(p policy.Policy) *box {
	r.t.Helper()
	if p.Start == "" {
		p.Start = p.Phases[0].Name
	}
	r.next++
	ns, err := netns.New()
	if err != nil {
		r.t.Fatal(err)
	}
	r.t.Cleanup(func() { ns.Close() })
	addr := netip.AddrFrom4([4]byte{100, 64, 2, byte(r.next)})
	if err := r.links.Attach(ns, r.next, addr); err != nil {
		r.t.Fatal(err)
	}
	b := &box{r: r, ns: ns, desc: wire.Sandbox{
		ID: fmt.Sprintf("s%d", r.next), Project: "p", Addr: addr, Policy: p, Phase: p.Start,
	}}
	b.put(p, p.Start)
	return b
}

// allow is a policy of one phase with these rules.
func allow(rules ...policy.Rule) policy.Policy {
	return policy.Policy{Phases: []policy.Phase{{Name: "agent", Rules: rules}}}
}

func domain(name string) policy.Rule { return policy.Rule{Domain: name} }

// put puts a policy in force, as the edge does when it opens: Aether first, then the walls.
func (b *box) put(p policy.Policy, phase string) {
	b.r.t.Helper()
	b.desc.Policy, b.desc.Phase = p, phase
	if err := b.r.edge.Put(b.r.t.Context(), b.desc); err != nil {
		b.r.t.Fatal(err)
	}
	w := policy.Compile(p, phase, nil)
	var openings []nft.Opening
	for _, o := range w.Openings {
		if !o.Prefix.Addr().Is4() {
			continue
		}
		last := o.Prefix.Addr().As4()
		for bit := o.Prefix.Bits(); bit < 32; bit++ {
			last[bit/8] |= 0x80 >> (bit % 8)
		}
		proto := uint8(syscall.IPPROTO_TCP)
		if o.Protocol == policy.UDP {
			proto = syscall.IPPROTO_UDP
		}
		openings = append(openings, nft.Opening{
			From: o.Prefix.Addr(), To: netip.AddrFrom4(last), First: o.Ports.First, Last: o.Ports.Last, Protocol: proto,
		})
	}
	if err := b.r.table.Put(b.desc.Addr, true, openings); err != nil {
		b.r.t.Fatal(err)
	}
}

// dial connects from inside the sandbox.
func (b *box) dial(network, addr string) (net.Conn, error) {
	ctx, stop := context.WithTimeout(b.r.t.Context(), 10*time.Second)
	defer stop()
	return netns.Dial(ctx, b.ns, network, addr)
}

// ask asks the resolver that the sandbox sees.
func (b *box) ask(name string, kind uint16) (*dns.Msg, error) {
	c, err := b.dial("udp", netip.AddrPortFrom(wire.Gateway, wire.PortDNS).String())
	if err != nil {
		return nil, err
	}
	defer c.Close()
	_ = c.SetDeadline(time.Now().Add(20 * time.Second))
	q := new(dns.Msg).SetQuestion(dns.Fqdn(name), kind)
	conn := &dns.Conn{Conn: c}
	if err := conn.WriteMsg(q); err != nil {
		return nil, err
	}
	return conn.ReadMsg()
}

var errRefused = errors.New("the resolver refuses")

// resolve gives the address of a name as the sandbox sees it.
func (b *box) resolve(name string) (netip.Addr, error) {
	a, err := b.ask(name, dns.TypeA)
	if err != nil {
		return netip.Addr{}, err
	}
	if a.Rcode == dns.RcodeRefused {
		return netip.Addr{}, errRefused
	}
	if len(a.Answer) != 1 {
		return netip.Addr{}, fmt.Errorf("answer %v", a)
	}
	addr, _ := netip.AddrFromSlice(a.Answer[0].(*dns.A).A)
	return addr, nil
}

// connect does what a program does: resolves, and dials what it got.
func (b *box) connect(hostport string) (net.Conn, error) {
	host, port, err := net.SplitHostPort(hostport)
	if err != nil {
		return nil, err
	}
	addr, err := netip.ParseAddr(host)
	if err != nil {
		if addr, err = b.resolve(host); err != nil {
			return nil, err
		}
	}
	c, err := b.dial("tcp", net.JoinHostPort(addr.String(), port))
	if err == nil {
		_ = c.SetDeadline(time.Now().Add(20 * time.Second))
	}
	return c, err
}

// must is connect that cannot fail.
func (b *box) must(hostport string) net.Conn {
	b.r.t.Helper()
	c, err := b.connect(hostport)
	if err != nil {
		b.r.t.Fatalf("connect to %s: %v", hostport, err)
	}
	b.r.t.Cleanup(func() { c.Close() })
	return c
}

// fails gives the error with which a connection does not come to be, or ends before a byte comes.
func (b *box) fails(hostport string) error {
	c, err := b.connect(hostport)
	if err != nil {
		return err
	}
	defer c.Close()
	return say(c)
}

// say sends a byte and waits for one.
func say(c net.Conn) error {
	// A reset is told once: to the write, if it came before.
	if _, err := c.Write([]byte{0}); err != nil {
		return err
	}
	_, err := io.ReadFull(c, make([]byte, 1))
	return err
}

// client makes an HTTP client of the sandbox, which trusts the world's hosts.
func (b *box) client() *http.Client {
	t := &http.Transport{
		DialContext:     func(_ context.Context, _, addr string) (net.Conn, error) { return b.connect(addr) },
		TLSClientConfig: &tls.Config{RootCAs: b.r.roots}, ForceAttemptHTTP2: true,
	}
	b.r.t.Cleanup(t.CloseIdleConnections)
	return &http.Client{Transport: t, Timeout: 20 * time.Second}
}

// get gives status and body.
func get(t testing.TB, c *http.Client, url string) (int, string) {
	t.Helper()
	resp, err := c.Get(url)
	if err != nil {
		t.Fatal(err)
	}
	defer resp.Body.Close()
	body, err := io.ReadAll(resp.Body)
	if err != nil {
		t.Fatal(err)
	}
	return resp.StatusCode, string(body)
}

// host is a host of the world: what listens there, and under which names.
func (r *rig) host(addr string, names ...string) net.Listener {
	r.t.Helper()
	ap := netip.MustParseAddrPort(addr)
	for _, n := range names {
		r.zone.set(n, ap.Addr().String())
	}
	ln, err := net.Listen("tcp", addr)
	if err != nil {
		r.t.Fatal(err)
	}
	r.t.Cleanup(func() { ln.Close() })
	return ln
}

// web serves HTTP on a listener.
func (r *rig) web(ln net.Listener, h http.Handler) {
	srv := &http.Server{Handler: h, ErrorLog: slog.NewLogLogger(slog.DiscardHandler, slog.LevelError)}
	done := make(chan struct{})
	go func() {
		defer close(done)
		_ = srv.Serve(ln)
	}()
	r.t.Cleanup(func() {
		_ = srv.Close()
		<-done
	})
}

// secure serves HTTPS for the names, with HTTP/2.
func (r *rig) secure(ln net.Listener, h http.Handler, names ...string) {
	r.t.Helper()
	r.web(tls.NewListener(ln, &tls.Config{
		Certificates: []tls.Certificate{r.certificate(names...)}, NextProtos: []string{"h2", "http/1.1"},
	}), h)
}

// echo serves a listener with what it is sent, and ends when the client has.
func (r *rig) echo(ln net.Listener) {
	var open sync.WaitGroup
	open.Go(func() {
		for {
			c, err := ln.Accept()
			if err != nil {
				return
			}
			open.Go(func() {
				defer c.Close()
				// Not spliced, for which every connection would hold a pipe.
				_, _ = io.Copy(struct{ io.Writer }{c}, struct{ io.Reader }{c})
			})
		}
	})
	r.t.Cleanup(func() {
		ln.Close()
		open.Wait()
	})
}

// events reads the sandbox's flow log until one matches.
func (b *box) events(match func(*sandseav1.NetworkEvent) bool) *sandseav1.NetworkEvent {
	b.r.t.Helper()
	var got *sandseav1.NetworkEvent
	var seen []*sandseav1.NetworkEvent
	ok := wait.For(20*time.Second, func() bool {
		var err error
		if seen, _, _, err = flowlog.Read(filepath.Join(b.r.dir, "flows"), b.desc.ID, 0, 1000); err != nil {
			b.r.t.Fatal(err)
		}
		for _, e := range seen {
			if match(e) {
				got = e
				return true
			}
		}
		return false
	})
	if !ok {
		b.r.t.Fatalf("no such event among %d: %v", len(seen), seen)
	}
	return got
}

// denied waits for a denial by that rule.
func (b *box) denied(rule string) *sandseav1.NetworkEvent {
	b.r.t.Helper()
	return b.events(func(e *sandseav1.NetworkEvent) bool { return e.GetDenied() && e.GetRule() == rule })
}

// certPool reads certificates.
func certPool(t testing.TB, text []byte) *x509.CertPool {
	t.Helper()
	block, _ := pem.Decode(text)
	if block == nil {
		t.Fatalf("no PEM: %q", text)
	}
	p := x509.NewCertPool()
	p.AppendCertsFromPEM(text)
	return p
}

// samePublicKey compares the keys of two certificates.
func samePublicKey(t testing.TB, a, b []byte) bool {
	t.Helper()
	var keys []*ecdsa.PublicKey
	for _, text := range [][]byte{a, b} {
		block, _ := pem.Decode(text)
		if block == nil {
			t.Fatalf("no PEM: %q", text)
		}
		c, err := x509.ParseCertificate(block.Bytes)
		if err != nil {
			t.Fatal(err)
		}
		keys = append(keys, c.PublicKey.(*ecdsa.PublicKey))
	}
	return keys[0].Equal(keys[1])
}
