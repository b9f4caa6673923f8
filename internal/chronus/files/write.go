package files

import (
	"context"
	"errors"
	"fmt"
	"io"
	"math"

	"github.com/sandsea/sandsea/api/errdefs"
)

// Write makes a file of what r yields, or gives an existing one new content. Readers see the old file or the new one;
// on any error nothing has changed. Missing parents are made with mode 0755. mode 0 keeps an existing file's mode and
// takes 0644 for a new one. With size, another number of bytes is an error.
//
// It is a replacement, with what follows from it: through a symbolic link it replaces what the link leads to, which
// need not exist; the user must be allowed to write to an existing file and to its directory; owner and group stay
// where the user may give files away, and are the user's else; other hard links keep the old content; extended
// attributes go.
func (v *View) Write(ctx context.Context, path string, mode uint32, size *int64, r io.Reader) (Info, error) {
	abs, err := v.abs(path)
	if err != nil {
		return Info{}, err
	}
	if err := errors.Join(checkTarget(path), checkMode(path, mode)); err != nil {
		return Info{}, err
	}
	if size != nil && *size < 0 {
		return Info{}, errdefs.New(errdefs.Invalid, path, "size is negative").WithField("size", "0")
	}
	rep, s, err := v.first(ctx, path, request{op: opCreate, flags: flagParents, path: abs, mode: 0o755})
	if err != nil {
		return Info{}, err
	}
	defer s.release()
	err = v.fill(ctx, path, rep, size, r)
	if err != nil {
		v.undo(ctx, s, rep.handle)
		return Info{}, err
	}
	commit := request{op: opCommit, handle: rep.handle, mode: mode}
	if mode == 0 {
		commit.flags, commit.mode = flagDefaultMode, 0o644
	}
	if v.gives != nil {
		commit.flags |= flagSetOwner
		commit.uid, commit.gid = v.gives.UID, v.gives.GID
	}
	rep, err = v.next(ctx, s, path, commit)
	if err != nil {
		return Info{}, err
	}
	return infoOf(abs, rep.stat, ""), nil
}

// fill writes the content into the unfinished file and closes this end of it.
func (v *View) fill(ctx context.Context, path string, rep reply, size *int64, r io.Reader) error {
	if size != nil && *size < math.MaxInt64 {
		// One byte more than announced is enough to know.
		r = io.LimitReader(r, *size+1)
	}
	n, err := copyBytes(ctx, rep.file, r)
	if cerr := rep.file.Close(); err == nil {
		err = cerr
	}
	if source, ok := errors.AsType[errSource](err); ok {
		if ctx.Err() != nil {
			return ended(ctx, path, false)
		}
		return fmt.Errorf("%s: read the new content: %w", path, source.error)
	}
	if err != nil {
		return ofOS(path, err)
	}
	if size != nil && n != *size {
		got := fmt.Sprint(n)
		if n > *size {
			got = "more"
		}
		return errdefs.New(errdefs.Invalid, path,
			"%d bytes were announced and %s came; nothing was changed", *size, got).
			WithField("size", fmt.Sprintf("%d bytes", *size)).WithHint("Send exactly the announced bytes")
	}
	return nil
}
