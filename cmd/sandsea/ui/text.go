package ui

import (
	"fmt"
	"strconv"
	"strings"
	"time"
	"unicode"
	"unicode/utf8"

	"github.com/sandsea/sandsea/api/errdefs"
	"github.com/sandsea/sandsea/internal/typo"
)

// Text makes a foreign string harmless to a terminal: control characters, bidirectional overrides, zero-width characters
// and bytes that are no UTF-8 become visible escapes.
func Text(s string) string {
	clean := true
	for _, r := range s {
		if Hostile(r) {
			clean = false
			break
		}
	}
	if clean && utf8.ValidString(s) {
		return s
	}
	var b strings.Builder
	for len(s) > 0 {
		r, n := utf8.DecodeRuneInString(s)
		switch {
		case r == utf8.RuneError && n <= 1:
			fmt.Fprintf(&b, `\x%02x`, s[0])
		case Hostile(r) && r < 0x100:
			fmt.Fprintf(&b, `\x%02x`, r)
		case Hostile(r):
			fmt.Fprintf(&b, `\u%04x`, r)
		default:
			b.WriteRune(r)
		}
		s = s[n:]
	}
	return b.String()
}

// Hostile reports whether a terminal could obey r, or show other text than there is.
func Hostile(r rune) bool {
	return unicode.IsControl(r) || unicode.In(r, unicode.Bidi_Control, unicode.Cf, unicode.Zl, unicode.Zp) || r == utf8.RuneError
}

// Count is a number for people: "103,411".
func Count(n int64) string {
	text := strconv.FormatInt(n, 10)
	for i := len(text) - 3; i > 0 && text[i-1] != '-'; i -= 3 {
		text = text[:i] + "," + text[i:]
	}
	return text
}

// Size is a number of bytes for people: "38M", "1.2G", 1024-based.
func Size(n int64) string {
	v := float64(n)
	for _, u := range []string{"B", "K", "M", "G", "T"} {
		if v < 1024 || u == "T" {
			if u == "B" || v >= 10 || v == float64(int64(v)) {
				return fmt.Sprintf("%.0f%s", v, strings.TrimSuffix(u, "B"))
			}
			return fmt.Sprintf("%.1f%s", v, u)
		}
		v /= 1024
	}
	return ""
}

// LongSize is Size with its unit written out: "204 MiB".
func LongSize(n int64) string {
	v := float64(n)
	for _, u := range []string{"B", "KiB", "MiB", "GiB", "TiB"} {
		if v < 1024 || u == "TiB" {
			if u == "B" || v >= 100 || v == float64(int64(v)) {
				return fmt.Sprintf("%.0f %s", v, u)
			}
			return fmt.Sprintf("%.1f %s", v, u)
		}
		v /= 1024
	}
	return ""
}

// ParseSize reads "512M" or "512MiB", 1024-based. A bare number is refused, so that nobody guesses its unit.
func ParseSize(flag, s string) (int64, error) {
	bad := func(why string) error {
		return errdefs.New(errdefs.Invalid, "", "--%s %s: %s", flag, Text(s), why).WithField(flag, "").
			WithHint("Write it as 512M or 2G (1024-based)")
	}
	num := strings.TrimRight(s, "KMGTiBkmgtb")
	unit := strings.ToUpper(strings.TrimSuffix(strings.TrimSuffix(strings.ToLower(s[len(num):]), "b"), "i"))
	var v float64
	if _, err := fmt.Sscanf(num+"\n", "%g\n", &v); err != nil || !(v > 0) {
		return 0, bad("no size")
	}
	shift, ok := map[string]uint{"K": 10, "M": 20, "G": 30, "T": 40}[unit]
	if !ok {
		return 0, errdefs.New(errdefs.Invalid, "", "--%s %s: give a unit, as %sM (1024-based)", flag, Text(s), Text(num)).
			WithField(flag, "").WithHint("K, M, G and T are known")
	}
	v *= float64(uint64(1) << shift)
	if v >= 1<<62 {
		return 0, bad("too large")
	}
	return int64(v), nil
}

// Span is a limit of time as people write it: "200 ms", "60 s", "5 min", "2 h".
func Span(d time.Duration) string {
	switch {
	case d%time.Second != 0:
		return fmt.Sprintf("%d ms", d.Milliseconds())
	case d <= 2*time.Minute || d%time.Minute != 0:
		return fmt.Sprintf("%d s", int(d.Seconds()))
	case d <= 2*time.Hour || d%time.Hour != 0:
		return fmt.Sprintf("%d min", int(d.Minutes()))
	}
	return fmt.Sprintf("%d h", int(d.Hours()))
}

// Took is how long something took: "0.3 ms", "48 ms", "8.2 s".
func Took(d time.Duration) string {
	switch {
	case d < 10*time.Millisecond:
		return fmt.Sprintf("%.1f ms", d.Seconds()*1000)
	case d < time.Second:
		return fmt.Sprintf("%d ms", d.Milliseconds())
	case d < time.Minute:
		return fmt.Sprintf("%.1f s", d.Seconds())
	}
	return fmt.Sprintf("%d:%02d min", int(d.Minutes()), int(d.Seconds())%60)
}

// Nearest gives the candidate within edit distance 2 of s, or "".
func Nearest(s string, candidates []string) string {
	best, found := 3, ""
	for _, c := range candidates {
		if d := typo.Distance(s, c, 2); d < best {
			best, found = d, c
		}
	}
	return found
}
