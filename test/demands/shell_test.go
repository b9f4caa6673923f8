package demands

import (
	"strings"
	"testing"
	"time"

	sandseav1 "github.com/sandsea/sandsea/api/sandsea/v1"
	"github.com/sandsea/sandsea/internal/testkit/server"
	"github.com/sandsea/sandsea/internal/testkit/wait"
)

func TestD18AShellSessionAnswersEveryPieceOfScript(t *testing.T) {
	t.Parallel()
	sb := open(t)
	ctx := within(t, 120*time.Second)
	h, err := sb.OpenShell(ctx, &sandseav1.OpenShellRequest{})
	if err != nil {
		t.Fatal(err)
	}
	ask := func(script string, timeout int64) *sandseav1.RunInShellResponse {
		t.Helper()
		res, err := h.RunRequest(ctx, &sandseav1.RunInShellRequest{Script: script, TimeoutMs: timeout})
		if err != nil {
			t.Fatalf("%q: %v", script, err)
		}
		return res
	}
	for _, tt := range []struct {
		script, out string
		code        int32
		syntax      bool
	}{
		{"cd /tmp; X='a b'; export Y=1", "", 0, false},
		{`echo "$PWD $X $Y"`, "/tmp a b 1\n", 0, false},
		{"exit 3", "", 3, false},
		{`echo "$X"`, "a b\n", 0, false},
		{"set -e; false; echo never", "", 1, false},
		{"set +e; false; echo on", "on\n", 0, false},
		{"cat <<END\none\n  two\nEND", "one\n  two\n", 0, false},
		{"# only a comment", "", 0, false},
		{"", "", 0, false},
		{"echo 'unclosed", "", 2, true},
		{"if true; then", "", 2, true},
		{"printf 'no line end'", "no line end", 0, false},
		{"echo a; echo b", "a\nb\n", 0, false},
		{"ls --color=auto / | head -1; tput bold 2>/dev/null; true", "bin\n", 0, false},
		{"kill -9 $$", "", 137, false},
		{`echo "still $X"`, "still a b\n", 0, false},
	} {
		res := ask(tt.script, 0)
		r := res.GetRun()
		if string(r.GetStdout()) != tt.out || res.GetSyntaxError() != tt.syntax {
			t.Errorf("%q: %q, %q, syntax error %v", tt.script, r.GetStdout(), r.GetStderr(), res.GetSyntaxError())
		}
		if code := r.GetResult().GetExitCode(); code != tt.code && !tt.syntax || tt.syntax && code == 0 {
			t.Errorf("%q: code %d, want %d", tt.script, code, tt.code)
		}
		if strings.ContainsAny(string(r.GetStdout()), "\r\x1b") {
			t.Errorf("%q: not plain: %q", tt.script, r.GetStdout())
		}
	}
	// It survives a time-out and an interrupt.
	res := ask("X=lost; echo before; sleep 1000", 3000)
	if !res.GetRun().GetResult().GetTimedOut() || string(res.GetRun().GetStdout()) != "before\n" || !res.GetStateLost() {
		t.Errorf("timed out: %v", res)
	}
	done := make(chan *sandseav1.RunInShellResponse, 1)
	go func() {
		res, _ := h.Run(ctx, "touch /tmp/inside; sleep 1000")
		done <- res
	}()
	wait.Until(t, 20*time.Second, func() bool {
		_, err := sb.Stat(ctx, &sandseav1.StatFileRequest{Path: "/tmp/inside"})
		return err == nil
	}, "it runs")
	res = server.Interrupt(t, h, done)
	if r := res.GetRun().GetResult(); r.GetTimedOut() || r.GetExitCode() != 130 {
		t.Errorf("interrupted: %v", r)
	}
	if got := string(ask(`echo "$X $PWD"`, 0).GetRun().GetStdout()); got != "a b /tmp\n" {
		t.Errorf("afterwards: %q", got)
	}
}
