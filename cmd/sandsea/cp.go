package main

import (
	"archive/tar"
	"context"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"os"
	"path"
	"path/filepath"
	"strings"
	"time"

	"github.com/spf13/cobra"

	"github.com/sandsea/sandsea/api/errdefs"
	sandseav1 "github.com/sandsea/sandsea/api/sandsea/v1"
	"github.com/sandsea/sandsea/client"
	"github.com/sandsea/sandsea/cmd/sandsea/ui"
)

func (a *app) cpCommand() *cobra.Command {
	var user string
	cmd := &cobra.Command{
		Use:   "cp SRC DST",
		Short: "Copy files into or out of a sandbox",
		Long: `Copies a file or a directory between this machine and a sandbox; the sandbox's side is written ID:/path. A destination
that is a directory takes the source's name. "-" is a tar stream on standard input or output.`,
		Example: `  sandsea cp big.tar s7q3k2m5:/work/
  sandsea cp s7q3k2m5:/work/report.xml .
  sandsea cp src s7q3k2m5:/work/src
  sandsea cp s7q3k2m5:/work - | tar t`,
		Args: cobra.ExactArgs(2),
		RunE: func(cmd *cobra.Command, args []string) error {
			from, fromRemote := remotePath(args[0])
			to, toRemote := remotePath(args[1])
			if fromRemote == toRemote {
				return usage(cmd, "cp %s %s: exactly one side must be ID:/path", ui.Text(args[0]), ui.Text(args[1]))
			}
			remote := from
			if toRemote {
				remote = to
			}
			sb, err := a.sandbox(cmd.Context(), remote.id)
			if err != nil {
				return err
			}
			x := copier{a: a, ctx: cmd.Context(), sb: sb, user: user}
			if toRemote {
				return x.up(args[0], to.path)
			}
			return x.down(from.path, args[1])
		},
	}
	cmd.Flags().StringVarP(&user, "user", "u", "", "act as this user inside (default: the sandbox's)")
	return cmd
}

type location struct{ id, path string }

// remotePath reads ID:/path. A local path with a colon is written ./a:b.
func remotePath(s string) (location, bool) {
	id, p, ok := strings.Cut(s, ":")
	if !ok || strings.ContainsAny(id, "/.") || len(id) < 4 {
		return location{}, false
	}
	if p == "" {
		p = "."
	}
	return location{id: id, path: p}, true
}

// copier copies for one call of cp.
type copier struct {
	a    *app
	ctx  context.Context // of that call
	sb   *client.Sandbox
	user string
}

// meter counts bytes for the progress line. Short copies stay silent.
type meter struct {
	r     io.Reader
	p     *ui.Progress
	name  string
	done  int64
	total int64 // 0 if unknown
	began time.Time
}

func (m *meter) count(n int, last bool) {
	m.done += int64(n)
	if m.began.IsZero() {
		m.began = time.Now()
	}
	if time.Since(m.began) > time.Second {
		m.p.Update(m.name, m.done, m.total, "bytes", "", last)
	}
}

func (m *meter) Read(b []byte) (int, error) {
	n, err := m.r.Read(b)
	m.count(n, err != nil)
	return n, err
}

// isDir asks whether a path inside is a directory.
func (x copier) isDir(p string) bool {
	info, err := x.sb.Stat(x.ctx, &sandseav1.StatFileRequest{Path: p, User: x.user})
	return err == nil && info.GetType() == sandseav1.FileType_FILE_TYPE_DIRECTORY
}

func (x copier) up(src, dst string) error {
	p := x.a.io.NewProgress()
	defer p.Clear()
	if src == "-" {
		return x.upTar(dst, &meter{r: x.a.input(x.ctx), p: p, name: "stdin"})
	}
	st, err := os.Stat(src)
	if err != nil {
		return fmt.Errorf("cp: %w", err)
	}
	if strings.HasSuffix(dst, "/") || x.isDir(dst) {
		abs, err := filepath.Abs(src)
		if err != nil {
			return fmt.Errorf("cp: %w", err)
		}
		dst = path.Join(dst, filepath.Base(abs))
	}
	if st.IsDir() {
		pr, pw := io.Pipe()
		go func() { pw.CloseWithError(packTree(src, pw)) }()
		defer pr.CloseWithError(io.ErrClosedPipe)
		return x.upTar(dst, &meter{r: pr, p: p, name: filepath.Base(src)})
	}
	f, err := os.Open(src)
	if err != nil {
		return fmt.Errorf("cp: %w", err)
	}
	defer f.Close()
	x.a.undone = "the file in the sandbox is as it was"
	h := &sandseav1.WriteFileHeader{Path: dst, User: x.user, Mode: uint32(st.Mode().Perm())}
	m := &meter{r: f, p: p, name: filepath.Base(src)}
	if st.Mode().IsRegular() { // the size of a pipe or device says nothing
		m.total = st.Size()
		h.Size = &m.total
	}
	_, err = x.sb.WriteFile(x.ctx, h, m)
	return err
}

func (x copier) upTar(dst string, r io.Reader) error {
	x.a.undone = "part of the tree may be in the sandbox"
	_, err := x.sb.UploadTar(x.ctx, &sandseav1.UploadTarHeader{Path: dst, User: x.user}, r)
	return err
}

// packTree writes a local directory as a tar stream with names relative to it.
func packTree(dir string, w io.Writer) error {
	tw := tar.NewWriter(w)
	root, err := os.OpenRoot(dir)
	if err != nil {
		return fmt.Errorf("cp: %w", err)
	}
	defer root.Close()
	err = fs.WalkDir(root.FS(), ".", func(name string, d fs.DirEntry, err error) error {
		if err != nil {
			return err
		}
		info, err := d.Info()
		if err != nil {
			return err
		}
		if name == "." || !(info.Mode().IsRegular() || info.IsDir() || info.Mode()&fs.ModeSymlink != 0) {
			return nil
		}
		link := ""
		if info.Mode()&fs.ModeSymlink != 0 {
			if link, err = root.Readlink(name); err != nil {
				return err
			}
		}
		h, err := tar.FileInfoHeader(info, link)
		if err != nil {
			return err
		}
		h.Name = name
		if info.IsDir() {
			h.Name += "/"
		}
		if err := tw.WriteHeader(h); err != nil {
			return err
		}
		if !info.Mode().IsRegular() {
			return nil
		}
		f, err := root.Open(name)
		if err != nil {
			return err
		}
		defer f.Close()
		_, err = io.CopyN(tw, f, info.Size())
		return err
	})
	if err != nil {
		return fmt.Errorf("cp: pack %s: %w", dir, err)
	}
	if err := tw.Close(); err != nil {
		return fmt.Errorf("cp: pack %s: %w", dir, err)
	}
	return nil
}

func (x copier) down(src, dst string) error {
	if dst == "-" {
		skipped, err := x.sb.DownloadTar(x.ctx, &sandseav1.DownloadTarRequest{Path: src, User: x.user}, x.a.io.Out)
		x.noteSkipped(skipped)
		return err
	}
	info, err := x.sb.Stat(x.ctx, &sandseav1.StatFileRequest{Path: src, User: x.user})
	if err != nil {
		return err
	}
	if strings.HasSuffix(dst, "/") {
		if err := os.MkdirAll(dst, 0o755); err != nil {
			return fmt.Errorf("cp: %w", err)
		}
	}
	if st, serr := os.Stat(dst); serr == nil && st.IsDir() {
		dst = filepath.Join(dst, path.Base(path.Clean("/"+src)))
	}
	p := x.a.io.NewProgress()
	defer p.Clear()
	m := &meter{p: p, name: path.Base(src)}
	if info.GetType() == sandseav1.FileType_FILE_TYPE_DIRECTORY {
		return x.downTree(src, dst, m)
	}
	m.total = info.GetSize()
	return x.downFile(src, dst, fs.FileMode(info.GetMode())&0o777, m)
}

// downFile writes beside the target and renames, so that a broken copy leaves the old file.
func (x copier) downFile(src, dst string, mode fs.FileMode, m *meter) error {
	f, err := os.CreateTemp(filepath.Dir(dst), ".sandsea-*")
	if err != nil {
		return fmt.Errorf("cp: %w", err)
	}
	defer os.Remove(f.Name())
	defer f.Close()
	x.a.undone = dst + " is as it was"
	w := writerFunc(func(b []byte) (int, error) {
		m.count(len(b), false)
		return f.Write(b)
	})
	if _, err := x.sb.ReadFile(x.ctx, &sandseav1.ReadFileRequest{Path: src, User: x.user}, w); err != nil {
		return err
	}
	if err := f.Chmod(mode); err != nil {
		return fmt.Errorf("cp: %w", err)
	}
	if err := f.Close(); err != nil {
		return fmt.Errorf("cp: %w", err)
	}
	if err := os.Rename(f.Name(), dst); err != nil {
		return fmt.Errorf("cp: %w", err)
	}
	return nil
}

type writerFunc func([]byte) (int, error)

func (f writerFunc) Write(b []byte) (int, error) { return f(b) }

// downTree unpacks a tree of the sandbox into a local directory; nothing that it holds can leave that directory.
func (x copier) downTree(src, dst string, m *meter) error {
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
		s, err := x.sb.DownloadTar(x.ctx, &sandseav1.DownloadTarRequest{Path: src, User: x.user}, pw)
		skipped <- s
		pw.CloseWithError(err)
	}()
	err = unpackTree(root, m)
	pr.CloseWithError(io.ErrClosedPipe)
	x.noteSkipped(<-skipped)
	return err
}

func unpackTree(root *os.Root, r io.Reader) error {
	tr := tar.NewReader(r)
	for {
		h, err := tr.Next()
		if errors.Is(err, io.EOF) {
			return nil
		}
		if err != nil {
			return err
		}
		name := path.Clean(h.Name)
		if name == "." {
			continue
		}
		if !filepath.IsLocal(name) {
			return errdefs.New(errdefs.DataLoss, "", "cp: the sandbox sent the name %q, which leaves the directory", h.Name).
				WithHint("Nothing was written there; copy single files instead")
		}
		mode := h.FileInfo().Mode().Perm()
		switch h.Typeflag {
		case tar.TypeDir:
			err = root.MkdirAll(name, mode|0o700)
		case tar.TypeSymlink:
			_ = root.Remove(name)
			err = root.Symlink(h.Linkname, name)
		case tar.TypeLink:
			_ = root.Remove(name)
			err = root.Link(path.Clean(h.Linkname), name)
		case tar.TypeReg:
			_ = root.Remove(name)
			err = writeInto(root, name, mode, tr)
		}
		if err != nil {
			return fmt.Errorf("cp: %w", err)
		}
	}
}

func writeInto(root *os.Root, name string, mode fs.FileMode, r io.Reader) error {
	if err := root.MkdirAll(path.Dir(name), 0o755); err != nil {
		return err
	}
	f, err := root.OpenFile(name, os.O_WRONLY|os.O_CREATE|os.O_EXCL, mode)
	if err != nil {
		return err
	}
	if _, err := io.Copy(f, r); err != nil {
		f.Close()
		return err
	}
	return f.Close()
}

func (x copier) noteSkipped(list []string) {
	for i, s := range list {
		if i == 10 {
			x.a.io.Note("sandsea: %d more left out", len(list)-10)
			return
		}
		x.a.io.Note("sandsea: left out %s", ui.Text(s))
	}
}
