package nodeapi

import (
	"context"
	"fmt"
	"strings"
	"unicode/utf8"

	"connectrpc.com/connect"

	sandseav1 "github.com/sandsea/sandsea/api/sandsea/v1"
	"github.com/sandsea/sandsea/internal/chronus/files"
)

var changes = map[files.Change]sandseav1.FileChange{
	files.Ready:      sandseav1.FileChange_FILE_CHANGE_READY,
	files.Created:    sandseav1.FileChange_FILE_CHANGE_CREATED,
	files.Modified:   sandseav1.FileChange_FILE_CHANGE_MODIFIED,
	files.Attributes: sandseav1.FileChange_FILE_CHANGE_ATTRIBUTES,
	files.Removed:    sandseav1.FileChange_FILE_CHANGE_REMOVED,
	files.Moved:      sandseav1.FileChange_FILE_CHANGE_MOVED,
	files.Gap:        sandseav1.FileChange_FILE_CHANGE_GAP,
}

func (f fileService) Watch(ctx context.Context, r *connect.Request[sandseav1.WatchFilesRequest],
	st *connect.ServerStream[sandseav1.WatchFilesResponse],
) error {
	m := r.Msg
	u, err := f.s.open(r.Spec().Procedure, r.Header(), m.GetId())
	if err != nil {
		return err
	}
	defer u.Done()
	v, err := u.Files(ctx, m.GetUser())
	if err != nil {
		return err
	}
	for e, err := range v.Watch(ctx, m.GetPath(), m.GetRecursive()) {
		if err != nil {
			return u.Because(ctx, err)
		}
		out := &sandseav1.WatchFilesResponse{
			Change: changes[e.Change], Path: escaped(e.Path), From: escaped(e.From), Type: toType(e.Type),
		}
		if err := st.Send(out); err != nil {
			return err
		}
	}
	return nil
}

func toType(t files.Type) sandseav1.FileType {
	switch t {
	case files.Regular:
		return sandseav1.FileType_FILE_TYPE_REGULAR
	case files.Directory:
		return sandseav1.FileType_FILE_TYPE_DIRECTORY
	case files.Symlink:
		return sandseav1.FileType_FILE_TYPE_SYMLINK
	case files.Other:
		return sandseav1.FileType_FILE_TYPE_OTHER
	default:
		return sandseav1.FileType_FILE_TYPE_UNSPECIFIED
	}
}

// escaped is a name of the sandbox as a message can carry it: bytes that are no UTF-8 become \xff. It names nothing any
// more; a tar stream carries such names as they are.
func escaped(name string) string {
	if utf8.ValidString(name) {
		return name
	}
	var b strings.Builder
	for len(name) > 0 {
		r, n := utf8.DecodeRuneInString(name)
		if r == utf8.RuneError && n == 1 {
			fmt.Fprintf(&b, `\x%02x`, name[0])
		} else {
			b.WriteString(name[:n])
		}
		name = name[n:]
	}
	return b.String()
}
