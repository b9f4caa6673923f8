package main

import (
	"context"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"os"
	"path"
	"path/filepath"
	"strings"
	"syscall"
	"time"

	"github.com/spf13/cobra"

	"github.com/sandsea/sandsea/api/errdefs"
	sandseav1 "github.com/sandsea/sandsea/api/sandsea/v1"
	"github.com/sandsea/sandsea/client"
	"github.com/sandsea/sandsea/cmd/sandsea/ui"
)

func (a *app) cpCommand() *cobra.Command {
	var user, owner string
	cmd := &cobra.Command{
		Use:   "cp SRC DST",
		Short: "Copy files into or out of a sandbox",
		Long: `Copies a file or a directory between this machine and a sandbox, or from one sandbox to another; a sandbox's side is
written ID:/path. A destination that is a directory takes the source's name. "-" is a tar stream on standard input or
output. Modes and symbolic links are kept; pipes, sockets and devices are left out and named. A copy that is interrupted
leaves the old file, or nothing where nothing was; a tree that was there before may have parts of the new one.`,
		Example: `  sandsea cp big.tar s7q3k2m5:/work/
  sandsea cp s7q3k2m5:/work/report.xml .
  sandsea cp src s7q3k2m5:/work/src
  sandsea cp s7q3k2m5:/work - | tar t
  sandsea cp s7q3k2m5:/work sb3m6zd5:/work`,
		Args: cobra.ExactArgs(2),
		RunE: func(cmd *cobra.Command, args []string) error {
			from, fromRemote := remotePath(args[0])
			to, toRemote := remotePath(args[1])
			if !fromRemote && !toRemote {
				return usage(cmd, "cp %s %s: one side must be ID:/path", ui.Text(args[0]), ui.Text(args[1]))
			}
			x := copier{a: a, ctx: cmd.Context(), user: user, owner: owner}
			var err error
			if fromRemote {
				if x.from, err = a.sandbox(x.ctx, from.id); err != nil {
					return err
				}
			}
			if toRemote {
				if x.to, err = a.sandbox(x.ctx, to.id); err != nil {
					return err
				}
			} else if owner != "" {
				return usage(cmd, "cp --owner: the destination is no sandbox")
			}
			switch {
			case fromRemote && toRemote:
				return x.across(from.path, to.path)
			case toRemote:
				return x.up(args[0], to.path)
			default:
				return x.down(from.path, args[1])
			}
		},
	}
	cmd.Flags().StringVarP(&user, "user", "u", "", "act as this user inside (default: the sandbox's)")
	cmd.Flags().StringVar(&owner, "owner", "", "give what is copied into a sandbox to NAME, UID or UID:GID")
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
	a        *app
	ctx      context.Context // of that call
	from, to *client.Sandbox // nil: this machine
	user     string
	owner    string
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

// stat asks what a path inside is; nil if there is none, or if the sandbox does not let it be known. Without an answer
// nothing may be copied: what is there would be taken for nothing.
func (x copier) stat(sb *client.Sandbox, p string) (*sandseav1.FileInfo, error) {
	info, err := sb.Stat(x.ctx, &sandseav1.StatFileRequest{Path: p, User: x.user})
	if e := errdefs.From(err); e != nil {
		if e.Kind == errdefs.NotFound || e.Kind == errdefs.Denied || e.Errno == int(syscall.ENOTDIR) {
			return nil, nil
		}
		return nil, err
	}
	return info, nil
}

func isDir(info *sandseav1.FileInfo) bool {
	return info.GetType() == sandseav1.FileType_FILE_TYPE_DIRECTORY
}

// into gives the path of a destination inside: below a directory it takes the source's name. there is what it is now.
func (x copier) into(dst, name string) (target string, there *sandseav1.FileInfo, err error) {
	there, err = x.stat(x.to, dst)
	if err == nil && (strings.HasSuffix(dst, "/") || isDir(there)) {
		dst = path.Join(dst, name)
		there, err = x.stat(x.to, dst)
	}
	return dst, there, err
}

func (x copier) up(src, dst string) error {
	p := x.a.io.NewProgress()
	defer p.Clear()
	if src == "-" {
		there, err := x.stat(x.to, dst)
		if err != nil {
			return err
		}
		return x.upTar(dst, there, &meter{r: x.a.input(x.ctx), p: p, name: "stdin"})
	}
	st, err := os.Stat(src)
	if err != nil {
		return fmt.Errorf("cp: %w", err)
	}
	abs, err := filepath.Abs(src)
	if err != nil {
		return fmt.Errorf("cp: %w", err)
	}
	name := filepath.Base(abs)
	dst, there, err := x.into(dst, name)
	if err != nil {
		return err
	}
	if st.IsDir() {
		return x.upTree(src, dst, there, &meter{p: p, name: name})
	}
	f, err := x.open(src, st.Mode(), os.O_RDONLY, "somebody to write to ")
	if err != nil {
		return fmt.Errorf("cp: %w", err)
	}
	defer f.Close()
	m := &meter{r: &interruptible{ctx: x.ctx, r: f, space: make([]byte, 256<<10)}, p: p, name: name}
	var size *int64
	if st.Mode().IsRegular() { // the size of a pipe or device says nothing
		m.total = st.Size()
		size = &m.total
	}
	return x.write(dst, uint32(st.Mode().Perm()), size, m)
}

// open opens a file of this machine. A pipe keeps us waiting for its other end; the wait ends with the call, and the
// goroutine that waits is left behind.
func (x copier) open(name string, mode fs.FileMode, flag int, waitFor string) (*os.File, error) {
	if mode&fs.ModeNamedPipe == 0 {
		return os.OpenFile(name, flag, 0)
	}
	defer x.a.io.Waiting(waitFor+ui.Text(name), 0)()
	type opened struct {
		f   *os.File
		err error
	}
	got := make(chan opened)
	go func() {
		f, err := os.OpenFile(name, flag, 0)
		select {
		case got <- opened{f, err}:
		case <-x.ctx.Done():
			if err == nil {
				_ = f.Close() // nothing went through it
			}
		}
	}()
	select {
	case o := <-got:
		return o.f, o.err
	case <-x.ctx.Done():
		return nil, context.Cause(x.ctx)
	}
}

// write makes one file inside.
func (x copier) write(dst string, mode uint32, size *int64, r io.Reader) error {
	x.a.undone = "the file in the sandbox is as it was"
	h := &sandseav1.WriteFileHeader{Path: dst, User: x.user, Mode: mode, Size: size, Owner: x.owner}
	_, err := x.to.WriteFile(x.ctx, h, r)
	return err
}

func (x copier) upTree(src, dst string, there *sandseav1.FileInfo, m *meter) error {
	pr, pw := io.Pipe()
	m.r = pr
	skipped := make(chan []string, 1)
	go func() {
		left, err := packSome(src, pw)
		skipped <- left
		pw.CloseWithError(err)
	}()
	err := x.upTar(dst, there, m)
	pr.CloseWithError(io.ErrClosedPipe)
	select {
	case left := <-skipped:
		x.noteSkipped(left)
	case <-x.ctx.Done(): // the reader of a file that gives nothing cannot be told to stop
	}
	return err
}

// upTar unpacks a stream inside. Of a directory that was not there before, an error leaves nothing.
func (x copier) upTar(dst string, there *sandseav1.FileInfo, r io.Reader) error {
	x.a.undone = "part of the tree may be in the sandbox"
	_, err := x.to.UploadTar(x.ctx, &sandseav1.UploadTarHeader{Path: dst, User: x.user, Owner: x.owner}, r)
	if err == nil || there != nil {
		return err
	}
	ctx, stop := context.WithTimeoutCause(context.WithoutCancel(x.ctx), undoLimit, errUndo)
	defer stop()
	if rerr := x.to.RemoveFile(ctx, &sandseav1.RemoveFileRequest{Path: dst, User: x.user, Recursive: true}); rerr == nil {
		x.a.undone = "nothing of the tree is in the sandbox"
	}
	return err
}

// undoLimit bounds what is taken back after a copy broke off.
const undoLimit = 10 * time.Second

var errUndo = errors.New("taking back took longer than 10 s")

// across copies from one sandbox to another, through this machine and without a file on it.
func (x copier) across(src, dst string) error {
	info, err := x.from.Stat(x.ctx, &sandseav1.StatFileRequest{Path: src, User: x.user})
	if err != nil {
		return err
	}
	name := path.Base(path.Clean("/" + src))
	dst, there, err := x.into(dst, name)
	if err != nil {
		return err
	}
	p := x.a.io.NewProgress()
	defer p.Clear()
	pr, pw := io.Pipe()
	m := &meter{r: pr, p: p, name: name}
	skipped := make(chan []string, 1)
	go func() {
		var left []string
		var err error
		if isDir(info) {
			left, err = x.from.DownloadTar(x.ctx, &sandseav1.DownloadTarRequest{Path: src, User: x.user}, pw)
		} else {
			_, err = x.from.ReadFile(x.ctx, &sandseav1.ReadFileRequest{Path: src, User: x.user}, pw)
		}
		skipped <- left
		pw.CloseWithError(err)
	}()
	if isDir(info) {
		err = x.upTar(dst, there, m)
	} else {
		m.total = info.GetSize()
		err = x.write(dst, info.GetMode()&0o777, nil, m)
	}
	pr.CloseWithError(io.ErrClosedPipe)
	x.noteSkipped(<-skipped)
	return err
}

func (x copier) down(src, dst string) error {
	if dst == "-" {
		skipped, err := x.from.DownloadTar(x.ctx, &sandseav1.DownloadTarRequest{Path: src, User: x.user}, x.a.io.Out)
		x.noteSkipped(skipped)
		return err
	}
	info, err := x.from.Stat(x.ctx, &sandseav1.StatFileRequest{Path: src, User: x.user})
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
	if isDir(info) {
		return x.downTree(src, dst, m)
	}
	m.total = info.GetSize()
	return x.downFile(src, dst, fs.FileMode(info.GetMode())&0o777, m)
}

// downFile writes beside the target and renames, so that a broken copy leaves the old file. What is there and is no
// file, as /dev/null or a pipe, is written to; a link stays, and what it names is the target.
func (x copier) downFile(src, dst string, mode fs.FileMode, m *meter) error {
	if st, err := os.Stat(dst); err == nil {
		if !st.Mode().IsRegular() {
			return x.downInto(src, dst, st.Mode(), m)
		}
		if dst, err = filepath.EvalSymlinks(dst); err != nil {
			return fmt.Errorf("cp: %w", err)
		}
	}
	f, err := os.CreateTemp(filepath.Dir(dst), ".sandsea-*")
	if err != nil {
		return fmt.Errorf("cp: %w", err)
	}
	defer os.Remove(f.Name())
	defer f.Close()
	x.a.undone = dst + " is as it was"
	if err := x.downTo(src, f, m); err != nil {
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

// downInto writes a file to a device or a pipe.
func (x copier) downInto(src, dst string, mode fs.FileMode, m *meter) error {
	f, err := x.open(dst, mode, os.O_WRONLY, "somebody to read from ")
	if err != nil {
		return fmt.Errorf("cp: %w", err)
	}
	x.a.undone = "part of it may be in " + dst
	if err := errors.Join(x.downTo(src, f, m), f.Close()); err != nil {
		return fmt.Errorf("cp: %w", err)
	}
	return nil
}

// downTo writes a file to w.
func (x copier) downTo(src string, w io.Writer, m *meter) error {
	counted := writerFunc(func(b []byte) (int, error) {
		m.count(len(b), false)
		return w.Write(b)
	})
	_, err := x.from.ReadFile(x.ctx, &sandseav1.ReadFileRequest{Path: src, User: x.user}, counted)
	return err
}

type writerFunc func([]byte) (int, error)

func (f writerFunc) Write(b []byte) (int, error) { return f(b) }

func (x copier) noteSkipped(list []string) {
	for i, s := range list {
		if i == 10 {
			x.a.io.Note("sandsea: %d more left out", len(list)-10)
			return
		}
		x.a.io.Note("sandsea: left out %s", ui.Text(s))
	}
}
