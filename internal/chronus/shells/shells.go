package shells

import (
	"context"
	"crypto/rand"
	"encoding/hex"
	"encoding/json"
	"errors"
	"fmt"
	"log/slog"
	"path"
	"slices"
	"strings"
	"sync"
	"syscall"
	"time"
	"unicode"

	"github.com/sandsea/sandsea/api/errdefs"
	"github.com/sandsea/sandsea/internal/chronus/sessions"
	"github.com/sandsea/sandsea/internal/sandbox"
)

const (
	// MaxSessions bounds the open sessions of one sandbox.
	MaxSessions = 64
	// MaxName bounds the name of a session, in bytes.
	MaxName = 64
	// MaxScript bounds one script, in bytes.
	MaxScript = 1 << 20
	// maxStates bounds the states of all sessions of one sandbox, in bytes: they are kept outside of it.
	maxStates = 8 << 20

	// openTime bounds how long a new session's shell may take, with the files that a login reads.
	openTime = 30 * time.Second
	// saidMost bounds what an error quotes of an interpreter that could not be used.
	saidMost = 300
)

// Commands are the commands of the sandbox: a sessions.Table.
type Commands interface {
	Run(ctx context.Context, s sessions.Start, most int64) (sessions.Answer, error)
	Keyed(key string) (session string, known bool)
	Signal(ctx context.Context, number int64, sig int, tree bool) error
}

// Memory is where sessions are remembered, through a crash of the edge.
type Memory interface {
	Save(name string, data []byte) error
	Forget(names ...string) error
}

// Config is what a Set needs.
type Config struct {
	ID string
	// User of sessions that name none.
	User   string
	Memory Memory
	Now    func() time.Time
	Log    *slog.Logger
}

// Open is a request for a new session.
type Open struct {
	Name        string // empty: one is made
	Interpreter string // path or name; empty: bash, else sh
	User        string
	Cwd         string
	Env         map[string]string
	ReplaceEnv  bool
	// Login reads what a login shell does, before the first command.
	Login bool
	Key   string
}

// Shell is a session as it is shown.
type Shell struct {
	Name        string
	Interpreter string // absolute path
	User        string
	Cwd         string
	Opened      time.Time
	// NotKept is what its interpreter cannot keep, as words.
	NotKept []string
}

// Run is a request to run a script in a session.
type Run struct {
	Shell       string
	Script      string
	Input       []byte // nil: end of file at once
	MergeStderr bool
	Timeout     time.Duration
	Overflow    sessions.Overflow
	Key         string
	Note        []byte
	MaxOutput   int64 // see sessions.Table.Run
}

// Ran is the answer to a Run.
type Ran struct {
	sessions.Answer
	// Shell is the session after the command.
	Shell       Shell
	SyntaxError bool
	Lost        bool
}

// remembered is what is kept of a session.
type remembered struct {
	Name        string    `json:"name"`
	Interpreter string    `json:"interpreter"`
	Kind        string    `json:"kind"`
	User        string    `json:"user"`
	Opened      time.Time `json:"opened"`
	// Opening: its first shell has not told its state yet.
	Opening bool  `json:"opening,omitempty"`
	State   state `json:"state"`
}

// opened is an open session.
type opened struct {
	name    string
	key     string          // of its memory; unlike the name, never used twice
	rec     remembered      // guarded by the Set's mu
	busy    bool            // guarded by the Set's mu: somebody has the turn
	number  int64           // guarded by the Set's mu: the command that runs, 0 for none
	begun   int64           // guarded by the Set's mu: commands, ever
	calling bool            // guarded by the Set's mu: while Opening, the call that opens it is there to conclude it
	waiting []chan struct{} // guarded by the Set's mu: each is closed when its turn comes
	decided chan struct{}   // closed when Opening is over, or the session gone
	gone    chan struct{}   // closed when it is closed
}

// Set is the shell sessions of one sandbox. It implements sessions.Shells.
type Set struct {
	cfg      Config
	commands Commands

	mu   sync.Mutex
	open map[string]*opened // guarded by mu
}

// New makes a Set without sessions; Load, if there is something to load, and Use come next.
func New(cfg Config) *Set { return &Set{cfg: cfg, open: map[string]*opened{}} }

func (s *Set) object() string { return "sandbox " + sandbox.ID(s.cfg.ID).Short() }

func (x *opened) object() string { return "shell session " + x.name }

// Load takes what an edge before remembered: names as Memory got them, with their data. Once, before Use and before the
// commands are loaded.
func (s *Set) Load(records map[string][]byte) error {
	s.mu.Lock()
	defer s.mu.Unlock()
	for key, data := range records {
		x := newOpened(key)
		if err := json.Unmarshal(data, &x.rec); err != nil {
			return fmt.Errorf("read a shell session of %s: %w", s.object(), err)
		}
		if !x.rec.Opening {
			close(x.decided)
		}
		x.name = x.rec.Name
		s.open[x.name] = x
	}
	return nil
}

// Use takes the sandbox's commands, once they are loaded. A session that was being opened and whose shell does not run
// is forgotten.
func (s *Set) Use(c Commands) {
	s.commands = c
	s.mu.Lock()
	var left []*opened
	for _, x := range s.open {
		if x.rec.Opening && x.number == 0 {
			left = append(left, x)
		}
	}
	s.mu.Unlock()
	for _, x := range left {
		s.drop(x)
	}
}

// Names lists everything that the Set remembers.
func (s *Set) Names() []string {
	s.mu.Lock()
	defer s.mu.Unlock()
	out := make([]string, 0, len(s.open))
	for _, x := range s.open {
		out = append(out, x.key)
	}
	return out
}

func newOpened(key string) *opened {
	return &opened{key: key, decided: make(chan struct{}), gone: make(chan struct{})}
}

// random gives n bytes in hexadecimal digits.
func random(n int) string {
	raw := make([]byte, n)
	_, _ = rand.Read(raw) // never fails, see crypto/rand
	return hex.EncodeToString(raw)
}

func checkName(name string) error {
	if name == "" || len(name) > MaxName || strings.ContainsFunc(name, func(r rune) bool { return !unicode.IsPrint(r) }) {
		return errdefs.New(errdefs.Invalid, "", "name: %d bytes", len(name)).WithField("name", "1 to 64 bytes, printable").
			WithHint("Use a short word, or none")
	}
	return nil
}

// Open opens a session and returns when its shell has told with what it begins.
func (s *Set) Open(ctx context.Context, o Open) (Shell, error) {
	if o.Name != "" {
		if err := checkName(o.Name); err != nil {
			return Shell{}, err
		}
	}
	if err := sandbox.CheckPath("interpreter", o.Interpreter); err != nil {
		return Shell{}, err
	}
	raw, err := json.Marshal(o)
	if err != nil {
		return Shell{}, fmt.Errorf("encode a request: %w", err)
	}
	digest := sandbox.Digest("open_shell", raw)
	if name, known := s.commands.Keyed(o.Key); known {
		return s.reopen(ctx, o, name, digest)
	}
	x, err := s.reserve(o)
	if err != nil {
		return Shell{}, err
	}
	shell, err := s.begin(ctx, x, o, digest)
	if err != nil {
		s.undo(x)
		return Shell{}, err
	}
	return shell, nil
}

// reopen answers a repeated call.
func (s *Set) reopen(ctx context.Context, o Open, name, digest string) (Shell, error) {
	start := o.start(&sessions.Handover{Session: name, Digest: digest}, "sh")
	start.Key = o.Key
	if _, err := s.commands.Run(ctx, start, 0); err != nil {
		return Shell{}, err
	}
	s.mu.Lock()
	x := s.open[name]
	s.mu.Unlock()
	over := errdefs.New(errdefs.FailedPrecondition, s.object(), "the shell session that the key stands for is not open").
		WithField("key", "").WithHint("Use a new key for a new session")
	if x == nil {
		return Shell{}, over
	}
	select {
	case <-x.decided:
	case <-ctx.Done():
		return Shell{}, left(ctx, x.object())
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.open[name] != x {
		return Shell{}, over
	}
	return x.showLocked(), nil
}

// reserve takes a name.
func (s *Set) reserve(o Open) (*opened, error) {
	name := o.Name
	if name == "" {
		name = "shell-" + random(4)
	}
	user := o.User
	if user == "" {
		user = s.cfg.User
	}
	if user == "" {
		user = "root"
	}
	x := newOpened(s.cfg.ID + "/" + random(8))
	x.name = name
	x.rec = remembered{Name: name, User: user, Opened: s.cfg.Now().UTC(), Opening: true}
	x.busy, x.calling = true, true
	s.mu.Lock()
	switch {
	case s.open[name] != nil:
		s.mu.Unlock()
		return nil, errdefs.New(errdefs.AlreadyExists, s.object(), "has a shell session %q", name).
			WithField("name", "").WithHint("Use it, or choose another name")
	case len(s.open) >= MaxSessions:
		s.mu.Unlock()
		return nil, errdefs.New(errdefs.Exhausted, s.object(), "has %d shell sessions open", MaxSessions).
			WithField("name", "64 sessions").WithHint("Close some")
	}
	s.open[name] = x
	rec := x.rec
	s.mu.Unlock()
	if err := s.save(x.key, rec); err != nil {
		s.drop(x)
		return nil, err
	}
	return x, nil
}

func (s *Set) save(key string, rec remembered) error {
	raw, err := json.Marshal(rec)
	if err != nil {
		return fmt.Errorf("encode a shell session: %w", err)
	}
	if err := s.cfg.Memory.Save(key, raw); err != nil {
		return fmt.Errorf("remember a shell session of %s: %w", s.object(), err)
	}
	return nil
}

// start is the command that a session is opened with.
func (o Open) start(h *sessions.Handover, interpreter string) sessions.Start {
	argv := []string{interpreter}
	if o.Login {
		argv = append(argv, "-l")
	}
	return sessions.Start{
		Command: sessions.Command{
			Argv: argv, Env: o.Env, ReplaceEnv: o.ReplaceEnv, User: o.User, Cwd: o.Cwd, Timeout: openTime,
		},
		Handover: h,
	}
}

// begin runs the first shell of a session.
func (s *Set) begin(ctx context.Context, x *opened, o Open, digest string) (Shell, error) {
	candidates := []string{"bash", "sh"}
	if o.Interpreter != "" {
		candidates = []string{o.Interpreter}
	}
	for i, interpreter := range candidates {
		token := random(8)
		h := &sessions.Handover{
			Session: x.name, Token: token, Digest: digest, Program: opening(interpreter, token),
		}
		start := o.start(h, interpreter)
		h.Argv = append(slices.Clone(start.Command.Argv), "-c", ". "+stateIn, path.Base(interpreter))
		if i == 0 {
			start.Key = o.Key
		}
		a, err := s.commands.Run(ctx, start, 64<<10)
		if err != nil {
			return Shell{}, err
		}
		s.mu.Lock()
		done, shell := !x.rec.Opening, x.showLocked()
		s.mu.Unlock()
		if done {
			return shell, nil
		}
		f := a.Result.StartFailure
		if f == nil || f.Kind != "not_found" || i == len(candidates)-1 {
			return Shell{}, s.refused(o, interpreter, a)
		}
	}
	return Shell{}, errdefs.New(errdefs.Internal, s.object(), "no interpreter was tried")
}

// refused says why a session cannot be opened.
func (s *Set) refused(o Open, interpreter string, a sessions.Answer) error {
	fail := func(field, format string, args ...any) *errdefs.Error {
		return errdefs.New(errdefs.FailedPrecondition, s.object(), format, args...).WithField(field, "")
	}
	f := a.Result.StartFailure
	switch {
	case f != nil && f.Kind == "not_found" && o.Interpreter == "":
		return fail("interpreter", "has neither bash nor sh").
			WithHint("Install a shell in the image, or run programs by themselves, without a shell")
	case f != nil && f.Kind == "cwd":
		return fail("cwd", "%s", f.Message).WithHint("Make the directory first, or open the session elsewhere")
	case f != nil && f.Kind == "user":
		return fail("user", "%s", f.Message).WithHint("Use one of its users, or a number")
	case f != nil:
		return fail("interpreter", "%s", f.Message).WithHint("Use bash or another POSIX shell of the image")
	case a.Result.TimedOut:
		return fail("login", "%s took longer than %s", interpreter, openTime).
			WithHint("See what its start-up files wait for, or open it without login")
	}
	said := strings.TrimSpace(strings.ToValidUTF8(string(a.Stderr.Head), "\uFFFD"))
	if len(said) > saidMost {
		said = strings.ToValidUTF8(said[:saidMost], "") + "..."
	}
	return fail("interpreter", "%s ended with %d before the session began: %s", interpreter, a.Result.ExitCode, said).
		WithHint("Is it a POSIX shell? Use bash or sh; with login, see what its start-up files do")
}

// undo ends a call that could not open its session. A session whose shell still runs, since its call has a key, is left
// to Settle.
func (s *Set) undo(x *opened) {
	s.mu.Lock()
	x.calling = false
	under := x.number != 0
	s.mu.Unlock()
	if !under {
		s.drop(x)
	}
}

// drop forgets a session, if it is there.
func (s *Set) drop(x *opened) (number int64) {
	s.mu.Lock()
	if s.open[x.name] != x {
		s.mu.Unlock()
		return 0
	}
	delete(s.open, x.name)
	number = x.number
	close(x.gone)
	x.decideLocked()
	s.mu.Unlock()
	if err := s.cfg.Memory.Forget(x.key); err != nil {
		s.cfg.Log.Warn("forget a shell session", "sandbox", s.cfg.ID, "err", err)
	}
	return number
}

func (x *opened) decideLocked() {
	select {
	case <-x.decided:
	default:
		close(x.decided)
	}
}

func (x *opened) showLocked() Shell {
	r := x.rec
	sh := Shell{
		Name: r.Name, Interpreter: r.Interpreter, User: r.User, Cwd: string(r.State.Cwd), Opened: r.Opened,
	}
	if r.Kind == kindSh {
		sh.NotKept = []string{"functions", "aliases"}
	}
	return sh
}

func (s *Set) absent(name string) error {
	return errdefs.New(errdefs.NotFound, s.object(), "has no shell session %q", name).WithField("shell", "").
		WithHint("Open one")
}

func left(ctx context.Context, object string) error {
	kind := errdefs.Canceled
	if errors.Is(ctx.Err(), context.DeadlineExceeded) {
		kind = errdefs.Deadline
	}
	return errdefs.New(kind, object, "the caller stopped waiting").Wrap(context.Cause(ctx))
}

// take waits for the caller's turn.
func (s *Set) take(ctx context.Context, name string) (*opened, error) {
	s.mu.Lock()
	x := s.open[name]
	if x == nil {
		s.mu.Unlock()
		return nil, s.absent(name)
	}
	if !x.busy {
		x.busy = true
		s.mu.Unlock()
		return x, nil
	}
	turn := make(chan struct{})
	x.waiting = append(x.waiting, turn)
	s.mu.Unlock()
	select {
	case <-turn:
		return x, nil
	case <-x.gone:
		return nil, s.absent(name)
	case <-ctx.Done():
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	if i := slices.Index(x.waiting, turn); i >= 0 {
		x.waiting = slices.Delete(x.waiting, i, i+1)
	} else {
		x.giveLocked()
	}
	return nil, left(ctx, x.object())
}

// giveLocked gives the turn to who waits longest.
func (x *opened) giveLocked() {
	x.number = 0
	if len(x.waiting) == 0 {
		x.busy = false
		return
	}
	close(x.waiting[0])
	x.waiting = x.waiting[1:]
}

// Run runs a script in a session, after all that were asked for before it, and waits for its end. It is a Run of the
// sandbox's commands in all else.
func (s *Set) Run(ctx context.Context, r Run) (Ran, error) {
	invalid := func(format string, args ...any) error {
		return errdefs.New(errdefs.Invalid, "", format, args...).WithField("script", "1 MiB").
			WithHint("Write longer ones to a file and source that")
	}
	switch {
	case len(r.Script) > MaxScript:
		return Ran{}, invalid("script: %d bytes", len(r.Script))
	case strings.IndexByte(r.Script, 0) >= 0:
		return Ran{}, invalid("script: holds NUL")
	}
	merge := []byte{0}
	if r.MergeStderr {
		merge[0] = 1
	}
	h := &sessions.Handover{
		Session: r.Shell,
		Digest:  sandbox.Digest("run_in_shell", []byte(r.Shell), []byte(r.Script), merge, []byte(r.Overflow)),
	}
	start := sessions.Start{
		Command: sessions.Command{
			Argv: []string{"sh", "-c", r.Script}, ReplaceEnv: true, MergeStderr: r.MergeStderr, Timeout: r.Timeout,
			Overflow: r.Overflow,
		},
		Key: r.Key, Note: r.Note, Input: r.Input, Handover: h,
	}
	if _, known := s.commands.Keyed(r.Key); known {
		a, err := s.commands.Run(ctx, start, r.MaxOutput)
		if err != nil {
			return Ran{}, err
		}
		return s.ran(r.Shell, a), nil
	}
	x, err := s.take(ctx, r.Shell)
	if err != nil {
		return Ran{}, err
	}
	s.mu.Lock()
	rec, begun := x.rec, x.begun
	s.mu.Unlock()
	h.Token = random(8)
	h.Program = program(rec.Kind, rec.State, r.Script, h.Token)
	h.Argv = rec.State.arguments(rec.Interpreter, path.Base(rec.Interpreter), r.Script, h.Token)
	h.Env = []string{"PWD=" + string(rec.State.Cwd)}
	start.Command.Argv[0], start.Command.User, start.Command.Cwd = rec.Interpreter, rec.User, string(rec.State.Cwd)
	a, err := s.commands.Run(ctx, start, r.MaxOutput)
	s.mu.Lock()
	if x.begun == begun {
		x.giveLocked() // no command was made of it
	}
	s.mu.Unlock()
	if err != nil {
		return Ran{}, err
	}
	return s.ran(r.Shell, a), nil
}

// ran is the answer of a command that has ended.
func (s *Set) ran(name string, a sessions.Answer) Ran {
	out := Ran{Answer: a, Shell: Shell{Name: name}}
	s.mu.Lock()
	if x := s.open[name]; x != nil {
		out.Shell = x.showLocked()
	}
	s.mu.Unlock()
	if e := a.Shell; e != nil {
		out.SyntaxError, out.Lost = e.SyntaxError, e.Lost
		if len(e.Cwd) > 0 {
			out.Shell.Cwd = string(e.Cwd)
		}
	}
	return out
}

// Close forgets a session and kills the command that runs in it. Idempotent.
func (s *Set) Close(ctx context.Context, name string) error {
	s.mu.Lock()
	x := s.open[name]
	s.mu.Unlock()
	if x == nil {
		return nil
	}
	number := s.drop(x)
	if number == 0 {
		return nil
	}
	err := s.commands.Signal(ctx, number, int(syscall.SIGKILL), true)
	if errors.Is(err, errdefs.FailedPrecondition) || errors.Is(err, errdefs.NotFound) {
		return nil // it has ended meanwhile
	}
	return err
}

// Begin implements sessions.Shells.
func (s *Set) Begin(name string, number int64) error {
	s.mu.Lock()
	defer s.mu.Unlock()
	x := s.open[name]
	if x == nil {
		return s.absent(name)
	}
	x.number, x.busy = number, true
	x.begun++
	return nil
}

// Unstarted implements sessions.Shells.
func (s *Set) Unstarted(name string, number int64) {
	s.mu.Lock()
	x := s.open[name]
	if x == nil || x.number != number {
		s.mu.Unlock()
		return
	}
	abandoned := x.concludeLocked()
	s.mu.Unlock()
	if abandoned {
		s.drop(x)
	}
}

// concludeLocked ends a command's turn. True: it was to open the session, could not, and nobody is there to say so.
func (x *opened) concludeLocked() (abandoned bool) {
	if x.rec.Opening {
		x.number = 0
		return !x.calling
	}
	x.decideLocked()
	x.giveLocked()
	return false
}

// Settle implements sessions.Shells.
func (s *Set) Settle(e sessions.Settling) sessions.ShellEnd {
	s.mu.Lock()
	x := s.open[e.Session]
	if x == nil || x.number != e.Number {
		s.mu.Unlock()
		return sessions.ShellEnd{Lost: true}
	}
	before := x.rec
	room := maxStates
	for _, other := range s.open {
		if other != x {
			room -= other.rec.State.size()
		}
	}
	s.mu.Unlock()
	next, end := settled(before, e, room)
	if next.Opening || !next.State.equal(before.State) || before.Opening {
		if err := s.save(x.key, next); err != nil {
			s.cfg.Log.Error("remember the state of a shell session", "sandbox", s.cfg.ID, "err", err)
			next, end.Lost = before, true
		}
	}
	s.mu.Lock()
	there := s.open[e.Session] == x
	x.rec = next
	abandoned := x.concludeLocked()
	s.mu.Unlock()
	switch {
	case !there:
		// Closed meanwhile, perhaps before it was saved.
		if err := s.cfg.Memory.Forget(x.key); err != nil {
			s.cfg.Log.Warn("forget a shell session", "sandbox", s.cfg.ID, "err", err)
		}
	case abandoned:
		s.drop(x)
	}
	end.Cwd = next.State.Cwd
	return end
}

// settled is a session after one of its commands. room bounds its state, in bytes.
func settled(rec remembered, e sessions.Settling, room int) (remembered, sessions.ShellEnd) {
	var end sessions.ShellEnd
	if f := e.Result.StartFailure; f != nil {
		if f.Kind == "cwd" && !rec.Opening {
			rec.State.Cwd = []byte("/")
			f.Message += "; the session goes on in /"
		}
		return rec, end
	}
	d, told := parse(e.State, e.Token, rec.State)
	switch {
	case told && d.syntax && e.Result.ExitCode == syntaxStatus:
		end.SyntaxError = true
	case !told || d.syntax || d.state.size() > room || !rec.Opening && d.kind != rec.Kind:
		end.Lost = true
	case rec.Opening:
		rec.Kind, rec.Interpreter = d.kind, d.interpreter
		rec.Opening = len(rec.Interpreter) == 0 || rec.Interpreter[0] != '/' || len(rec.Interpreter) >= maxPath
		rec.State = d.state
		return rec, end
	default:
		rec.State = d.state
	}
	if !rec.Opening {
		rec.State.Status = e.Result.ExitCode & 0xff
	}
	return rec, end
}

// syntaxStatus is the exit code of a shell that could not parse its script.
const syntaxStatus = 2
