package attacks

import (
	"bytes"
	"context"
	"errors"
	"fmt"
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
	"github.com/sandsea/sandsea/internal/control/iam"
	"github.com/sandsea/sandsea/internal/store/etcd"
	"github.com/sandsea/sandsea/internal/testkit/require"
	"github.com/sandsea/sandsea/internal/testkit/server"
	"github.com/sandsea/sandsea/internal/testkit/wait"
)

// patience bounds every single call to the platform.
const patience = 60 * time.Second

// house is the server under attack. Its catalogue has the image "attack": busybox with the program of attacks.
type house struct {
	*server.Server
	files []server.File // of the image
	// red and blue are tenants: users of two projects, neither of which covers the other.
	red, blue *client.Client
	tokens    map[string]string
	// witness is a sandbox that nobody attacks. Its heart must never stop.
	witness *client.Sandbox
}

var shared struct {
	once sync.Once
	h    *house
	err  error
}

func TestMain(m *testing.M) {
	code := m.Run()
	if h := shared.h; h != nil && h.Server != nil {
		if err := h.Down(context.Background()); err != nil {
			fmt.Fprintln(os.Stderr, err)
			code = max(code, 1)
		}
		if code != 0 {
			fmt.Fprintf(os.Stderr, "log of the server:\n%s", h.Log())
		}
	}
	os.Exit(code)
}

// attacked gives the server, and sees to it that the platform and the witness are well when the test is over.
func attacked(t *testing.T) *house {
	t.Helper()
	require.Root(t)
	for _, program := range []string{"bin:busybox", "bin:musl-gcc"} {
		require.Feature(t, program)
	}
	shared.once.Do(func() {
		shared.h = &house{}
		shared.err = shared.h.build(context.Background())
	})
	if shared.err != nil {
		t.Fatal(shared.err)
	}
	h := shared.h
	// The first to be registered is the last to run: after every sandbox of the test is gone.
	t.Cleanup(func() { h.isWell(t) })
	return h
}

func (h *house) build(ctx context.Context) (err error) {
	if h.Server, err = server.Launch(ctx, server.Config{}); err != nil {
		return err
	}
	program, err := compile(ctx)
	if err != nil {
		return err
	}
	if h.files, err = server.Busybox(ctx); err != nil {
		return err
	}
	h.files = append(h.files, server.File{Name: "bin/attack", Body: string(program), Mode: 0o755})
	if _, err = h.Import(ctx, "attack", h.files, nil); err != nil {
		return err
	}
	if err := h.addTenants(ctx); err != nil {
		return err
	}
	h.witness, err = h.Client.Create(ctx, spec(), "")
	if err != nil {
		return err
	}
	for _, err := range h.witness.Start(ctx, &sandseav1.StartRequest{
		Command: client.Shell("while :; do date +%s > /tmp/beat.new; mv /tmp/beat.new /tmp/beat; sleep 1; done"), Detached: true,
	}) {
		if err != nil {
			return err
		}
	}
	return nil
}

// compile builds the attacks.
func compile(ctx context.Context) ([]byte, error) {
	dir, err := os.MkdirTemp("", "sandsea-attack-")
	if err != nil {
		return nil, err
	}
	defer os.RemoveAll(dir)
	out := filepath.Join(dir, "attack")
	cmd := exec.CommandContext(ctx, "musl-gcc", "-static", "-O1", "-std=gnu11", "-Wall", "-Wextra", "-Werror", "-o", out,
		filepath.Join("testdata", "attack.c"))
	if text, err := cmd.CombinedOutput(); err != nil {
		return nil, fmt.Errorf("build the attacks: %w\n%s", err, text)
	}
	return os.ReadFile(out)
}

// addTenants makes tokens of two projects. No call makes tokens yet, so they are put into the store while nobody else
// has it.
func (h *house) addTenants(ctx context.Context) error {
	if err := h.Terminate(); err != nil {
		return err
	}
	st, err := etcd.Open(ctx, etcd.Config{Dir: filepath.Join(h.Dir, "etcd")})
	if err != nil {
		return err
	}
	h.tokens = map[string]string{}
	svc, err := iam.New(ctx, iam.Config{Store: st})
	for _, name := range []string{"red", "blue"} {
		if err != nil {
			break
		}
		h.tokens[name], err = svc.Create(ctx, iam.Request{Principal: "user:" + name, Project: "default/" + name})
	}
	if err := errors.Join(err, st.Close()); err != nil {
		return err
	}
	if err := h.Up(ctx); err != nil {
		return err
	}
	for name, c := range map[string]**client.Client{"red": &h.red, "blue": &h.blue} {
		if *c, err = client.New(client.Config{URL: "http://" + h.Addr(), Token: h.tokens[name]}); err != nil {
			return err
		}
	}
	return nil
}

// isWell checks that the platform serves as if nothing had been.
func (h *house) isWell(t *testing.T) {
	t.Helper()
	ctx, stop := context.WithTimeoutCause(context.WithoutCancel(t.Context()), patience, errors.New("the platform is slow"))
	defer stop()
	began := time.Now()
	sb, err := h.Client.Create(ctx, spec(), "")
	if err != nil {
		t.Errorf("no sandbox can be made any more: %v", err)
		return
	}
	defer func() {
		if err := sb.Stop(ctx); err != nil {
			t.Errorf("and not be stopped: %v", err)
		}
	}()
	works(t, ctx, sb)
	if took := time.Since(began); took > 10*time.Second {
		t.Errorf("a sandbox takes %s", took)
	}
	// The clock is the machine's, so that of the witness must be ours.
	wait.Until(t, patience, func() bool {
		res, err := h.witness.Run(ctx, client.Argv("cat", "/tmp/beat"))
		if err != nil {
			t.Fatalf("the witness does not answer: %v", err)
		}
		beat, err := strconv.ParseInt(strings.TrimSpace(string(res.GetStdout())), 10, 64)
		return err == nil && time.Since(time.Unix(beat, 0)) < 5*time.Second
	}, "the witness's heart")
}

// works shows that commands and files of a sandbox work.
func works(t *testing.T, ctx context.Context, sb *client.Sandbox) {
	t.Helper()
	res, err := sb.Run(ctx, client.Argv("/bin/busybox", "echo", "alive"))
	if err != nil || string(res.GetStdout()) != "alive\n" || res.GetResult().GetExitCode() != 0 {
		t.Errorf("a command gives %q, %v, %v", res.GetStdout(), res.GetResult(), err)
	}
	const path = "/root/of-the-platform"
	if _, err := sb.WriteFile(ctx, &sandseav1.WriteFileHeader{Path: path}, strings.NewReader("bytes")); err != nil {
		t.Errorf("write a file: %v", err)
	}
	var b bytes.Buffer
	if _, err := sb.ReadFile(ctx, &sandseav1.ReadFileRequest{Path: path}, &b); err != nil || b.String() != "bytes" {
		t.Errorf("read it: %q, %v", b.String(), err)
	}
}

// spec is a sandbox for attacks: small, so that bombs meet its limits soon.
func spec(change ...func(*sandseav1.SandboxSpec)) *sandseav1.SandboxSpec {
	s := &sandseav1.SandboxSpec{
		Backend:     sandseav1.Backend_BACKEND_CONTAINER,
		Environment: &sandseav1.Environment{Image: "attack"},
		Limits:      &sandseav1.Limits{MemoryBytes: 64 << 20, Pids: 64, DiskBytes: 64 << 20, OpenFiles: 1024},
	}
	for _, c := range change {
		c(s)
	}
	return s
}

func image(name string) func(*sandseav1.SandboxSpec) {
	return func(s *sandseav1.SandboxSpec) { s.Environment = &sandseav1.Environment{Image: name} }
}

// open makes a sandbox that ends with the test.
func (h *house) open(t *testing.T, change ...func(*sandseav1.SandboxSpec)) *client.Sandbox {
	t.Helper()
	return openAs(t, h.Client, change...)
}

func openAs(t *testing.T, c *client.Client, change ...func(*sandseav1.SandboxSpec)) *client.Sandbox {
	t.Helper()
	sb, err := c.Create(within(t), spec(change...), "")
	if err != nil {
		t.Fatalf("create: %v", err)
	}
	t.Cleanup(func() { stop(t, sb) })
	return sb
}

func stop(t *testing.T, sb *client.Sandbox) {
	t.Helper()
	ctx, done := context.WithTimeoutCause(context.WithoutCancel(t.Context()), patience, errors.New("stop takes too long"))
	defer done()
	if err := sb.Stop(ctx); err != nil {
		t.Errorf("stop: %v", err)
	}
}

// within bounds one call of a test.
func within(t *testing.T) context.Context {
	t.Helper()
	ctx, stop := context.WithTimeoutCause(t.Context(), patience, fmt.Errorf("the test's limit of %s", patience))
	t.Cleanup(stop)
	return ctx
}

// run runs a command to its end, whatever that is.
func run(t *testing.T, sb *client.Sandbox, cmd *sandseav1.Command) *sandseav1.RunResponse {
	t.Helper()
	res, err := sb.Run(within(t), cmd)
	if err != nil {
		t.Fatalf("run %q: %v", cmd.GetArgv(), err)
	}
	return res
}

// sh runs a shell line that must exit with 0 and gives its output.
func sh(t *testing.T, sb *client.Sandbox, line string) string {
	t.Helper()
	res := run(t, sb, client.Shell(line))
	if r := res.GetResult(); r.GetExitCode() != 0 {
		t.Fatalf("%s: %v\nstdout: %s\nstderr: %s", line, r, res.GetStdout(), res.GetStderr())
	}
	return string(res.GetStdout())
}

// try is one attempt of an attack: what was tried, "done" or why not, and perhaps more.
type try struct {
	name, outcome, more string
}

// attack makes attempts and wants them to be made to their end.
func attack(t *testing.T, sb *client.Sandbox, args ...string) []try {
	t.Helper()
	return attackAs(t, sb, "", args...)
}

func attackAs(t *testing.T, sb *client.Sandbox, user string, args ...string) []try {
	t.Helper()
	cmd := client.Argv(append([]string{"/bin/attack"}, args...)...)
	cmd.User = user
	res := run(t, sb, cmd)
	if r := res.GetResult(); r.GetExitCode() != 0 || r.GetStartFailure() != nil {
		t.Fatalf("attack %q: %v\n%s%s", args, r, res.GetStdout(), res.GetStderr())
	}
	tries := parse(string(res.GetStdout()))
	if len(tries) == 0 {
		t.Fatalf("attack %q: nothing was tried", args)
	}
	return tries
}

func parse(out string) []try {
	var tries []try
	for line := range strings.Lines(out) {
		f := strings.SplitN(strings.TrimSuffix(line, "\n"), "\t", 3)
		f = append(f, "", "")
		tries = append(tries, try{f[0], f[1], f[2]})
	}
	return tries
}

// outcome of a named try.
func outcome(t *testing.T, tries []try, name string) string {
	t.Helper()
	for _, y := range tries {
		if y.name == name {
			return y.outcome
		}
	}
	t.Fatalf("%q was not tried", name)
	return ""
}

// begin starts a command that goes on, and gives its number.
func begin(t *testing.T, sb *client.Sandbox, cmd *sandseav1.Command) int64 {
	t.Helper()
	var number int64
	for ev, err := range sb.Start(within(t), &sandseav1.StartRequest{Command: cmd, Detached: true}) {
		if err != nil {
			t.Fatalf("start %q: %v", cmd.GetArgv(), err)
		}
		if p := ev.GetStarted(); p != nil {
			number = p.GetNumber()
		}
		if p := ev.GetExited(); p != nil {
			t.Fatalf("start %q: %v", cmd.GetArgv(), p.GetResult())
		}
	}
	return number
}

// said waits until a command that goes on has printed a line that begins with word, and gives the line.
func said(t *testing.T, sb *client.Sandbox, number int64, word string) string {
	t.Helper()
	var out strings.Builder
	ctx, stop := context.WithTimeoutCause(t.Context(), patience, fmt.Errorf("process %d does not say %q", number, word))
	defer stop()
	for ev, err := range sb.Attach(ctx, &sandseav1.AttachRequest{Number: number}) {
		if err != nil {
			t.Fatalf("attach: %v: %q", errors.Join(err, context.Cause(ctx)), out.String())
		}
		if p := ev.GetExited(); p != nil {
			break
		}
		out.Write(ev.GetData().GetData())
		for line := range strings.Lines(out.String()) {
			if strings.HasPrefix(line, word) && strings.HasSuffix(line, "\n") {
				return strings.TrimSuffix(line, "\n")
			}
		}
	}
	t.Fatalf("process %d ended and said %q", number, out.String())
	return ""
}
