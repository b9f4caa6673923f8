package nodeapi

import (
	"context"
	"time"

	"connectrpc.com/connect"

	"github.com/sandsea/sandsea/api/errdefs"
	sandseav1 "github.com/sandsea/sandsea/api/sandsea/v1"
	"github.com/sandsea/sandsea/internal/chronus/files"
)

func (f fileService) Change(ctx context.Context, r *connect.Request[sandseav1.ChangeFileRequest],
) (*connect.Response[sandseav1.ChangeFileResponse], error) {
	m := r.Msg
	a := files.Attrs{Mode: m.Mode, Owner: m.GetOwner(), NoFollow: m.GetNoFollow()}
	if t := m.GetModifiedAt(); t != nil {
		if err := t.CheckValid(); err != nil || t.AsTime().Equal(time.Time{}) {
			return nil, errdefs.New(errdefs.Invalid, m.GetPath(), "modified_at is no time").WithField("modified_at", "").
				WithHint("Give a time from the year 2 on")
		}
		a.ModTime = t.AsTime()
	}
	v, done, err := f.view(ctx, r.Spec().Procedure, r.Header(), m.GetId(), m.GetUser())
	if err != nil {
		return nil, err
	}
	defer done()
	info, err := v.Change(ctx, m.GetPath(), a)
	if err != nil {
		return nil, err
	}
	return connect.NewResponse(&sandseav1.ChangeFileResponse{Info: toInfo(info)}), nil
}

func (f fileService) MakeLink(ctx context.Context, r *connect.Request[sandseav1.MakeLinkRequest],
) (*connect.Response[sandseav1.MakeLinkResponse], error) {
	m := r.Msg
	v, done, err := f.view(ctx, r.Spec().Procedure, r.Header(), m.GetId(), m.GetUser())
	if err != nil {
		return nil, err
	}
	defer done()
	if err := v.Symlink(ctx, m.GetTarget(), m.GetPath()); err != nil {
		return nil, err
	}
	info, err := v.Stat(ctx, m.GetPath(), true)
	if err != nil {
		return nil, err
	}
	return connect.NewResponse(&sandseav1.MakeLinkResponse{Info: toInfo(info)}), nil
}
