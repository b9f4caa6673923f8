package ui

import (
	"fmt"
	"strings"

	"github.com/charmbracelet/x/ansi"
)

// Column of a table. When the terminal is narrow the column with the highest Drop number goes first; 0 never goes. A
// Cut column gives up its middle instead when its turn comes, and then stays.
type Column struct {
	Name  string
	Right bool
	Drop  int
	Cut   bool
}

// Cell is a text and the colour it is shown in.
type Cell struct {
	Text  string
	Color string
}

// Table prints rows under a header. On a terminal it fits the width, columns drop by priority and rows never wrap; in a
// pipe nothing is cut.
func (s *IO) Table(cols []Column, rows [][]Cell) {
	show := make([]bool, len(cols))
	width := make([]int, len(cols))
	for i, c := range cols {
		show[i] = true
		width[i] = len(c.Name)
		for _, r := range rows {
			width[i] = max(width[i], ansi.StringWidth(r[i].Text))
		}
	}
	if s.OutTTY {
		fit(cols, width, show, s.Width)
	}
	line := func(cell func(i int) Cell) {
		var b strings.Builder
		for i := range cols {
			if !show[i] {
				continue
			}
			if b.Len() > 0 {
				b.WriteString("  ")
			}
			c := cell(i)
			text := s.Middle(c.Text, width[i])
			pad := strings.Repeat(" ", max(0, width[i]-ansi.StringWidth(text)))
			if cols[i].Right {
				b.WriteString(pad + s.Paint(c.Color, text))
			} else {
				b.WriteString(s.Paint(c.Color, text) + pad)
			}
		}
		fmt.Fprintln(s.Out, strings.TrimRight(b.String(), " "))
	}
	line(func(i int) Cell { return Cell{Text: cols[i].Name} })
	for _, r := range rows {
		line(func(i int) Cell { return r[i] })
	}
}

// leastCut is what is left of a cut column at least.
const leastCut = 15

// fit hides and narrows columns in the order of their Drop numbers until the table has at most limit letters.
func fit(cols []Column, width []int, show []bool, limit int) {
	for {
		over := -2 - limit
		at := -1
		for i, c := range cols {
			if !show[i] {
				continue
			}
			over += width[i] + 2
			canGive := c.Cut && width[i] > leastCut || !c.Cut && c.Drop > 0
			if canGive && (at < 0 || c.Drop > cols[at].Drop) {
				at = i
			}
		}
		switch {
		case over <= 0 || at < 0:
			return
		case cols[at].Cut:
			width[at] = max(leastCut, width[at]-over)
		default:
			show[at] = false
		}
	}
}

// shortWidth is what one foreign text may take of a line of ours.
const shortWidth = 120

// Short makes a foreign text harmless and not too long for a line of ours.
func (s *IO) Short(text string) string {
	if len(text) > 16*shortWidth {
		text = text[:8*shortWidth] + text[len(text)-8*shortWidth:]
	}
	return s.Middle(Text(text), shortWidth)
}

// Middle takes out the middle of a text that is too long.
func (s *IO) Middle(text string, width int) string {
	if ansi.StringWidth(text) <= width {
		return text
	}
	dots := "…"
	if s.ASCII {
		dots = "..."
	}
	r := []rune(text)
	if width <= 2*len(dots) {
		return ansi.Truncate(text, width, "")
	}
	head, tail := len(r)/2, len(r)/2
	for ansi.StringWidth(string(r[:head])+dots+string(r[tail:])) > width {
		if head > len(r)-tail {
			head--
		} else {
			tail++
		}
	}
	return string(r[:head]) + dots + string(r[tail:])
}
