package apiserver_test

import (
	"fmt"
	"slices"
	"strings"
	"testing"

	"connectrpc.com/connect"

	"github.com/sandsea/sandsea/api/errdefs"
	"github.com/sandsea/sandsea/api/errwire"
	pb "github.com/sandsea/sandsea/api/sandsea/v1"
)

func removeImage(t *testing.T, c client, ref string, force bool) error {
	t.Helper()
	_, err := c.images.Delete(t.Context(), connect.NewRequest(&pb.DeleteImageRequest{Ref: ref, Force: force}))
	return errwire.FromConnect(err)
}

func TestNothingIsCollectedWhileAnImageCannotBeRead(t *testing.T) {
	layer := fmt.Sprintf(`{"Digest":%q}`, digest("torn"))
	for name, record := range map[string]string{
		"a record that is cut off":            `{"Name":"torn","Layers":[` + layer,
		"a record of another image":           `{"Name":"py","Layers":[` + layer + `]}`,
		"a record without layers":             `{"Name":"torn"}`,
		"a record with a layer of no digest":  `{"Name":"torn","Layers":[{"Digest":"sha256:1"}]}`,
		"a record whose layers are elsewhere": `{"Name":"torn","Parts":[` + layer + `]}`,
	} {
		t.Run(name, func(t *testing.T) {
			h := newHouse(t, 1)
			c := h.admin()
			h.putImage("torn", "torn")
			create := func() error {
				_, err := c.tryCreate(t.Context(), spec(func(s *pb.SandboxSpec) { s.Environment.Image = "torn" }), "")
				return err
			}
			if err := create(); err != nil {
				t.Fatal(err)
			}
			h.putRecord("torn", record)
			if err := removeImage(t, c, "go", false); err != nil {
				t.Fatal(err)
			}
			if kept := h.edges[0].Kept(); kept != nil {
				t.Errorf("collected with %v", kept)
			}
			if got := h.logs.String(); !strings.Contains(got, "layers not collected") || !strings.Contains(got, "image torn: ") {
				t.Errorf("no word of it: %s", got)
			}
			// What it was before is not true any more, so nobody starts from it.
			until(t, "the image is known to be unreadable", func() bool { return errdefs.KindOf(create()) == errdefs.DataLoss })
			e := kindIs(t, removeImage(t, c, "torn", false), errdefs.DataLoss)
			if !strings.Contains(e.Error(), "sandsea image rm torn") {
				t.Errorf("got %v", e)
			}
			if err := removeImage(t, c, "torn", true); err != nil {
				t.Fatal(err)
			}
			if kept := h.edges[0].Kept(); !slices.Contains(kept, string(digest("py"))) {
				t.Errorf("without that image it is collected with %v", kept)
			}
			kindIs(t, removeImage(t, c, "torn", true), errdefs.NotFound)
		})
	}
}
