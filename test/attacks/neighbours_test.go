package attacks

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"syscall"
	"testing"
	"time"

	sandseav1 "github.com/sandsea/sandsea/api/sandsea/v1"
	"github.com/sandsea/sandsea/client"
)

// diskUsed is what the record of a sandbox's output takes on the machine's disk.
func diskUsed(t *testing.T, h *house, id string) int64 {
	t.Helper()
	var used int64
	err := filepath.WalkDir(filepath.Join(h.Dir, "output", id), func(_ string, e fs.DirEntry, err error) error {
		if err != nil {
			return err
		}
		info, err := e.Info()
		if errors.Is(err, fs.ErrNotExist) {
			return nil
		}
		if err == nil {
			used += info.Sys().(*syscall.Stat_t).Blocks * 512
		}
		return err
	})
	if err != nil {
		t.Fatal(err)
	}
	return used
}

func TestASandboxSeesNoneOfItsNeighbours(t *testing.T) {
	h := attacked(t)
	victim, sb := openAs(t, h.red), openAs(t, h.blue)
	const secret = "the-secret-of-red"
	for _, line := range []string{
		"echo " + secret + " | tee /tmp/secret /dev/shm/secret /root/secret",
		"ipcs >/dev/null 2>&1; true",
	} {
		sh(t, victim, line)
	}
	begin(t, victim, client.Shell("while :; do sleep 1; done; : "+secret))
	begin(t, victim, client.Shell("mkfifo /tmp/p; while :; do cat /tmp/p | nc -l -p 4242 -s 127.0.0.1; done"))
	begin(t, victim, client.Argv("/bin/attack", "bomb", "processor"))
	tries := attack(t, sb, "neighbours")
	for _, y := range tries {
		switch y.name {
		case "process", "looked":
		case "can signal":
			if !slices.Contains(tries, try{name: "process", outcome: y.outcome}) {
				t.Errorf("it can signal %s, which it does not see", y.outcome)
			}
		case "device":
			if y.outcome != "lo" {
				t.Errorf("it has the network device %s", y.outcome)
			}
		default:
			t.Errorf("it reaches %s %s %s", y.name, y.outcome, y.more)
		}
	}
	if out := sh(t, sb, "grep -r -s "+secret[:8]+" /tmp /dev/shm /root /var /home /srv || true"); strings.Contains(out, secret) {
		t.Errorf("it reads %q", out)
	}
	if out := sh(t, sb, "cat /proc/[0-9]*/cmdline | tr '\\0' ' '"); strings.Contains(out, secret) {
		t.Errorf("it reads %q", out)
	}
	if out := sh(t, sb, "find / -xdev -type s; find /dev -type s"); out != "" {
		t.Errorf("sockets lie at %q", out)
	}
	if out := sh(t, sb, "ls -A /tmp /dev/shm /root"); strings.Contains(out, "secret") {
		t.Errorf("it sees %q", out)
	}
	if got := sh(t, victim, "cat /tmp/secret /dev/shm/secret /root/secret"); strings.Count(got, secret) != 3 {
		t.Errorf("the victim's files: %q", got)
	}
}

// The kernel counts some things for the whole machine or by user; each sandbox must have its own share.
func TestNobodyTakesWhatAllShare(t *testing.T) {
	h := attacked(t)
	room := func(s *sandseav1.SandboxSpec) { s.Limits.OpenFiles = 4096 }
	for _, c := range []struct {
		kind  string
		least int // that a neighbour must still get
	}{
		{"instances", 64},
		{"ptys", 64},
		{"aio", 0},
	} {
		t.Run(c.kind, func(t *testing.T) {
			sb, other := h.open(t, room), h.open(t, room)
			first := said(t, sb, begin(t, sb, client.Argv("/bin/attack", c.kind, "and hold")), c.kind)
			second := attack(t, other, c.kind)
			var n int
			if _, err := fmt.Sscan(outcome(t, second, c.kind), &n); err != nil {
				t.Fatal(err)
			}
			if n < c.least {
				t.Errorf("a neighbour gets %d after %q", n, first)
			}
			if c.kind == "aio" && !strings.Contains(first, "ENOSYS") {
				t.Errorf("%q: there is one table for all", first)
			}
		})
	}
	// The machine's own users have theirs.
	fd, err := syscall.InotifyInit1(syscall.IN_CLOEXEC)
	if err != nil {
		t.Fatalf("the machine has no notifications left: %v", err)
	}
	syscall.Close(fd)
}

// A lock or a watch on a device node would be seen by everybody who has the same node.
func TestDeviceNodesAreNobodyElses(t *testing.T) {
	h := attacked(t)
	sb, other := openAs(t, h.red), openAs(t, h.blue)
	const numbers = "for f in /dev /dev/null /dev/zero /dev/full /dev/random /dev/urandom /dev/tty; do stat -c %d:%i $f; done"
	mine := strings.Fields(sh(t, sb, numbers))
	if len(mine) != 7 {
		t.Fatalf("the nodes are %q", mine)
	}
	for _, n := range strings.Fields(sh(t, other, numbers)) {
		if slices.Contains(mine, n) {
			t.Errorf("both have the node %s", n)
		}
	}
}

func TestOutputOfOneIsNotTheOthers(t *testing.T) {
	h := attacked(t)
	victim := openAs(t, h.red)
	number := begin(t, victim, client.Shell("echo secret output; sleep 600"))
	said(t, victim, number, "secret")
	// By the same id and number, with another token.
	for _, err := range h.blue.Sandbox(victim.ID).Attach(within(t), &sandseav1.AttachRequest{Number: number, NoFollow: true}) {
		if err == nil {
			t.Error("the output is told to a stranger")
		}
	}
	dir := filepath.Join(h.Dir, "output", victim.ID)
	st, err := os.Stat(dir)
	if err != nil || st.Mode().Perm()&0o077 != 0 {
		t.Errorf("%s: %v, %v", dir, st, err)
	}
}

func TestAKeyOfOneProjectSaysNothingToAnother(t *testing.T) {
	h := attacked(t)
	a, err := h.red.Create(within(t), spec(), "the same key")
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { stop(t, a) })
	b, err := h.blue.Create(within(t), spec(), "the same key")
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { stop(t, b) })
	if a.ID == b.ID {
		t.Error("a key gives another project's sandbox")
	}
	var seen []string
	for sb, err := range h.blue.List(within(t), &sandseav1.ListSandboxesRequest{All: true}) {
		if err != nil {
			t.Fatal(err)
		}
		seen = append(seen, sb.GetId())
		if sb.GetProject() != "default/blue" {
			t.Errorf("blue lists a sandbox of %s", sb.GetProject())
		}
	}
	if slices.Contains(seen, a.ID) {
		t.Error("blue lists red's sandbox")
	}
}

func TestAStrangerWatchesNothing(t *testing.T) {
	h := attacked(t)
	victim := openAs(t, h.red)
	for _, id := range []string{victim.ID, ""} {
		watching, done := context.WithCancel(within(t))
		defer done()
		ctx := within(t)
		ended := make(chan struct{})
		go func() {
			defer close(ended)
			defer time.AfterFunc(time.Second, done) // what is told comes by then
			other, err := h.red.Create(ctx, spec(), "")
			if err == nil {
				err = other.Stop(ctx)
			}
			if err == nil && id != "" {
				err = victim.Stop(ctx)
			}
			if err != nil {
				t.Error(err)
			}
		}()
		for ev, err := range h.blue.Watch(watching, &sandseav1.WatchSandboxesRequest{Id: id}) {
			if err == nil {
				t.Errorf("blue is told of %v", ev)
			}
			if err != nil {
				break
			}
		}
		<-ended
	}
}

// A tenant's secrets must not be in what the platform writes about itself.
func TestSecretsAreNotInTheLog(t *testing.T) {
	h := attacked(t)
	const canary = "canary-7f3a9c"
	sb := h.open(t, func(s *sandseav1.SandboxSpec) { s.Env = map[string]string{"TOKEN": canary} })
	cmd := client.Shell("echo " + canary + "; kill -9 $$")
	cmd.Env = map[string]string{"OTHER": canary}
	run(t, sb, cmd)
	var b bytes.Buffer
	_, _ = sb.ReadFile(within(t), &sandseav1.ReadFileRequest{Path: "/none"}, &b)
	token, err := os.ReadFile(filepath.Join(h.Dir, "admin.token"))
	if err != nil {
		t.Fatal(err)
	}
	log := h.Log()
	if strings.Contains(log, canary) || strings.Contains(log, strings.TrimSpace(string(token))) {
		t.Errorf("the log tells a secret:\n%s", log)
	}
}
