package files

import (
	"archive/tar"
	"context"
	"errors"
	"fmt"
	"io"
	"strings"
	"syscall"
	"time"

	"github.com/sandsea/sandsea/api/errdefs"
)

const (
	// maxEntries is how many entries an uploaded archive may have.
	maxEntries = 1_000_000
	// maxDirBytes bounds what is remembered of directories until the end, when their modes and times are set.
	maxDirBytes = 64 << 20
)

// Uploaded counts what UploadTar made: entries of all kinds, and bytes of files.
type Uploaded struct {
	Files int64
	Bytes int64
}

// UploadTar unpacks a tar stream below a directory, which is made if it is missing, with its parents. Modes, times,
// symbolic links, hard links within the tree and empty directories are kept; everything belongs to the user, or to who
// GivingTo named, with the directories that had to be made for it; owners in the archive mean nothing. Files in
// the way are replaced, directories are kept. Devices, pipes, absolute names and names with ".." are refused with the
// number of the entry, and so is an entry whose path leaves the directory through a link. What was unpacked before an
// error stays; the file at which it happened is as it was.
func (v *View) UploadTar(ctx context.Context, dir string, r io.Reader) (Uploaded, error) {
	abs, err := v.abs(dir)
	if err != nil {
		return Uploaded{}, err
	}
	rep, s, err := v.first(ctx, dir, request{op: opMkdir, flags: flagParents, path: abs, mode: 0o755})
	if err != nil {
		return Uploaded{}, err
	}
	defer s.release()
	u := &unpacker{v: v, s: s, dir: dir, made: rep.flags&flagDid != 0}
	if v.gives != nil {
		u.parents = map[string]struct{}{}
		if u.made {
			u.dirs = append(u.dirs, dirEntry{mode: 0o755, mine: true, given: true})
		}
	}
	if err := u.begin(ctx, abs); err != nil {
		return Uploaded{}, err
	}
	defer v.undo(ctx, s, u.base)
	err = u.run(ctx, r)
	return u.done, err
}

// unpacker unpacks one archive below an open directory.
type unpacker struct {
	v     *View
	s     lease
	dir   string // as the caller gave it
	base  uint32 // its handle
	made  bool   // the directory is new, so that an entry for it counts
	owner bool   // keep the archive's owners
	// parents are directories that are known to be there. Nil: nobody asks, since all that is made is the user's.
	parents map[string]struct{}
	count   int
	dirs    []dirEntry
	held    int // bytes of names in dirs
	done    Uploaded
}

// dirEntry waits for the end: what is put into a directory changes its time, and its mode may forbid to put anything.
type dirEntry struct {
	name  string
	mode  uint32
	mtime time.Time
	uid   uint32
	gid   uint32
	mine  bool // made here
	given bool // by no entry of its own, which would set its mode and time
}

// source notes the error of a stream, to tell it from those of the archive in it.
type source struct {
	r   io.Reader
	err error
}

func (s *source) Read(p []byte) (int, error) {
	n, err := s.r.Read(p)
	if err != nil && err != io.EOF {
		s.err = err
	}
	return n, err
}

func (u *unpacker) begin(ctx context.Context, abs string) error {
	rep, err := u.v.next(ctx, u.s, u.dir, request{op: opDir, flags: flagPathOnly, path: abs})
	u.base = rep.handle
	return err
}

func (u *unpacker) run(ctx context.Context, r io.Reader) error {
	src := &source{r: r}
	archive := tar.NewReader(src)
	for {
		if ctx.Err() != nil {
			return ended(ctx, u.dir, u.count > 0)
		}
		h, err := archive.Next()
		if err == io.EOF {
			return u.finish(ctx)
		}
		u.count++
		if err != nil {
			return u.broken(ctx, src, err)
		}
		if u.count > maxEntries {
			return u.refuse("the archive has more than %d entries", maxEntries).WithField("data", "1000000 entries")
		}
		if err := u.entry(ctx, h, archive); err != nil {
			if broken, ok := errors.AsType[errSource](err); ok {
				return u.broken(ctx, src, broken.error)
			}
			if e, ok := errors.AsType[*errdefs.Error](err); ok {
				e.Msg = fmt.Sprintf("entry %d (%s): %s", u.count, shown(h.Name), e.Msg)
			}
			return err
		}
	}
}

// broken is the error of a stream that ended early or holds no archive.
func (u *unpacker) broken(ctx context.Context, src *source, err error) error {
	switch {
	case ctx.Err() != nil:
		return ended(ctx, u.dir, u.count > 0)
	case src.err != nil:
		return fmt.Errorf("%s: read the archive: %w", u.dir, src.err)
	case errors.Is(err, io.ErrUnexpectedEOF):
		return u.refuse("the archive ends in the middle of entry %d", u.count)
	default:
		return u.refuse("entry %d: the archive is damaged: %v", u.count, err)
	}
}

func (u *unpacker) refuse(format string, args ...any) *errdefs.Error {
	return errdefs.New(errdefs.Invalid, u.dir, format, args...).WithField("data", "").
		WithHint("Send a tar archive with relative names and without devices")
}

// shown makes a name fit for a message.
func shown(name string) string {
	if len(name) > 200 {
		name = name[:200] + "…"
	}
	return fmt.Sprintf("%q", name)
}

// cleanName turns the name of an entry into a path below the directory: "" is the directory itself. It refuses what
// would lead elsewhere, also where it would come back.
func cleanName(name string) (string, error) {
	switch {
	case name == "":
		return "", errors.New("it has no name")
	case name[0] == '/':
		return "", errors.New("its name is absolute")
	case strings.IndexByte(name, 0) >= 0:
		return "", errors.New("its name has a NUL byte")
	}
	parts := make([]string, 0, 8)
	for part := range strings.SplitSeq(name, "/") {
		switch {
		case part == "" || part == ".":
			continue
		case part == "..":
			return "", errors.New("its name leads out of the directory")
		case len(part) > nameMax:
			return "", fmt.Errorf("its name has a part of %d bytes, more than %d", len(part), nameMax)
		}
		parts = append(parts, part)
	}
	clean := strings.Join(parts, "/")
	switch {
	case len(clean) > pathMax:
		return "", fmt.Errorf("its name has %d bytes, more than %d", len(clean), pathMax)
	case len(parts) > 0 && isTempName(parts[len(parts)-1]):
		return "", fmt.Errorf("names of the form %s<16 hex digits> are kept for unfinished files", tempPrefix)
	}
	return clean, nil
}

// entry makes one entry.
func (u *unpacker) entry(ctx context.Context, h *tar.Header, content io.Reader) error {
	if h.Typeflag == tar.TypeXGlobalHeader {
		return nil
	}
	name, err := cleanName(h.Name)
	if err != nil {
		return u.refuse("%v", err)
	}
	if name == "" && h.Typeflag != tar.TypeDir {
		return u.refuse("its name is that of the directory")
	}
	if err := u.makeParents(ctx, name); err != nil {
		return err
	}
	switch h.Typeflag {
	case tar.TypeReg, tar.TypeCont, tar.TypeGNUSparse:
		err = u.file(ctx, name, h, content)
	case tar.TypeDir:
		return u.directory(ctx, name, h)
	case tar.TypeSymlink:
		err = u.symlink(ctx, name, h)
	case tar.TypeLink:
		var old string
		if old, err = cleanName(h.Linkname); err != nil || old == "" {
			return u.refuse("it is a hard link to %s, which is no file of the archive", shown(h.Linkname))
		}
		_, err = u.step(ctx, name, request{op: opLink, flags: flagReplace | flagParents, path: name, path2: old})
	case tar.TypeChar, tar.TypeBlock, tar.TypeFifo:
		return u.refuse("devices and pipes are not made")
	default:
		return u.refuse("its type %q is not known", h.Typeflag)
	}
	if err == nil {
		u.done.Files++
	}
	return err
}

// step sends a request about a name below the directory.
func (u *unpacker) step(ctx context.Context, name string, r request) (reply, error) {
	r.base = u.base
	rep, err := u.v.next(ctx, u.s, strings.TrimRight(u.dir, "/")+"/"+name, r)
	if e, ok := errors.AsType[*errdefs.Error](err); ok && e.Errno == int(syscall.EXDEV) {
		e.Msg, e.Hint = "a link in its path leads out of the directory", "Remove the link, or unpack where it leads"
	}
	return rep, err
}

// makeParents makes the directories that lead to an entry and have none of their own, so that they can be given away.
func (u *unpacker) makeParents(ctx context.Context, name string) error {
	if u.parents == nil {
		return nil
	}
	for i := range len(name) {
		if name[i] != '/' {
			continue
		}
		parent := name[:i]
		if _, ok := u.parents[parent]; ok {
			continue
		}
		rep, err := u.step(ctx, parent, request{op: opMkdir, flags: flagParents, path: parent, mode: 0o755})
		if err != nil {
			return err
		}
		if u.held += 2 * (len(parent) + 64); u.held > maxDirBytes {
			return u.refuse("the archive has too many directories")
		}
		u.parents[parent] = struct{}{}
		if rep.flags&flagDid != 0 {
			u.dirs = append(u.dirs, dirEntry{name: parent, mode: 0o755, mine: true, given: true})
		}
	}
	return nil
}

// give says in a request whose the entry is to be.
func (u *unpacker) give(r *request, uid, gid uint32) {
	switch {
	case u.v.gives != nil:
		r.uid, r.gid = u.v.gives.UID, u.v.gives.GID
	case u.owner:
		r.uid, r.gid = uid, gid
	default:
		return
	}
	r.flags |= flagSetOwner
}

func ids(n int) uint32 { return uint32(min(max(n, 0), 1<<31-1)) }

func (u *unpacker) file(ctx context.Context, name string, h *tar.Header, content io.Reader) error {
	rep, err := u.step(ctx, name, request{op: opCreate, flags: flagNoFollow | flagParents, path: name, mode: 0o755})
	if err != nil {
		return err
	}
	n, err := copyBytes(ctx, rep.file, content)
	if cerr := rep.file.Close(); err == nil {
		err = cerr
	}
	if err != nil {
		u.v.undo(ctx, u.s, rep.handle)
		if _, ok := errors.AsType[errSource](err); ok {
			return err
		}
		return ofOS(strings.TrimRight(u.dir, "/")+"/"+name, err)
	}
	commit := request{
		op: opCommit, flags: flagSetMtime, handle: rep.handle, mode: uint32(h.Mode) & modePerm, mtime: h.ModTime,
	}
	u.give(&commit, ids(h.Uid), ids(h.Gid))
	if _, err := u.step(ctx, name, commit); err != nil {
		return err
	}
	u.done.Bytes += n
	return nil
}

func (u *unpacker) symlink(ctx context.Context, name string, h *tar.Header) error {
	switch {
	case h.Linkname == "" || strings.IndexByte(h.Linkname, 0) >= 0:
		return u.refuse("it is a symbolic link without a target")
	case len(h.Linkname) > pathMax:
		return u.refuse("it is a symbolic link to %d bytes, more than %d", len(h.Linkname), pathMax)
	}
	r := request{op: opSymlink, flags: flagReplace | flagParents, path: name, path2: h.Linkname}
	if _, err := u.step(ctx, name, r); err != nil {
		return err
	}
	set := request{op: opSetattr, flags: flagNoFollow | flagSetMtime, path: name, mtime: h.ModTime}
	u.give(&set, ids(h.Uid), ids(h.Gid))
	_, err := u.step(ctx, name, set)
	return err
}

func (u *unpacker) directory(ctx context.Context, name string, h *tar.Header) error {
	d := dirEntry{
		name: name, mode: uint32(h.Mode) & modePerm, mtime: h.ModTime, uid: ids(h.Uid), gid: ids(h.Gid), mine: u.made,
	}
	if name != "" {
		rep, err := u.step(ctx, name, request{op: opMkdir, flags: flagParents, path: name, mode: d.mode&0o777 | 0o700})
		if err != nil {
			return err
		}
		d.mine = rep.flags&flagDid != 0
	} else if !u.made {
		return nil // what the directory was before is not the archive's business
	}
	if u.held += len(name) + 64; u.held > maxDirBytes {
		return u.refuse("the archive has too many directories")
	}
	u.dirs = append(u.dirs, d)
	u.done.Files++
	return nil
}

// finish sets what waited, innermost and latest first.
func (u *unpacker) finish(ctx context.Context) error {
	for i := len(u.dirs) - 1; i >= 0; i-- {
		d := u.dirs[i]
		set := request{
			op: opSetattr, flags: flagDirectory | flagNoFollow | flagSetMode | flagSetMtime, path: d.name, mode: d.mode,
			mtime: d.mtime,
		}
		if d.given {
			set.flags &^= flagSetMtime | flagSetMode
		}
		u.give(&set, d.uid, d.gid)
		_, err := u.step(ctx, d.name, set)
		if e, ok := errors.AsType[*errdefs.Error](err); ok && !d.mine && e.Errno == int(syscall.EPERM) {
			continue // another user's directory keeps its mode
		}
		if err != nil {
			return err
		}
	}
	return nil
}
