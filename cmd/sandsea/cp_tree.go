package main

import (
	"archive/tar"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"os"
	"path"
	"path/filepath"
	"syscall"

	"github.com/sandsea/sandsea/api/errdefs"
	sandseav1 "github.com/sandsea/sandsea/api/sandsea/v1"
)

// packTree writes a local directory as a tar stream with names relative to it.
func packTree(dir string, w io.Writer) error {
	_, err := packSome(dir, w)
	return err
}

// packSome is packTree and tells what it left out: pipes, sockets and devices, and what was gone when its turn came.
func packSome(dir string, w io.Writer) (skipped []string, err error) {
	root, err := os.OpenRoot(dir)
	if err != nil {
		return nil, fmt.Errorf("cp: %w", err)
	}
	defer root.Close()
	tw := tar.NewWriter(w)
	err = fs.WalkDir(root.FS(), ".", func(name string, d fs.DirEntry, err error) error {
		if err == nil {
			err = packEntry(root, name, d, tw)
		}
		if errors.Is(err, fs.ErrNotExist) || errors.Is(err, errOdd) {
			skipped = append(skipped, name)
			return nil
		}
		return err
	})
	if err == nil {
		err = tw.Close()
	}
	if err != nil {
		return skipped, fmt.Errorf("cp: pack %s: %w", dir, err)
	}
	return skipped, nil
}

// errOdd: what is no file, directory or link is not copied.
var errOdd = errors.New("no file, directory or link")

func packEntry(root *os.Root, name string, d fs.DirEntry, tw *tar.Writer) error {
	info, err := d.Info()
	if err != nil {
		return err
	}
	link := ""
	switch {
	case info.IsDir():
	case info.Mode()&fs.ModeSymlink != 0:
		if link, err = root.Readlink(name); err != nil {
			return err
		}
	case info.Mode().IsRegular():
		return packFile(root, name, tw)
	default:
		return errOdd
	}
	return packHeader(info, name, link, tw)
}

func packHeader(info fs.FileInfo, name, link string, tw *tar.Writer) error {
	h, err := tar.FileInfoHeader(info, link)
	if err != nil {
		return err
	}
	h.Name = name
	if info.IsDir() {
		h.Name += "/"
	}
	h.Uname, h.Gname = "", "" // owners are the sandbox's
	h.Format = tar.FormatPAX
	return tw.WriteHeader(h)
}

// packFile packs a file with the size that it has once it is open.
func packFile(root *os.Root, name string, tw *tar.Writer) error {
	f, err := root.OpenFile(name, os.O_RDONLY|syscall.O_NONBLOCK, 0) // it may be a pipe by now
	if err != nil {
		return err
	}
	defer f.Close()
	info, err := f.Stat()
	if err != nil {
		return err
	}
	if !info.Mode().IsRegular() {
		return errOdd
	}
	if err := packHeader(info, name, "", tw); err != nil {
		return err
	}
	n, err := io.CopyN(tw, f, info.Size())
	if errors.Is(err, io.EOF) {
		return errdefs.New(errdefs.DataLoss, name, "the file shrank while it was read: %d of %d bytes", n, info.Size()).
			WithHint("Copy it when nobody writes to it")
	}
	return err
}

// downTree unpacks a tree of the sandbox into a local directory; nothing that it holds can leave that directory. Of a
// directory that was not there before, an error leaves nothing.
func (x copier) downTree(src, dst string, m *meter) error {
	_, err := os.Lstat(dst)
	fresh := errors.Is(err, fs.ErrNotExist)
	if err := os.MkdirAll(dst, 0o755); err != nil {
		return fmt.Errorf("cp: %w", err)
	}
	root, err := os.OpenRoot(dst)
	if err != nil {
		return fmt.Errorf("cp: %w", err)
	}
	defer root.Close()
	x.a.undone = "part of the tree may be in " + dst
	pr, pw := io.Pipe()
	m.r = pr
	skipped := make(chan []string, 1)
	go func() {
		s, err := x.from.DownloadTar(x.ctx, &sandseav1.DownloadTarRequest{Path: src, User: x.user}, pw)
		skipped <- s
		pw.CloseWithError(err)
	}()
	err = unpackTree(root, m, fresh)
	if err == nil {
		_, err = io.Copy(io.Discard, pr) // what was left out is told at the end
	}
	pr.CloseWithError(io.ErrClosedPipe)
	x.noteSkipped(<-skipped)
	if err != nil && fresh && os.RemoveAll(dst) == nil {
		x.a.undone = "nothing of the tree is in " + dst
	}
	return err
}

// localDir is a directory that gets its mode last: it may forbid to put anything in.
type localDir struct {
	name string
	mode fs.FileMode
}

// unpackTree unpacks below root, and gives root its own mode if it is fresh.
func unpackTree(root *os.Root, r io.Reader, fresh bool) error {
	tr := tar.NewReader(r)
	var dirs []localDir
	for {
		h, err := tr.Next()
		if errors.Is(err, io.EOF) {
			break
		}
		if err != nil {
			return err
		}
		name := path.Clean(h.Name)
		if !filepath.IsLocal(name) {
			return errdefs.New(errdefs.DataLoss, "", "cp: the sandbox sent the name %q, which leaves the directory", h.Name).
				WithHint("Nothing was written there; copy single files instead")
		}
		if h.Typeflag == tar.TypeDir && (fresh || name != ".") {
			dirs = append(dirs, localDir{name, h.FileInfo().Mode().Perm()})
		}
		if err := unpackEntry(root, name, h, tr); err != nil {
			return fmt.Errorf("cp: %w", err)
		}
	}
	for i := len(dirs) - 1; i >= 0; i-- {
		if err := root.Chmod(dirs[i].name, dirs[i].mode); err != nil {
			return fmt.Errorf("cp: %w", err)
		}
	}
	return nil
}

func unpackEntry(root *os.Root, name string, h *tar.Header, r io.Reader) error {
	if name == "." {
		return nil
	}
	switch h.Typeflag {
	case tar.TypeDir:
		return root.MkdirAll(name, 0o700)
	case tar.TypeSymlink:
		_ = root.Remove(name)
		return root.Symlink(h.Linkname, name)
	case tar.TypeLink:
		_ = root.Remove(name)
		return root.Link(path.Clean(h.Linkname), name)
	case tar.TypeReg:
		_ = root.Remove(name)
		return writeInto(root, name, h.FileInfo().Mode().Perm(), r)
	default:
		return nil
	}
}

func writeInto(root *os.Root, name string, mode fs.FileMode, r io.Reader) error {
	if err := root.MkdirAll(path.Dir(name), 0o755); err != nil {
		return err
	}
	f, err := root.OpenFile(name, os.O_WRONLY|os.O_CREATE|os.O_EXCL, 0o600)
	if err != nil {
		return err
	}
	_, err = io.Copy(f, r)
	if err == nil {
		err = f.Chmod(mode)
	}
	return errors.Join(err, f.Close())
}
