package ui

import (
	"fmt"
	"strings"
	"unicode/utf8"
)

// Column of a table. Columns with the highest Drop number go first when the terminal is narrow; 0 never goes. A Cut
// column gives up its middle before that.
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
			width[i] = max(width[i], utf8.RuneCountInString(r[i].Text))
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
			text := cut(c.Text, width[i])
			pad := strings.Repeat(" ", width[i]-utf8.RuneCountInString(text))
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

// fit narrows the cut column, then hides columns, until the table has at most limit letters.
func fit(cols []Column, width []int, show []bool, limit int) {
	total := func() int {
		n := -2
		for i := range cols {
			if show[i] {
				n += width[i] + 2
			}
		}
		return n
	}
	const least = 15
	for total() > limit {
		cutAt, dropAt := -1, -1
		for i, c := range cols {
			if show[i] && c.Cut && width[i] > least {
				cutAt = i
			}
			if show[i] && c.Drop > 0 && (dropAt < 0 || c.Drop > cols[dropAt].Drop) {
				dropAt = i
			}
		}
		switch {
		case cutAt >= 0:
			width[cutAt] = max(least, width[cutAt]-(total()-limit))
		case dropAt >= 0:
			show[dropAt] = false
		default:
			return
		}
	}
}

// cut takes out the middle of a text that is too long.
func cut(text string, width int) string {
	r := []rune(text)
	if len(r) <= width {
		return text
	}
	if width < 4 {
		return string(r[:width])
	}
	head := (width - 1) / 2
	return string(r[:head]) + "…" + string(r[len(r)-(width-1-head):])
}
