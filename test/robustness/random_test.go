package robustness

import (
	"context"
	"errors"
	"fmt"
	"math/rand/v2"
	"os"
	"strconv"
	"strings"
	"sync"
	"testing"
	"time"

	"golang.org/x/sync/errgroup"

	"github.com/sandsea/sandsea/api/errdefs"
	sandseav1 "github.com/sandsea/sandsea/api/sandsea/v1"
	"github.com/sandsea/sandsea/client"
	"github.com/sandsea/sandsea/internal/testkit/server"
	"github.com/sandsea/sandsea/internal/testkit/wait"
)

// setting reads a number from the environment: SEED and SECONDS make a run another or longer.
func setting(name string, fallback int) int {
	if n, err := strconv.Atoi(os.Getenv(name)); err == nil {
		return n
	}
	return fallback
}

// passing reports whether an error says no more than that a part is away for a moment.
func passing(err error) bool {
	switch errdefs.KindOf(err) {
	case errdefs.Unavailable, errdefs.Unknown, errdefs.Deadline, errdefs.Exhausted:
		return true
	default:
		return false
	}
}

// insist repeats a call whose repetition does no harm until it gets an answer.
func insist(t testing.TB, what string, call func(context.Context) error) error {
	var last error
	for began := time.Now(); time.Since(began) < 60*time.Second && t.Context().Err() == nil; {
		ctx, stop := context.WithTimeoutCause(t.Context(), 20*time.Second, errors.New("no answer in 20 s"))
		last = call(ctx)
		stop()
		if last == nil {
			return nil
		}
		if !passing(last) {
			return fmt.Errorf("%s: %w", what, last)
		}
		pause(t, 20*time.Millisecond)
	}
	return fmt.Errorf("%s: still after a minute: %w", what, last)
}

// rollout is what a training loop does with a sandbox, each step under a key or harmless to repeat, and all outcomes
// checked.
func rollout(t testing.TB, s *server.Server, name string, r *rand.Rand) error {
	var sb *client.Sandbox
	err := insist(t, name+": create", func(ctx context.Context) (err error) {
		again, err := s.Client.Create(ctx, spec(), name)
		if err == nil && sb != nil && sb.ID != again.ID {
			return errdefs.New(errdefs.Internal, "", "the key gave %s and %s", sb.ID, again.ID)
		}
		sb = again
		return err
	})
	if err != nil {
		return err
	}
	for step := range 1 + r.IntN(4) {
		lines, code := 1+r.IntN(300), r.IntN(100)
		body := fmt.Sprintf("%s step %d %d", name, step, r.Uint64())
		path := fmt.Sprintf("/tmp/file-%d", step)
		err := insist(t, name+": write", func(ctx context.Context) error {
			_, err := sb.WriteFile(ctx, &sandseav1.WriteFileHeader{Path: path}, strings.NewReader(body))
			return err
		})
		if err != nil {
			return err
		}
		signal, last := int32(0), fmt.Sprintf("exit %d", code)
		kind := r.IntN(4)
		switch kind {
		case 0: // runs into its limit
			code, last = 124, "(setsid sleep 60 &); sleep 60"
		case 1: // dies by a signal
			code, signal, last = 128+11, 11, "kill -11 $$"
		}
		cmd := client.Shell(fmt.Sprintf("echo once >>/tmp/count-%d; seq 1 %d; cat %s >&2; sleep 0.0%d; %s", step, lines, path, r.IntN(10), last))
		if kind == 0 {
			cmd.TimeoutMs = int64(3000 + r.IntN(500))
		}
		var res *sandseav1.RunResponse
		err = insist(t, name+": run", func(ctx context.Context) (err error) {
			res, err = sb.RunRequest(ctx, &sandseav1.RunRequest{Command: cmd, Key: fmt.Sprint("step-", step)})
			return err
		})
		if err != nil {
			return err
		}
		var want strings.Builder
		for n := 1; n <= lines; n++ {
			fmt.Fprintln(&want, n)
		}
		got := res.GetResult()
		if string(res.GetStdout()) != want.String() || string(res.GetStderr()) != body || got.GetExitCode() != int32(code) ||
			got.GetTimedOut() != (kind == 0) || kind != 0 && got.GetSignal() != signal || got.GetOom() || got.GetInfraError() != "" {
			return fmt.Errorf("%s, step %d, want code %d: %d of %d bytes, %q, %v", name, step, code, len(res.GetStdout()), want.Len(),
				res.GetStderr(), got)
		}
		var count strings.Builder
		err = insist(t, name+": read", func(ctx context.Context) error {
			count.Reset()
			_, err := sb.ReadFile(ctx, &sandseav1.ReadFileRequest{Path: fmt.Sprintf("/tmp/count-%d", step)}, &count)
			return err
		})
		if err != nil {
			return err
		}
		if count.String() != "once\n" {
			return fmt.Errorf("%s, step %d: its command ran %q", name, step, count.String())
		}
	}
	if err := insist(t, name+": stop", sb.Stop); err != nil {
		return err
	}
	return insist(t, name+": get", func(ctx context.Context) error {
		i, err := sb.Info(ctx)
		if err == nil && i.GetEnd().GetCause() != "stopped" {
			err = fmt.Errorf("ended %v", i.GetEnd())
		}
		return err
	})
}

func TestRandomTrafficUnderRandomKills(t *testing.T) {
	s := begin(t)
	seed, seconds := setting("SEED", 1), setting("SECONDS", 12)
	t.Logf("SEED=%d SECONDS=%d", seed, seconds)
	end := time.Now().Add(time.Duration(seconds) * time.Second)
	var mu sync.Mutex
	done := 0
	var g errgroup.Group
	for worker := range 6 {
		g.Go(func() error {
			r := rand.New(rand.NewPCG(uint64(seed), uint64(worker)))
			for n := 0; time.Now().Before(end) && !t.Failed(); n++ {
				if err := rollout(t, s, fmt.Sprintf("w%d-%d", worker, n), r); err != nil {
					t.Error(err)
					return nil
				}
				mu.Lock()
				done++
				mu.Unlock()
			}
			return nil
		})
	}
	own := open(t, s)
	r := rand.New(rand.NewPCG(uint64(seed), 1000))
	killed := map[string]int{}
	for time.Now().Before(end) && !t.Failed() {
		pause(t, time.Duration(r.IntN(700))*time.Millisecond)
		// One at a time: only edge and keeper together may lose sandboxes.
		part := []string{"up", "keeper", "spawner"}[r.IntN(3)]
		if err := s.Kill(part); err != nil {
			t.Fatal(err)
		}
		killed[part]++
		if part == "up" {
			pause(t, time.Duration(r.IntN(300))*time.Millisecond)
			if err := s.Up(t.Context()); err != nil {
				t.Fatal(err)
			}
		}
		wait.Until(t, 20*time.Second, func() bool { return s.Pid("keeper") != 0 && s.Pid("spawner") != 0 }, "all parts are back")
		// The new keeper has everything once a command runs.
		if err := insist(t, "after a kill", func(ctx context.Context) error {
			res, err := own.Run(ctx, client.Argv("true"))
			if err == nil && res.GetResult().GetExitCode() != 0 {
				err = fmt.Errorf("true: %v", res.GetResult())
			}
			return err
		}); err != nil {
			t.Error(err)
		}
		pause(t, 150*time.Millisecond)
	}
	_ = g.Wait()
	if err := own.Stop(within(t, 30*time.Second)); err != nil {
		t.Error(err)
	}
	t.Logf("%d rollouts right under %v kills", done, killed)
	onlyGroups(t, s, 0)
}
