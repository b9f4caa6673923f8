// Package blob is the contract of stores that keep immutable bytes by digest. Implementations: posix (any local or
// shared file system), mem (tests). The suite in blob/conform runs over each of them.
package blob

import (
	"context"
	"io"
	"iter"

	"github.com/sandsea/sandsea/internal/image"
)

// Store keeps immutable bytes by their SHA-256 digest.
//
// Put is visible when it is whole, verified and durable; of a digest that is there it is success and reads r no
// further than needed. A reader whose bytes do not match d is DataLoss and leaves nothing. ReadAt gives the right bytes
// or an error, never zeros for what is missing; io.EOF as io.ReaderAt. Stat of an absent blob is NotFound. Delete is the
// collector's alone and idempotent. All methods may be called at once.
type Store interface {
	Put(ctx context.Context, d image.Digest, r io.Reader) error
	ReadAt(ctx context.Context, d image.Digest, p []byte, off int64) (int, error)
	Stat(ctx context.Context, d image.Digest) (size int64, err error)
	Delete(ctx context.Context, d image.Digest) error
	// All yields every digest, in no order, for the collector.
	All(ctx context.Context) iter.Seq2[image.Digest, error]
}

// Local is implemented by stores whose blobs are plain files on this machine, so that they can be mounted where they
// lie. Path of an absent blob is NotFound.
type Local interface {
	Path(ctx context.Context, d image.Digest) (string, error)
}

// Creator is implemented by stores that take bytes whose digest is known only at their end.
type Creator interface {
	Store
	// Create stages a new blob. Nothing of it is visible before Commit.
	Create(ctx context.Context) (Writer, error)
}

// Writer is a blob in the making. It is used by one goroutine. ReadAt reads back what has been written.
type Writer interface {
	io.Writer
	io.ReaderAt
	// Digest is that of all that has been written so far.
	Digest() image.Digest
	// Commit makes the blob visible and durable and returns its digest; a blob that is there already is success. The
	// writer is finished after it, also when it failed.
	Commit(ctx context.Context) (image.Digest, error)
	// Abort removes what was staged. After Commit, or again, it does nothing.
	Abort() error
}
