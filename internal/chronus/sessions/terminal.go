package sessions

import (
	"context"
	"errors"
	"fmt"
	"math"
	"os"
	"slices"
	"strings"

	"github.com/sandsea/sandsea/api/errdefs"
	"github.com/sandsea/sandsea/internal/chronus"
	"github.com/sandsea/sandsea/internal/linux/pipe"
	"github.com/sandsea/sandsea/internal/linux/tty"
	"github.com/sandsea/sandsea/internal/record"
)

// DefaultTerm is TERM of commands on a terminal whose environment does not set it.
const DefaultTerm = "xterm-256color"

// TerminalSize is measured in characters; 1 to 65535 each.
type TerminalSize struct {
	Columns uint32 `json:"columns"`
	Rows    uint32 `json:"rows"`
}

func (s TerminalSize) validate(field string) error {
	for _, side := range []struct {
		name  string
		value uint32
	}{{"columns", s.Columns}, {"rows", s.Rows}} {
		if side.value < 1 || side.value > math.MaxUint16 {
			name := field + "." + side.name
			return errdefs.New(errdefs.Invalid, "", "%s: %d is not between 1 and 65535", name, side.value).
				WithField(name, "1 to 65535").WithHint("80 columns and 24 rows suit most programs")
		}
	}
	return nil
}

func (s TerminalSize) kernel() tty.Size {
	return tty.Size{Columns: uint16(s.Columns), Rows: uint16(s.Rows)}
}

// terminal is what this side has of a command's terminal, beside the pipe that its output goes through.
type terminal struct {
	master *os.File
	feed   *os.File // write end of the pipe, for the keeper
	// peer is the command's own end. While its first process runs the output has no end, whatever the command closes and
	// opens again.
	peer *os.File
}

func (t *terminal) close() {
	for _, f := range []*os.File{t.master, t.feed, t.peer} {
		if f != nil {
			_ = f.Close()
		}
	}
}

// plumbTerminal is plumb for a command on a terminal. A *chronus.StartError is the sandbox's own fault.
func (t *Table) plumbTerminal(ctx context.Context, line Line, p *proc, s Start, ids chronus.IDs, back *undo,
) (io plumbing, err error) {
	if err := os.MkdirAll(t.dir(), 0o700); err != nil {
		return io, fmt.Errorf("make the output directory of %s: %w", t.object(), err)
	}
	term := &terminal{}
	back.push(func() error {
		term.close() // closed twice, if the command had it
		return nil
	})
	if term.master, err = line.Channel.OpenPTY(ctx); err != nil {
		return io, fmt.Errorf("make a terminal for %s: %w", p.object(), err)
	}
	if err := tty.SetSize(term.master, s.Terminal.kernel()); err != nil {
		return io, err
	}
	if term.peer, err = tty.Peer(term.master); err != nil {
		return io, err
	}
	// Its group is the sandbox's tty by the mount, its mode 0620.
	if err := term.peer.Chown(int(line.UIDBase+ids.UID), -1); err != nil && os.Geteuid() == 0 {
		return io, fmt.Errorf("give a terminal to the user of %s: %w", p.object(), err)
	}
	r, w, err := pipe.New()
	if err != nil {
		return io, fmt.Errorf("make a pipe for %s: %w", p.object(), err)
	}
	term.feed = w
	path := record.Path(t.cfg.Dir, t.cfg.ID, p.number, record.Stdout)
	f, err := os.OpenFile(path, os.O_RDWR|os.O_CREATE|os.O_EXCL, 0o600)
	if err != nil {
		_ = r.Close()
		return io, fmt.Errorf("make the record of %s: %w", p.object(), err)
	}
	back.push(func() error {
		_, _ = r.Close(), f.Close()
		return os.Remove(path)
	})
	if io.feed, err = tty.Duplicate(term.master); err != nil {
		return io, err
	}
	back.push(func() error {
		_ = io.feed.Close()
		return nil
	})
	io.in, io.out = term.peer, term.peer
	io.outputs = []*output{{stream: record.Stdout, pipe: r, file: f, tty: term, drained: make(chan struct{})}}
	return io, nil
}

// withTerm adds TERM where it is not set.
func withTerm(env []string) []string {
	if slices.ContainsFunc(env, func(s string) bool { return strings.HasPrefix(s, "TERM=") }) {
		return env
	}
	return append(env, "TERM="+DefaultTerm)
}

// adoptTerminal makes an output's terminal whole again from what the keeper held.
func (o *output) adoptTerminal(master, feed *os.File, running bool) error {
	if master == nil {
		return nil
	}
	o.tty = &terminal{master: master, feed: feed}
	if !running || o.closed {
		return nil
	}
	var err error
	o.tty.peer, err = tty.Peer(master)
	return err
}

// terminalLocked is the command's terminal, nil if it has none or it was given back.
func (p *proc) terminalLocked() *terminal {
	for _, o := range p.out {
		if o.tty != nil {
			return o.tty
		}
	}
	return nil
}

// hungUpLocked: nobody has the command's terminal open any more. What is sent there the kernel may still take.
func (p *proc) hungUpLocked() bool {
	return slices.ContainsFunc(p.out, func(o *output) bool { return o.tty != nil && o.closed })
}

// releaseTerminal lets the output end with the last process that has the terminal open.
func (p *proc) releaseTerminal() {
	p.mu.Lock()
	defer p.mu.Unlock()
	if term := p.terminalLocked(); term != nil && term.peer != nil {
		_ = term.peer.Close()
		term.peer = nil
	}
}

// sizeLocked brings what is known of the terminal's size up to date: programs set it too.
func (p *proc) sizeLocked() {
	term := p.terminalLocked()
	if p.Terminal == nil || term == nil {
		return
	}
	if s, err := tty.GetSize(term.master); err == nil && s.Columns > 0 && s.Rows > 0 {
		p.Terminal = &TerminalSize{Columns: uint32(s.Columns), Rows: uint32(s.Rows)}
	}
}

// quiet reports whether nothing lies between the writers of a terminal and the record.
func (o *output) quiet() bool {
	ready, err := tty.Readable(o.tty.master)
	if err != nil || ready {
		return err != nil
	}
	n, err := o.buffered()
	return err != nil || n == 0
}

// Resize sets the size of a command's terminal; its foreground group gets SIGWINCH if it is another one. The last call
// wins.
func (t *Table) Resize(ctx context.Context, number int64, size TerminalSize) error {
	if err := size.validate("size"); err != nil {
		return err
	}
	p, err := t.find(number)
	if err != nil {
		return err
	}
	if err := p.wait(ctx, p.begun); err != nil {
		return err
	}
	p.mu.Lock()
	defer p.mu.Unlock()
	term := p.terminalLocked()
	switch {
	case p.Terminal == nil:
		return errdefs.New(errdefs.FailedPrecondition, p.object(), "does not run on a terminal").
			WithHint("Start it with a terminal")
	case term == nil || p.endedLocked():
		return errdefs.New(errdefs.FailedPrecondition, p.object(), "has ended").WithHint("See its result")
	}
	if err := tty.SetSize(term.master, size.kernel()); err != nil {
		return fmt.Errorf("resize the terminal of %s: %w", p.object(), err)
	}
	p.Terminal = &size
	return nil
}

// refuseEndOfInput: a terminal has no end of input that one could close.
func (p *proc) refuseEndOfInput() error {
	p.mu.Lock()
	defer p.mu.Unlock()
	if p.Input != inputTerminal {
		return nil
	}
	return errdefs.New(errdefs.FailedPrecondition, p.object(), "runs on a terminal, whose input cannot be closed").
		WithHint("Send the byte 4 (Ctrl-D), as a keyboard does")
}

// ownFault is a start that failed since the sandbox has no room for a terminal.
func ownFault(c Command, cwd string, err error) *StartFailure {
	if se, ok := errors.AsType[*chronus.StartError](err); ok {
		return startFailure(c, cwd, string(se.Step), se.Errno, se.Interpreter)
	}
	return nil
}
