package ui

import (
	"fmt"
	"os"
	"strings"
	"sync"

	"golang.org/x/term"
)

// Raw hands the terminal on standard input to a program elsewhere: every key passes as it is, nothing is echoed. restore
// gives it back as it was; it may be called many times, from any goroutine. Notes go to lines of their own meanwhile.
func (s *IO) Raw() (restore func(), err error) {
	fd := int(os.Stdin.Fd())
	before, err := term.MakeRaw(fd)
	if err != nil {
		return nil, fmt.Errorf("take the terminal: %w", err)
	}
	s.raw.Store(term.IsTerminal(int(os.Stderr.Fd())))
	var once sync.Once
	return func() {
		once.Do(func() {
			s.raw.Store(false)
			_ = term.Restore(fd, before) // a terminal that is gone needs none
		})
	}, nil
}

// Size of the terminal on standard input in characters; 80 by 24 when it has none.
func (s *IO) Size() (columns, rows int) {
	columns, rows, err := term.GetSize(int(os.Stdin.Fd()))
	if err != nil || columns < 1 || rows < 1 {
		return 80, 24
	}
	return columns, rows
}

// lines makes text fit for a terminal in raw mode, whose cursor stands anywhere.
func lines(text string) string {
	return "\r\n" + strings.ReplaceAll(text, "\n", "\r\n")
}
