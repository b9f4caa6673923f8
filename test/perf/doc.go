// Package perf holds the gates of speed: ratios between peers that take turns on the same machine, never absolute times,
// since those are the machine's.
package perf
