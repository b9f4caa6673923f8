package native

import (
	"context"
	"crypto/rand"
	"io"
	"os"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"

	"github.com/sandsea/sandsea/internal/chronus"
	"github.com/sandsea/sandsea/internal/edge/backend"
	"github.com/sandsea/sandsea/internal/layers/plan"
	"github.com/sandsea/sandsea/internal/linux/pipe"
	"github.com/sandsea/sandsea/internal/sandbox"
	"github.com/sandsea/sandsea/internal/testkit/wait"
)

// box is a sandbox under test.
type box struct {
	*Instance
	tb testing.TB

	boxMu  sync.Mutex
	number int64                  // guarded by boxMu
	ends   map[int64]chronus.Exit // guarded by boxMu
}

func newID(tb testing.TB) sandbox.ID {
	tb.Helper()
	id, err := sandbox.Mint(1, rand.Reader)
	if err != nil {
		tb.Fatal(err)
	}
	return id
}

// start starts a sandbox that is stopped when the test ends.
func (e *edge) start(tb testing.TB, p plan.Plan, l sandbox.Limits) *box {
	tb.Helper()
	i, err := e.Start(tb.Context(), backend.Spec{ID: newID(tb), Plan: p, Limits: l, Hard: time.Now().Add(time.Hour)})
	if err != nil {
		tb.Fatal(err)
	}
	b := &box{Instance: i.(*Instance), tb: tb, ends: map[int64]chronus.Exit{}}
	go func() { // ends with the line
		for x, err := range i.Channel().Exits() {
			if err != nil {
				return
			}
			b.boxMu.Lock()
			b.ends[x.Number] = x
			b.boxMu.Unlock()
			_ = i.Channel().Ack(x.Number)
		}
	}()
	tb.Cleanup(func() { b.stop(tb) })
	return b
}

func (b *box) stop(tb testing.TB) backend.Exit {
	tb.Helper()
	ctx, cancel := context.WithTimeout(context.Background(), patience)
	defer cancel()
	x, err := b.Stop(ctx, 0)
	b.mu.Lock()
	defer b.mu.Unlock()
	if err != nil && !b.left {
		tb.Errorf("stop: %v", err)
	}
	return x
}

// begin starts a command and returns its output and its end.
func (b *box) begin(ids chronus.IDs, argv ...string) (output func() string, end func() syscall.WaitStatus) {
	b.tb.Helper()
	b.boxMu.Lock()
	b.number++
	number := b.number
	b.boxMu.Unlock()
	x, err := b.NewExec(b.tb.Context(), number)
	if err != nil {
		b.tb.Fatal(err)
	}
	r, w, err := pipe.New()
	if err != nil {
		b.tb.Fatal(err)
	}
	null, err := os.Open("/dev/null")
	if err != nil {
		b.tb.Fatal(err)
	}
	stdio := x.Stdio()
	stdio.In, stdio.Out = null, w
	_, err = b.Channel().Spawn(b.tb.Context(), chronus.Spawn{
		Number: number, Argv: argv, Cwd: "/", IDs: ids, Umask: 0o22,
		Env: []string{"PATH=/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin", "HOME=/root"},
	}, stdio)
	w.Close()
	null.Close()
	if err != nil {
		r.Close()
		b.tb.Fatalf("%q: %v", argv, err)
	}
	output = sync.OnceValue(func() string {
		defer r.Close()
		out, err := io.ReadAll(io.LimitReader(r, 1<<20))
		if err != nil {
			b.tb.Error(err)
		}
		return string(out)
	})
	return output, func() syscall.WaitStatus {
		b.tb.Helper()
		var e chronus.Exit
		wait.Until(b.tb, patience, func() bool {
			b.boxMu.Lock()
			defer b.boxMu.Unlock()
			var ok bool
			e, ok = b.ends[number]
			return ok
		}, "the end of "+strings.Join(argv, " "))
		if err := x.Remove(); err != nil {
			b.tb.Error(err)
		}
		return e.Status
	}
}

// run runs a script as a user of the sandbox and gives its output without the last newline.
func (b *box) run(ids chronus.IDs, script string) (string, syscall.WaitStatus) {
	b.tb.Helper()
	out, end := b.begin(ids, "/bin/sh", "-c", script+"\nexit $?")
	text := out()
	return strings.TrimSuffix(text, "\n"), end()
}

// sh runs a script as root that must succeed.
func (b *box) sh(script string) string {
	b.tb.Helper()
	out, ws := b.run(chronus.IDs{}, script)
	if ws != 0 {
		b.tb.Errorf("%s\nstatus %d, signal %v: %s", script, ws.ExitStatus(), ws.Signal(), out)
	}
	return out
}
