package aether

import (
	"fmt"
	"io"
	"net"
	"os"
	"slices"
	"testing"
	"time"

	"golang.org/x/sync/errgroup"

	"github.com/sandsea/sandsea/internal/policy"
)

// BenchmarkConnect measures a connection with one round trip: from this namespace to the host, and from a sandbox through
// Aether, to a name and with TLS's first message. What the second takes more is what Aether adds.
func BenchmarkConnect(b *testing.B) {
	r := newRig(b, "")
	r.echo(r.host("203.0.113.1:7000", "a.example"))
	r.echo(r.host("203.0.113.1:443"))
	box := r.sandbox(allow(policy.Rule{Domain: "a.example", Ports: []policy.Ports{{First: 443, Last: 443}, {First: 7000, Last: 7000}}}))
	addr, err := box.resolve("a.example")
	if err != nil {
		b.Fatal(err)
	}
	hello := clientHello("a.example")
	for _, c := range []struct {
		name string
		dial func(addr string) (net.Conn, error)
		addr string
		say  []byte
	}{
		{"direct", func(a string) (net.Conn, error) { return net.Dial("tcp", a) }, "203.0.113.1:7000", []byte{0}},
		{"raw", func(a string) (net.Conn, error) { return box.dial("tcp", a) }, addr.String() + ":7000", []byte{0}},
		{"tls", func(a string) (net.Conn, error) { return box.dial("tcp", a) }, addr.String() + ":443", hello},
	} {
		b.Run(c.name, func(b *testing.B) {
			var took []time.Duration
			got := make([]byte, len(c.say))
			for b.Loop() {
				began := time.Now()
				conn, err := c.dial(c.addr)
				if err != nil {
					b.Fatal(err)
				}
				_, _ = conn.Write(c.say)
				if _, err := io.ReadFull(conn, got); err != nil {
					b.Fatal(err)
				}
				took = append(took, time.Since(began))
				conn.Close()
			}
			slices.Sort(took)
			b.ReportMetric(float64(took[len(took)/2].Microseconds()), "µs/p50")
		})
	}
}

// BenchmarkThroughput measures one connection that sends, and as many that receive as there are.
func BenchmarkThroughput(b *testing.B) {
	r := newRig(b, "")
	ln := r.host("203.0.113.1:7000", "a.example")
	go func() {
		for {
			c, err := ln.Accept()
			if err != nil {
				return
			}
			go func() {
				defer c.Close()
				first := make([]byte, 1)
				if _, err := c.Read(first); err != nil {
					return
				}
				if first[0] == 'd' {
					buf := make([]byte, 1<<20)
					for {
						if _, err := c.Write(buf); err != nil {
							return
						}
					}
				}
				_, _ = io.Copy(io.Discard, c)
			}()
		}
	}()
	box := r.sandbox(allow(policy.Rule{Domain: "a.example", Ports: ports(7000)}))
	for _, way := range []string{"down", "up"} {
		b.Run(way, func(b *testing.B) {
			c, err := box.connect("a.example:7000")
			if err != nil {
				b.Fatal(err)
			}
			defer c.Close()
			_ = c.SetDeadline(time.Time{})
			_, _ = c.Write([]byte(way[:1]))
			buf := make([]byte, 1<<20)
			b.SetBytes(1 << 20)
			for b.Loop() {
				if way == "down" {
					_, err = io.ReadFull(c, buf)
				} else {
					_, err = c.Write(buf)
				}
				if err != nil {
					b.Fatal(err)
				}
			}
		})
	}
}

// BenchmarkFlows opens many connections at once through an Aether of its own, and measures what each costs it while it is
// idle.
func BenchmarkFlows(b *testing.B) {
	const flows = 5000
	r := newWorld(b, fmt.Sprintf("[limits]\nflows = %d\n", flows))
	r.echo(r.host("203.0.113.1:7000", "a.example"))
	cmd := r.start()
	p := allow(policy.Rule{Domain: "a.example", Ports: ports(7000)})
	p.Limits.Flows = flows
	box := r.sandbox(p)
	addr, err := box.resolve("a.example")
	if err != nil {
		b.Fatal(err)
	}
	before := resident(b, cmd.Process.Pid)
	for b.Loop() {
		began := time.Now()
		conns := make([]net.Conn, flows)
		var open errgroup.Group
		open.SetLimit(64)
		for i := range conns {
			open.Go(func() (err error) {
				if conns[i], err = box.dial("tcp", addr.String()+":7000"); err != nil {
					return err
				}
				_ = conns[i].SetDeadline(time.Now().Add(20 * time.Second))
				return say(conns[i])
			})
		}
		if err := open.Wait(); err != nil {
			b.Fatal(err)
		}
		b.ReportMetric(time.Since(began).Seconds(), "s/open")
		b.ReportMetric(float64(resident(b, cmd.Process.Pid)-before)/flows/1024, "KiB/flow")
		began = time.Now()
		box.put(allow(domain("b.example")), "agent")
		b.ReportMetric(time.Since(began).Seconds(), "s/cut")
		for _, c := range conns {
			if err := say(c); err == nil {
				b.Fatal("a connection outlives its policy")
			}
			c.Close()
		}
		box.put(p, "agent")
		if addr, err = box.resolve("a.example"); err != nil {
			b.Fatal(err)
		}
	}
}

// resident memory of a process.
func resident(t testing.TB, pid int) int64 {
	t.Helper()
	text, err := os.ReadFile(fmt.Sprintf("/proc/%d/statm", pid))
	if err != nil {
		t.Fatal(err)
	}
	var all, pages int64
	if _, err := fmt.Sscan(string(text), &all, &pages); err != nil {
		t.Fatal(err)
	}
	return pages * int64(os.Getpagesize())
}
