package main

import (
	"testing"

	"github.com/sandsea/sandsea/internal/testkit/require"
	platform "github.com/sandsea/sandsea/internal/testkit/server"
)

// What run and exec give to a pipe is whole, however little of it the sandbox's record may keep.
func TestAPipeGetsAllOutput(t *testing.T) {
	require.Root(t)
	require.Feature(t, "bin:busybox")
	s := platform.Start(t, platform.Config{})
	if err := s.ImportBusybox(t.Context()); err != nil {
		t.Fatal(err)
	}
	r := &real{Server: s, t: t, dir: t.TempDir()}
	const size = 22_888_896 // of seq 1 3000000
	id := r.out("create", "--output", "1M")
	for name, args := range map[string][]string{
		"run":  {"run", "--output", "1M", "--", "seq", "1", "3000000"},
		"exec": {"exec", id, "--", "seq", "1", "3000000"},
	} {
		got := program{args: args, env: r.env()}.run(t)
		if got.code != 0 || len(got.stdout) != size || got.stderr != "" {
			t.Errorf("%s: code %d, %d bytes, %.200q; want %d bytes", name, got.code, len(got.stdout), got.stderr, size)
		}
	}
	r.out("stop", id)
}
