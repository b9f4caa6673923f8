package e2e

import (
	"bufio"
	"bytes"
	"context"
	"crypto/sha256"
	"errors"
	"fmt"
	"io"
	"net"
	"net/http"
	"os"
	"os/exec"
	"path/filepath"
	"strconv"
	"strings"
	"sync"
	"testing"
	"time"

	sandseav1 "github.com/sandsea/sandsea/api/sandsea/v1"
	"github.com/sandsea/sandsea/client"
	"github.com/sandsea/sandsea/internal/testkit/require"
	"github.com/sandsea/sandsea/internal/testkit/server"
	"github.com/sandsea/sandsea/internal/testkit/wait"
)

// endpointImage is busybox with the program of testdata/inside as /bin/inside.
const endpointImage = "inside"

// insideProgram builds testdata/inside.
var insideProgram = sync.OnceValues(func() (string, error) {
	dir, err := os.MkdirTemp("", "sandsea-inside-*")
	if err != nil {
		return "", err
	}
	defer os.RemoveAll(dir)
	out := filepath.Join(dir, "inside")
	cmd := exec.Command("go", "build", "-trimpath", "-o", out, "./testdata/inside")
	cmd.Env = append(os.Environ(), "CGO_ENABLED=0")
	if text, err := cmd.CombinedOutput(); err != nil {
		return "", fmt.Errorf("build testdata/inside: %w\n%s", err, text)
	}
	b, err := os.ReadFile(out)
	return string(b), err
})

// importInside makes the image of servers inside.
func importInside(t testing.TB, s *server.Server) {
	t.Helper()
	files, err := server.Busybox(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	program, err := insideProgram()
	if err != nil {
		t.Fatal(err)
	}
	files = append(files, server.File{Name: "bin/inside", Body: program, Mode: 0o755})
	if _, err := s.Import(within(t, time.Minute), endpointImage, files, nil); err != nil {
		t.Fatal(err)
	}
}

// endpoints is a sandbox on the shared server in which inside listens.
func endpoints(t testing.TB, listen ...string) *client.Sandbox {
	t.Helper()
	importInside(t, serve(t))
	sb := open(t, func(s *sandseav1.SandboxSpec) { s.Environment.Image = endpointImage })
	listens(t, sb, listen...)
	return sb
}

// listens starts inside and returns when it listens.
func listens(t testing.TB, sb *client.Sandbox, addresses ...string) {
	t.Helper()
	ctx := within(t, time.Minute)
	argv := append([]string{"/bin/inside"}, addresses...)
	var number int64
	for e, err := range sb.Start(ctx, &sandseav1.StartRequest{Detached: true, Command: &sandseav1.Command{Argv: argv}}) {
		if err != nil {
			t.Fatal(err)
		}
		number = e.GetStarted().GetNumber()
		break
	}
	for e, err := range sb.Attach(ctx, &sandseav1.AttachRequest{Number: number}) {
		if err != nil || e.GetExited() != nil {
			t.Fatalf("inside %v: %v, %v", addresses, e, err)
		}
		if strings.Contains(string(e.GetData().GetData()), "ready\n") {
			return
		}
	}
}

// door is an endpoint and who asks it.
type door struct {
	url, token string
	by         *http.Client
}

func doorTo(t testing.TB, sb *client.Sandbox, port int) door {
	t.Helper()
	e, err := sb.Endpoint(within(t, 20*time.Second), port, 0)
	if err != nil {
		t.Fatal(err)
	}
	var p http.Protocols
	p.SetHTTP1(true)
	tr := &http.Transport{Protocols: &p}
	t.Cleanup(tr.CloseIdleConnections)
	return door{e.GetUrl(), e.GetHeaders()["Sandsea-Endpoint-Token"], &http.Client{Transport: tr}}
}

// over is the same door in HTTP/2.
func (d door) h2(t testing.TB) door {
	var p http.Protocols
	p.SetUnencryptedHTTP2(true)
	tr := &http.Transport{Protocols: &p}
	t.Cleanup(tr.CloseIdleConnections)
	d.by = &http.Client{Transport: tr}
	return d
}

func (d door) try(ctx context.Context, method, path string, body io.Reader, header ...string) (*http.Response, error) {
	r, err := http.NewRequestWithContext(ctx, method, d.url+path, body)
	if err != nil {
		return nil, err
	}
	r.Header.Set("Sandsea-Endpoint-Token", d.token)
	for i := 0; i < len(header); i += 2 {
		r.Header.Set(header[i], header[i+1])
	}
	return d.by.Do(r)
}

func (d door) ask(t testing.TB, method, path string, body io.Reader, header ...string) *http.Response {
	t.Helper()
	resp, err := d.try(within(t, 5*time.Minute), method, path, body, header...)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = resp.Body.Close() })
	return resp
}

// get asks and gives status, kind of the platform's error, and the body.
func (d door) get(t testing.TB, path string) (status int, kind, body string) {
	t.Helper()
	resp := d.ask(t, http.MethodGet, path, nil)
	b, err := io.ReadAll(resp.Body)
	if err != nil {
		t.Fatal(err)
	}
	return resp.StatusCode, resp.Header.Get("Sandsea-Error"), string(b)
}

func TestEndpointsReachServersOnEveryAddress(t *testing.T) {
	t.Parallel()
	sb := endpoints(t, "127.0.0.1:8001", "0.0.0.0:8002", "[::1]:8003", "[::]:8004")
	for port := 8001; port <= 8004; port++ {
		d := doorTo(t, sb, port)
		status, _, body := d.get(t, "a/b?c=d")
		prefix := strings.TrimSuffix(d.url[strings.Index(d.url, "/endpoint/"):], "/")
		if status != http.StatusOK || !strings.HasPrefix(body, "HTTP/1.1 GET /a/b?c=d\n") || !strings.Contains(body, "X-Forwarded-Prefix: "+prefix) ||
			strings.Contains(body, d.token) {
			t.Errorf("port %d: %d %s", port, status, body)
		}
	}
	d := doorTo(t, sb, 8005)
	status, kind, body := d.get(t, "")
	if status != http.StatusBadGateway || kind != "unavailable" || !strings.Contains(body, "nobody listens at port 8005 yet") {
		t.Errorf("nobody: %d %s %s", status, kind, body)
	}
	listens(t, sb, "127.0.0.1:8005")
	if status, kind, body := d.get(t, ""); status != http.StatusOK || kind != "" {
		t.Errorf("now somebody: %d %s %s", status, kind, body)
	}
}

// TestEndpointsReachServersOnTheSandboxsOwnAddress listens at the address of the link alone.
func TestEndpointsReachServersOnTheSandboxsOwnAddress(t *testing.T) {
	importInside(t, serve(t))
	sb := open(t, func(s *sandseav1.SandboxSpec) {
		s.Environment.Image = endpointImage
		s.Network = &sandseav1.NetworkPolicy{Services: map[string]bool{"pypi": true}}
	})
	var own string
	shown := run(t, sb, &sandseav1.Command{Argv: []string{"ip", "-4", "-o", "addr", "show", "eth0"}})
	for line := range strings.Lines(string(shown.GetStdout())) {
		if _, rest, ok := strings.Cut(line, "inet "); ok {
			own, _, _ = strings.Cut(rest, "/")
		}
	}
	listens(t, sb, own+":8000")
	if status, _, body := doorTo(t, sb, 8000).get(t, ""); status != http.StatusOK {
		t.Errorf("%s:8000: %d %s", own, status, body)
	}
}

func TestEndpointsCarryEveryKindOfTraffic(t *testing.T) {
	t.Parallel()
	sb := endpoints(t, "127.0.0.1:8000")
	d := doorTo(t, sb, 8000)

	c, br := upgraded(t, d)
	for _, word := range []string{"ping", "pong"} {
		if _, err := io.WriteString(c, word); err != nil {
			t.Fatal(err)
		}
		if got, err := br.Peek(4); err != nil || string(got) != word {
			t.Fatalf("%q, %v", got, err)
		}
		_, _ = br.Discard(4)
	}
	if err := c.(*net.TCPConn).CloseWrite(); err != nil {
		t.Fatal(err)
	}
	if rest, err := io.ReadAll(br); err != nil || string(rest) != "bye" {
		t.Errorf("after one direction ended: %q, %v", rest, err)
	}

	for name, by := range map[string]door{"HTTP/1.1": d, "HTTP/2": d.h2(t)} {
		want := sha256.Sum256([]byte("body"))
		resp := by.ask(t, http.MethodPut, "digest", io.NopCloser(strings.NewReader("body")))
		b, err := io.ReadAll(resp.Body)
		if err != nil || string(b) != fmt.Sprintf("4 %x <nil>", want) || resp.Trailer.Get("X-Digest") != fmt.Sprintf("%x", want) {
			t.Errorf("%s: %s %v, %v", name, b, resp.Trailer, err)
		}
		began := time.Now()
		resp = by.ask(t, http.MethodGet, "events?pause_ms=600000", nil)
		line, err := bufio.NewReader(resp.Body).ReadString('\n')
		if err != nil || line != "data: first\n" || time.Since(began) > time.Minute {
			t.Errorf("%s: %q after %s, %v", name, line, time.Since(began), err)
		}
	}

	h2 := d.h2(t)
	up, write := io.Pipe()
	resp := make(chan *http.Response, 1)
	go func() {
		r, err := h2.try(within(t, time.Minute), http.MethodPost, "rpc.Test/Echo", up, "Content-Type", "application/grpc+proto", "TE", "trailers")
		if err != nil {
			t.Error(err)
		}
		resp <- r
	}()
	if _, err := io.WriteString(write, "one"); err != nil {
		t.Fatal(err)
	}
	r := <-resp
	if r == nil {
		return
	}
	defer r.Body.Close()
	buf := make([]byte, 3)
	for _, word := range []string{"one", "two"} { // both ways at once
		if _, err := io.ReadFull(r.Body, buf); err != nil || string(buf) != word {
			t.Fatalf("%q, %v", buf, err)
		}
		if word == "one" {
			_, _ = io.WriteString(write, "two")
		}
	}
	_ = write.Close()
	if rest, err := io.ReadAll(r.Body); err != nil || len(rest) > 0 || r.Header.Get("X-Proto") != "HTTP/2.0" || r.Trailer.Get("Grpc-Status") != "0" {
		t.Errorf("%q, %v, %v, %v", rest, err, r.Header, r.Trailer)
	}
	failed := h2.ask(t, http.MethodPost, "rpc.Test/Fail", strings.NewReader(""), "Content-Type", "application/grpc")
	if b, err := io.ReadAll(failed.Body); err != nil || len(b) > 0 || failed.Header.Get("Grpc-Status") != "5" {
		t.Errorf("%q, %v, %v", b, failed.Header, err)
	}
}

// upgraded opens a line through a door.
func upgraded(t testing.TB, d door) (net.Conn, *bufio.Reader) {
	t.Helper()
	host, path, _ := strings.Cut(strings.TrimPrefix(d.url, "http://"), "/")
	c, err := (&net.Dialer{}).DialContext(within(t, 20*time.Second), "tcp", host)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = c.Close() })
	fmt.Fprintf(c, "GET /%supgrade HTTP/1.1\r\nHost: x\r\nConnection: Upgrade\r\nUpgrade: echo\r\nSandsea-Endpoint-Token: %s\r\n\r\n", path, d.token)
	br := bufio.NewReader(c)
	resp, err := http.ReadResponse(br, nil)
	if err != nil || resp.StatusCode != http.StatusSwitchingProtocols {
		t.Fatal(resp, err)
	}
	return c, br
}

// pattern reads as n bytes of a pattern that shows every shift.
type pattern struct{ at, n int64 }

func (p *pattern) Read(b []byte) (int, error) {
	n := int(min(p.n-p.at, int64(len(b))))
	if n == 0 {
		return 0, io.EOF
	}
	for i := range b[:n] {
		b[i] = byte((p.at + int64(i)) >> 3)
	}
	p.at += int64(n)
	return n, nil
}

// same compares what it is given with the pattern.
type same struct{ want pattern }

func (s *same) Write(b []byte) (int, error) {
	buf := make([]byte, len(b))
	if _, err := io.ReadFull(&s.want, buf); err != nil {
		return 0, fmt.Errorf("more than was sent: %w", err)
	}
	if !bytes.Equal(buf, b) {
		return 0, fmt.Errorf("other bytes before %d", s.want.at)
	}
	return len(b), nil
}

func TestAGibibyteGoesThroughAnEndpointAndBack(t *testing.T) {
	const size = 1 << 30
	sb := endpoints(t, "127.0.0.1:8000")
	d := doorTo(t, sb, 8000)
	for name, by := range map[string]door{"HTTP/1.1": d, "HTTP/2": d.h2(t)} {
		before, began := resident(t, serve(t).Pid("up")), time.Now()
		resp := by.ask(t, http.MethodPost, "echo", &pattern{n: size})
		got := &same{pattern{n: size}}
		n, err := io.CopyBuffer(struct{ io.Writer }{got}, resp.Body, make([]byte, 1<<20))
		grown := resident(t, serve(t).Pid("up")) - before
		if err != nil || n != size || grown > 128<<20 {
			t.Errorf("%s: %d bytes, %v, the daemon grew by %d MiB", name, n, err, grown>>20)
		}
		t.Logf("%s: a gibibyte each way in %s, the daemon grew by %d MiB", name, time.Since(began).Round(time.Millisecond), grown>>20)
	}
}

// resident is how much memory a process holds.
func resident(t testing.TB, pid int) int64 {
	t.Helper()
	b, err := os.ReadFile(fmt.Sprintf("/proc/%d/status", pid))
	if err != nil {
		t.Fatal(err)
	}
	for line := range strings.Lines(string(b)) {
		if f := strings.Fields(line); f[0] == "VmRSS:" {
			kib, err := strconv.ParseInt(f[1], 10, 64)
			if err != nil {
				t.Fatal(err)
			}
			return kib << 10
		}
	}
	t.Fatalf("process %d has no memory", pid)
	return 0
}

// Silence cuts nothing: the servers have no limit on it (TestTheServerHasNoTimeLimitOnBodies), and 20 s are more than
// every limit that there is on headers, connects and idle connections.
func TestSilentStreamsOfEndpointsStay(t *testing.T) {
	t.Parallel()
	const silence = 20 * time.Second
	sb := endpoints(t, "127.0.0.1:8000")
	d := doorTo(t, sb, 8000)
	c, br := upgraded(t, d)
	var wg sync.WaitGroup
	defer wg.Wait()
	for name, by := range map[string]door{"HTTP/1.1": d, "HTTP/2": d.h2(t)} {
		wg.Go(func() {
			resp := by.ask(t, http.MethodGet, fmt.Sprintf("events?pause_ms=%d", silence.Milliseconds()), nil)
			lines := bufio.NewScanner(resp.Body)
			for _, want := range []string{"data: first", "", "data: second"} {
				if !lines.Scan() || lines.Text() != want {
					t.Errorf("%s: %q, want %q, %v", name, lines.Text(), want, lines.Err())
				}
			}
		})
	}
	wg.Wait()
	if _, err := io.WriteString(c, "still"); err != nil {
		t.Fatal(err)
	}
	if got, err := br.Peek(5); err != nil || string(got) != "still" {
		t.Errorf("an upgraded connection: %q, %v", got, err)
	}
}

func TestAnEndpointEndsWithItsSandbox(t *testing.T) {
	t.Parallel()
	sb := endpoints(t, "127.0.0.1:8000")
	d := doorTo(t, sb, 8000)
	resp := d.ask(t, http.MethodGet, "events?pause_ms=600000", nil)
	lines := bufio.NewReader(resp.Body)
	if line, err := lines.ReadString('\n'); err != nil || line != "data: first\n" {
		t.Fatal(line, err)
	}
	_, line := upgraded(t, d)
	if err := sb.Stop(within(t, time.Minute)); err != nil {
		t.Fatal(err)
	}
	// A stream that breaks looks broken.
	if rest, err := io.ReadAll(lines); err == nil {
		t.Errorf("the stream ended as if it were complete: %q", rest)
	}
	if b, err := line.ReadByte(); err == nil {
		t.Errorf("the line goes on: %q", b)
	}
	status, kind, body := d.get(t, "")
	if status != http.StatusGone || kind != "failed_precondition" || !strings.Contains(body, "stopped") {
		t.Errorf("afterwards: %d %s %s", status, kind, body)
	}
	if _, err := sb.Endpoint(within(t, 20*time.Second), 8000, 0); err == nil {
		t.Error("another endpoint of an ended sandbox")
	}
}

func TestInboundPortsAreThePhasesOwn(t *testing.T) {
	t.Parallel()
	importInside(t, serve(t))
	sb := open(t, func(s *sandseav1.SandboxSpec) {
		s.Environment.Image = endpointImage
		s.Network = &sandseav1.NetworkPolicy{Phases: []*sandseav1.NetworkPhase{
			{Name: "build", Inbound: []*sandseav1.PortRange{{First: 8000, Last: 8001}}}, {Name: "grade", InboundClosed: true},
		}}
	})
	listens(t, sb, "127.0.0.1:8001", "127.0.0.1:8002")
	in, out := doorTo(t, sb, 8001), doorTo(t, sb, 8002)
	if status, kind, body := in.get(t, ""); status != http.StatusOK {
		t.Errorf("a port of the phase: %d %s %s", status, kind, body)
	}
	if status, kind, body := out.get(t, ""); status != http.StatusForbidden || kind != "denied" || !strings.Contains(body, "8002") {
		t.Errorf("another port: %d %s %s", status, kind, body)
	}
	if _, err := sb.SetPhase(within(t, 20*time.Second), "grade"); err != nil {
		t.Fatal(err)
	}
	// Old connections are cut within 2 s.
	wait.Until(t, 30*time.Second, func() bool {
		status, kind, _ := in.get(t, "")
		return status == http.StatusForbidden && kind == "denied"
	}, "the closed phase holds for endpoints")
}

// Server and edge apart, so that one of them can be away.
func TestEndpointsOutliveTheirDaemons(t *testing.T) {
	require.Root(t)
	require.Feature(t, "bin:busybox")
	s := server.Start(t, server.Config{Daemon: "server", Args: []string{"--cluster-listen", freeAddress(t)}})
	edge := joined(t, s, "n1", 4)
	wait.Until(t, patience, func() bool {
		return nodes(t, s)["n1"].GetState() == sandseav1.NodeState_NODE_STATE_READY
	}, "the node is there")
	importInside(t, s)
	sb := openOn(t, s, func(sp *sandseav1.SandboxSpec) { sp.Environment.Image = endpointImage })
	listens(t, sb, "127.0.0.1:8000")
	d := doorTo(t, sb, 8000)
	works := func() {
		t.Helper()
		if status, kind, body := d.get(t, ""); status != http.StatusOK {
			t.Fatalf("%d %s %s", status, kind, body)
		}
	}
	works()
	if err := edge.Kill("up"); err != nil {
		t.Fatal(err)
	}
	if status, kind, body := d.get(t, ""); status != http.StatusServiceUnavailable || kind != "unavailable" {
		t.Errorf("without its node: %d %s %s", status, kind, body)
	}
	if err := edge.Up(within(t, time.Minute)); err != nil {
		t.Fatal(err)
	}
	wait.Until(t, patience, func() bool {
		status, _, _ := d.get(t, "")
		return status == http.StatusOK
	}, "the same address works again")
	if err := s.Kill("up"); err != nil {
		t.Fatal(err)
	}
	if resp, err := d.try(within(t, 5*time.Second), http.MethodGet, "", nil); err == nil {
		resp.Body.Close()
		t.Error("an answer without a server")
	}
	if err := s.Up(within(t, time.Minute)); err != nil {
		t.Fatal(err)
	}
	wait.Until(t, patience, func() bool {
		resp, err := d.try(within(t, 5*time.Second), http.MethodGet, "", nil)
		if err != nil {
			return false
		}
		_ = resp.Body.Close()
		return resp.StatusCode == http.StatusOK
	}, "and with another server of the same store")
	if err := s.Terminate(); err != nil && !errors.Is(err, os.ErrProcessDone) {
		t.Error(err)
	}
	if err := s.Up(within(t, time.Minute)); err != nil {
		t.Fatal(err)
	}
}
