package egress

import (
	"bufio"
	"context"
	"crypto/sha256"
	"encoding/hex"
	"errors"
	"net/http"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"

	"connectrpc.com/connect"
	"golang.org/x/net/dns/dnsmessage"

	"github.com/sandsea/sandsea/api/errdefs"
	"github.com/sandsea/sandsea/api/errwire"
	sandseav1 "github.com/sandsea/sandsea/api/sandsea/v1"
	"github.com/sandsea/sandsea/client"
	"github.com/sandsea/sandsea/internal/testkit/farside"
	"github.com/sandsea/sandsea/internal/testkit/wait"
)

// patience bounds every wait of these tests; what is promised is shorter and told in the log.
const patience = 30 * time.Second

// begin starts a command that goes on, and gives a channel that is closed at its end.
func begin(t *testing.T, sb *client.Sandbox, script string) <-chan struct{} {
	t.Helper()
	ended, begun := make(chan struct{}), make(chan struct{})
	var once sync.Once
	go func() {
		defer close(ended)
		defer once.Do(func() { close(begun) })
		for ev, err := range sb.Start(t.Context(), &sandseav1.StartRequest{Command: client.Shell(script)}) {
			if err != nil {
				return
			}
			if len(ev.GetData().GetData()) > 0 {
				once.Do(func() { close(begun) })
			}
		}
	}()
	select {
	case <-begun:
	case <-time.After(patience):
		t.Fatalf("%s says nothing", script)
	}
	return ended
}

func TestAChangeCutsWhatItDoesNotAllow(t *testing.T) {
	h := open(t)
	sb := h.sandbox(t, rules())
	drip := "wget -q -O - http://allowed.example/drip"

	ended := begin(t, sb, drip)
	began := time.Now()
	if _, err := sb.SetPhase(t.Context(), "grade"); err != nil {
		t.Fatal(err)
	}
	inForce := time.Since(began)
	if got := probe(t, sb, "root", "tcp", direct.Addr().String(), itoa(direct.Port())); got == "open" {
		t.Error("the new phase is not in force when the call has answered")
	}
	select {
	case <-ended:
	case <-time.After(patience):
		t.Fatal("the old connection goes on")
	}
	t.Logf("a phase is in force after %s, the old connection was cut after %s", inForce, time.Since(began))
	wait.Until(t, patience, func() bool { return h.world.drips.Load() == 0 }, "the end of the answer on the far side")
	time.Sleep(500 * time.Millisecond) // the far side acknowledges the end, and that is acknowledged
	all := func(farside.Packet) bool { return true }
	before := len(h.world.Seen(all))
	time.Sleep(500 * time.Millisecond)
	for _, p := range h.world.Seen(all)[before:] {
		t.Errorf("left after the cut: %v to %v, protocol %d: %x", p.From, p.To, p.Protocol, p.Raw)
	}

	// What both allow goes on.
	if _, err := sb.SetPhase(t.Context(), "agent"); err != nil {
		t.Fatal(err)
	}
	ended = begin(t, sb, drip)
	p := rules()
	p.Phases[0].Rules = p.Phases[0].Rules[:1]
	if _, err := sb.SetPolicy(t.Context(), p); err != nil {
		t.Fatal(err)
	}
	if got := probe(t, sb, "root", "tcp", direct.Addr().String(), itoa(direct.Port())); got == "open" {
		t.Error("an address of the old policy is open")
	}
	select {
	case <-ended:
		t.Error("a connection that the new policy allows was cut")
	case <-time.After(time.Second):
	}
}

// TestAPhaseClosesEndpoints has an answer of a server inside under way, on a connection of its own, when a phase comes in
// force that lets nobody in.
func TestAPhaseClosesEndpoints(t *testing.T) {
	h := open(t)
	p := rules()
	p.Phases[1].InboundClosed = true
	p.Phases = append(p.Phases, &sandseav1.NetworkPhase{Name: "one-port", Inbound: ports(8001)})
	sb := h.sandbox(t, p)
	// A request is answered by ticks for as long as somebody listens.
	begin(t, sb, `cat > /tmp/serve <<'END'
		printf 'HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\n\r\n'
		while echo tick; do sleep 0.1; done
END
		nc -ll -p 8000 -e /bin/sh /tmp/serve & nc -ll -p 8001 -e /bin/sh /tmp/serve & echo begun; wait`)
	get := func(port int) (*http.Response, error) {
		e, err := sb.Endpoint(t.Context(), port, 0)
		if err != nil {
			t.Fatal(err)
		}
		tr := &http.Transport{DialContext: h.world.Dial}
		t.Cleanup(tr.CloseIdleConnections)
		req, err := http.NewRequestWithContext(t.Context(), http.MethodGet, e.GetUrl(), nil)
		if err != nil {
			t.Fatal(err)
		}
		for name, value := range e.GetHeaders() {
			req.Header.Set(name, value)
		}
		resp, err := (&http.Client{Transport: tr}).Do(req)
		if err == nil {
			t.Cleanup(func() { _ = resp.Body.Close() })
		}
		return resp, err
	}
	ticks := func(port int) *bufio.Scanner {
		var resp *http.Response
		wait.Until(t, patience, func() bool {
			var err error
			resp, err = get(port)
			return err == nil && resp.StatusCode == http.StatusOK
		}, "the server inside")
		lines := bufio.NewScanner(resp.Body)
		if !lines.Scan() {
			t.Fatalf("port %d: %v", port, lines.Err())
		}
		return lines
	}
	for _, phase := range []string{"grade", "one-port"} {
		cut, stays := ticks(8000), ticks(8001)
		if _, err := sb.SetPhase(t.Context(), phase); err != nil {
			t.Fatal(err)
		}
		began := time.Now()
		toItsEnd(t, cut, "phase "+phase+": the answer")
		t.Logf("phase %s: the answer ended after %s", phase, time.Since(began))
		if resp, err := get(8000); err != nil || resp.StatusCode != http.StatusForbidden {
			t.Errorf("phase %s: another request: %v, %v", phase, resp, err)
		}
		if phase == "grade" {
			toItsEnd(t, stays, "phase "+phase+": the other answer")
		} else {
			for range 20 { // more than were on their way
				if !stays.Scan() {
					t.Fatalf("phase %s: the answer of a port that it opens was cut: %v", phase, stays.Err())
				}
			}
		}
		if _, err := sb.SetPhase(t.Context(), "agent"); err != nil {
			t.Fatal(err)
		}
	}
}

// toItsEnd reads an answer that must end.
func toItsEnd(t *testing.T, lines *bufio.Scanner, what string) {
	t.Helper()
	ended := make(chan struct{})
	go func() {
		defer close(ended)
		for lines.Scan() {
		}
	}()
	select {
	case <-ended:
	case <-time.After(patience):
		t.Fatalf("%s goes on", what)
	}
}

func TestAetherKilledUnderLoad(t *testing.T) {
	h := open(t)
	good, bad := h.sandbox(t, rules()), h.sandbox(t, rules())
	ctx, stop := context.WithCancelCause(t.Context())
	var hammering sync.WaitGroup
	hammering.Go(func() {
		for ctx.Err() == nil {
			for _, argv := range [][]string{
				{"tcp", "198.51.100.99", "443", payload},
				{"udp", "198.51.100.99", "53", payload},
				{"tcp", gateway, "3128", text("CONNECT denied.example:443 HTTP/1.1", "Host: denied.example:443")},
				{"udp", gateway, "53", hex.EncodeToString(question(t, "denied.example", dnsmessage.TypeA))},
			} {
				if ctx.Err() != nil {
					return
				}
				_, _ = bad.Run(ctx, client.Argv(append([]string{"/bin/probe"}, argv...)...))
			}
		}
	})
	defer func() {
		stop(errors.New("the test is over"))
		hammering.Wait()
	}()

	works := func() bool {
		ctx, stop := context.WithTimeout(t.Context(), 5*time.Second)
		defer stop()
		res, err := good.Run(ctx, client.Shell("wget -q -O - http://allowed.example/x"))
		return err == nil && strings.Contains(string(res.GetStdout()), "far says")
	}
	var longest time.Duration
	const deaths = 5 // after more in a row it waits before it starts again
	for range deaths {
		if err := h.Kill("aether"); err != nil {
			t.Fatal(err)
		}
		began := time.Now()
		wait.Until(t, patience, works, "traffic after the death of aether")
		longest = max(longest, time.Since(began))
	}
	t.Logf("%d deaths of aether: traffic again after %s at the latest", deaths, longest)

	// A download that is cut goes on where it was.
	fetched := make(chan *sandseav1.RunResponse, 1)
	go func() {
		res, err := good.Run(t.Context(), client.Shell(`
			n=0; until wget -q -c -O /tmp/file http://allowed.example/file; do n=$((n+1)); test $n -lt 200 || exit 9; sleep 0.2; done
			echo tries $n; sha256sum < /tmp/file`))
		if err != nil {
			t.Errorf("download: %v", err)
		}
		fetched <- res
	}()
	for range 3 {
		time.Sleep(400 * time.Millisecond)
		wait.Until(t, patience, func() bool { return h.Pid("aether") != 0 }, "aether")
		if err := h.Kill("aether"); err != nil {
			t.Fatal(err)
		}
	}
	res := <-fetched
	if res.GetResult().GetExitCode() != 0 {
		t.Fatalf("download: %v, %s", res.GetResult(), res.GetStderr())
	}
	t.Logf("a download of %d MiB with three deaths: %q", len(file)>>20, res.GetStdout())
	if want := hex.EncodeToString(fileSum[:]); !strings.Contains(string(res.GetStdout()), want) {
		t.Errorf("downloaded %s, want %s", res.GetStdout(), want)
	}
	if left := h.escaped(); len(left) > 0 {
		t.Errorf("these left the host: %q", left)
	}
}

// TestNamesCarryNothingOut sends data as names, the way tunnels over DNS do.
func TestNamesCarryNothingOut(t *testing.T) {
	h := open(t)
	sb := h.sandbox(t, rules())
	before := len(h.world.names())
	began := time.Now()
	// 2,000 questions for names that are denied, and as many for ones below the wildcard.
	res, err := sb.Run(t.Context(), client.Shell(`
		i=0; while [ $i -lt 2000 ]; do i=$((i+1))
			case $((i % 20)) in 0) wait;; esac
			nslookup $(printf '%060d' $i).denied.example >/dev/null 2>&1 &
			nslookup $(printf '%060d' $i).wild.example >/dev/null 2>&1 &
		done; wait`))
	if err != nil {
		t.Fatal(err)
	}
	took := time.Since(began)
	var bits int
	for _, name := range h.world.names()[before:] {
		bits += 8 * len(name)
	}
	t.Logf("4,000 questions in %s (exit %d): %d bits reached the far side", took, res.GetResult().GetExitCode(), bits)
	if rate := float64(bits) / took.Seconds(); rate > 1000 {
		t.Errorf("%.0f bits a second get out by names alone", rate)
	}
	if left := h.escaped(); len(left) > 0 {
		t.Errorf("these left the host: %q", left)
	}
}

var fileSum = sha256.Sum256(file)

// TestTheWallsStandWhileTheEdgeIsDead kills the node's daemon: what is allowed goes on, what is not stays closed, and the
// next daemon has the policy in its hands again.
func TestTheWallsStandWhileTheEdgeIsDead(t *testing.T) {
	h := open(t)
	sb := h.sandbox(t, rules())
	for _, err := range sb.Start(t.Context(), &sandseav1.StartRequest{Detached: true, Command: client.Shell(`
		while :; do
			date +%s >> /tmp/tries
			wget -q -O - http://allowed.example/x | grep -q far && date +%s >> /tmp/went
			/bin/probe tcp 198.51.100.99 443 ` + payload + ` > /dev/null
			/bin/probe udp 198.51.100.99 53 ` + payload + ` > /dev/null
			usleep 100000
		done`)}) {
		if err != nil {
			t.Fatal(err)
		}
	}
	lines := func(file string) int { return strings.Count(run(t, sb, "cat "+file), "\n") }
	wait.Until(t, patience, func() bool { return lines("/tmp/went") > 2 }, "traffic")
	if err := h.Kill("up"); err != nil {
		t.Fatal(err)
	}
	before := len(h.world.Seen(h.mayLeave))
	time.Sleep(2 * time.Second)
	wait.Until(t, patience, func() bool { return len(h.world.Seen(h.mayLeave)) > before }, "traffic while the edge is dead")
	if err := h.Up(t.Context()); err != nil {
		t.Fatal(err)
	}
	went := lines("/tmp/went")
	wait.Until(t, patience, func() bool { return lines("/tmp/went") > went }, "traffic after the restart")
	if _, err := sb.SetPhase(t.Context(), "grade"); err != nil {
		t.Fatal(err)
	}
	if got := probe(t, sb, "root", "tcp", direct.Addr().String(), itoa(direct.Port())); got == "open" {
		t.Error("a phase that was set after the restart is not in force")
	}
	if left := h.escaped(); len(left) > 0 {
		t.Errorf("these left the host: %q", left)
	}
	if h.Pid("aether") == 0 {
		t.Error("no aether runs")
	}
}

// TestAHungAetherOpensNothing stops Aether without ending it (fault F22).
func TestAHungAetherOpensNothing(t *testing.T) {
	h := open(t)
	sb := h.sandbox(t, rules())
	allowed := address(t, sb, "allowed.example")
	if err := syscall.Kill(h.Pid("aether"), syscall.SIGSTOP); err != nil {
		t.Fatal(err)
	}
	defer func() { _ = syscall.Kill(h.Pid("aether"), syscall.SIGCONT) }()
	began := time.Now()
	_, err := h.Client.Sandboxes.Create(t.Context(), connect.NewRequest(&sandseav1.CreateSandboxRequest{
		Spec:           &sandseav1.SandboxSpec{Environment: &sandseav1.Environment{Image: "probe"}, Network: rules()},
		ReadyTimeoutMs: 3000,
	}))
	switch errdefs.KindOf(errwire.FromConnect(err)) {
	case errdefs.Unavailable, errdefs.Exhausted, errdefs.Deadline, errdefs.Unknown: // it was tried until its time was over
	default:
		t.Errorf("a create with a policy nobody can enforce: %v", err)
	}
	t.Logf("it is refused after %s", time.Since(began))
	if got := probe(t, sb, "root", "tcp", allowed, "80", get("allowed.example", "/"+marker)); strings.Contains(got, "far says") {
		t.Errorf("a hung aether forwards: %q", got)
	}
	closed := h.sandbox(t, nil) // who needs no network is not held up
	if got := run(t, closed, "echo well"); got != "well\n" {
		t.Errorf("a sandbox without network says %q", got)
	}
	if err := syscall.Kill(h.Pid("aether"), syscall.SIGCONT); err != nil {
		t.Fatal(err)
	}
	wait.Until(t, patience, func() bool {
		return strings.Contains(probe(t, sb, "root", "tcp", allowed, "80", get("allowed.example", "/y")), "far says")
	}, "traffic after it goes on")
	if left := h.escaped(); len(left) > 0 {
		t.Errorf("these left the host: %q", left)
	}
}
