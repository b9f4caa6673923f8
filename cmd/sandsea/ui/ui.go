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
	// Yes answers every question.
	Yes bool
}

// Stdio finds out about the process's own streams. color is auto, always or never; env looks up variables.
func Stdio(color string, env func(string) string) *IO {
	s := &IO{In: os.Stdin, Out: os.Stdout, Err: os.Stderr, Width: 80}
	s.OutTTY = term.IsTerminal(int(os.Stdout.Fd()))
	s.ErrTTY = term.IsTerminal(int(os.Stderr.Fd()))
	s.InTTY = term.IsTerminal(int(os.Stdin.Fd()))
	if w, _, err := term.GetSize(int(os.Stdout.Fd())); err == nil && w > 0 {
		s.Width = max(w, 40)
	}
	switch {
	case color == "always":
		s.Color = true
	case color == "never", env("NO_COLOR") != "":
	case env("CLICOLOR_FORCE") != "" && env("CLICOLOR_FORCE") != "0":
		s.Color = true
	default:
		s.Color = s.OutTTY && env("TERM") != "dumb" && env("TERM") != ""
	}
	if env("TERM") == "dumb" {
		s.ErrTTY = false // no cursor movement, so plain progress
	}
	return s
}

// Note prints one line of ours to standard error.
func (s *IO) Note(format string, args ...any) {
	fmt.Fprintf(s.Err, format+"\n", args...)
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
