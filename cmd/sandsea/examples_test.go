package main

import (
	"maps"
	"net"
	"os"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"testing"

	"github.com/sandsea/sandsea/internal/testkit/testserver"
	"github.com/sandsea/sandsea/internal/testkit/wait"
)

// elsewhere are the beginnings of examples that other tests run, or that need what is not here, with where that is.
var elsewhere = map[string]string{
	"sudo sandsea up":                                "test/newcomer, test/e2e",
	"sudo sandsea down":                              "test/newcomer, test/e2e",
	"sudo sandsea edge":                              "the tests of clusters",
	"sandsea server":                                 "the tests of clusters",
	"sandsea node invite":                            "the tests of clusters",
	"sudo sandsea bench create":                      "package bench, make bench",
	"sudo sandsea bench net":                         "test/perf",
	"sudo sandsea doctor":                            "TestOutputIsAsWrittenDown",
	"sandsea image import docker":                    "the tests of registries and archives in internal/layers/build",
	"docker save":                                    "likewise",
	"sandsea shell -u nobody":                        "test/e2e: the fake node has no users",
	"sandsea create --image nginx:1.27 --entrypoint": "test/e2e: the fake node starts no entrypoints",
}

// endless are examples that follow something until they are stopped.
var endless = regexp.MustCompile(`^sandsea (events|logs -f|net log -f)`)

// TestExamplesOfHelpRun runs every example of every help as it stands, with the ids, files and images that it speaks of.
func TestExamplesOfHelpRun(t *testing.T) {
	lines := map[string]bool{}
	for _, c := range commands(t) {
		for line := range strings.Lines(examples(c)) {
			line, _, _ = strings.Cut(line, "   #")
			lines[strings.TrimSpace(line)] = true
		}
	}
	if len(lines) < 50 {
		t.Fatalf("only %d examples", len(lines))
	}
	for line := range lines {
		if slices.ContainsFunc(slices.Collect(maps.Keys(elsewhere)), func(begin string) bool { return strings.HasPrefix(line, begin) }) {
			continue
		}
		t.Run(line, func(t *testing.T) {
			t.Parallel()
			runExample(t, line)
		})
	}
}

func runExample(t *testing.T, line string) {
	images := []string{"debian:bookworm", "py", "src-17", "pytest", "task-17", "task-18", "app"}
	if regexp.MustCompile(`\bsandsea (run|create)\b`).MatchString(line) && !regexp.MustCompile(`--(image|base)\b`).MatchString(line) {
		images = []string{"py"} // who names none has one
	}
	if strings.Contains(line, "image compose task-17") {
		images = images[:4] // it makes that one
	}
	s := testserver.Start(t, testserver.Config{Images: images})
	dir, home := t.TempDir(), t.TempDir()
	ids := map[string]string{
		"s7q3k2m5": living(t, s, "--image", images[0], "-l", "job=eval-12"), "sb3m6zd5": living(t, s, "--image", images[0]),
	}
	env := append(against(s), "HOME="+home)
	for name, text := range map[string]string{
		"big.tar": "x", "task-17.tar": "x", "src/a.txt": "a", "server.sh": "#!/bin/sh\nexit 0\n",
		"build/image/oci-layout": `{"imageLayoutVersion":"1.0.0"}`, "build/image/index.json": "{}",
		"policy.toml": "[services]\npypi = true\n[[phases]]\nname = \"agent\"\n[[phases]]\nname = \"grade\"\n",
		"bin/jq":      "#!/bin/sh\nexec python3 -c 'import json, sys; json.load(sys.stdin)'\n",
	} {
		path := filepath.Join(dir, name)
		if err := os.MkdirAll(filepath.Dir(path), 0o755); err != nil {
			t.Fatal(err)
		}
		if err := os.WriteFile(path, []byte(text), 0o755); err != nil {
			t.Fatal(err)
		}
	}
	if err := os.MkdirAll(filepath.Join(home, ".config/fish/completions"), 0o755); err != nil {
		t.Fatal(err)
	}
	box := ids["s7q3k2m5"]
	for _, c := range []string{"mkdir -p work w; echo r > work/report.xml", "echo two", "echo three"} {
		program{args: []string{"exec", box, "--", "sh", "-c", c}, env: env}.run(t)
	}
	program{args: []string{"cp", filepath.Join(dir, "server.sh"), box + ":/server.sh"}, env: env}.run(t)
	program{args: []string{"net", "set", box, "--file", filepath.Join(dir, "policy.toml")}, env: env}.run(t)
	s.Flow(box, traffic()[1])
	for short, id := range ids {
		line = strings.ReplaceAll(line, short, id[:8])
	}
	if strings.Contains(line, "CURSOR") {
		x := following(t, program{args: []string{"--json", "events"}, env: env})
		wait.Until(t, limit, func() bool {
			living(t, s, "--image", images[0])
			return strings.Contains(x.out.String(), `"cursor":"`)
		}, "a cursor")
		line = strings.ReplaceAll(line, "CURSOR", regexp.MustCompile(`"cursor":"([^"]+)"`).FindStringSubmatch(x.out.String())[1])
	}
	env = append(env, "PATH="+filepath.Join(dir, "bin")+":"+os.Getenv("PATH"))
	if typed, ok := typedAt(line); ok {
		words := strings.Fields(strings.TrimPrefix(line, "sandsea "))
		x := onTerminal(t, 80, env, words...)
		x.types(typed)
		if code, text := x.exits(); code != 0 && code != exitInterrupted {
			t.Errorf("exit %d, %q", code, text)
		}
		return
	}
	script := "set -o pipefail; shopt -s expand_aliases; fpath=(x \"$HOME\"); cd '" + dir + "'\n" + line
	if endless.MatchString(line) {
		script = "cd '" + dir + "'; timeout --foreground 1 " + line
	}
	r := program{args: []string{"-c", script}, env: env, path: "bash"}.run(t)
	switch {
	case endless.MatchString(line) && (r.code == 124 || r.code == 0):
	case regexp.MustCompile(`sandsea (run|exec) `).MatchString(line) && r.code != exitPlatform: // the code is the command's
	case strings.Contains(line, "net check ") && r.code == 1 && strings.HasPrefix(r.stdout, "DENY"):
	case r.code != 0:
		t.Errorf("exit %d, %s%s", r.code, r.stdout, r.stderr)
	}
}

// typedAt is what a person types to leave an example that needs a terminal.
func typedAt(line string) (string, bool) {
	switch {
	case strings.HasPrefix(line, "sandsea shell"):
		return "exit\r", true
	case strings.Contains(line, "exec -it"):
		return "exit()\r", true
	case regexp.MustCompile(`^sandsea (net )?top`).MatchString(line) && !strings.Contains(line, "--json"):
		return "q", true
	}
	return "", false
}

// Every command that an error or a note names must be one.
func TestHintsNameRealCommands(t *testing.T) {
	all := commands(t)
	var files []string
	for _, pattern := range []string{"testdata/errors/*.txt", "testdata/errors/real/*.txt", "testdata/samples/*.txt"} {
		found, err := filepath.Glob(pattern)
		if err != nil {
			t.Fatal(err)
		}
		files = append(files, found...)
	}
	if len(files) < 50 {
		t.Fatalf("only %d files", len(files))
	}
	for _, file := range files {
		text, err := os.ReadFile(file)
		if err != nil {
			t.Fatal(err)
		}
		if _, after, ok := strings.Cut(string(text), "\nsandsea: "); ok {
			text = []byte(after) // not what was typed: that may be wrong
		}
		for _, found := range regexp.MustCompile(`: (?:sudo )?sandsea ([a-z][^".\n)]*)`).FindAllStringSubmatch(string(text), -1) {
			checkLine(t, all, found[1])
		}
	}
}

// Completion asks the server for ids and does not wait long for it: one that never answers leaves no ids.
func TestCompletionDoesNotWaitForTheServer(t *testing.T) {
	silent, err := (&net.ListenConfig{}).Listen(t.Context(), "tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	defer silent.Close() // it accepts and says nothing
	r := program{args: []string{"__complete", "inspect", ""}, env: []string{"SANDSEA_URL=http://" + silent.Addr().String(), "SANDSEA_TOKEN=x"}}.run(t)
	if r.code != 0 || r.stdout != ":4\n" {
		t.Errorf("%+v", r)
	}
}
