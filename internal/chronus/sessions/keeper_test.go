package sessions_test

import (
	"context"
	"fmt"
	"log/slog"
	"os"
	"os/exec"
	"os/signal"
	"path/filepath"
	"strings"
	"sync/atomic"
	"syscall"
	"testing"
	"time"

	"github.com/sandsea/sandsea/internal/chronus/sessions"
	"github.com/sandsea/sandsea/internal/edge/backend/fake"
	"github.com/sandsea/sandsea/internal/keeper"
	"github.com/sandsea/sandsea/internal/testkit/wait"
)

// keeperEnv makes the test binary a keeper that serves the directory it names.
const keeperEnv = "SANDSEA_SESSIONS_TEST_KEEPER"

func TestMain(m *testing.M) {
	dir := os.Getenv(keeperEnv)
	if dir == "" {
		os.Exit(m.Run())
	}
	ctx, stop := signal.NotifyContext(context.Background(), syscall.SIGTERM)
	err := keeper.Run(ctx, keeper.Config{
		Socket: filepath.Join(dir, "keeper.sock"), DataID: "test", Index: dir,
		Log: slog.New(slog.NewTextHandler(os.Stderr, nil)),
	})
	stop()
	if err != nil {
		fmt.Fprintln(os.Stderr, err)
		os.Exit(1)
	}
	os.Exit(0)
}

// realKeeper is a keeper process that can be killed.
type realKeeper struct {
	dir string
	cmd *exec.Cmd
}

func (k *realKeeper) start(t *testing.T) keeper.Client {
	t.Helper()
	k.cmd = exec.Command(os.Args[0], "-test.run=^$")
	k.cmd.Env = append(os.Environ(), keeperEnv+"="+k.dir)
	k.cmd.Stderr = os.Stderr
	if err := k.cmd.Start(); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(k.kill)
	return k.dial(t)
}

func (k *realKeeper) dial(t *testing.T) keeper.Client {
	t.Helper()
	var c *keeper.Conn
	wait.Until(t, patience, func() bool {
		var err error
		c, err = keeper.Dial(t.Context(), filepath.Join(k.dir, "keeper.sock"), "test")
		return err == nil
	}, "the keeper's socket")
	return c
}

// kill is kill -9.
func (k *realKeeper) kill() {
	_ = k.cmd.Process.Kill()
	_ = k.cmd.Wait()
}

func TestWithTheRealKeeperNothingIsLostWhoeverIsKilled(t *testing.T) {
	k := &realKeeper{dir: t.TempDir()}
	r := &rig{t: t, world: fake.NewWorld(), keeper: fake.NewKeeper(), connect: k.dial}
	first := k.start(t)
	r.begin(first)

	const lines = 2500
	talker := r.launch(cmd("tick", fmt.Sprint(lines), "0.001")).Number
	flood := r.launch(cmd("bytes", fmt.Sprint(20<<20))).Number
	limited := cmd("tree", "60")
	limited.Command.Timeout = 1200 * time.Millisecond
	ln := r.launch(limited).Number
	s := cmd("cat")
	s.Stream = true
	cn := r.launch(s).Number
	sent := int64(0)
	for round := range 3 {
		text := fmt.Sprintf("round %d\n", round)
		next, err := r.table.SendInput(t.Context(), cn, sent, []byte(text))
		if err != nil {
			t.Fatal(err)
		}
		sent = next
		k.kill()
		r.link = k.start(t)
		r.relay.set(r.link)
		r.events()
		if err := r.backend().Keep(t.Context(), r.link); err != nil {
			t.Fatal(err)
		}
		if err := r.table.Rerecord(t.Context()); err != nil {
			t.Fatal(err)
		}
		r.restart()
	}
	if err := r.table.CloseInput(t.Context(), cn); err != nil {
		t.Fatal(err)
	}
	if out, end := r.attach(cn, 0, false); out != "round 0\nround 1\nround 2\n" || end.Result.ExitCode != 0 {
		t.Errorf("input over restarts: %q, %+v", out, end.Result)
	}
	out, end := r.attach(talker, 0, false)
	var want strings.Builder
	for i := range lines {
		fmt.Fprintln(&want, "tick", i)
	}
	if out != want.String() || end.Result.ExitCode != 0 {
		t.Errorf("the record has %d bytes, %d were written; %+v", len(out), want.Len(), end.Result)
	}
	if out, end := r.attach(flood, 0, false); out != string(fake.Pattern(0, 20<<20)) || end.Result.StdoutBytes != 20<<20 {
		t.Errorf("the flood's record differs: %d bytes, %+v", len(out), end.Result)
	}
	if out, end := r.attach(ln, 0, false); !end.Result.TimedOut || out != "so far\n" {
		t.Errorf("the time limit: %q, %+v", out, end.Result)
	}
	wait.Until(t, patience, func() bool { return r.world.Tasks(r.id) == 0 }, "no process left")
	if a := r.run(cmd("background", "0.3")); string(a.Stdout.Head) != "hi\n" {
		t.Errorf("%q", a.Stdout.Head)
	}
}

func TestAResultCountsWhatALosslessReaderThatLagsIsStillToGet(t *testing.T) {
	k := &realKeeper{dir: t.TempDir()}
	var late, looks atomic.Int64
	r := &rig{t: t, world: fake.NewWorld(), keeper: fake.NewKeeper(), connect: k.dial}
	r.change = func(c *sessions.Config) {
		c.Now = func() time.Time {
			looks.Add(1)
			return time.Now().Add(time.Duration(late.Load()))
		}
	}
	r.begin(k.start(t))

	// The keeper stops at 64 MiB before the reader; what is left when the command ends lies in its pipe.
	const size = 65 << 20
	s := cmd("bytes", fmt.Sprint(size))
	s.Lossless = true
	var got int64
	var end *sessions.Info
	for e, err := range r.table.Start(t.Context(), s, false) {
		if err != nil {
			t.Fatal(err)
		}
		got += int64(len(e.Data)) + e.Gap
		if e.Exited != nil {
			end = e.Exited
		}
		if e.Started == nil {
			continue
		}
		wait.Until(t, patience, func() bool { return r.world.Tasks(r.id) == 0 }, "the command's end")
		for range 3 { // 33 s behind: less than a reader is given
			late.Add(int64(11 * time.Second))
			seen := looks.Load()
			wait.Until(t, patience, func() bool { return looks.Load() > seen+4 }, "some looks at the clock")
		}
		if r.table.List()[0].State != sessions.Running {
			t.Error("its result was counted before its output was taken")
		}
	}
	if end == nil {
		t.Fatal("it has no end")
	}
	if got != size || end.Result.StdoutBytes != size || end.Result.Truncated {
		t.Errorf("%d bytes of %d, %+v", got, size, end.Result)
	}
}
