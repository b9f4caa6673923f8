// Package ui is what the command line shows: tables, sizes, ages, progress, questions, and foreign text made harmless.
//
// Standard output carries results only; everything here that is no result goes to standard error.
package ui

import (
	"bufio"
	"fmt"
	"io"
	"os"
	"strings"
	"sync"
	"sync/atomic"

	"golang.org/x/term"
)

// IO are the three streams of a command and what is known of them.
type IO struct {
	In  io.Reader
	Out io.Writer
	Err io.Writer
	// OutTTY and ErrTTY say whether people look at them.
	OutTTY, ErrTTY, InTTY bool
	// Width of the terminal, 80 when unknown.
	Width int
	// Color is true when states may be coloured.
	Color bool
	// ASCII keeps to ASCII what is ours, for locales without UTF-8.
	ASCII bool
	// Yes answers every question.
	Yes bool
	// Quiet leaves out notes, waits and progress: standard error is for programs.
	Quiet bool

	raw atomic.Bool // standard error is a terminal that belongs to a program elsewhere
}

// Stdio finds out about the process's own streams; env looks up variables.
func Stdio(env func(string) string) *IO {
	s := &IO{In: os.Stdin, Out: &output{w: os.Stdout}, Err: os.Stderr, Width: 80}
	s.OutTTY = term.IsTerminal(int(os.Stdout.Fd()))
	s.ErrTTY = term.IsTerminal(int(os.Stderr.Fd()))
	s.InTTY = term.IsTerminal(int(os.Stdin.Fd()))
	for _, f := range []*os.File{os.Stdout, os.Stderr} {
		if w, _, err := term.GetSize(int(f.Fd())); err == nil && w > 0 {
			s.Width = max(w, 40)
			break
		}
	}
	if env("TERM") == "dumb" {
		s.ErrTTY = false // no cursor movement, so plain progress
	}
	s.ASCII = !utf8Locale(env)
	s.UseColor("auto", env)
	return s
}

// UseColor decides about colours: always, never, or auto, which asks the environment and the terminal.
func (s *IO) UseColor(color string, env func(string) string) {
	switch {
	case color == "always":
		s.Color = true
	case color == "never", env("NO_COLOR") != "":
		s.Color = false
	case env("CLICOLOR_FORCE") != "" && env("CLICOLOR_FORCE") != "0":
		s.Color = true
	default:
		s.Color = s.OutTTY && env("TERM") != "dumb" && env("TERM") != ""
	}
}

func utf8Locale(env func(string) string) bool {
	for _, name := range []string{"LC_ALL", "LC_CTYPE", "LANG"} {
		if v := strings.ToLower(env(name)); v != "" {
			return strings.Contains(v, "utf-8") || strings.Contains(v, "utf8")
		}
	}
	return false
}

// output remembers that a write failed, so that nobody takes half a result for a whole one.
type output struct {
	w   io.Writer
	mu  sync.Mutex
	err error // guarded by mu
}

func (o *output) Write(b []byte) (int, error) {
	o.mu.Lock()
	defer o.mu.Unlock()
	if o.err != nil {
		return 0, o.err
	}
	n, err := o.w.Write(b)
	o.err = err
	return n, err
}

// OutError is the first error of a write to standard output.
func (s *IO) OutError() error {
	o, ok := s.Out.(*output)
	if !ok {
		return nil
	}
	o.mu.Lock()
	defer o.mu.Unlock()
	return o.err
}

// Dash is a rule of two letters before a heading of ours.
func (s *IO) Dash() string {
	if s.ASCII {
		return "--"
	}
	return "──"
}

// Plain is text of ours for a locale without UTF-8 where that is what there is.
func (s *IO) Plain(text string) string {
	if !s.ASCII {
		return text
	}
	return strings.NewReplacer("…", "...", "─", "-").Replace(text)
}

// Note prints one line of ours to standard error.
func (s *IO) Note(format string, args ...any) {
	if s.Quiet {
		return
	}
	text := fmt.Sprintf(format+"\n", args...)
	if s.raw.Load() {
		text = lines(text)
	}
	_, _ = io.WriteString(s.Err, text) // there is nowhere else to say it
}

// The colours of states and verdicts.
const (
	Green  = "32"
	Red    = "31"
	Yellow = "33"
	Gray   = "90"
)

// Paint colours text when colours are on.
func (s *IO) Paint(color, text string) string {
	if !s.Color || color == "" {
		return text
	}
	return "\x1b[" + color + "m" + text + "\x1b[0m"
}

// Ask puts a yes-or-no question, default no. Without a terminal to ask on it says no and ok is false.
func (s *IO) Ask(question string) (yes, ok bool) {
	if s.Yes {
		return true, true
	}
	if !s.InTTY || !s.ErrTTY {
		return false, false
	}
	fmt.Fprintf(s.Err, "%s [y/N] ", question)
	line, _ := bufio.NewReader(io.LimitReader(s.In, 1024)).ReadString('\n')
	switch strings.ToLower(strings.TrimSpace(line)) {
	case "y", "yes":
		return true, true
	}
	return false, true
}
