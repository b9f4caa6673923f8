package client

import (
	"errors"
	"io/fs"
	"testing"

	"github.com/sandsea/sandsea/api/errdefs"
)

func TestTheLocalTokenThatCannotBeRead(t *testing.T) {
	if err := defaultTokenError(&fs.PathError{Op: "open", Err: fs.ErrNotExist}, 1000); err != nil {
		t.Errorf("none there: %v, want no error before the first call", err)
	}
	err := defaultTokenError(&fs.PathError{Op: "open", Err: fs.ErrPermission}, 1000)
	want := "no token: SANDSEA_TOKEN unset, /var/lib/sandsea/admin.token unreadable for uid 1000. Set SANDSEA_TOKEN_FILE"
	if err == nil || err.Error() != want || !errors.Is(err, errdefs.Unauthenticated) {
		t.Errorf("got %v, want %s", err, want)
	}
}
