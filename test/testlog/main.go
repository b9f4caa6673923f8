// Command testlog reads `go test -json` and prints what a person needs: a line per package, the whole output of what
// failed, and the counts. It writes the skipped tests with their reasons to a file and exits 1 when anything failed.
package main

import (
	"bufio"
	"encoding/json"
	"flag"
	"fmt"
	"io"
	"os"
	"strings"
	"time"
)

// event is one line of `go test -json` (go doc test2json).
type event struct {
	Action, Package, Test, Output, ImportPath string
	Elapsed                                   float64
}

type key struct{ pkg, test string }

func main() {
	skips := flag.String("skips", "", "file for the skipped tests")
	flag.Parse()
	os.Exit(run(os.Stdin, os.Stdout, *skips))
}

func run(in io.Reader, out io.Writer, skipFile string) int {
	began := time.Now()
	output := map[key]*strings.Builder{}
	var skipped []string
	passed, failed := 0, 0
	broken := false
	r := bufio.NewReaderSize(in, 1<<20)
	for {
		line, err := r.ReadBytes('\n')
		if len(line) > 0 {
			var e event
			if json.Unmarshal(line, &e) != nil {
				_, _ = out.Write(line) // not JSON: the go command itself speaks
				continue
			}
			if e.Package == "" {
				e.Package = e.ImportPath
			}
			k := key{e.Package, e.Test}
			if e.Test != "" && e.Output == "" {
				switch e.Action {
				case "pass":
					passed++
				case "fail":
					failed++
				}
			}
			switch e.Action {
			case "output", "build-output":
				b := output[k]
				if b == nil {
					b = &strings.Builder{}
					output[k] = b
				}
				b.WriteString(e.Output)
			case "skip":
				if e.Test != "" {
					skipped = append(skipped, fmt.Sprintf("%s %s: %s", short(e.Package), e.Test, reason(output[k])))
				}
				delete(output, k)
			case "pass":
				if e.Test == "" {
					fmt.Fprintf(out, "ok    %-60s %6.1f s\n", short(e.Package), e.Elapsed)
				}
				delete(output, k)
			case "build-fail":
				broken = true
				fmt.Fprintf(out, "FAIL  %s\n%s", short(e.Package), text(output[k]))
			case "fail":
				broken = true
				fmt.Fprintf(out, "FAIL  %s %s  %.1f s\n%s", short(e.Package), e.Test, e.Elapsed, text(output[k]))
				delete(output, k)
			}
		}
		if err != nil {
			break
		}
	}
	if skipFile != "" {
		if err := os.WriteFile(skipFile, []byte(strings.Join(append(skipped, ""), "\n")), 0o644); err != nil {
			fmt.Fprintln(out, err)
			broken = true
		}
	}
	fmt.Fprintf(out, "Go tests took %.0f s\n", time.Since(began).Seconds())
	fmt.Fprintf(out, "%d passed, %d failed, %d skipped\n", passed, failed, len(skipped))
	// A run of no test shows nothing.
	if broken || failed > 0 || passed == 0 {
		return 1
	}
	return 0
}

func short(pkg string) string { return strings.TrimPrefix(pkg, "github.com/sandsea/sandsea/") }

func text(b *strings.Builder) string {
	if b == nil {
		return ""
	}
	return b.String()
}

// reason is the line that t.Skip printed: "    file_test.go:12: no mmdebstrap".
func reason(b *strings.Builder) string {
	for line := range strings.Lines(text(b)) {
		if file, why, ok := strings.Cut(strings.TrimSpace(line), ": "); ok && strings.Contains(file, ".go:") {
			return why
		}
	}
	return "no reason given"
}
