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

func TestSizesAndAges(t *testing.T) {
	for n, want := range map[int64]string{0: "0", 512: "512", 1536: "1.5K", 38 << 20: "38M", 512 << 20: "512M", 4 << 30: "4G"} {
		if got := Size(n); got != want {
			t.Errorf("Size(%d) = %q, want %q", n, got, want)
		}
	}
	for d, want := range map[time.Duration]string{
		2 * time.Second: "2s", 3 * time.Minute: "3m", 2 * time.Hour: "2h", 5 * 24 * time.Hour: "5d", -time.Second: "0s",
	} {
		if got := Age(d); got != want {
			t.Errorf("Age(%v) = %q, want %q", d, got, want)
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
	p.now, p.began = func() time.Time { return now }, now
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
