// Package cache keeps what package services fetched: bytes and a little metadata under a key, on disk, below a bound.
//
// A key stands for one thing of one upstream, so it is best its URL. What several callers ask for at once is fetched
// once (single flight) and streams to all of them while it comes; a caller who leaves cancels nothing for the others,
// and when the last has left the fetch ends soon after. An object is committed only when it is whole and has the digests
// that its caller expects: one that has not breaks the transfers under way and is never served again.
//
// On disk, an object is one file: the bytes, then their metadata, moved into place whole, so a crash leaves objects or
// temporary files, and Open sweeps those. A file's mtime is when its object was fetched or confirmed, its atime when it
// was last used. There is no database: Open reads the end of each file.
//
// A Cache is safe for concurrent use. It owns its directory; two processes must not share one.
package cache
