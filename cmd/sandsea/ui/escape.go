package ui

import (
	"io"
	"strings"
	"unicode/utf8"
)

// Escaper passes output of a command on to a terminal: text, line ends, tabs and colours as they are, everything else
// that a terminal would obey as visible escapes. What may be the beginning of something is held back until the next
// Write or Close, so that the pieces in which output comes do not matter. Not safe for concurrent use.
type Escaper struct {
	W io.Writer
	// Raw passes every byte on.
	Raw  bool
	held string
}

// heldMost bounds what is held back: longer sequences are no colours.
const heldMost = 32

// Write passes b on.
func (e *Escaper) Write(b []byte) (int, error) {
	if e.Raw {
		return e.W.Write(b)
	}
	text := e.held + string(b)
	n := len(text) - unfinished(text)
	e.held = text[n:]
	if _, err := io.WriteString(e.W, escape(text[:n])); err != nil {
		return 0, err
	}
	return len(b), nil
}

// Close passes on what was held back.
func (e *Escaper) Close() error {
	text := e.held
	e.held = ""
	_, err := io.WriteString(e.W, escape(text))
	return err
}

// unfinished is the length of what at the end of s could go on: a colour, a line end, a letter of several bytes.
func unfinished(s string) int {
	tail := s[max(0, len(s)-heldMost):]
	if i := strings.LastIndexByte(tail, '\x1b'); i >= 0 && colourLength(tail[i:]) < 0 {
		return len(tail) - i
	}
	if strings.HasSuffix(s, "\r") {
		return 1
	}
	for n := 1; n < utf8.UTFMax && n <= len(s); n++ {
		if c := s[len(s)-n]; utf8.RuneStart(c) {
			if !utf8.FullRuneInString(s[len(s)-n:]) {
				return n
			}
			break
		}
	}
	return 0
}

// escape keeps tabs, line ends and complete colours.
func escape(s string) string {
	var b strings.Builder
	for len(s) > 0 {
		i := strings.IndexAny(s, "\x1b\t\r\n")
		if i < 0 {
			b.WriteString(Text(s))
			break
		}
		b.WriteString(Text(s[:i]))
		n := 1
		switch s = s[i:]; {
		case s[0] == '\t' || s[0] == '\n':
			b.WriteByte(s[0])
		case strings.HasPrefix(s, "\r\n"):
			n = 2
			b.WriteString("\r\n")
		case colourLength(s) > 0:
			n = colourLength(s)
			b.WriteString(s[:n])
		default:
			b.WriteString(Text(s[:1]))
		}
		s = s[n:]
	}
	return b.String()
}

// colourLength is the length of the colour (ESC [ digits and ; m) that s begins with: 0 when it begins with none, -1 when
// it may yet become one.
func colourLength(s string) int {
	for i := range min(len(s), heldMost) {
		switch c := s[i]; {
		case i == 0 && c == '\x1b', i == 1 && c == '[', i > 1 && (c == ';' || c >= '0' && c <= '9'):
		case i > 1 && c == 'm':
			return i + 1
		default:
			return 0
		}
	}
	if len(s) >= heldMost {
		return 0
	}
	return -1
}
