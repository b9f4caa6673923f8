// Package plan is what an environment compiles to, once: everything about a root file system that does not depend on
// the single sandbox. A create is a plan, an id, a cgroup and an upper directory.
package plan

import (
	"github.com/sandsea/sandsea/internal/image"
)

// Plan is an environment in the form that a backend needs. It holds no descriptors: package layers/compose opens them.
type Plan struct {
	// Layers, lowest first; each is present in the blob store.
	Layers []image.Digest
	// Config in force: the image's under the sandbox's own user, workdir and environment.
	Config image.Config
	// NoNewPrivs makes set-user-id programs gain nothing.
	NoNewPrivs bool
	// Hostname inside, at most 63 bytes.
	Hostname string
	// Network asks for a link to the gate, with closed walls, and for its resolver.
	Network bool
}
