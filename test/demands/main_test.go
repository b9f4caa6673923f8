package demands

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"os"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/sandsea/sandsea/api/errdefs"
	sandseav1 "github.com/sandsea/sandsea/api/sandsea/v1"
	"github.com/sandsea/sandsea/client"
	"github.com/sandsea/sandsea/internal/testkit/require"
	"github.com/sandsea/sandsea/internal/testkit/server"
	"github.com/sandsea/sandsea/internal/testkit/wait"
)

const (
	stdout = sandseav1.Stream_STREAM_STDOUT
	stderr = sandseav1.Stream_STREAM_STDERR
)

// shared is the server of all demands, with the images "busybox" and "worker": the same with a config.
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

func serve(t testing.TB) *server.Server {
	t.Helper()
	require.Root(t)
	require.Feature(t, "bin:busybox")
	shared.once.Do(func() {
		ctx := context.Background()
		if shared.s, shared.err = server.Launch(ctx, server.Config{}); shared.err != nil {
			return
		}
		files, err := server.Busybox(ctx)
		if err == nil {
			_, err = shared.s.Import(ctx, "busybox", files, nil)
		}
		if err == nil {
			_, err = shared.s.Import(ctx, "worker", files, &sandseav1.ImageConfig{
				User: "alice", Workdir: "/srv", Env: []string{"FROM=image", "LAYER=image"},
				Entrypoint: []string{"/bin/sh", "-c"}, Cmd: []string{"echo from the image; exec sleep 1000"},
			})
		}
		shared.err = err
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
		Limits:      &sandseav1.Limits{MemoryBytes: 256 << 20},
	}
	for _, c := range change {
		c(s)
	}
	return s
}

// worker is the image that has a config.
func worker(s *sandseav1.SandboxSpec) { s.Environment.Image = "worker" }

// open makes a sandbox that ends with the test.
func open(t testing.TB, change ...func(*sandseav1.SandboxSpec)) *client.Sandbox {
	t.Helper()
	ctx := within(t, 60*time.Second)
	sb, err := serve(t).Client.Create(ctx, spec(change...), "")
	if err != nil {
		t.Fatalf("create: %v", err)
	}
	t.Cleanup(func() { stop(t, sb) })
	return sb
}

func stop(t testing.TB, sb *client.Sandbox) {
	ctx, done := context.WithTimeoutCause(context.WithoutCancel(t.Context()), 60*time.Second, context.DeadlineExceeded)
	defer done()
	if err := sb.Stop(ctx); err != nil {
		t.Errorf("stop: %v", err)
	}
}

// run runs a command to its end, whatever that is.
func run(t testing.TB, sb *client.Sandbox, cmd *sandseav1.Command) *sandseav1.RunResponse {
	t.Helper()
	return runRequest(t, sb, &sandseav1.RunRequest{Command: cmd})
}

func runRequest(t testing.TB, sb *client.Sandbox, req *sandseav1.RunRequest) *sandseav1.RunResponse {
	t.Helper()
	res, err := sb.RunRequest(within(t, 120*time.Second), req)
	if err != nil {
		t.Fatalf("run %.200q: %v", req.GetCommand().GetArgv(), err)
	}
	return res
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

// as makes a shell line one of another user.
func as(user, line string) *sandseav1.Command {
	cmd := client.Shell(line)
	cmd.User = user
	return cmd
}

// start starts a command that goes on by itself and gives its number.
func start(t testing.TB, sb *client.Sandbox, req *sandseav1.StartRequest) int64 {
	t.Helper()
	req.Detached = true
	for e, err := range sb.Start(within(t, 30*time.Second), req) {
		if err != nil {
			t.Fatalf("start %q: %v", req.GetCommand().GetArgv(), err)
		}
		return e.GetStarted().GetNumber()
	}
	t.Fatalf("start %q: no number", req.GetCommand().GetArgv())
	return 0
}

// record is what an attach gave: the bytes of each stream from the asked offset on, without gaps, and the end.
type record struct {
	data map[sandseav1.Stream][]byte
	gaps map[sandseav1.Stream]int64
	at   map[sandseav1.Stream]int64 // offset behind the last piece
	end  *sandseav1.Process
}

// attach reads a record to its end and checks that no offset comes twice or not at all.
func attach(t testing.TB, sb *client.Sandbox, req *sandseav1.AttachRequest) record {
	t.Helper()
	r := record{
		data: map[sandseav1.Stream][]byte{}, gaps: map[sandseav1.Stream]int64{},
		at: map[sandseav1.Stream]int64{stdout: req.GetStdoutOffset(), stderr: req.GetStderrOffset()},
	}
	for e, err := range sb.Attach(within(t, 120*time.Second), req) {
		if err != nil {
			t.Fatalf("attach: %v", err)
		}
		r.take(t, e)
	}
	return r
}

func (r *record) take(t testing.TB, e *sandseav1.ProcessEvent) {
	t.Helper()
	if r.end != nil {
		t.Fatalf("something came after the end: %v", e)
	}
	if d := e.GetData(); d != nil {
		if d.GetOffset() != r.at[d.GetStream()] {
			t.Fatalf("%s: a piece at %d, want %d", d.GetStream(), d.GetOffset(), r.at[d.GetStream()])
		}
		r.at[d.GetStream()] += int64(len(d.GetData()))
		r.data[d.GetStream()] = append(r.data[d.GetStream()], d.GetData()...)
	}
	if g := e.GetGap(); g != nil {
		if g.GetOffset() != r.at[g.GetStream()] || g.GetBytes() <= 0 {
			t.Fatalf("%s: a gap %v, want one at %d", g.GetStream(), g, r.at[g.GetStream()])
		}
		r.at[g.GetStream()] += g.GetBytes()
		r.gaps[g.GetStream()] += g.GetBytes()
	}
	r.end = e.GetExited()
}

// peek is what is recorded by now, without waiting.
func peek(t testing.TB, sb *client.Sandbox, number int64) record {
	t.Helper()
	return attach(t, sb, &sandseav1.AttachRequest{Number: number, NoFollow: true})
}

// await waits until a command's standard output begins with want.
func await(t testing.TB, sb *client.Sandbox, number int64, want string) {
	t.Helper()
	var got []byte
	if !wait.For(20*time.Second, func() bool {
		got = peek(t, sb, number).data[stdout]
		return bytes.HasPrefix(got, []byte(want))
	}) {
		t.Fatalf("process %d: output %q, want %q", number, got, want)
	}
}

// process gives one of the listed.
func process(t testing.TB, sb *client.Sandbox, number int64) *sandseav1.Process {
	t.Helper()
	all, err := sb.Processes(within(t, 20*time.Second))
	if err != nil {
		t.Fatal(err)
	}
	for _, p := range all {
		if p.GetNumber() == number {
			return p
		}
	}
	t.Fatalf("process %d is not among %v", number, all)
	return nil
}

// gone waits until no process of the sandbox has the text in its arguments.
func gone(t testing.TB, sb *client.Sandbox, text string) {
	t.Helper()
	wait.Until(t, 30*time.Second, func() bool { return !strings.Contains(sh(t, sb, "ps -o args"), text) }, text+" is gone")
}

func info(t testing.TB, sb *client.Sandbox) *sandseav1.Sandbox {
	t.Helper()
	i, err := sb.Info(within(t, 20*time.Second))
	if err != nil {
		t.Fatal(err)
	}
	return i
}

// fault gives the typed error, which must be of a kind.
func fault(t testing.TB, what string, err error, kind errdefs.Kind) *errdefs.Error {
	t.Helper()
	e, ok := errors.AsType[*errdefs.Error](err)
	if !ok || e.Kind != kind {
		t.Errorf("%s: %v, want an error of kind %s", what, err, kind)
		return &errdefs.Error{}
	}
	return e
}
