package netload

import (
	"context"
	"errors"
	"net"
	"net/netip"
	"os"
	"strings"
	"testing"
	"time"

	"golang.org/x/net/dns/dnsmessage"

	"github.com/sandsea/sandsea/internal/testkit/leak"
	"github.com/sandsea/sandsea/internal/testkit/wait"
)

func TestMain(m *testing.M) { os.Exit(leak.Main(m)) }

const limit = 20 * time.Second

// pair is a far side and a caller, both here.
func pair(t *testing.T) (far *Far, line *Line, at, names netip.AddrPort) {
	t.Helper()
	ln, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	pc, err := net.ListenPacket("udp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	far = NewFar(ln, pc, netip.MustParseAddr("192.0.2.7"))
	orders, tell, err := os.Pipe()
	if err != nil {
		t.Fatal(err)
	}
	hear, reports, err := os.Pipe()
	if err != nil {
		t.Fatal(err)
	}
	ended := make(chan error, 1)
	go func() {
		err := Serve(context.Background(), orders, reports)
		_ = errors.Join(orders.Close(), reports.Close())
		ended <- err
	}()
	line = NewLine(tell, hear, func() error { return errors.Join(tell.Close(), <-ended, hear.Close()) })
	t.Cleanup(func() {
		if err := errors.Join(line.Close(), far.Close(), far.Close()); err != nil {
			t.Error(err)
		}
	})
	return far, line, netip.MustParseAddrPort(ln.Addr().String()), netip.MustParseAddrPort(pc.LocalAddr().String())
}

func TestACallerMeasuresWhatItIsTold(t *testing.T) {
	far, line, at, names := pair(t)
	for _, c := range []struct {
		order Order
		took  int
		bytes bool
		at    string
	}{
		{Order{Do: Resolve, To: names, Name: "far.bench.test"}, 1, false, "192.0.2.7"},
		{Order{Do: Connect, To: at, Name: "far.bench.test"}, 1, false, "invalid IP"},
		{Order{Do: Download, To: at, Name: "far.bench.test", N: 2, For: 500 * time.Millisecond}, 1, true, "invalid IP"},
		{Order{Do: Upload, To: at, Name: "far.bench.test", N: 2, For: 500 * time.Millisecond}, 1, true, "invalid IP"},
		{Order{Do: Hold, To: at, Name: "far.bench.test", N: 100}, 100, false, "invalid IP"},
	} {
		r, err := line.Do(c.order)
		if err != nil {
			t.Errorf("%s: %v", c.order.Do, err)
			continue
		}
		if len(r.Took) != c.took || (r.Bytes > 0) != c.bytes || r.At.String() != c.at {
			t.Errorf("%s: %d times, %d bytes, address %s", c.order.Do, len(r.Took), r.Bytes, r.At)
		}
		for _, d := range r.Took {
			if d <= 0 {
				t.Errorf("%s took %v", c.order.Do, d)
			}
		}
	}
	if !wait.For(limit, func() bool { return far.Open() == 100 }) {
		t.Errorf("%d connections are held", far.Open())
	}
	if _, err := line.Do(Order{Do: Release}); err != nil {
		t.Error(err)
	}
	if !wait.For(limit, func() bool { return far.Open() == 0 }) {
		t.Errorf("%d connections are left", far.Open())
	}
}

func TestWhatFailsIsReportedAndTheCallerGoesOn(t *testing.T) {
	far, line, at, _ := pair(t)
	if _, err := line.Do(Order{Do: Hold, To: at, Name: "far.bench.test", N: 3}); err != nil {
		t.Fatal(err)
	}
	if err := far.Close(); err != nil { // which cuts them
		t.Fatal(err)
	}
	for _, c := range []struct {
		order Order
		text  string
	}{
		{Order{Do: "dance", To: at}, "nothing that can be done"},
		{Order{Do: Connect, To: at, Name: "far.bench.test"}, "refused"},
		{Order{Do: Download, To: at, Name: "far.bench.test", N: 1, For: time.Millisecond}, "refused"},
		{Order{Do: Hold, To: at, Name: "far.bench.test", N: 100}, "refused"},
		{Order{Do: Release}, "held connection 0"},
	} {
		if _, err := line.Do(c.order); err == nil || !strings.Contains(err.Error(), c.text) {
			t.Errorf("%s: %v, want %q", c.order.Do, err, c.text)
		}
	}
}

func TestTheHelloIsWhatTLSSays(t *testing.T) {
	c := &caller{hellos: map[string][]byte{}}
	b, err := c.hello(t.Context(), "far.bench.test")
	if err != nil {
		t.Fatal(err)
	}
	// A handshake record with a ClientHello that has the server name in it.
	if b[0] != 22 || b[5] != 1 || len(b) != 5+int(b[3])<<8+int(b[4]) || !strings.Contains(string(b), "far.bench.test") {
		t.Errorf("%x", b)
	}
	if again, err := c.hello(t.Context(), "far.bench.test"); err != nil || &again[0] != &b[0] {
		t.Errorf("made twice, %v", err)
	}
}

func TestAnswerTo(t *testing.T) {
	at := netip.MustParseAddr("192.0.2.7")
	ask := func(typ dnsmessage.Type, change func(*dnsmessage.Message)) []byte {
		m := dnsmessage.Message{Header: dnsmessage.Header{ID: 9}, Questions: []dnsmessage.Question{{
			Name: dnsmessage.MustNewName("a.test."), Type: typ, Class: dnsmessage.ClassINET,
		}}}
		if change != nil {
			change(&m)
		}
		b, err := m.Pack()
		if err != nil {
			t.Fatal(err)
		}
		return b
	}
	for _, c := range []struct {
		name    string
		message []byte
		answers int // -1: no answer
	}{
		{"an address", ask(dnsmessage.TypeA, nil), 1},
		{"one of IPv6", ask(dnsmessage.TypeAAAA, nil), 0},
		{"an answer", ask(dnsmessage.TypeA, func(m *dnsmessage.Message) { m.Response = true }), -1},
		{"no question", ask(dnsmessage.TypeA, func(m *dnsmessage.Message) { m.Questions = nil }), -1},
		{"noise", []byte("noise"), -1},
		{"nothing", nil, -1},
	} {
		b, ok := answerTo(c.message, at)
		if ok != (c.answers >= 0) {
			t.Errorf("%s: answered: %v", c.name, ok)
			continue
		}
		var m dnsmessage.Message
		if ok && (m.Unpack(b) != nil || m.ID != 9 || !m.Response || len(m.Answers) != c.answers) {
			t.Errorf("%s: %+v", c.name, m)
		}
	}
}
