package main

import (
	"os"
	"path/filepath"
	"testing"

	"github.com/sandsea/sandsea/internal/aether/config"
	"github.com/sandsea/sandsea/internal/testkit/require"
	platform "github.com/sandsea/sandsea/internal/testkit/server"
)

// An Aether outlives its edge, but not what it was told: what aether.toml says when up starts holds once it is ready.
func TestAChangedAetherTomlHoldsAfterTheNextUp(t *testing.T) {
	require.Root(t)
	require.Feature(t, "bin:busybox")
	s := platform.Start(t, platform.Config{})
	if _, err := os.Stat(filepath.Join(s.Dir, "run", "gate.netns")); err != nil {
		t.Skip("this machine cannot enforce egress")
	}
	again := func() int {
		t.Helper()
		if err := s.Terminate(); err != nil {
			t.Fatal(err)
		}
		if err := s.Up(t.Context()); err != nil {
			t.Fatal(err)
		}
		return s.Pid("aether")
	}
	first := s.Pid("aether")
	if same := again(); same != first {
		t.Errorf("aether %d became %d although nothing has changed", first, same)
	}
	key := filepath.Join(t.TempDir(), "key")
	write := func(file, text string) {
		t.Helper()
		if err := os.WriteFile(file, []byte(text), 0o600); err != nil {
			t.Fatal(err)
		}
	}
	write(key, "one")
	write(filepath.Join(s.Dir, config.FileName), "[secrets.k]\nhosts = [\"api.example\"]\nprojects = [\"*\"]\nheader = \"X-Key\"\nvalue_file = \""+key+"\"\n")
	second := again()
	if second == first {
		t.Error("aether goes on without the secret")
	}
	write(key, "two")
	if third := again(); third == second {
		t.Error("aether goes on with the secret's old value")
	}
}
