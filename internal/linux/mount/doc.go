// Package mount is the kernel's descriptor-based mount interface: fsopen, fsconfig, fsmount, open_tree, move_mount and
// mount_setattr.
//
// It owns nothing. Everything that it makes is a detached mount, held by a descriptor and gone when the last descriptor
// of it is closed, so a killed process leaves no mount behind. Every function may be called at once from several
// goroutines; PivotInto changes the root of the whole process. Works on Linux ≥ 6.15, which lets detached mounts
// be layers of an overlay; Probe in package layers/compose finds out by trying.
package mount
