package sessions

import (
	"context"
	"errors"
	"fmt"
	"maps"
	"os"
	"slices"
	"sync"
	"syscall"
	"time"

	"github.com/sandsea/sandsea/api/errdefs"
	"github.com/sandsea/sandsea/internal/keeper"
	"github.com/sandsea/sandsea/internal/record"
)

// Command is what to run, as the caller said it.
type Command struct {
	Argv        []string          `json:"argv"`
	Env         map[string]string `json:"env,omitempty"`
	ReplaceEnv  bool              `json:"replace_env,omitempty"`
	User        string            `json:"user,omitempty"`
	Cwd         string            `json:"cwd,omitempty"`
	MergeStderr bool              `json:"merge_stderr,omitempty"`
	Timeout     time.Duration     `json:"timeout,omitempty"`
	Overflow    Overflow          `json:"overflow,omitempty"`
}

// StartFailure says why a command never ran.
type StartFailure struct {
	Kind    string `json:"kind"`
	Message string `json:"message"`
	Errno   int    `json:"errno,omitempty"`
}

// Result is how a command ended; see sandsea.v1.Result.
type Result struct {
	ExitCode     int           `json:"exit_code"`
	Signal       int           `json:"signal,omitempty"`
	TimedOut     bool          `json:"timed_out,omitempty"`
	OOM          bool          `json:"oom,omitempty"`
	Truncated    bool          `json:"truncated,omitempty"`
	Exceeded     bool          `json:"exceeded,omitempty"` // see OverflowFail
	StdoutBytes  int64         `json:"stdout_bytes,omitempty"`
	StderrBytes  int64         `json:"stderr_bytes,omitempty"`
	Wall         time.Duration `json:"wall,omitempty"`
	CPU          time.Duration `json:"cpu,omitempty"`
	PeakMemory   int64         `json:"peak_memory,omitempty"`
	Paused       time.Duration `json:"paused,omitempty"`
	StartFailure *StartFailure `json:"start_failure,omitempty"`
	InfraError   string        `json:"infra_error,omitempty"`
}

// State is where a command stands.
type State int

// The states.
const (
	Running State = iota + 1
	Exited
	Failed // never ran
)

// Info is a command as it is shown.
type Info struct {
	Number    int64
	Command   Command
	State     State
	Started   time.Time
	Ended     time.Time
	Result    *Result
	HostPid   int64
	InputOpen bool
	Terminal  *TerminalSize // nil: it does not run on one
	Shell     string        // the session that it belongs to
}

// The ways in which standard input is given.
const (
	inputNone     = ""         // end of file at once, or everything was in the pipe before the start
	inputStream   = "stream"   // left open for SendInput
	inputFeed     = "feed"     // written by the call that started it
	inputTerminal = "terminal" // the terminal's, for SendInput
	inputState    = "state"    // as inputNone, and the keeper holds the state of a shell session in its place
)

// entry is what is remembered of a command.
type entry struct {
	Number  int64     `json:"number"`
	Seq     int64     `json:"seq,omitempty"`
	Key     string    `json:"key,omitempty"`
	Digest  string    `json:"digest,omitempty"`
	Command Command   `json:"command"`
	Note    []byte    `json:"note,omitempty"`
	Input   string    `json:"input,omitempty"`
	Fed     bool      `json:"fed,omitempty"`
	OOMs    int64     `json:"ooms,omitempty"`
	Started time.Time `json:"started,omitzero"`
	Ended   time.Time `json:"ended,omitzero"`
	Result  *Result   `json:"result,omitempty"`
	// Terminal is its size, as of the last save.
	Terminal *TerminalSize `json:"terminal,omitempty"`
	Shell    *shellEntry   `json:"shell,omitempty"`
	// Lost: it ended because its sandbox did.
	Lost bool `json:"lost,omitempty"`
}

// proc is one command.
type proc struct {
	t      *Table
	number int64
	key    string
	begun  chan struct{} // closed when the start is decided
	done   chan struct{} // closed when the result is known
	fired  chan struct{} // closed when the keeper said that time is up

	counted bool // guarded by the Table's mu: it is one of the running commands

	mu       sync.Mutex
	entry                           // guarded by mu
	err      error                  // guarded by mu: the start was undone, or the sandbox went away
	Sent     sent                   // guarded by mu: what an edge before remembered of the input
	exec     Exec                   // guarded by mu: until finalized
	out      []*output              // guarded by mu
	input    *input                 // guarded by mu
	state    *os.File               // guarded by mu: what a command of a shell session leaves, until it is settled
	ends     time.Time              // guarded by mu: when the time limit comes at the earliest, by the monotonic clock
	about    bool                   // guarded by mu: ends may be late, as it is of a keeper's word to an edge that came after
	firedSet bool                   // guarded by mu
	claimed  bool                   // guarded by mu: somebody concludes it
	final    bool                   // guarded by mu: descriptors are given back
	stale    bool                   // guarded by mu: the keeper may still hold it
	infra    string                 // guarded by mu: why the platform killed it
	lossless map[*lossless]struct{} // guarded by mu
	callers  int                    // guarded by mu: those of begin that have not said let
	telling  chan struct{}          // capacity 1: held while the keeper is told of lossless readers
	quit     chan struct{}
	quitOnce sync.Once
}

// output is one recorded stream.
type output struct {
	stream  record.Stream
	pipe    *os.File
	file    *os.File
	tty     *terminal // whose output it is; nil for a pipe's
	drained chan struct{}
	closed  bool           // guarded by the proc's mu: drained is closed
	pins    []record.Range // guarded by the proc's mu
}

const (
	clipCommand = 16 << 10 // what is kept of a command
	listText    = 16 << 20 // what a list shows of all commands
	clipEntry   = 32       // what an argument or variable takes beside its text
	inputSuffix = ".in"
)

func (t *Table) newProc(e entry) *proc {
	return &proc{
		t: t, number: e.Number, key: e.Key, entry: e, begun: make(chan struct{}), done: make(chan struct{}),
		fired: make(chan struct{}), quit: make(chan struct{}), claimed: e.Result != nil, telling: make(chan struct{}, 1),
	}
}

// clip shortens what is shown of a command to about so many bytes: a text that is cut ends in "...", and variables are
// left out.
func (c Command) clip(most int) Command {
	left := most
	short := func(s string, most int) string {
		if len(s) > most {
			s = s[:most] + "..."
		}
		left = max(0, left-len(s))
		return s
	}
	c.User, c.Cwd = short(c.User, most/4), short(c.Cwd, most/4)
	var argv []string
	for i, a := range c.Argv {
		if left == 0 {
			argv = append(argv, fmt.Sprintf("... (%d more)", len(c.Argv)-i))
			break
		}
		argv = append(argv, short(a, left))
		left = max(0, left-clipEntry)
	}
	c.Argv = argv
	if c.Env == nil {
		return c
	}
	env := map[string]string{}
	for _, k := range slices.Sorted(maps.Keys(c.Env)) {
		if left == 0 {
			break
		}
		if len(k) < left {
			left -= len(k)
			env[k] = short(c.Env[k], left)
			left = max(0, left-clipEntry)
		}
	}
	c.Env = env
	return c
}

// brief shortens the texts in i to about so many bytes.
func (i Info) brief(most int) Info {
	i.Command = i.Command.clip(most)
	if i.Result == nil {
		return i
	}
	r := *i.Result
	if len(r.InfraError) > most {
		r.InfraError = r.InfraError[:most] + "..."
	}
	if f := r.StartFailure; f != nil && len(f.Message) > most {
		cut := *f
		cut.Message = f.Message[:most] + "..."
		r.StartFailure = &cut
	}
	i.Result = &r
	return i
}

func (p *proc) name() string          { return fmt.Sprintf("%s/%016d", p.t.cfg.ID, p.number) }
func (p *proc) inputName() string     { return p.name() + inputSuffix }
func (p *proc) object() string        { return fmt.Sprintf("process %d of %s", p.number, p.t.object()) }
func (p *proc) keeperKey() keeper.Key { return keeper.Key{Sandbox: p.t.cfg.ID, Number: p.number} }

func (p *proc) paths(dir string) []string {
	return []string{
		record.Path(dir, p.t.cfg.ID, p.number, record.Stdout), record.Path(dir, p.t.cfg.ID, p.number, record.Stderr),
	}
}

// allocated is what the records of p hold.
func (p *proc) allocated() (sum int64) {
	for _, path := range p.paths(p.t.cfg.Dir) {
		if fi, err := os.Stat(path); err == nil {
			sum += allocated(fi)
		}
	}
	return sum
}

func (p *proc) endedLocked() bool { return p.Result != nil }

func (p *proc) ended() bool {
	p.mu.Lock()
	defer p.mu.Unlock()
	return p.endedLocked()
}

// keep has the record stay until let, for a caller that is about to read it.
func (p *proc) keep() {
	p.mu.Lock()
	defer p.mu.Unlock()
	p.callers++
}

// let undoes one keep.
func (p *proc) let() {
	p.mu.Lock()
	defer p.mu.Unlock()
	p.callers--
}

// spared reports whether somebody reads the record who must not lose any of it.
func (p *proc) spared() bool {
	p.mu.Lock()
	callers := p.callers
	p.mu.Unlock()
	return callers > 0 || p.awaits()
}

// awaits reports whether a lossless reader is given time to come on.
func (p *proc) awaits() bool {
	now := p.t.cfg.Now()
	p.mu.Lock()
	defer p.mu.Unlock()
	for l := range p.lossless {
		if now.Sub(l.moved) < losslessPatience {
			return true
		}
	}
	return false
}

// settled: ended, and all descriptors are given back.
func (p *proc) settled() bool {
	p.mu.Lock()
	defer p.mu.Unlock()
	return p.endedLocked() && (p.final || p.exec == nil && len(p.out) == 0)
}

// claim makes the caller the one who concludes the command.
func (p *proc) claim() bool {
	p.mu.Lock()
	defer p.mu.Unlock()
	if p.claimed {
		return false
	}
	p.claimed = true
	return true
}

// fail undoes a start in the eyes of those who wait for it.
func (p *proc) fail(err error) {
	p.mu.Lock()
	defer p.mu.Unlock()
	p.err = err
	p.claimed = true
	select {
	case <-p.begun:
	default:
		close(p.begun)
	}
	select {
	case <-p.done:
	default:
		close(p.done)
	}
}

func (p *proc) kill() error {
	p.mu.Lock()
	x := p.exec
	p.mu.Unlock()
	if x == nil {
		return nil
	}
	return x.Kill()
}

// orphan says that no process of the sandbox is left, so that nothing writes any more.
func (p *proc) orphan() { p.quitOnce.Do(func() { close(p.quit) }) }

// abandonInput frees whoever writes to the input.
func (p *proc) abandonInput() {
	p.mu.Lock()
	defer p.mu.Unlock()
	if p.input != nil {
		p.input.close()
	}
}

// abandon gives descriptors back without an end. Those of the Exec are its backend's to close.
func (p *proc) abandon() {
	p.mu.Lock()
	defer p.mu.Unlock()
	p.claimed = true
	p.closeLocked()
	p.exec = nil
}

func (p *proc) closeLocked() {
	for _, o := range p.out {
		for _, f := range []*os.File{o.pipe, o.file} {
			if f != nil {
				_ = f.Close()
			}
		}
		if o.tty != nil {
			o.tty.close()
		}
	}
	p.out = nil
	if p.state != nil {
		_ = p.state.Close()
		p.state = nil
	}
	if p.input != nil {
		p.input.close()
	}
	p.final = true
}

// wait waits for c within ctx. What has come counts, also when ctx has ended meanwhile.
func (p *proc) wait(ctx context.Context, c <-chan struct{}) error {
	select {
	case <-c:
	case <-ctx.Done():
		select {
		case <-c:
		default:
			return canceled(ctx, p.object())
		}
	}
	p.mu.Lock()
	defer p.mu.Unlock()
	return p.err
}

func canceled(ctx context.Context, object string) error {
	kind := errdefs.Canceled
	if errors.Is(ctx.Err(), context.DeadlineExceeded) {
		kind = errdefs.Deadline
	}
	return errdefs.New(kind, object, "the caller stopped waiting").Wrap(context.Cause(ctx))
}

func (p *proc) info() Info {
	p.mu.Lock()
	defer p.mu.Unlock()
	p.sizeLocked()
	i := Info{
		Number: p.number, Command: p.Command, State: Running, Started: p.Started, Ended: p.Ended,
		InputOpen: p.input != nil && !p.input.isClosed(), Terminal: p.Terminal,
	}
	if p.Shell != nil {
		i.Shell = p.Shell.Session
	}
	if p.Result != nil {
		r := *p.Result
		i.Result, i.State = &r, Exited
		if r.StartFailure != nil {
			i.State = Failed
		}
		return i
	}
	if p.exec != nil {
		if pids, err := p.exec.Pids(); err == nil && len(pids) > 0 {
			i.HostPid = int64(pids[0])
		}
	}
	return i
}

// drainedC is closed when every stream has reached its end.
func (p *proc) drainedC() <-chan struct{} {
	p.mu.Lock()
	var waits []chan struct{}
	for _, o := range p.out {
		waits = append(waits, o.drained)
	}
	p.mu.Unlock()
	if len(waits) == 1 {
		return waits[0]
	}
	all := make(chan struct{})
	go func() {
		defer close(all)
		for _, w := range waits {
			select {
			case <-w:
			case <-p.quit:
				return
			}
		}
	}()
	return all
}

// sizes are the bytes ever written so far, and whether some of them are not kept.
func (p *proc) sizes() (stdout, stderr int64, cut bool) {
	for i, path := range p.paths(p.t.cfg.Dir) {
		fi, err := os.Stat(path)
		if err != nil {
			continue
		}
		if i == 0 {
			stdout = fi.Size()
		} else {
			stderr = fi.Size()
		}
		cut = cut || holes(path, fi.Size())
	}
	return stdout, stderr, cut
}

// keeperExec is what a keeper needs to go on recording p; ok is false when nothing is to be recorded.
func (p *proc) keeperExec() (keeper.Exec, bool) {
	settled := p.t.settledBytes()
	p.mu.Lock()
	defer p.mu.Unlock()
	if p.final || p.exec == nil {
		return keeper.Exec{}, false
	}
	x := keeper.Exec{
		Key: p.keeperKey(), Caps: p.Command.Overflow.keep().Caps(), Kill: p.exec.KillFile(), Settled: settled,
	}
	for _, o := range p.out {
		if !o.closed {
			x.Streams = append(x.Streams, o.keeperStream())
		}
	}
	if p.input != nil {
		x.Stdin = p.input.holder()
	} else if p.Input == inputState {
		x.Stdin = p.state
	}
	if !p.ends.IsZero() && p.Result == nil {
		x.Remaining = max(time.Until(p.ends), 1)
	}
	return x, len(x.Streams) > 0 || x.Remaining > 0
}

// keeperStream is what a keeper needs to record o.
func (o *output) keeperStream() keeper.Stream {
	s := keeper.Stream{Stream: o.stream, Pipe: o.pipe, File: o.file, Pins: o.pins}
	if o.tty != nil {
		s.Terminal, s.Feed = o.tty.master, o.tty.feed
	}
	return s
}

func (p *proc) unreleased() bool {
	p.mu.Lock()
	defer p.mu.Unlock()
	return p.stale
}

func (p *proc) setUnreleased(v bool) {
	p.mu.Lock()
	defer p.mu.Unlock()
	p.stale = v
}

// startFailure words the errno of a start; see clients.md D3 for the kinds.
func startFailure(c Command, cwd string, step string, errno syscall.Errno, interpreter bool) *StartFailure {
	f := &StartFailure{Errno: int(errno)}
	say := func(kind, format string, args ...any) *StartFailure {
		f.Kind, f.Message = kind, fmt.Sprintf(format, args...)
		return f
	}
	name := c.Argv[0]
	if len(name) > 200 {
		name = name[:200] + "..."
	}
	switch step {
	case "cwd":
		return say("cwd", "cannot enter the directory %q: %v", cwd, errno)
	case "user":
		return say("user", "cannot act as the user %q: %v", c.User, errno)
	case "terminal":
		return say("resources", "no room for another terminal: %v", errno)
	case "fork", "cgroup":
		return say("resources", "no room for another process: %v", errno)
	case "exec":
		switch {
		case interpreter:
			return say("bad_interpreter", "%q needs an interpreter or loader that is not there", name)
		case errno == syscall.ENOENT || errno == syscall.ENOTDIR:
			return say("not_found", "%q is not there", name)
		case errno == syscall.EACCES || errno == syscall.EPERM || errno == syscall.EISDIR || errno == syscall.ETXTBSY:
			return say("not_executable", "%q cannot be executed: %v", name, errno)
		case errno == syscall.ENOEXEC || errno == syscall.ELIBBAD:
			return say("bad_interpreter", "%q is no program that this machine can run: %v", name, errno)
		case errno == syscall.E2BIG:
			return say("argument_too_long", "an argument or variable is longer than 131071 bytes, or all together are too long")
		case errno == syscall.ENOMEM || errno == syscall.EAGAIN || errno == syscall.EMFILE || errno == syscall.ENFILE:
			return say("resources", "no room to execute %q: %v", name, errno)
		}
		return say("broken_sandbox", "%q cannot be executed: %v", name, errno)
	}
	return say("broken_sandbox", "the sandbox cannot start commands any more: %s: %v", step, errno)
}

// exitCode is the code of a start that failed, as shells give it.
func (f *StartFailure) exitCode() int {
	if f.Kind == "not_found" {
		return 127
	}
	return 126
}

// goneError is Gone when the sandbox is ending, else nil.
func (t *Table) goneError() error {
	t.mu.Lock()
	defer t.mu.Unlock()
	if t.end == nil {
		return nil
	}
	return Gone(t.cfg.ID, *t.end)
}
