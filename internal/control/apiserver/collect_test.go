package apiserver_test

import (
	"fmt"
	"slices"
	"strings"
	"testing"
	"time"

	"connectrpc.com/connect"

	"github.com/sandsea/sandsea/api/errdefs"
	"github.com/sandsea/sandsea/api/errwire"
	nodev1 "github.com/sandsea/sandsea/api/node/v1"
	pb "github.com/sandsea/sandsea/api/sandsea/v1"
	"github.com/sandsea/sandsea/internal/store"
	"github.com/sandsea/sandsea/internal/store/keys"
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

// keepsNot waits until node 1 has collected, with one layer kept and another not.
func (h *house) keepsNot(kept, gone string) {
	h.t.Helper()
	until(h.t, "collected without "+gone, func() bool {
		now := h.edges[0].Kept()
		return slices.Contains(now, string(digest(kept))) && !slices.Contains(now, string(digest(gone)))
	})
}

func TestLayersAreCollectedWhenANameIsImportedAnew(t *testing.T) {
	h := newHouse(t, 1)
	c := h.admin()
	for _, layer := range []string{"one", "two"} {
		h.edges[0].Builds(&nodev1.Built{Layers: []*pb.Layer{{Digest: string(digest(layer))}}})
		if _, err := importDebian(t.Context(), c, "task"); err != nil {
			t.Fatal(err)
		}
	}
	h.keepsNot("two", "one")
}

func TestLayersAreCollectedWhenAnImportThatRanAtADeletionIsOver(t *testing.T) {
	h := newHouse(t, 1)
	c := h.admin()
	h.edges[0].Builds(&nodev1.Built{Layers: []*pb.Layer{{Digest: string(digest("one"))}}})
	builds, release := buildBlocked(h)
	done := make(chan error, 1)
	go func() {
		_, err := importDebian(t.Context(), c, "task")
		done <- err
	}()
	until(t, "the import runs", func() bool { return builds.Load() == 1 })
	if err := removeImage(t, c, "go", false); err != nil {
		t.Error(err)
	}
	if kept := h.edges[0].Kept(); kept != nil {
		t.Errorf("collected while an import runs, with %v", kept)
	}
	close(release)
	if err := <-done; err != nil {
		t.Fatal(err)
	}
	h.keepsNot("one", "go")
}

// Nobody tells this server when an import of another one ends.
func TestTheSweepCollectsWhatAnImportOfAnotherServerKept(t *testing.T) {
	h := newHouse(t, 1)
	put := store.Put(keys.Import("other"), []byte("{}"))
	for _, op := range []store.Op{put, store.Delete(put.Key)} {
		if _, err := h.store.Txn(t.Context(), nil, []store.Op{op}, nil); err != nil {
			t.Fatal(err)
		}
		if op.Kind == store.OpPut {
			if err := removeImage(t, h.admin(), "go", false); err != nil {
				t.Fatal(err)
			}
		}
		if kept := h.edges[0].Kept(); kept != nil {
			t.Fatalf("collected while an import runs, with %v", kept)
		}
	}
	if err := h.server.Sweep(t.Context(), time.Now()); err != nil {
		t.Fatal(err)
	}
	h.keepsNot("py", "go")
}

func TestLayersAreCollectedEveryHour(t *testing.T) {
	h := newHouse(t, 1)
	sweep := func(in time.Duration) []string {
		t.Helper()
		if err := h.server.Sweep(t.Context(), time.Now().Add(in)); err != nil {
			t.Fatal(err)
		}
		return h.edges[0].Kept()
	}
	if kept := sweep(30 * time.Minute); kept != nil {
		t.Errorf("in half an hour: collected with %v", kept)
	}
	if kept := sweep(time.Hour); !slices.Contains(kept, string(digest("py"))) {
		t.Errorf("in an hour: collected with %v", kept)
	}
}
