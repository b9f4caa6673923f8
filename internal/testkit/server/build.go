package server

import "context"

// Binary puts the sandsea binary into dir, built from this tree, for tests of commands that need no server.
func Binary(ctx context.Context, dir string) (string, error) { return binary(ctx, dir) }
