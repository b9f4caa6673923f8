// Package leak tells what a test left in the machine: processes, descriptors, mounts, control groups and loop devices.
//
// It looks only at what can be this process's doing, since packages are tested at the same time: its own descriptors,
// its own descendants, control groups whose tag came from Tag, mounts in its own mount namespace and loop devices whose
// path lies below the directories given. Namespaces need no look of their own: one lives on only through a process, a
// descriptor or a mount.
package leak

import (
	"errors"
	"fmt"
	"io/fs"
	"maps"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"sync/atomic"
	"testing"
	"time"

	"github.com/moby/sys/mountinfo"

	"github.com/sandsea/sandsea/internal/testkit/wait"
)

// limit is how long Check waits for things to go: the kernel removes some of them in the background.
const limit = 30 * time.Second

var tags atomic.Int64

// tagPrefix begins every tag of this process.
func tagPrefix() string { return fmt.Sprintf("t%d-", os.Getpid()) }

// Tag makes a tag for the control groups of an edge under test, which tells them from everybody else's.
func Tag() string { return tagPrefix() + strconv.FormatInt(tags.Add(1), 10) }

// Snapshot is what was there at some time: how often, by description.
type Snapshot map[string]int

// Check looks now and again when the test ends, after the clean-ups that are registered later, and fails the test with
// a line for each thing that is there in addition. Mounts and loop devices count when their path lies below one of
// dirs.
func Check(t testing.TB, dirs ...string) {
	t.Helper()
	before, err := Take(dirs...)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if err := Compare(before, dirs...); err != nil {
			t.Error(err)
		}
	})
}

// Main is for TestMain: `os.Exit(leak.Main(m))`. It runs the tests and gives 1 when they leave something behind.
func Main(m *testing.M, dirs ...string) int {
	before, err := Take(dirs...)
	if err != nil {
		fmt.Fprintln(os.Stderr, err)
		return 1
	}
	code := m.Run()
	if err := Compare(before, dirs...); err != nil {
		fmt.Fprintln(os.Stderr, err)
		return max(code, 1)
	}
	return code
}

// Compare returns an error with a line for each thing that is there now and was not before, once it has waited for it
// to go.
func Compare(before Snapshot, dirs ...string) error {
	var more []string
	var err error
	wait.For(limit, func() bool {
		var after Snapshot
		if after, err = Take(dirs...); err != nil {
			return true
		}
		more = more[:0]
		for _, what := range slices.Sorted(maps.Keys(after)) {
			if n := after[what] - before[what]; n > 0 {
				more = append(more, fmt.Sprintf("left behind: %d x %s", n, what))
			}
		}
		return len(more) == 0
	})
	if err != nil {
		return err
	}
	if len(more) > 0 {
		return errors.New(strings.Join(more, "\n"))
	}
	return nil
}

// Take looks at what is there.
func Take(dirs ...string) (Snapshot, error) {
	// The first use of a pipe makes the runtime's own descriptors, which stay.
	r, w, err := os.Pipe()
	if err != nil {
		return nil, err
	}
	r.Close()
	w.Close()
	s := Snapshot{}
	for _, look := range []func(Snapshot, []string) error{descriptors, processes, mounts, cgroups, loops} {
		if err := look(s, dirs); err != nil {
			return nil, fmt.Errorf("look for leaks: %w", err)
		}
	}
	return s, nil
}

func descriptors(s Snapshot, _ []string) error {
	entries, err := os.ReadDir("/proc/self/fd")
	if err != nil {
		return err
	}
	for _, e := range entries {
		target, err := os.Readlink("/proc/self/fd/" + e.Name())
		if err != nil {
			continue // the one that lists
		}
		s["descriptor of "+target]++
	}
	return nil
}

// processes counts the descendants of this process, zombies included.
func processes(s Snapshot, _ []string) error {
	entries, err := os.ReadDir("/proc")
	if err != nil {
		return err
	}
	type process struct {
		name   string
		parent int
	}
	all := map[int]process{}
	for _, e := range entries {
		pid, err := strconv.Atoi(e.Name())
		if err != nil {
			continue
		}
		b, err := os.ReadFile("/proc/" + e.Name() + "/stat")
		if err != nil {
			continue // it ended
		}
		// pid (name) state ppid …, and the name may hold anything.
		line := string(b)
		open, end := strings.IndexByte(line, '('), strings.LastIndexByte(line, ')')
		if open < 0 || end < open {
			return fmt.Errorf("/proc/%d/stat: %q", pid, line)
		}
		fields := strings.Fields(line[end+1:])
		if len(fields) < 2 {
			return fmt.Errorf("/proc/%d/stat: %q", pid, line)
		}
		parent, err := strconv.Atoi(fields[1])
		if err != nil {
			return fmt.Errorf("/proc/%d/stat: %w", pid, err)
		}
		all[pid] = process{line[open : end+1], parent}
	}
	for pid, p := range all {
		for up := p.parent; up > 1; up = all[up].parent {
			if up == os.Getpid() {
				s[fmt.Sprintf("process %d %s", pid, p.name)]++
				break
			}
		}
	}
	return nil
}

func mounts(s Snapshot, dirs []string) error {
	table, err := mountinfo.GetMounts(nil)
	if err != nil {
		return err
	}
	for _, m := range table {
		if below(m.Mountpoint, dirs) || below(m.Source, dirs) {
			s[fmt.Sprintf("mount of %s %s on %s", m.FSType, m.Source, m.Mountpoint)]++
		}
	}
	return nil
}

func cgroups(s Snapshot, _ []string) error {
	table, err := mountinfo.GetMounts(mountinfo.FSTypeFilter("cgroup", "cgroup2"))
	if err != nil {
		return err
	}
	for _, m := range table {
		found, err := filepath.Glob(filepath.Join(m.Mountpoint, "sandsea-"+tagPrefix()+"*"))
		if err != nil {
			return err
		}
		for _, f := range found {
			s["control group "+f]++
		}
	}
	return nil
}

func loops(s Snapshot, dirs []string) error {
	found, err := filepath.Glob("/sys/block/loop*/loop/backing_file")
	if err != nil {
		return err
	}
	for _, f := range found {
		b, err := os.ReadFile(f)
		if errors.Is(err, fs.ErrNotExist) || err != nil && !errors.Is(err, fs.ErrPermission) {
			continue // it was detached meanwhile
		}
		if path := strings.TrimSpace(string(b)); below(path, dirs) {
			s[fmt.Sprintf("loop device %s of %s", strings.Split(f, "/")[3], path)]++
		}
	}
	return nil
}

func below(path string, dirs []string) bool {
	return slices.ContainsFunc(dirs, func(d string) bool {
		return path == d || strings.HasPrefix(path, strings.TrimSuffix(d, "/")+"/")
	})
}
