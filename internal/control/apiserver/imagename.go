package apiserver

import (
	"path"
	"strings"

	"github.com/google/go-containerregistry/pkg/name"
)

// spelled gives the name under which an image of a registry is kept, for the other ways in which Docker lets people
// write it: "python:latest" for "python" and for its full name at the hub. What is written so already comes back.
func spelled(ref string) string {
	for _, hub := range []string{strings.TrimPrefix(name.DefaultRegistry, "index."), name.DefaultRegistry} {
		if rest, ok := strings.CutPrefix(ref, hub+"/"); ok {
			ref = strings.TrimPrefix(rest, "library/")
			break
		}
	}
	if !strings.ContainsAny(path.Base(ref), ":@") {
		ref += ":latest"
	}
	return ref
}
