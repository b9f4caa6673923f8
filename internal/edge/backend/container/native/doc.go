// Package native is the backend of container sandboxes by our own runtime: control groups, a writable layer, a range of
// user ids, an overlay of id-mapped layers, and a sandsea-init that the spawner clones into namespaces of its own.
//
// It owns the order in which these are taken and given back, and what proves that a limit or a feature is in force: a
// sandbox whose inside reports less than was asked for is not started. Every kernel object bears the sandbox's id in
// its name, below names that bear the edge's tag; Sweep finds by them whatever a crash left.
//
// What outlives the edge: the sandbox itself, held by the keeper. A Handle holds names and numbers only; the
// descriptors come from the keeper's roster, by Config.Held.
//
// A Backend may be used by several goroutines; calls for one sandbox must not overlap, but for Keep, Close and the
// reading methods of its Instance.
package native
