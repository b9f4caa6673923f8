package main

import (
	"context"
	"os"
	"path/filepath"
	"testing"
	"time"

	"github.com/sandsea/sandsea/internal/testkit/require"
	"github.com/sandsea/sandsea/internal/testkit/server"
)

// TestNewcomer is the short form: the binary of `make build`, and an image from this machine's cache.
func TestNewcomer(t *testing.T) {
	require.Root(t)
	root, err := server.Root()
	if err != nil {
		t.Fatal(err)
	}
	binary := filepath.Join(root, "build/sandsea")
	if _, err := os.Stat(binary); err != nil {
		require.That(t, "bin:build/sandsea", err)
	}
	ctx, stop := context.WithTimeoutCause(t.Context(), 10*time.Minute, context.DeadlineExceeded)
	defer stop()
	if _, err := server.Debian(ctx, debianPackages...); err != nil {
		require.That(t, "debian", err)
	}
	n := newcomer{source: root, binary: binary, say: t.Logf}
	if python := filepath.Join(root, "build/venv/bin/python"); exists(python) {
		n.python = python
	}
	if err := n.run(ctx); err != nil {
		t.Fatal(err)
	}
}

func exists(path string) bool {
	_, err := os.Stat(path)
	return err == nil
}
