package main

import (
	"encoding/json"
	"fmt"
	"maps"
	"os"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"testing"

	"github.com/sandsea/sandsea/internal/testkit/require"
	"github.com/sandsea/sandsea/internal/testkit/testserver"
	"github.com/sandsea/sandsea/internal/testkit/wait"
)

// schemas are the tables of docs/json.md.
type schemas map[string]map[string]schemaField

type schemaField struct {
	kind     string // "text", "list of Layer", "End or null"
	optional bool
}

// readSchemas reads docs/json.md. A field whose meaning says "only" may be absent; so may all but the first three of what
// tells of one event or error.
func readSchemas(t *testing.T) schemas {
	t.Helper()
	text, err := os.ReadFile("../../docs/json.md")
	if err != nil {
		t.Fatal(err)
	}
	out := schemas{}
	for _, part := range strings.Split(string(text), "\n### ")[1:] {
		name, body, _ := strings.Cut(part, "\n")
		body, _, _ = strings.Cut(body, "\n## ")
		out[name] = map[string]schemaField{}
		for i, row := range regexp.MustCompile("(?m)^\\| `(\\w+)` \\| ([^|]+) \\| ?([^|]*)\\|").FindAllStringSubmatch(body, -1) {
			loose := name == "error" || name == "sandsea.output/1"
			out[name][row[1]] = schemaField{kind: row[2], optional: loose && i > 2 || regexp.MustCompile(`\bonly\b`).MatchString(row[3])}
		}
	}
	out["sandsea.exec/1"] = out["sandsea.run/1"] // as it says
	return out
}

// check holds a value against a type of the tables.
func (s schemas) check(kind string, v any) error {
	if rest, ok := strings.CutSuffix(kind, " or null"); ok {
		if v == nil {
			return nil
		}
		kind = strings.TrimSuffix(rest, ",")
	}
	if rest, ok := strings.CutSuffix(kind, " without `schema`"); ok {
		return s.object(rest, v, "schema")
	}
	if rest, ok := strings.CutPrefix(kind, "list of "); ok {
		list, ok := v.([]any)
		if !ok {
			return fmt.Errorf("is %v, no list", v)
		}
		for i, one := range list {
			if err := s.check(rest, one); err != nil {
				return fmt.Errorf("[%d] %w", i, err)
			}
		}
		return nil
	}
	var ok bool
	switch kind {
	case "text":
		_, ok = v.(string)
	case "word":
		text, is := v.(string)
		ok = is && regexp.MustCompile(`^[a-z0-9_]*$`).MatchString(text)
	case "number":
		_, ok = v.(float64)
	case "true or false":
		_, ok = v.(bool)
	case "time":
		text, is := v.(string)
		ok = is && regexp.MustCompile(`^\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d(\.\d+)?Z$`).MatchString(text)
	case "object":
		_, ok = v.(map[string]any)
	default:
		return s.object(kind, v)
	}
	if !ok {
		return fmt.Errorf("is %v, no %s", v, kind)
	}
	return nil
}

func (s schemas) object(name string, v any, without ...string) error {
	fields, known := s[name]
	got, ok := v.(map[string]any)
	if !known || !ok {
		return fmt.Errorf("%s: not written down, or %v is no object", name, v)
	}
	for field, value := range got {
		f, known := fields[field]
		if text, ok := strings.CutSuffix(field, "_base64"); !known && ok {
			f, known = fields[text]
		}
		if !known {
			return fmt.Errorf("%s.%s: not written down", name, field)
		}
		if err := s.check(f.kind, value); err != nil {
			return fmt.Errorf("%s.%s: %w", name, field, err)
		}
	}
	for field, f := range fields {
		_, plain := got[field]
		_, coded := got[field+"_base64"]
		if !plain && !coded && !f.optional && !slices.Contains(without, field) {
			return fmt.Errorf("%s.%s: missing", name, field)
		}
	}
	return nil
}

// checkOutput holds every line against the schema that it names, and wants that one.
func (s schemas) checkOutput(t *testing.T, want, output string) {
	t.Helper()
	lines := strings.Split(strings.TrimSuffix(output, "\n"), "\n")
	for _, line := range lines {
		var v any
		if err := json.Unmarshal([]byte(line), &v); err != nil {
			t.Errorf("%v: %q", err, line)
			return
		}
		list, isList := v.([]any)
		if !isList {
			list = []any{v}
		}
		if len(list) == 0 {
			t.Errorf("nothing to look at in %q", line)
		}
		for _, doc := range list {
			m, _ := doc.(map[string]any)
			if m["schema"] != want {
				t.Errorf("schema %v, want %s: %s", m["schema"], want, line)
				continue
			}
			if err := s.object(want, doc); err != nil {
				t.Errorf("%v in %s", err, line)
			}
		}
	}
}

// TestOutputIsAsWrittenDown runs every command that has a --json form and holds what it prints against docs/json.md:
// every field is there, no other is, and each is of its type.
func TestOutputIsAsWrittenDown(t *testing.T) {
	docs := readSchemas(t)
	s := testserver.Start(t, testserver.Config{Images: []string{"py", "go"}})
	dir := t.TempDir()
	seen := map[string]bool{}
	command := func(want string, code int, args ...string) string {
		t.Helper()
		r := program{args: append([]string{"--json"}, args...), env: against(s)}.run(t)
		if r.code != code || r.stderr != "" {
			t.Errorf("%v: exit %d, %s%s", args, r.code, r.stdout, r.stderr)
		}
		docs.checkOutput(t, want, r.stdout)
		seen[want] = true
		return r.stdout
	}
	id := living(t, s, "--image=py", "-l", "job=x", "-e", "A=1")
	command("sandsea.run/1", 0, "run", "--image=py", "--", "echo", "hi")
	command("sandsea.run/1", 124, "run", "--image=py", "--timeout=50ms", "--", "sleep", "9")
	command("sandsea.exec/1", 127, "exec", id, "--", "pytst")
	command("sandsea.exec/1", 0, "exec", id, "--", "printf", `\377`)
	command("sandsea.process/1", 0, "exec", "--detach", id, "--", "sleep", "1000")
	command("sandsea.sandbox/1", 0, "create", "--image=go", "--", "sleep", "9")
	command("sandsea.sandbox/1", 0, "create", "--image=go", "--count=2")
	command("sandsea.sandbox/1", 0, "inspect", id)
	command("sandsea.sandbox/1", 0, "ls")
	command("sandsea.top/1", 0, "top")
	policy := filepath.Join(dir, "policy.json")
	if err := os.WriteFile(policy, []byte(`{"services": {"pypi": true}, "as_of": "2024-06-01", "limits": {"flows": 9}, "phases": [{"name": "a", "inbound": [{"first": 80}],
		"rules": [{"domain": "example.org", "ports": [{"first": 443}]}, {"cidr": "192.0.2.0/24", "protocol": "udp"}, {"service": "npm", "reject": true}]}]}`), 0o600); err != nil {
		t.Fatal(err)
	}
	command("sandsea.sandbox/1", 0, "net", "set", id, "--file", policy)
	command("sandsea.sandbox/1", 0, "net", "phase", id, "a")
	command("sandsea.net_check/1", 0, "net", "check", id, "pypi:flask")
	command("sandsea.net_check/1", 1, "net", "check", id, "npm")
	s.Flow(id, traffic()...)
	command("sandsea.flow/1", 0, "net", "log", id)
	command("sandsea.net_top/1", 0, "net", "top")
	command("sandsea.endpoint/1", 0, "endpoint", id, "8000")
	command("sandsea.output/1", 0, "logs", "--process=1", id)
	command("sandsea.output/1", 0, "logs", "--process=2", id)
	archive := filepath.Join(dir, "root.tar")
	if err := os.WriteFile(archive, []byte("x"), 0o600); err != nil {
		t.Fatal(err)
	}
	command("sandsea.image/1", 0, "image", "import", "rootfs:"+archive)
	command("sandsea.image/1", 0, "image", "compose", "stack", "--base=py")
	command("sandsea.image/1", 0, "image", "inspect", "stack")
	command("sandsea.image/1", 0, "image", "ls")
	command("sandsea.image_rm/1", 0, "image", "rm", "stack", "--yes")
	command("sandsea.node/1", 0, "node", "ls")
	command("sandsea.whoami/1", 0, "whoami")
	command("sandsea.version/1", 0, "version")
	command("sandsea.setting/1", 0, "config")
	command("sandsea.bench/1", 0, "bench", "run", "--image=py", "--n=3", "--in-flight=1")
	command("sandsea.stop/1", 0, "stop", id)
	command("sandsea.sandbox/1", 0, "ls", "--all")
	t.Run("doctor", func(t *testing.T) {
		require.Root(t)
		r := program{args: []string{"--json", "doctor"}, env: against(s)}.run(t)
		docs.checkOutput(t, "sandsea.doctor/1", r.stdout)
	})
	t.Run("events", func(t *testing.T) {
		x := following(t, program{args: []string{"--json", "events"}, env: against(s)})
		wait.Until(t, limit, func() bool {
			living(t, s, "--image=py") // the first ones may come before it follows
			return strings.Contains(x.out.String(), `"what":"running"`)
		}, "an event")
		docs.checkOutput(t, "sandsea.event/1", x.interrupted(130))
	})
	seen["sandsea.doctor/1"], seen["sandsea.event/1"] = true, true
	for name := range maps.Keys(docs) {
		if strings.HasPrefix(name, "sandsea.") && !seen[name] {
			t.Errorf("%s is written down and nothing here printed it", name)
		}
	}
}

func TestErrorsAreAsWrittenDown(t *testing.T) {
	docs := readSchemas(t)
	files, err := filepath.Glob("testdata/errors/*.txt")
	if err != nil || len(files) < 30 {
		t.Fatalf("%d situations, %v", len(files), err)
	}
	for _, file := range files {
		text, err := os.ReadFile(file)
		if err != nil {
			t.Fatal(err)
		}
		_, line, _ := strings.Cut(string(text), "]\n")
		var doc struct{ Error any }
		if err := json.Unmarshal([]byte(line), &doc); err != nil {
			t.Errorf("%s: %v", file, err)
			continue
		}
		if err := docs.object("error", doc.Error); err != nil {
			t.Errorf("%s: %v", file, err)
		}
	}
}
