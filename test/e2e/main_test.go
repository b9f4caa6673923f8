package e2e

import (
	"context"
	"fmt"
	"os"
	"sync"
	"testing"
	"time"

	sandseav1 "github.com/sandsea/sandsea/api/sandsea/v1"
	"github.com/sandsea/sandsea/client"
	"github.com/sandsea/sandsea/internal/testkit/require"
	"github.com/sandsea/sandsea/internal/testkit/server"
)

// shared is the server of all tests that do not disturb one, with the image "busybox".
var shared struct {
	once sync.Once
	s    *server.Server
	err  error
}

func TestMain(m *testing.M) {
	code := m.Run()
	if s := shared.s; s != nil {
		if err := s.Down(context.Background()); err != nil {
			fmt.Fprintln(os.Stderr, err)
			code = max(code, 1)
		}
		if code != 0 {
			fmt.Fprintf(os.Stderr, "log of the shared server:\n%s", s.Log())
		}
	}
	os.Exit(code)
}

// serve gives the shared server.
func serve(t testing.TB) *server.Server {
	t.Helper()
	require.Root(t)
	require.Feature(t, "bin:busybox")
	shared.once.Do(func() {
		ctx := context.Background()
		shared.s, shared.err = server.Launch(ctx, server.Config{})
		if shared.err == nil {
			shared.err = shared.s.ImportBusybox(ctx)
		}
	})
	if shared.err != nil {
		t.Fatal(shared.err)
	}
	return shared.s
}

// within bounds a test's calls.
func within(t testing.TB, d time.Duration) context.Context {
	t.Helper()
	ctx, stop := context.WithTimeoutCause(t.Context(), d, fmt.Errorf("the test's limit of %s", d))
	t.Cleanup(stop)
	return ctx
}

// spec is the smallest one; change may add to it.
func spec(change ...func(*sandseav1.SandboxSpec)) *sandseav1.SandboxSpec {
	s := &sandseav1.SandboxSpec{
		Backend:     sandseav1.Backend_BACKEND_CONTAINER,
		Environment: &sandseav1.Environment{Image: "busybox"},
		Limits:      &sandseav1.Limits{MemoryBytes: 128 << 20},
	}
	for _, c := range change {
		c(s)
	}
	return s
}

// open makes a sandbox on the shared server that ends with the test.
func open(t testing.TB, change ...func(*sandseav1.SandboxSpec)) *client.Sandbox {
	t.Helper()
	return openOn(t, serve(t), change...)
}

func openOn(t testing.TB, s *server.Server, change ...func(*sandseav1.SandboxSpec)) *client.Sandbox {
	t.Helper()
	ctx := within(t, 60*time.Second)
	sb, err := s.Client.Create(ctx, spec(change...), "")
	if err != nil {
		t.Fatalf("create: %v", err)
	}
	t.Cleanup(func() {
		ctx, stop := context.WithTimeoutCause(context.WithoutCancel(ctx), 60*time.Second, context.DeadlineExceeded)
		defer stop()
		if err := sb.Stop(ctx); err != nil {
			t.Errorf("stop: %v", err)
		}
	})
	return sb
}

// sh runs a shell line that must exit with 0 and gives its output.
func sh(t testing.TB, sb *client.Sandbox, line string) string {
	t.Helper()
	res := run(t, sb, client.Shell(line))
	if r := res.GetResult(); r.GetExitCode() != 0 {
		t.Fatalf("%s: %v\nstdout: %s\nstderr: %s", line, r, res.GetStdout(), res.GetStderr())
	}
	return string(res.GetStdout())
}

// run runs a command to its end, whatever that is.
func run(t testing.TB, sb *client.Sandbox, cmd *sandseav1.Command) *sandseav1.RunResponse {
	t.Helper()
	res, err := sb.Run(within(t, 60*time.Second), cmd)
	if err != nil {
		t.Fatalf("run %q: %v", cmd.GetArgv(), err)
	}
	return res
}

func info(t testing.TB, sb *client.Sandbox) *sandseav1.Sandbox {
	t.Helper()
	i, err := sb.Info(within(t, 20*time.Second))
	if err != nil {
		t.Fatalf("get: %v", err)
	}
	return i
}
