package sessions

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"maps"
	"os"
	"slices"
	"strings"
	"syscall"
	"time"

	"github.com/sandsea/sandsea/api/errdefs"
	"github.com/sandsea/sandsea/internal/chronus"
	"github.com/sandsea/sandsea/internal/image"
	"github.com/sandsea/sandsea/internal/keeper"
	"github.com/sandsea/sandsea/internal/linux/pipe"
	"github.com/sandsea/sandsea/internal/linux/tty"
	"github.com/sandsea/sandsea/internal/record"
	"github.com/sandsea/sandsea/internal/sandbox"
)

// DefaultPath is PATH where neither the image nor the sandbox nor the command sets it.
const DefaultPath = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"

// prefill is how much input goes into the pipe before the command starts; less than the smallest pipe.
const prefill = 48 << 10

// Start is a request to start a command.
type Start struct {
	Command Command
	Key     string
	Note    []byte
	// Op is the call in whose name the key stands: "run" or "start".
	Op string
	// Input is all of standard input; nil and Stream false is end of file at once.
	Input []byte
	// Stream leaves standard input open for SendInput.
	Stream bool
	// Terminal runs the command on a terminal of this size: its input stays open for SendInput, and everything is stdout.
	Terminal *TerminalSize
	// Lossless lets the command wait, instead of losing output, for a Start's reader that is behind.
	Lossless bool
	// Handover makes it a command of a shell session.
	Handover *Handover
}

func (s Start) validate() error {
	c := s.Command
	if err := sandbox.CheckArgv("command.argv", c.Argv); err != nil {
		return err
	}
	if err := sandbox.CheckEnv("command.env", c.Env); err != nil {
		return err
	}
	if err := sandbox.CheckUser("command.user", c.User); err != nil {
		return err
	}
	if err := sandbox.CheckPath("command.cwd", c.Cwd); err != nil {
		return err
	}
	if err := sandbox.CheckKey("key", s.Key); err != nil {
		return err
	}
	if c.Timeout < 0 {
		return errdefs.New(errdefs.Invalid, "", "command.timeout_ms: is below 0").WithField("command.timeout_ms", "").
			WithHint("0 means no limit")
	}
	if err := c.Overflow.validate(); err != nil {
		return err
	}
	if s.Terminal != nil {
		if err := s.Terminal.validate("terminal"); err != nil {
			return err
		}
	}
	if len(s.Note) > MaxNote {
		return errdefs.New(errdefs.Invalid, "", "note: %d bytes", len(s.Note)).WithField("note", "4 KiB").
			WithHint("Keep at most 4 KiB, the rest elsewhere")
	}
	return nil
}

// digest is what the key stands for: all but the time limit and the note.
func (s Start) digest() (string, error) {
	c := s.Command
	c.Timeout = 0
	raw, err := json.Marshal(c)
	if err != nil {
		return "", fmt.Errorf("encode a command: %w", err)
	}
	if s.Handover != nil {
		raw = []byte(s.Handover.Digest)
	}
	mode := []byte{0}
	switch {
	case s.Terminal != nil:
		mode = fmt.Appendf([]byte{3}, "%d %d", s.Terminal.Columns, s.Terminal.Rows)
	case s.Stream:
		mode[0] = 2
	case s.Input != nil:
		mode[0] = 1
	}
	return sandbox.Digest(s.Op, raw, mode, s.Input), nil
}

// begin starts a command, or finds the one that the key stands for. It returns once the start is decided: the command
// runs, or it failed to, which is a result. An error means that nothing was started and nothing is remembered. The record
// of p stays until the caller has said p.let.
func (t *Table) begin(ctx context.Context, s Start) (p *proc, replayed bool, err error) {
	if err := s.validate(); err != nil {
		return nil, false, err
	}
	digest := ""
	if s.Key != "" {
		if digest, err = s.digest(); err != nil {
			return nil, false, err
		}
	}
	t.mu.Lock()
	if known := t.keys[s.Key]; s.Key != "" && known != nil {
		t.mu.Unlock()
		if known.Digest != digest {
			return nil, false, errdefs.New(errdefs.AlreadyExists, t.object(), "the key %q stands for another command", s.Key).
				WithField("key", "").WithHint("Use a new key for a new command")
		}
		if err := known.wait(ctx, known.begun); err != nil {
			return nil, true, err
		}
		known.keep()
		return known, true, nil
	}
	if t.end != nil {
		defer t.mu.Unlock()
		return nil, false, Gone(t.cfg.ID, *t.end)
	}
	if t.line == nil {
		t.mu.Unlock()
		return nil, false, errdefs.New(errdefs.Unavailable, t.object(), "is not ready yet")
	}
	if s.Key != "" && len(t.keys) >= MaxKeys {
		t.mu.Unlock()
		return nil, false, errdefs.New(errdefs.Exhausted, t.object(), "has used its %d keys", MaxKeys).
			WithField("key", "100000 keys").WithHint("Go on in another sandbox")
	}
	p = t.newProc(entry{
		Number: t.next, Key: s.Key, Digest: digest, Command: s.Command.clip(clipCommand), Note: s.Note,
		Started: t.cfg.Now().UTC(), Terminal: s.Terminal, Shell: s.Handover.entry(),
	})
	p.callers = 1
	t.next++
	t.procs[p.number] = p
	if p.key != "" {
		t.keys[p.key] = p
	}
	line := *t.line
	t.mu.Unlock()
	t.count(p)
	t.busy()
	if err := t.beginShell(p); err != nil {
		t.forget(p, err)
		return nil, false, err
	}

	if t.cfg.Starting != nil {
		defer t.cfg.Starting()()
	}
	// From here on the start is decided whether or not its caller stays.
	lctx, stop := context.WithTimeoutCause(context.WithoutCancel(ctx), launchTime, errdefs.Deadline)
	defer stop()
	failure, err := t.launch(lctx, line, p, s)
	switch {
	case isUndone(err):
		// Remembered as it is: the next edge finds out, and until then the key stands for it.
		t.uncount(p)
		t.unstarted(p)
		p.fail(err)
		t.busy()
		return nil, false, err
	case err != nil:
		t.forget(p, err)
		if gone := t.goneError(); gone != nil {
			err = gone
		}
		return nil, false, err
	case failure != nil:
		mine := p.claim() // else the sandbox ended just now, and its end is the result
		p.mu.Lock()
		p.final = true
		p.mu.Unlock()
		close(p.begun)
		if mine {
			t.conclude(p, Result{ExitCode: failure.exitCode(), StartFailure: failure})
		}
	default:
		close(p.begun)
	}
	return p, false, nil
}

// forget undoes a start of which nothing is left.
func (t *Table) forget(p *proc, err error) {
	t.mu.Lock()
	delete(t.procs, p.number)
	if t.keys[p.key] == p {
		delete(t.keys, p.key)
	}
	t.mu.Unlock()
	t.uncount(p)
	t.unstarted(p)
	p.fail(err)
	if ferr := t.cfg.Memory.Forget(p.name(), p.inputName()); ferr != nil {
		t.cfg.Log.Warn("forget a command that was not started", "sandbox", t.cfg.ID, "process", p.number, "err", ferr)
	}
	t.busy()
}

// resolved is a command without names and defaults.
func (t *Table) resolve(ctx context.Context, c Command) (chronus.Spawn, *StartFailure, error) {
	name := c.User
	if name == "" {
		name = t.cfg.User
	}
	if name == "" {
		name = "root"
	}
	u, err := t.lookup(ctx, name)
	if err != nil {
		failure, err := userFailure(c, name, err)
		return chronus.Spawn{}, failure, err
	}
	cwd := t.cfg.Workdir
	if cwd == "" {
		cwd = "/"
	}
	switch {
	case strings.HasPrefix(c.Cwd, "/"):
		cwd = c.Cwd
	case c.Cwd != "":
		// Not cleaned: what .. means behind a symbolic link is for the inside to say.
		cwd = strings.TrimSuffix(cwd, "/") + "/" + c.Cwd
	}
	return chronus.Spawn{Argv: c.Argv, Env: t.environ(c, u), Cwd: cwd, IDs: u.IDs, Umask: 0o022}, nil, nil
}

// userFailure tells what the sandbox did to itself, which is a result, from what the platform could not do.
func userFailure(c Command, name string, err error) (*StartFailure, error) {
	if se, ok := errors.AsType[*chronus.StartError](err); ok {
		return startFailure(c, "", string(se.Step), se.Errno, false), nil
	}
	switch e := errdefs.From(err); {
	case e.Kind == errdefs.NotFound:
		return &StartFailure{Kind: "user", Message: fmt.Sprintf("the sandbox has no user %q", name)}, nil
	case slices.Contains(ownDoing, e.Kind) && e.Errno != int(syscall.EIO): // that one is a layer's or a disk's
		return &StartFailure{
			Kind: "broken_sandbox", Message: fmt.Sprintf("the user %q cannot be looked up: %s", name, e.Msg), Errno: e.Errno,
		}, nil
	default:
		return nil, fmt.Errorf("look up the user %q: %w", name, err)
	}
}

// ownDoing are the errors of reading the sandbox's own files that say something of them.
var ownDoing = []errdefs.Kind{
	errdefs.FailedPrecondition, errdefs.Denied, errdefs.Exhausted, errdefs.Invalid, errdefs.DataLoss,
}

// environ lays image, sandbox and command over each other, and under them what a login would set.
func (t *Table) environ(c Command, u User) []string {
	own := make([]string, 0, len(c.Env))
	for _, k := range slices.Sorted(maps.Keys(c.Env)) {
		own = append(own, k+"="+c.Env[k])
	}
	if c.ReplaceEnv {
		return own
	}
	name, home := u.Name, u.Home
	if home == "" {
		home = "/"
	}
	base := []string{"PATH=" + DefaultPath, "HOME=" + home}
	if name != "" {
		base = append(base, "USER="+name, "LOGNAME="+name)
	}
	t.mu.Lock()
	env := t.cfg.Env
	t.mu.Unlock()
	return image.MergeEnv(base, env, own)
}

// SetEnv replaces the sandbox's environment for the commands that start from now on.
func (t *Table) SetEnv(env []string) {
	t.mu.Lock()
	defer t.mu.Unlock()
	t.cfg.Env = env
}

// undo is a stack of what to take back.
type undo []func() error

func (u *undo) push(f func() error) { *u = append(*u, f) }

// run takes back in reverse, up to the first thing that cannot be: what lies below it is still in use.
func (u *undo) run() error {
	for _, f := range slices.Backward(*u) {
		if err := f(); err != nil {
			return err
		}
	}
	*u = nil
	return nil
}

// undone marks a start that went wrong and could not be taken back: nobody knows whether the command runs.
type undone struct{ error }

func (u undone) Unwrap() error { return u.error }

// launch performs a start: everything is remembered and recorded before the command exists.
func (t *Table) launch(ctx context.Context, line Line, p *proc, s Start) (failure *StartFailure, err error) {
	var back undo
	defer func() {
		if failure == nil && err == nil {
			return
		}
		if uerr := back.run(); uerr != nil {
			t.cfg.Log.Error("undo a start", "sandbox", t.cfg.ID, "process", p.number, "err", uerr)
			unknown := errdefs.New(errdefs.Unknown, p.object(), "its start went wrong and could not be taken back")
			failure, err = nil, undone{unknown.Wrap(errors.Join(err, uerr))}
		}
	}()
	spawn, failure, err := t.resolve(ctx, s.Command)
	if failure != nil || err != nil {
		return failure, err
	}
	spawn.Number = p.number
	if s.Handover != nil {
		spawn = s.Handover.over(spawn)
	}
	ooms, err := line.OOMKills()
	if err != nil {
		return nil, fmt.Errorf("count out-of-memory kills of %s: %w", t.object(), err)
	}
	mode := inputNone
	switch {
	case s.Terminal != nil:
		mode = inputTerminal
		spawn.Env = withTerm(spawn.Env)
	case s.Stream:
		mode = inputStream
	case len(s.Input) > prefill:
		mode = inputFeed
	case s.Handover != nil:
		mode = inputState
	}
	p.mu.Lock()
	p.Input, p.OOMs = mode, ooms
	p.mu.Unlock()
	if err := p.save(); err != nil {
		return nil, err
	}

	x, err := line.NewExec(ctx, p.number)
	if err != nil {
		return nil, fmt.Errorf("make a control group for %s: %w", p.object(), err)
	}
	back.push(x.Remove)
	var io plumbing
	ends := &undo{}
	if s.Terminal != nil {
		io, err = t.plumbTerminal(ctx, line, p, s, spawn.IDs, &back)
	} else {
		io, ends, err = t.plumb(p, s, line.UIDBase, spawn.IDs, &back)
	}
	if failure := ownFault(s.Command, spawn.Cwd, err); failure != nil {
		return failure, nil
	}
	if err != nil {
		return nil, err
	}
	defer func() { _ = ends.run() }()
	var state *os.File
	stdio := x.Stdio()
	if s.Handover != nil {
		uid, gid := int(line.UIDBase+spawn.IDs.UID), int(line.UIDBase+spawn.IDs.GID)
		if stdio.StateIn, stdio.StateOut, state, err = t.plumbState(s.Handover, uid, gid, ends); err != nil {
			return nil, err
		}
	}
	stdio.In, stdio.Out, stdio.Err, stdio.TTY = io.in, io.out, io.err, s.Terminal != nil

	kx := keeper.Exec{
		Key: p.keeperKey(), Caps: s.Command.Overflow.keep().Caps(), Kill: x.KillFile(), Remaining: s.Command.Timeout,
		Stdin: io.feed, Settled: t.makeRoom(),
	}
	for _, o := range io.outputs {
		kx.Streams = append(kx.Streams, o.keeperStream())
	}
	if mode == inputState {
		kx.Stdin = state
	}
	p.mu.Lock()
	p.exec, p.out, p.state = x, io.outputs, state
	if s.Command.Timeout > 0 {
		p.ends = time.Now().Add(s.Command.Timeout)
	}
	if mode != inputNone && mode != inputState {
		p.input = newInput(io.feed)
	}
	p.mu.Unlock()
	back.push(func() error {
		p.mu.Lock()
		defer p.mu.Unlock()
		p.closeLocked()
		p.exec = nil
		return nil
	})
	back.push(func() error {
		uctx, stop := context.WithTimeoutCause(context.WithoutCancel(ctx), undoTime, errdefs.Deadline)
		defer stop()
		err := t.cfg.Keeper.Release(uctx, p.keeperKey())
		if errors.Is(err, errdefs.Unavailable) {
			return nil // a keeper that is away holds nothing
		}
		return err
	})
	if err := t.cfg.Keeper.Record(ctx, kx); err != nil {
		return nil, fmt.Errorf("record the output of %s: %w", p.object(), err)
	}
	if s.Lossless {
		// Before the first byte. The reader takes over from here.
		for _, o := range io.outputs {
			if err := t.cfg.Keeper.Retain(ctx, p.keeperKey(), o.stream, 0); err != nil {
				return nil, fmt.Errorf("keep the output of %s: %w", p.object(), err)
			}
		}
	}
	back.push(x.Kill)
	_, err = line.Channel.Spawn(ctx, spawn, stdio)
	if se, ok := errors.AsType[*chronus.StartError](err); ok {
		return startFailure(s.Command, spawn.Cwd, string(se.Step), se.Errno, se.Interpreter), nil
	}
	if err != nil {
		return nil, fmt.Errorf("start %s: %w", p.object(), err)
	}
	if mode == inputFeed {
		t.wg.Go(func() { t.feed(p, s.Input) })
	}
	return nil, nil
}

// plumbing is the descriptors of a command: what it gets, and what stays here.
type plumbing struct {
	in, out, err *os.File
	outputs      []*output
	feed         *os.File // write end of standard input, when something is still to come
}

// plumb makes pipes and records. ends closes the command's ends, once it has them or will not; back undoes the rest.
func (t *Table) plumb(p *proc, s Start, base uint32, ids chronus.IDs, back *undo) (io plumbing, ends *undo, err error) {
	ends = &undo{}
	defer func() {
		if err != nil {
			_ = ends.run()
		}
	}()
	if err := os.MkdirAll(t.dir(), 0o700); err != nil {
		return io, ends, fmt.Errorf("make the output directory of %s: %w", t.object(), err)
	}
	own := func(f *os.File) error {
		// The command's user may then open /dev/stdout again, as shells and test runners do.
		if err := f.Chown(int(base+ids.UID), int(base+ids.GID)); err != nil && os.Geteuid() == 0 {
			return fmt.Errorf("give a pipe to the user of %s: %w", p.object(), err)
		}
		return nil
	}
	stream := func(n record.Stream) (*os.File, error) {
		r, w, err := pipe.New()
		if err != nil {
			return nil, fmt.Errorf("make a pipe for %s: %w", p.object(), err)
		}
		ends.push(w.Close)
		path := record.Path(t.cfg.Dir, t.cfg.ID, p.number, n)
		f, err := os.OpenFile(path, os.O_RDWR|os.O_CREATE|os.O_EXCL, 0o600)
		if err != nil {
			_ = r.Close()
			return nil, fmt.Errorf("make the record of %s: %w", p.object(), err)
		}
		back.push(func() error {
			_, _ = r.Close(), f.Close() // closed twice, if the command had them
			return os.Remove(path)
		})
		io.outputs = append(io.outputs, &output{stream: n, pipe: r, file: f, drained: make(chan struct{})})
		return w, own(w)
	}
	if io.out, err = stream(record.Stdout); err != nil {
		return io, ends, err
	}
	if !s.Command.MergeStderr {
		if io.err, err = stream(record.Stderr); err != nil {
			return io, ends, err
		}
	}
	// The write end can be waited on, and waited on no more; the read end, an open file of its own, blocks as commands
	// expect.
	r, w, err := os.Pipe()
	if err != nil {
		return io, ends, fmt.Errorf("make a pipe for %s: %w", p.object(), err)
	}
	ends.push(r.Close)
	io.in = r
	if err := blocking(r); err != nil {
		_ = w.Close()
		return io, ends, fmt.Errorf("make a pipe for %s: %w", p.object(), err)
	}
	if err := own(r); err != nil {
		_ = w.Close()
		return io, ends, err
	}
	if s.Stream || len(s.Input) > prefill {
		io.feed = w
		back.push(func() error {
			_ = w.Close() // closed twice, if the command had it
			return nil
		})
		return io, ends, nil
	}
	_, err = w.Write(s.Input)
	return io, ends, errors.Join(err, w.Close())
}

func blocking(f *os.File) error {
	conn, err := f.SyscallConn()
	if err != nil {
		return err
	}
	cerr := conn.Control(func(fd uintptr) { err = syscall.SetNonblock(int(fd), false) })
	return errors.Join(err, cerr)
}

// feed writes the input of a Run and closes it.
func (t *Table) feed(p *proc, data []byte) {
	p.mu.Lock()
	in := p.input
	p.mu.Unlock()
	for len(data) > 0 {
		part := data[:min(len(data), 1<<20)]
		if _, err := in.write(context.Background(), part); err != nil {
			break // the command closed its input or ended: its affair
		}
		data = data[len(part):]
	}
	if t.abandoned() {
		return // the input is not complete, and the next edge is to know it
	}
	p.mu.Lock()
	p.Fed = true
	p.mu.Unlock()
	if err := p.save(); err != nil {
		t.cfg.Log.Warn("remember that input is complete", "sandbox", t.cfg.ID, "process", p.number, "err", err)
	}
	t.closeInput(p)
}

func (t *Table) closeInput(p *proc) {
	p.mu.Lock()
	in := p.input
	p.mu.Unlock()
	if in == nil {
		return
	}
	in.close()
	ctx, stop := context.WithTimeoutCause(context.Background(), undoTime, errdefs.Deadline)
	defer stop()
	if err := t.cfg.Keeper.CloseInput(ctx, p.keeperKey()); err != nil {
		t.cfg.Log.Warn("close the keeper's end of an input", "sandbox", t.cfg.ID, "process", p.number, "err", err)
	}
}

// save remembers the command as it stands.
func (p *proc) save() error {
	p.mu.Lock()
	data, err := json.Marshal(p.entry)
	p.mu.Unlock()
	if err != nil {
		return fmt.Errorf("encode %s: %w", p.object(), err)
	}
	if err := p.t.cfg.Memory.Save(p.name(), data); err != nil {
		return fmt.Errorf("remember %s: %w", p.object(), err)
	}
	return nil
}

// onExit takes one exit status from the inside, possibly again.
func (t *Table) onExit(e chronus.Exit) {
	p, err := t.find(e.Number)
	if err != nil || p.ended() {
		t.ack(e.Number)
		return
	}
	if p.claim() {
		t.wg.Go(func() { t.exited(p, e) })
	}
}

func (t *Table) ack(number int64) {
	t.mu.Lock()
	line := t.line
	t.mu.Unlock()
	if line == nil {
		return
	}
	if err := line.Channel.Ack(number); err != nil {
		t.cfg.Log.Debug("acknowledge an exit", "sandbox", t.cfg.ID, "process", number, "err", err)
	}
}

// exited makes the result of a command whose first process ended.
func (t *Table) exited(p *proc, e chronus.Exit) {
	now := time.Now()
	<-p.begun
	p.releaseTerminal()
	p.mu.Lock()
	// The keeper began to count later than we did: it may fire while we wait for the output, but this was not its kill.
	early := !p.about && now.Before(p.ends)
	limited := p.Command.Timeout > 0 && e.Status.Signaled() && e.Status.Signal() == syscall.SIGKILL && !early &&
		time.Until(p.ends) < firedWait/2
	x := p.exec
	p.mu.Unlock()
	if limited {
		timer := time.NewTimer(firedWait)
		select {
		case <-p.fired:
		case <-t.left:
		case <-timer.C:
		}
		timer.Stop()
	}
	t.drained(p)
	if t.abandoned() {
		return // the exit status stays inside for the next edge
	}

	r := Result{CPU: e.CPU, Wall: e.Wall, PeakMemory: e.MaxRSS}
	if x != nil {
		if cpu, err := x.CPU(); err == nil {
			r.CPU = max(cpu, e.CPU)
		}
	}
	t.mu.Lock()
	line := t.line
	t.mu.Unlock()
	p.mu.Lock()
	switch {
	case e.Failed != nil: // it was still being started when an edge before died
		cwd := p.Command.Cwd
		if cwd == "" {
			cwd = t.cfg.Workdir
		}
		r.StartFailure = startFailure(p.Command, cwd, string(e.Failed.Step), e.Failed.Errno, e.Failed.Interpreter)
		r.ExitCode = r.StartFailure.exitCode()
	case p.infra != "":
		r.ExitCode, r.InfraError = 125, p.infra
	case p.firedSet && !early && e.Status.Signaled() && e.Status.Signal() == syscall.SIGKILL:
		r.TimedOut, r.ExitCode, r.Signal = true, 124, int(syscall.SIGKILL)
	case e.Status.Signaled():
		r.Signal = int(e.Status.Signal())
		r.ExitCode = 128 + r.Signal
	default:
		r.ExitCode = e.Status.ExitStatus()
	}
	before := p.OOMs
	p.mu.Unlock()
	if r.Signal == int(syscall.SIGKILL) && !r.TimedOut && line != nil {
		if n, err := line.OOMKills(); err == nil && n > before {
			r.OOM = true
		}
	}
	select {
	case <-p.quit:
		t.finalize(p) // first, so that the result counts the last bytes
	default:
	}
	if t.conclude(p, r) {
		t.ack(p.number)
	}
	t.finalize(p)
}

// conclude remembers a result and tells it; false means that it could only be told. The caller claimed p.
func (t *Table) conclude(p *proc, r Result) (remembered bool) {
	var cut bool
	r.StdoutBytes, r.StderrBytes, cut = p.sizes()
	r.Truncated = r.Truncated || cut
	lost := t.withSandbox(r)
	shell := t.settleShell(p, &r)
	p.mu.Lock()
	p.sizeLocked()
	e := p.entry
	if e.Ended.IsZero() {
		e.Ended = t.cfg.Now().UTC()
	}
	r.Exceeded = cut && e.Command.Overflow == OverflowFail
	e.Result, e.Lost, e.Shell = &r, lost, shell
	p.mu.Unlock()
	err := t.cfg.Memory.SaveNext(p.name(), func(seq int64) ([]byte, error) {
		e.Seq = seq
		return json.Marshal(e)
	})
	if err != nil {
		// The exit status then stays inside, unacknowledged, and is told again after a restart.
		t.cfg.Log.Error("remember a result", "sandbox", t.cfg.ID, "process", p.number, "err", err)
	}
	p.mu.Lock()
	p.entry = e
	disarm := p.Command.Timeout > 0 && !p.firedSet && !p.final
	p.mu.Unlock()
	t.uncount(p)
	close(p.done)
	t.busy()
	if t.cfg.Ended != nil {
		t.cfg.Ended(p.number, r)
	}
	if disarm {
		// What the command left in the background lives on.
		ctx, stop := context.WithTimeoutCause(context.Background(), undoTime, errdefs.Deadline)
		defer stop()
		if rerr := t.cfg.Keeper.Rearm(ctx, p.keeperKey(), time.Time{}, 0); rerr != nil {
			t.cfg.Log.Debug("disarm a time limit", "sandbox", t.cfg.ID, "process", p.number, "err", rerr)
		}
	}
	return err == nil
}

// finalize gives everything back once the last writer of an ended command is gone.
func (t *Table) finalize(p *proc) {
	select {
	case <-p.drainedC():
	case <-p.quit:
	case <-t.left:
		return // the keeper goes on recording
	}
	p.mu.Lock()
	if p.final {
		p.mu.Unlock()
		return
	}
	x := p.exec
	p.exec = nil
	rest := slices.Clone(p.out)
	p.mu.Unlock()
	p.releaseTerminal()

	ctx, stop := context.WithTimeoutCause(context.Background(), undoTime, errdefs.Deadline)
	defer stop()
	if err := t.cfg.Keeper.Release(ctx, p.keeperKey()); err != nil {
		t.cfg.Log.Debug("release a recording", "sandbox", t.cfg.ID, "process", p.number, "err", err)
		p.setUnreleased(true)
	}
	for _, o := range rest {
		if err := o.drain(); err != nil {
			t.cfg.Log.Warn("record the last output", "sandbox", t.cfg.ID, "process", p.number, "err", err)
		}
	}
	p.mu.Lock()
	p.closeLocked()
	p.mu.Unlock()
	if x != nil {
		if err := x.Remove(); err != nil {
			t.cfg.Log.Debug("remove a control group", "sandbox", t.cfg.ID, "process", p.number, "err", err)
		}
	}
	t.settle(p)
}

// drained returns when an ended command's streams are at their end. Children may hold them open: then when drainWait is
// over and all that the command itself has written is recorded. That takes longer while a lossless reader holds it up, for
// as long as that comes on, and while the keeper is away.
func (t *Table) drained(p *proc) {
	all := p.drainedC()
	timer := time.NewTimer(drainWait)
	defer timer.Stop()
	select {
	case <-all:
		return
	case <-p.quit:
		return
	case <-t.left:
		return
	case <-timer.C:
	}
	marks := p.written()
	last := t.cfg.Now().Add(recordWait)
	tick := time.NewTicker(drainWait / 40)
	defer tick.Stop()
	for slices.ContainsFunc(marks, mark.ahead) {
		select {
		case <-tick.C:
		case <-all:
			return
		case <-p.quit:
			return
		case <-t.left:
			return
		}
		now := t.cfg.Now()
		if p.awaits() {
			last = now.Add(recordWait)
		} else if now.After(last) {
			t.cfg.Log.Warn("a command ended before its output was recorded", "sandbox", t.cfg.ID, "process", p.number)
			return
		}
	}
}

// mark is a place in a stream.
type mark struct {
	file *os.File
	size int64
	// quiet, for a terminal, of which it cannot be told how much it holds: nothing is under way. size is more than enough.
	quiet func() bool
}

// ahead reports whether the record has not come so far yet.
func (m mark) ahead() bool {
	fi, err := m.file.Stat()
	return err == nil && fi.Size() < m.size && (m.quiet == nil || !m.quiet())
}

// written gives for each open stream how far it has been written: what is recorded and what lies in the pipe.
func (p *proc) written() []mark {
	p.mu.Lock()
	outputs := slices.Clone(p.out)
	p.mu.Unlock()
	var marks []mark
	for _, o := range outputs {
		if o.pipe == nil || o.file == nil {
			continue
		}
		// The keeper moves bytes meanwhile; none may be counted twice or not at all.
		for range 100 {
			before, err := o.file.Stat()
			if err != nil {
				break
			}
			n, err := o.buffered()
			if err != nil {
				break
			}
			if after, err := o.file.Stat(); err == nil && after.Size() == before.Size() {
				m := mark{file: o.file, size: after.Size() + int64(n)}
				if o.tty != nil {
					m.size, m.quiet = m.size+tty.InFlight, o.quiet
				}
				marks = append(marks, m)
				break
			}
		}
	}
	return marks
}

// buffered is how many bytes lie in the pipe.
func (o *output) buffered() (n int, err error) {
	conn, err := o.pipe.SyscallConn()
	if err != nil {
		return 0, err
	}
	cerr := conn.Control(func(fd uintptr) { n, err = pipe.Buffered(int(fd)) })
	return n, errors.Join(err, cerr)
}

// drain moves what is left in a pipe whose writers are gone and that the keeper does not read any more into the record.
func (o *output) drain() error {
	if o.pipe == nil || o.file == nil {
		return nil
	}
	size, err := o.file.Seek(0, io.SeekEnd)
	if err != nil {
		return err
	}
	size, err = o.drainFrom(o.pipe, size)
	if err == nil && o.tty != nil {
		_, err = o.drainFrom(o.tty.master, size)
	}
	return err
}

// drainFrom moves what is in a pipe or terminal to the record at size, and returns where that ends.
func (o *output) drainFrom(source *os.File, size int64) (int64, error) {
	conn, err := source.SyscallConn()
	if err != nil {
		return size, err
	}
	buf := make([]byte, 64<<10)
	cerr := conn.Control(func(fd uintptr) {
		if err = syscall.SetNonblock(int(fd), true); err != nil {
			return
		}
		for {
			var n int
			n, err = syscall.Read(int(fd), buf)
			switch {
			case n > 0:
				if _, err = o.file.WriteAt(buf[:n], size); err != nil {
					return
				}
				size += int64(n)
			case errors.Is(err, syscall.EINTR):
			case n == 0 && err == nil, errors.Is(err, syscall.EAGAIN), o.tty != nil && errors.Is(err, syscall.EIO):
				err = nil
				return
			default:
				return
			}
		}
	})
	return size, errors.Join(err, cerr)
}

func isUndone(err error) bool {
	_, ok := errors.AsType[undone](err)
	return ok
}
