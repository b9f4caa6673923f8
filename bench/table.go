package bench

import (
	"fmt"
	"io"
	"math"
	"slices"
	"strings"
)

// quiet is the part of stolen time up to which figures are good.
const quiet = 0.05

// WriteTable writes a document for people.
func WriteTable(w io.Writer, d Document) error {
	var b strings.Builder
	if d.Title != "" {
		fmt.Fprintf(&b, "%s; %s apart\n", d.Title, count(d.Warmup, "warm-up"))
	}
	many := countMetrics(d) > 1
	rates := map[string]float64{}
	for _, r := range d.Results {
		if r.Value != nil && r.Unit == "1/s" && !many {
			rates[r.Of] = *r.Value
		}
	}
	rows := [][]string{{"", "n", "p50", "p90", "p99", "max", "rate"}}
	if many {
		rows[0] = rows[0][:6]
	}
	for _, r := range d.Results {
		if r.Value != nil {
			continue
		}
		row := []string{r.Of, fmt.Sprint(r.N)}
		if many {
			row[0] = label(r)
		}
		for _, v := range []*float64{r.P50, r.P90, r.P99, r.Max} {
			if v == nil {
				row = append(row, "-")
				continue
			}
			row = append(row, number(*v)+" "+r.Unit)
		}
		if v, ok := rates[r.Of]; ok {
			row = append(row, fmt.Sprintf("%.0f/s", v))
		} else if !many {
			row = append(row, "-")
		}
		rows = append(rows, row)
	}
	writeRows(&b, rows)
	var ends []string
	for _, r := range d.Results {
		if r.Against == "" || r.Value == nil {
			continue
		}
		end := against(r, countPeers(d) > 2)
		if many { // on lines of their own
			metric, _, _ := strings.Cut(r.Metric, "_added")
			fmt.Fprintf(&b, "%s: %s\n", words(metric), end)
			continue
		}
		ends = append(ends, end)
	}
	if many {
		rows = nil
		for _, r := range d.Results {
			if r.Value != nil && r.Against == "" {
				rows = append(rows, []string{label(r), number(*r.Value) + " " + r.Unit})
			}
		}
		if len(rows) > 0 {
			writeRows(&b, rows)
		}
	}
	ends = append(ends, count(d.Failures, "failure"), fmt.Sprintf("%.0f s", d.Seconds))
	b.WriteString(strings.Join(ends, "; ") + "\n")
	kernel, _, _ := strings.Cut(d.Machine.Kernel, "-")
	verdict := "quiet enough"
	if d.Steal > quiet || d.Load > float64(d.Machine.CPUs) {
		verdict = "too much to trust these figures"
	}
	fmt.Fprintf(&b, "%s, Linux %s, cgroup %s; steal %.1f %%, load %.1f before: %s\n", count(d.Machine.CPUs, "CPU"), kernel,
		d.Machine.Cgroup, d.Steal*100, d.Load, verdict)
	for _, n := range d.Notes {
		fmt.Fprintf(&b, "note: %s\n", n)
	}
	for _, e := range d.Errors {
		fmt.Fprintf(&b, "failed: %s\n", e)
	}
	_, err := io.WriteString(w, b.String())
	return err
}

// against says how a peer compares with another, which is named if there are others.
func against(r Result, name bool) string {
	v, low, high := *r.Value, r.Low, r.High
	if strings.HasSuffix(r.Metric, "_added") {
		return fmt.Sprintf("%s takes %.3f ms more than %s at p50 %s", r.Of, v, r.Against, interval(r.N, 3, low, high))
	}
	word := "faster"
	if v < 1 {
		v, word = 1/v, "slower"
		if low != nil {
			least, most := 1 / *high, 1 / *low
			low, high = &least, &most
		}
	}
	than := ""
	if name {
		than = " than " + r.Against
	}
	return fmt.Sprintf("%s is %.1f times %s%s at p50 %s", r.Of, v, word, than, interval(r.N, 1, low, high))
}

// interval is what so many rounds bound.
func interval(rounds, decimals int, low, high *float64) string {
	if low == nil || high == nil {
		return fmt.Sprintf("(%s: an interval needs %d)", count(rounds, "round"), LeastRounds)
	}
	return fmt.Sprintf("(95 %%: %.*f to %.*f)", decimals, *low, decimals, *high)
}

// label is what a row is about where there are several things.
func label(r Result) string { return words(r.Metric) + ", " + r.Of }

func words(metric string) string { return strings.ReplaceAll(metric, "_", " ") }

// countMetrics is how many things were measured.
func countMetrics(d Document) int {
	var seen []string
	for _, r := range d.Results {
		if r.Value == nil && !slices.Contains(seen, r.Metric) {
			seen = append(seen, r.Metric)
		}
	}
	return len(seen)
}

// count says how many.
func count(n int, of string) string {
	if n == 1 {
		return "1 " + of
	}
	return fmt.Sprintf("%d %ss", n, of)
}

func countPeers(d Document) int {
	n := 0
	for _, r := range d.Results {
		if r.Value == nil {
			n++
		}
	}
	return n
}

// number has one decimal, and more where there would be nothing else.
func number(v float64) string {
	if v < 0.1 && v > 0 {
		return fmt.Sprintf("%.3f", math.Max(v, 0.001))
	}
	return fmt.Sprintf("%.1f", v)
}

// writeRows sets the first column left and the others right, two blanks apart.
func writeRows(b *strings.Builder, rows [][]string) {
	width := make([]int, len(rows[0]))
	for _, r := range rows {
		for i, c := range r {
			width[i] = max(width[i], len(c))
		}
	}
	for _, r := range rows {
		fmt.Fprintf(b, "%-*s", width[0], r[0])
		for i, c := range r[1:] {
			fmt.Fprintf(b, "  %*s", width[i+1], c)
		}
		b.WriteByte('\n')
	}
}
