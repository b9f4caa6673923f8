package cgroup

import (
	"slices"
	"strings"

	"github.com/moby/sys/mountinfo"
)

// controllers are those that a sandbox needs, in the order in which groups are made.
var controllers = [...]string{"memory", "cpu", "pids"}

// mounts says where the trees of control groups are mounted.
type mounts struct {
	v2 string            // mount point of the v2 tree, "" if there is none
	v1 map[string]string // mount point by controller
}

// findMounts reads the mounts of control groups out of a mount table. Of several mounts of one tree it takes the one
// that shows most of it, and among those the last, which covers the others.
func findMounts(table []*mountinfo.Info) mounts {
	m := mounts{v1: map[string]string{}}
	best := map[string]*mountinfo.Info{}
	better := func(key string, i *mountinfo.Info) bool {
		old, ok := best[key]
		if ok && len(i.Root) > len(old.Root) {
			return false
		}
		best[key] = i
		return true
	}
	for _, i := range table {
		if !slices.Contains(strings.Split(i.Options, ","), "rw") {
			continue
		}
		switch i.FSType {
		case "cgroup2":
			if better("cgroup2", i) {
				m.v2 = i.Mountpoint
			}
		case "cgroup":
			options := strings.Split(i.VFSOptions, ",")
			for _, c := range controllers {
				if slices.Contains(options, c) && better(c, i) {
					m.v1[c] = i.Mountpoint
				}
			}
		}
	}
	return m
}
