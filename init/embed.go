// Package sandseainit carries sandsea-init, PID 1 of every container sandbox: a static program in C that this folder's
// Makefile builds. The package owns the bytes of the binary and nothing else; it is safe for concurrent use.
//
// Each C file begins with a build constraint, since the go command takes C beside Go for cgo.
package sandseainit

import (
	_ "embed" // the binary is part of the program, so that edge and init never differ in version
)

//go:embed build/sandsea-init
var binary []byte

// Binary gives the program's bytes. The caller does not change them. They are written to a file of mode 0711 that is
// owned by host root and lies outside every root file system.
func Binary() []byte { return binary }
