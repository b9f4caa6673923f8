// Package upper gives sandboxes their writable layers, each with a limit on what it may hold.
//
// It owns DIR/disk and all in it. A layer is a volume: a directory that the file system counts apart, with an "upper"
// and a "work" directory in it, which are what overlayfs wants. Volumes lie in three places: pool (empty, made in
// advance), live (by sandbox id), trash (given back, removed in the background). A volume moves from one to the next by
// rename, so neither taking nor giving back waits for work, and a crash leaves nothing that has no place. Where volumes
// are dear to make, one of the trash that holds next to nothing is emptied and goes back into the pool: nothing that a
// sandbox could reach, or can still reach, is in it then.
//
// How the limit is enforced is found by trying, in this order:
//
//	project quota  DIR lies on XFS or ext4 mounted with prjquota
//	btrfs          DIR lies on btrfs with quotas on
//	btrfs image    DIR/disk/uppers.btrfs, a sparse file on a loop device, mounted detached: in no mount table
//
// What is there already wins over this order. Where none works, Open is FailedPrecondition: a disk limit that nobody
// enforces is not given. Each way is tried by writing over a limit before it is trusted.
//
// The image lives on with its sandboxes when the edge is killed: their overlays hold the file system, and Open finds
// the same loop device again. When nothing uses it any more the kernel detaches the device by itself.
//
// Store may be used concurrently.
package upper
