package ui

import (
	"bytes"
	"strings"
	"testing"
	"time"
)

func TestTextMakesForeignStringsHarmless(t *testing.T) {
	for in, want := range map[string]string{
		"plain ünïcode":       "plain ünïcode",
		"\x1b[31mred":         `\x1b[31mred`,
		"a\u202eb":            `a\u202eb`,
		"zero\u200bwidth":     `zero\u200bwidth`,
		"bad\xff":             `bad\xff`,
		"line\nbreak\r\x7f":   `line\x0abreak\x0d\x7f`,
		"c1\u009b31m":         `c1\x9b31m`,
		"para\u2029separator": `para\u2029separator`,
	} {
		if got := Text(in); got != want {
			t.Errorf("Text(%q) = %q, want %q", in, got, want)
		}
	}
}

func TestParseSizeWantsAUnit(t *testing.T) {
	for in, want := range map[string]int64{
		"512M": 512 << 20, "512MiB": 512 << 20, "2G": 2 << 30, "1.5g": 3 << 29, "64K": 64 << 10, "1T": 1 << 40, "8mb": 8 << 20,
	} {
		if got, err := ParseSize("memory", in); err != nil || got != want {
			t.Errorf("ParseSize(%q) = %d, %v, want %d", in, got, err, want)
		}
	}
	for _, in := range []string{"512", "", "M", "-1M", "1e400M", "NaNM", "5x", "1 2M", "99999999999T"} {
		got, err := ParseSize("memory", in)
		if err == nil {
			t.Errorf("ParseSize(%q) = %d, want an error", in, got)
		} else if !strings.Contains(err.Error(), "--memory") {
			t.Errorf("ParseSize(%q): %v: does not name the flag", in, err)
		}
	}
}

func TestSizes(t *testing.T) {
	for n, want := range map[int64]string{0: "0", 512: "512", 1536: "1.5K", 38 << 20: "38M", 512 << 20: "512M", 4 << 30: "4G"} {
		if got := Size(n); got != want {
			t.Errorf("Size(%d) = %q, want %q", n, got, want)
		}
	}
}

func TestNearestFindsTyposOnly(t *testing.T) {
	words := []string{"stop", "run", "image", "inspect"}
	for in, want := range map[string]string{"stpo": "stop", "imgae": "image", "runn": "run", "xyzzy": "", "insp": ""} {
		if got := Nearest(in, words); got != want {
			t.Errorf("Nearest(%q) = %q, want %q", in, got, want)
		}
	}
}

func TestTableFitsTheTerminalAndNeverCutsInAPipe(t *testing.T) {
	cols := []Column{{Name: "ID"}, {Name: "IMAGE", Cut: true}, {Name: "NODE", Drop: 1}, {Name: "LABELS", Drop: 2}}
	rows := [][]Cell{{{Text: "s7q3k2m5"}, {Text: strings.Repeat("debian", 10)}, {Text: "n1"}, {Text: strings.Repeat("x", 40)}}}
	for _, width := range []int{40, 80, 120} {
		var out bytes.Buffer
		(&IO{Out: &out, OutTTY: true, Width: width}).Table(cols, rows)
		for line := range strings.Lines(out.String()) {
			if n := len([]rune(strings.TrimSuffix(line, "\n"))); n > width {
				t.Errorf("width %d: line of %d letters: %q", width, n, line)
			}
		}
	}
	var out bytes.Buffer
	(&IO{Out: &out, Width: 40}).Table(cols, rows)
	if !strings.Contains(out.String(), strings.Repeat("debian", 10)) || strings.Contains(out.String(), "\x1b") {
		t.Errorf("piped table is cut or coloured: %q", out.String())
	}
}

func TestPlainProgressPrintsStartAndEnd(t *testing.T) {
	var errs bytes.Buffer
	now := time.Unix(0, 0)
	p := (&IO{Err: &errs}).NewProgress()
	p.now, p.began, p.every = func() time.Time { return now }, now, 0
	p.Update("download", 1<<20, 4<<20, "bytes", "", false)
	now = now.Add(time.Second)
	p.Update("download", 2<<20, 4<<20, "bytes", "", false)
	now = now.Add(time.Second)
	p.Update("download", 4<<20, 4<<20, "bytes", "", true)
	lines := strings.Split(strings.TrimSpace(errs.String()), "\n")
	if len(lines) != 2 || !strings.HasPrefix(lines[0], "00:00.0 download 1 MiB / 4 MiB") || !strings.Contains(lines[1], "done: 4 MiB / 4 MiB") {
		t.Errorf("got %q", lines)
	}
}

func TestProgressGoesOnWithoutNews(t *testing.T) {
	var errs bytes.Buffer
	now := time.Unix(0, 0)
	p := (&IO{Err: &errs}).NewProgress()
	p.now, p.began, p.every = func() time.Time { return now }, now, 0
	p.Update("unpack", 3, 130, "packages", "", false)
	now = now.Add(9 * time.Second)
	p.again()
	now = now.Add(2 * time.Second)
	p.again()
	p.Update("unpack", 130, 130, "packages", "", true)
	now = now.Add(time.Minute)
	p.again()
	p.Clear()
	want := "00:00.0 unpack 3 / 130 packages  [>-------------------]\n00:11.0 unpack 3 / 130 packages  [>-------------------]  ETA 7:46 min\n" +
		"00:11.0 unpack done: 130 / 130 packages"
	if got := errs.String(); !strings.HasPrefix(got, want) || strings.Count(got, "\n") != 3 {
		t.Errorf("got %q", got)
	}
}

func TestProgressPastItsEndHasNoTimeToCome(t *testing.T) {
	st := stage{name: "write", done: 255 << 20, total: 242 << 20, unit: "bytes", began: time.Unix(0, 0)}
	if got := st.line(time.Unix(10, 0)); strings.Contains(got, "ETA") || !strings.HasPrefix(got, "255 MiB / 242 MiB  [====================]") {
		t.Errorf("got %q", got)
	}
}

func TestModesAreUndone(t *testing.T) {
	for in, want := range map[string]string{
		"plain text\n":                          "",
		"\x1b[?1049h\x1b[?25lvim":               "\x1b[?1049l\x1b[?25h",
		"\x1b[?1049h\x1b[?1049l":                "",
		"\x1b[?1000;1006h":                      "\x1b[?1000l\x1b[?1006l",
		"\x1b[1;31mred":                         "\x1b[m",
		"\x1b[31mred\x1b[0m \x1b[4mu\x1b[m":     "",
		"\x1b=\x1b[?2004h":                      "\x1b[?2004l\x1b>",
		"\x1b[?2004h\x1bc":                      "",
		"\x1b[?99999h\x1b[?xh\x1b[?h\x1b]0;t\a": "",
		"\x1b[?7l":                              "\x1b[?7h",
		"\x1b[" + strings.Repeat("1;", 200):     "",
	} {
		for name, cut := range map[string]int{"whole": len(in), "byte by byte": 1} {
			var m Modes
			for i := 0; i < len(in); i += cut {
				m.Watch([]byte(in[i:min(i+cut, len(in))]))
			}
			if got := m.Undo(); got != want || m.Undo() != "" {
				t.Errorf("%q %s: undone by %q, want %q", in, name, got, want)
			}
		}
	}
}

func TestCount(t *testing.T) {
	for n, want := range map[int64]string{
		0: "0", 999: "999", 1000: "1,000", 103411: "103,411", 1234567: "1,234,567", -999: "-999", -1000: "-1,000",
	} {
		if got := Count(n); got != want {
			t.Errorf("Count(%d) = %s, want %s", n, got, want)
		}
	}
}
