package aether

import (
	"context"
	"errors"
	"fmt"
	"io"
	"net"
	"net/http"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/sandsea/sandsea/internal/aether/wire"
	"github.com/sandsea/sandsea/internal/policy"
	"github.com/sandsea/sandsea/internal/testkit/require"
	"github.com/sandsea/sandsea/internal/testkit/wait"
)

// start runs Aether as a process of its own, which gives up its rights, and connects when it answers.
func (r *rig) start() *exec.Cmd {
	r.t.Helper()
	// Only without cgo can all threads give up their rights.
	if _, _, errno := syscall.AllThreadsSyscall(syscall.SYS_GETPID, 0, 0, 0); errno != 0 {
		require.That(r.t, "system calls on all threads", errno)
	}
	exe, err := os.Executable()
	if err != nil {
		r.t.Fatal(err)
	}
	cmd := exec.Command(exe)
	cmd.Env = []string{"SANDSEA_TEST_AETHER=" + r.dir}
	cmd.Stderr = os.Stderr
	cmd.SysProcAttr = &syscall.SysProcAttr{Pdeathsig: syscall.SIGKILL}
	if err := cmd.Start(); err != nil {
		r.t.Fatal(err)
	}
	r.t.Cleanup(func() {
		_ = cmd.Process.Kill()
		_ = cmd.Wait()
	})
	socket := filepath.Join(r.dir, "run", "aether.sock")
	wait.Until(r.t, 30*time.Second, func() bool {
		c, err := wire.Dial(r.t.Context(), socket, dataID)
		if err != nil {
			return false
		}
		_ = c.Close()
		return true
	}, "Aether answers")
	r.connect()
	return cmd
}

func TestTheProcessIsNobody(t *testing.T) {
	r := newWorld(t, "")
	cmd := r.start()
	status, err := os.ReadFile(fmt.Sprintf("/proc/%d/status", cmd.Process.Pid))
	if err != nil {
		t.Fatal(err)
	}
	for _, want := range []string{
		fmt.Sprintf("Uid:\t%d\t%[1]d\t%[1]d\t%[1]d\n", UID), fmt.Sprintf("Gid:\t%d\t%[1]d\t%[1]d\t%[1]d\n", UID), "Groups:\t \n",
		"NoNewPrivs:\t1\n", "CapPrm:\t0000000000000000\n", "CapEff:\t0000000000000000\n",
	} {
		if !strings.Contains(string(status), want) {
			t.Errorf("%q is missing in\n%s", want, status)
		}
	}
	debug := http.Client{Transport: &http.Transport{DialContext: func(ctx context.Context, _, _ string) (net.Conn, error) {
		return (&net.Dialer{}).DialContext(ctx, "unix", filepath.Join(r.dir, "run", "aether-debug.sock"))
	}}}
	if status, body := get(t, &debug, "http://x/metrics"); status != 200 || !strings.Contains(body, "\nsandsea_aether_sandboxes 0\n") {
		t.Errorf("%d %q", status, body)
	}
	// It ends when it is told to, and can be told while it serves.
	if err := cmd.Process.Signal(syscall.SIGTERM); err != nil {
		t.Fatal(err)
	}
	if err := cmd.Wait(); err != nil {
		t.Error(err)
	}
}

func TestAKilledAetherOpensNothingAndComesBack(t *testing.T) {
	r := newWorld(t, "")
	echo := r.host("203.0.113.1:7000", "a.example")
	r.echo(echo)
	cmd := r.start()
	b := r.sandbox(allow(policy.Rule{Domain: "a.example", Ports: ports(7000)}, policy.Rule{CIDR: "203.0.113.1/32", Ports: ports(7000)}))
	addr, err := b.resolve("a.example")
	if err != nil {
		t.Fatal(err)
	}
	c := b.must("a.example:7000")
	if err := say(c); err != nil {
		t.Fatal(err)
	}
	pem, err := r.edge.CA(t.Context(), b.desc.ID)
	if err != nil {
		t.Fatal(err)
	}
	if err := cmd.Process.Kill(); err != nil {
		t.Fatal(err)
	}
	_ = cmd.Wait()
	<-r.edge.Done()
	if err := say(c); !errors.Is(err, syscall.ECONNRESET) && !errors.Is(err, syscall.EPIPE) && !errors.Is(err, io.EOF) {
		t.Errorf("the connection of before: %v", err)
	}
	for _, at := range []string{"203.0.113.1:7000", addr.String() + ":7000"} {
		if err := b.fails(at); err == nil {
			t.Errorf("%s answers without Aether", at)
		}
	}
	began := time.Now()
	r.start()
	// Nobody is known before the edge has told.
	if err := b.fails("203.0.113.1:7000"); !errors.Is(err, syscall.ECONNRESET) {
		t.Errorf("before Sync: %v", err)
	}
	if err := r.edge.Sync(t.Context(), []wire.Sandbox{b.desc}); err != nil {
		t.Fatal(err)
	}
	// The address of before stands for nothing until it is asked for again, and is then what it was.
	if err := b.fails(addr.String() + ":7000"); !errors.Is(err, syscall.ECONNRESET) {
		t.Errorf("an address of before: %v", err)
	}
	again, err := b.resolve("a.example")
	if err != nil || again != addr {
		t.Errorf("%v, %v, before %v", again, err, addr)
	}
	for _, at := range []string{"a.example:7000", "203.0.113.1:7000"} {
		if err := say(b.must(at)); err != nil {
			t.Errorf("%s: %v", at, err)
		}
	}
	t.Logf("back after %v", time.Since(began))
	// The authority is the same key: what the sandbox trusts goes on to be trusted.
	anew, err := r.edge.CA(t.Context(), b.desc.ID)
	if err != nil {
		t.Fatal(err)
	}
	if !samePublicKey(t, pem, anew) {
		t.Error("the authority has changed")
	}
}
