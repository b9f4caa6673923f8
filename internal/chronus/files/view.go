package files

import (
	"context"
	"errors"
	"fmt"
	"io"
	"iter"
	"os"
	"strings"
	"sync"
	"syscall"
	"time"

	"github.com/sandsea/sandsea/api/errdefs"
)

// Type is the kind of thing that a path names.
type Type uint8

// The types. Other is a pipe, socket or device.
const (
	Regular Type = iota + 1
	Directory
	Symlink
	Other
)

// Info describes what a path names, with the numbers of users as they are inside the sandbox.
type Info struct {
	Path    string
	Type    Type
	Size    int64
	Mode    uint32 // permission, set-id and sticky bits
	UID     uint32
	GID     uint32
	ModTime time.Time
	Link    string // target of a symbolic link
	Inode   uint64
	Links   uint32

	dev uint64
}

func infoOf(path string, s wireStat, link string) Info {
	i := Info{
		Path: path, Type: Other, Size: s.size, Mode: s.mode & modePerm, UID: s.uid, GID: s.gid, ModTime: s.mtime,
		Link: link, Inode: s.inode, Links: s.links, dev: s.dev,
	}
	switch s.mode & modeType {
	case modeRegular:
		i.Type = Regular
	case modeDir:
		i.Type = Directory
	case modeLink:
		i.Type = Symlink
	}
	return i
}

// Stat describes a path; with noFollow, a symbolic link itself.
func (v *View) Stat(ctx context.Context, path string, noFollow bool) (Info, error) {
	abs, err := v.abs(path)
	if err != nil {
		return Info{}, err
	}
	r := request{op: opStat, path: abs}
	if noFollow {
		r.flags |= flagNoFollow
	}
	rep, err := v.one(ctx, path, r)
	if err != nil {
		return Info{}, err
	}
	return infoOf(abs, rep.stat, string(rep.data)), nil
}

// Open opens a regular file for reading. The size in Info is that of the descriptor.
func (v *View) Open(ctx context.Context, path string) (*os.File, Info, error) {
	abs, err := v.abs(path)
	if err != nil {
		return nil, Info{}, err
	}
	rep, err := v.one(ctx, path, request{op: opOpen, path: abs})
	if err != nil {
		return nil, Info{}, err
	}
	info := infoOf(abs, rep.stat, "")
	st, err := rep.file.Stat()
	if err != nil {
		_ = rep.file.Close()
		return nil, Info{}, ofOS(path, err)
	}
	info.Size = st.Size()
	return rep.file, info, nil
}

// List yields what a directory holds, in batches and no order, without "." and "..". What comes and goes while it is
// listed may be there or not. An error is the last that is yielded.
func (v *View) List(ctx context.Context, path string) iter.Seq2[[]Info, error] {
	return func(yield func([]Info, error) bool) {
		abs, err := v.abs(path)
		if err != nil {
			yield(nil, err)
			return
		}
		rep, s, err := v.first(ctx, path, request{op: opDir, path: abs})
		if err != nil {
			yield(nil, err)
			return
		}
		defer s.release()
		prefix := strings.TrimRight(abs, "/") + "/"
		for batch, err := range v.entries(ctx, s, path, rep.handle) {
			if err != nil {
				yield(nil, err)
				return
			}
			infos := make([]Info, len(batch))
			for i, e := range batch {
				infos[i] = infoOf(prefix+e.name, e.stat, e.link)
			}
			if !yield(infos, nil) {
				return
			}
		}
	}
}

// entries yields the entries of an open directory and closes it.
func (v *View) entries(ctx context.Context, s lease, path string, handle uint32) iter.Seq2[[]wireEntry, error] {
	return func(yield func([]wireEntry, error) bool) {
		for {
			rep, err := v.next(ctx, s, path, request{op: opNext, handle: handle})
			if err != nil {
				v.undo(ctx, s, handle)
				yield(nil, err)
				return
			}
			if rep.count == 0 {
				return // and the handle is gone
			}
			batch, err := decodeEntries(rep.count, rep.data)
			if err != nil {
				s.fail(fmt.Errorf("the file helper broke the rules: %w", err))
				yield(nil, errdefs.New(errdefs.Unavailable, path, "%v", err).WithHint(hintRetry).Wrap(err))
				return
			}
			if !yield(batch, nil) {
				v.undo(ctx, s, handle)
				return
			}
		}
	}
}

func checkMode(path string, mode uint32) error {
	if mode > modePerm {
		return errdefs.New(errdefs.Invalid, path, "mode %#o has bits above 07777", mode).WithField("mode", "07777")
	}
	return nil
}

// MakeDir makes a directory of exactly this mode, 0 for 0755. With parents, missing ones are made with mode 0755, and a
// directory that exists is left as it is.
func (v *View) MakeDir(ctx context.Context, path string, mode uint32, parents bool) error {
	abs, err := v.abs(path)
	if err != nil {
		return err
	}
	if err := checkMode(path, mode); err != nil {
		return err
	}
	if mode == 0 {
		mode = 0o755
	}
	r := request{op: opMkdir, path: abs, mode: mode}
	if parents {
		r.flags |= flagParents
	}
	_, err = v.one(ctx, path, r)
	return err
}

// Remove removes a file, link or empty directory; recursive also a directory with all that is in it, and then a missing
// path is no error. Links are removed, never followed. It stops at the first thing that cannot be removed.
func (v *View) Remove(ctx context.Context, path string, recursive bool) error {
	abs, err := v.abs(path)
	if err != nil {
		return err
	}
	if !recursive {
		_, err = v.one(ctx, path, request{op: opUnlink, path: abs})
		return err
	}
	// It goes in slices, so that other calls of the user get their turn.
	for idle := 0; ; {
		rep, err := v.one(ctx, path, request{op: opRmtree, path: abs})
		if errors.Is(err, syscall.ENOENT) {
			return nil
		}
		if e, ok := errors.AsType[*errdefs.Error](err); ok && len(rep.data) > 0 {
			e.Msg = fmt.Sprintf("%q in it cannot be removed: %s", rep.data, e.Msg)
		}
		if err != nil || rep.flags&flagMore == 0 {
			return err
		}
		if idle++; rep.count > 0 {
			idle = 0
		}
		if idle > 100 {
			return ofErrno(path, syscall.ENOTEMPTY)
		}
	}
}

// Chmod sets the permission, set-id and sticky bits, through symbolic links.
func (v *View) Chmod(ctx context.Context, path string, mode uint32) error {
	if err := checkMode(path, mode); err != nil {
		return err
	}
	return v.setattr(ctx, path, request{flags: flagSetMode, mode: mode})
}

// Chown sets owner and group, through symbolic links.
func (v *View) Chown(ctx context.Context, path string, uid, gid uint32) error {
	return v.setattr(ctx, path, request{flags: flagSetOwner, uid: uid, gid: gid})
}

// Chtimes sets the time of the last change, through symbolic links.
func (v *View) Chtimes(ctx context.Context, path string, mtime time.Time) error {
	return v.setattr(ctx, path, request{flags: flagSetMtime, mtime: mtime})
}

func (v *View) setattr(ctx context.Context, path string, r request) error {
	abs, err := v.abs(path)
	if err != nil {
		return err
	}
	r.op, r.path = opSetattr, abs
	_, err = v.one(ctx, path, r)
	return err
}

// Symlink makes a symbolic link.
func (v *View) Symlink(ctx context.Context, target, path string) error {
	abs, err := v.abs(path)
	if err != nil {
		return err
	}
	if err := checkPath(target); err != nil {
		if e, ok := errors.AsType[*errdefs.Error](err); ok {
			e.Field = "target"
		}
		return err
	}
	if err := checkTarget(path); err != nil {
		return err
	}
	_, err = v.one(ctx, path, request{op: opSymlink, path: abs, path2: target})
	return err
}

// chunk is how much is moved at a time.
const chunk = 256 << 10

var buffers = sync.Pool{New: func() any { return new([chunk]byte) }}

// errSource parts the errors of the reading side from those of the writing side.
type errSource struct{ error }

func (e errSource) Unwrap() error { return e.error }

// copyBytes copies until the end of src, as long as ctx lives. A read error is an errSource.
func copyBytes(ctx context.Context, dst io.Writer, src io.Reader) (int64, error) {
	buf := buffers.Get().(*[chunk]byte)
	defer buffers.Put(buf)
	var total int64
	for {
		if ctx.Err() != nil {
			return total, errSource{context.Cause(ctx)}
		}
		n, rerr := src.Read(buf[:])
		if n > 0 {
			w, err := dst.Write(buf[:n])
			total += int64(w)
			if err != nil {
				return total, err
			}
		}
		if rerr == io.EOF {
			return total, nil
		}
		if rerr != nil {
			return total, errSource{rerr}
		}
	}
}
