package aether

import (
	"crypto/tls"
	"encoding/binary"
	"errors"
	"fmt"
	"io"
	"net/http"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"syscall"
	"testing"
	"time"

	sandseav1 "github.com/sandsea/sandsea/api/sandsea/v1"
	"github.com/sandsea/sandsea/internal/aether/mirror"
	"github.com/sandsea/sandsea/internal/policy"
)

func deniedUDP(e *sandseav1.NetworkEvent) bool { return e.GetDenied() && e.GetProtocol() == "udp" }

// trust makes the client one that trusts the sandbox's own authority alone.
func (b *box) trust(t *testing.T, c *http.Client) *http.Client {
	t.Helper()
	pem, err := b.r.edge.CA(t.Context(), b.desc.ID)
	if err != nil {
		t.Fatal(err)
	}
	c.Transport.(*http.Transport).TLSClientConfig.RootCAs = certPool(t, pem)
	return c
}

func TestInspectedTLS(t *testing.T) {
	dir := t.TempDir()
	secret := filepath.Join(dir, "secret")
	if err := os.WriteFile(secret, []byte("Bearer hush\n"), 0o600); err != nil {
		t.Fatal(err)
	}
	r := newRig(t, fmt.Sprintf("[secrets.model]\nprojects = [\"*\"]\nhosts = [\"api.example\", \"both.example\"]\nheader = \"Authorization\"\nvalue_file = %q\n", secret))
	var seen []string
	api := http.HandlerFunc(func(w http.ResponseWriter, req *http.Request) {
		seen = append(seen, req.Header.Get("Authorization"))
		fmt.Fprintf(w, "%s %s", req.Proto, req.Host)
	})
	ln := r.host("203.0.113.1:443", "api.example", "other.example", "wild.example", "neighbour.example")
	r.secure(ln, api, "api.example", "other.example", "wild.example", "neighbour.example")
	r.web(r.host("203.0.113.1:80"), api)
	r.secure(r.host("203.0.113.2:443", "bad.example"), api, "someone.else")
	p := allow(
		policy.Rule{Domain: "api.example", Secret: "model"}, domain("other.example"), policy.Rule{Domain: "wild.example", Secret: "model"},
		domain("bad.example"),
	)
	p.InspectTLS = true
	b := r.sandbox(p)
	c := b.trust(t, b.client())
	one := func(url string) (status int, body, authorization string) {
		t.Helper()
		seen = nil
		status, body = get(t, c, url)
		if len(seen) > 0 {
			authorization = seen[0]
		}
		return status, body, authorization
	}
	if status, body, auth := one("https://api.example/"); status != 200 || body != "HTTP/2.0 api.example" || auth != "Bearer hush" {
		t.Errorf("api: %d %q %q", status, body, auth)
	}
	if status, _, auth := one("http://api.example/"); status != 200 || auth != "" {
		t.Errorf("api without TLS: %d %q", status, auth)
	}
	if status, _, auth := one("https://other.example/"); status != 200 || auth != "" {
		t.Errorf("other: %d %q", status, auth)
	}
	if status, body, _ := one("https://wild.example/"); status != 403 || !strings.Contains(body, "does not go to wild.example") {
		t.Errorf("a host that the secret is not for: %d %q", status, body)
	}
	if status, body, _ := one("https://bad.example/"); status != 502 || !strings.Contains(body, "certificate") {
		t.Errorf("a host with the certificate of another: %d %q", status, body)
	}
	// Host and server name must agree inside, too.
	req, _ := http.NewRequest(http.MethodGet, "https://api.example/", nil)
	req.Host = "neighbour.example"
	if resp, err := c.Do(req); err != nil || resp.StatusCode != http.StatusForbidden || resp.Header.Get("Sandsea-Rule") != "host" {
		t.Errorf("another host: %v, %v", resp, err)
	}
	// A client that trusts the world does not trust Aether, and another sandbox does not either.
	if _, err := b.client().Get("https://api.example/"); err == nil {
		t.Error("the sandbox's authority is trusted by all")
	}
	other := r.sandbox(p)
	if _, err := other.trust(t, b.client()).Get("https://api.example/"); err == nil {
		t.Error("the authority of another sandbox is trusted")
	}
	conn := b.must("api.example:443")
	if err := tls.Client(conn, &tls.Config{ServerName: "neighbour.example", InsecureSkipVerify: true}).HandshakeContext(t.Context()); !errors.Is(err, syscall.ECONNRESET) {
		t.Errorf("another server name: %v", err)
	}
	c.CloseIdleConnections() // their records come at their end
	logged, err := os.ReadDir(filepath.Join(r.dir, "flows"))
	if err != nil || len(logged) == 0 {
		t.Fatalf("%v, %v", logged, err)
	}
	b.events(func(e *sandseav1.NetworkEvent) bool {
		if strings.Contains(fmt.Sprint(e), "hush") {
			t.Errorf("the secret is in the flow log: %v", e)
		}
		return e.GetName() == "bad.example" && e.GetPort() == 443 && strings.Contains(e.GetError(), "certificate")
	})
}

// shelfOf is a package service of one page.
type shelfOf struct{ name, host string }

func (s shelfOf) Name() string    { return s.name }
func (s shelfOf) Hosts() []string { return []string{s.host} }

func (s shelfOf) Match(_, host, path string) (string, bool) {
	rest, ok := strings.CutPrefix(path, "/simple/")
	return "/" + rest, ok && host == s.host
}

func (s shelfOf) ServeHTTP(w http.ResponseWriter, r *http.Request) {
	c := mirror.CallerOf(r.Context())
	if strings.HasSuffix(r.URL.Path, "/hidden") {
		mirror.Deny(w, c, mirror.Artefact{Kind: "file", Name: "hidden"}, policy.Verdict{Rule: "as_of 2024-01-01", Reason: "it is newer"})
		return
	}
	n, _ := fmt.Fprintf(w, "%s %s %s %s %s", s.name, r.URL.EscapedPath(), c.Base, c.Phase, c.World.AsOf.Format(time.DateOnly))
	c.Report(mirror.Artefact{Kind: "list", Name: "page", Bytes: int64(n), Source: "cache"})
}

func TestPackageServices(t *testing.T) {
	r := newRig(t, "")
	r.p.services.Use([]mirror.Service{shelfOf{"pypi", "index.example"}, shelfOf{"npm", "registry.example"}})
	r.secure(r.host("203.0.113.1:443", "index.example"), hello("world"), "index.example")
	r.web(r.host("203.0.113.1:80"), hello("world"))
	policyOf := func(change func(*policy.Policy)) policy.Policy {
		p := allow(domain("unrelated.example"))
		p.Services = map[string]bool{"pypi": true, "npm": false}
		p.AsOf = time.Date(2024, 1, 2, 0, 0, 0, 0, time.UTC)
		change(&p)
		return p
	}
	b := r.sandbox(policyOf(func(*policy.Policy) {}))
	for url, want := range map[string]string{
		"http://100.64.0.1/pypi/six/":                  "200 pypi /six/ http://100.64.0.1/pypi agent 2024-01-02",
		"http://aether.internal/pypi/a%2fb":            "200 pypi /a%2fb http://aether.internal/pypi agent 2024-01-02",
		"http://aether.internal/pypi/hidden":           "403 it is newer (rule as_of 2024-01-01)\n",
		"http://aether.internal/npm/x":                 "403 rule service npm rejects npm (rule service npm)\n",
		"http://index.example/simple/six/":             "200 pypi /six/ http://index.example/.aether/pypi agent 2024-01-02",
		"http://index.example/.aether/pypi/six.tar.gz": "200 pypi /six.tar.gz http://index.example/.aether/pypi agent 2024-01-02",
		"http://index.example/project/six":             "403 pypi has nothing at this place (rule service pypi)\n",
	} {
		if status, body := get(t, b.client(), url); fmt.Sprint(status, " ", body) != want {
			t.Errorf("%s: %d %q, want %q", url, status, body, want)
		}
		if status, body := get(t, b.throughProxy(), url); fmt.Sprint(status, " ", body) != want {
			t.Errorf("%s through the proxy: %d %q, want %q", url, status, body, want)
		}
	}
	if _, err := b.resolve("registry.example"); !errors.Is(err, errRefused) {
		t.Errorf("the host of a rejected service resolves: %v", err)
	}
	if _, err := b.client().Get("https://index.example/simple/six/"); !errors.Is(err, syscall.ECONNRESET) && !errors.Is(err, io.EOF) {
		t.Errorf("TLS that nobody reads: %v", err)
	}
	b.denied("service pypi")
	e := b.events(func(e *sandseav1.NetworkEvent) bool { return e.GetService() == "pypi" && e.GetName() == "page" })
	if e.GetKind() != sandseav1.NetworkEventKind_NETWORK_EVENT_KIND_ARTEFACT || e.GetSource() != "cache" {
		t.Errorf("event %v", e)
	}

	inspecting := r.sandbox(policyOf(func(p *policy.Policy) { p.InspectTLS = true }))
	status, body := get(t, inspecting.trust(t, inspecting.client()), "https://index.example/simple/six/")
	if want := "pypi /six/ https://index.example/.aether/pypi agent 2024-01-02"; status != 200 || body != want {
		t.Errorf("inspected: %d %q", status, body)
	}

	// A rule that allows the host by name does not lead past a bounded world, but does where the world has no bounds.
	named := func(p *policy.Policy) {
		p.Services = nil
		p.Phases[0].Rules = []policy.Rule{domain("*")}
	}
	bounded := r.sandbox(policyOf(named))
	if status, body := get(t, bounded.client(), "http://index.example/simple/six/"); status != 403 {
		t.Errorf("a bounded world by name: %d %q", status, body)
	}
	if err := bounded.fails("index.example:443"); err == nil {
		t.Error("a bounded world by name, with TLS")
	}
	free := r.sandbox(policyOf(func(p *policy.Policy) {
		named(p)
		p.AsOf = time.Time{}
	}))
	if status, body := get(t, free.client(), "https://index.example/x"); status != 200 || body != "world: index.example /x" {
		t.Errorf("a free world by name: %d %q", status, body)
	}
}

// TestPackagesCountThroughTheProxy asks services until the sandbox's bytes are used up.
func TestPackagesCountThroughTheProxy(t *testing.T) {
	r := newRig(t, "")
	r.p.services.Use([]mirror.Service{shelfOf{"pypi", "index.example"}})
	for _, url := range []string{"http://100.64.0.1/pypi/six/", "http://index.example/simple/six/"} {
		p := policy.Policy{Services: map[string]bool{"pypi": true}, Phases: []policy.Phase{{Name: "agent"}}, Limits: policy.Limits{Bytes: 1000}}
		b := r.sandbox(p)
		c := b.throughProxy()
		served := int64(0)
		for range 100 {
			resp, err := c.Get(url)
			if err != nil {
				break // cut
			}
			body, _ := io.ReadAll(resp.Body)
			_ = resp.Body.Close()
			if resp.StatusCode == http.StatusOK {
				served += int64(len(body))
			}
		}
		if served == 0 || served > 1100 { // the answer that crosses the line is told whole
			t.Errorf("%s: %d bytes were served", url, served)
		}
		b.denied("limit bytes")
		if n, err := r.edge.Drop(t.Context(), b.desc.ID); err != nil || n.Received < served {
			t.Errorf("%s: %d bytes were served, and counted %+v, %v", url, served, n, err)
		}
	}
}

func TestRepositories(t *testing.T) {
	r := newRig(t, "")
	ln := r.host("203.0.113.1:443", "git.example", "open.example")
	r.secure(ln, hello("git"), "git.example", "open.example")
	r.web(r.host("203.0.113.1:80"), hello("git"))
	r.secure(r.host("203.0.113.1:8443"), hello("git"), "git.example")
	p := allow(
		policy.Rule{Service: "git:git.example/org/bad", Reject: true}, policy.Rule{Service: "git:git.example/org"},
		policy.Rule{Service: "git:git.example:8443/port"}, domain("open.example"),
	)
	p.Deny = []string{"git:open.example/pallets/flask"}
	p.InspectTLS = true
	p, err := p.Validate()
	if err != nil {
		t.Fatal(err)
	}
	b := r.sandbox(p)
	c := b.trust(t, b.client())
	for _, want := range []struct {
		method, url string
		status      int
	}{
		{"GET", "https://git.example/org/repo.git/info/refs?service=git-upload-pack", 200},
		{"POST", "https://git.example/org/repo.git/git-upload-pack", 200},
		{"GET", "https://git.example/org/repo/objects/ab/0123456789abcdef0123456789abcdef012345", 200},
		{"GET", "https://git.example:8443/port/repo/info/refs?service=git-upload-pack", 200},
		{"GET", "https://git.example:8443/port/repo/archive/main.zip", 403},
		{"GET", "https://git.example:8443/org/repo/HEAD", 403},
		{"GET", "https://git.example/port/repo/HEAD", 403},
		{"GET", "https://git.example/org/repo/info/refs?service=git-receive-pack", 403},
		{"POST", "https://git.example/org/repo/git-receive-pack", 403},
		{"GET", "https://git.example/org/repo/archive/main.zip", 403},
		{"GET", "https://git.example/org/bad.git/info/refs?service=git-upload-pack", 403},
		{"GET", "https://git.example/org/bad/info/refs?service=git-upload-pack", 403},
		{"GET", "https://git.example/other/repo/info/refs?service=git-upload-pack", 403},
		{"GET", "https://git.example/org/../other/repo/info/refs?service=git-upload-pack", 403},
		{"GET", "https://git.example/org/%2e%2e/other/repo/info/refs?service=git-upload-pack", 403},
		{"GET", "https://git.example/", 403},
		{"GET", "https://open.example/", 200},
		{"GET", "https://open.example/pallets/click/archive/main.zip", 200},
		{"GET", "https://open.example/pallets/flask/archive/main.zip", 403},
		{"GET", "https://open.example/Pallets/Flask.git/info/refs?service=git-upload-pack", 403},
		{"GET", "https://open.example/pallets/%66lask", 403},
		{"GET", "https://open.example//pallets//flask", 403},
		{"GET", "http://open.example/pallets/flask", 403},
	} {
		req, err := http.NewRequest(want.method, want.url, nil)
		if err != nil {
			t.Fatal(err)
		}
		resp, err := c.Do(req)
		if err != nil {
			t.Fatalf("%s: %v", want.url, err)
		}
		_ = resp.Body.Close()
		if resp.StatusCode != want.status {
			t.Errorf("%s %s: %d, want %d (rule %q)", want.method, want.url, resp.StatusCode, want.status, resp.Header.Get("Sandsea-Rule"))
		}
	}
	if err := b.fails("git.example:80"); !errors.Is(err, syscall.ECONNRESET) {
		t.Errorf("git without TLS: %v", err)
	}
	// Unseen, none of it passes.
	p.InspectTLS = false
	b.put(p, "agent")
	for _, name := range []string{"git.example", "open.example"} {
		err := tls.Client(b.must(name+":443"), &tls.Config{ServerName: name, RootCAs: r.roots}).HandshakeContext(t.Context())
		if !errors.Is(err, syscall.ECONNRESET) {
			t.Errorf("%s unseen: %v", name, err)
		}
	}
	b.denied("service git:git.example")
	b.denied("deny git:open.example/pallets/flask")
}

// retryRandom marks a HelloRetryRequest.
var retryRandom = []byte{
	0xCF, 0x21, 0xAD, 0x74, 0xE5, 0x9A, 0x61, 0x11, 0xBE, 0x1D, 0x8C, 0x02, 0x1E, 0x65, 0xB8, 0x91,
	0xC2, 0xA2, 0x11, 0x16, 0x7A, 0xBB, 0x8C, 0x5E, 0x07, 0x9E, 0x09, 0xE2, 0xC8, 0xA8, 0x33, 0x9C,
}

// clientHello makes one that asks for a name.
func clientHello(name string) []byte {
	sni := slices.Concat(u16(len(name)+3), []byte{0}, u16(len(name)), []byte(name))
	ext := slices.Concat([]byte{0, 0}, u16(len(sni)), sni)
	body := slices.Concat([]byte{3, 3}, make([]byte, 32), []byte{0, 0, 2, 0x13, 1, 1, 0}, u16(len(ext)), ext)
	msg := slices.Concat([]byte{1, 0}, u16(len(body)), body)
	return slices.Concat([]byte{22, 3, 1}, u16(len(msg)), msg)
}

func u16(n int) []byte { return binary.BigEndian.AppendUint16(nil, uint16(n)) }

func TestTheSecondClientHelloNamesTheSameServer(t *testing.T) {
	r := newRig(t, "")
	ln := r.host("203.0.113.1:443", "a.example")
	got := make(chan []byte, 1)
	go func() {
		for {
			c, err := ln.Accept()
			if err != nil {
				return
			}
			_, _ = io.ReadFull(c, make([]byte, len(clientHello("a.example"))))
			hello := slices.Concat([]byte{2, 0, 0, 40, 3, 3}, retryRandom, []byte{0, 0x13, 1, 0, 0, 0})
			_, _ = c.Write(slices.Concat([]byte{22, 3, 3}, u16(len(hello)), hello))
			all, _ := io.ReadAll(c)
			got <- all
			c.Close()
		}
	}()
	b := r.sandbox(allow(domain("a.example")))
	ccs := []byte{20, 3, 3, 0, 1, 1}
	early := []byte{23, 3, 3, 0, 3, 1, 2, 3}
	for name, want := range map[string]bool{"a.example": true, "neighbour.example": false} {
		c := b.must("a.example:443")
		// All at once: nothing may slip by while the answer is on its way.
		second := slices.Concat(early, ccs, clientHello(name), early)
		_, _ = c.Write(slices.Concat(clientHello("a.example"), second))
		_, _ = io.ReadFull(c, make([]byte, 49))
		if want {
			c.(interface{ CloseWrite() error }).CloseWrite()
		}
		passed := <-got
		if want && string(passed) != string(second) {
			t.Errorf("%s: %x passed, want %x", name, passed, second)
		}
		if !want && strings.Contains(string(passed), name) {
			t.Errorf("%s passed: %x", name, passed)
		}
		c.Close()
	}
	b.denied("server name")
}
