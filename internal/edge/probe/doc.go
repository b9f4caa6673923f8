// Package probe finds out what this machine can enforce for containers, by trying each thing once: no version is ever
// compared.
//
// It answers in the words of package node: OK by the best mechanism, Slower by another, Missing with what to do, Unsure
// when the trial itself failed. Run is for an edge that has its control groups and writable layers open already;
// Machine opens throw-away ones, for `sandsea doctor` without an edge. Neither leaves anything behind, and each trial
// has a time limit. May be called concurrently.
package probe
