package main

import (
	"bytes"
	"os"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"
	"github.com/spf13/cobra"

	"github.com/sandsea/sandsea/cmd/sandsea/ui"
)

// commands are all that people see, with their paths as arguments.
func commands(t *testing.T) map[string]*cobra.Command {
	t.Helper()
	out := map[string]*cobra.Command{}
	var walk func(*cobra.Command)
	walk = func(c *cobra.Command) {
		out[strings.TrimSpace(strings.TrimPrefix(c.CommandPath(), "sandsea"))] = c
		for _, sub := range c.Commands() {
			if sub.IsAvailableCommand() {
				walk(sub)
			}
		}
	}
	var b bytes.Buffer
	walk((&app{io: &ui.IO{Out: &b, Err: &b}}).root())
	if len(out) < 20 {
		t.Fatalf("only %d commands", len(out))
	}
	return out
}

func TestHelpShowsExamplesFirst(t *testing.T) {
	for path, c := range commands(t) {
		t.Run(path, func(t *testing.T) {
			t.Parallel()
			r := program{args: append(strings.Fields(path), "--help")}.run(t)
			examples, usage := strings.Index(r.stdout, "\nExamples:\n"), strings.Index(r.stdout, "\nUsage:\n")
			if r.code != 0 || r.stderr != "" || examples < 0 || usage < examples {
				t.Errorf("exit %d, %s%s", r.code, r.stdout, r.stderr)
			}
			if c.Short == "" || !strings.HasPrefix(r.stdout, c.Short+"\n") {
				t.Errorf("does not begin with what it does: %s", r.stdout)
			}
			for line := range strings.Lines(r.stdout) {
				if n := len([]rune(strings.TrimSuffix(line, "\n"))); n > 100 {
					t.Errorf("a line of %d letters: %s", n, line)
				}
			}
		})
	}
}

// Examples in help must be commands that exist, with flags that exist.
func TestExamplesNameRealCommandsAndFlags(t *testing.T) {
	all := commands(t)
	for path, c := range all {
		found := regexp.MustCompile(`sandsea ([^|)\n#>]+)`).FindAllStringSubmatch(examples(c), -1)
		if len(found) == 0 {
			t.Errorf("%s: no example", path)
		}
		for _, f := range found {
			checkLine(t, all, f[1])
		}
	}
}

// The README's and the documents' lines too.
func TestDocumentsNameRealCommandsAndFlags(t *testing.T) {
	all := commands(t)
	docs, err := filepath.Glob("../../docs/*.md")
	if err != nil {
		t.Fatal(err)
	}
	for _, file := range append(docs, "../../README.md") {
		text, err := os.ReadFile(file)
		if err != nil {
			t.Fatal(err)
		}
		for _, block := range regexp.MustCompile("(?s)```.*?```").FindAllString(string(text), -1) {
			for _, f := range regexp.MustCompile(`(?m)^\s*(?:\$ )?(?:sudo )?(?:build/)?sandsea ([^|)\n#>]+)`).FindAllStringSubmatch(block, -1) {
				checkLine(t, all, f[1])
			}
		}
	}
}

// checkLine checks the words behind "sandsea".
func checkLine(t *testing.T, all map[string]*cobra.Command, line string) {
	t.Helper()
	words := strings.Fields(line)
	if len(words) == 0 || strings.HasPrefix(words[0], "--") {
		return
	}
	path := words[0]
	if len(words) > 1 && all[path+" "+words[1]] != nil {
		path += " " + words[1]
	}
	c := all[path]
	if c == nil {
		t.Errorf("sandsea %s: no such command", line)
		return
	}
	for _, w := range words {
		if w == "--" {
			return
		}
		name, _, _ := strings.Cut(strings.TrimLeft(w, "-"), "=")
		known := c.Flags().Lookup(name) != nil || c.Root().PersistentFlags().Lookup(name) != nil || name == "help"
		if strings.HasPrefix(w, "--") && !known {
			t.Errorf("sandsea %s: no flag %s", line, w)
		}
	}
}

func TestTheCommandsAreThoseThatScriptsRelyOn(t *testing.T) {
	var got []string
	for path := range commands(t) {
		if path != "" {
			got = append(got, path)
		}
	}
	slices.Sort(got)
	want := []string{
		"bench", "bench create", "bench net", "bench run", "completion", "config", "cp", "create", "doctor", "down", "edge", "endpoint", "events", "exec", "image", "image compose",
		"image import", "image inspect", "image ls", "image rm", "inspect", "logs", "ls", "net", "net check", "net log", "net phase", "net set", "net top",
		"node", "node invite", "node ls", "run", "server", "shell", "stop", "top", "up", "version",
		"whoami",
	}
	if diff := cmp.Diff(want, got); diff != "" {
		t.Errorf("(-want +got):\n%s", diff)
	}
}
