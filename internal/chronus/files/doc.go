// Package files performs file calls inside a sandbox, with the rights of a user inside it.
//
// It owns the edge's end of the line to file helpers (init/files.c): processes inside the sandbox that open, list, make
// and remove for one user each. The edge walks no path of a sandbox; it gets descriptors of regular files and moves the
// bytes itself, in flat memory at any size. A Helpers belongs to one sandbox; it starts a helper when one is needed,
// keeps it a while and starts another when that has ended.
//
// A helper is worth no more than its user, and nothing that it says is believed: messages are checked for size, order
// and form, names for slashes, descriptors by fstat. A helper that breaks a rule is given up.
//
// Promises: Write leaves the old or the new file, never a part; who may not write to a file may not replace it. Nothing
// blocks on a pipe or device. What a helper may have done when it ended before it answered is errdefs.Unknown. Errors
// are *errdefs.Error with the errno and, in Object, the path as the caller gave it.
//
// Everything may be used by any number of goroutines. Names are bytes and need not be UTF-8.
package files
