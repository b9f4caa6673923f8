package rubygems_test

import (
	"fmt"
	"net"
	"net/url"
	"runtime"
	"strings"
	"testing"
	"time"

	"github.com/sandsea/sandsea/internal/aether/mirror/source/sourcetest"
	"github.com/sandsea/sandsea/internal/policy"
)

// Whoever asks for the list of all gems and does not read it holds memory of Aether's: not one list for each request.
func TestSlowReadersShareOneListOfAllGems(t *testing.T) {
	up, m := start(t, policy.World{AsOf: sourcetest.Day("2024-06-01")})
	var all strings.Builder
	all.WriteString("created_at: 2026-01-01T00:00:00Z\n---\n")
	for i := range 100_000 {
		fmt.Fprintf(&all, "a-gem-with-a-name-of-some-length-%d 1.0.0,1.0.1,1.0.2,1.0.3,1.0.4 %032d\n", i, i)
	}
	up.Put("/versions", all.String())
	m.Get("/versions")
	before := heap()
	u, err := url.Parse(m.URL)
	if err != nil {
		t.Fatal(err)
	}
	const readers = 12
	for range readers {
		c, err := net.Dial("tcp", u.Host)
		if err != nil {
			t.Fatal(err)
		}
		defer c.Close()
		_ = c.(*net.TCPConn).SetReadBuffer(4096)
		fmt.Fprintf(c, "GET /rubygems/versions HTTP/1.1\r\nHost: %s\r\n\r\n", u.Host)
		b := make([]byte, 1)
		_ = c.SetReadDeadline(time.Now().Add(30 * time.Second))
		if _, err := c.Read(b); err != nil {
			t.Fatal(err)
		}
	}
	if grown := heap() - before; grown > int64(2*all.Len()) {
		t.Errorf("%d readers of a list of %d MiB hold %d MiB", readers, all.Len()>>20, grown>>20)
	}
}

func heap() int64 {
	runtime.GC()
	var s runtime.MemStats
	runtime.ReadMemStats(&s)
	return int64(s.HeapAlloc)
}
