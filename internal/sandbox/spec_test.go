package sandbox

import (
	"errors"
	"fmt"
	"maps"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"

	"github.com/sandsea/sandsea/api/errdefs"
	"github.com/sandsea/sandsea/internal/node"
	"github.com/sandsea/sandsea/internal/policy"
)

func least() Spec { return Spec{Environment: Environment{Image: "debian"}} }

func TestTheLeastSpecGetsEveryDefault(t *testing.T) {
	got, err := least().Validate()
	if err != nil {
		t.Fatal(err)
	}
	want := Spec{
		Backend: "container", Class: "native", Environment: Environment{Image: "debian"},
		Limits: Limits{
			Memory: 512 << 20, CPUMillis: 1000, Disk: 10 << 30, Pids: 4096, OpenFiles: 65536, Output: 64 << 20,
		},
		TTL: 24 * time.Hour, Entrypoint: EntrypointIdle,
		Network: policy.Policy{Phases: []policy.Phase{{Name: "default"}}, Start: "default"},
	}
	if d := cmp.Diff(want, got); d != "" {
		t.Fatalf("(-want +got):\n%s", d)
	}
	again, err := got.Validate()
	if err != nil {
		t.Fatal(err)
	}
	if d := cmp.Diff(got, again); d != "" {
		t.Fatalf("a validated spec changed (-first +second):\n%s", d)
	}
}

func TestBadFieldsAreNamed(t *testing.T) {
	many := map[string]string{}
	for i := range 65 {
		many[fmt.Sprint("l", i)] = "v"
	}
	id := string(mint(t, 3))
	for name, c := range map[string]struct {
		change func(*Spec)
		field  string
	}{
		"another backend":                {func(s *Spec) { s.Backend = "microvm" }, "backend"},
		"another class":                  {func(s *Spec) { s.Class = "oci:runc" }, "class"},
		"no image":                       {func(s *Spec) { s.Environment = Environment{} }, "environment"},
		"image and base":                 {func(s *Spec) { s.Environment.Base = "b" }, "environment.image"},
		"a toolkit without base":         {func(s *Spec) { s.Environment = Environment{Toolkits: []string{"t"}} }, "environment.base"},
		"an empty toolkit":               {func(s *Spec) { s.Environment = Environment{Base: "b", Toolkits: []string{""}} }, "environment.toolkits"},
		"an image with a newline":        {func(s *Spec) { s.Environment.Image = "a\nb" }, "environment.image"},
		"negative memory":                {func(s *Spec) { s.Limits.Memory = -1 }, "limits.memory_bytes"},
		"memory of MiB meant as bytes":   {func(s *Spec) { s.Limits.Memory = 512 }, "limits.memory_bytes"},
		"memory that overflows":          {func(s *Spec) { s.Limits.Memory = 1 << 62 }, "limits.memory_bytes"},
		"CPU below the minimum":          {func(s *Spec) { s.Limits.CPUMillis = 9 }, "limits.cpu_millis"},
		"disk below the minimum":         {func(s *Spec) { s.Limits.Disk = 1 }, "limits.disk_bytes"},
		"pids below the minimum":         {func(s *Spec) { s.Limits.Pids = 7 }, "limits.pids"},
		"open files beyond the maximum":  {func(s *Spec) { s.Limits.OpenFiles = 1 << 21 }, "limits.open_files"},
		"output below the minimum":       {func(s *Spec) { s.Limits.Output = 1 }, "limits.output_bytes"},
		"a negative idle limit":          {func(s *Spec) { s.Idle = -time.Second }, "idle_ms"},
		"a TTL of 31 days":               {func(s *Spec) { s.TTL = 31 * 24 * time.Hour }, "ttl_ms"},
		"a negative TTL":                 {func(s *Spec) { s.TTL = -1 }, "ttl_ms"},
		"a service with a slash":         {func(s *Spec) { s.Network.Services = map[string]bool{"a/b": false} }, "network.services"},
		"a network rule without target":  {func(s *Spec) { s.Network.Phases = []policy.Phase{{Name: "a", Rules: []policy.Rule{{}}}} }, "network.phases[0].rules[0]"},
		"a user with two colons":         {func(s *Spec) { s.User = "1:2:3" }, "user"},
		"a user without a group":         {func(s *Spec) { s.User = "1:" }, "user"},
		"a uid beyond the range":         {func(s *Spec) { s.User = "4294967295" }, "user"},
		"a gid beyond the range":         {func(s *Spec) { s.User = "0:65536" }, "user"},
		"a variable named with =":        {func(s *Spec) { s.Env = map[string]string{"A=B": ""} }, "env"},
		"a variable without a name":      {func(s *Spec) { s.Env = map[string]string{"": "x"} }, "env"},
		"NUL in a variable":              {func(s *Spec) { s.Env = map[string]string{"A": "\x00"} }, "env"},
		"3 MiB of variables":             {func(s *Spec) { s.Env = map[string]string{"A": strings.Repeat("x", 3<<20)} }, "env"},
		"a relative workdir":             {func(s *Spec) { s.Workdir = "work" }, "workdir"},
		"NUL in the workdir":             {func(s *Spec) { s.Workdir = "/a\x00" }, "workdir"},
		"65 labels":                      {func(s *Spec) { s.Labels = many }, "labels"},
		"a label of 257 bytes":           {func(s *Spec) { s.Labels = map[string]string{"a": strings.Repeat("x", 257)} }, "labels"},
		"a label without a name":         {func(s *Spec) { s.Labels = map[string]string{"": "x"} }, "labels"},
		"a label that is not UTF-8":      {func(s *Spec) { s.Labels = map[string]string{"a": "\xff"} }, "labels"},
		"an unknown entrypoint mode":     {func(s *Spec) { s.Entrypoint = "shell" }, "entrypoint.mode"},
		"argv in the mode idle":          {func(s *Spec) { s.Argv = []string{"x"} }, "entrypoint.argv"},
		"the mode argv without argv":     {func(s *Spec) { s.Entrypoint = EntrypointArgv }, "entrypoint.argv"},
		"an entrypoint with NUL":         {func(s *Spec) { s.Entrypoint, s.Argv = EntrypointArgv, []string{"a", "\x00"} }, "entrypoint.argv"},
		"an empty feature":               {func(s *Spec) { s.Require = []string{""} }, "require"},
		"a job of 257 bytes":             {func(s *Spec) { s.Job = strings.Repeat("j", 257) }, "job"},
		"a negative attempt":             {func(s *Spec) { s.Attempt = -1 }, "attempt"},
		"a parent that is no id":         {func(s *Spec) { s.ParentID = "s123" }, "parent.id"},
		"a parent event without parent":  {func(s *Spec) { s.ParentSeq = 4 }, "parent.seq"},
		"a negative event of the parent": {func(s *Spec) { s.ParentID, s.ParentSeq = id, -1 }, "parent.seq"},
	} {
		t.Run(name, func(t *testing.T) {
			s := least()
			c.change(&s)
			_, err := s.Validate()
			e, ok := errors.AsType[*errdefs.Error](err)
			if !ok || e.Kind != errdefs.Invalid || e.Field != c.field {
				t.Fatalf("error %v, want Invalid for the field %s", err, c.field)
			}
			if e.Hint == "" || !strings.Contains(e.Msg, c.field) {
				t.Fatalf("the message %q does not name the field or says not what to do", err)
			}
		})
	}
}

func TestWhatFrameworksSendIsTaken(t *testing.T) {
	s := least()
	s.Labels = map[string]string{"session": "hello-world__bZZeEkw__verifier__grade", "a.b/c": strings.Repeat("x", 256)}
	s.User, s.Env = "1000:1000", map[string]string{"EMPTY": "", "MULTI": "a\nb=c"}
	s.Network.Services = map[string]bool{"npm": false, "pypi": true}
	s.ParentID, s.ParentSeq = string(mint(t, 9)), 12
	got, err := s.Validate()
	if err != nil {
		t.Fatal(err)
	}
	if !got.Network.Open() || got.Network.Start != "default" {
		t.Errorf("network %+v", got.Network)
	}
}

func able(without ...string) node.Capabilities {
	c := node.Capabilities{NoFile: 1 << 20}
	for _, n := range needs {
		st := node.OK
		if slices.Contains(without, n.feature) {
			st = node.Unsure
		}
		c.Features = append(c.Features, node.Feature{Name: n.feature, Status: st})
	}
	return c
}

func TestMissing(t *testing.T) {
	s, err := least().Validate()
	if err != nil {
		t.Fatal(err)
	}
	if f, field, missing := s.Missing(able()); missing {
		t.Fatalf("a node that can do everything misses %v for %s", f, field)
	}
	for _, n := range needs {
		f, field, missing := s.Missing(able(n.feature))
		if !missing || f.Name != n.feature || field != n.field {
			t.Errorf("without %s: %v %s %v", n.feature, f, field, missing)
		}
	}
	if f, field, missing := s.Missing(able(node.FeatureEgress)); missing {
		t.Errorf("a policy that allows nothing needs %v for %s", f, field)
	}
	open := s
	open.Network.Services = map[string]bool{"pypi": true}
	if f, field, missing := open.Missing(able()); !missing || f.Name != node.FeatureEgress || field != "network" {
		t.Errorf("a policy that allows something, without egress: %v %s %v", f, field, missing)
	}
	c := able()
	c.Features = append(c.Features, node.Feature{Name: node.FeatureEgress, Status: node.OK})
	if f, field, missing := open.Missing(c); missing {
		t.Errorf("with egress: %v %s", f, field)
	}
	c.NoFile = 20000
	if _, _, missing := s.Missing(c); missing {
		t.Error("the default of open files does not yield to the node's hard limit")
	}
	if got := s.Limits.On(c).OpenFiles; got != 20000 {
		t.Errorf("open files in force: %d", got)
	}
	s.Limits.OpenFiles = 30000
	if f, field, missing := s.Missing(c); !missing || field != "limits.open_files" || f.Fix == "" {
		t.Errorf("30000 open files on a node with 20000: %v %s %v", f, field, missing)
	}
	s.Limits.OpenFiles = 1000
	s.Require = []string{"network.aether"}
	f, field, missing := s.Missing(c)
	if !missing || field != "require" || f.Name != "network.aether" {
		t.Errorf("an unknown feature: %v %s %v", f, field, missing)
	}
	if err := MissingError(f, field); !errors.Is(err, errdefs.FailedPrecondition) {
		t.Error(err)
	}
}

func TestDefaultsDoNotWriteIntoTheCallersMaps(t *testing.T) {
	s := least()
	s.Env = map[string]string{"A": "b"}
	before := maps.Clone(s.Env)
	if _, err := s.Validate(); err != nil || !maps.Equal(before, s.Env) {
		t.Fatal(err, s.Env)
	}
}
