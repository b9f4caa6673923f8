package main

import (
	"context"
	"crypto/rand"
	"errors"
	"fmt"
	"os"
	"os/signal"
	"strings"
	"sync"
	"syscall"
	"time"

	"github.com/charmbracelet/x/ansi"

	"github.com/sandsea/sandsea/api/errdefs"
	sandseav1 "github.com/sandsea/sandsea/api/sandsea/v1"
	"github.com/sandsea/sandsea/client"
	"github.com/sandsea/sandsea/cmd/sandsea/ui"
)

// Why a session ended before its command did.
var (
	errDetached = errors.New("detached")
	errHungUp   = errors.New("the terminal hung up")
)

// session is a command on a terminal inside, shown on ours. Our terminal is in raw mode while it lasts and is given back
// however it ends. The command outlives it: who detaches, or is killed, comes back by `exec --attach`.
type session struct {
	a      *app
	sb     *client.Sandbox
	out    *outcome
	modes  ui.Modes
	cancel context.CancelCauseFunc
	// typed is what the command shall get; it is bounded, so that a command that does not read stops our reading.
	typed   chan []byte
	restore func()
}

// typedMost is how many pieces of input may wait to be sent.
const typedMost = 256

// interact runs a command on a terminal. With a number it comes back to one that runs.
func (a *app) interact(ctx context.Context, sb *client.Sandbox, req *sandseav1.StartRequest, number int64) (*outcome, error) {
	s := &session{a: a, sb: sb, out: &outcome{}, typed: make(chan []byte, typedMost)}
	s.out.watch = s.modes.Watch
	signal.Ignore(syscall.SIGPIPE) // a reader of our output that has seen enough must not keep us from giving the terminal back
	ctx, s.cancel = context.WithCancelCause(ctx)
	defer s.cancel(nil)

	var offset int64
	if number > 0 {
		var err error
		if offset, err = s.lookBack(ctx, number); err != nil {
			return nil, err
		}
	}
	give, err := a.io.Raw()
	if err != nil {
		return nil, err
	}
	s.restore = sync.OnceFunc(func() {
		if text := s.modes.Undo(); text != "" && a.io.OutTTY {
			fmt.Fprint(a.io.Out, text)
		}
		give()
	})
	defer s.restore()
	defer s.ownSignals(ctx)()
	s.guard(s.readKeys)

	if number > 0 {
		s.begin(ctx, number, offset, true)
		err = a.passAll(ctx, sb, s.out, sb.Attach(ctx, s.out.rest()), nil)
	} else {
		columns, rows := a.io.Size()
		req.Terminal = client.Terminal(uint32(columns), uint32(rows))
		err = a.passAll(ctx, sb, s.out, sb.Start(ctx, req), func(number int64) { s.begin(ctx, number, 0, false) })
	}
	if err != nil && a.io.OutTTY {
		fmt.Fprint(a.io.Out, "\r\n") // what we say stands on a line of its own
	}
	s.restore()
	a.tellGap(s.out)
	if r := s.out.result; err == nil && r.GetSignal() == int32(syscall.SIGKILL) && !r.GetTimedOut() && r.GetInfraError() == "" {
		s.out.end = endOf(ctx, sb)
	}
	return s.out, s.ended(ctx, err)
}

const (
	// endSoon is how long a sandbox may seem to run after its end has killed a command.
	endSoon = time.Second
	// endLimit is how long the wait for the cause of an end may be.
	endLimit = 5 * time.Second
)

// endOf is the end of a sandbox that ends now; nil when it lives on, or does not tell in time.
func endOf(ctx context.Context, sb *client.Sandbox) *sandseav1.End {
	ctx, stop := context.WithTimeoutCause(ctx, endLimit, errdefs.Deadline)
	defer stop()
	for began := time.Now(); ; {
		info, err := sb.Info(ctx)
		lives := info.GetState() == sandseav1.SandboxState_SANDBOX_STATE_RUNNING && time.Since(began) > endSoon
		if err != nil || info.GetEnd() != nil || lives || pause(ctx, 50*time.Millisecond) != nil {
			return info.GetEnd()
		}
	}
}

// guard runs f beside the session. A panic of ours must not leave the terminal raw.
func (s *session) guard(f func()) {
	go func() {
		defer func() {
			if r := recover(); r != nil {
				s.restore()
				panic(r)
			}
		}()
		f()
	}()
}

// begin sends what is typed and follows the size of our terminal, once there is a command.
func (s *session) begin(ctx context.Context, number, offset int64, redraw bool) {
	s.out.number.Store(number)
	s.guard(func() { s.sendKeys(ctx, number, offset) })
	changed := make(chan os.Signal, 1)
	signal.Notify(changed, syscall.SIGWINCH)
	s.guard(func() {
		defer signal.Stop(changed)
		s.followSize(ctx, number, changed, redraw)
	})
}

// ended says what became of a session that did not end with its command.
func (s *session) ended(ctx context.Context, err error) error {
	if err == nil {
		return nil
	}
	number := s.out.number.Load()
	back := fmt.Sprintf("Come back: sandsea exec --attach %d %s", number, short(s.sb.ID))
	runs := fmt.Sprintf("process %d goes on in %s", number, short(s.sb.ID))
	switch cause := context.Cause(ctx); {
	case number == 0:
		return err
	case errors.Is(cause, errDetached):
		s.a.io.Note("sandsea: detached; %s. %s", runs, back)
		return &exitError{code: 0, inside: true}
	case errors.Is(cause, errHungUp):
		return &exitError{
			code: 128 + int(syscall.SIGHUP), inside: true,
			err: errdefs.New(errdefs.Canceled, "", "the terminal hung up; %s", runs).WithHint("%s", back),
		}
	case errors.Is(cause, errInterrupted):
		s.a.undone = runs + ". " + back
		return err
	case errdefs.KindOf(err) == errdefs.Unavailable:
		return errdefs.New(errdefs.Unavailable, "", "link lost for %s; %s as long as its sandbox does", ui.Span(linkLimit), runs).
			WithHint("%s", back).Wrap(err)
	}
	return err
}

// ownSignals takes the signals that would end us, and gives the terminal back first. A Ctrl-C that comes as a signal, not
// as a key, is the command's all the same.
func (s *session) ownSignals(ctx context.Context) (stop func()) {
	take := func(sig os.Signal) bool {
		if sig != os.Interrupt {
			return false
		}
		select {
		case s.typed <- []byte{3}:
		case <-ctx.Done():
		default: // it does not read at all
		}
		return true
	}
	s.a.onInterrupt.Store(&take)
	s.a.atExit.Store(&s.restore)
	others := make(chan os.Signal, 1)
	signal.Notify(others, syscall.SIGHUP, syscall.SIGQUIT)
	s.guard(func() {
		for sig := range others {
			if sig == syscall.SIGHUP {
				s.cancel(errHungUp)
				continue
			}
			s.restore()
			signal.Reset(sig)
			_ = syscall.Kill(os.Getpid(), syscall.SIGQUIT)
		}
	})
	return func() {
		signal.Stop(others)
		close(others)
		s.a.onInterrupt.Store(nil)
		s.a.atExit.Store(nil)
	}
}

// readKeys passes what is typed on and does what our own keys ask. It is left behind when the session ends.
func (s *session) readKeys() {
	var keys escapes
	for {
		buf := make([]byte, 4096)
		n, err := s.a.io.In.Read(buf)
		for typed := buf[:n]; len(typed) > 0; {
			var send []byte
			var do act
			send, do, typed = keys.next(typed)
			if len(send) > 0 {
				s.typed <- send
			}
			switch do {
			case actDetach:
				s.cancel(errDetached)
				return
			case actHelp:
				s.a.io.Note("%s", escapeHelp)
			}
		}
		if err != nil {
			s.cancel(errHungUp)
			return
		}
	}
}

// askAfter is how long nothing was typed here before the offset is asked for again: another client may have typed
// meanwhile. Who types on without a pause does not pay for the question.
const askAfter = 300 * time.Millisecond

// sendKeys sends input in order. Over a broken link it tries until the session ends. Other clients may type on the same
// terminal, which moves the offset. Their keys may cost some of ours only when both are typed within askAfter.
func (s *session) sendKeys(ctx context.Context, number, offset int64) {
	var answered time.Time
	for {
		var data []byte
		select {
		case data = <-s.typed:
		case <-ctx.Done():
			return
		}
		for more := true; more && len(data) < 64<<10; {
			select {
			case next := <-s.typed:
				data = append(data, next...)
			default:
				more = false
			}
		}
		for asking, again := time.Since(answered) > askAfter, false; len(data) > 0; {
			send := data
			if asking {
				send = nil
			}
			next, err := s.sb.SendInput(ctx, number, offset, send)
			switch {
			case err == nil:
				data, offset = data[taken(offset, next, len(send), again):], next
				asking, again, answered = false, false, time.Now()
			case errors.Is(err, errdefs.Unavailable), errors.Is(err, errdefs.Deadline): // or it does not read yet
				again = again || !asking
				if pause(ctx, linkPause) != nil {
					return
				}
			case ctx.Err() != nil:
				return
			default:
				// Its end comes as its exit; anything else is worth a word.
				if !errors.Is(err, errdefs.FailedPrecondition) {
					s.a.io.Note("sandsea: what is typed does not arrive: %s", ui.Text(err.Error()))
				}
				return
			}
		}
	}
}

// taken is how many of so many bytes, sent at an offset, the command has when next is the answer. An answer beyond their
// end to what was sent once says that others' bytes stand there and none of these arrived; sent again, they may be among
// them.
func taken(offset, next int64, sent int, again bool) int64 {
	if !again && next > offset+int64(sent) {
		return 0
	}
	return min(int64(sent), max(0, next-offset))
}

// resizeLimit bounds one resize.
const resizeLimit = 5 * time.Second

// followSize gives the command's terminal the size of ours now and at every change. redraw makes programs that fill the
// screen paint it anew.
func (s *session) followSize(ctx context.Context, number int64, changed <-chan os.Signal, redraw bool) {
	columns, rows := s.a.io.Size()
	if redraw {
		s.resize(ctx, number, columns, max(1, rows-1))
	}
	s.resize(ctx, number, columns, rows)
	for {
		select {
		case <-changed:
			columns, rows = s.a.io.Size()
			s.resize(ctx, number, columns, rows)
		case <-ctx.Done():
			return
		}
	}
}

// resize tries as long as the link is away; a command that has ended has no size.
func (s *session) resize(ctx context.Context, number int64, columns, rows int) {
	for {
		once, stop := context.WithTimeoutCause(ctx, resizeLimit, errdefs.Deadline)
		err := s.sb.Resize(once, number, client.Terminal(uint32(columns), uint32(rows)))
		stop()
		if !errors.Is(err, errdefs.Unavailable) || pause(ctx, linkPause) != nil {
			return
		}
	}
}

// lookBackMost is how much of what a command wrote is shown to who comes back.
const lookBackMost = 16 << 10

// lookBack shows the last lines of a command's record as plain text, so that nothing recorded works on the terminal a
// second time, and sets where the record goes on. It gives the offset of the input.
func (s *session) lookBack(ctx context.Context, number int64) (input int64, err error) {
	var tail []byte
	var end int64
	for ev, err := range s.sb.Attach(ctx, &sandseav1.AttachRequest{Number: number, NoFollow: true}) {
		if err != nil {
			return 0, err
		}
		if d := ev.GetData(); d != nil {
			tail = append(tail, d.GetData()...)
			tail = tail[max(0, len(tail)-lookBackMost):]
			end = d.GetOffset() + int64(len(d.GetData()))
		}
		if g := ev.GetGap(); g != nil {
			end = g.GetOffset() + g.GetBytes()
		}
	}
	_, rows := s.a.io.Size()
	list := strings.Split(strings.ReplaceAll(ansi.Strip(string(tail)), "\r", ""), "\n")
	list = list[max(0, len(list)-rows+1):]
	for i := range list {
		list[i] = ui.Text(list[i])
	}
	fmt.Fprint(s.a.io.Out, strings.Join(list, "\n"))
	s.out.offsets = map[sandseav1.Stream]int64{sandseav1.Stream_STREAM_STDOUT: end}
	input, err = s.sb.SendInput(ctx, number, 0, nil)
	if errors.Is(err, errdefs.FailedPrecondition) {
		return 0, nil // it has ended; its record says how
	}
	return input, err
}

// newKey is an idempotency key that nobody else has: a command with a key outlives its caller.
func newKey() string { return "cli-" + rand.Text() }
