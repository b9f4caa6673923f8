package demands

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"net"
	"sync"
	"testing"
	"time"

	"golang.org/x/sync/errgroup"

	"github.com/sandsea/sandsea/api/errdefs"
	sandseav1 "github.com/sandsea/sandsea/api/sandsea/v1"
	"github.com/sandsea/sandsea/client"
	"github.com/sandsea/sandsea/internal/testkit/wait"
)

// TestLiveManyProcessesSpeakAtOnce: 64 conversations over standard streams, each by its own offsets.
func TestLiveManyProcessesSpeakAtOnce(t *testing.T) {
	t.Parallel()
	sb := open(t)
	const many, rounds = 64, 5
	ctx := within(t, 180*time.Second)
	var g errgroup.Group
	for i := range many {
		g.Go(func() error {
			var number, sent int64
			var got []byte
			said := 0
			say := func() (err error) {
				line := fmt.Appendf(nil, "%d says %d\n", i, said)
				said++
				sent, err = sb.SendInput(ctx, number, sent, line)
				return err
			}
			for e, err := range sb.Start(ctx, &sandseav1.StartRequest{Command: client.Argv("cat"), Stdin: true}) {
				if err != nil {
					return fmt.Errorf("process %d: %w", i, err)
				}
				if p := e.GetStarted(); p != nil {
					number = p.GetNumber()
					err = say()
				}
				if d := e.GetData(); d != nil {
					got = append(got, d.GetData()...)
					if bytes.Count(got, []byte("\n")) == said && said < rounds {
						err = say()
					} else if bytes.Count(got, []byte("\n")) == rounds {
						err = sb.CloseInput(ctx, number)
					}
				}
				if err != nil {
					return fmt.Errorf("process %d: %w", i, err)
				}
				if p := e.GetExited(); p != nil && p.GetResult().GetExitCode() != 0 {
					return fmt.Errorf("process %d: %v", i, p)
				}
			}
			var want []byte
			for n := range rounds {
				want = fmt.Appendf(want, "%d says %d\n", i, n)
			}
			if !bytes.Equal(got, want) {
				return fmt.Errorf("process %d: %q", i, got)
			}
			return nil
		})
	}
	if err := g.Wait(); err != nil {
		t.Error(err)
	}
}

// TestLiveALosslessReaderSeesEveryByteOfAGigabyteLine: one line of 1 GiB without a line end, longer than anything that is
// kept of it, goes to a reader who pauses in the middle.
func TestLiveALosslessReaderSeesEveryByteOfAGigabyteLine(t *testing.T) {
	t.Parallel()
	sb := open(t, func(s *sandseav1.SandboxSpec) { s.Limits.OutputBytes = 8 << 20 })
	const total = 1 << 30
	// Bytes that are no text: a pattern whose period is no power of two.
	pattern := make([]byte, 65521)
	for i := range pattern {
		pattern[i] = byte(i * 7)
		if pattern[i] == '\n' {
			pattern[i] = 0xff
		}
	}
	if _, err := sb.WriteFile(within(t, 30*time.Second), &sandseav1.WriteFileHeader{Path: "/tmp/pattern"},
		bytes.NewReader(bytes.Repeat(pattern, 64))); err != nil {
		t.Fatal(err)
	}
	req := &sandseav1.StartRequest{
		Command:  client.Shell(fmt.Sprintf("while cat /tmp/pattern; do :; done 2>/dev/null | head -c %d", total)),
		Lossless: true,
	}
	var next, number int64
	var end *sandseav1.Process
	paused := false
	for e, err := range sb.Start(within(t, 300*time.Second), req) {
		if err != nil {
			t.Fatal(err)
		}
		if p := e.GetStarted(); p != nil {
			number = p.GetNumber()
		}
		if g := e.GetGap(); g != nil {
			t.Fatalf("a lossless reader sees a gap: %v", g)
		}
		if d := e.GetData(); d.GetStream() == stdout {
			if d.GetOffset() != next {
				t.Fatalf("a piece at %d, want %d", d.GetOffset(), next)
			}
			for data := d.GetData(); len(data) > 0; {
				at := int(next % int64(len(pattern)))
				n := min(len(data), len(pattern)-at)
				if !bytes.Equal(data[:n], pattern[at:at+n]) {
					t.Fatalf("other bytes at %d", next)
				}
				data, next = data[n:], next+int64(n)
			}
			if next > 100<<20 && !paused {
				paused = true
				// The command comes to a stand: what is written beyond the reader stays within the window of 64 MiB and what
				// lies in the sockets between.
				var before, after int64
				still := wait.For(30*time.Second, func() bool {
					before = after
					after = peekSize(t, sb, number, next)
					return after == before
				})
				if !still || after-next > 96<<20 {
					t.Errorf("the command ran on while its reader stood at %d: %d written", next, after)
				}
			}
		}
		end = e.GetExited()
	}
	if r := end.GetResult(); next != total || r.GetStdoutBytes() != total || r.GetExitCode() != 0 {
		t.Errorf("%d bytes, %v", next, r)
	}
}

// peekSize is how much of a stream is recorded by now.
func peekSize(t testing.TB, sb *client.Sandbox, number, from int64) (to int64) {
	t.Helper()
	to = from
	for e, err := range sb.Attach(within(t, 60*time.Second), &sandseav1.AttachRequest{Number: number, StdoutOffset: from, NoFollow: true}) {
		if err != nil {
			t.Fatal(err)
		}
		if d := e.GetData(); d.GetStream() == stdout {
			to = d.GetOffset() + int64(len(d.GetData()))
		}
	}
	return to
}

// TestLiveOutputIsCountedExactlyThoughItIsNotKept: a reader without that right sees a gap, and no byte is counted wrong.
func TestLiveOutputIsCountedExactlyThoughItIsNotKept(t *testing.T) {
	t.Parallel()
	sb := open(t, func(s *sandseav1.SandboxSpec) { s.Limits.OutputBytes = 4 << 20 })
	const total = 96<<20 + 12345
	n := start(t, sb, &sandseav1.StartRequest{Command: client.Shell(fmt.Sprintf("head -c %d /dev/zero; head -c 777 /dev/zero >&2", total))})
	var last *sandseav1.Process
	for e, err := range sb.Attach(within(t, 120*time.Second), &sandseav1.AttachRequest{Number: n}) {
		if err != nil {
			t.Fatal(err)
		}
		last = e.GetExited()
	}
	got := attach(t, sb, &sandseav1.AttachRequest{Number: n})
	r := last.GetResult()
	if got.at[stdout] != total || got.gaps[stdout] == 0 || r.GetStdoutBytes() != total || r.GetStderrBytes() != 777 || !r.GetTruncated() {
		t.Errorf("%d told of, %d of it gaps, %v", got.at[stdout], got.gaps[stdout], r)
	}
	if bytes.Trim(got.data[stdout], "\x00") != nil && len(bytes.Trim(got.data[stdout], "\x00")) > 0 {
		t.Error("bytes that nobody wrote")
	}
}

// TestLiveABackgroundProcessOutlivesItsCallAndStaysAttachable.
func TestLiveABackgroundProcessOutlivesItsCallAndStaysAttachable(t *testing.T) {
	t.Parallel()
	sb := open(t)
	res := run(t, sb, client.Shell("(while [ ! -e /tmp/go ]; do sleep 0.05; done; echo later; sleep 1000) & echo now"))
	if string(res.GetStdout()) != "now\n" || res.GetResult().GetExitCode() != 0 {
		t.Fatalf("%q, %v", res.GetStdout(), res.GetResult())
	}
	sh(t, sb, "touch /tmp/go")
	await(t, sb, res.GetNumber(), "now\nlater\n")
	ctx := within(t, 20*time.Second)
	if err := sb.Signal(ctx, res.GetNumber(), 9, true); err != nil {
		t.Errorf("end what it left: %v", err)
	}
	gone(t, sb, "sleep 1000")
	if got := peek(t, sb, res.GetNumber()); string(got.data[stdout]) != "now\nlater\n" || got.end.GetResult().GetExitCode() != 0 {
		t.Errorf("afterwards: %q, %v", got.data[stdout], got.end)
	}
}

// TestLiveABrokenConnectionIsTakenUpAgain: every byte comes once, the breaks are told, and the end is the process's own.
func TestLiveABrokenConnectionIsTakenUpAgain(t *testing.T) {
	t.Parallel()
	s := serve(t)
	p := newCutter(t, s.Addr())
	c, err := client.New(client.Config{URL: "http://" + p.addr(), TokenFile: s.Dir + "/admin.token"})
	if err != nil {
		t.Fatal(err)
	}
	sb := c.Sandbox(open(t).ID)
	const lines = 400
	req := &sandseav1.StartRequest{
		Command: client.Shell(fmt.Sprintf("i=0; while [ $i -lt %d ]; do echo line $i; i=$((i+1)); usleep 5000; done; exit 11", lines)),
		Key:     "k",
	}
	var r record
	r.data, r.gaps, r.at = map[sandseav1.Stream][]byte{}, map[sandseav1.Stream]int64{}, map[sandseav1.Stream]int64{}
	breaks := 0
	seen := 0
	for e, err := range sb.Follow(within(t, 120*time.Second), req, func(err error) {
		if breaks++; !errors.Is(err, errdefs.Unavailable) {
			t.Errorf("told of %v", err)
		}
	}) {
		if err != nil {
			t.Fatal(err)
		}
		r.take(t, e)
		if n := bytes.Count(r.data[stdout], []byte("\n")); n/100 > seen {
			seen = n / 100
			p.cut()
		}
	}
	var want []byte
	for i := range lines {
		want = fmt.Appendf(want, "line %d\n", i)
	}
	if !bytes.Equal(r.data[stdout], want) || r.end.GetResult().GetExitCode() != 11 || breaks < 2 {
		t.Errorf("%d bytes of %d, %d breaks, %v", len(r.data[stdout]), len(want), breaks, r.end)
	}
	// Without that, a cut is an error and no end.
	n := start(t, sb, &sandseav1.StartRequest{Command: client.Shell("echo x; sleep 1000")})
	for e, err := range sb.Attach(within(t, 30*time.Second), &sandseav1.AttachRequest{Number: n}) {
		if e.GetData() != nil {
			p.cut()
		}
		if e.GetExited() != nil {
			t.Errorf("an end was invented: %v", e)
		}
		if err != nil && !errors.Is(err, errdefs.Unavailable) {
			t.Errorf("a cut stream: %v", err)
		}
	}
}

// cutter passes connections on and breaks them when told to.
type cutter struct {
	ln net.Listener

	mu    sync.Mutex
	conns map[net.Conn]struct{} // guarded by mu
}

func newCutter(t testing.TB, to string) *cutter {
	t.Helper()
	ln, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	c := &cutter{ln: ln, conns: map[net.Conn]struct{}{}}
	var wg sync.WaitGroup
	pass := func(from net.Conn) {
		defer from.Close()
		up, err := (&net.Dialer{}).DialContext(context.Background(), "tcp", to)
		if err != nil {
			return
		}
		defer up.Close()
		c.mu.Lock()
		c.conns[from], c.conns[up] = struct{}{}, struct{}{}
		c.mu.Unlock()
		var both sync.WaitGroup
		both.Go(func() { _, _ = io.Copy(up, from); _ = up.Close() })
		both.Go(func() { _, _ = io.Copy(from, up); _ = from.Close() })
		both.Wait()
		c.mu.Lock()
		delete(c.conns, from)
		delete(c.conns, up)
		c.mu.Unlock()
	}
	wg.Go(func() {
		for {
			conn, err := ln.Accept()
			if err != nil {
				return
			}
			wg.Go(func() { pass(conn) })
		}
	})
	t.Cleanup(func() { _ = ln.Close(); c.cut(); wg.Wait() })
	return c
}

func (c *cutter) addr() string { return c.ln.Addr().String() }

// cut breaks every connection there is.
func (c *cutter) cut() {
	c.mu.Lock()
	defer c.mu.Unlock()
	for conn := range c.conns {
		if t, ok := conn.(*net.TCPConn); ok {
			_ = t.SetLinger(0)
		}
		_ = conn.Close()
	}
}
