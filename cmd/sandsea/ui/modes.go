package ui

import (
	"fmt"
	"slices"
	"strings"
)

// Modes watches the output that a program elsewhere sends to our terminal and remembers which modes it has switched on,
// so that a session that breaks off can switch them off: the other screen, the mouse, a hidden cursor. Pieces of output
// may be cut anywhere. Not safe for concurrent use.
type Modes struct {
	held string       // an unfinished sequence
	on   map[int]bool // private modes that differ from how a terminal starts, by number
	// coloured and keypad are set by sequences of their own.
	coloured, keypad bool
}

// undone are the private modes that must not outlive a session; the first are restored first. A cursor that is hidden
// (25) and lines that do not wrap (7) are the other way round: they start switched on.
var undone = []int{1049, 1047, 47, 1, 7, 9, 25, 66, 1000, 1001, 1002, 1003, 1004, 1005, 1006, 1015, 1016, 2004, 2026}

func startsOn(mode int) bool { return mode == 7 || mode == 25 }

// sequenceMost bounds what is held back: longer sequences switch no modes.
const sequenceMost = 64

// Watch reads a piece of output.
func (m *Modes) Watch(b []byte) {
	text := m.held + string(b)
	m.held = ""
	for {
		i := strings.IndexByte(text, '\x1b')
		if i < 0 {
			return
		}
		text = text[i:]
		n := m.sequence(text)
		if n == 0 {
			if len(text) < sequenceMost {
				m.held = text
				return
			}
			n = 1
		}
		text = text[n:]
	}
}

// sequence takes the sequence that s begins with and gives its length, 0 when its end has not come.
func (m *Modes) sequence(s string) int {
	if len(s) < 2 {
		return 0
	}
	switch s[1] {
	case '=', '>':
		m.keypad = s[1] == '='
		return 2
	case 'c': // reset of everything
		*m = Modes{}
		return 2
	case '[':
	default:
		return 1
	}
	end := strings.IndexFunc(s[2:], func(r rune) bool { return r < ' ' || r >= '@' })
	if end < 0 {
		return 0
	}
	body, final := s[2:2+end], s[2+end]
	switch {
	case final == 'm':
		m.coloured = strings.Trim(body, "0;") != ""
	case (final == 'h' || final == 'l') && strings.HasPrefix(body, "?"):
		m.set(body[1:], final == 'h')
	}
	if final < ' ' {
		return 2 + end
	}
	return 3 + end
}

func (m *Modes) set(list string, on bool) {
	for word := range strings.SplitSeq(list, ";") {
		var mode int
		if _, err := fmt.Sscan(word, &mode); err != nil || !slices.Contains(undone, mode) {
			continue
		}
		if m.on == nil {
			m.on = map[int]bool{}
		}
		m.on[mode] = on != startsOn(mode)
	}
}

// Undo is what switches off all that is on, empty when nothing is; nothing is on after it.
func (m *Modes) Undo() string {
	var b strings.Builder
	for _, mode := range undone {
		if !m.on[mode] {
			continue
		}
		final := 'l'
		if startsOn(mode) {
			final = 'h'
		}
		fmt.Fprintf(&b, "\x1b[?%d%c", mode, final)
	}
	if m.keypad {
		b.WriteString("\x1b>")
	}
	if m.coloured {
		b.WriteString("\x1b[m")
	}
	*m = Modes{}
	return b.String()
}
