package main

import (
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/sandsea/sandsea/internal/testkit/testserver"
)

// longList makes a server with more sandboxes than a terminal has rows.
func longList(t *testing.T) *testserver.Server {
	t.Helper()
	s := testserver.Start(t, testserver.Config{})
	if r := (program{args: []string{"create", "--count", "60"}, env: against(s)}).run(t); r.code != 0 {
		t.Fatal(r)
	}
	return s
}

func TestALongListGoesThroughThePager(t *testing.T) {
	s := longList(t)
	kept := filepath.Join(t.TempDir(), "kept")
	x := onTerminal(t, 80, append(against(s), "PAGER=tee "+kept+" | tail -n 1; echo LESS=$LESS"), "ls")
	code, text := x.exits()
	if code != 0 || strings.Contains(text, "STATE") || !strings.Contains(text, "LESS=R\n60 running") {
		t.Errorf("exit %d, %q", code, text)
	}
	page, err := os.ReadFile(kept)
	if err != nil || !strings.HasPrefix(string(page), "ID        STATE") || strings.Count(string(page), "\n") != 61 {
		t.Errorf("%v, the pager got %q", err, page)
	}
}

func TestAListThatNeedsNoPagerGetsNone(t *testing.T) {
	s := longList(t)
	const pager = "PAGER=echo paged"
	for name, args := range map[string][]string{"short": {"ls", "--limit", "3"}, "json": {"ls", "--json"}} {
		code, text := onTerminal(t, 80, append(against(s), pager), args...).exits()
		if code != 0 || strings.Contains(text, "paged") {
			t.Errorf("%s: exit %d, %q", name, code, text)
		}
	}
	if r := (program{args: []string{"ls"}, env: append(against(s), pager)}).run(t); r.code != 0 || strings.Contains(r.stdout, "paged") {
		t.Errorf("in a pipe: %+v", r)
	}
	for name, env := range map[string]string{"none": "PAGER=", "one that is not there": "PAGER=/none/less -R"} {
		code, text := onTerminal(t, 80, append(against(s), env, "NO_COLOR=1"), "ls").exits()
		if code != 0 || strings.Count(text, "running  ") != 60 {
			t.Errorf("%s: exit %d, %q", name, code, text)
		}
	}
}

func TestCtrlCIsThePagersWhileItRuns(t *testing.T) {
	s := longList(t)
	x := onTerminal(t, 80, append(against(s), `PAGER=trap "echo mine; exit" INT; cat >/dev/null; echo ready; while :; do sleep 0.05; done`), "ls")
	x.until("ready")
	x.types("\x03")
	if code, text := x.exits(); code != 0 || !strings.Contains(text, "mine\n60 running") {
		t.Errorf("exit %d, %q", code, text)
	}
	x.wasGivenBack()
}
