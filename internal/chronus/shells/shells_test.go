package shells

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"log/slog"
	"strings"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"github.com/sandsea/sandsea/api/errdefs"
	"github.com/sandsea/sandsea/internal/chronus/sessions"
)

// memory is a Memory that outlives Sets.
type memory struct {
	mu   sync.Mutex
	data map[string][]byte
	err  error
}

func (m *memory) Save(name string, data []byte) error {
	m.mu.Lock()
	defer m.mu.Unlock()
	if m.err != nil {
		return m.err
	}
	m.data[name] = bytes.Clone(data)
	return nil
}

func (m *memory) Forget(names ...string) error {
	m.mu.Lock()
	defer m.mu.Unlock()
	for _, n := range names {
		delete(m.data, n)
	}
	return nil
}

// table stands in for the sandbox's commands. What a script does is given by its text: "cwd DIR" changes the directory,
// "lose" leaves nothing, "wait" waits to be killed or let go, "big" leaves much.
type table struct {
	set    *Set
	shells map[string]bool // the interpreters that there are

	mu    sync.Mutex
	next  int64
	keys  map[string]sessions.Handover
	kills map[int64]chan struct{}
	goOn  chan struct{}
	order []string
}

func (t *table) Keyed(key string) (string, bool) {
	t.mu.Lock()
	defer t.mu.Unlock()
	h, ok := t.keys[key]
	return h.Session, ok
}

func (t *table) Signal(_ context.Context, number int64, _ int, _ bool) error {
	t.mu.Lock()
	defer t.mu.Unlock()
	if c, ok := t.kills[number]; ok {
		close(c)
		delete(t.kills, number)
	}
	return nil
}

func (t *table) Run(_ context.Context, s sessions.Start, _ int64) (sessions.Answer, error) {
	t.mu.Lock()
	if known, ok := t.keys[s.Key]; ok && s.Key != "" {
		defer t.mu.Unlock()
		if known.Digest != s.Handover.Digest {
			return sessions.Answer{}, errdefs.New(errdefs.AlreadyExists, "", "another")
		}
		return sessions.Answer{Replayed: true}, nil
	}
	t.next++
	number := t.next
	killed := make(chan struct{})
	t.kills[number] = killed
	if s.Key != "" {
		t.keys[s.Key] = *s.Handover
	}
	script := ""
	if len(s.Command.Argv) > 2 {
		script = s.Command.Argv[2]
	}
	t.order = append(t.order, script)
	t.mu.Unlock()
	if err := t.set.Begin(s.Handover.Session, number); err != nil {
		t.set.Unstarted(s.Handover.Session, number)
		return sessions.Answer{}, err
	}
	var r sessions.Result
	interpreter, cwd := s.Command.Argv[0], "/"
	word, arg, _ := strings.Cut(script, " ")
	switch {
	case !t.shells[interpreter] && !strings.HasPrefix(interpreter, "/"):
		r = sessions.Result{ExitCode: 127, StartFailure: &sessions.StartFailure{Kind: "not_found"}}
	case word == "cwd":
		cwd = arg
	case word == "wait":
		select {
		case <-killed:
			r.ExitCode = 137
		case <-t.goOn:
		}
	}
	var b strings.Builder
	say := func(section, text string) { fmt.Fprintf(&b, "%s %s\n%s", s.Handover.Token, section, text) }
	say("interpreter", "/bin/"+interpreter+"\n")
	say("cwd", cwd+"\n")
	say("umask", "0022\n")
	if word == "big" {
		say("variables", "declare -- a=\""+strings.Repeat("x", 900<<10)+"\"\n")
	}
	say("shopt", "")
	say("end", "")
	state := []byte(b.String())
	if word == "lose" || r.ExitCode != 0 {
		state = nil
	}
	end := t.set.Settle(sessions.Settling{
		Session: s.Handover.Session, Token: s.Handover.Token, Number: number, Result: &r, State: state,
	})
	return sessions.Answer{Number: number, Result: r, Shell: &end}, nil
}

func newSet(mem *memory, interpreters ...string) (*Set, *table) {
	s := New(Config{ID: "box", Memory: mem, Now: time.Now, Log: slog.New(slog.DiscardHandler)})
	t := &table{
		set: s, shells: map[string]bool{}, keys: map[string]sessions.Handover{}, kills: map[int64]chan struct{}{},
		goOn: make(chan struct{}),
	}
	for _, i := range interpreters {
		t.shells[i] = true
	}
	return s, t
}

func newMemory() *memory { return &memory{data: map[string][]byte{}} }

func mustOpen(t *testing.T, s *Set, o Open) Shell {
	t.Helper()
	sh, err := s.Open(t.Context(), o)
	if err != nil {
		t.Fatal(err)
	}
	return sh
}

func TestBashIsTakenElseSh(t *testing.T) {
	t.Parallel()
	for _, c := range []struct {
		have []string
		ask  string
		want string
		kind error
	}{
		{[]string{"bash", "sh"}, "", "/bin/bash", nil},
		{[]string{"sh"}, "", "/bin/sh", nil},
		{nil, "", "", errdefs.FailedPrecondition},
		{[]string{"bash"}, "dash", "", errdefs.FailedPrecondition},
		{[]string{"bash", "dash"}, "dash", "/bin/dash", nil},
	} {
		mem := newMemory()
		s, table := newSet(mem, c.have...)
		s.Use(table)
		sh, err := s.Open(t.Context(), Open{Interpreter: c.ask})
		if sh.Interpreter != c.want || !errors.Is(err, c.kind) {
			t.Errorf("%v: got %+v, %v", c, sh, err)
		}
		if err != nil && (len(mem.data) > 0 || len(s.Names()) > 0) {
			t.Errorf("%v: something is left", c)
		}
	}
}

func TestSessionsAreRemembered(t *testing.T) {
	t.Parallel()
	mem := newMemory()
	s, table := newSet(mem, "bash")
	s.Use(table)
	sh := mustOpen(t, s, Open{Name: "a"})
	mustOpen(t, s, Open{Name: "b"})
	if _, err := s.Run(t.Context(), Run{Shell: "a", Script: "cwd /x"}); err != nil {
		t.Fatal(err)
	}
	if err := s.Close(t.Context(), "b"); err != nil {
		t.Fatal(err)
	}
	s, table = newSet(mem, "bash")
	if err := s.Load(mem.data); err != nil {
		t.Fatal(err)
	}
	s.Use(table)
	ran, err := s.Run(t.Context(), Run{Shell: "a", Script: "lose"})
	if err != nil || !ran.Lost || ran.Shell.Cwd != "/x" || !ran.Shell.Opened.Equal(sh.Opened) {
		t.Errorf("got %+v, %v", ran, err)
	}
	if _, err := s.Run(t.Context(), Run{Shell: "b"}); !errors.Is(err, errdefs.NotFound) {
		t.Errorf("a closed session: %v", err)
	}
	if err := errors.Join(s.Close(t.Context(), "a"), s.Close(t.Context(), "a")); err != nil || len(mem.data) != 0 {
		t.Errorf("got %v, left %d", err, len(mem.data))
	}
}

func TestASessionWhoseOpeningWasCutOffIsForgotten(t *testing.T) {
	t.Parallel()
	mem := newMemory()
	s, _ := newSet(mem, "bash")
	for _, name := range []string{"none", "runs", "never"} {
		if _, err := s.reserve(Open{Name: name}); err != nil {
			t.Fatal(err)
		}
	}
	s, table := newSet(mem, "bash")
	if err := s.Load(mem.data); err != nil {
		t.Fatal(err)
	}
	if err := errors.Join(s.Begin("runs", 7), s.Begin("never", 8)); err != nil {
		t.Fatal(err)
	}
	s.Use(table)
	s.Unstarted("never", 8)
	raw := strings.NewReplacer("@T", testToken).Replace("@T interpreter\n/bin/bash\n@T cwd\n/\n@T umask\n22\n@T shopt\n@T end\n")
	s.Settle(sessions.Settling{Session: "runs", Token: testToken, Number: 7, Result: &sessions.Result{}, State: []byte(raw)})
	if _, err := s.Run(t.Context(), Run{Shell: "runs"}); err != nil {
		t.Errorf("the one whose shell went on: %v", err)
	}
	if len(mem.data) != 1 {
		t.Errorf("%d are remembered, want 1", len(mem.data))
	}
}

func TestTurns(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		s, table := newSet(newMemory(), "bash")
		s.Use(table)
		mustOpen(t, s, Open{Name: "a"})
		var all sync.WaitGroup
		run := func(ctx context.Context, script string) {
			all.Go(func() {
				_, err := s.Run(ctx, Run{Shell: "a", Script: script})
				if gone := ctx.Err() != nil; gone != errors.Is(err, errdefs.Canceled) {
					t.Errorf("%s: %v", script, err)
				}
			})
			synctest.Wait()
		}
		leaves, leave := context.WithCancelCause(t.Context())
		run(t.Context(), "wait")
		run(t.Context(), "1")
		run(leaves, "2")
		run(t.Context(), "3")
		leave(errors.New("test"))
		synctest.Wait()
		table.goOn <- struct{}{}
		all.Wait()
		if got := strings.Join(table.order, " "); got != " wait 1 3" {
			t.Errorf("order %q", got)
		}
	})
}

func TestCloseKillsAndFreesTheName(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		mem := newMemory()
		s, table := newSet(mem, "bash")
		s.Use(table)
		mustOpen(t, s, Open{Name: "a"})
		var all sync.WaitGroup
		all.Go(func() {
			ran, err := s.Run(t.Context(), Run{Shell: "a", Script: "wait"})
			if err != nil || !ran.Lost || ran.Result.ExitCode != 137 {
				t.Errorf("what ran: %+v, %v", ran, err)
			}
		})
		synctest.Wait()
		all.Go(func() {
			if _, err := s.Run(t.Context(), Run{Shell: "a", Script: "next"}); !errors.Is(err, errdefs.NotFound) {
				t.Errorf("what waited: %v", err)
			}
		})
		synctest.Wait()
		if err := s.Close(t.Context(), "a"); err != nil {
			t.Fatal(err)
		}
		all.Wait()
		if len(mem.data) != 0 {
			t.Errorf("%d are remembered", len(mem.data))
		}
		mustOpen(t, s, Open{Name: "a"})
	})
}

func TestBoundsOfSessions(t *testing.T) {
	t.Parallel()
	s, table := newSet(newMemory(), "bash")
	s.Use(table)
	for i := range MaxSessions {
		mustOpen(t, s, Open{Name: fmt.Sprint(i)})
	}
	if _, err := s.Open(t.Context(), Open{}); !errors.Is(err, errdefs.Exhausted) {
		t.Errorf("one too many: %v", err)
	}
	if _, err := s.Open(t.Context(), Open{Name: "1"}); !errors.Is(err, errdefs.AlreadyExists) {
		t.Errorf("a name twice: %v", err)
	}
	lost := 0
	for i := range 12 {
		ran, err := s.Run(t.Context(), Run{Shell: fmt.Sprint(i), Script: "big"})
		if err != nil {
			t.Fatal(err)
		}
		if ran.Lost {
			lost++
		}
	}
	if want := 12 - maxStates/(900<<10); lost != want {
		t.Errorf("%d states were lost, want %d", lost, want)
	}
}

func TestAStateThatCannotBeRememberedIsLost(t *testing.T) {
	t.Parallel()
	mem := newMemory()
	s, table := newSet(mem, "bash")
	s.Use(table)
	mustOpen(t, s, Open{Name: "a"})
	mem.err = errors.New("full")
	ran, err := s.Run(t.Context(), Run{Shell: "a", Script: "cwd /x"})
	if err != nil || !ran.Lost || ran.Shell.Cwd != "/" {
		t.Errorf("got %+v, %v", ran, err)
	}
}

func TestKeys(t *testing.T) {
	t.Parallel()
	s, table := newSet(newMemory(), "bash")
	s.Use(table)
	one, two := mustOpen(t, s, Open{Key: "k"}), mustOpen(t, s, Open{Key: "k"})
	if one.Name != two.Name || len(table.order) != 1 {
		t.Errorf("got %+v and %+v", one, two)
	}
	if _, err := s.Open(t.Context(), Open{Key: "k", Login: true}); !errors.Is(err, errdefs.AlreadyExists) {
		t.Errorf("another request: %v", err)
	}
	for _, replayed := range []bool{false, true} {
		ran, err := s.Run(t.Context(), Run{Shell: one.Name, Script: "x", Key: "r"})
		if err != nil || ran.Replayed != replayed {
			t.Errorf("got %+v, %v", ran, err)
		}
	}
	if err := s.Close(t.Context(), one.Name); err != nil {
		t.Fatal(err)
	}
	if _, err := s.Open(t.Context(), Open{Key: "k"}); !errors.Is(err, errdefs.FailedPrecondition) {
		t.Errorf("the key of a closed session: %v", err)
	}
}
