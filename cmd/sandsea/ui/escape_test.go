package ui

import (
	"bytes"
	"strings"
	"testing"
)

var escapes = map[string]string{
	"plain\n":                         "plain\n",
	"tab\tand\r\nline\n":              "tab\tand\r\nline\n",
	"over\rwritten":                   `over\x0dwritten`,
	"\x1b[31mred\x1b[0m":              "\x1b[31mred\x1b[0m",
	"\x1b[1;38;5;200mx\x1b[m":         "\x1b[1;38;5;200mx\x1b[m",
	"\x1b[2J":                         `\x1b[2J`,
	"\x1b]0;title\x07":                `\x1b]0;title\x07`,
	"\x1b":                            `\x1b`,
	"\x1b[31":                         `\x1b[31`,
	"ünï 名 \u202e":                    `ünï 名 \u202e`,
	"bad\xff\xc3":                     `bad\xff\xc3`,
	"\u009b31m":                       `\x9b31m`,
	"\x1b[" + strings.Repeat("1", 40): `\x1b[` + strings.Repeat("1", 40),
}

func TestEscaperPassesTextAndColoursOnly(t *testing.T) {
	for in, want := range escapes {
		// However it comes, in one or byte by byte, the result is the same.
		for _, size := range []int{len(in), 1, 2, 3} {
			var out bytes.Buffer
			e := &Escaper{W: &out}
			for rest := []byte(in); len(rest) > 0; {
				n := min(size, len(rest))
				if _, err := e.Write(rest[:n]); err != nil {
					t.Fatal(err)
				}
				rest = rest[n:]
			}
			if err := e.Close(); err != nil {
				t.Fatal(err)
			}
			if out.String() != want {
				t.Errorf("%q in pieces of %d: %q, want %q", in, size, out.String(), want)
			}
		}
	}
	var out bytes.Buffer
	raw := &Escaper{W: &out, Raw: true}
	if _, err := raw.Write([]byte("\x1b[2J\xff")); err != nil || raw.Close() != nil || out.String() != "\x1b[2J\xff" {
		t.Errorf("raw: %q, %v", out.String(), err)
	}
}

func FuzzEscaper(f *testing.F) {
	for in := range escapes {
		f.Add([]byte(in), 3)
	}
	f.Fuzz(func(t *testing.T, in []byte, cut int) {
		whole, parts := &bytes.Buffer{}, &bytes.Buffer{}
		one, two := &Escaper{W: whole}, &Escaper{W: parts}
		_, _ = one.Write(in)
		at := min(max(cut, 0), len(in))
		_, _ = two.Write(in[:at])
		_, _ = two.Write(in[at:])
		if one.Close() != nil || two.Close() != nil || whole.String() != parts.String() {
			t.Fatalf("cut at %d: %q, whole %q", at, parts.String(), whole.String())
		}
		for s := whole.String(); s != ""; {
			i := strings.IndexByte(s, '\x1b')
			if i < 0 {
				break
			}
			n := colourLength(s[i:])
			if n <= 0 {
				t.Fatalf("%q holds an escape that is no colour", whole.String())
			}
			s = s[i+n:]
		}
	})
}
