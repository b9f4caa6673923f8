package main

import (
	"encoding/json"
	"fmt"
	"path/filepath"
	"strings"
	"testing"

	sandseav1 "github.com/sandsea/sandsea/api/sandsea/v1"
	"github.com/sandsea/sandsea/internal/testkit/golden"
	"github.com/sandsea/sandsea/internal/testkit/testserver"
	"github.com/sandsea/sandsea/internal/testkit/wait"
)

// busy is a look with everything that a table must bear.
func busy() *look {
	list := fleet()
	rows := []topRow{
		{sb: list[0], cpu: 0.98, output: 1.2 * (1 << 20), command: "pytest -q --durations=10 tests/test_everything.py"},
		{sb: list[1], cpu: 1.5},
		{sb: list[3], command: "evil\x1b[2J"},
	}
	rows[0].sb.Usage = &sandseav1.Usage{MemoryBytes: 211 << 20, Pids: 14}
	rows[1].sb.Usage = &sandseav1.Usage{MemoryBytes: 3 << 30, Pids: 1000}
	rows[2].sb.Usage = &sandseav1.Usage{}
	sortTop(rows, "CPU%")
	return &look{
		nodes: []*sandseav1.Node{{Name: "n1", Cpus: 2, MemoryBytes: 25125558682}}, rows: rows, total: 3,
	}
}

func TestTopTable(t *testing.T) {
	for _, width := range []int{40, 80, 120, 0} {
		name := fmt.Sprintf("top_%d.txt", width)
		if width == 0 {
			name = "top_pipe.txt"
		}
		golden.Equal(t, filepath.Join("tables", name), show(width, false, func(a *app) { a.printTop(busy(), useView) }))
	}
}

func TestTopSorts(t *testing.T) {
	for by, want := range map[string]string{"CPU%": "s5xw2b4t s7q3k2m5 s9n0q8r7", "MEM": "s5xw2b4t s7q3k2m5 s9n0q8r7", "OUT/s": "s7q3k2m5 s5xw2b4t s9n0q8r7", "AGE": "s7q3k2m5 s5xw2b4t s9n0q8r7"} {
		rows := busy().rows
		sortTop(rows, by)
		var got []string
		for _, r := range rows {
			got = append(got, short(r.sb.GetId()))
		}
		if strings.Join(got, " ") != want {
			t.Errorf("%s: %v, want %s", by, got, want)
		}
	}
}

func TestTopInAPipeIsOneTable(t *testing.T) {
	s := testserver.Start(t, testserver.Config{})
	id := living(t, s)
	(program{args: []string{"exec", "--detach", id, "--", "sleep", "1000"}, env: against(s)}).run(t)
	r := program{args: []string{"top"}, env: against(s)}.run(t)
	if r.code != 0 || r.stderr != "" || !strings.Contains(r.stdout, "\n"+id) || !strings.Contains(r.stdout, "  sleep 1000\n") || !strings.HasPrefix(r.stdout, "n1  2 CPUs ") {
		t.Error(r)
	}
	r = program{args: []string{"top", "--json"}, env: against(s)}.run(t)
	var doc struct {
		Sandboxes []struct{ ID, Command string }
	}
	if err := json.Unmarshal([]byte(r.stdout), &doc); err != nil || len(doc.Sandboxes) != 1 || doc.Sandboxes[0].ID != id || doc.Sandboxes[0].Command != "sleep 1000" {
		t.Error(r, err)
	}
}

func TestTopOnATerminal(t *testing.T) {
	for _, columns := range []int{40, 80, 120} {
		t.Run(fmt.Sprint(columns), func(t *testing.T) {
			t.Parallel()
			s := testserver.Start(t, testserver.Config{})
			one, two := living(t, s), living(t, s)
			(program{args: []string{"exec", "--detach", one, "--", "sleep", "1000"}, env: against(s)}).run(t)
			x := onTerminal(t, columns, append(against(s), "NO_COLOR=1"), "top")
			x.untilShown("\n  " + one[:8])
			x.untilShown("\n  " + two[:8])
			x.types("/sleep\r")
			wait.Until(t, limit, func() bool { return !strings.Contains(x.shown(), two[:8]) }, "the filter filters")
			x.types("j")
			x.untilShown("\n> " + one[:8])
			x.types("\r")
			x.untilShown("id           " + one[:20])
			x.types(" ")
			x.untilShown("\n> " + one[:8])
			x.types("x")
			x.untilShown("Stop " + one[:8] + "? Its files")
			x.types("y")
			wait.Until(t, limit, func() bool { n, _ := s.Edge.Count(); return n == 1 }, "it is stopped")
			x.untilShown("nothing runs here")
			x.types("q")
			if code, text := x.exits(); code != 0 {
				t.Errorf("exit %d, %q", code, text)
			}
			x.wasGivenBack()
		})
	}
	s := testserver.Start(t, testserver.Config{})
	x := onTerminal(t, 80, against(s), "top")
	x.untilShown("nothing runs here")
	x.types("\x03")
	if code, text := x.exits(); code != 130 {
		t.Errorf("exit %d, %q", code, text)
	}
	x.wasGivenBack()
}
