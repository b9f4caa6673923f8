package build

import (
	"encoding/binary"
	"errors"
	"fmt"
	"strings"
)

// The EROFS writer gives each name an inode of its own. relink makes the further names of a hard link point to the
// inode of the first, so that they have one number and show as links of each other. It changes nothing but the inode
// numbers in directory entries; the stand-in inodes are left without a name.
//
// See the kernel's Documentation/filesystems/erofs.rst for the layout.
func relink(img []byte, root *node) error {
	var err error
	var r *relinker
	root.secondaries("", func(dir, name string, c *node) {
		if err != nil {
			return
		}
		if r == nil {
			if r, err = newRelinker(img, root); err != nil {
				return
			}
		}
		err = r.point(dir, name, c)
	})
	return err
}

type relinker struct {
	img      []byte
	meta     int // where inode 0 lies
	rootNid  uint64
	dirs     map[string]map[string]dirent // by path
	pathOf   map[*node]string
	blockLen int
}

type dirent struct {
	at  int // of the eight bytes of its inode number
	nid uint64
}

var errLayout = errors.New("unexpected EROFS layout")

func newRelinker(img []byte, root *node) (*relinker, error) {
	const sb = 1024
	if len(img) < sb+128 || binary.LittleEndian.Uint32(img[sb:]) != 0xe0f5e1e2 || img[sb+12] != 12 {
		return nil, fmt.Errorf("superblock: %w", errLayout)
	}
	r := &relinker{
		img: img, blockLen: blockSize, dirs: map[string]map[string]dirent{}, pathOf: map[*node]string{},
		meta:    int(binary.LittleEndian.Uint32(img[sb+40:])) * blockSize,
		rootNid: uint64(binary.LittleEndian.Uint16(img[sb+14:])),
	}
	var walk func(at string, n *node)
	walk = func(at string, n *node) {
		r.pathOf[n] = at
		for name, c := range n.children {
			if c.isDir() {
				walk(join(at, name), c)
			}
		}
	}
	walk("", root)
	return r, nil
}

func join(dir, name string) string {
	if dir == "" {
		return name
	}
	return dir + "/" + name
}

// point lets dir/name stand for the inode of c.
func (r *relinker) point(dir, name string, c *node) error {
	home, ok := r.pathOf[c.homeDir]
	if !ok {
		return fmt.Errorf("hard link %s: %w", join(dir, name), errLayout)
	}
	first, err := r.find(home, c.homeName)
	if err != nil {
		return err
	}
	further, err := r.find(dir, name)
	if err != nil {
		return err
	}
	binary.LittleEndian.PutUint64(r.img[further.at:], first.nid)
	return nil
}

func (r *relinker) find(dir, name string) (dirent, error) {
	ents, err := r.dir(dir)
	if err != nil {
		return dirent{}, err
	}
	d, ok := ents[name]
	if !ok {
		return dirent{}, fmt.Errorf("entry %s: %w", join(dir, name), errLayout)
	}
	return d, nil
}

func (r *relinker) dir(at string) (map[string]dirent, error) {
	if ents, ok := r.dirs[at]; ok {
		return ents, nil
	}
	nid := r.rootNid
	if at != "" {
		parent, name := "", at
		if i := strings.LastIndexByte(at, '/'); i >= 0 {
			parent, name = at[:i], at[i+1:]
		}
		d, err := r.find(parent, name)
		if err != nil {
			return nil, err
		}
		nid = d.nid
	}
	ents, err := r.read(nid)
	if err != nil {
		return nil, fmt.Errorf("directory %q: %w", at, err)
	}
	r.dirs[at] = ents
	return ents, nil
}

// read gives the entries of the directory with that inode number.
func (r *relinker) read(nid uint64) (map[string]dirent, error) {
	at := r.meta + int(nid)*32
	if at < 0 || at+64 > len(r.img) {
		return nil, errLayout
	}
	ino := r.img[at:]
	format := binary.LittleEndian.Uint16(ino)
	size, head := int(binary.LittleEndian.Uint32(ino[8:])), 32
	if format&1 != 0 {
		size, head = int(binary.LittleEndian.Uint64(ino[8:])), 64
	}
	if n := int(binary.LittleEndian.Uint16(ino[2:])); n > 0 {
		head += 12 + 4*(n-1)
	}
	var start int
	switch format >> 1 & 7 {
	case 0: // in blocks of its own
		start = int(binary.LittleEndian.Uint32(ino[16:])) * r.blockLen
	case 2: // after the inode
		start = at + head
	default:
		return nil, errLayout
	}
	if size < 0 || start < 0 || start+size > len(r.img) {
		return nil, errLayout
	}
	ents := map[string]dirent{}
	for off := 0; off < size; off += r.blockLen {
		base := start + off
		block := r.img[base : base+min(r.blockLen, size-off)]
		if len(block) < 12 {
			return nil, errLayout
		}
		n := int(binary.LittleEndian.Uint16(block[8:])) / 12
		if n == 0 || n*12 > len(block) {
			return nil, errLayout
		}
		for i := range n {
			from, to := int(binary.LittleEndian.Uint16(block[i*12+8:])), len(block)
			if i+1 < n {
				to = int(binary.LittleEndian.Uint16(block[(i+1)*12+8:]))
			}
			if from > to || to > len(block) {
				return nil, errLayout
			}
			name := strings.TrimRight(string(block[from:to]), "\x00")
			ents[name] = dirent{at: base + i*12, nid: binary.LittleEndian.Uint64(block[i*12:])}
		}
	}
	return ents, nil
}
