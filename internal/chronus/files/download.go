package files

import (
	"archive/tar"
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"path"
	"strings"
	"syscall"
	"time"

	"github.com/sandsea/sandsea/api/errdefs"
)

const (
	// maxSkipped is how many names DownloadTar lists.
	maxSkipped = 10_000
	// maxLinked is how many files with several names are remembered; further names are packed as files of their own.
	maxLinked = 100_000
	// maxWaiting bounds the names of directories that wait to be packed.
	maxWaiting = 256 << 20
)

// DownloadTar packs a file or a tree into w, through a symbolic link. Names are relative to the directory, which comes
// first as "./"; a file is one entry with its own name. Left out and listed: pipes, sockets, devices, what vanished or
// turned into something else meanwhile, what lies on /proc and the like, paths beyond 4,095 bytes. A file whose size
// changed while it was read is listed too: it is packed with the size that it had first, filled up with zeros where it
// shrank. What the user may not read is an error.
func (v *View) DownloadTar(ctx context.Context, dir string, w io.Writer) (skipped []string, err error) {
	abs, err := v.abs(dir)
	if err != nil {
		return nil, err
	}
	p := &packer{v: v, dir: dir, sink: &sink{w: w}, links: map[[2]uint64]string{}}
	p.out = tar.NewWriter(p.sink)
	if err := p.pack(ctx, abs); err != nil {
		return nil, p.explain(ctx, err)
	}
	if err := p.out.Close(); err != nil {
		return nil, p.explain(ctx, err)
	}
	if p.more > 0 {
		p.skipped = append(p.skipped, fmt.Sprintf("and %d more", p.more))
	}
	return p.skipped, nil
}

// sink notes the error of the receiving side.
type sink struct {
	w   io.Writer
	err error
}

func (s *sink) Write(b []byte) (int, error) {
	n, err := s.w.Write(b)
	if err != nil {
		s.err = err
	}
	return n, err
}

// packer packs one tree.
type packer struct {
	v       *View
	s       lease
	dir     string // as the caller gave it
	base    uint32
	sink    *sink
	out     *tar.Writer
	waiting []string
	held    int
	links   map[[2]uint64]string // name of a file with several, by device and inode
	skipped []string
	more    int
}

func (p *packer) explain(ctx context.Context, err error) error {
	switch {
	case p.sink.err != nil:
		return fmt.Errorf("%s: send the archive: %w", p.dir, p.sink.err)
	case ctx.Err() != nil:
		return ended(ctx, p.dir, false)
	}
	if _, ok := errors.AsType[*errdefs.Error](err); ok {
		return err
	}
	return errdefs.New(errdefs.Internal, p.dir, "pack: %v", err).Wrap(err)
}

func (p *packer) pack(ctx context.Context, abs string) error {
	rep, s, err := p.v.first(ctx, p.dir, request{op: opStat, path: abs})
	if err != nil {
		return err
	}
	defer s.release()
	p.s = s
	if rep.stat.mode&modeType != modeDir {
		return p.single(ctx, abs)
	}
	rep, err = p.v.next(ctx, s, p.dir, request{op: opDir, flags: flagPathOnly, path: abs})
	if err != nil {
		return err
	}
	p.base = rep.handle
	defer p.v.undo(ctx, s, p.base)
	if err := p.header(infoOf("", rep.stat, ""), "./", 0, ""); err != nil {
		return err
	}
	p.waiting = []string{""}
	for len(p.waiting) > 0 {
		name := p.waiting[len(p.waiting)-1]
		p.waiting = p.waiting[:len(p.waiting)-1]
		p.held -= len(name) + 16
		if err := p.directory(ctx, name); err != nil {
			return err
		}
	}
	return nil
}

func (p *packer) single(ctx context.Context, abs string) error {
	rep, err := p.v.next(ctx, p.s, p.dir, request{op: opOpen, path: abs})
	if err != nil {
		return err
	}
	return p.file(ctx, infoOf("", rep.stat, ""), path.Base(abs), rep.file)
}

func (p *packer) skip(name string) {
	if len(p.skipped) == maxSkipped {
		p.more++
		return
	}
	p.skipped = append(p.skipped, name)
}

// vanished reports whether an error says that a name means something else now than when it was listed.
func vanished(err error) bool {
	e, ok := errors.AsType[*errdefs.Error](err)
	if !ok {
		return false
	}
	switch syscall.Errno(e.Errno) {
	case syscall.ENOENT, syscall.ENOTDIR, syscall.EISDIR, syscall.ELOOP, syscall.ENXIO, syscall.ESTALE, syscall.EXDEV:
		return true
	default:
		return false
	}
}

// directory packs what a directory holds; its own entry is packed already.
func (p *packer) directory(ctx context.Context, name string) error {
	r := request{op: opDir, base: p.base, path: name, flags: flagNoFollow | flagNoSymlinks}
	rep, err := p.v.next(ctx, p.s, p.at(name), r)
	if err != nil {
		if vanished(err) {
			p.skip(name)
			return nil
		}
		return err
	}
	if rep.flags&flagPseudo != 0 && name != "" {
		p.v.undo(ctx, p.s, rep.handle)
		p.skip(name)
		return nil
	}
	prefix := name
	if prefix != "" {
		prefix += "/"
	}
	for batch, err := range p.v.entries(ctx, p.s, p.at(name), rep.handle) {
		if vanished(err) {
			p.skip(name)
			return nil
		}
		if err != nil {
			return err
		}
		for _, e := range batch {
			if err := p.entry(ctx, prefix+e.name, e); err != nil {
				return err
			}
		}
	}
	return nil
}

func (p *packer) at(name string) string {
	if name == "" {
		return p.dir
	}
	return strings.TrimRight(p.dir, "/") + "/" + name
}

func (p *packer) entry(ctx context.Context, name string, e wireEntry) error {
	info := infoOf("", e.stat, e.link)
	if len(name) > pathMax {
		p.skip(name[:200] + "…")
		return nil
	}
	switch info.Type {
	case Directory:
		if p.held += len(name) + 16; p.held > maxWaiting {
			return errdefs.New(errdefs.Exhausted, p.dir, "the tree has too many directories").
				WithHint("Download its parts")
		}
		p.waiting = append(p.waiting, name)
		return p.header(info, name+"/", 0, "")
	case Symlink:
		return p.header(info, name, 0, "")
	case Regular:
		key := [2]uint64{info.dev, info.Inode}
		if first, ok := p.links[key]; ok && info.Links > 1 {
			return p.header(info, name, 0, first)
		}
		rep, err := p.v.next(ctx, p.s, p.at(name),
			request{op: opOpen, base: p.base, path: name, flags: flagNoFollow | flagNoSymlinks})
		if err != nil {
			if vanished(err) {
				p.skip(name)
				return nil
			}
			return err
		}
		if info.Links > 1 && len(p.links) < maxLinked {
			p.links[key] = name
		}
		return p.file(ctx, infoOf("", rep.stat, ""), name, rep.file)
	default:
		p.skip(name)
		return nil
	}
}

// header writes the header of an entry; hard names the file that it is another name of.
func (p *packer) header(info Info, name string, size int64, hard string) error {
	h := &tar.Header{
		Format: tar.FormatPAX, Name: name, Size: size, Mode: int64(info.Mode), ModTime: info.ModTime,
		Uid: int(info.UID), Gid: int(info.GID), Linkname: info.Link,
	}
	switch {
	case hard != "":
		h.Typeflag, h.Linkname = tar.TypeLink, hard
	case info.Type == Directory:
		h.Typeflag = tar.TypeDir
	case info.Type == Symlink:
		h.Typeflag = tar.TypeSymlink
	default:
		h.Typeflag = tar.TypeReg
	}
	if info.ModTime.Year() > 9999 || info.ModTime.Year() < -9999 {
		h.ModTime = time.Unix(0, 0)
	}
	return p.out.WriteHeader(h)
}

// file packs an open file as large as it is now, and closes it.
func (p *packer) file(ctx context.Context, info Info, name string, f *os.File) error {
	defer f.Close()
	st, err := f.Stat()
	if err != nil {
		return ofOS(p.at(name), err)
	}
	size := st.Size()
	if err := p.header(info, name, size, ""); err != nil {
		return err
	}
	n, err := copyBytes(ctx, p.out, io.LimitReader(f, size))
	if source, ok := errors.AsType[errSource](err); ok && ctx.Err() == nil {
		return ofOS(p.at(name), source.error)
	}
	if err == nil && n < size {
		p.skip(name + " (shrank while it was read)")
		_, err = copyBytes(ctx, p.out, io.LimitReader(zeros{}, size-n))
		return err
	}
	if st, serr := f.Stat(); serr == nil && st.Size() > size {
		p.skip(name + " (grew while it was read)")
	}
	return err
}

type zeros struct{}

func (zeros) Read(b []byte) (int, error) {
	clear(b)
	return len(b), nil
}
