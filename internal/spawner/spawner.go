// Package spawner forks sandboxes.
//
// The spawner is a process of its own (`sandsea spawner`): small, stateless, with few descriptors, since a fork copies
// the descriptor table and the mount namespace of the forking process. It lives in the nursery, a private mount
// namespace whose root is a tmpfs that holds only the sandsea-init binary (mode 0711, owned by host root), an empty
// /mnt and a /proc. It clones sandsea-init into the cgroup it was given and hands back a pidfd and the outside end of
// the control socket.
package spawner

import (
	"context"
	"os"
)

// Spec is one fork. Files stay the caller's.
type Spec struct {
	// ID of the sandbox, for messages only.
	ID string
	// Cgroup is the sandbox's v2 cgroup directory; the child is born in it.
	Cgroup *os.File
	// Tasks are tasks files of v1 controllers, open for writing: the child enters those groups by itself, before anything
	// else. (Moving it from outside would stop all forks of the machine for milliseconds.)
	Tasks []*os.File
	// Root is the detached mount of the composed root file system (nil: it comes with the set-up), Dev that of /dev, Sys
	// that of /sys (may be nil); they become descriptors 4, 5 and 6 of sandsea-init beside the control socket, 3.
	Root, Dev, Sys *os.File
	// UIDBase is the first of the 65,536 host ids that are 0 to 65,535 inside.
	UIDBase uint32
}

// Child is a forked sandsea-init that waits for its set-up message.
type Child struct {
	Pid     int
	Pidfd   *os.File
	Control *os.File
}

// Client is the edge's end. Spawn returns a process inside s.Cgroup, or an error; after an error or a broken connection
// the caller kills that cgroup by name and assumes nothing.
type Client interface {
	Spawn(ctx context.Context, s Spec) (Child, error)
	Close() error
}
