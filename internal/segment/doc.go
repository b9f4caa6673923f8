// Package segment is the log of numbered records that flow logs and trajectories are kept in: a directory of segments
// that one process writes and any number read.
//
// Records are numbered from 0 without a gap. The newest segment, `<first number>.open`, grows by frames; a frame's
// checksum is seeded with that of the frame before, so that one that moved, repeats or is missing is seen. At 4 MiB the
// next segment is made, and then the full one is packed into `<first number>.seg` and removed; where both exist, .seg
// wins. Each segment's header holds the SHA-256 of the raw bytes of the one before.
//
// What it promises: a record whose Append has returned is read by every reader, also when the writer is killed in the
// next moment. What a kill leaves half written is cut when the log is opened again. Changed bytes are never given out as
// records: they are DataLoss. Power loss is another matter: what came after the last Sync may be gone, as a whole tail.
//
// What it does not do: it knows nothing of what records say, does not sync by itself but when it packs, and does not
// lock: two writers of one directory destroy it.
//
// A Pool and a Log may be used by any number of goroutines, a Reader by one at a time.
package segment
