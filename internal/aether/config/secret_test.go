package config

import "testing"

func TestASecretIsForItsProjects(t *testing.T) {
	for project, want := range map[string]bool{"lab": true, "lab/x": true, "laboratory": false, "default": false, "": false} {
		if got := (Secret{projects: []string{"lab"}}).For(project); got != want {
			t.Errorf("%q: %v", project, got)
		}
		if !(Secret{projects: []string{"*"}}).For(project) {
			t.Errorf("%q: not among all", project)
		}
	}
}
