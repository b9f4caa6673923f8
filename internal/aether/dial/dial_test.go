package dial_test

import (
	"bufio"
	"context"
	"encoding/base64"
	"errors"
	"fmt"
	"io"
	"net"
	"net/http"
	"net/netip"
	"net/url"
	"strconv"
	"sync"
	"sync/atomic"
	"testing"

	"github.com/sandsea/sandsea/api/errdefs"
	"github.com/sandsea/sandsea/internal/aether/dial"
)

// zone resolves what it holds, and counts.
type zone struct {
	hosts map[string][]string
	asked atomic.Int64
	wait  chan struct{} // nil: answers at once
}

func (z *zone) LookupNetIP(ctx context.Context, _, host string) ([]netip.Addr, error) {
	z.asked.Add(1)
	if z.wait != nil {
		select {
		case <-z.wait:
		case <-ctx.Done():
			return nil, ctx.Err()
		}
	}
	all, ok := z.hosts[host]
	if !ok {
		return nil, &net.DNSError{Err: "no such host", Name: host, IsNotFound: true}
	}
	if all == nil {
		return nil, &net.DNSError{Err: "server misbehaving", Name: host, IsTemporary: true}
	}
	var out []netip.Addr
	for _, s := range all {
		out = append(out, netip.MustParseAddr(s))
	}
	return out, nil
}

func anywhere(netip.Addr) error { return nil }

func echo(t *testing.T, addr string) uint16 {
	t.Helper()
	ln, err := net.Listen("tcp", addr)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { ln.Close() })
	go func() {
		for {
			c, err := ln.Accept()
			if err != nil {
				return
			}
			go func() {
				defer c.Close()
				_, _ = io.Copy(c, c)
			}()
		}
	}()
	return uint16(ln.Addr().(*net.TCPAddr).Port)
}

func TestName(t *testing.T) {
	port := echo(t, "127.0.0.1:0")
	z := &zone{hosts: map[string][]string{
		"a.example.":      {"127.0.0.1"},
		"second.example.": {"127.0.0.2", "127.0.0.1"}, // nobody listens on the first
		"six.example.":    {"::1", "127.0.0.1"},
		"mixed.example.":  {"10.0.0.1", "127.0.0.1"},
		"bad.example.":    {"10.0.0.1", "10.0.0.2"},
		"mapped.example.": {"::ffff:10.0.0.1"},
		"empty.example.":  {},
		"broken.example.": nil,
		"none.example.":   {"127.0.0.3"},
	}}
	d := dial.New(dial.Config{Resolver: z})
	refusal := errdefs.New(errdefs.Denied, "address", "is denied")
	check := func(a netip.Addr) error {
		if netip.MustParsePrefix("10.0.0.0/8").Contains(a) {
			return refusal
		}
		return nil
	}
	for name, want := range map[string]error{
		"a": nil, "second": nil, "six": nil, "mixed": nil, "bad": refusal, "mapped": refusal,
		"empty": errdefs.NotFound, "absent": errdefs.NotFound, "broken": errdefs.Unavailable, "none": errdefs.Unavailable,
	} {
		c, err := d.Name(t.Context(), name+".example", port, check)
		if !errors.Is(err, want) {
			t.Errorf("%s: %v, want %v", name, err, want)
		}
		if err == nil {
			_, _ = c.Write([]byte{7})
			if _, err := io.ReadFull(c, make([]byte, 1)); err != nil {
				t.Errorf("%s: %v", name, err)
			}
			c.Close()
		}
	}
	if _, err := d.Addr(t.Context(), netip.MustParseAddrPort("10.0.0.1:80"), check); !errors.Is(err, errdefs.Denied) {
		t.Errorf("a denied address: %v", err)
	}
	ctx, cancel := context.WithCancelCause(t.Context())
	cause := errors.New("enough")
	cancel(cause)
	if _, err := d.Name(ctx, "a.example", port, check); !errors.Is(err, cause) {
		t.Errorf("a caller that left: %v", err)
	}
}

func TestOneQuestionForAll(t *testing.T) {
	z := &zone{hosts: map[string][]string{"a.example.": {"127.0.0.1"}}, wait: make(chan struct{})}
	d := dial.New(dial.Config{Resolver: z})
	// Who asked first leaves; the others get their answer.
	first, cancel := context.WithCancelCause(t.Context())
	gone := make(chan error, 1)
	go func() {
		_, err := d.Lookup(first, "a.example", anywhere)
		gone <- err
	}()
	for z.asked.Load() == 0 {
		select {
		case <-t.Context().Done():
			t.Fatal("nobody asks")
		default:
		}
	}
	cancel(errors.New("left"))
	if err := <-gone; err == nil {
		t.Error("who left got an answer")
	}
	var all sync.WaitGroup
	for range 10 {
		all.Go(func() {
			if got, err := d.Lookup(t.Context(), "a.example", anywhere); err != nil || len(got) != 1 {
				t.Errorf("%v, %v", got, err)
			}
		})
	}
	close(z.wait)
	all.Wait()
	if n := z.asked.Load(); n != 1 {
		t.Errorf("asked %d times", n)
	}
}

func TestTheUpstreamProxy(t *testing.T) {
	port := echo(t, "127.0.0.1:0")
	ln, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { ln.Close() })
	user := "Basic " + base64.StdEncoding.EncodeToString([]byte("u:p"))
	go func() {
		for {
			c, err := ln.Accept()
			if err != nil {
				return
			}
			go func() {
				defer c.Close()
				req, err := http.ReadRequest(bufio.NewReader(c))
				if err != nil || req.Method != http.MethodConnect {
					return
				}
				switch {
				case req.Header.Get("Proxy-Authorization") != user:
					fmt.Fprint(c, "HTTP/1.1 407 Who are you\r\n\r\n")
				case req.Host == "early.example:"+strconv.Itoa(int(port)):
					// The first bytes come with the answer.
					fmt.Fprint(c, "HTTP/1.1 200 OK\r\n\r\nhello")
					_, _ = io.Copy(io.Discard, c)
				case req.Host == "a.example:"+strconv.Itoa(int(port)):
					fmt.Fprint(c, "HTTP/1.1 200 OK\r\n\r\n")
					_, _ = io.Copy(c, c)
				default:
					fmt.Fprint(c, "HTTP/1.1 403 No\r\nContent-Length: 0\r\n\r\n")
				}
			}()
		}
	}()
	proxy := func(user *url.Userinfo) *dial.Dialer {
		// Names are the proxy's: nobody is asked here.
		return dial.New(dial.Config{Resolver: &zone{}, Proxy: &url.URL{Scheme: "http", Host: ln.Addr().String(), User: user}})
	}
	d := proxy(url.UserPassword("u", "p"))
	for name, want := range map[string]string{"a.example": "x", "early.example": "hello"} {
		c, err := d.Name(t.Context(), name, port, anywhere)
		if err != nil {
			t.Fatal(err)
		}
		_, _ = c.Write([]byte("x"))
		got := make([]byte, len(want))
		if _, err := io.ReadFull(c, got); err != nil || string(got) != want {
			t.Errorf("%s: %q, %v", name, got, err)
		}
		c.Close()
	}
	if _, err := d.Name(t.Context(), "b.example", port, anywhere); !errors.Is(err, errdefs.Unavailable) {
		t.Errorf("a tunnel that the proxy refuses: %v", err)
	}
	if _, err := proxy(nil).Name(t.Context(), "a.example", port, anywhere); !errors.Is(err, errdefs.Unavailable) {
		t.Errorf("without its password: %v", err)
	}
	denied := errdefs.New(errdefs.Denied, "address", "is denied")
	if _, err := d.Addr(t.Context(), netip.MustParseAddrPort("10.0.0.1:80"), func(netip.Addr) error { return denied }); !errors.Is(err, denied) {
		t.Errorf("a denied address: %v", err)
	}
}
