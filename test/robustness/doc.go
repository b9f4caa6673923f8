// Package robustness breaks a running platform on purpose and checks what it promises then (README.md): processes go on,
// no recorded byte and no exit status is lost, nothing is left behind.
package robustness
