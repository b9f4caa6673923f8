// Package version tells which build this is.
package version

// release is set by the Makefile: -X …/internal/version.release=0.1.0+commit.
var release = "0.1.0-dev"

// String is the release with the commit that it was built from.
func String() string { return release }
