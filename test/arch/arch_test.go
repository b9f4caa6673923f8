// Package arch guards the shape of the house: who may import whom (docs/ARCHITECTURE.md). A rule that is broken fails
// with the rule's reason, so that the reader knows what to change.
package arch

import (
	"encoding/json"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"testing"
)

const module = "github.com/sandsea/sandsea/"

type pkg struct {
	ImportPath, Dir, Doc string
	Imports              []string
	TestImports          []string
	GoFiles              []string
}

// packages lists the packages of the module with what their own code, tests apart, imports.
func packages(t *testing.T) []pkg {
	t.Helper()
	cmd := exec.CommandContext(t.Context(), "go", "list", "-json=ImportPath,Dir,Doc,Imports,TestImports,GoFiles", "./...")
	cmd.Dir = filepath.Join("..", "..")
	out, err := cmd.Output()
	if err != nil {
		t.Fatalf("go list: %v", err)
	}
	var list []pkg
	d := json.NewDecoder(strings.NewReader(string(out)))
	for d.More() {
		var p pkg
		if err := d.Decode(&p); err != nil {
			t.Fatal(err)
		}
		p.ImportPath = strings.TrimPrefix(p.ImportPath, module)
		for i := range p.Imports {
			p.Imports[i] = strings.TrimPrefix(p.Imports[i], module)
		}
		list = append(list, p)
	}
	if len(list) < 10 {
		t.Fatalf("only %d packages seen", len(list))
	}
	return list
}

// under reports whether a path lies in one of the folders.
func under(path string, folders ...string) bool {
	return slices.ContainsFunc(folders, func(f string) bool { return path == f || strings.HasPrefix(path, f+"/") })
}

func isOurs(path string) bool {
	return under(path, "api", "bench", "client", "cmd", "init", "internal", "tools", "test", "demo")
}

func isStd(path string) bool {
	return !isOurs(path) && !strings.Contains(strings.SplitN(path, "/", 2)[0], ".")
}

// pure are the packages that touch nothing, from the top down: each may import the standard library and those before it.
var pure = []string{
	"api/errdefs", "internal/policy", "internal/image", "internal/record", "internal/node", "internal/sandbox",
	"internal/trajectory",
}

func TestPurePackagesImportOnlyPureOnesAboveThem(t *testing.T) {
	for _, p := range packages(t) {
		at := slices.Index(pure, p.ImportPath)
		if at < 0 {
			continue
		}
		for _, i := range p.Imports {
			if !isStd(i) && !slices.Contains(pure[:at], i) {
				t.Errorf("%s imports %s: pure packages import the standard library and the pure ones above them", p.ImportPath, i)
			}
			if slices.Contains([]string{"os", "net", "net/http", "os/exec", "syscall"}, i) {
				t.Errorf("%s imports %s: a pure package touches nothing", p.ImportPath, i)
			}
		}
	}
}

// rule forbids imports from some folders to others.
type rule struct {
	from, to []string
	except   func(from, to string) bool
	reason   string
}

func TestImportRules(t *testing.T) {
	rules := []rule{
		{
			from: []string{"internal/control"}, to: []string{"internal/edge", "internal/keeper", "internal/spawner", "internal/chronus"},
			reason: "control and edge meet in api only",
		},
		{
			from: []string{"internal/edge", "internal/chronus", "internal/layers"}, to: []string{"internal/control"},
			reason: "control and edge meet in api only",
		},
		{
			from: []string{"internal/keeper", "internal/spawner"},
			to:   []string{"api/sandsea", "api/node", "internal", "client", "bench"},
			except: func(from, to string) bool {
				return under(to, "internal/linux", "internal/record", "internal/testkit") || under(to, from) || under(from, to)
			},
			reason: "keeper and spawner outlive an edge: they import their own wire, record and linux only",
		},
		{
			from: []string{"internal/aether"}, to: []string{"api/node", "internal", "client", "bench"},
			except: func(_, to string) bool {
				return under(to, "internal/aether", "internal/linux", "internal/policy", "internal/segment", "internal/typo", "internal/testkit")
			},
			reason: "Aether meets hostile bytes: it imports policy, linux and its own",
		},
		{
			from: []string{"internal/edge"}, to: []string{"internal/aether"},
			except: func(_, to string) bool {
				return under(to, "internal/aether/wire", "internal/aether/guest", "internal/aether/flowlog", "internal/aether/upstream")
			},
			reason: "an edge knows Aether by its wire, its log and what sandboxes are told of it",
		},
		{
			from: []string{"internal/linux"}, to: []string{"api", "internal", "client", "bench"},
			except: func(_, to string) bool { return under(to, "internal/linux", "api/errdefs") },
			reason: "linux/* are leaves",
		},
		{
			from: []string{"api", "bench", "client", "init", "internal", "demo"}, to: []string{"cmd"},
			reason: "nothing imports cmd",
		},
		{
			from: []string{"api"}, to: []string{"internal", "client", "bench"},
			except: func(from, _ string) bool { return under(from, "api/openapi") },
			reason: "api imports nothing of ours",
		},
		{
			from: []string{"client"}, to: []string{"internal", "bench"},
			reason: "the client is for everybody: it stands on api alone",
		},
	}
	for _, p := range packages(t) {
		for _, r := range rules {
			if !under(p.ImportPath, r.from...) {
				continue
			}
			for _, i := range p.Imports {
				if isOurs(i) && under(i, r.to...) && (r.except == nil || !r.except(p.ImportPath, i)) {
					t.Errorf("%s imports %s: %s", p.ImportPath, i, r.reason)
				}
			}
		}
	}
}

func TestBackendsNeverImportEachOther(t *testing.T) {
	const dir = "internal/edge/backend/"
	kind := func(path string) string {
		rest, ok := strings.CutPrefix(path, dir)
		if !ok || rest == "conform" {
			return ""
		}
		if k, ok := strings.CutPrefix(rest, "container/"); ok {
			return "container/" + strings.SplitN(k, "/", 2)[0]
		}
		return strings.SplitN(rest, "/", 2)[0]
	}
	for _, p := range packages(t) {
		for _, i := range p.Imports {
			if from, to := kind(p.ImportPath), kind(i); from != "" && to != "" && from != to {
				t.Errorf("%s imports %s: backends never import each other", p.ImportPath, i)
			}
		}
	}
}

func TestKernelAndStoreHaveOneDoorEach(t *testing.T) {
	doors := []struct {
		prefix, door string
	}{
		{"golang.org/x/sys/unix", "internal/linux"},
		{"github.com/vishvananda/netlink", "internal/linux"},
		{"go.etcd.io/etcd", "internal/store/etcd"},
	}
	for _, p := range packages(t) {
		for _, i := range p.Imports {
			for _, d := range doors {
				if under(i, d.prefix) && !under(p.ImportPath, d.door) {
					t.Errorf("%s imports %s: only %s may", p.ImportPath, i, d.door)
				}
			}
		}
	}
}

func TestOnlyCmdReadsFlagsAndEnvironment(t *testing.T) {
	for _, p := range packages(t) {
		// tools and generators are programs of their own.
		if !under(p.ImportPath, "internal") || under(p.ImportPath, "internal/testkit") {
			continue
		}
		if slices.Contains(p.Imports, "flag") {
			t.Errorf("%s imports flag: only cmd reads flags", p.ImportPath)
		}
	}
}

func TestEveryPackageSaysWhatItIs(t *testing.T) {
	for _, p := range packages(t) {
		generated := under(p.ImportPath, "api/sandsea", "api/node")
		if p.Doc == "" && !generated && len(p.GoFiles) > 0 {
			t.Errorf("%s has no package comment", p.ImportPath)
		}
	}
}
