package main

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"os"
	"os/signal"
	"slices"
	"strings"
	"syscall"
	"time"

	tea "charm.land/bubbletea/v2"
	"github.com/charmbracelet/x/ansi"

	"github.com/sandsea/sandsea/api/errdefs"
	"github.com/sandsea/sandsea/cmd/sandsea/ui"
)

// watchTop shows looks on the whole screen until the person leaves.
func (a *app) watchTop(ctx context.Context, s *sampler) error {
	ctx, cancel := context.WithCancelCause(ctx)
	defer cancel(nil)
	hup := make(chan os.Signal, 1)
	signal.Notify(hup, syscall.SIGHUP)
	defer signal.Stop(hup)
	go func() {
		select {
		case <-hup:
			cancel(errHungUp)
		case <-ctx.Done():
		}
	}()
	columns, lines := a.io.Size()
	v := &topView{a: a, ctx: ctx, sampler: s, width: columns, height: lines}
	_, err := tea.NewProgram(v, tea.WithContext(ctx), tea.WithoutSignalHandler()).Run()
	switch {
	case context.Cause(ctx) != nil:
		return context.Cause(ctx)
	case v.failed != nil:
		return v.failed
	case err != nil:
		return fmt.Errorf("top: %w", err)
	case v.interrupted:
		return &exitError{code: exitInterrupted}
	}
	return nil
}

// topView is the screen of top. All its fields belong to the program's own goroutine.
type topView struct {
	a       *app
	ctx     context.Context // commands of the program get none of their own
	sampler *sampler

	width, height int
	look          *look
	by            int    // in the table's sorts
	filter        string // rows that hold it are shown
	typing        bool   // the filter is being typed
	selected      string // id
	stopping      string // id that x was pressed on
	note          string // what happened last, or is wrong
	page          []string
	interrupted   bool
	failed        error
}

// What comes back from calls.
type (
	looked struct {
		look *look
		err  error
	}
	inspected struct {
		lines []string
		err   error
	}
	stopped struct {
		id  string
		err error
	}
	again struct{}
)

func (v *topView) Init() tea.Cmd {
	return func() tea.Msg { return looking(v.sampler.twice(v.ctx)) }
}

func looking(l *look, err error) tea.Msg { return looked{l, err} }

func (v *topView) Update(msg tea.Msg) (tea.Model, tea.Cmd) {
	switch m := msg.(type) {
	case tea.WindowSizeMsg:
		v.width, v.height = m.Width, m.Height
	case again:
		return v, func() tea.Msg { return looking(v.sampler.look(v.ctx)) }
	case looked:
		return v, v.took(m)
	case inspected:
		v.page, v.note = m.lines, problem(m.err)
	case stopped:
		v.note = "stopped " + short(m.id)
		if m.err != nil {
			v.note = problem(m.err)
		}
	case tea.KeyPressMsg:
		return v, v.key(m)
	}
	return v, nil
}

func problem(err error) string {
	if err == nil {
		return ""
	}
	return ui.Text(sentence(explain(err)))
}

// took shows a look. A server that is away may come back; anything else ends the program.
func (v *topView) took(m looked) tea.Cmd {
	if m.err != nil && !errors.Is(m.err, errdefs.Unavailable) {
		v.failed = m.err
		return tea.Quit
	}
	if m.err != nil {
		v.note = problem(m.err)
	} else {
		if v.look == nil || strings.HasPrefix(v.note, "cannot reach") {
			v.note = ""
		}
		v.look = m.look
		sortTop(v.look.rows, v.sorts()[v.by])
	}
	return tea.Tick(topEvery, func(time.Time) tea.Msg { return again{} })
}

func (v *topView) key(m tea.KeyPressMsg) tea.Cmd {
	key := m.String()
	switch {
	case key == "ctrl+c":
		v.interrupted = true
		return tea.Quit
	case v.page != nil:
		v.page = nil
	case v.stopping != "":
		id := v.stopping
		v.stopping = ""
		if key == "y" || key == "Y" {
			v.note = "stopping " + short(id)
			return func() tea.Msg { return stopped{id, v.sampler.c.Sandbox(id).Stop(v.ctx)} }
		}
	case v.typing:
		v.typeFilter(m, key)
	default:
		return v.command(key)
	}
	return nil
}

func (v *topView) typeFilter(m tea.KeyPressMsg, key string) {
	switch key {
	case "enter":
		v.typing = false
	case "esc":
		v.typing, v.filter = false, ""
	case "backspace":
		if r := []rune(v.filter); len(r) > 0 {
			v.filter = string(r[:len(r)-1])
		}
	default:
		v.filter += m.Key().Text
	}
}

func (v *topView) command(key string) tea.Cmd {
	rows := v.rows()
	at := slices.IndexFunc(rows, func(r topRow) bool { return r.sb.GetId() == v.selected })
	v.note = ""
	switch key {
	case "q", "esc":
		return tea.Quit
	case "/":
		v.typing = true
	case "s":
		v.by = (v.by + 1) % len(v.sorts())
		if v.look != nil {
			sortTop(v.look.rows, v.sorts()[v.by])
		}
	case "down", "j":
		v.choose(rows, at+1)
	case "up", "k":
		v.choose(rows, max(0, at-1))
	case "x", "enter":
		if at < 0 {
			v.note = "choose a sandbox first: up and down"
			return nil
		}
		id := v.selected
		if key == "x" {
			v.stopping = id
			return nil
		}
		return func() tea.Msg { return v.inspect(id) }
	}
	return nil
}

func (v *topView) sorts() []string { return v.sampler.view.sorts }

func (v *topView) choose(rows []topRow, at int) {
	if len(rows) > 0 {
		v.selected = rows[min(at, len(rows)-1)].sb.GetId()
	}
}

// inspect is what `sandsea inspect` shows, as a page.
func (v *topView) inspect(id string) tea.Msg {
	sb := v.sampler.c.Sandbox(id)
	info, err := sb.Info(v.ctx)
	if err != nil {
		return inspected{err: err}
	}
	procs, err := sb.Processes(v.ctx)
	if err != nil {
		return inspected{err: err}
	}
	var b bytes.Buffer
	page := &app{now: v.a.now, io: &ui.IO{Out: &b, OutTTY: true, Width: v.width, Color: v.a.io.Color, ASCII: v.a.io.ASCII}}
	page.printSandbox(info, procs)
	return inspected{lines: strings.Split(strings.TrimSpace(b.String()), "\n")}
}

// rows are those that the filter lets through.
func (v *topView) rows() []topRow {
	if v.look == nil {
		return nil
	}
	if v.filter == "" {
		return v.look.rows
	}
	var out []topRow
	for _, r := range v.look.rows {
		text := strings.Join([]string{
			r.sb.GetId(), imageWord(r.sb), labelWords(r.sb.GetSpec().GetLabels()), r.sb.GetNode(), r.command, r.last,
		}, " ")
		if strings.Contains(strings.ToLower(text), strings.ToLower(v.filter)) {
			out = append(out, r)
		}
	}
	return out
}

func (v *topView) View() tea.View {
	lines := v.body()
	lines = lines[:min(len(lines), max(1, v.height-1))]
	for len(lines) < v.height-1 {
		lines = append(lines, "")
	}
	lines = append(lines, v.bottom())
	for i, l := range lines {
		lines[i] = ansi.Truncate(l, v.width, "")
	}
	out := tea.NewView(strings.Join(lines, "\n"))
	out.AltScreen = true
	return out
}

func (v *topView) body() []string {
	if v.page != nil {
		return slices.Clone(v.page)
	}
	if v.look == nil {
		return []string{"looking at what runs"}
	}
	var lines []string
	for _, n := range v.look.nodes {
		lines = append(lines, v.sampler.view.head(v.look, n))
	}
	rows := v.rows()
	if len(rows) == 0 {
		return append(lines, "nothing runs here")
	}
	room := max(1, v.height-len(lines)-2)
	at := max(0, slices.IndexFunc(rows, func(r topRow) bool { return r.sb.GetId() == v.selected }))
	from := max(0, min(at-room/2, len(rows)-room))
	some := rows[from:min(len(rows), from+room)]
	cells := topCells(v.sampler.view, rowView{&ui.IO{OutTTY: true, ASCII: v.a.io.ASCII}, v.a.now()}, some)
	for i, l := range screen(v.a.io, max(1, v.width-2), v.sampler.view.columns, cells) {
		mark := "  "
		if i > 0 && some[i-1].sb.GetId() == v.selected {
			mark = "> "
		}
		lines = append(lines, mark+l)
	}
	return lines
}

// bottom is the line of questions, news and keys.
func (v *topView) bottom() string {
	switch {
	case v.page != nil:
		return "any key goes back"
	case v.stopping != "":
		return "Stop " + short(v.stopping) + "? Its files are lost, its logs stay. [y/N]"
	case v.typing:
		return "filter: " + ui.Text(v.filter)
	case v.note != "":
		return v.note
	}
	out := "/ filter  s sort (" + v.sorts()[v.by] + ")  enter inspect  x stop  q quit"
	if v.filter != "" {
		out = "filter: " + ui.Text(v.filter) + "  " + out
	}
	return out
}
