package files

import (
	"context"
	"crypto/rand"
	"encoding/hex"
	"errors"
	"io"
	"strings"
	"syscall"

	"github.com/sandsea/sandsea/api/errdefs"
)

// Move renames a file, link or directory, as rename does: onto a file it replaces it, onto an empty directory only a
// directory goes. Between file systems, and for directories that lie in a layer of the image, it copies, puts the copy
// in place with one rename, then removes the original; that needs a tree of files, links and directories only, and
// keeps owners where the user may set them.
func (v *View) Move(ctx context.Context, from, to string) error {
	absFrom, err := v.abs(from)
	if err != nil {
		return err
	}
	absTo, err := v.abs(to)
	if err != nil {
		return err
	}
	if err := checkTarget(to); err != nil {
		return err
	}
	_, err = v.one(ctx, from, request{op: opRename, path: absFrom, path2: absTo})
	if !errors.Is(err, syscall.EXDEV) {
		return err
	}
	info, err := v.Stat(ctx, from, true)
	if err != nil {
		return err
	}
	temp := besides(absTo)
	// The copy never shows under its final name before it is whole, and goes when it is not.
	if err := v.duplicate(ctx, info, from, temp); err != nil {
		return v.discard(ctx, temp, err)
	}
	if _, err := v.one(ctx, to, request{op: opRename, path: temp, path2: absTo}); err != nil {
		return v.discard(ctx, temp, err)
	}
	return v.Remove(ctx, from, true)
}

// discard removes a copy that is not wanted any more, also when the call's time is over.
func (v *View) discard(ctx context.Context, path string, why error) error {
	ctx, stop := undoing(ctx)
	defer stop()
	return errors.Join(why, v.Remove(ctx, path, true))
}

// besides gives a name in the same directory that nobody uses. It is not one of the helper's, which it would remove.
func besides(abs string) string {
	var r [8]byte
	_, _ = rand.Read(r[:]) // it never fails
	abs = strings.TrimRight(abs, "/")
	return abs[:strings.LastIndexByte(abs, '/')+1] + ".sandsea-move-" + hex.EncodeToString(r[:])
}

// duplicate copies a file, link or tree to a path that does not exist.
func (v *View) duplicate(ctx context.Context, info Info, from, to string) error {
	owner := v.ids.UID == 0
	switch info.Type {
	case Symlink:
		if err := v.Symlink(ctx, info.Link, to); err != nil {
			return err
		}
		set := request{op: opSetattr, flags: flagNoFollow | flagSetMtime, path: to, mtime: info.ModTime}
		if owner {
			set.flags |= flagSetOwner
			set.uid, set.gid = info.UID, info.GID
		}
		_, err := v.one(ctx, from, set)
		return err
	case Regular:
		return v.duplicateFile(ctx, from, to, owner)
	case Directory:
		return v.duplicateTree(ctx, from, to, owner)
	default:
		return errdefs.New(errdefs.FailedPrecondition, from,
			"cannot be moved to another file system: it is no file, link or directory").WithHint("Make it anew there")
	}
}

func (v *View) duplicateFile(ctx context.Context, from, to string, owner bool) error {
	f, info, err := v.Open(ctx, from)
	if err != nil {
		return err
	}
	defer f.Close()
	rep, s, err := v.first(ctx, to, request{op: opCreate, flags: flagNoFollow, path: to})
	if err != nil {
		return err
	}
	defer s.release()
	if err := v.fill(ctx, to, rep, &info.Size, f); err != nil {
		v.undo(ctx, s, rep.handle)
		return err
	}
	commit := request{op: opCommit, flags: flagSetMtime, handle: rep.handle, mode: info.Mode, mtime: info.ModTime}
	if owner {
		commit.flags |= flagSetOwner
		commit.uid, commit.gid = info.UID, info.GID
	}
	_, err = v.next(ctx, s, to, commit)
	return err
}

func (v *View) duplicateTree(ctx context.Context, from, to string, owner bool) error {
	rep, s, err := v.first(ctx, to, request{op: opMkdir, flags: flagParents, path: to, mode: 0o700})
	if err != nil {
		return err
	}
	defer s.release()
	u := &unpacker{v: v, s: s, dir: to, made: rep.flags&flagDid != 0, owner: owner}
	if err := u.begin(ctx, to); err != nil {
		return err
	}
	defer v.undo(ctx, s, u.base)
	r, w := io.Pipe()
	var skipped []string
	packed := make(chan error, 1)
	go func() {
		var err error
		skipped, err = v.DownloadTar(ctx, from, w)
		_ = w.CloseWithError(err)
		packed <- err
	}()
	err = u.run(ctx, r)
	// Ends the packer when the unpacker failed; the trailer of a whole archive is still to be taken.
	if err == nil {
		_, err = io.Copy(io.Discard, r)
	}
	_ = r.CloseWithError(io.ErrClosedPipe)
	if perr := <-packed; perr != nil && !errors.Is(perr, io.ErrClosedPipe) {
		return perr
	}
	if err == nil && len(skipped) > 0 {
		return errdefs.New(errdefs.FailedPrecondition, from,
			"cannot be moved to another file system: %s cannot be copied", shown(skipped[0])).
			WithHint("Remove it first, or copy what is needed")
	}
	return err
}
