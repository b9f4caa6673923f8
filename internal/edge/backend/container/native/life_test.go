package native

import (
	"context"
	"errors"
	"fmt"
	"os"
	"slices"
	"strconv"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"

	"github.com/sandsea/sandsea/api/errdefs"
	"github.com/sandsea/sandsea/internal/chronus"
	"github.com/sandsea/sandsea/internal/keeper"
	"github.com/sandsea/sandsea/internal/linux/pidfd"
	"github.com/sandsea/sandsea/internal/linux/tty"
	"github.com/sandsea/sandsea/internal/sandbox"
	"github.com/sandsea/sandsea/internal/testkit/leak"
	"github.com/sandsea/sandsea/internal/testkit/wait"
)

func TestTheCauseOfAnEndFollowsTheEvidence(t *testing.T) {
	signal := func(s syscall.Signal) facts { return facts{status: syscall.WaitStatus(s), known: true} }
	exit := func(code int) facts { return facts{status: syscall.WaitStatus(code << 8), known: true} }
	oom := func(f facts) facts { f.oom = true; return f }
	for name, c := range map[string]struct {
		facts facts
		want  sandbox.Cause
	}{
		"killed, and the out-of-memory counter moved":    {oom(signal(syscall.SIGKILL)), sandbox.CauseOOM},
		"killed from outside":                            {signal(syscall.SIGKILL), sandbox.CauseInfraKilled},
		"crashed":                                        {signal(syscall.SIGSEGV), sandbox.CauseInfraInit},
		"crashed while something else was out of memory": {oom(signal(syscall.SIGBUS)), sandbox.CauseInfraInit},
		"aborted":                 {signal(syscall.SIGABRT), sandbox.CauseInfraInit},
		"ended by another signal": {signal(syscall.SIGTERM), sandbox.CauseAgentDestroyed},
		"orphaned":                {exit(endOrphaned), sandbox.CauseInfraOrphaned},
		"gave up by itself":       {exit(endLast), sandbox.CauseInfraInit},
		"exited":                  {exit(0), sandbox.CauseAgentDestroyed},
		"exited after something was out of memory":       {oom(exit(1)), sandbox.CauseAgentDestroyed},
		"nothing is known":                               {facts{}, sandbox.CauseInfraUnknown},
		"nothing is known but that it was out of memory": {facts{oom: true}, sandbox.CauseOOM},
	} {
		t.Run(name, func(t *testing.T) {
			if got := cause(c.facts); got.Cause != c.want || got.Detail == "" {
				t.Errorf("cause %+v, want %s", got, c.want)
			}
		})
	}
}

func TestAnEndOfItsOwnIsSeenWithItsCause(t *testing.T) {
	m := use(t)
	e := m.open(t)
	for name, c := range map[string]struct {
		end  func(*box)
		want []sandbox.Cause
	}{
		"PID 1 killed from outside": {
			func(b *box) { _ = pidfd.Signal(b.pidfd, syscall.SIGKILL) }, []sandbox.Cause{sandbox.CauseInfraKilled},
		},
		"everything killed through the kill file": {
			func(b *box) {
				h, _, err := b.held()
				if err != nil {
					b.tb.Fatal(err)
				}
				defer h.Kill.Close()
				_, _ = h.Kill.WriteString("1")
			}, []sandbox.Cause{sandbox.CauseInfraKilled},
		},
	} {
		t.Run(name, func(t *testing.T) {
			b := e.start(t, m.plan(), smallLimits)
			c.end(b)
			select {
			case <-b.Done():
			case <-time.After(patience):
				t.Fatal("not seen")
			}
			if got := b.Exit().Cause; !slices.Contains(c.want, got) && got != sandbox.CauseInfraUnknown {
				t.Errorf("cause %s, want %s", got, c.want)
			}
			if x := b.stop(t); x != b.Exit() {
				t.Errorf("Stop says %v, Exit %v", x, b.Exit())
			}
		})
	}
}

// TestAnEndWhileNoEdgeWasThere: the evidence waits for the next edge.
func TestAnEndWhileNoEdgeWasThere(t *testing.T) {
	m := use(t)
	first := m.open(t)
	i, err := first.Start(t.Context(), m.spec(newID(t)))
	if err != nil {
		t.Fatal(err)
	}
	b := i.(*Instance)
	dup, err := pidfd.Open(b.Pid())
	if err != nil {
		t.Fatal(err)
	}
	defer dup.Close()
	first.close()
	if err := pidfd.Signal(dup, syscall.SIGKILL); err != nil {
		t.Fatal(err)
	}
	if err := pidfd.Wait(t.Context(), dup); err != nil {
		t.Fatal(err)
	}
	second := m.open(t)
	again, err := second.Recover(t.Context(), b.id, b.Handle())
	if err != nil {
		t.Fatal(err)
	}
	select {
	case <-again.Done():
	case <-time.After(patience):
		t.Fatal("not done")
	}
	if got := again.Exit().Cause; got != sandbox.CauseInfraKilled && got != sandbox.CauseInfraUnknown {
		t.Errorf("cause %s", got)
	}
	if _, err := again.Stop(t.Context(), 0); err != nil {
		t.Error(err)
	}
	if left := m.left(t); len(left) > 0 {
		t.Errorf("left: %q", left)
	}
}

// TestKillOfTheSpawner: creates under way when the spawner dies are tried once more with its successor, and what cannot
// be saved leaves nothing.
func TestKillOfTheSpawner(t *testing.T) {
	m := use(t)
	e := m.open(t)
	keeps := e.start(t, m.plan(), smallLimits)
	for round := range 5 {
		var wg sync.WaitGroup
		stop := make(chan struct{})
		end := sync.OnceFunc(func() { close(stop); wg.Wait() })
		t.Cleanup(end)
		var mu sync.Mutex
		done, failed := 0, 0
		for range 4 {
			wg.Go(func() {
				for {
					select {
					case <-stop:
						return
					default:
					}
					i, err := e.Start(context.Background(), m.spec(newID(t)))
					mu.Lock()
					if err != nil {
						failed++
						t.Errorf("Start = %v", err)
					} else {
						done++
					}
					mu.Unlock()
					if err != nil {
						continue
					}
					if _, err := i.Stop(context.Background(), 0); err != nil {
						t.Error(err)
					}
				}
			})
		}
		count := func() int {
			mu.Lock()
			defer mu.Unlock()
			return done
		}
		wait.Until(t, patience, func() bool { return count() > 3+round }, "creates")
		m.endRole("spawner")
		if err := m.startRole("spawner"); err != nil {
			t.Fatal(err)
		}
		before := count()
		wait.Until(t, patience, func() bool { return count() > before+4 }, "creates by the successor")
		end()
		if failed > 0 {
			t.Errorf("%d of %d creates failed though the spawner came back", failed, failed+done)
			break
		}
		if left := m.left(t); len(left) != 2 { // those of keeps
			t.Errorf("left: %q", left)
		}
	}
	if got := keeps.sh("echo alive"); got != "alive" {
		t.Errorf("a sandbox from before: %q", got)
	}
}

// TestKillOfAnEdgeInTheMiddleOfACreate: whatever step it came to, Sweep of the next edge leaves nothing.
func TestKillOfAnEdgeInTheMiddleOfACreate(t *testing.T) {
	m := use(t)
	for _, at := range []string{"range", "cgroup", "upper", "overlay", "dev,sys", "spawn", "setup", "keeper"} {
		t.Run(at, func(t *testing.T) {
			first := m.open(t)
			// An edge that dies runs no undo: the goroutine that starts stops where it is, for ever as far as the machine
			// is concerned, until the test lets it go.
			reached, let := make(chan struct{}), make(chan struct{})
			first.onStage = func(name string) {
				if name == at {
					close(reached)
					<-let
				}
			}
			ctx, cancel := context.WithCancel(t.Context())
			result := make(chan error, 1)
			go func() {
				_, err := first.Start(ctx, m.spec(newID(t)))
				result <- err
			}()
			<-reached
			second := m.open(t)
			if err := second.Sweep(t.Context(), func(sandbox.ID) bool { return false }); err != nil {
				t.Error(err)
			}
			if left := m.left(t); len(left) > 0 {
				t.Errorf("left: %q", left)
			}
			held, err := second.keeper.Roster(t.Context())
			if err != nil {
				t.Fatal(err)
			}
			for _, h := range held {
				if h.Sandbox != nil {
					t.Errorf("the keeper holds %s", h.Sandbox.ID)
				}
			}
			cancel()
			close(let)
			<-result
			if err := second.Sweep(t.Context(), func(sandbox.ID) bool { return false }); err != nil {
				t.Error(err)
			}
			if left := m.left(t); len(left) > 0 {
				t.Errorf("left: %q", left)
			}
		})
	}
}

// TestKillOfTheKeeper: the edge gives everything to its successor, and a create that was under way waits for it.
func TestKillOfTheKeeper(t *testing.T) {
	m := use(t)
	e := m.open(t)
	b := e.start(t, m.plan(), smallLimits)
	m.endRole("keeper")
	if err := m.startRole("keeper"); err != nil {
		t.Fatal(err)
	}
	next := m.dialKeeper(t) // before the create, which waits for it only so long
	begun, waits := make(chan error, 1), make(chan struct{})
	e.onStage = func(name string) {
		if name == "setup" {
			close(waits)
		}
	}
	go func() {
		i, err := e.Start(context.Background(), m.spec(newID(t)))
		if err == nil {
			_, err = i.Stop(context.Background(), 0)
		}
		begun <- err
	}()
	select {
	case <-waits:
	case err := <-begun:
		t.Fatalf("a create without a keeper: %v", err)
	}
	old := e.keeper
	e.keeper = next
	defer old.Close()
	if err := e.Keep(t.Context(), e.keeper); err != nil {
		t.Fatal(err)
	}
	if err := <-begun; err != nil {
		t.Errorf("the create under way: %v", err)
	}
	if got := b.sh("echo alive"); got != "alive" {
		t.Errorf("got %q", got)
	}
	h := b.Handle()
	e.close() // b is stopped by the next edge
	after := m.open(t)
	again, err := after.Recover(t.Context(), b.id, h)
	if err != nil {
		t.Fatalf("the successor does not hold it: %v", err)
	}
	if _, _, err := again.Channel().Hello(t.Context()); err != nil {
		t.Error(err)
	}
	if _, err := again.Stop(t.Context(), 0); err != nil {
		t.Error(err)
	}
}

// late is a keeper that gets a sandbox only after something else.
type late struct {
	keeper.Client
	before func()
}

func (l late) Hold(ctx context.Context, s keeper.Sandbox) error {
	for _, f := range []**os.File{&s.Control, &s.Pidfd, &s.Kill} {
		d, err := tty.Duplicate(*f)
		if err != nil {
			return err
		}
		defer d.Close()
		*f = d
	}
	l.before()
	return l.Client.Hold(ctx, s)
}

// TestANewKeeperHoldsNothingOfWhatEndsMeanwhile stops a sandbox while it is being given to a new keeper.
func TestANewKeeperHoldsNothingOfWhatEndsMeanwhile(t *testing.T) {
	m := use(t)
	e := m.open(t)
	b := e.start(t, m.plan(), smallLimits)
	if err := e.Keep(t.Context(), late{e.keeper, func() { b.stop(t) }}); err != nil {
		t.Error(err)
	}
	held, err := e.keeper.Roster(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	defer keeper.CloseHeld(held)
	for _, h := range held {
		if h.Sandbox != nil && h.Sandbox.ID == string(b.id) {
			t.Error("it is held")
		}
	}
}

// TestBothHoldersGone: nobody can reach the sandbox any more, so it ends by itself.
func TestBothHoldersGone(t *testing.T) {
	m := use(t)
	e := m.open(t)
	i, err := e.Start(t.Context(), m.spec(newID(t)))
	if err != nil {
		t.Fatal(err)
	}
	dup, err := pidfd.Open(i.(*Instance).Pid())
	if err != nil {
		t.Fatal(err)
	}
	defer dup.Close()
	m.endRole("keeper")
	e.close()
	ctx, stop := context.WithTimeout(t.Context(), patience)
	defer stop()
	if err := pidfd.Wait(ctx, dup); err != nil {
		t.Error(err)
	}
	if err := m.startRole("keeper"); err != nil {
		t.Fatal(err)
	}
	next := m.open(t)
	if err := next.Sweep(t.Context(), func(sandbox.ID) bool { return false }); err != nil {
		t.Error(err)
	}
	if left := m.left(t); len(left) > 0 {
		t.Errorf("left: %q", left)
	}
}

func TestManyCyclesLeaveNothing(t *testing.T) {
	m := use(t)
	e := m.open(t)
	spawner := func() string {
		m.mu.Lock()
		defer m.mu.Unlock()
		return strconv.Itoa(m.roles["spawner"].Process.Pid)
	}
	keeperPid := func() string {
		m.mu.Lock()
		defer m.mu.Unlock()
		return strconv.Itoa(m.roles["keeper"].Process.Pid)
	}
	cycles := func(n int) {
		var wg sync.WaitGroup
		for range 8 {
			wg.Go(func() {
				for range n / 8 {
					i, err := e.Start(t.Context(), m.spec(newID(t)))
					if err != nil {
						t.Error(err)
						return
					}
					if x, err := i.Stop(t.Context(), 0); err != nil || x.Cause != sandbox.CauseStopped {
						t.Errorf("Stop = %v, %v", x, err)
					}
				}
			})
		}
		wg.Wait()
	}
	cycles(16) // whatever is opened lazily
	mounts := countMounts(t)
	before, err := leak.Take(m.dir)
	if err != nil {
		t.Fatal(err)
	}
	files := map[string]int{spawner(): countFiles(t, spawner()), keeperPid(): countFiles(t, keeperPid())}
	ranges := rangesTaken(e)

	cycles(200)

	if err := leak.Compare(before, m.dir); err != nil {
		// Ranges that are warm in addition hold a namespace each; nothing else may be left.
		if lines := slices.DeleteFunc(strings.Split(err.Error(), "\n"), func(l string) bool {
			return strings.Contains(l, "descriptor of user:[")
		}); len(lines) > 0 {
			t.Error(strings.Join(lines, "\n"))
		}
	}
	// Others mount and unmount on the machine meanwhile.
	wait.Until(t, patience, func() bool { return countMounts(t) <= mounts }, fmt.Sprintf("no more mounts than the %d of before", mounts))
	for pid, n := range files {
		wait.Until(t, patience, func() bool { return countFiles(t, pid) <= n }, "descriptors of "+pid)
	}
	if left := m.left(t); len(left) > 0 {
		t.Errorf("left: %q", left)
	}
	if now := rangesTaken(e); now != ranges {
		t.Errorf("%d ranges taken, before %d", now, ranges)
	}
}

func rangesTaken(e *edge) int { return e.ranges.Taken() }

func TestOutputOfSandboxesThatAreNotKeptIsSwept(t *testing.T) {
	m := use(t)
	e := m.open(t)
	kept, gone := newID(t), newID(t)
	out := m.dir + "/output/"
	for _, id := range []string{string(kept), string(gone), "other"} {
		if err := os.MkdirAll(out+id, 0o700); err != nil {
			t.Fatal(err)
		}
		if err := os.WriteFile(out+id+"/1.1", []byte("x"), 0o600); err != nil {
			t.Fatal(err)
		}
	}
	if err := e.Sweep(t.Context(), func(id sandbox.ID) bool { return id == kept }); err != nil {
		t.Fatal(err)
	}
	for id, want := range map[string]bool{string(kept): true, string(gone): false, "other": true} {
		if _, err := os.Stat(out + id + "/1.1"); (err == nil) != want {
			t.Errorf("%s: %v", id, err)
		}
	}
}

func TestStopGivesTheGraceToProcessesThatAreInNoCommandAnyMore(t *testing.T) {
	m := use(t)
	b := m.open(t).start(t, m.plan(), smallLimits)
	out, end := b.begin(chronus.IDs{}, "/bin/sh", "-c",
		"(trap 'echo bye; exit' TERM; touch /root/armed; while :; do sleep 0.01; done) & exit 0")
	if ws := end(); ws != 0 {
		t.Fatalf("status %v", ws)
	}
	up, err := m.uppers.Find(string(b.id))
	if err != nil {
		t.Fatal(err)
	}
	defer up.Close()
	armed := fmt.Sprintf("/proc/self/fd/%d/root/armed", up.Dir.Fd())
	wait.Until(t, patience, func() bool { _, err := os.Stat(armed); return err == nil }, "the trap")
	if _, err := b.Stop(t.Context(), patience); err != nil {
		t.Fatal(err)
	}
	if got := out(); !strings.HasSuffix(got, "bye\n") { // the shell may say more
		t.Errorf("what it wrote on TERM: %q", got)
	}
}

// How many processes there are is the sandbox's choice, and descriptors are the whole node's.
func TestStopOfMoreProcessesThanTheNodeHasDescriptors(t *testing.T) {
	m := use(t)
	l := smallLimits
	l.Memory, l.Pids = 256<<20, 400
	b := m.open(t).start(t, m.plan(), l)
	b.sh("i=0; while [ $i -lt 200 ]; do sleep 1000 </dev/null >/dev/null 2>&1 & i=$((i+1)); done")
	var old syscall.Rlimit
	if err := syscall.Getrlimit(syscall.RLIMIT_NOFILE, &old); err != nil {
		t.Fatal(err)
	}
	next, err := syscall.Open("/", syscall.O_RDONLY|syscall.O_CLOEXEC, 0)
	if err != nil {
		t.Fatal(err)
	}
	syscall.Close(next)
	if err := syscall.Setrlimit(syscall.RLIMIT_NOFILE, &syscall.Rlimit{Cur: uint64(next) + 100, Max: old.Max}); err != nil {
		t.Fatal(err)
	}
	_, err = b.Stop(t.Context(), patience)
	if rerr := syscall.Setrlimit(syscall.RLIMIT_NOFILE, &old); rerr != nil {
		t.Fatal(rerr)
	}
	if err != nil {
		t.Errorf("stop: %v", err)
	}
}

func TestAnInstanceThatIsGoneRefusesPolitely(t *testing.T) {
	m := use(t)
	b := m.open(t).start(t, m.plan(), smallLimits)
	b.stop(t)
	if _, err := b.NewExec(t.Context(), 99); err == nil {
		t.Error("NewExec works")
	}
	if err := b.Update(t.Context(), smallLimits); !errors.Is(err, errdefs.NotFound) {
		t.Errorf("Update = %v", err)
	}
	s := chronus.Spawn{Number: 1, Argv: []string{"x"}}
	if _, err := b.Channel().Spawn(t.Context(), s, chronus.Stdio{}); err == nil {
		t.Error("Spawn works")
	}
}

func TestMoreProcessorsByUpdate(t *testing.T) {
	m := use(t)
	e := m.open(t)
	if len(e.cpus) < 2 {
		t.Skip("needs two processors")
	}
	b := e.start(t, m.plan(), smallLimits)
	allowed := func() string { return b.sh("grep Cpus_allowed_list /proc/self/status | cut -f2") }
	if got := allowed(); strings.ContainsAny(got, "-,") {
		t.Errorf("one processor's quota may run on %s", got)
	}
	l := smallLimits
	l.CPUMillis = int64(len(e.cpus)) * 1000
	if err := b.Update(t.Context(), l); err != nil {
		t.Fatal(err)
	}
	if got := allowed(); !strings.ContainsAny(got, "-,") {
		t.Errorf("after the update it may run on %s", got)
	}
}
