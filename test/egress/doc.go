// Package egress tries every way out of a sandbox that we could think of, and judges from outside: what counts is what
// a capture on the far side of the host saw, not what the attempt was told. The host, here a network namespace of the
// test, has a world behind it in which every address exists (testkit/farside).
package egress
