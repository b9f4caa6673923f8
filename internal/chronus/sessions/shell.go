package sessions

import (
	"bytes"
	"errors"
	"fmt"
	"os"

	"github.com/sandsea/sandsea/api/errdefs"
	"github.com/sandsea/sandsea/internal/chronus"
	"github.com/sandsea/sandsea/internal/linux/memfd"
)

// MaxState bounds what a command of a shell session may leave, in bytes; the kernel holds it to that.
const MaxState = 1 << 20

// Handover makes a command one of a shell session, see package shells.
type Handover struct {
	Session string
	// Token is remembered with the command and given to Settle.
	Token string
	// Digest is what the command's key stands for, together with its input.
	Digest string
	// Argv, and Env unless it is nil, are executed in place of the Command's, which is what is shown.
	Argv []string
	Env  []string
	// Program is what the command finds at the descriptor chronus.StateIn.
	Program []byte
}

// Shells is told of the commands of shell sessions.
type Shells interface {
	// Begin is called once for each command, before it is started; again by Load for those that have not ended. An
	// error refuses the start.
	Begin(session string, number int64) error
	// Settle is called once for each command that Begin let through, when its end is known and before it is remembered,
	// so that a crash in between repeats it. It may add to the result's start failure.
	Settle(s Settling) ShellEnd
	// Unstarted is called instead of Settle when a command was never started and is forgotten.
	Unstarted(session string, number int64)
}

// Settling is a command of a shell session that has ended.
type Settling struct {
	Session string
	Token   string
	Number  int64
	Result  *Result
	// State is what it left, with zeros behind it; nil when that is not known.
	State []byte
}

// ShellEnd is what became of a session by one of its commands.
type ShellEnd struct {
	Cwd         []byte `json:"cwd,omitempty"`
	SyntaxError bool   `json:"syntax_error,omitempty"`
	// Lost: the session is as it was before the command.
	Lost bool `json:"lost,omitempty"`
}

// shellEntry is what is remembered of a command's session.
type shellEntry struct {
	Session string    `json:"session"`
	Token   string    `json:"token"`
	End     *ShellEnd `json:"end,omitempty"`
}

func (h *Handover) entry() *shellEntry {
	if h == nil {
		return nil
	}
	return &shellEntry{Session: h.Session, Token: h.Token}
}

// Keyed finds the shell session in whose name a key was used; it is empty for a key of another call.
func (t *Table) Keyed(key string) (session string, known bool) {
	t.mu.Lock()
	p := t.keys[key]
	t.mu.Unlock()
	if key == "" || p == nil {
		return "", false
	}
	return p.session(), true
}

func (p *proc) session() string {
	p.mu.Lock()
	defer p.mu.Unlock()
	if p.Shell == nil {
		return ""
	}
	return p.Shell.Session
}

func (p *proc) shellEnd() *ShellEnd {
	p.mu.Lock()
	defer p.mu.Unlock()
	if p.Shell == nil {
		return nil
	}
	return p.Shell.End
}

// beginShell tells the session of a new command.
func (t *Table) beginShell(p *proc) error {
	session := p.session()
	if session == "" {
		return nil
	}
	if t.cfg.Shells == nil {
		return errdefs.New(errdefs.Internal, p.object(), "there are no shell sessions")
	}
	return t.cfg.Shells.Begin(session, p.number)
}

// unstarted tells the session of a command that never was.
func (t *Table) unstarted(p *proc) {
	if session := p.session(); session != "" && t.cfg.Shells != nil {
		t.cfg.Shells.Unstarted(session, p.number)
	}
}

// settleShell hands over what a command has left; nil for a command without a session.
func (t *Table) settleShell(p *proc, r *Result) *shellEntry {
	p.mu.Lock()
	shell, left := p.Shell, p.state
	p.state = nil
	p.mu.Unlock()
	if shell == nil {
		return nil
	}
	var raw []byte
	if left != nil {
		var err error
		if raw, err = readState(left); err != nil {
			t.cfg.Log.Warn("read what a shell left", "sandbox", t.cfg.ID, "process", p.number, "err", err)
		}
		_ = left.Close()
	}
	next := *shell
	next.End = &ShellEnd{Lost: true}
	if t.cfg.Shells != nil {
		*next.End = t.cfg.Shells.Settle(Settling{
			Session: shell.Session, Token: shell.Token, Number: p.number, Result: r, State: raw,
		})
	}
	return &next
}

// readState reads up to the first zero byte: most of the file is empty.
func readState(f *os.File) ([]byte, error) {
	buf := make([]byte, 16<<10)
	for at := 0; ; {
		n, err := f.ReadAt(buf[at:min(len(buf), MaxState)], int64(at))
		if i := bytes.IndexByte(buf[at:at+n], 0); i >= 0 {
			return buf[:at+i], nil
		}
		at += n
		if err != nil || at >= MaxState {
			return buf[:at], err
		}
		buf = append(buf, make([]byte, len(buf))...)
	}
}

// plumbState makes the files of a command of a session. What the command gets are names of them: whoever inherits those
// without being its user can do nothing with them.
func (t *Table) plumbState(h *Handover, uid, gid int, ends *undo) (in, out, state *os.File, err error) {
	mine := func(f *os.File, mode os.FileMode) error {
		if err := f.Chown(uid, gid); err != nil && os.Geteuid() == 0 {
			return err
		}
		return f.Chmod(mode)
	}
	program, err := memfd.Sealed("sandsea-shell", h.Program)
	if err != nil {
		return nil, nil, nil, err
	}
	ends.push(program.Close)
	if state, err = memfd.Sized("sandsea-state", MaxState); err != nil {
		return nil, nil, nil, err
	}
	in, err1 := memfd.Path(program)
	out, err2 := memfd.Path(state)
	for _, f := range []*os.File{in, out} {
		if f != nil {
			ends.push(f.Close)
		}
	}
	if err := errors.Join(err1, err2, mine(program, 0o400), mine(state, 0o600)); err != nil {
		_ = state.Close()
		return nil, nil, nil, fmt.Errorf("make the files of a shell session: %w", err)
	}
	return in, out, state, nil
}

// over is a start with what a session executes.
func (h *Handover) over(s chronus.Spawn) chronus.Spawn {
	s.Argv = h.Argv
	if h.Env != nil {
		s.Env = h.Env
	}
	return s
}
