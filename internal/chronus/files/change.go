package files

import (
	"context"
	"errors"
	"time"

	"github.com/sandsea/sandsea/api/errdefs"
)

// Attrs are what Change sets.
type Attrs struct {
	Mode    *uint32   // permission, set-id and sticky bits; nil: left
	Owner   string    // as LookupUser reads it; "": left
	ModTime time.Time // zero: left
	// NoFollow changes a symbolic link itself, which has no mode.
	NoFollow bool
}

// Change sets mode, owner and time of a file and gives what it is then. The user must have the right to each, as chmod,
// chown and touch ask it: an owner can be given by root only. The group of an owner without one is that user's own.
func (v *View) Change(ctx context.Context, path string, a Attrs) (Info, error) {
	abs, err := v.abs(path)
	if err != nil {
		return Info{}, err
	}
	r := request{op: opSetattr, path: abs}
	if a.NoFollow {
		r.flags |= flagNoFollow
	}
	if a.Mode != nil {
		if a.NoFollow {
			return Info{}, errdefs.New(errdefs.Invalid, path, "a symbolic link has no mode").WithField("mode", "").
				WithHint("Leave out no_follow, or the mode")
		}
		if err := checkMode(path, *a.Mode); err != nil {
			return Info{}, err
		}
		r.flags |= flagSetMode
		r.mode = *a.Mode
	}
	if !a.ModTime.IsZero() {
		r.flags |= flagSetMtime
		r.mtime = a.ModTime
	}
	if a.Owner != "" {
		ids, err := v.owner(ctx, a.Owner)
		if err != nil {
			return Info{}, err
		}
		r.flags |= flagSetOwner
		r.uid, r.gid = ids.UID, ids.GID
	}
	if r.flags&(flagSetMode|flagSetOwner|flagSetMtime) == 0 {
		return Info{}, errdefs.New(errdefs.Invalid, path, "nothing to change").
			WithHint("Give a mode, an owner or a time")
	}
	if _, err := v.one(ctx, path, r); err != nil {
		return Info{}, err
	}
	return v.Stat(ctx, path, a.NoFollow)
}

// GivingTo is the view with another owner for what Write and UploadTar make in it, as LookupUser reads it; empty is the
// user. The user must have the right to give files away.
func (v *View) GivingTo(ctx context.Context, owner string) (*View, error) {
	if owner == "" {
		return v, nil
	}
	ids, err := v.owner(ctx, owner)
	if err != nil {
		return nil, err
	}
	out := *v
	out.gives = &ids
	return &out, nil
}

// owner finds the ids of an owner inside the sandbox.
func (v *View) owner(ctx context.Context, who string) (ownerIDs, error) {
	u, err := v.h.LookupUser(ctx, who)
	if e, ok := errors.AsType[*errdefs.Error](err); ok && e.Field == "user" {
		e.Field = "owner"
	}
	return ownerIDs{u.IDs.UID, u.IDs.GID}, err
}

// ownerIDs are who a file is given to.
type ownerIDs struct{ UID, GID uint32 }
