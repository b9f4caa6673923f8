package sessions_test

import (
	"context"
	"errors"
	"fmt"
	"os"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"

	"github.com/sandsea/sandsea/api/errdefs"
	"github.com/sandsea/sandsea/internal/chronus"
	"github.com/sandsea/sandsea/internal/chronus/sessions"
	"github.com/sandsea/sandsea/internal/edge/backend/fake"
	"github.com/sandsea/sandsea/internal/keeper"
	"github.com/sandsea/sandsea/internal/linux/tty"
	"github.com/sandsea/sandsea/internal/sandbox"
	"github.com/sandsea/sandsea/internal/testkit/wait"
)

func onTerminal(columns, rows uint32, argv ...string) sessions.Start {
	s := cmd(argv...)
	s.Terminal = &sessions.TerminalSize{Columns: columns, Rows: rows}
	return s
}

// rawRig is a rig with the program "raw", which has its terminal pass bytes as they are and then is another.
func rawRig(t *testing.T) *rig {
	t.Helper()
	r := newRig(t)
	addRaw(r.world)
	return r
}

func addRaw(w *fake.World) {
	w.Handle("raw", func(p *fake.Proc) int {
		if err := tty.MakeRaw(p.Stdin.(*os.File)); err != nil {
			return 9
		}
		switch p.Argv[1] {
		case "bytes":
			for off := int64(0); off < rawBytes; off += 16 << 10 {
				if _, err := p.Stdout.Write(fake.Pattern(off, 16<<10)); err != nil {
					return 1
				}
			}
			return 3
		case "echo":
			_, _ = p.Stdout.Write([]byte("up\n"))
			buf := make([]byte, 4096)
			for {
				n, err := p.Stdin.Read(buf)
				if err != nil {
					return 1
				}
				if _, err := p.Stdout.Write(buf[:n]); err != nil || buf[n-1] == 4 {
					return 5
				}
			}
		case "late":
			p.Fork(func(p *fake.Proc) int {
				<-p.Trap()
				_, _ = p.Stdout.Write([]byte("late\n"))
				return 0
			})
			_, _ = p.Stdout.Write([]byte("soon\n"))
			return 0
		}
		return 8
	})
}

const rawBytes = 4 << 20

func (r *rig) send(n, off int64, data string) int64 {
	r.t.Helper()
	ctx, stop := context.WithTimeout(r.t.Context(), patience)
	defer stop()
	next, err := r.table.SendInput(ctx, n, off, []byte(data))
	if err != nil {
		r.t.Fatalf("send %q: %v", data, err)
	}
	return next
}

// until waits until a record begins with want.
func (r *rig) until(n int64, want string) {
	r.t.Helper()
	wait.Until(r.t, patience, func() bool {
		got, _ := r.attach(n, 0, true)
		return strings.HasPrefix(got, want)
	}, "output")
}

func (r *rig) process(n int64) sessions.Info {
	r.t.Helper()
	for _, i := range r.table.List() {
		if i.Number == n {
			return i
		}
	}
	r.t.Fatalf("no process %d", n)
	return sessions.Info{}
}

func TestATerminalHasItsSizeAndTheLastOneCounts(t *testing.T) {
	r := newRig(t)
	i := r.launch(onTerminal(91, 17, "size"))
	if !i.InputOpen || i.Terminal == nil || *i.Terminal != (sessions.TerminalSize{Columns: 91, Rows: 17}) {
		t.Errorf("started: %+v", i)
	}
	r.until(i.Number, "91 17\r\n")
	for _, size := range []sessions.TerminalSize{{Columns: 1, Rows: 1}, {Columns: 65535, Rows: 2}} {
		if err := r.table.Resize(t.Context(), i.Number, size); err != nil {
			t.Fatal(err)
		}
	}
	next := r.send(i.Number, 0, "again\n")
	r.until(i.Number, "91 17\r\nagain\r\n65535 2\r\n")
	r.restart()
	if got := r.process(i.Number); got.Terminal == nil || got.Terminal.Columns != 65535 || !got.InputOpen {
		t.Errorf("after a restart: %+v", got)
	}
	if err := r.table.Resize(t.Context(), i.Number, sessions.TerminalSize{Columns: 50, Rows: 60}); err != nil {
		t.Fatal(err)
	}
	next = r.send(i.Number, next, "more\n")
	r.until(i.Number, "91 17\r\nagain\r\n65535 2\r\nmore\r\n50 60\r\n")
	r.send(i.Number, next, "end\n")
	_, end := r.attach(i.Number, 0, false)
	last := sessions.TerminalSize{Columns: 50, Rows: 60}
	if end.Result.ExitCode != 0 || end.Terminal == nil || *end.Terminal != last {
		t.Errorf("ended: %+v", end)
	}
	err := r.table.Resize(t.Context(), i.Number, sessions.TerminalSize{Columns: 5, Rows: 6})
	if !errors.Is(err, errdefs.FailedPrecondition) {
		t.Errorf("resize after the end: %v", err)
	}
	if _, err := r.table.SendInput(t.Context(), i.Number, 15, []byte("x")); !errors.Is(err, errdefs.FailedPrecondition) {
		t.Errorf("input after the end: %v", err)
	}
}

func TestWhatATerminalRefuses(t *testing.T) {
	r := newRig(t)
	for _, bad := range []sessions.TerminalSize{{}, {Columns: 80}, {Rows: 24}, {Columns: 65536, Rows: 1}} {
		_, err := r.table.Launch(t.Context(), onTerminal(bad.Columns, bad.Rows, "size"))
		if e := errdefs.From(err); e.Kind != errdefs.Invalid || !strings.HasPrefix(e.Field, "terminal.") {
			t.Errorf("start of %v: %v", bad, err)
		}
	}
	n := r.launch(onTerminal(80, 24, "size")).Number
	err := r.table.Resize(t.Context(), n, sessions.TerminalSize{Columns: 80})
	if e := errdefs.From(err); e.Kind != errdefs.Invalid || e.Field != "size.rows" {
		t.Errorf("resize: %v", err)
	}
	err = r.table.CloseInput(t.Context(), n)
	if e := errdefs.From(err); e.Kind != errdefs.FailedPrecondition || !strings.Contains(e.Hint, "byte 4") {
		t.Errorf("close the input: %v", err)
	}
	r.until(n, "80 24\r\n")
	r.send(n, 0, "end\n")
	m := r.launch(cmd("sleep", "60")).Number
	good := sessions.TerminalSize{Columns: 80, Rows: 24}
	if err := r.table.Resize(t.Context(), m, good); !errors.Is(err, errdefs.FailedPrecondition) {
		t.Errorf("resize without a terminal: %v", err)
	}
	if i := r.process(m); i.Terminal != nil {
		t.Errorf("a terminal of its own accord: %+v", i)
	}
	if err := r.table.Resize(t.Context(), 77, good); !errors.Is(err, errdefs.NotFound) {
		t.Errorf("resize of nobody: %v", err)
	}
}

func TestTheTerminalIsPartOfWhatAKeyStandsFor(t *testing.T) {
	r := newRig(t)
	s := onTerminal(80, 24, "size")
	s.Key = "k"
	n := r.launch(s).Number
	if again := r.launch(s); again.Number != n {
		t.Errorf("started %d and %d", n, again.Number)
	}
	for name, other := range map[string]func(*sessions.Start){
		"without one":     func(s *sessions.Start) { s.Terminal = nil },
		"of another size": func(s *sessions.Start) { s.Terminal = &sessions.TerminalSize{Columns: 80, Rows: 25} },
		"an open input":   func(s *sessions.Start) { s.Terminal, s.Stream = nil, true },
	} {
		o := s
		other(&o)
		if _, err := r.table.Launch(t.Context(), o); !errors.Is(err, errdefs.AlreadyExists) {
			t.Errorf("%s: %v", name, err)
		}
	}
}

func TestTermIsSetUnlessTheEnvironmentSaysOtherwise(t *testing.T) {
	r := newRig(t)
	for _, c := range []struct {
		name string
		s    sessions.Start
		want string
	}{
		{"by default", onTerminal(80, 24, "env"), "TERM=xterm-256color"},
		{"by the command", func() sessions.Start {
			s := onTerminal(80, 24, "env")
			s.Command.Env = map[string]string{"TERM": "dumb"}
			return s
		}(), "TERM=dumb"},
		{"where only the command's counts", func() sessions.Start {
			s := onTerminal(80, 24, "env")
			s.Command.ReplaceEnv = true
			return s
		}(), "TERM=xterm-256color"},
		{"without a terminal", cmd("env"), ""},
	} {
		out, _ := r.attach(r.launch(c.s).Number, 0, false)
		got := ""
		for line := range strings.Lines(out) {
			if strings.HasPrefix(line, "TERM=") {
				got += strings.TrimSpace(line)
			}
		}
		if got != c.want {
			t.Errorf("%s: %q, want %q", c.name, got, c.want)
		}
	}
}

func TestATerminalsBytesAreExact(t *testing.T) {
	r := rawRig(t)
	n := r.launch(onTerminal(80, 24, "raw", "bytes")).Number
	var wg sync.WaitGroup
	for _, from := range []int64{0, 0, 77_777} {
		wg.Go(func() {
			out, end := r.attach(n, from, false)
			if out != string(fake.Pattern(from, int(rawBytes-from))) {
				t.Errorf("from %d: other bytes, %d of them", from, len(out))
			}
			res := end.Result
			if res.ExitCode != 3 || res.StdoutBytes != rawBytes || res.StderrBytes != 0 || res.Truncated {
				t.Errorf("result %+v", end.Result)
			}
		})
	}
	wg.Wait()
	n = r.launch(onTerminal(80, 24, "raw", "echo")).Number
	r.until(n, "up\n") // what comes before that is shown
	// More than the terminal takes at once: the call waits for the command to read.
	text := strings.Repeat("0123456789abcde\n", 8<<10)
	next := r.send(n, 0, text)
	next = r.send(n, next-5, text[:5]+"!") // five repeated
	r.send(n, next, "\x04")
	if out, end := r.attach(n, 0, false); out != "up\n"+text+"!\x04" || end.Result.ExitCode != 5 {
		t.Errorf("%d bytes of %d, %+v", len(out), len(text), end.Result)
	}
}

// deafRig has a command, number n, that never reads its terminal.
func deafRig(t *testing.T) (r *rig, n int64) {
	t.Helper()
	r = rawRig(t)
	r.world.Handle("deaf", func(p *fake.Proc) int {
		_ = tty.MakeRaw(p.Stdin.(*os.File))
		_, _ = p.Stdout.Write([]byte("up"))
		<-p.Ctx.Done()
		return 0
	})
	n = r.launch(onTerminal(80, 24, "deaf")).Number
	r.until(n, "up")
	return r, n
}

func TestASendToATerminalThatIsNotReadEndsWithItsCaller(t *testing.T) {
	r, n := deafRig(t)
	ctx, cancel := context.WithTimeout(t.Context(), time.Second)
	defer cancel()
	next, err := r.table.SendInput(ctx, n, 0, make([]byte, 1<<20))
	if !errors.Is(err, errdefs.Deadline) || next == 0 || next > tty.InFlight {
		t.Fatalf("%d, %v", next, err)
	}
	if got, err := r.table.SendInput(t.Context(), n, 0, make([]byte, next)); err != nil || got != next {
		t.Fatalf("what was taken before: %d, %v", got, err)
	}
}

// A person can type on though the edge died in the middle of a send.
func TestATerminalIsTypedOnAfterALostSend(t *testing.T) {
	r, n := deafRig(t)
	const size = 1 << 20 // more than a terminal takes
	sent := make(chan error, 1)
	go func() {
		_, err := r.table.SendInput(context.Background(), n, 0, make([]byte, size))
		sent <- err
	}()
	wait.Until(t, patience, func() bool { return r.mem.has(".in") }, "the send")
	r.kill()
	if err := <-sent; err == nil { // before there is a memory again that takes its last word
		t.Error("a terminal that nobody reads took everything")
	}
	r.revive()
	if next, err := r.table.SendInput(t.Context(), n, 0, nil); err != nil || next != size {
		t.Errorf("the next byte is %d, %v; want %d", next, err, size)
	}
}

func TestAChildKeepsTheTerminal(t *testing.T) {
	r := rawRig(t)
	n := r.launch(onTerminal(80, 24, "raw", "late")).Number
	out, end := r.attach(n, 0, false)
	if out != "soon\n" || end.Result.ExitCode != 0 || end.Result.StdoutBytes != 5 {
		t.Fatalf("%q, %+v", out, end.Result)
	}
	r.restart()
	wait.Until(t, patience, func() bool { // until the child listens
		_ = r.table.Signal(t.Context(), n, 15, true)
		return r.world.Tasks(r.id) == 0
	}, "the child's end")
	r.until(n, "soon\nlate\n")
}

func TestATerminalOutlivesEdgeAndKeeper(t *testing.T) {
	k := &realKeeper{dir: t.TempDir()}
	r := &rig{t: t, world: fake.NewWorld(), keeper: fake.NewKeeper(), connect: k.dial}
	addRaw(r.world)
	r.begin(k.start(t))
	n := r.launch(onTerminal(80, 24, "raw", "echo")).Number
	r.until(n, "up\n")
	flood := r.launch(onTerminal(80, 24, "raw", "bytes")).Number
	var sent strings.Builder
	for round := range 4 {
		text := strings.Repeat(fmt.Sprintf("round %d\n", round), 3000)
		sent.WriteString(text)
		r.send(n, int64(sent.Len()-len(text)), text)
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
	r.send(n, int64(sent.Len()), "\x04")
	if out, end := r.attach(n, 0, false); out != "up\n"+sent.String()+"\x04" || end.Result.ExitCode != 5 {
		t.Errorf("%d bytes of %d, %+v", len(out), sent.Len(), end.Result)
	}
	if out, end := r.attach(flood, 0, false); out != string(fake.Pattern(0, rawBytes)) || end.Result.ExitCode != 3 {
		t.Errorf("%d bytes, %+v", len(out), end.Result)
	}
}

func TestASandboxWithoutRoomForATerminalIsItsOwnFault(t *testing.T) {
	r := newRig(t)
	r.world.OnStep(func(string, sandbox.ID) error {
		return &chronus.StartError{Step: chronus.StepTerminal, Errno: syscall.ENOSPC}
	})
	_, end := r.attach(r.launch(onTerminal(80, 24, "size")).Number, 0, false)
	f := end.Result.StartFailure
	if f == nil || f.Kind != "resources" || f.Errno != int(syscall.ENOSPC) || end.State != sessions.Failed {
		t.Errorf("%+v", end.Result)
	}
	if keys := r.keeper.Keys(); len(keys) != 1 {
		t.Errorf("still held: %v", keys)
	}
}

// noTerminals is a keeper of an older version.
type noTerminals struct{ keeper.Client }

func (noTerminals) Record(context.Context, keeper.Exec) error {
	return errdefs.New(errdefs.FailedPrecondition, "keeper", "is of an older version")
}

func TestAKeeperOfAnOlderVersionLeavesNothingBehind(t *testing.T) {
	r := newRig(t)
	r.relay.set(noTerminals{r.link})
	if _, err := r.table.Launch(t.Context(), onTerminal(80, 24, "size")); !errors.Is(err, errdefs.FailedPrecondition) {
		t.Errorf("got %v", err)
	}
	if left := r.table.List(); len(left) != 0 {
		t.Errorf("left: %+v", left)
	}
	if entries, err := os.ReadDir(r.dir + "/" + string(r.id)); err != nil || len(entries) != 0 {
		t.Errorf("records left: %v, %v", entries, err)
	}
}
