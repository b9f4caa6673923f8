// Package wire is the line to sandsea-init, PID 1 of a container sandbox: the messages of init/wire.h and the client
// that implements chronus.Channel.
//
// A Channel owns a duplicate of the control socket and one goroutine that reads it. Answers find their callers by the
// number of the process or by a sequence number, so any number of calls may be under way at once. The peer is not
// trusted: a message of the wrong size or kind, or about a process that nobody asked for, closes the line, and every
// call then and later fails with errdefs.Unavailable. What is kept per line is bounded by the 1,024 slots of the peer
// and the calls of this side.
//
// The layouts are fixed for a version, and the bytes of each are compared with those of the C end
// (init/testdata/golden.txt).
package wire
