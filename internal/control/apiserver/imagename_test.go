package apiserver

import (
	"strings"
	"testing"

	"github.com/google/go-containerregistry/pkg/name"
)

// hub is the registry of names without one.
var hub = strings.TrimPrefix(name.DefaultRegistry, "index.")

func TestImagesAreFoundAsDockerLetsPeopleWriteThem(t *testing.T) {
	for ref, want := range map[string]string{
		"python":                            "python:latest",
		"python:3.11":                       "python:3.11",
		hub + "/library/python:3.11":        "python:3.11",
		hub + "/library/python":             "python:latest",
		name.DefaultRegistry + "/team/tool": "team/tool:latest",
		hub + "/team/tool:v1":               "team/tool:v1",
		"localhost:5000/team/tool":          "localhost:5000/team/tool:latest",
		"registry.example/team/tool:v1":     "registry.example/team/tool:v1",
		"python@sha256:00":                  "python@sha256:00",
		"library/python":                    "library/python:latest",
		"debian:bookworm+git,python3":       "debian:bookworm+git,python3",
		"registry.example:443/a/b@sha256:":  "registry.example:443/a/b@sha256:",
	} {
		if got := spelled(ref); got != want {
			t.Errorf("%s: %s, want %s", ref, got, want)
		}
	}
}
