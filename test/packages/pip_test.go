package packages

import (
	"cmp"
	"maps"
	"regexp"
	"slices"
	"strconv"
	"strings"
	"testing"
	"time"

	"github.com/sandsea/sandsea/internal/policy"
)

// project is what PyPI's index tells of one.
type project struct {
	Files []struct {
		Filename string            `json:"filename"`
		URL      string            `json:"url"`
		Hashes   map[string]string `json:"hashes"`
		Uploaded time.Time         `json:"upload-time"`
		Yanked   any               `json:"yanked"`
	} `json:"files"`
}

func askProject(t testing.TB, index, name string) project {
	t.Helper()
	var p project
	askJSON(t, index+"/"+name+"/", "application/vnd.pypi.simple.v1+json", &p)
	if len(p.Files) == 0 {
		t.Fatalf("the index has no files of %s", name)
	}
	return p
}

// finalRelease is the version in a file's name, of releases that are final.
var finalRelease = regexp.MustCompile(`^[A-Za-z0-9_.]+?-(\d+(?:\.\d+)*)(?:-.*\.whl|\.tar\.gz|\.zip)$`)

// newest is the highest final version of which a file was there on a day.
func (p project) newest(at time.Time) string {
	var best string
	for _, f := range p.Files {
		m := finalRelease.FindStringSubmatch(f.Filename)
		yanked := f.Yanked != nil && f.Yanked != false
		if m != nil && !yanked && !f.Uploaded.After(at) && compareVersions(m[1], best) > 0 {
			best = m[1]
		}
	}
	return best
}

// lock is the requirements file of one version.
func (p project) lock(name, version string) string {
	line := name + "==" + version
	for _, f := range p.Files {
		if m := finalRelease.FindStringSubmatch(f.Filename); m != nil && m[1] == version {
			line += " --hash=sha256:" + f.Hashes["sha256"]
		}
	}
	return line + "\n"
}

// compareVersions compares versions of numbers and dots.
func compareVersions(a, b string) int {
	numbers := func(s string) (out []int) {
		for part := range strings.SplitSeq(s, ".") {
			n, _ := strconv.Atoi(part) // "" is 0
			out = append(out, n)
		}
		return out
	}
	x, y := numbers(a), numbers(b)
	for i := range max(len(x), len(y)) {
		var m, n int
		if i < len(x) {
			m = x[i]
		}
		if i < len(y) {
			n = y[i]
		}
		if c := cmp.Compare(m, n); c != 0 {
			return c
		}
	}
	return 0
}

// pip is a command that leaves no cache behind.
const pip = "pip --no-cache-dir --disable-pip-version-check "

func TestPipInstallsWithDependenciesAndTheSecondTimeFromTheCache(t *testing.T) {
	index := registry(t, policy.PyPI, "/flask/")
	b := twice(t, policy.PyPI, pip+"install --break-system-packages flask", 6)
	b.sh("python3 -c 'import flask, werkzeug, jinja2'")

	// A lock file with the hashes that the registry states holds against what the mirror serves.
	var lock string
	for _, name := range slices.Sorted(maps.Keys(locked)) {
		lock += askProject(t, index, name).lock(name, locked[name])
	}
	b.write("/tmp/lock.txt", lock)
	b.sh(pip + "install --require-hashes --no-deps --target /tmp/locked -r /tmp/lock.txt && ls -d /tmp/locked/flask-3.0.3.dist-info")
	b.refused("sed -i 's/sha256:[0-9a-f]*/sha256:"+strings.Repeat("0", 64)+"/g' /tmp/lock.txt && "+
		pip+"install --require-hashes --no-deps --target /tmp/wrong -r /tmp/lock.txt", "DO NOT MATCH THE HASHES")
}

var locked = map[string]string{
	"blinker": "1.9.0", "click": "8.1.7", "flask": "3.0.3", "itsdangerous": "2.2.0", "jinja2": "3.1.6", "markupsafe": "3.0.2",
	"werkzeug": "3.1.3",
}

func TestPipSeesTheWorldAsOfADate(t *testing.T) {
	index := registry(t, policy.PyPI, "/flask/")
	at := day(t, "2023-06-01")
	b := open(t, asOf(allow(policy.PyPI), at))
	b.sh(pip + "install --break-system-packages flask")
	got := map[string]string{}
	for line := range strings.Lines(b.sh(pip + "list --format freeze")) {
		name, version, _ := strings.Cut(strings.TrimSpace(line), "==")
		got[strings.ToLower(name)] = version
	}
	for name := range locked {
		p := askProject(t, index, name)
		then, now := p.newest(at), p.newest(time.Now())
		if then == now {
			t.Errorf("%s: %s is still the newest: the date proves nothing", name, now)
		}
		if got[name] != then {
			t.Errorf("%s: %s was installed, and %s was the newest on %s", name, got[name], then, at.Format(time.DateOnly))
		}
		b.shortened(policy.PyPI, name, "as_of 2023-06-01")
	}
	b.refused(pip+"download --no-deps -d /tmp/x flask==3.0.3", "flask==3.0.3")
}

func TestPipIsRefusedAFileOfAfterTheDateByItsOwnURL(t *testing.T) {
	index := registry(t, policy.PyPI, "/flask/")
	p := asOf(allow(policy.PyPI), day(t, "2023-06-01"))
	p.InspectTls = true
	b := open(t, p)
	urls := map[bool]string{}
	for _, f := range askProject(t, index, "flask").Files {
		if strings.HasPrefix(strings.ToLower(f.Filename), "flask-2.3.2-") || strings.HasPrefix(f.Filename, "flask-3.0.3-") {
			urls[f.Uploaded.After(p.GetAsOf().AsTime())] = f.URL
		}
	}
	b.sh(pip + "download --no-deps -d /tmp/x " + urls[false])
	b.refused(pip+"download --no-deps -d /tmp/x "+urls[true], "403", "flask")
	b.denied(policy.PyPI, "flask", "as_of 2023-06-01")
}

func TestPipDoesNotFindWhatIsDenied(t *testing.T) {
	registry(t, policy.PyPI, "/flask/")
	p := allow(policy.PyPI)
	p.Deny = []string{"pypi:Typing.Extensions"}
	b := open(t, p)
	for _, spelling := range []string{"typing-extensions", "Typing_Extensions", "typing.extensions"} {
		b.refused(pip+"download -d /tmp/x "+spelling, "No matching distribution found for "+spelling)
	}
	b.denied(policy.PyPI, "typing-extensions", "deny pypi:typing-extensions")
	b.sh(pip + "download --no-deps -d /tmp/x six")
	// Denied also where another package needs it.
	b.refused(pip+"download -d /tmp/x pydantic-core==2.27.2", "typing-extensions")
}

func TestARejectedServiceTellsItsClientTheRule(t *testing.T) {
	registry(t, policy.PyPI, "/flask/")
	registry(t, policy.NPM, "/ms")
	p := allow(policy.PyPI)
	p.Services[policy.NPM] = false
	b := open(t, p, nodeKit.use(t))
	b.sh(pip + "download --no-deps -d /tmp/x six")
	b.refused("npm view ms version", "403", "service npm")
	b.denied(policy.NPM, "", "service npm")
	if got := b.files(policy.PyPI); len(got) != 1 || got[0].GetName() != "six" {
		t.Errorf("of pypi came %v", got)
	}
}
