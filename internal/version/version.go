// Package version tells which build this is.
package version

import "runtime/debug"

// release is set by the linker for a release build: -X …/internal/version.release=1.2.3.
var release = "0.1.0-dev"

// String is the release with the commit it was built from, when that is known.
func String() string {
	info, ok := debug.ReadBuildInfo()
	if !ok {
		return release
	}
	for _, s := range info.Settings {
		if s.Key == "vcs.revision" && len(s.Value) >= 12 {
			return release + "+" + s.Value[:12]
		}
	}
	return release
}
