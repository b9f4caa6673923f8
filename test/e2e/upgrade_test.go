package e2e

import (
	"context"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"

	"connectrpc.com/connect"

	"github.com/sandsea/sandsea/api/errdefs"
	sandseav1 "github.com/sandsea/sandsea/api/sandsea/v1"
	"github.com/sandsea/sandsea/client"
	"github.com/sandsea/sandsea/internal/testkit/require"
	"github.com/sandsea/sandsea/internal/testkit/server"
	"github.com/sandsea/sandsea/internal/testkit/wait"
)

// build makes a program of the tree.
func build(t *testing.T, out, pkg, ldflags string) {
	t.Helper()
	root, err := server.Root()
	if err != nil {
		t.Fatal(err)
	}
	cmd := exec.CommandContext(t.Context(), "go", "build", "-buildvcs=false", "-ldflags", ldflags, "-o", out, pkg)
	cmd.Dir, cmd.Env = root, append(os.Environ(), "CGO_ENABLED=0")
	if text, err := cmd.CombinedOutput(); err != nil {
		t.Fatalf("build %s: %v\n%s", pkg, err, text)
	}
}

// release builds the platform as a version of that name.
func release(t *testing.T, dir, name string) string {
	t.Helper()
	out := filepath.Join(dir, name)
	build(t, out, "./cmd/sandsea", "-X github.com/sandsea/sandsea/internal/version.release="+name)
	return out
}

// writers are commands that write a sequence all the time.
type writer struct {
	sb     *client.Sandbox
	number int64
	seed   string
}

// TestAnUpgradeLosesNothing goes from one version to another and back under load: the daemons are exchanged, the keeper
// stays the same process, and no process and no byte is lost.
func TestAnUpgradeLosesNothing(t *testing.T) {
	require.Root(t)
	require.Feature(t, "bin:busybox")
	const sandboxes, each = 4, 5
	dir := t.TempDir()
	versions := map[string]string{"v1.0.0-old": release(t, dir, "v1.0.0-old"), "v2.0.0-new": release(t, dir, "v2.0.0-new")}
	s := server.Start(t, server.Config{Binary: versions["v1.0.0-old"]})

	files, err := server.Busybox(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	program := filepath.Join(dir, "writer")
	build(t, program, "./test/e2e/testdata/writer", "-s -w")
	body, err := os.ReadFile(program)
	if err != nil {
		t.Fatal(err)
	}
	files = append(files, server.File{Name: "bin/writer", Body: string(body), Mode: 0o755})
	if _, err := s.Import(within(t, time.Minute), "busybox", files, nil); err != nil {
		t.Fatal(err)
	}
	var boxes []*client.Sandbox
	var writers []writer
	for i := range sandboxes {
		sb := openOn(t, s)
		boxes = append(boxes, sb)
		for k := range each {
			seed := fmt.Sprintf("%d-%d", i, k)
			writers = append(writers, writer{sb, launchArgv(t, sb, "writer", seed), seed})
		}
	}
	term := openTerminal(t, boxes[0])
	keeper := s.Pid("keeper")
	before := living(t, boxes)
	if len(before) != sandboxes*each+1 || slices.ContainsFunc(before, func(p string) bool { return strings.HasSuffix(p, "/0") }) {
		t.Fatalf("processes: %v", before)
	}

	for _, to := range []string{"v2.0.0-new", "v1.0.0-old"} {
		ran := make(chan error, 1)
		req := &sandseav1.RunRequest{Command: client.Shell("sleep 4; echo done"), Key: "during-" + to}
		go func() {
			_, err := boxes[1].RunRequest(within(t, time.Minute), req)
			ran <- err
		}()
		lost := make(chan error, 1)
		go func() {
			_, err := boxes[2].Run(within(t, time.Minute), client.Shell("sleep 4; echo "+to+" > /tmp/unkeyed"))
			lost <- err
		}()
		wait.Until(t, patience, func() bool { return runs(t, boxes[1], "sleep 4") && runs(t, boxes[2], "sleep 4") })

		began := time.Now()
		if err := s.Terminate(); err != nil {
			t.Fatal(err)
		}
		stopped := time.Since(began)
		if err := <-ran; !errors.Is(err, errdefs.Unavailable) {
			t.Errorf("a call with a key that the stop cut: %v", err)
		}
		if err := <-lost; !errors.Is(err, errdefs.Unknown) {
			t.Errorf("a call without a key that the stop cut: %v", err)
		}
		s.Binary = versions[to]
		if err := s.Up(within(t, patience)); err != nil {
			t.Fatal(err)
		}
		away := time.Since(began)
		t.Logf("to %s: stopped in %s, without a server for %s", to, stopped.Round(time.Millisecond), away.Round(time.Millisecond))

		who, err := s.Client.IAM.WhoAmI(within(t, patience), connect.NewRequest(&sandseav1.WhoAmIRequest{}))
		if err != nil || who.Msg.GetVersion() != to {
			t.Errorf("version %s, %v", who.Msg.GetVersion(), err)
		}
		if pid := s.Pid("keeper"); pid != keeper {
			t.Errorf("the keeper is process %d, was %d", pid, keeper)
		}
		for _, part := range []string{"keeper", "spawner"} {
			if exe, err := os.Readlink(fmt.Sprintf("/proc/%d/exe", s.Pid(part))); err != nil || exe != versions[to] {
				t.Errorf("the %s runs %s, %v", part, exe, err)
			}
		}
		if after := living(t, boxes); !slices.Equal(before, after) {
			t.Errorf("processes: %v, before %v", after, before)
		}
		// The call with the key is answered by its first run.
		res, err := boxes[1].RunRequest(within(t, time.Minute), req)
		if err != nil || string(res.GetStdout()) != "done\n" {
			t.Errorf("asked again: %v, %v", res, err)
		}
		wait.Until(t, patience, func() bool { return sh(t, boxes[2], "cat /tmp/unkeyed 2>/dev/null || true") == to+"\n" })
		term.says(t, "echo t$((40+2))", "t42")
		// The spawner of the version at hand makes sandboxes.
		openOn(t, s)
	}

	var longest int64
	for _, w := range writers {
		if err := w.sb.Signal(within(t, patience), w.number, 15, false); err != nil {
			t.Fatal(err)
		}
		longest = max(longest, w.check(t))
	}
	t.Logf("%d writers, longest write %s", len(writers), time.Duration(longest)*time.Microsecond)
	for line := range strings.Lines(s.Log()) {
		if strings.Contains(line, "level=WARN") || strings.Contains(line, "level=ERROR") {
			t.Errorf("the daemons complain: %s", line)
		}
	}
}

func launchArgv(t *testing.T, sb *client.Sandbox, argv ...string) int64 {
	t.Helper()
	req := &sandseav1.StartRequest{Command: &sandseav1.Command{Argv: argv}, Detached: true}
	for e, err := range sb.Start(within(t, patience), req) {
		if err != nil {
			t.Fatal(err)
		}
		if p := e.GetStarted(); p != nil {
			return p.GetNumber()
		}
	}
	t.Fatalf("%v did not start", argv)
	return 0
}

// living names every process of the writers and terminals, by sandbox, number and host process.
func living(t *testing.T, boxes []*client.Sandbox) (list []string) {
	t.Helper()
	for _, sb := range boxes {
		all, err := sb.Processes(within(t, patience))
		if err != nil {
			t.Fatal(err)
		}
		for _, p := range all {
			if p.GetResult() == nil && !strings.Contains(strings.Join(p.GetCommand().GetArgv(), " "), "sleep 4") {
				list = append(list, fmt.Sprintf("%s/%d/%d", sb.ID, p.GetNumber(), p.GetHostPid()))
			}
		}
	}
	slices.Sort(list)
	return list
}

func runs(t *testing.T, sb *client.Sandbox, words string) bool {
	t.Helper()
	all, err := sb.Processes(within(t, patience))
	return err == nil && slices.ContainsFunc(all, func(p *sandseav1.Process) bool {
		return p.GetResult() == nil && strings.Contains(strings.Join(p.GetCommand().GetArgv(), " "), words)
	})
}

// check reads everything that a writer has written and compares; it gives the longest write in microseconds.
func (w writer) check(t *testing.T) (longest int64) {
	t.Helper()
	var out, errs []byte
	for e, err := range w.sb.Attach(within(t, time.Minute), &sandseav1.AttachRequest{Number: w.number}) {
		if err != nil {
			t.Fatal(err)
		}
		if d := e.GetData(); d.GetStream() == sandseav1.Stream_STREAM_STDERR {
			errs = append(errs, d.GetData()...)
		} else {
			out = append(out, d.GetData()...)
		}
		if e.GetGap() != nil {
			t.Errorf("%s: a gap: %v", w.seed, e.GetGap())
		}
	}
	var total int
	if _, err := fmt.Sscan(string(errs), &total, &longest); err != nil || total != len(out) {
		t.Errorf("%s: %d bytes recorded, the writer says %q", w.seed, len(out), errs)
	}
	n := 0
	for line := range strings.Lines(string(out)) {
		if !strings.HasPrefix(line, fmt.Sprintf("%s %d --", w.seed, n)) {
			t.Fatalf("%s: line %d is %q", w.seed, n, line)
		}
		n++
	}
	return longest
}

// terminal is a shell on a terminal that outlives its readers.
type terminal struct {
	sb     *client.Sandbox
	number int64
	sent   int64
}

func openTerminal(t *testing.T, sb *client.Sandbox) *terminal {
	t.Helper()
	req := &sandseav1.StartRequest{
		Command: &sandseav1.Command{Argv: []string{"sh"}}, Detached: true,
		Terminal: &sandseav1.TerminalSize{Rows: 24, Columns: 80}, Stdin: true,
	}
	for e, err := range sb.Start(within(t, patience), req) {
		if err != nil {
			t.Fatal(err)
		}
		if p := e.GetStarted(); p != nil {
			return &terminal{sb: sb, number: p.GetNumber()}
		}
	}
	t.Fatal("no terminal")
	return nil
}

// says types a line and waits for an answer.
func (m *terminal) says(t *testing.T, line, answer string) {
	t.Helper()
	next, err := m.sb.SendInput(within(t, patience), m.number, m.sent, []byte(line+"\n"))
	if err != nil {
		t.Fatal(err)
	}
	m.sent = next
	ctx, done := context.WithTimeoutCause(t.Context(), patience, context.DeadlineExceeded)
	defer done()
	var out []byte
	for e, err := range m.sb.Attach(ctx, &sandseav1.AttachRequest{Number: m.number}) {
		if err != nil {
			t.Fatalf("the terminal says %q, %v", out, err)
		}
		out = append(out, e.GetData().GetData()...)
		if strings.Count(string(out), answer) >= strings.Count(string(out), line) && strings.Contains(string(out), answer) {
			return
		}
	}
	t.Fatalf("the terminal says %q", out)
}
