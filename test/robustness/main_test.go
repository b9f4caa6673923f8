package robustness

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"testing"
	"time"

	sandseav1 "github.com/sandsea/sandsea/api/sandsea/v1"
	"github.com/sandsea/sandsea/client"
	"github.com/sandsea/sandsea/internal/testkit/require"
	"github.com/sandsea/sandsea/internal/testkit/server"
	"github.com/sandsea/sandsea/internal/testkit/wait"
)

// begin starts a server of the test's own with the image "busybox".
func begin(t *testing.T) *server.Server {
	t.Helper()
	require.Feature(t, "bin:busybox")
	s := server.Start(t, server.Config{})
	if err := s.ImportBusybox(t.Context()); err != nil {
		t.Fatal(err)
	}
	return s
}

func within(t testing.TB, d time.Duration) context.Context {
	t.Helper()
	ctx, stop := context.WithTimeoutCause(t.Context(), d, fmt.Errorf("the test's limit of %s", d))
	t.Cleanup(stop)
	return ctx
}

func spec() *sandseav1.SandboxSpec {
	return &sandseav1.SandboxSpec{
		Backend:     sandseav1.Backend_BACKEND_CONTAINER,
		Environment: &sandseav1.Environment{Image: "busybox"},
		Limits:      &sandseav1.Limits{MemoryBytes: 64 << 20, DiskBytes: 64 << 20},
	}
}

// open makes a sandbox; the server's end is its end.
func open(t testing.TB, s *server.Server, change ...func(*sandseav1.SandboxSpec)) *client.Sandbox {
	t.Helper()
	sp := spec()
	for _, c := range change {
		c(sp)
	}
	sb, err := s.Client.Create(within(t, 60*time.Second), sp, "")
	if err != nil {
		t.Fatalf("create: %v", err)
	}
	return sb
}

// start starts a command that goes on by itself.
func start(t testing.TB, sb *client.Sandbox, cmd *sandseav1.Command) int64 {
	t.Helper()
	req := &sandseav1.StartRequest{Command: cmd, Detached: true}
	for e, err := range sb.Start(within(t, 60*time.Second), req) {
		if err != nil {
			t.Fatalf("start: %v", err)
		}
		if p := e.GetStarted(); p != nil {
			return p.GetNumber()
		}
	}
	t.Fatal("start: no number")
	return 0
}

// recorded reads a process's standard output: to its end, or what is there by now.
func recorded(ctx context.Context, sb *client.Sandbox, number int64, follow bool) ([]byte, *sandseav1.Process, error) {
	var out bytes.Buffer
	var last *sandseav1.Process
	for e, err := range sb.Attach(ctx, &sandseav1.AttachRequest{Number: number, NoFollow: !follow}) {
		if err != nil {
			return out.Bytes(), last, err
		}
		if d := e.GetData(); d.GetStream() == sandseav1.Stream_STREAM_STDOUT {
			if d.GetOffset() != int64(out.Len()) {
				return out.Bytes(), last, fmt.Errorf("a piece at %d after %d bytes", d.GetOffset(), out.Len())
			}
			out.Write(d.GetData())
		}
		if g := e.GetGap(); g != nil {
			return out.Bytes(), last, fmt.Errorf("bytes are lost: %v", g)
		}
		if p := e.GetExited(); p != nil {
			last = p
		}
	}
	return out.Bytes(), last, nil
}

// sh runs a line that must succeed.
func sh(t testing.TB, sb *client.Sandbox, line string) string {
	t.Helper()
	res, err := sb.Run(within(t, 60*time.Second), client.Shell(line))
	if err != nil {
		t.Fatalf("%s: %v", line, err)
	}
	if res.GetResult().GetExitCode() != 0 {
		t.Fatalf("%s: %v %s", line, res.GetResult(), res.GetStderr())
	}
	return string(res.GetStdout())
}

// ended waits for a sandbox's end.
func ended(t testing.TB, sb *client.Sandbox, limit time.Duration) *sandseav1.End {
	t.Helper()
	var last *sandseav1.Sandbox
	var err error
	ok := wait.For(limit, func() bool {
		last, err = sb.Info(within(t, 10*time.Second))
		return err == nil && last.GetState() == sandseav1.SandboxState_SANDBOX_STATE_ENDED
	})
	if !ok {
		t.Fatalf("%s has not ended within %s: %v, %v", sb.ID, limit, last, err)
	}
	return last.GetEnd()
}

// serving waits until sandboxes can be used and made again, and gives the time that both took since began.
func serving(t testing.TB, s *server.Server, sb *client.Sandbox, began time.Time) (used, made time.Duration) {
	t.Helper()
	var err error
	try := func(f func(context.Context) error) time.Duration {
		ok := wait.For(20*time.Second, func() bool {
			ctx, stop := context.WithTimeoutCause(t.Context(), 5*time.Second, errors.New("no answer"))
			defer stop()
			err = f(ctx)
			return err == nil
		})
		if !ok {
			t.Fatalf("not serving: %v\n%s", err, s.Log())
		}
		return time.Since(began)
	}
	used = try(func(ctx context.Context) error {
		res, err := sb.Run(ctx, client.Argv("true"))
		if err == nil && res.GetResult().GetExitCode() != 0 {
			err = fmt.Errorf("true: %v", res.GetResult())
		}
		return err
	})
	made = try(func(ctx context.Context) error {
		n, err := s.Client.Create(ctx, spec(), "")
		if err == nil {
			err = n.Stop(ctx)
		}
		return err
	})
	return used, made
}
