// Package sessions owns the commands of one sandbox: their numbers and keys, their life from the request to the
// acknowledged exit status, their results and their recorded output.
//
// A Table belongs to one sandbox and outlives it: results and output stay readable after the sandbox ended, until the
// caller drops them. It promises that a number is never used twice, that a key stands for one request for the life of
// the sandbox, that a command's result is remembered before its exit status is acknowledged inside, and that nothing
// runs whose output is not being recorded. It keeps no clock of its own for time limits: those are the keeper's.
//
// All methods may be called at once. Each command has at most one goroutine of its own beside its callers': the one
// that ends it. Locks are never held across calls to the keeper, the inside or the disk.
package sessions

import (
	"cmp"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"log/slog"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"syscall"
	"time"

	"github.com/sandsea/sandsea/api/errdefs"
	"github.com/sandsea/sandsea/internal/chronus"
	"github.com/sandsea/sandsea/internal/chronus/follow"
	"github.com/sandsea/sandsea/internal/keeper"
	"github.com/sandsea/sandsea/internal/linux/sparse"
	"github.com/sandsea/sandsea/internal/sandbox"
)

const (
	// MaxKeys bounds the idempotency keys of one sandbox; they are never forgotten while it lives.
	MaxKeys = 100_000
	// MaxEnded bounds the ended commands without a key that are remembered.
	MaxEnded = 10_000
	// MaxNote bounds the caller's note.
	MaxNote = 4 << 10

	drainWait  = 200 * time.Millisecond // how long an ended command's streams may stay open before it counts as ended
	recordWait = 10 * time.Second       // how long that it wrote may go unrecorded while no lossless reader is waited for
	firedWait  = time.Second            // how long the keeper's word about a time limit may take
	launchTime = 30 * time.Second       // limit of one start, whatever the caller's
	undoTime   = 10 * time.Second
	killWait   = 10 * time.Second // how long a killed command's result may take before its caller is let go
)

// Memory is where a Table remembers, through a crash of the edge. Names sort in the order of numbers.
type Memory interface {
	// Save is remembered when it returns.
	Save(name string, data []byte) error
	// SaveNext is Save of a step of the sandbox's story: encode gets the step's gapless number.
	SaveNext(name string, encode func(seq int64) ([]byte, error)) error
	Forget(names ...string) error
}

// Exec are the kernel objects of one command; see backend.Exec.
type Exec interface {
	Stdio() chronus.Stdio
	Kill() error
	KillFile() *os.File
	Signal(sig int) error
	CPU() (time.Duration, error)
	Pids() ([]int, error)
	Remove() error
}

// Line is the way to the inside of a sandbox that runs.
type Line struct {
	Channel  chronus.Channel
	NewExec  func(ctx context.Context, number int64) (Exec, error)
	OOMKills func() (int64, error)
	// UIDBase is the host id of root inside.
	UIDBase uint32
}

// User is who a command acts as.
type User struct {
	IDs  chronus.IDs
	Name string // may be empty for a number that the sandbox does not name
	Home string
}

// Config is what a Table needs. Env, User and Workdir are the defaults of commands: the image's under the sandbox's.
type Config struct {
	ID      string
	Dir     string // of all records; this sandbox's lie in Dir/ID
	Env     []string
	User    string
	Workdir string
	Output  int64 // bytes of recorded output kept
	Keeper  keeper.Client
	Follow  *follow.Follower // over Dir
	Memory  Memory
	// Lookup finds a user by "name", "uid" or "uid:gid" inside the sandbox; NotFound when there is none.
	Lookup func(ctx context.Context, user string) (User, error)
	// Starting, when set, is called as a start begins, and what it gives once that start is decided.
	Starting func() (decided func())
	// Shells is told of the commands of shell sessions; nil when there can be none.
	Shells Shells
	// Busy is told the number of running commands after each change. It must not call back.
	Busy func(running int)
	// Ended is told each end, after it is remembered. It must not call back.
	Ended func(number int64, r Result)
	Now   func() time.Time
	Log   *slog.Logger
}

// Gone is the error of every call for a sandbox that has ended or is ending.
func Gone(id string, end sandbox.End) error {
	e := errdefs.New(errdefs.FailedPrecondition, "sandbox "+sandbox.ID(id).Short(), "has ended: %s", describe(end))
	e.Cause = string(end.Cause)
	e.Hint = "See: sandsea logs " + sandbox.ID(id).Short()
	if end.Cause.Infra() {
		e.Hint = "Platform fault, not the task's. Create again"
	}
	return e
}

func describe(end sandbox.End) string {
	if end.Detail == "" {
		return string(end.Cause)
	}
	return string(end.Cause) + ", " + end.Detail
}

// Table is the commands of one sandbox.
type Table struct {
	cfg  Config
	wg   sync.WaitGroup
	left chan struct{} // closed by Abandon
	once sync.Once
	say  sync.Mutex // held while Busy is told, so that the last word is the newest; before mu

	mu      sync.Mutex
	procs   map[int64]*proc  // guarded by mu
	keys    map[string]*proc // guarded by mu
	next    int64            // guarded by mu
	running int              // guarded by mu
	line    *Line            // guarded by mu: nil before Connect and after Close
	end     *sandbox.End     // guarded by mu: set when the sandbox is ending
	users   map[string]User  // guarded by mu: root and numbers
	leaving bool             // guarded by mu: the edge shuts down, callers go away without meaning it
	exits   chan struct{}    // guarded by mu: closed when the consumer of exits is gone
	kept    int64            // guarded by mu: bytes of the records of commands that have settled, about
	plain   int              // guarded by mu: settled commands without a key, about
}

// New makes an empty Table; Load and Connect come next.
func New(cfg Config) *Table {
	return &Table{
		cfg: cfg, left: make(chan struct{}), procs: map[int64]*proc{}, keys: map[string]*proc{}, next: 1,
		users: map[string]User{},
	}
}

// object names the sandbox in messages.
func (t *Table) object() string { return "sandbox " + sandbox.ID(t.cfg.ID).Short() }

func (t *Table) dir() string { return filepath.Join(t.cfg.Dir, t.cfg.ID) }

// Load takes what an edge before remembered: names as Memory got them, with their data. Once, before Connect.
func (t *Table) Load(records map[string][]byte) error {
	t.mu.Lock()
	defer t.mu.Unlock()
	for name, data := range records {
		if strings.HasSuffix(name, inputSuffix) {
			continue
		}
		var e entry
		if err := json.Unmarshal(data, &e); err != nil {
			return fmt.Errorf("read a command of %s: %w", t.object(), err)
		}
		p := t.newProc(e)
		if in, ok := records[p.inputName()]; ok {
			if err := json.Unmarshal(in, &p.Sent); err != nil {
				return fmt.Errorf("read the input of %s: %w", p.object(), err)
			}
		}
		close(p.begun)
		if e.Result != nil {
			close(p.done)
		}
		t.procs[e.Number] = p
		if e.Key != "" {
			t.keys[e.Key] = p
		}
		t.next = max(t.next, e.Number+1)
		if e.Result != nil && e.Key == "" {
			t.plain++
		}
		if e.Result == nil {
			// A session that is gone is told all the same how its command ends.
			_ = t.beginShell(p)
		}
	}
	for _, p := range t.procs {
		if p.claimed {
			t.kept += p.allocated()
		}
	}
	return nil
}

// Connect takes the line to a sandbox that runs. After a restart, inside is what Hello listed and held what the keeper
// has of this sandbox's commands; the Table takes the descriptors over, ends what ended meanwhile and goes on with the
// rest. A remembered command that the inside does not list was never started, and is forgotten with its key.
func (t *Table) Connect(ctx context.Context, line Line, inside []chronus.Process, held []keeper.Held) error {
	t.mu.Lock()
	if t.line != nil {
		t.mu.Unlock()
		return errdefs.New(errdefs.Internal, t.object(), "is connected already")
	}
	t.line = &line
	t.exits = make(chan struct{})
	exits := t.exits
	t.mu.Unlock()
	err := t.adopt(ctx, inside, held)
	t.wg.Go(func() {
		defer close(exits)
		for e, err := range line.Channel.Exits() {
			if err != nil {
				t.cfg.Log.Debug("line to a sandbox closed", "sandbox", t.cfg.ID, "err", err)
				return
			}
			t.onExit(e)
		}
	})
	return err
}

func (t *Table) adopt(ctx context.Context, inside []chronus.Process, held []keeper.Held) error {
	listed := map[int64]chronus.Process{}
	for _, p := range inside {
		listed[p.Number] = p
	}
	kept := map[int64]keeper.Held{}
	for _, h := range held {
		if h.Exec != nil {
			kept[h.Exec.Key.Number] = h
		}
	}
	t.mu.Lock()
	procs := make([]*proc, 0, len(t.procs))
	for _, p := range t.procs {
		procs = append(procs, p)
	}
	t.mu.Unlock()
	slices.SortFunc(procs, func(a, b *proc) int { return cmp.Compare(a.number, b.number) })
	var errs []error
	for _, p := range procs {
		h, ok := kept[p.number]
		delete(kept, p.number)
		in, known := listed[p.number]
		switch {
		case p.ended() && !ok:
		case p.ended():
			errs = append(errs, t.takeOver(ctx, p, h, in, false))
		case known:
			errs = append(errs, t.takeOver(ctx, p, h, in, ok))
		default:
			if ok {
				keeper.CloseHeld([]keeper.Held{h})
			}
			errs = append(errs, t.neverStarted(ctx, p))
		}
	}
	for number, h := range kept {
		keeper.CloseHeld([]keeper.Held{h})
		errs = append(errs, t.cfg.Keeper.Release(ctx, keeper.Key{Sandbox: t.cfg.ID, Number: number}))
	}
	t.busy()
	return errors.Join(errs...)
}

// neverStarted forgets a command that was remembered and not started.
func (t *Table) neverStarted(ctx context.Context, p *proc) error {
	t.mu.Lock()
	delete(t.procs, p.number)
	if t.keys[p.key] == p {
		delete(t.keys, p.key)
	}
	line := t.line
	t.mu.Unlock()
	t.unstarted(p)
	p.fail(errdefs.New(errdefs.Unknown, p.object(), "was not started before the edge restarted").
		WithHint("Send it again with the same key"))
	errs := []error{t.cfg.Keeper.Release(ctx, p.keeperKey())}
	if x, err := line.NewExec(ctx, p.number); err == nil {
		errs = append(errs, x.Kill(), x.Remove())
	}
	return errors.Join(append(errs, t.dropFiles(p), t.cfg.Memory.Forget(p.name(), p.inputName()))...)
}

// takeOver makes p whole again from what the keeper held.
func (t *Table) takeOver(ctx context.Context, p *proc, h keeper.Held, in chronus.Process, live bool) error {
	t.mu.Lock()
	line := t.line
	t.mu.Unlock()
	x, err := line.NewExec(ctx, p.number)
	if err != nil {
		x = nil
	}
	p.mu.Lock()
	p.exec = x
	if e := h.Exec; e != nil {
		for _, s := range e.Streams {
			o := &output{stream: s.Stream, pipe: s.Pipe, file: s.File, drained: make(chan struct{})}
			if slices.Contains(h.Closed, s.Stream) {
				close(o.drained)
				o.closed = true
			}
			if terr := o.adoptTerminal(s.Terminal, s.Feed, live && !in.Exited); terr != nil {
				t.cfg.Log.Warn("open a terminal again", "sandbox", t.cfg.ID, "process", p.number, "err", terr)
			}
			p.out = append(p.out, o)
		}
		if e.Kill != nil {
			_ = e.Kill.Close()
		}
		switch {
		case e.Stdin == nil:
		case p.Input == inputStream, p.Input == inputTerminal:
			p.input = recoverInput(e.Stdin, p)
		case p.Input == inputState && !p.endedLocked():
			p.state = e.Stdin
		default:
			_ = e.Stdin.Close()
		}
		if e.Remaining > 0 {
			p.ends, p.about = time.Now().Add(e.Remaining), true
		}
	}
	if h.Fired && !p.firedSet {
		p.firedSet = true
		close(p.fired)
	}
	cut := p.Input == inputFeed && !p.Fed && live && !p.endedLocked()
	done := p.endedLocked()
	p.mu.Unlock()
	if err == nil && h.Exec == nil && !done {
		t.cfg.Log.Warn("the keeper lost a command, nothing records its output", "sandbox", t.cfg.ID, "process", p.number)
	}
	if done {
		t.wg.Go(func() { t.finalize(p) })
		if in.Exited {
			return line.Channel.Ack(p.number)
		}
		return err
	}
	t.count(p)
	if cut {
		// Its input came from a caller of the edge that died: what follows would be an answer to half a question.
		p.mu.Lock()
		p.infra = "its input was cut by a restart of the node's daemon"
		p.mu.Unlock()
		err = errors.Join(err, p.kill())
	}
	if in.Exited {
		t.onExit(in.Exit)
	}
	return err
}

// End says that the sandbox is ending: nothing new is started.
func (t *Table) End(end sandbox.End) {
	t.mu.Lock()
	defer t.mu.Unlock()
	if t.end == nil {
		t.end = &end
	}
}

// Leave says that the edge shuts down: from now on callers who go away kill nothing.
func (t *Table) Leave() {
	t.mu.Lock()
	defer t.mu.Unlock()
	t.leaving = true
}

// Close ends the commands of a sandbox whose processes are all gone: those whose end was not told died with it. Results
// and records stay.
func (t *Table) Close(ctx context.Context, end sandbox.End) {
	t.End(end)
	t.mu.Lock()
	line, exits := t.line, t.exits
	t.mu.Unlock()
	if line != nil {
		// The line closes by itself once PID 1 is gone; what it still holds are ends that count.
		select {
		case <-exits:
		case <-ctx.Done():
		}
		_ = line.Channel.Close()
		<-exits
	}
	t.mu.Lock()
	var left []*proc
	for _, p := range t.procs {
		left = append(left, p)
	}
	t.mu.Unlock()
	for _, p := range left {
		p.orphan()
		if p.claim() {
			t.wg.Go(func() {
				t.finalize(p) // first, so that the result counts the last bytes
				t.conclude(p, diedWith(end))
			})
		}
	}
	t.wg.Wait()
	t.mu.Lock()
	t.line = nil
	t.mu.Unlock()
}

func diedWith(end sandbox.End) Result {
	if end.Cause.Infra() {
		return Result{ExitCode: 125, InfraError: "the sandbox ended: " + describe(end)}
	}
	return Result{ExitCode: 128 + int(syscall.SIGKILL), Signal: int(syscall.SIGKILL)}
}

// Abandon gives back the descriptors of an edge that shuts down, and ends nothing: the keeper and the inside go on.
// Idempotent.
func (t *Table) Abandon() {
	t.Leave()
	t.once.Do(func() { close(t.left) })
	t.mu.Lock()
	line, exits := t.line, t.exits
	t.mu.Unlock()
	if line != nil {
		_ = line.Channel.Close()
		<-exits
	}
	t.mu.Lock()
	procs := make([]*proc, 0, len(t.procs))
	for _, p := range t.procs {
		procs = append(procs, p)
	}
	t.mu.Unlock()
	for _, p := range procs {
		p.abandonInput()
	}
	t.wg.Wait()
	for _, p := range procs {
		p.abandon()
	}
}

func (t *Table) abandoned() bool {
	select {
	case <-t.left:
		return true
	default:
		return false
	}
}

// Names lists everything that the Table remembers.
func (t *Table) Names() []string {
	t.mu.Lock()
	defer t.mu.Unlock()
	out := make([]string, 0, 2*len(t.procs))
	for _, p := range t.procs {
		out = append(out, p.name(), p.inputName())
	}
	return out
}

// Running counts the commands that run.
func (t *Table) Running() int {
	t.mu.Lock()
	defer t.mu.Unlock()
	return t.running
}

// count makes p one of the running commands; uncount ends that.
func (t *Table) count(p *proc) {
	t.mu.Lock()
	defer t.mu.Unlock()
	if !p.counted {
		p.counted = true
		t.running++
	}
}

func (t *Table) uncount(p *proc) {
	t.mu.Lock()
	defer t.mu.Unlock()
	if p.counted {
		p.counted = false
		t.running--
	}
}

func (t *Table) busy() {
	if t.cfg.Busy != nil {
		t.say.Lock()
		defer t.say.Unlock()
		t.cfg.Busy(t.Running())
	}
}

// List shows the commands in the order of their numbers. The texts of very many commands are cut so that all of them
// together stay below about 16 MiB; Attach shows one whole.
func (t *Table) List() []Info {
	t.mu.Lock()
	procs := make([]*proc, 0, len(t.procs))
	for _, p := range t.procs {
		procs = append(procs, p)
	}
	t.mu.Unlock()
	slices.SortFunc(procs, func(a, b *proc) int { return cmp.Compare(a.number, b.number) })
	out := make([]Info, 0, len(procs))
	for _, p := range procs {
		i := p.info()
		if share := listText / len(procs); share < clipCommand {
			i = i.brief(share)
		}
		out = append(out, i)
	}
	return out
}

// OutputBytes is what all records occupy.
func (t *Table) OutputBytes() int64 {
	var sum int64
	entries, err := os.ReadDir(t.dir())
	if err != nil {
		return 0
	}
	for _, e := range entries {
		if fi, err := e.Info(); err == nil {
			sum += allocated(fi)
		}
	}
	return sum
}

func allocated(fi os.FileInfo) int64 {
	if st, ok := fi.Sys().(*syscall.Stat_t); ok {
		return st.Blocks * 512
	}
	return fi.Size()
}

func (t *Table) find(number int64) (*proc, error) {
	t.mu.Lock()
	p, ok := t.procs[number]
	t.mu.Unlock()
	if !ok {
		return nil, errdefs.New(errdefs.NotFound, t.object(), "has no process %d", number).
			WithField("number", "").WithHint("List its processes; old ended ones are forgotten")
	}
	return p, nil
}

// Signal sends a signal to a command's first process or to its whole tree.
func (t *Table) Signal(ctx context.Context, number int64, sig int, tree bool) error {
	if sig < 1 || sig > 64 {
		return errdefs.New(errdefs.Invalid, "", "signal: %d is not between 1 and 64", sig).WithField("signal", "1 to 64").
			WithHint("15 is TERM, 9 is KILL")
	}
	p, err := t.find(number)
	if err != nil {
		return err
	}
	if err := p.wait(ctx, p.begun); err != nil {
		return err
	}
	t.mu.Lock()
	line, end := t.line, t.end
	t.mu.Unlock()
	if line == nil && end != nil {
		return Gone(t.cfg.ID, *end)
	}
	ended := errdefs.New(errdefs.FailedPrecondition, p.object(), "has ended").WithHint("See its result")
	if tree {
		p.mu.Lock()
		x := p.exec
		p.mu.Unlock()
		if x == nil {
			return ended
		}
		if sig == int(syscall.SIGKILL) {
			return x.Kill()
		}
		return x.Signal(sig)
	}
	if p.ended() || line == nil {
		return ended
	}
	err = line.Channel.Signal(ctx, number, syscall.Signal(sig))
	if errors.Is(err, errdefs.NotFound) {
		return ended
	}
	return err
}

// Event takes what the keeper tells of this sandbox's commands. The caller acknowledges it afterwards.
func (t *Table) Event(e keeper.Event) {
	p, err := t.find(e.Key.Number)
	if err != nil {
		return // of a command that was forgotten
	}
	p.mu.Lock()
	defer p.mu.Unlock()
	switch e.Kind {
	case keeper.Fired:
		if !p.firedSet {
			p.firedSet = true
			close(p.fired)
		}
	case keeper.Closed:
		for _, o := range p.out {
			if o.stream == e.Stream && !o.closed {
				o.closed = true
				close(o.drained)
			}
		}
	case keeper.Died, keeper.Overflow:
	}
}

// Rerecord tells a new keeper of everything that is still being recorded, and an old one of what may be released.
func (t *Table) Rerecord(ctx context.Context) error {
	t.mu.Lock()
	procs := make([]*proc, 0, len(t.procs))
	for _, p := range t.procs {
		procs = append(procs, p)
	}
	t.mu.Unlock()
	var errs []error
	for _, p := range procs {
		if x, ok := p.keeperExec(); ok {
			errs = append(errs, t.cfg.Keeper.Record(ctx, x))
			t.retainAgain(ctx, p)
		} else if p.unreleased() {
			if err := t.cfg.Keeper.Release(ctx, p.keeperKey()); err != nil {
				errs = append(errs, err)
			} else {
				p.setUnreleased(false)
			}
		}
	}
	return errors.Join(errs...)
}

// settle counts a command whose descriptors are given back, and trims when there is too much of them. An empty record is
// no record.
func (t *Table) settle(p *proc) {
	var bytes int64
	for _, path := range p.paths(t.cfg.Dir) {
		fi, err := os.Stat(path)
		if err != nil {
			continue
		}
		if fi.Size() == 0 {
			if err := os.Remove(path); err != nil {
				t.cfg.Log.Debug("remove an empty record", "sandbox", t.cfg.ID, "process", p.number, "err", err)
			}
			continue
		}
		bytes += allocated(fi)
	}
	t.mu.Lock()
	t.kept += bytes
	if p.key == "" {
		t.plain++
	}
	full := t.kept > t.cfg.Output/2 || t.plain > MaxEnded+MaxEnded/10
	t.mu.Unlock()
	if full {
		t.trim(false)
	}
}

// makeRoom trims before a command starts, if the last one left it less than half of the output limit, and gives what the
// records of settled commands hold then.
func (t *Table) makeRoom() int64 {
	if t.settledBytes() > t.cfg.Output/2 {
		t.trim(true)
	}
	return t.settledBytes()
}

// settledBytes is what the records of settled commands hold, about.
func (t *Table) settledBytes() int64 {
	t.mu.Lock()
	defer t.mu.Unlock()
	return t.kept
}

// trim drops ended commands beyond the bounds: the oldest without a key first. Records beyond half of the sandbox's
// output limit, of which the other half is for commands that run, go with their commands; that of the last one only with
// all. Those of commands with a key keep the result and lose the bytes, which then read as a gap. What somebody reads who
// must not lose any of it waits for a later call.
func (t *Table) trim(all bool) {
	t.mu.Lock()
	var ended []*proc
	for _, p := range t.procs {
		if p.settled() {
			ended = append(ended, p)
		}
	}
	t.mu.Unlock()
	slices.SortFunc(ended, func(a, b *proc) int { return cmp.Compare(a.number, b.number) })
	drop := map[*proc]bool{}
	plain := 0
	for _, p := range slices.Backward(ended) {
		if p.key == "" {
			if plain++; plain > MaxEnded && !p.spared() {
				drop[p] = true
			}
		}
	}
	var sum int64
	for _, p := range ended {
		sum += p.allocated()
	}
	if most := t.cfg.Output / 2; sum > most {
		// A quarter more than needed, so that this is not for every command.
		for _, keyed := range []bool{false, true} {
			for _, p := range ended {
				if sum <= most/4*3 {
					break
				}
				if (p.key != "") == keyed && !drop[p] && (all || p != ended[len(ended)-1]) && !p.spared() {
					sum -= t.emptyFiles(p)
				}
			}
		}
	}
	t.mu.Lock()
	t.kept, t.plain = sum, min(plain, MaxEnded)
	t.mu.Unlock()
	for p := range drop {
		t.mu.Lock()
		delete(t.procs, p.number)
		t.mu.Unlock()
		if err := errors.Join(t.dropFiles(p), t.cfg.Memory.Forget(p.name(), p.inputName())); err != nil {
			t.cfg.Log.Warn("forget an ended command", "sandbox", t.cfg.ID, "process", p.number, "err", err)
		}
	}
}

func (t *Table) dropFiles(p *proc) error {
	var errs []error
	for _, path := range p.paths(t.cfg.Dir) {
		if err := os.Remove(path); err != nil && !errors.Is(err, os.ErrNotExist) {
			errs = append(errs, err)
		}
	}
	return errors.Join(errs...)
}

// emptyFiles makes the records of p holes of the same size, and returns how much that freed.
func (t *Table) emptyFiles(p *proc) int64 {
	var freed int64
	for _, path := range p.paths(t.cfg.Dir) {
		n, err := empty(path)
		if err != nil && !errors.Is(err, os.ErrNotExist) {
			t.cfg.Log.Warn("drop recorded output", "sandbox", t.cfg.ID, "process", p.number, "err", err)
		}
		freed += n
	}
	return freed
}

// empty makes a hole of a record. Its size, which is the stream's, stays at every moment: a reader may be at any offset,
// and we may be killed.
func empty(path string) (freed int64, err error) {
	f, err := os.OpenFile(path, os.O_WRONLY, 0)
	if err != nil {
		return 0, err
	}
	defer f.Close()
	fi, err := f.Stat()
	if err != nil || fi.Size() == 0 {
		return 0, err
	}
	fd := int(f.Fd())
	block, err := sparse.Block(fd)
	if err != nil {
		return 0, err
	}
	// With the last block, of which a part would be zeros otherwise.
	if err := sparse.Punch(fd, 0, (fi.Size()+block-1)/block*block); err != nil {
		return 0, err
	}
	return allocated(fi), nil
}

// lookup resolves a user, with root and numbers remembered: they mean the same for the sandbox's life.
func (t *Table) lookup(ctx context.Context, user string) (User, error) {
	t.mu.Lock()
	u, ok := t.users[user]
	t.mu.Unlock()
	if ok {
		return u, nil
	}
	u, err := t.cfg.Lookup(ctx, user)
	if err != nil {
		return User{}, err
	}
	if user == "root" || strings.Trim(user, "0123456789:") == "" {
		t.mu.Lock()
		t.users[user] = u
		t.mu.Unlock()
	}
	return u, nil
}
