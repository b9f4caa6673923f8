package build

import (
	"archive/tar"
	"context"
	"crypto/sha256"
	"encoding/binary"
	"errors"
	"fmt"
	"hash"
	"io"
	"path"
	"slices"
	"strings"

	"github.com/sandsea/sandsea/api/errdefs"
	"github.com/sandsea/sandsea/internal/image"
)

const (
	maxID        = 65535 // of a user namespace with 65,536 ids
	maxName      = 255
	maxPath      = 4096
	maxXattr     = 65535 // bytes of one value, and of all of an entry
	maxHops      = 40
	maxMajor     = 1<<12 - 1
	maxMinor     = 1<<20 - 1
	wh           = ".wh."
	whOpaque     = ".wh..wh..opq"
	whAUFS       = ".wh..wh."
	xattrRecord  = "SCHILY.xattr."
	capRevision2 = 0x02000000
)

// tarReader reads one tar into a layer. Nothing of it touches the host's file system: a name is a walk through the
// tree.
type tarReader struct {
	archive string // for messages
	limits  Limits
	layer   *layer
	// whiteouts: names that begin with ".wh." hide what lies in the layers below, as OCI images have it.
	whiteouts bool
	// lower are the layers of the same image below, lowest first, to look up the targets of hard links and the
	// attributes of directories that this layer does not name.
	lower []*layer
	// used is shared by all layers of an image.
	used *usage
	room func() error // asked now and then
	// diffID is the digest that the tar itself must have; empty: not known.
	diffID string

	entry int64
	name  string
}

// usage is what an import has taken of its limits, and what it dropped.
type usage struct {
	entries, metadata, bytes int64
	dropped                  map[string]int64 // attribute → how often

	grow func(entries, metadata int64) error // asked before more is held in memory; nil: nobody else is there
}

// more asks for room in memory for what is counted so far.
func (u *usage) more() error {
	if u.grow == nil {
		return nil
	}
	return u.grow(u.entries, u.metadata)
}

func (u *usage) drop(what string) {
	if u.dropped == nil {
		u.dropped = map[string]int64{}
	}
	u.dropped[what]++
}

// bad refuses the archive because of the present entry.
func (t *tarReader) bad(format string, args ...any) error {
	return errdefs.New(errdefs.Invalid, t.archive, "entry %d %q %s", t.entry, clip(t.name), fmt.Sprintf(format, args...)).
		WithField("entry", "").WithHint("Nothing imported; repack without it")
}

func (t *tarReader) over(what, limit string) error {
	where := ""
	if t.entry > 0 {
		where = fmt.Sprintf("entry %d %q: ", t.entry, clip(t.name))
	}
	return errdefs.New(errdefs.Invalid, t.archive, "%smore than %s %s", where, limit, what).
		WithField("archive", limit+" "+what).WithHint("Nothing imported; repack it smaller")
}

// broken explains an error of the tar or of its compression.
func (t *tarReader) broken(err error) error {
	if errdefs.KindOf(err) != errdefs.Internal || isSystem(err) {
		return err
	}
	msg := err.Error()
	switch {
	case errors.Is(err, io.ErrUnexpectedEOF), errors.Is(err, io.EOF):
		msg = "ends in the middle"
	case errors.Is(err, tar.ErrHeader):
		msg = "no valid tar header"
	case errors.Is(err, tar.ErrFieldTooLong):
		msg = "a header is too long"
	}
	return errdefs.New(errdefs.Invalid, t.archive, "after entry %d: %s", t.entry, msg).Wrap(err).
		WithHint("Nothing imported; pack or send it again")
}

func (t *tarReader) run(ctx context.Context, r io.Reader) error {
	var sum hash.Hash
	if t.diffID != "" {
		sum = sha256.New()
		r = io.TeeReader(r, sum)
	}
	tail := &tailReader{r: r}
	tr := tar.NewReader(tail)
	for {
		if err := context.Cause(ctx); err != nil {
			return err
		}
		hdr, err := tr.Next()
		if errors.Is(err, io.EOF) {
			break
		}
		if err != nil {
			return t.broken(err)
		}
		t.entry++
		t.name = hdr.Name
		if t.entry%256 == 1 && t.room != nil {
			if err := t.room(); err != nil {
				return err
			}
		}
		if err := t.add(hdr, tr); err != nil {
			return err
		}
	}
	if err := t.hideBelow(); err != nil {
		return err
	}
	// The layers of an OCI image have digests; some of their makers leave the end mark out.
	if tail.total == 0 && !t.whiteouts {
		return errdefs.New(errdefs.Invalid, t.archive, "is empty").WithHint("Nothing imported; pack or send it again")
	}
	if !tail.zero() && !t.whiteouts {
		return errdefs.New(errdefs.Invalid, t.archive, "after entry %d: ends without the end mark of a tar", t.entry).
			WithHint("Nothing imported; it looks cut off, send it again")
	}
	// What follows the end mark has no meaning, but its checksum and size have.
	if _, err := io.Copy(io.Discard, tail); err != nil {
		return t.broken(err)
	}
	if sum != nil {
		if got := image.FromHash(sum); string(got) != t.diffID {
			return errdefs.New(errdefs.Invalid, t.archive, "unpacks to digest %s, its config says %s", got, clip(t.diffID)).
				WithHint("Nothing imported; save the image again")
		}
	}
	return nil
}

// tailReader remembers whether the last block that was read is zeros.
type tailReader struct {
	r     io.Reader
	total int64
	last  [512]byte
}

func (t *tailReader) Read(p []byte) (int, error) {
	n, err := t.r.Read(p)
	t.total += int64(n)
	if n >= len(t.last) {
		copy(t.last[:], p[n-len(t.last):n])
	} else if n > 0 {
		copy(t.last[:], t.last[n:])
		copy(t.last[len(t.last)-n:], p[:n])
	}
	return n, err
}

func (t *tailReader) zero() bool { return allZero(t.last[:]) }

// split checks a name and cuts it into its parts; the root has none.
func (t *tarReader) split(name, what string) ([]string, error) {
	switch {
	case strings.Contains(name, "\x00"):
		return nil, t.bad("%s has a NUL byte", what)
	case strings.HasPrefix(name, "/"):
		return nil, t.bad("%s is absolute", what)
	case len(name) > maxPath:
		return nil, t.bad("%s is longer than %d bytes", what, maxPath)
	}
	var parts []string
	for p := range strings.SplitSeq(name, "/") {
		switch {
		case p == "" || p == ".":
		case p == "..":
			if len(parts) == 0 {
				return nil, t.bad("leaves the root")
			}
			return nil, t.bad(`%s has ".." in it`, what)
		case len(p) > maxName:
			return nil, t.bad("%s has a part longer than %d bytes", what, maxName)
		default:
			parts = append(parts, p)
		}
	}
	return parts, nil
}

// add takes one entry.
func (t *tarReader) add(hdr *tar.Header, content io.Reader) error {
	switch hdr.Typeflag {
	case tar.TypeXGlobalHeader, 'V': // comments: git's commit id, GNU tar's volume label
		return nil
	}
	parts, err := t.split(hdr.Name, "its name")
	if err != nil {
		return err
	}
	if err := t.count(1, int64(len(hdr.Name)+len(hdr.Linkname))); err != nil {
		return err
	}
	if len(parts) == 0 {
		if hdr.Typeflag != tar.TypeDir {
			return t.bad("stands for the root but is no directory")
		}
		return t.attributes(t.layer.root, hdr)
	}
	dir, err := t.parent(parts[:len(parts)-1])
	if err != nil {
		return err
	}
	base := parts[len(parts)-1]
	if t.whiteouts && strings.HasPrefix(base, wh) {
		return t.whiteout(dir, base)
	}
	if hdr.Typeflag == tar.TypeLink {
		return t.hardlink(dir, base, hdr)
	}
	n, err := t.node(hdr)
	if err != nil {
		return err
	}
	if old := dir.children[base]; old != nil && old.isDir() && n.isDir() {
		n.children, n.whiteouts, n.opaque = old.children, old.whiteouts, old.opaque
		*old = *n
		return nil
	}
	if n.kind() == modeRegular {
		if t.used.bytes += n.size; t.used.bytes > t.limits.Bytes {
			return t.over("of content", gib(t.limits.Bytes))
		}
		if err := t.layer.file(n, content); err != nil {
			return t.broken(err)
		}
	}
	dir.children[base] = n
	return nil
}

func (t *tarReader) count(entries, metadata int64) error {
	if t.used.entries += entries; t.used.entries > t.limits.Entries {
		return t.over("entries", fmt.Sprint(t.limits.Entries))
	}
	if t.used.metadata += metadata; t.used.metadata > t.limits.Metadata {
		return t.over("of names and attributes", gib(t.limits.Metadata))
	}
	return t.used.more()
}

// node makes the inode of an entry that is no hard link, without content.
func (t *tarReader) node(hdr *tar.Header) (*node, error) {
	n := &node{}
	switch hdr.Typeflag {
	case tar.TypeReg, tar.TypeCont, tar.TypeGNUSparse:
		n.mode, n.size = modeRegular, hdr.Size
		if n.size < 0 {
			return nil, t.bad("has a negative size")
		}
	case tar.TypeDir:
		n.mode, n.children = modeDir, map[string]*node{}
	case tar.TypeSymlink:
		n.mode, n.link = modeSymlink, hdr.Linkname
		if n.link == "" || len(n.link) >= maxPath || strings.Contains(n.link, "\x00") {
			return nil, t.bad("is a symbolic link with a target that cannot be")
		}
	case tar.TypeFifo:
		n.mode = modeFifo
	case tar.TypeChar, tar.TypeBlock:
		n.mode = modeChar
		if hdr.Typeflag == tar.TypeBlock {
			n.mode = modeBlock
		}
		if hdr.Devmajor < 0 || hdr.Devmajor > maxMajor || hdr.Devminor < 0 || hdr.Devminor > maxMinor {
			return nil, t.bad("is a device %d:%d, numbers that Linux does not have", hdr.Devmajor, hdr.Devminor)
		}
		// As the kernel's new_encode_dev.
		major, minor := uint32(hdr.Devmajor), uint32(hdr.Devminor)
		n.rdev = minor&0xff | major<<8 | minor&^0xff<<12
	default:
		return nil, t.bad("is of type %q, which is not read", hdr.Typeflag)
	}
	return n, t.attributes(n, hdr)
}

// attributes sets what every inode has.
func (t *tarReader) attributes(n *node, hdr *tar.Header) error {
	if hdr.Uid < 0 || hdr.Uid > maxID || hdr.Gid < 0 || hdr.Gid > maxID {
		return errdefs.New(errdefs.Invalid, t.archive, "entry %d %q belongs to %d:%d; ids go up to %d",
			t.entry, clip(t.name), hdr.Uid, hdr.Gid, maxID).
			WithField("entry", fmt.Sprint(maxID)).WithHint("Nothing imported; repack it with smaller ids, as tar --owner does")
	}
	xattrs, err := t.xattrs(hdr)
	if err != nil {
		return err
	}
	n.mode = n.kind() | uint32(hdr.Mode)&modePerm
	n.uid, n.gid = uint32(hdr.Uid), uint32(hdr.Gid)
	n.sec, n.nsec = hdr.ModTime.Unix(), uint32(hdr.ModTime.Nanosecond())
	n.xattrs = xattrs
	return nil
}

// xattrs keeps the attributes that an image may set. Those that would speak to the host's kernel or to overlayfs are
// dropped and noted.
func (t *tarReader) xattrs(hdr *tar.Header) (map[string]string, error) {
	var out map[string]string
	total := 0
	for k, v := range hdr.PAXRecords {
		name, ok := strings.CutPrefix(k, xattrRecord)
		if !ok {
			if strings.HasPrefix(k, "SCHILY.acl.") || strings.HasPrefix(k, "LIBARCHIVE.xattr.") {
				t.used.drop(k)
			}
			continue
		}
		switch {
		case strings.HasPrefix(name, "user.") && len(name) > len("user."):
		case name == xattrCap && validCap(v):
		case (name == xattrACL || name == xattrDefault) && validACL(v):
		default:
			t.used.drop(clip(name))
			continue
		}
		if len(name) > maxName || len(v) > maxXattr {
			return nil, t.bad("has an extended attribute %q that is too long", clip(name))
		}
		if total += len(name) + len(v) + 8; total > maxXattr {
			return nil, t.bad("has more than %d bytes of extended attributes", maxXattr)
		}
		if out == nil {
			out = map[string]string{}
		}
		out[name] = v
	}
	return out, t.count(0, int64(total))
}

// validCap tells a file capability that is not bound to one user namespace.
func validCap(v string) bool {
	return len(v) == 20 && binary.LittleEndian.Uint32([]byte(v))&0xff000000 == capRevision2
}

// validACL tells a POSIX ACL of version 2 whose ids are in range.
func validACL(v string) bool {
	if len(v) < 4 || (len(v)-4)%8 != 0 || binary.LittleEndian.Uint32([]byte(v)) != 2 {
		return false
	}
	for b := []byte(v[4:]); len(b) > 0; b = b[8:] {
		tag, id := binary.LittleEndian.Uint16(b), binary.LittleEndian.Uint32(b[4:])
		if (tag == 0x02 || tag == 0x08) && id > maxID {
			return false
		}
	}
	return true
}

// parent gives the directory with these parts and makes it where it is missing.
func (t *tarReader) parent(parts []string) (*node, error) {
	hops := 0
	for {
		dir, target, err := t.walk(parts)
		if err != nil || target == nil {
			return dir, err
		}
		if hops++; hops > maxHops {
			return nil, t.bad("goes through too many symbolic links")
		}
		parts = target
	}
}

// walk follows parts from the root. When a part is a symbolic link in the layers below, it gives the parts to go on
// with instead.
func (t *tarReader) walk(parts []string) (dir *node, instead []string, err error) {
	dir = t.layer.root
	hidden := dir.opaque
	for i, part := range parts {
		c := dir.children[part]
		if c == nil {
			at := parts[:i+1]
			var below *node
			if _, gone := dir.whiteouts[part]; !gone && !hidden {
				below, _ = stackLookup(t.lower, at)
			}
			if below != nil && below.kind() == modeSymlink {
				return nil, resolve(parts[:i], below.link, parts[i+1:]), nil
			}
			c = newDir()
			if below != nil && below.isDir() {
				// A directory that this layer does not name keeps the attributes that it has below.
				c.mode, c.uid, c.gid, c.sec, c.nsec = below.mode, below.uid, below.gid, below.sec, below.nsec
				c.xattrs = withoutOpaque(below.xattrs)
			}
			if err := t.count(1, int64(len(part))); err != nil {
				return nil, nil, err
			}
			dir.children[part] = c
		}
		switch c.kind() {
		case modeDir:
		case modeSymlink:
			return nil, nil, t.bad("goes through the symbolic link %q", clip(path.Join(parts[:i+1]...)))
		default:
			return nil, nil, t.bad("goes through %q, which is no directory", clip(path.Join(parts[:i+1]...)))
		}
		if _, gone := dir.whiteouts[part]; gone || c.opaque {
			hidden = true
		}
		dir = c
	}
	return dir, nil, nil
}

// resolve joins a link's target to the directory that holds it, as seen from inside the root.
func resolve(dir []string, link string, rest []string) []string {
	var out []string
	if !strings.HasPrefix(link, "/") {
		out = slices.Clone(dir)
	}
	for p := range strings.SplitSeq(link, "/") {
		switch p {
		case "", ".":
		case "..":
			out = out[:max(len(out)-1, 0)]
		default:
			out = append(out, p)
		}
	}
	// Never nil, which would mean that there is no link.
	return append(append(make([]string, 0, len(out)+len(rest)), out...), rest...)
}

func withoutOpaque(xattrs map[string]string) map[string]string {
	out := map[string]string{}
	for k, v := range xattrs {
		if k != xattrOpaque {
			out[k] = v
		}
	}
	return out
}

// whiteout notes that dir hides something below, whatever the type of the entry that says so.
func (t *tarReader) whiteout(dir *node, base string) error {
	if base == whOpaque {
		dir.opaque = true
		return nil
	}
	if strings.HasPrefix(base, whAUFS) {
		return nil // AUFS's own bookkeeping
	}
	name := base[len(wh):]
	if name == "" || name == "." || name == ".." {
		return t.bad("is a whiteout of nothing")
	}
	if dir.whiteouts == nil {
		dir.whiteouts = map[string]struct{}{}
	}
	dir.whiteouts[name] = struct{}{}
	return nil
}

// hideBelow makes an opaque root hide each name that shows in the layers below: overlayfs knows no opaque root.
func (t *tarReader) hideBelow() error {
	root := t.layer.root
	if !root.opaque {
		return nil
	}
	root.opaque = false
	seen := map[string]struct{}{}
	for _, l := range slices.Backward(t.lower) {
		for name, c := range l.root.children {
			if _, ok := seen[name]; ok {
				continue
			}
			seen[name] = struct{}{}
			if c.isWhiteout() {
				continue
			}
			if err := t.count(1, int64(len(name))); err != nil {
				return err
			}
			if err := t.whiteout(root, wh+name); err != nil {
				return err
			}
		}
	}
	return nil
}

// hardlink gives a node a further name. One that lies in a layer below is copied, as a copy-up would.
func (t *tarReader) hardlink(dir *node, base string, hdr *tar.Header) error {
	parts, err := t.split(hdr.Linkname, "its link target")
	if err != nil {
		return err
	}
	target := t.layer.root
	for _, p := range parts {
		if target = target.children[p]; target == nil {
			break
		}
	}
	if target == nil {
		if below, l := stackLookup(t.lower, parts); below != nil && !below.isDir() && !t.hides(parts) {
			if target, err = t.copyUp(parts, below, l); err != nil {
				return err
			}
		}
	}
	switch {
	case target == nil:
		return t.bad("is a hard link to %q, which does not come before it", clip(hdr.Linkname))
	case target.isDir():
		return t.bad("is a hard link to %q, a directory", clip(hdr.Linkname))
	}
	dir.children[base] = target
	return nil
}

// hides tells whether this layer hides what lies below under that name.
func (t *tarReader) hides(parts []string) bool {
	n := t.layer.root
	for _, p := range parts {
		if n == nil || !n.isDir() {
			return n != nil
		}
		if _, gone := n.whiteouts[p]; gone || n.opaque {
			return true
		}
		n = n.children[p]
	}
	return false
}

// copyUp copies a node of a layer below into this one under its own name, so that a link can join it there.
func (t *tarReader) copyUp(parts []string, below *node, from *layer) (*node, error) {
	dir, err := t.parent(parts[:len(parts)-1])
	if err != nil {
		return nil, err
	}
	n := &node{
		mode: below.mode, uid: below.uid, gid: below.gid, sec: below.sec, nsec: below.nsec, rdev: below.rdev,
		size: below.size, link: below.link, xattrs: below.xattrs,
	}
	if n.kind() == modeRegular {
		if t.used.bytes += n.size; t.used.bytes > t.limits.Bytes {
			return nil, t.over("of content", gib(t.limits.Bytes))
		}
		if err := t.layer.file(n, from.content(below)); err != nil {
			return nil, fmt.Errorf("copy up %s: %w", path.Join(parts...), err)
		}
	}
	if err := t.count(1, int64(len(below.link))); err != nil {
		return nil, err
	}
	dir.children[parts[len(parts)-1]] = n
	return n, nil
}
