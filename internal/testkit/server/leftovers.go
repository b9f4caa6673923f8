package server

import (
	"bytes"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"time"

	"github.com/moby/sys/mountinfo"

	"github.com/sandsea/sandsea/internal/testkit/wait"
)

// leftLimit is how long the kernel may take to finish what was undone.
const leftLimit = 30 * time.Second

// claims is where ranges of ids are claimed on this machine (package edge/uidrange).
const claims = "/run/sandsea/uidrange"

// Leftovers reports, a line each, what the platform on dir has left in the machine. It waits a little for it to go.
func Leftovers(dir string) error {
	var left []string
	wait.For(leftLimit, func() bool {
		left = look(dir)
		return len(left) == 0
	})
	if len(left) == 0 {
		return nil
	}
	return errors.New(strings.Join(left, "\n"))
}

func look(dir string) []string {
	var left []string
	say := func(format string, args ...any) { left = append(left, "left behind: "+fmt.Sprintf(format, args...)) }
	for pid, argv := range commandLines() {
		if pid != os.Getpid() && strings.Contains(strings.Join(argv, " "), dir) {
			say("process %d: %s", pid, strings.Join(argv, " "))
		}
	}
	table, err := mountinfo.GetMounts(nil)
	if err != nil {
		say("the mount table cannot be read: %v", err)
	}
	for _, m := range table {
		if strings.HasPrefix(m.Mountpoint, dir) || strings.HasPrefix(m.Source, dir) {
			say("mount of %s %s on %s", m.FSType, m.Source, m.Mountpoint)
		}
	}
	loops, _ := filepath.Glob("/sys/block/loop*/loop/backing_file")
	for _, f := range loops {
		if b, err := os.ReadFile(f); err == nil && strings.HasPrefix(string(b), dir) {
			say("loop device %s of %s", strings.Split(f, "/")[3], bytes.TrimSpace(b))
		}
	}
	id, err := os.ReadFile(filepath.Join(dir, "id"))
	if err != nil {
		return left // it never came so far
	}
	tag := string(id[:8])
	for _, m := range table {
		if m.FSType != "cgroup" && m.FSType != "cgroup2" {
			continue
		}
		groups, _ := filepath.Glob(filepath.Join(m.Mountpoint, "sandsea-"+tag+"*"))
		for _, g := range groups {
			say("control group %s", g)
		}
	}
	_ = filepath.WalkDir(claims, func(path string, e fs.DirEntry, err error) error {
		if err == nil && e.Type().IsRegular() {
			if b, err := os.ReadFile(path); err == nil && bytes.Contains(b, []byte(tag)) {
				say("claim %s", path)
			}
		}
		return nil
	})
	for _, sub := range []string{"tmp", "trash", "disk"} {
		entries, _ := os.ReadDir(filepath.Join(dir, sub))
		for _, e := range entries {
			if sub != "disk" || e.IsDir() {
				say("%s", filepath.Join(dir, sub, e.Name()))
			}
		}
	}
	return left
}

// commandLines are the argument lists of all processes.
func commandLines() map[int][]string {
	out := map[int][]string{}
	entries, err := os.ReadDir("/proc")
	if err != nil {
		return out
	}
	for _, e := range entries {
		pid, err := strconv.Atoi(e.Name())
		if err != nil {
			continue
		}
		b, err := os.ReadFile(filepath.Join("/proc", e.Name(), "cmdline"))
		if err != nil || len(b) == 0 {
			continue
		}
		out[pid] = strings.Split(strings.TrimSuffix(string(b), "\x00"), "\x00")
	}
	return out
}
