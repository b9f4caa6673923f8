// Package e2e tests the platform as its users meet it: the real binary with its keeper and spawner, real sandboxes, and
// the Go client. Tests are named by behaviour and share one server, each with sandboxes of its own; those that end or
// restart a server have their own (package robustness has the faults).
package e2e
