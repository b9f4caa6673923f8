package sessions_test

import (
	"bytes"
	"context"
	"crypto/rand"
	"errors"
	"fmt"
	"io"
	"iter"
	"log/slog"
	"maps"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"syscall"
	"testing"
	"time"

	"github.com/sandsea/sandsea/api/errdefs"
	"github.com/sandsea/sandsea/internal/chronus"
	"github.com/sandsea/sandsea/internal/chronus/follow"
	"github.com/sandsea/sandsea/internal/chronus/sessions"
	"github.com/sandsea/sandsea/internal/edge/backend"
	"github.com/sandsea/sandsea/internal/edge/backend/fake"
	"github.com/sandsea/sandsea/internal/keeper"
	"github.com/sandsea/sandsea/internal/record"
	"github.com/sandsea/sandsea/internal/sandbox"
	"github.com/sandsea/sandsea/internal/testkit/wait"
)

const patience = 20 * time.Second

// memory is a Memory that outlives tables.
type memory struct {
	mu   sync.Mutex
	data map[string][]byte
	seq  int64
	dead bool
}

var errDead = errors.New("the edge is dead")

func (m *memory) Save(name string, data []byte) error {
	m.mu.Lock()
	defer m.mu.Unlock()
	if m.dead {
		return errDead
	}
	m.data[name] = bytes.Clone(data)
	return nil
}

// has reports whether a name that ends so is remembered.
func (m *memory) has(suffix string) bool {
	m.mu.Lock()
	defer m.mu.Unlock()
	for name := range m.data {
		if strings.HasSuffix(name, suffix) {
			return true
		}
	}
	return false
}

func (m *memory) SaveNext(name string, encode func(int64) ([]byte, error)) error {
	m.mu.Lock()
	defer m.mu.Unlock()
	if m.dead {
		return errDead
	}
	data, err := encode(m.seq + 1)
	if err != nil {
		return err
	}
	m.seq++
	m.data[name] = data
	return nil
}

func (m *memory) Forget(names ...string) error {
	m.mu.Lock()
	defer m.mu.Unlock()
	if m.dead {
		return errDead
	}
	for _, n := range names {
		delete(m.data, n)
	}
	return nil
}

type rig struct {
	t      *testing.T
	id     sandbox.ID
	dir    string
	world  *fake.World
	keeper *fake.Keeper
	link   keeper.Client
	inst   backend.Instance
	mem    *memory
	table  *sessions.Table
	change func(*sessions.Config)
	stop   func()
	relay  *relay
	// wrap, when set, comes before the line to the inside.
	wrap func(chronus.Channel) chronus.Channel
	// connect, when set, reaches the keeper instead of the fake one.
	connect func(*testing.T) keeper.Client
}

// relay forwards to a keeper client that may be exchanged.
type relay struct {
	mu sync.Mutex
	keeper.Client
}

func (x *relay) set(c keeper.Client) {
	x.mu.Lock()
	defer x.mu.Unlock()
	x.Client = c
}

func (x *relay) client() keeper.Client {
	x.mu.Lock()
	defer x.mu.Unlock()
	return x.Client
}

func (x *relay) Record(ctx context.Context, e keeper.Exec) error { return x.client().Record(ctx, e) }

func (x *relay) Release(ctx context.Context, k keeper.Key) error { return x.client().Release(ctx, k) }

func (x *relay) CloseInput(ctx context.Context, k keeper.Key) error {
	return x.client().CloseInput(ctx, k)
}

func (x *relay) Rearm(ctx context.Context, k keeper.Key, hard time.Time, left time.Duration) error {
	return x.client().Rearm(ctx, k, hard, left)
}

func newRig(t *testing.T, change ...func(*sessions.Config)) *rig {
	t.Helper()
	r := &rig{t: t, world: fake.NewWorld(), keeper: fake.NewKeeper()}
	if len(change) > 0 {
		r.change = change[0]
	}
	r.begin(r.keeper.Connect())
	return r
}

// begin starts a sandbox and its table.
func (r *rig) begin(link keeper.Client) {
	t := r.t
	t.Helper()
	var err error
	if r.id, err = sandbox.Mint(1, rand.Reader); err != nil {
		t.Fatal(err)
	}
	r.dir, r.mem, r.link = t.TempDir(), &memory{data: map[string][]byte{}}, link
	r.inst, err = r.backend().Start(t.Context(), backend.Spec{ID: r.id, Hard: time.Now().Add(time.Hour)})
	if err != nil {
		t.Fatal(err)
	}
	r.open(nil, nil)
	t.Cleanup(func() {
		r.world.Close()
		r.table.Abandon()
		r.stop()
		r.keeper.Kill()
	})
}

func (r *rig) backend() *fake.Backend { return fake.New(r.world, r.link) }

func lookup(_ context.Context, user string) (sessions.User, error) {
	switch user {
	case "root", "0":
		return sessions.User{Name: "root", Home: "/root"}, nil
	case "agent":
		return sessions.User{Name: "agent", Home: "/home/agent", IDs: chronus.IDs{UID: 1000, GID: 1000, Groups: []uint32{27}}}, nil
	}
	if strings.Trim(user, "0123456789:") == "" {
		return sessions.User{IDs: chronus.IDs{UID: 7, GID: 8}, Home: "/"}, nil
	}
	return sessions.User{}, errdefs.New(errdefs.NotFound, "user "+user, "is not there")
}

// open makes a Table over what is remembered and connects it.
func (r *rig) open(inside []chronus.Process, held []keeper.Held) {
	r.t.Helper()
	r.relay = &relay{Client: r.link}
	f := follow.New(r.dir, slog.New(slog.DiscardHandler))
	cfg := sessions.Config{
		ID: string(r.id), Dir: r.dir, Env: []string{"LANG=C", "A=image"}, Workdir: "/work", Output: 64 << 20,
		Keeper: r.relay, Follow: f, Memory: r.mem, Lookup: lookup, Now: time.Now, Log: slog.New(slog.DiscardHandler),
	}
	if r.change != nil {
		r.change(&cfg)
	}
	r.table = sessions.New(cfg)
	r.mem.mu.Lock()
	records := maps.Clone(r.mem.data)
	r.mem.mu.Unlock()
	if err := r.table.Load(records); err != nil {
		r.t.Fatal(err)
	}
	channel := r.inst.Channel()
	if r.wrap != nil {
		channel = r.wrap(channel)
	}
	err := r.table.Connect(r.t.Context(), sessions.Line{
		Channel: channel, OOMKills: r.inst.OOMKills, UIDBase: r.inst.UIDBase(),
		NewExec: func(ctx context.Context, n int64) (sessions.Exec, error) { return r.inst.NewExec(ctx, n) },
	}, inside, held)
	if err != nil {
		r.t.Fatal(err)
	}
	r.stop = func() { _ = f.Close() }
	r.events()
}

// events tells the table what the keeper tells.
func (r *rig) events() {
	var wg sync.WaitGroup
	table, link, stop := r.table, r.link, r.stop
	wg.Go(func() {
		for e, err := range link.Events() {
			if err != nil {
				return
			}
			if e.Key.Number > 0 {
				table.Event(e)
			}
			_ = link.Ack(e.Seq)
		}
	})
	r.stop = func() { _ = link.Close(); wg.Wait(); stop() }
}

// restart is kill -9 of the edge and a new one.
func (r *rig) restart() {
	r.t.Helper()
	r.kill()
	r.revive()
}

func (r *rig) kill() {
	r.mem.mu.Lock()
	r.mem.dead = true
	r.mem.mu.Unlock()
	r.stop()
	r.table.Abandon()
}

func (r *rig) revive() {
	r.t.Helper()
	r.mem.mu.Lock()
	r.mem.dead = false
	r.mem.mu.Unlock()
	handle := r.inst.Handle()
	if r.connect != nil {
		r.link = r.connect(r.t)
	} else {
		r.link = r.keeper.Connect()
	}
	roster, err := r.link.Roster(r.t.Context())
	if err != nil {
		r.t.Fatal(err)
	}
	var held []keeper.Held
	for _, h := range roster {
		if h.Exec != nil {
			held = append(held, h)
			continue
		}
		for _, f := range []*os.File{h.Sandbox.Control, h.Sandbox.Pidfd, h.Sandbox.Kill} {
			_ = f.Close()
		}
	}
	r.inst, err = r.backend().Recover(r.t.Context(), r.id, handle)
	if err != nil {
		r.t.Fatal(err)
	}
	_, inside, err := r.inst.Channel().Hello(r.t.Context())
	if err != nil {
		r.t.Fatal(err)
	}
	r.open(inside, held)
}

func cmd(argv ...string) sessions.Start { return sessions.Start{Command: sessions.Command{Argv: argv}} }

func (r *rig) run(s sessions.Start) sessions.Answer {
	r.t.Helper()
	ctx, stop := context.WithTimeout(r.t.Context(), patience)
	defer stop()
	a, err := r.table.Run(ctx, s, 0)
	if err != nil {
		r.t.Fatalf("run %q: %v", s.Command.Argv[0], err)
	}
	return a
}

func (r *rig) launch(s sessions.Start) sessions.Info {
	r.t.Helper()
	i, err := r.table.Launch(r.t.Context(), s)
	if err != nil {
		r.t.Fatalf("start %q: %v", s.Command.Argv[0], err)
	}
	return i
}

func (r *rig) attach(number, from int64, noFollow bool) (string, *sessions.Info) {
	r.t.Helper()
	ctx, stop := context.WithTimeout(r.t.Context(), patience)
	defer stop()
	var out strings.Builder
	var end *sessions.Info
	next := from
	for e, err := range r.table.Attach(ctx, number, sessions.From{Stdout: from, NoFollow: noFollow}) {
		if err != nil {
			r.t.Fatalf("attach: %v", err)
		}
		if end != nil {
			r.t.Fatal("something came after exited")
		}
		if e.Stream == 1 {
			if e.Offset != next {
				r.t.Fatalf("a piece at %d, want %d", e.Offset, next)
			}
			next += int64(len(e.Data)) + e.Gap
			out.Write(e.Data)
		}
		end = e.Exited
	}
	return out.String(), end
}

func TestResults(t *testing.T) {
	r := newRig(t)
	for name, c := range map[string]struct {
		argv           []string
		code, signal   int
		stdout, stderr string
	}{
		"success":         {[]string{"echo", "a", "b"}, 0, 0, "a b\n", ""},
		"failure":         {[]string{"false"}, 1, 0, "", ""},
		"any code":        {[]string{"exit", "200"}, 200, 0, "", ""},
		"standard error":  {[]string{"err", "x"}, 0, 0, "", "x\n"},
		"separate":        {[]string{"abc"}, 0, 0, "a\nc\n", "b\n"},
		"no input at all": {[]string{"cat"}, 0, 0, "", ""},
	} {
		t.Run(name, func(t *testing.T) {
			a := r.run(cmd(c.argv...))
			if a.Result.ExitCode != c.code || a.Result.Signal != c.signal || a.Result.InfraError != "" || a.Result.Truncated {
				t.Errorf("%+v", a.Result)
			}
			if string(a.Stdout.Head) != c.stdout || string(a.Stderr.Head) != c.stderr {
				t.Errorf("stdout %q, stderr %q", a.Stdout.Head, a.Stderr.Head)
			}
			if a.Result.StdoutBytes != int64(len(c.stdout)) || a.Result.Wall <= 0 || a.Result.PeakMemory <= 0 {
				t.Errorf("%+v", a.Result)
			}
		})
	}
	if n := r.table.Running(); n != 0 {
		t.Errorf("%d commands count as running", n)
	}
	for _, p := range r.table.List() {
		if p.State != sessions.Exited || p.Result == nil || p.Ended.Before(p.Started) {
			t.Errorf("%+v", p)
		}
	}
}

func TestStartFailuresAreTypedAndNeverExitCodesAlone(t *testing.T) {
	r := newRig(t)
	for name, c := range map[string]struct {
		s    sessions.Start
		kind string
		code int
	}{
		"no such program":  {cmd("no-such"), "not_found", 127},
		"not executable":   {cmd("/etc/passwd"), "not_executable", 126},
		"bad interpreter":  {cmd("/bad-interpreter"), "bad_interpreter", 126},
		"a long argument":  {cmd("echo", strings.Repeat("x", 131072)), "argument_too_long", 126},
		"no such cwd":      {sessions.Start{Command: sessions.Command{Argv: []string{"true"}, Cwd: "/missing"}}, "cwd", 126},
		"no such user":     {sessions.Start{Command: sessions.Command{Argv: []string{"true"}, User: "nobody-here"}}, "user", 126},
		"no more room":     {cmd("/no-more-pids"), "resources", 126},
		"an empty program": {cmd(""), "", 0},
	} {
		t.Run(name, func(t *testing.T) {
			a, err := r.table.Run(t.Context(), c.s, 0)
			if c.kind == "" {
				if e, ok := errors.AsType[*errdefs.Error](err); !ok || e.Field != "command.argv" {
					t.Fatalf("%v", err)
				}
				return
			}
			if err != nil {
				t.Fatal(err)
			}
			f := a.Result.StartFailure
			if f == nil || f.Kind != c.kind || a.Result.ExitCode != c.code || f.Message == "" {
				t.Fatalf("%+v, %+v", a.Result, f)
			}
			if c.kind == "user" && !strings.Contains(f.Message, "nobody-here") {
				t.Errorf("the message does not name the user: %q", f.Message)
			}
		})
	}
	if keys := r.keeper.Keys(); len(keys) != 1 {
		t.Errorf("failed starts left the keeper with %v", keys)
	}
	entries, err := os.ReadDir(filepath.Join(r.dir, string(r.id)))
	if err != nil && !errors.Is(err, os.ErrNotExist) || len(entries) != 0 {
		t.Errorf("failed starts left the records %v, %v", entries, err)
	}
}

func TestRequestsThatCanNeverWorkNameTheField(t *testing.T) {
	r := newRig(t)
	for field, s := range map[string]sessions.Start{
		"command.argv":       cmd(),
		"command.env":        {Command: sessions.Command{Argv: []string{"true"}, Env: map[string]string{"A": "\x00"}}},
		"command.user":       {Command: sessions.Command{Argv: []string{"true"}, User: "a:b:c"}},
		"command.cwd":        {Command: sessions.Command{Argv: []string{"true"}, Cwd: "\x00"}},
		"command.timeout_ms": {Command: sessions.Command{Argv: []string{"true"}, Timeout: -1}},
		"key":                {Command: sessions.Command{Argv: []string{"true"}}, Key: strings.Repeat("k", 257)},
		"note":               {Command: sessions.Command{Argv: []string{"true"}}, Note: make([]byte, 4097)},
	} {
		_, err := r.table.Run(t.Context(), s, 0)
		if e, ok := errors.AsType[*errdefs.Error](err); !ok || e.Kind != errdefs.Invalid || e.Field != field {
			t.Errorf("%s: %v", field, err)
		}
	}
	if _, err := r.table.Run(t.Context(), cmd("true"), 65<<20); !errors.Is(err, errdefs.Invalid) {
		t.Error(err)
	}
	if l := r.table.List(); len(l) != 0 {
		t.Errorf("refused requests have numbers: %v", l)
	}
}

func TestLittleIsKeptOfALargeRequest(t *testing.T) {
	r := newRig(t)
	names := map[string]string{strings.Repeat("n", 1<<20): ""}
	for i := range 100_000 {
		names[fmt.Sprint("v", i)] = ""
	}
	for what, c := range map[string]sessions.Command{
		"empty arguments": {Argv: append([]string{"true"}, make([]string, 1<<20)...)},
		"a long argument": {Argv: []string{"true", strings.Repeat("a", 100_000)}},
		"empty variables": {Argv: []string{"true"}, Env: names},
	} {
		a := r.run(sessions.Start{Command: c})
		kept := r.process(a.Number).Command
		size := 16 * cap(kept.Argv)
		for _, arg := range kept.Argv {
			size += len(arg)
		}
		for k, v := range kept.Env {
			size += len(k) + len(v) + 32
		}
		if size > 32<<10 {
			t.Errorf("%s: %d bytes are kept", what, size)
		}
		if kept.Argv[0] != "true" {
			t.Errorf("%s: %q", what, kept.Argv[0])
		}
	}
}

func TestEnvironmentUserAndDirectory(t *testing.T) {
	r := newRig(t)
	a := r.run(sessions.Start{Command: sessions.Command{Argv: []string{"env"}, Env: map[string]string{"A": "call", "B": "2"}, User: "agent"}})
	want := "A=call\nB=2\nHOME=/home/agent\nLANG=C\nLOGNAME=agent\nPATH=" + sessions.DefaultPath + "\nUSER=agent\n"
	if string(a.Stdout.Head) != want {
		t.Errorf("merged: %q, want %q", a.Stdout.Head, want)
	}
	a = r.run(sessions.Start{Command: sessions.Command{Argv: []string{"env"}, Env: map[string]string{"X": "1"}, ReplaceEnv: true}})
	if string(a.Stdout.Head) != "X=1\n" {
		t.Errorf("replaced: %q", a.Stdout.Head)
	}
	a = r.run(sessions.Start{Command: sessions.Command{Argv: []string{"id"}, User: "agent"}})
	if string(a.Stdout.Head) != "1000 1000 [27]\n" {
		t.Errorf("id: %q", a.Stdout.Head)
	}
	for cwd, want := range map[string]string{"": "/work\n", "sub/../x": "/work/sub/../x\n", "/abs": "/abs\n"} {
		a = r.run(sessions.Start{Command: sessions.Command{Argv: []string{"pwd"}, Cwd: cwd}})
		if string(a.Stdout.Head) != want {
			t.Errorf("cwd %q: %q", cwd, a.Stdout.Head)
		}
	}
}

func TestMergedOutputKeepsItsOrder(t *testing.T) {
	r := newRig(t)
	a := r.run(sessions.Start{Command: sessions.Command{Argv: []string{"abc"}, MergeStderr: true}})
	if string(a.Stdout.Head) != "a\nb\nc\n" || a.Stderr.Size != 0 || a.Result.StderrBytes != 0 {
		t.Fatalf("%q, %+v", a.Stdout.Head, a.Result)
	}
}

func TestInputOfAnySize(t *testing.T) {
	r := newRig(t)
	for _, n := range []int{0, 1, 48 << 10, 48<<10 + 1, 1 << 20, 64 << 20} {
		s := cmd("count")
		s.Input = make([]byte, n)
		a := r.run(s)
		if got := strings.TrimSpace(string(a.Stdout.Head)); got != fmt.Sprint(n) || a.Result.ExitCode != 0 {
			t.Errorf("of %d bytes %s arrived, %+v", n, got, a.Result)
		}
	}
	s := cmd("cat")
	s.Input = []byte("with\x00zeros\n")
	if a := r.run(s); !bytes.Equal(a.Stdout.Head, s.Input) {
		t.Errorf("%q", a.Stdout.Head)
	}
	s = cmd("true") // does not read its input
	s.Input = make([]byte, 4<<20)
	if a := r.run(s); a.Result.ExitCode != 0 {
		t.Errorf("%+v", a.Result)
	}
}

func TestATimeLimitKillsTheTreeAndReturnsTheOutputSoFar(t *testing.T) {
	r := newRig(t)
	s := cmd("tree", "60")
	s.Command.Timeout = time.Second
	begin := time.Now()
	a := r.run(s)
	if !a.Result.TimedOut || a.Result.ExitCode != 124 || a.Result.Signal != 9 {
		t.Fatalf("%+v", a.Result)
	}
	if string(a.Stdout.Head) != "so far\n" {
		t.Fatalf("output %q", a.Stdout.Head)
	}
	if d := time.Since(begin); d > 5*time.Second {
		t.Errorf("took %s", d)
	}
	wait.Until(t, patience, func() bool { return r.world.Tasks(r.id) == 0 }, "an empty tree")
}

func TestDeathBySignalIsNeverATimeOut(t *testing.T) {
	r := newRig(t)
	s := cmd("sleep", "60")
	s.Command.Timeout = time.Hour
	i := r.launch(s)
	if err := r.table.Signal(t.Context(), i.Number, 15, false); err != nil {
		t.Fatal(err)
	}
	_, end := r.attach(i.Number, 0, false)
	if res := end.Result; res.Signal != 15 || res.ExitCode != 143 || res.TimedOut {
		t.Fatalf("%+v", res)
	}
	if a := r.run(cmd("oom")); !a.Result.OOM || a.Result.Signal != 9 || a.Result.ExitCode != 137 || a.Result.TimedOut {
		t.Fatalf("%+v", a.Result)
	}
	if err := r.table.Signal(t.Context(), i.Number, 15, false); !errors.Is(err, errdefs.FailedPrecondition) {
		t.Errorf("signal after the end: %v", err)
	}
	if err := r.table.Signal(t.Context(), i.Number, 65, false); !errors.Is(err, errdefs.Invalid) {
		t.Errorf("signal 65: %v", err)
	}
	if err := r.table.Signal(t.Context(), 999, 15, false); !errors.Is(err, errdefs.NotFound) {
		t.Errorf("signal to nobody: %v", err)
	}
}

func TestAKillShortlyBeforeTheLimitIsNoTimeOut(t *testing.T) {
	r := newRig(t)
	s := cmd("oom")
	s.Command.Timeout = 450 * time.Millisecond
	if res := r.run(s).Result; res.TimedOut || !res.OOM || res.ExitCode != 137 || res.Wall >= s.Command.Timeout {
		t.Fatalf("%+v", res)
	}
}

func TestACommandThatEndsBeforeItsLimitLeavesItsChildrenAlone(t *testing.T) {
	r := newRig(t)
	s := cmd("background", "4")
	s.Command.Timeout = 2500 * time.Millisecond
	a := r.run(s)
	if a.Result.ExitCode != 0 || string(a.Stdout.Head) != "hi\n" {
		t.Fatalf("%+v %q", a.Result, a.Stdout.Head)
	}
	if r.world.Tasks(r.id) != 1 {
		t.Error("the answer waited for a child that holds the pipe")
	}
	wait.Until(t, patience, func() bool {
		out, _ := r.attach(a.Number, 0, true)
		return out == "hi\nlate\n"
	}, "the child's output")
	wait.Until(t, patience, func() bool { return len(r.keeper.Keys()) == 1 }, "the recording released")
}

func TestSignalsReachTheFirstProcessOrTheTree(t *testing.T) {
	r := newRig(t)
	i := r.launch(cmd("trap", "60"))
	wait.Until(t, patience, func() bool { out, _ := r.attach(i.Number, 0, true); return out == "ready\n" }, "ready")
	if err := r.table.Signal(t.Context(), i.Number, 15, false); err != nil {
		t.Fatal(err)
	}
	wait.Until(t, patience, func() bool { out, _ := r.attach(i.Number, 0, true); return out == "ready\ncaught 15\n" }, "caught")
	if err := r.table.Signal(t.Context(), i.Number, 9, true); err != nil {
		t.Fatal(err)
	}
	if _, end := r.attach(i.Number, 0, false); end.Result.Signal != 9 {
		t.Fatalf("%+v", end.Result)
	}
	i = r.launch(cmd("tree", "60"))
	wait.Until(t, patience, func() bool { return r.world.Tasks(r.id) == 3 }, "the tree")
	if err := r.table.Signal(t.Context(), i.Number, 15, true); err != nil {
		t.Fatal(err)
	}
	wait.Until(t, patience, func() bool { return r.world.Tasks(r.id) == 0 }, "an empty tree")
}

func TestAKeyRunsItsCommandOnce(t *testing.T) {
	r := newRig(t)
	s := cmd("echo", "once")
	s.Key = "k1"
	first := r.run(s)
	s.Command.Timeout = time.Hour // another limit is the same request
	again := r.run(s)
	if again.Number != first.Number || !again.Replayed || first.Replayed || string(again.Stdout.Head) != "once\n" {
		t.Fatalf("%+v", again)
	}
	s.Command.Argv = []string{"echo", "twice"}
	if _, err := r.table.Run(t.Context(), s, 0); !errors.Is(err, errdefs.AlreadyExists) {
		t.Fatalf("another command under the same key: %v", err)
	}
	s = cmd("sleep", "0.3")
	s.Key = "k2"
	var wg sync.WaitGroup
	numbers := make([]int64, 16)
	for n := range numbers {
		wg.Go(func() { numbers[n] = r.run(s).Number })
	}
	wg.Wait()
	slices.Sort(numbers)
	if numbers[0] != numbers[15] || r.world.Spawns(r.id, numbers[0]) != 1 {
		t.Fatalf("one key, numbers %v", numbers)
	}
	failing := cmd("no-such")
	failing.Key = "k3"
	if a, b := r.run(failing), r.run(failing); a.Number != b.Number || b.Result.StartFailure == nil {
		t.Fatalf("a start failure is not the key's result: %+v %+v", a, b)
	}
}

func TestACallerWhoLeavesKillsWhatHasNoKey(t *testing.T) {
	for name, c := range map[string]struct {
		key   string
		leave bool
		alive bool
	}{
		"no key":                          {"", false, false},
		"a key":                           {"k", false, true},
		"no key, but the edge shuts down": {"", true, true},
	} {
		t.Run(name, func(t *testing.T) {
			r := newRig(t)
			ctx, cancel := context.WithCancel(t.Context())
			got := make(chan error, 1)
			s := cmd("tree", "60")
			s.Key = c.key
			go func() { _, err := r.table.Run(ctx, s, 0); got <- err }()
			wait.Until(t, patience, func() bool { return r.world.Tasks(r.id) == 3 }, "the tree")
			if c.leave {
				r.table.Leave()
			}
			cancel()
			if err := <-got; !errors.Is(err, errdefs.Canceled) {
				t.Fatal(err)
			}
			if alive := r.world.Tasks(r.id) > 0; alive != c.alive {
				t.Fatalf("alive %v, want %v", alive, c.alive)
			}
		})
	}
}

// TestAResultThatIsThereIsGiven: a caller whose time ends with the command gets its result, not that it stopped waiting.
func TestAResultThatIsThereIsGiven(t *testing.T) {
	r := newRig(t)
	s := cmd("exit", "3")
	s.Key = "k"
	r.run(s)
	gone, cancel := context.WithCancel(t.Context())
	cancel()
	for range 100 {
		if a, err := r.table.Run(gone, s, 0); err != nil || a.Result.ExitCode != 3 {
			t.Fatalf("%+v, %v", a.Result, err)
		}
	}
}

func TestAStartStreamTellsTheStoryInOrder(t *testing.T) {
	r := newRig(t)
	var story []string
	for e, err := range r.table.Start(t.Context(), cmd("abc"), false) {
		switch {
		case err != nil:
			t.Fatal(err)
		case e.Started != nil:
			story = append(story, "started")
			if e.Started.State == 0 || e.Started.Number != 1 {
				t.Errorf("%+v", e.Started)
			}
		case e.Exited != nil:
			story = append(story, fmt.Sprint("exited ", e.Exited.Result.ExitCode))
		}
	}
	if !slices.Equal(story, []string{"started", "exited 0"}) {
		t.Fatal(story)
	}
	for e, err := range r.table.Start(t.Context(), cmd("sleep", "60"), true) {
		if err != nil || e.Started == nil {
			t.Fatal(e, err)
		}
	}
	if r.world.Tasks(r.id) != 1 {
		t.Error("a detached command ended with its stream")
	}
	for e := range r.table.Start(t.Context(), cmd("sleep", "60"), false) {
		if e.Started != nil {
			break
		}
	}
	wait.Until(t, patience, func() bool { return r.world.Tasks(r.id) == 1 }, "the abandoned stream's command gone")
	for e, err := range r.table.Start(t.Context(), cmd("no-such"), false) {
		if err != nil {
			t.Fatal(err)
		}
		if e.Exited != nil && (e.Exited.State != sessions.Failed || e.Exited.Result.StartFailure.Kind != "not_found") {
			t.Errorf("%+v", e.Exited)
		}
	}
}

func TestReadersComeAndGo(t *testing.T) {
	r := newRig(t)
	const size = 3 << 20
	i := r.launch(cmd("bytes", fmt.Sprint(size)))
	var wg sync.WaitGroup
	for n := range 5 {
		wg.Go(func() {
			from := int64(n) * 100_000
			out, end := r.attach(i.Number, from, false)
			if out != string(fake.Pattern(from, size-int(from))) {
				t.Errorf("reader %d got other bytes (%d)", n, len(out))
			}
			if end == nil || end.Result.StdoutBytes != size {
				t.Errorf("reader %d: end %+v", n, end)
			}
		})
	}
	wg.Wait()
	if _, err := first(r.table.Attach(t.Context(), i.Number, sessions.From{Stdout: size + 1})); !errors.Is(err, errdefs.Invalid) {
		t.Errorf("an offset past the end: %v", err)
	}
	if _, err := first(r.table.Attach(t.Context(), 77, sessions.From{})); !errors.Is(err, errdefs.NotFound) {
		t.Errorf("nobody's record: %v", err)
	}
	a := r.run(cmd("bytes", fmt.Sprint(size)))
	if a.Stdout.Gap != 0 || len(a.Stdout.Head) != size {
		t.Errorf("%d bytes inline, gap %d", len(a.Stdout.Head), a.Stdout.Gap)
	}
	b, err := r.table.Run(t.Context(), cmd("bytes", fmt.Sprint(size)), 1000)
	if err != nil || b.Stdout.Gap != size-1000 || !b.Result.Truncated || len(b.Stdout.Head) != 500 || b.Result.StdoutBytes != size {
		t.Errorf("%v: head %d gap %d tail %d %+v", err, len(b.Stdout.Head), b.Stdout.Gap, len(b.Stdout.Tail), b.Result)
	}
}

func first[A any](seq func(func(A, error) bool)) (a A, err error) {
	for a, err = range seq {
		break
	}
	return a, err
}

func TestInputByOffsets(t *testing.T) {
	r := newRig(t)
	s := cmd("cat")
	s.Stream = true
	n := r.launch(s).Number
	send := func(off int64, data string, next int64, kind errdefs.Kind) {
		t.Helper()
		got, err := r.table.SendInput(t.Context(), n, off, []byte(data))
		if errdefs.KindOf(err) != kind || got != next {
			t.Fatalf("send %q at %d: %d, %v; want %d, %q", data, off, got, err, next, kind)
		}
	}
	send(0, "hello ", 6, "")
	send(0, "hello ", 6, "")    // repeated
	send(3, "lo world", 11, "") // overlaps
	send(12, "hole", 11, errdefs.Invalid)
	send(-1, "x", 11, errdefs.Invalid)
	r.restart()
	send(6, "world", 11, "") // repeated after a restart
	send(11, "!\n", 13, "")
	if err := r.table.CloseInput(t.Context(), n); err != nil {
		t.Fatal(err)
	}
	if err := r.table.CloseInput(t.Context(), n); err != nil {
		t.Fatal(err)
	}
	out, end := r.attach(n, 0, false)
	if out != "hello world!\n" || end.Result.ExitCode != 0 {
		t.Fatalf("%q, %+v", out, end.Result)
	}
	refused := func(n, off int64, why string) {
		t.Helper()
		_, err := r.table.SendInput(t.Context(), n, off, []byte("x"))
		if !errors.Is(err, errdefs.FailedPrecondition) || !strings.Contains(err.Error(), why) {
			t.Fatalf("got %v, want %q", err, why)
		}
	}
	refused(n, 13, "it has ended")
	refused(r.launch(cmd("sleep", "60")).Number, 0, "without an input")
	s = cmd("sleep", "60")
	s.Stream = true
	open := r.launch(s).Number
	if err := r.table.CloseInput(t.Context(), open); err != nil {
		t.Fatal(err)
	}
	refused(open, 0, "its input is closed")
}

func TestASendThatTheCommandDoesNotReadEndsWithItsCaller(t *testing.T) {
	r := newRig(t)
	s := cmd("sleep", "60")
	s.Stream = true
	n := r.launch(s).Number
	ctx, cancel := context.WithTimeout(t.Context(), time.Second)
	defer cancel()
	const most = 2 << 20 // more than any pipe holds
	next, err := r.table.SendInput(ctx, n, 0, make([]byte, most))
	if !errors.Is(err, errdefs.Deadline) || next == 0 || next >= most {
		t.Fatalf("%d, %v", next, err)
	}
	if got, err := r.table.SendInput(t.Context(), n, 0, make([]byte, next)); err != nil || got != next {
		t.Fatalf("what was taken before: %d, %v", got, err)
	}
}

func TestASendWhoseCallerLeavesDoesNotEndTheNextOne(t *testing.T) {
	r := newRig(t)
	s := cmd("count")
	s.Stream = true
	n := r.launch(s).Number
	gone, cancel := context.WithCancel(t.Context())
	cancel()
	next := int64(0)
	for i := range 3000 {
		if at, err := r.table.SendInput(gone, n, next, []byte("a")); err == nil {
			next = at
		}
		at, err := r.table.SendInput(t.Context(), n, next, []byte("b"))
		if err != nil {
			t.Fatalf("round %d: a send whose caller waits: %v", i, err)
		}
		next = at
	}
}

func TestAnAttachThatCannotBeginSaysSoOnceAndEnds(t *testing.T) {
	r := newRig(t)
	n := r.launch(cmd("sleep", "60")).Number
	ctx, stop := context.WithTimeout(t.Context(), patience)
	defer stop()
	refused := func(at sessions.From) (got error) {
		for _, err := range r.table.Attach(ctx, n, at) {
			got = err
			break
		}
		return got
	}
	for _, at := range []sessions.From{{Stdout: -1}, {Stderr: -1, Lossless: true}} {
		if err := refused(at); !errors.Is(err, errdefs.Invalid) {
			t.Errorf("%+v: %v", at, err)
		}
	}
	path := record.Path(r.dir, string(r.id), n, record.Stderr)
	if err := os.Rename(path, path+".away"); err != nil {
		t.Fatal(err)
	}
	if err := os.Symlink(path, path); err != nil { // a record that cannot be opened
		t.Fatal(err)
	}
	for range 10 {
		if err := refused(sessions.From{}); !errors.Is(err, syscall.ELOOP) {
			t.Fatal(err)
		}
	}
}

func TestBusyIsToldTheNewestNumberLast(t *testing.T) {
	var last atomic.Int64
	var slow atomic.Bool
	telling, goOn, told := make(chan struct{}), make(chan struct{}), make(chan struct{})
	r := newRig(t, func(c *sessions.Config) {
		c.Busy = func(running int) {
			if running == 0 && slow.CompareAndSwap(true, false) {
				close(telling)
				<-goOn // as one who waits for a lock
				defer close(told)
			}
			last.Store(int64(running))
		}
	})
	slow.Store(true)
	done := make(chan struct{}, 2)
	go func() { r.run(cmd("true")); done <- struct{}{} }()
	<-telling
	began := make(chan struct{})
	go func() { r.launch(cmd("sleep", "60")); close(began); done <- struct{}{} }()
	wait.Until(t, patience, func() bool { return r.table.Running() == 1 }, "the second command")
	select {
	case <-began: // it did not wait for its turn to tell
	case <-time.After(200 * time.Millisecond):
	}
	close(goOn)
	<-done
	<-done
	<-told
	if n := last.Load(); n != 1 {
		t.Fatalf("told last that %d run, it is one", n)
	}
}

func TestSixtyFourCommandsAtOnce(t *testing.T) {
	r := newRig(t)
	var wg sync.WaitGroup
	for n := range 64 {
		wg.Go(func() {
			s := cmd("cat")
			s.Input = []byte(strings.Repeat(fmt.Sprintf("%03d\n", n), 20_000))
			if a := r.run(s); !bytes.Equal(a.Stdout.Head, s.Input) {
				t.Errorf("command %d got other bytes", n)
			}
		})
	}
	wg.Wait()
	seen := map[int64]bool{}
	for _, p := range r.table.List() {
		seen[p.Number] = true
	}
	if len(seen) != 64 {
		t.Errorf("%d numbers", len(seen))
	}
}

func TestAnEdgeThatIsKilledLosesNothing(t *testing.T) {
	r := newRig(t)
	const lines = 300
	r.launch(cmd("sleep", "60")) // runs all the while
	talker := r.launch(cmd("tick", fmt.Sprint(lines), "0.002")).Number
	quick := cmd("exit", "3")
	quick.Key = "quick"
	sleeper := cmd("sleep", "0.2")
	limited := cmd("tree", "60")
	limited.Command.Timeout = 600 * time.Millisecond
	sn, ln := r.launch(sleeper).Number, r.launch(limited).Number
	for range 4 {
		r.kill()
		wait.Until(t, patience, func() bool { return r.world.Tasks(r.id) > 0 })
		r.revive()
		a := r.run(quick)
		if a.Result.ExitCode != 3 {
			t.Fatalf("%+v", a.Result)
		}
	}
	out, end := r.attach(talker, 0, false)
	var want strings.Builder
	for i := range lines {
		fmt.Fprintln(&want, "tick", i)
	}
	if out != want.String() || end.Result.ExitCode != 0 || end.Result.StdoutBytes != int64(want.Len()) {
		t.Fatalf("%d bytes, want %d; %+v", len(out), want.Len(), end.Result)
	}
	if _, end := r.attach(sn, 0, false); end.Result.ExitCode != 0 || end.Result.Signal != 0 {
		t.Fatalf("%+v", end.Result)
	}
	if out, end := r.attach(ln, 0, false); !end.Result.TimedOut || out != "so far\n" {
		t.Fatalf("%q %+v", out, end.Result)
	}
	if n := r.world.Spawns(r.id, 5); n != 1 {
		t.Fatalf("the keyed command ran %d times", n)
	}
}

func TestACommandThatEndedWithoutAnEdgeHasItsResult(t *testing.T) {
	r := newRig(t)
	n := r.launch(cmd("tick", "3", "0.02")).Number
	r.kill()
	wait.Until(t, patience, func() bool { return r.world.Tasks(r.id) == 0 }, "the command's end")
	r.revive()
	out, end := r.attach(n, 0, false)
	if out != "tick 0\ntick 1\ntick 2\n" || end.Result.ExitCode != 0 {
		t.Fatalf("%q %+v", out, end.Result)
	}
	r.restart()
	if out, end := r.attach(n, 0, false); out != "tick 0\ntick 1\ntick 2\n" || end.Result.ExitCode != 0 {
		t.Fatalf("after another restart: %q %+v", out, end.Result)
	}
	wait.Until(t, patience, func() bool { return len(r.keeper.Keys()) == 1 }, "the recording released")
	if n := r.table.Running(); n != 0 {
		t.Fatalf("%d run", n)
	}
}

// failing tells first that the start of a command failed.
type failing struct {
	chronus.Channel
	number int64
}

func (c failing) Exits() iter.Seq2[chronus.Exit, error] {
	return func(yield func(chronus.Exit, error) bool) {
		failed := &chronus.StartError{Step: chronus.StepExec, Errno: syscall.ENOENT}
		if yield(chronus.Exit{Number: c.number, Failed: failed}, nil) {
			c.Channel.Exits()(yield)
		}
	}
}

func TestAStartThatFailsAfterItsEdgeDiedIsNoSuccess(t *testing.T) {
	r := newRig(t)
	n := r.launch(cmd("sleep", "60")).Number
	r.wrap = func(c chronus.Channel) chronus.Channel { return failing{c, n} }
	r.restart()
	_, end := r.attach(n, 0, false)
	res := end.Result
	if end.State != sessions.Failed || res.ExitCode != 127 || res.StartFailure == nil || res.StartFailure.Kind != "not_found" {
		t.Fatalf("%v: %+v", end.State, res)
	}
}

func TestARememberedCommandThatNeverStartedRunsOnARetry(t *testing.T) {
	r := newRig(t)
	s := cmd("echo", "ran")
	s.Key = "k"
	before := r.run(cmd("true")).Number
	r.kill()
	// As a crash between remembering and starting leaves it.
	r.mem.dead = false
	record := fmt.Sprintf(`{"number":%d,"key":"k","digest":"x","command":{"argv":["echo","ran"]}}`, before+1)
	if err := r.mem.Save(fmt.Sprintf("%s/%016d", r.id, before+1), []byte(record)); err != nil {
		t.Fatal(err)
	}
	r.revive()
	a := r.run(s)
	if a.Replayed || string(a.Stdout.Head) != "ran\n" || a.Number <= before+1 {
		t.Fatalf("%+v", a)
	}
}

func TestAFeedThatTheEdgesDeathCutIsThePlatformsFault(t *testing.T) {
	r := newRig(t)
	release := make(chan struct{})
	r.world.Handle("lazy", func(p *fake.Proc) int {
		select {
		case <-release:
		case <-p.Ctx.Done():
			return 1
		}
		n, _ := io.Copy(io.Discard, p.Stdin)
		fmt.Fprintln(p.Stdout, n)
		return 0
	})
	s := cmd("lazy")
	s.Key = "k"
	s.Input = make([]byte, 3<<20) // more than any pipe holds
	go func() { _, _ = r.table.Run(context.Background(), s, 0) }()
	wait.Until(t, patience, func() bool { return r.world.Tasks(r.id) == 1 }, "the command")
	r.restart()
	close(release)
	ctx, stop := context.WithTimeout(t.Context(), patience)
	defer stop()
	a, err := r.table.Run(ctx, s, 0)
	if err != nil || a.Result.InfraError == "" || a.Result.ExitCode != 125 {
		t.Fatalf("%+v, %v", a.Result, err)
	}
}

func TestANewKeeperGoesOnRecording(t *testing.T) {
	r := newRig(t)
	const lines = 400
	n := r.launch(cmd("tick", fmt.Sprint(lines), "0.002")).Number
	limited := cmd("tree", "60")
	limited.Command.Timeout = 700 * time.Millisecond
	ln := r.launch(limited).Number
	s := cmd("cat")
	s.Stream = true
	cn := r.launch(s).Number
	if _, err := r.table.SendInput(t.Context(), cn, 0, []byte("over ")); err != nil {
		t.Fatal(err)
	}
	r.keeper.Kill()
	r.keeper = fake.NewKeeper()
	r.link = r.keeper.Connect()
	r.relay.set(r.link)
	r.events()
	if err := r.table.Rerecord(t.Context()); err != nil {
		t.Fatal(err)
	}
	if _, err := r.table.SendInput(t.Context(), cn, 5, []byte("there\n")); err != nil {
		t.Fatal(err)
	}
	if err := r.table.CloseInput(t.Context(), cn); err != nil {
		t.Fatal(err)
	}
	if out, _ := r.attach(cn, 0, false); out != "over there\n" {
		t.Fatalf("%q", out)
	}
	out, end := r.attach(n, 0, false)
	var want strings.Builder
	for i := range lines {
		fmt.Fprintln(&want, "tick", i)
	}
	if out != want.String() || end.Result.ExitCode != 0 {
		t.Fatalf("%d bytes, want %d: %+v", len(out), want.Len(), end.Result)
	}
	if _, end := r.attach(ln, 0, false); !end.Result.TimedOut {
		t.Fatalf("%+v", end.Result)
	}
}

func TestTheSandboxesEndEndsItsCommands(t *testing.T) {
	for name, end := range map[string]sandbox.End{
		"stopped": {Cause: sandbox.CauseStopped, By: "user:x"},
		"infra":   {Cause: sandbox.CauseInfraKilled},
	} {
		t.Run(name, func(t *testing.T) {
			r := newRig(t)
			old := r.run(cmd("echo", "before"))
			got := make(chan error, 1)
			go func() { _, err := r.table.Run(context.Background(), cmd("sleep", "60"), 0); got <- err }()
			var wrote atomic.Int64
			r.world.Handle("loud", func(p *fake.Proc) int {
				for {
					if _, err := fmt.Fprintln(p.Stdout, "line"); err != nil {
						return 1
					}
					wrote.Add(1)
				}
			})
			n := r.launch(cmd("loud")).Number
			wait.Until(t, patience, func() bool { return r.world.Tasks(r.id) == 2 && wrote.Load() > 10 }, "both commands")
			r.table.End(end)
			if _, err := r.table.Run(t.Context(), cmd("true"), 0); !errors.Is(err, errdefs.FailedPrecondition) {
				t.Fatalf("a command for a sandbox that ends: %v", err)
			}
			if _, err := r.inst.Stop(t.Context(), 0); err != nil {
				t.Fatal(err)
			}
			ctx, stop := context.WithTimeout(t.Context(), patience)
			defer stop()
			r.table.Close(ctx, end)
			err := <-got
			if e, ok := errors.AsType[*errdefs.Error](err); !ok || e.Cause != string(end.Cause) {
				t.Fatalf("the waiting caller got %v", err)
			}
			out, info := r.attach(n, 0, false)
			if lines := int64(strings.Count(out, "line\n")); info.Result == nil || lines < wrote.Load() {
				t.Fatalf("%d lines of %d are recorded, %+v", lines, wrote.Load(), info.Result)
			}
			if out, info := r.attach(old.Number, 0, false); out != "before\n" || info.Result.ExitCode != 0 {
				t.Fatalf("an old record: %q, %+v", out, info)
			}
			if r.table.Running() != 0 {
				t.Fatalf("%d run", r.table.Running())
			}
		})
	}
}

func TestOldCommandsAndOutputAreBounded(t *testing.T) {
	r := newRig(t, func(c *sessions.Config) { c.Output = 1 << 20 })
	keyed := cmd("bytes", fmt.Sprint(600<<10))
	keyed.Key = "k"
	r.run(keyed)
	for range 4 {
		r.run(cmd("bytes", fmt.Sprint(600<<10)))
	}
	wait.Until(t, patience, func() bool { return r.table.OutputBytes() <= 1<<20 }, "the output bound")
	a := r.run(keyed)
	if !a.Replayed || a.Result.StdoutBytes != 600<<10 || a.Stdout.Size != 600<<10 {
		t.Fatalf("%+v", a.Result)
	}
	if a.Stdout.Gap > 0 != a.Result.Truncated {
		t.Fatalf("gap %d, truncated %v", a.Stdout.Gap, a.Result.Truncated)
	}
}
