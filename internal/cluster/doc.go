// Package cluster is the trust between the machines of one cluster: its authority, the certificates that say what a
// machine is, and the invitation that makes a machine a node.
//
// Every line between machines is TLS 1.3 with certificates on both ends. A certificate has one role: server, or node
// with a name. Who dials says which role, and for a node which name, it wants to find; who is dialled asks PeerOf who
// calls and decides. A node's certificate is never taken for a server's. There is no revocation: to shut out a node
// whose key has leaked, a new authority is made and every other node is invited again.
//
// An Identity may be used by any number of goroutines.
package cluster
