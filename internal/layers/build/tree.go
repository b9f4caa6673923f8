package build

import (
	"io/fs"
	"maps"
	"path"
	"slices"
	"strings"
	"time"

	"github.com/erofs/go-erofs"
)

// Bits of a Unix mode; tar and EROFS use the same.
const (
	modeType    = 0o170000
	modeSocket  = 0o140000
	modeSymlink = 0o120000
	modeRegular = 0o100000
	modeBlock   = 0o060000
	modeDir     = 0o040000
	modeChar    = 0o020000
	modeFifo    = 0o010000
	modePerm    = 0o007777
)

const (
	xattrOpaque  = "trusted.overlay.opaque"
	xattrCap     = "security.capability"
	xattrACL     = "system.posix_acl_access"
	xattrDefault = "system.posix_acl_default"
)

// node is an inode of a tree in the making. Names are its directories' business: a hard link is one node under several.
type node struct {
	mode     uint32
	uid, gid uint32
	sec      int64
	nsec     uint32
	rdev     uint32
	size     int64
	link     string
	xattrs   map[string]string
	ranges   []erofs.DataRange

	children  map[string]*node    // of directories
	whiteouts map[string]struct{} // of directories: names hidden in the layers below
	opaque    bool                // of directories: everything in the layers below is hidden

	// Set by number, once the tree is whole.
	nlink    uint32
	homeDir  *node // the first place in walking order is where its inode is written
	homeName string
}

func newDir() *node {
	return &node{mode: modeDir | 0o755, children: map[string]*node{}}
}

func (n *node) kind() uint32     { return n.mode & modeType }
func (n *node) isDir() bool      { return n.kind() == modeDir }
func (n *node) isWhiteout() bool { return n.kind() == modeChar && n.rdev == 0 }
func (n *node) names() []string  { return slices.Sorted(maps.Keys(n.children)) }

// overlay turns what the layer hides into the form that overlayfs reads.
func (n *node) overlay() {
	for name := range n.whiteouts {
		switch c := n.children[name]; {
		case c == nil:
			n.children[name] = &node{mode: modeChar}
		case c.isDir():
			c.opaque = true // removed and made again: nothing of the old one shows
		}
	}
	n.whiteouts = nil
	if n.opaque {
		n.xattrs = maps.Clone(n.xattrs)
		if n.xattrs == nil {
			n.xattrs = map[string]string{}
		}
		n.xattrs[xattrOpaque] = "y"
	}
	for _, c := range n.children {
		if c.isDir() {
			c.overlay()
		}
	}
}

// number counts links and finds each node's home. It returns the number of names below n.
func (n *node) number() int64 {
	n.nlink = 2
	var total int64
	for _, name := range n.names() {
		c := n.children[name]
		total++
		if c.isDir() {
			n.nlink++
			total += c.number()
			continue
		}
		if c.nlink == 0 {
			c.homeDir, c.homeName = n, name
		}
		c.nlink++
	}
	return total
}

// secondaries calls do for every name that is not its node's home, in walking order.
func (n *node) secondaries(at string, do func(dir, name string, c *node)) {
	for _, name := range n.names() {
		c := n.children[name]
		if c.isDir() {
			c.secondaries(path.Join(at, name), do)
		} else if c.homeDir != n || c.homeName != name {
			do(at, name, c)
		}
	}
}

// stackLookup finds what a path names in layers stacked as overlayfs does it, or nil. The result's layer is given too.
// Symbolic links are not followed.
func stackLookup(layers []*layer, parts []string) (*node, *layer) {
	type at struct {
		n *node
		l *layer
	}
	var dirs []at // highest first
	for _, l := range slices.Backward(layers) {
		dirs = append(dirs, at{l.root, l})
	}
	if len(dirs) == 0 {
		return nil, nil
	}
	for i, part := range parts {
		var next []at
		for _, d := range dirs {
			c := d.n.children[part]
			if c == nil {
				continue
			}
			if c.isWhiteout() {
				break
			}
			if !c.isDir() {
				if len(next) > 0 {
					break
				}
				if i == len(parts)-1 {
					return c, d.l
				}
				return nil, nil
			}
			next = append(next, at{c, d.l})
			if c.opaque {
				break
			}
		}
		if len(next) == 0 {
			return nil, nil
		}
		dirs = next
	}
	return dirs[0].n, dirs[0].l
}

// treeFS shows a finished tree to the EROFS writer.
type treeFS struct{ root *node }

var (
	_ fs.ReadDirFS  = treeFS{}
	_ fs.StatFS     = treeFS{}
	_ fs.ReadLinkFS = treeFS{}
)

// deviceFS adds the size of the data file that the contents lie in.
type deviceFS struct {
	treeFS
	blocks uint64
}

func (d deviceFS) DeviceBlocks() uint64 { return d.blocks }
func (d deviceFS) BlockSize() uint32    { return blockSize }

func (t treeFS) lookup(op, name string) (*node, error) {
	n := t.root
	if name != "." {
		for part := range strings.SplitSeq(name, "/") {
			if n = n.children[part]; n == nil {
				return nil, &fs.PathError{Op: op, Path: name, Err: fs.ErrNotExist}
			}
		}
	}
	return n, nil
}

func (t treeFS) Open(name string) (fs.File, error) {
	return nil, &fs.PathError{Op: "open", Path: name, Err: fs.ErrInvalid} // contents are given as ranges
}

func (t treeFS) Stat(name string) (fs.FileInfo, error) {
	n, err := t.lookup("stat", name)
	if err != nil {
		return nil, err
	}
	return info{name: path.Base(name), node: n}, nil
}

func (t treeFS) Lstat(name string) (fs.FileInfo, error) { return t.Stat(name) }

func (t treeFS) ReadLink(name string) (string, error) {
	n, err := t.lookup("readlink", name)
	if err != nil {
		return "", err
	}
	return n.link, nil
}

func (t treeFS) ReadDir(name string) ([]fs.DirEntry, error) {
	n, err := t.lookup("readdir", name)
	if err != nil {
		return nil, err
	}
	out := make([]fs.DirEntry, 0, len(n.children))
	for _, name := range n.names() {
		c := n.children[name]
		out = append(out, fs.FileInfoToDirEntry(info{
			name: name, node: c,
			// A further name of a hard link gets an empty inode of the same type, which relink then replaces.
			stand: !c.isDir() && (c.homeDir != n || c.homeName != name),
		}))
	}
	return out, nil
}

// info is what the EROFS writer learns of a node.
type info struct {
	name  string
	node  *node
	stand bool
}

func (i info) Name() string       { return i.name }
func (i info) IsDir() bool        { return i.node.isDir() }
func (i info) ModTime() time.Time { return time.Unix(i.node.sec, int64(i.node.nsec)) }

func (i info) Size() int64 {
	if i.stand || i.node.kind() != modeRegular {
		return 0
	}
	return i.node.size
}

func (i info) Mode() fs.FileMode {
	m := fs.FileMode(i.node.mode & 0o777)
	if i.node.mode&0o4000 != 0 {
		m |= fs.ModeSetuid
	}
	if i.node.mode&0o2000 != 0 {
		m |= fs.ModeSetgid
	}
	if i.node.mode&0o1000 != 0 {
		m |= fs.ModeSticky
	}
	switch i.node.kind() {
	case modeDir:
		m |= fs.ModeDir
	case modeSymlink:
		m |= fs.ModeSymlink
	case modeChar:
		m |= fs.ModeDevice | fs.ModeCharDevice
	case modeBlock:
		m |= fs.ModeDevice
	case modeFifo:
		m |= fs.ModeNamedPipe
	case modeSocket:
		m |= fs.ModeSocket
	}
	return m
}

// DataRange says where the content lies in the data file.
func (i info) DataRange() []erofs.DataRange {
	if i.stand {
		return nil
	}
	return i.node.ranges
}

func (i info) Sys() any {
	if i.stand {
		return &erofs.Stat{Nlink: 1}
	}
	return &erofs.Stat{
		UID: i.node.uid, GID: i.node.gid, Mtime: uint64(i.node.sec), MtimeNs: i.node.nsec,
		Nlink: int(i.node.nlink), Rdev: i.node.rdev, Xattrs: i.diskXattrs(),
	}
}

// diskXattrs spells attributes so that the writer gives them the form that the kernel reads.
func (i info) diskXattrs() map[string]string {
	if len(i.node.xattrs) == 0 {
		return nil
	}
	out := make(map[string]string, len(i.node.xattrs)+1)
	area := 12
	for k, v := range i.node.xattrs {
		suffix := k
		switch k {
		case xattrACL, xattrDefault:
			k += "." // the writer's spelling of these two, which have no suffix
			suffix = ""
		default:
			if _, s, ok := strings.Cut(k, "."); ok {
				suffix = s
			}
		}
		out[k] = v
		area += (4 + len(suffix) + len(v) + 3) &^ 3
	}
	// The kernel looks for chunk indexes at the next multiple of eight, where the writer puts them only if the
	// attributes end there. An attribute without a name or a value takes four bytes and shows nowhere.
	if area%8 != 0 && i.Size() > 0 {
		out[""] = ""
	}
	return out
}
