package nodeapi_test

import (
	"context"
	"slices"
	"testing"

	"connectrpc.com/connect"

	"github.com/sandsea/sandsea/api/errdefs"
	nodev1 "github.com/sandsea/sandsea/api/node/v1"
	sandseav1 "github.com/sandsea/sandsea/api/sandsea/v1"
	"github.com/sandsea/sandsea/internal/edge/nodeapi"
	"github.com/sandsea/sandsea/internal/image"
	"github.com/sandsea/sandsea/internal/layers/build"
)

// debianOnly asks for what is known, as an import from packages does, and makes an image of one layer if nothing is.
type debianOnly struct {
	nodeapi.Builder
	made image.Digest
}

func (b debianOnly) Debian(ctx context.Context, o build.DebianOptions) (build.Result, error) {
	if res, ok, err := o.Known(ctx, "debian:bookworm", ""); ok || err != nil {
		return res, err
	}
	return build.Result{Name: "debian:bookworm", Layers: []image.Layer{{Digest: b.made}}}, nil
}

// somewhere are the layers that can be had.
type somewhere []image.Digest

func (s somewhere) Ensure(_ context.Context, layers []image.Digest) error {
	for _, d := range layers {
		if !slices.Contains(s, d) {
			return errdefs.New(errdefs.Refused, "node", "image: no node that answers has blob %.19s", d)
		}
	}
	return nil
}

func (somewhere) Collected() {}

func TestAnImageWhoseLayersAreLostIsMadeAgain(t *testing.T) {
	_, old := blobOf(t, []byte("old"))
	_, made := blobOf(t, []byte("made"))
	for name, tc := range map[string]struct {
		has  somewhere
		want image.Digest
	}{"lost": {nil, made}, "here": {somewhere{old}, old}} {
		d := newDoor(t, func(c *nodeapi.Config) { c.Builder, c.Layers = debianOnly{made: made}, tc.has })
		st, err := d.edge.Build(t.Context(), connect.NewRequest(&nodev1.BuildRequest{
			Import: &sandseav1.ImportImageRequest{
				Source: &sandseav1.ImportImageRequest_Debian{Debian: &sandseav1.DebianSource{Suite: "bookworm"}},
			},
			Known: []*nodev1.Built{{
				Name: "debian:bookworm", Packages: "p", Layers: []*sandseav1.Layer{{Digest: string(old)}},
			}},
		}))
		if err != nil {
			t.Fatal(err)
		}
		var got string
		for st.Receive() {
			got = st.Msg().GetBuilt().GetLayers()[0].GetDigest()
		}
		if st.Err() != nil || got != string(tc.want) {
			t.Errorf("%s: built %s, %v, want %s", name, got, st.Err(), tc.want)
		}
		_ = st.Close()
	}
}
