// Package etcd is the store on etcd: embedded in one process (Open) or a cluster's client (Dial). It is the only
// package that imports etcd. It passes the suite of store/conform.
//
// Calls of this process go through etcd's in-process client. Over the network come nodes alone, when Config.Listener is
// given: to the calls and records that guard.go names, and to nothing else of etcd. fsync stays on: a returned Txn
// survives power loss.
//
// Every call has a limit (Config.CallTimeout, a second). A read that meets it is errdefs.Unavailable; a write that was
// sent is errdefs.Unknown, since it may have been applied. After such a write the next one asks first whether the store
// answers at all and is Unavailable when it does not, so that an outage costs one unknown answer, not one per caller.
// Safe for concurrent use; Close returns when the member has stopped.
package etcd
