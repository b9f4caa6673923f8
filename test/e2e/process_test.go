package e2e

import (
	"bytes"
	"testing"
	"time"

	sandseav1 "github.com/sandsea/sandsea/api/sandsea/v1"
	"github.com/sandsea/sandsea/client"
	"github.com/sandsea/sandsea/internal/testkit/wait"
)

// start starts a command that goes on by itself and gives its number.
func start(t testing.TB, sb *client.Sandbox, cmd *sandseav1.Command) int64 {
	t.Helper()
	return startRequest(t, sb, &sandseav1.StartRequest{Command: cmd, Detached: true})
}

func startRequest(t testing.TB, sb *client.Sandbox, req *sandseav1.StartRequest) int64 {
	t.Helper()
	for e, err := range sb.Start(within(t, 30*time.Second), req) {
		if err != nil {
			t.Fatalf("start %q: %v", req.GetCommand().GetArgv(), err)
		}
		if p := e.GetStarted(); p != nil {
			return p.GetNumber()
		}
	}
	t.Fatalf("start %q: no number", req.GetCommand().GetArgv())
	return 0
}

// attach reads a record to its end: the bytes of each stream from the asked offset on, gaps as NULs, and the process as
// the last event showed it.
func attach(t testing.TB, sb *client.Sandbox, req *sandseav1.AttachRequest) (map[sandseav1.Stream][]byte, *sandseav1.Process) {
	t.Helper()
	out := map[sandseav1.Stream][]byte{}
	at := map[sandseav1.Stream]int64{
		sandseav1.Stream_STREAM_STDOUT: req.GetStdoutOffset(), sandseav1.Stream_STREAM_STDERR: req.GetStderrOffset(),
	}
	var last *sandseav1.Process
	for e, err := range sb.Attach(within(t, 60*time.Second), req) {
		if err != nil {
			t.Fatalf("attach: %v", err)
		}
		if d := e.GetData(); d != nil {
			if d.GetOffset() != at[d.GetStream()] {
				t.Fatalf("%s: a piece at %d, want %d", d.GetStream(), d.GetOffset(), at[d.GetStream()])
			}
			at[d.GetStream()] += int64(len(d.GetData()))
			out[d.GetStream()] = append(out[d.GetStream()], d.GetData()...)
		}
		if g := e.GetGap(); g != nil {
			if g.GetOffset() != at[g.GetStream()] || g.GetBytes() <= 0 {
				t.Fatalf("%s: a gap %v, want one at %d", g.GetStream(), g, at[g.GetStream()])
			}
			at[g.GetStream()] += g.GetBytes()
			out[g.GetStream()] = append(out[g.GetStream()], make([]byte, g.GetBytes())...)
		}
		if p := e.GetExited(); p != nil {
			last = p
		}
	}
	return out, last
}

// awaitOutput waits until a command's standard output begins with want.
func awaitOutput(t testing.TB, sb *client.Sandbox, number int64, want string) {
	t.Helper()
	var got []byte
	ok := wait.For(30*time.Second, func() bool {
		out, _ := attach(t, sb, &sandseav1.AttachRequest{Number: number, NoFollow: true})
		got = out[sandseav1.Stream_STREAM_STDOUT]
		return bytes.HasPrefix(got, []byte(want))
	})
	if !ok {
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
