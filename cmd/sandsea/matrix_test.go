package main

import (
	"bytes"
	"fmt"
	"os/exec"
	"path/filepath"
	"regexp"
	"strings"
	"testing"
	"unicode/utf8"

	"github.com/sandsea/sandsea/internal/testkit/golden"
	"github.com/sandsea/sandsea/internal/testkit/testserver"
)

// samples are commands whose output people look at, run against the server of stage.
func samples(id, ended string) map[string][]string {
	return map[string][]string{
		"ls":            {"ls"},
		"ls_all":        {"ls", "--all"},
		"ls_none":       {"ls", "-l", "job=none"},
		"image_ls":      {"image", "ls"},
		"image_inspect": {"image", "inspect", "py"},
		"node_ls":       {"node", "ls"},
		"inspect":       {"inspect", id},
		"inspect_ended": {"inspect", ended},
		"logs":          {"logs", id},
		"stop_dry":      {"stop", "--all", "--dry-run"},
		"net_log":       {"net", "log", "--utc", id},
		"net_check":     {"net", "check", id, "pypi:flask"},
		"whoami":        {"whoami"},
		"config":        {"config"},
		"help":          {"--help"},
		"help_run":      {"run", "--help"},
	}
}

// stage makes a server with something to show of everything, and one living and one ended sandbox.
func stage(t *testing.T) (s *testserver.Server, id, ended string) {
	t.Helper()
	s = testserver.Start(t, testserver.Config{Images: []string{"py", "debian:bookworm+git,python3"}})
	ended = living(t, s, "--image=py")
	id = living(t, s, "--image=debian:bookworm+git,python3", "--memory=1G", "-l", "job=eval-12", "--allow=pypi", "--allow=*.example.org:443",
		"--as-of=2024-06-01")
	s.Flow(id, traffic()...)
	for _, c := range []string{"echo plain; echo error >&2", `printf '\033[31mred\033[0m \033]0;title\007 \342\200\256 end\n'; exit 3`} {
		program{args: []string{"exec", id, "--", "sh", "-c", c}, env: against(s)}.run(t)
	}
	program{args: []string{"exec", id, "--", "pytst"}, env: against(s)}.run(t)
	program{args: []string{"exec", "--detach", id, "--", "sleep", "1000"}, env: against(s)}.run(t)
	if err := s.End(t.Context(), ended, "oom"); err != nil {
		t.Fatal(err)
	}
	(&situation{t: t, s: s}).settle(ended, "oom")
	return s, id, ended
}

// looks takes out of what is shown what differs from run to run, and keeps its width.
func looks(text string, s *testserver.Server) string {
	text = steady(text, s)
	for _, r := range []struct{ from, to string }{
		{`\bs[0-9a-hjkmnp-tv-z]{7}\b`, "s0123456"},
		{`\bs[0-9a-hjkmnp-tv-z]{26}\b`, "s0123456789abcdefghjkmnpqrs"},
		{`(?m)([ (])\d[smh]( ago|\)|,| |$)`, "${1}0s$2"},
		{`\bin 2[34]h\b`, "in 23h"},
		{`http://…\S*`, "http://…1:12345"},
		{`\b\d+(\.\d)? m?s\b`, "0.0 ms"},
		{`http://127\.0\.0\.1:\d+`, "http://URL"},
		{`sha256:[0-9a-f]{8,}`, "sha256:0123456789ab"},
		{`\b\d/100000\b`, "0/100000"}, // the picture of a node lags behind its sandboxes
	} {
		text = regexp.MustCompile(r.from).ReplaceAllString(text, r.to)
	}
	return text
}

func TestSamplesOnTerminals(t *testing.T) {
	s, id, ended := stage(t)
	for name, args := range samples(id, ended) {
		for _, columns := range []int{40, 80, 120} {
			t.Run(fmt.Sprintf("%s_%d", name, columns), func(t *testing.T) {
				x := onTerminal(t, columns, append(against(s), "NO_COLOR=1"), args...)
				code, text := x.exits()
				if code != 0 {
					t.Errorf("exit %d", code)
				}
				if name != "logs" && strings.Contains(text, "\x1b") { // logs pass the colours of commands
					t.Errorf("NO_COLOR, and yet: %q", text)
				}
				if table := strings.HasSuffix(name, "ls") || name == "ls_all" || name == "config" || name == "net_log"; table {
					for line := range strings.Lines(text) {
						if n := utf8.RuneCountInString(strings.TrimSuffix(line, "\n")); n > columns {
							t.Errorf("%d letters: %s", n, line)
						}
					}
				}
				if columns == 120 && name == "help" {
					return // as at 80
				}
				golden.Equal(t, filepath.Join("samples", fmt.Sprintf("%s_%d.txt", name, columns)), []byte(looks(text, s)))
			})
		}
	}
}

// What every sample keeps to wherever its output goes.
func TestSamplesEverywhere(t *testing.T) {
	s, id, ended := stage(t)
	shell := func(t *testing.T, line string, args []string) ran {
		t.Helper()
		p := program{args: append([]string{"-c", line, "sandsea"}, args...), env: against(s)}
		return p.through(t, "bash")
	}
	for name, args := range samples(id, ended) {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			// A pipe: nothing is cut, coloured or drawn.
			pipe := program{args: args, env: against(s)}.run(t)
			if pipe.code != 0 || name != "logs" && strings.Contains(pipe.stdout+pipe.stderr, "\x1b") || strings.Contains(pipe.stdout, "…") && !strings.HasPrefix(name, "help") {
				t.Errorf("in a pipe: exit %d, %q %q", pipe.code, pipe.stdout, pipe.stderr)
			}
			// A dumb terminal gets no escapes but those of the commands.
			if code, text := onTerminal(t, 80, append(against(s), "TERM=dumb"), args...).exits(); code != 0 || name != "logs" && strings.Contains(text, "\x1b") {
				t.Errorf("dumb: exit %d, %q", code, text)
			}
			// Another locale: what is ours is ASCII.
			code, text := onTerminal(t, 80, append(against(s), "LC_ALL=C", "NO_COLOR=1"), args...).exits()
			if i := strings.IndexFunc(text, func(r rune) bool { return r >= utf8.RuneSelf }); code != 0 || i >= 0 {
				t.Errorf("C locale: exit %d, %q", code, text[max(0, i-20):])
			}
			// A full standard output is said; a closed one and one that nobody reads any more are not.
			silent := pipe.stdout == ""
			if r := shell(t, `"$0" "$@" >/dev/full`, args); !silent && (r.code != 1 && r.code != exitPlatform || !strings.Contains(r.stderr, "no space left on device. Free some space\n")) {
				t.Errorf("full: %+v", r)
			}
			if r := shell(t, `"$0" "$@" >&-`, args); r.code != 0 {
				t.Errorf("closed: %+v", r)
			}
			if r := shell(t, `"$0" "$@" | head -c 1 >/dev/null; exit ${PIPESTATUS[0]}`, args); r.code != 0 && r.code != exitPipe || r.stderr != pipe.stderr && name != "logs" {
				t.Errorf("head: %+v", r)
			}
		})
	}
}

// through runs another program with the same surroundings.
func (p program) through(t *testing.T, name string) ran {
	t.Helper()
	cmd := exec.Command(name, p.args...)
	cmd.Env = surroundings(t, p.env)
	var out, errs bytes.Buffer
	cmd.Stdout, cmd.Stderr = &out, &errs
	_ = cmd.Run()
	return ran{out.String(), errs.String(), cmd.ProcessState.ExitCode()}
}

func TestColoursAreOnStatesOnly(t *testing.T) {
	s, id, ended := stage(t)
	for _, name := range []string{"ls_all", "node_ls", "inspect_ended", "net_log", "net_check"} {
		_, text := onTerminal(t, 80, against(s), samples(id, ended)[name]...).exits()
		for _, found := range regexp.MustCompile(`\x1b\[(\d+)m([^\x1b]*)\x1b\[0m`).FindAllStringSubmatch(text, -1) {
			if !regexp.MustCompile(`^(running|ready|oom|lost|stopped|ALLOW|DENY)$`).MatchString(found[2]) {
				t.Errorf("%s: %q is coloured", name, found[2])
			}
		}
	}
}

// Ctrl-C ends what follows and what waits, says so once, and gives 130.
func TestCtrlCEverywhere(t *testing.T) {
	s, id, _ := stage(t)
	for name, tt := range map[string]struct {
		args []string
		see  string
	}{
		"events":  {[]string{"events"}, ""},
		"logs -f": {[]string{"logs", "-f", id}, "[4] sleep 1000"},
		"attach":  {[]string{"exec", "--attach", "4", id}, ""},
		"net log": {[]string{"net", "log", "-f", id}, "flask 3.1.0"},
	} {
		t.Run(name, func(t *testing.T) {
			x := onTerminal(t, 80, against(s), tt.args...)
			if tt.see != "" {
				x.until(tt.see)
			} else {
				x.settles()
			}
			x.types("\x03")
			code, text := x.exits()
			if code != exitInterrupted || strings.Count(text, "interrupted") > 1 {
				t.Errorf("exit %d, %q", code, text)
			}
			x.wasGivenBack()
		})
	}
}
