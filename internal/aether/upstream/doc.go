// Package upstream knows where package services get their packages: from the operator's aether.toml or from what the
// node's own clients are configured with (Discover), and how to fetch there (Client).
//
// No registry's name stands in this package or anywhere else: the clients are asked. Discover runs them, as the edge and
// with time limits, and hands Aether a plain value. What neither the operator nor a client names stays unknown, and says
// what to do about it.
package upstream
