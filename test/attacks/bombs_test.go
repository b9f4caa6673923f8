package attacks

import (
	"context"
	"errors"
	"testing"
	"time"

	"github.com/sandsea/sandsea/api/errdefs"
	sandseav1 "github.com/sandsea/sandsea/api/sandsea/v1"
	"github.com/sandsea/sandsea/client"
)

// fuse is how long a bomb has to take all that it gets.
const fuse = time.Second

func TestBombsAreContained(t *testing.T) {
	h := attacked(t)
	for _, c := range []struct {
		kind string
		// dies: the kernel kills it for its memory. else it is ended by its time limit.
		dies bool
		// full: while it holds what it took, no other command starts, and says so.
		full bool
		// ends: what it took outlives it, so that the sandbox cannot be used any more.
		ends bool
	}{
		{kind: "forks", full: true},
		{kind: "zombies", full: true},
		{kind: "threads", full: true},
		{kind: "memory", dies: true},
		{kind: "memory of many", full: true},
		{kind: "shared memory", dies: true, ends: true},
		{kind: "files in memory", dies: true},
		{kind: "pipes", dies: true},
		{kind: "sockets", dies: true},
		{kind: "descriptors", full: true},
		{kind: "inodes"},
		{kind: "names"},
		{kind: "disk"},
		{kind: "output"},
		{kind: "processor"},
	} {
		t.Run(c.kind, func(t *testing.T) {
			sb := h.open(t)
			cmd := client.Argv("/bin/attack", "bomb", c.kind)
			cmd.TimeoutMs = fuse.Milliseconds()
			if c.dies { // as soon as it has taken too much
				cmd.TimeoutMs = (patience / 2).Milliseconds()
			}
			type end struct {
				res *sandseav1.RunResponse
				err error
			}
			ended := make(chan end, 1)
			ctx := within(t)
			began := time.Now()
			go func() {
				res, err := sb.RunRequest(ctx, &sandseav1.RunRequest{Command: cmd, MaxOutputBytes: 1 << 20})
				ended <- end{res, err}
			}()
			var e end
			slowest := time.Duration(0)
			looks := 0
			for done := false; !done; {
				select {
				case e = <-ended:
					done = true
				case <-time.After(100 * time.Millisecond):
					at := time.Now()
					neighbour(t, h)
					slowest, looks = max(slowest, time.Since(at)), looks+1
				}
			}
			if slowest > 5*time.Second {
				t.Errorf("a neighbour's command took %s", slowest)
			}
			if e.err != nil {
				t.Fatalf("after %s: %v", time.Since(began), e.err)
			}
			r := e.res.GetResult()
			switch {
			case r.GetInfraError() != "":
				t.Errorf("the platform takes the fault: %v", r)
			case c.dies && (!r.GetOom() || r.GetSignalName() != "SIGKILL"):
				t.Errorf("not killed for its memory: %v\n%s", r, e.res.GetStdout())
			case !c.dies && !c.full && !r.GetTimedOut():
				t.Errorf("not ended by its limit: %v\n%s", r, e.res.GetStdout())
			}
			if len(e.res.GetStdout()) > 1<<20 {
				t.Errorf("%d bytes of output", len(e.res.GetStdout()))
			}
			if c.ends {
				// Whatever is asked of it now, the answer names the memory.
				res, err := sb.Run(within(t), client.Argv("/bin/busybox", "true"))
				if err == nil && res.GetResult().GetExitCode() != 0 && !res.GetResult().GetOom() {
					t.Errorf("%v", res.GetResult())
				}
				if err != nil && errdefs.From(err).Cause != "oom" {
					t.Errorf("%v", err)
				}
				return
			}
			sh(t, sb, "rm -rf /root/big /root/many")
			works(t, within(t), sb)
		})
	}
}

// neighbour uses the witness while a bomb goes off.
func neighbour(t *testing.T, h *house) {
	t.Helper()
	ctx, stop := context.WithTimeoutCause(t.Context(), patience, errors.New("the neighbour waits too long"))
	defer stop()
	res, err := h.witness.Run(ctx, client.Argv("/bin/busybox", "echo", "here"))
	if err != nil || string(res.GetStdout()) != "here\n" {
		t.Errorf("a neighbour's command: %q, %v, %v", res.GetStdout(), res.GetResult(), err)
	}
}

// What starts no command because the processes are used up is the sandbox's doing, and is said so.
func TestACommandThatFindsNoRoomIsNoFaultOfThePlatform(t *testing.T) {
	h := attacked(t)
	sb := h.open(t)
	number := begin(t, sb, client.Argv("/bin/attack", "bomb", "threads"))
	said(t, sb, number, "threads")
	r := run(t, sb, client.Argv("/bin/busybox", "true")).GetResult()
	if r.GetStartFailure().GetKind() != "resources" || r.GetInfraError() != "" {
		t.Errorf("%v", r)
	}
	if err := sb.Signal(within(t), number, 9, true); err != nil {
		t.Fatal(err)
	}
	// Its threads go in the background.
	for end := time.Now().Add(patience); ; {
		r := run(t, sb, client.Argv("/bin/busybox", "true")).GetResult()
		if r.GetExitCode() == 0 {
			break
		}
		if time.Now().After(end) {
			t.Fatalf("%v", r)
		}
	}
}

// DSec: yes filled tens of GB of storage.
func TestEndlessOutputIsBoundedOnDisk(t *testing.T) {
	h := attacked(t)
	sb := h.open(t, func(s *sandseav1.SandboxSpec) { s.Limits.OutputBytes = 4 << 20 })
	cmd := client.Shell("yes")
	cmd.TimeoutMs = 3000
	res, err := sb.RunRequest(within(t), &sandseav1.RunRequest{Command: cmd, MaxOutputBytes: 64 << 10})
	if err != nil {
		t.Fatal(err)
	}
	r := res.GetResult()
	if !r.GetTimedOut() || !r.GetTruncated() || r.GetStdoutBytes() < 16<<20 {
		t.Errorf("%v", r)
	}
	if n := len(res.GetStdout()); n > 64<<10 {
		t.Errorf("%d bytes in the answer", n)
	}
	if used := diskUsed(t, h, sb.ID); used > 40<<20 {
		t.Errorf("%d bytes lie on the disk of %d that were written", used, r.GetStdoutBytes())
	}
	works(t, within(t), sb)
}
