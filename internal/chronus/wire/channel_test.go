package wire

import (
	"context"
	"errors"
	"os"
	"syscall"
	"testing"
	"time"

	"github.com/sandsea/sandsea/api/errdefs"
	"github.com/sandsea/sandsea/internal/chronus"
	"github.com/sandsea/sandsea/internal/linux/scm"
	"github.com/sandsea/sandsea/internal/testkit/wait"
)

// peer plays the inside: it reads requests and says what the test wants.
type peer struct {
	t    testing.TB
	conn *scm.Conn
}

func pair(t testing.TB) (*Channel, *peer) {
	t.Helper()
	ours, theirs, err := scm.Socketpair()
	if err != nil {
		t.Fatal(err)
	}
	c := New(ours)
	ours.Close()
	conn, err := scm.New(theirs)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		c.Close()
		conn.Close()
	})
	return c, &peer{t, conn}
}

func within(t testing.TB) context.Context {
	ctx, stop := context.WithTimeout(t.Context(), 20*time.Second)
	t.Cleanup(stop)
	return ctx
}

func (p *peer) read() message {
	buf := make([]byte, messageSize)
	n, files, err := p.conn.Recv(within(p.t), buf)
	if err != nil {
		p.t.Error(err)
		return message{}
	}
	scm.CloseFiles(files)
	m, err := decode(buf[:n])
	if err != nil {
		p.t.Error(err)
	}
	return m
}

func (p *peer) say(list ...message) {
	for _, m := range list {
		if err := p.conn.Send(within(p.t), m.encode()); err != nil {
			p.t.Error(err)
		}
	}
}

// try says what ends the line, which may be closed before all of it is said.
func (p *peer) try(list ...message) {
	for _, m := range list {
		_ = p.conn.Send(context.Background(), m.encode())
	}
}

// roster answers a greeting with a list.
func (p *peer) roster(list ...message) {
	m := p.read()
	if m.kind != kindHello {
		p.t.Errorf("got %+v, want a greeting", m)
	}
	p.say(message{head: head{kind: kindRoster, seq: m.seq}, version: Version, count: uint32(len(list))})
	for _, e := range list {
		e.kind, e.seq = kindProcess, m.seq
		p.say(e)
	}
	p.say(message{head: head{kind: kindRosterEnd, seq: m.seq}})
}

func running(number int64) message {
	return message{head: head{cookie: number}, state: stateRunning, pid: 7}
}

func ended(number int64) message {
	return message{head: head{kind: kindExit, cookie: number}, state: stateExited, pid: 7, status: 3 << 8}
}

func started(number int64) message {
	return message{head: head{kind: kindStarted, cookie: number}, pid: 7}
}

// greeted opens a line whose inside lists what is given.
func greetedPair(t testing.TB, list ...message) (*Channel, *peer) {
	c, p := pair(t)
	done := make(chan struct{})
	go func() {
		defer close(done)
		p.roster(list...)
	}()
	if _, _, err := c.Hello(within(t)); err != nil {
		t.Fatal(err)
	}
	<-done
	return c, p
}

func stdio(t testing.TB) chronus.Stdio {
	f, err := os.Open("/")
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { f.Close() })
	return chronus.Stdio{Cgroup: f, In: f, Out: f}
}

func TestWhatAnEarlierEdgeLeftInTheSocketIsDropped(t *testing.T) {
	c, p := pair(t)
	p.say(ended(5), started(6), message{head: head{kind: kindSignalled, seq: 1, cookie: 6}},
		message{head: head{kind: kindRoster, seq: 1}, version: Version, count: 1},
		message{head: head{kind: kindFailed, cookie: 9}, step: 7, errno: 2})
	go func() {
		p.roster(running(6), ended(5))
		p.say(ended(5))
	}()
	_, list, err := c.Hello(within(t))
	if err != nil {
		t.Fatal(err)
	}
	if len(list) != 2 || list[0].Number != 6 || list[0].Exited || !list[1].Exited ||
		list[1].Exit.Status.ExitStatus() != 3 {
		t.Errorf("list %+v", list)
	}
	for e, err := range c.Exits() {
		if err != nil || e.Number != 5 {
			t.Errorf("exit %+v, %v", e, err)
		}
		break
	}
}

func TestAnExitThatCrossesItsAcknowledgementIsDropped(t *testing.T) {
	c, p := greetedPair(t, ended(5), running(6))
	if err := c.Ack(5); err != nil {
		t.Fatal(err)
	}
	p.say(ended(5), ended(6))
	for e, err := range c.Exits() {
		if err != nil || e.Number != 6 {
			t.Errorf("got %+v, %v, want the end of 6", e, err)
		}
		break
	}
	if m := p.read(); m.kind != kindAck || m.cookie != 5 {
		t.Errorf("got %+v", m)
	}
}

func TestARosterThatCrossesAnAcknowledgementIsWhole(t *testing.T) {
	c, p := greetedPair(t, running(1), running(2))
	p.say(ended(1))
	for e, err := range c.Exits() {
		if err != nil || e.Number != 1 {
			t.Fatal(e, err)
		}
		break
	}
	done := make(chan struct{})
	go func() {
		defer close(done)
		// The greeting was sent before the acknowledgement, and its answer is read after it.
		m := p.read()
		if ack := p.read(); ack.kind != kindAck || ack.cookie != 1 {
			t.Errorf("got %+v", ack)
		}
		p.say(message{head: head{kind: kindRoster, seq: m.seq}, version: Version, count: 2})
		for _, e := range []message{ended(1), running(2)} {
			e.kind, e.seq = kindProcess, m.seq
			p.say(e)
		}
		p.say(message{head: head{kind: kindRosterEnd, seq: m.seq}})
	}()
	type answer struct {
		list []chronus.Process
		err  error
	}
	got := make(chan answer, 1)
	go func() {
		_, list, err := c.Hello(within(t))
		got <- answer{list, err}
	}()
	wait.Until(t, 20*time.Second, func() bool {
		c.mu.Lock()
		defer c.mu.Unlock()
		return c.hello != nil
	}, "the greeting is under way")
	if err := c.Ack(1); err != nil {
		t.Error(err)
	}
	<-done
	if a := <-got; a.err != nil || len(a.list) != 1 || a.list[0].Number != 2 {
		t.Errorf("got %+v", a)
	}
}

func TestAStartThatFailsAfterTheGreetingIsTheEndOfTheProcess(t *testing.T) {
	starting := running(4)
	starting.state = stateStarting
	c, p := greetedPair(t, starting)
	p.say(message{head: head{kind: kindFailed, cookie: 4}, step: 7, errno: 2})
	for e, err := range c.Exits() {
		if err != nil || e.Number != 4 || e.Failed == nil || e.Failed.Errno != syscall.ENOENT {
			t.Errorf("got %+v, %v", e, err)
		}
		break
	}
}

func TestAnUntrueInsideEndsTheLine(t *testing.T) {
	for _, c := range []struct {
		name string
		say  []message
	}{
		{"an end of what nobody started", []message{ended(99)}},
		{"a start that nobody asked for", []message{started(99)}},
		{"a failure that nobody asked for", []message{{head: head{kind: kindFailed, cookie: 99}, step: 7, errno: 2}}},
		{"a failure of what runs", []message{{head: head{kind: kindFailed, cookie: 1}, step: 7, errno: 2}}},
		{"a request", []message{{head: head{kind: kindAck, cookie: 1}}}},
		{"a roster that nobody asked for", []message{{head: head{kind: kindRoster, seq: 77}, version: Version}}},
		{"the end of a roster that nobody asked for", []message{{head: head{kind: kindRosterEnd}}}},
	} {
		t.Run(c.name, func(t *testing.T) {
			line, p := greetedPair(t, running(1))
			p.say(c.say...)
			for _, err := range line.Exits() {
				if !errors.Is(err, errdefs.Unavailable) || !errors.Is(err, errMessage) {
					t.Errorf("got %v", err)
				}
			}
			if err := line.Signal(within(t), 1, 0); !errors.Is(err, errdefs.Unavailable) {
				t.Errorf("later call: %v", err)
			}
		})
	}
	t.Run("a message of another size", func(t *testing.T) {
		line, p := greetedPair(t)
		if err := p.conn.Send(within(t), make([]byte, 63)); err != nil {
			t.Fatal(err)
		}
		for _, err := range line.Exits() {
			if !errors.Is(err, errMessage) {
				t.Errorf("got %v", err)
			}
		}
	})
	t.Run("a longer message", func(t *testing.T) {
		line, p := greetedPair(t)
		if err := p.conn.Send(within(t), make([]byte, 4096)); err != nil {
			t.Fatal(err)
		}
		for _, err := range line.Exits() {
			if !errors.Is(err, errdefs.Unavailable) {
				t.Errorf("got %v", err)
			}
		}
	})
	t.Run("a descriptor", func(t *testing.T) {
		line, p := greetedPair(t, running(1))
		f, err := os.Open("/")
		if err != nil {
			t.Fatal(err)
		}
		defer f.Close()
		if err := p.conn.Send(within(t), (&message{head: ended(1).head, state: stateExited, pid: 7}).encode(),
			f); err != nil {
			t.Fatal(err)
		}
		for _, err := range line.Exits() {
			if !errors.Is(err, errMessage) {
				t.Errorf("got %v", err)
			}
		}
	})
	t.Run("a roster that lists twice", func(t *testing.T) {
		line, p := pair(t)
		go func() {
			m := p.read()
			p.say(message{head: head{kind: kindRoster, seq: m.seq}, version: Version, count: 2})
			twice := running(1)
			twice.kind, twice.seq = kindProcess, m.seq
			p.say(twice, twice)
		}()
		if _, _, err := line.Hello(within(t)); !errors.Is(err, errMessage) {
			t.Errorf("got %v", err)
		}
	})
	t.Run("a roster of another length", func(t *testing.T) {
		line, p := pair(t)
		go func() {
			m := p.read()
			p.try(message{head: head{kind: kindRoster, seq: m.seq}, version: Version, count: 2},
				message{head: head{kind: kindRosterEnd, seq: m.seq}})
		}()
		if _, _, err := line.Hello(within(t)); !errors.Is(err, errMessage) {
			t.Errorf("got %v", err)
		}
	})
}

func TestTheEndOfTheInsideEndsEveryCall(t *testing.T) {
	c, p := greetedPair(t)
	errs := make(chan error, 3)
	go func() {
		_, err := c.Spawn(within(t), chronus.Spawn{Number: 1, Argv: []string{"x"}}, stdio(t))
		errs <- err
	}()
	go func() {
		_, err := c.ServeFiles(within(t), chronus.IDs{})
		errs <- err
	}()
	go func() {
		for _, err := range c.Exits() {
			errs <- err
		}
	}()
	p.read()
	p.read()
	p.conn.Close()
	for range 3 {
		if err := <-errs; !errors.Is(err, errdefs.Unavailable) {
			t.Errorf("got %v", err)
		}
	}
}

// TestWhatIsSaidBeforeTheEndIsHeard: an inside that says something and ends is found to have done both, also by one who
// has something to say to it meanwhile.
func TestWhatIsSaidBeforeTheEndIsHeard(t *testing.T) {
	for range 100 {
		c, p := pair(t)
		go func() {
			p.roster(running(1))
			p.conn.Close()
		}()
		if _, list, err := c.Hello(within(t)); err != nil || len(list) != 1 {
			t.Fatalf("a roster: %v, %v", list, err)
		}
	}
	for range 100 {
		c, p := greetedPair(t, running(1))
		p.say(ended(1))
		p.conn.Close()
		_ = c.Signal(within(t), 1, 0)
		for e, err := range c.Exits() {
			if err != nil || e.Number != 1 {
				t.Fatalf("an end: %+v, %v", e, err)
			}
			break
		}
	}
}

func TestACallThatGivesUpLeavesTheLineSound(t *testing.T) {
	c, p := greetedPair(t)
	ctx, stop := context.WithCancel(t.Context())
	got := make(chan error, 1)
	go func() {
		_, err := c.Spawn(ctx, chronus.Spawn{Number: 1, Argv: []string{"x"}}, stdio(t))
		got <- err
	}()
	p.read()
	stop()
	if err := <-got; !errors.Is(err, errdefs.Unknown) {
		t.Errorf("got %v, want that nobody knows", err)
	}
	// It ran after all, and its end is told.
	p.say(started(1), ended(1))
	for e, err := range c.Exits() {
		if err != nil || e.Number != 1 {
			t.Errorf("got %+v, %v", e, err)
		}
		break
	}
	if _, err := c.Spawn(ctx, chronus.Spawn{Number: 2, Argv: []string{"x"}}, stdio(t)); !errors.Is(err,
		errdefs.Canceled) {
		t.Errorf("got %v, want that nothing was sent", err)
	}
}

func TestAFrozenInsideHoldsUpNobodyBeyondTheirLimit(t *testing.T) {
	c, _ := greetedPair(t, running(1))
	// Nobody reads: the socket fills up.
	for {
		ctx, stop := context.WithTimeout(t.Context(), 5*time.Millisecond)
		err := c.Signal(ctx, 1, 0)
		stop()
		if errors.Is(err, errdefs.Deadline) {
			return
		}
		if !errors.Is(err, errdefs.Unknown) {
			t.Fatalf("got %v", err)
		}
	}
}

func TestASecondGreetingOfALine(t *testing.T) {
	c, p := greetedPair(t)
	got := make(chan error, 1)
	go func() {
		_, err := c.Spawn(within(t), chronus.Spawn{Number: 1, Argv: []string{"x"}}, stdio(t))
		got <- err
	}()
	p.read()
	// The answer to the start is in the roster.
	go p.roster(running(1))
	if _, _, err := c.Hello(within(t)); err != nil {
		t.Fatal(err)
	}
	if err := <-got; err != nil {
		t.Error(err)
	}
	// A greeting that was given up does not confuse the next.
	ctx, stop := context.WithCancel(t.Context())
	go func() { got <- func() error { _, _, err := c.Hello(ctx); return err }() }()
	first := p.read()
	stop()
	if err := <-got; !errors.Is(err, errdefs.Canceled) {
		t.Errorf("got %v", err)
	}
	go func() {
		m := p.read()
		p.say(message{head: head{kind: kindRoster, seq: first.seq}, version: Version},
			message{head: head{kind: kindRosterEnd, seq: first.seq}},
			message{head: head{kind: kindRoster, seq: m.seq}, version: Version},
			message{head: head{kind: kindRosterEnd, seq: m.seq}})
	}()
	if _, list, err := c.Hello(within(t)); err != nil || len(list) != 0 {
		t.Errorf("got %v, %v", list, err)
	}
}

func TestAFileThatIsNoSocket(t *testing.T) {
	f, err := os.Open("/")
	if err != nil {
		t.Fatal(err)
	}
	defer f.Close()
	c := New(f)
	if _, _, err := c.Hello(within(t)); !errors.Is(err, errdefs.Unavailable) {
		t.Errorf("got %v", err)
	}
	if err := c.Close(); err != nil {
		t.Error(err)
	}
}
