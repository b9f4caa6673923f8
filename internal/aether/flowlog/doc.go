// Package flowlog keeps one record for each DNS question, connection, artefact and denial of a sandbox, in a segmented
// log of its own (package segment) below one directory, so that the newest 64 MiB stay.
//
// Aether writes, through a Store; the edge reads, also while Aether is away. Add never waits for the disk. The first of
// equal events is written at once; those of the ten seconds that follow are folded into one that says how many they were.
// A sandbox that makes more different events than the log should take loses their names, never their number: they are
// counted by phase, kind, verdict and rule.
//
// What it promises: events of one sandbox are in the order of Add, but for folded ones, which come when their ten seconds
// are over. Numbers have no gap, also across restarts; what is no longer there is told as missing. An event that was
// written survives the writer's kill; up to ten seconds of folded repeats do not. Nothing is synced: a loss of power
// takes the tail.
//
// A Store may be used by any number of goroutines.
package flowlog
